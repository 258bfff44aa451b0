"""What to set, by figures: each piece of advice, and the same figures without its cause."""

from __future__ import annotations

import ast
from dataclasses import replace
from datetime import timedelta
from enum import Enum

import pytest
from celery import Celery

from celery_redlock import RedlockTask
from celery_redlock.lock.rules import Rules
from celery_redlock.ops.advice import Watched, advise, entry_of, literal, round_up, too_short
from celery_redlock.ops.report import Report, TaskReport, mode_of, report_of
from celery_redlock.reading.holds import HOLD_BOUNDS, Holds, class_of
from celery_redlock.reading.tally import TaskTally
from celery_redlock.reading.tally_reader import Tallies
from celery_redlock.task.naming.patterns import Patterns
from celery_redlock.task.policies import Fail, Queue, Reschedule, Retry, Skip
from support.options import OPTIONS


def held(*lengths):
    counts = [0] * (len(HOLD_BOUNDS) + 1)
    for length in lengths:
        counts[class_of(length)] += 1
    return Holds(tuple(counts), sum(lengths), max(lengths, default=0.0), 30.0)


def watched(*lengths, options=None, timeout=3600.0, acks_late=False, own=None, **tally):
    known = replace(OPTIONS, **(options or {}))
    did = TaskTally(**{"ran": 1000, "holds": held(*lengths), **tally})
    return Watched(did, known, Rules(), timeout, acks_late, own or {})


def told(of):
    return {it.option: it.value for it in advise(of)}


@pytest.mark.parametrize(
    ("length", "executions", "is_enough"),
    [
        (1200.0, 5000, False),
        (3600.0, 100, True),
        (3600.0, 99, False),
        (86_400.0, 1, True),
    ],
)
def test_how_long_to_watch(length, executions, is_enough):
    assert (too_short(length, executions) == "") == is_enough


def test_it_says_how_long_it_has_watched():
    assert too_short(1200.0, 1) == (
        "Watched for 20 min 0 s and 1 execution: too short to advise; watch for a day."
    )


@pytest.mark.parametrize(
    ("lengths", "ttl", "lost", "value", "words"),
    [
        ([2.0], 30.0, 0, None, "Keep it"),
        ([90.0], 30.0, 0, None, "watchdog renews the lease"),
        ([2.0], 30.0, 3, 60.0, "3 leases were lost"),
        ([2.0], 60.0, 1, None, "larger redlock_max_ttl"),
        ([2.0], 60.0, 0, 30.0, "blocks its lock for up to lock_ttl"),
    ],
)
def test_lock_ttl(lengths, ttl, lost, value, words):
    """It covers stalls and no bodies: longer only where leases were lost."""
    refused = {"lost": lost} if lost else {}
    (advice,) = advise(watched(*lengths, options={"ttl": ttl}, refused=refused))
    assert (advice.option, advice.value) == ("lock_ttl", value)
    assert words in advice.text
    assert f"lock_ttl is {ttl:g} s" in advice.text
    assert f"longest took {'1 min 30 s' if lengths == [90.0] else '2 s'}" in advice.text


def test_a_longer_ttl_is_not_advised_where_nodes_forgot():
    """They were restarted or flushed, and would forget a longer one as well."""
    seen = watched(2.0, refused={"lost": 1})
    votes = {"a": "quarantined (9.0 s left)"}
    tally = replace(seen.tally, examples={"lost": {"votes": votes}})
    (advice,) = advise(replace(seen, tally=tally))
    assert (advice.option, advice.value) == ("lock_ttl", None)
    assert "restarted or flushed" in advice.text


@pytest.mark.parametrize(
    ("length", "options", "conflicts", "expected"),
    [
        (0.3, {"on_conflict": Reschedule()}, 5, {"lock_wait": 0.3}),
        (0.3, {"on_conflict": Skip()}, 5, {"lock_wait": None}),
        (0.3, {"on_conflict": Reschedule()}, 0, {}),
        (0.3, {"on_conflict": Reschedule(), "wait": 2.0}, 5, {}),
        (20.0, {"on_conflict": Reschedule()}, 5, {}),
        (20.0, {"on_conflict": Reschedule(), "wait": 2.0}, 5, {"lock_wait": None}),
    ],
)
def test_lock_wait(length, options, conflicts, expected):
    """Where holds are short against refusals; for long ones it is the wrong tool."""
    of = watched(length, options=options, reported={"conflict": conflicts} if conflicts else {})
    found = told(of)
    found.pop("lock_ttl")
    assert found == expected


