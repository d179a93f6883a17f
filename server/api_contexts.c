/* /v1/contexts: named contexts. Making one is a generation that ends with its prompt; the others answer at once, or when the disk has it. */
#include "api.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- out -------------------------------------------------------------------------------------------------------- */

static const char *const kinds[] = {[ENG_SOURCE_TOKENS] = "tokens", [ENG_SOURCE_TEXT] = "text", [ENG_SOURCE_MESSAGES] = "messages"};
static const char *const states[] = {[ENG_CONTEXT_QUEUED] = "queued", [ENG_CONTEXT_READING] = "reading", [ENG_CONTEXT_READY] = "ready", [ENG_CONTEXT_FAILED] = "failed"};

static void write_time(srv_buf *out, const char *name, int64_t t)
{
    srv_buf_printf(out, ",\"%s\":", name);
    if (t)
        srv_buf_printf(out, "%" PRId64, t);
    else
        srv_buf_puts(out, "null");
}

static void write_info(const eng_context_info *i, srv_buf *out)
{
    uint64_t bytes = i->ram_bytes > i->disk_bytes ? i->ram_bytes : i->disk_bytes;
    const char *index = !i->ram_tokens ? "absent" : i->indexes_ready == i->indexes ? "ready" : "building";
    srv_buf_puts(out, "{\"object\":\"context\",\"name\":");
    srv_buf_cstring(out, i->name);
    srv_buf_printf(out, ",\"state\":\"%s\",\"error\":", states[i->state]);
    srv_buf_cstring(out, i->error[0] ? i->error : NULL);
    srv_buf_printf(out, ",\"source\":\"%s\",\"tokens\":%u,\"read\":%u,\"bytes\":%" PRIu64, kinds[i->kind], i->tokens, i->state == ENG_CONTEXT_READY ? i->tokens : i->read, bytes);
    write_time(out, "created", i->created);
    write_time(out, "expires", i->expires);
    write_time(out, "used", i->used);
    srv_buf_printf(out, ",\"hits\":%" PRIu64 ",\"pinned\":%s", i->hits, i->pinned ? "true" : "false");
    srv_buf_printf(out, ",\"tiers\":{\"ram\":{\"tokens\":%u,\"bytes\":%" PRIu64 "},\"disk\":{\"tokens\":%u,\"bytes\":%" PRIu64 "}}", i->ram_tokens, i->ram_bytes,
                   i->disk_tokens, i->disk_bytes);
    srv_buf_printf(out, ",\"index\":{\"state\":\"%s\",\"segments\":%u,\"ready\":%u}}", index, i->indexes, i->indexes_ready);
}

/* One context as the reply. */
static int reply_info(srv_job *j, const char *name, srv_fault *f)
{
    eng_context_info *info;
    int rc = eng_context_list(j->app->engine, j->request.tenant, name, &info);
    if (rc < 0)
        return srv_context_fault(rc, name, NULL, NULL, f);
    write_info(info, &j->reply);
    free(info);
    return 1;
}

void srv_context_write(srv_job *j)
{
    srv_fault gone; /* removed, or expired, meanwhile */
    j->reply.n = 0;
    if (reply_info(j, j->target, &gone) < 0)
        srv_api_error(&gone, &j->reply);
}

static void context_begin(srv_job *j, srv_buf *out)
{
    (void)j;
    (void)out;
}

static void context_progress(srv_job *j, const srv_outbox *o, srv_buf *out)
{
    srv_buf_puts(out, "data: {\"object\":\"context.progress\",\"name\":");
    srv_buf_cstring(out, j->target);
    srv_answer_progress(o, out);
    srv_buf_puts(out, "}\n\n");
}

static void context_delta(srv_job *j, const char *text, size_t len, const eng_token *tokens, size_t n_tokens, srv_buf *out)
{
    (void)j, (void)text, (void)len, (void)tokens, (void)n_tokens, (void)out; /* there is no answer */
}

static void context_finish(srv_job *j, srv_buf *out)
{
    srv_buf_puts(out, "data: ");
    srv_buf_add(out, j->reply.p, j->reply.n);
    srv_buf_puts(out, "\n\n");
}

