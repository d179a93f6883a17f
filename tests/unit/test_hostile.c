/* The broken and odd files of tests/golden/gguf/hostile against cases.json: refused ones with a sentence that names what is wrong. A
 * model file is loaded when the model opens and then the tokenizer does. */
#include "describe.h"
#include "engine.h"
#include "model.h"
#include "support.h"
#include "tokenizer.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

enum { N_CASES = 149 };

static int load(const char *file, char *err, size_t errlen)
{
    char path[512];
    eng_model *m = NULL;
    eng_tokenizer *t = NULL;
    snprintf(path, sizeof path, "golden/gguf/hostile/%s", file);
    int rc = eng_model_open(t_path(path), &m, err, errlen);
    ck_assert_msg(rc ? !m : m != NULL, "%s: outputs", file);
    if (!rc) {
        rc = eng_tokenizer_new(m->file, m->n_vocab, &t, err, errlen);
        ck_assert_msg(rc ? !t : t != NULL, "%s: outputs", file);
    }
    eng_tokenizer_free(t);
    eng_model_close(m);
    return rc;
}

/* A file that is accepted computes: some tokens prefilled, some decoded, all logits finite; or, with weights that are not, it says so. */
static void evaluate(const char *file)
{
    enum { PROMPT = 5, ANSWER = 3 };
    char path[512], err[300] = "";
    eng_engine *e = NULL;
    eng_session *s = NULL;
    const float *logits;
    int32_t ids[PROMPT];
    eng_params p = eng_params_default();
    p.n_ctx = 32;
    p.n_threads = 1;
    snprintf(path, sizeof path, "golden/gguf/hostile/%s", file);
    ck_assert_msg(!eng_open(t_path(path), &p, &e, err, sizeof err), "%s: %s", file, err);
    uint32_t n_vocab = eng_info_get(e)->n_vocab;
    for (uint32_t i = 0; i < PROMPT; i++)
        ids[i] = (int32_t)(n_vocab - 1 - i * 7 % n_vocab);
    eng_request r = {
        .ids = ids, .n_ids = PROMPT, .max_tokens = ANSWER, .attention = eng_attention_default(), .sampling = eng_sampling_default()};
    ck_assert_msg(!eng_session_open(e, &r, &s, err, sizeof err) && !eng_session_prefill(s, NULL, NULL), "%s: %s", file, err);
    bool damaged = !strcmp(file, "weights-nan.gguf") || !strcmp(file, "weights-inf.gguf");
    for (int i = 0; i < ANSWER; i++) {
        eng_token t = {.id = -1};
        ck_assert_int_eq(eng_session_logits(s, &logits), 0);
        for (uint32_t k = 0; k < n_vocab && !damaged; k++)
            ck_assert_msg(isfinite(logits[k]), "%s: logit %u of step %d", file, k, i);
        ck_assert_int_eq(eng_session_next(s, &t), damaged ? -EDOM : 0);
        ck_assert(damaged ? t.id == -1 : t.id >= 0 && (uint32_t)t.id < n_vocab);
    }
    eng_session_close(s);
    eng_close(e);
}

/* What is said of a file agrees with what happens when it is opened. */
static void describe(const char *file, int opened)
{
    char path[512], err[300] = "";
    eng_description *d = NULL;
    eng_gguf *g = NULL;
    snprintf(path, sizeof path, "golden/gguf/hostile/%s", file);
    bool readable = !eng_gguf_open(t_path(path), &g, err, sizeof err);
    eng_gguf_close(g);
    int rc = eng_describe(t_path(path), &d, err, sizeof err);
    ck_assert_msg(!rc == readable && !rc == !!d, "%s: %d %s", file, rc, err);
    if (!d)
        return;
    ck_assert_msg(!d->refusal == !opened, "%s: %s", file, d->refusal ? d->refusal : "described without the refusal");
    ck_assert(d->refusal || d->kv_bytes_per_token[ENG_KV_F16]);
    ck_assert_uint_eq(d->n_tensors, d->types[0].tensors + d->types[1].tensors + d->types[2].tensors);
    eng_description_free(d);
}

static cJSON *cases(void)
{
    char *text = t_read(t_path("golden/gguf/hostile/cases.json"), NULL);
    cJSON *all = cJSON_Parse(text);
    free(text);
    ck_assert_int_eq(cJSON_GetArraySize(all), N_CASES);
    return all;
}

START_TEST(test_case)
{
    cJSON *all = cases(), *c = cJSON_GetArrayItem(all, _i), *name;
    const char *file = cJSON_GetObjectItem(c, "file")->valuestring, *expect = cJSON_GetObjectItem(c, "expect")->valuestring;
    char err[300] = "";
    int rc = load(file, err, sizeof err);
    bool named = false;
    cJSON_ArrayForEach(name, cJSON_GetObjectItem(c, "names")) named |= strstr(err, name->valuestring) != NULL;
    if (!strcmp(expect, "accepted"))
        ck_assert_msg(rc == 0, "%s: refused: %s", file, err);
    if (!strcmp(expect, "refused"))
        ck_assert_msg(rc < 0, "%s: accepted, though: %s", file, cJSON_GetObjectItem(c, "wrong")->valuestring);
    describe(file, rc);
    if (!rc)
        evaluate(file);
    if (rc)
        ck_assert_msg(named && strlen(err) < sizeof err - 1, "%s: refused without naming what is wrong: %s", file, err);
    cJSON_Delete(all);
}
END_TEST

/* A sanitizer's shadow memory is larger than any limit: this test needs a plain build. */
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
/* Address space that the program has now: its libraries', so that only what loading takes is limited. */
static rlim_t in_use(void)
{
    unsigned long pages = 0;
    FILE *f = fopen("/proc/self/statm", "re");
    ck_assert_ptr_nonnull(f);
    ck_assert_int_eq(fscanf(f, "%lu", &pages), 1);
    fclose(f);
    return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

/* Nothing is allocated by a count or a length that the file only claims: all files load, or not, within little address space. */
START_TEST(test_no_large_allocation)
{
    struct rlimit old, small;
    ck_assert_int_eq(getrlimit(RLIMIT_AS, &old), 0);
    small = (struct rlimit){in_use() + (200 << 20), old.rlim_max};
    cJSON *all = cases(), *c;
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &small), 0);
    cJSON_ArrayForEach(c, all)
    {
        char err[300] = "";
        load(cJSON_GetObjectItem(c, "file")->valuestring, err, sizeof err);
        ck_assert_ptr_null(strstr(err, "memory"));
    }
    ck_assert_int_eq(setrlimit(RLIMIT_AS, &old), 0);
    cJSON_Delete(all);
}
END_TEST
#endif

int main(void)
{
    Suite *s = suite_create("hostile");
    TCase *c = tcase_create("hostile");
    tcase_set_timeout(c, 0);
    tcase_add_loop_test(c, test_case, 0, N_CASES);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    tcase_add_test(c, test_no_large_allocation);
#endif
    suite_add_tcase(s, c);
    return t_run(s);
}
