/* The SIMT emulation: what kernels that are compiled as C++ stand on. cuda_runtime.h has CUDA's names for it; tests see emu.h alone.
 *
 * A block's threads are fibres of the host thread that runs the kernel, and blocks run one after the other. A thread runs until it must wait for others (at
 * a barrier, a shuffle, a vote); then another goes on, of the same warp while it has one. A fibre that came to its end takes the next thread that has not begun,
 * so kernels without barriers are a plain loop. Which thread and which block come first is drawn from a seed: nothing may depend on it.
 */
#ifndef RETRIEVALD_SIMT_H
#define RETRIEVALD_SIMT_H

#include <functional>
#include <memory>
#include <stddef.h>
#include <stdint.h>
#include <tuple>

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct simt_fibre;
struct simt_warp;
struct simt_thread {
    uint3 index;
    unsigned lane, number;
    simt_warp *warp;
    simt_fibre *fibre; /* nullptr: has not begun, or has ended */
};
extern simt_thread *simt_self; /* nullptr outside of kernels */
extern uint3 simt_block;
extern dim3 simt_grid_dim, simt_block_dim;
extern unsigned char *simt_dynamic; /* the launch's shared memory */

/* What has put accesses in order so far: barriers of blocks, and beginnings of blocks; __syncwarp of this thread's warp. */
extern uint32_t simt_barriers;
uint32_t simt_warp_syncs(void);

/* ---- in a kernel. line: where the call stands; threads that wait for one another must stand at the same. -------------- */

/* How many threads of the block gave a predicate that is not 0. */
unsigned simt_barrier(bool predicate, int line);
/* value of lane `source`, which must be in mask. */
uint64_t simt_shuffle(unsigned mask, uint64_t value, unsigned source, int line);
unsigned simt_ballot(unsigned mask, bool predicate, int line);
void simt_warp_sync(unsigned mask, int line);
/* All 32 lanes come with something of theirs; the last one calls work(of all lanes). orders: what they did before, what it does and what they do after is in order, as by __syncwarp. */
void simt_warp_work(void *mine, void (*work)(void *const *of_lanes), bool orders, int line);

/* ---- launches --------------------------------------------------------------------------------------------------------- */

enum { SIMT_WARP = 32, SIMT_MAX_THREADS = 1024 };

struct simt_grid {
    const char *name;
    dim3 grid, block;
    size_t shared_bytes;
    const void *kernel;
    std::shared_ptr<const void> args; /* a tuple */
    size_t args_bytes;
    void (*call)(const void *kernel, const void *args); /* a thread */
};
extern const simt_grid *simt_running;
/* Runs all threads of all blocks. false: a fault, which emu.h's emu_fault describes. */
bool simt_run(const simt_grid &grid);

bool simt_runs_here(void); /* whether this host thread is in a kernel */

/* Reports what the code under test did wrong, with the thread that did it when there is one, and aborts; or, when emu_options.catch_faults, keeps the report,
 * and in a kernel ends it, so that this does not return there. */
void simt_fault(const char *fmt, ...) __attribute__((format(printf, 1, 2), cold));

/* ---- memory (memory.cc) ------------------------------------------------------------------------------------------------ */

enum simt_kind : int { SIMT_PAGEABLE, SIMT_DEVICE, SIMT_PINNED };
void *simt_memory_new(simt_kind kind, size_t bytes); /* 256-byte aligned, ends before a page that faults; filled with garbage. nullptr: no room */
bool simt_memory_free(simt_kind kind, void *p);      /* false: not one */
/* What [p, p + bytes) is. A range that begins in an allocation and goes on behind it, or lies in one that is no more, is a fault. */
simt_kind simt_memory_kind(const void *p, size_t bytes, const char *what);
size_t simt_memory_used(simt_kind kind);
void simt_memory_open(bool device); /* whether device memory can be touched now: in kernels and copies alone */
void simt_memory_check(void);       /* a fault when something was written beside an allocation, since the last check */
void simt_memory_reset(void);       /* frees all */
unsigned char *simt_shared_new(size_t bytes); /* dynamic shared memory between two pages that fault: filled with garbage, as the static one is */
bool simt_shared_check(void); /* after a block: false after a fault, when it wrote behind its shared memory */
/* The allocation, or the piece of shared memory, that an address is in. byte: of all shared memory's, that of p; -1: global memory. */
struct simt_place {
    uintptr_t begin, end;
    long byte;
};
bool simt_memory_place(const void *p, simt_place *ret);
/* Tells of an address that faulted; nullptr: not ours. */
const char *simt_memory_tell(const void *address);

#endif
