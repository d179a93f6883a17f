/* Compiled with -mavx512bf16 among others, but the level promises no BF16: no such instruction may be used here. */
#include "distance_avx512.h"
#include "distance_narrow.h"

#include <string.h>

static inline void widen_row(float *dst, const uint8_t *src, idx_type type, uint32_t dim, uint32_t dim_pad)
{
    for (uint32_t j = 0; j < dim_pad; j += 16) {
        __mmask16 m = dim - j >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << (dim - j)) - 1);
        __m512 v;
        if (type == IDX_F32) {
            v = _mm512_maskz_loadu_ps(m, src + 4 * (size_t)j);
        } else if (type == IDX_Q8_0) { /* codes beyond dim are 0, and whole blocks are there */
            const uint8_t *block = src + (size_t)(j / IDX_Q8_BLOCK) * IDX_Q8_BYTES;
            uint16_t d;
            memcpy(&d, block, 2);
            __m128i q = _mm_loadu_si128((const __m128i *)(const void *)(block + 2 + j % IDX_Q8_BLOCK));
            v = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q)), _mm512_set1_ps(_cvtsh_ss(d)));
        } else {
            __m256i h = _mm256_maskz_loadu_epi16(m, src + 2 * (size_t)j);
            v = type == IDX_F16 ? _mm512_cvtph_ps(h) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
        }
        _mm512_store_ps(dst + j, v);
    }
}

static void widen(float *dst, const idx_rows *rows, const uint32_t *ids, uint32_t first, uint32_t n)
{
    uint32_t dim_pad = idx_dim_pad(rows->dim);
    for (uint32_t i = 0; i < n; i++)
        widen_row(dst + (size_t)i * dim_pad, idx_row(rows, ids ? ids[i] : first + i), rows->type, rows->dim, dim_pad);
}

static inline __m512 add_pairs_ps(__m512 a, __m512 b)
{
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
}

