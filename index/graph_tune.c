/* How far a search must look depends on the head: the margin is measured, on training positions that the graph wasn't built from. */
#include "graph_build.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TUNE_K = IDX_TUNE_K, TUNE_BEST = 16, TUNE_POSITIONS = 64, N_LEVELS = 1 << IDX_TUNE_TRIALS };

static const float first_level = 1, level_step = .1f;
static const float drift = 1.5f; /* decode queries are farther from the keys than those of the prompt, which margins were measured on. .5 is enough for recall on most heads, but lost keys that the next token notices (README.md) */
static const float default_margin = 4;

/* The least level that suffices for a head lies in [lo, hi]; what its present one has missed. */
struct idx_tune_head {
    uint32_t lo, hi, missed, of, missed_best, of_best;
};

/* The newest half of the positions is measured: decoding goes on from there. */
static uint32_t tune_step(const idx_builder *b)
{
    return b->train.m / 2 / TUNE_POSITIONS;
}

int idx_tune_new(idx_builder *b)
{
    if (!b->n_queries || tune_step(b) < 4 || b->keys.n < 4 * TUNE_K)
        return 0; /* too little to spare any */
    b->n_tune = TUNE_POSITIONS;
    b->tune_hits = calloc((size_t)b->n_tune * b->train.group * (1 + TUNE_K), 4);
    b->tune = calloc(b->train.group, sizeof *b->tune);
    for (uint32_t h = 0; h < b->train.group && b->tune; h++)
        b->tune[h].hi = N_LEVELS - 1;
    return b->tune_hits && b->tune ? 0 : -ENOMEM;
}

bool idx_tune_owns(const idx_builder *b, uint32_t position, uint32_t *ret)
{
    uint32_t back = b->train.m - 1 - position, step = tune_step(b);
    if (!b->n_tune || back % step || back / step >= b->n_tune)
        return false;
    *ret = back / step;
    return true;
}

/* What to search for at held-out position `number`; the queries go to b->q. */
static idx_query query_of(idx_builder *b, uint32_t number)
{
    uint32_t group = b->train.group, dim = b->keys.dim;
    size_t position = b->train.m - 1 - (size_t)number * tune_step(b);
    idx_rows rows = {b->train.q + position * group * dim, (size_t)dim * 2, group, dim, IDX_F16};
    b->k->widen(b->q, &rows, NULL, 0, group);
    for (uint32_t h = 1; h < group; h++)
        memmove(b->q + (size_t)h * dim, b->q + (size_t)h * b->dim_pad, (size_t)dim * sizeof *b->q);
    idx_query q = {.q = b->q, .group = group, .scale = 1, .budget = {.top_k = TUNE_K}};
    idx_train_range(b, (uint32_t)position, &q.lo, &q.hi);
    return q;
}

/* at: next position; sub: keys searched of it. */
bool idx_tune_truth(idx_builder *b)
{
    if (b->at == b->n_tune)
        return true;
    uint32_t number = (uint32_t)b->at;
    idx_query q = query_of(b, number);
    idx_hits *found;
    if (!idx_build_search(b, b->scratch, &q, &found))
        return false;
    b->at++;
    for (uint32_t h = 0; h < b->train.group; h++) {
        uint32_t *hits = b->tune_hits + ((size_t)number * b->train.group + h) * (1 + TUNE_K);
        hits[0] = found[h].n;
        idx_select(found[h].ids, found[h].scores, found[h].n, TUNE_BEST);
        memcpy(hits + 1, found[h].ids, (size_t)found[h].n * sizeof *hits);
    }
    return false;
}

static int rising(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void try_position(idx_builder *b, uint32_t number)
{
    idx_query q = query_of(b, number);
    idx_hits *found;
    if (idx_search(b->result, &b->keys, &q, b->scratch, &found, NULL) < 0)
        return;
    for (uint32_t h = 0; h < b->train.group; h++) {
        const uint32_t *hits = b->tune_hits + ((size_t)number * b->train.group + h) * (1 + TUNE_K);
        qsort(found[h].ids, found[h].n, sizeof *found[h].ids, rising);
        for (uint32_t i = 0; i < hits[0]; i++) {
            bool hit = bsearch(hits + 1 + i, found[h].ids, found[h].n, sizeof *hits, rising) != NULL;
            b->tune[h].missed += !hit;
            b->tune[h].missed_best += !hit && i < TUNE_BEST;
        }
        b->tune[h].of += hits[0];
        b->tune[h].of_best += hits[0] < TUNE_BEST ? hits[0] : TUNE_BEST;
    }
}

static uint32_t middle(const struct idx_tune_head *t)
{
    return (t->lo + t->hi) / 2;
}

static void set_margins(idx_builder *b, float more)
{
    idx_header *header = (idx_header *)(void *)b->result->arena;
    float *margins = (float *)(void *)(b->result->arena + ((const uint8_t *)b->result->margins - b->result->arena));
    header->margin = 0;
    for (uint32_t h = 0; h < b->train.group; h++) {
        margins[h] = first_level + level_step * (float)middle(&b->tune[h]) + more;
        header->margin = fmaxf(header->margin, margins[h]);
    }
}

/* at: positions tried, at all levels. The best hits must not be lost (a random loss of 1 % of them shows in the next token): the bar is 99.9 % of the best 16 and 99.5 % of the best 100. With `drift` beside, less than one in a thousand
 * of the best 16 of real decode steps is lost (README.md). Levels are tried by bisection, for all heads at once. */
bool idx_tune(idx_builder *b)
{
    if (!b->n_tune) {
        ((idx_header *)(void *)b->result->arena)->margin = default_margin;
        return true;
    }
    set_margins(b, 0);
    try_position(b, (uint32_t)(b->at++ % b->n_tune));
    if (b->at % b->n_tune)
        return false;
    for (uint32_t h = 0; h < b->train.group; h++) {
        struct idx_tune_head *t = &b->tune[h];
        if (t->missed * 200 <= t->of && t->missed_best * 1000 <= t->of_best)
            t->hi = middle(t);
        else if (t->lo < t->hi)
            t->lo = middle(t) + 1;
        t->missed = t->missed_best = t->of = t->of_best = 0;
    }
    if (b->at < (uint64_t)IDX_TUNE_TRIALS * b->n_tune)
        return false;
    set_margins(b, drift);
    return true;
}
