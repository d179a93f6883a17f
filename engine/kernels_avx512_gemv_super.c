/* AVX-512 matrix-vector products of decoding for super-blocks of 256: a super-block of a row at a time as four vectors of 64 unsigned
 * codes (VPDPBUSD), its scales in the lanes of one vector, four rows sharing what is prepared of x.
 */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_avx512.h"

/* What is added to a code to make it unsigned. */
INLINE int raised_by(const eng_type t)
{
    return t == ENG_IQ4_XS ? 128 : offset_of(t);
}

/* Whether its codes are taken as elements 0..15 of parts 0 2 4 6, then of 1 3 5 7, elements 16..31 of 0 2 4 6, of 1 3 5 7: the first and the
 * third, the second and the fourth have the same scales. */
INLINE bool in_quarters(const eng_type t)
{
    return t == ENG_Q4_K || t == ENG_Q5_K;
}

/* 256 elements of x, the codes in the order in which load_codes64 has the weights'. */
typedef struct {
    __m512i q[4];
    __m512i c[4]; /* what the dot products start from: minus what the raised codes add */
    __m512 d; /* what multiplies the scales: lane i belongs to part i (of 16 elements), to part i % 8 (of 32; then lanes 8..15 are -s) */
    __m512 s; /* Q2_K: minus the sums of 16 elements */
} x_super;

/* Sums of 16 of x's codes, in order, from the codes in order. */
INLINE __m512i sums_of_16(const __m512i q[4])
{
    const __m512i one = _mm512_set1_epi8(1), zero = _mm512_setzero_si512();
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i a = _mm512_dpbusd_epi32(zero, one, q[0]), b = _mm512_dpbusd_epi32(zero, one, q[1]);
    __m512i c = _mm512_dpbusd_epi32(zero, one, q[2]), d = _mm512_dpbusd_epi32(zero, one, q[3]);
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    /* lane 4L + k: sixteen number L of q[k] */
    __m512i sums = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    return _mm512_permutexvar_epi32(order, sums);
}

INLINE x_super load_x(const eng_q8_act *x, size_t block, const eng_type t)
{
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), zero = _mm512_setzero_si512();
    x_super g;
    __m512i q[4];
    for (size_t k = 0; k < 4; k++)
        q[k] = _mm512_loadu_si512(x->q + 256 * block + 64 * k);
    __m256 d = _mm256_loadu_ps(x->d + 8 * block);
    g.d = _mm512_zextps256_ps512(d);
    g.s = _mm512_setzero_ps();
    if (has_halves(t))
        g.d = _mm512_permutexvar_ps(twice, g.d);
    else if (has_min(t))
        g.d = _mm512_insertf32x8(g.d, _mm256_xor_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(x->s + 8 * block)), 1);
    if (t == ENG_Q4_K) /* its odd parts' codes stay where they are, times 16 */
        g.d = _mm512_mask_mul_ps(g.d, 0xaa, g.d, _mm512_set1_ps(0.0625f));
    if (t == ENG_Q2_K)
        g.s = _mm512_xor_ps(_mm512_set1_ps(-0.0f), _mm512_mul_ps(g.d, _mm512_cvtepi32_ps(sums_of_16(q))));
    for (size_t k = 0; k < 4; k += 2) {
        __m512i u = q[k], v = q[k + 1];
        g.q[k] = t == ENG_IQ4_XS ? _mm512_shuffle_i32x4(u, v, 0x88) : u;
        g.q[k + 1] = t == ENG_IQ4_XS ? _mm512_shuffle_i32x4(u, v, 0xdd) : v;
    }
    if (in_quarters(t)) {
        __m512i u0 = _mm512_shuffle_i32x4(q[0], q[1], 0x44), u1 = _mm512_shuffle_i32x4(q[2], q[3], 0x44); /* even parts */
        __m512i v0 = _mm512_shuffle_i32x4(q[0], q[1], 0xee), v1 = _mm512_shuffle_i32x4(q[2], q[3], 0xee);
        g.q[0] = _mm512_shuffle_i32x4(u0, u1, 0x88);
        g.q[1] = _mm512_shuffle_i32x4(v0, v1, 0x88);
        g.q[2] = _mm512_shuffle_i32x4(u0, u1, 0xdd);
        g.q[3] = _mm512_shuffle_i32x4(v0, v1, 0xdd);
    }
    for (size_t k = 0; k < 4; k++)
        g.c[k] = raised_by(t) ? _mm512_sub_epi32(zero, _mm512_dpbusd_epi32(zero, _mm512_set1_epi8((char)raised_by(t)), g.q[k])) : zero;
    return g;
}

/* ---- codes ------------------------------------------------------------------------------------------------------ */

/* Moves a field of each byte to where it belongs: rotations of dwords by a and b in the two halves; what crosses bytes is masked off. */
INLINE __m512i rotate(__m512i v, const int a, const int b)
{
    return _mm512_rolv_epi32(v, _mm512_setr_epi32(a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b));
}

