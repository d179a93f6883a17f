#include "api.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* Whole numbers up to here survive JSON's doubles. */
#define MAX_EXACT ((int64_t)1 << 53)
#define MAX_COUNT ((int64_t)1 << 24)

double srv_now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

srv_job *srv_job_new(const srv_app *app, srv_prepare *prepare, char *body, size_t body_len)
{
    srv_job *j = calloc(1, sizeof(*j));
    if (!j)
        return NULL;
    j->app = app;
    j->prepare = prepare;
    j->body = body;
    j->body_len = body_len;
    j->created = time(NULL);
    return j;
}

void srv_outbox_done(srv_outbox *o)
{
    srv_buf_done(&o->text);
    free(o->pieces);
    free(o->tokens);
    memset(o, 0, sizeof(*o));
}

void srv_job_free(srv_job *j)
{
    if (!j)
        return;
    free(j->body);
    free(j->ids);
    for (size_t i = 0; i < j->n_stops; i++)
        free(j->stops[i]);
    free(j->messages);
    eng_context_release(j->context);
    srv_buf_done(&j->said);
    srv_buf_done(&j->reply);
    srv_outbox_done(&j->outbox);
    free(j);
}

void srv_api_error(const srv_fault *f, srv_buf *out)
{
    srv_buf_printf(out, "{\"error\":{\"code\":%d,\"message\":", f->status);
    srv_buf_cstring(out, f->message);
    srv_buf_puts(out, ",\"type\":");
    srv_buf_cstring(out, f->type);
    srv_buf_puts(out, ",\"param\":");
    srv_buf_cstring(out, f->param[0] ? f->param : NULL);
    if (f->n_ctx)
        srv_buf_printf(out, ",\"n_prompt_tokens\":%u,\"n_ctx\":%u", f->n_prompt_tokens, f->n_ctx);
    srv_buf_puts(out, "}}");
}

int srv_api_body(srv_job *j, cJSON **ret, srv_fault *f)
{
    cJSON *body;
    int rc = srv_json_parse(j->body, j->body_len, &body, f);
    if (rc < 0)
        return rc;
    if (!cJSON_IsObject(body)) {
        rc = srv_fault_bad(f, NULL, "the body must be a JSON object, not %s", srv_json_kind(body));
        cJSON_Delete(body);
        return rc;
    }
    *ret = body;
    return 0;
}

/* ---- what is not there yet -------------------------------------------------------------------------------------- */

static int not_yet(srv_fault *f, const char *param, const char *what)
{
    return srv_fault_bad(f, param, "\"%s\": %s not supported yet", param, what);
}

static bool is_empty(const cJSON *v)
{
    return !v || cJSON_IsFalse(v) || (cJSON_IsString(v) && !v->valuestring[0]) || ((cJSON_IsArray(v) || cJSON_IsObject(v)) && !v->child);
}

