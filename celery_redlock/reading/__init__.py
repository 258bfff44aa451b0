"""Questions of an operator to the lock nodes: how they are, one lock, all locks, the journal."""
