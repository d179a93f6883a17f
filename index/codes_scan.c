/* The scan of codes, in two phases, since a budget may hold over more than one index.
 *
 * Scan: scores of a tile of codes for all heads of the group; the best of them by a threshold (select.c), and every one's weight, summed
 * per cluster. The weights' reference m is the largest score so far; the sums are scaled down when it rises, which it does some ten times
 * in a scan. The best are scored again from the keys. Estimate: what stays retrieved is taken out of the sums, by the same scan-precision
 * weights that went in. */
#include "private.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <string.h>

/* A score by code is off by some hundredths, which is of no consequence for a key that weighs little and is sure to be wanted. So, where an
 * estimate is made, whose weights are no better, candidates are scored again only if they are this near to the best one and have a share of all weight that matters,
 * or so near to the last of top_k that the error could decide. Which side of the best score less beta a key is on decides nothing that matters. */
static const float near_best = 4;

/* What an error of one key's weight may matter: a share of all weight less than this does not. */
static const float small_share = 1.f / 256;

/* Rms errors of a score that "near to the edge" means. */
static const float edge_errors = 3;

/* All weights that are left out because they are tiny come to less than this share of the largest one. */
static const float negligible = 1e-4f;

/* ---- parts ------------------------------------------------------------------------------------------------------ */

/* Cluster of a slot. Every other block has the end of one cluster: the first step is no branch. */
static uint32_t cluster_of(const idx_index *ix, uint32_t slot)
{
    uint32_t c = ix->code.at[slot / IDX_BLOCK];
    c += ix->code.first[c + 1] <= slot;
    while (ix->code.first[c + 1] <= slot)
        c++;
    return c;
}

static uint32_t run_of_cluster(const idx_index *ix, uint32_t c)
{
    return idx_codes_run_of(ix->header->n, ix->code.first[c]);
}

void idx_codes_part(const idx_index *ix, uint32_t lo, uint32_t hi, uint32_t part, uint32_t parts, uint32_t *ret_first, uint32_t *ret_end)
{
    uint32_t n = ix->header->n, from, to, skip, edge[2];
    idx_codes_run_rows(n, idx_codes_run_of(n, lo), &from, &skip);
    idx_codes_run_rows(n, idx_codes_run_of(n, hi - 1), &skip, &to);
    for (uint32_t i = 0; i < 2; i++) {
        uint32_t slot = from + (uint32_t)((uint64_t)(to - from) * (part + i) / parts);
        edge[i] = slot == to ? cluster_of(ix, to - 1) + 1 : cluster_of(ix, slot);
    }
    *ret_first = edge[0];
    *ret_end = edge[1];
}

void idx_codes_members(const idx_index *ix, uint32_t *ret)
{
    for (uint32_t run = 0, lo, hi; run < ix->code.n_runs; run++) {
        idx_codes_run_rows(ix->header->n, run, &lo, &hi);
        for (uint32_t c = ix->code.run[run]; c < ix->code.run[run + 1]; c++)
            for (uint32_t slot = ix->code.first[c]; slot < ix->code.first[c + 1]; slot++)
                ret[lo + ix->code.ids[slot]] = c;
    }
}

/* ---- scan ------------------------------------------------------------------------------------------------------- */

