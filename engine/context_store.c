#include "context_store_private.h"

#include "context_stock.h"
#include "text.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <syslog.h>
#include <unistd.h>

enum { NICE = 10 }; /* of the store thread: requests come first */

void eng_store_log(const eng_store *s, int level, const char *format, ...)
{
    char text[512];
    if (!s->p.log)
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    s->p.log(s->p.log_ctx, level, text);
}

static void push(eng_store_jobs *l, eng_store_job *j)
{
    j->next = NULL;
    *(l->last ? &l->last->next : &l->first) = j;
    l->last = j;
}

static void push_front(eng_store_jobs *l, eng_store_job *j)
{
    j->next = l->first;
    l->first = j;
    l->last = l->last ? l->last : j;
}

static eng_store_job *pop(eng_store_jobs *l)
{
    eng_store_job *j = l->first;
    l->first = j->next;
    if (!l->first)
        l->last = NULL;
    return j;
}

/* ---- the store thread ---------------------------------------------------------------------------------------------- */

/* A full disk would say the same for every segment. */
static void report(eng_store *s, const eng_store_job *j)
{
    if (j->result == s->last_failure || j->result == ENG_STORE_REFUSED)
        return;
    s->last_failure = j->result;
    if (j->result == 0)
        eng_store_log(s, LOG_NOTICE, "contexts are written to disk again");
    else if (j->result != -ENOENT) /* the failure before says it all */
        eng_store_log(s, LOG_WARNING, "a context of %u tokens is not kept on disk: %s", j->head.start + j->head.n,
                  j->result == -EFBIG ? "it is larger than --cache-disk" : strerror(-j->result));
}

/* What look-ups changed goes to the catalog with other changes: it is not worth a write of its own. */
static void write_touched(eng_store *s)
{
    if (eng_catalog_begin(s->catalog) < 0)
        return;
    for (uint32_t i = 0;; i++) {
        pthread_mutex_lock(&s->lock);
        eng_mirror_entry *e = i < s->mirror.n ? s->mirror.entries[i] : NULL;
        bool touched = e && e->touched;
        uint64_t used = e ? e->used : 0, hits = e ? e->hits : 0;
        if (e)
            e->touched = false;
        pthread_mutex_unlock(&s->lock);
        if (!e)
            break;
        if (touched)
            eng_catalog_touch(s->catalog, &e->head.id, used, hits); /* entries are added and removed by this thread alone */
    }
    eng_catalog_commit(s->catalog);
}

static void write_names(eng_store *s)
{
    if (s->p.names)
        eng_names_write(s->p.names, s->catalog, eng_store_drop_name, s);
}

/* The next job of the queue; with the lock held, which it lets go of meanwhile. */
static void run_next(eng_store *s)
{
    eng_store_job *j = s->running = pop(&s->queue);
    pthread_mutex_unlock(&s->lock);
    if (j->seg) {
        uint64_t begin = eng_trace_begin();
        j->result = eng_store_write(s, j);
        eng_trace_end(begin, "write segment", "tokens", j->head.n);
        report(s, j);
    } else {
        j->result = eng_store_forget_tree(s, &j->head.id);
    }
    write_touched(s);
    write_names(s);
    pthread_mutex_lock(&s->lock);
    s->stats.save_failures += j->seg && j->result < 0 && j->result != ENG_STORE_REFUSED;
    s->stats.refusals += j->seg && j->result == ENG_STORE_REFUSED;
    push(&s->done, j);
    s->running = NULL;
    if (--s->in_flight == 0)
        pthread_cond_broadcast(&s->idle);
}

/* Whoever waits for a name to go waits for its files, too: the engine thread may have been the one to condemn them, and they are first in the queue. With the lock
 * held. */
static void sync_names(eng_store *s)
{
    uint64_t now_written = s->names_wanted;
    pthread_mutex_unlock(&s->lock);
    write_names(s);
    pthread_mutex_lock(&s->lock);
    while (s->queue.first && !s->queue.first->seg)
        run_next(s);
    s->names_done = now_written;
    pthread_cond_broadcast(&s->synced);
}

