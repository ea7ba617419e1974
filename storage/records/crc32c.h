/* CRC-32C (Castagnoli), reflected polynomial 0x82F63B78, as in Kafka's record batches.
 *
 * kept_crc32c() picks at first use: SSE4.2's crc32 instruction on three interleaved lanes that are
 * joined with tables of zero-extension (x86-64), or tables of eight bytes a step (anything else).
 * Every extension module that includes this file has tables of its own (static), filled once;
 * filling them twice at the same time from two threads writes the same values.
 */
#ifndef KEPT_CRC32C_H
#define KEPT_CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KEPT_CRC32C_POLYNOMIAL 0x82F63B78u
#define KEPT_CRC32C_LONG 2048  /* bytes of a lane, large blocks */
#define KEPT_CRC32C_SHORT 256  /* bytes of a lane, small blocks */

static uint32_t kept_crc32c_table[8][256];
static uint32_t kept_crc32c_zeros_long[4][256];
static uint32_t kept_crc32c_zeros_short[4][256];

static void kept_crc32c_fill(void)
{
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t crc = n;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? (crc >> 1) ^ KEPT_CRC32C_POLYNOMIAL : crc >> 1;
        kept_crc32c_table[0][n] = crc;
    }
    for (uint32_t n = 0; n < 256; n++)
        for (int k = 1; k < 8; k++) {
            uint32_t crc = kept_crc32c_table[k - 1][n];
            kept_crc32c_table[k][n] = (crc >> 8) ^ kept_crc32c_table[0][crc & 0xff];
        }
}

/* Tables that advance a CRC over `length` zero bytes. */
static void kept_crc32c_fill_zeros(uint32_t zeros[4][256], size_t length)
{
    uint32_t basis[32];
    for (int bit = 0; bit < 32; bit++) {
        uint32_t crc = (uint32_t)1 << bit;
        for (size_t i = 0; i < length; i++)
            crc = (crc >> 8) ^ kept_crc32c_table[0][crc & 0xff];
        basis[bit] = crc;
    }
    for (int k = 0; k < 4; k++)
        for (uint32_t n = 0; n < 256; n++) {
            uint32_t crc = 0;
            for (int bit = 0; bit < 8; bit++)
                if (n >> bit & 1)
                    crc ^= basis[8 * k + bit];
            zeros[k][n] = crc;
        }
}

static uint32_t kept_crc32c_software(uint32_t crc, const unsigned char *p, size_t length)
{
    crc = ~crc;
    while (length >= 8) {
        uint32_t low = crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16
                              | (uint32_t)p[3] << 24);
        crc = kept_crc32c_table[7][low & 0xff] ^ kept_crc32c_table[6][low >> 8 & 0xff]
              ^ kept_crc32c_table[5][low >> 16 & 0xff] ^ kept_crc32c_table[4][low >> 24]
              ^ kept_crc32c_table[3][p[4]] ^ kept_crc32c_table[2][p[5]]
              ^ kept_crc32c_table[1][p[6]] ^ kept_crc32c_table[0][p[7]];
        p += 8;
        length -= 8;
    }
    while (length--)
        crc = (crc >> 8) ^ kept_crc32c_table[0][(crc ^ *p++) & 0xff];
    return ~crc;
}

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define KEPT_CRC32C_X86 1
#include <nmmintrin.h>

/* For newer compilers crc32 is a feature beside sse4.2. Where their baseline is told to be without
 * (-mno-crc32), they refuse to inline the intrinsics into a function that has sse4.2 alone. */
#if (defined(__clang__) && __clang_major__ >= 14) || (!defined(__clang__) && __GNUC__ >= 12)
#define KEPT_CRC32C_TARGET __attribute__((target("sse4.2,crc32")))
#else
#define KEPT_CRC32C_TARGET __attribute__((target("sse4.2")))
#endif

static inline uint32_t kept_crc32c_shift(uint32_t zeros[4][256], uint32_t crc)
{
    return zeros[0][crc & 0xff] ^ zeros[1][crc >> 8 & 0xff] ^ zeros[2][crc >> 16 & 0xff]
           ^ zeros[3][crc >> 24];
}

static inline uint64_t kept_crc32c_load(const unsigned char *p)
{
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

KEPT_CRC32C_TARGET
static inline uint32_t kept_crc32c_lanes(uint32_t zeros[4][256], size_t lane, uint32_t crc,
                                         const unsigned char *p)
{
    uint64_t a = crc, b = 0, c = 0;
    for (size_t i = 0; i < lane; i += 8) {
        a = _mm_crc32_u64(a, kept_crc32c_load(p + i));
        b = _mm_crc32_u64(b, kept_crc32c_load(p + lane + i));
        c = _mm_crc32_u64(c, kept_crc32c_load(p + 2 * lane + i));
    }
    crc = kept_crc32c_shift(zeros, (uint32_t)a) ^ (uint32_t)b;
    return kept_crc32c_shift(zeros, crc) ^ (uint32_t)c;
}

KEPT_CRC32C_TARGET
static uint32_t kept_crc32c_sse42(uint32_t crc, const unsigned char *p, size_t length)
{
    crc = ~crc;
    while (length >= 3 * KEPT_CRC32C_LONG) {
        crc = kept_crc32c_lanes(kept_crc32c_zeros_long, KEPT_CRC32C_LONG, crc, p);
        p += 3 * KEPT_CRC32C_LONG;
        length -= 3 * KEPT_CRC32C_LONG;
    }
    while (length >= 3 * KEPT_CRC32C_SHORT) {
        crc = kept_crc32c_lanes(kept_crc32c_zeros_short, KEPT_CRC32C_SHORT, crc, p);
        p += 3 * KEPT_CRC32C_SHORT;
        length -= 3 * KEPT_CRC32C_SHORT;
    }
    uint64_t wide = crc;
    while (length >= 8) {
        wide = _mm_crc32_u64(wide, kept_crc32c_load(p));
        p += 8;
        length -= 8;
    }
    crc = (uint32_t)wide;
    while (length--)
        crc = _mm_crc32_u8(crc, *p++);
    return ~crc;
}
#endif

typedef uint32_t (*kept_crc32c_function)(uint32_t, const unsigned char *, size_t);
static kept_crc32c_function kept_crc32c_chosen = NULL;

static kept_crc32c_function kept_crc32c_choose(void)
{
    kept_crc32c_function chosen = kept_crc32c_software;
    kept_crc32c_fill();
#ifdef KEPT_CRC32C_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("sse4.2")) {
        kept_crc32c_fill_zeros(kept_crc32c_zeros_long, KEPT_CRC32C_LONG);
        kept_crc32c_fill_zeros(kept_crc32c_zeros_short, KEPT_CRC32C_SHORT);
        chosen = kept_crc32c_sse42;
    }
#endif
    __atomic_store_n(&kept_crc32c_chosen, chosen, __ATOMIC_RELEASE);
    return chosen;
}

/* CRC of `length` bytes at `p`, continuing `crc` (0 to begin). */
static inline uint32_t kept_crc32c(uint32_t crc, const unsigned char *p, size_t length)
{
    kept_crc32c_function chosen = __atomic_load_n(&kept_crc32c_chosen, __ATOMIC_ACQUIRE);
    if (chosen == NULL)
        chosen = kept_crc32c_choose();
    return chosen(crc, p, length);
}

#endif
