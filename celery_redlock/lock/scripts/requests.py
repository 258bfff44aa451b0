"""Requests to a node, one function per verb: a script with its keys and arguments."""

from __future__ import annotations

from dataclasses import dataclass, field

from celery_redlock.lock.lease import Lease
from celery_redlock.lock.records import (
    Keys,
    channel,
    encode_info,
    holder_payload,
    line_key,
    lock_keys,
    marker_key,
    ms,
    probe_key,
    record_key,
)
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.scripting import Script
from celery_redlock.lock.scripts.scripts import (
    ACQUIRE,
    INSPECT,
    MARK,
    PLACES,
    PROBE,
    RELEASE,
    RENEW,
)

__all__ = [
    "Marker",
    "Request",
    "acquire_request",
    "inspect_request",
    "mark_request",
    "places_request",
    "probe_request",
    "release_request",
    "renew_request",
]


@dataclass(frozen=True)
class Request:
    """A script with its keys and arguments, for every node alike."""

    script: Script
    keys: tuple[bytes, ...]
    arguments: tuple[bytes, ...] = field(repr=False)  # of which the first is a token


@dataclass(frozen=True)
class Marker:
    """
    A note on the nodes about an execution.

    Attributes:
        name: Of the execution.
        state: ``"finishing"`` or ``"done"``.
        ttl: How long it is kept [s].
    """

    name: str
    state: str
    ttl: float


def lease_arguments(rules: Rules, lease: Lease) -> tuple[bytes, ...]:
    payload = holder_payload(lease.info, lease.since)
    if lease.renewals:
        payload |= {"renewals": lease.renewals, "margin": round(lease.margin, 3)}
    return (
        lease.token.encode(),
        encode_info(payload),
        ms(lease.ttl),
        b"%d" % (lease.fence or 0),
        *rules.fence_limits,
    )


def acquire_request(rules: Rules, lease: Lease, marker: str | None) -> Request:
    """Take *lease* on a node, its fence being a proposal, unless *marker* stands."""
    keys = Keys.of(rules.prefix, lease.name)
    unless = keys.lock if marker is None else marker_key(rules.prefix, marker)
    return Request(
        ACQUIRE,
        (keys.lock, keys.fence, unless, keys.boot, keys.quarantine),
        (*lease_arguments(rules, lease), rules.quarantine_ms),
    )


def renew_request(rules: Rules, lease: Lease, *, repair: bool) -> Request:
    """Extend *lease* on a node; with *repair* also where its key is missing."""
    keys = Keys.of(rules.prefix, lease.name)
    return Request(
        RENEW,
        (keys.lock, keys.fence, keys.boot, keys.quarantine),
        (*lease_arguments(rules, lease), b"1" if repair else b"0", rules.quarantine_ms),
    )


def release_request(
    rules: Rules,
    name: str,
    token: str,
    *,
    keep: float = 0.0,
    marker: Marker | None = None,
    wakes: bool = True,
    place: int = 0,
) -> Request:
    """
    Return what releases the lock on a node if *token*, or the owner it begins with, holds it.

    Args:
        rules: Of the cluster.
        name: Lock name.
        token: Whose lock: a token, or a `celery_redlock.lock.algorithm.request.LockRequest.owner`.
        keep: Keep the key for so much longer instead of deleting it [s].
        marker: To be set in the same step, whoever holds the lock.
        wakes: Whether who waits is told; not by an attempt that was never granted the lock.
        place: Of the lock, where it has a limit.
    """
    kept = ms(keep) if keep > 0 else b"0"
    lock = record_key(rules.prefix, "lock", name)
    key, state, ttl = lock, b"", b"1"
    if marker is not None:
        key, state, ttl = (
            marker_key(rules.prefix, marker.name),
            marker.state.encode(),
            ms(marker.ttl),
        )
    line = line_key(rules.prefix, name, place) if wakes else lock
    arguments = (token.encode(), kept, state, ttl, channel(rules.prefix), b"%d" % place)
    return Request(RELEASE, (lock, key, line), arguments)


def mark_request(rules: Rules, marker: Marker) -> Request:
    """Return what sets *marker* on a node; with a ttl of 0, takes one of its state away."""
    ttl = ms(marker.ttl) if marker.ttl > 0 else b"0"
    return Request(MARK, (marker_key(rules.prefix, marker.name),), (marker.state.encode(), ttl))


def inspect_request(rules: Rules, name: str) -> Request:
    keys = Keys.of(rules.prefix, name)
    return Request(INSPECT, (keys.lock, keys.fence), ())


def places_request(
    rules: Rules, name: str, limit: int, execution: str, *, lapses: bool = False
) -> Request:
    """Ask which places are taken, and if *lapses* when the first of them lapses."""
    arguments = execution.encode(), b"1" if lapses else b"0"
    return Request(PLACES, lock_keys(rules.prefix, name, limit), arguments)


def probe_request(rules: Rules) -> Request:
    """Ask a node whether it votes, and for its clock."""
    keys, written = Keys.of(rules.prefix, ""), probe_key(rules.prefix)
    return Request(PROBE, (keys.boot, keys.quarantine, written), (rules.quarantine_ms,))
