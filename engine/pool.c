/* Threading model. One job at a time, opened by the caller (the thread that made the pool) and finished when as many tasks are done as it
 * has.
 *
 * `ticket` holds the job's generation (high half) and the next task (low half). A thread takes a task by compare-and-swap on it. Between
 * two jobs the ticket is closed (task CLOSED), and only then are the job's fields written; hence a successful swap proves
 * that n_tasks, read before it, belonged to that generation, and fn, ctx and name, read after it, cannot change until that task is counted in
 * n_done. A worker that comes late finds no task and touches nothing, so nobody waits for it.
 *
 * CPUs: with a core for each thread the workers are pinned, and the caller is kept off their cores while the pool lives; left to the
 * scheduler, it was seen to share a worker's CPU for seconds while another was idle.
 *
 * Sleeping: a thread says that it sleeps (n_parked, caller_parked), looks once more, and only then calls futex; the other side changes the
 * futex word first and looks for sleepers after. Both in sequentially consistent order, so one of the two sees the other.
 */
#include "pool.h"

#include "trace.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SPIN_NS = 40000, CACHE_LINE = 64 };
#define CLOSED UINT32_MAX

typedef struct {
    eng_pool *pool;
    uint32_t index;
    pthread_t thread;
    eng_trace_track *track;
} worker;

struct eng_pool {
    _Alignas(CACHE_LINE) _Atomic uint64_t ticket;
    _Alignas(CACHE_LINE) _Atomic uint32_t n_done; /* tasks finished; the caller's futex word */
    _Atomic uint32_t caller_parked;
    _Alignas(CACHE_LINE) _Atomic uint32_t generation; /* of the newest job; the workers' futex word */
    _Atomic uint32_t n_tasks;
    eng_pool_fn *fn;
    void *ctx;
    const char *name;
    atomic_bool stop;
    _Alignas(CACHE_LINE) _Atomic uint32_t n_parked;
    bool crowded; /* fewer CPUs than threads: give the CPU away instead of spinning */
    uint32_t n_threads, n_started;
    worker *workers; /* [n_threads - 1] */
    cpu_set_t *callers_cpus; /* what the caller may use without the pool; NULL: unchanged */
    size_t callers_bytes;
};

/* ---- CPUs ------------------------------------------------------------------------------------------------------- */

/* The lowest CPU of the core that `cpu` belongs to; itself where the system does not say. */
static int core_of(int cpu)
{
    static const char *const files[] = {"core_cpus_list", "thread_siblings_list"};
    for (size_t i = 0; i < 2; i++) {
        char path[96];
        int first;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/%s", cpu, files[i]);
        FILE *f = fopen(path, "re");
        if (!f)
            continue;
        int n = fscanf(f, "%d", &first);
        fclose(f);
        if (n == 1 && first >= 0)
            return first;
    }
    return cpu;
}

/* The CPUs that this thread may use. NULL: no memory or the system does not tell; CPU_FREE. */
static cpu_set_t *usable_cpus(int *ret_max)
{
    for (int max = 1024; max <= 1 << 20; max *= 2) {
        cpu_set_t *set = CPU_ALLOC((size_t)max);
        if (!set)
            return NULL;
        if (sched_getaffinity(0, CPU_ALLOC_SIZE((size_t)max), set) == 0) {
            *ret_max = max;
            return set;
        }
        int err = errno;
        CPU_FREE(set);
        if (err != EINVAL) /* EINVAL: the kernel's mask is larger */
            return NULL;
    }
    return NULL;
}

/* The cores that this thread may use, in rising order of their first usable CPUs. */
typedef struct {
    uint32_t n, n_cpus; /* n_cpus: of all these cores */
    struct { int id, cpu; } *of; /* [n]; malloc'ed */
} core_list;

/* .n is 0 without memory or where the system does not tell. */
static core_list find_cores(void)
{
    core_list l = {0};
    int max;
    cpu_set_t *set = usable_cpus(&max);
    if (set)
        l.of = malloc((size_t)max * sizeof *l.of);
    for (int cpu = 0; l.of && cpu < max; cpu++) {
        if (!CPU_ISSET_S((size_t)cpu, CPU_ALLOC_SIZE((size_t)max), set))
            continue;
        l.n_cpus++;
        int id = core_of(cpu);
        uint32_t i = 0;
        while (i < l.n && l.of[i].id != id)
            i++;
        if (i == l.n) {
            l.of[l.n].id = id;
            l.of[l.n++].cpu = cpu;
        }
    }
    if (set)
        CPU_FREE(set);
    return l;
}

uint32_t eng_pool_cores(void)
{
    core_list l = find_cores();
    free(l.of);
    return l.n ? l.n : 1;
}

