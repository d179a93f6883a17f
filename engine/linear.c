/* Products over the pool. A task is a run of weight rows: in decode long ones first and ever shorter ones, so that no thread waits long for
 * the last, in prefill one or more panels of ENG_NR rows, packed and multiplied with all tokens (with few panels: with a part of the tokens, so that no thread idles).
 * In prefill k is cut into slices, so that a panel's slice stays in the L1 cache and the tokens' slice in the L2 cache; the cuts depend on the
 * weight alone and do not change a bit (kernels.h), and the kernels' outputs do not depend on what else a call computes, so neither does
 * anything here. What is done with a product (added to its destination, or gated and made the next input) is done by the task that made
 * it, while it is in the L2 cache.
 */
#include "linear.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_WEIGHTS = 3, MIN_TOKENS = 48, ALIGN = 64 };
enum { MAX_SLICE = 320, MAX_Q8_SLICE = 512 }; /* of k: 20 KiB of a bf16 panel, at most 18 in 8 bits */
enum { MAX_BATCHES = 7, MIN_ROWS = 16 }; /* decode: of tasks; of a task */
enum { MAX_PANELS = 8 };         /* of a task */
enum { L2_INPUT = 1200 * 1024 }; /* bytes of input that stay in the L2 cache (2 MiB, or 1 MiB and a fast L3) next to a panel's outputs */

/* One thread's scratch. */
typedef struct {
    void *panel; /* [MAX_SLICE][ENG_NR] of what is multiplied, floats at most */
    float *tmp;  /* [ENG_NR][MAX_SLICE] */
    float *c;    /* [MAX_PANELS][max_tokens][ENG_NR] */
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
    /* prefill: the input, and the one that a gated product makes; [slices][max_tokens][slice] in one of the forms */
    void *input, *next;
};

enum output { STORE, ADD, GATE };
/* Longest row of a model whose prefill may be in 8 bits. In a smaller one (SmolLM2-135M: 1,536) their rounding shows in answers, and little is gained. */
enum { MIN_Q8 = 2048 };

/* What the products of prefill take as input: floats, bf16, or blocks of 32 in 16 or 8 bits. */
enum form { FLOATS, BF16, I16, Q8 };

