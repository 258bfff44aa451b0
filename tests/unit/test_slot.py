"""What a message says of its slot: read back as written, whatever else comes along."""

from __future__ import annotations

import json
import uuid
from datetime import datetime, timezone

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock import RedlockTask
from celery_redlock.plugin import plugin_for
from celery_redlock.task.messages.slot import LONGEST_ENTRY, Slot
from celery_redlock.task.options import OVERLAP, LockOptions

DUE = datetime(2026, 3, 1, 12, 30, 15, 250_000, timezone.utc).timestamp()
TOLD = ["report", "2026-03-01T12:30:15.250+00:00", "skip"]
#: Every millisecond until the year 2200, as Unix time.
moments = st.integers(0, 7_258_118_399_999).map(lambda milliseconds: milliseconds / 1000)
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


@given(entry=names, due=moments, overlap=st.sampled_from(OVERLAP))
def test_a_slot_is_read_back_as_it_was_written(entry, due, overlap):
    slot = Slot(entry, due, overlap)
    assert Slot.of(slot.parts) == slot
    assert Slot.of(tuple(json.loads(json.dumps(slot.parts)))) == slot


def test_a_slot_is_plain_to_read():
    assert Slot("report", DUE).parts == TOLD


FORGED = [
    # no sequence of three
    None, "", "slot", b"slot", 0, 7, 1.5, True, [], {}, (), set(), object(), TOLD[:2], [*TOLD, ""],
    [TOLD], "abc", b"abc", dict.fromkeys(TOLD), dict(enumerate(TOLD)), set(TOLD), iter(TOLD),
    # not of strings
    [None, *TOLD[1:]], [7, *TOLD[1:]], [b"report", *TOLD[1:]], [["report"], *TOLD[1:]],
    ["report", DUE, "skip"], ["report", None, "skip"], [*TOLD[:2], None],
    [*TOLD[:2], ["skip"]], [{}, {}, {}],
    # no name
    ["", *TOLD[1:]], ["\ud800", *TOLD[1:]], ["report\udfff", *TOLD[1:]],
    # no overlap
    [*TOLD[:2], ""], [*TOLD[:2], "Skip"], [*TOLD[:2], "buffer_two"],
] + [
    ["report", due, "skip"]
    for due in [
        "", "now", "1772368215.25", "2026-03-01", "2026-03-01T12:30:15+00:00",
        "2026-03-01T12:30:15.250", "2026-03-01T12:30:15.250Z", "2026-03-01T12:30:15.250+01:00",
        "2026-03-01T12:30:15.250000+00:00", "2026-03-01 12:30:15.250+00:00",
        "2026-3-1T12:30:15.250+00:00", "2026-13-01T12:30:15.250+00:00",
        "2026-02-29T12:30:15.250+00:00", "2026-03-01T24:30:15.250+00:00",
        "2026-03-01T12:60:15.250+00:00", "2026-03-01T12:30:61.250+00:00",
        "0000-00-00T00:00:00.000+00:00", "10000-01-01T00:00:00.000+00:00",
        "2026-03-01T12:30:15.250+00:00\n", " 2026-03-01T12:30:15.250+00:00",
        "-026-03-01T12:30:15.250+00:00", "2026-03-01T12:30:15,250+00:00", "9" * 10_000,
        "\u0662\u0660\u0662\u0666-03-01T12:30:15.25\u0660\u00b2+00:00",
        "2026-03-01T12:30:15.250+00:00\0", "2026-03-01T12:30:15.250-00:00",
    ]
]  # fmt: skip


@pytest.mark.parametrize("told", FORGED)
def test_what_makes_no_sense_says_nothing(told):
    assert Slot.of(told) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
)


@given(told=st.lists(JSON | st.sampled_from(TOLD), min_size=3, max_size=3) | JSON)
def test_no_header_raises(told):
    found = Slot.of(told)
    assert found is None or found.parts == told


@given(due=st.from_regex(r"[0-9]{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", fullmatch=True))
def test_no_date_raises(due):
    found = Slot.of(["report", due, "skip"])
    assert found is None or found.moment.tzinfo is timezone.utc


def test_a_slot_has_one_task_id_everywhere():
    """It is the same in every process and for ever: stored results and markers go by it."""
    slot = Slot("report", DUE)
    assert slot.task_id("beat") == "c0c4742b-85aa-52a3-aca0-ba08071bfbf5"
    assert uuid.UUID(slot.task_id("beat")).version == 5
    assert slot.task_id("beat") == Slot("report", slot.moment.timestamp(), "allow").task_id("beat")


@given(
    first=st.tuples(names, names, moments),
    second=st.tuples(names, names, moments),
)
def test_different_slots_have_different_task_ids(first, second):
    ids = {Slot(entry, due).task_id(beat) for beat, entry, due in (first, second)}
    assert len(ids) == len({first, second})


@pytest.mark.parametrize(
    ("one", "other"),
    [(("beat", "a", DUE), ("beat2", "a", DUE)), (("beat", "a", DUE), ("beat", "b", DUE)),
     (("beat", "a", DUE), ("beat", "a", DUE + 0.001)), (("b", "eat/a", DUE), ("beat", "/a", DUE))],
)  # fmt: skip
def test_task_ids_differ_in_each_part(one, other):
    ids = [Slot(entry, due).task_id(beat) for beat, entry, due in (one, other)]
    assert ids[0] != ids[1]


@pytest.mark.parametrize("length", [1, LONGEST_ENTRY, LONGEST_ENTRY + 1, 10_000])
def test_a_run_is_known_by_what_it_tells(length):
    slot = Slot("n" * length, DUE)
    told = json.loads(json.dumps({"pid": 7, **slot.info}))
    assert len(json.dumps(told)) < 400
    assert Slot("n" * length, DUE + 60).is_run_of_entry(told)
    assert not Slot("m" * length, DUE).is_run_of_entry(told)


@pytest.mark.parametrize(
    "holder",
    [{}, {"pid": 7}, {"slot": None}, {"slot": []}, {"slot": "report"}, {"slot": {"report": 1}},
     {"slot": [["report"]]}, {"slot": [None, "report"]}, {"slot": 7}],
)  # fmt: skip
def test_who_tells_of_no_slot_is_no_run_of_an_entry(holder):
    assert not Slot("report", DUE).is_run_of_entry(holder)


@pytest.fixture
def options():
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.redlock_nodes = ["redis://one:1/0", "redis://two:2/0", "redis://three:3/0"]

    @app.task(base=RedlockTask, name="shop.report", shared=False)
    def report():
        pass

    return LockOptions.of(app.tasks["shop.report"], plugin_for(app).settings)


@pytest.mark.parametrize("overlap", ["skip", "allow"])
def test_a_slot_leaves_a_tasks_options_alone(options, overlap):
    """Only buffering needs more than what the task has."""
    assert Slot("report", DUE, overlap).adjust(options) is options


def test_a_buffered_run_waits_for_the_one_before_it(options):
    adjusted = Slot("report", DUE, "buffer_one").adjust(options)
    assert (adjusted.unique_until, adjusted.on_duplicate) == ("finished", "rerun")
    assert adjusted.reruns
    assert adjusted.unique_for > 0
    changed = {"unique_until", "on_duplicate", "unique_for"}
    assert {
        name for name in vars(options) if getattr(options, name) != getattr(adjusted, name)
    } <= changed
    assert options.unique_until is None
