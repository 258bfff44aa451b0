"""Rounds of an event loop: what is sent when, and what a thread does for its tasks."""

from __future__ import annotations

import asyncio

import pytest

from celery_redlock.lock import clock
from celery_redlock.lock.algorithm.waiter import who_is_next
from celery_redlock.lock.nodes import loop_rounds
from celery_redlock.lock.nodes.connections import Waiter
from celery_redlock.lock.nodes.fanout import Fanout
from celery_redlock.lock.nodes.loop_rounds import LoopRounds
from celery_redlock.lock.records import CHANNEL_LENGTH, OWNER_LENGTH
from celery_redlock.lock.rules import Rules


class FakeRound:
    def __init__(self, number=0):
        self.number, self.is_open = number, True


class FakeFanout:
    """Nodes that answer when they are told to."""

    node_timeout = 60.0
    is_ready = True

    def __init__(self):
        self.sent, self.compared, self.doubts = [], 0, 0

    def begin(self, waiter):
        self.sent.append(list(waiter.rounds))

    def end(self, waiter):
        pass

    def fileno(self):
        return None

    def has_doubts(self):
        return self.doubts > 0

    def compare_clocks(self):
        self.compared += 1
        self.doubts -= 1

    def get_ready(self):
        self.is_ready = True

    def answer(self, rounds):
        """Decide what is under way, as a read by the loop does."""
        for one in self.sent[-1]:
            one.is_open = False
        rounds._look()


def run(work):
    fanout = FakeFanout()

    async def whole():
        await work(fanout, LoopRounds(fanout, asyncio.get_running_loop()))

    asyncio.run(whole())


def raised_in_loop():
    """Return a list of what the running loop's own callbacks raise from now on."""
    raised = []
    handler = lambda _, told: raised.append(type(told["exception"]))  # noqa: E731
    asyncio.get_running_loop().set_exception_handler(handler)
    return raised


async def asked(rounds, count):
    tasks = [asyncio.ensure_future(rounds.ask([FakeRound(n)])) for n in range(count)]
    for _ in range(3):
        await asyncio.sleep(0)
    return tasks


def test_the_first_is_sent_at_once_and_what_comes_in_its_turn_in_one_write():
    async def work(fanout, rounds):
        tasks = await asked(rounds, 5)
        assert [len(sent) for sent in fanout.sent] == [1, 4]
        for _ in range(2):
            for waiter in list(rounds._open):
                for one in waiter.rounds:
                    one.is_open = False
            rounds._look()
        await asyncio.gather(*tasks)

    run(work)


@pytest.mark.parametrize("most", [10, 1000])
def test_no_more_than_a_node_can_answer_in_time_are_under_way(monkeypatch, most):
    """Twin: without the bound the whole crowd is asked at once."""
    monkeypatch.setattr(loop_rounds, "MOST_AT_ONCE", most)

    async def work(fanout, rounds):
        tasks = await asked(rounds, 50)
        under_way = [sum(len(waiter.asked) for waiter in rounds._open)]
        while not all(task.done() for task in tasks):
            for waiter in list(rounds._open):
                for one in waiter.rounds:
                    one.is_open = False
            rounds._look()
            under_way.append(sum(len(waiter.asked) for waiter in rounds._open))
            await asyncio.sleep(0)
        assert max(under_way) == min(most, 50)
        assert sorted(one.number for sent in fanout.sent for one in sent) == list(range(50))

    run(work)


def test_what_is_cancelled_before_it_was_sent_is_never_sent():
    async def work(fanout, rounds):
        first, *others = await asked(rounds, 1)
        late = asyncio.ensure_future(rounds.ask([FakeRound(7)]))
        await asyncio.sleep(0)
        late.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert [one.number for sent in fanout.sent for one in sent] == [0]
        assert others == []
        fanout.answer(rounds)
        await first

    run(work)


