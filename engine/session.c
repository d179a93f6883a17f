/* One running request: a chain of kept segments, the segment its prompt fills, and the delta (design section 4).
 *
 *   [ spans of kept segments ) [ filling: the prompt up to its last window ) [ delta: the rest of the prompt, then generated tokens )
 *   0                          n_cached                                      delta->start                                            n
 */
#include "engine_private.h"

#include "capture.h"
#include "clock.h"
#include "sampler.h"
#include "text.h"
#include "trace.h"
#include "worth.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <syslog.h>

enum {
    SEAL_RUN = 2048,        /* generated tokens sealed at a time, once they have left the window */
    FILL_MIN = 256,         /* a shorter prompt remainder stays in the delta until the end */
};

struct eng_session {
    eng_engine *e;
    eng_attention attention;
    const atomic_bool *cancel;
    bool keep;
    uint64_t tenant;
    eng_prefix_stop stop;
    int32_t *ids;               /* the prompt */
    uint32_t n_prompt, n_cached, n_read, room; /* n_read: of those cached, from disk */
    uint32_t n;                 /* tokens whose KV is there */
    eng_view view;
    eng_segment *filling;       /* the view holds it; NULL: none */
    eng_segment *delta;         /* the view holds it */
    eng_query_sampling sampling;
    eng_sampler *sampler;
    float *logits;
    bool sought;                /* a prefix, which is not counted yet */
    bool prefilled, logits_ready;
    bool is_set_up;             /* for steps: no sooner than all that they search is read, which the first token need not wait for */
    int32_t pending;            /* chosen, not yet computed */
    uint32_t n_predicted, n_steps;
    uint64_t prompt_ns, predicted_ns, keys_held;
    double index_begin;
    eng_attn_counts counts_begin;
};

/* ---- open -------------------------------------------------------------------------------------------------------- */

static int check_prompt(const eng_engine *e, const eng_request *r, char *err, size_t errlen)
{
    if (!r->n_ids) {
        snprintf(err, errlen, "the prompt is empty");
        return -EINVAL;
    }
    if (r->n_ids >= e->params.n_ctx) {
        snprintf(err, errlen, "the prompt has %zu tokens, and the context holds %u of which one must be left for the answer", r->n_ids, e->params.n_ctx);
        return -E2BIG;
    }
    for (size_t i = 0; i < r->n_ids; i++)
        if (r->ids[i] < 0 || (uint32_t)r->ids[i] >= e->info.n_vocab) {
            snprintf(err, errlen, "token %zu of the prompt is %d, and the vocabulary has %u tokens", i, (int)r->ids[i], e->info.n_vocab);
            return -EINVAL;
        }
    return 0;
}

static eng_segment *last_segment(const eng_view *v)
{
    return v->n_spans ? v->spans[v->n_spans - 1].seg : NULL;
}

/* Adds a new segment to the view; the view keeps the only reference. */
static int add_segment(eng_session *s, uint32_t start, uint32_t cap, eng_segment **ret)
{
    eng_segment *seg;
    int r = eng_segment_new(&s->e->shape, last_segment(&s->view), start, cap, true, &seg);
    if (r < 0)
        return r;
    seg->tenant = s->tenant;
    r = eng_view_add(&s->view, seg, start, start + cap);
    eng_segment_unref(seg);
    if (r == 0)
        *ret = seg;
    return r;
}

/* Whether any layer sees more than a window. */
static bool retrieves(const eng_kv_shape *shape)
{
    for (uint32_t i = 0; i < shape->n_layer; i++)
        if (!eng_kv_window(shape, i))
            return true;
    return false;
}

/* What beside codes the prompt's keys are to have: for this session's searches, and for those of the modes that every session's keys are made ready for. */
static unsigned wanted_kinds(const eng_session *s)
{
    const eng_attn *attn = eng_forward_attention(s->e->forward);
    unsigned wants = eng_attn_wants(attn, &s->attention, s->n_prompt + s->room);
    for (uint32_t mode = 0; s->e->params.index_modes >> mode; mode++) {
        eng_attention other = s->attention;
        other.mode = (eng_attn_mode)mode;
        if (s->e->params.index_modes >> mode & 1)
            wants |= eng_attn_wants(attn, &other, s->n_prompt + s->room);
    }
    return wants;
}

