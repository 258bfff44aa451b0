"""How the demo looks: coloured and moving in a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

__all__ = ["Claim", "Screen"]

#: Widest text that reads well [columns]; also what a log without a width gets.
WIDTH = 88
#: How far the text of a chapter stands in.
INDENT = "   "
#: Longest silence in a log [s].
HEARTBEAT = 1.5
#: What is to be marked -> its style, its sign, and its sign where the output is no Unicode.
SIGNS = {
    "true": ("bold green", "✔", "ok"),
    "false": ("bold red", "✘", "FALSE"),
    "point": ("dim", "·", "-"),
    "up": ("green", "●", "o"),
    "down": ("red", "✖", "x"),
    "silent": ("yellow", "◌", "-"),
}


class Claim(NamedTuple):
    """What should be, what has to be seen, what was seen, and whether that is the same."""

    what: str
    expected: str
    seen: str
    holds: bool


class Screen:
    """
    Everything that the demo prints. Texts may have markup of rich in them.

    Attributes:
        moves: Whether it is a terminal, where a line can be written anew.
    """

    def __init__(self) -> None:
        self._console = console = Console(highlight=False, emoji=False)
        self.moves = console.is_terminal and not console.is_dumb_terminal
        if not self.moves or console.width > WIDTH:
            console.width = WIDTH
        self._speaks_unicode = console.encoding.lower().startswith("utf")
        self._chapters = 0

    def sign(self, what: str) -> str:
        """Return the sign of *what*, one of `SIGNS`."""
        style, fine, plain = SIGNS[what]
        return f"[{style}]{fine if self._speaks_unicode else plain}[/]"

    def title(self, text: str) -> None:
        """Print the title of it all."""
        self._console.print(Panel(Text(text, "bold", justify="center"), style="cyan"))

    def chapter(self, title: str, text: str) -> None:
        """Begin a chapter."""
        self._chapters += 1
        self._console.print(f"\n[bold cyan]{self._chapters}. {title}")
        self.say(text)

    def say(self, text: str, style: str = "") -> None:
        """Print a paragraph."""
        # Not left to rich, which would fill every line up with spaces: a log is to be read, too.
        width = self._console.width - 1
        lines = textwrap.fill(text, width, initial_indent=INDENT, subsequent_indent=INDENT)
        self._console.print(lines, style=style, markup=False)

    def code(self, source: str) -> None:
        """Print a piece of Python."""
        text = Syntax("", "python", theme="ansi_dark", background_color="default").highlight(source)
        self._console.print()
        for line in text.split():
            self._console.print(INDENT * 2, line, sep="", no_wrap=True, overflow="ignore")
        self._console.print()

    def happened(self, text: str) -> None:
        """Print something that the demo did or that came about."""
        self._console.print(f"{INDENT}{self.sign('point')} {text}")

    def failure(self, text: str) -> None:
        """Print why the demo could not go on."""
        self._console.print(text, style="bold red", markup=False)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[str], None]]:
        """Yield what shows a line in the place of the last; in a log, below it, not too often."""
        if self.moves:
            spinner = "dots" if self._speaks_unicode else "line"
            with self._console.status("", spinner=spinner) as status:
                yield lambda line: status.update(f"  {line}")
            return
        begun = said = time.monotonic()

        def tell(line: str) -> None:
            nonlocal said
            if time.monotonic() - said >= HEARTBEAT:
                said = time.monotonic()
                self._console.print(f"    ... {line} ({said - begun:.0f} s)")

        yield tell

    def claim(self, claim: Claim) -> None:
        """Print whether *claim* holds."""
        line = f"{INDENT}{self._mark(claim)} [bold]{claim.what}: {claim.seen}[/]"
        missed = "" if claim.holds else f" [red](expected: {claim.expected})"
        self._console.print(line + missed)

    def _mark(self, claim: Claim) -> str:
        return self.sign("true" if claim.holds else "false")

    def summary(self, claims: Sequence[Claim]) -> None:
        """Print all *claims* as a table."""
        title = "What should be, and what was seen"
        table = Table("", "", "expected", "seen", box=SIMPLE_HEAD, title=title, title_style="bold")
        for claim in claims:
            cells = (self._mark(claim), claim.what, claim.expected, claim.seen)
            table.add_row(*cells, style="" if claim.holds else "bold red")
        self._console.print("", table, sep="\n")
