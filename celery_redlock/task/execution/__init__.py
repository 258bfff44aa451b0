"""One execution: begin, body, end."""