/* Memory for the tokens to come: what will be sealed goes straight to where it will stay. */
static int add_segments(eng_session *s)
{
    const eng_kv_shape *shape = &s->e->shape;
    uint32_t n_new = s->n_prompt - s->n_cached, fill = 0;
    if (n_new > s->attention.n_local && n_new - s->attention.n_local >= FILL_MIN)
        fill = n_new - s->attention.n_local;
    uint32_t run = s->room < SEAL_RUN + s->attention.n_local ? s->room : SEAL_RUN + s->attention.n_local;
    uint32_t delta = n_new - fill + run;
    eng_cache_make_room(s->e->cache, (fill ? eng_segment_bytes_for(shape, fill) : 0) + eng_segment_bytes_for(shape, delta),
                        eng_worth_claim(eng_worth_used(0, s->n_prompt)));
    eng_index_work_run(s->e->index_work, 0, NULL); /* lets go of what was just evicted */
    int r = fill ? add_segment(s, s->n_cached, fill, &s->filling) : 0;
    if (r == 0)
        r = add_segment(s, s->n_cached + fill, delta, &s->delta);
    unsigned wants = r < 0 || fill < ENG_INDEX_MIN_TOKENS || !retrieves(shape) ? 0 : wanted_kinds(s);
    if (!wants)
        return r;
    s->sampling.from = s->n_cached;
    s->sampling.stride = (uint32_t)(((uint64_t)n_new * shape->group + ENG_SAMPLED_QUERIES - 1) / ENG_SAMPLED_QUERIES);
    if (eng_segment_alloc_queries(s->filling, (n_new + s->sampling.stride - 1) / s->sampling.stride) == 0) {
        s->sampling.seg = s->filling; /* else: codes alone, and all the rest still works */
        s->filling->wants = wants;
    }
    return 0;
}

/* Tokens [lo, hi) as text for a log line. */
static const char *text_of(const eng_session *s, uint32_t lo, uint32_t hi, char *buf, size_t size)
{
    char raw[160];
    size_t n = 0;
    for (uint32_t i = lo; i < hi; i++) {
        const char *text;
        size_t len;
        if (eng_token_text(s->e, s->ids[i], true, &text, &len) < 0 || len > sizeof raw - n)
            break;
        memcpy(raw + n, text, len);
        n += len;
    }
    return eng_printable(raw, n, buf, size);
}

static void report_stop(const eng_session *s)
{
    enum { AROUND = 12 };
    char before[128], after[128];
    uint32_t at = s->stop.position, lo = at > AROUND ? at - AROUND : 0, hi = s->n_prompt - at > AROUND ? at + AROUND : s->n_prompt;
    if (s->stop.why)
        eng_log(s->e, LOG_DEBUG, "%u of %u prompt tokens are kept; at token %u, between \"%s\" and \"%s\", it stops: %s", s->n_cached, s->n_prompt, at,
                text_of(s, lo, at, before, sizeof before), text_of(s, at, hi, after, sizeof after), eng_miss_name(s->stop.why));
}

/* A full hit computes its last token again, for its logits. */
static int find_prefix(eng_session *s)
{
    eng_engine *e = s->e;
    eng_prefix p = {s->tenant, s->ids, s->n_prompt - 1, s->attention.mode == ENG_ATTN_FULL};
    uint64_t begin = eng_trace_begin();
    eng_named_forget(e);
    int64_t found = eng_cache_find(e->cache, &p, &s->view, &s->stop);
    if (found < 0)
        return (int)found;
    found = eng_disk_find(e, &p, (uint32_t)found, eng_attn_wants(eng_forward_attention(e->forward), &s->attention, s->n_prompt + s->room), s->cancel, &s->view, &s->n_read, &s->stop); /* also for what it learns there: what is used */
    bool goes_on = s->stop.why == ENG_MISS_ABSENT || s->stop.why == ENG_MISS_END || s->stop.why == ENG_MISS_DIFFERS;
    if (goes_on && (eng_cache_evicted(e->cache, &p, s->stop.position) || eng_disk_evicted(e, &p, s->stop.position)))
        s->stop.why = ENG_MISS_EVICTED;
    s->n = s->n_cached = (uint32_t)found;
    s->sought = true;
    eng_trace_end(begin, "find prefix", "tokens", found);
    return 0;
}

/* Once what was found has turned out to be good, or is not wanted. */
static void count_prefix(eng_session *s)
{
    eng_counters *c = &s->e->counters;
    if (!s->sought)
        return;
    s->sought = false;
    atomic_fetch_add(s->n_cached ? &c->hits : &c->misses, 1);
    atomic_fetch_add(&c->stops[s->stop.why], 1);
    report_stop(s);
}

