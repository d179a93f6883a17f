/* Sessions over kept contexts, on a tiny model with thousands of tokens: what is reused, what is exact, what is retrieved. */
#include "engine_private.h"
#include "sessions.h"
#include "teacher.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* In `full`, an answer after a cached prefix is the cold one, to the bit (design section 4, "What is exact"). */
START_TEST(full_warm_is_cold)
{
    eng_engine *warm = open_tiny((size_t)1 << 30, 2, false), *cold = open_tiny(0, 1, false);
    t_rng r = t_seed(1);
    int32_t ids[3000], a[40], b[40], first[40];
    float la[VOCAB], lb[VOCAB];
    random_ids(warm, &r, ids, 3000);

    eng_timings t = answer(warm, request(ids, 2000, ENG_ATTN_AUTO), first, 40, NULL); /* leaves exact and decoded segments */
    ck_assert_uint_eq(t.cache_n, 0);
    for (int round = 0; round < 4; round++) {
        /* cuts in the filled part, in the tail; a full hit; and a prompt that goes on with the answer */
        static const size_t lengths[] = {2100, 2300, 2000, 2400};
        static const uint32_t shared[] = {1000, 1900, 1999, 2000};
        size_t n = lengths[round];
        int32_t prompt[3000];
        memcpy(prompt, ids, sizeof ids);
        if (round == 3)
            memcpy(prompt + 2000, first, 39 * sizeof *first);
        else if (round != 2)
            prompt[shared[round]] = prompt[shared[round]] == 7 ? 8 : 7;
        t = answer(warm, request(prompt, n, ENG_ATTN_FULL), a, 40, la);
        ck_assert_uint_eq(t.cache_n, shared[round]);
        ck_assert_uint_eq(t.prompt_n, n - shared[round]);
        t = answer(cold, request(prompt, n, ENG_ATTN_FULL), b, 40, lb);
        ck_assert_uint_eq(t.cache_n, 0);
        ck_assert_int_eq(memcmp(a, b, sizeof a), 0);
        ck_assert_int_eq(memcmp(la, lb, sizeof la), 0);
    }
    eng_close(warm);
    eng_close(cold);
}
END_TEST

/* Other modes take what the decode kernels computed, too: a prompt that goes on with the answer finds all of it. */
START_TEST(answers_are_reused)
{
    eng_engine *e = open_tiny((size_t)1 << 30, 2, false);
    t_rng r = t_seed(2);
    int32_t prompt[1200], out[30];
    random_ids(e, &r, prompt, 1200);
    answer(e, request(prompt, 1000, ENG_ATTN_FLAT), out, 30, NULL);
    memcpy(prompt + 1000, out, sizeof out);
    eng_timings t = answer(e, request(prompt, 1100, ENG_ATTN_FLAT), out, 5, NULL);
    ck_assert_uint_eq(t.cache_n, 1029); /* the last token chosen was never computed */
    eng_request q = request(prompt, 1100, ENG_ATTN_FLAT);
    q.cache_prompt = false;
    t = answer(e, q, out, 5, NULL);
    ck_assert_uint_eq(t.cache_n, 0);
    eng_close(e);
}
END_TEST

/* Long generations seal run after run; `full` still agrees with one pass of the prefill kernels over the same tokens. */
START_TEST(runs_are_sealed)
{
    eng_engine *e = open_tiny((size_t)1 << 30, 2, true);
    enum { PROMPT = 300, MORE = 6000 };
    t_rng r = t_seed(4);
    int32_t *ids = malloc((PROMPT + MORE) * sizeof *ids), out[2];
    float *want = malloc((size_t)(PROMPT + MORE) * VOCAB * sizeof *want);
    random_ids(e, &r, ids, PROMPT + MORE);
    t_prefill_logits(e, ids, PROMPT + MORE, 0, want);

    char err[256];
    eng_session *s;
    eng_request q = request(ids, PROMPT, ENG_ATTN_FULL);
    q.max_tokens = MORE + 1;
    ck_assert_int_eq(eng_session_open(e, &q, &s, err, sizeof err), 0);
    ck_assert_int_eq(eng_session_prefill(s, NULL, NULL), 0);
    for (size_t i = PROMPT; i < PROMPT + MORE; i++) {
        ck_assert_int_eq(eng_session_force(s, ids[i]), 0);
        const float *l;
        if (i % 97 == 0 || i == PROMPT + MORE - 1) {
            ck_assert_int_eq(eng_session_logits(s, &l), 0);
            for (int v = 0; v < VOCAB; v++)
                ck_assert_float_eq_tol(l[v], want[i * VOCAB + v], 2e-2f); /* f16 KV, other summation order */
        }
    }
    eng_session_close(s);
    ck_assert_uint_ge(({ eng_stats st; eng_stats_get(e, &st); st.segments; }), 4);
    eng_timings t = answer(e, request(ids, PROMPT + MORE, ENG_ATTN_FLAT), out, 2, NULL);
    ck_assert_uint_eq(t.cache_n, PROMPT + MORE - 1);
    free(ids);
    free(want);
    eng_close(e);
}
END_TEST

