"""
`lead` over processes that are killed, paused and stopped: one leads at a time, each in a new term.

Two of three processes lead with `Redlock`, and one with `AsyncRedlock`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from contextlib import ExitStack

import pytest

from celery_redlock import AsyncRedlock, LockTaken
from celery_redlock.events import LeaderDeposed, LeaderElected
from support.script import Script, enrol
from support.stalls import Stalls
from support.stored import RENEWED, clients_of
from support.waiting import eventually

TTL = 3.0
#: How soon after a leader's death another one leads [s].
IN_TIME = TTL + 2.0
RULES = {"ttl": TTL, "max_ttl": TTL, "node_timeout": 1.0}

#: How a process leads: it notes each moment at which it may trust its term.
HEAD = """
import asyncio
from celery_redlock import AsyncRedlock

notes = os.open({notes!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def note(term):
    at = time.monotonic()
    try:
        term.ensure_held()
    except LockLost:
        return
    os.write(notes, json.dumps([term.fence, {number}, at]).encode() + b"\\n")
"""
SYNC = """
is_over = []
signal.signal(signal.SIGTERM, lambda *_: is_over.append(True))
tell(ready=True)
while not is_over:
    for term in lock.lead("billing"):
        note(term)
        if is_over:
            break
        time.sleep(0.01)
"""
ASYNC = """
async def main():
    locks = AsyncRedlock.of(lock)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
    tell(ready=True)
    async for term in locks.lead("billing"):
        note(term)
        await asyncio.sleep(0.01)

with contextlib.suppress(asyncio.CancelledError):
    asyncio.run(main())
"""


class Candidates:
    """
    Three processes that want to lead.

    Args:
        urls: Of the nodes.
        notes: The file that they write to.
        prefixes: Of the keys of each.
    """

    def __init__(self, urls, notes, prefixes=("redlock",) * 3):
        self._urls, self._notes, self._prefixes = urls, notes, prefixes
        self._stack = ExitStack()
        self.running = {}
        self._noted, self._read = [], 0

    def __enter__(self):
        for number in range(3):
            self.start(number)
        return self

    def __exit__(self, *_):
        self._stack.close()

    def start(self, number):
        source = HEAD.format(notes=str(self._notes), number=number)
        source += ASYNC if number == 2 else SYNC
        rules = {**RULES, "prefix": self._prefixes[number]}
        self.running[number] = self._stack.enter_context(Script(source, self._urls, **rules))
        assert self.running[number].told() == {"ready": True}

    def noted(self):
        """Return what was noted: fence, number and moment."""
        if self._notes.exists():
            with self._notes.open("rb") as notes:
                notes.seek(self._read)
                whole = notes.read().rpartition(b"\n")[0]  # one may be in the middle of a line
            self._noted += map(json.loads, whole.splitlines())
            self._read += len(whole) + bool(whole)
        return self._noted

    def leader(self, after=0):
        """Return the latest term above *after*, and who leads in it."""
        fence, number, _ = eventually(
            lambda: max((note for note in self.noted() if note[0] > after), default=None),
            "another leader",
        )
        return fence, number

    def strike(self, how):
        """
        Strike the leader.

        Returns:
            How long it took until another term began, and the longest stall meanwhile [s].
        """
        fence, number = self.leader()
        script = self.running[number]
        with Stalls() as stalls:
            struck = time.monotonic()
            os.kill(script.process.pid, how)
            if how == signal.SIGTERM:
                script.ended()
            later, _ = self.leader(after=fence)
        began = min(at for one, _, at in self.noted() if one == later)
        if how == signal.SIGSTOP:
            os.kill(script.process.pid, signal.SIGCONT)
        else:
            script.__exit__(None, None, None)
            self.start(number)
        return began - struck, stalls.longest


def faults(noted):
    """Return the terms that two had, and pairs of terms that overlap in time."""
    terms = {}
    for fence, number, at in noted:
        terms.setdefault(fence, []).append((number, at))
    shared = [fence for fence, notes in terms.items() if len({who for who, _ in notes}) > 1]
    spans = [(min(notes)[1], max(at for _, at in notes)) for _, notes in sorted(terms.items())]
    overlapping = [pair for pair in itertools.pairwise(spans) if pair[0][1] > pair[1][0]]
    return shared + overlapping


LONG = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("strikes", [9, pytest.param(100, marks=LONG)])
def test_one_leads_at_a_time_through_kills_pauses_and_stops(five_nodes, tmp_path, strikes):
    kinds = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)
    took = {kind: [] for kind in kinds}
    with Candidates(enrol(five_nodes[:3], **RULES), tmp_path / "notes") as candidates:
        for strike in range(strikes):
            kind = kinds[strike % 3]
            took[kind].append(candidates.strike(kind))
            eventually(lambda: random.random() < 0.05, "some moment")  # within a term
        assert faults(candidates.noted()) == []
        assert {number for _, number, _ in candidates.noted()} == {0, 1, 2}
    told = {
        kind.name: [(round(one, 2), round(stall, 2)) for one, stall in sorted(took[kind])]
        for kind in kinds
    }
    print(told)  # noqa: T201  how long it took, and the longest stall
    for kind, limit in zip(kinds, (IN_TIME, TTL / 2, IN_TIME), strict=True):
        late = [one for one, stall in took[kind] if one > limit + stall]
        assert len(late) <= 1 + strikes // 30, told  # a machine may stall


def test_leaders_who_do_not_share_their_keys_are_found_out(five_nodes, tmp_path):
    """The twin: three locks, and so three who lead at once."""
    prefixes = ("one", "two", "three")
    for prefix in prefixes:
        urls = enrol(five_nodes[:3], **RULES, prefix=prefix)
    with Candidates(urls, tmp_path / "notes", prefixes) as candidates:
        eventually(lambda: len({who for _, who, _ in candidates.noted()}) == 3, "three leaders")
        eventually(lambda: faults(candidates.noted()), "what the check finds")


def in_order_of_their_kind(told):
    return [type(event) for event in told if isinstance(event, LeaderElected | LeaderDeposed)]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_term_that_is_lost_is_followed_by_another(five_nodes, locks, is_async):
    told = []
    locks = locks(five_nodes[:3], observers=[told.append], ttl=RENEWED)

    def lose(term):
        for client in clients_of(five_nodes[:3]):
            client.delete(*client.keys("redlock:lock:*"))
        term.lose("stolen")

    async def awaited():
        fences = []
        async for term in AsyncRedlock.of(locks).lead("billing"):
            fences.append(term.fence)
            if len(fences) == 3:
                break
            lose(term)
        return fences

    if is_async:
        fences = asyncio.run(awaited())
    else:
        fences = []
        for term in locks.lead("billing"):
            fences.append(term.fence)
            if len(fences) == 3:
                break
            lose(term)
    assert fences == sorted(set(fences))
    eventually(lambda: not locks.held, "resignation")
    assert in_order_of_their_kind(told) == [LeaderElected, LeaderDeposed] * 3
    assert [it.reason for it in told if isinstance(it, LeaderDeposed)] == [
        *["stolen"] * 2,
        "resigned",
    ]


def test_a_leader_keeps_its_term_from_round_to_round(five_nodes, locks):
    ours, theirs = locks(five_nodes[:3], ttl=RENEWED), locks(five_nodes[:3], bootstrap=False)
    terms = ours.lead("billing")
    first = next(terms)
    assert all(next(terms) is first for _ in range(100))
    with pytest.raises(LockTaken):
        theirs.acquire("billing")
    terms.close()
    assert theirs.acquire("billing", wait=60).fence > first.fence
