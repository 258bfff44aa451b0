"""
The same promises with RabbitMQ as the broker, with classic and with quorum queues.

What differs from Redis: a lost connection brings unacknowledged messages back at once, and with
quorum queues what is to come later waits in the broker and not in a worker, where it has to wait
whole seconds. Bodies wait for a gate that the test opens, so that nothing depends on speed.
"""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from pathlib import Path

import pytest
import redis
from billiard.exceptions import WorkerLostError
from celery import Task, chain, chord, group
from celery.exceptions import Ignore, TaskRevokedError
from celery.exceptions import TimeoutError as NotReady

from celery_redlock import LockTaken, RedlockTask, Reschedule, Retry
from celery_redlock.task.execution.requeue import sure_producer
from celery_redlock.task.messages import waiting
from celery_redlock.task.messages.envelope import Envelope, fresh_publish_id
from support.events import body, now, overlaps, read
from support.rabbitmq import Depth
from support.stage import LASTING, stage
from support.versions import since
from support.waiting import eventually

#: Of the tasks that are delivered twice, or whose worker is killed: a copy that waits in a quorum
#: queue waits for as long as that.
TTL = 12.0


class Paced(Reschedule):
    """In place of chance, delays of which the second passes a place of the first in the broker."""

    def countdown(self, times, longest, chance=None):
        return 3 if times == 1 else 1


# The scenes cut connections, and kill children and a worker.
pytestmark = [pytest.mark.long, pytest.mark.in_order]


def gate_of(lock):
    return Path(os.environ["EVENTS"]).with_name(f"open {lock}")


def work(self, lock, gated=True):  # noqa: FBT002  as a message carries it
    first = not any(e["name"] == lock for e in read(os.environ["EVENTS"], "start"))
    with body(os.environ["EVENTS"], lock, host=self.request.hostname, id=self.request.id):
        ends = time.monotonic() + 250
        while gated and first and not gate_of(lock).exists() and time.monotonic() < ends:
            time.sleep(0.02)
    key = self.request.delivery_info["routing_key"]
    return {"first": first, "queue": key.rpartition(".")[2], "retries": self.request.retries}


def work_naively(self, lock):
    """Lock as recipes do: one key in one Redis, and whoever finds it taken leaves."""
    with redis.Redis.from_url(self.app.conf.result_backend) as client:
        if not client.set(f"naive:{lock}", self.request.id, nx=True, ex=600):
            raise Ignore
        result = work(self, lock)
        client.delete(f"naive:{lock}")
    return result


def declare(app):
    if "STAGE" in os.environ:  # in a worker, and not in this process, where other tests are run
        # Nobody comes by itself before all tests have given up: what runs was woken.
        waiting.FIRST_BY_ITSELF = waiting.LONGEST_BY_ITSELF = 600

    def locked(name, run=work, **options):
        # One key for all tasks: it is the lock's name that tells what meets what.
        app.task(
            name=name, base=RedlockTask, bind=True, shared=False, lock_key="{lock}", **options
        )(run)

    locked("skip", on_conflict="skip")
    locked("skip_continue", on_conflict="skip", chain_on_skip="continue")
    locked("fail", on_conflict="fail")
    locked("retry", on_conflict=Retry(countdown=0.5), max_retries=100)
    locked("reschedule", on_conflict=Paced(), max_retries=0)
    locked("queue", on_conflict="queue")
    locked("late", acks_late=True, lock_ttl=TTL)
    locked("late_long", acks_late=True, lock_ttl=20.0)
    # Who comes before the parent has released waits for the lease where the broker delays it.
    locked("lost", acks_late=True, reject_on_worker_lost=True, lock_ttl=TTL)
    locked("lost_for_good", acks_late=True, lock_ttl=TTL)

    @app.task(name="again", base=RedlockTask, bind=True, shared=False, max_retries=None)
    def again(self, times):
        with body(os.environ["EVENTS"], "again"):
            if self.request.retries < times:
                raise self.retry(countdown=0)
        return self.request.retries

    @app.task(name="link", base=RedlockTask, shared=False, unique_on=())
    def link(count):
        with body(os.environ["EVENTS"], "link"):
            return count + 1

    @app.task(name="half", base=Task, bind=True, shared=False, max_retries=1)
    def half(self):
        if not self.request.retries:
            raise self.retry(countdown=0.5)
        return self.request.retries

    app.task(name="plain", base=Task, bind=True, shared=False)(work)
    app.task(name="plain_late", base=Task, bind=True, shared=False, acks_late=True)(work)
    app.task(name="naive", base=Task, bind=True, shared=False, acks_late=True)(work_naively)

    @app.task(name="follow", shared=False)
    def follow(*values):
        return list(values)