static void pin(pthread_t thread, int cpu)
{
    size_t bytes = CPU_ALLOC_SIZE((size_t)cpu + 1);
    cpu_set_t *set = CPU_ALLOC((size_t)cpu + 1);
    if (!set)
        return;
    CPU_ZERO_S(bytes, set);
    CPU_SET_S((size_t)cpu, bytes, set);
    pthread_setaffinity_np(thread, bytes, set); /* only a hint: a refusal changes no result */
    CPU_FREE(set);
}

/* Keeps this thread off the workers' cores, which are 1 .. n_threads - 1. Only a hint, too. */
static void leave_cores(eng_pool *p, const core_list *l)
{
    int max;
    cpu_set_t *all = usable_cpus(&max), *rest = all ? CPU_ALLOC((size_t)max) : NULL;
    size_t bytes = all ? CPU_ALLOC_SIZE((size_t)max) : 0;
    if (!rest) {
        CPU_FREE(all);
        return;
    }
    memcpy(rest, all, bytes);
    for (int cpu = 0; cpu < max; cpu++) {
        int id = CPU_ISSET_S((size_t)cpu, bytes, all) ? core_of(cpu) : -1;
        for (uint32_t i = 1; i < p->n_threads; i++)
            if (l->of[i].id == id)
                CPU_CLR_S((size_t)cpu, bytes, rest);
    }
    sched_setaffinity(0, bytes, rest);
    CPU_FREE(rest);
    p->callers_cpus = all;
    p->callers_bytes = bytes;
}

/* ---- waiting ---------------------------------------------------------------------------------------------------- */

static void futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, uint32_t n)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n > INT_MAX ? INT_MAX : (int)n, NULL, NULL, 0);
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Waits some tens of microseconds for *word to differ from seen. */
static bool spin(const eng_pool *p, const _Atomic uint32_t *word, uint32_t seen)
{
    uint64_t end = 0;
    for (;;) {
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != seen)
                return true;
            if (p->crowded) {
                sched_yield();
                break;
            }
            relax();
        }
        uint64_t now = eng_now_ns();
        if (!end)
            end = now + SPIN_NS;
        else if (now >= end)
            return false;
    }
}

/* ---- jobs ------------------------------------------------------------------------------------------------------- */

static void work(eng_pool *p, uint32_t index)
{
    uint32_t n = 0;
    uint64_t begin = 0;
    const char *name = NULL;
    uint64_t t = atomic_load_explicit(&p->ticket, memory_order_acquire);
    for (;;) {
        uint32_t task = (uint32_t)t;
        if (task >= atomic_load_explicit(&p->n_tasks, memory_order_acquire))
            break;
        if (!atomic_compare_exchange_weak_explicit(&p->ticket, &t, t + 1, memory_order_acq_rel, memory_order_acquire))
            continue;
        if (n++ == 0 && index) { /* the caller's part is told by eng_pool_run */
            begin = eng_trace_begin();
            name = p->name;
        }
        p->fn(p->ctx, task, index);
        t = atomic_load_explicit(&p->ticket, memory_order_acquire);
    }
    /* Between its last task and here this thread may look at the ticket of its own job only: that job waits for n. */
    if (n) {
        eng_trace_end(begin, name, "tasks", n);
        atomic_fetch_add(&p->n_done, n);
        if (index && atomic_load(&p->caller_parked))
            futex_wake(&p->n_done, 1);
    }
}

static void *worker_main(void *arg)
{
    worker *w = arg;
    eng_pool *p = w->pool;
    eng_trace_use(w->track);
    for (;;) {
        uint32_t seen = atomic_load(&p->generation);
        if (atomic_load(&p->stop)) /* after generation, which eng_pool_free changes last */
            break;
        work(p, w->index);
        if (spin(p, &p->generation, seen))
            continue;
        atomic_fetch_add(&p->n_parked, 1);
        while (atomic_load(&p->generation) == seen)
            futex_wait(&p->generation, seen);
        atomic_fetch_sub(&p->n_parked, 1);
    }
    return NULL;
}

/* Until all tasks are done. */
static void wait_for_workers(eng_pool *p, uint32_t n_tasks)
{
    for (;;) {
        uint32_t done = atomic_load_explicit(&p->n_done, memory_order_acquire);
        if (done == n_tasks)
            return;
        if (spin(p, &p->n_done, done))
            continue;
        atomic_store(&p->caller_parked, 1);
        while ((done = atomic_load(&p->n_done)) != n_tasks)
            futex_wait(&p->n_done, done);
        atomic_store(&p->caller_parked, 0);
    }
}