static int refuse_unsupported(const cJSON *body, srv_fault *f)
{
    static const struct {
        const char *key, *what;
    } empty_only[] = {
        {"echo", "echoing the prompt is"},
        {"suffix", "a suffix (infill) is"},
        {"tools", "tools are"},
        {"functions", "functions are"},
        {"logit_bias", "a logit bias is"},
        {"grammar", "a grammar is"},
        {"json_schema", "a JSON schema is"},
        {"audio", "audio is"},
    };
    srv_json_obj o = {body, NULL, f};
    int64_t n = 1, best_of = 1;
    int rc = srv_json_int(&o, "n", 1, MAX_COUNT, &n);
    if (rc >= 0)
        rc = srv_json_int(&o, "best_of", 1, MAX_COUNT, &best_of);
    if (rc < 0)
        return rc;
    if (n > 1)
        return not_yet(f, "n", "more than one choice is");
    if (best_of > 1)
        return not_yet(f, "best_of", "more than one choice is");
    for (size_t i = 0; i < sizeof(empty_only) / sizeof(empty_only[0]); i++)
        if (!is_empty(srv_json_get(body, empty_only[i].key)))
            return not_yet(f, empty_only[i].key, empty_only[i].what);
    /* Without tools these ask for nothing. */
    const char *const choices[] = {"tool_choice", "function_call"};
    for (size_t i = 0; i < 2; i++) {
        const cJSON *v = srv_json_get(body, choices[i]);
        if (v && !(cJSON_IsString(v) && (strcmp(v->valuestring, "none") == 0 || strcmp(v->valuestring, "auto") == 0)))
            return not_yet(f, choices[i], "tools are");
    }
    const cJSON *format = srv_json_get(body, "response_format");
    if (format && !cJSON_IsObject(format))
        return srv_fault_bad(f, "response_format", "\"response_format\" must be an object, not %s", srv_json_kind(format));
    srv_json_obj fo = {format, "response_format.", f};
    const char *type = "text";
    rc = srv_json_str(&fo, "type", &type);
    if (rc < 0)
        return rc;
    if (strcmp(type, "text") != 0)
        return not_yet(f, "response_format", "a format other than text is");
    return 0;
}

/* ---- common fields ---------------------------------------------------------------------------------------------- */

static int parse_sampling(const srv_json_obj *o, int64_t seed, eng_sampling *s)
{
    double temperature = s->temperature, top_p = s->top_p, min_p = s->min_p, repeat = s->repeat_penalty, presence = s->presence_penalty,
           frequency = s->frequency_penalty;
    int64_t top_k = s->top_k, last_n = s->repeat_last_n;
    if (srv_json_num(o, "temperature", 0, 100, &temperature) < 0 || srv_json_num(o, "top_p", 0, 1, &top_p) < 0 ||
        srv_json_num(o, "min_p", 0, 1, &min_p) < 0 || srv_json_num(o, "repeat_penalty", 0.01, 100, &repeat) < 0 ||
        srv_json_num(o, "presence_penalty", -2, 2, &presence) < 0 || srv_json_num(o, "frequency_penalty", -2, 2, &frequency) < 0 ||
        srv_json_int(o, "top_k", -1, MAX_COUNT, &top_k) < 0 || srv_json_int(o, "repeat_last_n", -1, MAX_COUNT, &last_n) < 0 ||
        srv_json_int(o, "seed", -1, MAX_EXACT, &seed) < 0)
        return -EINVAL;
    s->temperature = (float)temperature;
    s->top_p = (float)top_p;
    s->min_p = (float)min_p;
    s->repeat_penalty = (float)repeat;
    s->presence_penalty = (float)presence;
    s->frequency_penalty = (float)frequency;
    s->top_k = (int32_t)top_k;
    s->repeat_last_n = (int32_t)last_n;
    s->seed = (uint64_t)seed;
    if (seed < 0 && getrandom(&s->seed, sizeof(s->seed), 0) != sizeof(s->seed))
        s->seed = (uint64_t)time(NULL);
    return 0;
}

