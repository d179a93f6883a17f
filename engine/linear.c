/* Products over the pool. A task is a run of weight rows: in decode as many as give each thread a handful of tasks, in prefill one or more
 * panels of ENG_NR rows, packed and multiplied with all tokens (with few panels: with a part of the tokens, so that no thread idles).
 * In prefill k is cut into slices, so that a panel's slice stays in the L1 cache and the tokens' slice in the L2 cache; the cuts depend on the
 * weight alone and do not change a bit (kernels.h), and the kernels' outputs do not depend on what else a call computes, so neither does
 * anything here.
 */
#include "linear.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_WEIGHTS = 3, TASKS_PER_THREAD = 6, MIN_ROWS = 16, MIN_TOKENS = 48, ALIGN = 64 };
enum { MAX_SLICE = 320 };        /* of k: 20 KiB of a bf16 panel */
enum { MAX_PANELS = 8 };         /* of a task */
enum { L2_INPUT = 1200 * 1024 }; /* bytes of input that stay in the L2 cache (2 MiB, or 1 MiB and a fast L3) next to a panel's outputs */

/* One thread's scratch. */
typedef struct {
    void *panel; /* [MAX_SLICE][ENG_NR] float or bf16 */
    float *tmp;  /* [ENG_NR][MAX_SLICE] */
} scratch;

struct eng_linear {
    eng_pool *pool;
    const eng_kernels *k;
    bool f32;
    uint32_t max_cols, max_tokens;
    size_t bytes;
    void *arena;
    scratch *workers; /* [threads] */
    eng_q8_act q8;    /* decode: the quantised input */
    uint16_t *bf16;   /* prefill: the input as [slices][tokens][slice]; NULL where not used */
};

/* One product; the ctx of its tasks. */
typedef struct {
    eng_linear *l;
    const eng_weight *const *w;
    float *const *y;
    const float *x;
    uint32_t n, n_tokens;
    uint32_t rows, tokens;           /* of a task, at most; in prefill of a panel */
    uint32_t n_blocks, n_runs;       /* prefill: token blocks, runs of panels */
    uint32_t slice;                  /* prefill: elements of k at a time */
    uint32_t first[MAX_WEIGHTS + 1]; /* first task of each weight; in prefill the first panel */
    bool bf16;
} product;

/* ---- life ------------------------------------------------------------------------------------------------------- */

static size_t take(size_t *offset, size_t bytes)
{
    size_t at = *offset;
    *offset += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return at;
}

int eng_linear_new(eng_pool *pool, const eng_kernels *k, uint32_t max_cols, uint32_t max_tokens, bool f32, eng_linear **ret)
{
    uint32_t threads = eng_pool_threads(pool);
    size_t cols = ((size_t)max_cols + 31) / 32 * 32, offset = 0;
    /* The sizes come from a model file: refuse what cannot be meant before it can overflow. */
    if (!max_cols || !max_tokens || (uint64_t)cols * max_tokens > (uint64_t)1 << 40 || (uint64_t)cols * threads > (uint64_t)1 << 36)
        return -EINVAL;
    eng_linear *l = calloc(1, sizeof *l);
    if (!l)
        return -ENOMEM;
    *l = (eng_linear){.pool = pool, .k = k, .f32 = f32, .max_cols = max_cols, .max_tokens = max_tokens};
    l->workers = calloc(threads, sizeof *l->workers);
    bool bf16 = k->gemm_bf16 && !f32;
    size_t q = take(&offset, cols), d = take(&offset, cols / 32 * sizeof(float)), s = take(&offset, cols / 32 * sizeof(float));
    size_t a = take(&offset, bf16 ? (cols + MAX_SLICE) * max_tokens * sizeof(uint16_t) : 0);
    size_t panel = (size_t)MAX_SLICE * ENG_NR * sizeof(float), first = offset;
    for (uint32_t i = 0; i < 2 * threads; i++)
        take(&offset, panel);
    l->bytes = offset;
    l->arena = l->workers ? aligned_alloc(ALIGN, offset) : NULL;
    if (!l->arena) {
        eng_linear_free(l);
        return -ENOMEM;
    }
    char *base = l->arena;
    l->q8 = (eng_q8_act){.q = (int8_t *)(base + q), .d = (float *)(void *)(base + d), .s = (float *)(void *)(base + s)};
    l->bf16 = bf16 ? (uint16_t *)(void *)(base + a) : NULL;
    for (uint32_t i = 0; i < threads; i++) {
        l->workers[i].panel = base + first + 2 * i * panel;
        l->workers[i].tmp = (float *)(void *)(base + first + (2 * i + (size_t)1) * panel);
    }
    *ret = l;
    return 0;
}