static void *store_main(void *arg)
{
    eng_store *s = arg;
    eng_trace_use(s->track);
    eng_pool_unbind(s->p.pool);
    setpriority(PRIO_PROCESS, (id_t)gettid(), NICE);
    pthread_mutex_lock(&s->lock);
    while (s->queue.first || !s->stop || s->names_done != s->names_wanted) {
        if (s->names_done != s->names_wanted)
            sync_names(s);
        else if (s->queue.first)
            run_next(s);
        else
            pthread_cond_wait(&s->more, &s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    write_touched(s);
    write_names(s);
    return NULL;
}

/* ---- open and close ---------------------------------------------------------------------------------------------- */

static int load_name(void *ctx, const eng_catalog_name *row)
{
    return eng_names_load(ctx, row);
}

/* Catalog, names and mirror, from what is there. */
static int open_catalog(eng_store *s, char *err, size_t errlen)
{
    char path[PATH_MAX + 16];
    bool is_new, anew = false;
    int r;
    eng_stock stock = {.folder = &s->folder, .owner = &s->p.owner, .mirror = &s->mirror, .misses = s->stats.misses, .log = s->p.log, .log_ctx = s->p.log_ctx};
    snprintf(path, sizeof path, "%s/catalog.db", s->folder.path);
    for (;;) {
        r = eng_catalog_open(path, anew, &s->catalog, &is_new, err, errlen);
        if (r < 0)
            return r;
        stock.catalog = s->catalog;
        r = eng_stock_take(&stock);
        if (anew || r == 0 || r == -ENOMEM)
            break;
        eng_catalog_close(s->catalog);
        s->catalog = NULL;
        eng_mirror_done(&s->mirror);
        anew = true;
    }
    if (r == 0 && s->p.names)
        r = eng_catalog_each_name(s->catalog, load_name, s->p.names);
    if (r == 0 && is_new && s->mirror.n)
        eng_store_log(s, LOG_WARNING, "the catalog of kept contexts was lost or damaged; it is made again from %u files", s->mirror.n);
    return r < 0 ? eng_fail(err, errlen, r, "%s: %s", path, strerror(-r)) : 0;
}

static int open_store(eng_store *s, char *err, size_t errlen)
{
    int r = eng_folder_open(s->p.disk.dir, &s->folder, err, errlen);
    if (r == 0)
        r = open_catalog(s, err, errlen);
    if (r < 0)
        return r;
    eng_store_make_room(s, 0, &(eng_segment_id){0}, UINT64_MAX); /* the budget may be smaller than it was */
    r = eng_trace_track_new("store", &s->track);
    if (r == 0)
        r = -pthread_create(&s->thread, NULL, store_main, s);
    s->started = r == 0;
    return r < 0 ? eng_fail(err, errlen, r, "no thread: %s", strerror(-r)) : 0;
}

int eng_store_open(const eng_store_params *p, eng_store **ret, char *err, size_t errlen)
{
    eng_store *s = calloc(1, sizeof *s);
    if (!s)
        return eng_fail(err, errlen, -ENOMEM, "out of memory");
    s->p = *p;
    s->folder = (eng_folder){.dir = -1, .segments = -1, .lock = -1};
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->more, NULL);
    pthread_cond_init(&s->idle, NULL);
    pthread_cond_init(&s->synced, NULL);
    int r = open_store(s, err, errlen);
    if (r < 0)
        eng_store_close(s);
    else
        *ret = s;
    return r;
}

void eng_store_close(eng_store *s)
{
    if (!s)
        return;
    if (s->started) {
        pthread_mutex_lock(&s->lock);
        s->stop = true;
        pthread_cond_signal(&s->more);
        pthread_mutex_unlock(&s->lock);
        pthread_join(s->thread, NULL);
        eng_store_collect(s);
    }
    eng_catalog_close(s->catalog);
    eng_folder_done(&s->folder);
    eng_mirror_done(&s->mirror);
    pthread_cond_destroy(&s->synced);
    pthread_cond_destroy(&s->idle);
    pthread_cond_destroy(&s->more);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

/* ---- the queue ----------------------------------------------------------------------------------------------------- */

void eng_store_enqueue_locked(eng_store *s, eng_store_job *j)
{
    (j->seg ? push : push_front)(&s->queue, j);
    s->in_flight++;
    pthread_cond_signal(&s->more);
}

void eng_store_enqueue(eng_store *s, eng_store_job *j)
{
    pthread_mutex_lock(&s->lock);
    eng_store_enqueue_locked(s, j);
    pthread_mutex_unlock(&s->lock);
}

void eng_store_collect(eng_store *s)
{
    pthread_mutex_lock(&s->lock);
    eng_store_job *j = s->done.first;
    s->done = (eng_store_jobs){0};
    pthread_mutex_unlock(&s->lock);
    while (j) {
        eng_store_job *next = j->next;
        eng_segment_unref(j->seg);
        free(j);
        j = next;
    }
}

void eng_store_flush(eng_store *s)
{
    pthread_mutex_lock(&s->lock);
    while (s->in_flight)
        pthread_cond_wait(&s->idle, &s->lock);
    pthread_mutex_unlock(&s->lock);
    eng_store_collect(s);
}

void eng_store_sync_names(eng_store *s, bool wait)
{
    pthread_mutex_lock(&s->lock);
    uint64_t ticket = ++s->names_wanted;
    pthread_cond_signal(&s->more);
    while (wait && s->names_done < ticket)
        pthread_cond_wait(&s->synced, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

/* ---- numbers ------------------------------------------------------------------------------------------------------- */

void eng_store_count_hit(eng_store *s)
{
    pthread_mutex_lock(&s->lock);
    s->stats.hits++;
    pthread_mutex_unlock(&s->lock);
}

void eng_store_count_miss(eng_store *s, eng_miss why)
{
    pthread_mutex_lock(&s->lock);
    s->stats.misses[why]++;
    pthread_mutex_unlock(&s->lock);
}

void eng_store_stats(eng_store *s, eng_disk_stats *ret)
{
    pthread_mutex_lock(&s->lock);
    *ret = s->stats;
    ret->bytes = s->mirror.bytes;
    ret->limit = s->p.disk.limit;
    ret->segments = s->mirror.n;
    ret->saving = s->in_flight;
    pthread_mutex_unlock(&s->lock);
}
