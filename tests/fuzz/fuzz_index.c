/* libFuzzer's entry: a damaged index. The bytes are what was done to a good one, so that damage goes deep and every kind and format is met without a corpus:
 *
 *   byte 0: kind (two bits), and in its highest bit whether the rest is the whole arena instead; byte 1: which head it was built over;
 *   then 8 bytes an edit: u24 place (in words of 4 bytes, modulo the arena's), u8 unused, u32 the word to put there.
 *
 * It is refused, or else searched in every way; hits are rows of the range, each once. Reads outside are the sanitizer's to see. Built and run as fuzz_model is.
 */
#include "index.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { FOUR_BITS = IDX_IVF + 1, N_KINDS = 5, N_HEADS = 4, GROUP = 3, TRAIN = 40, MAX_N = 9000, MAX_DIM = 20, MAX_CUTS = 2 };

static const struct {
    uint32_t n, dim;
} shapes[N_HEADS] = {{1, 3}, {33, 8}, {700, 20}, {MAX_N, 4}};

typedef struct {
    uint16_t *keys, *values, *queries; /* f16 */
    uint32_t pos[TRAIN];
    idx_rows k, v;
    idx_index *good[N_KINDS];
    idx_scratch *scratch;
} head;

static head heads[N_HEADS];
static volatile float read_sum; /* sums must be there to read */

static void check(bool good, const char *what)
{
    if (good)
        return;
    fprintf(stderr, "fuzz_index: %s\n", what);
    abort();
}

static void *need(void *p)
{
    check(p != NULL, "memory");
    return p;
}

/* f16 numbers of magnitude 1/4 to 4. */
static uint16_t *numbers(size_t n)
{
    static uint32_t seed = 1;
    uint16_t *x = need(malloc(n * sizeof *x));
    for (size_t i = 0; i < n; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (uint16_t)((seed >> 16 & 0x83ff) | (13 + (seed >> 8) % 4) << 10);
    }
    return x;
}

static idx_index *build(const head *h, idx_kind kind)
{
    idx_builder *b = NULL;
    idx_index *ix = NULL;
    idx_graph_params params = idx_graph_params_default();
    idx_queries train = {h->queries, h->pos, TRAIN, GROUP};
    int r = kind == IDX_FLAT || (int)kind == FOUR_BITS ? idx_builder_new_codes(&h->k, &h->v, NULL, kind == IDX_FLAT ? 8 : 4, NULL, &b)
            : kind == IDX_GRAPH ? idx_builder_new(&h->k, &train, &params, &b)
                                : idx_builder_new_lists(kind, &h->k, &h->v, &train, &b);
    check(!r && !idx_builder_step(b, 0) && !idx_builder_finish(b, &ix), "a good index can't be built");
    idx_builder_free(b);
    return ix;
}

static const idx_index *good_index(head *h, uint32_t n, uint32_t dim, idx_kind kind)
{
    if (!h->keys) {
        h->keys = numbers((size_t)n * dim);
        h->values = numbers((size_t)n * dim);
        h->queries = numbers((size_t)TRAIN * GROUP * dim);
        for (uint32_t i = 0; i < TRAIN; i++)
            h->pos[i] = (i + 1) * n / TRAIN;
        h->k = (idx_rows){h->keys, (size_t)dim * 2, n, dim, IDX_F16};
        h->v = (idx_rows){h->values, (size_t)dim * 2, n, dim, IDX_F16};
        check(!idx_scratch_new(n, dim, GROUP, n, &h->scratch), "no scratch");
    }
    if (!h->good[kind])
        h->good[kind] = build(h, kind);
    return h->good[kind];
}

static void check_hits(const idx_hits *hits, const idx_query *q)
{
    static uint8_t seen[MAX_N];
    for (uint32_t g = 0; g < q->group; g++) {
        check(hits[g].n <= q->budget.top_k, "more hits than asked for");
        for (uint32_t i = 0; i < hits[g].n; i++) {
            uint32_t row = hits[g].ids[i];
            check(row >= q->lo && row < q->hi && !seen[row], "a hit twice or outside of the range");
            seen[row] = 1;
        }
        for (uint32_t i = 0; i < hits[g].n; i++)
            seen[hits[g].ids[i]] = 0;
    }
}

