"""
The setting ``redlock_protect``: options for tasks by their names.

    {"shop.*": {...}, re.compile(...): {...}, callable: {...}}    the first that matches counts
    callable                                                      name -> options, or None

Celery's own tasks are matched by their exact names alone: whoever writes ``"*"`` means their own.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from celery_redlock.errors import ConfigurationError
from celery_redlock.settings import check_options_type, check_protect
from celery_redlock.task.declared import nearest_option
from celery_redlock.task.options import BUILT_IN, CHECKS, OPTIONS

__all__ = ["Patterns", "Rule"]

WILDCARDS = frozenset("*?[")


@dataclass(frozen=True)
class Rule:
    """Options, and their place in the setting for errors."""

    where: str
    options: Mapping[str, Any]


class Patterns:
    """The setting, checked: ConfigurationError names the pattern, the option and the fix."""

    def __init__(self, setting: Any) -> None:
        check_protect(setting)
        self.setting = setting
        is_mapping = isinstance(setting, Mapping)
        self._choose: Callable[[str], Any] | None = None if is_mapping else setting
        self._rules = [
            (pattern, matcher_of(pattern), rule_of(f"redlock_protect[{pattern!r}]", options))
            for pattern, options in (setting.items() if is_mapping else ())
        ]
        self._used: set[Any] = set()

    def rule_for(self, name: str) -> Rule | None:
        """Return the rule for the task *name*; None to leave it as it is."""
        if self._choose is not None:
            is_built_in = name.startswith(BUILT_IN)
            return None if is_built_in else rule_of("redlock_protect", called(self._choose, name))
        for pattern, matches, rule in self._rules:
            if called(matches, name):
                self._used.add(pattern)
                return rule
        return None

    def leaves(self, name: str) -> bool:
        """Return whether a pattern says to leave the task *name* as it is."""
        first = next((rule for _, matches, rule in self._rules if called(matches, name)), self)
        return first is None

    def without_effect(self, names: Collection[str]) -> list[tuple[Any, Any]]:
        """
        Return the patterns that look like a mistake, as no task is treated by them.

        Patterns with options that match none of *names*, each with None; and names of tasks, each
        with the pattern before it that matches, too.
        """
        found = []
        for pattern, matches, rule in self._rules:
            if pattern in self._used:
                continue
            if pattern in names:
                found.append((pattern, next(first for first, do, _ in self._rules if do(pattern))))
            elif rule is not None and not any(map(matches, names)):
                found.append((pattern, None))
        return found


def called(choose: Callable[[str], Any], name: str) -> Any:
    try:
        return choose(name)
    except Exception as error:  # anybody's code
        raise ConfigurationError(
            f"redlock_protect: a callable failed for {name!r}: {error!r}"
        ) from error


def matcher_of(pattern: Any) -> Callable[[str], Any]:
    if isinstance(pattern, str) and WILDCARDS.isdisjoint(pattern):
        return pattern.__eq__
    if isinstance(pattern, str):
        pattern = re.compile(fnmatch.translate(pattern))
    matches: Callable[[str], Any] = pattern if callable(pattern) else pattern.match
    return lambda name: not name.startswith(BUILT_IN) and matches(name)


def rule_of(where: str, options: Any) -> Rule | None:
    if options is None:
        return None
    check_options_type(where, options)
    for option, value in options.items():
        if option not in OPTIONS:
            near = nearest_option(str(option), 0.6)
            hint = f"did you mean {near}?" if near else f"known are {', '.join(OPTIONS)}"
            raise ConfigurationError(f"{where}: unknown option {option}; {hint}")
        if option in CHECKS and value is not None:
            CHECKS[option](f"{where}: {option}", value)
    return Rule(where, options)
