/* AVX-512 matrix-vector products of decoding. What bounds them is memory, so the aim is few instructions a block: four blocks of
 * a row at a time, one integer dot product (VPDPBUSD) per 64 weights, four rows sharing what is prepared of x.
 */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_avx512.h"

/* Two ways to hold four blocks in two vectors. Nibbles: elements 0..15 of each block, elements 16..31, so that two bits operations unpack
 * all. Pairs: blocks 0 and 1, blocks 2 and 3, which is what the file has of Q8_0, and the order of Q5's fifth bits. */
INLINE bool in_pairs(const eng_type t)
{
    return t == ENG_Q8_0 || t == ENG_Q5_0 || t == ENG_Q5_1;
}

/* What is added to a code to make it unsigned, as VPDPBUSD wants it. */
INLINE int raised_by(const eng_type t)
{
    return t == ENG_Q8_0 || t == ENG_IQ4_NL ? 128 : offset_of(t);
}

/* Four blocks of x, as the weights' layout wants it. */
typedef struct {
    __m512i a, b;
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
    const __m512i offset = _mm512_set1_epi8((char)raised_by(t));
    g.d = _mm_maskz_loadu_ps(k, x->d + block);
    if (has_min(t)) {
        __m128 s = _mm_maskz_loadu_ps(k, x->s + block);
        g.ds = _mm256_set_m128(_mm_unpackhi_ps(g.d, s), _mm_unpacklo_ps(g.d, s));
    }
    g.a = in_pairs(t) ? u : _mm512_shuffle_i32x4(u, v, 0x88);
    g.b = in_pairs(t) ? v : _mm512_shuffle_i32x4(u, v, 0xdd);
    g.ca = g.cb = zero;
    if (!raised_by(t))
        return g;
    if (in_pairs(t)) {
        g.ca = _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(zero, offset, g.a));
        g.cb = _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(zero, offset, g.b));
    } else {
        g.ca = _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, offset, g.a), offset, g.b));
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

/* The unsigned codes of a pair of blocks (or of one, then 0), in the file's order. */
INLINE __m512i load_pair(const eng_type t, const char *p, const bool two)
{
    const size_t step = block_bytes(t);
    if (t == ENG_Q8_0) {
        __m512i v = _mm512_zextsi256_si512(load_bytes(p + 2));
        if (two)
            v = _mm512_inserti64x4(v, load_bytes(p + step + 2), 1);
        return _mm512_xor_si512(v, _mm512_set1_epi8((char)128));
    }
    const size_t q = step - 16, h = q - 4;
    const __m512i shift = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
    __m512i v = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)(p + q)));
    uint64_t fifth = get32(p + h);
    if (two) {
        v = _mm512_mask_broadcast_i32x4(v, 0xff00, _mm_loadu_si128((const void *)(p + step + q)));
        fifth |= (uint64_t)get32(p + step + h) << 32;
    }
    v = _mm512_and_si512(_mm512_srlv_epi64(v, shift), _mm512_set1_epi8(15));
    return _mm512_mask_add_epi8(v, fifth, v, _mm512_set1_epi8(16));
}

/* The scales of up to four blocks times x's: [4] d, or, with minima, d0 m0 d1 m1 ... whose odd lanes macc gathers. */
INLINE __m512 load_scales4(const eng_type t, const char *w, size_t n, const x_group *x, __m256 *macc)
{
    const size_t step = block_bytes(t);
    if (!has_min(t))
        return _mm512_castps128_ps512(_mm_mul_ps(load_d(w, step, n), x->d));
    __m128i dm = _mm_setr_epi32((int)get32(w), n > 1 ? (int)get32(w + step) : 0, n > 2 ? (int)get32(w + 2 * step) : 0,
                                n > 3 ? (int)get32(w + 3 * step) : 0);
    __m256 p = _mm256_mul_ps(_mm256_cvtph_ps(dm), x->ds);
    *macc = _mm256_add_ps(*macc, p);
    return _mm512_castps256_ps512(p);
}