void eng_linear_free(eng_linear *l)
{
    if (!l)
        return;
    free(l->arena);
    free(l->workers);
    free(l);
}

size_t eng_linear_bytes(const eng_linear *l)
{
    return l->bytes;
}

/* ---- tasks ------------------------------------------------------------------------------------------------------ */

/* Cuts the weights' rows into tasks of p->rows; the number of tasks. */
static uint32_t cut_rows(product *p)
{
    p->first[0] = 0;
    for (uint32_t i = 0; i < p->n; i++)
        p->first[i + 1] = p->first[i] + (uint32_t)(((uint64_t)p->w[i]->rows + p->rows - 1) / p->rows);
    return p->first[p->n];
}

/* Which weight and rows slice `index` is; the number of rows. */
static uint32_t find_rows(const product *p, uint32_t index, uint32_t *ret_weight, uint32_t *ret_row)
{
    uint32_t i = 0;
    while (index >= p->first[i + 1])
        i++;
    uint32_t row = (index - p->first[i]) * p->rows, left = p->w[i]->rows - row;
    *ret_weight = i;
    *ret_row = row;
    return left < p->rows ? left : p->rows;
}

static bool uses_q8(const eng_linear *l, const eng_weight *w)
{
    return !l->f32 && l->k->gemv_q8[w->type];
}

/* ---- decode ----------------------------------------------------------------------------------------------------- */

static void decode_task(void *ctx, uint32_t task, uint32_t worker)
{
    (void)worker;
    const product *p = ctx;
    const eng_kernels *k = p->l->k;
    uint32_t i, row, rows = find_rows(p, task, &i, &row);
    const eng_weight *w = p->w[i];
    const void *data = (const char *)w->data + (size_t)row * w->row_bytes;
    if (uses_q8(p->l, w))
        k->gemv_q8[w->type](p->y[i] + row, data, w->row_bytes, rows, &p->l->q8, w->cols);
    else
        k->gemv_f32[w->type](p->y[i] + row, data, w->row_bytes, rows, p->x, w->cols);
}

void eng_linear_decode(eng_linear *l, const eng_weight *const *w, float *const *y, uint32_t n, const float *x)
{
    product p = {.l = l, .w = w, .y = y, .x = x, .n = n};
    uint64_t total = 0;
    bool q8 = false;
    for (uint32_t i = 0; i < n; i++) {
        total += w[i]->rows;
        q8 |= uses_q8(l, w[i]);
    }
    if (q8)
        l->k->quantize_q8(x, &l->q8, w[0]->cols);
    uint64_t tasks = (uint64_t)eng_pool_threads(l->pool) * TASKS_PER_THREAD;
    p.rows = (uint32_t)((total / tasks + MIN_ROWS) / MIN_ROWS * MIN_ROWS);
    eng_pool_run(l->pool, decode_task, &p, cut_rows(&p));
}

/* ---- prefill ---------------------------------------------------------------------------------------------------- */

/* How wide the slices of k are: whole super-blocks where there may be any. */
static uint32_t slice_width(uint32_t cols)
{
    if (cols % 256 == 0)
        return 256;
    uint32_t n = (cols + MAX_SLICE - 1) / MAX_SLICE;
    return ((cols + n - 1) / n + 31) / 32 * 32;
}

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static void convert_task(void *ctx, uint32_t task, uint32_t worker)
{
    (void)worker;
    const product *p = ctx;
    size_t cols = p->w[0]->cols, at = (size_t)task * p->tokens, end = min_size(at + p->tokens, p->n_tokens);
    for (; at < end; at++)
        for (size_t from = 0; from < cols; from += p->slice)
            p->l->k->f32_to_bf16(p->x + at * cols + from, p->l->bf16 + from * p->n_tokens + at * p->slice, min_size(p->slice, cols - from));
}

