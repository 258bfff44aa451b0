"""Colours, progress and an orderly stop for a person at a terminal."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import click

__all__ = [
    "COLOURS",
    "Progress",
    "Stop",
    "Stopped",
    "colour",
    "is_colourless",
    "is_dumb",
    "is_terminal",
    "stop_on_any",
    "stop_on_interrupt",
]

#: How good or bad something is -> its colour.
COLOURS = {"good": "green", "warn": "yellow", "bad": "red", "plain": "reset"}
#: How long a command may take before it says how far it is [s], and how often it says it [s].
QUIET_FOR, SAY_EVERY = 1.0, 0.2


def is_terminal(stream: Any) -> bool:
    return stream is not None and not stream.closed and bool(stream.isatty())


def is_colourless() -> bool:
    if os.environ.get("NO_COLOR") or is_dumb():
        return True
    context = click.get_current_context(silent=True)
    return bool(context is not None and getattr(context.obj, "no_color", False))


def is_dumb() -> bool:
    return os.environ.get("TERM") == "dumb"


def colour(text: str, style: str) -> str:
    """Return *text* in a colour of click's on a terminal that wants colours, else as it is."""
    if not style or is_colourless() or not is_terminal(sys.stdout):
        return text
    return click.style(text, fg=style)


class Progress:
    """Shows how far a long command is, on stderr, once it takes longer than a second."""

    def __init__(self, what: str, *, is_wanted: bool = True) -> None:
        self._what = what
        self._is_on = is_wanted and is_terminal(sys.stderr) and not is_dumb()
        self._next = time.monotonic() + QUIET_FOR
        self._is_shown = False

    def tell(self, done: object) -> None:
        if self._is_on and time.monotonic() >= self._next:
            self._next = time.monotonic() + SAY_EVERY
            self._is_shown = True
            click.echo(f"\r{done} {self._what}\x1b[K", nl=False, err=True)

    def clear(self) -> None:
        if self._is_shown:
            self._is_shown = False
            click.echo("\r\x1b[K", nl=False, err=True)


class Stopped(Exception):
    """Somebody asked for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


class Stop:
    """
    Request of the user for the end, looked at between two steps.

    An exception anywhere would leave half a JSON document behind, or a process whose id is not
    known yet. *number* is that of the signal.
    """

    number: int | None = None

    @property
    def is_wanted(self) -> bool:
        return self.number is not None

    def check(self) -> None:
        if self.number is not None:
            raise Stopped(self.number)

    def wait(self, seconds: float) -> None:
        """Wait, but not after the user has asked for the end."""
        deadline = time.monotonic() + seconds
        while not self.is_wanted and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))  # in pieces, to notice soon that the end is wanted


@contextlib.contextmanager
def stop_on(*names: str, is_patient: bool = True) -> Iterator[Stop]:
    """
    Have signals ask for an orderly end, for the body of a ``with``.

    A second one changes nothing if *is_patient*; else it does what it did before.
    """
    stop, before = Stop(), dict[int, Any]()

    def ask(number: int, _frame: FrameType | None) -> None:
        stop.number = stop.number or number
        if not is_patient:
            signal.signal(number, before[number])

    for name in names:
        number = getattr(signal, name, None)
        # Under nohup a hang-up is to be ignored.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, ask)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stop_on_interrupt() -> contextlib.AbstractContextManager[Stop]:
    """Have Ctrl-C ask for an orderly end, for the body of a ``with``; a second one interrupts."""
    return stop_on("SIGINT", is_patient=False)


def stop_on_any() -> contextlib.AbstractContextManager[Stop]:
    """Have Ctrl-C and similar signals ask for an orderly end; repeating it changes nothing."""
    return stop_on("SIGINT", "SIGTERM", "SIGHUP")
