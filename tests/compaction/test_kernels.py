"""The kernels and their references: the offset map, the scan of a segment, the record filter."""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kept.compaction.kernels import kernel
from kept.compaction.kernels.kernel import LOOKUP, MAP, STATS
from kept.storage.records import build_batch, headers, read_header, records
from kept.storage.records import filter as records_filter
from kept.storage.records.filter import DAMAGED, canonical_header, compressed_batch
from kept.storage.types import Codec, TimestampType
from tests.reference import offset_map
from tests.reference.segment_filter import SegmentFilter
from tests.tools.needs import need

KEY = bytes(range(16))


@pytest.fixture
def fast(kit):
    need("kernels")
    return kit.cython


# The hash.


def python_siphash128(key, data):
    """SipHash-2-4-128 as its paper describes it."""
    mask = (1 << 64) - 1
    k0, k1 = (int.from_bytes(key[i : i + 8], "little") for i in (0, 8))
    v = [
        k0 ^ 0x736F6D6570736575,
        k1 ^ 0x646F72616E646F6D ^ 0xEE,
        k0 ^ 0x6C7967656E657261,
        k1 ^ 0x7465646279746573,
    ]

    def rotate(x, bits):
        return (x << bits | x >> (64 - bits)) & mask

    def rounds(n):
        for _ in range(n):
            v[0] = (v[0] + v[1]) & mask
            v[1] = rotate(v[1], 13) ^ v[0]
            v[0] = rotate(v[0], 32)
            v[2] = (v[2] + v[3]) & mask
            v[3] = rotate(v[3], 16) ^ v[2]
            v[0] = (v[0] + v[3]) & mask
            v[3] = rotate(v[3], 21) ^ v[0]
            v[2] = (v[2] + v[1]) & mask
            v[1] = rotate(v[1], 17) ^ v[2]
            v[2] = rotate(v[2], 32)

    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) & 0xFF])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xEE
    rounds(4)
    low = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(4)
    return low.to_bytes(8, "little") + (v[0] ^ v[1] ^ v[2] ^ v[3]).to_bytes(8, "little")


def test_siphash_has_the_reference_vectors(fast):
    """From the authors' vectors.h, key 00..0f, inputs 00, 00 01, ..."""
    maps, _ = fast
    assert maps.siphash128(KEY, b"").hex() == "a3817f04ba25a8e66df67214c7550293"
    assert maps.siphash128(KEY, bytes(range(15))).hex() == "5493e99933b0a8117e08ec0f97cfc3d9"
    draw = random.Random(3)
    for size in range(70):
        key, data = draw.randbytes(16), draw.randbytes(size)
        assert maps.siphash128(key, data) == python_siphash128(key, data)


@pytest.mark.usefixtures("each_kernel")
def test_nobody_can_aim_at_a_slot_without_the_key():
    """Keys that share a slot under one hash key do not under another (a fresh one per pass)."""
    keys = [b"key-%d" % i for i in range(2000)]

    def order(hash_key):
        found = kernel.OffsetMap(64, 0.9, hash_key)
        found.clear(0)
        taken = [key for i, key in enumerate(keys) if found.put(key, i)]
        return taken, [found.get(key) for key in keys]

    assert order(KEY)[1] == order(bytes(16))[1], "content does not depend on the hash key"
    tags = set()
    for hash_key in (KEY, bytes(16)):
        source = offset_map.OffsetMap(1 << 16, 0.9, hash_key)
        source.clear(0)
        tags.add(tuple(source._find(key)[0] for key in keys[:50]))
    assert len(tags) == 2


# The offset map.


