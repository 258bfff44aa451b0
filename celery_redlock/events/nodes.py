"""Events of one lock node."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import ClassVar

from celery_redlock.events.base import Event, Part
from celery_redlock.events.metrics import (
    NODE_EVENTS,
    NODE_LATENCY,
    NODE_OFFSET,
    NODE_QUARANTINED,
    NODE_UP,
    Changes,
    histogram,
    of_nodes,
)
from celery_redlock.events.wording import Record, text
from celery_redlock.words import number

__all__ = [
    "NodeClockJump",
    "NodeDown",
    "NodeMeasured",
    "NodeQuarantined",
    "NodeUp",
]


@dataclass(frozen=True)
class NodeEvent(Event):
    """
    Something that concerns one lock node.

    Attributes:
        node: Its label, without a password.
        change: What happened to it, as a label.
    """

    change: ClassVar[str] = ""
    journal: ClassVar[Part] = "nodes"

    node: str


@dataclass(frozen=True)
class NodeDown(NodeEvent):
    """
    A node does not answer.

    Attributes:
        reason: Why, in plain words.
    """

    celery_type = "node-down"
    word = "node down"
    change = "down"
    mark = "bad"
    level = logging.WARNING
    metrics: ClassVar[Changes] = {
        NODE_EVENTS: 1,
        NODE_UP: 0,
        NODE_QUARANTINED: 0,
        NODE_LATENCY: math.nan,
        NODE_OFFSET: math.nan,
    }

    reason: str

    @classmethod
    def what(cls, it: Record) -> str:
        """Return that it is down."""
        return f"Lock node {text(it, 'node')} is down"

    @classmethod
    def why(cls, it: Record) -> str:
        """Return what connecting to it said."""
        return str(it.get("reason") or "")


@dataclass(frozen=True)
class NodeUp(NodeEvent):
    """A node answers (again)."""

    celery_type = "node-up"
    word = "node up"
    change = "up"
    level = logging.INFO
    introduces = "node"
    metrics: ClassVar[Changes] = {NODE_EVENTS: 1, NODE_UP: 1}

    @classmethod
    def what(cls, it: Record) -> str:
        """Return that it is up."""
        return f"Lock node {text(it, 'node')} is up"


@dataclass(frozen=True)
class NodeQuarantined(NodeEvent):
    """
    A node lost its memory and does not vote for a while.

    It is only counted: that it is quarantined is shown by who looks at it, and sees its end.

    Attributes:
        left: How much longer [s].
    """

    celery_type = "node-quarantined"
    word = "quarantine"
    change = "quarantined"
    mark = "warn"
    level = logging.WARNING
    metrics: ClassVar[Changes] = {NODE_EVENTS: 1}

    left: float

    @classmethod
    def what(cls, it: Record) -> str:
        """Return that it is quarantined, and for how long."""
        return f"Lock node {text(it, 'node')} is quarantined for {number(it.get('left')):.0f} s"

    @classmethod
    def why(cls, it: Record) -> str:  # noqa: ARG003
        """Return why a node is quarantined at all."""
        return "it is new, or was restarted or wiped"


@dataclass(frozen=True)
class NodeClockJump(NodeEvent):
    """
    A node's clock was stepped, as far as can be known: other nodes' clocks do not say it was ours.

    Attributes:
        jump: By how much [s]; forward is positive, and lets keys expire early.
    """

    celery_type = "node-clock-jump"
    word = "clock jump"
    change = "clock_jump"
    mark = "bad"
    level = logging.ERROR
    metrics: ClassVar[Changes] = {NODE_EVENTS: 1}

    jump: float

    @classmethod
    def what(cls, it: Record) -> str:
        """Return by how much it jumped."""
        by = f"{number(it.get('jump')):+.1f} s"
        return f"The clock of lock node {text(it, 'node')} jumped by {by}"


@dataclass(frozen=True)
class NodeMeasured(NodeEvent):
    """
    How near a node is, and what its clock says; every few seconds while it is asked.

    Attributes:
        latency: From a request to its answer, our own share included [s].
        clock_offset: How far its wall clock is ahead of ours [s]; good to half the latency.
        quarantine: For how long it does not vote yet [s]; 0.0 if it does.
        leaked: How many keys of ours on it never expire; None where they have not been counted.
    """

    celery_type = "node-measured"
    word = "node measured"
    journal = ""
    metrics: ClassVar[Changes] = {
        NODE_UP: 1,
        NODE_QUARANTINED: "is_quarantined",
        NODE_LATENCY: "latency",
        NODE_OFFSET: "clock_offset",
        histogram(
            *("From a request to a node to its answer", "node"),
            otel="node.latency",
        ): "latency",
        of_nodes(
            *("node_leaked_keys", "How many of our keys on a lock node never expire."),
            otel="node.leaked_keys",
            unit="{key}",
        ): "leaked",
    }

    latency: float
    clock_offset: float
    quarantine: float = field(default=0.0, kw_only=True)
    leaked: int | None = field(default=None, kw_only=True)

    @property
    def is_quarantined(self) -> int:
        """1 if it does not vote yet, else 0."""
        return int(self.quarantine > 0)

    @classmethod
    def what(cls, it: Record) -> str:
        """Return both figures."""
        took = f"{number(it.get('latency')) * 1000:.3g} ms"
        offset = f"{number(it.get('clock_offset')) * 1000:+.3g} ms"
        return f"Lock node {text(it, 'node')} answers in {took}, its clock differs by {offset}"
