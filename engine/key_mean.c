#include "key_mean.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SKIP = 16, LONGEST = 256 }; /* tokens: the first ones are attention's sinks, whose keys are like no others */

/* Changing it changes what 8-bit keys on disk are relative to: contexts.c takes the mean into their fingerprint. */
static const char text[] =
    "The harbour master wrote down every ship that came in: her name, where she was from, what she carried, and how long she meant to stay. In the spring of 1874 "
    "there were forty-one of them, most with timber or grain. \"You may ask why I keep such a list,\" he said to the boy, \"when nobody reads it. But a number that "
    "is written down can be checked, and one that is only remembered cannot.\" The boy counted the masts and found that two were missing.\n\n"
    "def total(rows):\n    \"\"\"Sum of the prices, without those that are None.\"\"\"\n    return sum(row[\"price\"] for row in rows if row[\"price\"] is not None)\n\n"
    "1. Heat the water to 80 degrees, add 250 g of salt, and stir until it is clear. 2. Let it cool; the crystals that form on the thread are cubes. Question: why do "
    "they grow faster at the bottom? Answer: because the solution there is more concentrated, since it is heavier.\n";

/* Mean of e^(i freq p) over the positions 0 .. n - 1. */
static void mean_turn(double freq, double n, double *ret_cos, double *ret_sin)
{
    double half = freq / 2, size = fabs(sin(half)) > 1e-12 ? sin(n * half) / (n * sin(half)) : 1;
    *ret_cos = size * cos((n - 1) * half);
    *ret_sin = size * sin((n - 1) * half);
}

/* The mean of n rotated keys k[n][d] from position `pos` on, as it would be over all positions. */
static void mean_of_head(const eng_forward_params *fp, const eng_layer *w, const float *k, uint32_t n, uint32_t pos, double *mean)
{
    const eng_model *m = fp->model;
    const eng_rope *r = fp->rope;
    uint32_t d = m->head_dim, local = w->rope == ENG_LAYER_ROPE_LOCAL;
    for (uint32_t j = 0; j < d; j++) {
        mean[j] = 0;
        for (uint32_t i = 0; i < n; i++)
            mean[j] += (double)k[(size_t)i * d + j] / n;
    }
    for (uint32_t p = 0; p < r->pairs && w->rope != ENG_LAYER_NO_ROPE; p++) {
        uint32_t a = m->rope_pairs == ENG_ROPE_HALVES ? p : 2 * p, b = m->rope_pairs == ENG_ROPE_HALVES ? p + r->pairs : 2 * p + 1;
        double x = 0, y = 0, c, s;
        for (uint32_t i = 0; i < n; i++) { /* turned back */
            double angle = r->freq[local][p] * (pos + i), u = k[(size_t)i * d + a], v = k[(size_t)i * d + b];
            x += (u * cos(angle) + v * sin(angle)) / n;
            y += (v * cos(angle) - u * sin(angle)) / n;
        }
        mean_turn(r->freq[local][p], r->n_ctx_trained, &c, &s);
        mean[a] = x * c - y * s;
        mean[b] = x * s + y * c;
    }
}

static int prefill(eng_forward *f, const eng_forward_params *fp, const eng_view *view, const int32_t *ids, uint32_t n)
{
    int r = 0;
    for (uint32_t pos = 0; pos < n && r == 0; pos += fp->n_chunk)
        r = eng_forward_prefill(f, view, ids + pos, pos, n - pos < fp->n_chunk ? n - pos : fp->n_chunk, NULL, NULL, NULL, NULL);
    return r;
}

static int measure(eng_forward *f, const eng_forward_params *fp, const eng_kv_shape *shape, const int32_t *ids, uint32_t n, float *ret)
{
    eng_segment *seg = NULL;
    eng_view view = {0};
    double *mean = malloc(shape->head_dim * sizeof *mean);
    int r = mean ? eng_segment_new(shape, NULL, 0, n, true, &seg) : -ENOMEM;
    if (r == 0)
        r = eng_view_add(&view, seg, 0, n);
    if (r == 0)
        r = prefill(f, fp, &view, ids, n);
    uint32_t from = n > 2 * SKIP ? SKIP : 0;
    for (uint32_t i = 0; r == 0 && i < shape->n_layer * shape->n_head_kv; i++) {
        uint32_t layer = i / shape->n_head_kv, head = i % shape->n_head_kv;
        mean_of_head(fp, &fp->model->layers[layer], (const float *)(const void *)eng_segment_k(seg, layer, head, from), n - from, from, mean);
        for (uint32_t j = 0; j < shape->head_dim; j++)
            ret[(size_t)i * shape->head_dim + j] = (float)-mean[j];
    }
    eng_view_done(&view);
    eng_segment_unref(seg);
    free(mean);
    return r;
}

int eng_key_mean(eng_forward *f, const eng_forward_params *fp, const eng_tokenizer *t, eng_kv_shape *shape, uint32_t max_tokens, float **ret)
{
    int32_t *ids = NULL;
    size_t n = 0, count = (size_t)shape->n_layer * shape->n_head_kv * shape->head_dim;
    float *mean = calloc(count, sizeof *mean);
    int r = mean ? eng_tokenizer_encode(t, text, sizeof text - 1, ENG_TOK_ADD_SPECIAL, NULL, &ids, &n) : -ENOMEM;
    uint32_t most = max_tokens < LONGEST ? max_tokens : LONGEST;
    n = n < most ? n : most;
    if (r == 0 && n) { /* a vocabulary that has none of it: no mean */
        eng_kv_shape given = *shape;
        *shape = eng_kv_shape_of(fp->model, ENG_KV_F32, ENG_KV_F32);
        shape->window = given.window;
        r = measure(f, fp, shape, ids, (uint32_t)n, mean);
        *shape = given;
    }
    free(ids);
    if (r < 0) {
        free(mean);
        return r;
    }
    *ret = mean;
    return 0;
}
