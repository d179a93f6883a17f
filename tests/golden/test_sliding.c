/* Sessions of models whose layers slide, and of one with experts, over thousands of tokens: what is exact, what is counted, what gets an
 * index. */
#include "engine_private.h"
#include "support.h"
#include "teacher.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 276, CTX = 8192, PROMPT = 2500 };

static eng_engine *open_model(const char *name, uint32_t threads, uint32_t chunk, size_t cache_ram)
{
    char path[128];
    eng_params p = eng_params_default();
    p.index_share = 0; /* nothing is built before it is asked for */
    p.index_modes = 1u << ENG_ATTN_GRAPH;
    snprintf(path, sizeof path, "golden/archs/%s.gguf", name);
    p.n_ctx = CTX;
    p.cache_ram = cache_ram;
    p.n_threads = threads;
    p.n_chunk = chunk;
    return t_open(t_path(path), &p);
}

static void random_ids(eng_engine *e, t_rng *r, int32_t *ids, size_t n)
{
    for (size_t i = 0; i < n; i++)
        do
            ids[i] = (int32_t)(t_u64(r) % VOCAB);
        while (eng_token_is_eog(e, ids[i]) || eng_token_is_control(e, ids[i]));
}

/* Forces the ids after the first n_prompt; the logits after the last. */
static eng_timings run(eng_engine *e, const int32_t *ids, size_t n_prompt, size_t n, eng_attention attention, float *logits)
{
    char err[256];
    eng_session *s;
    eng_timings t;
    const float *l;
    eng_request r = {.ids = ids,
                     .n_ids = n_prompt,
                     .max_tokens = 4096,
                     .attention = attention,
                     .sampling = eng_sampling_default(),
                     .cache_prompt = true};
    ck_assert_msg(eng_session_open(e, &r, &s, err, sizeof err) == 0, "%s", err);
    ck_assert_int_eq(eng_session_prefill(s, NULL, NULL), 0);
    for (size_t i = n_prompt; i < n; i++)
        ck_assert_int_eq(eng_session_force(s, ids[i]), 0);
    ck_assert_int_eq(eng_session_logits(s, &l), 0);
    memcpy(logits, l, VOCAB * sizeof *l);
    eng_session_timings(s, &t);
    eng_session_close(s);
    return t;
}

static eng_attention mode(eng_attn_mode m)
{
    eng_attention a = eng_attention_default();
    a.mode = m;
    return a;
}

static const char *const models[] = {"tiny-gemma3-linear", "tiny-phi3", "tiny-qwen3moe"};
static const uint32_t graphs[] = {1, 0, 6}; /* layers that retrieve, times KV heads */
static const uint32_t sliding[] = {6, 3, 0}, window[] = {8, 24, 0}, layers[] = {7, 3, 3};

/* Cold in one engine, after a kept prefix in another with other chunks and threads: the same bits, prompt and answer. */
START_TEST(exact)
{
    eng_engine *a = open_model(models[_i], 1, 512, 0), *b = open_model(models[_i], 3, 67, (size_t)1 << 28);
    t_rng r = t_seed(3);
    int32_t ids[PROMPT + 20];
    float x[VOCAB], y[VOCAB];
    random_ids(a, &r, ids, PROMPT + 20);
    run(a, ids, PROMPT, PROMPT + 20, mode(ENG_ATTN_FULL), x);
    eng_timings t = run(b, ids, PROMPT - 700, PROMPT - 700, mode(ENG_ATTN_FULL), y);
    ck_assert_uint_eq(t.cache_n, 0);
    t = run(b, ids, PROMPT, PROMPT + 20, mode(ENG_ATTN_FULL), y);
    ck_assert_uint_eq(t.cache_n, PROMPT - 700);
    ck_assert_int_eq(memcmp(x, y, sizeof x), 0);
    eng_close(a);
    eng_close(b);
}
END_TEST

