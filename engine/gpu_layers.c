/* What goes to the GPU and how much it takes; what prefill and decode share. */
#include "gpu_layers_private.h"

#include "text.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MIB(bytes) ((double)(bytes) / 1048576)

/* The file's types are the GPU's (gpu.h). */
_Static_assert((int)GPU_F32 == (int)ENG_F32 && (int)GPU_F16 == (int)ENG_F16 && (int)GPU_BF16 == (int)ENG_BF16 && (int)GPU_Q8_0 == (int)ENG_Q8_0 &&
                   (int)GPU_Q4_0 == (int)ENG_Q4_0 && (int)GPU_Q4_1 == (int)ENG_Q4_1 && (int)GPU_Q5_0 == (int)ENG_Q5_0 && (int)GPU_Q5_1 == (int)ENG_Q5_1 &&
                   (int)GPU_IQ4_NL == (int)ENG_IQ4_NL && (int)GPU_Q2_K == (int)ENG_Q2_K && (int)GPU_Q3_K == (int)ENG_Q3_K && (int)GPU_Q4_K == (int)ENG_Q4_K &&
                   (int)GPU_Q5_K == (int)ENG_Q5_K && (int)GPU_Q6_K == (int)ENG_Q6_K && (int)GPU_IQ4_XS == (int)ENG_IQ4_XS &&
                   (int)GPU_TYPE_COUNT == (int)ENG_TYPE_COUNT,
               "types of weights");

/* ---- memory -------------------------------------------------------------------------------------------------------- */

/* Takes device memory; where there is no device (u->g NULL) it only counts. */
typedef struct {
    eng_gpu *u;
    size_t bytes;
    int r;
} taker;

static bool keep(void ***list, uint32_t *n, uint32_t *cap, void *p)
{
    if (*n == *cap) {
        void **more = realloc(*list, (*cap * 2 + 64) * sizeof *more);
        if (!more)
            return false;
        *list = more;
        *cap = *cap * 2 + 64;
    }
    (*list)[(*n)++] = p;
    return true;
}

static void *take(taker *t, size_t bytes)
{
    enum { ALIGN = 256 };
    eng_gpu *u = t->u;
    void *p = NULL;
    t->bytes += (bytes + ALIGN - 1) & ~(size_t)(ALIGN - 1);
    if (!u->g || t->r < 0)
        return NULL;
    t->r = gpu_alloc(u->g, bytes, &p);
    if (t->r == 0 && !keep(&u->owned, &u->n_owned, &u->cap_owned, p)) {
        gpu_free(u->g, p);
        t->r = -ENOMEM;
    }
    return t->r == 0 ? p : NULL;
}

static void *pin(taker *t, size_t bytes)
{
    eng_gpu *u = t->u;
    void *p = NULL;
    if (!u->g || t->r < 0)
        return NULL;
    t->r = gpu_pin(u->g, bytes, &p);
    if (t->r == 0 && !keep(&u->pinned, &u->n_pinned, &u->cap_pinned, p)) {
        gpu_unpin(u->g, p);
        t->r = -ENOMEM;
    }
    return t->r == 0 ? p : NULL;
}

static void *upload(taker *t, const void *src, size_t bytes)
{
    void *p = src ? take(t, bytes) : NULL;
    if (p)
        t->r = gpu_upload(t->u->g, p, src, bytes);
    return p;
}

static void upload_weight(taker *t, const eng_weight *w, gpu_weight *ret)
{
    *ret = (gpu_weight){upload(t, w->data, w->row_bytes * w->rows), w->row_bytes, w->rows, w->cols, (gpu_type)w->type};
}

static float *upload_floats(taker *t, const float *x, size_t n)
{
    return upload(t, x, n * sizeof *x);
}

static void take_kv(taker *t, gpu_kv *kv, uint32_t cap)
{
    const eng_kv_shape *s = t->u->p.shape;
    size_t bytes = (size_t)s->n_head_kv * cap * s->head_dim * sizeof(uint16_t);
    *kv = (gpu_kv){take(t, bytes), take(t, bytes), s->n_head_kv, s->group, s->head_dim, cap, s->type_k == ENG_KV_BF16 ? GPU_KV_BF16 : GPU_KV_F16,
                   s->type_v == ENG_KV_BF16 ? GPU_KV_BF16 : GPU_KV_F16};
}

