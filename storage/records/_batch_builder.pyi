from typing import Final

from kept.storage.records.batch_builder import Area, Rows

KERNEL: Final[str]

class BatchBuilder:
    partitions: int
    limit_bytes: int
    def __init__(self, partitions: int, limit_bytes: int) -> None: ...
    def append(self, rows: Rows, start: int, sticky: int) -> int: ...
    def drain(self) -> dict[int, Area]: ...
