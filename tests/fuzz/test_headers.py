"""
Headers that were forged or broken on the way: harmless to others' locks, markers and bodies.

Anybody who may publish writes them. A delivery is made as a worker makes it, in its parent and in
its child, and everything that is then put to the lock nodes is noted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_redlock import LockTaken, RedlockTask
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.records import Keys, line_key
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.waiting.waiting import LEAVE, WAIT
from celery_redlock.plugin import plugin_for
from celery_redlock.task.execution import calls
from celery_redlock.task.execution.requeue import headers_of
from celery_redlock.task.messages.delivery import Delivery, execution_id
from celery_redlock.task.messages.delivery_info import hide
from celery_redlock.task.messages.envelope import PARSERS, Envelope
from celery_redlock.task.messages.reservation import Reservation
from celery_redlock.task.messages.waiting import LONGEST_BY_ITSELF, Waiting, Wakes
from celery_redlock.task.worker import registration
from celery_redlock.task.worker.forced_ends import RedlockRequest
from celery_redlock.task.worker.waiting_room import room_of
from celery_redlock.unique.reservations import Reservations
from celery_redlock.unique.reserving import Started
from fuzz.hostile import JSON, TEXTS
from support.fakes import Ears

MINE, FOREIGN = "id-of-this-task", "id-of-another-task"
TOKEN, OWNER = "a" * 40, "b" * 32
LOCK = "precious"
#: Of a message that says to have waited for another lock.
WAITS = {"name": "another", "since": 0, "times": 1}
#: What a forger would try, as far as it is known how it works.
TRIED = st.sampled_from(
    [
        [LOCK, TOKEN, "finished"],
        [LOCK, TOKEN, "success"],
        ["another", TOKEN, "finished"],
        [LOCK, OWNER, "finished"],
        [LOCK, TOKEN, "done"],
        ["", TOKEN, "finished"],
        ["\ud800", TOKEN, "finished"],
        ["entry", "2026-03-01T12:30:15.250+00:00", "buffer_one"],
        ["entry", "2026-03-01T12:30:15.250+00:00", "allow"],
        OWNER,
        TOKEN,
        {"redlock_owner": OWNER},
        {"redlock": {"v": 1, "task_id": MINE, "reservation": [LOCK, TOKEN, "finished"]}},
        -1,
        -(10**400),
        True,
    ]
)
#: Headers that we or Celery's request take an attribute from, and some of ours that are none.
NAMES = (
    st.sampled_from(["redlock", "redlock_owner", "redlock_woken"])
    | st.sampled_from(
        ["_redlock", "_protected", "headers", "is_eager", "called_directly", "parent_id", "root_id"]
    )
    | st.sampled_from(
        ["replaced_task_nesting", "x-death", "stamps", "lock", "merged", "delivery_info"]
    )
)
#: That a task waits, as it is written, and as nobody would write it.
WAITING = (
    TRIED
    | JSON
    | st.fixed_dictionaries(
        {
            "name": st.sampled_from(["another", LOCK, "", "x" * 200, "\ud800"]) | TEXTS | JSON,
            "since": st.sampled_from([0, 1.7e9, -1, 1e300, True]) | st.floats() | JSON,
            "times": st.sampled_from([1, 0, -1, 2**31 - 1, 2**31, 10**400, True]) | JSON,
        },
        optional={
            "woken": st.sampled_from([True, False, "release", "", "free", 1]) | JSON,
            "limit": st.sampled_from([1, 9999]) | JSON,
        },
    )
)
#: What stands in ours.
OURS = st.fixed_dictionaries(
    {"v": st.just(1) | JSON, "task_id": st.sampled_from([MINE, FOREIGN]) | JSON},
    optional={
        **dict.fromkeys(PARSERS, TRIED | JSON),
        "waiting": WAITING,
    },
)
FORGED = st.dictionaries(NAMES, TRIED | OURS | JSON, min_size=1, max_size=4) | st.builds(
    lambda ours: {"redlock": ours}, OURS
)


def forge(**fields):
    return {"redlock": {"v": 1, "task_id": MINE, **fields}}


def reservation_in(forged):
    ours = forged.get("redlock")
    told = ours.get("reservation") if isinstance(ours, dict) else None
    return told[:2] if isinstance(told, list) else None


class AtOnce:
    def __init__(self, target, **_):
        self.start = target


class Nodes:
    """
    Stands in for `Redlock`: notes what is put to the nodes.

    Attributes:
        taken: Whether somebody else holds every lock.
        listener: What hears when a lock may be free; None where nothing does.
    """

    listener = None

    def __init__(self):
        self.rules = Rules()
        self.driver = self
        self.labels = ("n",)
        self.begin(taken=False)

    def begin(self, *, taken):
        self.taken = taken
        self.wanted, self.given_back, self.ended, self.marked, self.started = [], [], [], [], []
        self.told = []

    def take(self, wanted, on_lost=None):
        self.wanted.append(wanted)
        if self.taken:
            raise LockTaken(wanted.name, {}, {"token": TOKEN[:8], "task_id": FOREIGN, "ttl": 5.0})
        token = (wanted.owner or "") + "c" * (40 - len(wanted.owner or ""))
        return HeldLock(Lease(wanted.name, token, 7, 30.0, 1e12, 0.0, wanted.info), on_lost)

    def give_back(self, held, *, keep=0.0, marker=None, waits=False):
        self.given_back.append((held.name, held.token, marker))

    def tell(self, request):
        self.told.append(request)

    def ask_all(self, asked):
        self.told += [ask.request for ask in asked]
        return [[None] for _ in asked]

    def mark(self, marker, *, wait=False):
        self.marked.append(marker)

    def inspect(self, name):
        return []

    def release_for(self, name, owner, **_):
        self.given_back.append((name, owner, None))
        return "RELEASED"

    def start(self, name, token, begun, *, wait):
        self.ended.append((name, token))
        self.started.append((name, token))
        return Started()

    def end(self, name, token, how, *, life=0.0, wait=False):
        self.ended.append((name, token))


@pytest.fixture(scope="module", autouse=True)
def _markers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reservations, "on", lambda locks: locks)
        yield


class Stand:
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

    def receive(self, task, forged):
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
        return RedlockRequest(message, app=self.app, task=task, hostname="w@h", decoded=False)

    def deliver(self, task, forged):
        self.ran = 0
        request = self.receive(task, forged)
        trace = build_tracer(task.name, task, app=self.app)
        with contextlib.suppress(KeyError):
            self.app.backend.forget(MINE)
        trace(MINE, (), {}, dict(request._request_dict))
        return request


@pytest.fixture(scope="module")
def stand():
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
    nodes, own = stand.nodes, request._delivery.execution
    assert stand.ran <= 0 if taken else stand.ran <= len(nodes.wanted) <= 1
    assert all(wanted.name == LOCK for wanted in nodes.wanted)
    assert all(wanted.owner not in (OWNER, TOKEN[:32]) for wanted in nodes.wanted)
    assert request._delivery.owner not in (OWNER, TOKEN[:32])
    for name, token, marker in nodes.given_back:
        assert (name, token[:32]) == (LOCK, request._delivery.owner)
        assert marker is None or marker.name == own
    assert {marker.name for marker in nodes.marked} <= {own}
    assert all([name, token] == reservation_in(forged) for name, token in nodes.ended)
    assert {name for name, _ in nodes.started} <= {LOCK}
    assert {request.script for request in nodes.told} <= {LEAVE}
    assert all(own.encode() in request.arguments[0] for request in nodes.told)


@settings(max_examples=120)
@given(forged=FORGED, taken=st.booleans(), merges=st.booleans())
@example(forged={"_redlock": True}, taken=True, merges=False)
@example(forged={"_redlock": {}}, taken=True, merges=False)
@example(forged={"called_directly": True}, taken=True, merges=False)
@example(forged={"is_eager": True}, taken=True, merges=False)
@example(forged={"is_eager": True}, taken=False, merges=True)
@example(forged={"redlock_owner": OWNER}, taken=False, merges=False)
@example(forged=forge(reservation=[LOCK, TOKEN, "finished"]), taken=False, merges=True)
@example(forged=forge(reservation=["another", TOKEN, "finished"]), taken=False, merges=True)
@example(forged=forge(reschedules=10**4300), taken=True, merges=False)
@example(forged=forge(waiting=WAITS), taken=False, merges=False)
def test_a_forged_message_harms_nobody(stand, forged, taken, merges):
    assert_harmless(stand, stand.rerun if merges else stand.task, forged, taken=taken)


@settings(max_examples=60)
@given(forged=FORGED)
@example(forged={"headers": 5})
@example(forged={"headers": []})
@example(forged={"headers": "text"})
@example(forged=forge(reschedules=-(10**400)))
@example(forged=forge(reservation={"a": 1}))
@example(forged=forge(waiting=WAITS))
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
        "celery_redlock.task.worker.forced_ends.mint_owner",
        lambda request: request.setdefault("redlock_owner", OWNER),
    )
    with pytest.raises(AssertionError):
        assert_harmless(stand, stand.task, {"redlock_owner": OWNER}, taken=False)
    monkeypatch.undo()
    monkeypatch.setattr(calls, "is_execution", lambda _, request, __: "lock" not in vars(request))
    with pytest.raises(AssertionError):
        assert_harmless(stand, stand.task, {"lock": True}, taken=True)
    monkeypatch.undo()
    forged = Reservation("another", "d" * 40, "finished")
    monkeypatch.setitem(PARSERS, "reservation", ("reservation", lambda _: forged))
    with pytest.raises(AssertionError):
        assert_harmless(
            stand, stand.rerun, forge(reservation=[LOCK, TOKEN, "finished"]), taken=False
        )


@settings(max_examples=60)
@given(headers=st.dictionaries(NAMES, TRIED | JSON) | JSON, task_id=TEXTS | st.just(MINE))
@example(headers=5, task_id=MINE)
@example(headers=[1], task_id=MINE)
@example(headers="text", task_id=MINE)
def test_headers_of_any_shape_are_read(headers, task_id):
    request = SimpleNamespace(headers=headers, delivery_info=None)
    assert isinstance(headers_of(request), dict)
    hide(request)
    if isinstance(headers, dict):
        assert "id" not in (request.headers or {}).get("redlock", {})


@settings(max_examples=200)
@given(header=OURS | TRIED | JSON, task_id=TEXTS | st.just(MINE))
def test_an_envelope_of_any_shape_is_read(header, task_id):
    found = Envelope.of(header, task_id)
    if found == Envelope():
        return
    written = found.header(task_id)["redlock"]
    assert {**header, **written, "v": header["v"]} == header
    assert Envelope.of(json.loads(json.dumps(written)), task_id) == found
    assert len(json.dumps(written)) < 10**7


@settings(max_examples=200)
@given(value=WAITING)
@example(value={"name": LOCK, "since": float("nan"), "times": 1})
@example(value={"name": LOCK, "since": 1.7e9, "times": True})
@example(value={"name": LOCK, "since": 1.7e9, "times": 1, "more": 1})
@example(value={"name": LOCK, "since": 1.7e9, "times": 1, "woken": 1})
@example(value={"name": LOCK, "since": 1.7e9, "times": 1, "woken": []})
def test_a_task_that_waits_says_so_in_full_or_not_at_all(value):
    found = Waiting.of(value)
    if found is None:
        return
    assert value | found.parts == value
    assert Waiting.of(json.loads(json.dumps(found.parts))) == found
    assert 1 <= found.comes_by_itself(math.inf) <= LONGEST_BY_ITSELF
    for wakes_it in Wakes:
        again = Waiting.again(found, found.name, wakes_it)
        assert (again.since, Waiting.of(again.parts)) == (found.since, again)


@settings(max_examples=100)
@given(value=WAITING)
@example(value={"name": LOCK, "since": 0, "times": 1, "limit": 9999})
@example(value=WAITS)
def test_a_forged_message_waits_for_the_lock_of_its_task_alone(stand, value):
    ears = Ears()
    enter, lines = ears.enter, []
    ears.enter = lambda one: (lines.append(one.line), enter(one))
    stand.nodes.begin(taken=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stand.nodes, "listener", ears)
        patch.setattr(registration, "threading", SimpleNamespace(Thread=AtOnce))
        in_a_while = (datetime.now(timezone.utc) + timedelta(minutes=1)).isoformat()
        request = stand.receive(stand.task, {"eta": in_a_while, **forge(waiting=value)})
        room_of(stand.app).clear()
    told = [asked for asked in stand.nodes.told if asked.script is WAIT]
    waits = Waiting.of(value)
    enters = waits is not None and waits.name == LOCK and waits.wakes_it is not Wakes.NOTHING
    line = line_key(stand.nodes.rules.prefix, LOCK)
    assert lines == [line] * enters
    assert len(told) == 2 * enters  # it came, and left
    lock = Keys.of(stand.nodes.rules.prefix, LOCK).lock
    for asked in told:
        assert asked.keys[0] == line
        assert asked.arguments[0] == request._delivery.execution.encode()
        assert asked.arguments[2] == b"0001"
        assert set(asked.keys[4:]) <= {lock}


@settings(max_examples=60)
@given(info=st.none() | st.dictionaries(NAMES, TRIED | JSON))
@example(info={"redlock_owner": TOKEN})
@example(info={"redlock_owner": OWNER + "\n"})
@example(info={"redlock_owner": OWNER.upper()})
@example(info={"redlock_woken": "yes"})
@example(info={"redlock_woken": "yes\n"})
@example(info={"redlock_woken": True})
@example(info={"redlock_woken": ["yes"]})
def test_what_the_parent_hands_over_is_well_formed_or_none(stand, info):
    told = dict(info or {})
    delivery = Delivery.of(stand.task, {"delivery_info": info}, "w@h")
    owner = delivery.owner
    hide(SimpleNamespace(headers=None, delivery_info=info))
    assert owner is None or (owner == told["redlock_owner"] and len(owner) == 32)
    assert delivery.was_woken is (told.get("redlock_woken") == "yes")
    assert not {"redlock_owner", "redlock_woken"} & set(info or {})


@settings(max_examples=60)
@given(holder=st.dictionaries(st.sampled_from(["token", "execution", "since", "task_id"]), JSON))
def test_a_parent_knows_its_own_by_the_whole_beginning(holder):
    delivery = Delivery(MINE, Envelope(), "e" * 32, may_be_repeated=True, owner=OWNER)
    if holder.get("token") not in (OWNER[:n] for n in range(1, 33)):
        assert not delivery.is_owner(holder)


@settings(max_examples=60)
@given(task_id=TEXTS, retries=JSON, nesting=JSON)
def test_an_execution_has_a_name_whatever_a_message_says(task_id, retries, nesting):
    own = execution_id("t", task_id, "", retries, nesting)
    assert re.fullmatch("[0-9a-f]{32}", own)
    assert own != execution_id("u", task_id, "", retries, nesting)
    assert own != execution_id("t", task_id + "x", "", retries, nesting)
