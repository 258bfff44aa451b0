from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import hypothesis
import pytest
from celery import Celery, chain, chord, group
from celery.app.task import Context
from celery.exceptions import Ignore, Reject
from celery.exceptions import Retry as CeleryRetry
from celery.result import ResultSet
from hypothesis import strategies as st
from kombu.exceptions import EncodeError, OperationalError
from kombu.serialization import dumps, loads

from celery_redlock import (
    Fail,
    LockTaken,
    QuorumUnavailable,
    RedlockTask,
    Reschedule,
    Retry,
    Skip,
)
from celery_redlock.events import TaskRescheduled, TaskSkipped
from celery_redlock.plugin import plugin_for
from celery_redlock.task.execution.begun import Refused
from celery_redlock.task.execution.claim import Claim
from celery_redlock.task.execution.delay import delay
from celery_redlock.task.execution.outcome import Outcome
from celery_redlock.task.execution.plan import Situation
from celery_redlock.task.execution.refused import refuse
from celery_redlock.task.execution.requeue import Requeue, requeue
from celery_redlock.task.messages.broker import longest_countdown
from celery_redlock.task.messages.delivery import Delivery
from celery_redlock.task.messages.envelope import Envelope
from celery_redlock.task.messages.waiting import Waiting
from celery_redlock.task.naming.task_lock import lock_of
from support.versions import CELERY

HEADER = {"v": 1, "task_id": "me", "id": "1" * 32}
HOLDER = {"token": "01234567", "task_id": "other", "execution": "0" * 32, "ttl": 1.5}
TAKEN = LockTaken("shop.bill:1", {"one:1/0": "refused"}, HOLDER)
DEATH = ("exchange", "queue", "reason")
UNDECIDED = QuorumUnavailable("shop.bill:1", {"one:1/0": "unreachable"}, 3.0)


@pytest.fixture
def app():
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.redlock_nodes = ["redis://one:1/0"]
    yield app
    app.close()


@pytest.fixture
def published(app, monkeypatch):
    """What was published, as ``(task name, args, kwargs, options)``, instead of publishing it."""
    messages = []

    def send_task(name, args=None, kwargs=None, **options):
        messages.append((name, args, kwargs, options))
        return app.AsyncResult(options["task_id"])

    monkeypatch.setattr(app, "send_task", send_task)
    return messages


@pytest.fixture
def pauses(monkeypatch):
    pauses = []
    monkeypatch.setattr("celery_redlock.task.execution.requeue.pause", pauses.append)
    return pauses


def declare(app, **options):
    @app.task(base=RedlockTask, name="shop.bill", shared=False, bind=True, **options)
    def bill(self, invoice_id, *, dry_run=False):
        return invoice_id

    return app.tasks["shop.bill"]


def delivery(task, **fields):
    request = Context(
        {"id": "me", "args": (1,), "kwargs": {}, "called_directly": False, "retries": 0, **fields}
    )
    task.push_request(**vars(request))
    return task.request


def act(task, request, error):
    fields = {"headers": request.headers, **vars(request)}
    told = []
    return refuse(refusal(task, request, Delivery.of(task, fields, "here"), error, told)), told


def refusal(task, request, delivery, error, told):
    plugin = SimpleNamespace(
        notify=told.append,
        settings=plugin_for(task.app).settings,
        locks=SimpleNamespace(listener=None),
    )
    claim = Claim(task, request, delivery, lock_of(task), plugin, ("shop.bill:1",))
    is_taken = isinstance(error, LockTaken)
    return Refused(claim, error, Situation.TAKEN if is_taken else Situation.UNAVAILABLE)


@pytest.mark.parametrize(
    ("error", "cause", "holder"), [(TAKEN, "conflict", HOLDER), (UNDECIDED, "unavailable", {})]
)
def test_a_skip_ends_with_a_value_that_tells_why(app, error, cause, holder):
    task = declare(app, on_conflict="skip", on_unavailable="skip")
    result, told = act(task, delivery(task), error)
    assert result == {"skipped": cause, "lock": "shop.bill:1", "holder": holder}
    assert told == [TaskSkipped("shop.bill:1", "shop.bill", "me", cause, holder)]


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml"])
def test_a_skipped_value_survives_every_serializer(app, serializer):
    task = declare(app, on_conflict="skip")
    request = delivery(task)
    result, _ = act(task, request, TAKEN)
    assert json.loads(json.dumps(result)) == result
    content_type, encoding, data = dumps(result, serializer)
    assert loads(data, content_type, encoding, accept=[content_type]) == result


