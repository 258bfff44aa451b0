"""``lock_rate``: what a rate may be, and what it makes of starts on nodes in memory."""

from __future__ import annotations

import contextvars
import itertools
import pickle
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest
from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from celery import Celery, chord
from celery.app.trace import build_tracer
from celery.exceptions import Ignore
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock import (
    ConfigurationError,
    QuorumUnavailable,
    Rate,
    RateExceeded,
    RedlockTask,
    Skipped,
    TooManyDeliveries,
    current_lock,
    events,
)
from celery_redlock.lock.algorithm import acquiring
from celery_redlock.lock.algorithm.participant import Participant
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.held import NotLocked
from celery_redlock.lock.records import RATE, STARTS, own_name, place_name, rate_name, starts_name
from celery_redlock.lock.rules import Rules
from celery_redlock.observers.records import record_of
from celery_redlock.ops.call import limits_in_call
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.sentences import sentence
from celery_redlock.task.rate import FEW, LEAST_SLACK, LONGEST, MANY, MOST_STARTS, rate_of
from celery_redlock.testing import memory_quorum

ids = map(str, itertools.count())
learn_time = Participant.learn_time


# -- what a rate is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "rate"),
    [
        ("5/s", Rate(5, 1)),
        ("999999999/s", Rate(999_999_999, 1)),
        ("100/m", Rate(100, 60)),
        (" 1000 / h ", Rate(1000, 3600)),
        ("7", Rate(7, 1)),
        (7, Rate(7, 1)),
        (Rate(3, 2), Rate(3, 2)),
        (None, None),
    ],
)
def test_a_rate_is_written_as_celery_writes_it(value, rate):
    assert rate_of("shop.bill: lock_rate", value) == rate


@pytest.mark.parametrize(
    "value",
    [
        "",
        "0/s",
        "-1/s",
        "1.5/m",
        "5/d",
        "s",
        "5/ss",
        0,
        -1,
        5.0,
        True,
        b"5/s",
        object(),
        "9" * 10,
        "9" * 9999,
    ],
)
def test_another_one_is_refused(value):
    with pytest.raises(ConfigurationError, match=r"shop\.bill: lock_rate must be a rate like"):
        rate_of("shop.bill: lock_rate", value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1), "count must be a whole number from 1 to 999999999, got 0"),
        ((10**9, 1), "count must be a whole number"),
        ((True, 1), "count must be a whole number"),
        ((1.0, 1), "count must be a whole number"),
        (("5", 1), "count must be a whole number"),
        ((1, 0), "per must be more than 0 s"),
        ((1, -1), "per must be"),
        ((1, LONGEST + 1), "per must be more than 0 s and at most"),
        ((1, "s"), "per must be"),
        ((5, 1, 0), "burst must be a whole number from 1 to 5, or None, got 0"),
        ((5, 1, 6), "burst must be a whole number from 1 to 5"),
        ((5, 1, 2.0), "burst must be a whole number"),
        ((5000, 1, 1001), "burst must be a whole number from 1 to 1000"),
    ],
)
def test_so_many_in_so_long_make_no_rate(arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        Rate(*arguments)


@pytest.mark.parametrize(
    ("rate", "burst", "window"),
    [
        (Rate(1, 60), 1, 60.0),
        (Rate(7, timedelta(minutes=1)), 7, 60.0),
        (Rate(100, 60), FEW, 6.0),
        (Rate(101, 60), 1, 60 / 101),
        (Rate(1000, 1), MANY, 0.1),
        (Rate(101, 1), MANY, 1.0),
        (Rate(601, 60), FEW, 1.0),
        (Rate(601, 60, burst=1), 1, 60 / 601),
        (Rate(100, 60, burst=100), 100, 60.0),
        (Rate(100, 60, burst=1), 1, 0.6),
    ],
)
def test_a_burst_comes_in_a_window(rate, burst, window):
    assert (rate.burst, rate.window) == (burst, pytest.approx(window))


RATES = st.builds(
    Rate,
    st.integers(1, 5000) | st.integers(1, MOST_STARTS),
    st.floats(0.01, LONGEST) | st.just(5e-324),
)


@given(RATES)
def test_of_a_burst_that_nobody_chose_no_more_come_than_the_count(rate):
    if rate.window > 1e-300:  # below, numbers have no digits left
        windows = round(rate.per / rate.window)
        assert windows * rate.window == pytest.approx(rate.per)
        assert windows * rate.burst <= rate.count
        assert rate.window * (1 + 1e-9) >= rate.burst * rate.per / rate.count
    assert 1 <= rate.burst <= MANY


@pytest.mark.parametrize("per", [1, 60, 3600])
def test_a_burst_that_nobody_chose_costs_little(per):
    """Whatever the number: a prime one, too, which only 1 divides."""
    for count in range(1, 1 + min(3000, MANY * per)):
        rate = Rate(count, per)
        assert rate.burst / (rate.window + rate.slack) > 0.85 * count / per


@given(RATES)
def test_a_place_stands_for_longer_than_a_start_may_be_late(rate):
    assert 0 < rate.within < rate.slack
    assert rate.slack >= LEAST_SLACK
    assert rate.stands_for > rate.window + rate.slack


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (Rate(5, 1), "5/s"),
        (Rate(100, 60), "100/m"),
        (Rate(5, 90), "5/90 s"),
        (Rate(101, 1), "101/s"),
        (Rate(101, 1, burst=7), "101/s"),
    ],
)
def test_a_rate_is_shown_as_it_is_written(rate, text):
    assert str(rate) == text
    assert eval(repr(rate)) == replace(rate) == rate
    assert pickle.loads(pickle.dumps(rate)) == rate


