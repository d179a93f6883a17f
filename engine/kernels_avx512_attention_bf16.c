/* Prefill attention for AVX-512 with BF16: scores in 16-bit integers (VPDPWSSD), weights times values in bf16 (VDPBF16PS), each at twice the rate
 * of float32. As with AMX everything is transposed: keys and values are the products' rows, queries their columns, the lanes of a vector.
 *
 * Precision. A query and a key are integers in units of their length (the Euclidean norm) / 32767, so no sum of products overflows, and a
 * score is off by about 2^-16 of the product of the lengths: less than by the rounding of K to f16. Weights and values are one bf16; l is
 * the sum of the rounded weights.
 */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_avx512.h"

#include <float.h>
#include <math.h>

enum { UNIT = ENG_NR, TILE = 2 * UNIT, HALF = 16, ROWS = 8 }; /* ROWS: of a product, in registers */

/* ---- packing ------------------------------------------------------------------------------------------------------- */

/* What an integer of this row stands for; 1 where all are zeros. */
INLINE float measure(const float *x, size_t d)
{
    __m512 sum = _mm512_setzero_ps();
    for (size_t i = 0; i < d; i += 16)
        sum = _mm512_fmadd_ps(_mm512_loadu_ps(x + i), _mm512_loadu_ps(x + i), sum);
    float squares = _mm512_reduce_add_ps(sum);
    return squares < FLT_MIN ? 1 : sqrtf(squares) / 32767;
}

/* 32 elements of a row as integers. */
INLINE __m512i to_integers(const float *x, float unit)
{
    __m512 inv = _mm512_set1_ps(1 / unit);
    __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), inv)), b = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16), inv));
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtsepi32_epi16(a)), _mm512_cvtsepi32_epi16(b), 1);
}

/* [d/2][ENG_NR][2] integers, then [ENG_NR] units */
static void attn_pack_q(void *out, const float *q, size_t d)
{
    uint32_t *to = out;
    float *units = (void *)(to + d / 2 * ENG_NR);
    for (size_t r = 0; r < ENG_NR; r++)
        units[r] = measure(q + r * d, d);
    for (size_t half = 0; half < ENG_NR; half += HALF)
        for (size_t i = 0; i < d; i += 32) {
            _Alignas(64) uint32_t part[HALF][16];
            for (size_t r = 0; r < HALF; r++)
                _mm512_store_si512(part[r], to_integers(q + (half + r) * d + i, units[half + r]));
            store_transposed(to + i / 2 * ENG_NR + half, ENG_NR, part[0], 16, 16);
        }
}

/* [UNIT][d] integers, then [UNIT] units */
static void attn_pack_k(void *out, const float *k, size_t d)
{
    int16_t *to = out;
    float *units = (void *)(to + UNIT * d);
    for (size_t r = 0; r < UNIT; r++) {
        units[r] = measure(k + r * d, d);
        for (size_t i = 0; i < d; i += 32)
            _mm512_storeu_si512(to + r * d + i, to_integers(k + r * d + i, units[r]));
    }
}

/* [d/16][16 of d][UNIT keys] */
static void attn_pack_v(void *out, const float *v, size_t d)
{
    uint32_t *to = out;
    _Alignas(64) uint16_t order[32];
    for (uint16_t i = 0; i < 32; i++)
        order[i] = (uint16_t)(i % 2 * 16 + i / 2);
    for (size_t i = 0; i < d; i += 16, to += 16 * UNIT / 2) {
        _Alignas(64) uint32_t pair[UNIT / 2][16]; /* an element of two keys in a dword */
        for (size_t r = 0; r < UNIT / 2; r++) {
            __m512 even = _mm512_loadu_ps(v + 2 * r * d + i), odd = _mm512_loadu_ps(v + (2 * r + 1) * d + i);
            _mm512_store_si512(pair[r], _mm512_permutexvar_epi16(_mm512_load_si512(order), (__m512i)_mm512_cvtne2ps_pbh(odd, even)));
        }
        store_transposed(to, 16, pair[0], 16, 16);
    }
}

/* ---- products ------------------------------------------------------------------------------------------------------ */

