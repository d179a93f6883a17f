/* What happens to rows of float32 between the products: embedding, norms, sums, gates, rotation, and storing keys and values.
 *
 * Where the twin is a product and a sum (rope), both are rounded, not fused: then keys have the same bits here as there.
 */
#include "private.cuh"

#include <assert.h>

enum { THREADS = 256, MAX_THREADS = 1024 };

static __device__ __forceinline__ size_t thread_index(void)
{
    return (size_t)blockIdx.x * THREADS + threadIdx.x;
}

int gpu_embed(gpu_context *g, float *out, const gpu_weight *table, const int32_t *ids, uint32_t n, float scale)
{
    return gpu_dequantize(g, table, ids, n, out, false, scale);
}

/* ---- norms ----------------------------------------------------------------------------------------------------------- */

/* The sum over a thread block, for all its threads. part: shared, a float for each warp. */
static __device__ __forceinline__ float block_sum(float v, float *part)
{
    for (int i = GPU_WARP / 2; i; i /= 2)
        v += __shfl_xor_sync(0xffffffff, v, i);
    if (threadIdx.x % GPU_WARP == 0)
        part[threadIdx.x / GPU_WARP] = v;
    __syncthreads();
    float sum = 0;
    for (unsigned i = 0; i < blockDim.x / GPU_WARP; i++)
        sum += part[i];
    return sum;
}

/* A thread block for each row. The sum of squares is float32 in as many lanes as there are threads. */
static __global__ void rms_norm_rows(float *out, const float *x, const float *w, uint32_t cols, float eps)
{
    GPU_SHARED(float, part);
    const size_t at = (size_t)blockIdx.x * cols;
    float sum = 0;
    for (unsigned i = threadIdx.x; i < cols; i += blockDim.x)
        sum += x[at + i] * x[at + i];
    float f = 1 / sqrtf(block_sum(sum, part) / (float)cols + eps);
    for (unsigned i = threadIdx.x; i < cols; i += blockDim.x)
        out[at + i] = x[at + i] * f * w[i];
}

int gpu_rms_norm(gpu_context *g, float *out, const float *x, const float *w, uint32_t n, uint32_t cols, float eps)
{
    if (!n || !cols)
        return g->status;
    unsigned threads = cols > 4 * THREADS ? MAX_THREADS : THREADS;
    return GPU_LAUNCH(g, rms_norm_rows, n, threads, threads / GPU_WARP * sizeof(float), out, x, w, cols, eps);
}

/* ---- element by element ------------------------------------------------------------------------------------------------ */

/* x [n] += y [n], or the row y [cols] to each row of x. */
static __global__ void add_rows(float *x, const float *y, size_t n, size_t cols)
{
    const size_t i = thread_index();
    if (i < n)
        x[i] += y[cols == n ? i : i % cols];
}

static int add(gpu_context *g, float *x, const float *y, size_t n, size_t cols)
{
    return n ? GPU_LAUNCH(g, add_rows, gpu_blocks(n, THREADS), THREADS, 0, x, y, n, cols) : g->status;
}

int gpu_add(gpu_context *g, float *x, const float *y, size_t n)
{
    return add(g, x, y, n, n);
}

int gpu_add_row(gpu_context *g, float *x, const float *row, uint32_t n, uint32_t cols)
{
    return add(g, x, row, (size_t)n * cols, cols);
}

static __global__ void scale_all(float *x, size_t n, float f)
{
    const size_t i = thread_index();
    if (i < n)
        x[i] *= f;
}

int gpu_scale(gpu_context *g, float *x, size_t n, float f)
{
    return n ? GPU_LAUNCH(g, scale_all, gpu_blocks(n, THREADS), THREADS, 0, x, n, f) : g->status;
}

/* Both are x / (1 + exp(-u)): of SiLU u = x; of GELU, x (1 + tanh(u / 2)) / 2, u / 2 = sqrt(2 / pi) (x + 0.044715 x^3). */
static __global__ void gate_all(float *out, const float *gate, const float *up, size_t n, bool gelu)
{
    const size_t i = thread_index();
    if (i >= n)
        return;
    float x = gate[i], u = gelu ? 1.5957691216f * (x + 0.044715f * x * x * x) : x;
    out[i] = x / (1 + expf(-u)) * up[i];
}

int gpu_gate(gpu_context *g, float *out, const float *gate, const float *up, size_t n, bool gelu)
{
    return n ? GPU_LAUNCH(g, gate_all, gpu_blocks(n, THREADS), THREADS, 0, out, gate, up, n, gelu) : g->status;
}

