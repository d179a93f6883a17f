#include "moe.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS_PER_TASK = 16 };

struct eng_moe {
    const eng_model *m;
    const eng_kernels *k;
    eng_pool *pool;
    eng_linear *linear;
    size_t bytes;
    float *logits;      /* [n_chunk][n_expert], then probabilities */
    uint32_t *chosen;   /* [n_chunk][n_expert_used] experts of a token */
    float *weight;      /* [n_chunk][n_expert_used] */
    uint32_t *first;    /* [n_expert + 1] where an expert's tokens begin in `rows` */
    uint32_t *rows;     /* [n_chunk n_expert_used] token numbers, by expert */
    float *row_weight;  /* the same, their weights */
    float *y, *sum;     /* [n_chunk][n_embd] outputs of one expert's tokens; of all experts, by token */
    float *gate, *up;   /* [n_ff_expert] of one token: decode */

    /* of the call */
    const eng_layer *w;
    float *h;
    uint32_t at, n; /* the current expert's entries in `rows`: [at, at + n) */
    const eng_weight *gate_up[2]; /* its weights */
};

int eng_moe_new(const eng_model *m, const eng_kernels *k, eng_pool *pool, eng_linear *l, uint32_t n_chunk, eng_moe **ret)
{
    eng_moe *moe = calloc(1, sizeof *moe);
    if (!moe)
        return -ENOMEM;
    *moe = (eng_moe){.m = m, .k = k, .pool = pool, .linear = l};
    size_t n = n_chunk, pairs = n * m->n_expert_used;
    struct {
        void *to;
        size_t count;
    } parts[] = {
        {&moe->logits, n * m->n_expert},
        {&moe->chosen, pairs},
        {&moe->weight, pairs},
        {&moe->first, m->n_expert + (size_t)1},
        {&moe->rows, pairs},
        {&moe->row_weight, pairs},
        {&moe->y, n * m->n_embd},
        {&moe->sum, n * m->n_embd},
        {&moe->gate, m->n_ff_expert},
        {&moe->up, m->n_ff_expert},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) { /* all elements have 4 bytes */
        size_t bytes = (parts[i].count * sizeof(float) + 63) & ~(size_t)63;
        void *p = aligned_alloc(64, bytes);
        if (!p) {
            eng_moe_free(moe);
            return -ENOMEM;
        }
        memcpy(parts[i].to, &p, sizeof p);
        moe->bytes += bytes;
    }
    *ret = moe;
    return 0;
}

void eng_moe_free(eng_moe *moe)
{
    if (!moe)
        return;
    void *parts[] = {moe->logits, moe->chosen, moe->weight, moe->first, moe->rows, moe->row_weight,
                     moe->y,      moe->sum,    moe->gate,   moe->up};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        free(parts[i]);
    free(moe);
}

size_t eng_moe_bytes(const eng_moe *moe)
{
    return moe->bytes;
}

/* ---- routing ----------------------------------------------------------------------------------------------------- */

/* Picks the experts of token t, the smaller number among equals, and leaves them in rising order. */
static void route_token(eng_moe *moe, uint32_t t)
{
    const eng_model *m = moe->m;
    const eng_weight *r = &moe->w->w_router;
    float *p = moe->logits + (size_t)t * m->n_expert, *weight = moe->weight + (size_t)t * m->n_expert_used, sum = 0;
    uint32_t *chosen = moe->chosen + (size_t)t * m->n_expert_used, n = 0, k = m->n_expert_used;
    moe->k->gemv_f32[r->type](p, r->data, r->row_bytes, r->rows, moe->h + (size_t)t * m->n_embd, r->cols);
    moe->k->softmax(p, m->n_expert, moe->k->max(p, m->n_expert)); /* not divided by its sum: only ratios matter below */
    for (uint32_t e = 0; e < m->n_expert; e++) {
        uint32_t at = n;
        while (at > 0 && p[e] > p[chosen[at - 1]])
            at--;
        if (at == k)
            continue;
        if (n < k)
            n++;
        memmove(chosen + at + 1, chosen + at, (n - at - 1) * sizeof *chosen);
        chosen[at] = e;
    }
    for (uint32_t i = 1; i < k; i++) { /* insertion sort of a handful */
        uint32_t e = chosen[i], at = i;
        for (; at > 0 && chosen[at - 1] > e; at--)
            chosen[at] = chosen[at - 1];
        chosen[at] = e;
    }
    for (uint32_t i = 0; i < k; i++)
        sum += p[chosen[i]];
    for (uint32_t i = 0; i < k; i++)
        weight[i] = p[chosen[i]] / sum; /* the best of all is exp(0): sum >= 1 */
}

