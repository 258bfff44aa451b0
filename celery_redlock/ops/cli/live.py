"""The screen of ``redlock top``, in a terminal. Needs rich, and a system with terminals."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from itertools import accumulate
from textwrap import wrap

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from celery_redlock.ops.cli.command import app_at_hand
from celery_redlock.ops.cli.why import show as show_why
from celery_redlock.ops.listing import STATES, line
from celery_redlock.ops.screen import COLOURS, Stop, is_colourless, stop_on_any
from celery_redlock.ops.text import one_line
from celery_redlock.ops.top import HEAD, ORDERS, REFUSALS, Name, Reader, Snapshot
from celery_redlock.ops.why import explain, most_places
from celery_redlock.settings import Settings

__all__ = ["watch"]

#: Between two looks at the nodes [s]; longer where a look takes long.
LOOK_EVERY = 2.0
#: A look may take this share of the time.
SHARE = 0.25
#: Between two looks at the keyboard [s].
GLANCE = 0.1
#: What the columns of `HEAD` need at least; on a narrow terminal the last ones are left out.
LEAST = (12, 8, 8, 8, 8, 9, 9, 9, 9)
#: A key, as a terminal sends it: an escape sequence or a character.
KEY = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
KEYS = "q quit   / filter   j k choose   Enter why   sort: b busiest  a age  w waiting  n name"


def watch(settings: Settings, reader: Reader) -> Snapshot | None:
    """Show what *reader* reads until somebody quits; return what was seen last."""
    screen = Console(no_color=True if is_colourless() else None, highlight=False)
    with stop_on_any() as stop, the_keyboard() as keyboard:
        return View(settings, reader, screen).run(stop, keyboard)


@contextlib.contextmanager
def the_keyboard() -> Iterator[int]:
    """Have keys arrive one by one and unseen, for the body of a ``with``; yields where to read."""
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard)
        # A program that is stopped by Ctrl-Z would leave its screen behind.
        without_stop = termios.tcgetattr(keyboard)
        without_stop[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(keyboard, termios.TCSADRAIN, without_stop)
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSAFLUSH, before)


class View:
    """
    The screen of ``redlock top``, and what the keys do to it.

    A thread reads, so that keys are heard however long a node takes to answer.
    """

    def __init__(self, settings: Settings, reader: Reader, screen: Console) -> None:
        self._settings, self._reader, self._screen = settings, reader, screen
        self._snapshot: Snapshot | None = None
        self._problem = self._why = self._part = ""
        self._order, self._is_typing, self._has_quit = "busiest", False, False
        self._chosen: str | None = None

    def run(self, stop: Stop, keyboard: int) -> Snapshot | None:
        """Show everything until somebody quits; return what was seen last."""
        ended = threading.Event()
        threading.Thread(target=self._read, args=(ended,), daemon=True).start()
        try:
            with Live(console=self._screen, screen=True, auto_refresh=False) as screen:
                while not (stop.is_wanted or self._has_quit):
                    screen.update(self._view(), refresh=True)
                    if select.select([keyboard], [], [], GLANCE)[0]:
                        keys = os.read(keyboard, 64).decode(errors="replace")
                        if not keys:  # the terminal is gone
                            break
                        self._press(keys)
        finally:
            ended.set()
        return self._snapshot

    def _read(self, ended: threading.Event) -> None:
        while not ended.is_set():
            begun = time.monotonic()
            try:
                self._snapshot, self._problem = self._reader.read(), ""
            except Exception as error:  # noqa: BLE001  shown; the next look may do better
                self._problem = f"{type(error).__name__}: {one_line(error)}"
            took = time.monotonic() - begun
            ended.wait(max(LOOK_EVERY, took / SHARE - took))

    # -- keys ----------------------------------------------------------------------

    def _press(self, keys: str) -> None:
        """Do what *keys* say, which arrived together."""
        if self._why:
            self._why = ""
            return
        for key in KEY.findall(keys):
            if key[1:]:  # an arrow, or a key that says nothing here
                self._move({"A": -1, "B": 1}.get(key[-1], 0))
            elif self._is_typing:
                self._type(key)
            else:
                self._command(key)

    def _type(self, key: str) -> None:
        """Take *key* as a part of the filter, or as its end."""
        if key in "\r\n\x1b":
            self._is_typing = False
        if key == "\x1b":
            self._part = ""
        elif key in "\x7f\b":
            self._part = self._part[:-1]
        elif key.isprintable():
            self._part += key

    def _command(self, key: str) -> None:
        """Take *key* as a command."""
        if key == "q":
            self._has_quit = True
        elif key in "kj":
            self._move(-1 if key == "k" else 1)
        elif key in "/\x1b":
            self._is_typing, self._part = key == "/", ""
        elif key in "\r\n":
            self._open()
        else:
            self._order = next((order for order in ORDERS if order[0] == key), self._order)

    def _names(self) -> list[Name]:
        return self._snapshot.sorted(self._order, self._part) if self._snapshot else []

    def _place(self, names: list[Name]) -> int:
        """Return where the chosen name is; the first one where it is gone."""
        return next((i for i, name in enumerate(names) if name.name == self._chosen), 0)

    def _move(self, by: int) -> None:
        if names := self._names():
            self._chosen = names[max(0, min(len(names) - 1, self._place(names) + by))].name

    def _open(self) -> None:
        """Say why the chosen name is as it is, in the words of ``redlock why``."""
        if names := self._names():
            name = names[self._place(names)].name
            try:
                app = app_at_hand()
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    show_why(explain(app, self._settings, {name: most_places(app)}))
                self._why = said.getvalue()
            except Exception as error:  # noqa: BLE001  shown; the rest goes on
                self._why = f"{type(error).__name__}: {one_line(error)}"

    # -- screen --------------------------------------------------------------------

    def _view(self) -> RenderableType:
        snapshot, (width, height) = self._snapshot, self._screen.size
        if self._why:
            text = self._why.splitlines()
            lines = [part for each in text for part in wrap(each, width) or [""]]
            return Text("\n".join([*lines[: height - 2], "", "Any key goes back."]))
        if snapshot is None:
            return Text(self._problem or "The nodes are asked ...")
        quorum = snapshot.quorum
        head = Text(quorum.headline, COLOURS[quorum.mark], no_wrap=True)
        for node in quorum.nodes:
            state = Text(f"{node.state:<12}", STATES.get(node.state, "red"))
            head += Text(f"\n  {node.node:<24} ") + state + Text(one_line(node.problem))
        refused = Text(f"\nRefused in the last minute: {len(snapshot.refused)}", no_wrap=True)
        for record in snapshot.refused[:REFUSALS]:
            refused += Text(f"\n  {line(record)}")
        names, keys = self._names(), "\n".join(wrap(KEYS, width))
        gaps = "" if snapshot.is_complete else " (not all)"
        typed = self._part + "_" * self._is_typing
        filtered = f"  filter: {typed}" if typed else ""
        said = f"{len(names)} names{gaps} by {self._order}{filtered}"
        foot = Text(f"\n{self._problem or said}\n", no_wrap=True) + Text(keys, "dim")
        taken = sum(str(text).count("\n") + 1 for text in (head, refused, foot))
        room = max(1, height - taken - 2)  # a line above the table, and its head
        place = self._place(names)
        first = max(0, min(place - room // 2, len(names) - room))
        return Group(head, "", self._table(names, first, room, place), refused, foot)

    def _table(self, names: list[Name], first: int, room: int, place: int) -> RenderableType:
        table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
        shown = sum(total <= self._screen.width for total in accumulate(LEAST))
        for word in HEAD[:shown]:
            is_number = word in ("REFUSED", "WAITING", "AGE", "TTL LEFT")
            table.add_column(
                word,
                no_wrap=True,
                ratio=None if is_number else 3 if word == "LOCK" else 2,
                justify="right" if is_number else "left",
            )
        for i, name in enumerate(names[first : first + room], first):
            style = "reverse" if i == place else "yellow" if name.refused else ""
            table.add_row(*map(Text, name.cells[:shown]), style=style)
        return table