def most_within(moments, seconds):
    """Return the largest number of *moments* in any window of so long."""
    return max(bisect_left(moments, at + seconds - 1e-9) - i for i, at in enumerate(moments))


def started_by(rate, calls):
    """Return when starts come of calls, as they take the places that are free then."""
    places, starts = [0.0] * rate.burst, []
    for call in calls:
        free = min(range(rate.burst), key=places.__getitem__)
        if places[free] <= call:
            places[free] = call + rate.stands_for
            starts.append(call)
    return starts


CALLS = st.lists(st.floats(0.0, 0.5), min_size=1, max_size=200).map(
    lambda gaps: list(itertools.accumulate(gaps))
)


@given(st.integers(1, 30), st.floats(0.5, 5.0), CALLS)
def test_no_more_than_the_count_come_in_any_time_it_is_for(count, per, calls):
    rate = Rate(count, per)
    starts = started_by(rate, calls)
    assert most_within(starts, rate.per) <= count
    assert most_within(starts, rate.window) <= rate.burst


def test_a_burst_that_does_not_divide_the_count_lets_one_more_come():
    """Why a burst that nobody chose does: three windows of 2 s begin in 5 s."""
    rate = Rate(5, 5.0, burst=2)
    starts = started_by(rate, [0.01 * n for n in range(2000)])
    assert most_within(starts, rate.per) == 6
    assert most_within(starts, rate.window) == 2


# -- what a task may say of it -------------------------------------------------------------------


@pytest.fixture
def app(monkeypatch):
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.sent, app.told, app.starts = [], [], []
    app.conf.update(redlock_observers=[app.told.append])

    def send_task(name, args=None, kwargs=None, **options):
        app.sent.append(options)
        return app.AsyncResult(options["task_id"])

    monkeypatch.setattr(app, "send_task", send_task)
    # That this machine stood still does not mean that the nodes are far away.
    monkeypatch.setattr(Participant, "learn_time", lambda *_, **__: None)
    with memory_quorum(app) as app.quorum:
        yield app
    app.close()


def declare(app, body=lambda _task: "ran", **options):
    options = {"lock_key": "{key}", "lock_limit": None, "lock_rate": "2/m", **options}

    @app.task(name="bill", base=RedlockTask, bind=True, shared=False, **options)
    def bill(self, key, more=None):
        app.starts.append(app.quorum.clock.now())
        return body(self)

    app.finalize()
    return app.tasks["bill"]


