#include "http.h"

#include "log.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum {
    PING_MS = 5000,          /* a silent stream says that it lives */
    FIRST_HEADER_MS = 15000, /* from accept to the end of the first head */
    BODY_GRACE_MS = 30000,   /* a body may take this long, ... */
    BODY_BYTES_PER_MS = 1,   /* ... and longer as long as it comes at this rate */
    DRAIN_BYTES = 1 << 20,   /* of a refused body are read, so that the client sees the answer and not a reset */
    OUT_LIMIT = 16 << 20,    /* unread bytes of a stream before its client counts as gone */
    STREAM_BLOCK = 16 << 10,
    RETRY_AFTER = 2,
};

static void health(srv_server *s, srv_conn *c)
{
    srv_state state = atomic_load(&s->app.state);
    c->status = state == SRV_READY ? 200 : 503;
    if (state == SRV_READY) {
        srv_buf_puts(&c->reply, "{\"status\":\"ok\"}");
        return;
    }
    srv_fault_set(&c->fault, 503, "unavailable_error", NULL, "Loading model");
    srv_api_error(&c->fault, &c->reply);
}

static void props(srv_server *s, srv_conn *c)
{
    c->status = 200;
    srv_info_props(&s->app, c->sees_all, &c->reply);
}

static const srv_route routes[] = {
    {"POST", "/v1/chat/completions", srv_chat_prepare, .generates = true},
    {"POST", "/v1/completions", srv_text_prepare, .generates = true},
    {"POST", "/tokenize", srv_tokenize_prepare},
    {"POST", "/detokenize", srv_detokenize_prepare},
    {"POST", "/apply-template", srv_template_prepare},
    {"POST", "/v1/contexts", srv_context_make, .generates = true},
    {"GET", "/v1/contexts", srv_contexts_list},
    {"GET", "/v1/contexts/", srv_context_show},
    {"PATCH", "/v1/contexts/", srv_context_alter},
    {"DELETE", "/v1/contexts/", srv_context_remove},
    {"GET", "/v1/models", .get = srv_info_models},
    {"GET", "/models", .get = srv_info_models},
    {"GET", "/props", .special = props},
    {"GET", "/health", .special = health, .open = true},
    {"GET", "/v1/health", .special = health, .open = true},
    {"GET", "/metrics", .special = srv_metrics, .counts_all = true},
};

/* ---- lists ------------------------------------------------------------------------------------------------------ */

static srv_conn *conn_new(srv_server *s, struct MHD_Connection *mhd, const char *method)
{
    srv_conn *c = calloc(1, sizeof(*c));
    if (!c)
        return NULL;
    c->server = s;
    c->mhd = mhd;
    c->started_ms = c->out_last_ms = srv_now_ms();
    c->content_type = "application/json; charset=utf-8";
    snprintf(c->method, sizeof(c->method), "%s", method);
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    c->client = info ? info->socket_context : NULL;
    c->next = s->conns;
    if (c->next)
        c->next->prev = c;
    s->conns = c;
    s->n_conns++;
    return c;
}

static void release_body(srv_server *s, srv_buf *b)
{
    s->body_bytes -= b->cap;
    srv_buf_done(b);
}

static void conn_free(srv_conn *c)
{
    srv_server *s = c->server;
    if (c->prev)
        c->prev->next = c->next;
    else
        s->conns = c->next;
    if (c->next)
        c->next->prev = c->prev;
    s->n_conns--;
    srv_loop_unwatch(c);
    release_body(s, &c->body);
    srv_buf_done(&c->reply);
    srv_buf_done(&c->out);
    free(c);
}

