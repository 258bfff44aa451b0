"""
Connect nodes in the background, and enrol those that are new.

Connecting may take long, so a thread per missing node does it, with backoff, and ends when
the node is there. It hands the connection over with the mutex of the fan-out held.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  see below
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from redis.utils import get_lib_version

from celery_redlock.lock import clock
from celery_redlock.lock.nodes.guard import (
    Foreign,
    Greeting,
    check_enrolment,
    check_together,
    enrol,
    greet,
    quarantine_of_new,
)
from celery_redlock.process.deferral import defer_signals

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

    from celery_redlock.lock.nodes.node import Node
    from celery_redlock.lock.rules import Rules

__all__ = ["Connector"]

SHORTEST_BACKOFF = 0.05
LONGEST_BACKOFF = 2.0

# What connecting would import by itself, in its thread, is imported here: a process that forks
# in the middle of that leaves its child half a module.
get_lib_version()

#: Takes a connection that was greeted over; called with the mutex held.
Attach = Callable[["Node", "AbstractConnection", Greeting], None]


class Connector:
    """Connects the nodes of one process; *attach* takes over a connection that may be used."""

    def __init__(
        self, rules: Rules, labels: Sequence[str], mutex: threading.RLock, attach: Attach
    ) -> None:
        self._rules = rules
        self._labels = labels
        self._fingerprint = rules.fingerprint(labels)
        self._mutex = mutex
        self._attach = attach
        self._greetings: list[Greeting | None] = [None] * len(labels)
        self._pauses = [0.0] * len(labels)  # before each is connected again [s]
        self._states: dict[int, str] = {}
        self._stop = threading.Event()

    def stop(self) -> None:
        self._stop.set()

    def forgive(self, node: Node) -> None:
        """Reconnect *node* without a pause next time: its connection was usable."""
        self._pauses[node.position] = 0.0

    def reconnect(self, node: Node) -> None:
        """Connect *node* in the background; called with the mutex held."""
        is_over = (
            self._stop.is_set() or sys.is_finalizing()
        )  # then no thread begins, without a word
        if node.connection is None and not node.is_connecting and not is_over:
            try:
                node.is_connecting = True
                name = f"redlock-connect-{node.label}"
                thread = threading.Thread(
                    target=self._connect, args=(node,), name=name, daemon=True
                )
                with defer_signals():  # or the standard library's own locks might stay locked
                    thread.start()
            except RuntimeError as error:  # no more threads, as when the interpreter ends
                node.is_connecting = False
                node.fail(error)
            except (
                BaseException
            ):  # interrupted: should there be a thread now, a second does no harm
                node.is_connecting = False
                raise

    def _connect(self, node: Node) -> None:
        while not self._stop.wait(self._pause(node)):
            try:
                self._greet(node)
            except Exception as error:  # noqa: BLE001  with any error the node does not vote
                with self._mutex:
                    self._states.setdefault(node.position, "unreachable")
                    if node.connection is None and not self._stop.is_set():
                        node.fail(error)
            else:
                return

    def _pause(self, node: Node) -> float:
        """Return how long to wait [s]; each time twice as long, until `forgive` is called."""
        pause = self._pauses[node.position]
        self._pauses[node.position] = min(max(2 * pause, SHORTEST_BACKOFF), LONGEST_BACKOFF)
        return clock.jitter(pause / 2, pause)

    def _greet(self, node: Node) -> None:
        connection = node.address.connection()
        try:
            connection.connect()
            greeting = greet(connection, len(self._labels))
            self._check_distinct(node, greeting)
            if self._rules.restart_guard:
                greeting = self._enrol(node, connection, greeting)
            with self._mutex:
                if self._stop.is_set() or node.connection is not None:
                    connection.disconnect()
                else:
                    self._attach(node, connection, greeting)
                    if node.connection is connection:  # it took what it had missed
                        self.forgive(node)
        except BaseException:
            connection.disconnect()
            raise

    def _check_distinct(self, node: Node, greeting: Greeting) -> None:
        with self._mutex:
            self._greetings[node.position] = greeting
            check_together(self._labels, self._greetings)

    def _enrol(self, node: Node, connection: AbstractConnection, greeting: Greeting) -> Greeting:
        def ask(mode: str, *left: float) -> tuple[str, float, float]:
            run_id, fingerprint = greeting.run_id, self._fingerprint
            try:
                enrolment = enrol(connection, self._rules, run_id, fingerprint, mode, *left)
            except Foreign:
                self._record(node, "foreign")
                raise
            self._record(node, enrolment[0])
            return enrolment

        state, left, node_now = ask("look")
        if state == "unmarked":
            self._await_others()
            check_enrolment(self._labels, self._states)
            left = quarantine_of_new(greeting, len(self._labels), self._rules)
            _, left, node_now = ask("quarantine", left) if left else ask("trust")
        return replace(greeting, quarantine=left, node_now=node_now)

    def _record(self, node: Node, state: str) -> None:
        with self._mutex:
            self._states[node.position] = state

    def _await_others(self) -> None:
        """
        Wait until the state of each node is known, or it could not be reached.

        One of another list is looked at again and again, so it is known when it is no longer.
        """
        while len(self._states) < len(self._labels):
            if self._stop.wait(0.01):
                msg = "closed"
                raise ConnectionAbortedError(msg)
