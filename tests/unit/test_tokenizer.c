/* The byte-level BPE tokenizer with made-up vocabularies: merging, special tokens, refusals, hostile text. */
#include "engine.h"
#include "pre_names.h"
#include "support.h"
#include "tokenizer.h"
#include "tokenizer_parts.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- a GGUF file of a made-up vocabulary -------------------------------------------------------------------------- */

typedef struct {
    char bytes[1 << 17];
    size_t n;
    uint64_t keys;
} writer;

static void put(writer *w, const void *p, size_t n)
{
    ck_assert(w->n + n <= sizeof w->bytes);
    memcpy(w->bytes + w->n, p, n);
    w->n += n;
}

static void put_u32(writer *w, uint32_t v)
{
    put(w, &v, sizeof v);
}

static void put_u64(writer *w, uint64_t v)
{
    put(w, &v, sizeof v);
}

static void put_str(writer *w, const char *s)
{
    put_u64(w, strlen(s));
    put(w, s, strlen(s));
}

enum { GGUF_U32 = 4, GGUF_I32 = 5, GGUF_BOOL = 7, GGUF_STRING = 8, GGUF_ARRAY = 9 };

static void put_key(writer *w, const char *key, uint32_t type)
{
    put_str(w, key);
    put_u32(w, type);
    w->keys++;
}

typedef struct {
    const char *pre;
    const char *merges[32]; /* until NULL */
    struct {
        const char *text;
        int type;
    } more[32];           /* beside the 256 bytes, from id 256 on */
    int bos, eos, eot;    /* 0: no such key */
    int add_bos, add_eos; /* 0: no such key, 1: false, 2: true */
    int no_byte;          /* > 0: this byte has no token, but a filler in its place */
} vocab;

/* GPT-2's alphabet, restated: printable Latin-1 is itself, the rest U+0100 and up. */
static void byte_text(int b, char out[4])
{
    int c = b, next = 0x100;
    for (int i = 0; i <= b; i++) {
        bool plain = (i >= 33 && i <= 126) || (i >= 161 && i <= 172) || i >= 174;
        if (!plain)
            next++;
        if (i == b && !plain)
            c = next - 1;
    }
    if (c < 0x80)
        memcpy(out, (char[]){(char)c, 0}, 2);
    else
        memcpy(out, (char[]){(char)(0xc0 | c >> 6), (char)(0x80 | (c & 63)), 0}, 3);
}

static void put_optional(writer *w, const char *key, int id)
{
    if (!id)
        return;
    put_key(w, key, GGUF_U32);
    put_u32(w, (uint32_t)id);
}

static void put_flag(writer *w, const char *key, int v)
{
    if (!v)
        return;
    put_key(w, key, GGUF_BOOL);
    put(w, &(char){(char)(v == 2)}, 1);
}

static uint32_t put_vocab(writer *w, const vocab *v)
{
    uint32_t more = 0, merges = 0;
    while (v->more[more].text)
        more++;
    while (v->merges[merges])
        merges++;
    put_key(w, "tokenizer.ggml.tokens", GGUF_ARRAY);
    put_u32(w, GGUF_STRING);
    put_u64(w, 256 + more);
    for (int b = 0; b < 256; b++) {
        char text[4];
        byte_text(b, text);
        put_str(w, b && b == v->no_byte ? "<filler>" : text);
    }
    for (uint32_t i = 0; i < more; i++)
        put_str(w, v->more[i].text);
    put_key(w, "tokenizer.ggml.token_type", GGUF_ARRAY);
    put_u32(w, GGUF_I32);
    put_u64(w, 256 + more);
    for (uint32_t i = 0; i < 256 + more; i++)
        put_u32(w, i < 256 ? 1 : (uint32_t)v->more[i - 256].type);
    put_key(w, "tokenizer.ggml.merges", GGUF_ARRAY);
    put_u32(w, GGUF_STRING);
    put_u64(w, merges);
    for (uint32_t i = 0; i < merges; i++)
        put_str(w, v->merges[i]);
    return 256 + more;
}

typedef struct {
    _Alignas(64) writer w;
    eng_gguf *file;
    eng_tokenizer *tok;
    char err[256];
} loaded;

