from __future__ import annotations

import types

import pytest
from celery import Celery

from celery_redlock import ConfigurationError, Redlock, RedlockTask
from celery_redlock.lock.rules import Rules
from celery_redlock.plugin import plugin_for
from celery_redlock.settings import KNOWN, Settings

NODES = ["redis://one:1/0", "redis://two:2/0", "redis://three:3/0"]


def app_with(broker="memory://", **conf):
    app = Celery("shop", broker=broker, set_as_current=False)
    app.conf.update(conf)
    return app


def settings_of(app):
    return plugin_for(app).settings


@pytest.mark.parametrize(
    ("setting", "nearest"),
    [
        ("redlock_tll", "redlock_ttl"),
        ("redlock_node", "redlock_nodes"),
        ("redlock_on_conflicts", "redlock_on_conflict"),
        ("redlock_nodes_timeout", "redlock_node_timeout"),
        ("redlock_dedupttl", "redlock_dedup_ttl"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest(setting, nearest):
    app = app_with(redlock_nodes=NODES, **{setting: 5})
    with pytest.raises(ConfigurationError, match=rf"{setting}\b.*{nearest}\b"):
        _ = settings_of(app)


def test_an_unknown_setting_like_none_of_ours_is_refused_with_all():
    with pytest.raises(ConfigurationError) as refused:
        _ = settings_of(app_with(redlock_nodes=NODES, redlock_zzz=5))
    assert all(name in str(refused.value) for name in KNOWN)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("redlock_ttl", 0),
        ("redlock_ttl", -1),
        ("redlock_ttl", "30"),
        ("redlock_ttl", 61.0),
        ("redlock_wait", -1),
        ("redlock_max_ttl", 0),
        ("redlock_max_ttl", None),
        ("redlock_node_timeout", 0),
        ("redlock_node_timeout", float("nan")),
        ("redlock_drift_factor", -0.1),
        ("redlock_drift_factor", 0.5),
        ("redlock_drift_factor", 1.5),
        ("redlock_restart_guard", "no"),
        ("redlock_fence", 1),
        ("redlock_prefix", ""),
        ("redlock_prefix", "x" * 41),
        ("redlock_prefix", 7),
        ("redlock_on_lock_lost", "abrot"),
        ("redlock_beat_name", ""),
        ("redlock_beat_name", 3),
        ("redlock_beat_starting_deadline", 0),
        ("redlock_beat_starting_deadline", -1),
        ("redlock_beat_starting_deadline", "5m"),
        ("redlock_dedup_ttl", -1),
        ("redlock_dedup_ttl", "1h"),
        ("redlock_protect", ["vendor.*"]),
        ("redlock_protect", {"vendor.*": "order_id"}),
        ("redlock_nodes", []),
        ("redlock_nodes", "redis://one:1/0"),
        ("redlock_nodes", NODES[:2]),
        ("redlock_nodes", [NODES[0], NODES[1], NODES[0]]),
        ("redlock_nodes", ["http://one:1/0"]),
        ("redlock_nodes", [{"service": "lock-1"}]),
        ("redlock_nodes", [5]),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(setting, value):
    conf = {"redlock_nodes": NODES, setting: value}
    with pytest.raises(ConfigurationError, match=setting):
        _ = settings_of(app_with(**conf))


def test_no_ttl_fits_a_node_timeout_that_is_too_long():
    app = app_with(redlock_nodes=NODES, redlock_ttl=1.0, redlock_node_timeout=0.5)
    with pytest.raises(ConfigurationError, match=r"redlock_ttl.*redlock_node_timeout"):
        _ = settings_of(app)


def test_the_defaults_are_those_of_the_documentation():
    settings = settings_of(app_with(redlock_nodes=NODES))
    found = {name: settings.default(name) for name in KNOWN if name != "nodes"}
    assert found == {
        "ttl": 30.0,
        "wait": 0.0,
        "mode": "enforce",
        "on_conflict": "skip",
        "on_unavailable": "reschedule",
        "on_lock_lost": "abort",
        "fence": True,
        "dedup_ttl": 3600.0,
        "max_deliveries": None,
        "key_headers": (),
        "max_ttl": 60.0,
        "node_timeout": 0.05,
        "drift_factor": 0.05,
        "restart_guard": True,
        "prefix": "redlock",
        "beat_scheduler": "celery.beat:PersistentScheduler",
        "beat_starting_deadline": None,
        "beat_name": None,
        "observers": ("logging", "journal", "celery"),
        "skip_log_level": "INFO",
        "web_token": None,
        "username": None,
        "password": None,
        "protect": None,
    }


def test_a_plain_config_is_read():
    app = app_with()
    app.conf.redlock_nodes = NODES
    app.conf.redlock_ttl = 12.0
    assert settings_of(app).rules.ttl == 12.0
    assert list(settings_of(app).nodes) == NODES


def test_an_object_is_read():
    module = types.ModuleType("celeryconfig")
    module.redlock_nodes = NODES
    module.redlock_ttl = 12.0
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.config_from_object(module)
    assert settings_of(app).rules.ttl == 12.0


def django(**settings):
    module = types.ModuleType("settings")
    vars(module).update({"DEBUG": True, "TIME_ZONE": "UTC", **settings})
    app = Celery("shop", set_as_current=False)
    app.config_from_object(module, namespace="CELERY")
    return app


def test_settings_of_django_are_read():
    app = django(
        CELERY_BROKER_URL="memory://",
        CELERY_REDLOCK_NODES=NODES,
        CELERY_REDLOCK_TTL=12.0,
        CELERY_REDLOCK_ON_CONFLICT="fail",
    )
    settings = settings_of(app)
    assert (settings.rules.ttl, settings.on_conflict) == (12.0, "fail")
    assert list(settings.nodes) == NODES


def test_unknown_settings_of_django_are_refused_with_the_nearest():
    app = django(CELERY_REDLOCK_NODES=NODES, CELERY_REDLOCK_TLL=12.0)
    with pytest.raises(ConfigurationError, match=r"redlock_tll.*redlock_ttl"):
        _ = settings_of(app)


def test_a_setting_of_django_without_the_namespace_is_refused():
    """REDLOCK_TTL beside CELERY_ settings would be ignored; the error says how to write it."""
    app = django(CELERY_REDLOCK_NODES=NODES, REDLOCK_TTL=12.0)
    with pytest.raises(ConfigurationError, match=r"REDLOCK_TTL.*write CELERY_REDLOCK_TTL"):
        _ = settings_of(app)


def test_upper_case_without_a_namespace_is_refused():
    """Celery finds no REDLOCK_TTL in a plain config; the error says how to write it."""
    module = types.ModuleType("celeryconfig")
    module.REDLOCK_NODES = NODES
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.config_from_object(module)
    with pytest.raises(ConfigurationError, match=r"REDLOCK_NODES.*write redlock_nodes"):
        _ = settings_of(app)


@pytest.mark.parametrize(
    ("broker", "backend", "node"),
    [
        ("amqp://broker", "redis://results/1", "redis://results/1"),
        ("redis://broker/0", "redis://results/1", "redis://results/1"),
        ("redis://broker/0", "rpc://", "redis://broker/0"),
        ("redis://broker/0", None, "redis://broker/0"),
        ("rediss://broker/0", None, "rediss://broker/0"),
        (
            "memory://",
            "redis+socket:///run/redis.sock?virtual_host=2",
            "unix:///run/redis.sock?db=2",
        ),
        ("redis://broker/0;redis://spare/0", None, "redis://broker/0"),
        (["redis://broker/0", "redis://spare/0"], None, "redis://broker/0"),
        (
            "memory://",
            "rediss://results/1?ssl_cert_reqs=CERT_NONE",
            "rediss://results/1?ssl_cert_reqs=none",
        ),
    ],
)
def test_a_redis_of_the_app_is_the_single_node(broker, backend, node):
    app = Celery("shop", broker=broker, backend=backend, set_as_current=False)
    settings = settings_of(app)
    assert settings.is_fallback
    assert list(settings.nodes) == [node]


@pytest.mark.parametrize(
    ("backend", "node"),
    [
        ("db+postgresql://user:pw@db/app", "postgresql://user:pw@db/app"),
        (
            "db+postgresql+psycopg2://user@db/app?sslmode=require",
            "postgresql://user@db/app?sslmode=require",
        ),
        ("db+postgresql+psycopg://user@/app?host=/run/pg", "postgresql://user@/app?host=/run/pg"),
        ("db+postgres://db/app", "postgresql://db/app"),
        ("db+postgresql://app:a;b@db/app", "postgresql://app:a;b@db/app"),
        ("db+sqlite:////var/lib/app/results.db", "sqlite:////var/lib/app/results.db"),
        ("db+sqlite+pysqlite:////a%20b.db?timeout=5", "sqlite:////a%2520b.db"),
    ],
)
def test_the_database_of_the_result_backend_is_the_single_node(backend, node):
    app = Celery("shop", broker="amqp://broker", backend=backend, set_as_current=False)
    settings = settings_of(app)
    assert settings.is_fallback
    assert list(settings.nodes) == [node]
    assert settings.rules.node_timeout == 1.0


def test_a_redis_comes_before_a_database():
    backend = "db+postgresql://db/app"
    app = Celery("shop", broker="redis://broker/0", backend=backend, set_as_current=False)
    settings = settings_of(app)
    assert list(settings.nodes) == ["redis://broker/0"]
    assert settings.rules.node_timeout == Rules.node_timeout


def test_a_database_has_a_second_to_answer_unless_it_is_set():
    nodes = ["sqlite:////locks.db"]
    assert settings_of(app_with(redlock_nodes=nodes)).rules.node_timeout == 1.0
    set_so = settings_of(app_with(redlock_nodes=nodes, redlock_node_timeout=0.05))
    assert set_so.rules.node_timeout == 0.05
    for locks in (Redlock(nodes), Redlock.from_urls(nodes, ttl=10)):
        assert locks.rules.node_timeout == 1.0
    assert Redlock.from_urls(nodes, node_timeout=0.05).rules.node_timeout == 0.05
    assert Redlock(NODES).rules.node_timeout == Rules.node_timeout


def test_the_environment_of_celery_counts_for_the_single_node(monkeypatch):
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://broker/3")
    app = Celery("shop", set_as_current=False)
    assert list(settings_of(app).nodes) == ["redis://broker/3"]


def test_nodes_win_over_the_single_node():
    settings = settings_of(app_with(broker="redis://broker/0", redlock_nodes=NODES))
    assert not settings.is_fallback
    assert list(settings.nodes) == NODES


@pytest.mark.parametrize(
    "backend",
    [
        None,
        "rpc://",
        "db+sqlite://",
        "db+sqlite:///here.db",
        "db+mysql://db/app",
        "cache+memory://",
    ],
)
def test_without_any_redis_the_setting_is_asked_for(backend):
    app = Celery("shop", broker="amqp://broker", backend=backend, set_as_current=False)
    with pytest.raises(ConfigurationError, match="redlock_nodes is not set"):
        _ = settings_of(app)


def test_no_password_is_told():
    nodes = ["redis://:hush@one:1/0", "redis://:hush@one:1/0", "redis://:hush@two:1/0"]
    with pytest.raises(ConfigurationError, match="one:1/0") as refused:
        _ = settings_of(app_with(redlock_nodes=nodes))
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("how", ["task_cls as text", "task_cls", "app.Task"])
def test_every_task_of_an_app_can_be_protected(how):
    task_cls = {"task_cls as text": "celery_redlock:RedlockTask", "task_cls": RedlockTask}.get(how)
    app = Celery("shop", broker="memory://", task_cls=task_cls, set_as_current=False)
    if how == "app.Task":
        app.Task = RedlockTask

    @app.task(shared=False, name="shop.bill")
    def bill(invoice_id):
        return invoice_id

    assert isinstance(app.tasks["shop.bill"], RedlockTask)
    assert bill.lock_name((7,)) == bill.lock_name((), {"invoice_id": 7})


def test_settings_know_nothing_of_celery():
    settings = Settings.from_conf({"redlock_nodes": NODES, "redlock_prefix": "shop"})
    assert settings.rules.prefix == "shop"
