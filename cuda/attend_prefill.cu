/* Causal attention of many tokens over blocks of keys and values: FlashAttention-2's loop (arXiv 2307.08691), whose state stays in device memory between blocks.
 *
 * The queries (token, head of the group) of a KV head are the rows of a product; a block of threads has ROWS of them and goes through the keys by KEYS. Two
 * warps share 16 rows: each computes the scores of half of the keys, and the sums of half of the dims; in between four threads do a row's softmax.
 *
 * - Scores reach hundreds where keys share a large offset, and a query that is rounded to 16 bits would move them by up to 1. Keys in the cache are exact in
 *   their type, so only the query is split: into two f16, first scaled by a power of two that makes its largest element near 2^10, or into three bf16. Either is
 *   the float32 to 2^-22 and less.
 * - Weights have f16's full precision down to 2^-29, since they are multiplied by 2^15 first, or are bf16. What is summed up is the rounded weight: so
 *   rounding makes no weights that do not add up to one.
 * - A row's arithmetic is its own, key tiles are cut at absolute positions, a tile that a row does not see gives exact zeros and moves no maximum: so a token's
 *   bits do not depend on the chunk, the block, or the queries beside it.
 */
#include "private.cuh"

#include "numbers.cuh"

#include <assert.h>
#include <mma.h>

enum { KEYS = 32, S_STRIDE = KEYS + 4, ROW_THREADS = 4 };
static_assert(GPU_TILE % KEYS == 0, "blocks begin where tiles do");

struct prefill_args {
    const uint4 *k, *v;
    const float *q;
    float *m, *l, *o;
    float scale;
    uint32_t cap, group, d, n_head;
    bool bf16_k, bf16_v;
    uint32_t pos0, n, window, first, n_rows;
};

/* ---- sizes ----------------------------------------------------------------------------------------------------------- */

template <int DIM_> struct prefill_shape {
    enum {
        DIM = DIM_,                     /* heads have at most so many dims: what is past d is zero */
        ROWS = DIM > 128 ? 32 : 64,
        THREADS = ROWS * ROW_THREADS,
        CHUNKS = DIM / 8,               /* of 16 bytes in a row */
        STRIDE = DIM + 8,               /* of rows in shared memory, elements: no two of eight rows in the same banks */
        LOADS = (KEYS * CHUNKS + THREADS - 1) / THREADS, /* chunks that a thread brings */
        SUMS = DIM / 32,                /* 16 x 16 sums of a warp */
    };
};

/* Which 16 rows a warp has, and which half of the keys and dims. */
static __device__ uint32_t warp_rows()
{
    return threadIdx.x / GPU_WARP / 2;
}

static __device__ uint32_t warp_half()
{
    return threadIdx.x / GPU_WARP % 2;
}

/* ---- products: with tensor cores -------------------------------------------------------------------------------------- */

template <class T> struct number;
template <> struct number<__half> {
    enum { PARTS = 2, SHIFT = 15 };
    static __device__ __half of(float x) { return __float2half_rn(x); }
    static __device__ float value(__half x) { return __half2float(x); }
    /* What scales a row of queries whose largest element is max. */
    static __device__ float scale(float max)
    {
        int exponent = 0;
        frexpf(max, &exponent);
        return ldexpf(1, min(max > 0 ? 11 - exponent : 0, 100));
    }
};
template <> struct number<__nv_bfloat16> {
    enum { PARTS = 3, SHIFT = 0 };
    static __device__ __nv_bfloat16 of(float x) { return __float2bfloat16_rn(x); }
    static __device__ float value(__nv_bfloat16 x) { return __bfloat162float(x); }
    static __device__ float scale(float) { return 1; }
};

template <class T> struct four_of {
    T x[4];
};

