"""What is done around a fork, and in which order."""

from __future__ import annotations

import os

import pytest

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
