"""
A page at work: its blocks are run in order, in a folder of their own, on real servers.

Names of servers in a page stand for servers of the test: they are replaced in its text, and put
back into what commands write.
"""

from __future__ import annotations

import importlib
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from celery import Celery

from celery_redlock import ConfigurationError, Redlock
from celery_redlock.plugin import plugin_for
from support.clients import let_go
from support.console import Console
from support.page_names import Names
from support.pages import Block, Command, blocks_of, commands_of, outcome_of
from support.patience.sitecustomize import DEFAULTS, PATIENCE, patient_with

__all__ = ["PageRun", "run_page"]


class PageRun:
    """
    Runs blocks of one page.

    Args:
        folder: Empty; files are written here, and everything runs here.
        names: What the names of servers stand for.

    Attributes:
        left: What the Python blocks have left, by name.
        console: Runs the commands.
    """

    def __init__(self, folder: Path, names: Names) -> None:
        self.folder = folder
        self.names = names
        self.left: dict[str, Any] = {"__name__": "page"}
        self.console = Console(folder, names.put_back)

    def take(self, block: Block) -> None:
        """Do with *block* what its outcome is; AssertionError and what its Python raises."""
        actions: dict[str | None, Callable[[Block], None]] = {
            "executed": self.execute,
            "file": self.write,
            "run": self.run,
            "background": self.background,
        }
        action = actions.get(outcome_of(block))
        if action is not None:
            action(block)

    def execute(self, block: Block) -> None:
        # On its own line of the page, as a traceback names it.
        text = "\n" * (block.line - 1) + self.names.replaced(block.text)
        exec(compile(text, block.page, "exec", dont_inherit=True), self.left)

    def write(self, block: Block) -> None:
        file = self.folder / block.notes["file"]
        assert file.resolve().is_relative_to(self.folder.resolve()), f"{block}: {file}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.names.replaced(block.text))
        importlib.invalidate_caches()  # the page may import it within the same tick of the clock

    def run(self, block: Block) -> None:
        expect = int(block.notes.get("expect", "0"))
        for command in self.commands(block):
            self.console.run(command, expect=expect)

    def background(self, block: Block) -> None:
        (command,) = self.commands(block)
        self.console.background(command, block.notes["background"])

    def commands(self, block: Block) -> list[Command]:
        """Return what is typed in a console block; what it shows keeps its names."""
        typed = [(command, self.names.replaced(command.text)) for command in commands_of(block)]
        return [replace(command, text=text) for command, text in typed]

    def close(self) -> None:
        self.console.close()
        for values in [self.left, *map(vars, self._forgotten_modules())]:
            for value in list(values.values()):
                close(value)

    def _forgotten_modules(self) -> list[Any]:
        """Return the modules that came from the page's files, which nobody finds any more."""
        mine = [
            name
            for name, module in list(sys.modules.items())
            if place_of(module).startswith(f"{self.folder}{os.sep}")
        ]
        return [sys.modules.pop(name) for name in mine]


def place_of(module: Any) -> str:
    """Return where a module is from; that of a folder without ``__init__.py`` is the folder."""
    return getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")


def close(value: Any) -> None:
    if isinstance(value, Celery):
        with suppress(ConfigurationError):  # an example of settings that make no sense
            plugin_for(value).locks.close()
        let_go(value)
    elif isinstance(value, (Redlock, sqlite3.Connection)):
        value.close()
    elif type(value).__module__.startswith("sqlalchemy.engine") and hasattr(value, "dispose"):
        value.dispose()


@contextmanager
def run_page(
    page: Path, folder: Path, names: Names, take: Callable[[PageRun, Block], None] | None = None
) -> Iterator[PageRun]:
    """Run all blocks of *page*, and hand over what they have left; then close it."""
    run = PageRun(folder, names)
    patient = patient_with(page.read_text())
    patience = mock.patch.dict(DEFAULTS, patient)
    told = mock.patch.dict(os.environ, {PATIENCE: str(patient["node_timeout"])})
    before = Path.cwd(), list(sys.path)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    patience.start()
    told.start()
    try:
        for block in blocks_of(page):
            (take or PageRun.take)(run, block)
        yield run
    except BaseException:
        sys.stderr.write(run.console.told())  # pytest shows what its workers have done
        raise
    finally:
        try:
            run.close()
        finally:
            told.stop()
            patience.stop()
            os.chdir(before[0])
            sys.path[:] = before[1]
