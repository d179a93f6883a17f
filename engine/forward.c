#include "forward.h"

#include "moe.h"
#include "segment_file.h"
#include "trace.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS_PER_TASK = 16 };

struct eng_forward {
    eng_forward_params p;
    eng_linear *linear;
    eng_attn *attn;
    eng_moe *moe;           /* NULL: no experts */
    size_t bytes;
    /* of one chunk, row-major by token */
    float *x;               /* [n_embd] residual stream */
    float *h;               /* [n_embd] normed input of a block, and its output */
    float *q, *k, *v, *o;   /* [n_head d], [n_head_kv d] twice, [n_head d] */
    float *gate, *up;       /* [n_ff] of one token: decode */
    float *cs;              /* [rope_dim] cosines, then sines */
    float *cs_local;        /* the same, of layers with a base of their own */
    const float *new_q, *new_k, *new_v; /* of the layer at hand, rotated: what is stored */

    eng_gpu *gpu;           /* computes the layers from gpu_plan's first on; NULL: none */
    eng_gpu_plan gpu_plan;
    eng_lost_fn *lost;
    eng_spare_fn *spare;
    void *gpu_ctx;

    const float *key_shift; /* [n_layer][n_head_kv][d], added to keys before they are stored; NULL: nothing */
    eng_queries_fn *watch;  /* NULL: nobody */
    void *watch_ctx;
    float q_scale;          /* what makes the attention's 1 / sqrt(head_dim) the model's scale */

    /* of the call */
    const eng_view *view;
    const eng_layer *weights;
    const float *norm;
    const eng_weight *const *readers; /* [n_readers] the weights that read what is normed */
    uint32_t n_readers;
    const float *post_norm; /* of the output in h before it is added; NULL: none */
    bool decode;
    bool added;             /* the last block's output is in x already, and not in h */
    const int32_t *ids;
    const eng_query_sampling *sampling;
    uint32_t layer, pos, n;
    uint32_t n_stored;      /* layers whose keys and values are */
};

