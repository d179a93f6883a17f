/* A mixture of experts in place of a layer's FFN (Qwen3 MoE): a softmax over all experts picks the best few of each token, and their
 * outputs are summed by normalised weights. */
#ifndef RETRIEVALD_MOE_H
#define RETRIEVALD_MOE_H

#include "linear.h"

typedef struct eng_moe eng_moe;

/* For a model with experts; n_chunk: most tokens at a time. Borrows all of its arguments. */
int eng_moe_new(const eng_model *m, const eng_kernels *k, eng_pool *pool, eng_linear *l, uint32_t n_chunk, eng_moe **ret);
void eng_moe_free(eng_moe *moe);
size_t eng_moe_bytes(const eng_moe *moe);

/* h [n][n_embd]: normed input on entry, output on return. decode: n is 1, and the decode kernels are used. A token's output has the same
 * bits whatever the other tokens are: it is routed by itself in float32, and its experts are summed in the order of their numbers. */
void eng_moe_run(eng_moe *moe, const eng_layer *w, bool decode, float *h, uint32_t n);

#endif
