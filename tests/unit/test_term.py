"""Who leads: what is made of the nodes' views, and how an elector bids and steps down."""

from __future__ import annotations

import logging
import threading
from itertools import product

import pytest

from celery_redlock.beat import term as term_module
from celery_redlock.beat.term import (
    AFTER_FAILURE,
    BETWEEN_BIDS,
    LONGEST_PAUSE,
    SHORTEST_PAUSE,
    Elector,
    StandBy,
    Term,
    led_by,
    majority_holder,
)
from celery_redlock.errors import LockTaken, QuorumUnavailable
from celery_redlock.events import LeaderDeposed, LeaderElected
from celery_redlock.lock.algorithm.results import NodeView
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.lease import quorum
from celery_redlock.lock.rules import Rules
from support.fakes import FakeClock, lease_of

NAME = "celery beat"
BEGIN = StandBy(0.0, "starts")


def holder(letter, **told):
    return {"token": letter * 8, "pid": 7, "host": f"host-{letter}", "ttl": 5.0, **told}


def view(letter, number=0):
    """Return a node's view: a letter for who leads, ``.`` for nobody, ``-`` for no answer."""
    problem = "refused the connection" if letter == "-" else ""
    held = {} if letter in ".-" else holder(letter)
    return NodeView(f"node-{number}", held, 5.0 if held else 0.0, 0, problem)


def views(word):
    return [view(letter, number) for number, letter in enumerate(word)]


class Locks:
    """The nodes see *word*, as in `views`; a bid raises *outcome*, and giving back `error`."""

    def __init__(self, clock, word="...", outcome=None):
        self.rules = Rules()
        self.clock = clock
        self.word, self.outcome, self.error = word, outcome, None
        self.taken, self.given_back = [], []

    def inspect(self, name):
        assert name == NAME
        return views(self.word)

    def take(self, wanted):
        self.taken.append(wanted)
        if self.outcome is not None:
            raise self.outcome
        return HeldLock(lease_of(self.clock, wanted.name))

    def give_back(self, held):
        self.given_back.append(held)
        if self.error is not None:
            raise self.error


class Office:
    def __init__(self, clock):
        self.clock = clock
        self.locks = Locks(clock)
        self.events = []
        self.elector = Elector(self.locks, NAME, self.events.append)

    def bid(self, word="...", outcome=None, before=BEGIN):
        self.locks.word, self.locks.outcome = word, outcome
        return self.elector.bid(before)


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr("celery_redlock.lock.clock.now", clock)
    return clock


@pytest.fixture
def draws(monkeypatch):
    """The bounds of every draw; the shortest pause is drawn."""
    draws, this_thread = [], threading.get_ident()

    def shortest(least, most):
        if threading.get_ident() == this_thread:  # a client of another test may draw, too
            draws.append((least, most))
        return least

    monkeypatch.setattr("celery_redlock.lock.clock.jitter", shortest)
    return draws


@pytest.fixture
def office(clock, draws):
    return Office(clock)


def taken():
    return LockTaken(NAME, {"node-0": "refused"}, holder("x"))


def undecided(retry_after=None):
    return QuorumUnavailable(NAME, {"node-0": "unreachable"}, retry_after)


# -- who leads -------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_a_leader_has_a_majority_of_the_configured_nodes(nodes):
    for word in product("xy.-", repeat=nodes):
        found = majority_holder(views(word))
        most = [letter for letter in "xy" if word.count(letter) >= quorum(nodes)]
        assert [found.get("token")] == [letter * 8 for letter in most] or (not most and not found)


@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_the_order_of_the_nodes_does_not_matter(nodes):
    for word in product("xy.-", repeat=nodes):
        assert majority_holder(views(word)) == majority_holder(views(word[::-1]))


def test_nobody_leads_without_nodes():
    assert majority_holder([]) == {}


def test_a_leader_is_told_in_words():
    words = led_by(holder("x", since=1.7e9))
    assert words.startswith("led by process 7 on host-x since ")
    assert "xxx" not in words
    assert led_by({}) == "led by process ? on ?"


# -- a bid -----------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["xxx", "xx.", "xx-", "x-x", "xxy"])
def test_where_somebody_leads_nothing_is_asked_for(office, draws, word):
    result = office.bid(word)
    assert result == StandBy(office.clock() + BETWEEN_BIDS[0], led_by(holder("x")), is_led=True)
    assert draws == [BETWEEN_BIDS]
    assert office.locks.taken == office.events == []


@pytest.mark.parametrize("word", ["...", "..-", "x..", "x.-", "xy.", "xy-"])
def test_where_nobody_leads_the_lock_is_bid_for(office, word):
    """A minority that names somebody keeps nobody from a bid."""
    result = office.bid(word)
    assert isinstance(result, Term)
    assert result.began == office.clock()
    assert result.fence == result.held.fence == 7
    (wanted,) = office.locks.taken
    assert (wanted.name, wanted.ttl, wanted.wait, wanted.fence) == (NAME, Rules().ttl, 0.0, True)
    assert [type(event) for event in office.events] == [LeaderElected]
    assert (office.events[0].fence) == 7


@pytest.mark.parametrize("word", ["---", "--.", "x--", "-.-"])
def test_a_silent_majority_is_not_asked_for_a_lock(office, draws, word):
    result = office.bid(word)
    assert not office.locks.taken
    assert not result.is_led
    assert office.clock() < result.until <= office.clock() + SHORTEST_PAUSE
    silent = [f"node-{number}" for number, letter in enumerate(word) if letter == "-"]
    assert result.why == f"no quorum of lock nodes: no answer from {', '.join(silent)}"
    assert draws
    assert all(least < most for least, most in draws)


