"""What a request must be, beyond what kio looks at."""

from __future__ import annotations

import pytest
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.storage.errors import CorruptMessage

DELETE_RECORDS = 21, 2
METADATA = 3, 12


def test_a_null_array_is_refused_where_the_schema_has_none() -> None:
    values = {"topics": [{"name": "t", "partitions": []}], "timeout": 0}
    cls = protocol.message_type(*DELETE_RECORDS, EntityType.request)
    data = protocol.encode(protocol.build(cls, values))
    assert data[:4] == b"\x02\x02t\x01"
    assert protocol.decode_request(*DELETE_RECORDS, data, 0).topics[0].partitions == ()
    with pytest.raises(CorruptMessage, match="partitions is null"):
        protocol.decode_request(*DELETE_RECORDS, data[:3] + b"\0" + data[4:], 0)
    with pytest.raises(CorruptMessage, match="topics is null"):
        protocol.decode_request(*DELETE_RECORDS, b"\0" + data[5:], 0)


def test_a_null_array_that_means_all_is_taken() -> None:
    data = b"\0" + b"\0" * 3
    assert protocol.decode_request(*METADATA, data, 0).topics is None
