#include "prefix.h"

#include <string.h>
#include <xxhash.h>

/* So many tokens tell a segment from others that begin at the same place. */
enum { TOLD_BY = ENG_CACHE_MIN_PREFIX };

bool eng_prefix_agrees(const eng_prefix *p, const eng_segment *s)
{
    if (s->tenant != p->tenant)
        return false;
    for (uint32_t end = s->start + s->n; s; end = s->start, s = s->parent) {
        uint32_t most = end < p->n ? end : p->n;
        if (most > s->start && memcmp(s->ids, p->ids + s->start, (size_t)(most - s->start) * sizeof *s->ids) != 0)
            return false;
    }
    return true;
}

void eng_evicted_add(eng_evicted *l, uint64_t tenant, uint32_t start, const int32_t *ids, uint32_t n)
{
    uint32_t told = n < TOLD_BY ? n : TOLD_BY, at = l->next++ % (sizeof l->last / sizeof *l->last);
    l->last[at].tenant = tenant;
    l->last[at].hash = XXH3_64bits(ids, told * sizeof *ids);
    l->last[at].start = start;
    l->last[at].n = told;
}

bool eng_evicted_has(const eng_evicted *l, const eng_prefix *p, uint32_t position)
{
    for (uint32_t i = 0; i < sizeof l->last / sizeof *l->last; i++) {
        uint32_t start = l->last[i].start, n = l->last[i].n;
        if (n && l->last[i].tenant == p->tenant && start <= position && position < start + n && start + n <= p->n &&
            XXH3_64bits(p->ids + start, n * sizeof *p->ids) == l->last[i].hash)
            return true;
    }
    return false;
}
