/* SentencePiece's BPE on made-up vocabularies: merging against the rule itself, spaces, bytes, special tokens, and what is refused. */
#include "engine.h"
#include "gguf_writer.h"
#include "support.h"
#include "tokenizer.h"
#include "tokenizer_parts.h"

#include <errno.h>
#include <math.h>

#define SPACE "\xe2\x96\x81"

enum { N = ENG_NORMAL, U = ENG_UNKNOWN, C = ENG_CONTROL, D = ENG_USER_DEFINED, X = ENG_UNUSED, B = ENG_BYTE };

typedef struct {
    const char *text;
    int type;
    float score;
} token;

/* Some bytes have tokens, one has none. */
static const token small[] = {
    {"<unk>", U, 0},  {"<s>", C, 0},       {"</s>", C, 0},     {"<0x0A>", B, 0}, {"<0xC3>", B, 0}, {"<0xA9>", B, 0},
    {"<0xE2>", B, 0}, {"<0xFF>", B, 0},    {SPACE, N, -10},    {"a", N, -11},    {"b", N, -12},    {"c", N, -13},
    {"ab", N, -3},    {"bc", N, -2},       {SPACE "a", N, -1}, {"abc", N, -4},   {"<go>", C, 0},   {"<tool>", D, 0},
    {"  ", D, 0},     {SPACE "ab", N, -5}, {"s", N, -20},      {">", N, -21},    {"x", X, -1},     {"ax", N, 0},
};
enum { N_SMALL = sizeof small / sizeof *small };

typedef struct {
    const token *tokens;       /* NULL: small */
    size_t n;                  /* 0: of small */
    const char *arch;          /* NULL: llama */
    int space_prefix, add_bos; /* 0: no such key, 1: false, 2: true; 3: not a boolean */
    const int *ids;            /* bos, eos, unknown; -1: no such key. NULL: 1, 2, 0 */
    size_t n_scores;           /* 0: as many as tokens; 1: no such key */
    bool string_scores;
} vocab;

typedef struct {
    uint8_t *bytes;
    eng_gguf *file;
    eng_tokenizer *tok;
    char err[256];
} loaded;

static loaded one;

static void put_flag(w_gguf *w, const char *key, int v)
{
    if (v == 3)
        w_key_u32(w, key, 1);
    else if (v)
        w_key(w, key, W_BOOL, &(char){(char)(v == 2)}, 1);
}

static void put_id(w_gguf *w, const char *key, int id)
{
    if (id >= 0)
        w_key_u32(w, key, (uint32_t)id);
}

static int load(const vocab *given)
{
    static const int usual[] = {1, 2, 0};
    vocab filled = *given, *v = &filled;
    if (!v->tokens) {
        v->tokens = small;
        v->n = N_SMALL;
    }
    if (!v->n)
        v->n = N_SMALL;
    if (!v->ids)
        v->ids = usual;
    one = (loaded){0};
    w_gguf w = {0};
    const char **texts = calloc(v->n, sizeof *texts);
    int32_t *types = calloc(v->n, sizeof *types);
    float *scores = calloc(v->n + 1, sizeof *scores);
    for (size_t i = 0; i < v->n; i++) {
        texts[i] = v->tokens[i].text;
        types[i] = v->tokens[i].type;
        scores[i] = v->tokens[i].score;
    }
    w_key_str(&w, "general.architecture", v->arch ? v->arch : "llama");
    w_key_str(&w, "tokenizer.ggml.model", "llama");
    w_key_strings(&w, "tokenizer.ggml.tokens", v->n, texts);
    w_key_array(&w, "tokenizer.ggml.token_type", W_I32, v->n, types, v->n * sizeof *types);
    size_t n_scores = v->n_scores ? v->n_scores : v->n;
    if (v->string_scores)
        w_key_strings(&w, "tokenizer.ggml.scores", v->n, texts);
    else if (n_scores > 1)
        w_key_array(&w, "tokenizer.ggml.scores", W_F32, n_scores, scores, n_scores * sizeof *scores);
    put_flag(&w, "tokenizer.ggml.add_space_prefix", v->space_prefix);
    put_flag(&w, "tokenizer.ggml.add_bos_token", v->add_bos);
    put_id(&w, "tokenizer.ggml.bos_token_id", v->ids[0]);
    put_id(&w, "tokenizer.ggml.eos_token_id", v->ids[1]);
    put_id(&w, "tokenizer.ggml.unknown_token_id", v->ids[2]);
    w_tensor(&w, "token_embd.weight", 0, 1, &(uint64_t){32}, NULL, 128);
    size_t n;
    one.bytes = w_finish(&w, &n);
    free(texts);
    free(types);
    free(scores);
    ck_assert_msg(!eng_gguf_open_memory(one.bytes, n, &one.file, one.err, sizeof one.err), "%s", one.err);
    return eng_tokenizer_new(one.file, (uint32_t)v->n, &one.tok, one.err, sizeof one.err);
}

