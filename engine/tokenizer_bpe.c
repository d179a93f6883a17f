/* Byte-level BPE ("gpt2" in GGUF): special tokens are cut out of the text, what lies between is split into words (tokenizer_split.c),
 * and the bytes of each word are merged (tokenizer_merge.c).
 *
 * Token texts are stored with every byte written as a printable character (the byte alphabet of GPT-2: Radford et al. 2019), except
 * those of special tokens, which are plain. Ordinary text never becomes a control token: no merge may make one.
 */
#include "engine.h"
#include "text.h"
#include "tokenizer.h"
#include "tokenizer_parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

enum { NORMAL = 1, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE }; /* tokenizer.ggml.token_type */

#define NO_TOKEN UINT32_MAX

/* ---- the byte alphabet -------------------------------------------------------------------------------------------- */

/* Printable Latin-1 stands for itself; the other 68 bytes are, in order, U+0100 and up. */
static bool stands_for_itself(int b)
{
    return (b >= '!' && b <= '~') || (b >= 0xa1 && b <= 0xac) || b >= 0xae;
}

typedef struct {
    char utf8[256][2];
    unsigned char len[256];
    int16_t byte[0x144]; /* code point to byte; -1 */
} alphabet;

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

struct eng_tokenizer {
    uint32_t n_vocab;
    eng_str *tokens; /* [n_vocab] as in the file */
    int32_t *types;  /* [n_vocab] */
    bool *eog;       /* [n_vocab] */
    uint32_t *slots; /* open hash of text to id; NO_TOKEN: free */
    size_t slot_mask;
    size_t max_text; /* of an ordinary token, in the byte alphabet */
    char *arena;     /* what each token prints, one after the other */
    size_t *offsets; /* [n_vocab + 1] into the arena */
    alphabet alphabet;
    int32_t byte_id[256];
    eng_merges *merges;
    const eng_split_rule *rule;
    eng_split *split;
    eng_specials user_defined, all_special;
    int32_t bos, eos;
    bool add_bos, add_eos;
};

/* Control tokens that end a generation even where the file's eos says another; llama.cpp's list as far as it fits these vocabularies. */
static const char *const eog_texts[] = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
    "</s>",
    "<eos>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
};

/* ---- text to id --------------------------------------------------------------------------------------------------- */

static size_t find_slot(const eng_tokenizer *t, const char *s, size_t n)
{
    size_t i = (size_t)XXH3_64bits(s, n) & t->slot_mask;
    while (t->slots[i] != NO_TOKEN) {
        eng_str have = t->tokens[t->slots[i]];
        if (have.n == n && !memcmp(have.s, s, n))
            break;
        i = (i + 1) & t->slot_mask;
    }
    return i;
}

static bool is_control(int32_t type)
{
    return type == CONTROL || type == UNKNOWN;
}

/* Of ordinary text: never a control token. -1: none. */
static int32_t ordinary_id(const eng_tokenizer *t, const char *s, size_t n)
{
    uint32_t id = t->slots[find_slot(t, s, n)];
    return id == NO_TOKEN || is_control(t->types[id]) ? -1 : (int32_t)id;
}

/* ---- loading ------------------------------------------------------------------------------------------------------ */

static const char *quoted(eng_str s)
{
    static _Thread_local char buf[64];
    return eng_printable(s.s, s.n, buf, sizeof buf);
}

/* What went wrong with an array of the file, as a sentence. */
static int array_fail(int r, const char *key, const char *of, char *err, size_t errlen)
{
    if (r == -ENOMEM)
        return eng_fail(err, errlen, r, "no memory for %s", key);
    return eng_fail(err, errlen, -EINVAL, r == -ENOENT ? "%s is missing" : "%s is not an array of %s", key, of);
}

