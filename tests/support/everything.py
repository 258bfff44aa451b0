"""All that the library does on a node, each feature by itself, for nodes of every kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from celery_redlock import LockTaken, Redlock
from celery_redlock.beat.slot_records import Claim, Slots
from celery_redlock.lock.algorithm.effects import Ask
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import Marker
from celery_redlock.lock.scripts.votes import VoteKind
from celery_redlock.lock.waiting.waiting import InLine, wait_request
from celery_redlock.ops.doctor.nodes import gather_nodes
from celery_redlock.reading.all_locks import AllLocks, AllReservations
from celery_redlock.reading.health import check, probe
from celery_redlock.reading.journal import JournalReader, write_record
from celery_redlock.reading.leaks import Leaks
from celery_redlock.reading.nodes import bootstrap, node_statuses
from celery_redlock.reading.places import read_lock
from celery_redlock.reading.release import release_seen
from celery_redlock.reading.tally import HOUR, Counts, tally_request
from celery_redlock.reading.tally_reader import TallyReader
from celery_redlock.unique.requests import AS_IT_IS, OVER, Start, Trigger
from celery_redlock.unique.reservations import Reservations
from celery_redlock.unique.reserving import Started
from support.waiting import eventually

__all__ = ["HARMLESS", "TASKS", "TOOLS", "Everything"]

#: Rights that are made use of where they are there, and not missed.
HARMLESS = ("+client|setname", "+client|setinfo", "+config|get")


class Everything:
    """
    Uses all that the library does on a node, each feature by itself.

    Args:
        url: Of the node, as the user in question.
        admin: May do everything.
        rules: Of the locks.
    """

    def __init__(self, url: str, admin: Any, rules: Rules) -> None:
        self.url = url
        self.admin = admin
        self.locks: Any = Redlock([url], rules)
        self.rules: Rules = self.locks.rules
        self.said: list[str] = []

    def key(self, record: str) -> str:
        """Return the Redis key of a record."""
        return f"{self.rules.prefix}:{record}"

    def features(self, names: Sequence[str]) -> dict[str, str]:
        """Return what went wrong with which of the features *names*; empty if nothing."""
        failed = {}
        for name in names:
            try:
                getattr(self, name)()
            except Exception as problem:  # noqa: BLE001  whatever a missing right leads to
                failed[name] = repr(problem)
        self.said.append(str(failed))
        return failed

    def enrolment(self) -> None:
        """A new node is let vote, and tells that it does."""
        (told,) = bootstrap([self.url], self.rules).values()
        assert told == "enrolled", told
        assert not (problems := check(self.locks)), problems

    def locking(self) -> None:
        """A lock is taken, refused to another, extended, seen and released."""
        lease = self.locks.acquire("n")
        assert lease.fence
        lease = self.locks.extend(lease)
        (view,) = self.locks.inspect("n")
        assert view.holder, view
        outcome = self.locks.release(lease)
        assert outcome.name == "RELEASED", outcome

    def refusal(self) -> None:
        """Who is refused is told for how long yet."""
        lease = self.locks.acquire("mine")
        with pytest.raises(LockTaken) as taken:
            self.locks.acquire("mine")
        assert taken.value.holder["ttl"] > 0
        self.locks.release(lease)

    def places_and_names(self) -> None:
        """Two hold a lock with two places, a third does not; two names are taken, or none."""
        taken = [self.locks.take(LockRequest("few", 60.0, limit=2)) for _ in range(2)]
        with pytest.raises(LockTaken):
            self.locks.take(LockRequest("few", 60.0, limit=2))
        both = self.locks.take_all([LockRequest("one", 60.0), LockRequest("two", 60.0)])
        with pytest.raises(LockTaken):
            self.locks.take_all([LockRequest("one", 60.0), LockRequest("other", 60.0)])
        for held in (*taken, *both.values()):
            self.locks.give_back(held, waits=True)
        self.locks.release(self.locks.acquire("other"))

    def finished_tasks(self) -> None:
        """The marker of one that has finished is set with the release, and taken away."""
        held = self.locks.take(LockRequest("marked", 60.0))
        self.locks.give_back(held, keep=30.0, marker=Marker("of a task", "done", 60.0))
        self.locks.inspect("marked")  # answers come in order: now the release has arrived
        assert self.admin.get(self.key("marker:of a task")) == b"done"
        assert 0 < self.admin.pttl(self.key("lock:marked")) <= 30_000
        self.locks.mark(Marker("of a task", "done", 0.0), wait=True)
        assert not self.admin.exists(self.key("marker:of a task"))

    def health(self) -> None:
        """A probe writes, too."""
        (health,) = probe(self.locks)
        assert not health.problem, health.problem

    def forgotten_scripts(self) -> None:
        """What a node has forgotten is sent again."""
        self.admin.script_flush()
        self.locks.release(self.locks.acquire("forgotten"))

    def queued_markers(self) -> None:
        """One runs, triggers are merged into the next one, and that one takes its turn."""
        queued: Any = Reservations.on(self.locks)

        def trigger(task: str) -> Trigger:
            return Trigger("q", 60.0, {"task_id": task}, arguments=b"[]")

        first = queued.reserve(trigger("a"))
        merged = queued.reserve(trigger("b"))
        assert merged.merged == 1, merged
        lease = self.locks.acquire("q")
        begun = Start({"task_id": "a"}, lease.token, "a/0/0", 60.0, 60.0)
        assert isinstance(queued.start("q", first.token, begun, wait=True), Started)
        following = queued.reserve(trigger("c"))
        assert following.before, following
        queued.end("q", first.token, OVER, wait=True)
        self.locks.release(lease)
        lease = self.locks.acquire("q")
        begun = Start({"task_id": "c"}, lease.token, "c/0/0", AS_IT_IS, 60.0)
        assert isinstance(queued.start("q", following.token, begun, wait=True), Started)
        queued.end("q", following.token, "wait", life=60.0, wait=True)
        queued.end("q", following.token, OVER, wait=True)
        self.locks.release(lease)
        assert not self.admin.keys(self.key("queued:*")) + self.admin.keys(self.key("next:*"))

    def waiting(self) -> None:
        """One that waits is told by the release; when one more may not, the node looks who does."""
        lease, room = self.locks.acquire("line"), self.locks.listener.room
        hear, hints = room.hear, list[Any]()

        def heard(*words: Any) -> None:
            hints.append(words)
            hear(*words)

        room.hear = heard
        with ThreadPoolExecutor() as others:
            waiter = others.submit(self.locks.acquire, "line", wait=60)
            try:
                self.wait_until(lambda: self.admin.zcard(self.key("line:line")), "one that waits")
                self.wait_until(lambda: self.admin.pubsub_channels(self.key("wake:*")), "ears")
                another = InLine("line", "f" * 32, time.time(), {})
                ballot = self.locks.driver.ask(Ask(wait_request(self.rules, another, 1)))
                assert ballot[0].kind is VoteKind.REFUSED, ballot
                assert not hints, "told of a lock that is held"
            finally:
                if self.locks.release(lease).name != "RELEASED":
                    self.admin.delete(self.key("lock:line"))  # or that one waits for it to lapse
            lease = waiter.result()
        eventually(lambda: hints, "hint", timeout=5)  # short: it was sent with the release
        self.locks.release(lease)
        assert not self.locks.inspect("line")[0].holder
        assert self.admin.exists(self.key("line:line"), self.key("waiters:line")) == 0

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for what comes at once if a right for it is not missing, which the server notes."""
        before = self.refusals()
        eventually(lambda: condition() or self.refusals() > before, what)
        eventually(condition, what, timeout=5)  # short: what is refused is asked in vain

    def refusals(self) -> int:
        """Return how often the server has noted that a right was missing that is of use."""
        log = self.admin.acl_log()
        return sum(entry["count"] for entry in log if f"+{entry['object']}" not in HARMLESS)

    def slots_of_beat(self) -> None:
        """A slot is claimed with the holder of its task's lock, withdrawn, claimed and settled."""
        due = float(int(time.time()))
        lease = self.locks.acquire("report")

        def claim(due: float, fence: int) -> Claim:
            return Claim("shop/report", due, f"{fence:040x}", fence, 60.0, lock="report")

        claimed = Slots.on(self.locks).claim(claim(due - 1, 1))
        assert (claimed.state.name, bool(claimed.holder)) == ("CLAIMED", True), claimed
        Slots.on(self.locks).withdraw(claim(due - 1, 1))
        assert Slots.on(self.locks).look(["shop/report"]) == {}
        assert Slots.on(self.locks).claim(claim(due, 1)).state.name == "CLAIMED"
        Slots.on(self.locks).settle(claim(due, 1))
        assert Slots.on(self.locks).look(["shop/report"])["shop/report"].is_settled
        self.locks.release(lease)

    def journal(self) -> None:
        """What happened is noted."""
        write_record(self.locks, {"id": "1", "event": "x", "at": time.time()})
        probe(self.locks)
        assert self.admin.xlen(self.key("journal")) == 1

    def tally(self) -> None:
        """What tasks did is counted, and read again by ``redlock report``."""
        now = time.time()
        counts = Counts({"ran": 3}, {})
        self.locks.driver.tell(tally_request(self.rules, int(now // HOUR), "shop.bill", counts))
        probe(self.locks)
        assert self.admin.zrange(self.key(f"tally:{int(now // HOUR)}"), 0, -1) == [b"shop.bill"]
        assert "shop.bill" in TallyReader([self.url], self.rules).read(now, now).tasks

    def leaked_keys(self) -> None:
        """A worker finds keys that never expire, for the metric and its alert."""
        self.admin.set(self.key("lock:leaked"), "e" * 40)
        try:
            found = Leaks([self.url], self.rules).look(self.locks.labels)
        finally:
            self.admin.delete(self.key("lock:leaked"))
        assert list(found.values()) == [1], found

    def status(self) -> None:
        """``redlock status``."""
        (status,) = node_statuses([self.url], self.rules)
        assert (status.state, status.problem) == ("up", ""), status

    def listing(self) -> None:
        """``redlock ls`` and the web page."""
        lease = self.locks.acquire("listed")
        names = [view.name for view in AllLocks([self.url], self.rules)]
        self.locks.release(lease)
        assert "listed" in names, names

    def explanation(self) -> None:
        """``redlock why``."""
        lease = self.locks.acquire("why")
        lock = read_lock([self.url], self.rules, "why")
        (view,) = lock.views
        self.locks.release(lease)
        assert (lock.silent, bool(view.holder)) == ([], True), lock

    def reading_the_journal(self) -> None:
        """``redlock tail`` and ``why``."""
        with ExitStack() as stack:
            reader = JournalReader([self.url], self.rules)
            stack.callback(reader.close)
            write_record(self.locks, {"id": "2", "event": "x", "at": time.time()})
            probe(self.locks)
            assert "2" in {record["id"] for record in reader.recent()}
            write_record(self.locks, {"id": "3", "event": "x", "at": time.time()})
            probe(self.locks)
            assert [record["id"] for record in reader.new()] == ["3"]

    def taking_away(self) -> None:
        """``redlock release``, of a lock and of a reservation, which ``ls --reserved`` lists."""
        lease = self.locks.acquire("stuck")
        (told,) = release_seen([self.url], self.rules, "stuck", lease.token[:8]).values()
        assert told == "released", told
        queued: Any = Reservations.on(self.locks)
        reserved = queued.reserve(Trigger("stuck", 60.0, {"task_id": "a"}))
        (seen,) = AllReservations([self.url], self.rules)
        assert reserved.token.startswith(seen.reservation.seen)
        (told,) = release_seen([self.url], self.rules, "stuck", seen.reservation.seen).values()
        assert told == "released", told
        assert list(AllReservations([self.url], self.rules)) == []

    def diagnosis(self) -> None:
        """``redlock doctor``."""
        (facts,) = gather_nodes([self.url], self.rules, lambda _: None)
        denied = (facts.denied, facts.denied_to_wake, facts.denied_to_tools)
        assert (facts.problem, *denied) == ("", [], [], []), facts


TASKS: tuple[str, ...] = ("enrolment", "locking", "refusal", "finished_tasks", "health")
TASKS += ("places_and_names", "queued_markers", "waiting", "slots_of_beat", "journal", "tally")
TASKS += ("leaked_keys", "forgotten_scripts")
TOOLS: tuple[str, ...] = ("status", "listing", "explanation", "reading_the_journal")
TOOLS += ("taking_away", "diagnosis")
