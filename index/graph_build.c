/* The course of a graph build: phases in order, each cut into steps, so that it can stop at any deadline.
 *
 * Sources: RoarGraph (VLDB 2024, section 4): each query's exact nearest keys, projected to links between keys around its nearest one, pruned by occlusion, then a connectivity pass; a search begins at one entry
 * point. RetrievalAttention (arXiv 2409.10516, section 3.2) builds one for each query head from its own prefill queries. Neither says what becomes of a key that is nearest to many queries, of keys at the end
 * that no query could see, how many queries suit a few thousand keys, or how wide a search must be.
 * Here: one graph for the group (AlayaDB); a node is 16 successive keys; a link's weight is how often queries hit both its ends, and nothing is pruned; each node's mean key is an entry; how far a search looks is measured for each head.
 * README.md has each deviation with what it brings. */
#include "graph_build.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static bool encode(idx_builder *b);
static bool seal(idx_builder *b);

static const idx_phase phases[] = {
    {idx_codes_mean, .02f}, {encode, .1f}, {idx_knn_search, .5f}, {idx_knn_invert, .02f}, {idx_link, .16f}, {seal, 0}, {idx_tune_truth, .1f}, {idx_tune, .1f},
};
enum { N_PHASES = sizeof phases / sizeof phases[0], PIECE_NODES = 16, SEARCH_ROWS = 16 * IDX_TILE };

static const float most_spread = 1e15f; /* squares stay numbers */

idx_graph_params idx_graph_params_default(void)
{
    return (idx_graph_params){.knn = 64, .degree = 16};
}

bool idx_train_fits(const idx_queries *train)
{
    return !train->m || (train->group && train->group <= IDX_MAX_GROUP && train->m <= IDX_MAX_ROWS / train->group);
}

static bool params_fit(const idx_graph_params *p)
{
    return p->knn && p->knn <= IDX_MAX_KNN && p->degree && p->degree <= IDX_MAX_DEGREE;
}

int idx_build_scratch(idx_builder *b)
{
    size_t heads = b->train.m ? b->train.group : 1, cap = idx_top_cap(IDX_MAX_KNN);
    b->q = idx_alloc(heads * b->dim_pad, 4);
    b->rows = idx_alloc((size_t)IDX_BLOCK * b->dim_pad, 4);
    b->scores = idx_alloc(heads * IDX_TILE, 4);
    b->tmp = idx_alloc(2 * cap, 4);
    if (!b->q || !b->rows || !b->scores || !b->tmp)
        return -ENOMEM;
    memset(b->rows, 0, (size_t)IDX_BLOCK * b->dim_pad * 4);
    return 0;
}

bool idx_build_search(idx_builder *b, idx_scratch *s, const idx_query *q, idx_hits **ret)
{
    uint32_t span = q->hi - q->lo, keep = q->budget.top_k < span ? q->budget.top_k : span, left = span - b->sub, rows = left < SEARCH_ROWS ? left : SEARCH_ROWS;
    if (!b->sub) {
        idx_pad_queries(s->q, q->q, q->group, b->keys.dim);
        for (uint32_t h = 0; h < q->group; h++)
            idx_top_reset(&s->tops[h], keep, INFINITY, -INFINITY);
    }
    uint32_t from = q->lo + b->sub;
    idx_scan(b->k, &b->keys, s->q, q->group, q->scale, from, from + rows, s->tops, s->rows, s->scores, s->tmp);
    b->sub += rows;
    if (rows < left)
        return false;
    b->sub = 0;
    for (uint32_t h = 0; h < q->group; h++) {
        idx_top_finish(b->k, &s->tops[h], s->tmp);
        s->hits[h] = (idx_hits){.ids = s->tops[h].ids, .scores = s->tops[h].scores, .n = s->tops[h].n};
    }
    *ret = s->hits;
    return true;
}

static int graph_memory(idx_builder *b)
{
    float power[IDX_MAX_DIM];
    idx_query_power(&b->train, b->keys.dim, power);
    int r = b->train.m ? idx_codes_build_queries(b, power) : 0;
    if (!r)
        r = idx_build_scratch(b);
    if (!r)
        r = idx_link_new(b);
    if (!r)
        r = idx_tune_new(b);
    return r ? r : idx_knn_new(b);
}

