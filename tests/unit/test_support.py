"""The tests' own judges judge rightly: an overlap is found, and nothing else is called one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support import events as recording
from support.waiting import eventually


def _event(kind, at, body, name="n"):
    return {"kind": kind, "at": at, "body": body, "name": name, "pid": 1}


def _told(log):
    return [(a.body, b.body) for a, b in recording.overlaps(log)]


def test_bodies_one_after_the_other_do_not_overlap():
    log = [_event("start", 1, "a"), _event("end", 2, "a"), _event("start", 2, "b")]
    assert _told([*log, _event("end", 3, "b")]) == []


def test_every_overlapping_pair_is_found():
    log = [_event("start", n, name) for n, name in enumerate("abc")]
    log += [_event("end", 10 + n, name) for n, name in enumerate("abc")]
    assert _told(log) == [("a", "b"), ("a", "c"), ("b", "c")]
    assert _told(log[::-1]) == _told(log)


def test_bodies_of_different_names_may_overlap():
    log = [_event("start", 1, "a"), _event("start", 2, "b", name="m"), _event("end", 3, "a")]
    assert _told(log) == []


def test_a_killed_body_lasts_until_its_last_event():
    """Nobody knows more of it: before that moment it overlaps, afterwards it does not."""
    log = [_event("start", 1, "a"), _event("tick", 5, "a"), _event("start", 4, "b")]
    assert _told(log) == [("a", "b")]
    log[2]["at"] = 6
    assert _told(log) == []
    assert [body.finished for body in recording.bodies(log)] == [False, False]


def test_a_body_that_fails_has_ended_too(events):
    with pytest.raises(KeyboardInterrupt), recording.body(events, "n", task_id="7"):
        raise KeyboardInterrupt
    start, end = recording.read(events)
    assert (start["kind"], end["kind"], end["error"]) == ("start", "end", "KeyboardInterrupt")
    assert start["task_id"] == end["task_id"] == "7"
    assert start["at"] <= end["at"]


def test_a_half_written_line_is_left_for_later(events):
    """A reader may come at any moment."""
    recording.record(events, "one")
    with events.open("a") as file:
        file.write('{"kind": "tw')
    assert [event["kind"] for event in recording.read(events)] == ["one"]


def test_lines_of_many_processes_do_not_mix(events):
    code = f"""if True:
        from support.events import record
        for n in range(300):
            record({str(events)!r}, "line", n=n, filler="x" * 500)
    """
    writers = [
        subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1])
        for _ in range(3)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    told = recording.read(events, "line")
    assert len(told) == 900
    assert {event["n"] for event in told if event["pid"] == writers[0].pid} == set(range(300))


def test_waiting_ends_with_a_clear_word():
    with pytest.raises(
        AssertionError, match=r"no miracle within 0\.01 s; the last answer was \[\]"
    ):
        eventually(list, "miracle", timeout=0.01, every=0.001)  # it does not come
