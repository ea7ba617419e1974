# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The codec of ``kept.node.kafka.codec.produce`` and ``fetch``, with the same results, much faster;
and runs of Produce requests (``kept.node.kafka.codec.parse_run``), which only this one reads.

One suite runs over both. Long because a kernel is one unit of compilation.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize, PyBytes_Size
from cpython.tuple cimport PyTuple_GetItem
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from node.kafka.codec._signed cimport _i16, _i32, _i64, _w16, _w32, _w64

from kept.node.kafka.codec.produce import IN_THREAD_BYTES, PartitionData, ProduceRequest
from kept.node.kafka.codec.fetch import FetchRequest
from kept.replication.fetch_messages import FetchPartition
from kept.storage.disk import FileSlice
from kept.storage.errors import CorruptMessage

cdef object _new = tuple.__new__
cdef int64_t _IN_THREAD_BYTES = IN_THREAD_BYTES


cdef class _Cursor:
    """A position in a request; every read checks the end."""

    cdef const uint8_t* data
    cdef Py_ssize_t position
    cdef Py_ssize_t end
    cdef int version
    cdef str api

    cdef object short_of(self):
        return CorruptMessage(f"{self.api} v{self.version} ends early")

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

    cdef int64_t i64(self) except? -77:
        if self.position + 8 > self.end:
            raise self.short_of()
        self.position += 8
        return _i64(self.data + self.position - 8)

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


def parse_produce(buffer, Py_ssize_t position, int version):
    """See ``kept.node.kafka.codec.produce.parse``."""
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
    c.api = "Produce"
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


def parse_run(buffer, Py_ssize_t start, Py_ssize_t end, Py_ssize_t frames, Py_ssize_t size,
              Py_ssize_t longest):
    """See ``kept.node.kafka.codec.parse_run``."""
    cdef Py_buffer view
    cdef const uint8_t* p
    cdef list found = []
    cdef Py_ssize_t length, stop_at = start + size
    cdef object one
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        p = <const uint8_t*>view.buf
        end = min(end, view.len)
        while frames > 0 and 0 <= start < stop_at and end - start > 4:
            length = _i32(p + start)
            start += 4
            if length < 0 or length > min(longest, end - start):
                break
            one = _parse_one(p, start, start + length)
            if one is None:
                break
            found.append(one)
            start += length
            frames -= 1
        return found
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
    if version < 7 and p[start + 22] & 7 == 4:
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


cdef inline object item(row, Py_ssize_t index):
    """An item of a tuple or a named tuple, of which Cython's own ``row[index]`` is far slower."""
    return <object>PyTuple_GetItem(row, index)


def encode_run(list entries):
    """See ``kept.node.kafka.codec.encode_run``."""
    cdef Py_ssize_t size = 0
    cdef tuple entry, one
    cdef object info
    cdef bytes name, out
    cdef uint8_t* p
    for entry in entries:
        one = item(entry, 0)
        name = item(one, 4)
        size += _one_size(item(one, 0), PyBytes_Size(name))
    out = PyBytes_FromStringAndSize(NULL, size)
    p = <uint8_t*>PyBytes_AsString(out)
    for entry in entries:
        one = item(entry, 0)
        info = item(entry, 2)
        name = item(one, 4)
        p = _write_one(
            p, item(one, 0), item(one, 1), PyBytes_AsString(name), PyBytes_Size(name),
            item(one, 5), item(info, 0), item(info, 2), item(info, 3),
        )
    return out


cdef class _Fetch(_Cursor):
    """Fetch counts a negative number as none, in either encoding."""

    cdef bint flexible

    cdef int64_t several(self) except -1:
        cdef int64_t value = self.uvarint() - 1 if self.flexible else self.i32()
        return self.count(value) if value > 0 else 0

    cdef bytes string(self):
        cdef int64_t size = self.uvarint() - 1 if self.flexible else self.i16()
        return self.take(size if size > 0 else 0)

    cdef int end_of_struct(self) except -1:
        return self.skip_tags() if self.flexible else 0


