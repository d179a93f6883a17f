/* The worker pool: every task exactly once, in rising order, by a thread of the pool; results visible on return; no livelock with more
 * threads than CPUs.
 */
#include "pool.h"
#include "support.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    uint32_t n_tasks, n_threads;
    atomic_uint runs, bad;
    uint32_t *count; /* [n_tasks] plain memory: a task taken twice is a data race too */
    uint64_t *value; /* [n_tasks] */
    uint64_t seed;
} job;

static void task_fn(void *ctx, uint32_t task, uint32_t worker)
{
    job *j = ctx;
    if (task >= j->n_tasks || worker >= j->n_threads) {
        atomic_fetch_add(&j->bad, 1);
        return;
    }
    j->count[task]++;
    j->value[task] = j->seed * 31 + task;
    atomic_fetch_add_explicit(&j->runs, 1, memory_order_relaxed);
}

/* Runs jobs of many sizes on one pool and checks each. */
static void check_jobs(uint32_t n_threads, uint32_t n_jobs, uint32_t max_tasks)
{
    eng_pool *p;
    ck_assert_int_eq(eng_pool_new(n_threads, &p), 0);
    ck_assert_uint_eq(eng_pool_threads(p), n_threads);
    job j = {.n_threads = n_threads, .count = malloc(max_tasks * sizeof(uint32_t)), .value = malloc(max_tasks * sizeof(uint64_t))};
    t_rng rng = t_seed(n_threads);
    for (uint32_t i = 0; i < n_jobs; i++) {
        j.n_tasks = (uint32_t)(t_u64(&rng) % (max_tasks + 1));
        j.seed = i;
        atomic_store(&j.runs, 0);
        memset(j.count, 0, max_tasks * sizeof *j.count);
        eng_pool_run(p, "test", task_fn, &j, j.n_tasks);
        ck_assert_uint_eq(atomic_load(&j.runs), j.n_tasks);
        for (uint32_t t = 0; t < j.n_tasks; t++)
            if (j.count[t] != 1 || j.value[t] != (uint64_t)i * 31 + t)
                ck_abort_msg("job %u, task %u of %u: ran %u times", i, t, j.n_tasks, j.count[t]);
        ck_assert_uint_eq(atomic_load(&j.bad), 0);
    }
    eng_pool_free(p);
    free(j.count);
    free(j.value);
}

START_TEST(every_task_once)
{
    for (uint32_t n = 1; n <= 8; n++)
        check_jobs(n, 300, 500);
}
END_TEST

START_TEST(many_small_jobs)
{
    check_jobs(2, 100000, 5);
    check_jobs(8, 3000, 5);
}
END_TEST

/* Jobs with pauses between them: the workers fall asleep and must wake up. The pause only makes sleeping likely; nothing is measured. */
START_TEST(after_sleep)
{
    eng_pool *p;
    ck_assert_int_eq(eng_pool_new(4, &p), 0);
    for (uint32_t i = 0; i < 50; i++) {
        uint32_t count[64] = {0};
        uint64_t value[64];
        job j = {.n_tasks = 64, .n_threads = 4, .count = count, .value = value, .seed = i};
        usleep(300);
        eng_pool_run(p, "test", task_fn, &j, j.n_tasks);
        ck_assert_uint_eq(atomic_load(&j.runs), 64);
    }
    eng_pool_free(p);
}
END_TEST

/* Two tasks that wait for each other: both run only if two threads work at the same time. */
static void meet_fn(void *ctx, uint32_t task, uint32_t worker)
{
    (void)task;
    (void)worker;
    atomic_uint *n = ctx;
    atomic_fetch_add(n, 1);
    while (atomic_load(n) < 2)
        sched_yield();
}

START_TEST(threads_run_at_the_same_time)
{
    eng_pool *p;
    ck_assert_int_eq(eng_pool_new(2, &p), 0);
    for (int i = 0; i < 200; i++) {
        atomic_uint n = 0;
        eng_pool_run(p, "test", meet_fn, &n, 2);
        ck_assert_uint_eq(atomic_load(&n), 2);
    }
    eng_pool_free(p);
}
END_TEST

/* Tasks are taken in rising order: so the ones a thread gets rise too. */
static void order_fn(void *ctx, uint32_t task, uint32_t worker)
{
    job *j = ctx;
    if (task < j->count[worker])
        atomic_fetch_add(&j->bad, 1);
    j->count[worker] = task + 1;
    atomic_fetch_add(&j->runs, 1);
}

START_TEST(rising_order)
{
    for (uint32_t n = 1; n <= 4; n++) {
        uint32_t next[4] = {0};
        eng_pool *p;
        ck_assert_int_eq(eng_pool_new(n, &p), 0);
        job j = {.count = next};
        eng_pool_run(p, "test", order_fn, &j, 1000);
        ck_assert_uint_eq(atomic_load(&j.bad), 0);
        ck_assert_uint_eq(atomic_load(&j.runs), 1000);
        eng_pool_free(p);
    }
}
END_TEST

static void sum_fn(void *ctx, uint32_t task, uint32_t worker)
{
    uint64_t *sums = ctx; /* [8 threads][8], a cache line each: a worker number belongs to one thread at a time */
    sums[8 * worker] += task;
}

typedef struct {
    const eng_pool *pool;
    uint32_t n_first;
    _Atomic uint32_t left;
    uint64_t *value; /* [n_first], plain memory */
    atomic_uint bad;
} chain;

/* The first tasks write, the others need what all of these wrote. */
static void chain_fn(void *ctx, uint32_t task, uint32_t worker)
{
    chain *c = ctx;
    (void)worker;
    if (task < c->n_first) {
        c->value[task] = task + 1;
        atomic_fetch_sub_explicit(&c->left, 1, memory_order_release);
        return;
    }
    eng_pool_await(c->pool, &c->left);
    for (uint32_t i = 0; i < c->n_first; i++)
        if (c->value[i] != i + 1)
            atomic_fetch_add(&c->bad, 1);
}

