"""
Wait until a child process is proven dead.

On Linux by a handle on that process (pidfd), which no other can be mistaken for.
Elsewhere by asking whether its number is still in use: a dead child keeps its number until
its parent has taken note of it, so the answer comes later, and never too early.

Source:
    pidfd_open(2), waitid(2).
"""

from __future__ import annotations

import os
import select
import time

__all__ = ["wait_until_dead"]

#: How often a process is asked for where there are no handles [s].
INTERVAL = 0.05


def wait_until_dead(pid: int, longest: float) -> bool:
    """
    Return whether this process's child *pid*, alive, dead or already reaped, is dead.

    Waits up to *longest* [s].
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # no such call in this system, or not allowed to use it
        return wait_until_reaped(pid, longest)
    try:
        return not is_own_child(handle) or is_readable(handle, longest)
    except OSError:  # before Linux 5.4 nobody can be asked about a handle
        return wait_until_reaped(pid, longest)
    finally:
        os.close(handle)


def is_readable(handle: int, longest: float) -> bool:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(longest * 1000.0))


def is_own_child(handle: int) -> bool:
    """
    Return whether *handle* is of a child of this process; looks only, reaps nothing.

    If not, the child of that number was reaped, and its number is another's now. The kernel is
    asked, as /proc may be that of other processes than ours, or not be there.
    """
    try:
        os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def wait_until_reaped(pid: int, longest: float) -> bool:
    deadline = time.monotonic() + longest
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return True  # somebody else's: ours could always be asked
        time.sleep(INTERVAL)  # a process that is no child of ours can only be looked at
    return False
