# cython: language_level=3
"""What both kernels of compaction are made of: the hash and the memory of a table, the framing of
batches in a chunk, and arrays of 32-bit words that grow. Whoever uses ``as_array`` imports
``array`` itself: here the name is only declared."""

from array import array

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport realloc

from storage.records._wire cimport be32, kept_crc32c

cdef extern from "siphash.h" nogil:
    void kept_siphash128(uint64_t k0, uint64_t k1, const uint8_t *p, size_t length,
                         uint64_t *low, uint64_t *high)

cdef extern from "table.h" nogil:
    uint64_t kept_scale(uint64_t hash, uint64_t slots)
    void kept_prefetch(const void *p)
    void *kept_table_new(size_t size)
    void kept_table_free(void *p, size_t size)

cdef enum:
    HEADER = 61
    SPECIAL = 0x37  # attribute bits of a batch that the caller handles

cdef struct Words:
    uint32_t *at
    size_t size
    size_t room

cdef inline int push(Words *words, uint32_t value) noexcept nogil:
    """Append; -1 without memory."""
    cdef uint32_t *grown
    if words.size == words.room:
        words.room = words.room * 2 if words.room else 256
        grown = <uint32_t *>realloc(words.at, words.room * sizeof(uint32_t))
        if grown == NULL:
            return -1
        words.at = grown
    words.at[words.size] = value
    words.size += 1
    return 0

cdef inline object as_array(Words *words):
    """The words as Python's ``array("I")``."""
    found = array("I")
    if words.size:
        found.frombytes((<const uint8_t *>words.at)[: words.size * sizeof(uint32_t)])
    return found

cdef inline int64_t frame(const uint8_t *p, int64_t size, const char **why) noexcept nogil:
    """Length of the whole batch at p; 0 when it is cut off, or ``why`` is set."""
    cdef int64_t length
    if size < HEADER:
        return 0
    length = <int64_t><int32_t>be32(p + 8) + 12
    if p[16] != 2:
        why[0] = b"magic is not 2"
        return 0
    if length < HEADER:
        why[0] = b"batch length is less than a header's"
        return 0
    if length > size:
        return 0
    if kept_crc32c(0, p + 21, <size_t>(length - 21)) != be32(p + 17):
        why[0] = b"CRC does not match"
        return 0
    return length
