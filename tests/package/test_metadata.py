"""What the archives say of themselves, to pip and on the page of a package index."""

from __future__ import annotations

import email
import re
import sys

import pytest
from markdown_it import MarkdownIt

from support.built import ROOT, contents, run

README = (ROOT / "README.md").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()
LINK = re.compile(r"(?<![\w!])\[[^\]]+\]\(([^)\s]+)\)")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
#: What an index shows in a place of its own; the whole set, or none.
URLS = {"Homepage", "Documentation", "Source", "Changelog", "Issues"}


def file_of_wheel(archives, name):
    files = contents(archives.wheel)
    return next(data for path, data in files.items() if path.endswith(f".dist-info/{name}"))


@pytest.fixture(scope="module")
def metadata(archives):
    return email.message_from_bytes(file_of_wheel(archives, "METADATA"))


@pytest.fixture(scope="module")
def described(metadata):
    return metadata.get_payload(decode=True).decode()


def rendered(text):
    return MarkdownIt("commonmark").enable("table").render(text)


# -- facts ----------------------------------------------------------------------------


def test_an_index_takes_the_archives(archives):
    said = run(
        *(sys.executable, "-m", "twine", "--no-color", "check", "--strict"),
        *(archives.wheel, archives.sdist),
        cwd=archives.wheel.parent,
    )
    assert said.count("PASSED") == 2


def test_both_archives_say_the_same(archives):
    """What pip reads before it builds is what it reads afterwards."""
    assert contents(archives.sdist)["PKG-INFO"] == file_of_wheel(archives, "METADATA")


def test_the_version_stands_in_one_place(archives, metadata):
    source = contents(archives.wheel)["celery_redlock/__init__.py"].decode()
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    assert metadata["Version"] == version
    assert archives.wheel.name.startswith(f"celery_redlock-{version}-")
    assert archives.sdist.name == f"celery_redlock-{version}.tar.gz"
    assert not re.search(r"^version\b", PYPROJECT, re.MULTILINE)
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest in {"Unreleased", version}


def test_the_licence_is_an_expression_with_its_text(archives, metadata):
    assert metadata["License-Expression"] == "MIT"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert not [line for line in metadata.get_all("Classifier") if line.startswith("License")]
    assert file_of_wheel(archives, "licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_pythons_are_those_of_the_matrix(metadata):
    named = re.findall(r"Python :: (3\.\d+)\n", "\n".join(metadata.get_all("Classifier")) + "\n")
    tested = re.search(r'"python": \((.+)\),', (ROOT / "compatibility/__init__.py").read_text())[1]
    assert named == re.findall(r'"(.+?)"', tested)
    assert metadata["Requires-Python"] == f">={named[0]}"


def test_systems_are_those_it_is_tested_on(metadata):
    """Nobody has tried any other, so none is promised."""
    systems = [line for line in metadata.get_all("Classifier") if line.startswith("Operating")]
    assert systems == ["Operating System :: POSIX :: Linux"]


def test_nothing_is_pinned_for_users(metadata):
    """Else it could not be installed beside what pins another version."""
    needs = [need for need in metadata.get_all("Requires-Dist") if "extra ==" not in need]
    names = {re.match(r"[\w-]+", need)[0] for need in needs}
    assert names == {"celery", "kombu", "redis"}
    assert not [need for need in metadata.get_all("Requires-Dist") if "==" in need.split(";")[0]]


@pytest.mark.parametrize(
    "extra",
    ["cli", "demo", "hiredis", "otel", "postgresql", "prometheus", "sqlite", "testing", "web"],
)
def test_an_extra_is_there_and_told_of(metadata, extra):
    assert extra in metadata.get_all("Provides-Extra")
    pages = [README, *(page.read_text() for page in (ROOT / "docs").rglob("*.md"))]
    assert any(f"celery-redlock[{extra}]" in page for page in pages)


def test_addresses_are_all_there_or_announced(metadata):
    """Half of them would send people to the wrong place; with none, a release says what to do."""
    urls = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL", []))
    assert set(urls) in (URLS, set())
    assert all(re.match(r"https://[\w.-]+\.\w+/", url) for url in urls.values())
    assert urls or "[project.urls]" in (ROOT / "CONTRIBUTING.md").read_text()


# -- the page ---------------------------------------------------------------------------


def test_no_link_of_the_page_is_broken(described):
    assert {link for link in LINK.findall(README) if not link.startswith("https://")}
    assert [link for link in LINK.findall(described) if not link.startswith("https://")] == []
    html = rendered(described)
    assert html.count("<table>") == rendered(README).count("<table>") > 0
    assert all(link.startswith("https://") for link in re.findall(r'(?:href|src)="(.*?)"', html))


def test_files_that_the_page_names_are_in_the_source_archive(archives, described):
    files = set(contents(archives.sdist))
    for link in LINK.findall(README):
        name = link.partition("#")[0]
        if name and not link.startswith("https://"):
            assert f"`{name}`" in described
            assert name in files or any(file.startswith(f"{name}/") for file in files)


def test_pictures_of_the_readme_are_left_out(archives, described):
    pictures = PICTURE.findall(README)
    assert pictures
    assert PICTURE.findall(described) == []
    assert set(pictures) <= set(contents(archives.sdist))


def test_code_of_the_page_is_that_of_the_readme(described):
    assert BLOCK.findall(described) == BLOCK.findall(README)
    assert "&lt;!--" not in rendered(described)
