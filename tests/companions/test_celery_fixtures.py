"""Celery's fixtures for the suites of its users, in a suite that is run as theirs are."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from celery_redlock.testing.servers import servers

SUITE = textwrap.dedent(
    """
    import os
    import threading
    import time

    import pytest

    from celery_redlock import RedlockTask
    from celery_redlock.reading.health import check
    from celery_redlock.reading.nodes import bootstrap
    from celery_redlock.plugin import plugin_for

    pytest_plugins = ["celery.contrib.pytest"]
    is_open = threading.Event()


    @pytest.fixture(scope="session")
    def celery_config():
        broker, *nodes = os.environ["URLS"].split()
        return {
            "broker_url": broker,
            "result_backend": broker,
            "redlock_nodes": nodes,
            "redlock_node_timeout": 5.0,
        }


    @pytest.fixture(scope="session")
    def celery_worker_parameters():
        return {"ping_task_timeout": 60.0, "shutdown_timeout": 60.0}  # Celery has 10 s for each


    def declare(app):
        ours = {"base": RedlockTask, "bind": True, "shared": False}

        @app.task(name="bill", unique_until="finished", **ours)
        def bill(self, invoice):
            assert is_open.wait(60)
            return f"billed {invoice}"

        @app.task(name="again", max_retries=3, **ours)
        def again(self):
            if not self.request.retries:
                raise self.retry(countdown=0.1)
            return self.request.retries

        # Connecting takes a loaded machine longer than a first publish waits for it.
        plugin, limit = plugin_for(app), time.monotonic() + 60
        nodes, rules = app.conf.redlock_nodes, plugin.settings.rules
        while {*bootstrap(nodes, rules).values()} != {"enrolled"} or check(plugin.locks):
            assert time.monotonic() < limit
        return bill, again


    def spend_a_day(bill, again):
        is_open.clear()
        first = bill.delay(7)
        second = bill.delay(7)
        assert (second.id, second.duplicate) == (first.id, True)
        is_open.set()
        assert first.get(timeout=60) == second.get(timeout=60) == "billed 7"
        assert again.delay().get(timeout=60) == 1


    def test_with_a_worker_of_its_own(celery_app, celery_worker):
        tasks = declare(celery_app)
        celery_worker.reload()
        spend_a_day(*tasks)


    def test_with_the_worker_of_the_session(celery_session_app, celery_session_worker):
        tasks = declare(celery_session_app)
        celery_session_worker.reload()
        spend_a_day(*tasks)


    def test_eagerly(celery_app):
        celery_app.conf.task_always_eager = True
        is_open.set()
        bill, again = declare(celery_app)
        assert bill.delay(7).get() == "billed 7"
        assert again.delay().get() == 1
    """
)


@pytest.mark.parametrize(
    "name", ["with_a_worker_of_its_own", "with_the_worker_of_the_session", "eagerly"]
)
def test_a_suite_with_celerys_fixtures(tmp_path, name):
    """
    A worker per test, one for the session, and none; no test hangs, and nothing is left.

    Each in a process of its own: of two workers in one process, at once or (before Celery 5.7)
    one after the other, the second may hear of no message, with the plain Task as well.
    """
    (tmp_path / "test_shop.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=120"]
    with servers(4) as started:
        done = subprocess.run(
            [*command, f"test_shop.py::test_{name}"],
            cwd=tmp_path,
            env={**os.environ, "URLS": " ".join(server.url for server in started)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "1 passed" in done.stdout
