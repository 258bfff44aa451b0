"""What `apply_async` returns: its fields go where it goes, and its end disturbs nobody."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from celery import Celery
from celery.contrib.abortable import AbortableAsyncResult, AbortableTask
from celery.result import EagerResult, result_from_tuple
from celery.utils import uuid

import celery_redlock
from celery_redlock import RedlockTask, UniqueResult
from celery_redlock.task.publish.result import unique
from celery_redlock.testing import locks_disabled

FIELDS = {"duplicate": True, "holder_id": "the holder", "lock_name": "the name"}


@pytest.fixture
def app():
    app = Celery("results", broker="memory://", backend="cache+memory://", set_as_current=True)
    yield app
    app.close()


@pytest.fixture
def task(app):
    @app.task(base=RedlockTask, name="double", shared=False, unique_until="finished")
    def double(number):
        if number < 0:
            raise ValueError(number)
        return 2 * number

    return double


@pytest.fixture
def result(task):
    result = task.AsyncResult("its id", parent=task.AsyncResult("its parent"))
    return unique(result, **FIELDS)


def fields(result):
    return {name: getattr(result, name) for name in FIELDS}


# -- it goes places --------------------------------------------------------------------------


WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle {n}": lambda it, n=n: pickle.loads(pickle.dumps(it, n))
        for n in range(pickle.HIGHEST_PROTOCOL + 1)
    },
    "twice": lambda it: copy.copy(pickle.loads(pickle.dumps(copy.deepcopy(it)))),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_a_copy_has_all_fields(result, way):
    other = way(result)
    assert other is not result
    assert type(other) is UniqueResult
    assert (other.id, other.parent.id, other) == ("its id", "its parent", result)
    assert fields(other) == FIELDS


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_a_copy_of_one_that_is_no_duplicate_says_so_too(task, way):
    other = way(unique(task.AsyncResult("its id"), lock_name="the name"))
    assert fields(other) == {"duplicate": False, "holder_id": "its id", "lock_name": "the name"}


def test_a_changed_copy_leaves_the_first_as_it_is(result):
    other = copy.copy(result)
    other.duplicate, other.holder_id, other.lock_name = False, "another", None
    assert fields(result) == FIELDS


def test_its_tuple_gives_celerys_own_result(app, result):
    told = json.loads(json.dumps(result.as_tuple()))
    assert told == [["its id", [["its parent", None], None]], None]
    back = result_from_tuple(told, app)
    assert (back, back.parent) == (result, result.parent)
    assert back.as_tuple() == result.as_tuple()
    assert result_from_tuple(result, app) is result


def test_its_id_gives_the_same_result_again(app, task, result):
    assert app.AsyncResult(result.id) == result
    again = task.AsyncResult(result.id)
    assert (type(again), again) == (UniqueResult, result)
    assert fields(again) == {"duplicate": False, "holder_id": "its id", "lock_name": None}
    assert hash(again) == hash(result)
    assert {again: "found"}[result] == "found"


def test_it_reads_what_the_backend_stores(app, result):
    app.backend.store_result("its id", 42, "SUCCESS")
    for way in (lambda it: it, *WAYS.values()):
        other = way(result)
        assert (other.state, other.result, other.get(timeout=60)) == ("SUCCESS", 42, 42)


def test_celerys_own_result_is_made_one(app, task):
    """What `unique` is given is not copied, but told what there is to say."""
    own = task.AsyncResult("its id")
    assert unique(own, **FIELDS) is own
    assert fields(own) == FIELDS


# -- eager ---------------------------------------------------------------------------------------


@pytest.fixture
def eager(app, task):
    app.conf.task_always_eager = True
    with locks_disabled():
        yield task


def test_an_eager_result_is_both(eager):
    for result in (eager.delay(2), eager.apply_async((2,)), eager.s(2).apply_async()):
        assert isinstance(result, EagerResult)
        assert isinstance(result, UniqueResult)
        assert fields(result) == {"duplicate": False, "holder_id": result.id, "lock_name": None}
        assert (result.get(), result.result, result.state) == (4, 4, "SUCCESS")
        assert result.ready()
        assert result.successful()


def test_an_eager_failure_is_raised_by_get(eager):
    result = eager.delay(-1)
    assert (result.state, result.duplicate) == ("FAILURE", False)
    with pytest.raises(ValueError, match="-1"):
        result.get()
    assert isinstance(result.get(propagate=False), ValueError)


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_a_copy_of_an_eager_result_still_has_its_value(eager, way):
    result = eager.delay(2)
    other = way(result)
    assert isinstance(other, EagerResult)
    assert isinstance(other, UniqueResult)
    assert (other.id, other.get(), other.state) == (result.id, 4, "SUCCESS")
    assert fields(other) == fields(result)


# -- its end --------------------------------------------------------------------------------------


#: Frees results by their last reference and by the collector of cycles, and tells where, and
#: when, the backend was asked to cancel what waits for them. The stand-in of the backend gives
#: way, as one does that waits for a socket.
FREE = """
import gc, json, sys, threading, time
from types import SimpleNamespace
from celery import Celery
from celery.contrib.abortable import AbortableAsyncResult
from celery.result import AsyncResult
from celery_redlock import UniqueResult
from celery_redlock.task.publish.result import FreeResultsLater