/* In shared memory: queries [PARTS][ROWS][STRIDE]; of a row of s the first half becomes weights, the second the factor of older sums, 16 times. */
template <int DIM, class T> struct tensor : prefill_shape<DIM> {
    using S = prefill_shape<DIM>;
    using sums = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float>;
    enum { SHIFT = number<T>::SHIFT, PARTS = number<T>::PARTS, QUERY_BYTES = PARTS * S::ROWS * S::STRIDE * 2 };
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    static constexpr bool exists = number<T>::PARTS == 2; /* no bf16 there */
#else
    static constexpr bool exists = true;
#endif

    static __device__ float query_scale(float max) { return number<T>::scale(max); }

    static __device__ void put_query(unsigned char *queries, uint32_t row, uint32_t column, float4 x)
    {
        float rest[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            alignas(8) four_of<T> to;
            for (int i = 0; i < 4; i++) {
                to.x[i] = number<T>::of(rest[i]);
                rest[i] -= number<T>::value(to.x[i]);
            }
            *reinterpret_cast<uint2 *>(reinterpret_cast<T *>(queries) + ((size_t)part * S::ROWS + row) * S::STRIDE + column) = *reinterpret_cast<uint2 *>(&to);
        }
    }

    static __device__ void load(sums &to, const float *from) { nvcuda::wmma::load_matrix_sync(to, from, S::STRIDE, nvcuda::wmma::mem_row_major); }
    static __device__ void store(float *to, const sums &from) { nvcuda::wmma::store_matrix_sync(to, from, S::STRIDE, nvcuda::wmma::mem_row_major); }

    static __device__ void score(float *s, const unsigned char *queries, const uint4 *tile, const prefill_args &)
    {
        using namespace nvcuda::wmma;
        sums sum;
        fill_fragment(sum, 0.0f);
        const T *k = reinterpret_cast<const T *>(tile) + warp_half() * 16 * S::STRIDE, *q = reinterpret_cast<const T *>(queries) + warp_rows() * 16 * S::STRIDE;
#pragma unroll 4
        for (int step = 0; step < DIM / 16; step++) {
            fragment<matrix_b, 16, 16, 16, T, col_major> b;
            load_matrix_sync(b, k + step * 16, S::STRIDE);
#pragma unroll
            for (int part = PARTS - 1; part >= 0; part--) { /* small ones first */
                fragment<matrix_a, 16, 16, 16, T, row_major> a;
                load_matrix_sync(a, q + part * S::ROWS * S::STRIDE + step * 16, S::STRIDE);
                mma_sync(sum, a, b, sum);
            }
        }
        store_matrix_sync(s + warp_rows() * 16 * S_STRIDE + warp_half() * 16, sum, S_STRIDE, mem_row_major);
    }

    /* A thread's eight weights of a row. Returns the sum of what they were rounded to. */
    static __device__ float put_weights(float *row, uint32_t way, const float *p, float factor)
    {
        alignas(16) T to[8];
        float sum = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            to[i] = number<T>::of(p[i]);
            sum += number<T>::value(to[i]);
        }
        *reinterpret_cast<uint4 *>(row + way * 4) = *reinterpret_cast<uint4 *>(to);
        *reinterpret_cast<float4 *>(row + KEYS / 2 + way * 4) = make_float4(factor, factor, factor, factor);
        return sum;
    }

    static __device__ void rescale(sums *o, const float *s)
    {
        sums factor;
        nvcuda::wmma::load_matrix_sync(factor, s + warp_rows() * 16 * S_STRIDE + KEYS / 2, S_STRIDE, nvcuda::wmma::mem_row_major);
#pragma unroll
        for (int i = 0; i < S::SUMS; i++)
#pragma unroll
            for (int j = 0; j < sums::num_elements; j++)
                o[i].x[j] *= factor.x[j];
    }

    static __device__ void add_values(sums *o, const float *s, const uint4 *tile, const prefill_args &)
    {
        using namespace nvcuda::wmma;
        const T *p = reinterpret_cast<const T *>(s + warp_rows() * 16 * S_STRIDE), *v = reinterpret_cast<const T *>(tile) + warp_half() * (DIM / 2);
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            fragment<matrix_a, 16, 16, 16, T, row_major> a;
            load_matrix_sync(a, p + step * 16, S_STRIDE * 2);
#pragma unroll
            for (int i = 0; i < S::SUMS; i++) {
                fragment<matrix_b, 16, 16, 16, T, row_major> b;
                load_matrix_sync(b, v + step * 16 * S::STRIDE + i * 16, S::STRIDE);
                mma_sync(o[i], a, b, o[i]);
            }
        }
    }
};

