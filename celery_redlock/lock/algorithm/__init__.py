"""The lock's algorithm: decisions, and generators that yield what to ask of the nodes."""
