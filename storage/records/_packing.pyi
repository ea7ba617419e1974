from typing import Final

from kept.storage.records.packing import Area, Rows

KERNEL: Final[str]

class Packer:
    partitions: int
    limit_bytes: int
    def __init__(self, partitions: int, limit_bytes: int) -> None: ...
    def feed(self, rows: Rows, start: int, sticky: int) -> int: ...
    def take(self) -> dict[int, Area]: ...
