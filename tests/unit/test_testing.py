"""The memory quorum: each fault does what it says, and time passes when it is told to."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import uuid

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from redis.exceptions import ResponseError

from celery_redlock import (
    ConfigurationError,
    DuplicateTask,
    LockLost,
    LockTaken,
    QuorumUnavailable,
    Redlock,
    RedlockTask,
    ReleaseOutcome,
    current_lock,
)
from celery_redlock.beat import RedlockScheduler
from celery_redlock.beat.slot_records import Claim, Slots
from celery_redlock.beat.slot_votes import LastSlot, SlotState
from celery_redlock.events import NodeUp, TaskRescheduled
from celery_redlock.lock import clock
from celery_redlock.plugin import plugin_for
from celery_redlock.reading.health import check, probe
from celery_redlock.testing import (
    MemoryQuorum,
    assert_locked,
    locks_disabled,
    memory_quorum,
)
from celery_redlock.testing.wire import commands
from support.waiting import eventually


@pytest.fixture
def app():
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.broker_transport_options = {"polling_interval": 0.01}
    app.conf.task_default_queue = uuid.uuid4().hex  # the queues of all apps are in one memory
    yield app
    app.close()


def test_an_observer_that_fails_to_close_does_not_keep_the_quorum_in_place(app):
    """Its error is told, and the next test has the servers that the app names."""

    class Failing:
        def __call__(self, event):
            pass

        def close(self):
            raise OSError("cannot close")

    app.conf.redlock_observers = (Failing(),)
    with pytest.raises(OSError, match="cannot close"), memory_quorum(app):
        assert len(plugin_for(app).observers) == 1
    assert plugin_for(app).servers is None


def test_what_an_app_that_is_gone_would_tell_is_dropped(caplog):
    """Its lock may outlive it; there is nobody to be told, and no settings to read."""
    app = Celery("gone", broker="memory://", set_as_current=False)
    plugin = plugin_for(app)
    app.close()
    del app
    gc.collect()
    assert plugin.app is None
    plugin.notify(NodeUp("lock-1"))


@pytest.fixture
def bill(app):
    """A task that locks on its invoice, and does `bill.work()` meanwhile."""

    @app.task(base=RedlockTask, name="shop.bill", lock_key="invoice:{invoice_id}", shared=False)
    def bill(invoice_id):
        return app.tasks["shop.bill"].work()

    task = app.tasks["shop.bill"]
    task.work = lambda: "billed"
    return task


@pytest.fixture
def quorum(app):
    with memory_quorum(app) as quorum:
        yield quorum


def take_down(quorum):
    """Take a majority down."""
    for node in quorum.nodes[:3]:
        node.down()


def bring_up(quorum):
    for node in quorum.nodes:
        node.up()


def in_a_worker(app):
    return start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=60)


def outcome(task, *args):
    result = task.apply(args).result
    return type(result) if isinstance(result, Exception) else result


# -- one task ----------------------------------------------------------------------------------


def test_a_task_runs_under_a_real_lock_without_any_server(bill, quorum):
    seen = []
    bill.work = lambda: seen.append((quorum.holder("invoice:7"), assert_locked().fence))
    bill.apply((7,))
    ((holder, fence),) = seen
    assert holder["task"] == "shop.bill"
    assert fence > 0
    assert quorum.holder("invoice:7") is None


def test_a_lock_that_somebody_else_has_is_skipped(bill, quorum):
    with quorum.hold(bill.s(7)):
        assert outcome(bill, 7)["skipped"] == "conflict"
        assert outcome(bill, 8) == "billed"
    assert outcome(bill, 7) == "billed"


def test_another_holder_renews_its_lease_until_it_dies(bill, quorum):
    other = quorum.hold("invoice:7", ttl=10)
    quorum.clock.tick(1000)
    assert outcome(bill, 7)["skipped"] == "conflict"
    other.die()
    quorum.clock.tick(6)
    assert outcome(bill, 7)["skipped"] == "conflict"
    quorum.clock.tick(4.1)
    assert outcome(bill, 7) == "billed"
    other.release()
    other.release()


def test_two_others_cannot_hold_one_lock(quorum):
    with quorum.hold("a"), pytest.raises(LockTaken):
        quorum.hold("a")


def test_waiting_for_a_lock_takes_no_time(bill, quorum):
    """A wait ticks the clock: one that is long enough outlives a dead holder."""
    quorum.hold("invoice:7", ttl=20).die()
    began = quorum.clock.now()
    bill.lock_wait = 15
    assert outcome(bill, 7)["skipped"] == "conflict"
    bill.lock_wait = 30
    assert outcome(bill, 7) == "billed"
    assert quorum.clock.now() - began == pytest.approx(20, abs=1)
    assert not quorum.nodes[0].model.ask(b"GET", b"redlock:lock:invoice:7")


# -- nodes that are not well -------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["down", "hang", "fill", "forget"])
def test_a_minority_that_is_not_well_is_not_missed(bill, quorum, fault):
    for node in quorum.nodes[:2]:
        getattr(node, fault)()
    assert outcome(bill, 7) == "billed"


@pytest.mark.parametrize("fault", ["down", "hang", "fill"])
def test_without_a_majority_there_is_no_lock(bill, quorum, fault):
    for node in quorum.nodes[:3]:
        getattr(node, fault)()
    assert outcome(bill, 7) is QuorumUnavailable
    bill.on_unavailable = "skip"
    assert outcome(bill, 7)["skipped"] == "unavailable"
    bill.on_unavailable = "run_unlocked"
    assert outcome(bill, 7) == "billed"
    bill.on_unavailable = "fail"
    bring_up(quorum)
    assert outcome(bill, 7) == "billed"


def test_what_a_node_stores_stays_while_it_is_down(quorum):
    for node in quorum.nodes[3:]:
        node.down()
    other = quorum.hold("a")
    quorum.nodes[0].down()
    with pytest.raises(QuorumUnavailable):
        quorum.locks.acquire("a")
    bring_up(quorum)
    with pytest.raises(LockTaken):
        quorum.locks.acquire("a")
    other.release()
    quorum.locks.acquire("a")


def test_a_node_that_hangs_does_later_what_it_was_asked(quorum):
    """A late lock is stored, and a release reaches a node behind the lock that it takes away."""
    first, second = quorum.nodes[:2]
    for node in (first, second):
        node.hang()
    lease = quorum.locks.acquire("a")
    first.up()
    assert first.model.ask(b"GET", b"redlock:lock:a") is not None
    assert quorum.locks.release(lease) is ReleaseOutcome.RELEASED
    second.up()
    assert all(node.model.ask(b"GET", b"redlock:lock:a") is None for node in quorum.nodes)
    assert [health.state for health in probe(quorum.locks)] == ["up"] * 5


def test_a_slow_node_is_waited_for_as_long_as_a_round_lasts(quorum):
    for node in quorum.nodes[:3]:
        node.slow(0.03)
    began = quorum.clock.now()
    lease = quorum.locks.acquire("a")
    assert quorum.clock.now() - began == pytest.approx(0.03, abs=1e-3)
    quorum.locks.release(lease)
    for node in quorum.nodes[:3]:
        node.slow(0.06)
    with pytest.raises(QuorumUnavailable):
        quorum.locks.acquire("a")


def test_a_majority_that_lost_its_memory_does_not_vote_until_no_old_lease_can_be_alive(
    bill, quorum
):
    for node in quorum.nodes[:3]:
        node.forget()
    left = bill.apply((7,)).result.retry_after
    assert left == pytest.approx(quorum.rules.quarantine)
    quorum.clock.tick(left - 1)
    assert outcome(bill, 7) is QuorumUnavailable
    quorum.clock.tick(1.1)
    assert outcome(bill, 7) == "billed"


def test_without_the_restart_guard_nobody_waits():
    """What the quarantine is for can be seen: two holders of one lock."""
    with MemoryQuorum(restart_guard=False) as quorum, quorum.hold("a"):
        for node in quorum.nodes[:3]:
            node.forget()
        quorum.locks.acquire("a")


def test_all_nodes_tell_how_they_are(quorum):
    quorum.nodes[0].down()
    quorum.nodes[1].hang()
    quorum.nodes[2].fill()
    quorum.nodes[3].slow(1)
    assert repr(quorum) == "<MemoryQuorum of down, hanging, full, slow, up>"
    assert repr(quorum.nodes[0]) == "<MemoryNode redis://memory-1/0: down>"


# -- time --------------------------------------------------------------------------------------


def test_the_clock_stands_still_but_for_ticks(quorum):
    """So what is left of a lease is a number that a test can name."""
    with quorum.locks.hold("a", ttl=10) as held:
        time.sleep(0.01)  # real time, which does not count
        assert held.remaining() == pytest.approx(9.5 - 0.002)
        quorum.clock.tick(3)
        assert held.remaining() == pytest.approx(6.5 - 0.002)
        assert held.renewals == 0
        quorum.clock.tick(1)
        assert held.renewals == 1


def test_a_lease_is_renewed_for_as_long_as_the_body_takes(bill, quorum):
    bill.work = lambda: (quorum.clock.tick(1000), assert_locked())[1].renewals
    assert outcome(bill, 7) > 30


def test_a_task_that_loses_its_lock_is_told_what_each_node_answered(bill, quorum):
    """It is lost within the tick: without a majority nothing renews it."""
    reached = []

    def work():
        take_down(quorum)
        quorum.clock.tick(31)
        reached.append("the end")

    bill.work = work
    error = bill.apply((7,)).result
    assert type(error) is LockLost
    assert reached == []
    assert (error.reason, list(error.votes)) == ("deadline", list(labels_of(bill)))
    assert [vote.partition(" ")[0] for vote in error.votes.values()] == [
        *["unreachable"] * 3,
        *["granted"] * 2,
    ]
    assert all(label in str(error) for label in error.votes)


def test_a_stalled_task_is_not_told_of_votes_that_nobody_cast(bill, quorum):
    """Our own clock decided: what the nodes answered to earlier renewals is not why."""
    bill.work = lambda: (quorum.clock.tick(100), quorum.clock.stall(31))
    error = bill.apply((7,)).result
    assert (error.reason, error.votes) == ("deadline", {})


def test_a_duplicate_is_told_what_each_node_answered(app, quorum):
    @app.task(base=RedlockTask, unique_until="finished", on_duplicate="fail", shared=False)
    def report(year):
        pass

    first = report.delay(2025)
    quorum.nodes[4].down()
    with pytest.raises(DuplicateTask) as caught:
        report.delay(2025)
    error = caught.value
    assert (error.holder_id, list(error.votes)) == (first.id, list(labels_of(report)))
    votes = list(error.votes.values())
    assert sum(vote.startswith("refused (") for vote in votes) >= 3
    assert not votes[4].startswith("refused")
    assert all(label in str(error) for label in error.votes)


def labels_of(task):
    return plugin_for(task.app).locks.labels


def test_a_tick_within_the_lease_without_renewal_loses_nothing(bill, quorum):
    def work():
        take_down(quorum)
        quorum.clock.tick(25)
        bring_up(quorum)
        quorum.clock.tick(1000)
        return assert_locked().is_lost

    bill.work = work
    assert outcome(bill, 7) is False


def test_a_stalled_process_renews_nothing_and_others_do(bill, quorum):
    quorum.hold("else")
    bill.work = lambda: quorum.clock.stall(31)
    assert outcome(bill, 7) is LockLost
    assert quorum.holder("else") is not None


def test_a_stalled_holder_learns_of_it_by_itself_where_it_is_not_interrupted(bill, quorum):
    bill.on_lock_lost = "warn"

    def work():
        lock = current_lock()
        lock.ensure_held()
        quorum.clock.stall(31)
        newer = quorum.hold("invoice:7")
        with pytest.raises(LockLost):
            lock.ensure_held()
        with pytest.raises(AssertionError, match="'invoice:7' is lost: deadline"):
            assert_locked()
        return newer.held.fence > lock.fence

    bill.work = work
    assert outcome(bill, 7) is True
    assert quorum.holder("invoice:7") is not None


def test_a_loss_is_raised_when_the_time_has_passed(bill, quorum):
    bill.work = lambda: quorum.clock.stall(100)
    began = quorum.clock.now()
    assert outcome(bill, 7) is LockLost
    assert quorum.clock.now() - began == pytest.approx(100, abs=1e-3)


@pytest.mark.parametrize("seconds", [-1, "3", float("nan")])
def test_time_does_not_run_backwards(quorum, seconds):
    with pytest.raises(ConfigurationError):
        quorum.clock.tick(seconds)


def test_no_thread_is_started(bill, quorum):
    before = set(threading.enumerate())  # those of earlier tests may end meanwhile
    bill.work = lambda: (quorum.clock.tick(100), set(threading.enumerate()) - before)[1]
    assert outcome(bill, 7) == set()


# -- in and out --------------------------------------------------------------------------------


def test_all_is_as_before_afterwards(app, bill):
    app.conf.redlock_nodes = ["redis://127.0.0.1:1/0"]
    plugin = plugin_for(app)
    before = plugin.settings.nodes
    with memory_quorum(app) as quorum:
        assert list(plugin.settings.nodes) == list(quorum.urls)
        assert outcome(bill, 7) == "billed"
        quorum.clock.tick(1000)
        assert (clock.now(), clock.wall()) == (quorum.clock.now(), quorum.clock.wall())
    assert plugin.settings.nodes == before
    assert clock.now() < quorum.clock.now() - 900
    assert clock.wall() < quorum.clock.wall() - 900
    assert outcome(bill, 7) is QuorumUnavailable
    plugin.locks.close()


def test_all_is_as_before_after_a_test_that_failed(app):
    with pytest.raises(ZeroDivisionError), memory_quorum(app):
        1 / 0  # noqa: B018
    clock.check_not_replaced()
    assert plugin_for(app).servers is None


def test_the_settings_of_the_app_hold(app, bill):
    app.conf.update(redlock_ttl=8.0, redlock_max_ttl=9.0, redlock_prefix="shop")
    with memory_quorum(app, nodes=3) as quorum:
        bill.work = lambda: current_lock().ttl
        assert outcome(bill, 7) == 8.0
        assert (quorum.rules.max_ttl, len(quorum.nodes)) == (9.0, 3)
        assert b"shop:fence:invoice:7" in quorum.nodes[0].model.store
        app.conf.redlock_ttl = 4.0
        assert outcome(bill, 7) == 4.0
        with quorum.hold("invoice:7"):
            assert outcome(bill, 7)["skipped"] == "conflict"


def test_two_apps_may_share_a_quorum(app, bill):
    with Celery("other", broker="memory://", set_as_current=False) as other:

        @other.task(base=RedlockTask, name="other.bill", lock_key="invoice:{n}", shared=False)
        def also(n):
            return "billed, too"

        with memory_quorum(app, other):
            bill.work = lambda: outcome(other.tasks["other.bill"], 7)
            assert outcome(bill, 7)["skipped"] == "conflict"
            assert outcome(other.tasks["other.bill"], 7) == "billed, too"


def test_only_one_quorum_at_a_time(quorum):
    """There is one clock for all locks."""
    with pytest.raises(RuntimeError, match="in use in this process already"), MemoryQuorum():
        pass
    assert quorum.locks.acquire("a")


def test_locks_on_real_servers_are_refused_meanwhile(quorum):
    """A lock that a test forgot would else be asked for on servers that others use."""
    locks = Redlock.from_urls(["redis://127.0.0.1:1/0"])
    with pytest.raises(RuntimeError, match="locks on real servers cannot be asked"):
        locks.acquire("a")
    locks.close()


def test_locks_disabled_within_asks_nothing(bill, quorum):
    for node in quorum.nodes:
        node.down()
    bill.work = lambda: type(current_lock()).__name__
    with locks_disabled():
        assert outcome(bill, 7) == "NotLocked"
    assert outcome(bill, 7) is QuorumUnavailable


def test_a_quorum_within_locks_disabled_has_locks(app, bill):
    with locks_disabled():
        with memory_quorum(app) as quorum, quorum.hold(bill.s(7)):
            assert outcome(bill, 7)["skipped"] == "conflict"
        assert outcome(bill, 7) == "billed"


def test_settings_that_make_no_sense_are_refused():
    with pytest.raises(ConfigurationError, match="odd"):
        MemoryQuorum(4)
    with pytest.raises(ConfigurationError, match="unknown setting 'tll'"):
        MemoryQuorum(tll=3)


# -- without Celery, and beyond what is known --------------------------------------------------


def test_locks_without_celery():
    with MemoryQuorum(3, ttl=10) as quorum:
        locks = quorum.locks
        lease = locks.acquire("a")
        quorum.clock.tick(5)
        lease = locks.extend(lease)
        assert lease.remaining() == pytest.approx(9.5 - 0.002)
        assert [view.ttl for view in locks.inspect("a")] == [10.0] * 3
        assert locks.release(lease) is ReleaseOutcome.RELEASED
        assert check(locks) == {}
        quorum.nodes[0].down()
        assert list(check(locks)) == ["memory-1:6379/0"]
        lease = locks.acquire("a")
        quorum.clock.tick(11)
        with pytest.raises(LockLost):
            locks.extend(lease)
        assert locks.release(lease) is ReleaseOutcome.EXPIRED


def test_a_slot_is_claimed_once(quorum):
    due = quorum.clock.wall() // 60 * 60
    first, second = (Claim("a", due, who * 40, fence, 3600) for who, fence in (("x", 1), ("y", 2)))
    slots = Slots.on(quorum.locks)
    assert slots.look(["a"]) == {}
    assert slots.claim(first).state is SlotState.CLAIMED
    assert slots.claim(second).state is SlotState.TAKEN
    quorum.clock.tick(quorum.rules.max_ttl + 1)
    assert slots.claim(second).state is SlotState.UNCERTAIN
    assert slots.claim(first).state is SlotState.DEPOSED
    slots.settle(second)
    assert slots.claim(second).state is SlotState.PUBLISHED
    assert slots.look(["a"]) == {"a": LastSlot(due, is_settled=True)}


def test_one_of_two_beats_leads(app):
    app.conf.beat_schedule = {"a": {"task": "shop.report", "schedule": 0.1}}
    app.conf.redlock_beat_scheduler = "celery.beat:Scheduler"
    with memory_quorum(app) as quorum:
        leading, other = beats = [RedlockScheduler(app), RedlockScheduler(app)]

        def published():
            for beat in beats:  # what is due goes by the real clock, terms by the ticked
                quorum.clock.tick(min(0.1, beat.tick()))
            return Slots.on(quorum.locks).look(["shop/a"])

        eventually(published, "a slot is published")
        assert [bool(beat.schedule) for beat in (leading, other)] == [True, False]
        leading.close()
        beats.remove(leading)
        eventually(lambda: published() and other.schedule, "the other leads")
        other.close()


def test_a_busy_node_and_one_that_denies_do_not_vote(quorum):
    busy, denying = quorum.nodes[:2]
    busy.busy()
    denying.deny("set")
    assert [node.state for node in quorum.nodes] == ["busy", "denying", "up", "up", "up"]
    lease = quorum.locks.acquire("a")
    quorum.nodes[2].deny("evalsha")
    with pytest.raises(QuorumUnavailable) as failed:
        quorum.locks.extend(lease)
    told = failed.value.votes
    assert "BUSY Redis is busy running a script" in told["memory-1:6379/0"]
    assert "executing the script can't run this command" in told["memory-2:6379/0"]
    assert "has no permissions to run the 'evalsha' command" in told["memory-3:6379/0"]
    bring_up(quorum)
    assert quorum.locks.extend(lease).remaining() > 0


def test_what_somebody_else_has_written_is_an_error_as_on_servers(quorum):
    """A key of another type stops one lock on that node, and no other."""
    for node in quorum.nodes[:3]:
        node.model.ask(b"HSET", b"redlock:lock:a", b"f", b"1")
        node.model.ask(b"SET", b"redlock:fence:b", b"no number")
    assert quorum.locks.acquire("c")
    with pytest.raises(QuorumUnavailable, match="perform arithmetic"):
        quorum.locks.acquire("b")
    lease = quorum.locks.acquire("a")  # MGET passes over what is no string, and SET writes over it
    assert quorum.locks.release(lease) is ReleaseOutcome.RELEASED


def test_a_node_that_has_lost_its_scripts_is_told_them_again(quorum):
    """As after SCRIPT FLUSH: the call is repeated with the script's text."""
    for node in quorum.nodes:
        node.model.ask(b"SCRIPT", b"FLUSH")
    assert quorum.locks.acquire("a")