CONF = {
    "classic": {},
    "quorum": {
        "task_default_queue_type": "quorum",
        "task_default_exchange_type": "topic",
        "task_create_missing_queue_type": "quorum",
        "task_create_missing_queue_exchange_type": "topic",
    },
}


QUORUM = since(5, 6, "queues that are declared as they are used may be quorum queues")
# Before, the copy that comes at once may be given to a process whose body waits at its gate.
RECONNECTS = since(5, 7, "a worker that reconnects still knows which of its processes are busy")


@pytest.fixture(scope="module", params=["classic", pytest.param("quorum", marks=QUORUM)])
def it(request, rabbit, tmp_path_factory):
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    with stage(
        __file__,
        folder,
        broker_url=rabbit.url,
        task_default_queue=kind,
        **LASTING,
        **CONF[kind],
    ) as it:
        it.kind, it.rabbit, it.other = kind, rabbit, f"{kind}-other"
        it.open = lambda lock: (folder / f"open {lock}").touch()
        it.options = {"concurrency": 4, "args": ["-Q", f"{kind},{it.other}"]}
        it.start_workers({"name": name, **it.options} for name in ("w1", "w2"))
        yield it
        rabbit.wait_until_quiet(timeout=100)  # what waits yet has only these workers to end it


def begin(it, name, lock, **options):
    result = it.task(name).apply_async((lock,), **options)
    it.started(lock)
    return result


def end(it, worker, queue):
    """Stop the only *worker* of *queue* once it has ended the copies of what has run, too."""
    it.rabbit.wait_until_quiet(queue)
    worker.terminate()


# -- in line ---------------------------------------------------------------------------


def test_who_queues_runs_soon_after_the_lock_is_free(it):
    """From a classic queue it waits in a worker, and is woken; a quorum queue brings it again."""
    first = begin(it, "queue", "in line")
    rivals = [it.task("queue").apply_async(("in line",), queue=it.other) for _ in range(3)]
    for rival in rivals:
        it.wait_for_log(rf"Queued task queue\[{rival.id}")
    it.open("in line")
    assert first.get(timeout=100)["first"]
    for rival in rivals:
        assert rival.get(timeout=100)["queue"] == it.other
    assert not [pair for pair in overlaps(read(it.events)) if pair[0].name == "in line"]


def test_who_queues_in_a_worker_that_is_killed_runs_elsewhere(it):
    queue = f"{it.kind}-killed"
    killed = it.worker(name="killed", concurrency=1, args=["-Q", queue])
    first = begin(it, "queue", "killed in line")
    rival = it.task("queue").apply_async(("killed in line",), queue=queue)
    killed.wait_for_log(rf"Queued task queue\[{rival.id}")
    killed.kill()
    elsewhere = it.worker(name="elsewhere", concurrency=1, args=["-Q", queue])
    elsewhere.wait_for_log(rf"{rival.id}\] received", timeout=100)
    it.open("killed in line")
    assert first.get(timeout=100)["first"]
    assert rival.get(timeout=100)["queue"] == queue
    assert len(it.bodies("killed in line")) == 2
    end(it, elsewhere, queue)


