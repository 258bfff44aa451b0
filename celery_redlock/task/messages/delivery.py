"""
One delivery of a message, in the worker's parent and in the child that runs it.

Both need the same: the id of the execution, which every delivery of a message shares, and the
owner, which no other delivery ever has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from celery.app.task import Context

from celery_redlock.process.log import cut
from celery_redlock.task.messages.delivery_info import (
    OWNER,
    WOKEN,
    broadcast_of,
    queue_of,
    word_in,
)
from celery_redlock.task.messages.envelope import HEADER, Envelope, fresh_publish_id
from celery_redlock.task.options import LockOptions

__all__ = ["CELERYS", "Delivery", "execution_id"]

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
        may_be_repeated: Whether an earlier delivery of the same message may have run: it says of
            which publish it is, or the broker says that it delivers it again.
        comes_again: Whether it is a retry, or replaces a task of the same id.
        parent_id: Of the task that published it, if any.
        was_woken: Whether a hint ended its waiting.
        copy_id: Publish id of its copies, where its message has none.
        owner: What the tokens of its locks begin with, so that the parent can release for a child
            that is dead; None where there is no parent.
        fields: Of the message's own headers, and its ``delivery_info``.
        is_redelivered: Whether the broker says so, or said it of a message that this is a copy of.
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
    is_redelivered: bool = False

    @classmethod
    def of(cls, task: Any, fields: Mapping[str, Any], worker: str) -> Delivery:
        """
        Read a delivery from *fields*, the same in the worker's parent process and in its child.

        *worker* counts for a broadcast: each runs an execution of its own, or each queue has one.
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
            was_woken=word_in(info, WOKEN) is not None,
            owner=word_in(info, OWNER),
            fields=fields,
            is_redelivered=is_redelivered or envelope.again,
        )

    @property
    def headers(self) -> dict[str, Any]:
        # What Celery does not know of a message is a header; those of eager calls are nested.
        nested = self.fields.get("headers")
        given = dict(nested) if isinstance(nested, dict) else {}
        given.update((k, v) for k, v in self.fields.items() if k not in CELERYS)
        given.pop(HEADER, None)
        return given

    def is_owner(self, holder: Mapping[str, Any]) -> bool:
        token = str(holder.get("token") or "")
        return bool(token) and (self.owner or "").startswith(token)

    def is_same_execution(self, holder: Mapping[str, Any]) -> bool:
        is_ours = "task_id" in holder and holder.get("execution") == self.execution
        return is_ours and self.may_be_repeated

    @property
    def may_have_previous(self) -> bool:
        """Whether there can be an execution before this one that still holds its lock."""
        is_published = self.envelope.previous is not None or self.parent_id is not None
        return self.comes_again or is_published

    def is_previous_execution(self, holder: Mapping[str, Any]) -> bool:
        """Whether *holder* came before this one: a retry of it, or its parent in a chain."""
        task_id, execution = holder.get("task_id"), holder.get("execution")
        if task_id is None or execution == self.execution:
            return False
        if task_id == cut(str(self.task_id)):
            return self.comes_again or execution == self.envelope.previous
        # Never by the same id: Celery makes a copy, published within its task, a child of itself.
        return self.parent_id is not None and task_id == cut(str(self.parent_id))

    def info(self, task: str) -> dict[str, Any]:
        info = {"task": task, "task_id": self.task_id, "execution": self.execution}
        slot = self.envelope.slot
        return info if slot is None else {**info, **slot.info}

    def adjust(self, options: LockOptions) -> LockOptions:
        slot = self.envelope.slot
        return options if slot is None else slot.adjust(options)

    @property
    def copy(self) -> Envelope:
        """The envelope of a copy in place of this delivery: the same execution, not to be woken."""
        envelope = self.envelope._replace(again=self.is_redelivered)
        if envelope.publish_id is None:
            envelope = envelope._replace(publish_id=self.copy_id)
        if envelope.waiting is not None:
            envelope = envelope._replace(waiting=envelope.waiting.unwoken)
        return envelope

    @property
    def retry(self) -> Envelope:
        """The envelope of a retry in place of this delivery: the same one, whoever publishes it."""
        publish_id = self.copy_id or self.execution
        return self.envelope._replace(
            publish_id=publish_id, previous=None, waiting=None, again=False
        )

    @property
    def is_second_publish(self) -> bool:
        return bool(self.copy_id)

    def of_second_publish(self) -> Delivery:
        """Mark a delivery whose task id an earlier publish has had: another execution."""
        return replace(self, copy_id=fresh_publish_id())


def execution_id(
    task: str, task_id: Any, publish_id: str, retries: Any, nesting: Any, place: str = ""
) -> str:
    """32 hexadecimal digits; *place* is where it runs, if others run it elsewhere."""
    parts = [task, task_id, publish_id, retries or 0, nesting or 0, place]
    return hashlib.sha256(ascii(parts).encode()).hexdigest()[:32]
