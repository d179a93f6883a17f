#include "distance_narrow.h"

#include <immintrin.h>
#include <string.h>

/* Codes beyond dim are 0, and whole blocks are there. */
static void widen_q8_0(float *dst, const uint8_t *src, uint32_t dim_pad)
{
    for (uint32_t j = 0; j < dim_pad; j += 8) {
        const uint8_t *block = src + (size_t)(j / IDX_Q8_BLOCK) * IDX_Q8_BYTES;
        uint16_t d;
        memcpy(&d, block, 2);
        __m128i q = _mm_loadl_epi64((const __m128i *)(const void *)(block + 2 + j % IDX_Q8_BLOCK));
        _mm256_store_ps(dst + j, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)), _mm256_set1_ps(_cvtsh_ss(d))));
    }
}

static void widen_row(float *dst, const uint8_t *src, idx_type type, uint32_t dim, uint32_t dim_pad)
{
    uint32_t j = 0;
    if (type == IDX_Q8_0) {
        widen_q8_0(dst, src, dim_pad);
        return;
    }
    for (; j + 8 <= dim; j += 8) {
        __m256 v;
        if (type == IDX_F32) {
            v = _mm256_loadu_ps((const float *)(const void *)(src + 4 * (size_t)j));
        } else {
            __m128i h = _mm_loadu_si128((const __m128i *)(const void *)(src + 2 * (size_t)j));
            v = type == IDX_F16 ? _mm256_cvtph_ps(h) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
        }
        _mm256_store_ps(dst + j, v);
    }
    for (; j < dim; j++) {
        uint16_t h;
        if (type == IDX_F32) {
            memcpy(dst + j, src + 4 * (size_t)j, 4);
            continue;
        }
        memcpy(&h, src + 2 * (size_t)j, 2);
        uint32_t u = (uint32_t)h << 16;
        if (type == IDX_F16)
            dst[j] = _cvtsh_ss(h);
        else
            memcpy(dst + j, &u, 4);
    }
    for (; j < dim_pad; j++)
        dst[j] = 0;
}

static void widen(float *dst, const idx_rows *rows, const uint32_t *ids, uint32_t first, uint32_t n)
{
    uint32_t dim_pad = idx_dim_pad(rows->dim);
    for (uint32_t i = 0; i < n; i++)
        widen_row(dst + (size_t)i * dim_pad, idx_row(rows, ids ? ids[i] : first + i), rows->type, rows->dim, dim_pad);
}

/* Sums of 8 vectors, in lane order. */
static inline __m256 sum8(const __m256 *a)
{
    __m256 t0 = _mm256_hadd_ps(a[0], a[1]), t1 = _mm256_hadd_ps(a[2], a[3]);
    __m256 t2 = _mm256_hadd_ps(a[4], a[5]), t3 = _mm256_hadd_ps(a[6], a[7]);
    __m256 u0 = _mm256_hadd_ps(t0, t1), u1 = _mm256_hadd_ps(t2, t3);
    return _mm256_add_ps(_mm256_permute2f128_ps(u0, u1, 0x20), _mm256_permute2f128_ps(u0, u1, 0x31));
}

static void dots(const float *rows, const float *q, uint32_t nq, uint32_t dim_pad, float scale, float *out, size_t ld)
{
    for (uint32_t h = 0; h < nq; h++, q += dim_pad) {
        for (uint32_t half = 0; half < IDX_BLOCK; half += 8) {
            const float *r = rows + (size_t)half * dim_pad;
            __m256 acc[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++)
                acc[i] = _mm256_setzero_ps();
            for (uint32_t j = 0; j < dim_pad; j += 8) {
                __m256 v = _mm256_load_ps(q + j);
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++)
                    acc[i] = _mm256_fmadd_ps(_mm256_load_ps(r + (size_t)i * dim_pad + j), v, acc[i]);
            }
            _mm256_storeu_ps(out + h * ld + half, _mm256_mul_ps(sum8(acc), _mm256_set1_ps(scale)));
        }
    }
}

static float max_of(const float *x, uint32_t n, float init)
{
    __m256 m = _mm256_set1_ps(init);
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
        m = _mm256_max_ps(_mm256_loadu_ps(x + i), m); /* the second operand wins against NaN */
    float lane[8];
    _mm256_storeu_ps(lane, m);
    for (int l = 0; l < 8; l++)
        init = lane[l] > init ? lane[l] : init;
    for (; i < n; i++)
        init = x[i] > init ? x[i] : init;
    return init;
}

/* There is no compress instruction, and few scores pass: one store per passing lane. */
static uint32_t filter(const uint32_t *ids, uint32_t first, const float *scores, uint32_t n, float thr, uint32_t *ret_ids,
                       float *ret_scores)
{
    uint32_t kept = 0, i = 0;
    __m256 t = _mm256_set1_ps(thr);
    for (; i + 8 <= n; i += 8) {
        uint32_t mask = (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(scores + i), t, _CMP_GE_OQ));
        for (; mask; mask &= mask - 1) {
            uint32_t at = i + (uint32_t)__builtin_ctz(mask);
            ret_ids[kept] = ids ? ids[at] : first + at;
            ret_scores[kept++] = scores[at];
        }
    }
    for (; i < n; i++) {
        float s = scores[i];
        ret_ids[kept] = ids ? ids[i] : first + i;
        ret_scores[kept] = s;
        kept += s >= thr;
    }
    return kept;
}