@pytest.mark.parametrize("error", [TAKEN, UNDECIDED])
def test_a_fail_raises_the_error_itself(app, error):
    task = declare(app, on_conflict="fail", on_unavailable=Fail())
    with pytest.raises(type(error)) as failed:
        act(task, delivery(task), error)
    assert failed.value is error


@pytest.mark.parametrize(
    ("policy", "other"), [("on_conflict", UNDECIDED), ("on_unavailable", TAKEN)]
)
def test_each_cause_has_its_own_policy(app, policy, other):
    both = {"on_conflict": Fail(), "on_unavailable": Fail(), policy: Skip()}
    task = declare(app, **both)
    with pytest.raises(type(other)):
        act(task, delivery(task), other)


@pytest.mark.parametrize("policy", [Retry(), Reschedule()])
def test_in_eager_mode_nothing_comes_later(app, published, policy):
    task = declare(app, on_conflict=policy)
    with pytest.raises(LockTaken):
        act(task, delivery(task, is_eager=True), TAKEN)
    assert published == []


@pytest.mark.parametrize(
    ("policy", "options", "retries", "allowed"),
    [
        (Retry(countdown=5), {"default_retry_delay": 7}, 0, {5}),
        (Retry(countdown=0), {}, 0, {1}),
        (Retry(countdown=0.2), {}, 0, {1}),
        (Retry(), {"default_retry_delay": 7}, 0, {7}),
        (Retry(), {"retry_backoff": 3, "retry_jitter": False}, 0, {3}),
        (Retry(), {"retry_backoff": True, "retry_jitter": False}, 2, {4}),
        (Retry(), {"retry_backoff": 3, "retry_backoff_max": 4, "retry_jitter": False}, 2, {4}),
        (Retry(), {"retry_backoff": 8}, 0, set(range(1, 9))),
        (Retry(), {"retry_backoff": False, "default_retry_delay": 7}, 0, {7}),
        (Retry(countdown=1), {"retry_backoff": 9, "retry_jitter": False}, 0, {1}),
    ],
)
def test_a_retry_is_celerys_own(app, published, policy, options, retries, allowed):
    """It counts, and waits as the policy says, else as the task's own retries would."""
    task = declare(app, on_conflict=policy, **options)
    with pytest.raises(CeleryRetry) as again:
        act(task, delivery(task, retries=retries), TAKEN)
    ((name, args, _, sent),) = published
    assert (name, args, sent["task_id"], sent["retries"]) == ("shop.bill", (1,), "me", retries + 1)
    assert sent["countdown"] in allowed
    assert again.value.exc is TAKEN


def test_a_retry_past_the_last_fails_with_the_cause(app, published):
    task = declare(app, on_conflict="retry", max_retries=2)
    with pytest.raises(LockTaken):
        act(task, delivery(task, retries=2), TAKEN)
    assert published == []


CARRIED = {
    "retries": 2,
    "root_id": "root",
    "parent_id": "parent",
    "group": "group",
    "group_index": 3,
    "chord": {"task": "celery.x"},
    "chain": [{"task": "shop.next"}],
    "callbacks": [{"task": "shop.link"}],
    "errbacks": [{"task": "shop.errback"}],
    "expires": "2039-01-01T00:00:00+00:00",
    "timelimit": (30, 20),
    "reply_to": "somebody",
    "headers": {"tenant": "acme"},
    "redlock": HEADER,
    "argsrepr": "(hidden,)",
    "kwargsrepr": "{}",
    "properties": {"delivery_mode": 1},
    "compression": "application/x-gzip",
    "delivery_info": {
        "exchange": "",
        "routing_key": "invoices",
        "priority": 7,
        "serializer": "pickle",
    },
    "replaced_task_nesting": 1,
    "ignore_result": True,
    "stamps": {"shop": ["eu"]},
    "stamped_headers": ["shop"],
}


