#include "context_cache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct eng_cache {
    eng_segment **segments; /* a parent stands before its children */
    uint32_t n, cap;
    size_t limit, bytes;
    uint64_t clock, evictions;
};

int eng_cache_new(size_t limit, eng_cache **ret)
{
    eng_cache *c = calloc(1, sizeof *c);
    if (!c)
        return -ENOMEM;
    c->limit = limit;
    *ret = c;
    return 0;
}

static void remove_at(eng_cache *c, uint32_t i)
{
    eng_segment *s = c->segments[i];
    memmove(c->segments + i, c->segments + i + 1, (c->n - i - 1) * sizeof *c->segments);
    c->n--;
    s->cached = false;
    eng_segment_unref(s);
}

void eng_cache_free(eng_cache *c)
{
    if (!c)
        return;
    while (c->n)
        remove_at(c, c->n - 1);
    free(c->segments);
    free(c);
}

static uint32_t common_prefix(const int32_t *a, const int32_t *b, uint32_t n)
{
    uint32_t i = 0;
    while (i < n && a[i] == b[i])
        i++;
    return i;
}

/* The chain that ends in s, cut at `end`, first span first. */
static int append_chain(eng_view *view, eng_segment *s, uint32_t end)
{
    for (; s; end = s->start, s = s->parent)
        if (end > s->start) {
            int r = eng_view_add(view, s, s->start, end);
            if (r < 0)
                return r;
        }
    for (uint32_t i = 0; i < view->n_spans / 2; i++) {
        eng_span t = view->spans[i];
        view->spans[i] = view->spans[view->n_spans - 1 - i];
        view->spans[view->n_spans - 1 - i] = t;
    }
    return 0;
}

int64_t eng_cache_find(eng_cache *c, uint64_t tenant, const int32_t *ids, uint32_t n, bool exact_only, eng_view *view)
{
    eng_segment *best = NULL;
    for (uint32_t i = 0; i < c->n; i++) {
        eng_segment *s = c->segments[i];
        s->match = -1;
        if ((s->parent && s->parent->match < (int64_t)s->start) || s->start > n || s->tenant != tenant || (exact_only && !s->exact))
            continue;
        uint32_t left = n - s->start;
        s->match = (int64_t)s->start + common_prefix(s->ids, ids + s->start, s->n < left ? s->n : left);
        if (!best || s->match > best->match || (s->match == best->match && s->exact && !best->exact))
            best = s;
    }
    if (!best || best->match < ENG_CACHE_MIN_PREFIX)
        return 0;
    c->clock++;
    for (eng_segment *s = best; s; s = s->parent)
        s->last_used = c->clock;
    int r = append_chain(view, best, (uint32_t)best->match);
    return r < 0 ? r : best->match;
}

bool eng_cache_make_room(eng_cache *c, size_t bytes)
{
    while (c->bytes + bytes > c->limit) {
        uint32_t victim = c->n;
        for (uint32_t i = 0; i < c->n; i++) {
            const eng_segment *s = c->segments[i];
            if (s->refs - s->indexing == 1 && (victim == c->n || s->last_used < c->segments[victim]->last_used))
                victim = i;
        }
        if (victim == c->n)
            return false;
        c->bytes -= eng_segment_bytes(c->segments[victim]);
        c->evictions++;
        remove_at(c, victim);
    }
    return true;
}

bool eng_cache_insert(eng_cache *c, eng_segment *s)
{
    if ((s->parent && !s->parent->cached) || !eng_cache_make_room(c, eng_segment_bytes(s)))
        return false;
    if (c->n == c->cap) {
        uint32_t cap = c->cap ? 2 * c->cap : 16;
        eng_segment **p = realloc(c->segments, cap * sizeof *p);
        if (!p)
            return false;
        c->segments = p;
        c->cap = cap;
    }
    c->segments[c->n++] = eng_segment_ref(s);
    s->cached = true;
    s->last_used = ++c->clock;
    c->bytes += eng_segment_bytes(s);
    return true;
}

eng_segment *eng_cache_get(const eng_cache *c, const eng_segment_id *id)
{
    for (uint32_t i = 0; i < c->n; i++)
        if (c->segments[i]->has_id && !memcmp(&c->segments[i]->id, id, sizeof *id))
            return c->segments[i];
    return NULL;
}

void eng_cache_recount(eng_cache *c)
{
    c->bytes = 0;
    for (uint32_t i = 0; i < c->n; i++)
        c->bytes += eng_segment_bytes(c->segments[i]);
    eng_cache_make_room(c, 0);
}

eng_cache_info eng_cache_info_get(const eng_cache *c)
{
    eng_cache_info info = {.bytes = c->bytes, .limit = c->limit, .segments = c->n, .evictions = c->evictions};
    for (uint32_t i = 0; i < c->n; i++)
        info.index_bytes += c->segments[i]->index_bytes;
    return info;
}
