"""
Publish what is due during one term, each slot once.

    entry is due --> slots since its record's last one --> too old: dropped, with a warning
                 --> for each, oldest first:
                       claim it on the nodes, one round
                         published before:                  nothing to do
                         an earlier leader died over it:    published if the task knows a copy
                         the run of an earlier one goes on: skipped, if that is the policy
                       is the term still ours? --> publish, the slot in a header --> settle it

Whatever fails on the way leaves the slot unsettled: it is tried again, by us or the next leader.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from celery.beat import SchedulingError
from celery.schedules import BaseSchedule

from celery_redlock.beat.due import MILLISECOND, due_between, next_due
from celery_redlock.beat.entries import for_slot, overlap_of, places_of_run, with_arguments
from celery_redlock.beat.missed import SHORTEST_CATCH_UP, Missed, in_time
from celery_redlock.beat.slot_records import Claim, Slots
from celery_redlock.beat.slot_votes import Claimed, LastSlot, SlotState
from celery_redlock.beat.term import Term, majority_holder
from celery_redlock.errors import ConfigurationError, DuplicateTask
from celery_redlock.events import SlotPublished, SlotSkipped
from celery_redlock.plugin import Plugin
from celery_redlock.process.deferral import defer_signals
from celery_redlock.process.log import get_logger
from celery_redlock.task.base import takes_lock
from celery_redlock.task.messages.slot import Slot
from celery_redlock.task.naming.task_lock import lock_of

__all__ = ["NotYet", "SlotPublisher", "TermOver"]

logger = get_logger(__name__)

#: How long a record is kept at least, and at most.
SHORTEST_KEEP, LONGEST_KEEP = timedelta(days=1), timedelta(days=800)
#: How much earlier than the slot a scheduler may find its entry due: the sun is not that exact.
EARLY = timedelta(seconds=2)
#: How many slots of an entry are made up for before others have their turn.
AT_ONCE = 100
#: In the place of a result.
REFUSED = object()
#: Longest time between two tries of a publish that fails [s].
LONGEST_PAUSE = 8.0
#: How long a stop waits for a publish that is under way [s].
PATIENCE = 5.0
#: When to look whether another one has published a slot that is claimed [s].
SOON = 0.25


class TermOver(Exception):
    """The term has ended, for a *reason* as in `LeaderDeposed.reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotYet(Exception):
    """A slot has to be tried again *after* so long [s]."""

    def __init__(self, after: float) -> None:
        super().__init__(after)
        self.after = after


class SlotPublisher:
    """Publishes the slots of one term; *beat* names the schedulers that stand in for each other."""

    def __init__(self, plugin: Plugin, beat: str, term: Term) -> None:
        self._plugin = plugin
        self._beat = beat
        self._term = term
        self._last: dict[str, datetime | None] = {}
        self._sent: dict[str, datetime] = {}
        self._dropped: dict[str, datetime] = {}
        self._found_due: dict[str, datetime] = {}

    @property
    def _slots(self) -> Slots:
        return Slots.on(self._plugin.locks)

    def look_up(self, names: Iterable[str]) -> None:
        """Learn the last slots of the entries called *names* that are new to this term."""
        records = {self._record(name): name for name in names if name not in self._last}
        with defer_signals():
            found = self._slots.look(list(records))
        self._last.update((name, settled(found.get(record))) for record, name in records.items())

    def last_of(self, name: str) -> datetime | None:
        return self._last.get(name)

    @property
    def longest_pause(self) -> float:
        """How long a publish that failed may wait until it is tried again [s]."""
        deadline = self._plugin.settings.beat_starting_deadline or SHORTEST_CATCH_UP
        return min(LONGEST_PAUSE, deadline / 8.0)

    def begin(self, name: str, since: datetime | None) -> None:
        """Publish no slot from before *since* of an entry that was added, enabled or changed."""
        last = self._last.get(name)
        if since is not None and (last is None or last < since):
            self._last[name] = since

    def _record(self, name: str) -> str:
        return f"{self._beat.replace('/', '%2F')}/{name}"

    def publish_due(self, entry: Any, send: Callable[[Any], Any]) -> Any:
        """
        Publish by *send* all slots of *entry* that are due; return the result of the last one.

        Raises TermOver; or NotYet, QuorumUnavailable or an error of *send* for a slot that has to
        be tried again.
        """
        self.look_up([entry.name])
        now = datetime.now(timezone.utc)
        settings = self._plugin.settings
        last = self.last_of(entry.name)
        deadline = settings.beat_starting_deadline
        try:
            missed = in_time(entry.schedule, last, now, deadline, settings.rules.ttl)
        except NotImplementedError:  # a schedule that says nothing but that it is due
            moment = self._found_due.setdefault(entry.name, now.replace(microsecond=0))
            missed = Missed([moment], None)
        if missed.dropped is not None:
            self._drop(entry, missed.dropped, last, moves_on=not missed.due)
        result = None
        for due in missed.due[:AT_ONCE]:
            result = self._publish(entry, due, send) or result
            self._found_due.pop(entry.name, None)
        if len(missed.due) > AT_ONCE:
            raise NotYet(0.0)
        if not missed.due and missed.dropped is None:
            self._wait_if_early(entry, now)
        return result

    def _wait_if_early(self, entry: Any, now: datetime) -> None:
        coming = due_between(entry.schedule, now, now + EARLY)
        if coming:
            raise NotYet((coming[0] - now).total_seconds())

    def _drop(self, entry: Any, due: datetime, last: datetime | None, *, moves_on: bool) -> None:
        since = 0.0 if last is None else last.timestamp()
        slot = Slot(entry.name, due.timestamp())
        with defer_signals():
            if moves_on:
                self._ensure_leading()
                claim = self._claim(entry, slot, None)
                self._reason_to_skip(None, slot, self._slots.claim(claim))
                self._slots.settle(claim)
                self._last[entry.name] = due
            before = self._dropped.get(entry.name)
            if before != due:
                self._dropped[entry.name] = due
                since = since if before is None else max(since, before.timestamp())
                self._skipped(entry, slot, "deadline", since)

    def _publish(self, entry: Any, due: datetime, send: Callable[[Any], Any]) -> Any:
        app = self._plugin.app
        task = app.tasks.get(entry.task)
        slot = Slot(entry.name, due.timestamp(), self._overlap(entry))
        entry = with_arguments(entry)
        places = places_of_run(task, entry) if slot.overlap == "skip" else []
        claim = self._claim(entry, slot, next(iter(places), None))
        with defer_signals():  # a stop between claim and settle would leave a doubt
            self._ensure_leading()
            claimed = self._slots.claim(claim)
            cause = self._reason_to_skip(task, slot, claimed)
            if claimed.state is SlotState.PUBLISHED:
                self._last[entry.name] = due
                return None
            if cause is None and self._goes_on(slot, places[1:]):
                cause = "overlap"
            if cause is None:
                self._ensure_leading(claim)
                task_id = slot.task_id(self._beat)
                self._sent[entry.name] = due
                with defer_signals(max_wait=PATIENCE), warned_if_slow(entry.name):
                    result = sent(send, for_slot(entry, slot, task_id))
                if result is REFUSED or (
                    getattr(result, "duplicate", False) and result.id != task_id
                ):
                    cause = "overlap" if slot.is_buffered else "duplicate"
            self._slots.settle(claim)
            self._last[entry.name] = due
            if cause is not None:
                self._skipped(entry, slot, cause)
                return None
            late = max(0.0, datetime.now(timezone.utc).timestamp() - slot.due)
            self._plugin.notify(SlotPublished(entry.name, entry.task, slot.due, task_id, late))
        return result

    def _ensure_leading(self, claim: Claim | None = None) -> None:
        reason = self._term.held.lost_reason
        if reason is not None:
            if claim is not None:
                self._slots.withdraw(claim)
            raise TermOver(reason)

    def _overlap(self, entry: Any) -> str:
        try:
            return overlap_of(entry, self._plugin.app)
        except ConfigurationError as error:  # of an entry that was not there at our start
            logger.error("beat: %s; this slot is treated as with 'skip'", error)  # noqa: TRY400
            return "skip"

    def _claim(self, entry: Any, slot: Slot, lock: str | None) -> Claim:
        keep = keep_for(entry.schedule, slot.moment, self._plugin.settings.beat_starting_deadline)
        token, fence = self._term.held.token, self._term.fence
        is_sent = self._sent.get(entry.name) == slot.moment
        return Claim(self._record(entry.name), slot.due, token, fence, keep, lock, is_sent)

    def _reason_to_skip(self, task: Any, slot: Slot, claimed: Claimed) -> str | None:
        """Return why a claimed slot must not be published; None if it may be."""
        if claimed.state is SlotState.DEPOSED:
            raise TermOver("deposed")
        if claimed.state is SlotState.AHEAD:
            raise TermOver("clock")
        if claimed.state is SlotState.TAKEN:
            raise NotYet(SOON)
        if claimed.state is SlotState.UNCERTAIN and not knows_copies(task):
            return "uncertain"
        return "overlap" if slot.is_run_of_entry(claimed.holder) else None

    def _goes_on(self, slot: Slot, places: Sequence[str]) -> bool:
        views = self._plugin.locks.inspect_all(places) if places else []
        return any(slot.is_run_of_entry(majority_holder(of_place)) for of_place in views)

    def _skipped(self, entry: Any, slot: Slot, cause: str, since: float = 0.0) -> None:
        self._plugin.notify(SlotSkipped(entry.name, entry.task, slot.due, cause, since))


@contextlib.contextmanager
def warned_if_slow(name: str) -> Iterator[None]:
    words = "beat: Publishing %r has not ended for %g s; is the broker out of reach?"
    alarm = threading.Timer(PATIENCE, logger.warning, (words, name, PATIENCE))
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


def sent(send: Callable[[Any], Any], ready: Any) -> Any:
    """Return the result of publishing *ready*; `REFUSED` if its task is queued or runs already."""
    try:
        return send(ready)
    except SchedulingError as error:
        if isinstance(error.__cause__ or error.__context__, DuplicateTask):
            return REFUSED
        raise


def knows_copies(task: Any) -> bool:
    """Whether a second message of a run of *task* ends without running."""
    return takes_lock(task) and lock_of(task).options.dedup_ttl > 0


def settled(found: LastSlot | None) -> datetime | None:
    """Return the last slot of a record that needs no more publishing."""
    if found is None:
        return None
    due = datetime.fromtimestamp(found.due, timezone.utc)
    return due if found.is_settled else due - MILLISECOND


def keep_for(plan: BaseSchedule, due: datetime, deadline: float | None) -> float:
    """Return how long to keep the record of a slot [s]: well beyond the next one."""
    try:
        following = next_due(plan, due)
    except NotImplementedError:  # a schedule that says nothing but that it is due
        following = None
    longest = SHORTEST_KEEP + timedelta(seconds=2 * (deadline or 0.0))
    if following is not None:
        longest = max(longest, 2 * (following - due))
    return min(longest, LONGEST_KEEP).total_seconds()
