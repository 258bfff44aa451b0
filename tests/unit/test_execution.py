"""One execution against scripted answers of the nodes: every answer, and what is made of it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
from celery import Celery, Task
from celery.app.trace import build_tracer
from celery.exceptions import Ignore, Reject, Retry
from kombu.exceptions import OperationalError

from celery_redlock import LockTaken, QuorumUnavailable, RedlockTask, Skipped, current_lock
from celery_redlock.lock import clock
from celery_redlock.lock.algorithm.request import MarkerStands
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.waiting.waiting import LEAVE
from celery_redlock.plugin import plugin_for
from celery_redlock.task.execution import end as ending
from celery_redlock.task.execution.begin import PREVIOUS_GRACE
from celery_redlock.task.execution.execution import latest_execution
from celery_redlock.task.execution.interrupt import Interrupt
from celery_redlock.task.messages.delivery import execution_id
from celery_redlock.task.messages.waiting import Waiting, Wakes

#: Of the message that is delivered.
PUBLISH = "0" * 32
HEADER = {"v": 1, "task_id": "me", "id": PUBLISH}


class ScriptedLocks:
    listener, rules = object(), Rules()

    def __init__(self):
        self.answers = []
        self.wanted = []
        self.released = []
        self.marked = []
        self.held_by = {}
        self.told = []
        self.driver = SimpleNamespace(tell=self.told.append)

    def take(self, wanted, on_lost=None):
        self.wanted.append(wanted)
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, LockTaken):
            answer.name = wanted.name
        if answer is not None:
            raise answer
        until = clock.now() + 100
        return HeldLock(Lease(wanted.name, "t" * 40, 1, wanted.ttl, until, 0.0), on_lost)

    def inspect_all(self, names, ends=None):
        return [
            [SimpleNamespace(holder=self.held_by if name == names[-1] else {})] for name in names
        ]

    def give_back(self, held, *, keep=0.0, marker=None, waits=False):
        self.released.append((held.name, marker))

    def mark(self, marker):
        self.marked.append(marker)


@pytest.fixture
def app(monkeypatch):
    """An app that publishes into a list, and asks scripted locks."""
    app = Celery("shop", broker="redis://broker/0", set_as_current=False)
    app.conf.redlock_nodes = ["redis://one:1/0"]
    app.conf.broker_transport_options = {"visibility_timeout": 30}
    app.sent = []

    def send_task(name, args=None, kwargs=None, **options):
        app.sent.append((name, args, options))
        return app.AsyncResult(options["task_id"])

    monkeypatch.setattr(app, "send_task", send_task)
    app.locks = plugin_for(app)._locks = ScriptedLocks()
    return app


def deliver(app, *answers, body=None, options=None, **request):
    """Deliver a task once, the nodes giving *answers*; returns the task's result."""
    app.locks.answers = [*answers]
    app.tasks.pop("shop.bill", None)

    @app.task(base=RedlockTask, bind=True, name="shop.bill", shared=False, **(options or {}))
    def bill(self, number):
        return body(self) if body else number

    task = app.tasks["shop.bill"]
    known = {"id": "me", "args": (7,), "kwargs": {}, "called_directly": False, "redlock": HEADER}
    task.push_request(**{**known, **request})
    before = latest_execution.get()
    try:
        return task(7)
    finally:
        task.pop_request()
        app.execution = latest_execution.get()
        latest_execution.set(before)


def execution(task_id="me", retries=0, nesting=0, publish_id=PUBLISH):
    return execution_id("shop.bill", task_id, publish_id, retries, nesting)


def taken(**holder):
    return LockTaken("shop.bill", {}, holder)


STRANGER = {"task_id": "other", "execution": execution("other"), "ttl": 4.2}
MYSELF = {"task_id": "me", "execution": execution(), "ttl": 4.2}


def test_a_granted_lock_runs_the_body_and_is_given_back(app):
    assert deliver(app) == 7
    (wanted,) = app.locks.wanted
    assert wanted.marker == execution()
    assert wanted.info == {"task": "shop.bill", "task_id": "me", "execution": execution()}
    ((_, marker),) = app.locks.released
    assert (marker.name, marker.state, marker.ttl) == (execution(), "done", 3600.0)


