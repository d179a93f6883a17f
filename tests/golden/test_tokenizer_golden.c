/* The tokenizers of real models against llama.cpp's answers (tests/golden/tokenizer): text to ids and back, every case; and what only a
 * real vocabulary shows: random Unicode back and forth, and how the work grows. Each model that is not there is skipped. */
#include "../json_text.h"
#include "engine.h"
#include "support.h"
#include "tokenizer.h"
#include "tokenizer_parts.h"

#include <stdio.h>

static const struct model {
    const char *name;
    uint32_t n_vocab;
    int bos, eos;
    bool add_bos;
    const char *turn; /* looks like a control token, and is one */
} models[] = {
    {"smollm2", 49152, 1, 2, false, "<|im_start|>"},
    {"qwen05", 151936, 151643, 151645, false, "<|im_start|>"},
    {"gemma3", 262144, 2, 1, true, "<start_of_turn>"},
};

static const struct model *model;
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
                  "%s: line %d: wrong ids for %.200s", model->name, number, line);
    free(ids);
    free(text);
}

/* The text of the ids, malloc'ed. */
static char *decode(const int32_t *ids, size_t n, size_t *ret_len)
{
    size_t len = 0, cap = 64;
    char *out = malloc(cap);
    for (size_t i = 0; i < n; i++) {
        const char *s;
        size_t k;
        ck_assert_int_eq(eng_tokenizer_text(tok, ids[i], true, &s, &k), 0);
        while (len + k > cap)
            out = realloc(out, cap *= 2);
        memcpy(out + len, s, k);
        len += k;
    }
    *ret_len = len;
    return out;
}

static void check_decode(const char *line, const cJSON *c, int number)
{
    const cJSON *list = cJSON_GetObjectItem(c, "ids"), *id;
    int32_t *ids = malloc(((size_t)cJSON_GetArraySize(list) + 1) * sizeof *ids);
    size_t n = 0, m, len;
    cJSON_ArrayForEach(id, list) ids[n++] = id->valueint;
    char *got = decode(ids, n, &m);
    char *text = t_json_text(line, "text", &len);
    if (!text) { /* not UTF-8: given as hexadecimal */
        const char *hex = cJSON_GetStringValue(cJSON_GetObjectItem(c, "bytes"));
        ck_assert_ptr_nonnull(hex);
        len = strlen(hex) / 2;
        text = malloc(len + 1);
        for (size_t i = 0; i < len; i++)
            text[i] = (char)strtoul((char[]){hex[2 * i], hex[2 * i + 1], 0}, NULL, 16);
    }
    ck_assert_msg(m == len && !memcmp(got, text, len), "%s: line %d: wrong text for %.200s", model->name, number, line);
    free(got);
    free(ids);
    free(text);
}

START_TEST(test_every_case)
{
    char path[64];
    snprintf(path, sizeof path, "golden/tokenizer/%s.jsonl", model->name);
    size_t size;
    char *all = t_read(t_path(path), &size);
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
    ck_assert_int_eq(eng_tokenizer_bos(tok), model->bos);
    ck_assert_int_eq(eng_tokenizer_eos(tok), model->eos);
    ck_assert_int_eq(eng_tokenizer_add_bos(tok), model->add_bos);
    ck_assert(eng_tokenizer_is_eog(tok, model->eos));
    int32_t *ids;
    size_t n;
    ck_assert_int_eq(eng_tokenizer_encode(tok, "a", 1, ENG_TOK_ADD_SPECIAL, NULL, &ids, &n), 0);
    ck_assert_uint_eq(n, model->add_bos ? 2 : 1);
    ck_assert_int_eq(ids[0] == model->bos, model->add_bos);
    free(ids);
    if (model == models) {
        ck_assert(eng_tokenizer_is_eog(tok, 0)); /* <|endoftext|> */
        ck_assert(!eng_tokenizer_is_eog(tok, 1) && !eng_tokenizer_is_eog(tok, 17) && !eng_tokenizer_is_eog(tok, -1));
        for (int id = 0; id < 49152; id++)
            ck_assert_int_eq(eng_tokenizer_is_control(tok, id), id < 17);
    }
    if (model == models + 2) {
        ck_assert(eng_tokenizer_is_eog(tok, 106));  /* <end_of_turn> */
        ck_assert(!eng_tokenizer_is_eog(tok, 212)); /* </s>: here the end of struck text */
    }
}
END_TEST

/* What looks like a control token stays text: without parse_special, and with it where a guard is inside. */
START_TEST(test_text_stays_text)
{
    char plain[128], guarded[128];
    size_t n, m, k;
    int32_t *got, *want;
    snprintf(plain, sizeof plain, "a%sb %s", model->turn, model->turn);
    snprintf(guarded, sizeof guarded, "a<\x01G\x01%sb <\x01G\x01%s", model->turn + 1, model->turn + 1);
    ck_assert_int_eq(eng_tokenizer_encode(tok, guarded, strlen(guarded), ENG_TOK_PARSE_SPECIAL, "\x01G\x01", &got, &n), 0);
    ck_assert_int_eq(eng_tokenizer_encode(tok, plain, strlen(plain), 0, NULL, &want, &m), 0);
    ck_assert_uint_eq(n, m);
    ck_assert_mem_eq(got, want, n * sizeof *got);
    for (size_t i = 0; i < n; i++)
        ck_assert(!eng_tokenizer_is_control(tok, got[i]));
    free(want);
    ck_assert_int_eq(eng_tokenizer_encode(tok, plain, strlen(plain), ENG_TOK_PARSE_SPECIAL, NULL, &want, &k), 0);
    ck_assert(k < n && eng_tokenizer_is_control(tok, want[1]) && eng_tokenizer_is_control(tok, want[k - 1]));
    free(got);
    free(want);
}
END_TEST

