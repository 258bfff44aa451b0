"""
Makes the tables and pictures of ``docs/scale.md`` from what `proof.scale` has recorded.

As `benchmarks.report` does for ``docs/performance.md``, and by its means; tables that few readers
need are in ``proof/recorded/scale.md``. A record's tables are told apart by the first word of their
titles: each section of the page has its own.

    PYTHONPATH=tests python -m proof.scale_page
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import proof
from benchmarks.record import Record, read
from benchmarks.report import Recorded, draw, pictures_of, rendered

__all__ = ["PAGE", "TABLES", "filled", "sections"]

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
TABLES = proof.RECORDED / "scale.md"


def sections() -> dict[str, Recorded]:
    """Return what was recorded, by section of the page; one of them says how it was run."""
    whole, machine = read(str(proof.RECORDED / "scale"))  # a whole path: not in the usual folder
    found: dict[str, Record] = {}
    for table in whole.tables:
        found.setdefault(word(table.title), Record("scale", whole.arguments)).tables.append(table)
    for plot in whole.plots:
        found[word(plot.title)].plots.append(plot)
    targets = Record("scale", whole.arguments, verdicts=whole.verdicts)
    return {"targets": (targets, machine), **{name: (it, {}) for name, it in found.items()}}


def word(title: str) -> str:
    """Return the first word of a title."""
    return title.partition(":")[0].lower()


def filled(page: str, recorded: Mapping[str, Recorded]) -> str:
    """Return *page* with what was recorded between its markers."""
    return rendered(page, recorded).replace("](performance/", "](scale/")


def main() -> int:
    """Write the pages and the pictures."""
    recorded = sections()
    draw([plot for record, _ in recorded.values() for plot in record.plots], pictures_of(PAGE))
    for page in (PAGE, TABLES):
        page.write_text(filled(page.read_text(), recorded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
