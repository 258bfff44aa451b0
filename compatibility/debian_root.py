"""
A Debian in a folder: made with debootstrap, entered with mounts and processes of its own.

Nothing of the machine is changed: debootstrap's scripts are copied before one is added, mounts
are in a namespace that ends with what runs in it, and so do all its processes. Where packages come
from is asked of the machine itself, by apt's and pip's own settings.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["RELEASE", "CannotMake", "Root", "mirror"]

#: Code name of Debian's next release.
RELEASE = "forky"
#: How its script of debootstrap is called where that is older than the release.
LIKE = "sid"
#: Where debootstrap's own files are, if DEBOOTSTRAP_DIR does not say it.
SCRIPTS = Path("/usr/share/debootstrap")
#: What tells programs how to get to a package index.
REACHING = re.compile(r"(PIP_|(https?|ftp|no|all)_proxy$|.*(CA_BUNDLE|CERT_FILE)$)", re.IGNORECASE)
#: How hosts are found.
NAMES = (Path("/etc/resolv.conf"), Path("/etc/hosts"))
#: Services are not started by their packages: the tests start what they need.
NO_SERVICES = "#!/bin/sh\nexit 101\n"
#: Runs in the namespace: mounts what programs expect, and the folders listed; then the command.
ENTER = r"""
set -e
root=$1 carried=$2 folder=$3; shift 3
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t proc proc "$root/proc"
IFS=:
for path in $carried; do
    mkdir -p "$root$path"
    mount --bind "$path" "$root$path"
    mount -o remount,bind,ro "$root$path"
done
unset IFS
# Not by exec: the first process has to take in what others leave behind.
code=0
chroot "$root" /bin/sh -c 'cd "$0" && exec "$@"' "$folder" "$@" || code=$?
exit $code
"""


class CannotMake(Exception):
    """The root cannot be made here; the message says why, and what would help."""


class Root:
    """
    A folder with a Debian in it.

    Args:
        folder: Where it is, or is to be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def make(self, packages: Sequence[str], wished: Sequence[str] = ()) -> None:
        """
        Make it if it is missing, and install what it does not have.

        Args:
            packages: What it must have.
            wished: What it gets where the release has it.

        Raises:
            CannotMake: This is no root user's process, or a program is missing.
        """
        if os.geteuid():
            raise CannotMake("debootstrap and chroot need root: run this as root, or with sudo")
        missing = [
            name for name in ("debootstrap", "setpriv", "unshare") if shutil.which(name) is None
        ]
        if missing:
            raise CannotMake(f"no {' and no '.join(missing)} found: install it (on Debian by apt)")
        if not (self.folder / ".made").exists():
            self._bootstrap()
        self._install(packages, wished)

    def _bootstrap(self) -> None:
        """Run debootstrap, which goes on where it was stopped."""
        where = Path(os.environ.get("DEBOOTSTRAP_DIR", SCRIPTS))
        with tempfile.TemporaryDirectory(prefix="debootstrap-") as folder:
            ours = Path(folder) / "debootstrap"
            shutil.copytree(where, ours, symlinks=True)
            script = ours / "scripts" / RELEASE
            if not script.exists():
                script.symlink_to(LIKE)
            environment = {**os.environ, "DEBOOTSTRAP_DIR": str(ours)}
            command = ["debootstrap", "--variant=minbase", RELEASE, str(self.folder), mirror()]
            said(command[:3], environment=environment, whole=command)
        (self.folder / ".made").touch()

    def _install(self, packages: Sequence[str], wished: Sequence[str]) -> None:
        """Install *packages*, and those of *wished* that there are."""
        stamp = self.folder / ".packages"
        wanted = " ".join((*packages, *wished))
        if stamp.exists() and stamp.read_text() == wanted:
            return
        (self.folder / "usr/sbin/policy-rc.d").write_text(NO_SERVICES)
        (self.folder / "usr/sbin/policy-rc.d").chmod(0o755)
        (self.folder / "etc/apt/apt.conf.d/00machine").write_text(apt_settings())
        self.run(["apt-get", "-qq", "update"])
        install = ["apt-get", "-qq", "install", "-y", "--no-install-recommends"]
        self.run([*install, *packages])
        for package in wished:
            self.run([*install, package], check=False)
        stamp.write_text(wanted)

    def run(
        self,
        command: Sequence[str],
        *,
        folder: str = "/",
        environment: Mapping[str, str] | None = None,
        check: bool = True,
        capture: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """
        Run a command inside; all that it leaves running ends with it.

        Args:
            command: Program and arguments.
            folder: Where inside.
            environment: Added to what is needed to reach a package index.
            check: Whether it must end well.
            capture: Whether what it writes is returned, and not seen.
        """
        known = {**reaching(), **(environment or {})}
        files, folders = named_in(known)
        for path in (*NAMES, *files):
            inside = self.folder / path.relative_to("/")
            inside.parent.mkdir(parents=True, exist_ok=True)
            # A copy, as a package may want to replace the file.
            # Nor by a link, which would lead out.
            inside.unlink(missing_ok=True)
            shutil.copyfile(path, inside)
        # Should this process be killed, so is all that it runs inside.
        space = ["setpriv", "--pdeathsig", "KILL"]
        space += ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        there = ":".join(map(str, folders))
        enter = ["sh", "-c", ENTER, "enter", str(self.folder), there, folder]
        variables = {
            "HOME": "/root",
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "DEBIAN_FRONTEND": "noninteractive",
            "RUNLEVEL": "1",
            **known,
        }
        return subprocess.run(
            [*space, *enter, *command],
            env=variables,
            check=check,
            text=True,
            capture_output=capture,
        )

    def version_of(self, package: str) -> str | None:
        """Return the version of an installed Debian package, without Debian's own part."""
        query = ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Version}\n", package]
        told = self.run(query, check=False, capture=True).stdout
        found = re.search(r"^installed (?:\d+:)?([^-+~\n]+)", told, re.MULTILINE)
        return found[1] if found else None


