/* Logits of a whole token sequence, by either half of the engine. */
#ifndef RETRIEVALD_TESTS_TEACHER_H
#define RETRIEVALD_TESTS_TEACHER_H

#include "engine.h"

#include <stddef.h>

/* A real model that golden data exist for, and the environment variable that names its file. */
typedef struct {
    const char *name, *variable;
} t_real_model;
enum { T_REAL_MODELS = 3 };
extern const t_real_model t_real_models[T_REAL_MODELS];

/* Its file; NULL, after saying so, when the variable is not set. */
const char *t_real_model_file(const t_real_model *m);

/* Opens or ends the test program with the reason. */
eng_engine *t_open(const char *model, const eng_params *params);

/* out [n][n_vocab]: after each of ids[0..n), all through the prefill kernels, `chunk` tokens at a time (0: as many as the engine takes). */
void t_prefill_logits(eng_engine *e, const int32_t *ids, size_t n, uint32_t chunk, float *out);

/* The same with ids[0..first) prefilled and the rest forced through the decode kernels; rows before first - 1 are left alone. */
void t_decode_logits(eng_engine *e, const int32_t *ids, size_t n, size_t first, const eng_attention *attention, float *out);

/* log softmax of one row at `id`, in float64. */
double t_logprob(const float *logits, size_t n_vocab, int32_t id);

/* KL(p || q) of two rows of logits. */
double t_kl(const float *p, const float *q, size_t n_vocab);

int32_t t_argmax(const float *logits, size_t n_vocab);

#endif
