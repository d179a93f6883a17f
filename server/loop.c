/* libmicrohttpd in a libuv loop.
 *
 * MHD has no thread of its own: its epoll descriptor is polled by libuv, MHD_run() does the work, MHD_get_timeout() sets a timer.
 * Everything that calls MHD is on the loop thread. The engine thread wakes the loop by uv_async, which coalesces: all news is taken each
 * time. A suspended connection is invisible to MHD, its disconnect too: while a job waits or runs, a second poll watches its socket for the
 * peer's end.
 */
#include "http.h"

#include "log.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

enum {
    TICK_MS = 1000,
    DRAIN_MS = 30000,       /* running and waiting requests get this long after the first signal */
    DRAIN_CANCEL_MS = 5000, /* and the answers of those that were cancelled then this */
    POOL_BYTES = 32 << 10,  /* of a connection: bounds its head */
    LOAD_EXTEND_US = 30000000,
};

typedef struct srv_watch {
    uv_poll_t poll;
    srv_conn *conn;
} srv_watch;

typedef struct {
    uv_work_t work;
    srv_server *server;
    srv_job *job;
} work_item;

/* ---- MHD -------------------------------------------------------------------------------------------------------- */

static void pump(srv_server *s);

static void on_mhd_timer(uv_timer_t *t)
{
    pump(t->data);
}

static void on_mhd_poll(uv_poll_t *p, int status, int events)
{
    (void)status;
    (void)events;
    pump(p->data);
}

static void pump(srv_server *s)
{
    MHD_UNSIGNED_LONG_LONG ms;
    MHD_run(s->mhd);
    if (MHD_get_timeout(s->mhd, &ms) == MHD_YES)
        uv_timer_start(&s->mhd_timer, on_mhd_timer, ms, 0);
    else
        uv_timer_stop(&s->mhd_timer);
    if (s->draining && s->in_flight == 0 && s->n_work == 0 && s->n_conns == 0)
        uv_stop(&s->loop);
}

/* MHD takes it up at the next MHD_run: the timer makes sure that there is one. */
void srv_loop_resume(srv_conn *c)
{
    if (!c->suspended)
        return;
    c->suspended = false;
    MHD_resume_connection(c->mhd);
    uv_timer_start(&c->server->mhd_timer, on_mhd_timer, 0, 0);
}

/* Paths stay as they were sent: routes are matched exactly, and %00 must not end a string. */
static size_t no_unescape(void *cls, struct MHD_Connection *mhd, char *s)
{
    (void)cls;
    (void)mhd;
    return strlen(s);
}

static void log_mhd(void *cls, const char *fmt, va_list ap)
{
    char line[400];
    (void)cls;
    vsnprintf(line, sizeof(line), fmt, ap);
    srv_log(LOG_DEBUG, "http: %s", line);
}

static int start_mhd(srv_server *s)
{
    const cfg_settings *c = s->app.settings;
    s->mhd =
        MHD_start_daemon(MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG, 0, NULL, NULL, srv_http_handle, s,
                         MHD_OPTION_EXTERNAL_LOGGER, log_mhd, NULL, MHD_OPTION_LISTEN_SOCKET, s->listen_fd, MHD_OPTION_CONNECTION_LIMIT,
                         (unsigned)c->max_connections, MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)c->timeout,
                         MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)POOL_BYTES, MHD_OPTION_NOTIFY_COMPLETED, srv_http_completed, s,
                         MHD_OPTION_NOTIFY_CONNECTION, srv_http_client, s, MHD_OPTION_UNESCAPE_CALLBACK, no_unescape, NULL, MHD_OPTION_END);
    if (!s->mhd)
        return -EIO;
    s->listen_fd = -1; /* MHD's now */
    const union MHD_DaemonInfo *info = MHD_get_daemon_info(s->mhd, MHD_DAEMON_INFO_EPOLL_FD);
    if (!info)
        return -EIO;
    int rc = uv_poll_init(&s->loop, &s->mhd_poll, info->epoll_fd);
    if (rc < 0)
        return rc;
    s->mhd_poll.data = s->mhd_timer.data = s;
    return uv_poll_start(&s->mhd_poll, UV_READABLE, on_mhd_poll);
}

/* ---- watching a waiting client ---------------------------------------------------------------------------------- */

static void free_watch(uv_handle_t *h)
{
    free(h->data);
}

void srv_loop_unwatch(srv_conn *c)
{
    if (!c->watch)
        return;
    c->watch->conn = NULL;
    uv_close((uv_handle_t *)&c->watch->poll, free_watch);
    c->watch = NULL;
}