def deliver(task, *args, task_id=None, publish="0" * 32, **fields):
    """Run *task* as a worker does; raise what it fails with."""
    task_id = task_id or f"task-{next(ids)}"
    header = {"v": 1, "task_id": task_id, "id": publish}
    request = {"id": task_id, "task": task.name, "retries": 0, "hostname": "w", "redlock": header}
    info = {"routing_key": "celery"}
    request |= {"is_eager": False, "delivery_info": info, "root_id": task_id, **fields}
    traced = build_tracer(task.name, task, app=task.app)(task_id, args, {}, request)
    if isinstance(traced[0], ExceptionInfo):
        raise traced[0].exception
    return traced[0]


def tell(app, kind):
    return [event for event in app.told if isinstance(event, kind)]


def stored(app, ending):
    """Return the locks on the first node whose name ends so."""
    found = app.quorum.nodes[0].model.keyspace.store
    names = [key.decode().removeprefix("redlock:lock:") for key in found if b":lock:" in key]
    return sorted(name for name in names if ending in name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lock_rate": "fast"}, "bill: lock_rate must be a rate like"),
        ({"lock_rate": ()}, "bill: lock_rate"),
        ({"lock_rate": ("1/s", "2/s")}, "has 2 values and lock_key='{key}' makes 1"),
        ({"lock_rate": None}, "bill: lock_limit must be a whole number"),
        ({"unique_until": "started"}, "lock_limit=None lets several run at once"),
        ({"lock_rate": lambda _task: "1/s"}, r"must take \(task, args, kwargs\)"),
        ({"lock_rate": "{nothing}/s"}, "nothing"),
        ({"max_deliveries": 0}, "bill: max_deliveries must be a whole number from 1 to 1000"),
        ({"max_deliveries": 1001}, "max_deliveries"),
        ({"max_deliveries": True}, "max_deliveries"),
        ({"max_deliveries": "3"}, "max_deliveries"),
    ],
)
def test_options_that_make_no_sense_are_refused(app, options, words):
    with pytest.raises(ConfigurationError, match=words):
        declare(app, **options).check_lock()


@pytest.mark.parametrize("most", [0, -1, 1001, 2.0, "3"])
def test_a_setting_that_makes_no_sense_is_refused(app, most):
    app.conf.redlock_max_deliveries = most
    with pytest.raises(ConfigurationError, match="redlock_max_deliveries must be a whole number"):
        declare(app).check_lock()


# -- a rate --------------------------------------------------------------------------------------


def test_what_is_over_its_rate_is_skipped_and_the_next_window_has_room(app):
    task = declare(app)
    assert [deliver(task, "k") for _ in range(2)] == ["ran"] * 2
    skipped = deliver(task, "k")
    assert (skipped["skipped"], skipped["lock"]) == ("rate", "k")
    assert skipped["holder"]["task"] == "bill"
    assert 0 < skipped["holder"]["ttl"] <= task_rate(task).stands_for
    assert deliver(task, "another") == "ran"
    app.quorum.clock.tick(task_rate(task).stands_for)
    assert deliver(task, "k") == "ran"
    (event,) = tell(app, events.TaskSkipped)
    assert (event.name, event.cause) == ("k", "rate")
    assert "'k' has as many starts as its lock_rate allows" in sentence(record_of(event))


def task_rate(task):
    return rate_of("", task.lock_rate)


def test_without_a_rate_all_run(app):
    task = declare(app, lock_rate=None, lock_limit=1)
    assert [deliver(task, "k") for _ in range(5)] == ["ran"] * 5


def test_a_start_over_the_rate_may_fail(app):
    task = declare(app, on_conflict="fail", lock_rate="1/m")
    deliver(task, "k")
    app.quorum.clock.tick(3.0)
    with pytest.raises(
        RateExceeded, match=r"'k'.* has as many starts as its lock_rate allows"
    ) as it:
        deliver(task, "k")
    assert it.value.name == "k"
    left = task_rate(task).stands_for - 3.0
    assert it.value.holder["ttl"] == pytest.approx(left, abs=0.01)
    assert f"the next in {left:.1f} s" in str(it.value)
    (event,) = tell(app, events.TaskRefused)
    assert event.cause == "rate"


