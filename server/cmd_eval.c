#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cmd_common.h"

/* eval logits: the last n tokens of a text are forced one by one after a dense prefill of what stands before them, once with full attention
 * and once under each policy; the distributions over the next token are compared. Products run in float32, so that what differs is the
 * attention. */

typedef struct {
    const cfg_settings *s;
    eng_engine *engine;
    int32_t *ids; /* the text: n_prompt tokens, then n + 1: n that are forced, each followed by a target */
    size_t n_prompt, n;
    float *reference; /* [n][n_vocab] logits of the full pass */
    double nll_full;  /* sum over the targets */
    bool headed;      /* the table has its first line */
    /* of the pass at hand */
    double *kl; /* [n], nats */
    double nll;
    size_t same_top;
    eng_timings timings;
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

static void keep_reference(eval *v, size_t i, const float *logits)
{
    uint32_t n_vocab = eng_info_get(v->engine)->n_vocab;
    memcpy(v->reference + i * n_vocab, logits, n_vocab * sizeof *logits);
    v->nll_full += log_sum(logits, n_vocab) - logits[v->ids[v->n_prompt + i + 1]];
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
    v->nll += z - logits[target];
}

/* One pass: policy NULL stores full attention's logits, another one's are compared with them. */
static int run_pass(eval *v, const srv_policy *policy)
{
    eng_attention a = policy ? policy->attention : eng_attention_default();
    if (!policy)
        a.mode = ENG_ATTN_FULL;
    eng_session *session = NULL;
    int status = srv_open_session(v->engine, v->ids, v->n_prompt, (uint32_t)v->n + 1, &a, true, &session);
    if (status)
        return status;
    status = srv_prefill(session, "prefill");
    srv_progress p = srv_progress_begin(eng_attn_mode_name(a.mode));
    int rc = 0;
    v->nll = 0;
    v->same_top = 0;
    for (size_t i = 0; i < v->n && !status && !rc; i++) {
        const float *logits;
        rc = eng_session_force(session, v->ids[v->n_prompt + i]);
        if (!rc)
            rc = eng_session_logits(session, &logits);
        if (!rc && policy)
            compare(v, i, logits);
        else if (!rc)
            keep_reference(v, i, logits);
        srv_progress_step(&p, (uint32_t)i + 1, 0, (uint32_t)v->n);
    }
    srv_progress_end(&p);
    eng_session_timings(session, &v->timings);
    eng_session_close(session);
    if (rc)
        status = srv_fail("evaluation ended early: %s", rc > 0 ? "the context is full" : strerror(-rc));
    return status;
}

/* Sorts v->kl. */
static int print_result(eval *v, const srv_policy *p)
{
    const eng_timings *t = &v->timings;
    const char *mode = eng_attn_mode_name(p->attention.mode);
    double mean = 0, n = (double)v->n;
    for (size_t i = 0; i < v->n; i++)
        mean += v->kl[i] / n;
    srv_sort(v->kl, v->n);
    double p90 = v->kl[(v->n * 9 + 9) / 10 - 1], max = v->kl[v->n - 1];
    double ppl_full = exp(v->nll_full / n), ppl = exp(v->nll / n), agree = (double)v->same_top / n;
    uint64_t searches = (uint64_t)t->n_graph + t->n_flat;
    if (!strcmp(v->s->output, "jsonl")) {
        srv_buf j = {0};
        srv_buf_puts(&j, "{\"test\":\"logits\",\"model\":");
        srv_buf_cstring(&j, v->s->model);
        srv_buf_puts(&j, ",\"file\":");
        srv_buf_cstring(&j, v->s->file);
        srv_buf_printf(&j, ",\"attention\":\"%s\",\"budget\":\"%s\",\"n_prompt\":%zu,\"n\":%zu", mode, p->budget, v->n_prompt, v->n);
        srv_buf_printf(&j, ",\"kl\":{\"mean\":%.6g,\"p90\":%.6g,\"max\":%.6g},\"top1_agreement\":%.4f", mean, p90, max, agree);
        srv_buf_printf(&j, ",\"perplexity_full\":%.5f,\"perplexity\":%.5f,\"perplexity_ratio\":%.5f", ppl_full, ppl, ppl / ppl_full);
        srv_buf_printf(&j, ",\"keys_held\":%.1f,\"keys_attended\":%.1f,\"n_graph\":%u,\"n_flat\":%u}\n", t->keys_held, t->keys_attended,
                       t->n_graph, t->n_flat);
        return srv_print_json(&j);
    }
    if (!v->headed) {
        printf("%zu positions after %zu tokens of %s, against full attention (perplexity %.4f); KL divergence in nats\n", v->n, v->n_prompt,
               v->s->file, ppl_full);
        printf("%-9s %-7s %10s %10s %10s %8s %17s %23s %9s\n", "attention", "budget", "KL mean", "p90", "max", "top-1", "perplexity ratio",
               "keys read of held", "by graph");
        v->headed = true;
    }
    printf("%-9s %-7s %10.6f %10.6f %10.6f %7.2f%% %17.5f %11.0f of %-8.0f", mode, p->budget, mean, p90, max, 100 * agree, ppl / ppl_full,
           t->keys_attended, t->keys_held);
    if (searches)
        printf(" %8.0f%%\n", 100.0 * t->n_graph / (double)searches);
    else
        printf(" %9s\n", "-");
    fflush(stdout);
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
    srv_policy *policies = NULL;
    size_t n = 0;
    eng_params p;
    if (!s->file)
        return srv_fail("no text: name one with -f FILE");
    if (srv_engine_params(s, &p, err, sizeof err) < 0)
        return srv_fail("%s", err);
    p.f32_activations = true;
    int status = srv_policies(s, &policies, &n);
    if (!status)
        status = srv_open(s, &p, &v.engine);
    if (!status)
        status = prepare(&v);
    if (!status)
        status = srv_keep_prompt(v.engine, v.ids, v.n_prompt, policies, n);
    if (!status)
        status = run_pass(&v, NULL);
    for (size_t i = 0; i < n && !status; i++) {
        srv_finish_indexes(v.engine);
        status = run_pass(&v, &policies[i]);
        if (!status)
            status = print_result(&v, &policies[i]);
    }
    eng_close(v.engine);
    free(policies);
    free(v.ids);
    free(v.reference);
    free(v.kl);
    int written = srv_finish_output();
    return status ? status : written;
}