/* Queries are sampled and more than codes is built only where a session's attention, or one that the engine is to be ready for, may search it. */
START_TEST(indexes_where_they_are_used)
{
    t_rng r = t_seed(8);
    enum { N = 2000 };
    int32_t ids[N], out[1];
    static const struct {
        eng_attn_mode mode;
        bool estimate;
        uint32_t engine, kinds;
    } cases[] = {
        {ENG_ATTN_AUTO, true, 0, 1}, {ENG_ATTN_AUTO, false, 0, 1}, /* without an estimate auto may walk, but not in a context as short as this */
        {ENG_ATTN_FLAT, true, 0, 1}, {ENG_ATTN_GRAPH, false, 0, 2}, {ENG_ATTN_GRAPH, true, 0, 3}, /* an estimate by graph needs clusters */
        {ENG_ATTN_CLUSTER, true, 0, 2}, {ENG_ATTN_IVF, true, 0, 2}, {ENG_ATTN_FLAT, true, 1u << ENG_ATTN_CLUSTER, 2},
        {ENG_ATTN_IVF, true, 1u << ENG_ATTN_GRAPH | 1u << ENG_ATTN_FULL, 4},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        eng_engine *e = open_tiny((size_t)1 << 30, 2, true);
        uint32_t heads = eng_info_get(e)->n_layer * eng_info_get(e)->n_head_kv;
        eng_request q = request(ids, N, cases[i].mode);
        q.attention.estimate = cases[i].estimate;
        e->params.index_modes = cases[i].engine;
        eng_stats st;
        random_ids(e, &r, ids, N);
        answer(e, q, out, 0, NULL);
        eng_stats_get(e, &st);
        ck_assert_uint_eq(st.index_pending, cases[i].kinds * heads);
        eng_close(e);
    }
}
END_TEST

