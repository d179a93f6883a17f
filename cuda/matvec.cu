/* Decode: a few weights times one vector. Weights are read once, as they lie in the file; x is read by everybody and stays in the L1 and L2 caches.
 *
 * A warp takes ROWS rows at a time, so that what it loads of x serves all of them; its lanes take the shares (blocks.cuh) of a row in turn, whose bytes lie
 * side by side. Rows of few, small matrices are cut over up to 8 warps, so that there is something to do for the whole device: how many depends on the
 * shapes alone, and so do the order of a sum and its bits.
 */
#include "blocks.cuh"

#include <assert.h>

enum { MAX_WEIGHTS = 3, THREADS = 256, WARPS = THREADS / GPU_WARP, ROWS = 2 };
enum { BUSY_WARPS = 32 }; /* of a multiprocessor: enough loads are under way then */

/* 64 registers let so many warps in. ptxas comes to these by itself, but from sm_90 on it takes more unless told; told for sm_80, it spills. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define MATVEC_BOUNDS __launch_bounds__(THREADS, BUSY_WARPS / WARPS)
#else
#define MATVEC_BOUNDS __launch_bounds__(THREADS)
#endif

/* ---- x in 8 bits ---------------------------------------------------------------------------------------------------- */

/* As eng_kernels.quantize_q8, a warp for each block of 32. Products and sums are rounded one by one, as there; NaN gives code 0. */
static __global__ void quantize_q8(int8_t *q, gpu_act *act, const float *x, uint32_t n_blocks)
{
    unsigned block = blockIdx.x * WARPS + threadIdx.x / GPU_WARP, lane = threadIdx.x % GPU_WARP;
    if (block >= n_blocks)
        return;
    float v = x[32 * (size_t)block + lane], most = fabsf(v);
    most = most == most ? most : 0;
    for (int i = 16; i; i /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, i));
    /* Below this 127 / most could overflow; such a block counts as zero. */
    bool none = most < 1e-30f;
    int code = __float2int_rn(v * (none ? 0 : 127 / most)), sum = code;
    for (int i = 8; i; i /= 2)
        sum += __shfl_xor_sync(0xffffffff, sum, i);
    q[32 * (size_t)block + lane] = (int8_t)code;
    if (lane == 0)
        act[block].d = none ? 0 : most / 127;
    if (lane % 16 == 0)
        act[block].sum[lane / 16] = (int16_t)sum;
}

/* ---- rows ------------------------------------------------------------------------------------------------------------ */

struct matvec_weight {
    const uint8_t *data;
    float *y;
    size_t row_bytes;
    uint32_t rows;
    uint32_t first; /* the thread block that has its first rows */
    gpu_type type;
};

struct matvec {
    matvec_weight w[MAX_WEIGHTS];
    const float *x;
    const int8_t *q;
    const gpu_act *act;
    uint32_t n, cols;
    uint32_t warps; /* of a row: 1, 2, 4 or 8 */
    bool add;
};

/* What one thread reads of x: as much as a share. */
template <typename F> struct input {
    uint32_t q[F::PIECES][4];
    float d[F::PIECES];
    int sum[F::PIECES];
};

template <typename F> static __device__ __forceinline__ void load_input(const matvec &a, unsigned block, unsigned share, input<F> *x)
{
#pragma unroll
    for (int p = 0; p < F::PIECES; p++) {
        size_t e = (size_t)block * F::ELEMENTS + F::at(share, p);
        store4(x->q[p], *reinterpret_cast<const uint4 *>(a.q + e));
        const gpu_act *act = &a.act[e / 32];
        x->d[p] = act->d;
        x->sum[p] = act->sum[e / 16 % 2];
    }
}

static __device__ __forceinline__ int dot16(const uint32_t *w, const uint32_t *x)
{
    int sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        sum = __dp4a((int)w[i], (int)x[i], sum);
    return sum;
}