/* ---- products: in float32 --------------------------------------------------------------------------------------------- */

/* For keys and values that the tensor cores do not multiply: bf16 before compute capability 8.0, or one of each type. A lane has eight neighbours of a row of
 * each 16 x 16 sums. In shared memory: queries [ROWS][STRIDE] float32; s becomes the weights, behind a row of them is the factor of older sums. */
struct plain : prefill_shape<256> {
    struct sums {
        float x[8];
    };
    enum { SHIFT = 0, QUERY_BYTES = ROWS * STRIDE * 4 };
    static constexpr bool exists = true;

    static __device__ uint32_t row() { return threadIdx.x % GPU_WARP / 2; }
    static __device__ uint32_t column() { return threadIdx.x % 2 * 8; }
    static __device__ void unpack(float *to, uint4 x, bool bf16)
    {
        if (bf16)
            unpack8<true>(to, x);
        else
            unpack8<false>(to, x);
    }

    static __device__ float query_scale(float) { return 1; }

    static __device__ void put_query(unsigned char *queries, uint32_t row, uint32_t column, float4 x)
    {
        *reinterpret_cast<float4 *>(reinterpret_cast<float *>(queries) + row * STRIDE + column) = x;
    }

    static __device__ void load(sums &to, const float *from)
    {
        for (int i = 0; i < 8; i++)
            to.x[i] = from[row() * STRIDE + column() + i];
    }

    static __device__ void store(float *to, const sums &from)
    {
        for (int i = 0; i < 8; i++)
            to[row() * STRIDE + column() + i] = from.x[i];
    }

    static __device__ void score(float *s, const unsigned char *queries, const uint4 *tile, const prefill_args &a)
    {
        float sum[8] = {};
        const float *q = reinterpret_cast<const float *>(queries) + (warp_rows() * 16 + row()) * STRIDE;
        uint32_t key = warp_half() * 16 + column();
        for (uint32_t chunk = 0; chunk < a.d / 8; chunk++) {
            for (int i = 0; i < 8; i++) {
                float k[8];
                unpack(k, tile[(key + i) * (STRIDE / 8) + chunk], a.bf16_k);
                for (int j = 0; j < 8; j++)
                    sum[i] = fmaf(q[chunk * 8 + j], k[j], sum[i]);
            }
        }
        for (int i = 0; i < 8; i++)
            s[(warp_rows() * 16 + row()) * S_STRIDE + key + i] = sum[i];
    }

    static __device__ float put_weights(float *row, uint32_t way, const float *p, float factor)
    {
        float sum = 0;
        for (int i = 0; i < 8; i++) {
            row[way * 8 + i] = p[i];
            sum += p[i];
        }
        if (way == 0)
            row[KEYS] = factor;
        return sum;
    }

    static __device__ void rescale(sums *o, const float *s)
    {
        float factor = s[(warp_rows() * 16 + row()) * S_STRIDE + KEYS];
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            for (int j = 0; j < 8; j++)
                o[i].x[j] *= factor;
    }

    static __device__ void add_values(sums *o, const float *s, const uint4 *tile, const prefill_args &a)
    {
        const float *p = s + (warp_rows() * 16 + row()) * S_STRIDE;
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            uint32_t first = warp_half() * (DIM / 2) + i * 16 + column();
            for (uint32_t key = 0; first < a.d && key < KEYS; key++) {
                float v[8];
                unpack(v, tile[key * (STRIDE / 8) + first / 8], a.bf16_v);
                for (int j = 0; j < 8; j++)
                    o[i].x[j] = fmaf(p[key], v[j], o[i].x[j]);
            }
        }
    }
};

/* ---- the kernel ------------------------------------------------------------------------------------------------------- */

