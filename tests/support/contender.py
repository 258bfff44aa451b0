"""
A process whose threads acquire a lock over and over, for as long as it is told, and say when.

    with Contender(urls) as one:
        one.begin("name", ends=now() + 2.0, threads=5)
        one.found()  # [(granted, ended), ...], as `support.events.now`

Also a script, which is that process: orders come as JSON lines on stdin, and each is answered on
stdout. It believes that all names for a node are one: proxies make one site far from it, and not
another one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_redlock import LockNotAcquired, Redlock
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.rules import Rules
from support.events import now
from support.stalls import Stalls

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing only since Python 3.11

__all__ = ["RULES", "Contender", "Grants", "locks_on", "of_any_name"]

#: From when until when a lock was held [s, as `now`].
Grants = list[tuple[float, float]]
#: A lease that no stall of the machine ends; a slow node is no dead one.
RULES: dict[str, Any] = {"ttl": 60.0, "max_ttl": 60.0, "node_timeout": 1.0}


def of_any_name(_rules: Rules, nodes: Iterable[str]) -> str:
    """Return what all share who have the same nodes, whatever they call them."""
    return "f" * 16


def locks_on(urls: Sequence[str], *, hints: bool = True) -> Redlock:
    """Return locks on the nodes at *urls*; without *hints* nobody is woken with them."""
    locks = Redlock(list(urls), Rules(**RULES))
    if not hints:
        locks.participant.listener = None
    return locks


class Contender:
    """
    A process that contends; it is ended by the end of its ``with``.

    Attributes:
        stalls: When it was kept from going on, by the latest `found` [s, as `now`].
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.stalls: Grants = []
        root = str(Path(__file__).parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.contender", *urls],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": root},
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, **order: Any) -> Any:
        self.say(**order)
        return self.found()

    def say(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def found(self) -> Any:
        assert self._process.stdout is not None
        grants, self.stalls = json.loads(self._process.stdout.readline())
        return grants

    def begin(self, name: str, ends: float, **options: Any) -> None:
        """Have it contend for a lock until then; *options* as of `contend`."""
        self.say(name=name, ends=ends, **options)

    def stand_still(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)


def contend(  # noqa: PLR0917  as an order names them
    locks: Redlock, found: Grants, name: str, ends: float, limit: int, hold: float, rest: float
) -> None:
    while (left := ends - now()) > 0:
        try:
            held = locks.take(LockRequest(name, RULES["ttl"], wait=left, limit=limit))
        except LockNotAcquired:
            continue
        granted = now()
        time.sleep(hold)  # stands for what is done with it
        found.append((granted, now()))
        locks.give_back(held)
        time.sleep(rest)  # stands for what is done without it


def main(urls: Sequence[str]) -> None:
    Rules.fingerprint = of_any_name  # type: ignore[assignment,method-assign]
    every = {hints: locks_on(urls, hints=hints) for hints in (True, False)}
    for line in sys.stdin:
        order: dict[str, Any] = {"hints": True, "threads": 1, "limit": 1}
        order |= {"hold": 0.01, "rest": 0.01} | json.loads(line)
        locks, threads = every[order.pop("hints")], order.pop("threads")
        found: Grants = []
        work = {"locks": locks, "found": found, **order}
        crew = [threading.Thread(target=contend, kwargs=work) for _ in range(threads)]
        with Stalls() as stalls:
            for one in crew:
                one.start()
            for one in crew:
                one.join()
        print(json.dumps([found, stalls.found]), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
