/* AVX-512 products of prefill in 8-bit integers (VPDPBUSD, twice the rate of VDPBF16PS): panels of 32 weight rows as codes raised by 128, four of k
 * in a lane, and a register tile of up to 6 tokens by 32 outputs. Integer sums are exact and each output's float operations are those of the
 * scalar level in the same order, so its bits are the scalar level's.
 *
 * A panel: codes [k/4][ENG_NR][4], then scales [ENG_NR] for each 32 of k, or for each ENG_Q8_SPAN of types that are rounded.
 */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_avx512.h"

/* ---- activations ------------------------------------------------------------------------------------------------- */

static void quantize_blocks(const float *x, eng_q8_block *out, size_t n)
{
    for (size_t b = 0; b < n / 32; b++, out++) {
        __m512i i, j;
        out->d = quantize32(x + 32 * b, out->q, &i, &j);
        out->minus = -128 * _mm512_reduce_add_epi32(_mm512_add_epi32(i, j));
    }
}

/* ---- packing ----------------------------------------------------------------------------------------------------- */

/* eng_rounds_q8, for the compiler to see. */
INLINE bool rounds(const eng_type t)
{
    return has_min(t) || has_halves(t);
}

enum { HALF = 16 }; /* rows that are packed at a time: a vector's lanes */

/* Scales and minima of at most 16 parts of a row, from part 0 of a span on; 0 beyond them. */
typedef struct {
    __m512 d, m;
} parts;

INLINE parts load_parts(const eng_type t, const char *w, size_t n)
{
    if (is_super(t)) {
        super_scales s = load_scales(t, w);
        if (has_halves(t))
            return (parts){_mm512_insertf32x8(_mm512_castps256_ps512(s.d[0]), s.d[1], 1), _mm512_insertf32x8(_mm512_castps256_ps512(s.m[0]), s.m[1], 1)};
        return (parts){_mm512_zextps256_ps512(s.d[0]), _mm512_zextps256_ps512(s.m[0])};
    }
    /* each block begins with d and m */
    __m256i at = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32((int)block_bytes(t)));
    __m256i v = _mm256_mmask_i32gather_epi32(_mm256_setzero_si256(), (__mmask8)((1u << n / 32) - 1), at, w, 1);
    __m256 d = _mm256_cvtph_ps(_mm256_cvtepi32_epi16(v)), m = _mm256_cvtph_ps(_mm256_cvtepi32_epi16(_mm256_srli_epi32(v, 16)));
    return (parts){_mm512_zextps256_ps512(d), _mm512_zextps256_ps512(m)};
}

/* How a span of a row is rounded (kernels_scalar.c, round_span): what its parts' codes are multiplied by, and what is added then. */
typedef struct {
    _Alignas(32) int16_t times[16], plus[16];
} rounding;

/* Returns the row's scale. */
INLINE float find_rounding(const eng_type t, const char *w, size_t n, rounding *out)
{
    const int low = -offset_of(t), high = low + (1 << code_bits(t)) - 1;
    parts p = load_parts(t, w, n);
    if (!has_min(t))
        p.m = _mm512_setzero_ps();
    __m512 a = _mm512_abs_ps(_mm512_add_ps(_mm512_mul_ps(p.d, _mm512_set1_ps((float)low)), p.m));
    __m512 b = _mm512_abs_ps(_mm512_add_ps(_mm512_mul_ps(p.d, _mm512_set1_ps((float)high)), p.m));
    /* in this order a NaN loses as it does in the scalar level's comparisons */
    float largest = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(b, a), _mm512_setzero_ps()));
    __m512 f = _mm512_set1_ps(largest < 1e-30f ? 0.0f : 32512.0f / largest);
    __m256i times = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(p.d, f)));
    __m256i plus = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(p.m, f)));
    _mm256_store_si256((void *)out->times, times);
    _mm256_store_si256((void *)out->plus, _mm256_add_epi16(plus, _mm256_set1_epi16(128)));
    return largest < 1e-30f ? 0.0f : largest / 127.0f;
}

/* Each half's own 16 bits, where there are two parts in 32 elements. */
INLINE __m512i part_values(const eng_type t, const int16_t *v, size_t part)
{
    if (has_halves(t))
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_set1_epi16(v[2 * part])), _mm256_set1_epi16(v[2 * part + 1]), 1);
    return _mm512_set1_epi16(v[part]);
}

/* 32 rounded weights, as 16-bit integers. */
INLINE __m512i round32(const eng_type t, const char *row, size_t i, const rounding *r)
{
    size_t part = i % ENG_Q8_SPAN / 32;
    __m256i q = load_codes(t, block_at(t, row, i), (int)(i / 32 % 8));
    if (offset_of(t))
        q = _mm256_sub_epi8(q, _mm256_set1_epi8((char)offset_of(t)));
    __m512i x = _mm512_mullo_epi16(_mm512_cvtepi8_epi16(q), part_values(t, r->times, part));
    return _mm512_srai_epi16(_mm512_add_epi16(x, part_values(t, r->plus, part)), 8);
}

