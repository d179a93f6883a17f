/* What `auto` does: by the cost model (cost.h) the cheaper of two ways that are both right.
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

bool attn_auto_scans(const eng_attn *a, uint32_t visible)
{
    eng_cost_head h = head_of(a);
    return eng_cost_scan(&a->cost, &h, visible, eng_cost_hits(&a->policy, visible)) < eng_cost_dense(&a->cost, &h, visible);
}

static bool walks(const eng_attn *a, const eng_attention *policy, uint32_t n)
{
    eng_cost_head h = head_of(a);
    uint32_t hits = eng_cost_hits(policy, n);
    return policy->mode == ENG_ATTN_AUTO && !policy->estimate && eng_cost_graph(&a->cost, &h, n, hits) < eng_cost_scan(&a->cost, &h, n, hits);
}

bool attn_auto_walks(const eng_attn *a, uint32_t visible)
{
    return walks(a, &a->policy, visible);
}

bool eng_attn_walks(const eng_attn *a, const eng_attention *policy, uint32_t max_keys)
{
    return policy->mode == ENG_ATTN_GRAPH || walks(a, policy, max_keys);
}

bool attn_codes_serve(const eng_attn *a, const eng_span *s, uint32_t visible)
{
    enum { CODES_MIN = 512 }; /* fewer: not worth the scan of a whole run of codes */
    if (visible < CODES_MIN || a->policy.mode == ENG_ATTN_GRAPH || !eng_segment_coded(s->seg))
        return false;
    if (a->policy.mode != ENG_ATTN_AUTO)
        return true;
    if (a->estimates)
        return attn_auto_scans(a, visible);
    if (!attn_auto_walks(a, visible))
        return true;
    for (uint32_t i = 0; i < a->shape->n_layer * a->shape->n_head_kv; i++)
        if (!s->seg->index[i] && !eng_kv_window(a->shape, i / a->shape->n_head_kv))
            return true;
    return false;
}