def test_a_signal_on_the_way_out_leaves_no_lock_in_the_bodys_place(app, monkeypatch):
    """It may strike before the body's own end is cleared away: the next body finds nothing."""

    def strike(self):
        raise SystemExit

    monkeypatch.setattr(Interrupt, "disarm", strike)
    with pytest.raises(SystemExit):
        deliver(app)
    with pytest.raises(RuntimeError):
        current_lock()
    assert len(app.locks.released) == 1


@pytest.mark.parametrize(
    ("request_fields", "expected"),
    [
        ({}, {}),
        ({"retries": 3}, {"retries": 3}),
        ({"replaced_task_nesting": 2}, {"nesting": 2}),
        ({"redelivered": True, "delivery_info": {"redelivered": True}}, {}),
        ({"redlock": {**HEADER, "id": "1" * 32}}, {"publish_id": "1" * 32}),
        ({"redlock": None}, {"publish_id": ""}),
    ],
)
def test_an_execution_is_one_publish_of_one_task(app, request_fields, expected):
    """A retry and a second publish are others; a message that is delivered again is not."""
    deliver(app, **request_fields)
    assert app.locks.wanted[0].info["execution"] == execution(**expected)


def test_no_message_of_another_task_stands_for_an_execution():
    """Whatever it says of itself: its task is part of the id."""
    assert execution_id("cheap", "me", PUBLISH, 0, 0) != execution_id("dear", "me", PUBLISH, 0, 0)


@pytest.mark.parametrize("redelivered", [False, True])
def test_a_message_that_says_nothing_has_finished_before_if_the_broker_says_so(app, redelivered):
    """A second publish under the same task id, as of ``send_task``, is another execution."""
    fields = {"redlock": None, "delivery_info": {"redelivered": redelivered}}
    own = execution(publish_id="")
    if redelivered:
        with pytest.raises(Ignore):
            deliver(app, MarkerStands("done"), **fields)
    else:
        assert deliver(app, MarkerStands("done"), **fields) == 7
        ((_, marker),) = app.locks.released
        assert (marker.name, marker.state) == (own, "done")
    assert [wanted.marker for wanted in app.locks.wanted] == [own, None][: 2 - redelivered]
    forgotten = [(marker.name, marker.state, marker.ttl) for marker in app.locks.marked]
    assert forgotten == ([] if redelivered else [(own, "done", 0.0)])


def test_a_message_that_says_nothing_costs_no_more_than_others(app):
    """It is asked whether it has finished before, and nothing is forgotten that is not there."""
    assert deliver(app, redlock=None) == 7
    (wanted,) = app.locks.wanted
    assert wanted.marker == execution(publish_id="")
    assert app.locks.marked == []


UNIDENTIFIED = [{"redelivered": redelivered} for redelivered in (False, True)]


@pytest.mark.parametrize("policy", ["retry", "reschedule", "queue"])
@pytest.mark.parametrize("unavailable", [False, True])
def test_copies_of_a_message_that_says_nothing_are_one_execution(app, policy, unavailable):
    """Whether its first delivery is put off or a later one: no copy makes up an identity."""
    policy = "retry" if unavailable and policy == "queue" else policy
    refusal = QuorumUnavailable("shop.bill", {}) if unavailable else taken(**STRANGER)
    options = {"on_conflict": policy} | ({"on_unavailable": policy} if unavailable else {})
    for info in UNIDENTIFIED:
        with pytest.raises((Ignore, Retry)):
            deliver(app, refusal, options=options, redlock=None, delivery_info=info)
    first, second = (sent["headers"]["redlock"]["id"] for *_, sent in app.sent)
    assert first == second == (execution(publish_id="") if policy == "retry" else "")


def test_retries_of_one_message_that_a_policy_made_are_one_execution(app):
    """The broker may deliver it again before its first delivery is refused."""
    for _ in range(2):
        with pytest.raises(Retry):
            deliver(app, taken(**STRANGER), options={"on_conflict": "retry"})
    ids = {sent["headers"]["redlock"]["id"] for *_, sent in app.sent}
    assert ids == {execution()}
    assert [sent["retries"] for *_, sent in app.sent] == [1, 1]


