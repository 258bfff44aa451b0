"""What an option of another library means, and what is to be written for it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery_redlock.ops.doctor.peers import PeerTask, is_number
from celery_redlock.ops.text import one_line
from celery_redlock.task.options import LONGEST_UNIQUE_FOR, UNIQUE_FOR

__all__ = ["Advice", "Verbatim", "advise", "shown"]

#: So much is shown of a value.
SHOWN = 60


class Verbatim(str):
    """Text that stands in code as it is."""

    __slots__ = ()

    __repr__ = str.__str__


@dataclass
class Advice:
    """
    What there is to say of a task's options.

    Attributes:
        meant: A sentence for each option of theirs.
        write: Our options, and their values.
        besides: What else to know.
        is_lock: Whether the task has a lock of theirs at all.
    """

    meant: list[str] = field(default_factory=list)
    write: dict[str, Any] = field(default_factory=dict)
    besides: list[str] = field(default_factory=list)
    is_lock: bool = True

    def unique_for(self, seconds: Any) -> None:
        """Have it written for how long a key stood by itself, where that is not the default."""
        if not is_number(seconds) or not 0 < seconds <= LONGEST_UNIQUE_FOR:
            return
        if seconds != UNIQUE_FOR or self.write.get("unique_until") == "expired":
            self.write["unique_for"] = seconds


def shown(value: Any) -> str:
    """Return *value* as it may stand in a sentence."""
    if callable(value):
        return "a function"
    is_plain = isinstance(value, (str, int, float, list, tuple, set, dict, type(None)))
    try:
        text = repr(value) if is_plain else ""
    except Exception:  # noqa: BLE001  of something in a list, say
        text = ""
    is_told = text and "://" not in text  # a URL may have a password
    return one_line(text, SHOWN) if is_told else f"{type(value).__name__}(...)"


def advise(task: PeerTask, settings: Mapping[str, Any]) -> Advice:
    """
    Return what to write instead of the options of *task*.

    Args:
        task: One that has options of a library.
        settings: Of that library, as of `canonical_settings`.
    """
    return TRANSLATE[task.library](task, settings)


def celery_once(task: PeerTask, settings: Mapping[str, Any]) -> Advice:
    """Return advice for ``once={...}``."""
    once, advice = as_dict(task.options.get("once")), Advice()
    is_graceful, is_early = bool(once.get("graceful")), bool(once.get("unlock_before_run"))
    meanings: dict[str, Callable[[Any], str]] = {
        "graceful": lambda on: (
            "a duplicate is dropped without an error" if on else "a duplicate raises AlreadyQueued"
        ),
        "unlock_before_run": lambda on: (
            "the key ends when the task starts, and nothing keeps two from running"
            if on
            else "the key ends when the task has run"
        ),
        "keys": lambda names: f"the key is made of {listed(names)}",
        "timeout": lambda seconds: f"the key ends {seconds} s after the publish at the latest",
    }
    explain(advice, once, meanings, "celery-once")
    if once.get("keys") is not None:
        advice.write["unique_on"] = names_in(once["keys"])
    advice.write["unique_until"] = "started" if is_early else "finished"
    advice.unique_for(once.get("timeout", default_timeout(settings)))
    advice.write["on_duplicate"] = "join" if is_graceful else "fail"
    if is_early:
        advice.write["on_conflict"] = "reschedule"
        advice.besides.append("The second run waits for the first one to end.")
    return advice


def default_timeout(settings: Mapping[str, Any]) -> Any:
    """Return how long a key of celery-once lives where the task does not say [s]."""
    return as_dict(as_dict(settings.get("once")).get("settings")).get("default_timeout", 3600)


def celery_singleton(task: PeerTask, settings: Mapping[str, Any]) -> Advice:
    """Return advice for the attributes of a Singleton."""
    options, advice = {k: v for k, v in task.options.items() if v is not None}, Advice()
    names = options.get("unique_on")
    meanings: dict[str, Callable[[Any], str]] = {
        "unique_on": lambda names: (
            f"the key is made of {listed(names)}; our option of this name means the same"
            if names
            else "the key is made of all arguments; ours would be made of none, so leave it out"
        ),
        "raise_on_duplicate": lambda on: (
            "a duplicate raises DuplicateTaskError" if on else "a duplicate gets the first's result"
        ),
        "lock_expiry": lambda seconds: f"the key ends {seconds} s after the publish at the latest",
    }
    explain(advice, options, meanings, "celery-singleton")
    if names and task.is_based:
        advice.write["unique_on"] = names_in(names)
    advice.write["unique_until"] = "finished"
    expiry = options.get("lock_expiry", settings.get("singleton_lock_expiry"))
    advice.unique_for(expiry)
    raises = options.get("raise_on_duplicate", settings.get("singleton_raise_on_duplicate"))
    advice.write["on_duplicate"] = "fail" if raises else "join"
    if expiry is None and task.is_based:
        advice.besides.append(
            f"Its key never expires; our marker of a message that waits does after {UNIQUE_FOR:g} "
            "s: set unique_for if messages wait for longer."
        )
    return advice


def celery_heimdall(task: PeerTask, settings: Mapping[str, Any]) -> Advice:
    """Return advice for ``heimdall={...}``."""
    options = as_dict(task.options.get("heimdall"))
    # The library only looks whether the word is there.
    advice = Advice(is_lock="unique" in options)
    explain(advice, options, HEIMDALL, "celery-heimdall")
    if "rate_limit" in options or ("times" in options and "per" in options):
        advice.besides.append(
            "Rate limits have no counterpart: celery-redlock does not limit rates, and Celery's "
            "own rate_limit holds for one worker."
        )
    if not advice.is_lock:
        return advice

    def chosen(option: str, default: Any) -> Any:
        own = options.get(option)
        return settings.get(f"heimdall_{option}", default) if own is None else own

    if "key" in options:
        advice.write["lock_key"] = heimdall_key(options["key"])
    keeps = bool(options.get("unique_wait_for_expiry"))
    advice.write["unique_until"] = "expired" if keeps else "finished"
    advice.unique_for(chosen("unique_timeout", 3600))
    advice.write["on_duplicate"] = "fail" if chosen("unique_raises", False) else "join"
    if callable(options.get("key")):
        advice.besides.append("KEY stands for the function that is 'key' now.")
    return advice


HEIMDALL: dict[str, Callable[[Any], str]] = {
    "unique": lambda on: (
        "only one may be queued or running"
        if on
        else "it counts as on, because celery-heimdall only looks whether the word is there"
    ),
    "unique_timeout": lambda seconds: f"the key ends {seconds} s after the publish at the latest",
    "unique_raises": lambda on: (
        "a duplicate raises AlreadyQueuedError" if on else "a duplicate gets the first's result"
    ),
    "unique_wait_for_expiry": lambda on: (
        "the key stands until unique_timeout, also when the task has run"
        if on
        else "the key ends when the task has run"
    ),
    "unique_lock_timeout": lambda seconds: (
        f"a publish waits up to {seconds} s for the key; ours does not wait"
    ),
    "unique_lock_blocking": lambda on: (
        f"a publish {'waits' if on else 'does not wait'} for the key; ours does not wait"
    ),
    "key": lambda key: "it makes the key" if callable(key) else "it is the key",
    "lock_prefix": lambda _: "the key begins with it; ours begin with redlock_prefix",
    "rate_limit": lambda _: "it runs only so often",
    "rate_limit_prefix": lambda _: "keys of the rate limit begin with it",
    "times": lambda times: f"it runs {times} times in 'per' seconds at most",
    "per": lambda per: f"the seconds in which it runs 'times' times at most: {per}",
}


def heimdall_key(key: Any) -> str:
    """Return our ``lock_key`` for a *key* of celery-heimdall."""
    if callable(key):
        return Verbatim("lambda task, args, kwargs: KEY(args, kwargs)")
    return str(key).replace("{", "{{").replace("}", "}}")


def celery_once_task(task: PeerTask, settings: Mapping[str, Any]) -> Advice:
    """Return advice for the attributes of an OnceTask."""
    options = {name: value for name, value in task.options.items() if value is not None}
    is_queued, is_running = options.get("queue_lock", True), options.get("running_lock", True)
    advice = Advice(is_lock=bool(is_queued or is_running))
    until = "has run" if task.acks_late else "starts"
    meanings: dict[str, Callable[[Any], str]] = {
        "queue_lock": lambda on: (
            f"a duplicate is not published until the task {until}"
            if on
            else "duplicates are published"
        ),
        "running_lock": lambda on: (
            "a second run is rejected" if on else "nothing keeps two from running"
        ),
        "queue_lock_timeout": lambda _: "the first key ends so many seconds after the publish",
        "running_lock_timeout": lambda _: "the second key ends so many seconds after the start",
    }
    explain(advice, options, meanings, "celery-once-task")
    if is_queued:
        advice.write["unique_until"] = "finished" if task.acks_late else "started"
        configured = settings.get("once_queue_lock_timeout", 3600)
        advice.unique_for(options.get("queue_lock_timeout", configured))
        advice.write["on_duplicate"] = "join"
    if is_running:
        advice.write["on_conflict"] = "skip"
    elif is_queued:
        advice.write["on_conflict"] = "reschedule"
        advice.besides.append("Ours always has a lock while it runs: a second run comes later.")
    return advice


TRANSLATE: dict[str, Callable[[PeerTask, Mapping[str, Any]], Advice]] = {
    "celery-once": celery_once,
    "celery-singleton": celery_singleton,
    "celery-heimdall": celery_heimdall,
    "celery-once-task": celery_once_task,
}


def explain(
    advice: Advice,
    options: Mapping[str, Any],
    meanings: Mapping[str, Callable[[Any], str]],
    library: str,
) -> None:
    """Have *advice* say what each of *options* means."""
    for option, value in options.items():
        if option in meanings:
            advice.meant.append(f"{option}={shown(value)}: {meanings[option](value)}.")
        else:
            advice.meant.append(f"{one_line(option, SHOWN)}: {library} does not read it.")


def as_dict(value: Any) -> Mapping[str, Any]:
    """Return *value* if it is a dict, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def listed(names: Any) -> str:
    """Return the *names* of arguments, as a sentence has them."""
    return ", ".join(map(repr, names_in(names))) or "the task's name alone"


def names_in(names: Any) -> tuple[str, ...]:
    """Return the *names* of arguments, of which there may be one."""
    if isinstance(names, str):
        return (names,)
    return tuple(map(str, names)) if isinstance(names, (list, tuple, set, frozenset)) else ()
