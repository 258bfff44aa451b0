"""
Whatever stands in the keys on the nodes: read, or passed over, and never let loose on a terminal.

Somebody else may have written it: another program, a restored dump, a newer or an older version of
ours. Locks stay what they are, and the operator's tools tell what they can.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from datetime import datetime, timezone
from types import SimpleNamespace

import pytest
import redis
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from celery_redlock import LockTaken, QuorumUnavailable, RedlockTask
from celery_redlock.beat.slot_records import Claim, Slots
from celery_redlock.beat.slot_votes import last_of
from celery_redlock.beat.slots import settled
from celery_redlock.beat.term import led_by, majority_holder
from celery_redlock.errors import LockKeyError
from celery_redlock.events import KINDS, TaskSkipped
from celery_redlock.lock.algorithm.request import LockRequest, MarkerStands
from celery_redlock.lock.algorithm.results import NodeView
from celery_redlock.lock.records import is_ours, object_in, read_holder
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.votes import Vote, VoteKind, holder_of
from celery_redlock.observers.logging import log_event
from celery_redlock.ops import listing
from celery_redlock.ops.as_json import lock_as_json, reserved_as_json
from celery_redlock.ops.cli import redlock
from celery_redlock.ops.inspected import of_child
from celery_redlock.ops.listing import lock_row, reservation_in_words, reservation_row
from celery_redlock.ops.text import in_json as shown_json
from celery_redlock.plugin import plugin_for
from celery_redlock.reading import tally
from celery_redlock.reading.journal import when
from celery_redlock.reading.journal_view import is_refusal_of
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.reading.one_lock import majority_of
from celery_redlock.reading.read_script import reservation_in, stored
from celery_redlock.reading.stored import burst_views, views_of
from celery_redlock.task.messages.delivery import Delivery
from celery_redlock.task.messages.envelope import Envelope
from celery_redlock.task.messages.reservation import newest_call
from celery_redlock.task.messages.slot import Slot
from celery_redlock.words import who
from fuzz.hostile import ACTING, ESCAPES, JSON, in_json

RULES = Rules(ttl=60, max_ttl=60, node_timeout=1.0)
TOKEN = b"a" * 40
FIELDS = ("task", "task_id", "execution", "host", "pid", "since", "renewals", "margin", "entry")
RECORD = (
    "event",
    "at",
    "name",
    "holder",
    "cause",
    "reason",
    "node",
    "due",
    "counts",
    "led",
    "jump",
)
HOLDERS = st.dictionaries(st.sampled_from([*FIELDS, "slot", "ttl", "token"]), JSON)
RECORDS = st.dictionaries(
    st.sampled_from(
        [*RECORD, *FIELDS, "id", "times", "countdown", "merged", "holder_id", "longest"]
    ),
    JSON | HOLDERS | st.sampled_from([*KINDS, "conflict"]),
)
#: What a lock's key may hold: with a token of ours or not, JSON or not.
VALUES = (
    st.builds(bytes.__add__, st.just(TOKEN), HOLDERS.map(in_json))
    | st.builds(bytes.__add__, st.just(TOKEN), st.binary(max_size=20))
    | st.binary(max_size=60)
    | st.sampled_from([b"", TOKEN[:39], TOKEN.upper(), TOKEN + b"[" * 100_000, b"\x1b[31m" * 20])
    | st.sampled_from(ACTING).map(lambda text: TOKEN + in_json({"task_id": text, "host": text}))
)


def is_tame(text):
    return all(line.isprintable() for line in text.split("\n"))


# --- holders -------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(values=st.lists(VALUES, min_size=1, max_size=3))
@example(values=[TOKEN + b'{"since": 1' + b"0" * 400 + b"}"])
@example(values=[TOKEN + b'{"since": "x", "renewals": []}'])
@example(values=[TOKEN + b'{"since": NaN, "pid": Infinity}'])
def test_a_holder_of_any_shape_is_told(values):
    ballot = [Vote(VoteKind.REFUSED, 0, 1.0, value) for value in values]
    told = holder_of(ballot)
    assert all(isinstance(key, str) for key in told)
    for value in values:
        holder = read_holder(value)
        assert len(holder["token"]) <= 8
        (row,) = views_of("n", {"node": stored(0, (value, -1, b"nan", None, None, 0, [], None))})
        assert row.is_foreign is not is_ours(value)
        assert all(cell.isprintable() for cell in lock_row(row, 3))
        json.loads(shown_json(lock_as_json(row, 3)), parse_constant=pytest.fail)
        assert who(holder).isprintable()
        assert led_by(holder).isprintable()


@settings(max_examples=70)
@given(info=HOLDERS, merge=st.booleans())
@example(info={"since": "x"}, merge=False)
@example(info={"renewals": "x"}, merge=True)
@example(info={"since": 10**400}, merge=False)
def test_a_worker_tells_of_its_locks_whatever_they_say(info, merge):
    """`celery inspect redlock_locks` asks the nodes, and they may say anything."""
    app = Celery("t", set_as_current=False)
    app.conf.redlock_nodes = ["redis://127.0.0.1:1/0"]

    def body():
        """Do nothing."""

    task = app.task(base=RedlockTask, name="t", shared=False, lazy=False)(body)
    request = SimpleNamespace(is_owner=lambda holder: True, task=task, name="t", id="i")
    holder = read_holder(TOKEN + in_json(info))
    views = [NodeView("n", holder, 1.0, 7, "")]
    if merge:
        views.append(NodeView("m", read_holder(TOKEN), 1.0, 7, ""))
    told = of_child(request, "n", views, len(views))
    assert told is not None
    json.dumps(told, default=str)


@settings(max_examples=70)
@given(holder=HOLDERS)
@example(holder={"since": 10**400})
@example(holder={"task_id": "\x1b[31m", "host": "\r\nforged"})
def test_a_refusal_is_logged_in_one_tame_line(holder):
    """Who holds the lock is what nodes say; a worker's log is a terminal, too."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("celery_redlock")
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        event = TaskSkipped("n", "t", "id", cause="conflict", holder={**holder, "token": "a" * 8})
        log_event(event)
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
    (line,) = lines
    assert line.isprintable()


