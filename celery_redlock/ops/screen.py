"""What a person at a terminal gets beyond plain text: tables by rich, progress, a way to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["COLOURS", "Progress", "Stop", "colour", "console", "is_terminal", "stop_on_interrupt"]

#: How good or bad something is -> its colour.
COLOURS = {"good": "green", "warn": "yellow", "bad": "red", "plain": "reset"}
#: How long a command may take before it says how far it is [s], and how often it says it [s].
QUIET_FOR, SAY_EVERY = 1.0, 0.2


def is_terminal(stream: Any) -> bool:
    """Return whether a person is at the other end of *stream*; it is None where it was closed."""
    return stream is not None and not stream.closed and bool(stream.isatty())


def console() -> Console | None:
    """Return rich's console if a person looks at stdout and rich is installed, else None."""
    if not is_terminal(sys.stdout):
        return None
    try:
        from rich.console import Console  # noqa: PLC0415  an extra, and slow to import
    except ImportError:
        return None
    return Console(no_color=True if is_colourless() else None, highlight=False)


def is_colourless() -> bool:
    """Return whether ``--no-color`` or NO_COLOR forbids colours, or the terminal has none."""
    if os.environ.get("NO_COLOR") or is_dumb():
        return True
    context = click.get_current_context(silent=True)
    return bool(context is not None and getattr(context.obj, "no_color", False))


def is_dumb() -> bool:
    """Return whether the terminal knows no escape sequences."""
    return os.environ.get("TERM") == "dumb"


def colour(text: str, style: str) -> str:
    """Return *text* in a colour of click's on a terminal that wants colours, else as it is."""
    return text if is_colourless() or not is_terminal(sys.stdout) else click.style(text, fg=style)


class Progress:
    """
    Tells the terminal, on stderr, how far a long command is, once it takes longer than a second.

    Args:
        what: What is counted, as ``"locks read"``.
        is_wanted: False for never.
    """

    def __init__(self, what: str, *, is_wanted: bool = True) -> None:
        self._what = what
        self._is_on = is_wanted and is_terminal(sys.stderr) and not is_dumb()
        self._next = time.monotonic() + QUIET_FOR
        self._has_told = False

    def tell(self, done: object) -> None:
        """Say that *done* of them are behind us."""
        if self._is_on and time.monotonic() >= self._next:
            self._next = time.monotonic() + SAY_EVERY
            self._has_told = True
            click.echo(f"\r{done} {self._what}\x1b[K", nl=False, err=True)

    def clear(self) -> None:
        """Take away what was told, before something else is printed."""
        if self._has_told:
            self._has_told = False
            click.echo("\r\x1b[K", nl=False, err=True)


class Stop:
    """
    Whether the user has asked for the end.

    Attributes:
        is_wanted: So it is.
    """

    is_wanted = False

    def wait(self, seconds: float) -> None:
        """Wait, but not after the user has asked for the end."""
        deadline = time.monotonic() + seconds
        while not self.is_wanted and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))  # in pieces, to notice soon that the end is wanted


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[Stop]:
    """
    Have Ctrl-C ask for an orderly end, for the body of a ``with``; a second one is as ever.

    An exception in the middle of a write would leave half a JSON document behind.
    """
    stop = Stop()
    before: Any = signal.getsignal(signal.SIGINT)

    def ask(_number: int, _frame: FrameType | None) -> None:
        stop.is_wanted = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
