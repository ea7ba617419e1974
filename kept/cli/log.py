"""``kept log``: files of a data directory, offline; ours or Apache Kafka's."""

from __future__ import annotations

import click

from kept.cli.shell import Failure, examples, json_option


@click.group(epilog=examples("kept log check data/log"))
def log() -> None:
    """Look at files of a data directory, offline."""


@log.command(
    epilog=examples(
        "kept log dump data/log/users-0/00000000000000000000.log",
        "kept log dump data/log/users-0/*.index data/log/users-0/leader-epoch-checkpoint",
    )
)
@click.argument("files", metavar="FILE …", nargs=-1, required=True, type=click.Path())
def dump(*, files: tuple[str, ...]) -> None:
    """Print what is in FILES: batches and records, index entries, snapshots, checkpoints."""
    import os

    from kept.cli.output import write
    from kept.storage.check import dump_file

    for file in files:
        if len(files) > 1:
            write(f"{file}:\n")
        if os.path.isdir(file):
            raise Failure(f"{file} is a directory; kept log check looks at those")
        if not os.path.exists(file):
            raise Failure(f"{file}: no such file")
        try:
            for line in dump_file(file):
                write(f"{line}\n")
        except ValueError as error:
            raise Failure(str(error)) from error


@log.command(epilog=examples("kept log check data/log", "kept log check data/log/users-0 --json"))
@click.argument("directory", type=click.Path())
@json_option
def check(*, directory: str, as_json: bool) -> None:
    """Check every file under DIRECTORY: a data directory, or one partition's.

    Damage makes the command fail; what an unclean stop leaves and a start repairs is a note.
    """
    from kept.cli.output import show_json, write
    from kept.storage.check import check_directory

    try:
        findings = list(check_directory(directory))
    except (FileNotFoundError, NotADirectoryError):
        raise Failure(f"{directory}: no such directory") from None
    if as_json:
        show_json([one._asdict() for one in findings])
    else:
        for one in findings:
            write(f"{one}\n")
    damaged = sum(one.damaged for one in findings)
    if damaged:
        raise Failure(f"{directory}: {damaged} place{'s'[: damaged != 1]} damaged")
    if not as_json:
        write(f"{directory}: nothing damaged\n")
