# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# cython: initializedcheck=False
"""Copying the surviving records of a segment, in C, GIL released for a whole chunk.
``filter.py`` is the specification: the same class in plain Python, under the same tests."""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from storage.records._wire cimport (
    be32, be64, kept_crc32c, put_be32, put_be64, put_varint, read_varint32, read_varint64,
)

KERNEL = "cython"

cdef enum:
    HEADER = 61
    DONE_ = 0
    COMPRESSED_ = 1
    FULL_ = 2
    DAMAGED_ = 3

DONE, COMPRESSED, FULL = DONE_, COMPRESSED_, FULL_

cdef struct Bytes:
    uint8_t *at
    size_t size
    size_t room

cdef inline int reserve(Bytes *buffer, size_t more) noexcept nogil:
    cdef uint8_t *grown
    cdef size_t room
    if buffer.size + more > buffer.room:
        room = max(buffer.room * 2, buffer.size + more + 4096)
        grown = <uint8_t *>realloc(buffer.at, room)
        if grown == NULL:
            return -1
        buffer.at = grown
        buffer.room = room
    return 0


cdef class SegmentFilter:
    cdef Bytes out, index_, time_index_, digest_
    cdef int64_t interval, limit, index_limit
    cdef readonly int64_t output_base, position, max_timestamp, max_timestamp_offset
    cdef readonly int64_t last_offset, batches, records, next_base
    cdef int64_t since_index, last_time_entry
    cdef readonly int stop
    cdef readonly object fault
    cdef const char *why
    cdef int64_t source_base
    cdef const uint32_t[::1] survivors, empties, horizon_firsts
    cdef const int64_t[::1] horizon_values
    cdef size_t survivor_count, empty_count, horizon_count
    cdef size_t at_survivor, at_empty, at_horizon
    cdef bint check_crc

    def __cinit__(self, *, int64_t interval_bytes, int64_t limit_bytes, int64_t index_limit_bytes,
                  bint check_crc=False):
        self.check_crc = check_crc
        self.interval = interval_bytes
        self.limit = limit_bytes
        self.index_limit = index_limit_bytes
        self.next_base = -1

    def __dealloc__(self):
        free(self.out.at)
        free(self.index_.at)
        free(self.time_index_.at)
        free(self.digest_.at)

    def open_output(self, int64_t base_offset):
        self.output_base = base_offset
        self.out.size = self.index_.size = self.time_index_.size = self.digest_.size = 0
        self.position = self.batches = self.records = self.since_index = 0
        self.max_timestamp = self.max_timestamp_offset = self.last_time_entry = -1
        self.last_offset = -1

    def open_source(self, int64_t base_offset, survivors, empties, horizon_firsts, horizon_values):
        self.source_base = base_offset
        self.survivor_count = len(survivors)
        self.empty_count = len(empties)
        self.horizon_count = len(horizon_firsts)
        if self.survivor_count:
            self.survivors = survivors
        if self.empty_count:
            self.empties = empties
        if self.horizon_count:
            self.horizon_firsts = horizon_firsts
            self.horizon_values = horizon_values
        self.at_survivor = self.at_empty = self.at_horizon = 0

    def feed(self, data):
        """Filter whole batches from the start of ``data``; returns bytes used, sets ``stop``."""
        cdef const uint8_t[::1] view = data
        cdef Py_ssize_t size = view.shape[0]
        cdef int64_t used = 0
        self.stop = DONE_
        if size < HEADER:
            return 0
        with nogil:
            used = self.walk(&view[0], size)
        if self.stop == DAMAGED_:
            self.fault = self.why.decode()
        return used

    def rewrite(self, header, area):
        """(changed, header, area) of the compressed batch at which ``feed`` stopped, inflated.

        Length and CRC of the header are not set. The survivors of the batch are used up.
        """
        cdef const uint8_t[::1] head = header
        cdef const uint8_t[::1] body = area
        cdef const uint8_t *start = &body[0] if body.shape[0] else NULL
        cdef uint8_t *room = <uint8_t *>malloc(HEADER + 64 + 3 * <size_t>body.shape[0])
        cdef int64_t written
        cdef bint changed = False
        if room == NULL:
            raise MemoryError
        try:
            with nogil:
                written = self.copy(&head[0], start, start + body.shape[0], room, &changed)
            if written < 0:
                self.stop = DAMAGED_
                self.fault = self.why.decode()
                return False, b"", b""
            return changed, room[:HEADER], room[HEADER:written]
        finally:
            free(room)

    def back(self, int64_t mark_survivor, int64_t mark_empty, int64_t mark_horizon):
        self.at_survivor, self.at_empty, self.at_horizon = mark_survivor, mark_empty, mark_horizon

    def mark(self):
        """Where in survivors, empties and horizons the filter is; ``back`` returns there."""
        return self.at_survivor, self.at_empty, self.at_horizon

    def add(self, batch, canonical):
        """Append a whole batch made by the caller; False when the output is full."""
        cdef const uint8_t[::1] view = batch
        cdef const uint8_t[::1] head = canonical
        cdef int64_t size = view.shape[0]
        if self.is_full(size):
            self.next_base = <int64_t>be64(&view[0])
            return False
        if reserve(&self.out, size) < 0:
            raise MemoryError
        memcpy(self.out.at + self.out.size, &view[0], size)
        if self.count(&view[0], size, &head[0]) < 0:
            raise MemoryError
        return True

    def drain(self):
        """The bytes written since the last call."""
        found = self.out.at[: self.out.size] if self.out.size else b""
        self.out.size = 0
        return found

    def drain_headers(self):
        """The canonical headers since the last call."""
        found = self.digest_.at[: self.digest_.size] if self.digest_.size else b""
        self.digest_.size = 0
        return found

    def index(self):
        """Content of the offset index."""
        return self.index_.at[: self.index_.size] if self.index_.size else b""

    def time_index(self):
        """Content of the time index, with the segment's maximum last."""
        cdef uint8_t entry[12]
        found = self.time_index_.at[: self.time_index_.size] if self.time_index_.size else b""
        if self.max_timestamp > self.last_time_entry:
            put_be64(entry, self.max_timestamp)
            put_be32(entry + 8, <uint32_t>(self.max_timestamp_offset - self.output_base))
            found += entry[:12]
        return found

    cdef inline bint is_full(self, int64_t more) noexcept nogil:
        return self.position > 0 and (
            self.position + more > self.limit
            or <int64_t>self.index_.size + 8 > self.index_limit
            or <int64_t>self.time_index_.size + 24 > self.index_limit)

    cdef int64_t walk(self, const uint8_t *data, int64_t size) noexcept nogil:
        cdef int64_t at = 0, length, written, first, last
        cdef const uint8_t *p
        cdef size_t mark_survivor, mark_horizon
        cdef bint changed
        while size - at >= HEADER:
            p = data + at
            length = <int64_t><int32_t>be32(p + 8) + 12
            if p[16] != 2 or length < HEADER:
                self.why = b"not a batch header"
                self.stop = DAMAGED_
                return at
            if length > size - at:
                return at
            first = <int64_t>be64(p) - self.source_base
            last = first + <int32_t>be32(p + 23)
            if first < 0 or last < first or last > 0x7FFFFFFF \
                    or <int64_t>be32(p + 57) > last - first + 1:
                self.why = b"offsets do not fit the segment"
                self.stop = DAMAGED_
                return at
            self.pass_by(first)
            if self.at_survivor >= self.survivor_count \
                    or self.survivors[self.at_survivor] > last:
                if self.at_empty < self.empty_count and self.empties[self.at_empty] == first:
                    if self.is_full(HEADER):
                        self.next_base = <int64_t>be64(p)
                        self.stop = FULL_
                        return at
                    if self.empty(p) < 0:
                        self.stop = DAMAGED_
                        return at
                at += length
                continue
            if self.check_crc and kept_crc32c(0, p + 21, length - 21) != be32(p + 17):
                self.why = b"wrong CRC"
                self.stop = DAMAGED_
                return at
            if p[22] & 7:
                self.stop = COMPRESSED_
                return at
            mark_survivor, mark_horizon = self.at_survivor, self.at_horizon
            # a new horizon may lengthen each record by 9 bytes of timestamp and 1 of length
            if reserve(&self.out, length + 10 * <size_t>be32(p + 57) + 16) < 0:
                self.why = b"out of memory"
                self.stop = DAMAGED_
                return at
            written = self.copy(p, p + HEADER, p + length, self.out.at + self.out.size, &changed)
            if written < 0:
                self.stop = DAMAGED_
                return at
            if self.is_full(written):
                self.at_survivor, self.at_horizon = mark_survivor, mark_horizon
                self.next_base = <int64_t>be64(p)
                self.stop = FULL_
                return at
            if changed:
                self.seal(self.out.at + self.out.size, written)
            if self.count(self.out.at + self.out.size, written,
                          self.out.at + self.out.size) < 0:
                self.why = b"out of memory"
                self.stop = DAMAGED_
                return at
            at += length
        return at

    cdef inline void pass_by(self, int64_t first) noexcept nogil:
        """Leave behind what lies below the batch at ``first``."""
        while self.at_survivor < self.survivor_count and self.survivors[self.at_survivor] < first:
            self.at_survivor += 1
        while self.at_empty < self.empty_count and self.empties[self.at_empty] < first:
            self.at_empty += 1
        while self.at_horizon < self.horizon_count and self.horizon_firsts[self.at_horizon] < first:
            self.at_horizon += 1

    cdef void seal(self, uint8_t *batch, int64_t size) noexcept nogil:
        put_be32(batch + 8, <uint32_t>(size - 12))
        put_be32(batch + 17, kept_crc32c(0, batch + 21, <size_t>(size - 21)))

    cdef int empty(self, const uint8_t *head) noexcept nogil:
        """Keep a batch without records: codec none, no horizon, no base timestamp."""
        cdef uint8_t *target
        cdef uint8_t canonical[HEADER]
        if reserve(&self.out, HEADER) < 0:
            self.why = b"out of memory"
            return -1
        target = self.out.at + self.out.size
        memcpy(target, head, HEADER)
        target[21] = 0
        target[22] = head[22] & 0x38
        put_be64(target + 27, <int64_t>-1)
        put_be32(target + 57, 0)
        self.seal(target, HEADER)
        memcpy(canonical, target, HEADER)
        put_be64(canonical + 35, <int64_t>-1)
        self.seal(canonical, HEADER)
        return self.count(target, HEADER, canonical)

    cdef int count(self, const uint8_t *batch, int64_t size,
                   const uint8_t *canonical) noexcept nogil:
        """Take the batch at the end of ``out`` into position, indexes and digest."""
        cdef int64_t timestamp = <int64_t>be64(batch + 35)
        cdef int64_t last = <int64_t>be64(batch) + <int32_t>be32(batch + 23)
        if timestamp > self.max_timestamp:
            self.max_timestamp = timestamp
            self.max_timestamp_offset = last
        if self.since_index > self.interval:
            if reserve(&self.index_, 8) < 0 or reserve(&self.time_index_, 12) < 0:
                return -1
            put_be32(self.index_.at + self.index_.size, <uint32_t>(last - self.output_base))
            put_be32(self.index_.at + self.index_.size + 4, <uint32_t>self.position)
            self.index_.size += 8
            if self.max_timestamp > self.last_time_entry:
                put_be64(self.time_index_.at + self.time_index_.size, self.max_timestamp)
                put_be32(self.time_index_.at + self.time_index_.size + 8,
                         <uint32_t>(self.max_timestamp_offset - self.output_base))
                self.time_index_.size += 12
                self.last_time_entry = self.max_timestamp
            self.since_index = 0
        if reserve(&self.digest_, HEADER) < 0:
            return -1
        memcpy(self.digest_.at + self.digest_.size, canonical, HEADER)
        self.digest_.size += HEADER
        self.since_index += size
        self.position += size
        self.out.size += size
        self.batches += 1
        self.records += <int32_t>be32(batch + 57)
        self.last_offset = last
        return 0

    cdef int64_t copy(self, const uint8_t *head, const uint8_t *p, const uint8_t *end,
                      uint8_t *target, bint *changed) noexcept nogil:
        """Write the batch with its surviving records to ``target``; returns its size, -1 damaged.

        ``changed``: header and records differ, length and CRC are still to be set.
        """
        cdef int64_t base = <int64_t>be64(head), first = base - self.source_base
        cdef int64_t base_timestamp = <int64_t>be64(head + 27), count = <int32_t>be32(head + 57)
        cdef int64_t last = first + <int32_t>be32(head + 23)
        cdef int64_t horizon = -1, old_horizon = -1
        cdef size_t here = self.at_survivor, after
        if head[22] & 0x40:
            old_horizon = base_timestamp
        if self.at_horizon < self.horizon_count and self.horizon_firsts[self.at_horizon] == first:
            horizon = self.horizon_values[self.at_horizon]
        else:
            horizon = old_horizon
        after = here + <size_t>count
        if horizon == old_horizon and count > 0 and after <= self.survivor_count \
                and self.survivors[after - 1] <= last \
                and (after == self.survivor_count or self.survivors[after] > last):
            memcpy(target, head, HEADER)
            memcpy(target + HEADER, p, end - p)
            self.at_survivor = after
            changed[0] = False
            return HEADER + (end - p)
        changed[0] = True
        return self.pick(head, p, end, target, first, horizon if horizon != old_horizon else -1)

    cdef int64_t pick(self, const uint8_t *head, const uint8_t *p, const uint8_t *end,
                      uint8_t *target, int64_t first, int64_t horizon) noexcept nogil:
        cdef int64_t base_timestamp = <int64_t>be64(head + 27), timestamp, largest = -1
        cdef int32_t length, offset_delta
        cdef const uint8_t *start
        cdef const uint8_t *rest
        cdef const uint8_t *next_record
        cdef const uint8_t *run = NULL
        cdef uint8_t *q = target + HEADER
        cdef uint32_t kept = 0
        while p < end:
            start = p
            p = read_varint32(p, end, &length)
            if p == NULL or length < 6 or length > end - p:
                self.why = b"a record's length is wrong"
                return -1
            next_record = p + length
            rest = read_varint64(p + 1, next_record, &timestamp)
            if rest == NULL or read_varint32(rest, next_record, &offset_delta) == NULL:
                self.why = b"a record is cut off"
                return -1
            while self.at_survivor < self.survivor_count \
                    and self.survivors[self.at_survivor] < first + offset_delta:
                self.at_survivor += 1
            if self.at_survivor < self.survivor_count \
                    and self.survivors[self.at_survivor] == first + offset_delta:
                self.at_survivor += 1
                kept += 1
                timestamp += base_timestamp
                if timestamp > largest:
                    largest = timestamp
                if horizon >= 0:
                    q = self.move(p, rest, next_record, timestamp - horizon, q)
                elif run == NULL:
                    run = start
            elif run != NULL:
                memcpy(q, run, start - run)
                q += start - run
                run = NULL
            p = next_record
        if run != NULL:
            memcpy(q, run, end - run)
            q += end - run
        memcpy(target, head, HEADER)
        if horizon >= 0:
            target[22] |= 0x40
            put_be64(target + 27, <int64_t>horizon)
        if not head[22] & 0x08:
            put_be64(target + 35, largest)
        put_be32(target + 57, kept)
        return q - target

    cdef uint8_t *move(self, const uint8_t *body, const uint8_t *rest, const uint8_t *end,
                       int64_t delta, uint8_t *q) noexcept nogil:
        """One record with another timestamp delta."""
        cdef uint8_t moved[10]
        cdef uint8_t *after = put_varint(moved, delta)
        q = put_varint(q, 1 + (after - moved) + (end - rest))
        q[0] = body[0]
        memcpy(q + 1, moved, after - moved)
        q += 1 + (after - moved)
        memcpy(q, rest, end - rest)
        return q + (end - rest)
