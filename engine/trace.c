/* Threading model. The list of tracks and the file are guarded by a lock; nobody takes it between making tracks and writing the file.
 *
 * A ring has one writer. It stores an event's fields and then raises n, all with release; a reader loads n, the fields, and n again, all with acquire. A field
 * of a newer event in place of the one that it wanted was stored after n had reached that event's number, so the second n tells, and what it read is dropped.
 */
#include "trace.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "text.h"

#define BEGINNING "{\"traceEvents\":["

typedef struct {
    _Atomic(const char *) name, what;
    _Atomic int64_t n;
    _Atomic uint64_t begin, end;
} event;

struct eng_trace_track {
    eng_trace *trace;
    eng_trace_track *next; /* guarded by the trace's lock */
    char name[32];
    uint32_t id;
    event *events;      /* [ENG_TRACE_EVENTS] event i at i % ENG_TRACE_EVENTS */
    _Atomic uint64_t n; /* events so far */
};

struct eng_trace {
    char *path;
    uint64_t opened; /* ns; time 0 of the file */
    pthread_mutex_t lock;
    FILE *file;              /* guarded by lock */
    eng_trace_track *tracks; /* guarded by lock; in order of making */
    uint32_t n_tracks;       /* guarded by lock */
};

_Thread_local eng_trace_track *eng_trace_mine;

/* ---- life ---------------------------------------------------------------------------------------------------------- */

/* Refuses what is not a plain file, and a file that somebody wrote something else to. */
static int open_file(const char *path, FILE **ret, char *err, size_t errlen)
{
    char head[sizeof BEGINNING - 1];
    struct stat st;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0600);
    if (fd < 0 || fstat(fd, &st) < 0) {
        int r = -errno;
        if (fd >= 0)
            close(fd);
        return eng_fail(err, errlen, r, "trace file %s: %s", path, strerror(-r));
    }
    const char *wrong = NULL;
    if (!S_ISREG(st.st_mode))
        wrong = "not a plain file";
    else if (st.st_size && (pread(fd, head, sizeof head, 0) != sizeof head || memcmp(head, BEGINNING, sizeof head)))
        wrong = "is there and holds something else than a trace; choose another name";
    else if (ftruncate(fd, 0) == 0 && (*ret = fdopen(fd, "w")))
        return 0;
    int r = wrong ? -EINVAL : -errno;
    close(fd);
    return eng_fail(err, errlen, r, "trace file %s: %s", path, wrong ? wrong : strerror(-r));
}

int eng_trace_open(const char *path, eng_trace **ret, char *err, size_t errlen)
{
    eng_trace *t = calloc(1, sizeof *t);
    if (!t)
        return eng_fail(err, errlen, -ENOMEM, "out of memory");
    pthread_mutex_init(&t->lock, NULL);
    t->opened = eng_now_ns();
    t->path = strdup(path);
    int r = t->path ? open_file(path, &t->file, err, errlen) : eng_fail(err, errlen, -ENOMEM, "out of memory");
    if (r < 0)
        eng_trace_free(t);
    else
        *ret = t;
    return r;
}

void eng_trace_free(eng_trace *t)
{
    if (!t)
        return;
    for (eng_trace_track *k = t->tracks, *next; k; k = next) {
        next = k->next;
        free(k->events);
        free(k);
    }
    if (t->file)
        fclose(t->file);
    pthread_mutex_destroy(&t->lock);
    free(t->path);
    free(t);
}

/* ---- tracks -------------------------------------------------------------------------------------------------------- */

static int new_track(eng_trace *t, const char *name, eng_trace_track **ret)
{
    eng_trace_track *k = calloc(1, sizeof *k);
    if (!k || !(k->events = calloc(ENG_TRACE_EVENTS, sizeof *k->events))) {
        free(k);
        return -ENOMEM;
    }
    k->trace = t;
    snprintf(k->name, sizeof k->name, "%s", name);
    pthread_mutex_lock(&t->lock);
    eng_trace_track **last = &t->tracks;
    while (*last)
        last = &(*last)->next;
    *last = k;
    k->id = ++t->n_tracks;
    pthread_mutex_unlock(&t->lock);
    *ret = k;
    return 0;
}

int eng_trace_attach(eng_trace *t, const char *name)
{
    return t ? new_track(t, name, &eng_trace_mine) : 0;
}

void eng_trace_leave(void)
{
    eng_trace_mine = NULL;
}

