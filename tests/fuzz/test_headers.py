"""
Headers that were forged or broken on the way: harmless to others' locks, markers and bodies.

Anybody who may publish writes them. A delivery is made as a worker makes it, in its parent and in
its child, and everything that is then put to the lock nodes is noted.
"""

from __future__ import annotations

import contextlib
import json
import logging
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_redlock import LockTaken, RedlockTask
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.queued import Started
from celery_redlock.plugin import plugin_for
from celery_redlock.task import queued as queued_module
from celery_redlock.task.base import RedlockTask as Base
from celery_redlock.task.delivery import execution_id, take_owner
from celery_redlock.task.forced_ends import ForcedEnd, RedlockRequest
from celery_redlock.task.queued import QueuedTask
from celery_redlock.task.redelivery import headers_of, times_put_off
from fuzz.hostile import JSON, TEXTS

MINE, FOREIGN = "id-of-this-task", "id-of-another-task"
TOKEN, OWNER = "a" * 40, "b" * 32
LOCK = "precious"
#: What a forger would try, as far as it is known how it works.
TRIED = st.sampled_from(
    [
        [LOCK, TOKEN, MINE, "finished"],
        [LOCK, TOKEN, MINE, "success"],
        [LOCK, TOKEN, FOREIGN, "finished"],
        [LOCK, OWNER, MINE, "finished"],
        [LOCK, TOKEN, MINE, "done"],
        ["", TOKEN, MINE, "finished"],
        ["\ud800", TOKEN, MINE, "finished"],
        ["entry", "2026-03-01T12:30:15.250+00:00", "buffer_one", MINE],
        ["entry", "2026-03-01T12:30:15.250+00:00", "allow", MINE],
        OWNER,
        TOKEN,
        {"redlock_owner": OWNER},
        {"redlock_queued": [LOCK, TOKEN, MINE, "finished"]},
        -1,
        -(10**400),
        True,
    ]
)
#: Headers that we or Celery's request take an attribute from, and some of ours that are none.
NAMES = (
    st.sampled_from(
        ["redlock_queued", "redlock_slot", "redlock_put_off", "redlock_owner", "redlock"]
    )
    | st.sampled_from(
        ["_redlock", "_protected", "headers", "is_eager", "called_directly", "parent_id", "root_id"]
    )
    | st.sampled_from(
        ["replaced_task_nesting", "x-death", "stamps", "lock", "merged", "delivery_info"]
    )
)
FORGED = st.dictionaries(NAMES, TRIED | JSON, min_size=1, max_size=4)


class Nodes:
    """
    Stands in for `Redlock`: notes what is put to the nodes.

    Attributes:
        taken: Whether somebody else holds every lock.
    """

    def __init__(self):
        self.rules = SimpleNamespace(ttl=30.0)
        self.labels = ("n",)
        self.queued = self
        self.begin(taken=False)

    def begin(self, *, taken):
        """Forget what was."""
        self.taken = taken
        self.wanted, self.given_back, self.ended, self.marked = [], [], [], []

    def take(self, wanted, on_lost=None):
        """Grant the lock, or refuse it."""
        self.wanted.append(wanted)
        if self.taken:
            raise LockTaken(wanted.name, {}, {"token": TOKEN[:8], "task_id": FOREIGN, "ttl": 5.0})
        token = (wanted.owner or "") + "c" * (40 - len(wanted.owner or ""))
        return HeldLock(Lease(wanted.name, token, 7, 30.0, 1e12, 0.0, wanted.info), on_lost)

    def give_back(self, held, *, keep=0.0, marker=None):
        """Note whose lock is given back."""
        self.given_back.append((held.name, held.token, marker))

    def mark(self, marker, *, wait=False):
        """Note what is remembered."""
        self.marked.append(marker)

    def inspect(self, name):
        """Nobody holds it."""
        return []

    def release_for(self, name, owner, **_):
        """Note for whom it is released."""
        self.given_back.append((name, owner, None))
        return "RELEASED"

    def start(self, name, token, begun, *, wait):
        """Note which marker is started."""
        self.ended.append((name, token))
        return Started()

    def end(self, name, token, how, *, life=0.0, wait=False):
        """Note which marker ends."""
        self.ended.append((name, token))


