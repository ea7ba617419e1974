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

    # kept.compaction.cleaner.key_tracker
    RING = 64
    TABLE_SLOTS = 4096

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

cdef struct Watched:
    const uint8_t *table
    const uint64_t *hashes
    int64_t *offsets
    int64_t *counts

cdef inline int attach(Watched *watched, object watch, uint64_t k0, uint64_t k1) except -1:
    """Note into a ``kept.compaction.cleaner.key_tracker.Watch``, which the caller keeps alive."""
    cdef uint8_t[::1] table = watch.table
    cdef uint64_t[::1] hashes = watch.hashes
    cdef int64_t[::1] offsets = watch.offsets, counts = watch.counts
    cdef uint64_t low = 0, high = 0
    cdef const uint8_t[::1] raw
    cdef Py_ssize_t i
    if not counts.shape[0]:
        return 0
    if not watch.hashed:
        for i in range(counts.shape[0]):
            raw = watch.keys[i]
            kept_siphash128(k0, k1, &raw[0] if raw.shape[0] else NULL, <size_t>raw.shape[0],
                            &low, &high)
            hashes[2 * i] = low
            hashes[2 * i + 1] = high
            if table[low % TABLE_SLOTS]:
                counts[i] = -1
            else:
                table[low % TABLE_SLOTS] = <uint8_t>(i + 1)
        watch.hashed = True
    watched.table = &table[0]
    watched.hashes = &hashes[0]
    watched.offsets = &offsets[0]
    watched.counts = &counts[0]
    return 0

cdef inline void note(Watched *watched, uint64_t low, uint64_t high, int64_t offset) noexcept nogil:
    """A record, if its key is watched."""
    cdef size_t i
    cdef int64_t count
    if watched.table == NULL or not watched.table[low % TABLE_SLOTS]:
        return
    i = watched.table[low % TABLE_SLOTS] - 1
    if watched.hashes[2 * i] != low or watched.hashes[2 * i + 1] != high:
        return
    count = watched.counts[i]
    if count and offset <= watched.offsets[i * RING + (count - 1) % RING]:
        return
    watched.offsets[i * RING + count % RING] = offset
    watched.counts[i] = count + 1
