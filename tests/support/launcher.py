"""
Python programs that start at once: forked from a process that has Celery imported already.

A whole run starts some thousand times ``celery ...``, and importing Celery is most of what each
start costs. So each test process keeps one launcher: it imports what they all import, and does
nothing else. A program begins as a fork of it, with arguments, environment, folder, path and
standard streams of its own, and is as independent as any other process from then on.

What has to be there before the first import is started by `subprocess` as ever: a patching pool,
`sitecustomize`, a preloaded library, other options of Python.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import io
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["popen"]

#: Imported before the first program starts.
MODULES = (
    "celery.apps.beat", "celery.apps.worker", "celery.backends.redis",
    "celery.bin.celery", "celery.concurrency.prefork", "celery.worker.worker",
    "celery.worker.consumer", "kombu.transport.redis", "kombu.transport.memory",
    "celery_redlock.beat", "celery_redlock.ops.cli", "celery_redlock.task.worker.forced_ends",
    "celery_redlock.testing",
)  # fmt: skip
#: Programs that a fork can be; ``-c`` is one, too.
PROGRAMS = ("celery",)
#: Begin of what is read from the environment by what is imported, or before that.
EARLY = ("PYTHON", "LD_", "MALLOC", "PROMETHEUS_MULTIPROC")
#: Of the environment: Python reads these before it runs anything; these two a fork makes up for.
MADE_UP_FOR = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE")
#: What a Python takes from its locale when it starts is that of the launcher, which has ours.
LOCALE = ("LANG", "LC_ALL", "LC_CTYPE")
MESSAGE = 1 << 20


def popen(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start *command*, as `subprocess.Popen` with *options* does, at once if it can be."""
    kind = Launched if is_for_launcher(command, **options) else subprocess.Popen
    return kind(command, **options)


def is_for_launcher(
    command: Sequence[str], env: dict[str, str] | None = None, **options: Any
) -> bool:
    environment = os.environ if env is None else env
    early = [name for name in environment if name.startswith(EARLY)]
    path = environment.get("PYTHONPATH", "").split(os.pathsep)
    program = command[1:2] == ["-c"] or (command[1:2] == ["-m"] and command[2] in PROGRAMS)
    return (
        sys.platform == "linux"
        and command[0] == sys.executable
        and program
        and not {"gevent", "eventlet"} & set(command)
        and set(early) <= set(MADE_UP_FOR)
        and all(environment.get(name) == os.environ.get(name) for name in LOCALE)
        and not any(Path(folder, "sitecustomize.py").exists() for folder in filter(None, path))
        and not {"pass_fds", "preexec_fn", "process_group", "user"} & set(options)
    )


class Launched(subprocess.Popen[Any]):
    """
    A program that is a child of the launcher; to its caller it is a `subprocess.Popen`.

    What Popen does by fork and waitpid, it asks the launcher to do.
    """

    def _execute_child(self, args: Any, *rest: Any) -> None:
        cwd, env, streams, starts_session = rest[4], rest[5], rest[9:15], rest[20]
        order = {
            "words": [str(word) for word in args[1:]],
            "folder": os.fspath(cwd or Path.cwd()),
            "environment": dict(os.environ if env is None else env),
            "starts_session": starts_session,
        }
        given = [streams[0], streams[3], streams[5]]  # the child's ends; -1 is ours
        fds = [number if fd < 0 else fd for number, fd in enumerate(given)]
        try:
            self.pid = launcher.ask(order, fds)
            self._child_created = True
        finally:
            self._close_pipe_fds(*streams)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        found = launcher.ask({"wait": self.pid})
        if not found and not wait_flags:
            time.sleep(0.01)  # the caller asks again until it has ended
        return (self.pid, found[0]) if found else (0, 0)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid and self.returncode is None:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def has_ended(self) -> bool:
        """Whether it has. It is not reaped: its id and its group stay its own."""
        return self.returncode is not None or bool(launcher.ask({"peek": self.pid}))


class Launcher:
    """The side that asks: starts the launcher process when it is first needed."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._socket: socket.socket | None = None

    def ask(self, order: dict[str, Any], fds: Sequence[int] = ()) -> Any:
        with self._one_at_a_time:
            if self._socket is None:
                self._socket = self._start()
            socket.send_fds(self._socket, [json.dumps(order).encode()], fds)
            answer = self._socket.recv(MESSAGE)
        if not answer:
            raise RuntimeError("the launcher has ended")
        return json.loads(answer)

    @staticmethod
    def _start() -> socket.socket:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            subprocess.Popen(
                [sys.executable, __file__, str(its.fileno())],
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
                start_new_session=True,
            ).returncode = 0  # it ends when we do: nobody waits for it
        atexit.register(ours.close)
        return ours


launcher = Launcher()


# -- the launcher process ----------------------------------------------------------------


def serve(asked: socket.socket) -> dict[str, Any]:
    """Carry out orders until nobody gives any; in a new child, return what it is to be."""
    while True:
        text, fds, *_ = socket.recv_fds(asked, MESSAGE, 3)
        if not text:
            os._exit(0)
        order: dict[str, Any] = json.loads(text)
        if "wait" in order:
            pid, status = os.waitpid(order["wait"], os.WNOHANG)
            answer: Any = [status] if pid else []
        elif "peek" in order:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            answer = os.waitid(os.P_PID, order["peek"], options) is not None
        else:
            has_begun, begins = os.pipe()
            answer = os.fork()
            if answer == 0:
                asked.close()
                if order["starts_session"]:
                    os.setsid()
                for number, fd in enumerate(fds):
                    os.dup2(fd, number)
                os.closerange(3, max(*fds, begins) + 1)
                return order
            os.close(begins)
            os.read(has_begun, 1)  # ends when the child has its session and streams
            for fd in (has_begun, *fds):
                os.close(fd)
        asked.send(json.dumps(answer).encode())


def become(order: dict[str, Any], base: list[str]) -> None:
    """Be the program of *order*, as if Python had been started with it; *base* is the path."""
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    is_unbuffered = "PYTHONUNBUFFERED" in os.environ
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        buffering = 0 if fd and is_unbuffered else -1
        raw: Any = open(fd, "wb" if fd else "rb", buffering, closefd=False)  # noqa: SIM115
        before = getattr(sys, name)
        stream = io.TextIOWrapper(
            raw,
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=not is_unbuffered and (fd == 2 or raw.isatty()),
            write_through=is_unbuffered,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
    option, program, *words = order["words"]
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    first = "" if option == "-c" else order["folder"]
    sys.path[:] = [first, *filter(None, path), *base]
    importlib.invalidate_caches()
    if option == "-c":
        sys.argv[:] = ["-c", *words]
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))
    else:
        sys.argv[:] = [program, *words]
        runpy.run_module(program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    rest_of_path = sys.path[1:]
    for module in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what the programs share stays shared
    become(serve(socket.socket(fileno=int(sys.argv[1]))), rest_of_path)
