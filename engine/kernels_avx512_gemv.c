/* AVX-512 matrix-vector products of decoding. What bounds them is memory, so the aim is few instructions a block: four blocks of
 * a row at a time, one integer dot product (VPDPBUSD) per 64 weights, four rows sharing what is prepared of x.
 */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_avx512.h"

/* Four blocks of x, as the weights' layout wants it. */
typedef struct {
    __m512i a, b;   /* nibbles: elements 0..15 of each block, elements 16..31; bytes: blocks 0 1, blocks 2 3 */
    __m512i ca, cb; /* what the dot products start from: minus the unsigned offset's share */
    __m128 d;       /* [4] */
    __m256 ds;      /* d0 s0 d1 s1 ... */
} x_group;

INLINE x_group load_x(const eng_q8_act *x, size_t block, size_t n_left, const eng_type t)
{
    x_group g;
    const __m512i zero = _mm512_setzero_si512();
    __mmask8 k = n_left >= 4 ? 15 : (__mmask8)((1u << n_left) - 1);
    __mmask64 first = n_left >= 2 ? ~(__mmask64)0 : 0xffffffff;
    __mmask64 second = n_left >= 4 ? ~(__mmask64)0 : n_left == 3 ? 0xffffffff : 0;
    const int8_t *q = x->q + 32 * block;
    __m512i u = _mm512_maskz_loadu_epi8(first, q), v = second ? _mm512_maskz_loadu_epi8(second, q + 64) : zero;
    g.d = _mm_maskz_loadu_ps(k, x->d + block);
    if (t == ENG_Q8_0) {
        const __m512i offset = _mm512_set1_epi8((char)128);
        g.a = u;
        g.b = v;
        g.ca = _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(zero, offset, u));
        g.cb = _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(zero, offset, v));
        return g;
    }
    g.a = _mm512_shuffle_i32x4(u, v, 0x88);
    g.b = _mm512_shuffle_i32x4(u, v, 0xdd);
    g.ca = zero;
    if (t == ENG_Q4_0) {
        const __m512i offset = _mm512_set1_epi8(8);
        g.ca = _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, offset, g.a), offset, g.b));
    } else {
        __m128 s = _mm_maskz_loadu_ps(k, x->s + block);
        g.ds = _mm256_set_m128(_mm_unpackhi_ps(g.d, s), _mm_unpacklo_ps(g.d, s));
    }
    return g;
}

/* n blocks of 16 bytes, `step` bytes apart, side by side; 0 where there are fewer than four. */
INLINE __m512i load_nibbles(const char *p, size_t step, size_t n)
{
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128((const void *)p));
    if (n == 4) {
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + step)), 1);
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + 2 * step)), 2);
        return _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + 3 * step)), 3);
    }
    v = _mm512_zextsi128_si512(_mm512_castsi512_si128(v));
    if (n > 1)
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + step)), 1);
    if (n > 2)
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + 2 * step)), 2);
    return v;
}

INLINE uint32_t get32(const void *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* The f16 at the start of up to four blocks, as float32. */
INLINE __m128 load_d(const char *p, size_t step, size_t n)
{
    uint16_t h[4] = {0};
    memcpy(&h[0], p, 2);
    if (n > 1)
        memcpy(&h[1], p + step, 2);
    if (n > 2)
        memcpy(&h[2], p + 2 * step, 2);
    if (n > 3)
        memcpy(&h[3], p + 3 * step, 2);
    return _mm_cvtph_ps(_mm_setr_epi16((short)h[0], (short)h[1], (short)h[2], (short)h[3], 0, 0, 0, 0));
}

/* acc += four blocks (or n < 4) of one row; macc (Q4_1) gathers m s in its odd lanes. */
INLINE void step4(const eng_type t, const char *w, size_t n, const x_group *x, __m512 *acc, __m256 *macc)
{
    const __m512i low = _mm512_set1_epi8(15);
    if (t == ENG_Q8_0) {
        const size_t step = sizeof(eng_q8_0);
        const __m512i flip = _mm512_set1_epi8((char)128); /* w + 128 as unsigned */
        const __m512i pair0 = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
        const __m512i pair1 = _mm512_setr_epi32(2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
        __m512 sc = _mm512_castps128_ps512(_mm_mul_ps(load_d(w, step, n), x->d));
        __m512i v = _mm512_zextsi256_si512(_mm256_loadu_si256((const void *)(w + 2)));
        if (n > 1)
            v = _mm512_inserti64x4(v, _mm256_loadu_si256((const void *)(w + step + 2)), 1);
        __m512i dot = _mm512_dpbusd_epi32(x->ca, _mm512_xor_si512(v, flip), x->a);
        *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(pair0, sc), *acc);
        if (n > 2) {
            v = _mm512_zextsi256_si512(_mm256_loadu_si256((const void *)(w + 2 * step + 2)));
            if (n > 3)
                v = _mm512_inserti64x4(v, _mm256_loadu_si256((const void *)(w + 3 * step + 2)), 1);
            dot = _mm512_dpbusd_epi32(x->cb, _mm512_xor_si512(v, flip), x->b);
            *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(pair1, sc), *acc);
        }
        return;
    }
    const size_t step = t == ENG_Q4_0 ? sizeof(eng_q4_0) : sizeof(eng_q4_1);
    __m512i v = load_nibbles(w + step - 16, step, n);
    __m512i dot = _mm512_dpbusd_epi32(x->ca, _mm512_and_si512(v, low), x->a);
    dot = _mm512_dpbusd_epi32(dot, _mm512_and_si512(_mm512_srli_epi16(v, 4), low), x->b);
    __m512 sc;
    if (t == ENG_Q4_0) {
        const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
        sc = _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(_mm_mul_ps(load_d(w, step, n), x->d)));
    } else {
        const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
        __m128i dm = _mm_setr_epi32((int)get32(w), n > 1 ? (int)get32(w + step) : 0, n > 2 ? (int)get32(w + 2 * step) : 0,
                                    n > 3 ? (int)get32(w + 3 * step) : 0);
        __m256 p = _mm256_mul_ps(_mm256_cvtph_ps(dm), x->ds);
        *macc = _mm256_add_ps(*macc, p);
        sc = _mm512_permutexvar_ps(spread, _mm512_castps256_ps512(p));
    }
    *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), sc, *acc);
}

