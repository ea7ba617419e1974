"""Offline: the content of a file, in the words of Apache Kafka's DumpLogSegments.

``kept log dump``: ``.log`` with its records, ``.index``, ``.timeindex``, ``.txnindex``,
``.snapshot`` and the text checkpoints, ours or Apache Kafka's. Each entry is a line as
DumpLogSegments prints it, and the same as named values. Damage is a last entry that says where and
what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from kept.storage import checkpoints, layout
from kept.storage.disk import Disk
from kept.storage.errors import CorruptMessage, DamagedData, InvalidRecord
from kept.storage.inspect.check import INFLATE_LIMIT_BYTES, batches
from kept.storage.producers import snapshots
from kept.storage.records import BatchHeader, records, scan
from kept.storage.segments import offset_index, time_index, txn_index
from kept.storage.types import TimestampType

_MARKERS = {0: "ABORT", 1: "COMMIT"}
_TEXTS = (
    layout.RECOVERY_POINTS,
    layout.HIGH_WATERMARKS,
    layout.LOG_STARTS,
    layout.CLEANER_OFFSETS,
    layout.LEADER_EPOCHS,
)
PROPERTIES: Final = (layout.META_PROPERTIES, "log-directories", "owner")
"""The last two are beside the metadata: the directories that a node knows, and whose they are."""
_TIMESTAMP_TYPES: Final = {
    TimestampType.CREATE_TIME: "CreateTime",
    TimestampType.LOG_APPEND_TIME: "LogAppendTime",
}
"""As DumpLogSegments writes them."""


class Entry(NamedTuple):
    """One thing in a file: what kind it is, its values (keys and values are bytes), its line."""

    kind: str
    values: Mapping[str, Any]
    line: str


Decoder = Callable[[int, "bytes | None", "bytes | None"], tuple[str, str | None, dict[str, Any]]]
"""What a record of an internal topic says, by offset, key and value: key and payload as they are
printed (a payload of None is not), and values of the entry beside the record's own. Raises
CorruptMessage.
"""


def damage(error: DamagedData) -> Entry:
    """The entry that says where a file is damaged."""
    values = {
        "path": error.path,
        "position": error.position,
        "offset": error.offset,
        "why": error.why,
    }
    return Entry("damage", values, f"DAMAGED: {error}")


def entries(
    path: str,
    disk: Disk | None = None,
    *,
    decoder: Decoder | None = None,
) -> Iterator[Entry]:
    """What is in a file. Raises FileNotFoundError, MachineError; ValueError for other files.

    ``decoder``: of the records, where they are not text.
    """
    disk = disk or Disk({})
    name = path.rpartition("/")[2]
    parsed = layout.parse_segment_file(name)
    try:
        if parsed is not None and parsed.kind == layout.LOG:
            yield from _log(disk, path, parsed.base_offset, decoder)
        elif parsed is not None:
            yield from _small(disk, path, parsed)
        elif name in _TEXTS:
            for fields in checkpoints.parse_checkpoint(path, disk.read(path)):
                yield _checkpoint(name, fields)
        elif name == layout.PARTITION_METADATA:
            topic_id = checkpoints.read_partition_metadata(disk, path)
            yield Entry("topic", {"topic_id": str(topic_id)}, f"topic_id: {topic_id}")
        elif name in PROPERTIES:
            for key, value in sorted((checkpoints.read_properties(disk, path) or {}).items()):
                yield Entry("property", {"name": key, "value": value}, f"{key}={value}")
        elif name == layout.CLEAN_SHUTDOWN:
            epoch = checkpoints.read_clean_shutdown(disk, path)
            yield Entry("clean stop", {"broker_epoch": epoch}, f"clean stop, brokerEpoch: {epoch}")
        else:
            raise ValueError(
                f"{path}: not a file of a data directory; expected *.log, *.index, *.timeindex, "
                "*.txnindex, *.snapshot, a checkpoint, partition.metadata, meta.properties, "
                "manifest-*, removals-*, or of the metadata metadata.wal, snapshot-*, hard-state, "
                "identity, replica-history, log-directories or owner"
            )
    except DamagedData as error:
        yield damage(error)


def _checkpoint(name: str, fields: list[str]) -> Entry:
    if name == layout.LEADER_EPOCHS:
        values: dict[str, Any] = {"leader_epoch": int(fields[0]), "start_offset": int(fields[1])}
    else:
        topic, partition, offset = fields
        values = {"topic": topic, "partition": int(partition), "offset": int(offset)}
    return Entry("checkpoint", values, " ".join(fields))


def _log(disk: Disk, path: str, base_offset: int, decoder: Decoder | None) -> Iterator[Entry]:
    yield Entry("log", {"base_offset": base_offset}, f"Log starting offset: {base_offset}")
    for position, header, data in batches(disk, path):
        try:
            yield Entry("batch", _batch_values(header, position), batch_line(header, position))
            if not header.record_count:
                continue
            if header.is_control:
                yield from _control(header, data)
            else:
                yield from _records(header, data, decoder)
        except (InvalidRecord, CorruptMessage) as error:
            yield damage(DamagedData(path, position, header.base_offset, str(error)))


def _batch_values(header: BatchHeader, position: int) -> dict[str, Any]:
    return {
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "count": header.record_count,
        "base_sequence": header.base_sequence,
        "last_sequence": header.last_sequence,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "partition_leader_epoch": header.partition_leader_epoch,
        "is_transactional": header.is_transactional,
        "is_control": header.is_control,
        "delete_horizon_ms": header.delete_horizon_ms if header.has_delete_horizon else None,
        "position": position,
        "timestamp_type": _TIMESTAMP_TYPES[header.timestamp_type],
        "max_timestamp": header.max_timestamp,
        "size_bytes": header.size_bytes,
        "magic": header.magic,
        "codec": header.codec.name.lower(),
        "crc": header.crc,
    }


def batch_line(header: BatchHeader, position: int) -> str:
    """One batch as DumpLogSegments prints it."""
    horizon: object = "OptionalLong.empty"
    if header.has_delete_horizon:
        horizon = f"OptionalLong[{header.delete_horizon_ms}]"
    return (
        f"baseOffset: {header.base_offset} lastOffset: {header.last_offset}"
        f" count: {header.record_count} baseSequence: {header.base_sequence}"
        f" lastSequence: {header.last_sequence} producerId: {header.producer_id}"
        f" producerEpoch: {header.producer_epoch}"
        f" partitionLeaderEpoch: {header.partition_leader_epoch}"
        f" isTransactional: {_bool(header.is_transactional)}"
        f" isControl: {_bool(header.is_control)} deleteHorizonMs: {horizon}"
        f" position: {position}"
        f" {_TIMESTAMP_TYPES[header.timestamp_type]}: {header.max_timestamp}"
        f" size: {header.size_bytes} magic: {header.magic}"
        f" compresscodec: {header.codec.name.lower()} crc: {header.crc} isvalid: true"
    )


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _text(label: str, data: bytes | None) -> str:
    return "" if data is None else f" {label}: {data.decode('utf-8', 'backslashreplace')}"


def _sequence(header: BatchHeader, offset: int) -> int:
    """The sequence number of a record; -1 from a producer without an id."""
    if header.base_sequence < 0:
        return -1
    return (header.base_sequence + offset - header.base_offset) & 0x7FFFFFFF


def _records(header: BatchHeader, data: bytes, decoder: Decoder | None) -> Iterator[Entry]:
    kind = _TIMESTAMP_TYPES[header.timestamp_type]
    for record in records(data, inflate_limit=INFLATE_LIMIT_BYTES):
        key_size = -1 if record.key is None else len(record.key)
        value_size = -1 if record.value is None else len(record.value)
        names = ",".join(name for name, _ in record.headers)
        sequence = _sequence(header, record.offset)
        values = {
            "offset": record.offset,
            "timestamp": record.timestamp,
            "sequence": sequence,
            "key": record.key,
            "value": record.value,
            "headers": record.headers,
        }
        if decoder is None:
            content = f"{_text('key', record.key)}{_text('payload', record.value)}"
        else:
            key, payload, more = decoder(record.offset, record.key, record.value)
            content = f" key: {key}{'' if payload is None else f' payload: {payload}'}"
            values |= more
        yield Entry(
            "record",
            values,
            f"| offset: {record.offset} {kind}: {record.timestamp} keySize: {key_size}"
            f" valueSize: {value_size} sequence: {sequence} headerKeys: [{names}]{content}",
        )


def _control(header: BatchHeader, data: bytes) -> Iterator[Entry]:
    columns = scan(data)
    for i in range(columns.count):
        key, value, offset = columns.key(i), columns.value(i), columns.offsets[i]
        sequence = _sequence(header, offset)
        kind = -1 if key is None or len(key) < 4 else int.from_bytes(key[2:4], "big", signed=True)
        values: dict[str, Any] = {
            "offset": offset,
            "timestamp": columns.timestamps[i],
            "sequence": sequence,
            "type": _MARKERS.get(kind, str(kind)),
        }
        line = (
            f"| offset: {offset} {_TIMESTAMP_TYPES[header.timestamp_type]}:"
            f" {columns.timestamps[i]} keySize: {-1 if key is None else len(key)}"
            f" valueSize: {-1 if value is None else len(value)} sequence: {sequence} headerKeys: []"
        )
        if kind in _MARKERS and value is not None and len(value) >= 6:
            values["coordinator_epoch"] = int.from_bytes(value[2:6], "big", signed=True)
            line += f" endTxnMarker: {values['type']}"
            line += f" coordinatorEpoch: {values['coordinator_epoch']}"
        else:
            line += f" controlType: {values['type']}"
        yield Entry("control", values, line)


def _small(disk: Disk, path: str, parsed: layout.SegmentFile) -> Iterator[Entry]:
    data = disk.read(path)
    base = parsed.base_offset
    if parsed.kind == layout.INDEX:
        for relative, position in zip(*offset_index.decode_entries(data), strict=True):
            values = {"offset": base + relative, "position": position}
            yield Entry("index", values, f"offset: {base + relative} position: {position}")
    elif parsed.kind == layout.TIME_INDEX:
        for timestamp, relative in zip(*time_index.decode_entries(data), strict=True):
            values = {"timestamp": timestamp, "offset": base + relative}
            yield Entry("timeindex", values, f"timestamp: {timestamp} offset: {base + relative}")
    elif parsed.kind == layout.TXN_INDEX:
        for entry in txn_index.decode(path, data):
            yield Entry(
                "aborted",
                entry._asdict(),
                f"version: {txn_index.VERSION} producerId: {entry.producer_id}"
                f" firstOffset: {entry.first_offset}"
                f" lastOffset: {entry.last_offset} lastStableOffset: {entry.last_stable_offset}",
            )
    else:
        yield from _producers(path, data)


def _producers(path: str, data: bytes) -> Iterator[Entry]:
    for producer_id, state in snapshots.decode(path, data):
        values = {
            "producer_id": producer_id,
            "producer_epoch": state.epoch,
            "coordinator_epoch": state.coordinator_epoch,
            "txn_first_offset": state.txn_first_offset,
            "last_timestamp": state.last_timestamp,
            "last_sequence": state.last_sequence,
            "last_offset": state.last_offset,
        }
        first = state.txn_first_offset
        open_since = "OptionalLong.empty" if first is None else f"OptionalLong[{first}]"
        last = "".join(
            f" firstSequence: {batch.first_sequence} lastSequence: {batch.last_sequence}"
            f" lastOffset: {batch.last_offset} offsetDelta: {batch.offset_delta}"
            f" timestamp: {batch.timestamp}"
            for batch in state.batches
        )
        yield Entry(
            "producer",
            values,
            f"producerId: {producer_id} producerEpoch: {state.epoch}"
            f" coordinatorEpoch: {state.coordinator_epoch}"
            f" currentTxnFirstOffset: {open_since}"
            f" lastTimestamp: {state.last_timestamp}{last}",
        )