/* In a job, later tasks may wait for earlier ones; with more threads than CPUs, too. */
START_TEST(tasks_wait_for_earlier_ones)
{
    enum { MOST = 40 };
    for (uint32_t n_threads = 1; n_threads <= 2 * eng_pool_cores() + 1; n_threads++) {
        eng_pool *p;
        ck_assert_int_eq(eng_pool_new(n_threads, &p), 0);
        chain c = {.pool = p, .value = malloc(MOST * sizeof *c.value)};
        for (uint32_t i = 0; i < 300; i++) {
            c.n_first = i % MOST + 1;
            atomic_store(&c.left, c.n_first);
            memset(c.value, 0, MOST * sizeof *c.value);
            eng_pool_run(p, "test", chain_fn, &c, c.n_first + i % 7 + 1);
            ck_assert_uint_eq(atomic_load(&c.left), 0);
            ck_assert_uint_eq(atomic_load(&c.bad), 0);
        }
        free(c.value);
        eng_pool_free(p);
    }
}
END_TEST

START_TEST(worker_numbers_are_private)
{
    for (uint32_t n = 1; n <= 8; n++) {
        uint64_t sums[64] = {0}, total = 0;
        eng_pool *p;
        ck_assert_int_eq(eng_pool_new(n, &p), 0);
        for (int i = 0; i < 100; i++)
            eng_pool_run(p, "test", sum_fn, sums, 2000);
        for (int i = 0; i < 64; i++)
            total += sums[i];
        ck_assert_uint_eq(total, 100ull * 1999 * 2000 / 2);
        eng_pool_free(p);
    }
}
END_TEST

START_TEST(start_and_stop)
{
    eng_pool *p = NULL;
    ck_assert_int_eq(eng_pool_new(0, &p), -EINVAL);
    ck_assert_ptr_null(p);
    eng_pool_free(NULL);
    for (int i = 0; i < 300; i++) { /* also pools that never ran anything, stopped while workers start, spin or sleep */
        ck_assert_int_eq(eng_pool_new(1 + (uint32_t)i % 5, &p), 0);
        if (i % 3 == 0) {
            uint64_t sums[64] = {0};
            eng_pool_run(p, "test", sum_fn, sums, 10);
        }
        if (i % 7 == 0)
            usleep(200);
        eng_pool_free(p);
    }
}
END_TEST

START_TEST(cores)
{
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    ck_assert_uint_ge(eng_pool_cores(), 1);
    ck_assert_uint_le(eng_pool_cores(), (uint32_t)online);
    /* a process confined to one CPU has one core, and its pool still works */
    cpu_set_t all, one;
    ck_assert_int_eq(sched_getaffinity(0, sizeof all, &all), 0);
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE && !CPU_COUNT(&one); cpu++)
        if (CPU_ISSET(cpu, &all))
            CPU_SET(cpu, &one);
    ck_assert_int_eq(sched_setaffinity(0, sizeof one, &one), 0);
    ck_assert_uint_eq(eng_pool_cores(), 1);
    check_jobs(3, 200, 20);
    ck_assert_int_eq(sched_setaffinity(0, sizeof all, &all), 0);
}
END_TEST

enum { MOST = 256 };
typedef struct {
    atomic_uint n;
    uint32_t n_threads;
    cpu_set_t cpus[MOST];
} apart;

/* Every thread takes one: none is done before all have begun. */
static void cpus_fn(void *ctx, uint32_t task, uint32_t worker)
{
    (void)task;
    apart *a = ctx;
    sched_getaffinity(0, sizeof a->cpus[worker], &a->cpus[worker]);
    atomic_fetch_add(&a->n, 1);
    while (atomic_load(&a->n) < a->n_threads)
        sched_yield();
}

/* With a core each, no two threads of a pool may meet on a CPU, the caller included; without the pool it may use all again. */
START_TEST(a_cpu_each)
{
    cpu_set_t all, after, both;
    static apart a;
    eng_pool *p;
    a.n_threads = eng_pool_cores();
    if (a.n_threads < 2 || a.n_threads > MOST)
        return;
    ck_assert_int_eq(sched_getaffinity(0, sizeof all, &all), 0);
    ck_assert_int_eq(eng_pool_new(a.n_threads, &p), 0);
    eng_pool_run(p, "test", cpus_fn, &a, a.n_threads);
    for (uint32_t i = 0; i < a.n_threads; i++)
        for (uint32_t j = 0; j < i; j++) {
            CPU_AND(&both, &a.cpus[i], &a.cpus[j]);
            ck_assert_int_eq(CPU_COUNT(&both), 0);
        }
    eng_pool_free(p);
    ck_assert_int_eq(sched_getaffinity(0, sizeof after, &after), 0);
    ck_assert(CPU_EQUAL(&all, &after));
}
END_TEST

int main(void)
{
    Suite *s = suite_create("pool");
    TCase *t = tcase_create("pool");
    tcase_set_timeout(t, 0);
    tcase_add_test(t, every_task_once);
    tcase_add_test(t, many_small_jobs);
    tcase_add_test(t, after_sleep);
    tcase_add_test(t, threads_run_at_the_same_time);
    tcase_add_test(t, rising_order);
    tcase_add_test(t, tasks_wait_for_earlier_ones);
    tcase_add_test(t, worker_numbers_are_private);
    tcase_add_test(t, start_and_stop);
    tcase_add_test(t, cores);
    tcase_add_test(t, a_cpu_each);
    suite_add_tcase(s, t);
    return t_run(s);
}
