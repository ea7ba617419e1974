"""Kafka messages to bytes and back, for every API and version that kio knows.

kio has one class per message and version. :func:`build` makes one from plain values, so that
callers write a message once, with all the fields that any version has: fields which this version
lacks are left out, ints become error codes, milliseconds become timedeltas. Decoding gives kio's
own typed object. The codec of the hot path (Produce, Fetch) is not here.

Source: https://kafka.apache.org/protocol and KIP-482 (flexible versions).
"""

from __future__ import annotations

import datetime
import io
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.bounds import NO_LIMIT, program
from kept.client.protocol.wire import skip_tags, uvarint
from kept.steps import Steps, run_to_end
from kept.storage.errors import (
    CorruptMessage,
    InvalidRequest,
    InvariantViolation,
    UnsupportedVersion,
)

_ZERO_MS: Final = datetime.timedelta(0)
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

T = TypeVar("T")
Values = Mapping[str, Any]
"""Field name (as kio spells it: ``throttle_time``, ``error_code``) to value. Arrays are iterables
of values, one of messages perhaps a :class:`LazyArray`; nested messages are mappings; timedeltas
may be given as int milliseconds."""


class LazyArray:
    """The messages of an array, made of ``items`` when they are encoded, one at a time: as values
    many of them take ten times as much memory as when they are encoded.
    """

    __slots__ = ("_items", "_make")

    def __init__(self, items: Sequence[T], make: Callable[[T], Values]) -> None:
        self._items: Sequence[Any] = items
        self._make: Callable[[Any], Values] = make

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Values]:
        return map(self._make, self._items)


@cache
def _kio() -> Any:
    """kio's readers, writers and schemas: 25 ms and 3 MB, which no node needs to be ready."""
    from kept.client.protocol import kio_codec

    return kio_codec


def versions(api_key: int) -> range:
    """Versions of an API that kio can read and write; empty for an unknown key."""
    name = _kio().api_key_map.get(api_key)
    if name is None:
        return range(0)
    known = _kio().schema_name_map[name]
    return range(min(known), max(known) + 1)


@cache
def message_type(api_key: int, version: int, kind: EntityType) -> type[Any]:
    """The class of a request or response.

    Raises UnsupportedVersion where kio has none.
    """
    if version not in versions(api_key):
        raise UnsupportedVersion(f"API {api_key} has no version {version} here")
    if kind is EntityType.request:
        cls: type[Any] = _kio().load_request_schema(api_key, version)
        return cls
    if api_key == ApiKey.DESCRIBE_TRANSACTIONS:
        cls = _kio().DescribeTransactionsResponse
    else:
        cls = _kio().load_response_schema(api_key, version)
    return cls


@cache
def _reader(cls: Any) -> Any:
    return _kio().entity_reader(cls)


@cache
def _writer(cls: Any) -> Any:
    return _kio().entity_writer(cls)


@cache
def throttle_position(api_key: int, version: int) -> int | None:
    """Where ``throttle_time_ms`` is in a response's frame, whose body it begins; None: elsewhere,
    or this version has none.
    """
    cls = message_type(api_key, version, EntityType.response)
    if next((f.name for f in fields(cls)), "") != "throttle_time":
        return None
    return 9 if header_is_flexible(cls) and api_key != 18 else 8


def header_is_flexible(cls: type[Any]) -> bool:
    """Whether messages of this class carry the header with tagged fields."""
    return bool(cls.__header_schema__.__flexible__)


def build(cls: Any, values: Values) -> Any:
    """An instance of a kio class from plain values (see :data:`Values`).

    A field absent from ``values`` takes the schema's default, false or no throttling; one without
    is a bug: InvariantViolation. A name that this version lacks is left out.
    """
    out: dict[str, Any] = {}
    for name, kind, convert, default in _plan(cls):
        if name in values:
            value = values[name]
            out[name] = value if value is None or convert is None else convert(value)
        elif default is not None:
            out[name] = default()
        else:
            raise InvariantViolation(f"{cls.__module__}.{cls.__name__} needs {name} ({kind})")
    return cls(**out)


