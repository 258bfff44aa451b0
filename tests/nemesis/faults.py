"""
What can happen to nodes, to the network and to clients; each is a strike with its end.

A strike begins when its ``with`` is entered and is over when that is left, or after it has done
what takes no time. Where the whole field is struck at once, a majority is gone for a while, which
costs time and nothing else; memory is lost by as many nodes at once as the promise allows.

Many strikes come upon two nodes that were away: whoever took a lock meanwhile has three votes of
five and none to spare, so that one more node that forgets is what a contender without a guard
cannot stand.
"""

from __future__ import annotations

import contextlib
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import redis

from nemesis.contenders import MAX_TTL
from nemesis.field import NODES, ClientProcess, Field

__all__ = ["FAULTS", "Fault", "longest_step"]

Strike = Callable[[Field, random.Random], AbstractContextManager[None]]

#: The farthest that a node's clock is set ahead or back [s]: over any lease.
longest_step = 3.0


@dataclass(frozen=True)
class Fault:
    """
    A fault and what is to be expected of it.

    Attributes:
        name: On the command line.
        about: One line for the help.
        strike: Begins, and at the end of its ``with`` ends.
        lasting: For how long, at least and at most [s].
        gap: Pause between two strikes, at least and at most [s].
        shows: Where no contender can break: the hit that says that strikes were felt.
        breaks: Contenders that must break in a long run; those whose plain register must lose
            updates are written ``"careless register"``.
        needs: What the field has to have, see `nemesis.field.field_of`.
    """

    name: str
    about: str
    strike: Strike
    lasting: tuple[float, float]
    gap: tuple[float, float]
    shows: str = ""
    breaks: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()


def ask(field: Field, position: int, *command: object) -> object:
    """Return what the node at *position* answers, past any network; None if it does not."""
    with contextlib.suppress(redis.RedisError):
        answer: object = field.past_the_network[position].execute_command(*command)
        return answer
    return None


@contextlib.contextmanager
def paused(field: Field, positions: list[int]) -> Iterator[None]:
    for position in positions:
        field.nodes[position].pause()
        field.hits["pauses"] += 1
    with field.struck("stopped (SIGSTOP)", positions):
        try:
            yield
        finally:
            for position in positions:
                field.nodes[position].resume()


def without_two(field: Field, rng: random.Random) -> list[int]:
    """Have two nodes away for longer than some lease, and return the other three."""
    away = field.some(rng, 2, 2)
    with paused(field, away):
        field.wait(rng.uniform(0.5, MAX_TTL))
    return rng.sample([p for p in range(NODES) if p not in away], NODES - 2)


def restart(field: Field, position: int) -> None:
    with field.struck("restarted", [position]):
        field.nodes[position].restart()
    field.hits["restarts"] += 1


# -- nodes ---------------------------------------------------------------------------


@contextlib.contextmanager
def kill_minority(field: Field, rng: random.Random) -> Iterator[None]:
    positions = field.some(rng, 1, 2)
    try:
        with field.struck("killed (SIGKILL)", positions):
            for position in positions:
                field.nodes[position].kill()
            yield
    finally:
        for position in positions:
            restart(field, position)


@contextlib.contextmanager
def kill_the_third(field: Field, rng: random.Random) -> Iterator[None]:
    """Restart one of three nodes that had to do without the other two."""
    restart(field, without_two(field, rng)[0])
    yield


@contextlib.contextmanager
def kill9_empty(field: Field, rng: random.Random) -> Iterator[None]:
    with rng.choice([kill_minority, kill_the_third, kill_the_third])(field, rng):
        yield


@contextlib.contextmanager
def rolling_restart(field: Field, rng: random.Random) -> Iterator[None]:
    between = rng.choice([0.0, 0.0, 0.0, 0.05, 0.1, MAX_TTL * 1.2])
    for position in field.some(rng, NODES, NODES):
        restart(field, position)
        if between:
            field.wait(between)
    yield


@contextlib.contextmanager
def pause_nodes(field: Field, rng: random.Random) -> Iterator[None]:
    with paused(field, field.any_number(rng)):
        yield


@contextlib.contextmanager
def flushall(field: Field, rng: random.Random) -> Iterator[None]:
    """Wipe a minority, or one of three that had to do without the other two."""
    positions = without_two(field, rng)[:1] if rng.random() < 0.5 else field.some(rng, 1, 2)
    for position in positions:
        field.hits["keys wiped"] += int(str(ask(field, position, "DBSIZE") or 0))
        with field.struck("wiped (FLUSHALL)", [position]):
            ask(field, position, "FLUSHALL")
    yield


