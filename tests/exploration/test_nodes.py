"""The nodes of the models do as the scripts that real nodes run."""

from __future__ import annotations

from itertools import product

import pytest

from celery_redlock.lock.lease import Lease
from celery_redlock.lock.nodes.guard import boot_marker
from celery_redlock.lock.records import TOKEN_LENGTH, Keys
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import acquire_request, renew_request
from celery_redlock.lock.scripts.votes import VoteKind
from exploration.nodes import (
    NOBODY,
    QUARANTINED,
    REFUSED,
    acquire,
    granted,
    renew,
    repaired,
)
from simulation.guards import switched_off
from simulation.nodes import SimulatedNode

NAME, NOW = "k", 1_700_000_000.0
RULES = Rules()
KEYS = Keys.of(RULES.prefix, NAME)
TOKENS = {who: str(who) * TOKEN_LENGTH for who in (1, 2)}
STATES = list(product((NOBODY, 1, 2), range(4), (False, True)))


@pytest.fixture(scope="module")
def node():
    return enrolled()


def enrolled():
    """Return a node that runs the scripts as they are now."""
    node = SimulatedNode(0, lambda: NOW)
    node.greet()
    node.put(KEYS.boot, boot_id(node), b"1000")
    return node


def boot_id(node):
    """Return what the node was enrolled as."""
    return boot_marker(node.run_id.decode(), RULES.fingerprint(["A", "B", "C"]))


def execute(node, state, request):
    """Return owner, fence and answer after *request* at a node in this state."""
    owner, fence, quarantined = state
    for key in (KEYS.lock, KEYS.fence, KEYS.quarantine):
        node.store.pop(key, None)
    if owner:
        node.put(KEYS.lock, TOKENS[owner].encode() + b"{}", b"1000")
    if fence:
        node.put(KEYS.fence, b"%d" % fence, b"1000")
    if quarantined:
        node.put(KEYS.quarantine, b"1", b"1000")
    script, count = request.script, b"%d" % len(request.keys)
    rest = (*request.keys, *request.arguments, boot_id(node))
    vote = script.read(node.execute((b"EVALSHA", script.sha, count, *rest)))
    answer = {
        VoteKind.GRANTED: granted(vote.fence),
        VoteKind.REPAIRED: repaired(vote.fence),
        VoteKind.REFUSED: REFUSED,
        VoteKind.QUARANTINED: QUARANTINED,
    }[vote.kind]
    held = node.get(KEYS.lock)
    owners = {token.encode(): who for who, token in TOKENS.items()}
    after = NOBODY if held is None else owners[held[:TOKEN_LENGTH]]
    return after, int(node.get(KEYS.fence) or 0), answer


def lease(who, fence):
    return Lease(NAME, TOKENS[who], fence, RULES.ttl, 0.0, 0.0)


@pytest.mark.parametrize("state", STATES, ids=str)
def test_a_question_is_answered_alike(node, state):
    """Same key, same fence, same answer, whoever asks and whatever it proposes."""
    for who, proposed in product((1, 2), (1, 2, 3, 4)):
        request = acquire_request(RULES, lease(who, proposed), None)
        assert acquire(*state, who, proposed) == execute(node, state, request)


@pytest.mark.parametrize("state", STATES, ids=str)
def test_a_renewal_is_answered_alike(node, state):
    """Same key, same fence, same answer, with repair and without."""
    for who, least, repair in product((1, 2), (1, 2, 3, 4), (False, True)):
        request = renew_request(RULES, lease(who, least), repair=repair)
        assert renew(*state, who, least, repair) == execute(node, state, request)


@pytest.mark.parametrize(
    "guard", ["growing-fence", "owner-renewal", "quarantined-renewal", "repair-heeds-fence"]
)
def test_without_a_guard_they_do_alike(guard):
    """What the models do without one, the scripts do without it; and it is something else."""
    off, found = frozenset({guard}), []
    with switched_off([guard]):
        node = enrolled()
        for state, who, number in product(STATES, (1, 2), (1, 2, 3, 4)):
            asked = acquire_request(RULES, lease(who, number), None)
            changed = acquire(*state, who, number, off)
            assert changed == execute(node, state, asked)
            found.append(changed != acquire(*state, who, number))
            for repair in (False, True):
                asked = renew_request(RULES, lease(who, number), repair=repair)
                changed = renew(*state, who, number, repair, off)
                assert changed == execute(node, state, asked)
                found.append(changed != renew(*state, who, number, repair))
    assert any(found)