void srv_http_client(void *cls, struct MHD_Connection *mhd, void **ctx, enum MHD_ConnectionNotificationCode what)
{
    srv_server *s = cls;
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        srv_client *k = calloc(1, sizeof(*k));
        const union MHD_ConnectionInfo *info = MHD_get_connection_info(mhd, MHD_CONNECTION_INFO_CONNECTION_FD);
        if (!k || !info) {
            free(k);
            return;
        }
        k->fd = info->connect_fd;
        k->deadline_ms = srv_now_ms() + FIRST_HEADER_MS;
        k->next = s->clients;
        if (k->next)
            k->next->prev = k;
        s->clients = k;
        *ctx = k;
        return;
    }
    srv_client *k = *ctx;
    if (!k)
        return;
    if (k->prev)
        k->prev->next = k->next;
    else
        s->clients = k->next;
    if (k->next)
        k->next->prev = k->prev;
    free(k);
}

static void set_deadline(srv_conn *c, double ms)
{
    if (c->client)
        c->client->deadline_ms = ms;
}

/* ---- answers ---------------------------------------------------------------------------------------------------- */

static void log_request(srv_conn *c, const char *note)
{
    if (c->logged)
        return;
    c->logged = true;
    const srv_job *j = c->job;
    const char *path = c->route ? c->route->path : "?";
    double ms = srv_now_ms() - c->started_ms;
    char code[8] = "-"; /* no answer was begun */
    if (c->status)
        snprintf(code, sizeof(code), "%d", c->status);
    if (j && j->request.n_ids)
        srv_log(LOG_INFO, "%s %s %s%s: prompt %zu (%u cached, %.0f ms), answer %u (%.0f ms), %.0f ms in all", c->method, path, code, note,
                j->request.n_ids, j->timings.cache_n, j->timings.prompt_ms, j->timings.predicted_n, j->timings.predicted_ms, ms);
    else
        srv_log(c->route && c->route->open ? LOG_DEBUG : LOG_INFO, "%s %s %s%s: %.0f ms", c->method, path, code, note, ms);
}

static void count(srv_conn *c)
{
    if (c->status > 0 && c->status < SRV_N_CODES)
        c->server->codes[c->status]++;
}

static void add_header(struct MHD_Response *r, const char *name, const char *value)
{
    if (MHD_add_response_header(r, name, value) != MHD_YES)
        srv_log(LOG_WARNING, "no memory for the header %s", name);
}

/* The methods that a route's path answers. */
static const char *allowed(const srv_route *route, char *all, size_t size)
{
    all[0] = 0;
    for (size_t i = 0; i < sizeof(routes) / sizeof(routes[0]); i++)
        if (strcmp(routes[i].path, route->path) == 0) {
            size_t n = strlen(all);
            snprintf(all + n, size - n, "%s%s", n ? ", " : "", strcmp(routes[i].method, "GET") == 0 ? "GET, HEAD" : routes[i].method);
        }
    return all;
}

