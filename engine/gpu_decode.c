/* A step on the GPU. Per layer: q, k, v go to the host as soon as they are made; the GPU attends the window's keys, which it has, while the pool searches and attends the
 * rest; the host's part comes back and both are merged (arXiv 2409.10516 section 3.3). A layer whose keys are all in the window does not wait for the host at all.
 */
#include "gpu_layers_private.h"

#include <errno.h>
#include <math.h>

/* The window's row of a position. */
static uint32_t row_of(uint32_t pos)
{
    return pos < ENG_GPU_SINK ? pos : ENG_GPU_SINK + (pos - ENG_GPU_SINK) % ENG_GPU_LOCAL;
}

/* The first position behind the sinks that is in the windows when they end at `end`. */
static uint32_t window_begin(uint32_t end)
{
    return end > ENG_GPU_SINK + ENG_GPU_LOCAL ? end - ENG_GPU_LOCAL : ENG_GPU_SINK;
}

/* Positions [lo, hi) of every layer to its window. */
static void load_rows(eng_gpu *u, uint32_t lo, uint32_t hi)
{
    for (uint32_t i = 0; i < u->plan.n_layer; i++)
        for (uint32_t at = lo, n; at < hi; at += n) {
            uint32_t row = row_of(at), end = ENG_GPU_SINK + ENG_GPU_LOCAL;
            n = hi - at < GPUL_BLOCK ? hi - at : GPUL_BLOCK;
            n = n < end - row ? n : end - row; /* up to where rows begin again */
            gpul_slot *slot = &u->slots[u->slot];
            u->slot = (u->slot + 1) % GPUL_SLOTS;
            gpul_stage(u, slot, u->first + i, at, at + n);
            gpul_send(u, slot, &u->layers[i].window, 0, row, n);
            gpu_record(u->g, slot->copied, GPU_TO_DEVICE);
        }
}

/* The windows of another session, or of one whose prompt was just computed. */
static void load_windows(eng_gpu *u, uint32_t end)
{
    gpu_record(u->g, u->turned[0], GPU_COMPUTE); /* steps before read them */
    gpu_wait(u->g, GPU_TO_DEVICE, u->turned[0]);
    load_rows(u, 0, end < ENG_GPU_SINK ? end : ENG_GPU_SINK);
    if (end > ENG_GPU_SINK)
        load_rows(u, window_begin(end), end);
    gpu_record(u->g, u->turned[0], GPU_TO_DEVICE);
    gpu_wait(u->g, GPU_COMPUTE, u->turned[0]);
}

/* Rows of [0, sink) and [local, end). */
static uint32_t runs_of(uint32_t sink, uint32_t local, uint32_t end, gpu_rows runs[3])
{
    uint32_t n = 0, first = row_of(local), last = row_of(end - 1) + 1;
    if (sink)
        runs[n++] = (gpu_rows){0, sink};
    if (local == end)
        return n;
    if (first < last) {
        runs[n++] = (gpu_rows){first, last};
    } else {
        runs[n++] = (gpu_rows){first, ENG_GPU_SINK + ENG_GPU_LOCAL};
        runs[n++] = (gpu_rows){ENG_GPU_SINK, last};
    }
    return n;
}

/* Hands q, k, v of the layers [from, to) to the host's segments; they have been copied. */
static void store_layers(eng_gpu *u, uint32_t from, uint32_t to)
{
    const eng_gpu_run *run = u->run;
    for (uint32_t i = from; i < to; i++) {
        const float *q = u->host_layers + (size_t)i * (u->n_q + 2 * u->n_kv);
        run->layer(run->ctx, u->first + i, q, q + u->n_q, q + u->n_q + u->n_kv);
    }
}

/* The host's part of the layer, behind the window's: *io_stored layers have been stored before. */
static int attend_rest(eng_gpu *u, eng_attn *attn, uint32_t i, uint32_t *io_stored)
{
    size_t heads = u->p.model->n_head, d = u->p.model->head_dim, at = u->n_parts * heads;
    int r = gpu_finish(u->g, u->copied[0]);
    if (r < 0)
        return r;
    store_layers(u, *io_stored, i + 1);
    *io_stored = i + 1;
    eng_attn_decode_rest(attn, u->run->view, u->first + i, u->host_layers + (size_t)i * (u->n_q + 2 * u->n_kv), u->host_m, u->host_l, u->host_o);
    gpu_copy(u->g, GPU_COMPUTE, u->parts.m + at, u->host_m, heads * sizeof(float));
    gpu_copy(u->g, GPU_COMPUTE, u->parts.l + at, u->host_l, heads * sizeof(float));
    return gpu_copy(u->g, GPU_COMPUTE, u->parts.o + at * d, u->host_o, heads * d * sizeof(float));
}

