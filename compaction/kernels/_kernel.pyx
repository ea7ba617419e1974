# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""The loops of a survey in C, GIL released for a whole chunk. ``offset_map.py`` is the
specification: the same classes in plain Python, under the same tests."""

from array import array

from cpython.bytes cimport PyBytes_AsString, PyBytes_Size
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

from compaction.kernels._chunk cimport (
    HEADER, SPECIAL, Watched, Words, as_array, attach, frame, kept_prefetch, kept_scale,
    kept_siphash128, kept_table_free, kept_table_new, note, push,
)
from storage.records._wire cimport be32, be64, read_varint32, read_varint64

KERNEL = "cython"

cdef enum:
    BLOCK = 256  # keys hashed, and their slots prefetched, before the first of them is looked at
    STATS_ = 0
    MAP_ = 1
    LOOKUP_ = 2

STATS, MAP, LOOKUP = STATS_, MAP_, LOOKUP_

cdef uint64_t OFFSET_BITS = 0xFFFFFFFFFF  # 40 bits: offset - base of the map + 1, 0 for a free slot
cdef uint64_t TAG_BITS = 0xFFFFFF

cdef struct Slot:
    uint64_t tag
    uint64_t rest  # 24 more bits of the tag, 40 of the offset


cdef class OffsetMap:
    cdef Slot *table
    cdef size_t table_bytes
    cdef uint64_t k0, k1
    cdef readonly uint64_t slots, capacity, size
    cdef readonly int64_t base_offset
    cdef uint64_t sorted_count
    cdef bint finished

    def __cinit__(self, uint64_t slots, double load_factor, bytes key not None):
        if len(key) != 16:
            raise ValueError("the hash key has 16 bytes")
        cdef const uint8_t *raw = <const uint8_t *>PyBytes_AsString(key)
        memcpy(&self.k0, raw, 8)
        memcpy(&self.k1, raw + 8, 8)
        self.slots = slots
        self.capacity = min(<uint64_t>(slots * load_factor), slots - 1) if slots else 0
        self.table_bytes = max(slots * sizeof(Slot), 64)
        self.table = <Slot *>kept_table_new(self.table_bytes)
        if self.table == NULL:
            raise MemoryError(f"offset map of {slots} slots")

    def __dealloc__(self):
        kept_table_free(self.table, self.table_bytes)

    @property
    def size_bytes(self):
        return self.slots * sizeof(Slot)

    def clear(self, int64_t base_offset):
        if self.size or self.finished:
            memset(self.table, 0, self.slots * sizeof(Slot))
        self.size = 0
        self.finished = False
        self.base_offset = base_offset

    cdef inline Slot *slot(self, uint64_t low) noexcept nogil:
        return self.table + kept_scale(low, self.slots)

    cdef inline Slot *find(self, uint64_t low, uint64_t high) noexcept nogil:
        """The slot of a key, or the free one where it belongs."""
        cdef Slot *slot = self.slot(low)
        cdef Slot *end = self.table + self.slots
        cdef uint64_t tag = low & TAG_BITS
        while slot.rest & OFFSET_BITS:
            if slot.tag == high and slot.rest >> 40 == tag:
                break
            slot += 1
            if slot == end:
                slot = self.table
        return slot

    cdef inline int put_hash(self, uint64_t low, uint64_t high, int64_t offset) noexcept nogil:
        """1 stored, 0 full."""
        cdef Slot *slot = self.find(low, high)
        cdef uint64_t relative = <uint64_t>(offset - self.base_offset) + 1
        if relative > OFFSET_BITS:
            return 0
        if not slot.rest & OFFSET_BITS:
            if self.size >= self.capacity:
                return 0
            self.size += 1
            slot.tag = high
        slot.rest = (low & TAG_BITS) << 40 | relative
        return 1

    def put(self, bytes key not None, int64_t offset):
        cdef uint64_t low, high
        if self.finished or offset < self.base_offset:
            raise ValueError("the map is finished, or the offset lies below its base")
        kept_siphash128(self.k0, self.k1, <const uint8_t *>PyBytes_AsString(key),
                        PyBytes_Size(key), &low, &high)
        return bool(self.put_hash(low, high, offset))

    def get(self, bytes key not None):
        cdef uint64_t low, high
        if self.finished:
            raise ValueError("the map is finished")
        kept_siphash128(self.k0, self.k1, <const uint8_t *>PyBytes_AsString(key),
                        PyBytes_Size(key), &low, &high)
        cdef uint64_t relative = self.find(low, high).rest & OFFSET_BITS if self.slots else 0
        return <int64_t>relative - 1 + self.base_offset if relative else -1

    def finish(self):
        """Turn the map into its sorted offsets, in place: no key can be looked up after that."""
        cdef uint64_t i, n = 0, relative, largest = 0
        cdef uint64_t *packed = <uint64_t *>self.table
        if self.finished:
            return
        with nogil:
            for i in range(self.slots):
                relative = self.table[i].rest & OFFSET_BITS
                if relative:
                    packed[n] = relative - 1
                    if relative > largest:
                        largest = relative
                    n += 1
            self.sort(packed, packed + self.slots, n, largest)
        self.sorted_count = n
        self.finished = True

    cdef void sort(self, uint64_t *items, uint64_t *spare, uint64_t n,
                   uint64_t largest) noexcept nogil:
        """Radix sort, 11 bits a step; ``spare`` is the other half of the table."""
        cdef uint64_t count[2048]
        cdef uint64_t i, place, total
        cdef int shift = 0
        cdef uint64_t *source = items
        cdef uint64_t *target = spare
        while largest >> shift:
            memset(count, 0, sizeof(count))
            for i in range(n):
                count[source[i] >> shift & 2047] += 1
            total = 0
            for i in range(2048):
                place = count[i]
                count[i] = total
                total += place
            for i in range(n):
                place = source[i] >> shift & 2047
                target[count[place]] = source[i]
                count[place] += 1
            source, target = target, source
            shift += 11
        if source != items:
            memcpy(items, source, n * 8)

    def winners(self, int64_t low, int64_t high):
        """Offsets in ``low..high`` of the finished map, relative to ``low``, ascending."""
        if not self.finished:
            raise ValueError("the map is not finished")
        cdef uint64_t *packed = <uint64_t *>self.table
        cdef uint64_t first = self.lower(low - self.base_offset)
        cdef uint64_t last = self.lower(high - self.base_offset)
        cdef int64_t shift = self.base_offset - low
        cdef uint64_t i
        cdef uint32_t[::1] view
        found = array("I", bytes(4 * (last - first)))
        if last > first:
            view = found
            for i in range(first, last):
                view[i - first] = <uint32_t>(<int64_t>packed[i] + shift)
        return found

    cdef uint64_t lower(self, int64_t relative) noexcept nogil:
        cdef uint64_t *packed = <uint64_t *>self.table
        cdef uint64_t low = 0, high = self.sorted_count, middle
        if relative <= 0:
            return 0
        while low < high:
            middle = (low + high) >> 1
            if packed[middle] < <uint64_t>relative:
                low = middle + 1
            else:
                high = middle
        return low


cdef class SegmentScan:
    cdef readonly int64_t base_offset, first, last, full_at, records, next_offset, uncleanable
    cdef readonly int64_t size_bytes, batches
    cdef readonly bint special
    cdef readonly object fault
    cdef int mode
    cdef int64_t now_ms
    cdef OffsetMap map
    cdef Words runs_, tombstones_, expired_, keyless_, kept_, aborted_, horizons_, empties_, bare_
    cdef list horizon_values
    cdef Words horizon_of_
    cdef const uint32_t[::1] survivors
    cdef bint filtered
    cdef size_t cursor
    cdef const int64_t[::1] producers
    cdef size_t producer_count
    cdef uint32_t run_start, run_end
    cdef bint in_run
    cdef int64_t last_horizon
    cdef const char *why
    cdef Watched watched
    cdef object watch
    cdef uint64_t low[BLOCK]
    cdef uint64_t high[BLOCK]
    cdef int64_t offset[BLOCK]
    cdef uint8_t flags[BLOCK]
    cdef int block

    def __cinit__(self, int64_t base_offset, *, int mode=0, OffsetMap map=None, int64_t first=0,
                  int64_t last=0x7FFFFFFFFFFFFFFF, survivors=None, int64_t now_ms=0,
                  producers=None, int64_t uncleanable=-1, watch=None):
        self.base_offset = base_offset
        self.next_offset = base_offset
        self.mode = mode
        self.map = map
        if mode != STATS_ and map is None:
            raise ValueError("this mode needs a map")
        self.watch = watch
        if watch is not None:
            attach(&self.watched, watch, map.k0, map.k1)
        self.first, self.last = first, last
        self.full_at = -1
        self.now_ms = now_ms
        self.uncleanable = uncleanable
        self.filtered = survivors is not None
        if self.filtered and len(survivors):
            self.survivors = survivors
        self.producer_count = 0
        if producers is not None and len(producers):
            self.producers = producers
            self.producer_count = len(producers) // 2
        self.horizon_values = []
        self.last_horizon = -1

    def __dealloc__(self):
        free(self.runs_.at)
        free(self.tombstones_.at)
        free(self.expired_.at)
        free(self.keyless_.at)
        free(self.kept_.at)
        free(self.aborted_.at)
        free(self.horizons_.at)
        free(self.empties_.at)
        free(self.bare_.at)
        free(self.horizon_of_.at)

    def feed(self, data):
        """Read whole batches from the start of ``data``; returns how many bytes."""
        cdef const uint8_t[::1] view = data
        cdef Py_ssize_t size = view.shape[0]
        cdef int64_t used = 0
        self.special = False
        if size < HEADER:
            return 0
        with nogil:
            used = self.walk(&view[0], size)
        if self.why != NULL:
            self.fault = self.why.decode()
        return used

    def feed_batch(self, header, area, bint aborted):
        """One batch that ``feed`` left to the caller: its header, its records inflated."""
        cdef const uint8_t[::1] head = header
        cdef const uint8_t[::1] body = area
        cdef const uint8_t *start = &body[0] if body.shape[0] else NULL
        cdef Py_ssize_t size = body.shape[0]
        with nogil:
            self.batch(&head[0], start, start + size, aborted)
        if self.why != NULL:
            self.fault = self.why.decode()

    def skip(self, int64_t offset, int64_t next_offset, int64_t size_bytes, bint present):
        """A control batch that the caller has read: note its offset."""
        if offset < self.next_offset or next_offset - self.base_offset > 0x7FFFFFFF:
            self.fault = "offsets do not ascend"
            return
        self.next_offset = next_offset
        self.batches += 1
        self.size_bytes += size_bytes
        if present:
            self.records += 1
            self.run(<uint32_t>(offset - self.base_offset), <uint32_t>(offset - self.base_offset))

    cdef int64_t walk(self, const uint8_t *data, int64_t size) noexcept nogil:
        cdef int64_t at = 0, length
        while True:
            length = frame(data + at, size - at, &self.why)
            if not length:
                return at
            if data[at + 22] & SPECIAL:
                self.special = True
                return at
            if self.batch(data + at, data + at + HEADER, data + at + length, False) < 0:
                return at
            at += length

    cdef inline int run(self, uint32_t start, uint32_t end) noexcept nogil:
        if self.in_run and start == self.run_end + 1:
            self.run_end = end
            return 0
        if self.in_run:
            if push(&self.runs_, self.run_start) or push(&self.runs_, self.run_end):
                return -1
        self.in_run = True
        self.run_start = start
        self.run_end = end
        return 0

    cdef inline bint is_last_of_producer(self, int64_t producer_id, int64_t last) noexcept nogil:
        """``producers`` holds (last data offset, producer id) ascending."""
        cdef size_t low = 0, high = self.producer_count, middle
        while low < high:
            middle = (low + high) >> 1
            if self.producers[2 * middle] < last:
                low = middle + 1
            else:
                high = middle
        while low < self.producer_count and self.producers[2 * low] == last:
            if self.producers[2 * low + 1] == producer_id:
                return True
            low += 1
        return False

    cdef int batch(self, const uint8_t *head, const uint8_t *p, const uint8_t *end,
                   bint aborted) noexcept nogil:
        cdef int64_t base = <int64_t>be64(head), horizon = -1
        cdef int64_t producer_id = <int64_t>be64(head + 43)
        cdef int64_t delta = <int32_t>be32(head + 23), count = <int32_t>be32(head + 57)
        cdef int64_t previous = -1, timestamp, first = base - self.base_offset
        cdef int32_t length, offset_delta, key_length, value_length
        cdef const uint8_t *next_record
        cdef const uint8_t *key
        cdef int64_t seen = 0
        cdef bint expired = False, tombstones = False
        if first < 0 or base < self.next_offset or delta < 0 or first + delta >= 0x7FFFFFFF:
            self.why = b"offsets do not ascend"
            return -1
        if count < 0 or count > delta + 1:
            self.why = b"more records than offsets"
            return -1
        if head[22] & 0x40:
            horizon = <int64_t>be64(head + 27)
            expired = horizon <= self.now_ms
        self.batches += 1
        self.size_bytes += HEADER + (end - p)
        if (producer_id >= 0 and self.producer_count
                and self.is_last_of_producer(producer_id, base + delta)) \
                or base + delta + 1 == self.uncleanable:
            push(&self.empties_, <uint32_t>first)
            push(&self.empties_, <uint32_t>(first + delta))
        if not count:
            push(&self.bare_, <uint32_t>first)
            push(&self.bare_, <uint32_t>(first + delta))
        if count == delta + 1:
            if self.run(<uint32_t>first, <uint32_t>(first + delta)):
                self.why = b"out of memory"
                return -1
        while p < end:
            p = read_varint32(p, end, &length)
            if p == NULL or length < 6 or length > end - p:
                self.why = b"a record's length is wrong"
                return -1
            next_record = p + length
            p += 1
            p = read_varint64(p, next_record, &timestamp)
            if p == NULL:
                self.why = b"a record is cut off"
                return -1
            p = read_varint32(p, next_record, &offset_delta)
            if p == NULL or offset_delta <= previous or offset_delta > delta:
                self.why = b"offset deltas of records do not ascend"
                return -1
            previous = offset_delta
            p = read_varint32(p, next_record, &key_length)
            if p == NULL or key_length < -1 or key_length > next_record - p:
                self.why = b"a record's key is cut off"
                return -1
            key = p
            if key_length > 0:
                p += key_length
            p = read_varint32(p, next_record, &value_length)
            if p == NULL or value_length < -1 or value_length > next_record - p:
                self.why = b"a record's value is cut off"
                return -1
            seen += 1
            if count != delta + 1:
                if self.run(<uint32_t>(first + offset_delta), <uint32_t>(first + offset_delta)):
                    self.why = b"out of memory"
                    return -1
            if self.record(base + offset_delta, key, key_length, value_length < 0, expired,
                           aborted) < 0:
                self.why = b"out of memory"
                return -1
            if value_length < 0 and not aborted:
                tombstones = True
            p = next_record
        if seen != count:
            self.why = b"record count does not match"
            return -1
        self.flush()
        self.records += seen
        if count and (tombstones or horizon != -1):
            self.note_horizon(<uint32_t>first, <uint32_t>(first + delta), horizon)
        self.next_offset = base + delta + 1
        return 0

    cdef int note_horizon(self, uint32_t first, uint32_t last, int64_t horizon) noexcept nogil:
        if horizon == -1:
            push(&self.horizon_of_, 0)
        else:
            with gil:
                if self.last_horizon != horizon or not self.horizon_values:
                    self.horizon_values.append(horizon)
                    self.last_horizon = horizon
                push(&self.horizon_of_, <uint32_t>len(self.horizon_values))
        push(&self.horizons_, first)
        return push(&self.horizons_, last)

    cdef inline int record(self, int64_t offset, const uint8_t *key, int32_t key_length,
                           bint tombstone, bint expired, bint aborted) noexcept nogil:
        cdef uint32_t relative = <uint32_t>(offset - self.base_offset)
        cdef int failed = 0
        if aborted:
            return push(&self.aborted_, relative)
        if tombstone:
            failed |= push(&self.tombstones_, relative)
            if expired:
                failed |= push(&self.expired_, relative)
        if key_length < 0:
            return failed | push(&self.keyless_, relative)
        if self.mode == STATS_ or offset < self.first or offset >= self.last:
            return failed
        if self.mode == LOOKUP_ and self.filtered:
            while self.cursor < <size_t>self.survivors.shape[0] \
                    and self.survivors[self.cursor] < relative:
                self.cursor += 1
            if self.cursor >= <size_t>self.survivors.shape[0] \
                    or self.survivors[self.cursor] != relative:
                return failed
        elif self.mode == MAP_ and self.full_at >= 0:
            return failed
        kept_siphash128(self.map.k0, self.map.k1, key, <size_t>key_length,
                        &self.low[self.block], &self.high[self.block])
        kept_prefetch(self.map.slot(self.low[self.block]))
        self.offset[self.block] = offset
        self.block += 1
        if self.block == BLOCK:
            failed |= self.flush()
        return failed

    cdef int flush(self) noexcept nogil:
        """Do what the mode does with the hashed keys."""
        cdef int i, failed = 0
        if self.mode == MAP_:
            for i in range(self.block):
                if not self.map.put_hash(self.low[i], self.high[i], self.offset[i]):
                    self.full_at = self.offset[i]
                    break
                note(&self.watched, self.low[i], self.high[i], self.offset[i])
        else:
            for i in range(self.block):
                note(&self.watched, self.low[i], self.high[i], self.offset[i])
                if not self.map.find(self.low[i], self.high[i]).rest & OFFSET_BITS:
                    failed |= push(&self.kept_, <uint32_t>(self.offset[i] - self.base_offset))
        self.block = 0
        return failed

    def runs(self):
        """Pairs (first, last) of offsets that are there, relative to the base, as a flat array."""
        found = as_array(&self.runs_)
        if self.in_run:
            found.append(self.run_start)
            found.append(self.run_end)
        return found

    def tombstones(self):
        return as_array(&self.tombstones_)

    def expired(self):
        return as_array(&self.expired_)

    def keyless(self):
        return as_array(&self.keyless_)

    def aborted(self):
        return as_array(&self.aborted_)

    def kept(self):
        return as_array(&self.kept_)

    def empties(self):
        return as_array(&self.empties_)

    def bare(self):
        return as_array(&self.bare_)

    def horizons(self):
        """(first, last, horizon) of each batch with a tombstone or a horizon; -1: none is set."""
        cdef size_t i
        return [
            (
                self.horizons_.at[2 * i],
                self.horizons_.at[2 * i + 1],
                self.horizon_values[self.horizon_of_.at[i] - 1] if self.horizon_of_.at[i] else -1,
            )
            for i in range(self.horizon_of_.size)
        ]


def siphash128(bytes key not None, bytes data not None):
    """SipHash-2-4-128 as 16 bytes; for the test with the reference vectors."""
    cdef uint64_t k0, k1
    cdef uint64_t out[2]
    memcpy(&k0, PyBytes_AsString(key), 8)
    memcpy(&k1, PyBytes_AsString(key) + 8, 8)
    kept_siphash128(k0, k1, <const uint8_t *>PyBytes_AsString(data), len(data), &out[0], &out[1])
    return (<const uint8_t *>out)[:16]
