"""docs/performance.md says what the benchmarks have recorded, and shows it; how it is made."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that an installed celery_redlock stays what is tested

from benchmarks import __main__ as runner  # noqa: E402
from benchmarks import record as records  # noqa: E402
from benchmarks import report  # noqa: E402
from benchmarks.record import BENCHMARKS, Plot, Record, Series, Table, Verdict  # noqa: E402

IMAGE = re.compile(r"^!\[(.+)\]\(performance/(\w+)\.svg\)$", re.MULTILINE)
CHOSEN = argparse.Namespace(record=True, check=True)
MACHINE = {
    "cores": 2,
    "processor": "Fast",
    "system": "Linux",
    "python": "3.11",
    "celery": "5.7.0",
    "pottery": "3.0.1",
    "redlock-py": "1.0.8",
    "command": "python -m benchmarks.publish --record",
}


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "RECORDED", tmp_path / "recorded")
    monkeypatch.setattr(report, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(report, "TABLES", tmp_path / "tables.md")
    return tmp_path / "recorded"


def a_record(name="publish"):
    ours = Series("celery-redlock, 5 nodes", ((1, 10.0, 9.0, 11.0), (10, 20.0, 20.0, 20.0)))
    theirs = Series("pottery, 5 nodes", ((1, 100.0, 90.0, 200.0), (10, 2e3, 1e3, 3e3)))
    there = Record(name, {"rounds": 2, "cycles": 3})
    there.tables.append(Table("Time [us]", ("", "p50", "lost"), (("a | b", 1234.5, None),)))
    there.plots.append(Plot(f"{name}_plot", "A [b]", "nodes", "Time [us]", (ours, theirs), log="y"))
    there.plots.append(Plot(f"{name}_bars", "A [b]", "", "Time [us]", (ours, theirs), bars=True))
    there.verdicts += [Verdict("a / b", 1.25, 1.3), Verdict("c / d", 0.7, 0.85, at_least=True)]
    return there


# -- what is kept of a run -------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (None, "-"),
        ("a word", "a word"),
        (True, "True"),
        (float("nan"), "nan"),
        (0, "0"),
        (7, "7"),
        (1_234_567, "1,234,567"),
        (0.0, "0"),
        (0.01234, "0.0123"),
        (0.9994, "0.999"),
        (0.9996, "1.00"),
        (1.0, "1.00"),
        (9.994, "9.99"),
        (9.996, "10.0"),
        (99.94, "99.9"),
        (99.96, "100"),
        (1234.5, "1,234"),
        (-1.5, "-1.50"),
    ],
)
def test_a_figure_has_three_digits_that_count(cell, words):
    assert records.in_words(cell) == words


@pytest.mark.parametrize(
    ("found", "at_least", "is_met"),
    [
        (0.9, False, True),
        (1.0, False, True),
        (1.1, False, False),
        (0.9, True, False),
        (1.0, True, True),
        (1.1, True, True),
        (float("nan"), False, False),
        (float("nan"), True, False),
    ],
)
def test_a_promise_is_met_up_to_its_limit(found, at_least, is_met):
    assert Verdict("a / b", found, 1.0, at_least).is_met is is_met


def test_what_was_recorded_is_read_again(recorded):
    told = a_record()
    assert told.end(CHOSEN) == 1
    read, machine = records.read("publish")
    assert read == told
    assert machine["cores"] > 0
    assert machine["command"].startswith("python -m ")


def test_a_missing_record_says_what_to_run(recorded, capsys):
    report.PAGE.write_text("as it was")
    assert report.main() == 1
    assert "make bench ARGS='calls --record'" in capsys.readouterr().err
    assert report.PAGE.read_text() == "as it was"


# -- how the page is made --------------------------------------------------------------


def test_markers_are_filled_and_the_rest_is_left():
    places = ("all: targets", "all: missed", "publish: plots", "publish: tables")
    page = "Before.\n\n## To Publish, Once\n\nText.\n\n"
    page += "".join(f"<!-- {place} -->\nold\n<!-- end -->\n" for place in places) + "After.\n"
    made = report.rendered(page, {"publish": (a_record(), MACHINE)})
    assert made.startswith("Before.\n")
    assert made.endswith("After.\n")
    assert "old" not in made
    assert "| [publish](#to-publish-once) | a / b | ≤ 1.3 | 1.250 | met |" in made
    assert "run met 1 of 2, and missed these:\n" in made
    assert made.count("| a / b | ≤ 1.3 | 1.250 | met |") == 1
    assert made.count("| **MISSED** |") == 2
    assert "| c / d | ≥ 0.85 | 0.700 | **MISSED** |" in made
    assert "**Time [us]**\n\n|  | p50 | lost |\n| --- | ---: | ---: |" in made
    assert "| a \\| b | 1,234 | - |" in made
    assert "`python -m benchmarks.publish --record` (rounds 2, cycles 3), on 2 cores" in made
    assert "Python 3.11, celery 5.7.0, pottery 3.0.1.\n" in made  # redlock-py has no part in it
    alt = "A (b): Time (us) by nodes"
    assert f"![{alt}](performance/publish_plot.svg)" in made
    assert report.rendered(made, {"publish": (a_record(), MACHINE)}) == made


def test_the_same_records_make_the_same_files(recorded):
    pytest.importorskip("matplotlib")
    report.PAGE.write_text("## P\n\n<!-- publish: plots -->\n<!-- end -->\n")
    report.TABLES.write_text("## P\n\n<!-- publish: tables -->\n<!-- end -->\n")
    for name in BENCHMARKS:
        there = a_record(name)
        there.plots = there.plots if name == "publish" else []
        there.end(CHOSEN)
    made = []
    for _ in range(2):
        assert report.main() == 0
        folder = report.pictures_of(report.PAGE)
        made.append([report.PAGE.read_text(), *(p.read_text() for p in sorted(folder.iterdir()))])
        (folder / "old.svg").write_text("nobody asks for this")
    assert made[0] == made[1]
    assert len(made[0]) == 3


def test_a_library_has_its_colour_whatever_is_said_besides():
    pytest.importorskip("matplotlib")
    from benchmarks import pictures

    assert pictures.colour("redis-py Lock, 1 node, 5 ms away") == pictures.LIBRARIES["redis-py"]
    named = {word: pictures.colour(f"{word}, 5 nodes") for word in pictures.LIBRARIES}
    assert named == pictures.LIBRARIES
    ours = [pictures.colour(f"celery-redlock, {n}") for n in ("1 node", "3 nodes", "5 nodes")]
    assert ours == [pictures.SHADES[n] for n in "135"]
    assert pictures.colour("celery-redlock, 7 nodes") == pictures.SHADES["5"]
    assert pictures.colour("delay(), unique") is None
    assert not {*ours, *pictures.OTHERS[:1]} & set(pictures.LIBRARIES.values())


def test_all_benchmarks_are_run_whatever_becomes_of_one(monkeypatch, capsys):
    asked = []

    def run(command, **_):
        asked.append(command[2:])
        return subprocess.CompletedProcess(command, int("publish" in command[2]))

    monkeypatch.setattr(subprocess, "run", run)
    assert runner.main(["--rounds", "1"]) == 1
    assert asked == [[f"benchmarks.{name}", "--rounds", "1"] for name in BENCHMARKS]
    assert capsys.readouterr().out.endswith("Not well: publish\n")
    assert runner.main(["memory", "startup"]) == 0
    assert runner.main(["nothing"]) == 2
    assert len(asked) == len(BENCHMARKS) + 2
    assert "-m benchmarks $(ARGS)\n" in (ROOT / "Makefile").read_text()


def test_every_benchmark_is_named():
    """`make bench` runs each module that makes a record, and there is none that it only names."""
    modules = (ROOT / "benchmarks").glob("*.py")
    assert {path.stem for path in modules if ' = Record("' in path.read_text()} == set(BENCHMARKS)


# -- the page as it is -----------------------------------------------------------------


@pytest.fixture(scope="module")
def everything():
    return {name: records.read(name) for name in BENCHMARKS}


def test_the_pages_have_a_place_for_everything():
    """Pictures are on the page, tables beside the records, but for missed targets."""
    here, there = (
        re.findall(r"<!-- (\w+: \w+) -->", page.read_text())
        for page in (report.PAGE, report.TABLES)
    )
    each = [f"{name}: {kind}" for name in BENCHMARKS for kind in ("plots", "tables")]
    assert sorted(here + there) == sorted(["all: missed", "all: targets", *each])
    assert (here[0], there[0]) == ("all: missed", "all: targets")
    assert {place.split()[1] for place in there} == {"tables", "targets"}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_has_been_recorded(name):
    record, machine = records.read(name)
    assert record.name == name
    assert record.tables
    assert f"benchmarks.{name} " in machine["command"]


def test_the_page_is_what_the_records_say(everything):
    """`python -m benchmarks.report` would change nothing."""
    for page in (report.PAGE, report.TABLES):
        text = page.read_text()
        assert report.rendered(text, everything) == text


def test_a_plot_has_one_figure_in_each_place(everything):
    """A series that names a place twice would be drawn over itself."""
    series = [
        (plot.name, one.label, [point[0] for point in one.points])
        for record, _ in everything.values()
        for plot in record.plots
        for one in plot.series
    ]
    assert [name for *name, places in series if len(set(places)) < len(places)] == []


def test_the_pictures_are_of_what_was_recorded(everything):
    pytest.importorskip("matplotlib")
    from benchmarks.pictures import digest, digest_in

    plots = [plot for record, _ in everything.values() for plot in record.plots]
    files = {path.stem: path for path in report.pictures_of(report.PAGE).glob("*.svg")}
    assert sorted(files) == sorted(plot.name for plot in plots)
    assert [p.name for p in plots if digest_in(files[p.name].read_text()) != digest(p)] == []
    shown = {name: alt for alt, name in IMAGE.findall(report.PAGE.read_text())}
    assert sorted(shown) == sorted(files)
    assert all(len(alt) > 20 for alt in shown.values())
