"""The checker sees what it is there for: each law with a log that breaks it, written by hand."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from nemesis import checker
from nemesis.faults import FAULTS
from nemesis.log import Log
from nemesis.registers import Registers
from nemesis.report import status_of
from nemesis.verdict import Run, Score, breaks, verdict, violations


def hold(granted, *ticks, end=None, lost=None, asked=None, fence=None, name="a", lease=1.0):
    asked = granted if asked is None else asked
    first = {"name": name, "fence": fence, "asked": asked, "until": granted + lease}
    lines = [{"kind": "granted", "at": granted, **first}]
    lines += [
        {"kind": "tick", "at": at, "until": at + lease, "renewals": n + 1}
        for n, at in enumerate(ticks)
    ]
    lines += [{"kind": "ended", "at": end}] if end is not None else []
    return lines + ([{"kind": "lost", "at": 99.0, "why": lost}] if lost is not None else [])


@pytest.fixture
def logs(tmp_path):
    def write(*clients, cut=0):
        for number, lines in enumerate(clients):
            born = {"kind": "born", "at": 0.0, "contender": "ours", "client": f"c{number}"}
            text = "".join(json.dumps(line) + "\n" for line in [born, *lines])
            (tmp_path / f"client-c{number}-1.jsonl").write_text(text[: len(text) - cut])
        return checker.read(tmp_path)["ours"]

    return write


@pytest.mark.parametrize(
    ("first", "second", "meet"),
    [
        (hold(1.0, 2.0, end=3.0), hold(3.1, end=4.0), False),
        (hold(1.0, 2.0, end=3.0), hold(2.9, end=4.0), True),
        (hold(1.0, 2.0, end=3.0), hold(2.9, end=4.0, name="b"), False),
        # killed: the lock is promised to it up to the end of its lease
        (hold(1.0, 2.0), hold(2.9, end=4.0), True),
        (hold(1.0, 2.0), hold(3.1, end=4.0), False),
        # told that its lease has ended, after a pause: no different
        (hold(1.0, 2.0, lost="deadline"), hold(2.9, end=4.0), True),
        (hold(1.0, 2.0, lost="deadline"), hold(3.1, end=4.0), False),
        # told that the lock was taken away: it could act up to its last look
        (hold(1.0, 2.0, lost="stolen"), hold(2.9, end=4.0), False),
        (hold(1.0, 2.0, lost="stolen"), hold(1.9, end=4.0), True),
        # stopped before it saw its grant, and then told that its lease has ended
        (hold(1.0, end=3.0), hold(2.0, lost="deadline", lease=0.0), False),
        # one within the other, and the logs in the other order
        (hold(2.0, end=2.1), hold(1.0, end=3.0), True),
    ],
)
def test_two_claims_of_one_name_that_meet_are_seen(logs, first, second, meet):
    assert bool(checker.overlaps(logs(first, second).claims)) is meet


def test_a_long_claim_meets_every_other(logs):
    found = logs(hold(1.0, end=9.0), hold(2.0, end=3.0) + hold(4.0, end=5.0))
    assert len(checker.overlaps(found.claims)) == 2


@pytest.mark.parametrize(
    ("holds", "wrong"),
    [
        ([hold(1.0, end=2.0, fence=1), hold(3.0, end=4.0, fence=2)], 0),
        ([hold(1.0, end=2.0, fence=2), hold(3.0, end=4.0, fence=1)], 1),
        ([hold(1.0, end=2.0, fence=1), hold(3.0, end=4.0, fence=1)], 1),
        # asked before the other was granted: their order is open
        ([hold(1.0, end=2.0, fence=2), hold(3.0, asked=0.9, end=4.0, fence=1)], 0),
        # of one name only
        ([hold(1.0, end=2.0, fence=2), hold(3.0, end=4.0, fence=1, name="b")], 0),
        # not only of neighbours
        (
            [
                hold(1.0, end=1.1, fence=9),
                hold(2.0, asked=0.5, end=2.1, fence=3),
                hold(3.0, end=4.0, fence=5),
            ],
            1,
        ),
    ],
)
def test_a_fence_that_does_not_grow_is_seen(logs, holds, wrong):
    assert len(checker.disorders(logs(*holds).claims)) == wrong


def test_a_line_that_was_cut_off_by_a_kill_is_none(logs):
    found = logs(hold(1.0, 2.0, 2.5, end=3.0), cut=5)
    assert [claim.end for claim in found.claims] == [3.5]
    assert found.cut_short == 1


def test_a_client_that_is_not_served_again_is_named(logs):
    found = logs(hold(11.0, end=12.0), hold(1.0, end=2.0), hold(31.0, end=32.0))
    assert checker.late_clients(found, 10.0, 20.0) == ["c1", "c2"]


def test_a_lost_update_is_counted(tmp_path):
    path = tmp_path / "ours.sqlite"
    with closing(Registers(path)) as one, closing(Registers(path)) as other:
        early, late = one.read("a", 1), other.read("a", 2)
        for registers, (fenced, plain), fence in ((other, late, 2), (one, early, 1)):
            registers.write_plain("a", plain)
            registers.write_fenced("a", fence, fenced)
        assert one.read("a", 1)[0] is None
    assert checker.lost_updates(path, "plain") == 1
    assert checker.lost_updates(path, "fenced") == 0


def test_a_fenced_register_that_does_not_look_at_the_fence_loses_updates(tmp_path):
    """Twin: whoever writes with a fence that is not its own is not refused."""
    path = tmp_path / "ours.sqlite"
    with closing(Registers(path)) as one:
        before, _ = one.read("a", 1)
        assert one.write_fenced("a", 3, before)
        assert one.write_fenced("a", 3, before)
    assert checker.lost_updates(path, "fenced") == 1


def test_what_a_client_writes_is_what_the_checker_reads(tmp_path):
    log = Log(tmp_path / "client-c0-1.jsonl")
    log.write("born", contender="ours", client="c0")
    log.write("refused", why="taken")
    log.write("node", what="NodeDown")
    log.write("granted", 1.0, name="a", fence=7, asked=0.5, until=2.0)
    log.write("ended", 1.5)
    log.close()
    found = checker.read(tmp_path)["ours"]
    assert (dict(found.refused), dict(found.news)) == ({"taken": 1}, {"NodeDown": 1})
    assert [(c.fence, c.asked, c.granted, c.end) for c in found.claims] == [(7, 0.5, 1.0, 1.5)]


FINE = Score(9, 9, 0, 0, 0, 0, 0, [], 0.0, 0, 0, 0, {})


def scored(name, **wrong):
    scores = dict.fromkeys(("ours", "unguarded", "careless", "pottery"), FINE)
    return {**scores, name: Score(**{**FINE.__dict__, **wrong})}


@pytest.mark.parametrize(
    ("second", "meet", "so_far"),
    [
        (hold(1.9, end=3.0), True, True),
        (hold(2.1, end=3.0), True, False),
        (hold(3.1), False, False),
    ],
)
def test_a_hold_under_way_is_counted_up_to_its_latest_look(logs, second, meet, so_far):
    history = logs(hold(1.0, 2.0), second)
    assert bool(checker.overlaps(history.claims)) is meet
    history.end_as_seen()
    assert bool(checker.overlaps(history.claims)) is so_far


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("ours", {}, False),
        ("ours", {"overlaps": 1}, True),
        ("ours", {"disorders": 1}, True),
        ("ours", {"lost_updates": 1}, True),
        ("ours", {"lost_plain_updates": 1}, False),
        ("ours", {"grants": 0}, True),
        ("careless", {"overlaps": 1}, False),
        ("careless", {"lost_updates": 1}, True),
        ("unguarded", {"overlaps": 1, "disorders": 1, "lost_updates": 1}, False),
        ("pottery", {"overlaps": 1}, False),
    ],
)
def test_what_breaks_a_promise_is_a_violation(name, wrong, told):
    assert bool(violations(scored(name, **wrong))) is told


@pytest.mark.parametrize(
    ("fault", "hits", "scores", "counts"),
    [
        ("pause-nodes", {}, scored("careless", overlaps=1), True),
        ("pause-nodes", {}, scored("pottery", overlaps=1), False),
        ("pause-clients", {}, scored("careless", overlaps=1), False),
        ("pause-clients", {}, scored("careless", overlaps=1, lost_plain_updates=1), True),
        ("script-flush", {"NOSCRIPT": 10}, scored("ours"), True),
        ("script-flush", {"NOSCRIPT": 1}, scored("ours"), False),
    ],
)
def test_a_run_in_which_nothing_broke_that_had_to_does_not_count(fault, hits, scores, counts):
    result = Run(fault, 10.0, 1, 10, hits, 1.0, 1, scores)
    result.counts, result.why = verdict(FAULTS[fault], result)
    assert result.counts is counts
    assert status_of([result]) == (0 if counts else 2)
    result.violations = ["ours: 1 overlap"]
    assert status_of([result]) == 1


def test_every_fault_says_how_its_run_can_fail():
    known = set(scored("ours")) | {f"{name} register" for name in scored("ours")}
    for fault in FAULTS.values():
        assert set(fault.breaks) <= known
        assert bool(fault.breaks) is not bool(fault.shows), fault.name
    assert breaks(scored("careless", overlaps=1)) == {"careless"}
