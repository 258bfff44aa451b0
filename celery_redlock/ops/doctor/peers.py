"""
The libraries that people come from: a table of their options, and of what is written instead.

They are known by the names of classes and attributes alone. None of them is imported: what an app
has of them is there already, and an app that has nothing of them needs nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from celery_redlock.task.options import UNIQUE_FOR

__all__ = [
    "NODES",
    "PEERS",
    "REDBEAT",
    "REDBEAT_SCHEDULE",
    "SETTINGS",
    "UNIQUE_FOR_ON_TASKS",
    "Meaning",
    "Peer",
]

#: What the value of an option means, when it is on and when it is off, or in any case: ``{value}``
#: is the value, ``{names}`` the arguments that it names, ``{starts}`` when a key ends that depends
#: on ``acks_late``.
Meaning: TypeAlias = str | tuple[str, str]
#: Option -> what the task, its app or the default says, or None; and the task's ``is_based`` and
#: ``acks_late``.
Values: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """
    A library that locks tasks.

    Attributes:
        package: The package that its class is in.
        base: The class that tasks are based on.
        in_dict: The attribute of a task that has its options in a dict; "" if each is an attribute.
        options: Option -> what its value means.
        prefix: Of the setting by which an app says an option for all its tasks.
        defaults: What an option is that neither says, where that matters.
        write: Our options with their values, of which None is not written; empty for a task that
            has no lock of theirs.
        besides: What else to know -> of which tasks.
        settings: Of an app, what it reads, or once did, in lower case -> what to do instead.
    """

    package: str
    base: str
    in_dict: str = ""
    options: Mapping[str, Meaning]
    prefix: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    write: Callable[[Values], Mapping[str, Any]]
    besides: Mapping[str, Callable[[Values], Any]]
    settings: Mapping[str, Meaning]

    @property
    def attributes(self) -> tuple[str, ...]:
        """What it reads of a task."""
        return (self.in_dict,) if self.in_dict else tuple(self.options)

    @property
    def keys(self) -> tuple[str, ...]:
        """What it reads in the attribute that is a dict."""
        return tuple(self.options) if self.in_dict else ()


ENDS = "the key ends {value} s after the publish at the latest"
KEY_OF = "the key is made of {names}"
HAS_RUN = "the key ends when the task has run"
NOT_ALONE = "nothing keeps two from running"

NEVER_EXPIRES = (
    f"Its key never expires; our marker of a message that waits does after {UNIQUE_FOR:g} s: set "
    "unique_for if messages wait for longer."
)
NO_RATES = (
    "Rate limits have no counterpart: celery-redlock does not limit rates, and Celery's own "
    "rate_limit holds for one worker."
)

NODES = "Servers of locks are redlock_nodes: three or five of them."
UNIQUE_FOR_ON_TASKS = "Write unique_for={value} on the tasks."
ON_DUPLICATE = (
    "Write on_duplicate='fail' on the tasks.",
    "Write on_duplicate='join' on the tasks.",
)
OUR_PREFIX = "Write redlock_prefix = {value}."
NO_WAIT = "There is no counterpart: a publish does not wait."

PEERS = {
    "celery-once": Peer(
        package="celery_once",
        base="QueueOnce",
        in_dict="once",
        options={
            "graceful": (
                "a duplicate is dropped without an error",
                "a duplicate raises AlreadyQueued",
            ),
            "unlock_before_run": (f"the key ends when the task starts, and {NOT_ALONE}", HAS_RUN),
            "keys": KEY_OF,
            "timeout": ENDS,
        },
        prefix="once_",
        write=lambda it: {
            "unique_on": it["keys"],
            "unique_until": "started" if it["unlock_before_run"] else "finished",
            "unique_for": it["timeout"],
            "on_duplicate": "join" if it["graceful"] else "fail",
            "on_conflict": "reschedule" if it["unlock_before_run"] else None,
        },
        besides={
            "The second run waits for the first one to end.": lambda it: it["unlock_before_run"],
        },
        settings={
            "once": NODES,
            "once_redis_url": NODES,
            "once_default_timeout": UNIQUE_FOR_ON_TASKS,
        },
    ),
    "celery-singleton": Peer(
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
        prefix="singleton_",
        write=lambda it: {
            "unique_on": it["unique_on"] or None,
            "unique_until": "finished",
            "unique_for": it["lock_expiry"],
            "on_duplicate": "fail" if it["raise_on_duplicate"] else "join",
        },
        besides={NEVER_EXPIRES: lambda it: it["is_based"] and it["lock_expiry"] is None},
        settings={
            "singleton_key_prefix": OUR_PREFIX,
            "singleton_backend_class": NODES,
            "singleton_backend_kwargs": f"{NODES} Options of a connection stand in its URL.",
            "singleton_backend_url": NODES,
            "singleton_raise_on_duplicate": ON_DUPLICATE,
            "singleton_lock_expiry": UNIQUE_FOR_ON_TASKS,
        },
    ),
    "celery-heimdall": Peer(
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
            "times": "at most {value} runs in 'per' seconds",
            "per": "the seconds in which it runs at most 'times' times: {value}",
        },
        prefix="heimdall_",
        defaults={"unique_timeout": 3600},
        write=lambda it: (
            {}
            if it["unique"] is None
            else {
                "lock_key": it["key"],
                "unique_until": "expired" if it["unique_wait_for_expiry"] else "finished",
                "unique_for": it["unique_timeout"],
                "on_duplicate": "fail" if it["unique_raises"] else "join",
            }
        ),
        besides={
            NO_RATES: lambda it: (
                it["rate_limit"] is not None or None not in (it["times"], it["per"])
            ),
            "KEY stands for the function that is 'key' now.": lambda it: (
                it["unique"] is not None and callable(it["key"])
            ),
        },
        settings={
            "heimdall_unique_timeout": UNIQUE_FOR_ON_TASKS,
            "heimdall_unique_raises": ON_DUPLICATE,
            "heimdall_unique_lock_timeout": NO_WAIT,
            "heimdall_unique_lock_blocking": NO_WAIT,
            "heimdall_lock_prefix": OUR_PREFIX,
            "heimdall_rate_limit_prefix": (
                "There is no counterpart: celery-redlock does not limit rates."
            ),
        },
    ),
    "celery-once-task": Peer(
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
        prefix="once_",
        defaults={"queue_lock": True, "running_lock": True},
        write=lambda it: {
            **(
                {
                    "unique_until": "finished" if it["acks_late"] else "started",
                    "unique_for": it["queue_lock_timeout"],
                    "on_duplicate": "join",
                    "on_conflict": "reschedule",
                }
                if it["queue_lock"]
                else {}
            ),
            **({"on_conflict": "skip"} if it["running_lock"] else {}),
        },
        besides={
            "Ours always has a lock while it runs: a second run comes later.": lambda it: (
                it["queue_lock"] and not it["running_lock"]
            ),
        },
        settings={
            "once_queue_lock_timeout": UNIQUE_FOR_ON_TASKS,
            "once_running_lock_timeout": (
                "There is no counterpart: a lease is renewed for as long as the task runs, and "
                "lock_ttl is how long a killed worker blocks it."
            ),
        },
    ),
}
#: Of RedBeat's lock -> which of ours has its place.
REDBEAT = {
    "redbeat_lock_key": "redlock_beat_name tells beats apart that share nodes.",
    "redbeat_lock_timeout": "redlock_ttl and 2 s is how long a dead leader is waited for.",
}
#: Of its schedule, which stays where it is.
REDBEAT_SCHEDULE = (
    "redbeat_redis_url",
    "redbeat_key_prefix",
    "redbeat_redis_use_ssl",
    "redbeat_redis_options",
)
SETTINGS = (*REDBEAT, *REDBEAT_SCHEDULE, *(name for p in PEERS.values() for name in p.settings))
