"""
What the README and the pages of docs/ say is so: their tables hold, their links lead somewhere.

That their code blocks run is `test_pages.py`, and that the table of needs is so, `test_needs.py`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import celery_redlock
from celery_redlock import errors
from celery_redlock.lock.held import HeldLock
from celery_redlock.lock.lease import valid_until
from celery_redlock.lock.rules import Rules
from celery_redlock.plugin import plugin_for
from celery_redlock.settings import KNOWN, Settings
from celery_redlock.task import policies
from celery_redlock.task.options import OPTIONS
from support.page_names import names_for
from support.page_run import PageRun, run_page
from support.pages import blocks_of, commands_of

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PYPROJECT = ROOT / "pyproject.toml"
ERRORS = ROOT / "docs" / "reference" / "errors.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]


def named(page):
    return str(page.relative_to(ROOT))


def tables(page):
    found, rows = [], []
    for line in [*page.read_text().splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif rows:
            found.append([row for row in rows if not set("".join(row)) <= set("-: |")])
            rows = []
    return found


def table(page, first_words):
    (found,) = [t for t in tables(DOCS / page) if t[0][0].strip("` ") == first_words]
    return found[1:]


# -- the examples ---------------------------------------------------------------------


@pytest.fixture
def names(five_nodes, broker):
    with names_for(README.read_text(), [*five_nodes, broker]) as it:
        yield it


def take_python(run, block):
    """Run what a reader would type into Python; commands are not what these tests are about."""
    if block.language == "python":
        PageRun.take(run, block)


@pytest.fixture
def left_by(names, tmp_path):
    with ExitStack() as stack:
        yield (
            lambda page: (
                stack.enter_context(run_page(DOCS / page, tmp_path, names, take_python)).left
            )
        )


def test_lock_names_are_what_the_options_say(left_by):
    left = left_by("reference/options.md")
    bill, export = left["bill"], left["export"]
    assert bill.apply((7,)).get() == "invoice 7 billed"
    assert bill.lock_name((7,)) == bill.lock_name((), {"invoice_id": 7}) == "invoice:7"
    assert export.lock_name(("a",)) == export.lock_name(("a",), {"full": True})
    assert export.lock_name(("a",)) != export.lock_name(("b",))


def test_a_duplicate_joins_the_first(left_by):
    left = left_by("how-to/unique-at-publish.md")
    first, second = left["first"], left["second"]
    assert (first.duplicate, second.duplicate, second.holder_id) == (False, True, first.id)


def test_a_lock_without_celery_is_held_and_given_back(left_by):
    left = left_by("how-to/without-celery.md")
    assert left["number"] > 0
    assert left["outcome"] is celery_redlock.ReleaseOutcome.RELEASED
    assert len(left["who"]) == 3


def test_a_smaller_fence_is_refused(left_by):
    left = left_by("reference/lock.md")
    with pytest.raises(RuntimeError, match="later has written already"):
        left["mark_paid"](left["db"], 7, fence=1001)


def test_a_skipped_task_tells_who_was_faster(left_by):
    left = left_by("reference/options.md")
    with plugin_for(left["app"]).locks.hold("invoice:7"):
        skipped = left["bill"].apply((7,)).get()
    assert list(skipped) == ["skipped", "lock", "holder"]
    assert (skipped["skipped"], skipped["lock"]) == ("conflict", "invoice:7")
    rows = table("reference/policies.md", "policy")
    (row,) = [row for row in rows if row[0].startswith('`"skip"')]
    assert '`{"skipped": "conflict", "lock": ..., "holder": {...}}`' in row[1]


def test_the_first_example_is_short_and_a_direct_call_takes_no_lock(names, tmp_path):
    with run_page(README, tmp_path, names, take_python):
        example = (tmp_path / "shop.py").read_text()
        assert len([line for line in example.splitlines() if line.strip()]) <= 12
        import shop

        try:
            assert re.fullmatch(r"invoice 7 billed with fence \d+", shop.bill.apply((7,)).get())
            with pytest.raises(RuntimeError):
                shop.bill(7)
            settings = plugin_for(shop.app).settings
            assert settings.is_fallback
            assert settings.nodes == [shop.app.conf.result_backend]
        finally:
            plugin_for(shop.app).locks.close()


def test_the_readme_is_one_page():
    """At most 130 lines, or it is no first page any more."""
    assert len(README.read_text().splitlines()) <= 130


# -- the tables -------------------------------------------------------------------------


def code(cell):
    return None if not cell.startswith("`") else re.fullmatch(r"`(.+)`", cell)[1]


def described(page):
    found = {}
    for part in (DOCS / page).read_text().split("\n## ")[1:]:
        name, _, text = part.partition("\n")
        if told := dict(re.findall(r"^- (Type|Default|Setting): (.+)$", text, re.MULTILINE)):
            found[name] = told, text
    return found


def setting_default(name):
    fields = {**Settings.__dataclass_fields__, **Rules.__dataclass_fields__}
    return None if name == "nodes" else fields[name].default


def test_every_option_and_setting_has_a_heading_of_its_own():
    """And no other has: so a link and a search land on it."""
    options, settings = described("reference/options.md"), described("reference/settings.md")
    assert list(options) == list(OPTIONS)
    assert sorted(settings) == [f"redlock_{name}" for name in KNOWN]


def test_options_name_their_settings_and_defaults():
    for attribute, (told, _) in described("reference/options.md").items():
        setting, value = OPTIONS[attribute], eval(code(told["Default"]))
        name = f"redlock_{setting}"
        assert told["Setting"] == (f"[`{name}`](settings.md#{name})" if setting else "none")
        own = getattr(celery_redlock.RedlockTask, attribute)
        assert own == (None if setting else value), attribute
        if setting:
            assert setting_default(setting) == value, attribute
    for name, (told, _) in described("reference/settings.md").items():
        assert setting_default(name.removeprefix("redlock_")) == eval(code(told["Default"])), name


def test_every_option_and_setting_has_a_type_and_an_example():
    """The example uses it; that it runs is `test_pages.py`."""
    for page in ("reference/options.md", "reference/settings.md"):
        for name, (told, text) in described(page).items():
            (example,) = re.findall(r"^```python\n(.+?)^```$", text, re.MULTILINE | re.DOTALL)
            assert re.search(rf"\b{name}\b ?=", example), name
            assert told["Type"], name


def test_every_error_has_a_heading_of_its_own():
    assert set(errors.__all__) <= set(re.findall(r"^## (\w+)$", ERRORS.read_text(), re.MULTILINE))


def test_the_lock_in_a_task_has_all_that_a_body_may_use():
    """But for what is the library's own, which the reference of the class leaves out, too."""
    page = (DOCS / "reference" / "lock.md").read_text().partition("\n## ")[0]
    told = set(re.findall(r"`(\w+)(?:\(\))?`", page))
    docstring = inspect.getdoc(HeldLock)
    attributes = set(re.findall(r"^    (\w+): ", docstring, re.MULTILINE))
    public = {name for name in vars(HeldLock) if name[0] != "_"} | attributes
    own = {"lease", "token", "lag", "renewed", "not_renewed", "lose", "loss", "released", "ends"}
    assert public - own <= told


