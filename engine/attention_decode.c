/* Decode attention: window and retrieved keys, each as partial softmaxes, merged exactly (arXiv 2409.10516 section 3.3), with an estimate
 * of the rest.
 *
 * With the estimate on, a segment is searched by its codes, lists or graphs once all its heads have them (else by codes); until then, and where too little of it is
 * visible, it is attended densely, which is exact.
 *
 * One pool job per layer, whose tasks wait for what they need of the earlier ones, so that nobody waits for all of them:
 * - dense, a task per KV head and block of 512 positions: (o, m, l) for the group. Blocks are cut at absolute multiples, and a block's
 *   arithmetic does not see where segments meet, so `full` gives the same bits over one segment or many.
 * - search, a task per KV head and range: hits for the group, by codes, lists, scan or graph; the dense maximum is the floor of a dynamic budget.
 * - merge, a task per query heads of a KV head: the budget over all ranges at once, attention over the hits, the estimate, then everything merged.
 */
#include "attention_private.h"
#include "trace.h"

#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum {
    RANGE_MIN = 4096,        /* keys that are worth a search task of their own */
};

/* The parts in one, of which o is `out`. */
static eng_partial join(float *out, const eng_partial *parts, uint32_t n, uint32_t d)
{
    float m = -INFINITY, l = 0;
    for (uint32_t i = 0; i < n; i++)
        if (parts[i].l > 0 && parts[i].m > m)
            m = parts[i].m;
    memset(out, 0, d * sizeof *out);
    for (uint32_t i = 0; i < n; i++) {
        if (!(parts[i].l > 0))
            continue;
        float f = expf(parts[i].m - m);
        l += f * parts[i].l;
        for (uint32_t j = 0; j < d; j++)
            out[j] += f * parts[i].o[j];
    }
    return (eng_partial){m, l, out};
}

void eng_partial_merge(float *out, const eng_partial *parts, uint32_t n, uint32_t d)
{
    float l = join(out, parts, n, d).l;
    if (l > 0)
        for (uint32_t j = 0; j < d; j++)
            out[j] /= l;
}

static bool retrieves(const eng_attn *a)
{
    return a->policy.mode != ENG_ATTN_FULL && a->policy.mode != ENG_ATTN_STREAMING;
}

/* ---- setup ------------------------------------------------------------------------------------------------------ */

void attn_decode_free(eng_attn *a)
{
    attn_estimate_free(a);
    free(a->served);
    a->served = NULL;
    free(a->ranges);
    free(a->largest_first);
    free(a->hits);
    free(a->hit_memory);
    free(a->dense_o);
    free(a->dense_m);
    free(a->dense_l);
    free(a->left);
    free(a->scaled);
    free(a->retrieved_o);
    free(a->attended);
    free(a->searched);
    free(a->probed);
    free(a->local_seeds);
    free(a->step.blocks);
    free(a->sliding.blocks);
    free(a->rest.blocks);
    free(a->seeds);
    a->ranges = NULL;
    a->largest_first = NULL;
    a->hits = NULL;
    a->hit_memory = NULL;
    a->dense_o = a->dense_m = a->dense_l = a->scaled = a->retrieved_o = NULL;
    a->left = NULL;
    a->attended = a->probed = NULL;
    a->searched = NULL;
    a->local_seeds = a->seeds = NULL;
    a->step.blocks = a->sliding.blocks = a->rest.blocks = NULL;
    a->n_ranges = 0;
    for (uint32_t i = 0; a->workers && i < a->n_workers; i++) {
        attn_worker *w = &a->workers[i];
        free(w->all);
        free(w->kth);
        free(w->lists);
        free(w->parts);
        free(w->floor);
        idx_scratch_free(w->search);
        w->all = NULL;
        w->kth = NULL;
        w->lists = NULL;
        w->parts = NULL;
        w->floor = NULL;
        w->search = NULL;
    }
}