def test_one_place_of_many_lapses_first(app):
    """Who is told when the next start is allowed is told of the first place, not of any."""
    task = declare(app, on_conflict="fail", lock_rate=Rate(5, 60, burst=5))
    for _ in range(5):
        deliver(task, "k")
        app.quorum.clock.tick(2.0)
    with pytest.raises(RateExceeded) as it:
        deliver(task, "k")
    assert it.value.holder["ttl"] == pytest.approx(task_rate(task).stands_for - 10.0, abs=0.01)


@pytest.mark.parametrize(
    ("written", "away", "least"),
    [
        ("100/m", 0, 90),
        ("100/m", 2, 90),
        (Rate(100, 60, burst=20), 0, 90),
    ],
)
def test_it_is_exact_and_nearly_all_come_that_may(app, written, away, least):
    task, rate = declare(app, lock_rate=written), rate_of("", written)
    for node in app.quorum.nodes[:away]:
        node.down()
    minutes, step = 1.25, 0.25
    for _ in range(round(minutes * 60 / step)):
        deliver(task, "k")
        app.quorum.clock.tick(step)
    assert most_within(app.starts, rate.per) <= rate.count
    assert most_within(app.starts, rate.window) == rate.burst
    assert len(app.starts) >= minutes * least


def test_without_a_quorum_nothing_starts_and_the_node_that_is_left_counts_it_not(app):
    task = declare(app, on_unavailable="fail")
    nodes = app.quorum.nodes
    for node in nodes[1:]:
        node.down()
    with pytest.raises(QuorumUnavailable):
        deliver(task, "k")
    assert stored(app, RATE) == []


def test_the_lock_is_asked_for_first_and_a_refusal_costs_no_start(app):
    task = declare(app, lock_limit=1)
    with app.quorum.hold("k"):
        assert deliver(task, "k")["skipped"] == "conflict"
    assert stored(app, RATE) == []
    assert [deliver(task, "k") for _ in range(2)] == ["ran"] * 2


def test_a_start_that_is_refused_holds_no_lock(app):
    task = declare(app, lock_limit=1, lock_rate="1/m")
    deliver(task, "k")
    assert deliver(task, "k")["skipped"] == "rate"
    assert app.quorum.holder("k") is None


@pytest.mark.parametrize("limit", [None, 1, 3])
def test_a_body_has_a_lock_if_it_asks_for_one(app, limit):
    seen = []
    task = declare(app, lambda _: seen.append(current_lock()), lock_limit=limit)
    deliver(task, "k")
    assert isinstance(seen[0], NotLocked) == (limit is None)
    assert (seen[0].fence is None) == (limit is None)
    assert seen[0].others == ()


def test_the_start_stands_when_its_body_has_ended_however_that_was(app):
    def end(_):
        raise endings.pop()

    endings = [SystemExit(1), ValueError("no")]
    task = declare(app, end, acks_late=True, lock_limit=1)
    with pytest.raises(ValueError, match="no"):
        deliver(task, "k")
    with pytest.raises(SystemExit):
        deliver(task, "k")
    assert len(stored(app, RATE)) == 2
    assert deliver(task, "k")["skipped"] == "rate"


def test_a_retry_is_a_start(app):
    def retry(task):
        raise task.retry(countdown=1)

    task = declare(app, retry)
    for retries in range(3):
        deliver_or_ignore(task, "k", task_id="1", retries=retries)
    *others, aside = app.sent
    assert [len(app.starts), len(others), aside["retries"]] == [2, 2, 2]
    assert deliver(task, "k", task_id="2")["skipped"] == "rate"


def test_what_replaces_itself_waits_for_a_start_and_another_call_of_its_id_does_not(app):
    """Whoever has the places: another one may be named, or have taken its own when that lapsed."""
    task = declare(app, lock_rate="2/m")
    for number in range(2):
        assert deliver(task, "k", task_id=str(number)) == "ran"
    deliver_or_ignore(task, "k", task_id="9", replaced_task_nesting=1)
    assert [sent["task_id"] for sent in app.sent] == ["9"]
    assert deliver(task, "k", task_id="9", publish="f" * 32)["skipped"] == "rate"


