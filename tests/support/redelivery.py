"""
Have every kombu deliver messages again as soon as a test asks for it.

Since 5.7 kombu's Redis transport can be told how often it is to look for messages whose
visibility timeout has passed. Before, it looks every 100 s, which no test can wait for.
"""

from __future__ import annotations

from typing import Any

from kombu.transport import redis

__all__ = ["look_often", "redelivered_after"]

#: How often a kombu looks that cannot be told [s].
OFTEN = 1.0


def redelivered_after(seconds: float) -> dict[str, Any]:
    """Return settings by which Redis delivers again what nobody has acknowledged by then [s]."""
    transport = {
        "visibility_timeout": seconds,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        # Whoever is killed while it gives back what others had keeps all from doing so for as long;
        # five minutes by default.
        "unacked_mutex_expire": 2,
    }
    return {"broker_transport_options": transport}


def look_often() -> None:
    """Make up in this process for ``unacked_restore_interval`` and ``unacked_restore_throttle``."""
    if hasattr(redis.Channel, "unacked_restore_interval"):
        return
    qos: Any = redis.QoS
    transport: Any = redis.Transport
    restore, register = qos.restore_visible, transport.register_with_event_loop

    def restore_every_time(self: Any, *args: Any, **options: Any) -> Any:
        return restore(self, *args, **{**options, "interval": 1})

    def register_often(self: Any, connection: Any, loop: Any) -> None:
        call_repeatedly = loop.call_repeatedly

        def call_often(delay: float, function: Any, *args: Any) -> Any:
            is_it = function == self.cycle.maybe_restore_messages
            return call_repeatedly(OFTEN if is_it else delay, function, *args)

        loop.call_repeatedly = call_often
        try:
            register(self, connection, loop)
        finally:
            del loop.call_repeatedly

    qos.restore_visible = restore_every_time
    transport.register_with_event_loop = register_often
