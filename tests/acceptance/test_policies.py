"""What becomes of a task that is not granted its lock, with real workers of every pool."""

from __future__ import annotations

import os
import re
import time

import pytest
from celery import chain, chord, group

from celery_redlock import (
    LockTaken,
    QuorumUnavailable,
    RedlockTask,
    Reschedule,
    Retry,
    RunUnlocked,
    current_lock,
)
from support.events import body, now
from support.stage import LASTING, stage
from support.waiting import eventually


def facts(request):
    headers = dict(request.headers or {})
    info = request.delivery_info or {}
    return {
        "id": request.id,
        "retries": request.retries,
        "args": list(request.args),
        "kwargs": request.kwargs,
        "headers": headers,
        "priority": info.get("priority"),
        "queue": info.get("routing_key"),
        "expires": request.expires,
        "timelimit": request.timelimit,
        "root_id": request.root_id,
        "parent_id": request.parent_id,
        "group": request.group,
        "group_index": request.group_index,
        "chord": bool(request.chord),
        "chain": len(request.chain or ()),
        "link": len(request.callbacks or ()),
        "link_error": len(request.errbacks or ()),
        "reply_to": request.reply_to,
        "shadow": request.shadow,
        "ignore_result": request.ignore_result,
        "correlation_id": request.correlation_id,
        "message_id": (request.properties or {}).get("message_id"),
    }


def declare(app):
    def policy(name, **options):
        def run(self, lock, value=None):
            with body(os.environ["EVENTS"], lock, task=self.name, id=self.request.id):
                found = current_lock()
            return {"lock": type(found).__name__, "fence": found.fence, **facts(self.request)}

        app.task(
            name=name, base=RedlockTask, bind=True, shared=False, lock_key="{lock}", **options
        )(run)

    @app.task(name="element", base=RedlockTask, shared=False, lock_key="{lock}")
    def element(lock):
        with body(os.environ["EVENTS"], lock, task="element", id=lock):
            return type(current_lock()).__name__

    @app.task(name="collect", shared=False)
    def collect(values):
        return values

    policy("skip", on_conflict="skip")
    policy("fail", on_conflict="fail")
    policy("retry", on_conflict="retry", default_retry_delay=1, max_retries=None)
    policy("retry_twice", on_conflict="retry", default_retry_delay=1, max_retries=2)
    policy("retry_soon", on_conflict=Retry(countdown=0), max_retries=100)
    policy("reschedule", on_conflict=Reschedule(cap=1.0), max_retries=0)
    policy("reschedule_once", on_conflict=Reschedule(cap=1.0, max_reschedules=1))
    policy("reschedule_late", on_conflict=Reschedule(cap=1.0), acks_late=True)
    policy("wait", on_conflict="fail", lock_wait=600)
    policy("no_quorum_skip", on_unavailable="skip")
    policy("no_quorum_fail", on_unavailable="fail")
    policy("no_quorum_wait", on_unavailable="fail", lock_wait=1)
    policy("no_quorum_retry", on_unavailable=Retry(countdown=1), max_retries=100)
    policy("no_quorum_twice", on_unavailable=Retry(countdown=3), max_retries=2)
    policy("no_quorum_default", max_retries=0)
    policy("no_quorum_once", on_unavailable=Reschedule(base=1, cap=1, max_reschedules=1))
    policy("no_quorum_unlocked", on_unavailable=RunUnlocked())


