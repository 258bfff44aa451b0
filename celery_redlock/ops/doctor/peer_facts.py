"""Gathers what an app has of other libraries; imports none of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from celery.local import maybe_evaluate

from celery_redlock.ops.doctor.facts import PeerTask
from celery_redlock.ops.doctor.peers import PEERS, SETTINGS, Peer
from celery_redlock.task.base import RedlockTask
from celery_redlock.task.options import BUILT_IN, OPTIONS, classes_before

__all__ = ["load_the_rest", "peer_settings", "peer_tasks"]


def load_the_rest(app: Any) -> None:
    """
    Have *app* register the tasks that come after one with invalid options.

    That one is reported. What is wrong with the others is reported once it is fixed, as a worker
    would; but options of other libraries are to be reported all at once.
    """
    while app._pending:  # noqa: SLF001  Celery has no other way to go on
        with contextlib.suppress(Exception):
            maybe_evaluate(app._pending.popleft())  # noqa: SLF001


def peer_tasks(app: Any) -> list[PeerTask]:
    """Return the tasks that other libraries lock, or that have options of theirs."""
    own = ((name, task) for name, task in app.tasks.items() if not name.startswith(BUILT_IN))
    return [fact for name, task in sorted(own) for fact in facts_of(name, task)]


def facts_of(name: str, task: Any) -> Iterator[PeerTask]:
    """Yield what *task* has of each library."""
    is_ours = isinstance(task, RedlockTask)
    for library, peer in PEERS.items():
        values = {attribute: value_of(task, attribute) for attribute in peer.attributes}
        classes = ((package_of(cls), cls.__name__) for cls in type(task).__mro__)
        is_based = (peer.package, peer.base) in classes
        if not is_based:
            values = {k: v for k, v in values.items() if is_ours and is_theirs(peer, k, v)}
        if is_based or values:
            yield PeerTask(
                name=name,
                library=library,
                is_based=is_based,
                is_ours=is_ours,
                options=values,
                own=said_by(task) if is_ours else frozenset(),
                acks_late=bool(task.acks_late),
            )


def value_of(task: Any, attribute: str) -> Any:
    """Return an attribute of *task*; None where there is none, or it cannot be read."""
    try:
        return getattr(task, attribute, None)
    except Exception:  # noqa: BLE001  a property of the user's
        return None


def is_theirs(peer: Peer, attribute: str, value: Any) -> bool:
    """
    Return whether *value* is an option of *peer*, on a task that is not based on its class.

    An attribute that happens to be called so is none, nor is ``unique_on``, an option of ours.
    """
    if peer.in_dict:
        return is_dict_of(value, peer.keys)
    if attribute == "unique_on":
        return False
    is_switch = isinstance(peer.options[attribute], tuple)
    return type(value) is bool if is_switch else type(value) in (int, float)


def is_dict_of(value: Any, keys: tuple[str, ...]) -> bool:
    """Return whether *value* is a dict with *keys* and no others."""
    return isinstance(value, Mapping) and bool(value) and set(value) <= set(keys)


def package_of(cls: type) -> str:
    """Return the package that *cls* was written in."""
    return cls.__module__.partition(".")[0]


def said_by(task: Any) -> frozenset[str]:
    """Return the options of ours that the author of *task* wrote down."""
    packages = {peer.package for peer in PEERS.values()}
    classes = [c for c in classes_before(task, RedlockTask) if package_of(c) not in packages]
    return frozenset(name for cls in classes for name in vars(cls) if name in OPTIONS)


def peer_settings(app: Any) -> dict[str, Any]:
    """Return the settings of other libraries, by names in lower case, without a namespace."""
    namespace = f"{app.namespace}_" if getattr(app, "namespace", None) else ""
    found = {}
    for key in list(app.conf):
        name = str(key).removeprefix(namespace)
        if name.lower() in SETTINGS:
            with contextlib.suppress(KeyError):  # Celery does not find it, so neither do they
                found[name.lower()] = app.conf[name]
    if not is_dict_of(found.get("once"), ("backend", "settings")):
        found.pop("once", None)
    return found
