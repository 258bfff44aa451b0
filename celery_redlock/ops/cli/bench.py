"""``redlock bench``: how quick locks are on the app's own nodes; one that nobody else wants."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import click
from redis.exceptions import RedisError

from celery_redlock.errors import LockNotAcquired, LockTaken, RedlockError
from celery_redlock.lock.address import Address, addresses_of
from celery_redlock.lock.guard import exchange
from celery_redlock.lock.redlock import Redlock
from celery_redlock.ops.cli.command import UNWELL, operator_command, settings_at_hand
from celery_redlock.ops.screen import Progress, Stop, stop_on_interrupt
from celery_redlock.ops.text import one_line, show_json, show_table
from celery_redlock.reading.health import check
from celery_redlock.reading.nodes import ask_all, connected
from celery_redlock.settings import Settings
from celery_redlock.words import counted, duration

__all__ = ["bench"]

#: How many requests a node is measured with.
PINGS = 100
#: Share of the time that goes to cycles; the rest to refusals.
CYCLES = 0.7
#: After so many failures in a row there is nothing to measure.
HOPELESS = 3
#: What is timed of a lock, and of a cycle of one: granted and released.
TIMED = ("cycle", "acquire", "release", "refused")
EXAMPLES = """\b
Examples:
  celery -A shop redlock bench
  celery -A shop redlock bench --seconds 10 --json | jq .cycle.p99

