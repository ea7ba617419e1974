"""``kept log``: files of a data directory, offline; ours or Apache Kafka's."""

from __future__ import annotations

import os

import click

from kept.cli.log_check import check as check_files
from kept.cli.log_dump import as_object
from kept.cli.log_dump import dump as entries
from kept.cli.output import counted, json_line, show_json, write
from kept.cli.shell import Failure, Group, examples, for_each, json_option
from kept.storage.inspect.findings import Finding


@click.group(cls=Group, epilog=examples("kept log check data"))
def log() -> None:
    """Inspect files of a data directory, offline."""


@log.command(
    epilog=examples(
        "kept log dump data/log/users-0/00000000000000000000.log",
        "kept log dump data/log/users-0/*.index data/log/users-0/leader-epoch-checkpoint",
        "kept log dump data/log/users-0/manifest-* data/meta/metadata.wal",
        "kept log dump data/log/users-0/*.log --json | jq 'select(.kind == \"record\").key'",
    )
)
@click.argument("files", metavar="FILE …", nargs=-1, required=True, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def dump(*, files: tuple[str, ...], as_json: bool) -> int:
    """Print what is in FILES of a data directory.

    Batches and records (of __transaction_state decoded), indexes, snapshots, checkpoints, as
    Kafka's DumpLogSegments prints them; manifests and removals of compaction; the metadata log and
    its snapshots. Damage is printed where it is, and makes the command fail.
    """

    def dump_file(file: str) -> None:
        if os.path.isdir(file):
            raise Failure(f"{file} is a directory: kept log check checks directories")
        if not os.path.exists(file):
            raise Failure(f"{file}: no such file")
        if not as_json:
            write(f"Dumping {file}\n")
        damaged = 0
        try:
            for entry in entries(file):
                damaged += entry.kind == "damage"
                write(json_line(as_object(file, entry)) if as_json else f"{entry.line}\n")
        except ValueError as error:
            raise Failure(str(error)) from error
        if damaged:
            raise Failure(f"{counted(damaged, 'place')} damaged")

    return for_each(files, dump_file)


@log.command(
    epilog=examples(
        "kept log check data", "kept log check data/log/users-0 --json", "kept log check /disk*"
    )
)
@click.argument("directories", metavar="DIRECTORY …", nargs=-1, required=True, type=click.Path())
@json_option
def check(*, directories: tuple[str, ...], as_json: bool) -> int:
    """Check every file under DIRECTORY: a data directory, or one partition's.

    A data directory is what --data-dir names, with its logs and its metadata, or one entry of
    log.dirs, or metadata.log.dir. Damage makes the command fail. What a crash leaves, and the next
    start repairs, is a note.
    """
    all_findings: list[Finding] = []

    def check_one(directory: str) -> str | None:
        try:
            findings = check_files(directory)
        except (FileNotFoundError, NotADirectoryError):
            raise Failure(f"{directory}: no such directory") from None
        all_findings.extend(findings)
        for finding in () if as_json else findings:
            write(f"{finding}\n")
        damaged = sum(finding.damaged for finding in findings)
        if damaged:
            raise Failure(f"{directory}: {counted(damaged, 'place')} damaged")
        return None if as_json else f"{directory}: nothing damaged"

    try:
        return for_each(directories, check_one)
    finally:
        if as_json:
            show_json([finding._asdict() for finding in all_findings])