@pytest.mark.parametrize("why", ["it has finished", "it runs"])
@pytest.mark.parametrize("policy", ["retry", "reschedule"])
def test_a_second_publish_that_says_nothing_is_put_off_as_another_execution(app, why, policy):
    """Else its copy would take what the first one left for its own, and end."""
    own = execution(publish_id="")
    first = taken(**{**MYSELF, "execution": own})
    answers = [first] if why == "it runs" else [MarkerStands("done"), taken(**STRANGER)]
    with pytest.raises((Ignore, Retry)):
        deliver(app, *answers, options={"on_conflict": policy}, redlock=None)
    ((*_, sent),) = app.sent
    assert len(sent["headers"]["redlock"]["id"]) == 32
    assert sent["headers"]["redlock"]["id"] != own
    assert app.locks.marked == []  # its first delivery may come again, and is no second publish


@pytest.mark.parametrize("redelivered", [False, True])
def test_the_same_task_id_is_no_redelivery(app, redelivered):
    """Beside a holder of the same task id the policy decides, unless the message came before."""
    holder = {**MYSELF, "execution": execution(publish_id="")}
    fields = {"redlock": None, "delivery_info": {"redelivered": redelivered}}
    if redelivered:
        with pytest.raises(Ignore):
            deliver(app, taken(**holder), **fields)
        assert app.sent[0][2]["headers"]["redlock"]["id"] == ""
    else:
        assert deliver(app, taken(**holder), **fields)["skipped"] == "conflict"


def test_a_second_publish_under_the_same_task_id_is_a_conflict(app):
    holder = {**MYSELF, "execution": execution(publish_id="1" * 32)}
    assert deliver(app, taken(**holder))["skipped"] == "conflict"
    assert app.sent == []


@pytest.mark.parametrize("policy", ["skip", "fail", "retry", "reschedule"])
def test_a_task_never_loses_to_itself(app, policy):
    """A copy of a running execution is set aside by every policy; nothing is stored or counted."""
    with pytest.raises(Ignore):
        deliver(app, taken(**MYSELF), options={"on_conflict": policy}, headers={"a": 1})
    ((name, args, sent),) = app.sent
    assert (name, args, sent["task_id"], sent["retries"]) == ("shop.bill", (7,), "me", 0)
    assert sent["countdown"] == 5
    waiting = sent["headers"]["redlock"].pop("waiting")
    assert (waiting["name"], waiting["times"]) == (app.locks.wanted[0].name, 1)
    assert sent["headers"] == {"a": 1, "parent_id": None, "redlock": HEADER}
    assert app.locks.released == []


@pytest.mark.parametrize(("ttl", "countdown"), [(0.0, 1), (0.3, 1), (4.2, 5), (60.0, 10)])
def test_a_copy_comes_back_in_time(app, ttl, countdown):
    """When the lease may have ended, in whole seconds, well below the visibility timeout."""
    with pytest.raises(Ignore):
        deliver(app, taken(**{**MYSELF, "ttl": ttl}))
    assert app.sent[0][2]["countdown"] == countdown


def waiting_in(sent):
    return Waiting.of(sent[2]["headers"]["redlock"].get("waiting"))


@pytest.mark.parametrize(
    ("limit", "wakes_it"),
    [(1, Wakes.FREE), (2, Wakes.RELEASE)],
    ids=["one place", "several places"],
)
def test_a_copy_is_woken_when_the_one_that_runs_releases(app, limit, wakes_it):
    """Where other places may be free only by that: it would find itself, and be woken at once."""
    with pytest.raises(Ignore):
        deliver(app, taken(**MYSELF), options={"lock_limit": limit})
    assert waiting_in(app.sent[0]).wakes_it is wakes_it


QUEUED = Waiting("shop.bill", 1.7e9, 3)


def test_a_task_that_waited_as_a_message_leaves_the_line_with_its_lock(app):
    """Else it would count for ``max_waiting`` while it runs, and be sent hints."""
    assert deliver(app, redlock={**HEADER, "waiting": QUEUED.parts}) == 7
    (leave,) = app.locks.told
    assert leave.script is LEAVE
    assert leave.keys[0] == b"redlock:line:shop.bill"
    assert leave.arguments == (execution().encode(),)
    assert deliver(app) == 7  # the twin: one that never waited has nothing to leave
    assert len(app.locks.told) == 1


def test_one_that_waits_for_another_of_its_names_leaves_the_first_line(app):
    """It would count for ``max_waiting`` there, for others who wait for that name alone."""
    before = replace(QUEUED, name="shop.pay")
    with pytest.raises(Ignore):
        deliver(
            app,
            taken(**STRANGER),
            redlock={**HEADER, "waiting": before.parts},
            options={"on_conflict": "queue", "lock_key": "shop.bill"},
        )
    (leave,) = app.locks.told
    assert leave.script is LEAVE
    assert b"shop.pay" in leave.keys[0]


