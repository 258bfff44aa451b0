"""
Ask all nodes at once, and return as soon as the answer is decided.

There is no thread per operation and no I/O thread: whoever asks drives the connections.
Of several threads that ask at the same time one, the reader, waits for the sockets and
hands every reply to the round it belongs to; the others sleep until their round is decided
or the reader leaves and another takes its place. The mutex guards the connections; nobody
waits while holding it. A waiter that never deregistered, as an exception struck, is ignored
after its deadline.
"""

from __future__ import annotations

import selectors
import threading
from collections.abc import Sequence

from celery_redlock.lock import clock
from celery_redlock.lock.nodes.connections import EITHER, READS, WRITES, Connections, Waiter
from celery_redlock.lock.nodes.link import Gone, Stale
from celery_redlock.lock.nodes.node import NO_ANSWER, Node
from celery_redlock.lock.nodes.round import Round
from celery_redlock.lock.nodes.steps import whose
from celery_redlock.lock.scripts.requests import inspect_request
from celery_redlock.lock.scripts.votes import Vote, VoteKind
from celery_redlock.process.log import get_logger
from celery_redlock.process.mutex import run_elsewhere

__all__ = ["Fanout"]

#: After this long unread, connections may have ended unnoticed [s].
QUIET = 1.0
#: After this long without a request, something on the way may have dropped a connection without a
#: word [s]. Firewalls and load balancers do so from 60 s on.
IDLE = 30.0
#: Within which share of ``node_timeout`` a node shows that an idle connection is still there. In
#: less than the whole: what is silent after it is the connection, and no news of the node.
TIME_TO_SHOW = 0.5
#: How long a waiter that did not deregister is kept after its deadline [s].
INTERRUPTED = 2.0
#: Shortest time that a node is taken to need for an answer [s].
SHORTEST_ROUND_TRIP = 0.001
#: Of each node, for whoever asks from a finaliser that the collector runs amid our own work.
NOBODY_WAITS = Vote(VoteKind.UNREACHABLE, reason="not asked: a finaliser cannot wait for it")

logger = get_logger(__name__)


