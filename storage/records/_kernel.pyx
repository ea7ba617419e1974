# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The record kernel in Cython. ``python.py`` is its specification; one suite runs over both.

Whatever is rare (a refusal, another codec) is left to the twin's functions, so both kernels refuse
in the same words. The GIL is released around the records of whole buffers above NOGIL_BYTES: below
that giving it back costs more than the walk.

Long because a kernel is one unit of compilation; its Python twin is in several modules.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AsString, PyByteArray_FromStringAndSize
from cpython.memoryview cimport PyMemoryView_Check, PyMemoryView_FromObject
from libc.stdint cimport INT64_MAX, INT64_MIN, int16_t, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy

from storage.records._wire cimport (
    CODEC_MASK,
    FAULT_NO_KEY,
    FAULT_OFFSET_DELTA,
    FAULT_TIMESTAMP,
    FAULT_TRAILING,
    HEADER_BYTES,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    RecordSpan,
    be16,
    be32,
    be64,
    frame_is_right,
    header_is_right,
    kept_crc32c,
    kept_crc32c_software,
    put_be16,
    put_be32,
    put_be64,
    read_record,
)

from kept.storage.errors import InvariantViolation
from kept.storage.records import python as twin
from kept.storage.records.build import rewritten as rewritten_batch
from kept.storage.records.codecs import decompress
from kept.storage.records.columns import DEFAULT_INFLATE_LIMIT as _DEFAULT_INFLATE_LIMIT
from kept.storage.records.columns import MAX_RECORD_ERRORS as _MAX_RECORD_ERRORS
from kept.storage.records.columns import RecordColumns
from kept.storage.records.faults import refusal
from kept.storage.records.header import BatchHeader
from kept.storage.types import Codec

KERNEL = "cython"

cdef enum:
    MAX_FAULTS = 100
    NOGIL_BYTES = 32768
    ROW_BYTES = 5 * 8 + 4 * 4

if _MAX_RECORD_ERRORS != MAX_FAULTS:
    raise InvariantViolation("MAX_FAULTS differs from MAX_RECORD_ERRORS")

cdef tuple _CODECS = tuple(Codec)


cdef struct FaultAt:
    int32_t index
    int32_t fault
    int64_t timestamp


cdef struct Area:
    # One batch of a scan.
    int64_t base_offset
    int64_t base_timestamp
    int64_t max_timestamp
    int32_t record_count
    int32_t attributes
    Py_ssize_t position         # of the batch in the scanned buffer
    Py_ssize_t start            # of its record area in the data
    Py_ssize_t end


cdef class CheckedBatch:
    """See :class:`kept.storage.records.columns.CheckedBatch`."""

    cdef readonly object data
    cdef readonly Py_ssize_t size_bytes
    cdef readonly int record_count
    cdef readonly int64_t max_timestamp
    cdef readonly int64_t producer_id
    cdef readonly int producer_epoch
    cdef readonly int base_sequence
    cdef readonly bint is_transactional
    cdef readonly object codec
    cdef readonly bint rewritten
    cdef readonly Py_ssize_t area_bytes

    def __init__(
        self,
        data,
        Py_ssize_t size_bytes,
        int record_count,
        int64_t max_timestamp,
        int64_t producer_id,
        int producer_epoch,
        int base_sequence,
        bint is_transactional,
        codec,
        bint rewritten,
    ):
        self.data = data
        self.size_bytes = size_bytes
        self.record_count = record_count
        self.max_timestamp = max_timestamp
        self.producer_id = producer_id
        self.producer_epoch = producer_epoch
        self.base_sequence = base_sequence
        self.is_transactional = is_transactional
        self.codec = codec
        self.rewritten = rewritten


cdef class _Rules:
    """The rules of :class:`kept.storage.records.columns.CheckRules` as numbers: to look these up
    and convert them would cost a small batch as much as its records.
    """

    cdef bint appended
    cdef bint compacted
    cdef object codec           # None for the producer's
    cdef int64_t before_max_ms
    cdef int64_t after_max_ms
    cdef Py_ssize_t max_batch_bytes
    cdef int64_t max_inflated_bytes

    def __init__(self, rules):
        self.appended = rules.timestamp_type == 1
        self.compacted = rules.compacted
        self.codec = rules.codec
        self.before_max_ms = rules.timestamp_before_max_ms
        self.after_max_ms = rules.timestamp_after_max_ms
        self.max_batch_bytes = rules.max_batch_bytes
        self.max_inflated_bytes = rules.max_inflated_bytes


