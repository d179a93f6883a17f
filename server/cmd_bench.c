#include <stdlib.h>
#include <string.h>

#include "cmd_common.h"

typedef struct {
    const cfg_settings *s;
    eng_engine *engine;
    int32_t *ids;      /* tokens for the longest test */
    uint32_t *lengths; /* depths or prompt lengths */
    size_t n_lengths;
    bool headed; /* the table has its first line */
} bench;

typedef struct {
    double sum, min, max;
    uint32_t n;
} rates;

static void rates_add(rates *r, double tokens, double seconds)
{
    double v = seconds > 0 ? tokens / seconds : 0;
    r->min = !r->n || v < r->min ? v : r->min;
    r->max = !r->n || v > r->max ? v : r->max;
    r->sum += v;
    r->n++;
}

static int bench_open(bench *b, const cfg_settings *s, const char *lengths, size_t extra)
{
    size_t longest = 1;
    *b = (bench){.s = s};
    b->lengths = srv_numbers(lengths, &b->n_lengths);
    if (!b->lengths)
        return srv_fail("out of memory");
    for (size_t i = 0; i < b->n_lengths; i++)
        if (b->lengths[i] > longest)
            longest = b->lengths[i];
    int status = srv_open_for(s, longest + extra, false, &b->engine);
    return status ? status : srv_test_tokens(b->engine, s->file, longest, &b->ids);
}

static int bench_close(bench *b, int status)
{
    eng_close(b->engine);
    free(b->ids);
    free(b->lengths);
    int written = srv_finish_output();
    return status ? status : written;
}

static int open_session(const bench *b, size_t n_ids, uint32_t max_tokens, const eng_attention *a, bool cache, eng_session **ret)
{
    char err[512] = "";
    eng_request r = {.ids = b->ids,
                     .n_ids = n_ids,
                     .max_tokens = max_tokens,
                     .attention = *a,
                     .sampling = eng_sampling_default(),
                     .cache_prompt = cache};
    r.sampling.temperature = 0;
    int rc = eng_session_open(b->engine, &r, ret, err, sizeof err);
    return rc < 0 ? srv_fail("%s", *err ? err : strerror(-rc)) : 0;
}

static int prefill(eng_session *session, const char *what)
{
    srv_progress p = srv_progress_begin(what);
    int rc = eng_session_prefill(session, srv_progress_step, &p);
    srv_progress_end(&p);
    return rc < 0 ? srv_fail("%s: %s", what, strerror(-rc)) : 0;
}

/* The first pass over the weights maps them; it is not what is measured. */
static int warm_up(const bench *b)
{
    eng_session *session = NULL;
    eng_attention full = {.mode = ENG_ATTN_FULL, .n_local = 1};
    eng_token token;
    int status = open_session(b, 1, 2, &full, false, &session);
    if (status)
        return status;
    status = prefill(session, "warming up");
    for (int i = 0; i < 2 && !status; i++)
        if (eng_session_next(session, &token) < 0)
            status = srv_fail("warming up: decoding failed");
    eng_session_close(session);
    return status;
}

static int print_rates(bench *b, const char *test, const char *mode, uint32_t length, const rates *r, const eng_timings *t)
{
    const eng_info *info = eng_info_get(b->engine);
    double mean = r->sum / r->n;
    int status = 0;
    if (!strcmp(b->s->output, "jsonl")) {
        srv_buf j = {0};
        srv_buf_printf(&j, "{\"test\":\"%s\",\"model\":", test);
        srv_buf_cstring(&j, b->s->model);
        srv_buf_printf(&j, ",\"type\":\"%s\",\"cpu\":\"%s\",\"threads\":%u", info->type, info->cpu, info->n_threads);
        if (mode)
            srv_buf_printf(&j, ",\"attention\":\"%s\",\"depth\":%u,\"n\":%d", mode, length, b->s->n_predict);
        else
            srv_buf_printf(&j, ",\"n_prompt\":%u", length);
        srv_buf_printf(&j, ",\"repeat\":%u,\"tokens_per_second\":{\"mean\":%.3f,\"min\":%.3f,\"max\":%.3f}", r->n, mean, r->min, r->max);
        if (mode)
            srv_buf_printf(&j, ",\"keys_held\":%.1f,\"keys_attended\":%.1f,\"n_graph\":%u,\"n_flat\":%u", t->keys_held, t->keys_attended,
                           t->n_graph, t->n_flat);
        srv_buf_puts(&j, "}\n");
        status = srv_print_json(&j);
    } else {
        if (!b->headed) {
            printf("%s, %s, %s, %u threads; tokens a second over %u runs\n", b->s->model, info->type, info->cpu, info->n_threads,
                   b->s->repeat);
            printf("%-10s %9s %10s %10s %10s%s\n", mode ? "attention" : "test", mode ? "depth" : "tokens", "mean", "min", "max",
                   mode ? "   keys read of held   found by graph" : "");
            b->headed = true;
        }
        printf("%-10s %9u %10.2f %10.2f %10.2f", mode ? mode : test, length, mean, r->min, r->max);
        uint64_t searches = (uint64_t)t->n_graph + t->n_flat;
        if (mode && searches)
            printf(" %9.0f of %-8.0f %9.0f%%", t->keys_attended, t->keys_held, 100.0 * t->n_graph / (double)searches);
        else if (mode)
            printf(" %9.0f of %-8.0f %10s", t->keys_attended, t->keys_held, "-");
        putchar('\n');
    }
    fflush(stdout);
    return status;
}

