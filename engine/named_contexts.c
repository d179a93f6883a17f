/* Named contexts and the engine: the public functions; what of them is in memory, and stays there when it is pinned. */
#include "engine_private.h"

#include "memory.h"

#include <errno.h>
#include <stdlib.h>

/* A pin is a reference to the last segment that memory has of a context: neither that nor what is before it is evicted then. */
typedef struct {
    eng_context *context;
    eng_segment *last;
    uint32_t tried; /* tokens on disk when it was last read from there */
} hold;

struct eng_holds {
    hold *all;
    int n;
    uint64_t seen; /* what it was made from */
};

/* Of a token: keys, values, and what is built over them for every session. */
static uint64_t token_bytes(const eng_engine *e)
{
    return eng_kv_bytes_per_token(&e->shape) + sizeof(int32_t) + eng_index_bytes_per_token(&e->shape, e->wants);
}

int eng_named_open(eng_engine *e)
{
    eng_names_budget budget = {.ram_limit = e->params.cache_ram, .token_bytes = token_bytes(e)};
    e->holds = calloc(1, sizeof *e->holds);
    if (!e->holds || eng_names_new(e->info.fingerprint, &e->names) < 0)
        return -ENOMEM;
    eng_names_setup(e->names, &budget, NULL, NULL, NULL, NULL);
    return 0;
}

void eng_named_backed(eng_engine *e, const eng_disk_params *p, eng_names_sync *sync, void *sync_ctx)
{
    eng_names_budget budget = {.ram_limit = e->params.cache_ram, .disk_limit = p->limit, .token_bytes = token_bytes(e)};
    eng_names_setup(e->names, &budget, p->now, p->now_ctx, sync, sync_ctx);
}

static void release(hold *all, int n)
{
    for (int i = 0; i < n; i++) {
        eng_segment_unref(all[i].last);
        eng_names_unref(all[i].context);
    }
    free(all);
}

void eng_named_close(eng_engine *e)
{
    if (e->holds)
        release(e->holds->all, e->holds->n);
    free(e->holds);
    eng_names_free(e->names);
    e->holds = NULL;
    e->names = NULL;
}

/* ---- memory ------------------------------------------------------------------------------------------------------ */

static eng_segment *find_in_memory(eng_engine *e, const eng_names_item *item, eng_names_ram *ret)
{
    eng_segment *last = eng_cache_peek(e->cache, &item->tokens);
    *ret = (eng_names_ram){.tokens = last ? (uint32_t)last->match : 0};
    for (const eng_segment *s = last; s; s = s->parent) {
        ret->bytes += eng_segment_bytes(s);
        ret->indexes += s->n >= ENG_INDEX_MIN_TOKENS;
        ret->indexes_ready += s->n >= ENG_INDEX_MIN_TOKENS && eng_segment_coded(s);
    }
    return last;
}

static uint32_t tried_before(const eng_holds *h, const eng_context *c)
{
    for (int i = 0; i < h->n; i++)
        if (h->all[i].context == c)
            return h->all[i].tried;
    return 0;
}

/* Reads what the disk has of a pinned context, once for each new state of it. */
static uint32_t warm(eng_engine *e, const eng_names_item *item, uint32_t have, const atomic_bool *stop)
{
    uint32_t on_disk, tried = tried_before(e->holds, item->context);
    uint64_t bytes;
    eng_disk_residence(e, &item->tokens, &on_disk, &bytes);
    if (on_disk < have + ENG_CACHE_MIN_PREFIX || on_disk == tried || (stop && atomic_load(stop)))
        return tried;
    eng_disk_warm(e, &item->tokens, have, stop);
    return on_disk;
}

/* Changes when names or the RAM tier do. */
static uint64_t state_of(const eng_engine *e)
{
    eng_cache_info info = eng_cache_info_get(e->cache);
    uint64_t parts[] = {eng_names_version(e->names), info.segments, info.evictions, info.bytes, info.index_bytes}, sum = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        sum = (sum ^ parts[i]) * 0x9e3779b97f4a7c15u;
    return sum;
}

static bool is_below(const eng_segment *s, const eng_segment *above)
{
    while (s && s != above)
        s = s->parent;
    return s;
}

static uint32_t end_in(const eng_prefix *p, const eng_segment *s)
{
    return s->start + s->n < p->n ? s->start + s->n : p->n;
}