class Stand:
    """A worker's parent and child in one process."""

    def __init__(self):
        self.app = Celery("t", broker="memory://", backend="cache+memory://", set_as_current=False)
        self.app.conf.redlock_nodes = ["redis://127.0.0.1:1/0"]
        self.app.conf.redlock_observers = []
        self.nodes, self.ran = Nodes(), 0
        plugin = plugin_for(self.app)
        plugin._locks = self.nodes

        def work(x=1):
            self.ran += 1

        options = {"base": RedlockTask, "shared": False, "lazy": False, "lock_key": LOCK}
        self.task = self.app.task(name="shop.work", **options)(work)
        self.rerun = self.app.task(
            name="shop.rerun", unique_until="finished", on_duplicate="rerun", **options
        )(work)
        self.sent = []
        for task in (self.task, self.rerun):
            task.apply_async = lambda *args, **options: self.sent.append(options)

    def deliver(self, task, forged):
        """Deliver a message with *forged* headers; return the request that the parent has."""
        self.ran = 0
        headers = {"id": MINE, "task": task.name, "retries": 0, "parent_id": None, **forged}
        message = SimpleNamespace(
            headers=headers,
            body=b"[[], {}, {}]",
            payload=([], {}, {}),
            content_type="application/json",
            content_encoding="utf-8",
            delivery_info={"exchange": "", "routing_key": "celery"},
            properties={"delivery_info": {"redlock_owner": OWNER}, "redlock_owner": OWNER},
        )
        request = RedlockRequest(message, app=self.app, task=task, hostname="w@h", decoded=False)
        trace = build_tracer(task.name, task, app=self.app)
        with contextlib.suppress(KeyError):
            self.app.backend.forget(MINE)
        trace(MINE, (), {}, dict(request._request_dict))
        return request


@pytest.fixture(scope="module")
def stand():
    """A worker, as it were."""
    level, logger = logging.CRITICAL + 1, logging.getLogger("celery")
    before, logger.level = logger.level, level
    it = Stand()
    yield it
    logger.level = before
    it.app.close()


def assert_harmless(stand, task, forged, *, taken):
    """
    Fail if a delivery with *forged* headers does what it must not.

    With the lock *taken* no body runs; else it runs under a lock that was asked for, and only that
    lock is given back. A marker is touched by the token in the message alone.
    """
    stand.nodes.begin(taken=taken)
    request = stand.deliver(task, forged)
    nodes = stand.nodes
    assert stand.ran <= 0 if taken else stand.ran <= len(nodes.wanted) <= 1
    assert all(wanted.name == LOCK for wanted in nodes.wanted)
    assert all(wanted.owner not in (OWNER, TOKEN[:32]) for wanted in nodes.wanted)
    assert request._owner not in (OWNER, TOKEN[:32])
    for name, token, marker in nodes.given_back:
        assert (name, token[:32]) == (LOCK, request._owner)
        assert marker is None or marker.name.startswith(f"{MINE}/")
    for marker in nodes.marked:
        assert marker.name.startswith(f"{MINE}/")
    told = {json.dumps(forged.get(name)) for name in ("redlock_queued", "headers")}
    for name, token in nodes.ended:
        assert any(json.dumps([name, token])[1:-1] in text for text in told)


@settings(max_examples=120)
@given(forged=FORGED, taken=st.booleans(), merges=st.booleans())
@example(forged={"_redlock": True}, taken=True, merges=False)
@example(forged={"_redlock": {}}, taken=True, merges=False)
@example(forged={"called_directly": True}, taken=True, merges=False)
@example(forged={"is_eager": True}, taken=True, merges=False)
@example(forged={"is_eager": True}, taken=False, merges=True)
@example(forged={"redlock_owner": OWNER}, taken=False, merges=False)
@example(forged={"redlock_queued": [LOCK, TOKEN, FOREIGN, "finished"]}, taken=False, merges=True)
@example(forged={"redlock_put_off": -(10**400)}, taken=True, merges=False)
def test_a_forged_message_harms_nobody(stand, forged, taken, merges):
    """No body beside a holder, no lock given back but its own, no marker of another token."""
    assert_harmless(stand, stand.rerun if merges else stand.task, forged, taken=taken)


