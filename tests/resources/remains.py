"""What is left behind by a call on locks that was interrupted."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis

from celery_redlock.errors import RedlockError
from celery_redlock.lock.algorithm.results import ReleaseOutcome
from celery_redlock.lock.records import Keys, line_key, waiters_key
from celery_redlock.lock.redlock import Redlock
from celery_redlock.lock.rules import Rules
from celery_redlock.testing.servers import Server

__all__ = ["Remains", "looking_at"]

#: How long nodes may take to be connected again and to get the releases that they missed [s]:
#: far less than a lease.
SOON = 30.0
#: How often to look for what there is at least: locks of other tests may be connecting nodes.
LOOKS = 10


def keys_of_waiters(name: str) -> tuple[bytes, bytes]:
    return waiters_key(Rules().prefix, name), line_key("redlock", name)


class Remains:
    """Looks for what is left on the nodes, and in the process."""

    def __init__(self, locks: Redlock, clients: Sequence[redis.Redis]) -> None:
        self._locks = locks
        self._clients = clients
        self.remember()

    def remember(self) -> None:
        """Take the threads and descriptors that there are now for what there should be."""
        assert self._is_whole_soon()
        looks = [self._kept()]
        while len(looks) < LOOKS:
            time.sleep(0.002)
            looks.append(self._kept())
        self._before = {what: min(look[what] for look in looks) for what in looks[0]}

    def of(self, name: str, soon: float = SOON) -> list[str]:
        """
        Return what is left behind of the lock *name*, in words; waits for it to go.

        The lock itself; who waits for it; what the watchdog holds; mutexes that are held; a process
        that cannot lock any more; threads and descriptors. For the lock to go it waits until *soon*
        [s].
        """
        problems = self._in_watchdog()
        if not (is_free(self._locks.fanout._mutex) and is_free(self._locks._watchdog._mutex)):
            return [*problems, "a mutex is held"]  # the rest would wait for ever
        problems += [*self._on_nodes(name, soon), *self._in_room(name)]
        stuck = self._never_connected()
        return problems + (stuck or [*self._of_another(f"{name}:after"), *self._more()])

    def _in_watchdog(self) -> list[str]:
        locks = self._locks
        problems = [f"the watchdog holds {held}" for held in locks.held]
        for held in locks.held:
            locks.give_back(held)
        return problems

    def _on_nodes(self, name: str, soon: float) -> list[str]:
        if self._gone(name, soon):
            return []
        problem = f"the lock is on {self.holders(name)} nodes, {self.waiters(name)} wait for it"
        for client in self._clients:
            client.delete(Keys.of("redlock", name).lock, *keys_of_waiters(name))
        return [problem]

    def _in_room(self, name: str) -> list[str]:
        listener = self._locks.listener
        assert listener is not None
        left = listener.room._lines.pop(line_key("redlock", name), [])
        return [f"{len(left)} that have gone wait for it in this process"] if left else []

    def _never_connected(self) -> list[str]:
        if self._is_whole_soon():
            return []
        stuck = [node for node in self._locks.fanout.nodes if node.connection is None]
        for node in stuck:
            node.is_connecting = False  # somebody said so who did not get to do it
        assert self._is_whole_soon(), stuck
        return [f"{node.label} is never connected again" for node in stuck]

    def _of_another(self, name: str) -> list[str]:
        """Return why another lock is not had in one round; a busy machine gets more chances."""
        locks, problem = self._locks, ""
        for number in range(5):
            try:
                outcome = locks.release(locks.acquire(f"{name}{number}"))
            except RedlockError as error:
                problem = f"another lock was not had at once: {error}"
                continue
            if outcome is ReleaseOutcome.RELEASED:
                return []
            problem = f"releasing another lock ended as {outcome}"
        return [problem]

    def _more(self) -> list[str]:
        """Return what there is more of than there was, and stays: others may connect meanwhile."""
        self._is_whole_soon()  # what had ended unnoticed, the other lock may have been first to see
        deadline = time.monotonic() + SOON
        while any((kept := self._kept())[what] > number for what, number in self._before.items()):
            if time.monotonic() > deadline:
                return [f"{kept} after {self._before}"]
            time.sleep(0.002)
        return []

    def _gone(self, name: str, soon: float) -> bool:
        deadline = time.monotonic() + soon
        while self.holders(name) or self.waiters(name):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True

    def waiters(self, name: str) -> int:
        return sum(bool(client.exists(*keys_of_waiters(name))) for client in self._clients)

    def holders(self, name: str) -> int:
        key = Keys.of("redlock", name).lock
        return sum(int(client.exists(key)) for client in self._clients)

    def _is_whole_soon(self) -> bool:
        deadline = time.monotonic() + SOON
        while not self._is_whole():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def _is_whole(self) -> bool:
        nodes = self._locks.fanout.nodes
        if any(node.connection is None or node.suspect_since for node in nodes):
            self._locks.inspect("nobody's")
            return False
        names = {f"redlock-connect-{node.label}" for node in nodes}
        return not any(thread.name in names for thread in threading.enumerate())

    def _kept(self) -> dict[str, int]:
        descriptors = len(list(Path("/dev/fd").iterdir()))
        return {"threads": threading.active_count(), "descriptors": descriptors}


def is_free(mutex: Any) -> bool:
    """Return whether nobody keeps *mutex*, this thread least of all; others let go at once."""
    if mutex._is_owned() or not mutex.acquire(timeout=SOON):
        return False
    mutex.release()
    return True


@contextlib.contextmanager
def looking_at(locks: Redlock, servers: Sequence[Server]) -> Iterator[Remains]:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(redis.Redis.from_url(server.url)) for server in servers]
        for client in clients:
            client.ping()
        yield Remains(locks, clients)
