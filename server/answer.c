#include "api.h"

#include <math.h>
#include <string.h>

/* What OpenAI documents for a token too unlikely to say; JSON has no minus infinity. */
#define UNLIKELY (-9999.0)

const char *srv_answer_reason(const srv_job *j)
{
    return j->end == SRV_END_STOP ? "stop" : "length";
}

void srv_answer_head(const srv_job *j, const char *object, bool chunk, srv_buf *out)
{
    srv_buf_printf(out, "%s{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", chunk ? "data: " : "", j->id, object,
                   (long long)j->created);
    srv_buf_cstring(out, j->model);
    srv_buf_puts(out, ",\"system_fingerprint\":");
    srv_buf_cstring(out, j->app->fingerprint);
}

void srv_answer_usage(const srv_job *j, srv_buf *out)
{
    size_t prompt = j->request.n_ids;
    srv_buf_printf(out,
                   ",\"usage\":{\"prompt_tokens\":%zu,\"completion_tokens\":%u,\"total_tokens\":%zu,"
                   "\"prompt_tokens_details\":{\"cached_tokens\":%u}}",
                   prompt, j->timings.predicted_n, prompt + j->timings.predicted_n, j->timings.cache_n);
}

/* n, ms, ms a token, tokens a second under one prefix. */
static void write_rate(const char *prefix, uint32_t n, double ms, srv_buf *out)
{
    srv_buf_printf(out, ",\"%s_n\":%u,\"%s_ms\":%.3f,\"%s_per_token_ms\":%.3f,\"%s_per_second\":%.3f", prefix, n, prefix, ms, prefix,
                   n ? ms / n : 0.0, prefix, ms > 0 ? n * 1e3 / ms : 0.0);
}

void srv_answer_timings(const srv_job *j, srv_buf *out)
{
    const eng_timings *t = &j->timings;
    srv_buf_printf(out, ",\"timings\":{\"cache_n\":%u,\"disk_n\":%u", t->cache_n, t->disk_n);
    if (j->miss.why)
        srv_buf_printf(out, ",\"cache_miss\":{\"position\":%u,\"reason\":\"%s\"}", j->miss.position, eng_miss_name(j->miss.why));
    else
        srv_buf_puts(out, ",\"cache_miss\":null");
    write_rate("prompt", t->prompt_n, t->prompt_ms, out);
    write_rate("predicted", t->predicted_n, t->predicted_ms, out);
    srv_buf_printf(out,
                   ",\"index_ms\":%.3f,\"keys_held\":%.1f,\"keys_attended\":%.1f,\"retrieved\":%.1f,\"probed\":%.1f,\"estimated\":%.1f,"
                   "\"attention\":\"%s\",\"n_graph\":%u,\"n_cluster\":%u,\"n_flat\":%u}",
                   t->index_ms, t->keys_held, t->keys_attended, t->retrieved, t->probed, t->estimated, eng_attn_mode_name(t->mode), t->n_graph,
                   t->n_cluster, t->n_flat);
}

void srv_answer_progress(const srv_outbox *o, srv_buf *out)
{
    srv_buf_printf(out, ",\"prompt_progress\":{\"total\":%u,\"cache\":%u,\"processed\":%u,\"time_ms\":%.0f}", o->total, o->cached, o->done,
                   o->progress_ms);
}

void srv_answer_token(const srv_job *j, int32_t id, const char **ret, size_t *ret_len)
{
    *ret = "";
    *ret_len = 0;
    eng_token_text(j->app->engine, id, true, ret, ret_len);
}

/* To six decimals. An answer may hold millions of these and the loop writes them: no printf. */
void srv_answer_logprob(float v, srv_buf *out)
{
    double x = v > UNLIKELY ? v : UNLIKELY; /* also for minus infinity and NaN */
    srv_buf_add(out, "-", x < 0);
    uint64_t micro = (uint64_t)(fabs(x) * 1e6 + 0.5);
    srv_buf_uint(out, micro / 1000000);
    char decimals[7] = ".";
    micro %= 1000000;
    for (int i = 6; i > 0; i--, micro /= 10)
        decimals[i] = (char)('0' + micro % 10);
    srv_buf_add(out, decimals, sizeof(decimals));
}

void srv_answer_bytes(const char *s, size_t n, srv_buf *out)
{
    srv_buf_puts(out, "[");
    for (size_t i = 0; i < n; i++) {
        srv_buf_add(out, ",", i > 0);
        srv_buf_uint(out, (unsigned char)s[i]);
    }
    srv_buf_puts(out, "]");
}

void srv_answer_stream(srv_job *j, const srv_outbox *o, srv_buf *out)
{
    bool fault = o->finished && (j->end == SRV_END_FAULT || j->end == SRV_END_CANCELLED);
    if (!j->begun && !(fault && o->n_pieces == 0 && !o->has_progress)) {
        j->shape->begin(j, out);
        j->begun = true;
    }
    if (o->has_progress)
        j->shape->progress(j, o, out);
    size_t text = 0, tokens = 0;
    for (size_t i = 0; i < o->n_pieces; i++) {
        const srv_piece *p = &o->pieces[i];
        j->shape->delta(j, o->text.p ? o->text.p + text : "", p->text_len, o->tokens ? o->tokens + tokens : NULL, p->n_tokens, out);
        text += p->text_len;
        tokens += p->n_tokens;
    }
    if (fault) {
        srv_buf_puts(out, "data: ");
        srv_api_error(&j->fault, out);
        srv_buf_puts(out, "\n\n");
    } else if (o->finished) {
        j->shape->finish(j, out);
        srv_buf_puts(out, "data: [DONE]\n\n");
    }
}
