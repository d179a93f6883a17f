#include "context_store.h"

#include "clock.h"
#include "context_folder.h"
#include "context_mirror.h"
#include "context_stock.h"
#include "fault.h"
#include "text.h"
#include "worth.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <syslog.h>
#include <time.h>
#include <unistd.h>

enum {
    WORTH = 8, /* a file is read for a part of it when that is at least 1/WORTH: even a slow disk reads 8 times as fast as a prefill computes */
    NICE = 10, /* of the store thread: requests come first */
    REFUSED = -EXFULL, /* not kept, since what would have to go is worth more; nothing that files do fails so */
};

static const eng_segment_id no_id;

typedef struct job job;
struct job {
    job *next;
    eng_segment *seg; /* to be written; NULL: the segment `head.id` and all below it are to be removed */
    eng_segment_head head;
    bool codes;
    int result;
};

typedef struct {
    job *first, *last;
} job_list;

struct eng_store {
    eng_store_params p;
    eng_folder folder;
    eng_catalog *catalog; /* the store thread's, once that runs */
    pthread_t thread;
    bool started;
    int last_failure; /* the store thread's: what was logged last */
    pthread_mutex_t lock;
    pthread_cond_t more, idle, synced;
    /* guarded by lock */
    eng_mirror mirror;
    job_list queue, done;
    job *running;
    uint32_t in_flight; /* jobs queued or running */
    uint64_t names_wanted, names_done; /* times that names were to be written, and were */
    bool stop;
    eng_disk_stats stats;
};

__attribute__((format(printf, 3, 4))) static void store_log(const eng_store *s, int level, const char *format, ...)
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

static int64_t now(const eng_store *s)
{
    return s->p.disk.now ? s->p.disk.now(s->p.disk.now_ctx) : (int64_t)time(NULL);
}

static void push(job_list *l, job *j)
{
    j->next = NULL;
    *(l->last ? &l->last->next : &l->first) = j;
    l->last = j;
}

static job *pop(job_list *l)
{
    job *j = l->first;
    l->first = j->next;
    if (!l->first)
        l->last = NULL;
    return j;
}

/* ---- the store thread: removing ------------------------------------------------------------------------------------ */

/* Row, file, entry. What cannot be removed now goes at the next start, or is used again. */
static int forget(eng_store *s, eng_mirror_entry *e)
{
    int r = eng_catalog_remove(s->catalog, &e->head.id);
    eng_fault_point("remove:row");
    if (r == 0)
        r = eng_folder_remove(&s->folder, &e->head.id);
    eng_fault_point("remove:file");
    pthread_mutex_lock(&s->lock);
    if (r == 0)
        eng_mirror_remove(&s->mirror, e);
    else
        e->unusable = true;
    pthread_mutex_unlock(&s->lock);
    return r;
}

static int forget_tree(eng_store *s, const eng_segment_id *id)
{
    for (;;) {
        pthread_mutex_lock(&s->lock);
        eng_mirror_entry *e = eng_mirror_get(&s->mirror, id);
        e = e ? eng_mirror_leaf(&s->mirror, e) : NULL;
        pthread_mutex_unlock(&s->lock);
        int r = e ? forget(s, e) : 0;
        if (!e || r < 0)
            return r;
    }
}

static void mark_tokens(void *ctx, const eng_prefix *p)
{
    eng_mirror *m = ctx;
    eng_mirror_trace(m, p);
    for (uint32_t i = 0; i < m->n; i++)
        m->entries[i]->named = m->entries[i]->named || m->entries[i]->match >= 0;
}

/* With the lock held. */
static void mark_named(eng_store *s)
{
    for (uint32_t i = 0; i < s->mirror.n; i++)
        s->mirror.entries[i]->named = false;
    if (s->p.names)
        eng_names_each(s->p.names, mark_tokens, &s->mirror);
}

/* Chooses what goes for `bytes` more, and lets nobody begin to read it. The number of victims; REFUSED: they may not make that room. -EFBIG, -ENOMEM. */
static int64_t choose_victims(eng_store *s, uint64_t bytes, const eng_segment_id *parent, uint64_t claim, eng_mirror_entry ***ret)
{
    eng_room room = {.limit = s->p.disk.limit, .bytes = bytes, .claim = claim};
    pthread_mutex_lock(&s->lock);
    eng_mirror_entry *e = eng_mirror_get(&s->mirror, parent);
    if (e)
        e->pins++;
    if (s->mirror.bytes + bytes > room.limit)
        mark_named(s);
    int64_t n = bytes > room.limit ? -EFBIG : eng_mirror_choose(&s->mirror, &room, ret);
    for (int64_t i = 0; i < n; i++) {
        eng_mirror_entry *v = (*ret)[i];
        v->unusable = true;
        eng_evicted_add(&s->mirror.evicted, v->head.tenant, v->head.start, v->ids, v->head.n);
    }
    if (e)
        e->pins--;
    pthread_mutex_unlock(&s->lock);
    return n == -ENOSPC ? REFUSED : n;
}