/* Only layers that see everything get indexes, and the numbers say what was read. */
START_TEST(counts)
{
    eng_engine *e = open_model(models[_i], 2, 512, (size_t)1 << 28);
    t_rng r = t_seed(4);
    int32_t ids[PROMPT + 8];
    float x[VOCAB], y[VOCAB];
    eng_stats st;
    random_ids(e, &r, ids, PROMPT + 8);
    eng_attention streaming = mode(ENG_ATTN_STREAMING), all = mode(ENG_ATTN_FLAT);
    eng_timings t = run(e, ids, PROMPT, PROMPT + 8, streaming, x);
    uint32_t dense = streaming.n_sink + streaming.n_local;
    ck_assert_double_eq_tol(t.keys_attended, (double)(sliding[_i] * window[_i] + (layers[_i] - sliding[_i]) * dense) / layers[_i], 1e-6);
    ck_assert_double_eq_tol(t.keys_held, PROMPT + 4.5, 1e-6);
    eng_stats_get(e, &st);
    ck_assert_uint_eq(st.index_pending, 3 * graphs[_i]); /* codes, clusters, graphs */
    while (eng_idle(e, 100, NULL))
        ;
    eng_stats_get(e, &st);
    ck_assert_uint_eq(st.index_pending, 0);
    ck_assert_uint_eq(st.index_bytes > 0, graphs[_i] > 0);
    const eng_info *info = eng_info_get(e);
    size_t per_token = info->kv_bytes_per_token + sizeof(int32_t);
    size_t queries = PROMPT / 32 * (info->head_dim + 3) * graphs[_i]; /* few stay, in 8 bits, for a merge */
    size_t sizes = (size_t)layers[_i] * info->n_head_kv * info->head_dim * sizeof(float) * 4; /* what each segment knows of its queries' */
    ck_assert_uint_lt(st.cache_bytes - st.index_bytes, per_token * (PROMPT + 8) + queries + sizes);

    /* with a budget of every key flat is full; the graph is used where there is one */
    all.top_k = CTX;
    run(e, ids, PROMPT, PROMPT + 8, mode(ENG_ATTN_FULL), x);
    t = run(e, ids, PROMPT, PROMPT + 8, all, y);
    for (int i = 0; i < VOCAB; i++)
        ck_assert_double_eq_tol(x[i], y[i], 0.05);
    all.mode = ENG_ATTN_GRAPH;
    all.top_k = 100;
    t = run(e, ids, PROMPT, PROMPT + 8, all, y);
    ck_assert_uint_eq(t.n_graph > 0, graphs[_i] > 0);
    ck_assert_uint_eq(t.n_flat + t.n_graph > 0, graphs[_i] > 0);
    eng_close(e);
}
END_TEST

/* Queries are sampled where a graph will be built. */
START_TEST(sampled_queries)
{
    enum { N = 300 };
    eng_engine *e = open_model("tiny-gemma3-linear", 2, 512, 0);
    t_rng r = t_seed(6);
    int32_t ids[N];
    eng_segment *seg;
    eng_view view = {0};
    random_ids(e, &r, ids, N);
    ck_assert_int_eq(eng_segment_new(&e->shape, NULL, 0, N, true, &seg), 0);
    ck_assert_int_eq(eng_view_add(&view, seg, 0, N), 0);
    ck_assert_int_eq(eng_segment_alloc_queries(seg, N), 0);
    eng_query_sampling sampling = {seg, 0, 1};
    ck_assert_int_eq(eng_forward_prefill(e->forward, &view, ids, 0, N, &sampling, NULL, NULL, NULL), 0);
    for (uint32_t layer = 0; layer < e->shape.n_layer; layer++) {
        const uint16_t *q = eng_segment_query(seg, layer, 0, 0);
        size_t n = (size_t)N * e->shape.group * e->shape.head_dim, some = 0;
        for (size_t i = 0; i < n; i++)
            some += q[i] != 0;
        ck_assert_msg(layer == 5 ? some > n / 2 : !some, "layer %u: %zu", layer, some);
    }
    eng_view_done(&view);
    eng_segment_unref(seg);
    eng_close(e);
}
END_TEST

