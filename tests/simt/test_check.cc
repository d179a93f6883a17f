/* What check.cc is to find in kernels, and what it is to leave alone. */
#include "mma.h"
#include "emu.h"

extern "C" {
#include "support.h"
}

#include <stdlib.h>

enum { N = 64 };
static cudaStream_t stream;
static int *out; /* N */

static void set_up(uint64_t seed)
{
    emu_options o = emu_defaults();
    o.catch_faults = true;
    o.seed = seed;
    emu_reset(&o);
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaMalloc(&out, N * sizeof *out);
    ck_assert_int_eq(cudaGetLastError(), cudaSuccess);
}

/* Runs it with several orders of threads: the fault has these words in it, "": there is none. */
#define EACH_ORDER(words, kernel, ...)                                                                                                     \
    for (uint64_t seed_ = 1; seed_ <= 6; seed_++) {                                                                                        \
        set_up(seed_);                                                                                                                     \
        simt_launch(#kernel, kernel, 3, N, N * sizeof(int), stream, out, __VA_ARGS__);                                                     \
        cudaStreamSynchronize(stream);                                                                                                     \
        const char *fault_ = emu_fault();                                                                                                  \
        ck_assert_msg(*(words) ? strstr(fault_, words) != nullptr : !*fault_, "'%s' does not tell of: %s", fault_, words);                 \
    }

enum { NONE, LANES, SHUFFLE, BLOCK };

static __device__ void order(int how)
{
    if (how == LANES)
        __syncwarp();
    else if (how == SHUFFLE)
        __shfl_sync(~0u, 1, 0);
    else if (how == BLOCK)
        __syncthreads();
}

/* What a thread wrote, its neighbour `by` away reads; and then the other way round. */
static __global__ void hand_over(int *to, int first, int then, unsigned by)
{
    GPU_SHARED(int, x);
    __shared__ int y[N];
    unsigned i = threadIdx.x;
    x[i] = (int)i;
    order(first);
    to[i] = x[i ^ by];
    y[i] = to[i];
    order(then);
    x[i] = 1;
    to[i] += y[i];
}

START_TEST(races_are_found)
{
    EACH_ORDER("", hand_over, BLOCK, BLOCK, 1u);
    EACH_ORDER("", hand_over, BLOCK, BLOCK, 32u);
    EACH_ORDER("", hand_over, NONE, NONE, 0u);
    EACH_ORDER("", hand_over, LANES, LANES, 1u);
    EACH_ORDER("race: ", hand_over, LANES, BLOCK, 32u);  /* of another warp */
    EACH_ORDER("race: ", hand_over, BLOCK, LANES, 32u);
    EACH_ORDER("race: ", hand_over, NONE, BLOCK, 1u);
    EACH_ORDER("of 256 bytes of shared memory", hand_over, SHUFFLE, BLOCK, 1u);
    EACH_ORDER("without a barrier between", hand_over, BLOCK, NONE, 1u);
    EACH_ORDER("", hand_over, BLOCK, LANES, 1u);
}
END_TEST

static __global__ void one_for_all(int *to, int writers, int readers, bool again)
{
    GPU_SHARED(int, x);
    int i = (int)threadIdx.x;
    if (i < writers)
        x[0] = 5;
    __syncthreads();
    if (i < readers)
        to[i] = x[0];
    if (again && i == 3)
        x[0] = 6;
    __syncthreads();
    atomicAdd(&x[0], 1); /* these may meet */
    __syncthreads();
    if (i == 0)
        to[0] = x[0];
}

START_TEST(many_may_read_and_one_may_write)
{
    EACH_ORDER("", one_for_all, 1, N, false);
    EACH_ORDER("race: writes byte 0 of 256 bytes of shared memory, which thread ", one_for_all, 2, N, false);
    EACH_ORDER("of the block wrote, without", one_for_all, 2, N, false);
    EACH_ORDER("race: ", one_for_all, 1, N, true);
    EACH_ORDER("race: ", one_for_all, 1, 1, true);
    EACH_ORDER("", one_for_all, 1, 0, true);
}
END_TEST

struct within {
    int *p;
    int at;
    bool write;
};

static __device__ const int table[4] = {3, 1, 4, 1};

static __global__ void touch(int *to, within w)
{
    __shared__ int fixed[5];
    int *p = w.p ? w.p : fixed;
    if (threadIdx.x != 7)
        return;
    if (w.write)
        p[w.at] = 1;
    else
        to[0] = p[w.at] + table[w.at & 3];
}

START_TEST(only_the_device_has_memory)
{
    int here[N] = {}, *there = (int *)calloc(N, sizeof *there), *pinned, *odd;
    for (bool write : {false, true}) {
        EACH_ORDER("", touch, (within{out, N - 1, write}));
        EACH_ORDER("which is no memory of the device", touch, (within{here, 1, write}));
        EACH_ORDER(write ? "writes 4 bytes" : "reads 4 bytes", touch, (within{there, 1, write}));
        EACH_ORDER("", touch, (within{nullptr, 4, write}));
        EACH_ORDER("kernel touch, block (", touch, (within{nullptr, 5, write}));
        set_up(1);
        cudaMalloc(&odd, 5 * sizeof *odd); /* whose last 236 bytes of 256 are nobody's */
        cudaHostAlloc((void **)&pinned, 5 * sizeof *pinned, 0);
        simt_launch("touch", touch, 1, N, 0, stream, out, within{odd, 4, write});
        simt_launch("touch", touch, 1, N, 0, stream, out, within{pinned, 4, write});
        cudaStreamSynchronize(stream);
        ck_assert_str_eq(emu_fault(), "");
        simt_launch("touch", touch, 1, N, 0, stream, out, within{write ? odd : pinned, 5, write});
        cudaStreamSynchronize(stream);
        ck_assert_msg(strstr(emu_fault(), "0 bytes behind an allocation of 20 bytes of ") != nullptr, "'%s'", emu_fault());
    }
    EACH_ORDER("which is no memory of the device", touch, (within{const_cast<int *>(table), 0, true}));
    free(there);
}
END_TEST

static __global__ void tiles(int *to, bool)
{
    __shared__ __align__(32) float x[256];
    using namespace nvcuda::wmma;
    fragment<accumulator, 16, 16, 16, float> f;
    if (threadIdx.x >= 32)
        return;
    fill_fragment(f, 2.0f);
    store_matrix_sync(x, f, 16, mem_row_major);
    to[threadIdx.x] = (int)x[255 - threadIdx.x];
}

START_TEST(tiles_are_in_order)
{
    EACH_ORDER("", tiles, true);
}
END_TEST

int main()
{
    Suite *s = suite_create("check");
    TCase *t = tcase_create("check");
    tcase_add_test(t, races_are_found);
    tcase_add_test(t, many_may_read_and_one_may_write);
    tcase_add_test(t, only_the_device_has_memory);
    tcase_add_test(t, tiles_are_in_order);
    suite_add_tcase(s, t);
    return t_run(s);
}
