"""Messages: the header, a delivery, its copies."""
