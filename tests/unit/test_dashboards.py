"""The dashboard and the alert rules ask for metrics that are there, by labels that they have."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import Counter, Gauge, Histogram

from celery_redlock.events import KINDS
from celery_redlock.observers import prometheus

OPS = Path(__file__).parents[2] / "ops"
RULES = OPS / "prometheus" / "alerts.yml"
DASHBOARD = OPS / "grafana" / "celery-redlock.json"

#: What Prometheus itself adds, and what it exports of its own.
SCRAPED = {"job", "instance"}
OF_PROMETHEUS = {"up": SCRAPED}
SUFFIXES = {Counter: [""], Gauge: [""], Histogram: ["_bucket", "_sum", "_count"]}
WORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "offset", "bool", "inf", "nan"}
NAME = r"[A-Za-z_:][A-Za-z0-9_:]*"


def exported():
    families = [*prometheus.FAMILIES.values(), prometheus.MARGIN, prometheus.MARGIN_RATIO]
    metrics = [it._family for it in families]
    names = {}
    for metric in metrics:
        for suffix in SUFFIXES.get(type(metric), ()):
            name = metric._name + ("_total" if isinstance(metric, Counter) else suffix)
            le = {"le"} if suffix == "_bucket" else set()
            names[name] = {*metric._labelnames, *SCRAPED, *le}
    return names


def rules():
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def alerts():
    return [rule for rule in rules() if "alert" in rule]


def known():
    recorded = {rule["record"]: SCRAPED for rule in rules() if "record" in rule}
    return {**exported(), **OF_PROMETHEUS, **recorded}


def marks():
    return json.loads(DASHBOARD.read_text())["annotations"]["list"]


def panels():
    return [it for it in json.loads(DASHBOARD.read_text())["panels"] if it["type"] != "row"]


def queries():
    """Return ``(where, query, labels that its legend names)`` of dashboard and rules."""
    found = [
        (f"{panel['title']} {target['refId']}", target["expr"], target["legendFormat"])
        for panel in panels()
        for target in panel["targets"]
    ]
    found += [(it["name"], it["expr"], it["textFormat"]) for it in marks()]
    found += [
        (rule["alert"], rule["expr"], " ".join(rule["annotations"].values())) for rule in alerts()
    ]
    found += [(rule["record"], rule["expr"], "") for rule in rules() if "record" in rule]
    return [
        (where, query, set(re.findall(rf"{{{{\s*(?:\$labels\.)?({NAME})\s*}}}}", legend)))
        for where, query, legend in found
    ]


def wrong(query, named=frozenset()):
    query = re.sub(r"\$(job|task)\b", "", query)
    query = re.sub(r"\[[^\]]*\]", "", query)  # how far back
    labels = set(named)
    for inside in re.findall(r"\{([^}]*)\}", query):
        labels |= set(re.findall(rf"({NAME})\s*(?:=~|!~|!=|=)", inside))
    for inside in re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", query):
        labels |= set(re.findall(NAME, inside))
    query = re.sub(r"\{[^}]*\}", "", query)
    query = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", query)
    names = {
        match[1]
        for match in re.finditer(rf"(?<![0-9.A-Za-z_:])({NAME})\b(?!\s*\()", query)
        if match[1].lower() not in WORDS
    }
    has = known()
    there = set().union(*(has[name] for name in names if name in has))
    return {name for name in names if name not in has} | (
        labels - there if names <= set(has) else set()
    )


@pytest.mark.parametrize(("query", "labels"), [pytest.param(q, n, id=w) for w, q, n in queries()])
def test_a_query_asks_for_what_there_is(query, labels):
    assert wrong(query, labels - {"value"}) == set()


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("sum(rate(redlock_skiped_total[5m]))", {"redlock_skiped_total"}),
        ("redlock_lost", {"redlock_lost"}),
        ("rate(redlock_wait_seconds[5m])", {"redlock_wait_seconds"}),
        ('redlock_lost_total{tusk="t"}', {"tusk"}),
        ("sum by (nodes) (redlock_node_up)", {"nodes"}),
        ("redlock_node_up - on (nod) redlock_node_quarantined", {"nod"}),
        ("sum by (le) (rate(redlock_wait_seconds_sum[5m]))", {"le"}),
        (
            "redlock_node_up and job_instance:redlock_voters:max > Inf",
            {"job_instance:redlock_voters:max"},
        ),
        ("1 - redlock_node_up / 2 or vector(0)", set()),
    ],
)
def test_what_is_misspelt_is_found(query, found):
    """The twin: the test above would not be silent about it."""
    assert wrong(query) == found


def test_a_legend_that_names_no_label_is_found():
    """The twin for legends and annotations."""
    assert wrong("redlock_node_up", {"task"}) == {"task"}


def test_every_metric_is_shown():
    asked = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    unseen = {
        name
        for name in exported()
        if not re.search(
            rf"\b{re.sub('_(bucket|sum|count)$', '', name)}(_bucket|_sum|_count)?\b", asked
        )
    }
    assert unseen == set()


def test_every_metric_is_on_the_page():
    page = (OPS.parent / "docs" / "operating.md").read_text()
    told = {}
    for names, labels in re.findall(r"^\| `(redlock_[\w{},]+)` \| ([^|]*)\|", page, re.MULTILINE):
        before, choice, after = re.fullmatch(r"(\w+?)(?:\{([\w,]+)\}(\w*))?", names).groups()
        for part in (choice or "").split(","):
            told[f"{before}{part}{after or ''}"] = set(re.findall(r"\w+", labels))
    shown = {
        re.sub("_(bucket|sum|count)$", "", name): labels - {*SCRAPED, "le"}
        for name, labels in exported().items()
    }
    assert told == shown


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_what_is_wrong_and_what_to_do(rule):
    assert rule["alert"].startswith("Redlock")
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert set(rule["annotations"]) == {"summary", "description", "action"}
    assert all(len(text) > 20 for text in rule["annotations"].values())
    assert len(rule["annotations"]["summary"]) < 120


def test_panels_stand_beside_each_other():
    taken = set()
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert taken.isdisjoint(cells), panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_dashboard_names_no_data_source_of_its_own():
    """It is that of the variable, so that it can be imported anywhere."""
    uids = re.findall(r'"uid": "([^"]+)"', DASHBOARD.read_text())
    assert set(uids) == {"${datasource}", "celery-redlock"}


needs_promtool = pytest.mark.skipif(
    not shutil.which("promtool") and os.environ.get("CI") != "true", reason="no promtool here"
)


def promtool(*arguments):
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_takes_the_configuration():
    promtool("check", "config", str(OPS / "prometheus" / "prometheus.yml"))
    promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(OPS / "prometheus" / "alerts_test.yml"))


@needs_promtool
def test_prometheus_takes_the_queries_of_the_dashboard(tmp_path):
    variables = {"$__rate_interval": "1m", "$__interval": "1m", "$__range": "3h"}
    recorded = []
    for number, query in enumerate(q for panel in panels() for q in panel["targets"]):
        expr = query["expr"]
        for name, stands_for in variables.items():
            expr = expr.replace(name, stands_for)
        recorded.append({"record": f"q{number}", "expr": expr})
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": recorded}]}))
    promtool("check", "rules", str(file))


def test_every_alert_is_tried():
    tried = (OPS / "prometheus" / "alerts_test.yml").read_text()
    assert [rule["alert"] for rule in alerts() if rule["alert"] not in tried] == []


@pytest.mark.parametrize("mark", marks(), ids=lambda mark: mark["name"])
def test_an_annotation_says_what_the_log_does(mark):
    told = KINDS[mark["name"]]
    assert mark["titleFormat"] == told.word
    assert mark["iconColor"] == {"bad": "red", "warn": "orange"}[told.mark]