@pytest.mark.parametrize(
    ("answer", "options", "error"),
    [
        (taken(**STRANGER), {"on_conflict": "fail"}, LockTaken),
        (taken(**STRANGER), {"on_conflict": "skip"}, None),
        (QuorumUnavailable("shop.bill", {}), {"on_unavailable": "fail"}, QuorumUnavailable),
        (MarkerStands("done"), {}, Ignore),
    ],
)
def test_one_that_waits_no_more_leaves_the_line(app, answer, options, error):
    with pytest.raises(error) if error else contextlib.nullcontext():
        deliver(app, answer, redlock={**HEADER, "waiting": QUEUED.parts}, options=options)
    (leave,) = app.locks.told
    assert leave.script is LEAVE


@pytest.mark.parametrize(
    ("answer", "options"),
    [
        (QuorumUnavailable("shop.bill", {}), {}),
        (MarkerStands("finishing"), {}),
        (taken(**MYSELF), {"lock_key": "shop.bill"}),
        (taken(**STRANGER), {"lock_key": "shop.bill", "on_conflict": "queue"}),
    ],
)
def test_one_that_comes_again_stays_in_the_line(app, answer, options):
    """The nodes know since when it waits."""
    with pytest.raises(Ignore):
        deliver(app, answer, redlock={**HEADER, "waiting": QUEUED.parts}, options=options)
    assert app.locks.told == []


@pytest.mark.parametrize(("word", "was_woken"), [("yes", True), ("no", False), (None, False)])
def test_who_has_the_lock_is_told_how_long_it_waited_and_whether_it_was_woken(app, word, was_woken):
    """So that an operator sees whether tasks wait for a hint, or for their time."""
    info = {"redlock_woken": word}
    deliver(app, redlock={**HEADER, "waiting": QUEUED.parts}, delivery_info=info)
    (wanted,) = app.locks.wanted
    assert (wanted.queued_since, wanted.was_woken) == (1.7e9, was_woken)
    assert info == {}  # a body is not shown it, nor is a retry to take it along


@pytest.mark.parametrize(
    "answer", [MarkerStands("finishing"), MarkerStands(""), QuorumUnavailable("k", {})]
)
def test_what_has_queued_and_waits_for_no_lock_now_is_not_woken(app, answer):
    """The lock is free: it would go round as fast as the broker can. It keeps since when."""
    with pytest.raises(Ignore):
        deliver(app, answer, redlock={**HEADER, "waiting": QUEUED.parts})
    assert waiting_in(app.sent[0]) == QUEUED.unwoken


@pytest.mark.parametrize("is_heard", [True, False])
def test_the_next_run_is_woken_when_the_one_before_it_releases(app, is_heard):
    """Where no release can wake it, it looks after a while, and less and less often."""
    app.locks.listener = object() if is_heard else None
    rerun = {"unique_until": "finished", "on_duplicate": "rerun"}
    with pytest.raises(Ignore):
        deliver(app, taken(**STRANGER), options=rerun)
    waiting, countdown = waiting_in(app.sent[0]), app.sent[0][2]["countdown"]
    assert (waiting.wakes_it, waiting.times) == (Wakes.FREE, 1)
    assert countdown == (5 if is_heard else 1)


@pytest.mark.parametrize(
    "kin",
    [
        {"task_id": "me", "execution": execution(retries=1), "ttl": 1.0},  # the retry before
        {"task_id": "me", "execution": execution(nesting=1), "ttl": 1.0},  # what this one replaced
        {"task_id": "parent", "execution": execution("parent"), "ttl": 1.0},  # the last of a chain
    ],
)
def test_what_came_before_a_task_is_waited_for(app, kin):
    """It is about to give the lock back: wait briefly, then set aside; never a conflict."""
    fields = {"retries": 2, "parent_id": "parent", "options": {"on_conflict": "fail"}}
    assert deliver(app, taken(**kin), **fields) == 7
    assert [wanted.wait for wanted in app.locks.wanted] == [0.0, PREVIOUS_GRACE]
    assert app.sent == []
    with pytest.raises(Ignore):
        deliver(app, taken(**kin), taken(**kin), **fields)
    assert len(app.sent) == 1


