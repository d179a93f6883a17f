/* Lists: codes in the order of clusters of keys, with a centroid for each (lists_search.c searches them).
 *
 * cluster: a centroid per 32 keys of a run of about 8,192 (RetroInfer clusters segments of 8K, too), by k-means not on the keys themselves but on keys mapped so
 * that distance is expected difference of scores (graph_space.c): directions that no query looks at don't decide. ivf: the same in the plain metric. The clusters,
 * the codes and the value sums are codes_build.c's; here are the mean keys, and the margin.
 *
 * The margin is measured: for the hits of training positions of the newer half, how many standard deviations of its cluster the 100th best score lies above the
 * centroid's. That is what a search must allow for to scan the cluster, so a quantile of it, over the best 16 and over the best 100, is what loses no more than
 * the rest. (ivf: the rank of the cluster among all, as a share.)
 *
 * Sources: cluster follows RetroInfer (arXiv 2505.02922), which clusters segments of 8K keys, reads the best 1.8 % of them and estimates another 23 % by centroids and summed values. It leaves out what
 * these shares cost in lost hits: here each head looks as far as its margin says, the metric is the queries', a cluster knows how its keys vary, and the estimate covers all keys that are left, the retrieved
 * ones taken out. ivf is the baseline of RetrievalAttention (arXiv 2409.10516), which gives neither its lists nor its probes: here a list has 32 keys, and the share is what the training queries need. */
#include "graph_build.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { POSITIONS = 48, GOOD = 100, BEST = 16, PIECE_CLUSTERS = 16, POWER_ROUNDS = 4 };

/* Shares of hits whose clusters may be missed. */
static const double miss_best = 0.0005, miss_good = 0.005;
static const float least_size = 1e-16f, most_spread = 1e15f; /* squared; no overflow on either side */
static const float drift = 1.2f; /* decode queries are farther from the keys than those of the prompt, which the margin was measured on */
static const float default_margin = 4, default_share = 0.3f, most_needed = 1000;

struct idx_lists_build {
    idx_kind kind;
    uint32_t *cluster; /* [n]: of each row */
    uint32_t n_tune, n_best, n_good;
    float *best, *good; /* [n_tune][group][BEST], [..][GOOD]: the margin each hit needs */
    float *keys, *points; /* [IDX_MAX_CLUSTER][dim_pad]: members of the cluster at hand */
    idx_scratch *scratch;
};

void idx_lists_build_free(struct idx_lists_build *l)
{
    if (!l)
        return;
    free(l->cluster);
    free(l->best);
    free(l->good);
    free(l->keys);
    free(l->points);
    idx_scratch_free(l->scratch);
    free(l);
}

/* The space's rows are there: cluster those. */
static bool use_space(idx_builder *b)
{
    idx_rows points = {b->space, (size_t)b->dim_pad * 4, b->keys.n, b->keys.dim, IDX_F32};
    idx_codes_build_points(b, &points);
    return true;
}

/* ---- centroids -------------------------------------------------------------------------------------------------- */

/* Members of cluster c less its mean, to l->keys and, in the space, to l->points; the mean itself, less that of all, to `mean`. */
static void take_members(idx_builder *b, uint32_t c, uint32_t n, float *mean)
{
    const idx_index *ix = b->result;
    struct idx_lists_build *l = b->lists;
    uint32_t lo, hi, dim_pad = b->dim_pad, from = ix->code.first[c];
    float centre[IDX_MAX_DIM] = {0};
    idx_codes_run_rows(b->keys.n, idx_codes_run_of(b->keys.n, from), &lo, &hi);
    memset(mean, 0, dim_pad * sizeof *mean);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t row = lo + ix->code.ids[from + i];
        float *key = l->keys + (size_t)i * dim_pad, *point = l->points + (size_t)i * dim_pad;
        l->cluster[row] = c;
        b->k->widen(key, &b->keys, NULL, row, 1);
        for (uint32_t j = 0; j < dim_pad; j++) {
            key[j] -= ix->code.mean[j];
            mean[j] += key[j] / (float)n;
        }
        if (l->kind == IDX_CLUSTER)
            memcpy(point, b->space + (size_t)row * dim_pad, dim_pad * sizeof *point);
        for (uint32_t j = 0; j < dim_pad && l->kind == IDX_CLUSTER; j++)
            centre[j] += point[j] / (float)n;
    }
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < dim_pad; j++) {
            l->keys[(size_t)i * dim_pad + j] -= mean[j];
            l->points[(size_t)i * dim_pad + j] -= centre[j];
        }
}

