"""Checks of tasks that share a lock name, as far as their templates tell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from string import Formatter
from typing import Any, NamedTuple

from celery_redlock.errors import ConfigurationError
from celery_redlock.process.log import get_logger
from celery_redlock.task.naming.task_lock import lock_of
from celery_redlock.task.rate import Rate

__all__ = ["check_shared"]

logger = get_logger(__name__)


class Share(NamedTuple):
    """The locks that one template of one task names."""

    task: str
    template: str
    limit: int
    fence: bool


def check_shared(tasks: Iterable[Any]) -> None:
    """
    Raise ConfigurationError if tasks with one and the same template differ in ``lock_limit``.

    And warn of those that differ in the ``lock_rate`` that they have, or are both debounced.
    Names that a callable makes are not known before a call, and whether fields that are called
    otherwise have the same values neither. A task that only reports keeps nobody out.
    """
    named = sorted(tasks, key=lambda task: str(task.name))
    check_limits(named)
    check_rates(named)
    check_bursts(named)


def check_limits(tasks: Iterable[Any]) -> None:
    known: dict[str, Share] = {}
    alike: dict[str, Share] = {}
    for share in sorted(share for task in tasks for share in shares_of(task)):
        first = known.setdefault(share.template, share)
        if share.limit != first.limit:
            raise ConfigurationError(words_for(first, share))
        other = alike.setdefault(shape_of(share.template), share)
        if share.limit != other.limit:
            logger.warning("If the values are the same: %s", words_for(other, share))
        if share.fence != first.fence:
            without = first.task if share.fence else share.task
            logger.warning(
                "%s and %s share the lock %r, and %s has fence=False: a store cannot tell its "
                "writes from stale ones",
                first.task,
                share.task,
                share.template,
                without,
            )


def check_rates(tasks: Iterable[Any]) -> None:
    known: dict[str, tuple[str, Rate]] = {}
    for task in tasks:
        rates, templates = lock_of(task).options.rate, templates_of(task)
        if not templates or any(map(callable, rates)):  # a call decides how often
            continue
        for template, rate in lock_of(task).options.rates(templates, (), {}).items():
            first, its_rate = known.setdefault(template, (task.name, rate))
            if rate != its_rate:
                logger.warning(
                    "%s and %s share the starts of %r with lock_rate='%s' and lock_rate='%s', so "
                    "that neither holds; give both the same lock_rate, or names of their own",
                    first,
                    task.name,
                    template,
                    its_rate,
                    rate,
                )


def check_bursts(tasks: Iterable[Any]) -> None:
    known: dict[str, str] = {}
    for task in tasks:
        for template in templates_of(task)[:1] if lock_of(task).options.debounce else ():
            first = known.setdefault(template, task.name)
            if first != task.name:
                logger.warning(
                    "%s and %s share the lock %r and have both debounce, so that a call of the one "
                    "supersedes a call of the other; give one of them a lock_key of its own, or no "
                    "debounce",
                    first,
                    task.name,
                    template,
                )


def templates_of(task: Any) -> tuple[str, ...]:
    """Return the templates of a task's names; none for what a callable makes or only reports."""
    key = type(task).lock_key
    templates = tuple(key) if isinstance(key, (tuple, list)) else (key,)
    is_known = all(isinstance(one, str) for one in templates)
    return templates if is_known and not lock_of(task).options.only_reports else ()


def shares_of(task: Any) -> Iterator[Share]:
    options, templates = lock_of(task).options, templates_of(task)
    if not templates or any(map(callable, options.limit)):  # a call decides how many
        return
    for template, limit in options.limits(templates, (), {}).items():
        yield Share(task.name, template, limit, options.fence)


def words_for(first: Share, share: Share) -> str:
    return (
        f"{first.task} and {share.task} share the lock {share.template!r} with "
        f"lock_limit={first.limit} and lock_limit={share.limit}, so that one would run "
        "beside several of the other; give both the same lock_limit, or names of their own"
    )


def shape_of(template: str) -> str:
    """Return *template* without the names of its fields: they may have the same values."""
    return "".join(
        literal + ("" if field is None else f"{{!{conversion}:{spec}}}")
        for literal, field, spec, conversion in Formatter().parse(template)
    )
