/* Byte-level BPE ("gpt2" in GGUF): text is split into words (tokenizer_split.c), and the bytes of each word are merged
 * (tokenizer_merge.c).
 *
 * Token texts are stored with every byte written as a printable character (the byte alphabet of GPT-2: Radford et al. 2019), except
 * those of special tokens, which are plain. Ordinary text never becomes a control token: no merge may make one.
 */
#include "text.h"
#include "tokenizer_parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* ---- the byte alphabet -------------------------------------------------------------------------------------------- */

typedef struct {
    char utf8[256][2];
    unsigned char len[256];
    int16_t byte[0x144]; /* code point to byte; -1 */
} alphabet;

struct eng_bpe {
    const eng_vocab *vocab;
    alphabet alphabet;
    int32_t byte_id[256];
    size_t max_text; /* of an ordinary token, in the byte alphabet */
    eng_merges *merges;
    const eng_split_rule *rule;
    eng_split *split;
};

/* Printable Latin-1 stands for itself; the other 68 bytes are, in order, U+0100 and up. */
static bool stands_for_itself(int b)
{
    return (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
}

static void alphabet_init(alphabet *a)
{
    int next = 0x100;
    for (int c = 0; c < 0x144; c++)
        a->byte[c] = -1;
    for (int b = 0; b < 256; b++) {
        int c = stands_for_itself(b) ? b : next++;
        utf8proc_uint8_t buf[4];
        a->byte[c] = (int16_t)b;
        a->len[b] = (unsigned char)utf8proc_encode_char(c, buf);
        memcpy(a->utf8[b], buf, a->len[b]);
    }
}

/* The bytes that a token's text stands for; out has room for t.n. SIZE_MAX when a character is not of the alphabet. */
static size_t decode(const alphabet *a, eng_str t, char *out)
{
    size_t n = 0;
    for (size_t i = 0; i < t.n;) {
        utf8proc_int32_t c;
        size_t left = t.n - i;
        utf8proc_ssize_t k = utf8proc_iterate((const utf8proc_uint8_t *)t.s + i, left < 4 ? (utf8proc_ssize_t)left : 4, &c);
        if (k <= 0 || c >= 0x144 || a->byte[c] < 0)
            return SIZE_MAX;
        out[n++] = (char)a->byte[c];
        i += (size_t)k;
    }
    return n;
}

/* A token with characters outside the alphabet, which no text gives, prints as it is. */
size_t eng_bpe_print(const eng_bpe *b, eng_str t, char *out)
{
    size_t n = decode(&b->alphabet, t, out);
    if (n == SIZE_MAX)
        memcpy(out, t.s, n = t.n);
    return n;
}

/* ---- loading ------------------------------------------------------------------------------------------------------ */

static int load_rule(eng_bpe *b, const eng_gguf *g, char *err, size_t errlen)
{
    eng_str pre;
    int r = eng_gguf_str(g, "tokenizer.ggml.pre", &pre);
    if (r < 0)
        return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.pre is %s", r == -ENOENT ? "missing" : "not a string");
    b->rule = eng_split_find(pre);
    if (!b->rule)
        return eng_fail(err, errlen, -ENOTSUP, "tokenizer.ggml.pre is '%s', a pre-tokenizer that is not supported", eng_quoted(pre));
    r = eng_split_new(b->rule, false, &b->split);
    return r < 0 ? eng_fail(err, errlen, r, "cannot compile the expression of tokenizer.ggml.pre '%s'", eng_quoted(pre)) : 0;
}

/* One line of the merges: two token texts with a space between them, which together are the text of a third. */
static int load_merge(eng_bpe *b, uint32_t rank, eng_str line, char **buf, size_t *cap)
{
    const char *space = line.n ? memchr(line.s, ' ', line.n) : NULL;
    if (!space || space == line.s || space + 1 == line.s + line.n)
        return -EINVAL;
    size_t nl = (size_t)(space - line.s), nr = line.n - nl - 1;
    if (line.n > *cap) {
        char *p = realloc(*buf, 2 * line.n);
        if (!p)
            return -ENOMEM;
        *buf = p;
        *cap = 2 * line.n;
    }
    memcpy(*buf, line.s, nl);
    memcpy(*buf + nl, space + 1, nr);
    const eng_vocab *v = b->vocab;
    int32_t left = eng_vocab_ordinary(v, line.s, nl), right = eng_vocab_ordinary(v, space + 1, nr),
            result = eng_vocab_ordinary(v, *buf, nl + nr);
    if (left < 0 || right < 0 || result < 0)
        return -ENOENT;
    eng_merges_add(b->merges, rank, left, right, result);
    return 0;
}

static int load_merges(eng_bpe *b, const eng_gguf *g, char *err, size_t errlen)
{
    eng_str *lines = NULL;
    size_t n = 0, cap = 0;
    char *buf = NULL;
    int r = eng_gguf_str_array(g, "tokenizer.ggml.merges", &lines, &n);
    if (r < 0)
        return eng_array_fail(r, "tokenizer.ggml.merges", "strings", err, errlen);
    r = eng_merges_new(n, &b->merges);
    for (size_t i = 0; i < n && !r; i++) {
        r = load_merge(b, (uint32_t)i, lines[i], &buf, &cap);
        if (r == -EINVAL)
            eng_fail(err, errlen, r, "tokenizer.ggml.merges: entry %zu ('%s') is not two texts with a space between them", i,
                     eng_quoted(lines[i]));
        else if (r == -ENOENT)
            r = eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.merges: entry %zu ('%s') joins or makes something that is no ordinary token",
                         i, eng_quoted(lines[i]));
    }
    if (r == -ENOMEM || r == -E2BIG)
        eng_fail(err, errlen, r, "no memory for the merges of the vocabulary");
    free(buf);
    free(lines);
    return r;
}

