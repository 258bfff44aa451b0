"""The workflows name Pythons, targets, files and tags as they are in the repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import celery_redlock

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # last, so that an installed celery_redlock stays what is tested

from compatibility import AXES  # noqa: E402
from proof.__main__ import PROOFS  # noqa: E402

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yml")}


def steps_of(name):
    return [step for job in WORKFLOWS[name]["jobs"].values() for step in job["steps"]]


def test_tests_run_on_all_supported_pythons():
    (job,) = WORKFLOWS["tests"]["jobs"].values()
    assert job["strategy"]["matrix"]["python"] == list(AXES["python"])


def test_every_night_all_is_proved_that_can_be():
    job = WORKFLOWS["nightly"]["jobs"]["proof"]
    assert set(job["strategy"]["matrix"]["part"]) == set(PROOFS)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_what_is_made_is_there_to_be_made(name):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for step in steps_of(name):
        for line in re.findall(r"^make (.+)", step.get("run", ""), re.MULTILINE):
            words = re.sub(r"\$\{\{.*?\}\}", "", line).split()
            made = {word for word in words if "=" not in word}
            assert made
            assert made <= targets


@pytest.mark.parametrize("name", WORKFLOWS)
def test_each_script_that_is_run_is_there(name):
    """Those of .ci where that is: the source archive has none."""
    for step in steps_of(name):
        for path in re.findall(r"\bbash (\S+)", step.get("run", "")):
            assert (ROOT / path).is_file() or not (ROOT / ".ci").exists()


@pytest.mark.parametrize("name", WORKFLOWS)
def test_git_reads_a_checkout_in_a_container(name):
    """Before anything is run there: it belongs to another user."""
    for job in WORKFLOWS[name]["jobs"].values():
        runs = [step["run"] for step in job["steps"] if "run" in step]
        assert "container" not in job or "safe.directory" in runs[0]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_runs_do_not_pile_up(name):
    concurrency = WORKFLOWS[name]["concurrency"]
    assert "github.ref" in concurrency["group"]
    assert name != "release" or concurrency["cancel-in-progress"] is False


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_only_read(name):
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] <= 120 for job in WORKFLOWS[name]["jobs"].values())


@pytest.mark.parametrize(
    ("tag", "code"), [(f"v{celery_redlock.__version__}", 0), ("v99.0.0", 1), ("", 1)]
)
def test_only_the_tag_of_the_version_is_released(tag, code):
    (step,) = [step for step in steps_of("release") if "version" in step.get("name", "")]
    # A machine need not have a program that is called python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-euc", step["run"]],
        cwd=ROOT,
        env={**os.environ, "PATH": path, "GITHUB_REF_NAME": tag},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == code, ended.stderr
    assert (f"The tag is {tag}," in ended.stdout) is bool(code)
