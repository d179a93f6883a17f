/* /v1/completions: a raw prompt, as text or token ids. */
#include "api.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- in --------------------------------------------------------------------------------------------------------- */

static int read_ids(const srv_job *j, const cJSON *array, int32_t **ret, size_t *ret_n, srv_fault *f)
{
    uint32_t n_vocab = j->app->info->n_vocab;
    size_t n = (size_t)cJSON_GetArraySize(array), i = 0;
    int32_t *ids = malloc((n ? n : 1) * sizeof(*ids));
    if (!ids)
        return srv_fault_set(f, 500, "server_error", NULL, "out of memory");
    for (const cJSON *v = array->child; v; v = v->next, i++) {
        double d = v->valuedouble;
        if (!cJSON_IsNumber(v) || d != floor(d) || d < 0 || d >= n_vocab) {
            free(ids);
            return srv_fault_bad(f, "prompt", "\"prompt\"[%zu] must be a token id from 0 to %u", i, n_vocab - 1);
        }
        ids[i] = (int32_t)d;
    }
    *ret = ids;
    *ret_n = n;
    return 0;
}

static int read_prompt(const srv_job *j, const cJSON *body, int32_t **ret, size_t *ret_n, srv_fault *f)
{
    const cJSON *v = srv_json_get(body, "prompt");
    if (!v)
        return srv_fault_bad(f, "prompt", "\"prompt\" is missing");
    /* An array of one prompt is that prompt. */
    if (cJSON_IsArray(v) && v->child && !cJSON_IsNumber(v->child)) {
        if (v->child->next)
            return srv_fault_bad(f, "prompt", "\"prompt\": several prompts in one request are not supported yet");
        v = v->child;
    }
    if (cJSON_IsArray(v))
        return read_ids(j, v, ret, ret_n, f);
    if (!cJSON_IsString(v))
        return srv_fault_bad(f, "prompt", "\"prompt\" must be a string or an array of token ids, not %s", srv_json_kind(v));
    if (!v->valuestring[0])
        return srv_fault_bad(f, "prompt", "the prompt is empty");
    unsigned flags = ENG_TOK_PARSE_SPECIAL | (j->context ? 0 : ENG_TOK_ADD_SPECIAL); /* what follows a context begins nothing */
    int rc = eng_tokenize(j->app->engine, v->valuestring, strlen(v->valuestring), flags, NULL, ret, ret_n);
    if (rc < 0)
        return srv_fault_set(f, 500, "server_error", NULL, "tokenizing failed: %s", strerror(-rc));
    return 0;
}

int srv_text_prepare(srv_job *j, srv_fault *f)
{
    cJSON *body;
    int32_t *ids;
    size_t n;
    int rc = srv_api_body(j, &body, f);
    if (rc < 0)
        return rc;
    j->shape = &srv_shape_text;
    rc = srv_api_common(j, body, "cmpl-", f);
    if (rc == 0)
        rc = srv_api_logprobs(j, body, false, f);
    if (rc == 0)
        rc = srv_context_take(j, body, f);
    if (rc == 0)
        rc = read_prompt(j, body, &ids, &n, f);
    cJSON_Delete(body);
    if (rc < 0)
        return rc;
    rc = srv_context_prepend(j, &ids, &n, f);
    if (rc < 0) {
        free(ids);
        return rc;
    }
    return srv_api_prompt(j, ids, n, "prompt", f);
}

/* ---- out -------------------------------------------------------------------------------------------------------- */

/* A token that is not a whole character is written as OpenAI does: "bytes:\xe2\x80". */
static void write_token(const srv_job *j, int32_t id, srv_buf *out)
{
    const char *s;
    size_t n;
    srv_answer_token(j, id, &s, &n);
    if (srv_utf8_valid(s, n, NULL)) {
        srv_buf_string(out, s, n);
        return;
    }
    srv_buf_puts(out, "\"bytes:");
    for (size_t i = 0; i < n; i++)
        srv_buf_printf(out, "\\\\x%02x", (unsigned char)s[i]);
    srv_buf_puts(out, "\"");
}

