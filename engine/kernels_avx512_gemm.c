/* AVX-512 matrix products of prefill: panels of 32 weight rows, transposed once, and a register tile of up to 12 tokens by 32 outputs.
 * Every tile height runs the same instructions for an output, so a token's bits do not depend on how many tokens come along.
 */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_avx512.h"

#define DEQUANTIZE(T)                                                                                                                      \
    static void dequantize_##T(const void *row, float *out, size_t n)                                                                      \
    {                                                                                                                                      \
        stored_scales s;                                                                                                                   \
        for (size_t i = 0; i < n; i += 32) {                                                                                               \
            __m512 v[2];                                                                                                                   \
            if (is_super(ENG_##T) && i % 256 == 0)                                                                                         \
                store_scales(ENG_##T, block_at(ENG_##T, row, i), &s);                                                                      \
            load32(ENG_##T, row, i, n, &s, v);                                                                                             \
            _mm512_mask_storeu_ps(out + i, tail16(n - i), v[0]);                                                                           \
            if (n - i > 16)                                                                                                                \
                _mm512_mask_storeu_ps(out + i + 16, tail16(n - i - 16), v[1]);                                                             \
        }                                                                                                                                  \
    }
ENG_EACH_TYPE(DEQUANTIZE)
#undef DEQUANTIZE

/* ---- packing ---------------------------------------------------------------------------------------------------- */

/* 16 columns of a panel at a time, 32 of k at a time; the block in between stays in L1. The same place of the next panel's rows is asked for on
 * the way (it never faults): a slice of a row is too short for the hardware's prefetchers to see. */
INLINE void pack_any(const eng_type t, const bool bf16, uint32_t *panel, const char *w, size_t row_bytes, size_t rows, size_t k)
{
    for (size_t half = 0; half < ENG_NR; half += 16) {
        _Alignas(64) uint32_t buf[16][32] = {{0}};
        stored_scales s[16];
        size_t have = rows > half ? rows - half : 0;
        have = have > 16 ? 16 : have;
        for (size_t i = 0; i < k; i += 32) {
            size_t left = k - i < 32 ? k - i : 32;
            for (size_t r = 0; r < have; r++) {
                const char *row = w + (half + r) * row_bytes;
                _mm_prefetch(near_element(t, row + ENG_NR * row_bytes, i), _MM_HINT_T1);
                __m512 v[2];
                if (is_super(t) && i % 256 == 0)
                    store_scales(t, block_at(t, row, i), &s[r]);
                load32(t, row, i, k, &s[r], v);
                if (bf16) {
                    _mm512_store_si512(buf[r], (__m512i)_mm512_cvtne2ps_pbh(v[1], v[0]));
                } else {
                    _mm512_store_ps(buf[r], v[0]);
                    _mm512_store_ps(buf[r] + 16, v[1]);
                }
            }
            if (bf16) {
                store_transposed(panel + i / 2 * ENG_NR + half, ENG_NR, buf[0], 32, left / 2);
            } else {
                store_transposed(panel + i * ENG_NR + half, ENG_NR, buf[0], 32, left < 16 ? left : 16);
                if (left > 16)
                    store_transposed(panel + (i + 16) * ENG_NR + half, ENG_NR, buf[0] + 16, 32, left - 16);
            }
        }
    }
}

static void pack_f32(float *panel, eng_type type, const void *w, size_t row_bytes, size_t rows, size_t k, float *tmp)
{
    (void)tmp;
#define CASE(T)                                                                                                                            \
    case ENG_##T:                                                                                                                          \
        pack_any(ENG_##T, false, (void *)panel, w, row_bytes, rows, k);                                                                    \
        break;
    switch (type) {
        ENG_EACH_TYPE(CASE)
    default:
        break;
    }
#undef CASE
}

static void pack_bf16(uint16_t *panel, eng_type type, const void *w, size_t row_bytes, size_t rows, size_t k, float *tmp)
{
    (void)tmp;
#define CASE(T)                                                                                                                            \
    case ENG_##T:                                                                                                                          \
        pack_any(ENG_##T, true, (void *)panel, w, row_bytes, rows, k);                                                                     \
        break;
    switch (type) {
        ENG_EACH_TYPE(CASE)
    default:
        break;
    }
#undef CASE
}

static void f32_to_bf16(const float *x, uint16_t *out, size_t n)
{
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 k = tail16(n - i);
        _mm256_mask_storeu_epi16(out + i, k, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(k, x + i)));
    }
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* One k pair (bf16) or one k (f32) of A's element at p, in every lane. */
INLINE __m512i broadcast(const char *p)
{
    int32_t v;
    memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

/* One dword of k: mr rows of A by 32 outputs. p: every fourth row, the others are reached by scaled indices, so that all pointers fit in
 * registers; at: bytes beyond p. */
INLINE void tile_step(const bool bf16, const int mr, __m512 acc[12][2], const char *const *p, const size_t lda, const size_t at, __m512 b0, __m512 b1)
{
#pragma GCC unroll 12
    for (int i = 0; i < mr; i++) {
        const char *q = p[i / 4] + at;
        __m512i v = broadcast(i % 4 == 0 ? q : i % 4 == 1 ? q + lda : i % 4 == 2 ? q + 2 * lda : q + 3 * lda);
        if (bf16) {
            acc[i][0] = _mm512_dpbf16_ps(acc[i][0], (__m512bh)v, (__m512bh)b0);
            acc[i][1] = _mm512_dpbf16_ps(acc[i][1], (__m512bh)v, (__m512bh)b1);
        } else {
            acc[i][0] = _mm512_fmadd_ps(_mm512_castsi512_ps(v), b0, acc[i][0]);
            acc[i][1] = _mm512_fmadd_ps(_mm512_castsi512_ps(v), b1, acc[i][1]);
        }
    }
}

/* mr (up to 12) rows of A by 32 outputs. All strides in bytes. `steps` dwords of A a row. */
INLINE void tile(const bool bf16, const int mr, char *c, size_t ldc, const char *a, size_t lda, const char *b, size_t ldb, size_t n,
                 size_t steps, bool accumulate)
{
    enum { UNROLL = 4 }; /* scalar instructions compete with products for ports */
    __m512 acc[12][2];
    __mmask16 m0 = tail16(n), m1 = n > 16 ? tail16(n - 16) : 0;
#pragma GCC unroll 12
    for (int i = 0; i < mr; i++) {
        const float *row = (const void *)(c + (size_t)i * ldc);
        acc[i][0] = _mm512_maskz_loadu_ps(accumulate ? m0 : 0, row);
        acc[i][1] = _mm512_maskz_loadu_ps(accumulate ? m1 : 0, row + 16);
    }
    const char *p[3] = {a, a + (mr > 4 ? 4 * lda : 0), a + (mr > 8 ? 8 * lda : 0)};
    size_t l = 0;
    for (; l + UNROLL <= steps; l += UNROLL) {
#pragma GCC unroll 4
        for (size_t u = 0; u < UNROLL; u++, b += ldb)
            tile_step(bf16, mr, acc, p, lda, 4 * u, _mm512_maskz_loadu_ps(m0, b), _mm512_maskz_loadu_ps(m1, b + 64));
        for (int i = 0; i < 3; i++)
            p[i] += 4 * UNROLL;
    }
    for (; l < steps; l++, b += ldb) {
        tile_step(bf16, mr, acc, p, lda, 0, _mm512_maskz_loadu_ps(m0, b), _mm512_maskz_loadu_ps(m1, b + 64));
        for (int i = 0; i < 3; i++)
            p[i] += 4;
    }
#pragma GCC unroll 12
    for (int i = 0; i < mr; i++) {
        float *row = (void *)(c + (size_t)i * ldc);
        _mm512_mask_storeu_ps(row, m0, acc[i][0]);
        _mm512_mask_storeu_ps(row + 16, m1, acc[i][1]);
    }
}

INLINE void gemm(const bool bf16, char *c, size_t ldc, const char *a, size_t lda, const char *b, size_t ldb, size_t m, size_t n,
                 size_t steps, bool accumulate)
{
    size_t i = 0;
#define RUN(MR)                                                                                                                            \
    for (; i + MR <= m; i += MR)                                                                                                           \
        tile(bf16, MR, c + i * ldc, ldc, a + i * lda, lda, b, ldb, n, steps, accumulate);
    RUN(12)
    RUN(8)
    RUN(4)
    RUN(2)
    RUN(1)
#undef RUN
}

static void gemm_f32(float *c, size_t ldc, const float *a, size_t lda, const float *b, size_t ldb, size_t m, size_t n, size_t k,
                     bool accumulate)
{
    gemm(false, (char *)c, ldc * 4, (const char *)a, lda * 4, (const char *)b, ldb * 4, m, n, k, accumulate);
}

static void gemm_bf16(float *c, size_t ldc, const uint16_t *a, size_t lda, const uint16_t *panel, size_t m, size_t n, size_t k,
                      bool accumulate)
{
    gemm(true, (char *)c, ldc * 4, (const char *)a, lda * 2, (const char *)panel, ENG_NR * 4, m, n, k / 2, accumulate);
}

void eng_avx512_gemm(eng_kernels *k)
{
#define ENTRY(T) k->dequantize[ENG_##T] = dequantize_##T;
    ENG_EACH_TYPE(ENTRY)
#undef ENTRY
    k->kv_load[ENG_KV_F32] = dequantize_F32;
    k->kv_load[ENG_KV_F16] = dequantize_F16;
    k->kv_load[ENG_KV_BF16] = dequantize_BF16;
    k->pack_f32 = pack_f32;
    k->gemm_f32 = gemm_f32;
}

void eng_avx512_gemm_bf16(eng_kernels *k)
{
    k->pack_bf16 = pack_bf16;
    k->gemm_bf16 = gemm_bf16;
    k->f32_to_bf16 = f32_to_bf16;
}
#endif