def parse_fetch(buffer, Py_ssize_t position, int version):
    """See ``kept.node.kafka.codec.fetch.parse``."""
    cdef Py_buffer view
    cdef _Fetch c = _Fetch.__new__(_Fetch)
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    try:
        c.data = <const uint8_t*>view.buf
        c.position = position
        c.end = view.len
        c.version = version
        c.api = "Fetch"
        c.flexible = version >= 12
        return _parse_fetch(c, version)
    finally:
        PyBuffer_Release(&view)


cdef object _parse_fetch(_Fetch c, int version):
    cdef int replica_id = c.i32() if version < 15 else -1
    cdef int max_wait_ms = c.i32(), min_bytes = c.i32(), max_bytes = c.i32(), isolation
    cdef int session_id = 0, session_epoch = -1
    cdef int64_t topics_left, left, tag, size, broker_epoch = -1
    cdef list topics = [], forgotten = [], partitions
    cdef bytes name, rack_id = b""
    if c.position >= c.end:
        raise c.short_of()
    isolation = <signed char>c.data[c.position]
    c.position += 1
    if version >= 7:
        session_id = c.i32()
        session_epoch = c.i32()
    topics_left = c.several()
    while topics_left > 0:
        topics_left -= 1
        name = c.take(16) if version >= 13 else c.string()
        partitions = []
        left = c.several()
        while left > 0:
            left -= 1
            partitions.append(_fetch_partition(c, version))
        c.end_of_struct()
        topics.append((name, partitions))
    if version >= 7:
        topics_left = c.several()
        while topics_left > 0:
            topics_left -= 1
            name = c.take(16) if version >= 13 else c.string()
            partitions = []
            left = c.several()
            while left > 0:
                left -= 1
                partitions.append(c.i32())
            c.end_of_struct()
            forgotten.append((name, partitions))
    if version >= 11:
        rack_id = c.string()
    if c.flexible:
        left = c.uvarint()
        while left > 0:
            left -= 1
            tag = c.uvarint()
            size = c.uvarint()
            if size > c.end - c.position:
                raise CorruptMessage("a tagged field ends outside its message")
            if tag == 1 and version >= 15:
                if c.end - c.position < 12:
                    raise c.short_of()
                replica_id = _i32(c.data + c.position)
                broker_epoch = _i64(c.data + c.position + 4)
            c.position += size
    if c.position != c.end:
        raise CorruptMessage(f"{c.end - c.position} bytes after a Fetch request")
    return _new(FetchRequest, (
        replica_id, max_wait_ms, min_bytes, max_bytes, isolation, session_id, session_epoch,
        topics, forgotten, rack_id, broker_epoch,
    ))


cdef object _fetch_partition(_Fetch c, int version):
    cdef int partition = c.i32()
    cdef int leader_epoch = c.i32() if version >= 9 else -1
    cdef int64_t fetch_offset = c.i64()
    cdef int last_epoch = c.i32() if version >= 12 else -1
    cdef int64_t log_start_offset = c.i64() if version >= 5 else -1
    cdef int max_bytes = c.i32()
    c.end_of_struct()
    return _new(FetchPartition, (
        partition, fetch_offset, max_bytes, leader_epoch, last_epoch, log_start_offset,
    ))