def test_who_queues_is_woken_after_the_broker_was_lost(it):
    queue = f"{it.kind}-broken"
    # All three are received at once: since RabbitMQ 4, what waits counts as prefetched.
    worker = it.worker(name="broken", concurrency=4, args=["-Q", queue])
    with it.held("broken line"):
        rivals = [it.task("queue").apply_async(("broken line",), queue=queue) for _ in range(3)]
        for rival in rivals:
            worker.wait_for_log(rf"Queued task queue\[{rival.id}")
        it.rabbit.close_all_connections()
        worker.wait_for_log(r"(?s)[Cc]onnection to broker lost.*Connected to")
        for rival in rivals if it.kind == "classic" else ():
            worker.wait_for_log(
                rf"(?s)Connected to.*Connected to.*{rival.id}\] received", timeout=60
            )
    it.open("broken line")
    for rival in rivals:
        assert rival.get(timeout=100)["queue"] == queue
    assert len(it.bodies("broken line")) == 3
    assert not [pair for pair in overlaps(read(it.events)) if pair[0].name == "broken line"]
    end(it, worker, queue)


def test_who_queues_holds_up_others_only_with_classic_queues_since_rabbitmq_4(it):
    """There what waits counts as prefetched; it all runs once the lock is free."""
    queue = f"{it.kind}-full"
    worker = it.worker(name="full", concurrency=1, args=["-Q", queue])
    with it.held("full line"):
        rival = it.task("queue").apply_async(("full line", False), queue=queue)
        worker.wait_for_log(rf"Queued task queue\[{rival.id}")
        other = it.task("plain").apply_async(("full", False), queue=queue)
        if it.kind == "classic" and it.rabbit.version() >= (4,):
            eventually(
                lambda: it.rabbit.queues().get(queue) == Depth(ready=1, unacked=1),
                "message behind one that waits",
            )
            with pytest.raises(NotReady):
                other.get(timeout=3)
        else:
            assert other.get(timeout=100)["first"]
    assert rival.get(timeout=100)["first"]
    assert other.get(timeout=100)["first"]
    end(it, worker, queue)


def test_a_chord_and_a_group_whose_members_wait_end(it):
    members = [it.task("queue").si("members", gated=False) for _ in range(3)]
    results = [chord(members, it.task("follow").s()).apply_async(), group(members).apply_async()]
    (values,), others = (result.get(timeout=100) for result in results)
    assert len(values) == len(others) == 3
    assert len(it.bodies("members")) == 6
    assert not [pair for pair in overlaps(read(it.events)) if pair[0].name == "members"]


@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_who_queues_can_be_called_off(it, end):
    lock = f"in line, {end}"
    with it.held(lock):
        rival = it.task("queue").apply_async((lock,), expires=10 if end == "expired" else None)
        sent = time.time()
        it.wait_for_log(rf"Queued task queue\[{rival.id}")
        if end == "revoked":
            rival.revoke()
        else:
            eventually(lambda: time.time() > sent + 10, "its time to be up")
        # One that has expired in a worker's timer ends when it comes by itself, as any such task.
        if end == "revoked" or it.kind == "quorum":
            with pytest.raises(TaskRevokedError):
                rival.get(timeout=100)
    assert it.task("queue").delay(lock, gated=False).get(timeout=100)["first"]
    assert len(it.bodies(lock)) == 1


def test_who_queues_outlasts_a_deploy(it):
    queue = f"{it.kind}-deploy"
    options = {"concurrency": 2, "args": ["-Q", queue]}
    old = it.worker(name="old", **options)
    first = begin(it, "queue", "deploy", queue=queue)
    rivals = [it.task("queue").apply_async(("deploy",), queue=queue) for _ in range(6)]
    for rival in rivals[:3]:
        old.wait_for_log(rf"Queued task queue\[{rival.id}")
    new = it.worker(name="new", **options)
    old.signal(signal.SIGTERM)
    it.open("deploy")
    old.wait()
    assert [result.get(timeout=100)["first"] for result in (first, *rivals)] == [True] + [False] * 6
    assert len(it.bodies("deploy")) == 7
    assert not [pair for pair in overlaps(read(it.events)) if pair[0].name == "deploy"]
    end(it, new, queue)


