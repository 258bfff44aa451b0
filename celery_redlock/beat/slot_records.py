"""
The slot records on the nodes: which slots of a schedule entry have been published.

    look      what is the last slot of these entries, and is it certain that it was published?
    claim     take a slot before it is published, unless it or a later one was
    settle    it was published, or is never to be
    withdraw  it was claimed, but certainly not published

There is one record per entry and it only goes up, so two machines that know the same record
agree on what is still to be published. Each claim carries the fence of its leader's term:

    a later slot                                  claimed
    the same one, published already               published: nothing to do
    the same one, claimed in this same term       claimed: publishing it is tried again
    the same one, claimed in an earlier term:
      a moment ago                                taken: it may be about to be published
      longer ago than a lease lasts               claimed, but nobody knows whether it was published
    any, and a newer leader has been here         deposed

A record protects nobody: it keeps a second message out. It is written to a quorum like a lock,
but may live longer than ``max_ttl``; one that most nodes have lost, or cannot read, is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from celery_redlock.beat.slot_scripts import CLAIM, LOOK, SETTLE, WITHDRAW
from celery_redlock.beat.slot_votes import (
    Claimed,
    LastSlot,
    SlotState,
    claim_is_decided,
    holder_in,
    last_of,
    state_of,
)
from celery_redlock.errors import QuorumUnavailable
from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.driver import Driver
from celery_redlock.lock.records import Keys, ms, record_key
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import Request
from celery_redlock.lock.scripts.votes import (
    VoteKind,
    has_majority,
    quarantine_left,
    votes_by_node,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from celery_redlock.lock.redlock import Redlock

__all__ = ["Claim", "Slots"]

#: Records that are looked at in one round: far less than a socket buffer holds.
BATCH = 50


@dataclass(frozen=True)
class Claim:
    """
    A claim on a slot that is about to be published.

    Attributes:
        entry: Name of the record.
        due: When the slot was due [s, Unix time].
        token: The same for all claims of one term.
        fence: Of the term; a larger one is newer.
        keep: How long the record is kept [s].
        lock: Name of a lock whose holder is to be reported; None for none.
        is_sent: Whether it may have been published already, in the same term.
    """

    entry: str
    due: float
    token: str = field(repr=False)
    fence: int
    keep: float
    lock: str | None = None
    is_sent: bool = False


def slot_key(rules: Rules, entry: str) -> bytes:
    return record_key(rules.prefix, "slot", entry)


def stamp(due: float) -> bytes:
    """Return a slot as the nodes keep it: Unix time in whole milliseconds."""
    return b"%d" % round(due * 1000)


def claim_request(rules: Rules, claim: Claim) -> Request:
    record = slot_key(rules, claim.entry)
    keys = Keys.of(rules.prefix, claim.lock or claim.entry)
    return Request(
        CLAIM,
        (record, record if claim.lock is None else keys.lock, keys.boot, keys.quarantine),
        (
            stamp(claim.due),
            claim.token.encode(),
            b"%d" % claim.fence,
            ms(rules.longest_skew),
            ms(claim.keep),
            ms(rules.ttl),
            rules.quarantine_ms,
        ),
    )


def settle_request(rules: Rules, claim: Claim) -> Request:
    return Request(
        SETTLE,
        (slot_key(rules, claim.entry),),
        (stamp(claim.due), claim.token.encode(), b"%d" % claim.fence, ms(claim.keep)),
    )


def withdraw_request(rules: Rules, claim: Claim) -> Request:
    record = slot_key(rules, claim.entry)
    return Request(WITHDRAW, (record,), (stamp(claim.due), claim.token.encode()))


def look_request(rules: Rules, entry: str) -> Request:
    return Request(LOOK, (slot_key(rules, entry),), ())


class Slots:
    """The slot records on the nodes of one process. Safe from any thread."""

    def __init__(self, participant: Participant, driver: Driver) -> None:
        self._rules = participant.rules
        self._driver = driver

    @classmethod
    def on(cls, locks: Redlock) -> Self:
        return cls(locks.participant, locks.driver)

    def look(self, entries: Sequence[str]) -> dict[str, LastSlot]:
        """Return the last slots of *entries*, of those that have any; a round for every `BATCH`."""
        found: dict[str, LastSlot] = {}
        for start in range(0, len(entries), BATCH):
            batch = entries[start : start + BATCH]
            # All of them: after a restart one node of the majority that knows may know nothing.
            asks = [Ask(look_request(self._rules, entry)) for entry in batch]
            for entry, ballot in zip(batch, self._driver.ask_all(asks), strict=True):
                if not has_majority(ballot, VoteKind.GRANTED):
                    raise QuorumUnavailable(entry, votes_by_node(ballot, self._driver.labels))
                last = last_of(ballot)
                if last is not None:
                    found[entry] = last
        return found

    def claim(self, claim: Claim) -> Claimed:
        """Claim a slot; one round. The same claim may be made again."""
        ballot = self._driver.ask(Ask(claim_request(self._rules, claim), claim_is_decided))
        state = state_of(ballot)
        if state not in (SlotState.CLAIMED, SlotState.UNCERTAIN):
            self.withdraw(claim)  # or the next leader could not know that it was not published
        if state is None:
            labels = self._driver.labels
            raise QuorumUnavailable(
                claim.entry, votes_by_node(ballot, labels), quarantine_left(ballot)
            )
        return Claimed(state, holder_in(ballot))

    def settle(self, claim: Claim) -> None:
        """Record on all nodes that a slot was published, or never will be; waits for nothing."""
        self._driver.tell(settle_request(self._rules, claim))

    def withdraw(self, claim: Claim) -> None:
        """Take a claim back on all nodes, unless its slot may have been published."""
        if not claim.is_sent:
            self._driver.tell(withdraw_request(self._rules, claim))