cdef _Rules _compiled(object rules):
    compiled = rules.compiled
    if compiled is None:
        compiled = _Rules(rules)
        object.__setattr__(rules, "compiled", compiled)
    return compiled


def crc32c(data, uint32_t crc=0):
    """CRC-32C of ``data``, continuing ``crc``."""
    cdef Py_buffer buf
    PyObject_GetBuffer(data, &buf, PyBUF_SIMPLE)
    try:
        crc = kept_crc32c(crc, <const unsigned char *>buf.buf, buf.len)
    finally:
        PyBuffer_Release(&buf)
    return crc


def crc32c_software(data):
    """CRC-32C as processors without an instruction for it compute it; for tests."""
    cdef Py_buffer buf
    cdef uint32_t crc
    PyObject_GetBuffer(data, &buf, PyBUF_SIMPLE)
    try:
        kept_crc32c(0, <const unsigned char *>buf.buf, 0)
        crc = kept_crc32c_software(0, <const unsigned char *>buf.buf, buf.len)
    finally:
        PyBuffer_Release(&buf)
    return crc


cdef object _header(const unsigned char *p):
    return BatchHeader(
        <int64_t>be64(p),
        <int32_t>be32(p + 8),
        <int32_t>be32(p + 12),
        <signed char>p[16],
        be32(p + 17),
        <int16_t>be16(p + 21),
        <int32_t>be32(p + 23),
        <int64_t>be64(p + 27),
        <int64_t>be64(p + 35),
        <int64_t>be64(p + 43),
        <int16_t>be16(p + 51),
        <int32_t>be32(p + 53),
        <int32_t>be32(p + 57),
    )


def check_replica(buf, Py_ssize_t position=0):
    """Header of the whole batch at ``position``, framing and CRC checked. Raises CorruptMessage."""
    cdef Py_buffer view
    cdef const unsigned char *p
    PyObject_GetBuffer(buf, &view, PyBUF_SIMPLE)
    try:
        p = <const unsigned char *>view.buf + position
        if 0 <= position <= view.len and frame_is_right(p, view.len - position, True):
            return _header(p)
        return twin.check_replica(memoryview(buf), position)
    finally:
        PyBuffer_Release(&view)


def check_replicas(buf):
    """See :func:`kept.storage.records.python.check_replicas`: the same in one pass."""
    cdef Py_buffer view
    cdef const unsigned char *p
    cdef Py_ssize_t end, position = 0
    cdef int32_t length
    cdef list found = []
    PyObject_GetBuffer(buf, &view, PyBUF_SIMPLE)
    try:
        p = <const unsigned char *>view.buf
        if view.len >= NOGIL_BYTES:
            with nogil:
                end = _right_frames(p, view.len)
        else:
            end = _right_frames(p, view.len)
        if end < view.len and (end == 0 or not _is_cut_off(p + end, view.len - end)):
            twin.check_replica(memoryview(buf), end)
        while position < end:
            length = <int32_t>be32(p + 8)
            found.append((
                position,
                length + 12,
                <int64_t>be64(p),
                <int64_t>be64(p) + <int32_t>be32(p + 23),
                <int64_t>be64(p + 35),
                <int32_t>be32(p + 12),
                <int64_t>be64(p + 43),
            ))
            position += length + 12
            p += length + 12
        return found
    finally:
        PyBuffer_Release(&view)


cdef Py_ssize_t _right_frames(const unsigned char *p, Py_ssize_t size) noexcept nogil:
    """Where the batches that are whole and right end."""
    cdef Py_ssize_t position = 0
    while position < size and frame_is_right(p + position, size - position, True):
        position += <int32_t>be32(p + position + 8) + 12
    return position


cdef bint _is_cut_off(const unsigned char *p, Py_ssize_t size) noexcept nogil:
    """What is there could be the beginning of a batch."""
    cdef int64_t length
    if size < 12:
        return True
    length = <int32_t>be32(p + 8)
    return length >= HEADER_BYTES - 12 and length + 12 > size


