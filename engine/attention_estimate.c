/* The estimate of what is neither in the window nor retrieved: each key's weight as the scan of its code gave it, summed per cluster of
 * values, times the mean value of what is left of the cluster; by lists and graphs, which skip keys, clusters of keys with the weights of their centroids (index.h). With sums of values for means, the retrieved keys' values go out
 * of it in the same pass that brings them in with their exact weights: their coefficient is the exact weight less that of their cluster.
 *
 * Sums come with the codes where a run is visible as a whole. A run that the sinks, a cutoff or the window cuts has sums of its own, per
 * session, made when its visible part changes: rarely, because the window moves over such a run in steps of ATTN_LOCAL_STEP. */
#include "attention_private.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

void attn_estimate_free(eng_attn *a)
{
    free(a->cluster_base);
    free(a->weights);
    free(a->m_ref);
    free(a->clusters);
    free(a->cuts);
    free(a->cut_memory);
    free(a->wanted);
    a->cluster_base = NULL;
    a->weights = a->m_ref = NULL;
    a->clusters = NULL;
    a->cuts = a->wanted = NULL;
    a->cut_memory = NULL;
    a->max_cuts = a->n_cuts = a->n_clusters = 0;
    for (uint32_t i = 0; a->workers && i < a->n_workers; i++) {
        attn_worker *w = &a->workers[i];
        free(w->taken);
        free(w->coef);
        free(w->cuts);
        w->taken = NULL;
        w->coef = NULL;
        w->cuts = NULL;
    }
}

/* Room for the cuts at the ends of spans and for the one that the window makes. */
static int alloc_cuts(eng_attn *a, const eng_view *view)
{
    const eng_kv_shape *shape = a->shape;
    a->max_cuts = 1;
    a->cut_clusters = 0;
    for (uint32_t i = 0; i + 1 < view->n_spans; i++) {
        const eng_span *s = &view->spans[i];
        uint32_t lo = s->lo > a->policy.n_sink ? s->lo : a->policy.n_sink, from, to;
        a->max_cuts += (lo > s->seg->start && lo < s->hi) + (s->hi < s->seg->start + s->seg->n);
        for (uint32_t run = 0; run < idx_codes_runs(s->seg->n); run++) {
            idx_codes_run_rows(s->seg->n, run, &from, &to);
            uint32_t most = idx_codes_max_clusters(to - from);
            a->cut_clusters = most > a->cut_clusters ? most : a->cut_clusters;
        }
    }
    size_t n = (size_t)shape->n_layer * shape->n_head_kv * a->max_cuts, stride = idx_codes_sum_stride(shape->head_dim);
    a->cuts = calloc(n, sizeof *a->cuts);
    a->wanted = calloc(a->max_cuts, sizeof *a->wanted);
    a->cut_memory = malloc(n * a->cut_clusters * (stride + 1) * sizeof(float) + 1); /* pages of cuts that never come stay untouched */
    if (!a->cuts || !a->wanted || !a->cut_memory)
        return -ENOMEM;
    float *sums = a->cut_memory;
    uint32_t *counts = (uint32_t *)(sums + n * a->cut_clusters * stride);
    for (size_t i = 0; i < n; i++) {
        a->cuts[i].cut.sums = sums + i * a->cut_clusters * stride;
        a->cuts[i].cut.counts = counts + i * a->cut_clusters;
    }
    return 0;
}

int attn_estimate_setup(eng_attn *a, const eng_view *view)
{
    size_t heads = a->shape->n_head_kv, group = a->shape->group;
    a->cluster_base = malloc(view->n_spans * sizeof *a->cluster_base);
    if (!a->cluster_base)
        return -ENOMEM;
    for (uint32_t i = 0; i + 1 < view->n_spans; i++) {
        a->cluster_base[i] = a->n_clusters;
        a->n_clusters += idx_codes_max_clusters(view->spans[i].seg->n);
    }
    a->weights = malloc(heads * group * a->n_clusters * sizeof *a->weights + 1);
    a->m_ref = malloc(heads * a->n_ranges * group * sizeof *a->m_ref + 1);
    a->clusters = malloc(heads * a->n_ranges * sizeof *a->clusters + 1);
    int r = a->weights && a->m_ref && a->clusters ? alloc_cuts(a, view) : -ENOMEM;
    for (uint32_t i = 0; i < a->n_workers && r == 0; i++) {
        attn_worker *w = &a->workers[i];
        w->taken = calloc((size_t)a->n_clusters + 1, sizeof *w->taken);
        w->coef = malloc(((size_t)a->k_cap + 1) * sizeof *w->coef);
        w->cuts = malloc(a->max_cuts * sizeof *w->cuts);
        if (!w->taken || !w->coef || !w->cuts)
            r = -ENOMEM;
    }
    return r;
}

/* Adds the run that holds `row`, an end of the visible rows, unless it is there already. */
static bool want_cut(eng_attn *a, uint32_t span, uint32_t n, uint32_t row, uint32_t lo, uint32_t hi)
{
    uint32_t run = idx_codes_run_of(n, row), from, to;
    idx_codes_run_rows(n, run, &from, &to);
    if (from >= lo && to <= hi)
        return true;
    if (a->n_cuts && a->wanted[a->n_cuts - 1].span == span && a->wanted[a->n_cuts - 1].cut.run == run)
        return true;
    if (a->n_cuts == a->max_cuts)
        return false;
    a->wanted[a->n_cuts++] = (attn_cut){.span = span, .cut = {.run = run, .lo = lo, .hi = hi}};
    return true;
}

