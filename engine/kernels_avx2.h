/* Shared by the kernels_avx2*.c files: loads, sums, exp. Eight float lanes; a tail goes through the same vector instructions as a full
 * vector, so an element's bits do not depend on its place.
 */
#ifndef RETRIEVALD_KERNELS_AVX2_H
#define RETRIEVALD_KERNELS_AVX2_H

#include "kernels.h"
#include "kernels_avx2_codes.h"

void eng_avx2_gemv(eng_kernels *k);
void eng_avx2_gemm(eng_kernels *k);
void eng_avx2_gemm_i16(eng_kernels *k);
void eng_avx2_attention(eng_kernels *k);

/* Mask of the lanes that exist of 8, with n elements left. */
INLINE __m256i tail8(size_t n)
{
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n < 8 ? (int)n : 8), lanes);
}

/* x[0 .. 8), or what there is of it with n elements left, else 0. */
INLINE __m256 load8f(const float *x, size_t n)
{
    return n >= 8 ? _mm256_loadu_ps(x) : _mm256_maskload_ps(x, tail8(n));
}

INLINE void store8f(float *x, size_t n, __m256 v)
{
    if (n >= 8)
        _mm256_storeu_ps(x, v);
    else
        _mm256_maskstore_ps(x, tail8(n), v);
}

INLINE __m128i load8h(const uint16_t *x, size_t n)
{
    if (n >= 8)
        return _mm_loadu_si128((const void *)x);
    uint16_t h[8] = {0};
    memcpy(h, x, 2 * n);
    return _mm_loadu_si128((const void *)h);
}

INLINE void store8h(uint16_t *x, size_t n, __m128i v)
{
    if (n >= 8) {
        _mm_storeu_si128((void *)x, v);
        return;
    }
    uint16_t h[8];
    _mm_storeu_si128((void *)h, v);
    memcpy(x, h, 2 * n);
}

/* 8 elements of a row of F32, F16, BF16 or Q8_0 from element i, a multiple of 8, on, of n; beyond n they are 0 (Q8_0's rows have whole blocks with codes 0 there). */
INLINE __m256 load8(const eng_type t, const void *row, size_t i, size_t n)
{
    if (t == ENG_Q8_0) {
        const eng_q8_0 *b = (const eng_q8_0 *)row + i / 32;
        __m256 q = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)(b->q + i % 32))));
        return _mm256_mul_ps(q, f16_all(get16(b)));
    }
    if (t == ENG_F32)
        return load8f((const float *)row + i, n - i);
    __m128i h = load8h((const uint16_t *)row + i, n - i);
    if (t == ENG_F16)
        return _mm256_cvtph_ps(h);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}

/* Elements i .. i+31 of a row of any type, of n; i is a multiple of 32 for the block types. s: the scales of the super-block. */
INLINE void load32(const eng_type t, const void *row, size_t i, size_t n, const stored_scales *s, __m256 out[4])
{
    if (t < ENG_Q8_0) {
        for (size_t j = 0; j < 4; j++)
            out[j] = i + 8 * j < n ? load8(t, row, i + 8 * j, n) : _mm256_setzero_ps();
        return;
    }
    const char *block = block_at(t, row, i);
    size_t part = i / 32 % 8;
    __m256i q = load_codes(t, block, (int)part);
    if (offset_of(t))
        q = _mm256_sub_epi8(q, _mm256_set1_epi8((char)offset_of(t)));
    for (size_t j = 0; j < 4; j++) {
        size_t k = has_halves(t) ? 2 * part + j / 2 : part;
        __m256 d = is_super(t) ? _mm256_set1_ps(s->d[k]) : f16_all(get16(block));
        __m128i b = j < 2 ? _mm256_castsi256_si128(q) : _mm256_extracti128_si256(q, 1);
        __m256 x = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(j % 2 ? _mm_srli_si128(b, 8) : b));
        /* d q is exact (quant.h), so the fused product rounds once, as the scalar sum does */
        if (has_min(t))
            out[j] = _mm256_fmadd_ps(d, x, is_super(t) ? _mm256_set1_ps(s->m[k]) : f16_all(get16(block + 2)));
        else
            out[j] = _mm256_mul_ps(d, x);
    }
}

/* Stores the transpose of 8 vectors of 8 floats, `step` floats apart: its rows 0 .. n-1 at out, out_step floats apart. */
INLINE void store_transposed(float *out, size_t out_step, const float *in, size_t step, size_t n)
{
    __m256 t[8], v[8];
#pragma GCC unroll 2
    for (size_t i = 0; i < 2; i++) {
        __m256 r0 = _mm256_loadu_ps(in + 4 * i * step), r1 = _mm256_loadu_ps(in + (4 * i + 1) * step);
        __m256 r2 = _mm256_loadu_ps(in + (4 * i + 2) * step), r3 = _mm256_loadu_ps(in + (4 * i + 3) * step);
        __m256 a0 = _mm256_unpacklo_ps(r0, r1), a1 = _mm256_unpackhi_ps(r0, r1);
        __m256 a2 = _mm256_unpacklo_ps(r2, r3), a3 = _mm256_unpackhi_ps(r2, r3);
        t[4 * i] = _mm256_shuffle_ps(a0, a2, 0x44);
        t[4 * i + 1] = _mm256_shuffle_ps(a0, a2, 0xee);
        t[4 * i + 2] = _mm256_shuffle_ps(a1, a3, 0x44);
        t[4 * i + 3] = _mm256_shuffle_ps(a1, a3, 0xee);
    }
    /* t[4i + c], half L: column 4L + c of rows 4i .. 4i+3 */
#pragma GCC unroll 4
    for (size_t c = 0; c < 4; c++) {
        v[c] = _mm256_permute2f128_ps(t[c], t[4 + c], 0x20);
        v[4 + c] = _mm256_permute2f128_ps(t[c], t[4 + c], 0x31);
    }
#pragma GCC unroll 8
    for (size_t i = 0; i < 8; i++)
        if (i < n)
            _mm256_storeu_ps(out + i * out_step, v[i]);
}

INLINE float max8(__m256 v)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

/* The sums of four vectors, each by the same tree. */
INLINE __m128 sum4(__m256 a, __m256 b, __m256 c, __m256 d)
{
    __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    __m256 s = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee)); /* a b c d in each half */
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
}

/* Stores the sums of acc[0 .. n); n is 1, 2 or 4. */
INLINE void store_sums(float *out, const __m256 *acc, const int n)
{
    if (n == 4)
        _mm_storeu_ps(out, sum4(acc[0], acc[1], acc[2], acc[3]));
    else if (n == 2)
        _mm_storel_pi((void *)out, sum4(acc[0], acc[1], acc[0], acc[1]));
    else
        *out = _mm_cvtss_f32(sum4(acc[0], acc[0], acc[0], acc[0]));
}

/* e^x within 2 ulp for x in [-87.336, 88]; clamped to these ends outside; NaN stays NaN. Cody and Waite's reduction, Cephes' polynomial. */
INLINE __m256 exp8(__m256 x)
{
    x = _mm256_min_ps(_mm256_set1_ps(88), _mm256_max_ps(_mm256_set1_ps(-87.336f), x)); /* in this order NaN survives */
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 p = _mm256_set1_ps(1.9875691500e-4f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
    p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1));
    /* n is in [-126, 127]: 2^n is a normal number */
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

#endif