#: Of a retry of a task that nobody called.
LONE = Delivery("mine", Envelope(), "0" * 32, may_be_repeated=True, comes_again=True)


@settings(max_examples=60)
@given(holder=HOLDERS)
@example(holder={"task_id": None})
def test_nobody_is_kin_who_does_not_say_so(holder):
    is_same = "task_id" in holder and holder.get("execution") == LONE.execution
    assert LONE.is_same_execution(holder) is is_same
    is_previous = holder.get("task_id") == "mine" and not is_same
    assert LONE.is_previous_execution(holder) is is_previous


@settings(max_examples=80)
@given(holders=st.lists(VALUES | st.just(b""), min_size=1, max_size=3))
def test_beat_asks_nodes_who_may_say_anything(holders):
    views = [NodeView("n", read_holder(value) if value else {}, 1.0, 7, "") for value in holders]
    leader = majority_holder(views)
    assert leader == {} or len(leader["token"]) <= 8
    for view in views:
        assert Slot("entry", 1.7e9).is_run_of_entry(view.holder) in (True, False)
        assert view.since is None or view.since >= 0


# --- markers, slots, records ---------------------------------------------------------------------


@settings(max_examples=70)
@given(
    fields=st.lists(st.none() | VALUES | st.binary(max_size=5), min_size=6, max_size=6),
    lock=st.none() | VALUES,
)
@example(fields=[b"t", b"[" * 100_000, b"9" * 400, b"", b"", b"-7"], lock=None)
def test_a_marker_of_any_shape_is_read(fields, lock):
    found = majority_of([reservation_in(fields, 1_800_000_000_000, lock)], 1)
    if found is not None:
        assert found.left >= 0
        assert found.merged >= 0
        assert isinstance(found.info, dict)
        assert who(found.info).isprintable()
    assert views_of("n", {}) == []


@settings(max_examples=70)
@given(fields=st.lists(st.none() | VALUES | st.binary(max_size=5), min_size=3, max_size=3))
@example(fields=[b"\xff", b"\x1b[31m", b"9" * 15])
@example(fields=[b"i", None, b"9" * 400])
def test_a_burst_of_any_shape_is_told(fields):
    lock = stored(0, (None, -2, None, None, None, 0, [], fields))
    for view in burst_views("n", {"node": lock}):
        assert view.reservation.left > 0
        assert all(cell.isprintable() for cell in reservation_row(view, 1))
        assert reservation_in_words(view.reservation).isprintable()
        json.loads(shown_json(reserved_as_json(view, 1)), parse_constant=pytest.fail)


@settings(max_examples=70)
@given(arguments=st.binary(max_size=30) | JSON.map(in_json) | st.sampled_from([b"[" * 100_000]))
@example(arguments=b"[" * 100_000)
@example(arguments=b'{"__type__": "uuid", "__value__": 7}')
@example(arguments=b'[[{"__type__": "datetime", "__value__": []}], {}]')
def test_arguments_of_any_shape_are_a_call_or_refused(arguments):
    """What a trigger left on the nodes may be anything by now."""
    try:
        call = newest_call(arguments)
    except LockKeyError:
        return
    assert call is None or (isinstance(call[0], list) and isinstance(call[1], dict))