/* 64 raised codes of a row, or the last 32 and 32 more that mean nothing. */
INLINE __m512i raised64(const eng_type t, const char *row, size_t i, size_t k, const rounding *r)
{
    const __m512i raise = _mm512_set1_epi8((char)128);
    const size_t j = i + 32 < k ? i + 32 : i;
    if (rounds(t)) {
        const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
        __m512i q = _mm512_packs_epi16(round32(t, row, i, r), round32(t, row, j, r));
        return _mm512_xor_si512(_mm512_permutexvar_epi64(order, q), raise);
    }
    __m256i first = load_codes(t, block_at(t, row, i), (int)(i / 32 % 8)), second = load_codes(t, block_at(t, row, j), (int)(j / 32 % 8));
    __m512i q = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    return is_signed(t) ? _mm512_xor_si512(q, raise) : _mm512_add_epi8(q, _mm512_set1_epi8((char)(128 - offset_of(t))));
}

/* The scales of 32 of k for `rows` rows that are not rounded. */
INLINE void put_scales(const eng_type t, float *out, const char *w, size_t row_bytes, size_t rows, size_t i)
{
    for (size_t r = 0; r < rows; r++) {
        const char *block = block_at(t, w + r * row_bytes, i);
        if (!is_super(t)) {
            out[r] = _cvtsh_ss(get16(block));
        } else if (i % 256 == 0) {
            super_scales s = load_scales(t, block);
            _Alignas(32) float d[8];
            _mm256_store_ps(d, s.d[0]);
            for (size_t part = 0; part < 8; part++)
                out[part * ENG_NR + r] = d[part];
        }
    }
}

INLINE void pack_any(const eng_type t, char *panel, const char *w, size_t row_bytes, size_t rows, size_t k)
{
    const size_t span = rounds(t) ? ENG_Q8_SPAN : 32;
    uint32_t *codes = (void *)panel;
    float *scales = (void *)(panel + k * ENG_NR);
    if (rows < ENG_NR)
        memset(scales, 0, (k + span - 1) / span * ENG_NR * sizeof *scales);
    for (size_t half = 0; half < ENG_NR; half += HALF, w += HALF * row_bytes) {
        __m512i buf[HALF] = {{0}};
        rounding r[HALF];
        size_t have = rows > half ? rows - half : 0;
        have = have > HALF ? HALF : have;
        for (size_t i = 0; i < k; i += 64) {
            size_t end = k - i < 64 ? k : i + 64;
            for (size_t j = i; j < end; j += 32)
                if (!rounds(t))
                    put_scales(t, scales + j / span * ENG_NR + half, w, row_bytes, have, j);
                else if (j % span == 0)
                    for (size_t n = 0; n < have; n++)
                        scales[j / span * ENG_NR + half + n] =
                            find_rounding(t, block_at(t, w + n * row_bytes, j), k - j < span ? k - j : span, &r[n]);
            for (size_t n = 0; n < have; n++)
                buf[n] = raised64(t, w + n * row_bytes, i, k, &r[n]);
            store_transposed(codes + i / 4 * ENG_NR + half, ENG_NR, (const uint32_t *)(const void *)buf, 16, (end - i) / 4);
        }
    }
}

static void pack_q8(void *panel, eng_type type, const void *w, size_t row_bytes, size_t rows, size_t k)
{
#define CASE(T)                                                                                                                            \
    case ENG_##T:                                                                                                                          \
        pack_any(ENG_##T, panel, w, row_bytes, rows, k);                                                                                   \
        break;
    switch (type) {
        ENG_EACH_BLOCK_TYPE(CASE)
    default:
        break;
    }
#undef CASE
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

enum { TILE = 6 }; /* tokens */

INLINE __m512i broadcast(const void *p)
{
    int32_t v;
    memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

/* The operands of a product: token i's blocks are at a[i / 3] + i % 3 * lda (bytes), so that all pointers fit in registers. */
typedef struct {
    const char *a[2];
    size_t lda;
    const char *codes;
    const float *scales;
} operands;

INLINE const eng_q8_block *block_of(const operands *p, const int i)
{
    return (const void *)(p->a[i / 3] + (size_t)(i % 3) * p->lda);
}

/* One block of 32 for mr tokens by 32 outputs: acc += d s, rounded types' rows not scaled yet. */
INLINE void tile_block(const bool rounded, const int mr, operands *p, __m512 acc[TILE][2])
{
    __m512i s[TILE][2];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
        s[i][0] = s[i][1] = broadcast(&block_of(p, i)->minus);
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
        __m512i b0 = _mm512_loadu_si512(p->codes + k * 4 * ENG_NR), b1 = _mm512_loadu_si512(p->codes + k * 4 * ENG_NR + 64);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            __m512i v = broadcast(block_of(p, i)->q + 4 * k);
            s[i][0] = _mm512_dpbusd_epi32(s[i][0], b0, v);
            s[i][1] = _mm512_dpbusd_epi32(s[i][1], b1, v);
        }
    }
    const __m512 w0 = rounded ? _mm512_set1_ps(1) : _mm512_loadu_ps(p->scales), w1 = rounded ? w0 : _mm512_loadu_ps(p->scales + 16);
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        __m512 u0 = _mm512_cvtepi32_ps(s[i][0]), u1 = _mm512_cvtepi32_ps(s[i][1]), d = _mm512_set1_ps(block_of(p, i)->d);
        acc[i][0] = _mm512_fmadd_ps(rounded ? u0 : _mm512_mul_ps(w0, u0), d, acc[i][0]);
        acc[i][1] = _mm512_fmadd_ps(rounded ? u1 : _mm512_mul_ps(w1, u1), d, acc[i][1]);
    }
    p->a[0] += sizeof(eng_q8_block);
    p->a[1] += sizeof(eng_q8_block);
    p->codes += 32 * ENG_NR;
    p->scales += rounded ? 0 : ENG_NR;
}

