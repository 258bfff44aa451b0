"""The demo's Celery worker: a real ``celery worker`` process, with children of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from celery_redlock.ops import demo_app
from celery_redlock.ops.reaper import reaper

__all__ = ["PROCESSES", "Worker"]

#: As many as can run all bodies of a chapter and still look at what else arrives.
PROCESSES = 8
# Our import path and no other: `python -m celery` would import a celery.py of the folder it is
# started in. The first look is for the moment in which the reaper does not know of it yet.
PROGRAM = """
import os, sys
if os.getppid() != int(os.environ.pop("REDLOCK_DEMO_OWNER")):
    sys.exit("the demo is gone")
sys.path[:] = os.environ.pop("REDLOCK_DEMO_PATH").split(os.pathsep)
sys.argv[0] = "celery"
from celery.__main__ import main
main()
"""
# Without mingle and gossip: they make workers know each other, and a start take a second.
OPTIONS = "-l INFO -P prefork --without-mingle --without-gossip --without-heartbeat"


class Worker:
    """``celery worker`` in a session of its own, with children; each start is another worker."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._number = 0

    @property
    def log(self) -> str:
        """What it wrote so far."""
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / "worker.log").read_text(errors="replace")
        return ""

    @property
    def is_ready(self) -> bool:
        """Whether it takes tasks."""
        return f"worker-{self._number}@demo ready." in self.log

    @property
    def has_ended(self) -> bool:
        """Whether its main process is gone, and not by our doing."""
        return self._process is not None and self._process.poll() is not None

    def start(self) -> None:
        """Start it and return at once; see `is_ready`."""
        self._number += 1
        who = ["-n", f"worker-{self._number}@demo", "-c", str(PROCESSES)]
        command = ["-A", demo_app.__name__, "worker", *who, *OPTIONS.split()]
        path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        # Killed, it cannot take its temporary files along: they go with the folder.
        own = {"TMPDIR": str(self._folder), "REDLOCK_DEMO_PATH": path}
        own["REDLOCK_DEMO_OWNER"] = str(os.getpid())
        with (self._folder / "worker.log").open("ab") as log:
            # A session of its own: a terminal's Ctrl-C must not reach it, but `kill` must reach
            # its children.
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *command],
                cwd=self._folder,
                env={**os.environ, **self._environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        key = str(self._folder)
        reaper.watch(key, self._process.pid, group=True, folder=self._folder)

    def kill(self) -> None:
        """End it and its children with SIGKILL; doing so again is no error."""
        process, self._process = self._process, None
        if process is None:
            return
        # Its children may outlive it, so the group is told whatever became of it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # The process id may now become somebody else's; the folder is still ours.
        reaper.watch(str(self._folder), None, folder=self._folder)
