"""Wake-up of waiting tasks in a worker: a step of its consumer, and its event loop."""

from __future__ import annotations

import os
from typing import Any

from celery import bootsteps

from celery_redlock.plugin import locking
from celery_redlock.process.log import get_logger
from celery_redlock.task.worker.timer import cancel
from celery_redlock.task.worker.waiting_room import LOOK_EVERY, room_of

__all__ = ["WakeTasks"]

logger = get_logger(__name__)


class WakeTasks(bootsteps.StartStopStep):
    """A step of the consumer: with each connection the broker delivers all messages anew."""

    requires = ("celery_redlock.task.worker.revokes:NoteRevokes",)
    _entry: Any = None
    _bell: tuple[int, int] | None = None

    def start(self, consumer: Any) -> None:
        if locking.disabled:
            return
        room = room_of(consumer.app)
        room.open(consumer)
        self._entry = consumer.timer.call_repeatedly(LOOK_EVERY, room.look)

    def register_with_event_loop(self, consumer: Any, hub: Any) -> None:
        if self._bell is None:
            self._bell = os.pipe()
            for end in self._bell:
                os.set_blocking(end, False)
        heard, bell = self._bell
        room = room_of(consumer.app)

        def answer() -> None:
            os.read(heard, 4096)
            room.wake()

        hub.add_reader(heard, answer)
        room.ring(bell)

    def stop(self, consumer: Any) -> None:
        entry, self._entry = self._entry, None
        if entry is None:
            return
        cancel(consumer.timer, entry)
        room = room_of(consumer.app)
        try:
            room.clear()
        except Exception:  # the nodes forget them; the worker's own work must go on
            logger.exception("Tasks that waited for their locks may be waited for")
        room.ring(None)  # at last, or a hint meanwhile would run a task in the listener's thread
