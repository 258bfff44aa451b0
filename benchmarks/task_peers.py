"""
Tasks of other libraries that keep a second copy out, beside plain ones and ours, each in an app.

Each is used as its documentation says, on one server, with the settings that it has by itself, but
for one: celery-heimdall waits up to a second for a lock that is taken (``unique_lock_blocking``),
at publish and again at run time, where its own publisher has taken it, so that each task would take
a second. Here it does not wait. All others take their lock at publish and give it back after the
task has run; celery-redlock takes and releases it where the task runs, unless ``unique_until`` is
set, and then has another at publish.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis
from celery import Celery, Task
from celery_heimdall import HeimdallTask
from celery_once import QueueOnce
from celery_singleton import Singleton

from benchmarks.contestant import declare
from celery_redlock import RedlockTask

PLAIN = "plain Task"
ONCE, SINGLETON, HEIMDALL = (
    "celery-once, 1 node",
    "celery-singleton, 1 node",
    "celery-heimdall, 1 node",
)
PEERS = (ONCE, SINGLETON, HEIMDALL)
OURS, OURS_ON_ONE = "celery-redlock, 5 nodes", "celery-redlock, 1 node"


class OnItsNode(HeimdallTask):
    """A task of celery-heimdall with its lock where the app says."""

    abstract = True

    def setup_redis(self) -> redis.Redis:
        """Return the client of its lock node."""
        return redis.Redis.from_url(self.app.conf["heimdall_url"])


#: Prefix of the keys of one node by itself, which is another node to those who have five.
ALONE = "alone"
#: Name -> how a task of it is declared.
TASKS: dict[str, dict[str, Any]] = {
    PLAIN: {"base": Task},
    OURS: {"base": RedlockTask},
    OURS_ON_ONE: {"base": RedlockTask},
    ONCE: {"base": QueueOnce, "once": {"graceful": True}},
    SINGLETON: {"base": Singleton},
    HEIMDALL: {"base": OnItsNode, "heimdall": {"unique": True, "unique_lock_blocking": False}},
}


def settings(name: str, nodes: Sequence[str]) -> dict[str, Any]:
    """Return what the app of *name* is told of its lock nodes."""
    return {
        PLAIN: {},
        OURS: {"redlock_nodes": list(nodes)},
        OURS_ON_ONE: {"redlock_nodes": [nodes[0]], "redlock_prefix": ALONE},
        ONCE: {"ONCE": {"backend": "celery_once.backends.Redis", "settings": {"url": nodes[0]}}},
        SINGLETON: {"singleton_backend_url": nodes[0]},
        HEIMDALL: {"heimdall_url": nodes[0]},
    }[name]


def enrol(nodes: Sequence[str]) -> None:
    """Have new nodes vote at once, all of them together and the first one by itself."""
    from benchmarks.lock_cycle import our_locks  # noqa: PLC0415  the workers have no use for it

    our_locks(nodes, "redlock").close()
    our_locks(nodes[:1], ALONE).close()


def app_of(conf: dict[str, Any], *, is_current: bool = False, **task: Any) -> Celery:
    """Return an app with *conf*, and a task that is declared as *task* says."""
    app = Celery("bench", set_as_current=is_current)
    app.conf.update({"task_ignore_result": True, **conf})
    declare(app, **task)
    return app