@pytest.fixture(scope="module", params=["prefork", "threads", "solo"])
def it(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with stage(__file__, folder, accept_content=["json", "yaml"], **LASTING) as it:
        it.worker(pool=request.param, concurrency=4, args=["-Q", "celery,special"])
        yield it


def put_off(it, result):
    it.wait_for_log(rf"Rescheduled task .*{result.id}\] in 1 s")
    return result


# -- a conflict --------------------------------------------------------------------


def test_a_skipped_task_succeeds_with_a_value_that_tells_why(it):
    with it.held("skip me"):
        result = it.task("skip").delay("skip me")
        value = result.get(timeout=100)
    assert (value["skipped"], value["lock"]) == ("conflict", "skip me")
    assert value["holder"]["pid"] == os.getpid()
    assert result.state == "SUCCESS"
    assert it.bodies("skip me") == []
    it.wait_for_log(rf"INFO.*Skipped task skip\[{result.id}\].*'skip me'")


def test_elements_of_a_map_have_their_locks(it):
    names = ["map one", "map two", "map three"]
    with it.held("map two"):
        ran, skipped, last = it.task("element").map(names).delay().get(timeout=100)
        chunks = it.task("element").chunks([(name,) for name in names], 2).delay()
        ((_, other), (again,)) = chunks.get(timeout=100)
    assert ran == last == again == "HeldLock"
    assert other["skipped"] == "conflict"
    assert (skipped["skipped"], skipped["lock"]) == ("conflict", "map two")
    assert it.bodies("map two") == []


def test_a_failing_task_comes_home_with_the_error(it):
    with it.held("fail me"), pytest.raises(LockTaken) as failed:
        it.task("fail").delay("fail me").get(timeout=100)
    assert failed.value.name == "fail me"
    assert failed.value.holder["pid"] == os.getpid()
    assert len(failed.value.votes) == 5
    assert it.bodies("fail me") == []


def test_a_retry_is_a_retry_of_the_task(it):
    with it.held("retry me"):
        began = time.monotonic()
        result = it.task("retry").delay("retry me")
        eventually(lambda: result.state == "RETRY", "state RETRY", timeout=100)
    assert result.get(timeout=100)["retries"] >= 1
    assert time.monotonic() - began >= 1


def test_retries_come_to_an_end(it):
    with it.held("retry me in vain"):
        began = time.monotonic()
        with pytest.raises(LockTaken, match="retry me in vain"):
            it.task("retry_twice").delay("retry me in vain").get(timeout=100)
        assert time.monotonic() - began >= 2
    assert it.bodies("retry me in vain") == []


def test_a_rescheduled_task_comes_again_with_all_it_had(it):
    """But for the time nothing tells a task that was put off from one that was not."""

    def call(lock):
        return it.task("reschedule").apply_async(
            (lock,),
            {"value": [1, {"a": None}]},
            headers={"tenant": "acme"},
            priority=6,
            queue="special",
            expires=600,
            shadow="put off",
            time_limit=50,
            soft_time_limit=40,
            link=it.task("collect").s(),
            link_error=it.task("collect").s(),
            correlation_id="order-7",
            message_id="message-7",
        )

    unhindered = call("nobody holds me").get(timeout=100)
    with it.held("reschedule me"):
        result = put_off(it, call("reschedule me"))
        assert result.state in ("PENDING", "STARTED")
    found = result.get(timeout=100)
    assert found["id"] == result.id
    for own in ("id", "root_id", "args", "expires", "fence"):
        del unhindered[own], found[own]
    assert found == unhindered
    assert (found["headers"], found["priority"]) == ({"tenant": "acme"}, 6)
    assert found["queue"] == "special"
    assert (found["parent_id"], found["correlation_id"]) == (None, "order-7")
    assert len(it.bodies("reschedule me")) == 1


@pytest.mark.parametrize("policy", ["reschedule", "reschedule_late", "retry_soon"])
def test_what_comes_later_is_written_as_the_caller_wrote_it(it, policy):
    """Its arguments may be what the task's own serializer cannot write."""
    name = f"written as YAML, {policy}"
    call = {"args": (name,), "kwargs": {"value": {1, 2}}}
    with it.held(name):
        task = it.task(policy)
        result = task.apply_async(**call, serializer="yaml", compression="gzip", ignore_result=True)
        it.wait_for_log(rf"{result.id}\] (is retried )?in 1 s")
    it.started(name)
    assert "could not be published again" not in it.log()


def test_a_rescheduled_task_keeps_its_retries(it):
    with it.held("keep my retries"):
        result = put_off(it, it.task("reschedule").apply_async(("keep my retries",), retries=7))
    assert result.get(timeout=100)["retries"] == 7


def test_a_rescheduled_task_expires(it):
    with it.held("too late"):
        result = put_off(it, it.task("reschedule").apply_async(("too late",), expires=8))
        eventually(lambda: result.state == "REVOKED", "end of the task", timeout=100)
    assert it.bodies("too late") == []


def test_a_task_is_rescheduled_so_often_and_no_more(it):
    with it.held("once"), pytest.raises(LockTaken, match="once"):
        it.task("reschedule_once").delay("once").get(timeout=100)
    assert it.log().count("(attempt 1): lock 'once'") == 1
    assert it.bodies("once") == []


@pytest.mark.parametrize("policy", ["reschedule", "retry_soon"])
def test_workflows_wait_for_a_member_that_comes_later(it, policy):
    late, soon = it.task(policy), it.task("fail")
    name = f"workflow {policy}"
    with it.held(name):
        grouped = group(late.si(name), soon.si(f"{name} 1")).apply_async()
        chorded = chord([late.si(name), soon.si(f"{name} 2")], it.task("collect").s()).apply_async()
        chained = chain(late.si(name), soon.si(f"{name} 3")).apply_async()
        for result in (grouped[0], chorded.parent[0], chained.parent):
            if policy == "reschedule":
                put_off(it, result)
            else:
                eventually(lambda r=result: r.state == "RETRY", "state RETRY", timeout=100)
    for values in (grouped.get(timeout=100), chorded.get(timeout=100)):
        first, second = values
        assert (first["args"], second["args"][0][:-2]) == ([name], name)
    assert chained.get(timeout=100)["args"] == [f"{name} 3"]
    assert chained.get()["parent_id"] == chained.parent.id
    assert len(it.bodies(name)) == 3


def test_a_group_reads_a_skipped_member_as_a_value(it):
    skip, collect = it.task("skip"), it.task("collect")
    with it.held("skip us"):
        grouped = group(skip.si("skip us"), skip.si("not us 1")).apply_async()
        chorded = chord([skip.si("skip us"), skip.si("not us 2")], collect.s()).apply_async()
        for values in (grouped.get(timeout=100), chorded.get(timeout=100)):
            assert ["skipped" in value for value in values] == [True, False]


def test_a_task_may_wait_in_its_slot(it):
    with it.held("wait for me"):
        result = it.task("wait").delay("wait for me")
        eventually(lambda: it.keys("redlock:waiters:wait for me"), "one who waits")
    assert result.get(timeout=100)["lock"] == "HeldLock"  # of the ten minutes that it may wait


# -- no quorum ---------------------------------------------------------------------


#: The quarantine of nodes that come back lasts 9.4 s, and is waited for.
BRIEF = {"redlock_ttl": 8.0, "redlock_max_ttl": 8.0, "redlock_node_timeout": 1.0}


@pytest.fixture(scope="module")
def outage(tmp_path_factory):
    """A stage on which three of five nodes are killed, and later come back without memory."""
    folder = tmp_path_factory.mktemp("outage")
    with stage(__file__, folder, **BRIEF) as it:
        it.worker(concurrency=4)
        assert it.task("no_quorum_fail").delay("before").get(timeout=100)["lock"] == "HeldLock"
        it.silent = after_silence(it)
        for node in it.nodes[:3]:
            node.kill()
        names = [name for name in it.app.tasks if name.startswith("no_quorum")]
        it.results = {name: it.task(name).delay(name) for name in names}
        for name in set(names) - set(COMING_AGAIN):
            it.results[name].get(timeout=100, propagate=False)
        eventually(lambda: it.results["no_quorum_retry"].state == "RETRY", "state RETRY")
        assert isinstance(it.results["no_quorum_retry"].info, QuorumUnavailable)
        it.wait_for_log(rf"{it.results['no_quorum_default'].id}\] in ")
        it.back = now()
        for node in it.nodes[:3]:
            node.start()
        yield it


#: Tasks that come again until there is a quorum.
COMING_AGAIN = ("no_quorum_default", "no_quorum_retry")


def after_silence(it):
    """Return the error of a task for which three nodes take their requests and never answer."""
    for node in it.nodes[:3]:
        node.pause()
    try:
        result = it.task("no_quorum_fail").delay("silence")
        result.get(timeout=100, propagate=False)
    finally:
        for node in it.nodes[:3]:
            node.resume()
    # Suspects are waited for no more; they are in again when they have answered.
    again = [it.task("no_quorum_fail").delay(f"again {n}") for n in range(8)]
    for result_of_them in again:
        result_of_them.get(timeout=100, propagate=False)
    return result.result


def waited(it, lock):
    """Return how long a quorum was waited for, as the log tells [s]."""
    return float(re.search(rf"No quorum for lock '{lock}' after ([\d.]+) s", it.log())[1])


def test_without_a_quorum_a_task_may_be_skipped(outage):
    value = outage.results["no_quorum_skip"].get(timeout=100)
    assert value == {"skipped": "unavailable", "lock": "no_quorum_skip", "holder": {}}
    assert outage.bodies("no_quorum_skip") == []
    outage.wait_for_log(r"INFO.*Skipped task no_quorum_skip\[.*no quorum of lock nodes")


def test_without_a_quorum_a_task_may_fail(outage):
    with pytest.raises(QuorumUnavailable) as failed:
        outage.results["no_quorum_fail"].get(timeout=100)
    told_of_all_nodes(outage, failed.value)
    with pytest.raises(QuorumUnavailable):
        outage.results["no_quorum_wait"].get(timeout=100)
    assert outage.bodies("no_quorum_fail") == []


def told_of_all_nodes(outage, error):
    """What each node has said; two grants are no lock, and are told as they were."""
    votes = list(error.votes.values())
    for node, (label, vote) in zip(outage.nodes, error.votes.items(), strict=True):
        assert str(node.port) in label, vote
    assert all(vote.startswith("unreachable (") for vote in votes[:3]), votes
    assert votes[3:] == ["granted", "granted"]


def test_silent_nodes_cost_a_node_timeout(outage):
    assert isinstance(outage.silent, QuorumUnavailable)
    told_of_all_nodes(outage, outage.silent)
    assert waited(outage, "silence") > 0.9 * BRIEF["redlock_node_timeout"]


def test_a_quorum_is_waited_for_as_long_as_asked(outage):
    with pytest.raises(QuorumUnavailable):
        outage.results["no_quorum_wait"].get(timeout=100)
    assert waited(outage, "no_quorum_wait") > 0.95


def test_without_a_quorum_a_task_may_run_unlocked(outage):
    found = outage.results["no_quorum_unlocked"].get(timeout=100)
    assert (found["lock"], found["fence"]) == ("NotLocked", None)
    outage.wait_for_log(
        r"WARNING.*Running no_quorum_unlocked\[.*WITHOUT its lock.*could not be decided by a quorum"
    )


def test_a_task_without_a_quorum_is_put_off_so_often_and_no_more(outage):
    with pytest.raises(QuorumUnavailable):
        outage.results["no_quorum_once"].get(timeout=100)
    assert outage.log().count(f"no_quorum_once[{outage.results['no_quorum_once'].id}] in 1 s") == 1
    assert outage.bodies("no_quorum_once") == []


def test_retries_without_a_quorum_come_to_an_end(outage):
    result = outage.results["no_quorum_twice"]
    with pytest.raises(QuorumUnavailable):
        result.get(timeout=100)
    assert len(re.findall(rf"{result.id}\] received", outage.log())) == 3
    assert outage.bodies("no_quorum_twice") == []


def test_what_waits_for_a_quorum_runs_when_there_is_one(outage):
    late = {name: outage.results[name] for name in COMING_AGAIN}
    found = {name: result.get(timeout=100) for name, result in late.items()}
    assert {facts["lock"] for facts in found.values()} == {"HeldLock"}
    assert found["no_quorum_default"]["retries"] == 0
    assert found["no_quorum_retry"]["retries"] >= 1
    for name in late:
        (ran,) = outage.bodies(name)
        assert ran.started - outage.back > BRIEF["redlock_max_ttl"], "before old leases were over"


def test_nothing_is_left_in_the_queue(outage):
    for result in outage.results.values():
        result.get(timeout=100, propagate=False)
    outage.wait_until_quiet()
