# cython: language_level=3
"""Kafka's integers, signed and big-endian, from and to bytes."""

from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from storage.records._wire cimport be16, be32, be64, put_be16, put_be32, put_be64


cdef inline int16_t _i16(const uint8_t* p) noexcept nogil:
    return <int16_t>be16(p)


cdef inline int32_t _i32(const uint8_t* p) noexcept nogil:
    return <int32_t>be32(p)


cdef inline int64_t _i64(const uint8_t* p) noexcept nogil:
    return <int64_t>be64(p)


cdef inline void _w16(uint8_t* p, int16_t value) noexcept nogil:
    put_be16(p, <uint16_t>value)


cdef inline void _w32(uint8_t* p, int32_t value) noexcept nogil:
    put_be32(p, <uint32_t>value)


cdef inline void _w64(uint8_t* p, int64_t value) noexcept nogil:
    put_be64(p, <uint64_t>value)
