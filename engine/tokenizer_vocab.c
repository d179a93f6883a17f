/* The tokens of the file and their types, and the way from a text to its id. */
#include "text.h"
#include "tokenizer_parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#define NO_TOKEN UINT32_MAX

const char *eng_quoted(eng_str s)
{
    static _Thread_local char buf[64];
    return eng_printable(s.s, s.n, buf, sizeof buf);
}

int eng_array_fail(int rc, const char *key, const char *of, char *err, size_t errlen)
{
    if (rc == -ENOMEM)
        return eng_fail(err, errlen, rc, "no memory for %s", key);
    return eng_fail(err, errlen, -EINVAL, rc == -ENOENT ? "%s is missing" : "%s is not an array of %s", key, of);
}

int eng_flag(const eng_gguf *g, const char *key, bool missing, bool *ret, char *err, size_t errlen)
{
    int r = eng_gguf_bool(g, key, ret);
    if (r == -ENOENT)
        *ret = missing;
    else if (r < 0)
        return eng_fail(err, errlen, r, "%s is not a boolean", key);
    return 0;
}

bool eng_is_control(int32_t type)
{
    return type == ENG_CONTROL || type == ENG_UNKNOWN;
}

/* ---- text to id --------------------------------------------------------------------------------------------------- */

static size_t find_slot(const eng_vocab *v, const char *s, size_t n)
{
    size_t i = (size_t)XXH3_64bits(s, n) & v->slot_mask;
    while (v->slots[i] != NO_TOKEN) {
        eng_str have = v->tokens[v->slots[i]];
        if (have.n == n && !memcmp(have.s, s, n))
            break;
        i = (i + 1) & v->slot_mask;
    }
    return i;
}

int32_t eng_vocab_find(const eng_vocab *v, const char *s, size_t n)
{
    uint32_t id = v->slots[find_slot(v, s, n)];
    return id == NO_TOKEN ? -1 : (int32_t)id;
}

int32_t eng_vocab_ordinary(const eng_vocab *v, const char *s, size_t n)
{
    int32_t id = eng_vocab_find(v, s, n);
    return id < 0 || eng_is_control(v->types[id]) ? -1 : id;
}

/* ---- loading ------------------------------------------------------------------------------------------------------ */

static int load_tokens(eng_vocab *v, const eng_gguf *g, char *err, size_t errlen)
{
    size_t n = 0;
    int r = eng_gguf_str_array(g, "tokenizer.ggml.tokens", &v->tokens, &n);
    if (r < 0)
        return eng_array_fail(r, "tokenizer.ggml.tokens", "strings", err, errlen);
    if (n != v->n)
        return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.tokens has %zu tokens, but the model (token_embd) has %u", n, v->n);

    size_t slots = 16;
    while (slots < 2 * n)
        slots *= 2;
    v->slot_mask = slots - 1;
    v->slots = malloc(slots * sizeof *v->slots);
    if (!v->slots)
        return eng_fail(err, errlen, -ENOMEM, "no memory for the vocabulary");
    memset(v->slots, 0xff, slots * sizeof *v->slots);
    for (size_t i = 0; i < n; i++) {
        eng_str text = v->tokens[i];
        if (!text.n)
            return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.tokens: token %zu is empty", i);
        if (!eng_utf8_valid(text.s, text.n))
            return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.tokens: token %zu is not UTF-8", i);
        size_t slot = find_slot(v, text.s, text.n);
        if (v->slots[slot] != NO_TOKEN)
            return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.tokens: '%s' is there twice (duplicate ids %u and %zu)", eng_quoted(text),
                            v->slots[slot], i);
        v->slots[slot] = (uint32_t)i;
    }
    return 0;
}

static int load_types(eng_vocab *v, const eng_gguf *g, char *err, size_t errlen)
{
    size_t n = 0;
    int r = eng_gguf_i32_array(g, "tokenizer.ggml.token_type", &v->types, &n);
    if (r == -ENOENT) { /* as llama.cpp: no special tokens then */
        v->types = malloc(v->n * sizeof *v->types);
        if (!v->types)
            return eng_fail(err, errlen, -ENOMEM, "no memory for the vocabulary");
        for (uint32_t i = 0; i < v->n; i++)
            v->types[i] = ENG_NORMAL;
        return 0;
    }
    if (r < 0)
        return eng_array_fail(r, "tokenizer.ggml.token_type", "integers", err, errlen);
    if (n != v->n)
        return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.token_type has %zu entries for %u tokens", n, v->n);
    for (size_t i = 0; i < n; i++)
        if (v->types[i] < ENG_NORMAL || v->types[i] > ENG_BYTE)
            return eng_fail(err, errlen, -EINVAL, "tokenizer.ggml.token_type: token %zu has the unknown type %d", i, v->types[i]);
    return 0;
}

int eng_vocab_load(eng_vocab *v, const eng_gguf *g, uint32_t n, char *err, size_t errlen)
{
    *v = (eng_vocab){.n = n};
    int r = load_tokens(v, g, err, errlen);
    return r < 0 ? r : load_types(v, g, err, errlen);
}

void eng_vocab_done(eng_vocab *v)
{
    free(v->tokens);
    free(v->types);
    free(v->slots);
    *v = (eng_vocab){0};
}
