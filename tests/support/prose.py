"""
Reads all prose of the repository, and says which words to replace.

Two readers look at pages, docstrings, comments, alerts, the dashboard, and at what the package says
when it runs: log lines, help, errors. One is proselint, for clichés, archaisms and needless words.
The other is the glossary, by its own table of words that are not used. Code, and what runs wrote,
is left out. What a merge has left between two sides is found first: it is no prose at all.

    PYTHONPATH=tests python -m support.prose
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
#: Checks of proselint that are about typography, or mistake our terms for something else.
OFF = ("typography", "social_awareness", "annotations")

#: What is no prose in a page: code, what a run has written, comments, addresses.
NO_PROSE = re.compile(
    r"^ *```.*?^ *```$|<!-- \w+: \w+ -->\n.*?<!-- end -->|<!--.*?-->|`[^`\n]*`|\]\([^)\s]*\)",
    re.MULTILINE | re.DOTALL,
)
#: Where a merge begins or ends with what it could not decide.
SIDE = re.compile(r"^(?:<{7}|>{7}) \S", re.MULTILINE)
CODE = re.compile(r"``[^`]*``|`[^`]*`|^ +(?:>>> |\$ ).*$", re.MULTILINE)
TAG = re.compile(r"<(style|script).*?</\1>|<[^>]*>|\{[{%#].*?[}%#]\}", re.DOTALL)


PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted((ROOT / "celery_redlock").rglob("*.py"))
TEMPLATES = sorted((ROOT / "celery_redlock").rglob("*.html"))
#: What is read by people beside them: alerts, the dashboard, forms, what Compose and make say.
OTHERS = [
    *(file for folder in ("ops", ".github") for file in sorted((ROOT / folder).rglob("*.*"))),
    ROOT / "docker-compose.yml",
    ROOT / "Makefile",
]


@dataclass(frozen=True)
class Finding:
    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        """Return it as linters do, so that an editor jumps there."""
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.message}"


def main() -> int:
    findings = [found for path in (*PAGES, *MODULES, *TEMPLATES, *OTHERS) for found in read(path)]
    sys.stdout.writelines(f"{found}\n" for found in findings)
    return int(bool(findings))


def read(path: Path) -> Iterator[Finding]:
    for match in SIDE.finditer(path.read_text()):
        yield Finding(path, line_of(match.string, match.start()), "left by a merge: choose a side")
    prose = prose_of(path)
    for line, message in (*by_glossary(prose), *by_proselint(prose)):
        yield Finding(path, line, message)


# -- what is prose ---------------------------------------------------------------------------


def prose_of(path: Path) -> str:
    """Return the prose of a file, each word on the line on which it is there."""
    text = path.read_text()
    if path.suffix == ".py":
        return prose_of_module(text)
    # The glossary alone may name the words that are not used.
    text = text.partition(HEADING)[0] if path == GLOSSARY else text
    text = blanked(TAG if path.suffix == ".html" else NO_PROSE, text)
    return re.sub(r"^[ \t]*$", ".", text, flags=re.MULTILINE)  # nothing goes on beyond a blank line


def prose_of_module(source: str) -> str:
    lines: list[list[str]] = [[] for _ in range(source.count("\n") + 2)]
    for at, text in (*strings_of(ast.parse(source)), *comments_of(source)):
        for number, line in enumerate(blanked(CODE, text).split("\n"), at):
            lines[min(number, len(lines) - 1)].append(line)  # "\\n" in a string is no line of ours
    return "\n".join(" | ".join(parts) or "." for parts in lines[1:])


def strings_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    inside = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)
              for part in ast.walk(node) if part is not node}  # fmt: skip
    for node in ast.walk(tree):
        if node in inside or not isinstance(node, (ast.Constant, ast.JoinedStr)):
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(map(text_of, parts))
        if " " in text.strip() and "redis.call" not in text and "local " not in text:
            yield node.lineno, text


def text_of(node: ast.expr) -> str:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else "`…`"


def comments_of(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")


def blanked(pattern: re.Pattern[str], text: str) -> str:
    """Return *text* without what matches; lines stay where they are."""
    return pattern.sub(lambda match: "`" + "\n" * match[0].count("\n"), text)


# -- the readers -----------------------------------------------------------------------------

HEADING = "## Words that are not used"


def words() -> dict[str, str]:
    table = GLOSSARY.read_text().partition(HEADING)[2]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)[2:]
    return {phrase: instead for phrases, instead in rows for phrase in phrases.split(", ")}


def by_glossary(prose: str) -> Iterator[tuple[int, str]]:
    for phrase, instead in words().items():
        pattern = r"\b" + r"\s+(?:\| )?".join(map(re.escape, phrase.split())) + r"\b"
        for match in re.finditer(pattern, prose, re.IGNORECASE):
            yield line_of(prose, match.start()), f'"{phrase}"; the glossary says: {instead}'


def by_proselint(prose: str) -> Iterator[tuple[int, str]]:
    # Here, as the tests of the glossary's words do without it.
    from proselint import checks, config, registry, tools

    if not registry.CheckRegistry().checks:
        registry.CheckRegistry().register_many(checks.__register__)
    chosen = {**config.DEFAULT["checks"], **dict.fromkeys(OFF, False)}
    for found in tools.LintFile("prose", prose).lint({**config.DEFAULT, "checks": chosen}):
        # Its text has one line more at the beginning, and the match a blank at its end.
        end = found.check_result.span[1] - 2
        yield line_of(prose, end), f"{found.check_result.check_path}: {found.check_result.message}"


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


if __name__ == "__main__":
    sys.exit(main())