/* Evicts until `bytes` more fit; not what the segment `parent` needs. REFUSED: only what is worth more would make that room. -EFBIG, -ENOSPC: no room. */
static int make_room(eng_store *s, uint64_t bytes, const eng_segment_id *parent, uint64_t claim)
{
    eng_mirror_entry **victims = NULL;
    int64_t n = choose_victims(s, bytes, parent, claim, &victims);
    int r = n < 0 ? (int)n : 0;
    for (int64_t i = 0; i < n; i++)
        if (r == 0 && (r = forget(s, victims[i])) == 0) {
            pthread_mutex_lock(&s->lock);
            s->stats.evictions++;
            pthread_mutex_unlock(&s->lock);
        }
    free(victims);
    uint64_t space = eng_folder_free(&s->folder);
    return r == 0 && (space < bytes || space - bytes < s->p.disk.keep_free) ? -ENOSPC : r;
}

/* The last entry of a name's, which merging may have joined with what goes on from there. With the lock held. */
static eng_mirror_entry *last_of(eng_store *s, const eng_prefix *p)
{
    eng_mirror_entry *last = NULL;
    eng_mirror_trace(&s->mirror, p);
    for (uint32_t i = 0; i < s->mirror.n; i++) {
        eng_mirror_entry *e = s->mirror.entries[i];
        if (!e->unusable && e->match >= 0 && (!last || e->match > last->match))
            last = e;
    }
    return last;
}

/* A name is gone: so are its last segments with all that goes on from there, and those before them that lead nowhere else, as far as no other name
 * needs them. */
static void drop_name(void *ctx, const eng_prefix *p)
{
    eng_store *s = ctx;
    int64_t end = -1;
    for (;;) {
        eng_segment_id id;
        pthread_mutex_lock(&s->lock);
        mark_named(s);
        eng_mirror_entry *e = last_of(s, p);
        end = end < 0 && e ? e->match : end;
        bool goes = e && (e->match == end || !e->children) && eng_mirror_condemn(&s->mirror, e);
        if (goes)
            id = e->head.id;
        pthread_mutex_unlock(&s->lock);
        if (!goes || forget_tree(s, &id) < 0)
            return;
    }
}

/* ---- the store thread: writing ------------------------------------------------------------------------------------- */

static int keep_entry(eng_store *s, const job *j)
{
    eng_mirror_entry *e;
    pthread_mutex_lock(&s->lock);
    eng_catalog_row row = {.head = j->head, .ids = j->seg->ids, .used = ++s->mirror.clock};
    pthread_mutex_unlock(&s->lock);
    int r = eng_catalog_put(s->catalog, &row);
    eng_fault_point("save:row");
    if (r < 0)
        return r;
    pthread_mutex_lock(&s->lock);
    r = eng_mirror_add(&s->mirror, &row, &s->p.owner, &e);
    pthread_mutex_unlock(&s->lock);
    if (r < 0)
        eng_catalog_remove(s->catalog, &j->head.id);
    return r;
}

/* The files that a merged segment stands for, last one first. What continues the last of them continues the merged one; what leaves before that keeps those that it
 * needs. */
static void drop_replaced(eng_store *s, const job *j)
{
    const eng_segment *merged = j->seg;
    for (uint32_t i = merged->n_replaces; i-- > 0;) {
        pthread_mutex_lock(&s->lock);
        eng_mirror_entry *e = eng_mirror_get(&s->mirror, &merged->replaces[i]);
        if (e && i + 1 == merged->n_replaces)
            eng_mirror_adopt(&s->mirror, eng_mirror_get(&s->mirror, &j->head.id), e);
        bool goes = e && !e->children && !e->pins;
        if (goes)
            e->unusable = true;
        pthread_mutex_unlock(&s->lock);
        if (e && (!goes || forget(s, e) < 0))
            return;
        eng_fault_point("merge:dropped");
    }
}

