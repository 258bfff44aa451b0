"""Servers whose wall clock can be set, by libfaketime (Debian package ``libfaketime``)."""

from __future__ import annotations

from pathlib import Path

from celery_redlock.testing.servers import Server, find_binary

__all__ = ["LIBRARY", "NoFakeTime", "server_with_clock", "set_clock"]

PLACES = ("/usr/lib", "/usr/local/lib", "/opt/homebrew/lib")
#: The library to preload, or None where there is none.
LIBRARY = next(
    (
        found
        for place in PLACES
        for pattern in ("faketime/libfaketime.so.1", "*/faketime/libfaketime.so.1")
        for found in Path(place).glob(pattern)
    ),
    None,
)
#: Starts the server in place of the shell, so its process id is the server's.
WRAPPER = """#!/bin/sh
export LD_PRELOAD={library} FAKETIME_TIMESTAMP_FILE={clock}
export FAKETIME_NO_CACHE=1 FAKETIME_DONT_FAKE_MONOTONIC=1
exec {server} "$@"
"""


class NoFakeTime(RuntimeError):
    """The library that makes clocks wrong is not installed."""


class ServerWithClock(Server):
    """A server whose end removes what libfaketime leaves in shared memory when it is killed."""

    def kill(self) -> None:
        super().kill()
        if self.folder is not None:
            for left in Path("/dev/shm").glob(f"*faketime_*_{self.pid}"):
                left.unlink()


def server_with_clock(clock: Path) -> Server:
    """
    Return a server, not started yet, whose clock `set_clock` sets.

    Args:
        clock: A file for its clock; a program of that name with ``.sh`` is put beside it.

    Raises:
        NoFakeTime: There is no libfaketime.
    """
    if LIBRARY is None:
        raise NoFakeTime("clock steps need libfaketime (Debian: apt install libfaketime)")
    set_clock(clock, 0.0)
    program = clock.with_suffix(".sh")
    program.write_text(WRAPPER.format(library=LIBRARY, clock=clock, server=find_binary()))
    program.chmod(0o755)
    return ServerWithClock(binary=program)


def set_clock(clock: Path, ahead: float) -> None:
    """Set the clock of a server *ahead* of ours by so much [s], or behind if negative."""
    new = clock.with_suffix(".new")
    new.write_text(f"{ahead:+.3f}\n")
    new.replace(clock)  # in one step: the server reads it whenever it looks at its clock
