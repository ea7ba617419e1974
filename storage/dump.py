"""Offline: the content of a file as text, in the words of Apache Kafka's DumpLogSegments.

``kept log dump``: ``.log`` with its records, ``.index``, ``.timeindex``, ``.txnindex``,
``.snapshot`` and the text checkpoints, ours or Apache Kafka's. Damage is a last line that says
where and what.
"""

from __future__ import annotations

from collections.abc import Iterator

from kept.storage import checkpoints, layout, offset_index, snapshots, time_index, txn_index
from kept.storage.check import INFLATE_LIMIT_BYTES, batches
from kept.storage.disk import Disk
from kept.storage.errors import CorruptMessage, DamagedData, InvalidRecord
from kept.storage.records import BatchHeader, records, scan

_MARKERS = {0: "ABORT", 1: "COMMIT"}
_TEXTS = (
    layout.RECOVERY_POINTS, layout.HIGH_WATERMARKS, layout.LOG_STARTS, layout.CLEANER_OFFSETS,
    layout.LEADER_EPOCHS,
)  # fmt: skip


def dump_file(path: str, disk: Disk | None = None, *, print_records: bool = True) -> Iterator[str]:
    """The lines of a file. Raises FileNotFoundError, MachineError; ValueError for other files."""
    disk = disk or Disk({})
    name = path.rpartition("/")[2]
    parsed = layout.parse_segment_file(name)
    yield f"Dumping {path}"
    try:
        if parsed is not None and parsed.kind == layout.LOG:
            yield from _log(disk, path, parsed.base_offset, print_records)
        elif parsed is not None:
            yield from _small(disk, path, parsed)
        elif name in _TEXTS:
            for entry in checkpoints.parse_checkpoint(path, disk.read(path)):
                yield " ".join(entry)
        elif name == layout.PARTITION_METADATA:
            yield f"topic_id: {checkpoints.read_partition_metadata(disk, path)}"
        elif name == layout.META_PROPERTIES:
            for key, value in sorted((checkpoints.read_properties(disk, path) or {}).items()):
                yield f"{key}={value}"
        else:
            raise ValueError(f"{path}: not a file of a log; expected one of *.log, *.index, ...")
    except DamagedData as error:
        yield f"DAMAGED: {error}"


def _log(disk: Disk, path: str, base_offset: int, print_records: bool) -> Iterator[str]:
    yield f"Log starting offset: {base_offset}"
    for position, header, data in batches(disk, path):
        yield batch_line(header, position)
        if not print_records or not header.record_count:
            continue
        try:
            yield from _control(data) if header.is_control else _records(header, data)
        except (InvalidRecord, CorruptMessage) as error:
            yield f"DAMAGED: {path}: batch at byte {position}: {error}"


def batch_line(header: BatchHeader, position: int) -> str:
    """One batch as DumpLogSegments prints it."""
    horizon = header.delete_horizon_ms if header.has_delete_horizon else "OptionalLong.empty"
    return (
        f"baseOffset: {header.base_offset} lastOffset: {header.last_offset}"
        f" count: {header.record_count} baseSequence: {header.base_sequence}"
        f" lastSequence: {header.last_sequence} producerId: {header.producer_id}"
        f" producerEpoch: {header.producer_epoch}"
        f" partitionLeaderEpoch: {header.partition_leader_epoch}"
        f" isTransactional: {_bool(header.is_transactional)}"
        f" isControl: {_bool(header.is_control)} deleteHorizonMs: {horizon}"
        f" position: {position} {header.timestamp_type.name}: {header.max_timestamp}"
        f" size: {header.size_bytes} magic: {header.magic}"
        f" compresscodec: {header.codec.name.lower()} crc: {header.crc} isvalid: true"
    )


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _text(data: bytes | None) -> str:
    return "" if data is None else data.decode("utf-8", "backslashreplace")


def _records(header: BatchHeader, data: bytes) -> Iterator[str]:
    kind = header.timestamp_type.name.title().replace("_", "")
    for record in records(data, inflate_limit=INFLATE_LIMIT_BYTES):
        key_size = -1 if record.key is None else len(record.key)
        value_size = -1 if record.value is None else len(record.value)
        names = ",".join(name for name, _ in record.headers)
        yield (
            f"| offset: {record.offset} {kind}: {record.timestamp} keySize: {key_size}"
            f" valueSize: {value_size} headerKeys: [{names}]"
            f" key: {_text(record.key)} payload: {_text(record.value)}"
        )


def _control(data: bytes) -> Iterator[str]:
    columns = scan(data)
    for i in range(columns.count):
        key, value = columns.key(i), columns.value(i)
        if key is None or len(key) < 4:
            yield f"| offset: {columns.offsets[i]} control record without a type"
            continue
        kind = int.from_bytes(key[2:4], "big", signed=True)
        line = f"| offset: {columns.offsets[i]} controlType: {_MARKERS.get(kind, kind)}"
        if kind in _MARKERS and value is not None and len(value) >= 6:
            line += f" coordinatorEpoch: {int.from_bytes(value[2:6], 'big', signed=True)}"
        yield line


def _small(disk: Disk, path: str, parsed: layout.SegmentFile) -> Iterator[str]:
    data = disk.read(path)
    base = parsed.base_offset
    if parsed.kind == layout.INDEX:
        for offset, position in zip(*offset_index.decode_entries(data), strict=True):
            yield f"offset: {base + offset} position: {position}"
    elif parsed.kind == layout.TIME_INDEX:
        for timestamp, offset in zip(*time_index.decode_entries(data), strict=True):
            yield f"timestamp: {timestamp} offset: {base + offset}"
    elif parsed.kind == layout.TXN_INDEX:
        for entry in txn_index.decode(path, data):
            yield (
                f"producerId: {entry.producer_id} firstOffset: {entry.first_offset}"
                f" lastOffset: {entry.last_offset} lastStableOffset: {entry.last_stable_offset}"
            )
    else:
        for producer_id, state in snapshots.decode(path, data):
            yield (
                f"producerId: {producer_id} producerEpoch: {state.epoch}"
                f" coordinatorEpoch: {state.coordinator_epoch}"
                f" currentTxnFirstOffset: {state.txn_first_offset}"
                f" lastTimestamp: {state.last_timestamp} lastSequence: {state.last_sequence}"
                f" lastOffset: {state.last_offset}"
            )
