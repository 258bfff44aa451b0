"""The revokes that a worker knows of."""

from __future__ import annotations

from typing import Any

from celery.worker.state import revoked, revoked_stamps
from kombu.utils.functional import maybe_list

__all__ = ["is_revoked"]


def is_revoked(request: Any) -> bool:
    if request.id in revoked:
        return True
    stamps = request.request_dict.get("stamps")
    if not isinstance(stamps, dict):
        return False
    return any(
        stamp in maybe_list(values)
        for header, values in revoked_stamps.items()
        for stamp in maybe_list(stamps.get(header)) or ()
    )