class Fanout(Connections):
    """Rounds over the connections of one process to all nodes. Safe from any thread."""

    def ask(self, rounds: Sequence[Round], ends: float | None = None) -> None:
        """
        Put *rounds* to every node and return when all are decided, or after ``node_timeout``.

        Afterwards every ballot is complete: a node that did not answer votes unreachable. With
        *ends* [s, our clock] it returns by then, waits for connections included.
        """
        if self.is_in_use_here():
            self._decline(rounds)
            return
        self._ask(rounds, ends)
        if self.has_doubts():
            self.compare_clocks()

    def _ask(self, rounds: Sequence[Round], ends: float | None = None) -> None:
        self.get_ready(ends)
        self._exchange(rounds, self._rules.node_timeout, ends)

    def get_ready(self, ends: float | None = None) -> None:
        """Wait for connections where they have to be made, or may have ended unnoticed."""
        if clock.now() - self._looked > QUIET:
            with self._mutex:
                self._look()
        if self._is_idle():
            self._replace_dropped(ends)
        self.settle(ends)

    @property
    def is_ready(self) -> bool:
        """Whether `get_ready` would wait for nothing."""
        return self._has_settled and self._has_quorum() and not self._is_idle()

    def has_doubts(self) -> bool:
        for node in self.nodes:  # noqa: SIM110  without a generator, as it is on every task's path
            if node.clock.doubt is not None:
                return True
        return False

    # -- for those who wait for the sockets themselves -----------------------------

    def fileno(self) -> int | None:
        """Return what is readable while a node has answered; None if nothing is."""
        with self._mutex:
            fileno = getattr(self._selector, "fileno", None)
        return None if fileno is None else int(fileno())

    @property
    def node_timeout(self) -> float:
        return self._rules.node_timeout

    def begin(self, waiter: Waiter) -> None:
        """Put the rounds of *waiter* to every node; `end` it in any case."""
        with self._mutex:
            self._waiters.append(waiter)
            self._send(waiter.rounds)

    def read_now(self) -> None:
        """
        Read what has come, unless a thread waits for the sockets.

        It is not to sleep on because what it has waited for was read by another.
        """
        with self._mutex:
            if not self._has_reader():
                self._read(self._selector.select(0))

    def end(self, waiter: Waiter) -> None:
        with self._mutex:
            self._leave(waiter)
        self.publish()

    def _exchange(self, rounds: Sequence[Round], longest: float, ends: float | None = None) -> None:
        deadline = clock.now() + longest
        waiter = Waiter(rounds, deadline if ends is None else min(deadline, ends))
        try:
            with self._mutex:
                self._waiters.append(waiter)
                if self._has_reader():
                    waiter.wake = threading.Lock()
                    waiter.wake.acquire()
                else:
                    self._reader = waiter
                self._send(rounds)
            self._wait(waiter)
        finally:
            with self._mutex:
                self._leave(waiter)
            self.publish()

    def _look_at_all(self) -> Round:
        """Return a round that every node answers, with its clock; it writes nothing."""
        return Round(inspect_request(self._rules, ""), len(self.labels), lambda _: False)

    def _is_idle(self) -> bool:
        """Return whether a connection was not used for long, or has ended after that."""
        before = clock.now() - IDLE
        for node in self.nodes:  # without a generator, as it is on every task's path
            if node.proven_at < before and (node.connection is not None or not node.is_settled):
                return True
        return False

    def _replace_dropped(self, ends: float | None = None) -> None:
        """
        Replace the connections that were dropped while they were idle.

        What is asked next waits for the new ones, as the first round of a process does.
        """
        before = [node.connection for node in self.nodes]
        look = self._look_at_all()
        self._exchange([look], self._rules.node_timeout * TIME_TO_SHOW, ends)
        with self._mutex:
            for node, connection, vote in zip(self.nodes, before, look.ballot, strict=True):
                if vote is NO_ANSWER and node.connection is connection is not None:
                    self._lose(node, Stale("its connection was dropped while it was idle"))
            self._has_settled = False

    def compare_clocks(self) -> None:
        """Find out whether our clock moved or those of the nodes in doubt, and act on it."""
        doubts = [node.clock.doubt for node in self.nodes]  # once: other threads settle them, too
        if any(doubt is not None and not doubt.is_reported for doubt in doubts):
            self._ask([self._look_at_all()])
        with self._mutex:
            finding = whose([node.clock for node in self.nodes])
            for node in self.nodes:
                try:
                    node.settle_clock(finding, clock.now())
                except Gone as error:
                    self._lose(node, error)
            if finding.ours is not None and finding.ours > 0:
                clock.make_up_for(finding.ours)
        if finding.ours is not None:
            logger.warning(
                "Our clock fell %+.1f s behind those of most nodes, as after a suspended virtual "
                "machine: their votes do not count, and our leases end that much sooner",
                finding.ours,
            )
        self.publish()

    def tell(self, a_round: Round, skip: frozenset[int] = frozenset()) -> None:
        """Send *a_round* to every node but those at the positions *skip*; wait for nothing."""
        if self.is_in_use_here():
            run_elsewhere(self.tell, a_round, skip)
            return
        is_idle = self._is_idle()
        with self._mutex:
            self._send((a_round,), skip)
        self.publish()
        if is_idle:  # what a dropped connection was sent is sent again by the next
            run_elsewhere(self._replace_dropped)

    def _decline(self, rounds: Sequence[Round]) -> None:
        """Answer for the nodes where nobody can wait for them; what undoes something is sent."""
        for a_round in rounds:
            if a_round.request.script.one_way:
                self.tell(Round(a_round.request, len(self.labels), None))
            for position in range(len(self.labels)):
                a_round.take(position, NOBODY_WAITS)

    def round_trip(self, position: int) -> float:
        """Return how long the node at *position* takes to answer, by its last answer [s]."""
        latency = self.nodes[position].latency or 0.0
        return min(max(latency, SHORTEST_ROUND_TRIP), self._rules.node_timeout)

    # -- sending and reading -------------------------------------------------------

    def _send(self, rounds: Sequence[Round], skip: frozenset[int] = frozenset()) -> None:
        now = clock.now()  # not from before the mutex was had: what is sent now is not late
        if now - self._looked > QUIET:
            self._look()  # the first write to a connection that was ended seems to succeed
        late = now - self._rules.node_timeout
        for node in self.nodes:
            if node.position in skip:
                continue
            if node.quiet_since < late and not self._has_reader(but=rounds):
                self._read(self._selector.select(0))  # or its answers have long been unread
            try:
                node.send(rounds, now)
                if node.connection is None:
                    self._connector.reconnect(node)
                elif node.unsent:
                    self._watch(node, EITHER)
            except BaseException as error:
                self._lose(node, error)
                if not isinstance(error, Gone):
                    raise
                node.send(rounds, now)  # answers for itself, having no connection

    def _has_reader(self, but: Sequence[Round] = ()) -> bool:
        reader = self._reader
        return reader is not None and reader.rounds is not but and clock.now() < reader.deadline

    def _look(self) -> None:
        """Read what came while nobody asked, to the end: nodes may have hung up after it."""
        while not self._has_reader() and (ready := self._selector.select(0)):
            self._read(ready)
            if not any(events & READS for _, events in ready):
                return  # what a node takes now was sent; it will be asked again

    def _wait(self, waiter: Waiter) -> None:
        while waiter.is_open:
            left = waiter.deadline - clock.now()
            if left <= 0:
                return
            if self._reader is waiter:
                ready = self._selector.select(left)
                with self._mutex:
                    self._read(ready)
            elif waiter.wake is not None:
                waiter.wake.acquire(timeout=left)

    def _read(self, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
        self._looked = clock.now()
        for key, events in ready:
            node: Node = key.data
            if node.connection is None:
                continue  # lost since the selector looked
            try:
                if events & WRITES:
                    node.flush()
                    if not node.unsent:
                        self._watch(node, READS)
                if events & READS:
                    node.read()
                    if node.unsent:
                        self._watch(node, EITHER)
            except BaseException as error:
                self._lose(node, error)
                if not isinstance(error, Gone):
                    raise
        self._rouse_decided()

    def _leave(self, waiter: Waiter) -> None:
        """Read once more, give up on nodes that did not answer, let another thread read."""
        if waiter.is_open:
            self._read(self._selector.select(0))
        now = clock.now()
        for a_round in waiter.rounds:
            if a_round.is_open:
                self._give_up(a_round, now)
        self._waiters = [
            w for w in self._waiters if w is not waiter and now < w.deadline + INTERRUPTED
        ]
        if self._reader is waiter:
            self._reader = None
            for heir in self._waiters:
                if heir.reads and heir.is_open and now < heir.deadline:
                    self._reader = heir
                    heir.rouse()
                    break

    def _give_up(self, a_round: Round, now: float) -> None:
        for node, vote in zip(self.nodes, tuple(a_round.ballot), strict=True):
            if vote is None:
                a_round.take(node.position, node.overdue(now))
        a_round.is_open = False
