"""The hand-written Produce codec against kio, every version."""

from __future__ import annotations

import struct
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.node.kafka.codec import produce as codec
from kept.steps import run_to_end
from kept.storage.errors import CorruptMessage
from tests.reference import produce_runs

try:
    from kept.node.kafka.codec import _codec
except ImportError:
    PARSE = {"python": codec.parse}
    KERNELS = {"python": produce_runs}
else:
    PARSE = {"python": codec.parse, "cython": _codec.parse_produce}
    KERNELS = {"python": produce_runs, "cython": _codec}
PARSER = pytest.mark.parametrize("parse", PARSE.values(), ids=PARSE)
KERNEL = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
VERSIONS = range(codec.MIN_VERSION, codec.MAX_VERSION + 1)
TOPIC_ID = uuid.UUID("12345678-1234-5678-1234-567812345678")


def encode(version, correlation_id, topics):
    return run_to_end(codec.encode_steps(version, correlation_id, topics))


def request_body(
    version, *, topics=(("orders", ((0, b"abc"), (3, b"x" * 300))),), txn=None, acks=1
):
    cls = protocol.message_type(0, version, EntityType.request)
    data = [
        {
            "name": name,
            "topic_id": TOPIC_ID,
            "partition_data": [{"index": i, "records": r} for i, r in partitions],
        }
        for name, partitions in topics
    ]
    values = {"transactional_id": txn, "acks": acks, "timeout": 1500, "topic_data": data}
    return protocol.encode(protocol.build(cls, values))


@PARSER
@pytest.mark.parametrize("version", VERSIONS)
def test_parses_what_kio_writes(parse, version):
    body = b"head" + request_body(version, txn="tx", acks=-1)
    request = parse(memoryview(body), 4, version)
    assert (request.transactional_id, request.acks, request.timeout_ms) == (b"tx", -1, 1500)
    ((name, partitions),) = request.topics
    assert name == (TOPIC_ID.bytes if version >= 13 else b"orders")
    found = [(p.partition, body[p.start : p.end]) for p in partitions]
    assert found == [(0, b"abc"), (3, b"x" * 300)]


@PARSER
@pytest.mark.parametrize("version", VERSIONS)
def test_null_records_and_no_transaction(parse, version):
    body = request_body(version, topics=(("t", ((7, None),)),))
    request = parse(memoryview(body), 0, version)
    assert request.transactional_id is None
    assert request.topics[0][1] == [codec.PartitionData(7, -1, -1)]


@PARSER
@pytest.mark.parametrize("version", VERSIONS)
def test_every_cut_and_every_tail_is_refused(parse, version):
    body = request_body(version)
    for end in range(len(body)):
        with pytest.raises(CorruptMessage):
            parse(memoryview(body)[:end], 0, version)
    with pytest.raises(CorruptMessage):
        parse(memoryview(body + b"\0"), 0, version)


@given(st.binary(max_size=200), st.sampled_from(list(VERSIONS)))
def test_any_bytes_parse_or_are_refused_by_both_alike(data, version):
    found = []
    for parse in PARSE.values():
        try:
            request = parse(memoryview(data), 0, version)
        except CorruptMessage:
            request = None
        found.append(request)
    assert all(request == found[0] for request in found)
    for _, partitions in found[0].topics if found[0] is not None else ():
        for part in partitions:
            assert part.start == -1 or 0 <= part.start <= part.end <= len(data)


@pytest.mark.parametrize("version", VERSIONS)
def test_response_is_what_kio_reads(version):
    results = [
        codec.PartitionResult(0, 0, 42, 1_700_000_000_123, 7),
        codec.PartitionResult(1, 87, record_errors=((2, "no key"), (5, "late")), error_message="é"),
    ]
    name = TOPIC_ID.bytes if version >= 13 else b"orders"
    frame = encode(version, 99, [(name, results), (name, results[:1])])
    (size,) = struct.unpack_from(">i", frame)
    assert size == len(frame) - 4
    correlation_id, response = protocol.decode_response(0, version, frame[4:])
    assert correlation_id == 99
    topic = response.responses[0]
    assert (topic.topic_id == TOPIC_ID) if version >= 13 else (topic.name == "orders")
    good, bad = topic.partition_responses
    assert (good.index, int(good.error_code), good.base_offset) == (0, 0, 42)
    assert round(good.log_append_time.timestamp() * 1000) == 1_700_000_000_123
    assert (bad.index, int(bad.error_code), bad.base_offset) == (1, 87, -1)
    assert bad.log_append_time is None
    if version >= 5:
        assert (good.log_start_offset, bad.log_start_offset) == (7, -1)
    if version >= 8:
        errors = [(e.batch_index, e.batch_index_error_message) for e in bad.record_errors]
        assert (errors, bad.error_message) == ([(2, "no key"), (5, "late")], "é")
        assert (good.record_errors, good.error_message) == ((), None)


