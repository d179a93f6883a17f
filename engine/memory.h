/* What a model and a context take, against what there is. */
#ifndef RETRIEVALD_MEMORY_H
#define RETRIEVALD_MEMORY_H

#include "model.h"
#include "segment.h"

eng_kv_shape eng_kv_shape_of(const eng_model *m, eng_kv_type type_k, eng_kv_type type_v);

/* Bytes. */
typedef struct {
    uint64_t weights; /* mapped */
    uint64_t scratch;
    uint64_t kv_per_token, index_per_token;
} eng_memory;

/* At most so much index for each token of a context; n_layer: of those that retrieve. */
uint64_t eng_index_bytes_per_token(uint32_t n_layer, uint32_t n_head_kv);

/* Memory that this process may fill: the machine's, or the least of its control groups' limits. root: "", or a test's folder that holds
 * proc/self/cgroup and sys/fs/cgroup. */
uint64_t eng_memory_limit(const char *root);

bool eng_memory_huge_pages(const char *root); /* whether the system gives transparent huge pages to those who ask */

/* 0, or -ENOMEM with what is missing and the largest context that fits in `limit`. */
int eng_memory_check(const eng_memory *m, uint32_t n_ctx, uint64_t limit, char *err, size_t errlen);

#endif
