"""What :mod:`kept.client.protocol.messages` uses of kio to read and write, imported together when
the first message is.
"""

from __future__ import annotations

from kio.index import load_request_schema, load_response_schema
from kio.schema.index import api_key_map, schema_name_map
from kio.serial import entity_reader, entity_writer
from kio.serial._serialize import get_field_writer
from kio.serial.errors import SerialError

from kept.client.protocol.describe_transactions import DescribeTransactionsResponse

__all__ = [
    "DescribeTransactionsResponse",
    "SerialError",
    "api_key_map",
    "entity_reader",
    "entity_writer",
    "get_field_writer",
    "load_request_schema",
    "load_response_schema",
    "schema_name_map",
]
