"""Findings about what is left of other libraries, and what to write instead. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from celery_redlock.ops.doctor.advice import Advice, advise, as_dict, in_words, shown
from celery_redlock.ops.doctor.facts import Facts
from celery_redlock.ops.doctor.finding import ERROR, NOTE, WARNING, Finding
from celery_redlock.ops.doctor.peers import (
    NODES,
    PEERS,
    REDBEAT,
    UNIQUE_FOR,
    PeerTask,
    is_redbeat,
)

__all__ = ["check_migration"]

BEAT = (
    "redlock_beat_scheduler = 'redbeat.schedulers:RedBeatScheduler' and beat_scheduler = 'redlock'"
)


def check_migration(facts: Facts) -> Iterator[Finding]:
    """Yield what is left of libraries that lock tasks, or a beat."""
    for task in facts.peer_tasks:
        yield from one_task(task, facts.peer_settings)
    for name, value in facts.peer_settings.items():
        yield from one_setting(facts, name, value)
    yield from beat(facts)


def one_task(task: PeerTask, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield how a task is locked by a library, or what is left of that."""
    advice, peer = advise(task, settings), PEERS[task.library]
    meant = " ".join(advice.meant)
    if task.is_based and task.is_ours and advice.is_lock:
        what = (
            f"It is based on {peer.base} of {task.library} and on RedlockTask: both take a lock, "
            "and what one of them skips or reschedules counts as run, or as queued, for the other. "
        )
        fix = f"Take {peer.base} away: {written(task, advice) or 'nothing has to be written'}."
        yield Finding(ERROR, "migrate-mixed", task.name, what + meant, joined(fix, advice))
    elif task.is_based and not advice.is_lock:
        what = f"It is based on {peer.base} of {task.library}, without a lock. {meant}"
        fix = "Nothing has to be moved."
        yield Finding(NOTE, "migrate-task", task.name, what.strip(), joined(fix, advice))
    elif task.is_based:
        what = f"{task.library} locks it ({peer.base}), on one server. {meant}"
        fix = f"Write {written(task, advice)}."
        yield Finding(NOTE, "migrate-task", task.name, what.strip(), joined(fix, advice))
    else:
        named = ", ".join(f"{name}={shown(value)}" for name, value in task.options.items())
        what = f"Nothing reads {named}: the task is not based on {peer.base} of {task.library}. "
        wanted = written(task, advice) if advice.is_lock else ""
        fix = f"Instead of it write {wanted}." if wanted else "Take it away."
        yield Finding(WARNING, "migrate-option", task.name, what + meant, joined(fix, advice))


def written(task: PeerTask, advice: Advice) -> str:
    """Return what is to be written for *task*; what it says already is left out."""
    base = {} if task.is_ours else {"base": "base=RedlockTask"}
    known = task.own - {"unique_on"} if task.is_based else task.own
    new = {k: f"{k}={v!r}" for k, v in advice.write.items() if k not in known}
    return ", ".join([*base.values(), *new.values()])


def joined(fix: str, advice: Advice) -> str:
    """Return *fix* with what else there is to know."""
    return " ".join([fix, *advice.besides])


# --- settings -----------------------------------------------------------------------------


def one_setting(facts: Facts, name: str, value: Any) -> Iterator[Finding]:
    """Yield that a setting is another library's."""
    peer = next((peer for peer in PEERS.values() if name in peer.settings), None)
    if peer is None:
        return
    users = [task.name for task in facts.peer_tasks if task.library == peer.library]
    what = f"It is a setting of {peer.library}, which celery-redlock does not read. "
    what += f"Tasks of it: {len(users)}." if users else f"No task here is based on {peer.base}."
    if name == "once":
        fix = celery_once_fix(as_dict(value))
    else:
        fix = "It says nothing." if value is None else in_words(peer.settings[name], value)
    fix += f" Delete it with the last task of {peer.library}." if users else " Delete it."
    yield Finding(NOTE, "migrate-setting", name.upper() if name == "once" else name, what, fix)


def celery_once_fix(once: Mapping[str, Any]) -> str:
    """Return what to write for the setting ``ONCE``."""
    settings, fix = as_dict(once.get("settings")), [NODES]
    if "default_timeout" in settings:
        fix.append(in_words(UNIQUE_FOR, settings["default_timeout"]))
    if "blocking" in settings or "blocking_timeout" in settings:
        fix.append("blocking and blocking_timeout have no counterpart: a publish does not wait.")
    return " ".join(fix)


# --- beat ---------------------------------------------------------------------------------


def beat(facts: Facts) -> Iterator[Finding]:
    """Yield that RedBeat has a lock of its own, or the settings of one."""
    given = {name: facts.peer_settings[name] for name in REDBEAT if name in facts.peer_settings}
    is_wrapped = is_redbeat(facts.settings.beat_scheduler)
    is_direct = is_redbeat(facts.beat_scheduler)
    is_known = any(name.startswith("redbeat_") for name in facts.peer_settings)
    if is_wrapped:
        for name, value in given.items():
            if value:
                what = f"{name}={shown(value)} has no effect under 'celery beat -S redlock': "
                what += "RedBeat takes no lock there, a majority of the lock nodes says who leads."
                yield Finding(NOTE, "migrate-beat", name, what, "Delete it: " + lease(name))
    if is_wrapped and is_direct:
        what = (
            "redlock wraps RedBeat, but 'celery beat' without -S redlock starts RedBeat itself, "
            "beside whoever leads: entries are published twice."
        )
        yield Finding(WARNING, "migrate-beat", "beat_scheduler", what, "Set it to 'redlock'.")
    elif not is_wrapped and (is_direct or is_known):
        what = f"RedBeat leads by {own_lock(given)}."
        fix = f"Set {BEAT}. The schedule stays where it is. Stop all old beats first."
        where = "beat_scheduler" if is_direct else ", ".join(given) or "redbeat_redis_url"
        yield Finding(NOTE, "migrate-beat", where, what, fix)


def lease(name: str) -> str:
    """Return which setting of ours has the place of RedBeat's setting *name*."""
    return (
        "redlock_ttl and 2 s is how long a dead leader is waited for."
        if name == "redbeat_lock_timeout"
        else "redlock_beat_name tells beats apart that share nodes."
    )


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
