"""What an operator asks the lock nodes: how they are, one lock, all locks, the journal."""