static inline __m512 add_pairs_pd(__m512 a, __m512 b)
{
    __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

static inline __m512 add_quarters(__m512 a, __m512 b)
{
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* Sums of 16 vectors, in lane order: a transposition that adds on the way. */
static inline __m512 sum16(const __m512 *a)
{
    __m512 u[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        u[i] = add_pairs_pd(add_pairs_ps(a[4 * i], a[4 * i + 1]), add_pairs_ps(a[4 * i + 2], a[4 * i + 3]));
    return add_quarters(add_quarters(u[0], u[1]), add_quarters(u[2], u[3]));
}

static void dots(const float *rows, const float *q, uint32_t nq, uint32_t dim_pad, float scale, float *out, size_t ld)
{
    for (uint32_t h = 0; h < nq; h++, q += dim_pad) {
        __m512 acc[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            acc[i] = _mm512_setzero_ps();
        for (uint32_t j = 0; j < dim_pad; j += 16) {
            __m512 v = _mm512_load_ps(q + j);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
                acc[i] = _mm512_fmadd_ps(_mm512_load_ps(rows + (size_t)i * dim_pad + j), v, acc[i]);
        }
        _mm512_storeu_ps(out + h * ld, _mm512_mul_ps(sum16(acc), _mm512_set1_ps(scale)));
    }
}

static inline __mmask16 tail_mask(uint32_t left)
{
    return left >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << left) - 1);
}

static float max_of(const float *x, uint32_t n, float init)
{
    __m512 m = _mm512_set1_ps(init);
    for (uint32_t i = 0; i < n; i += 16) {
        __mmask16 t = tail_mask(n - i);
        m = _mm512_mask_max_ps(m, t, _mm512_maskz_loadu_ps(t, x + i), m); /* the second operand wins against NaN */
    }
    return _mm512_reduce_max_ps(m);
}

/* Compress to a register, then store whole vectors: the compressing store is microcode on Zen 4. No branch where nothing is kept: nobody could predict it. */
static uint32_t filter(const uint32_t *ids, uint32_t first, const float *scores, uint32_t n, float thr, uint32_t *ret_ids,
                       float *ret_scores)
{
    uint32_t kept = 0;
    __m512 t = _mm512_set1_ps(thr);
    __m512i id = _mm512_add_epi32(_mm512_set1_epi32((int)first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (uint32_t i = 0; i < n; i += 16) {
        __mmask16 in = tail_mask(n - i);
        __m512 s = _mm512_maskz_loadu_ps(in, scores + i);
        __mmask16 m = _mm512_mask_cmp_ps_mask(in, s, t, _CMP_GE_OQ);
        __m512i v = ids ? _mm512_maskz_loadu_epi32(in, ids + i) : id;
        _mm512_storeu_si512(ret_ids + kept, _mm512_maskz_compress_epi32(m, v));
        _mm512_storeu_ps(ret_scores + kept, _mm512_maskz_compress_ps(m, s));
        kept += (uint32_t)__builtin_popcount(m);
        id = _mm512_add_epi32(id, _mm512_set1_epi32(16));
    }
    return kept;
}

static void split(const float *x, uint32_t n, float pivot, float *gt, uint32_t *ret_gt, float *lt, uint32_t *ret_lt)
{
    uint32_t n_gt = 0, n_lt = 0;
    __m512 p = _mm512_set1_ps(pivot);
    for (uint32_t i = 0; i < n; i += 16) {
        __mmask16 in = tail_mask(n - i);
        __m512 s = _mm512_maskz_loadu_ps(in, x + i);
        __mmask16 g = _mm512_mask_cmp_ps_mask(in, s, p, _CMP_GT_OQ), l = _mm512_mask_cmp_ps_mask(in, s, p, _CMP_LT_OQ);
        _mm512_storeu_ps(gt + n_gt, _mm512_maskz_compress_ps(g, s));
        _mm512_storeu_ps(lt + n_lt, _mm512_maskz_compress_ps(l, s));
        n_gt += (uint32_t)__builtin_popcount(g);
        n_lt += (uint32_t)__builtin_popcount(l);
    }
    *ret_gt = n_gt;
    *ret_lt = n_lt;
}

static void visible(const float *scale, const uint16_t *ids, uint32_t n, uint32_t offset, uint32_t rows, float *out)
{
    for (uint32_t i = 0; i < n; i += 16) {
        __m512i row = _mm512_add_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(ids + i))), _mm512_set1_epi32((int)offset));
        __mmask16 in = _mm512_cmplt_epu32_mask(row, _mm512_set1_epi32((int)rows));
        _mm512_storeu_ps(out + i, _mm512_mask_loadu_ps(_mm512_set1_ps(__builtin_nanf("")), in, scale + i));
    }
}

static int32_t round_query(const float *v, float inverse, const float *up, uint32_t n, int8_t *x)
{
    __m512i sum = _mm512_setzero_si512();
    __m512 add = _mm512_add_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(up)), _mm512_set1_ps(128)), unit = _mm512_set1_ps(inverse);
    for (uint32_t j = 0; j < n; j += 16) {
        __m512i code = _mm512_sub_epi32(_mm512_cvttps_epi32(_mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(v + j), unit), add)), _mm512_set1_epi32(128));
        _mm_storeu_si128((__m128i *)(void *)(x + j), _mm512_cvtepi32_epi8(code));
        sum = _mm512_add_epi32(sum, code);
    }
    return _mm512_reduce_add_epi32(sum);
}

static void reach(const float *score, const float *spread, const float *votes, uint32_t n, float size, float margin, float least, uint32_t bit, uint32_t *want)
{
    idx_reach(score, spread, votes, n, size, margin, least, bit, want);
}

