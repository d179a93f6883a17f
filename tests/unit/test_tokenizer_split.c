/* The pre-tokenizers of byte-level BPE: against HF tokenizers (golden/tokenizer/splits.jsonl), and how much work they take. */
#include "../json_text.h"
#include "pre_names.h"
#include "support.h"
#include "tokenizer_parts.h"

#include <errno.h>
#include <stdio.h>

/* ---- words -------------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *base;
    size_t at, n;
    size_t lens[4096];
} words;

/* No ck_assert here, which writes to a file each time: there are ten million words. */
static int take_word(void *ctx, const char *word, size_t n)
{
    words *w = ctx;
    if (word != w->base + w->at || !n)
        return -EPROTO;
    w->at += n;
    if (w->n < sizeof w->lens / sizeof *w->lens)
        w->lens[w->n] = n;
    w->n++;
    return 0;
}

/* The steps that matching took, where they are counted. */
static uint64_t split_as(const char *pre, bool counted, const char *text, size_t len, words *ret)
{
    eng_split *s;
    eng_split_scratch *scratch;
    ck_assert_int_eq(eng_split_new(eng_split_find((eng_str){pre, strlen(pre)}), counted, &s), 0);
    ck_assert_int_eq(eng_split_scratch_new(s, &scratch), 0);
    *ret = (words){.base = text};
    ck_assert_int_eq(eng_split_each(s, scratch, text, len, take_word, ret), 0);
    ck_assert_uint_eq(ret->at, len);
    uint64_t work = eng_split_work(scratch);
    eng_split_scratch_free(scratch);
    eng_split_free(s);
    return work;
}

static void split(const char *pre, const char *text, size_t len, words *ret)
{
    split_as(pre, false, text, len, ret);
}

/* The first line names them; of the others, of[k] is the list in words that is pre-tokenizer k's. */
START_TEST(test_splits_as_hf)
{
    static words got;
    size_t size, len = 0;
    int lines = 0;
    char *all = t_read(t_path("golden/tokenizer/splits.jsonl"), &size);
    for (char *line = all, *end; line < all + size; line = end + 1, lines++) {
        end = strchr(line, '\n');
        *end = 0;
        cJSON *c = cJSON_Parse(line);
        if (!lines) {
            const cJSON *names = cJSON_GetObjectItem(c, "pre");
            ck_assert_int_eq(cJSON_GetArraySize(names), N_PRES);
            ck_assert_str_eq(cJSON_GetStringValue(cJSON_GetArrayItem(names, _i)), pres[_i]);
            cJSON_Delete(c);
            continue;
        }
        char *text = t_json_text(line, "text", &len);
        split(pres[_i], text, len, &got);
        const char *of = cJSON_GetStringValue(cJSON_GetObjectItem(c, "of"));
        const cJSON *want = cJSON_GetArrayItem(cJSON_GetObjectItem(c, "words"), of[_i] - '0');
        bool same = cJSON_GetArraySize(want) == (int)got.n;
        for (size_t i = 0; same && i < got.n; i++)
            same = cJSON_GetArrayItem(want, (int)i)->valueint == (int)got.lens[i];
        ck_assert_msg(same, "%s: line %d: %.300s", pres[_i], lines + 1, line);
        cJSON_Delete(c);
        free(text);
    }
    free(all);
    ck_assert_int_gt(lines, 1000);
}
END_TEST

/* Which names share an expression: llama.cpp's table. */
START_TEST(test_names)
{
    static const char *const as[][2] = {
        {"phi-2", "gpt-2"},
        {"olmo", "gpt-2"},
        {"starcoder", "smollm"},
        {"command-r", "smollm"},
        {"llama3", "llama-bpe"},
        {"llama-v3", "llama-bpe"},
        {"lfm2", "llama-bpe"},
        {"smaug-bpe", "dbrx"},
        {"glm4", "dbrx"},
        {"deepseek-r1-qwen", "qwen2"},
        {"stablelm2", "qwen2"},
        {"llama4", "gpt-4o"},
        {"hunyuan-dense", "deepseek-v3"},
    };
    for (size_t i = 0; i < sizeof as / sizeof *as; i++) {
        const eng_split_rule *r = eng_split_find((eng_str){as[i][0], strlen(as[i][0])});
        ck_assert_ptr_nonnull(r);
        ck_assert_ptr_eq(r, eng_split_find((eng_str){as[i][1], strlen(as[i][1])}));
    }
    /* Phi-4 says dbrx: Llama 3's words without its rule for whole words. */
    const eng_split_rule *dbrx = eng_split_find((eng_str){"dbrx", 4}), *llama = eng_split_find((eng_str){"llama-bpe", 9});
    ck_assert_str_eq(dbrx->stages[0], llama->stages[0]);
    ck_assert(llama->whole_words && llama->add_bos && !dbrx->whole_words && !dbrx->add_bos);
    ck_assert_ptr_null(eng_split_find((eng_str){"dbr", 3}));
    ck_assert_ptr_null(eng_split_find((eng_str){"", 0}));
}
END_TEST

