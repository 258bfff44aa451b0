"""
Does to tasks of other libraries, and to ours, what production does to tasks, and tells what came.

python -m benchmarks.peers [ROW ...] [--only COLUMN] [--jobs N] [--record | --render]

Each cell has servers, workers and a process of its own. The exit status is 1 if a cell of
celery-redlock does not hold, or a control is not seen to fail.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from benchmarks.peers.record import Found, Run, load, machine, save
from benchmarks.peers.rows import BY_KEY, COLUMNS, CONTROLS, OURS, cells
from benchmarks.peers.runner import run_all
from benchmarks.peers.table import PAGE, on_screen, rendered, sign, told


def chosen_from(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description=__doc__,
        epilog="Rows: " + "; ".join(f"{row.key}: {row.asks}" for row in BY_KEY.values()),
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="keys of rows; all by themselves")
    columns = (*COLUMNS, *CONTROLS)
    parser.add_argument("--only", action="append", choices=columns, help="may be repeated")
    parser.add_argument("--jobs", type=int, default=4, help="how many cells at the same time")
    parser.add_argument("--record", action="store_true", help="keep it, and rewrite the page")
    parser.add_argument("--render", action="store_true", help="run nothing, rewrite the page")
    chosen = parser.parse_args(arguments)
    if unknown := [row for row in chosen.rows if row not in BY_KEY]:
        parser.error(f"no such row: {', '.join(unknown)}; rows are {', '.join(BY_KEY)}")
    if chosen.record and (chosen.rows or chosen.only):
        parser.error("only a whole run can be recorded")
    return chosen


def wrong(found: Sequence[Found]) -> list[str]:
    """Return what must not be: a cell of ours that fails, or a control that holds."""
    ours = [one for one in found if one.column == OURS and not one.verdict.holds]
    blind = [one for one in found if one.column == BY_KEY[one.row].control and one.verdict.holds]
    return [f"{one.row} of {one.column}: {sign(one.verdict)}" for one in (*ours, *blind)]


def render(run: Run) -> int:
    """Write the table of *run* into docs/comparison.md; return 0."""
    PAGE.write_text(rendered(PAGE.read_text(), run))
    return 0


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for, and tell of it."""
    chosen = chosen_from(arguments)
    if chosen.render:
        return render(load())
    # Not folded to 80 columns where nobody reads along.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    picked = [
        (row, column)
        for row, column in cells()
        if (not chosen.rows or row in chosen.rows) and (not chosen.only or column in chosen.only)
    ]
    started = time.monotonic()
    found: list[Found] = []
    bad: list[str] = []
    # The last row first: its cells take longest, and would be waited for alone.
    for number, one in enumerate(run_all(picked[::-1], chosen.jobs), 1):
        text = told(one) if isinstance(one, Found) else f"not run: {one}"
        console.print(f"{number:3} of {len(picked)}  {text}", markup=False, soft_wrap=True)
        if isinstance(one, Found):
            found.append(one)
        else:
            bad.append(text)
    seconds = time.monotonic() - started
    console.print(on_screen(found, [*dict.fromkeys(column for _, column in picked)]))
    console.print(f"{len(found)} cells in {seconds:.0f} s")
    bad += wrong(found)
    if chosen.record and len(found) == len(picked):
        command = f"python -m benchmarks.peers {' '.join(arguments)}"
        run = Run(tuple(found), machine(command, seconds))
        save(run)
        render(run)
    for text in bad:
        console.print(f"Not as it should be: {text}", markup=False, soft_wrap=True)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