static int parse_attention(const cJSON *body, uint32_t n_ctx, eng_attention *a, srv_fault *f)
{
    const cJSON *v = srv_json_get(body, "attention");
    if (!v)
        return 0;
    if (!cJSON_IsObject(v))
        return srv_fault_bad(f, "attention", "\"attention\" must be an object, not %s", srv_json_kind(v));
    srv_json_obj o = {v, "attention.", f};
    const char *mode = eng_attn_mode_name(a->mode), *budget = NULL;
    if (srv_json_str(&o, "budget", &budget) < 0)
        return -EINVAL;
    if (budget && eng_attn_budget_parse(budget, a) < 0)
        return srv_fault_bad(f, "attention.budget", "\"attention.budget\" must be fast, default or precise, not \"%.40s\"", budget);
    double beta = a->beta;
    int64_t top_k = a->top_k, k_max = a->k_max, n_sink = a->n_sink, n_local = a->n_local;
    if (srv_json_str(&o, "mode", &mode) < 0 || srv_json_num(&o, "beta", 0.01, 1000, &beta) < 0 ||
        srv_json_int(&o, "top_k", 0, MAX_COUNT, &top_k) < 0 || srv_json_int(&o, "k_max", 1, MAX_COUNT, &k_max) < 0 ||
        srv_json_int(&o, "n_sink", 0, MAX_COUNT, &n_sink) < 0 || srv_json_int(&o, "n_local", 1, MAX_COUNT, &n_local) < 0 ||
        srv_json_bool(&o, "estimate", &a->estimate) < 0)
        return -EINVAL;
    if (eng_attn_mode_parse(mode, &a->mode) < 0)
        return srv_fault_bad(f, "attention.mode", "\"attention.mode\" must be full, streaming, flat, cluster, ivf, graph or auto, not \"%.40s\"", mode);
    a->beta = (float)beta;
    /* More keys than the context holds mean all of them; buffers are sized by these. */
    a->top_k = (uint32_t)(top_k < n_ctx ? top_k : n_ctx);
    a->k_max = (uint32_t)(k_max < n_ctx ? k_max : n_ctx);
    a->n_sink = (uint32_t)(n_sink < n_ctx ? n_sink : n_ctx);
    a->n_local = (uint32_t)(n_local < n_ctx ? n_local : n_ctx);
    return 0;
}

static int add_stop(srv_job *j, const cJSON *v, srv_fault *f)
{
    if (!cJSON_IsString(v))
        return srv_fault_bad(f, "stop", "\"stop\" must be a string or an array of strings, not %s", srv_json_kind(v));
    size_t len = strlen(v->valuestring);
    if (len == 0)
        return 0;
    if (len > SRV_MAX_STOP_LEN)
        return srv_fault_bad(f, "stop", "a string in \"stop\" has %zu bytes; at most %d are allowed", len, SRV_MAX_STOP_LEN);
    if (j->n_stops == SRV_MAX_STOPS)
        return srv_fault_bad(f, "stop", "\"stop\" may hold at most %d strings", SRV_MAX_STOPS);
    j->stops[j->n_stops] = strdup(v->valuestring);
    if (!j->stops[j->n_stops])
        return srv_fault_set(f, 500, "server_error", NULL, "out of memory");
    j->n_stops++;
    return 0;
}

static int parse_stop(srv_job *j, const cJSON *body, srv_fault *f)
{
    const cJSON *v = srv_json_get(body, "stop");
    if (!v)
        return 0;
    if (!cJSON_IsArray(v))
        return add_stop(j, v, f);
    int rc = 0;
    for (const cJSON *i = v->child; i && rc == 0; i = i->next)
        rc = add_stop(j, i, f);
    return rc;
}

int srv_api_logprobs(srv_job *j, const cJSON *body, bool chat, srv_fault *f)
{
    srv_json_obj o = {body, NULL, f};
    int64_t top = 0;
    if (chat) {
        if (srv_json_bool(&o, "logprobs", &j->logprobs) < 0)
            return -EINVAL;
        int rc = srv_json_int(&o, "top_logprobs", 0, SRV_MAX_LOGPROBS, &top);
        if (rc < 0)
            return rc;
        if (rc == 1 && !j->logprobs)
            return srv_fault_bad(f, "top_logprobs", "\"top_logprobs\" needs \"logprobs\" to be true");
    } else {
        int rc = srv_json_int(&o, "logprobs", 0, SRV_MAX_LOGPROBS, &top);
        if (rc < 0)
            return rc;
        j->logprobs = rc == 1;
    }
    j->request.sampling.n_logprobs = (uint32_t)top;
    return 0;
}

