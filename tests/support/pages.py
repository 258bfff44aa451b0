"""
The code blocks of a Markdown page, and what becomes of each of them.

A comment of its own line directly before a block says what is to be done with it:

    <!-- file: shop.py -->          written to that file of the page's folder
    <!-- background: REGEX -->      its one command is started, waited for, and ended with the page
    <!-- expect: 1 -->              exit code of the block's commands
    <!-- not run: REASON -->        it cannot be run here

And one that is about the whole page:

    <!-- ports: 6379 7001-7003 -->  in its place stand free ports of this machine

Without a comment, Python is executed and the commands of a console block are run. Of other blocks
nothing is known: whoever has such has to say what holds them. `support.page_run` runs a page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

__all__ = [
    "LANGUAGES",
    "Block",
    "Command",
    "blocks_of",
    "commands_of",
    "outcome_of",
    "ports_of",
]

#: Languages that pages may use; another one is a misspelling, or news to the runner.
LANGUAGES = {
    *("console", "python", "text"),
    *("conf", "html", "ini", "json", "nginx", "promql", "sql", "toml", "yaml"),
}
#: What Sphinx prints something for, and a code host does not.
DIRECTIVES = {"{eval-rst}", "{from-code}", "{toctree}"}
NOTES = ("file", "background", "expect", "not run")
NOTE = re.compile(rf"<!-- ({'|'.join(NOTES)}): (.+?) -->\s*")
PORTS = re.compile(r"<!-- ports: (.+?) -->")
PROMPT = "$ "


@dataclass(frozen=True)
class Block:
    """
    One code block.

    Attributes:
        page: Where it stands.
        line: Of its first line of code [from 1].
        language: As written behind the fence; "" if nothing is.
        text: Its code.
        notes: What the comments before it say, by their first words.
    """

    page: Path
    line: int
    language: str
    text: str
    notes: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line} ({self.language or 'no language'})"


@dataclass(frozen=True)
class Command:
    """
    One command of a console block.

    Attributes:
        text: What is typed, without the prompt.
        shown: Lines of output that the page shows beneath it.
    """

    text: str
    shown: tuple[str, ...] = ()


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    notes: dict[str, str] = {}
    end = 0  # of what the notes were read from: a block must follow directly
    for token in MarkdownIt().parse(page.read_text()):
        begin, stop = token.map or (0, 0)
        if token.type == "html_block" and (told := NOTE.findall(token.content)):
            notes, end = {**notes, **dict(told)}, begin + token.content.count("\n")
        elif token.type in ("fence", "code_block"):
            language = token.info.partition(" ")[0]
            own = notes if begin == end else {}
            skipped = 1 if token.type == "fence" else 0
            found.append(Block(page, begin + 1 + skipped, language, token.content, own))
            notes = {}
        elif token.map and begin >= end:
            notes = {}
        end = max(end, stop) if notes else end
    return found


def ports_of(text: str) -> list[range]:
    """Return the ports that the page *text* is about: runs of numbers one after the other."""
    found = []
    for told in PORTS.findall(text):
        for word in told.split():
            first, _, last = word.partition("-")
            found.append(range(int(first), int(last or first) + 1))
    return found


def commands_of(block: Block) -> list[Command]:
    """
    Return the commands of a console block, each with the output shown beneath it.

    A line that ends in a backslash goes on in the next one, as in a shell.

    Raises:
        ValueError: It begins with output.
    """
    found: list[Command] = []
    is_open = False
    for line in block.text.splitlines():
        if is_open:
            found[-1] = Command(f"{found[-1].text}\n{line.removeprefix('> ')}")
        elif line.startswith(PROMPT):
            found.append(Command(line.removeprefix(PROMPT)))
        elif found:
            found[-1] = Command(found[-1].text, (*found[-1].shown, line))
        elif line.strip():
            raise ValueError(f"{block}: a line before the first command: {line!r}")
        is_open = bool(found) and not found[-1].shown and line.endswith("\\")
    return found


def outcome_of(block: Block) -> str | None:
    """
    Return in a word what becomes of *block*, None where the page alone does not say it.

    Raises:
        ValueError: Its language or the comments before it make no sense.
    """
    if block.language in DIRECTIVES:
        return "built"
    if block.language not in LANGUAGES:
        raise ValueError(f"{block}: a language that nobody knows what to do with")
    if "background" in block.notes and len(commands_of(block)) != 1:
        raise ValueError(f"{block}: in the background goes one command alone")
    for note in ("not run", "file", "background"):
        if note in block.notes:
            return note
    return {"python": "executed", "console": "run"}.get(block.language)