/* d (sum of codes times x) and the minimum's part: integers until the scales come in, as in gemv_q8. */
template <typename F> static __device__ __forceinline__ float share_dot(const gpu_share<F::PIECES> &w, const input<F> &x)
{
    float y = 0;
#pragma unroll
    for (int p = 0; p < F::PIECES; p += F::ONE_SCALE ? F::PIECES : 1) {
        int dot = dot16(w.q[p], x.q[p]), sum = x.sum[p];
        if (F::ONE_SCALE) {
            dot += dot16(w.q[1], x.q[1]);
            sum += x.sum[1];
        }
        y += w.d[p] * x.d[p] * (float)(dot - F::ZERO * sum);
        if (F::HAS_MIN)
            y += w.m[p] * (x.d[p] * (float)sum);
    }
    return y;
}

/* A thread's part of the sums of ROWS rows: the shares first, first + step, ... */
template <gpu_type T> static __device__ __forceinline__ void blocks_dot(const matvec &a, const uint8_t *const *row, unsigned first, unsigned step, float *sum)
{
    typedef gpu_format<T> F;
    for (unsigned i = first; i < a.cols / F::ELEMENTS * F::SHARES; i += step) {
        unsigned block = i / F::SHARES, share = i % F::SHARES;
        input<F> x;
        load_input<F>(a, block, share, &x);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            gpu_share<F::PIECES> w;
            F::unpack(row[r] + (size_t)block * F::BYTES, share, &w);
            sum[r] += share_dot<F>(w, x);
        }
    }
}

static __device__ __forceinline__ bool aligned16(const void *p)
{
    return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

/* The same of plain numbers: 16 bytes at a time where all rows allow, the rest one by one. */
template <gpu_type T> static __device__ __forceinline__ void plain_dot(const matvec &a, const uint8_t *const *row, unsigned first, unsigned step, float *sum)
{
    const unsigned size = T == GPU_F32 ? 4 : 2, n = 16 / size;
    bool wide = aligned16(a.x);
#pragma unroll
    for (int r = 0; r < ROWS; r++)
        wide &= aligned16(row[r]);
    unsigned done = wide ? a.cols / n * n : 0;
    for (unsigned i = n * first; i < done; i += n * step) {
        float x[8];
        uint32_t w[4];
#pragma unroll
        for (unsigned j = 0; j < n; j += 4)
            *reinterpret_cast<float4 *>(x + j) = *reinterpret_cast<const float4 *>(a.x + i + j);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            store4(w, load<uint4>(row[r] + (size_t)size * i));
#pragma unroll
            for (unsigned j = 0; j < n; j++)
                if (T == GPU_F32)
                    sum[r] += __uint_as_float(w[j % 4]) * x[j];
                else if (T == GPU_F16)
                    sum[r] += (j % 2 ? f16_high(w[j / 2]) : f16_low(w[j / 2])) * x[j];
                else
                    sum[r] += __uint_as_float(j % 2 ? w[j / 2] & 0xffff0000 : w[j / 2] << 16) * x[j];
        }
    }
    for (unsigned i = done + first; i < a.cols; i += step)
#pragma unroll
        for (int r = 0; r < ROWS; r++)
            sum[r] += gpu_plain<T>(row[r], i) * a.x[i];
}

static __device__ void rows_dot(const matvec &a, gpu_type type, const uint8_t *const *row, unsigned first, unsigned step, float *sum)
{
    switch (type) {
#define PLAIN(T)                                                                                                                           \
    case T:                                                                                                                                \
        plain_dot<T>(a, row, first, step, sum);                                                                                            \
        break;
        PLAIN(GPU_F32) PLAIN(GPU_F16) PLAIN(GPU_BF16)
#undef PLAIN
#define BLOCKS(T)                                                                                                                          \
    case T:                                                                                                                                \
        blocks_dot<T>(a, row, first, step, sum);                                                                                           \
        break;
        BLOCKS(GPU_Q8_0) BLOCKS(GPU_Q4_0) BLOCKS(GPU_Q4_1) BLOCKS(GPU_Q5_0) BLOCKS(GPU_Q5_1) BLOCKS(GPU_IQ4_NL)
        BLOCKS(GPU_Q2_K) BLOCKS(GPU_Q3_K) BLOCKS(GPU_Q4_K) BLOCKS(GPU_Q5_K) BLOCKS(GPU_Q6_K) BLOCKS(GPU_IQ4_XS)
#undef BLOCKS
    default:
        break;
    }
}