/* Ranges in the order in which threads take them: the largest first, so that all come to an end at about the same time. */
static int order_ranges(eng_attn *a)
{
    a->largest_first = malloc(a->n_ranges * sizeof *a->largest_first + 1);
    if (!a->largest_first)
        return -ENOMEM;
    for (uint32_t i = 0; i < a->n_ranges; i++) {
        uint32_t at = i, n = a->ranges[i].hi - a->ranges[i].lo;
        for (; at > 0; at--) {
            const attn_range *before = &a->ranges[a->largest_first[at - 1]];
            if (before->hi - before->lo >= n)
                break;
            a->largest_first[at] = a->largest_first[at - 1];
        }
        a->largest_first[at] = i;
    }
    return 0;
}

/* Cuts the sealed part of the view beyond the sinks into ranges of roughly equal work. */
static int plan_ranges(eng_attn *a, const eng_view *view)
{
    uint32_t n_sealed = view->n_spans - 1, total = view->spans[n_sealed].lo;
    uint32_t size = (uint32_t)((uint64_t)total * a->shape->n_head_kv / (2 * a->n_workers)); /* each range finds hits that others make needless */
    if (size < RANGE_MIN)
        size = RANGE_MIN;
    size_t cap = (size_t)total / size + n_sealed + 1;
    a->ranges = malloc(cap * sizeof *a->ranges);
    if (!a->ranges)
        return -ENOMEM;
    for (uint32_t i = 0; i < n_sealed; i++) {
        const eng_span *s = &view->spans[i];
        uint32_t lo = s->lo > a->policy.n_sink ? s->lo : a->policy.n_sink;
        uint32_t begin = a->n_ranges;
        for (bool first = true; lo < s->hi; first = false) {
            uint32_t hi = s->hi - lo > size + size / 2 ? lo + size : s->hi;
            a->ranges[a->n_ranges] = (attn_range){.span = i, .lo = lo, .hi = hi, .first = first, .part = a->n_ranges - begin};
            a->n_ranges++;
            lo = hi;
        }
        for (uint32_t j = begin; j < a->n_ranges; j++)
            a->ranges[j].parts = a->n_ranges - begin;
        if (s->seg->n > a->max_span)
            a->max_span = s->seg->n;
    }
    return order_ranges(a);
}

/* Most hits one range can return for a head: the first of a span may answer for all of it, and codes are shared out by whole runs. */
static uint32_t range_cap(const eng_attn *a, const eng_view *view, const attn_range *r)
{
    const eng_span *s = &view->spans[r->span];
    uint32_t n = (r->first ? s->hi : r->hi) - r->lo, coded = s->seg->n / r->parts + IDX_PART_SLACK + 1;
    n = n > coded ? n : coded;
    return n < a->k_cap ? n : a->k_cap;
}

static int alloc_hits(eng_attn *a, const eng_view *view)
{
    size_t group = a->shape->group, heads = a->shape->n_head_kv, per_head = 0;
    for (uint32_t i = 0; i < a->n_ranges; i++)
        per_head += range_cap(a, view, &a->ranges[i]);
    if (!a->n_ranges)
        return 0;
    a->hits = calloc(heads * a->n_ranges * group, sizeof *a->hits);
    a->hit_memory = malloc(heads * group * per_head * 2 * (sizeof(uint32_t) + sizeof(float)));
    a->searched = malloc(heads * a->n_ranges);
    a->probed = malloc(heads * a->n_ranges * sizeof *a->probed);
    if (!a->hits || !a->hit_memory || !a->searched || !a->probed)
        return -ENOMEM;
    uint32_t *ids = a->hit_memory, *clusters = ids + heads * group * per_head;
    float *scores = (float *)(clusters + heads * group * per_head), *scanned = scores + heads * group * per_head;
    for (size_t i = 0; i < heads * a->n_ranges * group; i++) {
        uint32_t cap = range_cap(a, view, &a->ranges[i / group % a->n_ranges]);
        a->hits[i] = (attn_hits){ids, scores, 0, clusters, scanned};
        ids += cap;
        scores += cap;
        clusters += cap;
        scanned += cap;
    }
    for (uint32_t i = 0; i < a->n_workers; i++) {
        attn_worker *w = &a->workers[i];
        w->all = malloc(per_head * sizeof *w->all);
        w->kth = malloc(2 * (per_head + 16) * sizeof *w->kth);
        w->lists = malloc((size_t)a->shape->group * a->n_ranges * sizeof *w->lists);
        if (!w->all || !w->kth || !w->lists)
            return -ENOMEM;
        int r =
            idx_scratch_new(a->max_span, a->shape->head_dim, a->shape->group, a->k_cap < a->max_span ? a->k_cap : a->max_span, &w->search);
        if (r < 0)
            return r;
    }
    return 0;
}

