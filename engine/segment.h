/* KV memory: segments, and a session's view of a chain of them.
 *
 * A segment is a run of tokens [start, start + n) with the keys and values of every layer and KV head, and in time an index over the keys
 * of each. One arena holds, per layer and KV head, K [cap][row_k] then V [cap][row_v], each block 64-byte aligned. A segment hangs below
 * the one that holds the tokens before it (`parent`, cut at `start`), so contexts share prefixes.
 *
 * While a session fills it, a segment is that session's own; once sealed it never changes, but for indexes that become ready.
 * Threads: the engine thread alone touches reference counts; pool workers read rows and store indexes of their own (layer, head).
 */
#ifndef RETRIEVALD_SEGMENT_H
#define RETRIEVALD_SEGMENT_H

#include "engine.h"
#include "index.h"
#include "mapping.h"

typedef struct {
    uint32_t n_layer, n_head_kv, group, head_dim;
    eng_kv_type type_k, type_v;
    size_t row_k, row_v;    /* bytes of a row */
    const uint32_t *window; /* [n_layer] keys a query of the layer sees; 0: all. NULL: all layers see all. What slides is never retrieved from */
} eng_kv_shape;

static inline uint32_t eng_kv_window(const eng_kv_shape *s, uint32_t layer)
{
    return s->window ? s->window[layer] : 0;
}

/* Bytes of a row of d elements. q8_0: blocks of 32 as in a model's file, an f16 scale and 32 codes; beyond d the codes of the last one are 0. */
size_t eng_kv_row_bytes(eng_kv_type t, uint32_t d);
size_t eng_kv_bytes_per_token(const eng_kv_shape *s);

/* What a segment file is called and known by (segment_file.h). */
typedef struct {
    uint8_t b[16];
} eng_segment_id;

/* What beside codes is built for a segment: bits, for its `wants`. */
enum { ENG_WANT_GRAPH = 1, ENG_WANT_CLUSTER = 2, ENG_WANT_IVF = 4 };

typedef struct eng_segment eng_segment;
struct eng_segment {
    const eng_kv_shape *shape;
    eng_segment *parent;        /* NULL: start is 0. Holds a reference */
    uint32_t refs;
    uint32_t start, n, cap;
    uint64_t tenant;            /* whose; that of its parent (engine.h) */
    bool exact;                 /* every row comes from the prefill kernels (design section 4, "What is exact") */
    int32_t *ids;               /* [cap] */
    uint8_t *kv;                /* arena */
    eng_mapping *map;           /* a file's, which kv lies in; NULL: kv is memory */
    size_t kv_bytes;
    size_t head_bytes;          /* of one (layer, head): K block + V block */
    size_t v_offset;            /* of the V block in it */

    /* Sampled prefill queries, f16 [layer][head][m_cap][group][head_dim], and the row each may see up to. When the indexes are built, few of them stay, for those of a
     * segment that this one is merged into: [layer that retrieves][head][m][group], each head_dim codes (i8) and their scale (f16). */
    uint16_t *queries;
    uint8_t *kept;
    uint32_t *query_row;
    uint32_t m, m_cap;

    float *query_squares;       /* [layer][head][head_dim]: sums over some of its queries, all of a group: how large they are in each dimension (index.h) */

    idx_index **index;          /* graphs, [layer * n_head_kv + head]; NULL entries: not (yet) built */
    idx_index **codes, **cluster, **ivf; /* likewise */
    uint32_t **members;         /* likewise, [n] of each: the clusters of a graph's rows, for the estimate; owned */
    unsigned wants;             /* which of these are to be built from the sampled queries */
    uint32_t n_codes;           /* of these that are there */
    uint8_t *code_memory;       /* [layer * n_head_kv + head][code_stride], what codes lie in; NULL: in memory of their own */
    size_t code_stride;
    size_t index_bytes;

    struct eng_segment_load *load; /* what is still being read of it (segment_file.h); NULL: nothing */
    bool indexing;              /* one of the references is index_work.c's */
    bool has_id;                /* it was queued for a file, or read from one */
    bool half_saved;            /* that file lacks what was still being built */
    eng_segment_id id;
    eng_segment_id *replaces;   /* [n_replaces] files that its own stands for once it is there; owned */
    uint32_t n_replaces;

    /* context_cache.c */
    bool cached;
    int64_t match;              /* scratch of a lookup: tokens of the prompt that agree up to this segment's end; -1: none here */
    uint64_t last_used, worth;  /* worth.h */
    bool guest;
    uint32_t number;            /* in the cache, while room is made */
};

/* Room for `cap` tokens from `start`; takes a reference to parent. The caller holds the one reference to the result. -ENOMEM. */
int eng_segment_new(const eng_kv_shape *shape, eng_segment *parent, uint32_t start, uint32_t cap, bool exact, eng_segment **ret);
/* The same with keys and values in a file, at kv_bytes from a place in it: to be read only. Takes the mapping, also when it fails. */
int eng_segment_new_mapped(const eng_kv_shape *shape, eng_segment *parent, uint32_t start, uint32_t n, bool exact, eng_mapping *map, eng_segment **ret);
eng_segment *eng_segment_ref(eng_segment *s);
void eng_segment_unref(eng_segment *s); /* NULL is fine */

