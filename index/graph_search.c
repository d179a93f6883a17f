/* One best-first search for the whole query group.
 *
 * A node is scored for all heads when it is met, and expanded when some head has it among its best `keep` = effort * top_k so far (or,
 * under a dynamic budget, near enough to its best score); what no head wants any more is dropped when it comes up. So the width of the
 * beam follows each head's own scores: a head with few keys above its threshold stops early, a flat one goes on.
 * Heads share a frontier ordered by the margin over the head's threshold, in units of the distance from there to its best score.
 */
#include "private.h"

#include <math.h>
#include <string.h>

typedef struct {
    const idx_kernels *k;
    const idx_index *ix;
    const idx_rows *keys;
    const idx_query *q;
    idx_scratch *s;
    uint32_t pending[IDX_TILE]; /* met, not yet scored */
    uint32_t n_pending;
    uint32_t visited, inside, outside; /* keys scored; nodes expanded inside and outside [lo, hi) */
} search;

static void push(idx_scratch *s, idx_node node)
{
    uint32_t i = s->n_frontier++;
    while (i) {
        uint32_t up = (i - 1) / 2;
        if (s->frontier[up].priority >= node.priority)
            break;
        s->frontier[i] = s->frontier[up];
        i = up;
    }
    s->frontier[i] = node;
}

static idx_node pop(idx_scratch *s)
{
    idx_node top = s->frontier[0], node = s->frontier[--s->n_frontier];
    uint32_t i = 0, n = s->n_frontier;
    for (;;) {
        uint32_t c = 2 * i + 1;
        if (c >= n)
            break;
        if (c + 1 < n && s->frontier[c + 1].priority > s->frontier[c].priority)
            c++;
        if (node.priority >= s->frontier[c].priority)
            break;
        s->frontier[i] = s->frontier[c];
        i = c;
    }
    if (n)
        s->frontier[i] = node;
    return top;
}

static void visit(search *x, uint32_t id)
{
    if (x->s->stamp[id] == x->s->generation)
        return;
    x->s->stamp[id] = x->s->generation;
    const uint8_t *row = idx_row(x->keys, id);
    for (size_t i = 0; i < x->keys->dim * idx_type_size(x->keys->type); i += 64)
        __builtin_prefetch(row + i);
    x->pending[x->n_pending++] = id;
}

/* Sets the head's threshold: the score of its want-th best key so far, want = effort * (hits so far), at least IDX_MIN_KEEP. And its gain:
 * a score s is worth (s - best) * gain + 1, which is 1 for the best key and 0 at the threshold. */
static void retarget(search *x, uint32_t h)
{
    idx_scratch *s = x->s;
    const idx_top *t = &s->tops[h];
    float best = fmaxf(t->best, x->q->floor ? x->q->floor[h] : -INFINITY), low = t->best;
    uint32_t hits = t->n;
    if (x->q->budget.beta > 0) {
        hits = 0;
        for (uint32_t i = 0; i < t->n; i++)
            hits += t->scores[i] >= best - x->q->budget.beta;
    }
    float want_f = (float)hits * x->ix->header->effort;
    uint32_t want = want_f < (float)t->keep ? (uint32_t)want_f : t->keep;
    if (want < IDX_MIN_KEEP)
        want = IDX_MIN_KEEP;
    if (x->q->budget.beta > 0 ? want <= t->n : t->keep <= t->n) {
        low = idx_kth(x->k, t->scores, t->n, want, s->tmp);
        s->heads[h].threshold = low;
    } else {
        for (uint32_t i = 0; i < t->n; i++)
            low = fminf(low, t->scores[i]);
        s->heads[h].threshold = -INFINITY;
    }
    s->heads[h].best = t->n ? t->best : 0;
    s->heads[h].gain = t->n && t->best > low ? 1 / (t->best - low) : 1;
    s->heads[h].next = t->n + t->n / 8 + 16;
}