# -- conflicts -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def met(it):
    """For each policy a body that runs, and two rivals which have met it; then all may end."""
    policies = ("skip", "fail", "retry", "reschedule", "plain")
    it.firsts = {name: begin(it, name, name) for name in policies}
    it.rivals = {
        name: [it.task(name).apply_async((name,), queue=it.other) for _ in range(2)]
        for name in policies
    }
    for rivals in it.rivals.values():
        for rival in rivals:
            eventually(
                lambda r=rival: (
                    re.search(rf"{r.id}\] (in \d+ s|retry: Retry)", it.log())
                    or it.meta(r.id).get("status") not in (None, "STARTED")
                    or any(e.get("id") == r.id for e in read(it.events, "start"))
                ),
                f"a conflict of {rival.id}",
                timeout=100,
                every=0.05,
            )
    # So that what was put off meets it again, coming from where it waited.
    for rival in it.rivals["reschedule"]:
        it.wait_for_log(rf"(?s)({rival.id}\] in \d+ s.*){{3}}")
    for name in policies:
        it.open(name)
    return it


def test_the_first_is_not_disturbed(met):
    for result in met.firsts.values():
        assert result.get(timeout=100)["first"]


def test_skip(met):
    for rival in met.rivals["skip"]:
        assert rival.get(timeout=100)["skipped"] == "conflict"
    assert len(met.bodies("skip")) == 1


def test_fail(met):
    for rival in met.rivals["fail"]:
        with pytest.raises(LockTaken):
            rival.get(timeout=100)
    assert len(met.bodies("fail")) == 1


def test_retry(met):
    """
    Both rivals run later, each alone and in its own queue, at the cost of retries.

    Half a second becomes a whole.
    """
    for rival in met.rivals["retry"]:
        ran = rival.get(timeout=100)
        assert ran["retries"] >= 1
        assert ran["queue"] == met.other
    assert len(met.bodies("retry")) == 3


def test_reschedule(met):
    for rival in met.rivals["reschedule"]:
        ran = rival.get(timeout=100)
        assert (ran["retries"], ran["queue"]) == (0, met.other)
    assert len(met.bodies("reschedule")) == 3


def test_without_a_lock_they_run_at_once(met):
    """The twin: of a plain task both rivals run beside the first."""
    for rival in met.rivals["plain"]:
        rival.get(timeout=100)
    assert len(overlaps(e for e in read(met.events) if e.get("name") == "plain")) >= 2


# -- where it waits --------------------------------------------------------------------


def test_what_comes_later_waits_in_the_broker(it):
    """With quorum queues no worker is held up by it; with classic queues it waits in a worker."""
    it.rabbit.wait_until_quiet()
    task_id = uuid.uuid4().hex
    message = {"task_id": task_id, "headers": Envelope(fresh_publish_id()).header(task_id)}
    result = begin(it, "late_long", "elsewhere", **message)
    it.task("late_long").apply_async(("elsewhere",), **message)  # as if the broker had two of it
    it.wait_for_log(rf"Requeued late_long\[{result.id}\] for (1\d|20) s")

    def waits():
        if it.kind == "quorum":
            return it.rabbit.delayed() == 1
        depth = it.rabbit.queues().get(it.kind)
        return depth is not None and depth.unacked == 2

    try:
        eventually(waits, "message that waits", timeout=100, every=0.1)
    finally:
        it.open("elsewhere")
    assert result.get(timeout=100)["first"]


