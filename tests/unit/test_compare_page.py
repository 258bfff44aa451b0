"""The comparison with other libraries: what is judged, and that the pages say what was seen."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that an installed celery_redlock stays what is tested

from benchmarks.peers import __main__ as runner  # noqa: E402
from benchmarks.peers import record as records  # noqa: E402
from benchmarks.peers import table  # noqa: E402
from benchmarks.peers.record import Found, Run  # noqa: E402
from benchmarks.peers.rows import (  # noqa: E402
    BY_KEY,
    COLUMNS,
    LEAKY,
    ONCE,
    OURS,
    PLAIN,
    ROWS,
    SINGLETON,
    cells,
)
from benchmarks.peers.runner import CellFailed  # noqa: E402
from benchmarks.peers.verdicts import VERDICTS, verdict  # noqa: E402

WAITED = {"waited": 14.0, "held": 1.0, "ttl": 10}
CALLS = {"raised": None, "published": 1, "states": ["SUCCESS"], "failed": [], "bodies": 1}
CALLS |= {"at_once": 1, "down": 2, "of": 5}
CHORD = {"raised": None, "answer": "3", "at_once": 1}
#: Of each row what it is to be, and then ways in which it is not: row, seen, holds, words.
SIGHTS = [
    ("killed", {**WAITED, "silent": 0.2}, True, "runs again at once"),
    ("killed", {**WAITED, "ttl": 3, "silent": 3.1}, True, "runs again when its lease ends"),
    ("killed", {**WAITED, "silent": 9.0}, False, "silent until its TTL ends"),
    ("killed", {**WAITED, "silent": 6.0}, False, "silent"),
    ("killed", {**WAITED, "silent": None}, False, "silent"),
    ("outlasted", {"at_once": 1, "took": 7.5}, True, "runs alone"),
    ("outlasted", {"at_once": 2, "took": 7.5}, False, "second copy beside it"),
    ("redelivered", {"at_once": 1, "answer": "result of job x"}, True, "runs alone"),
    ("redelivered", {"at_once": 3, "answer": "result of job x"}, False, "copies beside it"),
    ("redelivered", {"at_once": 1, "answer": "None"}, False, "caller gets no result"),
    ("retried", {"retries": 1, "at_once": 1, "bodies": 2}, True, "retries alone"),
    ("retried", {"retries": 0, "at_once": 1, "bodies": 1}, False, "retry is swallowed"),
    ("retried", {"retries": 0, "at_once": 1, "bodies": 2}, False, "copy runs in its stead"),
    ("retried", {"retries": 1, "at_once": 2, "bodies": 3}, False, "copy beside the retry"),
    ("revoked", {**WAITED, "silent": 0.2}, True, "runs again at once"),
    ("revoked", {**WAITED, "silent": 9.0}, False, "silent until its TTL ends"),
    ("limited", {**WAITED, "silent": 0.2}, True, "runs again at once"),
    ("limited", {**WAITED, "silent": 9.0}, False, "silent until its TTL ends"),
    ("chord", CHORD, True, "ends"),
    ("chord", {**CHORD, "raised": "AlreadyQueued", "answer": None}, False, "publish raises"),
    ("chord", {**CHORD, "answer": "TimeoutError"}, False, "never ends"),
    ("chord", {**CHORD, "answer": "ChordError"}, False, "fails"),
    ("chord", {**CHORD, "at_once": 2}, False, "both at once"),
    ("down", CALLS, True, "runs alone, 2 of 5 down"),
    ("down", {**CALLS, "raised": "ConnectionError"}, False, "publish raises"),
    ("down", {**CALLS, "published": 0, "bodies": 0}, False, "dropped silently"),
    ("down", {**CALLS, "at_once": 2}, False, "runs without a lock"),
    ("down", {**CALLS, "failed": ["ConnectionError"]}, False, "task fails"),
    ("down", {**CALLS, "bodies": 0, "at_once": 0}, False, "does not run"),
    ("spelt", {"at_once": 1, "other": 1}, True, "one lock"),
    ("spelt", {"at_once": 3, "other": 1}, False, "3 at once"),
    ("spelt", {"at_once": 1, "other": 0}, False, "holds back another call"),
    ("late", {"beside": 0}, True, "newer lock stays"),
    ("late", {"beside": 1}, False, "frees the newer lock"),
    ("beats", {"runs": 3, "slots": 3}, True, "runs once"),
    ("beats", {"runs": 2, "slots": 3}, True, "runs once"),
    ("beats", {"runs": 6, "slots": 3}, False, "runs twice"),
    ("beats", {"runs": 1, "slots": 3}, False, "misses runs"),
]
GOOD = {row: next(seen for key, seen, *_ in SIGHTS if key == row) for row in BY_KEY}
BAD = {row: [seen for key, seen, *_ in SIGHTS if key == row][-1] for row in BY_KEY}
MACHINE = {"versions": dict.fromkeys((*COLUMNS, "celery"), "1.2"), "seconds": 300}


def a_find(row, column):
    """Return a cell as it should be: others fail, and ours holds."""
    return Found(row, column, (GOOD if column == OURS else BAD)[row], 1.0)


A_RUN = Run(tuple(a_find(*one) for one in cells()), MACHINE)


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Have a run that ends at once: tell the runner what it finds; record and page are copies."""
    monkeypatch.setattr(records, "RECORDED", tmp_path / "peers.json")
    monkeypatch.setattr(runner, "PAGE", tmp_path / "comparison.md")
    runner.PAGE.write_text("Before\n<!-- compare: table -->\nas it was\n<!-- end -->\nAfter\n")

    def main(*arguments, found=A_RUN.found):
        by_cell = {(one.row, one.column): one for one in found if isinstance(one, Found)}
        failed = [one for one in found if not isinstance(one, Found)]
        monkeypatch.setattr(
            runner,
            "run_all",
            lambda picked, _: [by_cell[one] for one in picked if one in by_cell] + failed,
        )
        return runner.main(arguments)

    return main