static void split(const float *x, uint32_t n, float pivot, float *gt, uint32_t *ret_gt, float *lt, uint32_t *ret_lt)
{
    idx_kernels_scalar.split(x, n, pivot, gt, ret_gt, lt, ret_lt);
}

static void visible(const float *scale, const uint16_t *ids, uint32_t n, uint32_t offset, uint32_t rows, float *out)
{
    idx_visible(scale, ids, n, offset, rows, out);
}

static int32_t round_query(const float *v, float inverse, const float *up, uint32_t n, int8_t *x)
{
    return idx_kernels_scalar.round(v, inverse, up, n, x);
}

static void reach(const float *score, const float *spread, const float *votes, uint32_t n, float size, float margin, float least, uint32_t bit, uint32_t *want)
{
    idx_reach(score, spread, votes, n, size, margin, least, bit, want);
}

#define INLINE static inline __attribute__((always_inline))

/* Half a block (8 slots) for ng (1..4) heads. The halves of the query's bytes are small enough that no pair of products saturates. */
INLINE void codes_half(const int ng, const uint8_t *codes, const float *scale, uint32_t quads, const idx_code_query *q, float *out,
                       size_t ld, __m256 *best)
{
    __m256i hi[4], lo[4], ones = _mm256_set1_epi16(1);
    for (int g = 0; g < ng; g++) {
        hi[g] = _mm256_setzero_si256();
        lo[g] = _mm256_set1_epi32(q[g].bias);
    }
    for (uint32_t j = 0; j < quads; j++) {
        __m256i u = _mm256_load_si256((const __m256i *)(const void *)(codes + (size_t)j * 64));
        _mm_prefetch((const char *)codes + (size_t)j * 64 + IDX_CODES_FAR, _MM_HINT_T1);
        _mm_prefetch((const char *)codes + (size_t)j * 64 + IDX_CODES_NEAR, _MM_HINT_T0);
        for (int g = 0; g < ng; g++) {
            __m256i a = _mm256_maddubs_epi16(u, _mm256_set1_epi32(((const int32_t *)(const void *)q[g].hi)[j]));
            __m256i b = _mm256_maddubs_epi16(u, _mm256_set1_epi32(((const int32_t *)(const void *)q[g].lo)[j]));
            hi[g] = _mm256_add_epi32(hi[g], _mm256_madd_epi16(a, ones));
            lo[g] = _mm256_add_epi32(lo[g], _mm256_madd_epi16(b, ones));
        }
    }
    __m256 s = _mm256_load_ps(scale);
    for (int g = 0; g < ng; g++) {
        __m256 dot = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_slli_epi32(hi[g], 4), lo[g]));
        __m256 score = _mm256_add_ps(_mm256_mul_ps(dot, _mm256_mul_ps(s, _mm256_set1_ps(q[g].scale))), _mm256_set1_ps(q[g].offset));
        _mm256_storeu_ps(out + (size_t)g * ld, score);
        best[g] = _mm256_max_ps(score, best[g]); /* the second operand wins against NaN */
    }
}

INLINE void codes_heads(const int ng, const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t quads, const idx_code_query *q,
                        float *out, size_t ld, float *ret_best)
{
    __m256 best[4];
    for (int g = 0; g < ng; g++)
        best[g] = _mm256_set1_ps(-__builtin_inff());
    for (uint32_t b = 0; b < 2 * n_blocks; b++)
        codes_half(ng, codes + (size_t)(b / 2) * quads * 64 + b % 2 * 32, scale + b * 8, quads, q, out + b * 8, ld, best);
    for (int g = 0; g < ng; g++) {
        float lane[8];
        _mm256_storeu_ps(lane, best[g]);
        ret_best[g] = max_of(lane, 8, -__builtin_inff());
    }
}

static void codes(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t quads, const idx_code_query *q, uint32_t nq,
                  float *out, size_t ld, float *ret_best)
{
    for (uint32_t h = 0; h < nq; h += 4, q += 4, out += 4 * ld, ret_best += 4) {
        if (nq - h >= 4)
            codes_heads(4, codes, scale, n_blocks, quads, q, out, ld, ret_best);
        else if (nq - h == 3)
            codes_heads(3, codes, scale, n_blocks, quads, q, out, ld, ret_best);
        else if (nq - h == 2)
            codes_heads(2, codes, scale, n_blocks, quads, q, out, ld, ret_best);
        else
            codes_heads(1, codes, scale, n_blocks, quads, q, out, ld, ret_best);
    }
}

static void node(const uint8_t *block, const float *scale, uint32_t quads, const idx_code_query *q, uint32_t heads, float *out, float *best)
{
    idx_node(codes, block, scale, quads, q, heads, out, best);
}