/* ---- positions, keys and values ------------------------------------------------------------------------------------------ */

/* A thread for each pair of dims that turns; pairs: of all tokens and heads. */
static __global__ void rope_pairs(float *x, const float *cs, size_t pairs, uint32_t n_head, uint32_t d, uint32_t rot, bool halves)
{
    const size_t i = thread_index();
    if (i >= pairs)
        return;
    const unsigned h = rot / 2, p = (unsigned)(i % h);
    const size_t head = i / h;
    float *a = x + head * d + (halves ? p : 2 * p), *b = a + (halves ? h : 1);
    const float *cosine = cs + head / n_head * rot + p, c = cosine[0], s = cosine[h], u = *a, v = *b;
    *a = __fsub_rn(__fmul_rn(u, c), __fmul_rn(v, s));
    *b = __fadd_rn(__fmul_rn(u, s), __fmul_rn(v, c));
}

int gpu_rope(gpu_context *g, float *x, const float *cs, uint32_t n, uint32_t n_head, uint32_t d, uint32_t rot, bool halves)
{
    assert(rot <= d && rot % 2 == 0);
    const size_t pairs = (size_t)n * n_head * (rot / 2);
    return pairs ? GPU_LAUNCH(g, rope_pairs, gpu_blocks(pairs, THREADS), THREADS, 0, x, cs, pairs, n_head, d, rot, halves) : g->status;
}

static __device__ __forceinline__ void store_kv(void *rows, gpu_kv_type type, size_t i, float v)
{
    if (type == GPU_KV_F16) /* NaN is neither above nor below, and stays */
        static_cast<__half *>(rows)[i] = __float2half_rn(v > 65504 ? 65504 : v < -65504 ? -65504 : v);
    else
        static_cast<__nv_bfloat16 *>(rows)[i] = __float2bfloat16_rn(v);
}

/* total: elements of k, and of v. */
static __global__ void store_rows(const gpu_kv kv, const float *k, const float *v, uint32_t first_row, size_t total)
{
    const size_t i = thread_index();
    if (i >= total)
        return;
    const size_t at = i / kv.d, head = at % kv.n_head_kv, row = (first_row + at / kv.n_head_kv) % kv.cap;
    const size_t to = (head * kv.cap + row) * kv.d + i % kv.d;
    store_kv(kv.k, kv.type_k, to, k[i]);
    store_kv(kv.v, kv.type_v, to, v[i]);
}

/* A warp for each block of 32, of `blocks` a row. The largest of the bits without their sign is NaN's where there is one: all of its block becomes NaN. */
static __global__ void round_rows_q8(float *x, uint32_t cols, uint32_t blocks, size_t total)
{
    const size_t block = (size_t)blockIdx.x * (THREADS / GPU_WARP) + threadIdx.x / GPU_WARP;
    if (block >= total)
        return;
    const uint32_t column = (uint32_t)(block % blocks) * GPU_WARP + threadIdx.x % GPU_WARP;
    float *to = x + block / blocks * cols + column, v = column < cols ? *to : 0;
    unsigned most = __float_as_uint(v) & 0x7fffffff;
    for (int i = GPU_WARP / 2; i; i /= 2)
        most = max(most, __shfl_xor_sync(0xffffffff, most, i));
    float size = __fdiv_rn(__uint_as_float(most), 127.0f);
    float d = __half2float(__float2half_rn(size > 65504 ? 65504 : size)), code = __fmul_rn(v, d == 0 ? 0 : __fdiv_rn(1, d));
    code = code < 127 ? code : 127;
    if (column < cols)
        *to = __fmul_rn(d, (float)__float2int_rn(code > -127 ? code : -127));
}

int gpu_round_q8(gpu_context *g, float *x, uint32_t n, uint32_t cols)
{
    const uint32_t blocks = gpu_blocks(cols, GPU_WARP);
    const size_t total = (size_t)n * blocks;
    return total ? GPU_LAUNCH(g, round_rows_q8, gpu_blocks(total, THREADS / GPU_WARP), THREADS, 0, x, cols, blocks, total) : g->status;
}

int gpu_kv_store(gpu_context *g, const gpu_kv *kv, const float *k, const float *v, uint32_t first_row, uint32_t n)
{
    assert(n <= kv->cap); /* or rows would be written twice, in any order */
    const size_t total = (size_t)n * kv->n_head_kv * kv->d;
    return total ? GPU_LAUNCH(g, store_rows, gpu_blocks(total, THREADS), THREADS, 0, *kv, k, v, first_row, total) : g->status;
}