def test_a_reschedule_carries_everything_along(app, published):
    task = declare(app, on_conflict=Reschedule())
    request = delivery(task, **CARRIED)
    with pytest.raises(Ignore):
        act(task, request, TAKEN)
    ((name, args, kwargs, sent),) = published
    assert (name, args, kwargs) == ("shop.bill", (1,), {})
    assert sent["headers"] == {"tenant": "acme", "redlock": {**HEADER, "reschedules": 1}}
    expected = {
        "task_id": "me",
        "retries": 2,
        "root_id": "root",
        "parent_id": "parent",
        "group_id": "group",
        "group_index": 3,
        "chord": CARRIED["chord"],
        "chain": CARRIED["chain"],
        "link": CARRIED["callbacks"],
        "link_error": CARRIED["errbacks"],
        "expires": CARRIED["expires"],
        "time_limit": 30,
        "soft_time_limit": 20,
        "reply_to": "somebody",
        "queue": "invoices",
        "priority": 7,
        "replaced_task_nesting": 1,
        "ignore_result": True,
        "shop": ["eu"],
        "stamped_headers": ["shop"],
        "countdown": 1,
        "argsrepr": "(hidden,)",
        "kwargsrepr": "{}",
        "delivery_mode": 1,
        "serializer": "pickle",
        "compression": "application/x-gzip",
    }
    assert {key: sent.get(key) for key in expected} == expected


def test_a_reschedule_keeps_the_ids_of_its_message(app, published):
    task = declare(app, on_conflict=Reschedule())
    own = {"correlation_id": "order-7", "properties": {"message_id": "m-7"}, "parent_id": None}
    with pytest.raises(Ignore):
        act(task, delivery(task, **own), TAKEN)
    sent = published[0][3]
    assert (sent["correlation_id"], sent["message_id"]) == ("order-7", "m-7")
    assert sent["headers"]["parent_id"] is None


@pytest.mark.parametrize("of_task", [None, False, True])
@pytest.mark.parametrize("of_call", [None, False, True])
def test_whether_a_result_is_wanted_stays_as_it_was(app, published, of_task, of_call):
    task = declare(app, on_conflict=Reschedule(), ignore_result=of_task)
    said = {} if of_call is None else {"ignore_result": of_call}
    with pytest.raises(Ignore):
        act(task, delivery(task, **said), TAKEN)
    sent = published[0][3]
    assert bool(sent["ignore_result"]) is bool(of_task if of_call is None else of_call)


def test_what_a_broker_noted_of_the_past_stays_behind(app, published):
    """RabbitMQ before 4.0.1 drops a delayed message that comes along with what it was before."""
    task = declare(app, on_conflict=Reschedule())
    deaths = {
        "x-death": [{"queue": "celery_delayed_0", "reason": "expired", "count": 1}],
        **{f"x-{which}-death-{what}": "x" for which in ("first", "last") for what in DEATH},
    }
    headers = {"tenant": "acme", "x-tenant": "acme", **deaths}
    with pytest.raises(Ignore):
        act(task, delivery(task, headers=headers, redlock=HEADER), TAKEN)
    assert published[0][3]["headers"] == {
        "tenant": "acme",
        "x-tenant": "acme",
        "parent_id": None,
        "redlock": {**HEADER, "reschedules": 1},
    }


@pytest.mark.parametrize(
    ("listener", "ends", "policy", "expected"),
    [
        ("hears", 61.2, Reschedule(), 62),
        ("hears", 61.2, Reschedule(base=1.0, cap=2.0), 62),
        ("hears", None, Reschedule(), 1),
        (None, 61.2, Reschedule(), 1),
        ("hears", 61.2, Retry(countdown=5), 5),
        ("hears", 3.2, Retry(countdown=5), 4),
    ],
)
def test_a_quarantine_is_waited_out_once(app, listener, ends, policy, expected):
    """Nothing is granted before it ends, and a worker that hears the nodes wakes it if it does."""
    task = declare(app, on_unavailable=policy)
    error = QuorumUnavailable("shop.bill:1", {"one:1/0": "quarantined"}, ends)
    refused = refusal(task, delivery(task), Delivery("me", Envelope(), "e" * 32, True), error, [])
    refused.claim.plugin.locks.listener = listener
    found = {delay(refused, policy, Waiting.again(None, "shop.bill:1")) for _ in range(20)}
    assert found == {expected}