/* nb (1 or 2) blocks for ng (1..8) heads: the sums stay in registers over all dimensions, and four bytes of a query, once loaded, serve all blocks. */
INLINE void codes_blocks(const int nb, const int ng, const uint8_t *codes, const float *scale, uint32_t quads, const idx_code_query *q, float *out, size_t ld, __m512 *best)
{
    __m512i dot[2][8];
    const int8_t *x[8];
    const uint8_t *block[2] = {codes, codes + (size_t)quads * 64};
#pragma GCC unroll 8
    for (int g = 0; g < ng; g++) {
        for (int b = 0; b < nb; b++)
            dot[b][g] = _mm512_set1_epi32(q[g].bias);
        x[g] = q[g].x;
    }
    for (uint32_t j = 0; j < quads; j++) {
        __m512i u[2];
#pragma GCC unroll 2
        for (int b = 0; b < nb; b++) {
            u[b] = _mm512_load_si512(block[b] + (size_t)j * 64);
            _mm_prefetch(block[b] + (size_t)j * 64 + IDX_CODES_FAR, _MM_HINT_T1);
            _mm_prefetch(block[b] + (size_t)j * 64 + IDX_CODES_NEAR, _MM_HINT_T0);
        }
#pragma GCC unroll 8
        for (int g = 0; g < ng; g++) {
            int32_t four;
            memcpy(&four, x[g] + 4 * (size_t)j, 4);
            __m512i v = _mm512_set1_epi32(four);
#pragma GCC unroll 2
            for (int b = 0; b < nb; b++)
                idx_dot4(&dot[b][g], u[b], v);
        }
    }
#pragma GCC unroll 2
    for (int b = 0; b < nb; b++) {
        __m512 s = _mm512_load_ps(scale + b * IDX_BLOCK);
#pragma GCC unroll 8
        for (int g = 0; g < ng; g++) {
            __m512 score = idx_code_scores(dot[b][g], s, &q[g]);
            _mm512_storeu_ps(out + (size_t)g * ld + b * IDX_BLOCK, score);
            best[g] = _mm512_max_ps(score, best[g]); /* the second operand wins against NaN */
        }
    }
}

INLINE void codes_heads(const int ng, const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t quads, const idx_code_query *q,
                        float *out, size_t ld, float *ret_best)
{
    __m512 best[8];
    uint32_t b = 0;
#pragma GCC unroll 8
    for (int g = 0; g < ng; g++)
        best[g] = _mm512_set1_ps(-__builtin_inff());
    for (; b + 2 <= n_blocks; b += 2)
        codes_blocks(2, ng, codes + (size_t)b * quads * 64, scale + b * IDX_BLOCK, quads, q, out + b * IDX_BLOCK, ld, best);
    if (b < n_blocks)
        codes_blocks(1, ng, codes + (size_t)b * quads * 64, scale + b * IDX_BLOCK, quads, q, out + b * IDX_BLOCK, ld, best);
#pragma GCC unroll 8
    for (int g = 0; g < ng; g++)
        ret_best[g] = _mm512_reduce_max_ps(best[g]);
}

static void codes(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t quads, const idx_code_query *q, uint32_t nq,
                  float *out, size_t ld, float *ret_best)
{
    for (uint32_t h = 0; h < nq; h += 8, q += 8, out += 8 * ld, ret_best += 8)
        switch (nq - h) {
#define CASE(N)                                                                                                                            \
    case N:                                                                                                                                \
        codes_heads(N, codes, scale, n_blocks, quads, q, out, ld, ret_best);                                                               \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
        default:
            codes_heads(8, codes, scale, n_blocks, quads, q, out, ld, ret_best);
#undef CASE
        }
}

