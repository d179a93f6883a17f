/* The disk tier of the context cache (design sections 3, 5 and 7).
 *
 * Threads: a store thread, of low priority, writes and removes files and is the only user of the SQLite connection; the engine thread queues
 * segments and reads files itself, with the pool. Between them stands the mirror, under one lock that is held for look-ups and short changes,
 * never for input or output, and never on the decode path. Reference counts of segments are the engine thread's alone: it takes one when it queues a
 * segment and gives it back when it collects what the store thread is done with.
 */
#ifndef RETRIEVALD_CONTEXT_STORE_H
#define RETRIEVALD_CONTEXT_STORE_H

#include "context_names.h"
#include "prefix.h"
#include "segment_file.h"

typedef struct eng_store eng_store;

typedef struct {
    eng_disk_params disk;
    eng_segment_owner owner;
    eng_names *names;     /* NULL: none. Filled from the catalog */
    const eng_pool *pool; /* whose maker opens the store: its cores are not the store thread's only ones */
    void (*log)(void *ctx, int level, const char *text); /* from both threads; NULL: silent */
    void *log_ctx;
} eng_store_params;

/* Sweeps the folder, makes the catalog and the files agree, and starts the thread. */
int eng_store_open(const eng_store_params *p, eng_store **ret, char *err, size_t errlen);

/* Writes what is queued first. */
void eng_store_close(eng_store *s);

/* Queues a sealed segment (n == cap), and those before it, as far as they are not on disk or queued; all get their ids. -ENOMEM. */
int eng_store_save(eng_store *s, eng_segment *seg);

/* Gives back segments that the store thread is done with. */
void eng_store_collect(eng_store *s);

/* Waits until nothing is queued, and collects. */
void eng_store_flush(eng_store *s);

/* A kept prefix, as its segments. */
typedef struct {
    eng_segment_id id;
    uint32_t start;
} eng_store_link;

typedef struct {
    eng_store_link *links;
    uint32_t n;
    uint32_t length; /* tokens of the prompt that they cover */
} eng_store_chain;

/* The longest prefix on disk, if it goes at least ENG_CACHE_MIN_PREFIX tokens beyond `have` and is worth reading. ENG_MISS_NONE: found; free
 * ret->links. *ret_stop: where and why it ends, always. */
eng_miss eng_store_find(eng_store *s, const eng_prefix *p, uint32_t have, eng_store_chain *ret, eng_prefix_stop *ret_stop);

/* Whether what would have gone on at `position` was evicted. */
bool eng_store_evicted(eng_store *s, const eng_prefix *p, uint32_t position);

/* Reads one of them behind the caller's back (segment_file.h); what was begun is ended. A file that cannot be used is then logged, counted and removed with what continues it, so
 * those that are read below it are ended before it (one that cannot be read is only left alone). *ret_rows: its keys and values are right, whatever else is not. */
typedef struct eng_store_load eng_store_load;
eng_miss eng_store_load_begin(eng_store *s, const eng_segment_id *id, const eng_segment_reader *reader, eng_segment *parent, eng_store_load **ret, eng_segment **ret_seg);
eng_miss eng_store_load_end(eng_store *s, eng_store_load *l, bool *ret_rows);

/* Bytes of memory that one takes, and what it is worth. */
size_t eng_store_size(eng_store *s, const eng_segment_id *id, size_t *ret_beside, uint64_t *ret_worth);

/* Names, from any thread: has the catalog brought up to date, before what else is queued; wait: until it is. */
void eng_store_sync_names(eng_store *s, bool wait);

/* A name has gone, and memory has let go of its tokens: what no other name needs of them, and of what goes on from there, is not found any more, nor written. */
void eng_store_forget_tokens(eng_store *s, const eng_prefix *p);

/* What of these tokens prompts would find. */
void eng_store_residence(eng_store *s, const eng_prefix *p, uint32_t *ret_tokens, uint64_t *ret_bytes);

/* A file failed later, while its mapping was in use. */
void eng_store_failed(eng_store *s, const eng_segment_id *id);

/* Counts a request. */
void eng_store_count_hit(eng_store *s);
void eng_store_count_miss(eng_store *s, eng_miss why);

void eng_store_stats(eng_store *s, eng_disk_stats *ret); /* any thread */

#endif
