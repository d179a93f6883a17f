/* A history that grows by a question and an answer at a time leaves many small segments, each with a border that a search and a file pay for. When nobody waits,
 * the last segments of a long chain become one; what continues them continues that.
 *
 * Which: from near the chain's end backwards, while a segment is no larger than what was taken behind it, or more than MOST would remain; so a token is copied
 * a few times in a history's life, not once a turn. Never across a border where another branch leaves, nor what is in use; and not exact rows with those that
 * are not: the result's flag is right for all of it. A branch whose tokens the chain has too, an answer that was read again, say, is in nobody's
 * way: it goes.
 */
#include "engine_private.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 4 }; /* segments of a context at rest */

/* Of the whole history, as on disk: what continues decoded tokens is not exact. */
static bool is_exact(const eng_segment *s)
{
    while (s && s->exact)
        s = s->parent;
    return !s;
}

static uint32_t chain_length(const eng_segment *s)
{
    uint32_t n = 0;
    for (; s; s = s->parent)
        n++;
    return n;
}

static uint32_t child_count(eng_cache *c, const eng_segment *s)
{
    uint32_t n_all, n = 0;
    eng_segment *const *all = eng_cache_segments(c, &n_all);
    for (uint32_t i = 0; i < n_all; i++)
        n += all[i]->parent == s;
    return n;
}

/* Nobody but the cache, its children and the way to the disk holds it. */
static bool is_idle(const eng_engine *e, const eng_segment *s)
{
    return s->cached && !s->indexing && s->refs == 1 + child_count(e->cache, s) + eng_disk_waits(e, s);
}

/* Whether s begins like child and what follows that in the chain that ends in `last`. */
static bool is_covered(const eng_segment *s, const eng_segment *child, const eng_segment *last)
{
    if (s->start != child->start || s->start + s->n > last->start + last->n || (is_exact(s) && !is_exact(last)))
        return false;
    for (const eng_segment *p = last; p != child->parent; p = p->parent) {
        uint32_t end = s->start + s->n < p->start + p->n ? s->start + s->n : p->start + p->n;
        if (end > p->start && memcmp(p->ids, s->ids + (p->start - s->start), (size_t)(end - p->start) * sizeof *p->ids) != 0)
            return false;
    }
    return true;
}

static void drop(eng_engine *e, eng_segment *s)
{
    eng_disk_leave(e, s);
    eng_cache_drop(e->cache, s);
}

/* Drops other children of `parent` that say nothing new; whether only `child` is left. */
static bool left_alone(eng_engine *e, const eng_segment *parent, const eng_segment *child, const eng_segment *last)
{
    uint32_t n;
    eng_segment *const *all = eng_cache_segments(e->cache, &n);
    for (uint32_t i = n; i-- > 0;) {
        eng_segment *s = all[i];
        if (s->parent == parent && s != child && is_idle(e, s) && !child_count(e->cache, s) && is_covered(s, child, last))
            drop(e, s);
    }
    return child_count(e->cache, parent) == 1;
}

static bool joins(eng_engine *e, const eng_segment *child, const eng_segment *last)
{
    const eng_segment *p = child->parent;
    return p && child->start == p->start + p->n && is_exact(p) == is_exact(child) && p->cached && !p->indexing && left_alone(e, p, child, last) && is_idle(e, p);
}

/* How many segments of a chain of `length`, `last` and those before it, are to become one. Less than 2: none. */
static uint32_t choose_at(eng_engine *e, const eng_segment *last, uint32_t length)
{
    uint32_t n = 1, tokens = last->n;
    if (!is_idle(e, last))
        return 0;
    for (const eng_segment *s = last; joins(e, s, last) && (n < 2 || s->parent->n <= tokens || length - n + 1 > MOST); s = s->parent) {
        tokens += s->parent->n;
        n++;
    }
    return n;
}

/* As near to the chain's end as they can be had. */
static uint32_t choose(eng_engine *e, eng_segment **io_last)
{
    uint32_t length = chain_length(*io_last), n = 0;
    for (eng_segment *last = *io_last; last && length > MOST && n < 2; last = last->parent) {
        n = choose_at(e, last, length);
        *io_last = last;
    }
    return n;
}

/* ---- joining ------------------------------------------------------------------------------------------------------- */

typedef struct {
    eng_segment **parts; /* first one first */
    uint32_t n;
    eng_segment *to;
    const atomic_bool *stop;
    atomic_bool stopped;
} joining;

static void join_head(void *ctx, uint32_t task, uint32_t worker)
{
    joining *j = ctx;
    const eng_kv_shape *h = j->to->shape;
    uint32_t layer = task / h->n_head_kv, head = task % h->n_head_kv;
    (void)worker;
    if (j->stop && atomic_load(j->stop))
        atomic_store(&j->stopped, true);
    if (atomic_load(&j->stopped))
        return;
    for (uint32_t i = 0; i < j->n; i++) {
        const eng_segment *p = j->parts[i];
        uint32_t row = p->start - j->to->start;
        memcpy(eng_segment_k(j->to, layer, head, row), eng_segment_k(p, layer, head, 0), (size_t)p->n * h->row_k);
        memcpy(eng_segment_v(j->to, layer, head, row), eng_segment_v(p, layer, head, 0), (size_t)p->n * h->row_v);
    }
}

