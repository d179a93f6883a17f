/* The engine's own struct, shared by engine.c and session.c. */
#ifndef RETRIEVALD_ENGINE_PRIVATE_H
#define RETRIEVALD_ENGINE_PRIVATE_H

#include "context_cache.h"
#include "context_names.h"
#include "forward.h"
#include "gpu_layers.h"
#include "index_work.h"
#include "tokenizer.h"

/* Written by the engine thread alone, read by any. */
typedef struct {
    atomic_ullong hits, misses, prompt_tokens, cached_tokens, predicted_tokens, keys_held, keys_attended;
    atomic_ullong prompt_ns, predicted_ns, index_ns;
    atomic_ullong heartbeat;
    atomic_ullong stops[ENG_MISS_COUNT]; /* of kept prefixes */
    atomic_ullong cache_bytes, index_bytes, segments, evictions, refusals, merges, index_pending;
} eng_counters;

typedef struct eng_disk eng_disk;
typedef struct eng_holds eng_holds;

struct eng_engine {
    eng_params params;
    eng_model *model;
    eng_tokenizer *tokenizer;
    const eng_kernels *kernels;
    eng_pool *pool;
    eng_forward *forward;
    eng_cache *cache;
    eng_index_work *index_work;
    eng_disk *disk;             /* NULL: no disk tier */
    eng_names *names;
    eng_holds *holds;           /* what of pinned contexts is held in memory */
    gpu_context *gpu;           /* NULL: none */
    eng_gpu *gpu_layers;        /* likewise */
    gpu_info gpu_info;
    eng_rope rope;
    uint32_t *window;           /* [n_layer]: shape.window */
    eng_kv_shape shape;
    unsigned wants;             /* what beside codes the keys of every session are to have, at most: ENG_WANT_... */
    float *key_shift;           /* what 8-bit keys are stored with (key_mean.h); NULL: other keys */
    eng_info info;
    char *chat_template;
    uint32_t n_pieces, n_settled; /* of the weights (gguf.h) */
    eng_counters counters;
    bool in_session;
};

void eng_log(const eng_engine *e, int level, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Brings the counters that mirror the cache and the index queue up to date. */
void eng_publish(eng_engine *e);

/* Until deadline_ns: moves weights to huge pages, then builds indexes and accounts for them. 1: there is more, 0: nothing to do. */
int eng_background(eng_engine *e, uint64_t deadline_ns, const atomic_bool *stop);
bool eng_background_pending(const eng_engine *e);

/* ---- contexts.c: the disk tier; each does nothing where there is none ---- */

/* A sealed segment is to be kept on disk: in the next turn after its codes are there. */
void eng_disk_keep(eng_engine *e, eng_segment *s);

/* Whether one waits to be kept; that it need not be any more. */
bool eng_disk_waits(const eng_engine *e, const eng_segment *s);
void eng_disk_leave(eng_engine *e, eng_segment *s);

/* Hands over what is ready, unless a session runs, and lets go of what was written. */
void eng_disk_turn(eng_engine *e);

void eng_disk_close(eng_engine *e);

/* Looks for a longer prefix than the `have` tokens of *io_view, which memory has. Returns its length; the view is that prefix's then, and *ret_read is how
 * many of its tokens were read from disk. *io_stop: where and why memory's stops; then where and why both do. wants: what beside codes is read of a context that
 * is larger than memory (ENG_WANT_...); of others, all that there is. */
uint32_t eng_disk_find(eng_engine *e, const eng_prefix *p, uint32_t have, unsigned wants, const atomic_bool *cancel, eng_view *io_view, uint32_t *ret_read,
                       eng_prefix_stop *io_stop);

/* What it found may still be being read: rows are there layer by layer (eng_segment_load_await), indexes and queries once this has waited for the rest. Returns why some rows
 * cannot be had, if so; what needs them is kept no more, and a prompt is looked for anew. v: that prefix's. Before the session ends. */
bool eng_disk_reading(const eng_engine *e);
eng_miss eng_disk_end_reading(eng_engine *e, const eng_view *v);

/* Merges the small segments at the end of one context (context_merge.c), unless a session runs. 1: it did, there may be more; 0: nothing to do. */
int eng_merge_turn(eng_engine *e, const atomic_bool *stop);

/* The file of a mapped segment failed under it: it is not used any more. */
void eng_disk_failed(eng_engine *e, const eng_segment *s);

/* A name has gone: what only it needed is not written, nor found on disk, any more. */
void eng_disk_forget(eng_engine *e, const eng_prefix *p);

/* Whether what would have gone on at `position` was evicted. */
bool eng_disk_evicted(eng_engine *e, const eng_prefix *p, uint32_t position);

/* Reads what is on disk beyond the first `have` tokens into the RAM tier, as far as it fits there. */
void eng_disk_warm(eng_engine *e, const eng_prefix *p, uint32_t have, const atomic_bool *stop);
void eng_disk_residence(const eng_engine *e, const eng_prefix *p, uint32_t *ret_tokens, uint64_t *ret_bytes);

/* ---- named_contexts.c ---- */

int eng_named_open(eng_engine *e); /* -ENOMEM */
void eng_named_close(eng_engine *e);

/* From now on names are written: there is a disk tier. */
void eng_named_backed(eng_engine *e, const eng_disk_params *p, eng_names_sync *sync, void *sync_ctx);

/* Before a look-up: lets go of what only names needed that have gone since, in memory and on the way to disk. */
void eng_named_forget(eng_engine *e);

/* Between sessions: holds in memory what pinned contexts have there, reads what they have on disk, and says what of all of them is in memory. */
void eng_named_turn(eng_engine *e, const atomic_bool *stop);

#endif