def test_the_policies_table_is_complete_and_shows_defaults():
    shown = {}
    for row in table("reference/policies.md", "policy"):
        word, call = (code(part.strip()) for part in row[0].split(", ", 1))
        shown[eval(word)] = call
    assert set(shown) == set(policies.WORDS)
    for word, call in shown.items():
        policy = eval(call, vars(policies))
        option = "on_conflict" if word == "queue" else "on_unavailable"
        assert policy == policies.policy_of(option, word)
        fields = {f.name for f in dataclasses.fields(policy)}
        assert fields == set(re.findall(r"(\w+)=", call))


def test_the_numbers_of_the_text_are_those_of_the_code():
    """Quarantine and stall, computed as the lock computes them; `test_how_to` has the tables."""
    assert f"{Rules().quarantine:.0f} s by default" in (DOCS / "restarts.md").read_text()
    rows = {row[0]: row[1] for row in table("how-to/choose-settings.md", "setting")}
    (said,) = [text for name, text in rows.items() if "lock_ttl" in name]
    ttl, blocked, stall = map(int, re.findall(r"(\d+) s\b", said))
    assert ttl == blocked == Rules().ttl
    assert stall == int(valid_until(0.0, ttl, Rules().drift_factor) - ttl / 3)


def test_versions_are_those_of_the_package():
    words = "Python 3.10 to 3.14, Celery 5.4 to 5.7, redis-py 6.4 to 8."
    for page in (README, DOCS / "how-to" / "install.md"):
        assert words in " ".join(page.read_text().split())
    for promised in ('">=3.10"', '"celery>=5.4,<6"', '"redis>=6.4,<9"'):
        assert promised in PYPROJECT.read_text()
    newest = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT.read_text())[-1]
    assert newest == "3.14"


