"""What is in the archives: all that their readers need, and nothing else."""

from __future__ import annotations

import re
import shutil
import sys
import zipfile

import pytest

from support.built import contents, files_in, run, unpack

#: What only the machines need that check a change.
LEFT_OUT = (".ci/",)
#: Installed beside the package, for Grafana and Prometheus.
SHARED = {
    "share/celery-redlock/grafana.json": "ops/grafana/celery-redlock.json",
    "share/celery-redlock/alerts.yml": "ops/prometheus/alerts.yml",
}


@pytest.fixture(scope="module")
def unpacked(archives, tmp_path_factory):
    return unpack(archives.sdist, tmp_path_factory.mktemp("unpacked") / "sources")


def test_the_wheel_has_the_package_and_nothing_else(archives):
    files = contents(archives.wheel)
    stem = archives.wheel.name.removesuffix("-py3-none-any.whl")
    package = {name for name in files_in(archives.sources) if name.startswith("celery_redlock/")}
    about = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    expected = package | {f"{stem}.dist-info/{name}" for name in about}
    expected |= {f"{stem}.data/data/{name}" for name in SHARED}
    assert set(files) == expected
    for name in package:
        assert files[name] == (archives.sources / name).read_bytes()
    for name, source in SHARED.items():
        assert files[f"{stem}.data/data/{name}"] == (archives.sources / source).read_bytes()


def test_what_is_no_python_is_in_the_wheel(archives):
    """What type checkers and the web page look for."""
    files = set(contents(archives.wheel))
    assert "celery_redlock/py.typed" in files
    page = "celery_redlock/ops/web"
    assert {f"{page}/templates/page.html", f"{page}/static/live.js"} <= files


def test_the_wheel_is_for_every_machine(archives):
    assert archives.wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(archives.wheel) as opened:
        modes = {info.external_attr >> 16 & 0o777 for info in opened.infolist()}
    assert modes == {0o644}


def test_the_source_archive_has_the_project(archives):
    """Tests, pages, example and all; a new file at the top has to be named, or left out."""
    files = set(contents(archives.sdist))
    project = {name for name in files_in(archives.sources) if not name.startswith(LEFT_OUT)}
    assert project - files == set(), "name it in [tool.hatch.build.targets.sdist], or in LEFT_OUT"
    assert files - project == {"PKG-INFO"}


def test_tests_of_the_source_archive_run(unpacked):
    chosen = ("tests/unit/test_lease.py", "tests/unit/test_guarantees_page.py")
    options = ("-q", "-p", "no:cacheprovider")
    environment = {"PYTHONPATH": str(unpacked)}
    where = "import celery_redlock; print(celery_redlock.__file__)"
    told = run(sys.executable, "-c", where, cwd=unpacked, env=environment)
    assert told.startswith(str(unpacked))
    run(sys.executable, "-m", "pytest", *options, *chosen, cwd=unpacked, env=environment)


def test_the_image_of_the_example_has_what_a_build_needs(archives, tmp_path):
    text = (archives.sources / "example_worker" / "Dockerfile").read_text()
    before, installs, _ = text.partition("pip install")
    assert installs
    folder = tmp_path / "srv"
    folder.mkdir()
    for line in re.findall(r"^COPY (.+)$", before, re.MULTILINE):
        *names, place = line.split()
        for name in names:
            if (archives.sources / name).is_dir():
                shutil.copytree(archives.sources / name, folder / place)
            else:
                shutil.copy(archives.sources / name, folder / place)
    out = tmp_path / "dist"
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=folder)
    assert (out / archives.wheel.name).read_bytes() == archives.wheel.read_bytes()
