/* The emulator itself: what threads do together, by values known beforehand, and each thing that it is to find. */
#include "mma.h"
#include "emu.h"

extern "C" {
#include "support.h"
}

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static cudaStream_t stream;
static int *out;     /* pinned, which the host can read: ROOM of them */
static float *outf;  /* the same */
enum { ROOM = 1 << 16 };

static void set_up()
{
    emu_options o = emu_defaults();
    o.catch_faults = true;
    emu_reset(&o);
    ck_assert_int_eq(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ck_assert_int_eq(cudaHostAlloc((void **)&out, ROOM * sizeof *out, 0), cudaSuccess);
    outf = (float *)out;
    memset(out, 0, ROOM * sizeof *out);
}

/* Runs a kernel; the fault, or "". */
#define RUN(kernel, grid, block, shared, ...)                                                                                              \
    (simt_launch(#kernel, kernel, grid, block, shared, stream, __VA_ARGS__), cudaStreamSynchronize(stream), emu_fault())
#define RUN_WELL(...) ck_assert_str_eq(RUN(__VA_ARGS__), "")
/* The report has these words in it, and the emulation goes on after a reset. */
#define RUN_BADLY(words, ...)                                                                                                              \
    do {                                                                                                                                   \
        const char *fault_ = RUN(__VA_ARGS__);                                                                                             \
        ck_assert_msg(strstr(fault_, words) != nullptr, "'%s' does not tell of: %s", fault_, words);                                       \
        ck_assert_int_eq(cudaStreamSynchronize(stream), cudaErrorLaunchFailure);                                                           \
        set_up();                                                                                                                          \
        RUN_WELL(every_index, dim3(3, 2, 2), dim3(4, 8, 3), 0, out);                                                                       \
        memset(out, 0, ROOM * sizeof *out);                                                                                                \
    } while (0)

/* ---- values ----------------------------------------------------------------------------------------------------------------- */

static __global__ void every_index(int *to)
{
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    to[block * (blockDim.x * blockDim.y * blockDim.z) + thread]++;
}

START_TEST(each_thread_of_each_block_runs_once)
{
    RUN_WELL(every_index, dim3(5, 3, 2), dim3(7, 4, 2), 0, out);
    for (int i = 0; i < ROOM; i++)
        ck_assert_int_eq(out[i], i < 30 * 56);
}
END_TEST

static __global__ void shuffles(int *to)
{
    int lane = (int)threadIdx.x;
    int *row = to + lane * 16;
    row[0] = __shfl_sync(~0u, lane * 3, 7);
    row[1] = __shfl_sync(~0u, lane, lane + 1);
    row[2] = __shfl_sync(~0u, lane, 2, 8);
    row[3] = __shfl_up_sync(~0u, lane, 1);
    row[4] = __shfl_up_sync(~0u, lane, 3, 8);
    row[5] = __shfl_down_sync(~0u, lane, 1);
    row[6] = __shfl_down_sync(~0u, lane, 3, 8);
    row[7] = __shfl_xor_sync(~0u, lane, 16);
    row[8] = __shfl_xor_sync(~0u, lane, 9, 8);
    row[9] = __shfl_xor_sync(~0u, -1.5f - lane, 1) == -1.5f - (lane ^ 1);
    row[10] = __shfl_sync(~0u, 0x123456789abcull + lane, 31) == 0x123456789abcull + 31;
    if (lane < 16) /* half a warp, more often than the other half */
        for (int i = 0; i < 3; i++)
            row[11] += __shfl_xor_sync(0xffffu, lane, 1);
    row[12] = __shfl_xor_sync(~0u, lane, 31);
}

/* PTX ISA, shfl.sync: a lane that a source beyond its part's bounds would be read from gets its own value; xor may read an earlier part, not a later one. */
START_TEST(shuffles_move_what_cuda_says)
{
    RUN_WELL(shuffles, 1, 32, 0, out);
    for (int lane = 0; lane < 32; lane++) {
        const int *row = out + lane * 16, in8 = lane % 8, x = lane ^ 9;
        ck_assert_int_eq(row[0], 21);
        ck_assert_int_eq(row[1], (lane + 1) % 32);
        ck_assert_int_eq(row[2], lane / 8 * 8 + 2);
        ck_assert_int_eq(row[3], lane ? lane - 1 : 0);
        ck_assert_int_eq(row[4], in8 >= 3 ? lane - 3 : lane);
        ck_assert_int_eq(row[5], lane < 31 ? lane + 1 : 31);
        ck_assert_int_eq(row[6], in8 < 5 ? lane + 3 : lane);
        ck_assert_int_eq(row[7], (lane + 16) % 32);
        ck_assert_int_eq(row[8], x / 8 > lane / 8 ? lane : x);
        ck_assert_int_eq(row[9], 1);
        ck_assert_int_eq(row[10], 1);
        ck_assert_int_eq(row[11], lane < 16 ? 3 * (lane ^ 1) : 0);
        ck_assert_int_eq(row[12], 31 - lane);
    }
}
END_TEST

static __global__ void votes(int *to)
{
    int i = (int)threadIdx.x, *row = to + i * 8;
    row[0] = (int)__ballot_sync(~0u, i % 3 == 0);
    row[1] = __any_sync(~0u, i == 33);
    row[2] = __all_sync(~0u, i >= 32);
    row[3] = __syncthreads_count(i % 5 == 0);
    row[4] = __syncthreads_or(i == 63) * 2 + __syncthreads_or(i == 64);
    row[5] = __syncthreads_and(i < 64) * 2 + __syncthreads_and(i < 63);
}

START_TEST(votes_count)
{
    RUN_WELL(votes, 1, 64, 0, out);
    for (int i = 0; i < 64; i++) {
        const int *row = out + i * 8;
        ck_assert_uint_eq((unsigned)row[0], i < 32 ? 0x49249249u : 0x92492492u); /* 0, 3, .. 30; 33, 36, .. 63 */
        ck_assert_int_eq(row[1], i >= 32);
        ck_assert_int_eq(row[2], i >= 32);
        ck_assert_int_eq(row[3], 13);
        ck_assert_int_eq(row[4], 2);
        ck_assert_int_eq(row[5], 2);
    }
}
END_TEST

static __global__ void atomics(int *to)
{
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    atomicAdd(&to[0], i);
    atomicMax(&to[1], i);
    atomicAdd((float *)&to[2], 0.5f);
    while (atomicCAS(&to[3], 0, 1) != 0) /* a lock */
        ;
    to[4] += 1;
    atomicExch(&to[3], 0);
    atomicMin(&to[5], -i);
    atomicOr(&to[6], 1 << i % 8);
}

START_TEST(atomics_add_up)
{
    RUN_WELL(atomics, 10, 100, 0, out);
    ck_assert_int_eq(out[0], 999 * 1000 / 2);
    ck_assert_int_eq(out[1], 999);
    ck_assert(outf[2] == 500.0f);
    ck_assert_int_eq(out[4], 1000);
    ck_assert_int_eq(out[5], -999);
    ck_assert_int_eq(out[6], 255);
}
END_TEST

START_TEST(integers_by_bytes)
{
    ck_assert_int_eq(__dp4a((int)0x80ff017f, (int)0x7f02ff01, 10), 10 + 127 * 1 + 1 * -1 + -1 * 2 + -128 * 127);
    ck_assert_uint_eq(__dp4a(0x80ff017fu, 0x7f02ff01u, 10u), 10u + 127 * 1 + 1 * 255 + 255 * 2 + 128 * 127);
    ck_assert_uint_eq(__byte_perm(0x33221100, 0x77665544, 0x7610), 0x77661100);
    ck_assert_uint_eq(__byte_perm(0x00008000, 0, 0x9889), 0xff0000ff);
    ck_assert_uint_eq(__vsub4(0x05000180, 0x01010101), 0x04ff007f);
    ck_assert_uint_eq(__vadd4(0x05ff01ff, 0x01010102), 0x06000201);
    ck_assert_uint_eq(__funnelshift_r(0x89abcdef, 0x01234567, 8), 0x6789abcd);
    ck_assert_uint_eq(__funnelshift_l(0x89abcdef, 0x01234567, 8), 0x23456789);
    ck_assert_int_eq(__float2int_rn(2.5f), 2);
    ck_assert_int_eq(__float2int_rn(-3.5f), -4);
}
END_TEST

/* IEEE 754: what 16 bits with so many of fraction are worth. */
static double worth(unsigned bits, int fraction_bits, int bias)
{
    int exponent = (int)(bits & 0x7fff) >> fraction_bits, fraction = (int)bits & ((1 << fraction_bits) - 1);
    double v = exponent ? ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits) : ldexp(fraction, 1 - bias - fraction_bits);
    return bits & 0x8000 ? -v : v;
}

/* Each finite number, the middle between it and the next, and both float32 beside the middle: to nearest, in the middle to even. */
static void check_rounding(int fraction_bits, int bias, unsigned (*round)(float), float (*value)(unsigned))
{
    unsigned inf = 0x7fff & ~((1u << fraction_bits) - 1);
    for (unsigned sign = 0; sign <= 0x8000; sign += 0x8000)
        for (unsigned h = 0; h < inf; h++) {
            double at = worth(sign | h, fraction_bits, bias), next = worth(sign | (h + 1), fraction_bits, bias); /* behind the last: as if there were one more */
            float middle = (float)((at + next) / 2);
            ck_assert(value(sign | h) == at);
            ck_assert_uint_eq(round((float)at), sign | h);
            ck_assert_uint_eq(round(middle), sign | (h + (h & 1)));
            ck_assert_uint_eq(round(nextafterf(middle, (float)at)), sign | h);
            ck_assert_uint_eq(round(nextafterf(middle, sign ? -INFINITY : INFINITY)), sign | (h + 1));
        }
    ck_assert_uint_eq(round(INFINITY), inf);
    ck_assert_uint_eq(round(-INFINITY), inf | 0x8000);
    ck_assert_uint_gt(round(NAN) & 0x7fff, inf);
    ck_assert(isnan(value(inf + 1)) && isinf(value(inf)));
}

START_TEST(halves_are_rounded_to_even)
{
    check_rounding(10, 15, [](float x) { return (unsigned)__half_as_ushort(__float2half_rn(x)); },
                   [](unsigned x) { return __half2float(__ushort_as_half((unsigned short)x)); });
    check_rounding(7, 127, [](float x) { return (unsigned)__bfloat16_as_ushort(__float2bfloat16_rn(x)); },
                   [](unsigned x) { return __bfloat162float(__ushort_as_bfloat16((unsigned short)x)); });
}
END_TEST

/* ---- tiles -------------------------------------------------------------------------------------------------------------------- */

using namespace nvcuda;

template <class T, class LayoutA, class LayoutB> static __global__ void multiply_tile(float *to, const T *a, const T *b, const float *c)
{
    wmma::fragment<wmma::matrix_a, 16, 16, 16, T, LayoutA> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, T, LayoutB> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::load_matrix_sync(fa, a, 24);
    wmma::load_matrix_sync(fb, b, 16);
    wmma::load_matrix_sync(fc, c, 16, wmma::mem_row_major);
    wmma::mma_sync(fc, fa, fb, fc);
    for (int i = 0; i < fc.num_elements; i++)
        fc.x[i] *= 2;
    wmma::store_matrix_sync(to, fc, 20, wmma::mem_col_major);
}

template <class T, class LayoutA, class LayoutB> static void check_tile()
{
    T *a, *b;
    float *c;
    cudaHostAlloc((void **)&a, 16 * 24 * sizeof *a, 0);
    cudaHostAlloc((void **)&b, 16 * 16 * sizeof *b, 0);
    cudaHostAlloc((void **)&c, 16 * 16 * sizeof *c, 0);
    bool rows_a = std::is_same_v<LayoutA, wmma::row_major>, rows_b = std::is_same_v<LayoutB, wmma::row_major>;
    t_rng rng = t_seed(8);
    int va[16][16], vb[16][16], vc[16][16]; /* small integers: exact in each type */
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            va[i][j] = (int)(t_u64(&rng) % 255) - 127;
            vb[i][j] = (int)(t_u64(&rng) % 255) - 127;
            vc[i][j] = (int)(t_u64(&rng) % 2001) - 1000;
            a[rows_a ? i * 24 + j : j * 24 + i] = T((float)va[i][j]);
            b[rows_b ? i * 16 + j : j * 16 + i] = T((float)vb[i][j]);
            c[i * 16 + j] = (float)vc[i][j];
        }
    memset(out, 0, 16 * 20 * sizeof *out);
    RUN_WELL((multiply_tile<T, LayoutA, LayoutB>), 1, 32, 0, outf, a, b, c);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) {
            int sum = vc[i][j];
            for (int k = 0; k < 16; k++)
                sum += va[i][k] * vb[k][j];
            ck_assert(outf[j * 20 + i] == 2.0f * (float)sum);
        }
}

