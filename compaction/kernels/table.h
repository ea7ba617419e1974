/* The memory of a hash table that is hit at random. */
#ifndef KEPT_TABLE_H
#define KEPT_TABLE_H

#include <stdint.h>
#include <stdlib.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

/* Which of `slots` a hash belongs to. */
static inline uint64_t kept_scale(uint64_t hash, uint64_t slots)
{
    return (uint64_t)(((unsigned __int128)hash * slots) >> 64);
}

static inline void kept_prefetch(const void *p)
{
    __builtin_prefetch(p, 1, 1);
}

/* Zeroed memory, in huge pages where the system has them. */
static inline void *kept_table_new(size_t size)
{
#ifdef __linux__
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
#ifdef MADV_HUGEPAGE
    madvise(p, size, MADV_HUGEPAGE);
#endif
    return p;
#else
    return calloc(size, 1);
#endif
}

static inline void kept_table_free(void *p, size_t size)
{
    if (!p)
        return;
#ifdef __linux__
    munmap(p, size);
#else
    (void)size;
    free(p);
#endif
}

#endif
