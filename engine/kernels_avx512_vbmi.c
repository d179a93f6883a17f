/* AVX-512 matrix-vector products of decoding for CPUs that permute the bytes of two vectors in one operation (VBMI on AMD since Zen 4; on
 * Intel it is three). Four blocks of 32 with 4 or 5 bits are two loads; one permutation each takes the codes, the fifth bits and the scales
 * out of them. Elements 0..15 of the four blocks are one vector, elements 16..31 the other, so that all 128 share an accumulator.
 */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_avx512.h"

/* The types of this file: four blocks are 72 to 96 bytes. */
#define EACH_TYPE(X) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(IQ4_NL)

INLINE bool has_fifth(const eng_type t)
{
    return t == ENG_Q5_0 || t == ENG_Q5_1;
}

/* What is added to a code to make it unsigned, as VPDPBUSD wants it. */
INLINE int raised_by(const eng_type t)
{
    return t == ENG_IQ4_NL ? 128 : offset_of(t);
}

/* The lanes that exist of 64, with n bytes left. */
INLINE __mmask64 tail64(size_t n)
{
    return n >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << n) - 1;
}

/* ---- activations ------------------------------------------------------------------------------------------------ */

typedef struct {
    __m512i a, b; /* elements 0..15, 16..31 of four blocks */
    __m512i c;    /* what the dot products start from: minus the unsigned offset's share */
    __m256 d;     /* d0 s0 d1 s1 ...; s is 0 where there are no minima */
} x_group;

/* n (1 to 4) blocks; what is missing is 0. */
INLINE x_group load_x(const eng_type t, const eng_q8_act *x, size_t block, size_t n)
{
    const int8_t *q = x->q + 32 * block;
    const __m512i zero = _mm512_setzero_si512(), offset = _mm512_set1_epi8((char)raised_by(t));
    __m512i u = _mm512_maskz_loadu_epi8(tail64(32 * n), q), v = n > 2 ? _mm512_maskz_loadu_epi8(tail64(32 * n - 64), q + 64) : zero;
    __mmask8 k = (__mmask8)((1u << n) - 1);
    __m128 d = _mm_maskz_loadu_ps(k, x->d + block), s = has_min(t) ? _mm_maskz_loadu_ps(k, x->s + block) : _mm_setzero_ps();
    x_group g = {.a = _mm512_shuffle_i32x4(u, v, 0x88), .b = _mm512_shuffle_i32x4(u, v, 0xdd), .c = zero};
    g.d = _mm256_set_m128(_mm_unpackhi_ps(d, s), _mm_unpacklo_ps(d, s));
    if (raised_by(t))
        g.c = _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(zero, offset, g.a), offset, g.b));
    return g;
}

/* ---- weights ---------------------------------------------------------------------------------------------------- */

/* Four blocks: their first 64 bytes, and their last 32 in the low half of `end`. */
typedef struct {
    __m512i start, end;
} blocks4;

/* n (1 to 4) blocks; what is missing is 0, its scales with it. */
INLINE blocks4 load_blocks(const eng_type t, const char *p, size_t n)
{
    const size_t step = block_bytes(t), end = 4 * step - 32;
    if (n == 4)
        return (blocks4){_mm512_loadu_si512(p), _mm512_castsi256_si512(load_bytes(p + end))};
    size_t left = n * step > end ? n * step - end : 0;
    return (blocks4){_mm512_maskz_loadu_epi8(tail64(n * step), p), _mm512_maskz_loadu_epi8(tail64(left), p + end)};
}

/* Where the permutation of both vectors finds byte i. */
INLINE int place(const eng_type t, size_t i)
{
    return (int)(i < 64 ? i : i + 96 - 4 * block_bytes(t));
}

INLINE int places(const eng_type t, size_t i)
{
    return place(t, i) | place(t, i + 1) << 8 | place(t, i + 2) << 16 | place(t, i + 3) << 24;
}

/* Of each block the four dwords at `at`, each `stride` bytes behind the one before. */
INLINE __m512i take(const eng_type t, const blocks4 *w, const size_t at, const size_t stride)
{
#define P(BLOCK, DWORD) places(t, (BLOCK) * block_bytes(t) + at + (DWORD) * stride)
    const __m512i where = _mm512_setr_epi32(P(0, 0), P(0, 1), P(0, 2), P(0, 3), P(1, 0), P(1, 1), P(1, 2), P(1, 3), P(2, 0), P(2, 1),
                                            P(2, 2), P(2, 3), P(3, 0), P(3, 1), P(3, 2), P(3, 3));
#undef P
    return _mm512_permutex2var_epi8(w->start, where, w->end);
}

