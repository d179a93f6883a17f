#include "peak.h"

#include "cmd_common.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PASSES = 8, LINE = 64, STREAMS = 4, AHEAD = 1024 };
#define BUFFER ((size_t)1 << 30) /* more than the last cache of any machine keeps */

/* What a pass does. The two ways of reading differ in what they ask for ahead of time; which is faster differs from CPU to CPU. */
enum way { FILL, READ, READ_ONCE };

typedef struct {
    uint8_t *p;
    size_t n; /* a multiple of STREAMS lines */
    uint64_t sum;
    enum way way;
} slice;

/* The sum of one word of each line: no instruction is wasted on what came with it. */
static inline __attribute__((always_inline)) uint64_t sum_of_lines(const uint8_t *p, size_t n, const bool once)
{
    uint64_t sum[STREAMS] = {0};
    size_t each = n / STREAMS;
    for (size_t at = 0; at < each; at += LINE)
        for (size_t i = 0; i < STREAMS; i++) {
            const uint8_t *line = p + i * each + at;
            if (once)
                __builtin_prefetch(line + AHEAD, 0, 0);
            else
                __builtin_prefetch(line + AHEAD, 0, 3);
            sum[i] += *(const uint64_t *)(const void *)line;
        }
    for (size_t i = 1; i < STREAMS; i++)
        sum[0] += sum[i];
    return sum[0];
}

static void *run_slice(void *arg)
{
    slice *s = arg;
    if (s->way == FILL)
        memset(s->p, 1, s->n);
    else
        s->sum += s->way == READ ? sum_of_lines(s->p, s->n, false) : sum_of_lines(s->p, s->n, true);
    return NULL;
}

static void run_all(slice *slices, pthread_t *threads, uint32_t n, const pthread_attr_t *attr)
{
    uint32_t started = 1;
    while (started < n && !pthread_create(&threads[started], attr, run_slice, &slices[started]))
        started++;
    run_slice(&slices[0]);
    for (uint32_t i = 1; i < started; i++)
        pthread_join(threads[i], NULL);
    for (uint32_t i = started; i < n; i++)
        run_slice(&slices[i]);
}

double srv_peak_read(uint32_t n_threads, const cpu_set_t *cpus)
{
    size_t eighth = (size_t)sysconf(_SC_PHYS_PAGES) / 8 * (size_t)sysconf(_SC_PAGESIZE), bytes = eighth < BUFFER ? eighth : BUFFER;
    slice *slices = calloc(n_threads, sizeof *slices);
    pthread_t *threads = calloc(n_threads, sizeof *threads);
    uint8_t *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    double best = 0;
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    if (CPU_COUNT(cpus))
        pthread_attr_setaffinity_np(&attr, sizeof *cpus, cpus);
    if (!slices || !threads || p == MAP_FAILED)
        goto cleanup;
    madvise(p, bytes, MADV_HUGEPAGE); /* where there are none: a little less, as for the weights */
    size_t each = bytes / n_threads / (STREAMS * LINE) * (STREAMS * LINE);
    for (uint32_t i = 0; i < n_threads; i++)
        slices[i] = (slice){.p = p + i * each, .n = each, .way = FILL};
    run_all(slices, threads, n_threads, &attr);
    for (int pass = 0; pass < PASSES; pass++) {
        for (uint32_t i = 0; i < n_threads; i++)
            slices[i].way = pass % 2 ? READ : READ_ONCE;
        double start = srv_seconds();
        run_all(slices, threads, n_threads, &attr);
        double rate = (double)(each * n_threads) / (srv_seconds() - start);
        best = rate > best ? rate : best;
    }
    /* What was read must have been read. */
    for (uint32_t i = 0; i < n_threads; i++)
        if (slices[i].sum != PASSES * (uint64_t)(each / LINE) * 0x0101010101010101U)
            best = 0;
cleanup:
    if (p != MAP_FAILED)
        munmap(p, bytes);
    pthread_attr_destroy(&attr);
    free(threads);
    free(slices);
    return best;
}
