"""
The mutex that is held while metrics are counted, and by whoever forks.

A child would find the mutex of a metrics library as another thread of the parent held it, and never
released.
"""

from __future__ import annotations

from celery_redlock.process.forks import around_fork
from celery_redlock.process.mutex import new_mutex

__all__ = ["counting"]

counting = new_mutex()

around_fork("counting", counting.release, before=counting.acquire, in_parent=counting.release)
