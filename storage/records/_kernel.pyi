from typing import Final

from kept.storage.records.columns import CheckRules, RecordColumns
from kept.storage.records.header import BatchHeader, Buffer, ReplicaBatch
from kept.storage.types import Codec

KERNEL: Final[str]

class CheckedBatch:
    data: memoryview
    size_bytes: int
    record_count: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    is_transactional: bool
    codec: Codec
    rewritten: bool
    area_bytes: int
    def __init__(
        self,
        data: memoryview,
        size_bytes: int,
        record_count: int,
        max_timestamp: int,
        producer_id: int,
        producer_epoch: int,
        base_sequence: int,
        is_transactional: bool,
        codec: Codec,
        rewritten: bool,
    ) -> None: ...

def crc32c(data: Buffer, crc: int = 0) -> int: ...
def crc32c_software(data: Buffer) -> int: ...
def check_replica(buf: Buffer, position: int = 0) -> BatchHeader: ...
def check_replicas(buf: Buffer) -> list[ReplicaBatch]: ...
def check(batch: Buffer, rules: CheckRules, now_ms: int) -> CheckedBatch: ...
def scan(buf: Buffer, *, inflate_limit: int = ..., check_crc: bool = True) -> RecordColumns: ...
def find_records(
    area: Buffer, count: int, base_offset: int, first: int, max_records: int, max_bytes: int
) -> tuple[int, int, int]: ...
