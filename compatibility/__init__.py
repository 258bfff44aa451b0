"""
Which versions work together: tests in every cell of a matrix, recorded and reported.

A cell is one version of each of `AXES`. `compatibility.cover` chooses the cells, run by
``make matrix``; ``docs/compatibility.md`` is made from the record by `compatibility.page`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["AXES", "NEXT_DEBIAN", "PAGES", "RECORD", "ROOT", "Cell"]

ROOT = Path(__file__).parents[1]
RECORD = Path(__file__).parent / "recorded" / "compatibility.json"
NEXT_DEBIAN = RECORD.with_name("next_debian.json")
PAGES = (ROOT / "docs" / "compatibility.md", Path(__file__).parent / "README.md")


class Cell(NamedTuple):
    """
    One version of everything that matters.

    Attributes:
        python: Of CPython, major and minor.
        celery: Likewise; kombu is that of the same time, with the same number.
        redis_py: Beginning of the version of the client library.
        server: Program of the lock nodes, with the major version.
        hiredis: ``"on"`` where the answers are parsed in C.
    """

    python: str
    celery: str
    redis_py: str
    server: str
    hiredis: str

    def __str__(self) -> str:
        parser = "with" if self.hiredis == "on" else "without"
        return (
            f"Python {self.python}, Celery {self.celery}, redis-py {self.redis_py}, "
            f"{self.server}, {parser} hiredis"
        )

    @property
    def name(self) -> str:
        """Short, for a command line: ``3.10/5.4/6.4/redis7/on``."""
        return "/".join(self).lower().replace(" ", "")


#: What is supported, by the attribute of `Cell`.
AXES: dict[str, tuple[str, ...]] = {
    "python": ("3.10", "3.11", "3.12", "3.13", "3.14"),
    "celery": ("5.4", "5.5", "5.6", "5.7"),
    "redis_py": ("6.4", "7", "8"),
    "server": ("Redis 7", "Redis 8", "Valkey 9"),
    "hiredis": ("on", "off"),
}
