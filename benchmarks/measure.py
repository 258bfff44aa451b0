"""Measure candidates in turns, in one run, and compare their medians: what all benchmarks share."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.record import Table, Verdict


def nothing(_: object = None) -> None:
    """Do nothing."""


@dataclass
class Candidate:
    """
    Something to be measured.

    Attributes:
        name: As the tables have it.
        cycle: What is measured.
        undo: Takes what *cycle* returned; is not measured.
        before: Is called before each turn.
        after: Is called after each turn.
        times: Of each cycle [s].
    """

    name: str
    cycle: Callable[[], Any]
    undo: Callable[[Any], object] = nothing
    before: Callable[[], object] = nothing
    after: Callable[[], object] = nothing
    times: list[float] = field(default_factory=list)

    def turn(self, cycles: int) -> None:
        """Measure some cycles, after two that are not counted."""
        self.before()
        self.undo(self.cycle())
        self.undo(self.cycle())
        for _ in range(cycles):
            started = time.perf_counter()
            outcome = self.cycle()
            self.times.append(time.perf_counter() - started)
            self.undo(outcome)
        self.after()

    def quantile(self, share: float) -> float:
        """Return the time that *share* of the cycles stay below [s]."""
        if share == 0.5:
            return self.p50
        ordered = sorted(self.times)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def p50(self) -> float:
        """Median [s]."""
        return statistics.median(self.times)


@dataclass(frozen=True)
class Target:
    """
    A promise: *name* takes at most *limit* times what *against* take together.

    Attributes:
        name: Of a candidate.
        against: Names of candidates.
        limit: Of the ratio [1].
        share: Which quantile of both is compared; the median if nothing else is said.
    """

    name: str
    against: tuple[str, ...]
    limit: float
    share: float = 0.5


def alternate(candidates: Sequence[Candidate], rounds: int, cycles: int) -> None:
    """Give every candidate its turn in every round."""
    for number in range(rounds):
        for candidate in candidates:
            candidate.turn(cycles)
        progress(number + 1, rounds)


def progress(done: int, of: int) -> None:
    """Say how far a long measurement is, in a line that is overwritten."""
    text = f"  round {done} of {of}" if done < of else " " * 30 + "\r"
    print(f"\r{text}", end="", file=sys.stderr, flush=True)


def table(title: str, candidates: Sequence[Candidate]) -> Table:
    """Return medians and spread [us], and ratios to the first candidate."""
    rows = [
        (
            one.name,
            *(round(one.quantile(share) * 1e6, 1) for share in (0.1, 0.5, 0.9, 0.99)),
            round(one.p50 / candidates[0].p50, 3),
        )
        for one in candidates
    ]
    return Table(f"{title} [us]", ("", "p10", "p50", "p90", "p99", "ratio"), tuple(rows))


def verdicts(candidates: Sequence[Candidate], targets: Sequence[Target]) -> list[Verdict]:
    """Return whether each of *targets* was met in this run."""
    by_name = {one.name: one for one in candidates}
    found = []
    for target in targets:
        whole = sum(by_name[name].quantile(target.share) for name in target.against)
        ratio = by_name[target.name].quantile(target.share) / whole
        told = f"({' + '.join(target.against)})" if target.against[1:] else target.against[0]
        which = "" if target.share == 0.5 else f" [p{target.share * 100:g}]"
        found.append(Verdict(f"{target.name} / {told}{which}", round(ratio, 4), target.limit))
    return found


def arguments(doc: str | None, given: Sequence[str] | None, **defaults: int) -> argparse.Namespace:
    """
    Return what the command line of a benchmark says: rounds, cycles, check, record.

    Args:
        doc: What ``--help`` says.
        given: The command line; None for that of the process.
        **defaults: Of rounds and cycles, where they are not 20 and 50.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rounds, cycles = defaults.get("rounds", 20), defaults.get("cycles", 50)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"turns of each ({rounds})")
    parser.add_argument("--cycles", type=int, default=cycles, help=f"measured per turn ({cycles})")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--record", action="store_true", help="keep the result for the docs")
    return parser.parse_args(given)
