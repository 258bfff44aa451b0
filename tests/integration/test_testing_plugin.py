"""The pytest plug-in, in suites of its own: each is a project that has celery-redlock installed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import celery_redlock

ROOT = Path(celery_redlock.__file__).parents[1]
#: As an installed celery-redlock has it; of two of one name pytest takes one.
ENTRY_POINTS = "[pytest11]\nredlock = celery_redlock.testing.pytest_plugin\n"
METADATA = "Metadata-Version: 2.1\nName: some-shop\nVersion: 1\n"
SHOP = """
from celery import Celery
from celery_redlock import RedlockTask
from celery_redlock.lock.nodes import address, connections

# A server that does not answer for a few seconds is slow, not down.
address.OPTIONS.update(socket_timeout=10.0, socket_connect_timeout=10.0)
connections.FIRST_CONNECT = 10.0

app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.redlock_nodes = ["redis://127.0.0.1:1/0"]
app.conf.redlock_node_timeout = 2.5

@app.task(base=RedlockTask, lock_key="invoice:{invoice_id}")
def bill(invoice_id):
    return "billed"
"""
CONFTEST = """
import pytest

@pytest.fixture
def redlock_app():
    from shop import app
    return app
"""


@pytest.fixture
def run(tmp_path):
    """Run a suite: ``run(tests, *options of pytest, **further files)`` -> the finished process."""
    info = tmp_path / "some_shop-1.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (info / "METADATA").write_text(METADATA)

    def run(tests, *options, **files):
        for name, text in {"shop": SHOP, "test_shop": tests, **files}.items():
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )

    return run


def passed(done, tests):
    assert done.returncode == 0, done.stdout + done.stderr
    return f"{tests} passed in" in done.stdout


def test_every_fixture_does_what_it_says(run):
    done = run(
        """
        import pytest
        from celery_redlock import QuorumUnavailable, current_lock
        from celery_redlock.plugin import plugin_for
        from shop import app, bill

        def test_alone():
            with pytest.raises(QuorumUnavailable):
                bill.apply((7,)).get()
            plugin_for(app).locks.close()

        def test_disabled(redlock_disabled):
            assert bill.apply((7,)).get() == "billed"

        def test_quorum(redlock_quorum):
            with redlock_quorum.hold(bill.s(7)):
                assert bill.apply((7,)).get()["skipped"] == "conflict"
            assert bill.apply((7,)).get() == "billed"

        def test_servers(redlock_servers):
            assert len(redlock_servers) == 5
            for server in redlock_servers[:2]:
                server.kill()
            assert bill.apply((7,)).get() == "billed"
            redlock_servers[2].kill()
            with pytest.raises(QuorumUnavailable):
                bill.apply((7,)).get()

        def test_alone_again():
            test_alone()
        """,
        "-W",
        "error",
        conftest=CONFTEST,
    )
    assert passed(done, 5)


def test_without_an_app_the_error_says_what_to_write(run):
    done = run("def test_it(redlock_quorum): pass")
    assert done.returncode == 1
    assert "define the fixture redlock_app" in done.stdout
    assert "def redlock_app():" in done.stdout


def test_the_fixtures_are_listed_with_what_they_do(run):
    """``pytest --fixtures`` is where people look."""
    done = run("def test_it(): pass", "--fixtures")
    for name in ("redlock_app", "redlock_disabled", "redlock_quorum", "redlock_servers"):
        assert f"\n{name} -- " in done.stdout


def test_a_suite_may_do_without_the_plugin(run):
    done = run("def test_it(): pass", "-p", "no:redlock")
    assert passed(done, 1)
    done = run("def test_it(redlock_disabled): pass", "-p", "no:redlock")
    assert "fixture 'redlock_disabled' not found" in done.stdout


def test_a_suite_that_uses_no_fixture_pays_nothing(run):
    done = run(
        """
        import sys

        def test_it():
            assert "celery_redlock.testing.pytest_plugin" in sys.modules
            assert not {"celery", "kombu", "redis"} & set(sys.modules)
            ours = {name for name in sys.modules if name.startswith("celery_redlock")}
            assert len(ours) == 3, ours
        """
    )
    assert passed(done, 1)