\b
JSON, times in seconds: lock, cycles_per_second, failed, fence_expires;
cycle, acquire, release, refused: count, p50, p99; nodes[]: node, p50, p99,
problem
"""


@operator_command("How quick locks are on the app's nodes.", EXAMPLES)
@click.option(
    "--seconds",
    default=3.0,
    show_default=True,
    type=click.FloatRange(0.1, 60.0),
    help="For how long to measure, about.",
)
def bench(*, seconds: float, as_json: bool) -> int:
    """
    Measure round trips, grants and refusals on the app's own nodes, with a lock of a random name.

    One process, one thread, one lock: what a task pays, not what the nodes can bear. Nothing is
    written to the journal, and the lock is released; its fencing number expires by itself.

    Exits with 0, or with 1 if no quorum granted the lock.
    """
    settings, progress = settings_at_hand(), Progress("requests made")
    name = f"bench:{secrets.token_hex(4)}"
    with stop_on_interrupt() as stop:
        trips = ask_all(addresses_of(settings.nodes), round_trips)
        times = measure(settings, name, seconds, stop, progress)
    progress.clear()
    measured = as_plain(settings, name, trips, times)
    if as_json:
        show_json(measured)
    else:
        show(measured)
    return 0 if times.acquire else UNWELL


# --- measuring --------------------------------------------------------------------------


class RoundTrips(NamedTuple):
    """
    How near one node is.

    Attributes:
        node: Its label.
        times: Of a small request each, its answer included [s].
        problem: Why it did not answer; "" if it did.
    """

    node: str
    times: Sequence[float]
    problem: str = ""


@dataclass
class Times:
    """
    How long each took [s].

    Attributes:
        acquire: Grants.
        release: Releases, the answers of a majority included.
        refused: Refusals of a held lock.
        failed: How often no quorum could decide, or a vote was split.
    """

    acquire: list[float] = field(default_factory=list)
    release: list[float] = field(default_factory=list)
    refused: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def cycle(self) -> list[float]:
        """Each grant and its release together."""
        return [taken + given for taken, given in zip(self.acquire, self.release, strict=True)]


def round_trips(address: Address) -> RoundTrips:
    """Return how near a node is."""
    times, problem = list[float](), ""
    try:
        with connected(address) as connection:
            for _ in range(PINGS):
                begun = time.perf_counter()
                exchange(connection, (b"PING",))
                times.append(time.perf_counter() - begun)
    except (RedisError, OSError) as error:
        problem = one_line(error) or type(error).__name__
    return RoundTrips(address.label, times, problem)


def measure(settings: Settings, name: str, seconds: float, stop: Stop, progress: Progress) -> Times:
    """Return what the lock *name* took within so many *seconds*, about."""
    times, misses = Times(), 0
    with (
        contextlib.closing(Redlock(settings.nodes, settings.rules)) as ours,
        contextlib.closing(Redlock(settings.nodes, settings.rules)) as theirs,
    ):
        for locks in (ours, theirs):
            check(locks)
        until = time.monotonic() + CYCLES * seconds
        while time.monotonic() < until and misses < HOPELESS and not stop.is_wanted:
            begun = time.perf_counter()
            try:
                lease = ours.acquire(name)
            except LockNotAcquired:
                times.failed, misses = times.failed + 1, misses + 1
                continue
            had, misses = time.perf_counter(), 0
            ours.release(lease)
            times.acquire.append(had - begun)
            times.release.append(time.perf_counter() - had)
            progress.tell(len(times.acquire))
        if times.acquire:
            until = time.monotonic() + (1 - CYCLES) * seconds
            try:
                with ours.hold(name):
                    while time.monotonic() < until and not stop.is_wanted:
                        measure_refusal(theirs, name, times)
                        progress.tell(len(times.acquire) + len(times.refused))
            except RedlockError:  # the nodes went away in the middle; what was measured stands
                times.failed += 1
    return times


def measure_refusal(locks: Redlock, name: str, times: Times) -> None:
    """Try for the lock *name*, which somebody holds."""
    begun = time.perf_counter()
    try:
        locks.release(locks.acquire(name, wait=0.0))
    except LockTaken:
        times.refused.append(time.perf_counter() - begun)
    except LockNotAcquired:
        times.failed += 1


# --- telling ----------------------------------------------------------------------------


def as_plain(
    settings: Settings, name: str, trips: Sequence[RoundTrips], times: Times
) -> dict[str, Any]:
    """Return what was measured as plain JSON values."""
    rules, spent = settings.rules, sum(times.cycle)
    timed = {what: getattr(times, what) for what in TIMED}
    return {
        "lock": name,
        **{what: {"count": len(took), **percentiles(took)} for what, took in timed.items()},
        "cycles_per_second": len(times.cycle) / spent if spent else None,
        "failed": times.failed,
        "fence_expires": rules.fence_memory if rules.fence and times.acquire else None,
        "nodes": [
            {"node": node, **percentiles(took), "problem": problem} for node, took, problem in trips
        ],
    }


def percentiles(times: Sequence[float]) -> dict[str, float | None]:
    """Return what half of *times*, and almost all of them, do not exceed [s]; None without any."""
    ordered: list[float] | list[None] = sorted(times) or [None]
    return {f"p{part}": ordered[len(ordered) * part // 100] for part in (50, 99)}


def show(measured: Mapping[str, Any]) -> None:
    """Print what `as_plain` returned."""
    rows = [(node["node"], *in_ms(node), node["problem"]) for node in measured["nodes"]]
    show_table(("NODE", "ROUND TRIP P50", "P99", "PROBLEM"), rows)
    click.echo()
    rows = [(what, str(measured[what]["count"]), *in_ms(measured[what])) for what in TIMED]
    show_table(("WHAT", "TIMES", "P50", "P99"), rows)
    if measured["failed"]:
        click.echo(f"\n{counted(measured['failed'], 'time')} no quorum could decide.")
    click.echo(f"\n{left_behind(measured)}")


def in_ms(measured: Mapping[str, Any]) -> tuple[str, str]:
    """Return percentiles in milliseconds."""
    p50, p99 = (
        "" if p is None else f"{p * 1000:.2f} ms" for p in (measured["p50"], measured["p99"])
    )
    return p50, p99


def left_behind(measured: Mapping[str, Any]) -> str:
    """Return in words what was written, and what is left of it."""
    if not measured["acquire"]["count"]:
        return "No lock was granted; nothing is left behind."
    written = f"Written: the lock {measured['lock']!r}, acquired and released."
    if measured["fence_expires"] is None:
        return f"{written} Nothing is left behind."
    memory = duration(measured["fence_expires"])
    return f"{written} Its fencing number expires by itself within {memory}; nothing else is left."
