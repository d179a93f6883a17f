#include "teacher.h"

#include "engine_private.h"
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Noreturn void die(const char *what)
{
    fprintf(stderr, "teacher: %s\n", what);
    exit(99);
}

const t_real_model t_real_models[T_REAL_MODELS] = {
    {"smollm2", "RETRIEVALD_SMOLLM2"}, {"qwen05", "RETRIEVALD_QWEN05"}, {"gemma3", "RETRIEVALD_GEMMA3"}};

const char *t_real_model_file(const t_real_model *m)
{
    const char *file = getenv(m->variable);
    if (file && *file)
        return file;
    printf("SKIP: %s does not name the model %s\n", m->variable, m->name);
    return NULL;
}

eng_engine *t_open(const char *model, const eng_params *params)
{
    char err[512] = "";
    eng_engine *e;
    if (eng_open(model, params, &e, err, sizeof err) < 0)
        die(err);
    return e;
}

void t_prefill_logits(eng_engine *e, const int32_t *ids, size_t n, uint32_t chunk, float *out)
{
    eng_view view = {0};
    eng_segment *seg;
    if (!chunk || chunk > e->params.n_chunk)
        chunk = e->params.n_chunk;
    if (eng_segment_new(&e->shape, NULL, 0, (uint32_t)n, true, &seg) < 0 || eng_view_add(&view, seg, 0, (uint32_t)n) < 0)
        die("no memory");
    for (uint32_t pos = 0; pos < n; pos += chunk) {
        uint32_t now = n - pos < chunk ? (uint32_t)n - pos : chunk;
        if (eng_forward_prefill(e->forward, &view, ids + pos, pos, now, NULL, NULL, NULL, out + (size_t)pos * e->info.n_vocab) < 0)
            die("prefill failed");
    }
    eng_view_done(&view);
    eng_segment_unref(seg);
}

void t_decode_logits(eng_engine *e, const int32_t *ids, size_t n, size_t first, const eng_attention *attention, float *out)
{
    char err[256];
    eng_session *s;
    eng_request r = {.ids = ids, .n_ids = first, .max_tokens = (uint32_t)(n - first + 1), .attention = *attention, .sampling = eng_sampling_default()};
    if (eng_session_open(e, &r, &s, err, sizeof err) < 0)
        die(err);
    if (eng_session_prefill(s, NULL, NULL) < 0)
        die("prefill failed");
    for (size_t i = first;; i++) {
        const float *logits;
        if (eng_session_logits(s, &logits) < 0)
            die("no logits");
        memcpy(out + (i - 1) * e->info.n_vocab, logits, e->info.n_vocab * sizeof *out);
        if (i == n)
            break;
        if (eng_session_force(s, ids[i]) != 0)
            die("cannot force a token");
    }
    eng_session_close(s);
}

double t_logprob(const float *logits, size_t n_vocab, int32_t id)
{
    double max = -INFINITY, sum = 0;
    for (size_t i = 0; i < n_vocab; i++)
        max = fmax(max, logits[i]);
    for (size_t i = 0; i < n_vocab; i++)
        sum += exp(logits[i] - max);
    return logits[id] - max - log(sum);
}

double t_kl(const float *p, const float *q, size_t n_vocab)
{
    double kl = 0, zp = t_logprob(p, n_vocab, 0) - p[0], zq = t_logprob(q, n_vocab, 0) - q[0];
    for (size_t i = 0; i < n_vocab; i++)
        kl += exp(p[i] + zp) * (p[i] + zp - q[i] - zq);
    return kl;
}

int32_t t_argmax(const float *logits, size_t n_vocab)
{
    size_t best = 0;
    for (size_t i = 1; i < n_vocab; i++)
        if (logits[i] > logits[best])
            best = i;
    return (int32_t)best;
}