/* exp by Taylor's polynomial of degree 6 on [-ln 2 / 2, ln 2 / 2], then the exponent. */
INLINE __m256 weigh8(__m256 d)
{
    __m256 in = _mm256_cmp_ps(d, _mm256_set1_ps(-87), _CMP_GE_OQ);
    d = _mm256_and_ps(d, in);
    __m256 k = _mm256_round_ps(_mm256_mul_ps(d, _mm256_set1_ps(0x1.715476p0f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 f = _mm256_fnmadd_ps(k, _mm256_set1_ps(0x1.62e4p-1f), d);
    f = _mm256_fnmadd_ps(k, _mm256_set1_ps(0x1.7f7d1cp-20f), f);
    __m256 p = _mm256_set1_ps(0x1.6c16c2p-10f);
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0x1.111112p-7f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0x1.555556p-5f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0x1.555556p-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(0x1p-1f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1));
    __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(k), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(e)), in);
}

static void weigh(const float *x, uint32_t n, float m, float *out)
{
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, weigh8(_mm256_sub_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(m))));
    if (i < n) {
        float rest[8] = {0};
        memcpy(rest, x + i, (n - i) * sizeof *x);
        _mm256_storeu_ps(out + i, weigh8(_mm256_sub_ps(_mm256_loadu_ps(rest), _mm256_set1_ps(m))));
    }
}

static float sum(const float *x, uint32_t n)
{
    __m256 s = _mm256_setzero_ps();
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
        s = _mm256_add_ps(s, _mm256_loadu_ps(x + i));
    float lane[8], total = 0;
    _mm256_storeu_ps(lane, s);
    for (int l = 0; l < 8; l++)
        total += lane[l];
    for (; i < n; i++)
        total += x[i];
    return total;
}

static void sums(const float *x, uint32_t nq, uint32_t from, uint32_t n, const uint32_t *end, uint32_t x0, float *const *to)
{
    for (uint32_t c = 0; from < n; c++) {
        uint32_t stop = end[c] - x0 < n ? end[c] - x0 : n;
        for (uint32_t h = 0; h < nq; h++)
            to[h][c] += sum(x + (size_t)h * IDX_TILE + from, stop - from);
        from = stop;
    }
}

/* 4 rows by half a block of centroids in registers. */
INLINE void nearest_half(const int8_t *rows, uint32_t quads, const uint8_t *panel, const int32_t *half, uint32_t c, __m256i *best, __m256i *at)
{
    __m256i acc[4], ones = _mm256_set1_epi16(1);
    for (int r = 0; r < 4; r++)
        acc[r] = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_loadu_si256((const __m256i *)(const void *)half));
    for (uint32_t j = 0; j < quads; j++) {
        __m256i u = _mm256_load_si256((const __m256i *)(const void *)(panel + (size_t)j * 64));
        for (int r = 0; r < 4; r++) {
            __m256i x = _mm256_set1_epi32(((const int32_t *)(const void *)(rows + (size_t)r * 4 * quads))[j]);
            acc[r] = _mm256_add_epi32(acc[r], _mm256_madd_epi16(_mm256_maddubs_epi16(u, x), ones));
        }
    }
    __m256i id = _mm256_add_epi32(_mm256_set1_epi32((int)c), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    for (int r = 0; r < 4; r++) {
        __m256i more = _mm256_cmpgt_epi32(acc[r], best[r]);
        best[r] = _mm256_blendv_epi8(best[r], acc[r], more);
        at[r] = _mm256_blendv_epi8(at[r], id, more);
    }
}

static void nearest(const int8_t *rows, uint32_t quads, const uint8_t *panel, const int32_t *half, uint32_t n_blocks, uint32_t *ret)
{
    for (uint32_t r = 0; r < IDX_BLOCK; r += 4) {
        __m256i best[4], at[4];
        for (int i = 0; i < 4; i++) {
            best[i] = _mm256_set1_epi32(INT32_MIN);
            at[i] = _mm256_setzero_si256();
        }
        for (uint32_t c = 0; c < n_blocks * IDX_BLOCK; c += 8)
            nearest_half(rows + (size_t)r * 4 * quads, quads, panel + (size_t)(c / IDX_BLOCK) * quads * 64 + c % IDX_BLOCK * 4, half + c, c, best, at);
        for (uint32_t i = 0; i < 4; i++) {
            int32_t b[8], a[8];
            uint32_t l = 0;
            _mm256_storeu_si256((__m256i *)(void *)b, best[i]);
            _mm256_storeu_si256((__m256i *)(void *)a, at[i]);
            for (uint32_t k = 1; k < 8; k++)
                if (b[k] > b[l] || (b[k] == b[l] && a[k] < a[l]))
                    l = k;
            ret[r + i] = (uint32_t)a[l];
        }
    }
}

const idx_kernels idx_kernels_avx2 = {widen, dots, max_of, filter, split, node, reach, codes, visible, weigh, sums, nearest, round_query, idx_narrow_avx2};
