#include "context_cache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct eng_cache {
    eng_segment **segments; /* a parent stands before its children */
    uint32_t n, cap;
    size_t limit, bytes;
    uint64_t clock, evictions;
    eng_evicted evicted;
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

/* The segment that agrees with most of the prefix, `match` tokens. NULL: there is none. */
static eng_segment *longest(eng_cache *c, const eng_prefix *p)
{
    eng_segment *best = NULL;
    for (uint32_t i = 0; i < c->n; i++) {
        eng_segment *s = c->segments[i];
        s->match = -1;
        if ((s->parent && s->parent->match < (int64_t)s->start) || s->start > p->n || s->tenant != p->tenant || (p->exact_only && !s->exact))
            continue;
        uint32_t left = p->n - s->start;
        s->match = (int64_t)s->start + common_prefix(s->ids, p->ids + s->start, s->n < left ? s->n : left);
        if (!best || s->match > best->match || (s->match == best->match && s->exact && !best->exact))
            best = s;
    }
    return best;
}

int64_t eng_cache_find(eng_cache *c, const eng_prefix *p, eng_view *view, eng_prefix_stop *ret)
{
    eng_prefix any = *p;
    any.exact_only = false;
    eng_segment *most = p->exact_only ? longest(c, &any) : NULL;
    uint32_t most_match = most ? (uint32_t)most->match : 0;
    eng_segment *best = longest(c, p);
    uint32_t match = best ? (uint32_t)best->match : 0;
    eng_prefix_stop stop = eng_prefix_stop_at(p, match, best ? best->start + best->n : 0);
    if (most_match > match && most_match >= ENG_CACHE_MIN_PREFIX)
        stop.why = ENG_MISS_INEXACT;
    if (match >= ENG_CACHE_MIN_PREFIX) {
        c->clock++;
        for (eng_segment *s = best; s; s = s->parent)
            s->last_used = c->clock;
        int r = append_chain(view, best, match);
        if (r < 0)
            return r;
    }
    *ret = stop;
    return match >= ENG_CACHE_MIN_PREFIX ? match : 0;
}

bool eng_cache_evicted(const eng_cache *c, const eng_prefix *p, uint32_t position)
{
    return eng_evicted_has(&c->evicted, p, position);
}

eng_segment *eng_cache_peek(eng_cache *c, const eng_prefix *p)
{
    eng_segment *s = longest(c, p);
    return s && s->match >= ENG_CACHE_MIN_PREFIX ? s : NULL;
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
        const eng_segment *s = c->segments[victim];
        c->bytes -= eng_segment_bytes(s);
        c->evictions++;
        eng_evicted_add(&c->evicted, s->tenant, s->start, s->ids, s->n);
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