/* Power iteration for the direction in which l->points vary most, from the farthest of them; it is taken out of them. along: the combination of l->keys
 * whose dot with a query is the standard deviation of the members' scores in this direction. */
static void take_direction(idx_builder *b, uint32_t n, float *along)
{
    struct idx_lists_build *l = b->lists;
    uint32_t dim_pad = b->dim_pad, farthest = 0;
    float v[IDX_MAX_DIM], next[IDX_MAX_DIM], most = 0, variance = 0;
    memset(along, 0, dim_pad * sizeof *along);
    for (uint32_t i = 0; i < n; i++) {
        float size = idx_dot(l->points + (size_t)i * dim_pad, l->points + (size_t)i * dim_pad, dim_pad);
        if (size > most) {
            most = size;
            farthest = i;
        }
    }
    if (!(most > least_size && most < INFINITY))
        return;
    memcpy(v, l->points + (size_t)farthest * dim_pad, dim_pad * sizeof *v);
    for (int round = 0; round < POWER_ROUNDS; round++) {
        float norm = 1 / sqrtf(idx_dot(v, v, dim_pad));
        memset(next, 0, dim_pad * sizeof *next);
        for (uint32_t j = 0; j < dim_pad; j++)
            v[j] *= norm;
        for (uint32_t i = 0; i < n && round + 1 < POWER_ROUNDS; i++) {
            const float *point = l->points + (size_t)i * dim_pad;
            float p = idx_dot(point, v, dim_pad);
            for (uint32_t j = 0; j < dim_pad; j++)
                next[j] += p * point[j];
        }
        if (round + 1 < POWER_ROUNDS)
            memcpy(v, next, dim_pad * sizeof *v);
    }
    for (uint32_t i = 0; i < n; i++) {
        float *point = l->points + (size_t)i * dim_pad, p = idx_dot(point, v, dim_pad);
        variance += p * p;
        for (uint32_t j = 0; j < dim_pad; j++) {
            along[j] += p * l->keys[(size_t)i * dim_pad + j];
            point[j] -= p * v[j];
        }
    }
    float f = variance > 0 ? 1 / sqrtf(variance * (float)n) : 0;
    for (uint32_t j = 0; j < dim_pad; j++)
        along[j] *= f;
}

static float rest_of(const idx_builder *b, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)idx_dot(b->lists->points + (size_t)i * b->dim_pad, b->lists->points + (size_t)i * b->dim_pad, b->dim_pad);
    return fminf((float)sqrt(sum / n), most_spread);
}