/* The block is loaded once, where it fits the registers. */
INLINE void node_heads(const uint32_t quads, const bool hold, const uint8_t *block, const float *scale, const idx_code_query *q, uint32_t heads, float *out, float *best)
{
    __m512 s = _mm512_load_ps(scale);
    __m512i u[16];
#pragma GCC unroll 16
    for (uint32_t j = 0; hold && j < 16; j++)
        u[j] = _mm512_load_si512(block + (size_t)j * 64);
    for (; heads; heads &= heads - 1) {
        uint32_t h = (uint32_t)__builtin_ctz(heads);
        const int8_t *x = q[h].x;
        __m512i dot[4] = {_mm512_set1_epi32(q[h].bias), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
#pragma GCC unroll 32
        for (uint32_t j = 0; j < quads; j++) {
            int32_t four;
            memcpy(&four, x + 4 * (size_t)j, 4);
            dot[j % 4] = _mm512_dpbusd_epi32(dot[j % 4], hold ? u[j % 16] : _mm512_load_si512(block + (size_t)j * 64), _mm512_set1_epi32(four));
        }
        __m512 score = idx_code_scores(_mm512_add_epi32(_mm512_add_epi32(dot[0], dot[1]), _mm512_add_epi32(dot[2], dot[3])), s, &q[h]);
        _mm512_storeu_ps(out + h * IDX_BLOCK, score);
        best[h] = _mm512_reduce_max_ps(_mm512_max_ps(score, _mm512_set1_ps(best[h]))); /* the second operand wins against NaN */
    }
}

/* No more is asked for ahead: what comes next is not what lies next. */
static void node(const uint8_t *block, const float *scale, uint32_t quads, const idx_code_query *q, uint32_t heads, float *out, float *best)
{
    if (quads == 16)
        node_heads(16, true, block, scale, q, heads, out, best);
    else if (quads == 32)
        node_heads(32, false, block, scale, q, heads, out, best);
    else
        node_heads(quads, false, block, scale, q, heads, out, best);
}

/* 2^t: the nearest integer of t, from the bits of t + 1.5 * 2^23, is added to the exponent; of what is left, in [-1/2, 1/2], a polynomial of degree 4, exact
 * at 0, within 2^-18. (VREDUCE and VSCALEF take twice as long as a product.) */
static void weigh(const float *x, uint32_t n, float m, float *out)
{
    const __m512 magic = _mm512_set1_ps(0x1.8p23f);
    for (uint32_t i = 0; i < n; i += 16) {
        __m512 d = _mm512_sub_ps(_mm512_maskz_loadu_ps(tail_mask(n - i), x + i), _mm512_set1_ps(m));
        __mmask16 in = _mm512_cmp_ps_mask(d, _mm512_set1_ps(-87), _CMP_GE_OQ);
        __m512 t = _mm512_mul_ps(d, _mm512_set1_ps(0x1.715476p0f)), z = _mm512_add_ps(t, magic), f = _mm512_sub_ps(t, _mm512_sub_ps(z, magic));
        __m512 p = _mm512_set1_ps(0x1.3a02ccp-7f);
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.c9fc46p-5f));
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.ec0378p-3f));
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0x1.62e12cp-1f));
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1));
        __m512i bits = _mm512_maskz_add_epi32(in, _mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(z), 23));
        _mm512_storeu_ps(out + i, _mm512_castsi512_ps(bits));
    }
}