@pytest.mark.parametrize("version", VERSIONS)
def test_response_bytes_are_kio_s_bytes(version):
    values = {
        "responses": [
            {
                "name": "orders",
                "topic_id": TOPIC_ID,
                "partition_responses": [
                    {
                        "index": 4,
                        "error_code": 0,
                        "base_offset": 5,
                        "log_append_time": -1,
                        "log_start_offset": 2,
                        "record_errors": (),
                    }
                ],
            }
        ]
    }
    name = TOPIC_ID.bytes if version >= 13 else b"orders"
    ours = encode(version, 1, [(name, [codec.PartitionResult(4, 0, 5, -1, 2)])])
    assert ours == protocol.encode_response(0, version, 1, values)


@KERNEL
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["t", "n" * 126])
def test_one_partition_has_the_same_bytes(kernel, version, name):
    encoded = TOPIC_ID.bytes if version >= 13 else name.encode()
    full = encode(version, 7, [(encoded, [codec.PartitionResult(3, 0, 1 << 40, 1 << 41, 17)])])
    one = (version, 7, 1, 1500, encoded, 3, 0, 0)
    assert kernel.encode_run([(one, None, (1 << 40, 0, 1 << 41, 17))]) == full


BATCH = bytes(range(1, 62))
"""What looks like a batch's header to the short way: byte 22 has neither codec nor transaction."""
PLAIN = BATCH[:22] + b"\0" + BATCH[23:]


def whole_request(version, client=b"me", key=0, **fields):
    fields.setdefault("topics", (("orders", ((3, PLAIN),)),))
    name = struct.pack(">h", -1) if client is None else struct.pack(">h", len(client)) + client
    tags = b"\0" if version >= codec.FLEXIBLE else b""
    return struct.pack(">hhi", key, version, 77) + name + tags + request_body(version, **fields)


def one_of(kernel, buffer, start, stop):
    """The request in ``buffer[start:stop]``, as the first and last frame of a run."""
    size = stop - start
    frame = struct.pack(">i", size) + bytes(buffer[start:stop])
    found = kernel.parse_run(frame, 0, size + 4, 9, 1, size)
    if not found:
        return None
    ((*numbers, begin, end),) = found
    return (*numbers, begin + start - 4, end + start - 4)


@KERNEL
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("client", [None, b"", b"me" * 100])
@pytest.mark.parametrize("size", [61, 100, 20_000])
def test_the_short_way_reads_what_the_long_one_does(kernel, version, client, size):
    data = PLAIN + b"r" * (size - len(PLAIN))
    request = whole_request(version, client, topics=(("orders", ((3, data),)),), acks=-1)
    buffer = bytearray(b"before" + request + b"after")
    found = one_of(kernel, buffer, 6, 6 + len(request))
    name = TOPIC_ID.bytes if version >= 13 else b"orders"
    assert found[:6] == (version, 77, -1, 1500, name, 3)
    assert buffer[found[6] : found[7]] == data


