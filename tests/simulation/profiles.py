"""The kinds of worlds that are tried, and what comes of one seed in one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from celery_redlock.task.rate import Rate
from simulation.faults import HARSH, Chaos
from simulation.world import RULES, World

__all__ = ["PROFILES", "Outcome", "Profile", "run"]


@dataclass(frozen=True)
class Profile:
    """
    A kind of world.

    Attributes:
        world: Arguments of `World`; leases are of 0.3 s unless they say otherwise.
        crew: Arguments of `Crew`.
        pace: How many times slower everything is, but for messages and quarantine [1].
    """

    world: Mapping[str, Any]
    crew: Mapping[str, Any] = field(default_factory=dict)
    pace: float = 1.0

    def slower(self, times: float) -> Profile:
        """
        Return the same, at least *times* slower: an hour of it costs less.

        But nobody tries for longer, or rests for less than up to a lease: how often a client asks
        while it waits is no matter of pace.
        """
        pace = max(self.pace, times)
        if pace == self.pace:
            return self
        wait = self.crew.get("wait", 1.0) * self.pace / pace
        return replace(self, pace=pace, crew={**self.crew, "rest": 1.0, "wait": wait})

    def build(self, seed: int) -> World:
        chaos: Chaos = self.world.get("chaos", HARSH)
        ttl = RULES.ttl * self.pace
        rules = replace(self.world.get("rules", RULES), ttl=ttl, max_ttl=ttl)
        how = {**self.world, "rules": rules, "chaos": chaos.per(1.0 / self.pace)}
        return World(seed=seed, **how)


#: Short holds by many clients whose wall clocks disagree: fences differ from node to node.
BUSY = {"chaos": Chaos(slow=0.02, cut=0.5, reset=0.3, skew=0.15), "crew": 5}
LOSSES = Chaos(crash=0.4, revive=0.3, flush=0.3, stop=0.5, reset=0.3, slow=0.05)
BREAKS = Chaos(reset=4.0, cut=1.0, deaf=1.0, mute=1.0, kill=0.5, slow=0.2)
#: Who waits is woken, unless that is lost, or whoever should hear it is dead or stands still.
LINE = Chaos(unheard=0.2, stop=0.3, kill=0.3, interrupt=0.5, reset=0.5, cut=0.3, slow=0.02)
IN_LINE = {"is_woken": True, "crew": 5, "chaos": LINE}
STEPS = Chaos(step=0.5, stop=0.2, cut=0.3, reset=1.0, slow=0.02)
#: Starts of two names, in windows that lapse before a lease would.
STARTS = {"starts": 0.6, "rate": Rate(2, 0.2), "names": ("k", "l"), "hold": 0.3}
STARTS_OF_LONG = {**STARTS, "rate": Rate(2, 2.0)}

PROFILES = {
    "one node": Profile({"size": 1}),
    "one node that evicts": Profile({"size": 1, "chaos": replace(HARSH, evict=0.2)}),
    "three nodes": Profile({"size": 3}),
    "five nodes": Profile({"size": 5, "crew": 4}),
    "nodes that forget": Profile({"size": 3, "chaos": LOSSES}),
    "connections that break": Profile({"size": 3, "chaos": BREAKS}),
    "busy": Profile({"size": 3, **BUSY}, {"hold": 0.07}),
    "busy, five nodes": Profile({"size": 5, **BUSY}, {"hold": 0.07}),
    "clocks as wrong as they may be": Profile({"chaos": Chaos(rate=0.024)}, pace=3.0),
    # Below a second what a lease keeps back for drift is less than the step that counts as one.
    "clocks that are set": Profile({"size": 3, "chaos": STEPS}, pace=10.0),
    "in line": Profile({"size": 3, **IN_LINE}, {"hold": 0.3, "wait": 4.0, "queue": 0.5}, 3.0),
    "in line for places of two names": Profile(
        {"size": 3, **IN_LINE, "chaos": replace(HARSH, unheard=0.2)},
        {"hold": 0.5, "wait": 3.0, "limit": 2, "names": ("k", "l"), "together": 0.3, "queue": 0.3},
        pace=3.0,
    ),
    "starts": Profile({"size": 3}, STARTS),
    "starts, five nodes, in line": Profile({"size": 5, **IN_LINE, "chaos": HARSH}, STARTS),
    "starts, clocks that are set": Profile({"size": 3, "chaos": STEPS}, STARTS_OF_LONG, pace=10.0),
}


@dataclass(frozen=True)
class Outcome:
    """
    What came of one world.

    Attributes:
        profile: Its name.
        seed: Its seed.
        seconds: For how long things went wrong in it [s, its own time].
        grants: How often the lock was granted.
        violations: The laws that were broken, in words.
        met: What happened how often.
    """

    profile: str
    seed: int
    seconds: float
    grants: int
    violations: tuple[str, ...]
    met: Counter[Any]


def run(name: str, seed: int, seconds: float, pace: float = 1.0) -> Outcome:
    """Let a world of the profile *name* live for so long, and say what came of it."""
    profile = PROFILES[name].slower(pace)
    world = profile.build(seed).live(seconds, **profile.crew)
    return Outcome(name, seed, seconds, len(world.holds), violations(world), world.met)


def violations(world: World) -> tuple[str, ...]:
    """Return the laws that were broken in a world that has come to its end, in words."""
    found = [f"exclusion: {one} and {other}" for one, other in world.overlaps()]
    found += [f"one too many: {hold}" for hold in world.crowd()]
    found += [f"over the rate: {one} and {other}" for one, other in world.rush()]
    found += [f"fences: {one} and {other}" for one, other in world.disorder()]
    waiting = set(range(world.crew)) - world.progressed
    found += [f"progress: clients {sorted(waiting)} never got the lock"] if waiting else []
    found += [f"left behind: {value!r}" for value in world.leftovers()]
    found += [f"without an end: {key!r}" for key in world.immortal()]
    return tuple(found)