def test_names_have_rates_of_their_own_and_all_are_needed(app):
    task = declare(
        app,
        lock_key=("{key}", "all"),
        lock_limit=(1, 5),
        lock_rate=(None, "3/m"),
        on_conflict="fail",
    )
    for key in "abc":
        deliver(task, key)
    with pytest.raises(RateExceeded) as it:
        deliver(task, "d")
    assert it.value.name == "all"
    assert app.quorum.holder("d") is None


def test_a_start_that_is_refused_by_one_name_counts_for_none(app):
    task = declare(app, lock_key=("{key}", "z-all"), lock_rate=("1/m", "1/m"))
    deliver(task, "a")
    for _ in range(3):
        assert deliver(task, "b")["lock"] == "z-all"
    assert stored(app, RATE) == [rate_name("a"), rate_name("z-all")]


def test_a_start_far_from_the_nodes_takes_its_place_for_longer(app, monkeypatch):
    """And one that is granted later than it may come is given back, and asked for anew."""
    monkeypatch.setattr(Participant, "learn_time", learn_time)
    app.conf.redlock_node_timeout = 1.0
    task, takes = declare(app, on_unavailable="fail", lock_rate=Rate(1, 0.5)), 0.2
    for node in app.quorum.nodes:
        node.slow(takes)
    assert deliver(task, "k") == "ran"
    for node in app.quorum.nodes:
        node.slow(0.0)
    left = app.quorum.locks.inspect(rate_name("k"))[0].ttl
    assert task_rate(task).window < left < task_rate(task).window + 4 * takes


def test_a_grant_that_comes_late_is_given_back(app):
    """Where nothing is learned of how far the nodes are."""
    app.conf.redlock_node_timeout = 1.0
    task = declare(app, on_unavailable="fail", lock_rate="20/s")
    late = task_rate(task).within + 0.01
    for node in app.quorum.nodes:
        node.slow(late)
    with pytest.raises(QuorumUnavailable, match="too late"):
        deliver(task, "k")
    app.quorum.clock.tick(0.1)
    assert stored(app, RATE) == []
    task.lock_rate = "20/m"  # its window, and so its slack, is longer
    assert deliver(task, "k") == "ran"


def test_a_grant_that_came_late_once_is_asked_for_again(app, monkeypatch):
    """As of a process that connects: it is no fault of the nodes, and the next one is in time."""
    app.conf.redlock_node_timeout = 1.0
    task = declare(app, on_unavailable="fail", lock_rate="20/s")
    for node in app.quorum.nodes:
        node.slow(task_rate(task).within + 0.01)

    def in_time(*_):
        for node in app.quorum.nodes:
            node.slow(0.0)
        return 0.0

    monkeypatch.setattr(acquiring, "pause_after_draw", in_time)
    assert deliver(task, "k") == "ran"


@pytest.mark.parametrize("is_redelivered", [True, False], ids=["on", "off"])
def test_a_copy_finds_where_it_runs_among_more_places_than_there_are_now(app, is_redelivered):
    """A plan got smaller while it ran. Twin: the broker does not say that it is a copy."""
    seats, places = [9], []
    info = {"routing_key": "celery", "redelivered": is_redelivered}

    def body(task):
        places.append(task.lock.place)
        if len(places) == 1:
            seats[0] = 1
            app.quorum.locks.give_back(taken[0])
            with ThreadPoolExecutor(1) as pool, suppress(Ignore, ExceptionWithTraceback):
                pool.submit(deliver, task, "k", task_id="one", delivery_info=info).result()
        return "ran"

    def limit(_task, _args, _kwargs):
        return seats[0]

    task = declare(app, body, acks_late=True, lock_rate=None, lock_limit=limit)
    taken = [app.quorum.locks.take(LockRequest(place_name("k", place), 60)) for place in range(5)]
    assert deliver(task, "k", task_id="one") == "ran"
    assert places[0] >= 5
    assert places[1:] == ([] if is_redelivered else [0])


