"""
Make a store refuse a writer whose lock has passed on to somebody else.

Pass it ``current_lock().fence``. A number smaller than the largest that the store has seen is
refused with `StaleFence`; the same holder may write many times.

Each store has a module of its own, which needs that store's library and nothing else:
``celery_redlock.fencing.sqlalchemy`` (Core and ORM), ``celery_redlock.fencing.django`` and
``celery_redlock.fencing.redis``.
"""

from __future__ import annotations

from celery_redlock.errors import StaleFence

__all__ = ["StaleFence"]
