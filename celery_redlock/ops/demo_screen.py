"""How the demo looks: coloured and moving in a terminal, plain lines in a log."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.status import Status
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing only since Python 3.11

__all__ = ["Claim", "Screen"]

#: Widest text that reads well [columns]; also what a log without a width gets.
WIDTH = 88
#: How far the text of a chapter stands in.
INDENT = "   "
#: Longest silence in a log [s].
HEARTBEAT = 1.5


@dataclass(frozen=True)
class Claim:
    """
    Something that the demo says of the library, and what was seen of it.

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


class Progress:
    """A line that tells what is going on while something is waited for."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._status: Status | None = None
        self._told = ""
        self._told_at = self._began = time.monotonic()

    def __enter__(self) -> Self:
        if self._screen.moves:
            self._status = self._screen.console.status("", spinner=self._screen.spinner)
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def tell(self, line: Text) -> None:
        """Show *line* in the place of the last one; in a log, below it and not too often."""
        if self._status is not None:
            self._status.update(Text("  ") + line)
        elif time.monotonic() - self._told_at >= HEARTBEAT:
            self._told_at = time.monotonic()
            waited = f" ({self._told_at - self._began:.0f} s)"
            self._screen.console.print(Text("    ... ") + line + Text(waited))


class Screen:
    """
    Everything that the demo prints.

    Attributes:
        console: Of rich.
        moves: Whether it is a terminal, where a line can be written anew.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.moves = self.console.is_terminal and not self.console.is_dumb_terminal
        if not self.moves or self.console.width > WIDTH:
            self.console.width = WIDTH
        self._speaks_unicode = self.console.encoding.lower().startswith("utf")
        self.spinner = "dots" if self._speaks_unicode else "line"

    def symbol(self, fine: str, plain: str) -> str:
        """Return *fine*, or *plain* where the output cannot carry it."""
        return fine if self._speaks_unicode else plain

    def title(self, text: str) -> None:
        """Print the title of it all."""
        self.console.print(Panel(Text(text, "bold", justify="center"), style="cyan"))

    def chapter(self, number: int, title: str, text: str) -> None:
        """Begin a chapter."""
        self.console.print()
        self.console.print(Text(f"{number}. {title}", "bold cyan"))
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
            self.console.print(Text(2 * INDENT) + line)
        self.console.print()

    def happened(self, text: str) -> None:
        """Print something that the demo did or that came about."""
        self.console.print(Text(INDENT) + Text(self.symbol("· ", "- "), "dim") + Text(text))

    def servers(self, states: Sequence[str]) -> Text:
        """Return a coloured dot for each of *states*, which are those of `NodeStatus`."""
        signs = {"up": ("●", "o", "green"), "down": ("✖", "x", "red")}
        line = Text("servers ")
        for state in states:
            fine, plain, colour = signs.get(state, ("◌", "-", "yellow"))
            line.append(self.symbol(fine, plain), colour)
        dead, up = states.count("down"), states.count("up")
        counts = {"dead": dead, "silent": len(states) - dead - up}
        told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        return line.append(f" ({told})" if told else "")

    def progress(self) -> Progress:
        """Return a line for the time of a wait."""
        return Progress(self)

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

    def failure(self, text: str) -> None:
        """Print why the demo could not go on."""
        self.console.print(Text(text, "bold red"))
