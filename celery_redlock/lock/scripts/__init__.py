"""Scripts that run inside a node: how they are sent, and what their replies say."""
