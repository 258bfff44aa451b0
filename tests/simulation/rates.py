"""
Directed schedules of starts that have a rate: each shows what a guard of it is for.

As in `simulation.schedules`, a story returns what went wrong in it, in words. At most one may start
in a window, which lasts for less than a lease.
"""

from __future__ import annotations

from collections.abc import Callable

from celery_redlock.lock.algorithm.effects import Sleep
from celery_redlock.task.rate import Rate
from simulation.crew import Crew
from simulation.hosts import Host, Process
from simulation.schedules import A, B, C, Schedule, X, broken
from simulation.world import RULES

__all__ = ["RATES", "RATE_BREAKS", "forgotten"]

RATE = Rate(1, 0.2)
#: Just before a start may come after its place was asked for [s].
LATEST = RATE.within - 0.003
#: Nearly as long as one waits for a node: too long for a start, of those who are near [s].
FAR = 0.045
#: A message that takes so long comes when all is over [s].
NEVER = 5.0


class Starts(Schedule):
    """Three nodes; clients x and y, which start something."""

    def __init__(self, rate: Rate = RATE) -> None:
        super().__init__()
        self.rate = rate

    def start(self, host: Host, at: float, *names: str) -> None:
        """Have a client try once to start something at a time [s]."""
        self.at(at, lambda: host.run(self.crew_of(*names).start(host, 0.0)))

    def crew_of(self, *names: str) -> Crew:
        return Crew(self, until=0.0, names=names or ("k",), rate=self.rate)

    def start_as_soon_as_may_be(self, host: Host, since: float, until: float) -> None:
        """Have it try again and again."""

        def steps() -> Process:
            while self.now < until:
                yield from self.crew_of().start(host, 0.0)
                yield Sleep(0.0003)

        self.at(since, lambda: host.run(steps()))

    def over_rate(self, most: int = 2) -> list[str]:
        """Run, and return who has started too early; or that nobody has, but should."""
        self.run()
        found = [f"one started at {one:.4f} s, the next at {other:.4f} s"
                 for one, other in self.rush()]  # fmt: skip
        starts = len(self.starts["k"])
        return broken(self) + found + ([] if starts >= most else [f"{starts} have started"])


def ended() -> list[str]:
    """Let x start something that ends at once, and y try to."""
    world = Starts()
    world.start(world.x, 0.0)
    world.start_as_soon_as_may_be(world.y, 0.05, 0.4)
    return world.over_rate()


def each_for_itself() -> list[str]:
    """Let x start something, and y, which has not started anything."""
    world = Starts()
    world.start(world.x, 0.0)
    world.start(world.y, 0.05)
    return world.over_rate(most=1)


def late_answer() -> list[str]:
    """Let x be granted its place by A at once, and by B as late as may be; y asks A and C."""
    world = Starts()
    world.ways = {(X, B): [LATEST], (X, C): [NEVER]}
    world.start(world.x, 0.0)
    world.start_as_soon_as_may_be(world.y, 0.1, 0.4)
    return world.over_rate()


def stopped_before_the_grant() -> list[str]:
    """Let x stand still before it hears that it is granted its place."""
    world = Starts()
    world.start(world.x, 0.0)
    world.at(0.0005, world.stop, world.x, 0.19)
    world.start_as_soon_as_may_be(world.y, 0.1, 0.4)
    return world.over_rate(most=1)


def one_after_the_other() -> list[str]:
    """Let x take three places, each as late as may be; y one of them on A and C."""
    world = Starts()
    world.ways = {(X, B): [LATEST] * 3, (X, C): [NEVER] * 3}
    world.start(world.x, 0.0, "k", "l", "m")
    world.start_as_soon_as_may_be(world.y, 0.1, 0.4)
    return world.over_rate(most=1)


def far_away() -> list[str]:
    """Let x take two places, far from B and C, and have longer for it; y the first on A and C."""
    world = Starts()
    world.ways = {(X, B): [FAR] * 20, (X, C): [NEVER] * 20}
    world.start(world.x, 0.0, "k", "l")
    world.start_as_soon_as_may_be(world.y, 0.15, 0.8)
    return world.over_rate()


def forgotten(rate: Rate = RATE) -> list[str]:
    """Let x start something, and A and B lose their memory."""
    world = Starts(rate)
    world.start(world.x, 0.0)
    for node in (A, B):
        world.at(0.01, world.crash, world.nodes[node], 0.01)
    ends = RULES.quarantine + 2 * rate.window
    world.start_as_soon_as_may_be(world.y, 0.05, ends)
    return world.over_rate()


RATES: dict[str, Callable[[], list[str]]] = {
    story.__name__: story
    for story in (
        ended,
        each_for_itself,
        late_answer,
        stopped_before_the_grant,
        one_after_the_other,
        far_away,
        forgotten,
    )
}
#: As `simulation.schedules.BREAKS`.
RATE_BREAKS: dict[str, tuple[str, ...]] = {
    "ended": ("start-stands",),
    "each_for_itself": ("counted-together",),
    "late_answer": ("start-slack",),
    "stopped_before_the_grant": ("start-in-time",),
    "one_after_the_other": ("all-starts-in-time",),
    "far_away": ("longer-where-far",),
    "forgotten": ("restart-guard",),
}