/* The queries that parts were indexed by, if all those that had to be have them: a graph over what only some of the queries know would be a bad one. */
static void join_queries(const joining *j)
{
    const eng_kv_shape *h = j->to->shape;
    uint32_t m = 0;
    for (uint32_t i = 0; i < j->n; i++) {
        if (!j->parts[i]->m && j->parts[i]->n >= ENG_INDEX_MIN_TOKENS)
            return;
        m += j->parts[i]->m;
        j->to->wants |= j->parts[i]->wants;
    }
    if (!m || eng_segment_alloc_queries(j->to, m) < 0)
        return;
    for (uint32_t i = 0; i < j->n; i++) {
        const eng_segment *p = j->parts[i];
        for (uint32_t k = 0; k < p->m; k++)
            j->to->query_row[j->to->m + k] = p->query_row[k] + (p->start - j->to->start);
        for (uint32_t layer = 0; layer < h->n_layer; layer++)
            for (uint32_t k = 0; k < h->n_head_kv * p->m && !eng_kv_window(h, layer); k++)
                eng_segment_load_query(p, layer, k / p->m, k % p->m, eng_segment_query(j->to, layer, k / p->m, j->to->m + k % p->m));
        j->to->m += p->m;
    }
}

static void join_squares(const joining *j)
{
    size_t n = (size_t)j->to->shape->n_layer * j->to->shape->n_head_kv * j->to->shape->head_dim;
    for (uint32_t i = 0; i < j->n; i++)
        for (size_t k = 0; k < n; k++)
            j->to->query_squares[k] += j->parts[i]->query_squares[k];
}

/* What the files of the parts are called: they go when the new one is there. */
static int note_files(const joining *j)
{
    j->to->replaces = malloc(j->n * sizeof *j->to->replaces);
    if (!j->to->replaces)
        return -ENOMEM;
    for (uint32_t i = 0; i < j->n; i++)
        if (j->parts[i]->has_id)
            j->to->replaces[j->to->n_replaces++] = j->parts[i]->id;
    return 0;
}

static int join(eng_engine *e, joining *j)
{
    eng_segment *first = j->parts[0], *last = j->parts[j->n - 1];
    uint32_t n = last->start + last->n - first->start;
    int r = eng_segment_new(&e->shape, first->parent, first->start, n, is_exact(last), &j->to);
    if (r < 0)
        return r;
    j->to->tenant = first->tenant;
    j->to->n = n;
    for (uint32_t i = 0; i < j->n; i++)
        memcpy(j->to->ids + (j->parts[i]->start - first->start), j->parts[i]->ids, (size_t)j->parts[i]->n * sizeof *j->to->ids);
    eng_pool_run(e->pool, "join segments", join_head, j, e->shape.n_layer * e->shape.n_head_kv);
    r = atomic_load(&j->stopped) ? -ECANCELED : note_files(j);
    if (r < 0) {
        eng_segment_unref(j->to);
        return r;
    }
    join_squares(j);
    join_queries(j);
    return 0;
}

static bool merge(eng_engine *e, eng_segment *last, uint32_t n, const atomic_bool *stop)
{
    joining j = {.parts = malloc(n * sizeof *j.parts), .n = n, .stop = stop};
    size_t bytes = 0;
    eng_segment *s = last;
    for (uint32_t i = n; i-- > 0 && j.parts; s = s->parent) {
        j.parts[i] = s;
        bytes += eng_segment_bytes(s);
    }
    /* Both are there for a moment: only where that fits, and nothing goes for it. */
    bool done = j.parts && eng_cache_make_room(e->cache, bytes, 0) && join(e, &j) == 0;
    if (done) {
        for (uint32_t i = 0; i < n; i++)
            eng_disk_leave(e, j.parts[i]);
        eng_cache_replace(e->cache, j.parts, n, j.to);
        eng_index_work_add(e->index_work, j.to); /* if that fails: its keys are read all the same */
        eng_disk_keep(e, j.to);
        eng_segment_unref(j.to);
        atomic_fetch_add(&e->counters.merges, 1);
    }
    free(j.parts);
    return done;
}

int eng_merge_turn(eng_engine *e, const atomic_bool *stop)
{
    uint32_t n;
    if (e->in_session || eng_index_work_pending(e->index_work) || (stop && atomic_load(stop)))
        return 0;
    eng_segment *const *all = eng_cache_segments(e->cache, &n);
    for (uint32_t i = 0; i < n; i++) {
        eng_segment *s = all[i];
        uint32_t parts = child_count(e->cache, s) ? 0 : choose(e, &s);
        if (parts >= 2)
            return merge(e, s, parts, stop);
        all = eng_cache_segments(e->cache, &n); /* branches may have gone */
    }
    return 0;
}