/* Query heads of a merge task: as many of a group as may be, since they share the clusters' sums, but so that threads get equal shares. */
static uint32_t merge_heads(const eng_attn *a)
{
    enum { FAIR = 4 };
    uint32_t group = a->shape->group, n = group < ATTN_MERGE_MAX ? group : ATTN_MERGE_MAX;
    for (; n > 1; n--) {
        uint32_t tasks = a->shape->n_head_kv * ((group + n - 1) / n);
        if (tasks % a->n_workers == 0 || tasks >= FAIR * a->n_workers)
            break;
    }
    return n;
}

int eng_attn_setup(eng_attn *a, const eng_attention *policy, const eng_view *view, uint32_t max_keys, uint32_t delta_cap)
{
    size_t d = a->shape->head_dim;
    attn_decode_free(a);
    a->policy = *policy;
    a->k_cap = policy->top_k ? policy->top_k : policy->k_max;
    a->max_span = 0;
    a->merge_heads = merge_heads(a);
    a->estimates = policy->estimate && retrieves(a);
    uint32_t dense = policy->mode == ENG_ATTN_FULL ? max_keys : policy->n_sink + policy->n_local + delta_cap;
    for (uint32_t i = 0; i < a->shape->n_layer; i++) {
        uint32_t window = eng_kv_window(a->shape, i);
        window = window < max_keys ? window : max_keys;
        dense = window > dense ? window : dense;
    }
    a->max_blocks = dense / ATTN_BLOCK + 4; /* two stretches, each with a ragged block at both ends */
    if (a->estimates)
        a->max_blocks = max_keys / ATTN_BLOCK + 2 * view->n_spans + 4; /* a stretch per span that has no codes yet */
    a->max_blocks += 4; /* the rest of a layer cuts two stretches once more */
    size_t parts = (size_t)a->max_blocks * a->n_head;
    a->rest.blocks = malloc(a->max_blocks * sizeof *a->rest.blocks);
    a->step.blocks = malloc(a->max_blocks * sizeof *a->step.blocks);
    a->sliding.blocks = malloc(a->max_blocks * sizeof *a->sliding.blocks);
    a->served = calloc(view->n_spans, 1);
    a->dense_o = aligned_alloc(64, (parts * d * sizeof(float) + 63) & ~(size_t)63);
    a->dense_m = malloc(parts * sizeof(float));
    a->dense_l = malloc(parts * sizeof(float));
    a->left = malloc(a->shape->n_head_kv * sizeof *a->left);
    a->retrieved_o = aligned_alloc(64, (a->n_head * d * sizeof(float) + 63) & ~(size_t)63);
    a->scaled = malloc(a->n_head * d * sizeof(float));
    a->attended = calloc(a->n_head, sizeof *a->attended);
    size_t n_seeds = (size_t)a->shape->n_layer * a->n_head * ATTN_SEEDS;
    a->seeds = malloc(n_seeds * sizeof *a->seeds);
    a->local_seeds = malloc((size_t)a->n_workers * a->shape->group * ATTN_SEEDS * sizeof *a->local_seeds);
    if (!a->step.blocks || !a->sliding.blocks || !a->rest.blocks || !a->served || !a->dense_o || !a->dense_m || !a->dense_l || !a->left || !a->scaled || !a->retrieved_o || !a->attended || !a->seeds ||
        !a->local_seeds)
        return -ENOMEM;
    memset(a->seeds, 0xff, n_seeds * sizeof *a->seeds);
    for (uint32_t i = 0; i < a->n_workers; i++) {
        a->workers[i].parts = malloc((a->max_blocks + 2) * sizeof(eng_partial));
        a->workers[i].floor = malloc(a->shape->group * sizeof(float));
        if (!a->workers[i].parts || !a->workers[i].floor)
            return -ENOMEM;
    }
    if (!retrieves(a))
        return 0;
    int r = plan_ranges(a, view);
    if (r == 0)
        r = alloc_hits(a, view);
    if (r == 0 && a->estimates && a->n_ranges)
        r = attn_estimate_setup(a, view);
    return r;
}

