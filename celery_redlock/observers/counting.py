"""
The mutex that is held while metrics are counted, and by whoever forks.

A child would find the mutex of a metrics library as another thread of the parent held it, and never
released. Whoever forks takes this after `celery_redlock.nodewatch.forks_held_off`, as the watch
does, and so it has to be imported before: hooks run in reverse order.
"""

from __future__ import annotations

import os

from celery_redlock.mutex import new_mutex

__all__ = ["counting"]

counting = new_mutex()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=counting.acquire,
        after_in_parent=counting.release,
        after_in_child=counting.release,
    )
