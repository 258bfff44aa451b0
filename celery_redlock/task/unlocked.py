"""
Options of ours on tasks that take no lock: somebody has forgotten a base class.

Celery makes an attribute of any option that it does not know, so nothing else tells. Imports no
more than it needs: every worker looks, also one without our tasks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from celery import Task

from celery_redlock.errors import ConfigurationError
from celery_redlock.process.log import get_logger
from celery_redlock.task.option_names import BUILT_IN, OPTIONS

__all__ = ["Unlocked", "check_at_start", "of_libraries", "unlocked_tasks"]

logger = get_logger(__name__)

#: Where tasks under a lock come from; a worker that has none does without that module.
OURS = "celery_redlock.task.base"
#: How many further tasks are named.
NAMED = 5
INSTALLED = frozenset({"site-packages", "dist-packages"})


class Unlocked(NamedTuple):
    """A task that takes no lock and has options of ours; *library* owns them, if any does."""

    task: str
    options: tuple[str, ...]
    library: str = ""

    @property
    def what(self) -> str:
        has = "has" if len(self.options) == 1 else "have"
        return f"{' and '.join(self.options)} {has} no effect, as the task takes no lock"

    @property
    def fix(self) -> str:
        return (
            "declare it with base=RedlockTask, or name it in redlock_protect "
            f"({{{self.task!r}: None}} if this is meant for something else)"
        )


def check_at_start(app: Any) -> None:
    try:
        check_unlocked(app)
    except ConfigurationError as error:
        logger.critical("celery-redlock: %s", error)
        raise


def check_unlocked(app: Any) -> None:
    """Raise ConfigurationError if a base class was forgotten; log what another library owns."""
    found = list(unlocked_tasks(app))
    forgotten = [one for one in found if not one.library]
    if forgotten:
        first, *others = forgotten
        names = ", ".join(one.task for one in others[:NAMED])
        more = f". Likewise {names}{', ...' if others[NAMED:] else ''}" if others else ""
        raise ConfigurationError(f"{first.task}: {first.what}; {first.fix}{more}")
    if OURS in sys.modules:
        for library, (options, _) in of_libraries(found).items():
            logger.warning(
                "%s has %s of its own: its tasks take no lock of celery-redlock, unless they have "
                "base=RedlockTask, too, or redlock_protect names them",
                library,
                " and ".join(options),
            )


def of_libraries(found: Iterable[Unlocked]) -> dict[str, tuple[list[str], list[str]]]:
    """Return the libraries that own options: which, and the tasks that have them."""
    owned: dict[str, tuple[list[str], list[str]]] = {}
    for one in found:
        if one.library:
            options, tasks = owned.setdefault(one.library, ([], []))
            options += [option for option in one.options if option not in options]
            tasks.append(one.task)
    return owned


def unlocked_tasks(app: Any) -> Iterator[Unlocked]:
    patterns, for_all = getattr(app.tasks, "patterns", None), annotated(app)
    for name, task in sorted(app.tasks.items()):
        classes = [cls for cls in type(task).__mro__ if not is_celerys(cls)]
        is_left = patterns is not None and patterns.leaves(name)  # by redlock_protect
        if name.startswith(BUILT_IN) or is_left or any(cls.__module__ == OURS for cls in classes):
            continue
        of_library: dict[str, list[str]] = {}
        for option in declared(classes, for_all):
            # The first class that had it says what it is, whoever gives it a value.
            owner = next(cls for cls in reversed(classes) if option in vars(cls))
            library = owner.__module__.partition(".")[0] if is_installed(owner, app) else ""
            of_library.setdefault(library, []).append(option)
        for library, options in of_library.items():
            yield Unlocked(name, tuple(options), library)


def declared(classes: list[type], besides: frozenset[str]) -> Iterator[str]:
    for option in OPTIONS:
        values = [vars(cls)[option] for cls in classes if option in vars(cls)]
        if values and values[0] is not None and option not in besides:
            yield option


def annotated(app: Any) -> frozenset[str]:
    """Return what ``task_annotations`` gives to all tasks: it is meant for those with a lock."""
    return frozenset(name for one in app.annotations for name in one.annotate_any() or ())


def is_celerys(cls: type) -> bool:
    return cls is object or cls in Task.__mro__ or cls.__module__.startswith("celery.")


def is_installed(cls: type, app: Any) -> bool:
    """Return whether *cls* is of a package that was installed, and is not the app's own."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    is_own = cls.__module__.partition(".")[0] == str(app.main).partition(".")[0]
    return not is_own and not INSTALLED.isdisjoint(Path(file).parts)
