"""Keys as Redis has them, and the locks' Lua scripts over them, in this process."""
