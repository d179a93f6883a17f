#include "context_mirror.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void entry_free(eng_mirror_entry *e)
{
    if (e)
        free(e->ids);
    free(e);
}

void eng_mirror_done(eng_mirror *m)
{
    for (uint32_t i = 0; i < m->n; i++)
        entry_free(m->entries[i]);
    free(m->entries);
    *m = (eng_mirror){0};
}

eng_mirror_entry *eng_mirror_get(const eng_mirror *m, const eng_segment_id *id)
{
    for (uint32_t i = 0; i < m->n; i++)
        if (eng_segment_id_equal(&m->entries[i]->head.id, id))
            return m->entries[i];
    return NULL;
}

static bool same_owner(const eng_segment_head *a, const eng_segment_head *b)
{
    return a->tenant == b->tenant && a->fingerprint == b->fingerprint && a->n_layer == b->n_layer && a->n_head_kv == b->n_head_kv &&
           a->head_dim == b->head_dim && a->type_k == b->type_k && a->type_v == b->type_v;
}

/* Whether `id` is that of the tokens before `h`, which are its ancestors', and its own. */
static int check_id(const eng_segment_head *h, const int32_t *ids, const eng_mirror_entry *parent)
{
    int32_t *all = malloc(((size_t)h->start + h->n) * sizeof *all);
    if (!all)
        return -ENOMEM;
    memcpy(all + h->start, ids, (size_t)h->n * sizeof *ids);
    uint32_t end = h->start;
    for (const eng_mirror_entry *e = parent; e; end = e->head.start, e = e->parent)
        memcpy(all + e->head.start, e->ids, (size_t)(end - e->head.start) * sizeof *ids);
    eng_segment_id id = eng_segment_id_of(h, all);
    free(all);
    return eng_segment_id_equal(&id, &h->id) ? 0 : -EBADMSG;
}

/* Whether e can be what h continues. */
static int check_parent(const eng_segment_head *h, const int32_t *ids, const eng_mirror_entry *e)
{
    bool fits = h->start > e->head.start && h->start - e->head.start <= e->head.n && same_owner(h, &e->head) && (e->head.exact || !h->exact);
    return fits ? check_id(h, ids, e) : -EBADMSG;
}

static int check_place(const eng_mirror *m, const eng_catalog_row *row, eng_mirror_entry **ret_parent)
{
    static const eng_segment_id none;
    const eng_segment_head *h = &row->head;
    if (eng_mirror_get(m, &h->id))
        return -EEXIST;
    if (eng_segment_id_equal(&h->parent, &none))
        return h->start ? -EBADMSG : check_id(h, row->ids, NULL);
    eng_mirror_entry *parent = eng_mirror_get(m, &h->parent);
    int r = parent ? check_parent(h, row->ids, parent) : -ENOENT;
    for (uint32_t i = 0; i < m->n && !parent && r != 0; i++)
        if ((r = check_parent(h, row->ids, m->entries[i])) == 0)
            *ret_parent = m->entries[i];
        else if (r != -ENOMEM)
            r = -ENOENT;
    if (parent)
        *ret_parent = parent;
    return r;
}

static bool is_ours(const eng_segment_head *h, const eng_segment_owner *o)
{
    return h->fingerprint == o->fingerprint && h->n_layer == o->shape->n_layer && h->n_head_kv == o->shape->n_head_kv &&
           h->head_dim == o->shape->head_dim && h->type_k == o->shape->type_k && h->type_v == o->shape->type_v;
}

int eng_mirror_add(eng_mirror *m, const eng_catalog_row *row, const eng_segment_owner *owner, eng_mirror_entry **ret)
{
    eng_mirror_entry *parent = NULL, *e;
    int r = check_place(m, row, &parent);
    if (r < 0)
        return r;
    if (m->n == m->cap) {
        uint32_t cap = m->cap ? 2 * m->cap : 64;
        eng_mirror_entry **p = realloc(m->entries, cap * sizeof *p);
        if (!p)
            return -ENOMEM;
        m->entries = p;
        m->cap = cap;
    }
    e = calloc(1, sizeof *e);
    if (!e || !(e->ids = malloc((size_t)row->head.n * sizeof *e->ids))) {
        entry_free(e);
        return -ENOMEM;
    }
    memcpy(e->ids, row->ids, (size_t)row->head.n * sizeof *e->ids);
    e->head = row->head;
    e->parent = parent;
    e->ours = is_ours(&row->head, owner);
    e->used = row->used;
    e->hits = row->hits;
    e->worth = eng_worth_used(0, e->head.start + e->head.n);
    if (e->used > m->clock)
        m->clock = e->used;
    if (parent)
        parent->children++;
    m->entries[m->n++] = e;
    m->bytes += e->head.bytes;
    *ret = e;
    return 0;
}

static int by_start(const void *a, const void *b)
{
    const eng_mirror_entry *x = *(eng_mirror_entry *const *)a, *y = *(eng_mirror_entry *const *)b;
    return (x->head.start > y->head.start) - (x->head.start < y->head.start);
}

void eng_mirror_adopt(eng_mirror *m, eng_mirror_entry *e, eng_mirror_entry *old)
{
    for (uint32_t i = 0; i < m->n; i++)
        if (m->entries[i]->parent == old && m->entries[i]->head.start > e->head.start && m->entries[i] != e) {
            m->entries[i]->parent = e;
            e->children++;
            old->children--;
        }
    qsort(m->entries, m->n, sizeof *m->entries, by_start); /* a parent starts before its children */
}

void eng_mirror_remove(eng_mirror *m, eng_mirror_entry *e)
{
    uint32_t i = 0;
    while (m->entries[i] != e)
        i++;
    memmove(m->entries + i, m->entries + i + 1, (m->n - i - 1) * sizeof *m->entries);
    m->n--;
    m->bytes -= e->head.bytes;
    if (e->parent)
        e->parent->children--;
    entry_free(e);
}

