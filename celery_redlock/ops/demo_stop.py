"""
Ctrl-C and its kin as a request that is looked at between two steps, not an exception anywhere.

An exception between starting a process and noting its id would leave that process behind.
The demo never waits long without a look, so a request is heeded within a fraction of a second.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing only since Python 3.11

__all__ = ["StopRequests", "Stopped"]

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class Stopped(Exception):
    """
    Somebody asked the demo to end.

    Attributes:
        exit_code: What a shell expects of a process that ended so.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


class StopRequests:
    """Notes requests to end while its ``with`` lasts; repeating one changes nothing."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for name in NAMES:
            number = getattr(signal, name, None)
            # Under nohup a hang-up is to be ignored.
            if number is not None and not is_ignored_hangup(number):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise Stopped if somebody has asked for it."""
        if self._number is not None:
            raise Stopped(self._number)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._number = self._number or number


def is_ignored_hangup(number: int) -> bool:
    """Return whether signal *number* is a hang-up that this process was started to ignore."""
    return number == getattr(signal, "SIGHUP", None) and signal.getsignal(number) is signal.SIG_IGN