@cache
def _plan(cls: type[Any]) -> tuple[tuple[str, str, Any, Any], ...]:
    """(field name, kafka type, converter or None, default factory or None) for each field."""
    hints = get_type_hints(cls)
    plan = []
    for f in fields(cls):
        kind = str(f.metadata.get("kafka_type", "entity"))
        default: Any = None
        if f.default is not MISSING:
            default = lambda value=f.default: value  # noqa: E731
        elif f.default_factory is not MISSING:
            default = f.default_factory
        elif f.name == "throttle_time":
            default = lambda: _ZERO_MS  # noqa: E731
        elif kind == "bool":
            default = bool
        plan.append((f.name, kind, _converter(hints[f.name], kind), default))
    return tuple(plan)


def _converter(hint: Any, kind: str) -> Any:
    """How plain values become what the field holds; None where they already are."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(a for a in get_args(hint) if a is not NoneType)
    if get_origin(hint) is tuple:
        one = _converter(get_args(hint)[0], kind)
        if one is None:
            return tuple
        return lambda items: tuple(one(item) for item in items)
    if kind == "error_code":
        return ErrorCode
    if kind in ("timedelta_i32", "timedelta_i64"):
        return _timedelta
    if kind == "datetime_i64":
        return _datetime
    if kind == "entity" and isinstance(hint, type):
        return lambda value: build(hint, value) if isinstance(value, Mapping) else value
    return None


def _timedelta(value: int | datetime.timedelta) -> datetime.timedelta:
    return datetime.timedelta(milliseconds=value) if isinstance(value, int) else value


def _datetime(value: int | datetime.datetime) -> datetime.datetime | None:
    if isinstance(value, datetime.datetime):
        return value
    return None if value < 0 else _EPOCH + datetime.timedelta(milliseconds=value)


def milliseconds(value: datetime.timedelta) -> int:
    """A timedelta field in milliseconds, exact."""
    return value // datetime.timedelta(milliseconds=1)


def decode(
    cls: Any, data: bytes | memoryview, position: int = 0, max_entries: int = NO_LIMIT
) -> tuple[Any, int]:
    """A message of class ``cls`` at ``position``, and the position after it.

    Its lengths are checked before kio sees it (:mod:`kept.client.protocol.bounds`), and tagged
    fields that kio does not know are passed over. Raises CorruptMessage when the bytes are not such
    a message, InvalidRequest when it has more than ``max_entries`` entries.
    """
    view = memoryview(data).toreadonly()
    try:
        end, _, unknown = program(cls).check(view, position, max_entries)
        if unknown:
            known = program(cls).without_unknown_tags(view, position)
            return _reader(cls)(memoryview(known), 0)[0], end
        return _reader(cls)(view, position)[0], end
    except InvalidRequest as error:
        raise InvalidRequest(f"a {cls.__name__} v{cls.__version__} of {error}") from None
    except (
        CorruptMessage,
        _kio().SerialError,
        KeyError,
        ValueError,
        OverflowError,
        struct.error,
    ) as error:
        raise CorruptMessage(f"not a {cls.__name__} v{cls.__version__}: {error!r}") from error


def encode(message: Any) -> bytes:
    """A kio message's bytes, without any header."""
    buffer = io.BytesIO()
    cls: Any = type(message)
    _writer(cls)(buffer, message)
    return buffer.getvalue()


def encode_request(
    api_key: int, version: int, correlation_id: int, client_id: str | None, values: Values
) -> bytes:
    """A whole request frame: length, header, body."""
    cls = message_type(api_key, version, EntityType.request)
    name = b"" if client_id is None else client_id.encode()
    head = struct.pack(
        ">hhih", api_key, version, correlation_id, -1 if client_id is None else len(name)
    )
    tags = b"\0" if header_is_flexible(cls) else b""
    body = _written(cls, values)
    return b"".join(
        (struct.pack(">i", len(head) + len(name) + len(tags) + len(body)), head, name, tags, body)
    )


def request_body(api_key: int, version: int, values: Values) -> bytes:
    """The body of a request, without length and header."""
    return _written(message_type(api_key, version, EntityType.request), values)


def encode_response(
    api_key: int, version: int, correlation_id: int, values: Values | bytes
) -> bytes:
    """A whole response frame: length, header, body (bytes: a body that is encoded already)."""
    return run_to_end(response_steps(api_key, version, correlation_id, values))