/* ---- one step --------------------------------------------------------------------------------------------------- */

static void add_blocks(attn_plan *p, uint32_t lo, uint32_t hi)
{
    while (lo < hi) {
        uint32_t end = (lo / ATTN_BLOCK + 1) * ATTN_BLOCK;
        if (end > hi)
            end = hi;
        p->blocks[p->n_blocks].lo = lo;
        p->blocks[p->n_blocks++].hi = end;
        p->n_dense += end - lo;
        lo = end;
    }
}

/* By what spans are searched, and what must be read densely for want of that. */
static void plan_codes(eng_attn *a, const eng_view *view)
{
    uint32_t lo, hi;
    for (uint32_t i = 0; i + 1 < view->n_spans; i++) {
        attn_visible(a, &view->spans[i], &lo, &hi);
        a->served[i] = lo < hi ? attn_serves(a, &view->spans[i], hi - lo) : ATTN_NOT;
    }
    if (!a->estimates || !a->n_ranges)
        return;
    attn_estimate_step(a, view);
    for (uint32_t i = 0; i + 1 < view->n_spans; i++) {
        attn_visible(a, &view->spans[i], &lo, &hi);
        if (!a->served[i])
            add_blocks(&a->step, lo, hi);
        else
            a->step.n_coded += hi - lo;
    }
}

void eng_attn_step(eng_attn *a, const eng_view *view, uint32_t n_keys)
{
    const eng_attention *p = &a->policy;
    uint32_t local = n_keys > p->n_local ? n_keys - p->n_local : 0; /* where the window's recent part begins */
    uint32_t sink = p->n_sink < n_keys ? p->n_sink : n_keys, delta = view->spans[view->n_spans - 1].lo;
    a->n_keys = n_keys;
    a->step = (attn_plan){.blocks = a->step.blocks};
    if (a->estimates && local < delta)
        local -= local % ATTN_LOCAL_STEP;
    if (retrieves(a) && delta < local)
        local = delta; /* what is not sealed yet is attended densely */
    if (p->mode == ENG_ATTN_FULL || local <= sink) {
        add_blocks(&a->step, 0, n_keys);
        a->step.sink = n_keys;
        return;
    }
    a->step.sink = sink;
    a->step.local = local;
    add_blocks(&a->step, 0, sink);
    if (retrieves(a)) {
        a->step.retrieve_lo = sink;
        a->step.retrieve_hi = local;
        plan_codes(a, view);
    }
    add_blocks(&a->step, local, n_keys);
}

/* A sliding layer reads its own window, whatever the mode. */
static const attn_plan *plan_of(eng_attn *a, uint32_t layer)
{
    uint32_t window = eng_kv_window(a->shape, layer);
    if (!window)
        return &a->step;
    a->sliding = (attn_plan){.blocks = a->sliding.blocks, .local = a->n_keys > window ? a->n_keys - window : 0};
    add_blocks(&a->sliding, a->sliding.local, a->n_keys);
    return &a->sliding;
}

/* What a plan leaves when [0, sink) and [local, n_keys) are attended elsewhere. */
static void plan_rest(eng_attn *a, const attn_plan *whole, uint32_t sink, uint32_t local)
{
    attn_plan *p = &a->rest;
    *p = (attn_plan){.blocks = p->blocks, .retrieve_lo = whole->retrieve_lo, .retrieve_hi = whole->retrieve_hi, .n_coded = whole->n_coded};
    for (uint32_t i = 0; i < whole->n_blocks; i++) {
        uint32_t lo = whole->blocks[i].lo, hi = whole->blocks[i].hi;
        lo = lo > sink ? lo : sink;
        hi = hi < local ? hi : local;
        if (lo < hi)
            add_blocks(p, lo, hi);
    }
    uint32_t n = p->n_blocks;
    if (p->retrieve_hi > p->retrieve_lo) {
        add_blocks(p, 0, sink);
        add_blocks(p, local, a->n_keys);
    }
    p->n_bounds = p->n_blocks - n;
    p->n_blocks = n;
    p->n_dense = whole->n_dense;
}