/* acc += four blocks (or n < 4) of one row. */
INLINE void step4(const eng_type t, const char *w, size_t n, const x_group *x, __m512 *acc, __m256 *macc)
{
    const size_t step = block_bytes(t);
    const int k = has_min(t) ? 2 : 1; /* lanes of sc a block */
    __m512 sc = load_scales4(t, w, n, x, macc);
    if (in_pairs(t)) {
        const __m512i pair0 = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, k, k, k, k, k, k, k, k);
        const __m512i pair1 = _mm512_add_epi32(pair0, _mm512_set1_epi32(2 * k));
        __m512i dot = _mm512_dpbusd_epi32(x->ca, load_pair(t, w, n > 1), x->a);
        *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(pair0, sc), *acc);
        if (n > 2) {
            dot = _mm512_dpbusd_epi32(x->cb, load_pair(t, w + 2 * step, n > 3), x->b);
            *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(pair1, sc), *acc);
        }
        return;
    }
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, k, k, k, k, 2 * k, 2 * k, 2 * k, 2 * k, 3 * k, 3 * k, 3 * k, 3 * k);
    __m512i v = load_nibbles(w + step - 16, step, n), a = _mm512_and_si512(v, low);
    __m512i b = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
    if (t == ENG_IQ4_NL) {
        a = raised_iq4_values(a);
        b = raised_iq4_values(b);
    }
    __m512i dot = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(x->ca, a, x->a), b, x->b);
    *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(spread, sc), *acc);
}

/* nr (1 or 4) rows. */
INLINE void rows_q8(const eng_type t, const int nr, float *y, const char *w, size_t row_bytes, const eng_q8_act *x, size_t n)
{
    const size_t bytes = block_bytes(t);
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
    if (has_min(t))
        for (int r = 0; r < nr; r++)
            acc[r] = _mm512_add_ps(acc[r], _mm512_zextps256_ps512(_mm256_maskz_mov_ps(0xaa, macc[r])));
    store_sums(y, acc, nr);
}

/* nr rows of float32 activations; two accumulators a row: elements 0..15 and 16..31 of each 32. */
INLINE void rows_f32(const eng_type t, const int nr, float *y, const char *w, size_t row_bytes, const float *x, size_t n)
{
    __m512 acc[4][2], out[4];
    stored_scales s[4];
    const size_t step = is_super(t) ? 256 : 32, bytes = t < ENG_Q8_0 ? 32 * block_bytes(t) : block_bytes(t);
    for (int r = 0; r < nr; r++)
        acc[r][0] = acc[r][1] = _mm512_setzero_ps();
    for (size_t i = 0; i < n; i += 32) {
        __m512 u[2], v[2];
        load32(ENG_F32, x, i, n, NULL, u);
        if (i % step == 0)
            prefetch_ahead(w + (size_t)nr * (i / step) * bytes, (size_t)nr * bytes);
        for (int r = 0; is_super(t) && i % 256 == 0 && r < nr; r++)
            store_scales(t, block_at(t, w + (size_t)r * row_bytes, i), &s[r]);
        for (int r = 0; r < nr; r++) {
            load32(t, w + (size_t)r * row_bytes, i, n, &s[r], v);
            acc[r][0] = _mm512_fmadd_ps(v[0], u[0], acc[r][0]);
            acc[r][1] = _mm512_fmadd_ps(v[1], u[1], acc[r][1]);
        }
    }
    for (int r = 0; r < nr; r++)
        out[r] = _mm512_add_ps(acc[r][0], acc[r][1]);
    store_sums(y, out, nr);
}

#define GEMV_F32(T) GEMV(gemv_f32_##T, rows_f32, float, ENG_##T)
#define GEMV_Q8(T)  GEMV(gemv_q8_##T, rows_q8, eng_q8_act, ENG_##T)
ENG_EACH_TYPE(GEMV_F32)
ENG_EACH_SMALL_TYPE(GEMV_Q8)
#undef GEMV_F32
#undef GEMV_Q8

void eng_avx512_gemv(eng_kernels *k)
{
#define ENTRY(T) k->gemv_f32[ENG_##T] = gemv_f32_##T;
    ENG_EACH_TYPE(ENTRY)
#undef ENTRY
#define ENTRY(T) k->gemv_q8[ENG_##T] = gemv_q8_##T;
    ENG_EACH_SMALL_TYPE(ENTRY)
#undef ENTRY
}
#endif