START_TEST(tiles_are_multiplied)
{
    check_tile<__half, wmma::row_major, wmma::row_major>();
    check_tile<__half, wmma::row_major, wmma::col_major>();
    check_tile<__half, wmma::col_major, wmma::row_major>();
    check_tile<__nv_bfloat16, wmma::col_major, wmma::col_major>();
    check_tile<__nv_bfloat16, wmma::row_major, wmma::col_major>();
}
END_TEST

/* ---- what is found -------------------------------------------------------------------------------------------------------------- */

static __global__ void barrier_for_some(int *to)
{
    if (threadIdx.x < 40)
        __syncthreads();
    to[threadIdx.x] = 1;
}

static __global__ void barrier_of_each_branch(int *to)
{
    if (threadIdx.x % 2) {
        __syncthreads();
        to[0] = 1;
    } else {
        __syncthreads();
    }
}

START_TEST(divergent_barriers_are_found)
{
    RUN_BADLY("thread (", barrier_for_some, 4, 64, 0, out);
    RUN_BADLY("divergent barrier", barrier_for_some, 4, 64, 0, out);
    RUN_BADLY("40 of 64 threads, the other 24 have ended", barrier_for_some, 4, 64, 0, out);
    RUN_BADLY("divergent barrier", barrier_of_each_branch, 1, 64, 0, out);
    RUN_WELL(barrier_for_some, 4, 40, 0, out);
}
END_TEST