try:
    from greenlet import getcurrent
except ImportError:
    getcurrent = lambda: None

def here():
    return threading.get_ident(), id(getcurrent())

def remove(result):
    began.append((result.id, here()))
    time.sleep(0.01)  # gives way to other greenlets
    ended.append(result.id)
    return result

began, ended, told = [], [], {}
app = Celery("results", broker="memory://", backend="cache+memory://")
backend = app.backend
backend.remove_pending_result = remove

def free(name, kind, in_a_cycle):
    result = kind(name, backend=backend, app=app)
    if in_a_cycle:
        result.itself = result
    del result
    gc.collect()
    told[name] = {
        "at once": name in ended,
        "not yet": name not in [id for id, _ in began],
    }
    return here()

def run_all():
    gc.disable()
    free_each({"before": AsyncResult})
    FreeResultsLater(SimpleNamespace(app=app))
    ours = {"UniqueResult": UniqueResult, "AbortableAsyncResult": AbortableAsyncResult}
    free_each({**ours, "AsyncResult": AsyncResult, "app's": app.AsyncResult})
    print(json.dumps(told))

def free_each(kinds):
    for kind_name, kind in kinds.items():
        for in_a_cycle in (False, True):
            name = f"{kind_name}{' in a cycle' if in_a_cycle else ''}"
            where = run(free, name, kind, in_a_cycle)
            limit = time.monotonic() + 60
            while name not in ended and time.monotonic() < limit:
                time.sleep(0.01)  # gives way to other greenlets
            cancels = [there for id, there in began if id == name]
            told[name].update(times=len(cancels), same=cancels == [tuple(where)])
"""
IN_A_THREAD = """
def run(function, *args):
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*args)))
    thread.start()
    thread.join(60)
    return found[0]

run_all()
"""
IN_A_GREENLET = """
keep = []  # or the next greenlet might have the id of one that is gone

def run(function, *args):
    keep.append(spawn(function, *args))
    return getattr(keep[-1], "wait" if "eventlet" in sys.modules else "get")()

run_all()
"""
#: What frees the results: how the process begins, and how it goes on.
SETUPS = {
    "threads": ("", IN_A_THREAD),
    "eventlet, not patched": ("import eventlet", IN_A_THREAD),
    "eventlet": ("from eventlet import monkey_patch, spawn; monkey_patch()", IN_A_GREENLET),
    "gevent": ("from gevent import monkey, spawn; monkey.patch_all()", IN_A_GREENLET),
}


def freed(setup):
    """Return what a process of its own tells of the results that were freed in it."""
    package = setup.split(",", maxsplit=1)[0]
    if package != "threads" and not find_spec(package):
        pytest.skip(f"{package} is not installed")
    before, after = SETUPS[setup]
    path = [str(Path(celery_redlock.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{before}\n{FREE}\n{after}"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr, ran.stderr
    return json.loads(ran.stdout)


AT_ONCE = {"at once": True, "not yet": False, "times": 1, "same": True}
SOON = {"at once": False, "not yet": True, "times": 1, "same": False}


def test_in_an_eventlet_worker_no_result_does_io_where_it_is_freed():
    """
    The backend is asked soon after, once, in a greenlet of its own.

    Twin: before the worker's step Celery's result asks where it is freed. The collector of cycles
    may do so while eventlet waits for a socket in that greenlet, and the wait within the wait
    hangs it.
    """
    told = freed("eventlet")
    assert [told.pop(name) for name in ("before", "before in a cycle")] == [AT_ONCE] * 2
    assert len(told) == 8
    assert told == dict.fromkeys(told, SOON)


@pytest.mark.parametrize("setup", [name for name in SETUPS if name != "eventlet"])
def test_elsewhere_its_end_is_told_at_once(setup):
    """With threads, with eventlet merely imported, under gevent: as Celery's own result does."""
    told = freed(setup)
    assert len(told) == 10
    assert told == dict.fromkeys(told, AT_ONCE)


def test_an_eager_result_ends_in_silence(eager):
    """It waits for nothing and has no backend to tell; an error in there would fail this test."""
    result = eager.delay(1)
    assert result.backend is None
    del result
    gc.collect()


# -- of tasks that have other bases --------------------------------------------------------


@pytest.mark.parametrize("bases", [(RedlockTask, AbortableTask), (AbortableTask, RedlockTask)])
def test_a_task_that_can_be_aborted_is_aborted(app, bases):
    both = type("Both", bases, {"abstract": True})

    @app.task(base=both, name="long", bind=True, shared=False)
    def long(self):
        return self.is_aborted()

    task, task_id = app.tasks["long"], uuid()
    result = task.AsyncResult(task_id)
    result.abort()
    assert task.is_aborted(task_id=task_id)
    assert isinstance(result, AbortableAsyncResult)
    if bases[0] is RedlockTask:
        assert (result.duplicate, result.holder_id, result.lock_name) == (False, task_id, None)
        again = pickle.loads(pickle.dumps(result))
        assert (type(again), again.id, again.holder_id) == (type(result), task_id, task_id)