def response_steps(
    api_key: int,
    version: int,
    correlation_id: int,
    values: Values | bytes,
    out: io.BytesIO | None = None,
) -> Steps[bytes]:
    """:func:`encode_response` for whoever has other things to do: yields after each element. It is
    encoded into ``out``, which shows how much there is so far.
    """
    cls = message_type(api_key, version, EntityType.response)
    # ApiVersions answers with header v0 always, so that any client can read it (KIP-511).
    tags = b"\0" if header_is_flexible(cls) and api_key != 18 else b""
    if isinstance(values, bytes):
        return struct.pack(">ii", 4 + len(tags) + len(values), correlation_id) + tags + values
    if out is None:
        out = io.BytesIO()
    out.write(struct.pack(">ii", 0, correlation_id) + tags)
    yield from _write_steps(cls, values, out)
    size = out.tell()
    out.seek(0)
    out.write(struct.pack(">i", size - 4))
    return out.getvalue()


def body_steps(api_key: int, version: int, values: Values) -> Steps[bytes]:
    """As :func:`response_steps`, the body alone."""
    out = io.BytesIO()
    yield from _write_steps(message_type(api_key, version, EntityType.response), values, out)
    return out.getvalue()


def _written(cls: Any, values: Values) -> bytes:
    out = io.BytesIO()
    run_to_end(_write_steps(cls, values, out))
    return out.getvalue()


def _write_steps(cls: Any, values: Values, out: io.BytesIO) -> Steps[None]:
    """Write a message field by field, its arrays of messages element by element: to build kio's
    message object first would take twice as long. Yields after each element.
    """
    plan = _write_plan(cls)
    if plan is None or not (type(values) is dict or isinstance(values, Mapping)):
        message = build(cls, values) if isinstance(values, Mapping) else values
        _writer(cls)(out, message)
        return
    for name, kind, convert, default, write, nested in plan:
        if name in values:
            value = values[name]
        elif default is not None:
            value = default()
        else:
            raise InvariantViolation(f"{cls.__module__}.{cls.__name__} needs {name} ({kind})")
        if nested is None:
            write(out, value if value is None or convert is None else convert(value))
            continue
        items = value if value is None or isinstance(value, LazyArray) else tuple(value)
        write(out, None if items is None else len(items))
        for item in items or ():
            yield from _write_steps(nested, item, out)
            yield
    if cls.__flexible__:
        out.write(b"\0")


@cache
def _write_plan(cls: Any) -> tuple[tuple[str, str, Any, Any, Any, Any], ...] | None:
    """(name, kafka type, converter, default, writer, class of its elements) for each field; for an
    array of messages the writer is its length's. None: kio writes it whole, because of its tagged
    fields.
    """
    described = fields(cls)
    if any("tag" in field.metadata for field in described):
        return None
    hints = get_type_hints(cls)
    length = _write_compact_length if cls.__flexible__ else _write_length
    plan: list[tuple[str, str, Any, Any, Any, Any]] = []
    for field, (name, kind, convert, default) in zip(described, _plan(cls), strict=True):
        nested = _element(hints[name])
        if nested is None:
            write = _kio().get_field_writer(field, cls.__flexible__, False, False)
            if cls.__flexible__ and kind == "string":
                hint = hints[name]
                nullable = get_origin(hint) in (Union, UnionType)
                one = next(a for a in get_args(hint) if a is not NoneType) if nullable else hint
                if get_origin(one) is not tuple:
                    write = _write_nullable_compact_string if nullable else _write_compact_string
            plan.append((name, kind, convert, default, write, None))
        else:
            plan.append((name, kind, convert, default, length, nested))
    return tuple(plan)


def _write_length(out: io.BytesIO, count: int | None) -> None:
    out.write(struct.pack(">i", -1 if count is None else count))


def _write_compact_length(out: io.BytesIO, count: int | None) -> None:
    out.write(uvarint(0 if count is None else count + 1))


def _write_compact_string(out: io.BytesIO, value: str | bytes) -> None:
    """As kio's, most of whose work is to make its own kind of number of the length."""
    data = value.encode() if isinstance(value, str) else value
    out.write(uvarint(len(data) + 1) + data)


def _write_nullable_compact_string(out: io.BytesIO, value: str | bytes | None) -> None:
    if value is None:
        out.write(b"\0")
    else:
        _write_compact_string(out, value)