/* With a budget of every key, flat and graph-fallback agree with full; with less, they attend to what they say. */
START_TEST(retrieval_through_the_engine)
{
    eng_engine *e = open_tiny((size_t)1 << 30, 2, true);
    t_rng r = t_seed(6);
    enum { N = 4000 };
    int32_t ids[N], out[20], want[20];
    float l[VOCAB], lf[VOCAB], first[VOCAB];
    random_ids(e, &r, ids, N);
    answer(e, request(ids, N, ENG_ATTN_GRAPH), want, 0, NULL); /* keeps queries, to build graphs from */
    answer(e, request(ids, N, ENG_ATTN_FULL), want, 1, first);
    answer(e, request(ids, N, ENG_ATTN_FULL), want, 20, lf);
    eng_request q = request(ids, N, ENG_ATTN_FLAT);
    q.attention.top_k = N;
    eng_timings t = answer(e, q, out, 20, l);
    ck_assert_int_eq(memcmp(out, want, sizeof out), 0);
    for (int v = 0; v < VOCAB; v++)
        ck_assert_float_eq_tol(l[v], lf[v], 1e-3f);
    ck_assert_double_eq_tol(t.keys_attended, t.keys_held, 1e-6);

    /* graphs: pending until idle work is done, then used */
    eng_stats st;
    eng_stats_get(e, &st);
    ck_assert_uint_gt(st.index_pending, 0);
    /* codes of all heads come before any graph: then a few keys and the estimate bring answers nearer to full attention */
    uint32_t heads = eng_info_get(e)->n_layer * eng_info_get(e)->n_head_kv;
    for (; st.index_pending > 2 * heads; eng_stats_get(e, &st)) /* clusters and graphs */
        eng_idle(e, 1, NULL);
    double error[2] = {0};
    for (int estimate = 0; estimate < 2; estimate++) {
        q.attention.top_k = 50;
        q.attention.estimate = estimate;
        t = answer(e, q, out, 1, l);
        ck_assert_uint_gt(t.n_flat, 0);
        ck_assert_double_le(t.retrieved, 50);
        ck_assert_double_gt(t.retrieved, 45);
        if (estimate)
            ck_assert_double_eq_tol(t.keys_attended + t.estimated, t.keys_held, 1e-6); /* each key once */
        else
            ck_assert_double_eq(t.estimated, 0);
        ck_assert_double_ge(t.probed, t.retrieved + t.estimated);
        ck_assert_double_lt(t.keys_attended, estimate ? 128 + 2 * 512 + 50 + 64 : 128 + 512 + 50 + 2);
        for (int v = 0; v < VOCAB; v++)
            error[estimate] += (l[v] - first[v]) * (l[v] - first[v]);
    }
    ck_assert_msg(error[1] * 9 < error[0], "squared error %g with the estimate, %g without", error[1], error[0]);
    while (eng_idle(e, 50, NULL))
        ;
    eng_stats_get(e, &st);
    ck_assert_uint_eq(st.index_pending, 0);
    ck_assert_uint_gt(st.index_bytes, 0);
    for (int estimate = 0; estimate < 2; estimate++) {
        q = request(ids, N, ENG_ATTN_GRAPH);
        q.attention.top_k = 100;
        q.attention.estimate = estimate;
        t = answer(e, q, out, 20, NULL);
        ck_assert_uint_eq(t.cache_n, N - 1);
        ck_assert_uint_gt(t.n_graph, 0);
        /* the filled segment through its graphs; everything behind it lies in the window or in short segments, which are read with the estimate */
        ck_assert_double_le(t.keys_attended, 128 + 512 + 100 + 20 + (estimate ? 512 + 64 : 0) + 1e-6);
        ck_assert_double_ge(t.keys_attended, 128 + 512 + 90);
        if (estimate)
            ck_assert_double_eq_tol(t.keys_attended + t.estimated, t.keys_held, 1e-6);
    }
    q = request(ids, N, ENG_ATTN_STREAMING);
    t = answer(e, q, out, 20, NULL);
    ck_assert_double_eq_tol(t.keys_attended, 128 + 512, 1e-6);
    ck_assert_uint_eq(t.n_graph + t.n_flat, 0);
    eng_close(e);
}
END_TEST

typedef struct {
    atomic_bool cancel;
    uint32_t at;
} canceler;

static void cancel_at(void *ctx, uint32_t done, uint32_t cached, uint32_t total)
{
    canceler *c = ctx;
    ck_assert(cached <= done && done <= total);
    if (done >= c->at)
        atomic_store(&c->cancel, true);
}

/* A cancelled prefill keeps what it computed; the retry goes on from there and answers as if nothing had happened. */
START_TEST(cancel_keeps_the_prefix)
{
    eng_engine *e = open_tiny((size_t)1 << 30, 2, false), *cold = open_tiny(0, 2, false);
    t_rng r = t_seed(8);
    int32_t ids[3000], a[10], b[10];
    random_ids(e, &r, ids, 3000);
    canceler c = {.at = 1500};
    eng_request q = request(ids, 3000, ENG_ATTN_FULL);
    q.cancel = &c.cancel;
    char err[256];
    eng_session *s;
    ck_assert_int_eq(eng_session_open(e, &q, &s, err, sizeof err), 0);
    ck_assert_int_eq(eng_session_prefill(s, cancel_at, &c), -ECANCELED);
    eng_session_close(s);
    eng_timings t = answer(e, request(ids, 3000, ENG_ATTN_FULL), a, 10, NULL);
    ck_assert_uint_eq(t.cache_n, 1536); /* three chunks */
    answer(cold, request(ids, 3000, ENG_ATTN_FULL), b, 10, NULL);
    ck_assert_int_eq(memcmp(a, b, sizeof a), 0);

    /* decoding stops as well */
    atomic_store(&c.cancel, false);
    ck_assert_int_eq(eng_session_open(e, &q, &s, err, sizeof err), 0);
    ck_assert_int_eq(eng_session_prefill(s, NULL, NULL), 0);
    eng_token tok;
    ck_assert_int_eq(eng_session_next(s, &tok), 0);
    atomic_store(&c.cancel, true);
    ck_assert_int_eq(eng_session_next(s, &tok), -ECANCELED);
    eng_session_close(s);
    eng_close(e);
    eng_close(cold);
}
END_TEST

