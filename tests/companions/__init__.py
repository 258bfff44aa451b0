"""Software that others wrote and that watches or stores tasks, with protected tasks under it."""