int eng_session_open(eng_engine *e, const eng_request *req, eng_session **ret, char *err, size_t errlen)
{
    if (e->in_session) {
        snprintf(err, errlen, "another session is running");
        return -EBUSY;
    }
    int r = check_prompt(e, req, err, errlen);
    if (r < 0)
        return r;
    eng_session *s = calloc(1, sizeof *s);
    if (!s)
        goto no_memory;
    s->e = e;
    s->attention = req->attention;
    s->cancel = req->cancel;
    s->keep = req->cache_prompt;
    s->tenant = req->tenant;
    s->n_prompt = (uint32_t)req->n_ids;
    s->room = req->max_tokens < e->params.n_ctx - s->n_prompt ? req->max_tokens : e->params.n_ctx - s->n_prompt;
    s->index_begin = eng_index_work_seconds(e->index_work);
    s->counts_begin = *eng_attn_counted(eng_forward_attention(e->forward));
    s->ids = malloc(req->n_ids * sizeof *s->ids);
    s->logits = malloc((size_t)e->info.n_vocab * sizeof *s->logits);
    if (!s->ids || !s->logits)
        goto no_memory;
    memcpy(s->ids, req->ids, req->n_ids * sizeof *s->ids);
    if ((s->keep && find_prefix(s) < 0) || add_segments(s) < 0 || eng_sampler_new(&req->sampling, e->kernels, e->info.n_vocab, &s->sampler) < 0)
        goto no_memory;
    for (uint32_t i = 0; i < s->n_prompt; i++)
        eng_sampler_accept(s->sampler, s->ids[i]);
    e->in_session = true;
    *ret = s;
    return 0;

no_memory:
    if (s) {
        s->keep = false;
        eng_session_close(s);
    }
    snprintf(err, errlen, "not enough memory for a session of %zu tokens", req->n_ids);
    return -ENOMEM;
}

/* ---- prefill ----------------------------------------------------------------------------------------------------- */

/* Records that tokens up to `end` are computed. */
static void advance(eng_session *s, const int32_t *ids, uint32_t end)
{
    for (uint32_t pos = s->n; pos < end; pos++, ids++) {
        eng_segment *seg = s->filling && pos < s->delta->start ? s->filling : s->delta;
        seg->ids[pos - seg->start] = *ids;
        seg->n = pos + 1 - seg->start;
    }
    s->n = end;
    if (s->sampling.seg)
        s->sampling.seg->m = eng_query_count(&s->sampling, end);
}

/* The full segment is sealed: others may use it from now on, and its indexes are built. */
static void seal_filling(eng_session *s)
{
    eng_segment *seg = s->filling;
    if (s->keep) {
        eng_cache_insert(s->e->cache, seg);
        eng_disk_keep(s->e, seg);
    }
    if (eng_index_work_add(s->e->index_work, seg) < 0)
        eng_segment_free_queries(seg);
    s->filling = NULL;
    s->sampling.seg = NULL;
    eng_publish(s->e);
}

/* For steps from here on. */
static int set_up(eng_session *s)
{
    int r = eng_attn_setup(eng_forward_attention(s->e->forward), &s->attention, &s->view, s->n_prompt + s->room, s->delta->cap);
    s->is_set_up = r == 0;
    return r;
}

/* A file that failed has given zeros: what was computed since is worth nothing, and nothing of it is kept. */
static int check_files(eng_session *s)
{
    int r = 0;
    for (uint32_t i = 0; i < s->view.n_spans; i++) {
        const eng_segment *seg = s->view.spans[i].seg;
        if (!seg->map || !eng_mapping_failed(seg->map))
            continue;
        if (s->keep)
            eng_disk_failed(s->e, seg);
        s->keep = false;
        r = -EIO;
    }
    return r;
}

/* Without what turned out to be damaged while it was read. */
static int start_over(eng_session *s)
{
    eng_engine *e = s->e;
    eng_index_work_drop(e->index_work);
    eng_miss why = eng_disk_end_reading(e, &s->view);
    eng_view_done(&s->view);
    s->filling = s->delta = NULL;
    s->sampling = (eng_query_sampling){0};
    s->n_read = 0;
    int r = find_prefix(s);
    if (r < 0)
        return r;
    s->stop = (eng_prefix_stop){s->n_cached, why};
    return add_segments(s);
}

/* What a GPU's prefill leaves time for. */
static void begin_index(eng_session *s)
{
    if (s->e->gpu_layers && s->filling)
        eng_index_work_begin(s->e->index_work, s->filling); /* if that fails: once it is sealed */
}

