/* Keeping the best of a stream of scores: a buffer and a threshold instead of a heap, so that a vector compare does most of the work. */
#ifndef IDX_SELECT_H
#define IDX_SELECT_H

#include "distance.h"

/* The best `keep` (id, score) pairs of one query head so far, and some that may yet be among them. */
typedef struct {
    uint32_t *ids; /* [idx_top_cap(keep)] */
    float *scores;
    uint32_t n, keep;
    float best; /* largest score seen, or known from elsewhere; -INFINITY: none */
    float beta; /* nothing below best - beta is of interest; INFINITY: everything is */
    float thr;  /* nothing below it is of interest; rises */
} idx_top;

/* Entries a buffer for `keep` needs: some slack, so that shrinking is rare, a tile, and a vector's overrun. */
static inline size_t idx_top_cap(uint32_t keep)
{
    return (size_t)keep + keep / 2 + 512 + IDX_TILE + 16;
}

static inline void idx_top_reset(idx_top *t, uint32_t keep, float beta, float best)
{
    t->n = 0;
    t->keep = keep;
    t->beta = beta;
    t->best = best == best ? best : -__builtin_inff();
    t->thr = -__builtin_inff();
}

/* Offers n <= IDX_TILE scores; ids NULL: first + i. tmp: [2 * idx_top_cap(keep)]. NaN is never kept. */
void idx_top_add(const idx_kernels *k, idx_top *t, const uint32_t *ids, uint32_t first, const float *scores, uint32_t n, float *tmp);

/* The same for ids from `first` on, when the largest score is known (-INFINITY: there is none). */
void idx_top_add_known(const idx_kernels *k, idx_top *t, uint32_t first, const float *scores, uint32_t n, float best, float *tmp);

/* Leaves only what is of interest, at most `keep`; among equal scores those offered first. */
void idx_top_finish(const idx_kernels *k, idx_top *t, float *tmp);

/* k-th largest of x[0..n), 1 <= k <= n, no NaN. tmp: [2 * (n + 16)]. */
float idx_kth(const idx_kernels *k, const float *x, uint32_t n, uint32_t kth, float *tmp);

#endif
