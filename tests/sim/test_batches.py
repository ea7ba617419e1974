"""Batches as the checkers read them."""

from __future__ import annotations

from struct import pack_into

from kept.storage.records import EndTxnMarker
from kept.storage.records.control import build_control_batch
from tests.sim.batches import CONTROL, HEADER_BYTES, decode


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
