"""What is known of an app, its tasks and its lock nodes when findings are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from celery_redlock.reading.tally import TaskTally
from celery_redlock.settings import Settings
from celery_redlock.task.options import LockOptions

__all__ = ["Facts", "NodeFacts", "OtherServer", "TaskFacts", "place_of"]


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """
    What one node said of itself.

    Attributes:
        node: Its label.
        problem: Why it does not answer; "" if it does.
        info: Fields of its INFO.
        config: Of its configuration, what matters here; None if it does not tell us.
        state: ``"enrolled"``, ``"unmarked"``, ``"foreign"`` (enrolled for other settings), or ""
            where it could not be asked.
        quarantine: For how long it does not vote yet [s].
        latencies: Of some small requests [s].
        clock_offset: How far its wall clock is ahead of ours [s]; None if unknown.
        denied: Commands that workers need and that we may not run.
        denied_to_wake: Commands that only waking those who wait needs, likewise.
        denied_to_tools: Commands that only an operator's tools need, likewise.
        refuses_writes: What it says to a write, with the rights for one; "" if it takes it.
        leaked: How many keys of ours never expire.
        leaked_names: Some of them.
        servers: Where the servers are that its name stands for, if these are several.
    """

    node: str
    problem: str = ""
    info: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, str] | None = None
    state: str = ""
    quarantine: float = 0.0
    latencies: Sequence[float] = ()
    clock_offset: float | None = None
    denied: Sequence[str] = ()
    denied_to_wake: Sequence[str] = ()
    denied_to_tools: Sequence[str] = ()
    refuses_writes: str = ""
    leaked: int = 0
    leaked_names: Sequence[str] = ()
    servers: Sequence[str] = ()

    @property
    def latency(self) -> float:
        """How long a small request takes [s], typically."""
        return median(self.latencies) if self.latencies else 0.0

    @property
    def votes(self) -> bool:
        """Whether it would vote now."""
        is_up = not (self.problem or self.refuses_writes)
        return is_up and self.state == "enrolled" and not self.quarantine


@dataclass(frozen=True, kw_only=True)
class OtherServer:
    """
    A Redis that the app uses for something else.

    Attributes:
        role: ``"broker"`` or ``"result backend"``.
        place: Its host and port.
        run_id: Of its process; "" if it does not tell.
    """

    role: str
    place: str
    run_id: str


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    """
    What is known of one task.

    Attributes:
        name: Its name.
        problem: What is wrong with its options; "" if nothing is.
        options: Of its lock; None if they are invalid.
        max_retries: As of Celery; None for without end.
        acks_late: Whether its message is acknowledged after it ran.
        time_limit: The shorter one of its time limits [s]; None for none.
    """

    name: str
    problem: str = ""
    options: LockOptions | None = None
    max_retries: int | None = 3
    acks_late: bool = False
    time_limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """
    All that is known.

    Attributes:
        settings: Of the app.
        nodes: In the order of the settings.
        tasks: Those that take locks.
        others: Other servers of the app.
        records: Of the journal, oldest first.
        tally: What each task did in the last day.
        problems: Setting or place -> what is wrong with it.
        shown_passwords: Nodes whose passwords stand in ``redlock_nodes``.
        visibility_timeout: Of the broker [s]; None for none.
        is_eager: Whether tasks run where they are called.
        delays_in_broker: Whether the broker holds back what is to come later.
        eta_task_limit: Of the workers; None for none.
        pool: Of the workers, as far as the settings tell.
        has_hiredis: Whether the fast parser is installed.
        now: When this was gathered [s, Unix time].
    """

    settings: Settings
    nodes: Sequence[NodeFacts] = ()
    tasks: Sequence[TaskFacts] = ()
    others: Sequence[OtherServer] = ()
    records: Sequence[Mapping[str, Any]] = ()
    tally: Mapping[str, TaskTally] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    shown_passwords: Sequence[str] = ()
    visibility_timeout: float | None = None
    is_eager: bool = False
    delays_in_broker: bool = False
    eta_task_limit: int | None = None
    pool: str = "prefork"
    has_hiredis: bool = True
    now: float = 0.0


def place_of(label: str) -> str:
    """Return host and port in the label of a node."""
    return label.rpartition("/")[0]