cdef int _walk(
    const unsigned char *p,
    const unsigned char *end,
    int32_t count,
    int64_t base_timestamp,
    int64_t earliest,
    int64_t latest,
    bint compacted,
    int64_t *max_timestamp,
    FaultAt *faults,
) noexcept nogil:
    """All records of a batch. Returns how many are at fault; the walk stops at MAX_FAULTS."""
    cdef RecordSpan record
    cdef int32_t index
    cdef int64_t timestamp, largest = -1
    cdef int fault, found = 0
    for index in range(count):
        fault = read_record(p, end, True, &record)
        if fault:
            faults[found].index = index
            faults[found].fault = fault
            faults[found].timestamp = 0
            return found + 1
        p = record.end
        timestamp = <int64_t>(<uint64_t>base_timestamp + <uint64_t>record.timestamp_delta)
        if timestamp > largest:
            largest = timestamp
        if record.offset_delta != index:
            fault = FAULT_OFFSET_DELTA
        elif compacted and record.key_length < 0:
            fault = FAULT_NO_KEY
        elif timestamp != -1 and (timestamp < earliest or timestamp > latest):
            fault = FAULT_TIMESTAMP
        if fault:
            faults[found].index = index
            faults[found].fault = fault
            faults[found].timestamp = timestamp if fault == FAULT_TIMESTAMP else 0
            found += 1
            if found == MAX_FAULTS:
                return found
    if p != end:
        faults[found].index = count - 1
        faults[found].fault = FAULT_TRAILING
        faults[found].timestamp = 0
        found += 1
    max_timestamp[0] = largest
    return found


cdef object _refuse(FaultAt *faults, int found, int64_t earliest, int64_t latest):
    return refusal(
        [(faults[i].index, faults[i].fault, faults[i].timestamp) for i in range(found)],
        earliest,
        latest,
    )


