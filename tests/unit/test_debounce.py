"""``debounce``: how a call is published, and what becomes of it when its message is delivered."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from celery import Celery, chain, chord, group
from celery.app.trace import build_tracer
from celery.beat import ScheduleEntry, Scheduler

from celery_redlock import (
    ConfigurationError,
    LockKeyError,
    QuorumUnavailable,
    RedlockTask,
    current_lock,
)
from celery_redlock.events import LockUnavailable, TaskSkipped
from celery_redlock.lock.scripts.scripting import LARGEST
from celery_redlock.task.messages.envelope import Envelope
from celery_redlock.task.naming.task_lock import lock_of
from celery_redlock.testing import locks_disabled, memory_quorum
from celery_redlock.unique.bursts import Bursts

KEY = b"redlock:debounce:report:7"


@pytest.fixture
def app(monkeypatch):
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.sent, app.events, app.ran = [], [], []
    app.conf.redlock_observers = [app.events.append]

    def send_task(name, args=None, kwargs=None, **options):
        app.sent.append({"args": args, **options})
        return app.AsyncResult(options["task_id"])

    monkeypatch.setattr(app, "send_task", send_task)
    with memory_quorum(app) as app.quorum:
        yield app
    app.close()


def declare(app, name="report", **options):
    known = {"lock_key": "report:{user_id}", "debounce": 10, "debounce_max": 60}

    def body(self, user_id, version=0):
        app.ran.append(version)
        return version

    ours = {"base": RedlockTask, "bind": True, "shared": False}
    app.task(name=name, **ours, **{**known, **options})(body)
    return app.tasks[name]


def deliver(task, sent, **fields):
    """Have a worker run the message that was *sent*; return what it stores."""
    headers = dict(sent.get("headers") or {})
    request = {"id": sent["task_id"], "task": task.name, "retries": 0, "hostname": "w", **headers}
    request |= {"is_eager": False, "delivery_info": {"routing_key": "celery"}, **fields}
    tracer = build_tracer(task.name, task, app=task.app)
    return tracer(sent["task_id"], sent["args"], {}, request).retval


def call(task, version, **options):
    """Call it, and return what was sent."""
    task.apply_async((7, version), **options)
    return task.app.sent[-1]


def number_in(sent):
    return Envelope.of((sent.get("headers") or {}).get("redlock"), sent["task_id"]).debounced


def is_debounced(sent):
    return bool(sent.get("countdown")) and bool(number_in(sent))


def stored(app):
    return app.quorum.nodes[0].model.keyspace.store.get(KEY)


def skipped(app, **fields):
    found = [it for it in app.events if isinstance(it, TaskSkipped)]
    return [it for it in found if all(getattr(it, name) == fields[name] for name in fields)]


# -- a burst ---------------------------------------------------------------------------------


def test_of_a_burst_the_last_call_runs(app):
    task = declare(app)
    first, second, last = (call(task, version) for version in range(3))
    assert [sent["countdown"] for sent in app.sent] == [10, 10, 10]
    assert number_in(first) < number_in(second) < number_in(last)
    by_last = {"task": "report", "task_id": last["task_id"]}
    told = {"skipped": "debounced", "lock": "report:7", "holder": by_last}
    assert [deliver(task, sent) for sent in (first, second, last)] == [told, told, 2]
    assert app.ran == [2]
    [one, _] = skipped(app)
    assert (one.task_id, one.cause, one.holder) == (first["task_id"], "debounced", by_last)


@pytest.mark.parametrize("length", [1, 1000])
def test_of_calls_with_one_id_none_stores_what_the_last_one_would(app, length):
    """Celery writes no result over a success; the caller would wait for it for good."""
    task = declare(app)
    task_id = "nightly" * length
    first, last = (call(task, version, task_id=task_id) for version in range(2))
    deliver(task, first)
    assert app.AsyncResult(task_id).state == "PENDING"
    assert [one.task_id for one in skipped(app, cause="debounced")] == [task_id]
    assert deliver(task, last) == 1


def test_without_it_every_call_runs_and_nothing_more_is_asked(app, monkeypatch):
    monkeypatch.setattr(Bursts, "on", None)
    task = declare(app, debounce=None, debounce_max=None)
    for version in range(3):
        deliver(task, call(task, version))
    assert app.ran == [0, 1, 2]
    assert [sent.get("countdown") for sent in app.sent] == [None] * 3
    assert not stored(app)


def test_the_first_call_of_a_burst_does_not_wait_for_longer_than_debounce_max(app):
    """In whole seconds, and at least one: quorum queues take nothing else."""
    task = declare(app, debounce_max=24.5)
    countdowns = []
    for pause in (0, 9, 9, 6, 1):
        app.quorum.clock.tick(pause)
        countdowns.append(call(task, 0)["countdown"])
    assert countdowns == [10, 10, 6, 1, 10]


def test_it_is_six_times_debounce_if_nobody_says(app):
    options = lock_of(declare(app, debounce=timedelta(seconds=5), debounce_max=None)).options
    assert (options.debounce, options.longest_burst) == (5.0, 30.0)
    assert lock_of(declare(app, "other")).options.longest_burst == 60.0


@pytest.mark.parametrize("days", [0.001, 1, 3])
def test_a_burst_may_last_for_days(app, days):
    """A node that forgets it before its countdown ends would have every call run."""
    task = declare(app, debounce=days * 86400, debounce_max=None)
    first, last = call(task, 0), call(task, 1)
    app.quorum.clock.tick(days * 86400)
    deliver(task, first)
    assert deliver(task, last) == 1
    assert app.ran == [1]


def test_the_last_call_of_a_burst_runs_beside_the_burst_that_followed(app):
    task = declare(app)
    last = call(task, 0)
    app.quorum.clock.tick(61)
    following = call(task, 1)
    assert [deliver(task, sent) for sent in (last, following)] == [0, 1]


def test_bursts_of_other_names_have_nothing_to_do_with_it(app):
    task = declare(app)
    first = call(task, 0)
    task.apply_async((8, 1))
    assert [deliver(task, sent) for sent in (first, app.sent[-1])] == [0, 1]


def test_of_several_names_the_first_counts(app):
    task = declare(app, lock_key=("report:{user_id}", "all"))
    sent = [call(task, version) for version in range(2)]
    assert stored(app)
    assert deliver(task, sent[0])["skipped"] == "debounced"
    assert deliver(task, sent[1]) == 1


def test_a_superseded_one_asks_for_no_lock(app):
    task = declare(app, on_conflict="fail")
    first, _ = call(task, 0), call(task, 1)
    with app.quorum.hold("report:7"):
        assert deliver(task, first)["skipped"] == "debounced"


def test_a_chain_of_its_own_ends_or_goes_on_as_of_any_skip(app):
    """What comes after a task by other means than a workflow's, as in a message of another's."""
    task = declare(app)
    first, _ = call(task, 0), call(task, 1)
    follower = {"task": "report", "options": {"task_id": "next"}, "args": (), "kwargs": {}}
    deliver(task, first, chain=[follower])
    assert app.backend.get_state("next") == "REVOKED"


# -- a message that comes again --------------------------------------------------------------


def test_a_message_that_is_delivered_again_is_not_superseded(app):
    """Its worker was killed in the body, and a newer burst has begun."""
    task = declare(app)
    first = call(task, 0)
    deliver(task, first)
    call(task, 1)
    for node in app.quorum.nodes:
        for key in [key for key in node.model.keyspace.store if b":marker:" in key]:
            del node.model.keyspace.store[key]
    deliver(task, first)
    assert app.ran == [0, 0]


def test_a_late_copy_of_what_has_finished_ends_without_a_state(app):
    task = declare(app)
    first = call(task, 0)
    deliver(task, first)
    call(task, 1)
    deliver(task, first)
    assert app.ran == [0]
    assert skipped(app) == []


def test_a_retry_is_debounced_no_more(app):
    task = declare(app)

    @app.task(base=RedlockTask, bind=True, name="retried", shared=False, debounce=10, lock_key="x")
    def retried(self):
        raise self.retry(countdown=3)

    retried.apply_async()
    sent = app.sent[-1] | {"args": ()}
    assert is_debounced(sent)
    deliver(retried, sent)
    assert (app.sent[-1]["countdown"], number_in(app.sent[-1])) == (3, 0)
    assert task.name == "report"


@pytest.mark.parametrize("policy", ["retry", "reschedule", "queue", "skip"])
def test_what_waits_for_its_lock_keeps_its_number(app, policy):
    task = declare(app, on_conflict=policy)
    first = call(task, 0)
    with app.quorum.hold("report:7"):
        deliver(task, first)
    again = app.sent[-1]
    assert again is not first
    assert number_in(again) == number_in(first)
    call(task, 1)
    deliver(task, again, retries=int(policy == "retry"))
    assert app.ran == ([] if policy == "retry" else [0])  # as a retry, it gives way to a newer one


def test_what_was_not_debounced_meets_its_policy(app):
    task = declare(app, on_conflict="skip")
    with app.quorum.hold("report:7"):
        assert deliver(task, call(task, 0, debounce=None))["skipped"] == "conflict"


def test_a_body_does_not_hand_on_what_is_its_own(app):
    """Headers that a body passes on make no copy, and a replacement is no call of the burst."""

    @app.task(base=RedlockTask, bind=True, name="passes", shared=False, debounce=10, lock_key="x")
    def passes(self, depth=0):
        if not depth:
            self.apply_async((1,), headers=self.request.headers)

    passes.apply_async()
    deliver(passes, app.sent[-1] | {"args": ()})
    first, second = app.sent
    assert is_debounced(second)
    assert number_in(second) > number_in(first)


# -- what is not debounced -------------------------------------------------------------------


@pytest.mark.parametrize("asked", [None, False, 0])
def test_a_call_may_say_that_it_is_not_debounced(app, asked):
    assert not is_debounced(call(declare(app), 0, debounce=asked))
    assert "debounce" not in app.sent[-1]


@pytest.mark.parametrize("asked", [3, 2.5, timedelta(seconds=3)])
def test_a_call_may_say_how_long_it_waits(app, asked):
    task = declare(app, debounce=None, debounce_max=None)
    assert call(task, 0, debounce=asked)["countdown"] == 3
    assert is_debounced(app.sent[-1])
    assert "debounce" not in app.sent[-1]


@pytest.mark.parametrize("asked", ["3", -1, float("inf"), True])
def test_a_call_that_says_something_else_is_refused(app, asked):
    with pytest.raises(ConfigurationError, match="report: debounce must be"):
        call(declare(app), 0, debounce=asked)
    assert app.sent == []


@pytest.mark.parametrize("asked", [3, None, False])
def test_a_call_of_a_unique_task_is_not_debounced_without_a_word(app, asked):
    task = declare(app, debounce=None, debounce_max=None, unique_until="started")
    if asked:
        with pytest.raises(ConfigurationError, match="drop one of them"):
            call(task, 0, debounce=asked)
    else:
        assert not is_debounced(call(task, 0, debounce=asked))


@pytest.mark.parametrize(
    "time", [{"countdown": 5}, {"eta": datetime(2036, 1, 1, tzinfo=timezone.utc)}]
)
def test_a_call_that_says_when_it_is_to_run_runs_then(app, time):
    task = declare(app)
    sent = call(task, 0, **time)
    assert sent.items() >= time.items()
    assert number_in(sent) == 0
    with pytest.raises(ConfigurationError, match="so does its countdown or eta; drop one"):
        call(task, 0, debounce=5, **time)
    assert len(app.sent) == 1


WORKFLOWS = {
    "chain": lambda task: chain(task.si(7), task.si(7)),
    "group": lambda task: group(task.si(7), task.si(7)),
    "chord": lambda task: chord([task.si(7)], task.si(7)),
    "link": lambda task: task.si(7).on_error(task.si(7)),
    "of its own": lambda task: group(task.si(7).set(debounce=3)),
}


@pytest.mark.parametrize("kind", WORKFLOWS)
def test_members_of_a_workflow_are_published_as_they_are(app, kind):
    """One that is superseded would end its chord, or callbacks, with no result of its own."""
    WORKFLOWS[kind](declare(app)).apply_async()
    assert app.sent
    assert not any(map(is_debounced, app.sent))
    assert not stored(app)


def test_a_signature_alone_is_a_call_like_any(app):
    task = declare(app)
    task.si(7).delay()
    task.si(7).set(debounce=3).apply_async()
    assert [sent["countdown"] for sent in app.sent] == [10, 3]


def test_eagerly_it_runs_at_once(app):
    task = declare(app)
    assert task.apply((7, 1), debounce=5).get() == 1
    app.conf.task_always_eager = True
    assert task.apply_async((7, 2), debounce=5).get() == 2
    assert task.delay(7, 3).get() == 3
    assert not stored(app)


def test_with_locks_disabled_it_is_published_as_it_is_and_runs(app):
    task = declare(app)
    first, _ = call(task, 0), call(task, 1)
    with locks_disabled():
        assert not is_debounced(call(task, 2))
        assert deliver(task, first) == 0


def test_beat_publishes_a_call_like_any(app):
    declare(app)
    scheduler = Scheduler(app, lazy=True)
    entry = ScheduleEntry("tick", "report", schedule=1, args=(7, 1), app=app)
    scheduler.apply_async(entry, advance=False)
    assert is_debounced(app.sent[-1])


def test_a_slot_that_waits_for_the_run_before_it_is_not_debounced(app):
    """Its reservation does what debounce would do."""
    slot = {
        "v": 1,
        "task_id": "me",
        "slot": ["tick", "2026-03-01T12:30:15.250+00:00", "buffer_one"],
    }
    sent = call(declare(app), 0, task_id="me", headers={"redlock": slot})
    assert not is_debounced(sent)
    assert Envelope.of(sent["headers"]["redlock"], "me").reservation is not None


def test_a_task_that_is_protected_by_a_setting_has_it(app):
    app.conf.redlock_protect = {"other.*": {"debounce": 10, "lock_key": "other"}}

    @app.task(name="other.index", shared=False)
    def other():
        return 1

    other.apply_async()
    assert is_debounced(app.sent[-1])


def test_arguments_that_make_no_name_are_refused_where_it_is_called(app):
    with pytest.raises(TypeError):
        declare(app).apply_async((1, 2, 3))
    with pytest.raises(LockKeyError):
        declare(app, "other", lock_key=None).apply_async((object(),))
    assert app.sent == []


# -- no quorum -------------------------------------------------------------------------------


def test_without_a_quorum_it_waits_and_nothing_supersedes_it(app):
    task = declare(app)
    for node in app.quorum.nodes[:3]:
        node.down()
    sent = [call(task, version) for version in range(2)]
    assert [one["countdown"] for one in sent] == [10, 10]
    assert [number_in(one) for one in sent] == [0, 0]
    assert [type(it) for it in app.events if isinstance(it, LockUnavailable)]


def test_without_a_quorum_it_fails_if_that_is_the_policy(app):
    task = declare(app, on_unavailable="fail")
    for node in app.quorum.nodes[:3]:
        node.down()
    with pytest.raises(QuorumUnavailable):
        call(task, 0)
    assert app.sent == []


def test_without_a_quorum_at_its_delivery_the_lock_decides(app):
    task = declare(app, on_unavailable="run_unlocked")
    first, _ = call(task, 0), call(task, 1)
    for node in app.quorum.nodes[:3]:
        node.down()
    assert deliver(task, first) == 0


def test_a_publish_that_fails_supersedes_nobody(app, monkeypatch):
    task = declare(app)
    first = call(task, 0)

    def fail(*_args, **_options):
        raise OSError("no broker")

    monkeypatch.setattr(app, "send_task", fail)
    with pytest.raises(OSError, match="no broker"):
        call(task, 1)
    assert deliver(task, first) == 0


# -- report mode -----------------------------------------------------------------------------


def test_in_report_mode_every_call_runs_at_once_and_is_reported(app):
    task = declare(app, lock_mode="report")
    first, second = call(task, 0), call(task, 1)
    assert [sent.get("countdown") for sent in app.sent] == [None, None]
    assert [number_in(sent) for sent in app.sent] == [0, 0]
    [one] = skipped(app, cause="debounced")
    newer = {"task": "report", "task_id": second["task_id"]}
    assert (one.report, one.task_id, one.holder) == (True, first["task_id"], newer)
    assert [deliver(task, sent) for sent in app.sent] == [0, 1]
    assert not stored(app)


def test_in_report_mode_a_burst_ends_when_no_call_comes(app):
    task = declare(app, lock_mode="report")
    for pause in (0, 9, 11, 9):
        app.quorum.clock.tick(pause)
        call(task, 0)
    assert [it.task_id for it in skipped(app)] == [app.sent[n]["task_id"] for n in (0, 2)]


def test_in_report_mode_no_call_fails(app):
    task = declare(app, lock_mode="report", on_unavailable="fail", lock_key=lambda *_: 1 / 0)
    assert call(task, 0)
    for node in app.quorum.nodes:
        node.down()
    assert call(declare(app, "other", lock_mode="report", on_unavailable="fail"), 0)


def test_a_worker_in_report_mode_runs_what_was_debounced(app):
    task = declare(app)
    first, _ = call(task, 0), call(task, 1)
    task.lock_mode = "report"
    assert deliver(task, first) == 0


# -- options and forged values ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"debounce": 0}, "debounce must be > 0"),
        ({"debounce": "10"}, "debounce must be a number"),
        ({"debounce": 10**9}, "debounce must be at most"),
        ({"debounce_max": -1}, "debounce_max must be > 0"),
        ({"expires": 10}, r"expires=10 ends each call before debounce=10 lets it run"),
        ({"debounce_max": 9}, r"debounce_max must be at least debounce \(10\), got 9"),
        ({"debounce": None}, "debounce_max=60 has no effect without debounce"),
        ({"unique_until": "started"}, "unique_until='started' publishes the first call and keeps"),
    ],
)
def test_options_that_make_no_sense_are_refused(app, options, words):
    with pytest.raises(ConfigurationError, match=f"report: {words}"):
        declare(app, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"debounce": "10"}, "debounce must be a number"),
        ({"debounce": 61}, r"debounce=61 of a call is longer than debounce_max \(60 s\)"),
        ({"debounce_max": 5}, "debounce_max is an option of the task, and not of a call"),
        ({"expires": 9}, "expires=9 ends each call before debounce=10 lets it run"),
        ({"expires": 9, "debounce": 9}, "expires=9 ends each call before debounce=9 lets it run"),
        ({"expires": 0.5}, "expires=0.5 ends each call"),
        ({"expires": 9.9, "debounce": 9.5}, "expires=9.9 ends each call"),  # it comes after 10 s
        ({"expires": datetime.now(timezone.utc)}, "expires=-[0-9.]+ ends each call"),
    ],
)
def test_so_are_those_of_a_call(app, options, words):
    with pytest.raises(ConfigurationError, match=f"report: {words}"):
        declare(app).apply_async((7,), **options)
    assert app.sent == []


def test_so_is_a_call_that_is_over_by_the_expiry_of_its_task(app):
    with pytest.raises(ConfigurationError, match="expires=20 ends each call before debounce=30"):
        declare(app, expires=20).apply_async((7,), debounce=30)


def test_a_task_may_expire_at_a_time(app):
    declare(app, expires=datetime(2026, 1, 1, tzinfo=timezone.utc))


@pytest.mark.parametrize("options", [{"expires": 9}, {"debounce": 61}])
def test_in_report_mode_no_call_is_refused_for_when_it_would_run(app, options):
    declare(app, lock_mode="report").apply_async((7,), **options)
    assert len(app.sent) == 1


def test_so_are_those_of_a_call_in_eager_mode(app):
    app.conf.task_always_eager = True
    with pytest.raises(ConfigurationError, match="report: debounce must be a number"):
        declare(app).apply_async((7,), debounce="10")


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize(
    ("own", "options"),
    [
        ({}, {"debounce": 3, "countdown": 5}),
        ({}, {"debounce": 3, "expires": 2}),
        ({}, {"debounce": 61}),
        ({"debounce": None, "debounce_max": None, "unique_until": "finished"}, {"debounce": 3}),
    ],
)
def test_what_a_call_may_not_say_is_refused_in_eager_mode_too(app, is_eager, own, options):
    """Or a suite of tests that runs eagerly never meets it."""
    app.conf.task_always_eager = is_eager
    with pytest.raises(ConfigurationError, match="debounce="):
        declare(app, **own).apply_async((7,), **options)


@pytest.mark.parametrize(
    "name", ["is_duplicate", "conflict", "deliveries", "lock_write", "on_debounce"]
)
def test_a_name_of_ones_own_is_no_misspelt_option(app, name):
    declare(app, **{name: lambda self: None})


@pytest.mark.parametrize("option", ["debounce_min", "max_delivery"])
def test_a_misspelt_option_is_refused(app, option):
    with pytest.raises(ConfigurationError, match=f"unknown option {option}; did you mean"):
        declare(app, **{option: 3})


@pytest.mark.parametrize(("debounce", "is_warned"), [(1199, False), (1201, True)])
def test_a_worker_warns_of_what_is_longer_than_its_broker_bears(app, caplog, debounce, is_warned):
    app.conf.broker_url = "redis://broker/0"
    declare(app, debounce=debounce, debounce_max=None).check_lock()
    assert ("may wait in a worker" in caplog.text) is is_warned


@pytest.mark.parametrize("number", [0, -1, True, 1.5, "7", None, [], LARGEST + 1])
def test_a_number_that_none_of_ours_can_be_says_nothing(number):
    header = {"v": 1, "task_id": "me", "debounced": number}
    assert Envelope.of(header, "me") == Envelope()


@pytest.mark.parametrize("number", [1, LARGEST])
def test_a_forged_call_supersedes_nobody(app, number):
    task = declare(app)
    first = call(task, 0)
    forged = {"v": 1, "task_id": "me", "id": "f" * 32, "debounced": number}
    before = repr(stored(app))
    deliver(task, {"task_id": "me", "args": (7, 1), "headers": {"redlock": forged}})
    assert repr(stored(app)) == before
    assert deliver(task, first) == 0


def test_the_body_sees_its_lock_as_ever(app):
    seen = []

    @app.task(base=RedlockTask, name="sees", shared=False, debounce=1, lock_key="sees")
    def sees():
        seen.append(current_lock().name)

    sees.apply_async()
    deliver(sees, app.sent[-1] | {"args": ()})
    assert seen == ["sees"]
