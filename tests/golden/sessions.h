/* Sessions of a tiny model that holds thousands of tokens. */
#ifndef RETRIEVALD_TESTS_SESSIONS_H
#define RETRIEVALD_TESTS_SESSIONS_H

#include "support.h"
#include "teacher.h"

#include <string.h>

enum { VOCAB = 276, CTX = 16384 };

static inline eng_engine *open_tiny(size_t cache_ram, uint32_t threads, bool f32)
{
    eng_params p = eng_params_default();
    p.n_ctx = CTX;
    p.cache_ram = cache_ram;
    p.n_threads = threads;
    p.f32_activations = f32;
    return t_open(t_path("golden/gguf/tiny-llama-q8_0.gguf"), &p);
}

/* Tokens without end tokens among them. */
static inline void random_ids(eng_engine *e, t_rng *r, int32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++)
        do
            ids[i] = (int32_t)(t_u64(r) % VOCAB);
        while (eng_token_is_eog(e, ids[i]) || eng_token_is_control(e, ids[i]));
}

static inline eng_request request(const int32_t *ids, size_t n, eng_attn_mode mode)
{
    eng_request r = {.ids = ids, .n_ids = n, .max_tokens = 4096, .attention = eng_attention_default(), .sampling = eng_sampling_default(), .cache_prompt = true};
    r.attention.mode = mode;
    r.sampling.temperature = 0;
    return r;
}

/* Answers greedily; out[n_out], and the logits after the last of them when `logits` is given. */
static inline eng_timings answer(eng_engine *e, eng_request r, int32_t *out, size_t n_out, float *logits)
{
    char err[256];
    eng_session *s;
    eng_timings t;
    ck_assert_msg(eng_session_open(e, &r, &s, err, sizeof err) == 0, "%s", err);
    ck_assert_int_eq(eng_session_prefill(s, NULL, NULL), 0);
    for (size_t i = 0; i < n_out; i++) {
        eng_token tok;
        ck_assert_int_eq(eng_session_next(s, &tok), 0);
        out[i] = tok.id;
    }
    if (logits) {
        const float *l;
        ck_assert_int_eq(eng_session_logits(s, &l), 0);
        memcpy(logits, l, VOCAB * sizeof *l);
    }
    eng_session_timings(s, &t);
    eng_session_close(s);
    return t;
}

#endif