static int load(loaded *l, const vocab *v)
{
    *l = (loaded){0};
    writer *w = &l->w;
    put(w, "GGUF", 4);
    put_u32(w, 3);
    put_u64(w, 1);
    put_u64(w, 0); /* number of keys: at the end */
    put_key(w, "general.architecture", GGUF_STRING);
    put_str(w, "llama");
    put_key(w, "tokenizer.ggml.model", GGUF_STRING);
    put_str(w, "gpt2");
    put_key(w, "tokenizer.ggml.pre", GGUF_STRING);
    put_str(w, v->pre);
    uint32_t n_vocab = put_vocab(w, v);
    put_optional(w, "tokenizer.ggml.bos_token_id", v->bos);
    put_optional(w, "tokenizer.ggml.eos_token_id", v->eos);
    put_optional(w, "tokenizer.ggml.eot_token_id", v->eot);
    put_flag(w, "tokenizer.ggml.add_bos_token", v->add_bos);
    put_flag(w, "tokenizer.ggml.add_eos_token", v->add_eos);
    memcpy(w->bytes + 16, &w->keys, 8);
    put_str(w, "token_embd.weight"); /* a file has at least one tensor: 32 floats */
    put_u32(w, 1);
    put_u64(w, 32);
    put_u32(w, 0);
    put_u64(w, 0);
    while (w->n % 32)
        put(w, "", 1);
    put(w, (float[32]){0}, 128);
    ck_assert_msg(!eng_gguf_open_memory(w->bytes, w->n, &l->file, l->err, sizeof l->err), "%s", l->err);
    return eng_tokenizer_new(l->file, n_vocab, &l->tok, l->err, sizeof l->err);
}

static void unload(loaded *l)
{
    eng_tokenizer_free(l->tok);
    eng_gguf_close(l->file);
}

/* Compares the ids with a list that ends at -1. */
static void expect(const loaded *l, const char *text, size_t len, unsigned flags, const char *guard, const int *want)
{
    int32_t *ids = NULL;
    size_t n = 99;
    ck_assert_int_eq(eng_tokenizer_encode(l->tok, text, len, flags, guard, &ids, &n), 0);
    for (size_t i = 0; i < n || want[i] >= 0; i++)
        ck_assert_msg(i < n && want[i] == ids[i], "'%s': id %zu is %d, not %d (of %zu)", text, i, i < n ? ids[i] : -1, want[i], n);
    free(ids);
}
#define EXPECT(l, text, flags, guard, ...) expect(l, text, sizeof(text) - 1, flags, guard, (const int[]){__VA_ARGS__ __VA_OPT__(, ) - 1})

static loaded one; /* too big for the stack */

/* ---- merging ------------------------------------------------------------------------------------------------------ */

/* By rank, leftmost first; a rule that does not apply at once may later. */
START_TEST(test_merge_order)
{
    vocab v = {.pre = "gpt-2",
               .merges = {"b c", "a b", "a a", "aa aa", "bc d"},
               .more = {{"bc", 1}, {"ab", 1}, {"aa", 1}, {"aaaa", 1}, {"bcd", 1}}};
    ck_assert_msg(!load(&one, &v), "%s", one.err);
    EXPECT(&one, "abc", 0, NULL, 'a', 256);
    EXPECT(&one, "ab", 0, NULL, 257);
    EXPECT(&one, "abcd", 0, NULL, 'a', 260);
    EXPECT(&one, "aaa", 0, NULL, 258, 'a');
    EXPECT(&one, "aaaaaaa", 0, NULL, 259, 258, 'a');
    EXPECT(&one, "aaab", 0, NULL, 258, 257);
    unload(&one);
}
END_TEST

/* Of a merge given twice the first counts, as in llama.cpp: the second may not spoil its rank. */
START_TEST(test_merge_twice)
{
    vocab v = {.pre = "gpt-2", .merges = {"a b", "b c", "a b"}, .more = {{"ab", 1}, {"bc", 1}}};
    ck_assert_msg(!load(&one, &v), "%s", one.err);
    EXPECT(&one, "abc", 0, NULL, 256, 'c');
    unload(&one);
}
END_TEST

