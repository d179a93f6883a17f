/* The RAM tier of the context cache: a prefix tree of sealed segments, bounded in bytes; worth.h says what goes for what.
 *
 * Where there is no disk tier that would give it back, a segment for which there is no room in whole is kept as far as there is: a copy of its first tokens stands for
 * it, whether it is to go or to come. So two contexts that alternate under a budget for one and a half both go on from a part.
 *
 * Belongs to the engine thread. A segment in the cache holds one reference; one that anybody else holds too (a session, a child; index
 * builds do not count) is in use and is not evicted.
 */
#ifndef RETRIEVALD_CONTEXT_CACHE_H
#define RETRIEVALD_CONTEXT_CACHE_H

#include "prefix.h"
#include "segment.h"

typedef struct eng_cache eng_cache;

int eng_cache_new(size_t limit, eng_cache **ret);
void eng_cache_free(eng_cache *c);

/* From now on segments are kept in part where they do not fit; cut(ctx, s) hears of each copy, which wants an index. NULL: whole ones only. */
void eng_cache_keep_parts(eng_cache *c, void (*cut)(void *ctx, eng_segment *s), void *ctx);

/* What is kept of the prefix, if that is ENG_CACHE_MIN_PREFIX tokens at least, as spans put into the empty *view (which takes references). Token ids are
 * compared, nothing is hashed. Returns its length (0: none) or -ENOMEM. */
int64_t eng_cache_find(eng_cache *c, const eng_prefix *p, eng_view *view, eng_prefix_stop *ret);

/* Whether what would have gone on at `position` was evicted. */
bool eng_cache_evicted(const eng_cache *c, const eng_prefix *p, uint32_t position);

/* The segment where that prefix ends, after `match` tokens; it does not count as a use. NULL: none. */
eng_segment *eng_cache_peek(eng_cache *c, const eng_prefix *p);

/* Evicts, as far as `claim` (worth.h) lets it, what is in the way of `bytes` more; nothing, if they would not fit even so. Whether they fit. */
bool eng_cache_make_room(eng_cache *c, size_t bytes, uint64_t claim);

/* Keeps a sealed segment whose parent (if any) is kept. False when there is no room for it, or only what is worth more would make it (a part may be kept all the same). One
 * that was kept on disk has its worth already. */
bool eng_cache_insert(eng_cache *c, eng_segment *s);

/* The kept segment of this id. NULL: none. */
eng_segment *eng_cache_get(const eng_cache *c, const eng_segment_id *id);

/* What is kept, parents before their children; good until the next change. */
eng_segment *const *eng_cache_segments(const eng_cache *c, uint32_t *ret_n);

/* Keeps it no more, after all kept that continues it; whoever else holds it goes on. */
void eng_cache_drop(eng_cache *c, eng_segment *s);

/* Keeps `merged` in the place of n segments of a chain, first one first, which nothing else holds; what continues the last of them continues it. */
void eng_cache_replace(eng_cache *c, eng_segment *const *parts, uint32_t n, eng_segment *merged);

/* Recounts a segment whose index grew; evicts others if that went over the limit. */
void eng_cache_recount(eng_cache *c);

typedef struct {
    size_t bytes, index_bytes, limit;
    uint32_t segments;
    uint64_t evictions, refusals; /* also in part */
} eng_cache_info;

eng_cache_info eng_cache_info_get(const eng_cache *c);

#endif
