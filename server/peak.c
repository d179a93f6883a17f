#include "peak.h"

#include "cmd_common.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PASSES = 6 };
#define BUFFER ((size_t)1 << 30) /* more than the last cache of any machine keeps */

typedef uint64_t word8 __attribute__((vector_size(64)));

typedef struct {
    uint8_t *p;
    size_t n; /* a multiple of 64 */
    uint64_t sum;
    bool fill;
} slice;

static void *read_slice(void *arg)
{
    slice *s = arg;
    if (s->fill) {
        memset(s->p, 1, s->n);
        return NULL;
    }
    word8 a = {0}, b = {0}, c = {0}, d = {0};
    const word8 *p = (const word8 *)s->p, *end = p + s->n / sizeof *p;
    for (; p + 4 <= end; p += 4) {
        a += p[0];
        b += p[1];
        c += p[2];
        d += p[3];
    }
    a += b + c + d;
    for (int i = 0; i < 8; i++)
        s->sum += a[i];
    return NULL;
}

static void run_all(slice *slices, pthread_t *threads, uint32_t n)
{
    uint32_t started = 1;
    while (started < n && !pthread_create(&threads[started], NULL, read_slice, &slices[started]))
        started++;
    read_slice(&slices[0]);
    for (uint32_t i = 1; i < started; i++)
        pthread_join(threads[i], NULL);
    for (uint32_t i = started; i < n; i++)
        read_slice(&slices[i]);
}

double srv_peak_read(uint32_t n_threads)
{
    size_t eighth = (size_t)sysconf(_SC_PHYS_PAGES) / 8 * (size_t)sysconf(_SC_PAGESIZE), bytes = eighth < BUFFER ? eighth : BUFFER;
    slice *slices = calloc(n_threads, sizeof *slices);
    pthread_t *threads = calloc(n_threads, sizeof *threads);
    uint8_t *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    double best = 0;
    if (!slices || !threads || p == MAP_FAILED)
        goto cleanup;
    madvise(p, bytes, MADV_HUGEPAGE); /* where there are none: a little less, as for the weights */
    size_t each = bytes / n_threads / 256 * 256;
    for (uint32_t i = 0; i < n_threads; i++)
        slices[i] = (slice){.p = p + i * each, .n = each, .fill = true};
    run_all(slices, threads, n_threads);
    for (uint32_t i = 0; i < n_threads; i++)
        slices[i].fill = false;
    for (int pass = 0; pass < PASSES; pass++) {
        double start = srv_seconds();
        run_all(slices, threads, n_threads);
        double rate = (double)(each * n_threads) / (srv_seconds() - start);
        best = rate > best ? rate : best;
    }
    /* What was read must have been read. */
    for (uint32_t i = 0; i < n_threads; i++)
        if (slices[i].sum != PASSES * (uint64_t)(each / 8) * 0x0101010101010101U)
            best = 0;
cleanup:
    if (p != MAP_FAILED)
        munmap(p, bytes);
    free(threads);
    free(slices);
    return best;
}
