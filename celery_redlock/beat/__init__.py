"""
Singleton beat: as many schedulers as you like, every slot once.

`scheduler` is what ``celery beat`` calls; `term` is who leads; `wrapped_scheduler` is the one
at work during a term; `slots` publishes what is due, each slot once; `due` is when slots are
due; `entries` is what we need of an entry, whichever scheduler it comes from; `slot_records` and
`slot_scripts` are what the nodes keep of slots.
"""

from __future__ import annotations

from celery_redlock.beat.scheduler import RedlockScheduler

__all__ = ["RedlockScheduler"]
