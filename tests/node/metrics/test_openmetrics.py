"""``/metrics`` in OpenMetrics, for scrapers that accept it."""

from __future__ import annotations

import re
import subprocess
import time

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from kept.node.metrics.lazy_metrics import MetricsFormat, accepted_format
from tests.tools import judges

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;"
    "escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
OLD_PROMETHEUS = "text/plain;version=0.0.4;q=1,*/*;q=0.1"
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        (PROMETHEUS_2, True),
        (PROMETHEUS_3, True),
        ("application/openmetrics-text", True),
        ('Application/OpenMetrics-Text; version="1.0.0"', True),
        ("text/plain, application/openmetrics-text", True),
        (OLD_PROMETHEUS, False),
        (BROWSER, False),
        ("", False),
        ("*/*", False),
        ("application/openmetrics-text;version=2.0.0,text/plain;q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.9", False),
        ("application/openmetrics-text;q=much", False),
        (";;,=,application/openmetrics-text;;q", True),
    ],
)
def test_a_scraper_gets_what_it_prefers(accept, openmetrics):
    assert (accepted_format(accept) is MetricsFormat.OPENMETRICS) == openmetrics


def scrape(lone, accept=""):
    request = f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\n\r\n"
    status, headers, body = lone.http(request)
    assert status == 200
    return headers["content-type"], body.decode()


def test_both_formats_have_the_same_families(lone):
    _, plain = scrape(lone)
    content_type, text = scrape(lone, PROMETHEUS_3)
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert text.endswith("\n# EOF\n") and text.count("# EOF") == 1
    assert "# EOF" not in plain and "# UNIT" not in plain
    families = {family.name: family for family in parse_openmetrics(text)}
    expected = {family.name: family.type for family in parse_prometheus(plain)}
    assert {name: family.type for name, family in families.items()} == expected
    assert families["kept_fsync_seconds"].unit == "seconds"
    assert families["kept_log_cleaner_cleaned_bytes"].unit == "bytes"
    assert families["kept_connections"].unit == ""
    for family in families.values():
        names = {sample.name for sample in family.samples}
        assert family.type != "counter" or names <= {f"{family.name}_total"}


@pytest.mark.slow
@pytest.mark.promtool
def test_promtool_reads_every_sample(lone_node, tmp_path):
    """Families of more samples than are rendered at a time; awkward labels."""
    lone = lone_node(kept_metrics_partitions="all")
    lone.run(
        lone.node.parts.topics.create(
            "many", num_partitions=120, replication_factor=1, configs={"cleanup.policy": "compact"}
        )
    )
    _, text = scrape(lone, PROMETHEUS_2)
    (sizes,) = (f for f in parse_openmetrics(text) if f.name == "kept_partition_size_bytes")
    assert len(sizes.samples) >= 120
    # promtool reads OpenMetrics where it imports history, so every sample gets a time.
    now = int(time.time())
    timed = re.sub(r"^([^#\n].*)$", rf"\1 {now}", text, flags=re.M)
    (tmp_path / "metrics").write_text(timed)
    judged = subprocess.run(
        [judges.promtool(), "tsdb", "create-blocks-from", "openmetrics", "metrics", "data"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert judged.returncode == 0, judged.stderr
    titles, *blocks = judged.stdout.splitlines()
    column = titles.index("NUM SAMPLES")
    read = sum(int(block[column:].split()[0]) for block in blocks)
    assert read == len(re.findall(r"^[^#\n]", text, re.M))