/* A thread's chunks of the rows of positions [at, at + KEYS), zeros where there are none. */
template <class M> static __device__ void fetch(uint4 *to, const uint4 *rows, const prefill_args &a, uint32_t at)
{
#pragma unroll
    for (int i = 0; i < M::LOADS; i++) {
        uint32_t mine = threadIdx.x + i * M::THREADS, row = at - a.first + mine / M::CHUNKS, chunk = mine % M::CHUNKS;
        bool there = mine < KEYS * M::CHUNKS && row < a.n_rows && chunk < a.d / 8;
        to[i] = there ? rows[((size_t)blockIdx.y * a.cap + row) * (a.d / 8) + chunk] : make_uint4(0, 0, 0, 0);
    }
}

template <class M> static __device__ void place(uint4 *tile, const uint4 *from)
{
#pragma unroll
    for (int i = 0; i < M::LOADS; i++) {
        uint32_t mine = threadIdx.x + i * M::THREADS;
        if (mine < KEYS * M::CHUNKS)
            tile[mine / M::CHUNKS * (M::STRIDE / 8) + mine % M::CHUNKS] = from[i];
    }
}

/* The row of the product that a thread works for, with three others, and how far its softmax is. */
struct query_row {
    size_t index;       /* of (token, head) */
    uint32_t way;       /* which of the four */
    uint32_t lo, hi;    /* positions that it sees */
    float m, l, unit;   /* unit: what makes scores of the products */
};

static __device__ uint32_t window_begin(uint32_t pos, uint32_t window)
{
    return window && pos >= window ? pos - window + 1 : 0;
}

static __device__ query_row row_at(const prefill_args &a, uint32_t column)
{
    query_row r;
    uint32_t token = column / a.group, pos = a.pos0 + token;
    r.index = (size_t)token * a.n_head + blockIdx.y * a.group + column % a.group;
    r.way = threadIdx.x % ROW_THREADS;
    r.lo = window_begin(pos, a.window);
    r.hi = min(pos + 1, a.first + a.n_rows);
    r.l = a.l[r.index];
    r.m = r.l > 0 ? a.m[r.index] : -INFINITY;
    r.unit = 1;
    return r;
}

/* The sums so far, through shared memory (where the queries will be) to the warps that go on with them. */
template <class M> static __device__ void load_sums(typename M::sums *o, float *staging, const prefill_args &a, const query_row &r)
{
    uint32_t row = threadIdx.x / ROW_THREADS;
    const float4 *from = reinterpret_cast<const float4 *>(a.o) + r.index * (a.d / 4);
    for (uint32_t i = r.way; i < M::DIM / 4; i += ROW_THREADS) {
        float4 x = r.l > 0 && i < a.d / 4 ? from[i] : make_float4(0, 0, 0, 0);
        float f = 1 << M::SHIFT;
        *reinterpret_cast<float4 *>(staging + row * M::STRIDE + i * 4) = make_float4(x.x * f, x.y * f, x.z * f, x.w * f);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < M::SUMS; i++)
        M::load(o[i], staging + warp_rows() * 16 * M::STRIDE + (warp_half() * M::SUMS + i) * 16);
    __syncthreads();
}

/* And back. */
template <class M> static __device__ void store_sums(const typename M::sums *o, float *staging, const prefill_args &a, const query_row &r, bool mine)
{
    __syncthreads();
#pragma unroll
    for (int i = 0; i < M::SUMS; i++)
        M::store(staging + warp_rows() * 16 * M::STRIDE + (warp_half() * M::SUMS + i) * 16, o[i]);
    __syncthreads();
    uint32_t row = threadIdx.x / ROW_THREADS;
    float4 *to = reinterpret_cast<float4 *>(a.o) + r.index * (a.d / 4);
    for (uint32_t i = r.way; mine && i < a.d / 4; i += ROW_THREADS) {
        float4 x = *reinterpret_cast<float4 *>(staging + row * M::STRIDE + i * 4);
        float f = 1.0f / (1 << M::SHIFT);
        to[i] = make_float4(x.x * f, x.y * f, x.z * f, x.w * f);
    }
    if (mine && r.way == 0) {
        a.m[r.index] = r.m;
        a.l[r.index] = r.l;
    }
}