START_TEST(bounds_and_bad_prompts)
{
    eng_params p = eng_params_default();
    p.n_ctx = 100;
    eng_engine *e = t_open(t_path("golden/gguf/tiny-llama-q8_0.gguf"), &p);
    t_rng r = t_seed(9);
    int32_t ids[200];
    random_ids(e, &r, ids, 200);
    char err[256];
    eng_session *s = NULL;
    eng_request q = request(ids, 0, ENG_ATTN_AUTO);
    ck_assert_int_eq(eng_session_open(e, &q, &s, err, sizeof err), -EINVAL);
    q = request(ids, 100, ENG_ATTN_AUTO);
    ck_assert_int_eq(eng_session_open(e, &q, &s, err, sizeof err), -E2BIG);
    ck_assert_ptr_nonnull(strstr(err, "100"));
    ids[5] = VOCAB;
    q = request(ids, 50, ENG_ATTN_AUTO);
    ck_assert_int_eq(eng_session_open(e, &q, &s, err, sizeof err), -EINVAL);
    ids[5] = -1;
    ck_assert_int_eq(eng_session_open(e, &q, &s, err, sizeof err), -EINVAL);
    ck_assert_ptr_null(s);

    /* generation ends where the context does, and at max_tokens */
    random_ids(e, &r, ids, 200);
    for (int round = 0; round < 2; round++) {
        q = request(ids, 90, ENG_ATTN_AUTO);
        if (round)
            q.max_tokens = 3;
        ck_assert_int_eq(eng_session_open(e, &q, &s, err, sizeof err), 0);
        eng_session *other = NULL;
        ck_assert_int_eq(eng_session_open(e, &q, &other, err, sizeof err), -EBUSY);
        ck_assert_int_eq(eng_session_prefill(s, NULL, NULL), 0);
        eng_token tok;
        int n = 0;
        while (eng_session_next(s, &tok) == 0)
            n++;
        ck_assert_int_eq(n, round ? 3 : 10);
        eng_session_close(s);
    }
    eng_close(e);
}
END_TEST

/* Two contexts that alternate under a RAM budget for one of them: each request answers right, and the budget holds. */
START_TEST(small_budget)
{
    eng_engine *probe = open_tiny((size_t)1 << 30, 2, false);
    t_rng r = t_seed(10);
    int32_t a[2000], b[2000], out[8], want_a[8], want_b[8];
    random_ids(probe, &r, a, 2000);
    random_ids(probe, &r, b, 2000);
    answer(probe, request(a, 2000, ENG_ATTN_FULL), want_a, 8, NULL);
    eng_stats st;
    eng_stats_get(probe, &st);
    answer(probe, request(b, 2000, ENG_ATTN_FULL), want_b, 8, NULL);
    size_t budget = st.cache_bytes * 3 / 2;
    eng_close(probe);
    eng_engine *e = open_tiny(budget, 2, false);
    for (int round = 0; round < 6; round++) {
        answer(e, request(round & 1 ? b : a, 2000, ENG_ATTN_FULL), out, 8, NULL);
        ck_assert_int_eq(memcmp(out, round & 1 ? want_b : want_a, sizeof out), 0);
        while (round == 3 && eng_idle(e, 20, NULL))
            ;
        eng_stats_get(e, &st);
        ck_assert_uint_le(st.cache_bytes, budget);
    }
    ck_assert_uint_gt(st.evictions, 0);
    eng_close(e);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("session");
    TCase *c = tcase_create("session");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, full_warm_is_cold);
    tcase_add_test(c, answers_are_reused);
    tcase_add_test(c, runs_are_sealed);
    tcase_add_test(c, retrieval_through_the_engine);
    tcase_add_test(c, indexes_where_they_are_used);
    tcase_add_test(c, cancel_keeps_the_prefix);
    tcase_add_test(c, bounds_and_bad_prompts);
    tcase_add_test(c, small_budget);
    suite_add_tcase(s, c);
    return t_run(s);
}
