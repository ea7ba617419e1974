# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The Cython twin of ``kept.client.protocol.bounds.Walk``: same results, much faster.

The plain class is the specification; one suite runs over both. The steps have its numbers.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int16_t, int32_t, int64_t, uint32_t, uint8_t

from kept.client.protocol.wire import uvarint
from kept.storage.errors import CorruptMessage, InvalidRequest

cdef enum:
    END = 0
    FIXED = 1
    STRING = 2
    STRING16 = 3
    BYTES = 4
    BYTES32 = 5
    ARRAY = 6
    ARRAY32 = 7
    FIXEDS = 8
    FIXEDS32 = 9
    ENTITY = 10
    ENTITY_OR_NULL = 11
    TAGS = 12
    MAX_STRING_BYTES = 32767


cdef inline int32_t _int32(const uint8_t* p) noexcept nogil:
    return <int32_t>(<uint32_t>p[0] << 24 | p[1] << 16 | p[2] << 8 | p[3])


cdef class Walk:
    """See ``kept.client.protocol.bounds.Walk``."""

    cdef const int32_t[::1] _code_held
    cdef const uint8_t[::1] _data_held
    cdef const int32_t* _code
    cdef const uint8_t* _data
    cdef Py_ssize_t _size
    cdef int64_t _max_entries
    cdef bytearray _out
    cdef Py_ssize_t _copied
    cdef readonly int64_t entries
    cdef readonly int64_t unknown

    def __cinit__(self, const int32_t[::1] code, data, int64_t max_entries):
        self._code_held = code
        self._code = &code[0]
        self._size = len(data)
        if self._size:
            self._data_held = data
            self._data = &self._data_held[0]
        self._max_entries = max_entries

    def check(self, int start, Py_ssize_t position):
        """See ``kept.client.protocol.bounds.Walk.check``."""
        return self._struct(start, position, self._size)

    def rewritten(self, int start, Py_ssize_t position):
        """See ``kept.client.protocol.bounds.Walk.rewritten``."""
        cdef Py_ssize_t end
        self._out = bytearray()
        self._copied = position
        end = self._struct(start, position, self._size)
        self._out += self._slice(self._copied, end)
        return bytes(self._out)

    cdef bytes _slice(self, Py_ssize_t start, Py_ssize_t stop):
        return PyBytes_FromStringAndSize(<const char*>self._data + start, stop - start)

    cdef Py_ssize_t _struct(self, int pc, Py_ssize_t at, Py_ssize_t end) except -1:
        cdef const int32_t* code = self._code
        cdef int32_t step
        cdef int64_t count
        while True:
            step = code[pc]
            if step == END:
                return at
            if step == FIXED:
                at = self._bytes(at, code[pc + 1], end)
                pc += 2
            elif step <= BYTES32:
                at = self._text(step, at, end)
                pc += 1
            elif step == FIXEDS or step == FIXEDS32:
                count = self._count(step == FIXEDS, &at, end, code[pc + 1])
                at += count * code[pc + 1]
                pc += 2
            elif step == ARRAY or step == ARRAY32:
                count = self._count(step == ARRAY, &at, end, code[pc + 2])
                while count > 0:
                    count -= 1
                    at = self._struct(code[pc + 1], at, end)
                pc += 3
            elif step == TAGS:
                # Nearly always there are none.
                if at < end and self._data[at] == 0:
                    at += 1
                else:
                    at = self._tags(pc, at, end)
                pc += 2 + 2 * code[pc + 1]
            else:
                if step == ENTITY_OR_NULL:
                    at = self._bytes(at, 1, end)
                    if self._data[at - 1] >= 0x80:
                        pc += 2
                        continue
                at = self._struct(code[pc + 1], at, end)
                pc += 2

    cdef inline Py_ssize_t _bytes(self, Py_ssize_t at, int64_t size, Py_ssize_t end) except -1:
        if size > end - at:
            raise CorruptMessage(f"a field of {size} bytes where {end - at} are left")
        return at + size

    cdef inline int64_t _varint(self, Py_ssize_t* at, Py_ssize_t end) except -1:
        cdef int64_t value = 0
        cdef int shift = 0
        cdef uint8_t byte
        while shift <= 28 and at[0] < end:
            byte = self._data[at[0]]
            at[0] += 1
            value |= <int64_t>(byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise CorruptMessage("a varint that does not end")

    cdef Py_ssize_t _text(self, int32_t step, Py_ssize_t at, Py_ssize_t end) except -1:
        cdef int64_t size
        if step == STRING or step == BYTES:
            size = self._varint(&at, end) - 1
        elif step == STRING16:
            at = self._bytes(at, 2, end)
            size = <int16_t>(self._data[at - 2] << 8 | self._data[at - 1])
        else:
            at = self._bytes(at, 4, end)
            size = _int32(self._data + at - 4)
        if size < -1:
            raise CorruptMessage(f"a field of length {size}")
        if step == STRING and size > MAX_STRING_BYTES:
            raise CorruptMessage(f"a string of {size} bytes: {MAX_STRING_BYTES} is the longest")
        return self._bytes(at, size if size > 0 else 0, end)

    cdef int64_t _count(
        self, bint compact, Py_ssize_t* at, Py_ssize_t end, int64_t least
    ) except -1:
        cdef int64_t count
        if compact:
            count = self._varint(at, end) - 1
        else:
            at[0] = self._bytes(at[0], 4, end)
            count = _int32(self._data + at[0] - 4)
        if count < -1 or count > (end - at[0]) // least:
            raise CorruptMessage(f"an array of {count} where {end - at[0]} bytes are left")
        if count <= 0:
            return 0
        self._enter(count)
        return count

    cdef int _enter(self, int64_t more) except -1:
        self.entries += more
        if self.entries > self._max_entries:
            raise InvalidRequest(f"more than {self._max_entries} entries")
        return 0

    cdef Py_ssize_t _tags(self, int pc, Py_ssize_t at, Py_ssize_t end) except -1:
        cdef const int32_t* code = self._code
        cdef Py_ssize_t start = at, stop, copied
        cdef int64_t count = self._varint(&at, end), left, tag, size
        cdef int i, known
        cdef list kept = []
        cdef bytearray outer
        cdef bytes content
        if count > (end - at) // 2:
            raise CorruptMessage(f"{count} tagged fields where {end - at} bytes are left")
        self._enter(count)
        left = count
        while left > 0:
            left -= 1
            tag = self._varint(&at, end)
            size = self._varint(&at, end)
            stop = self._bytes(at, size, end)
            known = -1
            for i in range(code[pc + 1]):
                if code[pc + 2 + 2 * i] == tag:
                    known = code[pc + 3 + 2 * i]
            if known < 0:
                self.unknown += 1
            elif self._out is None:
                self._known(tag, known, at, stop)
            else:
                outer = self._out
                copied = self._copied
                self._out = bytearray()
                self._copied = at
                self._known(tag, known, at, stop)
                content = bytes(self._out) + self._slice(self._copied, stop)
                self._out = outer
                self._copied = copied
                kept.append(uvarint(tag) + uvarint(len(content)) + content)
            at = stop
        if self._out is not None and count > 0:
            self._out += self._slice(self._copied, start)
            self._out += uvarint(len(kept)) + b"".join(kept)
            self._copied = at
        return at

    cdef int _known(self, int64_t tag, int pc, Py_ssize_t at, Py_ssize_t stop) except -1:
        if self._struct(pc, at, stop) != stop:
            raise CorruptMessage(f"tag {tag} has another size than it says")
        return 0
