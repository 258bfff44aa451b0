"""How a run in a cell is told what to do; apart from the plug-in, which needs pytest."""

from __future__ import annotations

__all__ = ["FOUND", "KIND", "PROGRAM"]

#: Environment variables: the kind of the servers, the program of those that the package does not
#: bring along, and the file for what was found.
KIND, PROGRAM, FOUND = "CELL_SERVER", "CELL_PROGRAM", "CELL_FOUND"
