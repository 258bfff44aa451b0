"""Findings about what is left of other libraries, and what to write instead. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from celery_redlock.ops.doctor import ERROR, NOTE, WARNING, Finding
from celery_redlock.ops.doctor.facts import Facts, PeerTask
from celery_redlock.ops.doctor.peers import (
    NODES,
    PEERS,
    REDBEAT,
    UNIQUE_FOR_ON_TASKS,
    Meaning,
)
from celery_redlock.ops.text import one_line
from celery_redlock.task.options import LONGEST_UNIQUE_FOR, UNIQUE_FOR

__all__ = ["Advice", "advise", "check_migration", "shown"]

#: So much is shown of a value.
SHOWN = 60


def check_migration(facts: Facts) -> Iterator[Finding]:
    """Yield what is left of libraries that lock tasks, or a beat."""
    for task in facts.peer_tasks:
        yield from one_task(task, facts.peer_settings)
    for name, value in facts.peer_settings.items():
        yield from one_setting(facts, name, value)
    yield from beat(facts)


# --- what to write instead ----------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """
    What there is to say of a task's options.

    Attributes:
        meant: A sentence for each option of theirs.
        write: Our option -> its value as code; empty for a task that has no lock of theirs.
        besides: What else to know.
    """

    meant: list[str]
    write: dict[str, str]
    besides: list[str]


def advise(task: PeerTask, settings: Mapping[str, Any]) -> Advice:
    """
    Return what to write instead of the options of *task*.

    Args:
        task: One that has options of a library.
        settings: Of that library, as in `Facts`.
    """
    peer = PEERS[task.library]
    if peer.in_dict:
        given = as_dict(task.options.get(peer.in_dict))
    else:
        given = {name: value for name, value in task.options.items() if value is not None}
    once = as_dict(as_dict(settings.get("once")).get("settings"))
    of_app = {**settings, "once_timeout": once.get("default_timeout")}  # as others call theirs
    values: dict[str, Any] = {"is_based": task.is_based, "acks_late": task.acks_late}
    for name in peer.options:
        said = (given.get(name), of_app.get(peer.prefix + name), peer.defaults.get(name))
        values[name] = next((value for value in said if value is not None), None)
    write = {ours: value for ours, value in peer.write(values).items() if value is not None}
    if not is_worth_writing(write.get("unique_for"), write.get("unique_until")):
        write.pop("unique_for", None)
    return Advice(
        [sentence(task, name, value) for name, value in given.items()],
        {ours: as_code(ours, value) for ours, value in write.items()},
        [text for text, applies in peer.besides.items() if applies(values)],
    )


def is_worth_writing(seconds: Any, until: Any) -> bool:
    """Return whether so many *seconds* can be our ``unique_for``, and are not the default."""
    can_be = type(seconds) in (int, float) and 0 < seconds <= LONGEST_UNIQUE_FOR
    return can_be and (seconds != UNIQUE_FOR or until == "expired")


def as_code(ours: str, value: Any) -> str:
    """Return what is to be written for *value* behind our option."""
    if ours == "lock_key" and callable(value):
        return "lambda task, args, kwargs: KEY(args, kwargs)"
    if ours == "lock_key":
        return repr(str(value).replace("{", "{{").replace("}", "}}"))
    return repr(names_in(value) if ours == "unique_on" else value)


def sentence(task: PeerTask, name: str, value: Any) -> str:
    """Return what the option *name* of *task* means with this *value*."""
    meaning = PEERS[task.library].options.get(name)
    if meaning is None:
        return f"{one_line(name, SHOWN)}: {task.library} does not read it."
    starts = "has run" if task.acks_late else "starts"
    return f"{name}={shown(value)}: {in_words(meaning, value, starts=starts)}."


def in_words(meaning: Meaning, value: Any, **more: str) -> str:
    """Return what something of this *meaning* says with *value*."""
    template = meaning if isinstance(meaning, str) else meaning[not value]
    names = ", ".join(map(repr, names_in(value))) or "the task's name alone"
    return template.format(value=shown(value), names=names, **more)


def shown(value: Any) -> str:
    """Return *value* as it may stand in a sentence."""
    if callable(value):
        return "a function"
    is_plain = isinstance(value, (str, int, float, list, tuple, set, dict, type(None)))
    try:
        text = repr(value) if is_plain else ""
    except Exception:  # noqa: BLE001  of something in a list, say
        text = ""
    is_shown = text and "://" not in text  # a URL may have a password
    return one_line(text, SHOWN) if is_shown else f"{type(value).__name__}(...)"


def names_in(names: Any) -> tuple[str, ...]:
    """Return the *names* of arguments, of which there may be one."""
    if isinstance(names, str):
        return (names,)
    return tuple(map(str, names)) if isinstance(names, (list, tuple, set, frozenset)) else ()


def as_dict(value: Any) -> Mapping[str, Any]:
    """Return *value* if it is a dict, else an empty one."""
    return value if isinstance(value, Mapping) else {}


# --- tasks --------------------------------------------------------------------------------


def one_task(task: PeerTask, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield how a task is locked by a library, or what is left of that."""
    advice, base = advise(task, settings), PEERS[task.library].base
    write = written(task, advice)
    if not task.is_based:
        named = ", ".join(f"{name}={shown(value)}" for name, value in task.options.items())
        what = f"Nothing reads {named}: the task is not based on {base} of {task.library}."
        fix = f"Instead of it write {write}." if write else "Remove it."
        yield Finding(WARNING, "migrate-option", task.name, *with_advice(what, fix, advice))
    elif not advice.write:
        what = f"It is based on {base} of {task.library}, without a lock."
        fix = "Nothing has to be moved."
        yield Finding(NOTE, "migrate-task", task.name, *with_advice(what, fix, advice))
    elif task.is_ours:
        what = (
            f"It is based on {base} of {task.library} and on RedlockTask: both take a lock, and "
            "what one of them skips or reschedules counts as run, or as queued, for the other."
        )
        fix = f"Remove {base}: {write or 'nothing has to be written'}."
        yield Finding(ERROR, "migrate-mixed", task.name, *with_advice(what, fix, advice))
    else:
        what, fix = f"{task.library} locks it ({base}), on one server.", f"Write {write}."
        yield Finding(NOTE, "migrate-task", task.name, *with_advice(what, fix, advice))


