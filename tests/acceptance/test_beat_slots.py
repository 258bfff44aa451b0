"""
The slots of a singleton beat against real beats and workers: which are published, and how often.

The beat tells in its log what became of each slot; a handler of the test's own records that
among the events of the bodies, on the same clock, with what the record's ``extra`` says it is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import time
import uuid
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import pytest
import redis

from celery_redlock import RedlockTask
from celery_redlock.beat.slot_records import Claim, Slots
from celery_redlock.plugin import plugin_for
from celery_redlock.task.messages.slot import Slot
from support.beats import last_slots, published, stage_beat, stopped_between_slots
from support.events import body, now, overlaps, read, record
from support.stage import stage
from support.waiting import eventually

#: Longer than a test lasts; and where a leader dies, longer than a stall [s].
TTL, SHORT_TTL = 120.0, 6.0
#: How long a run of a task takes that is due every second [s].
LONG = 3.5
#: How long the broker is away [s].
AWAY = 6.0
#: How old a slot may be when it is published [s]: no stall makes one too old.
DEADLINE = 60.0
#: What is told of a slot.
PUBLISHED, SKIPPED = "SlotPublished", "SlotSkipped"
#: From the clock of the events to Unix time [s].
TO_UNIX = time.time() - now()

#: Due every second: a task that takes a lock, one that forgets that it ran, and one without.
PLAIN = {
    name: {"task": name, "schedule": 1.0, "args": [name]} for name in ("locked", "forgets", "plain")
}


def nap(self, name, seconds=0.0):
    with body(
        os.environ["EVENTS"], name, id=self.request.id, slot=self.request.headers["redlock"]["slot"]
    ):
        time.sleep(seconds)  # stands in for work


def gated(self, name):
    gate = Path(os.environ["EVENTS"]).with_name(f"{name}.open")
    with body(
        os.environ["EVENTS"], name, id=self.request.id, slot=self.request.headers["redlock"]["slot"]
    ):
        while not gate.exists():
            time.sleep(0.01)


def note(self, name):
    """Do nothing; no worker is there."""


class Recorder(logging.Handler):
    def emit(self, told):
        if hasattr(told, "redlock"):
            record(os.environ["EVENTS"], told.redlock, level=told.levelname, text=told.getMessage())


def declare(app):
    if "STAGE" in os.environ:
        logging.getLogger("celery_redlock").addHandler(Recorder())

    def declared(name, run, base=RedlockTask, **options):
        app.task(name=name, bind=True, shared=False, base=base, **options)(run)

    declared("nap", nap, lock_key="{name}")
    declared("easy nap", nap, lock_key="{name}", overlap="allow")
    declared("gated", gated, lock_key="{name}")
    declared("gated, forgets", gated, lock_key="{name}", dedup_ttl=0)
    declared("locked", note)
    declared("forgets", note, dedup_ttl=0)
    declared("plain", note, base=app.Task)


def naps(name, task="nap", seconds=LONG, **options):
    """Return an entry that is due every second, for a task whose lock is called like it."""
    return {name: {"task": task, "schedule": 1.0, "args": [name, seconds], "options": options}}


def put_aside(name, task):
    """Return an entry whose messages wait in a queue of their own, which no worker reads."""
    return {name: {"task": task, "schedule": 3.0, "args": [name], "options": {"queue": "aside"}}}


SHOW = {
    **naps("skips"),
    **naps("beside", seconds=0.0),
    **naps("buffers", overlap="buffer_one"),
    **naps("allows", overlap="allow"),
    **naps("easy", "easy nap"),
    **naps("strict", "easy nap", overlap="skip"),
    **put_aside("once", "gated"),
    **put_aside("again", "gated, forgets"),
}


class Told(NamedTuple):
    """
    What was told of a slot.

    Attributes:
        due: When it was due [s, Unix time].
        at: When it was told [s, Unix time].
        text: In words.
        level: Of the record.
        task_id: Of the task that was published, if it was.
    """

    due: float
    at: float
    text: str
    level: str
    task_id: str | None


@contextlib.contextmanager
def named_stage(folder, schedule, ttl=TTL, **conf):
    rules = {"redlock_ttl": ttl, "redlock_max_ttl": ttl, "redlock_node_timeout": 1.0}
    with stage(__file__, folder, beat_schedule=schedule, **rules, **conf) as it:
        it.beat = lambda name="b1": stage_beat(it, name)
        it.told = lambda entry, *kinds: told(it, entry, kinds or (PUBLISHED, SKIPPED))
        it.dues = lambda entry, *kinds: [slot.due for slot in it.told(entry, *kinds)]
        yield it


def told(it, entry, kinds):
    found = []
    for event in read(it.events):
        match = re.search(rf"slot {re.escape(repr(entry))} of (\S+?):? ", event.get("text", ""))
        if event["kind"] not in kinds or not match:
            continue
        task = re.search(r" as .+\[(.+)\]", event["text"])
        due = datetime.fromisoformat(match[1]).timestamp()
        at = event["at"] + TO_UNIX
        found.append(Told(due, at, event["text"], event["level"], task and task[1]))
    return sorted(found, key=lambda slot: slot.due)


def row(dues):
    return [dues[0] + n for n in range(round(dues[-1] - dues[0]) + 1)]


def run_of(it, name, number):
    """Return when the run *number* of *name* started and ended [s, Unix time]; it has to end."""

    def ended():
        runs = it.bodies(name)
        return runs[number] if len(runs) > number and runs[number].finished else None

    run = eventually(ended, f"end of run {number} of {name!r}", timeout=100)
    return run.started + TO_UNIX, run.ended + TO_UNIX


def runs_of(it, name):
    """Return when the runs of *name* that have ended started and ended [s, Unix time]."""
    runs = it.bodies(name)
    return [(run.started + TO_UNIX, run.ended + TO_UNIX) for run in runs if run.finished]


def needlessly_skipped(it, name):
    """
    Return the slots of *name* that were skipped though no run had the lock when they fell due.

    It has it at most from when its message is published to when its result is stored.
    """
    skipped, spans = it.told(name, SKIPPED), []
    for slot in it.told(name, PUBLISHED):
        done = it.meta(slot.task_id).get("date_done")
        stored = datetime.fromisoformat(done).replace(tzinfo=timezone.utc) if done else None
        spans.append((slot.at, stored.timestamp() if stored else time.time()))
    return [s for s in skipped if not any(sent <= s.at and s.due <= end for sent, end in spans)]


def slots_of(it, name):
    return [event["slot"] for event in read(it.events, "start") if event["name"] == name]


def ids_of(it, name):
    return [event["id"] for event in read(it.events, "start") if event["name"] == name]


def skipped_at_run_time(it, name):
    texts = [event["text"] for event in read(it.events, "TaskSkipped")]
    found = (re.search(rf"\[(.+)\]: lock '{name}' is held by", text) for text in texts)
    return {match[1] for match in found if match}


def overlaps_of(it, name):
    return overlaps(event for event in read(it.events) if event.get("name") == name)


def messages(it, entry, queue="celery"):
    """Return the messages of *entry* at the broker, those in the hand of a worker too."""
    with redis.Redis.from_url(it.broker.url) as client:
        found = [json.loads(message) for message in client.lrange(queue, 0, -1)]
        found += [json.loads(message)[0] for message in client.hvals("unacked")]
    return [m for m in found if m["headers"].get("redlock", {}).get("slot", [None])[0] == entry]


def deliver(it, message):
    copy = json.loads(json.dumps(message))
    properties = copy["properties"]
    properties["delivery_tag"] = str(uuid.uuid4())
    properties["delivery_info"]["routing_key"] = "celery"  # where it goes when it is set aside
    with redis.Redis.from_url(it.broker.url) as client:
        client.lpush("celery", json.dumps(copy))


@pytest.fixture(scope="module")
def it(tmp_path_factory):
    """A stage with a beat and a worker that has a thread for every entry."""
    with named_stage(tmp_path_factory.mktemp("show"), SHOW) as it:
        it.worker(pool="threads", concurrency=10)
        beat = it.beat()
        yield it
        assert beat.alive
        beat.terminate()


# -- overlap -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["skips", "strict"])
def test_while_a_run_goes_on_its_later_slots_are_skipped(it, name):
    """By default, and if the entry says so though its task does not: no message, but a warning."""

    def skipped_during(run):
        began, ended = run
        return [slot for slot in it.told(name, SKIPPED) if began < slot.due < ended]

    # A beat that stands still for a whole run has none to skip.
    eventually(
        lambda: any(len(skipped_during(run)) >= 2 for run in runs_of(it, name)[:-1]),
        "a run with two slots that are skipped, and another one after it",
        timeout=100,
        every=0.1,
    )
    runs = runs_of(it, name)
    assert overlaps_of(it, name) == []
    # What falls due during a run is looked at during the run, or later than it should be.
    for began, ended in runs:
        assert all(s.at >= ended for s in it.told(name, PUBLISHED) if began < s.due < ended)
    words = rf"Skipped slot '{name}' of \S+: the run of an earlier slot has not ended"
    assert all(re.fullmatch(words, slot.text) for slot in it.told(name, SKIPPED))
    assert {slot.level for slot in it.told(name, SKIPPED)} == {"WARNING"}
    assert needlessly_skipped(it, name) == []
    dues = it.dues(name)
    assert dues == row(dues)


def test_another_entry_is_not_affected(it):
    began, _ = run_of(it, "skips", 0)
    _, ended = run_of(it, "skips", 1)
    dues = it.dues("beside")
    assert dues == row(dues)
    assert needlessly_skipped(it, "beside") == []  # a stall makes a brief run of its own long
    assert [slot for slot in it.told("beside", PUBLISHED) if began < slot.due < ended]
    eventually(lambda: len(it.told("beside", PUBLISHED)) >= 2 * int(LONG), "more", timeout=100)


@pytest.mark.parametrize("name", ["allows", "easy"])
def test_with_allow_all_slots_are_published_while_a_run_goes_on(it, name):
    """If the entry says so, or its task does and the entry does not: the lock decides later."""
    found = set()

    def some_are_skipped():
        found.update(
            slot.task_id
            for began, ended in runs_of(it, name)
            for slot in it.told(name, PUBLISHED)
            if began < slot.due and slot.at < ended
        )
        return len(found & skipped_at_run_time(it, name)) >= 2

    eventually(some_are_skipped, "two that lose the lock", timeout=100, every=0.1)
    ids = frozenset(found)
    eventually(lambda: ids <= skipped_at_run_time(it, name) | set(ids_of(it, name)), "their ends")
    assert it.told(name, SKIPPED) == []
    dues = it.dues(name)
    assert dues == row(dues)
    assert overlaps_of(it, name) == []


def test_with_buffer_one_exactly_one_waits_for_the_run_to_end(it):
    name, counts = "buffers", set()

    def has_waited(before, due_after):
        began, ended = before
        skipped = [slot for slot in it.told(name, SKIPPED) if began < slot.due < ended]
        return due_after < ended and len(skipped) >= 2

    def have_two_waited():
        known = {message["headers"]["id"] for message in messages(it, name)}
        counts.add(len(known - set(ids_of(it, name))))
        dues = [datetime.fromisoformat(due).timestamp() for _, due, _ in slots_of(it, name)]
        pairs = zip(runs_of(it, name), dues[1:], strict=False)
        return sum(has_waited(*pair) for pair in pairs) >= 2 and max(counts) > 0

    eventually(have_two_waited, "two runs that have waited", timeout=100, every=0.05)
    assert max(counts) == 1
    for began, ended in runs_of(it, name):
        meanwhile = [s for s in it.told(name, PUBLISHED) if began < s.due and s.at < ended]
        assert len(meanwhile) <= 1
    assert overlaps_of(it, name) == []
    assert skipped_at_run_time(it, name) == set()
    dues = it.dues(name)
    assert dues == row(dues)
    # Every one that was published has run or is the one that waits.
    ids = {slot.task_id for slot in it.told(name, PUBLISHED)}
    assert len(ids - set(ids_of(it, name))) <= 1


# -- a message that comes twice ------------------------------------------------------------


@pytest.fixture
def aside(it):
    def take(name):
        found = eventually(lambda: messages(it, name, "aside"), f"message of {name!r}", timeout=100)
        return found[-1]

    return take


def deliver_three_times(it, name, message):
    task_id = message["headers"]["id"]
    deliver(it, message)
    it.started(name)
    deliver(it, message)
    it.wait_for_log(rf"\[{task_id}\] for \d+ s:")
    assert len(it.bodies(name)) == 1
    it.events.with_name(f"{name}.open").touch()
    run_of(it, name, 0)
    deliver(it, message)


def test_a_message_carries_its_slot(it, aside):
    message = aside("once")
    header = message["headers"]["redlock"]
    (entry, due, overlap), task_id = header["slot"], header["task_id"]
    assert (entry, overlap, task_id) == ("once", "skip", message["headers"]["id"])
    assert header["id"] == task_id  # whoever publishes it again publishes the same
    moment = datetime.fromisoformat(due).timestamp()
    assert moment % 3.0 == 0.0
    eventually(lambda: moment in it.dues("once", PUBLISHED), "word of its publish")
    assert Slot("once", moment).task_id("stage") == task_id


def test_a_second_message_of_a_slot_does_not_run(it, aside):
    message = aside("once")
    deliver_three_times(it, "once", message)
    ends = rf"\[{message['headers']['id']}\] has finished before; this copy ends"
    eventually(lambda: len(re.findall(ends, it.log())) == 2, "end of both copies", timeout=100)
    assert slots_of(it, "once") == [message["headers"]["redlock"]["slot"]]


def test_without_a_memory_of_what_has_run_it_does(it, aside):
    """So the test above can fail: with ``dedup_ttl=0`` each copy runs, one after the other."""
    message = aside("again")
    deliver_three_times(it, "again", message)
    run_of(it, "again", 2)
    assert slots_of(it, "again") == 3 * [message["headers"]["redlock"]["slot"]]
    assert overlaps_of(it, "again") == []


# -- what was due while nobody could publish ---------------------------------------------------


@contextlib.contextmanager
def alone(folder, *entries, **conf):
    """Set a stage without a worker, so that what is published stays in the queue."""
    schedule = {name: PLAIN[name] for name in entries} | conf.pop("beat_schedule", {})
    with named_stage(folder, schedule, **conf) as it:
        yield it


def wait_for_published(it, names, after=0.0, times=2):
    def are_there():
        return all(
            len([due for due in it.dues(name, PUBLISHED) if due > after]) >= times for name in names
        )

    eventually(are_there, f"slots of {names} after {after}", timeout=100)


def wait_until_settled(it, names):
    """Wait until all nodes know that what was published is, with time until the next slot."""
    records = [f"stage/{name}" for name in names]

    def are_settled():
        found = Slots.on(plugin_for(it.app).locks).look(records)
        is_between = 0.2 < time.time() % 1.0 < 0.6
        return is_between and all(record.is_settled for record in found.values())

    eventually(are_settled, "moment between two slots")


def wait_until(moment):
    eventually(lambda: time.time() >= moment, f"moment {moment}", timeout=100)


def in_queue(it, name):
    return sorted(m.due for m in published(it.broker.url) if m.entry == name)


@pytest.mark.long
@pytest.mark.parametrize("results", ["with it", "nowhere"])
def test_slots_that_fall_due_while_the_broker_is_down_are_published_late(tmp_path, results):
    """
    Each of them once; the beat does not end, still leads, and says that it was late.

    One of them has no later slot of its entry that could take it along. Where results are kept
    by the same server, Celery waits for that with each publish; else the publish fails at once.
    """
    names, conf = ("locked", "plain"), {} if results == "with it" else {"result_backend": None}
    for ahead in (10, 50, 150):  # a slow machine may have begun too late for a moment
        moment = float(int(time.time()) + ahead)
        # A thousand intervals after the beginning of Unix time; then not for weeks.
        seldom = {"task": "plain", "schedule": moment / 1000, "args": ["seldom"]}
        folder = tmp_path / str(ahead)
        folder.mkdir()
        with alone(folder, *names, beat_schedule={"seldom": seldom}, **conf) as it:
            beat = it.beat()
            wait_for_published(it, names)
            it.broker.kill()
            if time.time() < moment:
                check_what_is_late(it, beat, names, moment)
                return
    pytest.fail("the broker was never down in time")


def check_what_is_late(it, beat, names, moment):
    """Have the broker come back after *moment*, at which the entry "seldom" is due."""
    down = time.time()
    beat.wait_for_log(r"(?s)Connection (error|refused)|Couldn't apply scheduled", timeout=100)
    wait_until(max(down + AWAY, moment + 1.5))
    assert beat.alive
    up = time.time()
    it.broker.restart()
    wait_for_published(it, names, after=up)
    wait_for_published(it, ["seldom"], times=1)
    assert beat.alive
    beat.terminate()

    for name in names:
        slots = it.told(name)
        assert it.dues(name, PUBLISHED) == row(it.dues(name)), name
        assert in_queue(it, name) == [slot.due for slot in slots if slot.at > up]
        late = [slot for slot in slots if down < slot.due < up]
        assert len(late) >= int(AWAY) - 1
        assert all(re.search(r", \d+\.\d s late$", s.text) for s in late if s.due < up - 1.5)
    assert it.dues("seldom") == in_queue(it, "seldom") == [moment]
    assert len(read(it.events, "LeaderElected")) == 1


def test_slots_that_fall_due_while_no_beat_runs(tmp_path):
    names = ("locked", "plain")
    with alone(tmp_path, *names, ttl=SHORT_TTL) as it:
        beat = it.beat()
        wait_for_published(it, names)

        def is_stopped():
            if not stopped_between_slots(it, beat, names):
                return False
            last = last_slots(it, names)
            if all(it.dues(name, PUBLISHED)[-1] == last[f"stage/{name}"].due for name in names):
                return True
            beat.signal(signal.SIGCONT)
            return False

        eventually(is_stopped, "moment between two slots", timeout=100, every=0.2)
        died = time.time()
        beat.kill()
        it.beat()
        wait_for_published(it, names, after=died, times=8)
        for name in names:
            assert it.dues(name, PUBLISHED) == row(it.dues(name, PUBLISHED))
            assert it.told(name, SKIPPED) == []
            found = in_queue(it, name)
            assert len(found) == len(set(found))


def test_slots_that_are_too_old_are_dropped(tmp_path):
    names = ("locked", "plain")
    with alone(tmp_path, *names, redlock_beat_starting_deadline=DEADLINE) as it:
        slots, last = Slots.on(plugin_for(it.app).locks), float(int(time.time()) - 1.5 * DEADLINE)
        for name in names:  # as of a leader that ended then
            claim = Claim(f"stage/{name}", last, "d" * 40, fence=1, keep=600.0)
            slots.claim(claim)
            slots.settle(claim)
        eventually(
            lambda: all(found.is_settled for found in last_slots(it, names).values()), "records"
        )
        begun = time.time()
        it.beat()
        wait_for_published(it, names, after=begun, times=3)
        elected = read(it.events, "LeaderElected")[0]["at"] + TO_UNIX

        for name in names:
            new = it.told(name, PUBLISHED)
            assert [slot.due for slot in new] == row([slot.due for slot in new])
            (dropped,) = it.told(name, SKIPPED)
            assert dropped.level == "WARNING"
            assert f"slot '{name}'" in dropped.text
            assert "too old to be made up for" in dropped.text
            since = re.search(r" and all since (\S+):", dropped.text)
            assert since
            assert datetime.fromisoformat(since[1]).timestamp() == last
            assert last + 1 <= dropped.due == new[0].due - 1
            assert dropped.due <= dropped.at - DEADLINE  # none that was still in time
            assert elected - DEADLINE <= new[0].due
            found = in_queue(it, name)
            assert len(found) == len(set(found))


def test_a_slot_that_a_dead_leader_may_have_published_is_published_if_a_copy_is_known(tmp_path):
    """With the same task id; that of a task that would run twice is not, and the log warns."""
    names = ("locked", "forgets", "plain")
    # The lease is short, for so long somebody else may be about to publish it.
    with alone(tmp_path, *names, ttl=SHORT_TTL) as it:
        slots = Slots.on(plugin_for(it.app).locks)
        due = float(int(time.time()) - 2)
        for name in names:
            slots.claim(Claim(f"stage/{name}", due, "d" * 40, fence=1, keep=600.0))
        it.beat()
        wait_for_published(it, names, after=due)

        locked = it.told("locked")
        assert locked[0].due == due
        assert locked[0].task_id == Slot("locked", due).task_id("stage")
        waiting = [m for m in published(it.broker.url) if (m.entry, m.due) == ("locked", due)]
        assert [m.task_id for m in waiting] == [locked[0].task_id]
        for name in ("forgets", "plain"):
            doubtful, *others = it.told(name)
            assert (doubtful.due, doubtful.task_id, doubtful.level) == (due, None, "WARNING")
            assert "an earlier leader died while publishing it" in doubtful.text
            assert f"slot '{name}'" in doubtful.text
            assert others
            # Another one may be published between the two looks.
            eventually(
                lambda name=name: (
                    it.dues(name, PUBLISHED) == [slot.due for slot in it.told(name)[1:]]
                ),
                "the journal and the log of one mind",
            )
            assert due not in in_queue(it, name)
        for name in names:
            dues = it.dues(name)
            assert dues == row(dues)


def test_a_stop_in_the_middle_of_a_publish_leaves_no_doubt(tmp_path):
    names = ("plain",)
    with alone(tmp_path, *names) as it:
        beat = it.beat()
        wait_for_published(it, names)
        wait_until_settled(it, names)
        it.broker.pause()
        last = it.dues("plain")[-1]

        def is_claimed():
            found = Slots.on(plugin_for(it.app).locks).look(["stage/plain"])["stage/plain"]
            return found.due > last and not found.is_settled and found.due

        doubtful = eventually(is_claimed, "slot that is claimed and not published")
        beat.signal(signal.SIGTERM)
        wait_until(time.time() + 0.5)  # by then it would have ended
        assert beat.alive
        it.broker.resume()
        beat.wait()
        assert in_queue(it, "plain")[-1] == doubtful
        it.beat("b2")
        wait_for_published(it, names, after=doubtful)

        assert it.told("plain", SKIPPED) == []
        waiting = in_queue(it, "plain")
        assert waiting == row(waiting)
        assert it.dues("plain") == row(it.dues("plain"))  # and each was told of
