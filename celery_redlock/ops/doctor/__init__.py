"""
The doctor: facts are gathered once, and pure functions find what is set up wrongly.

`facts` is what is known; `diagnosis` gathers it, of nodes by `nodes`, and makes findings of it by
`check_cluster`, `check_nodes`, `check_votes` and `check_tasks`. A check is named after the code of
the finding that it makes.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ERROR", "LEVELS", "NOTE", "WARNING", "Finding"]

#: Locks cannot be relied upon, or do not work; they do until something else happens; good to know.
ERROR, WARNING, NOTE = "error", "warning", "note"
LEVELS = (ERROR, WARNING, NOTE)


@dataclass(frozen=True)
class Finding:
    level: str  # one of `LEVELS`
    code: str  # its name for scripts; does not change
    where: str  # a node, a task, a setting, or "" for all of it
    what: str  # what was found, and why it matters
    fix: str  # what to do about it