def test_every_reschedule_is_counted(app, published):
    task = declare(app, on_conflict=Reschedule(max_reschedules=2))
    for times in (0, 1):
        request = delivery(task)
        told = []
        put_off = Delivery("me", Envelope(reschedules=times), "e" * 32, may_be_repeated=True)
        with pytest.raises(Ignore):
            refuse(refusal(task, request, put_off, TAKEN, told))
        sent = published.pop()[3]
        assert sent["headers"]["redlock"]["reschedules"] == times + 1
        assert told == [
            TaskRescheduled(
                "shop.bill:1",
                "shop.bill",
                "me",
                "conflict",
                sent["countdown"],
                times + 1,
                holder=TAKEN.holder,
            )
        ]
    with pytest.raises(LockTaken):
        act(task, delivery(task, redlock={**HEADER, "reschedules": 2}), TAKEN)
    assert published == []


@pytest.mark.parametrize("error", [ConnectionError(), OperationalError(), TimeoutError()])
def test_what_cannot_be_put_off_is_not_acknowledged(app, monkeypatch, pauses, error):
    """With late acknowledgement the broker still has the message, and gets it back; not at once."""
    task = declare(app, on_conflict=Reschedule(), acks_late=True)
    monkeypatch.setattr(app, "send_task", Mock(side_effect=error))
    with pytest.raises(Reject) as rejected:
        act(task, delivery(task), TAKEN)
    assert rejected.value.requeue
    assert len(pauses) == 1
    assert 0.5 <= pauses[0] <= 2


def test_what_can_never_be_put_off_fails_visibly(app, monkeypatch, pauses):
    """Put back it would come again for ever, as fast as the broker delivers."""
    task = declare(app, on_conflict=Reschedule(), acks_late=True)
    error = EncodeError("no JSON")
    monkeypatch.setattr(app, "send_task", Mock(side_effect=error))
    with pytest.raises(LockTaken) as failed:
        act(task, delivery(task), TAKEN)
    assert failed.value.__cause__ is error
    assert pauses == []


def test_a_copy_that_cannot_be_set_aside_writes_no_state(app, monkeypatch, pauses):
    """The execution that it is a copy of runs, and has a result to store."""
    task = declare(app, acks_late=True)
    monkeypatch.setattr(app, "send_task", Mock(side_effect=EncodeError("no JSON")))
    with pytest.raises(Reject) as rejected:
        aside = Requeue(Envelope(), 1.0, "the same execution runs elsewhere", Outcome.SET_ASIDE)
        requeue(Claim.of(task, delivery(task)), aside)
    assert rejected.value.requeue
    assert len(pauses) == 1


def test_what_cannot_be_put_off_fails_visibly(app, monkeypatch):
    """With early acknowledgement the message is gone, so the task must end in a state."""

    def broken(*_, **__):
        raise ConnectionError

    task = declare(app, on_conflict=Reschedule())
    monkeypatch.setattr(app, "send_task", broken)
    with pytest.raises(LockTaken):
        act(task, delivery(task), TAKEN)


@pytest.mark.parametrize(
    ("broker", "options", "longest"),
    [
        ("redis://broker/0", {}, 1200),
        ("redis://broker/0", {"visibility_timeout": 60}, 20),
        ("redis://broker/0", {"visibility_timeout": 2}, 1),
        ("rediss://broker/0", {"visibility_timeout": 60}, 20),
        ("sentinel://broker:26379", {"visibility_timeout": 60}, 20),
        ("sqs://", {}, 600),
        (["redis://broker/0", "redis://spare/0"], {"visibility_timeout": 60}, 20),
        ("amqp://broker", {"visibility_timeout": 60}, 600),
    ],
)
def test_a_delay_stays_below_the_visibility_timeout(broker, options, longest):
    """A delayed message that comes back early would be executed as often as it came."""
    app = Celery("shop", broker=broker, set_as_current=False)
    app.conf.broker_transport_options = options
    assert longest_countdown(app) == longest


