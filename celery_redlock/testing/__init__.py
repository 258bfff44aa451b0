"""
Tools for the tests of those who use celery-redlock.

    locks_disabled     bodies run, and no lock is asked for
    memory_quorum      locks on in-memory nodes that you can break, with a clock you control
    assert_locked      the code under test runs under its lock

The fixtures are in `celery_redlock.testing.pytest_plugin`. Names are imported when they are first
used, since pytest loads the plug-in in every suite.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery_redlock.testing.apps import real_servers
    from celery_redlock.testing.asserting import assert_locked
    from celery_redlock.testing.clock import TickedClock
    from celery_redlock.testing.disabled import locks_disabled
    from celery_redlock.testing.faults import MemoryNode
    from celery_redlock.testing.quorum import MemoryQuorum, OtherHolder, memory_quorum

__all__ = [
    "MemoryNode",
    "MemoryQuorum",
    "OtherHolder",
    "TickedClock",
    "assert_locked",
    "locks_disabled",
    "memory_quorum",
    "real_servers",
]

#: Public name -> the module that it is in.
_HOME_OF = {
    "MemoryNode": "faults",
    "MemoryQuorum": "quorum",
    "OtherHolder": "quorum",
    "TickedClock": "clock",
    "assert_locked": "asserting",
    "locks_disabled": "disabled",
    "memory_quorum": "quorum",
    "real_servers": "apps",
}

if not TYPE_CHECKING:  # a type checker would take any name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
