/* Looks at each access that a kernel makes: that it lies in memory which a device has, and that no two threads of a block come to the same byte of shared memory,
 * one of them to write, without a barrier between them.
 *
 * The compiler calls these functions before accesses in what is compiled with -fsanitize=thread, which is all that is used of that sanitizer. Threads do not run
 * at the same time here, but what they did since the last barrier is kept, so a race is found in each order. A block's barrier puts all in order, __syncwarp what
 * the lanes of a warp do; shuffles and votes do not (CUDA C++ Programming Guide, "Warp Shuffle Functions"). Not looked at: races in global memory; arguments
 * of calls that are structures in memory (so as much as can be is inlined); copies that become a call of memcpy.
 */
#include "simt.h"

#include <vector>

extern "C" char __executable_start, __data_start; /* between them: code and what is constant */

/* What threadIdx and the like read. */
static const struct {
    const void *p;
    size_t n;
} built_in[] = {{&simt_self, sizeof simt_self}, {&simt_block, sizeof simt_block}, {&simt_grid_dim, sizeof simt_grid_dim}, {&simt_block_dim, sizeof simt_block_dim},
                {&simt_dynamic, sizeof simt_dynamic}};

/* Who did something last, and after how much order: mine now when nothing has come between. */
struct mark {
    uint32_t barriers, syncs;
    uint16_t thread;
    uint16_t others; /* of reads: 0 none; 1 threads of the same warp, too; 2 of other warps */
};
struct byte_marks {
    mark written, read;
};
static std::vector<byte_marks> &marks = *new std::vector<byte_marks>();
static simt_place last = {0, 0, -1}; /* the allocation that was touched last */

static bool same_warp(unsigned a, unsigned b)
{
    return a / SIMT_WARP == b / SIMT_WARP;
}

/* Whether a thread other than me did it, and nothing stands between that and now. */
static bool unordered(const mark &m, unsigned me, uint32_t syncs)
{
    if (m.barriers != simt_barriers)
        return false;
    if (m.others == 2 || !same_warp(m.thread, me))
        return true;
    return m.syncs == syncs && (m.others || m.thread != me);
}

static void shared_access(const void *p, const simt_place &at, size_t n, bool write)
{
    unsigned me = simt_self->number;
    uint32_t syncs = simt_warp_syncs();
    if (marks.size() < (size_t)at.byte + n)
        marks.resize((size_t)at.byte + n + 4096);
    for (size_t i = 0; i < n; i++) {
        byte_marks &b = marks[(size_t)at.byte + i];
        const mark *other = unordered(b.written, me, syncs) ? &b.written : write && unordered(b.read, me, syncs) ? &b.read : nullptr;
        if (other)
            simt_fault("race: %s byte %zu of %zu bytes of shared memory, which thread %u of the block %s, without a barrier between", write ? "writes" : "reads",
                       (size_t)((uintptr_t)p + i - at.begin), (size_t)(at.end - at.begin), other->thread, other == &b.written ? "wrote" : "read");
        if (write) {
            b.written = {simt_barriers, syncs, (uint16_t)me, 0};
            continue;
        }
        mark &r = b.read;
        if (r.barriers != simt_barriers || (r.others < 2 && same_warp(r.thread, me) && r.syncs != syncs))
            r = {simt_barriers, syncs, (uint16_t)me, 0};
        else if (!same_warp(r.thread, me))
            r.others = 2;
        else if (r.thread != me && !r.others)
            r.others = 1;
    }
}

/* What is no memory of a device, but what kernels read all the same: their arguments, constants, threadIdx. */
static bool readable(uintptr_t a, size_t n)
{
    const uintptr_t args = (uintptr_t)simt_running->args.get(), self = (uintptr_t)simt_self;
    if ((a >= self && a + n <= self + sizeof *simt_self) || (a >= args && a + n <= args + simt_running->args_bytes))
        return true;
    for (auto &x : built_in)
        if (a >= (uintptr_t)x.p && a + n <= (uintptr_t)x.p + x.n)
            return true;
    return a >= (uintptr_t)&__executable_start && a + n <= (uintptr_t)&__data_start;
}

__attribute__((always_inline)) static inline void look(const void *p, size_t n, bool write)
{
    if (!simt_self) /* the host's part of a .cu file */
        return;
    uintptr_t a = (uintptr_t)p, stack = (uintptr_t)__builtin_frame_address(0);
    if (a - stack < (uintptr_t)1 << 20) /* this thread's own */
        return;
    if (last.byte < 0 && a >= last.begin && a + n <= last.end)
        return;
    if (!write && readable(a, n))
        return;
    if (!simt_memory_place(p, &last) || a + n > last.end) {
        last = {0, 0, -1};
        const char *told = simt_memory_tell(p);
        simt_fault("%s %zu bytes at %p, which is %s", write ? "writes" : "reads", n, p, told ? told : "no memory of the device");
    } else if (last.byte >= 0) {
        shared_access(p, last, n, write);
    }
}

#define ACCESS(n)                                                                                                                          \
    extern "C" void __tsan_read##n(void *p) { look(p, n, false); }                                                                         \
    extern "C" void __tsan_write##n(void *p) { look(p, n, true); }                                                                         \
    extern "C" void __tsan_unaligned_read##n(void *p) { look(p, n, false); }                                                               \
    extern "C" void __tsan_unaligned_write##n(void *p) { look(p, n, true); }                                                               \
    extern "C" void __tsan_volatile_read##n(void *p) { look(p, n, false); }                                                                \
    extern "C" void __tsan_volatile_write##n(void *p) { look(p, n, true); }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
extern "C" void __tsan_read_range(void *p, size_t n) { look(p, n, false); }
extern "C" void __tsan_write_range(void *p, size_t n) { look(p, n, true); }
extern "C" void __tsan_vptr_update(void *, void *) {}
extern "C" void __tsan_vptr_read(void *) {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit(void *) {}
extern "C" void __tsan_init() {}
extern "C" unsigned __tsan_atomic32_fetch_add(unsigned *p, unsigned v, int) { return __atomic_fetch_add(p, v, __ATOMIC_SEQ_CST); } /* of std::shared_ptr */
