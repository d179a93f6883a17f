/* AVX2 matrix-vector products of decoding: a block at a time, four rows sharing what is prepared of x. */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_avx2.h"

/* Sums of four products u8 x s8 in each dword. VPMADDUBSW saturates at 2^15: u <= 128 and |x| <= 127 (quantize_q8) stay below. */
INLINE __m256i dot_bytes(__m256i u, __m256i s)
{
    return _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1));
}

INLINE float f16_one(uint16_t h)
{
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
}

/* acc += one block of a row; msum (Q4_1) gathers m s. eights: 8 x, the share of Q4_0's offset. */
INLINE void step(const eng_type t, const char *w, __m256i x, __m256i eights, float dx, float sx, __m256 *acc, float *msum)
{
    uint16_t d, m;
    memcpy(&d, w, 2);
    __m256i dot;
    if (t == ENG_Q8_0) {
        __m256i v = _mm256_loadu_si256((const void *)(w + 2));
        dot = dot_bytes(_mm256_abs_epi8(v), _mm256_sign_epi8(x, v));
    } else {
        __m128i v = _mm_loadu_si128((const void *)(w + (t == ENG_Q4_0 ? 2 : 4)));
        __m256i q = _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(v, 4), v), _mm256_set1_epi8(15));
        dot = dot_bytes(q, x);
        if (t == ENG_Q4_0)
            dot = _mm256_sub_epi32(dot, eights);
    }
    if (t == ENG_Q4_1) {
        memcpy(&m, w + 2, 2);
        *msum += f16_one(m) * sx;
    }
    *acc = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(f16_one(d) * dx), *acc);
}

/* nr (1 or 4) rows. */
INLINE void rows_q8(const eng_type t, const int nr, float *y, const char *w, size_t row_bytes, const eng_q8_act *x, size_t n)
{
    const size_t bytes = bytes_of_32(t);
    __m256 acc[4];
    float msum[4] = {0};
    for (int r = 0; r < nr; r++)
        acc[r] = _mm256_setzero_ps();
    for (size_t b = 0; b < n / 32; b++) {
        prefetch_ahead(w + (size_t)nr * b * bytes, (size_t)nr * bytes);
        __m256i q = _mm256_loadu_si256((const void *)(x->q + 32 * b)), eights = _mm256_setzero_si256();
        if (t == ENG_Q4_0)
            eights = dot_bytes(_mm256_set1_epi8(8), q);
        for (int r = 0; r < nr; r++)
            step(t, w + (size_t)r * row_bytes + b * bytes, q, eights, x->d[b], x->s[b], &acc[r], &msum[r]);
    }
    store_sums(y, acc, nr);
    if (t == ENG_Q4_1)
        for (int r = 0; r < nr; r++)
            y[r] += msum[r];
}

/* nr rows of float32 activations; four accumulators a row, one for each eighth element of 32. */
INLINE void rows_f32(const eng_type t, const int nr, float *y, const char *w, size_t row_bytes, const float *x, size_t n)
{
    __m256 acc[2][4], out[2];
    const size_t bytes = bytes_of_32(t);
    for (int r = 0; r < nr; r++)
        for (int j = 0; j < 4; j++)
            acc[r][j] = _mm256_setzero_ps();
    for (size_t i = 0; i < n; i += 32) {
        __m256 u[4], v[4];
        load32(ENG_F32, x, i, n, u);
        prefetch_ahead(w + (size_t)nr * (i / 32) * bytes, (size_t)nr * bytes);
        for (int r = 0; r < nr; r++) {
            load32(t, w + (size_t)r * row_bytes, i, n, v);
            for (int j = 0; j < 4; j++)
                acc[r][j] = _mm256_fmadd_ps(v[j], u[j], acc[r][j]);
        }
    }
    for (int r = 0; r < nr; r++)
        out[r] = _mm256_add_ps(_mm256_add_ps(acc[r][0], acc[r][1]), _mm256_add_ps(acc[r][2], acc[r][3]));
    store_sums(y, out, nr);
}

#define GEMV(NAME, ROWS, NR, X, T)                                                                                                         \
    static void NAME(float *y, const void *w, size_t row_bytes, size_t rows, const X *x, size_t n)                                         \
    {                                                                                                                                      \
        size_t r = 0;                                                                                                                      \
        for (; r + NR <= rows; r += NR)                                                                                                    \
            ROWS(T, NR, y + r, (const char *)w + r * row_bytes, row_bytes, x, n);                                                          \
        for (; r < rows; r++)                                                                                                              \
            ROWS(T, 1, y + r, (const char *)w + r * row_bytes, row_bytes, x, n);                                                           \
    }
GEMV(gemv_q8_q8_0, rows_q8, 4, eng_q8_act, ENG_Q8_0)
GEMV(gemv_q8_q4_0, rows_q8, 4, eng_q8_act, ENG_Q4_0)
GEMV(gemv_q8_q4_1, rows_q8, 4, eng_q8_act, ENG_Q4_1)
GEMV(gemv_f32_f32, rows_f32, 2, float, ENG_F32)
GEMV(gemv_f32_f16, rows_f32, 2, float, ENG_F16)
GEMV(gemv_f32_bf16, rows_f32, 2, float, ENG_BF16)
GEMV(gemv_f32_q8_0, rows_f32, 2, float, ENG_Q8_0)
GEMV(gemv_f32_q4_0, rows_f32, 2, float, ENG_Q4_0)
GEMV(gemv_f32_q4_1, rows_f32, 2, float, ENG_Q4_1)
#undef GEMV

void eng_avx2_gemv(eng_kernels *k)
{
    k->gemv_q8[ENG_Q8_0] = gemv_q8_q8_0;
    k->gemv_q8[ENG_Q4_0] = gemv_q8_q4_0;
    k->gemv_q8[ENG_Q4_1] = gemv_q8_q4_1;
    k->gemv_f32[ENG_F32] = gemv_f32_f32;
    k->gemv_f32[ENG_F16] = gemv_f32_f16;
    k->gemv_f32[ENG_BF16] = gemv_f32_bf16;
    k->gemv_f32[ENG_Q8_0] = gemv_f32_q8_0;
    k->gemv_f32[ENG_Q4_0] = gemv_f32_q4_0;
    k->gemv_f32[ENG_Q4_1] = gemv_f32_q4_1;
}
#endif
