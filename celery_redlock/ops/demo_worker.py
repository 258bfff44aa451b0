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

__all__ = ["PROCESSES", "DemoWorker"]

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


class DemoWorker:
    """
    ``celery worker`` in a session of its own; ends with all its children.

    Args:
        folder: Where it runs and writes its log; removed if this process is killed.
        environment: Added to that of this process; tells the app where the servers are.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        """What it wrote so far."""
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / "worker.log").read_text(errors="replace")
        return ""

    @property
    def is_ready(self) -> bool:
        """Whether it takes tasks."""
        return "demo@localhost ready." in self.log

    @property
    def is_alive(self) -> bool:
        """Whether its main process is there."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and return at once; see `is_ready`."""
        with (self._folder / "worker.log").open("ab") as log:
            # A session of its own: a terminal's Ctrl-C must not reach it, but `stop` must
            # reach its children.
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *self._options()],
                cwd=self._folder,
                env=self._whole_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        key = str(self._folder)
        reaper.watch(key, self._process.pid, group=True, folder=self._folder)

    def _whole_environment(self) -> dict[str, str]:
        path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path)
        # Killed, it cannot take its temporary files along: they go with the folder.
        own = {"TMPDIR": str(self._folder)}
        program = {"REDLOCK_DEMO_PATH": path, "REDLOCK_DEMO_OWNER": str(os.getpid())}
        return {**os.environ, **self._environment, **own, **program}

    @staticmethod
    def _options() -> list[str]:
        # Without mingle and gossip: they make workers know each other, and a start take a second.
        alone = ["--without-mingle", "--without-gossip", "--without-heartbeat"]
        size = ["-P", "prefork", "-c", str(PROCESSES)]
        return [
            "-A",
            demo_app.__name__,
            "worker",
            "-l",
            "INFO",
            "-n",
            "demo@localhost",
            *size,
            *alone,
        ]

    def stop(self) -> None:
        """End it and its children at once; doing so again is no error."""
        if self._process is None:
            return
        # Its children may outlive it, so the group is told whatever became of it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # The process id may now become somebody else's; the folder is still ours.
        reaper.watch(str(self._folder), None, folder=self._folder)
