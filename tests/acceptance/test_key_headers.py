"""Tenants whose name is in a header or in a context variable: no lock of one is that of another."""

from __future__ import annotations

import contextvars
import os
import signal
import time
import uuid

import pytest
from celery import signals

from celery_redlock import RedlockTask
from celery_redlock.testing.asserting import name_of
from support.events import body
from support.stage import LASTING, stage
from support.waiting import eventually

#: Of a task whose process is killed: its lock is to be free long before that [s].
TTL = 600.0


def by_context(task, args, kwargs):
    return f"{task.app.tenant.get()}:{args[0]}"


def by_header(task, args, kwargs, headers):
    return f"{headers['tenant']}:{args[0]}"


def declare(app):
    """Declare the tasks, and the context that publishers and bodies have, as libraries do it."""
    app.tenant = contextvars.ContextVar("tenant", default="")

    def job(self, name, *, sleeps=False):
        # Of an element of a map, the headers are beside what Celery says of it.
        tenant = (self.request.headers or vars(self.request))["tenant"]
        with body(os.environ["EVENTS"], f"{name} {tenant}"):
            while sleeps:
                time.sleep(0.05)
        return tenant

    ours = {"base": RedlockTask, "bind": True, "shared": False, "lock_ttl": TTL}
    app.task(name="unique", unique_until="finished", unique_for=600, **ours)(job)
    app.task(name="by_header", lock_key=by_header, **ours)(job)
    app.task(name="by_context", lock_key=by_context, **ours)(job)

    if "STAGE" in os.environ:

        @signals.task_prerun.connect(weak=False)
        def enter(task, **_):
            app.tenant.set(getattr(task.request, "tenant", ""))


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    conf = {**LASTING, "redlock_key_headers": ["tenant"], "redlock_max_ttl": TTL}
    with stage(__file__, tmp_path_factory.mktemp("headers"), **conf) as it:
        it.worker()
        yield it


def publish(it, task, name, tenant, **kwargs):
    it.app.tenant.set(tenant)
    return it.task(task).apply_async((name,), kwargs, headers={"tenant": tenant})


def test_a_tenant_joins_no_task_of_another(it):
    name = uuid.uuid4().hex
    first = publish(it, "unique", name, "a", sleeps=True)
    it.started(f"{name} a")
    assert publish(it, "unique", name, "a", sleeps=True).duplicate
    other = publish(it, "unique", name, "b")
    assert not other.duplicate
    assert other.get(timeout=100) == "b"
    (running,) = it.bodies(f"{name} a")
    os.kill(running.pid, signal.SIGKILL)
    eventually(lambda: it.meta(first.id).get("status") == "FAILURE", "loss of the child")


@pytest.mark.parametrize("task", ["unique", "by_header", "by_context"])
def test_the_lock_of_a_child_that_is_killed_is_free(it, task):
    """Its worker's main process knows the name, too, although it is in nobody's context there."""
    name = uuid.uuid4().hex
    publish(it, task, name, "a", sleeps=True)
    (running,) = it.started(f"{name} a")
    it.wait_until_begun(running.pid)
    os.kill(running.pid, signal.SIGKILL)
    eventually(lambda: runs(it, task, name), "lock that is free", timeout=100, every=0.5)


def runs(it, task, name):
    return publish(it, task, name, "a").get(timeout=100) == "a"


def test_without_the_setting_the_tenant_is_no_part_of_the_name(it):
    """The twin: the call of one tenant is a duplicate of the other's."""
    bare = it.task("unique")
    call = bare.s("x")
    assert name_of(call.set(headers={"tenant": "a"})) != bare.lock_name(("x",))
    assert name_of(call.set(headers={"other": "a"})) == bare.lock_name(("x",))


def test_elements_of_a_map_have_the_headers_of_their_message(it):
    """The tenant of the whole is that of each: without, this name could not be made."""
    mapped = it.task("by_header").map([uuid.uuid4().hex]).apply_async(headers={"tenant": "a"})
    assert mapped.get(timeout=100) == ["a"]
