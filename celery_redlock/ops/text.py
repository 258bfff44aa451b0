"""Text for the terminal: columns, durations, JSON. Needs nothing but click."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from celery_redlock.ops.screen import console

if TYPE_CHECKING:
    from rich.console import Console

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
    head: Sequence[str], rows: Sequence[Sequence[str]], styles: Mapping[str, str] | None = None
) -> None:
    """
    Print *rows* under *head*; a column without any content is left out.

    Args:
        head: A word per column.
        rows: Of as many cells each.
        styles: Cell -> how rich is to show it on a terminal.
    """
    filled = [i for i in range(len(head)) if any(row[i] for row in rows)]
    head, rows = [head[i] for i in filled], [[row[i] for i in filled] for row in rows]
    screen = console()
    if screen is None:
        columns = Columns(head, rows)
        for line in (head, *rows):
            click.echo(columns.line(line))
    else:
        show_rich_table(screen, head, rows, styles or {})


def show_rich_table(
    screen: Console,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Mapping[str, str],
) -> None:
    """Print a table on a terminal; the cells are text, whatever brackets are in it."""
    from rich.table import Table  # noqa: PLC0415  an extra, and slow to import
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, header_style="bold")
    for word in head:
        table.add_column(word, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
    screen.print(table)


class Columns:
    """
    Plain columns that are as wide as what is in them.

    Args:
        head: A word per column.
        rows: The rows that make the widths; later ones may stick out.
    """

    def __init__(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(self, row: Sequence[str]) -> str:
        """Return *row* as a line."""
        cells = (cell.ljust(width) for cell, width in zip(row, self._widths, strict=True))
        return "  ".join(cells).rstrip()


def one_line(text: object, longest: int | None = None) -> str:
    """Return *text* without control characters, and no more than *longest* characters of it."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return line if longest is None or len(line) <= longest else f"{line[: longest - 3]}..."
