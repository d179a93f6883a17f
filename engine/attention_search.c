/* How a range of a KV head's keys is searched: by codes, lists or graph where its span is served by one as a whole (attention_auto.c), else, without the estimate, by the
 * head's graph, if there is one, or by a scan of the keys. */
#include "attention_private.h"

#include <string.h>

static idx_index *usable_graph(const eng_attn *a, const eng_span *s, uint32_t head, uint32_t visible)
{
    idx_index *ix = s->seg->index[a->layer * a->shape->n_head_kv + head];
    if (!ix || a->estimates || visible < ATTN_SKIP_MIN)
        return NULL;
    return a->policy.mode == ENG_ATTN_GRAPH || attn_auto_walks(a, visible) ? ix : NULL;
}

/* Last step's hits of the group that lie in the segment, as its rows. */
static uint32_t collect_seeds(const eng_attn *a, const eng_segment *seg, uint32_t head, uint32_t *ret)
{
    uint32_t n = 0, group = a->shape->group;
    const uint32_t *from = a->seeds + ((size_t)a->layer * a->n_head + (size_t)head * group) * ATTN_SEEDS;
    for (uint32_t i = 0; i < group * ATTN_SEEDS; i++)
        if (from[i] >= seg->start && from[i] - seg->start < seg->n)
            ret[n++] = from[i] - seg->start;
    return n;
}

/* members: NULL, or the cluster of each row. */
static void keep_hits(attn_hits *to, const idx_hits *from, uint32_t group, const uint32_t *members, bool codes)
{
    for (uint32_t g = 0; g < group; g++) {
        memcpy(to[g].ids, from[g].ids, from[g].n * sizeof *to[g].ids);
        memcpy(to[g].scores, from[g].scores, from[g].n * sizeof *to[g].scores);
        for (uint32_t i = 0; i < from[g].n && members; i++) {
            to[g].clusters[i] = members[from[g].ids[i]];
            to[g].scanned[i] = from[g].scores[i];
        }
        if (codes) {
            memcpy(to[g].clusters, from[g].clusters, from[g].n * sizeof *to[g].clusters);
            memcpy(to[g].scanned, from[g].scanned, from[g].n * sizeof *to[g].scanned);
        }
        to[g].n = from[g].n;
    }
}

/* Searches the part of a span that belongs to a range by its codes or lists, or takes the centroids' weights alone (top_k 0); q has the whole visible part. */
static int search_codes(eng_attn *a, attn_worker *w, uint32_t task, const idx_rows *keys, const idx_query *q, idx_hits **ret)
{
    uint32_t head = task / a->n_ranges, group = a->shape->group, first, end;
    const attn_range *r = &a->ranges[task % a->n_ranges];
    const idx_index *ix = attn_index_of(a, r->span, head);
    float m[1024];
    idx_codes_part(ix, q->lo, q->hi, q->budget.top_k ? r->part : 0, q->budget.top_k ? r->parts : 1, &first, &end);
    if (!a->estimates)
        return idx_codes_scan(ix, keys, q, first, end, w->search, NULL, 0, m, ret);
    a->clusters[task] = (struct attn_clusters){first, end};
    return idx_codes_scan(ix, keys, q, first, end, w->search,
                          a->weights + (size_t)head * group * a->n_clusters + a->cluster_base[r->span] + first, a->n_clusters,
                          a->m_ref + (size_t)task * group, ret);
}

static idx_query query_of(const eng_attn *a, const float *floor, uint32_t head, const attn_range *r, uint32_t lo, uint32_t hi, uint32_t *seeds, bool graph)
{
    const eng_kv_shape *shape = a->shape;
    const eng_segment *seg = a->view->spans[r->span].seg;
    uint32_t group = shape->group;
    return (idx_query){
        .q = a->query + (size_t)head * group * shape->head_dim,
        .floor = floor,
        .seeds = seeds,
        .n_seeds = graph ? collect_seeds(a, seg, head, seeds) : 0,
        .group = group,
        .lo = lo - seg->start,
        .hi = hi - seg->start,
        .scale = 1, /* queries come scaled */
        .budget = {a->k_cap < hi - lo ? a->k_cap : hi - lo, a->policy.top_k ? 0 : a->policy.beta},
    };
}

void attn_search_task(eng_attn *a, uint32_t head, uint32_t range, uint32_t worker)
{
    const eng_kv_shape *shape = a->shape;
    attn_worker *w = &a->workers[worker];
    uint32_t task = head * a->n_ranges + range;
    uint32_t group = shape->group, item = a->layer * shape->n_head_kv + head, span_lo, span_hi;
    const attn_range *r = &a->ranges[range];
    const eng_span *span = &a->view->spans[r->span];
    eng_segment *seg = span->seg;
    attn_hits *hits = &a->hits[(size_t)task * group];

    for (uint32_t g = 0; g < group; g++)
        hits[g].n = 0;
    a->searched[task] = ATTN_NOT;
    a->probed[task] = 0;
    attn_visible(a, span, &span_lo, &span_hi);
    uint32_t lo = r->lo > span_lo ? r->lo : span_lo, hi = r->hi < span_hi ? r->hi : span_hi;
    uint8_t how = a->served[r->span];
    if (a->estimates && !how)
        return; /* read densely */
    idx_index *graph = how == ATTN_GRAPH ? seg->index[item] : !how && span_hi > span_lo ? usable_graph(a, span, head, span_hi - span_lo) : NULL;
    if (graph && !r->first)
        return;
    if (graph || how) {
        lo = span_lo;
        hi = span_hi;
    }
    if (lo >= hi)
        return;
    idx_rows keys = {eng_segment_k(seg, a->layer, head, 0), shape->row_k, seg->n, shape->head_dim, (idx_type)shape->type_k};
    idx_query q = query_of(a, w->floor, head, r, lo, hi, a->local_seeds + (size_t)worker * group * ATTN_SEEDS, graph != NULL);
    idx_hits *found;
    bool codes = how && !graph;
    if ((codes ? search_codes(a, w, task, &keys, &q, &found) : idx_search(graph, &keys, &q, w->search, &found, NULL)) < 0)
        return; /* only for shapes that setup did not plan: never */
    keep_hits(hits, found, group, how == ATTN_GRAPH ? seg->members[item] : NULL, codes);
    a->probed[task] = idx_visited(w->search);
    a->searched[task] = how ? how : graph ? ATTN_GRAPH : ATTN_SCAN;
    q.budget.top_k = 0;
    if (how == ATTN_GRAPH)
        search_codes(a, w, task, &keys, &q, &found); /* the centroids' weights */
}
