/* y = W x over the pool: for one token at decode speed, for many at prefill speed. */
#ifndef RETRIEVALD_LINEAR_H
#define RETRIEVALD_LINEAR_H

#include "kernels.h"
#include "model.h"
#include "pool.h"

/* Scratch for the products of one model: panels and temporaries per worker, one set of quantised activations. */
typedef struct eng_linear eng_linear;

/* max_cols: longest row of any weight; max_tokens: most tokens of a prefill chunk. f32: float32 activations in decode and prefill. */
int eng_linear_new(eng_pool *pool, const eng_kernels *k, uint32_t max_cols, uint32_t max_tokens, bool f32, eng_linear **ret);
void eng_linear_free(eng_linear *l);
size_t eng_linear_bytes(const eng_linear *l);

/* Up to 3 weights that read the same input x [cols] (q, k, v; gate, up): y[i] = W[i] x. One pool job. */
void eng_linear_decode(eng_linear *l, const eng_weight *const *w, float *const *y, uint32_t n, const float *x);

/* ---- prefill: n_tokens <= max_tokens at a time. A token's output has the same bits whatever n_tokens is. -------------- */

/* The input x at token t of the next product, which is with these weights. For tasks of the pool, each token once, so that who makes a row puts
 * it where the kernels read it. */
void eng_linear_input(eng_linear *l, const eng_weight *const *w, uint32_t n, uint32_t t, const float *x);

/* y[i][t] = W[i] x[t] for up to 3 weights; x, y dense (strides cols and rows). x NULL here and below: the input is set. */
void eng_linear_prefill(eng_linear *l, const eng_weight *const *w, float *const *y, uint32_t n, const float *x, uint32_t n_tokens);
/* y[t] += W x[t] */
void eng_linear_prefill_add(eng_linear *l, const eng_weight *w, float *y, const float *x, uint32_t n_tokens);
/* fn(gate x[t], up x[t]) becomes the input of the next product, which is with `down`. */
typedef void eng_gate_fn(float *out, const float *gate, const float *up, size_t n); /* silu_mul, gelu_mul */
void eng_linear_prefill_gated(eng_linear *l, const eng_weight *gate, const eng_weight *up, const eng_weight *down, eng_gate_fn *fn, const float *x,
                              uint32_t n_tokens);

#endif