/* Each byte outside a valid character is a word; the text between is split as if it were alone. */
START_TEST(test_splits_invalid_utf8)
{
    static const struct {
        const char *text;
        size_t lens[8];
    } cases[] = {
        {"ab\xff"
         "cd",
         {2, 1, 2}},
        {"\xc3", {1}},
        {"\xc3\xa9\xc3", {2, 1}},
        {"\xed\xa0\x80", {1, 1, 1}},        /* a surrogate */
        {"\xc0\x80x", {1, 1, 1}},           /* NUL, too long */
        {"\xf4\x90\x80\x80", {1, 1, 1, 1}}, /* past U+10FFFF */
        {"  \x80  a", {2, 1, 1, 2}},        /* white space before it is all of a text's end */
        {"\xe2\x82", {1, 1}},               /* cut off */
    };
    static words got;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        split(pres[_i], cases[i].text, strlen(cases[i].text), &got);
        for (size_t k = 0; k < 8 && (k < got.n || cases[i].lens[k]); k++)
            ck_assert_msg(k < got.n && got.lens[k] == cases[i].lens[k], "%s: case %zu, word %zu", pres[_i], i, k);
    }
}
END_TEST

/* Millions of bytes of a few characters again and again, and something that takes the last of them: a word, or as many words as the same
 * makes of less of it, without failing at a limit. */
START_TEST(test_splits_long_runs)
{
    enum { N = 10000000 };
    static const char *const runs[] = {"a",   "A",  " ", "\n", "!",           "\xc3\xa9", "\xcc\x81", "\xe6\xbc\xa2",
                                       " \n", "\t", "1", "Aa", "\xe2\x80\x8b"};
    static words got;
    char *text = malloc(N + 1);
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        /* Ten million of what matching walks back through: the library's own limit would be under that. */
        size_t k = strlen(runs[i]), most = *runs[i] == ' ' || *runs[i] == 'A' ? N : N / 10, n[3];
        for (size_t at = 0; at < most; at++)
            text[at] = runs[i][at % k];
        size_t units[] = {600, 1200, most / k / 600 * 600};
        for (int j = 0; j < 3; j++) {
            size_t len = units[j] * k;
            char last = text[len];
            text[len] = 'x';
            split(pres[_i], text, len + 1, &got);
            text[len] = last;
            n[j] = got.n;
        }
        ck_assert_msg(n[2] == n[0] + (n[1] - n[0]) * (units[2] / 600 - 1), "%s: '%s': %zu, %zu, %zu words", pres[_i], runs[i], n[0], n[1],
                      n[2]);
    }
    free(text);
}
END_TEST

/* The steps of matching are counted: ten times the text takes ten times as many, and no more than a few for each byte. */
START_TEST(test_split_work)
{
    enum { N = 10000000 };
    static const struct {
        const char *unit, *end;
        int n;
    } runs[] = {
        {"a", "", N},
        {" ", "", N},
        {" ", "x", N / 10},
        {" ", "1", N / 200},
        {" ", "\n", N / 10},
        {"A", "1", N / 10},
        {"\xe6\xbc\xa2"
         "A",
         "", N / 10},
        {"\xcc\x81", "1", N / 10},
        {"\n ", "x", N / 10},
        {"\xe6\xbc\xa2", "A", N / 10},
        {"'", "s", N / 10},
        {"  a", "", N / 10},
        {" \t!", "", N / 10},
        {"\xe2\x80\x8b", "", N / 10},
    };
    static words got;
    char *text = malloc(N + 8);
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        uint64_t work[2];
        for (int j = 0; j < 2; j++) {
            size_t k = strlen(runs[i].unit), len = (size_t)runs[i].n / (j ? 1 : 10) / k * k, end = strlen(runs[i].end);
            for (size_t at = 0; at < len; at++)
                text[at] = runs[i].unit[at % k];
            memcpy(text + len, runs[i].end, end);
            work[j] = split_as(pres[_i], true, text, len + end, &got);
        }
        ck_assert_msg(work[0] > (uint64_t)runs[i].n / 20 && work[1] < 11 * work[0] && work[1] < (uint64_t)50 * (uint64_t)runs[i].n,
                      "%s: '%s', then '%s': %llu steps, then %llu", pres[_i], runs[i].unit, runs[i].end, (unsigned long long)work[0],
                      (unsigned long long)work[1]);
    }
    free(text);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("tokenizer_split");
    TCase *c = tcase_create("tokenizer_split");
    tcase_add_loop_test(c, test_splits_as_hf, 0, N_PRES);
    tcase_add_loop_test(c, test_splits_invalid_utf8, 0, N_PRES);
    tcase_add_loop_test(c, test_splits_long_runs, 0, N_PRES);
    tcase_add_loop_test(c, test_split_work, 0, N_PRES);
    tcase_add_test(c, test_names);
    suite_add_tcase(s, c);
    return t_run(s);
}