def _element(hint: Any) -> Any:
    """The class of an array's messages; None for any other field."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not NoneType)
    if get_origin(hint) is tuple and is_dataclass(get_args(hint)[0]):
        return get_args(hint)[0]
    return None


def decode_request(
    api_key: int,
    version: int,
    data: bytes | memoryview,
    position: int,
    max_entries: int = NO_LIMIT,
) -> Any:
    """The body of a request, which starts at ``position`` (after the header).

    Bytes after the message are passed over, as Apache Kafka does: librdkafka's Metadata has some.
    Raises UnsupportedVersion, CorruptMessage, and InvalidRequest for more than ``max_entries``.
    """
    cls = message_type(api_key, version, EntityType.request)
    message = decode(cls, data, position, max_entries)[0]
    _refuse_null_arrays(cls, message)
    return message


def check_request(
    api_key: int,
    version: int,
    data: bytes | memoryview,
    position: int,
    max_entries: int = NO_LIMIT,
) -> int:
    """Check the lengths of a request, and count its entries. Raises as :func:`decode_request`."""
    cls: Any = message_type(api_key, version, EntityType.request)
    try:
        return program(cls).check(data, position, max_entries)[1]
    except InvalidRequest as error:
        raise InvalidRequest(f"a {cls.__name__} v{version} of {error}") from None


def _refuse_null_arrays(cls: Any, message: Any) -> None:
    """kio reads a null array as None, also where the schema has no null."""
    for name, nullable, nested in _arrays(cls):
        items = getattr(message, name)
        if items is None and not nullable:
            raise CorruptMessage(f"not a {cls.__name__} v{cls.__version__}: {name} is null")
        if nested is not None:
            for item in items or ():
                _refuse_null_arrays(nested, item)


@cache
def _arrays(cls: Any) -> tuple[tuple[str, bool, Any], ...]:
    """(name, whether it may be null, class of its messages that have arrays themselves or None) of
    each array in a message.
    """
    arrays = []
    for name, hint in get_type_hints(cls).items():
        nullable = get_origin(hint) in (Union, UnionType)
        array = next(a for a in get_args(hint) if a is not NoneType) if nullable else hint
        if get_origin(array) is tuple:
            nested: Any = get_args(array)[0]
            deeper = hasattr(nested, "__dataclass_fields__") and bool(_arrays(nested))
            arrays.append((name, nullable, nested if deeper else None))
    return tuple(arrays)


def decode_response(api_key: int, version: int, frame: bytes | memoryview) -> tuple[int, Any]:
    """(correlation id, body) of a response frame without its length prefix."""
    cls = message_type(api_key, version, EntityType.response)
    (correlation_id,) = struct.unpack_from(">i", frame, 0)
    position = 4
    if header_is_flexible(cls) and api_key != 18:
        position = skip_tags(frame, position)
    return correlation_id, decode(cls, frame, position)[0]


def refused(api_key: int, version: int, error_code: int, message: str) -> Values | None:
    """A response that says nothing but that the whole request failed; None where the response has
    no error of its own.
    """
    cls: Any = message_type(api_key, version, EntityType.response)
    if "error_code" not in {field.name for field in fields(cls)}:
        return None
    return {**nothing(cls), "error_code": error_code, "error_message": message}


def nothing(cls: Any) -> Values:
    """What stands in the fields of a message that has nothing to say: those without a default."""
    return _blank(cls)[0]


def array_element(cls: Any, name: str) -> Any:
    """The class of the messages in an array of a message."""
    return _blank(cls)[1][name]


@cache
def _blank(cls: Any) -> tuple[Values, Values]:
    hints = get_type_hints(cls)
    values = {
        name: _nothing(hints[name], kind)
        for name, kind, _, default in _plan(cls)
        if default is None
    }
    elements = {name: _element(hint) for name, hint in hints.items()}
    return MappingProxyType(values), MappingProxyType(elements)


def _nothing(hint: Any, kind: str) -> Any:
    """What stands in a field that has nothing to say."""
    if get_origin(hint) in (Union, UnionType):
        return None
    if get_origin(hint) is tuple:
        return ()
    return {"string": "", "bytes": b"", "entity": {}}.get(kind, -1)
