"""``kept spark`` where something is missing that it needs, or Ctrl-C comes."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from kept.cli.commands import spark
from kept.cli.shell import Failure
from kept.cli.spark_arguments import INSTALL, check_export, check_needs, check_new, check_report


@pytest.fixture
def refused(monkeypatch, tmp_path):
    """What a command says; all is there but what a test takes away."""
    java = tmp_path / "java" / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.touch(0o755)

    def refused(
        *, missing: tuple[str, ...] = (), version: str = "4.3.0", java_home: Path | None = None
    ) -> str:
        pyspark: Any = ModuleType("pyspark")
        pyspark.__version__ = version
        monkeypatch.setitem(sys.modules, "pyspark", pyspark)
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name: None if name in missing else name
        )
        monkeypatch.setenv("JAVA_HOME", str(java_home or java.parent.parent))
        asked = ["table", "users", "--bootstrap", "localhost:1"]
        error = CliRunner().invoke(spark.spark, asked).exception
        assert error is not None
        return str(error)

    return refused


def test_all_is_there(refused) -> None:
    assert "localhost:1" in refused(), "then the cluster is asked"


@pytest.mark.parametrize("missing", ["pyspark", "pyarrow"])
def test_a_package_that_is_missing_is_named(refused, missing) -> None:
    assert refused(missing=(missing,)) == f"{missing} is not installed: {INSTALL}"


def test_both_are_named(refused) -> None:
    assert refused(missing=("pyspark", "pyarrow")).startswith("pyspark and pyarrow are not")


def test_an_old_pyspark_is_named(refused) -> None:
    assert refused(version="4.0.1") == f"PySpark 4.0.1 is too old: {INSTALL}"
    assert "localhost:1" in refused(version="4.1.0.dev3")


def test_spark_looks_for_java_in_java_home_alone(refused, tmp_path) -> None:
    said = refused(java_home=tmp_path / "nowhere")
    assert said.startswith(f"JAVA_HOME is {tmp_path}/nowhere, and has no bin/java")


def test_no_java(refused, monkeypatch, tmp_path) -> None:
    refused()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Failure, match="no Java: install a JRE 17"):
        check_needs(None, None)


def test_where_a_report_cannot_be_written_nothing_is_read(tmp_path, monkeypatch) -> None:
    check_report(str(tmp_path / "new.html"))
    check_report(os.devnull)
    for wrong in ("", str(tmp_path), str(tmp_path / "nowhere" / "new.html")):
        with pytest.raises(Failure, match="give a file in a directory that is there"):
            check_report(wrong)
    monkeypatch.setattr(os, "access", lambda *_: False)
    asked = ["analyze", "users", "--report", str(tmp_path / "x"), "--bootstrap", "localhost:1"]
    assert "it cannot be written there" in str(CliRunner().invoke(spark.spark, asked).exception)


def test_what_spark_could_not_write_is_refused_before_it_starts(tmp_path, monkeypatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "given-up").mkdir()
    (tmp_path / "given-up" / "_begun").touch()
    for right in ("new", "new/deep", "empty", "file:new"):
        check_new(f"{tmp_path}/{right}", {}, "DIRECTORY")
    check_new(f"file://{tmp_path}/new", {}, "DIRECTORY")
    for wrong, said in (
        ("full", "is there and not empty: give a directory"),
        ("given-up", "is being written, or was given up"),
        ("full/file", "full/file is not a directory"),
        ("full/file/new", "full/file is not a directory"),
    ):
        for path in (f"{tmp_path}/{wrong}", f"file://{tmp_path}/{wrong}"):
            with pytest.raises(Failure, match=said):
                check_new(path, {}, "DIRECTORY")
    with pytest.raises(Failure, match="is there already"):
        check_new(f"{tmp_path}/empty", {}, "--out", may_exist=False)
    check_new(f"hdfs://host{tmp_path}/full", {}, "DIRECTORY")
    check_new(f"{tmp_path}/full", {"spark.hadoop.fs.defaultFS": "hdfs://host"}, "DIRECTORY")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(Failure, match="this user may not write in"):
        check_new(f"{tmp_path}/new", {}, "DIRECTORY")


def test_what_is_no_export_is_refused_before_spark_starts(tmp_path) -> None:
    with pytest.raises(Failure, match="is no export: no such directory"):
        check_export(f"{tmp_path}/none", {})
    with pytest.raises(Failure, match=r"is no export: _kept\.json is not there"):
        check_export(str(tmp_path), {})
    (tmp_path / "_kept.json").touch()
    check_export(str(tmp_path), {})
    check_export("s3a://bucket/none", {})


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "users", "FULL"],
        ["restore", "FULL", "users"],
        ["compact", "FULL", "new"],
        ["table", "users", "--out", "FULL"],
        ["analyze", "users", "--out", "FULL"],
        ["audit", "users", "--reference", "FULL"],
    ],
)
def test_commands_check_their_directories_first(arguments, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(spark, "check_needs", lambda *_: pytest.fail("checked too late"))
    given = [str(tmp_path) if one == "FULL" else one for one in arguments]
    error = CliRunner().invoke(spark.spark, given).exception
    assert isinstance(error, Failure) and str(tmp_path) in str(error)


def test_ctrl_c_waits_until_the_jvm_has_started(capsys) -> None:
    done: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), spark._interrupted_later():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("started")
    assert "still starting" in capsys.readouterr().err
    assert done == ["started"] and signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt), spark._interrupted_later():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        done.append("a second one counts at once")
    assert done == ["started"] and signal.getsignal(signal.SIGINT) is before


def test_the_handler_of_a_session_stays() -> None:
    def of_spark(*_: object) -> None: ...

    before = signal.getsignal(signal.SIGINT)
    try:
        with spark._interrupted_later():
            signal.signal(signal.SIGINT, of_spark)
        assert signal.getsignal(signal.SIGINT) is of_spark
    finally:
        signal.signal(signal.SIGINT, before)


def test_where_ctrl_c_met_py4j_is_not_printed() -> None:
    def record(error: BaseException) -> logging.LogRecord:
        told = (type(error), error, None)
        return logging.LogRecord("root", logging.ERROR, "", 0, "while sending", (), told)

    assert not spark._is_no_interrupt(record(KeyboardInterrupt()))
    of_the_handler = RuntimeError("reentrant call inside <_io.BufferedReader name=8>")
    of_py4j = OSError("Error while sending or receiving")
    of_py4j.__context__ = of_the_handler
    assert not spark._is_no_interrupt(record(of_py4j))
    assert spark._is_no_interrupt(record(ValueError()))


def test_an_error_of_java_is_told_by_what_caused_it() -> None:
    of_py4j = (
        "An error occurred while calling o127.parquet.\n"
        ": org.apache.spark.SparkException: Job aborted.\n\tat org.apache.Some.where(A.scala:1)\n"
        "Caused by: java.io.IOException: cannot make file:/data/x\n\t... 9 more\n"
    )
    assert spark._cause_of(of_py4j) == "Spark: java.io.IOException: cannot make file:/data/x"
    alone = of_py4j.partition("Caused")[0]
    assert spark._cause_of(alone) == "Spark: org.apache.spark.SparkException: Job aborted."
    ours = f"{of_py4j}kept.pipeline.write.task.BadRow: a row for t: no value\n\tat x\n"
    assert spark._cause_of(ours) == "a row for t: no value"
    assert spark._cause_of("[PATH_ALREADY_EXISTS] Path x already exists.\nmore") == (
        "Spark: [PATH_ALREADY_EXISTS] Path x already exists."
    )