static void context_whole(srv_job *j, const srv_outbox *o, srv_buf *out)
{
    (void)o;
    srv_buf_add(out, j->reply.p, j->reply.n);
}

const srv_shape srv_shape_context = {context_begin, context_progress, context_delta, context_finish, context_whole};

/* ---- in --------------------------------------------------------------------------------------------------------- */

static int bad_ttl(srv_fault *f)
{
    return srv_fault_bad(f, "ttl", "\"ttl\" must be a number of seconds, or one with a unit, as \"90m\", \"24h\" or \"7d\"; null: for ever");
}

/* 1: there, 0 (null) for ever; 0: absent. */
static int read_ttl(const cJSON *body, int64_t *ret, srv_fault *f)
{
    static const struct {
        char unit;
        int64_t seconds;
    } units[] = {{0, 1}, {'s', 1}, {'m', 60}, {'h', 3600}, {'d', 86400}};
    const int64_t most = (int64_t)100 * 366 * 86400;
    const cJSON *v = NULL;
    for (const cJSON *c = body->child; c; c = c->next)
        v = strcmp(c->string, "ttl") == 0 ? c : v;
    *ret = 0;
    if (!v || cJSON_IsNull(v))
        return v != NULL;
    srv_json_obj o = {body, NULL, f};
    if (cJSON_IsNumber(v))
        return srv_json_int(&o, "ttl", 1, most, ret);
    char *end = NULL;
    int64_t n = cJSON_IsString(v) && v->valuestring[0] >= '0' && v->valuestring[0] <= '9' ? strtoll(v->valuestring, &end, 10) : 0;
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]) && end; i++)
        if (*end == units[i].unit && (!*end || !end[1])) {
            if (n < 1 || n > most / units[i].seconds)
                return bad_ttl(f);
            *ret = n * units[i].seconds;
            return 1;
        }
    return bad_ttl(f);
}

static int read_content(const srv_job *j, const cJSON *body, srv_context_content *ret, srv_fault *f)
{
    srv_json_obj o = {body, NULL, f};
    const char *text = NULL, *from = NULL, *p;
    size_t n;
    const cJSON *messages = srv_json_get(body, "messages");
    if (srv_json_str(&o, "text", &text) < 0 || srv_json_str(&o, "from", &from) < 0)
        return -EINVAL;
    if ((text != NULL) + (from != NULL) + (messages != NULL) != 1)
        return srv_fault_bad(f, NULL, "a context is made from one of \"text\", \"messages\" and \"from\", the id of an answer");
    if (from)
        return srv_context_of_answer(j, from, ret, f);
    if (text)
        return text[0] ? srv_context_of_text(j, text, ret, f) : srv_fault_bad(f, "text", "the text is empty");
    if (!cJSON_IsArray(messages))
        return srv_fault_bad(f, "messages", "\"messages\" must be an array, not %s", srv_json_kind(messages));
    if (!messages->child)
        return srv_fault_bad(f, "messages", "\"messages\" is empty");
    if (!srv_json_span(j->body, j->body_len, "messages", &p, &n))
        return srv_fault_bad(f, "messages", "\"messages\" is missing");
    return srv_context_of_messages(j, p, n, ret, f);
}

/* The job that reads it. */
static int set_job(srv_job *j, const eng_context_content *k, srv_fault *f)
{
    int32_t *ids = malloc((k->n_ids ? k->n_ids : 1) * sizeof(*ids));
    if (!ids)
        return srv_fault_set(f, 500, "server_error", NULL, "out of memory");
    memcpy(ids, k->ids, k->n_ids * sizeof(*ids));
    j->shape = &srv_shape_context;
    j->makes = j->return_progress = true;
    j->request.attention = j->app->attention;
    j->request.sampling = j->app->sampling;
    j->request.cache_prompt = true;
    j->max_tokens = 0;
    return srv_api_prompt(j, ids, k->n_ids, k->kind == ENG_SOURCE_TEXT ? "text" : k->kind == ENG_SOURCE_MESSAGES ? "messages" : "from", f);
}

