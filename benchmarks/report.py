"""
Makes the pages of what benchmarks have recorded.

Pictures, and targets that were missed, are in ``docs/performance.md``; all tables are in
``benchmarks/recorded/tables.md``. Between a marker like ``<!-- publish: tables -->`` and the next
``<!-- end -->`` a page has what this module writes; all other text is written by hand, and has no
measured figure. The same records give the same pages. Run it with ``make bench ARGS=--record``, or
``python -m benchmarks.report``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import (
    BENCHMARKS,
    PACKAGES,
    PEERS,
    RECORDED,
    NotRecorded,
    Plot,
    Record,
    Table,
    Verdict,
    in_words,
    read,
)

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
TABLES = RECORDED / "tables.md"
PLACE = re.compile(r"<!-- (\w+): (\w+) -->\n.*?<!-- end -->", re.DOTALL)

#: A benchmark's record, and the machine that it was made on.
Recorded = tuple[Record, dict[str, Any]]


def main() -> int:
    """Write the pages and pictures; return 1, and say what to run, if a record is missing."""
    try:
        recorded = {name: read(name) for name in BENCHMARKS}
    except NotRecorded as missing:
        print(missing, file=sys.stderr)
        return 1
    draw([plot for record, _ in recorded.values() for plot in record.plots], pictures_of(PAGE))
    for page in (PAGE, TABLES):
        page.write_text(rendered(page.read_text(), recorded))
    return 0


def pictures_of(page: Path) -> Path:
    """Return the folder of the pictures in *page*."""
    return page.with_suffix("")


def draw(plots: Sequence[Plot], folder: Path) -> None:
    """Leave a picture of each plot in *folder*, and of nothing else."""
    from benchmarks.pictures import svg_of  # noqa: PLC0415  matplotlib, for pictures alone

    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    for plot in plots:
        (folder / f"{plot.name}.svg").write_text(svg_of(plot))


def rendered(page: str, recorded: Mapping[str, Recorded]) -> str:
    """Return *page* with what the records say between its markers."""

    def filled(place: re.Match[str]) -> str:
        name, kind = place.groups()
        lines = ALL[kind](recorded, page) if name == "all" else KINDS[kind](*recorded[name])
        return "\n".join([f"<!-- {name}: {kind} -->", *lines, "<!-- end -->"])

    return PLACE.sub(filled, page)


def all_targets(recorded: Mapping[str, Recorded], page: str) -> list[str]:
    """Return the table of all targets of all benchmarks, with links to where *page* has them."""
    return judgements(recorded, page, lambda _: True)


def all_missed(recorded: Mapping[str, Recorded], page: str) -> list[str]:
    """Return how many targets were met, and the table of those that were not."""
    verdicts = [verdict for record, _ in recorded.values() for verdict in record.verdicts]
    met = sum(verdict.is_met for verdict in verdicts)
    missed = judgements(recorded, page, lambda verdict: not verdict.is_met)
    return [f"The last recorded run met {met} of {len(verdicts)}, and missed these:", "", *missed]


def judgements(
    recorded: Mapping[str, Recorded], page: str, is_shown: Callable[[Verdict], bool]
) -> list[str]:
    """Return the table of the targets that are to be shown."""
    rows = [
        (f"[{name}](#{anchor(name, page)})", *judged(verdict))
        for name, (record, _) in recorded.items()
        for verdict in record.verdicts
        if is_shown(verdict)
    ]
    return markdown(("benchmark", *VERDICT), rows)


#: What can stand for all benchmarks -> what writes it.
ALL = {"targets": all_targets, "missed": all_missed}


def anchor(name: str, page: str) -> str:
    """Return the heading of *page* under which benchmark *name* is, as GitHub links to it."""
    before = page.partition(f"<!-- {name}: ")[0]
    heading = re.findall(r"^## (.+)$", before, re.MULTILINE)[-1]
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def plots(record: Record, _: dict[str, Any]) -> Iterator[str]:
    """Yield the pictures of a benchmark; what they show in words, the figures are in tables."""
    for plot in record.plots:
        alt = f"{plot.title}: {plot.y}{plot.x and f' by {plot.x}'}"
        yield f"![{alt.translate({ord('['): '(', ord(']'): ')'})}](performance/{plot.name}.svg)"
        yield ""


def tables(record: Record, machine: dict[str, Any]) -> Iterator[str]:
    """Yield the tables of a benchmark, and how it was run unless another place says so."""
    for table in record.tables:
        yield f"**{table.title}**\n"
        yield from rows_of(table)
        yield ""
    if machine:
        yield run_of(record, machine)


def targets(record: Record, machine: dict[str, Any]) -> Iterator[str]:
    """Yield the targets of one benchmark, and how it was run."""
    yield from markdown(VERDICT, list(map(judged, record.verdicts)))
    yield ""
    yield run_of(record, machine)


#: What can stand between markers -> what writes it.
KINDS = {"plots": plots, "tables": tables, "targets": targets}
VERDICT = ("target", "limit", "found", "")


def rows_of(table: Table) -> list[str]:
    """Return a table in Markdown."""
    return markdown(table.columns, [[in_words(cell) for cell in row] for row in table.rows])


def judged(verdict: Verdict) -> tuple[str, str, str, str]:
    """Return the row of a verdict."""
    found, most = verdict.found, verdict.limit
    limit = f"{most:.3g}" if most < 100 else in_words(most)
    told = f"{found:.3f}" if isinstance(found, float) and found < 10 else in_words(found)
    sign = "≥" if verdict.at_least else "≤"
    return verdict.text, f"{sign} {limit}", told, "met" if verdict.is_met else "**MISSED**"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table, words to the left and figures to the right."""
    in_figures = [
        all(re.match(r"[-\d≤≥]", row[at]) for row in rows) and bool(rows) for at in range(len(head))
    ]
    rule = ["---:" if figures else "---" for figures in in_figures]
    lines = [head, rule, *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def run_of(record: Record, machine: dict[str, Any]) -> str:
    """Return how a benchmark was run, on what, and with which versions."""
    shown = str(record)
    told = [name for name in PACKAGES if name in machine]
    told += [name for name in PEERS if name in machine and name in shown]
    much = ", ".join(f"{name} {value}" for name, value in record.arguments.items())
    where = ", ".join(filter(None, (machine["system"], machine.get("processor"))))
    versions = ", ".join(f"{name} {machine[name]}" for name in told)
    return (
        f"`{machine['command'].strip()}` ({much}), on {machine['cores']} cores: "
        f"{where}; Python {machine['python']}, {versions}."
    )


if __name__ == "__main__":
    sys.exit(main())
