"""Singleton beat: as many schedulers as you like, every slot once."""

from __future__ import annotations

from celery_redlock.beat.scheduler import RedlockScheduler

__all__ = ["RedlockScheduler"]
