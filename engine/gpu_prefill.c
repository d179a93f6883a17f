/* Prefill on the GPU: a chunk's queries over the keys before it, which stream in from the segments in blocks, and over its own.
 *
 * Per layer, GPU_COMPUTE makes q, k, v; GPU_TO_HOST takes them to the host, which stores them in the segments while the GPU is at the next layer; GPU_TO_DEVICE brings a
 * block while the GPU attends the one before. Blocks begin at multiples of GPU_TILE, and the chunk's own keys are attended from the begin of the tile that its first token
 * is in, so a token's result does not depend on where chunks end (gpu.h).
 */
#include "gpu_layers_private.h"

#include <errno.h>
#include <math.h>

/* The keys of [base, pos) that share a tile with the chunk's first: to the head of the chunk's own rows. */
static void bring_head(eng_gpu *u, uint32_t layer, uint32_t base)
{
    gpul_slot *slot = &u->slots[u->slot];
    u->slot = (u->slot + 1) % GPUL_SLOTS;
    gpul_stage(u, slot, layer, base, u->run->pos);
    gpul_send(u, slot, &u->chunk, 0, 0, u->run->pos - base);
    gpu_record(u->g, slot->copied, GPU_TO_DEVICE);
    gpu_wait(u->g, GPU_COMPUTE, slot->copied);
}

static void attend_before(eng_gpu *u, uint32_t layer, const gpu_queries *q, uint32_t base)
{
    uint32_t lo = q->window && u->run->pos >= q->window ? (u->run->pos - q->window + 1) / GPU_TILE * GPU_TILE : 0;
    for (; lo < base; lo += GPUL_BLOCK) {
        uint32_t n = base - lo < GPUL_BLOCK ? base - lo : GPUL_BLOCK;
        gpul_slot *slot = &u->slots[u->slot];
        u->slot = (u->slot + 1) % GPUL_SLOTS;
        gpul_stage(u, slot, layer, lo, lo + n);
        gpu_wait(u->g, GPU_TO_DEVICE, slot->used);
        uint32_t mark = gpul_mark_begin(u, GPU_TO_DEVICE, "keys and values", layer);
        gpul_send(u, slot, &slot->kv, 0, 0, n);
        gpul_mark_end(u, mark);
        gpu_record(u->g, slot->copied, GPU_TO_DEVICE);
        gpu_wait(u->g, GPU_COMPUTE, slot->copied);
        mark = gpul_mark_begin(u, GPU_COMPUTE, "attention", layer);
        gpu_attend_block(u->g, &u->state, q, &slot->kv, lo, n);
        gpul_mark_end(u, mark);
        gpu_record(u->g, slot->used, GPU_COMPUTE);
    }
}

static void attend(eng_gpu *u, uint32_t layer, const float *q, const float *k, const float *v)
{
    const eng_gpu_run *run = u->run;
    const eng_kv_shape *s = u->p.shape;
    uint32_t base = run->pos / GPU_TILE * GPU_TILE, head = run->pos - base;
    gpu_queries queries = {q, 1 / sqrtf((float)s->head_dim), run->pos, run->n, eng_kv_window(s, layer)};
    if (head) {
        gpu_wait(u->g, GPU_TO_DEVICE, u->done); /* the chunk's rows, of the layer before: recorded below */
        bring_head(u, layer, base);
    }
    gpu_kv_store(u->g, &u->chunk, k, v, head, run->n);
    gpu_attend_begin(u->g, &u->state, &u->chunk, run->n);
    attend_before(u, layer, &queries, base);
    uint32_t mark = gpul_mark_begin(u, GPU_COMPUTE, "attention", layer);
    gpu_attend_block(u->g, &u->state, &queries, &u->chunk, base, head + run->n);
    gpul_mark_end(u, mark);
    gpu_record(u->g, u->done, GPU_COMPUTE);
    gpu_attend_end(u->g, u->o, &u->state, &u->chunk, run->n);
}

static void queue_layer(eng_gpu *u, uint32_t i)
{
    const eng_model *m = u->p.model;
    const gpul_layer *l = &u->layers[i];
    uint32_t n = u->run->n, turn = i % 2, layer = u->first + i;
    float *q = u->qkv[turn], *k = q + (size_t)n * u->n_q, *v = k + (size_t)n * u->n_kv;
    uint32_t mark = gpul_mark_begin(u, GPU_COMPUTE, "q k v", layer);
    gpu_rms_norm(u->g, u->h, u->x, l->attn_norm, n, m->n_embd, m->rms_eps);
    gpu_matmul(u->g, &l->wq, q, u->h, n, false);
    gpu_matmul(u->g, &l->wk, k, u->h, n, false);
    gpu_matmul(u->g, &l->wv, v, u->h, n, false);
    gpul_turn(u, l, layer, q, k, v, n);
    gpul_mark_end(u, mark);
    gpu_record(u->g, u->turned[turn], GPU_COMPUTE);
    gpu_wait(u->g, GPU_TO_HOST, u->turned[turn]);
    mark = gpul_mark_begin(u, GPU_TO_HOST, "q k v", layer);
    gpu_copy(u->g, GPU_TO_HOST, u->host_qkv[turn], q, (size_t)n * (u->n_q + 2 * u->n_kv) * sizeof *q);
    gpul_mark_end(u, mark);
    gpu_record(u->g, u->copied[turn], GPU_TO_HOST);
    attend(u, layer, q, k, v);
    mark = gpul_mark_begin(u, GPU_COMPUTE, "out, gate, up, down", layer);
    gpul_add_block(u, false, &l->wo, u->o, l->attn_post_norm);
    gpu_rms_norm(u->g, u->h, u->x, l->ffn_norm, n, m->n_embd, m->rms_eps);
    gpu_matmul(u->g, &l->gate, u->gate, u->h, n, false);
    gpu_matmul(u->g, &l->up, u->up, u->h, n, false);
    gpu_gate(u->g, u->gate, u->gate, u->up, (size_t)n * m->n_ff, m->act == ENG_GELU_TANH);
    gpul_add_block(u, false, &l->down, u->gate, l->ffn_post_norm);
    gpul_mark_end(u, mark);
}

/* Keys and values of a layer that the GPU has left behind: to the segments. */
static int store_layer(eng_gpu *u, uint32_t i)
{
    const eng_gpu_run *run = u->run;
    int r = gpul_finish(u, u->copied[i % 2]);
    if (r < 0)
        return r;
    const float *q = u->host_qkv[i % 2], *k = q + (size_t)run->n * u->n_q;
    run->layer(run->ctx, u->first + i, q, k, k + (size_t)run->n * u->n_kv);
    atomic_fetch_add_explicit(run->heartbeat, 1, memory_order_relaxed);
    return 0;
}

int eng_gpu_prefill(eng_gpu *u, const eng_gpu_run *run)
{
    u->window_end = UINT32_MAX; /* another session's may follow */
    int r = gpul_begin(u, run);
    for (uint32_t i = 0; r == 0 && i < u->plan.n_layer; i++) {
        if (gpul_canceled(run))
            r = -ECANCELED;
        else
            queue_layer(u, i);
        if (r == 0 && i)
            r = store_layer(u, i - 1);
    }
    if (r == 0 && u->plan.n_layer)
        r = store_layer(u, u->plan.n_layer - 1);
    if (r == 0)
        r = gpul_end(u, false);
    if (r < 0)
        gpu_drain(u->g); /* what is still on its way would meet the next call's */
    gpul_trace_end(u);
    return r;
}