static int load_tokens(eng_tokenizer *t, const eng_gguf *g, char *err, size_t errlen)
{
    size_t n = 0;
    int r = eng_gguf_str_array(g, "tokenizer.ggml.tokens", &t->tokens, &n);
    if (r < 0)
        return array_fail(r, "tokenizer.ggml.tokens", "strings", err, errlen);
    if (n != t->n_vocab)
        return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.tokens has %zu tokens, but the model (token_embd) has %u", n, t->n_vocab);

    size_t slots = 16;
    while (slots < 2 * n)
        slots *= 2;
    t->slot_mask = slots - 1;
    t->slots = malloc(slots * sizeof *t->slots);
    if (!t->slots)
        return eng_fail(err, errlen, -ENOMEM, "no memory for the vocabulary");
    memset(t->slots, 0xff, slots * sizeof *t->slots);
    for (size_t i = 0; i < n; i++) {
        eng_str text = t->tokens[i];
        if (!text.n)
            return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.tokens: token %zu is empty", i);
        if (!eng_utf8_valid(text.s, text.n))
            return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.tokens: token %zu is not UTF-8", i);
        size_t slot = find_slot(t, text.s, text.n);
        if (t->slots[slot] != NO_TOKEN)
            return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.tokens: '%s' is there twice (duplicate ids %u and %zu)", quoted(text),
                            t->slots[slot], i);
        t->slots[slot] = (uint32_t)i;
    }
    return 0;
}

static int load_types(eng_tokenizer *t, const eng_gguf *g, char *err, size_t errlen)
{
    size_t n = 0;
    int r = eng_gguf_i32_array(g, "tokenizer.ggml.token_type", &t->types, &n);
    if (r == -ENOENT) { /* as llama.cpp: no special tokens then */
        t->types = malloc(t->n_vocab * sizeof *t->types);
        if (!t->types)
            return eng_fail(err, errlen, -ENOMEM, "no memory for the vocabulary");
        for (uint32_t i = 0; i < t->n_vocab; i++)
            t->types[i] = NORMAL;
        return 0;
    }
    if (r < 0)
        return array_fail(r, "tokenizer.ggml.token_type", "integers", err, errlen);
    if (n != t->n_vocab)
        return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.token_type has %zu entries for %u tokens", n, t->n_vocab);
    for (size_t i = 0; i < n; i++)
        if (t->types[i] < NORMAL || t->types[i] > BYTE)
            return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.token_type: token %zu has the unknown type %d", i, t->types[i]);
    return 0;
}

/* What each token prints. Special tokens print as they are; so does a token with characters outside the alphabet, which no text gives. */
static int load_texts(eng_tokenizer *t, char *err, size_t errlen)
{
    size_t total = 0;
    for (uint32_t i = 0; i < t->n_vocab; i++)
        total += t->tokens[i].n; /* strings of a mapped file: no overflow */
    t->arena = malloc(total);
    t->offsets = malloc(((size_t)t->n_vocab + 1) * sizeof *t->offsets);
    if (!t->arena || !t->offsets)
        return eng_fail(err, errlen, -ENOMEM, "no memory for the vocabulary");
    size_t at = 0;
    for (uint32_t i = 0; i < t->n_vocab; i++) {
        eng_str text = t->tokens[i];
        t->offsets[i] = at;
        if (t->types[i] == UNUSED)
            continue;
        size_t n = t->types[i] == NORMAL || t->types[i] == BYTE ? decode(&t->alphabet, text, t->arena + at) : SIZE_MAX;
        if (n == SIZE_MAX)
            memcpy(t->arena + at, text.s, n = text.n);
        else if (text.n > t->max_text)
            t->max_text = text.n;
        at += n;
    }
    t->offsets[t->n_vocab] = at;
    for (int b = 0; b < 256; b++)
        t->byte_id[b] = ordinary_id(t, t->alphabet.utf8[b], t->alphabet.len[b]);
    return 0;
}

static int load_specials(eng_tokenizer *t, char *err, size_t errlen)
{
    eng_special *list = malloc(t->n_vocab * sizeof *list);
    if (!list)
        return eng_fail(err, errlen, -ENOMEM, "no memory for the vocabulary");
    size_t n = 0;
    for (uint32_t i = 0; i < t->n_vocab; i++)
        if (t->types[i] == USER_DEFINED)
            list[n++] = (eng_special){t->tokens[i], (int32_t)i};
    int r = eng_specials_init(&t->user_defined, list, n);
    for (uint32_t i = 0; i < t->n_vocab; i++)
        if (is_control(t->types[i]))
            list[n++] = (eng_special){t->tokens[i], (int32_t)i};
    if (!r)
        r = eng_specials_init(&t->all_special, list, n);
    free(list);
    return r < 0 ? eng_fail(err, errlen, r, "no memory for the vocabulary") : 0;
}

