#include "mapping.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

struct eng_mapping {
    atomic_uintptr_t lo, hi; /* 0: free; hi is set last and cleared first */
    atomic_bool failed;
};

enum { MAX_MAPPINGS = 256 };
static eng_mapping mappings[MAX_MAPPINGS]; /* what a handler can see */
static struct sigaction before;
static uintptr_t page;
static pthread_once_t once = PTHREAD_ONCE_INIT;
_Static_assert(ATOMIC_POINTER_LOCK_FREE == 2 && ATOMIC_BOOL_LOCK_FREE == 2, "a signal handler must not take a lock");

static void on_bus(int sig, siginfo_t *info, void *context)
{
    int saved = errno;
    uintptr_t at = (uintptr_t)info->si_addr;
    (void)context;
    for (int i = 0; i < MAX_MAPPINGS; i++) {
        eng_mapping *m = &mappings[i];
        uintptr_t hi = atomic_load(&m->hi), from = at & ~(page - 1);
        if (at >= hi || at < atomic_load(&m->lo))
            continue;
        atomic_store(&m->failed, true);
        if (mmap((void *)from, hi - from, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
            break;
        errno = saved;
        return;
    }
    sigaction(sig, &before, NULL); /* not ours: the instruction is tried again, and that is the end */
    errno = saved;
}

static void install(void)
{
    struct sigaction on = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO};
    page = (uintptr_t)sysconf(_SC_PAGESIZE);
    sigemptyset(&on.sa_mask);
    sigaction(SIGBUS, &on, &before);
}

int eng_mapping_new(int fd, uint64_t offset, size_t bytes, eng_mapping **ret)
{
    eng_mapping *m = mappings;
    pthread_once(&once, install);
    while (m < mappings + MAX_MAPPINGS && atomic_load(&m->hi))
        m++;
    if (m == mappings + MAX_MAPPINGS)
        return -EMFILE;
    size_t whole = (bytes + page - 1) & ~(page - 1);
    void *p = mmap(NULL, whole, PROT_READ, MAP_SHARED, fd, (off_t)offset);
    if (p == MAP_FAILED)
        return -errno;
    atomic_store(&m->failed, false);
    atomic_store(&m->lo, (uintptr_t)p);
    atomic_store(&m->hi, (uintptr_t)p + whole);
    *ret = m;
    return 0;
}

void eng_mapping_free(eng_mapping *m)
{
    if (!m)
        return;
    uintptr_t lo = atomic_load(&m->lo), hi = atomic_load(&m->hi);
    munmap((void *)lo, hi - lo);
    atomic_store(&m->hi, 0);
}

uint8_t *eng_mapping_data(const eng_mapping *m)
{
    return (uint8_t *)atomic_load(&m->lo);
}

bool eng_mapping_failed(const eng_mapping *m)
{
    return atomic_load(&m->failed);
}