def said(words: Sequence[str], *, environment: Mapping[str, str], whole: Sequence[str]) -> None:
    """Run the command *whole*, called by *words*; only a failure is worth its output."""
    done = subprocess.run(whole, env=environment, check=False, text=True, capture_output=True)
    if done.returncode:
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
        raise CannotMake(f"{shlex.join(words)} failed: see above")


def mirror() -> str:
    """
    Return where this machine's apt gets Debian from.

    Raises:
        CannotMake: It gets it from nowhere, or has not looked yet.
    """
    form = ["--format", "$(ORIGIN) $(COMPONENT) $(SUITE) $(SITE)", "Created-By: Packages"]
    told = subprocess.run(
        ["apt-get", "indextargets", *form], check=False, capture_output=True, text=True
    ).stdout
    for line in told.splitlines():
        origin, component, suite, site = (*line.split(" "), "", "", "", "")[:4]
        if (origin, component) == ("Debian", "main") and "security" not in suite:
            return site
    raise CannotMake("apt knows no mirror of Debian here: is this a Debian? Try apt-get update")


def apt_settings() -> str:
    """Return what this machine's apt is told about proxies and certificates."""
    told = subprocess.run(["apt-config", "dump"], check=True, capture_output=True, text=True).stdout
    ours = [line for line in told.splitlines() if re.match(r"Acquire::https?::.* \"..*\"", line)]
    # A mirror may be some weeks old; what it has is signed all the same.
    return "".join(f"{line}\n" for line in (*ours, 'Acquire::Check-Valid-Until "false";'))


def reaching() -> dict[str, str]:
    """Return the environment by which a package index is reached as from outside."""
    ours = [sys.executable, "-m", "pip", "config", "list"]
    told = subprocess.run(ours, check=False, capture_output=True, text=True).stdout
    found = {}
    for name, value in re.findall(r"^(?:global|install)\.([\w-]+)='(.*)'$", told, re.MULTILINE):
        found[f"PIP_{name.upper().replace('-', '_')}"] = value.replace("\\n", " ")
    ours_too = {name: value for name, value in os.environ.items() if REACHING.match(name)}
    return {**found, **ours_too, "PIP_ROOT_USER_ACTION": "ignore"}


def named_in(environment: Mapping[str, str]) -> tuple[list[Path], list[Path]]:
    """Return the files and the folders of this machine that *environment* names."""
    words = [
        word.removeprefix("file://") for value in environment.values() for word in value.split()
    ]
    paths = {Path(word) for word in words if word.startswith("/")}
    # An index in a folder leads to files beside it.
    paths = {path.parent if path.name == "simple" else path for path in paths}
    return (
        sorted(path for path in paths if path.is_file()),
        sorted(path for path in paths if path.is_dir()),
    )
