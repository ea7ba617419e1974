"""``kept spark``: the jobs of :mod:`kept.pipeline.jobs` on the command line.

A command is a Spark driver: it starts a session, or joins the one that ``spark-submit`` made. What
can be refused is refused before that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kept.cli.bootstrap_option import bootstrap_option
from kept.cli.completion import TOPIC
from kept.cli.output import (
    NO_KEY,
    counted,
    echo,
    moment,
    put_bytes,
    show_json,
    show_table,
    size,
    text,
)
from kept.cli.shell import (
    NO_NODE,
    Failure,
    Group,
    Seconds,
    WholeNumber,
    examples,
    json_option,
    pairs,
)
from kept.cli.spark_arguments import (
    check_export,
    check_needs,
    check_new,
    check_report,
    parse_offsets,
    parse_time,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kept.client.bootstrap import Bootstrap
    from kept.pipeline.jobs.audits import Audit

_Function = TypeVar("_Function", bound=Callable[..., Any])

SHOWN: Final = 20
MOST_SHOWN: Final = 100
"""Findings of an audit that are printed; JSON has all that were brought."""
LONGEST_KEY: Final = 80
_OURS: Final = re.compile(r"^(?:kept\.[\w.]+|pyspark_kept[\w.]*): (.+)$", re.MULTILINE)

DIED: Final = "Spark's JVM ended before the job did: it was killed or ran out of memory"
NO_CODE_FROM_HERE: Final = {"spark.executorEnv.PYTHONSAFEPATH": "1"}
"""Spark starts its Python workers with ``-m``: their code is not to come from the directory that
they happen to be in.
"""
_END_S: Final = 1.0
"""How long a JVM that has closed its connections may take to end."""
_CAUSES: Final = re.compile(r"^(?:Caused by)?: ((?:\w+\.)+\w+: .*[^:\s])$", re.MULTILINE)
"""Py4J's first line names a number of its own, the Java errors follow."""


@click.group(
    cls=Group,
    epilog=examples(
        "kept spark table users",
        "kept spark analyze users --report users.html",
        "kept spark audit users",
        "kept spark --master spark://host:7077 export users /data/users-2026-11-21",
    ),
)
@click.option(
    "--master",
    metavar="URL",
    help="Where Spark runs: local[2], spark://host:7077.  [default: spark-submit's, else local[*]]",
)
@click.option("--conf", "conf", metavar="K=V", multiple=True, help="A setting of Spark.")
@click.pass_context
def spark(context: click.Context, *, master: str | None, conf: tuple[str, ...]) -> None:
    """Read topics with Spark: tables, analyses, audits and exports.

    Needs PySpark (the extra `spark`) and Java 17 or newer.
    """
    context.obj = {"master": master, "conf": pairs("--conf", conf)}


def topic_argument(function: _Function) -> _Function:
    """TOPIC."""
    return click.argument("topic", type=TOPIC)(function)


def settings_option(function: _Function) -> _Function:
    """``--config``: another strategy than the topic's."""
    return click.option(
        "--config",
        "config",
        metavar="K=V",
        multiple=True,
        help="A setting in place of the topic's, such as kept.compaction.strategy=latest-n.",
    )(function)


