/* What a running session attends with and to, for evaluation: `retrievald eval dump`. Public, beside engine.h; the engine thread's. */
#ifndef RETRIEVALD_CAPTURE_H
#define RETRIEVALD_CAPTURE_H

#include "engine.h"

/* Queries of a layer for the tokens at positions [pos, pos + n): q [n][n_head][head_dim], rotated, and such that a score is q . k / sqrt(head_dim). Valid during the call. */
typedef void eng_queries_fn(void *ctx, uint32_t layer, uint32_t pos, uint32_t n, const float *q);

/* Calls fn for every layer of every chunk that is prefilled and every step that is decoded, until the session is closed. */
void eng_session_watch(eng_session *s, eng_queries_fn *fn, void *ctx);

/* Keys, or values, of positions [0, n) as the cache has them (keys rotated; q8_0's less the mean key): ret [n][head_dim]. -EINVAL: there are not so many. */
int eng_session_rows(const eng_session *s, uint32_t layer, uint32_t head_kv, bool values, uint32_t n, float *ret);

#endif