int idx_builder_new(const idx_rows *keys, const idx_queries *train, const idx_graph_params *params, idx_builder **ret)
{
    idx_builder *b;
    if (!params_fit(params) || !idx_train_fits(train))
        return -EINVAL;
    int r = idx_codes_build_new(IDX_GRAPH, keys, NULL, NULL, &b);
    if (r < 0)
        return r;
    b->train = *train;
    b->params = *params;
    b->phases = phases;
    b->n_phases = N_PHASES;
    b->n_queries = train->m ? train->m * train->group : 0;
    r = graph_memory(b);
    if (r < 0) {
        idx_builder_free(b);
        return r;
    }
    *ret = b;
    return 0;
}

void idx_builder_free(idx_builder *b)
{
    if (!b)
        return;
    void *parts[] = {b->gram,  b->mean, b->basis,     b->space,     b->hits.ids, b->hits.count, b->queries.first, b->queries.ids,
                     b->count, b->met,  b->met_count, b->tune_hits, b->tune, b->q,    b->rows,     b->scores,     b->tmp};
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        free(parts[i]);
    idx_codes_build_free(b->codes);
    idx_lists_build_free(b->lists);
    idx_free(b->result);
    idx_scratch_free(b->scratch);
    free(b);
}

/* With room for all the links there may be, which come last. */
static int arena_new(idx_builder *b)
{
    uint32_t n = b->keys.n, dim = b->keys.dim;
    size_t at[IDX_GRAPH_PARTS], bytes = idx_graph_max_bytes(n, dim, b->n_tune ? b->train.group : 0, b->params.degree);
    uint8_t *arena = bytes ? idx_alloc(bytes, 1) : NULL;
    idx_index *ix = calloc(1, sizeof *ix);
    if (!arena || !ix) {
        free(arena);
        free(ix);
        return -ENOMEM;
    }
    idx_graph_layout(n, dim, b->n_tune ? b->train.group : 0, 0, at);
    memset(arena, 0, at[5]); /* scales and codes come next, whole blocks; links when all is known */
    idx_header h = {.magic = IDX_MAGIC, .version = IDX_VERSION, .kind = IDX_GRAPH, .n = n, .dim = dim, .max_degree = b->params.degree, .n_margins = b->n_tune ? b->train.group : 0, .bytes = bytes};
    memcpy(arena, &h, sizeof h);
    idx_index_bind(ix, arena, bytes);
    memcpy(arena + at[0], idx_codes_mean_of(b), (size_t)b->dim_pad * 4);
    memcpy(arena + at[0] + (size_t)b->dim_pad * 4, idx_codes_unit_of(b), (size_t)b->dim_pad * 4);
    b->result = ix;
    return 0;
}

static uint8_t *writable(idx_builder *b, const void *part)
{
    return b->result->arena + ((const uint8_t *)part - b->result->arena);
}

/* A node's mean key, as a code, and how far its keys lie from it: root mean square over keys and dimensions. keys: n of them, less the mean of all, those that aren't finite left out. */
static void encode_mean(idx_builder *b, uint32_t node, const float *keys, uint32_t n)
{
    const idx_index *ix = b->result;
    float v[IDX_MAX_DIM] __attribute__((aligned(64))) = {0}, *scale = (float *)(void *)writable(b, ix->code.cent_scale) + node, *spread = (float *)(void *)writable(b, ix->code.spread) + node;
    double squares = 0;
    if (!n)
        return;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < b->keys.dim; j++)
            v[j] += keys[(size_t)i * b->dim_pad + j] / (float)n;
    for (uint32_t i = 0; i < n; i++) {
        float sum = 0;
        for (uint32_t j = 0; j < b->keys.dim; j++) {
            float x = keys[(size_t)i * b->dim_pad + j] - v[j];
            sum += x * x;
        }
        squares += (double)sum;
    }
    *spread = fminf((float)sqrt(squares / n / b->keys.dim), most_spread);
    *scale = idx_codes_encode(b, v, ix->code.quads, writable(b, ix->code.cent_codes) + node / IDX_BLOCK * ix->code.block_bytes + node % IDX_BLOCK * 4);
    if (!(*scale < INFINITY)) { /* too large for a mean: such a node is always read */
        *scale = 0;
        *spread = most_spread;
    }
}