static uint32_t max2(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

int eng_forward_new(const eng_forward_params *p, eng_forward **ret)
{
    const eng_model *m = p->model;
    eng_forward *f = calloc(1, sizeof *f);
    if (!f)
        return -ENOMEM;
    f->p = *p;
    f->q_scale = m->attn_scale * sqrtf((float)m->head_dim);
    if (fabsf(f->q_scale - 1) < 1e-6f)
        f->q_scale = 1;
    size_t q = (size_t)m->n_head * m->head_dim, kv = (size_t)m->n_head_kv * m->head_dim;
    size_t ff = m->n_expert ? 1 : m->n_ff; /* experts have buffers of their own */
    uint32_t max_cols = max2(max2(m->n_embd, m->n_expert ? m->n_ff_expert : m->n_ff), (uint32_t)q);
    int r = eng_linear_new(p->pool, p->kernels, max_cols, p->n_chunk, p->f32_activations, &f->linear);
    if (r == 0)
        r = eng_attn_new(p->pool, p->kernels, p->shape, p->n_chunk, p->f32_activations, &f->attn);
    if (r == 0 && m->n_expert)
        r = eng_moe_new(m, p->kernels, p->pool, f->linear, p->n_chunk, &f->moe);
    if (r < 0) {
        eng_forward_free(f);
        return r;
    }
    size_t n = p->n_chunk;
    struct { float **to; size_t count; } parts[] = {
        {&f->x, n * m->n_embd}, {&f->h, n * m->n_embd}, {&f->q, n * q}, {&f->k, n * kv}, {&f->v, n * kv}, {&f->o, n * q}, {&f->gate, ff}, {&f->up, ff},
        {&f->cs, n * m->rope_dim}, {&f->cs_local, n * m->rope_dim},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        size_t bytes = (parts[i].count * sizeof(float) + 63) & ~(size_t)63;
        *parts[i].to = aligned_alloc(64, bytes);
        if (!*parts[i].to) {
            eng_forward_free(f);
            return -ENOMEM;
        }
        f->bytes += bytes;
    }
    *ret = f;
    return 0;
}

void eng_forward_free(eng_forward *f)
{
    if (!f)
        return;
    eng_moe_free(f->moe);
    eng_linear_free(f->linear);
    eng_attn_free(f->attn);
    float *parts[] = {f->x, f->h, f->q, f->k, f->v, f->o, f->gate, f->up, f->cs, f->cs_local};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        free(parts[i]);
    free(f);
}

size_t eng_forward_bytes(const eng_forward *f)
{
    return f->bytes + eng_linear_bytes(f->linear) + eng_attn_bytes(f->attn) + (f->moe ? eng_moe_bytes(f->moe) : 0);
}

eng_attn *eng_forward_attention(eng_forward *f)
{
    return f->attn;
}

void eng_forward_watch(eng_forward *f, eng_queries_fn *fn, void *ctx)
{
    f->watch = fn;
    f->watch_ctx = ctx;
}

void eng_forward_shift_keys(eng_forward *f, const float *shift)
{
    f->key_shift = shift;
}

void eng_forward_use_gpu(eng_forward *f, eng_gpu *gpu, const eng_gpu_plan *plan, eng_lost_fn *lost, eng_spare_fn *spare, void *ctx)
{
    f->gpu = gpu;
    f->gpu_plan = gpu ? *plan : (eng_gpu_plan){0};
    f->lost = lost;
    f->spare = spare;
    f->gpu_ctx = ctx;
}

/* ---- per-token work ---------------------------------------------------------------------------------------------- */

/* Embedding and rotary angles of token t. */
static void begin_token(eng_forward *f, uint32_t t)
{
    const eng_model *m = f->p.model;
    const eng_weight *e = &m->tok_embd;
    float *x = f->x + (size_t)t * m->n_embd;
    if (!f->gpu || !f->gpu_plan.output) {
        f->p.kernels->dequantize[e->type]((const uint8_t *)e->data + (size_t)f->ids[t] * e->row_bytes, x, m->n_embd);
        if (m->embd_scale != 1)
            f->p.kernels->scale(x, m->n_embd, m->embd_scale);
    }
    eng_rope_angles(f->p.rope, false, f->pos + t, f->cs + (size_t)t * m->rope_dim);
    if (m->window)
        eng_rope_angles(f->p.rope, true, f->pos + t, f->cs_local + (size_t)t * m->rope_dim);
}

static void norm_token(eng_forward *f, uint32_t t)
{
    const eng_model *m = f->p.model;
    size_t at = (size_t)t * m->n_embd;
    f->p.kernels->rms_norm(f->h + at, f->x + at, f->norm, m->n_embd, m->rms_eps);
    if (!f->decode)
        eng_linear_input(f->linear, f->readers, f->n_readers, t, f->h + at);
}

/* Which position of its stratum a query is drawn from: fixed, but without rhythm (a hash), so that it cannot beat with the text's. */
static uint32_t drawn_position(const eng_query_sampling *s, uint32_t stratum)
{
    uint64_t z = (stratum + 1) * 0x9e3779b97f4a7c15u;
    return s->from + stratum * s->stride + (uint32_t)((z >> 32) % s->stride);
}

static bool is_sampled(const eng_query_sampling *s, uint32_t pos, uint32_t *ret_stratum)
{
    *ret_stratum = (pos - s->from) / s->stride;
    return drawn_position(s, *ret_stratum) == pos;
}

uint32_t eng_query_count(const eng_query_sampling *s, uint32_t end)
{
    if (end <= s->from)
        return 0;
    uint32_t last = (end - 1 - s->from) / s->stride;
    return last + (drawn_position(s, last) < end);
}

/* One head of q or k: normed, then rotated. */
static void turn_head(const eng_forward *f, float *x, const float *norm, const float *cs)
{
    const eng_model *m = f->p.model;
    if (norm)
        f->p.kernels->rms_norm(x, x, norm, m->head_dim, m->rms_eps);
    if (f->weights->rope != ENG_LAYER_NO_ROPE)
        f->p.kernels->rope(x, cs, m->rope_dim, m->rope_pairs == ENG_ROPE_HALVES);
}

static void keep_query(eng_forward *f, const float *q, uint32_t pos)
{
    const eng_kv_shape *shape = f->p.shape;
    const eng_query_sampling *s = f->sampling;
    uint32_t stratum;
    size_t n = (size_t)shape->group * shape->head_dim;
    if (!s || !s->seg || !is_sampled(s, pos, &stratum) || stratum >= s->seg->m_cap)
        return;
    s->seg->query_row[stratum] = pos - s->seg->start;
    for (uint32_t head = 0; head < shape->n_head_kv && !eng_kv_window(shape, f->layer); head++)
        f->p.kernels->kv_store[ENG_KV_F16](q + head * n, eng_segment_query(s->seg, f->layer, head, stratum), n);
}

/* Stores k and v of token t to their segment, and keeps the query when it is one of the sample. */
static void store_token(eng_forward *f, uint32_t t)
{
    const eng_kernels *kn = f->p.kernels;
    const eng_kv_shape *shape = f->p.shape;
    uint32_t pos = f->pos + t, d = shape->head_dim;
    size_t n_kv = (size_t)shape->n_head_kv * d;
    const eng_span *span = &f->view->spans[eng_view_find(f->view, pos)];
    const float *k = f->new_k + t * n_kv, *v = f->new_v + t * n_kv;
    for (uint32_t head = 0; head < shape->n_head_kv; head++, k += d, v += d) {
        kn->kv_store[shape->type_k](k, eng_segment_k(span->seg, f->layer, head, pos - span->seg->start), d);
        kn->kv_store[shape->type_v](v, eng_segment_v(span->seg, f->layer, head, pos - span->seg->start), d);
    }
    keep_query(f, f->new_q + t * n_kv * shape->group, pos);
}

/* Biases, norms and rotation of q and k of token t, which is then stored. */
static void place_token(eng_forward *f, uint32_t t)
{
    const eng_model *m = f->p.model;
    const eng_layer *w = f->weights;
    const eng_kernels *kn = f->p.kernels;
    uint32_t d = m->head_dim;
    size_t n_q = (size_t)m->n_head * d, n_kv = (size_t)m->n_head_kv * d;
    const float *cs = (w->rope == ENG_LAYER_ROPE_LOCAL ? f->cs_local : f->cs) + (size_t)t * m->rope_dim;
    float *q = f->q + t * n_q, *k = f->k + t * n_kv, *v = f->v + t * n_kv;

    if (w->bq) {
        kn->add(q, w->bq, n_q);
        kn->add(k, w->bk, n_kv);
        kn->add(v, w->bv, n_kv);
    }
    for (uint32_t head = 0; head < m->n_head; head++)
        turn_head(f, q + (size_t)head * d, w->q_norm, cs);
    if (f->q_scale != 1)
        kn->scale(q, n_q, f->q_scale);
    for (uint32_t head = 0; head < m->n_head_kv; head++)
        turn_head(f, k + (size_t)head * d, w->k_norm, cs);
    if (f->key_shift)
        kn->add(k, f->key_shift + f->layer * n_kv, n_kv);
    store_token(f, t);
}

/* Adds the squares of some tokens' queries to what their segments know of them. Every token would tell no more. */
static void note_queries(eng_forward *f)
{
    enum { STEP = 8 };
    const eng_kv_shape *shape = f->p.shape;
    uint32_t d = shape->head_dim, n = shape->n_head_kv * d;
    for (uint32_t t = (STEP - f->pos % STEP) % STEP; t < f->n; t += STEP) {
        const eng_span *span = &f->view->spans[eng_view_find(f->view, f->pos + t)];
        const float *q = f->new_q + (size_t)t * n * shape->group;
        float *to = span->seg->query_squares + (size_t)f->layer * n;
        for (uint32_t head = 0; head < shape->n_head_kv; head++, to += d)
            for (uint32_t g = 0; g < shape->group; g++, q += d)
                for (uint32_t j = 0; j < d; j++)
                    to[j] += q[j] * q[j];
    }
}

static void add_token(eng_forward *f, uint32_t t)
{
    const eng_model *m = f->p.model;
    float *h = f->h + (size_t)t * m->n_embd;
    if (f->post_norm)
        f->p.kernels->rms_norm(h, h, f->post_norm, m->n_embd, m->rms_eps);
    f->p.kernels->add(f->x + (size_t)t * m->n_embd, h, m->n_embd);
}

static void gate_token(eng_forward *f, uint32_t t)
{
    size_t at = (size_t)t * f->p.model->n_ff, n = f->p.model->n_ff;
    const eng_kernels *kn = f->p.kernels;
    (f->p.model->act == ENG_GELU_TANH ? kn->gelu_mul : kn->silu_mul)(f->gate + at, f->gate + at, f->up + at, n);
}

static void add_norm_token(eng_forward *f, uint32_t t)
{
    if (!f->added)
        add_token(f, t);
    norm_token(f, t);
}

struct token_job {
    eng_forward *f;
    void (*fn)(eng_forward *f, uint32_t t);
};

static void token_task(void *ctx, uint32_t task, uint32_t worker)
{
    struct token_job *job = ctx;
    (void)worker;
    uint32_t end = (task + 1) * TOKENS_PER_TASK < job->f->n ? (task + 1) * TOKENS_PER_TASK : job->f->n;
    for (uint32_t t = task * TOKENS_PER_TASK; t < end; t++)
        job->fn(job->f, t);
}

static void each_token(eng_forward *f, const char *name, void (*fn)(eng_forward *, uint32_t))
{
    struct token_job job = {f, fn};
    eng_pool_run(f->p.pool, name, token_task, &job, (f->n + TOKENS_PER_TASK - 1) / TOKENS_PER_TASK);
}

/* ---- layers ------------------------------------------------------------------------------------------------------ */

static bool canceled(const atomic_bool *cancel)
{
    return cancel && atomic_load_explicit(cancel, memory_order_relaxed);
}

/* x, with the block before added, normed and made the input of `readers`. */
static void norm_all(eng_forward *f, const float *norm, const eng_weight *const *readers, uint32_t n)
{
    f->norm = norm;
    f->readers = readers;
    f->n_readers = n;
    each_token(f, "norm", add_norm_token);
}

/* y = W h for the f->n tokens at hand, by the prefill kernels or by the decode kernels. name: for a trace. */
static void product(eng_forward *f, const char *name, const eng_weight *const *w, float *const *y, uint32_t n)
{
    uint64_t begin = eng_trace_begin();
    if (f->decode)
        eng_linear_decode(f->linear, w, y, n, f->h);
    else
        eng_linear_prefill(f->linear, w, y, n, NULL, f->n);
    eng_trace_end(begin, name, NULL, 0);
}

/* A block's output W x on its way into the residual stream. x: NULL where the input of a prefill is set. */
static void project(eng_forward *f, const char *name, const eng_weight *w, const float *x)
{
    uint64_t begin = eng_trace_begin();
    f->added = !f->decode && !f->post_norm;
    if (f->decode)
        eng_linear_decode(f->linear, &w, &f->h, 1, x);
    else if (f->added)
        eng_linear_prefill_add(f->linear, w, f->x, x, f->n);
    else
        eng_linear_prefill(f->linear, &w, &f->h, 1, x, f->n);
    eng_trace_end(begin, name, NULL, 0);
}

/* From the normed input in h to the FFN's output. */
static void feed_forward(eng_forward *f)
{
    const eng_layer *w = f->weights;
    const eng_kernels *kn = f->p.kernels;
    if (f->moe) {
        uint64_t begin = eng_trace_begin();
        eng_moe_run(f->moe, w, f->decode, f->h, f->n);
        f->added = false;
        eng_trace_end(begin, "experts", NULL, 0);
    } else if (f->decode) {
        product(f, "gate up", (const eng_weight *const[]){&w->w_gate, &w->w_up}, (float *const[]){f->gate, f->up}, 2);
        each_token(f, "gate", gate_token);
        project(f, "down", &w->w_down, f->gate);
    } else {
        uint64_t begin = eng_trace_begin();
        eng_linear_prefill_gated(f->linear, &w->w_gate, &w->w_up, &w->w_down, f->p.model->act == ENG_GELU_TANH ? kn->gelu_mul : kn->silu_mul, NULL,
                                 f->n);
        eng_trace_end(begin, "gate up", NULL, 0);
        project(f, "down", &w->w_down, NULL);
    }
}

/* The layer's queries are there, and its keys and values are stored. */
static void layer_stored(eng_forward *f)
{
    if (f->watch)
        f->watch(f->watch_ctx, f->layer, f->pos, f->n, f->new_q);
    note_queries(f);
}

/* Waits for the rows of the first n layers, where a file is still being read. -EBADMSG: they cannot be had. */
static int await_rows(eng_forward *f, uint32_t n, const atomic_bool *cancel)
{
    for (uint32_t i = 0; i < f->view->n_spans; i++) {
        eng_segment_load *load = f->view->spans[i].seg->load;
        uint64_t begin = load ? eng_trace_begin() : 0;
        if (load && !eng_segment_load_await(load, n))
            return canceled(cancel) ? -ECANCELED : -EBADMSG;
        eng_trace_end(begin, "await rows", "layer", n - 1);
    }
    return 0;
}

static void attend(eng_forward *f)
{
    uint64_t begin = eng_trace_begin();
    if (f->decode)
        eng_attn_decode(f->attn, f->view, f->layer, f->q, f->o);
    else
        eng_attn_prefill(f->attn, f->view, f->layer, f->q, f->pos, f->n, f->o);
    eng_trace_end(begin, "attention", NULL, 0);
}

/* The first n layers over the f->n tokens; leaves the residual stream in x, but for what f->added says. */
static int layers(eng_forward *f, uint32_t n, const atomic_bool *cancel)
{
    const eng_model *m = f->p.model;
    each_token(f, "embed", begin_token);
    f->added = true;
    f->new_q = f->q;
    f->new_k = f->k;
    f->new_v = f->v;
    for (f->layer = 0; f->layer < n; f->layer++) {
        if (canceled(cancel))
            return -ECANCELED;
        const eng_layer *w = f->weights = &m->layers[f->layer];
        const eng_weight *const qkv[] = {&w->wq, &w->wk, &w->wv}, *const gate_up[] = {&w->w_gate, &w->w_up};
        uint64_t begin = eng_trace_begin();
        norm_all(f, w->attn_norm, qkv, 3);
        product(f, "q k v", qkv, (float *const[]){f->q, f->k, f->v}, 3);
        each_token(f, "rotate and store", place_token);
        layer_stored(f);
        int r = await_rows(f, f->layer + 1, cancel);
        if (r < 0)
            return r;
        attend(f);
        f->post_norm = w->attn_post_norm;
        project(f, "attention output", &w->wo, f->o);
        norm_all(f, w->ffn_norm, gate_up, 2);
        f->post_norm = w->ffn_post_norm;
        feed_forward(f);
        eng_trace_end(begin, "layer", "layer", f->layer);
        atomic_fetch_add_explicit(f->p.heartbeat, 1, memory_order_relaxed);
    }
    return 0;
}

/* ---- with the GPU ------------------------------------------------------------------------------------------------ */

static void gpu_layer_done(void *ctx, uint32_t layer, const float *q, const float *k, const float *v)
{
    eng_forward *f = ctx;
    f->layer = layer;
    f->new_q = q;
    f->new_k = k;
    f->new_v = v;
    each_token(f, "store", store_token);
    layer_stored(f);
    f->n_stored = layer + 1;
}

static bool gpu_spare(void *ctx)
{
    eng_forward *f = ctx;
    return f->spare(f->gpu_ctx, f->n_stored, f->pos + f->n);
}

/* The layers that are on the GPU, from x as the others leave it. Where the plan has no output, x is what they leave. */
static int gpu_layers(eng_forward *f, const atomic_bool *cancel, float *logits, float *all_logits)
{
    if (!f->added)
        each_token(f, "add", add_token);
    f->added = true;
    f->n_stored = f->p.model->n_layer - f->gpu_plan.n_layer;
    eng_gpu_run run = {
        .view = f->view, .pos = f->pos, .n = f->n, .ids = f->ids, .x = f->x, .cs = f->cs, .cs_local = f->cs_local,
        .layer = gpu_layer_done, .spare = f->decode ? NULL : gpu_spare, .ctx = f, .cancel = cancel, .heartbeat = f->p.heartbeat, .logits = logits, .all_logits = all_logits, .out = f->x,
    };
    return f->decode ? eng_gpu_decode(f->gpu, &run, f->attn) : eng_gpu_prefill(f->gpu, &run);
}

/* All of it on the CPU, or the first part there. Returns 1 where the logits are there. */
static int all_layers(eng_forward *f, const atomic_bool *cancel, float *logits, float *all_logits)
{
    const eng_model *m = f->p.model;
    int r = layers(f, m->n_layer - f->gpu_plan.n_layer, cancel);
    if (r == 0 && f->gpu)
        r = await_rows(f, m->n_layer, cancel);
    if (r == 0 && f->gpu)
        r = gpu_layers(f, cancel, logits, all_logits);
    if (r < 0)
        return r;
    if (f->gpu && f->gpu_plan.output)
        return 1;
    norm_all(f, m->output_norm, (const eng_weight *const[]){&m->output}, 1);
    return 0;
}

/* The same, by the CPU where the GPU fails on the way: whatever the layers have stored is stored again. */
static int compute(eng_forward *f, const atomic_bool *cancel, float *logits, float *all_logits)
{
    int r = all_layers(f, cancel, logits, all_logits);
    if (r >= 0 || r == -ECANCELED || r == -EBADMSG || !f->gpu)
        return r;
    f->gpu = NULL;
    f->gpu_plan = (eng_gpu_plan){0};
    f->lost(f->gpu_ctx);
    return all_layers(f, cancel, logits, all_logits);
}

int eng_forward_prefill(eng_forward *f, const eng_view *view, const int32_t *ids, uint32_t pos, uint32_t n, const eng_query_sampling *sampling,
                        const atomic_bool *cancel, float *logits, float *all_logits)
{
    const eng_model *m = f->p.model;
    f->view = view;
    f->ids = ids;
    f->pos = pos;
    f->n = n;
    f->sampling = sampling;
    f->decode = false;
    int r = compute(f, cancel, logits, all_logits);
    if (r)
        return r < 0 ? r : 0;
    if (all_logits)
        product(f, "logits", (const eng_weight *const[]){&m->output}, (float *const[]){all_logits}, 1);
    uint64_t begin = eng_trace_begin();
    if (logits)
        eng_linear_prefill(f->linear, (const eng_weight *const[]){&m->output}, (float *const[]){logits}, 1, f->h + (size_t)(n - 1) * m->n_embd, 1);
    eng_trace_end(begin, "logits", NULL, 0);
    return 0;
}

int eng_forward_decode(eng_forward *f, const eng_view *view, int32_t id, uint32_t pos, const atomic_bool *cancel, float *logits)
{
    const eng_model *m = f->p.model;
    f->view = view;
    f->ids = &id;
    f->pos = pos;
    f->n = 1;
    f->sampling = NULL;
    eng_attn_step(f->attn, view, pos + 1);
    f->decode = true;
    int r = compute(f, cancel, logits, NULL);
    if (r)
        return r < 0 ? r : 0;
    product(f, "logits", (const eng_weight *const[]){&m->output}, (float *const[]){logits}, 1);
    return 0;
}