/* Queries are rounded up or down, by turns and at each dimension's own turn, so that the mean of all roundings is as near as that many times finer units would be. */
void idx_code_queries(const idx_index *ix, const idx_query *q, idx_scratch *s)
{
    const idx_kernels *k = idx_kernels_get();
    uint32_t dim_pad = idx_dim_pad(ix->header->dim);
    float *in_units = s->rows;
    for (uint32_t h = 0; h < q->group; h++) {
        const float *v = s->q + (size_t)h * dim_pad;
        float most = 0, size = 0, offset = 0, norm = 0;
        for (uint32_t j = 0; j < dim_pad; j++) {
            float x = in_units[j] = v[j] * ix->code.unit[j];
            most = fabsf(x) > most ? fabsf(x) : most;
            size += fabsf(x);
            norm += x * x;
            offset += v[j] * ix->code.mean[j];
        }
        float unit = most / 126, inverse = unit > 0 ? 1 / unit : 0;
        if (!(size < INFINITY) || !(inverse < INFINITY))
            unit = inverse = 0; /* an infinite or NaN query has a NaN or infinite offset */
        /* in their units queries are of the keys' kind, but their squared errors are twice as large, since they are not rounded to the nearest (and nothing to those of four bits) */
        bool narrow = ix->header->narrow;
        float error = ix->header->noise * sqrtf(narrow ? norm : 3 * norm);
        for (uint32_t r = 0; r < IDX_ROUNDINGS; r++) {
            size_t at = (size_t)r * q->group + h;
            int8_t *x = s->code_q + at * dim_pad;
            float up[IDX_ROUNDINGS];
            for (uint32_t i = 0; i < IDX_ROUNDINGS; i++)
                up[i] = ((float)((r + i) % IDX_ROUNDINGS) + .5f) / IDX_ROUNDINGS;
            int32_t sum = 0;
            if (inverse > 0)
                sum = k->round(in_units, inverse, up, dim_pad, x);
            else
                memset(x, 0, dim_pad);
            s->code_query[at] = (idx_code_query){x, (narrow ? -15 : -128) * sum, unit * q->scale, offset * q->scale, edge_errors * error * fabsf(q->scale)};
        }
    }
}

const float *idx_visible_scales(const idx_scan_state *c, uint32_t at, uint32_t n, uint32_t from, uint32_t to, uint32_t run_lo, bool cut)
{
    const float *scale = c->ix->code.scale + at;
    const uint16_t *ids = c->ix->code.ids + at;
    float *own = c->s->scales;
    if (!cut && at >= from && at + n <= to)
        return scale;
    if (cut)
        c->k->visible(scale, ids, n, run_lo - c->q->lo, c->q->hi - c->q->lo, own);
    else
        memcpy(own, scale, n * sizeof *own);
    for (uint32_t i = 0; at + i < from; i++)
        own[i] = NAN;
    for (uint32_t i = at + n > to ? to - at : n; i < n; i++)
        own[i] = NAN;
    return own;
}

/* Asks for part `part` of `parts` of the codes that come one and a half tiles after `codes`. The kernel asks for what is nearer; but while scores are looked at, which takes longer than
 * computing them, memory would be idle. */
static inline void ask_codes(const idx_scan_state *c, const uint8_t *codes, uint32_t part, uint32_t parts)
{
    size_t tile = IDX_TILE / IDX_BLOCK * c->ix->code.block_bytes, lines = tile / IDX_ALIGN;
    codes += tile + tile / 2;
    for (size_t i = lines * part / parts, end = lines * (part + 1) / parts; i < end; i++)
        __builtin_prefetch(codes + i * IDX_ALIGN, 0, 2);
}

/* Adds the weights of a tile, slots [at, at + n), whose largest scores are `best`, to their clusters' sums; `cluster` holds the first slot of [from, ..) in it. */
static void add_weights(const idx_scan_state *c, uint32_t at, uint32_t n, uint32_t from, uint32_t cluster, const float *best, const uint8_t *codes)
{
    idx_scratch *s = c->s;
    uint32_t heads = 0;
    for (uint32_t h = 0; h < c->q->group; h++) {
        ask_codes(c, codes, c->q->group + h, 2 * c->q->group);
        float *w = c->weights + h * c->ld;
        if (best[h] > c->m[h]) {
            float f = expf(c->m[h] - best[h]);
            for (uint32_t i = 0; i <= cluster - c->first; i++)
                w[i] *= f;
            c->m[h] = best[h];
        }
        if (!(best[h] > c->m[h] - c->cut))
            continue;
        c->k->weigh(s->scores + (size_t)h * IDX_TILE, n, c->m[h], s->weigh + (size_t)heads * IDX_TILE);
        s->weigh_to[heads++] = w + (cluster - c->first);
    }
    c->k->sums(s->weigh, heads, at < from ? from - at : 0, n, c->ix->code.first + cluster + 1, at, s->weigh_to);
}

