/* Prefill attention: online softmax over key tiles at fixed absolute positions, all in float32.
 *
 * A task is one KV head and a block of consecutive tokens; its rows are (token, head of the group). Each row's arithmetic depends on
 * its own query and the keys alone, tile after tile in rising order, and a masked key contributes an exact zero, so the bits are the same
 * whatever chunk or block a token falls into.
 */
#include "attention_private.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TARGET_ROWS = 96 }; /* of a task: fills the product's register tiles, and its scratch stays in the L2 cache */

static uint32_t task_rows(const eng_attn *a)
{
    return a->block_tokens * a->shape->group;
}

static int worker_init(eng_attn *a, attn_worker *w)
{
    size_t d = a->shape->head_dim, rows = task_rows(a), group = a->shape->group;
    size_t floats = rows * d * 2 + rows * ATTN_TILE + rows * 2 + 2 * d * ENG_NR + ATTN_TILE * d + ENG_NR * d + group * ATTN_BLOCK;
    size_t bytes = floats * sizeof(float) + ATTN_TILE * a->shape->row_k;
    float *p = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!p)
        return -ENOMEM;
    a->bytes += bytes;
    w->q = p;
    w->o = w->q + rows * d;
    w->s = w->o + rows * d;
    w->panel = w->s + rows * ATTN_TILE;
    w->v = w->panel + 2 * d * ENG_NR;
    w->tmp = w->v + ATTN_TILE * d;
    w->scores = w->tmp + ENG_NR * d;
    w->m = w->scores + group * ATTN_BLOCK;
    w->l = w->m + rows;
    w->k = (uint8_t *)(w->l + rows);
    return 0;
}

int eng_attn_new(eng_pool *pool, const eng_kernels *k, const eng_kv_shape *shape, uint32_t n_chunk, eng_attn **ret)
{
    eng_attn *a = calloc(1, sizeof *a);
    if (!a)
        return -ENOMEM;
    a->pool = pool;
    a->k = k;
    a->shape = shape;
    a->n_head = shape->n_head_kv * shape->group;
    a->n_workers = eng_pool_threads(pool);
    a->block_tokens = TARGET_ROWS / shape->group ? TARGET_ROWS / shape->group : 1;
    if (a->block_tokens > n_chunk)
        a->block_tokens = n_chunk;
    a->workers = calloc(a->n_workers, sizeof *a->workers);
    int r = a->workers ? 0 : -ENOMEM;
    for (uint32_t i = 0; r == 0 && i < a->n_workers; i++)
        r = worker_init(a, &a->workers[i]);
    if (r < 0) {
        eng_attn_free(a);
        return r;
    }
    *ret = a;
    return 0;
}

void eng_attn_free(eng_attn *a)
{
    if (!a)
        return;
    attn_decode_free(a);
    for (uint32_t i = 0; a->workers && i < a->n_workers; i++)
        free(a->workers[i].q);
    free(a->workers);
    free(a);
}

size_t eng_attn_bytes(const eng_attn *a)
{
    return a->bytes;
}

/* Packs the keys and loads the values of positions [lo, hi); rows up to ATTN_TILE become zeros. */
static void load_tile(const eng_attn *a, attn_worker *w, uint32_t head, uint32_t lo, uint32_t hi, uint32_t *span)
{
    const eng_kv_shape *shape = a->shape;
    const eng_view *view = a->view;
    size_t d = shape->head_dim;
    while (view->spans[*span].hi <= lo)
        ++*span;
    const uint8_t *k = NULL;
    bool whole = view->spans[*span].hi >= hi;
    for (uint32_t pos = lo, i = *span; pos < hi; i++) {
        const eng_span *s = &view->spans[i];
        uint32_t end = s->hi < hi ? s->hi : hi, row = pos - s->seg->start;
        if (whole)
            k = eng_segment_k(s->seg, a->layer, head, row);
        else
            memcpy(w->k + (size_t)(pos - lo) * shape->row_k, eng_segment_k(s->seg, a->layer, head, row), (size_t)(end - pos) * shape->row_k);
        for (; pos < end; pos++, row++)
            a->k->kv_load[shape->type_v](eng_segment_v(s->seg, a->layer, head, row), w->v + (size_t)(pos - lo) * d, d);
    }
    memset(w->v + (size_t)(hi - lo) * d, 0, (size_t)(ATTN_TILE - (hi - lo)) * d * sizeof(float));
    if (!whole)
        k = w->k;
    for (uint32_t p = 0; p < ATTN_TILE / ENG_NR; p++) {
        uint32_t from = p * ENG_NR, n = hi - lo;
        uint32_t rows = n <= from ? 0 : n - from < ENG_NR ? n - from : ENG_NR;
        /* cache types and weight types share their numbering of F32, F16, BF16 */
        a->k->pack_f32(w->panel + p * d * ENG_NR, (eng_type)shape->type_k, k + (size_t)from * shape->row_k, shape->row_k, rows, d, w->tmp);
    }
}

