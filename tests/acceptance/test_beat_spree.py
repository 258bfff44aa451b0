"""
Several beats on one schedule, and somebody who kills, pauses and restarts them and the nodes.

Every slot has to be published, and once. No worker runs: the messages stay in the queue, where they
are counted. A long spree, on a machine that does nothing else, also has all of them come in time:
nobody waits longer for one than a takeover takes after the last thing that was done to the beats.

The length and the chance are parameters:

    make proof ARGS=sprees
    REDLOCK_SPREE_SECONDS=600 make test-all ARGS="tests/acceptance/test_beat_spree.py --timeout 900"
"""

from __future__ import annotations

import math
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import pytest
from celery import Task, signals

from celery_redlock import RedlockTask
from celery_redlock.beat.slot_records import Slots
from celery_redlock.beat.slot_votes import Claimed, SlotState
from celery_redlock.lock.held import HeldLock
from celery_redlock.testing.servers import Server
from support.beats import Beat, Published, published, stage_beat, stopped_between_slots
from support.stage import Stage, stage
from support.waiting import eventually

pytestmark = pytest.mark.long

SECONDS = float(os.environ.get("REDLOCK_SPREE_SECONDS", "20"))
SEED = int(os.environ.get("REDLOCK_SPREE_SEED", str(random.randrange(10**6))))
#: Short, as leaders die and sleep here [s].
TTL = 2.0
#: A node that lost its memory does not vote for so long.
QUARANTINE = TTL * 1.05 + 1.0
#: Of a long spree: a takeover, and what a machine with two cores and all of this on them may add.
IN_TIME = TTL + 2.0 + 2.0 if "REDLOCK_SPREE_SECONDS" in os.environ else math.inf
#: How many things are done at least, and how many leaders there are.
DEEDS, LEADERS = 4, 2
ENTRIES = ("locked", "plain")
#: Between two things that are done [s]: less and more than a takeover takes.
PACE = 0.5, 5.0


def declare(app):
    @app.task(name="locked", base=RedlockTask, shared=False)
    def locked():
        pass

    @app.task(name="plain", base=Task, shared=False)
    def plain():
        pass

    app.conf.beat_schedule = {name: {"task": name, "schedule": 1.0} for name in ENTRIES}
    if "STAGE" not in os.environ:
        return

    @signals.before_task_publish.connect(weak=False)
    def note_time(headers=None, **_):
        headers["sent"] = time.time()

    break_on_purpose(os.environ.get("BROKEN", ""))


def break_on_purpose(parts):
    """Turn off what keeps two leaders apart, or what keeps their messages apart."""
    if "leaders" in parts:  # each has an election of its own, and wins it
        from celery_redlock.beat import scheduler, term

        class Alone(term.Elector):
            def __init__(self, locks, name, notify):
                super().__init__(locks, f"{name}:{os.getpid()}", notify)

        scheduler.Elector = Alone
    if "blind" in parts:  # a leader that was paused goes on as if nothing had happened
        HeldLock.lost_reason = property(lambda _: None)
    if "asleep" in parts:
        stop_before_a_send()
    if "markers" in parts:
        Slots.claim = lambda *_: Claimed(SlotState.CLAIMED)
        Slots.look = lambda *_: {}


def stop_before_a_send():
    """Stop where a test asks for it: after the last look whether we lead, before the send."""
    from celery_redlock.beat import slots

    send = slots.sent

    def send_or_stop(sender, ready):
        asked = Path("asleep")
        if asked.exists() and asked.read_text() == ready.name:
            asked.rename(f"asleep.{os.getpid()}")
            os.kill(os.getpid(), signal.SIGSTOP)
        return send(sender, ready)

    slots.sent = send_or_stop


