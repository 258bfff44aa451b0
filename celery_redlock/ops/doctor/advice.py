"""What an option of another library means, and what is to be written for it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery_redlock.ops.doctor.peers import PEERS, Meaning, PeerTask, is_number
from celery_redlock.ops.text import one_line
from celery_redlock.task.options import LONGEST_UNIQUE_FOR, UNIQUE_FOR

__all__ = ["Advice", "Verbatim", "advise", "as_dict", "in_words", "shown"]

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


def in_words(meaning: Meaning, value: Any, **more: str) -> str:
    """Return what an option of this *meaning* says with *value*."""
    template = meaning if isinstance(meaning, str) else meaning[not value]
    return template.format(value=shown(value), names=listed(value), **more)


def advise(task: PeerTask, settings: Mapping[str, Any]) -> Advice:
    """
    Return what to write instead of the options of *task*.

    Args:
        task: One that has options of a library.
        settings: Of that library, as of `canonical_settings`.
    """
    peer = PEERS[task.library]
    options = {name: value for name, value in task.options.items() if value is not None}
    if peer.in_dict:
        options = dict(as_dict(options.get(peer.in_dict)))
    starts = "has run" if task.acks_late else "starts"
    advice = Advice()
    for option, value in options.items():
        if option in peer.options:
            meant = in_words(peer.options[option], value, starts=starts)
            advice.meant.append(f"{option}={shown(value)}: {meant}.")
        else:
            advice.meant.append(f"{one_line(option, SHOWN)}: {peer.library} does not read it.")
    advice.besides += TRANSLATE[task.library](task, options, settings, advice)
    return advice


#: What a translation has: the task, its options, the library's settings, and where to write.
Translation = Callable[[PeerTask, Mapping[str, Any], Mapping[str, Any], Advice], Iterator[str]]


def celery_once(
    _: PeerTask, once: Mapping[str, Any], settings: Mapping[str, Any], advice: Advice
) -> Iterator[str]:
    """Write what ``once={...}`` is with us; yield what else to know."""
    if once.get("keys") is not None:
        advice.write["unique_on"] = names_in(once["keys"])
    is_early = bool(once.get("unlock_before_run"))
    advice.write["unique_until"] = "started" if is_early else "finished"
    configured = as_dict(as_dict(settings.get("once")).get("settings")).get("default_timeout", 3600)
    advice.unique_for(once.get("timeout", configured))
    advice.write["on_duplicate"] = "join" if once.get("graceful") else "fail"
    if is_early:
        advice.write["on_conflict"] = "reschedule"
        yield "The second run waits for the first one to end."


def celery_singleton(
    task: PeerTask, options: Mapping[str, Any], settings: Mapping[str, Any], advice: Advice
) -> Iterator[str]:
    """Write what the attributes of a Singleton are with us; yield what else to know."""
    if options.get("unique_on") and task.is_based:
        advice.write["unique_on"] = names_in(options["unique_on"])
    advice.write["unique_until"] = "finished"
    expiry = options.get("lock_expiry", settings.get("singleton_lock_expiry"))
    advice.unique_for(expiry)
    raises = options.get("raise_on_duplicate", settings.get("singleton_raise_on_duplicate"))
    advice.write["on_duplicate"] = "fail" if raises else "join"
    if expiry is None and task.is_based:
        yield (
            f"Its key never expires; our marker of a message that waits does after {UNIQUE_FOR:g} "
            "s: set unique_for if messages wait for longer."
        )


def celery_heimdall(
    _: PeerTask, options: Mapping[str, Any], settings: Mapping[str, Any], advice: Advice
) -> Iterator[str]:
    """Write what ``heimdall={...}`` is with us; yield what else to know."""
    if "rate_limit" in options or {"times", "per"} <= options.keys():
        yield (
            "Rate limits have no counterpart: celery-redlock does not limit rates, and Celery's "
            "own rate_limit holds for one worker."
        )
    # The library only looks whether the word is there.
    advice.is_lock = "unique" in options
    if not advice.is_lock:
        return

    def chosen(option: str, default: Any) -> Any:
        own = options.get(option)
        return settings.get(f"heimdall_{option}", default) if own is None else own

    key = options.get("key")
    if callable(key):
        advice.write["lock_key"] = Verbatim("lambda task, args, kwargs: KEY(args, kwargs)")
        yield "KEY stands for the function that is 'key' now."
    elif "key" in options:
        advice.write["lock_key"] = str(key).replace("{", "{{").replace("}", "}}")
    keeps = bool(options.get("unique_wait_for_expiry"))
    advice.write["unique_until"] = "expired" if keeps else "finished"
    advice.unique_for(chosen("unique_timeout", 3600))
    advice.write["on_duplicate"] = "fail" if chosen("unique_raises", False) else "join"


def celery_once_task(
    task: PeerTask, options: Mapping[str, Any], settings: Mapping[str, Any], advice: Advice
) -> Iterator[str]:
    """Write what the attributes of an OnceTask are with us; yield what else to know."""
    is_queued, is_running = options.get("queue_lock", True), options.get("running_lock", True)
    advice.is_lock = bool(is_queued or is_running)
    if is_queued:
        advice.write["unique_until"] = "finished" if task.acks_late else "started"
        configured = settings.get("once_queue_lock_timeout", 3600)
        advice.unique_for(options.get("queue_lock_timeout", configured))
        advice.write["on_duplicate"] = "join"
    if is_running:
        advice.write["on_conflict"] = "skip"
    elif is_queued:
        advice.write["on_conflict"] = "reschedule"
        yield "Ours always has a lock while it runs: a second run comes later."


TRANSLATE: dict[str, Translation] = {
    "celery-once": celery_once,
    "celery-singleton": celery_singleton,
    "celery-heimdall": celery_heimdall,
    "celery-once-task": celery_once_task,
}


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