/* Scores of a tile -> weights, and the row's (m, l, o) brought to the new maximum. The row sees keys [from, valid) of the tile. */
static void softmax_row(const eng_attn *a, attn_worker *w, uint32_t row, uint32_t from, uint32_t valid)
{
    float *s = w->s + (size_t)row * ATTN_TILE;
    size_t d = a->shape->head_dim;
    for (uint32_t i = 0; i < from; i++)
        s[i] = -INFINITY;
    for (uint32_t i = valid; i < ATTN_TILE; i++)
        s[i] = -INFINITY;
    float m = a->k->max(s, valid);
    if (m > w->m[row]) {
        float f = expf(w->m[row] - m);
        w->l[row] *= f;
        a->k->scale(w->o + row * d, d, f);
        w->m[row] = m;
    }
    if (w->m[row] == -INFINITY) /* nothing seen yet: no maximum to subtract */
        memset(s, 0, ATTN_TILE * sizeof *s);
    else
        w->l[row] += a->k->softmax(s, ATTN_TILE, w->m[row]);
}

/* The first key that a query at pos sees; window 0: all. */
static uint32_t window_begin(uint32_t pos, uint32_t window)
{
    return window && pos >= window ? pos - window + 1 : 0;
}

static void prefill_task(void *ctx, uint32_t task, uint32_t worker)
{
    eng_attn *a = ctx;
    attn_worker *w = &a->workers[worker];
    const eng_kernels *k = a->k;
    uint32_t group = a->shape->group, d = a->shape->head_dim;
    uint32_t n_blocks = (a->n_tokens + a->block_tokens - 1) / a->block_tokens;
    uint32_t block = n_blocks - 1 - task / a->shape->n_head_kv; /* the longest first */
    uint32_t head = task % a->shape->n_head_kv;
    uint32_t t0 = block * a->block_tokens;
    uint32_t n = a->n_tokens - t0 < a->block_tokens ? a->n_tokens - t0 : a->block_tokens;
    uint32_t rows = n * group;
    size_t stride = (size_t)a->n_head * d;

    for (uint32_t row = 0; row < rows; row++) {
        memcpy(w->q + (size_t)row * d, a->query + (t0 + row / group) * stride + ((size_t)head * group + row % group) * d, d * sizeof(float));
        w->m[row] = -INFINITY;
        w->l[row] = 0;
    }
    k->scale(w->q, (size_t)rows * d, 1 / sqrtf((float)d));
    memset(w->o, 0, (size_t)rows * d * sizeof(float));

    /* A tile before every row's window would leave them all as they are. */
    uint32_t end = a->pos0 + t0 + n, span = 0, window = eng_kv_window(a->shape, a->layer);
    for (uint32_t lo = window_begin(a->pos0 + t0, window) / ATTN_TILE * ATTN_TILE; lo < end; lo += ATTN_TILE) {
        uint32_t hi = end - lo < ATTN_TILE ? end : lo + ATTN_TILE;
        load_tile(a, w, head, lo, hi, &span);
        for (uint32_t p = 0; p < ATTN_TILE / ENG_NR; p++)
            k->gemm_f32(w->s + p * ENG_NR, ATTN_TILE, w->q, d, w->panel + p * d * ENG_NR, ENG_NR, rows, ENG_NR, d, false);
        for (uint32_t row = 0; row < rows; row++) {
            uint32_t pos = a->pos0 + t0 + row / group;
            uint32_t begin = window_begin(pos, window);
            if (pos >= lo && begin < lo + ATTN_TILE)
                softmax_row(a, w, row, begin > lo ? begin - lo : 0, pos - lo + 1 < ATTN_TILE ? pos - lo + 1 : ATTN_TILE);
            else
                memset(w->s + (size_t)row * ATTN_TILE, 0, ATTN_TILE * sizeof(float));
        }
        for (uint32_t c = 0; c < d; c += ENG_NR)
            k->gemm_f32(w->o + c, d, w->s, ATTN_TILE, w->v + c, d, rows, d - c < ENG_NR ? d - c : ENG_NR, ATTN_TILE, true);
    }
    for (uint32_t row = 0; row < rows; row++) {
        float *out = a->out + (t0 + row / group) * stride + ((size_t)head * group + row % group) * d;
        k->scale(w->o + (size_t)row * d, d, 1 / w->l[row]);
        memcpy(out, w->o + (size_t)row * d, d * sizeof(float));
    }
}

void eng_attn_prefill(eng_attn *a, const eng_view *view, uint32_t layer, const float *q, uint32_t pos0, uint32_t n_tokens, float *out)
{
    a->view = view;
    a->layer = layer;
    a->query = q;
    a->pos0 = pos0;
    a->n_tokens = n_tokens;
    a->out = out;
    uint32_t n_blocks = (n_tokens + a->block_tokens - 1) / a->block_tokens;
    eng_pool_run(a->pool, prefill_task, a, n_blocks * a->shape->n_head_kv);
}