def tasks_of(app):
    @app.task(name="shop.next", shared=False)
    def following(*_):
        return None

    return declare(app, on_conflict="skip"), app.tasks["shop.next"]


def workflows(first, then):
    return {
        "chain": chain(first.si(1), then.s(), then.s()),
        "group": chain(first.si(1), group(then.s(), then.s())),
        "chord": chain(first.si(1), group(then.s(), then.s()), then.s()),
        "deep": chain(first.si(1), group(chain(then.s(), then.s()), then.s()), then.s(), then.s()),
        "body": chain(first.si(1), chord([then.s(), then.s()], chain(then.s(), then.s()))),
    }


def results_within(result):
    if result is None:
        return {}
    found = results_within(result.parent)
    for child in getattr(result, "results", ()):
        found |= results_within(child)
    return found if isinstance(result, ResultSet) else {result.id: result, **found}


@pytest.mark.parametrize(
    ("shape", "tasks"), [("chain", 2), ("group", 2), ("chord", 3), ("deep", 5), ("body", 4)]
)
def test_whatever_followed_a_skipped_task_is_revoked(app, published, shape, tasks):
    first, then = tasks_of(app)
    waiting = results_within(workflows(first, then)[shape].apply_async())
    ((_, _, _, sent),) = published
    del waiting[sent["task_id"]]
    request = delivery(
        first, chain=json.loads(json.dumps(sent["chain"])), callbacks=[{"task": "shop.link"}]
    )
    act(first, request, TAKEN)
    assert [r.state for r in waiting.values()] == ["REVOKED"] * tasks
    assert (request.chain, request.callbacks) == (None, None)


def test_a_chain_may_go_on_with_the_skipped_value(app, published):
    task = declare(app, on_conflict="skip", chain_on_skip="continue")
    rest = [{"task": "shop.next", "options": {"task_id": "next of a chain"}}]
    request = delivery(task, chain=rest, callbacks=[{"task": "shop.link"}])
    result, _ = act(task, request, TAKEN)
    assert result["skipped"] == "conflict"
    assert (request.chain, request.callbacks) == (rest, [{"task": "shop.link"}])
    assert app.AsyncResult("next of a chain").state == "PENDING"


def begun(app, published, shape):
    """Publish a workflow; returns its first task, that task's request and all other results."""
    is_declared = "shop.next" in app.tasks
    names = ("shop.bill", "shop.next")
    first, then = [app.tasks[name] for name in names] if is_declared else tasks_of(app)
    published.clear()
    waiting = results_within(shape(first, then).apply_async())
    ((_, _, _, sent),) = published
    waiting.pop(sent["task_id"], None)  # in Celery 5.4 a chord whose body is a chain has no parent
    text = json.dumps({"chain": sent.get("chain"), "callbacks": sent.get("link")})
    # Of a chord Celery may return ids that it never publishes: up to 5.6 where its body is a chain,
    # in 5.7 of a group behind a group.
    waiting = {task_id: result for task_id, result in waiting.items() if task_id in text}
    return first, delivery(first, **json.loads(text)), waiting


def fail_as_celery(app, request):
    app.backend.mark_as_failure(request.id, TAKEN, request=request)


def links(first, then):
    return chain(first.si(1), then.s(), group(then.s(), then.s()), use_link=True)


@pytest.mark.parametrize("shape", ["chain", "group", "chord", "deep", "body", "links"])
def test_whatever_followed_a_failed_task_fails_along(app, published, shape):
    """Celery forgets groups and links; with what it does itself every result has the error."""
    make = links if shape == "links" else lambda *tasks: workflows(*tasks)[shape]
    task, request, waiting = begun(app, published, make)
    task.on_conflict = "fail"
    with pytest.raises(LockTaken):
        act(task, request, TAKEN)
    fail_as_celery(app, request)
    assert {type(result.result) for result in waiting.values()} == {LockTaken}
    assert len(published) == 1


