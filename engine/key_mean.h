/* The mean key that 8-bit keys are stored without.
 *
 * Keys of a head share a large offset in a few dimensions. It moves all scores of a query alike, so softmax does not see it; but it would take up an
 * 8-bit code's range. What is subtracted must be the same for all keys of a context, whatever their segment and chunk, and known before the first
 * token. So it is the model's, not the context's: the mean of the keys of a short text that is part of the program, taken before rotation and averaged over the
 * rotations of all positions the model is meant for (a pair that turns many times keeps none of it, a slow one all of it).
 */
#ifndef RETRIEVALD_KEY_MEAN_H
#define RETRIEVALD_KEY_MEAN_H

#include "forward.h"
#include "memory.h"
#include "tokenizer.h"

/* Computes the text's keys (a prefill of about 200 tokens) and gives *ret [n_layer][n_head_kv][head_dim], malloc'ed: minus the mean key. `shape` is the one that f was
 * made with; it holds float32 rows meanwhile. max_tokens: of the context. -ENOMEM, or what a prefill returns. */
int eng_key_mean(eng_forward *f, const eng_forward_params *fp, const eng_tokenizer *t, eng_kv_shape *shape, uint32_t max_tokens, float **ret);

#endif
