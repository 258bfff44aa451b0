"""
`AsyncRedlock` where it differs from `Redlock`: cancelled tasks, loops, and a loop that is blocked.

What both promise is tested by `test_redlock`, over both.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import threading
import time
import weakref
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from celery_redlock import AsyncRedlock, LockLost, LockTaken, QuorumUnavailable, Redlock
from celery_redlock.events import LockAcquired, LockReleased
from celery_redlock.lock import aio, clock, watchdog
from celery_redlock.lock.algorithm import acquiring, waiter
from celery_redlock.lock.algorithm.results import ReleaseOutcome
from celery_redlock.lock.driver import Driver
from celery_redlock.lock.nodes.address import address_of
from celery_redlock.lock.nodes.loop_rounds import LoopWaiter
from celery_redlock.lock.waiting.room import Room
from celery_redlock.testing import memory_quorum
from support.in_loop import Struck, loop_thread
from support.kinds import DATABASES
from support.script import Script, enrol
from support.stalls import Stalls
from support.stored import RENEWED, clients_of, urls_of, wait_until_free
from support.waiting import eventually

#: So many tasks want a lock at once, and so many threads there are at most for them.
MANY, FEW_THREADS = 10_000, 60


@pytest.fixture
def nodes(five_nodes):
    return five_nodes[:3]


@pytest.fixture
def sync(nodes, locks):
    return locks(nodes)


@pytest.fixture
def locks_of(sync):
    return AsyncRedlock.of(sync)


@pytest.fixture(params=["asyncio", "uvloop"])
def new_loop(request):
    if request.param == "asyncio":
        return asyncio.new_event_loop
    if not find_spec("uvloop"):
        pytest.skip("uvloop is not installed")
    import uvloop

    return uvloop.new_event_loop


def run(work, new_loop=asyncio.new_event_loop):
    """Run *work* in a loop of its own, which is closed after it."""
    loop = new_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def in_thread(work, *args):
    return await asyncio.get_running_loop().run_in_executor(None, work, *args)


async def until(condition):
    while not condition():  # noqa: ASYNC110  no event tells of it
        await asyncio.sleep(0.001)


def left_on(nodes):
    """Return what nodes have of locks and of those who wait for them."""
    return {
        key
        for client in clients_of(nodes)
        for kind in ("lock", "line", "waiters")
        for key in client.keys(f"redlock:{kind}:*")
    }


def nothing_is_left(nodes):
    eventually(lambda: not left_on(nodes), "nodes without a lock")


# -- cancelled at each await ---------------------------------------------------------------------


async def free(locks, _nodes):
    async with locks.hold("it"):
        await asyncio.sleep(0)


async def taken(locks, _nodes):
    lease = await locks.acquire("it")
    try:
        with contextlib.suppress(LockTaken):
            await locks.acquire("it", wait=0.1)
    finally:
        locks._locks.let_go(lease)


async def waited_for(locks, _nodes):
    lease = await locks.acquire("it")
    asyncio.get_running_loop().call_later(0.1, locks._locks.let_go, lease)
    try:
        async with locks.hold("it", wait=60):
            pass
    finally:
        locks._locks.let_go(lease)


async def taken_in_hand(locks, _nodes):
    """An `acquire` whose lease is kept by nobody, with all that may follow it."""
    lease = None
    try:
        lease = await locks.acquire("it")
        lease = await locks.extend(lease)
        await locks.inspect("it")
    finally:
        if lease is not None:
            locks._locks.let_go(lease)


async def released(locks, _nodes):
    lease = await locks.acquire("it")
    try:
        await asyncio.sleep(0)
    except BaseException:
        locks._locks.let_go(lease)
        raise
    await locks.release(lease)


async def led(locks, _nodes):
    terms = locks.lead("it")
    async for term in terms:
        assert term.fence
        await asyncio.sleep(0)
        break
    await terms.aclose()


SITUATIONS = (free, taken, waited_for, taken_in_hand, released, led)


async def struck_everywhere(locks, nodes, situation, how):
    """Strike at the first await, then at the second, and so on; return how many there were."""
    for number in itertools.count():
        struck = Struck(situation(locks, nodes), number, how)
        await struck
        if not struck.was_struck:
            return number
        await in_thread(nothing_is_left, nodes)  # the loop goes on: it closes generators
        assert locks._locks.held == []
    return None


@pytest.mark.parametrize("how", ["cancelled", "too late", "dropped"])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_nothing_is_left_wherever_a_task_is_cancelled(nodes, locks_of, situation, how):
    assert run(struck_everywhere(locks_of, nodes, situation, how)) >= 2
    nothing_is_left(nodes)


@pytest.mark.parametrize("how", ["cancelled", "too late"])
def test_nothing_is_left_with_a_node_away(redis_nodes, locks, how):
    nodes = redis_nodes(3)
    shared = AsyncRedlock.of(locks(nodes))
    nodes[0].kill()
    for situation in (free, waited_for):
        assert run(struck_everywhere(shared, nodes[1:], situation, how)) >= 2


@pytest.mark.parametrize("how", ["cancelled", "too late", "dropped"])
@pytest.mark.parametrize("situation", [free, waited_for])
def test_without_the_clearing_something_is_left(nodes, locks_of, monkeypatch, situation, how):
    """The twin."""
    monkeypatch.setattr(acquiring.Waiter, "clear", lambda _self: iter(()))

    async def strike():
        for number in (0, 0, 1, 2):  # the first may only have connected
            with contextlib.suppress(LockTaken):  # by what is left of the strike before
                await Struck(situation(locks_of, nodes), number, how)

    run(strike())
    eventually(lambda: left_on(nodes), "what is left")


@pytest.mark.parametrize("is_closed", [True, False])
def test_nothing_is_left_of_a_loop_that_ends_amid_its_tasks(nodes, sync, locks_of, is_closed):
    """Its tasks are neither cancelled nor awaited, but dropped with it, perhaps after its end."""
    lease = sync.acquire("it")
    loop = asyncio.new_event_loop()
    tasks = [loop.create_task(one) for one in (waited_for(locks_of, nodes), free(locks_of, nodes))]
    tasks += [loop.create_task(locks_of.acquire("it", wait=60))]
    loop.run_until_complete(asyncio.sleep(0.2))  # they wait
    if is_closed:
        loop.close()
    for task in tasks:
        task._log_destroy_pending = False
        with contextlib.suppress(RuntimeError):
            task.get_coro().close()
    del tasks, task
    gc.collect()
    loop.close()
    assert sync.release(lease) is ReleaseOutcome.RELEASED
    nothing_is_left(nodes)
    run(free(locks_of, nodes))


def test_a_loop_that_is_closed_keeps_none_of_its_tasks(sync, locks_of, new_loop):
    lease, kept = sync.acquire("it"), []

    async def wait():
        task = asyncio.ensure_future(locks_of.acquire("it", wait=60))
        kept.append(weakref.ref(task))
        task._log_destroy_pending = False
        await asyncio.sleep(0.2)  # it waits

    loop = new_loop()
    loop.run_until_complete(wait())
    loop.close()
    del loop
    gc.collect()
    assert [one() for one in kept] == [None]
    assert not sync.listener.room._lines
    sync.release(lease)


def test_a_task_that_nobody_else_knows_is_not_collected_as_it_waits(sync, locks_of, new_loop):
    lease, held = sync.acquire("it"), []

    async def hold():
        async with locks_of.hold("it", wait=60):
            pass
        held.append(True)

    async def work():
        asyncio.ensure_future(hold())  # noqa: RUF006  the loop knows it weakly
        await asyncio.sleep(0.2)  # it waits
        gc.collect()
        await in_thread(sync.release, lease)
        await asyncio.wait_for(until(lambda: held), 60)

    run(work(), new_loop)


def lead_in(loop, locks):
    """Lead in a loop that is closed before the generator has ended, which is dropped as it is."""

    async def lead():
        async for term in locks.lead("it"):
            assert term.fence
            break

    loop.run_until_complete(lead())
    loop.close()
    gc.collect()


def test_who_leads_in_a_loop_that_is_closed_leads_no_more(nodes, locks_of, new_loop):
    lead_in(new_loop(), locks_of)
    nothing_is_left(nodes)
    assert not locks_of._locks.held


def test_without_a_look_at_its_frame_it_leads_for_good(nodes, locks_of, monkeypatch):
    monkeypatch.setattr(aio.Frame, "__del__", lambda _: None)
    lead_in(asyncio.new_event_loop(), locks_of)
    assert left_on(nodes)
    assert len(locks_of._locks.held) == 1


@pytest.mark.parametrize("is_off", [False, True])
def test_a_close_amid_those_who_wait_leaves_them_their_hints(locks_of, monkeypatch, is_off):
    """Or each comes by itself, one in a second."""
    if is_off:
        monkeypatch.setattr(Room, "register_all", lambda _: None)

    async def hold(order):
        async with locks_of.hold("it", wait=60):
            order.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def crowd():
        order = []
        lease = await locks_of.acquire("it")
        crowd = [asyncio.ensure_future(hold(order)) for _ in range(10)]
        await asyncio.sleep(0.2)  # they wait
        await locks_of.close()
        await locks_of.release(lease)
        await asyncio.gather(*crowd)
        return order

    with Stalls() as stalls:
        order = run(crowd())
    assert (order[-1] - order[0] - stalls.total > 2.5) is is_off


# -- cancelled at random -------------------------------------------------------------------------


class Checker:
    """Who believes to hold what, at this moment."""

    def __init__(self):
        self.inside = dict.fromkeys("abc", 0)
        self.both = self.holds = self.cancelled = 0

    def enter(self, name):
        self.inside[name] += 1
        self.holds += 1
        self.both += self.inside[name] > 1

    def leave(self, name):
        self.inside[name] -= 1


async def cancelled_at_random(locks, checker, cancellations, name_of=lambda name, _: name):
    """Have forty tasks want three locks, and cancel them at any time."""

    async def want(number):
        name = random.choice("abc")
        async with locks.hold(name_of(name, number), wait=60):
            checker.enter(name)
            try:
                await asyncio.sleep(random.expovariate(500))
            finally:
                checker.leave(name)

    def another():
        return asyncio.ensure_future(want(next(numbers)))

    await free(locks, None)  # connected: or all are cancelled before the first can be granted
    numbers = itertools.count()
    tasks = [another() for _ in range(40)]
    # However slow the nodes are: until enough of those who are cancelled have held a lock.
    while checker.cancelled < cancellations or checker.holds <= cancellations / 20:
        at = random.randrange(len(tasks))
        checker.cancelled += tasks[at].cancel()
        with contextlib.suppress(asyncio.CancelledError, QuorumUnavailable):
            await tasks[at]
        tasks[at] = another()
        await asyncio.sleep(random.choice((0, 0, random.expovariate(1000))))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("cancellations", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_many_cancellations_leave_nothing_and_nobody_beside_another(
    nodes, sync, locks_of, new_loop, cancellations
):
    checker = Checker()
    run(cancelled_at_random(locks_of, checker, cancellations), new_loop)
    assert checker.cancelled >= cancellations
    assert checker.both == 0
    assert sync.held == []
    nothing_is_left(nodes)


def test_the_checker_sees_two_who_hold_at_once(locks_of):
    """The twin: each takes a lock of its own."""
    checker = Checker()
    own = lambda name, number: f"{name}{number}"  # noqa: E731
    run(cancelled_at_random(locks_of, checker, 100, own))
    assert checker.both


# -- loops, threads and processes ----------------------------------------------------------------


def test_one_loop_after_another(nodes, locks_of, new_loop):
    async def once():
        async with locks_of.hold("it", wait=60) as held:
            return held.fence

    fences = [run(once(), new_loop) for _ in range(5)]
    assert fences == sorted(set(fences))
    assert len(locks_of._driver._of_loops) == 1  # those that are closed are forgotten


def test_a_lock_that_one_loop_took_is_released_in_another(nodes, locks_of):
    lease = run(locks_of.acquire("it"))
    assert run(locks_of.extend(lease)).fence == lease.fence
    assert run(locks_of.release(lease)) is ReleaseOutcome.RELEASED


def test_loops_in_threads_and_threads_without_one_take_turns(nodes, sync, locks_of, new_loop):
    inside, most, holds = [0], [0], []

    def body(who):
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        holds.append(who)
        inside[0] -= 1

    async def in_a_loop(who):
        for _ in range(20):
            async with locks_of.hold("it", wait=600):
                body(who)
                await asyncio.sleep(0)

    async def some(who):
        await asyncio.gather(*[in_a_loop(who) for _ in range(3)])

    def in_a_thread():
        for _ in range(20):
            with sync.hold("it", wait=600):
                body("thread")

    with loop_thread(new_loop) as one, loop_thread(new_loop) as two:
        asked = [asyncio.run_coroutine_threadsafe(some(who), who) for who in (one, two)]
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        for future in asked:
            future.result(timeout=600)
        thread.join()
    assert most == [1]
    assert [holds.count(who) for who in (one, two, "thread")] == [60, 60, 20]
    nothing_is_left(nodes)


def test_a_child_has_loops_and_connections_of_its_own(five_nodes):
    with Script(
        """
        import asyncio
        from celery_redlock import AsyncRedlock
        locks = AsyncRedlock.of(lock)

        async def once(name):
            async with locks.hold(name) as held:
                return held.fence

        async def parent():
            async with locks.hold("report") as held:
                pid = os.fork()
                if pid:
                    os.waitpid(pid, 0)
                    held.ensure_held()
                    tell(views=[view.holder.get("token") == held.token[:8]
                                for view in await locks.inspect("report")])
                    return True
                try:
                    held.ensure_held()
                except LockLost as lost:
                    tell(reason=lost.reason)
            return False

        asyncio.run(once("warm up"))
        is_parent = None
        try:
            is_parent = asyncio.run(parent())
        except LockLost:  # at the end of the child's body
            asyncio._set_running_loop(None)
            try:
                asyncio.run(once("report"))
            except LockTaken:
                tell(child="taken", fence=asyncio.run(once("other")))
            os._exit(0)
        """,
        enrol(five_nodes[:3]),
    ) as script:
        told = script.all_told()
    assert told[0] == {"reason": "fork"}
    assert told[1]["child"] == "taken"
    assert told[2] == {"views": [True] * 3}


def test_a_loop_and_another_process_exclude_each_other(five_nodes, locks_of):
    source = """
        held = lock.hold("it", wait=600)
        with held:
            tell(held=True)
            sys.stdin.readline()
        tell(held=False)
        """

    async def wait_for_it():
        async with locks_of.hold("it", wait=600) as held:
            return held.fence

    with Script(source, urls_of(five_nodes[:3])) as script:
        script.told()
        with pytest.raises(LockTaken):
            run(locks_of.acquire("it"))
        threading.Timer(0.3, script.press).start()
        fence = run(wait_for_it())
        script.all_told()
    lease = run(locks_of.acquire("it"))
    assert lease.fence > fence
    with Script(source, urls_of(five_nodes[:3])) as script:
        eventually(lambda: any("line:it" in key.decode() for key in left_on(five_nodes)), "waiter")
        run(locks_of.release(lease))
        script.told()
        script.press()
        script.all_told()


# -- a loop that is blocked ----------------------------------------------------------------------


async def blocked_for(locks, seconds):
    async with locks.hold("it", ttl=RENEWED, wait=60) as held:
        time.sleep(seconds)  # noqa: ASYNC251  the test's subject
        return held.renewals


def test_a_lease_is_renewed_while_the_loop_is_blocked(locks_of):
    assert run(blocked_for(locks_of, RENEWED * 1.2)) >= 2


def test_a_blocked_loop_that_nobody_renews_for_is_told_of_the_loss(locks_of, monkeypatch):
    """The twin: without the watchdog the lease is lost, and the end of the body says so."""
    monkeypatch.setattr(watchdog.Watchdog, "_start", lambda _self: None)
    with pytest.raises(LockLost, match="deadline"):
        run(blocked_for(locks_of, RENEWED * 1.2))


def test_a_leader_whose_body_awaits_nothing_lets_others_run(locks_of):
    async def lead():
        others, rounds = None, 0
        async for _ in locks_of.lead("it"):  # to begin its term it awaits
            others = others or asyncio.ensure_future(asyncio.sleep(0))
            rounds += 1
            if others.done() or rounds == 100:
                break
        return others.done()

    assert run(lead())


@pytest.mark.parametrize("wrong", [None, "redis://localhost/0", AsyncRedlock])
def test_what_is_no_redlock_is_refused(locks_of, wrong):
    with pytest.raises(TypeError, match="takes a Redlock, not"):
        AsyncRedlock.of(locks_of if wrong is AsyncRedlock else wrong)


def test_a_stopped_loop_keeps_no_free_lock_from_a_thread_that_waits(
    sync, locks, nodes, monkeypatch
):
    """The one that waits in it is the oldest of its process, and would be the only one to try."""
    monkeypatch.setattr(waiter, "NOTED_EVERY", 600.0)
    rival = locks(nodes, bootstrap=False)
    lease = rival.acquire("it", ttl=RENEWED, wait=60)
    loop = asyncio.new_event_loop()
    task = loop.create_task(AsyncRedlock.of(sync).acquire("it", wait=600))
    room, got = sync.listener.room, []
    loop.run_until_complete(until(lambda: room._lines))

    def wait_in_a_thread():
        with sync.hold("it", wait=600):
            got.append(True)

    thread = threading.Thread(target=wait_in_a_thread)
    thread.start()
    try:
        eventually(lambda: sum(map(len, room._lines.values())) == 2, "two who wait")
        rival.release(lease)
        eventually(lambda: got, "the lock in the thread")
    finally:
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
        loop.close()
        thread.join()


@pytest.mark.parametrize("reads", [False, True])
def test_a_blocked_loop_holds_up_no_thread(redis_nodes, locks, monkeypatch, reads):
    """
    While a task of it waits for a node that hangs.

    Twin: a loop that had to read for a thread, as a thread does for others, would keep it waiting.
    """
    monkeypatch.setattr(LoopWaiter, "reads", reads)
    nodes = redis_nodes(3)
    sync = locks(nodes, node_timeout=10.0)
    shared, done = AsyncRedlock.of(sync), []

    def in_a_thread(until):
        while clock.now() < until and len(done) < 20:
            sync.release(sync.acquire(f"it:{len(done)}"))
            done.append(clock.now())

    async def block():
        await shared.inspect("it")  # connected
        nodes[2].pause()
        asked = asyncio.ensure_future(shared.inspect("it"))  # of all three
        await until(lambda: sync.fanout._waiters)
        thread = threading.Thread(target=in_a_thread, args=(clock.now() + 8.0,))
        thread.start()
        thread.join()
        nodes[2].resume()
        await asked

    run(block())
    assert (len(done) == 20) is not reads


@pytest.mark.parametrize("is_handed_over", [True, False])
def test_the_end_of_a_hold_blocks_no_loop_for_a_renewal(redis_nodes, locks, is_handed_over):
    """A node that hangs during a renewal holds up who ends the hold, and no other task."""
    (node,) = redis_nodes(1)
    sync = locks([node], node_timeout=20.0)
    if not is_handed_over:
        sync.is_renewing = lambda _held: False
    shared = AsyncRedlock.of(sync)
    turns = []

    async def look(held):
        while not held.is_lost:
            turns.append(sync._watchdog.is_asking_for(held))
            await asyncio.sleep(0.01)

    async def end():
        async with shared.hold("it", wait=60) as held:
            node.pause()
            threading.Thread(target=sync._watchdog.renew, args=([held],)).start()
            await until(lambda: sync._watchdog.is_asking_for(held))
            looking = asyncio.ensure_future(look(held))
        await looking

    try:
        run(end())
    finally:
        node.resume()
    assert (len(turns) > 5) is is_handed_over
    wait_until_free([node], "it")


@pytest.mark.parametrize("is_waited_for", [True, False], ids=["ours", "twin"])
def test_a_lock_is_free_for_who_held_it_as_soon_as_that_has_ended(
    sync, locks_of, monkeypatch, is_waited_for
):
    """Also where the hold ends while it is renewed, and a thread has to release it."""
    if not is_waited_for:

        async def released(self, held):
            self._give_back(held)

        monkeypatch.setattr(AsyncRedlock, "_released", released)

    def renewed(held, is_over):
        is_over.wait()
        with sync._watchdog._mutex:
            sync._watchdog._asked = frozenset()
            sync._watchdog._changed.notify_all()

    async def twice():
        is_over = threading.Event()
        async with locks_of.hold("it", wait=60) as held:
            sync._watchdog._asked = frozenset([held])
            renewing = threading.Thread(target=renewed, args=(held, is_over))
            renewing.start()
            asyncio.get_running_loop().call_later(0.2, is_over.set)
        try:
            async with locks_of.hold("it"):
                return True
        except LockTaken:
            return False
        finally:
            is_over.set()
            renewing.join()

    assert run(twice()) is is_waited_for


class Soft(Exception):
    pass


async def async_hold(sync, arm):
    async with AsyncRedlock.of(sync).hold("it", wait=60):
        arm()


async def async_lead(sync, arm):
    async for _ in AsyncRedlock.of(sync).lead("it"):
        arm()
        break


async def lead(sync, arm):
    with contextlib.closing(sync.lead("it")) as terms:
        for _ in terms:
            arm()
            break


@pytest.mark.parametrize("place", [(watchdog.Watchdog, "unwatch"), (Driver, "tell")])
@pytest.mark.parametrize("work", [async_hold, async_lead, lead])
def test_a_lock_whose_release_is_struck_is_not_renewed_for_good(
    nodes, sync, monkeypatch, work, place
):
    """By a soft time limit, or Ctrl-C, before the watchdog has let go of it or a byte was sent."""
    call, strikes, told = getattr(*place), [], []

    def struck(*args):
        if strikes:
            raise strikes.pop()
        return call(*args)

    monkeypatch.setattr(*place, struck)
    monkeypatch.setattr(sync, "notify", told.append)
    with contextlib.suppress(Soft):  # what strikes a generator as it is closed goes to its closer
        run(work(sync, lambda: strikes.append(Soft())))
    gc.collect()
    assert strikes == []
    eventually(lambda: sync.held == [], "end of the renewal")
    nothing_is_left(nodes)
    (released,) = [event for event in told if isinstance(event, LockReleased)]
    assert released.lost == ""


def test_the_end_of_a_lock_is_told_once(sync, monkeypatch):
    """A thread may release what its task, cancelled meanwhile, releases as well."""
    told = []
    monkeypatch.setattr(sync, "notify", told.append)
    held = sync.take(sync.request("it", wait=60))
    for _ in range(2):
        sync.give_back(held)
    assert [type(event) for event in told] == [LockAcquired, LockReleased]


@pytest.mark.parametrize("work", [async_hold, async_lead])
def test_a_lock_is_released_where_no_thread_is_to_be_had(nodes, sync, monkeypatch, work):
    monkeypatch.setattr(aio, "run_elsewhere", lambda *_: False)
    monkeypatch.setattr(sync, "is_renewing", lambda _held: True)
    run(work(sync, lambda: None))
    assert sync.held == []
    nothing_is_left(nodes)


def test_closing_blocks_no_loop(sync, locks_of, monkeypatch):
    """It waits for a thread that has the connections in its hands."""
    close, goes_on, has_waited = sync.close, threading.Event(), []

    def closed():
        has_waited.append(goes_on.wait(60))
        close()

    monkeypatch.setattr(sync, "close", closed)

    async def use():
        closing = asyncio.ensure_future(locks_of.close())
        await asyncio.sleep(0.01)
        goes_on.set()
        await closing

    run(use())
    assert has_waited == [True]


def test_connections_that_nobody_waits_for_are_not_watched(sync, locks_of):
    """Or a loop would keep what it once used, and its descriptors, for good."""

    async def use():
        async with locks_of.hold("it", wait=60):
            pass
        (rounds,) = locks_of._driver._of_loops.values()
        await until(lambda: rounds._watched is None)

    run(use())


def test_a_loop_goes_on_in_a_forked_child_as_a_new_one(sync, locks_of, monkeypatch):
    async def use():
        async with locks_of.hold("it", wait=60):
            (before,) = locks_of._driver._of_loops.values()
            monkeypatch.setattr(before, "pid", -1)
        async with locks_of.hold("other", wait=60):
            (after,) = locks_of._driver._of_loops.values()
        assert after is not before

    run(use())


# -- nodes that fail, and other nodes ------------------------------------------------------------


def test_locks_are_had_while_a_minority_hangs_dies_and_comes_back(redis_nodes, locks):
    nodes = redis_nodes(5)
    shared, done = AsyncRedlock.of(locks(nodes, node_timeout=1.0)), []

    async def work(number):
        for _ in range(30):
            async with shared.hold(f"it:{number % 3}", wait=600) as held:
                done.append(held.fence)
                await asyncio.sleep(0.01)

    async def whole():
        tasks = [asyncio.ensure_future(work(number)) for number in range(6)]
        for strike in (nodes[0].kill, nodes[1].pause, nodes[0].restart, nodes[1].resume):
            before = len(done)
            await in_thread(strike)
            enough = before + 10
            await until(lambda enough=enough: len(done) >= enough)
        await asyncio.gather(*tasks)

    run(whole())
    assert len(done) == 180
    nothing_is_left(nodes)


def test_nodes_that_are_all_away_are_unavailable_and_block_no_loop(redis_nodes, locks):
    nodes = redis_nodes(3)
    shared = AsyncRedlock.of(locks(nodes, node_timeout=1.0))
    for node in nodes:
        node.pause()

    async def ask():
        asked, turns = asyncio.ensure_future(shared.acquire("it")), 0
        while not asked.done():
            turns += 1
            await asyncio.sleep(0.01)
        with pytest.raises(QuorumUnavailable):
            await asked
        return turns

    try:
        assert run(ask()) > 10
    finally:
        for node in nodes:
            node.resume()


@pytest.mark.parametrize("kind", DATABASES)
def test_a_database_is_a_node_like_any_other(request, tmp_path, locks, kind):
    url = f"sqlite:///{tmp_path}/locks.db"
    if kind != "sqlite":
        url = request.getfixturevalue("database").url
    address_of(url).make_tables()
    shared = AsyncRedlock.of(locks([SimpleNamespace(url=url)], node_timeout=20.0))

    async def work():
        lease = await shared.acquire("it")
        waiting = asyncio.ensure_future(shared.acquire("it", wait=600))
        given_up = asyncio.ensure_future(shared.acquire("it", wait=600))
        await asyncio.sleep(0.3)
        given_up.cancel()
        lease = await shared.extend(lease)
        assert await shared.release(lease) is ReleaseOutcome.RELEASED
        later = await waiting
        assert later.fence > lease.fence
        assert await shared.release(later) is ReleaseOutcome.RELEASED
        return await shared.inspect("it")

    (view,) = run(work())
    assert not view.holder
    assert not view.problem


def test_nodes_in_memory_answer_at_once():
    async def work(shared):
        async with shared.hold("it") as held:
            with pytest.raises(LockTaken):
                await shared.acquire("it", wait=5)
        lease = await shared.acquire("it")
        assert lease.fence > held.fence
        assert await shared.release(lease) is ReleaseOutcome.RELEASED

    with memory_quorum() as quorum:
        run(work(AsyncRedlock.of(quorum.locks)))


# -- very many -----------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [500, pytest.param(MANY, marks=pytest.mark.long)])
def test_many_tasks_that_wait_are_no_threads(five_nodes, locks, many):
    shared = AsyncRedlock.of(locks(five_nodes[:1]))

    async def wait():
        async with shared.hold("it"):
            before = threading.active_count()
            tasks = [asyncio.ensure_future(shared.acquire("it", wait=600)) for _ in range(many)]
            room = shared._locks.listener.room

            def waits_or_is_done():
                return sum(map(len, room._lines.values())) + sum(task.done() for task in tasks)

            await until(lambda: waits_or_is_done() >= many)
            assert not any(task.done() for task in tasks)
            threads = threading.active_count() - before
            for task in tasks[1:]:
                task.cancel()
            await asyncio.gather(*tasks[1:], return_exceptions=True)
        await shared.release(await tasks[0])
        return threads

    assert run(wait()) < FEW_THREADS
    nothing_is_left(five_nodes[:1])


def test_two_of_one_process_share_what_they_are_made_of(five_nodes, sync):
    shared = AsyncRedlock.of(sync)
    assert shared.rules is sync.rules
    assert shared.labels == sync.labels
    assert Redlock.__name__ in repr(shared)