def with_advice(what: str, fix: str, advice: Advice) -> tuple[str, str]:
    """Return *what* was found with what it means, and its *fix* with what else to know."""
    return " ".join([what, *advice.meant]), " ".join([fix, *advice.besides])


def written(task: PeerTask, advice: Advice) -> str:
    """Return what is to be written for *task*; what it says already is left out."""
    base = [] if task.is_ours else ["base=RedlockTask"]
    known = task.own - {"unique_on"} if task.is_based else task.own
    new = [f"{ours}={code}" for ours, code in advice.write.items() if ours not in known]
    return ", ".join(base + new)


# --- settings -----------------------------------------------------------------------------


def one_setting(facts: Facts, name: str, value: Any) -> Iterator[Finding]:
    """Yield that a setting is another library's."""
    for library, peer in PEERS.items():
        if name not in peer.settings:
            continue
        users = sum(1 for task in facts.peer_tasks if task.library == library)
        of_tasks = f"Tasks of it: {users}." if users else f"No task here is based on {peer.base}."
        what = f"It is a setting of {library}, which celery-redlock does not read. {of_tasks}"
        if name == "once":
            fix = celery_once_fix(as_dict(value))
        else:
            fix = "It says nothing." if value is None else in_words(peer.settings[name], value)
        fix += f" Delete it with the last task of {library}." if users else " Delete it."
        where = name.upper() if name == "once" else name
        yield Finding(NOTE, "migrate-setting", where, what, fix)


def celery_once_fix(once: Mapping[str, Any]) -> str:
    """Return what to write for the setting ``ONCE``."""
    settings, fix = as_dict(once.get("settings")), [NODES]
    if "default_timeout" in settings:
        fix.append(in_words(UNIQUE_FOR_ON_TASKS, settings["default_timeout"]))
    if "blocking" in settings or "blocking_timeout" in settings:
        fix.append("blocking and blocking_timeout have no counterpart: a publish does not wait.")
    return " ".join(fix)


# --- beat ---------------------------------------------------------------------------------


def beat(facts: Facts) -> Iterator[Finding]:
    """Yield that RedBeat has a lock of its own, or the settings of one."""
    given = {name: value for name, value in facts.peer_settings.items() if name in REDBEAT}
    is_wrapped = is_redbeat(facts.settings.beat_scheduler)
    is_direct = is_redbeat(facts.beat_scheduler)
    if not is_wrapped:
        if is_direct or any(name.startswith("redbeat_") for name in facts.peer_settings):
            what = f"RedBeat leads by {own_lock(given)}."
            fix = (
                "Set redlock_beat_scheduler = 'redbeat.schedulers:RedBeatScheduler' and "
                "beat_scheduler = 'redlock'. The schedule stays where it is. Stop all old beats "
                "first."
            )
            where = "beat_scheduler" if is_direct else ", ".join(given) or "redbeat_redis_url"
            yield Finding(NOTE, "migrate-beat", where, what, fix)
        return
    for name, instead_of_it in REDBEAT.items():
        if given.get(name):
            what = (
                f"{name}={shown(given[name])} has no effect under 'celery beat -S redlock': "
                "RedBeat takes no lock there, a majority of the lock nodes says who leads."
            )
            yield Finding(NOTE, "migrate-beat", name, what, f"Delete it: {instead_of_it}")
    if is_direct:
        what = (
            "redlock wraps RedBeat, but 'celery beat' without -S redlock starts RedBeat itself, "
            "beside whoever leads: entries are published twice."
        )
        yield Finding(WARNING, "migrate-beat", "beat_scheduler", what, "Set it to 'redlock'.")


def is_redbeat(scheduler: Any) -> bool:
    """Return whether *scheduler*, a class or the name of one, is RedBeat's or made from it."""
    if isinstance(scheduler, str):
        return scheduler.replace(":", ".").partition(".")[0] == "redbeat"
    bases = getattr(scheduler, "__mro__", ())
    return any(base.__module__.partition(".")[0] == "redbeat" for base in bases)


def own_lock(given: Mapping[str, Any]) -> str:
    """Return what keeps two beats of RedBeat apart."""
    if "redbeat_lock_key" in given and not given["redbeat_lock_key"]:
        return "no lock (redbeat_lock_key is off), so a second beat publishes all entries again"
    timeout = given.get("redbeat_lock_timeout")
    known = f", which ends {timeout} s after its beat has died" if timeout else ""
    return (
        f"a lock on one server{known}: if that server forgets it, two lead, and a beat that finds "
        "its lock lost ends"
    )
