/* Search of lists: codes in the order of clusters of *keys*, most of which are passed over.
 *
 * cluster: a cluster is scanned for a head when a key of it may reach the head's threshold, judged by the centroid's score, the standard deviation of its
 * keys' scores for this very query (from the directions in which they vary most) and a margin in such deviations, measured on held-out queries
 * (lists_build.c): so a head whose scores are flat looks at many clusters and a peaked one at few. First the clusters of highest bound are scanned, which
 * gives a threshold near the final one; then, in the order of memory, all that may hold more. Heads decide one by one; what one of them wants is read from
 * memory once for all that do.
 *
 * ivf: the paper's baseline. The clusters of highest centroid score are scanned, a fixed share of all.
 *
 * The estimate of what isn't retrieved (RetroInfer, arXiv 2505.02922, has it with fixed shares): the members left in a cluster count with the weight of their
 * mean, which follows from the centroid's score and those of the members retrieved, and with their mean value. Such a mean is a difference of nearly equal
 * sums when few are left, so it is clamped where no key left out can be: at the least score retrieved. In a run that the range cuts, hidden members of a
 * cluster are taken to lie at its centroid. */
#include "private.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum {
    LEAST_WANTED = 100, /* the margin holds for this many keys and more; fewer are searched for as if they were as many */
};

/* Of clusters [at, at + n). In the directions kept, a key's score varies as the direction's own score says; in the others, as for a query of this length. */
static void set_deviations(const idx_index *ix, uint32_t h, uint32_t at, uint32_t n, float scale, idx_scratch *s)
{
    const float *q = s->q + (size_t)h * idx_dim_pad(ix->header->dim), *along = s->list_along + (size_t)h * IDX_DIRECTIONS * s->list_ld, *spread = ix->code.spread + at;
    float *dev = s->list_dev + (size_t)h * s->list_ld + at, norm = 0;
    for (uint32_t j = 0; j < ix->header->dim; j++)
        norm += q[j] * q[j];
    norm *= scale * scale / (float)ix->header->dim;
    for (uint32_t i = 0; i < n; i++) {
        float variance = spread[i] * spread[i] * norm;
        for (uint32_t r = 0; r < IDX_DIRECTIONS; r++)
            variance += along[r * n + i] * along[r * n + i];
        dev[i] = sqrtf(variance);
    }
}

void idx_lists_score(const idx_index *ix, uint32_t first, uint32_t end, uint32_t group, float scale, idx_scratch *s)
{
    const idx_kernels *k = idx_kernels_get();
    uint32_t all = (ix->header->n_clusters + IDX_BLOCK - 1) / IDX_BLOCK, block = first / IDX_BLOCK, blocks = (end + IDX_BLOCK - 1) / IDX_BLOCK - block;
    uint32_t at = block * IDX_BLOCK, n = blocks * IDX_BLOCK, quads = ix->code.quads;
    k->codes(ix->code.cent_codes + (size_t)block * quads * 64, ix->code.cent_scale + at, blocks, quads, s->code_query, group, s->list_score + at, s->list_ld, s->tile_best);
    for (uint32_t h = 0; h < group; h++) {
        s->list_query[h] = s->code_query[h];
        s->list_query[h].offset = 0;
        if (ix->header->kind == IDX_IVF)
            memset(s->list_dev + (size_t)h * s->list_ld + at, 0, n * sizeof *s->list_dev);
    }
    if (ix->header->kind == IDX_IVF)
        return;
    for (uint32_t r = 1; r <= IDX_DIRECTIONS; r++)
        k->codes(ix->code.cent_codes + ((size_t)r * all + block) * quads * 64, ix->code.cent_scale + (size_t)r * all * IDX_BLOCK + at, blocks, quads, s->list_query, group,
                 s->list_along + (r - 1) * n, (size_t)IDX_DIRECTIONS * s->list_ld, s->tile_best);
    for (uint32_t h = 0; h < group; h++)
        set_deviations(ix, h, at, n, scale, s);
}

/* ---- search ----------------------------------------------------------------------------------------------------- */

/* Scans clusters [cluster, stop) of a run, at most a tile, for the heads, counted from `head0`, whose bits are set; heads between them are scored, too. */
static void scan_clusters(const idx_scan_state *c, uint32_t cluster, uint32_t stop, uint32_t head0, uint32_t bits, uint32_t run_lo, bool cut)
{
    const idx_index *ix = c->ix;
    idx_scratch *s = c->s;
    uint32_t first = ix->code.first[cluster], end = ix->code.first[stop], quads = ix->code.quads;
    uint32_t h0 = head0 + (uint32_t)__builtin_ctz(bits), n_heads = 32 - (uint32_t)__builtin_clz(bits) - (h0 - head0);
    for (uint32_t at = first & ~(IDX_BLOCK - 1u); at < end; at += IDX_TILE) {
        uint32_t n = end - at < IDX_TILE ? (end - at + IDX_BLOCK - 1) & ~(IDX_BLOCK - 1u) : IDX_TILE;
        idx_ask_rows(ix, at, n);
        c->k->codes(ix->code.codes + (size_t)at / IDX_BLOCK * quads * 64, idx_visible_scales(c, at, n, first, end, run_lo, cut), n / IDX_BLOCK, quads,
                    s->code_query + h0, n_heads, s->scores, IDX_TILE, s->tile_best);
        for (uint32_t h = 0; h < n_heads; h++)
            if (bits >> (h0 + h - head0) & 1)
                idx_top_add_known(c->k, &s->tops[h0 + h], at, s->scores + (size_t)h * IDX_TILE, n, s->tile_best[h], s->tmp);
    }
}

