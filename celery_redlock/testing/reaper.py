"""
A small process that ends child processes whose owner has died.

``kill -9`` of a demo or a test run must leave no server behind. Linux has PR_SET_PDEATHSIG for
this, but that signal comes when the *thread* which started the child ends, and it has to be asked
for between fork and exec, where running Python is unsafe as soon as there are threads. So one
reaper process is sent through a pipe what to watch, and acts when the pipe ends or its parent
changes.

This file is the owner's side (:data:`reaper`) and, run as a script, the reaper process itself. It
imports nothing but the standard library, so that the process starts within some twenty
milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

__all__ = ["Reaper", "reaper"]

# How often the reaper looks whether its parent is still its parent [s]. The end of the pipe
# tells it at once, except when a forked child of the owner still holds the other end.
POLL = 0.5


class Reaper:
    """The owner's side. The reaper process runs only while there is something to watch."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._watched: dict[str, dict[str, Any]] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def watch(
        self, key: str, pid: int | None, *, group: bool = False, folder: Path | None = None
    ) -> None:
        """
        Have *pid* (or its *group*) ended with SIGKILL and *folder* removed when this process dies.

        What *key* stood for before is replaced. *pid* is None while there is only a folder to
        remove.
        """
        with self._lock:
            self._watched[key] = {"pid": pid, "group": group, "folder": folder and str(folder)}
            self._tell()

    def forget(self, key: str) -> None:
        """Remove the entry *key*; without any entry left the reaper process ends."""
        with self._lock:
            if self._watched.pop(key, None) is not None:
                self._tell()

    def _tell(self) -> None:
        if self._process is not None and self._process.poll() is not None:  # somebody ended it
            self._end()
        process = self._process = self._process or started()
        assert process.stdin is not None
        process.stdin.write(json.dumps(list(self._watched.values())).encode() + b"\n")
        if not self._watched:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        with process:  # closes the pipe, and waits
            pass

    def abandon(self) -> None:
        """Let go of the reaper in a forked child: it belongs to the parent alone."""
        process = self._process
        self._reset()
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.returncode = 0  # not our child: nothing to wait for, nothing to warn of


def started() -> subprocess.Popen[bytes]:
    # -I and -S: neither the user's environment nor site-packages have a say in it.
    # A session of its own, so that a terminal's Ctrl-C does not reach it.
    # Unbuffered, so that a fork at a bad moment inherits neither bytes nor a held lock.
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid())],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


reaper = Reaper()


def main(owner: int) -> None:
    """Read what is watched until *owner* is gone, then end all that."""
    watched: list[dict[str, Any]] = []
    rest = b""
    while True:
        # Asked before the last look into the pipe: the owner may die before we have read anything.
        orphaned = os.getppid() != owner
        readable = select.select([0], [], [], 0 if orphaned else POLL)[0]
        chunk = os.read(0, 1 << 16) if readable else b""
        if not chunk and (orphaned or readable):
            break
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            watched = json.loads(lines[-1])
            if not watched:
                return
    for entry in watched:
        end(**entry)


def end(pid: int | None, folder: str | None, *, group: bool) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(pid, signal.SIGKILL)
    if folder is not None:
        import shutil  # noqa: PLC0415  needed once, at the end; it would slow every start

        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