/* Sorts the (token, expert) pairs of n tokens by expert, tokens in rising order. */
static void group_by_expert(eng_moe *moe, uint32_t n)
{
    const eng_model *m = moe->m;
    uint32_t pairs = n * m->n_expert_used;
    memset(moe->first, 0, (m->n_expert + (size_t)1) * sizeof *moe->first);
    for (uint32_t i = 0; i < pairs; i++)
        moe->first[moe->chosen[i] + 1]++;
    for (uint32_t e = 0; e < m->n_expert; e++)
        moe->first[e + 1] += moe->first[e];
    for (uint32_t i = 0; i < pairs; i++) {
        uint32_t to = moe->first[moe->chosen[i]]++;
        moe->rows[to] = i / m->n_expert_used;
        moe->row_weight[to] = moe->weight[i];
    }
    memmove(moe->first + 1, moe->first, m->n_expert * sizeof *moe->first); /* each had moved on to the next one's beginning */
    moe->first[0] = 0;
}

/* ---- one expert's tokens ----------------------------------------------------------------------------------------- */

static void gather_row(eng_moe *moe, uint32_t i)
{
    uint32_t n = moe->m->n_embd;
    eng_linear_input(moe->linear, moe->gate_up, 2, i, moe->h + (size_t)moe->rows[moe->at + i] * n);
}

static void scatter_row(eng_moe *moe, uint32_t i)
{
    size_t n = moe->m->n_embd;
    moe->k->scale(moe->y + i * n, n, moe->row_weight[moe->at + i]);
    moe->k->add(moe->sum + moe->rows[moe->at + i] * n, moe->y + i * n, n);
}

struct row_job {
    eng_moe *moe;
    void (*fn)(eng_moe *moe, uint32_t i);
    uint32_t n;
};

static void row_task(void *ctx, uint32_t task, uint32_t worker)
{
    struct row_job *job = ctx;
    (void)worker;
    uint32_t end = (task + 1) * ROWS_PER_TASK < job->n ? (task + 1) * ROWS_PER_TASK : job->n;
    for (uint32_t i = task * ROWS_PER_TASK; i < end; i++)
        job->fn(job->moe, i);
}

static void each_row(eng_moe *moe, void (*fn)(eng_moe *, uint32_t), uint32_t n)
{
    struct row_job job = {moe, fn, n};
    eng_pool_run(moe->pool, "experts' rows", row_task, &job, (n + ROWS_PER_TASK - 1) / ROWS_PER_TASK);
}

static eng_weight expert(const eng_weight *all, uint32_t e)
{
    eng_weight w = *all;
    w.data = (const char *)w.data + (size_t)e * w.rows * w.row_bytes;
    return w;
}

/* The chosen expert on its tokens: from their rows of h to y. Decode has one token. */
static void run_expert(eng_moe *moe, const eng_weight *gate, const eng_weight *up, const eng_weight *down, bool decode)
{
    const eng_kernels *k = moe->k;
    if (decode) {
        eng_linear_decode(moe->linear, (const eng_weight *const[]){gate, up}, (float *const[]){moe->gate, moe->up}, 2, moe->h);
        k->silu_mul(moe->gate, moe->gate, moe->up, moe->m->n_ff_expert);
        eng_linear_decode(moe->linear, &down, &moe->y, 1, moe->gate);
    } else {
        moe->gate_up[0] = gate;
        moe->gate_up[1] = up;
        each_row(moe, gather_row, moe->n);
        eng_linear_prefill_gated(moe->linear, gate, up, down, k->silu_mul, NULL, moe->n);
        eng_linear_prefill(moe->linear, &down, &moe->y, 1, NULL, moe->n);
    }
}

/* h: n == 1 in decode. */
void eng_moe_run(eng_moe *moe, const eng_layer *w, bool decode, float *h, uint32_t n)
{
    size_t bytes = (size_t)n * moe->m->n_embd * sizeof *h;
    moe->w = w;
    moe->h = h;
    each_row(moe, route_token, n);
    group_by_expert(moe, n);
    memset(moe->sum, 0, bytes);
    for (uint32_t e = 0; e < moe->m->n_expert; e++) {
        moe->at = moe->first[e];
        moe->n = moe->first[e + 1] - moe->at;
        if (!moe->n)
            continue;
        eng_weight gate = expert(&w->w_gate, e), up = expert(&w->w_up, e), down = expert(&w->w_down, e);
        run_expert(moe, &gate, &up, &down, decode);
        each_row(moe, scatter_row, moe->n);
    }
    memcpy(h, moe->sum, bytes);
}
