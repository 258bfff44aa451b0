"""docs/guarantees.md says what the proofs have recorded, and they prove what the page claims."""

from __future__ import annotations

import re
import sys
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that an installed celery_redlock stays what is tested

from proof import report  # noqa: E402
from simulation.guards import GUARDS  # noqa: E402

PAGE = report.PAGE.read_text()
RECORDED = report.records()


def test_the_page_says_what_was_recorded():
    """Every table is that of the last recorded run; `python -m proof.report` makes it so."""
    assert report.rendered(PAGE, RECORDED) == PAGE


def test_every_record_has_a_place_on_the_page():
    """Nothing is recorded and then not told."""
    places = {place.groups() for place in report.PLACE.finditer(PAGE)}
    assert places == set(report.KINDS)


def test_a_page_that_says_something_else_is_noticed():
    """A figure that was changed by hand is put right."""
    grants = f"{RECORDED['simulation']['grants']:,}"
    assert grants in PAGE
    changed = PAGE.replace(grants, "1")
    assert report.rendered(changed, RECORDED) == PAGE != changed


def test_chance_was_given_time_enough():
    """At least two hundred seeds of an hour each, every fault among them, and no law broken."""
    found = RECORDED["simulation"]
    assert found["seeds"] >= 200
    assert found["hours"] >= found["seeds"]
    assert (found["violations"], found["broken"]) == (0, [])
    assert set(found["met"]) == set(report.FAULTS)
    assert min(found["met"].values()) > 100


def test_every_mutant_was_tried_and_killed():
    """Each guard, and each pair of guards, of today; and no layer fails with all of them on."""
    found = RECORDED["matrix"]
    assert found["rules"] == {name: guard.rule for name, guard in GUARDS.items()}
    assert [tuple(row["off"]) for row in found["rows"]] == [(name,) for name in GUARDS]
    pairs = {frozenset(row["off"]) for row in found["pairs"]}
    assert pairs == {frozenset(pair) for pair in combinations(GUARDS, 2)}
    assert (found["survived"], found["failed_with_all_on"]) == ([], [])
    for row in (*found["rows"], *found["pairs"]):
        assert any(row["noticed"].values()), row["off"]


def test_every_layer_kills_something():
    """A layer that no mutant fails would be blind."""
    found = RECORDED["matrix"]
    for layer in found["layers"]:
        assert any(row["noticed"].get(layer) for row in found["rows"]), layer


def test_every_order_was_tried():
    """With all guards on no configuration breaks a law, and without one of them some do."""
    whole = [row for row in RECORDED["exploration"]["rows"] if not row["guards_off"]]
    assert whole
    assert all(row["violating"] == 0 < row["states"] for row in whole)
    assert any(row["violating"] for row in RECORDED["exploration"]["rows"])


def ours(run):
    """Return what the library did in a run: as clients of its own, or in Celery's tasks."""
    contenders = run["contenders"]
    return contenders["tasks" if run["fault"] == "celery" else "ours"]


def test_the_nemesis_had_time_enough_and_controls_broke():
    """Ten minutes per fault; no violation; whoever had to break did, or the run does not count."""
    runs = RECORDED["nemesis"]["runs"]
    assert len(runs) >= 15
    for run in runs:
        assert run["seconds"] >= 600, run["fault"]
        assert (run["violations"], run["counts"]) == ([], True), run["fault"]
        assert run["injections"] > 10
        assert (ours(run)["overlaps"], ours(run)["disorders"]) == (0, 0)
    broken = {name for run in runs for name, s in run["contenders"].items() if s["overlaps"]}
    assert broken >= {"pottery", "unguarded", "careless"}


def test_fenced_updates_are_never_lost_and_others_are():
    """The fenced counter of the clients and of the workers lost nothing; its twin did."""
    scores = {run["fault"]: ours(run) for run in RECORDED["nemesis"]["runs"]}
    assert all(score["lost_updates"] == 0 for score in scores.values())
    assert scores["celery"]["lost_plain_updates"] > 0
    assert sum(score["lost_plain_updates"] for score in scores.values()) > 1


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[\w/.]+)`", PAGE))))
def test_what_the_page_names_is_there(path):
    """A layer that the page tells of exists."""
    assert (ROOT / path).exists()
