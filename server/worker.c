#include "worker.h"

#include "cmd_common.h"
#include "log.h"
#include "textout.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

/* How long one turn of background work lasts before the queue is looked at again, beside `poke`. */
enum { IDLE_MS = 20 };

/* Bytes of the disk that kept contexts leave to others. */
enum { KEEP_FREE = 1 << 30 };

/* ---- opening ---------------------------------------------------------------------------------------------------- */

static void token_cstring(const eng_engine *e, int32_t id, char *buf, size_t size)
{
    const char *text;
    size_t n;
    buf[0] = 0;
    if (id >= 0 && eng_token_text(e, id, true, &text, &n) == 0 && n < size) {
        memcpy(buf, text, n);
        buf[n] = 0;
    }
}

/* A model without a usable template still completes text: only the chat routes refuse, and say why. One that was asked for must work. */
static int set_template(srv_app *app, const eng_engine *e)
{
    char err[400] = "";
    if (!app->chat_template)
        return 0;
    int rc = srv_template_of(app->chat_template, e, app->given_template, err, sizeof(err));
    if (rc < 0 && app->given_template) {
        snprintf(app->failure, sizeof(app->failure), "the chat template cannot be used: %s", err);
        return rc;
    }
    if (rc == -ENOENT)
        snprintf(app->chat_failure, sizeof(app->chat_failure), "this model has no chat template; use /v1/completions");
    else if (rc < 0)
        snprintf(app->chat_failure, sizeof(app->chat_failure), "the model's chat template cannot be used: %s", err);
    return 0;
}

/* Contexts that cannot be kept on disk are no reason not to serve. */
static void open_disk(const srv_app *app, eng_engine *e)
{
    char dir[PATH_MAX], err[400] = "";
    if (app->settings->cache_disk == 0)
        return;
    if (srv_state_dir(app->settings, dir, sizeof(dir)) < 0) {
        srv_log(LOG_WARNING, "contexts are not kept on disk: there is no home folder; give one with --state-dir");
        return;
    }
    eng_disk_params p = {.dir = dir, .limit = (uint64_t)app->settings->cache_disk << 20, .keep_free = KEEP_FREE};
    if (eng_disk_open(e, &p, err, sizeof(err)) < 0) {
        srv_log(LOG_WARNING, "contexts are not kept on disk: %s", err);
        return;
    }
    eng_disk_stats st;
    eng_disk_stats_get(e, &st);
    srv_log(LOG_INFO, "contexts on disk: %s, %.0f of %.0f MiB in %u segments", dir, (double)st.bytes / 1048576, (double)st.limit / 1048576, st.segments);
}

static int open_model(srv_worker *w)
{
    srv_app *app = w->app;
    eng_engine *e = NULL;
    int rc = eng_open(app->settings->model, &w->params, &e, app->failure, sizeof(app->failure));
    if (rc == 0)
        rc = set_template(app, e);
    if (rc == 0) {
        char err[400];
        if (srv_use_cost(app->settings, e, err, sizeof(err)) < 0)
            srv_log(LOG_WARNING, "%s", err);
        open_disk(app, e);
    }
    if (rc < 0) {
        eng_close(e);
        if (!app->failure[0])
            snprintf(app->failure, sizeof(app->failure), "%s: %s", app->settings->model, strerror(-rc));
        atomic_store(&app->state, SRV_FAILED);
    } else {
        app->engine = e;
        app->info = eng_info_get(e);
        token_cstring(e, app->info->bos, app->bos_text, sizeof(app->bos_text));
        token_cstring(e, app->info->eos, app->eos_text, sizeof(app->eos_text));
        snprintf(app->fingerprint, sizeof(app->fingerprint), "retrievald-" RETRIEVALD_VERSION "-%08x", (unsigned)app->info->fingerprint);
        if (app->chat_failure[0])
            srv_log(LOG_WARNING, "no chat: %s", app->chat_failure);
        atomic_store(&app->state, SRV_READY);
    }
    w->queue->wake(w->queue->wake_ctx);
    return rc;
}

/* ---- one job ---------------------------------------------------------------------------------------------------- */

typedef struct {
    srv_worker *w;
    srv_job *job;
    srv_textout *out;
    double started_ms;
    /* Tokens whose text is not out yet; only when log probabilities are wanted. */
    eng_token *held;
    size_t n_held, cap_held;
} run;

