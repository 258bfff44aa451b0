"""
Every guard of the protocol, and how to switch it off.

A proof that finds nothing proves little unless it finds something when it should: each guard is
switched off in turn, and in pairs, and some layer of the tests has to notice. A guard that is off
is off in the library's own code and in its Lua, which nodes run on servers, in memory and in the
simulation, so that every layer tries the same mutant:

    with switched_off(["write-back"]):
        ...

or, for a whole process of tests: ``REDLOCK_GUARDS_OFF=write-back,drift python -m pytest ...``
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from celery_redlock.lock import clock, held, lease, watchdog
from celery_redlock.lock.algorithm import acquiring, attempt, renewal, request
from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.lease import Lease, quorum, valid_until
from celery_redlock.lock.nodes import connector, fanout, node, steps
from celery_redlock.lock.nodes.guard import Greeting, boot_marker, quarantine_of_new
from celery_redlock.lock.nodes.link import Gone, Link
from celery_redlock.lock.nodes.node import Node
from celery_redlock.lock.nodes.round import Round
from celery_redlock.lock.records import OWNER_LENGTH
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts import requests, votes
from celery_redlock.lock.scripts.scripts import ACQUIRE, ENROL, PROBE, RELEASE, RENEW
from celery_redlock.lock.scripts.votes import VoteKind, acquire_is_decided, count, judge
from simulation import network
from simulation.crew import Crew
from simulation.guard import Guard
from simulation.hosts import Host
from simulation.rate_guards import RATE_GUARDS
from simulation.waiting_guards import WAITING_GUARDS
from support.lua import rewritten

__all__ = ["ALL_GUARDS", "GUARDS", "RATE_GUARDS", "WAITING_GUARDS", "switched_off"]


#: How scripts see that a node was enrolled by clients of other settings.
SAME_PROCESS = "string.sub(found, 1, 41) == string.sub(boot_id, 1, 41) then"
#: How scripts count what a node has evicted.
COUNTED = "count and count ~= '0' and '+' .. count or ''"
#: What RENEW does when its vote counts.
VOTED = "remember(KEYS[3], ARGV[8])"


# -- what the library does without them --------------------------------------------------------


def answered(ballot: Any) -> Any:
    """Return the votes of nodes that answered."""
    return [v for v in ballot if v is not None and v.kind is not VoteKind.UNREACHABLE]


def judge_answered(ballot: Any) -> Any:
    """Judge by a quorum of the nodes that answered, whatever is configured."""
    return judge(answered(ballot))


def decide_by_answered(ballot: Any) -> bool:
    """As `judge_answered`."""
    return acquire_is_decided(answered(ballot))


def only_token(client: Any, owner: str | None) -> str:
    """Return one token for all attempts of a client."""
    token: str = client.__dict__.setdefault("only_token", client.new_token())
    return token if owner is None else owner + token[OWNER_LENGTH:]


def settle_at_once(mine: Any, ballot: Any) -> Any:
    """Take the largest fence of the first majority, and tell nobody."""
    fence = attempt.largest_granted(ballot) if mine.request.fence else None
    return mine._if_of_use(mine.lease(fence))
    yield  # a generator like the real one


def confirm_any(mine: Any, ballot: Any) -> Any:
    """As `settle`, but every node that holds our token confirms, whatever it stores."""
    if not mine.request.fence:
        return mine._if_of_use(mine.lease(None))
    majority, fence = quorum(len(ballot)), attempt.largest_granted(ballot)
    if attempt.agreeing(ballot, fence) < majority:
        mine.started = mine.participant.now()
        confirm = requests.renew_request(mine.participant.rules, mine.lease(fence), repair=False)
        ballot = yield Ask(confirm, lambda votes: count(votes, VoteKind.GRANTED) >= majority)
        if count(ballot, VoteKind.GRANTED) < majority:
            return None
    return mine._if_of_use(mine.lease(fence))


def confirm_and_repair(rules: Any, wanted: Lease, *, repair: bool) -> Any:
    """Ask for a renewal that sets the key again, whatever it is for."""
    return requests.renew_request(rules, wanted, repair=True)


def agreeing_or_repaired(ballot: Any, fence: int) -> int:
    """Count the nodes that store our fence, also where the key was missing."""
    kinds = (VoteKind.GRANTED, VoteKind.REPAIRED)
    return len([v for v in ballot if v is not None and v.kind in kinds and v.fence == fence])


def smallest_granted(ballot: Any) -> int:
    """Return the smallest fence of the nodes that hold our token."""
    fences = [v.fence for v in ballot if v is not None and v.kind is VoteKind.GRANTED]
    return min(fences, default=0)


def at_least_agreeing(ballot: Any, fence: int) -> int:
    """Count the nodes that hold our token and store *fence* or more."""
    granted = [v for v in ballot if v is not None and v.kind is VoteKind.GRANTED]
    return len([v for v in granted if v.fence >= fence])


def without_drift(started: float, ttl: float, _drift_factor: float) -> float:
    """Trust a lease for all of its TTL."""
    return started + ttl


def lease_from_now(mine: Any, fence: int | None) -> Lease:
    """Count a lease from when the quorum had answered."""
    rules, wanted = mine.participant.rules, mine.request
    until = valid_until(mine.participant.now(), wanted.ttl, rules.drift_factor)
    return Lease(wanted.name, mine.token, fence, wanted.ttl, until, mine.since, {})


def outcome(*off: str) -> Any:
    """Return `Renewal.outcome` with some of its `OF_A_RENEWAL` off."""

    def outcome(self: Any, ballot: Any) -> Any:
        majority = quorum(len(ballot))
        granted, repaired = count(ballot, VoteKind.GRANTED), count(ballot, VoteKind.REPAIRED)
        if "renewal-deadline" not in off and self.participant.now() >= self._ends:
            return "deadline"
        if "repaired-majority" not in off and repaired >= majority:
            return "stolen"
        if granted >= majority or ("repaired-later" in off and granted + repaired >= majority):
            return self.lease
        if count(ballot, VoteKind.REFUSED) > len(ballot) - majority:
            return "stolen"
        return None

    return outcome


def decided(self: Any, ballot: Any) -> bool:
    """Return whether enough nodes have our key, whoever set it again."""
    kept = count(ballot, VoteKind.GRANTED) + count(ballot, VoteKind.REPAIRED)
    majority = quorum(len(ballot))
    return kept >= majority or count(ballot, VoteKind.REFUSED) > len(ballot) - majority


def told_alone(self: Any) -> str | None:
    """Return why a lock is lost if somebody has told, whatever the clock shows."""
    reason: str | None = self._reason
    return reason


def trusted_for_ever(_crew: Any, _host: Any, _lease: Lease) -> float:
    """Return never: whoever does not look at the clock trusts on."""
    return float("inf")


def write_at_once(self: Any, data: bytes, _now: float) -> None:
    """Give a connection up that does not take everything at once."""
    if self.sock.send(data) < len(data):
        msg = "takes no more requests"
        raise Gone(msg)


def attach_anew(self: Any, *arguments: Any) -> None:
    """Attach a connection, and forget what the node's clock showed."""
    attach(self, *arguments)
    self.clock.forget()