static void unload(void)
{
    eng_tokenizer_free(one.tok);
    eng_gguf_close(one.file);
    free(one.bytes);
}

/* Compares the ids with a list that ends at -1. */
static void expect(const char *text, size_t len, unsigned flags, const char *guard, const int *want)
{
    int32_t *ids = NULL;
    size_t n = 99;
    ck_assert_int_eq(eng_tokenizer_encode(one.tok, text, len, flags, guard, &ids, &n), 0);
    for (size_t i = 0; i < n || want[i] >= 0; i++)
        ck_assert_msg(i < n && want[i] == ids[i], "'%s': id %zu is %d, not %d (of %zu)", text, i, i < n ? ids[i] : -1, want[i], n);
    free(ids);
}
#define EXPECT(text, flags, guard, ...) expect(text, sizeof(text) - 1, flags, guard, (const int[]){__VA_ARGS__ __VA_OPT__(, ) - 1})

START_TEST(test_merging)
{
    ck_assert_msg(!load(&(vocab){.space_prefix = 1}), "%s", one.err);
    EXPECT("abc", 0, NULL, 15); /* bc before ab; a + bc is abc */
    unload();
    token t[N_SMALL];
    memcpy(t, small, sizeof t);
    t[15].text = "another";
    ck_assert_msg(!load(&(vocab){.tokens = t, .space_prefix = 1}), "%s", one.err);
    EXPECT("abc", 0, NULL, 9, 13);
    EXPECT("ab", 0, NULL, 12);
    EXPECT(" ab", 0, NULL, 19); /* the space and a first, then b */
    EXPECT("ab a", 0, NULL, 12, 14);
    EXPECT("", 0, NULL);
    unload();
}
END_TEST

START_TEST(test_spaces)
{
    ck_assert_msg(!load(&(vocab){0}), "%s", one.err); /* the space before is the default */
    EXPECT("a", 0, NULL, 14);
    EXPECT("a a", 0, NULL, 14, 14);
    EXPECT("b", 0, NULL, 8, 10);
    EXPECT(" a", 0, NULL, 8, 14);
    EXPECT("b  b", 0, NULL, 8, 10, 18, 8, 10); /* two spaces: user-defined, cut out; what follows a token gets its space */
    EXPECT("a<go>a", ENG_TOK_PARSE_SPECIAL, NULL, 14, 16, 14);
    EXPECT("<go>", ENG_TOK_PARSE_SPECIAL, NULL, 16); /* and nothing gets none */
    EXPECT("<go>\x01", ENG_TOK_PARSE_SPECIAL, "\x01", 16);
    EXPECT("a\xe2\x96\x81"
           "a",
           0, NULL, 14, 14); /* the marker itself is a space */
    unload();
    ck_assert_msg(!load(&(vocab){.space_prefix = 1}), "%s", one.err);
    EXPECT("a", 0, NULL, 9);
    EXPECT("a a", 0, NULL, 9, 14);
    unload();
}
END_TEST

