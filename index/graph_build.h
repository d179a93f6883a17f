/* The builder's state, shared by the files that do its phases. Every phase function does one bounded piece of work, a fraction of a
 * millisecond, and returns true once its phase is complete; `at` and `sub` are its cursors. */
#ifndef IDX_GRAPH_BUILD_H
#define IDX_GRAPH_BUILD_H

#include "private.h"

enum { IDX_MAX_KNN = 4096, IDX_TUNE_K = 100, IDX_TUNE_TRIALS = 6 };

/* Lists of numbers with a common stride. */
typedef struct {
    uint32_t *ids, *count; /* [n][stride], [n] */
    uint32_t stride;
} idx_lists;

/* Lists of differing length, one after another. */
typedef struct {
    uint32_t *first, *ids; /* [n + 2], [first[n]] */
} idx_runs;

/* One phase of a build. share: of the build time, measured at 8K keys, for the progress bar. */
typedef struct {
    bool (*step)(idx_builder *b);
    float share;
} idx_phase;

struct idx_builder {
    const idx_phase *phases;
    int n_phases;
    struct idx_codes_build *codes; /* codes_build.c: NULL for a graph */
    struct idx_lists_build *lists; /* lists_build.c: NULL for others */
    idx_rows keys;
    idx_queries train;
    idx_graph_params params;
    const idx_kernels *k;
    uint32_t dim_pad, n_queries; /* train.m * train.group */
    int phase, error;
    uint32_t there; /* rows that can be read */
    uint64_t at;
    uint32_t sub;

    /* graph_space.c: the space keys are clustered in */
    double *gram, *mean; /* [dim][dim], [dim] */
    float *basis;        /* [dim][dim_pad] */
    float *space;        /* [n][dim_pad] */

    /* graph_knn.c */
    idx_lists hits;       /* per training query: the nodes that hold its best `knn` keys */
    idx_runs queries;     /* per node: the queries that have hits in it */
    idx_scratch *scratch; /* of a training position; NULL: there is none */

    /* graph_link.c */
    double noise; /* squared rounding errors of a dimension, summed over keys */
    uint32_t *count, *met; /* [n_nodes + 16]: queries that met a node; nodes met */
    float *met_count;      /* [n_nodes + 16] */

    /* graph_tune.c */
    uint32_t n_tune;     /* training positions kept for measuring */
    uint32_t *tune_hits; /* [n_tune][group][1 + TUNE_K]: their exact hits: how many, the best first */
    struct idx_tune_head *tune; /* [group] */

    /* scratch */
    float *q, *rows, *scores, *tmp;
    idx_index *result;
};

/* codes_build.c. The new builder's phases are not set; its clusters are those of the values, or else of `points`; a graph has none, and no values. */
int idx_codes_build_new(idx_kind kind, const idx_rows *keys, const idx_rows *values, void *memory, idx_builder **ret);
void idx_codes_build_points(idx_builder *b, const idx_rows *points);
int idx_codes_build_queries(idx_builder *b, const float *power); /* as query_power in index.h */
void idx_codes_build_free(struct idx_codes_build *c);
bool idx_codes_mean(idx_builder *b);
const float *idx_codes_mean_of(const idx_builder *b); /* [dim_pad], after idx_codes_mean() */
const float *idx_codes_unit_of(const idx_builder *b);
bool idx_codes_cluster(idx_builder *b);
bool idx_codes_emit(idx_builder *b);
uint32_t idx_codes_needs(const idx_builder *b); /* rows, while idx_codes_cluster is at work */
void idx_codes_rest(idx_builder *b);            /* and nothing more can be done for now */
/* v: a key less the mean, padded with zeros; codes: its first four bytes in its block. Returns its scale, NaN if v isn't finite. */
float idx_codes_encode(const idx_builder *b, float *v, uint32_t quads, uint8_t *codes);
/* codes_narrow.c: the same in four bits, of v in units; *ret_error: the sum of its squared errors. */
float idx_narrow_encode(const float *v, uint32_t dim, uint8_t *codes, double *ret_error);

/* lists_build.c */
void idx_lists_build_free(struct idx_lists_build *l);

/* graph_build.c: q, rows, scores, tmp for the builder's keys and training queries. */
int idx_build_scratch(idx_builder *b);
/* The exact hits of a query without beta, as idx_search() has them, some thousand keys a step: true once they are there. sub: keys of [lo, hi) scanned; s is for this search alone until then. */
bool idx_build_search(idx_builder *b, idx_scratch *s, const idx_query *q, idx_hits **ret);
bool idx_train_fits(const idx_queries *train);

/* graph_space.c */
int idx_space_new(idx_builder *b);
bool idx_space_gram(idx_builder *b);
bool idx_space_mean(idx_builder *b);
bool idx_space_basis(idx_builder *b);
bool idx_space_rows(idx_builder *b);

/* graph_knn.c */
/* The rows that a training query says something about to a search: those it could see, but, where there are enough, not the first and the newest of them. */
void idx_train_range(const idx_builder *b, uint32_t position, uint32_t *ret_lo, uint32_t *ret_hi);
int idx_knn_new(idx_builder *b);
bool idx_knn_search(idx_builder *b);
bool idx_knn_invert(idx_builder *b);

/* graph_link.c */
int idx_link_new(idx_builder *b);
bool idx_link(idx_builder *b);

/* graph_tune.c */
int idx_tune_new(idx_builder *b);
bool idx_tune_truth(idx_builder *b);
bool idx_tune(idx_builder *b);
/* Whether a training position is kept for measuring, and then its number. */
bool idx_tune_owns(const idx_builder *b, uint32_t position, uint32_t *ret);

#endif
