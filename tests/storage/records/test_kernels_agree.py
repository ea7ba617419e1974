"""Whatever the bytes, both kernels give the same answer or the same refusal, and never crash."""

from __future__ import annotations

import importlib
import os
import struct
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kept.storage.errors import KeptError
from kept.storage.records import (
    CheckRules,
    build_batch,
    compress,
    crc32c,
    python,
    read_header,
    seal,
)
from kept.storage.records.build import append_varint, iterate
from kept.storage.types import MAX_INT64, Codec, TimestampType
from tests.tools.needs import need

need("kernels")
compiled = importlib.import_module("kept.storage.records._kernel")

NOW = 1_700_000_000_000
LIMIT = 100_000
many = settings(
    max_examples=int(os.environ.get("KERNEL_EXAMPLES", "120")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)

timestamps = st.one_of(
    st.integers(NOW - 100, NOW + 100),
    st.sampled_from([-1, 0, -(2**63), MAX_INT64, NOW + 3_600_000, NOW + 3_600_001]),
    st.integers(-(2**63), MAX_INT64),
)
blobs = st.one_of(st.none(), st.binary(max_size=20), st.binary(min_size=60, max_size=300))
header_lists = st.lists(
    st.tuples(st.text(max_size=5), st.one_of(st.none(), st.binary(max_size=5))), max_size=3
)
rows = st.lists(st.tuples(timestamps, blobs, blobs, header_lists), min_size=1, max_size=12)
rule_sets = st.builds(
    CheckRules,
    compacted=st.booleans(),
    max_batch_bytes=st.sampled_from([1_048_588, 300]),
    max_inflated_bytes=st.sampled_from([LIMIT, 200]),
    timestamp_type=st.sampled_from(TimestampType),
    timestamp_before_max_ms=st.sampled_from([MAX_INT64, 50]),
    timestamp_after_max_ms=st.sampled_from([MAX_INT64, 3_600_000]),
    compression_type=st.sampled_from(["producer", "uncompressed", "lz4", "zstd"]),
)
FIELDS = ["data", "size_bytes", "record_count", "max_timestamp", "producer_id", "producer_epoch"]
FIELDS += ["base_sequence", "is_transactional", "codec", "rewritten"]


def outcome(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What came of it, in a form that can be compared."""
    try:
        result = function(*args, **kwargs)
    except KeptError as error:
        return type(error), str(error), getattr(error, "record_errors", None)
    if hasattr(result, "rewritten"):
        return [getattr(result, name) for name in FIELDS]
    if hasattr(result, "batch_index"):
        names = ["count", "batches", "offsets", "timestamps", "key_start", "key_length"]
        names += ["value_start", "value_length", "headers_start", "headers_length", "batch_index"]
        return [getattr(result, name) for name in names], bytes(result.data)
    return result


def agree(buf: bytes | bytearray, rules: CheckRules) -> None:
    assert outcome(compiled.check, buf, rules, NOW) == outcome(python.check, buf, rules, NOW)
    for check_crc in (True, False):
        options = {"inflate_limit": LIMIT, "check_crc": check_crc}
        assert outcome(compiled.scan, buf, **options) == outcome(python.scan, buf, **options)
    for position in (0, 1, 61, len(buf) - 1):
        assert outcome(compiled.check_replica, buf, position) == outcome(
            python.check_replica, buf, position
        )


def resealed(batch: bytearray) -> bytearray:
    """The batch with the CRC of what it now holds, so that the damage behind it is seen."""
    if len(batch) > 21:
        struct.pack_into(">I", batch, 17, crc32c(memoryview(batch)[21:]))
    return batch


@many
@given(rows, st.sampled_from(list(Codec)), rule_sets, st.integers(0, 2**40))
def test_good_batches(fields: Any, codec: Codec, rules: CheckRules, base_offset: int) -> None:
    batch = build_batch(fields, codec=codec, base_offset=base_offset)
    agree(batch, rules)
    expected = [
        (base_offset + i, timestamp, key, value, tuple(headers))
        for i, (timestamp, key, value, headers) in enumerate(fields)
    ]
    assert list(iterate(compiled.scan(batch))) == expected
    assert list(iterate(python.scan(batch))) == expected


@many
@given(st.data(), rows, st.sampled_from(list(Codec)), rule_sets)
def test_mutated_batches(data: st.DataObject, fields: Any, codec: Codec, rules: CheckRules) -> None:
    batch = bytearray(build_batch(fields, codec=codec))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(batch) - 1))
        match data.draw(st.integers(0, 3)):
            case 0:
                batch[position] = data.draw(st.integers(0, 255))
            case 1:
                batch[position] ^= 1 << data.draw(st.integers(0, 7))
            case 2:
                batch[position:position] = data.draw(st.binary(min_size=1, max_size=4))
            case _:
                del batch[position : position + data.draw(st.integers(1, 4))]
        if not batch:
            batch = bytearray(b"\x00")
    agree(batch, rules)
    if len(batch) >= 12 and data.draw(st.booleans()):
        struct.pack_into(">i", batch, 8, len(batch) - 12)
    agree(resealed(batch), rules)


@many
@given(rows, st.sampled_from(list(Codec)), st.data(), rule_sets)
def test_truncated_batches(fields: Any, codec: Codec, data: st.DataObject, rules: Any) -> None:
    batch = bytearray(build_batch(fields, codec=codec))
    del batch[data.draw(st.integers(0, len(batch) - 1)) :]
    agree(batch, rules)
    if len(batch) >= 12:
        struct.pack_into(">i", batch, 8, len(batch) - 12)
    agree(resealed(batch), rules)


@many
@given(st.binary(max_size=200), rule_sets)
def test_garbage(buf: bytes, rules: CheckRules) -> None:
    agree(buf, rules)


def varint(number: int) -> bytes:
    out = bytearray()
    append_varint(out, number)
    return bytes(out)


numbers = st.one_of(
    st.integers(-3, 12), st.sampled_from([2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63)])
)
pieces = st.one_of(numbers.map(varint), st.binary(max_size=3))


@many
@given(
    st.lists(st.tuples(numbers, st.lists(pieces, max_size=9), st.booleans()), max_size=5),
    st.integers(0, 4),
    st.sampled_from([Codec.NONE, Codec.LZ4]),
    rule_sets,
)
def test_records_put_together_at_random(
    parts: Any, count: int, codec: Codec, rules: CheckRules
) -> None:
    area = b""
    for claimed, fields, honest in parts:
        body = b"\x00" + b"".join(fields)
        area += varint(len(body) if honest else claimed) + body
    header = read_header(build_batch([(NOW, None, None, ())]))
    header.attributes = codec
    header.record_count, header.last_offset_delta = count, max(count - 1, 0)
    agree(seal(header, compress(codec, area)), rules)


@many
@given(st.lists(st.tuples(rows, st.sampled_from(list(Codec))), max_size=5), st.data())
def test_runs_of_batches(batches: Any, data: st.DataObject) -> None:
    buf = bytearray()
    for fields, codec in batches:
        buf += build_batch(fields, codec=codec, base_offset=len(buf))
    del buf[data.draw(st.integers(len(buf) // 2, len(buf))) :]
    agree(buf, CheckRules())


@many
@given(st.binary(max_size=20_000), st.integers(0, 9))
def test_crc(data: bytes, start: int) -> None:
    view = memoryview(data)[start:]
    assert compiled.crc32c(view) == compiled.crc32c_software(view) == python.crc32c(view)
    for function in (compiled.crc32c, python.crc32c):
        assert function(view, function(data[:start])) == function(data)


def test_crc_of_every_length_around_the_lanes() -> None:
    data = bytes(range(256)) * 60
    lengths = [*range(900), *range(6_100, 7_000), *range(12_200, 12_400)]
    for length in lengths:
        part = memoryview(data)[length % 7 : length % 7 + length]
        assert compiled.crc32c(part) == compiled.crc32c_software(part)


def test_crc_of_known_data() -> None:
    for function in (compiled.crc32c, compiled.crc32c_software, python.crc32c):
        assert function(b"123456789") == 0xE3069283
        assert function(bytes(32)) == 0x8A9136AA
        assert function(b"") == 0


@pytest.mark.slow
def test_at_length() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    environ = {**os.environ, "KERNEL_EXAMPLES": "600"}
    done = subprocess.run([*command, __file__], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
