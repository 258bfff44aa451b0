"""Whether another process is there."""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_gone"]


def is_gone(pid: int) -> bool:
    """Return whether there is no process *pid*, or only what is left of one."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"