/* What is no token is its bytes; unknown, once, where one of them has no token. */
START_TEST(test_bytes)
{
    ck_assert_msg(!load(&(vocab){.space_prefix = 1}), "%s", one.err);
    EXPECT("\n", 0, NULL, 3);
    EXPECT("a\xc3\xa9\n", 0, NULL, 9, 4, 5, 3);
    EXPECT("\xff", 0, NULL, 7);
    EXPECT("\xc3", 0, NULL, 4); /* cut off */
    EXPECT("\xc3"
           "a",
           0, NULL, 4, 9);
    EXPECT("\xe2\x82\xac", 0, NULL, 0); /* 82 and AC have none */
    EXPECT("d\n", 0, NULL, 0, 3);
    EXPECT("\xe2\x82", 0, NULL, 6, 0); /* not UTF-8: each by itself */
    EXPECT("a\0b", 0, NULL, 9, 0, 10);
    EXPECT("<0x0A>", 0, NULL, 0, 0, 0, 0, 0, 21); /* text that looks like a byte is text */
    unload();
    ck_assert_msg(!load(&(vocab){.ids = (int[]){1, 2, -1}, .space_prefix = 1}), "%s", one.err);
    EXPECT("ada", 0, NULL, 9, 9); /* no unknown: vanishes */
    unload();
    token t[N_SMALL];
    memcpy(t, small, sizeof t);
    t[8].text = "<0x96>"; /* no token for the space, but for its bytes */
    t[8].type = B;
    t[7].text = "<0x81>";
    ck_assert_msg(!load(&(vocab){.tokens = t, .space_prefix = 1}), "%s", one.err);
    EXPECT("b b", 0, NULL, 10, 6, 8, 7, 10);
    EXPECT(" a", 0, NULL, 14); /* still a part of a token */
    unload();
}
END_TEST

START_TEST(test_special)
{
    ck_assert_msg(!load(&(vocab){.space_prefix = 1}), "%s", one.err);
    EXPECT("a<tool>b", 0, NULL, 9, 17, 10);
    EXPECT("<s>", ENG_TOK_PARSE_SPECIAL, NULL, 1);
    EXPECT("s>", 0, NULL, 20, 21);
    EXPECT("<s>", 0, NULL, 0, 20, 21);
    EXPECT("<\x01s>", ENG_TOK_PARSE_SPECIAL, "\x01", 0, 20, 21);
    EXPECT("x", 0, NULL, 0);                      /* unused: no text becomes it */
    EXPECT("ax", 0, NULL, 23);                    /* but a token it is a part of */
    EXPECT("a", ENG_TOK_ADD_SPECIAL, NULL, 1, 9); /* the default */
    unload();
    ck_assert_msg(!load(&(vocab){.space_prefix = 1, .add_bos = 1}), "%s", one.err);
    EXPECT("a", ENG_TOK_ADD_SPECIAL, NULL, 9);
    unload();
    ck_assert_msg(!load(&(vocab){.ids = (int[]){-1, -1, 0}}), "%s", one.err);
    ck_assert_int_eq(eng_tokenizer_bos(one.tok), 1); /* by their texts */
    ck_assert_int_eq(eng_tokenizer_eos(one.tok), 2);
    ck_assert(eng_tokenizer_is_eog(one.tok, 2) && !eng_tokenizer_is_eog(one.tok, 1));
    unload();
}
END_TEST

/* Phi-3's special tokens take the white space after them; <s> does not (its tokenizer_config.json: "rstrip"). */
START_TEST(test_phi3)
{
    for (int phi = 0; phi < 2; phi++) {
        ck_assert_msg(!load(&(vocab){.arch = phi ? "phi3" : "llama", .space_prefix = 1}), "%s", one.err);
        if (phi) {
            EXPECT("<go>\n a<go>\n", ENG_TOK_PARSE_SPECIAL, NULL, 16, 9, 16);
            EXPECT("<s>\na", ENG_TOK_PARSE_SPECIAL, NULL, 1, 3, 9);
        } else {
            EXPECT("<go>\n a<go>\n", ENG_TOK_PARSE_SPECIAL, NULL, 16, 3, 14, 16, 3);
        }
        unload();
    }
}
END_TEST

