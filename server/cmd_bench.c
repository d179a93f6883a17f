#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cmd_common.h"
#include "peak.h"

typedef struct {
    const cfg_settings *s;
    eng_engine *engine;
    eng_trace *trace;  /* NULL: none */
    int32_t *ids;      /* tokens for the longest test */
    uint32_t *lengths; /* depths or prompt lengths */
    size_t n_lengths;
    double peak; /* bytes a second that its threads read from memory; 0: unknown */
    bool headed; /* the table has its first line */
} bench;

enum { MAX_REPEAT = 1000 }; /* as config/ has it */

/* Of one test. */
typedef struct {
    double rates[MAX_REPEAT];  /* tokens a second, of each run */
    uint32_t n;
    double bytes;              /* read for a token */
    double cpu, index_cpu;     /* prefill: seconds of CPU time, of the prompts and of their indexes */
    eng_timings timings;       /* decode: of the last run */
} results;

static void results_add(results *r, double tokens, double seconds)
{
    if (r->n < MAX_REPEAT)
        r->rates[r->n++] = seconds > 0 ? tokens / seconds : 0;
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
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
    cpu_set_t cpus;
    CPU_ZERO(&cpus);
    sched_getaffinity(0, sizeof cpus, &cpus);
    int status = srv_trace_begin(s, &b->trace);
    if (!status)
        status = srv_open_for(s, longest + extra, false, &b->engine);
    if (!status)
        status = srv_test_tokens(b->engine, s->file, longest, &b->ids);
    if (!status)
        b->peak = srv_peak_read(eng_info_get(b->engine)->n_threads, &cpus);
    return status;
}

static int bench_close(bench *b, int status)
{
    eng_close(b->engine);
    free(b->ids);
    free(b->lengths);
    int traced = srv_trace_end(b->s, b->trace), written = srv_finish_output();
    return status ? status : traced ? traced : written;
}

/* The first pass over the weights maps them; it is not what is measured. */
static int warm_up(const bench *b)
{
    eng_session *session = NULL;
    eng_attention full = {.mode = ENG_ATTN_FULL, .n_local = 1};
    eng_token token;
    int status = srv_open_session(b->engine, b->ids, 1, 2, &full, false, &session);
    if (status)
        return status;
    status = srv_prefill(session, "warming up");
    for (int i = 0; i < 2 && !status; i++)
        if (eng_session_next(session, &token) < 0)
            status = srv_fail("warming up: decoding failed");
    eng_session_close(session);
    srv_finish_indexes(b->engine); /* and whatever else the engine does when idle */
    return status;
}

/* ---- output ----------------------------------------------------------------------------------------------------- */

static int print_line(bench *b, const srv_policy *p, uint32_t length, const results *r, double gb)
{
    const eng_info *info = eng_info_get(b->engine);
    const eng_timings *t = &r->timings;
    const char *mode = p ? eng_attn_mode_name(p->attention.mode) : NULL;
    srv_buf j = {0};
    srv_buf_printf(&j, "{\"test\":\"%s\",\"model\":", mode ? "decode" : "prefill");
    srv_buf_cstring(&j, b->s->model);
    srv_buf_printf(&j, ",\"type\":\"%s\",\"cpu\":\"%s\",\"threads\":%u,\"n_gpu_layers\":%u", info->type, info->cpu, info->n_threads, info->n_gpu_layers);
    if (info->gpu) {
        srv_buf_puts(&j, ",\"gpu\":");
        srv_buf_cstring(&j, info->gpu);
    }
    if (mode)
        srv_buf_printf(&j, ",\"attention\":\"%s\",\"budget\":\"%s\",\"depth\":%u,\"n\":%d", mode, p->budget, length, b->s->n_predict);
    else
        srv_buf_printf(&j, ",\"n_prompt\":%u", length);
    srv_buf_printf(&j, ",\"repeat\":%u,\"tokens_per_second\":{\"median\":%.3f,\"min\":%.3f,\"max\":%.3f}", r->n, srv_median(r->rates, r->n),
                   r->rates[0], r->rates[r->n - 1]);
    srv_buf_printf(&j, ",\"bytes_per_token\":%.0f,\"gb_per_second\":%.3f,\"peak_gb_per_second\":%.3f", r->bytes, gb, b->peak * 1e-9);
    if (mode)
        srv_buf_printf(&j, ",\"keys_held\":%.1f,\"keys_attended\":%.1f,\"n_graph\":%u,\"n_cluster\":%u,\"n_flat\":%u", t->keys_held, t->keys_attended, t->n_graph,
                       t->n_cluster, t->n_flat);
    else
        srv_buf_printf(&j, ",\"cpu_seconds\":%.4f,\"index_cpu_seconds\":%.4f", r->cpu / r->n, r->index_cpu / r->n);
    srv_buf_puts(&j, "}\n");
    return srv_print_json(&j);
}

