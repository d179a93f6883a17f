/* What named contexts stand for, and how a prompt goes on from one.
 *
 * A context has a rendering, a text whose tokens are its ids. Of messages it is what the chat template makes of them without a prompt for the
 * answer; of a text, the beginning of a conversation whose first user turn begins with the text and an empty line; of a model without a
 * template, and of raw completions, just the text. A conversation that goes on from a context is the whole of it rendered again. Where that
 * begins with the context's rendering the prompt is the context's ids and the tokens of the rest, so that all that is kept is used; a template
 * that writes the past another way once it goes on (without its reasoning, say) makes a prompt that shares what it shares.
 */
#include "api.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Where the question will stand; the last one in the rendering is ours. */
static const char mark[] = "[retrievald: the question]";

/* More JSON than this for a token of the prompt is not kept for a name. */
enum { BYTES_PER_TOKEN = 16, BYTES_ANYWAY = 64 << 10 };

static int no_memory(srv_fault *f)
{
    return srv_fault_set(f, 500, "server_error", NULL, "out of memory");
}

int srv_context_fault(int rc, const char *name, const char *param, const char *err, srv_fault *f)
{
    switch (rc) {
    case -ENOENT:
        return srv_fault_set(f, 404, "not_found_error", param, "there is no context named '%.*s'", ENG_NAME_MAX, name);
    case -ESTALE:
        return srv_fault_set(f, 404, "not_found_error", param, "the context named '%.*s' has expired", ENG_NAME_MAX, name);
    case -EEXIST:
        return srv_fault_set(f, 409, "invalid_request_error", param, "%s", err);
    case -ENOSPC:
        return srv_fault_set(f, 400, "exceed_cache_size_error", param, "%s", err);
    case -EINVAL:
        return srv_fault_bad(f, param, "%s", err);
    default:
        return srv_fault_set(f, 500, "server_error", param, "%s", err && err[0] ? err : strerror(-rc));
    }
}

int srv_context_take(srv_job *j, const cJSON *body, srv_fault *f)
{
    srv_json_obj o = {body, NULL, f};
    const char *name = NULL;
    int rc = srv_json_str(&o, "context", &name);
    if (rc <= 0)
        return rc;
    rc = eng_context_use(j->app->engine, j->request.tenant, name, &j->context);
    return rc < 0 ? srv_context_fault(rc, name, "context", NULL, f) : 0;
}

int srv_context_prepend(const srv_job *j, int32_t **ids, size_t *n, srv_fault *f)
{
    if (!j->context)
        return 0;
    const eng_context_content *k = eng_context_get(j->context);
    int32_t *all = malloc((k->n_ids + *n + 1) * sizeof(*all));
    if (!all)
        return no_memory(f);
    memcpy(all, k->ids, k->n_ids * sizeof(*all));
    if (*n)
        memcpy(all + k->n_ids, *ids, *n * sizeof(*all));
    free(*ids);
    *ids = all;
    *n += k->n_ids;
    return 0;
}

/* ---- rendering -------------------------------------------------------------------------------------------------- */

static void add_member(srv_buf *out, const char *name, const char *p, size_t n)
{
    srv_buf_printf(out, "%c\"%s\":", out->n ? ',' : '{', name);
    srv_buf_add(out, p, n);
}

/* The template gets the request's own bytes: cJSON would turn 2.0 into 2. Only these members, so that no other one means something to it. */
int srv_chat_render(const srv_job *j, const char *messages, size_t len, const char *generation, char **ret, size_t *ret_len, srv_fault *f)
{
    const srv_app *app = j->app;
    if (!app->chat_template || app->chat_failure[0])
        return srv_fault_set(f, 501, "not_supported_error", NULL, "%s", app->chat_failure);
    char err[420] = "";
    const char *p;
    size_t n;
    srv_buf in = {0};
    if (messages)
        add_member(&in, "messages", messages, len);
    else if (srv_json_span(j->body, j->body_len, "messages", &p, &n))
        add_member(&in, "messages", p, n);
    if (generation)
        add_member(&in, "add_generation_prompt", generation, strlen(generation));
    else if (srv_json_span(j->body, j->body_len, "add_generation_prompt", &p, &n))
        add_member(&in, "add_generation_prompt", p, n);
    if (srv_json_span(j->body, j->body_len, "chat_template_kwargs", &p, &n))
        add_member(&in, "chat_template_kwargs", p, n);
    srv_buf_puts(&in, "}");
    int rc = in.failed ? -ENOMEM : srv_template_render(app->chat_template, in.p, in.n, ret, ret_len, err, sizeof(err));
    srv_buf_done(&in);
    /* The template or the messages are at fault, also where they ask for more time or memory than a render has. */
    if (rc == -EINVAL || ((rc == -ETIMEDOUT || rc == -ENOMEM) && err[0]))
        return srv_fault_bad(f, "messages", "%s", err[0] ? err : "the chat template refused the messages");
    if (rc < 0)
        return srv_fault_set(f, 500, "server_error", NULL, "rendering the chat template failed: %s", err[0] ? err : strerror(-rc));
    return 0;
}