@settings(max_examples=60)
@given(forged=FORGED)
@example(forged={"headers": 5})
@example(forged={"headers": []})
@example(forged={"headers": "text"})
@example(forged={"redlock_put_off": -(10**400)})
@example(forged={"redlock_queued": {"a": 1}})
def test_a_forged_message_of_a_free_lock_runs_as_any(stand, forged):
    """What makes no sense is passed over; it does not cost the task its run."""
    if forged.get("is_eager") or "_redlock" in forged or "_protected" in forged:
        return
    stand.nodes.begin(taken=False)
    stand.deliver(stand.task, forged)
    assert stand.ran == 1


def test_a_worker_that_believes_a_header_is_seen(stand, monkeypatch):
    """The twins: the owner, the right to run, and the marker, each as the message says."""
    monkeypatch.setattr(
        "celery_redlock.task.forced_ends.mint_owner",
        lambda request: request.setdefault("redlock_owner", OWNER),
    )
    with pytest.raises(AssertionError):
        assert_harmless(stand, stand.task, {"redlock_owner": OWNER}, taken=False)
    monkeypatch.undo()
    monkeypatch.setattr(Base, "_takes_lock", lambda self, request: "lock" not in vars(request))
    with pytest.raises(AssertionError):
        assert_harmless(stand, stand.task, {"lock": True}, taken=True)
    monkeypatch.undo()
    monkeypatch.setattr(
        queued_module.QueuedTask,
        "of",
        classmethod(lambda cls, headers, _: cls("another", "d" * 40, MINE, "finished")),
    )
    with pytest.raises(AssertionError):
        assert_harmless(stand, stand.rerun, {"lock": 1}, taken=False)


@settings(max_examples=60)
@given(headers=st.dictionaries(NAMES, TRIED | JSON) | JSON, task_id=TEXTS | st.just(MINE))
@example(headers=5, task_id=MINE)
@example(headers=[1], task_id=MINE)
@example(headers="text", task_id=MINE)
def test_headers_of_any_shape_are_read(headers, task_id):
    """Nothing is raised; what is found is what was sent, and speaks of this task."""
    found = QueuedTask.of(headers, task_id)
    assert found is None or (found.task_id == task_id and found.header.items() <= headers.items())
    request = SimpleNamespace(headers=headers)
    assert times_put_off(request) >= 0
    assert type(times_put_off(request)) is int
    assert isinstance(headers_of(request), dict)


@settings(max_examples=60)
@given(info=st.none() | st.dictionaries(NAMES, TRIED | JSON))
@example(info={"redlock_owner": TOKEN})
@example(info={"redlock_owner": OWNER + "\n"})
@example(info={"redlock_owner": OWNER.upper()})
def test_an_owner_is_well_formed_or_none(info):
    """And is taken out, so that the body does not see it."""
    told = dict(info or {})
    owner = take_owner(SimpleNamespace(delivery_info=info))
    assert owner is None or (owner == told["redlock_owner"] and len(owner) == 32)
    assert "redlock_owner" not in (info or {})


@settings(max_examples=60)
@given(holder=st.dictionaries(st.sampled_from(["token", "execution", "since", "task_id"]), JSON))
def test_a_parent_knows_its_own_by_the_whole_beginning(holder):
    """A holder that tells anything else is another's, whatever it tells."""
    request = SimpleNamespace(_owner=OWNER)
    end = SimpleNamespace(owner=OWNER)
    if holder.get("token") not in (OWNER[:n] for n in range(1, 33)):
        with contextlib.suppress(TypeError):  # `read_holder` gives text in any case
            assert not RedlockRequest.is_owner(request, holder)
            assert not ForcedEnd._is_ours(end, holder)


@settings(max_examples=60)
@given(task_id=TEXTS, retries=JSON, nesting=JSON)
def test_an_execution_has_a_name_whatever_a_message_says(task_id, retries, nesting):
    """It begins with the task's id, so that no other task is meant."""
    assert execution_id(task_id, retries, nesting).startswith(f"{task_id}/")
