"""Commands as a page shows them: run with bash, and their output compared with what it shows."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from celery_redlock.testing.reaper import reaper
from support.pages import Command
from support.waiting import eventually
from support.worker import CAN_PEEK

__all__ = ["Console", "is_shown"]

#: Longest wait for a command, and for one in the background to be ready [s].
PATIENCE = 60.0
#: Between asking a command in the background to end and ending it [s].
STOP_PATIENCE = 15.0
ANYTHING = "..."
#: On Python's path it makes it patient with nodes, on a loaded machine.
PATIENCE_WITH_NODES = Path(__file__).parent / "patience"


def is_shown(shown: Sequence[str], output: str, *, to_the_end: bool = True) -> bool:
    """
    Return whether *output* is what a page shows.

    ``...`` stands for anything: on a line of its own for any number of lines. How many blanks
    stand between two words, and empty lines, do not count: names are not as long as addresses.

    Args:
        shown: Lines of the page.
        output: What was really written.
        to_the_end: Whether nothing may follow.
    """
    pattern = ""
    for line in filter(None, map(squeezed, shown)):
        if line == ANYTHING:
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*?".join(map(re.escape, line.split(ANYTHING))) + r"\n"
    lines = filter(None, map(squeezed, output.splitlines()))
    text = "".join(f"{line}\n" for line in lines)
    found = re.fullmatch(pattern, text) if to_the_end else re.match(pattern, text)
    return found is not None


def exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Return how *process* ended, None while it runs; its id stays its own."""
    if not CAN_PEEK:
        return process.poll()
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def squeezed(line: str) -> str:
    return " ".join(line.split())


class Console:
    """Runs commands in one folder, and ends what it left running."""

    def __init__(self, folder: Path, show: Callable[[str], str] = str) -> None:
        self.folder = folder
        self.show = show
        self._numbers = itertools.count(1)
        self._started: list[tuple[subprocess.Popen[bytes], Path, str]] = []

    def _environment(self) -> dict[str, str]:
        here = Path(sys.executable).parent  # `celery` and `python` are those of this interpreter
        return {
            **os.environ,
            "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(PATIENCE_WITH_NODES)]),
            "PYTEST_ADDOPTS": "",  # a reader has none, and they change what pytest prints
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "NO_COLOR": "1",
            "COLUMNS": "200",
        }

    def _start(self, command: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = self.folder / f".output-{next(self._numbers)}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        reaper.watch(str(log), process.pid, group=True)
        self._started.append((process, log, command))
        return process, log

    def run(self, command: Command, *, expect: int = 0) -> str:
        """
        Run *command* to its end and return what it wrote.

        Raises:
            AssertionError: Exit code or output are not as the page says.
        """
        process, log = self._start(command.text)
        wrong = f"$ {command.text}\n"
        deadline = time.monotonic() + PATIENCE
        while (code := exit_code(process)) is None:
            late = time.monotonic() > deadline
            assert not late, f"{wrong}has not ended within {PATIENCE:g} s:\n{self._read(log)}"
            time.sleep(0.02)  # nothing tells of an end that leaves the process to be waited for
        output = self._read(log)
        assert code == expect, f"{wrong}ended with {code}, not {expect}:\n{output}"
        if command.shown:
            shown = "\n".join(command.shown)
            assert is_shown(command.shown, output), f"{wrong}{output}---- but the page:\n{shown}"
        return output

    def background(self, command: Command, ready: str) -> None:
        """
        Start *command* and wait until its output matches *ready*, and begins as the page shows.

        Raises:
            AssertionError: It ended, or was not ready in time; the message has its output.
        """
        process, log = self._start(command.text)

        def is_ready() -> bool:
            # Looked at before the output: what it wrote at its end is in there then.
            has_ended = exit_code(process) is not None
            output = self._read(log)
            if re.search(ready, output, re.MULTILINE):
                return is_shown(command.shown, output, to_the_end=False)
            assert not has_ended, "it has ended"
            return False

        try:
            eventually(is_ready, f"{ready!r} in its output", timeout=PATIENCE, every=0.05)
        except AssertionError as failure:
            raise AssertionError(f"$ {command.text}\n{failure}:\n{self._read(log)}") from None

    def _read(self, log: Path) -> str:
        return self.show(log.read_text(errors="replace"))

    def close(self) -> None:
        """End all that runs yet: asked first, then the whole process group of each."""
        left = [process for process, _, _ in self._started if exit_code(process) is None]
        for process in left:
            os.kill(process.pid, signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            eventually(lambda: None not in map(exit_code, left), "end", timeout=STOP_PATIENCE)
        for process, log, _ in self._started:
            # What it started may be there yet. It was not waited for, so its group is still its.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reaper.forget(str(log))

    def told(self) -> str:
        return "\n".join(f"$ {command}\n{self._read(log)}" for _, log, command in self._started)