/* One line of the merges: two token texts with a space between them, which together are the text of a third. */
static int load_merge(eng_tokenizer *t, eng_str line, char **buf, size_t *cap)
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
    int32_t left = ordinary_id(t, line.s, nl), right = ordinary_id(t, space + 1, nr), result = ordinary_id(t, *buf, nl + nr);
    if (left < 0 || right < 0 || result < 0)
        return -ENOENT;
    eng_merges_add(t->merges, left, right, result);
    return 0;
}

static int load_merges(eng_tokenizer *t, const eng_gguf *g, char *err, size_t errlen)
{
    eng_str *lines = NULL;
    size_t n = 0, cap = 0;
    char *buf = NULL;
    int r = eng_gguf_str_array(g, "tokenizer.ggml.merges", &lines, &n);
    if (r < 0)
        return array_fail(r, "tokenizer.ggml.merges", "strings", err, errlen);
    r = eng_merges_new(n, &t->merges);
    for (size_t i = 0; i < n && !r; i++) {
        r = load_merge(t, lines[i], &buf, &cap);
        if (r == -EINVAL)
            eng_fail(err, errlen, r, "tokenizer.ggml.merges: entry %zu ('%s') is not two texts with a space between them", i,
                     quoted(lines[i]));
        else if (r == -ENOENT)
            r = eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.merges: entry %zu ('%s') joins or makes something that is no ordinary token",
                         i, quoted(lines[i]));
    }
    if (r == -ENOMEM || r == -E2BIG)
        eng_fail(err, errlen, r, "no memory for the merges of the vocabulary");
    free(buf);
    free(lines);
    return r;
}

/* -1 where the file has no such key. */
static int load_id(const eng_tokenizer *t, const eng_gguf *g, const char *key, int32_t *ret, char *err, size_t errlen)
{
    uint32_t id;
    int r = eng_gguf_u32(g, key, &id);
    if (r == -ENOENT) {
        *ret = -1;
        return 0;
    }
    if (r < 0)
        return eng_fail(err, errlen, r, "%s is not a token id", key);
    if (id >= t->n_vocab)
        return eng_fail(err, errlen, -EINVAL, "%s is %u, past the vocabulary of %u tokens", key, id, t->n_vocab);
    *ret = (int32_t)id;
    return 0;
}

static int load_flag(const eng_gguf *g, const char *key, bool missing, bool *ret, char *err, size_t errlen)
{
    int r = eng_gguf_bool(g, key, ret);
    if (r == -ENOENT)
        *ret = missing;
    else if (r < 0)
        return eng_fail(err, errlen, r, "%s is not a boolean", key);
    return 0;
}

static int load_roles(eng_tokenizer *t, const eng_gguf *g, char *err, size_t errlen)
{
    int32_t eot = -1, eom = -1;
    int r;
    if ((r = load_id(t, g, "tokenizer.ggml.bos_token_id", &t->bos, err, errlen)) < 0 ||
        (r = load_id(t, g, "tokenizer.ggml.eos_token_id", &t->eos, err, errlen)) < 0 ||
        (r = load_id(t, g, "tokenizer.ggml.eot_token_id", &eot, err, errlen)) < 0 ||
        (r = load_id(t, g, "tokenizer.ggml.eom_token_id", &eom, err, errlen)) < 0 ||
        (r = load_flag(g, "tokenizer.ggml.add_bos_token", t->rule->add_bos, &t->add_bos, err, errlen)) < 0 ||
        (r = load_flag(g, "tokenizer.ggml.add_eos_token", false, &t->add_eos, err, errlen)) < 0)
        return r;
    t->add_bos = t->add_bos && t->bos >= 0;
    t->add_eos = t->add_eos && t->eos >= 0;
    t->eog = calloc(t->n_vocab, sizeof *t->eog);
    if (!t->eog)
        return eng_fail(err, errlen, -ENOMEM, "no memory for the vocabulary");
    const int32_t by_role[] = {t->eos, eot, eom};
    for (size_t i = 0; i < sizeof by_role / sizeof *by_role; i++)
        if (by_role[i] >= 0)
            t->eog[by_role[i]] = true;
    for (size_t i = 0; i < sizeof eog_texts / sizeof *eog_texts; i++) {
        uint32_t id = t->slots[find_slot(t, eog_texts[i], strlen(eog_texts[i]))];
        if (id != NO_TOKEN && t->types[id] == CONTROL)
            t->eog[id] = true;
    }
    return 0;
}