@pytest.mark.parametrize(
    ("dedup", "timeout", "acks_late", "causes", "expected"),
    [
        (3600.0, 3600.0, True, {}, {"dedup_ttl": None}),
        (600.0, 3600.0, True, {}, {"dedup_ttl": 3600.0}),
        (600.0, 3600.0, False, {"finished": 2}, {"dedup_ttl": 3600.0}),
        (600.0, 3600.0, False, {}, {}),
        (600.0, None, True, {"redelivered": 1}, {}),
        (3600.0, 1.0, True, {}, {"dedup_ttl": None, "visibility_timeout": None}),
    ],
)
def test_dedup_ttl(dedup, timeout, acks_late, causes, expected):
    """As long as copies may come, which the broker says; not where there are none."""
    of = watched(
        2.0,
        options={"dedup_ttl": dedup},
        timeout=timeout,
        acks_late=acks_late,
        reported=causes,
    )
    found = told(of)
    found.pop("lock_ttl")
    assert found == expected


@pytest.mark.parametrize(
    ("until", "length", "expected"),
    [
        ("finished", 3610.0, {"unique_for": None}),
        ("started", 3600.0, {"unique_for": 3610.0}),
        ("expired", 60.0, {}),
        (None, 60.0, {}),
    ],
)
def test_unique_for(until, length, expected):
    """A reservation stands as long as its message may be on its way."""
    found = told(watched(10.0, options={"unique_until": until, "unique_for": length}))
    found.pop("lock_ttl")
    assert found == expected


def test_of_a_task_that_the_app_does_not_know_there_is_no_advice():
    assert advise(replace(watched(2.0), options=None)) == []


def test_without_holds_there_is_no_advice():
    assert advise(watched()) == []


@pytest.mark.parametrize(("given", "right"), [(0.03, 0.03), (0.031, 0.04), (1.2, 2.0), (9.9, 10)])
def test_a_time_is_rounded_up(given, right):
    assert round_up(given) == right


# -- the entry -----------------------------------------------------------------------------


def test_an_entry_has_what_the_task_says_and_what_was_advised():
    own = {"unique_on": ("invoice_id",), "lock_ttl": timedelta(minutes=1), "on_conflict": Queue()}
    of = watched(2.0, own=own, options={"ttl": 60.0}, reported={"conflict": 3})
    entry, left_out = entry_of(of, advise(of))
    assert entry == {
        "unique_on": ["invoice_id"],
        "lock_ttl": 30.0,
        "on_conflict": "queue",
        "lock_mode": "enforce",
    }
    assert left_out == []
    assert "lock_mode" not in entry_of(replace(of, tally=TaskTally()), [])[0]


class Until(str, Enum):
    STARTED = "started"


def test_a_word_of_an_enum_is_written_as_the_word():
    """As Python shows it, the whole setting would be no Python."""
    task = TaskReport("a", TaskTally(), "report", entry={"o": literal(Until.STARTED)})
    found = Report(0.0, 0.0, 0.0, [task], 3, ())
    assert ast.literal_eval(found.protect) == {"a": {"o": "started"}}


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (len, None),
        (Reschedule(base=2), None),
        (Reschedule(), "reschedule"),
        (Fail, "fail"),
        (Retry(), "retry"),
        ("{a}", "{a}"),
        ((1, 2), [1, 2]),
        ((1, len), None),
        (True, True),
        (timedelta(seconds=5), 5.0),
    ],
)
def test_values_as_python_writes_them(value, plain):
    assert literal(value) == plain
    own = {"lock_key": value}
    assert entry_of(watched(own=own), [])[1] == ([] if plain is not None else ["lock_key"])


def test_what_the_code_of_a_task_sets_is_changed_there():
    """It wins over an entry: also a mode; what an entry set is changed in the entry."""
    app = Celery("shop", set_as_current=False, broker="memory://", namespace="CELERY")
    app.conf.update(CELERY_REDLOCK_NODES=["redis://one:1/0"])
    app.conf.update(CELERY_REDLOCK_PROTECT={"shop.*": {"lock_ttl": 60, "unique_on": ["number"]}})

    for name, code in (
        ("shop.a", {"lock_mode": "report"}),
        ("shop.b", {}),
        ("a", {"lock_ttl": 60}),
    ):
        app.task(bill, name=name, shared=False, base=RedlockTask, **code)
    did = TaskTally(ran=1000, ran_reported=1000, holds=held(2.0), first=1.0, last=7 * 86400.0)
    tallies = Tallies(dict.fromkeys(["shop.a", "shop.b", "a"], did))
    found = report_of(app, Rules(), tallies, 0.0, 1)
    assert {it.name: it.in_code for it in found.tasks} == {
        "shop.a": ["lock_mode"],
        "shop.b": [],
        "a": ["lock_ttl"],
    }
    assert all(it.entry["lock_mode"] == "enforce" for it in found.tasks)
    assert found.setting == "CELERY_REDLOCK_PROTECT"