def test_who_comes_second_stands_by(office, draws):
    result = office.bid(outcome=taken())
    assert result == StandBy(office.clock() + BETWEEN_BIDS[0], led_by(holder("x")), is_led=True)
    assert draws == [BETWEEN_BIDS]
    assert office.events == []


@pytest.mark.parametrize(
    ("retry_after", "pause"),
    [(None, SHORTEST_PAUSE), (0.0, SHORTEST_PAUSE), (0.1, SHORTEST_PAUSE), (3.0, 3.0),
     (LONGEST_PAUSE, LONGEST_PAUSE), (70.0, LONGEST_PAUSE)],
)  # fmt: skip
def test_an_undecided_bid_is_made_again_when_that_may_help(office, retry_after, pause):
    result = office.bid(outcome=undecided(retry_after))
    assert (result.until, result.is_led) == (office.clock() + pause, False)
    assert ("quarantine" in result.why) is bool(retry_after)
    assert office.events == []


def test_an_error_that_nobody_foresaw_is_not_hidden(office):
    """Only what the lock is made to say means standing by."""
    with pytest.raises(ZeroDivisionError):
        office.bid(outcome=ZeroDivisionError())


@pytest.mark.parametrize("bounds", [BETWEEN_BIDS, AFTER_FAILURE])
def test_pauses_differ(bounds):
    """Those who stand by do not all bid at once."""
    assert 0 < bounds[0] < bounds[1]


def test_a_dead_leader_is_replaced_in_time():
    assert BETWEEN_BIDS[1] < 2.0
    assert SHORTEST_PAUSE < 2.0


def test_real_pauses_are_within_their_bounds(clock):
    office = Office(clock)
    pauses = {office.bid("xxx").until - clock() for _ in range(200)}
    assert len(pauses) > 100
    assert BETWEEN_BIDS[0] <= min(pauses) + 1e-9
    assert max(pauses) <= BETWEEN_BIDS[1] + 1e-9
    silent = {office.bid("---").until - clock() for _ in range(200)}
    assert len(silent) > 100
    assert all(0 < pause <= SHORTEST_PAUSE + 1e-9 for pause in silent)


# -- what is said ----------------------------------------------------------------------


def test_each_change_is_said_once(office, caplog):
    script = [
        ("xxx", None), ("xxx", None), ("yyy", None), ("yyy", None), ("---", None), ("---", None),
        ("...", undecided()), ("...", undecided()),
        ("...", undecided(3.0)), ("...", undecided(2.0)),
        ("...", taken()), ("xxx", None),
    ]  # fmt: skip
    result = BEGIN
    with caplog.at_level(logging.INFO, term_module.__name__):
        for word, outcome in script:
            result = office.bid(word, outcome, result)
    lines = [(record.levelno, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in lines] == [
        logging.INFO, logging.INFO, logging.WARNING, logging.WARNING, logging.WARNING, logging.INFO,
    ]  # fmt: skip
    told = ["host-x", "host-y", "node-0, node-1, node-2", "could decide", "quarantine", "host-x"]
    assert all(part in line for part, (_, line) in zip(told, lines, strict=True))
    assert all(repr(NAME) in line for _, line in lines)


def test_a_won_bid_is_told_to_observers(office, caplog):
    with caplog.at_level(logging.DEBUG, term_module.__name__):
        office.bid()
    assert "Standing by" not in caplog.text
    assert len(office.events) == 1


# -- stepping down ---------------------------------------------------------------------

REASONS = ["resigned", "failed", "clock", "deposed", "deadline", "stolen", "fork", "released"]


@pytest.mark.parametrize("reason", REASONS)
def test_stepping_down_gives_the_leadership_back(office, draws, reason):
    term = office.bid()
    office.clock.advance(12.5)
    result = office.elector.step_down(term, reason)
    assert office.locks.given_back == [term.held]
    deposed = office.events[-1]
    assert type(deposed) is LeaderDeposed
    assert (deposed.reason, deposed.led) == (reason, 12.5)
    bounds = AFTER_FAILURE if reason in ("failed", "clock") else BETWEEN_BIDS
    assert draws == [bounds]
    assert result == StandBy(office.clock() + bounds[0], reason)


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize(
    "error", [OSError("gone"), RuntimeError("broken"), undecided(), taken(), ValueError()]
)
def test_stepping_down_never_fails(office, caplog, reason, error):
    term = office.bid()
    office.locks.error = error
    with caplog.at_level(logging.ERROR, term_module.__name__):
        result = office.elector.step_down(term, reason)
    assert isinstance(result, StandBy)
    assert not result.is_led
    assert "Could not resign as 'celery beat'" in caplog.text
    assert type(office.events[-1]) is LeaderDeposed


def test_a_clock_that_is_ahead_is_said(office, caplog):
    """It needs a hand, so it is a warning; resigning is none."""
    with caplog.at_level(logging.WARNING, term_module.__name__):
        office.elector.step_down(office.bid(), "resigned")
        assert caplog.text == ""
        office.elector.step_down(office.bid(), "clock")
    assert "clock of this machine" in caplog.text


def test_after_stepping_down_the_next_cause_is_said(office, caplog):
    """Who leads next is news to one who led before."""
    result = office.elector.step_down(office.bid(), "deadline")
    with caplog.at_level(logging.INFO, term_module.__name__):
        office.bid("xxx", before=result)
    assert "host-x" in caplog.text


def test_a_term_without_a_fence_has_number_zero(clock):
    """What carries no fence is older than all that does."""
    assert Term(HeldLock(lease_of(clock, fence=None)), clock()).fence == 0
