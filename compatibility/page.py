"""
Writes what was recorded into ``docs/compatibility.md`` and ``README.md`` here, between markers.

    python -m compatibility.page

All other text of these pages is written by hand. The same record gives the same pages.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from compatibility import AXES, NEXT_DEBIAN, PAGES, RECORD
from compatibility.cover import cell_of, every_cell, pairs_of, pairs_to_cover

__all__ = ["KINDS", "is_well", "main", "outcome", "read", "rendered"]

PLACE = re.compile(r"<!-- compatibility: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
Result = Mapping[str, Any]
Recorded = Mapping[str, Any]

#: Axes in words, with what a cell found of each.
HEADS = {
    "python": "Python",
    "celery": "Celery",
    "redis_py": "redis-py",
    "server": "lock nodes",
    "hiredis": "hiredis",
}
PACKAGES = {"redis_py": "redis"}


def read() -> dict[str, Any]:
    """Return what was recorded."""
    told: dict[str, Any] = json.loads(RECORD.read_text())
    if NEXT_DEBIAN.exists():
        told["next_debian"] = json.loads(NEXT_DEBIAN.read_text())
    return told


def is_well(result: Result) -> bool:
    """Return whether all tests of a cell passed."""
    return not result.get("failed") and not result.get("errors") and result.get("passed", 0) > 0


def outcome(result: Result) -> str:
    """Return what came out in a cell, in words."""
    if "problem" in result:
        return str(result["problem"])
    counts = [
        f"{result[name]} {name}"
        for name in ("passed", "failed", "errors", "skipped")
        if result.get(name)
    ]
    again = result.get("second_try")
    note = f" ({again} at the second try)" if again else ""
    return f"{', '.join(counts)}{note} in {result.get('seconds', 0)} s"


def rendered(page: str, recorded: Recorded) -> str:
    """Return *page* with what the record says between its markers."""

    def filled(place: re.Match[str]) -> str:
        kind = place.group(1)
        return "\n".join(
            [f"<!-- compatibility: {kind} -->", *KINDS[kind](recorded), "<!-- end -->"]
        )

    return PLACE.sub(filled, page)


def versions(recorded: Recorded) -> Iterator[str]:
    """Yield what is supported, and the very versions that it was seen with."""
    rows = []
    for axis, supported in AXES.items():
        found = {
            str(cell["found"][PACKAGES.get(axis, axis)] or "not installed")
            for cell in recorded["cells"]
            if is_well(cell)
        }
        rows.append((HEADS[axis], ", ".join(supported), ", ".join(sorted(found, key=by_number))))
    kombu = {str(cell["found"]["kombu"]) for cell in recorded["cells"] if is_well(cell)}
    celery = ", ".join(AXES["celery"])
    rows.insert(2, ("kombu", f"{celery}, each with its Celery", ", ".join(sorted(kombu))))
    yield from table(("", "supported", "tested with"), rows)


def by_number(version: str) -> list[int]:
    """Return what sorts versions as numbers."""
    return [int(number) for number in re.findall(r"\d+", version)]


def cells(recorded: Recorded) -> Iterator[str]:
    """Yield what came out in every cell."""
    rows = []
    for cell in recorded["cells"]:
        found = cell.get("found") or {}
        versions = [found.get(PACKAGES.get(axis, axis)) or cell[axis] for axis in AXES]
        rows.append((*versions, outcome(cell) if is_well(cell) else f"**{outcome(cell)}**"))
    yield from table((*HEADS.values(), "tests"), rows)


def summary(recorded: Recorded) -> Iterator[str]:
    """Yield how much of the product that is, and which pairs did not meet."""
    run = recorded["cells"]
    well = [cell_of(cell) for cell in run if is_well(cell)]
    met, wanted = pairs_of(cell._asdict() for cell in well), pairs_to_cover(AXES)
    yield (
        f"**{len(run)} of {len(every_cell(AXES))} cells were run, {len(well)} of them without a "
        f"failure; {len(met & wanted)} of {len(wanted)} pairs of versions met in one of these.**"
    )
    missing = sorted(" with ".join(words(pair)) for pair in wanted - met)
    if missing:
        yield f"\nNot yet seen together: {'; '.join(missing)}."
    kinds = Counter(tuple(cell["tests"]) for cell in run)
    # Cells that were run at different times may have had different tests.
    places = ["in each cell"] if len(kinds) == 1 else [f"in {n} of them" for n in kinds.values()]
    told = [
        f"{place}: {listed(list(by_file(kind)))}" for place, kind in zip(places, kinds, strict=True)
    ]
    tests = "; ".join(told)
    machine = recorded["machine"]
    where = ", ".join(filter(None, (machine["system"], machine.get("processor"))))
    yield f"\n{tests[0].upper()}{tests[1:]}. On {machine['cores']} cores: {where}."


def next_debian(recorded: Recorded) -> Iterator[str]:
    """Yield what was seen in Debian's next release, and with which versions."""
    told = recorded.get("next_debian")
    if not told:
        yield "Not yet recorded."
        return
    yield from table(("there", "version"), list(told["found"].items()))
    where = told["machine"]
    well = outcome(told) if is_well(told) else f"**{outcome(told)}**"
    yield f"\n{well}: {listed([f'`{path}`' for path in told['tests']])}, on {where['cores']} cores."


def listed(words: Sequence[str]) -> str:
    """Return *words* as a sentence lists them."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def by_file(tests: Sequence[str]) -> Iterator[str]:
    """Yield each file or folder of *tests*, with how many of its tests are meant if not all."""
    for path, count in Counter(test.partition("::")[0] for test in tests).items():
        is_part = any(test.startswith(f"{path}::") for test in tests)
        yield f"{count} test{'s' * (count > 1)} of `{path}`" if is_part else f"`{path}`"


def words(pair: frozenset[tuple[str, str]]) -> list[str]:
    """Return two versions in words, in the order of the axes."""
    by_axis = dict(pair)
    return [f"{HEADS[axis]} {by_axis[axis]}" for axis in AXES if axis in by_axis]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


#: What can stand between markers -> what writes it.
KINDS: dict[str, Callable[[Recorded], Iterator[str]]] = {
    "versions": versions,
    "cells": cells,
    "summary": summary,
    "next_debian": next_debian,
}


def main() -> int:
    """Write the pages."""
    for page in PAGES:
        page.write_text(rendered(page.read_text(), read()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
