"""
Whether a row holds for a column: a pure function of what was seen.

A verdict's words are for the table and the same in every run; what was measured stands beside.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.peers.rows import LONGEST

Seen = dict[str, Any]
#: Up to this share of its TTL a call was let in at once, on a loaded machine, too.
AT_ONCE = 0.6
#: How far from its TTL the end of a silence may be seen [s].
ABOUT = 1.5


@dataclass(frozen=True)
class Verdict:
    """
    What a cell says.

    Attributes:
        holds: Whether what should happen did.
        words: A few, the same in every run.
        measured: The figure of this run; empty if the words say it all.
    """

    holds: bool
    words: str
    measured: str = ""


def silence(seen: Seen) -> Verdict:
    """
    Judge how long the next call was kept out.

    Up to the longest run of the task is accepted: that long it would have been kept out anyway.
    """
    silent, ttl = seen["silent"], seen["ttl"]
    if silent is None:
        return Verdict(False, "silent", f"waited {seen['waited']:.0f} s")
    figure = f"{silent:.1f} s"
    if silent < LONGEST:
        is_soon = silent <= AT_ONCE * ttl
        return Verdict(
            True, f"runs again {'at once' if is_soon else 'when its lease ends'}", figure
        )
    at_ttl = abs(silent + seen["held"] - ttl) <= ABOUT
    return Verdict(False, "silent until its TTL ends" if at_ttl else "silent", figure)


def outlasted(seen: Seen) -> Verdict:
    """Judge whether a second call ran beside a task that took longer than the TTL."""
    if seen["at_once"] > 1:
        return Verdict(False, "second copy beside it", f"{seen['at_once']} at once")
    return Verdict(True, "runs alone", f"took {seen['took']:.1f} s")


def redelivered(seen: Seen) -> Verdict:
    """Judge whether copies of a message ran at once, and what the caller got."""
    if seen["at_once"] > 1:
        return Verdict(False, "copies beside it", f"{seen['at_once']} at once")
    if seen["answer"] != "result of job x":
        return Verdict(False, "caller gets no result", seen["answer"])
    return Verdict(True, "runs alone")


def retried(seen: Seen) -> Verdict:
    """Judge whether the retry ran, and alone."""
    if not seen["retries"]:
        instead = seen["bodies"] > 1
        return Verdict(False, "copy runs in its stead" if instead else "retry is swallowed")
    if seen["at_once"] > 1:
        return Verdict(False, "copy beside the retry", f"{seen['at_once']} at once")
    return Verdict(True, "retries alone")


def chord(seen: Seen) -> Verdict:
    """Judge whether the chord's body ran, and equal members one at a time."""
    if seen["raised"]:
        return Verdict(False, "publish raises", seen["raised"])
    if seen["answer"] == "TimeoutError":
        return Verdict(False, "never ends", f"waited {LONGEST + 3} s")
    if seen["answer"] != "3":
        return Verdict(False, "fails", seen["answer"])
    if seen["at_once"] > 1:
        return Verdict(False, "both at once", f"{seen['at_once']} at once")
    return Verdict(True, "ends")


def down(seen: Seen) -> Verdict:
    """Judge what becomes of two calls when the lock server is down."""
    figure = f"{seen['down']} of {seen['of']} down"
    if seen["raised"]:
        return Verdict(False, "publish raises", seen["raised"])
    if not seen["published"]:
        return Verdict(False, "dropped silently", figure)
    if seen["at_once"] > 1:
        return Verdict(False, "runs without a lock", f"{seen['at_once']} at once")
    if seen["failed"]:
        return Verdict(False, "task fails", ", ".join(sorted(set(seen["failed"]))))
    if not seen["bodies"]:
        return Verdict(False, "does not run", figure)
    return Verdict(True, f"runs alone, {figure}")


def spelt(seen: Seen) -> Verdict:
    """Judge whether three spellings of a call are one lock, and another call is not."""
    if seen["at_once"] > 1:
        return Verdict(False, f"{seen['at_once']} at once")
    if not seen["other"]:
        return Verdict(False, "holds back another call")
    return Verdict(True, "one lock")


def late(seen: Seen) -> Verdict:
    """Judge whether the newer holder kept its lock when the older one ended."""
    if seen["beside"]:
        return Verdict(False, "frees the newer lock", f"{seen['beside']} let in")
    return Verdict(True, "newer lock stays")


def beats(seen: Seen) -> Verdict:
    """Judge how often an entry ran, which one run may be short of: the count began somewhere."""
    figure = f"{seen['runs']} runs in {seen['slots']} intervals"
    if seen["runs"] > seen["slots"]:
        return Verdict(False, "runs twice", figure)
    if seen["runs"] < seen["slots"] - 1:
        return Verdict(False, "misses runs", figure)
    return Verdict(True, "runs once", figure)


#: Key of a row -> how it is judged.
VERDICTS: dict[str, Callable[[Seen], Verdict]] = {
    "killed": silence,
    "outlasted": outlasted,
    "redelivered": redelivered,
    "retried": retried,
    "revoked": silence,
    "limited": silence,
    "chord": chord,
    "down": down,
    "spelt": spelt,
    "late": late,
    "beats": beats,
}


def verdict(row: str, seen: Seen) -> Verdict:
    """Return the verdict on what was seen in *row*."""
    return VERDICTS[row](seen)