/* low | (high & mask) */
INLINE __m512i with_high(__m512i low, __m512i high, const int mask)
{
    return _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8((char)mask), 0xf8);
}

INLINE __m512i twice32(const void *p)
{
    return _mm512_broadcast_i64x4(load_bytes(p));
}

INLINE __m512i load64(const void *p)
{
    return _mm512_loadu_si512(p);
}

/* Codes k and k + 1 of four, k even: low and high nibbles of 64 bytes, or four fields of 32 bytes. Of Q4_K the high ones times 16. */
INLINE void load_codes64(const eng_type t, const char *block, const int k, __m512i out[2])
{
    const __m512i nibble = _mm512_set1_epi8(15), two_bits = _mm512_set1_epi8(3);
    if (t == ENG_Q2_K || t == ENG_Q3_K) { /* parts 0 1, 2 3; then 4 5, 6 7 */
        const eng_q2_k *b2 = (const void *)block;
        const eng_q3_k *b3 = (const void *)block;
        __m512i v = twice32((t == ENG_Q2_K ? b2->q : b3->q) + 16 * k);
        out[0] = _mm512_and_si512(rotate(v, 0, 30), two_bits);
        out[1] = _mm512_and_si512(rotate(v, 28, 26), two_bits);
        if (t == ENG_Q3_K) { /* bit j of h to bit 2 */
            __m512i h = twice32(b3->h);
            out[0] = with_high(out[0], rotate(h, (34 - 2 * k) & 31, (33 - 2 * k) & 31), 4);
            out[1] = with_high(out[1], rotate(h, (32 - 2 * k) & 31, (31 - 2 * k) & 31), 4);
        }
        return;
    }
    const eng_q4_k *b4 = (const void *)block;
    const eng_q5_k *b5 = (const void *)block;
    const eng_q6_k *b6 = (const void *)block;
    const eng_iq4_xs *bx = (const void *)block;
    const uint8_t *q = t == ENG_Q4_K ? b4->q : t == ENG_Q5_K ? b5->q : t == ENG_Q6_K ? b6->q : bx->q;
    __m512i v = !in_quarters(t) ? load64(q + 32 * k)
                : k             ? _mm512_shuffle_i32x4(load64(q), load64(q + 64), 0xdd)
                                : _mm512_shuffle_i32x4(load64(q), load64(q + 64), 0x88);
    out[0] = _mm512_and_si512(v, nibble);
    if (t == ENG_Q4_K) {
        out[1] = _mm512_andnot_si512(nibble, v);
        return;
    }
    out[1] = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
    if (t == ENG_Q5_K) { /* bit j of h to bit 4 */
        const __m512i even = _mm512_setr_epi32(4, 4, 4, 4, 2, 2, 2, 2, 0, 0, 0, 0, 30, 30, 30, 30);
        const __m512i odd = _mm512_setr_epi32(3, 3, 3, 3, 1, 1, 1, 1, 31, 31, 31, 31, 29, 29, 29, 29);
        __m512i h = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)(b5->h + 8 * k)));
        out[0] = with_high(out[0], _mm512_rolv_epi32(h, even), 16);
        out[1] = with_high(out[1], _mm512_rolv_epi32(h, odd), 16);
    } else if (t == ENG_Q6_K) { /* parts 0 1, 2 3; then 4 5, 6 7: bits 2 (j % 4) of h to bits 4 5 */
        __m512i h = twice32(b6->h + 16 * k);
        out[0] = with_high(out[0], rotate(h, 4, 2), 48);
        out[1] = with_high(out[1], rotate(h, 0, 30), 48);
    } else if (t == ENG_IQ4_XS) { /* elements 0..15 of parts 0..3, elements 16..31 of them; then parts 4..7 */
        out[0] = raised_iq4_values(out[0]);
        out[1] = raised_iq4_values(out[1]);
    }
}

/* ---- scales ----------------------------------------------------------------------------------------------------- */