static void on_disconnect(uv_poll_t *p, int status, int events)
{
    srv_watch *w = p->data;
    srv_conn *c = w->conn;
    if (!c || (status == 0 && !(events & UV_DISCONNECT)))
        return;
    srv_loop_unwatch(c);
    srv_http_client_gone(c);
}

void srv_loop_watch(srv_conn *c)
{
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(c->mhd, MHD_CONNECTION_INFO_CONNECTION_FD);
    srv_watch *w = calloc(1, sizeof(*w));
    if (!w || !info || uv_poll_init(&c->server->loop, &w->poll, info->connect_fd) < 0) {
        srv_log(LOG_WARNING, "a client cannot be watched: its request runs to the end");
        free(w);
        return;
    }
    w->conn = c;
    w->poll.data = w;
    c->watch = w;
    uv_poll_start(&w->poll, UV_DISCONNECT, on_disconnect);
}

/* ---- work items ------------------------------------------------------------------------------------------------- */

static void do_work(uv_work_t *w)
{
    srv_job *j = ((work_item *)w->data)->job;
    j->rc = j->prepare(j, &j->fault);
}

static void after_work(uv_work_t *w, int status)
{
    work_item *i = w->data;
    (void)status;
    i->server->n_work--;
    srv_http_prepared(i->server, i->job);
    pump(i->server);
    free(i);
}

void srv_loop_prepare(srv_server *s, srv_job *j)
{
    work_item *i = calloc(1, sizeof(*i));
    if (i) {
        *i = (work_item){.work.data = i, .server = s, .job = j};
        if (uv_queue_work(&s->loop, &i->work, do_work, after_work) == 0) {
            s->n_work++;
            return;
        }
    }
    free(i);
    j->rc = srv_fault_set(&j->fault, 500, "server_error", NULL, "out of memory");
    srv_http_prepared(s, j);
}

/* ---- the engine thread's news ----------------------------------------------------------------------------------- */

static void announce(srv_server *s)
{
    srv_state state = atomic_load(&s->app.state);
    if (s->announced || state == SRV_LOADING)
        return;
    s->announced = true;
    if (state == SRV_FAILED) {
        srv_log(LOG_ERR, "%s", s->app.failure);
        s->exit_status = EXIT_FAILURE;
        uv_stop(&s->loop);
        return;
    }
    const eng_info *i = s->app.info;
    srv_log(LOG_INFO, "ready: %s (%s, %s), context %u tokens, %u threads, %s%s%s", s->app.model_name, i->architecture, i->type, i->n_ctx,
            i->n_threads, i->cpu, i->gpu ? ", " : "", i->gpu ? i->gpu : "");
    sd_notifyf(0, "READY=1\nSTATUS=Serving %s on %s", s->app.model_name, s->address);
}

static void on_async(uv_async_t *a)
{
    srv_server *s = a->data;
    announce(s);
    srv_http_news(s);
    pump(s);
}

static void wake(void *ctx)
{
    srv_server *s = ctx;
    uv_async_send(&s->async);
}

/* ---- time and signals ------------------------------------------------------------------------------------------- */

/* The watchdog is fed while this loop turns and the engine thread either waits or gets on. */
static void feed_watchdog(srv_server *s, double now)
{
    if (atomic_load(&s->app.state) == SRV_LOADING) {
        sd_notifyf(0, "EXTEND_TIMEOUT_USEC=%d\nSTATUS=Loading model\nWATCHDOG=1", LOAD_EXTEND_US);
        return;
    }
    if (s->watchdog_us == 0 || now - s->last_fed_ms < (double)s->watchdog_us / 4e3 || !s->app.engine)
        return;
    eng_stats stats;
    eng_stats_get(s->app.engine, &stats);
    uint64_t beat = stats.heartbeat + atomic_load(&s->worker.beats);
    if (!atomic_load(&s->worker.waiting) && beat == s->last_beat)
        return;
    s->last_beat = beat;
    s->last_fed_ms = now;
    sd_notify(0, "WATCHDOG=1");
}

static void on_tick(uv_timer_t *t)
{
    srv_server *s = t->data;
    double now = srv_now_ms();
    feed_watchdog(s, now);
    srv_http_tick(s, now);
    if (atomic_load(&s->app.state) == SRV_READY && eng_contexts_tick(s->app.engine))
        srv_queue_nudge(&s->queue);
    if (s->draining && now > s->drain_deadline_ms) {
        if (s->stopping) {
            uv_stop(&s->loop);
        } else {
            srv_log(LOG_WARNING, "requests are still running after %d s: cancelled", DRAIN_MS / 1000);
            s->stopping = true;
            s->drain_deadline_ms = now + DRAIN_CANCEL_MS;
            srv_http_cancel_all(s);
        }
    }
    pump(s);
}