def test_a_call_says_its_rate(app):
    task = declare(app, lock_rate=lambda _task, args, _kwargs: f"{args[1]}/m")
    for times in (1, 3):
        found = [deliver(task, f"k{times}", times) for _ in range(times + 1)]
        assert found[:-1] == ["ran"] * times
        assert found[-1]["skipped"] == "rate"


def test_nothing_comes_later_where_it_is_eager(app):
    task = declare(app)
    found = [task.apply(args=("k",)).get() for _ in range(3)]
    assert found[:2] == ["ran"] * 2
    assert isinstance(found[2], Skipped)
    assert found[2]["skipped"] == "rate"


@pytest.mark.parametrize("policy", ["fail", "retry", "reschedule", "queue"])
def test_what_would_come_later_fails_where_it_is_eager(app, policy):
    task = declare(app, on_conflict=policy)
    for _ in range(2):
        task.apply(args=("k",))
    with pytest.raises(RateExceeded):
        task.apply(args=("k",)).get()
    assert app.sent == []


@pytest.mark.parametrize("policy", ["reschedule", "queue"])
def test_what_is_over_the_rate_comes_again(app, policy):
    task = declare(app, on_conflict=policy)
    for _ in range(3):
        deliver_or_ignore(task, "k")
    assert len(app.starts) == 2
    kind = events.TaskQueued if policy == "queue" else events.TaskRescheduled
    (event,) = tell(app, kind)
    assert (event.name, event.cause) == ("k", "rate")


def deliver_or_ignore(task, *args, **fields):
    """Deliver what may be published again."""
    with suppress(Ignore, ExceptionWithTraceback):
        deliver(task, *args, **fields)


def test_in_report_mode_all_start_and_an_event_says_which_would_not(app):
    task = declare(app, lock_mode="report")
    assert [deliver(task, "k") for _ in range(3)] == ["ran"] * 3
    (event,) = tell(app, events.TaskSkipped)
    assert (event.cause, event.report, event.name) == ("rate", True, "k")
    assert "would have been skipped" in sentence(record_of(event))
    task.lock_mode = "enforce"
    assert deliver(task, "k") == "ran"  # those starts count for nobody


@pytest.mark.parametrize(
    ("limit", "kind", "cause"),
    [(None, events.TaskRescheduled, "rate"), (1, events.TaskSkipped, "redelivered")],
)
def test_a_copy_beside_its_run_is_reported_as_what_it_would_be(app, limit, kind, cause):
    """It would wait for a start that is allowed; a lock is its own."""
    task = declare(
        app,
        lambda task: todo.pop()(task) if todo else "ran",
        lock_mode="report",
        lock_limit=limit,
        lock_rate="1/m",
    )
    todo = [lambda task: contextvars.Context().run(deliver, task, "k", task_id="1")]
    assert deliver(task, "k", task_id="1") == "ran"
    (event,) = tell(app, kind)
    assert (event.cause, event.report) == (cause, True)


def test_who_waits_comes_when_the_first_place_lapses(app):
    task = declare(app, lock_rate="1/s", lock_wait=5.0)
    assert [deliver(task, "k") for _ in range(3)] == ["ran"] * 3
    gaps = [later - sooner for sooner, later in itertools.pairwise(app.starts)]
    rate = task_rate(task)
    assert all(rate.window <= gap <= rate.stands_for + 0.3 for gap in gaps)


def test_who_cannot_wait_so_long_is_over_the_rate(app):
    task = declare(app, lock_rate="1/m", lock_wait=5.0)
    deliver(task, "k")
    began = app.quorum.clock.now()
    assert deliver(task, "k")["skipped"] == "rate"
    assert app.quorum.clock.now() - began == pytest.approx(5.0, abs=0.3)


def test_a_chord_ends_whose_member_is_over_its_rate():
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(task_always_eager=True, task_store_eager_result=True)

    @app.task(base=RedlockTask, shared=False, lock_key="k", lock_limit=None, lock_rate="2/m")
    def member(number):
        return number

    @app.task(shared=False)
    def total(found):
        return [one if isinstance(one, int) else one["skipped"] for one in found]

    with memory_quorum(app):
        assert chord([member.s(n) for n in range(3)])(total.s()).get() == [0, 1, "rate"]