template <class M> static __device__ void load_query(unsigned char *queries, const prefill_args &a, query_row &r)
{
    const float4 *from = reinterpret_cast<const float4 *>(a.q) + r.index * (a.d / 4);
    float max = 0;
    for (uint32_t i = r.way; i < a.d / 4; i += ROW_THREADS) {
        float4 x = from[i];
        max = fmaxf(fmaxf(max, fmaxf(fabsf(x.x), fabsf(x.y))), fmaxf(fabsf(x.z), fabsf(x.w)));
    }
    float f = M::query_scale(warp_max(max, ROW_THREADS) * a.scale);
    r.unit = 1 / f;
    for (uint32_t i = r.way; i < M::DIM / 4; i += ROW_THREADS) {
        float4 x = i < a.d / 4 ? from[i] : make_float4(0, 0, 0, 0);
        M::put_query(queries, threadIdx.x / ROW_THREADS, i * 4, make_float4(x.x * a.scale * f, x.y * a.scale * f, x.z * a.scale * f, x.w * a.scale * f));
    }
}

/* Scores of the keys from `at` on become weights, and m and l follow. Returns whether older sums are to be rescaled. */
template <class M> static __device__ bool weigh(float *s, query_row &r, uint32_t at)
{
    float *row = s + threadIdx.x / ROW_THREADS * S_STRIDE, x[8], max = r.m;
    uint32_t first = at + r.way * 8;
    bool whole = first >= r.lo && first + 8 <= r.hi;
    *reinterpret_cast<float4 *>(x) = *reinterpret_cast<float4 *>(row + r.way * 8);
    *reinterpret_cast<float4 *>(x + 4) = *reinterpret_cast<float4 *>(row + r.way * 8 + 4);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = whole || (first + i >= r.lo && first + i < r.hi) ? x[i] * r.unit : -INFINITY;
        max = fmaxf(max, x[i]);
    }
    max = warp_max(max, ROW_THREADS);
    __syncwarp(); /* the row is read */
    float base = softmax_base(max), factor = weight(r.m - base);
    bool moved = max != r.m;
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = weight(x[i] - base, M::SHIFT);
    float sum = warp_sum(M::put_weights(row, r.way, x, factor), ROW_THREADS);
    r.l = fmaf(r.l, factor, sum * (1.0f / (1 << M::SHIFT)));
    r.m = max;
    return moved;
}

template <class M> struct prefill_memory {
    enum {
        TILE = M::QUERY_BYTES,
        S = TILE + KEYS * M::STRIDE * 2,
        MOVED = S + M::ROWS * S_STRIDE * 4,
        BYTES = (MOVED + M::THREADS / GPU_WARP * 4 + 31) / 32 * 32, /* a tile of wmma begins at a multiple of 32 */
    };
};

/* Block (ROWS queries, KV head). */
template <class M> static __global__ void __launch_bounds__(M::THREADS, 2) attend_prefill(prefill_args a)
{
    if constexpr (M::exists) {
        GPU_SHARED(unsigned char, shared);
        uint4 *tile = reinterpret_cast<uint4 *>(shared + prefill_memory<M>::TILE);
        float *s = reinterpret_cast<float *>(shared + prefill_memory<M>::S);
        uint32_t *moved = reinterpret_cast<uint32_t *>(shared + prefill_memory<M>::MOVED);
        uint32_t column = blockIdx.x * M::ROWS, last = a.n * a.group - 1, end = min(column + M::ROWS - 1, last);
        uint32_t from = max(a.first, window_begin(a.pos0 + column / a.group, a.window) / KEYS * KEYS), to = min(a.first + a.n_rows, a.pos0 + end / a.group + 1);
        if (from >= to)
            return;
        column += threadIdx.x / ROW_THREADS;
        query_row r = row_at(a, min(column, last)); /* past the last one the threads do its work again, and keep it to themselves */
        typename M::sums o[M::SUMS];
        load_sums<M>(o, reinterpret_cast<float *>(shared), a, r);
        load_query<M>(shared, a, r);
        uint4 next[M::LOADS];
        fetch<M>(next, a.k, a, from);
        for (uint32_t at = from; at < to; at += KEYS) {
            __syncthreads(); /* the tile before is done with */
            place<M>(tile, next);
            fetch<M>(next, a.v, a, at);
            __syncthreads();
            M::score(s, shared, tile, a);
            __syncthreads();
            place<M>(tile, next);
            if (at + KEYS < to)
                fetch<M>(next, a.k, a, at + KEYS);
            bool any = __any_sync(0xffffffffu, weigh<M>(s, r, at));
            if (threadIdx.x % GPU_WARP == 0)
                moved[threadIdx.x / GPU_WARP] = any;
            __syncthreads();
            if (moved[warp_rows() * 2] | moved[warp_rows() * 2 + 1])
                M::rescale(o, s);
            M::add_values(o, s, tile, a);
        }
        store_sums<M>(o, reinterpret_cast<float *>(shared), a, r, column <= last);
    }
}