/* Every pair's merge, naively: the lowest rank anywhere, leftmost, again and again. */
static size_t merge_naively(const int *rank_of, const char *word, size_t n, int *ids)
{
    for (size_t i = 0; i < n; i++)
        ids[i] = (unsigned char)word[i];
    for (;;) {
        int best = INT32_MAX;
        size_t at = 0;
        for (size_t i = 0; i + 1 < n; i++) {
            int r = rank_of[ids[i] * 512 + ids[i + 1]];
            if (r && r < best) {
                best = r;
                at = i;
            }
        }
        if (best == INT32_MAX)
            return n;
        ids[at] = 255 + best; /* rank r (from 1) makes token 255 + r */
        memmove(ids + at + 1, ids + at + 2, (n - at - 2) * sizeof *ids);
        n--;
    }
}

START_TEST(test_merge_against_naive)
{
    enum { N = 100 };
    t_rng rng = t_seed(4);
    for (int round = 0; round < 30; round++) {
        eng_merges *m;
        int *rank_of = calloc(512 * 512, sizeof *rank_of);
        int32_t byte_id[256];
        for (int b = 0; b < 256; b++)
            byte_id[b] = b;
        ck_assert_int_eq(eng_merges_new(N, &m), 0);
        for (int r = 1; r <= N; r++) { /* of a few letters and what earlier merges made, each pair once */
            int left, right;
            do {
                left = t_uniform(&rng) < .5 || r == 1 ? 'a' + (int)(t_u64(&rng) % 4) : 256 + (int)(t_u64(&rng) % (uint64_t)(r - 1));
                right = t_uniform(&rng) < .5 || r == 1 ? 'a' + (int)(t_u64(&rng) % 4) : 256 + (int)(t_u64(&rng) % (uint64_t)(r - 1));
            } while (rank_of[left * 512 + right]);
            rank_of[left * 512 + right] = r;
            eng_merges_add(m, (uint32_t)r, left, right, 255 + r);
        }
        eng_merge_scratch scratch = {0};
        for (int k = 0; k < 100; k++) {
            char word[200];
            int want[200];
            size_t n = 1 + (size_t)(t_u64(&rng) % sizeof word);
            for (size_t i = 0; i < n; i++)
                word[i] = (char)('a' + t_u64(&rng) % 4);
            size_t n_want = merge_naively(rank_of, word, n, want);
            eng_ids got = {0};
            ck_assert_int_eq(eng_merges_apply(m, &scratch, byte_id, word, n, &got), 0);
            ck_assert_uint_eq(got.n, n_want);
            ck_assert_mem_eq(got.v, want, n_want * sizeof *want);
            free(got.v);
        }
        eng_merge_scratch_done(&scratch);
        eng_merges_free(m);
        free(rank_of);
    }
}
END_TEST

/* A byte without a token vanishes, and its neighbours do not become neighbours. */
START_TEST(test_byte_without_token)
{
    vocab v = {.pre = "gpt-2", .merges = {"a b"}, .more = {{"ab", 1}}, .no_byte = 'q'};
    ck_assert_msg(!load(&one, &v), "%s", one.err);
    EXPECT(&one, "abqab", 0, NULL, 256, 256);
    EXPECT(&one, "aqb", 0, NULL, 'a', 'b');
    EXPECT(&one, "q", 0, NULL);
    unload(&one);
}
END_TEST

/* A word that is a token is taken whole for llama-bpe alone, and only where the whole word is one. */
START_TEST(test_whole_words)
{
    for (int llama = 0; llama < 2; llama++) {
        vocab v = {.pre = llama ? "llama-bpe" : "qwen2",
                   .merges = {"c a"},
                   .more = {{"ca", 1},
                            {"cat", 1},
                            {"\xc4\xa0"
                             "cat",
                             1}}};
        ck_assert_msg(!load(&one, &v), "%s", one.err);
        if (llama) {
            EXPECT(&one, "cat", 0, NULL, 257);
            EXPECT(&one, "cat cat", 0, NULL, 257, 258);
        } else {
            EXPECT(&one, "cat", 0, NULL, 256, 't');
        }
        EXPECT(&one, "cats", 0, NULL, 256, 't', 's');
        unload(&one);
    }
}
END_TEST

/* Bytes that are not UTF-8 are the tokens of those bytes. */
START_TEST(test_invalid_bytes)
{
    vocab v = {.pre = "smollm", .merges = {"\xc3\x83 \xc2\xa9"}, .more = {{"\xc3\x83\xc2\xa9", 1}}};
    ck_assert_msg(!load(&one, &v), "%s", one.err);
    EXPECT(&one, "\xc3\xa9", 0, NULL, 256);
    EXPECT(&one, "\xff\xc3\xa9\xc3", 0, NULL, 0xff, 256, 0xc3);
    EXPECT(&one, "a\0b", 0, NULL, 'a', 0, 'b');
    unload(&one);
}
END_TEST