static __global__ void lanes_missing(int *to, int how)
{
    int lane = (int)threadIdx.x % 32;
    if (how == 0 && lane == 5)
        return;
    if (how == 1 && lane == 6)
        __syncthreads();
    if (how == 2)
        to[lane] = __shfl_sync(0xffffu, lane, 0);                      /* lanes 16.. are not in it */
    else if (how == 3 && lane < 16)
        to[lane] = __shfl_sync(0xffffu, lane, 20);                     /* reads what takes no part */
    else if (how == 4)
        to[lane] = __shfl_sync(lane == 3 ? 0x7fffffffu : ~0u, lane, 0); /* masks that differ */
    else if (how == 5 && lane == 7)
        __syncwarp();                                                  /* elsewhere than the others */
    else if (how != 3)
        to[lane] = (int)__ballot_sync(~0u, 1);
}

START_TEST(missing_lanes_are_found)
{
    RUN_BADLY("a vote in line", lanes_missing, 1, 64, 0, out, 0);
    RUN_BADLY("of which 00000020 have ended", lanes_missing, 1, 64, 0, out, 0);
    RUN_BADLY("of which 00000040 are elsewhere", lanes_missing, 1, 64, 0, out, 1);
    RUN_BADLY("is not in the mask 0000ffff of a shuffle", lanes_missing, 1, 32, 0, out, 2);
    RUN_BADLY("reads lane 20, which is not in the mask", lanes_missing, 1, 32, 0, out, 3);
    RUN_BADLY("with mask", lanes_missing, 1, 32, 0, out, 4);
    RUN_BADLY("__syncwarp", lanes_missing, 1, 32, 0, out, 5);
    RUN_BADLY("but the warp has only 000fffff", lanes_missing, 1, 20, 0, out, 6);
    RUN_WELL(lanes_missing, 1, 64, 0, out, 6);
}
END_TEST

