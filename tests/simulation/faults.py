"""What goes wrong, how often, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from celery_redlock.lock.records import Keys
from simulation.crew import NAME
from simulation.nodes import SimulatedNode, Store

if TYPE_CHECKING:
    from simulation.network import Link
    from simulation.world import World

__all__ = ["CALM", "HARSH", "Chaos", "Faults"]

#: What a node that keeps its data in a file loses of them when it dies, at most [s].
UNSAVED = 1.0
#: How many keys a node evicts at a time at most, and how often these are any of them [1].
MOST_EVICTED, ANY_KEYS = 3, 0.5
#: Of no holder of ours, and without an end.
STUCK = b"set by hand"


@dataclass(frozen=True)
class Chaos:
    """
    How often things go wrong, each in events per second of the whole world.

    Attributes:
        crash: A node loses its memory and comes back.
        revive: A node dies and comes back with what it had saved.
        flush: A node's data are wiped, on command.
        evict: The only node evicts keys as its memory is full; several that might are refused.
        freeze: A node stands still for a while.
        fill: A node has no memory left for a while, and takes no writes.
        forget: A node loses its scripts.
        step: A node's clock is set forward or back.
        stop: A client stands still for a while.
        kill: A client dies, and another one takes its place.
        interrupt: A client is interrupted if it is acquiring.
        cut: A client and a node cannot hear each other for a while.
        deaf: A client hears nothing of a node for a while, which hears it.
        mute: The same the other way round.
        reset: A connection breaks.
        revoke: An operator releases the lock of whoever holds it.
        stuck: Somebody sets the key of the lock by hand on a node, for a while.
        lie: A node of several says of fences that they are larger, for a while.
        slow: Share of messages that take long [1, not per second].
        unheard: Share of wake-ups that are lost [likewise].
        rate: How wrong clocks run at most [1, not per second].
        skew: How wrong wall clocks are at most [s].
    """

    crash: float = 0.0
    revive: float = 0.0
    flush: float = 0.0
    evict: float = 0.0
    freeze: float = 0.0
    fill: float = 0.0
    forget: float = 0.0
    step: float = 0.0
    stop: float = 0.0
    kill: float = 0.0
    interrupt: float = 0.0
    cut: float = 0.0
    deaf: float = 0.0
    mute: float = 0.0
    reset: float = 0.0
    revoke: float = 0.0
    stuck: float = 0.0
    lie: float = 0.0
    slow: float = 0.0
    unheard: float = 0.0
    rate: float = 0.02
    skew: float = 0.12

    def per(self, factor: float) -> Chaos:
        """Return the same with everything that happens *factor* times as often."""
        names = {field.name for field in fields(self)} - {"slow", "unheard", "rate", "skew"}
        return replace(self, **{name: getattr(self, name) * factor for name in names})


CALM = Chaos()
HARSH = Chaos(
    crash=0.15,
    revive=0.05,
    flush=0.05,
    freeze=0.6,
    fill=0.3,
    forget=0.2,
    stop=1.5,
    kill=0.3,
    interrupt=1.0,
    cut=0.6,
    deaf=0.4,
    mute=0.4,
    reset=1.0,
    revoke=0.2,
    stuck=0.1,
    lie=0.1,
    slow=0.05,
)


class Faults:
    """
    Has things go wrong in a world.

    Args:
        world: That one.
        reborn: Has a client that was killed go on as another process.
    """

    def __init__(self, world: World, reborn: Callable[[int], None]) -> None:
        self.world = world
        self.chance = world.chance
        self.ttl = world.rules.ttl
        self.reborn = reborn
        self._stuck = self._lies = False
        self._steps_again = 0.0

    def plan(self, until: float) -> None:
        """Plan what goes wrong up to *until* [s]."""
        ways = [field.name for field in fields(Chaos)]
        for name in ways:
            happen = getattr(self, name, None)
            if happen is not None:
                self._next(name, getattr(self.world.chaos, name), happen, until)

    def _next(self, name: str, rate: float, happen: Callable[[], None], until: float) -> None:
        when = self.world.now + (self.chance.expovariate(rate) if rate else until)
        if when < until:
            self.world.at(when, self._happen, name, rate, happen, until)

    def _happen(self, name: str, rate: float, happen: Callable[[], None], until: float) -> None:
        self.world.note(name)
        happen()
        self._next(name, rate, happen, until)

    # -- nodes ---------------------------------------------------------------------

    def crash(self) -> None:
        """Have a node lose its memory."""
        self.world.crash(self.chance.choice(self.world.nodes), self.chance.uniform(0.0, self.ttl))

    def revive(self) -> None:
        """Have a node save its data now, and die a little later."""
        node = self.chance.choice(self.world.nodes)
        saved: Store = dict(node.store)
        away = self.chance.uniform(0.0, self.ttl)
        when = self.world.now + self.chance.uniform(0.0, UNSAVED)
        self.world.at(when, self._die, node, node.boots, away, saved)

    def _die(self, node: SimulatedNode, boots: int, away: float, saved: Store) -> None:
        if node.boots == boots:  # or it has died since of something else
            stands = node.store.items()  # whoever removed a key by hand removes it again
            kept = {key: it for key, it in saved.items() if it[0] != STUCK or (key, it) in stands}
            self.world.crash(node, away, kept)

    def flush(self) -> None:
        self.chance.choice(self.world.nodes).flush()

    def evict(self) -> None:
        """Have the only node lose some keys: any, or those that would expire next."""
        if len(self.world.nodes) > 1:
            return
        node = self.world.nodes[0]
        keys = sorted(node.store, key=lambda key: (node.store[key][1], key))
        if self.chance.random() < ANY_KEYS:
            self.chance.shuffle(keys)
        for key in keys[: self.chance.randint(1, MOST_EVICTED)]:
            node.evict(key)

    def freeze(self) -> None:
        node = self.chance.choice(self.world.nodes)
        self.world.freeze(node, self.chance.uniform(0.0, 2 * self.ttl))

    def fill(self) -> None:
        node = self.chance.choice(self.world.nodes)
        node.is_full = True
        length = self.chance.uniform(0.0, 2 * self.ttl)
        self.world.at(self.world.now + length, setattr, node, "is_full", False)

    def forget(self) -> None:
        self.chance.choice(self.world.nodes).forget_scripts()

    def step(self) -> None:
        """Set a node's clock wrong and, some time later, right; one node at a time."""
        if self.world.now < self._steps_again:
            return
        rest = self.world.rules.quarantine + 2 * self.ttl  # as long as the first step has effects
        back = self.world.now + rest + self.chance.uniform(0.0, 4 * self.ttl)
        self._steps_again = back + rest
        node_clock = self.world.clocks[self.chance.choice(self.world.nodes).position]
        seconds = self.chance.uniform(-2 * self.ttl, 2 * self.ttl)
        node_clock.step(seconds)
        self.world.at(back, node_clock.step, -seconds)

    def stuck(self) -> None:
        """Have a key stand that is nobody's, on one node at a time."""
        if self._stuck:
            return
        node = self.chance.choice(self.world.nodes)
        key = Keys.of(self.world.rules.prefix, NAME).lock
        if node.get(key) is not None:
            return
        self._stuck = True
        node.store[key] = (STUCK, float("inf"))
        self.world.at(
            self.world.now + self.chance.uniform(0.0, 4 * self.ttl), self._unstick, node, key
        )

    def _unstick(self, node: SimulatedNode, key: bytes) -> None:
        self._stuck = False
        for one in self.world.nodes:
            if one is node and one.get(key) == STUCK:
                one.delete(key)

    def lie(self) -> None:
        """Have a node of several say of each fence that it is larger, one node at a time."""
        if self._lies or len(self.world.nodes) < 3:
            return
        self._lies = True
        node = self.chance.choice(self.world.nodes)
        farthest = 3 * int(self.world.rules.longest_skew * 1000) << 12

        def larger(reply: Any) -> Any:
            is_grant = isinstance(reply, list) and len(reply) == 3 and reply[0] == 1
            if not is_grant or reply[2] == b"0":
                return reply
            return [*reply[:2], b"%d" % (int(reply[2]) + self.chance.randint(0, farthest))]

        node.lies = larger
        self.world.at(
            self.world.now + self.chance.uniform(0.0, 4 * self.ttl), self._tell_the_truth, node
        )

    def _tell_the_truth(self, node: SimulatedNode) -> None:
        self._lies, node.lies = False, lambda reply: reply

    # -- clients --------------------------------------------------------------------

    def stop(self) -> None:
        host = self.chance.choice(self.world.hosts)
        self.world.stop(host, self.chance.uniform(0.0, 2 * self.ttl))

    def kill(self) -> None:
        host = self.chance.choice(self.world.hosts)
        self.world.kill(host)
        self.world.at(self.world.now + self.chance.uniform(0.0, self.ttl), self.reborn, host.number)

    def interrupt(self) -> None:
        self.chance.choice(self.world.hosts).interrupt()

    def revoke(self) -> None:
        """Have an operator release the lock of its present holder."""
        self.world.revoke()

    # -- the network -----------------------------------------------------------------

    def cut(self) -> None:
        """Keep a client and a node from hearing each other."""
        link, until = self._some_link(), self._later()
        link.up_cut_until = max(link.up_cut_until, until)
        link.down_cut_until = max(link.down_cut_until, until)

    def deaf(self) -> None:
        """Keep a client from hearing a node."""
        link = self._some_link()
        link.down_cut_until = max(link.down_cut_until, self._later())

    def mute(self) -> None:
        """Keep a node from hearing a client."""
        link = self._some_link()
        link.up_cut_until = max(link.up_cut_until, self._later())

    def reset(self) -> None:
        self._some_link().reset()

    def _later(self) -> float:
        return self.world.now + self.chance.uniform(0.0, 4 * self.ttl)

    def _some_link(self) -> Link:
        return self.chance.choice(self.chance.choice(self.world.hosts).links)