/* Queues c->reply. */
static enum MHD_Result send_reply(srv_conn *c)
{
    if (c->reply.failed) {
        srv_buf_done(&c->reply);
        c->status = 500;
        srv_buf_puts(&c->reply, "{\"error\":{\"code\":500,\"message\":\"out of memory\",\"type\":\"server_error\",\"param\":null}}");
    }
    c->phase = SRV_REPLYING;
    struct MHD_Response *r = c->reply.p ? MHD_create_response_from_buffer(c->reply.n, c->reply.p, MHD_RESPMEM_MUST_FREE) : NULL;
    if (!r)
        return MHD_NO;
    c->reply = (srv_buf){0};
    add_header(r, MHD_HTTP_HEADER_CONTENT_TYPE, c->content_type);
    if (c->must_close || c->server->draining)
        add_header(r, MHD_HTTP_HEADER_CONNECTION, "close");
    char all[64];
    if (c->status == 405 && c->route)
        add_header(r, MHD_HTTP_HEADER_ALLOW, allowed(c->route, all, sizeof(all)));
    if (c->status == 401)
        add_header(r, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer");
    if (c->fault.retry_after) {
        char seconds[16];
        snprintf(seconds, sizeof(seconds), "%u", c->fault.retry_after);
        add_header(r, MHD_HTTP_HEADER_RETRY_AFTER, seconds);
    }
    enum MHD_Result ok = MHD_queue_response(c->mhd, (unsigned)c->status, r);
    MHD_destroy_response(r);
    count(c);
    log_request(c, "");
    return ok;
}

/* Sets the answer to c->fault; what still comes of a body is not kept. */
static void refuse(srv_conn *c)
{
    c->refused = true;
    release_body(c->server, &c->body);
    c->status = c->fault.status;
    srv_buf_done(&c->reply);
    srv_api_error(&c->fault, &c->reply);
}

/* ---- streams ---------------------------------------------------------------------------------------------------- */

static ssize_t stream_read(void *cls, uint64_t pos, char *buf, size_t max)
{
    srv_conn *c = cls;
    (void)pos;
    if (c->out_abort)
        return MHD_CONTENT_READER_END_WITH_ERROR;
    size_t n = c->out.n - c->out_sent;
    if (n == 0) {
        if (c->out_end)
            return MHD_CONTENT_READER_END_OF_STREAM;
        /* Without the suspension MHD would ask again at once, and again. */
        MHD_suspend_connection(c->mhd);
        c->suspended = true;
        return 0;
    }
    if (n > max)
        n = max;
    memcpy(buf, c->out.p + c->out_sent, n);
    c->out_sent += n;
    if (c->out_sent == c->out.n)
        c->out.n = c->out_sent = 0;
    return (ssize_t)n;
}

static enum MHD_Result start_stream(srv_conn *c)
{
    struct MHD_Response *r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK, stream_read, c, NULL);
    if (!r)
        return MHD_NO;
    add_header(r, MHD_HTTP_HEADER_CONTENT_TYPE, "text/event-stream; charset=utf-8");
    add_header(r, MHD_HTTP_HEADER_CACHE_CONTROL, "no-cache");
    add_header(r, "X-Accel-Buffering", "no");
    if (c->server->draining)
        add_header(r, MHD_HTTP_HEADER_CONNECTION, "close");
    c->status = 200;
    enum MHD_Result ok = MHD_queue_response(c->mhd, 200, r);
    MHD_destroy_response(r);
    count(c);
    return ok;
}

/* More was put in c->out, or it ended. */
static void stream_more(srv_conn *c)
{
    if (c->out.failed)
        c->out_abort = true;
    if (c->out_sent > c->out.n / 2) {
        memmove(c->out.p, c->out.p + c->out_sent, c->out.n - c->out_sent);
        c->out.n -= c->out_sent;
        c->out_sent = 0;
    }
    c->out_last_ms = srv_now_ms();
    srv_loop_resume(c);
}

static void drop_job(srv_server *s, srv_job *j)
{
    s->in_flight -= j->generates;
    srv_job_free(j);
}

/* A job that never ran, and was to make a context for somebody who waited for it. */
static void forget_making(srv_job *j)
{
    if (!j->makes || !j->context || j->ran)
        return;
    eng_context_abandon(j->app->engine, j->context);
    j->context = NULL;
}

/* The client is gone, or does not read: its job stops within a layer. */
static void abandon(srv_conn *c)
{
    srv_server *s = c->server;
    srv_job *j = c->job;
    c->gone = c->out_abort = true;
    if (!j)
        return;
    s->cancelled++;
    c->job = NULL;
    log_request(c, " cancelled");
    j->owner = NULL; /* one that is being prepared or runs is freed when that ends */
    if (srv_queue_cancel(&s->queue, j)) {
        forget_making(j);
        drop_job(s, j);
    }
}

void srv_http_client_gone(srv_conn *c)
{
    abandon(c);
    srv_loop_resume(c);
}

/* ---- jobs ------------------------------------------------------------------------------------------------------- */

static int admit(srv_server *s, const srv_route *route, srv_fault *f)
{
    if (!route->generates || s->in_flight <= s->app.settings->max_queue)
        return 0;
    srv_fault_set(f, 429, "rate_limit_error", NULL, "the queue is full: %u requests are running or waiting", s->in_flight);
    f->retry_after = RETRY_AFTER;
    return -EINVAL;
}

