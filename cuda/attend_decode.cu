/* Attention of one token over rows that lie on the device: the window, or all of a context.
 *
 * Split over keys as in Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023): a block of threads per part and KV head. It reads its keys and values once for the
 * whole query group, by tiles: keys and values of a tile are asked for together, the values wait in registers until the keys' place in shared memory is free.
 * Scores, weights and sums are float32; there is no tensor core in this, since a group is small, memory is what limits it, and so the scores are exact to
 * float32's rounding.
 */
#include "private.cuh"

#include "numbers.cuh"

#include <assert.h>

enum {
    THREADS = 128,
    WARPS = THREADS / GPU_WARP,
    PART = 64,          /* keys of a part, and it is a multiple of this where MAX_PARTS would not do */
    MAX_PARTS = 256,    /* enough to fill any device; what merging reads is then bounded */
    MAX_RUNS = 3,
    MERGE_THREADS = 256,
    MERGE_PARTS = 256,  /* whose weights are in shared memory at a time */
};

/* What a kernel is made for: heads of up to DIM_ dims, groups of up to QUERIES_. */
template <int DIM_, int QUERIES_> struct decode_shape {
    enum {
        DIM = DIM_,
        QUERIES = QUERIES_,
        KEYS = DIM > 128 ? 32 : 64,         /* of a tile; divides PART */
        CHUNKS = DIM / 8,                   /* of 16 bytes in a row */
        STRIDE = CHUNKS | 1,                /* odd: threads that read a row each then meet in no bank */
        LOADS = KEYS * CHUNKS / THREADS,    /* chunks that a thread brings */
        SCORE_WAYS = THREADS / KEYS,        /* scores: a thread has one key, and every SCORE_WAYS-th query */
        SCORES = QUERIES / SCORE_WAYS,
        WEIGHTS = QUERIES / WARPS,          /* weights: a warp has every WARPS-th query */
        COLUMNS = DIM / 4,                  /* values: a thread has four dims, and every VALUE_WAYS-th query */
        VALUE_WAYS = THREADS / COLUMNS,
        VALUES = QUERIES > VALUE_WAYS ? QUERIES / VALUE_WAYS : 1,
        SHARED = KEYS * STRIDE * 16 + QUERIES * (DIM + KEYS + 1) * 4,
    };
};

struct decode_args {
    const uint4 *k, *v;
    const float *q;
    float *m, *l, *o;
    float scale;
    uint32_t cap, group, d, n_head;
    bool bf16_k, bf16_v;
    uint32_t n, per_part;                   /* rows in all, and of a part */
    uint32_t end[MAX_RUNS], row[MAX_RUNS];  /* run i has the rows row[i] .. for those before end[i] and not before end[i - 1] */
};

static __device__ uint32_t row_of(const decode_args &a, uint32_t i)
{
    return i < a.end[0] ? a.row[0] + i : i < a.end[1] ? a.row[1] + (i - a.end[0]) : a.row[2] + (i - a.end[1]);
}

/* A thread's chunks of the rows [at, at + n), zeros past them. */
template <class C> static __device__ void fetch(uint4 *to, const uint4 *rows, const decode_args &a, uint32_t at, uint32_t n)
{
#pragma unroll
    for (int i = 0; i < C::LOADS; i++) {
        uint32_t at_thread = threadIdx.x + i * THREADS, key = at_thread / C::CHUNKS, chunk = at_thread % C::CHUNKS;
        to[i] = key < n && chunk < a.d / 8 ? rows[((size_t)blockIdx.y * a.cap + row_of(a, at + key)) * (a.d / 8) + chunk] : make_uint4(0, 0, 0, 0);
    }
}

template <class C> static __device__ void place(uint4 *tile, const uint4 *from)
{
#pragma unroll
    for (int i = 0; i < C::LOADS; i++) {
        uint32_t at_thread = threadIdx.x + i * THREADS;
        tile[at_thread / C::CHUNKS * C::STRIDE + at_thread % C::CHUNKS] = from[i];
    }
}