/* The unsigned codes: elements 0..15 of the blocks, then 16..31. */
INLINE void load_codes16(const eng_type t, const blocks4 *w, __m512i out[2])
{
    const size_t step = block_bytes(t);
    const __m512i nibble = _mm512_set1_epi8(15), bit4 = _mm512_set1_epi8(16);
    __m512i v = take(t, w, step - 16, 4);
    out[0] = _mm512_and_si512(v, nibble);
    out[1] = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
    if (has_fifth(t)) {
        /* A block's 32 fifth bits, four times; element i's byte gets the bits from i - 4 on, and so bit i as its bit 4. */
        const __m512i from = _mm512_broadcast_i32x4(_mm_setr_epi8(28, 29, 30, 31, 32, 33, 34, 35, 4, 5, 6, 7, 8, 9, 10, 11));
        const __m512i high = _mm512_add_epi8(from, _mm512_set1_epi8(16));
        __m512i h = take(t, w, step - 20, 0);
        out[0] = _mm512_ternarylogic_epi32(out[0], _mm512_multishift_epi64_epi8(from, h), bit4, 0xf8); /* | (bits & 16) */
        out[1] = _mm512_ternarylogic_epi32(out[1], _mm512_multishift_epi64_epi8(high, h), bit4, 0xf8);
    }
    if (t == ENG_IQ4_NL) {
        out[0] = raised_iq4_values(out[0]);
        out[1] = raised_iq4_values(out[1]);
    }
}

/* The scales times x's: lane 2 b of block b; with minima lane 2 b + 1 is the minimum's share. */
INLINE __m256 load_scales4(const eng_type t, const blocks4 *w, const x_group *x)
{
    const size_t step = block_bytes(t);
    const __m128i where = _mm_setr_epi32(places(t, 0), places(t, step), places(t, 2 * step), places(t, 3 * step));
    __m512i heads = _mm512_permutex2var_epi8(w->start, _mm512_castsi128_si512(where), w->end);
    return _mm256_mul_ps(_mm256_cvtph_ps(_mm512_castsi512_si128(heads)), x->d);
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* acc += four blocks of one row; macc gathers the minima's share in its odd lanes. */
INLINE void step4(const eng_type t, const char *p, size_t n, const x_group *x, __m512 *acc, __m256 *macc)
{
    const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
    blocks4 w = load_blocks(t, p, n);
    __m512i q[2];
    load_codes16(t, &w, q);
    __m256 s = load_scales4(t, &w, x);
    if (has_min(t))
        *macc = _mm256_add_ps(*macc, s);
    __m512i dot = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(x->c, q[0], x->a), q[1], x->b);
    *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(spread, _mm512_castps256_ps512(s)), *acc);
}

/* nr (1 or 4) rows. */
INLINE void rows_vbmi(const eng_type t, const int nr, float *y, const char *w, size_t row_bytes, const eng_q8_act *x, size_t n)
{
    const size_t bytes = block_bytes(t), blocks = n / 32;
    __m512 acc[4];
    __m256 macc[4];
    for (int r = 0; r < nr; r++) {
        acc[r] = _mm512_setzero_ps();
        macc[r] = _mm256_setzero_ps();
    }
    size_t b = 0;
    for (; b + 4 <= blocks; b += 4) {
        x_group g = load_x(t, x, b, 4);
        prefetch_ahead(w + (size_t)nr * b * bytes, 4 * (size_t)nr * bytes);
        for (int r = 0; r < nr; r++)
            step4(t, w + (size_t)r * row_bytes + b * bytes, 4, &g, &acc[r], &macc[r]);
    }
    if (b < blocks) {
        x_group g = load_x(t, x, b, blocks - b);
        for (int r = 0; r < nr; r++)
            step4(t, w + (size_t)r * row_bytes + b * bytes, blocks - b, &g, &acc[r], &macc[r]);
    }
    if (has_min(t))
        for (int r = 0; r < nr; r++)
            acc[r] = _mm512_add_ps(acc[r], _mm512_zextps256_ps512(_mm256_maskz_mov_ps(0xaa, macc[r])));
    store_sums(y, acc, nr);
}

#define GEMV_VBMI(T) GEMV(gemv_q8_##T, rows_vbmi, eng_q8_act, ENG_##T)
EACH_TYPE(GEMV_VBMI)
#undef GEMV_VBMI

void eng_kernels_vbmi(eng_kernels *k)
{
#define ENTRY(T) k->gemv_q8[ENG_##T] = gemv_q8_##T;
    EACH_TYPE(ENTRY)
#undef ENTRY
}
#endif