/* at: next cluster. */
static bool emit_centroids(idx_builder *b)
{
    idx_index *ix = b->result;
    uint32_t n = ix->header->n_clusters, n_pad = (n + IDX_BLOCK - 1) & ~(IDX_BLOCK - 1u), quads = ix->code.quads;
    uint32_t end = n - (uint32_t)b->at < PIECE_CLUSTERS ? n : (uint32_t)b->at + PIECE_CLUSTERS, vectors = b->lists->kind == IDX_CLUSTER ? 1 + IDX_DIRECTIONS : 1;
    float *scale = (float *)(void *)(ix->arena + ((const uint8_t *)ix->code.cent_scale - ix->arena)), v[IDX_MAX_DIM];
    float *spread = (float *)(void *)(ix->arena + ((const uint8_t *)ix->code.spread - ix->arena));
    uint8_t *codes = ix->arena + (ix->code.cent_codes - ix->arena);
    for (uint32_t c = (uint32_t)b->at; c < end; c++) {
        uint32_t members = ix->code.first[c + 1] - ix->code.first[c];
        take_members(b, c, members, v);
        for (uint32_t i = 0; i < vectors; i++) {
            size_t slot = (size_t)i * n_pad + c;
            if (i)
                take_direction(b, members, v);
            scale[slot] = idx_codes_encode(b, v, quads, codes + slot / IDX_BLOCK * quads * 64 + slot % IDX_BLOCK * 4);
            if (!(scale[slot] < INFINITY))
                b->error = -EINVAL; /* keys so large that their sum is not a number */
        }
        spread[c] = vectors > 1 ? rest_of(b, members) : 0;
    }
    b->at = end;
    return end == n || b->error;
}

/* ---- margin ----------------------------------------------------------------------------------------------------- */

/* What a search must allow for to scan the cluster of `row` for head h, when the least score wanted is `least`. */
static float needed(const idx_builder *b, uint32_t h, uint32_t row, float least)
{
    const struct idx_lists_build *l = b->lists;
    const idx_index *ix = b->result;
    const float *score = l->scratch->list_score + (size_t)h * l->scratch->list_ld;
    uint32_t c = l->cluster[row], better = 0;
    if (l->kind == IDX_CLUSTER) {
        float lack = least - score[c] - l->scratch->code_query[h].margin, unit = l->scratch->list_dev[(size_t)h * l->scratch->list_ld + c];
        return lack <= 0 ? 0 : lack < unit * most_needed ? lack / unit : most_needed;
    }
    for (uint32_t i = 0; i < ix->header->n_clusters; i++)
        better += score[i] > score[c];
    return (float)(better + 1) / (float)ix->header->n_clusters;
}

