"""Which guards are switched off together, and how a whole set of configurations is explored."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from exploration import fencing, repair
from exploration.nodes import NOTHING, Off
from exploration.search import Model, explore

__all__ = ["FENCING_GUARDS", "REPAIR_GUARDS", "Row", "explore_fencing", "explore_repair"]

FENCING_GUARDS = (
    "write-back",
    "exact-fence",
    "owner-renewal",
    "confirm-sets-nothing",
    "largest-fence",
    "growing-fence",
)
REPAIR_GUARDS = (
    "renewal-deadline",
    "own-clock",
    "repair-heeds-fence",
    "repaired-majority",
    "repaired-later",
    "quarantined-renewal",
    "dead-yes",
    "restart-guard",
)


class Row(NamedTuple):
    """
    What became of one variant.

    Attributes:
        model: Which, and its bounds.
        guards_off: Guards that are switched off.
        violating: In how many configurations a law is broken.
        configurations: How many there are; all were explored to the end.
        states: How many different states were seen.
        seconds: Of this process, on the CPU [s].
        kinds: Which law is broken in how many configurations.
        example: A way to a broken law, in plain words.
    """

    model: str
    guards_off: tuple[str, ...]
    violating: int
    configurations: int
    states: int
    seconds: float
    kinds: dict[str, int]
    example: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Which laws are broken, in words."""
        return ", ".join(f"{kind} {times}" for kind, times in sorted(self.kinds.items()))


def explore_fencing(
    off: Off = NOTHING,
    *,
    restarts: int = 0,
    bumps: int = 0,
    rounds: int = 2,
    shortest: bool = False,
    **largest: int,
) -> Row:
    merge = not (restarts or bumps)
    models = (
        (fencing.Fencing(stored, proposed, rounds, restarts, bumps, off), times)
        for stored, proposed, times in fencing.configurations(**largest, merge=merge)
    )
    bound = f"rounds={rounds} restarts={restarts} bumps={bumps}"
    return together(f"fencing {bound}", off, models, shortest=shortest)


def explore_repair(
    off: Off = NOTHING,
    *,
    ttl: int = 2,
    rounds: int = 2,
    restarts: int = 1,
    learns: bool = True,
    shortest: bool = True,
) -> Row:
    bounds: dict[str, Any] = {"ttl": ttl, "rounds": rounds, "restarts": restarts, "learns": learns}
    models = ((repair.Repair(**start, **bounds, off=off), 1) for start in repair.configurations())
    bound = " ".join(f"{name}={int(value)}" for name, value in bounds.items())
    return together(f"repair {bound}", off, models, shortest=shortest)


def together(name: str, off: Off, models: Iterator[tuple[Model, int]], *, shortest: bool) -> Row:
    """Return what became of all *models*, each of which stands for a number of them."""
    began = time.process_time()
    seen, known, kinds, example = 0, 0, Counter[str](), ()
    for model, times in models:
        outcome = explore(model, shortest=shortest)
        seen += outcome.states
        known += times
        if outcome.broken:
            kinds[outcome.broken.partition(":")[0]] += times
            example = min(example or outcome.steps, outcome.steps, key=len)  # type: ignore[assignment]
    took = time.process_time() - began
    return Row(name, tuple(sorted(off)), kinds.total(), known, seen, took, dict(kinds), example)
