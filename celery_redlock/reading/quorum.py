"""State of the quorum, in words: whether a majority of the lock nodes can grant locks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from celery_redlock.lock.lease import quorum
from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import NodeStatus
from celery_redlock.words import redlock_command, votes_needed

__all__ = ["MARKS", "MEANINGS", "Mark", "Quorum"]

Mark = Literal["good", "warn", "bad"]
#: State of a node -> how bad that is.
MARKS: dict[str, Mark] = {
    "up": "good",
    "quarantined": "warn",
    "unmarked": "warn",
    "unfit": "bad",
    "down": "bad",
}
#: State of a node -> what it means.
MEANINGS = {
    "up": "votes",
    "quarantined": "new, restarted or wiped, and does not vote until every lock that it may have "
    "forgotten has ended; 'redlock bootstrap' ends that if nobody holds a lock",
    "unmarked": "new, restarted or wiped, and no client has noticed it yet; does not vote",
    "unfit": "answers, but must not be a lock node",
    "down": "does not answer",
}


@dataclass(frozen=True)
class Quorum:
    """Whether a majority of *nodes* can vote, by how each of them is."""

    nodes: Sequence[NodeStatus]
    rules: Rules

    @property
    def voting(self) -> int:
        return sum(1 for node in self.nodes if node.state == "up")

    @property
    def needed(self) -> int:
        return quorum(len(self.nodes))

    @property
    def mark(self) -> Mark:
        """``"good"``, ``"bad"``, or ``"warn"`` if some are missing and no other may be."""
        if self.voting < self.needed:
            return "bad"
        return "warn" if self.voting == self.needed < len(self.nodes) else "good"

    @property
    def headline(self) -> str:
        counted = f"{votes_needed(self.voting, len(self.nodes), self.needed)}."
        if self.mark == "bad":
            return f"Quorum: NO. {counted} No lock can be taken or renewed."
        if self.mark == "warn":
            return (
                f"Quorum: yes, without a node to spare. {counted} "
                "If one more fails, no lock can be taken or renewed."
            )
        return f"Quorum: yes. {counted}"

    @property
    def remedies(self) -> list[str]:
        """What helps, a sentence or two per cause; empty if a majority votes."""
        new = [node for node in self.nodes if node.state in ("unmarked", "quarantined")]
        if self.mark != "bad" or not new:
            return []
        found, bootstrap = [], redlock_command("bootstrap")
        if len(new) == len(self.nodes):
            found.append(f"All are new or restarted. If nobody can hold a lock: {bootstrap}")
        if any(node.state == "unmarked" for node in new):
            found.append(
                "An unmarked node is new or has lost its memory. It votes at most "
                f"{self.rules.quarantine:.0f} s after the first worker finds it."
            )
        if left := max(node.quarantine for node in new):
            found.append(
                "A quarantined node is new, or was restarted or wiped. It votes in "
                f"{left:.0f} s at most."
            )
        if len(new) < len(self.nodes):
            found.append(f"If no lock can be held, they vote at once after: {bootstrap}")
        return found

    def __str__(self) -> str:
        return "\n".join([self.headline, *self.remedies])
