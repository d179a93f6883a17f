/* Rows of weights as plain numbers: all of them for matmul.cu, chosen ones for the embedding. Twin: eng_dequantize, bit for bit; bf16 is rounded from it to
 * nearest even. A thread takes a share of a block (blocks.cuh), or one plain number.
 */
#include "blocks.cuh"

#include <assert.h>

enum { THREADS = 256 };

static __device__ __forceinline__ void put(float *out, float v)
{
    *out = v;
}

static __device__ __forceinline__ void put(__nv_bfloat16 *out, float v)
{
    *out = __float2bfloat16_rn(v);
}

static __device__ __forceinline__ void put_piece(float *out, const float *v)
{
#pragma unroll
    for (int i = 0; i < 16; i++)
        out[i] = v[i];
}

/* This one is for scratch alone, which is aligned. */
static __device__ __forceinline__ void put_piece(__nv_bfloat16 *out, const float *v)
{
    uint32_t w[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        w[i] = __bfloat16_as_ushort(__float2bfloat16_rn(v[2 * i])) | (uint32_t)__bfloat16_as_ushort(__float2bfloat16_rn(v[2 * i + 1])) << 16;
    reinterpret_cast<uint4 *>(out)[0] = make_uint4(w[0], w[1], w[2], w[3]);
    reinterpret_cast<uint4 *>(out)[1] = make_uint4(w[4], w[5], w[6], w[7]);
}

struct table {
    const uint8_t *data;
    size_t row_bytes;
    const int32_t *ids;
    uint32_t n, cols;
    float scale;
};

static __device__ __forceinline__ const uint8_t *table_row(const table &t, unsigned i)
{
    return t.data + (t.ids ? (size_t)t.ids[i] : i) * t.row_bytes;
}

template <gpu_type T, typename Out> static __global__ void dequantize_blocks(Out *out, const table t)
{
    typedef gpu_format<T> F;
    const unsigned shares = t.cols / F::ELEMENTS * F::SHARES, i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= t.n * shares)
        return;
    const unsigned block = i % shares / F::SHARES, share = i % F::SHARES;
    gpu_share<F::PIECES> s;
    F::unpack(table_row(t, i / shares) + (size_t)block * F::BYTES, share, &s);
#pragma unroll
    for (int p = 0; p < F::PIECES; p++) {
        const int scale = F::ONE_SCALE ? 0 : p;
        float v[16];
#pragma unroll
        for (int j = 0; j < 16; j++) {
            v[j] = s.d[scale] * (float)((int8_t)(s.q[p][j / 4] >> 8 * (j % 4)) - F::ZERO);
            v[j] = (F::HAS_MIN ? v[j] + s.m[scale] : v[j]) * t.scale;
        }
        put_piece(out + (size_t)(i / shares) * t.cols + block * F::ELEMENTS + F::at(share, p), v);
    }
}

template <gpu_type T, typename Out> static __global__ void convert_plain(Out *out, const table t)
{
    const unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i < t.n * t.cols)
        put(out + i, gpu_plain<T>(table_row(t, i / t.cols), i % t.cols) * t.scale);
}

template <gpu_type T, typename Out> static int launch_blocks(gpu_context *g, Out *out, const table &t)
{
    typedef gpu_format<T> F;
    return GPU_LAUNCH(g, (dequantize_blocks<T, Out>), gpu_blocks((size_t)t.n * (t.cols / F::ELEMENTS) * F::SHARES, THREADS), THREADS, 0, out, t);
}

template <gpu_type T, typename Out> static int launch_plain(gpu_context *g, Out *out, const table &t)
{
    return GPU_LAUNCH(g, (convert_plain<T, Out>), gpu_blocks((size_t)t.n * t.cols, THREADS), THREADS, 0, out, t);
}

template <typename Out> static int launch(gpu_context *g, gpu_type type, Out *out, const table &t)
{
    switch (type) {
#define PLAIN(T)                                                                                                                           \
    case T:                                                                                                                                \
        return launch_plain<T>(g, out, t);
        PLAIN(GPU_F32) PLAIN(GPU_F16) PLAIN(GPU_BF16)
#undef PLAIN
#define BLOCKS(T)                                                                                                                          \
    case T:                                                                                                                                \
        return launch_blocks<T>(g, out, t);
        BLOCKS(GPU_Q8_0) BLOCKS(GPU_Q4_0) BLOCKS(GPU_Q4_1) BLOCKS(GPU_Q5_0) BLOCKS(GPU_Q5_1) BLOCKS(GPU_IQ4_NL)
        BLOCKS(GPU_Q2_K) BLOCKS(GPU_Q3_K) BLOCKS(GPU_Q4_K) BLOCKS(GPU_Q5_K) BLOCKS(GPU_Q6_K) BLOCKS(GPU_IQ4_XS)
#undef BLOCKS
    default:
        return g->status;
    }
}

int gpu_dequantize(gpu_context *g, const gpu_weight *w, const int32_t *ids, uint32_t n, void *out, bool bf16, float scale)
{
    assert(w->type < GPU_TYPE_COUNT && (size_t)n * w->cols <= UINT32_MAX);
    if (!n || !w->cols)
        return g->status;
    const table t = {(const uint8_t *)w->data, w->row_bytes, ids, n, w->cols, scale};
    return bf16 ? launch(g, w->type, (__nv_bfloat16 *)out, t) : launch(g, w->type, (float *)out, t);
}