static void on_progress(void *ctx, uint32_t n_done, uint32_t n_cached, uint32_t n_prompt)
{
    run *r = ctx;
    if (r->job->makes)
        eng_context_report(r->job->context, ENG_CONTEXT_READING, n_done, NULL);
    if (r->job->stream && r->job->return_progress)
        srv_queue_progress(r->w->queue, r->job, n_done, n_cached, n_prompt, srv_now_ms() - r->started_ms);
}

static int hold(run *r, const eng_token *t)
{
    if (!r->job->logprobs)
        return 0;
    if (r->n_held == r->cap_held) {
        size_t cap = r->cap_held ? r->cap_held * 2 : 16;
        eng_token *grown = reallocarray(r->held, cap, sizeof(*grown));
        if (!grown)
            return -ENOMEM;
        r->held = grown;
        r->cap_held = cap;
    }
    r->held[r->n_held++] = *t;
    return 0;
}

/* Tokens that begin within the first len bytes of what is held: the rest spells the stop string. */
static size_t tokens_within(const run *r, size_t len)
{
    size_t at = 0, n = 0;
    while (n < r->n_held && at < len) {
        const char *text;
        size_t text_len = 0;
        if (eng_token_text(r->w->app->engine, r->held[n].id, false, &text, &text_len) < 0)
            break;
        at += text_len;
        n++;
    }
    return n;
}

static int publish(run *r, const char *text, size_t len, size_t n_tokens)
{
    if (len == 0 && n_tokens == 0)
        return 0;
    int rc = srv_queue_text(r->w->queue, r->job, text, len, r->held, n_tokens);
    r->n_held = 0;
    return rc;
}

/* Decodes until something ends it. 0 with job->end set, or what the engine said. */
static int decode(run *r, eng_session *s)
{
    srv_job *j = r->job;
    const char *text;
    size_t len;
    j->end = SRV_END_LENGTH;
    for (uint32_t n = 0; n < j->max_tokens; n++) {
        eng_token t;
        int rc = eng_session_next(s, &t);
        if (rc < 0)
            return rc;
        if (rc == 1)
            break;
        if (eng_token_is_eog(r->w->app->engine, t.id)) {
            j->end = SRV_END_STOP;
            break;
        }
        const char *bytes = "";
        size_t n_bytes = 0;
        rc = eng_token_text(r->w->app->engine, t.id, false, &bytes, &n_bytes);
        if (rc == 0)
            rc = hold(r, &t);
        if (rc < 0)
            return rc;
        rc = srv_textout_add(r->out, bytes, n_bytes, &text, &len);
        if (rc < 0)
            return rc;
        if (rc == 1) {
            j->end = SRV_END_STOP;
            return publish(r, text, len, tokens_within(r, len));
        }
        if (len > 0)
            rc = publish(r, text, len, r->n_held);
        if (rc < 0)
            return rc;
    }
    int rc = srv_textout_finish(r->out, &text, &len);
    return rc < 0 ? rc : publish(r, text, len, r->n_held);
}

static void set_end(srv_job *j, int rc, const char *err)
{
    if (rc >= 0)
        return;
    j->end = SRV_END_FAULT;
    if (rc == -ECANCELED)
        j->end = SRV_END_CANCELLED;
    else if (rc == -E2BIG)
        srv_api_too_long(&j->fault, NULL, j->request.n_ids, j->app->info->n_ctx);
    else if (rc == -EINVAL)
        srv_fault_bad(&j->fault, NULL, "%s", err[0] ? err : "the engine refused this request");
    else if (rc == -ENOMEM)
        srv_fault_set(&j->fault, 500, "server_error", NULL, "out of memory%s%s", err[0] ? ": " : "", err);
    else if (rc == -EIO)
        srv_fault_set(&j->fault, 500, "server_error", NULL, "a kept context's file failed while it was read; it is not used any more, so the same request works now");
    else if (rc == -EDOM)
        srv_fault_set(&j->fault, 500, "server_error", NULL, "the model computes values that are not finite: its weights are damaged");
    else
        srv_fault_set(&j->fault, 500, "server_error", NULL, "%s", err[0] ? err : strerror(-rc));
}