/* The template writes BOS itself where the model wants one. */
static int tokenize(const srv_job *j, const char *text, size_t len, int32_t **ret, size_t *ret_n, srv_fault *f)
{
    int rc = eng_tokenize(j->app->engine, text, len, ENG_TOK_PARSE_SPECIAL, srv_template_guard(), ret, ret_n);
    return rc < 0 ? srv_fault_set(f, 500, "server_error", NULL, "tokenizing failed: %s", strerror(-rc)) : 0;
}

/* ---- conversations that go on ------------------------------------------------------------------------------------ */

/* Two arrays of messages as one; neither is empty. */
static void join_messages(const char *a, size_t a_len, const char *b, size_t b_len, srv_buf *out)
{
    srv_buf_add(out, a, a_len - 1);
    srv_buf_puts(out, ",");
    srv_buf_add(out, b + 1, b_len - 1);
}

/* The first of the messages, a user's, with the text before what it says. The template's helper writes a line for each part. */
static int open_turn(const eng_context_content *k, const char *messages, size_t len, const cJSON *first, srv_buf *out, srv_fault *f)
{
    const cJSON *role = srv_json_get(first, "role");
    const char *item, *content;
    size_t item_len, n;
    if (!cJSON_IsString(role) || strcmp(role->valuestring, "user") != 0)
        return srv_fault_bad(f, "messages", "the context was made from a text, which opens the conversation: the first of \"messages\" must be of role user");
    srv_buf_puts(out, "[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":");
    srv_buf_string(out, k->source, k->source_len);
    out->n -= out->failed ? 0 : 1; /* an empty line follows: the text's own end, and the one between parts */
    srv_buf_puts(out, "\\n\"}");
    srv_json_first(messages, len, &item, &item_len);
    const cJSON *v = srv_json_get(first, "content");
    if (!srv_json_span(item, item_len, "content", &content, &n) || !v) {
        srv_buf_puts(out, ",{\"type\":\"text\",\"text\":\"\"}");
    } else if (cJSON_IsString(v)) {
        srv_buf_puts(out, ",{\"type\":\"text\",\"text\":");
        srv_buf_add(out, content, n);
        srv_buf_puts(out, "}");
    } else if (cJSON_IsArray(v)) {
        srv_buf_puts(out, v->child ? "," : "");
        srv_buf_add(out, content + 1, n - 2);
    } else {
        return srv_fault_bad(f, "messages", "\"messages\"[0].content must be a string, an array or null, not %s", srv_json_kind(v));
    }
    srv_buf_puts(out, "]}");
    srv_buf_add(out, item + item_len, len - (size_t)(item + item_len - messages));
    return 0;
}

/* All messages of a conversation that goes on from j->context. */
static int all_messages(const srv_job *j, const char *messages, size_t len, const cJSON *first, srv_buf *out, srv_fault *f)
{
    const eng_context_content *k = j->context ? eng_context_get(j->context) : NULL;
    int rc = 0;
    if (!k)
        srv_buf_add(out, messages, len);
    else if (k->kind == ENG_SOURCE_MESSAGES)
        join_messages(k->source, k->source_len, messages, len, out);
    else if (k->kind == ENG_SOURCE_TEXT)
        rc = open_turn(k, messages, len, first, out, f);
    else
        rc = srv_fault_bad(f, "context", "the context was made from a raw completion, which is no conversation: use /v1/completions");
    return rc < 0 ? rc : out->failed ? no_memory(f) : 0;
}

/* Ids of the rendering: those of the context, where it begins with its rendering, and those of the rest. */
static int follow(const srv_job *j, const char *text, size_t len, int32_t **ret, size_t *ret_n, srv_fault *f)
{
    const eng_context_content *k = j->context ? eng_context_get(j->context) : NULL;
    int32_t *ids = NULL;
    size_t n = 0;
    if (!k || k->rendered > len)
        return tokenize(j, text, len, ret, ret_n, f);
    int rc = tokenize(j, text, k->rendered, &ids, &n, f);
    if (rc < 0)
        return rc;
    bool same = n == k->n_ids && memcmp(ids, k->ids, n * sizeof(*ids)) == 0;
    free(ids);
    if (!same)
        return tokenize(j, text, len, ret, ret_n, f);
    rc = tokenize(j, text + k->rendered, len - k->rendered, ret, ret_n, f);
    if (rc == 0 && (rc = srv_context_prepend(j, ret, ret_n, f)) < 0)
        free(*ret);
    return rc;
}

/* For a name that the answer may get; without it, it gets none. */
static void remember_messages(srv_job *j, srv_buf *messages, size_t n_ids)
{
    if (!j->request.cache_prompt || messages->n > n_ids * BYTES_PER_TOKEN + BYTES_ANYWAY)
        return;
    j->messages = messages->p;
    j->messages_len = messages->n;
    *messages = (srv_buf){0};
}

static int check_messages(const cJSON *messages, srv_fault *f)
{
    if (!messages)
        return srv_fault_bad(f, "messages", "\"messages\" is missing");
    if (!cJSON_IsArray(messages))
        return srv_fault_bad(f, "messages", "\"messages\" must be an array, not %s", srv_json_kind(messages));
    if (!messages->child)
        return srv_fault_bad(f, "messages", "\"messages\" is empty");
    return 0;
}

int srv_chat_ids(srv_job *j, const cJSON *body, int32_t **ret, size_t *ret_n, srv_fault *f)
{
    const cJSON *parsed = srv_json_get(body, "messages");
    const char *messages = NULL;
    char *text = NULL;
    size_t len, n;
    srv_buf all = {0};
    int rc = check_messages(parsed, f);
    if (rc == 0 && !srv_json_span(j->body, j->body_len, "messages", &messages, &n))
        rc = srv_fault_bad(f, "messages", "\"messages\" is missing");
    if (rc == 0)
        rc = all_messages(j, messages, n, parsed->child, &all, f);
    if (rc == 0)
        rc = srv_chat_render(j, all.p, all.n, NULL, &text, &len, f);
    if (rc == 0)
        rc = follow(j, text, len, ret, ret_n, f);
    if (rc == 0)
        remember_messages(j, &all, *ret_n);
    free(text);
    srv_buf_done(&all);
    return rc;
}

/* ---- contexts to be made ----------------------------------------------------------------------------------------- */

void srv_context_done(srv_context_content *c)
{
    free(c->source);
    free(c->ids);
    memset(c, 0, sizeof(*c));
}

/* Takes source and ids. */
static int set_content(eng_source kind, char *source, size_t len, size_t rendered, int32_t *ids, size_t n, srv_context_content *ret)
{
    *ret = (srv_context_content){.source = source, .ids = ids};
    ret->content = (eng_context_content){.kind = kind, .source = source, .source_len = len, .rendered = rendered, .ids = ids, .n_ids = n};
    return 0;
}

static const char *find_last(const char *text, size_t len, const char *what)
{
    const char *last = NULL, *at = text;
    while ((at = memmem(at, len - (size_t)(at - text), what, strlen(what))))
        last = at++;
    return last;
}

/* Without a template, the text is the prompt. */
static int of_raw_text(const srv_job *j, const char *text, srv_context_content *ret, srv_fault *f)
{
    int32_t *ids;
    size_t n, len = strlen(text);
    int rc = eng_tokenize(j->app->engine, text, len, ENG_TOK_ADD_SPECIAL, NULL, &ids, &n);
    if (rc < 0)
        return srv_fault_set(f, 500, "server_error", NULL, "tokenizing failed: %s", strerror(-rc));
    char *source = strdup(text);
    if (!source) {
        free(ids);
        return no_memory(f);
    }
    return set_content(ENG_SOURCE_TEXT, source, len, len, ids, n, ret);
}

int srv_context_of_text(const srv_job *j, const char *text, srv_context_content *ret, srv_fault *f)
{
    if (!j->app->chat_template || j->app->chat_failure[0])
        return of_raw_text(j, text, ret, f);
    static const char question[] = "[{\"role\":\"user\",\"content\":\"[retrievald: the question]\"}]";
    eng_context_content k = {.kind = ENG_SOURCE_TEXT, .source = text, .source_len = strlen(text)};
    char *rendering = NULL, *source = NULL;
    int32_t *ids = NULL;
    size_t len = 0, n = 0;
    srv_buf messages = {0};
    cJSON *parsed = cJSON_Parse(question);
    int rc = parsed ? open_turn(&k, question, sizeof(question) - 1, parsed->child, &messages, f) : no_memory(f);
    if (rc == 0)
        rc = messages.failed ? no_memory(f) : srv_chat_render(j, messages.p, messages.n, "false", &rendering, &len, f);
    const char *end = rc == 0 ? find_last(rendering, len, mark) : NULL;
    if (rc == 0 && !end)
        rc = srv_fault_bad(f, "text", "the chat template leaves out what a user says after a text");
    if (rc == 0)
        rc = tokenize(j, rendering, (size_t)(end - rendering), &ids, &n, f);
    if (rc == 0 && !(source = strdup(text)))
        rc = no_memory(f);
    if (rc == 0)
        set_content(ENG_SOURCE_TEXT, source, k.source_len, (size_t)(end - rendering), ids, n, ret);
    else
        free(ids);
    free(rendering);
    srv_buf_done(&messages);
    cJSON_Delete(parsed);
    return rc;
}

int srv_context_of_messages(const srv_job *j, const char *messages, size_t len, srv_context_content *ret, srv_fault *f)
{
    char *rendering, *source;
    int32_t *ids;
    size_t n_rendering, n;
    int rc = srv_chat_render(j, messages, len, "false", &rendering, &n_rendering, f);
    if (rc < 0)
        return rc;
    rc = tokenize(j, rendering, n_rendering, &ids, &n, f);
    free(rendering);
    if (rc < 0)
        return rc;
    if (!(source = strndup(messages, len))) {
        free(ids);
        return no_memory(f);
    }
    return set_content(ENG_SOURCE_MESSAGES, source, len, n_rendering, ids, n, ret);
}

static int of_raw_answer(const srv_job *j, srv_answer *a, srv_context_content *ret, srv_fault *f)
{
    int32_t *said;
    size_t n;
    int rc = eng_tokenize(j->app->engine, a->said, a->said_len, 0, NULL, &said, &n);
    if (rc < 0)
        return srv_fault_set(f, 500, "server_error", NULL, "tokenizing failed: %s", strerror(-rc));
    int32_t *ids = realloc(a->ids, (a->n_ids + n + 1) * sizeof(*ids));
    if (ids && n)
        memcpy(ids + a->n_ids, said, n * sizeof(*ids));
    free(said);
    if (!ids)
        return no_memory(f);
    a->ids = NULL;
    return set_content(ENG_SOURCE_TOKENS, NULL, 0, 0, ids, a->n_ids + n, ret);
}

int srv_context_of_answer(const srv_job *j, const char *id, srv_context_content *ret, srv_fault *f)
{
    srv_answer a;
    srv_buf all = {0}, last = {0};
    int rc = !j->app->recent ? -ENOENT : srv_recent_find(j->app->recent, j->request.tenant, id, &a);
    if (rc == -ENOENT)
        return srv_fault_set(f, 404, "not_found_error", "from", "there is no answer '%.40s' among the last ones", id);
    if (rc < 0)
        return no_memory(f);
    if (a.messages) {
        srv_buf_puts(&last, "[{\"role\":\"assistant\",\"content\":");
        srv_buf_string(&last, a.said, a.said_len);
        srv_buf_puts(&last, "}]");
        join_messages(a.messages, a.messages_len, last.p ? last.p : "[]", last.p ? last.n : 2, &all);
        rc = last.failed || all.failed ? no_memory(f) : srv_context_of_messages(j, all.p, all.n, ret, f);
    } else {
        rc = of_raw_answer(j, &a, ret, f);
    }
    srv_buf_done(&all);
    srv_buf_done(&last);
    srv_answer_done(&a);
    return rc;
}