/* mr tokens by n outputs: all of k, or a span of rounded types. */
INLINE void tile(const bool rounded, const int mr, float *c, size_t ldc, operands *p, size_t n, size_t blocks, bool accumulate)
{
    __m512 acc[TILE][2];
    const __mmask16 m0 = tail16(n), m1 = n > 16 ? tail16(n - 16) : 0, r0 = accumulate ? m0 : 0, r1 = accumulate ? m1 : 0;
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        acc[i][0] = rounded ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(r0, c + (size_t)i * ldc);
        acc[i][1] = rounded ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(r1, c + (size_t)i * ldc + 16);
    }
    for (size_t b = 0; b < blocks; b++)
        tile_block(rounded, mr, p, acc);
    if (rounded) {
        __m512 w0 = _mm512_loadu_ps(p->scales), w1 = _mm512_loadu_ps(p->scales + 16);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            acc[i][0] = _mm512_fmadd_ps(w0, acc[i][0], _mm512_maskz_loadu_ps(r0, c + (size_t)i * ldc));
            acc[i][1] = _mm512_fmadd_ps(w1, acc[i][1], _mm512_maskz_loadu_ps(r1, c + (size_t)i * ldc + 16));
        }
        p->scales += ENG_NR;
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        _mm512_mask_storeu_ps(c + (size_t)i * ldc, m0, acc[i][0]);
        _mm512_mask_storeu_ps(c + (size_t)i * ldc + 16, m1, acc[i][1]);
    }
}

/* As many tiles of mr tokens as there are from token i on; the first token after them. */
INLINE size_t tiles(const bool rounded, const int mr, size_t i, float *c, size_t ldc, const eng_q8_block *a, size_t lda, const operands *panel,
                    size_t m, size_t n, size_t blocks, bool accumulate)
{
    const size_t span = rounded ? ENG_Q8_SPAN / 32 : blocks;
    for (; i + (size_t)mr <= m; i += (size_t)mr) {
        operands p = *panel;
        p.a[0] = (const char *)(a + i * lda);
        p.a[1] = p.a[0] + (mr > 3 ? 3 * p.lda : 0);
        size_t b = 0;
        do
            tile(rounded, mr, c + i * ldc, ldc, &p, n, blocks - b < span ? blocks - b : span, accumulate || b > 0);
        while ((b += span) < blocks);
    }
    return i;
}

INLINE void gemm(const bool rounded, float *c, size_t ldc, const eng_q8_block *a, size_t lda, const operands *panel, size_t m, size_t n,
                 size_t blocks, bool accumulate)
{
    size_t i = tiles(rounded, 6, 0, c, ldc, a, lda, panel, m, n, blocks, accumulate);
    i = tiles(rounded, 4, i, c, ldc, a, lda, panel, m, n, blocks, accumulate);
    i = tiles(rounded, 2, i, c, ldc, a, lda, panel, m, n, blocks, accumulate);
    tiles(rounded, 1, i, c, ldc, a, lda, panel, m, n, blocks, accumulate);
}

static void gemm_q8(float *c, size_t ldc, const eng_q8_block *a, size_t lda, const void *panel, eng_type type, size_t m, size_t n, size_t k,
                    bool accumulate)
{
    const operands p = {.lda = lda * sizeof *a, .codes = panel, .scales = (const float *)(const void *)((const char *)panel + k * ENG_NR)};
    if (eng_rounds_q8(type) && k)
        gemm(true, c, ldc, a, lda, &p, m, n, k / 32, accumulate);
    else
        gemm(false, c, ldc, a, lda, &p, m, n, k / 32, accumulate);
}

void eng_avx512_gemm_q8(eng_kernels *k)
{
    k->quantize_blocks = quantize_blocks;
    k->pack_q8 = pack_q8;
    k->gemm_q8 = gemm_q8;
#define ENTRY(T) k->prefill_q8[ENG_##T] = true;
    ENG_EACH_BLOCK_TYPE(ENTRY)
#undef ENTRY
}
#endif
