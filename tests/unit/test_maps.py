"""``map``, ``starmap`` and ``chunks`` of a protected task: each element has its lock."""

from __future__ import annotations

import pytest
from celery import Celery
from celery.exceptions import Ignore, Reject

from celery_redlock import LockTaken, RedlockTask, current_lock
from celery_redlock.testing import locks_disabled, memory_quorum

ELEMENT = {"map": lambda n: n, "starmap": lambda n: (n,)}


@pytest.fixture
def app():
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_ttl = 8
    app.ran = []
    return app


@pytest.fixture
def quorum(app):
    with memory_quorum(app) as quorum:
        yield quorum


@pytest.fixture
def declare(app):
    def declare(**options):
        @app.task(base=RedlockTask, name="shop.bill", shared=False, lock_key="c:{n}", **options)
        def bill(n):
            app.ran.append((n, current_lock().name, current_lock().fence is not None))
            return n * 10

        return bill

    return declare


@pytest.mark.parametrize("how", ["map", "starmap"])
def test_each_element_has_its_lock(app, quorum, declare, how):
    bill = declare()
    elements = [ELEMENT[how](n) for n in (1, 2, 3, 1)]
    with quorum.hold("c:2"):
        first, skipped, *rest = getattr(bill, how)(elements).apply().get()
    assert (first, *rest) == (10, 30, 10)
    assert type(skipped) is dict  # for every result serializer
    assert (skipped["skipped"], skipped["lock"]) == ("conflict", "c:2")
    assert app.ran == [(n, f"c:{n}", True) for n in (1, 3, 1)]
    assert all(quorum.holder(f"c:{n}") is None for n in (1, 2, 3))


def test_chunks_are_made_of_starmaps(app, quorum, declare):
    app.conf.task_always_eager = True
    bill = declare()
    with quorum.hold("c:2"):
        ((first, skipped), (last,)) = bill.chunks([(1,), (2,), (3,)], 2).apply_async().get()
    assert (first, last) == (10, 30)
    assert skipped["skipped"] == "conflict"


@pytest.mark.parametrize("policy", ["fail", "retry", "reschedule"])
def test_an_element_that_cannot_come_later_fails_the_whole(app, quorum, declare, policy):
    """As with ``apply``; the elements before it have run."""
    bill = declare(on_conflict=policy)
    with quorum.hold("c:2"), pytest.raises(LockTaken):
        bill.map([1, 2, 3]).apply().get()
    assert [n for n, *_ in app.ran] == [1]


@pytest.mark.parametrize("error", [ValueError, Ignore, Reject])
def test_what_an_element_raises_ends_the_whole(app, quorum, error):
    @app.task(base=RedlockTask, name="shop.bill", shared=False)
    def bill(n):
        app.ran.append(n)
        if n == 2:
            raise error("two")

    whole = app.tasks["celery.map"]
    with pytest.raises(error):
        whole(bill.s(), [1, 2, 3])
    assert app.ran == [1, 2]
    assert quorum.holder(bill.s(2)) is None


def test_a_direct_call_within_an_element_is_one(app, quorum):
    @app.task(base=RedlockTask, name="shop.inner", shared=False)
    def inner(n):
        return current_lock().name

    @app.task(base=RedlockTask, name="shop.outer", shared=False, lock_key="outer:{n}")
    def outer(n):
        return inner(n)

    assert outer.map([1]).apply().get() == ["outer:1"]


def test_a_class_of_its_own_is_called_once(app, quorum):
    calls = []

    class Base(RedlockTask):
        abstract = True

        def __call__(self, *args, **kwargs):
            calls.append(current_lock().name)
            return super().__call__(*args, **kwargs)

    @app.task(base=Base, name="shop.bill", shared=False, lock_key="c:{n}")
    def bill(n):
        return n

    assert bill.map([1, 2]).apply().get() == [1, 2]
    assert calls == ["c:1", "c:2"]


def test_without_locks_elements_are_called_as_celery_does(app, declare):
    @app.task(name="shop.plain", shared=False)
    def plain(n):
        return n

    @app.task(base=RedlockTask, name="shop.off", shared=False)
    def off(n):
        return n

    assert plain.map([1, 2]).apply().get() == [1, 2]
    with locks_disabled():
        assert off.map([1, 2]).apply().get() == [1, 2]


def test_celerys_own_tasks_are_none_of_ours(quorum, app):
    """With ``task_cls`` the tasks that map are of our class, too."""
    app.Task = RedlockTask

    @app.task(name="shop.bill", shared=False, lock_key="c:{n}")
    def bill(n):
        return current_lock().name

    assert bill.map([1, 2]).apply().get() == ["c:1", "c:2"]