/* ---- special tokens ----------------------------------------------------------------------------------------------- */

static const vocab chat = {.pre = "smollm",
                           .merges = {"< |"},
                           .more = {{"<|", 1}, {"<|go|>", 3}, {"<|go|>>", 3}, {"<tool>", 4}, {"<unk>", 2}, {"<|end", 4}, {"[PAD1]", 5}},
                           .bos = 257,
                           .eos = 258,
                           .eot = 259};

START_TEST(test_special)
{
    ck_assert_msg(!load(&one, &chat), "%s", one.err);
    EXPECT(&one, "<|go|>", ENG_TOK_PARSE_SPECIAL, NULL, 257);
    EXPECT(&one, "<|go|>", 0, NULL, 256, 'g', 'o', '|', '>');
    EXPECT(&one, "<|go|>>", ENG_TOK_PARSE_SPECIAL, NULL, 258); /* the longest */
    EXPECT(&one, "<|go|>><|go|>a", ENG_TOK_PARSE_SPECIAL, NULL, 258, 257, 'a');
    EXPECT(&one, "<tool><|end", 0, NULL, 259, 261); /* user-defined: always */
    EXPECT(&one, "<|endx<|en", ENG_TOK_PARSE_SPECIAL, NULL, 261, 'x', 256, 'e', 'n');
    EXPECT(&one, "<unk>", ENG_TOK_PARSE_SPECIAL, NULL, 260);
    EXPECT(&one, "<unk>", 0, NULL, '<', 'u', 'n', 'k', '>');
    EXPECT(&one, "[PAD1]", ENG_TOK_PARSE_SPECIAL, NULL, '[', 'P', 'A', 'D', '1', ']'); /* unused: never */
    EXPECT(&one, "", ENG_TOK_PARSE_SPECIAL, NULL);
    /* Text beside a special token is split by itself: both spaces before the end belong together. */
    EXPECT(&one, "  <tool>", 0, NULL, ' ', ' ', 259);
    unload(&one);
}
END_TEST

/* Against trying every entry at every place. */
START_TEST(test_special_search)
{
    static const char *const texts[] = {"a", "ab", "abc", "b", "bcb", "ca", "cab", "caba", "cc"};
    enum { N = sizeof texts / sizeof *texts };
    t_rng rng = t_seed(9);
    for (int round = 0; round < 2000; round++) {
        eng_special entries[N];
        size_t n = 0;
        for (int i = 0; i < N; i++)
            if (t_u64(&rng) & 1)
                entries[n++] = (eng_special){{texts[i], strlen(texts[i])}, i};
        eng_specials s;
        ck_assert_int_eq(eng_specials_init(&s, entries, n), 0);
        char text[12];
        size_t len = (size_t)(t_u64(&rng) % sizeof text), from = len ? (size_t)(t_u64(&rng) % len) : 0;
        for (size_t i = 0; i < len; i++)
            text[i] = (char)('a' + t_u64(&rng) % 4);
        const eng_special *want = NULL;
        size_t at = 0, got_at = 0;
        for (at = from; at < len && !want; at++)
            for (size_t i = 0; i < n; i++)
                if (entries[i].text.n <= len - at && !memcmp(entries[i].text.s, text + at, entries[i].text.n) &&
                    (!want || entries[i].text.n > want->text.n))
                    want = &entries[i];
        const eng_special *got = eng_specials_find(&s, text, len, from, &got_at, &(uint64_t){0});
        ck_assert_int_eq(got != NULL, want != NULL);
        if (got) {
            ck_assert_int_eq(got->id, want->id);
            ck_assert_uint_eq(got_at, at - 1);
        }
        eng_specials_done(&s);
    }
}
END_TEST

