/* 8-bit keys: stored less a mean that attention cannot see, the same whatever the segment, chunk or prefix. */
#include "key_mean.h"

#include "engine_private.h"
#include "sessions.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static eng_engine *open_model(const char *name, eng_kv_type type_k, uint32_t threads, uint32_t n_chunk, size_t cache_ram)
{
    eng_params p = eng_params_default();
    p.n_ctx = CTX;
    p.cache_ram = cache_ram;
    p.n_threads = threads;
    p.n_chunk = n_chunk;
    p.f32_activations = true;
    p.type_k = type_k;
    p.type_v = ENG_KV_F32;
    return t_open(t_path(name), &p);
}

static const char llama[] = "golden/gguf/tiny-llama-q8_0.gguf", qwen[] = "golden/gguf/tiny-qwen2-q8_0.gguf"; /* Qwen's keys have a bias */

/* Whatever is added to all keys alike changes no answer, in prefill, in full decoding and in retrieval. */
START_TEST(a_shift_changes_nothing)
{
    enum { N = 2400, FIRST = 2300 };
    eng_engine *e = open_model(llama, ENG_KV_F32, 2, 512, (size_t)1 << 30);
    t_rng r = t_seed(1);
    int32_t *ids = malloc(N * sizeof *ids);
    size_t count = (size_t)e->shape.n_layer * e->shape.n_head_kv * e->shape.head_dim;
    float *shift = malloc(count * sizeof *shift), *logits[2][2];
    random_ids(e, &r, ids, N);
    for (size_t i = 0; i < count; i++)
        shift[i] = 2 * t_normal(&r);
    eng_attention a = eng_attention_default();
    a.mode = ENG_ATTN_FLAT;
    a.top_k = 200;
    a.estimate = false; /* whether it is there yet would depend on time */
    for (int shifted = 0; shifted < 2; shifted++) {
        eng_forward_shift_keys(e->forward, shifted ? shift : NULL);
        for (int decode = 0; decode < 2; decode++)
            logits[shifted][decode] = calloc((size_t)N * VOCAB, sizeof(float));
        t_prefill_logits(e, ids, N, 0, logits[shifted][0]);
        t_decode_logits(e, ids, N, FIRST, &a, logits[shifted][1]);
    }
    for (size_t i = 0; i < (size_t)N * VOCAB; i++)
        for (int decode = 0; decode < 2; decode++)
            ck_assert_double_eq_tol(logits[1][decode][i], logits[0][decode][i], decode ? 2e-2 : 2e-3);
    for (int i = 0; i < 4; i++)
        free(logits[i / 2][i % 2]);
    free(ids);
    free(shift);
    eng_close(e);
}
END_TEST

/* Squared length of the mean of n keys of random tokens, all heads together, with the shift that the engine at hand gives them. */
static double mean_size(eng_engine *e, uint32_t n)
{
    t_rng r = t_seed(2);
    int32_t *ids = malloc(n * sizeof *ids);
    random_ids(e, &r, ids, n);
    eng_segment *seg;
    eng_view view = {0};
    uint32_t d = e->shape.head_dim;
    float *row = malloc(d * sizeof *row);
    double *mean = malloc(d * sizeof *mean), size = 0;
    ck_assert_int_eq(eng_segment_new(&e->shape, NULL, 0, n, true, &seg), 0);
    ck_assert_int_eq(eng_view_add(&view, seg, 0, n), 0);
    for (uint32_t pos = 0; pos < n; pos += 512)
        ck_assert_int_eq(eng_forward_prefill(e->forward, &view, ids + pos, pos, n - pos < 512 ? n - pos : 512, NULL, NULL, NULL, NULL), 0);
    for (uint32_t i = 0; i < e->shape.n_layer * e->shape.n_head_kv; i++) {
        memset(mean, 0, d * sizeof *mean);
        for (uint32_t pos = 0; pos < n; pos++) {
            e->kernels->kv_load[e->shape.type_k](eng_segment_k(seg, i / e->shape.n_head_kv, i % e->shape.n_head_kv, pos), row, d);
            for (uint32_t j = 0; j < d; j++)
                mean[j] += row[j] / (double)n;
        }
        for (uint32_t j = 0; j < d; j++)
            size += mean[j] * mean[j];
    }
    eng_view_done(&view);
    eng_segment_unref(seg);
    free(ids);
    free(row);
    free(mean);
    return size;
}

