/* The worker pool (design section 3): n-1 pinned threads and the caller, which run slices of one job at a time.
 * Workers spin for some tens of microseconds after a job and then sleep, so that a decode step's many short jobs cost no system call.
 */
#ifndef RETRIEVALD_POOL_H
#define RETRIEVALD_POOL_H

#include <stddef.h>
#include <stdint.h>

typedef struct eng_pool eng_pool;

/* A slice of a job: task in [0, n_tasks), worker in [0, n_threads) (the caller is 0). */
typedef void eng_pool_fn(void *ctx, uint32_t task, uint32_t worker);

uint32_t eng_pool_cores(void);                          /* physical cores this process may use */
/* >= 1. The threads are traced where the caller is. Where each thread gets a core, the calling thread is kept off the workers' cores until it frees the pool; threads that it starts
 * in between inherit that. */
int eng_pool_new(uint32_t n_threads, eng_pool **ret);
void eng_pool_free(eng_pool *p);
uint32_t eng_pool_threads(const eng_pool *p);

/* Lets the calling thread, which the pool's maker started, use every CPU that the maker could. */
void eng_pool_unbind(const eng_pool *p);

/* Runs fn for every task, on all threads; a trace calls it `name`, a constant (trace.h). Tasks are taken in rising order, one at a time. Returns when all are done; what they wrote is
 * visible then. Only from the thread that made the pool, not from inside a task. */
void eng_pool_run(eng_pool *p, const char *name, eng_pool_fn *fn, void *ctx, uint32_t n_tasks);

/* From inside a task: waits until *word is 0, which tasks of the same job with lower numbers make it; what they wrote before is visible then. */
void eng_pool_await(const eng_pool *p, const _Atomic uint32_t *word);

#endif
