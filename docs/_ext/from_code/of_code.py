"""What the reference says of errors, events, metrics, commands and findings, as Markdown."""

from __future__ import annotations

import ast
import inspect
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import click
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

from celery_redlock import errors
from celery_redlock.events import KINDS
from celery_redlock.observers import otel, prometheus
from celery_redlock.ops.cli import redlock
from celery_redlock.ops.doctor import LEVELS
from celery_redlock.ops.main import main

__all__ = [
    "READ",
    "celery_redlock_commands",
    "commands",
    "error_tree",
    "event_table",
    "findings",
    "metrics",
    "opentelemetry",
]

ROOT = Path(__file__).parents[3]
DOCTOR = sorted((ROOT / "celery_redlock" / "ops" / "doctor").glob("*.py"))
#: Files that are read here and not imported.
READ = DOCTOR

#: What a problem is about that keeps the doctor from looking at something.
PROBLEMS = {
    "task-declared": "a task was refused when it was registered",
    "observers": "an observer of `redlock_observers` cannot be had",
}

Rows = list[list[str]]
N = TypeVar("N", bound=ast.AST)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(text: str) -> str:
    """Return *text* as code; nothing for nothing."""
    return f"`{text}`" if text else ""


# -- errors and events ------------------------------------------------------------------------


def error_tree() -> str:
    """Return which error is made from which."""

    def lines(error: type, depth: int) -> Iterator[str]:
        mine = [base.__name__ for base in error.__bases__ if base not in ours]
        also = f" ({', '.join(mine)})" if mine else ""
        yield f"{'    ' * depth}{error.__name__}{also}"
        for each in ours:
            if error in each.__bases__:
                yield from lines(each, depth + 1)

    ours = [getattr(errors, name) for name in errors.__all__]
    return "```text\n" + "\n".join(lines(errors.RedlockError, 0)) + "\n```\n"


def event_table() -> str:
    """Return every event: its fields, and where it is heard of."""
    rows = []
    for kind in KINDS.values():
        sent = f"{'task-' if kind.is_of_task else ''}redlock-{kind.celery_type}"
        shown = [field_words(field) for field in fields(kind)]
        word = logging.getLevelName(kind.level)
        rows.append([code(kind.__name__), ", ".join(shown), word, code(sent)])
    return table(["event", "fields", "logged at", "Celery event"], rows)


def field_words(field: Field[Any]) -> str:
    """Return name and type of a field, with a default if it has a plain one."""
    default = field.default
    words = f"{field.name}: {field.type}" + ("" if default is MISSING else f" = {default!r}")
    return code(words.replace("|", r"\|"))  # in a table it would end the cell


# -- metrics ----------------------------------------------------------------------------------


def metrics() -> str:
    """Return what is counted for Prometheus."""
    assert prometheus.FAMILIES  # it has registered them all
    mine = [m for m in REGISTRY._collector_to_names if isinstance(m, MetricWrapperBase)]  # noqa: SLF001
    rows = []
    for metric in mine:
        (family,) = metric.describe()
        if not family.name.startswith("redlock_"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(map(code, metric._labelnames))  # noqa: SLF001  they are nowhere else
        rows.append([code(name), family.type, labels, family.documentation])
    return table(["metric", "type", "labels", "what"], sorted(rows))


def opentelemetry() -> str:
    """Return what is told to OpenTelemetry."""
    rows: Rows = []

    class Meter:
        def __getattr__(self, name: str) -> Any:
            def create(metric: str, unit: str, what: str, **_: Any) -> None:
                rows.append([code(metric), name.removeprefix("create_"), code(unit), what])

            return create

    with mock.patch.object(otel.metrics, "get_meter", return_value=Meter()):
        otel.OpenTelemetry()
    return table(["instrument", "kind", "unit", "what"], sorted(rows))


# -- commands ---------------------------------------------------------------------------------


def help_of(command: click.Command, name: str, above: click.Context) -> str:
    """Return a section with what ``--help`` of *command* says."""
    context = click.Context(command, info_name=name, parent=above, max_content_width=100)
    text = inspect.cleandoc(command.get_help(context).replace("\b\n", ""))
    return f"## {name}\n\n```text\n{text}\n```\n\n"


def commands() -> str:
    """Return the commands of ``celery -A APP redlock``."""
    above = click.Context(click.Group("redlock"), info_name="celery -A APP redlock")
    found = [(name, redlock.get_command(above, name)) for name in redlock.list_commands(above)]
    return "".join(help_of(command, name, above) for name, command in found if command)


def celery_redlock_commands() -> str:
    """Return the commands of ``celery-redlock``."""
    above = click.Context(main, info_name="celery-redlock")
    return "".join(help_of(command, name, above) for name, command in main.commands.items())


# -- what the doctor finds --------------------------------------------------------------------


def findings() -> str:
    """Return the code of each finding, which is also its anchor, its level and its subject."""
    rows: dict[str, tuple[set[str], set[str]]] = {}
    for file in DOCTOR:
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                for name, levels, about in findings_of(function):
                    of_code = rows.setdefault(name, (set(), set()))
                    of_code[0].update(levels)
                    of_code[1].add(about)
    told = [
        [
            f'<a id="{name}"></a>{code(name)}',
            " or ".join(word for word in LEVELS if word in levels),
            "; ".join(about),
        ]
        for name, (levels, about) in sorted(rows.items())
    ]
    return table(["code", "level", "what it is about"], told)


def findings_of(function: ast.FunctionDef) -> Iterator[tuple[str, set[str], str]]:
    """Yield code, levels and subject of each finding that *function* makes."""
    about = (ast.get_docstring(function) or "").strip().partition("\n")[0]
    said = about.removeprefix("Yield ").removeprefix("that ").rstrip(".")
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
            levels = {n.id.lower() for n in values(function, node.args[0], ast.Name)}
            for name in values(function, node.args[1], ast.Constant):
                yield str(name.value), levels, said
        elif isinstance(node, ast.Assign):  # what kept the doctor from looking at all
            for target in node.targets:
                if (
                    isinstance(target, ast.Subscript)
                    and getattr(target.value, "id", "") == "problems"
                ):
                    assert isinstance(target.slice, ast.Constant)
                    yield str(target.slice.value), {LEVELS[0]}, PROBLEMS[target.slice.value]


def values(function: ast.FunctionDef, node: ast.expr, kind: type[N]) -> Iterator[N]:
    """Yield what *node* may be: parts of it, and of what *function* assigns to it."""
    looked_at = [node]
    if isinstance(node, ast.Name):
        statements = [s for s in ast.walk(function) if isinstance(s, ast.Assign)]
        for target, value in (pair for s in statements for pair in assigned(s)):
            if isinstance(target, ast.Name) and target.id == node.id:
                looked_at.append(value)
    for each in looked_at:
        yield from (part for part in ast.walk(each) if isinstance(part, kind))


def assigned(statement: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each target of an assignment with its value."""
    for target in statement.targets:
        if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
            yield from zip(target.elts, statement.value.elts, strict=True)
        else:
            yield target, statement.value