@spark.command(
    epilog=examples(
        "kept spark table users",
        "kept spark table users --as-of-timestamp 2026-11-21T12:00:00Z --out /data/users",
        "kept spark table users --refresh /data/users-table",
    )
)
@topic_argument
@click.option(
    "--as-of-offset",
    metavar="N|JSON",
    help='The table as it was before this offset, or before these: {"0": 10, "1": 12}.',
)
@click.option(
    "--as-of-timestamp",
    metavar="WHEN",
    help="The table as it was then: 2026-11-21T12:00:00Z, -90m, or milliseconds since 1970.",
)
@click.option(
    "--out", metavar="DIR", type=click.Path(), help="Write it to a new directory as Parquet."
)
@click.option(
    "--refresh",
    metavar="DIR",
    type=click.Path(),
    help="Bring the table in this directory up to date.",
)
@click.option(
    "--limit",
    type=WholeNumber(0),
    default=SHOWN,
    show_default=True,
    help="Rows to show; 0 shows all.",
)
@json_option
@bootstrap_option
@click.pass_obj
def table(
    obj: dict[str, Any],
    *,
    topic: str,
    as_of_offset: str | None,
    as_of_timestamp: str | None,
    out: str | None,
    refresh: str | None,
    limit: int,
    as_json: bool,
    bootstrap: Bootstrap,
) -> None:
    """Show or write the latest value of every key of TOPIC."""
    offset, at_ms = parse_offsets(as_of_offset), parse_time(as_of_timestamp)
    if refresh is not None and (out or as_of_offset or as_of_timestamp):
        raise click.UsageError(
            "--refresh excludes --out and --as-of: it updates its own directory to the present"
        )
    if out is not None:
        check_new(out, obj["conf"], "--out", may_exist=False)
    check_needs(bootstrap, topic)
    with _job(obj) as session:
        from dataclasses import asdict

        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        from kept.pipeline import jobs

        if refresh is not None:
            done = asdict(jobs.refresh(session, bootstrap, topic, refresh))
            why = f"all of it: {done['whole']}" if done["whole"] else "only what is new"
            message = f"{counted(done['rows'], 'row')} in {done['path']}, read {why}"
            show_json(done) if as_json else echo(message)
            return
        latest = jobs.table(session, bootstrap, topic, as_of_offset=offset, as_of_ms=at_ms)
        if out is not None:
            written = Observation()
            observed = latest.observe(written, f.count(f.lit(1)).alias("rows"))
            observed.write.mode("errorifexists").parquet(out)
            count = written.get["rows"]
            told = f"{counted(count, 'row')} in {out}"
            show_json({"path": out, "rows": count}) if as_json else echo(told)
            return
        # As a number: Python has no moments after the year 9999, and would make them local time.
        shown = latest.withColumn("timestamp", f.unix_millis("timestamp")).orderBy("key")
        rows = (shown.limit(limit) if limit else shown).collect()
    if as_json:
        show_json({"topic": topic, "rows": [_row(row) for row in rows]})
        return
    cells = [
        (
            text(bytes(r.key), ""),
            text(bytes(r.value), ""),
            r.partition,
            r.offset,
            moment(r.timestamp),
        )
        for r in rows
    ]
    show_table(("key", "value", "partition", "offset", "timestamp"), cells)


@spark.command(
    epilog=examples(
        "kept spark analyze users --report users.html --out /data/users-analysis",
        "kept spark analyze users --config kept.compaction.strategy=latest-n",
    )
)
@topic_argument
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(),
    help="Write every list to a new directory as Parquet.",
)
@click.option(
    "--report", metavar="FILE", type=click.Path(), help="Write one HTML page to read or to send."
)
@click.option(
    "--prefix-until",
    metavar="CHARACTERS",
    default=".",
    show_default=True,
    help="Characters that end the prefix of a key.",
)
@settings_option
@json_option
@bootstrap_option
@click.pass_obj
def analyze(
    obj: dict[str, Any],
    *,
    topic: str,
    out: str | None,
    report: str | None,
    prefix_until: str,
    config: tuple[str, ...],
    as_json: bool,
    bootstrap: Bootstrap,
) -> None:
    """Report what compaction of TOPIC would save, and where."""
    from dataclasses import asdict

    settings = pairs("--config", config)
    if report is not None:
        check_report(report)
    if out is not None:
        check_new(out, obj["conf"], "--out")
    check_needs(bootstrap, topic)
    with _job(obj) as session:
        from kept.pipeline import jobs

        analysis = jobs.analyze(
            session, bootstrap, topic, out=out, prefix_until=prefix_until, config=settings
        )
    if report is not None:
        with open(report, "w", encoding="utf-8") as file:
            file.write(jobs.page(analysis))
    if as_json:
        show_json(_plain({**asdict(analysis), "skew": analysis.skew}))
        return
    total = analysis.totals
    echo(
        f"{counted(total['records'], 'record')} of {counted(total['keys'], 'key')}, "
        f"{size(total['bytes'])}; compaction would leave "
        f"{counted(total['kept_records'], 'record')}, {size(total['kept_bytes'])}; "
        f"{counted(total['tombstones'], 'tombstone')}; skew {analysis.skew:.2f}\n"
    )
    for name, rows in (("partition", analysis.partitions), ("prefix", analysis.prefixes)):
        columns = ("records", "kept_records", "bytes", "kept_bytes", "tombstones", "keys")
        shown = [
            (_cut(_text(str(row[name]).encode())) or "-", *(row[c] for c in columns))
            for row in rows
        ]
        show_table((name, *(c.replace("_", " ") for c in columns)), shown)
        echo()
    hottest = [(_cut(_text(r["key"])), r["records"], r["bytes"]) for r in analysis.hottest[:10]]
    show_table(("hottest key", "records", "bytes"), hottest)


