"""What ``kept log dump`` prints of a file, whichever part of the house wrote it.

Segments, indexes, snapshots and checkpoints are :mod:`kept.storage.inspect.dump`'s, the metadata
log and its snapshots :mod:`kept.cluster.metadata.dump`'s; manifests and removal journals of
compaction are told here: what survived of each segment, and how much went for which reason. Records
of ``__transaction_state`` are told as ``DumpLogSegments --transaction-log-decoder`` does.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any, Final

from kept.cli.output import moment, put_bytes
from kept.cluster.metadata.dump import dump_metadata, is_metadata_file
from kept.compaction.cleaner import removal_log
from kept.compaction.manifest import manifest as manifests
from kept.compaction.manifest.apply import read_mark
from kept.node.coordinator.transactions import records as transactions
from kept.node.metadata.internal_topics import TRANSACTION_STATE
from kept.storage.disk import Disk
from kept.storage.errors import CorruptMessage, DamagedData
from kept.storage.inspect.dump import Decoder, Entry, damage, entries
from kept.storage.types import NO_PRODUCER_ID

_MANIFEST: Final = re.compile(r"manifest-\d+-\d+|held-manifest|told-manifest")
_APPLIED: Final = "manifest-applied"
_REMOVALS: Final = re.compile(r"removals(?:-\d+){2,3}")


def is_of_compaction(name: str) -> bool:
    """Whether a file in a partition's directory says what compaction did there."""
    return bool(_MANIFEST.fullmatch(name) or _REMOVALS.fullmatch(name) or name == _APPLIED)


def dump(path: str) -> Iterator[Entry]:
    """What is in a file of a data directory; damage is an entry that says where.

    Raises FileNotFoundError, MachineError, DirectoryRefused for a newer version; ValueError for a
    file that is none of them.
    """
    name = path.rpartition("/")[2]
    try:
        if _MANIFEST.fullmatch(name):
            yield from _manifest(path)
        elif _REMOVALS.fullmatch(name):
            yield from _removals(path)
        elif name == _APPLIED:
            yield _applied(path)
        elif _is_metadata(path):
            yield from _metadata(path)
        else:
            yield from entries(path, decoder=_decoder(path))
    except DamagedData as error:
        yield damage(error)


def _decoder(path: str) -> Decoder | None:
    """How to read the records of a file, by the name of its directory."""
    directory = os.path.basename(os.path.dirname(os.path.abspath(path)))
    return _transaction if directory.rpartition("-")[0] == TRANSACTION_STATE else None


def _transaction(
    offset: int, key: bytes | None, value: bytes | None
) -> tuple[str, str | None, dict[str, Any]]:
    """A record of ``__transaction_state``. The last epoch, which Kafka does not know, is among the
    values only.
    """
    if key is None:
        raise CorruptMessage(f"the record at offset {offset} has no key")
    record = transactions.decode_record(key, value)
    if record is None:
        kind = int.from_bytes(key[:2], "big", signed=True)
        return f"Unknown record type {kind} at offset {offset}, skipping.", None, {}
    values: dict[str, Any] = {"transactional_id": record.transactional_id}
    name = _json("0", {"transactionalId": record.transactional_id})
    held = record.metadata
    if held is None:
        return name, "<DELETE>", {**values, "transaction": None}
    topics = None
    if held.state is not transactions.TransactionState.EMPTY:
        topics = [
            {"topic": topic, "partitionIds": numbers}
            for topic, numbers in transactions.partitions_by_topic(held.partitions)
        ]
    data: dict[str, Any] = {"producerId": held.producer_id}
    if held.previous_producer_id != NO_PRODUCER_ID:
        data["previousProducerId"] = held.previous_producer_id
    if held.next_producer_id != NO_PRODUCER_ID:
        data["nextProducerId"] = held.next_producer_id
    data |= {
        "producerEpoch": held.epoch,
        "transactionTimeoutMs": held.timeout_ms,
        "transactionStatus": int(held.state),
        "transactionPartitions": topics,
        "transactionLastUpdateTimestampMs": held.last_update_ms,
        "transactionStartTimestampMs": held.start_ms,
    }
    if held.client_version:
        data["clientTransactionVersion"] = held.client_version
    values["transaction"] = {
        **data,
        "state": held.state.kafka_name,
        "lastEpoch": held.last_epoch,
    }
    return name, _json(str(record.version), data), values


