/* The forward pass: prompt tokens in chunks through the prefill kernels, generated tokens one by one through the decode kernels. */
#ifndef RETRIEVALD_FORWARD_H
#define RETRIEVALD_FORWARD_H

#include "attention.h"
#include "capture.h"
#include "gpu_layers.h"
#include "linear.h"
#include "model.h"
#include "rope.h"

typedef struct eng_forward eng_forward;

typedef struct {
    const eng_model *model;
    const eng_kernels *kernels;
    eng_pool *pool;
    const eng_kv_shape *shape;
    const eng_rope *rope;
    uint32_t n_chunk;
    bool f32_activations;
    atomic_ullong *heartbeat;   /* raised once a layer */
} eng_forward_params;

int eng_forward_new(const eng_forward_params *p, eng_forward **ret);
void eng_forward_free(eng_forward *f);
size_t eng_forward_bytes(const eng_forward *f);
eng_attn *eng_forward_attention(eng_forward *f);

/* From now on fn sees the queries of every layer (capture.h). NULL: nobody. */
void eng_forward_watch(eng_forward *f, eng_queries_fn *fn, void *ctx);

/* From now on every key is stored with its head's part of `shift` [n_layer][n_head_kv][head_dim] added, which no softmax sees. NULL: as it is. Borrowed. */
void eng_forward_shift_keys(eng_forward *f, const float *shift);

/* From now on these layers are computed there; if they fail, by the CPU from then on, what they failed at too, and `lost` is told, once. NULL: all by the CPU. Borrowed. */
typedef void eng_lost_fn(void *ctx);
/* spare: what the engine thread does in a prefill while it waits for the GPU, a little at a time; layers [0, layers) have stored every token before position `end`. false: there is nothing. */
typedef bool eng_spare_fn(void *ctx, uint32_t layers, uint32_t end);
void eng_forward_use_gpu(eng_forward *f, eng_gpu *gpu, const eng_gpu_plan *plan, eng_lost_fn *lost, eng_spare_fn *spare, void *ctx);

/* Where sampled queries of a prefill go: positions are drawn one from each stratum of `stride` tokens counted from `from`. seg: NULL for none. */
typedef struct {
    eng_segment *seg;
    uint32_t from, stride;
} eng_query_sampling;

/* Strata whose drawn position lies below `end`: the number of queries kept once [from, end) is computed. */
uint32_t eng_query_count(const eng_query_sampling *s, uint32_t end);

/* Computes tokens [pos, pos + n) of a prompt, n <= n_chunk: writes their K and V to the view's segments (n of these is not changed). logits: NULL, or
 * [n_vocab] after the last token; all_logits: NULL, or [n][n_vocab]. -ECANCELED within a layer; -EBADMSG: rows of a
 * segment that is being read cannot be had. */
int eng_forward_prefill(eng_forward *f, const eng_view *view, const int32_t *ids, uint32_t pos, uint32_t n, const eng_query_sampling *sampling,
                        const atomic_bool *cancel, float *logits, float *all_logits);

/* Computes one generated token at `pos` (eng_attn_setup must have been called for the view) and the logits after it. */
int eng_forward_decode(eng_forward *f, const eng_view *view, int32_t id, uint32_t pos, const atomic_bool *cancel, float *logits);

#endif
