"""The guarantee's pages say what the proofs have recorded, and those prove what the pages claim."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that an installed celery_redlock stays what is tested

from proof import matrix, report  # noqa: E402
from simulation.guards import ALL_GUARDS  # noqa: E402

PAGES = {page.name: page.read_text() for page in report.PAGES}
DEFECTS = (ROOT / "docs" / "defects.md").read_text()
RECORDED = report.records()
#: A test as the pages name it, or a file or folder of tests.
NAMED = re.compile(r"`(tests/[\w/.]+)(?:::([\w:]+))?`")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_was_recorded(name):
    """Every table is that of the last recorded run; `python -m proof.report` makes it so."""
    assert report.rendered(PAGES[name], RECORDED) == PAGES[name]


def test_every_record_has_a_place_on_a_page():
    places = [place.groups() for text in PAGES.values() for place in report.PLACE.finditer(text)]
    assert sorted(places) == sorted(report.KINDS)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_says_something_else_is_noticed(name):
    grants = f"{RECORDED['simulation']['grants']:,}"
    assert grants in PAGES[name]
    changed = PAGES[name].replace(grants, "1")
    assert report.rendered(changed, RECORDED) == PAGES[name] != changed


def test_every_fault_of_the_nemesis_is_told_of():
    assert set(report.STRIKES) == {run["fault"] for run in RECORDED["nemesis"]["runs"]}


def test_chance_was_given_time_enough():
    found = RECORDED["simulation"]
    assert found["seeds"] >= 200
    assert found["hours"] >= found["seeds"]
    assert (found["violations"], found["broken"]) == (0, [])
    assert set(found["met"]) == set(report.FAULTS)
    assert min(found["met"].values()) > 100


def test_every_mutant_was_tried_and_killed():
    found = RECORDED["matrix"]
    assert found["rules"] == {name: guard.rule for name, guard in ALL_GUARDS.items()}
    assert [tuple(row["off"]) for row in found["rows"]] == [(name,) for name in ALL_GUARDS]
    pairs = {frozenset(row["off"]) for row in found["pairs"]}
    assert pairs == {frozenset(pair) for pair in matrix.pairs(list(ALL_GUARDS))}
    assert (found["survived"], found["failed_with_all_on"]) == ([], [])
    for row in (*found["rows"], *found["pairs"]):
        assert any(row["noticed"].values()), row["off"]


def test_every_layer_kills_something():
    """A layer that no mutant fails would be blind."""
    found = RECORDED["matrix"]
    for layer in found["layers"]:
        assert any(row["noticed"].get(layer) for row in found["rows"]), layer


def test_every_order_was_tried():
    whole = [row for row in RECORDED["exploration"]["rows"] if not row["guards_off"]]
    assert whole
    assert all(row["violating"] == 0 < row["states"] for row in whole)
    assert any(row["violating"] for row in RECORDED["exploration"]["rows"])


def ours(run):
    contenders = run["contenders"]
    return contenders["tasks" if run["fault"] == "celery" else "ours"]


def test_the_nemesis_had_time_enough_and_controls_broke():
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
    scores = {run["fault"]: ours(run) for run in RECORDED["nemesis"]["runs"]}
    assert all(score["lost_updates"] == 0 for score in scores.values())
    assert scores["celery"]["lost_plain_updates"] > 0
    assert sum(score["lost_plain_updates"] for score in scores.values()) > 1


def is_there(path, name):
    file = ROOT / path
    function = rf"^ *def {name.rpartition(':')[2]}\("
    return file.exists() and (not name or re.search(function, file.read_text(), re.MULTILINE))


@pytest.mark.parametrize("test", sorted(set(NAMED.findall("".join([*PAGES.values(), DEFECTS])))))
def test_what_the_pages_name_is_there(test):
    assert is_there(*test)


def test_a_test_that_is_not_there_is_noticed():
    """The twin."""
    assert not is_there("tests/unit/test_nothing.py", "")
    assert not is_there("tests/unit/test_lease.py", "test_nothing_of_that_name")


def test_every_defect_has_a_test():
    rows = [line for line in DEFECTS.splitlines() if line.startswith("| ")]
    defects = [row for row in rows if not row.startswith(("| what was wrong", "| --- "))]
    assert len(defects) > 40
    assert [row for row in defects if not NAMED.search(row.rpartition(" | ")[2])] == []
