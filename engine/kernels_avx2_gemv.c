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

/* Integer products of 32 codes and x, as eight sums of four. share: what the codes' offset adds. */
INLINE __m256i dot_codes(const eng_type t, __m256i codes, __m256i x, __m256i share)
{
    if (is_signed(t))
        return dot_bytes(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
    __m256i dot = dot_bytes(codes, x);
    return offset_of(t) ? _mm256_sub_epi32(dot, share) : dot;
}

INLINE __m256i offset_share(const eng_type t, __m256i x)
{
    return offset_of(t) ? dot_bytes(_mm256_set1_epi8((char)offset_of(t)), x) : _mm256_setzero_si256();
}

/* nr (1 or 4) rows of blocks of 32. */
INLINE void rows_small(const eng_type t, const int nr, float *y, const char *w, size_t row_bytes, const eng_q8_act *x, size_t n)
{
    const size_t bytes = block_bytes(t);
    __m256 acc[4];
    float msum[4] = {0};
    for (int r = 0; r < nr; r++)
        acc[r] = _mm256_setzero_ps();
    for (size_t b = 0; b < n / 32; b++) {
        prefetch_ahead(w + (size_t)nr * b * bytes, (size_t)nr * bytes);
        __m256i q = load_bytes(x->q + 32 * b), share = offset_share(t, q);
        for (int r = 0; r < nr; r++) {
            const char *block = w + (size_t)r * row_bytes + b * bytes;
            __m256i dot = dot_codes(t, load_codes(t, block, 0), q, share);
            if (has_min(t))
                msum[r] += f16_one(get16(block + 2)) * x->s[b];
            acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(f16_all(get16(block)), _mm256_set1_ps(x->d[b])), acc[r]);
        }
    }
    store_sums(y, acc, nr);
    if (has_min(t))
        for (int r = 0; r < nr; r++)
            y[r] += msum[r];
}

/* What multiplies the eight sums of part j. */
INLINE __m256 scale_of_part(const eng_type t, const float *scales, const int j)
{
    if (!has_halves(t))
        return _mm256_set1_ps(scales[j]);
    return _mm256_blend_ps(_mm256_set1_ps(scales[2 * j]), _mm256_set1_ps(scales[2 * j + 1]), 0xf0);
}

/* The scales of a super-block times those of x. Where a minimum is for 32 elements, acc takes up its share here. */
INLINE void scale_super(const eng_type t, const char *block, const __m256 dx[2], __m256 s, stored_scales *out, __m256 *acc)
{
    super_scales v = load_scales(t, block);
    _mm256_store_ps(out->d, _mm256_mul_ps(v.d[0], dx[0]));
    if (has_halves(t))
        _mm256_store_ps(out->d + 8, _mm256_mul_ps(v.d[1], dx[1]));
    if (has_min(t) && has_halves(t)) {
        _mm256_store_ps(out->m, _mm256_mul_ps(v.m[0], dx[0]));
        _mm256_store_ps(out->m + 8, _mm256_mul_ps(v.m[1], dx[1]));
    } else if (has_min(t)) {
        *acc = _mm256_fmadd_ps(v.m[0], s, *acc);
    }
}

/* nr (1 or 4) rows of super-blocks. */
INLINE void rows_super(const eng_type t, const int nr, float *y, const char *w, size_t row_bytes, const eng_q8_act *x, size_t n)
{
    const size_t bytes = block_bytes(t);
    __m256 acc[4];
    stored_scales scales[4];
    for (int r = 0; r < nr; r++)
        acc[r] = _mm256_setzero_ps();
    for (size_t b = 0; b < n / 256; b++) {
        prefetch_ahead(w + (size_t)nr * b * bytes, (size_t)nr * bytes);
        const char *block = w + b * bytes;
        __m256 s = _mm256_loadu_ps(x->s + 8 * b), dx[2] = {_mm256_loadu_ps(x->d + 8 * b)};
        if (has_halves(t)) { /* each twice */
            dx[1] = _mm256_permutevar8x32_ps(dx[0], _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7));
            dx[0] = _mm256_permutevar8x32_ps(dx[0], _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
        }
        for (int r = 0; r < nr; r++)
            scale_super(t, block + (size_t)r * row_bytes, dx, s, &scales[r], &acc[r]);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            __m256i q = load_bytes(x->q + 256 * b + 32 * (size_t)j), share = offset_share(t, q);
            __m256 sums = has_min(t) && has_halves(t) ? _mm256_cvtepi32_ps(dot_bytes(_mm256_set1_epi8(1), q)) : s;
            for (int r = 0; r < nr; r++) {
                __m256i dot = dot_codes(t, load_super_codes(t, block + (size_t)r * row_bytes, j), q, share);
                acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale_of_part(t, scales[r].d, j), acc[r]);
                if (has_min(t) && has_halves(t))
                    acc[r] = _mm256_fmadd_ps(sums, scale_of_part(t, scales[r].m, j), acc[r]);
            }
        }
    }
    store_sums(y, acc, nr);
}

/* nr rows of float32 activations; four accumulators a row, one for each eighth element of 32. */
INLINE void rows_f32(const eng_type t, const int nr, float *y, const char *w, size_t row_bytes, const float *x, size_t n)
{
    __m256 acc[2][4], out[2];
    stored_scales s[2];
    const size_t step = is_super(t) ? 256 : 32, bytes = t < ENG_Q8_0 ? 32 * block_bytes(t) : block_bytes(t);
    for (int r = 0; r < nr; r++)
        for (int j = 0; j < 4; j++)
            acc[r][j] = _mm256_setzero_ps();
    for (size_t i = 0; i < n; i += 32) {
        __m256 u[4], v[4];
        load32(ENG_F32, x, i, n, NULL, u);
        if (i % step == 0)
            prefetch_ahead(w + (size_t)nr * (i / step) * bytes, (size_t)nr * bytes);
        for (int r = 0; is_super(t) && i % 256 == 0 && r < nr; r++)
            store_scales(t, block_at(t, w + (size_t)r * row_bytes, i), &s[r]);
        for (int r = 0; r < nr; r++) {
            load32(t, w + (size_t)r * row_bytes, i, n, &s[r], v);
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
#define GEMV_F32(T)   GEMV(gemv_f32_##T, rows_f32, 2, float, ENG_##T)
#define GEMV_SMALL(T) GEMV(gemv_q8_##T, rows_small, 4, eng_q8_act, ENG_##T)
#define GEMV_SUPER(T) GEMV(gemv_q8_##T, rows_super, 4, eng_q8_act, ENG_##T)
ENG_EACH_TYPE(GEMV_F32)
ENG_EACH_SMALL_TYPE(GEMV_SMALL)
ENG_EACH_SUPER_TYPE(GEMV_SUPER)
#undef GEMV
#undef GEMV_F32
#undef GEMV_SMALL
#undef GEMV_SUPER

void eng_avx2_gemv(eng_kernels *k)
{
#define ENTRY(T) k->gemv_f32[ENG_##T] = gemv_f32_##T;
    ENG_EACH_TYPE(ENTRY)
#undef ENTRY
#define ENTRY(T) k->gemv_q8[ENG_##T] = gemv_q8_##T;
    ENG_EACH_BLOCK_TYPE(ENTRY)
#undef ENTRY
}
#endif