int eng_session_prefill(eng_session *s, eng_progress_fn *progress, void *ctx)
{
    eng_engine *e = s->e;
    uint64_t start = eng_now_ns();
    int r = 0;
    begin_index(s);
    while (r == 0 && s->n < s->n_prompt) {
        uint32_t n = s->n_prompt - s->n < e->params.n_chunk ? s->n_prompt - s->n : e->params.n_chunk;
        const int32_t *ids = s->ids + s->n;
        float *logits = s->n + n == s->n_prompt ? s->logits : NULL;
        uint64_t begin = eng_trace_begin();
        r = eng_forward_prefill(e->forward, &s->view, ids, s->n, n, s->sampling.seg ? &s->sampling : NULL, s->cancel, logits, NULL);
        eng_trace_end(begin, "prefill chunk", "tokens", n);
        if (r == -EBADMSG && (r = start_over(s)) == 0) {
            begin_index(s);
            continue;
        }
        if (r == 0)
            r = check_files(s);
        if (r == 0) {
            advance(s, ids, s->n + n);
            eng_index_work_rows(e->index_work, e->shape.n_layer, s->n);
            atomic_fetch_add(&e->counters.prompt_tokens, n);
            if (progress)
                progress(ctx, s->n, s->n_cached, s->n_prompt);
        }
    }
    if (r < 0)
        eng_index_work_drop(e->index_work); /* what the prompt got to is sealed by itself */
    if (r == 0) {
        s->prefilled = s->logits_ready = true;
        if (s->filling)
            seal_filling(s);
        r = eng_disk_reading(e) ? 0 : set_up(s);
    }
    count_prefix(s);
    s->prompt_ns = eng_now_ns() - start;
    atomic_fetch_add(&e->counters.prompt_ns, s->prompt_ns);
    atomic_fetch_add(&e->counters.cached_tokens, s->n_cached);
    return r;
}

/* ---- decode ------------------------------------------------------------------------------------------------------ */

/* Copies the first n rows of the delta to segments of their own below its parent: the prompt's part and the generated part apart.
 * ret[0], ret[1]: NULL where there is none; the caller holds the references. */
static int copy_delta(eng_session *s, uint32_t n, eng_segment *ret[2])
{
    const eng_segment *delta = s->delta;
    uint32_t n_exact = s->n_prompt > delta->start ? s->n_prompt - delta->start : 0;
    uint32_t cut = n_exact < n ? n_exact : n;
    ret[0] = ret[1] = NULL;
    int r = cut ? eng_segment_copy(delta, 0, cut, delta->parent, true, &ret[0]) : 0;
    if (r == 0 && cut < n)
        r = eng_segment_copy(delta, cut, n, cut ? ret[0] : delta->parent, false, &ret[1]);
    if (r < 0) {
        eng_segment_unref(ret[0]);
        ret[0] = NULL;
    }
    return r;
}

/* Seals what has left the window and makes room in the full delta. */
static int seal_run(eng_session *s)
{
    eng_segment *delta = s->delta, *sealed[2];
    uint32_t n = delta->n - s->attention.n_local;
    int r = eng_view_reserve(&s->view, 2);
    if (r == 0)
        r = copy_delta(s, n, sealed);
    if (r < 0)
        return r;
    s->view.n_spans--; /* the delta's own span, whose reference passes to `delta` until it is back behind the new ones */
    for (int i = 0; i < 2; i++) {
        if (!sealed[i])
            continue;
        if (s->keep) {
            eng_cache_insert(s->e->cache, sealed[i]);
            eng_disk_keep(s->e, sealed[i]);
        }
        eng_index_work_add(s->e->index_work, sealed[i]); /* if that fails: its keys are read all the same */
        eng_view_add(&s->view, sealed[i], sealed[i]->start, sealed[i]->start + sealed[i]->n);
        eng_segment_unref(sealed[i]);
    }
    eng_segment_shift(delta, n);
    eng_segment_unref(delta->parent);
    delta->parent = eng_segment_ref(last_segment(&s->view));
    eng_view_add(&s->view, delta, delta->start, delta->start + delta->cap);
    eng_segment_unref(delta);
    eng_publish(s->e);
    return set_up(s);
}