# -- what is judged --------------------------------------------------------------------


@pytest.mark.parametrize(("row", "seen", "holds", "words"), SIGHTS)
def test_a_verdict_follows_from_what_was_seen(row, seen, holds, words):
    told = verdict(row, seen)
    assert (told.holds, told.words) == (holds, words)


def test_every_row_has_a_verdict_and_can_go_both_ways():
    """A row that nobody can fail, or nobody can pass, compares nothing."""
    assert list(VERDICTS) == list(BY_KEY)
    for row in BY_KEY:
        assert {holds for key, _, holds, _ in SIGHTS if key == row} == {True, False}


def test_words_have_no_figure_that_differs_from_run_to_run():
    for silent in (8.0, 8.9, 9.7):
        assert verdict("killed", {**WAITED, "silent": silent}).words == "silent until its TTL ends"
    for runs in (5, 6):
        assert verdict("beats", {"runs": runs, "slots": 3}).words == "runs twice"


def test_every_row_has_a_cell_for_everybody_and_for_its_control():
    picked = cells()
    assert len(set(picked)) == len(picked)
    for row in ROWS:
        assert {(row.key, one) for one in (*COLUMNS, PLAIN, row.control)} <= set(picked)


# -- what a run says and keeps ---------------------------------------------------------


def test_a_run_in_which_ours_holds_and_controls_fail_is_well(made, capsys):
    assert made() == 0
    told = capsys.readouterr().out
    assert "worker killed, celery-once: ✗ silent (waited 14 s)" in told
    assert f"{len(cells())} cells in " in told
    assert not records.RECORDED.exists()


def test_only_what_is_asked_for_is_run(made, capsys):
    assert made("late", "spelt", "--only", OURS, "--only", ONCE) == 0
    assert "4 cells in " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "column", "seen"),
    [("late", OURS, BAD["late"]), ("late", PLAIN, GOOD["late"]), ("killed", LEAKY, GOOD["killed"])],
)
def test_a_cell_of_ours_that_fails_and_a_control_that_holds_are_told(
    made, capsys, row, column, seen
):
    """A control that holds means that the row sees nothing."""
    found = [
        replace(one, seen=seen) if (one.row, one.column) == (row, column) else one
        for one in A_RUN.found
    ]
    assert made(found=found) == 1
    assert f"Not as it should be: {row} of {column}" in capsys.readouterr().out


def test_a_situation_that_did_not_come_about_is_no_verdict(made, capsys):
    """It is told, nothing is recorded, and the run is not well."""
    found = [*A_RUN.found[1:], CellFailed("killed of celery-once:\nno worker")]
    assert made("--record", found=found) == 1
    assert "not run: killed of celery-once:\nno worker" in capsys.readouterr().out
    assert not records.RECORDED.exists()


