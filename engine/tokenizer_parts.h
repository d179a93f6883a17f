/* The parts a tokenizer is made of: the vocabulary, cutting out special tokens, splitting text into words, merging, and the two models
 * (byte-level BPE, SentencePiece) built of them. Private to engine/tokenizer*.c and their tests. All of it is immutable after loading;
 * what a call needs to write is in a scratch.
 *
 * Scratches count their work, for tests that show it to be linear: bytes looked at, pairs looked up, steps in the heap. */
#ifndef RETRIEVALD_TOKENIZER_PARTS_H
#define RETRIEVALD_TOKENIZER_PARTS_H

#include "gguf.h"

/* ---- vocabulary (tokenizer_vocab.c) ------------------------------------------------------------------------------- */

enum { ENG_NORMAL = 1, ENG_UNKNOWN, ENG_CONTROL, ENG_USER_DEFINED, ENG_UNUSED, ENG_BYTE }; /* tokenizer.ggml.token_type */

typedef struct {
    uint32_t n;
    eng_str *tokens; /* [n] as in the file: not empty, UTF-8, all different */
    int32_t *types;  /* [n] */
    uint32_t *slots; /* open hash of text to id */
    size_t slot_mask;
} eng_vocab;

/* Loads and checks the tokens and their types; a sentence on failure. done() also after that. */
int eng_vocab_load(eng_vocab *v, const eng_gguf *g, uint32_t n, char *err, size_t errlen);
void eng_vocab_done(eng_vocab *v);
int32_t eng_vocab_find(const eng_vocab *v, const char *s, size_t n); /* -1: none */
/* The same of ordinary text: never a control token. */
int32_t eng_vocab_ordinary(const eng_vocab *v, const char *s, size_t n);
bool eng_is_control(int32_t type); /* control or unknown: nothing that text may become */

/* A string of the file, fit for an error sentence. Valid until the next call in the same thread. */
const char *eng_quoted(eng_str s);
/* What went wrong with an array of the file, as a sentence. */
int eng_array_fail(int rc, const char *key, const char *of, char *err, size_t errlen);
/* A boolean of the file; `missing` where it has none. */
int eng_flag(const eng_gguf *g, const char *key, bool missing, bool *ret, char *err, size_t errlen);

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
    bool strip; /* takes the white space that follows with it */
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
 * library). NULL: none. O(length) for a given vocabulary. Adds to *work. */
const eng_special *eng_specials_find(const eng_specials *s, const char *text, size_t len, size_t from, size_t *ret_at, uint64_t *work);

/* ---- words (tokenizer_split.c) ------------------------------------------------------------------------------------ */

typedef struct eng_split eng_split;
typedef struct eng_split_scratch eng_split_scratch;

enum { ENG_SPLIT_STAGES = 6 };

/* Each stage cuts every piece that the one before left: its matches are pieces, and what is between them. */
typedef struct {
    const char *names[12]; /* values of tokenizer.ggml.pre */
    const char *stages[ENG_SPLIT_STAGES];
    bool whole_words; /* a word that is a token is that token, whatever the merges say */
    bool add_bos;     /* where the file does not say */
} eng_split_rule;

const eng_split_rule *eng_split_find(eng_str pre); /* NULL: not known */
/* counted: its scratches count the steps of matching. The words are the same, it takes longer. */
int eng_split_new(const eng_split_rule *rule, bool counted, eng_split **ret);
void eng_split_free(eng_split *s);
int eng_split_scratch_new(const eng_split *s, eng_split_scratch **ret);
void eng_split_scratch_free(eng_split_scratch *w);
uint64_t eng_split_work(const eng_split_scratch *w);

/* Calls `word` for each word of the text, in order; every byte is in one of them. Any bytes will do: each one that is not part of a
 * valid UTF-8 character is a word by itself. Stops at the first negative return and hands it on. */
typedef int eng_word_fn(void *ctx, const char *word, size_t n);
int eng_split_each(const eng_split *s, eng_split_scratch *w, const char *text, size_t len, eng_word_fn *word, void *ctx);