bool eng_attn_share(eng_attn *a, uint32_t layer, uint32_t *io_sink, uint32_t *io_local)
{
    const attn_plan *p = plan_of(a, layer);
    uint32_t sink = p->sink < *io_sink ? p->sink : *io_sink, local = p->local > *io_local ? p->local : *io_local;
    *io_sink = sink;
    *io_local = local > sink ? local : sink;
    plan_rest(a, p, *io_sink, *io_local);
    return a->rest.n_blocks || a->rest.retrieve_hi > a->rest.retrieve_lo;
}

static void dense_task(eng_attn *a, uint32_t task, uint32_t worker)
{
    const eng_kernels *k = a->k;
    const eng_kv_shape *shape = a->shape;
    float *s = a->workers[worker].scores;
    uint32_t head = task % shape->n_head_kv, block = task / shape->n_head_kv, group = shape->group, d = shape->head_dim;
    uint32_t lo = a->plan->blocks[block].lo, hi = a->plan->blocks[block].hi, first = eng_view_find(a->view, lo);
    size_t part = ((size_t)head * a->max_blocks + block) * group;
    float *o = a->dense_o + part * d;

    for (uint32_t pos = lo, i = first; pos < hi; i++) {
        const eng_span *sp = &a->view->spans[i];
        uint32_t end = sp->hi < hi ? sp->hi : hi;
        k->qk[shape->type_k](s + (pos - lo), ATTN_BLOCK, a->query + (size_t)head * group * d, group,
                             eng_segment_k(sp->seg, a->layer, head, pos - sp->seg->start), shape->row_k, end - pos, d);
        pos = end;
    }
    for (uint32_t g = 0; g < group; g++)
        a->dense_m[part + g] = k->max(s + g * ATTN_BLOCK, hi - lo);
    if (block >= a->plan->n_blocks)
        return;
    for (uint32_t g = 0; g < group; g++)
        a->dense_l[part + g] = k->softmax(s + g * ATTN_BLOCK, hi - lo, a->dense_m[part + g]);
    memset(o, 0, (size_t)group * d * sizeof *o);
    for (uint32_t pos = lo, i = first; pos < hi; i++) {
        const eng_span *sp = &a->view->spans[i];
        uint32_t end = sp->hi < hi ? sp->hi : hi;
        k->pv[shape->type_v](o, s + (pos - lo), ATTN_BLOCK, group, eng_segment_v(sp->seg, a->layer, head, pos - sp->seg->start),
                             shape->row_v, end - pos, d);
        pos = end;
    }
}

/* Best score of each head of a group among the dense keys, to floor [group]. */
static void find_floors(const eng_attn *a, uint32_t head_kv, float *floor)
{
    uint32_t group = a->shape->group;
    for (uint32_t g = 0; g < group; g++)
        floor[g] = -INFINITY;
    for (uint32_t b = 0; b < a->plan->n_blocks + a->plan->n_bounds; b++) {
        const float *m = a->dense_m + ((size_t)head_kv * a->max_blocks + b) * group;
        for (uint32_t g = 0; g < group; g++)
            floor[g] = m[g] > floor[g] ? m[g] : floor[g];
    }
}

