/* One walk for the whole query group, in rounds.
 *
 * A node is 16 successive keys, so every node's mean key can be looked at: a sixteenth of a scan. How high a key of a node may score for a head is guessed from the mean key's score, how far the node's
 * keys lie from it, a margin (graph_tune.c) and votes: each node that turns out to hold a key a head wants votes for the nodes it is linked to, with the share of training queries that had hits in both
 * when they had one in it (graph_link.c). A round reads, in the order of memory, all nodes whose bound reaches the threshold of some head, for just those heads; what they hold raises thresholds and casts
 * votes; until a round finds nothing more to read. Heads decide one by one, but their votes are pooled, and a node comes once from memory for all that want it.
 *
 * Scores are those of codes, as in a scan; what may be a hit is scored again from the keys. */
#include "private.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum {
    LEAST_WANTED = 100, /* the margin holds for this many keys and more; fewer are searched for as if they were as many */
    FEW = 8,            /* nodes looked at together */
    AHEAD = 8,          /* nodes asked for before they are scored */
};

typedef struct {
    const idx_kernels *k;
    const idx_index *ix;
    const idx_query *q;
    idx_scratch *s;
    uint32_t head0, n_heads; /* at work on these */
    uint32_t first, end;     /* nodes that meet [lo, hi) */
    uint32_t wanted;
    float beta, size[IDX_HEADS], margin[IDX_HEADS], least[IDX_HEADS]; /* a query's length; how far it looks; a node that can't reach this isn't read for the head */
} walk;

static void ask(const walk *w, uint32_t node)
{
    const uint8_t *codes = w->ix->code.codes + (size_t)node * w->ix->code.block_bytes;
    __builtin_prefetch(w->ix->code.scale + node * IDX_BLOCK);
    for (size_t i = 0; i < w->ix->code.block_bytes; i += 64)
        __builtin_prefetch(codes + i);
}

/* Scores a node for some heads; best: [n_heads], -INFINITY for the others. */
static void read_node(walk *w, uint32_t node, uint32_t bits, float *best)
{
    idx_scratch *s = w->s;
    uint32_t row = node * IDX_BLOCK, lo = w->q->lo, hi = w->q->hi;
    const float *scale = w->ix->code.scale + row;
    if (row < lo || row + IDX_BLOCK > hi) { /* rows outside have no score */
        for (uint32_t i = 0; i < IDX_BLOCK; i++)
            s->scales[i] = row + i >= lo && row + i < hi ? scale[i] : NAN;
        scale = s->scales;
    }
    for (uint32_t h = 0; h < w->n_heads; h++)
        best[h] = -INFINITY;
    const idx_code_query *query = s->code_query + (size_t)(node % IDX_ROUNDINGS) * w->q->group + w->head0;
    w->k->node(w->ix->code.codes + (size_t)node * w->ix->code.block_bytes, scale, w->ix->code.quads, query, bits, s->scores, best);
    bool voter = false;
    for (; bits; bits &= bits - 1) {
        uint32_t h = (uint32_t)__builtin_ctz(bits);
        idx_top *t = &s->tops[w->head0 + h];
        if (best[h] >= t->thr)
            idx_top_add_known(w->k, t, row, s->scores + h * IDX_BLOCK, IDX_BLOCK, best[h], s->tmp);
        voter |= best[h] >= w->least[h];
    }
    if (voter)
        for (uint32_t l = w->ix->first[node]; l < w->ix->first[node + 1]; l += IDX_ALIGN / sizeof *w->ix->links)
            __builtin_prefetch(w->ix->links + l);
}

/* The score that a key must reach to be wanted by the head, and what lies so far below that not even its rounding could lift it is forgotten. */
static void set_least(walk *w, uint32_t h)
{
    idx_top *t = &w->s->tops[w->head0 + h];
    float least = t->best - w->beta, margin = w->s->code_query[w->head0 + h].margin;
    if (t->n >= w->wanted)
        least = fmaxf(least, idx_kth(w->k, t->scores, t->n, w->wanted, w->s->tmp));
    w->least[h] = least;
    if (least - margin > t->thr) {
        t->thr = least - margin;
        t->n = w->k->filter(t->ids, 0, t->scores, t->n, t->thr, t->ids, t->scores);
    }
}