/* Thread blocks are dealt to the weights one after the other; one has WARPS / a.warps groups of a.warps warps, which take ROWS rows each. */
static __global__ void MATVEC_BOUNDS matvec_rows(const matvec a)
{
    GPU_SHARED(float, part); /* [WARPS][ROWS] */
    unsigned i = 0, warp = threadIdx.x / GPU_WARP, lane = threadIdx.x % GPU_WARP;
    while (i + 1 < a.n && blockIdx.x >= a.w[i + 1].first)
        i++;
    const matvec_weight &w = a.w[i];
    const uint32_t at = ((blockIdx.x - w.first) * (WARPS / a.warps) + warp / a.warps) * ROWS;
    const uint8_t *row[ROWS];
    float sum[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        row[r] = w.data + (at + r < w.rows ? at + r : w.rows - 1) * w.row_bytes; /* past the end: the last row again, for nothing */
        sum[r] = 0;
    }
    rows_dot(a, w.type, row, warp % a.warps * GPU_WARP + lane, a.warps * GPU_WARP, sum);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        for (int j = GPU_WARP / 2; j; j /= 2)
            sum[r] += __shfl_xor_sync(0xffffffff, sum[r], j);
        if (lane == 0)
            part[warp * ROWS + r] = sum[r];
    }
    __syncthreads();
    if (warp % a.warps == 0 && lane < ROWS && at + lane < w.rows) {
        float y = 0;
        for (unsigned j = 0; j < a.warps; j++)
            y += part[(warp + j) * ROWS + lane];
        w.y[at + lane] = a.add ? w.y[at + lane] + y : y;
    }
}

int gpu_matvec(gpu_context *g, const gpu_weight *const *w, float *const *y, uint32_t n, const float *x, bool add)
{
    assert(n <= MAX_WEIGHTS);
    matvec a = {};
    bool blocks = false;
    size_t rows = 0;
    for (uint32_t i = 0; i < n; i++) {
        assert(w[i]->cols == w[0]->cols && w[i]->type < GPU_TYPE_COUNT);
        rows += w[i]->rows;
        blocks |= w[i]->type >= GPU_Q8_0;
    }
    if (!rows)
        return g->status;
    a.cols = w[0]->cols;
    assert(!blocks || (a.cols <= g->max_cols && a.cols % 32 == 0));
    a.x = x;
    a.q = g->act_q;
    a.act = g->act;
    a.add = add;
    a.warps = 1;
    while (a.warps < WARPS && a.cols > 32 * GPU_WARP * a.warps && rows * a.warps < (size_t)ROWS * BUSY_WARPS * g->info.n_sm)
        a.warps *= 2;
    uint32_t grid = 0;
    for (uint32_t i = 0; i < n; i++)
        if (w[i]->rows) {
            a.w[a.n++] = {(const uint8_t *)w[i]->data, y[i], w[i]->row_bytes, w[i]->rows, grid, w[i]->type};
            grid += gpu_blocks(w[i]->rows, WARPS / a.warps * ROWS);
        }
    if (blocks && a.cols)
        GPU_LAUNCH(g, quantize_q8, gpu_blocks(a.cols / 32, WARPS), THREADS, 0, g->act_q, g->act, x, a.cols / 32);
    return GPU_LAUNCH(g, matvec_rows, grid, THREADS, WARPS * ROWS * sizeof(float), a);
}