/* acc += ROWS rows of A, `lda` bytes apart, times ENG_NR columns of B: `steps` dwords of a row, pairs of integers or of bf16. */
INLINE void multiply(const bool bf16, __m512i acc[ROWS][2], const char *a, size_t lda, const char *b, size_t steps)
{
    const char *p[2] = {a, a + 4 * lda};
#pragma GCC unroll 4
    for (size_t k = 0; k < steps; k++, b += ENG_NR * 4) {
        __m512i b0 = _mm512_load_si512(b), b1 = _mm512_load_si512(b + 64);
#pragma GCC unroll 8
        for (size_t i = 0; i < ROWS; i++) {
            __m512i v = _mm512_set1_epi32((int)get32(p[i / 4] + i % 4 * lda + 4 * k));
            acc[i][0] = bf16 ? (__m512i)_mm512_dpbf16_ps((__m512)acc[i][0], (__m512bh)v, (__m512bh)b0) : _mm512_dpwssd_epi32(acc[i][0], v, b0);
            acc[i][1] = bf16 ? (__m512i)_mm512_dpbf16_ps((__m512)acc[i][1], (__m512bh)v, (__m512bh)b1) : _mm512_dpwssd_epi32(acc[i][1], v, b1);
        }
    }
}

/* s [UNIT][ENG_NR]: what a unit's integers give, in units of the queries. */
INLINE void scores(float *s, const char *k, const char *q, size_t d)
{
    const float *units = (const void *)(k + UNIT * 2 * d);
    for (size_t r = 0; r < UNIT; r += ROWS, k += ROWS * 2 * d, s += ROWS * ENG_NR) {
        __m512i acc[ROWS][2];
#pragma GCC unroll 8
        for (size_t i = 0; i < ROWS; i++)
            acc[i][0] = acc[i][1] = _mm512_setzero_si512();
        multiply(false, acc, k, 2 * d, q, d / 2);
#pragma GCC unroll 8
        for (size_t i = 0; i < ROWS; i++) {
            __m512 unit = _mm512_set1_ps(units[r + i]);
            _mm512_store_ps(s + i * ENG_NR, _mm512_mul_ps(_mm512_cvtepi32_ps(acc[i][0]), unit));
            _mm512_store_ps(s + i * ENG_NR + HALF, _mm512_mul_ps(_mm512_cvtepi32_ps(acc[i][1]), unit));
        }
    }
}

/* o [d][ENG_NR] += values times weights p [UNIT/2][ENG_NR][2] of n units. */
INLINE void values(float *o, const char *v, const char *p, size_t d, size_t n)
{
    for (size_t r = 0; r < d; r += ROWS, o += ROWS * ENG_NR, v += ROWS * UNIT * 2) {
        __m512i acc[ROWS][2];
#pragma GCC unroll 8
        for (size_t i = 0; i < ROWS; i++) {
            acc[i][0] = _mm512_load_si512(o + i * ENG_NR);
            acc[i][1] = _mm512_load_si512(o + i * ENG_NR + HALF);
        }
        for (size_t u = 0; u < n; u++)
            multiply(true, acc, v + u * UNIT * 2 * d, UNIT * 2, p + u * UNIT * 2 * ENG_NR, UNIT / 2);
#pragma GCC unroll 8
        for (size_t i = 0; i < ROWS; i++) {
            _mm512_store_si512(o + i * ENG_NR, acc[i][0]);
            _mm512_store_si512(o + i * ENG_NR + HALF, acc[i][1]);
        }
    }
}

/* ---- weights ------------------------------------------------------------------------------------------------------- */