/* ---- decode ----------------------------------------------------------------------------------------------------- */

/* One run: n steps timed. The first token needs no step, its logits come from the prompt. */
static int decode_once(const bench *b, uint32_t depth, const eng_attention *a, rates *r, eng_timings *ret)
{
    uint32_t n = (uint32_t)b->s->n_predict;
    eng_session *session = NULL;
    eng_token token;
    int status = open_session(b, depth ? depth : 1, n + 1, a, true, &session);
    if (status)
        return status;
    status = prefill(session, "prefill");
    int rc = status ? 0 : eng_session_next(session, &token);
    double start = srv_seconds();
    for (uint32_t i = 0; i < n && !status && !rc; i++)
        rc = eng_session_next(session, &token);
    double seconds = srv_seconds() - start;
    if (rc && !status)
        status = srv_fail("decoding ended early: %s", rc > 0 ? "the context is full" : strerror(-rc));
    if (!status) {
        rates_add(r, n, seconds);
        eng_session_timings(session, ret);
    }
    eng_session_close(session);
    return status;
}

/* The prompt is kept as a context between runs and modes, with its indexes built before anything is timed. */
static int decode_mode(bench *b, uint32_t depth, const char *mode)
{
    char err[256], word[32];
    cfg_settings one = *b->s;
    eng_attention a;
    eng_timings timings;
    eng_session *session = NULL;
    rates r = {0};
    snprintf(word, sizeof word, "%.*s", (int)strcspn(mode, ","), mode);
    one.attention = word;
    if (srv_attention(&one, &a, err, sizeof err) < 0)
        return srv_fail("%s", err);
    int status = open_session(b, depth ? depth : 1, 1, &a, true, &session);
    if (status)
        return status;
    status = prefill(session, "prefill");
    eng_session_close(session);
    for (uint32_t i = 0; i < b->s->repeat && !status; i++) {
        srv_finish_indexes(b->engine);
        status = decode_once(b, depth, &a, &r, &timings);
    }
    if (!status)
        status = print_rates(b, "decode", word, depth, &r, &timings);
    return status;
}

int srv_cmd_bench_decode(const cfg_settings *s)
{
    bench b;
    int status = bench_open(&b, s, s->depth, (size_t)s->n_predict + 2);
    if (!status)
        status = warm_up(&b);
    for (size_t i = 0; i < b.n_lengths && !status; i++)
        for (const char *mode = s->attention; !status;) {
            status = decode_mode(&b, b.lengths[i], mode);
            mode += strcspn(mode, ",");
            if (!*mode++)
                break;
        }
    return bench_close(&b, status);
}

/* ---- prefill ---------------------------------------------------------------------------------------------------- */

int srv_cmd_bench_prefill(const cfg_settings *s)
{
    bench b;
    eng_attention full = eng_attention_default();
    full.mode = ENG_ATTN_FULL;
    int status = bench_open(&b, s, s->prompt, 2);
    if (!status)
        status = warm_up(&b);
    for (size_t i = 0; i < b.n_lengths && !status; i++) {
        rates r = {0};
        for (uint32_t j = 0; j < s->repeat && !status; j++) {
            eng_session *session = NULL;
            status = open_session(&b, b.lengths[i], 1, &full, false, &session);
            if (status)
                break;
            double start = srv_seconds();
            status = prefill(session, "prefill");
            rates_add(&r, b.lengths[i], srv_seconds() - start);
            eng_session_close(session);
        }
        eng_timings none = {0};
        if (!status)
            status = print_rates(&b, "prefill", NULL, b.lengths[i], &r, &none);
    }
    return bench_close(&b, status);
}