@contextlib.contextmanager
def script_flush(field: Field, rng: random.Random) -> Iterator[None]:
    for position in field.any_number(rng):
        with field.struck("scripts forgotten (SCRIPT FLUSH)", [position]):
            ask(field, position, "SCRIPT", "FLUSH")
    yield


@contextlib.contextmanager
def client_kill(field: Field, rng: random.Random) -> Iterator[None]:
    for position in field.any_number(rng):
        with field.struck("connections ended (CLIENT KILL)", [position]):
            killed = ask(field, position, "CLIENT", "KILL", "TYPE", "normal")
        field.hits["connections ended"] += int(str(killed or 0))
    yield


@contextlib.contextmanager
def maxmemory(field: Field, rng: random.Random) -> Iterator[None]:
    positions = field.any_number(rng)
    for position in positions:
        ask(field, position, "CONFIG", "SET", "maxmemory", "1")
    with field.struck("out of memory (maxmemory)", positions):
        try:
            yield
        finally:
            for position in positions:
                ask(field, position, "CONFIG", "SET", "maxmemory", "0")


@contextlib.contextmanager
def step_minority(field: Field, rng: random.Random) -> Iterator[None]:
    with stepped(field, rng, field.some(rng, 1, 2)):
        yield


@contextlib.contextmanager
def step_the_third(field: Field, rng: random.Random) -> Iterator[None]:
    with stepped(field, rng, without_two(field, rng)[:1], forward=True):
        yield


@contextlib.contextmanager
def stepped(
    field: Field, rng: random.Random, positions: list[int], *, forward: bool = False
) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for position in positions:
            sign = 1 if forward else rng.choice([1, -1])
            ahead = sign * rng.uniform(MAX_TTL + 0.1, longest_step)
            field.set_clock(position, ahead)
            stack.callback(field.set_clock, position, 0.0)
            stack.enter_context(field.struck(f"clock set {ahead:+.2f} s", [position]))
            field.hits["steps"] += 1
        yield


@contextlib.contextmanager
def clock_steps(field: Field, rng: random.Random) -> Iterator[None]:
    with rng.choice([step_minority, step_the_third, step_the_third])(field, rng):
        yield


# -- the network ---------------------------------------------------------------------


@contextlib.contextmanager
def blackhole(field: Field, rng: random.Random) -> Iterator[None]:
    positions = field.any_number(rng)
    for position in positions:
        field.links[position].blackhole()
    yield from mended(field, positions, "cut off: nothing passes")


@contextlib.contextmanager
def slow(field: Field, rng: random.Random) -> Iterator[None]:
    positions = field.any_number(rng)
    for position in positions:
        field.links[position].delay(rng.choice([0.02, 0.05, 0.07, 0.2, 0.5]))
    yield from mended(field, positions, "slow network")


@contextlib.contextmanager
def reset(field: Field, rng: random.Random) -> Iterator[None]:
    positions = field.any_number(rng)
    for position in positions:
        field.links[position].reset()
    yield from mended(field, positions, "cut off: connections are reset")


@contextlib.contextmanager
def one_way(field: Field, rng: random.Random) -> Iterator[None]:
    positions = field.any_number(rng)
    for position in positions:
        link = field.links[position]
        rng.choice([link.lose_replies, link.lose_requests])()
    yield from mended(field, positions, "cut off: one way only")


def mended(field: Field, positions: list[int], what: str) -> Iterator[None]:
    field.hits["ways"] += len(positions)
    with field.struck(what, positions):
        try:
            yield
        finally:
            for position in positions:
                field.links[position].pass_through()


# -- clients -------------------------------------------------------------------------


def one_of_each(field: Field, rng: random.Random) -> list[ClientProcess]:
    contenders = dict.fromkeys(client.contender for client in field.clients)
    return [rng.choice(field.clients_of(contender)) for contender in contenders]


def wait_for_hold(field: Field, client: ClientProcess) -> None:
    for _ in range(200):
        if field.over.is_set() or client.is_holding:
            return
        field.wait(0.01)


@contextlib.contextmanager
def pause_clients(field: Field, rng: random.Random) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for client in one_of_each(field, rng):
            if rng.random() < 0.5:
                wait_for_hold(field, client)
            client.signal(signal.SIGSTOP)
            stack.callback(client.signal, signal.SIGCONT)
            stack.enter_context(field.struck("stopped (SIGSTOP)", [client.name]))
            field.hits["clients stopped"] += 1
        yield


@contextlib.contextmanager
def kill_clients(field: Field, rng: random.Random) -> Iterator[None]:
    ours, *others = one_of_each(field, rng)
    with contextlib.ExitStack() as stack:
        for client in (ours, rng.choice(others)):
            wait_for_hold(field, client)
            client.kill()
            stack.callback(client.start)
            stack.enter_context(field.struck("killed (SIGKILL)", [client.name]))
            field.hits["clients killed"] += 1
        yield


