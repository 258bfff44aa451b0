"""What commands say of a release, of strange values, and to which terminal."""

from __future__ import annotations

import importlib
import io
import json
import sys
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from celery_redlock.lock.algorithm.results import NodeView
from celery_redlock.ops import inspected
from celery_redlock.ops import text as text_module
from celery_redlock.ops.cli.release import outcome, why_not
from celery_redlock.ops.listing import LOCK_HEAD, LOCK_SPARE, reservation_in_words, state_of
from celery_redlock.ops.screen import Progress, Stop, colour
from celery_redlock.ops.text import LONGEST, in_json, one_line, paragraph, show_table
from celery_redlock.reading import stored
from celery_redlock.reading.stored import LockView, age_of
from celery_redlock.words import who
from support.one_lock import one_lock, seen

OURS = b"a" * 40
ls: Any = importlib.import_module("celery_redlock.ops.cli.ls")
report: Any = importlib.import_module("celery_redlock.ops.cli.report")


# --- release --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "votes", "quarantined", "expected"),
    [
        (["released", "released", "released"], "abc", "", "released"),
        (["released", "released", "no answer"], "ab", "", "released"),
        (["released", "released", "no answer"], "abc", "", "not everywhere"),
        (["released", "no answer", "no answer"], "a", "", "not everywhere"),
        (["free", "no answer", "no answer"], "a", "", "unavailable"),
        (["no answer", "no answer", "no answer"], "abc", "", "unavailable"),
        (["free", "free", "free"], "abc", "", "free"),
        (["held by another", "held by another", "free"], "ab", "", "held by another"),
        (["released", "held by another", "free"], "a", "", "released"),
        # a node in quarantine votes for nobody, and keeps others out once it votes again
        (["free", "free", "no answer"], "", "c", "not everywhere"),
        (["released", "free", "no answer"], "a", "c", "not everywhere"),
        (["released", "free", "released"], "a", "c", "released"),
        (["free", "free", "free"], "", "c", "free"),
    ],
)
def test_a_lock_is_released_when_a_quorum_says_so(answers, votes, quarantined, expected):
    seen = LockView("n", {}, 9.0, list(votes), quarantined=list(quarantined))
    assert outcome(dict(zip("abc", answers, strict=True)), seen) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([seen(), seen(), seen()], "free"),
        ([seen(), seen(), seen(state="down")], "free"),
        ([seen(), seen(state="down"), seen(state="down")], "unavailable"),
        ([seen(OURS), seen(state="down"), seen(state="down")], "unavailable"),
        ([seen(state="quarantined"), seen(state="quarantined"), seen()], "unavailable"),
        ([seen(OURS), seen(OURS), seen(state="down")], "held by another"),
        ([seen(b"theirs"), seen(b"theirs"), seen(b"theirs")], "not ours"),
    ],
)
def test_nobody_holds_a_lock_only_if_a_quorum_says_so(found, expected):
    """Silence is no answer, and a node in quarantine may have forgotten."""
    assert why_not(one_lock(found)) == expected


# --- bootstrap ------------------------------------------------------------------------------


def test_a_node_that_did_not_take_part_is_never_said_to_vote(monkeypatch):
    """Not even where its error says nothing, as `TimeoutError()` does."""
    command = importlib.import_module("celery_redlock.ops.cli.bootstrap")
    settings = SimpleNamespace(nodes=["a"], rules=None)
    monkeypatch.setattr(command, "settings_at_hand", lambda: settings)
    monkeypatch.setattr(command, "node_statuses", lambda *_: [])
    monkeypatch.setattr(command, "AllLocks", lambda *_: Nothing())
    monkeypatch.setattr(command, "bootstrap", lambda *_: {"a": "", "b": "enrolled"})
    ended = CliRunner().invoke(command.bootstrap_command, ["--force"])
    assert ended.exit_code == 1
    assert "a: did not answer\nb: may vote\n" in ended.output