@pytest.mark.usefixtures("each_kernel")
@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=150),
    st.integers(2, 60),
    st.integers(0, 1 << 45),
)
def test_offset_map_is_a_bounded_dictionary(steps, slots, base):
    found = kernel.OffsetMap(slots, 0.9, KEY)
    assert found.size_bytes == 16 * slots
    assert found.capacity == min(int(slots * 0.9), slots - 1)
    found.clear(base)
    model, offset = {}, base
    for number, gap in steps:
        key = b"%d" % number
        fits = key in model or len(model) < found.capacity
        assert found.put(key, offset) is fits
        if fits:
            model[key] = offset
        offset += gap
    assert found.size == len(model)
    for number in range(41):
        assert found.get(b"%d" % number) == model.get(b"%d" % number, -1)
    found.finish()
    winners = sorted(model.values())
    middle = winners[len(winners) // 2] if winners else base
    assert [base + r for r in found.winners(base, middle)] == [w for w in winners if w < middle]
    assert [middle + r for r in found.winners(middle, offset + 1)] == [
        w for w in winners if w >= middle
    ]
    found.clear(base)
    assert found.size == 0 and found.get(b"1") == -1


@pytest.mark.usefixtures("each_kernel")
def test_offset_map_refuses_what_40_bits_do_not_hold():
    found = kernel.OffsetMap(10, 0.9, KEY)
    found.clear(100)
    assert found.put(b"a", 100 + (1 << 40) - 2)
    assert not found.put(b"b", 100 + (1 << 40) - 1)
    with pytest.raises(ValueError, match="base"):
        found.put(b"c", 99)
    with pytest.raises(ValueError, match="16 bytes"):
        kernel.OffsetMap(10, 0.9, b"short")


@pytest.mark.parametrize("keys", [10, 1000, 123_456])
def test_a_key_costs_at_most_20_bytes_at_any_size(fast, keys):
    maps, _ = fast
    slots = int(keys / 0.9) + 2
    found = maps.OffsetMap(slots, 0.9, KEY)
    found.clear(0)
    for i in range(keys):
        assert found.put(i.to_bytes(4), i)
    if keys >= 1000:
        assert found.size_bytes / keys <= 20


# Scanning.


def make_log(draw, count=30, gaps=True):
    """Random batches as the log holds them, perhaps cleaned before; returns the bytes."""
    out, offset = b"", 0
    for _ in range(count):
        size = draw.randrange(1, 6)
        codec = draw.choice(list(Codec)) if draw.random() < 0.4 else Codec.NONE
        rows, offsets = [], []
        for i in range(size):
            if gaps and draw.random() < 0.3:
                continue
            key = draw.choice([None, b"", b"a", b"b", b"c" * 300, b"%d" % draw.randrange(9)])
            value = draw.choice([None, b"", b"v" * draw.randrange(200)])
            heads = (("h", b"1"), ("n", None)) if draw.random() < 0.2 else ()
            rows.append((1000 + draw.randrange(-500, 500), key, value, heads))
            offsets.append(offset + i)
        horizon = draw.choice([None, None, 500, 5000])
        out += build_batch(
            rows,
            base_offset=offset,
            offsets=offsets,
            last_offset=offset + size - 1,
            codec=codec if rows else Codec.NONE,
            delete_horizon_ms=horizon if rows else None,
            producer_id=draw.choice([-1, 3]),
            leader_epoch=draw.randrange(3),
            timestamp_type=TimestampType(draw.randrange(2)),
        )
        offset += size + (draw.choice([0, 0, 2]) if gaps else 0)
    return out


def scan_all(maps, data, **options):
    """Run a scan over data, compressed batches included; returns its facts as plain values."""
    found = maps.SegmentScan(0, **options)
    at = 0
    while at < len(data):
        at += found.feed(memoryview(data)[at : at + 5000])
        if found.fault is not None:
            return found.fault, at
        if found.special:
            header = read_header(data, at)
            body = data[at + 61 : at + header.size_bytes]
            if header.codec:
                from kept.storage.records import decompress

                body = decompress(header.codec, body, 1 << 20)
            found.feed_batch(data[at : at + 61], body, header.base_offset % 3 == 0)
            at += header.size_bytes
    names = ("runs", "tombstones", "expired", "keyless", "aborted", "kept", "empties", "bare")
    facts = {name: getattr(found, name)().tolist() for name in names}
    runs = facts["runs"]
    facts["runs"] = [o for a, b in zip(runs[::2], runs[1::2], strict=True) for o in range(a, b + 1)]
    facts["horizons"] = found.horizons()
    for name in ("records", "batches", "full_at", "next_offset"):
        facts[name] = getattr(found, name)
    return facts


@pytest.mark.parametrize("seed", range(40))
def test_both_kernels_scan_alike(fast, seed):
    maps, _ = fast
    draw = random.Random(seed)
    data = make_log(draw)
    end = max(h.next_offset for _, h in headers(data))
    producers = array("q", sorted({draw.randrange(end) for _ in range(5)}))
    pairs = array("q", [value for last in producers for value in (last, 3)])
    slots = draw.randrange(2, 40)
    first = draw.randrange(end)
    survivors = array("I", sorted(draw.sample(range(end), end // 2)))
    results = []
    for module in (maps, offset_map):
        offsets = module.OffsetMap(slots, 0.9, KEY)
        offsets.clear(first)
        common = {"now_ms": 1000, "producers": pairs, "uncleanable": end}
        mapped = scan_all(module, data, mode=MAP, map=offsets, first=first, **common)
        looked = scan_all(
            module,
            data,
            mode=LOOKUP,
            map=offsets,
            first=2,
            last=first,
            survivors=survivors,
            **common,
        )
        facts = scan_all(module, data, mode=STATS, **common)
        offsets.finish()
        results.append((mapped, looked, facts, offsets.winners(first, end).tolist()))
    assert results[0] == results[1]
    present = [r.offset for r in records(data)]
    assert results[0][2]["runs"] == present


@pytest.mark.parametrize("seed", range(60))
def test_damage_is_told_alike_or_survived(fast, seed):
    """Any flipped byte is told at the batch that has it: by the CRC, or by its framing."""
    maps, _ = fast
    draw = random.Random(seed)
    data = bytearray(make_log(draw, gaps=False))
    starts = [at for at, _ in headers(data)]
    at = draw.randrange(len(data))
    start = max(s for s in starts if s <= at)
    if at - start < 16 and at - start not in (8, 9, 10, 11):
        at = start + 20
    data[at] ^= 1 << draw.randrange(8)
    for module in (maps, offset_map):
        found = module.SegmentScan(0, now_ms=0)
        used, view = 0, memoryview(data)
        while used < len(data) and found.fault is None:
            step = found.feed(view[used:])
            used += step
            if found.special:
                header = read_header(data, used)
                found.skip(header.base_offset, header.next_offset, header.size_bytes, False)
                used += header.size_bytes
            elif not step:
                break
        assert used <= start or found.fault is not None
        assert used == start or (at - start < 12 and used <= start + 12)


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize(
    ("offsets", "fault"), [([0, 2, 1], "ascend"), ([0, 0], "ascend"), ([0, 1, 9], "ascend")]
)
def test_offsets_that_do_not_ascend_are_damage(offsets, fault):
    rows = [(1, b"k", b"v", ())] * len(offsets)
    data = build_batch(rows, offsets=offsets, last_offset=5)
    found = kernel.SegmentScan(0)
    found.feed(data)
    assert fault in found.fault


# Filtering.


def filter_all(make, data, survivors, *, empties=(), horizons=(), limit=1 << 40):
    """Run a filter over data; returns [(base, output, index, time index, digest headers)]."""
    done = []
    f = make(interval_bytes=300, limit_bytes=limit, index_limit_bytes=1 << 20)
    f.open_output(0)
    firsts = array("I", [first for first, _ in horizons])
    values = array("q", [value for _, value in horizons])
    f.open_source(0, array("I", survivors), array("I", empties), firsts, values)
    at, base, out, digest = 0, 0, b"", b""

    def close():
        nonlocal out, digest
        done.append((base, out + f.drain(), f.index(), f.time_index(), digest + f.drain_headers()))
        out = digest = b""

    while at < len(data):
        at += f.feed(memoryview(data)[at:])
        assert f.fault is None
        full = f.stop == records_filter.FULL
        if f.stop == records_filter.COMPRESSED:
            header = read_header(data, at)
            batch = data[at : at + header.size_bytes]
            full = not compressed_batch(f, batch, header.codec, 1 << 20)
            at += 0 if full else header.size_bytes
        if full:
            close()
            base = f.next_base
            f.open_output(base)
    close()
    return done


@pytest.mark.parametrize("seed", range(60))
def test_both_filters_write_alike_and_right(fast, seed):
    _, fast_filter = fast
    draw = random.Random(seed)
    data = make_log(draw)
    there = list(records(data))
    survivors = sorted(r.offset for r in there if draw.random() < draw.choice([0.1, 0.5, 0.95]))
    batches = [h for _, h in headers(data)]
    alive = {
        h.base_offset: [o for o in survivors if h.base_offset <= o <= h.last_offset]
        for h in batches
    }
    empties = [h.base_offset for h in batches if not alive[h.base_offset] and draw.random() < 0.5]
    horizons = [
        (h.base_offset, draw.choice([7, 10**13]))
        for h in batches
        if alive[h.base_offset] and not h.has_delete_horizon and draw.random() < 0.3
    ]
    limit = draw.choice([1 << 40, 1500])
    results = [
        filter_all(make, data, survivors, empties=empties, horizons=horizons, limit=limit)
        for make in (fast_filter, SegmentFilter)
    ]
    assert results[0] == results[1]
    output = b"".join(part[1] for part in results[0])
    assert [r[:] for r in records(output)] == [r[:] for r in there if r.offset in set(survivors)]
    made = {h.base_offset: h for _, h in headers(output)}
    assert sorted(made) == sorted(b for b in alive if alive[b] or b in empties)
    for old in batches:
        new = made.get(old.base_offset)
        if new is None:
            continue
        assert new.last_offset == old.last_offset and new.producer_id == old.producer_id
        assert new.partition_leader_epoch == old.partition_leader_epoch
        expected = dict(horizons).get(old.base_offset, old.delete_horizon_ms)
        if alive[old.base_offset]:
            assert new.delete_horizon_ms == (expected if new.has_delete_horizon else -1)
            assert new.codec == old.codec
    if limit == 1500:
        assert all(len(part[1]) <= 1500 or len(list(headers(part[1]))) == 1 for part in results[0])


@pytest.mark.parametrize("at", [61, 100, -1])
@pytest.mark.parametrize("checks", [True, False])
def test_a_damaged_batch_is_noticed_where_nobody_has_read_it(fast, at, checks):
    """Only if it has survivors: what goes is not looked at."""
    _, fast_filter = fast
    data = bytearray(build_batch([(5, b"k", b"v" * 100, ())], base_offset=0))
    data[at] ^= 1
    for make in (fast_filter, SegmentFilter):
        for survivors in ([0], []):
            filter_ = make(
                interval_bytes=1, limit_bytes=1 << 20, index_limit_bytes=1 << 20, check_crc=checks
            )
            filter_.open_output(0)
            none = array("I")
            filter_.open_source(0, array("I", survivors), none, none, array("q"))
            filter_.feed(bytes(data))
            if checks and survivors:
                assert (filter_.stop, filter_.fault) == (DAMAGED, "wrong CRC")
            elif not survivors:
                assert filter_.fault is None


def test_digest_headers_do_not_depend_on_the_codec():
    rows = [(5, b"k", b"v" * 100, ())] * 3
    plain = build_batch(rows)
    for codec in (Codec.GZIP, Codec.LZ4, Codec.SNAPPY, Codec.ZSTD):
        packed = build_batch(rows, codec=codec)
        assert canonical_header(packed, plain[61:]) == plain[:61]


def test_the_filter_agrees_with_the_check_of_produce():
    """Whatever it rewrites passes the check of a replica."""
    from kept.storage.records import check_replica

    draw = random.Random(8)
    data = make_log(draw)
    survivors = [r.offset for r in records(data) if r.offset % 3]
    (part,) = filter_all(SegmentFilter, data, survivors)
    for at, _ in headers(part[1]):
        check_replica(part[1], at)
