/* Shared by the kernels_avx512*.c files: loads, sums, exp. Sixteen float lanes; a tail is a masked vector that goes through the same
 * instructions as a full one, so an element's bits do not depend on its place.
 */
#ifndef RETRIEVALD_KERNELS_AVX512_H
#define RETRIEVALD_KERNELS_AVX512_H

#include "kernels.h"
#include "kernels_avx2_codes.h"

void eng_avx512_gemv(eng_kernels *k);
void eng_avx512_gemv_super(eng_kernels *k);
void eng_avx512_gemm(eng_kernels *k);
void eng_avx512_gemm_bf16(eng_kernels *k); /* this one and the other _bf16: the only functions with BF16 instructions */
void eng_avx512_gemm_q8(eng_kernels *k);
void eng_avx512_attention(eng_kernels *k);
void eng_avx512_attention_bf16(eng_kernels *k);

/* Lanes that exist of 16, with n elements left. */
INLINE __mmask16 tail16(size_t n)
{
    return n >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << n) - 1);
}

INLINE __m512 f16_all16(uint16_t h)
{
    return _mm512_cvtph_ps(_mm256_set1_epi16((short)h));
}

/* 16 elements of a row of F32, F16, BF16 or Q8_0 from element i, a multiple of 16, on; lanes outside the mask give 0 and are not read, but for Q8_0's, whose
 * rows have whole blocks with codes 0 there. */
INLINE __m512 load16(const eng_type t, const void *row, size_t i, __mmask16 m)
{
    if (t == ENG_Q8_0) {
        if (!m)
            return _mm512_setzero_ps();
        const eng_q8_0 *b = (const eng_q8_0 *)row + i / 32;
        __m512 q = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(b->q + i % 32))));
        return _mm512_mul_ps(q, f16_all16(get16(b)));
    }
    if (t == ENG_F32)
        return _mm512_maskz_loadu_ps(m, (const float *)row + i);
    __m256i h = _mm256_maskz_loadu_epi16(m, (const uint16_t *)row + i);
    if (t == ENG_F16)
        return _mm512_cvtph_ps(h);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

/* Elements i .. i+31 of a row of any type, of n; i is a multiple of 32 for the block types. s: the scales of the super-block. */
INLINE void load32(const eng_type t, const void *row, size_t i, size_t n, const stored_scales *s, __m512 out[2])
{
    if (t < ENG_Q8_0) {
        out[0] = load16(t, row, i, tail16(n - i));
        out[1] = load16(t, row, i + 16, n - i > 16 ? tail16(n - i - 16) : 0);
        return;
    }
    const char *block = block_at(t, row, i);
    size_t part = i / 32 % 8;
    __m256i q = load_codes(t, block, (int)part);
    if (offset_of(t))
        q = _mm256_sub_epi8(q, _mm256_set1_epi8((char)offset_of(t)));
    for (size_t j = 0; j < 2; j++) {
        size_t k = has_halves(t) ? 2 * part + j : part;
        __m512 d = is_super(t) ? _mm512_set1_ps(s->d[k]) : f16_all16(get16(block));
        __m512 x = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(j ? _mm256_extracti128_si256(q, 1) : _mm256_castsi256_si128(q)));
        /* d q is exact (quant.h), so the fused product rounds once, as the scalar sum does */
        if (has_min(t))
            out[j] = _mm512_fmadd_ps(d, x, is_super(t) ? _mm512_set1_ps(s->m[k]) : f16_all16(get16(block + 2)));
        else
            out[j] = _mm512_mul_ps(d, x);
    }
}

/* About where element i of a row lies: codes of a super-block are not in the order of their elements. */
INLINE const char *near_element(const eng_type t, const char *row, size_t i)
{
    return t < ENG_Q8_0 ? row + i * block_bytes(t) : row + i / 32 * block_bytes(t) / (is_super(t) ? 8 : 1);
}

/* 32 floats to 8-bit codes at q (also as dwords in i and j); their scale. The same codes and scale as the scalar level, bit for bit. */
INLINE float quantize32(const float *x, int8_t *q, __m512i *i, __m512i *j)
{
    __m512 u = _mm512_loadu_ps(x), v = _mm512_loadu_ps(x + 16);
    float amax = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(u), _mm512_abs_ps(v)));
    float inv = amax < 1e-30f ? 0.0f : 127.0f / amax;
    *i = _mm512_cvtps_epi32(_mm512_mul_ps(u, _mm512_set1_ps(inv)));
    *j = _mm512_cvtps_epi32(_mm512_mul_ps(v, _mm512_set1_ps(inv)));
    _mm_storeu_si128((void *)q, _mm512_cvtsepi32_epi8(*i));
    _mm_storeu_si128((void *)(q + 16), _mm512_cvtsepi32_epi8(*j));
    return amax < 1e-30f ? 0.0f : amax / 127.0f;
}

