/* One best-first search for the whole query group.
 *
 * A node is scored for all heads when it is met, and expanded when some head has it among the best `want` keys it has met so far; want =
 * the number of hits + spare, where the hits are top_k under a plain budget, and those met within beta of the best under a dynamic one.
 * What no head wants any more is dropped when it comes up. So the beam's width follows each head's own scores: a head with few keys above
 * its threshold stops early, a flat one goes on. Heads share one frontier, ordered by how far a score lies above the head's threshold, in
 * units of the distance from there to its best score.
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

/* Sets a head's threshold, the score of its want-th best key so far, and its gain: a score s is worth (s - best) * gain + 1, which is 1 for
 * the best key and 0 at the threshold. */
static void retarget(search *x, uint32_t h)
{
    const idx_top *t = &x->s->tops[h];
    idx_aim *a = &x->s->aims[h];
    uint32_t want = t->keep;
    if (x->q->budget.beta > 0) {
        float least = fmaxf(t->best, x->q->floor ? x->q->floor[h] : -INFINITY) - x->q->budget.beta;
        want = x->ix->header->spare;
        for (uint32_t i = 0; i < t->n; i++)
            want += t->scores[i] >= least;
        if (want > t->keep)
            want = t->keep;
    }
    float low = t->best;
    if (t->n >= want) {
        a->least = -INFINITY;
        low = a->threshold = idx_kth(x->k, t->scores, t->n, want, x->s->tmp);
    } else {
        a->threshold = -INFINITY; /* everything is wanted, */
        a->least = 0;             /* in the order of its value */
        for (uint32_t i = 0; i < t->n; i++)
            low = fminf(low, t->scores[i]);
    }
    a->best = t->n ? t->best : 0;
    a->gain = t->n && t->best > low ? 1 / (t->best - low) : 1;
    a->next = t->n + t->n / 8 + 16;
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
    x->k->judge(s->scores, s->aims, q->group, value, head);
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
        if (t->n >= s->aims[h].next || t->n < before)
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

/* Marks a node as met and queues it for scoring. Good keys outside the range lead to good ones inside, but must not become the whole
 * search: beyond a share of it they are passed over. */
static void visit(search *x, uint32_t id)
{
    if (x->s->stamp[id] == x->s->generation)
        return;
    if (x->n_pending == IDX_TILE)
        score_pending(x, false);
    x->s->stamp[id] = x->s->generation;
    if (id < x->q->lo || id >= x->q->hi) {
        if (x->outside >= x->visited / 8 + 256)
            return;
        x->outside++;
    }
    const uint8_t *row = idx_row(x->keys, id);
    for (size_t i = 0; i < idx_row_bytes(x->keys); i += 64)
        __builtin_prefetch(row + i);
    x->pending[x->n_pending++] = id;
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
        idx_top_reset(&s->tops[h], s->tops[h].keep + ix->header->spare, INFINITY, -INFINITY);
        s->aims[h] = (idx_aim){.threshold = -INFINITY, .gain = 1, .next = 1};
    }
    for (uint32_t i = 0; i < q->n_seeds; i++)
        if (q->seeds[i] < keys->n)
            visit(&x, q->seeds[i]);
    for (uint32_t i = 0; i < ix->header->n_entries; i++)
        visit(&x, ix->entries[i]);
    score_pending(&x, true);
    while (s->n_frontier || x.n_pending) {
        if (!s->n_frontier || x.n_pending >= IDX_BLOCK) {
            score_pending(&x, !s->n_frontier);
            continue;
        }
        idx_node node = pop(s);
        if (node.score < s->aims[node.head].threshold)
            continue;
        for (uint32_t i = ix->first[node.id]; i < ix->first[node.id + 1]; i++)
            visit(&x, ix->links[i]);
    }

    /* A head that met too few keys was cut off by the range. */
    bool starved = false;
    for (uint32_t h = 0; h < q->group; h++)
        starved |= s->aims[h].threshold == -INFINITY;
    if (starved && x.visited - x.outside < q->hi - q->lo) {
        for (uint32_t h = 0; h < q->group; h++)
            idx_top_reset(&s->tops[h], s->tops[h].keep, INFINITY, -INFINITY);
        x.visited += idx_flat_search(keys, q, s);
    }
    return x.visited;
}
