/* Choosing the next token: penalties, top-k, top-p, min-p, temperature, in that order (llama-server's), then a draw. */
#ifndef RETRIEVALD_SAMPLER_H
#define RETRIEVALD_SAMPLER_H

#include "kernels.h"

typedef struct eng_sampler eng_sampler;

/* Allocates for n_vocab; nothing is allocated per token. k: outlives it. */
int eng_sampler_new(const eng_sampling *p, const eng_kernels *k, uint32_t n_vocab, eng_sampler **ret);
void eng_sampler_free(eng_sampler *s);

/* A token that is part of the text so far (prompt and generated), for the penalties. */
void eng_sampler_accept(eng_sampler *s, int32_t id);

/* Picks from logits [n_vocab] (unchanged) and fills id, logprob and the n_logprobs best. Greedy takes the smallest id among equals. Non-finite
 * logits are never picked unless all are. Does not accept. */
void eng_sampler_pick(eng_sampler *s, const float *logits, eng_token *ret);

#endif