static int by_size(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* What all but the share `miss` need. */
static float all_but(float *x, uint32_t n, double miss)
{
    qsort(x, n, sizeof *x, by_size);
    uint32_t missed = (uint32_t)(n * miss);
    return n ? x[n - 1 - missed] : 0;
}

static void set_margin(idx_builder *b)
{
    struct idx_lists_build *l = b->lists;
    float margin = l->kind == IDX_IVF ? default_share : default_margin;
    if (l->n_good)
        margin = drift * fmaxf(all_but(l->best, l->n_best, miss_best), all_but(l->good, l->n_good, miss_good));
    ((idx_header *)(void *)b->result->arena)->margin = margin;
}

/* at: next position; sub: keys searched of it. */
static bool tune(idx_builder *b)
{
    struct idx_lists_build *l = b->lists;
    uint32_t group = b->train.group, dim = b->keys.dim, n = b->keys.n;
    if (b->at == l->n_tune) {
        set_margin(b);
        return true;
    }
    size_t position = b->train.m - 1 - (size_t)b->at * (b->train.m / 2 / l->n_tune);
    idx_rows rows = {b->train.q + position * group * dim, (size_t)dim * 2, group, dim, IDX_F16};
    b->k->widen(b->q, &rows, NULL, 0, group);
    for (uint32_t h = 1; h < group; h++)
        memmove(b->q + (size_t)h * dim, b->q + (size_t)h * b->dim_pad, (size_t)dim * sizeof *b->q);
    idx_query q = {.q = b->q, .group = group, .scale = 1, .budget = {.top_k = GOOD}};
    q.hi = b->train.pos[position] >= n ? n : b->train.pos[position] + 1;
    idx_hits *hits;
    if (!idx_build_search(b, l->scratch, &q, &hits))
        return false;
    b->at++;
    idx_code_queries(b->result, &q, l->scratch);
    idx_lists_score(b->result, 0, b->result->header->n_clusters, group, 1, l->scratch);
    for (uint32_t h = 0; h < group; h++) {
        float least = INFINITY;
        for (uint32_t i = 0; i < hits[h].n; i++)
            least = fminf(least, hits[h].scores[i]);
        uint32_t best = idx_select(hits[h].ids, hits[h].scores, hits[h].n, BEST);
        for (uint32_t i = 0; i < hits[h].n; i++) {
            float need = needed(b, h, hits[h].ids[i], least);
            l->good[l->n_good++] = need;
            if (i < best)
                l->best[l->n_best++] = need;
        }
    }
    return false;
}

/* ---- builder ---------------------------------------------------------------------------------------------------- */

static int take_query_sizes(idx_builder *b)
{
    float power[IDX_MAX_DIM];
    idx_query_power(&b->train, b->keys.dim, power);
    return b->train.m ? idx_codes_build_queries(b, power) : 0;
}

static int lists_memory(idx_builder *b, idx_kind kind)
{
    struct idx_lists_build *l = b->lists = calloc(1, sizeof *b->lists);
    if (!l)
        return -ENOMEM;
    l->kind = kind;
    l->n_tune = b->train.m / 2 < POSITIONS ? b->train.m / 2 : POSITIONS;
    size_t n = (size_t)l->n_tune * b->train.group;
    l->cluster = idx_alloc(b->keys.n, sizeof *l->cluster);
    l->best = idx_alloc(n * BEST, sizeof *l->best);
    l->good = idx_alloc(n * GOOD, sizeof *l->good);
    l->keys = idx_alloc((size_t)IDX_MAX_CLUSTER * b->dim_pad, sizeof *l->keys);
    l->points = idx_alloc((size_t)IDX_MAX_CLUSTER * b->dim_pad, sizeof *l->points);
    if (!l->cluster || !l->best || !l->good || !l->keys || !l->points)
        return -ENOMEM;
    memset(l->points, 0, (size_t)IDX_MAX_CLUSTER * b->dim_pad * sizeof *l->points);
    int r = idx_build_scratch(b);
    if (!r)
        r = idx_space_new(b);
    if (!r)
        r = take_query_sizes(b);
    if (!r && l->n_tune)
        r = idx_scratch_new(b->keys.n, b->keys.dim, b->train.group, GOOD, &l->scratch);
    return r;
}

int idx_builder_new_lists(idx_kind kind, const idx_rows *keys, const idx_rows *values, const idx_queries *train, idx_builder **ret)
{
    static const idx_phase cluster[] = {{idx_space_gram, .02f},   {idx_space_mean, .02f},    {idx_space_basis, .01f}, {idx_space_rows, .15f}, {use_space, 0},
                                        {idx_codes_mean, .02f},   {idx_codes_cluster, .45f}, {idx_codes_emit, .08f},  {emit_centroids, .05f}, {tune, .2f}};
    static const idx_phase ivf[] = {{idx_space_mean, .02f}, {idx_space_basis, .01f}, {idx_space_rows, .15f},  {use_space, 0},
                                    {idx_codes_mean, .02f}, {idx_codes_cluster, .47f}, {idx_codes_emit, .08f}, {emit_centroids, .05f}, {tune, .2f}};
    idx_builder *b;
    if ((kind != IDX_CLUSTER && kind != IDX_IVF) || !idx_train_fits(train))
        return -EINVAL;
    int r = idx_codes_build_new(kind, keys, values, NULL, &b);
    if (r < 0)
        return r;
    b->train = *train;
    b->phases = kind == IDX_IVF ? ivf : cluster;
    b->n_phases = kind == IDX_IVF ? sizeof ivf / sizeof *ivf : sizeof cluster / sizeof *cluster;
    r = lists_memory(b, kind);
    if (r < 0) {
        idx_builder_free(b);
        return r;
    }
    *ret = b;
    return 0;
}
