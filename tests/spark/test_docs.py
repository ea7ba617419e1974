"""docs/spark.md and the example do what they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kept.client.client import OutRecord
from tests.spark.topics import has_limits

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(1800)]


def test_the_blocks_of_the_guide_run_in_order(spark, kept_cluster, tmp_path):
    cluster = kept_cluster()
    repository(tmp_path / "repository")
    text = (ROOT / "docs" / "spark.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 11
    names: dict[str, object] = {}
    with cluster.client() as client:
        for topic in ("users", "copy", "users-archive", "users-search", "files", "questions"):
            client.create_topic(topic, partitions=2, config={"cleanup.policy": "compact"})
        client.produce("questions", [OutRecord(b"a", b"ada"), OutRecord(b"gone", b"bob")])
        client.produce("users", [OutRecord(b"ada", b"%d" % n, (), None, 0) for n in range(5)])
        try:
            for block in blocks:
                code = block.replace("localhost:9092", cluster.bootstrap)
                if not has_limits():
                    code = code.replace('    .option("maxOffsetsPerTrigger", "100000")\n', "")
                exec(code.replace("/tmp/", f"{tmp_path}/"), names)
        finally:
            spark.conf.unset("spark.sql.python.filterPushdown.enabled")
        assert names["count"] == 5
        assert [row.offset for row in names["recent"]] == [1, 2, 3, 4]  # type: ignore[attr-defined]
        assert spark.read.parquet(f"{tmp_path}/users").count() == 5
        written = {(r.key, r.value) for r in client.read("users") if r.value is None or r.key}
        assert {(b"ada", b"countess"), (b"bob", None)} <= written
        for topic in ("copy", "users-archive", "users-search"):
            assert len(list(client.read(topic))) == 7
    answered = spark.read.parquet(f"{tmp_path}/answers").collect()
    assert [(r.path, r.who, r.size) for r in answered] == [("a", "ada", 6)]


def repository(path):
    """Three commits: files are added, changed, renamed and deleted."""
    path.mkdir()
    who = ["-c", "user.name=ada", "-c", "user.email=ada@example.org", "-c", "commit.gpgsign=false"]

    def git(*arguments):
        subprocess.run(["git", "-C", path, *who, *arguments], check=True, capture_output=True)

    git("init", "-q")
    for files in ({"a": "1", "gone": "2", "d/b": "3"}, {"a": "second"}, {"d/c": "4"}):
        for name, text in files.items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(text)
        git("add", ".")
        git("commit", "-q", "-m", "a step")
    git("rm", "-q", "gone")
    git("mv", "d/b", "d/moved")
    git("commit", "-q", "-m", "away with it")


def test_the_tree_of_a_repository_is_rebuilt_by_the_command(spark, tmp_path):
    repository(tmp_path / "repository")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("PYTHONSAFEPATH", None)  # of `kept spark`, if it ran in this process
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "spark_git_tree.py"),
            "--repo",
            str(tmp_path / "repository"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    assert "3 files of HEAD against the topic, blob by blob:\nequal\n" in done.stdout
    assert done.stdout.endswith("a stream asked for 3 of them: 8 bytes, all answered\nequal\n")


def test_the_example_ends_with_equal(spark):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "spark_topic.py")],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ada", "countess", "eve", "spy", "equal"]


def test_an_installed_kept_is_found_without_registering(kept_broker, tmp_path):
    site, topic = tmp_path / "site", kept_broker.create_topic()
    with kept_broker.client() as client:
        client.produce(topic, [OutRecord(b"k", b"v")] * 3)
    build = [sys.executable, "-c", "import setuptools; setuptools.setup()", "-q", "build_py"]
    subprocess.run(
        [*build, "--build-lib", str(site)],
        cwd=_copy(tmp_path),
        check=True,
        capture_output=True,
        timeout=900,
    )
    assert (site / "pyspark_kept" / "__init__.py").exists()
    five_lines = f"""
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
import kept
assert kept.__file__.startswith({str(site)!r}), kept.__file__
df = spark.read.format("kept").option("bootstrap", {kept_broker.bootstrap!r})
print("rows", df.option("subscribe", {topic!r}).load().count())
"""
    environ = {**os.environ, "PYTHONPATH": str(site), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [sys.executable, "-c", five_lines],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert "rows 3" in done.stdout, done.stderr


def _copy(directory: Path) -> Path:
    """The tree without what was built in it, so without kernels: their twins will do."""
    unwanted = shutil.ignore_patterns(
        "*.so", "build", ".venv", ".git", "__pycache__", "dist", "*.c"
    )
    return Path(shutil.copytree(ROOT, directory / "tree", ignore=unwanted, symlinks=True))