static int load_kind(eng_tokenizer *t, const eng_gguf *g, char *err, size_t errlen)
{
    eng_str model, pre;
    int r = eng_gguf_str(g, "tokenizer.ggml.model", &model);
    if (r < 0)
        return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.model is %s", r == -ENOENT ? "missing" : "not a string");
    if (model.n != 4 || memcmp(model.s, "gpt2", 4))
        return eng_fail(err, errlen, -ENOTSUP, "tokenizer.ggml.model is '%s': only gpt2 (byte-level BPE) is supported", quoted(model));
    r = eng_gguf_str(g, "tokenizer.ggml.pre", &pre);
    if (r < 0)
        return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.pre is %s", r == -ENOENT ? "missing" : "not a string");
    t->rule = eng_split_find(pre);
    if (!t->rule)
        return eng_fail(err, errlen, -ENOTSUP, "tokenizer.ggml.pre is '%s': only smollm, llama-bpe, gpt-2 and qwen2 are supported",
                        quoted(pre));
    r = eng_split_new(t->rule, &t->split);
    return r < 0 ? eng_fail(err, errlen, r, "cannot compile the expression of tokenizer.ggml.pre '%s'", quoted(pre)) : 0;
}

int eng_tokenizer_new(const eng_gguf *g, uint32_t n_vocab, eng_tokenizer **ret, char *err, size_t errlen)
{
    if (!n_vocab || n_vocab > INT32_MAX)
        return eng_fail(err, errlen, -EINVAL, "a vocabulary of %u tokens", n_vocab);
    eng_tokenizer *t = calloc(1, sizeof *t);
    if (!t)
        return eng_fail(err, errlen, -ENOMEM, "no memory for the vocabulary");
    t->n_vocab = n_vocab;
    alphabet_init(&t->alphabet);
    int r;
    if ((r = load_kind(t, g, err, errlen)) < 0 || (r = load_tokens(t, g, err, errlen)) < 0 || (r = load_types(t, g, err, errlen)) < 0 ||
        (r = load_texts(t, err, errlen)) < 0 || (r = load_specials(t, err, errlen)) < 0 || (r = load_merges(t, g, err, errlen)) < 0 ||
        (r = load_roles(t, g, err, errlen)) < 0) {
        eng_tokenizer_free(t);
        return r;
    }
    *ret = t;
    return 0;
}

void eng_tokenizer_free(eng_tokenizer *t)
{
    if (!t)
        return;
    free(t->tokens);
    free(t->types);
    free(t->eog);
    free(t->slots);
    free(t->arena);
    free(t->offsets);
    eng_merges_free(t->merges);
    eng_split_free(t->split);
    eng_specials_done(&t->user_defined);
    eng_specials_done(&t->all_special);
    free(t);
}

/* ---- encoding ----------------------------------------------------------------------------------------------------- */

typedef struct {
    const eng_tokenizer *t;
    const char *guard;
    size_t guard_len;
    char *spelled; /* [t->max_text] */
    eng_split_scratch *split;
    eng_merge_scratch merge;
    eng_ids out;
} encoding;

/* The token whose text the word is, -1: none. */
static int32_t whole_word(encoding *e, const char *word, size_t n)
{
    if (n > e->t->max_text)
        return -1;
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        unsigned char b = (unsigned char)word[i], k = e->t->alphabet.len[b];
        if (at + k > e->t->max_text)
            return -1;
        memcpy(e->spelled + at, e->t->alphabet.utf8[b], k);
        at += k;
    }
    return ordinary_id(e->t, e->spelled, at);
}

static int encode_word(void *ctx, const char *word, size_t n)
{
    encoding *e = ctx;
    if (n == 1) {
        int32_t id = e->t->byte_id[(unsigned char)*word];
        return id < 0 ? 0 : eng_ids_push(&e->out, id);
    }
    if (e->t->rule->whole_words) {
        int32_t id = whole_word(e, word, n);
        if (id >= 0)
            return eng_ids_push(&e->out, id);
    }
    return eng_merges_apply(e->t->merges, &e->merge, e->t->byte_id, word, n, &e->out);
}

