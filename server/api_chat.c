/* /v1/chat/completions and /apply-template. */
#include "api.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- in --------------------------------------------------------------------------------------------------------- */

/* The template gets the request's own bytes: cJSON would turn 2.0 into 2. Only these members, so that no other one means something to it.
 */
static int template_input(const srv_job *j, srv_buf *out)
{
    static const char *const members[] = {"messages", "add_generation_prompt", "chat_template_kwargs"};
    char sep = '{';
    for (size_t i = 0; i < sizeof(members) / sizeof(members[0]); i++) {
        const char *p;
        size_t n;
        if (!srv_json_span(j->body, j->body_len, members[i], &p, &n))
            continue;
        srv_buf_printf(out, "%c\"%s\":", sep, members[i]);
        srv_buf_add(out, p, n);
        sep = ',';
    }
    srv_buf_puts(out, "}");
    return out->failed ? -ENOMEM : 0;
}

static int render(srv_job *j, const cJSON *body, char **ret, size_t *ret_len, srv_fault *f)
{
    const srv_app *app = j->app;
    if (!app->chat_template || app->chat_failure[0])
        return srv_fault_set(f, 501, "not_supported_error", NULL, "%s", app->chat_failure);
    const cJSON *messages = srv_json_get(body, "messages");
    if (!messages)
        return srv_fault_bad(f, "messages", "\"messages\" is missing");
    if (!cJSON_IsArray(messages))
        return srv_fault_bad(f, "messages", "\"messages\" must be an array, not %s", srv_json_kind(messages));
    if (!messages->child)
        return srv_fault_bad(f, "messages", "\"messages\" is empty");
    char err[420] = "";
    srv_buf in = {0};
    int rc = template_input(j, &in);
    if (rc == 0)
        rc = srv_template_render(app->chat_template, in.p, in.n, ret, ret_len, err, sizeof(err));
    srv_buf_done(&in);
    /* The template or the messages are at fault, also where they ask for more time or memory than a render has. */
    if (rc == -EINVAL || ((rc == -ETIMEDOUT || rc == -ENOMEM) && err[0]))
        return srv_fault_bad(f, "messages", "%s", err[0] ? err : "the chat template refused the messages");
    if (rc < 0)
        return srv_fault_set(f, 500, "server_error", NULL, "rendering the chat template failed: %s", err[0] ? err : strerror(-rc));
    return 0;
}

int srv_template_prepare(srv_job *j, srv_fault *f)
{
    cJSON *body;
    char *text;
    size_t n;
    int rc = srv_api_body(j, &body, f);
    if (rc < 0)
        return rc;
    rc = render(j, body, &text, &n, f);
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
    char *text;
    size_t len, n;
    int32_t *ids;
    int rc = srv_api_common(j, body, "chatcmpl-", f);
    if (rc == 0)
        rc = srv_api_logprobs(j, body, true, f);
    if (rc == 0)
        rc = render(j, body, &text, &len, f);
    if (rc < 0)
        return rc;
    /* The template writes BOS itself where the model wants one. */
    rc = eng_tokenize(j->app->engine, text, len, ENG_TOK_PARSE_SPECIAL, srv_template_guard(), &ids, &n);
    free(text);
    if (rc < 0)
        return srv_fault_set(f, 500, "server_error", NULL, "tokenizing failed: %s", strerror(-rc));
    return srv_api_prompt(j, ids, n, "messages", f);
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