static char warning[256];

static void log_warning(void *ctx, int level, const char *text)
{
    (void)ctx;
    if (level <= 4)
        snprintf(warning, sizeof warning, "%s", text);
}

/* What eng_info says; a window no shorter than the context is none; a scaled context is not warned of. */
START_TEST(info)
{
    eng_params p = eng_params_default();
    p.log = log_warning;
    eng_engine *e = t_open(t_path("golden/archs/tiny-phi3.gguf"), &p);
    const eng_info *i = eng_info_get(e);
    uint64_t long_print = i->fingerprint;
    ck_assert_str_eq(i->rope_scaling, "longrope");
    ck_assert(i->sliding_window == 24 && i->n_sliding_layers == 3 && i->n_expert == 0 && i->n_ctx_scaled == 1024);
    eng_close(e);
    p.n_ctx = 256;
    e = t_open(t_path("golden/archs/tiny-phi3.gguf"), &p);
    ck_assert(eng_info_get(e)->fingerprint != long_print); /* other factors: other keys */
    eng_close(e);

    p.n_ctx = 4096;
    e = t_open(t_path("golden/archs/tiny-qwen3.gguf"), &p);
    ck_assert_ptr_nonnull(strstr(warning, "4096 tokens is longer than the 2048"));
    uint64_t plain_print = eng_info_get(e)->fingerprint;
    eng_close(e);
    warning[0] = 0;
    p.rope.scaling = ENG_ROPE_SCALING_YARN;
    p.rope.freq_scale = 0.5f;
    e = t_open(t_path("golden/archs/tiny-qwen3.gguf"), &p);
    ck_assert_str_eq(warning, "");
    i = eng_info_get(e);
    ck_assert_str_eq(i->rope_scaling, "yarn");
    ck_assert(i->n_ctx_scaled == 4096 && i->n_ctx_train == 2048 && i->rope_factor == 2 && i->fingerprint != plain_print);
    eng_close(e);
    e = t_open(t_path("golden/archs/tiny-qwen3moe.gguf"), &p);
    ck_assert(eng_info_get(e)->n_expert == 8 && eng_info_get(e)->n_expert_used == 3);
    eng_close(e);
}
END_TEST

/* phi3's window as long as the context: nothing slides, so the layers retrieve like any. */
START_TEST(window_longer_than_the_context)
{
    char err[256];
    eng_params p = eng_params_default();
    p.n_ctx = 24;
    eng_engine *e = t_open(t_path("golden/archs/tiny-phi3.gguf"), &p);
    t_rng r = t_seed(5);
    int32_t ids[20];
    eng_session *s;
    random_ids(e, &r, ids, 20);
    eng_request q = {.ids = ids, .n_ids = 16, .max_tokens = 4, .attention = mode(ENG_ATTN_STREAMING), .sampling = eng_sampling_default()};
    q.attention.n_sink = 1;
    q.attention.n_local = 3;
    ck_assert_int_eq(eng_session_open(e, &q, &s, err, sizeof err), 0);
    ck_assert_int_eq(eng_session_prefill(s, NULL, NULL), 0);
    const float *l;
    ck_assert_int_eq(eng_session_force(s, ids[16]), 0);
    ck_assert_int_eq(eng_session_logits(s, &l), 0);
    eng_timings t;
    eng_session_timings(s, &t);
    ck_assert_double_eq_tol(t.keys_attended, 4, 1e-9); /* the policy's window; a sliding layer would read all 17 */
    eng_session_close(s);
    eng_close(e);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("sliding");
    TCase *c = tcase_create("sliding");
    tcase_set_timeout(c, 0);
    tcase_add_loop_test(c, exact, 0, 3);
    tcase_add_loop_test(c, counts, 0, 3);
    tcase_add_test(c, sampled_queries);
    tcase_add_test(c, info);
    tcase_add_test(c, window_longer_than_the_context);
    suite_add_tcase(s, c);
    return t_run(s);
}
