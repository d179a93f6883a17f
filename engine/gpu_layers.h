/* The last layers of a model, on a GPU (design sections 4 and 11; arXiv 2409.10516 section 3): their weights and the window's keys and values are in its memory, all
 * keys and values in the host's segments. While the GPU attends the window, the pool attends the rest; both parts are merged on the GPU.
 *
 * Threads: the engine thread. Errors: as gpu.h, whose failures stick: after one nothing here computes any more, and what was asked for can be computed by the CPU,
 * since the segments have every key and value of the tokens before.
 */
#ifndef RETRIEVALD_GPU_LAYERS_H
#define RETRIEVALD_GPU_LAYERS_H

#include "attention.h"
#include "gpu.h"
#include "model.h"

/* What of each layer's keys and values the GPU keeps: those of the first tokens, and of the last. The delta's too, until it is sealed (session.c). */
enum { ENG_GPU_SINK = 128, ENG_GPU_LOCAL = 3072 };

typedef struct eng_gpu eng_gpu;

typedef struct {
    const eng_model *model;
    const eng_kernels *kernels;
    eng_pool *pool;
    const eng_kv_shape *shape;
    uint32_t n_chunk;
} eng_gpu_params;

typedef struct {
    uint32_t n_layer;               /* the last so many */
    bool output;                    /* and the embedding and the output */
    size_t weights, window, scratch; /* bytes; window: of keys and values */
} eng_gpu_plan;

/* How many layers go to a GPU with `free` bytes. wanted: ENG_GPU_AUTO: as many as there is room for; more than the model's layers: all and the output. -ENOTSUP: a model or
 * cache that the GPU has no kernels for; -ENOMEM: so many do not fit; the reason is in err. */
#define ENG_GPU_AUTO (-1)
int eng_gpu_plan_make(const eng_gpu_params *p, const gpu_info *info, int32_t wanted, eng_gpu_plan *ret, char *err, size_t errlen);

/* Copies the weights. The context is borrowed. -ENOMEM, or what gpu_status says. */
int eng_gpu_new(gpu_context *g, const eng_gpu_params *p, const eng_gpu_plan *plan, eng_gpu **ret);
void eng_gpu_free(eng_gpu *u); /* NULL is fine */

/* From now on every key has its head's part of `shift` [n_layer][n_head_kv][head_dim] added (forward.h). */
int eng_gpu_shift_keys(eng_gpu *u, const float *shift);

/* The queries [n][n_head][d], keys and values [n][n_head_kv][d] of a layer, rotated, on the engine thread: to be stored before this returns. */
typedef void eng_gpu_layer_fn(void *ctx, uint32_t layer, const float *q, const float *k, const float *v);

/* What a prefill's host side does while it waits for the GPU: a little (a tenth of a millisecond). false: there is nothing. */
typedef bool eng_gpu_spare_fn(void *ctx);

/* Tokens at positions [pos, pos + n). */
typedef struct {
    const eng_view *view;
    uint32_t pos, n;
    const int32_t *ids;             /* [n], where the plan has the embedding; else x */
    const float *x;                 /* [n][n_embd], as the layers before leave it */
    const float *cs, *cs_local;     /* [n][rope_dim] */
    eng_gpu_layer_fn *layer;
    eng_gpu_spare_fn *spare;        /* NULL: just waits */
    void *ctx;
    const atomic_bool *cancel;      /* NULL: none */
    atomic_ullong *heartbeat;
    float *logits, *all_logits;     /* where the plan has the output: NULL, or [n_vocab] of the last token, [n][n_vocab] */
    float *out;                     /* where it has not: [n][n_embd] */
} eng_gpu_run;

int eng_gpu_prefill(eng_gpu *u, const eng_gpu_run *run); /* n <= n_chunk. -ECANCELED, -EIO */
int eng_gpu_decode(eng_gpu *u, const eng_gpu_run *run, eng_attn *attn); /* n = 1, after eng_attn_step. Likewise */

#endif
