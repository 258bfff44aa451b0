"""
The ``delivery_info`` of a request, in which a worker's parent leaves words for the child.

Neither a retry nor ``celery inspect`` takes them from there; anything else that Celery does not
know would become a header.
"""

from __future__ import annotations

import re
from typing import Any

from kombu.serialization import registry  # type: ignore[attr-defined]

from celery_redlock.lock.algorithm.participant import new_owner
from celery_redlock.task.messages.envelope import HEADER

__all__ = [
    "OWNER",
    "WOKEN",
    "broadcast_of",
    "forget_serializer",
    "hide",
    "is_woken",
    "mint_owner",
    "note_queue",
    "note_serializer",
    "note_woken",
    "queue_of",
    "serializer_of",
    "word_in",
]

OWNER = "redlock_owner"
WOKEN = "redlock_woken"
#: The queue that a broadcast message came by, where the broker takes messages for a queue alone.
QUEUE = "redlock_queue"
#: As Celery calls the option; it takes some of those of a copy from how a message was delivered.
SERIALIZER = "serializer"
#: What each may be: a message may come from anybody who can publish.
WELL_FORMED = {
    OWNER: re.compile(r"[0-9a-f]{32}"),
    WOKEN: re.compile(r"yes"),
    QUEUE: re.compile(r".{1,255}"),
}


def leave_word(request: dict[str, Any], name: str, word: str) -> None:
    request["delivery_info"] = {**(request.get("delivery_info") or {}), name: word}


def word_in(delivery_info: Any, name: str) -> str | None:
    """Return the word that the parent has left as *name*; None if it has not."""
    word = delivery_info.get(name) if type(delivery_info) is dict else None
    return word if type(word) is str and WELL_FORMED[name].fullmatch(word) else None


def mint_owner(request: dict[str, Any]) -> None:
    leave_word(request, OWNER, new_owner())


def note_woken(request: dict[str, Any]) -> None:
    leave_word(request, WOKEN, "yes")


def is_woken(request: Any) -> bool:
    return word_in(request.request_dict.get("delivery_info"), WOKEN) is not None


def hide(request: Any) -> None:
    """
    Show a body only the headers that its caller gave, and its slot.

    Without the publish id: a body that passes its headers on publishes another execution.
    """
    headers = request.headers
    if type(headers) is dict and HEADER in headers:
        seen = dict(headers)
        ours = seen.pop(HEADER)
        if type(ours) is dict and "slot" in ours:
            seen[HEADER] = {field: value for field, value in ours.items() if field != "id"}
        request.headers = seen or None
    if type(request.delivery_info) is dict:
        request.delivery_info.pop(OWNER, None)
        request.delivery_info.pop(WOKEN, None)


def broadcast_of(app: Any, delivery_info: Any) -> Any:
    """Return the exchange that delivered a message to other workers, too; None if it is for one."""
    name = delivery_info.get("exchange") if type(delivery_info) is dict else None
    if not name:
        return None
    known = (queue.exchange for queue in app.amqp.queues.values() if queue.exchange)
    return next((one for one in known if (one.name, one.type) == (name, "fanout")), None)


def note_queue(request: dict[str, Any], queue: str) -> None:
    if queue:
        leave_word(request, QUEUE, queue)


def queue_of(delivery_info: Any) -> str:
    return word_in(delivery_info, QUEUE) or ""


def note_serializer(request: dict[str, Any], content_type: Any, usual: str | None) -> None:
    name = registry.type_to_name.get(content_type)
    if name not in {None, usual}:
        leave_word(request, SERIALIZER, name)


def forget_serializer(request: Any) -> None:
    """Hide the serializer from the body: Celery chooses that of what it publishes."""
    (request.delivery_info or {}).pop(SERIALIZER, None)


def serializer_of(request: Any) -> str | None:
    return (request.delivery_info or {}).get(SERIALIZER)