@since(5, 7, "a retry that cannot be published fails the task")
def test_celery_itself_waits_whole_seconds(it):
    """The twin: with quorum queues a retry of Celery's own after half a second is a failure."""
    error = it.task("half").delay().get(timeout=100, propagate=False)
    if it.kind == "quorum":
        assert "countdown must be a positive number" in str(error)
    else:
        assert error == 1


# -- a connection that is lost ---------------------------------------------------------


@pytest.fixture(scope="module")
def cut(it):
    """Bodies run and are acknowledged late when all connections are closed, twice in a row."""
    it.cut = {name: begin(it, name, f"cut {name}") for name in ("late", "plain_late")}
    late, it.seen = it.cut["late"].id, []
    for times in (1, 2):
        it.rabbit.close_all_connections()
        it.wait_for_log(rf"(?s)(late\[{late}\] for \d+ s:.*){{{times}}}", timeout=150)
        it.seen.append(it.meta(late))
    it.started("cut plain_late", 2)
    for name in it.cut:
        it.open(f"cut {name}")
    while it.seen[-1].get("status") in (None, "STARTED"):
        it.seen.append(it.meta(late))
        time.sleep(0.02)
    return it


@RECONNECTS
def test_a_lost_connection_starts_no_second_body(cut):
    assert cut.cut["late"].get(timeout=100)["first"]
    assert {meta["status"] for meta in cut.seen[:-1]} == {"STARTED"}
    assert cut.seen[-1]["result"]["first"]
    (ran,) = cut.bodies("cut late")
    assert ran.finished


@RECONNECTS
def test_copies_end_when_the_body_has_ended(cut):
    cut.wait_for_log(rf"late\[{cut.cut['late'].id}\] has finished before; this copy ends")
    cut.rabbit.wait_until_quiet()
    assert cut.meta(cut.cut["late"].id) == cut.seen[-1]
    assert len(cut.bodies("cut late")) == 1


@RECONNECTS
def test_without_a_lock_a_lost_connection_runs_it_twice(cut):
    """The twin: of a plain task the copy runs beside the first."""
    assert not cut.cut["plain_late"].get(timeout=100)["first"], "the result of the copy"
    assert overlaps(e for e in read(cut.events) if e.get("name") == "cut plain_late")


# -- a child that is killed ------------------------------------------------------------


@pytest.fixture(scope="module")
def bereft(it):
    it.bereft = {name: begin(it, name, f"child {name}") for name in ("lost", "lost_for_good")}
    it.bereft_at = now()
    for name in it.bereft:
        (running,) = it.bodies(f"child {name}")
        it.wait_until_begun(running.pid)
        os.kill(running.pid, signal.SIGKILL)
    return it


def test_a_task_whose_process_is_killed_comes_again(bereft):
    assert not bereft.bereft["lost"].get(timeout=100)["first"]
    first, second = bereft.bodies("child lost")
    assert not first.finished
    assert bereft.bereft_at < second.started
    bereft.wait_until_free("child lost")


def test_without_rejection_it_does_not_come_again(bereft):
    """The twin: otherwise Celery acknowledges it as a failure."""
    with pytest.raises(WorkerLostError):
        bereft.bereft["lost_for_good"].get(timeout=100)
    assert len(bereft.bodies("child lost_for_good")) == 1


# -- workflows -------------------------------------------------------------------------


def test_a_chord_with_equal_members_ends(it):
    members = [it.task("skip").si("twin") for _ in range(3)]
    result = chord(members, it.task("follow").s()).apply_async()
    it.wait_for_log(r"(?s)(Skipped task skip\[[^\n]*'twin'.*){2}")
    it.open("twin")
    (values,) = result.get(timeout=100)
    assert sorted("skipped" in value for value in values) == [False, True, True]
    assert len(it.bodies("twin")) == 1


