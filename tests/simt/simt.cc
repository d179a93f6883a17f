/* Fibres, warps, barriers: see simt.h. One host thread at a time, which the runtime's lock sees to. */
#include "simt.h"
#include "emu.h"
#include "state.h"

#include <algorithm>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined __x86_64__ && !defined SIMT_UCONTEXT
#define SIMT_UCONTEXT
#endif
#ifdef SIMT_UCONTEXT
#include <ucontext.h>
#endif

/* ---- fibres ----------------------------------------------------------------------------------------------------------- */

struct simt_fibre {
#ifdef SIMT_UCONTEXT
    ucontext_t context;
#else
    void *sp;
#endif
    char *stack;
    size_t size;
    void *fake; /* the address sanitizer's */
};

#ifdef __SANITIZE_ADDRESS__
enum { STACK_SIZE = 512 << 10 };
#else
enum { STACK_SIZE = 128 << 10 };
#endif
/* Stacks begin at different sets of the first cache, or 32 of a warp would share one. */
enum { STACK_COLOURS = 32, STACK_COLOUR = 448 };

static simt_fibre host;      /* what called simt_run */
static simt_fibre *previous; /* from which we came */
static std::vector<simt_fibre *> &fibres = *new std::vector<simt_fibre *>(), &idle = *new std::vector<simt_fibre *>(); /* for as long as the program is */

static void begin();

static void arrived(simt_fibre *self)
{
#ifdef __SANITIZE_ADDRESS__
    const void *stack;
    size_t size;
    __sanitizer_finish_switch_fiber(self->fake, &stack, &size);
    if (previous == &host) {
        host.stack = (char *)const_cast<void *>(stack);
        host.size = size;
    }
#else
    (void)self;
#endif
}

static void depart(simt_fibre *from, simt_fibre *to, bool for_good)
{
    previous = from;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(for_good ? nullptr : &from->fake, to->stack, to->size);
#else
    (void)to;
    (void)for_good;
#endif
}

/* What is live across this is saved on the stack by the compiler, as the statement says that it destroys all registers. It jumps instead of returning, so
 * that the processor's stack of return addresses stays in step: threads of a warp wait at the same call. */