@pytest.mark.parametrize("limit", [1, 2])
def test_what_came_before_a_task_is_looked_for_on_all_places(app, limit):
    """Whoever was named in the refusal; twin: of a lock without places there is but one holder."""
    kin = {"task_id": "me", "execution": execution(retries=1)}
    app.locks.held_by = kin
    options = {"on_conflict": "skip", "lock_limit": limit}
    if limit == 1:
        assert deliver(app, taken(**STRANGER), retries=2, options=options)["skipped"]
        return
    assert deliver(app, taken(**STRANGER), retries=2, options=options) == 7
    assert [wanted.wait for wanted in app.locks.wanted] == [0.0, PREVIOUS_GRACE]
    with pytest.raises(Ignore):
        deliver(app, taken(**STRANGER), taken(**STRANGER), retries=2, options=options)
    assert waiting_in(app.sent[0]).wakes_it is Wakes.RELEASE


def test_a_stranger_who_comes_first_after_all_is_a_conflict(app):
    kin = {"task_id": "parent", "execution": execution("parent")}
    with pytest.raises(LockTaken):
        deliver(
            app,
            taken(**kin),
            taken(**STRANGER),
            parent_id="parent",
            options={"on_conflict": "fail"},
        )
    assert app.sent == []


def test_another_publish_with_our_id_is_no_parent_of_ours(app):
    """Celery makes a copy that is published within its task a child of that: of itself."""
    other = taken(task_id="me", execution=execution(publish_id="f" * 32))
    with pytest.raises(LockTaken):
        deliver(app, other, other, parent_id="me", options={"on_conflict": "fail"})
    assert app.sent == []


@pytest.mark.parametrize("holder", [STRANGER, {}, {"token": "x"}, {"execution": execution()}])
def test_a_stranger_is_a_conflict(app, holder):
    value = deliver(app, taken(**holder), parent_id="parent")
    assert value["skipped"] == "conflict"
    assert type(value) is dict
    assert not isinstance(value, Skipped)
    assert (app.sent, app.locks.released) == ([], [])


def test_what_has_finished_does_not_run_again(app):
    with pytest.raises(Ignore):
        deliver(app, MarkerStands("done"), body=lambda _: pytest.fail("ran again"))
    assert (app.sent, app.locks.released) == ([], [])


@pytest.mark.parametrize("policy", ["skip", "fail", "retry", "reschedule", "run_unlocked"])
def test_what_may_have_finished_comes_again_whatever_the_policy(app, policy):
    """Too few nodes could tell: to run it, to fail it or to skip it may be once too often."""
    how = {"on_unavailable": policy, "lock_ttl": 30.0}
    with pytest.raises(Ignore):
        deliver(app, MarkerStands(""), body=lambda _: pytest.fail("ran again"), options=how)
    ((_, _, sent),) = app.sent
    assert (sent["task_id"], sent["countdown"]) == ("me", 10)


@pytest.mark.parametrize(("lock_ttl", "countdown"), [(1.0, 1), (6.0, 2), (30.0, 10)])
def test_what_is_about_to_finish_is_looked_at_again(app, lock_ttl, countdown):
    """Until the result is stored a copy waits: the first may still die. It does not ask often."""
    ttl = {"lock_ttl": lock_ttl}
    with pytest.raises(Ignore):
        deliver(
            app, MarkerStands("finishing"), body=lambda _: pytest.fail("ran again"), options=ttl
        )
    ((_, _, sent),) = app.sent
    assert (sent["task_id"], sent["countdown"]) == ("me", countdown)


