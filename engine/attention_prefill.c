/* Prefill attention: online softmax over key tiles at fixed absolute positions.
 *
 * A layer's keys and values are packed once, for all its queries, in slabs that bound the memory whatever the context's length. A task is one KV
 * head and a run of columns: the queries (token, head of the group) in order, by groups of ENG_NR. It goes through the slab in blocks that
 * stay in the L2 cache, and through each block with one group after the other, whose queries and sums stay in L1. Where a chunk is so small that a
 * KV head is one group (the few tokens behind a kept context), its task packs the keys itself, a little before it reads them: they never leave the L2 cache,
 * and of the group's columns it computes those that there are.
 *
 * Each query's arithmetic depends on itself and the keys alone, tile after tile in rising order, and a masked key contributes an exact zero,
 * so the bits are the same whatever chunk, task or group a token falls into.
 *
 * Where there is bf16, a kernel does all of it (attn_bf16). Else everything is float32: tiles of two units of ENG_NR keys, by gemm_f32.
 */
#include "attention_private.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum {
    UNIT = ENG_NR,          /* keys that are packed together */
    TILE = 2 * UNIT,        /* slabs, blocks and float32's tiles begin at multiples */
    BLOCK = 2048,           /* keys */
    PACK_TASK = 8 * UNIT,   /* keys */
    FEW_COLS = 16,          /* gemm_f32 is faster for 16 columns than for more, and for 8 */
    TASK_COLS = 8 * ENG_NR, /* at most */
    TASKS_PER_THREAD = 4,   /* at least, if there are as many groups */
    SLAB_BYTES = 32 << 20,
};

static uint32_t round_up(uint32_t n, uint32_t unit)
{
    return (n + unit - 1) / unit * unit;
}