/* What is left of the mean over all positions that the model is meant for. */
START_TEST(the_mean_is_taken_away)
{
    eng_engine *plain = open_model(qwen, ENG_KV_F32, 2, 512, 0), *less = open_model(qwen, ENG_KV_Q8_0, 2, 512, 0);
    uint32_t n = eng_info_get(plain)->n_ctx_scaled;
    double with = mean_size(plain, n), without = mean_size(less, n);
    printf("squared length of the mean key: %g, %g without it\n", with, without);
    ck_assert_double_gt(with, 0);
    ck_assert_double_lt(without, with / 3); /* random tokens are not the text that it was measured on */
    eng_close(plain);
    eng_close(less);
}
END_TEST

/* Logits over 8-bit keys are near those over float32 ones. */
START_TEST(near_to_float32)
{
    enum { N = 400 };
    eng_engine *e[2] = {open_model(qwen, ENG_KV_F32, 2, 512, 0), open_model(qwen, ENG_KV_Q8_0, 2, 512, 0)};
    size_t n_vocab = eng_info_get(e[0])->n_vocab;
    t_rng r = t_seed(3);
    int32_t ids[N];
    float *logits[2];
    random_ids(e[0], &r, ids, N);
    for (int i = 0; i < 2; i++) {
        logits[i] = malloc(N * n_vocab * sizeof(float));
        t_prefill_logits(e[i], ids, N, 0, logits[i]);
    }
    double kl = 0;
    for (size_t t = 0; t < N; t++)
        kl += t_kl(logits[0] + t * n_vocab, logits[1] + t * n_vocab, n_vocab) / N;
    printf("KL to float32 keys: %g\n", kl);
    ck_assert_double_lt(kl, 1e-3);
    ck_assert_double_gt(kl, 0);
    for (int i = 0; i < 2; i++) {
        free(logits[i]);
        eng_close(e[i]);
    }
}
END_TEST

/* Design section 4: the same bits from a kept prefix as cold, with other chunks and threads. */
START_TEST(warm_is_cold)
{
    enum { N = 2100, SHARED = 1300, OUT = 20 };
    eng_engine *warm = open_model(llama, ENG_KV_Q8_0, 2, 512, (size_t)1 << 30), *cold = open_model(llama, ENG_KV_Q8_0, 1, 77, 0);
    t_rng r = t_seed(4);
    int32_t ids[N], a[OUT], b[OUT];
    float la[VOCAB], lb[VOCAB];
    random_ids(warm, &r, ids, N);
    answer(warm, request(ids, N - 100, ENG_ATTN_AUTO), a, OUT, NULL);
    ids[SHARED] = ids[SHARED] == 7 ? 8 : 7;
    eng_timings t = answer(warm, request(ids, N, ENG_ATTN_FULL), a, OUT, la);
    ck_assert_uint_eq(t.cache_n, SHARED);
    answer(cold, request(ids, N, ENG_ATTN_FULL), b, OUT, lb);
    ck_assert_int_eq(memcmp(a, b, sizeof a), 0);
    ck_assert_int_eq(memcmp(la, lb, sizeof la), 0);
    eng_close(warm);
    eng_close(cold);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("key mean");
    TCase *c = tcase_create("key mean");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, a_shift_changes_nothing);
    tcase_add_test(c, the_mean_is_taken_away);
    tcase_add_test(c, near_to_float32);
    tcase_add_test(c, warm_is_cold);
    suite_add_tcase(s, c);
    return t_run(s);
}