# -- deliveries ----------------------------------------------------------------------------------


def killing(_):
    raise SystemExit(1)


LATE = {"acks_late": True, "lock_rate": None, "lock_limit": 1, "max_deliveries": 2}


def kill(task, times, **fields):
    for _ in range(times):
        with pytest.raises(SystemExit):
            deliver(task, "k", **fields)


def test_a_message_that_kills_its_worker_fails_after_so_many_starts(app):
    task = declare(app, killing, **LATE)
    kill(task, 2, task_id="1")
    with pytest.raises(TooManyDeliveries, match=r"bill\[1\] was started 2 times") as it:
        deliver(task, "k", task_id="1")
    assert (it.value.task, it.value.task_id, it.value.most) == ("bill", "1", 2)
    assert len(app.starts) == 2
    (event,) = tell(app, events.TaskRefused)
    assert (event.cause, event.name) == ("deliveries", "k")
    words = sentence(record_of(event))
    assert "its message was started as often as max_deliveries allows" in words
    assert app.quorum.holder("k") is None


@pytest.mark.parametrize("policy", ["skip", "reschedule", "queue", "retry"])
def test_it_fails_whatever_the_policy(app, policy):
    task = declare(app, killing, **LATE, on_conflict=policy)
    kill(task, 2, task_id="1")
    with pytest.raises(TooManyDeliveries):
        deliver(task, "k", task_id="1")


@pytest.mark.parametrize("off", [{"max_deliveries": None}, {"acks_late": False}])
def test_without_it_it_kills_them_on(app, off):
    """A message that is acknowledged as it starts is not delivered again for a death."""
    task = declare(app, killing, **{**LATE, **off})
    kill(task, 5, task_id="1")
    assert stored(app, STARTS) == []


def test_the_setting_is_for_all_tasks(app):
    app.conf.redlock_max_deliveries = 1
    task = declare(app, killing, **{**LATE, "max_deliveries": None})
    kill(task, 1, task_id="1")
    with pytest.raises(TooManyDeliveries):
        deliver(task, "k", task_id="1")


def test_another_publish_and_a_retry_count_anew(app):
    task = declare(app, killing, **LATE)
    kill(task, 2, task_id="1")
    kill(task, 2, task_id="1", retries=1)
    kill(task, 2, task_id="1", publish="1" * 32)


def test_a_normal_end_frees_the_count_and_not_the_start(app):
    task = declare(app, **{**LATE, "lock_rate": "9/m"})
    deliver(task, "k")
    assert stored(app, STARTS) == []
    assert len(stored(app, RATE)) == 1


def test_in_doubt_it_runs(app, monkeypatch):
    """The nodes that answer do not count it; they are asked for the lock alone."""
    task = declare(app, **LATE)
    locks, asked = plugin_for(app).locks, []
    take_all = locks.take_all

    def without_a_count(requests, lost=None):
        asked.append([one.name for one in requests])
        if any(one.name.endswith(STARTS) for one in requests):
            raise QuorumUnavailable(requests[-1].name, {})
        return take_all(requests, lost)

    monkeypatch.setattr(locks, "take_all", without_a_count)
    assert deliver(task, "k") == "ran"
    assert [len(names) for names in asked] == [2, 1]


# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [RATE, STARTS])
def test_a_name_that_looks_like_a_count_is_none(app, ending):
    name = f"api{ending}"
    assert own_name(name) == f"api%23{ending[1:]}"
    assert own_name(own_name(name)) not in {name, own_name(name)}
    task = declare(app, lock_rate="1/m", lock_limit=1)
    deliver(task, "api")
    assert deliver(task, name) == "ran"
    assert app.quorum.locks.take(LockRequest(own_name(name), 10.0))


@pytest.mark.parametrize("name", ["api", "x" * 300, "a#1", "\N{SNOWMAN}" * 90])
def test_a_count_has_places_of_its_own(name):
    names = [place_name(made, place) for made in (name, rate_name(name), starts_name("e" * 32))
             for place in range(12)]  # fmt: skip
    assert len(set(names)) == len(names)