/* s[query][key] = q . k */
template <class C, bool BF16> static __device__ void score(float *s, const float *q, const uint4 *tile, uint32_t d)
{
    uint32_t key = threadIdx.x % C::KEYS, way = threadIdx.x / C::KEYS;
    float even[C::SCORES] = {}, odd[C::SCORES] = {};
    for (uint32_t chunk = 0; chunk < d / 8; chunk++) {
        float k[8];
        unpack8<BF16>(k, tile[key * C::STRIDE + chunk]);
#pragma unroll
        for (int i = 0; i < C::SCORES; i++) {
            const float4 *x = reinterpret_cast<const float4 *>(q + (way + i * C::SCORE_WAYS) * C::DIM) + chunk * 2;
            float4 x0 = x[0], x1 = x[1];
            even[i] = fmaf(x0.x, k[0], fmaf(x0.z, k[2], fmaf(x1.x, k[4], fmaf(x1.z, k[6], even[i]))));
            odd[i] = fmaf(x0.y, k[1], fmaf(x0.w, k[3], fmaf(x1.y, k[5], fmaf(x1.w, k[7], odd[i]))));
        }
    }
#pragma unroll
    for (int i = 0; i < C::SCORES; i++)
        s[(way + i * C::SCORE_WAYS) * C::KEYS + key] = even[i] + odd[i];
}

/* s becomes the weights of the tile's n keys and zeros; rescale[query]: what older sums are multiplied by. */
template <class C> static __device__ void weigh(float *s, float *rescale, float *m, float *l, uint32_t n)
{
    enum { EACH = C::KEYS / GPU_WARP };
    uint32_t lane = threadIdx.x % GPU_WARP, warp = threadIdx.x / GPU_WARP;
#pragma unroll
    for (int i = 0; i < C::WEIGHTS; i++) {
        uint32_t query = warp + i * WARPS;
        float x[EACH], max = m[i], sum = 0;
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            uint32_t key = lane + j * GPU_WARP;
            x[j] = key < n ? s[query * C::KEYS + key] : -INFINITY;
            max = fmaxf(max, x[j]);
        }
        max = warp_max(max, GPU_WARP);
        float base = softmax_base(max);
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            float p = weight(x[j] - base);
            s[query * C::KEYS + lane + j * GPU_WARP] = p;
            sum += p;
        }
        float f = weight(m[i] - base);
        l[i] = fmaf(l[i], f, warp_sum(sum, GPU_WARP));
        m[i] = max;
        if (lane == 0)
            rescale[query] = f;
    }
}

