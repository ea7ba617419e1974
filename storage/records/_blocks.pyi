from collections.abc import Collection
from typing import Final

from kept.storage.records.blocks import Block
from kept.storage.records.header import Buffer

KERNEL: Final[str]

def read_block(
    buf: Buffer,
    position: int,
    first: int,
    end: int,
    wanted: int,
    *,
    hidden: Collection[int] = ...,
    min_timestamp: int = ...,
    max_rows: int = ...,
    max_bytes: int = ...,
    inflate_limit: int = ...,
) -> Block: ...
