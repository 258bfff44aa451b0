"""
Events as frozen facts for observers. Times are seconds.

An event never carries a token or an argument value. `Event` is any of them. Its class says what
else there is to know of it: name, level, sentence, metrics; `celery_redlock.events.base` lists all.
"""

from __future__ import annotations

from celery_redlock.events import base, beat, locks, nodes, tasks
from celery_redlock.events.base import *  # noqa: F403  each module says what is public
from celery_redlock.events.base import Event
from celery_redlock.events.base import LockEvent as LockEvent
from celery_redlock.events.base import tell as tell
from celery_redlock.events.beat import *  # noqa: F403
from celery_redlock.events.locks import *  # noqa: F403
from celery_redlock.events.nodes import *  # noqa: F403
from celery_redlock.events.nodes import NodeEvent as NodeEvent
from celery_redlock.events.tasks import *  # noqa: F403
from celery_redlock.events.tasks import TaskEvent as TaskEvent

__all__ = ["KINDS", "kinds_in"]
__all__ += base.__all__
__all__ += locks.__all__
__all__ += tasks.__all__
__all__ += nodes.__all__
__all__ += beat.__all__

#: Name of an event -> its class.
KINDS: dict[str, type[Event]] = {
    it.__name__: it
    for module in (locks, tasks, nodes, beat)
    for it in vars(module).values()
    if isinstance(it, type) and issubclass(it, Event) and it.celery_type
}


def kinds_in(*parts: str) -> tuple[str, ...]:
    """Return the names of the events in these parts of the journal."""
    return tuple(name for part in parts for name, it in KINDS.items() if it.journal == part)
