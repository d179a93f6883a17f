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

/* y[t][rows] = W x[t][cols] for n_tokens <= max_tokens, rows dense (stride rows and cols). A token's output has the same bits whatever n_tokens is. */
void eng_linear_prefill(eng_linear *l, const eng_weight *const *w, float *const *y, uint32_t n, const float *x, uint32_t n_tokens);

#endif
