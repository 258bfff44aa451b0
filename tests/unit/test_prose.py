"""Every sentence of pages, docstrings, log lines, help and alerts says the glossary's words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from celery_redlock.events import KINDS
from celery_redlock.reading.sentences import sentence
from support import prose

pytestmark = pytest.mark.long

SAID = prose.words()
#: Event -> the glossary's word for what happened.
VERBS = {
    "LockAcquired": "Acquired",
    "LockReleased": "Released",
    "LockRenewed": "Renewed",
    "LeaseLost": "lost",
    "TaskSkipped": "Skipped",
    "TaskRescheduled": "Rescheduled",
    "NodeQuarantined": "quarantined",
    "LeaderElected": "Leads",
}
PLANTED = {
    "a page": ("page.md", "It is\nput off until later."),
    "a text of two lines": ("a.py", 'x = "A task\\ncomes again."'),
    "a log line": ("a.py", 'logger.info("Task %s comes again in %s s", task, after)'),
    "a help text": (
        "a.py",
        '@click.option("--wait", help="How long yet it waits.")\ndef why(): ...',
    ),
    "a command's help": ("a.py", 'def why():\n    """Say what becomes of a call."""'),
    "an error": (
        "a.py",
        'raise ConfigurationError(\n    f"lock_ttl={ttl} makes "\n    "no sense"\n)',
    ),
    "a comment": ("a.py", "x = 1  # a lock that is\n# given back"),
    "an alert": ("alerts.yml", "description: >-\n  Its tasks are put\n  off, or retried."),
    "a panel": ("dashboard.json", '{"description": "Retried and put off."}'),
    "a template": ("a.html", "<p>{{ task }} was <b>spoilt</b></p>"),
}
QUIET = {
    "code.md": "```text\ncomes again\n```\n`put off`, [a link](what-becomes-of-it.md)\n",
    "made.md": "<!-- publish: tables -->\nput off\n<!-- end -->\n",
    "code.py": 'LUA = """local put = off\nredis.call("put off")"""\nput.off  # ``put off``',
}


@pytest.mark.parametrize(
    "path",
    [*prose.PAGES, *prose.MODULES, *prose.TEMPLATES, *prose.OTHERS],
    ids=lambda path: str(path.relative_to(prose.ROOT)),
)
def test_a_file_says_the_glossarys_words(path):
    assert list(prose.by_glossary(prose.prose_of(path))) == []


@pytest.mark.parametrize("where", PLANTED)
def test_another_word_is_noticed(tmp_path, where):
    """The twin: wherever people read it, with its line and the word to use."""
    name, text = PLANTED[where]
    path = tmp_path / name
    path.write_text(text)
    ((line, message), *_) = prose.by_glossary(prose.prose_of(path))
    assert line in range(1, text.count("\n") + 2)
    assert "the glossary says: " in message


@pytest.mark.parametrize("name", QUIET)
def test_code_and_what_a_run_wrote_are_left_alone(tmp_path, name):
    path = tmp_path / name
    path.write_text(QUIET[name])
    assert list(prose.by_glossary(prose.prose_of(path))) == []


def test_the_linter_fails_on_bad_prose(tmp_path, monkeypatch, capsys):
    """By both readers, with places that an editor jumps to; `make lint` runs it."""
    pytest.importorskip("proselint")
    page = tmp_path / "page.md"
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "PAGES", [page])
    monkeypatch.setattr(prose, "MODULES", [])
    monkeypatch.setattr(prose, "TEMPLATES", [])
    monkeypatch.setattr(prose, "OTHERS", [])
    page.write_text("# A page\n\nThe lock is released.\n")
    assert prose.main() == 0
    page.write_text("# A page\n\nIt is a very\nimportant lock. It comes again.\n")
    assert prose.main() == 1
    found = capsys.readouterr().out
    assert 'page.md:4: "comes again"; the glossary says: be rescheduled' in found
    assert re.search(r"^page\.md:3: weasel_words\.very: ", found, re.MULTILINE)
    page.write_text("# A page\n\n<<<<<<< HEAD\nThe lock is released.\n")
    assert prose.main() == 1
    assert "page.md:3: left by a merge" in capsys.readouterr().out
    lint = (Path(__file__).parents[2] / "Makefile").read_text().partition("\nlint:")[2]
    assert "python -m support.prose" in lint.partition("\n\n")[0]


def test_the_table_contradicts_no_entry_of_the_glossary():
    table = prose.GLOSSARY.read_text().partition(prose.HEADING)[2]
    phrases = [
        p for row in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[2:] for p in row.split(", ")
    ]
    assert len(phrases) == len(set(phrases)) == len(SAID) > 40
    explained = re.findall(
        r"^\| ([^|]+) \|", prose.GLOSSARY.read_text().partition(prose.HEADING)[0], re.MULTILINE
    )
    assert not set(explained) & set(phrases)


@pytest.mark.parametrize("event", VERBS)
def test_an_event_is_worded_by_the_glossarys_verb(event):
    assert re.search(rf"\b{VERBS[event]}\b", sentence({"event": event}))
    assert event in KINDS


@pytest.mark.parametrize(
    ("choice", "did"), [("join", "joined"), ("fail", "failed"), ("rerun", "another run")]
)
def test_a_duplicate_joins_fails_or_asks_for_another_run(choice, did):
    assert did in sentence({"event": "DuplicatePublished", "on_duplicate": choice})