void attn_estimate_step(eng_attn *a, const eng_view *view)
{
    a->n_cuts = 0;
    for (uint32_t i = 0; i + 1 < view->n_spans; i++) {
        const eng_span *s = &view->spans[i];
        uint32_t lo, hi, had = a->n_cuts;
        attn_visible(a, s, &lo, &hi);
        if (!a->served[i] || lo >= hi)
            continue;
        lo -= s->seg->start;
        hi -= s->seg->start;
        if (!want_cut(a, i, s->seg->n, lo, lo, hi) || !want_cut(a, i, s->seg->n, hi - 1, lo, hi)) {
            a->n_cuts = had;
            a->served[i] = ATTN_NOT;
        }
    }
}

static bool is_made(const attn_cut *have, const attn_cut *want, const idx_index *ix)
{
    return have->span == want->span && have->ix == ix && have->cut.run == want->cut.run && have->cut.lo == want->cut.lo && have->cut.hi == want->cut.hi;
}

static void cut_task(void *ctx, uint32_t task, uint32_t worker)
{
    eng_attn *a = ctx;
    const eng_kv_shape *shape = a->shape;
    uint32_t head = task / a->n_cuts, i = task % a->n_cuts;
    attn_cut *have = &a->cuts[((size_t)a->layer * shape->n_head_kv + head) * a->max_cuts + i];
    const attn_cut *want = &a->wanted[i];
    const idx_index *ix = attn_index_of(a, want->span, head);
    (void)worker;
    if (is_made(have, want, ix))
        return;
    const eng_segment *seg = a->view->spans[want->span].seg;
    idx_rows values = {eng_segment_v(seg, a->layer, head, 0), shape->row_v, seg->n, shape->head_dim, (idx_type)shape->type_v};
    have->span = want->span;
    have->ix = ix;
    have->cut.run = want->cut.run;
    have->cut.lo = want->cut.lo;
    have->cut.hi = want->cut.hi;
    idx_codes_cut(ix, &values, &have->cut);
}

void attn_estimate_cuts(eng_attn *a)
{
    const attn_cut *have = a->cuts + (size_t)a->layer * a->shape->n_head_kv * a->max_cuts;
    for (uint32_t head = 0; head < a->shape->n_head_kv; head++)
        for (uint32_t i = 0; i < a->n_cuts; i++)
            if (!is_made(&have[head * a->max_cuts + i], &a->wanted[i], attn_index_of(a, a->wanted[i].span, head))) {
                eng_pool_run(a->pool, "cut runs", cut_task, a, a->shape->n_head_kv * a->n_cuts);
                return;
            }
}

/* The cuts of a span for a KV head, to w->cuts; how many. */
static uint32_t cuts_of(const eng_attn *a, attn_worker *w, uint32_t head_kv, uint32_t span)
{
    const attn_cut *cuts = a->cuts + ((size_t)a->layer * a->shape->n_head_kv + head_kv) * a->max_cuts;
    uint32_t n = 0;
    for (uint32_t i = 0; i < a->n_cuts; i++)
        if (a->wanted[i].span == span)
            w->cuts[n++] = cuts[i].cut;
    return n;
}

float attn_estimate_weigh(eng_attn *a, attn_worker *w, uint32_t head, uint32_t range, attn_hits *hits, float m)
{
    const eng_kv_shape *shape = a->shape;
    uint32_t head_kv = head / shape->group, g = head % shape->group, span = a->ranges[range].span;
    size_t task = (size_t)head_kv * a->n_ranges + range;
    float m_ref = a->m_ref[task * shape->group + g];
    if (!(m_ref > -INFINITY))
        return 0;
    const idx_index *ix = attn_index_of(a, span, head_kv);
    const struct attn_clusters *c = &a->clusters[task];
    float *weights = a->weights + (size_t)head * a->n_clusters + a->cluster_base[span] + c->first;
    float l = idx_estimate(ix, w->cuts, cuts_of(a, w, head_kv, span), c->first, c->end, m_ref, expf(m_ref - m), weights, hits->clusters, hits->scanned,
                           hits->n, w->taken, w->coef);
    for (uint32_t i = 0; i < hits->n; i++)
        hits->scores[i] -= w->coef[i];
    return l;
}

void attn_estimate_values(eng_attn *a, attn_worker *w, uint32_t head, uint32_t n, uint32_t range, float *o)
{
    const eng_kv_shape *shape = a->shape;
    uint32_t head_kv = head / shape->group, span = a->ranges[range].span, d = shape->head_dim, n_cuts = cuts_of(a, w, head_kv, span);
    size_t stride = idx_codes_sum_stride(d);
    const idx_index *ix = attn_index_of(a, span, head_kv);
    const struct attn_clusters *c = &a->clusters[(size_t)head_kv * a->n_ranges + range];
    const float *weights = a->weights + (size_t)head * a->n_clusters + a->cluster_base[span];
    for (uint32_t at = c->first; at < c->end;) {
        const float *sums;
        uint32_t next = idx_codes_sums(ix, w->cuts, n_cuts, at, c->end, &sums);
        a->k->pv[ENG_KV_F32](o, weights + at, a->n_clusters, n, sums, stride * sizeof *sums, next - at, d);
        at = next;
    }
}
