"""
No test fails because the machine is slow: what can be told of that from the tests' own text.

Each rule finds lines and says how to mend them; what is planted in `PLANTED` each has to find, and
what stands in `FINE` none. CONTRIBUTING.md says more.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PROJECT = TESTS.parent
#: Shorter deadlines than this fail on a busy machine [s].
LEAST = 30.0
#: Clocks that go on while a machine is slow.
CLOCKS = {"monotonic", "perf_counter", "monotonic_ns", "perf_counter_ns"}
#: Calls whose ``timeout`` fails the test when it is over.
WAITS = {
    *("eventually", "get", "result", "wait", "join", "communicate", "Barrier"),
    *("run", "call", "check_call", "check_output", "urlopen"),
}
#: Of these the first argument is a timeout, too.
POSITIONAL = {"wait", "join"}
#: How to mend it.
NO_BOUND = (
    "count, tick a clock, or have what is not to be waited for last minutes, and wait with the "
    "usual deadline"
)
LONGER = "take the default, or 60; if no slow machine can fail for it, say `# short: why` beside it"
#: What a function calls how long it waits.
PATIENCES = {"timeout", "patience", "within"}
RETRIERS = {
    *("flaky", "pytest_rerunfailures", "pytest_retry", "pytest_flakefinder", "pytest_repeat"),
    *("tenacity", "retrying", "retry", "backoff", "stamina"),
}
RETRIES = re.compile(r"^(flaky|re_?runs?|retry|retries|repeat)", re.IGNORECASE)


class Source:
    """
    The text of a test file.

    Attributes:
        tree: What Python makes of it.
        comments: Line -> the comment there.
        parents: What each node stands in.
        nodes: All of them.
    """

    def __init__(self, text):
        self.tree = ast.parse(text)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        self.comments = {it.start[0]: it.string for it in tokens if it.type == tokenize.COMMENT}
        self.nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    def above(self, node):
        """Yield what *node* stands in, from inside out, each with its own part of that."""
        while node in self.parents:
            yield self.parents[node], node
            node = self.parents[node]

    def of_type(self, *kinds):
        return [node for node in self.nodes if isinstance(node, kinds)]

    def is_short_for_a_reason(self, node):
        """Return whether the reason for a short wait stands beside it."""
        lines = range(node.lineno, node.end_lineno + 1)
        return any(re.match(r"#.*\bshort: \w", self.comments.get(line, "")) for line in lines)


def name_of(node):
    """Return the last part of a dotted name, or '' of what is none."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def number_of(node):
    """Return the number that *node* is; None for what is not one."""
    value = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_clock(node):
    """Return whether *node* reads a clock that no test sets."""
    if not isinstance(node, ast.Call) or node.args:
        return False
    of_time = isinstance(node.func, ast.Attribute) and name_of(node.func.value) == "time"
    return name_of(node.func) in CLOCKS or (of_time and name_of(node.func) in {"time", "time_ns"})


# -- upper bounds ------------------------------------------------------------------------------


def upper_bounds(source):
    """Yield assertions that something took no longer than so long, in real time."""
    if not any(map(is_clock, source.of_type(ast.Call))):
        return
    for function in [source.tree, *source.of_type(ast.FunctionDef, ast.AsyncFunctionDef)]:
        moments, lengths = names_of_times(function)

        def is_length(node, moments=moments, lengths=lengths):
            return any(
                is_difference(part, moments) or (isinstance(part, ast.Name) and part.id in lengths)
                for part in ast.walk(node)
            )

        for check in [node for node in own(function) if isinstance(node, ast.Assert)]:
            for one in [node for node in ast.walk(check.test) if isinstance(node, ast.Compare)]:
                sides = [one.left, *one.comparators]
                for op, left, right in zip(one.ops, sides, sides[1:], strict=False):
                    less = {ast.Lt: (left, right), ast.LtE: (left, right)}
                    more = {ast.Gt: (right, left), ast.GtE: (right, left)}
                    small, large = {**less, **more}.get(type(op), (None, None))
                    if small is not None and is_length(small) and not is_length(large):
                        yield one.lineno, f"bounds real time: {NO_BOUND}"


def own(function):
    """Yield what stands in a function, or in a module outside of functions."""
    nodes = list(ast.iter_child_nodes(function))
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)


def names_of_times(function):
    """Return the names of moments, and of lengths, that a function measures."""
    moments, lengths = set(), set()
    given = [node for node in own(function) if isinstance(node, ast.Assign)]
    for _ in range(2):  # a length may be made of moments that are named further down
        for node in given:
            for target, value in pairs_of(node):
                if is_clock(value):
                    moments.add(name_of(target))
                elif any(is_difference(part, moments) for part in ast.walk(value)):
                    lengths.add(name_of(target))
    return moments - {""}, lengths - {""}


