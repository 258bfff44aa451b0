"""
The wrapped scheduler during one term, while we lead.

It is built again for each term, so that it reads its state afresh, and works as usual but
for what it calls on itself:

    populate_heap   first its entries learn from the nodes when they ran last
    is_due          an interval is due on its grid, so that lateness does not add up
    reserve         likewise
    apply_entry     publishes by way of `celery_redlock.beat.slots`, slot by slot
    apply_async     likewise, where the scheduler calls it by itself, as RedBeat does
    should_sync     not within a publish, but after a tick
    maybe_due       of RedBeat: an entry that is changed or disabled is not made up for

What could not be published is owed: it is retried until it is, or the term ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from celery.schedules import schedstate

from celery_redlock.beat import entries
from celery_redlock.beat.due import left_on_grid
from celery_redlock.beat.slots import NotYet, SlotPublisher, TermOver
from celery_redlock.beat.term import Term
from celery_redlock.errors import QuorumUnavailable
from celery_redlock.lock import clock
from celery_redlock.process.log import get_logger

__all__ = ["WrappedScheduler"]

logger = get_logger(__name__)

#: When something is tried again that failed, at first [s].
TRY_AGAIN = 1.0
#: Shortest pause after a tick in which nothing was published [s], for entries that stay due.
BREATH = 0.002
#: Longest time between two looks whether we still lead [s].
LOOK = 1.0
#: Methods of the scheduler in whose place are those of `WrappedScheduler`.
TAKEN_OVER = ("populate_heap", "is_due", "reserve", "apply_entry", "apply_async", "maybe_due")


@dataclass
class Owed:
    """
    An entry with slots that have to be tried again.

    Attributes:
        at: When to try again [s, `clock.now`].
        moves_on: Whether the entry is to be moved on once they are published.
    """

    entry: Any
    send: Callable[[Any, dict[str, Any]], Any]
    at: float = 0.0
    moves_on: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    failures: int = 0


@dataclass
class Sent:
    """The result of a publish within the scheduler's own ``apply_entry``, which returns none."""

    result: Any = None
    error: Exception | None = None


