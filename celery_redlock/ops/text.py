"""Text for the terminal: columns, JSON, and what others wrote as one line."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import click

from celery_redlock.ops.screen import colour

__all__ = ["LONGEST", "Columns", "in_json", "one_line", "show_json", "show_table"]

#: So much of a name is shown to a person; JSON has all of it.
LONGEST = 120


def show_json(value: Any) -> None:
    """Print *value* as JSON."""
    click.echo(in_json(value, indent=2))


def in_json(value: Any, indent: int | None = None) -> str:
    """Return *value* as JSON, with null for numbers that JSON does not have (NaN, Infinity)."""
    try:
        return json.dumps(value, indent=indent, default=str, allow_nan=False)
    except ValueError:
        known = json.loads(json.dumps(value, default=str), parse_constant=lambda _: None)
        return json.dumps(known, indent=indent, allow_nan=False)


def show_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], colours: Mapping[str, str] | None = None
) -> None:
    """
    Print *rows* under *head*; a column without any content is left out.

    Args:
        head: A word per column.
        rows: Of as many cells each.
        colours: Cell -> its colour on a terminal.
    """
    filled = [i for i in range(len(head)) if any(row[i] for row in rows)]
    table = [[row[i] for i in filled] for row in (head, *rows)]
    columns = Columns(table, colours or {})
    for row in table:
        click.echo(columns.line(row))


class Columns:
    """
    Columns that are as wide as what is in them.

    Args:
        rows: Make the widths; later ones may stick out.
        colours: Cell -> its colour on a terminal.
    """

    def __init__(self, rows: Sequence[Sequence[str]], colours: Mapping[str, str]) -> None:
        self._widths = [max(map(width_of, column)) for column in zip(*rows, strict=True)]
        self._colours = colours

    def line(self, row: Sequence[str]) -> str:
        """Return *row* as a line."""
        cells = "  ".join(
            colour(cell, self._colours.get(cell, "")) + " " * (width - width_of(cell))
            for cell, width in zip(row, self._widths, strict=True)
        )
        return cells.rstrip()


def width_of(text: str) -> int:
    """Return how many columns of a terminal *text* takes: a wide character takes two."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def one_line(text: object, longest: int | None = None) -> str:
    """Return *text* without control characters, and no more than *longest* characters of it."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return line if longest is None or len(line) <= longest else f"{line[: longest - 3]}..."