/* What a cluster must reach to be scanned for head h: the score of the wanted-th best key so far. ivf: nothing reaches it, unless the range has left the head
 * with too few keys. */
static float threshold_of(const idx_scan_state *c, uint32_t h, uint32_t wanted, float beta)
{
    idx_top *t = &c->s->tops[h];
    float least = t->best - beta;
    if (c->ix->header->kind == IDX_IVF)
        return t->n < wanted && beta == INFINITY ? -INFINITY : INFINITY;
    if (t->n >= wanted) {
        float kth = idx_kth(c->k, t->scores, t->n, wanted, c->s->tmp);
        least = kth > least ? kth : least;
    }
    return least;
}

/* Marks the clusters [c->first, c->end) whose bound reaches the head's aim. */
static void mark(const idx_scan_state *c, uint32_t h, float aim, uint32_t bit)
{
    const float *bound = c->s->list_bound + (size_t)h * c->s->list_ld;
    uint32_t *want = c->s->list_want;
    for (uint32_t i = c->first; i < c->end; i++)
        want[i] |= bound[i] >= aim ? bit : 0;
}

/* The hardware's prefetcher sees no more than the beginning of a cluster before its end is there. */
static void fetch(const idx_index *ix, uint32_t cluster)
{
    uint32_t from = ix->code.first[cluster] / IDX_BLOCK, to = (ix->code.first[cluster + 1] - 1) / IDX_BLOCK, quads = ix->code.quads;
    for (const uint8_t *p = ix->code.codes + (size_t)from * quads * 64, *end = ix->code.codes + (size_t)(to + 1) * quads * 64; p < end; p += 64)
        __builtin_prefetch(p);
}

/* Scans what is marked for heads [head0, head0 + n_heads) and has not been scanned yet. Neighbours that are wanted are scanned together, for all heads that want one of
 * them, unless such a head has met one of them before: a kernel's call has its price, and what is found besides does no harm. Thresholds that rise on the way would
 * spare few of what is marked, and to look at them costs more. */
static void scan_marked(const idx_scan_state *c, uint32_t head0)
{
    const idx_index *ix = c->ix;
    const uint32_t *first = ix->code.first;
    idx_scratch *s = c->s;
    uint32_t *want = s->list_want, *scanned = s->list_done, lo = 0, hi = 0;
    for (uint32_t i = c->first, stop; i < c->end; i = stop) {
        uint32_t bits = want[i] & ~scanned[i], more, done = scanned[i];
        stop = i + 1;
        if (!bits)
            continue;
        if (first[i] >= hi)
            idx_codes_run_rows(ix->header->n, idx_codes_run_of(ix->header->n, first[i]), &lo, &hi);
        while (stop < c->end && first[stop] < hi && first[stop + 1] - (first[i] & ~(IDX_BLOCK - 1u)) <= IDX_TILE && (more = want[stop] & ~scanned[stop]) != 0 &&
               !((bits | more) & (done | scanned[stop]))) {
            bits |= more;
            done |= scanned[stop++];
        }
        if (stop < c->end)
            fetch(ix, stop);
        scan_clusters(c, i, stop, head0, bits, lo, lo < c->q->lo || hi > c->q->hi);
        for (uint32_t k = i; k < stop; k++) {
            s->visited += scanned[k] ? 0 : first[k + 1] - first[k];
            scanned[k] |= bits;
        }
    }
}

/* How high a key of each cluster may score. */
static void set_bounds(const idx_scan_state *c, uint32_t h)
{
    const float *score = c->s->list_score + (size_t)h * c->s->list_ld, *dev = c->s->list_dev + (size_t)h * c->s->list_ld;
    float *bound = c->s->list_bound + (size_t)h * c->s->list_ld, margin = c->ix->header->margin, rounding = c->s->code_query[h].margin;
    for (uint32_t i = c->first; i < c->end; i++)
        bound[i] = score[i] + dev[i] * margin + rounding;
}

/* The n-th highest bound of head h. */
static float nth_bound(const idx_scan_state *c, uint32_t h, uint32_t n)
{
    uint32_t clusters = c->end - c->first;
    return n >= clusters ? -INFINITY : idx_kth(c->k, c->s->list_bound + (size_t)h * c->s->list_ld + c->first, clusters, n ? n : 1, c->s->list_tmp);
}

