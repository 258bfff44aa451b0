"""
A database as a lock node: the scripts that Redis runs, over keys that are rows.

To everything above it is a node like any other. Its connection is one end of a socket pair, at the
other end of which a thread (`server`) reads commands as Redis does, and answers those that wait in
one transaction (`batch`): it locks and loads their keys, runs their Lua over them in memory, and
writes what changed. Only `sqlite`, `postgresql` and the modules named after it know SQL's dialects.
"""
