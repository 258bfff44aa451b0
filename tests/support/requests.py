"""Requests to a lock node, as Hypothesis makes them up: all of the library's, of one lock."""

from __future__ import annotations

from hypothesis import strategies as st

from celery_redlock.beat.slot_records import (
    Claim,
    claim_request,
    look_request,
    settle_request,
    withdraw_request,
)
from celery_redlock.lock.lease import Lease
from celery_redlock.lock.nodes.guard import boot_marker
from celery_redlock.lock.records import Keys, line_key, ms, place_name, waiters_key
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.requests import (
    Marker,
    Request,
    acquire_request,
    inspect_request,
    mark_request,
    places_request,
    probe_request,
    release_request,
    renew_request,
)
from celery_redlock.lock.scripts.scripts import ENROL
from celery_redlock.lock.waiting.waiting import InLine, leave_request, wait_request
from celery_redlock.reading.journal import record_request
from celery_redlock.unique.requests import (
    AS_IT_IS,
    OVER,
    Start,
    Trigger,
    end_request,
    reserve_request,
    start_request,
)

__all__ = [
    "BOOT",
    "DUE",
    "KEYS",
    "LINE",
    "NAME",
    "OF_ANYTHING_ELSE",
    "OF_LINES",
    "OF_LOCKS",
    "OF_RESERVATIONS",
    "REQUESTS",
    "RULES",
    "TINY",
    "WAITERS",
    "X",
    "enrolment",
    "words_of",
]

#: How long something stands that is to be over soon [ms].
TINY = b"3"
some = st.sampled_from
RULES = Rules(ttl=20, max_ttl=30)
NAME = "report"
KEYS = Keys.of(RULES.prefix, NAME)
LINE, WAITERS = line_key(RULES.prefix, NAME), waiters_key(RULES.prefix, NAME)
BOOT = boot_marker("r" * 40, "f" * 16)
DAY, SHORT = 86_400.0, int(TINY) / 1000.0
X, X2, Y = "a" * 40, "a" * 32 + "c" * 8, "b" * 40  # the first two are of one owner
FAR = 2**53 - 1
DUE = 1_700_000_000.0

TOKENS, TTLS = some([X, X, X, X2, Y]), some([DAY, DAY, DAY, SHORT])
FENCES = some([0, 1, 1, 2, 7, 7, 4096, FAR])
PLACES = some([0, 0, 0, 1])
LEASES = st.builds(
    lambda place, token, fence, ttl: Lease(place_name(NAME, place), token, fence, ttl, 0.0, 0.0),
    PLACES, TOKENS, FENCES, TTLS,
)  # fmt: skip
KEPT = st.builds(Marker, some(["m", "n"]), some(["started", "finishing", "done"]), TTLS)
BEGUN = st.builds(
    Start, st.just({}), TOKENS, some(["first", "second"]), some([DAY, SHORT, AS_IT_IS, OVER]), TTLS
)
WORDS = some([OVER, "idle", "unstarted", "wait", "hand", "window", "ran"])
TRIGGERS = st.builds(
    lambda life, window, arguments: Trigger(NAME, life, {}, window=window, arguments=arguments),
    TTLS, some([0.0, DAY]), some([b"", b"[1]", b"[2]"]),
)  # fmt: skip
CLAIMS = st.builds(
    lambda due, token, fence, keep, lock: Claim(NAME, due, token, fence, keep, lock),
    some([DUE, DUE + 60, 4e9]), TOKENS, some([1, 2, 3]), TTLS, some([None, NAME]),
)  # fmt: skip
ONES = st.builds(
    lambda who, since, *others: InLine(NAME, who * 32, since, {}, *others),
    some(["1", "2", "3"]), some([0.0, DUE, DUE + 1, 9e9]), some(["", "c" * 16, "d" * 16]),
    some([1, 2]), st.booleans(),
)  # fmt: skip
OF_LOCKS = st.one_of(
    *[st.builds(acquire_request, st.just(RULES), LEASES, some([None, None, "m", "n"]))] * 4,
    *[st.builds(renew_request, st.just(RULES), LEASES, repair=st.booleans())] * 3,
    *[st.builds(
        lambda place, token, **how: release_request(
            RULES, place_name(NAME, place), token, place=place, **how),
        PLACES, some([X, Y, X[:32], X[:31]]),
        keep=some([0.0, 0.0, DAY]), marker=some([None]) | KEPT, wakes=some([True, True, False]),
    )] * 2,
    st.just(inspect_request(RULES, NAME)),
    st.builds(
        places_request, st.just(RULES), st.just(NAME), some([1, 2, 3]), some(["", "x"]),
        lapses=st.booleans(),
    ),
)  # fmt: skip
OF_LINES = st.one_of(
    *[st.builds(wait_request, st.just(RULES), ONES, some([0, 0, 1, 2]))] * 4,
    st.builds(leave_request, st.just(RULES), st.just(NAME), some(["1" * 32, "2" * 32, "3" * 32])),
)
OF_RESERVATIONS = st.one_of(
    *[st.builds(reserve_request, st.just(RULES), TRIGGERS, TOKENS, some([1, 2, 2**53]))] * 4,
    *[st.builds(start_request, st.just(RULES), st.just(NAME), TOKENS, BEGUN)] * 2,
    *[st.builds(end_request, st.just(RULES), st.just(NAME), TOKENS, WORDS, TTLS)] * 2,
)
OF_ANYTHING_ELSE = st.one_of(
    st.builds(mark_request, st.just(RULES), KEPT),
    st.just(probe_request(RULES)),
    st.builds(record_request, st.just(RULES), some([b"{}"])),
    *(st.builds(one, st.just(RULES), CLAIMS)
      for one in (claim_request, settle_request, withdraw_request)),
    st.just(look_request(RULES, NAME)),
)  # fmt: skip
REQUESTS = st.one_of(
    *[OF_LOCKS] * 10, *[OF_LINES] * 5, *[OF_RESERVATIONS] * 8, *[OF_ANYTHING_ELSE] * 7
)


def words_of(request: Request) -> tuple[bytes, ...]:
    """Return *request* as a connection sends it."""
    boot = (BOOT,) if request.script.guarded else ()
    head = (b"EVALSHA", request.script.sha, b"%d" % len(request.keys))
    return (*head, *request.keys, *request.arguments, *boot)


def enrolment(mode: bytes) -> tuple[bytes, ...]:
    keys = (KEYS.boot, KEYS.quarantine)
    return (b"EVALSHA", ENROL.sha, b"2", *keys, BOOT, ms(RULES.quarantine), mode)