def check(batch, rules, int64_t now_ms):
    """Check one batch as a producer sent it (rule 37) and make of it what the log will hold.

    Raises CorruptMessage (framing, magic, CRC), MessageTooLarge, and InvalidRecord or
    InvalidTimestamp with ``record_errors``.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(batch, &view, PyBUF_SIMPLE)
    try:
        return _check(
            batch, <const unsigned char *>view.buf, view.len, _compiled(rules), now_ms
        )
    finally:
        PyBuffer_Release(&view)


cdef CheckedBatch _check(
    object batch, const unsigned char *p, Py_ssize_t size, _Rules rules, int64_t now_ms
):
    cdef bint right, appended = rules.appended
    cdef int codec, found
    cdef int64_t earliest = INT64_MIN, latest = INT64_MAX, max_timestamp = -1
    cdef Py_ssize_t max_batch_bytes = rules.max_batch_bytes
    cdef CheckedBatch checked
    if size > max_batch_bytes or size < HEADER_BYTES:
        right = False
    elif size >= NOGIL_BYTES:
        with nogil:
            right = frame_is_right(p, size, True) and header_is_right(p, size)
    else:
        right = frame_is_right(p, size, True) and header_is_right(p, size)
    if not right:
        twin.check_header(batch, max_batch_bytes)
        raise InvariantViolation("the kernels disagree about a batch header")
    codec = p[22] & CODEC_MASK
    if not appended:
        earliest, latest = _window(now_ms, rules.before_max_ms, rules.after_max_ms)
    area = _check_area(batch, p, size, codec, rules, earliest, latest, &max_timestamp)
    if appended:
        max_timestamp = now_ms
    checked = CheckedBatch.__new__(CheckedBatch)
    checked.area_bytes = size - HEADER_BYTES if area is None else len(area)
    checked.record_count = <int32_t>be32(p + 57)
    checked.max_timestamp = max_timestamp
    checked.producer_id = <int64_t>be64(p + 43)
    checked.producer_epoch = <int16_t>be16(p + 51)
    checked.base_sequence = <int32_t>be32(p + 53)
    checked.is_transactional = (p[22] & TRANSACTIONAL_BIT) != 0
    checked.codec = _CODECS[codec]
    if rules.codec is not None:
        checked.codec = rules.codec
    if checked.codec is not _CODECS[codec]:
        checked.data = _recompress(batch, area, p, checked.codec, appended, max_timestamp)
        checked.rewritten = True
    elif appended or max_timestamp != <int64_t>be64(p + 35):
        checked.data = _restamp(p, size, appended, max_timestamp)
        checked.rewritten = True
    else:
        checked.data = batch if PyMemoryView_Check(batch) else PyMemoryView_FromObject(batch)
        checked.size_bytes = size
        return checked
    checked.size_bytes = len(checked.data)
    twin.check_size(checked.size_bytes, max_batch_bytes)
    return checked


cdef (int64_t, int64_t) _window(int64_t now_ms, int64_t before_max_ms, int64_t after_max_ms):
    """Earliest and latest timestamp that are accepted; both spans are >= 0."""
    cdef int64_t earliest = INT64_MIN, latest = INT64_MAX
    if now_ms >= INT64_MIN + before_max_ms:
        earliest = now_ms - before_max_ms
    if now_ms <= INT64_MAX - after_max_ms:
        latest = now_ms + after_max_ms
    return earliest, latest


cdef object _check_area(
    object batch,
    const unsigned char *p,
    Py_ssize_t size,
    int codec,
    _Rules rules,
    int64_t earliest,
    int64_t latest,
    int64_t *max_timestamp,
):
    """Walk the records, decompressed first; returns the inflated area of a compressed batch."""
    cdef FaultAt[MAX_FAULTS] faults
    cdef const unsigned char *start = p + HEADER_BYTES
    cdef const unsigned char *end = p + size
    cdef const unsigned char *area_bytes
    cdef int32_t count = <int32_t>be32(p + 57)
    cdef int64_t base_timestamp = <int64_t>be64(p + 27)
    cdef int64_t limit = rules.max_inflated_bytes
    cdef bint compacted = rules.compacted
    cdef int found
    cdef bytes area = None
    if codec:
        area = decompress(_CODECS[codec], memoryview(batch)[HEADER_BYTES:], limit)
        area_bytes = area
        start = area_bytes
        end = start + len(area)
    elif end - start > limit:
        twin.check_area(end - start, limit)
    if end - start >= NOGIL_BYTES:
        with nogil:
            found = _walk(
                start, end, count, base_timestamp, earliest, latest, compacted,
                max_timestamp, faults,
            )
    else:
        found = _walk(
            start, end, count, base_timestamp, earliest, latest, compacted, max_timestamp, faults
        )
    if found:
        raise _refuse(faults, found, earliest, latest)
    return area


cdef object _restamp(
    const unsigned char *p, Py_ssize_t size, bint appended, int64_t max_timestamp
):
    """A copy of the batch with another max timestamp and timestamp type."""
    cdef object copy = PyByteArray_FromStringAndSize(<const char *>p, size)
    cdef unsigned char *out = <unsigned char *>PyByteArray_AsString(copy)
    put_be16(out + 21, be16(p + 21) | (TIMESTAMP_TYPE_BIT if appended else 0))
    put_be64(out + 35, <uint64_t>max_timestamp)
    put_be32(out + 17, kept_crc32c(0, out + 21, size - 21))
    return PyMemoryView_FromObject(copy)


cdef object _recompress(
    object batch,
    object area,
    const unsigned char *p,
    object codec,
    bint appended,
    int64_t max_timestamp,
):
    stored = memoryview(batch)[HEADER_BYTES:]
    return memoryview(
        rewritten_batch(
            _header(p),
            stored,
            stored if area is None else area,
            codec=codec,
            timestamp_type=1 if appended else 0,
            max_timestamp=max_timestamp,
        )
    )


def scan(buf, *, inflate_limit=_DEFAULT_INFLATE_LIMIT, bint check_crc=True):
    """The records of the whole batches that ``buf`` consists of, as columns.

    ``inflate_limit`` bounds the inflated size of all batches together. Control batches are
    included. Raises CorruptMessage when a batch is damaged or cut off, InvalidRecord when its
    records are.
    """
    cdef Py_buffer view
    cdef Area *areas = NULL
    PyObject_GetBuffer(buf, &view, PyBUF_SIMPLE)
    try:
        return _scan(buf, &view, &areas, inflate_limit, check_crc)
    finally:
        free(areas)
        PyBuffer_Release(&view)


cdef object _scan(object buf, Py_buffer *view, Area **areas, object inflate_limit, bint check_crc):
    cdef const unsigned char *p = <const unsigned char *>view.buf
    cdef Py_buffer inflated
    cdef Py_ssize_t batches, i
    cdef int64_t rows = 0, filled
    cdef int32_t index = 0
    cdef int fault = 0
    cdef bint compressed = False
    cdef char *columns
    if view.len >= NOGIL_BYTES:
        with nogil:
            batches = _frames(p, view.len, check_crc, areas)
    else:
        batches = _frames(p, view.len, check_crc, areas)
    if batches < 0:
        _raise_bad_frame(buf, check_crc)
    headers = []
    for i in range(batches):
        headers.append(_header(p + areas[0][i].position))
        compressed |= (areas[0][i].attributes & CODEC_MASK) != 0
    data = _inflate(buf, areas[0], batches, inflate_limit) if compressed else buf
    for i in range(batches):
        # No record is shorter than 7 bytes: a count that lies does not make us allocate.
        rows += min(areas[0][i].record_count, (areas[0][i].end - areas[0][i].start) // 7)
    table = PyByteArray_FromStringAndSize(NULL, rows * ROW_BYTES)
    columns = PyByteArray_AsString(table)
    PyObject_GetBuffer(data, &inflated, PyBUF_SIMPLE)
    try:
        p = <const unsigned char *>inflated.buf
        if inflated.len >= NOGIL_BYTES:
            with nogil:
                filled = _fill(p, areas[0], batches, rows, columns, &index, &fault)
        else:
            filled = _fill(p, areas[0], batches, rows, columns, &index, &fault)
    finally:
        PyBuffer_Release(&inflated)
    if fault:
        raise refusal([(index, fault, 0)], 0, 0)
    return _columns(memoryview(data), headers, table, rows)


def find_records(
    area, int32_t count, int64_t base_offset, int64_t first, int64_t max_records, int64_t max_bytes
):
    """See :func:`kept.storage.records.python.find_records`."""
    cdef Py_buffer view
    cdef Py_ssize_t start = 0, end = 0
    cdef int64_t number
    cdef int32_t index = 0
    cdef int fault = 0
    PyObject_GetBuffer(area, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            number = _find(
                <const unsigned char *>view.buf, view.len, count, base_offset, first, max_records,
                max_bytes, &start, &end, &index, &fault,
            )
    finally:
        PyBuffer_Release(&view)
    if fault:
        raise refusal([(index, fault, 0)], 0, 0)
    return start, end, number


cdef int64_t _find(
    const unsigned char *data,
    Py_ssize_t size,
    int32_t count,
    int64_t base_offset,
    int64_t first,
    int64_t max_records,
    int64_t max_bytes,
    Py_ssize_t *start,
    Py_ssize_t *end,
    int32_t *index,
    int *fault,
) noexcept nogil:
    cdef RecordSpan record
    cdef const unsigned char *p = data
    cdef int64_t number = 0, offset
    cdef int32_t at
    for at in range(count):
        fault[0] = read_record(p, data + size, False, &record)
        if fault[0]:
            index[0] = at
            return 0
        if number and (number >= max_records or record.end - data - start[0] > max_bytes):
            break
        offset = <int64_t>(<uint64_t>base_offset + <uint64_t><int64_t>record.offset_delta)
        if number or offset >= first:
            if not number:
                start[0] = p - data
            number += 1
        p = record.end
    end[0] = p - data
    if not number:
        start[0] = end[0]
    return number


cdef object _columns(object data, list headers, object table, int64_t rows):
    view = PyMemoryView_FromObject(table)
    cdef int64_t at = 5 * 8 * rows
    return RecordColumns(
        rows,
        data,
        headers,
        view[: 8 * rows].cast("q"),
        view[8 * rows : 16 * rows].cast("q"),
        view[16 * rows : 24 * rows].cast("q"),
        view[at : at + 4 * rows].cast("i"),
        view[24 * rows : 32 * rows].cast("q"),
        view[at + 4 * rows : at + 8 * rows].cast("i"),
        view[32 * rows : 40 * rows].cast("q"),
        view[at + 8 * rows : at + 12 * rows].cast("i"),
        view[at + 12 * rows : at + 16 * rows].cast("i"),
    )


cdef Py_ssize_t _frames(
    const unsigned char *p, Py_ssize_t size, bint check_crc, Area **areas
) noexcept nogil:
    """Find all batches. Returns how many, or -1 when one is damaged, cut off or names no codec."""
    cdef Py_ssize_t position = 0, count = 0, room = 0
    cdef Area *grown
    cdef Area *area
    while position < size:
        if not frame_is_right(p + position, size - position, check_crc):
            return -1
        if be16(p + position + 21) & CODEC_MASK > 4:
            return -1
        if count == room:
            room = 2 * room + 16
            grown = <Area *>realloc(areas[0], room * sizeof(Area))
            if grown == NULL:
                return -1
            areas[0] = grown
        area = &areas[0][count]
        count += 1
        area.base_offset = <int64_t>be64(p + position)
        area.base_timestamp = <int64_t>be64(p + position + 27)
        area.max_timestamp = <int64_t>be64(p + position + 35)
        area.record_count = <int32_t>be32(p + position + 57)
        area.attributes = be16(p + position + 21)
        area.position = position
        area.start = position + HEADER_BYTES
        position += <Py_ssize_t>(<int32_t>be32(p + position + 8)) + 12
        area.end = position
    return count


cdef object _raise_bad_frame(object buf, bint check_crc):
    twin.open_frames(memoryview(buf), check_crc)
    raise MemoryError("no memory for the batches of a scan")


cdef object _inflate(object buf, Area *areas, Py_ssize_t batches, object inflate_limit):
    """One buffer of all record areas; moves start and end of each there."""
    cdef Py_ssize_t i, size = 0
    cdef Area *area
    whole = memoryview(buf)
    parts = []
    for i in range(batches):
        area = &areas[i]
        part = whole[area.start : area.end]
        if area.attributes & CODEC_MASK and area.record_count:
            part = decompress(_CODECS[area.attributes & CODEC_MASK], part, inflate_limit - size)
        parts.append(part)
        area.start = size
        size += len(part)
        area.end = size
    return parts[0] if batches == 1 else b"".join(parts)


cdef int64_t _fill(
    const unsigned char *data,
    Area *areas,
    Py_ssize_t batches,
    int64_t rows,
    char *table,
    int32_t *index,
    int *fault,
) noexcept nogil:
    """Write the columns. Returns the rows written; index and fault say where it had to stop."""
    cdef int64_t *offsets = <int64_t *>table
    cdef int64_t *timestamps = offsets + rows
    cdef int64_t *keys = timestamps + rows
    cdef int64_t *values = keys + rows
    cdef int64_t *headers = values + rows
    cdef int32_t *key_lengths = <int32_t *>(headers + rows)
    cdef int32_t *value_lengths = key_lengths + rows
    cdef int32_t *header_lengths = value_lengths + rows
    cdef int32_t *batch_index = header_lengths + rows
    cdef RecordSpan record
    cdef const unsigned char *p
    cdef const unsigned char *end
    cdef int64_t row = 0, base_offset, base_timestamp, max_timestamp
    cdef Py_ssize_t i
    cdef int32_t at
    cdef bint appended
    for i in range(batches):
        p = data + areas[i].start
        end = data + areas[i].end
        base_offset = areas[i].base_offset
        base_timestamp = areas[i].base_timestamp
        max_timestamp = areas[i].max_timestamp
        appended = (areas[i].attributes & TIMESTAMP_TYPE_BIT) != 0
        for at in range(areas[i].record_count):
            fault[0] = read_record(p, end, False, &record)
            if fault[0]:
                index[0] = at
                return row
            p = record.end
            offsets[row] = <int64_t>(<uint64_t>base_offset + <uint64_t><int64_t>record.offset_delta)
            if appended:
                timestamps[row] = max_timestamp
            else:
                timestamps[row] = <int64_t>(
                    <uint64_t>base_timestamp + <uint64_t>record.timestamp_delta
                )
            keys[row] = record.key - data
            values[row] = record.value - data
            headers[row] = record.headers - data
            key_lengths[row] = record.key_length
            value_lengths[row] = record.value_length
            header_lengths[row] = <int32_t>(record.end - record.headers)
            batch_index[row] = <int32_t>i
            row += 1
        if p != end:
            index[0] = areas[i].record_count - 1
            fault[0] = FAULT_TRAILING
            return row
    return row