static void scan_run(const idx_scan_state *c, uint32_t run)
{
    const idx_index *ix = c->ix;
    idx_scratch *s = c->s;
    uint32_t lo, hi, from = ix->code.first[c->first], to = ix->code.first[c->end];
    idx_codes_run_rows(ix->header->n, run, &lo, &hi);
    from = from > lo ? from : lo;
    to = to < hi ? to : hi;
    if (from >= to || hi <= c->q->lo || lo >= c->q->hi)
        return;
    bool cut = lo < c->q->lo || hi > c->q->hi;
    s->visited += to - from;
    for (uint32_t at = from & ~(IDX_BLOCK - 1u); at < to; at += IDX_TILE) {
        uint32_t n = to - at < IDX_TILE ? (to - at + IDX_BLOCK - 1) & ~(IDX_BLOCK - 1u) : IDX_TILE;
        uint32_t cluster = cluster_of(ix, at < from ? from : at), stop = at + n < to ? n : to - at;
        idx_ask_rows(ix, at + IDX_TILE, IDX_TILE); /* ahead: a cut run looks at them first */
        const float *scales = idx_visible_scales(c, at, n, from, to, lo, cut);
        const uint8_t *codes = ix->code.codes + at / IDX_BLOCK * ix->code.block_bytes;
        const idx_code_query *query = s->code_query + (size_t)(at / IDX_TILE % IDX_ROUNDINGS) * c->q->group;
        if (ix->header->narrow)
            c->k->narrow(codes, scales, n / IDX_BLOCK, (ix->header->dim + 7) / 8, query, c->q->group, s->scores, IDX_TILE, s->tile_best);
        else
            c->k->codes(codes, scales, n / IDX_BLOCK, ix->code.quads, query, c->q->group, s->scores, IDX_TILE, s->tile_best);
        for (uint32_t h = 0; h < c->q->group; h++) {
            ask_codes(c, codes, h, 2 * c->q->group);
            if (s->tops[h].keep)
                idx_top_add_known(c->k, &s->tops[h], at, s->scores + (size_t)h * IDX_TILE, n, s->tile_best[h], s->tmp);
        }
        if (c->weights)
            add_weights(c, at, stop, from, cluster, s->tile_best, codes);
    }
}

/* Row of a slot; *lo, *hi: the run's rows of the last call, or 0. */
static uint32_t row_of(const idx_index *ix, uint32_t slot, uint32_t *lo, uint32_t *hi)
{
    if (slot < *lo || slot >= *hi)
        idx_codes_run_rows(ix->header->n, idx_codes_run_of(ix->header->n, slot), lo, hi);
    return *lo + ix->code.ids[slot];
}

/* Drops the hits below `least`, and all but the first `quota` of those at it. */
static void compact(idx_hits *x, float least, uint32_t quota)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < x->n; i++) {
        bool equal = x->scores[i] == least;
        if (!(x->scores[i] >= least) || (equal && !quota))
            continue;
        quota -= equal;
        x->ids[kept] = x->ids[i];
        x->scores[kept] = x->scores[i];
        x->scanned[kept++] = x->scanned[i];
    }
    x->n = kept;
}

/* Scores the candidates of head h (slots) again, from the keys, but for those whose scores lie between sure_lo and sure_hi. Keys are anywhere in memory, so all
 * of them are asked for before the first one is needed. */