def test_why_shows_the_starts_beside_the_lock(app):
    task = declare(app, lock_limit=2, lock_rate=Rate(6, 60, burst=3))
    assert limits_in_call(task, '["k"]') == {"k": 2, rate_name("k"): 3}
    task.lock_limit, task.lock_rate = None, "1/m"
    assert limits_in_call(task, '["k"]') == {rate_name("k"): 1}


# -- several at once, sans I/O -------------------------------------------------------------------


def test_what_stands_is_asked_for_last_and_left_alone(app):
    """A lock is renewed and released; a start is neither, unless the rest is refused."""
    locks = app.quorum.locks
    start = LockRequest("a-start", 5.0, fence=False, stands=True, within=1.0)
    held = locks.take_all([start, LockRequest("lock", 10.0)])
    assert list(held) == ["lock", "a-start"]
    app.quorum.clock.tick(4.9)
    assert locks.inspect("a-start")[0].holder
    app.quorum.clock.tick(0.2)
    assert not locks.inspect("a-start")[0].holder
    assert locks.inspect("lock")[0].holder


@pytest.mark.parametrize("name", ["a", "z"])
def test_what_is_to_follow_at_once_is_asked_for_last(app, name):
    """Or its time would be over before the count of a message's deliveries is granted."""
    wanted = [
        LockRequest(name, 5.0, fence=False, stands=True, within=1.0),
        LockRequest("m", 5.0, fence=False, stands=True),
    ]
    assert list(app.quorum.locks.take_all(wanted)) == ["m", name]


@pytest.mark.parametrize("names", [3, 8])
def test_as_many_starts_as_a_task_may_have_are_granted_far_from_the_nodes(names):
    """The second time each is asked for once: what was learned is not forgotten meanwhile."""
    with memory_quorum(node_timeout=0.5, ttl=20.0) as nodes:
        for node in nodes.nodes:
            node.slow(0.05)
        wanted = [
            LockRequest(f"n{number}", 9.0, fence=False, stands=True, within=0.03, limit=100)
            for number in range(names)
        ]
        assert len(nodes.locks.take_all(wanted)) == names
        assert nodes.locks.participant.grant_takes > (names - 1) * 0.05


@pytest.mark.parametrize("takes", [0.01, 60.0])
def test_a_stall_counts_no_more_than_nodes_may_take(takes):
    participant = Participant(Rules(node_timeout=0.5), ("a",))
    participant.learn_time(takes, rounds=1)
    assert participant.grant_takes == min(takes, 0.5)
    for _ in range(9):
        participant.learn_time(0.0, rounds=1)
    assert participant.grant_takes < 0.001


def test_several_starts_far_from_the_nodes_are_granted_together():
    with memory_quorum(node_timeout=1.0, ttl=20.0) as nodes:
        for node in nodes.nodes:
            node.slow(0.15)
        wanted = [
            LockRequest(name, 9.0, fence=False, stands=True, within=0.2) for name in ("a", "b")
        ]
        held = nodes.locks.take_all(wanted)
        assert min(one.ttl for one in held.values()) > 9.0


@pytest.mark.parametrize("within", [0.2, 5.0], ids=["on", "off"])
def test_a_start_that_was_asked_for_too_long_ago_is_given_back(within, monkeypatch):
    """The last of several is granted late; without a limit on that all are."""
    monkeypatch.setattr(Participant, "learn_time", lambda *_, **__: None)
    with memory_quorum(node_timeout=1.0, ttl=20.0) as nodes:
        for node in nodes.nodes:
            node.slow(0.15)
        wanted = [
            LockRequest(name, 9.0, fence=False, stands=True, within=within) for name in ("a", "b")
        ]
        if within > 1.0:
            assert set(nodes.locks.take_all(wanted)) == {"a", "b"}
        else:
            with pytest.raises(QuorumUnavailable) as it:
                nodes.locks.take_all(wanted)
            assert it.value.name == "a"
            assert set(it.value.votes.values()) == {"granted, but too late"}
            nodes.clock.tick(0.1)
            assert nodes.holder("a") is None
