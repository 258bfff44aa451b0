"""A server program with the libraries it needs, so that it runs on another Linux than its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from compatibility.debian_root import Root

__all__ = ["bring"]

#: Started by its own loader, with its own libraries; the folder may be anywhere.
START = """\
#!/bin/sh
here=$(dirname "$0")
exec "$here/lib/loader" --library-path "$here/lib" "$here/lib/{name}" "$@"
"""


def bring(program: str, into: Path, root: Root | None = None) -> Path:
    """
    Copy a program with its libraries; return what starts the copy.

    Args:
        program: Its absolute path.
        into: Folder for it; what was there is replaced.
        root: Where it is from; None: this machine.
    """
    ldd = ["ldd", program]
    if root is None:
        told = subprocess.run(ldd, check=True, capture_output=True, text=True).stdout
    else:
        told = root.run(ldd, capture=True).stdout
    outside = Path("/") if root is None else root.folder
    shutil.rmtree(into, ignore_errors=True)
    (into / "lib").mkdir(parents=True)

    def copy(path: str, name: str) -> None:
        source = found_in(outside, path)
        shutil.copyfile(source, into / "lib" / name)
        (into / "lib" / name).chmod(0o755)

    name = Path(program).name
    copy(program, name)
    for library, path in re.findall(r"(\S+) => (/\S+)", told):
        copy(path, library)
    (loader,) = re.findall(r"^\s*(/\S*/ld-\S+)", told, re.MULTILINE)
    copy(loader, "loader")
    start = into / name
    start.write_text(START.format(name=name))
    start.chmod(0o755)
    return start


def found_in(outside: Path, path: str) -> Path:
    """Return the file that is at *path* inside of *outside*, whose links lead from there."""
    place = outside
    for part in Path(path).relative_to("/").parts:
        place = place / part
        while place.is_symlink():
            # Joined to an absolute link, the folder before it counts for nothing.
            target = "/" / place.parent.relative_to(outside) / place.readlink()
            place = found_in(outside, os.path.normpath(target))
    return place
