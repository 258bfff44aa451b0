"""The site is built from docs/ without a warning, and has all that there is in the code."""

from __future__ import annotations

import dataclasses
import doctest
import html
import html.parser
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import pytest
from prometheus_client import REGISTRY

import celery_redlock
import celery_redlock.observers.prometheus  # registers its metrics
from celery_redlock import errors, events, fencing, testing
from celery_redlock.ops.cli import redlock
from celery_redlock.ops.doctor import check_nodes
from celery_redlock.ops.main import main
from celery_redlock.settings import KNOWN
from celery_redlock.task import policies
from celery_redlock.task.options import OPTIONS

pytestmark = pytest.mark.timeout(300)  # the first one waits for the build

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

if sys.version_info < (3, 11):
    pytest.skip("the pages are built with Python 3.11 or newer", allow_module_level=True)
if os.environ.get("CI") != "true" and importlib.util.find_spec("myst_parser") is None:
    pytest.skip("the extra docs is not installed", allow_module_level=True)


def build(source, out, *options):
    recipe = re.search(
        r"^\t\$\(BIN\)/sphinx-build (.+) docs build/docs \$\(ARGS\)$",
        (ROOT / "Makefile").read_text(),
        re.MULTILINE,
    )
    command = [sys.executable, "-m", "sphinx", *recipe[1].split(), *options, "--quiet"]
    ended = subprocess.run(
        [*command, "-d", f"{out}-doctrees", str(source), str(out)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return ended.returncode, ended.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site") / "html"
    code, told = build(DOCS, out)
    assert code == 0, told
    return out


@pytest.fixture(scope="module")
def reference(site):
    pages = (site / "reference").glob("*.html")
    return {page.stem: html.unescape(Content.of(page).text) for page in pages}


class Content(html.parser.HTMLParser):
    """What a page has."""

    def __init__(self):
        super().__init__()
        self.anchors, self.links, self.text = set(), [], ""
        self._is_article = False

    @classmethod
    def of(cls, page):
        content = cls()
        content.feed(page.read_text())
        return content

    def handle_starttag(self, tag, attrs):
        told = dict(attrs)
        self._is_article |= tag == "article"
        self.anchors |= {told[name] for name in ("id", "name") if told.get(name)}
        if tag in ("a", "img"):
            self.links += [told[name] for name in ("href", "src") if told.get(name)]

    def handle_data(self, data):
        """Note words of the page itself, not those around it."""
        if self._is_article:
            self.text += data

    def handle_endtag(self, tag):
        self._is_article &= tag != "article"


def test_the_site_is_built_without_a_warning(site):
    for page in DOCS.rglob("*.md"):
        built = site / page.relative_to(DOCS).with_suffix(".html")
        assert "<h1>" in built.read_text(), page


def test_what_warns_ends_the_build(tmp_path):
    wrong = {
        "[there](nowhere.md)": "nowhere.md",
        "[here](#nothing-here)": "nothing-here",
        "```{from-code} of-nothing\n```": "of_nothing",
        "```{eval-rst}\n.. automodule:: celery_redlock.not_there\n```": "celery_redlock.not_there",
    }
    source, out = tmp_path / "source", tmp_path / "html"
    source.mkdir()
    page = source / "index.md"
    page.write_text("# Page\n\n[there](#page)\n")
    code, told = build(source, out, "-c", str(DOCS))
    assert (code, told) == (0, "")
    for text, said in wrong.items():
        page.write_text(f"# Page\n\n{text}\n")
        code, told = build(source, out, "-c", str(DOCS))
        assert code != 0, text
        assert said in told


def test_links_on_the_site_lead_somewhere(site):
    pages = {page: Content.of(page) for page in site.rglob("*.html")}
    broken = []
    for page, content in pages.items():
        for link in content.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchor = unquote(parts.fragment)
            if not there.exists() or (anchor and anchor not in pages[there].anchors):
                broken.append((str(page.relative_to(site)), link))
    assert sum(len(content.links) for content in pages.values()) > 500
    assert broken == []


# -- the reference ----------------------------------------------------------------------------


def test_the_reference_has_every_option_setting_and_policy(reference):
    for option in OPTIONS:
        assert re.search(rf"\b{option}\b", reference["options"]), option
    for setting in KNOWN:
        assert re.search(rf"\bredlock_{setting}\b", reference["settings"]), setting
    for word, policy in policies.WORDS.items():
        assert f'"{word}"' in reference["policies"]
        for field in dataclasses.fields(policy):
            assert f"{field.name}={field.default!r}" in reference["policies"]
            assert re.search(rf"\n{field.name}\b", reference["policies"]), field.name


def test_options_settings_and_errors_can_be_linked_to(site):
    for page, names in {
        "options": OPTIONS,
        "settings": [f"redlock_{name}" for name in KNOWN],
        "errors": [name.lower() for name in errors.__all__],
    }.items():
        anchors = Content.of(site / "reference" / f"{page}.html").anchors
        assert set(names) <= anchors, page


def test_code_can_be_copied(site):
    page = (site / "tutorial.html").read_text()
    assert "copybutton.js" in page
    assert r"$ " in (site / "_static" / "copybutton.js").read_text()


def test_the_reference_has_every_error_and_event(reference):
    for name in errors.__all__:
        assert f"exception celery_redlock.errors.{name}" in reference["errors"], name
    assert re.search(
        r"LockNotAcquired\n\s+LockTaken\n\s+RateExceeded\n\s+QuorumUnavailable", reference["errors"]
    )
    assert "eight characters, which prove nothing" in " ".join(reference["errors"].split())
    kinds = [getattr(events, name) for name in events.__all__]
    kinds = [k for k in kinds if isinstance(k, type) and issubclass(k, events.Event)]
    assert len(kinds) > 15
    for kind in kinds:
        assert f"class celery_redlock.events.{kind.__name__}" in reference["events"]
        for field in dataclasses.fields(kind):
            assert f"{field.name}: " in reference["events"]


def test_the_reference_has_every_metric(reference):
    names = {family.name for family in REGISTRY.collect() if family.name.startswith("redlock_")}
    assert len(names) > 20
    for name in names:
        assert re.search(rf"\b{name}(_total)?\b", reference["metrics"]), name
    source = (ROOT / "celery_redlock" / "observers" / "otel.py").read_text()
    for name in re.findall(r'(?:count|gauge|seconds)\(\s*"(redlock\.[\w.]+)"', source):
        assert name in reference["metrics"]
    assert re.search(r"redlock_lost_total\s+counter\s+task, reason", reference["metrics"])


def test_the_reference_has_every_command(reference):
    above = click.Context(redlock, info_name="redlock")
    assert "status" in redlock.list_commands(above)
    told = " ".join(reference["commands"].split())
    for group, usage in ((redlock, "celery -A APP redlock"), (main, "celery-redlock")):
        for name in group.list_commands(above):
            command = group.get_command(above, name)
            assert f"Usage: {usage} {name}" in told
            assert " ".join(command.help.split("\n\n")[0].split()) in told
            for option in command.params:
                if isinstance(option, click.Option):
                    assert option.opts[0] in told, (name, option.opts)


def test_the_reference_has_every_finding(site, reference):
    anchors = Content.of(site / "reference" / "doctor.html").anchors
    folder = Path(check_nodes.__file__).parent
    written = "".join(file.read_text() for file in folder.glob("*.py"))
    codes = set(re.findall(r'Finding\(\s*\w+,\s*"([\w-]+)"', written))
    assert len(codes) > 25
    for code in {*codes, "task-declared", "observers"}:
        row = rf"\n{code}\n+(error|warning|note)( or \w+)*\n+\w"
        assert re.search(row, reference["doctor"]), code
        assert code in anchors


def test_the_reference_has_every_public_name(reference):
    for name in set(celery_redlock.__all__) - set(errors.__all__):
        assert f"celery_redlock.{name}" in reference["api"], name
    for name in testing.__all__:
        assert f"celery_redlock.testing.{name}" in reference["testing"], name
    for file in Path(fencing.__file__).parent.glob("[!_]*.py"):
        module = importlib.import_module(f"celery_redlock.fencing.{file.stem}")
        for name in module.__all__ if file.stem != "number" else ():
            assert f"celery_redlock.fencing.{file.stem}.{name}" in reference["fencing"], name


# -- the examples in docstrings ---------------------------------------------------------------


def test_examples_in_docstrings_are_true():
    for file in sorted((ROOT / "celery_redlock").rglob("*.py")):
        if ">>> " in file.read_text():
            parts = file.relative_to(ROOT).with_suffix("").parts
            module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
            assert doctest.testmod(module).failed == 0, file
