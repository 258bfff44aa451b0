"""
A process that forks while it asks for a lock: its child sends nothing of what the parent began.

The child has connections of its own by then, and ends its copy of the call in one of the ways in
which a program does. The twins go without the rule.
"""

from __future__ import annotations

import os
import textwrap

import pytest

from support.script import Script, enrol

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

HEAD = """
import asyncio, redis
from celery_redlock import AsyncRedlock
from celery_redlock.events import LockAcquired

locks, rival = AsyncRedlock.of(lock), new()

def holders(name):
    return [view.holder.get("token") for view in rival.inspect(name)]

def lines():
    return [len(redis.Redis.from_url(url).keys("redlock:line:*")) for url in sys.argv[1:]]

def get_ready():
    connect(lock, 60)
    with contextlib.suppress(LockTaken):
        lock.acquire("it", wait=0.1)
    lock.inspect("it")  # all scripts are known by then

async def wait_in_line():
    lease = rival.acquire("it", ttl=RENEWED)
    task = asyncio.ensure_future(locks.acquire("it", wait=600))
    while lines() != [1] * 3:
        await asyncio.sleep(0.01)
    return lease, task
"""
#: Each child goes on with what its parent began.
UNGUARDED = """
from celery_redlock.lock import driver, locks, loop_driver
from celery_redlock.lock.nodes import loop_rounds

for module in (driver, loop_driver, locks):
    module.this_process, module.ensure_not_forked = (lambda: None), (lambda _: None)
loop_rounds.os = loop_driver.os = type("os", (), {"getpid": staticmethod(lambda: 0)})
del driver, locks, loop_driver, loop_rounds
"""
WAYS = {
    "exit": "sys.exit()",  # which cancels all tasks
    "cancel": "task.cancel(); await asyncio.sleep(0); await asyncio.sleep(0)",
    "close": "task.get_coro().close()",
}
guarded_and_twin = pytest.mark.parametrize("before", ["", UNGUARDED], ids=["guarded", "twin"])
in_each_way = pytest.mark.parametrize("end", WAYS.values(), ids=WAYS)


def told_by(source, nodes, before):
    with Script(HEAD + textwrap.dedent(source), enrol(nodes[:3]), before=before) as script:
        (told,) = script.all_told()
    return told


@guarded_and_twin
@in_each_way
def test_what_a_parent_is_granted_stays_its_own(five_nodes, before, end):
    source = f"""
        async def main():
            await locks.release(await locks.acquire("warm up"))
            task = asyncio.ensure_future(locks.acquire("it", wait=60))
            await asyncio.sleep(0)  # it has asked
            if os.fork() == 0:
                connect(lock, 60)
                {end}
                os._exit(0)
            lease = await task
            os.wait()
            tell(holders=holders("it"), token=lease.token[:8])

        asyncio.run(main())
        """
    told = told_by(source, five_nodes, before)
    assert (told["holders"] == [told["token"]] * 3) == (not before)


@guarded_and_twin
@in_each_way
def test_who_waits_in_the_parent_stays_in_line(five_nodes, before, end):
    source = f"""
        async def main():
            lease, task = await wait_in_line()
            if os.fork() == 0:
                get_ready()
                {end}
                os._exit(0)
            os.wait()
            tell(lines=lines())
            rival.release(lease)
            await locks.release(await task)

        asyncio.run(main())
        """
    assert (told_by(source, five_nodes, before)["lines"] == [1] * 3) == (not before)


@guarded_and_twin
def test_what_a_parent_is_about_to_send_is_not_sent_by_its_child_as_well(five_nodes, before):
    """It would come after the parent's release, and leave a lock that nobody holds."""
    source = """
        async def main():
            await locks.release(await locks.acquire("warm up"))
            tasks = [asyncio.ensure_future(locks.acquire(name)) for name in ("one", "two")]
            await asyncio.sleep(0)  # the second one is sent in the next turn
            reads, writes = os.pipe()
            if os.fork() == 0:
                connect(lock, 60)
                os.read(reads, 1)
                await asyncio.sleep(0)
                os._exit(0)
            for task in tasks:
                await locks.release(await task)
            os.write(writes, b".")
            os.wait()
            tell(holders=holders("two"))

        asyncio.run(main())
        """
    told = told_by(source, five_nodes, before)
    assert (told["holders"] == [None] * 3) == (not before)


@guarded_and_twin
@pytest.mark.parametrize("end", ["sys.exit()", "return"])
@pytest.mark.parametrize("call", ["acquire('it')", "take(lock.request('it'))"])
def test_an_observer_may_fork(five_nodes, before, call, end):
    """Its child neither releases the lock that was granted, nor holds it, too."""
    source = f"""
        def fork(event):
            if isinstance(event, LockAcquired) and os.fork() == 0:
                connect(lock, 60)
                {end}

        connect(lock, 60)
        lock.notify, parent = fork, os.getpid()
        with contextlib.suppress(RuntimeError):
            got = lock.{call}
            if os.getpid() != parent:
                lock.let_go(got)  # as if it were its own
        if os.getpid() == parent:
            os.wait()
            tell(holders=holders("it"), token=got.token[:8])
        """
    told = told_by(source, five_nodes, before)
    assert (told["holders"] == [told["token"]] * 3) == (not before)