attach = Node.attach


def each_alone(clocks: Sequence[Any]) -> steps.Finding:
    """Blame each node whose clock moved, and never our own."""
    return steps.Finding(None, tuple(i for i, one in enumerate(clocks) if one.doubt is not None))


def release_nothing(rules: Any, name: str, _token: str, **how: Any) -> Any:
    """Return a release that finds nothing to release."""
    return requests.release_request(rules, name, "0" * 40, **how)


def unwatch_at_once(self: Any, one: Any) -> None:
    """Renew a lock no more, and do not wait for a renewal that is under way."""
    with self._changed:
        self._held.pop(one, None)


def any_marker(ballot: Any) -> bytes | None:
    """Return what the first node says that has the marker."""
    told = [v.value for v in ballot if v is not None and v.kind is VoteKind.MARKED]
    return told[0] if told else None


def no_quarantine(_rules: Any) -> bytes:
    """Return what switches the restart guard off in the scripts."""
    return b"0"


def since_start(greeting: Greeting, _nodes: int, rules: Any) -> float:
    """Return what is left of a quarantine since its start by what a node says of it."""
    return quarantine_of_new(greeting, 1, rules)


def flushed_or_not(greeting: Greeting, nodes: int, rules: Any) -> float:
    """Return what is left of a quarantine since its start, whatever happened to its data since."""
    return quarantine_of_new(replace(greeting, flushed=False), nodes, rules)