/* Text between special tokens, without its guards. */
static int encode_piece(encoding *e, const char *text, size_t len)
{
    const char *found = e->guard_len ? memmem(text, len, e->guard, e->guard_len) : NULL;
    if (!found)
        return eng_split_each(e->t->split, e->split, text, len, encode_word, e);
    char *clean = malloc(len);
    if (!clean)
        return -ENOMEM;
    size_t n = 0;
    const char *end = text + len;
    for (; found; found = memmem(text, (size_t)(end - text), e->guard, e->guard_len)) {
        memcpy(clean + n, text, (size_t)(found - text));
        n += (size_t)(found - text);
        text = found + e->guard_len;
    }
    memcpy(clean + n, text, (size_t)(end - text));
    n += (size_t)(end - text);
    int r = eng_split_each(e->t->split, e->split, clean, n, encode_word, e);
    free(clean);
    return r;
}

static int encode_text(encoding *e, const char *text, size_t len, bool parse_special)
{
    const eng_specials *specials = parse_special ? &e->t->all_special : &e->t->user_defined;
    for (size_t i = 0; i < len;) {
        size_t at = len;
        const eng_special *found = eng_specials_find(specials, text, len, i, &at);
        int r = encode_piece(e, text + i, at - i);
        if (!r && found)
            r = eng_ids_push(&e->out, found->id);
        if (r < 0)
            return r;
        i = at + (found ? found->text.n : 0);
    }
    return 0;
}

int eng_tokenizer_encode(const eng_tokenizer *t, const char *text, size_t len, unsigned flags, const char *guard, int32_t **ret_ids,
                         size_t *ret_n)
{
    if (len > INT32_MAX)
        return -E2BIG;
    encoding e = {.t = t, .guard = guard, .guard_len = guard ? strlen(guard) : 0};
    e.spelled = malloc(t->max_text + 1);
    e.out.cap = len / 4 + 8; /* about what prose needs */
    e.out.v = malloc(e.out.cap * sizeof *e.out.v);
    int r = e.spelled && e.out.v ? eng_split_scratch_new(t->split, &e.split) : -ENOMEM;
    if (!r && (flags & ENG_TOK_ADD_SPECIAL) && t->add_bos)
        r = eng_ids_push(&e.out, t->bos);
    if (!r)
        r = encode_text(&e, text, len, flags & ENG_TOK_PARSE_SPECIAL);
    if (!r && (flags & ENG_TOK_ADD_SPECIAL) && t->add_eos)
        r = eng_ids_push(&e.out, t->eos);
    free(e.spelled);
    eng_split_scratch_free(e.split);
    eng_merge_scratch_done(&e.merge);
    if (r < 0) {
        free(e.out.v);
        return r;
    }
    *ret_ids = e.out.v;
    *ret_n = e.out.n;
    return 0;
}

/* ---- decoding and facts ------------------------------------------------------------------------------------------- */

static bool known(const eng_tokenizer *t, int32_t id)
{
    return id >= 0 && (uint32_t)id < t->n_vocab;
}

int eng_tokenizer_text(const eng_tokenizer *t, int32_t id, bool special, const char **ret_text, size_t *ret_len)
{
    if (!known(t, id))
        return -EINVAL;
    *ret_text = t->arena + t->offsets[id];
    *ret_len = is_control(t->types[id]) && !special ? 0 : t->offsets[id + 1] - t->offsets[id];
    return 0;
}

bool eng_tokenizer_is_control(const eng_tokenizer *t, int32_t id)
{
    return known(t, id) && is_control(t->types[id]);
}

bool eng_tokenizer_is_eog(const eng_tokenizer *t, int32_t id)
{
    return known(t, id) && t->eog[id];
}

int32_t eng_tokenizer_bos(const eng_tokenizer *t)
{
    return t->bos;
}

int32_t eng_tokenizer_eos(const eng_tokenizer *t)
{
    return t->eos;
}

bool eng_tokenizer_add_bos(const eng_tokenizer *t)
{
    return t->add_bos;
}
