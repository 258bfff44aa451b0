"""
The ``redlock_*`` settings, read from any mapping and checked all at once.

Knows nothing of Celery: whoever owns the configuration passes the settings by their
plain names (`celery_redlock.configuration` does).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.nodes.cluster import with_hash_tag
from celery_redlock.lock.nodes.credentials import with_credentials
from celery_redlock.lock.nodes.urls import rules_for
from celery_redlock.lock.rules import LONGEST_PREFIX, Rules, in_seconds, positive

__all__ = [
    "KNOWN",
    "MODES",
    "OBSERVERS",
    "PREFIX",
    "Settings",
    "check_key_headers",
    "check_options_type",
    "check_protect",
    "deliveries",
    "one_of",
    "report_prefix",
]

PREFIX = "redlock_"
#: Names of `Rules` that are settings; the rest are constants of the protocol.
RULES = (
    "ttl",
    "wait",
    "max_ttl",
    "node_timeout",
    "drift_factor",
    "restart_guard",
    "fence",
    "prefix",
)
#: Who receives events unless the app says otherwise.
OBSERVERS = ("logging", "journal", "celery")
#: Whether locks are enforced, or what they would have refused is only reported.
MODES = ("enforce", "report")
#: What follows the prefix in the keys of tasks that only report.
OF_REPORTS = ":report"
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
#: A secret that a person can still type, and a program cannot guess.
SHORTEST_WEB_TOKEN = 16
#: Most starts of a message that can be counted: each is a key on every node.
MOST_DELIVERIES = 1000


@dataclass(frozen=True, kw_only=True)
class Settings:
    """
    The settings of an app, which a task's options override.

    Attributes:
        nodes: URLs or Sentinel services of the lock nodes, with user and password; an odd number.
        rules: The numbers of the lock itself.
        username: For all nodes that have none of their own; None for the default user.
        mode: ``"enforce"``, or ``"report"``: every body runs, every message is published, and an
            event says what would have been refused.
        on_conflict: Policy, or the word for one, when another execution holds the key.
        on_unavailable: The same when no quorum could decide.
        dedup_ttl: How long a finished execution is remembered [s, >= 0; 0 is off].
        max_deliveries: How often a message may be started [1 to 1000]; None for any number.
        beat_scheduler: Class or name of the scheduler that `celery_redlock.beat` wraps.
        beat_starting_deadline: How old a slot may be when it is published [s, > 0]; None for the
            newest of any age, and all that are not older than a takeover may take.
        beat_name: What the schedulers that stand in for each other are called; None for the
            name of the app.
        observers: Who receives events: words (``"logging"``, ``"journal"``, ``"celery"``,
            ``"prometheus"``, ``"otel"``), callables, or names like ``"shop.alerts:page"``.
        web_token: What the web page asks for before it releases a lock; None for never.
        protect: Pattern of task names -> options of these tasks, whatever their base; or a callable
            name -> options, or None. What `celery_redlock.task.naming.patterns` makes of it.
        key_headers: Headers of a message that are part of every default lock name.
        is_fallback: Whether *nodes* is the app's result backend or broker, as there is no setting.

    Raises:
        ConfigurationError: A value is out of range; names the setting and the fix.
    """

    nodes: Sequence[Any] = field(repr=False)  # they have passwords
    rules: Rules
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    mode: str = "enforce"
    on_conflict: Any = "skip"
    on_unavailable: Any = "reschedule"
    on_lock_lost: str = "abort"
    dedup_ttl: float = 3600.0
    max_deliveries: int | None = None
    beat_scheduler: Any = "celery.beat:PersistentScheduler"
    beat_starting_deadline: float | None = None
    beat_name: str | None = None
    observers: Sequence[Any] = OBSERVERS
    skip_log_level: str = "INFO"
    web_token: str | None = field(default=None, repr=False)
    protect: Any = None
    key_headers: tuple[str, ...] = ()
    is_fallback: bool = False

    def __post_init__(self) -> None:
        nodes = with_credentials(self.nodes, self.username, self.password)
        object.__setattr__(self, "nodes", nodes)  # as frozen dataclasses set their fields
        object.__setattr__(self, "rules", with_hash_tag(self.rules, nodes))
        dedup_ttl = in_seconds("redlock_dedup_ttl", self.dedup_ttl)
        object.__setattr__(self, "dedup_ttl", dedup_ttl)
        deliveries("redlock_max_deliveries", self.max_deliveries)
        one_of("redlock_mode", self.mode, MODES)
        one_of("redlock_on_lock_lost", self.on_lock_lost, ("abort", "warn"))
        if self.beat_starting_deadline is not None:
            deadline = positive("redlock_beat_starting_deadline", self.beat_starting_deadline)
            object.__setattr__(self, "beat_starting_deadline", deadline)
        if self.beat_name is not None and not (isinstance(self.beat_name, str) and self.beat_name):
            raise ConfigurationError(
                f"redlock_beat_name must be a name, or None for the app's; got {self.beat_name!r}"
            )
        check_observers(self.observers)
        one_of("redlock_skip_log_level", self.skip_log_level, LOG_LEVELS)
        check_web_token(self.web_token)
        if self.protect is not None:
            check_protect(self.protect)
        object.__setattr__(self, "key_headers", check_key_headers(self.key_headers))

    @classmethod
    def from_conf(cls, conf: Mapping[str, Any], fallback: str | None = None) -> Settings:
        """
        Return the settings in *conf*.

        Args:
            conf: Setting name with the prefix -> value; nothing else.
            fallback: URL of the one node to use when ``redlock_nodes`` is not set.

        Raises:
            ConfigurationError: A setting is unknown, out of range, or ``redlock_nodes`` is
                missing without a *fallback*.
        """
        given = {known(name): value for name, value in conf.items()}
        nodes = given.pop("nodes", None)
        is_fallback = nodes is None
        if is_fallback and fallback is None:
            raise ConfigurationError(
                "redlock_nodes is not set, and neither the result backend nor the broker is Redis, "
                "nor is the result backend a PostgreSQL; set it to the URLs of the lock nodes, "
                'e.g. ["redis://lock-1/0", "redis://lock-2/0", "redis://lock-3/0"], or '
                '["postgresql://user@db/app"]'
            )
        nodes = [fallback] if is_fallback else nodes
        of_lock = {name: value for name, value in given.items() if name in RULES}
        rules = rules_for(nodes, **of_lock)
        own = {name: value for name, value in given.items() if name not in RULES}
        return cls(
            nodes=nodes,
            rules=rules,
            is_fallback=is_fallback,
            **own,
        )

    def default(self, name: str) -> Any:
        """Return the setting *name*, given without the prefix."""
        return getattr(self.rules if name in RULES else self, name)


OWN = {field.name for field in fields(Settings)} - {"rules", "is_fallback"}
#: All settings without the prefix.
KNOWN = tuple(sorted({*RULES, *OWN}))


def known(setting: str) -> str:
    """Return *setting* without the prefix; raise ConfigurationError if there is no such name."""
    name = setting.removeprefix(PREFIX)
    if name in KNOWN:
        return name
    near = difflib.get_close_matches(name, KNOWN, 1)
    hint = f"; did you mean {PREFIX}{near[0]}?" if near else f"; known are {', '.join(KNOWN)}"
    raise ConfigurationError(f"unknown setting {setting}{hint}")


def one_of(name: str, value: object, words: Sequence[str]) -> str:
    """Return *value* if it is one of *words*; raise ConfigurationError with the nearest one."""
    if isinstance(value, str) and value in words:
        return value
    near = difflib.get_close_matches(str(value), words, 1)
    hint = (
        f"did you mean {near[0]!r}?" if near else f"it must be one of {', '.join(map(repr, words))}"
    )
    raise ConfigurationError(f"{name} = {value!r}: {hint}")


def deliveries(where: str, most: Any) -> int | None:
    """Return *most* if so many can be counted; raise ConfigurationError about *where* if not."""
    if most is None or (type(most) is int and 1 <= most <= MOST_DELIVERIES):
        return most
    raise ConfigurationError(
        f"{where} must be a whole number from 1 to {MOST_DELIVERIES}, or None, got {most!r}"
    )


def report_prefix(prefix: str) -> str:
    """Return what the keys of tasks in report mode begin with, by the setting of this name."""
    longest = LONGEST_PREFIX - len(OF_REPORTS)
    if len(prefix.encode()) > longest:
        raise ConfigurationError(
            f"redlock_prefix must be at most {longest} bytes for tasks in report mode, whose keys "
            f"begin with {prefix + OF_REPORTS!r}; shorten it"
        )
    return prefix + OF_REPORTS


def check_observers(observers: object) -> None:
    if isinstance(observers, str) or not isinstance(observers, Sequence):
        raise ConfigurationError(
            f"redlock_observers must be a list like {list(OBSERVERS)!r}, "
            f"got {type(observers).__name__}"
        )
    for observer in observers:
        if not callable(observer) and not (isinstance(observer, str) and observer):
            raise ConfigurationError(
                "redlock_observers: an observer is a word, a name like 'shop.alerts:page' or a "
                f"callable, got {observer!r}"
            )


def check_web_token(token: object) -> None:
    """Raise ConfigurationError unless *token* is None or long enough; does not repeat it."""
    if token is None or (isinstance(token, str) and len(token) >= SHORTEST_WEB_TOKEN):
        return
    raise ConfigurationError(
        f"redlock_web_token must be a string of at least {SHORTEST_WEB_TOKEN} characters; make one "
        "with: python -c 'import secrets; print(secrets.token_urlsafe())'"
    )


def check_key_headers(names: object) -> tuple[str, ...]:
    """Return the setting ``redlock_key_headers``, *names*, sorted; raise ConfigurationError."""
    if isinstance(names, Sequence) and not isinstance(names, str):
        given = [it for it in names if isinstance(it, str) and it]
        if len(given) == len(names):
            return tuple(sorted(set(given)))
    raise ConfigurationError(
        f"redlock_key_headers must be a list of names, like ['tenant']; got {names!r}"
    )


def check_protect(protect: object) -> None:
    """Raise ConfigurationError unless *protect* maps patterns to options, or can be called."""
    if not isinstance(protect, Mapping):
        if callable(protect):
            return
        raise ConfigurationError(
            "redlock_protect must map patterns of task names to options, like "
            "{'vendor.*': {'unique_on': ['order_id']}}, or be a callable name -> options; "
            f"got {type(protect).__name__}"
        )
    for pattern, options in protect.items():
        text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
        if not (callable(pattern) or (isinstance(text, str) and text)):
            raise ConfigurationError(
                "redlock_protect: a pattern is a task's name, a glob like 'vendor.*', a compiled "
                f"pattern of str or a callable name -> bool, got {pattern!r}"
            )
        if options is not None:
            check_options_type(f"redlock_protect[{pattern!r}]", options)


def check_options_type(where: str, options: object) -> None:
    """Raise ConfigurationError, which begins with *where*, unless *options* is a mapping."""
    if not isinstance(options, Mapping):
        raise ConfigurationError(
            f"{where} must be options like {{'unique_on': ['order_id']}}, {{}} for the defaults, "
            f"or None to leave such tasks as they are; got {type(options).__name__}"
        )