/* nr (1 or 4) rows. */
INLINE void rows_q8(const eng_type t, const int nr, float *y, const char *w, size_t row_bytes, const eng_q8_act *x, size_t n)
{
    const size_t bytes = bytes_of_32(t);
    __m512 acc[4];
    __m256 macc[4];
    for (int r = 0; r < nr; r++) {
        acc[r] = _mm512_setzero_ps();
        macc[r] = _mm256_setzero_ps();
    }
    size_t blocks = n / 32, b = 0;
    for (; b + 4 <= blocks; b += 4) {
        x_group g = load_x(x, b, 4, t);
        prefetch_ahead(w + (size_t)nr * b * bytes, 4 * (size_t)nr * bytes);
        for (int r = 0; r < nr; r++)
            step4(t, w + (size_t)r * row_bytes + b * bytes, 4, &g, &acc[r], &macc[r]);
    }
    if (b < blocks) {
        x_group g = load_x(x, b, blocks - b, t);
        for (int r = 0; r < nr; r++)
            step4(t, w + (size_t)r * row_bytes + b * bytes, blocks - b, &g, &acc[r], &macc[r]);
    }
    if (t == ENG_Q4_1)
        for (int r = 0; r < nr; r++)
            acc[r] = _mm512_add_ps(acc[r], _mm512_zextps256_ps512(_mm256_maskz_mov_ps(0xaa, macc[r])));
    store_sums(y, acc, nr);
}

/* nr rows of float32 activations; two accumulators a row: elements 0..15 and 16..31 of each 32. */
INLINE void rows_f32(const eng_type t, const int nr, float *y, const char *w, size_t row_bytes, const float *x, size_t n)
{
    __m512 acc[4][2], out[4];
    const size_t bytes = bytes_of_32(t);
    for (int r = 0; r < nr; r++)
        acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (size_t i = 0; i < n; i += 32) {
        __m512 u[2], v[2];
        load32(ENG_F32, x, i, n, u);
        prefetch_ahead(w + (size_t)nr * (i / 32) * bytes, (size_t)nr * bytes);
        for (int r = 0; r < nr; r++) {
            load32(t, w + (size_t)r * row_bytes, i, n, v);
            acc[r][0] = _mm512_fmadd_ps(v[0], u[0], acc[r][0]);
            acc[r][1] = _mm512_fmadd_ps(v[1], u[1], acc[r][1]);
        }
    }
    for (int r = 0; r < nr; r++)
        out[r] = _mm512_add_ps(acc[r][0], acc[r][1]);
    store_sums(y, out, nr);
}

#define GEMV(NAME, ROWS, X, T)                                                                                                             \
    static void NAME(float *y, const void *w, size_t row_bytes, size_t rows, const X *x, size_t n)                                         \
    {                                                                                                                                      \
        size_t r = 0;                                                                                                                      \
        for (; r + 4 <= rows; r += 4)                                                                                                      \
            ROWS(T, 4, y + r, (const char *)w + r * row_bytes, row_bytes, x, n);                                                           \
        for (; r < rows; r++)                                                                                                              \
            ROWS(T, 1, y + r, (const char *)w + r * row_bytes, row_bytes, x, n);                                                           \
    }
GEMV(gemv_q8_q8_0, rows_q8, eng_q8_act, ENG_Q8_0)
GEMV(gemv_q8_q4_0, rows_q8, eng_q8_act, ENG_Q4_0)
GEMV(gemv_q8_q4_1, rows_q8, eng_q8_act, ENG_Q4_1)
GEMV(gemv_f32_f32, rows_f32, float, ENG_F32)
GEMV(gemv_f32_f16, rows_f32, float, ENG_F16)
GEMV(gemv_f32_bf16, rows_f32, float, ENG_BF16)
GEMV(gemv_f32_q8_0, rows_f32, float, ENG_Q8_0)
GEMV(gemv_f32_q4_0, rows_f32, float, ENG_Q4_0)
GEMV(gemv_f32_q4_1, rows_f32, float, ENG_Q4_1)
#undef GEMV

void eng_avx512_gemv(eng_kernels *k)
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
