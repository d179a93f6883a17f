/* The trace: JSON that a parser takes, with what was put in, one track a thread; a full ring keeps the newest and counts the rest; written while threads go on;
 * and what a file name may be.
 */
#include "pool.h"
#include "support.h"
#include "trace.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char dir[] = "/tmp/retrievald-trace-XXXXXX", path[64], err[256];

static const char *below(const char *name)
{
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return path;
}

static eng_trace *open_trace(void)
{
    eng_trace *t = NULL;
    ck_assert_msg(eng_trace_open(below("t.json"), &t, err, sizeof err) == 0, "%s", err);
    return t;
}

static cJSON *write_and_read(eng_trace *t, uint64_t *ret_events, uint64_t *ret_forgotten)
{
    ck_assert_msg(eng_trace_write(t, ret_events, ret_forgotten, err, sizeof err) == 0, "%s", err);
    char *text = t_read(below("t.json"), NULL);
    cJSON *json = cJSON_ParseWithOpts(text, NULL, true);
    ck_assert_msg(json != NULL, "no JSON: %.200s", text);
    free(text);
    return json;
}

static const char *text_of(const cJSON *e, const char *key)
{
    return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(e, key));
}

static double number_of(const cJSON *e, const char *key)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(e, key);
    ck_assert_msg(cJSON_IsNumber(v), "no number %s", key);
    return v->valuedouble;
}

/* The track's tid, from its thread_name; 0: no such track. */
static double tid_of(const cJSON *json, const char *name)
{
    const cJSON *e;
    cJSON_ArrayForEach(e, cJSON_GetObjectItemCaseSensitive(json, "traceEvents"))
        if (!strcmp(text_of(e, "ph"), "M") && !strcmp(text_of(e, "name"), "thread_name") &&
            !strcmp(text_of(cJSON_GetObjectItemCaseSensitive(e, "args"), "name"), name))
            return number_of(e, "tid");
    return 0;
}

/* The i-th complete event of a track; NULL: it has no more. */
static const cJSON *event_of(const cJSON *json, double tid, int i)
{
    const cJSON *e;
    cJSON_ArrayForEach(e, cJSON_GetObjectItemCaseSensitive(json, "traceEvents"))
        if (!strcmp(text_of(e, "ph"), "X") && number_of(e, "tid") == tid && i-- == 0)
            return e;
    return NULL;
}

START_TEST(untraced)
{
    eng_trace_track *k = (eng_trace_track *)path;
    ck_assert_uint_eq(eng_trace_begin(), 0);
    eng_trace_end(0, "nothing", NULL, 0);
    eng_trace_add(NULL, "nothing", NULL, 0, 1, 2);
    ck_assert_int_eq(eng_trace_track_new("none", &k), 0);
    ck_assert_ptr_null(k);
    ck_assert_int_eq(eng_trace_attach(NULL, "none"), 0);
    ck_assert_ptr_null(eng_trace_mine);
    eng_trace_free(NULL);
}
END_TEST

START_TEST(events)
{
    uint64_t n, forgotten, before = eng_now_ns();
    eng_trace *t = open_trace();
    eng_trace_track *gpu;
    cJSON *json = write_and_read(t, &n, &forgotten); /* without a track, too */
    ck_assert_uint_eq(n, 0);
    cJSON_Delete(json);

    ck_assert_int_eq(eng_trace_attach(t, "engine"), 0);
    uint64_t outer = eng_trace_begin(), inner = eng_trace_begin();
    ck_assert_uint_ge(outer, before);
    eng_trace_end(inner, "inner", "layer", -7);
    eng_trace_end(outer, "outer", NULL, 5);
    ck_assert_int_eq(eng_trace_track_new("gpu compute", &gpu), 0);
    eng_trace_add(gpu, "kernel", "bytes", INT64_MAX, outer + 1234567, outer + 2234568);
    eng_trace_add(gpu, "backwards", NULL, 0, outer, outer - 1);
    eng_trace_add(gpu, "too early", NULL, 0, 1, outer);
    json = write_and_read(t, &n, &forgotten);
    ck_assert_uint_eq(n, 5);
    ck_assert_uint_eq(forgotten, 0);

    const cJSON *in = event_of(json, tid_of(json, "engine"), 0), *out = event_of(json, tid_of(json, "engine"), 1);
    ck_assert_str_eq(text_of(in, "name"), "inner");
    ck_assert_str_eq(text_of(out, "name"), "outer");
    ck_assert_double_eq(number_of(cJSON_GetObjectItemCaseSensitive(in, "args"), "layer"), -7);
    ck_assert_ptr_null(cJSON_GetObjectItemCaseSensitive(out, "args"));
    ck_assert_double_eq(number_of(in, "pid"), getpid());
    ck_assert_double_ge(number_of(in, "ts"), number_of(out, "ts"));
    ck_assert_double_le(number_of(in, "ts") + number_of(in, "dur"), number_of(out, "ts") + number_of(out, "dur") + .0005);

    const cJSON *kernel = event_of(json, tid_of(json, "gpu compute"), 0);
    ck_assert_double_eq_tol(number_of(kernel, "ts") - number_of(out, "ts"), 1234.567, 1e-3);
    ck_assert_double_eq_tol(number_of(kernel, "dur"), 1000.001, 1e-6);
    ck_assert_double_eq(number_of(event_of(json, tid_of(json, "gpu compute"), 1), "dur"), 0);
    ck_assert_double_eq(number_of(event_of(json, tid_of(json, "gpu compute"), 2), "ts"), 0);
    ck_assert_ptr_null(event_of(json, tid_of(json, "gpu compute"), 3));
    cJSON_Delete(json);

    /* a later writing takes the earlier one's place, with what came since */
    eng_trace_end(outer, "last", NULL, 0);
    json = write_and_read(t, &n, NULL);
    ck_assert_uint_eq(n, 6);
    ck_assert_str_eq(text_of(event_of(json, tid_of(json, "engine"), 2), "name"), "last");
    cJSON_Delete(json);
    eng_trace_leave();
    ck_assert_uint_eq(eng_trace_begin(), 0);
    eng_trace_free(t);
}
END_TEST