# -- commands and links -------------------------------------------------------------------


def commands():
    blocks = [block for page in PAGES for block in blocks_of(page) if block.language == "console"]
    return [command.text for block in blocks for command in commands_of(block)]


def is_module(name):
    module = Path(*name.split("."))
    files = (module.with_suffix(".py"), module / "__main__.py")
    if any((ROOT / place / file).exists() for place in ("", "tests") for file in files):
        return True
    return importlib.util.find_spec(module.parts[0]) is not None


def test_commands_exist():
    from celery_redlock.ops.cli.group import COMMANDS
    from celery_redlock.ops.main import main

    makefile = (ROOT / "Makefile").read_text()
    extras = PYPROJECT.read_text().partition("[project.optional-dependencies]")[2]
    seen = set()
    for command in commands():
        if match := re.match(r"make (\w+)", command):
            assert re.search(rf"^{match[1]}:.* ## ", makefile, re.MULTILINE), command
        elif match := re.search(r"celery -A \S+ redlock (\w+)", command):
            assert match[1] in COMMANDS, command
        elif match := re.match(r"celery-redlock (\w+)", command):
            assert match[1] in main.commands, command
        elif match := re.search(r"celery-redlock\[(\w+)\]", command):
            assert re.search(rf"^{match[1]} = \[", extras, re.MULTILINE), command
        elif match := re.search(r"python -m (\S+)", command):
            assert is_module(match[1]), command
        else:
            continue
        seen.add(match[1])
    assert {"demo", "test", "status", "why", "doctor", "web", "example_worker.publish"} <= seen
    named = {it for page in PAGES for it in re.findall(r"`make (\w+)`", page.read_text())}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in named)


def test_publish_says_how_it_is_used():
    asked = [sys.executable, "-m", "example_worker.publish", "--help"]
    told = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--copies" in told


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if link.startswith("https://"):
            continue
        target, _, anchor = link.partition("#")
        there = page.parent / target if target else page
        assert there.exists(), link
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), link


def without_code(page):
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    heads = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_files_that_pages_name_exist():
    """A page that says where to look must not send anybody to a file that was moved."""
    path = re.compile(r"celery_redlock/\w+/?\w*\.py")
    named = {name for page in PAGES for name in path.findall(page.read_text())}
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_page_on_architecture_knows_the_rooms():
    page = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {path.name for path in (ROOT / "celery_redlock").iterdir() if path.is_dir()}
    assert rooms - {"__pycache__"} <= set(re.findall(r"\b(\w+)/", page.partition("## One")[0]))
    flow = page.partition("## One execution")[2].partition("## Where to change what")[0]
    names = re.findall(r"(?:lock|task|unique|beat)/(?:\w+/)?\w+\.py", flow)
    assert len(names) > 20
    for name in names:
        assert (ROOT / "celery_redlock" / name).exists(), name