class Farm:
    """
    The beats of a stage.

    Attributes:
        it: The stage.
        env: Of each beat.
        beats: Those that are to be alive, by their name.
        paused: Those that are paused, and until when [s, monotonic].
        blows: When something was done that may have cost a leader its place [s, Unix time].
        logs: What the beats that are gone have written.
    """

    def __init__(self, it: Stage, env: dict[str, str]) -> None:
        self.it = it
        self.env = env
        self.beats: dict[str, Beat] = {}
        self.paused: dict[str, float] = {}
        self.blows: list[float] = []
        self.logs: list[str] = []

    def start(self, name: str) -> None:
        self.beats[name] = stage_beat(self.it, name, env=self.env)

    def leader(self) -> str | None:
        said = {name: beat.log() for name, beat in self.beats.items()}
        for name, log in said.items():
            if log.rfind("Leads as") > log.rfind("No longer leads") and name not in self.paused:
                return name
        return None

    def told(self) -> str:
        return "\n".join([*self.logs, *(beat.log() for beat in self.beats.values())])

    def leaders(self) -> int:
        return self.told().count("Leads as")

    def end(self, name: str, how: Callable[[Beat], None]) -> None:
        beat = self.beats.pop(name)
        assert beat.alive, f"beat {name} ended by itself:\n{beat.log()}"
        how(beat)
        self.logs.append(beat.log())
        beat.stop()

    def is_between_slots(self) -> bool:
        """Stop all beats, and return whether nobody was about to publish; else they go on."""
        first, *others = self.beats.values()
        for beat in others:
            beat.signal(signal.SIGSTOP)
        if stopped_between_slots(self.it, first, ENTRIES):
            return True
        for beat in others:
            beat.signal(signal.SIGCONT)
        return False

    def wake(self, *, everybody: bool = False) -> None:
        for name, until in list(self.paused.items()):
            if everybody or time.monotonic() >= until:
                del self.paused[name]
                self.beats[name].signal(signal.SIGCONT)

    def close(self) -> str:
        """Check that nobody has ended by itself, shut all down, and return all logs."""
        self.wake(everybody=True)
        for name in list(self.beats):
            self.end(name, Beat.terminate)
        return "\n".join(self.logs)


@contextmanager
def beats(folder: Path, number: int, broken: str = "", **conf: object) -> Iterator[Farm]:
    conf = {
        "redlock_ttl": TTL,
        "redlock_max_ttl": TTL,
        "redlock_node_timeout": 0.5,
        **conf,
    }
    with stage(__file__, folder, **conf) as it:
        farm = Farm(it, {"BROKEN": broken})
        for n in range(number):
            farm.start(f"b{n}")
        eventually(lambda: len(published(it.broker.url)) >= len(ENTRIES), "first slot", timeout=100)
        yield farm


def errors(
    found: list[Published],
    until: float,
    blows: Sequence[float] | None = None,
    left_out: Sequence[str] = (),
) -> list[str]:
    """
    Return what is wrong with what was published of the slots up to *until* [s, Unix time].

    With *blows* also what came later than a takeover after the last of them. What is *left_out* on
    purpose, as `doubtful` returns it, is not missing.
    """
    wrong = []
    for entry in ENTRIES:
        # A leader that dies between publishing and settling leaves a doubt: the next one publishes
        # a RedlockTask again, under the same id, and the second copy ends when it is run.
        mine = [one for one in found if one.entry == entry]
        if entry == "locked":
            mine = list({(one.due, one.task_id): one for one in mine}.values())
        slots = Counter(round(one.due) for one in mine)
        if not slots:
            wrong.append(f"{entry}: never")
            continue
        wrong += [f"{entry} {due}: {n} times" for due, n in slots.items() if n > 1]
        missing = set(range(min(slots), int(until))) - set(slots)
        missing -= {due for due in missing if f"{entry} {due}" in left_out}
        wrong += [f"{entry} {due}: never" for due in sorted(missing)]
    for one in found if blows is not None else ():
        # Somebody may have been struck while it was about to publish: the next one has its time.
        free = max([one.due, *(blow for blow in blows if blow <= one.sent)])
        if one.sent - free > IN_TIME:
            wrong.append(f"{one.entry} {one.due:.0f}: {one.sent - one.due:.1f} s late")
    return wrong


def doubtful(logs: str) -> list[str]:
    """
    Return the slots that a beat has left out, as it says itself in *logs*.

    Those of plain tasks that an earlier leader died over: nobody knows whether it published them.
    """
    words = r"slot '(plain)' of (\S+): an earlier leader died while publishing it"
    return [
        f"{entry} {datetime.fromisoformat(due).timestamp():.0f}"
        for entry, due in re.findall(words, logs)
    ]


