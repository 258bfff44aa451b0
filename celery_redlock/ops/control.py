"""
Remote control of a worker: commands for its locks, and for the lock nodes as it sees them.

    celery -A shop inspect redlock_locks
    celery -A shop inspect redlock_nodes

Every start of ``celery`` imports this, with `celery_redlock.ops.cli`, and so does every worker
(`celery_redlock.task.worker.start_steps`). The answers come from `celery_redlock.ops.inspected`.
"""

from __future__ import annotations

from typing import Any

from celery.worker.control import inspect_command

__all__ = ["redlock_locks", "redlock_nodes"]


@inspect_command()
def redlock_locks(state: Any) -> dict[str, Any]:
    """Locks that this worker holds, with renewals and margin."""
    from celery_redlock.ops import inspected  # noqa: PLC0415  not for every start of `celery`

    return inspected.locks_of(state.app)


@inspect_command()
def redlock_nodes(state: Any) -> dict[str, Any]:
    """How this worker sees the lock nodes."""
    from celery_redlock.ops import inspected  # noqa: PLC0415  not for every start of `celery`

    return inspected.nodes_of(state.app)