def bill(number):
    """Do nothing."""


def app_with(setting):
    app = Celery("shop", set_as_current=False, broker="memory://")
    app.conf.update(redlock_nodes=["redis://one:1/0"], redlock_protect=setting)
    app.task(bill, name="shop.bill", shared=False)
    return app


def tallied(app, tally):
    """Return the report of an app in which ``shop.bill`` did this for a day."""
    tallies = Tallies({"shop.bill": replace(tally, first=1.0, last=1.0 + 86400.0)})
    return report_of(app, Rules(), tallies, 0.0, 3)


REPORTED = TaskTally(ran=1000, ran_reported=1000, reported={"conflict": 5}, holds=held(2.0))


def test_an_entry_that_would_drop_an_option_is_not_offered():
    """It would stand before the one that has it: a callable, or what only another app knows."""
    setting = {"shop.*": {"lock_key": lambda task, args, kwargs: "x", "on_conflict": Retry(1)}}
    found = tallied(app_with(setting), REPORTED)
    assert found.protect == ""
    (sentence,) = found.tasks[0].by_hand
    assert sentence.startswith("Add {'lock_wait': 2.0, 'lock_mode': 'enforce'} to the options")
    assert "lock_key, on_conflict" in sentence
    assert (
        tallied(Celery("other", set_as_current=False, broker="memory://"), REPORTED).protect == ""
    )


def test_a_task_that_was_watched_without_a_refusal_is_to_be_enforced():
    """As no call of it would be refused. Twin: one that is enforced has nothing to change."""
    app = app_with({"shop.*": {}})
    entry = {"shop.bill": {"lock_mode": "enforce"}}
    assert tallied(app, replace(REPORTED, reported={})).entries == entry
    assert tallied(app, replace(REPORTED, reported={}, ran_reported=0)).entries == {}


def test_what_would_fail_is_not_to_be_enforced():
    app = app_with({"shop.*": {"unique_on": ["number"]}})
    assert "enforce" in tallied(app, REPORTED).protect
    assert tallied(app, replace(REPORTED, reported={"unnamed": 3})).protect == ""


def test_the_entries_are_python():
    entry = {"unique_on": ["a"], "lock_ttl": 30.0, "on_conflict": "queue", "lock_mode": "enforce"}
    names = ["shop.bill", 'it\'s "odd"\n']
    tasks = [TaskReport(name, TaskTally(), "report", entry=entry) for name in names]
    tasks.append(TaskReport("well", TaskTally(), "enforce"))
    found = Report(0.0, 0.0, 0.0, tasks, 3, ())
    assert ast.literal_eval(found.protect) == dict.fromkeys(names, entry)
    assert replace(found, tasks=tasks[2:]).protect == ""


def test_what_is_pasted_leaves_the_others_as_they_are():
    """An assignment in place of the setting would take the protection of all other tasks away."""
    setting = {"shop.*": {"unique_on": ["number"]}}
    app = app_with(setting)
    where, entries = tallied(app, REPORTED).to_paste
    assert where == "Ready to paste into redlock_protect, before what it has now"
    pasted = ast.literal_eval(f"{{{entries}}}") | setting
    assert list(pasted) == ["shop.bill", "shop.*"]
    del app.conf["redlock_protect"]
    where, entries = tallied(app, REPORTED).to_paste
    assert where == "Ready to paste into the settings"
    assert entries.startswith("redlock_protect = {\n    'shop.bill': ")


def test_an_entry_is_for_its_task_alone():
    """A wildcard in its name is no wildcard: it would match others, or not even itself."""
    names = ["shop.sync[eu]", "shop.why?", "shop.*"]
    tasks = [TaskReport(name, TaskTally(), "report", entry={"lock_ttl": 5.0}) for name in names]
    found = ast.literal_eval(Report(0.0, 0.0, 0.0, tasks, 3, ()).protect)
    others = [*names, "shop.synce", "shop.whys"]
    for name, pattern in zip(names, found, strict=True):
        assert list(filter(Patterns({pattern: {}}).rule_for, others)) == [name]


@pytest.mark.parametrize(
    ("tally", "mode"),
    [
        (TaskTally(ran=3), "enforce"),
        (TaskTally(ran=3, ran_reported=3), "report"),
        (TaskTally(ran=4, ran_reported=3), "both"),
        (TaskTally(ran=3, ran_reported=3, refused={"conflict": 1}), "both"),
        (TaskTally(refused={"duplicate": 1}), "enforce"),
        (TaskTally(), ""),
    ],
)
def test_the_mode_of_a_task(tally, mode):
    """As it ran, and not as it is set by now."""
    assert mode_of(tally) == mode
