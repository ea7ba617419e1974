# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The Cython twin of ``kept.node.hot.python``: same results, a fifth of the time.

The plain module is the specification; one suite runs over both.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize, PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from kept.node.hot.python import IN_THREAD_BYTES, PartitionData, ProduceRequest
from kept.storage.errors import CorruptMessage

cdef object _new = tuple.__new__
cdef int64_t _IN_THREAD_BYTES = IN_THREAD_BYTES


cdef inline int32_t _i32(const uint8_t* p) noexcept nogil:
    return <int32_t>((<uint32_t>p[0] << 24) | (<uint32_t>p[1] << 16) | (<uint32_t>p[2] << 8) | p[3])


cdef inline int16_t _i16(const uint8_t* p) noexcept nogil:
    return <int16_t>((<uint16_t>p[0] << 8) | p[1])


cdef inline void _w16(uint8_t* p, int16_t value) noexcept nogil:
    p[0] = <uint8_t>(<uint16_t>value >> 8)
    p[1] = <uint8_t>(<uint16_t>value)


cdef inline void _w32(uint8_t* p, int32_t value) noexcept nogil:
    cdef uint32_t v = <uint32_t>value
    p[0] = <uint8_t>(v >> 24)
    p[1] = <uint8_t>(v >> 16)
    p[2] = <uint8_t>(v >> 8)
    p[3] = <uint8_t>v


cdef inline void _w64(uint8_t* p, int64_t value) noexcept nogil:
    _w32(p, <int32_t>(<uint64_t>value >> 32))
    _w32(p + 4, <int32_t><uint32_t><uint64_t>value)