int eng_bpe_new(const eng_gguf *g, const eng_vocab *v, eng_bpe **ret, char *err, size_t errlen)
{
    eng_bpe *b = calloc(1, sizeof *b);
    if (!b)
        return eng_fail(err, errlen, -ENOMEM, "no memory for the vocabulary");
    b->vocab = v;
    alphabet_init(&b->alphabet);
    for (int i = 0; i < 256; i++)
        b->byte_id[i] = eng_vocab_ordinary(v, b->alphabet.utf8[i], b->alphabet.len[i]);
    for (uint32_t i = 0; i < v->n; i++)
        if ((v->types[i] == ENG_NORMAL || v->types[i] == ENG_BYTE) && v->tokens[i].n > b->max_text)
            b->max_text = v->tokens[i].n;
    int r = load_rule(b, g, err, errlen);
    if (!r)
        r = load_merges(b, g, err, errlen);
    if (r < 0) {
        eng_bpe_free(b);
        return r;
    }
    *ret = b;
    return 0;
}

void eng_bpe_free(eng_bpe *b)
{
    if (!b)
        return;
    eng_merges_free(b->merges);
    eng_split_free(b->split);
    free(b);
}

bool eng_bpe_add_bos(const eng_bpe *b)
{
    return b->rule->add_bos;
}

/* ---- encoding ----------------------------------------------------------------------------------------------------- */

typedef struct {
    const eng_bpe *b;
    eng_encoding *e;
} word_context;

/* The token whose text the word is, -1: none. */
static int32_t whole_word(const eng_bpe *b, char *spelled, const char *word, size_t n)
{
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)word[i], k = b->alphabet.len[c];
        if (at + k > b->max_text)
            return -1;
        memcpy(spelled + at, b->alphabet.utf8[c], k);
        at += k;
    }
    return eng_vocab_ordinary(b->vocab, spelled, at);
}

static int encode_word(void *ctx, const char *word, size_t n)
{
    const eng_bpe *b = ((word_context *)ctx)->b;
    eng_encoding *e = ((word_context *)ctx)->e;
    if (n == 1) {
        int32_t id = b->byte_id[(unsigned char)*word];
        return id < 0 ? 0 : eng_ids_push(&e->out, id);
    }
    if (b->rule->whole_words) {
        int32_t id = whole_word(b, e->spelled, word, n);
        if (id >= 0)
            return eng_ids_push(&e->out, id);
    }
    return eng_merges_apply(b->merges, &e->merge, b->byte_id, word, n, &e->out);
}

int eng_bpe_begin(const eng_bpe *b, eng_encoding *e)
{
    e->spelled = malloc(b->max_text + 1);
    return e->spelled ? eng_split_scratch_new(b->split, &e->split) : -ENOMEM;
}

int eng_bpe_encode(const eng_bpe *b, eng_encoding *e, const char *text, size_t len)
{
    return eng_split_each(b->split, e->split, text, len, encode_word, &(word_context){b, e});
}