/* The sums of four vectors, each by the same tree. */
INLINE __m128 sum4(__m512 a, __m512 b, __m512 c, __m512 d)
{
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d p = _mm512_castps_pd(ab), q = _mm512_castps_pd(cd);
    __m512 s = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1)); /* a b c d in each 128 bits */
    return _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
}

/* Stores the sums of acc[0 .. n); n is 1 or 4. */
INLINE void store_sums(float *out, const __m512 *acc, const int n)
{
    if (n == 4)
        _mm_storeu_ps(out, sum4(acc[0], acc[1], acc[2], acc[3]));
    else
        *out = _mm_cvtss_f32(sum4(acc[0], acc[0], acc[0], acc[0]));
}

/* Stores the transpose of 16 vectors of 16 dwords, `step` dwords apart: its rows 0 .. n-1 at out, out_step dwords apart. */
INLINE void store_transposed(uint32_t *out, size_t out_step, const uint32_t *in, size_t step, size_t n)
{
    __m512i t[16], v[16];
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; i++) {
        __m512i r0 = _mm512_loadu_si512(in + 4 * i * step), r1 = _mm512_loadu_si512(in + (4 * i + 1) * step);
        __m512i r2 = _mm512_loadu_si512(in + (4 * i + 2) * step), r3 = _mm512_loadu_si512(in + (4 * i + 3) * step);
        __m512i a0 = _mm512_unpacklo_epi32(r0, r1), a1 = _mm512_unpackhi_epi32(r0, r1);
        __m512i a2 = _mm512_unpacklo_epi32(r2, r3), a3 = _mm512_unpackhi_epi32(r2, r3);
        t[4 * i] = _mm512_unpacklo_epi64(a0, a2);
        t[4 * i + 1] = _mm512_unpackhi_epi64(a0, a2);
        t[4 * i + 2] = _mm512_unpacklo_epi64(a1, a3);
        t[4 * i + 3] = _mm512_unpackhi_epi64(a1, a3);
    }
    /* t[4i + c], lane L: column 4L + c of rows 4i .. 4i+3 */
#pragma GCC unroll 4
    for (size_t c = 0; c < 4; c++) {
        __m512i b0 = _mm512_shuffle_i32x4(t[c], t[4 + c], 0x44), b1 = _mm512_shuffle_i32x4(t[c], t[4 + c], 0xee);
        __m512i b2 = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0x44), b3 = _mm512_shuffle_i32x4(t[8 + c], t[12 + c], 0xee);
        v[c] = _mm512_shuffle_i32x4(b0, b2, 0x88);
        v[4 + c] = _mm512_shuffle_i32x4(b0, b2, 0xdd);
        v[8 + c] = _mm512_shuffle_i32x4(b1, b3, 0x88);
        v[12 + c] = _mm512_shuffle_i32x4(b1, b3, 0xdd);
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < 16; i++)
        if (i < n)
            _mm512_storeu_si512(out + i * out_step, v[i]);
}

/* 128 + eng_iq4_values of codes below 16. */
INLINE __m512i raised_iq4_values(__m512i q)
{
    __m128i v = _mm_xor_si128(_mm_loadu_si128((const void *)eng_iq4_values), _mm_set1_epi8((char)128));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(v), q);
}

/* A gemv_*: rows by fours, then one by one. */
#define GEMV(NAME, ROWS, X, T)                                                                                                             \
    static void NAME(float *y, const void *w, size_t row_bytes, size_t rows, const X *x, size_t n)                                         \
    {                                                                                                                                      \
        size_t r = 0;                                                                                                                      \
        for (; r + 4 <= rows; r += 4)                                                                                                      \
            ROWS(T, 4, y + r, (const char *)w + r * row_bytes, row_bytes, x, n);                                                           \
        for (; r < rows; r++)                                                                                                              \
            ROWS(T, 1, y + r, (const char *)w + r * row_bytes, row_bytes, x, n);                                                           \
    }

/* e^x within 2 ulp for results that are normal numbers; +inf above, denormals and 0 below; NaN stays NaN. Cody and Waite's reduction,
 * Cephes' polynomial. */
INLINE __m512 exp16(__m512 x)
{
    x = _mm512_min_ps(_mm512_set1_ps(100), _mm512_max_ps(_mm512_set1_ps(-110), x)); /* in this order NaN survives */
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r);
    return _mm512_scalef_ps(_mm512_add_ps(p, _mm512_set1_ps(1)), n);
}

/* 2^x for x <= ENG_ATTN_SLACK and a little more, within 2^-13; 0 below FLT_MIN: a denormal result would take some hundred cycles. */
INLINE __m512 exp2_rough16(__m512 x)
{
    __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), p = _mm512_set1_ps(0.07802452266f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.2260671554f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.6958335405f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.9999252186f));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126), _CMP_NLT_UQ), p, x);
}

#endif