cdef class _Cursor:
    """A position in a request; every read checks the end."""

    cdef const uint8_t* data
    cdef Py_ssize_t position
    cdef Py_ssize_t end
    cdef int version

    cdef object short_of(self):
        return CorruptMessage(f"Produce v{self.version} ends early")

    cdef int i16(self) except? -77:
        if self.position + 2 > self.end:
            raise self.short_of()
        self.position += 2
        return _i16(self.data + self.position - 2)

    cdef int i32(self) except? -77:
        if self.position + 4 > self.end:
            raise self.short_of()
        self.position += 4
        return _i32(self.data + self.position - 4)

    cdef int64_t uvarint(self) except -1:
        cdef int64_t value = 0
        cdef int shift = 0
        cdef uint8_t byte
        while True:
            if self.position >= self.end:
                raise self.short_of()
            byte = self.data[self.position]
            self.position += 1
            value |= <int64_t>(byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 28:
                raise CorruptMessage("a varint that does not end")

    cdef bytes take(self, int64_t size):
        if size < 0:
            raise CorruptMessage("a string of negative length")
        if size > self.end - self.position:
            raise self.short_of()
        self.position += size
        return PyBytes_FromStringAndSize(<const char*>self.data + self.position - size, size)

    cdef int64_t count(self, int64_t value) except -1:
        if value < 0 or value > self.end - self.position:
            raise CorruptMessage(f"an array of {value} where {self.end - self.position} are left")
        return value

    cdef int skip_tags(self) except -1:
        cdef int64_t count = self.uvarint()
        cdef int64_t size
        while count > 0:
            count -= 1
            self.uvarint()
            size = self.uvarint()
            if size > self.end - self.position:
                raise CorruptMessage("a tagged field ends outside its message")
            self.position += size
        return 0


def parse(buffer, Py_ssize_t position, int version):
    """See ``kept.node.hot.python.parse``."""
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        return _parse(<const uint8_t*>view.buf, view.len, position, version)
    finally:
        PyBuffer_Release(&view)


cdef object _parse(const uint8_t* data, Py_ssize_t end, Py_ssize_t position, int version):
    cdef _Cursor c = _Cursor.__new__(_Cursor)
    cdef bint flexible = version >= 9
    cdef int64_t count, partitions_left, size
    cdef int index, acks, timeout_ms
    cdef Py_ssize_t start
    cdef list topics = [], partitions
    cdef object transactional_id = None
    cdef bytes name
    c.end = end
    c.position = position
    c.version = version
    if position > c.end:
        raise c.short_of()
    c.data = data
    size = c.uvarint() - 1 if flexible else c.i16()
    if size >= 0:
        transactional_id = c.take(size)
    elif size < -1:
        raise CorruptMessage("a string of negative length")
    acks = c.i16()
    timeout_ms = c.i32()
    count = c.count(c.uvarint() - 1 if flexible else c.i32())
    while count > 0:
        count -= 1
        if version >= 13:
            name = c.take(16)
        else:
            size = c.uvarint() - 1 if flexible else c.i16()
            name = c.take(size)
        partitions_left = c.count(c.uvarint() - 1 if flexible else c.i32())
        partitions = []
        while partitions_left > 0:
            partitions_left -= 1
            index = c.i32()
            size = c.uvarint() - 1 if flexible else c.i32()
            if size < 0:
                partitions.append(_new(PartitionData, (index, -1, -1)))
            else:
                if size > c.end - c.position:
                    raise CorruptMessage(
                        f"a batch of {size} bytes where {c.end - c.position} are left"
                    )
                start = c.position
                c.position += size
                partitions.append(_new(PartitionData, (index, start, c.position)))
            if flexible:
                c.skip_tags()
        if flexible:
            c.skip_tags()
        topics.append((name, partitions))
    if flexible:
        c.skip_tags()
    if c.position != c.end:
        raise CorruptMessage(f"{c.end - c.position} bytes after a Produce request")
    return _new(ProduceRequest, (transactional_id, acks, timeout_ms, topics))


cdef Py_ssize_t _varint(
    const uint8_t* p, Py_ssize_t at, Py_ssize_t end, int64_t* value
) noexcept nogil:
    """An unsigned varint at ``p[at]``: the position after it, -1 when it does not end by then."""
    cdef int shift = 0
    value[0] = 0
    while at < end and shift <= 28:
        value[0] |= <int64_t>(p[at] & 0x7F) << shift
        at += 1
        if p[at - 1] < 0x80:
            return at
        shift += 7
    return -1


def parse_one(buffer, Py_ssize_t start, Py_ssize_t stop):
    """See ``kept.node.hot.python.parse_one``."""
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        if start < 0 or stop > view.len:
            return None
        return _parse_one(<const uint8_t*>view.buf, start, stop)
    finally:
        PyBuffer_Release(&view)


cdef object _parse_one(const uint8_t* p, Py_ssize_t at, Py_ssize_t stop):
    cdef int version, client, correlation_id, acks, timeout_ms, index
    cdef int64_t size
    cdef Py_ssize_t name_at, name_size, start
    cdef bint flexible
    if stop - at < 10 or p[at] or p[at + 1]:
        return None
    version = _i16(p + at + 2)
    if version < 3 or version > 13:
        return None
    flexible = version >= 9
    correlation_id = _i32(p + at + 4)
    client = _i16(p + at + 8)
    at += 10
    if client > 0:
        at += client
    # From here to the batch's size: 24 bytes without the topic's name when not flexible.
    if stop - at < 24:
        return None
    if flexible:
        if p[at] or p[at + 1]:
            return None
        at += 2
    else:
        if _i16(p + at) != -1:
            return None
        at += 2
    acks = _i16(p + at)
    timeout_ms = _i32(p + at + 2)
    at += 6
    if acks != 1 and acks != -1:
        return None
    if flexible:
        if p[at] != 2:
            return None
        at += 1
        if version >= 13:
            name_size = 16
        else:
            name_size = <Py_ssize_t>p[at] - 1
            at += 1
    else:
        if _i32(p + at) != 1:
            return None
        name_size = _i16(p + at + 4)
        at += 6
    if name_size < 1 or name_size > 126 or stop - at < name_size + 12:
        return None
    name_at = at
    at += name_size
    if flexible:
        if p[at] != 2:
            return None
        index = _i32(p + at + 1)
        at = _varint(p, at + 5, stop, &size)
        if at < 0:
            return None
        size -= 1
    else:
        if _i32(p + at) != 1:
            return None
        index = _i32(p + at + 4)
        size = _i32(p + at + 8)
        at += 12
    if size < 61 or size != stop - at - (3 if flexible else 0):
        return None
    start = at
    at += size
    if flexible and (p[at] or p[at + 1] or p[at + 2]):
        return None
    if p[start + 22] & 16 or (p[start + 22] & 7 and size > _IN_THREAD_BYTES):
        return None
    return (
        version, correlation_id, acks, timeout_ms,
        PyBytes_FromStringAndSize(<const char*>p + name_at, name_size), index, start, at,
    )


cdef inline Py_ssize_t _one_size(int version, Py_ssize_t length) noexcept:
    """Bytes of the frame that :func:`_write_one` writes."""
    cdef Py_ssize_t size = 8 + length + 22 + 4
    if version >= 13:
        return size + 16
    if version >= 9:
        return size + 17
    return size + 10 + (8 if version >= 5 else 0) + (6 if version >= 8 else 0)


cdef uint8_t* _write_one(
    uint8_t* p, int version, int correlation_id, const char* name, Py_ssize_t length, int index,
    int64_t base_offset, int64_t log_append_time, int64_t log_start_offset,
) noexcept:
    cdef bint flexible = version >= 9
    _w32(p, <int32_t>(_one_size(version, length) - 4))
    _w32(p + 4, correlation_id)
    p += 8
    if flexible:
        p[0] = 0
        p[1] = 2
        p += 2
        if version < 13:
            p[0] = <uint8_t>(length + 1)
            p += 1
    else:
        _w32(p, 1)
        _w16(p + 4, <int16_t>length)
        p += 6
    memcpy(p, name, length)
    p += length
    if flexible:
        p[0] = 2
        p += 1
    else:
        _w32(p, 1)
        p += 4
    _w32(p, index)
    _w16(p + 4, 0)
    _w64(p + 6, base_offset)
    _w64(p + 14, log_append_time)
    p += 22
    if version >= 5:
        _w64(p, log_start_offset)
        p += 8
    if flexible:
        p[0] = 1
        p[1] = 0
        p[2] = 0
        p[3] = 0
        p += 4
    elif version >= 8:
        _w32(p, 0)
        _w16(p + 4, -1)
        p += 6
    _w32(p, 0)
    if flexible:
        p[4] = 0
        p += 1
    return p + 4


def encode_one(
    int version, int correlation_id, bytes name, int index, int64_t base_offset,
    int64_t log_append_time, int64_t log_start_offset,
):
    """The frame of a response with one partition and no error; ``name`` below 127 bytes."""
    cdef Py_ssize_t length = PyBytes_GET_SIZE(name)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, _one_size(version, length))
    _write_one(
        <uint8_t*>PyBytes_AS_STRING(out), version, correlation_id, PyBytes_AS_STRING(name), length,
        index, base_offset, log_append_time, log_start_offset,
    )
    return out


def encode_run(list entries):
    """See ``kept.node.hot.python.encode_run``."""
    cdef Py_ssize_t size = 0
    cdef tuple entry, one
    cdef object info
    cdef bytes name, out
    cdef uint8_t* p
    for entry in entries:
        one = entry[0]
        name = one[4]
        size += _one_size(one[0], PyBytes_GET_SIZE(name))
    out = PyBytes_FromStringAndSize(NULL, size)
    p = <uint8_t*>PyBytes_AS_STRING(out)
    for entry in entries:
        one = entry[0]
        info = entry[2]
        name = one[4]
        p = _write_one(
            p, one[0], one[1], PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name), one[5],
            info[0], info[2], info[3],
        )
    return out


KERNEL = "cython"
