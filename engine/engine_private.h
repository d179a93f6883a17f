/* The engine's own struct, shared by engine.c and session.c. */
#ifndef RETRIEVALD_ENGINE_PRIVATE_H
#define RETRIEVALD_ENGINE_PRIVATE_H

#include "context_cache.h"
#include "forward.h"
#include "gpu.h"
#include "index_work.h"
#include "tokenizer.h"

/* Written by the engine thread alone, read by any. */
typedef struct {
    atomic_ullong hits, misses, prompt_tokens, cached_tokens, predicted_tokens, keys_held, keys_attended;
    atomic_ullong prompt_ns, predicted_ns, index_ns;
    atomic_ullong heartbeat;
    atomic_ullong cache_bytes, index_bytes, segments, evictions, index_pending;
} eng_counters;

struct eng_engine {
    eng_params params;
    eng_model *model;
    eng_tokenizer *tokenizer;
    const eng_kernels *kernels;
    eng_pool *pool;
    eng_forward *forward;
    eng_cache *cache;
    eng_index_work *index_work;
    gpu_context *gpu;           /* NULL: none */
    eng_rope rope;
    uint32_t *window;           /* [n_layer]: shape.window */
    eng_kv_shape shape;
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

#endif
