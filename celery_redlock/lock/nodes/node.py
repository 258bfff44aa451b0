"""
One lock node: its votes, its clock, and the notes that are yet to reach it.

A node that does not answer in time is a suspect, and is not waited for; its late replies are
read and dropped when they come. Redis exceptions end here; outside there are only votes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

from redis.exceptions import (
    AskError,
    ClusterDownError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as Lost

from celery_redlock.events import Event, NodeClockJump, NodeDown, NodeQuarantined, NodeUp
from celery_redlock.lock import clock
from celery_redlock.lock.clock import ClockReading
from celery_redlock.lock.nodes.guard import Greeting, boot_id_of
from celery_redlock.lock.nodes.link import NEVER, PATIENCE, Gone, Link, Stale, read_out_in_thread
from celery_redlock.lock.nodes.round import Round, pack_round
from celery_redlock.lock.nodes.steps import Finding, NodeClock
from celery_redlock.lock.records import Keys, ms
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.scripting import pack
from celery_redlock.lock.scripts.votes import Vote, VoteKind

if TYPE_CHECKING:
    from redis.connection import AbstractConnection

    from celery_redlock.lock.nodes.address import Address

__all__ = ["NO_ANSWER", "Node", "without_echo"]

#: How many notes are kept for a node that is not connected.
UNDELIVERED = 512
#: What stands before the arguments of a command that a server does not know: AUTH's, perhaps.
ECHO = ", with args beginning with"
#: What says that another server is, or may be, the node now. AskError is MovedError, too.
ELSEWHERE = (Lost, ReadOnlyError, AskError, TryAgainError, ClusterDownError)
NO_ANSWER = Vote(VoteKind.UNREACHABLE, reason="no answer in time")


def without_echo(problem: Exception) -> str:
    """Return the text of *problem* without our arguments, which a server may echo."""
    return str(problem).partition(ECHO)[0]


class Node(Link):
    """One lock node."""

    def __init__(self, position: int, address: Address, rules: Rules, news: deque[Event]) -> None:
        super().__init__()
        self.position = position
        self.address = address
        self.label = address.label
        self._rules = rules
        self._news = news
        self.is_settled = False  # whether it was ever connected, or has failed to be
        self.is_connecting = False
        self.greeting: Greeting | None = None
        self.problem: Exception | None = None  # why it does not vote
        #: Since when it owes an answer that a round gave up on [s].
        self.suspect_since: float | None = None
        #: From the last request that a round waited for to its answer [s].
        self.latency: float | None = None
        #: When it was connected, or sent the last request that it has answered [s].
        self.proven_at = NEVER
        self._said: type[Event] | None = None  # NodeUp or NodeDown
        self._undelivered: deque[Round] = deque(maxlen=UNDELIVERED)
        self._boot = b""
        self.clock = NodeClock(rules.drift_factor)

    def attach(self, connection: AbstractConnection, greeting: Greeting, fingerprint: str) -> None:
        """Take over a greeted connection; from now on it never blocks."""
        boot_id = boot_id_of(greeting, fingerprint)
        self._boot = b"$%d\r\n%b\r\n" % (len(boot_id), boot_id)
        if self.greeting is None or self.greeting.run_id != greeting.run_id:
            self.clock.forget()  # of another process; we know this one's clock
        self.greeting = greeting
        self.suspect_since = self.problem = None
        self._open(connection)
        self.is_settled, self.is_connecting = True, False  # looked at without the mutex: last
        self.proven_at = clock.now()
        self._say(NodeUp(self.label))
        if greeting.quarantine:
            self._news.append(NodeQuarantined(self.label, greeting.quarantine))

    def deliver(self, now: float) -> None:
        """Send the notes that found no connection; not those of locks that have ended by now."""
        oldest = now - self._rules.max_ttl
        rounds = [
            a_round for a_round in self._undelivered if (a_round.undelivered_since or now) > oldest
        ]
        self._undelivered.clear()
        self.send(rounds, now)

    def detach(self, problem: Exception) -> None:
        connection, self.connection = self.connection, None
        if isinstance(problem, Stale):  # which says nothing of the node
            self.problem = problem
        else:
            self.fail(problem)
        owed, self._owed, self.quiet_since = self._owed, [], NEVER
        for a_round, sent in owed:
            if a_round is not None:
                a_round.take(self.position, self._unreachable())
                self._keep(a_round, sent)
        if connection is not None:
            connection.disconnect()

    def finish(self) -> None:
        """Let go of the connection; it is closed once the node has read all that was sent."""
        connection = self.connection if self._owed else None
        if connection is not None:
            self.connection = None
        self.detach(Gone("closed"))
        if connection is not None:
            read_out_in_thread(connection)

    def fail(self, problem: Exception) -> None:
        if ECHO in str(problem):
            problem = Gone(without_echo(problem))
        self._say(NodeDown(self.label, str(problem)))
        self.problem = problem
        self.is_settled = True

    def _say(self, event: NodeUp | NodeDown) -> None:
        if type(event) is not self._said:
            self._said = type(event)
            self._news.append(event)

    def _keep(self, a_round: Round, now: float) -> None:
        """Store a note for the next connection: it may not have arrived."""
        if a_round.request.script.one_way:
            if a_round.undelivered_since is None:
                a_round.undelivered_since = now
            self._undelivered.append(a_round)

    def keep_notes_of(self, closed: Node) -> None:
        """Have what has yet to reach this node from before a `close`."""
        self._undelivered = closed._undelivered

    def is_late(self, now: float) -> bool:
        return self.quiet_since < now - self._rules.node_timeout

    def suspect(self, since: float) -> None:
        """Give up on this node; it is not waited for until it has answered."""
        if self.suspect_since is None and self._owed:
            self.suspect_since = since
            self._say(NodeDown(self.label, "no answer in time"))

    def overdue(self, now: float) -> Vote:
        if self.is_late(now):
            self.suspect(now)
        return self._unreachable() if self.connection is None else NO_ANSWER

    def send(self, rounds: Sequence[Round], now: float) -> None:
        """
        Send *rounds* in one write; a node that cannot be asked votes unreachable at once.

        To be called when all that has come from the node was read. Raises Gone if the connection
        is dead, or has owed an answer for too long.
        """
        if self.connection is None:
            for a_round in rounds:
                a_round.take(self.position, self._unreachable())
                self._keep(a_round, now)
            return
        if self.quiet_since < now - self._rules.node_timeout:
            if self.quiet_since < now - PATIENCE:
                msg = f"no answer for {PATIENCE:g} s"
                raise Gone(msg)
            self.suspect(now)
        if self.suspect_since is not None:
            rounds = self._only_notes(rounds)
        self._owed += zip(rounds, repeat(now))
        if rounds[1:]:
            packed = [one.packed + self._boot if one.is_guarded else one.packed for one in rounds]
            self._write(b"".join(packed), now)
        elif rounds:  # without a call, as it is on every task's path
            one = rounds[0]
            self._write(one.packed + self._boot if one.is_guarded else one.packed, now)

    def _only_notes(self, rounds: Sequence[Round]) -> list[Round]:
        """Answer for a suspect; only notes go down its connection, behind what they undo."""
        for a_round in rounds:
            a_round.take(self.position, self._unreachable())
        return [a_round for a_round in rounds if a_round.request.script.one_way]

    def read(self) -> None:
        owed, taken = self._owed, 0
        try:
            for reply in self._replies():
                try:
                    a_round, sent = owed[taken]
                except IndexError:
                    raise Gone("sent a reply that nobody asked for") from None
                if type(reply) is not list and isinstance(reply, Exception):
                    self._heed(reply, a_round)
                elif a_round is not None and (a_round.is_open or self.clock.latest is None):
                    # Late, it shows a clock that may jump before the node is among the first.
                    a_round.take(self.position, self._vote(a_round, reply, sent))
                taken += 1
        except (RedisError, OSError, ValueError, RecursionError, MemoryError) as error:
            # The last three: what parsers make of bytes that are no answer of a server.
            raise Gone(str(error) or "an answer that is too large") from error
        finally:
            if taken:
                self.proven_at = owed[taken - 1][1]
            del owed[:taken]
        self.quiet_since = max(self._owed[0][1], self._took_more) if self._owed else NEVER
        if self.suspect_since is not None and not self.is_late(clock.now()):
            self.suspect_since = None
            self._say(NodeUp(self.label))

    def _heed(self, error: Exception, a_round: Round | None) -> None:
        """Send a script that the node forgot; raise Gone if it is to be greeted anew."""
        if isinstance(error, ELSEWHERE):
            raise Gone(str(error))
        if a_round is not None and isinstance(error, NoScriptError):
            self._send_source(a_round, clock.now())
        elif a_round is not None:
            a_round.take(self.position, Vote(VoteKind.UNREACHABLE, reason=without_echo(error)))

    def _vote(self, a_round: Round, reply: Any, sent: float) -> Vote:
        """Return the vote in *reply*; none while the node's clock does not go as ours does."""
        now = clock.now()  # not earlier than the reply came
        self.latency = now - sent
        try:  # of text, an index would give numbers
            vote = a_round.request.script.read(reply if type(reply) is list else [])
        except (LookupError, TypeError, ValueError) as error:
            msg = "sent a malformed reply"
            raise Gone(msg) from error
        if vote.kind is VoteKind.QUARANTINED and self.greeting and self.greeting.eviction:
            why = f"{vote.ttl:.1f} s left; it may evict keys, by its maxmemory-policy"
            vote = vote._replace(reason=f"{why} {self.greeting.eviction}")
        if not vote.node_now or self.clock.take(ClockReading.of(sent, now, vote.node_now)):
            return vote
        doubt = self.clock.doubt
        moved = f" by {doubt.move.jump:+.1f} s" if doubt is not None else ""
        return Vote(VoteKind.UNREACHABLE, reason=f"its clock moved against ours{moved}")

    def _send_source(self, a_round: Round, now: float) -> None:
        """Repeat a round whose script the node forgot; not a grant that nobody waits for."""
        script = a_round.request.script
        if not a_round.is_open and script.guarded and not script.one_way:
            return
        request = a_round.request
        data = pack_round(request, b"EVAL", request.script.source)
        self._owed.append((a_round, now))
        self._write(data + self._boot if a_round.is_guarded else data, now)

    def settle_clock(self, finding: Finding, now: float) -> None:
        """
        Act on the finding about a clock that is in doubt.

        One that was set back keeps keys for longer, which is no danger: a vote is enough. One
        that may have been set forward does not vote for us while leases of before may be alive.
        """
        doubt, is_found = self.clock.doubt, self.position in finding.positions
        if doubt is None:
            return
        if is_found and finding.ours is not None:
            self.clock.forget()
            return
        if self.connection is None:
            return  # when it is back
        jump = doubt.move.jump
        if not doubt.is_reported:
            self._news.append(NodeClockJump(self.label, jump))
        patience = self._rules.quarantine if self._rules.restart_guard else 0.0
        if is_found or jump < 0 or now - doubt.at >= patience:
            self.clock.forget()
        else:
            self.clock.doubt = doubt._replace(is_reported=True)
        if is_found and jump > 0 and self._rules.restart_guard:
            self._quarantine(now)

    @property
    def clock_offset(self) -> float | None:
        """How far its wall clock is ahead of ours [s]; None before the first reading."""
        reading = self.clock.latest
        if reading is None:
            return None
        return (reading.earliest + reading.latest) / 2 + clock.now() - clock.wall()

    def _quarantine(self, now: float) -> None:
        """Keep this node from voting for anybody: keys may have expired before their time."""
        keys, left = Keys.of(self._rules.prefix, ""), self._rules.quarantine
        self._owed.append((None, now))
        self._write(pack(b"SET", keys.quarantine, b"1", b"PX", ms(left)), now)
        self._news.append(NodeQuarantined(self.label, left))

    def _unreachable(self) -> Vote:
        if self.suspect_since is not None:
            return NO_ANSWER
        return Vote(VoteKind.UNREACHABLE, reason=str(self.problem or "not connected yet"))
