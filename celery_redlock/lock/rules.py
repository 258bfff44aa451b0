"""The settings that all clients of one cluster of lock nodes share, checked once."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

from celery_redlock.errors import ConfigurationError
from celery_redlock.lock.lease import quarantine_for
from celery_redlock.lock.records import is_text, ms

__all__ = ["Rules"]

#: Raised when scripts or keys change so that old and new clients must not mix.
PROTOCOL_VERSION = 1
LONGEST_PREFIX = 40


@dataclass(frozen=True, kw_only=True)
class Rules:
    """
    Settings of a `Redlock`, under their names without the ``redlock_`` prefix.

    A time may be given as a `timedelta`; it is kept as seconds.

    Attributes:
        ttl: Lease written to every node when none is asked for [s, > 0].
        wait: How long to keep trying when none is asked for [s, >= 0].
        max_ttl: Longest lease anybody may ask for; bounds the quarantine [s].
        node_timeout: Longest wait for a node within one round [s].
        drift_factor: Share of a TTL kept back for clock drift [1, 0 <= f < 1].
        restart_guard: Whether a node that lost its memory is kept from voting.
        fence: Whether to ask for fencing numbers.
        fence_retention: How long a node remembers a fence after its last use, at least [s].
        prefix: First part of every Redis key.

    Raises:
        ConfigurationError: A value is out of range; names the setting and the fix.
    """

    ttl: float = 30.0
    wait: float = 0.0
    max_ttl: float = 60.0
    node_timeout: float = 0.05
    drift_factor: float = 0.05
    restart_guard: bool = True
    fence: bool = True
    fence_retention: float = 3600.0
    prefix: str = "redlock"

    def __post_init__(self) -> None:
        for name in ("ttl", "max_ttl", "node_timeout", "fence_retention"):
            # As frozen dataclasses set their fields.
            object.__setattr__(self, name, positive(f"redlock_{name}", getattr(self, name)))
        object.__setattr__(self, "wait", in_seconds("redlock_wait", self.wait))
        number("redlock_drift_factor", self.drift_factor)
        for name in ("restart_guard", "fence"):
            flag(f"redlock_{name}", getattr(self, name))
        if not self.drift_factor < 0.5:  # noqa: PLR2004  half a lease is not drift but a broken clock
            msg = (
                f"redlock_drift_factor must be below 0.5, got {self.drift_factor!r}; "
                "the default is 0.05"
            )
            raise ConfigurationError(msg)
        self.check_ttl(self.ttl, "redlock_ttl")
        check_prefix(self.prefix)

    @classmethod
    def of(cls, **settings: Any) -> Rules:
        """Return rules with *settings*; a ``ttl`` that is not given is at most ``max_ttl``."""
        if "ttl" not in settings:
            longest = positive("redlock_max_ttl", settings.get("max_ttl", cls.max_ttl))
            settings["ttl"] = min(cls.ttl, longest)
        return cls(**settings)

    def check_ttl(self, given: float | timedelta, name: str = "ttl") -> float:
        """Return *given* in seconds if a lease may be so long; else raise ConfigurationError."""
        ttl = positive(name, given)
        if ttl > self.max_ttl:
            msg = (
                f"{name} must be at most redlock_max_ttl ({self.max_ttl:g} s), got {ttl:g}; "
                "lower it (the watchdog renews long tasks) or raise redlock_max_ttl on every client"
            )
            raise ConfigurationError(msg)
        if ttl <= 2 * self.node_timeout:
            msg = (
                f"{name} must be more than twice redlock_node_timeout "
                f"({self.node_timeout:g} s), got {ttl:g}; raise it"
            )
            raise ConfigurationError(msg)
        return ttl

    @cached_property
    def quarantine(self) -> float:
        """How long a node without memory must not vote [s]."""
        return quarantine_for(self.max_ttl, self.drift_factor)

    @cached_property
    def longest_skew(self) -> float:
        """How far a client's wall clock may run ahead of a node's [s]."""
        return min(self.quarantine / 4.0, 5.0)

    @cached_property
    def fence_memory(self) -> float:
        """How long a node remembers a fence [s]: until clocks alone are safe to decide."""
        return max(self.fence_retention, self.max_ttl + 2 * self.longest_skew)

    @cached_property
    def quarantine_ms(self) -> bytes:
        """The quarantine as the scripts want it, ``0`` with the restart guard off."""
        return ms(self.quarantine) if self.restart_guard else b"0"

    @cached_property
    def fence_limits(self) -> tuple[bytes, bytes]:
        """How long a node remembers a fence, and the longest skew, as the scripts want them."""
        return ms(self.fence_memory), ms(self.longest_skew)

    def fingerprint(self, nodes: Iterable[str]) -> str:
        """Return what clients must share to have the same quorum: nodes, max_ttl, version."""
        agreed = [str(PROTOCOL_VERSION), f"{self.max_ttl:.3f}", *sorted(nodes)]
        return hashlib.sha256("\n".join(agreed).encode()).hexdigest()[:16]


def check_prefix(prefix: Any) -> None:
    is_known = isinstance(prefix, str) and is_text(prefix)
    if is_known and 0 < len(prefix.encode()) <= LONGEST_PREFIX:
        return
    msg = f"redlock_prefix must be a string of 1 to {LONGEST_PREFIX} bytes, got {prefix!r}"
    raise ConfigurationError(msg)


def number(name: str, value: object, kind: str = "a number") -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"{name} must be {kind}, got {value!r}"
        raise ConfigurationError(msg)
    if not 0 <= value <= sys.float_info.max:  # an int may be larger than any float
        msg = f"{name} must be >= 0 and finite, got {value!r}"
        raise ConfigurationError(msg)
    return float(value)


def in_seconds(name: str, value: object) -> float:
    """Return a time >= 0, in seconds or as a timedelta, in seconds; raise by its *name*."""
    given = value.total_seconds() if isinstance(value, timedelta) else value
    return number(name, given, "a number of seconds or a timedelta")


def positive(name: str, value: object) -> float:
    given = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(given, (int, float)) and not isinstance(given, bool) and given <= 0:
        msg = f"{name} must be > 0, got {value!r}"
        raise ConfigurationError(msg)
    return in_seconds(name, value)


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        msg = f"{name} must be True or False, got {value!r}"
        raise ConfigurationError(msg)
    return value
