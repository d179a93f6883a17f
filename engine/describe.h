/* What a model file says, for people who want to know before they load it. Public, beside engine.h. */
#ifndef RETRIEVALD_DESCRIBE_H
#define RETRIEVALD_DESCRIBE_H

#include "engine.h"

enum { ENG_MAX_FILE_TYPES = 64, ENG_MAX_SPECIAL = 16 };

typedef struct {
    const char *name; /* "Q4_1" */
    uint32_t tensors;
    uint64_t bytes;
} eng_type_use;

/* Strings are fit to print, and NULL where the file has nothing. Numbers that it does not have are 0. */
typedef struct {
    const char *refusal; /* NULL: the engine can run it; else why not, and what follows is what the file says all the same */
    eng_info info;       /* without what opening decides: n_ctx, n_threads, cpu, scratch_bytes; bos and eos -1: none */
    uint32_t n_files, n_tensors;
    uint64_t file_bytes;
    uint32_t n_types; /* of tensors, most bytes first */
    eng_type_use types[ENG_MAX_FILE_TYPES];
    uint32_t n_expert, n_expert_used;
    float rope_base, rope_factor; /* 0: not said */
    const char *rope_scaling;
    uint32_t rope_dim, rope_orig_ctx;
    const char *tokenizer, *pre;
    uint32_t n_special;
    struct {
        const char *name; /* "eot" */
        uint32_t id;
    } special[ENG_MAX_SPECIAL];
    const char *template_line; /* the first one; its length is in info, where chat_template is NULL */
    size_t template_lines;
    size_t kv_bytes_per_token[ENG_KV_Q8_0 + 1]; /* keys and values, by eng_kv_type of both; 0: with a refusal */
    size_t index_bytes_per_token, index_bytes_cluster, index_bytes_graph; /* at most: of codes; with what the modes cluster and graph search */
} eng_description;

/* Maps the file; its weights are not read, nothing is started. -errno with a sentence: it cannot be read at all. */
int eng_describe(const char *path, eng_description **ret, char *err, size_t errlen);
void eng_description_free(eng_description *d);

#endif