def strike(farm: Farm, chance: random.Random, spare: list[Server]) -> str:
    deeds = ["kill", "kill", "pause", "pause", "restart", "nodes"]
    deed = chance.choice([d for d in deeds if d != "nodes" or spare])
    if deed == "nodes":
        for node in chance.sample(spare, chance.choice([1, 2])):
            node.kill()
            node.restart()
        return "nodes"
    awake = [name for name in farm.beats if name not in farm.paused]
    victim = farm.leader() if chance.random() < 0.7 else None
    victim = victim or chance.choice(awake)
    if deed == "pause" and len(awake) > 1:
        farm.paused[victim] = time.monotonic() + 3 * TTL
        farm.beats[victim].signal(signal.SIGSTOP)
    else:
        farm.end(victim, Beat.kill if deed == "kill" else Beat.terminate)
        farm.start(victim)
    return f"{deed} {victim}"


def test_every_slot_is_published_once_whatever_happens_to_beats_and_nodes(tmp_path):
    chance = random.Random(SEED)
    done: list[str] = []
    with beats(tmp_path, 3) as farm:
        end, nodes_fit = time.monotonic() + SECONDS, 0.0
        while time.monotonic() < end or len(done) < DEEDS or farm.leaders() < LEADERS:
            time.sleep(chance.uniform(*PACE))  # the rhythm of what is done
            farm.wake()
            spare = farm.it.nodes if time.monotonic() > nodes_fit else []
            leader, begun = farm.leader(), time.time()
            done.append(strike(farm, chance, spare))
            if done[-1].split()[-1] in (leader, "nodes", "None") or leader is None:
                farm.blows += [begun, time.time()]
            if done[-1] == "nodes":
                nodes_fit = time.monotonic() + QUARANTINE + 2.0
        farm.wake(everybody=True)
        settled = time.time()
        with suppress(AssertionError):  # which ones are missing says more than that some are
            eventually(lambda: not missing_until(farm, settled), "all", timeout=60, every=0.1)
        found = published(farm.it.broker.url)
        logs = farm.close()
    told = f"seed {SEED}: {done}"
    left_out = doubtful(logs)
    assert errors(found, settled, farm.blows, left_out) == [], told
    assert len(left_out) <= len(farm.blows) / 2, told
    assert has_no_error(logs), f"{told}\n{logs}"
    assert len({one.entry for one in found}) == len(ENTRIES)
    if math.isfinite(IN_TIME):
        late = [one for one in found if one.sent - one.due > 1.5]
        assert len(late) <= len(farm.blows) / 2 * (TTL + 2.0) * len(ENTRIES), told


def has_no_error(logs: str) -> bool:
    """But for what a signal tears apart within a finalizer of Celery's results."""
    torn = r"Exception ignored (?:in|while)(?:[^\n]*\n){1,6}?[^\n]*Traceback"
    chained = r"(?:During handling|direct cause)(?:[^\n]*\n){1,6}?[^\n]*Traceback"
    return re.sub(f"{torn}|{chained}", "", logs).count("Traceback") == 0


def missing_until(farm: Farm, moment: float, spare: str = "nobody") -> list[str]:
    wrong = errors(published(farm.it.broker.url), moment, left_out=doubtful(farm.told()))
    return [words for words in wrong if words.endswith("never") and not words.startswith(spare)]


def newest(farm: Farm, entry: str) -> float:
    """Return when the newest slot of *entry* that was published was due [s, Unix time]."""
    return max(one.due for one in published(farm.it.broker.url) if one.entry == entry)


@pytest.mark.parametrize("how", ["paused", "killed"])
def test_a_majority_down_for_two_leases_costs_nothing_but_time(tmp_path, how):
    with beats(tmp_path, 2) as farm:
        down = farm.it.nodes[:3]
        eventually(farm.is_between_slots, "moment between two slots", timeout=100, every=0.2)
        for node in down:
            node.pause() if how == "paused" else node.kill()
        stopped = time.time()
        for beat in farm.beats.values():
            beat.signal(signal.SIGCONT)
        eventually(lambda: time.time() > stopped + 2.5 * TTL, "two leases", every=0.1)
        meanwhile = [one for one in published(farm.it.broker.url) if one.due > stopped]
        for node in down:
            node.resume() if how == "paused" else node.start()
        back = time.time()
        eventually(
            lambda: not missing_until(farm, back + 3.0),
            "all slots",
            timeout=100,
            every=0.1,
        )
        found = published(farm.it.broker.url)
        logs = farm.close()
    assert errors(found, back + 3.0) == []
    assert meanwhile == []
    assert "no quorum of lock nodes" in logs
    assert has_no_error(logs), logs


