#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cmd_common.h"

/* eval logits: the last n tokens of a text are forced one by one after a dense prefill of what stands before them, once with full attention
 * and once under the policy; the distributions over the next token are compared. Products run in float32, so that what differs is the
 * attention. */

typedef struct {
    const cfg_settings *s;
    eng_engine *engine;
    int32_t *ids; /* the text: n_prompt tokens, then n + 1: n that are forced, each followed by a target */
    size_t n_prompt, n;
    float *reference; /* [n][n_vocab] logits of the full pass */
    double *kl;       /* [n], nats */
    double nll[2];    /* sums over the targets: full, policy */
    size_t same_top;
    eng_timings timings; /* of the policy pass */
} eval;

static uint32_t top_of(const float *x, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    return best;
}

/* log of the sum of exp(x) */
static double log_sum(const float *x, uint32_t n)
{
    double max = x[top_of(x, n)], sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += exp(x[i] - max);
    return max + log(sum);
}

static void compare(eval *v, size_t i, const float *logits)
{
    uint32_t n_vocab = eng_info_get(v->engine)->n_vocab;
    const float *full = v->reference + i * n_vocab;
    double z_full = log_sum(full, n_vocab), z = log_sum(logits, n_vocab), kl = 0;
    for (uint32_t j = 0; j < n_vocab; j++) {
        double log_p = full[j] - z_full;
        kl += exp(log_p) * (log_p - (logits[j] - z));
    }
    v->kl[i] = kl > 0 ? kl : 0;
    v->same_top += top_of(full, n_vocab) == top_of(logits, n_vocab);
    int32_t target = v->ids[v->n_prompt + i + 1];
    v->nll[0] += z_full - full[target];
    v->nll[1] += z - logits[target];
}

