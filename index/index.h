/* index/: vector search over the keys of one KV head.
 *
 * A library of its own: it knows no model, no thread pool and no file. It answers one question, for the whole query group that shares the head: which keys
 * have the largest inner product with each query of the group?
 *
 *   flat   a scan of all keys, batched over the group. Without an index it reads the keys and is exact. With one ("codes") it reads an int8 code of every key, scores
 *          the best again from the keys, and knows every key's softmax weight, so that what is not retrieved can be estimated (codes_build.c).
 *   graph  links from keys to keys that the same prefill queries hit, as RoarGraph (VLDB 2024, section 4) projects them, one graph for the group, as in RetrievalAttention
 *          (arXiv 2409.10516, section 3.2) and AlayaDB; but a node is 16 successive keys, and links have weights. Where else we deviate stands in README.md.
 *   lists  codes in the order of clusters of keys, of which a search scans only those that may hold hits (lists_build.c, lists_search.c). cluster: k-means
 *          in the queries' metric; each head scans as far as a measured margin says. ivf: plain k-means and a fixed share, as the paper's baseline.
 *
 * Threads: an idx_index is immutable and may be searched by any number of threads, each with its own idx_scratch. An idx_builder belongs to one thread at a time.
 * Nothing here takes a lock, starts a thread or, once a scratch exists, allocates during a search.
 * Scores are scale * (q . k), in float32, computed from the keys as stored. Errors are -errno.
 */
#ifndef RETRIEVALD_INDEX_H
#define RETRIEVALD_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Instruction sets, in rising order; each includes the ones before it. */
typedef enum { IDX_CPU_SCALAR, IDX_CPU_AVX2, IDX_CPU_AVX512, IDX_CPU_AMX } idx_cpu;

/* Best level of this machine. avx2 means AVX2 + FMA + F16C; avx512 means F, BW, DQ, VL and VNNI; amx adds AMX's int8. */
idx_cpu idx_cpu_detect(void);

/* Chooses the distance kernels for the process; call once before any other use. Levels above the machine's are lowered to it. */
void idx_cpu_set(idx_cpu level);

typedef enum { IDX_F32, IDX_F16, IDX_BF16, IDX_Q8_0 } idx_type; /* q8_0: blocks of an f16 scale and 32 int8, beyond dim zeros */
typedef enum { IDX_FLAT, IDX_GRAPH, IDX_CLUSTER, IDX_IVF } idx_kind;

/* n rows of dim elements, `stride` bytes apart. Borrowed: the caller keeps them alive and unchanged. */
typedef struct {
    const void *data;
    size_t stride;
    uint32_t n, dim;
    idx_type type;
} idx_rows;

/* m training positions, each with `group` queries: q is f16 [m][group][dim]. pos[i] is the row number of the newest key that query i may see (it may be
 * >= n: then it sees all). Rising order. Borrowed until the builder is finished. */
typedef struct {
    const uint16_t *q;
    const uint32_t *pos;
    uint32_t m, group;
} idx_queries;

/* ---- build ---------------------------------------------------------------------------------------------------- */

typedef struct {
    uint32_t knn;    /* nearest keys of a training query (N_q) */
    uint32_t degree; /* links kept of a node (M) */
} idx_graph_params;

idx_graph_params idx_graph_params_default(void);

typedef struct idx_index idx_index;
typedef struct idx_builder idx_builder;

/* Starts a graph build over all of `keys`. O(n) memory for scratch. -EINVAL for nonsense shapes, -ENOMEM. */
int idx_builder_new(const idx_rows *keys, const idx_queries *train, const idx_graph_params *params, idx_builder **ret);

/* Starts a build of codes of 8 bits, or 4 to compare, over keys [n][dim] and the values [n][dim] that belong to them. query_power [dim]: how large queries are in each dimension, squared, in any
 * unit, or NULL: alike in all; borrowed, and read when all rows are there. memory: NULL, or where the index shall lie, 64-byte aligned, idx_max_bytes() that outlive it. Errors as above. */
int idx_builder_new_codes(const idx_rows *keys, const idx_rows *values, const float *query_power, uint32_t bits, void *memory, idx_builder **ret);
size_t idx_max_bytes(idx_kind kind, uint32_t n, uint32_t dim); /* of an index (a graph with default parameters), at most; 0: no such index */
void idx_query_power(const idx_queries *q, uint32_t dim, float *ret); /* [dim]: mean squares; 0: no queries */

