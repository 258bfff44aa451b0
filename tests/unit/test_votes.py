"""What votes mean: total over all ballots, and no node is ever counted for two holders."""

from __future__ import annotations

import json
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_redlock.lock.lease import quorum
from celery_redlock.lock.scripts.votes import (
    Verdict,
    VoteKind,
    acquire_is_decided,
    agreed,
    agreeing,
    count,
    earliest_free,
    holder_of,
    judge,
    marker_in,
    quarantine_left,
    verdict_when_split,
    votes_by_node,
)
from support.fakes import (
    SILENT,
    granted,
    marked,
    quarantined,
    refused,
    repaired,
    token_of,
    unreachable,
)

#: A ballot as a word, one letter per node: a lower-case letter is the holder that refused us.
LETTERS = {
    "G": granted(),
    "R": repaired(),
    "Q": quarantined(),
    "U": unreachable(),
    "M": marked(),
    "F": marked("finishing"),
    "-": SILENT,
    "x": refused("x"),
    "y": refused("y"),
    "z": refused("z"),
}
sizes = st.sampled_from([1, 3, 4, 5, 7])
ballots = sizes.flatmap(
    lambda n: st.lists(st.sampled_from(list(LETTERS.values())), min_size=n, max_size=n)
)


def ballot_of(word):
    return [LETTERS[letter] for letter in word]


G, T, S, M, U = (
    Verdict.GRANTED,
    Verdict.TAKEN,
    Verdict.SPLIT,
    Verdict.MARKED,
    Verdict.UNAVAILABLE,
)

TABLE = [
    # one node
    ("G", G), ("x", T), ("Q", U), ("U", U), ("M", M), ("-", U),
    # three nodes: a quorum is two of the three, whoever is up
    ("GGG", G), ("GG-", G), ("GGU", G), ("GGx", G), ("GGQ", G),
    ("xxx", T), ("xx-", T), ("Uxx", T), ("Gxx", T), ("Qxx", T),
    ("xyz", S), ("xy-", S), ("xyU", S), ("Gxy", S), ("xxy", T),
    ("Gx-", S), ("GxU", S), ("GxQ", S),
    ("G--", U), ("GUU", U), ("GQQ", U), ("GQU", U), ("x--", U), ("xUU", U), ("xQQ", U),
    ("QQQ", U), ("UUU", U), ("---", U),
    # a marker counts where a majority has it, whatever it says, and is told apart from silence
    ("MMM", M), ("MM-", M), ("MMU", M), ("MMG", M), ("MMx", M), ("MF-", M),
    ("MGG", G), ("GGM", G), ("Mxx", T), ("Mxy", S), ("MGx", S),
    ("MG-", U), ("Mx-", U), ("MUU", U), ("MQQ", U), ("M--", U),
    # a repair is no grant
    ("RRR", U), ("GRR", U),
    # five nodes
    ("GGGUU", G), ("GGGxx", G), ("xxxUU", T), ("xxxGG", T), ("xxxyy", T), ("xxx--", T),
    ("GGxxU", S), ("GGxx-", S), ("GGxyy", S), ("GGxyU", S), ("xxyyz", S), ("xxyUU", S),
    ("GGxUU", S), ("Gxx--", S), ("GxUUU", U), ("GGUUU", U), ("xxUUU", U), ("xxQQQ", U),
    ("xyUUU", U), ("GGQQQ", U), ("GGGQQ", G), ("GGGGM", G),
    ("GGGMM", G), ("MMMGG", M), ("MMM--", M), ("MMGG-", U), ("MMxx-", U),
    # seven nodes
    ("GGGGxxx", G), ("GGGxxxx", T), ("GGGxxxy", S), ("xxxyyyz", S), ("xxxxyyy", T),
    ("GGGUUUU", U), ("xxxUUUU", U), ("xxxyUUU", S), ("GxxxUUU", S), ("GxxUUUU", U),
]  # fmt: skip


@pytest.mark.parametrize(("word", "verdict"), TABLE, ids=[word for word, _ in TABLE])
def test_a_ballot_has_one_meaning(word, verdict):
    assert judge(ballot_of(word)) is verdict
    assert judge(ballot_of(word[::-1])) is verdict


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_every_ballot_has_a_meaning(nodes):
    for votes in product(LETTERS.values(), repeat=nodes):
        assert judge(votes) in Verdict
        assert verdict_when_split(votes) in (Verdict.TAKEN, Verdict.UNAVAILABLE)
        assert acquire_is_decided(votes) in (True, False)
        json.dumps(holder_of(votes))


@given(nodes=sizes, data=st.data())
def test_two_holders_never_both_have_a_quorum(nodes, data):
    """A node keeps one token, so whatever nodes grant whom, at most one is granted the lock."""
    holders = data.draw(st.lists(st.sampled_from("xyz-"), min_size=nodes, max_size=nodes))
    winners = [
        me
        for me in "xyz"
        if judge(
            [
                granted() if holder == me else SILENT if holder == "-" else refused(holder)
                for holder in holders
            ]
        )
        is Verdict.GRANTED
    ]
    assert len(winners) <= 1


@given(ballot=ballots)
def test_a_grant_takes_a_quorum_of_the_configured_nodes(ballot):
    if judge(ballot) is Verdict.GRANTED:
        assert 2 * count(ballot, VoteKind.GRANTED) > len(ballot)