/* at: next node. */
static bool encode(idx_builder *b)
{
    if (!b->at)
        b->error = arena_new(b);
    if (b->error)
        return true;
    idx_index *ix = b->result;
    uint32_t nodes = ix->code.n_blocks, end = nodes - (uint32_t)b->at < PIECE_NODES ? nodes : (uint32_t)b->at + PIECE_NODES;
    for (uint32_t node = (uint32_t)b->at; node < end; node++) {
        uint32_t row = node * IDX_BLOCK, n = b->keys.n - row < IDX_BLOCK ? b->keys.n - row : IDX_BLOCK, finite = 0;
        float *scales = (float *)(void *)writable(b, ix->code.scale) + row, own[IDX_MAX_DIM];
        uint8_t *codes = writable(b, ix->code.codes) + (size_t)node * ix->code.block_bytes;
        memset(codes, 128, ix->code.block_bytes);
        if (node % IDX_BLOCK == 0)
            memset(writable(b, ix->code.cent_codes) + node / IDX_BLOCK * ix->code.block_bytes, 128, ix->code.block_bytes);
        b->k->widen(b->rows, &b->keys, NULL, row, n);
        for (uint32_t i = 0; i < IDX_BLOCK; i++) {
            float *v = b->rows + (size_t)i * b->dim_pad;
            scales[i] = NAN;
            for (uint32_t j = 0; j < b->dim_pad && i < n; j++)
                own[j] = v[j] -= idx_codes_mean_of(b)[j];
            if (i < n)
                scales[i] = idx_codes_encode(b, own, ix->code.quads, codes + i * 4);
            if (!(scales[i] < INFINITY))
                continue;
            b->noise += (double)scales[i] * (double)scales[i] / 12; /* rounding is uniform in +-1/2 */
            memmove(b->rows + (size_t)finite++ * b->dim_pad, v, (size_t)b->dim_pad * sizeof *v);
        }
        encode_mean(b, node, b->rows, finite);
    }
    b->at = end;
    if (end < nodes)
        return false;
    ((idx_header *)(void *)ix->arena)->noise = (float)sqrt(b->noise / b->keys.n);
    return true;
}

/* The links are there: the arena ends with the last. */
static bool seal(idx_builder *b)
{
    size_t at[IDX_GRAPH_PARTS];
    idx_index *ix = b->result;
    idx_header *h = (idx_header *)(void *)ix->arena;
    h->n_links = ix->first[ix->code.n_blocks];
    h->bytes = ix->bytes = idx_graph_layout(h->n, h->dim, h->n_margins, h->n_links, at);
    size_t end = at[8] + (size_t)h->n_links * sizeof *ix->links;
    memset(ix->arena + end, 0, ix->bytes - end);
    return true;
}

static bool past(uint64_t deadline_ns)
{
    struct timespec t;
    if (!deadline_ns)
        return false;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec >= deadline_ns;
}

void idx_builder_rows(idx_builder *b, uint32_t rows)
{
    b->there = rows < b->keys.n ? rows : b->keys.n;
}

uint32_t idx_builder_needs(const idx_builder *b)
{
    bool clusters = b->phase < b->n_phases && b->phases[b->phase].step == idx_codes_cluster;
    return clusters ? idx_codes_needs(b) : b->keys.n;
}

int idx_builder_step(idx_builder *b, uint64_t deadline_ns)
{
    while (b->phase < b->n_phases && !b->error) {
        if (b->there < idx_builder_needs(b)) {
            idx_codes_rest(b);
            return 2;
        }
        if (b->phases[b->phase].step(b)) {
            b->phase++;
            b->at = 0;
            b->sub = 0;
        }
        if (b->phase < b->n_phases && past(deadline_ns))
            return b->error ? b->error : 1;
    }
    return b->error;
}

/* What `at` comes to in the phase at hand. */
static uint64_t total_of(const idx_builder *b)
{
    bool (*step)(idx_builder *) = b->phases[b->phase].step;
    if (step == encode || step == idx_link)
        return (b->keys.n + IDX_BLOCK - 1) / IDX_BLOCK;
    if (step == idx_tune || step == idx_tune_truth)
        return (step == idx_tune ? (uint64_t)IDX_TUNE_TRIALS : 1) * b->n_tune;
    return step == idx_knn_search ? b->train.m : step == idx_knn_invert ? b->n_queries : b->keys.n;
}

float idx_builder_progress(const idx_builder *b)
{
    float done = 0;
    for (int i = 0; i < b->phase; i++)
        done += b->phases[i].share;
    if (b->phase < b->n_phases) {
        uint64_t total = total_of(b);
        float part = total ? (float)b->at / (float)total : 0;
        done += b->phases[b->phase].share * (part < 1 ? part : 1);
    }
    return done < 1 ? done : 1;
}

int idx_builder_finish(idx_builder *b, idx_index **ret)
{
    if (b->error || b->phase < b->n_phases)
        return b->error ? b->error : -EINVAL;
    *ret = b->result;
    b->result = NULL;
    return 0;
}
