"""
The libraries that people come from: how their tasks and settings are known.

By the names of classes and attributes alone. None of them is imported: what an app has of them
is there already, and an app that has nothing of them needs nothing of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "PEERS",
    "REDBEAT",
    "SETTINGS",
    "Peer",
    "PeerTask",
    "canonical_settings",
    "is_number",
    "is_redbeat",
    "left_over",
]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """
    A library that locks tasks.

    Attributes:
        library: Its name.
        package: The package that its class is in.
        base: The class that tasks are based on.
        attributes: Of a task, what it reads.
        keys: Where an attribute is a dict: what it reads in it.
        settings: Of an app, what it reads, or once did; in lower case.
    """

    library: str
    package: str
    base: str
    attributes: tuple[str, ...]
    keys: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


PEERS = {
    peer.library: peer
    for peer in (
        Peer(
            library="celery-once",
            package="celery_once",
            base="QueueOnce",
            attributes=("once",),
            keys=("graceful", "unlock_before_run", "keys", "timeout"),
            settings=("once", "once_redis_url", "once_default_timeout"),
        ),
        Peer(
            library="celery-singleton",
            package="celery_singleton",
            base="Singleton",
            attributes=("unique_on", "raise_on_duplicate", "lock_expiry"),
            settings=(
                "singleton_key_prefix",
                "singleton_backend_class",
                "singleton_backend_kwargs",
                "singleton_backend_url",
                "singleton_raise_on_duplicate",
                "singleton_lock_expiry",
            ),
        ),
        Peer(
            library="celery-heimdall",
            package="celery_heimdall",
            base="HeimdallTask",
            attributes=("heimdall",),
            keys=(
                "unique",
                "unique_timeout",
                "unique_raises",
                "unique_wait_for_expiry",
                "unique_lock_timeout",
                "unique_lock_blocking",
                "key",
                "lock_prefix",
                "rate_limit",
                "rate_limit_prefix",
                "times",
                "per",
            ),
            settings=(
                "heimdall_unique_timeout",
                "heimdall_unique_raises",
                "heimdall_unique_lock_timeout",
                "heimdall_unique_lock_blocking",
                "heimdall_lock_prefix",
                "heimdall_rate_limit_prefix",
            ),
        ),
        Peer(
            library="celery-once-task",
            package="celery_once_task",
            base="OnceTask",
            attributes=("queue_lock", "running_lock", "queue_lock_timeout", "running_lock_timeout"),
            settings=("once_queue_lock_timeout", "once_running_lock_timeout"),
        ),
    )
}
#: Of a beat; RedBeat reads others too, for its schedule, which stays where it is.
REDBEAT = ("redbeat_lock_key", "redbeat_lock_timeout")
REDBEAT_SCHEDULE = (
    "redbeat_redis_url",
    "redbeat_key_prefix",
    "redbeat_redis_use_ssl",
    "redbeat_redis_options",
)
SETTINGS = (*REDBEAT, *REDBEAT_SCHEDULE, *(name for p in PEERS.values() for name in p.settings))
#: Attributes that are numbers of seconds; those that are no dicts either are yes or no.
NUMBERS = ("lock_expiry", "queue_lock_timeout", "running_lock_timeout")


@dataclass(frozen=True, kw_only=True)
class PeerTask:
    """
    A task that another library locks, or has options of one.

    Attributes:
        name: Its name.
        library: Which one.
        is_based: Whether it is based on the library's class.
        is_ours: Whether it is based on `RedlockTask`.
        options: Attribute -> value, of those that the library reads.
        own: Our options that it says itself.
        acks_late: Whether its message is acknowledged after it ran.
    """

    name: str
    library: str
    is_based: bool
    is_ours: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    own: frozenset[str] = frozenset()
    acks_late: bool = False


def left_over(peer: Peer, values: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the options of *peer* on a task that is not based on its class.

    An attribute that happens to be called so, and is none of theirs, is not among them; nor is
    ``unique_on``, which is an option of ours as well.

    Args:
        peer: The library.
        values: Attribute -> value, None where there is none.
    """
    return {
        name: value
        for name, value in values.items()
        if name != "unique_on" and is_theirs(peer, name, value)
    }


def is_theirs(peer: Peer, name: str, value: Any) -> bool:
    """Return whether the attribute *name* of *peer* can have this *value*."""
    if peer.keys:
        return is_dict_of(value, peer.keys)
    return is_number(value) if name in NUMBERS else isinstance(value, bool)


def is_dict_of(value: Any, keys: tuple[str, ...]) -> bool:
    """Return whether *value* is a dict with *keys* and no others."""
    return isinstance(value, Mapping) and bool(value) and set(value) <= set(keys)


def is_number(value: Any) -> bool:
    """Return whether *value* is a number of seconds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def canonical_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return what is theirs of the settings of an app, by names in lower case.

    Args:
        given: All settings, by their names without a namespace.
    """
    found = {name.lower(): value for name, value in given.items() if name.lower() in SETTINGS}
    if not is_dict_of(found.get("once"), ("backend", "settings")):
        found.pop("once", None)
    return found


def is_redbeat(scheduler: Any) -> bool:
    """Return whether *scheduler*, a class or the name of one, is RedBeat's or made from it."""
    if isinstance(scheduler, str):
        return scheduler.replace(":", ".").partition(".")[0] == "redbeat"
    bases = getattr(scheduler, "__mro__", ())
    return any(base.__module__.partition(".")[0] == "redbeat" for base in bases)
