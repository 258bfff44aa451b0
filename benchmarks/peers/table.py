"""
The table: in Markdown for docs/comparison.md, and on a terminal.

The page has it between ``<!-- compare: table -->`` and ``<!-- end -->``; all other text there
is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.peers.record import Found, Run
from benchmarks.peers.rows import AMPLE, BY_KEY, COLUMNS, COOKBOOK, LONGEST, OURS, ROWS, SHORT
from benchmarks.peers.verdicts import Verdict

PAGE = Path(__file__).parents[2] / "docs" / "comparison.md"
PLACE = re.compile(r"(?<=<!-- compare: table -->\n).*?(?=<!-- end -->)", re.DOTALL)
HOLDS, FAILS = "✓", "✗"
#: What a reader has to know of the settings; `benchmarks.peers.contestants` has them all.
NOTES = (
    f"Their TTL is {AMPLE} s, more than the task takes, and {SHORT} s where the lock is to lapse;",
    f"ours is {SHORT} s everywhere, as it is renewed and need not outlast the task.",
    "The first row holds if a next call runs as soon as the killed run would have ended at the",
    f"latest, {LONGEST:g} s; with our default TTL it can take 30 s. celery-singleton has no expiry",
    "in the second row, and `lock_expiry` in the others; celery-heimdall has a unique interval in",
    "the last; ours are",
    'unique at publish, too (`unique_until="finished"`).',
)


def sign(verdict: Verdict) -> str:
    """Return a verdict as the table has it."""
    return f"{HOLDS if verdict.holds else FAILS} {verdict.words}"


def markdown(run: Run) -> str:
    """Return the table of *run*, with the versions it is about."""
    heads = ["", *(f"**{one}**" if one == OURS else one for one in COLUMNS)]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for row in ROWS:
        cells = [run.cell(row.key, column) for column in COLUMNS]
        lines.append(_line([row.name, *(sign(one.verdict) if one else "" for one in cells)]))
    versions = run.machine["versions"]
    peers = ", ".join(f"{one} {versions[one]}" for one in COLUMNS if one in versions)
    lines += ["", f"With {peers} and the {COOKBOOK} of"]
    lines += [f"Celery's own documentation, on Celery {versions['celery']}.", *NOTES]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def rendered(page: str, run: Run) -> str:
    """Return *page* with the table of *run* between its markers, if it has them."""
    return PLACE.sub(lambda _: markdown(run), page)


def on_screen(found: Sequence[Found], columns: Sequence[str]) -> Table:
    """Return the table of what was *found*."""
    table = Table(show_lines=True)
    table.add_column("")
    for column in columns:
        table.add_column(column, min_width=10)
    by_cell = {(one.row, one.column): one.verdict for one in found}
    for row in ROWS:
        verdicts = [by_cell.get((row.key, column)) for column in columns]
        if any(verdicts):
            table.add_row(row.name, *(_in_colour(one) if one else "" for one in verdicts))
    return table


def _in_colour(verdict: Verdict) -> str:
    return f"[{'green' if verdict.holds else 'red'}]{sign(verdict)}[/]"


def told(found: Found) -> str:
    """Return a cell in a line, with what was measured."""
    verdict = found.verdict
    figure = f" ({verdict.measured})" if verdict.measured else ""
    name = BY_KEY[found.row].name
    return f"{name}, {found.column}: {sign(verdict)}{figure} [{found.seconds:.0f} s]"