static int attend(eng_gpu *u, eng_attn *attn, uint32_t i, const float *q, uint32_t *io_stored)
{
    const eng_kv_shape *s = u->p.shape;
    uint32_t layer = u->first + i, end = u->run->pos + 1, sink = end < ENG_GPU_SINK ? end : ENG_GPU_SINK, local = window_begin(end);
    gpu_rows runs[3];
    local = local < end ? local : end;
    bool rest = eng_attn_share(attn, layer, &sink, &local);
    uint32_t n_runs = runs_of(sink, local, end, runs), n_parts = u->n_parts;
    uint32_t mark = gpul_mark_begin(u, GPU_COMPUTE, "window", layer);
    gpu_attend(u->g, &u->parts, n_parts, q, 1 / sqrtf((float)s->head_dim), &u->layers[i].window, runs, n_runs);
    gpul_mark_end(u, mark);
    if (rest) {
        int r = attend_rest(u, attn, i, io_stored);
        if (r < 0)
            return r;
        n_parts++;
    } else {
        eng_attn_count_window(attn);
    }
    return gpu_merge(u->g, u->o, &u->parts, n_parts, s->n_head_kv * s->group, s->head_dim);
}

static int layer_step(eng_gpu *u, eng_attn *attn, uint32_t i, uint32_t *io_stored)
{
    const eng_model *m = u->p.model;
    const gpul_layer *l = &u->layers[i];
    size_t n = u->n_q + 2 * (size_t)u->n_kv;
    float *q = u->qkv[0], *k = q + u->n_q, *v = k + u->n_kv;
    uint32_t layer = u->first + i, mark = gpul_mark_begin(u, GPU_COMPUTE, "q k v", layer);
    gpu_rms_norm(u->g, u->h, u->x, l->attn_norm, 1, m->n_embd, m->rms_eps);
    gpu_wait(u->g, GPU_COMPUTE, u->copied[0]); /* the layer's before */
    gpu_matvec(u->g, (const gpu_weight *const[]){&l->wq, &l->wk, &l->wv}, (float *const[]){q, k, v}, 3, u->h, false);
    gpul_turn(u, l, layer, q, k, v, 1);
    gpul_mark_end(u, mark);
    gpu_record(u->g, u->turned[0], GPU_COMPUTE);
    gpu_wait(u->g, GPU_TO_HOST, u->turned[0]);
    mark = gpul_mark_begin(u, GPU_TO_HOST, "q k v", layer);
    gpu_copy(u->g, GPU_TO_HOST, u->host_layers + i * n, q, n * sizeof *q);
    gpul_mark_end(u, mark);
    gpu_record(u->g, u->copied[0], GPU_TO_HOST);
    gpu_kv_store(u->g, &l->window, k, v, row_of(u->run->pos), 1);
    int r = attend(u, attn, i, q, io_stored);
    mark = gpul_mark_begin(u, GPU_COMPUTE, "out, gate, up, down", layer);
    gpul_add_block(u, true, &l->wo, u->o, l->attn_post_norm);
    gpu_rms_norm(u->g, u->h, u->x, l->ffn_norm, 1, m->n_embd, m->rms_eps);
    gpu_matvec(u->g, (const gpu_weight *const[]){&l->gate, &l->up}, (float *const[]){u->gate, u->up}, 2, u->h, false);
    gpu_gate(u->g, u->gate, u->gate, u->up, m->n_ff, m->act == ENG_GELU_TANH);
    gpul_add_block(u, true, &l->down, u->gate, l->ffn_post_norm);
    gpul_mark_end(u, mark);
    atomic_fetch_add_explicit(u->run->heartbeat, 1, memory_order_relaxed);
    return r;
}

int eng_gpu_decode(eng_gpu *u, const eng_gpu_run *run, eng_attn *attn)
{
    uint32_t stored = 0;
    int r = gpul_begin(u, run);
    if (u->window_end != run->pos)
        load_windows(u, run->pos);
    u->window_end = run->pos;
    for (uint32_t i = 0; r == 0 && i < u->plan.n_layer; i++)
        r = gpul_canceled(run) ? -ECANCELED : layer_step(u, attn, i, &stored);
    if (r == 0)
        r = gpu_finish(u->g, u->copied[0]);
    if (r == 0)
        store_layers(u, stored, u->plan.n_layer);
    if (r == 0)
        r = gpul_end(u, true);
    if (r < 0)
        gpu_drain(u->g);
    else
        u->window_end = run->pos + 1;
    gpul_trace_end(u);
    return r;
}