/* One pass; pass 0 stores the logits, pass 1 compares with them. */
static int run_pass(eval *v, int pass, const eng_attention *a)
{
    char err[512] = "";
    size_t n_vocab = eng_info_get(v->engine)->n_vocab;
    eng_session *session = NULL;
    eng_request r = {.ids = v->ids,
                     .n_ids = v->n_prompt,
                     .max_tokens = (uint32_t)v->n + 1,
                     .attention = *a,
                     .sampling = eng_sampling_default(),
                     .cache_prompt = true};
    int rc = eng_session_open(v->engine, &r, &session, err, sizeof err);
    if (rc < 0)
        return srv_fail("%s", *err ? err : strerror(-rc));
    srv_progress p = srv_progress_begin("prefill");
    rc = eng_session_prefill(session, srv_progress_step, &p);
    srv_progress_end(&p);
    p = srv_progress_begin(pass ? eng_attn_mode_name(a->mode) : "full");
    for (size_t i = 0; i < v->n && !rc; i++) {
        const float *logits;
        rc = eng_session_force(session, v->ids[v->n_prompt + i]);
        if (!rc)
            rc = eng_session_logits(session, &logits);
        if (!rc && pass)
            compare(v, i, logits);
        else if (!rc)
            memcpy(v->reference + i * n_vocab, logits, n_vocab * sizeof *logits);
        srv_progress_step(&p, (uint32_t)i + 1, 0, (uint32_t)v->n);
    }
    srv_progress_end(&p);
    eng_session_timings(session, &v->timings);
    eng_session_close(session);
    return rc ? srv_fail("evaluation ended early: %s", rc > 0 ? "the context is full" : strerror(-rc)) : 0;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int print_result(eval *v, const eng_attention *a)
{
    const eng_timings *t = &v->timings;
    double mean = 0, n = (double)v->n;
    for (size_t i = 0; i < v->n; i++)
        mean += v->kl[i] / n;
    qsort(v->kl, v->n, sizeof *v->kl, by_value);
    double p90 = v->kl[(v->n * 9 + 9) / 10 - 1], max = v->kl[v->n - 1];
    double ppl_full = exp(v->nll[0] / n), ppl = exp(v->nll[1] / n), agree = (double)v->same_top / n;
    if (!strcmp(v->s->output, "jsonl")) {
        srv_buf j = {0};
        srv_buf_puts(&j, "{\"test\":\"logits\",\"model\":");
        srv_buf_cstring(&j, v->s->model);
        srv_buf_puts(&j, ",\"file\":");
        srv_buf_cstring(&j, v->s->file);
        srv_buf_printf(
            &j, ",\"attention\":\"%s\",\"n_prompt\":%zu,\"n\":%zu,\"kl\":{\"mean\":%.6g,\"p90\":%.6g,\"max\":%.6g},\"top1_agreement\":%.4f",
            eng_attn_mode_name(a->mode), v->n_prompt, v->n, mean, p90, max, agree);
        srv_buf_printf(&j, ",\"perplexity_full\":%.5f,\"perplexity\":%.5f,\"perplexity_ratio\":%.5f", ppl_full, ppl, ppl / ppl_full);
        srv_buf_printf(&j, ",\"keys_held\":%.1f,\"keys_attended\":%.1f,\"n_graph\":%u,\"n_flat\":%u}\n", t->keys_held, t->keys_attended,
                       t->n_graph, t->n_flat);
        return srv_print_json(&j);
    }
    printf("%s against full attention: %zu positions after %zu tokens of %s\n", eng_attn_mode_name(a->mode), v->n, v->n_prompt, v->s->file);
    printf("KL divergence     mean %.6f   p90 %.6f   max %.6f nats\n", mean, p90, max);
    printf("top-1 agreement   %.2f%%\n", 100 * agree);
    printf("perplexity        %.4f, with full attention %.4f (ratio %.5f)\n", ppl, ppl_full, ppl / ppl_full);
    printf("keys read         %.0f of %.0f (%.1f%%)\n", t->keys_attended, t->keys_held,
           t->keys_held > 0 ? 100 * t->keys_attended / t->keys_held : 0);
    printf("searches          %u by graph, %u by scan\n", t->n_graph, t->n_flat);
    return 0;
}

/* Cuts the text to -c tokens (or to what the model was trained for) and allocates what the passes need. */
static int prepare(eval *v)
{
    const cfg_settings *s = v->s;
    const eng_info *info = eng_info_get(v->engine);
    char *text = NULL;
    size_t len, have = 0, limit = info->n_ctx;
    int status = srv_read_text(s->file, &text, &len);
    if (status)
        return status;
    int rc = eng_tokenize(v->engine, text, len, ENG_TOK_ADD_SPECIAL, NULL, &v->ids, &have);
    free(text);
    if (rc < 0)
        return srv_fail("%s: cannot be tokenized: %s", s->file, strerror(-rc));
    if (have > limit)
        have = limit;
    v->n = (size_t)s->n_predict;
    if (have < v->n + 2)
        return srv_fail("%s: %zu tokens of the text are too few to compare at %zu of them (-n)", s->file, have, v->n);
    v->n_prompt = have - v->n - 1;
    v->reference = calloc(v->n, (size_t)info->n_vocab * sizeof(float));
    v->kl = calloc(v->n, sizeof *v->kl);
    return v->reference && v->kl ? 0 : srv_fail("out of memory");
}

int srv_cmd_eval_logits(const cfg_settings *s)
{
    char err[256];
    eval v = {.s = s};
    eng_attention policy, full;
    eng_params p;
    if (!s->file)
        return srv_fail("no text: name one with -f FILE");
    if (srv_attention(s, &policy, err, sizeof err) < 0 || srv_engine_params(s, &p, err, sizeof err) < 0)
        return srv_fail("%s", err);
    full = policy;
    full.mode = ENG_ATTN_FULL;
    p.f32_activations = true;
    int status = srv_open(s, &p, &v.engine);
    if (!status)
        status = prepare(&v);
    if (!status)
        status = run_pass(&v, 0, &full);
    if (!status) {
        srv_finish_indexes(v.engine);
        status = run_pass(&v, 1, &policy);
    }
    if (!status)
        status = print_result(&v, &policy);
    eng_close(v.engine);
    free(v.ids);
    free(v.reference);
    free(v.kl);
    int written = srv_finish_output();
    return status ? status : written;
}