static void print_row(bench *b, const srv_policy *p, uint32_t length, const results *r, double gb)
{
    const eng_info *info = eng_info_get(b->engine);
    const eng_timings *t = &r->timings;
    if (!b->headed) {
        printf("%s, %s, %s, %u threads, which read %.1f GB/s from memory; medians of %u runs\n", b->s->model, info->type, info->cpu,
               info->n_threads, b->peak * 1e-9, b->s->repeat);
        if (info->gpu)
            printf("%u of %u layers on %s, whose memory GB/s and peak leave out\n", info->n_gpu_layers, info->n_layer, info->gpu);
        printf("%-9s %s%8s %9s %9s %9s %9s %7s %8s%s\n", p ? "attention" : "test", p ? "budget  " : "", p ? "depth" : "tokens", "tokens/s", "min",
               "max", "MB/token", "GB/s", "of peak", p ? "   keys read of held    by index" : "   index: share of CPU time");
        b->headed = true;
    }
    printf(p ? "%-9s %-7s " : "%-9s %s", p ? eng_attn_mode_name(p->attention.mode) : "prefill", p ? p->budget : "");
    printf("%8u %9.2f %9.2f %9.2f %9.1f %7.1f %7.0f%%", length, srv_median(r->rates, r->n), r->rates[0], r->rates[r->n - 1], r->bytes * 1e-6, gb, b->peak > 0 ? 100 * gb * 1e9 / b->peak : 0);
    uint64_t skipping = (uint64_t)t->n_graph + t->n_cluster, searches = skipping + t->n_flat;
    if (p && searches)
        printf(" %9.0f of %-8.0f %8.0f%%", t->keys_attended, t->keys_held, 100.0 * (double)skipping / (double)searches);
    else if (p)
        printf(" %9.0f of %-8.0f %9s", t->keys_attended, t->keys_held, "-");
    else if (r->index_cpu > 0)
        printf(" %26.1f%%", 100 * r->index_cpu / r->cpu);
    else
        printf(" %27s", "-");
    putchar('\n');
}

/* p: NULL for prefill. Sorts the rates. */
static int print_results(bench *b, const srv_policy *p, uint32_t length, results *r)
{
    srv_sort(r->rates, r->n);
    double gb = r->bytes * srv_median(r->rates, r->n) * 1e-9;
    int status = 0;
    if (!strcmp(b->s->output, "jsonl"))
        status = print_line(b, p, length, r, gb);
    else
        print_row(b, p, length, r, gb);
    fflush(stdout);
    return status;
}

/* ---- decode ----------------------------------------------------------------------------------------------------- */