static void score_again(const idx_scan_state *c, const idx_rows *keys, uint32_t h, idx_hits *x, float sure_lo, float sure_hi)
{
    uint32_t dim_pad = idx_dim_pad(keys->dim), lo = 0, hi = 0, n = 0, *at = (uint32_t *)(void *)c->s->tmp, *rows = at + idx_top_cap(c->s->max_keep);
    size_t bytes = idx_row_bytes(keys);
    float scores[IDX_BLOCK];
    for (uint32_t i = 0; i < x->n; i++) {
        if (x->scanned[i] > sure_lo && x->scanned[i] < sure_hi)
            continue;
        at[n] = i;
        rows[n] = row_of(c->ix, x->ids[i], &lo, &hi);
        for (size_t b = 0; b < bytes; b += 64)
            __builtin_prefetch(idx_row(keys, rows[n]) + b);
        n++;
    }
    for (uint32_t i = 0; i < n; i += IDX_BLOCK) {
        uint32_t part = n - i < IDX_BLOCK ? n - i : IDX_BLOCK;
        c->k->widen(c->s->rows, keys, rows + i, 0, part);
        c->k->dots(c->s->rows, c->s->q + (size_t)h * dim_pad, 1, dim_pad, c->q->scale, scores, IDX_BLOCK);
        for (uint32_t r = 0; r < part; r++)
            x->scores[at[i + r]] = scores[r];
    }
}

/* Score of a key that has small_share of the weight of all, as far as it is known here: what the scan saw, and the best one found elsewhere. */
static float share_score(const idx_scan_state *c, uint32_t h, float floor)
{
    const float *w = c->weights + h * c->ld;
    uint32_t n = c->end - c->first;
    float total = expf(floor - c->m[h]), lane[8] = {0};
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (uint32_t l = 0; l < 8; l++)
            lane[l] += w[i + l];
    for (; i < n; i++)
        total += w[i];
    for (uint32_t l = 0; l < 8; l++)
        total += lane[l];
    return c->m[h] + logf(total * small_share);
}

/* Turns the candidates of head h into hits: what the budget asks for. */
static void rerank(const idx_scan_state *c, const idx_rows *keys, uint32_t h, uint32_t top_k, float beta)
{
    const idx_index *ix = c->ix;
    idx_scratch *s = c->s;
    idx_top *t = &s->tops[h];
    uint32_t lo = 0, hi = 0;
    float floor = beta < INFINITY && c->q->floor ? c->q->floor[h] : -INFINITY, sure_lo = INFINITY, sure_hi = -INFINITY;
    idx_hits x = {t->ids, t->scores, t->n, s->clusters + (t->ids - s->top_ids), s->scanned + (t->ids - s->top_ids)};
    bool all = beta == INFINITY && top_k == c->q->hi - c->q->lo; /* asks for exact attention */
    if (c->weights && x.n && !all) {
        float best = c->k->max(x.scores, x.n, floor), share = idx_is_lists(ix) ? -INFINITY : share_score(c, h, floor), edge = best - beta;
        sure_hi = best - near_best > share ? best - near_best : share;
        sure_lo = -INFINITY;
        if (x.n > top_k) {
            float kth = idx_kth(c->k, x.scores, x.n, top_k, s->tmp), margin = s->code_query[h].margin;
            sure_lo = kth + margin;
            edge = kth - margin > edge ? kth - margin : edge;
        }
        x.n = c->k->filter(x.ids, 0, x.scores, x.n, edge, x.ids, x.scores);
    }
    if (!c->weights && ix->header->narrow && x.n > top_k) {
        float kth = idx_kth(c->k, x.scores, x.n, top_k, s->tmp);
        x.n = c->k->filter(x.ids, 0, x.scores, x.n, kth - s->code_query[h].margin, x.ids, x.scores);
    }
    memcpy(x.scanned, x.scores, x.n * sizeof *x.scores);
    score_again(c, keys, h, &x, sure_lo, sure_hi);
    float best = c->k->max(x.scores, x.n, floor);
    compact(&x, beta < INFINITY ? best - beta : -INFINITY, UINT32_MAX);
    if (x.n > top_k) {
        float least = idx_kth(c->k, x.scores, x.n, top_k, s->tmp);
        uint32_t quota = top_k;
        for (uint32_t i = 0; i < x.n; i++)
            quota -= x.scores[i] > least;
        compact(&x, least, quota);
    }
    for (uint32_t i = 0; i < x.n; i++) {
        x.clusters[i] = cluster_of(ix, x.ids[i]);
        x.ids[i] = row_of(ix, x.ids[i], &lo, &hi);
    }
    s->hits[h] = x;
}

