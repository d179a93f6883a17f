/* Which links a node gets: projection of the query -> key graph, connectivity, reverse links, reachability. */
#include "graph_build.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    PIVOT_QUERIES = 64, /* a key that is a pivot of more queries than this is served by an even sample of them */
    NODE_PIECE = 256,   /* nodes per step of the cheap passes */
};

int idx_link_new(idx_builder *b)
{
    size_t n = b->keys.n, m = b->params.degree, gather = IDX_MAX_GATHER + 16;
    b->out = (idx_lists){idx_alloc(n * m, 4), calloc(n, 4), (uint32_t)m};
    b->near = (idx_lists){idx_alloc(n * m, 4), calloc(n, 4), (uint32_t)m};
    b->links = (idx_lists){idx_alloc(n * (2 * m + IDX_SPARE_LINKS), 4), calloc(n, 4), (uint32_t)(2 * m + IDX_SPARE_LINKS)};
    b->out_in = (idx_runs){calloc(n + 2, 4), idx_alloc(n * m, 4)};
    b->near_in = (idx_lists){idx_alloc(n * m, 4), calloc(n, 4), (uint32_t)m};
    b->stamp = calloc(n, 4);
    b->queue = idx_alloc(n, 4);
    b->cand = idx_alloc(gather, 4);
    b->cand_score = idx_alloc(gather, 4);
    b->cand_rows = idx_alloc((IDX_MAX_CANDIDATES + 16) * (size_t)b->dim_pad, 4);
    if (!b->out.ids || !b->out.count || !b->near.ids || !b->near.count || !b->links.ids || !b->links.count || !b->out_in.first ||
        !b->out_in.ids || !b->near_in.ids || !b->near_in.count || !b->stamp || !b->queue || !b->cand || !b->cand_score || !b->cand_rows)
        return -ENOMEM;
    memset(b->cand_rows, 0, (IDX_MAX_CANDIDATES + 16) * (size_t)b->dim_pad * 4);
    return 0;
}

static const float *space_row(const idx_builder *b, uint32_t id)
{
    return b->space + (size_t)id * b->dim_pad;
}

static uint32_t *list_of(const idx_lists *l, uint32_t id)
{
    return l->ids + (size_t)id * l->stride;
}

/* ---- candidates ---- */

static void cand_begin(idx_builder *b, uint32_t self)
{
    b->generation++;
    b->stamp[self] = b->generation;
    b->n_cand = 0;
}

static void cand_add(idx_builder *b, uint32_t id)
{
    if (b->stamp[id] == b->generation || b->n_cand == IDX_MAX_GATHER)
        return;
    b->stamp[id] = b->generation;
    b->cand[b->n_cand++] = id;
}

/* An even sample of at most `most` ids of a list. */
static void cand_add_some(idx_builder *b, const uint32_t *ids, uint32_t n, uint32_t most)
{
    for (uint32_t i = 0; i < n && i < most; i++)
        cand_add(b, n <= most ? ids[i] : ids[(uint64_t)i * n / most]);
}

/* ret[i] = nearness of ids[i] to p: <p, c> - |c|^2 / 2, which is |p|^2 / 2 less half the squared distance. */
static void nearness(idx_builder *b, const float *p, const uint32_t *ids, uint32_t n, float *ret)
{
    for (uint32_t i = 0; i < n; i += IDX_BLOCK) {
        uint32_t block = n - i < IDX_BLOCK ? n - i : IDX_BLOCK;
        float out[IDX_BLOCK];
        for (uint32_t r = 0; r < block; r++)
            memcpy(b->rows + (size_t)r * b->dim_pad, space_row(b, ids[i + r]), (size_t)b->dim_pad * 4);
        b->k->dots(b->rows, p, 1, b->dim_pad, 1, out, IDX_BLOCK);
        for (uint32_t r = 0; r < block; r++)
            ret[i + r] = out[r] - b->half[ids[i + r]];
    }
}

static uint32_t nearest(const float *x, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    return x[best] > -INFINITY ? best : n;
}

/* Occlusion pruning (RoarGraph section 4.2, as in RNG): the nearest candidate is kept, and those nearer to it than to p are passed over;
 * again, until `most` are kept. Then the nearest of those passed over fill the list. Returns the number of links. */