def raises(error):
    def body(_):
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "is_over"),
    [
        (ValueError(), True),
        (Retry(), True),
        (Ignore(), False),
        (Reject(requeue=True), False),
        (SystemExit(), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_only_what_has_ended_by_itself_is_remembered(app, error, is_over):
    """After Ignore, Reject and a forced end the message may be meant to come again."""
    with pytest.raises(type(error)):
        deliver(app, body=raises(error))
    ((_, marker),) = app.locks.released
    assert (marker is not None) == is_over


NEWER = {"acks_on_failure": False}
CONTRARY = {"acks_on_failure": True, "acks_on_failure_or_timeout": False}


@pytest.mark.parametrize(
    ("options", "is_failure_over"),
    [
        ({"acks_on_failure_or_timeout": False}, False),
        # With Celery 5.7 the two that it has become go before it.
        *([(NEWER, False), (CONTRARY, True)] if hasattr(Task, "acks_on_failure") else []),
    ],
)
def test_a_failure_that_is_not_acknowledged_is_not_remembered(app, options, is_failure_over):
    """A dead-letter exchange may bring the message back, to run as a plain task would."""
    for error, is_over in ((ValueError(), is_failure_over), (Retry(), True)):
        with pytest.raises(type(error)):
            deliver(app, body=raises(error), options={"acks_late": True, **options})
        ((_, marker),) = app.locks.released
        assert (marker is not None) == is_over
        app.locks.released.clear()


def test_a_retry_of_the_bodys_own_is_celerys_to_write(app):
    """How the message was written is for copies of it; the body's arguments may be others."""
    seen = []

    def again(task):
        seen.append(task.request.delivery_info)
        raise task.retry(countdown=0, max_retries=None)

    with pytest.raises(Retry):
        deliver(app, body=again, delivery_info={"routing_key": "x", "serializer": "pickle"})
    ((_, _, sent),) = app.sent
    assert sent.get("serializer") != "pickle"
    assert seen == [{"routing_key": "x"}]


def test_the_body_has_the_request_of_its_message(app):
    """No second one, which would be empty up to Celery 5.4: nothing has patched Celery's call."""

    def depth(task):
        return len(task.request_stack), task.request.id, task.request.called_directly

    assert deliver(app, body=depth) == (1, "me", False)


@pytest.mark.parametrize("lowered_to", [2, 1, 0, -1])
def test_what_a_body_publishes_under_its_own_id_is_another_execution(app, lowered_to):
    """Also if it lowers the number of retries, and hands on all the headers that it sees."""

    def again(task):
        task.request.retries = lowered_to
        raise task.retry(countdown=0, max_retries=None, headers=task.request.headers)

    header = {"mine": 1, "redlock": HEADER}
    with pytest.raises(Retry):
        deliver(app, body=again, retries=2, headers=header)
    ((_, _, sent),) = app.sent
    assert sent["retries"] == lowered_to + 1
    assert sent["headers"]["mine"] == 1
    ((_, marker),) = app.locks.released
    assert marker.name == execution(retries=2)
    told = sent["headers"]["redlock"]
    assert told["previous"] == marker.name
    assert told["id"] != PUBLISH
    again = execution("me", sent["retries"], publish_id=told["id"])
    assert again != marker.name
    holder = {"task_id": "me", "execution": marker.name, "ttl": 1.0}
    app.locks.wanted.clear()
    assert deliver(app, taken(**holder), redlock=told) == 7  # it waits for what published it
    assert len(app.locks.wanted) == 2


@pytest.mark.parametrize(
    "headers", [None, {}, {"sentry-trace": "1"}, {"redlock": {"v": 1, "task_id": "me", "id": "f"}}]
)
def test_ours_is_read_past_what_other_libraries_nest(app, headers):
    """A dict called ``headers`` in a message is all that Celery then shows of them."""
    with pytest.raises(Ignore):
        deliver(app, MarkerStands("finishing"), headers=headers)
    assert app.sent[0][2]["headers"]["redlock"] == HEADER


@pytest.mark.parametrize(
    ("is_stored", "word", "ttl"), [(True, "done", 3600.0), (False, "finishing", 0.0)]
)
def test_a_message_acknowledged_late_is_remembered_in_two_steps(app, is_stored, word, ttl):
    """It is finishing with the release, and done once the result is stored, else forgotten."""
    deliver(app, options={"acks_late": True, "lock_ttl": 6.0})
    ((_, marker),) = app.locks.released
    assert (marker.name, marker.state, marker.ttl) == (execution(), "finishing", 6.0)
    app.execution.completed(is_stored=is_stored)
    (marked,) = [(m.name, m.state, m.ttl) for m in app.locks.marked]
    assert marked == (execution(), word, ttl)


def trace(app, body, *, link=None, chain=None):
    """Deliver a task as a worker does: with what comes between its body and the end."""

    @app.task(base=RedlockTask, bind=True, name="shop.bill", shared=False, acks_late=True)
    def bill(self):
        return body(self)

    task = app.tasks["shop.bill"]
    known = {"id": "me", "redlock": HEADER, "delivery_info": {}, "hostname": "here"}
    request = {**known, "callbacks": link, "chain": chain}
    before = latest_execution.get()
    try:
        return build_tracer(task.name, task, app=app)("me", (), {}, request)
    finally:
        latest_execution.set(before)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, OperationalError, ValueError])
