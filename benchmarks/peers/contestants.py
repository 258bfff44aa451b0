"""
How each column declares the same task: as its documentation says, with what suits it best.

All have their lock server for themselves. What differs from a library's own defaults:

- celery-heimdall does not wait for a lock that is taken (``unique_lock_blocking``): it would wait
  a second for its own lock in each run. Where two beats meet it has a "unique interval task", which
  its documentation offers for that.
- celery-singleton has no expiry by itself. It has none where the task outlasts a TTL, and one
  (``lock_expiry``) in all other rows: its lock would be there for ever after a kill, and cannot
  lapse before its holder ends. (``clear_locks`` at a worker's start is no way out with more than
  one worker: it clears the locks of what runs elsewhere.)
- celery-once-task has its signals and its step of the worker connected.
- No setting is taken that allows a task to run beside itself, like ``running_lock=False``.
- celery-redlock is also unique at publish, as the others are: ``unique_until="finished"``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from celery import Celery, Task

from benchmarks.peers.rows import (
    COOKBOOK,
    HEIMDALL,
    INTERVAL,
    LEAKY,
    ONCE,
    ONCE_TASK,
    OURS,
    PLAIN,
    SHORT,
    SINGLETON,
    Row,
)

Body = Callable[..., Any]
#: Declares a body as a task under the lock of its column.
Declare = Callable[[Celery, Row, Sequence[str], Body], None]


def task(app: Celery, row: Row, body: Body, **options: Any) -> None:
    """Declare *body* as the task "work"."""
    app.task(name="work", shared=False, bind=True, **row.task, **options)(body)


def plain(app: Celery, row: Row, nodes: Sequence[str], body: Body) -> None:  # noqa: ARG001
    """Declare a task without a lock."""
    task(app, row, body, base=Task)


def leaky(app: Celery, row: Row, nodes: Sequence[str], body: Body) -> None:
    """Declare a task with a lock that leaks."""
    from benchmarks.peers.cookbook import Leaky  # noqa: PLC0415  each cell loads its own library

    app.conf.update(leaky_url=nodes[0], leaky_ttl=row.ttl)
    task(app, row, body, base=Leaky)


def once(app: Celery, row: Row, nodes: Sequence[str], body: Body) -> None:
    """Declare a task of celery-once."""
    from celery_once import QueueOnce  # noqa: PLC0415  as above

    settings = {"url": nodes[0], "default_timeout": row.ttl}
    app.conf.ONCE = {"backend": "celery_once.backends.Redis", "settings": settings}
    task(app, row, body, base=QueueOnce)


def singleton(app: Celery, row: Row, nodes: Sequence[str], body: Body) -> None:
    """Declare a task of celery-singleton."""
    from celery_singleton import Singleton  # noqa: PLC0415  as above

    app.conf.singleton_backend_url = nodes[0]
    expiry = {} if row.key == "outlasted" else {"lock_expiry": row.ttl}
    task(app, row, body, base=Singleton, **expiry)


def heimdall(app: Celery, row: Row, nodes: Sequence[str], body: Body) -> None:
    """Declare a task of celery-heimdall."""
    import redis  # noqa: PLC0415  as above
    from celery_heimdall import HeimdallTask  # noqa: PLC0415

    class OnItsServer(HeimdallTask):
        """With its lock where the row says; its own way is the result backend's server."""

        abstract = True

        def setup_redis(self) -> redis.Redis:
            """Return the client of the lock server."""
            return redis.Redis.from_url(nodes[0])

    options = {"unique": True, "unique_timeout": row.ttl, "unique_lock_blocking": False}
    if row.key == "beats":
        options |= {"unique_timeout": INTERVAL - 1, "unique_wait_for_expiry": True}
    task(app, row, body, base=OnItsServer, heimdall=options)


def once_task(app: Celery, row: Row, nodes: Sequence[str], body: Body) -> None:
    """Declare a task of celery-once-task."""
    from celery_once_task import (  # noqa: PLC0415  as above
        OnceTask,
        OnceTaskUnlockBootStep,
        configure,
        setup_once_task_signals,
    )

    configure(redis_url=nodes[0], queue_lock_timeout=row.ttl, running_lock_timeout=row.ttl)
    setup_once_task_signals()
    app.steps["worker"].add(OnceTaskUnlockBootStep)
    task(app, row, body, base=OnceTask)


def cookbook(app: Celery, row: Row, nodes: Sequence[str], body: Body) -> None:
    """Declare a task that follows the recipe."""
    from benchmarks.peers.cookbook import one_at_a_time  # noqa: PLC0415  as above

    task(app, row, one_at_a_time(body, nodes[0], row.ttl), base=Task)


def ours(app: Celery, row: Row, nodes: Sequence[str], body: Body) -> None:
    """Declare a task of ours."""
    from celery_redlock import RedlockTask  # noqa: PLC0415  as above

    app.conf.update(redlock_nodes=list(nodes), redlock_ttl=SHORT, redlock_max_ttl=SHORT)
    # So long that a loaded machine makes no node late.
    app.conf.redlock_node_timeout = 0.5
    task(app, row, body, base=RedlockTask, unique_until="finished")


DECLARE: dict[str, Declare] = {
    ONCE: once,
    SINGLETON: singleton,
    HEIMDALL: heimdall,
    ONCE_TASK: once_task,
    COOKBOOK: cookbook,
    OURS: ours,
    PLAIN: plain,
    LEAKY: leaky,
}
#: Column -> options of its ``celery beat``.
BEATS = {OURS: ("-S", "redlock")}
#: Column -> how many lock servers it has; one for all others.
NODES = {OURS: 5}
