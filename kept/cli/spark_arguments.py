"""What ``kept spark`` is given, and what it needs, checked before Spark is started: that takes
seconds.

Of paths only those are checked that are surely this machine's; of other file systems the job itself
says what is wrong.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import click

from kept.cli.position_syntax import time_ms
from kept.cli.shell import Failure
from kept.storage.types import decimal_number

if TYPE_CHECKING:
    from kept.client.bootstrap import Bootstrap

OLDEST: Final = (4, 1)
"""What Spark asks of Python sources is not in PySpark before."""
INSTALL: Final = "pip install '.[spark]' in a clone of kept brings PySpark 4.1 or newer"
_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_DEFAULT_FILE_SYSTEM: Final = "spark.hadoop.fs.defaultFS"


def _local(path: str, conf: Mapping[str, str]) -> str | None:
    """Where a path of Spark's is on this machine; None if that is another file system's, or if
    settings of Hadoop may say so.
    """
    scheme = _SCHEME.match(path)
    if scheme is not None:
        return re.sub(r"^/{2,}", "/", path[5:]) if scheme[0] == "file:" else None
    elsewhere = _DEFAULT_FILE_SYSTEM in conf or "HADOOP_CONF_DIR" in os.environ
    return None if elsewhere else path


def check_new(path: str, conf: Mapping[str, str], name: str, *, may_exist: bool = True) -> None:
    """Raises Failure where a new directory could not be written: it is not empty (or, unless it
    ``may_exist``, there at all), or cannot be made. ``conf``: the settings of Spark; ``name``: the
    argument's.
    """
    from kept.pipeline.jobs.exports import STATE
    from kept.pipeline.jobs.job_directory import BEGUN

    if not path:
        raise Failure(f"{name}: the name of the directory is empty")
    local = _local(path, conf)
    if local is None:
        return
    place = os.path.abspath(local)
    if os.path.isdir(place):
        names = os.listdir(place)
        if BEGUN in names and STATE not in names:
            raise Failure(f"{path} has an export that is being written, or was given up: delete it")
        if names or not may_exist:
            state = "there and not empty" if names else "there already"
            raise Failure(f"{path} is {state}: give a directory that is not there yet")
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        raise Failure(f"{name} {path}: {place} is not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise Failure(f"{name} {path}: this user may not write in {place}")


def check_export(path: str, conf: Mapping[str, str]) -> None:
    """Raises Failure where there is no export."""
    from kept.pipeline.jobs.exports import STATE

    if not path:
        raise Failure("the name of the directory is empty")
    local = _local(path, conf)
    if local is not None and not os.path.isfile(os.path.join(local, STATE)):
        is_there = os.path.isdir(local)
        why = f"{STATE} is not there (an export ends with it)" if is_there else "no such directory"
        raise Failure(f"{path} is no export: {why}")


def check_report(path: str) -> None:
    """Raises Failure where a page could not be written when all is done."""
    there = os.path.exists(path)
    directory = os.path.dirname(path) or "."
    if not path or os.path.isdir(path) or not os.path.isdir(directory):
        raise Failure(f"--report {path!r}: give a file in a directory that is there")
    if not os.access(path if there else directory, os.W_OK):
        raise Failure(f"--report {path!r}: it cannot be written there")


def parse_offsets(given: str | None) -> int | dict[int, int] | None:
    """An offset of all partitions, or one for each; None for None. A usage error for other text."""
    if given is None:
        return None
    try:
        parsed = json.loads(given)
        if isinstance(parsed, dict):
            return {_whole(p): _whole(o) for p, o in parsed.items()}
        return _whole(parsed)
    except (ValueError, TypeError):
        raise click.UsageError(
            f'{given!r} is neither an offset nor JSON such as {{"0": 10, "1": 12}}'
        ) from None


def _whole(value: object) -> int:
    number = decimal_number(value) if isinstance(value, str) else value
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(value)
    return number


def parse_time(given: str | None) -> int | None:
    """Milliseconds since 1970, None for None. A usage error names other text."""
    try:
        return None if given is None else time_ms(given, time.time_ns() // 1_000_000)
    except ValueError as error:
        raise click.UsageError(f"--as-of-timestamp: {error}") from None


def check_needs(bootstrap: Bootstrap | None, topic: str | None) -> None:
    """Raises Failure at once where Spark, Java, the cluster or the topic is not there."""
    missing = [
        package for package in ("pyspark", "pyarrow") if importlib.util.find_spec(package) is None
    ]
    if missing:
        are = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed"
        raise Failure(f"{are}: {INSTALL}")
    import pyspark

    if _numbers(pyspark.__version__) < OLDEST:
        raise Failure(f"PySpark {pyspark.__version__} is too old: {INSTALL}")
    home = os.environ.get("JAVA_HOME")  # Spark looks nowhere else then
    if home and not os.path.exists(os.path.join(home, "bin", "java")):
        raise Failure(f"JAVA_HOME is {home}, and has no bin/java: unset it, or point it to a JRE")
    if not home and shutil.which("java") is None:
        raise Failure("no Java: install a JRE 17 or newer, or point JAVA_HOME to one")
    if bootstrap is None:
        return
    from kept.pipeline.session import bounds_of, connect

    with connect(bootstrap) as client:
        client.metadata([])
        if topic is not None:
            bounds_of(client, topic)


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