static void search_heads(const idx_scan_state *c, uint32_t head0, uint32_t n_heads, uint32_t wanted, float beta)
{
    idx_scratch *s = c->s;
    uint32_t clusters = c->end - c->first;
    bool ivf = c->ix->header->kind == IDX_IVF;
    float share = c->ix->header->margin < 1 ? c->ix->header->margin : 1;
    uint32_t sure = beta < INFINITY && wanted > LEAST_WANTED ? LEAST_WANTED : wanted; /* the best key alone gives a dynamic budget's threshold */
    uint32_t n = ivf ? (uint32_t)ceilf(share * (float)clusters) : sure / (IDX_CLUSTER_ROWS / 8) + 4;
    memset(s->list_want + c->first, 0, clusters * sizeof *s->list_want);
    memset(s->list_done + c->first, 0, clusters * sizeof *s->list_done);
    for (uint32_t h = 0; h < n_heads; h++) {
        set_bounds(c, head0 + h);
        mark(c, head0 + h, nth_bound(c, head0 + h, n), 1u << h);
    }
    scan_marked(c, head0);
    for (uint32_t h = 0; h < n_heads; h++)
        mark(c, head0 + h, threshold_of(c, head0 + h, wanted, beta), 1u << h);
    scan_marked(c, head0);
}

/* Of clusters [*first, *end), those of runs that the range meets. */
static void clip(const idx_scan_state *c, uint32_t *first, uint32_t *end)
{
    const idx_index *ix = c->ix;
    uint32_t from = idx_codes_run_of(ix->header->n, c->q->lo), to = idx_codes_run_of(ix->header->n, c->q->hi - 1);
    *first = ix->code.run[from] > *first ? ix->code.run[from] : *first;
    *end = ix->code.run[to + 1] < *end ? ix->code.run[to + 1] : *end;
}

void idx_lists_scan(const idx_scan_state *whole, uint32_t top_k, float beta)
{
    idx_scratch *s = whole->s;
    idx_scan_state part = *whole, *c = &part;
    if (c->q->lo < c->q->hi)
        clip(c, &part.first, &part.end);
    if (c->q->lo == c->q->hi || part.first >= part.end)
        top_k = 0;
    idx_lists_score(c->ix, whole->first, whole->end, c->q->group, c->q->scale, s);
    uint32_t span = c->q->hi - c->q->lo, wanted = top_k > LEAST_WANTED ? top_k : LEAST_WANTED;
    wanted = wanted < span ? wanted : span;
    for (uint32_t h = 0; h < c->q->group; h += IDX_HEADS)
        if (top_k)
            search_heads(c, h, c->q->group - h < IDX_HEADS ? c->q->group - h : IDX_HEADS, wanted, beta);
    for (uint32_t h = 0; h < c->q->group && c->weights; h++) {
        const float *score = s->list_score + (size_t)h * s->list_ld + whole->first;
        memcpy(c->weights + h * c->ld, score, (whole->end - whole->first) * sizeof *score);
        c->m[h] = c->k->max(score, whole->end - whole->first, fmaxf(c->m[h], s->tops[h].n ? s->tops[h].best : -INFINITY));
    }
}

/* ---- estimate --------------------------------------------------------------------------------------------------- */

float idx_lists_estimate(const idx_index *ix, const idx_cut *cuts, uint32_t n_cuts, uint32_t first, uint32_t end, float m, float factor,
                         float *weights, const uint32_t *clusters, const float *scanned, uint32_t n_hits, uint32_t *taken)
{
    const uint32_t n = ix->header->n, *at = ix->code.first;
    const idx_cut *cut = NULL;
    uint32_t run = 0, next = first;
    float l = 0, clamp = n_hits ? INFINITY : FLT_MAX;
    for (uint32_t i = 0; i < n_hits; i++)
        clamp = scanned[i] < clamp ? scanned[i] : clamp;
    /* Centroids' scores become sums over the members visible, less those retrieved. */
    for (uint32_t c = first; c < end; c++) {
        if (c == next) {
            run = idx_codes_run_of(n, at[c]);
            next = ix->code.run[run + 1];
            cut = idx_find_cut(cuts, n_cuts, run);
        }
        weights[c - first] *= (float)(cut ? cut->counts[c - ix->code.run[run]] : at[c + 1] - at[c]);
    }
    for (uint32_t i = 0; i < n_hits; i++) {
        weights[clusters[i] - first] -= scanned[i];
        taken[clusters[i] - first]++;
    }
    next = first;
    for (uint32_t c = first; c < end; c++) {
        if (c == next) {
            run = idx_codes_run_of(n, at[c]);
            next = ix->code.run[run + 1];
            cut = idx_find_cut(cuts, n_cuts, run);
        }
        uint32_t left = (cut ? cut->counts[c - ix->code.run[run]] : at[c + 1] - at[c]) - taken[c - first];
        float mean = left ? weights[c - first] / (float)left : -INFINITY, w = left ? expf((mean < clamp ? mean : clamp) - m) * factor : 0;
        w = w >= 0 && w < INFINITY ? w : 0;
        l += w * (float)left;
        weights[c - first] = w;
        taken[c - first] = 0;
    }
    return l;
}
