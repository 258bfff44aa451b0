"""Flask's factory for Celery: tasks have its app context and a lock, whichever base is first."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_redlock.lock.rules import Rules
from celery_redlock.reading.nodes import bootstrap
from support.clients import let_go

pytest.importorskip("flask")

SHOP = '''
import os

from celery import Celery, Task, shared_task
from celery_redlock import RedlockTask, current_lock
from flask import Flask, current_app


def factory(web):
    """As in Flask's documentation, in our words."""

    class WebTask(Task):
        def __call__(self, *args, **kwargs):
            with web.app_context():
                return self.run(*args, **kwargs)

    celery = Celery(web.name, task_cls=WebTask)
    celery.config_from_object(web.config["CELERY"])
    celery.set_default()
    return celery, WebTask


web = Flask("shop")
web.config["CELERY"] = {
    "broker_url": os.environ["BROKER"],
    "result_backend": os.environ["BROKER"],
    "redlock_node_timeout": 1.0,
    "redlock_protect": {"by_setting": {"lock_key": "by setting"}},
}
app, WebTask = factory(web)
LOCKED = {
    "theirs_first": type("Locked", (WebTask, RedlockTask), {"abstract": True}),
    "ours_first": type("Locked", (RedlockTask, WebTask), {"abstract": True}),
    "ours_alone": RedlockTask,
}


def told():
    return [current_app.name, current_lock().name]


for name, base in LOCKED.items():
    shared_task(base=base, name=name, lock_key=name)(told)


shared_task(name="by_setting")(told)
'''


@pytest.fixture
def web_worker(tmp_path, broker, start_worker):
    """A worker of the app above: ``(worker, app)``."""
    bootstrap([broker.url], Rules())
    (tmp_path / "web_shop.py").write_text(SHOP)
    worker = start_worker("web_shop:app", env={"BROKER": broker.url})
    app = Celery(broker=broker.url, backend=broker.url, set_as_current=False)
    yield worker, app
    let_go(app)


def test_tasks_have_the_app_context_and_a_lock(web_worker):
    """Whichever base is first, and by a setting; the twin has our base alone, and is warned of."""
    worker, app = web_worker
    for name in ("theirs_first", "ours_first"):
        assert app.send_task(name).get(timeout=60) == ["shop", name]
    assert app.send_task("by_setting").get(timeout=60) == ["shop", "by setting"]
    with pytest.raises(RuntimeError, match="outside of application context"):
        app.send_task("ours_alone").get(timeout=60)
    line = worker.wait_for_log(r"WARNING.*takes the place of the app's own class.*")[0]
    assert "ours_alone run" in line
    assert "first" not in line