static void write_top(const srv_job *j, const eng_token *t, srv_buf *out)
{
    srv_buf_puts(out, "{");
    for (uint32_t k = 0; k < t->n_top; k++) {
        srv_buf_puts(out, k ? "," : "");
        write_token(j, t->top[k].id, out);
        srv_buf_puts(out, ":");
        srv_answer_logprob(t->top[k].logprob, out);
    }
    srv_buf_puts(out, "}");
}

static void write_logprobs(srv_job *j, const eng_token *tokens, size_t n, srv_buf *out)
{
    if (!j->logprobs || n == 0) {
        srv_buf_puts(out, "null");
        return;
    }
    srv_buf_puts(out, "{\"tokens\":[");
    for (size_t i = 0; i < n; i++) {
        srv_buf_puts(out, i ? "," : "");
        write_token(j, tokens[i].id, out);
    }
    srv_buf_puts(out, "],\"token_logprobs\":[");
    for (size_t i = 0; i < n; i++) {
        srv_buf_puts(out, i ? "," : "");
        srv_answer_logprob(tokens[i].logprob, out);
    }
    srv_buf_puts(out, "],\"top_logprobs\":[");
    for (size_t i = 0; i < n; i++) {
        srv_buf_puts(out, i ? "," : "");
        write_top(j, &tokens[i], out);
    }
    srv_buf_puts(out, "],\"text_offset\":[");
    for (size_t i = 0; i < n; i++) {
        const char *s = "";
        size_t len = 0;
        srv_buf_printf(out, "%s%zu", i ? "," : "", j->text_offset);
        /* Characters that begin in this token. */
        if (eng_token_text(j->app->engine, tokens[i].id, false, &s, &len) == 0)
            for (size_t k = 0; k < len; k++)
                j->text_offset += ((unsigned char)s[k] & 0xC0) != 0x80;
    }
    srv_buf_puts(out, "]}");
}

static void write_chunk(srv_job *j, const char *text, size_t len, const eng_token *tokens, size_t n_tokens, const char *reason,
                        srv_buf *out)
{
    srv_answer_head(j, "text_completion", true, out);
    srv_buf_puts(out, ",\"choices\":[{\"index\":0,\"text\":");
    srv_buf_string(out, text, len);
    srv_buf_puts(out, ",\"logprobs\":");
    write_logprobs(j, tokens, n_tokens, out);
    srv_buf_puts(out, ",\"finish_reason\":");
    srv_buf_cstring(out, reason);
    srv_buf_puts(out, "}]");
}

static void text_begin(srv_job *j, srv_buf *out)
{
    (void)j;
    (void)out; /* there is no role to tell */
}

static void text_progress(srv_job *j, const srv_outbox *o, srv_buf *out)
{
    write_chunk(j, "", 0, NULL, 0, NULL, out);
    srv_answer_progress(o, out);
    srv_buf_puts(out, "}\n\n");
}

static void text_delta(srv_job *j, const char *text, size_t len, const eng_token *tokens, size_t n_tokens, srv_buf *out)
{
    write_chunk(j, text, len, tokens, n_tokens, NULL, out);
    srv_buf_puts(out, "}\n\n");
}

static void text_finish(srv_job *j, srv_buf *out)
{
    write_chunk(j, "", 0, NULL, 0, srv_answer_reason(j), out);
    srv_answer_timings(j, out);
    srv_buf_puts(out, "}\n\n");
    if (!j->include_usage)
        return;
    srv_answer_head(j, "text_completion", true, out);
    srv_buf_puts(out, ",\"choices\":[]");
    srv_answer_usage(j, out);
    srv_answer_timings(j, out);
    srv_buf_puts(out, "}\n\n");
}

static void text_whole(srv_job *j, const srv_outbox *o, srv_buf *out)
{
    srv_answer_head(j, "text_completion", false, out);
    srv_buf_puts(out, ",\"choices\":[{\"index\":0,\"text\":");
    srv_buf_string(out, o->text.p ? o->text.p : "", o->text.n);
    srv_buf_puts(out, ",\"logprobs\":");
    write_logprobs(j, o->tokens, o->n_tokens, out);
    srv_buf_printf(out, ",\"finish_reason\":\"%s\"}]", srv_answer_reason(j));
    srv_answer_usage(j, out);
    srv_answer_timings(j, out);
    srv_buf_puts(out, "}");
}

const srv_shape srv_shape_text = {text_begin, text_progress, text_delta, text_finish, text_whole};