static void take_parts(taker *t, gpu_parts *parts, size_t n)
{
    const eng_kv_shape *s = t->u->p.shape;
    size_t heads = n * s->n_head_kv * s->group;
    parts->m = take(t, heads * sizeof(float));
    parts->l = take(t, heads * sizeof(float));
    parts->o = take(t, heads * s->head_dim * sizeof(float));
}

static void take_layer(taker *t, uint32_t i)
{
    eng_gpu *u = t->u;
    const eng_model *m = u->p.model;
    const eng_layer *w = &m->layers[u->first + i];
    gpul_layer *l = &u->layers[i];
    upload_weight(t, &w->wq, &l->wq);
    upload_weight(t, &w->wk, &l->wk);
    upload_weight(t, &w->wv, &l->wv);
    upload_weight(t, &w->wo, &l->wo);
    upload_weight(t, &w->w_gate, &l->gate);
    upload_weight(t, &w->w_up, &l->up);
    upload_weight(t, &w->w_down, &l->down);
    l->attn_norm = upload_floats(t, w->attn_norm, m->n_embd);
    l->bq = upload_floats(t, w->bq, u->n_q);
    l->bk = upload_floats(t, w->bk, u->n_kv);
    l->bv = upload_floats(t, w->bv, u->n_kv);
    l->q_norm = upload_floats(t, w->q_norm, m->head_dim);
    l->k_norm = upload_floats(t, w->k_norm, m->head_dim);
    l->attn_post_norm = upload_floats(t, w->attn_post_norm, m->n_embd);
    l->ffn_norm = upload_floats(t, w->ffn_norm, m->n_embd);
    l->ffn_post_norm = upload_floats(t, w->ffn_post_norm, m->n_embd);
}

static void take_output(taker *t)
{
    eng_gpu *u = t->u;
    const eng_model *m = u->p.model;
    upload_weight(t, &m->tok_embd, &u->embd);
    if (m->output.data == m->tok_embd.data)
        u->output = u->embd;
    else
        upload_weight(t, &m->output, &u->output);
    u->output_norm = upload_floats(t, m->output_norm, m->n_embd);
    u->logits = take(t, m->n_vocab * sizeof(float));
    u->host_logits = pin(t, m->n_vocab * sizeof(float));
}

static void take_slot(taker *t, gpul_slot *s)
{
    eng_gpu *u = t->u;
    take_kv(t, &s->kv, GPUL_BLOCK);
    s->pinned = pin(t, (size_t)2 * GPUL_BLOCK * u->n_kv * sizeof *s->pinned);
    if (u->g && t->r == 0)
        t->r = gpu_event_new(u->g, false, &s->copied);
    if (u->g && t->r == 0)
        t->r = gpu_event_new(u->g, false, &s->used);
}

