"""A script in a process of its own, on lock nodes, and what it tells."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import celery_redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.testing.servers import Server
from support.proxy import Link
from support.stored import RENEWED, ROOMY
from support.waiting import eventually

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing only since Python 3.11

__all__ = ["Script", "enrol"]

#: What every script begins with: `lock` on the nodes of its arguments, `tell` to the test.
HEAD = f"""
import contextlib, json, os, signal, socket, sys, threading, time

from celery_redlock.errors import LockLost, LockTaken, QuorumUnavailable, RedlockError
from celery_redlock.lock.algorithm.results import ReleaseOutcome
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.nodes import connections
from celery_redlock.reading.health import connect, probe

connections.FIRST_CONNECT = 20.0  # a server that is slow to answer is not down
RENEWED = {RENEWED}

def tell(**what):
    os.write(1, json.dumps(what).encode() + b"\\n")

def new():
    return Redlock.from_urls(sys.argv[1:], **SETTINGS)

lock = new()
"""


def enrol(nodes: Sequence[Server | Link], **settings: Any) -> list[str]:
    urls = [node.url for node in nodes]
    rules = Rules(**{**ROOMY, **settings})
    enrolled = {"enrolled"}  # of those that did not answer in time, at another try
    eventually(lambda: {*bootstrap(urls, rules).values()} == enrolled, "enrolment of all")
    return urls


class Script:
    """
    A process that runs *source*; a context manager, at whose end no process is left.

    Args:
        source: Goes on where the head above ends.
        urls: Of the nodes.
        before: Comes before the head.
        **settings: Rules that differ from `ROOMY`.
    """

    def __init__(
        self, source: str, urls: Sequence[str], *, before: str = "", **settings: Any
    ) -> None:
        rules = {**ROOMY, **settings}
        whole = f"{before}\nSETTINGS = {rules!r}\n{HEAD}\n{textwrap.dedent(source)}"
        path = [str(Path(celery_redlock.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed at the end of the process
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", whole, *urls],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def told(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended:\n{self.errors()}"
        return dict(json.loads(line))

    def all_told(self) -> list[dict[str, Any]]:
        """Return all that it tells until it ends, which it has to do well."""
        out, _ = self.process.communicate(timeout=200)
        assert self.process.returncode == 0, self.errors()
        return [json.loads(line) for line in out.splitlines()]

    def press(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def ended(self, timeout: float = 60.0) -> float:
        """Wait for the end and return when it was [s, `time.monotonic`]; TimeoutExpired."""
        self.process.wait(timeout)
        return time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)  # a session of its own: its children, too
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._errors.close()