/* Adds up the lanes of 4 vectors. */
INLINE __m128 sum4(const __m512 *a, size_t step)
{
    __m512 s = add_pairs_pd(add_pairs_ps(a[0], a[step]), add_pairs_ps(a[2 * step], a[3 * step]));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* 4 clusters by 8 heads at a time: where a cluster begins and ends is found out once for all of the heads, and nearly all of them (32 rows on average) take one way through the code. */
static void sums(const float *x, uint32_t nq, uint32_t from, uint32_t n, const uint32_t *end, uint32_t x0, float *const *to)
{
    enum { HEADS = 8, AT_ONCE = 64 };
    for (; nq > HEADS; nq -= HEADS, x += HEADS * IDX_TILE, to += HEADS)
        sums(x, HEADS, from, n, end, x0, to);
    for (uint32_t c = 0; from < n; c += 4) {
        __m512 acc[4][HEADS];
        uint32_t some = 0;
        for (uint32_t k = 0; k < 4; k++) {
            uint32_t stop = from < n && end[c + k] - x0 < n ? end[c + k] - x0 : n, rows = stop - from;
            uint64_t in = rows < AT_ONCE ? (1ull << rows) - 1 : ~0ull;
            for (uint32_t h = 0; h < nq; h++) {
                const float *at = x + h * IDX_TILE + from;
                __m512 a = _mm512_maskz_loadu_ps((__mmask16)in, at), b = _mm512_maskz_loadu_ps((__mmask16)(in >> 16), at + 16);
                acc[k][h] = _mm512_add_ps(_mm512_add_ps(a, _mm512_maskz_loadu_ps((__mmask16)(in >> 32), at + 32)),
                                          _mm512_add_ps(b, _mm512_maskz_loadu_ps((__mmask16)(in >> 48), at + 48)));
            }
            some += from < n;
            for (uint32_t i = from + AT_ONCE; i < stop; i += 16) {
                __mmask16 more = tail_mask(stop - i);
                for (uint32_t h = 0; h < nq; h++)
                    acc[k][h] = _mm512_add_ps(acc[k][h], _mm512_maskz_loadu_ps(more, x + h * IDX_TILE + i));
            }
            from = stop;
        }
        __mmask8 there = (__mmask8)((1u << some) - 1);
        for (uint32_t h = 0; h < nq; h++)
            _mm_mask_storeu_ps(to[h] + c, there, _mm_add_ps(_mm_maskz_loadu_ps(there, to[h] + c), sum4(&acc[0][h], HEADS)));
    }
}

/* 4 rows by 2 blocks of centroids (ragged: 1) in registers. */
INLINE void nearest_tile(const uint32_t nb, const int8_t *rows, uint32_t quads, const uint8_t *panel, const int32_t *half, uint32_t c, __m512i *best,
                         __m512i *at)
{
    __m512i acc[4][2];
    for (int r = 0; r < 4; r++)
        for (uint32_t b = 0; b < nb; b++)
            acc[r][b] = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(half + c + 16 * b));
    for (uint32_t j = 0; j < quads; j++)
        for (uint32_t b = 0; b < nb; b++) {
            __m512i u = _mm512_load_si512(panel + ((size_t)(c / 16 + b) * quads + j) * 64);
            for (int r = 0; r < 4; r++)
                idx_dot4(&acc[r][b], u, _mm512_set1_epi32(((const int32_t *)(const void *)(rows + (size_t)r * 4 * quads))[j]));
        }
    for (uint32_t b = 0; b < nb; b++)
        for (int r = 0; r < 4; r++)
            idx_take_larger(acc[r][b], c + 16 * b, &best[r], &at[r]);
}

static void nearest(const int8_t *rows, uint32_t quads, const uint8_t *panel, const int32_t *half, uint32_t n_blocks, uint32_t *ret)
{
    for (uint32_t r = 0; r < IDX_BLOCK; r += 4) {
        const int8_t *four = rows + (size_t)r * 4 * quads;
        __m512i best[4], at[4];
        for (int i = 0; i < 4; i++) {
            best[i] = _mm512_set1_epi32(INT32_MIN);
            at[i] = _mm512_setzero_si512();
        }
        uint32_t b = 0;
        for (; b + 2 <= n_blocks; b += 2)
            nearest_tile(2, four, quads, panel, half, 16 * b, best, at);
        if (b < n_blocks)
            nearest_tile(1, four, quads, panel, half, 16 * b, best, at);
        for (uint32_t i = 0; i < 4; i++)
            ret[r + i] = idx_first_of(best[i], at[i]);
    }
}

const idx_kernels idx_kernels_avx512 = {widen, dots, max_of, filter, split, node, reach, codes, visible, weigh, sums, nearest, round_query, idx_narrow_avx512};

const idx_kernels idx_kernels_amx = {widen, dots, max_of, filter, split, node, reach, idx_codes_amx, visible, weigh, sums, idx_nearest_amx, round_query, idx_narrow_avx512};
