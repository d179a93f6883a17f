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

/* Wants codes for a segment that is being filled, of which there is one at a time: they are built as far as its rows are there, and have the same bytes as if all had been.
 * eng_index_work_rows: its layers [0, layers) have all rows before position `end`, and what is known of these tokens' queries; they stay as they are. When it is sealed it is added as above.
 * eng_index_work_drop: it will not be, or its rows have changed; what was built goes. Without such a segment the two do nothing. */
int eng_index_work_begin(eng_index_work *w, eng_segment *s);
void eng_index_work_rows(eng_index_work *w, uint32_t layers, uint32_t end);
void eng_index_work_drop(eng_index_work *w);

/* Builds until deadline_ns (CLOCK_MONOTONIC) or until *stop. 1: there is more to do, 0: nothing that can be done now. */
int eng_index_work_run(eng_index_work *w, uint64_t deadline_ns, const atomic_bool *stop);

uint32_t eng_index_work_pending(const eng_index_work *w);  /* indexes */
double eng_index_work_seconds(const eng_index_work *w);    /* CPU time spent so far */

#endif
