"""What is done around a fork, and in which order."""

from __future__ import annotations

import os

import pytest

from celery_redlock.lock.algorithm.effects import Send, Sleep
from celery_redlock.lock.driver import Driver
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.waiting.waiting import leave_request
from celery_redlock.process import forks


@pytest.fixture
def noted(monkeypatch):
    """What the stages of this test have done; others have nothing to do meanwhile."""
    monkeypatch.setattr(forks, "_stages", {})
    noted = []

    def note(stage, what):
        return lambda: noted.append((stage, what))

    for stage in ("plugin", "log"):
        words = {word: note(stage, word) for word in ("before", "in_parent")}
        forks.around_fork(stage, note(stage, "in_child"), **words)
    return noted


def fork():
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    return pid


def test_who_is_needed_by_others_is_held_last_and_let_go_first(noted):
    if fork() == 0:
        os._exit(0)
    assert noted == [
        ("plugin", "before"),
        ("log", "before"),
        ("log", "in_parent"),
        ("plugin", "in_parent"),
    ]


def test_a_child_forgets_what_is_the_parents_in_that_order(noted, tmp_path):
    told = tmp_path / "told"
    if fork() == 0:
        told.write_text(repr(noted[2:]))
        os._exit(0)
    assert told.read_text() == repr([("log", "in_child"), ("plugin", "in_child")])


def test_a_stage_that_fails_keeps_no_other_from_its_turn(noted, tmp_path):
    """Else one member that is broken would leave a child all that is the parent's."""

    class Member:
        def __init__(self, name):
            self.name = name

        def after_fork_in_child(self):
            noted.append(self.name)
            raise RuntimeError

    told = tmp_path / "told"
    kept = [Member("one"), Member("other")]
    forks.members("held").update(kept)
    if fork() == 0:
        told.write_text(repr(sorted(map(str, noted[2:]))))
        os._exit(0)
    assert told.read_text() == repr(
        sorted(map(str, [("log", "in_child"), "one", "other", ("plugin", "in_child")]))
    )


class Told:
    """In place of the connections: notes what would be sent."""

    labels = ("one",)

    def __init__(self):
        self.sent = []

    def tell(self, a_round, _skip):
        self.sent.append(a_round)


def steps():
    try:
        yield Sleep(1.0)
    except GeneratorExit:
        raise
    except BaseException:
        yield Send(leave_request(Rules(), "it", "me"))
        raise


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("how", ["interrupted", "goes on"])
@pytest.mark.parametrize("forks", [True, False])
def test_a_child_sends_nothing_of_what_its_parent_began(forks, how):
    """And who has not forked does."""
    told = Told()

    def sleep(_seconds):
        pid = os.fork() if forks else 0
        if pid == 0 and (how == "interrupted" or not forks):
            raise SystemExit
        if pid:
            assert os.waitpid(pid, 0)[1] == 0

    parent, error = os.getpid(), None
    try:
        Driver(told, sleep).drive(steps())
    except (SystemExit, RuntimeError) as caught:
        error = caught
    finally:
        if os.getpid() != parent:
            expected = SystemExit if how == "interrupted" else RuntimeError
            os._exit(0 if isinstance(error, expected) and not told.sent else 1)
    assert (error is None, len(told.sent)) == ((True, 0) if forks else (False, 1))
