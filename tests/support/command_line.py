"""``celery -A shop redlock ...`` as an operator types it, in a folder with an app of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from celery_redlock.testing.servers import Server
from support.launcher import popen
from support.waiting import eventually

__all__ = ["CommandLine", "command_line", "on_all", "stopped", "urls"]

#: Longest wait for a command [s].
PATIENCE = 60.0


def urls(nodes: Sequence[Server | str]) -> list[str]:
    return [node if isinstance(node, str) else node.url for node in nodes]


def on_all(nodes: Sequence[Server | str], name: str) -> None:
    """Wait until all *nodes* have the lock *name*, which a majority of them has granted."""
    for url in urls(nodes):
        with redis.Redis.from_url(url) as client:
            eventually(lambda: client.exists(f"redlock:lock:{name}"), f"{name!r} on {url}")


@contextmanager
def stopped(process: subprocess.Popen[str]) -> Iterator[None]:
    """Stop *process* for the body of a ``with``, so that it does not come before somebody else."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


class CommandLine:
    """Starts processes in one folder, and ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, nodes: Sequence[Server | str], *command: str, **options: Any
    ) -> subprocess.Popen[str]:
        """Start Python with *command*, and NODES in its environment; *options* are of Popen."""
        environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm"}
        if nodes:
            environment["NODES"] = " ".join(urls(nodes))
        process = popen(
            [sys.executable, *command],
            **{
                "env": environment | options.pop("env", {}),
                "cwd": self.folder,
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "text": True,
                **options,
            },
        )
        self._started.append(process)
        return process

    def start_redlock(
        self,
        nodes: Sequence[Server | str],
        *words: str,
        app: str | None = "shop",
        **options: Any,
    ) -> subprocess.Popen[str]:
        named = ["-A", app] if app else []
        return self.start(nodes, "-m", "celery", *named, "redlock", *words, **options)

    def redlock(
        self, nodes: Sequence[Server | str], *words: str, **options: Any
    ) -> tuple[int, str, str]:
        """Run ``celery -A app redlock *words`` to its end; return exit code, stdout and stderr."""
        process = self.start_redlock(nodes, *words, **options)
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err

    def answer(
        self, nodes: Sequence[Server | str], answer: str, *words: str
    ) -> tuple[int, str, str]:
        """Run ``celery -A shop redlock *words``, and give *answer* on a terminal when it asks."""
        ours, theirs = os.openpty()
        try:
            process = self.start_redlock(nodes, *words, stdin=theirs)
            os.write(ours, f"{answer}\n".encode())
            out, err = process.communicate(timeout=PATIENCE)
        finally:
            os.close(ours)
            os.close(theirs)
        return process.returncode, out, err

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


@contextmanager
def command_line(folder: Path, source: str, module: str = "shop") -> Iterator[CommandLine]:
    """Write the app's *module* into *folder*, and end what was started there."""
    (folder / f"{module}.py").write_text(textwrap.dedent(source))
    it = CommandLine(folder)
    try:
        yield it
    finally:
        it.close()
