/* SipHash-2-4 with 128 bits of output (Aumasson, Bernstein), a keyed pseudo-random function: without
 * the key nobody can construct two record keys that collide.
 */
#ifndef KEPT_SIPHASH_H
#define KEPT_SIPHASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KEPT_SIP_ROTL(x, b) (((x) << (b)) | ((x) >> (64 - (b))))
#define KEPT_SIP_ROUND \
    do { \
        v0 += v1; v1 = KEPT_SIP_ROTL(v1, 13); v1 ^= v0; v0 = KEPT_SIP_ROTL(v0, 32); \
        v2 += v3; v3 = KEPT_SIP_ROTL(v3, 16); v3 ^= v2; \
        v0 += v3; v3 = KEPT_SIP_ROTL(v3, 21); v3 ^= v0; \
        v2 += v1; v1 = KEPT_SIP_ROTL(v1, 17); v1 ^= v2; v2 = KEPT_SIP_ROTL(v2, 32); \
    } while (0)

static inline uint64_t kept_sip_load(const unsigned char *p)
{
    uint64_t word;
    memcpy(&word, p, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static inline void kept_siphash128(uint64_t k0, uint64_t k1, const unsigned char *p, size_t length,
                                   uint64_t *low, uint64_t *high)
{
    uint64_t v0 = k0 ^ 0x736f6d6570736575ULL, v1 = k1 ^ 0x646f72616e646f6dULL ^ 0xee;
    uint64_t v2 = k0 ^ 0x6c7967656e657261ULL, v3 = k1 ^ 0x7465646279746573ULL;
    const unsigned char *end = p + (length & ~(size_t)7);
    uint64_t last = (uint64_t)length << 56;
    for (; p != end; p += 8) {
        uint64_t word = kept_sip_load(p);
        v3 ^= word;
        KEPT_SIP_ROUND;
        KEPT_SIP_ROUND;
        v0 ^= word;
    }
    switch (length & 7) {
    case 7: last |= (uint64_t)p[6] << 48; /* fall through */
    case 6: last |= (uint64_t)p[5] << 40; /* fall through */
    case 5: last |= (uint64_t)p[4] << 32; /* fall through */
    case 4: last |= (uint64_t)p[3] << 24; /* fall through */
    case 3: last |= (uint64_t)p[2] << 16; /* fall through */
    case 2: last |= (uint64_t)p[1] << 8; /* fall through */
    case 1: last |= (uint64_t)p[0];
    }
    v3 ^= last;
    KEPT_SIP_ROUND;
    KEPT_SIP_ROUND;
    v0 ^= last;
    v2 ^= 0xee;
    KEPT_SIP_ROUND; KEPT_SIP_ROUND; KEPT_SIP_ROUND; KEPT_SIP_ROUND;
    *low = v0 ^ v1 ^ v2 ^ v3;
    v1 ^= 0xdd;
    KEPT_SIP_ROUND; KEPT_SIP_ROUND; KEPT_SIP_ROUND; KEPT_SIP_ROUND;
    *high = v0 ^ v1 ^ v2 ^ v3;
}

#endif