/* Applies the budget to all hits of a head at once; drops the rest in place. Returns how many stay. */
static uint32_t apply_budget(const eng_attn *a, attn_worker *w, uint32_t head, attn_hits **hits)
{
    uint32_t n = 0, n_equal = UINT32_MAX;
    float best = w->floor[head % a->shape->group], least = -INFINITY;
    for (uint32_t i = 0; i < a->n_ranges; i++) {
        memcpy(w->all + n, hits[i]->scores, hits[i]->n * sizeof *w->all);
        n += hits[i]->n;
    }
    float max = a->k->max(w->all, n);
    if (max > best)
        best = max;
    if (n > a->k_cap) {
        /* the k-th best score; of several equal to it, the first ones stay */
        least = idx_kth_best(w->all, n, a->k_cap, w->kth);
        n_equal = a->k_cap;
        for (uint32_t i = 0; i < n; i++)
            n_equal -= w->all[i] > least;
    }
    if (!a->policy.top_k && best - a->policy.beta > least) {
        least = best - a->policy.beta;
        n_equal = UINT32_MAX;
    }
    uint32_t left = 0;
    for (uint32_t i = 0; i < a->n_ranges; i++) {
        attn_hits *h = hits[i];
        uint32_t kept = 0;
        for (uint32_t j = 0; j < h->n; j++) {
            if (h->scores[j] < least || (h->scores[j] == least && !n_equal))
                continue;
            n_equal -= h->scores[j] == least;
            h->ids[kept] = h->ids[j];
            h->clusters[kept] = h->clusters[j];
            h->scanned[kept] = h->scanned[j];
            h->scores[kept++] = h->scores[j];
        }
        h->n = kept;
        left += kept;
    }
    return left;
}

/* Remembers the best few hits of a head as the next step's seeds. */
static void keep_seeds(eng_attn *a, uint32_t head, attn_hits **hits)
{
    uint32_t *to = a->seeds + ((size_t)a->layer * a->n_head + head) * ATTN_SEEDS;
    float score[ATTN_SEEDS];
    uint32_t n = 0;
    for (uint32_t i = 0; i < a->n_ranges; i++) {
        uint32_t start = a->view->spans[a->ranges[i].span].seg->start;
        for (uint32_t j = 0; j < hits[i]->n; j++) { /* insertion into a sorted handful */
            uint32_t at = n;
            while (at > 0 && score[at - 1] < hits[i]->scores[j])
                at--;
            if (at == ATTN_SEEDS)
                continue;
            if (n < ATTN_SEEDS)
                n++;
            memmove(score + at + 1, score + at, (n - at - 1) * sizeof *score);
            memmove(to + at + 1, to + at, (n - at - 1) * sizeof *to);
            score[at] = hits[i]->scores[j];
            to[at] = start + hits[i]->ids[j];
        }
    }
    for (; n < ATTN_SEEDS; n++)
        to[n] = UINT32_MAX;
}

/* Asks for the values of a range's hits, which lie anywhere in memory; all else that a merge does comes before they are needed. */
static void fetch_values(const eng_attn *a, uint32_t head_kv, uint32_t range, const attn_hits *hits)
{
    const uint8_t *values = eng_segment_v(a->view->spans[a->ranges[range].span].seg, a->layer, head_kv, 0);
    size_t row = a->shape->row_v;
    for (uint32_t j = 0; j < hits->n; j++)
        for (size_t byte = 0; byte < row; byte += 64)
            __builtin_prefetch(values + hits->ids[j] * row + byte, 0, 2);
}

/* The budget of a head, and the weights of what it leaves: the hits' scores become weights, in units of exp(part->m), and what is estimated is taken off
 * them. hits: [range] of the head. Returns how many hits there are. */
static uint32_t weigh_hits(eng_attn *a, attn_worker *w, uint32_t head, attn_hits **hits, eng_partial *part)
{
    const eng_kernels *k = a->k;
    uint32_t group = a->shape->group, first = head / group * a->n_ranges, g = head % group;
    for (uint32_t i = 0; i < a->n_ranges; i++)
        hits[i] = &a->hits[(size_t)(first + i) * group + g];
    uint32_t n = apply_budget(a, w, head, hits);
    if (n && (a->policy.mode == ENG_ATTN_GRAPH || (a->policy.mode == ENG_ATTN_AUTO && !a->estimates)))
        keep_seeds(a, head, hits);
    for (uint32_t i = 0; i < a->n_ranges; i++) {
        fetch_values(a, head / group, i, hits[i]);
        float m = k->max(hits[i]->scores, hits[i]->n);
        if (a->estimates && a->searched[first + i] && a->m_ref[(size_t)(first + i) * group + g] > m)
            m = a->m_ref[(size_t)(first + i) * group + g];
        part->m = m > part->m ? m : part->m;
    }
    for (uint32_t i = 0; i < a->n_ranges; i++) {
        if (hits[i]->n)
            part->l += k->softmax(hits[i]->scores, hits[i]->n, part->m);
        if (a->estimates && a->searched[first + i])
            part->l += attn_estimate_weigh(a, w, head, i, hits[i], part->m);
    }
    return n;
}

