"""
Renewals with repair, a contender, and a node that forgets: every order of events in ticks.

Which guards have to be off together before two trust the lock at once. Two sets stand out:
what the nodes remember, and what the holder's clock says.
"""

from __future__ import annotations

import pytest

from exploration.variants import REPAIR_GUARDS, explore_repair

#: A loaded machine may take its time over what is some seconds of computing.
pytestmark = pytest.mark.timeout(900)

CONFIGURATIONS = 6
LATE = {"renewal-deadline", "own-clock"}


def together(guards):
    return "+".join(sorted(guards)) if isinstance(guards, set) else ""


def broken(off, **bounds):
    """Return in how many configurations two trust the lock at once; all were explored."""
    row = explore_repair(frozenset(off), **bounds)
    assert row.configurations == CONFIGURATIONS
    assert row.states > 500
    assert not row.example or row.example[-1].startswith("overlap")
    return row.violating


@pytest.mark.parametrize("learns", [True, False], ids=["noticed", "unnoticed"])
def test_nobody_trusts_the_lock_while_another_does(learns):
    """With all guards on, whether or not it is noticed that a node was restarted."""
    assert broken(set(), learns=learns) == 0


@pytest.mark.parametrize("guard", sorted(set(REPAIR_GUARDS) - {"restart-guard"}))
def test_a_single_guard_is_covered_for(guard):
    """Where it is noticed at once that a connection died, no one guard stands alone but one."""
    assert broken({guard}) == 0


@pytest.mark.parametrize(
    ("off", "learns", "violating"),
    [
        ({"restart-guard"}, True, 6),
        ({"restart-guard"}, False, 6),
        ({"quarantined-renewal"}, False, 2),
        ({"quarantined-renewal", "repaired-later"}, False, 6),
        ({"quarantined-renewal", "repaired-later", "dead-yes"}, True, 6),
    ],
    ids=together,
)
def test_what_a_restarted_node_says_must_not_count(off, learns, violating):
    """Neither its vote, nor its renewals, nor the yes that it gave before."""
    assert broken(off, learns=learns) == violating


@pytest.mark.parametrize(
    ("off", "violating"),
    [
        (LATE, 2),  # a late ACQUIRE of the holder sets its key, whatever the fence
        (LATE | {"repaired-later"}, 2),
        (LATE | {"repaired-later", "repair-heeds-fence"}, 6),
        ({"renewal-deadline", "repair-heeds-fence", "repaired-majority", "repaired-later"}, 0),
        ({"own-clock", "repair-heeds-fence", "repaired-majority", "repaired-later"}, 0),
    ],
    ids=together,
)
def test_a_lease_that_has_ended_must_not_go_on(off, violating):
    """Either look at the clock suffices; without both, only the nodes' fences are left."""
    assert broken(off, restarts=0, rounds=1) == violating


def test_a_restart_takes_the_fences_along():
    """With no look at the clock, a node that forgot its fence lets a late renewal through."""
    assert broken(LATE, rounds=1) == 2
    assert broken(LATE | {"repaired-later"}, rounds=1) == 3
    assert broken(LATE | {"repaired-later", "repaired-majority"}, rounds=1) == CONFIGURATIONS


def test_a_key_that_is_missing_is_not_taken_for_ours_at_once():
    """A second renewal of a lease that has ended is needed before a late one does harm."""
    off = LATE | {"repair-heeds-fence"}
    assert broken(off, restarts=0, rounds=1) == 2
    assert broken(off, restarts=0, rounds=2) == CONFIGURATIONS