# --- strange values -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "since", [float("nan"), float("inf"), -float("inf"), -1, 10**400, 1e12, "then", None]
)
def test_an_age_that_cannot_be_is_none(since):
    assert age_of({"since": since}) is None


def test_an_age_counts_from_the_grant(monkeypatch):
    """By the clock of whoever asks; it is none below zero where that is behind."""
    monkeypatch.setattr(stored, "time", SimpleNamespace(time=lambda: 1.7e9))
    assert age_of({"since": 1.7e9 - 1}) == 1.0
    assert age_of({"since": 1.7e9 + 1}) == 0.0


def test_json_has_no_numbers_that_json_does_not_have():
    """Other programs refuse NaN and Infinity."""
    strange = {"a": float("nan"), "b": [float("inf"), {"c": -float("inf")}], "d": 1.5}
    for text in (in_json(strange), in_json(strange, indent=2)):
        told = json.loads(text, parse_constant=pytest.fail)
        assert told == {"a": None, "b": [None, {"c": None}], "d": 1.5}


@pytest.mark.parametrize(("columns", "most"), [(None, 96), (200, 96), (60, 60)])
def test_what_is_said_fits_the_terminal(monkeypatch, columns, most):
    monkeypatch.setattr(text_module, "room", lambda: columns)
    lines = paragraph("word " * 200, "  ", "    ").splitlines()
    assert most - 6 < max(map(len, lines)) <= most
    assert lines[1].startswith("    word")


@pytest.mark.parametrize(
    ("reservation", "state", "words", "waiting"),
    [
        ({}, "waits", "waits, 60 s at most", 3),
        ({"info": {"until": "expired"}}, "stands", "stands for 60 s, whatever happens to it", 0),
        ({"is_running": True}, "begun", "has begun", 0),
        ({"has_run": True}, "ended", "has ended, and stands for 60 s", 0),
    ],
)
def test_a_reservation_tells_whether_its_task_waits(reservation, state, words, waiting):
    """One that stands for a time says nothing of its task, which may have run."""
    known = {"info": {}, "left": 60.0, "is_running": False, "merged": 2, **reservation}
    stands = stored.StoredReservation(b"a" * 40, **known)
    assert (state_of(stands), stands.waiting) == (state, waiting)
    assert f"{words}, 2 triggers merged into it" in reservation_in_words(stands)


def test_very_long_names_are_cut_for_a_person():
    """Else one of them makes a table as wide as itself."""
    assert one_line("n" * 5000, LONGEST).startswith("n" * (LONGEST - 33) + "~")
    assert len(one_line("n" * 5000, LONGEST)) == LONGEST
    assert one_line("n" * 5000, LONGEST) != one_line("n" * 5001, LONGEST)
    assert one_line("n" * LONGEST, LONGEST) == "n" * LONGEST
    assert len(who({"task": "t" * 5000, "host": "h" * 5000, "task_id": "i" * 5000})) < 500


def test_columns_stand_in_line_whatever_script_a_name_is_in(capsys):
    """A character of Chinese, Japanese or Korean takes two columns of a terminal."""
    show_table(("LOCK", "TASK"), [("\u540d\u524d:7", "a"), ("invoice:7", "b")])
    assert capsys.readouterr().out.splitlines() == [
        "LOCK       TASK",
        "\u540d\u524d:7     a",
        "invoice:7  b",
    ]


LONG = ("invoice:" + "7" * 60, "c" * 36, "shop.tasks.bill_everybody", "worker-host-of-a-long-name")
ROW = (
    *LONG,
    "12345",
    "3 min 20 s",
    "21.3 s",
    "3/3",
    "7243456789012345",
    "12",
    "1 h 2 min",
    "3f9a01bc",
)


