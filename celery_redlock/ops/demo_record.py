"""
What the bodies of the demo's tasks really did, told by the bodies themselves.

Each writes a JSON line when it starts, while it runs and when it ends, with one O_APPEND write,
so that lines of different processes neither mix nor get lost when a process is killed. The
demo's claims are computed from these lines, and from nothing that the library says of itself.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing only since Python 3.11

__all__ = ["BodyRecord", "Run", "overlapping", "read_runs"]


class BodyRecord:
    """
    Writes down one run of a task's body; start and end are those of its ``with``.

    Args:
        path: File that all bodies write to.
        job: What must not run twice at the same time, in plain words.
        fence: Number of the lock that the body runs under, None without one.
    """

    def __init__(self, path: Path, job: str, fence: int | None) -> None:
        self._path = path
        self._facts = {"run": uuid.uuid4().hex, "job": job, "fence": fence}

    def __enter__(self) -> Self:
        self.write("start")
        return self

    def __exit__(self, *_: object) -> None:
        self.write("end")

    def write(self, kind: str, **facts: Any) -> None:
        """Add a line of this *kind* with more *facts*."""
        # The monotonic clock is one for all processes of a machine, and nobody can set it.
        line = {"at": time.monotonic(), "kind": kind, **self._facts, **facts}
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, json.dumps(line).encode() + b"\n")
        finally:
            os.close(file)


@dataclass
class Run:
    """
    One run of a task's body.

    Attributes:
        job: What must not run twice at the same time.
        started: When [s, `time.monotonic`, the same clock in all processes].
        fence: Number of its lock, None without one.
        ended: When [s, as *started*]; None while it runs, or if it was killed.
        renewals: How often its lock had been renewed when it last told.
    """

    job: str
    started: float
    fence: int | None
    ended: float | None = None
    renewals: int = 0

    @property
    def lasted(self) -> float:
        """How long it took, or takes up to now [s]."""
        return (time.monotonic() if self.ended is None else self.ended) - self.started


def read_runs(path: Path) -> list[Run]:
    """Return the runs that are written down in *path*, in the order of their start."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    runs: dict[str, Run] = {}
    for line in lines:
        if not line.endswith(b"\n"):
            break  # is being written at this moment
        fact = json.loads(line)
        if fact["kind"] == "start":
            runs[fact["run"]] = Run(fact["job"], fact["at"], fact["fence"])
        run = runs[fact["run"]]
        run.renewals = fact.get("renewals", run.renewals)
        if fact["kind"] == "end":
            run.ended = fact["at"]
    return sorted(runs.values(), key=lambda run: run.started)


def overlapping(runs: Iterable[Run]) -> int:
    """Return how many of *runs* started while another run of the same job was not over."""
    until: dict[str, float] = {}
    found = 0
    for run in sorted(runs, key=lambda run: run.started):
        found += run.started < until.get(run.job, 0.0)
        ended = float("inf") if run.ended is None else run.ended
        until[run.job] = max(ended, until.get(run.job, 0.0))
    return found