START_TEST(full_ring)
{
    enum { MORE = 1000 };
    uint64_t n, forgotten;
    eng_trace *t = open_trace();
    ck_assert_int_eq(eng_trace_attach(t, "engine"), 0);
    for (uint64_t i = 0; i < ENG_TRACE_EVENTS + MORE; i++)
        eng_trace_add(eng_trace_mine, "event", "i", (int64_t)i, eng_now_ns(), eng_now_ns());
    cJSON *json = write_and_read(t, &n, &forgotten);
    ck_assert_uint_eq(n + forgotten, ENG_TRACE_EVENTS + MORE);
    ck_assert_uint_ge(n, ENG_TRACE_EVENTS - 1);
    ck_assert_double_eq(number_of(cJSON_GetObjectItemCaseSensitive(json, "otherData"), "forgotten_events"), (double)forgotten);
    const cJSON *e;
    uint64_t next = forgotten; /* the newest are there, in order */
    cJSON_ArrayForEach(e, cJSON_GetObjectItemCaseSensitive(json, "traceEvents"))
        if (!strcmp(text_of(e, "ph"), "X"))
            ck_assert_double_eq(number_of(cJSON_GetObjectItemCaseSensitive(e, "args"), "i"), (double)next++);
    ck_assert_uint_eq(next, ENG_TRACE_EVENTS + MORE);
    cJSON_Delete(json);
    eng_trace_leave();
    eng_trace_free(t);
}
END_TEST

/* Event i of a busy thread begins at base + 2 i ns and has n = i, so a torn event shows. */
typedef struct {
    eng_trace_track *track;
    uint64_t base;
    atomic_bool stop;
} busy;

static void *busy_main(void *arg)
{
    busy *b = arg;
    eng_trace_use(b->track);
    for (uint64_t i = 0; !atomic_load_explicit(&b->stop, memory_order_relaxed); i++)
        eng_trace_add(eng_trace_mine, "busy", "i", (int64_t)i, b->base + 2000 * i, b->base + 2000 * i + i % 1000);
    return NULL;
}

START_TEST(written_while_threads_go_on)
{
    enum { THREADS = 2, ROUNDS = 3 };
    uint64_t n = 0, forgotten = 0;
    eng_trace *t = open_trace();
    busy b[THREADS] = {0};
    pthread_t threads[THREADS];
    ck_assert_int_eq(eng_trace_attach(t, "engine"), 0);
    for (int i = 0; i < THREADS; i++) {
        b[i].base = eng_now_ns();
        ck_assert_int_eq(eng_trace_track_new(i ? "busy 1" : "busy 0", &b[i].track), 0);
        ck_assert_int_eq(pthread_create(&threads[i], NULL, busy_main, &b[i]), 0);
    }
    for (int round = 0; round < ROUNDS || !forgotten; round++) { /* until the rings went round under the reader */
        cJSON *json = write_and_read(t, &n, &forgotten);
        const cJSON *e;
        double first[THREADS + 2] = {0}, last[THREADS + 2] = {0};
        cJSON_ArrayForEach(e, cJSON_GetObjectItemCaseSensitive(json, "traceEvents")) {
            if (strcmp(text_of(e, "ph"), "X"))
                continue;
            int tid = (int)number_of(e, "tid");
            double i = number_of(cJSON_GetObjectItemCaseSensitive(e, "args"), "i"), ts = number_of(e, "ts");
            ck_assert_double_eq_tol(number_of(e, "dur"), (double)((int64_t)i % 1000) / 1000, 1e-6);
            if (last[tid] > 0) {
                ck_assert_double_gt(i, last[tid]);
                ck_assert_double_eq_tol(ts - first[tid], 2 * (i - last[tid]), 2e-3);
            }
            first[tid] = ts;
            last[tid] = i;
        }
        cJSON_Delete(json);
    }
    for (int i = 0; i < THREADS; i++) {
        atomic_store(&b[i].stop, true);
        pthread_join(threads[i], NULL);
    }
    eng_trace_leave();
    eng_trace_free(t);
}
END_TEST

