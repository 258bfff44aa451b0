"""Facts of an app, its tasks and its lock nodes, of which findings are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from celery_redlock.reading.tally import TaskTally
from celery_redlock.settings import Settings
from celery_redlock.task.options import LockOptions
from celery_redlock.task.unlocked import Unlocked

__all__ = ["Facts", "NodeFacts", "OtherServer", "TaskFacts", "database_of", "place_of"]


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    node: str
    problem: str = ""  # why it does not answer; "" if it does
    unfit: bool = False  # whether it answers, and *problem* says why it must not be a lock node
    in_database: bool = False  # whether its URL names a database
    info: Mapping[str, str] = field(default_factory=dict)  # fields of its INFO
    in_cluster: bool = False  # whether its URL names a cluster
    #: Of its configuration, what matters here; None if it is not shown
    config: Mapping[str, str] | None = None
    #: "enrolled", "unmarked", "foreign" (enrolled for other settings); "" if it cannot be asked
    state: str = ""
    quarantine: float = 0.0  # how long it does not vote yet [s]
    latencies: Sequence[float] = ()  # of some small requests [s]
    #: How far its wall clock is ahead of ours [s]; None if unknown
    clock_offset: float | None = None
    denied: Sequence[str] = ()  # commands that workers need and that we may not run
    denied_to_wake: Sequence[str] = ()  # commands that only hints need, likewise
    denied_to_tools: Sequence[str] = ()  # commands that only an operator's tools need, likewise
    refuses_writes: str = ""  # what it says to a write, with the rights for one; "" if it takes it
    leaked: int = 0  # how many keys of ours never expire
    leaked_names: Sequence[str] = ()  # some of them
    servers: Sequence[str] = ()  # where the servers of its name are, if these are several

    @property
    def latency(self) -> float:
        """Median time of a small request [s]."""
        return median(self.latencies) if self.latencies else 0.0

    @property
    def votes(self) -> bool:
        is_up = not (self.problem or self.refuses_writes)
        return is_up and self.state == "enrolled" and not self.quarantine


@dataclass(frozen=True, kw_only=True)
class OtherServer:
    role: str  # "broker", "result backend", or whose cache it is
    place: str  # host and port
    run_id: str  # of its process; "" if it does not tell
    database: str = "0"


@dataclass(frozen=True, kw_only=True)
class TaskFacts:
    name: str
    problem: str = ""  # what is wrong with its options; "" if nothing is
    options: LockOptions | None = None  # of its lock; None if they are invalid
    max_retries: int | None = 3  # None for without end
    acks_late: bool = False
    time_limit: float | None = None  # the shorter one of its time limits [s]; None for none


@dataclass(frozen=True, kw_only=True)
class Facts:
    settings: Settings
    nodes: Sequence[NodeFacts] = ()
    tasks: Sequence[TaskFacts] = ()  # those that take locks
    unlocked: Sequence[Unlocked] = ()  # those that take none, with options of ours
    others: Sequence[OtherServer] = ()  # other servers of the app
    caches: Sequence[OtherServer] = ()  # where Django's caches are
    records: Sequence[Mapping[str, Any]] = ()  # of the journal, oldest first
    #: What each task did in the last day
    tally: Mapping[str, TaskTally] = field(default_factory=dict)
    #: Setting or place -> what is wrong with it
    problems: Mapping[str, str] = field(default_factory=dict)
    shown_passwords: Sequence[str] = ()  # nodes whose passwords stand in redlock_nodes
    visibility_timeout: float | None = None  # of the broker [s]; None for none
    is_eager: bool = False
    delays_in_broker: bool = False  # whether the broker itself delays messages
    eta_task_limit: int | None = None  # of the workers; None for none
    pool: str = "prefork"  # of the workers, as far as the settings tell
    has_hiredis: bool = True  # whether the fast parser is installed
    now: float = 0.0  # when this was gathered [s, Unix time]


def place_of(label: str) -> str:
    """Return host and port in *label*, as a URL has them."""
    host, colon, port = label.rpartition("/")[0].rpartition(":")
    return f"{f'[{host}]' if ':' in host else host}{colon}{port}"


def database_of(label: str) -> str:
    return label.rpartition("/")[2]