def first_or_not(greeting: Greeting, nodes: int, rules: Any) -> float:
    """Return what is left of a quarantine since its start, whichever server was the node before."""
    return quarantine_of_new(replace(greeting, succeeded=False), nodes, rules)


def until_looked_at(greeting: Greeting, _nodes: int, rules: Any) -> float:
    """Return no quarantine for a node that says that it is up for a while."""
    return 0.0 if greeting.uptime > 1.0 else float(rules.quarantine)


def without_a_look(greeting: Greeting, fingerprint: str) -> bytes:
    """Have a node vote whatever it has evicted since somebody looked."""
    return boot_marker(greeting.run_id, fingerprint)


def no(*_: Any) -> bool:
    return False


def nothing(*_: Any) -> None:
    """Do nothing."""


GUARDS = {
    guard.name: guard
    for guard in (
        Guard(
            "configured-quorum",
            "a quorum is one of all configured nodes, whoever answers",
            tuple((room, "judge", judge_answered) for room in (attempt, acquiring, votes))
            + tuple((room, "acquire_is_decided", decide_by_answered) for room in (attempt, votes)),
        ),
        Guard(
            "fresh-token",
            "every attempt has a token of its own",
            ((attempt, "fresh_token", only_token),),
        ),
        Guard(
            "owner-release",
            "only the token that a lock stores releases it",
            lua=(
                (
                    RELEASE,
                    "cur and #ARGV[1] >= OWNER and string.sub(cur, 1, #ARGV[1]) == ARGV[1]",
                    "cur",
                ),
            ),
        ),
        Guard(
            "owner-renewal",
            "only the token that a lock stores renews it, or confirms a fence",
            lua=(
                (
                    RENEW,
                    "elseif not cur or string.sub(cur, 1, TOKEN) ~= ARGV[1] then",
                    "elseif not cur then",
                ),
            ),
        ),
        Guard(
            "release-in-vain",
            "an attempt that was not granted takes back what it may have left",
            ((attempt, "release_request", release_nothing),),
        ),
        Guard(
            "undelivered",
            "a release that found no connection is sent by the next one",
            ((Node, "_keep", nothing),),
        ),
        Guard(
            "expiry",
            "whatever is written has an end",
            lua=(
                (
                    ACQUIRE,
                    "redis.call('SET', KEYS[1], ARGV[1] .. ARGV[2], 'PX', ARGV[3])",
                    "redis.call('SET', KEYS[1], ARGV[1] .. ARGV[2])",
                ),
            ),
        ),
        Guard(
            "restart-guard",
            "a node that may have lost leases does not vote while they could be alive",
            ((Rules, "quarantine_ms", property(no_quarantine)),),
        ),
        Guard(
            "probe-remembers",
            "a node that is only looked at does not forget that it is enrolled",
            lua=((PROBE, "remember(KEYS[1], ARGV[1])\n", ""),),
        ),
        Guard(
            "was-replica",
            "a node that was a replica is taken for one that has lost leases",
            lua=(
                (ENROL, "if was_replica(KEYS[1]) then", "if was_replica(KEYS[1]) and false then"),
                (PROBE, "and was_replica(KEYS[1]) then", "and was_replica(KEYS[1]) and false then"),
            ),
        ),
        Guard(
            "evicted-keys",
            "a node that has evicted keys is taken for one that has lost leases",
            lua=tuple((one, COUNTED, "''") for one in (ACQUIRE, RENEW, ENROL, PROBE)),
        ),
        Guard(
            "every-vote-looks",
            "of a node that may evict keys no vote counts without a look at how many it has",
            ((node, "boot_id_of", without_a_look),),
        ),
        Guard(
            "quarantined-renewal",
            "a renewal counts for nothing on a node in quarantine",
            lua=(
                (
                    RENEW,
                    "if code ~= 1 then return {code, now, left} end\n" + VOTED,
                    VOTED,
                ),
            ),
        ),
        Guard(
            "dead-yes",
            "a yes does not count if its connection has died before the decision",
            ((Round, "withdraw", nothing),),
        ),
        Guard(
            "other-settings",
            "a node votes only for clients with the same nodes and the same longest TTL",
            lua=(
                *((one, SAME_PROCESS, "false then") for one in (ACQUIRE, RENEW, ENROL, PROBE)),
                (
                    ENROL,
                    "elseif found and string.sub(without_count(found), 41)",
                    "elseif nil ~= nil and nil",
                ),
            ),
        ),
        Guard(
            "others-enrol-none",
            "whoever has met a node that is enrolled for another list enrols none",
            tuple((room, "check_enrolment", nothing) for room in (connector, network)),
        ),
        Guard(
            "age-unbelieved",
            "of several nodes none is trusted at once for having been up for long",
            tuple((room, "quarantine_of_new", since_start) for room in (connector, network)),
        ),
        Guard(
            "whole-quarantine",
            "the only node votes when a quarantine has passed since its start, not sooner",
            tuple((room, "quarantine_of_new", until_looked_at) for room in (connector, network)),
        ),
        Guard(
            "flush-seen",
            "the only node has the whole of a quarantine before it if it was ever flushed",
            tuple((room, "quarantine_of_new", flushed_or_not) for room in (connector, network)),
        ),
        Guard(
            "heir-seen",
            "the only node has the whole of a quarantine before it if another may have been it",
            tuple((room, "quarantine_of_new", first_or_not) for room in (connector, network)),
        ),
        Guard(
            "drift",
            "a lease is trusted for less than the nodes keep it",
            tuple((room, "valid_until", without_drift) for room in (attempt, lease, renewal)),
        ),
        Guard(
            "from-the-question",
            "a lease counts from before the question, not from the answer",
            tuple((attempt.Attempt, name, lease_from_now) for name in ("lease", "granted")),
        ),
        Guard(
            "of-use",
            "a grant is given back if less than a third of the lease is left",
            ((request, "least_validity", lambda _ttl: float("-inf")),),
        ),
        Guard(
            "clock-jump",
            "the vote of a node whose clock has jumped does not count",
            ((steps.NodeClock, "take", lambda _self, _reading: True),),
        ),
        Guard(
            "clock-memory",
            "what a node's clock showed is remembered from one connection to the next",
            ((Node, "attach", attach_anew),),
        ),
        Guard(
            "others-clocks",
            "a node is quarantined for its clock only if the clocks of others went on",
            tuple((room, "whose", each_alone) for room in (steps, fanout)),
        ),
        Guard(
            "lost-time",
            "what our clock has lost is made up for",
            ((clock, "make_up_for", nothing), (Host, "make_up_for", nothing)),
        ),
        Guard(
            "partial-writes",
            "what a connection does not take at once is sent when it can be",
            ((Link, "_write", write_at_once),),
        ),
        Guard(
            "renewal-deadline",
            "a renewal that is answered after the end of the lease is none",
            ((renewal.Renewal, "outcome", outcome("renewal-deadline")),),
        ),
        Guard(
            "own-clock",
            "the holder itself sees that its lease has ended",
            (
                (held.HeldLock, "lost_reason", property(told_alone)),
                (Crew, "trusted_until", trusted_for_ever),
            ),
        ),
        Guard(
            "repair-heeds-fence",
            "a node sets no missing key again once it gave another a larger fence",
            lua=(
                (
                    RENEW,
                    "local passed = ARGV[4] ~= '0' and tonumber(seen or '0') > tonumber(ARGV[4])",
                    "local passed = false",
                ),
            ),
        ),
        Guard(
            "repaired-majority",
            "a lock whose key was missing on a majority is lost",
            ((renewal.Renewal, "outcome", outcome("repaired-majority")),),
        ),
        Guard(
            "repaired-later",
            "a key that a renewal has set again counts from the next one on",
            (
                (renewal.Renewal, "outcome", outcome("repaired-later")),
                (renewal.Renewal, "decided", decided),
            ),
        ),
        Guard(
            "unwatch-waits",
            "a lock is not released while its renewal is under way",
            ((watchdog.Watchdog, "unwatch", unwatch_at_once),),
        ),
        Guard(
            "write-back",
            "a fence is stored by a majority before it is given out",
            ((attempt.Attempt, "settle", settle_at_once),),
        ),
        Guard(
            "exact-fence",
            "a node confirms a fence only if it stores that very number",
            ((attempt.Attempt, "settle", confirm_any),),
        ),
        Guard(
            "confirm-sets-nothing",
            "confirming a fence sets no key again",
            (
                (attempt, "renew_request", confirm_and_repair),
                (attempt, "agreeing", agreeing_or_repaired),
            ),
        ),
        Guard(
            "largest-fence",
            "of the numbers that the nodes give the largest is taken",
            (
                (attempt, "largest_granted", smallest_granted),
                (attempt, "agreeing", at_least_agreeing),
            ),
        ),
        Guard(
            "growing-fence",
            "a node counts on from the last number that it gave",
            lua=((ACQUIRE, "if proposed > f then f = proposed end", "f = proposed"),),
        ),
        Guard(
            "near-fence",
            "a number from a clock that is far ahead is refused",
            lua=((ACQUIRE, "if proposed > largest", "if false"),),
        ),
        Guard(
            "bounded-fence",
            "a node whose fence no clock can have made does not vote",
            lua=(
                (ACQUIRE, "if not (f <= largest)", "if false"),
                (RENEW, "if f ~= m and not is_bounded", "if false"),
            ),
        ),
        Guard(
            "stray-fence",
            "a fence that no majority can store is no vote",
            ((attempt, "without_strays", lambda ballot, _skew: ballot),),
        ),
        Guard(
            "marked-majority",
            "an execution has finished only where a majority of nodes has its marker",
            tuple((room, "marker_in", any_marker) for room in (acquiring, votes)),
        ),
        Guard(
            "marker-in-doubt",
            "an execution that may have finished is not called unavailable",
            ((acquiring, "is_in_doubt", no),),
        ),
        Guard(
            "done-stays-done",
            "an execution that is done stays done",
            lua=((RELEASE, "and (ARGV[3] == 'done' or redis.call('GET', KEYS[2]) ~= 'done')", ""),),
        ),
    )
}  # fmt: skip


#: Also those without which a lock is not handed on as it should be, though no law is broken, and
#: those of rates.
ALL_GUARDS = GUARDS | WAITING_GUARDS | RATE_GUARDS
#: Guards that `Renewal.outcome` has.
OF_A_RENEWAL = {"renewal-deadline", "repaired-majority", "repaired-later"}


@contextmanager
def switched_off(names: Sequence[str]) -> Iterator[None]:
    """
    Switch guards off, everywhere in this process.

    Raises:
        KeyError: There is no such guard.
    """
    guards = [ALL_GUARDS[name] for name in names]
    with ExitStack() as stack:
        for guard in guards:
            for owner, name, stand_in in guard.patches:
                stack.enter_context(mock.patch.object(owner, name, stand_in))
            for script, text, without in guard.lua:
                stack.enter_context(rewritten(script, text, without))
        if of_a_renewal := OF_A_RENEWAL & set(names):  # parts of one function
            off = outcome(*of_a_renewal)
            stack.enter_context(mock.patch.object(renewal.Renewal, "outcome", off))
        yield
