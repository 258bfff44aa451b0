"""
Which cells are run: all of them, or so few that every two versions still meet. Pure.

Most of what breaks does so between two packages. A pairwise cover has every version of one
together with every version of every other in at least one cell, in a twelfth of the cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

from compatibility import Cell

__all__ = ["every_cell", "pairs_of", "pairs_to_cover", "pairwise"]

#: Two axes, each with one of its versions.
Pair = frozenset[tuple[str, str]]


def every_cell(axes: Mapping[str, Sequence[str]]) -> list[Cell]:
    """Return the whole product."""
    return [Cell(*versions) for versions in product(*axes.values())]


def pairs_of(cells: Iterable[Mapping[str, str]]) -> set[Pair]:
    """Return which versions meet in *cells*."""
    return {frozenset(pair) for cell in cells for pair in combinations(cell.items(), 2)}


def pairs_to_cover(axes: Mapping[str, Sequence[str]]) -> set[Pair]:
    """Return all pairs of versions of two axes."""
    return {
        frozenset(((a, one), (b, other)))
        for a, b in combinations(axes, 2)
        for one, other in product(axes[a], axes[b])
    }


def pairwise(axes: Mapping[str, Sequence[str]]) -> list[Cell]:
    """
    Return cells in which every two versions meet; the same for the same *axes*.

    All pairs of the two longest axes come first. The others are added one by one: each cell gets
    the version that makes most new pairs, of equals the one used least; pairs that are missing
    then get cells of their own.
    """
    order = sorted(axes, key=lambda axis: -len(axes[axis]))
    first, second, *others = order
    cells: list[dict[str, str]] = [
        {first: one, second: other} for one, other in product(axes[first], axes[second])
    ]
    for axis in others:
        known = {name: axes[name] for name in [*cells[0], axis]}
        missing = extended(cells, axis, known)
        anywhere = {name: versions[0] for name, versions in known.items()}
        cells += [{**anywhere, **dict(pair)} for pair in sorted(map(sorted, missing))]
    return sorted(map(cell_of, cells), key=lambda cell: position(axes, cell))


def extended(
    cells: Sequence[dict[str, str]], axis: str, axes: Mapping[str, Sequence[str]]
) -> set[Pair]:
    """Give each of *cells* a version of *axis*, one of *axes*; return the pairs still missing."""
    missing = pairs_to_cover(axes) - pairs_of(cells)
    used = dict.fromkeys(axes[axis], 0)
    for cell in cells:
        gains = {
            version: (len(pairs_of([{**cell, axis: version}]) & missing), -used[version])
            for version in axes[axis]
        }
        cell[axis] = max(axes[axis], key=gains.__getitem__)
        used[cell[axis]] += 1
        missing -= pairs_of([cell])
    return missing


def cell_of(versions: Mapping[str, Any]) -> Cell:
    """Return the cell that has *versions*, whatever else they come with."""
    return Cell(*(str(versions[axis]) for axis in Cell._fields))


def position(axes: Mapping[str, Sequence[str]], cell: Cell) -> tuple[int, ...]:
    """Return where *cell* stands in the product."""
    return tuple(axes[axis].index(version) for axis, version in cell._asdict().items())
