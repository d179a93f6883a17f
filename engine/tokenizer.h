/* Text to token ids and back, as the model's GGUF file describes it. Immutable after creation: any number of threads. */
#ifndef RETRIEVALD_TOKENIZER_H
#define RETRIEVALD_TOKENIZER_H

#include "gguf.h"

typedef struct eng_tokenizer eng_tokenizer;

/* n_vocab: rows of the embedding; the vocabulary must have as many tokens. Strings stay in the mapped file g, which must outlive it. */
int eng_tokenizer_new(const eng_gguf *g, uint32_t n_vocab, eng_tokenizer **ret, char *err, size_t errlen);
void eng_tokenizer_free(eng_tokenizer *t);

/* flags, guard and result as in eng_tokenize (engine.h). Linear in len whatever the text is. */
int eng_tokenizer_encode(const eng_tokenizer *t, const char *text, size_t len, unsigned flags, const char *guard, int32_t **ret_ids,
                         size_t *ret_n);
int eng_tokenizer_text(const eng_tokenizer *t, int32_t id, bool special, const char **ret_text, size_t *ret_len);

bool eng_tokenizer_is_control(const eng_tokenizer *t, int32_t id);
bool eng_tokenizer_is_eog(const eng_tokenizer *t, int32_t id);
int32_t eng_tokenizer_bos(const eng_tokenizer *t); /* -1: none */
int32_t eng_tokenizer_eos(const eng_tokenizer *t);
bool eng_tokenizer_add_bos(const eng_tokenizer *t);

#endif
