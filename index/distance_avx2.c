#include "distance_narrow.h"
#include "private.h"

#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

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

/* There is no compress instruction: the bytes of those of four numbers whose bits are set, by a shuffle. */
#define AT(I) 4 * I, 4 * I + 1, 4 * I + 2, 4 * I + 3
#define NONE -1, -1, -1, -1
static const int8_t picks[16][16] __attribute__((aligned(16))) = {
    {NONE, NONE, NONE, NONE}, {AT(0), NONE, NONE, NONE},    {AT(1), NONE, NONE, NONE},    {AT(0), AT(1), NONE, NONE},
    {AT(2), NONE, NONE, NONE}, {AT(0), AT(2), NONE, NONE},  {AT(1), AT(2), NONE, NONE},   {AT(0), AT(1), AT(2), NONE},
    {AT(3), NONE, NONE, NONE}, {AT(0), AT(3), NONE, NONE},  {AT(1), AT(3), NONE, NONE},   {AT(0), AT(1), AT(3), NONE},
    {AT(2), AT(3), NONE, NONE}, {AT(0), AT(2), AT(3), NONE}, {AT(1), AT(2), AT(3), NONE}, {AT(0), AT(1), AT(2), AT(3)},
};
#undef AT
#undef NONE

/* Stores the picked ones of four numbers, and others behind them. Returns their number. */
static inline uint32_t pick(__m128i x, uint32_t mask, void *to)
{
    _mm_storeu_si128(to, _mm_shuffle_epi8(x, _mm_load_si128((const __m128i *)(const void *)picks[mask])));
    return (uint32_t)__builtin_popcount(mask);
}

/* Without a branch, since hits come at random. Where outputs are the inputs, what is stored never reaches what is still to be read. */
static uint32_t filter(const uint32_t *ids, uint32_t first, const float *scores, uint32_t n, float thr, uint32_t *ret_ids,
                       float *ret_scores)
{
    uint32_t kept = 0, i = 0;
    __m256 t = _mm256_set1_ps(thr);
    for (; i + 8 <= n; i += 8) {
        __m256 x = _mm256_loadu_ps(scores + i);
        uint32_t mask = (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(x, t, _CMP_GE_OQ));
        __m256i id = ids ? _mm256_loadu_si256((const __m256i *)(const void *)(ids + i)) : _mm256_add_epi32(_mm256_set1_epi32((int)(first + i)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        __m256i score = _mm256_castps_si256(x);
        pick(_mm256_castsi256_si128(id), mask & 15, ret_ids + kept);
        kept += pick(_mm256_castsi256_si128(score), mask & 15, ret_scores + kept);
        pick(_mm256_extracti128_si256(id, 1), mask >> 4, ret_ids + kept);
        kept += pick(_mm256_extracti128_si256(score, 1), mask >> 4, ret_scores + kept);
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
    uint32_t n_gt = 0, n_lt = 0, i = 0;
    __m128 p = _mm_set1_ps(pivot);
    for (; i + 4 <= n; i += 4) {
        __m128 s = _mm_loadu_ps(x + i);
        n_gt += pick(_mm_castps_si128(s), (uint32_t)_mm_movemask_ps(_mm_cmp_ps(s, p, _CMP_GT_OQ)), gt + n_gt);
        n_lt += pick(_mm_castps_si128(s), (uint32_t)_mm_movemask_ps(_mm_cmp_ps(s, p, _CMP_LT_OQ)), lt + n_lt);
    }
    for (; i < n; i++) {
        float s = x[i];
        gt[n_gt] = s;
        n_gt += s > pivot;
        lt[n_lt] = s;
        n_lt += s < pivot;
    }
    *ret_gt = n_gt;
    *ret_lt = n_lt;
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

/* Some heads' queries as numbers of 16 bits: products of a byte and a byte are then summed in pairs in 32 bits, which no two of them overflow. */
enum { HEADS = 4 };

typedef struct {
    uint32_t stride;
    int16_t x[HEADS * IDX_MAX_DIM] __attribute__((aligned(32)));
} wide_queries;

INLINE void widen_queries(const int ng, const idx_code_query *q, uint32_t quads, wide_queries *w)
{
    w->stride = idx_dim_pad(4 * quads);
    for (int g = 0; g < ng; g++)
        for (uint32_t j = 0; j < w->stride; j += 16)
            _mm256_store_si256((__m256i *)(void *)(w->x + (uint32_t)g * w->stride + j), _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(const void *)(q[g].x + j))));
}

/* Half a block (8 slots) for ng (1..4) heads. A code's bytes are widened once for all heads: of slots 0, 1, 4, 5 and of 2, 3, 6, 7, which the last sum of pairs brings in order. */
INLINE void codes_half(const int ng, const uint8_t *codes, const float *scale, uint32_t quads, const idx_code_query *q, const wide_queries *w, float *out, size_t ld, __m256 *best)
{
    __m256i a[HEADS], b[HEADS], zero = _mm256_setzero_si256();
    for (int g = 0; g < ng; g++)
        a[g] = b[g] = zero;
    for (uint32_t j = 0; j < quads; j++) {
        __m256i u = _mm256_load_si256((const __m256i *)(const void *)(codes + (size_t)j * 64));
        __m256i u0 = _mm256_unpacklo_epi8(u, zero), u1 = _mm256_unpackhi_epi8(u, zero);
        for (int g = 0; g < ng; g++) {
            int64_t four;
            memcpy(&four, w->x + (uint32_t)g * w->stride + 4 * j, sizeof four);
            __m256i x = _mm256_set1_epi64x(four);
            a[g] = _mm256_add_epi32(a[g], _mm256_madd_epi16(u0, x));
            b[g] = _mm256_add_epi32(b[g], _mm256_madd_epi16(u1, x));
            __asm__("" : "+x"(a[g]), "+x"(b[g])); /* head by head: gcc would load all queries first, and have no registers left for the sums */
        }
    }
    __m256 s = _mm256_load_ps(scale);
    for (int g = 0; g < ng; g++) {
        __m256 dot = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_hadd_epi32(a[g], b[g]), _mm256_set1_epi32(q[g].bias)));
        __m256 score = _mm256_add_ps(_mm256_mul_ps(dot, _mm256_mul_ps(s, _mm256_set1_ps(q[g].scale))), _mm256_set1_ps(q[g].offset));
        _mm256_storeu_ps(out + (size_t)g * ld, score);
        best[g] = _mm256_max_ps(score, best[g]); /* the second operand wins against NaN */
    }
}