/* Where the tokens that memory has of these end. NULL: it has none. */
static eng_segment *last_of(eng_segment *const *all, uint32_t n, const eng_prefix *p)
{
    eng_segment *last = NULL;
    for (uint32_t i = 0; i < n; i++)
        if (all[i]->start < p->n && eng_prefix_agrees(p, all[i]) && (!last || end_in(p, all[i]) > end_in(p, last)))
            last = all[i];
    return last;
}

static bool leads_on(eng_segment *const *all, uint32_t n, const eng_segment *s)
{
    for (uint32_t i = 0; i < n; i++)
        if (all[i]->parent == s)
            return true;
    return false;
}

/* Drops it with all that goes on from there, unless a name needs something of that. */
static bool drop_tree(eng_engine *e, const eng_segment *above)
{
    uint32_t n;
    eng_segment *const *all = eng_cache_segments(e->cache, &n);
    for (uint32_t i = 0; i < n; i++)
        if (is_below(all[i], above) && eng_names_need(e->names, all[i]))
            return false;
    for (uint32_t i = n; i-- > 0;) /* children first */
        if (is_below(all[i], above))
            eng_cache_drop(e->cache, all[i]);
    return true;
}

/* As on disk (context_store_remove.c). */
static void forget_in_memory(eng_engine *e, const eng_prefix *p)
{
    uint32_t n, end = 0;
    for (;;) {
        eng_segment *const *all = eng_cache_segments(e->cache, &n);
        const eng_segment *last = last_of(all, n, p);
        end = end || !last ? end : end_in(p, last);
        if (!last || (end_in(p, last) < end && leads_on(all, n, last)) || !drop_tree(e, last))
            return;
    }
}

void eng_named_forget(eng_engine *e)
{
    eng_context *c;
    if (e->in_session)
        return;
    while ((c = eng_names_next_left(e->names))) {
        eng_prefix p = eng_names_prefix(c);
        forget_in_memory(e, &p);
        eng_disk_forget(e, &p);
        eng_names_unref(c);
        eng_index_work_run(e->index_work, 0, NULL); /* lets go of what was just dropped */
        eng_publish(e);
    }
}

void eng_named_turn(eng_engine *e, const atomic_bool *stop)
{
    eng_holds *h = e->holds;
    eng_names_item *items;
    eng_named_forget(e);
    uint64_t state = state_of(e);
    if (state == h->seen)
        return;
    int n = eng_names_items(e->names, &items), n_pinned = 0;
    hold *all = n < 0 ? NULL : calloc((size_t)n + 1, sizeof *all);
    for (int i = 0; i < n && all; i++) {
        eng_names_ram ram;
        eng_segment *last = find_in_memory(e, &items[i], &ram);
        if (items[i].pinned) {
            hold *one = &all[n_pinned++];
            one->tried = warm(e, &items[i], ram.tokens, stop);
            last = find_in_memory(e, &items[i], &ram);
            one->last = last ? eng_segment_ref(last) : NULL;
            one->context = items[i].context;
        }
        eng_names_publish(items[i].context, &ram);
        if (!items[i].pinned)
            eng_names_unref(items[i].context);
    }
    if (n >= 0)
        free(items);
    if (!all)
        return; /* no memory: the next turn tries again */
    release(h->all, h->n);
    *h = (eng_holds){all, n_pinned, state_of(e)};
}

/* ---- for any thread ---------------------------------------------------------------------------------------------- */

int eng_context_make(eng_engine *e, const eng_context_params *p, eng_context **ret, char *err, size_t errlen)
{
    return eng_names_make(e->names, p, ret, err, errlen);
}

int eng_context_use(eng_engine *e, uint64_t tenant, const char *name, eng_context **ret)
{
    return eng_names_use(e->names, tenant, name, ret);
}

void eng_context_abandon(eng_engine *e, eng_context *c)
{
    eng_names_abandon(e->names, c);
}

int eng_context_alter(eng_engine *e, uint64_t tenant, const char *name, const eng_context_change *change, char *err, size_t errlen)
{
    return eng_names_alter(e->names, tenant, name, change, err, errlen);
}

int eng_context_remove(eng_engine *e, uint64_t tenant, const char *name)
{
    return eng_names_remove(e->names, tenant, name);
}

static void on_disk(void *ctx, const eng_prefix *p, uint32_t *ret_tokens, uint64_t *ret_bytes)
{
    eng_disk_residence(ctx, p, ret_tokens, ret_bytes);
}

int eng_context_list(eng_engine *e, uint64_t tenant, const char *name, eng_context_info **ret)
{
    return eng_names_list(e->names, tenant, name, on_disk, e, ret);
}

bool eng_contexts_tick(eng_engine *e)
{
    return eng_names_tick(e->names);
}
