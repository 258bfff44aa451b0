"""What a page says of nodes and locks, made of what was read; without any I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_redlock.lock.lease import quorum
from celery_redlock.lock.records import PUBLIC_TOKEN_LENGTH
from celery_redlock.ops.web.words import Moment, Text, moment, number, seconds, text_of
from celery_redlock.reading.nodes import NodeStatus
from celery_redlock.reading.stored import LockView
from celery_redlock.words import duration

__all__ = ["Holder", "LockRow", "NodeRow", "holder_row", "lock_row", "node_row", "sentence"]

#: State of a node -> what it means, for those who point at it.
STATES = {
    "up": "It votes.",
    "quarantined": "It is new, or was restarted or wiped, and keeps silent until every lock that "
    "it may have forgotten has ended.",
    "unmarked": "It is new, or was restarted and no client has noticed yet. It does not vote.",
    "unfit": "It answers, but must not be a lock node.",
    "down": "It does not answer.",
}


@dataclass(frozen=True)
class NodeRow:
    """How a node is shown; attributes as of `NodeStatus`, in words."""

    node: Text
    state: str
    meaning: str
    version: Text
    uptime: str
    quarantine: str
    problem: Text


@dataclass(frozen=True)
class Holder:
    """
    Who holds a lock, as far as they told.

    Attributes:
        task: Name of the task.
        task_id: Its id.
        execution: Which run of it.
        host: Where.
        pid: Its process there.
        since: Since when.
        token: Public part of its token.
    """

    task: Text
    task_id: Text
    execution: Text
    host: Text
    pid: Text
    since: Moment | None
    token: Text


@dataclass(frozen=True)
class LockRow:
    """
    How a lock is shown.

    Attributes:
        name: Lock name.
        raw_name: The same as it is in the key, for links and forms.
        raw_token: Public part of the token, likewise.
        holder: Who holds it.
        ttl: What is left of its lease, in words.
        votes: On how many nodes it stands.
        nodes: Of so many.
        on: Which.
        is_held: Whether these are a majority.
        is_unclear: Whether it may stand on a majority, with the nodes that did not answer.
        is_leaked: Whether it never expires.
        can_be_released: Whether it has a token by which to release it and no other.
        fence: Its fencing number, 0 for none.
        waiting: How many messages are known to wait for it.
        renewals: How often it was renewed, "" if the holder does not tell.
        margin: What was left of the lease at its latest renewal, in words.
    """

    name: Text
    raw_name: str
    raw_token: str
    holder: Holder
    ttl: str
    votes: int
    nodes: int
    on: str
    is_held: bool
    is_unclear: bool
    is_leaked: bool
    can_be_released: bool
    fence: int
    waiting: int
    renewals: str
    margin: str


def node_row(node: NodeStatus) -> NodeRow:
    """Return how *node* is shown."""
    return NodeRow(
        node=text_of(node.node),
        state=text_of(node.state, 20).short,
        meaning=STATES.get(node.state, ""),
        version=text_of(node.version, 20),
        uptime=duration(node.uptime) if node.version else "",
        quarantine=duration(float(round(node.quarantine + 0.5))) if node.quarantine else "",
        problem=text_of(node.problem, 200),
    )


def lock_row(view: LockView, nodes: int, now: float, longest: int = 80, silent: int = 0) -> LockRow:
    """
    Return how *view* is shown.

    Args:
        view: A lock.
        nodes: How many there are.
        now: The time [s, Unix time].
        longest: Characters of its name.
        silent: How many nodes did not answer.
    """
    renewals, token = number(view.holder.get("renewals")), view.holder.get("token")
    return LockRow(
        name=text_of(view.name, longest),
        raw_name=view.name,
        raw_token=token if isinstance(token, str) else "",
        holder=holder_row(view.holder, now),
        ttl="never expires" if view.ttl is None else seconds(view.ttl) or "long",
        votes=len(view.votes),
        nodes=nodes,
        on=", ".join(text_of(label).short for label in view.votes),
        is_held=len(view.votes) >= quorum(nodes),
        is_unclear=len(view.votes) < quorum(nodes) <= len(view.votes) + silent,
        is_leaked=view.ttl is None,
        can_be_released=not view.is_foreign and is_releasable(view.name, token),
        fence=view.fence,
        waiting=view.waiting,
        renewals="" if renewals is None else str(int(renewals)),
        margin=seconds(view.holder.get("margin")),
    )


def is_releasable(name: str, token: Any) -> bool:
    """Return whether a lock can be named, and its holder told from others, by these."""
    strange = "\N{REPLACEMENT CHARACTER}"  # the name in the key was no UTF-8, and is not known
    return isinstance(token, str) and len(token) >= PUBLIC_TOKEN_LENGTH and strange not in name


def holder_row(holder: dict[str, Any], now: float) -> Holder:
    """Return how *holder* is shown."""
    # The lock that is held while a slot is decided tells of its entry instead of a task.
    return Holder(
        task=text_of(holder.get("task") or holder.get("entry")),
        task_id=text_of(holder.get("task_id"), 40),
        execution=text_of(holder.get("execution"), 40),
        host=text_of(holder.get("host"), 40),
        pid=text_of(holder.get("pid"), 20),
        since=moment(holder.get("since"), now),
        token=text_of(holder.get("token"), 20),
    )


def sentence(holder: Holder) -> str:
    """Return who *holder* is, in words: task, host, process and since when."""
    told = [f"task {holder.task.short}" if holder.task.short else "somebody outside of tasks"]
    if holder.task_id.short:
        told[0] += f" [{holder.task_id.short}]"
    if holder.host.short:
        told.append(f"on {holder.host.short}")
    if holder.pid.short:
        told.append(f"in process {holder.pid.short}")
    if holder.since is not None:
        told.append(f"for {holder.since.ago}")
    return ", ".join(told)