@pytest.mark.parametrize("broken", ["leaders", "blind"])
def test_two_leaders_at_once_publish_every_slot_once(tmp_path, broken):
    """Whoever believes to lead: the record on the nodes has the last word."""
    with two_leaders(tmp_path, broken) as farm:
        begun = time.time()
        eventually(lambda: time.time() > begun + 2 * TTL, "two leases", every=0.1)
        eventually(lambda: not missing_until(farm, begun + 2 * TTL), "all slots")
        found = published(farm.it.broker.url)
        farm.close()
    assert errors(found, begun + 2 * TTL) == []


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_leader_that_slept_between_its_look_and_the_send_adds_no_run(tmp_path, entry):
    """
    It sends that one message when it wakes, for no look can come after the last one.

    The new leader has left that slot out, or has published a run with the same ids.
    """
    with beats(tmp_path, 2, "asleep") as farm:
        (tmp_path / "asleep").write_text(entry)
        found = eventually(lambda: [*tmp_path.glob("asleep.*")], "sleep", timeout=100)
        slept = time.time()
        first = next(name for name in farm.beats if found[0].suffix == f".{farm.beats[name].pid}")
        second = next(name for name in farm.beats if name != first)
        farm.beats[second].wait_for_log("Leads as", timeout=100)
        eventually(lambda: time.time() > slept + 3 * TTL, "three leases", every=0.1)
        eventually(lambda: not missing_until(farm, slept + 2 * TTL, spare=entry), "all slots")
        eventually(lambda: newest(farm, entry) > slept, "what comes after it", timeout=100)
        terms_over = farm.beats[first].log().count("No longer leads")  # a stall may end one, too
        woke = time.time()
        farm.beats[first].signal(signal.SIGCONT)
        eventually(
            lambda: farm.beats[first].log().count("No longer leads") > terms_over,
            "end of its term",
            timeout=100,
        )
        found = published(farm.it.broker.url)
        farm.close()
    (late,) = [one for one in found if one.sent > woke and one.due <= slept]
    same = [one for one in found if (one.entry, one.due) == (entry, late.due)]
    assert late.entry == entry
    assert len(same) == (1 if entry == "plain" else 2)
    assert len({(one.task_id, one.publish_id) for one in same}) == 1
    assert errors(found, slept + 2 * TTL) == []


@pytest.mark.parametrize("broken", ["leaders", "blind"])
def test_two_leaders_without_records_are_caught_by_these_tests(tmp_path, broken):
    """The twin: with the records off, too, slots are published twice."""
    with two_leaders(tmp_path, f"{broken},markers") as farm:
        eventually(
            lambda: any("2 times" in words for words in errors(published(farm.it.broker.url), 0.0)),
            "a slot that was published twice",
            timeout=100,
        )
        farm.close()


@contextmanager
def two_leaders(folder: Path, broken: str) -> Iterator[Farm]:
    with beats(folder, 2, broken) as farm:
        if "blind" in broken:
            first = eventually(farm.leader, "leader", timeout=100)
            second = next(name for name in farm.beats if name != first)
            farm.beats[first].signal(signal.SIGSTOP)
            farm.beats[second].wait_for_log("Leads as", timeout=100)
            farm.beats[first].signal(signal.SIGCONT)
        for beat in farm.beats.values():
            beat.wait_for_log("Leads as", timeout=100)
        yield farm


def test_without_records_the_spree_finds_what_is_wrong(tmp_path):
    """The twin of the first test: with nothing remembered, a takeover loses slots."""
    with beats(tmp_path, 1, "markers") as farm:
        (first,) = farm.beats
        farm.end(first, Beat.kill)
        died = time.time()
        eventually(lambda: time.time() > died + 2.5, "two slots that nobody publishes", every=0.1)
        farm.start(second := "b1")
        farm.beats[second].wait_for_log("Published slot", timeout=100)
        found = published(farm.it.broker.url)
        farm.close()
    assert errors(found, max(one.due for one in found)) != []