static uint32_t max2(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

static void reserve(taker *t)
{
    eng_gpu *u = t->u;
    const eng_model *m = u->p.model;
    uint32_t cols = max2(max2(m->n_embd, m->n_ff), u->n_q);
    size_t elements = (size_t)max2(m->n_ff, u->n_q) * m->n_embd;
    t->bytes += gpu_reserve_bytes(cols, elements, u->p.n_chunk);
    if (u->g && t->r == 0)
        t->r = gpu_reserve(u->g, cols, elements, u->p.n_chunk);
}

static void take_scratch(taker *t)
{
    eng_gpu *u = t->u;
    const eng_model *m = u->p.model;
    const eng_kv_shape *s = u->p.shape;
    size_t n = u->p.n_chunk, f = sizeof(float), qkv = u->n_q + 2 * (size_t)u->n_kv, heads = m->n_head;
    reserve(t);
    u->x = take(t, n * m->n_embd * f);
    u->h = take(t, n * m->n_embd * f);
    u->o = take(t, n * u->n_q * f);
    u->gate = take(t, n * m->n_ff * f);
    u->up = take(t, n * m->n_ff * f);
    u->cs = take(t, n * m->rope_dim * f);
    u->cs_local = take(t, n * m->rope_dim * f);
    u->ids = take(t, n * sizeof *u->ids);
    u->n_parts = gpu_attend_parts(ENG_GPU_SINK + ENG_GPU_LOCAL);
    take_parts(t, &u->state, n);
    take_parts(t, &u->parts, u->n_parts + 1);
    take_kv(t, &u->chunk, (u->p.n_chunk + 2 * GPU_TILE - 1) / GPU_TILE * GPU_TILE);
    for (int i = 0; i < GPUL_SLOTS; i++)
        take_slot(t, &u->slots[i]);
    for (int i = 0; i < 2; i++) {
        u->qkv[i] = take(t, n * qkv * f);
        u->host_qkv[i] = pin(t, n * qkv * f);
    }
    u->host_x = pin(t, n * m->n_embd * f);
    u->host_ids = pin(t, n * sizeof *u->host_ids);
    u->host_cs = pin(t, 2 * n * m->rope_dim * f);
    u->host_layers = pin(t, u->plan.n_layer * qkv * f);
    u->host_m = pin(t, heads * f);
    u->host_l = pin(t, heads * f);
    u->host_o = pin(t, heads * s->head_dim * f);
    gpu_event **events[] = {&u->turned[0], &u->turned[1], &u->copied[0], &u->copied[1], &u->done};
    for (size_t i = 0; i < sizeof events / sizeof *events && u->g && t->r == 0; i++)
        t->r = gpu_event_new(u->g, false, events[i]);
}

/* Everything, layer after layer; fills plan with what it takes. */
static int take_all(eng_gpu *u, eng_gpu_plan *plan)
{
    taker t = {.u = u};
    take_scratch(&t);
    plan->scratch = t.bytes;
    t.bytes = 0;
    for (uint32_t i = 0; i < u->plan.n_layer; i++)
        take_layer(&t, i);
    if (u->plan.output)
        take_output(&t);
    plan->weights = t.bytes;
    t.bytes = 0;
    for (uint32_t i = 0; i < u->plan.n_layer; i++)
        take_kv(&t, &u->layers[i].window, ENG_GPU_SINK + ENG_GPU_LOCAL);
    plan->window = t.bytes;
    return t.r;
}

static int prepare(eng_gpu *u, const eng_gpu_params *p, const eng_gpu_plan *plan)
{
    const eng_model *m = p->model;
    u->p = *p;
    u->plan = *plan;
    u->first = m->n_layer - plan->n_layer;
    u->n_q = m->n_head * m->head_dim;
    u->n_kv = m->n_head_kv * m->head_dim;
    u->q_scale = m->attn_scale * sqrtf((float)m->head_dim);
    u->window_end = UINT32_MAX;
    u->layers = calloc(plan->n_layer ? plan->n_layer : 1, sizeof *u->layers);
    return u->layers ? 0 : -ENOMEM;
}

/* ---- plan ---------------------------------------------------------------------------------------------------------- */

static int check_supported(const eng_gpu_params *p, char *err, size_t errlen)
{
    enum { MAX_GROUP = 16, MAX_DIM = 256, STEP_DIM = 8 };
    const eng_kv_shape *s = p->shape;
    if (p->model->n_expert)
        return eng_fail(err, errlen, -ENOTSUP, "mixtures of experts are computed by the CPU");
    if (s->group > MAX_GROUP || s->head_dim > MAX_DIM || s->head_dim % STEP_DIM)
        return eng_fail(err, errlen, -ENOTSUP, "%u query heads of size %u to a key are computed by the CPU", s->group, s->head_dim);
    if (s->type_k == ENG_KV_F32 || s->type_v == ENG_KV_F32)
        return eng_fail(err, errlen, -ENOTSUP, "float32 keys and values are attended by the CPU; with f16, bf16 or q8_0 (-ctk, -ctv) the GPU can");
    return 0;
}

/* What so many layers take. */
static int measure(const eng_gpu_params *p, uint32_t n_layer, bool output, eng_gpu_plan *ret)
{
    eng_gpu u = {0};
    eng_gpu_plan plan = {.n_layer = n_layer, .output = output};
    int r = prepare(&u, p, &plan);
    if (r == 0)
        r = take_all(&u, &plan);
    free(u.layers);
    if (r == 0)
        *ret = plan;
    return r;
}

int eng_gpu_plan_make(const eng_gpu_params *p, const gpu_info *info, int32_t wanted, eng_gpu_plan *ret, char *err, size_t errlen)
{
    enum { SPARE = 256 << 20 }; /* cuBLAS, and what else runs on it */
    uint32_t n_layer = p->model->n_layer, most = n_layer + 1, n = wanted < 0 || (uint32_t)wanted > most ? most : (uint32_t)wanted, asked = n;
    int r = check_supported(p, err, errlen);
    eng_gpu_plan plan = {0};
    size_t bytes = 0;
    for (; r == 0 && n; n--) {
        r = measure(p, n < most ? n : n_layer, n == most, &plan);
        if (r < 0)
            return eng_fail(err, errlen, r, "out of memory");
        size_t takes = plan.weights + plan.window + plan.scratch;
        bytes = bytes ? bytes : takes;
        if (takes + SPARE <= info->free)
            break;
        plan = (eng_gpu_plan){0};
    }
    if (r == 0 && wanted > 0 && n < asked)
        return eng_fail(err, errlen, -ENOMEM, "%u layers%s and their window take %.0f MiB, and of %s %.0f are free, of which %d are left alone: %u fit",
                        asked < most ? asked : n_layer, asked < most ? "" : ", the output", MIB(bytes), info->name, MIB(info->free), SPARE >> 20, n);
    if (r == 0)
        *ret = plan;
    return r;
}

int eng_gpu_new(gpu_context *g, const eng_gpu_params *p, const eng_gpu_plan *plan, eng_gpu **ret)
{
    eng_gpu_plan took = *plan;
    eng_gpu *u = calloc(1, sizeof *u);
    if (!u)
        return -ENOMEM;
    u->g = g;
    int r = prepare(u, p, plan);
    if (r == 0)
        r = take_all(u, &took);
    if (r == 0)
        r = gpul_trace_open(u);
    if (r < 0) {
        eng_gpu_free(u);
        return r;
    }
    *ret = u;
    return 0;
}

void eng_gpu_free(eng_gpu *u)
{
    if (!u)
        return;
    gpu_drain(u->g);
    gpul_trace_close(u);
    gpu_event *events[] = {u->turned[0], u->turned[1], u->copied[0], u->copied[1], u->done};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        gpu_event_free(u->g, events[i]);
    for (int i = 0; i < GPUL_SLOTS; i++) {
        gpu_event_free(u->g, u->slots[i].copied);
        gpu_event_free(u->g, u->slots[i].used);
    }
    for (uint32_t i = 0; i < u->n_owned; i++)
        gpu_free(u->g, u->owned[i]);
    for (uint32_t i = 0; i < u->n_pinned; i++)
        gpu_unpin(u->g, u->pinned[i]);
    free(u->owned);
    free(u->pinned);
    free(u->layers);
    free(u);
}

int eng_gpu_shift_keys(eng_gpu *u, const float *shift)
{
    taker t = {.u = u};
    for (uint32_t i = 0; i < u->plan.n_layer; i++)
        u->layers[i].key_shift = upload_floats(&t, shift + (size_t)(u->first + i) * u->n_kv, u->n_kv);
    return t.r;
}

/* ---- what a prefill and a step share -------------------------------------------------------------------------------- */

bool gpul_canceled(const eng_gpu_run *run)
{
    return run->cancel && atomic_load_explicit(run->cancel, memory_order_relaxed);
}

int gpul_finish(eng_gpu *u, gpu_event *e)
{
    while (u->run->spare && gpu_happened(u->g, e) == 0 && u->run->spare(u->run->ctx))
        ;
    return gpu_finish(u->g, e);
}

int gpul_begin(eng_gpu *u, const eng_gpu_run *run)
{
    const eng_model *m = u->p.model;
    size_t cs = (size_t)run->n * m->rope_dim * sizeof(float), x = (size_t)run->n * m->n_embd * sizeof(float);
    u->run = run;
    gpul_trace_start(u);
    gpu_finish(u->g, u->done); /* what is pinned may be written again */
    memcpy(u->host_cs, run->cs, cs);
    gpu_copy(u->g, GPU_COMPUTE, u->cs, u->host_cs, cs);
    if (m->window) {
        memcpy((char *)u->host_cs + cs, run->cs_local, cs);
        gpu_copy(u->g, GPU_COMPUTE, u->cs_local, (char *)u->host_cs + cs, cs);
    }
    if (u->plan.output) {
        memcpy(u->host_ids, run->ids, run->n * sizeof *run->ids);
        gpu_copy(u->g, GPU_COMPUTE, u->ids, u->host_ids, run->n * sizeof *run->ids);
        return gpu_embed(u->g, u->x, &u->embd, u->ids, run->n, m->embd_scale);
    }
    memcpy(u->host_x, run->x, x);
    return gpu_copy(u->g, GPU_COMPUTE, u->x, u->host_x, x);
}

/* Logits of the normed row h. */
static int one_row(eng_gpu *u, bool decode, const float *h, float *to)
{
    size_t n = u->output.rows;
    if (decode)
        gpu_matvec(u->g, (const gpu_weight *const[]){&u->output}, (float *const[]){u->logits}, 1, h, false);
    else
        gpu_matmul(u->g, &u->output, u->logits, h, 1, false);
    gpu_copy(u->g, GPU_COMPUTE, u->host_logits, u->logits, n * sizeof *to);
    gpu_record(u->g, u->done, GPU_COMPUTE);
    int r = gpul_finish(u, u->done);
    if (r == 0)
        memcpy(to, u->host_logits, n * sizeof *to);
    return r;
}

int gpul_end(eng_gpu *u, bool decode)
{
    const eng_gpu_run *run = u->run;
    uint32_t n_embd = u->p.model->n_embd;
    int r = 0;
    if (!u->plan.output) {
        size_t bytes = (size_t)run->n * n_embd * sizeof(float);
        gpu_copy(u->g, GPU_COMPUTE, u->host_x, u->x, bytes);
        gpu_record(u->g, u->done, GPU_COMPUTE);
        r = gpul_finish(u, u->done);
        if (r == 0)
            memcpy(run->out, u->host_x, bytes);
        return r;
    }
    if (run->logits || run->all_logits)
        gpu_rms_norm(u->g, u->h, u->x, u->output_norm, run->n, n_embd, u->p.model->rms_eps);
    for (uint32_t i = 0; r == 0 && run->all_logits && i < run->n; i++)
        r = one_row(u, decode, u->h + (size_t)i * n_embd, run->all_logits + (size_t)i * u->output.rows);
    if (r == 0 && run->logits)
        r = one_row(u, decode, u->h + (size_t)(run->n - 1) * n_embd, run->logits);
    gpu_record(u->g, u->done, GPU_COMPUTE);
    return r ? r : gpu_status(u->g);
}

/* Heads of n tokens: normed, then rotated. */
static void turn_heads(eng_gpu *u, float *x, const float *norm, const float *cs, uint32_t n, uint32_t heads)
{
    const eng_model *m = u->p.model;
    if (norm)
        gpu_rms_norm(u->g, x, x, norm, n * heads, m->head_dim, m->rms_eps);
    if (cs)
        gpu_rope(u->g, x, cs, n, heads, m->head_dim, m->rope_dim, m->rope_pairs == ENG_ROPE_HALVES);
}

void gpul_turn(eng_gpu *u, const gpul_layer *l, uint32_t layer, float *q, float *k, float *v, uint32_t n)
{
    const eng_model *m = u->p.model;
    eng_layer_rope rope = m->layers[layer].rope;
    const float *cs = rope == ENG_LAYER_NO_ROPE ? NULL : rope == ENG_LAYER_ROPE_LOCAL ? u->cs_local : u->cs;
    if (l->bq) {
        gpu_add_row(u->g, q, l->bq, n, u->n_q);
        gpu_add_row(u->g, k, l->bk, n, u->n_kv);
        gpu_add_row(u->g, v, l->bv, n, u->n_kv);
    }
    turn_heads(u, q, l->q_norm, cs, n, m->n_head);
    turn_heads(u, k, l->k_norm, cs, n, m->n_head_kv);
    if (fabsf(u->q_scale - 1) >= 1e-6f)
        gpu_scale(u->g, q, (size_t)n * u->n_q, u->q_scale);
    if (l->key_shift)
        gpu_add_row(u->g, k, l->key_shift, n, u->n_kv);
    /* What is attended here is what the segments give back later; f16 and bf16 are rounded when they are stored. */
    const eng_kv_shape *s = u->p.shape;
    if (s->type_k == ENG_KV_Q8_0)
        gpu_round_q8(u->g, k, n * s->n_head_kv, s->head_dim);
    if (s->type_v == ENG_KV_Q8_0)
        gpu_round_q8(u->g, v, n * s->n_head_kv, s->head_dim);
}

void gpul_add_block(eng_gpu *u, bool decode, const gpu_weight *w, const float *in, const float *post_norm)
{
    const eng_model *m = u->p.model;
    uint32_t n = u->run->n;
    float *const to = post_norm ? u->h : u->x;
    if (decode)
        gpu_matvec(u->g, &w, &to, 1, in, !post_norm);
    else
        gpu_matmul(u->g, w, to, in, n, !post_norm);
    if (!post_norm)
        return;
    gpu_rms_norm(u->g, u->h, u->h, post_norm, n, m->n_embd, m->rms_eps);
    gpu_add(u->g, u->x, u->h, (size_t)n * m->n_embd);
}

/* ---- keys and values on their way ----------------------------------------------------------------------------------- */

enum { STAGE_ROWS = 256 };

/* Rows of a segment in the GPU's type. */
static void stage_rows(const eng_gpu *u, uint16_t *to, eng_kv_type type, const uint8_t *from, size_t stride, uint32_t n)
{
    enum { MAX_DIM = 256 };
    uint32_t d = u->p.shape->head_dim;
    float x[MAX_DIM];
    if (type != ENG_KV_Q8_0) {
        memcpy(to, from, (size_t)n * d * sizeof *to); /* rows follow each other */
        return;
    }
    for (uint32_t i = 0; i < n; i++, from += stride, to += d) {
        u->p.kernels->kv_load[type](from, x, d);
        u->p.kernels->kv_store[ENG_KV_F16](x, to, d);
    }
}

/* Some rows of a head, keys or values. */
static void stage_task(void *ctx, uint32_t task, uint32_t worker)
{
    (void)worker;
    eng_gpu *u = ctx;
    const eng_kv_shape *s = u->p.shape;
    const eng_view *view = u->run->view;
    uint32_t parts = (u->stage_hi - u->stage_lo + STAGE_ROWS - 1) / STAGE_ROWS, head = task / parts % s->n_head_kv, values = task / parts / s->n_head_kv;
    uint32_t lo = u->stage_lo + task % parts * STAGE_ROWS, hi = u->stage_hi - lo > STAGE_ROWS ? lo + STAGE_ROWS : u->stage_hi;
    uint16_t *to = u->stage_to + (((size_t)values * s->n_head_kv + head) * GPUL_BLOCK + (lo - u->stage_lo)) * s->head_dim;
    for (uint32_t span = eng_view_find(view, lo); lo < hi; span++) {
        const eng_span *sp = &view->spans[span];
        uint32_t end = sp->hi < hi ? sp->hi : hi, row = lo - sp->seg->start;
        if (values)
            stage_rows(u, to, s->type_v, eng_segment_v(sp->seg, u->stage_layer, head, row), s->row_v, end - lo);
        else
            stage_rows(u, to, s->type_k, eng_segment_k(sp->seg, u->stage_layer, head, row), s->row_k, end - lo);
        to += (size_t)(end - lo) * s->head_dim;
        lo = end;
    }
}

void gpul_stage(eng_gpu *u, gpul_slot *slot, uint32_t layer, uint32_t lo, uint32_t hi)
{
    gpul_finish(u, slot->copied);
    u->stage_layer = layer;
    u->stage_lo = lo;
    u->stage_hi = hi;
    u->stage_to = slot->pinned;
    eng_pool_run(u->p.pool, "stage", stage_task, u, (hi - lo + STAGE_ROWS - 1) / STAGE_ROWS * u->p.shape->n_head_kv * 2);
}

void gpul_send(eng_gpu *u, const gpul_slot *slot, const gpu_kv *kv, uint32_t from, uint32_t to, uint32_t n)
{
    size_t d = kv->d;
    for (uint32_t head = 0; head < kv->n_head_kv; head++) {
        const uint16_t *k = slot->pinned + ((size_t)head * GPUL_BLOCK + from) * d, *v = k + (size_t)kv->n_head_kv * GPUL_BLOCK * d;
        size_t at = ((size_t)head * kv->cap + to) * d;
        gpu_copy(u->g, GPU_TO_DEVICE, (uint16_t *)kv->k + at, k, n * d * sizeof *k);
        gpu_copy(u->g, GPU_TO_DEVICE, (uint16_t *)kv->v + at, v, n * d * sizeof *v);
    }
}