/* The body is there: a work item prepares the job. */
static void start_job(srv_conn *c)
{
    srv_server *s = c->server;
    if (admit(s, c->route, &c->fault) < 0) {
        refuse(c);
        return;
    }
    srv_job *j = srv_job_new(&s->app, c->route->prepare, c->body.p, c->body.n);
    if (!j) {
        srv_fault_set(&c->fault, 500, "server_error", NULL, "out of memory");
        refuse(c);
        return;
    }
    j->body_charged = c->body.cap;
    c->body = (srv_buf){0};
    j->owner = c;
    j->request.tenant = c->tenant;
    memcpy(j->target, c->target, sizeof(j->target));
    j->generates = c->route->generates;
    c->job = j;
    c->phase = SRV_WAITING;
    s->in_flight += j->generates;
    MHD_suspend_connection(c->mhd);
    c->suspended = true;
    srv_loop_prepare(s, j);
}

/* What a work item answered. */
static void answer(srv_conn *c, srv_job *j)
{
    c->phase = SRV_REPLYING;
    c->status = j->status ? j->status : 200;
    c->reply = j->reply;
    j->reply = (srv_buf){0};
}

void srv_http_prepared(srv_server *s, srv_job *j)
{
    srv_conn *c = j->owner;
    s->body_bytes -= j->body_charged;
    free(j->body);
    j->body = NULL;
    if (!c) {
        forget_making(j);
        drop_job(s, j);
        return;
    }
    if (j->rc == 0 && s->stopping)
        j->rc = srv_fault_set(&j->fault, 503, "unavailable_error", NULL, "the server is shutting down");
    if (j->rc != 0) {
        forget_making(j);
        c->job = NULL;
        c->phase = SRV_REPLYING;
        if (j->rc < 0) {
            c->fault = j->fault;
            refuse(c);
        } else {
            answer(c, j);
        }
        drop_job(s, j);
        srv_loop_resume(c);
        return;
    }
    if (j->detached) {
        c->job = NULL;
        j->owner = NULL;
        answer(c, j);
        srv_queue_put(&s->queue, j);
        srv_loop_resume(c);
        return;
    }
    srv_queue_put(&s->queue, j);
    srv_loop_watch(c);
    /* The head of a stream goes out now: the client knows that it is in the queue. */
    if (j->stream) {
        c->phase = SRV_STREAMING;
        srv_loop_resume(c);
    }
}

static void conn_news(srv_conn *c, srv_job *j, const srv_outbox *o)
{
    if (o->finished && j->end == SRV_END_CANCELLED)
        srv_fault_set(&j->fault, 503, "unavailable_error", NULL, "the server is shutting down");
    if (j->stream) {
        srv_answer_stream(j, o, &c->out);
        c->out_end = o->finished;
        if (c->out.n - c->out_sent > OUT_LIMIT && !o->finished)
            abandon(c);
        stream_more(c);
    } else if (j->end == SRV_END_FAULT || j->end == SRV_END_CANCELLED) {
        c->fault = j->fault;
        refuse(c);
    } else {
        c->status = 200;
        j->shape->whole(j, o, &c->reply);
    }
    if (!o->finished || !c->job)
        return;
    log_request(c, j->end == SRV_END_FAULT ? " failed" : "");
    c->job = NULL;
    if (!j->stream)
        c->phase = SRV_REPLYING;
    srv_loop_unwatch(c);
    srv_loop_resume(c);
}

void srv_http_news(srv_server *s)
{
    srv_outbox o;
    srv_job *j;
    while ((j = srv_queue_news(&s->queue, &o))) {
        bool finished = o.finished;
        if (!j->makes && o.text.n)
            srv_buf_add(&j->said, o.text.p, o.text.n);
        if (j->owner)
            conn_news(j->owner, j, &o);
        srv_outbox_done(&o);
        if (finished && (j->end == SRV_END_STOP || j->end == SRV_END_LENGTH))
            srv_recent_add(s->app.recent, j);
        if (finished)
            drop_job(s, j);
    }
}