static uint32_t choose(idx_builder *b, uint32_t p, uint32_t most, uint32_t *ret)
{
    float *score = b->cand_score;
    nearness(b, space_row(b, p), b->cand, b->n_cand, score);
    if (b->n_cand > IDX_MAX_CANDIDATES) {
        float last = idx_kth(b->k, score, b->n_cand, IDX_MAX_CANDIDATES, b->tmp);
        b->n_cand = b->k->filter(b->cand, 0, score, b->n_cand, last, b->cand, score);
        if (b->n_cand > IDX_MAX_CANDIDATES)
            b->n_cand = IDX_MAX_CANDIDATES; /* many at the same distance: any of them */
    }
    uint32_t n = b->n_cand, kept = 0;
    float passed[IDX_MAX_CANDIDATES], to_kept[IDX_MAX_CANDIDATES + IDX_BLOCK];
    for (uint32_t i = 0; i < n; i++) {
        passed[i] = -INFINITY;
        memcpy(b->cand_rows + (size_t)i * b->dim_pad, space_row(b, b->cand[i]), (size_t)b->dim_pad * 4);
    }
    while (kept < most) {
        uint32_t r = nearest(score, n);
        if (r == n)
            break;
        ret[kept++] = b->cand[r];
        score[r] = -INFINITY;
        if (kept == most)
            break;
        const float *row = space_row(b, b->cand[r]);
        for (uint32_t i = 0; i < n; i += IDX_BLOCK)
            b->k->dots(b->cand_rows + (size_t)i * b->dim_pad, row, 1, b->dim_pad, 1, to_kept + i, IDX_BLOCK);
        /* d(c, r) < d(c, p), both less |c|^2 / 2 and negated. */
        float half_r = b->half[b->cand[r]], half_p = b->half[p];
        for (uint32_t i = 0; i < n; i++) {
            bool pass = to_kept[i] - half_r > score[i] + b->half[b->cand[i]] - half_p;
            if (pass && score[i] > -INFINITY) {
                passed[i] = score[i];
                score[i] = -INFINITY;
            }
        }
    }
    while (kept < most) {
        uint32_t r = nearest(passed, n);
        if (r == n)
            break;
        ret[kept++] = b->cand[r];
        passed[r] = -INFINITY;
    }
    return kept;
}

/* ---- phases ---- */

/* A pivot's candidates are the other hits of all queries it is a pivot of: accumulated, where RoarGraph's reference code overwrites. */
bool idx_link_project(idx_builder *b)
{
    uint32_t p = (uint32_t)b->at, first = b->pivots.first[p], n = b->pivots.first[p + 1] - first;
    if (n) {
        uint32_t used = n < PIVOT_QUERIES ? n : PIVOT_QUERIES;
        cand_begin(b, p);
        for (uint32_t i = 0; i < used; i++) {
            uint32_t query = b->pivots.ids[first + (uint64_t)i * n / used];
            cand_add_some(b, list_of(&b->hits, query), b->hits.count[query], b->hits.stride);
        }
        b->out.count[p] = choose(b, p, b->params.degree, list_of(&b->out, p));
    }
    return ++b->at == b->keys.n;
}

/* Inverts the projected links: first n steps count, n more fill, in pieces. */
bool idx_link_reverse(idx_builder *b)
{
    uint32_t n = b->keys.n, *first = b->out_in.first;
    bool fill = b->at >= n;
    uint32_t from = (uint32_t)(fill ? b->at - n : b->at), to = n - from < NODE_PIECE ? n : from + NODE_PIECE;
    for (uint32_t i = from; i < to; i++) {
        const uint32_t *ids = list_of(&b->out, i);
        for (uint32_t j = 0; j < b->out.count[i]; j++) {
            if (fill)
                b->out_in.ids[first[ids[j] + 1]++] = i;
            else
                first[ids[j] + 2]++;
        }
    }
    b->at += to - from;
    if (!fill && to == n)
        for (uint32_t i = 1; i <= n; i++)
            first[i + 1] += first[i];
    return fill && to == n;
}

typedef struct {
    float score;
    uint32_t id;
    bool expanded;
} beam_node;

/* Scores the candidates met since `from` and lets the best into the beam, which stays sorted. */
static uint32_t beam_take(idx_builder *b, const float *p, uint32_t from, beam_node *beam, uint32_t n, uint32_t width)
{
    nearness(b, p, b->cand + from, b->n_cand - from, b->cand_score + from);
    for (uint32_t i = from; i < b->n_cand; i++) {
        float s = b->cand_score[i];
        if (n == width && s <= beam[n - 1].score)
            continue;
        uint32_t j = n < width ? n++ : n - 1;
        for (; j && beam[j - 1].score < s; j--)
            beam[j] = beam[j - 1];
        beam[j] = (beam_node){s, b->cand[i], false};
    }
    return n;
}

