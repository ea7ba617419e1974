# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True
"""Fetched batches as Arrow columns, in C: one pass over the records, one copy of each field.
``blocks.py`` is the specification: the same function in plain Python, under the same tests."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport (
    PyByteArray_AsString,
    PyByteArray_FromStringAndSize,
    PyByteArray_Resize,
)
from cpython.bytes cimport PyBytes_AsString
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

from storage.records._wire cimport (
    CODEC_MASK,
    CONTROL_BIT,
    FAULT_TRAILING,
    HEADER_BYTES,
    TIMESTAMP_TYPE_BIT,
    RecordSpan,
    be16,
    be32,
    be64,
    frame_is_right,
    read_record,
    read_varint32,
)

from kept.storage.records.blocks import Binary, Block, HeaderLists, readable_names, refuse
from kept.storage.records.codecs import decompress
from kept.storage.records.columns import DEFAULT_INFLATE_LIMIT as _DEFAULT_INFLATE_LIMIT
from kept.storage.records.faults import refusal
from kept.storage.types import Codec

KERNEL = "cython"

cdef enum:
    KEY = 1
    VALUE = 2
    OFFSET = 4
    TIMESTAMP = 8
    TIMESTAMP_TYPE = 16
    HEADERS = 32
    PER_RECORD = KEY | VALUE | OFFSET | TIMESTAMP | HEADERS

cdef tuple _CODECS = tuple(Codec)


cdef struct Area:
    # The records of one batch that is read; p is NULL when its header says enough.
    int64_t base_offset
    int64_t base_timestamp
    int64_t max_timestamp
    int32_t record_count
    int32_t attributes
    const unsigned char *p
    const unsigned char *end


cdef class _Strings:
    """A Binary in the making, with room for ``rows`` strings of ``size`` bytes in all."""

    cdef object offsets_, data_, validity_
    cdef int32_t *offsets
    cdef char *data
    cdef unsigned char *validity
    cdef int32_t size
    cdef int64_t rows, nulls

    def __cinit__(self, int64_t rows, Py_ssize_t size):
        self.offsets_ = PyByteArray_FromStringAndSize(NULL, (rows + 1) * 4)
        self.offsets = <int32_t *>PyByteArray_AsString(self.offsets_)
        self.data_ = PyByteArray_FromStringAndSize(NULL, size)
        self.data = PyByteArray_AsString(self.data_)
        self.validity_ = PyByteArray_FromStringAndSize(NULL, (rows + 7) // 8)
        self.validity = <unsigned char *>PyByteArray_AsString(self.validity_)
        memset(self.validity, 0xff, (rows + 7) // 8)
        self.offsets[0] = 0

    cdef inline void add(self, const unsigned char *p, int32_t length) noexcept nogil:
        if length > 0:
            memcpy(self.data + self.size, p, length)
            self.size += length
        elif length < 0:
            self.validity[self.rows >> 3] &= ~(1 << (self.rows & 7))
            self.nulls += 1
        self.rows += 1
        self.offsets[self.rows] = self.size

    cdef object binary(self):
        PyByteArray_Resize(self.offsets_, (self.rows + 1) * 4)
        PyByteArray_Resize(self.data_, self.size)
        return Binary(self.offsets_, self.data_, self.bitmap(), self.nulls)

    cdef object bitmap(self):
        """The bits of nulls, those after the last row 0; None when nothing is null."""
        if not self.nulls:
            return None
        PyByteArray_Resize(self.validity_, (self.rows + 7) // 8)
        self.validity = <unsigned char *>PyByteArray_AsString(self.validity_)
        if self.rows & 7:
            self.validity[self.rows >> 3] &= (1 << (self.rows & 7)) - 1
        return self.validity_


cdef class _Columns:
    """A Block in the making."""

    cdef int wanted
    cdef int64_t rows, first, end
    cdef object offsets_, timestamps_, types_, lists_
    cdef int64_t *offsets
    cdef int64_t *timestamps
    cdef int32_t *types
    cdef int32_t *lists
    cdef _Strings key, value, names, values, listed

    def __cinit__(self, int wanted, int64_t first, int64_t end):
        self.wanted, self.first, self.end = wanted, first, end

    cdef int make_room(self, int64_t rows, Py_ssize_t size, int64_t headers) except -1:
        if self.wanted & OFFSET:
            self.offsets_ = PyByteArray_FromStringAndSize(NULL, rows * 8)
            self.offsets = <int64_t *>PyByteArray_AsString(self.offsets_)
        if self.wanted & TIMESTAMP:
            self.timestamps_ = PyByteArray_FromStringAndSize(NULL, rows * 8)
            self.timestamps = <int64_t *>PyByteArray_AsString(self.timestamps_)
        if self.wanted & TIMESTAMP_TYPE:
            self.types_ = PyByteArray_FromStringAndSize(NULL, rows * 4)
            self.types = <int32_t *>PyByteArray_AsString(self.types_)
        if self.wanted & KEY:
            self.key = _Strings(rows, size)
        if self.wanted & VALUE:
            self.value = _Strings(rows, size)
        if self.wanted & HEADERS:
            self.lists_ = PyByteArray_FromStringAndSize(NULL, (rows + 1) * 4)
            self.lists = <int32_t *>PyByteArray_AsString(self.lists_)
            self.lists[0] = 0
            self.listed = _Strings(rows, 0)
            self.names, self.values = _Strings(headers, size), _Strings(headers, size)
        return 0

    cdef int fill(self, Area *area, int32_t *index) noexcept nogil:
        """The records of one batch; 0, or the fault of record ``index``."""
        cdef const unsigned char *p = area.p
        cdef RecordSpan record
        cdef int fault, wanted = self.wanted
        cdef int32_t at, kind = (area.attributes & TIMESTAMP_TYPE_BIT) != 0
        cdef int64_t offset, timestamp
        for at in range(area.record_count):
            index[0] = at
            if p == NULL:
                self._type(kind)
                self.rows += 1
                continue
            fault = read_record(p, area.end, False, &record)
            if fault:
                return fault
            p = record.end
            offset = <int64_t>(
                <uint64_t>area.base_offset + <uint64_t><int64_t>record.offset_delta
            )
            if offset < self.first or offset >= self.end:
                continue
            if wanted & OFFSET:
                self.offsets[self.rows] = offset
            if wanted & TIMESTAMP:
                timestamp = area.max_timestamp
                if not kind:
                    timestamp = <int64_t>(
                        <uint64_t>area.base_timestamp + <uint64_t>record.timestamp_delta
                    )
                self.timestamps[self.rows] = _microseconds(timestamp)
            self._type(kind)
            if wanted & KEY:
                self.key.add(record.key, record.key_length)
            if wanted & VALUE:
                self.value.add(record.value, record.value_length)
            if wanted & HEADERS:
                self._headers(record.headers, record.end)
            self.rows += 1
        return 0 if p == area.end or p == NULL else FAULT_TRAILING

    cdef inline void _type(self, int32_t kind) noexcept nogil:
        if self.wanted & TIMESTAMP_TYPE:
            self.types[self.rows] = kind

    cdef void _headers(self, const unsigned char *p, const unsigned char *end) noexcept nogil:
        """Headers that read_record has found to be whole."""
        cdef int32_t count = 0, length = 0
        p = read_varint32(p, end, &count)
        self.listed.add(p, 0 if count > 0 else -1)
        while count > 0:
            count -= 1
            p = read_varint32(p, end, &length)
            self.names.add(p, length)
            p = read_varint32(p + length, end, &length)
            self.values.add(p, length if length >= 0 else -1)
            if length > 0:
                p += length
        self.lists[self.rows + 1] = <int32_t>self.names.rows

    cdef object block(self, Py_ssize_t position, int64_t next_offset):
        headers = None
        if self.offsets_ is not None:
            PyByteArray_Resize(self.offsets_, self.rows * 8)
        if self.timestamps_ is not None:
            PyByteArray_Resize(self.timestamps_, self.rows * 8)
        if self.types_ is not None:
            PyByteArray_Resize(self.types_, self.rows * 4)
        if self.lists_ is not None:
            PyByteArray_Resize(self.lists_, (self.rows + 1) * 4)
            names = self.names.binary()
            if not names.data.isascii():
                names = readable_names(names)
            headers = HeaderLists(
                self.lists_, self.listed.bitmap(), self.listed.nulls, names,
                self.values.binary(), self.names.rows,
            )
        return Block(
            self.rows,
            position,
            next_offset,
            self.offsets_,
            self.timestamps_,
            self.types_,
            None if self.key is None else self.key.binary(),
            None if self.value is None else self.value.binary(),
            headers,
        )


cdef inline int64_t _microseconds(int64_t timestamp) noexcept nogil:
    if timestamp > INT64_MAX // 1000:
        return INT64_MAX
    if timestamp < INT64_MIN // 1000:
        return INT64_MIN
    return timestamp * 1000


cdef int64_t _count_headers(Area *areas, Py_ssize_t batches) noexcept nogil:
    """Headers of all records, up to the first that is damaged."""
    cdef RecordSpan record
    cdef const unsigned char *p
    cdef int64_t total = 0
    cdef int32_t at, count
    cdef Py_ssize_t i
    for i in range(batches):
        p = areas[i].p
        for at in range(areas[i].record_count):
            if read_record(p, areas[i].end, False, &record):
                return total
            count = 0
            read_varint32(record.headers, record.end, &count)
            total += count
            p = record.end
    return total


cdef bint _is_cut_off(const unsigned char *p, Py_ssize_t size) noexcept nogil:
    return size < 12 or <int64_t><int32_t>be32(p + 8) + 12 > size


def read_block(
    buf,
    Py_ssize_t position,
    int64_t first,
    int64_t end,
    int wanted,
    *,
    hidden=(),
    int64_t min_timestamp=INT64_MIN,
    int64_t max_rows=65536,
    int64_t max_bytes=16 << 20,
    int64_t inflate_limit=_DEFAULT_INFLATE_LIMIT,
):
    """See :func:`kept.storage.records.blocks.read_block`."""
    cdef Py_buffer view
    cdef Area *areas = NULL
    cdef list inflated = []
    cdef Py_ssize_t batches = 0, i
    cdef int64_t rows = 0, size = 0, next_offset = first
    cdef int32_t index = 0
    cdef int fault = 0
    cdef _Columns columns = _Columns(wanted, first, end)
    PyObject_GetBuffer(buf, &view, PyBUF_SIMPLE)
    try:
        batches = _choose(
            buf, &view, &position, first, end, wanted, hidden, min_timestamp, max_rows, max_bytes,
            inflate_limit, &areas, inflated, &rows, &size, &next_offset,
        )
        columns.make_room(
            rows, size, _count_headers(areas, batches) if wanted & HEADERS else 0
        )
        for i in range(batches):
            fault = columns.fill(&areas[i], &index)
            if fault:
                raise refusal([(index, fault, 0)], 0, 0)
    finally:
        free(areas)
        PyBuffer_Release(&view)
    return columns.block(position, next_offset)


cdef Py_ssize_t _choose(
    object buf,
    Py_buffer *view,
    Py_ssize_t *position,
    int64_t first,
    int64_t end,
    int wanted,
    object hidden,
    int64_t min_timestamp,
    int64_t max_rows,
    int64_t max_bytes,
    int64_t inflate_limit,
    Area **areas,
    list inflated,
    int64_t *rows,
    int64_t *size,
    int64_t *next_offset,
) except -1:
    """The batches to be read, inflated: how many. ``rows`` and ``size`` are what they may hold."""
    cdef const unsigned char *data = <const unsigned char *>view.buf
    cdef const unsigned char *p
    cdef Py_ssize_t here, count = 0, room = 0
    cdef int64_t base, after
    cdef Area *area
    cdef bint hides = len(hidden) > 0
    while position[0] < view.len:
        here = position[0]
        p = data + here
        if not frame_is_right(p, view.len - here, True) or be16(p + 21) & CODEC_MASK > 4:
            if here > 0 and _is_cut_off(p, view.len - here):
                break
            raise refuse(buf, here)
        base = <int64_t>be64(p)
        if base >= end:
            next_offset[0] = max(next_offset[0], base)
            position[0] = view.len
            break
        position[0] += <Py_ssize_t><int32_t>be32(p + 8) + 12
        after = base + <int32_t>be32(p + 23) + 1
        next_offset[0] = max(next_offset[0], after)
        if be16(p + 21) & CONTROL_BIT or after <= first or <int64_t>be64(p + 35) < min_timestamp:
            continue
        if hides and here in hidden:
            continue
        if count == room:
            room = 2 * room + 16
            area = <Area *>realloc(areas[0], room * sizeof(Area))
            if area == NULL:
                raise MemoryError("no memory for the batches of a block")
            areas[0] = area
        area = &areas[0][count]
        count += 1
        _open(buf, data, here, position[0], area)
        if not wanted & PER_RECORD and first <= base and after <= end:
            area.p = area.end = NULL
            rows[0] += area.record_count
        else:
            _inflate(buf, data, area, inflate_limit, inflated)
            size[0] += area.end - area.p
            # No record is shorter than 7 bytes: a count that lies does not make us allocate.
            rows[0] += min(<int64_t>area.record_count, (area.end - area.p) // 7)
        if rows[0] >= max_rows or size[0] >= max_bytes:
            break
    return count


cdef void _open(
    object buf, const unsigned char *data, Py_ssize_t here, Py_ssize_t after, Area *area
):
    cdef const unsigned char *p = data + here
    area.base_offset = <int64_t>be64(p)
    area.base_timestamp = <int64_t>be64(p + 27)
    area.max_timestamp = <int64_t>be64(p + 35)
    area.record_count = <int32_t>be32(p + 57)
    area.attributes = be16(p + 21)
    area.p = p + HEADER_BYTES
    area.end = data + after


cdef int _inflate(
    object buf, const unsigned char *data, Area *area, int64_t inflate_limit, list inflated
) except -1:
    """Let ``area`` be where its records are inflated; ``inflated`` keeps that alive."""
    cdef bytes part
    if not area.attributes & CODEC_MASK or not area.record_count:
        return 0
    part = decompress(
        _CODECS[area.attributes & CODEC_MASK],
        memoryview(buf)[area.p - data : area.end - data],
        inflate_limit,
    )
    inflated.append(part)
    area.p = <const unsigned char *>PyBytes_AsString(part)
    area.end = area.p + len(part)
    return 0
