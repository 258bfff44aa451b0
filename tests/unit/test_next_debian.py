"""Debian's next release in a folder: how it is made and asked, and what was recorded there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that an installed celery_redlock stays what is tested

from compatibility import NEXT_DEBIAN, Cell, brought, debian_root, page  # noqa: E402
from compatibility.__main__ import Programs  # noqa: E402
from compatibility.debian_root import CannotMake, Root  # noqa: E402
from compatibility.next_debian import STARTED, TESTS, counted, main  # noqa: E402

RECORDED = json.loads(NEXT_DEBIAN.read_text()) if NEXT_DEBIAN.exists() else {}
recorded = pytest.mark.skipif(not RECORDED, reason="`compatibility.next_debian --record` makes it")

# -- the record -----------------------------------------------------------------------------


@recorded
def test_no_test_failed_there():
    assert page.is_well(RECORDED)
    assert RECORDED["tests"] == list(TESTS)
    assert RECORDED["passed"] > 1000


@recorded
def test_it_is_about_today_s_versions():
    found = RECORDED["found"]
    assert set(STARTED.values()) <= set(found)
    wanted = {
        "Python": "3.14.",
        "Redis": "8.",
        "Valkey": "9.",
        "RabbitMQ": "4.",
        "PostgreSQL": "18",
    }
    for name, beginning in wanted.items():
        assert found[name].startswith(beginning), name


@recorded
def test_a_failure_would_stand_out_on_the_page():
    told = {**page.read(), "next_debian": {**RECORDED, "failed": 2}}
    assert any(line.startswith("\n**") and "2 failed" in line for line in page.next_debian(told))
    assert list(page.next_debian({})) == ["Not yet recorded."]


# -- the folder -----------------------------------------------------------------------------


def test_who_is_not_root_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotMake, match="need root"):
        Root(tmp_path / "root").make([])
    assert main(["--root", str(tmp_path / "root")]) == 2
    assert "need root" in capsys.readouterr().err
    assert not (tmp_path / "root").exists()


def test_a_missing_debootstrap_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CannotMake, match="no debootstrap and no setpriv and no unshare found"):
        Root(tmp_path / "root").make([])


def answering(monkeypatch, stdout):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 0, stdout=stdout)

    monkeypatch.setattr(debian_root.subprocess, "run", run)


def test_the_mirror_is_the_machine_s_own(monkeypatch):
    """Of Debian itself, and not of its security updates or of others' packages."""
    others = "Other main stable http://other.invalid\nDebian main x-security http://late.invalid\n"
    answering(monkeypatch, f"{others}Debian main stable http://mirror.invalid/debian\n")
    assert debian_root.mirror() == "http://mirror.invalid/debian"
    answering(monkeypatch, others)
    with pytest.raises(CannotMake, match="apt-get update"):
        debian_root.mirror()


def test_apt_is_told_there_what_it_is_told_here(monkeypatch):
    proxy = 'Acquire::http::Proxy "http://proxy.invalid:1";'
    answering(monkeypatch, f'APT "";\nAcquire::http "";\n{proxy}\nAPT::Sandbox::User "x";\n')
    assert debian_root.apt_settings().splitlines()[:-1] == [proxy]


def test_pip_reaches_what_it_reaches_here(monkeypatch):
    settings = "global.extra-index-url='one two'\nglobal.cert='/a'\ninstall.no-index='x'\n"
    answering(monkeypatch, f"{settings}:env:.cert='/b'\n")
    monkeypatch.setattr(os, "environ", {"PIP_CERT": "/b", "https_proxy": "p", "SECRET": "s"})
    assert debian_root.reaching() == {
        "PIP_EXTRA_INDEX_URL": "one two",
        "PIP_CERT": "/b",
        "PIP_NO_INDEX": "x",
        "https_proxy": "p",
        "PIP_ROOT_USER_ACTION": "ignore",
    }


def test_files_and_folders_that_settings_name_are_found(tmp_path):
    (tmp_path / "index" / "simple").mkdir(parents=True)
    (tmp_path / "ca.crt").touch()
    settings = {"A": f"file://{tmp_path}/index/simple {tmp_path}/none", "B": f"{tmp_path}/ca.crt"}
    assert debian_root.named_in(settings) == ([tmp_path / "ca.crt"], [tmp_path / "index"])


# -- what came out --------------------------------------------------------------------------


def test_the_counts_of_a_run_are_read():
    suite = '<testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10" time="1" />'
    told = counted(f'<?xml version="1.0"?><testsuites>{suite}</testsuites>')
    assert told == {"passed": 4, "failed": 2, "errors": 1, "skipped": 3}


def test_a_count_that_is_not_said_is_none():
    """A cell that ended early may lack any of them."""
    assert page.outcome({"passed": 3}) == "3 passed in 0 s"
    assert page.outcome({"failed": 1, "seconds": 2}) == "1 failed in 2 s"


# -- servers from elsewhere -----------------------------------------------------------------


def test_a_cell_that_lacks_something_is_known():
    here = Programs({"3.11": "python3.11"}, {"Redis 7": "redis-server"})
    assert here.lacks(Cell("3.11", "5.7", "8", "Valkey 9", "on")) == []
    assert here.lacks(Cell("3.11", "5.7", "8", "Redis 7", "on")) == []
    assert here.lacks(Cell("3.14", "5.7", "8", "Redis 8", "on")) == ["Python 3.14", "Redis 8"]


@pytest.mark.skipif(shutil.which("ldd") is None, reason="no ldd here")
def test_a_program_is_brought_with_all_it_needs(tmp_path):
    program = shutil.which("env")
    start = brought.bring(program, tmp_path / "there")
    done = subprocess.run([str(start), "A=1"], capture_output=True, text=True, check=True)
    assert "A=1" in done.stdout
    assert {"env", "loader", "libc.so.6"} <= {file.name for file in start.parent.glob("lib/*")}


def test_links_inside_of_a_root_lead_to_files_inside(tmp_path):
    (tmp_path / "usr/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/x.so.1").touch()
    (tmp_path / "lib").symlink_to("usr/lib")
    (tmp_path / "usr/lib/x.so").symlink_to("/lib/x.so.1")
    assert brought.found_in(tmp_path, "/lib/x.so") == tmp_path / "usr/lib/x.so.1"
