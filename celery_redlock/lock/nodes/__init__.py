"""The lock nodes: addresses, connections, one node, all at once."""
