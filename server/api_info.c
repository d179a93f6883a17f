/* What the server is and how it tokenizes: /v1/models, /props, /tokenize, /detokenize. */
#include "api.h"
#include "contexts.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

void srv_info_models(const srv_app *app, srv_buf *out)
{
    const eng_info *i = app->info;
    srv_buf_puts(out, "{\"object\":\"list\",\"data\":[{\"id\":");
    srv_buf_cstring(out, app->model_name);
    srv_buf_printf(
        out, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"retrievald\",\"meta\":{\"architecture\":", (long long)app->started);
    srv_buf_cstring(out, i->architecture);
    srv_buf_puts(out, ",\"type\":");
    srv_buf_cstring(out, i->type);
    srv_buf_printf(out, ",\"n_vocab\":%u,\"n_ctx_train\":%u,\"n_ctx\":%u,\"n_embd\":%u,\"n_params\":%llu,\"size\":%llu}}]}", i->n_vocab,
                   i->n_ctx_train, i->n_ctx, i->n_embd, (unsigned long long)i->n_params, (unsigned long long)i->model_bytes);
}

static void write_defaults(const srv_app *app, srv_buf *out)
{
    const eng_sampling *s = &app->sampling;
    srv_buf_printf(out,
                   "\"default_generation_settings\":{\"n_ctx\":%u,\"params\":{\"n_predict\":%d,\"max_tokens\":%d,\"seed\":%lld,"
                   "\"temperature\":%.7g,\"top_k\":%d,\"top_p\":%.7g,\"min_p\":%.7g,\"repeat_last_n\":%d,\"repeat_penalty\":%.7g,"
                   "\"presence_penalty\":%.7g,\"frequency_penalty\":%.7g,\"stop\":[],\"stream\":false,\"cache_prompt\":true}}",
                   app->info->n_ctx, app->settings->n_predict, app->settings->n_predict, (long long)app->settings->seed, s->temperature,
                   s->top_k, s->top_p, s->min_p, s->repeat_last_n, s->repeat_penalty, s->presence_penalty, s->frequency_penalty);
}

/* What is kept of all tenants: the rest of the object "memory", and what stands behind it. */
static void write_kept(const srv_app *app, srv_buf *out)
{
    eng_stats s;
    eng_disk_stats disk;
    eng_stats_get(app->engine, &s);
    eng_disk_stats_get(app->engine, &disk);
    /* A session that is still being stored has an index to come. */
    srv_buf_printf(out, ",\"cache\":%zu,\"index\":%zu},\"index_pending\":%u", s.cache_bytes, s.index_bytes,
                   s.index_pending + (atomic_load(&app->sealing) ? 1 : 0));
    srv_buf_printf(out, ",\"cache\":{\"bytes\":%zu,\"limit\":%zu,\"segments\":%u,\"hits\":%llu,\"misses\":%llu,\"evictions\":%llu,",
                   s.cache_bytes, s.cache_limit, s.segments, (unsigned long long)s.hits, (unsigned long long)s.misses,
                   (unsigned long long)s.evictions);
    srv_buf_printf(out, "\"disk\":{\"bytes\":%llu,\"limit\":%llu,\"segments\":%u,\"saving\":%u,\"hits\":%llu}}", (unsigned long long)disk.bytes,
                   (unsigned long long)disk.limit, disk.segments, disk.saving, (unsigned long long)disk.hits);
}

void srv_info_props(const srv_app *app, bool sees_all, srv_buf *out)
{
    const eng_info *i = app->info;
    const eng_attention *a = &app->attention;
    srv_buf_puts(out, "{");
    write_defaults(app, out);
    srv_buf_puts(out, ",\"total_slots\":1,\"model_alias\":");
    srv_buf_cstring(out, app->model_name);
    srv_buf_puts(out, ",\"model_path\":");
    srv_buf_cstring(out, app->settings->model);
    srv_buf_puts(out, ",\"modalities\":{\"vision\":false,\"audio\":false},\"chat_template\":");
    if (app->given_template)
        srv_buf_cstring(out, app->given_template);
    else
        srv_buf_string(out, i->chat_template ? i->chat_template : "", i->chat_template ? i->chat_template_len : 0);
    srv_buf_puts(out, ",\"bos_token\":");
    srv_buf_cstring(out, app->bos_text);
    srv_buf_puts(out, ",\"eos_token\":");
    srv_buf_cstring(out, app->eos_text);
    srv_buf_puts(out, ",\"build_info\":\"retrievald " RETRIEVALD_VERSION "\",\"cpu\":");
    srv_buf_cstring(out, i->cpu);
    srv_buf_printf(out, ",\"n_threads\":%u,\"gpu\":", i->n_threads);
    if (i->gpu)
        srv_buf_cstring(out, i->gpu);
    else
        srv_buf_puts(out, "null");
    srv_buf_printf(out, ",\"n_gpu_layers\":%u", i->n_gpu_layers);
    srv_buf_printf(out, ",\"attention\":{\"mode\":\"%s\",\"top_k\":%u,\"beta\":%.7g,\"k_max\":%u,\"n_sink\":%u,\"n_local\":%u,\"estimate\":%s}",
                   eng_attn_mode_name(a->mode), a->top_k, a->beta, a->k_max, a->n_sink, a->n_local, a->estimate ? "true" : "false");
    srv_buf_printf(out, ",\"memory\":{\"model\":%llu,\"scratch\":%zu,\"kv_bytes_per_token\":%zu", (unsigned long long)i->model_bytes, i->scratch_bytes,
                   i->kv_bytes_per_token);
    if (sees_all)
        write_kept(app, out);
    else
        srv_buf_puts(out, "}");
    srv_buf_puts(out, "}");
}

