"""``redlock bench``: how quick locks are on the app's own nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from celery.bin.base import CeleryCommand

from celery_redlock.ops.bench import Bench, share
from celery_redlock.ops.cli.command import UNWELL, finish, json_option, with_settings
from celery_redlock.ops.screen import Progress, stop_on_interrupt
from celery_redlock.ops.text import one_line, show_json, show_table
from celery_redlock.settings import Settings
from celery_redlock.words import duration

__all__ = ["bench"]

EXAMPLES = """\b
Examples:
  celery -A shop redlock bench
  celery -A shop redlock bench --seconds 10 --json | jq .cycle.p99

\b
JSON, times in seconds: lock, cycles_per_second, failed, fence_expires;
cycle, acquire, release, refused: count, p50, p99; nodes[]: node, p50, p99,
problem
"""


@click.command(
    cls=CeleryCommand, epilog=EXAMPLES, short_help="How quick locks are on the app's nodes."
)
@click.option(
    "--seconds",
    default=3.0,
    show_default=True,
    type=click.FloatRange(0.1, 60.0),
    help="For how long to measure, about.",
)
@json_option
@with_settings
def bench(settings: Settings, *, seconds: float, as_json: bool) -> None:
    """
    Measure round trips, grants and refusals on the app's own nodes, with a lock of a random name.

    One process, one thread, one lock: what a task pays, not what the nodes can bear. Nothing is
    written to the journal, and the lock is given back; its fencing number expires by itself.

    Exits with 0, or with 1 if no quorum granted the lock.
    """
    measured, progress = Bench(settings.nodes, settings.rules), Progress("requests made")
    with stop_on_interrupt() as stop:
        measured.run(seconds, lambda: stop.is_wanted, progress.tell)
    progress.clear()
    if as_json:
        show_json(as_plain(measured))
    else:
        show(measured)
    finish(0 if measured.acquired else UNWELL)


def rows_of(measured: Bench) -> list[tuple[str, Sequence[float]]]:
    """Return what was measured, with its times."""
    return [
        ("cycle", measured.cycles),
        ("acquire", measured.acquired),
        ("release", measured.released),
        ("refused", measured.refused),
    ]


def as_plain(measured: Bench) -> dict[str, Any]:
    """Return what was measured as plain JSON values."""
    spent = sum(measured.cycles)
    rules = measured.rules
    return {
        "lock": measured.name,
        **{what: summary(times) for what, times in rows_of(measured)},
        "cycles_per_second": len(measured.cycles) / spent if spent else None,
        "failed": measured.failed,
        "fence_expires": rules.fence_memory if rules.fence and measured.acquired else None,
        "nodes": [
            {
                "node": one.node,
                "p50": share(one.times, 0.5),
                "p99": share(one.times, 0.99),
                "problem": one_line(one.problem),
            }
            for one in measured.trips
        ],
    }


def summary(times: Sequence[float]) -> dict[str, Any]:
    """Return how many there were, and how long they took."""
    return {"count": len(times), "p50": share(times, 0.5), "p99": share(times, 0.99)}


def show(measured: Bench) -> None:
    """Print what was measured."""
    trips = [
        (one.node, in_ms(share(one.times, 0.5)), in_ms(share(one.times, 0.99)), one.problem)
        for one in measured.trips
    ]
    head = ("NODE", "ROUND TRIP P50", "P99", "PROBLEM")
    show_table(head, [(*cells, one_line(problem)) for *cells, problem in trips])
    click.echo()
    rows = [
        (what, str(len(times)), in_ms(share(times, 0.5)), in_ms(share(times, 0.99)))
        for what, times in rows_of(measured)
    ]
    show_table(("WHAT", "TIMES", "P50", "P99"), rows)
    if measured.failed:
        click.echo(f"\n{measured.failed} times no quorum could decide.")
    click.echo(f"\n{left_behind(measured)}")


def in_ms(seconds: float | None) -> str:
    """Return *seconds* in milliseconds."""
    return "" if seconds is None else f"{seconds * 1000:.2f} ms"


def left_behind(measured: Bench) -> str:
    """Return in words what was written, and what is left of it."""
    if not measured.acquired:
        return "No lock was granted; nothing is left behind."
    told = f"Written: the lock {measured.name!r}, taken and given back."
    if not measured.rules.fence:
        return f"{told} Nothing is left behind."
    memory = duration(measured.rules.fence_memory)
    return f"{told} Its fencing number expires by itself within {memory}; nothing else is left."