/* ---- requests --------------------------------------------------------------------------------------------------- */

static bool is_path(const char *path, const char *url)
{
    size_t n = strlen(path);
    bool named = n > 1 && path[n - 1] == '/';
    return named ? strncmp(path, url, n) == 0 && url[n] && !strchr(url + n, '/') : strcmp(path, url) == 0;
}

static int find_route(srv_conn *c, const char *url, srv_fault *f)
{
    const char *method = strcmp(c->method, "HEAD") == 0 ? "GET" : c->method;
    for (size_t i = 0; i < sizeof(routes) / sizeof(routes[0]); i++) {
        if (!is_path(routes[i].path, url))
            continue;
        c->route = &routes[i];
        snprintf(c->target, sizeof(c->target), "%s", url + strlen(c->route->path));
        if (strcmp(routes[i].method, method) == 0)
            return 0;
    }
    char all[64];
    if (c->route)
        return srv_fault_set(f, 405, "invalid_request_error", NULL, "%s answers %s, not %s", c->route->path, allowed(c->route, all, sizeof(all)), c->method);
    return srv_fault_set(f, 404, "not_found_error", NULL, "there is no such route");
}

static bool takes_body(const srv_route *r)
{
    return strcmp(r->method, "POST") == 0 || strcmp(r->method, "PATCH") == 0;
}

/* All that can be said before the body comes. */
static int first_look(srv_conn *c, const char *url, const char *version, srv_fault *f)
{
    srv_server *s = c->server;
    uint64_t most = (uint64_t)s->app.settings->max_body_mb << 20;
    if (srv_guard_framing(c, url, version, f) < 0 || srv_guard_host(s, c, f) < 0)
        return -EINVAL;
    int rc = find_route(c, url, f);
    if ((!c->route || !c->route->open) && srv_guard_key(s, c, f) < 0)
        return -EINVAL;
    if (rc < 0)
        return rc;
    if (s->draining) {
        c->must_close = true;
        return srv_fault_set(f, 503, "unavailable_error", NULL, "the server is shutting down");
    }
    if (!c->route->open && atomic_load(&s->app.state) != SRV_READY) {
        srv_fault_set(f, 503, "unavailable_error", NULL, "Loading model");
        f->retry_after = RETRY_AFTER;
        return -EINVAL;
    }
    if (!takes_body(c->route))
        return 0;
    if (srv_guard_type(c, f) < 0)
        return -EINVAL;
    if (c->body_announced > most)
        return srv_fault_set(f, 413, "invalid_request_error", NULL, "the body has %llu bytes; at most %llu are allowed (--max-body-mb)",
                             (unsigned long long)c->body_announced, (unsigned long long)most);
    return admit(s, c->route, f);
}

static enum MHD_Result begin(srv_conn *c, const char *url, const char *version)
{
    bool refused = first_look(c, url, version, &c->fault) < 0;
    bool has_body = c->chunked || c->body_announced > 0;
    c->body_started_ms = srv_now_ms();
    set_deadline(c, has_body ? c->body_started_ms + BODY_GRACE_MS : 0);
    if (!refused)
        return MHD_YES;
    refuse(c);
    /* A client that has not begun to send, or would send too much, hears it now; MHD closes after that. */
    if (c->must_close || (has_body && (c->expects || c->body_announced > DRAIN_BYTES))) {
        c->must_close = true;
        return send_reply(c);
    }
    return MHD_YES;
}