/* ---- /tokenize, /detokenize ------------------------------------------------------------------------------------- */

static void write_tokens(const srv_job *j, const int32_t *ids, size_t n, bool with_pieces, srv_buf *out)
{
    srv_buf_puts(out, "{\"tokens\":[");
    for (size_t i = 0; i < n; i++) {
        srv_buf_puts(out, i ? "," : "");
        if (!with_pieces) {
            srv_buf_printf(out, "%d", ids[i]);
            continue;
        }
        const char *s;
        size_t len;
        srv_answer_token(j, ids[i], &s, &len);
        srv_buf_printf(out, "{\"id\":%d,\"piece\":", ids[i]);
        if (srv_utf8_valid(s, len, NULL))
            srv_buf_string(out, s, len);
        else
            srv_answer_bytes(s, len, out);
        srv_buf_puts(out, "}");
    }
    srv_buf_puts(out, "]}");
}

static int tokenize(srv_job *j, const cJSON *body, srv_fault *f)
{
    srv_json_obj o = {body, NULL, f};
    const char *content = "";
    bool add_special = false, parse_special = true, with_pieces = false;
    if (srv_json_str(&o, "content", &content) < 0 || srv_json_bool(&o, "add_special", &add_special) < 0 ||
        srv_json_bool(&o, "parse_special", &parse_special) < 0 || srv_json_bool(&o, "with_pieces", &with_pieces) < 0)
        return -EINVAL;
    int32_t *ids;
    size_t n;
    unsigned flags = (add_special ? ENG_TOK_ADD_SPECIAL : 0u) | (parse_special ? ENG_TOK_PARSE_SPECIAL : 0u);
    int rc = eng_tokenize(j->app->engine, content, strlen(content), flags, NULL, &ids, &n);
    if (rc < 0)
        return srv_fault_set(f, 500, "server_error", NULL, "tokenizing failed: %s", strerror(-rc));
    write_tokens(j, ids, n, with_pieces, &j->reply);
    free(ids);
    return 1;
}

static int detokenize(srv_job *j, const cJSON *body, srv_fault *f)
{
    const cJSON *tokens = srv_json_get(body, "tokens");
    if (tokens && !cJSON_IsArray(tokens))
        return srv_fault_bad(f, "tokens", "\"tokens\" must be an array of token ids, not %s", srv_json_kind(tokens));
    srv_buf text = {0};
    size_t at = 0;
    for (const cJSON *v = tokens ? tokens->child : NULL; v; v = v->next, at++) {
        const char *s = "";
        size_t n = 0;
        double d = v->valuedouble;
        if (!cJSON_IsNumber(v) || d != floor(d) || d < 0 || d > INT32_MAX || eng_token_text(j->app->engine, (int32_t)d, true, &s, &n) < 0) {
            srv_buf_done(&text);
            return srv_fault_bad(f, "tokens", "\"tokens\"[%zu] must be a token id from 0 to %u", at, j->app->info->n_vocab - 1);
        }
        srv_buf_add(&text, s, n);
    }
    srv_buf_puts(&j->reply, "{\"content\":");
    srv_buf_string(&j->reply, text.p ? text.p : "", text.n);
    srv_buf_puts(&j->reply, "}");
    j->reply.failed |= text.failed;
    srv_buf_done(&text);
    return 1;
}

int srv_tokenize_prepare(srv_job *j, srv_fault *f)
{
    cJSON *body;
    int rc = srv_api_body(j, &body, f);
    if (rc < 0)
        return rc;
    rc = tokenize(j, body, f);
    cJSON_Delete(body);
    return rc;
}

int srv_detokenize_prepare(srv_job *j, srv_fault *f)
{
    cJSON *body;
    int rc = srv_api_body(j, &body, f);
    if (rc < 0)
        return rc;
    rc = detokenize(j, body, f);
    cJSON_Delete(body);
    return rc;
}