def pairs_of(node):
    """Yield names and what they are given, of ``a = b`` and of ``a, b = c, d``."""
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def is_difference(node, moments):
    """Return whether *node* is a clock's time less another one."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
        return False
    return is_clock(node.left) or (
        isinstance(node.left, ast.Name)
        and node.left.id in moments
        and (is_clock(node.right) or name_of(node.right) in moments)
    )


# -- short waits -------------------------------------------------------------------------------


def short_waits(source):
    """Yield deadlines of less than half a minute, where the test fails when they are over."""
    for node, seconds in (*timeouts(source), *deadlines(source), *defaults(source)):
        if 0 < seconds < LEAST and not source.is_short_for_a_reason(node):
            yield node.lineno, f"waits for {seconds:g} s: {LONGER}"


def timeouts(source):
    """Yield calls that wait, and for how long at most."""
    for call in source.of_type(ast.Call):
        name, given = name_of(call.func), [k.value for k in call.keywords if k.arg == "timeout"]
        if name in POSITIONAL and len(call.args) == 1:
            given += call.args
        for seconds in filter(None, map(number_of, given)):
            is_pause = isinstance(source.parents[call], ast.Expr) and seconds < 1
            if name in WAITS and not is_pause and fails_the_test(source, call):
                yield call, seconds


def deadlines(source):
    """Yield moments that are so far from now."""
    for node in source.of_type(ast.Assign):
        added = node.value
        if isinstance(added, ast.BinOp) and isinstance(added.op, ast.Add) and is_clock(added.left):
            yield added, number_of(added.right) or 0.0


def defaults(source):
    """Yield how long a function waits whose caller does not say."""
    for function in source.of_type(ast.FunctionDef, ast.AsyncFunctionDef):
        of = function.args
        positional = [*of.posonlyargs, *of.args][-len(of.defaults) :] if of.defaults else []
        pairs = [*zip(positional, of.defaults, strict=True)]
        for argument, default in [*pairs, *zip(of.kwonlyargs, of.kw_defaults, strict=True)]:
            if argument.arg in PATIENCES:
                yield argument, number_of(default) or 0.0


def fails_the_test(source, node):
    """Return whether a wait that is in vain does; if in doubt, it does."""
    for above, part in source.above(node):
        if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            break
        is_caught = isinstance(above, ast.Try) and part in above.body and above.handlers
        goes_on = isinstance(above, ast.While) and part is above.test
        is_meant = isinstance(above, ast.UnaryOp) and isinstance(above.op, ast.Not)
        around = getattr(above, "items", []) if isinstance(above, ast.With) else []
        managers = {name_of(getattr(item.context_expr, "func", None)) for item in around}
        if is_caught or goes_on or is_meant or {"raises", "suppress"} & managers:
            return False
    return True


# -- retries -----------------------------------------------------------------------------------


def retries(source):
    """Yield what has a test run again until it passes."""
    told = "runs a test again until it passes: find out why it fails, and mend that"
    for node in source.of_type(ast.Import, ast.ImportFrom):
        module = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names = module + [alias.name for alias in node.names if isinstance(node, ast.Import)]
        if any(name.partition(".")[0] in RETRIERS for name in names):
            yield node.lineno, told
    for node in source.of_type(ast.Attribute):
        if name_of(node.value) == "mark" and RETRIES.match(node.attr):
            yield node.lineno, told


# -- sleeps ------------------------------------------------------------------------------------


def bare_sleeps(source):
    """Yield sleeps of a fixed length without a reason; between two looks they have one."""
    for call in source.of_type(ast.Call):
        is_sleep = name_of(call.func) == "sleep" and name_of(getattr(call.func, "value", None)) in (
            "time",
            "",
        )
        looks_again = any(
            isinstance(above, ast.While) and not isinstance(above.test, ast.Constant)
            for above, _ in source.above(call)
        )
        if is_sleep and call.args and number_of(call.args[0]) and not looks_again:
            lines = range(call.lineno - 1, call.end_lineno + 1)
            if not any(line in source.comments for line in lines):
                yield (
                    call.lineno,
                    "sleeps: wait with `support.waiting.eventually`, or say why beside it",
                )


# -- the suite ---------------------------------------------------------------------------------

RULES = {rule.__name__: rule for rule in (upper_bounds, short_waits, retries, bare_sleeps)}


@pytest.fixture(scope="module")
def suite():
    return {
        path.relative_to(PROJECT): Source(path.read_text()) for path in sorted(TESTS.rglob("*.py"))
    }


@pytest.mark.parametrize("rule", RULES)
def test_the_suite_obeys(suite, rule):
    found = [
        f"{path}:{line}: {fix}"
        for path, source in suite.items()
        for line, fix in sorted(set(RULES[rule](source)))
    ]
    assert not found, "\n".join(["", *found])


def test_no_plug_in_runs_tests_again():
    known = "\n".join(
        path.read_text() for path in (PROJECT / "pyproject.toml", PROJECT / "constraints.txt")
    )
    plugins = "|".join(name.replace("_", "[-_]") for name in sorted(RETRIERS) if "_" in name)
    assert not re.search(rf"--reruns|--retries|--flake-finder|\b(?:{plugins}|flaky)\b", known)


#: Rule -> texts of which each breaks it, in the line that ends in ``# here``.
PLANTED = {
    "upper_bounds": [
        "began = time.monotonic()\nassert time.monotonic() - began < 2  # here",
        "began = perf_counter()\ntook = perf_counter() - began\nassert took <= LIMIT  # here",
        "def f():\n    a = time.time()\n    b = time.time()\n    assert 2 > b - a  # here",
        "took = time.monotonic() - began\nassert 0.3 <= took < 2, took  # here",
        "took, x = time.monotonic() - began, 1\nassert x and round(took, 1) < 2 * x  # here",
        "took = max(took, time.monotonic() - began)\nassert took < 5  # here",
    ],
    "short_waits": [
        "assert done.wait(5)  # here",
        "process.wait(timeout=2)  # here",
        "thread.join(10)  # here",
        "result.get(timeout=5.0)  # here",
        "eventually(lambda: x, 'x', timeout=5)  # here",
        "subprocess.run(command, timeout=20)  # here",
        "deadline = time.monotonic() + 5  # here",
        "def told(what, *, timeout=5.0):  # here\n    pass",
        "def told(what, patience=20):  # here\n    pass",
        "try:\n    pass\nfinally:\n    thread.join(5)  # here",
    ],
    "retries": [
        "import flaky  # here",
        "from tenacity import retry  # here",
        "from pytest_rerunfailures.plugin import x  # here",
        "@pytest.mark.flaky(reruns=3)  # here\ndef test(): pass",
        "pytestmark = [pytest.mark.rerun]  # here",
    ],
    "bare_sleeps": [
        "x = 1\ntime.sleep(0.1)  # here",
        "while True:\n    sleep(1)  # here",
    ],
}
#: Texts that break no rule.
FINE = [
    "began = time.monotonic()\nassert time.monotonic() - began >= 0.3",
    "fast, slow = clock() - a, clock() - b\nassert fast < slow",
    "took = time.monotonic() - began\nslow = time.monotonic() - later\nassert took < slow",
    "took = node.clock.now() - began\nassert took < 2",
    "def f():\n    took = time.monotonic() - began\ndef g(took):\n    assert took < 2",
    "left = deadline - time.monotonic()\nassert left > 0",
    "assert not done.wait(0.2)",
    "done.wait(0.05)",
    "done.wait(60)",
    "eventually(lambda: x, 'x')",
    "while not done.wait(0.5):\n    look()",
    "with pytest.raises(TimeoutError):\n    result.get(timeout=1)",
    "with contextlib.suppress(TimeoutError), x:\n    process.wait(2)",
    "try:\n    process.wait(2)\nexcept TimeoutExpired:\n    process.kill()",
    "assert done.wait(5)  # short: by then the test is over anyway",
    "words = ', '.join(names)",
    "locks.acquire('n', timeout=5)",
    "def can_read(timeout=0):\n    pass",
    "deadline = time.monotonic() + SOON",
    "soon = [one for one in timers if one.eta < time.monotonic() + 1]",
    "import retry_policies\nfrom celery_redlock import Retry\npytest.mark.timeout(300)",
    "time.sleep(0.1)  # the moment that the lease ends",
    "# the moment that the lease ends\ntime.sleep(0.1)",
    "while not done():\n    time.sleep(0.01)",
    "time.sleep(seconds)",
    "clock.sleep(5)",
]


@pytest.mark.parametrize(("rule", "text"), [(r, text) for r in PLANTED for text in PLANTED[r]])
def test_what_breaks_a_rule_is_found(rule, text):
    lines = text.replace("  # here", "").splitlines()
    (here,) = [n for n, line in enumerate(text.splitlines(), 1) if line.endswith("# here")]
    source = Source("\n".join(lines))
    assert {other: [line for line, _ in RULES[other](source)] for other in RULES} == {
        other: [here] if other == rule else [] for other in RULES
    }


@pytest.mark.parametrize("text", FINE)
def test_what_breaks_no_rule_is_not(text):
    assert [found for rule in RULES.values() for found in rule(Source(text))] == []
