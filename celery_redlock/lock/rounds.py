r"""
The algorithm, sans I/O: generators that yield the next step and are sent its result.

    acquire():   Ask(ACQUIRE) --granted by a quorum, one fence--> Lease
                     |   \--granted, fences differ--> Ask(RENEW) to agree on one --> Lease
                     |--refused / too late / split--> Tell(RELEASE) -> Pause -> again, new token
                     |           (while it waits, the nodes know of it: Tell(WAIT), Tell(LEAVE))
                     '--out of time--> LockTaken, QuorumUnavailable, or a marker in doubt

Whoever drives them does the I/O (`celery_redlock.lock.redlock`, or a simulator). The
safety argument, in the order of the code:

- A token is fresh for every attempt, so a late message of an earlier attempt can neither
  release nor renew this one.
- A grant needs a majority of the *configured* nodes, so two holders share a node, and
  that node keeps one token.
- Validity counts from before the send and is shortened by the drift, so ours ends
  before the keys do.
- The token of a ticket is that of the first attempt after the wake-up, and of no other.
- Whatever an attempt may have left behind is released through the same connections, so
  no node sees the release before the request.
- An execution has finished where a majority has its marker. With fewer, a majority's grant is a
  grant; without that either, it may have finished, and is neither run nor refused.
- A fence is final when a majority stores it while holding our token (PROTOCOL 3.1).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_redlock.errors import (
    LockKeyError,
    LockNotAcquired,
    LockTaken,
    QuorumUnavailable,
    RedlockError,
)
from celery_redlock.lock import clock
from celery_redlock.lock.lease import Lease, fence_proposal, least_validity, quorum, valid_until
from celery_redlock.lock.records import OWNER_LENGTH, is_text, place_name
from celery_redlock.lock.requests import (
    Request,
    acquire_request,
    places_request,
    release_request,
    renew_request,
)
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.votes import (
    Ballot,
    Verdict,
    VoteKind,
    acquire_is_decided,
    count,
    earliest_free,
    holder_of,
    is_in_doubt,
    judge,
    marker_in,
    positions_of,
    quarantine_left,
    verdict_when_split,
    votes_by_node,
)
from celery_redlock.lock.waiting import Ticket, leave_request, place_of, wait_request

if TYPE_CHECKING:
    from celery_redlock.lock.listener import Listener

__all__ = [
    "NO_TURN",
    "Ask",
    "Client",
    "MarkerStands",
    "Pause",
    "Tell",
    "Turn",
    "Waiter",
    "Wanted",
    "acquire",
    "hand_on",
    "new_owner",
    "pause_before",
]

#: How often a split vote is tried again before it is called taken or unavailable.
SPLIT_TRIES = 12
SHORTEST_PAUSE = 0.01
LONGEST_PAUSE = 0.25
#: Longest pause of somebody who is woken when the lock is free [s]: wake-ups may be lost.
LONGEST_SLEEP = 1.0
#: Of the first pause after a split vote [s]; of a slow round, as long as that took: contenders
#: whose requests cross in a pause would split the vote again.
SHORTEST_SPLIT_PAUSE = 0.002
#: How many confirming rounds a fence may take before the attempt is given up.
CONFIRM_ROUNDS = 3


def when_all_are_in(_ballot: Ballot) -> bool:
    """Wait for every answer: no vote decides before the last one."""
    return False


@dataclass(frozen=True)
class Ask:
    """Put *request* to every node at once; the answer is the ballot, *decided* or timed out."""

    request: Request
    decided: Callable[[Ballot], bool] = when_all_are_in


@dataclass(frozen=True)
class Tell:
    """Send *request* to every node but those at the positions *skip*; wait for nothing."""

    request: Request
    skip: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Pause:
    """
    Do nothing for *seconds*, or until the turn of *token* comes; answered by the key that is free.

    Attributes:
        seconds: How long at most [s].
        token: Of a ticket; empty for none.
    """

    seconds: float
    token: str = ""


Steps = Generator["Ask | Tell | Pause", Any, Lease]


class MarkerStands(RedlockError):
    """
    No lock was taken: a marker says that none is needed any more, or may say so.

    Attributes:
        state: What a majority of nodes says in the marker. Empty where no majority says the same,
            or where so few nodes answered that either is possible: ask again later.
    """

    def __init__(self, state: str) -> None:
        super().__init__(state)
        self.state = state


class Turn(NamedTuple):
    """
    With what an attempt begins.

    Attributes:
        token: Of a ticket whose turn has come; None for a new one.
        place: To try first; None for any.
    """

    token: str | None
    place: int | None


NO_TURN = Turn(None, None)


@dataclass(frozen=True)
class Wanted:
    """
    What somebody asks for.

    Attributes:
        name: Lock name.
        ttl: Lease to write to every node [s].
        wait: How long to keep trying [s].
        fence: Whether to ask for a fencing number.
        info: Description of the holder; plain JSON values.
        marker: Name of a marker that, where it stands, makes the lock needless.
        owner: 32 hexadecimal digits that all tokens of this begin with, so that whoever knows
            them can release for a holder that is dead; None for tokens that nobody else knows.
        turn: With what the first attempt begins.
        limit: How many places the lock has: it is granted on any of them.
        queued_since: Since when it has waited as a message [s, Unix time]; None if it has not.
        ends: Give up by then whatever the nodes do, a split vote included [s, our clock]; None
            for no such limit.

    Raises:
        LockKeyError: The name is no string, or empty.
    """

    name: str
    ttl: float
    wait: float = 0.0
    fence: bool = True
    info: dict[str, Any] = field(default_factory=dict)
    marker: str | None = None
    owner: str | None = None
    turn: Turn = NO_TURN
    queued_since: float | None = None
    limit: int = 1
    ends: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            msg = f"a lock name is a string that is not empty, not {type(self.name).__name__}"
            raise LockKeyError(msg)
        if not is_text(self.name):
            msg = f"a lock name is text, without lone surrogates, unlike {self.name[:80]!r}"
            raise LockKeyError(msg)


@dataclass
class Client:
    """
    What one client of the cluster knows and uses; clocks and chance can be replaced.

    Attributes:
        rules: What all clients agree on.
        labels: One per configured node, in their order.
        seen: Largest fencing number that any node ever reported.
        listener: Hears when somebody's turn has come; None where nobody is woken.
    """

    rules: Rules
    labels: tuple[str, ...]
    seen: int = 0
    listener: Listener | None = None
    now: Callable[[], float] = clock.now
    wall: Callable[[], float] = time.time
    chance: Callable[[float, float], float] = clock.jitter
    new_token: Callable[[], str] = lambda: os.urandom(20).hex()

    def propose(self) -> int:
        """
        Return the fencing number to propose next.

        What was seen counts only while it is near our own clock: nodes refuse numbers that
        are far ahead of theirs, and one fast client must not bring that upon all others. A
        node never goes back anyway; the proposal only saves a round.
        """
        wall_ms = int(self.wall() * 1000)
        ours = fence_proposal(wall_ms, 0)
        if self.seen < ours:
            return ours
        too_far = fence_proposal(wall_ms + int(self.rules.longest_skew * 500), 0)
        return fence_proposal(wall_ms, self.seen) if self.seen < too_far else ours

    def learn(self, ballot: Ballot) -> int:
        """Remember the largest fence in *ballot* and return it."""
        largest = 0
        for vote in ballot:
            if vote is not None and vote.fence > largest:
                largest = vote.fence
        self.seen = max(self.seen, largest)
        return largest


def new_owner() -> str:
    """Return what a token is to begin with, for `Wanted.owner`: 128 random bits."""
    return os.urandom(OWNER_LENGTH // 2).hex()


def fresh_token(client: Client, owner: str | None) -> str:
    """Return the token of an attempt: 160 random bits, of which the first may be *owner*."""
    token = client.new_token()
    return token if owner is None else owner + token[OWNER_LENGTH:]


def acquire(client: Client, wanted: Wanted) -> Steps:
    """Acquire the lock as `attempts` does, and leave nothing else behind, however that ends."""
    queue = Waiter(client, wanted)
    try:
        lease = yield from attempts(client, wanted, queue)
        if queue.has_joined:
            yield from queue.leave(lease)
        return lease  # noqa: TRY300  an interruption may strike here, too
    except GeneratorExit:  # dropped by its driver: nobody could send it
        raise
    except BaseException:  # refused; or interrupted, perhaps after the grant
        if queue.attempt is not None:
            yield Tell(queue.attempt.release())
        yield from queue.leave()
        raise


class Waiter:
    """
    What one who wants a lock may have left on the nodes.

    Attributes:
        name: Of the lock.
        attempt: The one under way, or that was granted the lock; None for none.
        started: When the latest attempt that failed began [s, our clock].
    """

    def __init__(self, client: Client, wanted: Wanted) -> None:
        self._client = client
        self._wanted = wanted
        self._since = wanted.queued_since or 0.0
        self._has_turn = False
        self._ticket: Ticket | None = None
        self.attempt: _Attempt | None = None
        self.started = 0.0

        self.name = wanted.name

    @property
    def has_joined(self) -> bool:
        """Whether the nodes may know of it."""
        return self._ticket is not None

    @property
    def token(self) -> str:
        """Of the ticket; empty for none, or none that is waited with any more."""
        return "" if self._ticket is None or self._has_turn else self._ticket.token

    def join(self) -> Generator[Tell, None, None]:
        """Have the nodes know that this waits; again with each attempt that was refused."""
        client, wanted, listener = self._client, self._wanted, self._client.listener
        if listener is None:
            return
        if self._has_turn:  # in vain; a ticket is good for one turn
            yield from self.leave()
        if self._ticket is None:
            token, channel = fresh_token(client, wanted.owner), listener.channel()
            who, since = token[:OWNER_LENGTH], client.wall()
            self._ticket = Ticket(
                wanted.name, who, self._since or since, wanted.info, token, channel, wanted.limit
            )
            self._since = self._ticket.since
            listener.expect(token)
        yield Tell(wait_request(client.rules, self._ticket))

    def take_turn(self, free: bytes) -> Turn:
        """Return the turn that has come, on the place that is *free*; the next attempt has it."""
        ticket, self._has_turn = self._ticket, True
        assert ticket is not None
        self._forget(ticket.token)
        return Turn(ticket.token, place_of(self._client.rules, ticket, free))

    def _forget(self, token: str) -> None:
        if self._client.listener is not None:
            self._client.listener.forget(token)

    def leave(self, lease: Lease | None = None) -> Generator[Tell, None, None]:
        """
        Have the nodes forget that this waits, and whoever comes next have what it was given.

        Args:
            lease: What was granted with the ticket's token, or another one; it stays.
        """
        ticket, granted = self._ticket, lease or self.attempt
        self._ticket, self._has_turn = None, False
        if ticket is None:
            return
        self._forget(ticket.token)
        is_its = granted is not None and granted.token == ticket.token
        keeps = granted.place if granted is not None and is_its else None
        yield Tell(leave_request(self._client.rules, ticket, keeps=keeps))


def attempts(client: Client, wanted: Wanted, queue: Waiter) -> Steps:
    """
    Acquire the lock, trying until it is granted or *wanted.wait* has passed.

    Returns:
        The lease, with at least a third of its TTL left.

    Raises:
        LockTaken: Somebody else holds it.
        QuorumUnavailable: No quorum could decide.
        MarkerStands: A majority of nodes has the marker of *wanted*, or it is in doubt.
    """
    give_up = client.now() + wanted.wait
    tries = splits = 0
    turn = wanted.turn
    while True:
        answer = yield from try_places(client, wanted, turn, queue)
        if isinstance(answer, Lease):
            return answer
        verdict, ballot = answer
        if verdict is Verdict.MARKED and wanted.marker is not None:
            state = marker_in(ballot) or b""
            raise MarkerStands(state.decode(errors="replace"))  # others may have written it
        now = client.now()
        took = min(now - queue.started, client.rules.node_timeout)  # without waits to connect
        if verdict is Verdict.TAKEN and now < give_up:
            yield from queue.join()
        most = LONGEST_SLEEP if queue.token else LONGEST_PAUSE
        pause = _pause_after(client, verdict, ballot, tries, splits, give_up - now, took, most)
        if pause is None or (wanted.ends is not None and now + pause >= wanted.ends):
            if wanted.marker is not None and is_in_doubt(ballot):
                raise MarkerStands("")
            raise refusal(wanted.name, ballot, client.labels)
        is_draw = verdict is Verdict.SPLIT and splits < SPLIT_TRIES
        splits += is_draw
        tries += not is_draw
        free = yield Pause(pause, queue.token)
        turn = queue.take_turn(free) if free else NO_TURN


def try_places(
    client: Client, wanted: Wanted, turn: Turn, queue: Waiter
) -> Generator[Ask | Tell, Any, Lease | tuple[Verdict, Ballot]]:
    """
    Make an attempt on every place that may be free; return what the last one came to.

    First on one that this execution itself holds: a message that is delivered again while it runs
    does not run beside itself.
    """
    (token, handed), place = turn, 0
    tried: set[int] = set()
    execution = wanted.info.get("execution", "")
    if wanted.limit > 1:
        own, free = yield from seen_places(client, wanted, execution)
        usable = [] if handed is None else [handed] if handed < wanted.limit else []
        place = any_of(own[:1] or usable or free or range(wanted.limit), client)
    if token is not None and handed is not None and place != handed:
        # It runs already, or others have more places under this name. The next one has it.
        yield hand_on(client, wanted.name, turn)
        token = None
    while True:
        attempt = queue.attempt = _Attempt(client, wanted, token, place)
        answer = yield from attempt.make()
        if isinstance(answer, Lease):
            return answer
        queue.started, queue.attempt = attempt.started, None
        if wanted.limit == 1 or answer[0] is not Verdict.TAKEN:
            return answer
        if execution and holder_of(answer[1]).get("execution") == execution:
            return answer
        tried.add(place)
        own, free = yield from seen_places(client, wanted, execution)
        untried = [one for one in free if one not in tried]
        own = [one for one in own if one not in tried]  # it may have begun a moment ago
        if not (own or untried):
            return answer
        token, place = None, any_of(own[:1] or untried, client)


def hand_on(client: Client, name: str, turn: Turn) -> Tell:
    """Return what hands on the lock *name*, kept for a *turn* that is not taken."""
    place = turn.place or 0
    one = place_name(name, place)
    return Tell(release_request(client.rules, one, turn.token or "", place=place))


def any_of(places: Sequence[int], client: Client) -> int:
    """Return one of *places*, any with the same chance."""
    return places[min(int(client.chance(0.0, len(places))), len(places) - 1)]


def seen_places(
    client: Client, wanted: Wanted, execution: str
) -> Generator[Ask, Ballot, tuple[list[int], list[int]]]:
    """
    Return the places that any node says *execution* has, and those that a majority calls free.

    Of the former first the one that most nodes name: others may have missed a release.
    """
    majority = quorum(len(client.labels))
    asked = places_request(client.rules, wanted.name, wanted.limit, execution)
    ballot = yield Ask(asked, lambda votes: count(votes, VoteKind.GRANTED) >= majority)
    told = [vote.value for vote in ballot if vote is not None and vote.kind is VoteKind.GRANTED]
    said = [[one[place : place + 1] for one in told] for place in range(wanted.limit)]
    own = [place for place, words in enumerate(said) if b"2" in words]
    own.sort(key=lambda place: said[place].count(b"2"), reverse=True)
    return own, [place for place, words in enumerate(said) if words.count(b"0") >= majority]


def _pause_after(  # noqa: PLR0917  all that there is to know of an attempt
    client: Client,
    verdict: Verdict,
    ballot: Ballot,
    tries: int,
    splits: int,
    left: float,
    took: float,
    most: float,
) -> float | None:
    """Return how long to wait before the next attempt [s]; None to give up."""
    if verdict is Verdict.SPLIT and splits < SPLIT_TRIES:
        longest = max(SHORTEST_SPLIT_PAUSE, took) * 2 ** min(splits, 5)
        return client.chance(0.0, min(LONGEST_PAUSE, longest))
    return None if left <= 0 else pause_before(client, tries, left, most, earliest_free(ballot))


def pause_before(
    client: Client, tries: int, left: float, most: float, free_in: float | None
) -> float:
    """
    Return how long to wait before the next attempt on a lock that is taken [s].

    Args:
        client: Has the jitter.
        tries: How many attempts were in vain.
        left: How long it may take at all [s].
        most: Longest pause [s].
        free_in: When the lock may be free without a release [s from now]; None if unknown.
    """
    longest = min(most, SHORTEST_PAUSE * 2 ** min(tries, 7))
    if free_in is not None:
        longest = min(longest, free_in + SHORTEST_PAUSE)
    return min(left, client.chance(longest / 2, longest))


def refusal(name: str, ballot: Ballot, labels: tuple[str, ...]) -> LockNotAcquired:
    """Return the error that says why *ballot* did not grant the lock."""
    verdict = judge(ballot)
    if verdict is Verdict.SPLIT:
        verdict = verdict_when_split(ballot)
    if verdict is Verdict.TAKEN:
        return LockTaken(name, votes_by_node(ballot, labels), holder_of(ballot))
    votes = votes_by_node(ballot, labels)
    if verdict is Verdict.GRANTED:
        votes = dict.fromkeys(votes, "granted, but too late") | {
            label: vote for label, vote in votes.items() if vote != VoteKind.GRANTED.value
        }
    return QuorumUnavailable(name, votes, quarantine_left(ballot))


def _refusing(ballot: Ballot) -> frozenset[int]:
    """Return the positions of nodes that certainly stored nothing of ours."""
    return positions_of(ballot, VoteKind.REFUSED, VoteKind.QUARANTINED, VoteKind.MARKED)


class _Attempt:
    """One attempt: one token, one start on our clock."""

    def __init__(self, client: Client, wanted: Wanted, token: str | None, place: int) -> None:
        self.client = client
        self.wanted = wanted
        self.was_woken = token is not None
        self.token = token or fresh_token(client, wanted.owner)
        self.place = place
        self.name = place_name(wanted.name, place)
        self.started = client.now()
        self.since = client.wall()

    def make(self) -> Generator[Ask | Tell, Any, Lease | tuple[Verdict, Ballot]]:
        """Ask the nodes; return the lease, or why there is none, and then leave nothing behind."""
        ballot = yield Ask(self.request(), acquire_is_decided)
        verdict = judge(ballot)
        self.client.learn(ballot)
        if verdict is Verdict.GRANTED:
            lease = yield from self.settle(ballot)
            if lease is not None:
                return lease
            verdict = Verdict.UNAVAILABLE
        # The lock was kept for one that was woken, also where the answer was no.
        clean = frozenset() if self.was_woken else _refusing(ballot)
        yield Tell(self.release(), clean)
        return verdict, ballot

    def request(self) -> Request:
        """Return what is put to every node first."""
        self.asked = self.lease(self.client.propose() if self.wanted.fence else 0)
        return acquire_request(self.client.rules, self.asked, self.wanted.marker)

    def release(self) -> Request:
        """Return what undoes this attempt on a node, and hands on what was handed over to it."""
        rules, wakes = self.client.rules, self.was_woken
        return release_request(rules, self.name, self.token, wakes=wakes, place=self.place)

    def lease(self, fence: int | None) -> Lease:
        """Return the lease of this attempt with *fence*."""
        until = valid_until(self.started, self.wanted.ttl, self.client.rules.drift_factor)
        wanted = self.wanted
        info = dict(wanted.info)  # our copy: the caller may change its own
        return Lease(
            self.name, self.token, fence, wanted.ttl, until, self.since, info, place=self.place
        )

    def settle(self, ballot: Ballot) -> Generator[Ask, Ballot, Lease | None]:
        """
        Return the lease once a majority stores one and the same fence, None if it came too late.

        One round suffices when the majority that granted agrees, as it does whenever
        our proposal was above all their numbers. Otherwise the largest is written back,
        on condition that the node still holds our token.
        """
        if not self.wanted.fence:
            return self._if_of_use(self.lease(None))
        majority = quorum(len(ballot))
        fence = _largest_granted(ballot)
        for _ in range(CONFIRM_ROUNDS):
            if _agreeing(ballot, fence) >= majority:
                return self._if_of_use(self.granted(fence))
            fence = max(fence, _largest_granted(ballot))
            self.started = self.client.now()
            self.asked = self.lease(fence)
            confirm = renew_request(self.client.rules, self.asked, repair=False)
            ballot = yield Ask(confirm, lambda votes, f=fence: _agreeing(votes, f) >= majority)  # type: ignore[misc]
            self.client.learn(ballot)
        is_agreed = _agreeing(ballot, fence) >= majority
        return self._if_of_use(self.asked) if is_agreed else None

    def granted(self, fence: int) -> Lease:
        """Return the lease with *fence*; most often it is the one that was asked for."""
        return self.asked if self.asked.fence == fence else self.lease(fence)

    def _if_of_use(self, lease: Lease) -> Lease | None:
        late = self.client.now() + least_validity(lease.ttl) > lease.valid_until
        return None if late else lease


def _largest_granted(ballot: Ballot) -> int:
    """Return the largest fence of the nodes that hold our token, 0 if there are none."""
    largest = 0
    for vote in ballot:
        if vote is not None and vote.kind is VoteKind.GRANTED and vote.fence > largest:
            largest = vote.fence
    return largest


def _agreeing(ballot: Ballot, fence: int) -> int:
    """Return how many nodes hold our token and store exactly *fence*."""
    found = 0
    for vote in ballot:
        found += vote is not None and vote.kind is VoteKind.GRANTED and vote.fence == fence
    return found