def _json(version_or_type: str, data: dict[str, Any]) -> str:
    named = {"type" if "transactionalId" in data else "version": version_or_type, "data": data}
    return json.dumps(named, ensure_ascii=False, separators=(",", ":"))


def as_object(file: str, entry: Entry) -> dict[str, Any]:
    """An entry as ``--json`` prints it: bytes as text, or as base64 where they are none."""
    out: dict[str, Any] = {"file": file, "kind": entry.kind}
    for name, value in entry.values.items():
        if name in ("key", "value") and not isinstance(value, str):
            put_bytes(out, name, value)
        elif name == "headers":
            out[name] = []
            for header, content in value:
                record: dict[str, Any] = {"key": header}
                put_bytes(record, "value", content)
                out[name].append(record)
        else:
            out[name] = value
    return out


def _is_metadata(path: str) -> bool:
    return is_metadata_file(path)


def _metadata(path: str) -> Iterator[Entry]:
    for line in dump_metadata(path):
        yield Entry("metadata", {"text": line.strip()}, line)


def _read(path: str) -> bytes:
    with open(path, "rb") as source:
        return source.read()


def _manifest(path: str) -> Iterator[Entry]:
    manifest, plan = manifests.decode(path, _read(path))
    values = {
        "topic_id": str(manifest.topic_id),
        "partition": manifest.partition,
        "identity": str(manifest.generation),
        "log_start_offset": manifest.log_start_offset,
        "clean_to": manifest.clean_to,
        "end_offset": manifest.end_offset,
        "decided_ms": manifest.now_ms,
        "delete_horizon_ms": manifest.horizon_ms,
        "segments": len(manifest.segments),
    }
    yield Entry(
        "manifest",
        values,
        f"manifest {manifest.generation} of partition {manifest.partition} of topic id "
        f"{manifest.topic_id}: logStartOffset: {manifest.log_start_offset} cleanTo: "
        f"{manifest.clean_to} endOffset: {manifest.end_offset} decided: {moment(manifest.now_ms)} "
        f"deleteHorizon: {moment(manifest.horizon_ms) or '-'}",
    )
    for segment in manifest.segments:
        values = {
            "base_offset": segment.base_offset,
            "end_offset": segment.end_offset,
            "survivors": len(segment.survivors),
            "empty_batches": len(segment.empties),
            "horizons": {str(ms): len(held) for ms, held in sorted(segment.horizons.items())},
            "aborted": len(segment.aborted),
            "size_bytes": None if segment.size_bytes < 0 else segment.size_bytes,
            "digest": segment.digest.hex(),
        }
        yield Entry(
            "manifest segment",
            values,
            f"| baseOffset: {segment.base_offset} endOffset: {segment.end_offset} survivors: "
            f"{len(segment.survivors)} emptyBatches: {len(segment.empties)} batchesWithHorizon: "
            f"{sum(map(len, segment.horizons.values()))} abortedTransactions: "
            f"{len(segment.aborted)} size: {segment.size_bytes} digest: "
            f"{segment.digest.hex() or '-'}",
        )
    for group in plan.groups:
        values = {"inputs": list(group.input_bases), "outputs": list(group.output_bases)}
        yield Entry("swap", values, f"| swap: {values['inputs']} became {values['outputs']}")


def _applied(path: str) -> Entry:
    identity = str(read_mark(path.rpartition("/")[0] or ".", Disk({})))
    return Entry("applied", {"identity": identity}, f"applied: manifest {identity}")


def _removals(path: str) -> Iterator[Entry]:
    removals = removal_log.decode(path, _read(path))
    values = {"identity": str(removals.generation), "decided_ms": removals.now_ms}
    line = f"removals of generation {removals.generation}, decided {moment(removals.now_ms)}"
    yield Entry("removals", values, line)
    for reason, parts in removals.reasons.items():
        for base, bitmap in parts:
            values = {"reason": reason.value, "base_offset": base, "records": len(bitmap)}
            line = f"| baseOffset: {base} {reason.value}: {len(bitmap)}"
            yield Entry("removed", values, line)