int idx_codes_scan(const idx_index *ix, const idx_rows *keys, const idx_query *q, uint32_t first, uint32_t end, idx_scratch *s,
                   float *weights, size_t ld, float *ret_m, idx_hits **ret_hits)
{
    if (!ix || ix->header->kind == IDX_GRAPH || ix->header->n != keys->n || ix->header->dim != keys->dim || !q->group ||
        q->group > s->max_group || keys->dim > s->max_dim || q->lo > q->hi || q->hi > keys->n || first > end ||
        end > ix->header->n_clusters)
        return -EINVAL;
    uint32_t span = q->hi - q->lo, top_k = q->budget.top_k < span ? q->budget.top_k : span;
    if (top_k > s->max_k)
        return -EINVAL;
    float beta = q->budget.beta > 0 ? q->budget.beta : INFINITY;
    idx_scan_state c = {idx_kernels_get(), ix, q, s, first, end, weights, ld, ret_m, logf((float)ix->header->n / negligible)};
    idx_pad_queries(s->q, q->q, q->group, keys->dim);
    idx_code_queries(ix, q, s);
    for (uint32_t h = 0; h < q->group; h++) {
        float floor = q->floor && q->floor[h] == q->floor[h] ? q->floor[h] : -INFINITY;
        idx_top_reset(&s->tops[h], top_k ? top_k + (ix->header->narrow ? IDX_NARROW_SPARE : IDX_CODE_SPARE) : 0, weights ? beta : beta + s->code_query[h].margin,
                      beta < INFINITY ? floor : -INFINITY);
        s->tops[h].thr = -FLT_MAX; /* of an infinite query no row is a hit */
        ret_m[h] = floor;
        if (weights)
            memset(weights + h * ld, 0, (end - first) * sizeof *weights);
    }
    s->visited = 0;
    if (first < end && idx_is_lists(ix))
        idx_lists_scan(&c, top_k, beta);
    else if (first < end)
        for (uint32_t run = run_of_cluster(ix, first), last = run_of_cluster(ix, end - 1); run <= last; run++)
            scan_run(&c, run);
    for (uint32_t h = 0; h < q->group; h++) {
        idx_top_finish(c.k, &s->tops[h], s->tmp);
        rerank(&c, keys, h, top_k, beta);
    }
    *ret_hits = s->hits;
    return 0;
}

/* ---- estimate --------------------------------------------------------------------------------------------------- */

int idx_codes_cut(const idx_index *ix, const idx_rows *values, idx_cut *cut)
{
    if (!ix || ix->header->kind == IDX_GRAPH || values->n != ix->header->n || values->dim != ix->header->dim || cut->run >= ix->code.n_runs)
        return -EINVAL;
    const idx_kernels *k = idx_kernels_get();
    uint32_t dim_pad = idx_dim_pad(values->dim), run_lo, run_hi, at = ix->code.run[cut->run], n = ix->code.run[cut->run + 1] - at;
    idx_codes_run_rows(ix->header->n, cut->run, &run_lo, &run_hi);
    memset(cut->sums, 0, (size_t)n * dim_pad * sizeof *cut->sums);
    for (uint32_t c = 0; c < n; c++) {
        float *to = cut->sums + (size_t)c * dim_pad;
        uint32_t count = 0;
        for (uint32_t slot = ix->code.first[at + c]; slot < ix->code.first[at + c + 1]; slot++) {
            uint32_t row = run_lo + ix->code.ids[slot];
            if (row < cut->lo || row >= cut->hi)
                continue;
            float v[IDX_MAX_DIM] __attribute__((aligned(64)));
            k->widen(v, values, NULL, row, 1);
            bool usable = idx_usable(v, dim_pad);
            for (uint32_t j = 0; j < dim_pad && usable; j++)
                to[j] += v[j];
            count++;
        }
        cut->counts[c] = count;
    }
    return 0;
}

const idx_cut *idx_find_cut(const idx_cut *cuts, uint32_t n_cuts, uint32_t run)
{
    for (uint32_t i = 0; i < n_cuts; i++)
        if (cuts[i].run == run)
            return &cuts[i];
    return NULL;
}

