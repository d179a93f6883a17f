/* How good and how fast the kinds of index are on one head's real keys, values and queries: what `retrievald bench index` prints. Public, beside engine.h. */
#ifndef RETRIEVALD_INDEX_BENCH_H
#define RETRIEVALD_INDEX_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Rows of f16, or f32 if so said, without gaps. */
typedef struct {
    const void *data;
    bool f32;
} eng_bench_rows;

/* One KV head as decoding finds it: keys and values [n][dim]; the group's queries at successive steps [n_steps][group][dim]; and at sampled prompt
 * positions [n_train][group][dim] (n_train 0: none). Row train_pos[i] is the newest that training query i saw; rising; NULL: at even distances. */
typedef struct {
    eng_bench_rows keys, values, queries, train;
    const uint32_t *train_pos;
    uint32_t n, dim, group, n_steps, n_train;
} eng_bench_head;

enum { ENG_BENCH_MAX_GROUP = 64, ENG_BENCH_MAX_DIM = 1024 };

typedef struct {
    const char *cpu;          /* as eng_params has it; NULL: the machine's best */
    uint32_t top_k;           /* 0: dynamic, beta and k_max */
    float beta;
    uint32_t k_max;
    uint32_t n_sink, n_local; /* the window: first and last rows, not searched */
    bool estimate;            /* searches keep what the estimate needs; off: hits only */
    uint32_t replicas;        /* copies of keys and index searched in turn, so that caches are as in decoding; fewer if memory is short */
    uint32_t rounds;          /* of timing */
} eng_bench_params;

typedef struct {
    double mean, p10, p90, min, max;
} eng_bench_spread;

typedef struct {
    const char *kind;
    double hits;                        /* a head's, mean */
    eng_bench_spread recall16, recall100; /* of the best 16 and 100 of what an exact search with this budget returns */
    double visited_head, visited_group; /* share of the keys scored for a head alone, for the group */
    eng_bench_spread mass;              /* share of the softmax weight outside the window that the hits hold */
    bool has_estimate;
    eng_bench_spread error, error_estimate; /* relative L2 distance of the output from full attention's, without and with the estimate */
    double build_s, bytes_per_key; /* CPU time */
    double us, us_min, us_max;          /* CPU time of a search for the group: median, least and most over the rounds */
    double relative;                    /* median over the rounds of the time by that of flat with int8 codes in the same round */
} eng_bench_result;

/* Measures the kinds (ends with NULL): "f16" (flat without an index), "int8", "int4" (flat with codes), "graph", "cluster", "ivf"; ret: one for each. *ret_replicas: how many there was memory for. -EINVAL, -ENOMEM, with a sentence. */
int eng_bench_index(const eng_bench_head *h, const eng_bench_params *p, const char *const *kinds, eng_bench_result *ret, uint32_t *ret_replicas, char *err,
                    size_t errlen);

#endif
