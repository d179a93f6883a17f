#include "select.h"

#include <math.h>
#include <string.h>

static float median3(float a, float b, float c)
{
    return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c));
}

/* A split may write over what it reads: its outputs never run ahead of the input. */
float idx_kth(const idx_kernels *k, const float *x, uint32_t n, uint32_t kth, float *tmp)
{
    float *gt = tmp, *lt = tmp + n + 16;
    for (;;) {
        float pivot = median3(x[n / 4], x[n / 2], x[n - 1 - n / 4]);
        uint32_t n_gt, n_lt;
        k->split(x, n, pivot, gt, &n_gt, lt, &n_lt);
        if (kth <= n_gt) {
            x = gt;
            n = n_gt;
        } else if (kth <= n - n_lt) {
            return pivot;
        } else {
            kth -= n - n_lt;
            n = n_lt;
            x = lt;
        }
    }
}

float idx_kth_best(const float *x, uint32_t n, uint32_t k, float *tmp)
{
    return idx_kth(idx_kernels_get(), x, n, k, tmp);
}

/* Down to the best `keep`. What comes later with the score of the last one kept is worse: ids rise in a scan, and ties go to the smaller.
 */
static void shrink(const idx_kernels *k, idx_top *t, float *tmp)
{
    float last = idx_kth(k, t->scores, t->n, t->keep, tmp);
    uint32_t n = k->filter(t->ids, 0, t->scores, t->n, last, t->ids, t->scores), excess = n - t->keep;
    if (excess) {
        uint32_t ties = 0, kept = 0;
        for (uint32_t i = 0; i < n; i++)
            ties += t->scores[i] == last;
        uint32_t quota = ties - excess;
        for (uint32_t i = 0; i < n; i++) {
            if (t->scores[i] == last) {
                if (!quota)
                    continue;
                quota--;
            }
            t->ids[kept] = t->ids[i];
            t->scores[kept++] = t->scores[i];
        }
        n = kept;
    }
    t->n = n;
    float above = nextafterf(last, INFINITY);
    if (above > t->thr)
        t->thr = above;
}

static void take(const idx_kernels *k, idx_top *t, const uint32_t *ids, uint32_t first, const float *scores, uint32_t n, float best, float *tmp)
{
    t->best = best > t->best ? best : t->best;
    float floor = t->best - t->beta;
    if (floor > t->thr)
        t->thr = floor;
    if (!(best >= t->thr))
        return;
    t->n += k->filter(ids, first, scores, n, t->thr, t->ids + t->n, t->scores + t->n);
    if (t->n > t->keep + t->keep / 2 + 512)
        shrink(k, t, tmp);
}

void idx_top_add(const idx_kernels *k, idx_top *t, const uint32_t *ids, uint32_t first, const float *scores, uint32_t n, float *tmp)
{
    take(k, t, ids, first, scores, n, k->max(scores, n, -INFINITY), tmp);
}

void idx_top_add_known(const idx_kernels *k, idx_top *t, uint32_t first, const float *scores, uint32_t n, float best, float *tmp)
{
    take(k, t, NULL, first, scores, n, best, tmp);
}

void idx_top_finish(const idx_kernels *k, idx_top *t, float *tmp)
{
    float floor = t->best - t->beta;
    if (t->n && floor > -INFINITY)
        t->n = k->filter(t->ids, 0, t->scores, t->n, floor, t->ids, t->scores);
    if (!t->keep)
        t->n = 0;
    else if (t->n > t->keep)
        shrink(k, t, tmp);
}

/* One number that orders as (score falling, id rising) does: the larger, the better. NaN stands last, -0 equals 0. */
static uint64_t rank_of(uint32_t id, float score)
{
    uint32_t u;
    score += 0.0f;
    memcpy(&u, &score, 4);
    u = u & 0x80000000u ? ~u : u | 0x80000000u;
    if (score != score)
        u = 0;
    return (uint64_t)u << 32 | (uint32_t)~id;
}

static void swap(uint32_t *ids, float *scores, uint32_t a, uint32_t b)
{
    uint32_t id = ids[a];
    float s = scores[a];
    ids[a] = ids[b];
    scores[a] = scores[b];
    ids[b] = id;
    scores[b] = s;
}

/* Hoare's quickselect; the pivot's place is pseudo-random, so no ordinary order of the input is slow. */
uint32_t idx_select(uint32_t *ids, float *scores, uint32_t n, uint32_t k)
{
    if (k >= n)
        return n;
    uint32_t lo = 0, hi = n; /* what lies outside [lo, hi) is on its side of k already */
    uint64_t seed = 0x9e3779b97f4a7c15u;
    while (k > lo && hi - lo > 1) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        swap(ids, scores, lo, lo + (uint32_t)(((seed >> 32) * (hi - lo)) >> 32));
        uint64_t pivot = rank_of(ids[lo], scores[lo]);
        uint32_t i = lo, j = hi - 1;
        for (;;) {
            while (rank_of(ids[i], scores[i]) > pivot)
                i++;
            while (rank_of(ids[j], scores[j]) < pivot)
                j--;
            if (i >= j)
                break;
            swap(ids, scores, i++, j--);
        }
        /* [lo, j] >= pivot >= [j + 1, hi), both not empty because the pivot stood first. */
        if (k <= j)
            hi = j + 1;
        else
            lo = j + 1;
    }
    return k;
}
