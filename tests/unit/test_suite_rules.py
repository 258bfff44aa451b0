"""No test fails because the machine is slow: what a reader of the code can hold of that."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = sorted(TESTS.rglob("test_*.py"))
#: What tells how late it is.
CLOCKS = {"monotonic", "perf_counter", "time", "now"}
#: A wait that is to come to its end has a minute; shorter is what nothing rests on [s].
SHORTEST_WAIT = 30.0
#: Said beside a wait or a sleep: the reason for it.
REASON = re.compile(r"#\s*\S")
#: Plug-ins and marks that run a test again.
RETRIES = re.compile(r"mark\.flaky|@flaky|rerunfailures|pytest_retry")


def is_elapsed(node: ast.expr) -> bool:
    """Return whether *node* is real time that has passed: a clock's, minus something."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and isinstance(node.left, ast.Call)
        and isinstance(node.left.func, ast.Attribute)
        and isinstance(node.left.func.value, ast.Name)
        and node.left.func.value.id == "time"
        and node.left.func.attr in CLOCKS
    )


def bounds(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield where an assertion has an upper bound on real time."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        named = {
            target.id
            for each in ast.walk(function)
            if isinstance(each, ast.Assign) and is_elapsed(each.value)
            for target in each.targets
            if isinstance(target, ast.Name)
        }
        for each in ast.walk(function):
            if isinstance(each, ast.Assert) and isinstance(each.test, ast.Compare):
                sides = [each.test.left, *each.test.comparators]
                for left, op, right in zip(sides, each.test.ops, sides[1:], strict=False):
                    low = left if isinstance(op, (ast.Lt, ast.LtE)) else right
                    high = right if isinstance(op, (ast.Lt, ast.LtE)) else left
                    is_time = is_elapsed(low) or (isinstance(low, ast.Name) and low.id in named)
                    if is_time and isinstance(high, ast.Constant):
                        yield each.lineno, "an upper bound on real time: see CONTRIBUTING, Tests"


def waits(tree: ast.AST, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield short deadlines of waits that are to come to an end, and sleeps without a reason."""
    for call in ast.walk(tree):
        if not (isinstance(call, ast.Call) and isinstance(call.func, (ast.Attribute, ast.Name))):
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id
        said = any(REASON.search(lines[n]) for n in range(call.lineno - 2, call.end_lineno or 0))
        for word in call.keywords:
            is_wait = name in {"eventually", "wait_for_log"} and word.arg == "timeout"
            if is_wait and is_short(word.value) and not said:
                yield call.lineno, f"a wait of less than {SHORTEST_WAIT:g} s without a reason"


def is_short(node: ast.expr) -> bool:
    """Return whether *node* is a number below the shortest wait."""
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, (int, float)) and value < SHORTEST_WAIT


def retries(text: str) -> Iterator[tuple[int, str]]:
    """Yield where a test is run again until it passes."""
    for number, line in enumerate(text.split("\n"), 1):
        if RETRIES.search(line):
            yield number, "a test that is run again until it passes: fix it"


def broken(path: Path) -> list[str]:
    """Return which rules a file breaks, and where."""
    text = path.read_text()
    tree = ast.parse(text)
    found = [*bounds(tree), *waits(tree, text.split("\n"))]
    if path != Path(__file__):
        found += retries(text)
    return [f"{path.relative_to(TESTS)}:{line}: {what}" for line, what in sorted(found)]


def test_the_rules_are_kept():
    """In every file of tests."""
    assert len(FILES) > 200
    assert [told for path in FILES for told in broken(path)] == []


@pytest.mark.parametrize(
    "source",
    [
        "assert time.monotonic() - began < 5",
        "assert 0.2 <= time.time() - began < 5",
        "assert 5 > time.perf_counter() - began",
        "took = time.monotonic() - began\n    assert took < 5",
        'eventually(lambda: done, "end", timeout=5)',
        'worker.wait_for_log("ready", timeout=2.5)',
        "pytest.mark.flaky(reruns=2)",
    ],
)
def test_what_breaks_a_rule_is_found(tmp_path, monkeypatch, source):
    """The twin: planted in a file of its own."""
    monkeypatch.setitem(globals(), "TESTS", tmp_path)
    path = tmp_path / "test_planted.py"
    path.write_text(f"def test_it():\n    began = 0\n    {source}\n")
    assert len(broken(path)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "assert time.monotonic() - began >= 0.2",
        "assert clock.now() - began < 5",
        'eventually(lambda: done, "end")',
        'eventually(lambda: done, "end", timeout=5)  # the twin: it does not come',
    ],
)
def test_what_keeps_them_is_not(tmp_path, monkeypatch, source):
    """A lower bound, a clock that is set, a minute, or a reason."""
    monkeypatch.setitem(globals(), "TESTS", tmp_path)
    path = tmp_path / "test_planted.py"
    path.write_text(f"def test_it():\n    began = 0\n    {source}\n")
    assert broken(path) == []