/* A context is there when its tokens are kept; one that nobody waits for says itself what went wrong, another one has its client told. */
static void end_making(srv_worker *w, srv_job *j)
{
    if (j->end == SRV_END_LENGTH) {
        eng_context_report(j->context, ENG_CONTEXT_READY, (uint32_t)j->request.n_ids, NULL);
        eng_idle(w->app->engine, 0, &w->queue->poke);
        srv_context_write(j);
    } else if (j->detached) {
        eng_context_report(j->context, ENG_CONTEXT_FAILED, 0, j->end == SRV_END_FAULT ? j->fault.message : "the server was shut down");
    } else {
        eng_context_abandon(w->app->engine, j->context);
        j->context = NULL;
    }
}

static void run_job(srv_worker *w, srv_job *j)
{
    run r = {.w = w, .job = j, .started_ms = srv_now_ms()};
    eng_session *s = NULL;
    char err[400] = "";
    j->ran = true;
    j->request.cancel = &w->queue->cancel;
    int rc = srv_textout_new((const char *const *)j->stops, j->n_stops, &r.out);
    if (rc == 0)
        rc = eng_session_open(w->app->engine, &j->request, &s, err, sizeof(err));
    if (rc == 0)
        rc = eng_session_prefill(s, j->makes || (j->stream && j->return_progress) ? on_progress : NULL, &r);
    if (rc == 0)
        rc = decode(&r, s);
    set_end(j, rc, err);
    if (s) {
        eng_session_timings(s, &j->timings);
        j->miss = eng_session_miss(s);
    }
    atomic_store(&w->app->sealing, true);
    if (j->makes) { /* what is asked for is that it is stored */
        if (s)
            eng_session_close(s);
        s = NULL;
        end_making(w, j);
    }
    eng_context *context = j->context;
    j->context = NULL; /* in use until the session ends, and no longer */
    /* The answer goes out before the session is stored: nobody waits for that. */
    srv_queue_finish(w->queue, j);
    if (s)
        eng_session_close(s);
    eng_context_release(context);
    atomic_store(&w->app->sealing, false);
    srv_textout_free(r.out);
    free(r.held);
}

/* ---- the thread ------------------------------------------------------------------------------------------------- */

/* What happened up to now goes to the trace's file. */
static void write_trace(srv_app *app)
{
    uint64_t n = 0, forgotten = 0;
    char err[400] = "";
    atomic_store(&app->trace_wanted, false);
    if (!app->trace)
        return;
    if (eng_trace_write(app->trace, &n, &forgotten, err, sizeof(err)) < 0)
        srv_log(LOG_WARNING, "%s", err);
    else
        srv_log(LOG_INFO, "trace: %llu events are in %s; %llu before them are forgotten", (unsigned long long)n, app->settings->trace,
                (unsigned long long)forgotten);
}

static void *worker_main(void *arg)
{
    srv_worker *w = arg;
    bool stop = false, more = true;
    if (eng_trace_attach(w->app->trace, "engine") < 0)
        srv_log(LOG_WARNING, "nothing is traced: out of memory");
    if (open_model(w) < 0)
        goto end;
    while (!stop) {
        atomic_store(&w->waiting, !more);
        srv_job *j = srv_queue_take(w->queue, !more, &stop);
        atomic_store(&w->waiting, false);
        if (j)
            run_job(w, j);
        if (atomic_load(&w->app->trace_wanted))
            write_trace(w->app);
        if (!stop)
            more = eng_idle(w->app->engine, IDLE_MS, &w->queue->poke) == 1;
        atomic_fetch_add(&w->beats, 1);
    }
    eng_close(w->app->engine);
end:
    eng_trace_leave();
    write_trace(w->app);
    atomic_store(&w->ended, true);
    w->queue->wake(w->queue->wake_ctx);
    return NULL;
}

int srv_worker_start(srv_worker *w, srv_app *app, srv_queue *queue, const eng_params *params)
{
    memset(w, 0, sizeof(*w));
    w->app = app;
    w->queue = queue;
    w->params = *params;
    w->params.log = srv_log_engine;
    int rc = pthread_create(&w->thread, NULL, worker_main, w);
    if (rc)
        return -rc;
    w->started = true;
    return 0;
}

void srv_worker_join(srv_worker *w)
{
    if (w->started)
        pthread_join(w->thread, NULL);
    w->started = false;
}
