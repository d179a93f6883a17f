/* Attention over a session's view: causal and dense for prefill; window + retrieved for decoding (arXiv 2409.10516 section 3).
 *
 * The one place of the engine that knows the index and, in time, the GPU. Every part of an attention yields (o, m, l): m the maximum score,
 * l the sum of exp(score - m), o the sum of exp(score - m) v. Merging such parts is exact in any grouping; here it happens in one fixed order, over
 * parts cut at fixed absolute positions, so that the result's bits do not depend on how a context is cut into segments, chunks or threads.
 */
#ifndef RETRIEVALD_ATTENTION_H
#define RETRIEVALD_ATTENTION_H

#include "cost.h"
#include "kernels.h"
#include "pool.h"
#include "segment.h"

/* One part for one query head; l == 0: empty, its m and o are not looked at. */
typedef struct {
    float m, l;
    const float *o; /* [d] */
} eng_partial;

/* out[d] = softmax-weighted mean over all keys of the parts. All empty: zeros. */
void eng_partial_merge(float *out, const eng_partial *parts, uint32_t n, uint32_t d);

typedef struct eng_attn eng_attn;

/* f32: prefill in float32 where it would be bf16. */
int eng_attn_new(eng_pool *pool, const eng_kernels *k, const eng_kv_shape *shape, uint32_t n_chunk, bool f32, eng_attn **ret);
void eng_attn_free(eng_attn *a);
size_t eng_attn_bytes(const eng_attn *a);

/* out[t] = full causal attention of token pos0 + t, for t < n_tokens <= n_chunk; keys and values up to there are in the view.
 * q, out: [n_tokens][n_head][d]. */
void eng_attn_prefill(eng_attn *a, const eng_view *view, uint32_t layer, const float *q, uint32_t pos0, uint32_t n_tokens, float *out);

/* What decoding attended to, summed over layers and query heads since eng_attn_new. */
typedef struct {
    uint64_t attended;
    uint64_t dense;             /* of these, read for a whole group at once: summed over layers and KV heads */
    uint64_t retrieved;         /* of these, found by a search */
    uint64_t estimated;         /* not read, but in the estimate. attended + estimated: every key that the policy answers for, each once */
    uint64_t probed;            /* keys or codes that searches scored: summed over layers and KV heads, once for a group */
    uint32_t n_graph, n_cluster, n_flat; /* searches: by graph; by lists (cluster, ivf); by scan */
} eng_attn_counts;

/* What auto chooses by, from the next step on; eng_cost_default() until then. */
void eng_attn_use_cost(eng_attn *a, const eng_cost *c);

/* What decoding with this policy may search beside codes, in a context of max_keys keys: ENG_WANT_... bits. Only then is it worth building. */
unsigned eng_attn_wants(const eng_attn *a, const eng_attention *policy, uint32_t max_keys);

/* Prepares decoding with this policy for a view of up to max_keys keys of which the last (delta_cap) may be unsealed. To be called
 * again when the view's spans change. -ENOMEM. */
int eng_attn_setup(eng_attn *a, const eng_attention *policy, const eng_view *view, uint32_t max_keys, uint32_t delta_cap);

/* Begins the step whose query sees n_keys keys; the last span is the delta. Then per layer: q, out: [n_head][d]. */
void eng_attn_step(eng_attn *a, const eng_view *view, uint32_t n_keys);
void eng_attn_decode(eng_attn *a, const eng_view *view, uint32_t layer, const float *q, float *out);

/* The same where somebody else (the GPU) has the keys of positions [0, sink) and [local, n_keys) and attends them at the same time. eng_attn_share begins the layer: of
 * these, which ones the step at hand reads densely in it, and whether it reads any others. Those are left to eng_attn_decode_rest, as one part a query head: m, l [n_head],
 * o [n_head][d]; q as above. A layer without is counted by eng_attn_count_window. */
bool eng_attn_share(eng_attn *a, uint32_t layer, uint32_t *io_sink, uint32_t *io_local);
void eng_attn_count_window(eng_attn *a);
void eng_attn_decode_rest(eng_attn *a, const eng_view *view, uint32_t layer, const float *q, float *m, float *l, float *o);

const eng_attn_counts *eng_attn_counted(const eng_attn *a);

#endif
