"""The files of a git repository, rebuilt by Spark from their history in a topic, and joined live.

    pip install '.[spark]'
    python examples/spark_git_tree.py [--repo PATH] [--if-possible]     (last step of `make demo`)

Starts a node, streams the first-parent history of HEAD into a compacted topic, as git_changelog.py
does, and has `kept spark table` write the latest value of every path to Parquet. Those are compared
with `git ls-tree -r HEAD`, blob by blob. Then a stream of paths is joined with the table: what is
asked for is answered with the size of the file. The last line is `equal`, or names the first
difference; then the exit status is 1.

PySpark is 400 MB, so nothing here installs it: without it, or without Java, `--if-possible` says so
and ends well.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile

from git_changelog import TOPIC, Streaming, compare, create_topic, settings
from git_history import Blobs, Git, Plan, give_up, look_ahead

from kept.client.client import OutRecord
from kept.testing import Cluster

ASKED = "asked-for"
TITLE = "Spark: the tree of HEAD by `kept spark table`, joined with a stream"


def missing() -> str | None:
    """Why this cannot run here; None when it can."""
    if importlib.util.find_spec("pyspark") is None:
        return "PySpark is not installed (pip install '.[spark]', 400 MB)"
    if shutil.which("java") is None:
        return "there is no Java (17 or newer)"
    return None


def rebuild(git: Git, bootstrap: str, directory: str) -> int:
    """Have `kept spark table` write the tree, and compare it with git's; how many files."""
    import pyarrow.parquet

    out = os.path.join(directory, "tree")
    command = [sys.executable, "-P", "-m", "kept", "spark", "--master", "local[2]", "table", TOPIC]
    done = subprocess.run(
        [*command, "--out", out, "--bootstrap", bootstrap],
        capture_output=True,
        check=False,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable},
    )
    if done.returncode:
        give_up(f"kept spark table failed: {done.stderr.decode(errors='replace').strip()}")
    print(f"kept spark table {TOPIC}: {done.stdout.decode().strip()}")
    rows = pyarrow.parquet.read_table(out, columns=["key", "value", "headers"]).to_pylist()
    table = {
        row["key"]: (
            next(h["value"] for h in row["headers"] if h["key"] == "mode").decode(),
            row["value"],
        )
        for row in rows
    }
    compare(git, table)
    return len(table)


def join(bootstrap: str, directory: str, paths: list[bytes]) -> None:
    """Join a stream of paths with the table, and compare what comes out."""
    from kept.pipeline import jobs

    spark = jobs.session("local[2]", {"spark.ui.enabled": "false"}, quiet=True)
    try:
        tree = spark.read.parquet(f"{directory}/tree").selectExpr("key", "length(value) size")
        asked = (
            spark.readStream.format("kept")
            .option("bootstrap", bootstrap)
            .option("subscribe", ASKED)
            .option("startingOffsets", "earliest")
            .load()
        )
        query = (
            asked.select("key")
            .join(tree, "key")
            .writeStream.format("parquet")
            .option("path", f"{directory}/answers")
            .option("checkpointLocation", f"{directory}/checkpoint")
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        answers = spark.read.parquet(f"{directory}/answers").collect()
    finally:
        spark.stop()
    if sorted(bytes(row.key) for row in answers) != sorted(paths):
        give_up(f"different: {len(paths)} paths were asked for, {len(answers)} answered")
    total = sum(row.size for row in answers)
    print(f"a stream asked for {len(paths)} of them: {total} bytes, all answered\nequal")


def run(git: Git, blobs: Blobs, plan: Plan) -> None:
    with Cluster(**settings(plan)) as cluster, tempfile.TemporaryDirectory() as directory:
        create_topic(plan, cluster.bootstrap, 1)
        streaming = Streaming(git, blobs, plan, cluster.bootstrap)
        streaming.run(before=lambda _number: None, stage=lambda _number: None)
        print(f"streamed {plan.changes} changes of files")
        if not rebuild(git, cluster.bootstrap, directory):
            return
        paths = sorted(git.tree())[:10]
        with cluster.client() as client:
            client.create_topic(ASKED, partitions=1)
            client.produce(ASKED, [OutRecord(path, b"size?") for path in paths])
        join(cluster.bootstrap, directory, paths)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--repo", default=".", help="a git repository (default: this directory)")
    parser.add_argument(
        "--if-possible", action="store_true", help="without PySpark or Java say so and end well"
    )
    given = parser.parse_args()
    print(f"\n3. {TITLE}\n")
    why = missing()
    if why is not None:
        if not given.if_possible:
            give_up(why, 2)
        print(f"*** LEFT OUT, NOT RUN: {why} ***")
        return
    git = Git(given.repo)
    head = git.run("rev-parse", "--verify", "-q", "HEAD^{commit}")
    if head is None:
        print("no commits: an empty history makes an empty tree\nequal")
        return
    git.head = head.decode().strip()  # HEAD may move meanwhile
    blobs = Blobs(git)
    try:
        run(git, blobs, look_ahead(git, blobs))
    finally:
        blobs.close()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
