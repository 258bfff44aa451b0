"""Measure candidates in turns, in one run, and compare their medians: what all benchmarks share."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


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
        ordered = sorted(self.times)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def p50(self) -> float:
        """Median [s]."""
        return statistics.median(self.times)


@dataclass(frozen=True)
class Target:
    """A promise: the median of *name* is at most *limit* times the sum of those of *against*."""

    name: str
    against: tuple[str, ...]
    limit: float


def alternate(candidates: Sequence[Candidate], rounds: int, cycles: int) -> None:
    """Give every candidate its turn in every round."""
    for number in range(rounds):
        for candidate in candidates:
            candidate.turn(cycles)
        print(f"\r  round {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    print("\r" + " " * 30 + "\r", end="", file=sys.stderr)


def show(title: str, candidates: Sequence[Candidate]) -> None:
    """Print medians and spread, and ratios to the first candidate."""
    print(f"\n{title}\n")
    print(f"{'[us]':42}{'p10':>9}{'p50':>9}{'p90':>9}{'p99':>9}{'ratio':>8}")
    for one in candidates:
        figures = [one.quantile(share) * 1e6 for share in (0.1, 0.5, 0.9, 0.99)]
        ratio = one.p50 / candidates[0].p50
        print(f"{one.name:42}" + "".join(f"{figure:9.0f}" for figure in figures) + f"{ratio:8.2f}")


def check(candidates: Sequence[Candidate], targets: Sequence[Target]) -> bool:
    """Print whether each of *targets* was met in this run; return whether all were."""
    p50 = {one.name: one.p50 for one in candidates}
    print("\nTargets, as ratios of medians in this run\n")
    met = []
    for target in targets:
        ratio = p50[target.name] / sum(p50[name] for name in target.against)
        met.append(ratio <= target.limit)
        told = f"({' + '.join(target.against)})" if target.against[1:] else target.against[0]
        verdict = "met" if met[-1] else "MISSED"
        print(f"{verdict:7}{ratio:6.2f} <= {target.limit:<5} {target.name} / {told}")
    return all(met)


def arguments(doc: str | None, given: Sequence[str] | None) -> argparse.Namespace:
    """Return what the command line of a benchmark says: rounds, cycles, check."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each candidate")
    parser.add_argument("--cycles", type=int, default=50, help="cycles per turn on loopback")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    return parser.parse_args(given)
