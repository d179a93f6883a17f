/* SentencePiece's BPE ("llama" in GGUF; Kudo and Richardson 2018): spaces become U+2581, and characters are merged, the pair that makes
 * the token of the highest score first. What is no token in the end becomes the tokens of its bytes.
 *
 * The rule speaks of texts: two neighbours merge when their joined text is a token. A neighbour is a single character or itself a token, so
 * loading finds all the pairs there can be, and merging is the same as of byte-level BPE (tokenizer_merge.c). Only ordinary tokens are
 * made: SentencePiece keeps control tokens, unknown and bytes out of its texts, and user-defined ones are cut out before.
 */
#include "text.h"
#include "tokenizer_parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#define SPACE      0x2581
#define SPACE_UTF8 "\xe2\x96\x81"

enum {
    N_CHARS = 0x110000,
    MAX_TEXT = 1024, /* of an ordinary token; finding its pairs takes time with the square */
    UNSEEN = -1,
    NO_TOKEN = -2, /* in some token, but no token itself */
};

struct eng_spm {
    const eng_vocab *vocab;
    int32_t *by_char; /* [N_CHARS] symbol of each character; from vocab->n on: one without a token */
    int32_t byte_id[256];
    int32_t unknown;
    eng_merges *merges;
    bool joined[256]; /* some token has this byte before a U+2581: no word ends there */
    bool space_prefix;
};

/* ---- loading ------------------------------------------------------------------------------------------------------ */

/* Bytes of the character at s, 0 when it is not UTF-8. */
static size_t next_char(const char *s, size_t n, int32_t *ret)
{
    if (!((unsigned char)*s & 0x80)) {
        *ret = *s;
        return 1;
    }
    utf8proc_ssize_t k = utf8proc_iterate((const utf8proc_uint8_t *)s, n < 4 ? (utf8proc_ssize_t)n : 4, ret);
    return k > 0 ? (size_t)k : 0;
}