/* One product; the ctx of its tasks. */
typedef struct {
    eng_linear *l;
    const eng_weight *const *w;
    float *const *y;
    const float *x;
    uint32_t n, n_tokens;
    uint32_t n_weights;              /* prefill: n, or 2 where gated: tasks are then cut by the gate's rows alone */
    uint32_t rows, tokens;           /* of a task, at most; in prefill of a panel */
    uint32_t n_blocks, n_runs;       /* prefill: token blocks, runs of panels */
    uint32_t slice;                  /* prefill: elements of k at a time */
    uint32_t first[MAX_WEIGHTS + 1]; /* first task of each weight; in prefill the first panel */
    enum form form;
    enum output output;
    eng_gate_fn *gate;
    enum form next; /* of what is gated */
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
    size_t q = take(&offset, cols), d = take(&offset, cols / 32 * sizeof(float)), s = take(&offset, cols / 32 * sizeof(float));
    size_t input = (cols + MAX_SLICE) * max_tokens * sizeof(float);
    size_t in = take(&offset, input), next = take(&offset, input);
    size_t panel = (size_t)MAX_SLICE * ENG_NR * sizeof(float), c = (size_t)MAX_PANELS * max_tokens * ENG_NR * sizeof(float), first = offset;
    for (uint32_t i = 0; i < threads; i++)
        take(&offset, 2 * panel + c);
    l->bytes = offset;
    l->arena = l->workers ? aligned_alloc(ALIGN, offset) : NULL;
    if (!l->arena) {
        eng_linear_free(l);
        return -ENOMEM;
    }
    char *base = l->arena;
    l->q8 = (eng_q8_act){.q = (int8_t *)(base + q), .d = (float *)(void *)(base + d), .s = (float *)(void *)(base + s)};
    l->input = base + in;
    l->next = base + next;
    for (uint32_t i = 0; i < threads; i++) {
        char *at = base + first + i * (2 * panel + c);
        l->workers[i] = (scratch){.panel = at, .tmp = (float *)(void *)(at + panel), .c = (float *)(void *)(at + 2 * panel)};
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

/* As many tasks of as many rows as there are threads; from: the first one's first row, counted over all weights. */
typedef struct {
    uint64_t from, rows;
} batch;

/* A product of one token; the ctx of its tasks. */
typedef struct {
    const eng_linear *l;
    const eng_weight *const *w;
    float *const *y;
    const float *x;
    uint32_t n;     /* weights */
    uint32_t width; /* tasks of a batch */
    batch batches[MAX_BATCHES];
} decoding;

/* Each batch takes half of the rows that are left, the last one all; the number of tasks. What a thread waits for is thus a task of the last
 * batch at most, and yet most rows are read in long runs. */
static uint32_t cut_batches(decoding *d, uint64_t rows)
{
    uint64_t from = 0, tasks = 0;
    for (uint32_t i = 0; i < MAX_BATCHES && from < rows; i++) {
        uint64_t left = rows - from, parts = i + 1 < MAX_BATCHES ? 2 * (uint64_t)d->width : d->width;
        uint64_t each = ((left + parts - 1) / parts + MIN_ROWS - 1) / MIN_ROWS * MIN_ROWS, n = (left + each - 1) / each;
        n = n < d->width ? n : d->width;
        d->batches[i] = (batch){from, each};
        from += n * each;
        tasks += n;
    }
    return (uint32_t)tasks;
}

static void decode_rows(const decoding *d, uint32_t weight, uint64_t row, uint64_t rows)
{
    const eng_weight *w = d->w[weight];
    const eng_kernels *k = d->l->k;
    const void *data = (const char *)w->data + (size_t)row * w->row_bytes;
    float *y = d->y[weight] + row;
    if (uses_q8(d->l, w))
        k->gemv_q8[w->type](y, data, w->row_bytes, rows, &d->l->q8, w->cols);
    else
        k->gemv_f32[w->type](y, data, w->row_bytes, rows, d->x, w->cols);
}

static void decode_task(void *ctx, uint32_t task, uint32_t worker)
{
    (void)worker;
    const decoding *d = ctx;
    const batch *b = &d->batches[task / d->width];
    uint64_t from = b->from + task % d->width * b->rows, end = from + b->rows, at = 0;
    for (uint32_t i = 0; i < d->n; at += d->w[i++]->rows) {
        uint64_t lo = from > at ? from - at : 0, hi = end > at ? end - at : 0;
        hi = hi < d->w[i]->rows ? hi : d->w[i]->rows;
        if (lo < hi)
            decode_rows(d, i, lo, hi - lo);
    }
}

void eng_linear_decode(eng_linear *l, const eng_weight *const *w, float *const *y, uint32_t n, const float *x)
{
    decoding d = {.l = l, .w = w, .y = y, .x = x, .n = n, .width = eng_pool_threads(l->pool)};
    uint64_t rows = 0;
    bool q8 = false;
    for (uint32_t i = 0; i < n; i++) {
        rows += w[i]->rows;
        q8 |= uses_q8(l, w[i]);
    }
    if (q8)
        l->k->quantize_q8(x, &l->q8, w[0]->cols);
    eng_pool_run(l->pool, "product", decode_task, &d, cut_batches(&d, rows));
}

/* ---- prefill: the input ------------------------------------------------------------------------------------------- */

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* The form of the input that n weights read: 8 bits where all of them are multiplied so. The kernels in integers take whole blocks, those in bf16
 * pairs. */
static enum form form_of(const eng_linear *l, const eng_weight *const *w, uint32_t n)
{
    bool q8 = !l->f32 && l->max_cols >= MIN_Q8;
    for (uint32_t i = 0; i < n; i++)
        q8 &= l->k->prefill_q8[w[i]->type];
    if (l->f32 || q8)
        return q8 ? Q8 : FLOATS;
    return l->k->prefill_i16 && w[0]->cols % 32 == 0 ? I16 : l->k->gemm_bf16 && w[0]->cols % 2 == 0 ? BF16 : FLOATS;
}

/* How wide the slices of k are, but for the last: whole super-blocks where there may be any, and whole panels of the product that made the input. */
static uint32_t slice_width(enum form form, uint32_t cols)
{
    uint32_t most = form == Q8 ? MAX_Q8_SLICE : MAX_SLICE, n = (cols + most - 1) / most;
    return cols % 256 == 0 ? most / 256 * 256 : ((cols + n - 1) / n + 31) / 32 * 32;
}

static size_t form_bytes(enum form form, size_t n)
{
    if (form == Q8 || form == I16)
        return n / 32 * (form == Q8 ? sizeof(eng_q8_block) : sizeof(eng_i16_block));
    return n * (form == BF16 ? sizeof(uint16_t) : sizeof(float));
}

/* Puts elements [from, from + n) of `tokens` tokens, which lie in one slice, into an input of `cols`. Integers: whole blocks. */
static void put(const eng_linear *l, void *input, enum form form, size_t t, size_t tokens, uint32_t cols, size_t from, const float *x, size_t ldx,
                size_t n)
{
    size_t slice = slice_width(form, cols);
    char *at = (char *)input + form_bytes(form, from / slice * slice * l->max_tokens + t * slice + from % slice);
    for (size_t i = 0; i < tokens; i++, at += form_bytes(form, slice), x += ldx)
        if (form == Q8)
            l->k->quantize_blocks(x, (void *)at, n);
        else if (form == I16)
            l->k->quantize_i16(x, (void *)at, n);
        else if (form == BF16)
            l->k->f32_to_bf16(x, (void *)at, n);
        else
            memcpy(at, x, n * sizeof(float));
}

void eng_linear_input(eng_linear *l, const eng_weight *const *w, uint32_t n, uint32_t t, const float *x)
{
    uint32_t cols = w[0]->cols;
    enum form form = form_of(l, w, n);
    size_t slice = slice_width(form, cols);
    for (size_t from = 0; from < cols; from += slice)
        put(l, l->input, form, t, 1, cols, from, x + from, 0, min_size(slice, cols - from));
}

static void input_task(void *ctx, uint32_t task, uint32_t worker)
{
    (void)worker;
    const product *p = ctx;
    uint32_t cols = p->w[0]->cols, at = task * p->tokens, end = (uint32_t)min_size((size_t)at + p->tokens, p->n_tokens);
    for (; at < end; at++)
        eng_linear_input(p->l, p->w, p->n_weights, at, p->x + (size_t)at * cols);
}

/* ---- prefill: products ------------------------------------------------------------------------------------------ */

/* Some rows of a weight, and the slice of k that begins at `from`. */
typedef struct {
    const eng_weight *w;
    uint32_t row, rows, from, n;
} part;

static const char *part_data(const part *b)
{
    return (const char *)b->w->data + (size_t)b->row * b->w->row_bytes + b->from / eng_types[b->w->type].block * eng_types[b->w->type].bytes;
}

/* Part `index` of a task that has these panels, in the order in which they are multiplied: slices, panels, then gate and up. */
static part find_part(const product *p, uint32_t lo, uint32_t hi, uint32_t index)
{
    uint32_t each = p->output == GATE ? 2 : 1, panels = hi - lo, i;
    part b = {.from = index / each / panels * p->slice};
    b.rows = find_rows(p, lo + index / each % panels, &i, &b.row);
    b.w = p->w[i + index % each];
    b.n = (uint32_t)min_size(p->slice, b.w->cols - b.from);
    return b;
}

/* Asks for a part's bytes: short stretches far apart, which the hardware's prefetchers do not see. Never faults. */
static void prefetch_part(const part *b)
{
    const char *row = part_data(b);
    size_t bytes = (size_t)b->n / eng_types[b->w->type].block * eng_types[b->w->type].bytes;
    for (uint32_t r = 0; r < b->rows; r++, row += b->w->row_bytes)
        for (size_t i = 0; i < bytes + ALIGN - 1; i += ALIGN)
            __builtin_prefetch(row + i);
}

/* Multiplies `tokens` inputs from `at` on with a part. next: what is multiplied then, fetched meanwhile; NULL: nothing. */
static void multiply(const product *p, const scratch *s, const part *b, const part *next, size_t at, size_t tokens, float *c)
{
    const eng_linear *l = p->l;
    const eng_weight *w = b->w;
    const char *in = (const char *)l->input + form_bytes(p->form, (size_t)b->from * l->max_tokens + at * p->slice), *data = part_data(b);
    if (p->form == Q8) {
        l->k->pack_q8(s->panel, w->type, data, w->row_bytes, b->rows, b->n);
        if (next)
            prefetch_part(next);
        l->k->gemm_q8(c, ENG_NR, (const void *)in, p->slice / 32, s->panel, w->type, tokens, b->rows, b->n, b->from > 0);
    } else if (p->form == I16) {
        l->k->pack_i16(s->panel, w->type, data, w->row_bytes, b->rows, b->n);
        if (next)
            prefetch_part(next);
        l->k->gemm_i16(c, ENG_NR, (const void *)in, p->slice / 32, s->panel, tokens, b->rows, b->n, b->from > 0);
    } else if (p->form == BF16) {
        l->k->pack_bf16(s->panel, w->type, data, w->row_bytes, b->rows, b->n, s->tmp);
        if (next)
            prefetch_part(next);
        l->k->gemm_bf16(c, ENG_NR, (const void *)in, p->slice, s->panel, tokens, b->rows, b->n, b->from > 0);
    } else {
        l->k->pack_f32(s->panel, w->type, data, w->row_bytes, b->rows, b->n, s->tmp);
        l->k->gemm_f32(c, ENG_NR, (const void *)in, p->slice, s->panel, ENG_NR, tokens, b->rows, b->n, b->from > 0);
    }
}

/* What is left to do with a panel's outputs, c [tokens][ENG_NR] (two of them, one after the other, where they are gated). */
static void finish(const product *p, uint32_t weight, uint32_t row, uint32_t rows, size_t at, size_t tokens, float *c)
{
    const eng_kernels *k = p->l->k;
    size_t stride = p->w[weight]->rows;
    if (p->output == STORE) {
        for (size_t t = 0; t < tokens; t++)
            memcpy(p->y[weight] + (at + t) * stride + row, c + t * ENG_NR, rows * sizeof *c);
    } else if (p->output == ADD) {
        for (size_t t = 0; t < tokens; t++)
            k->add(p->y[weight] + (at + t) * stride + row, c + t * ENG_NR, rows);
    } else {
        const float *up = c + tokens * ENG_NR;
        if (rows == ENG_NR)
            p->gate(c, c, up, tokens * ENG_NR);
        else
            for (size_t t = 0; t < tokens; t++)
                p->gate(c + t * ENG_NR, c + t * ENG_NR, up + t * ENG_NR, rows);
        put(p->l, p->l->next, p->next, at, tokens, (uint32_t)stride, row, c, ENG_NR, rows);
    }
}

static void prefill_task(void *ctx, uint32_t task, uint32_t worker)
{
    const product *p = ctx;
    const scratch *s = &p->l->workers[worker];
    uint64_t run = task / p->n_blocks, panels = p->first[p->n];
    uint32_t lo = (uint32_t)(run * panels / p->n_runs), hi = (uint32_t)((run + 1) * panels / p->n_runs), i, row;
    size_t at = (size_t)(task % p->n_blocks) * p->tokens, tokens = min_size(p->tokens, p->n_tokens - at);
    size_t each = tokens * ENG_NR, step = p->output == GATE ? 2 * each : each;
    uint32_t of_slice = (hi - lo) * (p->output == GATE ? 2 : 1), n = (p->w[0]->cols + p->slice - 1) / p->slice * of_slice;
    part b = find_part(p, lo, hi, 0), next;
    for (uint32_t j = 0; j < n; j++, b = next) {
        if (j + 1 < n)
            next = find_part(p, lo, hi, j + 1);
        multiply(p, s, &b, j + 1 < n ? &next : NULL, at, tokens, s->c + j % of_slice * each);
    }
    for (uint32_t j = lo; j < hi; j++) {
        uint32_t rows = find_rows(p, j, &i, &row);
        finish(p, i, row, rows, at, tokens, s->c + (j - lo) * step);
    }
}

static void run(product *p)
{
    eng_linear *l = p->l;
    if (!p->n_tokens)
        return;
    uint32_t cols = p->w[0]->cols, threads = eng_pool_threads(l->pool);
    if (p->x) {
        p->tokens = p->n_tokens / (threads * 2) + 1;
        eng_pool_run(l->pool, "input", input_task, p, (p->n_tokens + p->tokens - 1) / p->tokens);
    }
    p->rows = ENG_NR;
    p->form = form_of(l, p->w, p->n_weights);
    p->slice = slice_width(p->form, cols);
    uint32_t panels = cut_rows(p), want = threads == 1 || !panels ? 1 : threads * 4 / panels + 1;
    p->n_blocks = p->n_tokens / MIN_TOKENS < want ? p->n_tokens / MIN_TOKENS : want;
    if (!p->n_blocks)
        p->n_blocks = 1;
    p->tokens = (p->n_tokens + p->n_blocks - 1) / p->n_blocks;
    p->n_blocks = (p->n_tokens + p->tokens - 1) / p->tokens;
    /* Inputs that come from beyond the L2 cache are used for several panels each time; every thread gets the same number of runs. */
    p->n_runs = panels;
    if (form_bytes(p->form, (size_t)cols * p->tokens) > L2_INPUT) {
        uint32_t most = p->output == GATE ? MAX_PANELS / 2 : MAX_PANELS;
        p->n_runs = (uint32_t)min_size((panels + most * threads - 1) / (most * threads) * threads, panels);
    }
    eng_pool_run(l->pool, "product", prefill_task, p, p->n_runs * p->n_blocks);
}

void eng_linear_prefill(eng_linear *l, const eng_weight *const *w, float *const *y, uint32_t n, const float *x, uint32_t n_tokens)
{
    product p = {.l = l, .w = w, .y = y, .x = x, .n = n, .n_weights = n, .n_tokens = n_tokens, .output = STORE};
    run(&p);
}

void eng_linear_prefill_add(eng_linear *l, const eng_weight *w, float *y, const float *x, uint32_t n_tokens)
{
    product p = {.l = l, .w = &w, .y = &y, .x = x, .n = 1, .n_weights = 1, .n_tokens = n_tokens, .output = ADD};
    run(&p);
}

void eng_linear_prefill_gated(eng_linear *l, const eng_weight *gate, const eng_weight *up, const eng_weight *down, eng_gate_fn *fn, const float *x,
                              uint32_t n_tokens)
{
    product p = {.l = l, .w = (const eng_weight *const[]){gate, up}, .x = x, .n = 1, .n_weights = 2, .n_tokens = n_tokens};
    p.output = GATE;
    p.gate = fn;
    p.next = form_of(l, &down, 1);
    run(&p);
    void *made = l->next;
    l->next = l->input;
    l->input = made;
}