START_TEST(test_text)
{
    static const struct {
        int id;
        const char *text;
    } cases[] = {{3, "\n"}, {4, "\xc3"}, {8, " "}, {14, " a"}, {17, "<tool>"}, {18, "  "}, {16, "<go>"}, {0, "<unk>"}, {22, ""}};
    ck_assert_msg(!load(&(vocab){0}), "%s", one.err);
    const char *s;
    size_t n;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ck_assert_int_eq(eng_tokenizer_text(one.tok, cases[i].id, true, &s, &n), 0);
        ck_assert_msg(n == strlen(cases[i].text) && !memcmp(s, cases[i].text, n), "token %d", cases[i].id);
    }
    ck_assert_int_eq(eng_tokenizer_text(one.tok, 16, false, &s, &n), 0);
    ck_assert_uint_eq(n, 0);
    unload();
}
END_TEST

/* ---- the rule itself ---------------------------------------------------------------------------------------------- */

/* Texts, joined one pair at a time: the one whose text is the token of the highest score, leftmost. Characters a to f, '_' for a space. */
static size_t merge_naively(const token *tokens, size_t n, const char *word, int *ids)
{
    char parts[64][64];
    size_t m = 0;
    for (const char *c = word; *c; c++)
        strcpy(parts[m++], *c == '_' ? SPACE : (char[]){*c, 0});
    for (;;) {
        size_t at = m;
        float best = 0;
        for (size_t i = 0; i + 1 < m; i++) {
            char joined[128];
            strcat(strcpy(joined, parts[i]), parts[i + 1]);
            for (size_t k = 0; k < n; k++)
                if (!strcmp(tokens[k].text, joined) && (at == m || tokens[k].score > best)) {
                    best = tokens[k].score;
                    at = i;
                }
        }
        if (at == m)
            break;
        char right[64];
        memcpy(right, parts[at + 1], sizeof right);
        strcat(parts[at], right);
        memmove(parts + at + 1, parts + at + 2, (m - at - 2) * sizeof *parts);
        m--;
    }
    for (size_t i = 0; i < m; i++) {
        ids[i] = 0; /* unknown */
        for (size_t k = 0; k < n; k++)
            if (!strcmp(tokens[k].text, parts[i]))
                ids[i] = (int)k;
    }
    return m;
}

/* Tokens of random letters, with spaces anywhere; not every letter is a token; scores with ties. */
START_TEST(test_merging_against_rule)
{
    enum { MOST = 60 };
    static const char *const letters[] = {"a", "b", "c", "d", SPACE};
    t_rng rng = t_seed(31);
    for (int round = 0; round < 80; round++) {
        static char texts[MOST][64];
        token tokens[MOST] = {{"<unk>", U, 0}};
        size_t n = 1;
        while (n < MOST) {
            size_t len = 1 + (size_t)(t_u64(&rng) % 4);
            *texts[n] = 0;
            for (size_t i = 0; i < len; i++)
                strcat(texts[n], letters[t_u64(&rng) % 5]);
            bool twice = false;
            for (size_t k = 1; k < n; k++)
                twice |= !strcmp(texts[k], texts[n]);
            if (!twice) {
                tokens[n] = (token){texts[n], N, -(float)(t_u64(&rng) % 20)};
                n++;
            }
        }
        ck_assert_msg(!load(&(vocab){.tokens = tokens, .n = n, .space_prefix = 1, .ids = (int[]){-1, -1, 0}}), "%s", one.err);
        for (int k = 0; k < 100; k++) {
            char word[41], text[41];
            size_t len = 1 + (size_t)(t_u64(&rng) % 40);
            for (size_t i = 0; i < len; i++) {
                word[i] = "abcde__"[t_u64(&rng) % 7]; /* e is in no token */
                text[i] = word[i] == '_' ? ' ' : word[i];
            }
            word[len] = 0;
            int want[64];
            size_t m = merge_naively(tokens, n, word, want);
            want[m] = -1;
            expect(text, len, 0, NULL, want);
        }
        unload();
    }
}
END_TEST

/* ---- refusals, and long text -------------------------------------------------------------------------------------- */

static void refuse(const vocab *v, int rc, const char *word)
{
    ck_assert_int_eq(load(v), rc);
    ck_assert_msg(strstr(one.err, word) != NULL, "'%s' does not say %s", one.err, word);
    ck_assert_ptr_null(one.tok);
    unload();
}

