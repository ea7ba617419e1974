"""Which batches of a Fetch answer a reader of committed records must not see.

A Fetch at READ_COMMITTED brings the aborted transactions that overlap what it brings: (producer id,
first offset of the transaction). From that offset on the producer's transactional batches belong to
the transaction, up to its marker (KIP-98).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kept.storage.records import Buffer, headers


def aborted_batches(records: Buffer, aborted: Sequence[tuple[int, int]]) -> Collection[int]:
    """Positions in ``records`` where a batch of an aborted transaction begins.

    A last batch that is cut off is left out, as readers leave it out.
    """
    if not aborted:
        return ()
    pending = sorted(aborted, key=lambda one: one[1], reverse=True)
    dropped: set[int] = set()
    positions = set()
    for at, header in headers(records):
        while pending and pending[-1][1] <= header.last_offset:
            dropped.add(pending.pop()[0])
        if header.is_control:
            dropped.discard(header.producer_id)
        elif header.is_transactional and header.producer_id in dropped:
            positions.add(at)
    return positions