@pytest.mark.parametrize("where", ["the result", "a callback", "the next of a chain"])
@pytest.mark.filterwarnings("ignore:Exception raised outside body")
def test_done_is_said_only_of_what_is_stored(app, monkeypatch, where, error):
    """Celery tells SUCCESS also where an error or the end of the process comes before that."""

    def strike(*_, **__):
        raise error

    follower = app.signature("shop.thank", immutable=True)
    work = {"a callback": {"link": [follower]}, "the next of a chain": {"chain": [follower]}}
    stored = []

    def store(task_id, result, state, **_):
        if where == "the result" and state == "SUCCESS":
            strike()
        stored.append(state)

    monkeypatch.setattr(app.backend, "store_result", store)
    if where != "the result":
        monkeypatch.setattr(app, "send_task", strike)
    with contextlib.suppress(SystemExit, KeyboardInterrupt):
        trace(app, lambda task: 7, **work.get(where, {}))
    marked = [(m.state, m.ttl) for m in app.locks.marked]
    is_failure_stored = stored == ["FAILURE"] and marked == [("done", 3600.0)]
    assert marked == [("finishing", 0.0)] or is_failure_stored


@pytest.mark.parametrize("where", ["give_back", "end_reservation"])
@pytest.mark.filterwarnings("ignore:Exception raised outside body")
def test_an_end_that_is_cut_short_is_forgotten(app, monkeypatch, where):
    """A greenlet may be killed amid its release; its message, delivered again, runs at once."""

    def strike(*_, **__):
        raise GreenletExit

    class GreenletExit(BaseException):  # as that of greenlets
        pass

    monkeypatch.setattr(*{"give_back": (app.locks, where)}.get(where, (ending, where)), strike)
    with pytest.raises(GreenletExit):
        trace(app, lambda task: 7)
    assert [(m.state, m.ttl) for m in app.locks.marked] == [("finishing", 0.0)]


@pytest.mark.parametrize("how", ["returns", "fails", "retries"])
def test_done_is_said_of_what_is_stored(app, monkeypatch, how):
    """The twin: whatever that is, and although an error was handled before."""
    stored = []
    monkeypatch.setattr(
        app.backend, "store_result", lambda task_id, result, state, **_: stored.append(state)
    )

    def body(task):
        if how == "fails":
            raise ValueError
        if how == "retries":
            raise task.retry()

    trace(app, body)
    assert stored == {"returns": ["SUCCESS"], "fails": ["FAILURE"], "retries": ["RETRY"]}[how]
    assert [(m.state, m.ttl) for m in app.locks.marked] == [("done", 3600.0)]


def test_done_is_said_although_a_worker_was_started_while_an_error_was_handled(app, monkeypatch):
    """Its children inherit that error, which is none of their tasks'."""
    monkeypatch.setattr(app.backend, "store_result", lambda *_, **__: None)
    try:
        raise OSError  # noqa: TRY301  as who starts a worker in place of what fails
    except OSError:
        trace(app, lambda task: 7)
    assert [(m.state, m.ttl) for m in app.locks.marked] == [("done", 3600.0)]


def test_without_memory_nothing_is_marked(app):
    deliver(app, options={"acks_late": True, "dedup_ttl": 0})
    assert app.locks.wanted[0].marker is None
    assert [marker for _, marker in app.locks.released] == [None]
    app.execution.completed(is_stored=True)
    assert app.locks.marked == []


def test_a_release_that_fails_is_not_the_tasks_affair(app, monkeypatch, caplog):
    """The lease ends by itself; the task's own outcome stands."""

    def broken(*_, **__):
        raise OSError

    monkeypatch.setattr(app.locks, "give_back", broken)
    assert deliver(app) == 7
    assert "Releasing lock" in caplog.text


def test_a_lock_that_was_lost_before_the_body_began_runs_nothing(app, monkeypatch):
    """Between the grant and the body a process may be stopped for longer than its lease."""
    from celery_redlock import LockLost

    def take(wanted, on_lost=None):
        return HeldLock(Lease(wanted.name, "t" * 40, 1, 1.0, clock.now() - 1, 0.0), on_lost)

    monkeypatch.setattr(app.locks, "take", take)
    with pytest.raises(LockLost):
        deliver(app, body=lambda _: pytest.fail("ran without its lock"))
    assert deliver(app, options={"on_lock_lost": "warn", "lock_key": "x"}) == 7