/* Attention over what was retrieved for n query heads of a KV head, and the estimate of what was not, to parts [n] and a->retrieved_o. */
static void attend_retrieved(eng_attn *a, attn_worker *w, uint32_t head, uint32_t n, eng_partial *parts)
{
    const eng_kv_shape *shape = a->shape;
    uint32_t head_kv = head / shape->group, d = shape->head_dim;
    float *o = a->retrieved_o + (size_t)head * d;
    for (uint32_t h = 0; h < n; h++)
        a->attended[head + h] += weigh_hits(a, w, head + h, w->lists + (size_t)h * a->n_ranges, &parts[h]);
    memset(o, 0, (size_t)n * d * sizeof *o);
    for (uint32_t i = 0; i < a->n_ranges; i++) {
        if (a->estimates && a->searched[(size_t)head_kv * a->n_ranges + i])
            attn_estimate_values(a, w, head, n, i, o);
        for (uint32_t h = 0; h < n; h++) {
            const attn_hits *hits = w->lists[(size_t)h * a->n_ranges + i];
            if (hits->n)
                a->k->pv_gather[shape->type_v](o + (size_t)h * d, hits->scores, hits->ids, hits->n,
                                               eng_segment_v(a->view->spans[a->ranges[i].span].seg, a->layer, head_kv, 0), shape->row_v, d);
        }
    }
}

static uint32_t merges_of_head(const eng_attn *a)
{
    return (a->shape->group + a->merge_heads - 1) / a->merge_heads;
}

static void merge_task(eng_attn *a, uint32_t task, uint32_t worker)
{
    attn_worker *w = &a->workers[worker];
    uint32_t group = a->shape->group, d = a->shape->head_dim, n_blocks = a->plan->n_blocks, tasks = merges_of_head(a);
    uint32_t head_kv = task / tasks, first = task % tasks * a->merge_heads, n = group - first < a->merge_heads ? group - first : a->merge_heads;
    eng_partial retrieved[ATTN_MERGE_MAX] = {{0}};
    for (uint32_t h = 0; h < n; h++) {
        a->attended[head_kv * group + first + h] = a->plan->n_dense;
        retrieved[h] = (eng_partial){-INFINITY, 0, a->retrieved_o + (size_t)(head_kv * group + first + h) * d};
    }
    if (a->plan->retrieve_hi > a->plan->retrieve_lo)
        attend_retrieved(a, w, head_kv * group + first, n, retrieved);
    for (uint32_t h = 0; h < n; h++) {
        for (uint32_t b = 0; b < n_blocks; b++) {
            size_t i = ((size_t)head_kv * a->max_blocks + b) * group + first + h;
            w->parts[b] = (eng_partial){a->dense_m[i], a->dense_l[i], a->dense_o + i * d};
        }
        w->parts[n_blocks] = retrieved[h];
        uint32_t head = head_kv * group + first + h;
        if (!a->rest_m) {
            eng_partial_merge(a->out + (size_t)head * d, w->parts, n_blocks + 1, d);
            continue;
        }
        eng_partial rest = join(a->out + (size_t)head * d, w->parts, n_blocks + 1, d);
        a->rest_m[head] = rest.m;
        a->rest_l[head] = rest.l;
    }
}

