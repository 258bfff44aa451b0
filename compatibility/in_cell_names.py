"""How a run in a cell is told what to do; apart from the plug-in, which needs pytest."""

from __future__ import annotations

__all__ = ["FOUND", "KIND"]

#: Environment variables: the kind of the servers, and the file for what was found.
KIND, FOUND = "CELL_SERVER", "CELL_FOUND"