/* Scores up to 16 pending nodes. */
static void score_block(search *x, const uint32_t *ids, uint32_t n)
{
    idx_scratch *s = x->s;
    const idx_query *q = x->q;
    x->k->widen(s->rows, x->keys, ids, 0, n);
    x->k->dots(s->rows, s->q, q->group, idx_dim_pad(x->keys->dim), q->scale, s->scores, IDX_BLOCK);
    x->visited += n;

    float value[IDX_BLOCK];
    uint32_t head[IDX_BLOCK];
    for (uint32_t r = 0; r < IDX_BLOCK; r++) {
        value[r] = -1;
        head[r] = 0;
    }
    for (uint32_t h = 0; h < q->group; h++) {
        const idx_aim *a = &s->heads[h];
        const float *score = s->scores + (size_t)h * IDX_BLOCK;
        float least = a->threshold == -INFINITY ? 0 : -1;
        for (uint32_t r = 0; r < IDX_BLOCK; r++) {
            float v = (score[r] - a->best) * a->gain + 1;
            v = v < least ? least : v;
            head[r] = v > value[r] ? h : head[r];
            value[r] = v > value[r] ? v : value[r];
        }
    }
    for (uint32_t r = 0; r < n; r++) {
        if (value[r] >= 0)
            push(s, (idx_node){value[r], ids[r], s->scores[(size_t)head[r] * IDX_BLOCK + r], head[r]});
        if (ids[r] < q->lo || ids[r] >= q->hi)
            for (uint32_t h = 0; h < q->group; h++)
                s->scores[(size_t)h * IDX_BLOCK + r] = NAN; /* which is never kept */
    }
    for (uint32_t h = 0; h < q->group; h++) {
        idx_top *t = &s->tops[h];
        uint32_t before = t->n;
        idx_top_add(x->k, t, ids, 0, s->scores + (size_t)h * IDX_BLOCK, n, s->tmp);
        if (t->n >= s->heads[h].next || t->n < before)
            retarget(x, h);
    }
}

static void score_pending(search *x, bool all)
{
    uint32_t at = 0;
    while (x->n_pending - at >= IDX_BLOCK || (all && at < x->n_pending)) {
        uint32_t n = x->n_pending - at < IDX_BLOCK ? x->n_pending - at : IDX_BLOCK;
        score_block(x, x->pending + at, n);
        at += n;
    }
    memmove(x->pending, x->pending + at, (x->n_pending - at) * sizeof *x->pending);
    x->n_pending -= at;
}

static bool still_wanted(const idx_scratch *s, const idx_node *node)
{
    return node->score >= s->heads[node->head].threshold;
}

static void expand(search *x, uint32_t id)
{
    bool in = id >= x->q->lo && id < x->q->hi;
    if (in) {
        x->inside++;
    } else {
        /* Good hits outside the range lead to good hits inside, but must not become the whole search. */
        if (x->outside >= x->inside + 64)
            return;
        x->outside++;
    }
    const idx_index *ix = x->ix;
    for (uint32_t i = ix->first[id]; i < ix->first[id + 1]; i++) {
        if (x->n_pending == IDX_TILE)
            score_pending(x, false);
        visit(x, ix->links[i]);
    }
}

uint32_t idx_graph_search(const idx_index *ix, const idx_rows *keys, const idx_query *q, idx_scratch *s)
{
    search x = {.k = idx_kernels_get(), .ix = ix, .keys = keys, .q = q, .s = s};
    if (++s->generation == 0) {
        memset(s->stamp, 0, (size_t)s->max_n * sizeof *s->stamp);
        s->generation = 1;
    }
    s->n_frontier = 0;
    for (uint32_t h = 0; h < q->group; h++) {
        double keep = (double)s->tops[h].keep * (double)ix->header->effort;
        if (keep < IDX_MIN_KEEP)
            keep = IDX_MIN_KEEP;
        idx_top_reset(&s->tops[h], keep < s->max_keep ? (uint32_t)keep : s->max_keep, INFINITY, -INFINITY);
        s->heads[h] = (idx_aim){.threshold = -INFINITY, .gain = 1, .next = 1};
    }
    for (uint32_t i = 0; i < q->n_seeds; i++) {
        if (x.n_pending == IDX_TILE)
            score_pending(&x, false);
        if (q->seeds[i] < keys->n)
            visit(&x, q->seeds[i]);
    }
    for (uint32_t i = 0; i < ix->header->n_entries; i++) {
        if (x.n_pending == IDX_TILE)
            score_pending(&x, false);
        visit(&x, ix->entries[i]);
    }
    score_pending(&x, true);
    while (s->n_frontier || x.n_pending) {
        if (!s->n_frontier || x.n_pending >= IDX_BLOCK) {
            score_pending(&x, !s->n_frontier);
            continue;
        }
        idx_node node = pop(s);
        if (still_wanted(s, &node))
            expand(&x, node.id);
    }
    return x.visited;
}
