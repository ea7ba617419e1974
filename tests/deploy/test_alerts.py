"""Alerts and dashboard speak of metrics that exist; every alert has a test and a way out."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
import urllib.request

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.files import DEPLOY, ROOT
from tests.tools import judges

RULES = DEPLOY / "helm" / "kept" / "files" / "rules.yaml"
DASHBOARD = DEPLOY / "helm" / "kept" / "files" / "dashboard.json"
UNIT_TESTS = ROOT / "tests" / "deploy" / "rules_test.yaml"
PARTS = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
}


def alerts():
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def dashboard_queries():
    board = json.loads(DASHBOARD.read_text())
    queries = [t["expr"] for panel in board["panels"] for t in panel.get("targets", ())]
    return queries + [
        one["query"]["query"] for one in board["templating"]["list"] if one["type"] == "query"
    ]


@pytest.fixture(scope="module")
def exported(kept_broker):
    """Names of all samples that a node may export."""
    with urllib.request.urlopen(f"{kept_broker.url()}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {f.name + part for f in families for part in PARTS[f.type]}


def metrics_in(query):
    return set(re.findall(r"\bkept_\w+", re.sub(r'"[^"]*"', "", query)))


def test_dashboard_and_alerts_ask_for_metrics_that_exist(exported):
    asked = set().union(*map(metrics_in, dashboard_queries()))
    assert len(asked) > 40
    assert asked <= exported
    watched = set().union(*(metrics_in(alert["expr"]) for alert in alerts()))
    assert len(watched) > 15
    assert watched <= exported


def test_every_alert_has_a_unit_test_that_fires_and_one_that_does_not():
    found = [
        t
        for group in yaml.safe_load(UNIT_TESTS.read_text())["tests"]
        for t in group["alert_rule_test"]
    ]
    fires = {test["alertname"] for test in found if test.get("exp_alerts")}
    quiet = {test["alertname"] for test in found if not test.get("exp_alerts")}
    names = {alert["alert"] for alert in alerts()}
    assert fires == names
    assert quiet == names - {"KeptSlowDisk"}


def test_every_alert_has_a_section_in_the_runbook():
    text = (ROOT / "docs" / "operations.md").read_text()
    sections = dict(re.findall(r"^### (Kept\w+)\n\n(.+?)(?=^##)", text, re.M | re.S))
    assert set(sections) == {alert["alert"] for alert in alerts()}
    for name, section in sections.items():
        parts = re.findall(r"^- \*\*(\w+)\*\*: \S", section, re.M)
        assert parts == ["Meaning", "Check", "Remedy"], name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for alert in alerts():
        page = f"{project['urls']['Homepage']}/blob/main/docs/operations.md"
        assert alert["annotations"]["runbook_url"] == f"{page}#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in ("warning", "critical")


def test_panels_do_not_overlap():
    taken = set()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


@pytest.mark.slow
@pytest.mark.promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", str(RULES)),
        ("test", "rules", str(UNIT_TESTS)),
        ("check", "config", "--syntax-only", str(DEPLOY / "prometheus" / "prometheus.yaml")),
        ("check", "config", "--syntax-only", str(DEPLOY / "prometheus" / "prometheus.secure.yaml")),
    ],
    ids=["rules", "unit tests", "configuration", "configuration with a login"],
)
def test_promtool(arguments):
    done = subprocess.run(
        [judges.promtool(), *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
