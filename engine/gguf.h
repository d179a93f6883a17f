/* GGUF v2/v3 files: mapped, and every byte checked before it is believed.
 *
 * The file is data of a stranger: counts, lengths, types and offsets are bounded by the file's size before anything is allocated or
 * read. Strings point into the mapping, with a length, and are valid UTF-8 without NUL when they are keys or names.
 */
#ifndef RETRIEVALD_GGUF_H
#define RETRIEVALD_GGUF_H

#include "quant.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct eng_gguf eng_gguf;

typedef struct {
    const char *s;
    size_t n;
} eng_str;

typedef struct {
    eng_str name;
    eng_type type;
    uint32_t n_dims;
    uint64_t dims[4];   /* fastest first, as in the file; unused ones are 1 */
    const void *data;   /* 8-byte aligned at least */
    size_t bytes, row_bytes;
} eng_tensor;

/* Maps and checks `path`; of a split model, the first part, with all the others beside it. -errno with a sentence naming what is wrong. */
int eng_gguf_open(const char *path, eng_gguf **ret, char *err, size_t errlen);
/* The same of n bytes in memory (8-byte aligned; borrowed until close): for tests and fuzzers, where a sanitizer sees every byte. */
int eng_gguf_open_memory(const void *bytes, size_t n, eng_gguf **ret, char *err, size_t errlen);
void eng_gguf_close(eng_gguf *g);
void eng_gguf_prefetch(const eng_gguf *g); /* all of it will be read soon: the kernel may start now */

/* Weights in huge pages: a file's pages have 4 KiB, and looking up so many of them takes half of the memory bandwidth. Piece by piece
 * (from any thread, each piece once) the mapping is replaced by a copy of itself at the same address. False: the piece stays as it is. */
size_t eng_gguf_n_pieces(const eng_gguf *g);
bool eng_gguf_settle(const eng_gguf *g, size_t piece);

size_t eng_gguf_n_tensors(const eng_gguf *g);
const eng_tensor *eng_gguf_tensor_at(const eng_gguf *g, size_t i);
const eng_tensor *eng_gguf_tensor(const eng_gguf *g, const char *name); /* NULL: none */

/* Metadata. 0; -ENOENT: no such key; -EINVAL: another type, out of range, not finite. Any integer type of the file is accepted for an
 * integer that it can hold without loss. */
int eng_gguf_u32(const eng_gguf *g, const char *key, uint32_t *ret);
int eng_gguf_f32(const eng_gguf *g, const char *key, float *ret);
int eng_gguf_bool(const eng_gguf *g, const char *key, bool *ret);
int eng_gguf_str(const eng_gguf *g, const char *key, eng_str *ret);
/* Arrays of strings: *ret is malloc'ed (the caller frees it); the strings belong to the file. */
int eng_gguf_str_array(const eng_gguf *g, const char *key, eng_str **ret, size_t *ret_n);
/* Arrays of integers / floats, converted; malloc'ed. */
int eng_gguf_i32_array(const eng_gguf *g, const char *key, int32_t **ret, size_t *ret_n);
int eng_gguf_f32_array(const eng_gguf *g, const char *key, float **ret, size_t *ret_n);

size_t eng_gguf_n_parts(const eng_gguf *g); /* files */
uint64_t eng_gguf_size(const eng_gguf *g);  /* of all of them */
uint64_t eng_gguf_fingerprint(const eng_gguf *g); /* XXH3 over header, metadata, tensor table, size and samples of the data */

#endif