cdef class _Out:
    """Bytes that are written one after another, taken out as segments."""

    cdef uint8_t* data
    cdef Py_ssize_t size
    cdef Py_ssize_t capacity
    cdef bint flexible

    def __dealloc__(self):
        free(self.data)

    cdef uint8_t* room(self, Py_ssize_t more) except NULL:
        """Where the next ``more`` bytes go."""
        cdef uint8_t* data
        if self.size + more > self.capacity:
            self.capacity = 2 * (self.size + more) + 256
            data = <uint8_t*>realloc(self.data, self.capacity)
            if data == NULL:
                raise MemoryError()
            self.data = data
        self.size += more
        return self.data + self.size - more

    cdef int byte(self, int value) except -1:
        self.room(1)[0] = <uint8_t>value
        return 0

    cdef int raw(self, bytes value) except -1:
        cdef Py_ssize_t size = PyBytes_Size(value)
        memcpy(self.room(size), PyBytes_AsString(value), size)
        return 0

    cdef int uvarint(self, int64_t value) except -1:
        while value >= 0x80:
            self.byte(<int>(value & 0x7F) | 0x80)
            value >>= 7
        return self.byte(<int>value)

    cdef int count(self, int64_t value) except -1:
        if self.flexible:
            return self.uvarint(value + 1)
        _w32(self.room(4), <int32_t>value)
        return 0

    cdef int end_of_struct(self) except -1:
        return self.byte(0) if self.flexible else 0

    cdef bytes taken(self):
        cdef bytes value = PyBytes_FromStringAndSize(<const char*>self.data, self.size)
        self.size = 0
        return value


def encode_fetch(int version, int correlation_id, int error_code, int session_id, topics):
    """See ``kept.node.kafka.codec.fetch.encode``."""
    cdef _Out out = _Out.__new__(_Out)
    cdef list segments = []
    cdef Py_ssize_t total = 0, size
    cdef bytes name
    cdef uint8_t* p
    cdef object data, records
    out.flexible = version >= 12
    _w32(out.room(8) + 4, correlation_id)
    out.end_of_struct()
    _w32(out.room(4), 0)
    if version >= 7:
        p = out.room(6)
        _w16(p, <int16_t>error_code)
        _w32(p + 2, session_id)
    out.count(len(topics))
    for name, partitions in topics:
        if version < 13:
            if out.flexible:
                out.uvarint(PyBytes_Size(name) + 1)
            else:
                _w16(out.room(2), <int16_t>PyBytes_Size(name))
        out.raw(name)
        out.count(len(partitions))
        for data in partitions:
            _fetch_head(out, version, data)
            records = item(data, 6)
            size = 0
            if records is not None:
                size = records[2] if type(records) is FileSlice else len(records)
            if out.flexible:
                out.uvarint(size + 1)
            else:
                _w32(out.room(4), <int32_t>size)
            if size:
                total += out.size + size
                segments.append(out.taken())
                segments.append(records)
            if out.flexible:
                _fetch_tags(out, item(data, 7), item(data, 8))
        out.end_of_struct()
    out.end_of_struct()
    if out.size:
        total += out.size
        segments.append(out.taken())
    # Nobody else has seen these bytes yet.
    _w32(<uint8_t*>PyBytes_AsString(segments[0]), <int32_t>(total - 4))
    return segments


cdef int _fetch_head(_Out out, int version, data) except -1:
    cdef uint8_t* p = out.room(22)
    _w32(p, item(data, 0))
    _w16(p + 4, item(data, 1))
    _w64(p + 6, item(data, 2))
    _w64(p + 14, item(data, 3))
    if version >= 5:
        _w64(out.room(8), item(data, 4))
    if item(data, 5) is None:
        out.count(-1)
    else:
        out.count(len(item(data, 5)))
        for producer_id, first_offset in item(data, 5):
            p = out.room(16)
            _w64(p, producer_id)
            _w64(p + 8, first_offset)
            out.end_of_struct()
    if version >= 11:
        _w32(out.room(4), -1)
    return 0


cdef int _fetch_tags(_Out out, diverging, current_leader) except -1:
    cdef uint8_t* p
    out.byte((diverging is not None) + (current_leader is not None))
    if diverging is not None:
        p = out.room(15)
        p[0] = 0
        p[1] = 13
        _w32(p + 2, diverging[0])
        _w64(p + 6, diverging[1])
        p[14] = 0
    if current_leader is not None:
        p = out.room(11)
        p[0] = 1
        p[1] = 9
        _w32(p + 2, current_leader[0])
        _w32(p + 6, current_leader[1])
        p[10] = 0
    return 0