@pytest.mark.parametrize("width", [60, 80, 100, 175, 300])
def test_a_table_is_no_wider_than_the_terminal(monkeypatch, width):
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("COLUMNS", str(width))
    show_table(LOCK_HEAD, [ROW, [cell[:4] for cell in ROW[:-1]] + ["aaaaaaaa"]], {}, LOCK_SPARE)
    head, row, _ = lines = [click.unstyle(line) for line in screen.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert head.split()[0] == "LOCK"
    assert row.endswith("3f9a01bc")
    assert ("FENCE" in head, "\N{HORIZONTAL ELLIPSIS}" in row) == (width > 120, width < 240)


def test_a_report_leaves_out_what_a_narrow_terminal_can_do_without(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    cells = ("shop.tasks.bill_everybody", "enforce", "12345", "678", *["21.3 s"] * 4)
    shown = {}
    for width in (30, 200):
        screen.truncate(0)
        monkeypatch.setenv("COLUMNS", str(width))
        show_table(report.HEAD, [cells], spare=report.SPARE)
        shown[width] = click.unstyle(screen.getvalue().splitlines()[0])
    assert [head in shown[30] for head in ("TASK", "RAN", "REFUSED", *report.SPARE)] == [
        *[True] * 3,
        *[False] * 3,
    ]
    assert all(head in shown[200] for head in report.HEAD)


def test_a_table_in_a_file_is_as_wide_as_its_content(capsys, monkeypatch):
    """Nobody looks at it through a window, and programs want all of it."""
    monkeypatch.setenv("COLUMNS", "60")
    show_table(LOCK_HEAD, [ROW], {}, LOCK_SPARE)
    shown = capsys.readouterr().out
    assert all(cell in shown for cell in ROW)


# --- terminals ------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("environment", "is_coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_who_wants_no_colours_gets_none(monkeypatch, environment, is_coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert ("\x1b" in colour("text", "red")) is is_coloured


def test_progress_is_not_told_where_there_is_no_stderr(monkeypatch):
    """It may have been closed."""
    monkeypatch.setattr(sys, "stderr", None)
    Progress("locks").tell(1)


def test_no_progress_is_mixed_into_json_on_a_terminal(monkeypatch):
    """Stdout and stderr are then one screen, and a document is being printed on it."""
    wanted = []

    def progress(what, *, is_wanted):
        wanted.append(is_wanted)
        return Progress(what, is_wanted=False)

    monkeypatch.setattr(ls, "Progress", progress)
    for stdout in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stdout", stdout)
        ls.print_json(ls.Found(Nothing(), Stop(), None), ls.LOCKS, 3)
        assert json.loads(stdout.getvalue()) == {"locks": [], "down": ["a"], "complete": False}
    assert wanted == [False, True]


class Nothing:
    silent = ("a",)

    def __iter__(self):
        """Return no locks."""
        return iter(())


# --- remote control -------------------------------------------------------------------------


class Request:
    id, name, worker_pid = "task-1", "hold", 4711
    task = SimpleNamespace()

    def is_owner(self, holder):
        return holder.get("token") == "ours"


def view(token="", problem=""):
    return NodeView("a", {"token": token} if token else {}, 1.0, 7, problem)


@pytest.mark.parametrize(
    ("views", "unknown"),
    [
        ([view("ours"), view("ours"), view()], False),
        ([view("ours"), view("ours"), view(problem="silent")], False),
        ([view("ours"), view(problem="silent"), view()], True),
        ([view(problem="silent"), view(problem="silent"), view()], True),
        ([view()], True),  # the others have not answered
        ([view(), view(), view(problem="silent")], None),
        ([view("theirs"), view("theirs"), view("theirs")], None),
    ],
)
def test_a_lock_of_a_child_that_nobody_can_tell_of_is_listed(monkeypatch, views, unknown):
    lock = SimpleNamespace(options=SimpleNamespace(ttl=3.0))
    monkeypatch.setattr(inspected, "lock_of", lambda _task: lock)
    told = inspected.of_child(Request(), "name", views, 3)
    if unknown is None:
        assert told is None
        return
    known = inspected.of_child(Request(), "name", [view("ours")] * 3, 3)
    assert set(told) == set(known)
    assert told["unknown"] is unknown
    if unknown:
        assert (told["name"], told["task_id"], told["pid"]) == ("name", "task-1", 4711)
        assert told["left"] is None