/* Scan with weights, cuts, and the estimate, as decoding does it. */
static void estimate(const idx_index *ix, const head *h, const idx_query *q)
{
    uint32_t n = h->k.n, dim = h->k.dim, first, end, n_cuts = 0, ld = idx_codes_max_clusters(n);
    idx_cut cuts[MAX_CUTS];
    idx_hits *hits;
    float m[GROUP], *w = need(malloc((size_t)ld * GROUP * sizeof *w)), *coef = need(malloc((n + 1) * sizeof *coef));
    uint32_t *taken = need(calloc(ld, sizeof *taken));
    idx_codes_part(ix, q->lo, q->hi, 0, 1, &first, &end);
    for (uint32_t run = 0; run < idx_codes_runs(n) && n_cuts < MAX_CUTS; run++) {
        uint32_t lo, hi;
        idx_codes_run_rows(n, run, &lo, &hi);
        if (hi <= q->lo || lo >= q->hi || (q->lo <= lo && hi <= q->hi))
            continue;
        size_t most = idx_codes_max_clusters(hi - lo);
        cuts[n_cuts] = (idx_cut){run, q->lo, q->hi, need(malloc(most * idx_codes_sum_stride(dim) * sizeof(float))), need(malloc(most * sizeof(uint32_t)))};
        check(!idx_codes_cut(ix, &h->v, &cuts[n_cuts++]), "no cut of a checked index");
    }
    check(!idx_codes_scan(ix, &h->k, q, first, end, h->scratch, w, ld, m, &hits), "no scan of a checked index");
    check_hits(hits, q);
    for (uint32_t g = 0; g < GROUP; g++) {
        idx_estimate(ix, cuts, n_cuts, first, end, m[g], 1, w + (size_t)g * ld, hits[g].clusters, hits[g].scanned, hits[g].n, taken, coef);
        for (uint32_t c = first; c < end;) {
            const float *sums;
            uint32_t next = idx_codes_sums(ix, cuts, n_cuts, c, end, &sums);
            check(next > c && next <= end, "sums without end");
            for (size_t i = 0; i < (size_t)(next - c) * idx_codes_sum_stride(dim); i++)
                read_sum = sums[i];
            c = next;
        }
    }
    for (uint32_t i = 0; i < n_cuts; i++) {
        free(cuts[i].sums);
        free(cuts[i].counts);
    }
    free(w);
    free(coef);
    free(taken);
}

static void search(const idx_index *ix, const head *h)
{
    uint32_t n = h->k.n;
    const uint32_t ranges[][2] = {{0, n}, {n / 7, n - n / 5}, {n / 2, n / 2 + (n > 1)}, {n, n}};
    const idx_budget budgets[] = {{10, 0}, {200, 6}, {n, 0}, {0, 0}};
    float q[GROUP * MAX_DIM], floor[GROUP] = {1, -INFINITY, 30};
    for (uint32_t i = 0; i < GROUP * h->k.dim; i++)
        q[i] = (float)(i % 7) - 3;
    for (int i = 0; i < 4; i++) {
        idx_hits *hits;
        idx_query query = {.q = q, .floor = i % 2 ? floor : NULL, .group = GROUP, .lo = ranges[i][0], .hi = ranges[i][1], .scale = 0.5f, .budget = budgets[i]};
        check(!idx_search(ix, &h->k, &query, h->scratch, &hits, NULL), "no search of a checked index");
        check_hits(hits, &query);
        if (idx_kind_of(ix) != IDX_GRAPH && query.lo < query.hi)
            estimate(ix, h, &query);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    uint32_t which = data[1] % N_HEADS, n = shapes[which].n, dim = shapes[which].dim;
    const idx_index *good = good_index(&heads[which], n, dim, (idx_kind)(data[0] % N_KINDS));
    size_t bytes;
    const void *from = idx_arena(good, &bytes);
    bool whole = data[0] & 0x80;
    if (whole)
        bytes = size - 2;
    uint8_t *arena = need(malloc(bytes + 1));
    memcpy(arena, whole ? data + 2 : from, bytes);
    for (size_t i = 2; !whole && i + 8 <= size; i += 8) {
        size_t word = (data[i] | (size_t)data[i + 1] << 8 | (size_t)data[i + 2] << 16) % (bytes / 4);
        memcpy(arena + word * 4, data + i + 4, 4);
    }
    char err[200] = "";
    idx_index *ix;
    int r = idx_load(arena, bytes, n, dim, NULL, &ix, err, sizeof err);
    free(arena);
    if (!r) {
        search(ix, &heads[which]);
        idx_free(ix);
    } else {
        check(*err, "refused without a word");
    }
    return 0;
}