START_TEST(test_guard)
{
    ck_assert_msg(!load(&one, &chat), "%s", one.err);
    EXPECT(&one, "<#!#|go|>", ENG_TOK_PARSE_SPECIAL, "#!#", 256, 'g', 'o', '|', '>');
    EXPECT(&one, "<#!#tool>", ENG_TOK_PARSE_SPECIAL, "#!#", '<', 't', 'o', 'o', 'l', '>');
    EXPECT(&one, "#!#<|go|>#!#<#!#|#!#", ENG_TOK_PARSE_SPECIAL, "#!#", 257, 256); /* beside a real one, and at the ends */
    EXPECT(&one, "#!#", ENG_TOK_PARSE_SPECIAL, "#!#");
    EXPECT(&one, "a#!", ENG_TOK_PARSE_SPECIAL, "#!#", 'a', '#', '!'); /* a part of it is text */
    EXPECT(&one, "a#!#b", ENG_TOK_PARSE_SPECIAL, "", 'a', '#', '!', '#', 'b');
    unload(&one);
}
END_TEST

/* No text becomes a control token without parse_special, not even where a whole word is its text. */
START_TEST(test_no_control_from_text)
{
    vocab v = {.pre = "llama-bpe", .more = {{"eot", 3}, {"unk", 2}, {"dot", 1}}};
    ck_assert_msg(!load(&one, &v), "%s", one.err);
    EXPECT(&one, "eot", 0, NULL, 'e', 'o', 't');
    EXPECT(&one, "unk", 0, NULL, 'u', 'n', 'k');
    EXPECT(&one, "dot", 0, NULL, 258);
    EXPECT(&one, "eot", ENG_TOK_PARSE_SPECIAL, NULL, 256);
    unload(&one);
}
END_TEST

START_TEST(test_bos_eos)
{
    static const struct {
        const char *pre;
        int add_bos, add_eos;
        bool bos, eos;
    } cases[] = {{"smollm", 0, 0, false, false}, {"llama-bpe", 0, 0, true, false}, {"llama-bpe", 1, 0, false, false},
                 {"smollm", 2, 1, true, false},  {"qwen2", 1, 2, false, true},     {"gpt-2", 2, 2, true, true}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        vocab v = chat;
        v.pre = cases[i].pre;
        v.add_bos = cases[i].add_bos;
        v.add_eos = cases[i].add_eos;
        ck_assert_msg(!load(&one, &v), "%s", one.err);
        ck_assert_int_eq(eng_tokenizer_add_bos(one.tok), cases[i].bos);
        int want[4], n = 0;
        if (cases[i].bos)
            want[n++] = 257;
        want[n++] = 'x';
        if (cases[i].eos)
            want[n++] = 258;
        want[n] = -1;
        expect(&one, "x", 1, ENG_TOK_ADD_SPECIAL, NULL, want);
        EXPECT(&one, "x", 0, NULL, 'x');
        unload(&one);
    }
}
END_TEST

START_TEST(test_roles)
{
    vocab v = {.pre = "qwen2", .more = {{"<|im_end|>", 3}, {"<|eot_id|>", 1}, {"mine", 3}, {"stop", 1}}, .eos = 258, .eot = 259};
    ck_assert_msg(!load(&one, &v), "%s", one.err);
    ck_assert_int_eq(eng_tokenizer_bos(one.tok), -1);
    ck_assert_int_eq(eng_tokenizer_eos(one.tok), 258);
    ck_assert(eng_tokenizer_is_eog(one.tok, 256));  /* by its name */
    ck_assert(!eng_tokenizer_is_eog(one.tok, 257)); /* its name, but ordinary text */
    ck_assert(eng_tokenizer_is_eog(one.tok, 258) && eng_tokenizer_is_eog(one.tok, 259));
    ck_assert(!eng_tokenizer_is_eog(one.tok, 'a') && !eng_tokenizer_is_eog(one.tok, -1) && !eng_tokenizer_is_eog(one.tok, 260));
    ck_assert(eng_tokenizer_is_control(one.tok, 256) && !eng_tokenizer_is_control(one.tok, 257) &&
              !eng_tokenizer_is_control(one.tok, 1000));
    unload(&one);
}
END_TEST

/* GPT-OSS ends a message with <|end|>, and goes on; where there is no <|return|> and <|call|>, it ends the answer. */
START_TEST(test_end_of_message)
{
    for (int harmony = 0; harmony < 2; harmony++) {
        vocab v = {.pre = "gpt-4o", .more = {{"<|end|>", 3}, {harmony ? "<|return|>" : "x y", 3}, {"<|call|>", 3}}, .eos = 257};
        ck_assert_msg(!load(&one, &v), "%s", one.err);
        ck_assert_int_eq(eng_tokenizer_is_eog(one.tok, 256), !harmony);
        ck_assert(eng_tokenizer_is_eog(one.tok, 257) && eng_tokenizer_is_eog(one.tok, 258));
        unload(&one);
    }
}
END_TEST

