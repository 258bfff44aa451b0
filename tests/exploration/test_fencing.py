"""Fences of two clients on three nodes: every order of events, with all guards and without."""

from __future__ import annotations

import pytest

from exploration.fencing import configurations, simplest
from exploration.variants import explore_fencing

#: A loaded machine may take its time over what is some seconds of computing.
pytestmark = pytest.mark.timeout(900)

#: Fences and proposals where all 90 configurations would take too long.
SMALL = {"largest_fence": 1, "largest_proposal": 2}


def test_every_configuration_is_looked_at():
    """10 sets of fences and 9 pairs of proposals, of which many come to the same."""
    merged, plain = list(configurations()), list(configurations(merge=False))
    assert sum(times for *_, times in merged) == sum(times for *_, times in plain) == 90
    assert len(merged) < len(plain) == 60


@pytest.mark.parametrize(
    ("stored", "proposed", "simple"),
    [
        ((0, 0, 0), (3, 3), ((0, 0, 0), (1, 1))),
        ((0, 2, 2), (1, 3), ((0, 2, 2), (1, 3))),
        ((2, 2, 2), (1, 1), ((0, 0, 0), (1, 1))),
        ((1, 2, 2), (1, 3), ((0, 1, 1), (1, 2))),
    ],
)
def test_what_comes_to_the_same_is_explored_once(stored, proposed, simple):
    """Numbers that the first question overtakes do not matter."""
    assert simplest(stored, proposed) == simple


def test_fences_are_unique_and_grow():
    """With all guards on no order of events gives one fence twice, or a smaller one later."""
    row = explore_fencing()
    assert (row.violating, row.configurations) == (0, 90), row.example
    assert row.states > 100_000


@pytest.mark.parametrize(
    ("off", "violating"),
    [
        ({"write-back"}, 72),
        ({"exact-fence"}, 72),
        ({"owner-renewal"}, 90),
        ({"growing-fence"}, 90),
        ({"largest-fence", "exact-fence"}, 90),
        ({"largest-fence", "write-back"}, 90),
    ],
    ids=lambda off: "+".join(sorted(off)) if isinstance(off, set) else "",
)
def test_without_a_guard_the_order_breaks(off, violating):
    """The very same search finds what the guard prevents, and tells how it comes about."""
    row = explore_fencing(frozenset(off))
    assert (row.violating, row.configurations) == (violating, 90)
    assert row.example[-1].startswith(("duplicate", "regression"))


def test_a_confirmation_that_sets_a_key_again_breaks_the_order():
    """Where the key was missing another may have been."""
    row = explore_fencing(frozenset({"confirm-sets-nothing"}), **SMALL)
    assert 0 < row.violating < row.configurations


def test_exactness_covers_for_the_largest_fence():
    """The smallest of several fences is never agreed on: a node that has a larger one keeps it."""
    row = explore_fencing(frozenset({"largest-fence"}), **SMALL)
    assert row.violating == 0


def test_a_node_that_forgets_may_not_vote():
    """In quarantine it does no harm; without, one restart breaks every configuration."""
    assert explore_fencing(restarts=1, **SMALL).violating == 0
    row = explore_fencing(frozenset({"restart-guard"}), restarts=1, **SMALL)
    assert row.violating == row.configurations


def test_a_third_client_changes_nothing():
    """One that is granted a node and loses it again, whenever that is."""
    assert explore_fencing(bumps=1, largest_fence=0, largest_proposal=1).violating == 0
    alone = explore_fencing(frozenset({"exact-fence"}), largest_fence=0, largest_proposal=1)
    third = {"bumps": 1, "largest_fence": 0, "largest_proposal": 1}
    assert explore_fencing(frozenset({"exact-fence"}), **third).violating >= alone.violating
