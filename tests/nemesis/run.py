"""
One run: one fault, for so long, and what came of it.

    start --- strike - strike - strike ... calm --- everybody is served --- end, nothing left
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import redis

from celery_redlock.testing.reaper import reaper
from nemesis import checker
from nemesis.contenders import MAX_TTL
from nemesis.faults import Fault, longest_step
from nemesis.field import CROWD, Field, field_of
from nemesis.leftovers import Sampler, lock_keys
from nemesis.log import now
from nemesis.verdict import GUARDED, Run, broken_so_far, missing, score, verdict, violations

__all__ = ["folder_of", "run"]

#: Within so much after the last strike everybody has to be served again [s]: a quarantine that a
#: node's clock may have made longer, the pauses between attempts to connect, others' holds.
PATIENCE = 60.0 + longest_step
#: What servers count of the errors that a strike is to cause.
ERRORS = ("NOSCRIPT", "OOM")


def run(
    fault: Fault,
    seconds: float,
    seed: int,
    *,
    longest: float | None = None,
    tell: Callable[[str], None] = lambda _: None,
    over: threading.Event | None = None,
    logs: Path | None = None,
) -> Run:
    """
    Run *fault* and return what came of it.

    Args:
        fault: What to do to nodes, network or clients.
        seconds: For how long [s].
        seed: Of the moments and the choices.
        longest: Go on for so long at most if the contenders that have to break have not yet [s].
        tell: Is told now and then how far it is.
        over: Ends the run early once it is set.
        logs: Where to leave all logs, in a folder named after the fault.

    Raises:
        NoFakeTime: Clocks are to be stepped and cannot be.
    """
    with (
        folder_of(fault.name, logs) as folder,
        field_of(folder, fault.needs) as ground,
        Sampler(ground.nodes, GUARDED) as sampler,
    ):
        ground.over = over or ground.over
        ground.start_clients()
        began = now()
        injections = strike(fault, ground, random.Random(seed), seconds, longest, tell)
        ended, calm = now() - began, now()
        served = None if ground.over.is_set() else when_served(ground, calm)
        for error in ERRORS:
            ground.hits[error] += sum(
                errors_of(client, error) for client in ground.past_the_network
            )
        gone = ground.stop_clients()
        left = () if ground.over.is_set() else left_behind(ground)
        histories = checker.read(ground.folder)
        scores = {name: score(ground.folder, name, histories[name]) for name in CROWD}
        ground.hits["holds cut short"] += scores["ours"].cut_short
        hits = {what: times for what, times in ground.hits.items() if times}
        result = Run(
            fault.name, round(ended, 1), seed, injections, hits, served, sampler.seen, scores
        )
        result.violations = [
            *violations(scores),
            *gone,
            *(f"{key} had no expiry" for key in sorted(sampler.eternal)),
            *(f"{key} stayed behind" for key in left),
        ]
        if served is None and not ground.over.is_set():
            late = checker.late_clients(histories["ours"], calm, PATIENCE)
            result.violations.append(f"not served within {PATIENCE:g} s of the end: {late}")
        if ground.over.is_set():
            result.why = "ended early"
        else:
            result.counts, result.why = verdict(fault, result)
        return result


@contextlib.contextmanager
def folder_of(fault: str, logs: Path | None) -> Iterator[Path]:
    if logs is not None:
        (logs / fault).mkdir(parents=True)
        yield logs / fault
    else:
        with tempfile.TemporaryDirectory(prefix="redlock-nemesis-") as name:
            reaper.watch(name, None, folder=Path(name))
            try:
                yield Path(name)
            finally:
                reaper.forget(name)


def strike(
    fault: Fault,
    ground: Field,
    rng: random.Random,
    seconds: float,
    longest: float | None,
    tell: Callable[[str], None],
) -> int:
    began, told, times = now(), now(), 0
    while not ground.over.is_set():
        passed = now() - began
        if passed >= seconds and (
            longest is None or passed >= longest or not missing(fault, broken_so_far(ground.folder))
        ):
            break
        ground.wait(rng.uniform(*fault.gap))
        with fault.strike(ground, rng):
            ground.wait(rng.uniform(*fault.lasting))
        times += 1
        if now() - told >= max(10.0, seconds / 10.0):
            told = now()
            tell(f"{fault.name}: {told - began:.0f} s, {times} strikes")
    return times


def when_served(ground: Field, calm: float) -> float | None:
    """Wait until each of our clients was granted a lock after *calm* [s]; return when [s]."""
    while now() < calm + PATIENCE:
        time.sleep(0.25)
        granted = [first_grant(ground.folder, c.name, calm) for c in ground.clients_of("ours")]
        if None not in granted:
            return round(max(at for at in granted if at is not None) - calm, 2)
    return None


def first_grant(folder: Path, client: str, calm: float) -> float | None:
    """Return when a client was first granted a lock after *calm* [s], read from its logs' ends."""
    for path in folder.glob(f"client-{client}-*.jsonl"):
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - 500_000))
            lines = [line for line in log if b'"granted"' in line and line.endswith(b"\n")]
        times = [json.loads(line)["at"] for line in lines if line.startswith(b"{")]
        later = [at for at in times if at >= calm]
        if later:
            return float(min(later))
    return None


def errors_of(client: redis.Redis, kind: str) -> int:
    with contextlib.suppress(redis.RedisError):
        told = client.info("errorstats").get(f"errorstat_{kind}", {})
        return int(told.get("count", 0))
    return 0


def left_behind(ground: Field) -> list[str]:
    """Wait for the longest lease, on the slowest clock, and return the locks there are still."""
    deadline = now() + MAX_TTL + longest_step + 2.0
    while True:
        found = [
            f"{key} ({left} ms)"
            for client in ground.past_the_network
            for key, left in lock_keys(client, GUARDED)
        ]
        if not found or now() > deadline:
            return found
        time.sleep(0.1)  # the rhythm of its looks