/* Computes the pending token, so that the logits after it are there. */
static int step(eng_session *s)
{
    eng_engine *e = s->e;
    int r = 0;
    if (!s->is_set_up)
        r = eng_disk_end_reading(e, &s->view) ? -EBADMSG : set_up(s);
    if (r == 0 && s->delta->n == s->delta->cap)
        r = seal_run(s);
    if (r < 0)
        return r;
    uint64_t start = eng_now_ns(), begin = eng_trace_begin();
    r = eng_forward_decode(e->forward, &s->view, s->pending, s->n, s->cancel, s->logits);
    eng_trace_end(begin, "decode step", "position", s->n);
    if (r == 0)
        r = check_files(s);
    if (r < 0)
        return r;
    advance(s, &s->pending, s->n + 1);
    s->logits_ready = true;
    s->n_steps++;
    s->keys_held += s->n;
    if (eng_background_pending(e)) {
        uint64_t now = eng_now_ns();
        double share = e->params.index_share;
        eng_background(e, now + (uint64_t)((double)(now - start) * share / (1 - share)), s->cancel);
    }
    return 0;
}

static int ensure_logits(eng_session *s)
{
    if (!s->prefilled)
        return -EINVAL;
    if (s->logits_ready)
        return 0;
    uint64_t start = eng_now_ns();
    int r = step(s);
    s->predicted_ns += eng_now_ns() - start;
    return r;
}

static void choose(eng_session *s, int32_t id)
{
    eng_sampler_accept(s->sampler, id);
    s->pending = id;
    s->logits_ready = false;
    s->n_predicted++;
}

int eng_session_next(eng_session *s, eng_token *ret)
{
    if (s->n_predicted >= s->room)
        return 1;
    int r = ensure_logits(s);
    if (r < 0)
        return r;
    uint64_t start = eng_now_ns(), begin = eng_trace_begin();
    eng_token token;
    eng_sampler_pick(s->sampler, s->logits, &token);
    eng_trace_end(begin, "sample", NULL, 0);
    if (!isfinite(s->logits[token.id])) /* then all of them are not: a model with NaN or infinite weights */
        return -EDOM;
    *ret = token;
    choose(s, token.id);
    s->predicted_ns += eng_now_ns() - start;
    return 0;
}

int eng_session_force(eng_session *s, int32_t id)
{
    if (id < 0 || (uint32_t)id >= s->e->info.n_vocab)
        return -EINVAL;
    if (s->n_predicted >= s->room)
        return 1;
    int r = ensure_logits(s);
    if (r == 0)
        choose(s, id);
    return r;
}

int eng_session_logits(eng_session *s, const float **ret)
{
    int r = ensure_logits(s);
    if (r == 0)
        *ret = s->logits;
    return r;
}

/* ---- evaluation -------------------------------------------------------------------------------------------------- */

void eng_session_watch(eng_session *s, eng_queries_fn *fn, void *ctx)
{
    eng_forward_watch(s->e->forward, fn, ctx);
}

int eng_session_rows(const eng_session *s, uint32_t layer, uint32_t head_kv, bool values, uint32_t n, float *ret)
{
    const eng_kv_shape *shape = &s->e->shape;
    if (layer >= shape->n_layer || head_kv >= shape->n_head_kv || n > s->n)
        return -EINVAL;
    for (uint32_t pos = 0; pos < n; pos++, ret += shape->head_dim) {
        const eng_segment *seg = s->view.spans[eng_view_find(&s->view, pos)].seg;
        uint32_t row = pos - seg->start;
        if (values)
            s->e->kernels->kv_load[shape->type_v](eng_segment_v(seg, layer, head_kv, row), ret, shape->head_dim);
        else
            s->e->kernels->kv_load[shape->type_k](eng_segment_k(seg, layer, head_kv, row), ret, shape->head_dim);
    }
    return 0;
}

/* ---- end --------------------------------------------------------------------------------------------------------- */

/* Of the codes in view, which a search by scan reads. */
static size_t code_bytes(const eng_session *s)
{
    size_t sum = 0, bytes;
    for (uint32_t i = 0; i < s->view.n_spans; i++) {
        const eng_segment *seg = s->view.spans[i].seg;
        for (uint32_t j = 0; seg->n_codes && j < seg->shape->n_layer * seg->shape->n_head_kv; j++)
            if (seg->codes[j]) {
                idx_arena(seg->codes[j], &bytes);
                sum += bytes;
            }
    }
    return sum;
}

