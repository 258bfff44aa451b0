"""What error trackers store of an error, the locals of its frames, shows no token of a holder."""

from __future__ import annotations

import traceback

import pytest

from celery_redlock import LockTaken, Redlock
from celery_redlock.lock.algorithm.participant import new_owner
from celery_redlock.lock.algorithm.request import LockRequest
from celery_redlock.lock.rules import Rules
from celery_redlock.lock.scripts.scripting import fence_in
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.reading.places import read_lock
from support.stored import ROOMY

RULES = Rules(**ROOMY)


def shown_in_frames(error):
    return [
        (frame.f_code.co_name, name, repr(value))
        for frame, _ in traceback.walk_tb(error.__traceback__)
        for name, value in frame.f_locals.items()
    ]


def test_no_token_of_a_holder_is_shown(five_nodes):
    """Whoever reads it could release the lock of another, or renew it."""
    urls = [node.url for node in five_nodes]
    bootstrap(urls, RULES)
    locks, other = Redlock(urls, RULES), Redlock(urls, RULES)
    try:
        lease = locks.acquire("a", wait=60)
        with pytest.raises(LockTaken) as taken:
            other.acquire("a", wait=0.2)
        leaked = [(*where, it) for *where, it in shown_in_frames(taken.value) if lease.token in it]
        assert leaked == []
        assert lease.token not in repr(read_lock(urls, RULES, "a"))
        for it in (lease, locks.release_for, taken.value):
            assert lease.token not in repr(it)
    finally:
        locks.close()
        other.close()


def test_no_owner_is_shown():
    """It is the beginning of each of its tokens, by which a worker releases for its child."""
    owner = new_owner()
    assert owner not in repr(LockRequest("a", 30.0, owner=owner))


def test_an_error_about_a_reply_has_none_of_it():
    """Another's token may be in it."""
    with pytest.raises(ValueError, match="no such word of ours") as error:
        fence_in(b"a1" * 20)
    assert "a1a1" not in str(error.value)