static int hex(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Of "<0xXX>"; -1: another text. */
static int byte_value(eng_str t)
{
    if (t.n != 6 || memcmp(t.s, "<0x", 3) || t.s[5] != '>' || hex(t.s[3]) < 0 || hex(t.s[4]) < 0)
        return -1;
    return hex(t.s[3]) * 16 + hex(t.s[4]);
}

static int load_bytes(eng_spm *s, char *err, size_t errlen)
{
    for (int b = 0; b < 256; b++)
        s->byte_id[b] = -1;
    for (uint32_t i = 0; i < s->vocab->n; i++) {
        if (s->vocab->types[i] != ENG_BYTE)
            continue;
        int b = byte_value(s->vocab->tokens[i]);
        if (b < 0)
            return eng_fail(err, errlen, -EINVAL,
                            "tokenizer.ggml.token_type: token %u is a byte, but its text '%s' is not <0x00> to <0xFF>", i,
                            eng_quoted(s->vocab->tokens[i]));
        s->byte_id[b] = (int32_t)i;
    }
    return 0;
}

/* Gives each character of an ordinary token its symbol, and notes what comes before U+2581 inside of one. */
static int load_chars(eng_spm *s, char *err, size_t errlen)
{
    const eng_vocab *v = s->vocab;
    s->by_char = malloc(N_CHARS * sizeof *s->by_char);
    if (!s->by_char)
        return eng_fail(err, errlen, -ENOMEM, "no memory for the vocabulary");
    for (int c = 0; c < N_CHARS; c++)
        s->by_char[c] = UNSEEN;
    for (uint32_t i = 0; i < v->n; i++) {
        eng_str t = v->tokens[i];
        if (v->types[i] != ENG_NORMAL)
            continue;
        if (t.n > MAX_TEXT)
            return eng_fail(err, errlen, -ENOTSUP, "tokenizer.ggml.tokens: token %u is %zu bytes long, more than the %d that are supported",
                            i, t.n, MAX_TEXT);
        int32_t c = 0;
        for (size_t at = 0, k; at < t.n; at += k) {
            k = next_char(t.s + at, t.n - at, &c);
            if (k == t.n)
                s->by_char[c] = (int32_t)i;
            else if (s->by_char[c] == UNSEEN)
                s->by_char[c] = NO_TOKEN;
            if (c == SPACE && at)
                s->joined[(unsigned char)t.s[at - 1]] = true;
        }
    }
    int32_t next = (int32_t)v->n;
    for (int c = 0; c < N_CHARS; c++)
        if (s->by_char[c] == NO_TOKEN)
            s->by_char[c] = next++;
    /* Runs of spaces stay together. */
    s->joined[' '] = s->joined[(unsigned char)SPACE_UTF8[2]] = true;
    return 0;
}

typedef struct {
    float score;
    uint32_t id;
} scored;

static int by_score(const void *pa, const void *pb)
{
    const scored *a = pa, *b = pb;
    if (a->score != b->score)
        return a->score < b->score ? 1 : -1;
    return (a->id > b->id) - (a->id < b->id);
}

/* The ordinary tokens, highest score first. */
static int load_scores(const eng_vocab *v, const eng_gguf *g, scored **ret, size_t *ret_n, char *err, size_t errlen)
{
    float *scores = NULL;
    size_t n = 0;
    int r = eng_gguf_f32_array(g, "tokenizer.ggml.scores", &scores, &n);
    if (r < 0)
        return eng_array_fail(r, "tokenizer.ggml.scores", "finite numbers", err, errlen);
    scored *list = NULL;
    if (n != v->n) {
        r = eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.scores has %zu entries for %u tokens", n, v->n);
        goto cleanup;
    }
    list = malloc(n * sizeof *list);
    if (!list) {
        r = eng_fail(err, errlen, -ENOMEM, "no memory for the vocabulary");
        goto cleanup;
    }
    size_t m = 0;
    for (uint32_t i = 0; i < v->n; i++)
        if (v->types[i] == ENG_NORMAL)
            list[m++] = (scored){scores[i], i};
    qsort(list, m, sizeof *list, by_score);
    *ret = list;
    *ret_n = m;
cleanup:
    free(scores);
    return r;
}

typedef struct {
    uint32_t rank;
    int32_t left, right, result;
} pair;

typedef struct {
    pair *v;
    size_t n, cap;
} pairs;

/* The symbol that a part of a token can be: a character, or an ordinary token. -1: none. */
static int32_t part(const eng_spm *s, const char *text, size_t n)
{
    int32_t c;
    if (next_char(text, n, &c) == n)
        return s->by_char[c];
    int32_t id = eng_vocab_find(s->vocab, text, n);
    return id < 0 || s->vocab->types[id] != ENG_NORMAL ? -1 : id;
}

static int add_pairs(const eng_spm *s, uint32_t id, uint32_t rank, pairs *p)
{
    eng_str t = s->vocab->tokens[id];
    int32_t c;
    for (size_t at = next_char(t.s, t.n, &c); at < t.n; at += next_char(t.s + at, t.n - at, &c)) {
        int32_t left = part(s, t.s, at), right = left < 0 ? -1 : part(s, t.s + at, t.n - at);
        if (right < 0)
            continue;
        if (p->n == p->cap) {
            size_t cap = p->cap ? 2 * p->cap : 4096;
            pair *v = realloc(p->v, cap * sizeof *v);
            if (!v)
                return -ENOMEM;
            p->v = v;
            p->cap = cap;
        }
        p->v[p->n++] = (pair){rank, left, right, (int32_t)id};
    }
    return 0;
}

/* Equal scores are equal ranks: the leftmost of them goes first. */
static int load_pairs(eng_spm *s, const eng_gguf *g, char *err, size_t errlen)
{
    scored *list = NULL;
    size_t n = 0;
    pairs p = {0};
    int r = load_scores(s->vocab, g, &list, &n, err, errlen);
    if (r < 0)
        return r;
    uint32_t rank = 0;
    for (size_t i = 0; i < n && !r; i++) {
        if (i && list[i].score != list[i - 1].score)
            rank++;
        r = add_pairs(s, list[i].id, rank, &p);
    }
    if (!r)
        r = eng_merges_new(p.n, &s->merges);
    for (size_t i = 0; i < p.n && !r; i++)
        eng_merges_add(s->merges, p.v[i].rank, p.v[i].left, p.v[i].right, p.v[i].result);
    free(list);
    free(p.v);
    return r < 0 ? eng_fail(err, errlen, r, "no memory for the merges of the vocabulary") : 0;
}

static int load_unknown(eng_spm *s, const eng_gguf *g, char *err, size_t errlen)
{
    uint32_t id;
    int r = eng_gguf_u32(g, "tokenizer.ggml.unknown_token_id", &id);
    s->unknown = -1;
    if (r == -ENOENT)
        return 0;
    if (r < 0)
        return eng_fail(err, errlen, r, "tokenizer.ggml.unknown_token_id is not a token id");
    if (id >= s->vocab->n)
        return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.unknown_token_id is %u, past the vocabulary of %u tokens", id, s->vocab->n);
    s->unknown = (int32_t)id;
    return 0;
}

int eng_spm_new(const eng_gguf *g, const eng_vocab *v, eng_spm **ret, char *err, size_t errlen)
{
    if (v->n > INT32_MAX - N_CHARS)
        return eng_fail(err, errlen, -EINVAL, "a vocabulary of %u tokens", v->n);
    eng_spm *s = calloc(1, sizeof *s);
    if (!s)
        return eng_fail(err, errlen, -ENOMEM, "no memory for the vocabulary");
    s->vocab = v;
    int r;
    if ((r = load_bytes(s, err, errlen)) < 0 || (r = load_chars(s, err, errlen)) < 0 || (r = load_pairs(s, g, err, errlen)) < 0 ||
        (r = load_unknown(s, g, err, errlen)) < 0 ||
        (r = eng_flag(g, "tokenizer.ggml.add_space_prefix", true, &s->space_prefix, err, errlen)) < 0) {
        eng_spm_free(s);
        return r;
    }
    *ret = s;
    return 0;
}

void eng_spm_free(eng_spm *s)
{
    if (!s)
        return;
    free(s->by_char);
    eng_merges_free(s->merges);
    free(s);
}

size_t eng_spm_print(eng_str t, int32_t type, char *out)
{
    int b = type == ENG_BYTE ? byte_value(t) : -1;
    if (b >= 0) {
        *out = (char)b;
        return 1;
    }
    size_t n = 0;
    for (size_t i = 0; i < t.n;) {
        bool space = t.n - i >= 3 && !memcmp(t.s + i, SPACE_UTF8, 3);
        out[n++] = space ? ' ' : t.s[i];
        i += space ? 3 : 1;
    }
    return n;
}

/* ---- encoding ----------------------------------------------------------------------------------------------------- */

/* The tokens of the bytes; unknown once where some byte has none. */
static int push_bytes(const eng_spm *s, eng_encoding *e, const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (s->byte_id[(unsigned char)text[i]] < 0)
            return s->unknown < 0 ? 0 : eng_ids_push(&e->out, s->unknown);
    int r = 0;
    for (size_t i = 0; i < n && !r; i++)
        r = eng_ids_push(&e->out, s->byte_id[(unsigned char)text[i]]);
    return r;
}

/* A word, with a space before it that is not in the text if `lead` is 1. A symbol's index is its place in the text + lead. */
static int encode_word(const eng_spm *s, eng_encoding *e, const char *text, size_t len, uint32_t lead)
{
    int r = eng_merge_reserve(&e->merge, len + lead);
    if (r < 0)
        return r;
    eng_symbol *sym = e->merge.symbols;
    uint32_t prev = ENG_NO_SYMBOL;
    if (lead) {
        sym[0] = (eng_symbol){.id = s->by_char[SPACE], .prev = ENG_NO_SYMBOL};
        prev = 0;
    }
    for (size_t at = 0, k; at < len; at += k) {
        int32_t c = 0, id = -1;
        k = next_char(text + at, len - at, &c);
        if (k)
            id = s->by_char[c == ' ' ? SPACE : c];
        else
            k = 1; /* not UTF-8: a byte by itself */
        uint32_t i = (uint32_t)at + lead;
        sym[i] = (eng_symbol){.id = id, .prev = prev};
        if (prev != ENG_NO_SYMBOL)
            sym[prev].next = i;
        prev = i;
    }
    sym[prev].next = ENG_NO_SYMBOL;
    e->work += len;
    eng_merges_run(s->merges, &e->merge);

    for (uint32_t i = 0; i != ENG_NO_SYMBOL && !r; i = sym[i].next) {
        uint32_t end = sym[i].next == ENG_NO_SYMBOL ? (uint32_t)len + lead : sym[i].next;
        if (sym[i].id >= 0 && (uint32_t)sym[i].id < s->vocab->n)
            r = eng_ids_push(&e->out, sym[i].id);
        else if (i < lead || text[i - lead] == ' ')
            r = push_bytes(s, e, SPACE_UTF8, 3);
        else
            r = push_bytes(s, e, text + i - lead, end - i);
    }
    return r;
}

/* Where a word that begins at `from` ends: before a space that nothing before it can merge with. */
static size_t word_end(const eng_spm *s, const char *text, size_t len, size_t from)
{
    for (size_t i = from + 1; i < len; i++) {
        bool space = text[i] == ' ' || (text[i] == SPACE_UTF8[0] && len - i >= 3 && !memcmp(text + i, SPACE_UTF8, 3));
        if (space && !s->joined[(unsigned char)text[i - 1]])
            return i;
    }
    return len;
}

int eng_spm_encode(const eng_spm *s, eng_encoding *e, const char *text, size_t len)
{
    uint32_t lead = s->space_prefix;
    int r = 0;
    for (size_t i = 0, end; i < len && !r; i = end, lead = 0) {
        end = word_end(s, text, len, i);
        r = encode_word(s, e, text + i, end - i, lead);
    }
    e->work += len;
    return r;
}