@KERNEL
@pytest.mark.parametrize("version", VERSIONS)
def test_the_short_way_leaves_all_others_to_the_long_one(kernel, version):
    def found(request):
        return one_of(kernel, request, 0, len(request))

    transactional = bytearray(PLAIN)
    transactional[22] = 16
    large = bytearray(PLAIN + b"x" * codec.IN_THREAD_BYTES)
    assert found(whole_request(version, topics=(("t", ((0, bytes(large)),)),)))
    large[22] = 3
    zstd = bytearray(PLAIN)
    zstd[22] = 4
    known = found(whole_request(version, topics=(("t", ((0, bytes(zstd)),)),)))
    assert bool(known) == (version >= 7)
    others = [
        whole_request(version, key=1),
        whole_request(version, acks=0),
        whole_request(version, acks=2),
        whole_request(version, txn="t"),
        whole_request(version, topics=(("t", ((0, None),)),)),
        whole_request(version, topics=(("t", ((0, PLAIN[:60]),)),)),
        whole_request(version, topics=(("t", ((0, bytes(transactional)),)),)),
        whole_request(version, topics=(("t", ((0, bytes(large)),)),)),
        whole_request(version, topics=(("t", ((0, PLAIN), (1, PLAIN))),)),
        whole_request(version, topics=(("t", ((0, PLAIN),)), ("u", ((0, PLAIN),)))),
        whole_request(version, topics=()),
        whole_request(version) + b"\0",
        *([] if version >= 13 else [whole_request(version, topics=(("n" * 127, ((0, PLAIN),)),))]),
    ]
    assert [found(request) for request in others] == [None] * len(others)
    request = whole_request(version)
    cut = [one_of(kernel, request, 0, end) for end in range(len(request))]
    assert cut == [None] * len(request)
    if version >= codec.FLEXIBLE:
        tagged = bytearray(request)
        tagged[-1:] = b"\x01\x00\x01x"
        assert codec.parse(memoryview(tagged)[13:], 0, version).topics  # right, and rare
        assert found(tagged) is None


@given(st.binary(max_size=120), st.sampled_from(list(VERSIONS)), st.integers(0, 130))
def test_the_short_way_of_both_is_the_same_for_any_bytes(noise, version, at):
    request = whole_request(version)
    spoiled = request[:at] + noise + request[at + len(noise) :]
    for data in (spoiled, struct.pack(">hh", 0, version) + noise):
        found = [one_of(kernel, data, 0, len(data)) for kernel in KERNELS.values()]
        assert all(one == found[0] for one in found)


@KERNEL
@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_of_frames_ends_with_the_first_of_another_kind(kernel, version):
    def framed(request):
        return struct.pack(">i", len(request)) + request

    plain = framed(whole_request(version))
    n = len(plain)
    data = b"xy" + plain * 3
    found = kernel.parse_run(data, 2, len(data), 9, 1 << 20, n)
    assert [codec.frame_end(one) for one in found] == [2 + n, 2 + 2 * n, 2 + 3 * n]
    assert {data[start:end] for *_, start, end in found} == {PLAIN}

    def count(data, frames=9, size=1 << 20, end=None, longest=n):
        end = len(data) if end is None else end
        return len(kernel.parse_run(data, 0, end, frames, size, longest))

    several = plain * 4
    assert [count(several, frames) for frames in (0, 1, 3, 9)] == [0, 1, 3, 4]
    assert [count(several, size=size) for size in (0, 1, n, n + 1)] == [0, 1, 1, 2]
    assert [count(several, end=end) for end in (0, 3, n - 1, n, 2 * n + 5)] == [0, 0, 0, 1, 2]
    larger = framed(whole_request(version, client=b"longer"))
    for longest, frames in ((len(larger) - 4, 3), (len(larger) - 5, 1)):
        assert count(plain + larger + plain, longest=longest) == frames
    other = framed(whole_request(version, acks=0))
    assert count(plain * 2 + other + plain) == 2
    for size in (-1, 0, 2**31 - 1):
        assert count(plain + struct.pack(">i", size) + plain) == 1


@KERNEL
def test_a_run_has_the_bytes_of_its_responses(kernel):
    entries, frames = [], []
    for version in VERSIONS:
        name = TOPIC_ID.bytes if version >= 13 else b"orders"
        one = (version, version * 7, 1, 1500, name, 2, 0, 0)
        info = (1 << 40, (1 << 40) + 5, -1, 12, False)
        entries.append((one, None, info))
        result = codec.PartitionResult(2, 0, 1 << 40, -1, 12)
        frames.append(encode(version, version * 7, [(name, [result])]))
    assert kernel.encode_run(entries) == b"".join(frames)