static int random_id(srv_job *j, const char *prefix)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyz234567";
    unsigned char raw[24];
    if (getrandom(raw, sizeof(raw), 0) != sizeof(raw))
        return -EIO;
    int n = snprintf(j->id, sizeof(j->id), "%s", prefix);
    for (size_t i = 0; i < sizeof(raw) && (size_t)n + 1 < sizeof(j->id); i++)
        j->id[n++] = letters[raw[i] & 31];
    j->id[n] = 0;
    return 0;
}

int srv_api_common(srv_job *j, const cJSON *body, const char *id_prefix, srv_fault *f)
{
    const srv_app *app = j->app;
    eng_request *r = &j->request;
    srv_json_obj o = {body, NULL, f};
    int rc = refuse_unsupported(body, f);
    if (rc < 0)
        return rc;
    r->attention = app->attention;
    r->sampling = app->sampling;
    r->cache_prompt = true;
    const char *model = app->model_name;
    int64_t max_tokens = app->settings->n_predict;
    /* Three names of one thing; the newest goes first. */
    if (srv_json_int(&o, "n_predict", -1, MAX_COUNT, &max_tokens) < 0 || srv_json_int(&o, "max_tokens", -1, MAX_COUNT, &max_tokens) < 0 ||
        srv_json_int(&o, "max_completion_tokens", -1, MAX_COUNT, &max_tokens) < 0 || srv_json_str(&o, "model", &model) < 0 ||
        srv_json_bool(&o, "stream", &j->stream) < 0 || srv_json_bool(&o, "cache_prompt", &r->cache_prompt) < 0 ||
        srv_json_bool(&o, "return_progress", &j->return_progress) < 0 || parse_sampling(&o, app->settings->seed, &r->sampling) < 0 ||
        parse_attention(body, app->info->n_ctx, &r->attention, f) < 0 || parse_stop(j, body, f) < 0)
        return -EINVAL;
    const cJSON *options = srv_json_get(body, "stream_options");
    if (options && !cJSON_IsObject(options))
        return srv_fault_bad(f, "stream_options", "\"stream_options\" must be an object, not %s", srv_json_kind(options));
    srv_json_obj oo = {options, "stream_options.", f};
    if (srv_json_bool(&oo, "include_usage", &j->include_usage) < 0)
        return -EINVAL;
    if (strlen(model) >= sizeof(j->model))
        return srv_fault_bad(f, "model", "\"model\" has more than %zu bytes", sizeof(j->model) - 1);
    snprintf(j->model, sizeof(j->model), "%s", model[0] ? model : app->model_name);
    j->max_tokens = max_tokens < 0 ? UINT32_MAX : (uint32_t)max_tokens;
    if (random_id(j, id_prefix) < 0)
        return srv_fault_set(f, 500, "server_error", NULL, "no random numbers");
    return 0;
}

int srv_api_too_long(srv_fault *f, const char *param, size_t n_prompt, uint32_t n_ctx)
{
    srv_fault_set(f, 400, "exceed_context_size_error", param,
                  "context_length_exceeded: the request (%zu tokens) exceeds the available context size (%u tokens)", n_prompt, n_ctx);
    f->n_prompt_tokens = n_prompt < UINT32_MAX ? (uint32_t)n_prompt : UINT32_MAX;
    f->n_ctx = n_ctx;
    return -EINVAL;
}

int srv_api_prompt(srv_job *j, int32_t *ids, size_t n, const char *param, srv_fault *f)
{
    uint32_t n_ctx = j->app->info->n_ctx;
    j->ids = ids;
    if (n == 0)
        return srv_fault_bad(f, param, "the prompt is empty");
    if (n >= n_ctx)
        return srv_api_too_long(f, param, n, n_ctx);
    j->request.ids = ids;
    j->request.n_ids = n;
    if (j->max_tokens > n_ctx - n)
        j->max_tokens = n_ctx - (uint32_t)n;
    j->request.max_tokens = j->max_tokens;
    return 0;
}