static int make(srv_job *j, const cJSON *body, srv_fault *f)
{
    srv_json_obj o = {body, NULL, f};
    srv_context_content content = {0};
    eng_context_params p = {.tenant = j->request.tenant};
    char err[320] = "";
    if (srv_json_str(&o, "name", &p.name) < 0 || srv_json_bool(&o, "pinned", &p.pinned) < 0 || srv_json_bool(&o, "replace", &p.replace) < 0 ||
        srv_json_bool(&o, "stream", &j->stream) < 0 || read_ttl(body, &p.ttl, f) < 0)
        return -EINVAL;
    if (!p.name)
        return srv_fault_bad(f, "name", "\"name\" is missing");
    int rc = read_content(j, body, &content, f);
    if (rc == 0)
        rc = set_job(j, &content.content, f);
    if (rc == 0) {
        p.content = content.content;
        rc = eng_context_make(j->app->engine, &p, &j->context, err, sizeof(err));
        if (rc < 0)
            rc = srv_context_fault(rc, p.name, rc == -ENOSPC ? NULL : "name", err, f);
    }
    srv_context_done(&content);
    if (rc < 0)
        return rc;
    snprintf(j->target, sizeof(j->target), "%s", p.name);
    j->detached = !j->stream;
    j->status = 202;
    return j->stream ? 0 : reply_info(j, j->target, f) < 0 ? -EINVAL : 0;
}

int srv_context_make(srv_job *j, srv_fault *f)
{
    cJSON *body;
    int rc = srv_api_body(j, &body, f);
    if (rc < 0)
        return rc;
    rc = make(j, body, f);
    cJSON_Delete(body);
    return rc;
}

int srv_contexts_list(srv_job *j, srv_fault *f)
{
    eng_context_info *all;
    int n = eng_context_list(j->app->engine, j->request.tenant, NULL, &all);
    if (n < 0)
        return srv_context_fault(n, "", NULL, NULL, f);
    srv_buf_puts(&j->reply, "{\"object\":\"list\",\"data\":[");
    for (int i = 0; i < n; i++) {
        srv_buf_puts(&j->reply, i ? "," : "");
        write_info(&all[i], &j->reply);
    }
    srv_buf_puts(&j->reply, "]}");
    free(all);
    return 1;
}

int srv_context_show(srv_job *j, srv_fault *f)
{
    return reply_info(j, j->target, f);
}

static int alter(srv_job *j, const cJSON *body, srv_fault *f)
{
    srv_json_obj o = {body, NULL, f};
    eng_context_change c = {0};
    char err[320] = "";
    int ttl = read_ttl(body, &c.ttl, f), pinned = ttl < 0 ? ttl : srv_json_bool(&o, "pinned", &c.pinned);
    if (ttl < 0 || pinned < 0 || srv_json_str(&o, "name", &c.name) < 0)
        return -EINVAL;
    c.set_ttl = ttl > 0;
    c.set_pinned = pinned > 0;
    int rc = eng_context_alter(j->app->engine, j->request.tenant, j->target, &c, err, sizeof(err));
    if (rc < 0)
        return srv_context_fault(rc, j->target, rc == -EEXIST || rc == -EINVAL ? "name" : rc == -ENOSPC ? "pinned" : NULL, err, f);
    return reply_info(j, c.name ? c.name : j->target, f);
}

int srv_context_alter(srv_job *j, srv_fault *f)
{
    cJSON *body;
    int rc = srv_api_body(j, &body, f);
    if (rc < 0)
        return rc;
    rc = alter(j, body, f);
    cJSON_Delete(body);
    return rc;
}

int srv_context_remove(srv_job *j, srv_fault *f)
{
    int rc = eng_context_remove(j->app->engine, j->request.tenant, j->target);
    if (rc < 0)
        return srv_context_fault(rc, j->target, NULL, NULL, f);
    srv_buf_puts(&j->reply, "{\"object\":\"context.deleted\",\"name\":");
    srv_buf_cstring(&j->reply, j->target);
    srv_buf_puts(&j->reply, ",\"deleted\":true}");
    return 1;
}