/* Brings m of 16 queries to the maximum of n keys' scores where that is too far above, with l and o. */
INLINE void raise(const float *s, size_t n, __m512 unit, float *m, float *l, float *o, size_t d)
{
    __m512 top[4];
    for (size_t j = 0; j < 4; j++)
        top[j] = _mm512_load_ps(s + j * ENG_NR);
    for (size_t i = 4; i < n; i += 4)
        for (size_t j = 0; j < 4; j++)
            top[j] = _mm512_max_ps(top[j], _mm512_load_ps(s + (i + j) * ENG_NR));
    top[0] = _mm512_mul_ps(unit, _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3])));
    __m512 was = _mm512_load_ps(m);
    __mmask16 up = _mm512_cmp_ps_mask(top[0], _mm512_add_ps(was, _mm512_set1_ps(ENG_ATTN_SLACK)), _CMP_GT_OQ);
    if (__builtin_expect(!up, 1))
        return;
    __m512 f = _mm512_mask_mov_ps(_mm512_set1_ps(1), up, exp2_rough16(_mm512_sub_ps(was, top[0])));
    _mm512_mask_store_ps(m, up, top[0]);
    _mm512_store_ps(l, _mm512_mul_ps(f, _mm512_load_ps(l)));
    for (size_t i = 0; i < d; i++)
        _mm512_store_ps(o + i * ENG_NR, _mm512_mul_ps(f, _mm512_load_ps(o + i * ENG_NR)));
}

/* n keys' scores of 16 queries -> weights in bf16, two keys' in a dword; their sums are added to l. */
INLINE void weigh(const float *s, size_t n, __m512 unit, const float *m, float *l, uint32_t *p)
{
    const __m512i half_ulp = _mm512_set1_epi32(0x8000), top = _mm512_set1_epi32((int)0xffff0000);
    __m512 vm = _mm512_load_ps(m), sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
#pragma GCC unroll 4
    for (size_t i = 0; i < n; i += 2) {
        __m512 a = exp2_rough16(_mm512_fmsub_ps(unit, _mm512_load_ps(s + i * ENG_NR), vm));
        __m512 b = exp2_rough16(_mm512_fmsub_ps(unit, _mm512_load_ps(s + (i + 1) * ENG_NR), vm));
        __m512i even = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(a), half_ulp), top);
        __m512i odd = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(b), half_ulp), top);
        sum[0] = _mm512_add_ps(sum[0], _mm512_castsi512_ps(even));
        sum[1] = _mm512_add_ps(sum[1], _mm512_castsi512_ps(odd));
        _mm512_store_si512(p + i / 2 * ENG_NR, _mm512_or_si512(_mm512_srli_epi32(even, 16), odd));
    }
    _mm512_store_ps(l, _mm512_add_ps(_mm512_load_ps(l), _mm512_add_ps(sum[0], sum[1])));
}

INLINE void attend(const size_t d, const eng_attn_run *run)
{
    _Alignas(64) float s[TILE * ENG_NR];
    _Alignas(64) uint32_t p[TILE / 2 * ENG_NR];
    const char *k = run->k, *v = run->v, *q = run->q;
    const float *units = (const void *)(q + ENG_NR * 2 * d);
    for (uint32_t unit = 0; unit < run->n_units; unit += TILE / UNIT) {
        uint32_t n = run->n_units - unit < TILE / UNIT ? run->n_units - unit : TILE / UNIT, first = run->first + unit * UNIT;
        for (uint32_t u = 0; u < n; u++, k += UNIT * 4 * d)
            scores(s + u * UNIT * ENG_NR, k, q, d);
        if (!eng_attn_whole(run, n * UNIT, first))
            eng_attn_hide(run, s, n * UNIT, first);
        for (size_t h = 0; h < ENG_NR; h += HALF) {
            __m512 qu = _mm512_load_ps(units + h);
            raise(s + h, n * UNIT, qu, run->m + h, run->l + h, run->o + h, d);
            weigh(s + h, n * UNIT, qu, run->m + h, run->l + h, p + h);
        }
        values(run->o, v, (const char *)p, d, n);
        v += n * UNIT * 2 * d;
    }
}

static void attn_bf16(const eng_attn_run *run)
{
    if (run->d == 64)
        attend(64, run);
    else
        attend(run->d, run);
}

void eng_avx512_attention_bf16(eng_kernels *k)
{
    k->attn_pack_q = attn_pack_q;
    k->attn_pack_k = attn_pack_k;
    k->attn_pack_v = attn_pack_v;
    k->attn_bf16 = attn_bf16;
}
#endif
