/* Logits of tiny random-weight models at every position, against the float64/float32 oracle (tests/golden/README.md, gguf/). */
#include "kernels.h"
#include "support.h"
#include "teacher.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const cases[] = {"text", "random"};

static int32_t *ids_of(const char *model, const char *name, size_t *ret_n)
{
    char path[128];
    snprintf(path, sizeof path, "golden/gguf/%s.json", model);
    char *text = t_read(t_path(path), NULL);
    cJSON *j = cJSON_Parse(text), *a = cJSON_GetObjectItem(cJSON_GetObjectItem(j, "ids"), name);
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

static void check(const char *model, eng_params p, double tolerance)
{
    char path[128];
    snprintf(path, sizeof path, "golden/gguf/%s.gguf", model);
    eng_engine *e = t_open(t_path(path), &p);
    size_t n_vocab = eng_info_get(e)->n_vocab;
    eng_attention full = eng_attention_default();
    full.mode = ENG_ATTN_FULL;
    for (int c = 0; c < 2; c++) {
        size_t n;
        int32_t *ids = ids_of(model, cases[c], &n);
        snprintf(path, sizeof path, "golden/gguf/%s.%s.npy", model, cases[c]);
        t_npy want = t_npy_load(t_path(path));
        ck_assert_uint_eq(want.bytes, n * n_vocab * sizeof(float));
        float *got = malloc(want.bytes);
        static const uint32_t chunks[] = {0, 1, 7};
        for (int k = 0; k < 3; k++) {
            t_prefill_logits(e, ids, n, chunks[k], got);
            double d = max_diff(got, want.data, n * n_vocab);
            ck_assert_msg(d <= tolerance, "%s %s, prefill by %u, %s: logits differ by %g", model, cases[c], chunks[k], eng_info_get(e)->cpu,
                          d);
        }
        memcpy(got, want.data, want.bytes); /* the first row is not computed here */
        t_decode_logits(e, ids, n, 1, &full, got);
        double d = max_diff(got, want.data, n * n_vocab);
        ck_assert_msg(d <= tolerance, "%s %s, decode, %s: logits differ by %g", model, cases[c], eng_info_get(e)->cpu, d);
        free(got);
        free(ids);
        t_npy_free(&want);
    }
    eng_close(e);
}

static const char *const models[] = {"tiny-llama-f32", "tiny-llama-q8_0", "tiny-qwen2-q8_0", "tiny-gemma3-f32"};
enum { N_MODELS = sizeof models / sizeof *models };

START_TEST(float32_activations)
{
    eng_params p = eng_params_default();
    p.f32_activations = true;
    p.type_k = p.type_v = ENG_KV_F32;
    p.n_threads = 2;
    for (eng_cpu cpu = ENG_CPU_SCALAR; cpu <= ENG_CPU_AMX; cpu++) {
        const eng_kernels *k;
        char err[200];
        if (eng_kernels_get(cpu, &k, err, sizeof err) < 0) {
            printf("SKIP: %s\n", err);
            continue;
        }
        p.cpu = cpu;
        for (int i = 0; i < N_MODELS; i++)
            check(models[i], p, 1e-3);
    }
}
END_TEST

START_TEST(fast_activations)
{
    eng_params p = eng_params_default();
    p.n_threads = 2;
    for (eng_cpu cpu = ENG_CPU_SCALAR; cpu <= ENG_CPU_AMX; cpu++) {
        const eng_kernels *k;
        char err[200];
        if (eng_kernels_get(cpu, &k, err, sizeof err) < 0) {
            printf("SKIP: %s\n", err);
            continue;
        }
        p.cpu = cpu;
        for (int i = 0; i < N_MODELS; i++)
            check(models[i], p, 0.5);
    }
}
END_TEST

int main(void)
{
    Suite *s = suite_create("tiny");
    TCase *c = tcase_create("tiny");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, float32_activations);
    tcase_add_test(c, fast_activations);
    suite_add_tcase(s, c);
    return t_run(s);
}
