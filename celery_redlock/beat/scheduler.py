"""
The scheduler of ``celery beat -S redlock``: stand by, or lead.

    tick --> StandBy: bid when it is time      (term.py)
             Term:    the wrapped scheduler    (wrapped_scheduler.py), which publishes by slots.py
                      lost, deposed, failed: step down, stand by

A tick raises nothing but SystemExit when beat is to end, so a lock never ends the process: it
waits, and logs that.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from celery.utils.imports import load_extension_class_names
from kombu.utils.imports import symbol_by_name

from celery_redlock.beat.entries import overlap_of
from celery_redlock.beat.slots import SlotPublisher, TermOver
from celery_redlock.beat.term import AFTER_FAILURE, Elector, StandBy, Term
from celery_redlock.beat.wrapped_scheduler import WrappedScheduler
from celery_redlock.errors import ConfigurationError
from celery_redlock.lock import clock
from celery_redlock.plugin import plugin_for
from celery_redlock.process.deferral import defer_signals
from celery_redlock.process.log import get_logger
from celery_redlock.task.base import takes_lock

__all__ = ["RedlockScheduler"]

logger = get_logger(__name__)

#: What a term needs of the scheduler that is wrapped.
WRAPPED = ("tick", "apply_async", "reserve", "is_due", "populate_heap", "should_sync", "close")


class RedlockScheduler:
    """
    A scheduler for ``celery beat`` of which there may be many: one leads, the others stand by.

    It wraps the scheduler that the setting ``redlock_beat_scheduler`` names, by composition.
    Each due slot is published at most once, even by two leaders at once.

    Args:
        app: The Celery app.
        schedule_filename: For the wrapped scheduler, if it keeps a file.
        max_interval: Longest sleep of the wrapped scheduler [s].
        lazy: Only describe it; take no part.
        **kwargs: For the wrapped scheduler.

    Raises:
        ConfigurationError: A setting is impossible, or a server must not be a lock node.
    """

    #: RedBeat looks whether it is to take a lock of its own.
    lock_key = None

    def __init__(
        self,
        app: Any,
        schedule_filename: str | None = None,
        max_interval: float | None = None,
        lazy: bool = False,  # noqa: FBT001, FBT002  Celery's signature
        **kwargs: Any,
    ) -> None:
        self.app = app
        self._plugin = plugin_for(app)
        settings = self._plugin.settings
        self._wrapped = scheduler_class(settings.beat_scheduler)
        self._options = {
            "schedule_filename": schedule_filename,
            "max_interval": max_interval,
            **kwargs,
        }
        self.max_interval: float = (
            max_interval or app.conf.beat_max_loop_interval or self._wrapped.max_interval
        )
        self._beat = settings.beat_name or app.main or "celery"
        self._elector: Elector | None = None
        self._state: StandBy | Term = StandBy(0.0, "")
        self._active: WrappedScheduler | None = None
        self._is_closed = False
        if not lazy:
            self._start()

    def _start(self) -> None:
        self._plugin.check()
        check_entries(self.app)
        name = f"celery_redlock.beat:{self._beat}"
        self._elector = Elector(self._plugin.locks, name, self._plugin.notify)

    # -- what celery.beat.Service calls -----------------------------------------------

    def tick(self) -> float:
        """
        Bid if it is time, or do what is due; return when to tick next [s from now].

        Raises:
            SystemExit: We are closed. On SIGTERM Celery closes us and raises SystemExit wherever
                the process is; in a finalizer, Python only prints that and goes on.
        """
        if self._is_closed:
            raise SystemExit
        if isinstance(self._state, StandBy):
            pause = self._state.until - clock.now()
            if pause > 0:
                return pause
            self._bid(self._state)
        if isinstance(self._state, Term):
            return self._lead(self._state)
        return max(0.0, self._state.until - clock.now())

    def _bid(self, state: StandBy) -> None:
        if self._elector is None or self._is_closed:
            return
        try:
            with defer_signals():  # a granted term must not get lost on its way here
                self._state = self._elector.bid(state)
        except Exception:
            logger.exception("beat: The bid failed; trying again")
            self._state = StandBy(clock.now() + clock.jitter(*AFTER_FAILURE), "the bid failed")

    def _lead(self, term: Term) -> float:
        try:
            if self._active is None:
                self._active = self._build(term)
            return self._active.tick()
        except TermOver as over:
            self._step_down(term, over.reason)
        except Exception:
            logger.exception("beat: %s failed; another scheduler may lead", self._wrapped.__name__)
            self._step_down(term, "failed")
        return 0.0

    def _build(self, term: Term) -> WrappedScheduler:
        scheduler = self._wrapped(app=self.app, lazy=False, **self._options)
        return WrappedScheduler(scheduler, SlotPublisher(self._plugin, self._beat, term), term)

    def _step_down(self, term: Term, reason: str) -> None:
        active, self._active = self._active, None
        try:
            if active is not None:
                active.close()
        except Exception:
            logger.exception("beat: Closing %s failed", self._wrapped.__name__)
        finally:
            if self._elector is not None:
                with defer_signals():
                    self._state = self._elector.step_down(term, reason)

    def should_sync(self) -> bool:
        """The wrapped scheduler stores its state within its tick, while we lead."""
        return False

    def sync(self) -> None:
        if self._active is not None:
            self._active.scheduler.sync()

    def close(self) -> None:
        """Resign, so that another may lead at once; may be called again."""
        self._is_closed = True
        if isinstance(self._state, Term):
            self._step_down(self._state, "resigned")

    @property
    def schedule(self) -> Any:
        return {} if self._active is None else self._active.scheduler.schedule

    @property
    def info(self) -> str:
        name = f"{self._wrapped.__module__}.{self._wrapped.__qualname__}"
        nodes, ttl = len(self._plugin.settings.nodes), self._plugin.settings.rules.ttl
        leads = (
            f"    . leads -> one of all called {self._beat!r} (lease {ttl:g} s, {nodes} lock nodes)"
        )
        return f"    . wraps -> {name}\n{leads}"


def scheduler_class(named: Any) -> Any:
    aliases: dict[str, str] = dict(load_extension_class_names("celery.beat_schedulers"))  # type: ignore[arg-type]
    try:
        found = symbol_by_name(named, aliases=aliases)
    except (ImportError, AttributeError, ValueError) as error:
        known = ", ".join(sorted(aliases))
        raise ConfigurationError(
            f"redlock_beat_scheduler = {named!r} cannot be imported ({error}); it is a class, "
            f"'package.module:Class', or one of {known or 'no installed names'}"
        ) from error
    missing = [name for name in WRAPPED if not hasattr(found, name)]
    if not isinstance(found, type) or missing:
        lacks = f"; it has no {missing[0]}()" if missing else ""
        raise ConfigurationError(
            f"redlock_beat_scheduler = {named!r} is not a subclass of celery.beat.Scheduler{lacks}"
        )
    return found


def check_entries(app: Any) -> None:
    for name, fields in app.conf.beat_schedule.items():
        if not isinstance(fields, dict):
            continue
        options = fields.get("options") or {}
        entry = SimpleNamespace(name=name, task=fields.get("task"), options=options)
        word = overlap_of(entry, app)
        declared = options.get("overlap")
        task = app.tasks.get(entry.task)
        if declared is None or word == "allow" or takes_lock(task):
            continue
        which = "is not known to beat" if task is None else "is no RedlockTask"
        raise ConfigurationError(
            f"beat_schedule[{name!r}]: overlap={word!r} needs a task whose lock shows that it "
            f"runs, but {entry.task!r} {which}; give it base=RedlockTask (and have beat import "
            "it), or leave overlap out"
        )
