"""The Redis keys of a lock name: short whatever the name is."""

from __future__ import annotations

import tracemalloc

from celery_redlock.lock.records import Keys


def test_long_names_are_not_kept():
    """A process that meets names of megabytes, as a forged message can have, keeps none of them."""
    Keys.of("redlock", "warm")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(20):
            Keys.of("redlock", f"{number}{'x' * 1_000_000}")
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1_000_000


def test_long_names_that_begin_alike_have_keys_of_their_own():
    """What does not fit into a key is told apart by a digest."""
    one, other = (Keys.of("redlock", "x" * 10_000 + end) for end in "ab")
    assert one.lock != other.lock
    assert len(one.lock) < 200
