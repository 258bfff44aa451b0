"""docs/compatibility.md says what was recorded, and the record covers what is promised."""

from __future__ import annotations

import re
import sys
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that an installed celery_redlock stays what is tested

from compatibility import AXES, PAGES, Cell, page  # noqa: E402
from compatibility.cover import (  # noqa: E402
    cell_of,
    every_cell,
    pairs_of,
    pairs_to_cover,
    pairwise,
)

RECORDED = page.read()
TEXT = "".join(text.read_text() for text in PAGES)
PROJECT = (ROOT / "pyproject.toml").read_text()


def met(cells):
    return pairs_of(cell._asdict() for cell in cells)


# -- the cover ------------------------------------------------------------------------------


def test_in_the_cover_every_two_versions_meet():
    cells = pairwise(AXES)
    for i, j in product(range(len(Cell._fields)), repeat=2):
        if i < j:
            seen = {(cell[i], cell[j]) for cell in cells}
            assert seen == set(product(AXES[Cell._fields[i]], AXES[Cell._fields[j]]))


def test_the_cover_is_small_and_always_the_same():
    """Twenty cells is the least: five Pythons times four Celerys."""
    cells = pairwise(AXES)
    assert cells == pairwise(AXES)
    assert len(cells) == len(set(cells)) == 20
    assert set(cells) < set(every_cell(AXES))
    assert len(every_cell(AXES)) == 360


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1), (2, 2, 2, 2, 2), (3, 1, 4, 2, 5), (3, 3, 3, 3, 3)]
)
def test_a_cover_of_other_versions(sizes):
    axes = {
        axis: tuple(f"{axis}{number}" for number in range(size))
        for axis, size in zip(Cell._fields, sizes, strict=True)
    }
    cells = pairwise(axes)
    assert met(cells) == pairs_to_cover(axes)
    assert len(cells) < max(2, 3 * max(sizes) ** 2)


def test_no_cell_of_the_cover_can_be_left_out():
    """So that a pair which is missing would be noticed."""
    cells = pairwise(AXES)
    for cell in cells:
        assert met(other for other in cells if other != cell) < pairs_to_cover(AXES)


# -- the record -----------------------------------------------------------------------------


def test_every_two_versions_were_seen_together_without_a_failure():
    assert [cell_of(cell).name for cell in RECORDED["cells"] if not page.is_well(cell)] == []
    well = [cell_of(cell) for cell in RECORDED["cells"] if page.is_well(cell)]
    assert pairs_to_cover(AXES) - met(well) == set()


def test_every_cell_found_what_it_is_about():
    """The versions that were really there, not those that were asked for."""
    for result in RECORDED["cells"]:
        cell, found = cell_of(result), result["found"]
        assert found["python"].startswith(f"{cell.python}.")
        assert found["celery"].startswith(f"{cell.celery}.")
        assert found["kombu"].startswith(f"{cell.celery}.")
        assert found["redis"].startswith(f"{cell.redis_py}.")
        assert found["server"].startswith(f"{cell.server}.")
        assert bool(found["hiredis"]) == (cell.hiredis == "on")
        assert result["passed"] > 100


# -- the page -------------------------------------------------------------------------------


def test_the_page_says_what_was_recorded():
    """`python -m compatibility.page` makes it so."""
    assert page.rendered(TEXT, RECORDED) == TEXT


def test_the_record_has_all_its_places_on_the_page():
    assert sorted(page.PLACE.findall(TEXT)) == sorted(page.KINDS)


def test_a_page_that_says_something_else_is_noticed():
    found = RECORDED["cells"][0]["found"]["redis"]
    assert found in TEXT
    changed = TEXT.replace(found, "6.6.6")
    assert page.rendered(changed, RECORDED) == TEXT != changed


def test_what_is_missing_would_be_told():
    short = {**RECORDED, "cells": RECORDED["cells"][1:]}
    assert "Not yet seen together: " in page.rendered(TEXT, short)
    first = {**RECORDED["cells"][0], "failed": 1}
    failing = page.rendered(TEXT, {**RECORDED, "cells": [first, *RECORDED["cells"][1:]]})
    assert "Not yet seen together: " in failing
    assert "1 failed" in failing
    assert "Not yet seen together: " not in TEXT


def test_a_cell_that_found_nothing_is_told_too():
    lost = {**every_cell(AXES)[0]._asdict(), "failed": 1, "problem": "not installable: x"}
    lost["tests"] = ["tests/contract"]
    told = page.rendered(TEXT, {**RECORDED, "cells": [lost]})
    assert "**not installable: x**" in told


# -- what the project says elsewhere --------------------------------------------------------


def test_the_readme_says_the_same():
    readme = " ".join((ROOT / "README.md").read_text().split())
    ends = {axis: (versions[0], versions[-1]) for axis, versions in AXES.items()}
    words = {"python": "Python", "celery": "Celery", "redis_py": "redis-py"}
    told = [f"{name} {' to '.join(ends[axis])}" for axis, name in words.items()]
    assert f"{', '.join(told)}." in readme


def test_the_package_admits_what_is_tested_and_starts_where_that_does():
    for package, axis in {"celery": "celery", "kombu": "celery", "redis": "redis_py"}.items():
        (low, high) = re.search(rf'"{package}>=([\d.]+),<(\d+)"', PROJECT).groups()
        assert low == AXES[axis][0]
        assert int(high) == int(AXES[axis][-1].split(".")[0]) + 1
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert tuple(pythons) == AXES["python"]
    assert f'requires-python = ">={AXES["python"][0]}"' in PROJECT


def test_the_matrix_leaves_free_what_it_is_about():
    from compatibility.environments import FREE

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    free = {line.partition("==")[0] for line in lines if FREE.match(line)}
    assert free == {"celery", "kombu", "redis", "hiredis"}
