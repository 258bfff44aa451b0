"""Lock names: from a call's arguments to the names of its locks."""
