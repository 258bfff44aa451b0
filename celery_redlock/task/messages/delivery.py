"""
One delivery of a message, in the worker's parent and in the child that runs it.

Both need the same: the id of the execution, which every delivery of a message shares, and the
owner, which no other delivery ever has.

The parent hands the owner to its child with how the message was delivered, which neither a retry
nor ``celery inspect`` takes from there; anything else that Celery does not know would become a
header.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from celery.app.task import Context
from kombu.serialization import registry  # type: ignore[attr-defined]

from celery_redlock.lock.algorithm.participant import new_owner
from celery_redlock.process.log import cut
from celery_redlock.task.messages.envelope import HEADER, Envelope, fresh_publish_id, hide_header
from celery_redlock.task.options import LockOptions

__all__ = [
    "CELERYS",
    "Delivery",
    "broadcast_of",
    "execution_id",
    "forget_serializer",
    "hide",
    "is_woken",
    "mint_owner",
    "note_queue",
    "note_serializer",
    "note_woken",
    "queue_of",
    "serializer_of",
]

OWNER = "redlock_owner"
WOKEN = "redlock_woken"
#: The queue that a broadcast message came by, where the broker takes messages for a queue alone.
QUEUE = "redlock_queue"
#: As Celery calls the option; it takes some of those of a copy from how a message was delivered.
SERIALIZER = "serializer"
#: What a message carries may come from anybody who can publish.
WELL_FORMED = re.compile(r"[0-9a-f]{32}")
QUEUE_NAME = re.compile(r".{1,255}")
YES = re.compile(r"yes")
#: What Celery itself says of a message, or keeps beside that.
CELERYS = frozenset(vars(Context)) | {"lang", "task", "argsrepr", "kwargsrepr", "_children", HEADER}
#: What a message says where it says nothing.
FIELDS = "id", HEADER, "delivery_info", "retries", "replaced_task_nesting", "parent_id"
UNSAID = dict.fromkeys(FIELDS)


@dataclass(frozen=True)
class Delivery:
    """
    A delivery of a message.

    Attributes:
        task_id: Of its task.
        envelope: What the message says of itself.
        execution: Id of its execution.
        may_be_repeated: Whether an earlier delivery of the same message may have run: it says of
            which publish it is, or the broker says that it delivers it again.
        comes_again: Whether it is a retry, or replaces a task of the same id.
        parent_id: Of the task that published it, if any.
        was_woken: Whether a hint ended its waiting.
        copy_id: Publish id of its copies, where its message has none.
        owner: What the tokens of its locks begin with, so that the parent can release for a child
            that is dead; None where there is no parent.
        fields: What it was made of.
    """

    task_id: Any
    envelope: Envelope
    execution: str
    may_be_repeated: bool
    comes_again: bool = False
    parent_id: Any = None
    was_woken: bool = False
    copy_id: str = ""
    owner: str | None = field(default=None, repr=False)
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, task: Any, fields: Mapping[str, Any], worker: str) -> Delivery:
        """
        Return the delivery that *fields* describe.

        Args:
            task: The task.
            worker: Name of the worker; of a broadcast each runs an execution of its own, or each
                queue has one.
            fields: Of the message's own headers, and its ``delivery_info``; the same in the
                worker's parent process and in its child.
        """
        said = {**UNSAID, **fields}
        task_id, retries, nesting = said["id"], said["retries"], said["replaced_task_nesting"]
        envelope = Envelope.of(said[HEADER], task_id)
        info = said["delivery_info"]
        is_redelivered = type(info) is dict and bool(info.get("redelivered"))
        place = queue_of(info) or ("" if broadcast_of(task.app, info) is None else worker)
        published = envelope.publish_id or ""
        execution = execution_id(task.name, task_id, published, retries, nesting, place)
        return cls(
            task_id=task_id,
            envelope=envelope,
            execution=execution,
            may_be_repeated=envelope.publish_id is not None or is_redelivered,
            comes_again=bool(retries or nesting),
            parent_id=said["parent_id"],
            was_woken=word_in(info, WOKEN, YES) is not None,
            owner=word_in(info, OWNER, WELL_FORMED),
            fields=fields,
        )

    @property
    def headers(self) -> dict[str, Any]:
        """The headers that its publisher gave it."""
        # What Celery does not know of a message is a header; those of eager calls are nested.
        nested = self.fields.get("headers")
        given = dict(nested) if isinstance(nested, dict) else {}
        given.update((k, v) for k, v in self.fields.items() if k not in CELERYS)
        given.pop(HEADER, None)
        return given

    def is_owner(self, holder: Mapping[str, Any]) -> bool:
        """Return whether *holder*, known by the beginning of its token, is this delivery."""
        token = str(holder.get("token") or "")
        return bool(token) and (self.owner or "").startswith(token)

    def is_same_execution(self, holder: Mapping[str, Any]) -> bool:
        """Return whether *holder* is another delivery of this execution."""
        is_ours = "task_id" in holder and holder.get("execution") == self.execution
        return is_ours and self.may_be_repeated

    @property
    def may_have_previous(self) -> bool:
        """Whether there can be an execution before this one that still holds its lock."""
        is_published = self.envelope.previous is not None or self.parent_id is not None
        return self.comes_again or is_published

    def is_previous_execution(self, holder: Mapping[str, Any]) -> bool:
        """Return whether *holder* came before this one: a retry of it, or its parent in a chain."""
        task_id, execution = holder.get("task_id"), holder.get("execution")
        if task_id is None or execution == self.execution:
            return False
        if task_id == cut(str(self.task_id)):
            return self.comes_again or execution == self.envelope.previous
        # Never by the same id: Celery makes a copy, published within its task, a child of itself.
        return self.parent_id is not None and task_id == cut(str(self.parent_id))

    def info(self, task: str) -> dict[str, Any]:
        """Return how an execution of the *task* of this name describes itself to others."""
        info = {"task": task, "task_id": self.task_id, "execution": self.execution}
        slot = self.envelope.slot
        return info if slot is None else {**info, **slot.info}

    def adjust(self, options: LockOptions) -> LockOptions:
        """Return the *options* of its task, as the slot that it runs for adjusts them."""
        slot = self.envelope.slot
        return options if slot is None else slot.adjust(options)

    @property
    def copy(self) -> Envelope:
        """
        The envelope of a copy published in place of this delivery: the same execution.

        No release wakes it.
        """
        envelope = self.envelope
        if envelope.publish_id is None:
            envelope = envelope._replace(publish_id=self.copy_id)
        if envelope.waiting is not None:
            envelope = envelope._replace(waiting=envelope.waiting.unwoken)
        return envelope

    @property
    def retry(self) -> Envelope:
        """The envelope of a retry in place of this delivery: the same one, whoever publishes it."""
        publish_id = self.copy_id or self.execution
        return self.envelope._replace(publish_id=publish_id, previous=None, waiting=None)

    @property
    def is_second_publish(self) -> bool:
        """Whether an earlier publish under its task id is known, which is another execution."""
        return bool(self.copy_id)

    def of_second_publish(self) -> Delivery:
        """Return this delivery, of a message without a publish id that is such a second one."""
        return replace(self, copy_id=fresh_publish_id())


def broadcast_of(app: Any, delivery_info: Any) -> Any:
    """Return the exchange that delivered a message to other workers, too; None if it is for one."""
    name = delivery_info.get("exchange") if type(delivery_info) is dict else None
    if not name:
        return None
    known = (queue.exchange for queue in app.amqp.queues.values() if queue.exchange)
    return next((one for one in known if (one.name, one.type) == (name, "fanout")), None)


def note_queue(request: dict[str, Any], queue: str) -> None:
    """Let the child know by which *queue* a broadcast message came; "" for no such."""
    if queue:
        request["delivery_info"] = {**(request.get("delivery_info") or {}), QUEUE: queue}


def queue_of(delivery_info: Any) -> str:
    """Return the queue that the parent has noted; "" for none."""
    return word_in(delivery_info, QUEUE, QUEUE_NAME) or ""


def execution_id(
    task: str, task_id: Any, publish_id: str, retries: Any, nesting: Any, place: str = ""
) -> str:
    """
    Return the id of an execution: 32 hexadecimal digits.

    Args:
        task: Name of the task, so that no message of another task can stand for it.
        task_id: Of the task.
        publish_id: As of `Envelope`, empty for none.
        retries: How many retries came before it.
        nesting: How many replacements came before it.
        place: Where it runs, if others run it elsewhere.
    """
    parts = [task, task_id, publish_id, retries or 0, nesting or 0, place]
    return hashlib.sha256(ascii(parts).encode()).hexdigest()[:32]


def mint_owner(request: dict[str, Any]) -> None:
    """Put a new owner into *request*, for the child."""
    request["delivery_info"] = {**(request.get("delivery_info") or {}), OWNER: new_owner()}


def note_woken(request: dict[str, Any]) -> None:
    """Let the child know that a hint ended its waiting, likewise."""
    request["delivery_info"] = {**(request.get("delivery_info") or {}), WOKEN: "yes"}


def is_woken(request: Any) -> bool:
    """Return whether a hint ended the waiting of *request*, as the worker's parent knows it."""
    return word_in(request.request_dict.get("delivery_info"), WOKEN, YES) is not None


def word_in(delivery_info: Any, name: str, pattern: re.Pattern[str]) -> str | None:
    """Return what the parent has put there as *name*; None if it did not, or it is no such word."""
    word = delivery_info.get(name) if type(delivery_info) is dict else None
    return word if type(word) is str and pattern.fullmatch(word) else None


def hide(request: Any) -> None:
    """Show a body only the headers that its caller gave, and its slot."""
    hide_header(request)
    if type(request.delivery_info) is dict:
        request.delivery_info.pop(OWNER, None)
        request.delivery_info.pop(WOKEN, None)


def note_serializer(request: dict[str, Any], content_type: Any, usual: str | None) -> None:
    """Pass on the serializer of a message, unless it is the *usual* one."""
    name = registry.type_to_name.get(content_type)
    if name not in {None, usual}:
        request["delivery_info"] = {**(request.get("delivery_info") or {}), SERIALIZER: name}


def forget_serializer(request: Any) -> None:
    """Hide the serializer from the body: Celery chooses that of what it publishes."""
    (request.delivery_info or {}).pop(SERIALIZER, None)


def serializer_of(request: Any) -> str | None:
    """Return the serializer that the message of *request* was written with; None for the usual."""
    return (request.delivery_info or {}).get(SERIALIZER)
