"""A pass that the check finds wrong: nothing changes, and somebody has to say retry."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kept.node.compaction import cleaner
from kept.node.replicas.manifests.errors import PassFailed
from tests.support.cleaned_logs import TP, clean, filled, newest

# Every key is lost, also those of segments that stay as they are: whichever are drawn.
BROKEN = """
import sys
from kept.compaction.cleaner import cleaner_run, worker
real = cleaner_run.survey
def survey(*args, **kwargs):
    found = real(*args, **kwargs)
    for group in found.groups:
        group.output.survivors.clear()
        group.changed = True
    return found
cleaner_run.survey = survey
sys.exit(worker.main())
"""
FOR_EVER_MS = 1 << 60


def files(hosted):
    directory = Path(hosted.partition.log.directory)
    return {path.name: path.stat().st_size for path in directory.glob("*.log*")}


def status(lone):
    return lone.node.parts.admin.compaction_view.status_of(TP)


def test_the_log_stays_as_it_was_until_somebody_says_retry(lone_node, monkeypatch):
    lone = lone_node(log_cleaner_enable="false")
    hosted = filled(lone)
    expected = newest(hosted)
    monkeypatch.setattr(cleaner, "COMMAND", (sys.executable, "-c", BROKEN))
    with pytest.raises(PassFailed, match="must survive") as caught:
        clean(lone)
    assert caught.value.kind == "CheckFailed"
    left = files(hosted)
    assert not any(name.endswith((".swap", ".deleted")) for name in left)
    _, _, body = lone.http("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"\nkept_log_cleaner_checks_failed_total 1" in body
    assert newest(hosted) == expected and hosted.compaction is None
    said = status(lone)
    assert (said.state, said.retry_at_ms) == ("uncleanable", None)
    assert said.reason.startswith("t:0: check of generation 0.1: key 'k")
    (listed,) = lone.node.parts.admin.cleaner_view.describe().uncleanable
    assert (listed.reason, listed.retry_at_ms) == (said.reason, -1), "no far date"
    assert not lone.node.parts.cleaner.started.failures.may_try(TP, FOR_EVER_MS)
    monkeypatch.undo()
    assert lone.node.parts.cleaner.started.retry(TP)
    assert lone.node.parts.cleaner.started.failures.may_try(TP, 0)
    assert clean(lone).keys_checked == 3
    assert newest(hosted) == expected
    assert status(lone).state != "uncleanable"