UPON_CLIENTS = (pause_clients, kill_clients)

# -- all of it -----------------------------------------------------------------------

NETWORK, CLOCKS, DATA = frozenset({"network"}), frozenset({"clocks"}), frozenset({"data"})
FORGETFUL = ("unguarded", "pottery")
OUTAGE = (0.3, 2.5 * MAX_TTL)

_SINGLE = [
    Fault(
        "kill9-empty",
        "nodes are killed and come back without their data",
        kill9_empty,
        (0.0, 1.0),
        (1.5, 4.0),
        breaks=FORGETFUL,
    ),
    Fault(
        "kill9-aof",
        "nodes are killed and come back with their data (append-only file)",
        kill_minority,
        (0.0, 1.0),
        (1.0, 3.0),
        shows="restarts",
        needs=DATA,
    ),
    Fault(
        "rolling-restart",
        "all nodes are restarted, one after the other, faster and slower than a lease",
        rolling_restart,
        (0.0, 0.0),
        (2.7, 4.0),
        breaks=FORGETFUL,
    ),
    Fault(
        "pause-nodes",
        "nodes are stopped (SIGSTOP), also a majority",
        pause_nodes,
        OUTAGE,
        (0.3, 2.0),
        breaks=("careless",),
    ),
    Fault(
        "pause-clients",
        "clients are stopped for longer than their lease",
        pause_clients,
        (MAX_TTL, 2 * MAX_TTL),
        (0.2, 1.0),
        breaks=("careless", "careless register"),
    ),
    Fault(
        "blackhole",
        "nothing passes to and from nodes, and comes later",
        blackhole,
        OUTAGE,
        (0.3, 2.0),
        breaks=("careless",),
        needs=NETWORK,
    ),
    Fault(
        "slow",
        "what passes to and from nodes takes up to half a second",
        slow,
        OUTAGE,
        (0.3, 2.0),
        breaks=("careless",),
        needs=NETWORK,
    ),
    Fault(
        "reset",
        "connections are reset",
        reset,
        OUTAGE,
        (0.3, 2.0),
        breaks=("careless",),
        needs=NETWORK,
    ),
    Fault(
        "one-way",
        "requests arrive but replies do not, or the other way round",
        one_way,
        OUTAGE,
        (0.3, 2.0),
        breaks=("careless",),
        needs=NETWORK,
    ),
    Fault(
        "flushall",
        "a minority is wiped (FLUSHALL)",
        flushall,
        (0.0, 0.0),
        (1.0, 3.5),
        breaks=FORGETFUL,
    ),
    Fault(
        "script-flush",
        "nodes forget all scripts",
        script_flush,
        (0.0, 0.0),
        (0.1, 0.5),
        shows="NOSCRIPT",
    ),
    Fault(
        "client-kill",
        "nodes hang up on all clients",
        client_kill,
        (0.0, 0.0),
        (0.3, 1.0),
        shows="connections ended",
    ),
    Fault(
        "maxmemory",
        "nodes have no memory left for writes",
        maxmemory,
        OUTAGE,
        (0.3, 2.0),
        breaks=("careless",),
    ),
    Fault(
        "clock-steps",
        "the clocks of a minority are set forward and back by more than a lease",
        clock_steps,
        (0.2, 2.0),
        (0.5, 2.5),
        breaks=("unguarded",),
        needs=CLOCKS,
    ),
    Fault(
        "kill-clients",
        "clients are killed in the middle of a hold",
        kill_clients,
        (0.0, 0.5),
        (1.0, 3.0),
        shows="holds cut short",
    ),
]


@contextlib.contextmanager
def anything(field: Field, rng: random.Random) -> Iterator[None]:
    """Any of the strikes, and now and then upon clients while nodes are struck as well."""
    fault = rng.choice([fault for fault in _SINGLE if not fault.needs & DATA])
    with contextlib.ExitStack() as stack:
        if fault.strike not in UPON_CLIENTS and rng.random() < 0.25:
            stack.enter_context(rng.choice(UPON_CLIENTS)(field, rng))
        stack.enter_context(fault.strike(field, rng))
        yield


_ALL = Fault(
    "all",
    "a random mix of them",
    anything,
    (0.1, 2.5),
    (0.5, 3.0),
    breaks=("unguarded", "pottery", "careless"),
    needs=NETWORK | CLOCKS,
)

FAULTS: dict[str, Fault] = {fault.name: fault for fault in [*_SINGLE, _ALL]}