/* The links of a node while the connectivity pass goes on. */
static void cand_add_neighbours(idx_builder *b, uint32_t id)
{
    cand_add_some(b, list_of(&b->out, id), b->out.count[id], b->out.stride);
    cand_add_some(b, b->out_in.ids + b->out_in.first[id], b->out_in.first[id + 1] - b->out_in.first[id], b->params.degree);
    cand_add_some(b, list_of(&b->near, id), b->near.count[id], b->near.stride);
    cand_add_some(b, list_of(&b->near_in, id), b->near_in.count[id], b->near_in.stride);
}

/* Each key is searched for in the graph so far (RoarGraph's connectivity enhancement); what the beam ends with are its candidates. */
bool idx_link_connect(idx_builder *b)
{
    uint32_t p = (uint32_t)b->at, n = 0, width = b->params.beam;
    const float *row = space_row(b, p);
    beam_node beam[IDX_MAX_BEAM];
    cand_begin(b, p);
    cand_add_some(b, b->entries, b->n_entries, b->n_entries);
    cand_add_neighbours(b, p);
    n = beam_take(b, row, 0, beam, n, width);
    for (uint32_t i = 0; i < n;) {
        if (beam[i].expanded) {
            i++;
            continue;
        }
        beam[i].expanded = true;
        uint32_t from = b->n_cand;
        cand_add_neighbours(b, beam[i].id);
        n = beam_take(b, row, from, beam, n, width);
        i = 0;
    }
    cand_begin(b, p);
    for (uint32_t i = 0; i < n; i++)
        cand_add(b, beam[i].id);
    uint32_t *near = list_of(&b->near, p);
    b->near.count[p] = choose(b, p, b->params.degree, near);
    for (uint32_t i = 0; i < b->near.count[p]; i++)
        if (b->near_in.count[near[i]] < b->near_in.stride)
            list_of(&b->near_in, near[i])[b->near_in.count[near[i]]++] = p;
    return ++b->at == b->keys.n;
}

/* A node's final links: all kinds together, pruned when there are too many. */
bool idx_link_merge(idx_builder *b)
{
    uint32_t p = (uint32_t)b->at, most = 2 * b->params.degree;
    cand_begin(b, p);
    cand_add_some(b, list_of(&b->out, p), b->out.count[p], b->out.stride);
    cand_add_some(b, list_of(&b->near, p), b->near.count[p], b->near.stride);
    cand_add_some(b, list_of(&b->near_in, p), b->near_in.count[p], b->near_in.stride);
    cand_add_some(b, b->out_in.ids + b->out_in.first[p], b->out_in.first[p + 1] - b->out_in.first[p], IDX_MAX_CANDIDATES);
    uint32_t *links = list_of(&b->links, p);
    if (b->n_cand <= most) {
        memcpy(links, b->cand, (size_t)b->n_cand * 4);
        b->links.count[p] = b->n_cand;
    } else {
        b->links.count[p] = choose(b, p, most, links);
    }
    return ++b->at == b->keys.n;
}

static void reach(idx_builder *b, uint32_t id)
{
    if (b->stamp[id] == b->generation)
        return;
    b->stamp[id] = b->generation;
    b->queue[b->n_queue++] = id;
}

/* A reached node with room for one more link: a neighbour of `id` where there is one, else the first of all. */
static uint32_t find_host(const idx_builder *b, uint32_t id, uint32_t *from)
{
    const uint32_t *links = list_of(&b->links, id);
    for (uint32_t i = 0; i < b->links.count[id]; i++)
        if (b->stamp[links[i]] == b->generation && b->links.count[links[i]] < b->links.stride)
            return links[i];
    while (b->links.count[b->queue[*from]] == b->links.stride)
        ++*from;
    return b->queue[*from];
}

/* Breadth first from the entries; a key that can't be reached gets a link from one that can. Lists have IDX_SPARE_LINKS places for this,
 * and each host's new neighbour brings its own, so there is always one left. at: nodes expanded, then n + nodes looked at for gaps. */
bool idx_link_reach(idx_builder *b)
{
    uint32_t n = b->keys.n;
    if (!b->n_queue) {
        b->generation++;
        for (uint32_t i = 0; i < b->n_entries; i++)
            reach(b, b->entries[i]);
    }
    for (uint32_t c = 0; c < NODE_PIECE; c++) {
        if (b->n_reached < b->n_queue) {
            uint32_t id = b->queue[b->n_reached++];
            for (uint32_t i = 0; i < b->links.count[id]; i++)
                reach(b, list_of(&b->links, id)[i]);
        } else if (b->at < n) {
            uint32_t id = (uint32_t)b->at++;
            if (b->stamp[id] == b->generation)
                continue;
            uint32_t host = find_host(b, id, &b->sub);
            list_of(&b->links, host)[b->links.count[host]++] = id;
            reach(b, id);
        } else {
            return true;
        }
    }
    return false;
}