void eng_session_timings(const eng_session *s, eng_timings *ret)
{
    const eng_attn_counts *c = eng_attn_counted(eng_forward_attention(s->e->forward)), *c0 = &s->counts_begin;
    double per_step = s->n_steps ? s->n_steps : 1, heads = (double)s->e->info.n_layer * s->e->info.n_head;
    double attended = (double)(c->attended - c0->attended) / per_step, dense = (double)(c->dense - c0->dense) / per_step;
    double rows = attended - dense * (s->e->shape.group - 1); /* the dense ones are read once for a group */
    bool scanned = c->n_flat > c0->n_flat && c->n_graph == c0->n_graph && c->n_cluster == c0->n_cluster;
    double probed = (double)(c->probed - c0->probed) / per_step; /* by lists, codes: of a byte a dimension, with a scale and a row */
    double code = c->n_cluster > c0->n_cluster ? s->e->shape.head_dim + 6.0 : 0;
    *ret = (eng_timings){
        .cache_n = s->n_cached,
        .disk_n = s->n_read,
        .prompt_n = (s->n < s->n_prompt ? s->n : s->n_prompt) - s->n_cached,
        .prompt_ms = (double)s->prompt_ns * 1e-6,
        .predicted_n = s->n_predicted,
        .predicted_ms = (double)s->predicted_ns * 1e-6,
        .index_ms = (eng_index_work_seconds(s->e->index_work) - s->index_begin) * 1e3,
        .keys_held = (double)s->keys_held / per_step,
        .keys_attended = attended / heads,
        .retrieved = (double)(c->retrieved - c0->retrieved) / per_step / heads,
        .probed = probed / heads * s->e->shape.group,
        .estimated = (double)(c->estimated - c0->estimated) / per_step / heads,
        .read_bytes = rows * (double)(s->e->shape.row_k + s->e->shape.row_v) + (scanned ? (double)code_bytes(s) : probed * code),
        .n_graph = c->n_graph - c0->n_graph,
        .n_cluster = c->n_cluster - c0->n_cluster,
        .n_flat = c->n_flat - c0->n_flat,
        .mode = s->attention.mode,
    };
}

eng_prefix_stop eng_session_miss(const eng_session *s)
{
    return s->stop;
}

/* Keeps what the prompt got to before a cancel, cut to what is there. */
static void keep_unfinished(eng_session *s)
{
    eng_segment *seg;
    if (!s->filling->n || eng_segment_copy(s->filling, 0, s->filling->n, s->filling->parent, true, &seg) < 0)
        return;
    eng_disk_keep(s->e, seg);
    if (eng_cache_insert(s->e->cache, seg))
        eng_index_work_add(s->e->index_work, seg); /* if that fails: no index */
    eng_segment_unref(seg);
}

static void keep_delta(eng_session *s)
{
    eng_segment *sealed[2];
    if (!s->delta->n || copy_delta(s, s->delta->n, sealed) < 0)
        return;
    for (int i = 0; i < 2; i++) {
        if (!sealed[i])
            continue;
        eng_disk_keep(s->e, sealed[i]);
        if (eng_cache_insert(s->e->cache, sealed[i]))
            eng_index_work_add(s->e->index_work, sealed[i]);
        eng_segment_unref(sealed[i]);
    }
}

void eng_session_close(eng_session *s)
{
    if (!s)
        return;
    eng_engine *e = s->e;
    if (eng_disk_end_reading(e, &s->view))
        s->keep = false; /* it stands behind rows that are not there */
    count_prefix(s);
    if (s->keep && s->filling && s->filling->n < s->filling->cap)
        keep_unfinished(s);
    else if (s->keep && s->delta) {
        if (s->filling)
            seal_filling(s);
        keep_delta(s);
    }
    if (s->n_predicted) {
        eng_timings t;
        eng_session_timings(s, &t);
        atomic_fetch_add(&e->counters.predicted_tokens, t.predicted_n);
        atomic_fetch_add(&e->counters.predicted_ns, s->predicted_ns);
        atomic_fetch_add(&e->counters.keys_held, s->keys_held * e->info.n_layer * e->info.n_head);
        atomic_fetch_add(&e->counters.keys_attended, (unsigned long long)(t.keys_attended * s->n_steps * e->info.n_layer * e->info.n_head + 0.5));
    }
    eng_view_done(&s->view);
    eng_forward_watch(e->forward, NULL, NULL);
    eng_sampler_free(s->sampler);
    free(s->logits);
    free(s->ids);
    free(s);
    e->in_session = false;
    eng_cache_recount(e->cache); /* codes that came meanwhile could take no room from what was in use */
    eng_publish(e);
}
