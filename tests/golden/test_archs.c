/* Logits of a tiny random-weight model for each architecture and RoPE scaling against the float32 oracle, at every position
 * (tests/golden/README.md, archs/). */
#include "kernels.h"
#include "support.h"
#include "teacher.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FROM_FILE                                                                                                                          \
    {                                                                                                                                      \
        .yarn_ext_factor = -1, .yarn_attn_factor = -1, .yarn_beta_slow = -1, .yarn_beta_fast = -1                                          \
    }

/* As RUNS in make/tiny.py. */
static const struct {
    const char *model, *run;
    uint32_t n_ctx;
    eng_rope_params rope;
    bool f32_only; /* so deep that random layers blow rounding up */
} runs[] = {
    {"tiny-llama3", "tiny-llama3", 0, FROM_FILE},
    {"tiny-yarn", "tiny-yarn", 0, FROM_FILE},
    {"tiny-smollm3", "tiny-smollm3", 0, FROM_FILE},
    {"tiny-qwen3", "tiny-qwen3", 0, FROM_FILE},
    {"tiny-qwen3",
     "tiny-qwen3.yarn",
     4096,
     {.scaling = ENG_ROPE_SCALING_YARN,
      .freq_scale = 0.25f,
      .yarn_orig_ctx = 2048,
      .yarn_ext_factor = -1,
      .yarn_attn_factor = -1,
      .yarn_beta_slow = -1,
      .yarn_beta_fast = -1}},
    {"tiny-qwen3",
     "tiny-qwen3.yarn-betas",
     4096,
     {.scaling = ENG_ROPE_SCALING_YARN,
      .freq_scale = 0.25f,
      .yarn_orig_ctx = 1024,
      .yarn_ext_factor = 0.5f,
      .yarn_attn_factor = -1,
      .yarn_beta_slow = 2,
      .yarn_beta_fast = 16}},
    {"tiny-qwen3",
     "tiny-qwen3.linear",
     4096,
     {.scaling = ENG_ROPE_SCALING_LINEAR,
      .freq_scale = 0.25f,
      .freq_base = 50000,
      .yarn_ext_factor = -1,
      .yarn_attn_factor = -1,
      .yarn_beta_slow = -1,
      .yarn_beta_fast = -1}},
    {"tiny-qwen3moe", "tiny-qwen3moe", 0, FROM_FILE},
    {"tiny-phi3", "tiny-phi3.long", 512, FROM_FILE},
    {"tiny-phi3", "tiny-phi3.short", 256, FROM_FILE},
    {"tiny-gemma3-linear", "tiny-gemma3-linear", 0, FROM_FILE},
    {"tiny-gemma3-62", "tiny-gemma3-62", 0, FROM_FILE, true},
};
enum { N_RUNS = sizeof runs / sizeof *runs };

static int32_t *ids_of(const char *model, size_t *ret_n)
{
    char path[128];
    snprintf(path, sizeof path, "golden/archs/%s.json", model);
    char *text = t_read(t_path(path), NULL);
    cJSON *j = cJSON_Parse(text), *a = cJSON_GetObjectItem(j, "ids");
    *ret_n = (size_t)cJSON_GetArraySize(a);
    ck_assert_uint_gt(*ret_n, 1);
    int32_t *ids = malloc(*ret_n * sizeof *ids);
    for (size_t i = 0; i < *ret_n; i++)
        ids[i] = cJSON_GetArrayItem(a, (int)i)->valueint;
    cJSON_Delete(j);
    free(text);
    return ids;
}

static double max_diff(const float *a, const float *b, size_t n)
{
    double d = 0;
    for (size_t i = 0; i < n; i++)
        d = fmax(d, isfinite(a[i]) ? fabs((double)a[i] - b[i]) : INFINITY);
    return d;
}

static double check(int run, eng_params p, double tolerance)
{
    char path[128];
    size_t n;
    double worst = 0;
    snprintf(path, sizeof path, "golden/archs/%s.gguf", runs[run].model);
    p.n_ctx = runs[run].n_ctx;
    p.rope = runs[run].rope;
    eng_engine *e = t_open(t_path(path), &p);
    size_t n_vocab = eng_info_get(e)->n_vocab;
    int32_t *ids = ids_of(runs[run].model, &n);
    snprintf(path, sizeof path, "golden/archs/%s.npy", runs[run].run);
    t_npy want = t_npy_load(t_path(path));
    ck_assert_uint_eq(want.bytes, n * n_vocab * sizeof(float));
    float *got = malloc(want.bytes), *whole = malloc(want.bytes);
    static const uint32_t chunks[] = {0, 1, 7};
    for (int k = 0; k < 3; k++) {
        t_prefill_logits(e, ids, n, chunks[k], got);
        double d = max_diff(got, want.data, n * n_vocab);
        ck_assert_msg(d <= tolerance, "%s, prefill by %u, %s: logits differ by %g", runs[run].run, chunks[k], eng_info_get(e)->cpu, d);
        worst = fmax(worst, d);
        if (k)
            ck_assert_msg(!memcmp(got, whole, want.bytes), "%s, prefill by %u, %s: other bits than in one chunk", runs[run].run, chunks[k],
                          eng_info_get(e)->cpu);
        else
            memcpy(whole, got, want.bytes);
    }
    static const eng_attn_mode modes[] = {ENG_ATTN_FULL, ENG_ATTN_FLAT};
    for (int k = 0; k < 2; k++) {
        eng_attention attention = eng_attention_default();
        attention.mode = modes[k];
        memcpy(got, want.data, want.bytes); /* the first rows are not computed here */
        t_decode_logits(e, ids, n, 3, &attention, got);
        double d = max_diff(got, want.data, n * n_vocab);
        ck_assert_msg(d <= tolerance, "%s, decode, %s: logits differ by %g", runs[run].run, eng_info_get(e)->cpu, d);
        worst = fmax(worst, d);
    }
    free(whole);
    free(got);
    free(ids);
    t_npy_free(&want);
    eng_close(e);
    return worst;
}

static void check_all(eng_params p, double tolerance)
{
    p.n_threads = 2;
    for (eng_cpu cpu = ENG_CPU_SCALAR; cpu <= ENG_CPU_AMX; cpu++) {
        const eng_kernels *k;
        char err[200];
        if (eng_kernels_get(cpu, &k, err, sizeof err) < 0) {
            printf("SKIP: %s\n", err);
            continue;
        }
        p.cpu = cpu;
        for (int i = 0; i < N_RUNS; i++)
            if (p.f32_activations || !runs[i].f32_only)
                printf("%s %s: %.2g\n", k->name, runs[i].run, check(i, p, tolerance));
    }
}

START_TEST(float32_activations)
{
    eng_params p = eng_params_default();
    p.f32_activations = true;
    p.type_k = p.type_v = ENG_KV_F32;
    check_all(p, 1e-3);
}
END_TEST

START_TEST(fast_activations)
{
    check_all(eng_params_default(), 0.5);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("archs");
    TCase *c = tcase_create("archs");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, float32_activations);
    tcase_add_test(c, fast_activations);
    suite_add_tcase(s, c);
    return t_run(s);
}
