# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True
"""Rows in columns become record areas, in C. ``tests/reference/batch_builder.py`` is the same class
in plain Python, under the same tests."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy

from storage.records._wire cimport put_varint, varint_size

from kept.storage.errors import InvalidRecord
from kept.storage.records.batch_builder import Area

KERNEL = "cython"

cdef enum:
    FED = 0
    FULL = 1
    NO_MEMORY = -1
    NO_PARTITION = -2
    NO_NAME = -3
    SPARE = 64          # bytes of varints beside a record's key, value and headers


cdef struct Growing:
    unsigned char *records
    size_t size
    size_t room
    int32_t count
    int64_t base_timestamp
    int64_t max_timestamp


cdef struct Strings:
    # A Binary; offsets is NULL where every string is null.
    const int32_t *offsets
    const unsigned char *data
    const unsigned char *validity


cdef inline int32_t length_of(Strings *strings, int64_t i) noexcept nogil:
    if strings.offsets == NULL:
        return -1
    if strings.validity != NULL and not strings.validity[i >> 3] >> (i & 7) & 1:
        return -1
    return strings.offsets[i + 1] - strings.offsets[i]


cdef inline unsigned char *put_string(
    unsigned char *out, Strings *strings, int64_t i, int32_t length
) noexcept nogil:
    out = put_varint(out, length)
    if length > 0:
        memcpy(out, strings.data + strings.offsets[i], length)
        out += length
    return out


cdef uint32_t murmur(const unsigned char *p, int32_t length) noexcept nogil:
    cdef uint32_t k, h = <uint32_t>0x9747b28c ^ <uint32_t>length
    cdef uint32_t m = 0x5bd1e995
    cdef int32_t i = 0
    while i + 4 <= length:
        k = p[i] | <uint32_t>p[i + 1] << 8 | <uint32_t>p[i + 2] << 16 | <uint32_t>p[i + 3] << 24
        k *= m
        k ^= k >> 24
        k *= m
        h = h * m ^ k
        i += 4
    if length - i >= 3:
        h ^= <uint32_t>p[i + 2] << 16
    if length - i >= 2:
        h ^= <uint32_t>p[i + 1] << 8
    if length - i >= 1:
        h = (h ^ p[i]) * m
    h ^= h >> 13
    h *= m
    return h ^ h >> 15


cdef class BatchBuilder:
    """See :class:`kept.storage.records.batch_builder.BatchBuilder`."""

    cdef Growing *areas
    cdef readonly int32_t partitions
    cdef readonly int64_t limit_bytes
    cdef Py_buffer[16] views    # as many as Rows has buffers
    cdef int view_count
    cdef Strings key, value, names, values
    cdef const int32_t *lists
    cdef const unsigned char *listed
    cdef const int32_t *wanted
    cdef const int64_t *timestamps

    def __cinit__(self, int32_t partitions, int64_t limit_bytes):
        self.partitions, self.limit_bytes = partitions, limit_bytes
        self.areas = <Growing *>calloc(max(partitions, 1), sizeof(Growing))
        if self.areas == NULL:
            raise MemoryError("no memory for a builder")

    def __dealloc__(self):
        cdef int32_t i
        if self.areas != NULL:
            for i in range(self.partitions):
                free(self.areas[i].records)
            free(self.areas)

    def append(self, rows, int64_t start, uint32_t sticky):
        """Append rows from ``start`` on; where it stopped: at the end, or at a row that no longer
        fits into its area.

        Raises InvalidRecord for a partition that is not there or a header without a name.
        """
        cdef int64_t row = start, count = rows.total
        cdef int fault = FED
        self.view_count = 0
        try:
            self.hold(rows)
            with nogil:
                while row < count:
                    fault = self.append_row(row, sticky)
                    if fault != FED:
                        break
                    row += 1
        finally:
            while self.view_count:
                self.view_count -= 1
                PyBuffer_Release(&self.views[self.view_count])
        if fault == NO_PARTITION:
            where = memoryview(rows.partitions).cast("B").cast("i")[row]
            raise InvalidRecord(f"partition {where}: the topic has {self.partitions}")
        if fault == NO_NAME:
            raise InvalidRecord(f"row {row}: a header without a name")
        if fault == NO_MEMORY:
            raise MemoryError("no memory for a record area")
        return row

    def drain(self):
        """The areas with records, by partition; the builder is empty then."""
        cdef int32_t i
        cdef Growing *area
        found = {}
        for i in range(self.partitions):
            area = &self.areas[i]
            if area.count:
                records = PyBytes_FromStringAndSize(<const char *>area.records, area.size)
                found[i] = Area(records, area.count, area.base_timestamp, area.max_timestamp)
                area.size = 0
                area.count = 0
        return found

    cdef const void *view(self, object buffer) except? NULL:
        """The bytes of a buffer until ``append`` ends; NULL for None."""
        if buffer is None:
            return NULL
        PyObject_GetBuffer(buffer, &self.views[self.view_count], PyBUF_SIMPLE)
        self.view_count += 1
        return self.views[self.view_count - 1].buf

    cdef int hold_strings(self, object binary, Strings *strings) except -1:
        strings.offsets = NULL
        if binary is not None:
            strings.offsets = <const int32_t *>self.view(binary.offsets)
            strings.data = <const unsigned char *>self.view(binary.data)
            strings.validity = <const unsigned char *>self.view(binary.validity)
        return 0

    cdef int hold(self, object rows) except -1:
        headers = rows.headers
        self.hold_strings(rows.key, &self.key)
        self.hold_strings(rows.value, &self.value)
        self.lists = NULL
        if headers is not None:
            self.lists = <const int32_t *>self.view(headers.offsets)
            self.listed = <const unsigned char *>self.view(headers.validity)
            self.hold_strings(headers.names, &self.names)
            self.hold_strings(headers.values, &self.values)
        self.wanted = <const int32_t *>self.view(rows.partitions)
        self.timestamps = <const int64_t *>self.view(rows.timestamps)
        return 0

    cdef int append_row(self, int64_t row, uint32_t sticky) noexcept nogil:
        """One row; FULL where its area has no room for it, below 0 what is wrong with it."""
        cdef int32_t key = length_of(&self.key, row), value = length_of(&self.value, row)
        cdef int32_t where = -1, name, content, first = 0, last = 0, i
        cdef int64_t timestamp = self.timestamps[row], delta, body
        cdef uint32_t hashed = sticky
        cdef Growing *area
        cdef unsigned char *out
        if self.wanted != NULL:
            where = self.wanted[row]
        if where == -1:
            if key >= 0:
                hashed = murmur(self.key.data + self.key.offsets[row], key)
            where = (hashed & 0x7fffffff) % <uint32_t>self.partitions
        elif where < 0 or where >= self.partitions:
            return NO_PARTITION
        area = &self.areas[where]
        if not area.count:
            area.base_timestamp = area.max_timestamp = timestamp
        delta = <int64_t>(<uint64_t>timestamp - <uint64_t>area.base_timestamp)
        if self.lists != NULL and (
            self.listed == NULL or self.listed[row >> 3] >> (row & 7) & 1
        ):
            first, last = self.lists[row], self.lists[row + 1]
        body = 1 + varint_size(delta) + varint_size(area.count) + varint_size(last - first)
        body += varint_size(key) + max(key, 0) + varint_size(value) + max(value, 0)
        for i in range(first, last):
            name, content = length_of(&self.names, i), length_of(&self.values, i)
            if name < 0:
                return NO_NAME
            body += varint_size(name) + name + varint_size(content) + max(content, 0)
        if area.count and <int64_t>area.size + varint_size(body) + body > self.limit_bytes:
            return FULL
        if not self.reserve(area, body + SPARE):
            return NO_MEMORY
        out = put_varint(area.records + area.size, body)
        out[0] = 0
        out = put_varint(put_varint(out + 1, delta), area.count)
        out = put_string(out, &self.key, row, key)
        out = put_string(out, &self.value, row, value)
        out = put_varint(out, last - first)
        for i in range(first, last):
            out = put_string(out, &self.names, i, length_of(&self.names, i))
            out = put_string(out, &self.values, i, length_of(&self.values, i))
        area.size = out - area.records
        area.count += 1
        area.max_timestamp = max(area.max_timestamp, timestamp)
        return FED

    cdef bint reserve(self, Growing *area, size_t more) noexcept nogil:
        cdef unsigned char *grown
        cdef size_t room
        if area.size + more > area.room:
            room = max(2 * area.room, area.size + more)
            grown = <unsigned char *>realloc(area.records, room)
            if grown == NULL:
                return False
            area.records, area.room = grown, room
        return True
