"""What SECURITY.md and CONTRIBUTING.md rest on is there: the tests that they name, their links."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(?:\w+::)?(\w+)`")
#: Modules that run what they read.
EXECUTORS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "code", "runpy"}


def named_in(text):
    return set(NAMED.findall(text))


def is_there(path, name):
    file = ROOT / path
    return (
        file.exists()
        and re.search(rf"^(?:    )?def {name}\(", file.read_text(), re.MULTILINE) is not None
    )


def heads_of(text):
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}


def executors_in(source):
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names} & EXECUTORS
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {(node.module or "").partition(".")[0]} & EXECUTORS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & {"eval", "exec"}
    return found


# -- tests and links ----------------------------------------------------------------------


@pytest.mark.parametrize("test", sorted(named_in(PAGES[0].read_text())), ids="::".join)
def test_a_test_that_the_threat_model_names_is_there(test):
    """A claim whose test was renamed or taken away would stand alone."""
    assert is_there(*test)


def test_a_test_that_is_not_there_is_noticed():
    """The twin: neither a made-up name nor a made-up file passes."""
    path, name = min(named_in(PAGES[0].read_text()))
    assert is_there(path, name)
    assert not is_there(path, f"{name}_or_so")
    assert not is_there("tests/unit/test_nothing.py", name)
    assert named_in("`tests/unit/test_x.py::test_y`") == {("tests/unit/test_x.py", "test_y")}
    assert named_in("`tests/unit/test_x.py::TestX::test_y`") == {("tests/unit/test_x.py", "test_y")}


def test_the_threat_model_rests_on_tests():
    who = PAGES[0].read_text().partition("## Who can do what")[2].partition("\n## ")[0]
    rows = [row for row in re.findall(r"^\| .*\|$", who, re.MULTILINE) if "---" not in row]
    assert [row for row in rows if not (NAMED.search(row) or row.endswith("| test |"))] == []
    sections = who.split("\n### ")[1:]
    assert len(sections) >= 7
    assert [it.partition("\n")[0] for it in sections if not NAMED.search(it)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    links = re.findall(r"(?<!\w)\[[^\]]+\]\(([^)]+)\)", text)
    assert links
    for link in links:
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = ROOT / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in heads_of(target.read_text()), link


def test_paths_and_targets_of_the_guide_are_there():
    text = PAGES[1].read_text()
    paths = re.findall(r"`((?:tests|docs|benchmarks|proof|celery_redlock|ops)/[\w/.-]*)`", text)
    assert len(paths) > 8
    assert [path for path in paths if not (ROOT / path).exists()] == []
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|\$ )make ([a-z]+)\b", text)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_guide_knows_the_rooms():
    named = set(re.findall(r"`((?:celery_redlock|tests)/\w+)/?`", PAGES[1].read_text()))
    for folder, marker in (("celery_redlock", "__init__.py"), ("tests", "*.py")):
        rooms = {f"{folder}/{it.parent.name}" for it in (ROOT / folder).glob(f"*/{marker}")}
        assert len(rooms) > 8
        assert rooms <= named


# -- forms ---------------------------------------------------------------------------------


def test_a_report_of_a_bug_asks_for_what_is_needed():
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug_report.yml").read_text())
    text = str(form)
    for word in ("redlock doctor", "redlock status", "APP report", "SECURITY.md", "password"):
        assert word in text, word


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_is_well_formed(path):
    form = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": False}
        return
    assert {"name", "description", "body"} <= set(form)
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert all(field["type"] in {"input", "textarea", "dropdown", "checkboxes"} for field in fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields) > 1


# -- code ----------------------------------------------------------------------------------


def test_the_package_reads_no_pickle_and_runs_no_text():
    modules = list((ROOT / "celery_redlock").rglob("*.py"))
    assert len(modules) > 100
    found = {str(module): executors_in(module.read_text()) for module in modules}
    assert {module: what for module, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "source", ["import pickle", "from pickle import loads", "import marshal as m", "eval('1')"]
)
def test_a_module_that_would_is_seen(source):
    """The twin."""
    assert executors_in(source)