static __global__ void touch(int *p, long at, bool write)
{
    if (blockIdx.x == 2 && threadIdx.x == 9) {
        if (write)
            p[at] = 1;
        else
            *(volatile int *)p = *(volatile int *)(p + at);
    }
}

/* Ends the process as a finding under the address sanitizer does: what it prints has these words. */
template <class F> static void dies(const char *words, F f)
{
    int ends[2];
    fflush(nullptr);
    ck_assert_int_eq(pipe(ends), 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        f();
        _exit(0);
    }
    close(ends[1]);
    char text[8192];
    size_t n = 0;
    for (ssize_t r; (r = read(ends[0], text + n, sizeof text - 1 - n)) > 0;)
        n += (size_t)r;
    text[n] = 0;
    close(ends[0]);
    int status;
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_msg(status != 0, "it goes well");
    ck_assert_msg(strstr(text, words) != nullptr, "'%s' does not tell of: %s", text, words);
}

static int *device_ints(size_t n)
{
    int *p;
    ck_assert_int_eq(cudaMalloc(&p, n * sizeof *p), cudaSuccess);
    return p;
}

/* Allocations of whole pages end where a fault is; of others, the last few bytes up to there are looked at by the sanitizer or after the kernel. */
START_TEST(global_memory_has_bounds)
{
    RUN_BADLY("kernel touch, block (2,0,0), thread (9,0,0): touches", touch, 4, 32, 0, device_ints(1024), 1024, false);
    RUN_BADLY("0 bytes behind an allocation of 4096 bytes of device memory", touch, 4, 32, 0, device_ints(1024), 1024, true);
    RUN_BADLY("4 bytes before an allocation of 4096", touch, 4, 32, 0, device_ints(1024), -1, false);
    RUN_WELL(touch, 4, 32, 0, device_ints(1024), 1023, true);
    RUN_WELL(touch, 4, 32, 0, device_ints(1000), 999, true);
#ifdef __SANITIZE_ADDRESS__
    dies("AddressSanitizer", [] { RUN(touch, 4, 32, 0, device_ints(1001), 1001, true); });
    dies("AddressSanitizer", [] { RUN(touch, 4, 32, 0, device_ints(1001), 1001, false); });
#else
    RUN_BADLY("0 bytes behind an allocation of 4004", touch, 4, 32, 0, device_ints(1001), 1001, true);
#endif
    int *p = device_ints(1024);
    cudaFree(p);
    RUN_BADLY("device memory that is not allocated, or no more", touch, 4, 32, 0, p, 0, false);
    int here = 0;
    RUN_BADLY("pageable memory of the host", touch, 4, 32, 0, &here, 0, false);
}
END_TEST