static void expect_text(int id, bool special, const char *want, size_t n)
{
    const char *s = NULL;
    size_t len = 99;
    ck_assert_int_eq(eng_tokenizer_text(one.tok, id, special, &s, &len), 0);
    ck_assert_msg(len == n && (!n || !memcmp(s, want, n)), "token %d: '%.*s'", id, (int)len, s);
}

START_TEST(test_text)
{
    vocab v = {.pre = "qwen2",
               .more = {{"\xc4\xa0hi", 1}, {"<|x|>", 3}, {"<y>", 4}, {"\xe2\x96\x81z", 1}, {"[PAD]", 5}, {"\xc3\x83\xc2\xa9", 1}}};
    ck_assert_msg(!load(&one, &v), "%s", one.err);
    for (int b = 0; b < 256; b++)
        expect_text(b, false, &(char){(char)b}, 1);
    expect_text(256, false, " hi", 3);
    expect_text(257, true, "<|x|>", 5);
    expect_text(257, false, "", 0);
    expect_text(258, false, "<y>", 3);
    expect_text(259, false, "\xe2\x96\x81z", 4); /* not of the byte alphabet: as it is */
    expect_text(260, true, "", 0);
    expect_text(261, false, "\xc3\xa9", 2);
    const char *s;
    size_t n;
    ck_assert_int_eq(eng_tokenizer_text(one.tok, -1, true, &s, &n), -EINVAL);
    ck_assert_int_eq(eng_tokenizer_text(one.tok, 262, true, &s, &n), -EINVAL);
    unload(&one);
}
END_TEST

/* ---- refusals ----------------------------------------------------------------------------------------------------- */

static void refuse(const vocab *v, int rc, const char *word)
{
    ck_assert_int_eq(load(&one, v), rc);
    ck_assert_msg(strstr(one.err, word) != NULL, "'%s' does not say %s", one.err, word);
    ck_assert_ptr_null(one.tok);
    unload(&one);
}

START_TEST(test_refusals)
{
    refuse(&(vocab){.pre = "gemma-bpe"}, -ENOTSUP, "gemma-bpe");
    refuse(&(vocab){.pre = "default"}, -ENOTSUP, "tokenizer.ggml.pre"); /* llama.cpp's "default" is another expression */
    refuse(&(vocab){.pre = "gpt-2", .more = {{"a", 1}}}, -EINVAL, "twice");
    refuse(&(vocab){.pre = "gpt-2", .more = {{"", 1}}}, -EINVAL, "empty");
    refuse(&(vocab){.pre = "gpt-2", .more = {{"\xff", 1}}}, -EINVAL, "UTF-8");
    refuse(&(vocab){.pre = "gpt-2", .more = {{"xy", 7}}}, -EINVAL, "token_type");
    refuse(&(vocab){.pre = "gpt-2", .more = {{"xy", 0}}}, -EINVAL, "token_type");
    static const char *const merges[] = {"", " ", "ab", "a ", " a", "a b", "zz b", "b zz", "a  b", "a b c", "x y"};
    for (size_t i = 0; i < sizeof merges / sizeof *merges; i++) /* "x y" would make a control token */
        refuse(&(vocab){.pre = "gpt-2", .merges = {merges[i]}, .more = {{"xy", 3}}}, -EINVAL, "merges");
    refuse(&(vocab){.pre = "gpt-2", .bos = 256}, -EINVAL, "bos_token_id");
    refuse(&(vocab){.pre = "gpt-2", .eos = 300}, -EINVAL, "eos_token_id");
    refuse(&(vocab){.pre = "gpt-2", .eot = 300}, -EINVAL, "eot_token_id");
}
END_TEST

START_TEST(test_vocab_size)
{
    vocab v = {.pre = "gpt-2"};
    ck_assert_int_eq(load(&one, &v), 0);
    eng_tokenizer *t = NULL;
    char err[256];
    for (uint32_t n = 0; n < 258; n += n ? 2 : 255) { /* 0, 255, 257 */
        ck_assert_int_eq(eng_tokenizer_new(one.file, n, &t, err, sizeof err), -EINVAL);
        ck_assert(strstr(err, "vocab") || strstr(err, "tokens"));
    }
    ck_assert_ptr_null(t);
    unload(&one);
}
END_TEST

