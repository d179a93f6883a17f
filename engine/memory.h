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
    uint64_t build, build_per_token; /* until the index is built: sampled queries, and what builds take for themselves */
} eng_memory;

/* At most so much index stays beside the keys and values of a token: codes, what of ENG_WANT_... is built, and then the few queries that are kept for a merge. */
uint64_t eng_index_bytes_per_token(const eng_kv_shape *shape, unsigned wants);

/* Fills in the parts of an index with what is wanted, which so many threads build. */
void eng_memory_of_index(eng_memory *m, const eng_kv_shape *shape, unsigned wants, uint32_t n_threads);


/* Memory that this process may fill: the machine's, or the least of its control groups' limits. root: "", or a test's folder that holds
 * proc/self/cgroup and sys/fs/cgroup. */
uint64_t eng_memory_limit(const char *root);

bool eng_memory_huge_pages(const char *root); /* whether the system gives transparent huge pages to those who ask */

/* 0, or -ENOMEM with what is missing and the largest context that fits in `limit`. */
int eng_memory_check(const eng_memory *m, uint32_t n_ctx, uint64_t limit, char *err, size_t errlen);

#endif
