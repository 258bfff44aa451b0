"""What `redlock why` makes of what the nodes, the options and the journal say."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from celery import Celery

from celery_redlock import RedlockTask
from celery_redlock.errors import LockKeyError
from celery_redlock.lock.scripts.votes import Verdict
from celery_redlock.ops import why
from celery_redlock.ops.call import CallError, find_task, names_in_call
from celery_redlock.ops.cli.release import seen_in
from celery_redlock.ops.forecast import at_publish, at_run
from celery_redlock.ops.why import (
    Explanation,
    ended_results,
    explained,
    lines_of_name,
    most_places,
)
from celery_redlock.reading.all_locks import AllLocks
from celery_redlock.reading.journal_view import is_refusal_of
from celery_redlock.reading.one_lock import majority_of
from celery_redlock.reading.places import Places
from celery_redlock.reading.read_script import reservation_in
from celery_redlock.reading.stored import StoredReservation
from celery_redlock.task.policies import Fail, Queue, Reschedule, Retry, RunUnlocked, Skip
from support.one_lock import one_lock, seen
from support.options import OPTIONS

OURS, THEIRS = b"a" * 40, b"b" * 40
TASK = SimpleNamespace(name="shop.bill", max_retries=3, default_retry_delay=180)


# --- what the nodes say -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([seen(), seen(), seen()], Verdict.GRANTED),
        ([seen(), seen(), seen(state="down")], Verdict.GRANTED),
        ([seen(OURS), seen(OURS), seen()], Verdict.TAKEN),
        ([seen(OURS), seen(), seen()], Verdict.GRANTED),
        ([seen(OURS), seen(), seen(state="down")], Verdict.UNAVAILABLE),
        ([seen(), seen(state="quarantined"), seen(state="unmarked")], Verdict.UNAVAILABLE),
        ([seen(OURS), seen(OURS, "quarantined"), seen(state="unfit")], Verdict.UNAVAILABLE),
        ([seen(OURS), seen(THEIRS), seen(b"c" * 40)], Verdict.TAKEN),
        ([seen(), seen(state="down"), seen(state="down")], Verdict.UNAVAILABLE),
    ],
)
def test_what_another_call_would_be_told(found, expected):
    """As the lock itself judges the votes of these nodes, split votes decided."""
    assert one_lock(found).verdict is expected


FREE, TAKEN, SILENT = (
    [seen(), seen(), seen()],
    [seen(OURS), seen(OURS), seen()],
    [seen(), seen(state="down"), seen(state="down")],
)


@pytest.mark.parametrize(
    ("of_names", "state", "verdict"),
    [
        ({"a": [TAKEN, FREE]}, "free", Verdict.GRANTED),
        ({"a": [TAKEN, TAKEN]}, "held", Verdict.TAKEN),
        ({"a": [TAKEN, SILENT]}, "unavailable", Verdict.UNAVAILABLE),
        ({"a": [SILENT, FREE]}, "free", Verdict.GRANTED),
        ({"a": [FREE], "b": [TAKEN, FREE]}, "free", Verdict.GRANTED),
        ({"a": [FREE], "b": [TAKEN, TAKEN]}, "held", Verdict.TAKEN),
        ({"a": [SILENT], "b": [TAKEN]}, "held", Verdict.TAKEN),
        ({"a": [SILENT], "b": [FREE]}, "unavailable", Verdict.UNAVAILABLE),
    ],
)
def test_a_call_needs_one_place_of_each_name(of_names, state, verdict):
    """It is refused by the first name of which none is free."""
    places = Places(
        [
            replace(one_lock(found), name=name, number=number)
            for name, all_of_it in of_names.items()
            for number, found in enumerate(all_of_it)
        ]
    )
    assert (places.state, places.verdict) == (state, verdict)


@pytest.mark.parametrize(
    ("limit", "held", "expected"),
    [(1, [], 1), (1, [2], 3), (3, [], 3), (3, [1], 3), (9, [], 4), (0, [], 0), (0, [1], 2)],
)
def test_of_a_name_those_places_are_shown_that_there_are(limit, held, expected):
    """As many as its task has, and all that somebody has; not all of the largest limit."""
    found = [TAKEN if number in held else FREE for number in range(4)]
    places = places_of({"other": [FREE, FREE], "a": found})
    shown = places.up_to({"other": 1, "a": limit})
    assert [len(shown.of(name)) for name in ("other", "a")] == [1, expected]


def places_of(of_names):
    return Places(
        [
            replace(one_lock(found), name=name, number=number)
            for name, all_of_it in of_names.items()
            for number, found in enumerate(all_of_it)
        ]
    )


@pytest.mark.parametrize(
    ("of_names", "names", "words"),
    [
        ({"a": [TAKEN]}, ["a"], "held."),
        ({"a": [TAKEN, FREE]}, ["a"], "1 of 2 places is held."),
        ({"a": [TAKEN], "b": [TAKEN, FREE]}, ["a", "b"], "2 of 3 locks are held."),
        ({"a#rate": [TAKEN]}, ["a"], "1 of 1 start is used, by lock_rate."),
        ({"a#rate": [FREE] * 3}, ["a"], "0 of 3 starts are used, by lock_rate."),
        (
            {"a": [FREE], "a#rate": [TAKEN] * 2},
            ["a"],
            "free; 2 of 2 starts are used, by lock_rate.",
        ),
        (
            {"a": [TAKEN, FREE, FREE], "a#rate": [TAKEN, FREE]},
            ["a"],
            "1 of 3 places is held; 1 of 2 starts is used, by lock_rate.",
        ),
    ],
)
def test_locks_and_starts_are_counted_each_by_itself(of_names, names, words):
    found = Explanation(places_of(of_names))
    assert (found.names, found.headline[0]) == (names, words)
    assert (found.lock_holder is None) is ("a" not in of_names or of_names["a"][0] is FREE)


QUEUED_BY_RATE = {"event": "TaskQueued", "name": "a", "task": "many", "cause": "rate", "at": 1.0}


def shop_with(**options):
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = ["redis://one:1/0"]
    app.register_task(type("Many", (RedlockTask,), {"name": "many", **options})())
    return app


def held_by(found, task):
    """Return *found*, whose holder says that it is *task*."""
    value = b"a" * 40 + b'{"task":"%b"}' % task.encode()
    return [seen(value) if stored.value else (state, stored) for state, stored in found]


def test_a_name_alone_shows_its_starts():
    """And what was refused by its rate, which has the name of the lock."""
    app = shop_with(lock_limit=None, lock_rate="120/m")
    assert lines_of_name(app, "a") == {"a": 1, "a#rate": 10}
    assert lines_of_name(app, "a#rate#3") == lines_of_name(app, "a#rate") == {"a": 1, "a#rate": 10}
    assert lines_of_name(shop_with(lock_limit=3), "a") == {"a": 3}
    taken = held_by(TAKEN, "many")
    found = explained(app, places_of({"a": [FREE], "a#rate": [taken] * 10}), [QUEUED_BY_RATE])
    assert (found.task, len(found.places.all)) == ("many", 10)
    assert found.recent == [QUEUED_BY_RATE]
    assert "as many starts as lock_rate allows" in found.run


def test_what_a_call_decides_is_not_known_from_a_name():
    app = shop_with(lock_limit=lambda task, args, kwargs: 5)
    taken = held_by(TAKEN, "many")
    found = explained(app, places_of({"a": [taken, taken, *[FREE] * 98]}), [])
    assert found.headline[0] == "2 places are held."
    assert found.run.endswith("'redlock why many ARGS'.")
    found = explained(app, places_of({"a": [taken, taken, *[FREE] * 3]}), [], app.tasks["many"])
    assert found.headline[0] == "2 of 5 places are held."
    assert "gets the lock" in found.run


def test_most_places_are_those_of_the_largest_limit():
    """Of all tasks of an app; without one there is a place."""
    assert most_places(None) == most_places(shop_with()) == 1
    assert most_places(shop_with(lock_limit=7)) == 7


def test_a_release_finds_the_place_that_the_holder_has():
    places = [one_lock(FREE), replace(one_lock(TAKEN), number=1)]
    assert seen_in(places, ["b" * 8, "a" * 8]) == (places[1], "a" * 8)
    assert seen_in(places, ["b" * 8]) == (places[0], "b" * 8)


def test_who_has_a_majority_holds_it_even_where_no_quorum_votes():
    """A quarantined node votes for nobody, but it knows whose key it has."""
    found = Explanation(
        Places([one_lock([seen(OURS), seen(OURS, "quarantined"), seen(state="down")])])
    )
    assert found.holder is not None
    assert found.state == "held"
    assert found.lock.verdict is Verdict.UNAVAILABLE


@pytest.mark.parametrize(
    ("found", "state"),
    [
        ([seen(), seen(), seen(OURS)], "free"),
        ([seen(OURS), seen(THEIRS), seen(b"c" * 40)], "held"),
        ([seen(OURS), seen(state="down"), seen(state="down")], "unavailable"),
    ],
)
def test_who_has_a_minority_does_not_hold_it(found, state):
    """It is an attempt under way, or left over."""
    explained = Explanation(Places([one_lock(found)]))
    assert explained.holder is None
    assert explained.state == state


@pytest.mark.parametrize(
    ("of_names", "is_over"),
    [
        ({"a": FREE, "a#rate": TAKEN}, True),
        ({"a#rate": TAKEN}, True),
        ({"a#rate": FREE}, False),
        ({"a": FREE, "a#rate": FREE}, False),
        ({"a": TAKEN, "a#rate": TAKEN}, False),
        ({"a": FREE, "b": TAKEN, "b#rate": TAKEN}, False),
        ({"a": TAKEN}, False),
        ({"a": FREE, "a#rate": SILENT}, False),
    ],
)
def test_a_call_is_over_its_rate_if_nothing_else_is_in_its_way(of_names, is_over):
    places = Places([replace(one_lock(found), name=name) for name, found in of_names.items()])
    assert why.is_over_rate(places) == is_over


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "does not wait (lock_wait is 0); it"),
        ({"wait": 5.0}, "tries for 5 s (lock_wait); then it"),
    ],
)
def test_of_a_call_over_its_rate_it_is_said_that_it_is_that(options, words):
    options = replace(OPTIONS, on_conflict=Skip(), limit=(3,), **options)
    told = at_run(TASK, options, Verdict.TAKEN, is_over_rate=True)
    assert told.startswith(
        "A worker that gets it now, and finds as many starts as lock_rate allows, " + words
    )
    assert told.endswith("(on_conflict).")
    told = at_run(TASK, options, Verdict.TAKEN)
    assert "lock_rate" not in told


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("e#starts", False),
        ("e#starts#1", False),
        ("a#rate", True),
        ("a#rate#1", True),
        ("a#1", True),
        ("starts", True),
        ("a%23starts", True),
    ],
)
def test_what_counts_deliveries_is_no_lock_in_a_list(name, shown):
    (_, stored), *_ = TAKEN
    assert bool(AllLocks.views(AllLocks, name, {"node-0": stored})) == shown


def test_the_holder_is_told_by_the_node_that_heard_last():
    """Renewals reach some nodes and not others; a key that never expires is said to."""
    old, new = OURS + b'{"renewals": 1}', OURS + b'{"renewals": 2, "task": "t"}'
    lock = one_lock([seen(old, fence=4), seen(new, fence=5, ttl=None), seen(THEIRS)])
    first, second = lock.views
    assert (first.holder["renewals"], first.holder["task"]) == (2, "t")
    assert (first.ttl, first.fence, len(first.votes)) == (None, 5, 2)
    assert len(second.votes) == 1


@pytest.mark.parametrize("value", [b"mine", b"A" * 40, b"", b"a" * 39, "ü".encode() * 40])
def test_the_value_of_somebody_else_is_told_nobody(value):
    lock = one_lock([seen(value)])
    (view,) = lock.views
    assert view.is_foreign
    assert view.holder == {}
    assert value.decode(errors="replace") not in repr(lock) + repr(view) or not value


def test_a_marker_counts_if_a_majority_has_it():
    ours = StoredReservation(b"a", {"task_id": "1"}, 5.0, is_running=False, merged=1)
    newer = replace(ours, merged=2)
    other = replace(ours, token=b"b")
    assert majority_of([ours, newer, None], 3) == newer
    assert majority_of([ours, newer], 5) is None
    assert majority_of([ours, other, None], 3) is None
    assert majority_of([None, None, None], 3) is None


@pytest.mark.parametrize(
    ("fields", "lock", "expected"),
    [
        ([b"t", b"{}", b"2000", b"", b"", b"3"], None, (1.0, False, 4)),
        ([b"t", b"{}", b"500", b"", b"", b""], None, None),
        ([b"t", b"{}", b"0", OURS, b"id/0/0", b""], OURS + b"{}", (0.0, True, 0)),
        ([b"t", b"{}", b"0", OURS, b"id/0/0", b""], THEIRS, None),
        ([b"t", b"no JSON", b"2000", b"", b"-", b"3"], None, (1.0, False, 0)),
        ([None] * 6, None, None),
    ],
)
def test_a_marker_stands_by_itself_or_by_its_lock(fields, lock, expected):
    found = reservation_in(fields, 1000, lock)
    assert (found and (found.left, found.is_running, found.waiting)) == expected


# --- what would become of another call -----------------------------------------------------

RUN_WORDS = {
    "free": (Verdict.GRANTED, {}, "gets the lock"),
    "skip": (Verdict.TAKEN, {}, "is skipped"),
    "skip, in a chain": (Verdict.TAKEN, {}, "ends there"),
    "skip, chain goes on": (Verdict.TAKEN, {"stops_chain": False}, "goes on with that value"),
    "fail": (Verdict.TAKEN, {"on_conflict": Fail()}, "fails, visibly"),
    "retry": (Verdict.TAKEN, {"on_conflict": Retry()}, "retried in 180 s, 3 times at most"),
    "retry soon": (Verdict.TAKEN, {"on_conflict": Retry(countdown=5.0)}, "retried in 5 s"),
    "put off": (Verdict.TAKEN, {"on_conflict": Reschedule()}, "1 s at first and 60 s at most"),
    "put off a little": (
        Verdict.TAKEN,
        {"on_conflict": Reschedule(max_reschedules=4)},
        "4 times; then it fails",
    ),
    "queue": (Verdict.TAKEN, {"on_conflict": Queue()}, "waits as a message until"),
    "full": (
        Verdict.TAKEN,
        {"on_conflict": Queue(max_waiting=3, then="skip")},
        "unless 3 wait already; then it is skipped",
    ),
    "only a rate": (Verdict.GRANTED, {"limit": ()}, "lock_rate allows the start"),
    "wait": (Verdict.TAKEN, {"wait": 5.0}, "tries for 5 s (lock_wait)"),
    "no wait": (Verdict.TAKEN, {}, "does not wait"),
    "next": (Verdict.TAKEN, {"on_duplicate": "rerun"}, "sets it aside"),
    "no quorum": (Verdict.UNAVAILABLE, {}, "is rescheduled"),
    "no lock": (Verdict.UNAVAILABLE, {"on_unavailable": RunUnlocked()}, "runs WITHOUT a lock"),
}


@pytest.mark.parametrize("case", RUN_WORDS)
def test_what_a_worker_would_do(case):
    verdict, options, words = RUN_WORDS[case]
    told = at_run(TASK, replace(OPTIONS, **options), verdict)
    assert words in told
    if verdict is Verdict.UNAVAILABLE:
        assert "(on_unavailable)" in told
    elif verdict is Verdict.TAKEN and case != "next":
        assert "(on_conflict)" in told


def test_what_a_worker_would_find_is_told():
    """Which of its locks has no free place, or that it is over its rate; what a wait is for."""
    queue = replace(OPTIONS, on_conflict=Queue())
    told = at_run(TASK, queue, Verdict.TAKEN, 3)
    assert "finds none of 3 places free" in told
    assert "waits as a message until the lock is released" in told
    told = at_run(TASK, queue, Verdict.TAKEN, 3, is_over_rate=True)
    assert "finds as many starts as lock_rate allows" in told
    assert "waits as a message until a start is allowed" in told


def test_retries_of_every_kind_are_told():
    task = SimpleNamespace(max_retries=None, default_retry_delay=180, retry_backoff=True)
    told = at_run(task, replace(OPTIONS, on_conflict=Retry()), Verdict.TAKEN)
    assert "by its retry_backoff, without end" in told
    told = at_run(replace_retries(0), replace(OPTIONS, on_conflict=Retry()), Verdict.TAKEN)
    assert "fails at once" in told
    assert "retried" not in told


def replace_retries(times):
    return SimpleNamespace(name="shop.bill", max_retries=times, default_retry_delay=180)


WAITS = StoredReservation(b"t", {"task_id": "first"}, 5.0, is_running=False, merged=0)
RUNS = replace(WAITS, is_running=True)
RAN = replace(WAITS, has_run=True)
PUBLISH_WORDS = [
    ("join", None, None, "publishes it: none is queued"),
    ("join", WAITS, None, "publishes nothing and returns the result of task first"),
    ("join", RUNS, None, "publishes nothing and returns the result of task first"),
    ("fail", WAITS, None, "raises DuplicateTask: task first"),
    ("rerun", WAITS, None, "handed over to task first"),
    ("rerun", RUNS, None, "as the next run, which waits for the end of task first"),
    ("rerun", RUNS, WAITS, "handed over to task first"),
    ("join", RAN, None, "publishes nothing and returns the result of task first"),
    ("rerun", RAN, None, "as the next run"),
]


@pytest.mark.parametrize(("on_duplicate", "queued", "following", "words"), PUBLISH_WORDS)
def test_what_a_publisher_would_do(on_duplicate, queued, following, words):
    options = replace(OPTIONS, unique_until="finished", on_duplicate=on_duplicate)
    assert words in (at_publish(options, queued, following) or "")


@pytest.mark.parametrize(
    ("policy", "words"),
    [(Fail(), "raises QuorumUnavailable"), (Skip(), "publishes it, queued already or not")],
)
def test_what_a_publisher_would_do_without_a_quorum(policy, words):
    options = replace(OPTIONS, unique_until="finished", on_unavailable=policy)
    assert words in (at_publish(options, None, None, is_quorate=False) or "")


def test_a_task_that_is_not_unique_is_just_published():
    assert at_publish(OPTIONS, WAITS, None) is None


# --- the call that is asked about ----------------------------------------------------------


class Billing(RedlockTask):
    name = "shop.bill"

    def __init__(self, makes):
        self.makes = makes

    def lock_name(self, args, kwargs):
        if isinstance(self.makes, Exception):
            raise self.makes
        return self.makes


def app_with(*names, **tasks):
    return SimpleNamespace(tasks={**{name: SimpleNamespace() for name in names}, **tasks})


def test_tasks_are_found_or_the_nearest_is_named():
    ours = Billing("name")
    app = app_with("celery.chord", "shop.plain", **{"shop.bill": ours})
    assert find_task(app, "shop.bill") is ours
    with pytest.raises(CallError, match=r"did you mean shop\.bill"):
        find_task(app, "shop.bil")
    with pytest.raises(CallError, match="did you mean shop"):
        find_task(app, "xyz")
    with pytest.raises(CallError, match="takes no lock"):
        find_task(app, "shop.plain")
    with pytest.raises(CallError, match="has no tasks"):
        find_task(app_with("celery.chord"), "x")


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ("[s3cret", "{}", "ARGS must be a JSON list"),
        ('{"a": "s3cret"}', "{}", "ARGS must be a JSON list"),
        ("[]", '["s3cret"]', "KWARGS must be a JSON object"),
        ("[]", "s3cret", "KWARGS must be a JSON object"),
    ],
)
def test_what_is_no_json_of_a_call_is_said_without_repeating_it(args, kwargs, words):
    """What is typed may be anything, and errors end up in logs."""
    with pytest.raises(CallError, match=words) as failure:
        names_in_call(Billing("name"), args, kwargs)
    assert "s3cret" not in str(failure.value)


@pytest.mark.parametrize("makes", [LockKeyError("no"), ValueError("s3cret"), "", None])
def test_a_call_without_a_name_is_a_clean_error(makes):
    with pytest.raises(CallError) as failure:
        names_in_call(Billing(makes), "[]", "{}")
    assert "s3cret" not in str(failure.value)


def test_a_call_has_its_name():
    """The twin: arguments that fit."""
    assert names_in_call(Billing("name"), "[1]", '{"a": 2}') == ("name",)


def test_refusals_of_a_lock_are_those_of_its_name():
    """Long names are met by what the nodes have of them; others' records are passed over."""
    long = "x" * 300
    assert is_refusal_of({"event": "TaskSkipped", "name": long}, long)
    for record, name in itertools.product(
        [{"event": "LeaderElected", "name": "a"}, {"event": "TaskSkipped"}, {}], ["a", "b"]
    ):
        assert not is_refusal_of(record, name)


def test_what_has_ended_is_known_from_the_result_backend():
    """Of the others nothing is said: they wait, run, or are unknown there."""
    app = Celery("shop", backend="cache+memory://", set_as_current=False)
    app.backend.store_result("lost", ValueError(), "FAILURE")
    app.backend.store_result("runs", None, "STARTED")
    assert ended_results(app, ["lost", "runs", "waits"]) == {"lost": "FAILURE"}


def test_a_result_backend_that_is_none_is_not_asked_for_long(monkeypatch):
    assert ended_results(Celery("shop", set_as_current=False), ["a"]) == {}
    assert ended_results(None, ["a"]) == {}
    answer = threading.Event()
    hangs = SimpleNamespace(get_task_meta=lambda _: answer.wait(60) and {"status": "SUCCESS"})
    monkeypatch.setattr(why, "PATIENCE", 0.1)
    assert ended_results(SimpleNamespace(backend=hangs), ["a"]) == {}
    answer.set()