@settings(max_examples=70)
@given(
    slots=st.lists(st.integers(0, 2**53) | st.sampled_from([0, 1, 253402300800000, 2**53])),
    state=st.sampled_from([b"settled", b"claimed", b"", b"\xff"]),
)
@example(slots=[2**53], state=b"settled")
@example(slots=[1], state=b"claimed")
def test_a_slot_record_of_any_number_is_a_moment_or_none(slots, state):
    """A year that there is not would end the leader's every look."""
    ballot = [Vote(VoteKind.GRANTED, slot, value=state) for slot in slots]
    found = settled(last_of(ballot))
    assert found is None or isinstance(found, datetime)
    assert found is None or found.tzinfo is timezone.utc


def nested(depth):
    return b'{"id": "x%d", "event": "x", "name": %s}' % (depth, b"[" * depth + b"]" * depth)


@settings(max_examples=80)
@given(line=RECORDS.map(in_json) | st.binary(max_size=30) | st.sampled_from([b"[" * 100_000]))
@example(line=b'{"name": "\\ud800", "event": "TaskSkipped"}')
@example(line=b'{"event": "NodeDown", "node": "\\u001b[31m", "reason": "\\u009b2J"}')
@example(line=nested(900))
@example(line=nested(960))
@example(line=nested(985))
def test_a_record_of_any_shape_is_one_tame_line(line):
    record = object_in(line)
    assert isinstance(when(record), float)
    assert listing.line(record).isprintable()
    json.loads(shown_json(record), parse_constant=pytest.fail)
    json.loads(shown_json(record, indent=2), parse_constant=pytest.fail)
    assert is_refusal_of(record, "n") in (True, False)


def test_a_line_that_repeats_what_it_is_told_is_seen(monkeypatch):
    """The twin: without the part that takes controls out."""
    monkeypatch.setattr(listing, "one_line", lambda text: text)
    record = {"event": "NodeDown", "node": ESCAPES[0]}
    assert not listing.line(record).isprintable()


# --- on real nodes --------------------------------------------------------------------------------


@pytest.fixture
def app(five_nodes):
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = [five_nodes[0].url]
    app.conf.redlock_ttl = app.conf.redlock_max_ttl = 60
    app.conf.redlock_node_timeout = 1.0
    app.conf.redlock_observers = []

    @app.task(base=RedlockTask, name="shop.bill", lock_key="n", unique_until="finished",
              on_duplicate="rerun", shared=False)  # fmt: skip
    def bill(x=1):
        """Do nothing."""

    bootstrap(app.conf.redlock_nodes, RULES)
    yield app
    plugin_for(app).locks.close()
    app.close()


def planted(client, value, kind, key):
    client.delete(key)
    if kind == "text":
        client.set(key, value, px=60_000)
    elif kind == "hash":
        names = ("token", "info", "until", "lock", "started", "merged", "version", "by", "newest")
        client.hset(key, mapping=dict.fromkeys((*names, "slot", "state", "fence", "at"), value))
    elif kind == "list":
        client.rpush(key, value)
    else:
        client.xadd(key, {"e": value, "other": value})


KEYS = ("lock:n", "fence:n", "queued:n", "next:n", "marker:id/0/0", "slot:beat/n", "journal")
PLANTED = st.dictionaries(
    st.sampled_from([f"redlock:{key}" for key in KEYS]),
    st.tuples(VALUES | RECORDS.map(in_json), st.sampled_from(["text", "hash", "list", "stream"])),
    min_size=1,
    max_size=4,
)
COMMANDS = (
    ("ls",),
    ("ls", "--json"),
    ("status",),
    ("why", "--name", "n"),
    ("why", "--json", "shop.bill"),
    ("tail", "--no-follow"),
    ("tail", "--no-follow", "--json"),
    ("release", "n", "--token", "aaaaaaaa", "--yes", "--json"),
)


def run(app, *words):
    context = CLIContext(app, no_color=True, workdir=None)
    result = CliRunner().invoke(redlock, list(words), obj=context, color=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(f"{words}: {result.exception!r}") from result.exception
    assert result.exit_code in (0, 1, 2), (words, result.output)
    return result.exit_code, result.stdout


def assert_tame(app, *words):
    _, out = run(app, *words)
    assert is_tame(out), (words, out)
    if "--json" in words and "tail" not in words:
        json.loads(out, parse_constant=pytest.fail)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=PLANTED, command=st.sampled_from(COMMANDS))