/* The scales times x's, in the lanes x_super.d says. macc gathers the minima's share: all lanes of it (Q2_K), lanes 8..15 (Q4_K, Q5_K). */
INLINE __m512 load_scales16(const eng_type t, const char *block, const x_super *x, __m512 *macc)
{
    if (t == ENG_IQ4_XS) {
        const eng_iq4_xs *b = (const void *)block;
        __m256 s = _mm256_mul_ps(f16_all(b->d), _mm256_cvtepi32_ps(unpack_scales_iq4_xs(b)));
        return _mm512_mul_ps(_mm512_castps256_ps512(s), x->d);
    }
    if (t == ENG_Q4_K || t == ENG_Q5_K) { /* the same layout up to the codes */
        const eng_q4_k *b = (const void *)block;
        const __m256i spread = _mm256_setr_epi16(0x100, 0x100, 0x100, 0x100, 0x100, 0x100, 0x100, 0x100,  /* d */
                                                 0x302, 0x302, 0x302, 0x302, 0x302, 0x302, 0x302, 0x302); /* m */
        __m512 dm = _mm512_cvtph_ps(_mm256_shuffle_epi8(_mm256_set1_epi32((int)get32(b)), spread));
        __m512 s = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(unpack_scales_k(b->s)));
        s = _mm512_mul_ps(_mm512_mul_ps(dm, s), x->d);
        *macc = _mm512_add_ps(*macc, s);
        return s;
    }
    const eng_q2_k *b2 = (const void *)block;
    const eng_q3_k *b3 = (const void *)block;
    const eng_q6_k *b6 = (const void *)block;
    __m128i s = t == ENG_Q3_K ? unpack_scales_q3_k(b3->s) : _mm_loadu_si128((const void *)(t == ENG_Q2_K ? b2->s : (const void *)b6->s));
    __m512 d = f16_all16(t == ENG_Q2_K ? b2->d : t == ENG_Q3_K ? b3->d : b6->d);
    if (t == ENG_Q2_K) {
        __m128i m = _mm_and_si128(_mm_srli_epi16(s, 4), _mm_set1_epi8(15));
        s = _mm_and_si128(s, _mm_set1_epi8(15));
        *macc = _mm512_fmadd_ps(_mm512_mul_ps(f16_all16(b2->m), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(m))), x->s, *macc);
    }
    return _mm512_mul_ps(_mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(s))), x->d);
}

/* Lane of the scales for each of the 16 sums of codes k. */
INLINE __m512i lanes_of(const eng_type t, const int k)
{
    const __m512i fours = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i pairs = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
    if (in_quarters(t))
        return _mm512_add_epi32(pairs, _mm512_set1_epi32(k % 2));
    return _mm512_add_epi32(fours, _mm512_set1_epi32(t == ENG_IQ4_XS ? 2 * k : 4 * k));
}

/* ---- products --------------------------------------------------------------------------------------------------- */

/* acc += sums of codes k, times their scales. */
INLINE void add_scaled(const eng_type t, const int k, __m512i sums, __m512 scales, __m512 *acc)
{
    *acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums), _mm512_permutexvar_ps(lanes_of(t, k), scales), *acc);
}

/* acc += a super-block of one row. */
INLINE void step256(const eng_type t, const char *block, const x_super *x, __m512 *acc, __m512 *macc)
{
    __m512 s = load_scales16(t, block, x, macc);
    __m512i q[4], a[4];
    load_codes64(t, block, 0, q);
    load_codes64(t, block, 2, q + 2);
    for (int k = 0; k < 4; k++)
        a[k] = _mm512_dpbusd_epi32(in_quarters(t) && k > 1 ? a[k - 2] : x->c[k], q[k], x->q[k]);
    if (in_quarters(t)) {
        add_scaled(t, 0, a[2], s, acc);
        add_scaled(t, 1, a[3], s, acc);
    } else if (t == ENG_IQ4_XS) { /* here it is the first two and the last two */
        add_scaled(t, 0, _mm512_add_epi32(a[0], a[1]), s, acc);
        add_scaled(t, 2, _mm512_add_epi32(a[2], a[3]), s, acc);
    } else {
        for (int k = 0; k < 4; k++)
            add_scaled(t, k, a[k], s, acc);
    }
}

/* nr (1 or 4) rows. */
INLINE void rows_super(const eng_type t, const int nr, float *y, const char *w, size_t row_bytes, const eng_q8_act *x, size_t n)
{
    const size_t bytes = block_bytes(t);
    __m512 acc[4], macc[4];
    for (int r = 0; r < nr; r++)
        acc[r] = macc[r] = _mm512_setzero_ps();
    for (size_t b = 0; b < n / 256; b++) {
        x_super g = load_x(x, b, t);
        prefetch_ahead(w + (size_t)nr * b * bytes, (size_t)nr * bytes);
        for (int r = 0; r < nr; r++)
            step256(t, w + (size_t)r * row_bytes + b * bytes, &g, &acc[r], &macc[r]);
    }
    if (has_min(t))
        for (int r = 0; r < nr; r++)
            acc[r] = _mm512_add_ps(acc[r], has_halves(t) ? macc[r] : _mm512_maskz_mov_ps(0xff00, macc[r]));
    store_sums(y, acc, nr);
}

#define GEMV_SUPER(T) GEMV(gemv_q8_##T, rows_super, eng_q8_act, ENG_##T)
ENG_EACH_SUPER_TYPE(GEMV_SUPER)
#undef GEMV_SUPER

void eng_avx512_gemv_super(eng_kernels *k)
{
#define ENTRY(T) k->gemv_q8[ENG_##T] = gemv_q8_##T;
    ENG_EACH_SUPER_TYPE(ENTRY)
#undef ENTRY
}
#endif
