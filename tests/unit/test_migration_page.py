"""The tables of the migration page: all that the other libraries read has a row."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import warnings
from pathlib import Path

import pytest
from celery import Task

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"

#: Package -> strings that it looks up, and that are no options.
NOT_OPTIONS = {
    "celery_once": {"self", "retries", "host", "port", "password", "db", "ssl", "socket_timeout"},
    "celery_singleton": {"result_backend", "broker_url"},
    "celery_heimdall": {"result_backend", "broker_url", "heimdall", "task", "args", "kwargs", "id"},
    "celery_once_task": {"task_id", "id", "name", "args", "kwargs", "task"},
    "redbeat": set(),
}
#: Package -> the class that tasks are based on.
BASES = {
    "celery_once": "QueueOnce",
    "celery_singleton": "Singleton",
    "celery_heimdall": "HeimdallTask",
    "celery_once_task": "OnceTask",
}
LOOKUPS = ("get", "_from_task_or_app", "either_or")
#: Where options are read.
FILES = {
    "celery_once": ("tasks.py", "helpers.py", "backends/redis.py", "backends/file.py"),
    "celery_singleton": ("singleton.py", "config.py"),
    "celery_heimdall": ("task.py", "config.py"),
    "celery_once_task": ("task.py", "config.py", "django.py", "signals.py"),
    "redbeat": ("schedulers.py",),
}
SECTIONS = {
    "celery_once": "From celery-once",
    "celery_singleton": "From celery-singleton",
    "celery_heimdall": "From celery-heimdall",
    "celery_once_task": "From celery-once-task",
    "redbeat": "From RedBeat's lock",
}


def folder_of(package):
    """Return where *package* lies; without it a test is skipped at home and fails in CI."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        assert os.environ.get("CI") != "true", f"{package} is not installed"
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0])


def trees(package):
    folder = folder_of(package)
    with warnings.catch_warnings():  # their escape sequences are theirs
        warnings.simplefilter("ignore")
        return [ast.parse((folder / name).read_text()) for name in FILES[package]]


def read_by(package):
    found = set()
    for node in (node for tree in trees(package) for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            index = {"getattr": 1, **dict.fromkeys(LOOKUPS, 0)}.get(name)
            if index is not None and len(node.args) > index:
                found.add(getattr(node.args[index], "value", None))
        elif isinstance(node, ast.Subscript):
            found.add(getattr(node.slice, "value", None))
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
            found.add(getattr(node.left, "value", None))
    names = {name for name in found if isinstance(name, str) and name.isidentifier()}
    return names - NOT_OPTIONS[package]


def section(package):
    return PAGE.read_text().partition(f"\n## {SECTIONS[package]}\n")[2].partition("\n## ")[0]


def in_table(package):
    rows = [line for line in section(package).splitlines() if line.startswith("| ")]
    cells = [row.split(" | ")[0] for row in rows]
    return {word for cell in cells for code in re.findall(r"`([^`]+)`", cell)
            for word in re.findall(r"\w+", code)}  # fmt: skip


@pytest.mark.parametrize("package", SECTIONS)
def test_every_option_that_a_library_reads_is_in_the_table(package):
    options = read_by(package)
    if package == "redbeat":  # those of the connection are redis-py's
        options = {name for name in options if name.startswith("redbeat_")}
    assert len(options) > 3
    assert options - in_table(package) == set()


@pytest.mark.parametrize(("package", "base"), BASES.items())
def test_every_attribute_and_method_of_a_class_is_in_the_table(package, base):
    (cls,) = (
        node
        for tree in trees(package)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == base
    )
    names = set()
    for node in cls.body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    own = {n for n in names if not n.startswith("_") and not hasattr(Task, n)}
    assert own
    assert own - in_table(package) == set()
