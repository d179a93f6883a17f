/* Prompts of the golden cases, byte for byte, through the helper process. The templates are those of the model files. */
#include "../../server/template.h"
#include "support.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const controls[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>", "<|fim_prefix|>"};
enum { N_CONTROLS = sizeof controls / sizeof *controls };

/* cJSON ends strings at a NUL, which some prompts hold: both sides are compared with U+E000 in its place. */
static cJSON *parse_with_nul(const char *line)
{
    char *copy = strdup(line);
    ck_assert_ptr_nonnull(copy);
    for (char *p = copy; (p = strstr(p, "\\u0000"));)
        p[2] = 'e';
    cJSON *c = cJSON_Parse(copy);
    free(copy);
    return c;
}

static char *mark_nul(const char *text, size_t n)
{
    char *out = malloc(3 * n + 1), *to = out;
    ck_assert_ptr_nonnull(out);
    for (size_t i = 0; i < n; i++) {
        if (text[i])
            *to++ = text[i];
        else
            to += sprintf(to, "\xEE\x80\x80");
    }
    *to = 0;
    return out;
}

/* The case's own line is the request. As OpenAI would take it, only what its clients never send changes: arguments as a string, an empty
 * list of tools. */
static void check_case(srv_template *t, const char *line, const char *openai)
{
    char err[512] = "", *request = malloc(strlen(line) + 64), *prompt = NULL;
    size_t n = 0;
    cJSON *c = parse_with_nul(line);
    ck_assert(request && c);
    const char *name = cJSON_GetObjectItemCaseSensitive(c, "name")->valuestring;
    const char *want = cJSON_GetObjectItemCaseSensitive(c, "prompt")->valuestring;
    int len = sprintf(request, "{\"openai\": %s, %s", openai, line + 1);
    int r = srv_template_render(t, request, (size_t)len, &prompt, &n, err, sizeof err);
    ck_assert_msg(!r, "%s: %d %s", name, r, err);
    bool special = strstr(name, "special-tokens") != NULL;
    bool guarded = memmem(prompt, n, srv_template_guard(), strlen(srv_template_guard())) != NULL;
    ck_assert_msg(!special || guarded, "%s: no guard", name);
    n = srv_template_unguard(prompt, n);
    char *got = mark_nul(prompt, n);
    if (strcmp(openai, "true") || (strcmp(name, "tool-call-string-args") && strcmp(name, "tools-empty-list")))
        ck_assert_msg(!strcmp(got, want), "%s:\n%s\nwanted:\n%s", name, got, want);
    free(got);
    free(prompt);
    free(request);
    cJSON_Delete(c);
}

static void check_model(const char *model, const char *bos, const char *eos, int want_cases)
{
    char path[64], err[512] = "";
    size_t n, n_template;
    srv_template *t = NULL;
    snprintf(path, sizeof path, "golden/chat/%s.jinja", model);
    char *source = t_read(t_path(path), &n_template);
    snprintf(path, sizeof path, "golden/chat/%s.jsonl", model);
    char *text = t_read(t_path(path), &n);
    ck_assert_msg(!srv_template_start(&t, err, sizeof err), "%s", err);
    ck_assert_msg(!srv_template_set(t, source, n_template, bos, eos, controls, N_CONTROLS, err, sizeof err), "%s", err);
    int cases = 0;
    for (char *save = NULL, *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save), cases++) {
        check_case(t, line, "false");
        check_case(t, line, "true");
    }
    ck_assert_int_eq(cases, want_cases);
    srv_template_free(t);
    free(source);
    free(text);
}

START_TEST(smollm2)
{
    check_model("smollm2", "<|im_start|>", "<|im_end|>", 28);
}
END_TEST

START_TEST(qwen05)
{
    check_model("qwen05", "<|endoftext|>", "<|im_end|>", 41);
}
END_TEST

START_TEST(qwen15)
{
    check_model("qwen15", "<|endoftext|>", "<|im_end|>", 41);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("chat");
    TCase *c = tcase_create("chat");
    tcase_add_test(c, smollm2);
    tcase_add_test(c, qwen05);
    tcase_add_test(c, qwen15);
    suite_add_tcase(s, c);
    return t_run(s);
}
