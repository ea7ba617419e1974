"""What a cut takes away that was committed: looked at while it is still there.

After an unclean election, or where a whole ISR lost power, a replica that had more cuts it off. It
is the only one that knows which records those were.
"""

from __future__ import annotations

from typing import Final

from kept.replication.replica_effects import LostRecord, RecordsLost
from kept.storage.errors import KeptError
from kept.storage.log.log import Log
from kept.storage.records import headers, records

MAX_BYTES: Final = 8 << 20
MAX_RECORDS: Final = 10_000
"""Of a report. What is beyond is counted by offsets alone."""
READ_BYTES: Final = 1 << 20


def about_to_lose(
    log: Log, offset: int, high_watermark: int, *, unclean: bool
) -> RecordsLost | None:
    """What a cut at ``offset`` takes away of what was committed; None: nothing.

    ``unclean``: that may be all there is, for a leader since the last record here was elected from
    outside the ISR. After clean elections all that is missing there above the high watermark was
    committed by nobody.
    """
    start = max(offset, log.log_start_offset)
    end = log.written_end_offset
    if not unclean:
        end = min(high_watermark, end)
    if start >= end:
        return None
    lost: list[LostRecord] = []
    position, read, why = start, 0, None
    try:
        while position < end and read < MAX_BYTES and len(lost) <= MAX_RECORDS:
            data = log.read_batches(position, READ_BYTES, end)
            if not data:
                break
            read += len(data)
            # A cut goes by whole batches: the first may begin below ``offset``.
            lost += (
                LostRecord(record.offset, record.key, record.value is None)
                for record in records(data)
            )
            position = max(header.next_offset for _, header in headers(data))
    except KeptError as error:
        why = str(error)
    if why is None and (position < end or len(lost) > MAX_RECORDS):
        why = f"it holds {MAX_RECORDS} records of {MAX_BYTES} bytes at most"
    start = min([start, *(record.offset for record in lost[:1])])
    return RecordsLost(
        start, end, min(max(high_watermark, start), end), tuple(lost[:MAX_RECORDS]), why
    )
