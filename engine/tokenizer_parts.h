/* The parts a tokenizer is made of: cutting out special tokens, splitting text into words, merging a word's bytes. Private to
 * engine/tokenizer_*.c and their tests. All of it is immutable after loading; what a call needs to write is in a scratch. */
#ifndef RETRIEVALD_TOKENIZER_PARTS_H
#define RETRIEVALD_TOKENIZER_PARTS_H

#include "gguf.h"

/* ---- ids under construction --------------------------------------------------------------------------------------- */

typedef struct {
    int32_t *v;
    size_t n, cap;
} eng_ids;

int eng_ids_push(eng_ids *ids, int32_t id); /* 0, -ENOMEM */

/* ---- special tokens (tokenizer_special.c) ------------------------------------------------------------------------- */

typedef struct {
    eng_str text;
    int32_t id;
} eng_special;

typedef struct {
    eng_special *sorted; /* by bytes */
    size_t n;
    size_t first[257]; /* sorted[first[b] .. first[b + 1]) begin with byte b */
} eng_specials;

/* Copies the n entries; their texts are not empty, differ, and outlive it. */
int eng_specials_init(eng_specials *s, const eng_special *entries, size_t n);
void eng_specials_done(eng_specials *s);

/* Finds the first place at or after `from` where a special token begins, and the longest one there (the rule of the tokenizers
 * library). NULL: none. O(length) for a given vocabulary. */
const eng_special *eng_specials_find(const eng_specials *s, const char *text, size_t len, size_t from, size_t *ret_at);

/* ---- words (tokenizer_split.c) ------------------------------------------------------------------------------------ */

typedef struct eng_split eng_split;
typedef struct eng_split_scratch eng_split_scratch;

typedef struct {
    const char *names[3]; /* values of tokenizer.ggml.pre */
    const char *expression;
    bool whole_words; /* a word that is a token is that token, whatever the merges say */
    bool add_bos;     /* where the file does not say */
} eng_split_rule;

const eng_split_rule *eng_split_find(eng_str pre); /* NULL: not known */
int eng_split_new(const eng_split_rule *rule, eng_split **ret);
void eng_split_free(eng_split *s);
int eng_split_scratch_new(const eng_split *s, eng_split_scratch **ret);
void eng_split_scratch_free(eng_split_scratch *w);

/* Calls `word` for each word of the text, in order; every byte is in one of them. Any bytes will do: each one that is not part of a
 * valid UTF-8 character is a word by itself. Stops at the first negative return and hands it on. */
typedef int eng_word_fn(void *ctx, const char *word, size_t n);
int eng_split_each(const eng_split *s, eng_split_scratch *w, const char *text, size_t len, eng_word_fn *word, void *ctx);

/* ---- merging (tokenizer_merge.c) ---------------------------------------------------------------------------------- */

typedef struct eng_merges eng_merges;

typedef struct {
    struct eng_symbol *symbols; /* [n_symbols] */
    uint64_t *heap;             /* [2 * n_symbols] */
    size_t n_symbols;
} eng_merge_scratch;

int eng_merges_new(size_t n, eng_merges **ret);
void eng_merges_free(eng_merges *m);
/* At most n of them, in the order of their rank; of a pair given twice the first counts. */
void eng_merges_add(eng_merges *m, int32_t left, int32_t right, int32_t result);

/* Appends the tokens of a word of n bytes: from byte_id[b] each (negative: the byte has no token and vanishes, and nothing merges
 * across it), the pair of lowest rank merged first, leftmost among equals. O(n log n) time, 32 bytes of scratch per byte. */
int eng_merges_apply(const eng_merges *m, eng_merge_scratch *w, const int32_t byte_id[256], const char *word, size_t n, eng_ids *out);
void eng_merge_scratch_done(eng_merge_scratch *w);

#endif
