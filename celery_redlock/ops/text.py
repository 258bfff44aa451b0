"""Plain text for the terminal: columns, durations, JSON. Needs nothing but click."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

__all__ = ["duration", "one_line", "show_json", "show_table"]


def show_json(value: Any) -> None:
    """Print *value* as JSON."""
    click.echo(json.dumps(value, indent=2, default=str))


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print *rows* under *head* in columns of text; a column without any content is left out."""
    filled = [i for i in range(len(head)) if any(row[i] for row in rows)]
    lines = [[line[i] for i in filled] for line in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def one_line(text: str) -> str:
    """Return *text* without line breaks and other control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def duration(seconds: float) -> str:
    """Return *seconds* in two units at most: ``4.2 s``, ``3 min 20 s``, ``5 d 3 h``."""
    whole = int(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{seconds:.2g} s"