@spark.command(
    epilog=examples("kept spark audit users", "kept spark audit users --reference /data/users-old")
)
@topic_argument
@click.option(
    "--reference", metavar="DIR", type=click.Path(), help="An export of the topic, taken earlier."
)
@click.option(
    "--patience",
    type=Seconds(0, 86_400),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="How long to look again at what was found.",
)
@json_option
@bootstrap_option
@click.pass_obj
def audit(
    obj: dict[str, Any],
    *,
    topic: str,
    reference: str | None,
    patience: float,
    as_json: bool,
    bootstrap: Bootstrap,
) -> int:
    """Compare what must survive in TOPIC with what every replica holds.

    Exit status 1 when something is found.
    """
    if reference is not None:
        check_export(reference, obj["conf"])
    check_needs(bootstrap, topic)
    with _job(obj) as session:
        from kept.pipeline import jobs

        audited = jobs.audit(session, bootstrap, topic, reference=reference, patience_s=patience)
    _show_audit(audited, as_json)
    return 0 if audited.clean else 1


def _show_audit(audited: Audit, as_json: bool) -> None:
    if as_json:
        document = {
            "topic": audited.topic,
            "clean": audited.clean,
            "total": audited.total,
            "counts": audited.counts(),
            "replicas": list(audited.replicas),
            "absent": audited.absent,
            "records": audited.records,
            "looks": audited.looks,
            "reference": audited.reference,
            "findings": [finding._asdict() for finding in audited.findings],
            "cannot_see": audited.blind,
        }
        show_json(_plain(document))
        return
    rows = [
        (
            f.kind,
            f.partition,
            f.offset,
            _cut(_text(f.key)),
            f.replica if f.replica >= 0 else "all",
            f.detail,
        )
        for f in audited.findings[:MOST_SHOWN]
    ]
    if rows:
        show_table(("fault", "partition", "offset", "key", "node", "why"), rows)
    if audited.total > len(rows):
        echo(f"and {audited.total - len(rows)} more")
    nodes = f"node{'s' * (len(audited.replicas) != 1)} {', '.join(map(str, audited.replicas))}"
    verdict = "clean" if audited.clean else counted(audited.total, "fault")
    compared = f"{nodes}{' and the reference' * (audited.reference is not None)} compared"
    echo(f"{audited.topic}: {verdict}; {counted(audited.records, 'record')} of {compared}")
    for partition, replicas in audited.absent.items():
        echo(f"partition {partition}: not in sync and not read: {list(replicas)}")
    echo("This cannot see:")
    for limit in audited.blind:
        echo(f"  - {limit}")


@spark.command(epilog=examples("kept spark export users /data/users-2026-11-21"))
@topic_argument
@click.argument("directory", type=click.Path())
@json_option
@bootstrap_option
@click.pass_obj
def export(
    obj: dict[str, Any], *, topic: str, directory: str, as_json: bool, bootstrap: Bootstrap
) -> None:
    """Write all records of TOPIC to a new DIRECTORY as Parquet."""
    check_new(directory, obj["conf"], "DIRECTORY")
    check_needs(bootstrap, topic)
    with _job(obj) as session:
        from kept.pipeline import jobs

        _show_export(jobs.export(session, bootstrap, topic, directory), as_json)


@spark.command(epilog=examples("kept spark restore /data/users-2026-11-21 users-again"))
@click.argument("directory", type=click.Path())
@topic_argument
@click.option(
    "--replication-factor", type=WholeNumber(1), help="Replicas of a topic that is created."
)
@json_option
@bootstrap_option
@click.pass_obj
def restore(
    obj: dict[str, Any],
    *,
    directory: str,
    topic: str,
    replication_factor: int | None,
    as_json: bool,
    bootstrap: Bootstrap,
) -> None:
    """Write an export to TOPIC, which is new or empty."""
    check_export(directory, obj["conf"])
    check_needs(bootstrap, None)
    with _job(obj) as session:
        from kept.pipeline import jobs

        count = jobs.restore(
            session, bootstrap, directory, topic, replication_factor=replication_factor or -1
        )
    document = {"topic": topic, "records": count}
    show_json(document) if as_json else echo(f"{counted(count, 'record')} in {topic}")


