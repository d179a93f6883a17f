/* A model's tokenizer: special tokens are cut out of the text, what lies between goes to byte-level BPE or to SentencePiece's. */
#include "tokenizer.h"
#include "engine.h"
#include "text.h"
#include "tokenizer_parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct eng_tokenizer {
    eng_vocab vocab;
    eng_bpe *bpe; /* one of the two */
    eng_spm *spm;
    bool *eog;       /* [vocab.n] */
    char *arena;     /* what each token prints, one after the other */
    size_t *offsets; /* [vocab.n + 1] into the arena */
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

/* ---- loading ------------------------------------------------------------------------------------------------------ */

static bool same(eng_str s, const char *text)
{
    return s.n == strlen(text) && !memcmp(s.s, text, s.n);
}

static int load_kind(eng_tokenizer *t, const eng_gguf *g, char *err, size_t errlen)
{
    eng_str model;
    int r = eng_gguf_str(g, "tokenizer.ggml.model", &model);
    if (r < 0)
        return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.model is %s", r == -ENOENT ? "missing" : "not a string");
    bool bpe = same(model, "gpt2");
    if (!bpe && !same(model, "llama"))
        return eng_fail(err, errlen, -ENOTSUP,
                        "tokenizer.ggml.model is '%s': only gpt2 (byte-level BPE) and llama (SentencePiece) are supported",
                        eng_quoted(model));
    r = eng_vocab_load(&t->vocab, g, t->vocab.n, err, errlen);
    if (r < 0)
        return r;
    return bpe ? eng_bpe_new(g, &t->vocab, &t->bpe, err, errlen) : eng_spm_new(g, &t->vocab, &t->spm, err, errlen);
}

/* What each token prints: special tokens as they are, unused ones nothing. */
static int load_texts(eng_tokenizer *t, char *err, size_t errlen)
{
    const eng_vocab *v = &t->vocab;
    size_t total = 0;
    for (uint32_t i = 0; i < v->n; i++)
        total += v->tokens[i].n; /* strings of a mapped file: no overflow */
    t->arena = malloc(total);
    t->offsets = malloc(((size_t)v->n + 1) * sizeof *t->offsets);
    if (!t->arena || !t->offsets)
        return eng_fail(err, errlen, -ENOMEM, "no memory for the vocabulary");
    size_t at = 0;
    for (uint32_t i = 0; i < v->n; i++) {
        eng_str text = v->tokens[i];
        t->offsets[i] = at;
        if (v->types[i] == ENG_UNUSED)
            continue;
        if (v->types[i] != ENG_NORMAL && v->types[i] != ENG_BYTE) {
            memcpy(t->arena + at, text.s, text.n);
            at += text.n;
        } else {
            at += t->bpe ? eng_bpe_print(t->bpe, text, t->arena + at) : eng_spm_print(text, v->types[i], t->arena + at);
        }
    }
    t->offsets[v->n] = at;
    return 0;
}

/* The file does not say it, but Phi-3 was trained with prompts whose special tokens took the white space after them, all but these. */
static bool strips(eng_str token)
{
    return !same(token, "<unk>") && !same(token, "<s>") && !same(token, "<|endoftext|>");
}

static int load_specials(eng_tokenizer *t, const eng_gguf *g, char *err, size_t errlen)
{
    const eng_vocab *v = &t->vocab;
    eng_str arch;
    bool phi3 = t->spm && !eng_gguf_str(g, "general.architecture", &arch) && same(arch, "phi3");
    eng_special *list = malloc(v->n * sizeof *list);
    if (!list)
        return eng_fail(err, errlen, -ENOMEM, "no memory for the vocabulary");
    size_t n = 0;
    for (uint32_t i = 0; i < v->n; i++)
        if (v->types[i] == ENG_USER_DEFINED)
            list[n++] = (eng_special){v->tokens[i], (int32_t)i, phi3};
    int r = eng_specials_init(&t->user_defined, list, n);
    for (uint32_t i = 0; i < v->n; i++)
        if (eng_is_control(v->types[i]))
            list[n++] = (eng_special){v->tokens[i], (int32_t)i, phi3 && strips(v->tokens[i])};
    if (!r)
        r = eng_specials_init(&t->all_special, list, n);
    free(list);
    return r < 0 ? eng_fail(err, errlen, r, "no memory for the vocabulary") : 0;
}