static int save(eng_store *s, job *j)
{
    pthread_mutex_lock(&s->lock);
    bool there = eng_mirror_get(&s->mirror, &j->head.id), orphan = j->head.start && !eng_mirror_get(&s->mirror, &j->head.parent);
    pthread_mutex_unlock(&s->lock);
    if (there || orphan) {
        if (there)
            drop_replaced(s, j);
        return there ? 0 : -ENOENT;
    }
    uint64_t begin = eng_now_ns();
    int r = make_room(s, j->head.bytes, &j->head.parent, eng_worth_claim(eng_worth_used(0, j->head.start + j->head.n)));
    if (r == 0)
        r = eng_folder_save(&s->folder, &j->head, j->seg, j->codes);
    if (r == 0 && (r = keep_entry(s, j)) < 0)
        eng_folder_remove(&s->folder, &j->head.id);
    eng_fault_point("merge:saved");
    if (r == 0)
        drop_replaced(s, j);
    pthread_mutex_lock(&s->lock);
    if (r == 0) {
        s->stats.saves++;
        s->stats.saved_bytes += j->head.bytes;
        s->stats.save_seconds += (double)(eng_now_ns() - begin) * 1e-9;
    }
    pthread_mutex_unlock(&s->lock);
    return r;
}

/* A full disk would say the same for every segment. */
static void report(eng_store *s, const job *j)
{
    if (j->result == s->last_failure || j->result == REFUSED)
        return;
    s->last_failure = j->result;
    if (j->result == 0)
        store_log(s, LOG_NOTICE, "contexts are written to disk again");
    else if (j->result != -ENOENT) /* the failure before says it all */
        store_log(s, LOG_WARNING, "a context of %u tokens is not kept on disk: %s", j->head.start + j->head.n,
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
        eng_names_write(s->p.names, s->catalog, drop_name, s);
}

static void *store_main(void *arg)
{
    eng_store *s = arg;
    eng_pool_unbind(s->p.pool);
    setpriority(PRIO_PROCESS, (id_t)gettid(), NICE);
    pthread_mutex_lock(&s->lock);
    while (s->queue.first || !s->stop || s->names_done != s->names_wanted) {
        if (s->names_done != s->names_wanted) {
            uint64_t now_written = s->names_wanted;
            pthread_mutex_unlock(&s->lock);
            write_names(s);
            pthread_mutex_lock(&s->lock);
            s->names_done = now_written;
            pthread_cond_broadcast(&s->synced);
            continue;
        }
        if (!s->queue.first) {
            pthread_cond_wait(&s->more, &s->lock);
            continue;
        }
        job *j = s->running = pop(&s->queue);
        pthread_mutex_unlock(&s->lock);
        if (j->seg) {
            j->result = save(s, j);
            report(s, j);
        } else {
            j->result = forget_tree(s, &j->head.id);
        }
        write_touched(s);
        write_names(s);
        pthread_mutex_lock(&s->lock);
        s->stats.save_failures += j->seg && j->result < 0 && j->result != REFUSED;
        s->stats.refusals += j->seg && j->result == REFUSED;
        push(&s->done, j);
        s->running = NULL;
        if (--s->in_flight == 0)
            pthread_cond_broadcast(&s->idle);
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
        store_log(s, LOG_WARNING, "the catalog of kept contexts was lost or damaged; it is made again from %u files", s->mirror.n);
    return r < 0 ? eng_fail(err, errlen, r, "%s: %s", path, strerror(-r)) : 0;
}

static int open_store(eng_store *s, char *err, size_t errlen)
{
    int r = eng_folder_open(s->p.disk.dir, &s->folder, err, errlen);
    if (r == 0)
        r = open_catalog(s, err, errlen);
    if (r < 0)
        return r;
    make_room(s, 0, &no_id, UINT64_MAX); /* the budget may be smaller than it was */
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

/* ---- the engine thread: saving ------------------------------------------------------------------------------------- */

static void enqueue(eng_store *s, job *j)
{
    pthread_mutex_lock(&s->lock);
    push(&s->queue, j);
    s->in_flight++;
    pthread_cond_signal(&s->more);
    pthread_mutex_unlock(&s->lock);
}

/* A segment and all before it, first one first. */
static eng_segment **chain_of(eng_segment *seg, uint32_t *ret_n, uint32_t *ret_end)
{
    uint32_t n = 0, end = 0;
    for (eng_segment *p = seg; p; p = p->parent, n++)
        end = p->start + p->n > end ? p->start + p->n : end;
    eng_segment **chain = malloc(n * sizeof *chain);
    *ret_n = n;
    *ret_end = end;
    for (eng_segment *p = seg; p && chain; p = p->parent)
        chain[--n] = p;
    return chain;
}

static bool is_known(eng_store *s, const eng_segment_id *id)
{
    eng_mirror_entry *e = eng_mirror_get(&s->mirror, id);
    bool known = (e && !e->unusable) || (s->running && s->running->seg && eng_segment_id_equal(&s->running->head.id, id));
    for (job *j = s->queue.first; j && !known; j = j->next)
        known = j->seg && eng_segment_id_equal(&j->head.id, id);
    return known;
}

static int queue_segment(eng_store *s, eng_segment *seg, const eng_segment_head *head)
{
    pthread_mutex_lock(&s->lock);
    bool known = is_known(s, &head->id);
    pthread_mutex_unlock(&s->lock);
    if (known || seg->map) /* what a file gave is not written again: it could fail meanwhile */
        return 0;
    job *j = malloc(sizeof *j);
    if (!j)
        return -ENOMEM;
    *j = (job){.seg = eng_segment_ref(seg), .head = *head, .codes = eng_segment_coded(seg)};
    enqueue(s, j);
    return 0;
}

/* What continues decoded tokens is not exact on disk, whatever computed it: an id stands for one history. */
int eng_store_save(eng_store *s, eng_segment *seg)
{
    uint32_t n, end;
    eng_segment **chain = chain_of(seg, &n, &end);
    int32_t *ids = chain ? malloc((size_t)end * sizeof *ids) : NULL;
    eng_segment_id parent = no_id;
    bool exact = true;
    int r = ids ? 0 : -ENOMEM;
    for (uint32_t i = 0; i < n && r == 0; i++) {
        eng_segment *p = chain[i];
        eng_segment_head head = eng_segment_head_of(&s->p.owner, p, eng_segment_coded(p));
        exact = exact && p->exact;
        head.exact = exact;
        head.parent = parent;
        head.created = now(s);
        memcpy(ids + p->start, p->ids, (size_t)p->n * sizeof *ids); /* over those of the parent that come after the cut */
        head.id = parent = p->id = eng_segment_id_of(&head, ids);
        p->has_id = true;
        r = head.bytes ? queue_segment(s, p, &head) : -ENOMEM;
    }
    free(ids);
    free(chain);
    return r;
}

void eng_store_collect(eng_store *s)
{
    pthread_mutex_lock(&s->lock);
    job *j = s->done.first;
    s->done = (job_list){0};
    pthread_mutex_unlock(&s->lock);
    while (j) {
        job *next = j->next;
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

/* ---- the engine thread: finding and reading ------------------------------------------------------------------------ */

/* The end of what is worth reading of e and those before it, which agree with a prompt up to `match`; *io_e becomes the last one. */
static uint32_t worth_reading(eng_mirror_entry **io_e, uint32_t match)
{
    while (*io_e && (uint64_t)(match - (*io_e)->head.start) * WORTH < (*io_e)->head.n) {
        match = (*io_e)->head.start;
        *io_e = (*io_e)->parent;
    }
    return *io_e ? match : 0;
}

static eng_miss copy_links(const eng_mirror_entry *last, eng_store_chain *ret)
{
    uint32_t n = 0;
    for (const eng_mirror_entry *e = last; e; e = e->parent)
        n++;
    ret->links = malloc(n * sizeof *ret->links);
    if (!ret->links)
        return ENG_MISS_MEMORY;
    ret->n = n;
    for (const eng_mirror_entry *e = last; e; e = e->parent)
        ret->links[--n] = (eng_store_link){e->head.id, e->head.start};
    return ENG_MISS_NONE;
}

eng_miss eng_store_find(eng_store *s, const eng_prefix *p, uint32_t have, eng_store_chain *ret, eng_prefix_stop *ret_stop)
{
    eng_miss why = ENG_MISS_ABSENT;
    pthread_mutex_lock(&s->lock);
    eng_mirror_entry *e = eng_mirror_find(&s->mirror, p, ret_stop);
    if (e && e->match >= (int64_t)have + ENG_CACHE_MIN_PREFIX) {
        uint32_t length = worth_reading(&e, (uint32_t)e->match);
        why = ENG_MISS_SHORT;
        if (length >= have + ENG_CACHE_MIN_PREFIX) {
            ret->length = length;
            why = copy_links(e, ret);
        }
        if (why)
            ret_stop->why = why;
    }
    pthread_mutex_unlock(&s->lock);
    return why;
}

bool eng_store_evicted(eng_store *s, const eng_prefix *p, uint32_t position)
{
    pthread_mutex_lock(&s->lock);
    bool evicted = eng_evicted_has(&s->mirror.evicted, p, position);
    pthread_mutex_unlock(&s->lock);
    return evicted;
}

size_t eng_store_size(eng_store *s, const eng_segment_id *id, uint64_t *ret_worth)
{
    pthread_mutex_lock(&s->lock);
    eng_mirror_entry *e = eng_mirror_get(&s->mirror, id);
    size_t bytes = e ? (size_t)e->head.bytes : 0; /* keys, values, ids and codes, as in memory */
    *ret_worth = e ? e->worth : 0;
    pthread_mutex_unlock(&s->lock);
    return bytes;
}

/* A file that turned out not to be what the catalog says. */
static void give_up(eng_store *s, const eng_segment_id *id, eng_miss why, const char *err)
{
    job *j = NULL;
    bool keep = why == ENG_MISS_MEMORY || why == ENG_MISS_CANCELED;
    pthread_mutex_lock(&s->lock);
    eng_mirror_entry *e = eng_mirror_get(&s->mirror, id);
    if (e && !keep)
        e->unusable = true;
    s->stats.misses[why]++;
    pthread_mutex_unlock(&s->lock);
    if (keep)
        return;
    store_log(s, LOG_WARNING, "a kept context on disk cannot be used (%s): %s", eng_miss_name(why), err);
    if (why != ENG_MISS_IO && (j = calloc(1, sizeof *j))) {
        j->head.id = *id;
        enqueue(s, j);
    }
}

void eng_store_failed(eng_store *s, const eng_segment_id *id)
{
    give_up(s, id, ENG_MISS_IO, "it shrank, or could not be read, while it was in use");
}

static eng_miss load_entry(eng_store *s, const eng_mirror_entry *e, const eng_segment_reader *reader, eng_segment *parent, eng_segment **ret, char *err,
                           size_t errlen)
{
    eng_segment_file *f;
    eng_miss why = eng_folder_file(&s->folder, &e->head.id, &f, err, errlen);
    if (why)
        return why;
    const eng_segment_head *h = eng_segment_file_head(f);
    if (!eng_segment_id_equal(&h->id, &e->head.id) || !eng_segment_id_equal(&h->parent, &e->head.parent) || h->tenant != e->head.tenant || h->start != e->head.start ||
        h->n != e->head.n || h->exact != e->head.exact) {
        snprintf(err, errlen, "it is another segment's");
        why = ENG_MISS_TOKENS;
    }
    if (!why)
        why = eng_segment_file_load(f, &s->p.owner, e->ids, reader, parent, ret, err, errlen);
    eng_segment_file_close(f);
    return why;
}

eng_miss eng_store_load(eng_store *s, const eng_segment_id *id, const eng_segment_reader *reader, eng_segment *parent, eng_segment **ret)
{
    char err[256] = "";
    uint64_t begin = eng_now_ns();
    pthread_mutex_lock(&s->lock);
    eng_mirror_entry *e = eng_mirror_get(&s->mirror, id);
    if (e && e->unusable)
        e = NULL;
    if (e)
        e->pins++;
    pthread_mutex_unlock(&s->lock);
    if (!e)
        return ENG_MISS_GONE; /* evicted a moment ago */
    eng_miss why = load_entry(s, e, reader, parent, ret, err, sizeof err);
    pthread_mutex_lock(&s->lock);
    e->pins--;
    if (!why) {
        s->stats.loads++;
        s->stats.loaded_bytes += e->head.bytes;
        s->stats.load_seconds += (double)(eng_now_ns() - begin) * 1e-9;
    }
    pthread_mutex_unlock(&s->lock);
    if (why)
        give_up(s, id, why, err);
    return why;
}

/* ---- names ------------------------------------------------------------------------------------------------------- */

void eng_store_sync_names(eng_store *s, bool wait)
{
    pthread_mutex_lock(&s->lock);
    uint64_t ticket = ++s->names_wanted;
    pthread_cond_signal(&s->more);
    while (wait && s->names_done < ticket)
        pthread_cond_wait(&s->synced, &s->lock);
    pthread_mutex_unlock(&s->lock);
}

void eng_store_residence(eng_store *s, const eng_prefix *p, uint32_t *ret_tokens, uint64_t *ret_bytes)
{
    *ret_tokens = 0;
    *ret_bytes = 0;
    pthread_mutex_lock(&s->lock);
    eng_mirror_trace(&s->mirror, p);
    for (uint32_t i = 0; i < s->mirror.n; i++) {
        const eng_mirror_entry *e = s->mirror.entries[i];
        if (e->match < 0 || !e->ours || e->unusable)
            continue;
        *ret_tokens = e->match > *ret_tokens ? (uint32_t)e->match : *ret_tokens;
        *ret_bytes += e->head.bytes;
    }
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
