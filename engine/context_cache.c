#include "context_cache.h"

#include "index_work.h"
#include "worth.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct eng_cache {
    eng_segment **segments; /* a parent stands before its children */
    uint32_t n, cap;
    size_t limit, bytes;
    uint64_t clock, offered, evictions, refusals;
    void (*cut)(void *ctx, eng_segment *s); /* NULL: no segment is kept in part */
    void *cut_ctx;
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

void eng_cache_keep_parts(eng_cache *c, void (*cut)(void *ctx, eng_segment *s), void *ctx)
{
    c->cut = cut;
    c->cut_ctx = ctx;
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
        for (eng_segment *s = best; s; s = s->parent) {
            s->last_used = c->clock;
            s->worth = eng_worth_used(s->worth, s->start + s->n);
        }
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

/* What is kept, in worth.h's terms. NULL: no memory. */
static eng_kept *list_kept(const eng_cache *c)
{
    eng_kept *kept = calloc(c->n + 1, sizeof *kept);
    for (uint32_t i = 0; i < c->n && kept; i++) {
        eng_segment *s = c->segments[i];
        s->number = i;
        kept[i] = (eng_kept){.bytes = eng_segment_bytes(s), .worth = s->worth, .used = s->last_used, .guest = s->guest, .holds = s->refs - s->indexing - 1,
                             .parent = s->parent ? s->parent->number : ENG_KEPT_ROOT}; /* a kept one's parent is kept */
    }
    return kept;
}

void eng_cache_drop(eng_cache *c, eng_segment *s)
{
    uint32_t i = 0;
    while (c->segments[i] != s)
        i++;
    c->bytes -= eng_segment_bytes(s);
    remove_at(c, i);
}

static void evict(eng_cache *c, eng_segment *s)
{
    c->evictions++;
    eng_evicted_add(&c->evicted, s->tenant, s->start, s->ids, s->n);
    eng_cache_drop(c, s);
}

static int append(eng_cache *c, eng_segment *s)
{
    if (c->n == c->cap) {
        uint32_t cap = c->cap ? 2 * c->cap : 16;
        eng_segment **p = realloc(c->segments, cap * sizeof *p);
        if (!p)
            return -ENOMEM;
        c->segments = p;
        c->cap = cap;
    }
    c->segments[c->n++] = eng_segment_ref(s);
    s->cached = true;
    c->bytes += eng_segment_bytes(s);
    return 0;
}

/* The most tokens of s that take `bytes` with their index, in steps of STEP; 0: too few to be worth it. */
static uint32_t part_for(const eng_segment *s, uint64_t bytes)
{
    enum { STEP = 64, LEAST = 256 };
    uint64_t all = eng_segment_bytes_for(s->shape, s->n), index = s->n >= ENG_INDEX_MIN_TOKENS ? idx_max_bytes(IDX_FLAT, s->n, s->shape->head_dim) : 0;
    for (uint32_t l = 0; l < s->shape->n_layer; l++)
        all += eng_kv_window(s->shape, l) ? 0 : index * s->shape->n_head_kv;
    all = all > eng_segment_bytes(s) ? all : eng_segment_bytes(s);
    uint64_t n = bytes < all ? bytes * s->n / all : s->n;
    n = n / STEP * STEP;
    return n >= LEAST && n < s->n ? (uint32_t)n : 0;
}

/* Keeps the first tokens of s, which itself is not kept (any more), as far as `bytes` allow. */
static void keep_part(eng_cache *c, const eng_segment *s, uint64_t bytes)
{
    eng_segment *part;
    uint32_t n = c->cut && !s->map ? part_for(s, bytes) : 0;
    if (!n || (s->parent && !s->parent->cached) || eng_segment_copy(s, 0, n, s->parent, s->exact, &part) < 0)
        return;
    part->worth = s->worth / (s->start + s->n) * (s->start + n);
    part->last_used = s->last_used;
    eng_evicted_add(&c->evicted, s->tenant, s->start + n, s->ids + n, s->n - n);
    if (eng_segment_bytes(part) <= bytes && append(c, part) == 0)
        c->cut(c->cut_ctx, part);
    eng_segment_unref(part);
}

/* Whether there is room, and whether it is a guest's. */
static bool make_room(eng_cache *c, eng_room *r)
{
    eng_kept *kept = list_kept(c);
    uint32_t *numbers = calloc(c->n + 1, sizeof *numbers);
    eng_segment **victims = calloc(c->n + 1, sizeof *victims);
    int64_t n = kept && numbers && victims ? eng_worth_choose(r, kept, c->n, numbers) : -1;
    for (int64_t i = 0; i < n; i++)
        victims[i] = eng_segment_ref(c->segments[numbers[i]]);
    for (int64_t i = 0; i < n; i++)
        evict(c, victims[i]);
    if (n > 0)
        keep_part(c, victims[n - 1], r->spare); /* more went than had to */
    for (int64_t i = 0; i < n; i++)
        eng_segment_unref(victims[i]);
    free(victims);
    free(numbers);
    free(kept);
    return n >= 0;
}

bool eng_cache_make_room(eng_cache *c, size_t bytes, uint64_t claim)
{
    return make_room(c, &(eng_room){.limit = c->limit, .bytes = bytes, .claim = claim});
}

/* Halves all worths when it is time to. */
static void offer(eng_cache *c, size_t bytes)
{
    if (eng_worth_turn(&c->offered, bytes, c->limit))
        for (uint32_t i = 0; i < c->n; i++)
            c->segments[i]->worth /= 2;
}

bool eng_cache_insert(eng_cache *c, eng_segment *s)
{
    if (!s->worth)
        s->worth = eng_worth_used(0, s->start + s->n);
    eng_room room = {.limit = c->limit, .bytes = eng_segment_bytes(s), .claim = eng_worth_claim(s->worth)};
    offer(c, room.bytes);
    s->last_used = ++c->clock;
    if (s->parent && !s->parent->cached) {
        c->refusals++;
        return false;
    }
    if (!make_room(c, &room)) {
        c->refusals++;
        keep_part(c, s, room.spare);
        return false;
    }
    s->guest = room.guest;
    return append(c, s) == 0;
}

void eng_cache_replace(eng_cache *c, eng_segment *const *parts, uint32_t n, eng_segment *merged)
{
    eng_segment *last = parts[n - 1];
    uint32_t at = 0;
    while (c->segments[at] != parts[0])
        at++;
    merged->worth = last->worth;
    merged->last_used = last->last_used;
    merged->guest = last->guest;
    merged->cached = true;
    for (uint32_t i = at; i < c->n; i++)
        if (c->segments[i]->parent == last) {
            c->segments[i]->parent = eng_segment_ref(merged);
            eng_segment_unref(last);
        }
    for (uint32_t i = n; i-- > 0;)
        eng_cache_drop(c, parts[i]);
    memmove(c->segments + at + 1, c->segments + at, (c->n - at) * sizeof *c->segments); /* there was room for two at least */
    c->segments[at] = eng_segment_ref(merged);
    c->n++;
    c->bytes += eng_segment_bytes(merged);
}

eng_segment *const *eng_cache_segments(const eng_cache *c, uint32_t *ret_n)
{
    *ret_n = c->n;
    return c->segments;
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
    eng_cache_make_room(c, 0, UINT64_MAX);
}

eng_cache_info eng_cache_info_get(const eng_cache *c)
{
    eng_cache_info info = {.bytes = c->bytes, .limit = c->limit, .segments = c->n, .evictions = c->evictions, .refusals = c->refusals};
    for (uint32_t i = 0; i < c->n; i++)
        info.index_bytes += c->segments[i]->index_bytes;
    return info;
}