static __global__ void shared_at(int *to, int at, bool write)
{
    __shared__ int fixed[3];
    GPU_SHARED(int, sized);
    int *p = at >= 1000 ? fixed + (at - 1000) : sized + at;
    if (threadIdx.x == 1 && write)
        *(volatile int *)p = 1;
    else if (threadIdx.x == 1)
        to[0] = *(volatile int *)p;
}

START_TEST(shared_memory_has_bounds)
{
    RUN_WELL(shared_at, 2, 2, 128, out, 31, true);
    RUN_WELL(shared_at, 2, 2, 128, out, 1002, true);
    RUN_BADLY("outside of the block's shared memory", shared_at, 2, 2, 128, out, 32, true);
    RUN_BADLY("outside of the block's shared memory", shared_at, 2, 2, 128, out, 32, false);
    RUN_BADLY("outside of the block's shared memory", shared_at, 2, 2, 0, out, 0, false);
#ifdef __SANITIZE_ADDRESS__
    dies("AddressSanitizer", [] { RUN(shared_at, 2, 2, 100, out, 25, false); });
    dies("AddressSanitizer", [] { RUN(shared_at, 2, 2, 100, out, 1003, true); });
#else
    RUN_BADLY("0 bytes behind the block's shared memory", shared_at, 2, 2, 100, out, 25, true);
#endif
}
END_TEST

template <int N> static __global__ void shared_unset(float *to)
{
    __shared__ float fixed[N];
    GPU_SHARED(float, sized);
    to[blockIdx.x * 64 + threadIdx.x] = fixed[threadIdx.x];
    to[1024 + blockIdx.x * 64 + threadIdx.x] = sized[threadIdx.x];
    __syncthreads();
    fixed[threadIdx.x] = sized[threadIdx.x] = 1;
}

