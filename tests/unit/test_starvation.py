"""A watchdog that was kept from running says so: once, how late, for how many, and what to do."""

from __future__ import annotations

import logging
import re

import pytest

from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.watchdog import BATCH, NotRenewed, Watchdog
from support.fakes import FakeClock, lease_of

TTL = 30.0


@pytest.fixture
def clock(monkeypatch):
    fake = FakeClock()
    monkeypatch.setattr("celery_redlock.lock.clock.now", fake)
    return fake


@pytest.fixture(autouse=True)
def _warnings_are_heard(caplog):
    caplog.set_level(logging.WARNING)


@pytest.fixture
def said(caplog):
    """Return what was said of starvation: seconds late and number of leases, per warning."""

    def said():
        told = re.findall(r"ran (\S+) s late for (\d+) leases? \(of 30\.0 s\)", caplog.text)
        return [(float(late), int(leases)) for late, leases in told]

    return said


class Threadless(Watchdog):
    """A watchdog that runs when a test lets it, as a thread does until nothing is due."""

    def _start(self):
        """Start nothing."""

    def wake_up(self):
        while batch := self.take_due():
            self.renew(batch)


@pytest.fixture
def told():
    return []


@pytest.fixture
def watchdog(clock, told):
    def extend(leases):
        return [lease.renewed(clock() + lease.ttl * 0.95, 1.0) for lease in leases]

    return Threadless(extend, lambda held, margin: told.append((held.name, margin is None)), clock)


@pytest.fixture
def take(watchdog, clock):
    def taken(name="k"):
        held = HeldLock(lease_of(clock, name, ttl=TTL, valid_until=clock() + TTL * 0.95))
        watchdog.watch(held, clock())
        return held

    return taken


def test_one_wake_up_is_one_warning(take, watchdog, clock, said, caplog):
    locks = [take(f"k{n}") for n in range(3 * BATCH)]
    clock.advance(TTL / 3 + 7.0)
    watchdog.wake_up()
    assert said() == [(7.0, 3 * BATCH)]
    assert all(held.renewals == 1 for held in locks)
    for words in ("greenlets", "time.sleep(0)", "prefork", "lock_ttl"):
        assert words in caplog.text


def test_leases_that_have_ended_by_then_count_too(take, watchdog, clock, said, told):
    locks = [take("first")]
    clock.advance(2.0)
    locks.append(take("second"))
    clock.advance(2 * TTL - 2.0)
    watchdog.wake_up()
    assert said() == [(50.0, 2)]
    assert told == [("first", True), ("second", True)]
    assert all(held.lost_reason == "deadline" for held in locks)


def test_each_time_is_told_of(take, watchdog, clock, said):
    take()
    for _ in range(3):
        clock.advance(TTL / 3 + 6.0)
        watchdog.wake_up()
    assert said() == [(6.0, 1)] * 3


def test_a_round_that_was_held_up_is_told_of(take, watchdog, clock, said, told):
    """The process stood still while the nodes were asked: the answers came, and were not read."""
    take("k")
    take("l")
    extend = watchdog._extend

    def extend_late(leases):
        renewed = extend(leases)
        clock.advance(2 * TTL)
        return renewed

    watchdog._extend = extend_late
    clock.advance(TTL / 3)
    watchdog.wake_up()
    assert said() == [(60.0, 2)]
    assert told == [("k", True), ("l", True)]


def test_slow_nodes_are_not_taken_for_a_starved_thread(take, watchdog, clock, said):
    """A round may take the node timeout, which is up to half a lease."""
    take()
    extend = watchdog._extend

    def extend_slowly(leases):
        clock.advance(TTL / 2)
        return [NotRenewed(None, {})] * len(leases)

    watchdog._extend = extend_slowly
    clock.advance(TTL / 3)
    watchdog.renew(watchdog.take_due())
    watchdog._extend = extend
    assert said() == []


def test_a_lease_that_ended_unnoticed_is_told_of_when_it_is_given_back(
    take, watchdog, clock, said, told
):
    """A body that kept the process to itself and then returned has run on without a lock."""
    held, other = take("held"), take("other")
    clock.advance(2 * TTL)
    watchdog.unwatch(held)
    assert said() == [(50.0, 2)]
    assert told == [("held", True)]
    watchdog.unwatch(held)
    watchdog.wake_up()
    assert said() == [(50.0, 2)], "the same stretch, told of already"
    assert told == [("held", True), ("other", True)]
    assert other.is_lost


def test_a_lease_given_back_in_time_is_no_loss(take, watchdog, clock, said, told):
    early, late = take("early"), take("late")
    clock.advance(TTL * 0.9)
    watchdog.unwatch(early)
    assert (said(), told) == ([], [])
    watchdog._held.pop(late)  # as when it was told
    late.lose("stolen")
    watchdog.unwatch(late)
    assert (said(), told) == ([], [])