/* Of no NaN. */
INLINE float largest(__m256 x)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

/* ask: for what is read next, once for all heads. */
INLINE void codes_heads(const int ng, const bool ask, const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t quads, const idx_code_query *q,
                        float *out, size_t ld, float *ret_best)
{
    wide_queries w;
    __m256 best[HEADS];
    widen_queries(ng, q, quads, &w);
    for (int g = 0; g < ng; g++)
        best[g] = _mm256_set1_ps(-__builtin_inff());
    for (uint32_t b = 0; b < n_blocks; b++, codes += (size_t)quads * 64, scale += IDX_BLOCK, out += IDX_BLOCK) {
        for (size_t i = 0; i < (size_t)quads * 64 && ask; i += 64) {
            _mm_prefetch((const char *)codes + i + IDX_CODES_FAR, _MM_HINT_T1);
            _mm_prefetch((const char *)codes + i + IDX_CODES_NEAR, _MM_HINT_T0);
        }
        codes_half(ng, codes, scale, quads, q, &w, out, ld, best);
        codes_half(ng, codes + 32, scale + 8, quads, q, &w, out + 8, ld, best);
    }
    for (int g = 0; g < ng; g++)
        ret_best[g] = largest(best[g]);
}

INLINE void codes_some(const bool ask, const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t quads, const idx_code_query *q, uint32_t nq, float *out, size_t ld,
                       float *ret_best)
{
    if (nq >= 4)
        codes_heads(4, ask, codes, scale, n_blocks, quads, q, out, ld, ret_best);
    else if (nq == 3)
        codes_heads(3, ask, codes, scale, n_blocks, quads, q, out, ld, ret_best);
    else if (nq == 2)
        codes_heads(2, ask, codes, scale, n_blocks, quads, q, out, ld, ret_best);
    else
        codes_heads(1, ask, codes, scale, n_blocks, quads, q, out, ld, ret_best);
}

static void codes(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t quads, const idx_code_query *q, uint32_t nq,
                  float *out, size_t ld, float *ret_best)
{
    for (uint32_t h = 0; h < nq; h += HEADS)
        codes_some(!h, codes, scale, n_blocks, quads, q + h, nq - h, out + h * ld, ld, ret_best + h);
}

/* The heads by fours, whichever they are. */
static void node(const uint8_t *block, const float *scale, uint32_t quads, const idx_code_query *q, uint32_t heads, float *out, float *best)
{
    while (heads) {
        idx_code_query some[HEADS];
        uint32_t of[HEADS], n = 0;
        float scores[HEADS * IDX_BLOCK], top[HEADS];
        for (; heads && n < HEADS; heads &= heads - 1) {
            of[n] = (uint32_t)__builtin_ctz(heads);
            some[n] = q[of[n]];
            n++;
        }
        codes_some(false, block, scale, 1, quads, some, n, scores, IDX_BLOCK, top);
        for (uint32_t i = 0; i < n; i++) {
            memcpy(out + of[i] * IDX_BLOCK, scores + i * IDX_BLOCK, IDX_BLOCK * sizeof *out);
            best[of[i]] = top[i] > best[of[i]] ? top[i] : best[of[i]];
        }
    }
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