def test_what_is_cancelled_after_it_was_sent_is_closed():
    """Else a node that has forgotten the script would be asked again, after the release."""

    async def work(fanout, rounds):
        one = FakeRound()
        asked = asyncio.ensure_future(rounds.ask([one]))
        while not fanout.sent:  # noqa: ASYNC110  no event tells of it
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        assert not one.is_open

    run(work)


@pytest.mark.parametrize("most", [1, 100])
def test_who_asked_is_told_whatever_is_raised_as_a_round_ends(monkeypatch, most):
    """As from a signal handler: nobody else would ever tell them, nor ask for those who wait."""
    monkeypatch.setattr(loop_rounds, "MOST_AT_ONCE", most)

    async def work(fanout, rounds):
        fanout.node_timeout, raised = 0.05, raised_in_loop()

        def struck(_waiter):
            fanout.end = end
            raise LookupError

        end, fanout.end = fanout.end, struck
        askers = await asked(rounds, 2)
        done, _ = await asyncio.wait(askers, timeout=60)
        assert len(done) == 2
        assert raised == [LookupError]
        assert [one.number for sent in fanout.sent for one in sent] == [0, 1]

    run(work)


@pytest.mark.parametrize("others", [0, 1])
def test_who_asked_is_told_whatever_is_raised_as_a_round_is_sent(others):
    """By who asks alone it is raised there; where the loop sends for several, time ends it."""

    async def work(fanout, rounds):
        fanout.node_timeout, raised = 0.05, raised_in_loop()

        def struck(_waiter):
            fanout.begin = begin
            raise LookupError

        before = await asked(rounds, others)
        begin, fanout.begin = fanout.begin, struck
        (asker,) = await asked(rounds, 1)
        done, _ = await asyncio.wait([asker], timeout=60)
        assert done
        if others:
            assert raised == [LookupError]
        else:
            with pytest.raises(LookupError):
                asker.result()
        assert rounds._asked == []
        await asyncio.gather(*before)
        await asyncio.sleep(0)
        assert rounds._open == []

    run(work)


def test_a_doubt_about_a_clock_is_settled_although_another_task_waits_for_connections():
    """What goes on in a thread for one task is not what another one needs."""

    async def work(fanout, rounds):
        fanout.doubts = 1
        forever = asyncio.get_running_loop().create_future()
        rounds._in_threads[fanout.get_ready] = forever
        (task,) = await asked(rounds, 1)
        fanout.answer(rounds)
        await task
        assert (fanout.compared, fanout.doubts) == (1, 0)
        forever.cancel()

    run(work)


def test_who_joins_a_comparison_that_had_begun_has_another_one():
    async def work(fanout, rounds):
        fanout.doubts = 1
        begun = asyncio.get_running_loop().create_future()
        rounds._in_threads[fanout.compare_clocks] = begun
        (task,) = await asked(rounds, 1)
        fanout.answer(rounds)
        await asyncio.sleep(0)
        assert not task.done()
        begun.set_result(None)  # of doubts before ours
        await task
        assert (fanout.compared, fanout.doubts) == (1, 0)

    run(work)


def test_those_who_wait_in_one_process_sort_as_they_came():
    """Or nodes take out of the line, of one millisecond, whom the process does not wake."""
    came = [who_is_next("f" * CHANNEL_LENGTH) for _ in range(1000)]
    assert came == sorted(set(came))
    assert {len(who) for who in came} == {OWNER_LENGTH}


@pytest.mark.parametrize("left", [60.0, -1.0])
def test_a_loop_reads_for_no_thread_that_waits_for_the_sockets(left, monkeypatch):
    """The thread would sleep on: there is nothing to read any more. One that is late does not."""
    fanout, read = Fanout((), Rules(), lambda _: None), []
    fanout._reader = Waiter([], clock.now() + left)
    monkeypatch.setattr(fanout, "_read", read.append)
    fanout.read_now()
    assert bool(read) is (left < 0)
