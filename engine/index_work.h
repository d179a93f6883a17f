/* Index builds as pool work (design section 3): for each layer and KV head of a sealed segment codes, and then, from the segment's sampled queries, the kinds that
 * it wants. Codes come first, of all segments: they are cheap, and an estimate waits for all of a segment's.
 *
 * Belongs to the engine thread. Each pool worker steps a build of its own, so that builds scale over workers without sharing anything; a build can be
 * left at any time and goes on later. A finished index is stored into its segment between steps, so a step sees what it saw at its start.
 */
#ifndef RETRIEVALD_INDEX_WORK_H
#define RETRIEVALD_INDEX_WORK_H

#include "pool.h"
#include "segment.h"

enum { ENG_INDEX_MIN_TOKENS = 1024 }; /* shorter segments get none: it would not pay */

typedef struct eng_index_work eng_index_work;

int eng_index_work_new(eng_pool *pool, eng_index_work **ret);
void eng_index_work_free(eng_index_work *w);

/* Wants indexes for a sealed segment. Takes a reference until they are built. Too short a segment: nothing to do. -ENOMEM. */
int eng_index_work_add(eng_index_work *w, eng_segment *s);

/* Builds until deadline_ns (CLOCK_MONOTONIC) or until *stop. 1: there is more to do, 0: nothing left. */
int eng_index_work_run(eng_index_work *w, uint64_t deadline_ns, const atomic_bool *stop);

uint32_t eng_index_work_pending(const eng_index_work *w);  /* indexes */
double eng_index_work_seconds(const eng_index_work *w);    /* CPU time spent so far */

#endif
