"""How a command, a holder and a moment are worded; and how Celery's line of a skip is shortened."""

from __future__ import annotations

import logging

import pytest
from celery import Celery, beat

from celery_redlock import DuplicateTask, LockTaken, QuorumUnavailable, RedlockTask
from celery_redlock.ops.doctor.check_cluster import no_quorum
from celery_redlock.ops.doctor.facts import Facts, NodeFacts
from celery_redlock.reading.nodes import NodeStatus
from celery_redlock.reading.quorum import Quorum
from celery_redlock.settings import Settings
from celery_redlock.task.execution.log_filters import shorten
from celery_redlock.words import moment, redlock_command, votes_in_words, who


@pytest.mark.parametrize(
    ("argv", "app"),
    [
        (["/usr/bin/celery", "-A", "shop", "worker"], "shop"),
        (["/site-packages/celery/__main__.py", "--app=shop.app", "worker"], "shop.app"),
        (["celery", "-Ashop", "beat"], "shop"),
        (["celery", "--app", "shop", "beat"], "shop"),
        (["celery", "worker"], "APP"),
        (["celery", "-A"], "APP"),
        (["celery"], "APP"),
        (["/usr/bin/uwsgi", "-A", "127.0.0.1"], "APP"),
        ([], "APP"),
    ],
)
def test_a_command_names_the_app_that_the_process_was_started_for(argv, app):
    """To be copied as it is; ``-A`` of another program is something else."""
    assert redlock_command("bootstrap", argv) == f"celery -A {app} redlock bootstrap"


@pytest.mark.parametrize("junk", [None, [], "x", {}, {"since": float("nan")}, {"task": "t"}])
def test_who_nobody_told_of_is_unknown(junk):
    assert who(junk, junk) == "an unknown holder"


def test_what_is_no_moment_is_none():
    assert moment(9e11) == "?"
    assert moment("x") == "1970-01-01 00:00:00 UTC"


def test_votes_that_are_none_are_nothing():
    assert votes_in_words([]) == votes_in_words(None) == ""


def test_celerys_line_of_a_skip_is_short():
    def line(value):
        record = logging.LogRecord(
            "n", 20, "f", 1, "%(return_value)s", ({"return_value": value},), None
        )
        assert shorten(record)
        return record.getMessage()

    assert (
        line("{'skipped': 'conflict', 'lock': 'a', 'holder': {}}") == "{'skipped': 'conflict', ...}"
    )
    assert line("{'done': 'skipped'}") == "{'done': 'skipped'}"
    assert shorten(logging.LogRecord("n", 20, "f", 1, "%s %s", ("a", "b"), None))


@pytest.mark.parametrize("own", [(), (KeyError,), KeyError])
def test_what_a_policy_decides_is_expected(own):
    """Celery logs no traceback of what is among ``throws``; the user's own stay."""
    app = Celery("shop", set_as_current=False)
    app.conf.redlock_nodes = ["redis://127.0.0.1:1/0"]

    @app.task(base=RedlockTask, throws=own)
    def bill():
        """Do nothing."""

    assert {LockTaken, QuorumUnavailable} <= set(bill.throws)
    assert (KeyError in bill.throws) is (own != ())


def test_status_names_bootstrap_first_where_all_nodes_are_new(monkeypatch):
    monkeypatch.setattr("sys.argv", ["celery", "-A", "shop", "redlock", "status"])
    settings = Settings.from_conf({"redlock_nodes": ["redis://a", "redis://b", "redis://c"]})
    new = [NodeStatus(label, "quarantined", quarantine=41.0) for label in "abc"]
    first, second, *more = str(Quorum(new, settings.rules)).splitlines()
    assert first.startswith("Quorum: NO. 0 of 3 nodes can vote, 2 are needed.")
    assert second == (
        "All are new or restarted. If nobody can hold a lock: celery -A shop redlock bootstrap"
    )
    assert more == [
        "A quarantined node is new, or was restarted or wiped. It votes in 41 s at most."
    ]
    some = str(Quorum([*new[:2], NodeStatus("c", "up")], settings.rules))
    assert some.endswith("they vote at once after: celery -A shop redlock bootstrap")
    down = str(Quorum([NodeStatus(label, "down") for label in "abc"], settings.rules))
    assert "bootstrap" not in down


@pytest.mark.parametrize(("quarantine", "named"), [(41.0, True), (0.0, False)])
def test_the_doctor_names_bootstrap_first_where_all_nodes_are_new(monkeypatch, quarantine, named):
    monkeypatch.setattr("sys.argv", ["celery", "-A", "shop", "redlock", "doctor"])
    settings = Settings.from_conf({"redlock_nodes": ["redis://a", "redis://b", "redis://c"]})
    problem = "" if named else "Connection refused"
    nodes = [
        NodeFacts(node=it, problem=problem, state="enrolled", quarantine=quarantine) for it in "abc"
    ]
    (finding,) = [it for it in no_quorum(Facts(settings=settings, nodes=nodes)) if it]
    assert ("celery -A shop redlock bootstrap" in finding.fix) is named
    assert named or "'celery -A shop redlock status'" in finding.fix


def nothing():
    """Be the body of a task that is not called."""


def test_a_duplicate_is_one_line_of_beats_log(caplog):
    """Of beat without our scheduler, for each slot; any other error keeps its traceback."""

    def refuse(error):
        def apply_async(*_args, **_options):
            raise error

        return apply_async

    app = Celery("shop", broker="memory://", set_as_current=False)
    scheduler = beat.Scheduler(app, lazy=True)
    caplog.set_level(logging.INFO)
    for error in (DuplicateTask("first", "nightly"), OSError("broken")):
        task = app.task(name=type(error).__name__, shared=False)(nothing)
        task.apply_async = refuse(error)
        scheduler.apply_entry(scheduler.Entry(task.name, task.name, schedule=60, app=app))
    records = {it.levelname: it for it in caplog.records if "Scheduler" not in it.getMessage()}
    assert records["INFO"].getMessage() == (
        "Nothing published: Task first has reserved 'nightly' already"
    )
    assert records["INFO"].exc_info is None
    assert records["ERROR"].exc_info