/* ---- merging (tokenizer_merge.c) ---------------------------------------------------------------------------------- */

typedef struct eng_merges eng_merges;

typedef struct {
    int32_t id; /* negative: merges with nothing */
    uint32_t prev, next;
    uint32_t merge; /* private to tokenizer_merge.c */
} eng_symbol;

#define ENG_NO_SYMBOL UINT32_MAX

typedef struct {
    eng_symbol *symbols; /* [n_symbols] */
    uint64_t *heap;      /* [2 * n_symbols] */
    size_t n_symbols;
    uint64_t work;
} eng_merge_scratch;

int eng_merges_new(size_t n, eng_merges **ret);
void eng_merges_free(eng_merges *m);
/* At most n of them. Lower ranks merge first; of a pair given twice the first counts. */
void eng_merges_add(eng_merges *m, uint32_t rank, int32_t left, int32_t right, int32_t result);

/* Room for n symbols: -E2BIG, -ENOMEM. What was in the scratch is lost. */
int eng_merge_reserve(eng_merge_scratch *w, size_t n);
void eng_merge_scratch_done(eng_merge_scratch *w);
/* Merges the list of symbols that begins at 0: the pair of lowest rank first, leftmost among equals. O(n log n), 32 bytes a symbol. */
void eng_merges_run(const eng_merges *m, eng_merge_scratch *w);

/* Appends the tokens of a word of n bytes, from byte_id[b] each (negative: the byte has no token and vanishes, and nothing merges
 * across it). */
int eng_merges_apply(const eng_merges *m, eng_merge_scratch *w, const int32_t byte_id[256], const char *word, size_t n, eng_ids *out);

/* ---- models ------------------------------------------------------------------------------------------------------- */

/* What one call writes. Zeroed, then eng_bpe_begin or nothing for SentencePiece; eng_encoding_done in any case. */
typedef struct {
    eng_ids out;
    eng_merge_scratch merge;
    eng_split_scratch *split; /* BPE */
    char *spelled;            /* BPE: a word in the byte alphabet */
    uint64_t work;            /* outside of split and merge */
} eng_encoding;

/* Byte-level BPE (tokenizer_bpe.c). Borrows v. */
typedef struct eng_bpe eng_bpe;
int eng_bpe_new(const eng_gguf *g, const eng_vocab *v, eng_bpe **ret, char *err, size_t errlen);
void eng_bpe_free(eng_bpe *b);
bool eng_bpe_add_bos(const eng_bpe *b); /* where the file does not say */
int eng_bpe_begin(const eng_bpe *b, eng_encoding *e);
int eng_bpe_encode(const eng_bpe *b, eng_encoding *e, const char *text, size_t len);
/* What an ordinary token prints: at most t.n bytes to out. */
size_t eng_bpe_print(const eng_bpe *b, eng_str t, char *out);

/* SentencePiece's BPE (tokenizer_spm.c). Borrows v. */
typedef struct eng_spm eng_spm;
int eng_spm_new(const eng_gguf *g, const eng_vocab *v, eng_spm **ret, char *err, size_t errlen);
void eng_spm_free(eng_spm *s);
/* text: all that lies between two special tokens or ends of the input, of which each gets the space prefix that the file asks for. */
int eng_spm_encode(const eng_spm *s, eng_encoding *e, const char *text, size_t len);
/* What an ordinary token prints: at most t.n bytes to out. */
size_t eng_spm_print(eng_str t, int32_t type, char *out);

/* ---- the whole (tokenizer.c) -------------------------------------------------------------------------------------- */

/* eng_tokenizer_encode without a guard, and the work it counted, that of matching apart. */
struct eng_tokenizer;
int eng_tokenizer_encode_counted(const struct eng_tokenizer *t, const char *text, size_t len, unsigned flags, int32_t **ret_ids,
                                 size_t *ret_n, uint64_t *ret_work);

#endif