/* The same in the order of clusters of keys: lists (IDX_CLUSTER, IDX_IVF). A key that isn't finite ends the build with -EINVAL. */
int idx_builder_new_lists(idx_kind kind, const idx_rows *keys, const idx_rows *values, const idx_queries *train, idx_builder **ret);

/* Only [0, rows) can be read so far: the rest of what is indexed is on its way. Codes are then built as far as that goes, nearly all of a run's in one; other kinds need all.
 * idx_builder_needs: how many must be there for the build to go on. */
void idx_builder_rows(idx_builder *b, uint32_t rows);
uint32_t idx_builder_needs(const idx_builder *b);

/* Goes on building until done or until CLOCK_MONOTONIC passes deadline_ns (checked every millisecond or so, but for a few steps of some 10 ms at 256K keys; 0 = no limit).
 * 2: rows are missing, 1: call again, 0: done, < 0: failed. The result does not depend on how the work was cut, nor on when rows came. */
int idx_builder_step(idx_builder *b, uint64_t deadline_ns);
float idx_builder_progress(const idx_builder *b); /* share of the work done so far, 0..1 */
int idx_builder_finish(idx_builder *b, idx_index **ret); /* takes the finished index out of a builder whose step returned 0 */
void idx_builder_free(idx_builder *b); /* NULL and half-built are fine */
void idx_free(idx_index *ix);

/* An index is one relocatable block of bytes without pointers; these are what a segment file stores. */
const void *idx_arena(const idx_index *ix, size_t *ret_bytes);

/* Validates such a block (magic, version, sizes, every id, degree and number that must be finite) against n keys of `dim`
 * and copies it into an index; memory: as above, or where it lies already: no copy then. -EBADMSG with a reason in err. */
int idx_load(const void *arena, size_t bytes, uint32_t n, uint32_t dim, void *memory, idx_index **ret, char *err, size_t errlen);

/* The same checks on an index at hand. */
int idx_check(const idx_index *ix, char *err, size_t errlen);

idx_kind idx_kind_of(const idx_index *ix);

/* ---- search --------------------------------------------------------------------------------------------------- */

/* What to return for each query head. beta <= 0: the top_k best. beta > 0 (dynamic): every key whose score is at least
 * (best score known, including `floor` of the query) - beta, at most top_k of them, the best ones. */
typedef struct {
    uint32_t top_k;
    float beta;
} idx_budget;

typedef struct {
    const float *q;         /* [group][dim] */
    const float *floor;     /* [group] best score each head has already found elsewhere (the window), or NULL */
    const uint32_t *seeds;  /* rows where hits are likely (last step's), may be NULL; out-of-range ones are ignored */
    uint32_t n_seeds, group;
    uint32_t lo, hi;        /* only rows [lo, hi) exist for this search */
    float scale;
    idx_budget budget;
} idx_query;

/* Hits of one query head: no row twice, none outside [lo, hi), in no particular order. */
typedef struct {
    uint32_t *ids;
    float *scores;
    uint32_t n;
    /* idx_codes_scan() only: */
    uint32_t *clusters; /* the value cluster of each */
    float *scanned;     /* its score by its code */
} idx_hits;

/* Scratch for searches of at most max_n rows, max_group heads, max_k hits a head. Owns the hit arrays a search fills. */
typedef struct idx_scratch idx_scratch;
int idx_scratch_new(uint32_t max_n, uint32_t max_dim, uint32_t max_group, uint32_t max_k, idx_scratch **ret);
void idx_scratch_free(idx_scratch *s);

/* Searches keys with `ix` (NULL: flat scan). *ret_hits is [group], owned by the scratch, valid until its next search. *ret_visited (may be NULL) is the
 * number of keys whose score was computed. -EINVAL when the query exceeds the scratch. */
int idx_search(const idx_index *ix, const idx_rows *keys, const idx_query *q, idx_scratch *s, idx_hits **ret_hits, uint32_t *ret_visited);
uint32_t idx_visited(const idx_scratch *s); /* by the last search or scan */