/* `missing` where the file has no such key. */
static int load_id(const eng_vocab *v, const eng_gguf *g, const char *key, int32_t missing, int32_t *ret, char *err, size_t errlen)
{
    uint32_t id;
    int r = eng_gguf_u32(g, key, &id);
    if (r == -ENOENT) {
        *ret = missing;
        return 0;
    }
    if (r < 0)
        return eng_fail(err, errlen, r, "%s is not a token id", key);
    if (id >= v->n)
        return eng_fail(err, errlen, -EINVAL, "%s is %u, past the vocabulary of %u tokens", key, id, v->n);
    *ret = (int32_t)id;
    return 0;
}

/* The control token of that text; -1: none. */
static int32_t control_id(const eng_vocab *v, const char *text)
{
    int32_t id = eng_vocab_find(v, text, strlen(text));
    return id >= 0 && v->types[id] == ENG_CONTROL ? id : -1;
}

static int load_eog(eng_tokenizer *t, int32_t eot, int32_t eom, char *err, size_t errlen)
{
    t->eog = calloc(t->vocab.n, sizeof *t->eog);
    if (!t->eog)
        return eng_fail(err, errlen, -ENOMEM, "no memory for the vocabulary");
    for (size_t i = 0; i < sizeof eog_texts / sizeof *eog_texts; i++) {
        int32_t id = control_id(&t->vocab, eog_texts[i]);
        if (id >= 0)
            t->eog[id] = true;
    }
    /* In GPT-OSS's format <|end|> ends a message, of which an answer has several. */
    int32_t end = control_id(&t->vocab, "<|end|>");
    if (end >= 0 && control_id(&t->vocab, "<|return|>") >= 0 && control_id(&t->vocab, "<|call|>") >= 0)
        t->eog[end] = false;
    const int32_t by_role[] = {t->eos, eot, eom};
    for (size_t i = 0; i < sizeof by_role / sizeof *by_role; i++)
        if (by_role[i] >= 0)
            t->eog[by_role[i]] = true;
    return 0;
}

static int load_roles(eng_tokenizer *t, const eng_gguf *g, char *err, size_t errlen)
{
    int32_t eot = -1, eom = -1;
    int r;
    if ((r = load_id(&t->vocab, g, "tokenizer.ggml.bos_token_id", t->spm ? control_id(&t->vocab, "<s>") : -1, &t->bos, err, errlen)) < 0 ||
        (r = load_id(&t->vocab, g, "tokenizer.ggml.eos_token_id", t->spm ? control_id(&t->vocab, "</s>") : -1, &t->eos, err, errlen)) < 0 ||
        (r = load_id(&t->vocab, g, "tokenizer.ggml.eot_token_id", -1, &eot, err, errlen)) < 0 ||
        (r = load_id(&t->vocab, g, "tokenizer.ggml.eom_token_id", -1, &eom, err, errlen)) < 0 ||
        (r = eng_flag(g, "tokenizer.ggml.add_bos_token", t->spm || eng_bpe_add_bos(t->bpe), &t->add_bos, err, errlen)) < 0 ||
        (r = eng_flag(g, "tokenizer.ggml.add_eos_token", false, &t->add_eos, err, errlen)) < 0)
        return r;
    t->add_bos = t->add_bos && t->bos >= 0;
    t->add_eos = t->add_eos && t->eos >= 0;
    return load_eog(t, eot, eom, err, errlen);
}