/* A pool job whose tasks meet: each thread has one. */
static void meet_fn(void *ctx, uint32_t task, uint32_t worker)
{
    atomic_uint *n = ctx;
    (void)task;
    (void)worker;
    atomic_fetch_add(n, 1);
    while (atomic_load(n) < 3)
        sched_yield();
}

/* The maker of a pool is traced, so its threads are: a job is an event on each thread that had a task, within that of the caller. */
START_TEST(pool_jobs)
{
    enum { JOBS = 20 };
    eng_trace *t = open_trace();
    eng_pool *p;
    ck_assert_int_eq(eng_trace_attach(t, "engine"), 0);
    ck_assert_int_eq(eng_pool_new(3, &p), 0);
    for (int i = 0; i < JOBS; i++) {
        atomic_uint n = 0;
        eng_pool_run(p, "meet", meet_fn, &n, 3);
        ck_assert_int_eq(eng_trace_write(t, NULL, NULL, err, sizeof err), 0); /* the workers may be at their last stores */
    }
    eng_pool_free(p);
    cJSON *json = write_and_read(t, NULL, NULL);
    static const char *const workers[] = {"pool 1", "pool 2"};
    for (int w = 0; w < 2; w++) {
        int i = 0, j = 0;
        for (; event_of(json, tid_of(json, workers[w]), i); i++) {
            const cJSON *e = event_of(json, tid_of(json, workers[w]), i), *job;
            ck_assert_str_eq(text_of(e, "name"), "meet");
            ck_assert_double_eq(number_of(cJSON_GetObjectItemCaseSensitive(e, "args"), "tasks"), 1);
            while ((job = event_of(json, tid_of(json, "engine"), j++)) && strcmp(text_of(job, "name"), "meet"))
                ck_assert_str_eq(text_of(job, "name"), "wait");
            ck_assert_ptr_nonnull(job);
            ck_assert_double_eq(number_of(cJSON_GetObjectItemCaseSensitive(job, "args"), "tasks"), 3);
            ck_assert_double_ge(number_of(e, "ts"), number_of(job, "ts"));
            ck_assert_double_le(number_of(e, "ts") + number_of(e, "dur"), number_of(job, "ts") + number_of(job, "dur") + .002);
        }
        ck_assert_int_eq(i, JOBS);
    }
    cJSON_Delete(json);
    eng_trace_leave();
    eng_trace_free(t);
}
END_TEST

#define REFUSED(name, code, part)                                                                                                          \
    do {                                                                                                                                   \
        eng_trace *none = NULL;                                                                                                            \
        ck_assert_int_eq(eng_trace_open(below(name), &none, err, sizeof err), code);                                                       \
        ck_assert_ptr_null(none);                                                                                                          \
        ck_assert_msg(strstr(err, path) && strstr(err, part), "message '%s' does not hold '%s'", err, part);                               \
    } while (0)

START_TEST(file_names)
{
    eng_trace *t;
    REFUSED("", -EISDIR, "Is a directory");
    REFUSED("no/such/folder", -ENOENT, "No such file");
    ck_assert_int_eq(mkfifo(below("fifo"), 0600), 0);
    REFUSED("fifo", -EINVAL, "not a plain file");
    unlink(below("fifo"));

    /* a document, or something shorter than a trace's beginning, stays as it is */
    static const char *const texts[] = {"GGUF, and many gigabytes of weights", "x"};
    for (size_t i = 0; i < 2; i++) {
        FILE *f = fopen(below("text"), "w");
        ck_assert_ptr_nonnull(f);
        fputs(texts[i], f);
        fclose(f);
        REFUSED("text", -EINVAL, "holds something else");
        char *text = t_read(below("text"), NULL);
        ck_assert_str_eq(text, texts[i]);
        free(text);
    }
    unlink(below("text"));

    /* a file from before is taken, and one that was left empty */
    unlink(below("t.json"));
    for (int i = 0; i < 3; i++) {
        t = open_trace();
        struct stat st;
        ck_assert_int_eq(stat(below("t.json"), &st), 0);
        ck_assert_uint_eq(st.st_mode & 0777, 0600);
        if (i)
            cJSON_Delete(write_and_read(t, NULL, NULL));
        eng_trace_free(t);
    }
    unlink(below("t.json"));

    eng_trace *device = NULL;
    ck_assert_int_eq(eng_trace_open("/dev/full", &device, err, sizeof err), -EINVAL);
}
END_TEST

int main(void)
{
    if (!mkdtemp(dir))
        return EXIT_FAILURE;
    Suite *suite = suite_create("trace");
    TCase *c = tcase_create("trace");
    tcase_add_test(c, untraced);
    tcase_add_test(c, events);
    tcase_add_test(c, full_ring);
    tcase_add_test(c, written_while_threads_go_on);
    tcase_add_test(c, pool_jobs);
    tcase_add_test(c, file_names);
    suite_add_tcase(suite, c);
    int rc = t_run(suite);
    unlink(below("t.json"));
    rmdir(dir);
    return rc;
}
