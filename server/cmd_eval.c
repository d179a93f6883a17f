#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cmd_common.h"

/* eval logits: the last n tokens of a text are forced one by one after a dense prefill of what stands before them, once with full attention
 * over keys and values in f16 (f32 where that is asked for) and once under each policy, over the types asked for; the distributions over the next
 * token are compared. Products run in float32, so that what differs is the attention and what it reads. */

typedef struct {
    const cfg_settings *s;
    const srv_policy *policies;
    size_t n_policies;
    eng_engine *engine;
    const char *file; /* the text */
    int32_t *ids; /* the text: n_prompt tokens, then n + 1: n that are forced, each followed by a target */
    size_t n_prompt, n;
    float *reference; /* [n][n_vocab] logits of the full pass */
    double nll_full;  /* sum over the targets */
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
    uint64_t skipping = (uint64_t)t->n_graph + t->n_cluster, searches = skipping + t->n_flat;
    if (!strcmp(v->s->output, "jsonl")) {
        srv_buf j = {0};
        srv_buf_puts(&j, "{\"test\":\"logits\",\"model\":");
        srv_buf_cstring(&j, v->s->model);
        srv_buf_puts(&j, ",\"file\":");
        srv_buf_cstring(&j, v->file);
        srv_buf_printf(&j, ",\"attention\":\"%s\",\"budget\":\"%s\",\"type_k\":\"%s\",\"type_v\":\"%s\",\"n_prompt\":%zu,\"n\":%zu", mode, p->budget,
                       v->s->cache_type_k, v->s->cache_type_v, v->n_prompt, v->n);
        srv_buf_printf(&j, ",\"kl\":{\"mean\":%.6g,\"p90\":%.6g,\"max\":%.6g},\"top1_agreement\":%.4f", mean, p90, max, agree);
        srv_buf_printf(&j, ",\"perplexity_full\":%.5f,\"perplexity\":%.5f,\"perplexity_ratio\":%.5f", ppl_full, ppl, ppl / ppl_full);
        srv_buf_printf(&j, ",\"keys_held\":%.1f,\"keys_attended\":%.1f,\"retrieved\":%.1f,\"probed\":%.1f,\"estimated\":%.1f,\"n_graph\":%u,\"n_cluster\":%u,\"n_flat\":%u}\n",
                       t->keys_held, t->keys_attended, t->retrieved, t->probed, t->estimated, t->n_graph, t->n_cluster, t->n_flat);
        return srv_print_json(&j);
    }
    if (p == v->policies) {
        printf("%s: %zu positions after %zu tokens, against full attention (perplexity %.4f); KL divergence in nats\n", v->file, v->n, v->n_prompt, ppl_full);
        printf("%-9s %-7s %10s %10s %10s %8s %17s %23s %10s %9s\n", "attention", "budget", "KL mean", "p90", "max", "top-1", "perplexity ratio",
               "keys read of held", "retrieved", "by index");
    }
    printf("%-9s %-7s %10.6f %10.6f %10.6f %7.2f%% %17.5f %11.0f of %-8.0f %10.0f", mode, p->budget, mean, p90, max, 100 * agree, ppl / ppl_full,
           t->keys_attended, t->keys_held, t->retrieved);
    if (searches)
        printf(" %8.0f%%\n", 100.0 * (double)skipping / (double)searches);
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
    int status = srv_read_text(v->file, &text, &len);
    if (status)
        return status;
    int rc = eng_tokenize(v->engine, text, len, ENG_TOK_ADD_SPECIAL, NULL, &v->ids, &have);
    free(text);
    if (rc < 0)
        return srv_fail("%s: cannot be tokenized: %s", v->file, strerror(-rc));
    if (have > limit)
        have = limit;
    v->n = (size_t)s->n_predict;
    if (have < v->n + 2)
        return srv_fail("%s: %zu tokens of the text are too few to compare at %zu of them (-n)", v->file, have, v->n);
    v->n_prompt = have - v->n - 1;
    v->reference = calloc(v->n, (size_t)info->n_vocab * sizeof(float));
    v->kl = calloc(v->n, sizeof *v->kl);
    return v->reference && v->kl ? 0 : srv_fail("out of memory");
}

/* Goes on with an engine whose keys and values are of the types asked for. */
static int reopen(eval *v, eng_params *p)
{
    eng_close(v->engine);
    v->engine = NULL;
    int status = srv_open(v->s, p, &v->engine);
    return status ? status : srv_keep_prompt(v->engine, v->ids, v->n_prompt, v->policies, v->n_policies);
}

static int evaluate(const cfg_settings *s, const char *file, const srv_policy *policies, size_t n)
{
    char err[256];
    eval v = {.s = s, .file = file, .policies = policies, .n_policies = n};
    eng_params p;
    if (srv_engine_params(s, &p, err, sizeof err) < 0)
        return srv_fail("%s", err);
    p.f32_activations = true;
    eng_params reference = p;
    reference.type_k = p.type_k == ENG_KV_F32 ? ENG_KV_F32 : ENG_KV_F16;
    reference.type_v = p.type_v == ENG_KV_F32 ? ENG_KV_F32 : ENG_KV_F16;
    int status = srv_open(s, &reference, &v.engine);
    if (!status)
        status = prepare(&v);
    if (!status)
        status = srv_keep_prompt(v.engine, v.ids, v.n_prompt, policies, n);
    if (!status)
        status = run_pass(&v, NULL);
    if (!status && (p.type_k != reference.type_k || p.type_v != reference.type_v))
        status = reopen(&v, &p);
    for (size_t i = 0; i < n && !status; i++) {
        srv_finish_indexes(v.engine);
        status = run_pass(&v, &policies[i]);
        if (!status)
            status = print_result(&v, &policies[i]);
    }
    eng_close(v.engine);
    free(v.ids);
    free(v.reference);
    free(v.kl);
    return status;
}

int srv_cmd_eval_logits(const cfg_settings *s)
{
    srv_policy *policies = NULL;
    size_t n = 0;
    if (!s->file)
        return srv_fail("no text: name one with -f FILE");
    char *files = strdup(s->file), *rest = files;
    int status = files ? srv_policies(s, &policies, &n) : srv_fail("out of memory");
    for (char *file; !status && (file = strsep(&rest, "\n"));)
        status = evaluate(s, file, policies, n);
    free(policies);
    free(files);
    int written = srv_finish_output();
    return status ? status : written;
}