@example(
    keys={"redlock:journal": (b'{"id": "1", "event": "TaskSkipped", "name": "\\ud800"}', "stream")},
    command=("why", "--name", "n"),
)
@example(keys={"redlock:journal": (nested(960), "stream")}, command=COMMANDS[6])
@example(keys={"redlock:lock:n": (TOKEN + b'{"host": "\\u001b[31m"}', "text")}, command=COMMANDS[3])
@example(keys={"redlock:queued:n": (b"\x1b[31m", "hash")}, command=COMMANDS[3])
def test_tools_bear_what_is_planted(app, five_nodes, keys, command):
    with redis.Redis.from_url(five_nodes[0].url) as client:
        for key, (value, kind) in keys.items():
            planted(client, value, kind, key)
        assert_tame(app, *command)
        client.delete(*keys)


def test_a_tool_that_prints_what_it_reads_is_seen(app, five_nodes, monkeypatch):
    """The twin: a listing that takes nothing out."""
    monkeypatch.setattr("celery_redlock.ops.listing.one_line", lambda text, *_: str(text))
    value = TOKEN + in_json({"task_id": ESCAPES[0]})
    with redis.Redis.from_url(five_nodes[0].url) as client:
        client.set("redlock:lock:n", value, px=60_000)
    with pytest.raises(AssertionError, match="31m"):
        assert_tame(app, "ls")


def plant_tally(client):
    for hour in (int(time.time() // tally.HOUR), int(time.time() // tally.HOUR) - 1):
        for text in ACTING:
            name = text.encode("utf-8", "replace")
            client.zadd(tally.hour_key("redlock", hour), {name: 0})
            numbers = dict.fromkeys(tally.FIELDS, 10**14)
            examples = dict.fromkeys(
                tally.EXAMPLES, in_json({"at": text, "holder": {"host": text}})
            )
            key = tally.tally_key("redlock", hour, name.decode())
            client.hset(key, mapping={**numbers, **examples, "ttl": b"9" * 400})
        client.zadd(tally.hour_key("redlock", hour), {b"\xff": 0, b"text": 0, b"": 0})
        client.set(tally.tally_key("redlock", hour, "text"), "text")


def test_the_doctor_bears_what_is_planted(app, five_nodes):
    with redis.Redis.from_url(five_nodes[0].url) as client:
        for number, text in enumerate(ACTING):
            client.set(b"redlock:lock:" + text.encode("utf-8", "replace"), TOKEN + in_json(text))
            client.hset(f"redlock:queued:{number}", "token", text.encode("utf-8", "replace"))
            client.xadd("redlock:journal", {"e": in_json({"event": "LeaseLost", "at": text})})
        plant_tally(client)
        for words in (
            *(("doctor",), ("doctor", "--json"), ("ls",), ("tail", "--no-follow")),
            *(("report",), ("report", "--json")),
        ):
            assert_tame(app, *words)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=PLANTED)
@example(keys={"redlock:marker:id/0/0": (b"\xff", "text")})
@example(keys={"redlock:fence:n": (b"nan", "text")})
@example(keys={"redlock:fence:n": (b"1e300", "text")})
@example(keys={"redlock:fence:n": (b"abc", "text"), "redlock:lock:n": (TOKEN, "text")})
@example(keys={"redlock:queued:n": (b"9" * 30, "hash")})
@example(keys={"redlock:slot:beat/n": (b"9" * 30, "hash")})
def test_locks_bear_what_is_planted(app, five_nodes, keys):
    locks = plugin_for(app).locks
    with redis.Redis.from_url(five_nodes[0].url) as client:
        for key, (value, kind) in keys.items():
            planted(client, value, kind, key)
        before = (
            client.get("redlock:lock:n") if client.type("redlock:lock:n") == b"string" else None
        )
        try:
            held = locks.take(LockRequest("n", 20.0, marker="id/0/0"))
        except (LockTaken, QuorumUnavailable, MarkerStands):
            if before is not None:
                assert client.get("redlock:lock:n") == before
        else:
            assert before is None
            assert 0 < held.fence <= 2**53
            locks.give_back(held)
        assert isinstance(locks.inspect("n"), list)
        with contextlib.suppress(QuorumUnavailable):
            Slots.on(locks).look(["beat/n"])
        with contextlib.suppress(QuorumUnavailable):
            claim = Claim("beat/n", 1.7e9, "f" * 40, 7, 60.0, "n")
            Slots.on(locks).claim(claim)
        with contextlib.suppress(QuorumUnavailable, LockKeyError):
            app.tasks["shop.bill"].apply_async()
        client.delete(*keys, "redlock:lock:n", "redlock:fence:n", "redlock:queued:n")