/* ---- codes: scan and estimate ----------------------------------------------------------------------------------
 * Rows are grouped into runs of successive rows, and a run's rows into clusters of like values, numbered through all runs; codes lie in this order.
 * A scan of some clusters gives hits and, per cluster, the summed weight exp(score - m) of its rows in [lo, hi), each row's by its code. Once it is decided
 * which hits are retrieved, idx_estimate() takes these out again. The rest of a cluster is then taken to have its mean value:
 *
 *   sum over rows not retrieved of exp(s - m) v  ~  sum over clusters of coef[c] * (sum of the values of its rows in [lo, hi))
 *                                                   - sum over retrieved rows of hit_coef[i] * v[i]
 *
 * Where a run lies partly outside [lo, hi), the sums of its clusters are those of an idx_cut, which the caller keeps as long as lo and hi last. */

uint32_t idx_codes_max_clusters(uint32_t n);                                         /* of an index of n rows */
uint32_t idx_codes_runs(uint32_t n);                                                 /* number of its runs */
void idx_codes_run_rows(uint32_t n, uint32_t run, uint32_t *ret_lo, uint32_t *ret_hi); /* a run's rows */
uint32_t idx_codes_run_of(uint32_t n, uint32_t row);

/* The clusters of part `part` of `parts`, of about equal numbers of rows, of the runs that hold rows [lo, hi), lo < hi. */
void idx_codes_part(const idx_index *ix, uint32_t lo, uint32_t hi, uint32_t part, uint32_t parts, uint32_t *ret_first, uint32_t *ret_end);
void idx_codes_members(const idx_index *ix, uint32_t *ret); /* [n]: the cluster of each row */

enum { IDX_PART_SLACK = 256 }; /* rows that a part may have beyond its equal share */

/* Of flat, cluster or ivf: as idx_search() over the rows of clusters [first, end) that lie in [lo, hi); with weights, scores of hits that are neither near the best one nor near the
 * edge of the budget are those of their codes. Of each head h: *weights (NULL: not wanted) [h * ld + c - first], and
 * ret_m[h], which is no less than its floor; where no row has a score, the weights are 0 and ret_m[h] may be -INFINITY. */
int idx_codes_scan(const idx_index *ix, const idx_rows *keys, const idx_query *q, uint32_t first, uint32_t end, idx_scratch *s, float *weights, size_t ld, float *ret_m, idx_hits **ret_hits);

/* Sums and counts of a run's clusters over its rows in [lo, hi). */
typedef struct {
    uint32_t run, lo, hi;
    float *sums;      /* [idx_codes_max_clusters(rows of the run)][idx_codes_sum_stride(dim)] */
    uint32_t *counts;
} idx_cut;

uint32_t idx_codes_sum_stride(uint32_t dim);
int idx_codes_cut(const idx_index *ix, const idx_rows *values, idx_cut *cut); /* fills sums and counts for run, lo, hi. -EINVAL */

/* Takes the hits [n_hits] (clusters, scanned as the scan gave them) out of the weights of clusters [first, end) and turns these, in place, into coef, and
 * gives each hit's hit_coef; both, and the sum of weights returned, times `factor`. cuts: those of runs that lie partly in [lo, hi). m: as the scan gave
 * it. taken: [end - first], zero before and after. */
float idx_estimate(const idx_index *ix, const idx_cut *cuts, uint32_t n_cuts, uint32_t first, uint32_t end, float m, float factor, float *weights,
                   const uint32_t *clusters, const float *scanned, uint32_t n_hits, uint32_t *taken, float *ret_hit_coef);

/* The next stretch of clusters from `first` on, not beyond `end`, whose value sums ([idx_codes_sum_stride(dim)] floats) lie together; returns its end. */
uint32_t idx_codes_sums(const idx_index *ix, const idx_cut *cuts, uint32_t n_cuts, uint32_t first, uint32_t end, const float **ret_sums);

/* Reorders (ids, scores) so that the k largest scores stand first, and returns min(k, n). Ties go to the smaller id. */
uint32_t idx_select(uint32_t *ids, float *scores, uint32_t n, uint32_t k);
float idx_kth_best(const float *x, uint32_t n, uint32_t k, float *tmp); /* the k-th largest, 1 <= k <= n, of numbers. tmp: [2 * (n + 16)] */

#ifdef __cplusplus
}
#endif
#endif