uint32_t idx_codes_sums(const idx_index *ix, const idx_cut *cuts, uint32_t n_cuts, uint32_t first, uint32_t end, const float **ret_sums)
{
    uint32_t run = run_of_cluster(ix, first), next = ix->code.run[run + 1];
    size_t dim_pad = idx_dim_pad(ix->header->dim);
    const idx_cut *cut = idx_find_cut(cuts, n_cuts, run);
    *ret_sums = cut ? cut->sums + (first - ix->code.run[run]) * dim_pad : ix->code.sums + first * dim_pad;
    return next < end ? next : end;
}

/* Turns a cluster's weight into its coef, for the rows that are not taken; returns what is left of the weight. */
static inline float spread(float *weight, uint32_t rows, uint32_t taken, float factor)
{
    int32_t left = (int32_t)(rows - taken);
    float w = *weight * factor;
    w = left > 0 && w > 0 ? w : 0;
    *weight = w / (float)(left > 0 ? left : 1);
    return w;
}

/* The same of n clusters with rows[i] (of: NULL) or of[i + 1] - of[i] rows. By lanes, which the compiler makes vectors of. */
static float spread_all(float *weights, const uint32_t *rows, const uint32_t *of, const uint32_t *taken, uint32_t n, float factor)
{
    enum { LANES = 8 };
    float lane[LANES] = {0}, l = 0;
    uint32_t i = 0;
    for (; !of && i + LANES <= n; i += LANES)
        for (uint32_t j = 0; j < LANES; j++)
            lane[j] += spread(weights + i + j, rows[i + j], taken[i + j], factor);
    for (; of && i + LANES <= n; i += LANES)
        for (uint32_t j = 0; j < LANES; j++)
            lane[j] += spread(weights + i + j, of[i + j + 1] - of[i + j], taken[i + j], factor);
    for (; i < n; i++)
        l += spread(weights + i, of ? of[i + 1] - of[i] : rows[i], taken[i], factor);
    for (uint32_t j = 0; j < LANES; j++)
        l += lane[j];
    return l;
}

float idx_estimate(const idx_index *ix, const idx_cut *cuts, uint32_t n_cuts, uint32_t first, uint32_t end, float m, float factor,
                   float *weights, const uint32_t *clusters, const float *scanned, uint32_t n_hits, uint32_t *taken, float *ret_hit_coef)
{
    const idx_kernels *k = idx_kernels_get();
    float l = 0;
    if (idx_is_lists(ix)) {
        l = idx_lists_estimate(ix, cuts, n_cuts, first, end, m, factor, weights, clusters, scanned, n_hits, taken);
        for (uint32_t i = 0; i < n_hits; i++)
            ret_hit_coef[i] = weights[clusters[i] - first];
        return l;
    }
    for (uint32_t i = 0; i < n_hits; i += IDX_TILE) {
        float w[IDX_TILE + 16];
        uint32_t n = n_hits - i < IDX_TILE ? n_hits - i : IDX_TILE;
        k->weigh(scanned + i, n, m, w);
        for (uint32_t j = 0; j < n; j++) {
            uint32_t c = clusters[i + j] - first;
            weights[c] -= w[j];
            taken[c]++;
        }
    }
    for (uint32_t c = first; c < end;) {
        uint32_t run = run_of_cluster(ix, c), next = ix->code.run[run + 1] < end ? ix->code.run[run + 1] : end;
        const idx_cut *cut = idx_find_cut(cuts, n_cuts, run);
        l += spread_all(weights + (c - first), cut ? cut->counts + (c - ix->code.run[run]) : NULL, cut ? NULL : ix->code.first + c, taken + (c - first), next - c, factor);
        c = next;
    }
    for (uint32_t i = 0; i < n_hits; i++)
        ret_hit_coef[i] = weights[clusters[i] - first];
    for (uint32_t i = 0; i < n_hits; i++)
        taken[clusters[i] - first] = 0;
    return l;
}
