/* /v1/chat/completions and /apply-template. */
#include "api.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- in --------------------------------------------------------------------------------------------------------- */

int srv_template_prepare(srv_job *j, srv_fault *f)
{
    cJSON *body;
    char *text;
    size_t n;
    int rc = srv_api_body(j, &body, f);
    if (rc < 0)
        return rc;
    const cJSON *messages = srv_json_get(body, "messages");
    if (!cJSON_IsArray(messages) || !messages->child)
        rc = srv_fault_bad(f, "messages", "\"messages\" %s", !messages ? "is missing" : cJSON_IsArray(messages) ? "is empty" : "must be an array");
    if (rc == 0)
        rc = srv_chat_render(j, NULL, 0, NULL, &text, &n, f);
    cJSON_Delete(body);
    if (rc < 0)
        return rc;
    n = srv_template_unguard(text, n);
    srv_buf_puts(&j->reply, "{\"prompt\":");
    srv_buf_string(&j->reply, text, n);
    srv_buf_puts(&j->reply, "}");
    free(text);
    return 1;
}

static int chat_setup(srv_job *j, const cJSON *body, srv_fault *f)
{
    int32_t *ids;
    size_t n;
    int rc = srv_api_common(j, body, "chatcmpl-", f);
    if (rc == 0)
        rc = srv_api_logprobs(j, body, true, f);
    if (rc == 0)
        rc = srv_context_take(j, body, f);
    if (rc == 0)
        rc = srv_chat_ids(j, body, &ids, &n, f);
    return rc < 0 ? rc : srv_api_prompt(j, ids, n, "messages", f);
}

int srv_chat_prepare(srv_job *j, srv_fault *f)
{
    cJSON *body;
    int rc = srv_api_body(j, &body, f);
    if (rc < 0)
        return rc;
    j->shape = &srv_shape_chat;
    rc = chat_setup(j, body, f);
    cJSON_Delete(body);
    return rc;
}

/* ---- out -------------------------------------------------------------------------------------------------------- */

static void write_entry(const srv_job *j, int32_t id, float logprob, srv_buf *out)
{
    const char *s;
    size_t n;
    srv_answer_token(j, id, &s, &n);
    srv_buf_puts(out, "{\"id\":");
    srv_buf_uint(out, (uint64_t)id);
    srv_buf_puts(out, ",\"token\":");
    srv_buf_string(out, s, n);
    srv_buf_puts(out, ",\"logprob\":");
    srv_answer_logprob(logprob, out);
    srv_buf_puts(out, ",\"bytes\":");
    srv_answer_bytes(s, n, out);
}

static void write_logprobs(const srv_job *j, const eng_token *tokens, size_t n, srv_buf *out)
{
    if (!j->logprobs || n == 0) {
        srv_buf_puts(out, "null");
        return;
    }
    srv_buf_puts(out, "{\"content\":[");
    for (size_t i = 0; i < n; i++) {
        const eng_token *t = &tokens[i];
        srv_buf_puts(out, i ? "," : "");
        write_entry(j, t->id, t->logprob, out);
        srv_buf_puts(out, ",\"top_logprobs\":[");
        for (uint32_t k = 0; k < t->n_top; k++) {
            srv_buf_puts(out, k ? "," : "");
            write_entry(j, t->top[k].id, t->top[k].logprob, out);
            srv_buf_puts(out, "}");
        }
        srv_buf_puts(out, "]}");
    }
    srv_buf_puts(out, "],\"refusal\":null}");
}

static void chunk_head(const srv_job *j, srv_buf *out)
{
    srv_answer_head(j, "chat.completion.chunk", true, out);
    srv_buf_puts(out, ",\"choices\":[{\"index\":0,\"delta\":{");
}

static void chat_begin(srv_job *j, srv_buf *out)
{
    chunk_head(j, out);
    srv_buf_puts(out, "\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null}]}\n\n");
}

static void chat_progress(srv_job *j, const srv_outbox *o, srv_buf *out)
{
    chunk_head(j, out);
    srv_buf_puts(out, "},\"logprobs\":null,\"finish_reason\":null}]");
    srv_answer_progress(o, out);
    srv_buf_puts(out, "}\n\n");
}

static void chat_delta(srv_job *j, const char *text, size_t len, const eng_token *tokens, size_t n_tokens, srv_buf *out)
{
    chunk_head(j, out);
    srv_buf_puts(out, "\"content\":");
    srv_buf_string(out, text, len);
    srv_buf_puts(out, "},\"logprobs\":");
    write_logprobs(j, tokens, n_tokens, out);
    srv_buf_puts(out, ",\"finish_reason\":null}]}\n\n");
}

static void chat_finish(srv_job *j, srv_buf *out)
{
    chunk_head(j, out);
    srv_buf_printf(out, "},\"logprobs\":null,\"finish_reason\":\"%s\"}]", srv_answer_reason(j));
    srv_answer_timings(j, out);
    srv_buf_puts(out, "}\n\n");
    if (!j->include_usage)
        return;
    srv_answer_head(j, "chat.completion.chunk", true, out);
    srv_buf_puts(out, ",\"choices\":[]");
    srv_answer_usage(j, out);
    srv_answer_timings(j, out);
    srv_buf_puts(out, "}\n\n");
}

static void chat_whole(srv_job *j, const srv_outbox *o, srv_buf *out)
{
    srv_answer_head(j, "chat.completion", false, out);
    srv_buf_puts(out, ",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":");
    srv_buf_string(out, o->text.p ? o->text.p : "", o->text.n);
    srv_buf_puts(out, ",\"refusal\":null},\"logprobs\":");
    write_logprobs(j, o->tokens, o->n_tokens, out);
    srv_buf_printf(out, ",\"finish_reason\":\"%s\"}]", srv_answer_reason(j));
    srv_answer_usage(j, out);
    srv_answer_timings(j, out);
    srv_buf_puts(out, "}");
}

const srv_shape srv_shape_chat = {chat_begin, chat_progress, chat_delta, chat_finish, chat_whole};
