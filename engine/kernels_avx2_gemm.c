/* AVX2 matrix products of prefill: float32 panels, a register tile of up to 6 tokens by 16 outputs. Every tile height runs the same
 * instructions for an output, so a token's bits do not depend on how many tokens come along.
 */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_avx2.h"

#define DEQUANTIZE(T)                                                                                                                      \
    static void dequantize_##T(const void *row, float *out, size_t n)                                                                      \
    {                                                                                                                                      \
        stored_scales s;                                                                                                                   \
        for (size_t i = 0; i < n; i += 32) {                                                                                               \
            __m256 v[4];                                                                                                                   \
            if (is_super(ENG_##T) && i % 256 == 0)                                                                                         \
                store_scales(ENG_##T, block_at(ENG_##T, row, i), &s);                                                                      \
            load32(ENG_##T, row, i, n, &s, v);                                                                                             \
            for (size_t j = 0; j < 4 && i + 8 * j < n; j++)                                                                                \
                store8f(out + i + 8 * j, n - i - 8 * j, v[j]);                                                                             \
        }                                                                                                                                  \
    }
ENG_EACH_TYPE(DEQUANTIZE)
#undef DEQUANTIZE

/* ---- packing ---------------------------------------------------------------------------------------------------- */

/* 8 columns of a panel at a time, 32 of k at a time; the block in between stays in L1. */
INLINE void pack_any(const eng_type t, float *panel, const char *w, size_t row_bytes, size_t rows, size_t k)
{
    for (size_t part = 0; part < ENG_NR; part += 8) {
        _Alignas(32) float buf[8][32] = {{0}};
        stored_scales s[8];
        size_t have = rows > part ? rows - part : 0;
        have = have > 8 ? 8 : have;
        for (size_t i = 0; i < k; i += 32) {
            for (size_t r = 0; r < have; r++) {
                const char *row = w + (part + r) * row_bytes;
                __m256 v[4];
                if (is_super(t) && i % 256 == 0)
                    store_scales(t, block_at(t, row, i), &s[r]);
                load32(t, row, i, k, &s[r], v);
                for (int j = 0; j < 4; j++)
                    _mm256_store_ps(buf[r] + 8 * j, v[j]);
            }
            for (size_t j = 0; j < 32 && i + j < k; j += 8)
                store_transposed(panel + (i + j) * ENG_NR + part, ENG_NR, buf[0] + j, 32, k - i - j);
        }
    }
}

static void pack_f32(float *panel, eng_type type, const void *w, size_t row_bytes, size_t rows, size_t k, float *tmp)
{
    (void)tmp;
#define CASE(T)                                                                                                                            \
    case ENG_##T:                                                                                                                          \
        pack_any(ENG_##T, panel, w, row_bytes, rows, k);                                                                                   \
        break;
    switch (type) {
        ENG_EACH_TYPE(CASE)
    default:
        break;
    }
#undef CASE
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* mr (up to 6) rows of A by n <= 16 outputs. */
INLINE void tile(const int mr, float *c, size_t ldc, const float *a, size_t lda, const float *b, size_t ldb, const size_t n, size_t k,
                 bool accumulate)
{
    __m256 acc[6][2];
    const size_t n1 = n > 8 ? n - 8 : 0;
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        const float *row = c + (size_t)i * ldc;
        acc[i][0] = accumulate ? load8f(row, n) : _mm256_setzero_ps();
        acc[i][1] = accumulate ? load8f(row + 8, n1) : _mm256_setzero_ps();
    }
    const float *p[2] = {a, a + (mr > 3 ? 3 * lda : 0)}; /* every third row; the others by scaled index */
    for (size_t l = 0; l < k; l++) {
        __m256 b0 = load8f(b, n), b1 = load8f(b + 8, n1);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            const float *q = p[i / 3];
            __m256 v = _mm256_broadcast_ss(i % 3 == 0 ? q : i % 3 == 1 ? q + lda : q + 2 * lda);
            acc[i][0] = _mm256_fmadd_ps(v, b0, acc[i][0]);
            acc[i][1] = _mm256_fmadd_ps(v, b1, acc[i][1]);
        }
        p[0]++;
        p[1]++;
        b += ldb;
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        store8f(c + (size_t)i * ldc, n, acc[i][0]);
        store8f(c + (size_t)i * ldc + 8, n1, acc[i][1]);
    }
}

INLINE void columns(float *c, size_t ldc, const float *a, size_t lda, const float *b, size_t ldb, size_t m, const size_t n, size_t k,
                    bool accumulate)
{
    size_t i = 0;
    for (; i + 6 <= m; i += 6)
        tile(6, c + i * ldc, ldc, a + i * lda, lda, b, ldb, n, k, accumulate);
    for (; i + 4 <= m; i += 4)
        tile(4, c + i * ldc, ldc, a + i * lda, lda, b, ldb, n, k, accumulate);
    for (; i + 2 <= m; i += 2)
        tile(2, c + i * ldc, ldc, a + i * lda, lda, b, ldb, n, k, accumulate);
    for (; i < m; i++)
        tile(1, c + i * ldc, ldc, a + i * lda, lda, b, ldb, n, k, accumulate);
}

/* mr (12, 6, 3 or 1) rows of A by 8 outputs. */
INLINE void narrow_tile(const int mr, float *c, size_t ldc, const float *a, size_t lda, const float *b, size_t ldb, size_t k, bool accumulate)
{
    __m256 acc[12];
#pragma GCC unroll 12
    for (int i = 0; i < mr; i++)
        acc[i] = accumulate ? _mm256_loadu_ps(c + (size_t)i * ldc) : _mm256_setzero_ps();
    const float *p[4]; /* every third row; the others by scaled index */
    for (int i = 0; i < 4; i++)
        p[i] = a + (3 * i < mr ? 3 * (size_t)i * lda : 0);
    for (size_t l = 0; l < k; l++, b += ldb) {
        __m256 v = _mm256_loadu_ps(b);
#pragma GCC unroll 12
        for (int i = 0; i < mr; i++) {
            const float *q = p[i / 3] + l;
            acc[i] = _mm256_fmadd_ps(_mm256_broadcast_ss(i % 3 == 0 ? q : i % 3 == 1 ? q + lda : q + 2 * lda), v, acc[i]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < mr; i++)
        _mm256_storeu_ps(c + (size_t)i * ldc, acc[i]);
}

static void narrow(float *c, size_t ldc, const float *a, size_t lda, const float *b, size_t ldb, size_t m, size_t k, bool accumulate)
{
    size_t i = 0;
    for (; i + 12 <= m; i += 12)
        narrow_tile(12, c + i * ldc, ldc, a + i * lda, lda, b, ldb, k, accumulate);
    for (; i + 6 <= m; i += 6)
        narrow_tile(6, c + i * ldc, ldc, a + i * lda, lda, b, ldb, k, accumulate);
    for (; i + 3 <= m; i += 3)
        narrow_tile(3, c + i * ldc, ldc, a + i * lda, lda, b, ldb, k, accumulate);
    for (; i < m; i++)
        narrow_tile(1, c + i * ldc, ldc, a + i * lda, lda, b, ldb, k, accumulate);
}

static void gemm_f32(float *c, size_t ldc, const float *a, size_t lda, const float *b, size_t ldb, size_t m, size_t n, size_t k,
                     bool accumulate)
{
    if (n == 8) {
        narrow(c, ldc, a, lda, b, ldb, m, k, accumulate);
        return;
    }
    for (size_t j = 0; j < n; j += 16)
        if (n - j >= 16)
            columns(c + j, ldc, a, lda, b + j, ldb, m, 16, k, accumulate);
        else
            columns(c + j, ldc, a, lda, b + j, ldb, m, n - j, k, accumulate);
}

void eng_avx2_gemm(eng_kernels *k)
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
#endif