/* Reads what is wanted and has not been read. Returns the number of nodes. */
static uint32_t read_wanted(walk *w)
{
    idx_scratch *s = w->s;
    uint32_t n = 0;
    for (uint32_t i = w->first, stop; i < w->end; i = stop) { /* most are not */
        uint32_t some = 0;
        stop = i + FEW < w->end ? i + FEW : w->end;
        for (uint32_t j = i; j < stop; j++)
            some |= s->node_want[j] & ~s->node_done[j];
        for (uint32_t j = i; j < stop && some; j++) {
            s->node_list[n] = j;
            n += (s->node_want[j] & ~s->node_done[j]) != 0;
        }
    }
    for (uint32_t i = 0; i < n && i < AHEAD; i++)
        ask(w, s->node_list[i]);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t node = s->node_list[i], bits = s->node_want[node] & ~s->node_done[node];
        if (i + AHEAD < n)
            ask(w, s->node_list[i + AHEAD]);
        if (!s->node_done[node]) {
            uint32_t row = node * IDX_BLOCK, from = row > w->q->lo ? row : w->q->lo, to = row + IDX_BLOCK < w->q->hi ? row + IDX_BLOCK : w->q->hi;
            s->visited += to - from;
        }
        s->node_done[node] |= bits;
        read_node(w, node, bits, s->node_best + (size_t)i * w->n_heads);
    }
    return n;
}

/* Each of the n nodes just read votes for those it is linked to, once for each head that wants a key of it. */
static void vote(walk *w, uint32_t n)
{
    const idx_index *ix = w->ix;
    float *votes = w->s->node_votes;
    for (uint32_t i = 0; i < n; i++) {
        const float *best = w->s->node_best + (size_t)i * w->n_heads;
        uint32_t node = w->s->node_list[i], heads = 0;
        for (uint32_t h = 0; h < w->n_heads; h++)
            heads += best[h] >= w->least[h];
        float weight = (float)heads / IDX_LINK_ONE;
        if (!heads)
            continue;
        for (uint32_t l = ix->first[node]; l < ix->first[node + 1]; l++)
            votes[idx_link_to(ix->links[l])] += weight * (float)idx_link_weight(ix->links[l]);
    }
}

/* Marks the n nodes of highest bound for head h: what it holds gives a threshold near the final one. */
static void mark_best(walk *w, uint32_t h, uint32_t n)
{
    idx_scratch *s = w->s;
    uint32_t nodes = w->end - w->first;
    const float *score = s->node_score + (size_t)h * s->node_ld + w->first, *spread = w->ix->code.spread + w->first;
    float *bound = s->node_tmp, reach = w->size[h] * w->margin[h], least = -INFINITY;
    for (uint32_t i = 0; i < nodes; i++)
        bound[i] = score[i] + spread[i] * reach;
    if (n < nodes)
        least = idx_kth(w->k, bound, nodes, n, bound + nodes + IDX_BLOCK);
    w->k->reach(score, spread, s->node_votes + w->first, nodes, w->size[h], w->margin[h], least, 1u << h, s->node_want + w->first);
}