static void on_signal(uv_signal_t *sig, int number)
{
    srv_server *s = sig->data;
    if (s->draining) {
        srv_log(LOG_WARNING, "%s again: ending at once", strsignal(number));
        _exit(s->exit_status);
    }
    srv_log(LOG_INFO, "%s: finishing %u requests; again to end at once", strsignal(number), s->in_flight);
    sd_notify(0, "STOPPING=1");
    s->draining = true;
    s->drain_deadline_ms = srv_now_ms() + DRAIN_MS;
    int fd = MHD_quiesce_daemon(s->mhd);
    if (fd >= 0)
        close(fd);
    pump(s);
}

static void on_trace_signal(uv_signal_t *sig, int number)
{
    srv_server *s = sig->data;
    if (!s->app.trace) {
        srv_log(LOG_WARNING, "%s: there is no trace to write; start with --trace FILE", strsignal(number));
        return;
    }
    atomic_store(&s->app.trace_wanted, true);
    srv_queue_nudge(&s->queue);
}

/* ---- start and end ---------------------------------------------------------------------------------------------- */

static int start(srv_server *s, const eng_params *params)
{
    int rc = uv_async_init(&s->loop, &s->async, on_async);
    if (rc < 0)
        return rc;
    uv_timer_init(&s->loop, &s->mhd_timer);
    uv_timer_init(&s->loop, &s->tick);
    uv_signal_init(&s->loop, &s->on_term);
    uv_signal_init(&s->loop, &s->on_int);
    uv_signal_init(&s->loop, &s->on_usr1);
    s->async.data = s->tick.data = s->on_term.data = s->on_int.data = s->on_usr1.data = s;
    uv_timer_start(&s->tick, on_tick, TICK_MS, TICK_MS);
    uv_signal_start(&s->on_term, on_signal, SIGTERM);
    uv_signal_start(&s->on_int, on_signal, SIGINT);
    rc = srv_queue_init(&s->queue, wake, s);
    if (rc == 0)
        uv_signal_start(&s->on_usr1, on_trace_signal, SIGUSR1);
    if (rc == 0)
        rc = start_mhd(s);
    if (rc == 0)
        rc = srv_worker_start(&s->worker, &s->app, &s->queue, params);
    if (rc == 0)
        pump(s);
    return rc;
}

static void close_handle(uv_handle_t *h, void *ctx)
{
    (void)ctx;
    if (!uv_is_closing(h))
        uv_close(h, NULL);
}

/* Everything must be resumed before MHD_stop_daemon, and nothing may hold a job any more. */
static void finish(srv_server *s)
{
    if (s->worker.started && atomic_load(&s->app.state) == SRV_LOADING)
        _exit(s->exit_status); /* loading cannot be interrupted, and nothing is lost */
    s->stopping = true;
    srv_http_cancel_all(s);
    while (s->n_work > 0) /* they use the engine */
        uv_run(&s->loop, UV_RUN_ONCE);
    srv_queue_stop(&s->queue);
    srv_worker_join(&s->worker);
    srv_http_news(s);
    for (srv_conn *c = s->conns; c; c = c->next) {
        c->gone = c->out_abort = true;
        srv_loop_resume(c);
    }
    if (s->mhd) {
        MHD_run(s->mhd);
        MHD_stop_daemon(s->mhd);
    }
    uv_walk(&s->loop, close_handle, NULL);
    uv_run(&s->loop, UV_RUN_DEFAULT);
    srv_queue_done(&s->queue);
}

int srv_loop_run(srv_server *s, const eng_params *params)
{
    if (uv_loop_init(&s->loop) < 0)
        return EXIT_FAILURE;
    sd_watchdog_enabled(0, &s->watchdog_us);
    int rc = start(s, params);
    if (rc < 0) {
        srv_log(LOG_ERR, "the server cannot start: %s", strerror(-rc));
        s->exit_status = EXIT_FAILURE;
    } else {
        srv_log(LOG_INFO, "listening on http://%s, loading %s", s->address, s->app.settings->model);
        uv_run(&s->loop, UV_RUN_DEFAULT);
    }
    finish(s);
    uv_loop_close(&s->loop);
    if (s->exit_status == 0)
        srv_log(LOG_INFO, "ended");
    return s->exit_status;
}
