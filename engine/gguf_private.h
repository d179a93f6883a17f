/* What gguf.c, which reads one file, and gguf_file.c, which maps files and joins the parts of a split model, share. */
#ifndef RETRIEVALD_GGUF_PRIVATE_H
#define RETRIEVALD_GGUF_PRIVATE_H

#include "gguf.h"

enum { ENG_GGUF_MAX_TENSORS = 131072 }; /* real models have up to some thousands */

typedef struct {
    eng_str key;
    uint32_t type, item;  /* item: of an array's elements, else the type itself */
    uint64_t n;           /* elements of an array, bytes of a string, else 1 */
    const uint8_t *value; /* first element, first character */
} eng_gguf_entry;

struct eng_gguf {
    const uint8_t *base;
    size_t size, data_start;
    size_t span; /* bytes of address space from base on, whole huge pages; 0: not mapped by us */
    eng_gguf_entry *keys; /* by name */
    size_t n_keys;
    eng_tensor *tensors; /* as in the file, or in the files one after another */
    const eng_tensor **by_name;
    size_t n_tensors;
    eng_gguf **parts; /* the other files of a split model, without tensors of their own any more */
    size_t n_parts;
};

/* Reads and checks all of [base, base + size). */
int eng_gguf_parse(eng_gguf *g, char *err, size_t errlen);

/* Fills by_name, which has room, and checks that tensors share neither bytes nor names. */
int eng_gguf_sort_tensors(eng_gguf *g, char *err, size_t errlen);

#endif