/* Packs the slice of k that begins at `from` of one panel's rows, and multiplies `tokens` inputs with it. */
static void multiply_panel(const product *p, const scratch *s, uint32_t index, uint32_t from, size_t at, size_t tokens)
{
    const eng_kernels *k = p->l->k;
    uint32_t i, row, rows = find_rows(p, index, &i, &row);
    const eng_weight *w = p->w[i];
    size_t cols = w->cols, n = min_size(p->slice, cols - from);
    const char *data = (const char *)w->data + (size_t)row * w->row_bytes + from / eng_types[w->type].block * eng_types[w->type].bytes;
    float *c = p->y[i] + at * w->rows + row;
    if (p->bf16) {
        k->pack_bf16(s->panel, w->type, data, w->row_bytes, rows, n, s->tmp);
        k->gemm_bf16(c, w->rows, p->l->bf16 + (size_t)from * p->n_tokens + at * p->slice, p->slice, s->panel, tokens, rows, n, from > 0);
    } else {
        k->pack_f32(s->panel, w->type, data, w->row_bytes, rows, n, s->tmp);
        k->gemm_f32(c, w->rows, p->x + at * cols + from, cols, s->panel, ENG_NR, tokens, rows, n, from > 0);
    }
}

static void prefill_task(void *ctx, uint32_t task, uint32_t worker)
{
    const product *p = ctx;
    const scratch *s = &p->l->workers[worker];
    uint64_t run = task / p->n_blocks, panels = p->first[p->n];
    uint32_t lo = (uint32_t)(run * panels / p->n_runs), hi = (uint32_t)((run + 1) * panels / p->n_runs);
    size_t at = (size_t)(task % p->n_blocks) * p->tokens, tokens = min_size(p->tokens, p->n_tokens - at);
    for (uint32_t from = 0; from < p->w[0]->cols; from += p->slice)
        for (uint32_t i = lo; i < hi; i++)
            multiply_panel(p, s, i, from, at, tokens);
}

void eng_linear_prefill(eng_linear *l, const eng_weight *const *w, float *const *y, uint32_t n, const float *x, uint32_t n_tokens)
{
    if (!n_tokens)
        return;
    uint32_t cols = w[0]->cols, threads = eng_pool_threads(l->pool);
    product p = {.l = l, .w = w, .y = y, .x = x, .n = n, .n_tokens = n_tokens, .rows = ENG_NR, .slice = slice_width(cols)};
    p.bf16 = l->bf16 && cols % 2 == 0; /* the bf16 kernels take pairs */
    if (p.bf16) {
        p.tokens = n_tokens / (threads * 2) + 1;
        eng_pool_run(l->pool, convert_task, &p, (n_tokens + p.tokens - 1) / p.tokens);
    }
    uint32_t panels = cut_rows(&p), want = threads == 1 || !panels ? 1 : threads * 4 / panels + 1;
    p.n_blocks = n_tokens / MIN_TOKENS < want ? n_tokens / MIN_TOKENS : want;
    if (!p.n_blocks)
        p.n_blocks = 1;
    p.tokens = (n_tokens + p.n_blocks - 1) / p.n_blocks;
    p.n_blocks = (n_tokens + p.tokens - 1) / p.tokens;
    /* Inputs that come from beyond the L2 cache are used for several panels each time; every thread gets the same number of runs. */
    p.n_runs = panels;
    if ((size_t)cols * p.tokens * (p.bf16 ? 2 : 4) > L2_INPUT) {
        p.n_runs = (panels + MAX_PANELS * threads - 1) / (MAX_PANELS * threads) * threads;
        p.n_runs = (uint32_t)min_size(p.n_runs, panels);
    }
    eng_pool_run(l->pool, prefill_task, &p, p.n_runs * p.n_blocks);
}
