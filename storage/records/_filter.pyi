from array import array

from kept.storage.records.header import Buffer

class SegmentFilter:
    """Copies batches with the records that survive; see :mod:`kept.storage.records.filter`.

    ``limit_bytes`` and ``index_limit_bytes`` bound one output. ``check_crc``: batches with survivors
    are checked; a digest takes their CRC as it stands.
    """

    output_base: int
    position: int
    batches: int
    records: int
    last_offset: int
    max_timestamp: int
    max_timestamp_offset: int
    next_base: int
    stop: int
    fault: str | None
    def __init__(
        self,
        *,
        interval_bytes: int,
        limit_bytes: int,
        index_limit_bytes: int,
        check_crc: bool = ...,
    ) -> None: ...
    def open_output(self, base_offset: int) -> None: ...
    def open_source(
        self,
        base_offset: int,
        survivors: array[int],
        empties: array[int],
        horizon_firsts: array[int],
        horizon_values: array[int],
    ) -> None: ...
    def mark(self) -> tuple[int, int, int]: ...
    def back(self, survivor: int, empty: int, horizon: int) -> None: ...
    def feed(self, data: Buffer) -> int: ...
    def rewrite(self, header: Buffer, area: Buffer) -> tuple[bool, bytes, bytes]: ...
    def add(self, batch: Buffer, canonical: Buffer) -> bool: ...
    def drain(self) -> bytes: ...
    def drain_headers(self) -> bytes: ...
    def index(self) -> bytes: ...
    def time_index(self) -> bytes: ...