START_TEST(test_refusals)
{
    refuse(&(vocab){.n_scores = 1}, -EINVAL, "scores is missing");
    refuse(&(vocab){.n_scores = N_SMALL - 1}, -EINVAL, "scores has 23");
    refuse(&(vocab){.n_scores = N_SMALL + 1}, -EINVAL, "scores has 25");
    refuse(&(vocab){.string_scores = true}, -EINVAL, "scores");
    refuse(&(vocab){.ids = (int[]){1, 2, N_SMALL}}, -EINVAL, "unknown_token_id");
    refuse(&(vocab){.ids = (int[]){N_SMALL, 2, 0}}, -EINVAL, "bos_token_id");
    refuse(&(vocab){.space_prefix = 3}, -EINVAL, "add_space_prefix");
    token t[N_SMALL];
    for (int i = 0; i < 2; i++) {
        memcpy(t, small, sizeof t);
        t[9].score = i ? INFINITY : NAN;
        refuse(&(vocab){.tokens = t}, -EINVAL, "scores");
    }
    static const char *const no_bytes[] = {"<0x0>", "<0xGG>", "0x0A", "<0x0A", "\n", "<0x00A>", "<1x0A>"};
    for (size_t i = 0; i < sizeof no_bytes / sizeof *no_bytes; i++) {
        memcpy(t, small, sizeof t);
        t[3].text = no_bytes[i];
        refuse(&(vocab){.tokens = t}, -EINVAL, "byte");
    }
    memcpy(t, small, sizeof t);
    char *longest = malloc(1026);
    memset(longest, 'a', 1025);
    longest[1025] = 0;
    t[9].text = longest;
    refuse(&(vocab){.tokens = t}, -ENOTSUP, "1025 bytes long");
    longest[1024] = 0;
    ck_assert_msg(!load(&(vocab){.tokens = t}), "%s", one.err);
    unload();
    free(longest);
}
END_TEST

/* The work of ten million bytes (of the last two, one), counted, is ten times that of a tenth, but for the heap's logarithm. No
 * user-defined spaces here. */
START_TEST(test_work_is_linear)
{
    enum { BYTES = 10000000 };
    token t[40] = {{"<unk>", U, 0}, {"a", N, -1}, {SPACE, N, -1}};
    char texts[40][128] = {0};
    size_t n = 3;
    for (int k = 0; k < 5; k++) /* 2, 4 ... 32 of each */
        for (int letter = 1; letter < 3; letter++, n++) {
            for (int i = 0; i < 2 << k; i++)
                strcat(texts[n], t[letter].text);
            t[n] = (token){texts[n], N, (float)-k};
        }
    ck_assert_msg(!load(&(vocab){.tokens = t, .n = n, .ids = (int[]){-1, -1, 0}}), "%s", one.err);
    char *text = malloc(BYTES);
    static const char *const units[] = {"a", " ", "a ", "\xff"};
    for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
        for (size_t i = 0; i < BYTES; i++)
            text[i] = units[u][i % strlen(units[u])];
        uint64_t work[2], most = u < 2 ? BYTES : BYTES / 10;
        for (int j = 0; j < 2; j++) {
            int32_t *ids;
            size_t m;
            ck_assert_int_eq(eng_tokenizer_encode_counted(one.tok, text, (size_t)most / (j ? 1 : 10), 0, &ids, &m, &work[j]), 0);
            if (u < 2)
                ck_assert_uint_le(m, most / (j ? 1 : 10) / 32 + 6);
            free(ids);
        }
        ck_assert_msg(work[0] > most / 10 && work[1] < 15 * work[0] && work[1] < 100 * most, "'%s': %llu steps, then %llu", units[u],
                      (unsigned long long)work[0], (unsigned long long)work[1]);
    }
    free(text);
    unload();
}
END_TEST

int main(void)
{
    Suite *s = suite_create("spm");
    TCase *c = tcase_create("spm");
    tcase_add_test(c, test_merging);
    tcase_add_test(c, test_spaces);
    tcase_add_test(c, test_bytes);
    tcase_add_test(c, test_special);
    tcase_add_test(c, test_phi3);
    tcase_add_test(c, test_text);
    tcase_add_test(c, test_merging_against_rule);
    tcase_add_test(c, test_refusals);
    tcase_add_test(c, test_work_is_linear);
    suite_add_tcase(s, c);
    return t_run(s);
}