static uint32_t common(const int32_t *a, const int32_t *b, uint32_t n)
{
    uint32_t i = 0;
    while (i < n && a[i] == b[i])
        i++;
    return i;
}

static eng_mirror_entry *longest(eng_mirror *m, const eng_prefix *p)
{
    eng_mirror_entry *best = NULL;
    for (uint32_t i = 0; i < m->n; i++) {
        eng_mirror_entry *e = m->entries[i];
        uint32_t start = e->head.start, left = p->n > start ? p->n - start : 0, most = e->head.n < left ? e->head.n : left;
        e->match = -1;
        if (!e->ours || e->unusable || e->head.tenant != p->tenant || (e->parent && e->parent->match < (int64_t)start) || start > p->n ||
            (p->exact_only && !e->head.exact))
            continue;
        e->match = (int64_t)start + common(e->ids, p->ids + start, most);
        if (!best || e->match > best->match || (e->match == best->match && e->head.exact && !best->head.exact))
            best = e;
    }
    return best;
}

eng_mirror_entry *eng_mirror_find(eng_mirror *m, const eng_prefix *p, eng_prefix_stop *ret)
{
    eng_prefix any = *p;
    any.exact_only = false;
    eng_mirror_entry *most = p->exact_only ? longest(m, &any) : NULL;
    int64_t most_match = most ? most->match : 0;
    eng_mirror_entry *best = longest(m, p);
    int64_t match = best ? best->match : 0;
    *ret = eng_prefix_stop_at(p, (uint32_t)match, best ? best->head.start + best->head.n : 0);
    if (most_match > match && most_match >= ENG_CACHE_MIN_PREFIX)
        ret->why = ENG_MISS_INEXACT;
    if (match < ENG_CACHE_MIN_PREFIX)
        return NULL;
    m->clock++;
    for (eng_mirror_entry *e = best; e; e = e->parent) {
        e->used = m->clock;
        e->touched = true;
        e->worth = eng_worth_used(e->worth, e->head.start + e->head.n);
    }
    best->hits++;
    return best;
}

void eng_mirror_trace(eng_mirror *m, const eng_prefix *p)
{
    for (uint32_t i = 0; i < m->n; i++) {
        eng_mirror_entry *e = m->entries[i];
        uint32_t start = e->head.start, end = start + e->head.n < p->n ? start + e->head.n : p->n;
        e->match = -1;
        e->path = false;
        if (e->head.tenant != p->tenant || start >= p->n || (e->parent && e->parent->match < (int64_t)start))
            continue;
        e->match = (int64_t)start + common(e->ids, p->ids + start, end - start);
        e->path = e->match == end;
    }
    for (uint32_t i = m->n; i-- > 0;) { /* children first */
        eng_mirror_entry *e = m->entries[i];
        if (e->path && e->parent)
            e->parent->path = true;
    }
}

bool eng_mirror_ends(const eng_mirror_entry *e, const eng_prefix *p)
{
    uint64_t end = (uint64_t)e->head.start + e->head.n;
    return e->match == (int64_t)(end < p->n ? end : p->n);
}

static bool is_below(const eng_mirror_entry *e, const eng_mirror_entry *above)
{
    while (e && e != above)
        e = e->parent;
    return e;
}

bool eng_mirror_condemn(eng_mirror *m, eng_mirror_entry *e)
{
    for (uint32_t i = 0; i < m->n; i++)
        if ((m->entries[i]->named || m->entries[i]->pins) && is_below(m->entries[i], e))
            return false;
    for (uint32_t i = 0; i < m->n; i++)
        m->entries[i]->unusable = m->entries[i]->unusable || is_below(m->entries[i], e);
    return true;
}

/* The entries, in worth.h's terms. NULL: no memory. */
static eng_kept *list_kept(const eng_mirror *m)
{
    eng_kept *kept = calloc(m->n + 1, sizeof *kept);
    for (uint32_t i = 0; i < m->n && kept; i++) {
        eng_mirror_entry *e = m->entries[i];
        e->number = i;
        kept[i] = (eng_kept){.bytes = e->head.bytes, .worth = e->worth, .used = e->used, .guest = e->guest, .holds = e->children + e->pins + e->named,
                             .parent = e->parent ? e->parent->number : ENG_KEPT_ROOT};
    }
    return kept;
}

int64_t eng_mirror_choose(eng_mirror *m, eng_room *r, eng_mirror_entry ***ret)
{
    if (eng_worth_turn(&m->offered, r->bytes, r->limit))
        for (uint32_t i = 0; i < m->n; i++)
            m->entries[i]->worth /= 2;
    eng_kept *kept = list_kept(m);
    uint32_t *numbers = calloc(m->n + 1, sizeof *numbers);
    eng_mirror_entry **victims = calloc(m->n + 1, sizeof *victims);
    int64_t n = -ENOMEM;
    if (kept && numbers && victims) {
        n = eng_worth_choose(r, kept, m->n, numbers);
        n = n < 0 ? -ENOSPC : n;
    }
    for (int64_t i = 0; i < n; i++)
        victims[i] = m->entries[numbers[i]];
    free(numbers);
    free(kept);
    if (n < 0)
        free(victims);
    else
        *ret = victims;
    return n;
}

eng_mirror_entry *eng_mirror_leaf(const eng_mirror *m, eng_mirror_entry *e)
{
    for (uint32_t i = m->n; i-- > 0 && e->children;)
        if (m->entries[i]->parent == e) {
            e = m->entries[i];
            i = m->n;
        }
    return e;
}
