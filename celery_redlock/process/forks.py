"""
Hooks around a fork, called in one order.

    before      the thread that forks waits for others of ours, the last stage first
    in parent   lets them go on, the first stage first
    in child    forgets what belongs to the parent, the first stage first

Hooks of Python's own would come in the order of imports.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

__all__ = ["STAGES", "around_fork", "members"]

#: Each may need what stands before it.
STAGES = (
    "log",  # the locks of handlers: all others may write to the log
    "held",  # leases, which are the parent's
    "fanout",  # connections to the nodes
    "watchdog",
    "listener",
    "database",  # the other ends of connections to one
    "outbox",
    "plugin",
    "counting",  # of metrics
    "nodewatch",  # which counts while it holds forks off
    "keyspace",  # whose turn it is to run Lua
    "files",  # of SQLite, which are closed: who uses one waits for his turn to run Lua
    "servers",  # of tests
)


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Around:
    before: Callable[[], object]
    in_parent: Callable[[], object]
    in_child: Callable[[], object]


_stages: dict[str, Around] = {}


def around_fork(
    stage: str,
    in_child: Callable[[], object],
    *,
    before: Callable[[], object] = nothing,
    in_parent: Callable[[], object] = nothing,
) -> None:
    """Have these called around each fork, as the one caller of a *stage* of `STAGES`."""
    assert stage in STAGES
    assert stage not in _stages
    _stages[stage] = Around(before, in_parent, in_child)


def members(stage: str) -> weakref.WeakSet[Any]:
    """Return an empty set; on each thing in it ``after_fork_in_child`` is called in a child."""
    found: weakref.WeakSet[Any] = weakref.WeakSet()

    def in_child() -> None:
        call_all([member.after_fork_in_child for member in list(found)])

    around_fork(stage, in_child)
    return found


def call_all(calls: list[Callable[[], object]]) -> None:
    """Call each, whatever another one raises."""
    with ExitStack() as stack:
        for call in reversed(calls):
            stack.callback(call)


def in_order() -> list[Around]:
    return [_stages[stage] for stage in STAGES if stage in _stages]


def _before() -> None:
    call_all([around.before for around in reversed(in_order())])


def _in_parent() -> None:
    call_all([around.in_parent for around in in_order()])


def _in_child() -> None:
    call_all([around.in_child for around in in_order()])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