@pytest.mark.parametrize("source", [b"return {err='\\255'}", b"return \xff", b"error({})"])
def test_an_error_of_any_bytes_is_an_error(quorum, source):
    with pytest.raises(ResponseError):
        quorum.nodes[0].model.ask(b"EVAL", source, b"0")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_fork_while_another_thread_asks_does_not_jam_the_child():
    """It may be in the middle of a script, and is not in the child to go on."""
    source = """
import os, sys, threading
sys.setswitchinterval(1e-4)
from celery_redlock.testing import memory_quorum
is_over = []
def ask():
    while not is_over:
        with quorum.locks.hold("other"):
            pass
with memory_quorum(nodes=3) as quorum:
    thread = threading.Thread(target=ask)
    thread.start()
    for _ in range(30):
        child = os.fork()
        if not child:
            threading.Timer(60, os._exit, [1]).start()
            quorum.locks.inspect("mine")
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print("jammed")
            break
    is_over.append(True)
    thread.join()
"""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", source]
    said = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    assert said.stdout == b""


@pytest.mark.parametrize("there", ["None", 'type(sys)("lupa")'])
def test_without_lupa_the_error_says_what_to_install(there):
    source = f"""
import sys
sys.modules["lupa"] = {there}
from celery_redlock.testing import assert_locked, locks_disabled, real_servers
try:
    from celery_redlock.testing import memory_quorum
except ImportError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, check=True)
    assert b"pip install 'celery-redlock[testing]'" in said.stdout


def test_a_second_message_is_kept_out_of_the_queue(app, quorum):
    @app.task(base=RedlockTask, name="shop.report", unique_until="finished", shared=False)
    def report(year):
        return f"made for {year}"

    task = app.tasks["shop.report"]
    first = task.delay(2025)
    again, other = task.delay(2025), task.delay(2024)
    assert (first.duplicate, again.duplicate, other.duplicate) == (False, True, False)
    assert again.id == first.id
    with in_a_worker(app):
        assert first.get(timeout=60) == "made for 2025"
        assert other.get(timeout=60) == "made for 2024"
    assert task.delay(2025).duplicate is False


def test_a_marker_ends_with_its_life(app, quorum):
    @app.task(
        base=RedlockTask, name="shop.report", unique_until="expired", unique_for=600, shared=False
    )
    def report():
        return "made"

    task = app.tasks["shop.report"]
    assert task.delay().duplicate is False
    quorum.clock.tick(599)
    assert task.delay().duplicate is True
    for node in quorum.nodes[:2]:
        node.down()
    assert task.delay().duplicate is True
    quorum.clock.tick(2)
    assert task.delay().duplicate is False


def test_names_may_be_anything(quorum):
    with quorum.hold("a\r\n$3\r\nb"), pytest.raises(LockTaken):
        quorum.locks.acquire("a\r\n$3\r\nb")
    assert list(commands(b"*2\r\n$4\r\n\r\n\r\n\r\n$0\r\n\r\n*1\r\n$1\r\nx\r\n")) == [
        [b"\r\n\r\n", b""],
        [b"x"],
    ]


# -- assert_locked -----------------------------------------------------------------------------


def test_assert_locked_is_silent_under_the_lock(bill, quorum):
    bill.work = lambda: [assert_locked(), assert_locked("invoice:7"), assert_locked(bill.s(7))]
    assert [held.name for held in bill.apply((7,)).get()] == ["invoice:7"] * 3


@pytest.mark.parametrize("what", ["invoice:8", None])
def test_assert_locked_says_what_is_held_instead(bill, quorum, what):
    bill.work = lambda: assert_locked(bill.s(8) if what else None)
    if what:
        with pytest.raises(AssertionError, match="'invoice:8' is held here, but it is 'invoice:7'"):
            bill.apply((7,)).get()
    with pytest.raises(AssertionError, match="but none is: No lock is held here"):
        bill(7)


def test_assert_locked_is_not_content_with_less(bill, quorum):
    bill.work = assert_locked
    with locks_disabled(), pytest.raises(AssertionError, match="without: locks are disabled"):
        bill.apply((7,)).get()
    for node in quorum.nodes:
        node.down()
    bill.on_unavailable = "run_unlocked"
    with pytest.raises(AssertionError, match="without: no quorum"):
        bill.apply((7,)).get()


def test_assert_locked_takes_names_and_calls_alone(app):
    with pytest.raises(TypeError, match=r"bill\.s\(7\)"):
        assert_locked(7)


# -- in a worker of this process ---------------------------------------------------------------


def test_a_task_is_put_off_in_a_worker_until_there_is_a_quorum(app, bill, quorum):
    """In eager mode nothing comes later; in a worker of this process it does."""
    events = []
    app.conf.redlock_observers = [events.append]
    take_down(quorum)
    with in_a_worker(app):
        result = bill.delay(7)
        eventually(lambda: [e for e in events if isinstance(e, TaskRescheduled)], "put-off task")
        assert result.state == "PENDING"
        bring_up(quorum)
        assert result.get(timeout=60) == "billed"