static void walk_heads(walk *w)
{
    idx_scratch *s = w->s;
    const idx_index *ix = w->ix;
    uint32_t dim_pad = idx_dim_pad(ix->header->dim), nodes = ix->code.n_blocks, from = w->first / IDX_BLOCK, blocks = (w->end + IDX_BLOCK - 1) / IDX_BLOCK - from;
    uint32_t sure = w->beta < INFINITY && w->wanted > LEAST_WANTED ? LEAST_WANTED : w->wanted; /* the best key alone gives a dynamic budget's threshold */
    uint32_t all = w->n_heads == IDX_HEADS ? UINT32_MAX : (1u << w->n_heads) - 1, n;
    memset(s->node_want, 0, nodes * sizeof *s->node_want);
    memset(s->node_done, 0, nodes * sizeof *s->node_done);
    memset(s->node_votes, 0, nodes * sizeof *s->node_votes);
    w->k->codes(ix->code.cent_codes + (size_t)from * ix->code.block_bytes, ix->code.cent_scale + from * IDX_BLOCK, blocks, ix->code.quads, s->code_query + w->head0, w->n_heads,
                s->node_score + from * IDX_BLOCK, s->node_ld, s->tile_best);
    for (uint32_t h = 0; h < w->n_heads; h++) {
        const float *v = s->q + (size_t)(w->head0 + h) * dim_pad;
        w->size[h] = sqrtf(idx_dot(v, v, dim_pad)) * fabsf(w->q->scale);
        w->margin[h] = ix->header->n_margins == w->q->group ? ix->margins[w->head0 + h] : ix->header->margin;
        w->least[h] = -INFINITY;
        mark_best(w, h, sure / (IDX_BLOCK / 4) + 4);
    }
    for (uint32_t i = 0; i < w->q->n_seeds; i++)
        if (w->q->seeds[i] >= w->q->lo && w->q->seeds[i] < w->q->hi)
            s->node_want[w->q->seeds[i] / IDX_BLOCK] = all;
    while ((n = read_wanted(w))) {
        for (uint32_t h = 0; h < w->n_heads; h++)
            set_least(w, h);
        vote(w, n);
        for (uint32_t h = 0; h < w->n_heads; h++)
            w->k->reach(s->node_score + (size_t)h * s->node_ld + w->first, ix->code.spread + w->first, s->node_votes + w->first, w->end - w->first, w->size[h], w->margin[h],
                        w->least[h], 1u << h, s->node_want + w->first);
    }
}

/* What a head has kept, scored again from the keys. They lie anywhere in memory, so all are asked for first. */
static void score_again(const idx_kernels *k, const idx_rows *keys, const idx_query *q, uint32_t h, idx_scratch *s)
{
    idx_top *t = &s->tops[h];
    uint32_t dim_pad = idx_dim_pad(keys->dim);
    size_t bytes = idx_row_bytes(keys);
    float scores[IDX_BLOCK];
    for (uint32_t i = 0; i < t->n; i++)
        for (size_t b = 0; b < bytes; b += 64)
            __builtin_prefetch(idx_row(keys, t->ids[i]) + b);
    for (uint32_t i = 0; i < t->n; i += IDX_BLOCK) {
        uint32_t n = t->n - i < IDX_BLOCK ? t->n - i : IDX_BLOCK;
        k->widen(s->rows, keys, t->ids + i, 0, n);
        k->dots(s->rows, s->q + (size_t)h * dim_pad, 1, dim_pad, q->scale, scores, IDX_BLOCK);
        memcpy(t->scores + i, scores, n * sizeof *scores);
    }
    t->n = k->filter(t->ids, 0, t->scores, t->n, -INFINITY, t->ids, t->scores); /* a NaN is no hit */
    t->best = k->max(t->scores, t->n, -INFINITY);
}

void idx_graph_search(const idx_index *ix, const idx_rows *keys, const idx_query *q, idx_scratch *s)
{
    uint32_t span = q->hi - q->lo, wanted = q->budget.top_k > LEAST_WANTED ? q->budget.top_k : LEAST_WANTED;
    walk w = {.k = idx_kernels_get(), .ix = ix, .q = q, .s = s, .first = q->lo / IDX_BLOCK, .end = (q->hi + IDX_BLOCK - 1) / IDX_BLOCK, .wanted = wanted < span ? wanted : span};
    w.beta = q->budget.beta > 0 ? q->budget.beta : INFINITY;
    idx_code_queries(ix, q, s);
    for (uint32_t h = 0; h < q->group; h++) {
        float floor = w.beta < INFINITY && q->floor ? q->floor[h] : -INFINITY;
        idx_top_reset(&s->tops[h], w.wanted + IDX_CODE_SPARE, w.beta + s->code_query[h].margin, floor);
        s->tops[h].thr = -FLT_MAX; /* of an infinite query no row is a hit */
    }
    s->visited = 0;
    for (w.head0 = 0; w.head0 < q->group; w.head0 += IDX_HEADS) {
        w.n_heads = q->group - w.head0 < IDX_HEADS ? q->group - w.head0 : IDX_HEADS;
        walk_heads(&w);
    }
    for (uint32_t h = 0; h < q->group; h++)
        score_again(w.k, keys, q, h, s);
}