static size_t put_char(char *out, unsigned c)
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    size_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const unsigned char lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    for (size_t i = n - 1; i > 0; i--, c >>= 6)
        out[i] = (char)(0x80 | (c & 63));
    out[0] = (char)(lead[n] | c);
    return n;
}

/* Anything that is Unicode: half of it from where scripts and symbols are, a quarter ASCII. */
static unsigned random_char(t_rng *rng)
{
    for (;;) {
        unsigned kind = (unsigned)(t_u64(rng) % 4);
        unsigned c = kind == 0   ? (unsigned)(t_u64(rng) % 0x80)
                     : kind == 3 ? (unsigned)(t_u64(rng) % 0x110000)
                                 : (unsigned)(t_u64(rng) % 0x3000);
        if ((c < 0xd800 || c > 0xdfff) && c != 0x2581)
            return c;
    }
}

/* SmolLM2 has no token for these bytes (tests/golden/README.md): they vanish. */
static bool has_no_token(char byte)
{
    static const unsigned char missing[] = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1d, 0xc0, 0xc1, 0xf1, 0xf2};
    unsigned char b = (unsigned char)byte;
    return b >= 0xf5 || memchr(missing, b, sizeof missing);
}

START_TEST(test_random_unicode_round_trip)
{
    t_rng rng = t_seed(21);
    for (int round = 0; round < 4000; round++) {
        char text[1024], want[1024];
        size_t len = 0, k = 0, n, m, chars = 1 + (size_t)(t_u64(&rng) % 200);
        for (size_t i = 0; i < chars; i++)
            if (round % 4 == 3) /* bytes, which are rarely Unicode */
                text[len++] = (char)t_u64(&rng);
            else
                len += put_char(text + len, random_char(&rng));
        for (size_t i = 0; i < len; i++)
            if (model != models || !has_no_token(text[i]))
                want[k++] = text[i];
        int32_t *ids;
        ck_assert_int_eq(eng_tokenizer_encode(tok, text, len, round & 1 ? ENG_TOK_PARSE_SPECIAL : 0, NULL, &ids, &n), 0);
        char *back = decode(ids, n, &m);
        ck_assert_msg(m == k && !memcmp(back, want, k), "%s: round %d", model->name, round);
        free(back);
        free(ids);
    }
}
END_TEST

/* The work of ten million bytes (of the last two, one), counted, is ten times that of a tenth, but for the heap's logarithm. */
START_TEST(test_work_is_linear)
{
    enum { N = 10000000 };
    static const char *const units[] = {"a", " ", "abcdefgh", "> "};
    char *text = malloc(N);
    for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
        for (size_t i = 0, k = strlen(units[u]); i < N; i++)
            text[i] = units[u][i % k];
        uint64_t work[2];
        for (int i = 0; i < 2; i++) {
            int32_t *ids;
            size_t n, m = (u < 2 ? N : N / 10) / (i ? 1 : 10);
            ck_assert_int_eq(eng_tokenizer_encode_counted(tok, text, m, ENG_TOK_PARSE_SPECIAL, &ids, &n, &work[i]), 0);
            free(ids);
        }
        uint64_t most = u < 2 ? N : N / 10;
        ck_assert_msg(work[0] > most / 20 && work[1] < 15 * work[0] && work[1] < 100 * most, "%s: '%s': %llu steps, then %llu", model->name,
                      units[u], (unsigned long long)work[0], (unsigned long long)work[1]);
    }
    free(text);
}
END_TEST

static int run(const char *path)
{
    char err[256] = "";
    if (eng_gguf_open(path, &file, err, sizeof err) < 0 || eng_tokenizer_new(file, model->n_vocab, &tok, err, sizeof err) < 0) {
        fprintf(stderr, "%s: %s\n", path, err);
        return 1;
    }
    Suite *s = suite_create("tokenizer golden");
    TCase *c = tcase_create(model->name);
    tcase_add_test(c, test_every_case);
    tcase_add_test(c, test_facts);
    tcase_add_test(c, test_text_stays_text);
    tcase_add_test(c, test_random_unicode_round_trip);
    tcase_add_test(c, test_work_is_linear);
    suite_add_tcase(s, c);
    int r = t_run(s);
    eng_tokenizer_free(tok);
    eng_gguf_close(file);
    tok = NULL;
    file = NULL;
    return r;
}

int main(void)
{
    int failed = 0, ran = 0;
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        model = &models[i];
        const char *path = t_model(model->name);
        if (!path)
            continue;
        failed |= run(path);
        ran++;
    }
    return ran ? failed : 77;
}
