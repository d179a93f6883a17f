/* The RAM tier of the context cache: a prefix tree of sealed segments, bounded in bytes, least recently used leaf first out.
 *
 * Belongs to the engine thread. A segment in the cache holds one reference; one that anybody else holds too (a session, a child; index
 * builds do not count) is in use and is not evicted.
 */
#ifndef RETRIEVALD_CONTEXT_CACHE_H
#define RETRIEVALD_CONTEXT_CACHE_H

#include "segment.h"

enum { ENG_CACHE_MIN_PREFIX = 64 }; /* tokens: a shorter common prefix is not worth a segment border */

typedef struct eng_cache eng_cache;

int eng_cache_new(size_t limit, eng_cache **ret);
void eng_cache_free(eng_cache *c);

/* Longest prefix of ids[0..n) that is kept for the tenant, at least ENG_CACHE_MIN_PREFIX long, as spans put into the empty *view (which takes references). Token ids are compared, nothing
 * is hashed. exact_only: leaves out what decode kernels computed. Returns its length (0: none) or -ENOMEM. */
int64_t eng_cache_find(eng_cache *c, uint64_t tenant, const int32_t *ids, uint32_t n, bool exact_only, eng_view *view);

/* Evicts until `bytes` more would fit beside what is kept; in-use segments stay. Returns whether they fit. */
bool eng_cache_make_room(eng_cache *c, size_t bytes);

/* Keeps a sealed segment whose parent (if any) is kept. False when it does not fit, even after evicting. */
bool eng_cache_insert(eng_cache *c, eng_segment *s);

/* The kept segment of this id. NULL: none. */
eng_segment *eng_cache_get(const eng_cache *c, const eng_segment_id *id);

/* Recounts a segment whose index grew; evicts others if that went over the limit. */
void eng_cache_recount(eng_cache *c);

typedef struct {
    size_t bytes, index_bytes, limit;
    uint32_t segments;
    uint64_t evictions;
} eng_cache_info;

eng_cache_info eng_cache_info_get(const eng_cache *c);

#endif