/* One run: n steps timed. The first token needs no step, its logits come from the prompt. */
static int decode_once(const bench *b, uint32_t depth, const eng_attention *a, results *r)
{
    uint32_t n = (uint32_t)b->s->n_predict;
    eng_session *session = NULL;
    eng_token token;
    int status = srv_open_session(b->engine, b->ids, depth ? depth : 1, n + 1, a, true, &session);
    if (status)
        return status;
    status = srv_prefill(session, "prefill");
    int rc = status ? 0 : eng_session_next(session, &token);
    double start = srv_seconds();
    for (uint32_t i = 0; i < n && !status && !rc; i++)
        rc = eng_session_next(session, &token);
    double seconds = srv_seconds() - start;
    if (rc && !status)
        status = srv_fail("decoding ended early: %s", rc > 0 ? "the context is full" : strerror(-rc));
    if (!status) {
        results_add(r, n, seconds);
        eng_session_timings(session, &r->timings);
        r->bytes = (double)eng_info_get(b->engine)->step_bytes + r->timings.read_bytes;
    }
    eng_session_close(session);
    return status;
}

/* With the indexes built before anything is timed. */
static int decode_policy(bench *b, uint32_t depth, const srv_policy *p)
{
    results r = {0};
    int status = 0;
    for (uint32_t i = 0; i < b->s->repeat && !status; i++) {
        srv_finish_indexes(b->engine);
        status = decode_once(b, depth, &p->attention, &r);
    }
    return status ? status : print_results(b, p, depth, &r);
}

int srv_cmd_bench_decode(const cfg_settings *s)
{
    bench b;
    srv_policy *policies = NULL;
    size_t n = 0;
    int status = bench_open(&b, s, s->depth, (size_t)s->n_predict + 2);
    if (!status)
        status = srv_policies(s, &policies, &n);
    if (!status)
        status = warm_up(&b);
    for (size_t i = 0; i < b.n_lengths && !status; i++) {
        status = srv_keep_prompt(b.engine, b.ids, b.lengths[i] ? b.lengths[i] : 1, policies, n);
        for (size_t j = 0; j < n && !status; j++)
            status = decode_policy(&b, b.lengths[i], &policies[j]);
    }
    free(policies);
    return bench_close(&b, status);
}

/* ---- prefill ---------------------------------------------------------------------------------------------------- */

/* Bytes read for a token of a prompt of n when each chunk reads the weights once, and the keys and values up to its end once. */
static double prompt_bytes(const bench *b, uint32_t n)
{
    const eng_info *info = eng_info_get(b->engine);
    double sum = 0, chunk = b->s->ubatch_size;
    for (double end = chunk; end < n + chunk; end += chunk)
        sum += (double)info->step_bytes + (double)info->kv_bytes_per_token * (end < n ? end : n);
    return sum / n;
}

static int prefill_once(const bench *b, uint32_t n, const eng_attention *a, results *r)
{
    eng_session *session = NULL;
    int status = srv_open_session(b->engine, b->ids, n, 1, a, false, &session);
    if (status)
        return status;
    double start = srv_seconds(), cpu = cpu_seconds();
    status = srv_prefill(session, "prefill");
    double seconds = srv_seconds() - start, cpu_prompt = cpu_seconds();
    if (!status) {
        eng_timings t;
        srv_finish_indexes(b->engine);
        eng_session_timings(session, &t);
        results_add(r, n, seconds);
        r->cpu += cpu_prompt - cpu;
        r->index_cpu += t.index_ms > 0 ? cpu_seconds() - cpu_prompt : 0;
    }
    eng_session_close(session);
    return status;
}

int srv_cmd_bench_prefill(const cfg_settings *s)
{
    bench b;
    eng_attention full = eng_attention_default();
    full.mode = ENG_ATTN_FULL;
    int status = bench_open(&b, s, s->prompt, 2);
    if (!status)
        status = warm_up(&b);
    for (size_t i = 0; i < b.n_lengths && !status; i++) {
        results r = {.bytes = prompt_bytes(&b, b.lengths[i])};
        for (uint32_t j = 0; j < s->repeat && !status; j++)
            status = prefill_once(&b, b.lengths[i], &full, &r);
        if (!status)
            status = print_results(&b, NULL, b.lengths[i], &r);
    }
    return bench_close(&b, status);
}
