"""Gathers what an app has of other libraries; imports none of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from celery.local import maybe_evaluate

from celery_redlock.ops.doctor.peers import (
    PEERS,
    SETTINGS,
    Peer,
    PeerTask,
    canonical_settings,
    left_over,
)
from celery_redlock.task.base import RedlockTask
from celery_redlock.task.options import OPTIONS, classes_before
from celery_redlock.task.task_lock import BUILT_IN

__all__ = ["load_the_rest", "peer_settings", "peer_tasks"]


def load_the_rest(app: Any) -> None:
    """
    Have *app* know the tasks that come after one that made no sense.

    That one is told. What is wrong with the others is told when it is mended, as a worker would;
    but options of other libraries are to be told all at once.
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
    for peer in PEERS.values():
        values = {attribute: value_of(task, attribute) for attribute in peer.attributes}
        is_based = any(is_base(cls, peer) for cls in type(task).__mro__)
        options = values if is_based else left_over(peer, values) if is_ours else {}
        if is_based or options:
            yield PeerTask(
                name=name,
                library=peer.library,
                is_based=is_based,
                is_ours=is_ours,
                options=options,
                own=said_by(task) if is_ours else frozenset(),
                acks_late=bool(task.acks_late),
            )


def value_of(task: Any, attribute: str) -> Any:
    """Return an attribute of *task*; None where there is none, or it cannot be read."""
    try:
        return getattr(task, attribute, None)
    except Exception:  # noqa: BLE001  a property of the user's
        return None


def is_base(cls: type, peer: Peer) -> bool:
    """Return whether *cls* is the class that tasks of *peer* are based on."""
    return cls.__name__ == peer.base and package_of(cls) == peer.package


def package_of(cls: type) -> str:
    """Return the package that *cls* was written in."""
    return cls.__module__.partition(".")[0]


def said_by(task: Any) -> frozenset[str]:
    """Return the options of ours that the author of *task* wrote down."""
    packages = {peer.package for peer in PEERS.values()}
    classes = [c for c in classes_before(task, RedlockTask) if package_of(c) not in packages]
    return frozenset(name for cls in classes for name in vars(cls) if name in OPTIONS)


def peer_settings(app: Any) -> dict[str, Any]:
    """Return the settings of other libraries, by names in lower case."""
    namespace = f"{app.namespace}_" if getattr(app, "namespace", None) else ""
    given = {}
    for key in list(app.conf):
        name = str(key).removeprefix(namespace)
        if name.lower() in SETTINGS:
            with contextlib.suppress(KeyError):  # Celery does not find it, so neither do they
                given[name] = app.conf[name]
    return canonical_settings(given)