/* o[i] += the sum of p v over the tile's n keys, by four: past n both are zero. */
template <class C, bool BF16> static __device__ void add_values(float4 *o, const float *p, const uint4 *tile, uint32_t n)
{
    uint32_t column = threadIdx.x % C::COLUMNS, way = threadIdx.x / C::COLUMNS;
    const uint2 *v = reinterpret_cast<const uint2 *>(tile) + column;
    for (uint32_t key = 0; key < n; key += 4) {
        float4 x[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            x[j] = unpack4<BF16>(v[(key + j) * C::STRIDE * 2]);
#pragma unroll
        for (int i = 0; i < C::VALUES; i++) {
            float4 w = *reinterpret_cast<const float4 *>(p + (way + i * C::VALUE_WAYS) * C::KEYS + key);
            o[i].x = fmaf(w.x, x[0].x, fmaf(w.y, x[1].x, fmaf(w.z, x[2].x, fmaf(w.w, x[3].x, o[i].x))));
            o[i].y = fmaf(w.x, x[0].y, fmaf(w.y, x[1].y, fmaf(w.z, x[2].y, fmaf(w.w, x[3].y, o[i].y))));
            o[i].z = fmaf(w.x, x[0].z, fmaf(w.y, x[1].z, fmaf(w.z, x[2].z, fmaf(w.w, x[3].z, o[i].z))));
            o[i].w = fmaf(w.x, x[0].w, fmaf(w.y, x[1].w, fmaf(w.z, x[2].w, fmaf(w.w, x[3].w, o[i].w))));
        }
    }
}

/* Block (part, KV head). Without keys it finds l = 0. */
template <class C> static __global__ void __launch_bounds__(THREADS, 3) attend_decode(decode_args a)
{
    GPU_SHARED(uint4, tile);                                        /* [KEYS][STRIDE]: keys, then values */
    float *s = reinterpret_cast<float *>(tile + C::KEYS * C::STRIDE); /* [QUERIES][KEYS] */
    float *q = s + C::QUERIES * C::KEYS;                            /* [QUERIES][DIM] */
    float *rescale = q + C::QUERIES * C::DIM;                       /* [QUERIES] */
    size_t first = (size_t)blockIdx.x * a.n_head + blockIdx.y * a.group; /* of this block's (m, l, o) */
    uint32_t from = min(blockIdx.x * a.per_part, a.n), to = min(a.n - from, a.per_part) + from;
    for (uint32_t i = threadIdx.x; i < C::QUERIES * C::DIM; i += THREADS) {
        uint32_t query = i / C::DIM, j = i % C::DIM;
        q[i] = query < a.group && j < a.d ? a.q[((size_t)blockIdx.y * a.group + query) * a.d + j] * a.scale : 0;
    }
    float m[C::WEIGHTS], l[C::WEIGHTS];
    float4 o[C::VALUES];
    for (int i = 0; i < C::WEIGHTS; i++) {
        m[i] = -INFINITY;
        l[i] = 0;
    }
    for (int i = 0; i < C::VALUES; i++)
        o[i] = make_float4(0, 0, 0, 0);
    uint32_t column = threadIdx.x % C::COLUMNS, way = threadIdx.x / C::COLUMNS;
    bool has_values = way < C::QUERIES && column * 4 < a.d;
    for (uint32_t at = from; at < to; at += C::KEYS) {
        uint32_t n = min(to - at, (uint32_t)C::KEYS);
        uint4 keys[C::LOADS], values[C::LOADS];
        fetch<C>(keys, a.k, a, at, n);
        fetch<C>(values, a.v, a, at, n);
        __syncthreads(); /* the tile before is done with */
        place<C>(tile, keys);
        __syncthreads();
        if (a.bf16_k)
            score<C, true>(s, q, tile, a.d);
        else
            score<C, false>(s, q, tile, a.d);
        __syncthreads();
        place<C>(tile, values);
        weigh<C>(s, rescale, m, l, n);
        __syncthreads();
        if (!has_values)
            continue;
        for (int i = 0; i < C::VALUES; i++) {
            float f = rescale[way + i * C::VALUE_WAYS];
            o[i] = make_float4(o[i].x * f, o[i].y * f, o[i].z * f, o[i].w * f);
        }
        if (a.bf16_v)
            add_values<C, true>(o, s, tile, n);
        else
            add_values<C, false>(o, s, tile, n);
    }
    for (int i = 0; i < C::WEIGHTS; i++) {
        uint32_t query = threadIdx.x / GPU_WARP + i * WARPS;
        if (threadIdx.x % GPU_WARP == 0 && query < a.group) {
            a.m[first + query] = m[i];
            a.l[first + query] = l[i];
        }
    }
    for (int i = 0; i < C::VALUES; i++) {
        uint32_t query = way + i * C::VALUE_WAYS;
        if (has_values && query < a.group)
            reinterpret_cast<float4 *>(a.o)[(first + query) * (a.d / 4) + column] = o[i];
    }
}

uint32_t gpu_attend_parts(uint32_t n_rows)
{
    uint32_t n = n_rows / PART + (n_rows % PART != 0);
    return n < (uint32_t)MAX_PARTS ? n : (uint32_t)MAX_PARTS;
}

template <class C> static int launch(gpu_context *g, const decode_args &a, uint32_t n_part, uint32_t n_head_kv)
{
    return GPU_LAUNCH(g, attend_decode<C>, dim3(n_part, n_head_kv), THREADS, C::SHARED, a);
}

template <int DIM> static int launch_dim(gpu_context *g, const decode_args &a, uint32_t n_part, uint32_t n_head_kv)
{
    if (a.group <= 4)
        return launch<decode_shape<DIM, 4>>(g, a, n_part, n_head_kv);
    if (a.group <= 8)
        return launch<decode_shape<DIM, 8>>(g, a, n_part, n_head_kv);
    return launch<decode_shape<DIM, 16>>(g, a, n_part, n_head_kv);
}

int gpu_attend(gpu_context *g, const gpu_parts *parts, uint32_t n_part, const float *q, float scale, const gpu_kv *kv, const gpu_rows *runs, uint32_t n_runs)
{
    assert(kv->group >= 1 && kv->group <= 16 && kv->d >= 8 && kv->d <= 256 && kv->d % 8 == 0 && n_runs <= MAX_RUNS);
    decode_args a = {};
    a.k = static_cast<const uint4 *>(kv->k);
    a.v = static_cast<const uint4 *>(kv->v);
    a.q = q;
    a.m = parts->m;
    a.l = parts->l;
    a.o = parts->o;
    a.scale = scale;
    a.cap = kv->cap;
    a.group = kv->group;
    a.d = kv->d;
    a.n_head = kv->n_head_kv * kv->group;
    a.bf16_k = kv->type_k == GPU_KV_BF16;
    a.bf16_v = kv->type_v == GPU_KV_BF16;
    for (uint32_t i = 0; i < MAX_RUNS; i++) {
        if (i < n_runs) {
            assert(runs[i].lo <= runs[i].hi && runs[i].hi <= kv->cap);
            a.row[i] = runs[i].lo;
            a.n += runs[i].hi - runs[i].lo;
        }
        a.end[i] = a.n;
    }
    if (n_part == 0)
        return gpu_status(g);
    uint32_t used = gpu_attend_parts(a.n);
    used = used < 1 ? 1 : used < n_part ? used : n_part;
    a.per_part = gpu_blocks(gpu_blocks(a.n, used), PART) * PART;
    if (kv->d <= 64)
        return launch_dim<64>(g, a, n_part, kv->n_head_kv);
    if (kv->d <= 128)
        return launch_dim<128>(g, a, n_part, kv->n_head_kv);
    return launch_dim<256>(g, a, n_part, kv->n_head_kv);
}

/* ---- merge ---------------------------------------------------------------------------------------------------------- */

/* Block: a query head. A thread has four dims of every way-th part; the ways are added up in order at the end. */
static __global__ void __launch_bounds__(MERGE_THREADS) attend_merge(float4 *out, const float *m, const float *l, const float4 *o, uint32_t n_part, uint32_t n_head,
                                                                     uint32_t columns)
{
    GPU_SHARED(float4, sums);                                           /* [ways][columns] */
    float *f = reinterpret_cast<float *>(sums + MERGE_THREADS);         /* [MERGE_PARTS] */
    float *scratch = f + MERGE_PARTS;                                   /* [warps] */
    uint32_t head = blockIdx.x, lane = threadIdx.x % GPU_WARP, warp = threadIdx.x / GPU_WARP, n_warp = MERGE_THREADS / GPU_WARP;
    uint32_t ways = MERGE_THREADS / columns, way = threadIdx.x / columns, column = threadIdx.x % columns;
    float max = -INFINITY, total = 0;
    for (uint32_t i = threadIdx.x; i < n_part; i += MERGE_THREADS)
        if (l[(size_t)i * n_head + head] > 0)
            max = fmaxf(max, m[(size_t)i * n_head + head]);
    max = warp_max(max, GPU_WARP);
    if (lane == 0)
        scratch[warp] = max;
    __syncthreads();
    for (uint32_t i = 0; i < n_warp; i++)
        max = fmaxf(max, scratch[i]);
    float4 sum = make_float4(0, 0, 0, 0);
    for (uint32_t base = 0; base < n_part; base += MERGE_PARTS) {
        uint32_t n = min(n_part - base, (uint32_t)MERGE_PARTS);
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n; i += MERGE_THREADS) {
            size_t at = (size_t)(base + i) * n_head + head;
            f[i] = l[at] > 0 ? weight(m[at] - max) : 0;
            total += f[i] > 0 ? f[i] * l[at] : 0;
        }
        __syncthreads();
        for (uint32_t i = way; way < ways && i < n; i += ways) {
            if (!(f[i] > 0))
                continue; /* an empty part's o is not looked at */
            float4 x = o[((size_t)(base + i) * n_head + head) * columns + column];
            sum = make_float4(fmaf(f[i], x.x, sum.x), fmaf(f[i], x.y, sum.y), fmaf(f[i], x.z, sum.z), fmaf(f[i], x.w, sum.w));
        }
    }
    total = warp_sum(total, GPU_WARP);
    __syncthreads();
    if (lane == 0)
        scratch[warp] = total;
    if (way < ways)
        sums[threadIdx.x] = sum;
    __syncthreads();
    total = 0;
    for (uint32_t i = 0; i < n_warp; i++)
        total += scratch[i];
    for (uint32_t i = 1; way == 0 && i < ways; i++) {
        float4 x = sums[i * columns + column];
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
    }
    if (way == 0)
        out[(size_t)head * columns + column] =
            total > 0 ? make_float4(sum.x / total, sum.y / total, sum.z / total, sum.w / total) : make_float4(0, 0, 0, 0);
}

int gpu_merge(gpu_context *g, float *out, const gpu_parts *parts, uint32_t n_part, uint32_t n_head, uint32_t d)
{
    assert(d >= 8 && d <= 4 * MERGE_THREADS && d % 4 == 0);
    if (n_head == 0)
        return gpu_status(g);
    size_t shared = MERGE_THREADS * sizeof(float4) + (MERGE_PARTS + MERGE_THREADS / GPU_WARP) * sizeof(float);
    return GPU_LAUNCH(g, attend_merge, n_head, MERGE_THREADS, shared, reinterpret_cast<float4 *>(out), parts->m, parts->l, reinterpret_cast<const float4 *>(parts->o),
                      n_part, n_head, d / 4);
}
