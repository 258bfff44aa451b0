"""
The libraries that people come from: how their tasks and settings are known.

By the names of classes and attributes alone. None of them is imported: what an app has of them
is there already, and an app that has nothing of them needs nothing of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

__all__ = [
    "NODES",
    "PEERS",
    "REDBEAT",
    "SETTINGS",
    "UNIQUE_FOR",
    "Meaning",
    "Peer",
    "PeerTask",
    "canonical_settings",
    "is_number",
    "is_redbeat",
    "left_over",
]


#: What the value of an option means, when it is on and when it is off, or in any case: ``{value}``
#: is the value, ``{names}`` the arguments that it names, ``{starts}`` when a key ends that depends
#: on ``acks_late``.
Meaning: TypeAlias = str | tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """
    A library that locks tasks.

    Attributes:
        library: Its name.
        package: The package that its class is in.
        base: The class that tasks are based on.
        options: Option -> what its value means.
        in_dict: The attribute of a task that has them all in a dict; "" if each is an attribute.
        settings: Of an app, what it reads, or once did, in lower case -> what to do instead.
    """

    library: str
    package: str
    base: str
    options: Mapping[str, Meaning]
    in_dict: str = ""
    settings: Mapping[str, Meaning]

    @property
    def attributes(self) -> tuple[str, ...]:
        """What it reads of a task."""
        return (self.in_dict,) if self.in_dict else tuple(self.options)

    @property
    def keys(self) -> tuple[str, ...]:
        """What it reads in the attribute that is a dict."""
        return tuple(self.options) if self.in_dict else ()


NODES = "Servers of locks are redlock_nodes: three or five of them."
UNIQUE_FOR = "Write unique_for={value} on the tasks."
ON_DUPLICATE = (
    "Write on_duplicate='fail' on the tasks.",
    "Write on_duplicate='join' on the tasks.",
)
OUR_PREFIX = "Write redlock_prefix = {value}."
NO_WAIT = "There is no counterpart: a publish does not wait."
ENDS = "the key ends {value} s after the publish at the latest"
KEY_OF = "the key is made of {names}"
HAS_RUN = "the key ends when the task has run"
NOT_ALONE = "nothing keeps two from running"

PEERS = {
    peer.library: peer
    for peer in (
        Peer(
            library="celery-once",
            package="celery_once",
            base="QueueOnce",
            in_dict="once",
            options={
                "graceful": (
                    "a duplicate is dropped without an error",
                    "a duplicate raises AlreadyQueued",
                ),
                "unlock_before_run": (
                    f"the key ends when the task starts, and {NOT_ALONE}",
                    HAS_RUN,
                ),
                "keys": KEY_OF,
                "timeout": ENDS,
            },
            settings={"once": NODES, "once_redis_url": NODES, "once_default_timeout": UNIQUE_FOR},
        ),
        Peer(
            library="celery-singleton",
            package="celery_singleton",
            base="Singleton",
            options={
                "unique_on": (
                    f"{KEY_OF}; our option of this name means the same",
                    "the key is made of all arguments; ours would be made of none, so leave it out",
                ),
                "raise_on_duplicate": (
                    "a duplicate raises DuplicateTaskError",
                    "a duplicate gets the first's result",
                ),
                "lock_expiry": ENDS,
            },
            settings={
                "singleton_key_prefix": OUR_PREFIX,
                "singleton_backend_class": NODES,
                "singleton_backend_kwargs": f"{NODES} Options of a connection stand in its URL.",
                "singleton_backend_url": NODES,
                "singleton_raise_on_duplicate": ON_DUPLICATE,
                "singleton_lock_expiry": UNIQUE_FOR,
            },
        ),
        Peer(
            library="celery-heimdall",
            package="celery_heimdall",
            base="HeimdallTask",
            in_dict="heimdall",
            options={
                "unique": (
                    "only one may be queued or running",
                    "it counts as on, because celery-heimdall only looks whether the word is there",
                ),
                "unique_timeout": ENDS,
                "unique_raises": (
                    "a duplicate raises AlreadyQueuedError",
                    "a duplicate gets the first's result",
                ),
                "unique_wait_for_expiry": (
                    "the key stands until unique_timeout, also when the task has run",
                    HAS_RUN,
                ),
                "unique_lock_timeout": (
                    "a publish waits up to {value} s for the key; ours does not wait"
                ),
                "unique_lock_blocking": (
                    "a publish waits for the key; ours does not wait",
                    "a publish does not wait for the key; ours does not wait",
                ),
                "key": "it is the key, or makes it",
                "lock_prefix": "the key begins with it; ours begin with redlock_prefix",
                "rate_limit": "it runs only so often",
                "rate_limit_prefix": "keys of the rate limit begin with it",
                "times": "it runs {value} times in 'per' seconds at most",
                "per": "the seconds in which it runs 'times' times at most: {value}",
            },
            settings={
                "heimdall_unique_timeout": UNIQUE_FOR,
                "heimdall_unique_raises": ON_DUPLICATE,
                "heimdall_unique_lock_timeout": NO_WAIT,
                "heimdall_unique_lock_blocking": NO_WAIT,
                "heimdall_lock_prefix": OUR_PREFIX,
                "heimdall_rate_limit_prefix": (
                    "There is no counterpart: celery-redlock does not limit rates."
                ),
            },
        ),
        Peer(
            library="celery-once-task",
            package="celery_once_task",
            base="OnceTask",
            options={
                "queue_lock": (
                    "a duplicate is not published until the task {starts}",
                    "duplicates are published",
                ),
                "running_lock": ("a second run is rejected", NOT_ALONE),
                "queue_lock_timeout": "the first key ends so many seconds after the publish",
                "running_lock_timeout": "the second key ends so many seconds after the start",
            },
            settings={
                "once_queue_lock_timeout": UNIQUE_FOR,
                "once_running_lock_timeout": (
                    "There is no counterpart: a lease is renewed for as long as the task runs, and "
                    "lock_ttl is how long a killed worker blocks it."
                ),
            },
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
