"""A world in which clients, nodes and the network between them misbehave, repeatably."""