int eng_trace_track_new(const char *name, eng_trace_track **ret)
{
    if (eng_trace_mine)
        return new_track(eng_trace_mine->trace, name, ret);
    *ret = NULL;
    return 0;
}

void eng_trace_use(eng_trace_track *k)
{
    eng_trace_mine = k;
}

void eng_trace_add(eng_trace_track *k, const char *name, const char *what, int64_t n, uint64_t begin_ns, uint64_t end_ns)
{
    if (!k)
        return;
    uint64_t i = atomic_load_explicit(&k->n, memory_order_relaxed);
    event *e = &k->events[i % ENG_TRACE_EVENTS];
    atomic_store_explicit(&e->name, name, memory_order_release);
    atomic_store_explicit(&e->what, what, memory_order_release);
    atomic_store_explicit(&e->n, n, memory_order_release);
    atomic_store_explicit(&e->begin, begin_ns, memory_order_release);
    atomic_store_explicit(&e->end, end_ns, memory_order_release);
    atomic_store_explicit(&k->n, i + 1, memory_order_release);
}

/* ---- the file ------------------------------------------------------------------------------------------------------ */

/* Microseconds, which is what the format counts in. */
static void put_time(FILE *f, const char *key, uint64_t ns)
{
    fprintf(f, ",\"%s\":%" PRIu64 ".%03u", key, ns / 1000, (unsigned)(ns % 1000));
}

static void write_track(const eng_trace *t, const eng_trace_track *k, uint64_t *io_events, uint64_t *io_forgotten)
{
    FILE *f = t->file;
    int pid = (int)getpid();
    fprintf(f, "%s{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%u,\"args\":{\"name\":\"%s\"}},\n", k->id > 1 ? ",\n" : "", pid, k->id, k->name);
    fprintf(f, "{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":%d,\"tid\":%u,\"args\":{\"sort_index\":%u}}", pid, k->id, k->id);
    uint64_t end = atomic_load_explicit(&k->n, memory_order_acquire), written = 0;
    for (uint64_t i = end >= ENG_TRACE_EVENTS ? end - ENG_TRACE_EVENTS + 1 : 0; i < end; i++) {
        const event *e = &k->events[i % ENG_TRACE_EVENTS];
        const char *name = atomic_load_explicit(&e->name, memory_order_acquire), *what = atomic_load_explicit(&e->what, memory_order_acquire);
        int64_t n = atomic_load_explicit(&e->n, memory_order_acquire);
        uint64_t from = atomic_load_explicit(&e->begin, memory_order_acquire), to = atomic_load_explicit(&e->end, memory_order_acquire);
        if (atomic_load_explicit(&k->n, memory_order_acquire) - i >= ENG_TRACE_EVENTS)
            continue;
        fprintf(f, ",\n{\"ph\":\"X\",\"name\":\"%s\",\"pid\":%d,\"tid\":%u", name, pid, k->id);
        put_time(f, "ts", from > t->opened ? from - t->opened : 0);
        put_time(f, "dur", to > from ? to - from : 0);
        if (what)
            fprintf(f, ",\"args\":{\"%s\":%" PRId64 "}", what, n);
        fputc('}', f);
        written++;
    }
    *io_events += written;
    *io_forgotten += end - written;
}

int eng_trace_write(eng_trace *t, uint64_t *ret_events, uint64_t *ret_forgotten, char *err, size_t errlen)
{
    uint64_t events = 0, forgotten = 0;
    pthread_mutex_lock(&t->lock);
    clearerr(t->file);
    bool ok = fseek(t->file, 0, SEEK_SET) == 0 && ftruncate(fileno(t->file), 0) == 0;
    if (ok) {
        fputs(BEGINNING "\n", t->file);
        for (const eng_trace_track *k = t->tracks; k && !ferror(t->file); k = k->next)
            write_track(t, k, &events, &forgotten);
        fprintf(t->file, "\n],\"displayTimeUnit\":\"ns\",\"otherData\":{\"version\":\"" RETRIEVALD_VERSION "\",\"forgotten_events\":%" PRIu64 "}}\n", forgotten);
        ok = fflush(t->file) == 0 && !ferror(t->file);
    }
    int r = ok ? 0 : -errno;
    pthread_mutex_unlock(&t->lock);
    if (r < 0)
        return eng_fail(err, errlen, r, "trace file %s: %s", t->path, strerror(-r));
    if (ret_events)
        *ret_events = events;
    if (ret_forgotten)
        *ret_forgotten = forgotten;
    return 0;
}
