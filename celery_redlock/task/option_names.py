"""Names of the options. Imports nothing: every worker reads them, also one without our tasks."""

from __future__ import annotations

__all__ = ["BUILT_IN", "OPTIONS"]

#: Celery's own tasks; they inherit from us under ``task_cls`` and take no lock.
BUILT_IN = "celery."

#: Task attribute -> setting without the prefix; "" for attributes without a setting.
OPTIONS = {
    "lock_key": "",
    "unique_on": "",
    "lock_ttl": "ttl",
    "lock_wait": "wait",
    "lock_limit": "",
    "lock_rate": "",
    "max_deliveries": "max_deliveries",
    "lock_mode": "mode",
    "on_conflict": "on_conflict",
    "on_unavailable": "on_unavailable",
    "on_lock_lost": "on_lock_lost",
    "fence": "fence",
    "min_hold": "",
    "dedup_ttl": "dedup_ttl",
    "chain_on_skip": "",
    "unique_until": "",
    "unique_for": "",
    "on_duplicate": "",
    "overlap": "",
    "debounce": "",
    "debounce_max": "",
}
