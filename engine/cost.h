/* What the ways of attending cost on the machine at hand: the model by which `auto` chooses. Public, beside engine.h.
 *
 * A few constants, in nanoseconds of all threads together; `retrievald bench index --fit` measures them. A choice near the point where two ways cost the same may go
 * wrong by what the model is off by, and costs no more than that.
 */
#ifndef RETRIEVALD_COST_H
#define RETRIEVALD_COST_H

#include "engine.h"

typedef struct {
    double dense_byte, dense_op;                       /* reading a key and its value for the whole group: a byte; a dimension and query head */
    double scan_search, scan_head;                     /* a search, also of a graph: as such; a query head */
    double scan_dim, scan_key;                         /* of each code a scan reads, a dimension; a query head (its score, its weight) */
    double hit_dim;                                    /* a key retrieved for a query head: a dimension */
    double visit_dim;                                  /* a key that a graph search scores for the group: a dimension */
} eng_cost;

/* What is fixed for a KV head of a model. */
typedef struct {
    uint32_t dim, group, key_bytes; /* of a key and its value */
} eng_cost_head;

eng_cost eng_cost_default(void); /* of a two-core AVX-512 machine */

/* Nanoseconds for one KV head and layer over n keys, of which `hits` are retrieved for each query head. */
double eng_cost_dense(const eng_cost *c, const eng_cost_head *h, uint32_t n);
double eng_cost_scan(const eng_cost *c, const eng_cost_head *h, uint32_t n, uint32_t hits);
double eng_cost_graph(const eng_cost *c, const eng_cost_head *h, uint32_t n, uint32_t hits);

/* Hits to expect of a budget over n keys: all of top_k, about half of what a dynamic one may take and no more than every sixteenth key. */
uint32_t eng_cost_hits(const eng_attention *a, uint32_t n);

/* Measures them in some seconds, with a thread per physical core. *ret_cpu: the kernels' name, as in eng_info. log (may be NULL) gets a line for each shape: the times, and what auto
 * loses to the better of the two. -errno with a sentence. */
int eng_cost_fit(eng_cpu cpu, void (*log)(const char *line), eng_cost *ret, const char **ret_cpu, char *err, size_t errlen);

/* The file: lines "name = number" and the level of the kernels, without which the numbers mean nothing. Writing replaces it at once; reading checks every byte. -ENOENT: there is
 * none; -ESTALE: of another level; else -errno, each with a sentence. */
int eng_cost_write(const char *path, const char *cpu, const eng_cost *c, char *err, size_t errlen);
int eng_cost_read(const char *path, const char *cpu, eng_cost *ret, char *err, size_t errlen);

/* From the next session on. The engine thread's. */
void eng_cost_use(eng_engine *e, const eng_cost *c);

#endif
