"""The calls on locks that are struck, each with what comes before it and after."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from celery_redlock.errors import LockTaken, QuorumUnavailable
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.health import connect
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.testing.servers import Server
from resources.remains import SOON, Remains, looking_at
from resources.strikes import UNHARMED, Place, Strikes
from support.waiting import eventually

__all__ = ["CALLS", "HANDED_OVER", "Found", "Stage", "is_handed_over", "staged", "strike"]

#: A lease outlives every wait for its end; a round that was torn apart is over soon.
RULES = Rules(ttl=100.0, max_ttl=120.0, node_timeout=1.0)
#: Longest wait for a lock that is free, or for nodes that answer [s].
PATIENCE = 60.0

#: Where a granted lock is in nobody's hands: its call has returned, and what is to keep it has not
#: run. From 3.11 on Python does not look for signals there, as nothing but a ``return`` stands in
#: between; 3.10 does, when a call returns. A caller's own line ``lease = locks.acquire(...)`` is
#: such a place, too, and no code of ours can help it. A lease then ends by itself; what the
#: watchdog has by then, with the process.
HANDED_OVER = {
    ("drive", "except StopIteration as end:"),
    ("drive", "return end.value"),
    ("acquisition", "return lease"),
    ("_acquire", "return self.driver.drive("),
    ("acquire", "return self._acquire("),
    ("take", "lease = self._acquire("),
    ("hold", "held = self.take("),
    ("lead", "held = self.take("),
}
#: The first bytecodes of such a line are not where it is handed over: the last ones are.
LAST = ("STORE_FAST", "RETURN_VALUE")


@dataclass
class Stage:
    locks: Redlock
    rival: Redlock
    remains: Remains
    name: str = ""
    prepared: Any = None
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def next_name(self) -> None:
        self.name = f"n{next(self._numbers)}"


@contextlib.contextmanager
def staged(servers: Sequence[Server]) -> Iterator[Stage]:
    urls = [server.url for server in servers]
    bootstrap(urls, RULES)
    locks, rival = Redlock(urls, RULES), Redlock(urls, RULES)
    try:
        for each in (locks, rival):
            connect(each, PATIENCE)
            with each.hold("warm", wait=PATIENCE):  # starts the watchdog
                pass

        def listens() -> bool:
            with contextlib.suppress(LockTaken, QuorumUnavailable):
                locks.acquire("warm", wait=0.02)  # starts to listen
            return is_subscribed(locks)

        with rival.hold("warm", wait=PATIENCE):
            eventually(listens, "subscriptions")
        with looking_at(locks, servers) as remains:
            yield Stage(locks, rival, remains)
    finally:
        locks.close()
        rival.close()


def is_subscribed(locks: Redlock) -> bool:
    found = list(locks.listener._connections)
    return len(found) == len(locks.fanout.nodes) and all(each._sock for each in found)


def hold(stage: Stage) -> None:
    with stage.locks.hold(stage.name, wait=PATIENCE):
        pass


def lead(stage: Stage) -> None:
    terms = stage.locks.lead(stage.name)
    with contextlib.closing(terms):  # closed by its end alone, it swallows what strikes it then
        next(terms)


def acquire(stage: Stage) -> None:
    lease = stage.locks.acquire(stage.name, wait=PATIENCE)
    stage.locks.release(lease)


def release_hastily(stage: Stage) -> None:
    stage.locks.release(stage.prepared, wait=False)


def extend(stage: Stage) -> None:
    with contextlib.suppress(QuorumUnavailable):  # where the machine is too busy to answer
        stage.locks.extend(stage.prepared)


def renew(stage: Stage) -> None:
    """Do what the watchdog's thread does for a lock that is due."""
    watchdog = stage.locks._watchdog
    watchdog.renew([stage.prepared])


def contend(stage: Stage) -> None:
    with contextlib.suppress(LockTaken, QuorumUnavailable):
        stage.locks.acquire(stage.name, wait=0.02)


def nothing(stage: Stage) -> None:
    """Need nothing before or after."""


def with_lease(stage: Stage) -> None:
    stage.prepared = stage.locks.acquire(stage.name, wait=PATIENCE)


def with_held(stage: Stage) -> None:
    stage.prepared = stage.locks.take(LockRequest(stage.name, 100.0, PATIENCE))


def with_rival(stage: Stage) -> None:
    stage.prepared = stage.rival.acquire(stage.name, wait=PATIENCE)


def without_two_nodes(stage: Stage) -> None:
    for node in stage.locks.fanout.nodes[:2]:
        node.sock.shutdown(socket.SHUT_RDWR)


def release(stage: Stage) -> None:
    stage.locks.release(stage.prepared)


def renew_and_give_back(stage: Stage) -> None:
    held, watchdog = stage.prepared, stage.locks._watchdog
    held.ensure_held()
    before = held.renewals

    def is_renewed() -> bool:
        watchdog.renew([held])
        return bool(held.renewals > before)

    eventually(is_renewed, "renewal of it")
    stage.locks.give_back(held)


def rival_releases(stage: Stage) -> None:
    assert stage.remains.holders(stage.name) >= 3, "the rival's lock is gone"
    stage.rival.release(stage.prepared)


@dataclass(frozen=True)
class Call:
    before: Callable[[Stage], None]
    call: Callable[[Stage], None]
    after: Callable[[Stage], None]


CALLS = {
    "hold": Call(nothing, hold, nothing),
    "lead": Call(nothing, lead, nothing),
    "acquire and release": Call(nothing, acquire, nothing),
    "release hastily": Call(with_lease, release_hastily, nothing),
    "extend": Call(with_lease, extend, release),
    "renew": Call(with_held, renew, renew_and_give_back),
    "contend": Call(with_rival, contend, rival_releases),
    "hold while connections end": Call(without_two_nodes, hold, nothing),
}


@dataclass(frozen=True)
class Found:
    place: Place
    problems: list[str]


def strike(
    stage: Stage, what: str, error: type[BaseException], strikes: Strikes, soon: float = SOON
) -> Iterator[Found]:
    """Strike a call of `CALLS` at every moment; yields each strike, and what it left behind."""
    call, unharmed = CALLS[what], 0
    while unharmed < UNHARMED:
        stage.next_name()
        call.before(stage)
        struck = strikes.once(lambda: call.call(stage))
        problems = []
        try:
            call.after(stage)
        except AssertionError as problem:
            problems.append(str(problem))
        is_known = struck is not None and is_handed_over(struck.place)
        problems += stage.remains.of(stage.name, 0.1 if is_known else soon)
        if struck is None:
            assert not problems, problems
            unharmed += 1
            continue
        if not isinstance(struck.error, error):
            problems.append(f"{struck.error!r} came out of it")
        yield Found(struck.place, problems)


def is_handed_over(place: Place) -> bool:
    fits = any(
        place.function == function and place.text.startswith(text) for function, text in HANDED_OVER
    )
    is_call = "(" in place.text
    return fits and (not is_call or place.bytecode in LAST)