@given(ballot=ballots)
def test_taken_means_that_others_keep_us_from_a_quorum(ballot):
    spare = len(ballot) - quorum(len(ballot))
    is_out_of_reach = count(ballot, VoteKind.REFUSED) > spare
    assert judge(ballot) is not Verdict.TAKEN or is_out_of_reach
    assert (verdict_when_split(ballot) is Verdict.TAKEN) is is_out_of_reach


@given(ballot=ballots)
def test_unavailable_is_never_a_lock_that_is_taken(ballot):
    if judge(ballot) is Verdict.UNAVAILABLE:
        assert count(ballot, VoteKind.REFUSED) <= len(ballot) - quorum(len(ballot))


@given(ballot=ballots)
def test_a_marker_counts_where_a_majority_has_it(ballot):
    """Whoever can write to fewer nodes ends nothing by it."""
    is_standing = count(ballot, VoteKind.MARKED) >= quorum(len(ballot))
    assert (judge(ballot) is Verdict.MARKED) is is_standing
    assert (marker_in(ballot) is not None) is is_standing


@pytest.mark.parametrize(
    ("word", "state"),
    [("MM-", b"done"), ("FFM", b"finishing"), ("MF-", b""), ("M--", None), ("MFG", b""),
     ("MFMMF", b"done"), ("MFFMG", b""), ("GG-", None), ("M", b"done")],
)  # fmt: skip
def test_a_marker_says_what_a_majority_says(word, state):
    assert marker_in(ballot_of(word)) == state


@given(ballot=ballots, data=st.data())
def test_what_is_decided_stays_decided(ballot, data):
    some = [vote if data.draw(st.booleans()) else SILENT for vote in ballot]
    if acquire_is_decided(some):
        assert judge(some) is judge(ballot)


@pytest.mark.parametrize(
    ("word", "is_decided"),
    [("GG-", True), ("xx-", True), ("MM-", True), ("M--", False), ("MF-", False), ("xy-", False),
     ("Gx-", False), ("G--", False), ("UU-", False), ("---", False), ("GGxx-", False),
     ("xxx--", True), ("GGG--", True)],
)  # fmt: skip
def test_a_split_is_waited_out(word, is_decided):
    assert acquire_is_decided(ballot_of(word)) is is_decided


@pytest.mark.parametrize(
    ("leases", "more", "free"),
    [([5.0, 3.0, 9.0], [], 5.0), ([5.0, 3.0], [granted()], 3.0), ([5.0], [unreachable()] * 2, None),
     ([5.0, 3.0], [unreachable()], 5.0), ([], [granted()] * 3, None), ([], [SILENT] * 3, None)],
)  # fmt: skip
def test_the_hint_is_when_enough_leases_end(leases, more, free):
    """As many of the shortest leases must end as nodes are missing from a quorum."""
    assert earliest_free([refused(ttl=ttl) for ttl in leases] + more) == free


@pytest.mark.parametrize(
    ("waits", "more", "left"),
    [([5.0, 3.0, 9.0], [], 5.0), ([5.0, 3.0], [granted()], 3.0), ([5.0], [refused()] * 2, None),
     ([5.0], [unreachable()] * 2, None), ([4.0], [granted(), unreachable()], 4.0)],
)  # fmt: skip
def test_quarantines_tell_when_to_come_back(waits, more, left):
    assert quarantine_left([quarantined(ttl) for ttl in waits] + more) == left


def test_the_holder_is_the_one_most_nodes_named():
    holder = holder_of([refused("y", ttl=1.0), refused("x", ttl=4.0), refused("y", ttl=2.0)])
    assert holder == {"token": token_of("y")[:8], "pid": 7, "ttl": 2.0}


@pytest.mark.parametrize("ballot", [[], [granted()], [SILENT, unreachable()], [quarantined()]])
def test_nobody_holds_what_nobody_refused(ballot):
    assert holder_of(ballot) == {}


@pytest.mark.parametrize(
    "value", [b"mine", b"\xff" * 60, token_of("y").encode() + b"[1]", token_of("y").encode()]
)
def test_a_foreign_value_is_a_holder_all_the_same(value):
    holder = holder_of([refused()._replace(value=value)])
    assert set(holder) == {"token", "ttl"}
    assert len(holder["token"]) <= 8


@given(st.lists(st.sampled_from("xyz-") | st.none(), max_size=7))
def test_those_who_agree_are_the_largest_group(said):
    def answer(one):
        return None if one == "-" else one

    found, counted = agreeing(said, answer), [one for one in said if one in {"x", "y", "z"}]
    assert len(set(found)) == bool(counted)
    assert len(found) == max((counted.count(one) for one in counted), default=0)
    assert agreed(said, answer) == (found if 2 * len(found) > len(said) else [])


def test_votes_are_told_without_tokens():
    words = votes_by_node(
        [granted(), refused(), quarantined(), unreachable("no route"), SILENT], "abcde"
    )
    assert words == {
        "a": "granted",
        "b": "refused (5.0 s left)",
        "c": "quarantined (5.0 s left)",
        "d": "unreachable (no route)",
        "e": "not waited for",
    }
