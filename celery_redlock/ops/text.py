"""Text for the terminal: columns, JSON, and foreign text as one line."""

from __future__ import annotations

import json
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from celery_redlock.ops.screen import colour, is_terminal
from celery_redlock.process.log import cut

__all__ = [
    "LONGEST",
    "Columns",
    "in_json",
    "one_line",
    "paragraph",
    "scalar",
    "show_json",
    "show_table",
]

#: So much of a name is shown to a person; JSON has all of it.
LONGEST = 120
#: Of what is said, where the terminal is not narrower [characters].
WIDTH = 96
#: A column on a terminal is cut no shorter than that, nor than its head [characters].
LEAST = 8


def show_json(value: Any) -> None:
    click.echo(in_json(value, indent=2))


def in_json(value: Any, indent: int | None = None) -> str:
    """Return *value* as JSON, with null for numbers that JSON does not have (NaN, Infinity)."""
    try:
        return json.dumps(value, indent=indent, default=str, allow_nan=False)
    except ValueError:
        known = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
        return json.dumps(known, indent=indent, allow_nan=False)


def show_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    colours: Mapping[str, str] | None = None,
    spare: Sequence[str] = (),
) -> None:
    """
    Print *rows* under *head*; a column without any content is left out.

    *colours*: cell -> its colour; *spare*: columns that a narrow terminal can do without, the first
    to go first.
    """
    filled = [i for i in range(len(head)) if any(row[i] for row in rows)]
    table = [[row[i] for i in filled] for row in (head, *rows)]
    columns = Columns(table, colours or {}, spare)
    for row in table:
        click.echo(columns.line(row))


class Columns:
    """
    Columns as wide as what is in them; on a terminal no wider than that.

    The first of *rows* is the head. Later rows may stick out, or are cut.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[str]],
        colours: Mapping[str, str],
        spare: Sequence[str] = (),
    ) -> None:
        widths = [max(map(width_of, column)) for column in zip(*rows, strict=True)]
        least = [
            max(width_of(word), min(width, LEAST))
            for word, width in zip(rows[0], widths, strict=True)
        ]
        self._widths = dict(enumerate(widths))
        self._room = room()
        if self._room is not None:
            shown = columns_that_fit(rows[0], least, self._room, spare)
            self._widths = fitted({i: widths[i] for i in shown}, least, self._room)
        self._colours = colours

    def line(self, row: Sequence[str]) -> str:
        cells = []
        for place, width in self._widths.items():
            text = row[place] if self._room is None else clipped(row[place], width)
            style = self._colours.get(row[place], "")
            cells.append(colour(text, style) + " " * (width - width_of(text)))
        return "  ".join(cells).rstrip()


def paragraph(text: str, first: str, rest: str) -> str:
    """Return *text* in lines for which there is room, begun by *first*, and then by *rest*."""
    return click.wrap_text(one_line(text), min(WIDTH, room() or WIDTH), first, rest)


def room() -> int | None:
    """Return the width of the terminal [characters]; None for no terminal."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None


def columns_that_fit(
    head: Sequence[str], least: Sequence[int], most: int, spare: Sequence[str]
) -> list[int]:
    places = list(range(len(head)))
    for word in spare:
        if taken(least[place] for place in places) <= most:
            break
        places = [place for place in places if head[place] != word]
    return places


def fitted(widths: dict[int, int], least: Sequence[int], most: int) -> dict[int, int]:
    widths = dict(widths)
    while taken(widths.values()) > most:
        place = max(widths, key=lambda one: widths[one] - least[one])
        if widths[place] <= least[place]:
            break
        widths[place] -= 1
    return widths


def taken(widths: Iterable[int]) -> int:
    return sum(width + 2 for width in widths) - 2


def clipped(text: str, width: int) -> str:
    if width_of(text) <= width:
        return text
    while text and width_of(text) > width - 1:
        text = text[:-1]
    return f"{text}\N{HORIZONTAL ELLIPSIS}"


def width_of(text: str) -> int:
    """Return how many columns of a terminal *text* takes: a wide character takes two."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def one_line(text: object, longest: int | None = None) -> str:
    """Return *text* without control characters, and no more than *longest* characters of it."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return line if longest is None else cut(line, longest)


def scalar(value: object) -> str | float | None:
    """Return *value* if it is text or a number; else somebody else wrote it."""
    return value if isinstance(value, (str, int, float)) else None