@spark.command(
    epilog=examples(
        "kept spark compact /data/users-2026-11-21 /data/users-compacted",
        "kept spark compact /data/users /data/last --config kept.compaction.strategy=latest-n",
    )
)
@click.argument("directory", type=click.Path())
@click.argument("target", type=click.Path())
@settings_option
@click.option("--below", metavar="JSON", help='The offset to stop at in each partition: {"0": 10}.')
@json_option
@click.pass_obj
def compact(
    obj: dict[str, Any],
    *,
    directory: str,
    target: str,
    config: tuple[str, ...],
    below: str | None,
    as_json: bool,
) -> None:
    """Reduce an export in DIRECTORY to a new TARGET, as the cleaner would."""
    settings = pairs("--config", config)
    limits = parse_offsets(below)
    if isinstance(limits, int):
        raise click.UsageError('--below is JSON such as {"0": 10}')
    check_export(directory, obj["conf"])
    check_new(target, obj["conf"], "TARGET")
    check_needs(None, None)
    with _job(obj) as session:
        from kept.pipeline import jobs

        exported = jobs.compact(session, directory, target, config=settings, below=limits)
        _show_export(exported, as_json)


def _show_export(written: Any, as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        show_json(asdict(written))
        return
    echo(f"{counted(written.records, 'record')} of {written.topic} in {written.path}")


# What they share.


@contextlib.contextmanager
def _job(obj: dict[str, Any]) -> Iterator[SparkSession]:
    """A session for the block; what Spark wraps our errors in is taken off."""
    from py4j.protocol import Py4JError, Py4JJavaError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    from kept.pipeline.session import session

    logging.getLogger().addFilter(_is_no_interrupt)
    created: SparkSession | None = None
    died = False
    try:
        joined = SparkSession.getActiveSession() is not None
        try:
            with _interrupted_later():
                os.environ["PYTHONSAFEPATH"] = "1"  # for workers of a JVM that starts here
                created = session(obj["master"], {**NO_CODE_FROM_HERE, **obj["conf"]}, quiet=True)
            yield created
        except (Py4JError, ConnectionError, EOFError) as error:
            died = (
                created is not None and not isinstance(error, Py4JJavaError) and _has_ended(created)
            )
            if died:
                raise Failure(DIED) from error
            raise
        finally:
            if created is not None and not joined and not died:
                created.stop()
    except (PySparkException, Py4JError) as error:
        if os.environ.get("KEPT_TRACEBACK"):
            raise
        cause = _cause_of(str(error))
        hint = NO_NODE if cause.endswith("connection refused") else ""  # Spark keeps no types
        raise Failure(cause + hint) from error


@contextlib.contextmanager
def _interrupted_later() -> Iterator[None]:
    """Ctrl-C while the block runs counts when it has ended, a second one at once: a JVM that is
    left alone while it starts prints where it was.
    """
    pressed = False

    def later(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        echo(
            "kept: Spark is still starting and is stopped then; Ctrl-C again stops it at once",
            err=True,
        )

    before = signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is later:  # a session has a handler of its own
            signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _has_ended(made: SparkSession) -> bool:
    """Whether the session's JVM is a process of ours that is no more."""
    process = getattr(made.sparkContext._gateway, "proc", None)
    if process is None:
        return False
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    """Py4J prints where Ctrl-C met it, which is nothing to a user: also where Spark's own handler
    asks for the jobs' end over the connection that waits for one.
    """
    error = record.exc_info[1] if record.exc_info else None
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or "reentrant call" in str(error):
            return False
        error = error.__context__
    return True


def _cause_of(message: str) -> str:
    """Our own words in an error of Spark's, else its first line; of Java's, what caused it."""
    ours = _OURS.findall(message)
    if ours:
        return str(ours[-1])
    causes = _CAUSES.findall(message) if message.startswith("An error occurred while") else ()
    if causes:
        return f"Spark: {causes[-1]}"
    return "Spark: " + next((line for line in message.splitlines() if line.strip()), message)


def _row(row: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    put_bytes(fields, "key", bytes(row.key))
    put_bytes(fields, "value", bytes(row.value))
    fields |= {"partition": row.partition, "offset": row.offset, "timestamp": row.timestamp}
    return fields


def _text(key: bytes | None) -> str:
    return text(key, NO_KEY)


def _cut(key: str) -> str:
    """As much of a key as fits a table; JSON has all of it."""
    return key if len(key) <= LONGEST_KEY else f"{key[:LONGEST_KEY]}… ({len(key):,} characters)"


def _plain(value: Any) -> Any:
    """Bytes in nested data as text, for JSON."""
    if isinstance(value, dict):
        return {str(n): _plain(v) for n, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return _text(value) if isinstance(value, bytes) else value
