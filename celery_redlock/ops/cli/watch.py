"""``--watch``: draw the output of a command again each second."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from celery_redlock.ops.screen import Stop, is_colourless, is_dumb, is_terminal, stop_on_any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["WATCH", "watch"]

#: From one drawing to the next look [s].
EVERY = 1.0
#: Adds the option to a command.
WATCH = click.option(
    "--watch",
    "is_watched",
    is_flag=True,
    help="Draw it again each second until Ctrl-C; needs a terminal and the extra 'cli'.",
)


def watch(look: Callable[[Stop], object], *, as_json: bool) -> int:
    """Draw what *look* prints again and again until somebody ends it; raises UsageError."""
    if as_json:
        msg = "--watch draws for people; --json prints once, for a script"
        raise click.UsageError(msg)
    if is_dumb() or not is_terminal(sys.stdout):
        msg = "--watch needs a terminal to draw on; without it, everything is printed once"
        raise click.UsageError(msg)
    try:
        from rich.console import Console  # noqa: PLC0415  an extra
        from rich.live import Live  # noqa: PLC0415
    except ImportError:
        msg = "--watch needs rich, which is not installed: pip install 'celery-redlock[cli]'"
        raise click.UsageError(msg) from None
    console = Console(no_color=True if is_colourless() else None, highlight=False)
    drawn = Live(
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with stop_on_any() as stop, drawn:
        while not stop.is_wanted:
            drawn.update(fitted(console, *printed(lambda: look(stop))), refresh=True)
            stop.wait(EVERY)
    return 0


class Page(io.StringIO):
    """Output that is written as if to a terminal: as wide, and in its colours."""

    def isatty(self) -> bool:
        return True


def printed(look: Callable[[], object]) -> tuple[str, str]:
    page, notes = Page(), io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.redirect_stderr(notes):
        look()
    return page.getvalue(), notes.getvalue()


def fitted(console: Console, page: str, notes: str) -> Text:
    from rich.text import Text  # noqa: PLC0415  an extra

    lines = [*Text.from_ansi(page).wrap(console, console.width)]
    rest = f"{notes}\n{time.strftime('%X')}, again each second; Ctrl-C ends it."
    below = Text.from_ansi(rest).wrap(console, console.width)
    room = max(1, console.height - len(below))
    if len(lines) > room:
        left_out = len(lines) - (room - 1)
        lines = [*lines[: room - 1], Text(f"... {left_out} more lines")]
    return Text("\n").join([*lines, *below])