template <class M> static int launch(gpu_context *g, const prefill_args &a, uint32_t n_head_kv)
{
    int bytes = prefill_memory<M>::BYTES;
    GPU_TRY(g, cudaFuncSetAttribute(attend_prefill<M>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    return GPU_LAUNCH(g, attend_prefill<M>, dim3(gpu_blocks((size_t)a.n * a.group, M::ROWS), n_head_kv), M::THREADS, bytes, a);
}

template <class T> static int launch_tensor(gpu_context *g, const prefill_args &a, uint32_t n_head_kv)
{
    if (a.d <= 64)
        return launch<tensor<64, T>>(g, a, n_head_kv);
    if (a.d <= 96)
        return launch<tensor<96, T>>(g, a, n_head_kv);
    if (a.d <= 128)
        return launch<tensor<128, T>>(g, a, n_head_kv);
    return launch<tensor<256, T>>(g, a, n_head_kv);
}

int gpu_attend_begin(gpu_context *g, const gpu_parts *state, const gpu_kv *kv, uint32_t n)
{
    return gpu_zero(g, GPU_COMPUTE, state->l, (size_t)n * kv->n_head_kv * kv->group * sizeof(float));
}

int gpu_attend_block(gpu_context *g, const gpu_parts *state, const gpu_queries *q, const gpu_kv *kv, uint32_t first, uint32_t n_rows)
{
    assert(kv->group >= 1 && kv->group <= 16 && kv->d >= 8 && kv->d <= 256 && kv->d % 8 == 0 && first % GPU_TILE == 0 && n_rows <= kv->cap);
    prefill_args a = {};
    a.k = static_cast<const uint4 *>(kv->k);
    a.v = static_cast<const uint4 *>(kv->v);
    a.q = q->q;
    a.m = state->m;
    a.l = state->l;
    a.o = state->o;
    a.scale = q->scale;
    a.cap = kv->cap;
    a.group = kv->group;
    a.d = kv->d;
    a.n_head = kv->n_head_kv * kv->group;
    a.bf16_k = kv->type_k == GPU_KV_BF16;
    a.bf16_v = kv->type_v == GPU_KV_BF16;
    a.pos0 = q->pos0;
    a.n = q->n;
    a.window = q->window;
    a.first = first;
    a.n_rows = n_rows;
    if (a.n == 0 || n_rows == 0)
        return gpu_status(g);
    if (a.bf16_k != a.bf16_v || (a.bf16_k && !g->tensor_bf16))
        return launch<plain>(g, a, kv->n_head_kv);
    if (a.bf16_k)
        return launch_tensor<__nv_bfloat16>(g, a, kv->n_head_kv);
    return launch_tensor<__half>(g, a, kv->n_head_kv);
}

/* Block: a query head of a token. */
static __global__ void attend_divide(float *out, const float *o, const float *l, uint32_t d)
{
    float sum = l[blockIdx.x];
    for (uint32_t i = threadIdx.x; i < d; i += blockDim.x)
        out[(size_t)blockIdx.x * d + i] = sum > 0 ? o[(size_t)blockIdx.x * d + i] / sum : 0;
}

int gpu_attend_end(gpu_context *g, float *out, const gpu_parts *state, const gpu_kv *kv, uint32_t n)
{
    if (n == 0)
        return gpu_status(g);
    return GPU_LAUNCH(g, attend_divide, n * kv->n_head_kv * kv->group, kv->d <= 64 ? 64 : 128, 0, out, state->o, state->l, kv->d);
}
