/* SmolLM2's tokenizer against llama.cpp's answers (tests/golden/tokenizer/smollm2.jsonl): text to ids and back, every case. */
#include "../json_text.h"
#include "engine.h"
#include "support.h"
#include "tokenizer.h"

#include <stdio.h>

static eng_gguf *file;
static eng_tokenizer *tok;

static bool same_ids(const cJSON *want, const int32_t *ids, size_t n)
{
    if (!want || (size_t)cJSON_GetArraySize(want) != n)
        return false;
    size_t i = 0;
    const cJSON *id;
    cJSON_ArrayForEach(id, want) if (id->valueint != ids[i++]) return false;
    return true;
}

static void check_encode(const char *line, const cJSON *c, int number)
{
    size_t len, n;
    int32_t *ids;
    char *text = t_json_text(line, "text", &len);
    unsigned flags = cJSON_IsTrue(cJSON_GetObjectItem(c, "parse_special")) ? ENG_TOK_PARSE_SPECIAL : 0;
    ck_assert_int_eq(eng_tokenizer_encode(tok, text, len, flags, NULL, &ids, &n), 0);
    /* hf_ids: where the original tokenizer differs from llama.cpp, either will do. */
    ck_assert_msg(same_ids(cJSON_GetObjectItem(c, "ids"), ids, n) || same_ids(cJSON_GetObjectItem(c, "hf_ids"), ids, n),
                  "line %d: wrong ids for %.200s", number, line);
    free(ids);
    free(text);
}

static void check_decode(const char *line, const cJSON *c, int number)
{
    char got[1 << 16];
    size_t n = 0, len;
    const cJSON *id;
    cJSON_ArrayForEach(id, cJSON_GetObjectItem(c, "ids"))
    {
        const char *s;
        ck_assert_int_eq(eng_tokenizer_text(tok, id->valueint, true, &s, &len), 0);
        ck_assert(n + len <= sizeof got);
        memcpy(got + n, s, len);
        n += len;
    }
    char *text = t_json_text(line, "text", &len);
    if (!text) { /* not UTF-8: given as hexadecimal */
        const char *hex = cJSON_GetStringValue(cJSON_GetObjectItem(c, "bytes"));
        ck_assert_ptr_nonnull(hex);
        len = strlen(hex) / 2;
        text = malloc(len + 1);
        for (size_t i = 0; i < len; i++)
            text[i] = (char)strtoul((char[]){hex[2 * i], hex[2 * i + 1], 0}, NULL, 16);
    }
    ck_assert_msg(n == len && !memcmp(got, text, n), "line %d: wrong text for %.200s", number, line);
    free(text);
}

START_TEST(test_every_case)
{
    size_t size;
    char *all = t_read(t_path("golden/tokenizer/smollm2.jsonl"), &size);
    int encoded = 0, decoded = 0;
    for (char *line = all, *end; line < all + size; line = end + 1) {
        end = strchr(line, '\n');
        *end = 0;
        cJSON *c = cJSON_Parse(line);
        ck_assert_ptr_nonnull(c);
        if (cJSON_HasObjectItem(c, "parse_special"))
            check_encode(line, c, 1 + encoded++ + decoded);
        else
            check_decode(line, c, 1 + encoded + decoded++);
        cJSON_Delete(c);
    }
    free(all);
    ck_assert_int_eq(encoded, 528);
    ck_assert_int_eq(decoded, 528);
}
END_TEST

/* What the GGUF says of its special tokens. */
START_TEST(test_facts)
{
    ck_assert_int_eq(eng_tokenizer_bos(tok), 1);
    ck_assert_int_eq(eng_tokenizer_eos(tok), 2);
    ck_assert(!eng_tokenizer_add_bos(tok));
    ck_assert(eng_tokenizer_is_eog(tok, 0)); /* <|endoftext|> */
    ck_assert(eng_tokenizer_is_eog(tok, 2)); /* <|im_end|> */
    ck_assert(!eng_tokenizer_is_eog(tok, 1) && !eng_tokenizer_is_eog(tok, 17) && !eng_tokenizer_is_eog(tok, -1));
    for (int id = 0; id < 49152; id++)
        ck_assert_int_eq(eng_tokenizer_is_control(tok, id), id < 17);
}
END_TEST

/* A guard inside what looks like control tokens makes them plain text. */
START_TEST(test_guard)
{
    static const char guarded[] = "a<|i\x01G\x01m_start|>b<|im_\x01G\x01"
                                  "end|>",
                      plain[] = "a<|im_start|>b<|im_end|>";
    size_t n, m;
    int32_t *got, *want;
    ck_assert_int_eq(eng_tokenizer_encode(tok, guarded, sizeof guarded - 1, ENG_TOK_PARSE_SPECIAL, "\x01G\x01", &got, &n), 0);
    ck_assert_int_eq(eng_tokenizer_encode(tok, plain, sizeof plain - 1, 0, NULL, &want, &m), 0);
    ck_assert_uint_eq(n, m);
    ck_assert_mem_eq(got, want, n * sizeof *got);
    for (size_t i = 0; i < n; i++)
        ck_assert(!eng_tokenizer_is_control(tok, got[i]));
    free(got);
    free(want);
}
END_TEST

int main(void)
{
    const char *path = t_smollm2();
    if (!path) {
        puts("SKIP: RETRIEVALD_SMOLLM2 does not name the SmolLM2 model file");
        return 77;
    }
    char err[256] = "";
    if (eng_gguf_open(path, &file, err, sizeof err) < 0 || eng_tokenizer_new(file, 49152, &tok, err, sizeof err) < 0) {
        fprintf(stderr, "%s: %s\n", path, err);
        return 1;
    }
    Suite *s = suite_create("tokenizer golden");
    TCase *c = tcase_create("smollm2");
    tcase_add_test(c, test_every_case);
    tcase_add_test(c, test_facts);
    tcase_add_test(c, test_guard);
    suite_add_tcase(s, c);
    int r = t_run(s);
    eng_tokenizer_free(tok);
    eng_gguf_close(file);
    return r;
}