/* ---- long and hostile text ---------------------------------------------------------------------------------------- */

/* A million bytes: a time that grew with the square would not end. */
START_TEST(test_long_text)
{
    enum { N = 1000000 };
    vocab v = {
        .pre = pres[_i],
        .merges = {"a a", "aa aa", "\xc4\xa0 \xc4\xa0", "\xc4\xa0\xc4\xa0 \xc4\xa0\xc4\xa0"},
        .more = {{"aa", 1}, {"aaaa", 1}, {"\xc4\xa0\xc4\xa0", 1}, {"\xc4\xa0\xc4\xa0\xc4\xa0\xc4\xa0", 1}, {"<|go|>", 3}, {"<|", 4}}};
    ck_assert_msg(!load(&one, &v), "%s", one.err);
    char *text = malloc(N);
    static const struct {
        const char *unit;
        size_t per_token; /* bytes of text per token; 0: do not check */
    } cases[] = {{"a", 4}, {" ", 4}, {"<|go|>", 6}, {"<|go|", 0}, {"\xff", 1}, {"a\xff", 1}, {"' ", 0}, {"\n ", 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t k = strlen(cases[i].unit), len = N / k / 4 * 4 * k, n;
        for (size_t at = 0; at < len; at++)
            text[at] = cases[i].unit[at % k];
        int32_t *ids;
        ck_assert_int_eq(eng_tokenizer_encode(one.tok, text, len, ENG_TOK_PARSE_SPECIAL, "nowhere", &ids, &n), 0);
        if (cases[i].per_token)
            ck_assert_uint_eq(n, len / cases[i].per_token);
        free(ids);
    }
    free(text);
    unload(&one);
}
END_TEST

/* What random bytes become prints as those bytes, special tokens and all. */
START_TEST(test_random_bytes_round_trip)
{
    vocab v = chat;
    v.pre = pres[_i];
    ck_assert_msg(!load(&one, &v), "%s", one.err);
    static const char *const parts[] = {"<|go|>", "<|", "<tool>", " ", "\n", "'s", "\xc3\xa9", "\xc3", "\xe2\x82\xac", "1", "a"};
    t_rng rng = t_seed(11);
    for (int round = 0; round < 2000; round++) {
        char text[128], back[128];
        size_t len = 0, n, m = 0;
        while (len < 100) {
            if (t_u64(&rng) % 4 == 0) {
                text[len++] = (char)t_u64(&rng);
                continue;
            }
            const char *p = parts[t_u64(&rng) % (sizeof parts / sizeof *parts)];
            memcpy(text + len, p, strlen(p));
            len += strlen(p);
        }
        int32_t *ids;
        ck_assert_int_eq(eng_tokenizer_encode(one.tok, text, len, round & 1 ? ENG_TOK_PARSE_SPECIAL : 0, NULL, &ids, &n), 0);
        for (size_t i = 0; i < n; i++) {
            const char *s;
            size_t k;
            ck_assert_int_eq(eng_tokenizer_text(one.tok, ids[i], true, &s, &k), 0);
            ck_assert(m + k <= len);
            memcpy(back + m, s, k);
            m += k;
        }
        ck_assert_uint_eq(m, len);
        ck_assert_mem_eq(back, text, len);
        free(ids);
    }
    unload(&one);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("tokenizer");
    TCase *c = tcase_create("tokenizer");
    tcase_add_test(c, test_merge_order);
    tcase_add_test(c, test_merge_twice);
    tcase_add_test(c, test_merge_against_naive);
    tcase_add_test(c, test_byte_without_token);
    tcase_add_test(c, test_whole_words);
    tcase_add_test(c, test_invalid_bytes);
    tcase_add_test(c, test_special);
    tcase_add_test(c, test_special_search);
    tcase_add_test(c, test_guard);
    tcase_add_test(c, test_no_control_from_text);
    tcase_add_test(c, test_bos_eos);
    tcase_add_test(c, test_roles);
    tcase_add_test(c, test_end_of_message);
    tcase_add_test(c, test_text);
    tcase_add_test(c, test_refusals);
    tcase_add_test(c, test_vocab_size);
    tcase_add_loop_test(c, test_long_text, 0, N_PRES);
    tcase_add_loop_test(c, test_random_bytes_round_trip, 0, N_PRES);
    suite_add_tcase(s, c);
    return t_run(s);
}
