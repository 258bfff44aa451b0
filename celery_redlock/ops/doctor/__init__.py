"""
What may be set up wrongly: facts are gathered once, and pure functions find what is amiss.

`facts` is what is known; `diagnosis` has it gathered, of nodes by `nodes`, and has findings made of
it by `check_cluster`, `check_nodes` and `check_tasks`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ERROR", "LEVELS", "NOTE", "WARNING", "Finding"]

#: Locks cannot be relied upon, or do not work; they do until something else happens; good to know.
ERROR, WARNING, NOTE = "error", "warning", "note"
LEVELS = (ERROR, WARNING, NOTE)


@dataclass(frozen=True)
class Finding:
    """
    One thing that is not as it should be.

    Attributes:
        level: One of `LEVELS`.
        code: Its name for scripts; does not change.
        where: A node, a task, a setting, or "" for all of it.
        what: What was found, and why it matters.
        fix: What to do about it.
    """

    level: str
    code: str
    where: str
    what: str
    fix: str
