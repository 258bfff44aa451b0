"""How the demo looks: coloured and moving in a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rich import box
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


class Claim(NamedTuple):
    """
    What should be, and what was seen.

    Attributes:
        what: In a few words.
        expected: What has to be seen.
        seen: What was seen.
        holds: Whether that is the same.
    """

    what: str
    expected: str
    seen: str
    holds: bool


class Screen:
    """
    Everything that the demo prints.

    Attributes:
        console: Of rich.
        moves: Whether it is a terminal, where a line can be written anew.
    """

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.moves = self.console.is_terminal and not self.console.is_dumb_terminal
        if not self.moves or self.console.width > WIDTH:
            self.console.width = WIDTH
        self._speaks_unicode = self.console.encoding.lower().startswith("utf")
        self._chapters = 0

    def symbol(self, fine: str, plain: str) -> str:
        """Return *fine*, or *plain* where the output cannot carry it."""
        return fine if self._speaks_unicode else plain

    def title(self, text: str) -> None:
        """Print the title of it all."""
        self.console.print(Panel(Text(text, "bold", justify="center"), style="cyan"))

    def chapter(self, title: str, text: str) -> None:
        """Begin a chapter."""
        self._chapters += 1
        self.console.print(Text(f"\n{self._chapters}. {title}", "bold cyan"))
        self.say(text)

    def say(self, text: str, style: str = "") -> None:
        """Print a paragraph."""
        # Not left to rich, which would fill every line up with spaces: a log is to be read, too.
        for line in textwrap.wrap(text, self.console.width - 1 - len(INDENT)):
            self.console.print(Text(INDENT + line, style))

    def code(self, source: str) -> None:
        """Print a piece of Python."""
        syntax = Syntax("", "python", theme="ansi_dark", background_color="default")
        self.console.print()
        for line in syntax.highlight(source).split():
            self.console.print(Text(INDENT * 2) + line, no_wrap=True, overflow="ignore")
        self.console.print()

    def happened(self, text: str) -> None:
        """Print something that the demo did or that came about."""
        self.console.print(Text(INDENT) + Text(self.symbol("· ", "- "), "dim") + Text(text))

    def failure(self, text: str) -> None:
        """Print why the demo could not go on."""
        self.console.print(Text(text, "bold red"))

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[Text], None]]:
        """Yield what shows a line in the place of the last; in a log, below it, not too often."""
        if self.moves:
            spinner = "dots" if self._speaks_unicode else "line"
            with self.console.status("", spinner=spinner) as status:
                yield lambda line: status.update(Text("  ") + line)
            return
        begun = said = time.monotonic()

        def tell(line: Text) -> None:
            nonlocal said
            if time.monotonic() - said >= HEARTBEAT:
                said = time.monotonic()
                self.console.print(Text("    ... ") + line + Text(f" ({said - begun:.0f} s)"))

        yield tell

    def servers(self, states: Sequence[str]) -> Text:
        """Return a coloured dot for each of *states*, which are those of `NodeStatus`."""
        signs = {"up": ("●", "o", "green"), "down": ("✖", "x", "red")}
        line = Text("servers ")
        for state in states:
            fine, plain, colour = signs.get(state, ("◌", "-", "yellow"))
            line.append(self.symbol(fine, plain), colour)
        dead, up = states.count("down"), states.count("up")
        counts = {"dead": dead, "silent": len(states) - dead - up}
        words = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        return line.append(f" ({words})" if words else "")

    def claim(self, claim: Claim) -> None:
        """Print whether *claim* holds."""
        line = Text(INDENT) + self.mark(claim) + Text(f" {claim.what}: {claim.seen}", "bold")
        if not claim.holds:
            line += Text(f" (expected: {claim.expected})", "red")
        self.console.print(line)

    def mark(self, claim: Claim) -> Text:
        """Return the sign of *claim*: true or false."""
        if claim.holds:
            return Text(self.symbol("✔", "ok"), "bold green")
        return Text(self.symbol("✘", "FALSE"), "bold red")

    def summary(self, claims: Sequence[Claim]) -> None:
        """Print all *claims* as a table."""
        lines = box.SIMPLE_HEAD if self._speaks_unicode else box.ASCII2
        table = Table(box=lines, title="What should be, and what was seen", title_style="bold")
        for name in ("", "", "expected", "seen"):
            table.add_column(name)
        for claim in claims:
            style = "" if claim.holds else "bold red"
            table.add_row(self.mark(claim), claim.what, claim.expected, claim.seen, style=style)
        self.console.print()
        self.console.print(table)
