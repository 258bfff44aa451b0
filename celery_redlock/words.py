"""
Wording of a holder, a moment, a length of time and a command.

Ids, hosts and times may come from the nodes, where anybody who may write there chose them: whatever
they are, what is returned here is short, and one line.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

from celery_redlock.process.log import printable

__all__ = [
    "LOSSES",
    "counted",
    "duration",
    "is_forgotten",
    "iso_moment",
    "loss",
    "moment",
    "newer_call",
    "number",
    "redlock_command",
    "votes_in_words",
    "votes_needed",
    "who",
]

#: How much of a node's answer is shown [characters].
LONGEST_VOTE = 1000
#: Larger than any number of ours.
LARGEST = 1e12
#: `LockLost.reason` -> in words.
LOSSES = {
    "deadline": "not renewed in time",
    "stolen": "a majority of nodes no longer has it: released by an operator, taken by another, "
    "or forgotten",
    "fork": "a child process does not inherit a lock",
    "released": "it was released",
}
#: Why a node no longer knows what it granted.
FORGOTTEN = "(it was restarted or flushed, it evicted keys, or its clock was set)"
#: How the vote of a node begins that gave none, and of one that no longer knows what it granted.
SILENT, FORGETFUL = "unreachable", "quarantined"


def number(value: object) -> float:
    """Return *value* if it is a number that one of ours may have written, else 0.0."""
    if isinstance(value, (int, float)) and -LARGEST < value < LARGEST:
        return float(value)
    return 0.0


def duration(seconds: float) -> str:
    """Return *seconds* in two units at most: ``4.2 s``, ``3 min 20 s``, ``5 d 3 h``."""
    whole = int(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{seconds:.2g} s"


def counted(number: int, word: str) -> str:
    """Return so many of what *word* says: ``1 node``, ``3,000 nodes``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def votes_needed(voting: int, nodes: int, needed: int) -> str:
    if nodes == 1:
        return f"The one node {'votes' if voting else 'does not vote'}"
    return f"{voting} of {counted(nodes, 'node')} can vote, {needed} are needed"


def moment(at: object) -> str:
    """Return a moment [s, Unix time] in UTC, to the second; "?" if there is none such."""
    when = utc(at)
    return f"{when:%Y-%m-%d %H:%M:%S} UTC" if when is not None else "?"


def iso_moment(at: object) -> str:
    """Return a moment [s, Unix time] for people and programs, to the millisecond; likewise."""
    when = utc(at)
    return when.isoformat(timespec="milliseconds") if when is not None else "?"


def utc(at: object) -> datetime | None:
    try:
        return datetime.fromtimestamp(number(at), timezone.utc)
    except (OverflowError, ValueError, OSError):
        return None


def who(holder: object, at: object = None) -> str:
    """
    Return the task of *holder*, its process, and how long it has held the lock *at* a moment.

    Without that moment [s, Unix time], since when.
    """
    if not isinstance(holder, Mapping) or not (holder.get("task_id") or holder.get("host")):
        return "an unknown holder"
    parts = [task_of(holder), f"process {field(holder, 'pid')} on {field(holder, 'host')}"]
    since = number(holder.get("since"))
    if since > 0:
        held = duration(max(0.0, number(at) - since))
        parts.append(f"since {moment(since)}" if at is None else f"for {held}")
    return ", ".join(filter(None, parts))


def votes_in_words(votes: object) -> str:
    """Return what each node answered, in one line; what several said alike, once."""
    nodes_by_vote: dict[str, list[str]] = {}
    for node, vote in votes.items() if isinstance(votes, Mapping) else ():
        nodes_by_vote.setdefault(printable(vote, LONGEST_VOTE), []).append(printable(node))
    return "; ".join(f"{', '.join(nodes)}: {vote}" for vote, nodes in nodes_by_vote.items())


def loss(reason: object, votes: object = None) -> str:
    """Return why a lock was lost, in words; *reason* and *votes* as in `LockLost`."""
    said = [str(vote) for vote in votes.values()] if isinstance(votes, Mapping) else []
    forgetful = sum(vote.startswith(FORGETFUL) for vote in said)
    if reason == "deadline" and is_forgotten(votes):
        of = "the node" if len(said) == 1 else f"{forgetful} of {counted(len(said), 'node')}"
        parts, forgetful = [f"{of} forgot it {FORGOTTEN}"], 0
    else:
        parts = [LOSSES.get(str(reason), printable(reason))]
    silent = sum(vote.startswith(SILENT) for vote in said)
    for count, what in ((silent, "unreachable"), (forgetful, "quarantined")):
        if count:
            parts.append(f"{count} of {counted(len(said), 'node')} {what}")
    return ", ".join(parts)


def is_forgotten(votes: object) -> bool:
    """Return whether nodes that forgot a lock left no majority that knows it; *votes* as above."""
    said = [str(vote) for vote in votes.values()] if isinstance(votes, Mapping) else []
    return 2 * sum(vote.startswith(FORGETFUL) for vote in said) >= max(1, len(said))


def newer_call(holder: object) -> str:
    """Return that a newer call of a burst came, and which: *holder* names it."""
    by = task_of(holder) if isinstance(holder, Mapping) else ""
    return f"a newer call came{by and ': '}{by}"


def task_of(holder: Mapping[str, Any]) -> str:
    task, task_id = holder.get("task"), holder.get("task_id")
    if task_id:
        name = printable(task) if task else ""
        return f"task {name}[{printable(task_id)}]" if name else f"task {printable(task_id)}"
    entry = holder.get("entry")
    return f"schedule entry {printable(entry)}" if entry else ""


def field(holder: Mapping[str, Any], key: str) -> str:
    return printable(holder.get(key, "?"))


def redlock_command(verb: str, argv: Sequence[str] | None = None) -> str:
    """Return the command line of ``redlock`` *verb* for the app of this process."""
    return f"celery -A {app_option(sys.argv if argv is None else argv)} redlock {verb}"


def app_option(argv: Sequence[str]) -> str:
    """Return the value of ``-A`` in *argv*; "APP" if this is not the ``celery`` command."""
    program = Path(argv[0] if argv else "")
    if not program.name.startswith("celery") and program.parent.name != "celery":
        return "APP"
    for word, following in pairwise([*argv[1:], ""]):
        if word in {"-A", "--app"} and following:
            return printable(following)
        for begin in ("--app=", "-A"):
            if word.startswith(begin) and len(word) > len(begin):
                return printable(word.removeprefix(begin))
    return "APP"
