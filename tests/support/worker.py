"""
Real Celery processes for the acceptance tests: ``celery worker``, ``celery beat`` and others.

Each runs in a session of its own and ends with all its children: at the end of its
``with``, and, by the reaper process, when the test run itself is killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from celery_redlock.testing.reaper import reaper
from support.launcher import Launched, popen
from support.waiting import eventually

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing only since Python 3.11

__all__ = ["CeleryProcess", "Worker"]

SUPPORT = Path(__file__).parents[1]
CAN_PEEK = hasattr(os, "waitid")  # macOS has it from Python 3.13 on
#: How often a worker is started at most whose name a broker has not let go of.
TRIES = 5


class CeleryProcess:
    """
    ``celery -A app command ...`` as a process of its own.

    Args:
        app: Module of the app, or ``module:attribute``; found in *cwd* or on the path.
        command: Words after the app.
        ready: Regular expression of the log line that says it is ready.
        env: Added to the environment of this process.
        cwd: Where it runs.
        start_timeout: Longest wait for *ready* [s].

    Attributes:
        log_path: Where its output goes.
    """

    def __init__(
        self,
        app: str,
        command: Sequence[str],
        *,
        ready: str,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        start_timeout: float = 60.0,
    ) -> None:
        self.command = [sys.executable, "-m", "celery", "-A", app, *command]
        self.env = dict(env or {})
        self.cwd = cwd
        self._ready = re.compile(ready)
        self._start_timeout = start_timeout
        self._folder = tempfile.TemporaryDirectory(prefix="redlock-celery-")
        self.log_path = Path(self._folder.name, "log")
        self._process: subprocess.Popen[bytes] | None = None
        self._last_log: str | None = None
        self._tries = 0

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The main process; its id is that of the process group, too."""
        assert self._process is not None, "not started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        if isinstance(self.process, Launched):
            return not self.process.has_ended()
        if not CAN_PEEK:
            return self.process.poll() is None
        # Looked at, not reaped: as long as it is a zombie, its id and group cannot be another's.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.process.returncode is None and os.waitid(os.P_PID, self.pid, options) is None

    def start(self) -> None:
        """Start it and wait for its line *ready*."""
        self._tries = TRIES
        self._launch()
        eventually(self._has_started, "sign of readiness", timeout=self._start_timeout)

    def _launch(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = popen(
                self.command,
                cwd=self.cwd,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        reaper.watch(self._folder.name, self.pid, group=True, folder=Path(self._folder.name))

    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))
        python = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": path}
        return {**os.environ, **python, **self.env}

    def _has_started(self) -> bool:
        if self._ready.search(self.log()):
            return True
        if self.alive:
            return False
        self._tries -= 1
        is_locked = self._tries and "RESOURCE_LOCKED" in self.log()
        assert is_locked, f"{' '.join(self.command)} has ended:\n{self.log()}"
        time.sleep(1.0)  # RabbitMQ has not noticed yet that one of this name is no more
        self._launch()
        return False

    def log(self) -> str:
        """Return all it wrote so far; once it is stopped, all it ever wrote."""
        if self._last_log is not None:
            return self._last_log
        return self.log_path.read_text(errors="replace")

    def wait_for_log(self, pattern: str, *, timeout: float = 60.0) -> re.Match[str]:
        return eventually(
            lambda: re.search(pattern, self.log()), f"{pattern!r} in the log", timeout=timeout
        )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the main process alone."""
        os.kill(self.pid, number)

    def terminate(self, *, timeout: float = 60.0) -> None:
        """Shut down warmly (SIGTERM) and wait for the end."""
        self.signal(signal.SIGTERM)
        self.wait(timeout=timeout)

    def wait(self, *, timeout: float = 60.0) -> None:
        """
        Wait until the main process has ended.

        Raises:
            AssertionError: It has not; the message says where its threads are, and it is no more.
        """
        try:
            eventually(lambda: not self.alive, f"end of {self.pid}", timeout=timeout)
        except AssertionError as late:
            self.signal(signal.SIGABRT)  # faulthandler writes down all stacks
            with contextlib.suppress(AssertionError):
                eventually(lambda: not self.alive, "end by SIGABRT")
            raise AssertionError(f"{late}\n{self.log()[-10_000:]}") from None

    def kill(self, *, children: bool = True) -> None:
        """``kill -9`` the main process, and its children too unless told otherwise; wait for it."""
        if children:
            self._kill_group()
        else:
            self.signal(signal.SIGKILL)
        self.wait()

    def _kill_group(self) -> None:
        # Valid even when the main process is dead: it was not reaped, see `alive`.
        if self.process.returncode is None or not CAN_PEEK:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """End it with all its children in any case; may be called again."""
        if self._process is not None and self._last_log is None:
            self._kill_group()
            self._process.wait()
            self._last_log = self.log()
        reaper.forget(self._folder.name)
        self._folder.cleanup()


class Worker(CeleryProcess):
    """
    ``celery -A app worker``.

    Args:
        app: As of :class:`CeleryProcess`, with *env*, *cwd* and *start_timeout*.
        pool: ``prefork``, ``threads``, ``solo``, ``gevent`` or ``eventlet``.
        concurrency: Number of children, threads or greenlets [1, > 0].
        name: Node name, before the ``@``.
        args: More options of ``celery worker``.
    """

    def __init__(
        self,
        app: str,
        *,
        pool: str = "prefork",
        concurrency: int = 2,
        name: str = "w1",
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        start_timeout: float = 60.0,
    ) -> None:
        # Without mingle and gossip: they make workers know each other, and a start take a second.
        options = ["-l", "INFO", "-P", pool, "-c", str(concurrency), "-n", f"{name}@localhost"]
        super().__init__(
            app,
            ["worker", *options, "--without-mingle", "--without-gossip", *args],
            ready=rf"{re.escape(name)}@localhost ready\.",
            env=env,
            cwd=cwd,
            start_timeout=start_timeout,
        )
