/* Greedy continuations of the real models against the oracle's (tests/golden/README.md, "generate/"). */
#include "support.h"
#include "teacher.h"

#include <stdio.h>
#include <stdlib.h>

/* Generates and compares ids up to `until`. */
static void follow(eng_engine *e, const cJSON *item, int until)
{
    const cJSON *prompt = cJSON_GetObjectItem(item, "prompt_ids"), *want = cJSON_GetObjectItem(item, "ids"), *it;
    size_t n = (size_t)cJSON_GetArraySize(prompt), i = 0;
    int32_t *ids = malloc(n * sizeof *ids);
    cJSON_ArrayForEach(it, prompt) ids[i++] = it->valueint;
    char err[256];
    eng_session *s;
    eng_request r = {.ids = ids, .n_ids = n, .max_tokens = 64, .attention = eng_attention_default(), .sampling = eng_sampling_default()};
    r.attention.mode = ENG_ATTN_FULL;
    r.sampling.temperature = 0;
    ck_assert_int_eq(eng_session_open(e, &r, &s, err, sizeof err), 0);
    ck_assert_int_eq(eng_session_prefill(s, NULL, NULL), 0);
    for (int k = 0; k < until; k++) {
        eng_token t;
        ck_assert_int_eq(eng_session_next(s, &t), 0);
        ck_assert_msg(t.id == cJSON_GetArrayItem(want, k)->valueint, "%s: token %d is %d, the oracle's is %d",
                      cJSON_GetObjectItem(item, "name")->valuestring, k, t.id, cJSON_GetArrayItem(want, k)->valueint);
    }
    eng_session_close(s);
    free(ids);
}

/* at_least: tokens that are compared, all prompts together. */
static void run(const t_real_model *model, bool f32, int at_least)
{
    const char *file = t_real_model_file(model);
    char path[64];
    if (!file)
        return;
    eng_params p = eng_params_default();
    p.f32_activations = f32;
    if (f32)
        p.type_k = p.type_v = ENG_KV_F32;
    p.n_ctx = 2048;
    eng_engine *e = t_open(file, &p);
    snprintf(path, sizeof path, "golden/generate/%s.jsonl", model->name);
    cJSON *all = t_jsonl(t_path(path)), *item, *m;
    ck_assert_int_eq(cJSON_GetArraySize(all), 10);
    int compared = 0;
    cJSON_ArrayForEach(item, all)
    {
        int until = cJSON_GetObjectItem(item, "stable")->valueint;
        if (!f32) { /* 8-bit activations: up to the first margin below 1.0 */
            int k = 0;
            cJSON_ArrayForEach(m, cJSON_GetObjectItem(item, "margins"))
            {
                if (m->valuedouble < 1.0)
                    break;
                k++;
            }
            until = k;
        }
        follow(e, item, until);
        compared += until;
    }
    printf("%s, %s: %d greedy tokens as the oracle's\n", model->name, f32 ? "float32 activations" : "8-bit activations", compared);
    ck_assert_int_ge(compared, at_least);
    cJSON_Delete(all);
    eng_close(e);
}

START_TEST(float32_activations)
{
    static const int at_least[T_REAL_MODELS] = {248, 224, 421};
    run(&t_real_models[_i], true, at_least[_i]);
}
END_TEST

START_TEST(fast_activations)
{
    static const int at_least[T_REAL_MODELS] = {18, 56, 6};
    run(&t_real_models[_i], false, at_least[_i]);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("generate");
    TCase *c = tcase_create("generate");
    tcase_set_timeout(c, 0);
    tcase_add_loop_test(c, float32_activations, 0, T_REAL_MODELS);
    tcase_add_loop_test(c, fast_activations, 0, T_REAL_MODELS);
    suite_add_tcase(s, c);
    return t_run(s);
}