def test_celery_alone_forgets_groups_and_links(app, published):
    """If this fails, Celery has learnt it, and `fail_followers` may go."""
    for make in (links, lambda *tasks: workflows(*tasks)["group"]):
        _, request, waiting = begun(app, published, make)
        fail_as_celery(app, request)
        assert {result.state for result in waiting.values()} == {"PENDING"}


def test_a_skip_stops_links_that_somebody_waits_for(app, published):
    task, request, waiting = begun(app, published, links)
    act(task, request, TAKEN)
    assert {result.state for result in waiting.values()} == {"REVOKED"}


def test_a_chord_that_never_began_is_not_told_of_its_members(app, caplog):
    """They are revoked with it, but nobody counts them, and no error callback is called."""
    task = declare(app, on_conflict="skip")
    body = {"task": "shop.total", "options": {"task_id": "body"}}
    member = {"task": "shop.next", "options": {"task_id": "a", "group_id": "g", "chord": body}}
    kwargs = {"header": [member], "body": body}
    rest = [{"task": "celery.chord", "subtask_type": "chord", "kwargs": kwargs, "options": {}}]
    act(task, delivery(task, chain=rest), TAKEN)
    assert {app.AsyncResult(each).state for each in ("a", "body")} == {"REVOKED"}
    assert caplog.records == []


def test_a_revoked_result_tells_what_it_would_have_been(app, published):
    app.conf.result_extended = True

    def make(first, then):
        return chain(first.si(1), then.s("x", y=2))

    task, request, waiting = begun(app, published, make)
    act(task, request, TAKEN)
    (result,) = waiting.values()
    assert (result.name, result.args, result.kwargs) == ("shop.next", ["x"], {"y": 2})


def test_what_could_not_be_revoked_fails_with_the_task(app, published, monkeypatch):
    """If the result backend fails in between, the chain is left to Celery's own error handling."""
    task, request, _ = begun(app, published, lambda *tasks: workflows(*tasks)["chain"])

    def broken(*_, **__):
        raise ConnectionError

    monkeypatch.setattr(app.backend, "mark_as_revoked", broken)
    with pytest.raises(ConnectionError):
        act(task, request, TAKEN)
    assert len(request.chain) == 2


@pytest.mark.parametrize("policy", ["skip", "fail"])
def test_in_eager_mode_no_result_is_stored(app, policy, monkeypatch):
    """There, no result backend need be in reach."""
    task = declare(app, on_conflict=policy)
    monkeypatch.setattr(type(task), "backend", None)
    callbacks = [{"task": "shop.link", "options": {"task_id": "link"}}]
    request = delivery(task, is_eager=True, callbacks=callbacks)
    with pytest.raises(LockTaken) if policy == "fail" else nullcontext():
        act(task, request, TAKEN)


def canvases(then):
    def combined(inner):
        some = st.lists(inner, min_size=2, max_size=3)
        return st.one_of(
            some.map(lambda tasks: chain(*tasks)),
            some.map(lambda tasks: group(*tasks)),
            st.tuples(some, inner).map(lambda parts: chord(*parts)),
        )

    return st.recursive(st.builds(then.s), combined, max_leaves=7)


@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(data=st.data(), policy=st.sampled_from(["skip", "fail"]))
def test_nothing_that_followed_is_forgotten(app, published, data, policy):
    def make(first, then):
        return chain(first.si(1), *data.draw(st.lists(canvases(then), min_size=1, max_size=3)))

    try:
        task, request, waiting = begun(app, published, make)
    except NotImplementedError:  # up to Celery 5.6 nested chords may lose their app
        hypothesis.assume(CELERY >= (5, 7))
        raise
    task.on_conflict = policy
    with pytest.raises(LockTaken) if policy == "fail" else nullcontext():
        act(task, request, TAKEN)
    if policy == "fail":
        fail_as_celery(app, request)
    due = {"skip": "REVOKED", "fail": "FAILURE"}[policy]
    assert {result.state for result in waiting.values()} == {due}
