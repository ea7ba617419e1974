"""Batches as the checkers read them."""

from __future__ import annotations

from struct import pack_into

from kept.storage.records import EndTxnMarker
from kept.storage.records.control import build_control_batch
from tests.sim.batches import CONTROL, HEADER_BYTES, Batch, decode


def test_a_marker_and_what_a_pass_leaves_of_it() -> None:
    """The batch may stay, for its producer's epoch, when the marker itself is gone."""
    data = bytearray(build_control_batch(EndTxnMarker(True, 7), 3, 1, 1000, base_offset=9))
    (batch,) = decode(bytes(data))
    assert batch.attributes & CONTROL and batch.marker == (1, 7)

    empty = data[:HEADER_BYTES]
    pack_into(">i", empty, 8, HEADER_BYTES - 12)
    pack_into(">i", empty, HEADER_BYTES - 4, 0)
    (batch,) = decode(bytes(empty))
    assert batch.attributes & CONTROL and batch.marker is None
    assert (batch.base, batch.producer_id, batch.producer_epoch) == (9, 3, 1)


def test_a_pass_that_empties_a_batch_leaves_its_sequences() -> None:
    """Its count is lower then, its offsets and its first sequence are as they were."""
    sent = Batch(10, 14, 0, 0, 7, 0, 3, 5, 0)
    assert (sent.last_sequence, sent.next_sequence) == (7, 8)
    emptied = sent._replace(count=0)
    assert (emptied.last_sequence, emptied.next_sequence) == (7, 8)
    largest = 2**31 - 1
    assert sent._replace(sequence=largest - 4).last_sequence == largest
    assert sent._replace(sequence=largest - 4).next_sequence == 0
    assert sent._replace(sequence=largest - 1).last_sequence == 2