class WrappedScheduler:
    def __init__(self, scheduler: Any, publisher: SlotPublisher, term: Term) -> None:
        self.scheduler = scheduler
        self._publisher = publisher
        self._term = term
        self._owed: dict[str, Owed] = {}
        self._next_tick = 0.0
        self._next_slot = float("inf")
        self._plans: dict[str, Any] = {}
        self._published = 0
        self._scheduled: dict[str, Any] | None = None
        self._over: str | None = None
        self._sent: Sent | None = None
        self._own: dict[str, Callable[..., Any]] = {}
        for name in TAKEN_OVER:
            if hasattr(scheduler, name):
                self._own[name] = getattr(scheduler, name)
                setattr(scheduler, name, getattr(self, name))
        self._should_sync: Callable[[], bool] = scheduler.should_sync
        scheduler.should_sync = lambda: False  # or what it raises would pass for a failed publish
        if hasattr(scheduler, "lock_key"):  # RedBeat's own lock: a second one, on one node
            scheduler.lock_key = None

    def tick(self) -> float:
        """Do what is due and return when to tick next [s from now, >= 0]; raises TermOver."""
        self._ensure_leading()
        self._pay()
        if clock.now() >= min(self._next_tick, self._next_slot):
            self._tick()
        self._ensure_leading()
        self._sync()
        soonest = [self._next_tick, self._next_slot, *(owed.at for owed in self._owed.values())]
        return min(LOOK, max(0.0, min(soonest) - clock.now()))

    def _sync(self) -> None:
        try:
            if self._should_sync():
                self.scheduler._do_sync()  # noqa: SLF001  as Celery calls it
        except Exception:
            logger.exception("beat: The wrapped scheduler could not store its state")

    def _tick(self) -> None:
        self._next_slot = float("inf")
        published = self._published
        try:
            pause = self.scheduler.tick() or 0.0
        except QuorumUnavailable as error:
            logger.warning("beat: Cannot read what was published last: %s", error)
            pause = TRY_AGAIN
        if self._published == published:
            pause = max(pause, BREATH)
        self._next_tick = clock.now() + pause

    def _ensure_leading(self) -> None:
        reason = self._over or self._term.held.lost_reason
        if reason is not None:
            raise TermOver(reason)

    def _pay(self) -> None:
        for name, owed in list(self._owed.items()):
            if owed.at > clock.now() or self._over:
                continue
            entry = entries.current(self.scheduler, owed.entry)
            if entry is not None and entry.schedule != owed.entry.schedule:
                logger.warning("beat: %r was changed before it was published", name)
                self._publisher.begin(name, datetime.now(timezone.utc))
            owed.entry = entry
            if entry is None:
                logger.warning(
                    "beat: %r was removed from the schedule before it was published", name
                )
                del self._owed[name]
                continue
            if owed.options.get("producer") is not None:
                owed.options["producer"] = self.scheduler.producer
            try:
                self._publish(owed)
            except Exception as error:  # noqa: BLE001  whatever a publish can raise
                logger.warning("beat: Publishing %r failed again; still trying: %r", name, error)
                return  # the broker is down: the others would only wait for it one by one

    # -- what the scheduler calls on itself -------------------------------------------

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """
        Publish the slots of *entry* that are due. Never fails, as Celery's.

        The scheduler's own is called for each slot that is published, and for no other: so what
        wraps it, as a monitor of schedules does, begins nothing that no task will end.
        """
        if entry.name in self._owed:  # it is tried again at its own time
            return
        try:
            self._publish(Owed(entry, self._send_by_entry, options={"producer": producer}))
        except Exception:
            logger.exception("beat: Publishing %r failed; still trying", entry.name)

    def _send_by_entry(self, ready: Any, options: dict[str, Any]) -> Any:
        self._sent = sent = Sent()
        try:
            self._own["apply_entry"](ready, **options)
        finally:
            self._sent = None
        if sent.error is not None:
            raise sent.error
        return sent.result

    def _send_by_itself(self, ready: Any, options: dict[str, Any]) -> Any:
        return self._own["apply_async"](ready, advance=False, **options)

    def apply_async(
        self,
        entry: Any,
        producer: Any = None,
        advance: bool = True,  # noqa: FBT001, FBT002  Celery's signature
        **kwargs: Any,
    ) -> Any:
        options = {"producer": producer, **kwargs}
        if self._sent is not None:  # called by the scheduler's own apply_entry, for one slot
            sent, self._sent = self._sent, None
            try:
                sent.result = self._send_by_itself(entry, options)
            except Exception as error:  # noqa: BLE001  raised again after it; it would be logged
                sent.error = error
            return sent.result
        if entry.name in self._owed:  # it is tried again at its own time
            return None
        return self._publish(Owed(entry, self._send_by_itself, moves_on=advance, options=options))

    def _publish(self, owed: Owed) -> Any:
        if self._over is not None:
            return None
        entry = owed.entry
        self._note_next_slot(entry)
        try:
            result = self._publisher.publish_due(entry, lambda ready: self._send(owed, ready))
        except TermOver as over:
            self._over = over.reason
            return None
        except NotYet as wait:
            self._owe(owed, wait.after)
            return None
        except QuorumUnavailable as error:
            if entry.name not in self._owed:
                logger.warning("beat: %r is due, but waits: %s", entry.name, error)
            self._owe(owed, TRY_AGAIN)
            return None
        except Exception:
            owed.failures += 1
            pause = min(self._publisher.longest_pause, TRY_AGAIN * 2 ** min(owed.failures - 1, 5))
            self._owe(owed, pause)
            raise
        self._owed.pop(entry.name, None)
        if owed.moves_on:
            self.reserve(entry)
        return result

    def _send(self, owed: Owed, ready: Any) -> Any:
        result = owed.send(ready, owed.options)
        self._published += 1
        if owed.failures:  # the broker is back
            for other in self._owed.values():
                other.at = 0.0
        return result

    def _note_next_slot(self, entry: Any) -> None:
        """Have the next tick in time for the grid of an interval; RedBeat counts from now on."""
        left = left_on_grid(entry.schedule, datetime.now(timezone.utc))
        if left is not None:
            self._next_slot = min(self._next_slot, clock.now() + left)

    def _owe(self, owed: Owed, after: float) -> None:
        owed.at = clock.now() + after
        self._owed[owed.entry.name] = owed

    def reserve(self, entry: Any) -> Any:
        return entries.reserve(self._own["reserve"], entry, datetime.now(timezone.utc))

    def is_due(self, entry: Any) -> Any:
        state = self._own["is_due"](entry)
        left = left_on_grid(entry.schedule, datetime.now(timezone.utc)) if state[0] else None
        return state if left is None else schedstate(is_due=True, next=left)

    def populate_heap(self, *args: Any, **kwargs: Any) -> Any:
        scheduled = list(self.scheduler.schedule.values())
        try:
            self._publisher.look_up([entry.name for entry in scheduled])
        except QuorumUnavailable:
            self.scheduler._heap = None  # noqa: SLF001  so that it is tried again
            raise
        before = self._scheduled
        for entry in scheduled:
            if before is not None and entry.name not in before:
                self._publisher.begin(entry.name, entries.ran_last(entry))
            elif before is not None and before[entry.name] != entry.schedule:
                self._publisher.begin(entry.name, datetime.now(timezone.utc))
            entries.recall(entry, self._publisher.last_of(entry.name))
        self._scheduled = {entry.name: entry.schedule for entry in scheduled}
        return self._own["populate_heap"](*args, **kwargs)

    def maybe_due(self, entry: Any, **kwargs: Any) -> Any:
        plan = self._plans.setdefault(entry.name, entry.schedule)
        if plan != entry.schedule or not entry.enabled:
            self._plans[entry.name] = entry.schedule
            self._publisher.begin(entry.name, datetime.now(timezone.utc))
        return self._own["maybe_due"](entry, **kwargs)

    def close(self) -> None:
        self.scheduler.close()
        # That of django-celery-beat would be kept until the process ends, and then store its state.
        finalize = getattr(self.scheduler, "_finalize", None)
        if finalize is not None:
            finalize.cancel()