def test_a_naive_lock_hangs_the_chord(it):
    """The twin: members that just leave are never counted, and the chord's body never runs."""
    members = [it.task("naive").si("naive twin") for _ in range(3)]
    result = chord(members, it.task("follow").s()).apply_async()
    it.started("naive twin")
    ids = "|".join(member.id for member in result.parent)
    it.wait_for_log(rf"(?s)(naive\[({ids})\] ignored.*){{2}}")
    it.open("naive twin")
    it.wait_for_log(rf"naive\[({ids})\] succeeded")
    with pytest.raises(NotReady):
        result.get(timeout=1)


def test_a_skip_stops_the_chain_or_is_passed_on(it):
    follow = it.task("follow")
    with it.held("chain"):
        stopped = chain(it.task("skip").si("chain"), follow.s("word")).apply_async()
        went_on = chain(it.task("skip_continue").si("chain"), follow.s("word")).apply_async()
        with pytest.raises(TaskRevokedError, match="was skipped: conflict"):
            stopped.get(timeout=100)
        skipped, word = went_on.get(timeout=100)
    assert (skipped["skipped"], word) == ("conflict", "word")


def test_a_task_is_never_refused_by_what_came_before_it(it):
    again = it.task("again").delay(10)
    link = it.task("link")
    links = chain(link.s(0), *(link.s() for _ in range(9))).apply_async()
    assert again.get(timeout=200) == 10
    assert links.get(timeout=200) == 10
    assert (len(it.bodies("again")), len(it.bodies("link"))) == (11, 10)


# -- a worker that is killed -----------------------------------------------------------


@pytest.fixture(scope="module")
def killed(it):
    """A worker is killed amid three bodies; of two of them the broker sent a copy before."""
    host = "w1@localhost"
    it.killed = {name: begin_on(it, host, name) for name in ("late", "naive")}
    it.rabbit.close_all_connections()
    it.wait_for_log(rf"late\[{it.killed['late'].id}\] for \d+ s:")
    it.wait_for_log(rf"naive\[{it.killed['naive'].id}\] ignored")
    it.killed["no copy"] = begin_on(it, host, "late")
    (worker,) = [worker for worker in it.workers if f"{host} ready." in worker.log()]
    worker.kill(children=False)
    it.killed_at = now()
    it.worker(name="w3", **it.options)  # other tests count on two
    return it


def begin_on(it, host, name):
    """Have a task wait at the gate in the worker *host*; those that come to another may end."""
    for _ in range(60):  # the broker chooses whom it goes to
        lock = f"killed {uuid.uuid4()}"
        result = begin(it, name, lock)
        (start,) = [e for e in read(it.events, "start") if e["name"] == lock]
        if start["host"] == host:
            result.lock = lock
            return result
        it.open(lock)
    pytest.fail(f"no {name} came to {host}")


@RECONNECTS
@pytest.mark.parametrize("which", ["late", "no copy"])
def test_a_worker_that_is_killed_loses_no_task(killed, which):
    result = killed.killed[which]
    assert not result.get(timeout=100)["first"]
    first, second = killed.bodies(result.lock)
    assert not first.finished
    assert first.pid != second.pid
    assert killed.killed_at < second.started


@RECONNECTS
def test_a_naive_lock_loses_the_task(killed):
    """The twin: the copy saw the lock, left, and took the only message along."""
    killed.rabbit.wait_until_quiet()
    lost = killed.killed["naive"]
    assert killed.meta(lost.id)["status"] == "STARTED"
    assert len(killed.bodies(lost.lock)) == 1


def test_a_copy_is_published_surely(it):
    """Its publish returns when the broker has it; twin: Celery's own only writes it to a socket."""
    with sure_producer(it.app) as producer:
        assert producer.channel.connection.confirm_publish
    with it.app.producer_or_acquire() as producer:
        assert not producer.channel.connection.confirm_publish


def test_nothing_is_left(it):
    it.rabbit.wait_until_quiet()
    it.wait_until_free()
    twins = ("plain", "cut plain")
    events = [e for e in read(it.events) if not e.get("name", "").startswith(twins)]
    assert overlaps(events) == []
