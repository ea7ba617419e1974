"""The command line that does the same as an action of the console, quoted for a POSIX shell."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

if TYPE_CHECKING:
    from kept.node.admin.records.partition_records import NewRecord

YEAR_10000_MS: Final = 253_402_300_800_000


class CommandLines(Struct, frozen=True):
    """Command lines for the cluster at ``bootstrap`` (HOST:PORT). Each names it: a context or a
    variable at whoever runs one may name another cluster.
    """

    bootstrap: str

    def command(
        self,
        *words: str,
        name: str,
        options: Iterable[tuple[str, str | int | None]] = (),
        flags: Iterable[str] = (),
    ) -> str:
        """``kept WORDS… NAME OPTIONS…``; options without a value are left out. A name or a value
        that begins with a dash is not taken for an option.
        """
        parts = ["kept", *words]
        dashed = name.startswith("-")
        if not dashed:
            parts.append(name)
        for option, value in options:
            if value is not None:
                text = str(value)
                parts += [f"{option}={text}"] if text.startswith("-") else [option, text]
        parts += flags
        parts += ["--bootstrap", self.bootstrap]
        return shlex.join([*parts, "--", name] if dashed else parts)

    def create_topic(
        self,
        topic: str,
        partitions: int | None,
        replication_factor: int | None,
        config: Mapping[str, str],
    ) -> str:
        """``kept topic create``."""
        options = [("--partitions", partitions), ("--replication-factor", replication_factor)]
        return self.command("topic", "create", name=topic, options=[*options, *_settings(config)])

    def alter_topic(
        self,
        topic: str,
        partitions: int | None,
        changes: Mapping[str, str],
        delete: Sequence[str],
    ) -> str:
        """``kept topic alter``."""
        options: list[tuple[str, str | int | None]] = [*_settings(changes)]
        options += [("--delete-config", setting) for setting in delete]
        options.append(("--partitions", partitions))
        return self.command("topic", "alter", name=topic, options=options)

    def delete_topic(self, topic: str) -> str:
        """``kept topic delete``."""
        return self.command("topic", "delete", name=topic)

    def alter_broker(
        self, broker: int | None, changes: Mapping[str, str], delete: Sequence[str]
    ) -> str:
        """``kept broker config set`` and ``delete``, the second if the first was done."""
        target = "default" if broker is None else str(broker)
        commands = []
        if changes or not delete:
            options = _settings(changes)
            commands.append(self.command("broker", "config", "set", name=target, options=options))
        if delete:
            names = [("--name", name) for name in delete]
            commands.append(self.command("broker", "config", "delete", name=target, options=names))
        return " && ".join(commands)

    def reset_offsets(
        self, group: str, topic: str, partition: int | None, to: str, dry_run: bool
    ) -> str:
        """``kept group reset-offsets``."""
        place = topic if partition is None else f"{topic}:{partition}"
        options = [("--topic", place), ("--to", to)]
        flags = ["--dry-run"] if dry_run else []
        return self.command("group", "reset-offsets", name=group, options=options, flags=flags)

    def produce(
        self, topic: str, partition: int | None, record: NewRecord, *, timestamp: bool
    ) -> str:
        """``kept produce --json`` with the record as its line: bytes that are no text as base64."""
        line: dict[str, Any] = {**_text_or_base64("key", record.key)}
        line |= _text_or_base64("value", record.value)
        if record.headers:
            line["headers"] = [
                {"key": name, **_text_or_base64("value", value)} for name, value in record.headers
            ]
        if timestamp:
            line["timestamp"] = record.timestamp
        if partition is not None:
            line["partition"] = partition
        given = shlex.join(["printf", "%s\\n", json.dumps(line, ensure_ascii=False)])
        return f"{given} | {self.command('produce', '--json', name=topic)}"


def moment(at_ms: int) -> str:
    """A time as ``--to`` takes it: ISO 8601 in UTC; as milliseconds after the year 9999, which
    ISO 8601 does not have.
    """
    if at_ms >= YEAR_10000_MS:
        return f"@{at_ms}"
    at = datetime.fromtimestamp(at_ms // 1000, UTC).replace(microsecond=at_ms % 1000 * 1000)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text_or_base64(name: str, data: bytes | None) -> dict[str, str | None]:
    if data is None:
        return {name: None}
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}
    return {name: text}


def _settings(config: Mapping[str, str]) -> list[tuple[str, str | int | None]]:
    return [("--config", f"{name}={value}") for name, value in config.items()]
