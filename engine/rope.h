/* Rotary positions: the angle of each pair of dimensions per token, from the file's keys and what the operator overrides. */
#ifndef RETRIEVALD_ROPE_H
#define RETRIEVALD_ROPE_H

#include "engine.h"
#include "model.h"

typedef struct {
    uint32_t pairs;
    double *freq[2]; /* [pairs] radians a token, by eng_layer_rope: of ordinary and of local layers */
    float mscale[2]; /* of cosines and sines */
    /* for people */
    const char *scaling; /* "none", "linear", "yarn", "longrope", "llama3" */
    float base, factor;
    uint32_t orig_ctx, n_ctx_trained; /* the longest context that the scaled model is meant for */
} eng_rope;

/* n_ctx: longrope has other factors for contexts beyond the original one. -EINVAL with a sentence: settings that give no angles. */
int eng_rope_init(eng_rope *r, const eng_model *m, const eng_rope_params *p, uint32_t n_ctx, char *err, size_t errlen);
void eng_rope_done(eng_rope *r);

/* cs: cos[pairs], sin[pairs] of a position; local: of layers with a base of their own. */
void eng_rope_angles(const eng_rope *r, bool local, uint32_t pos, float *cs);

/* A fingerprint of all that the angles depend on, chained to `seed`. */
uint64_t eng_rope_hash(const eng_rope *r, uint64_t seed);

#endif
