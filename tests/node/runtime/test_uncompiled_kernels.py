"""A node that lacks compiled kernels, or whose workers do, says so everywhere it is looked for."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from kept import kernels
from kept.compaction.cleaner.worker import COMMAND
from kept.node.compaction import cleaner
from kept.node.replicas.manifests.errors import PassFailed
from kept.node.runtime.uncompiled_kernels import Kernels
from kept.storage.errors import ConfigurationError
from tests.support.cleaned_logs import TP, clean, filled
from tests.tools.needs import need

FEW = ("compaction.kernels._kernel", "node.kafka.codec._codec")


def lacks(monkeypatch, *names):
    """This process cannot load these kernels, though their files are there."""
    real = importlib.import_module

    def without(module):
        if module.removeprefix(kernels.PACKAGE) in names:
            raise ImportError(f"{module}: undefined symbol")
        return real(module)

    monkeypatch.setattr(kernels, "import_module", without)


def test_every_extension_module_is_known():
    import tomllib
    from pathlib import Path

    root = Path(__file__).resolve().parents[3]
    built = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    names = [module["name"] for module in built["ext-modules"]]
    assert sorted(names) == sorted(kernels.PACKAGE + name for name in kernels.NAMES)


def test_the_environment_chooses_the_fallbacks(monkeypatch):
    need("kernels")
    monkeypatch.setenv("KEPT_KERNEL", "python")
    assert kernels.uncompiled() == kernels.uncompiled(load=True) == kernels.FALLBACKS
    assert set(kernels.FALLBACKS) < set(kernels.NAMES)


def test_what_has_no_fallback_says_what_would_be_right(monkeypatch):
    lacks(monkeypatch, "compaction.kernels._kernel")
    offset_map = kernels.load("compaction.kernels._kernel", "OffsetMap")
    with pytest.raises(ConfigurationError, match=r"OffsetMap needs the compiled kernel kept\.comp"):
        offset_map(10, 0.9, b"")


ABSENT = """
import sys
from kept import kernels

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.removeprefix(kernels.PACKAGE) in kernels.NAMES:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
"""


def run_uncompiled(code, question=""):
    """Run code in a process in which no kernel can be imported."""
    command = [sys.executable, "-P", "-c", ABSENT + code]
    return subprocess.run(command, input=question, capture_output=True, text=True, check=False)


def test_without_any_kernel_records_are_checked_and_read_and_nodes_can_be_imported():
    done = run_uncompiled(
        "from kept.storage import records\n"
        "import kept.node.parts, kept.node.compaction.cleaner, kept.compaction.cleaner.survey\n"
        "batch = records.build_batch([(1, b'k', b'v', ())])\n"
        "print(records.KERNEL, records.check(batch, records.CheckRules(), 1).record_count)\n"
        "print(records.read_block(batch, 0, 0, 1, records.Field.KEY).rows)"
    )
    assert done.stdout.split() == ["python", "1", "1"], done.stderr


def test_a_log_whose_worker_has_no_kernels_says_so_and_stays_as_it_is(lone_node, monkeypatch):
    lone = lone_node(log_cleaner_enable="false")
    hosted = filled(lone)
    code = ABSENT + "from kept.compaction.cleaner import worker\nsys.exit(worker.main())"
    monkeypatch.setattr(cleaner, "COMMAND", (sys.executable, "-P", "-c", code))
    with pytest.raises(PassFailed, match="needs the compiled kernel"):
        clean(lone)
    assert "compaction.kernels._kernel" in lone.node.parts.kernels.uncompiled
    assert "needs the compiled kernel" in lone.node.parts.cleaner.started.status(TP).failure.reason
    assert hosted.compaction is None and len(hosted.partition.log.segments) > 3


def test_a_kernel_that_is_not_there_is_named(monkeypatch):
    monkeypatch.delenv("KEPT_KERNEL", raising=False)
    absent = "storage.records._no_such_kernel"
    for load in (False, True):
        assert kernels.uncompiled((absent,), load=load) == (absent,)
        assert kernels.uncompiled(("storage.records.header",), load=load) == ()


def test_a_kernel_that_does_not_load_is_named(monkeypatch):
    monkeypatch.delenv("KEPT_KERNEL", raising=False)
    need("kernels")
    lacks(monkeypatch, "compaction.kernels._kernel")
    assert "compaction.kernels._kernel" in kernels.uncompiled(load=True)


def test_the_log_names_them_once(monkeypatch, capsys):
    monkeypatch.delenv("KEPT_KERNEL", raising=False)
    found = Kernels()
    found.uncompiled = ()
    found.warn()
    assert capsys.readouterr().err == ""
    found.uncompiled = FEW[:1]
    found.warn()
    said = capsys.readouterr().err
    assert "level=warning" in said and "uncompiled=compaction.kernels._kernel" in said
    assert 'level=error event="no log is compacted here"' in said
    found.uncompiled = FEW[1:]
    found.warn()
    assert "level=error" not in capsys.readouterr().err
    found.uncompiled = FEW[:1]
    for _ in range(2):
        found.worker_lacks(FEW)
    (line,) = capsys.readouterr().err.splitlines()
    assert "worker" in line and "uncompiled=node.kafka.codec._codec" in line
    assert found.uncompiled == FEW


def test_a_worker_that_lacks_what_its_node_has_is_shown(lone_node, monkeypatch, capfd):
    lone = lone_node(log_cleaner_enable="false")
    lone.node.parts.kernels.uncompiled = ()
    filled(lone)
    assert told(lone) == ([], 0)
    slow = ("/usr/bin/env", "KEPT_KERNEL=python", *COMMAND)
    monkeypatch.setattr(cleaner, "COMMAND", slow)
    clean(lone)
    assert told(lone) == (list(kernels.FALLBACKS), len(kernels.FALLBACKS))
    assert "slow Python kernels in the cleaner's worker" in capfd.readouterr().err


def told(lone):
    """What the API lists, and what the metric counts."""
    _, _, body = lone.http("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    (line,) = (one for one in body.splitlines() if one.startswith(b"kept_uncompiled_kernels "))
    (build,) = (one for one in body.splitlines() if one.startswith(b"kept_build_info"))
    kernel = b'kernel="python"' if lone.node.parts.kernels.uncompiled else b'kernel="cython"'
    assert kernel in build
    return lone.get("/api/v1/cleaner")["uncompiled_kernels"], int(float(line.split()[-1]))
