/* Look-ups of kept prefixes: what is wanted, where what is kept stops to agree with it, and what had to go not long ago. */
#ifndef RETRIEVALD_PREFIX_H
#define RETRIEVALD_PREFIX_H

#include "contexts.h"
#include "segment.h"

enum { ENG_CACHE_MIN_PREFIX = 64 }; /* tokens: a shorter common prefix is not worth a segment border */

/* The longest kept prefix of ids[0, n), of this tenant's contexts. exact_only: nothing that decode kernels computed. */
typedef struct {
    uint64_t tenant;
    const int32_t *ids;
    uint32_t n;
    bool exact_only;
} eng_prefix;

/* What a tier has: `match` tokens agree; the segment that the last of them is in ends at `end`. 0, 0: nothing. */
static inline eng_prefix_stop eng_prefix_stop_at(const eng_prefix *p, uint32_t match, uint32_t end)
{
    eng_miss why = match < end ? ENG_MISS_DIFFERS : ENG_MISS_END;
    if (match < ENG_CACHE_MIN_PREFIX)
        why = ENG_MISS_ABSENT;
    return (eng_prefix_stop){match, match == p->n ? ENG_MISS_NONE : why};
}

/* Whether the tokens up to the segment's end are the prefix's, as far as both go. */
bool eng_prefix_agrees(const eng_prefix *p, const eng_segment *s);

/* The last segments that were evicted, by their first tokens. All zero: none. */
typedef struct {
    struct {
        uint64_t tenant, hash;
        uint32_t start, n;
    } last[256];
    uint32_t next;
} eng_evicted;

void eng_evicted_add(eng_evicted *l, uint64_t tenant, uint32_t start, const int32_t *ids, uint32_t n);

/* Whether one of them would have gone on where a look-up stopped. */
bool eng_evicted_has(const eng_evicted *l, const eng_prefix *p, uint32_t position);

#endif
