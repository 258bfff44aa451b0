"""Leaks that can be planted, one of each kind, to see that the census finds them."""

from __future__ import annotations

import os
import threading
from typing import Any

from redis.connection import AbstractConnection

from celery_redlock.lock import locks, redlock

__all__ = ["plant_all"]

_kept: list[Any] = []


def keep_sockets() -> None:
    real: Any = AbstractConnection.disconnect

    def disconnect(self: Any, *args: Any) -> None:
        if self._sock is not None:
            _kept.append(os.dup(self._sock.fileno()))
        real(self, *args)

    AbstractConnection.disconnect = disconnect  # type: ignore[method-assign]


def keep_threads() -> None:
    real: Any = AbstractConnection.connect

    def connect(self: Any) -> None:
        real(self)
        stay = threading.Thread(target=threading.Event().wait, daemon=True)
        stay.start()

    AbstractConnection.connect = connect  # type: ignore[method-assign]


def keep_leases() -> None:
    real: Any = locks.of_release

    def of_release(lease: Any, *args: Any) -> Any:
        _kept.append(lease)
        return real(lease, *args)

    locks.of_release = redlock.of_release = of_release


def plant_all() -> None:
    keep_sockets()
    keep_threads()
    keep_leases()