def test_a_recorded_run_is_read_again_and_stands_in_the_page(made):
    pytest.importorskip("celery_once")
    assert made("--record") == 0
    run = records.load()
    assert sorted(run.found, key=str) == sorted(A_RUN.found, key=str)
    assert run.machine["versions"]["celery-once"]
    page = runner.PAGE.read_text()
    assert page.startswith("Before\n<!-- compare: table -->\n| | celery-once |")
    assert page.endswith(".\n<!-- end -->\nAfter\n")
    assert "as it was" not in page
    assert table.rendered(page, run) == page
    runner.PAGE.write_text("<!-- compare: table -->\n<!-- end -->\n")
    assert made("--render") == 0
    assert runner.PAGE.read_text().startswith("<!-- compare: table -->\n| | celery-once |")


@pytest.mark.parametrize(
    "arguments",
    [["nothing"], ["--only", "nobody"], ["late", "--record"], ["--record", "--only", ONCE]],
)
def test_what_cannot_be_meant_is_refused(made, arguments):
    with pytest.raises(SystemExit) as refused:
        made(*arguments)
    assert refused.value.code == 2


def test_make_compare_runs_it():
    assert "-m benchmarks.peers $(ARGS)\n" in (ROOT / "Makefile").read_text()


# -- the last recorded run -------------------------------------------------------------


@pytest.fixture(scope="module")
def run():
    return records.load()


def test_every_cell_was_run(run):
    assert sorted((one.row, one.column) for one in run.found) == sorted(cells())


def test_every_cell_of_ours_holds(run):
    told = {row.key: run.cell(row.key, OURS).verdict for row in ROWS}
    assert {row: one.words for row, one in told.items() if not one.holds} == {}


def test_every_control_fails(run):
    assert [row.key for row in ROWS if run.cell(row.key, row.control).verdict.holds] == []


def test_a_plain_task_is_not_silenced(run):
    """Where the control is a lock that leaks, the same without a lock shows that one can pass."""
    leaks = [row.key for row in ROWS if row.control == LEAKY]
    assert [row for row in leaks if not run.cell(row, PLAIN).verdict.holds] == []


def test_the_record_says_what_it_was_made_with(run):
    assert set(COLUMNS) - {OURS, "cookbook recipe"} <= set(run.machine["versions"])
    assert run.machine["cores"] > 0
    assert run.machine["command"].startswith("python -m benchmarks.peers --record")
    assert run.machine["seconds"] > 0


def test_the_page_has_the_table_of_the_record(run):
    """`python -m benchmarks.peers --record` is what writes it."""
    page = table.PAGE.read_text()
    assert table.PLACE.search(page)
    assert table.rendered(page, run) == page
    assert f"| {ROWS[0].name} |" in page


#: What the README says of a row, in plain words -> the row.
SHORT = {
    "A task that outlasts its TTL still runs alone": "task outlasts TTL",
    "A message that is delivered again: one run, one result": "redelivery while running",
    "A retry runs, and alone": "retry",
    "A chord with a duplicate in it ends": "chord with a duplicate",
    "Tasks run, under a lock, while a lock server is down": "lock server down",
    "Two beats publish each entry once": "two beats",
}


def test_the_readme_has_a_part_of_the_record(run):
    page = (table.PAGE.parents[1] / "README.md").read_text()
    lines = page.partition("<!-- compare: short -->\n")[2].partition("\n\n")[0].splitlines()
    (_, *columns), _, *rows = ([cell.strip() for cell in line[1:-1].split("|")] for line in lines)
    assert [name for name, *_ in rows] == list(SHORT)
    keys = {row.name: row.key for row in ROWS}
    for name, *told in rows:
        verdicts = [run.cell(keys[SHORT[name]], column).verdict for column in columns]
        assert told == ["yes" if one.holds else "no" for one in verdicts], name
    assert f"{len(ROWS) - len(SHORT)} more rows" in page.replace("five", "5")


def test_the_table_can_be_read_on_a_first_screen(run):
    lines = table.markdown(run).splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][2:]
    assert [name for name, *_ in rows] == [row.name for row in ROWS]
    assert {len(row) for row in rows} == {1 + len(COLUMNS)}
    for _, *signs in rows:
        assert all(re.fullmatch(r"[✓✗] .{4,30}", one) for one in signs), signs
    assert SINGLETON in lines[0]
