# Big-endian integers, zig-zag varints and CRC-32C, inline, for every kernel:
#     from storage.records._wire cimport read_varint32, ...
# (by the folder's name, not the package's: so it compiles in a source archive, which has no links)
# No read passes the end that it is given; no function needs the GIL.

from libc.stdint cimport int16_t, int32_t, int64_t, uint16_t, uint32_t, uint64_t, uint8_t

cdef extern from "crc32c.h" nogil:
    # CRC of length bytes at p, continuing crc (0 to begin).
    uint32_t kept_crc32c(uint32_t crc, const unsigned char *p, size_t length)
    uint32_t kept_crc32c_software(uint32_t crc, const unsigned char *p, size_t length)

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    #if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    #define KEPT_SWAP(bits, v) (v)
    #else
    #define KEPT_SWAP(bits, v) __builtin_bswap##bits(v)
    #endif

    static inline uint16_t kept_be16(const unsigned char *p)
    { uint16_t v; memcpy(&v, p, 2); return KEPT_SWAP(16, v); }
    static inline uint32_t kept_be32(const unsigned char *p)
    { uint32_t v; memcpy(&v, p, 4); return KEPT_SWAP(32, v); }
    static inline uint64_t kept_be64(const unsigned char *p)
    { uint64_t v; memcpy(&v, p, 8); return KEPT_SWAP(64, v); }
    static inline void kept_put_be16(unsigned char *p, uint16_t v)
    { v = KEPT_SWAP(16, v); memcpy(p, &v, 2); }
    static inline void kept_put_be32(unsigned char *p, uint32_t v)
    { v = KEPT_SWAP(32, v); memcpy(p, &v, 4); }
    static inline void kept_put_be64(unsigned char *p, uint64_t v)
    { v = KEPT_SWAP(64, v); memcpy(p, &v, 8); }

    /* A zig-zag varint at p; returns what follows it, NULL when it is cut off or does not fit. */
    static inline const unsigned char *kept_varint64(
        const unsigned char *p, const unsigned char *end, int64_t *out)
    {
        uint64_t number = 0;
        for (int shift = 0; shift < 64; shift += 7) {
            if (p >= end)
                return NULL;
            unsigned char byte = *p++;
            if (shift == 63 && byte > 1)
                return NULL;
            number |= (uint64_t)(byte & 0x7f) << shift;
            if (byte < 0x80) {
                *out = (int64_t)(number >> 1) ^ -(int64_t)(number & 1);
                return p;
            }
        }
        return NULL;
    }
    static inline const unsigned char *kept_varint32(
        const unsigned char *p, const unsigned char *end, int32_t *out)
    {
        if (p < end && *p < 0x80) {
            uint32_t one = *p;
            *out = (int32_t)(one >> 1) ^ -(int32_t)(one & 1);
            return p + 1;
        }
        uint32_t number = 0;
        for (int shift = 0; shift < 35; shift += 7) {
            if (p >= end)
                return NULL;
            unsigned char byte = *p++;
            if (shift == 28 && byte > 0x0f)
                return NULL;
            number |= (uint32_t)(byte & 0x7f) << shift;
            if (byte < 0x80) {
                *out = (int32_t)(number >> 1) ^ -(int32_t)(number & 1);
                return p;
            }
        }
        return NULL;
    }

    /* Write a zig-zag varint at p (10 bytes at most); returns what follows it. */
    static inline unsigned char *kept_put_varint(unsigned char *p, int64_t number)
    {
        uint64_t rest = ((uint64_t)number << 1) ^ (uint64_t)(number >> 63);
        while (rest > 0x7f) {
            *p++ = (unsigned char)(rest & 0x7f) | 0x80;
            rest >>= 7;
        }
        *p++ = (unsigned char)rest;
        return p;
    }
    static inline int kept_varint_size(int64_t number)
    {
        uint64_t rest = ((uint64_t)number << 1) ^ (uint64_t)(number >> 63);
        int size = 1;
        while (rest > 0x7f) { size++; rest >>= 7; }
        return size;
    }
    """
    uint16_t be16 "kept_be16"(const unsigned char *p) noexcept nogil
    uint32_t be32 "kept_be32"(const unsigned char *p) noexcept nogil
    uint64_t be64 "kept_be64"(const unsigned char *p) noexcept nogil
    void put_be16 "kept_put_be16"(unsigned char *p, uint16_t v) noexcept nogil
    void put_be32 "kept_put_be32"(unsigned char *p, uint32_t v) noexcept nogil
    void put_be64 "kept_put_be64"(unsigned char *p, uint64_t v) noexcept nogil
    # A zig-zag varint at p; returns what follows it, NULL when it is cut off or does not fit.
    const unsigned char *read_varint64 "kept_varint64"(
        const unsigned char *p, const unsigned char *end, int64_t *out) noexcept nogil
    const unsigned char *read_varint32 "kept_varint32"(
        const unsigned char *p, const unsigned char *end, int32_t *out) noexcept nogil
    # Write a zig-zag varint (10 bytes at most); returns what follows it.
    unsigned char *put_varint "kept_put_varint"(unsigned char *p, int64_t number) noexcept nogil
    int varint_size "kept_varint_size"(int64_t number) noexcept nogil

# One record.

cdef struct RecordSpan:
    int64_t timestamp_delta
    int32_t offset_delta
    int32_t key_length          # -1: null
    int32_t value_length        # -1: null
    const unsigned char *key
    const unsigned char *value
    const unsigned char *headers    # begins with their count, ends at `end`
    const unsigned char *end        # the next record

cdef enum:
    # kept.storage.records.faults.Fault
    FAULT_MISSING = 1
    FAULT_VARINT = 2
    FAULT_LENGTH = 3
    FAULT_FIELD = 4
    FAULT_HEADERS = 5
    FAULT_SIZE = 6
    FAULT_TRAILING = 7
    FAULT_OFFSET_DELTA = 17
    FAULT_NO_KEY = 18
    FAULT_TIMESTAMP = 19
    MIN_RECORD_BODY = 6


cdef inline int read_record(
    const unsigned char *p, const unsigned char *end, bint strict, RecordSpan *span
) noexcept nogil:
    """The record at p, which must end at or before end; 0, or what is wrong with it.

    strict knows no negative length but -1; reading takes any for null, as Java does.
    """
    cdef int32_t length, count
    if p >= end:
        return FAULT_MISSING
    p = read_varint32(p, end, &length)
    if p == NULL:
        return FAULT_VARINT
    if length < MIN_RECORD_BODY or length > end - p:
        return FAULT_LENGTH
    end = p + length
    span.end = end
    p = read_varint64(p + 1, end, &span.timestamp_delta)
    if p == NULL:
        return FAULT_VARINT
    p = read_varint32(p, end, &span.offset_delta)
    if p == NULL:
        return FAULT_VARINT
    p = read_varint32(p, end, &length)
    if p == NULL:
        return FAULT_VARINT
    if length > end - p or (strict and length < -1):
        return FAULT_FIELD
    span.key = p
    span.key_length = length if length >= 0 else -1
    if length > 0:
        p += length
    p = read_varint32(p, end, &length)
    if p == NULL:
        return FAULT_VARINT
    if length > end - p or (strict and length < -1):
        return FAULT_FIELD
    span.value = p
    span.value_length = length if length >= 0 else -1
    if length > 0:
        p += length
    span.headers = p
    p = read_varint32(p, end, &count)
    if p == NULL:
        return FAULT_VARINT
    if count < 0 or count > end - p:
        return FAULT_HEADERS
    while count > 0:
        count -= 1
        p = read_varint32(p, end, &length)
        if p == NULL:
            return FAULT_VARINT
        if length < 0 or length > end - p:
            return FAULT_HEADERS
        p = read_varint32(p + length, end, &length)
        if p == NULL:
            return FAULT_VARINT
        if length > end - p or (strict and length < -1):
            return FAULT_HEADERS
        if length > 0:
            p += length
    return 0 if p == end else FAULT_SIZE


# One batch. kept.storage.records.header has the layout.

cdef enum:
    HEADER_BYTES = 61
    CODEC_MASK = 0x07
    TIMESTAMP_TYPE_BIT = 0x08
    TRANSACTIONAL_BIT = 0x10
    CONTROL_BIT = 0x20
    HORIZON_BIT = 0x40


cdef inline bint frame_is_right(
    const unsigned char *p, Py_ssize_t size, bint check_crc
) noexcept nogil:
    """A whole batch begins at p, of which size bytes are there. Mirrors ``twin.check_replica``."""
    cdef int64_t length
    if size < HEADER_BYTES or p[16] != 2:
        return False
    length = <int32_t>be32(p + 8)
    if length < HEADER_BYTES - 12 or length + 12 > size:
        return False
    if <int32_t>be32(p + 57) < 0 or <int32_t>be32(p + 23) < 0:
        return False
    return not check_crc or kept_crc32c(0, p + 21, length + 12 - 21) == be32(p + 17)


cdef inline bint header_is_right(const unsigned char *p, Py_ssize_t size) noexcept nogil:
    """The frame at p is one that a producer may send. Mirrors ``twin.check_header``."""
    cdef int32_t count = <int32_t>be32(p + 57)
    cdef int attributes = be16(p + 21)
    if <int32_t>be32(p + 8) + <int64_t>12 != size or be64(p) != 0:
        return False
    if count == 0 or count != <int64_t><int32_t>be32(p + 23) + 1:
        return False
    if attributes & (CONTROL_BIT | TIMESTAMP_TYPE_BIT | HORIZON_BIT):
        return False
    if attributes & CODEC_MASK > 4:
        return False
    return <int64_t>be64(p + 43) == -1 or <int32_t>be32(p + 53) >= 0