static void run_alone(eng_pool_fn *fn, void *ctx, uint32_t n_tasks)
{
    for (uint32_t i = 0; i < n_tasks; i++)
        fn(ctx, i, 0);
}

static void run_together(eng_pool *p, const char *name, eng_pool_fn *fn, void *ctx, uint32_t n_tasks)
{
    uint32_t generation = atomic_load_explicit(&p->generation, memory_order_relaxed) + 1;
    atomic_store_explicit(&p->ticket, (uint64_t)generation << 32 | CLOSED, memory_order_relaxed);
    p->fn = fn;
    p->ctx = ctx;
    p->name = name;
    atomic_store_explicit(&p->n_done, 0, memory_order_relaxed);
    atomic_store_explicit(&p->n_tasks, n_tasks, memory_order_release);
    atomic_store_explicit(&p->ticket, (uint64_t)generation << 32, memory_order_release);
    atomic_store(&p->generation, generation);
    uint32_t parked = atomic_load(&p->n_parked);
    if (parked)
        futex_wake(&p->generation, parked < n_tasks - 1 ? parked : n_tasks - 1);

    work(p, 0);
    uint64_t begin = eng_trace_begin();
    wait_for_workers(p, n_tasks);
    eng_trace_end(begin, "wait", NULL, 0);
}

void eng_pool_run(eng_pool *p, const char *name, eng_pool_fn *fn, void *ctx, uint32_t n_tasks)
{
    uint64_t begin = eng_trace_begin();
    if (p->n_threads == 1 || n_tasks <= 1)
        run_alone(fn, ctx, n_tasks);
    else
        run_together(p, name, fn, ctx, n_tasks);
    eng_trace_end(begin, name, "tasks", n_tasks);
}

/* Lower tasks were taken before: they are done, or at work on other threads, one of which may have lost its CPU. */
void eng_pool_await(const eng_pool *p, const _Atomic uint32_t *word)
{
    for (uint32_t left; (left = atomic_load_explicit(word, memory_order_acquire)) != 0;)
        if (!spin(p, word, left))
            sched_yield();
}

/* ---- life ------------------------------------------------------------------------------------------------------- */

int eng_pool_new(uint32_t n_threads, eng_pool **ret)
{
    if (!n_threads)
        return -EINVAL;
    size_t bytes = (sizeof(eng_pool) + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    eng_pool *p = aligned_alloc(CACHE_LINE, bytes);
    if (!p)
        return -ENOMEM;
    memset(p, 0, bytes);
    p->n_threads = n_threads;
    p->workers = calloc(n_threads, sizeof *p->workers);
    if (!p->workers) {
        free(p);
        return -ENOMEM;
    }
    core_list cores = find_cores();
    p->crowded = cores.n && n_threads > cores.n_cpus;
    bool pinned = n_threads > 1 && n_threads <= cores.n;

    /* Signals are the business of the threads outside. */
    sigset_t all, old;
    sigfillset(&all);
    sigdelset(&all, SIGBUS); /* of the thread's own doing (mapping.h) */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = 0;
    for (uint32_t i = 1; i < n_threads && !rc; i++) {
        worker *w = &p->workers[p->n_started];
        *w = (worker){.pool = p, .index = i};
        char name[24];
        snprintf(name, sizeof name, "pool %u", i);
        rc = eng_trace_track_new(name, &w->track);
        if (rc == 0)
            rc = -pthread_create(&w->thread, NULL, worker_main, w);
        if (rc)
            break;
        p->n_started++;
        pthread_setname_np(w->thread, "pool");
        if (pinned) /* the first core is left to the caller */
            pin(w->thread, cores.of[i].cpu);
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (pinned && !rc)
        leave_cores(p, &cores);
    free(cores.of);
    if (rc) {
        eng_pool_free(p);
        return rc;
    }
    *ret = p;
    return 0;
}

void eng_pool_unbind(const eng_pool *p)
{
    if (p->callers_cpus)
        sched_setaffinity(0, p->callers_bytes, p->callers_cpus);
}

void eng_pool_free(eng_pool *p)
{
    if (!p)
        return;
    atomic_store(&p->stop, true);
    atomic_fetch_add(&p->generation, 1);
    futex_wake(&p->generation, INT_MAX);
    for (uint32_t i = 0; i < p->n_started; i++)
        pthread_join(p->workers[i].thread, NULL);
    if (p->callers_cpus) {
        eng_pool_unbind(p);
        CPU_FREE(p->callers_cpus);
    }
    free(p->workers);
    free(p);
}

uint32_t eng_pool_threads(const eng_pool *p)
{
    return p->n_threads;
}