__attribute__((always_inline)) static inline void switch_to(simt_fibre *from, simt_fibre *to)
{
    depart(from, to, false);
#ifdef SIMT_UCONTEXT
    swapcontext(&from->context, &to->context);
#else
    void **save = &from->sp, *load = to->sp;
    __asm__ volatile("addq $-128, %%rsp\n\t" /* the red zone */
                     "pushq %%rbp\n\t"
                     "leaq 1f(%%rip), %%rdx\n\t"
                     "pushq %%rdx\n\t"
                     "movq %%rsp, (%%rax)\n\t"
                     "movq %%rcx, %%rsp\n\t"
                     "popq %%rdx\n\t"
                     "jmp *%%rdx\n\t"
                     "1:\n\t"
                     "popq %%rbp\n\t"
                     "subq $-128, %%rsp"
                     : "+a"(save), "+c"(load)
                     :
                     : "rdx", "rbx", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6",
                       "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "memory", "cc");
#endif
    arrived(from);
}

/* As above, and this fibre's state is lost. */
[[noreturn]] static void leave_to(simt_fibre *from, simt_fibre *to)
{
    depart(from, to, true);
#ifdef SIMT_UCONTEXT
    setcontext(&to->context);
#else
    __asm__ volatile("movq %0, %%rsp\n\t"
                     "popq %%rdx\n\t"
                     "jmp *%%rdx" : : "r"(to->sp) : "memory", "rdx");
#endif
    __builtin_unreachable();
}

static void rewind(simt_fibre *f, size_t number)
{
    char *top = f->stack + f->size - number % STACK_COLOURS * STACK_COLOUR;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(f->stack, f->size);
    f->fake = nullptr;
#endif
#ifdef SIMT_UCONTEXT
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack;
    f->context.uc_stack.ss_size = (size_t)(top - f->stack);
    f->context.uc_link = nullptr;
    makecontext(&f->context, begin, 0);
#else
    void **sp = (void **)((uintptr_t)top & ~(uintptr_t)63) - 2; /* as after a call: 8 bytes below a multiple of 16 when begin() is entered */
    sp[0] = (void *)begin;
    sp[1] = nullptr;
    f->sp = sp;
#endif
}

static simt_fibre *fibre_take()
{
    if (idle.empty()) {
        const size_t page = 4096;
        char *stack = (char *)mmap(nullptr, STACK_SIZE + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stack == MAP_FAILED || mprotect(stack, page, PROT_NONE) < 0)
            abort();
        simt_fibre *f = new simt_fibre();
        f->stack = stack + page;
        f->size = STACK_SIZE;
        rewind(f, fibres.size());
        fibres.push_back(f);
        return f;
    }
    simt_fibre *f = idle.back();
    idle.pop_back();
    return f;
}

/* After a fault: what stood on the stacks is forgotten. */
static void rewind_all()
{
    idle.clear();
    for (size_t i = fibres.size(); i-- > 0;) {
        rewind(fibres[i], i);
        idle.push_back(fibres[i]);
    }
}

/* ---- blocks ------------------------------------------------------------------------------------------------------------ */

enum op : unsigned { OP_SYNC, OP_SHUFFLE, OP_BALLOT, OP_WORK };
static const char *const op_names[] = {"__syncwarp", "a shuffle", "a vote", "a matrix operation"};

struct simt_warp {
    uint32_t number, present, ended;
    uint32_t runnable;             /* has not begun, or may go on */
    uint32_t syncs;                /* __syncwarp */
    uint32_t arrived;              /* waits in an operation of the warp */
    uint32_t mask[SIMT_WARP];      /* that a lane which arrived came with, and where it stands: line * 4 + op */
    uint32_t where[SIMT_WARP];
    uint32_t source[SIMT_WARP];
    uint64_t value[SIMT_WARP], result[SIMT_WARP];
};

simt_thread *simt_self;
uint3 simt_block;
dim3 simt_grid_dim, simt_block_dim;
unsigned char *simt_dynamic;

const simt_grid *simt_running;
uint32_t simt_barriers;
static simt_thread threads[SIMT_MAX_THREADS];
static simt_warp warps[SIMT_MAX_THREADS / SIMT_WARP];
static uint32_t ready;     /* warps with runnable lanes */
static bool backwards;     /* the last runnable one comes first */
static unsigned n_threads, n_ended;
static bool failed;
static pthread_t runner;

/* The block's barrier. result is safe until all have come to the next one, so all have read it. */
static struct {
    unsigned waiting, count, result;
    int line;
    const simt_thread *first;
} barrier;

static inline unsigned first_bit(uint32_t bits)
{
    return backwards ? 31u - (unsigned)__builtin_clz(bits) : (unsigned)__builtin_ctz(bits);
}

static inline simt_thread *pick(simt_warp *w)
{
    if (!w->runnable) {
        if (!ready)
            return nullptr;
        w = &warps[first_bit(ready)];
    }
    unsigned lane = first_bit(w->runnable);
    w->runnable &= ~(1u << lane);
    if (!w->runnable)
        ready &= ~(1u << w->number);
    return &threads[w->number * SIMT_WARP + lane];
}

static void wake(simt_warp *w, uint32_t lanes)
{
    w->runnable |= lanes;
    if (lanes)
        ready |= 1u << w->number;
}

/* All threads wait or have ended, and not all have ended. Says who is not where the others are. */
[[noreturn]] static void stuck()
{
    for (unsigned i = 0; i < n_threads; i++) {
        const simt_warp *w = threads[i].warp;
        unsigned lane = threads[i].lane;
        if (!(w->arrived >> lane & 1))
            continue;
        simt_self = &threads[i];
        uint32_t missing = w->mask[lane] & ~w->arrived;
        if (missing & w->ended)
            simt_fault("waits in %s in line %u for lanes of mask %08x, of which %08x have ended", op_names[w->where[lane] & 3], w->where[lane] >> 2, w->mask[lane],
                       missing & w->ended);
        simt_fault("waits in %s in line %u for lanes of mask %08x, of which %08x are elsewhere", op_names[w->where[lane] & 3], w->where[lane] >> 2, w->mask[lane],
                   missing);
    }
    simt_self = const_cast<simt_thread *>(barrier.first);
    simt_fault("divergent barrier: waits in line %d with %u of %u threads, the other %u have ended", barrier.line, barrier.waiting, n_threads, n_ended);
    __builtin_unreachable();
}

/* simt_self waits until something wakes it. */
__attribute__((always_inline)) static inline void wait()
{
    simt_thread *self = simt_self, *next = pick(self->warp);
    if (!next)
        stuck();
    simt_self = next;
    if (!next->fibre)
        next->fibre = fibre_take();
    switch_to(self->fibre, next->fibre);
}

/* What a fibre does: threads from their beginning to their end, one after the other. */
static void begin()
{
    simt_fibre *mine = simt_self->fibre;
    arrived(mine);
    for (;;) {
        simt_running->call(simt_running->kernel, simt_running->args.get());
        simt_thread *self = simt_self;
        self->fibre = nullptr;
        self->warp->ended |= 1u << self->lane;
        simt_thread *next = ++n_ended == n_threads ? nullptr : pick(self->warp);
        if (next && !next->fibre) {
            next->fibre = mine;
            simt_self = next;
            continue;
        }
        if (!next && n_ended < n_threads)
            stuck();
        simt_self = next;
        idle.push_back(mine);
        switch_to(mine, next ? next->fibre : &host);
    }
}

static void prepare(unsigned n)
{
    n_threads = n;
    n_ended = 0;
    ready = 0;
    simt_barriers++;
    memset(&barrier, 0, sizeof barrier);
    for (unsigned i = 0; i < n; i++) {
        simt_thread *t = &threads[i];
        t->fibre = nullptr;
        t->lane = i % SIMT_WARP;
        t->number = i;
        t->warp = &warps[i / SIMT_WARP];
        t->index = {i % simt_block_dim.x, i / simt_block_dim.x % simt_block_dim.y, i / (simt_block_dim.x * simt_block_dim.y)};
    }
    for (unsigned i = 0; i < n; i += SIMT_WARP) {
        simt_warp *w = &warps[i / SIMT_WARP];
        w->number = i / SIMT_WARP;
        w->present = n - i >= SIMT_WARP ? ~0u : (1u << (n - i)) - 1;
        w->ended = w->arrived = 0;
        wake(w, w->present);
    }
}

bool simt_runs_here()
{
    return simt_self && pthread_equal(runner, pthread_self());
}

static uint64_t gcd(uint64_t a, uint64_t b)
{
    return b ? gcd(b, a % b) : a;
}

bool simt_run(const simt_grid &grid)
{
    simt_running = &grid;
    runner = pthread_self();
    simt_grid_dim = grid.grid;
    simt_block_dim = grid.block;
    failed = false;
    const uint64_t n = (uint64_t)grid.grid.x * grid.grid.y * grid.grid.z;
    /* block number i -> step i + start modulo n: with step and n without a common divisor each comes once */
    uint64_t step = 1 + emu_random() % n, start = emu_random() % n;
    while (gcd(step, n) != 1)
        step = step % n + 1;
    for (uint64_t i = 0, number = start; i < n && !failed; i++, number = (number + step) % n) {
        simt_block = {(unsigned)(number % grid.grid.x), (unsigned)(number / grid.grid.x % grid.grid.y), (unsigned)(number / ((uint64_t)grid.grid.x * grid.grid.y))};
        simt_dynamic = simt_shared_new(grid.shared_bytes);
        backwards = emu_random() & 1;
        prepare(grid.block.x * grid.block.y * grid.block.z);
        simt_thread *first = pick(warps);
        first->fibre = fibre_take();
        simt_self = first;
        switch_to(&host, first->fibre);
        simt_self = nullptr;
        failed = failed || !simt_shared_check();
    }
    if (failed)
        rewind_all();
    else
        simt_memory_check();
    simt_running = nullptr;
    return !failed;
}

/* ---- what threads do together -------------------------------------------------------------------------------------------- */

unsigned simt_barrier(bool predicate, int line)
{
    if (!barrier.waiting) {
        barrier.line = line;
        barrier.first = simt_self;
    } else if (barrier.line != line) {
        simt_fault("divergent barrier: waits in line %d, and others in line %d", line, barrier.line);
    }
    barrier.count += predicate;
    if (++barrier.waiting < n_threads) {
        wait();
        return barrier.result;
    }
    barrier.result = barrier.count;
    barrier.waiting = barrier.count = 0;
    simt_barriers++;
    for (unsigned i = 0; i * SIMT_WARP < n_threads; i++)
        wake(&warps[i], warps[i].present & ~(&warps[i] == simt_self->warp ? 1u << simt_self->lane : 0));
    return barrier.result;
}

/* simt_self comes to an operation of the lanes of mask; true: as the last one. */
static inline bool arrive(simt_warp *w, unsigned mask, uint32_t where)
{
    unsigned lane = simt_self->lane;
    if (!(mask >> lane & 1))
        simt_fault("is not in the mask %08x of %s in line %u", mask, op_names[where & 3], where >> 2);
    if (mask & ~w->present)
        simt_fault("comes to %s in line %u with mask %08x, but the warp has only %08x", op_names[where & 3], where >> 2, mask, w->present);
    w->mask[lane] = mask;
    w->where[lane] = where;
    w->arrived |= 1u << lane;
    return (w->arrived & mask) == mask;
}

/* All have come: that they came to the same. */
static inline void complete(simt_warp *w, unsigned mask, uint32_t where)
{
    uint32_t differ = 0;
    if (mask == ~0u)
        for (unsigned i = 0; i < SIMT_WARP; i++)
            differ |= (w->mask[i] ^ mask) | (w->where[i] ^ where);
    else
        differ = 1;
    for (uint32_t left = differ ? mask : 0; left; left &= left - 1) {
        unsigned i = (unsigned)__builtin_ctz(left);
        if (w->mask[i] != mask || w->where[i] != where)
            simt_fault("comes to %s in line %u with mask %08x, and lane %u to %s in line %u with mask %08x", op_names[where & 3], where >> 2, mask, i,
                       op_names[w->where[i] & 3], w->where[i] >> 2, w->mask[i]);
    }
    w->arrived &= ~mask;
    wake(w, mask & ~(1u << simt_self->lane));
}

/* Not in line: what is done 32 times as often is shorter then. */
__attribute__((noinline)) static void finish_shuffle(simt_warp *w, unsigned mask, int line)
{
    complete(w, mask, (uint32_t)line * 4 + OP_SHUFFLE);
    for (uint32_t left = mask; left; left &= left - 1) {
        unsigned i = (unsigned)__builtin_ctz(left);
        if (!(mask >> w->source[i] & 1))
            simt_fault("shuffle in line %d: lane %u reads lane %u, which is not in the mask %08x", line, i, w->source[i], mask);
        w->result[i] = w->value[w->source[i]];
    }
}

uint64_t simt_shuffle(unsigned mask, uint64_t value, unsigned source, int line)
{
    simt_warp *w = simt_self->warp;
    unsigned lane = simt_self->lane;
    w->value[lane] = value;
    w->source[lane] = source;
    if (arrive(w, mask, (uint32_t)line * 4 + OP_SHUFFLE))
        finish_shuffle(w, mask, line);
    else
        wait();
    return w->result[lane];
}

unsigned simt_ballot(unsigned mask, bool predicate, int line)
{
    simt_warp *w = simt_self->warp;
    unsigned lane = simt_self->lane;
    w->value[lane] = predicate;
    if (arrive(w, mask, (uint32_t)line * 4 + OP_BALLOT)) {
        complete(w, mask, (uint32_t)line * 4 + OP_BALLOT);
        uint32_t votes = 0;
        for (unsigned i = 0; i < SIMT_WARP; i++)
            if (mask >> i & 1)
                votes |= (uint32_t)w->value[i] << i;
        for (unsigned i = 0; i < SIMT_WARP; i++)
            if (mask >> i & 1)
                w->result[i] = votes;
    } else {
        wait();
    }
    return (unsigned)w->result[lane];
}

void simt_warp_sync(unsigned mask, int line)
{
    simt_warp *w = simt_self->warp;
    if (arrive(w, mask, (uint32_t)line * 4 + OP_SYNC)) {
        complete(w, mask, (uint32_t)line * 4 + OP_SYNC);
        w->syncs++;
    } else {
        wait();
    }
}

uint32_t simt_warp_syncs()
{
    return simt_self->warp->syncs;
}

void simt_warp_work(void *mine, void (*work)(void *const *of_lanes), bool orders, int line)
{
    simt_warp *w = simt_self->warp;
    w->value[simt_self->lane] = (uint64_t)(uintptr_t)mine;
    if (arrive(w, ~0u, (uint32_t)line * 4 + OP_WORK)) {
        complete(w, ~0u, (uint32_t)line * 4 + OP_WORK);
        void *of_lanes[SIMT_WARP];
        for (int i = 0; i < SIMT_WARP; i++)
            of_lanes[i] = (void *)(uintptr_t)w->value[i];
        w->syncs += orders;
        work(of_lanes);
        w->syncs += orders;
    } else {
        wait();
    }
}

/* ---- faults -------------------------------------------------------------------------------------------------------------- */

void simt_fault(const char *fmt, ...)
{
    char text[640];
    size_t n = 0;
    if (simt_running)
        n = (size_t)snprintf(text, sizeof text, "kernel %.120s, block (%u,%u,%u)", simt_running->name, simt_block.x, simt_block.y, simt_block.z);
    if (simt_running && simt_self)
        n += (size_t)snprintf(text + n, sizeof text - n, ", thread (%u,%u,%u)", simt_self->index.x, simt_self->index.y, simt_self->index.z);
    if (n)
        n += (size_t)snprintf(text + n, sizeof text - n, ": ");
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text + n, sizeof text - n, fmt, ap);
    va_end(ap);
    if (!emu_caught(text)) {
        fprintf(stderr, "emulated GPU: %s\n", text);
        abort();
    }
    if (simt_self) { /* in a kernel: back to simt_run */
        simt_fibre *from = simt_self->fibre ? simt_self->fibre : fibres[0];
        failed = true;
        leave_to(from, &host);
    }
}