/* The dense tasks, then the searches, then the merges; each waits for the earlier ones of its KV head. */
static void attend_task(void *ctx, uint32_t task, uint32_t worker)
{
    eng_attn *a = ctx;
    bool dense = task < a->n_dense, search = !dense && task - a->n_dense < a->n_searches;
    uint32_t heads = a->shape->n_head_kv, i = task - (dense ? 0 : a->n_dense) - (dense || search ? 0 : a->n_searches), head_kv = dense || search ? i % heads : i / merges_of_head(a);
    struct attn_left *left = &a->left[head_kv];
    if (!dense)
        eng_pool_await(a->pool, &left->dense);
    if (!dense && !search)
        eng_pool_await(a->pool, &left->searches);
    uint64_t begin = eng_trace_begin();
    if (!dense && a->n_searches)
        find_floors(a, head_kv, a->workers[worker].floor);
    if (dense)
        dense_task(a, i, worker);
    else if (search)
        attn_search_task(a, head_kv, a->largest_first[i / heads], worker);
    else
        merge_task(a, i, worker);
    eng_trace_end(begin, dense ? "dense" : search ? "search" : "merge", NULL, 0);
    if (dense || search)
        atomic_fetch_sub_explicit(dense ? &left->dense : &left->searches, 1, memory_order_release);
}

/* Attention of the layer's plan to `out`. */
static void attend(eng_attn *a, const eng_view *view, uint32_t layer, const attn_plan *plan, const float *q, float *out)
{
    const eng_kv_shape *shape = a->shape;
    uint32_t heads = shape->n_head_kv, blocks = plan->n_blocks + plan->n_bounds, ranges = plan->retrieve_hi > plan->retrieve_lo ? a->n_ranges : 0;
    a->view = view;
    a->layer = layer;
    a->plan = plan;
    a->query = a->scaled;
    a->out = out;
    a->n_dense = blocks * heads;
    a->n_searches = ranges * heads;
    memcpy(a->scaled, q, (size_t)a->n_head * shape->head_dim * sizeof *q);
    a->k->scale(a->scaled, (size_t)a->n_head * shape->head_dim, 1 / sqrtf((float)shape->head_dim));
    if (ranges && a->estimates && a->n_cuts)
        attn_estimate_cuts(a);
    for (uint32_t h = 0; h < heads; h++) {
        atomic_store_explicit(&a->left[h].dense, blocks, memory_order_relaxed);
        atomic_store_explicit(&a->left[h].searches, ranges, memory_order_relaxed);
    }
    eng_pool_run(a->pool, "attend keys", attend_task, a, a->n_dense + a->n_searches + heads * merges_of_head(a));
    for (uint32_t i = 0; i < a->n_searches; i++) {
        a->counts.n_flat += a->searched[i] == ATTN_SCAN || a->searched[i] == ATTN_CODES;
        a->counts.n_graph += a->searched[i] == ATTN_GRAPH;
        a->counts.n_cluster += a->searched[i] == ATTN_CLUSTER || a->searched[i] == ATTN_IVF;
        a->counts.probed += a->probed[i];
    }
    for (uint32_t h = 0; h < a->n_head; h++) {
        uint32_t retrieved = a->attended[h] - a->plan->n_dense;
        a->counts.attended += a->attended[h];
        a->counts.retrieved += retrieved;
        a->counts.estimated += a->plan->n_coded ? a->plan->n_coded - retrieved : 0;
    }
    a->counts.dense += (uint64_t)a->plan->n_dense * shape->n_head_kv;
}

void eng_attn_decode(eng_attn *a, const eng_view *view, uint32_t layer, const float *q, float *out)
{
    attend(a, view, layer, plan_of(a, layer), q, out);
}

void eng_attn_count_window(eng_attn *a)
{
    uint64_t n = a->rest.n_dense;
    a->counts.attended += n * a->n_head;
    a->counts.dense += n * a->shape->n_head_kv;
}

void eng_attn_decode_rest(eng_attn *a, const eng_view *view, uint32_t layer, const float *q, float *m, float *l, float *o)
{
    a->rest_m = m;
    a->rest_l = l;
    attend(a, view, layer, &a->rest, q, o);
    a->rest_m = a->rest_l = NULL;
}

const eng_attn_counts *eng_attn_counted(const eng_attn *a)
{
    return &a->counts;
}
