"""What a guard of the protocol is, and what switches it off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_redlock.lock.scripts.scripting import Script

__all__ = ["Guard"]


@dataclass(frozen=True)
class Guard:
    """
    One thing that the protocol does so that a law holds.

    Attributes:
        name: Of the guard.
        rule: What it sees to, in words.
        patches: What switches it off: an object, the name of what it has, and a stand-in.
        lua: The same for scripts: which one, what it says, and what it says without the guard.
    """

    name: str
    rule: str
    patches: tuple[tuple[Any, str, Any], ...] = ()
    lua: tuple[tuple[Script, str, str], ...] = ()
