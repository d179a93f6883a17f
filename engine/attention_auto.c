/* What serves a span, and what `auto` does: by the cost model (cost.h) the cheaper of two ways that are both right.
 * - With the estimate: a segment's codes are scanned, or all its keys are read, which is exact. So auto is never slower than `full`, and a short context is full attention.
 * - Without it: codes, or the graph once all of the segment's are there. */
#include "attention_private.h"

static eng_cost_head head_of(const eng_attn *a)
{
    return (eng_cost_head){a->shape->head_dim, a->shape->group, (uint32_t)(a->shape->row_k + a->shape->row_v)};
}

void eng_attn_use_cost(eng_attn *a, const eng_cost *c)
{
    a->cost = *c;
}

/* A budget holds over all spans together, so a span has a share of the hits, by its keys. */
static uint32_t hits_among(const eng_attn *a, uint32_t visible)
{
    uint32_t all = a->step.retrieve_hi - a->step.retrieve_lo;
    return (uint32_t)((uint64_t)eng_cost_hits(&a->policy, all) * visible / all);
}

bool attn_auto_scans(const eng_attn *a, uint32_t visible)
{
    eng_cost_head h = head_of(a);
    return eng_cost_scan(&a->cost, &h, visible, hits_among(a, visible)) < eng_cost_dense(&a->cost, &h, visible);
}

static bool walks(const eng_attn *a, const eng_attention *policy, uint32_t n)
{
    eng_cost_head h = head_of(a);
    uint32_t hits = eng_cost_hits(policy, n), spare = policy->top_k ? ATTN_SPARE : 0;
    return policy->mode == ENG_ATTN_AUTO && !policy->estimate && eng_cost_graph(&a->cost, &h, n, hits) < eng_cost_scan(&a->cost, &h, n, hits + spare);
}

bool attn_auto_walks(const eng_attn *a, uint32_t visible)
{
    return walks(a, &a->policy, visible);
}

unsigned eng_attn_wants(const eng_attn *a, const eng_attention *policy, uint32_t max_keys)
{
    switch (policy->mode) {
    case ENG_ATTN_CLUSTER:
        return ENG_WANT_CLUSTER;
    case ENG_ATTN_IVF:
        return ENG_WANT_IVF;
    case ENG_ATTN_GRAPH:
        return policy->estimate ? ENG_WANT_GRAPH | ENG_WANT_CLUSTER : ENG_WANT_GRAPH;
    default:
        return walks(a, policy, max_keys) ? ENG_WANT_GRAPH : 0;
    }
}

uint8_t attn_serves(const eng_attn *a, const eng_span *s, uint32_t visible)
{
    /* Fewer: with the estimate not worth the scan of a whole run of codes; without, a scan of the keys is as fast (index/README.md), and exact. */
    const uint32_t codes_min = a->estimates ? 512 : a->shape->head_dim < 128 ? 4096 : 3072;
    eng_attn_mode mode = a->policy.mode;
    if (visible >= ATTN_SKIP_MIN && mode == ENG_ATTN_CLUSTER && eng_segment_has(s->seg, s->seg->cluster))
        return ATTN_CLUSTER;
    if (visible >= ATTN_SKIP_MIN && mode == ENG_ATTN_IVF && eng_segment_has(s->seg, s->seg->ivf))
        return ATTN_IVF;
    if (visible >= ATTN_SKIP_MIN && mode == ENG_ATTN_GRAPH && a->estimates && eng_segment_estimates_graphs(s->seg))
        return ATTN_GRAPH;
    if (visible < codes_min || (mode == ENG_ATTN_GRAPH && !a->estimates) || !eng_segment_coded(s->seg))
        return ATTN_NOT;
    if (mode != ENG_ATTN_AUTO)
        return ATTN_CODES;
    if (a->estimates)
        return attn_auto_scans(a, visible) ? ATTN_CODES : ATTN_NOT;
    return attn_auto_walks(a, visible) && eng_segment_has(s->seg, s->seg->index) ? ATTN_NOT : ATTN_CODES;
}