/* Whether every head that is retrieved from has codes. */
static inline bool eng_segment_coded(const eng_segment *s)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->shape->n_layer; i++)
        n += eng_kv_window(s->shape, i) ? 0 : s->shape->n_head_kv;
    return s->n_codes == n;
}

/* Whether every head that is retrieved from has one of `all`: index, cluster or ivf. */
bool eng_segment_has(const eng_segment *s, idx_index *const *all);
/* Whether every graph can be searched with an estimate: by the centroids of cluster. */
bool eng_segment_estimates_graphs(const eng_segment *s);

/* Notes which of its clusters a (layer, head)'s rows are of. False: there is no memory for that, and so no estimate by graph. */
bool eng_segment_note_members(eng_segment *s, uint32_t item);

/* Memory it takes, all parts. */
size_t eng_segment_bytes(const eng_segment *s);
size_t eng_segment_bytes_for(const eng_kv_shape *shape, uint32_t cap); /* of a new one */
size_t eng_segment_kv_bytes(const eng_kv_shape *shape, uint32_t cap);  /* of it, keys and values */

/* Memory for the codes of a segment, `stride` bytes for each head, unless there is some. Without it, if there is no room, each index takes its own. */
void eng_segment_alloc_codes(eng_segment *s, size_t stride);
void eng_segment_free_codes(eng_segment *s); /* and the codes, of all heads */

enum {
    ENG_SAMPLED_QUERIES = 8192,   /* of a KV head, all heads of its group counted: more adds little recall (notes, section 7) */
    ENG_KEYS_PER_KEPT_QUERY = 32, /* when they have done their work */
};

/* Room for m_cap sampled query positions. */
int eng_segment_alloc_queries(eng_segment *s, uint32_t m_cap);
void eng_segment_free_queries(eng_segment *s);
/* Keeps few of them, in 8 bits; without memory for that, none. */
void eng_segment_thin_queries(eng_segment *s);
/* Room for m kept ones, and for the rows that they see; -ENOMEM. And those of a layer that retrieves, eng_segment_kept_bytes() long. */
int eng_segment_alloc_kept(eng_segment *s, uint32_t m);
uint8_t *eng_segment_kept(const eng_segment *s, uint32_t layer, uint32_t head);
size_t eng_segment_kept_bytes(const eng_segment *s);
/* Those of position i of a layer that retrieves, as they are or as they were kept, to ret [group][head_dim]. */
void eng_segment_load_query(const eng_segment *s, uint32_t layer, uint32_t head, uint32_t i, uint16_t *ret);
static inline uint16_t *eng_segment_query(const eng_segment *s, uint32_t layer, uint32_t head, uint32_t i)
{
    size_t per = (size_t)s->shape->group * s->shape->head_dim;
    return s->queries + (((size_t)layer * s->shape->n_head_kv + head) * s->m_cap + i) * per;
}

/* Rows by number inside the segment. */
static inline uint8_t *eng_segment_k(const eng_segment *s, uint32_t layer, uint32_t head, uint32_t row)
{
    return s->kv + ((size_t)layer * s->shape->n_head_kv + head) * s->head_bytes + (size_t)row * s->shape->row_k;
}

static inline uint8_t *eng_segment_v(const eng_segment *s, uint32_t layer, uint32_t head, uint32_t row)
{
    return s->kv + ((size_t)layer * s->shape->n_head_kv + head) * s->head_bytes + s->v_offset + (size_t)row * s->shape->row_v;
}

/* Copies rows [lo, hi) of src (segment row numbers) to a new segment that fits them exactly. Sampled queries come along when lo is 0; indexes
 * stay behind. */
int eng_segment_copy(const eng_segment *src, uint32_t lo, uint32_t hi, eng_segment *parent, bool exact, eng_segment **ret);

/* Drops rows [0, n) of an unsealed segment and moves the rest to the front. */
void eng_segment_shift(eng_segment *s, uint32_t n);

/* Positions [lo, hi) live in seg, at rows pos - seg->start. */
typedef struct {
    eng_segment *seg;
    uint32_t lo, hi;
} eng_span;

/* What a session sees: spans that cover [0, n) without gaps. */
typedef struct {
    eng_span *spans;
    uint32_t n_spans, cap_spans;
} eng_view;

/* Adds a span (takes a reference). -ENOMEM. */
int eng_view_add(eng_view *v, eng_segment *seg, uint32_t lo, uint32_t hi);
/* Makes sure that the next `more` additions succeed. */
int eng_view_reserve(eng_view *v, uint32_t more);
void eng_view_done(eng_view *v);

/* Index of the span that holds position pos, which must be covered. */
uint32_t eng_view_find(const eng_view *v, uint32_t pos);

#endif
