/* The broken and odd files of tests/golden/gguf/hostile against cases.json: refused ones with a sentence that names what is wrong. A
 * model file is loaded when the model opens and then the tokenizer does. */
#include "model.h"
#include "support.h"
#include "tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

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
    if (rc)
        ck_assert_msg(named && strlen(err) < sizeof err - 1, "%s: refused without naming what is wrong: %s", file, err);
    cJSON_Delete(all);
}
END_TEST

/* Nothing is allocated by a count or a length that the file only claims: all files load, or not, within little address space. */
START_TEST(test_no_large_allocation)
{
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    struct rlimit old, small;
    ck_assert_int_eq(getrlimit(RLIMIT_AS, &old), 0);
    small = (struct rlimit){256 << 20, old.rlim_max};
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
#endif
}
END_TEST

int main(void)
{
    Suite *s = suite_create("hostile");
    TCase *c = tcase_create("hostile");
    tcase_set_timeout(c, 0);
    tcase_add_loop_test(c, test_case, 0, N_CASES);
    tcase_add_test(c, test_no_large_allocation);
    suite_add_tcase(s, c);
    return t_run(s);
}