int eng_tokenizer_new(const eng_gguf *g, uint32_t n_vocab, eng_tokenizer **ret, char *err, size_t errlen)
{
    if (!n_vocab || n_vocab > INT32_MAX)
        return eng_fail(err, errlen, -EINVAL, "a vocabulary of %u tokens", n_vocab);
    eng_tokenizer *t = calloc(1, sizeof *t);
    if (!t)
        return eng_fail(err, errlen, -ENOMEM, "no memory for the vocabulary");
    t->vocab.n = n_vocab;
    int r;
    if ((r = load_kind(t, g, err, errlen)) < 0 || (r = load_texts(t, err, errlen)) < 0 || (r = load_specials(t, g, err, errlen)) < 0 ||
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
    eng_bpe_free(t->bpe);
    eng_spm_free(t->spm);
    free(t->eog);
    free(t->arena);
    free(t->offsets);
    eng_specials_done(&t->user_defined);
    eng_specials_done(&t->all_special);
    eng_vocab_done(&t->vocab);
    free(t);
}

/* ---- encoding ----------------------------------------------------------------------------------------------------- */

/* Text between special tokens. */
static int encode_plain(const eng_tokenizer *t, eng_encoding *e, const char *text, size_t len)
{
    return t->bpe ? eng_bpe_encode(t->bpe, e, text, len) : eng_spm_encode(t->spm, e, text, len);
}

/* The same, without its guards. */
static int encode_piece(const eng_tokenizer *t, eng_encoding *e, const char *text, size_t len, const char *guard)
{
    size_t guard_len = guard ? strlen(guard) : 0;
    const char *found = guard_len ? memmem(text, len, guard, guard_len) : NULL;
    if (!found)
        return encode_plain(t, e, text, len);
    char *clean = malloc(len);
    if (!clean)
        return -ENOMEM;
    size_t n = 0;
    const char *end = text + len;
    for (; found; found = memmem(text, (size_t)(end - text), guard, guard_len)) {
        memcpy(clean + n, text, (size_t)(found - text));
        n += (size_t)(found - text);
        text = found + guard_len;
    }
    memcpy(clean + n, text, (size_t)(end - text));
    n += (size_t)(end - text);
    int r = encode_plain(t, e, clean, n);
    free(clean);
    return r;
}

static bool is_white(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}

static int encode_text(const eng_tokenizer *t, eng_encoding *e, const char *text, size_t len, bool parse_special, const char *guard)
{
    const eng_specials *specials = parse_special ? &t->all_special : &t->user_defined;
    for (size_t i = 0; i < len;) {
        size_t at = len;
        const eng_special *found = eng_specials_find(specials, text, len, i, &at, &e->work);
        int r = encode_piece(t, e, text + i, at - i, guard);
        if (!r && found)
            r = eng_ids_push(&e->out, found->id);
        if (r < 0)
            return r;
        i = at + (found ? found->text.n : 0);
        while (found && found->strip && i < len && is_white(text[i]))
            i++;
    }
    return 0;
}

static int encode(const eng_tokenizer *t, eng_encoding *e, const char *text, size_t len, unsigned flags, const char *guard)
{
    if (len > INT32_MAX)
        return -E2BIG;
    e->out.cap = len / 4 + 8; /* about what prose needs */
    e->out.v = malloc(e->out.cap * sizeof *e->out.v);
    int r = e->out.v ? 0 : -ENOMEM;
    if (!r && t->bpe)
        r = eng_bpe_begin(t->bpe, e);
    if (!r && (flags & ENG_TOK_ADD_SPECIAL) && t->add_bos)
        r = eng_ids_push(&e->out, t->bos);
    if (!r)
        r = encode_text(t, e, text, len, flags & ENG_TOK_PARSE_SPECIAL, guard);
    if (!r && (flags & ENG_TOK_ADD_SPECIAL) && t->add_eos)
        r = eng_ids_push(&e->out, t->eos);
    return r;
}

static int encode_counted(const eng_tokenizer *t, const char *text, size_t len, unsigned flags, const char *guard, int32_t **ret_ids,
                          size_t *ret_n, uint64_t *ret_work)
{
    eng_encoding e = {0};
    int r = encode(t, &e, text, len, flags, guard);
    free(e.spelled);
    eng_split_scratch_free(e.split);
    eng_merge_scratch_done(&e.merge);
    if (r < 0) {
        free(e.out.v);
        return r;
    }
    *ret_ids = e.out.v;
    *ret_n = e.out.n;
    *ret_work = e.work + e.merge.work;
    return 0;
}

int eng_tokenizer_encode(const eng_tokenizer *t, const char *text, size_t len, unsigned flags, const char *guard, int32_t **ret_ids,
                         size_t *ret_n)
{
    uint64_t work;
    return encode_counted(t, text, len, flags, guard, ret_ids, ret_n, &work);
}

int eng_tokenizer_encode_counted(const eng_tokenizer *t, const char *text, size_t len, unsigned flags, int32_t **ret_ids, size_t *ret_n,
                                 uint64_t *ret_work)
{
    return encode_counted(t, text, len, flags, NULL, ret_ids, ret_n, ret_work);
}

/* ---- decoding and facts ------------------------------------------------------------------------------------------- */

static bool known(const eng_tokenizer *t, int32_t id)
{
    return id >= 0 && (uint32_t)id < t->vocab.n;
}

int eng_tokenizer_text(const eng_tokenizer *t, int32_t id, bool special, const char **ret_text, size_t *ret_len)
{
    if (!known(t, id))
        return -EINVAL;
    *ret_text = t->arena + t->offsets[id];
    *ret_len = eng_is_control(t->vocab.types[id]) && !special ? 0 : t->offsets[id + 1] - t->offsets[id];
    return 0;
}

bool eng_tokenizer_is_control(const eng_tokenizer *t, int32_t id)
{
    return known(t, id) && eng_is_control(t->vocab.types[id]);
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