static enum MHD_Result take_body(srv_conn *c, const char *data, size_t n)
{
    srv_server *s = c->server;
    uint64_t most = (uint64_t)s->app.settings->max_body_mb << 20;
    c->body_seen += n;
    set_deadline(c, c->body_started_ms + BODY_GRACE_MS + (double)(c->body_seen / BODY_BYTES_PER_MS));
    if (!c->refused && c->body_seen > most) {
        srv_fault_set(&c->fault, 413, "invalid_request_error", NULL, "the body has more than %llu bytes (--max-body-mb)",
                      (unsigned long long)most);
        refuse(c);
    }
    if (c->refused || !takes_body(c->route)) /* an answer cannot overtake a body: read a little more of it, then give up */
        return c->body_seen > most + DRAIN_BYTES ? MHD_NO : MHD_YES;
    size_t before = c->body.cap;
    srv_buf_add(&c->body, data, n);
    s->body_bytes += c->body.cap - before;
    if (c->body.failed || s->body_bytes > s->body_limit) {
        srv_fault_set(&c->fault, 503, "unavailable_error", NULL, "too many large requests at once");
        c->fault.retry_after = RETRY_AFTER;
        refuse(c);
    }
    return MHD_YES;
}

static enum MHD_Result whole_request(srv_conn *c)
{
    srv_server *s = c->server;
    set_deadline(c, 0);
    if (!c->refused && c->route->prepare) {
        start_job(c);
        if (!c->refused)
            return MHD_YES;
    } else if (!c->refused && c->route->get) {
        c->status = 200;
        c->route->get(&s->app, &c->reply);
    } else if (!c->refused) {
        c->route->special(s, c);
    }
    return send_reply(c);
}

enum MHD_Result srv_http_handle(void *cls, struct MHD_Connection *mhd, const char *url, const char *method, const char *version,
                                const char *data, size_t *size, void **ctx)
{
    srv_conn *c = *ctx;
    if (!c) {
        *ctx = c = conn_new(cls, mhd, method);
        return c ? begin(c, url, version) : MHD_NO;
    }
    if (*size) {
        size_t n = *size;
        *size = 0;
        return take_body(c, data, n);
    }
    if (c->gone)
        return MHD_NO;
    switch (c->phase) {
    case SRV_RECEIVING:
        return whole_request(c);
    case SRV_REPLYING:
        return send_reply(c);
    case SRV_STREAMING:
        return start_stream(c);
    case SRV_WAITING:
        break;
    }
    return MHD_YES;
}

void srv_http_completed(void *cls, struct MHD_Connection *mhd, void **ctx, enum MHD_RequestTerminationCode why)
{
    srv_server *s = cls;
    srv_conn *c = *ctx;
    (void)mhd;
    (void)why;
    if (!c)
        return;
    *ctx = NULL;
    abandon(c);
    set_deadline(c, srv_now_ms() + s->app.settings->timeout * 1e3);
    conn_free(c);
}

/* ---- time ------------------------------------------------------------------------------------------------------- */

void srv_http_tick(srv_server *s, double now_ms)
{
    for (srv_client *k = s->clients; k; k = k->next)
        if (k->deadline_ms > 0 && now_ms > k->deadline_ms) {
            k->deadline_ms = 0;
            shutdown(k->fd, SHUT_RDWR); /* MHD sees the end and cleans up */
        }
    for (srv_conn *c = s->conns; c; c = c->next)
        if (c->phase == SRV_STREAMING && c->job && c->suspended && now_ms - c->out_last_ms >= PING_MS) {
            srv_buf_puts(&c->out, ":\n\n");
            stream_more(c);
        }
}

void srv_http_cancel_all(srv_server *s)
{
    for (srv_conn *c = s->conns; c; c = c->next) {
        srv_job *j = c->job;
        if (!j || !srv_queue_cancel(&s->queue, j))
            continue;
        srv_outbox o = {.finished = true};
        j->end = SRV_END_CANCELLED;
        forget_making(j);
        conn_news(c, j, &o);
        drop_job(s, j);
    }
    for (srv_job *j; (j = srv_queue_cancel_next(&s->queue));) /* those without a client */
        drop_job(s, j);
}
