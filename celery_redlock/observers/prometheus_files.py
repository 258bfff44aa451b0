"""
Where the metrics of a worker and its children meet: a directory of files, one set per process.

prometheus_client decides at its first import whether it counts in memory or in files, by the
environment variable that names their directory; as long as it counts nothing, it can decide again.
It does not tidy up after processes that are gone; `tidy` does.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from celery_redlock.errors import ConfigurationError

__all__ = ["VARIABLE", "directory", "is_private", "share", "tidy"]

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
#: Of directories of our own; the id of the process that owns one follows.
PREFIX = "celery-redlock-metrics-"
#: File in such a directory that its owner keeps locked, and the age before that counts [s].
IN_USE, YOUNG = "in-use", 60.0
#: What a process leaves behind and every later sum has to include; gauges are not part of it.
SUMS = ("counter", "histogram", "summary")

_kept: list[int] = []


def directory() -> Path | None:
    """Return where prometheus_client counts, None if that is in memory."""
    name = os.environ.get(VARIABLE) or os.environ.get(VARIABLE.lower())
    return Path(name) if name else None


def share() -> None:
    """
    Have prometheus_client count in files; without effect once it counts something in memory.

    The directory is that of the environment, else one of our own, which is removed when this
    process ends. One that another worker made for itself, and left to us in the environment, is
    not taken.

    Raises:
        ConfigurationError: The directory of the environment cannot be made.
    """
    given = directory()
    if given is not None and not given.name.startswith(PREFIX):
        make(given)
    elif given is not None and is_private(given):  # of a worker that has replaced itself: SIGHUP
        make(given)
        own(given)
    elif counts_nothing():
        sweep(Path(tempfile.gettempdir()))
        made = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        os.environ[VARIABLE] = str(made)
        own(made)
    if directory() is not None and counts_nothing():
        decide_again()


def counts_nothing() -> bool:
    """Return whether there is no metric but those that prometheus_client has by itself."""
    if "prometheus_client.values" not in sys.modules:
        return True
    registry = importlib.import_module("prometheus_client").REGISTRY
    return all(metric.name.startswith(("python_", "process_")) for metric in registry.collect())


def decide_again() -> None:
    """
    Have prometheus_client look at the environment again, if something imported it before us.

    So does Flower, of which the command ``celery`` imports a part wherever it is installed.
    """
    values = sys.modules.get("prometheus_client.values")
    if values is not None:
        values.ValueClass = values.get_value_class()  # type: ignore[attr-defined]


def make(given: Path) -> None:
    try:
        given.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        msg = (
            f"{VARIABLE} is {str(given)!r}, which is not a directory and cannot be made one "
            f"({error.strerror}); name a directory that workers can write to"
        )
        raise ConfigurationError(msg) from None


def own(path: Path) -> None:
    """Keep *path* until this process ends, or while one of its children lives."""
    _kept.append(os.open(path / IN_USE, os.O_CREAT | os.O_RDWR, 0o600))
    lock(_kept[-1])
    atexit.register(remove, path, os.getpid())


def sweep(folder: Path) -> None:
    """Remove what workers that were killed have left in *folder*."""
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, another user's, or gone by now
            if time.time() - path.stat().st_mtime > YOUNG:
                file = os.open(path / IN_USE, os.O_RDWR)
                try:
                    lock(file)
                    shutil.rmtree(path)
                finally:
                    os.close(file)


def lock(file: int) -> None:
    """Lock a file; raises OSError if it is locked. By the file, as ids mean nothing elsewhere."""
    fcntl = importlib.import_module("fcntl")  # not on Windows, which has no children either
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_private(path: Path) -> bool:
    """Return whether this process made the directory for itself."""
    return path.name.startswith(f"{PREFIX}{os.getpid()}-")


def remove(path: Path, pid: int) -> None:
    """Remove *path* if this is the process *pid*, and not a child that ends like its parent."""
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)


def tidy(path: Path) -> None:
    """
    Take the dead out of the directory.

    Their live gauges go. In a directory of our own, what they have counted is added up in one
    file, so that it does not grow with every child that has come and gone.
    """
    multiprocess = importlib.import_module("prometheus_client.multiprocess")  # not before `share`
    dead = {pid for pid in processes(path) if not is_alive(pid)}
    for pid in dead:
        multiprocess.mark_process_dead(pid, str(path))
    if is_private(path):
        for kind in SUMS:
            fold([path / f"{kind}_{pid}.db" for pid in sorted(dead)], path / f"{kind}_ended.db")


def processes(path: Path) -> set[int]:
    """Return the ids of all processes that have files there."""
    found = (re.fullmatch(r"[a-z_]+_(\d+)\.db", file.name) for file in path.glob("*.db"))
    return {int(match[1]) for match in found if match}


def is_alive(pid: int) -> bool:
    """Return whether a process *pid* runs on this machine; one that nobody reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):  # a system without it, or it has gone meanwhile
        return True
    return state not in {b"Z", b"X"}


def fold(files: list[Path], total: Path) -> None:
    """Add what is in *files* to *total*, and remove them."""
    there = [file for file in files if file.exists()]
    if not there:
        return
    stored = importlib.import_module("prometheus_client.mmap_dict").MmapedDict
    sums = stored(str(total))
    try:
        for file in there:
            if file.stat().st_size:  # else it was killed before it had written anything
                for key, value, _, _ in stored.read_all_values_from_file(str(file)):
                    sums.write_value(key, sums.read_value(key)[0] + value, 0.0)
            file.unlink()
    finally:
        sums.close()