static uint32_t min2(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static size_t key_bytes(const eng_attn *a)
{
    return (size_t)a->dim * sizeof(float);
}

static size_t value_bytes(const eng_attn *a)
{
    return (size_t)a->dim * (a->bf16 ? sizeof(uint16_t) : sizeof(float));
}

static size_t group_floats(const eng_attn *a)
{
    return ((size_t)a->dim + 2) * ENG_NR;
}

/* ---- life ---------------------------------------------------------------------------------------------------------- */

/* In huge pages where the system has them for who asks: what is packed is read as a stream, again and again. */
static void *take(eng_attn *a, size_t bytes)
{
    enum { HUGE_PAGE = 2 << 20 };
    size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : 64;
    bytes = (bytes + align - 1) & ~(align - 1);
    a->bytes += bytes;
    void *p = aligned_alloc(align, bytes);
    if (p && align == HUGE_PAGE)
        madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

static int worker_init(eng_attn *a, attn_worker *w)
{
    size_t dim = a->dim, floats = TASK_COLS * dim + TILE * ENG_NR + 2 * ENG_NR * dim + (size_t)a->shape->group * ATTN_BLOCK;
    float *p = take(a, floats * sizeof(float));
    if (!p)
        return -ENOMEM;
    w->q = p;
    w->s = p + TASK_COLS * dim;
    w->rows = w->s + TILE * ENG_NR;
    w->tmp = w->rows + ENG_NR * dim;
    w->scores = w->tmp + ENG_NR * dim;
    return 0;
}

int eng_attn_new(eng_pool *pool, const eng_kernels *k, const eng_kv_shape *shape, uint32_t n_chunk, bool f32, eng_attn **ret)
{
    eng_attn *a = calloc(1, sizeof *a);
    if (!a)
        return -ENOMEM;
    a->pool = pool;
    a->k = k;
    a->shape = shape;
    a->cost = eng_cost_default();
    a->n_head = shape->n_head_kv * shape->group;
    a->n_workers = eng_pool_threads(pool);
    a->bf16 = k->attn_bf16 && !f32 && shape->type_k != ENG_KV_F32 && shape->type_v != ENG_KV_F32;
    a->dim = round_up(shape->head_dim, 32);
    a->max_cols = round_up(n_chunk * shape->group, ENG_NR);
    size_t per_key = (key_bytes(a) + value_bytes(a)) * shape->n_head_kv;
    a->slab = SLAB_BYTES / per_key < TILE ? TILE : (uint32_t)(SLAB_BYTES / per_key / TILE * TILE);
    size_t keys = (size_t)a->slab * shape->n_head_kv;
    a->packed_k = take(a, keys * key_bytes(a));
    a->packed_v = take(a, keys * value_bytes(a));
    a->state = take(a, group_floats(a) * (a->max_cols / ENG_NR) * shape->n_head_kv * sizeof(float));
    a->workers = calloc(a->n_workers, sizeof *a->workers);
    int r = a->packed_k && a->packed_v && a->state && a->workers ? 0 : -ENOMEM;
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
    free(a->packed_k);
    free(a->packed_v);
    free(a->state);
    free(a);
}

size_t eng_attn_bytes(const eng_attn *a)
{
    return a->bytes;
}

/* ---- packing ------------------------------------------------------------------------------------------------------- */

/* Keys or values of positions [lo, hi) as rows of dim floats; UNIT of them, those that are missing are zeros. */
static void load_rows(const eng_attn *a, bool values, uint32_t head, uint32_t lo, uint32_t hi, float *rows)
{
    const eng_kv_shape *shape = a->shape;
    uint32_t span = eng_view_find(a->view, lo), d = shape->head_dim, dim = a->dim;
    for (uint32_t pos = lo; pos < hi; pos++, rows += dim) {
        while (a->view->spans[span].hi <= pos)
            span++;
        const eng_segment *seg = a->view->spans[span].seg;
        if (values)
            a->k->kv_load[shape->type_v](eng_segment_v(seg, a->layer, head, pos - seg->start), rows, d);
        else
            a->k->kv_load[shape->type_k](eng_segment_k(seg, a->layer, head, pos - seg->start), rows, d);
        memset(rows + d, 0, (dim - d) * sizeof *rows);
    }
    memset(rows, 0, (size_t)(lo + UNIT - hi) * dim * sizeof *rows);
}

/* Keys and values of positions [from, to) to their places in a head's slab, which begins with those of `first`. */
static void pack_keys(eng_attn *a, attn_worker *w, uint32_t head, uint32_t first, uint32_t from, uint32_t to)
{
    for (uint32_t pos = from; pos < to; pos += UNIT) {
        size_t at = (size_t)head * a->slab + (pos - first);
        uint32_t hi = min2(pos + UNIT, to);
        void *k = a->packed_k + at * key_bytes(a), *v = a->packed_v + at * value_bytes(a);
        if (a->bf16) {
            load_rows(a, false, head, pos, hi, w->rows);
            a->k->attn_pack_k(k, w->rows, a->dim);
            load_rows(a, true, head, pos, hi, w->rows);
            a->k->attn_pack_v(v, w->rows, a->dim);
        } else {
            load_rows(a, false, head, pos, hi, k);
            load_rows(a, true, head, pos, hi, a->few ? v : w->rows);
            if (!a->few)
                a->k->pack_f32(v, ENG_F32, w->rows, a->dim * sizeof(float), UNIT, a->dim, w->tmp);
        }
    }
}

static void pack_task(void *ctx, uint32_t task, uint32_t worker)
{
    eng_attn *a = ctx;
    uint32_t head = task % a->shape->n_head_kv, from = a->lo + task / a->shape->n_head_kv * PACK_TASK;
    pack_keys(a, &a->workers[worker], head, a->lo, from, min2(from + PACK_TASK, a->hi));
}

/* ---- attention ----------------------------------------------------------------------------------------------------- */

/* The first key that a query at pos sees; window 0: all. */
static uint32_t window_begin(uint32_t pos, uint32_t window)
{
    return window && pos >= window ? pos - window + 1 : 0;
}

/* The queries of a group. Past the last column stand zeros that see what the last one sees. */
static void pack_queries(const eng_attn *a, attn_worker *w, uint32_t head, uint32_t col, void *to)
{
    uint32_t group = a->shape->group, d = a->shape->head_dim, n_cols = a->n_tokens * group;
    memset(w->rows, 0, ENG_NR * a->dim * sizeof(float));
    for (uint32_t c = col; c < min2(col + ENG_NR, n_cols); c++)
        memcpy(w->rows + (size_t)(c - col) * a->dim, a->query + ((size_t)(c / group) * a->n_head + head * group + c % group) * d,
               d * sizeof(float));
    a->k->scale(w->rows, (size_t)ENG_NR * a->dim, (float)(M_LOG2E / sqrt(d)));
    if (a->bf16)
        a->k->attn_pack_q(to, w->rows, a->dim);
    else
        a->k->pack_f32(to, ENG_F32, w->rows, a->dim * sizeof(float), ENG_NR, a->dim, w->tmp);
}

/* What attn_bf16 does, in float32, for the first n_cols columns at least. */
static void attend_f32(const eng_kernels *k, float *s, const eng_attn_run *run, uint32_t n_cols)
{
    size_t d = run->d, cols = n_cols < FEW_COLS ? FEW_COLS : ENG_NR;
    for (uint32_t unit = 0; unit < run->n_units; unit += TILE / UNIT) {
        uint32_t n = min2(run->n_units - unit, TILE / UNIT) * UNIT, first = run->first + unit * UNIT;
        k->gemm_f32(s, ENG_NR, (const float *)run->k + unit * UNIT * d, d, run->q, ENG_NR, n, cols, d, false);
        if (!eng_attn_whole(run, n, first))
            eng_attn_hide(run, s, n, first);
        k->softmax_columns(s, n, n_cols, run->m, run->l, run->o, d);
        for (uint32_t i = 0; i < n; i += UNIT)
            k->gemm_f32(run->o, ENG_NR, (const float *)run->v + (unit * UNIT + i) * d, UNIT, s + i * ENG_NR, ENG_NR, d, cols, UNIT, true);
    }
}

/* The same for few columns: values are rows, as keys are, and the sums o [column][d], so that it is the few weights that are transposed. */
static void attend_few(const eng_kernels *k, attn_worker *w, const eng_attn_run *run, uint32_t n_cols)
{
    size_t d = run->d, cols = n_cols <= FEW_COLS / 2 ? FEW_COLS / 2 : FEW_COLS;
    for (uint32_t unit = 0; unit < run->n_units; unit += TILE / UNIT) {
        uint32_t n = min2(run->n_units - unit, TILE / UNIT) * UNIT, first = run->first + unit * UNIT;
        _Alignas(64) float scaled[ENG_NR];
        for (uint32_t c = 0; c < ENG_NR; c++)
            scaled[c] = 1;
        k->gemm_f32(w->s, ENG_NR, (const float *)run->k + unit * UNIT * d, d, run->q, ENG_NR, n, cols, d, false);
        if (!eng_attn_whole(run, n, first))
            eng_attn_hide(run, w->s, n, first);
        k->softmax_columns(w->s, n, n_cols, run->m, run->l, scaled, 1);
        for (uint32_t c = 0; c < n_cols; c++)
            if (scaled[c] != 1)
                k->scale(run->o + c * d, d, scaled[c]);
        for (uint32_t i = 0; i < n; i += UNIT) {
            k->pack_f32(w->rows, ENG_F32, w->s + i * ENG_NR, ENG_NR * sizeof(float), UNIT, cols, w->tmp); /* transposes */
            for (size_t j = 0; j < d; j += ENG_NR)
                k->gemm_f32(run->o + j, d, w->rows, ENG_NR, (const float *)run->v + (unit * UNIT + i) * d + j, d, n_cols, ENG_NR, UNIT, true);
        }
    }
}

/* The group of columns from `col` on over the keys [lo, hi) of the slab, which begins with `first`. */
static void attend_group(const eng_attn *a, attn_worker *w, uint32_t head, uint32_t col, const void *q, float *state, uint32_t first, uint32_t lo, uint32_t hi)
{
    uint32_t seen_lo[ENG_NR], seen_hi[ENG_NR], last = a->n_tokens * a->shape->group - 1, window = eng_kv_window(a->shape, a->layer);
    for (uint32_t c = 0; c < ENG_NR; c++) {
        uint32_t pos = a->pos0 + min2(col + c, last) / a->shape->group;
        seen_lo[c] = window_begin(pos, window);
        seen_hi[c] = pos + 1;
    }
    /* Positions rise with the columns. A tile that none of them sees would leave them as they are. */
    lo = lo < seen_lo[0] / TILE * TILE ? seen_lo[0] / TILE * TILE : lo;
    hi = min2(hi, seen_hi[ENG_NR - 1]);
    if (lo >= hi)
        return;
    size_t at = (size_t)head * a->slab + (lo - first);
    eng_attn_run run = {.d = a->dim, .q = q, .k = a->packed_k + at * key_bytes(a), .v = a->packed_v + at * value_bytes(a), .first = lo,
                        .n_units = (hi - lo + UNIT - 1) / UNIT, .lo = seen_lo, .hi = seen_hi,
                        .m = state, .l = state + ENG_NR, .o = state + 2 * ENG_NR};
    if (a->bf16)
        a->k->attn_bf16(&run);
    else if (a->few)
        attend_few(a->k, w, &run, last + 1);
    else
        attend_f32(a->k, w->s, &run, min2(last + 1 - col, ENG_NR));
}

/* o / l of a group, as rows of the output. */
static void finish_group(const eng_attn *a, attn_worker *w, uint32_t head, uint32_t col, const float *state)
{
    uint32_t group = a->shape->group, d = a->shape->head_dim, n = min2(ENG_NR, a->n_tokens * group - col);
    const float *l = state + ENG_NR, *o = state + 2 * ENG_NR;
    for (uint32_t i = 0; i < d; i += ENG_NR) {
        uint32_t part = min2(ENG_NR, d - i);
        if (!a->few)
            a->k->pack_f32(w->rows, ENG_F32, o + (size_t)i * ENG_NR, ENG_NR * sizeof(float), ENG_NR, ENG_NR, w->tmp); /* transposes */
        for (uint32_t c = 0; c < n; c++) {
            float *out = a->out + ((size_t)((col + c) / group) * a->n_head + head * group + (col + c) % group) * d + i;
            memcpy(out, a->few ? o + (size_t)c * a->dim + i : w->rows + c * ENG_NR, part * sizeof(float));
            a->k->scale(out, part, 1 / l[c]);
        }
    }
}

static void attend_task(void *ctx, uint32_t task, uint32_t worker)
{
    eng_attn *a = ctx;
    attn_worker *w = &a->workers[worker];
    uint32_t n_cols = a->n_tokens * a->shape->group, n_runs = (n_cols + a->task_cols - 1) / a->task_cols;
    uint32_t head = task % a->shape->n_head_kv, run = n_runs - 1 - task / a->shape->n_head_kv; /* the longest first */
    uint32_t from = run * a->task_cols, to = min2(from + a->task_cols, n_cols);
    float *state = a->state + ((size_t)head * a->max_cols + from) / ENG_NR * group_floats(a);
    size_t q_bytes = ENG_NR * (size_t)a->dim * sizeof(float);
    for (uint32_t col = from, i = 0; col < to; col += ENG_NR, i++) {
        float *s = state + i * group_floats(a);
        pack_queries(a, w, head, col, (char *)w->q + i * q_bytes);
        if (a->first_slab) {
            memset(s, 0, group_floats(a) * sizeof *s);
            for (uint32_t c = 0; c < ENG_NR; c++)
                s[c] = ENG_ATTN_NONE;
        }
    }
    for (uint32_t lo = a->lo, hi; lo < a->hi; lo = hi) {
        hi = min2(lo + (a->packs_itself ? min2(PACK_TASK, a->slab) : BLOCK), a->hi);
        if (a->packs_itself)
            pack_keys(a, w, head, lo, lo, hi);
        for (uint32_t col = from, i = 0; col < to; col += ENG_NR, i++)
            attend_group(a, w, head, col, (char *)w->q + i * q_bytes, state + i * group_floats(a), a->packs_itself ? lo : a->lo, lo, hi);
    }
    for (uint32_t col = from, i = 0; col < to && a->hi == a->end; col += ENG_NR, i++)
        finish_group(a, w, head, col, state + i * group_floats(a));
}

void eng_attn_prefill(eng_attn *a, const eng_view *view, uint32_t layer, const float *q, uint32_t pos0, uint32_t n_tokens, float *out)
{
    uint32_t heads = a->shape->n_head_kv, cols = n_tokens * a->shape->group;
    a->view = view;
    a->layer = layer;
    a->query = q;
    a->pos0 = pos0;
    a->n_tokens = n_tokens;
    a->out = out;
    a->end = pos0 + n_tokens;
    uint32_t share = (uint32_t)((uint64_t)cols * heads / (a->n_workers * TASKS_PER_THREAD));
    a->task_cols = min2(round_up(share ? share : 1, ENG_NR), TASK_COLS);
    uint32_t begin = window_begin(pos0, eng_kv_window(a->shape, layer)) / TILE * TILE;
    a->packs_itself = cols <= ENG_NR && heads >= a->n_workers;
    a->few = a->packs_itself && !a->bf16 && cols <= FEW_COLS;
    for (a->lo = begin; a->lo < a->end; a->lo = a->hi) {
        a->hi = a->packs_itself ? a->end : min2(a->lo + a->slab, a->end);
        a->first_slab = a->lo == begin;
        if (!a->packs_itself)
            eng_pool_run(a->pool, "pack keys", pack_task, a, (a->hi - a->lo + PACK_TASK - 1) / PACK_TASK * heads);
        eng_pool_run(a->pool, "attend", attend_task, a, (cols + a->task_cols - 1) / a->task_cols * heads);
    }
}