START_TEST(shared_memory_is_garbage_at_first)
{
    RUN_WELL(shared_unset<64>, 16, 64, 256, outf);
    for (int i = 0; i < 2048; i++)
        ck_assert_msg(isnan(outf[i]), "%d: %g", i, (double)outf[i]);
}
END_TEST

static __global__ void without_barrier(int *to, bool forth)
{
    __shared__ int x[64];
    x[threadIdx.x] = (int)threadIdx.x;
    to[threadIdx.x] = x[forth ? (threadIdx.x + 1) % 64 : (threadIdx.x + 63) % 64];
}

/* Threads come in an order that the seed gives, so what lacks a barrier is right for some seeds at most. */
START_TEST(a_missing_barrier_shows_for_some_seed)
{
    for (int forth = 0; forth < 2; forth++) {
        int right = 0;
        for (uint64_t seed = 1; seed <= 16; seed++) {
            emu_options o = emu_defaults();
            o.seed = seed;
            emu_reset(&o);
            cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
            cudaHostAlloc((void **)&out, 64 * sizeof *out, 0);
            RUN_WELL(without_barrier, 1, 64, 0, out, forth);
            right += out[10] == (forth ? 11 : 9);
        }
        ck_assert_int_gt(right, 0);
        ck_assert_int_lt(right, 16);
    }
}
END_TEST

START_TEST(launches_have_limits)
{
    cudaFuncSetAttribute(every_index, cudaFuncAttributeMaxDynamicSharedMemorySize, 0);
    RUN_BADLY("(1025,1,1) threads", every_index, 1, 1025, 0, out);
    RUN_BADLY("(32,32,2) threads", every_index, 1, dim3(32, 32, 2), 0, out);
    RUN_BADLY("(0,1,1) blocks", every_index, 0, 32, 0, out);
    RUN_BADLY("(1,65536,1) blocks", every_index, dim3(1, 65536), 1, 0, out);
    RUN_BADLY("49153 bytes of shared memory, and 49152 is the most", every_index, 1, 32, 48 * 1024 + 1, out);
    RUN_WELL(every_index, 1, 1024, 48 * 1024, out);
    ck_assert_int_eq(cudaFuncSetAttribute(shared_at, cudaFuncAttributeMaxDynamicSharedMemorySize, 163 * 1024 + 1), cudaErrorInvalidValue);
    ck_assert_int_eq(cudaFuncSetAttribute(shared_at, cudaFuncAttributeMaxDynamicSharedMemorySize, 163 * 1024), cudaSuccess);
    RUN_WELL(shared_at, 1, 32, 163 * 1024, out, 3, true);
}
END_TEST

START_TEST(without_a_catch_it_aborts)
{
    dies("kernel barrier_for_some, block (0,0,0), thread (", [] {
        emu_reset(nullptr);
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
        cudaHostAlloc((void **)&out, 64 * sizeof *out, 0);
        RUN(barrier_for_some, 1, 64, 0, out);
    });
    dies("the host touches", [] { out[0] = *(volatile int *)device_ints(16); });
    dies("12 bytes into an allocation of 64 bytes of device memory", [] { *(volatile int *)(device_ints(16) + 3) = 1; });
}
END_TEST

int main()
{
    Suite *s = suite_create("simt");
    TCase *t = tcase_create("emulator");
    tcase_add_checked_fixture(t, set_up, nullptr);
    tcase_add_test(t, each_thread_of_each_block_runs_once);
    tcase_add_test(t, shuffles_move_what_cuda_says);
    tcase_add_test(t, votes_count);
    tcase_add_test(t, atomics_add_up);
    tcase_add_test(t, integers_by_bytes);
    tcase_add_test(t, halves_are_rounded_to_even);
    tcase_add_test(t, tiles_are_multiplied);
    tcase_add_test(t, divergent_barriers_are_found);
    tcase_add_test(t, missing_lanes_are_found);
    tcase_add_test(t, global_memory_has_bounds);
    tcase_add_test(t, shared_memory_has_bounds);
    tcase_add_test(t, shared_memory_is_garbage_at_first);
    tcase_add_test(t, a_missing_barrier_shows_for_some_seed);
    tcase_add_test(t, launches_have_limits);
    tcase_add_test(t, without_a_catch_it_aborts);
    suite_add_tcase(s, t);
    return t_run(s);
}
