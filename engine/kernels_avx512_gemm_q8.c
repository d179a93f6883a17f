/* AVX-512 products of prefill in 8-bit integers (VPDPBUSD, twice the rate of VDPBF16PS): panels of 32 weight rows as unsigned codes, four of k
 * in a lane, and a register tile of up to 6 tokens by 32 outputs. Integer sums are exact and each output's float operations are those of the
 * scalar level in the same order, so its bits are the scalar level's.
 *
 * A panel: codes [k/4][ENG_NR][4], raised where VPDPBUSD wants them unsigned, then for each 32 of k the rows' scales [ENG_NR] (of both halves,
 * where they differ) and minima [ENG_NR] (of types with them).
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
        uint32_t first = (uint32_t)_mm512_reduce_add_epi32(i), second = (uint32_t)_mm512_reduce_add_epi32(j);
        out->s = out->d * (float)(int32_t)(first + second);
        out->minus[0] = (int16_t)(0 - first);
        out->minus[1] = (int16_t)(0 - second);
    }
}

/* ---- packing ----------------------------------------------------------------------------------------------------- */

/* What is added to a code to make it unsigned. Types with minima: 0. */
INLINE int raised_by(const eng_type t)
{
    return is_signed(t) ? 128 : offset_of(t);
}

/* Vectors of ENG_NR floats for 32 of k. */
INLINE size_t scale_vectors(const eng_type t)
{
    return has_halves(t) || has_min(t) ? 2 : 1;
}

/* Scales and minimum of the 32 elements from i on, for one row; s: the super-block's. */
INLINE void put_scales(const eng_type t, float *out, const char *block, size_t i, const stored_scales *s)
{
    size_t part = i / 32 % 8;
    if (has_halves(t)) {
        out[0] = s->d[2 * part];
        out[ENG_NR] = s->d[2 * part + 1];
        return;
    }
    out[0] = is_super(t) ? s->d[part] : _cvtsh_ss(get16(block));
    if (has_min(t))
        out[ENG_NR] = is_super(t) ? s->m[part] : _cvtsh_ss(get16(block + 2));
}

/* 16 rows at a time, 64 of k at a time. */
INLINE void pack_any(const eng_type t, char *panel, const char *w, size_t row_bytes, size_t rows, size_t k)
{
    const size_t step = scale_vectors(t) * ENG_NR;
    uint32_t *codes = (void *)panel;
    float *scales = (void *)(panel + k * ENG_NR);
    if (rows < ENG_NR)
        memset(scales, 0, k / 32 * step * sizeof *scales);
    for (size_t half = 0; half < ENG_NR; half += 16) {
        _Alignas(64) uint32_t buf[16][16] = {{0}};
        stored_scales s[16];
        size_t have = rows > half ? rows - half : 0;
        have = have > 16 ? 16 : have;
        for (size_t i = 0; i < k; i += 64) {
            size_t end = k - i < 64 ? k : i + 64;
            for (size_t r = 0; r < have; r++) {
                const char *row = w + (half + r) * row_bytes;
                for (size_t j = i; j < end; j += 32) {
                    const char *block = block_at(t, row, j);
                    if (is_super(t) && j % 256 == 0)
                        store_scales(t, block, &s[r]);
                    __m256i q = load_codes(t, block, (int)(j / 32 % 8));
                    if (is_signed(t))
                        q = _mm256_xor_si256(q, _mm256_set1_epi8((char)128));
                    _mm256_store_si256((void *)(buf[r] + (j - i) / 4), q);
                    put_scales(t, scales + j / 32 * step + half + r, block, j, &s[r]);
                }
            }
            store_transposed(codes + i / 4 * ENG_NR + half, ENG_NR, buf[0], 16, (end - i) / 4);
        }
    }
}

#define EACH_TYPE(X) ENG_EACH_SMALL_TYPE(X) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_XS)

static void pack_q8(void *panel, eng_type type, const void *w, size_t row_bytes, size_t rows, size_t k)
{
#define CASE(T)                                                                                                                            \
    case ENG_##T:                                                                                                                          \
        pack_any(ENG_##T, panel, w, row_bytes, rows, k);                                                                                   \
        break;
    switch (type) {
        EACH_TYPE(CASE)
    default:
        break;
    }
#undef CASE
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

enum { TILE = 6 }; /* tokens; with two scales for 32 of k, 4: their sums need registers too */

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
    const char *codes, *scales;
    __m512i raised; /* by how much, for the two halves of a block (16 bits each) */
} operands;

INLINE const eng_q8_block *block_of(const operands *p, const int i)
{
    return (const void *)(p->a[i / 3] + (size_t)(i % 3) * p->lda);
}

/* s += steps of four of k, from step `from` of a block on, for mr tokens by 32 outputs. */
INLINE void sum_steps(const operands *p, const int mr, const int from, const int steps, __m512i s[TILE][2])
{
#pragma GCC unroll 8
    for (int k = from; k < from + steps; k++) {
        __m512i b0 = _mm512_loadu_si512(p->codes + k * 4 * ENG_NR), b1 = _mm512_loadu_si512(p->codes + k * 4 * ENG_NR + 64);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            __m512i v = broadcast(block_of(p, i)->q + 4 * k);
            s[i][0] = _mm512_dpbusd_epi32(s[i][0], b0, v);
            s[i][1] = _mm512_dpbusd_epi32(s[i][1], b1, v);
        }
    }
}

/* One block of 32: acc += d (sum over its parts of the rows' scale times the integer sum) + s m. */
INLINE void tile_block(const bool min, const bool halves, const int mr, const operands *p, __m512 acc[TILE][2])
{
    const int parts = halves ? 2 : 1;
    __m512 u[TILE][2];
#pragma GCC unroll 2
    for (int part = 0; part < parts; part++) {
        __m512i s[TILE][2], raised = !halves ? p->raised : part ? _mm512_slli_epi32(p->raised, 16) : _mm512_srli_epi32(p->raised, 16);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++)
            s[i][0] = s[i][1] = min ? _mm512_setzero_si512() : _mm512_madd_epi16(broadcast(block_of(p, i)->minus), raised);
        sum_steps(p, mr, 4 * part, 8 / parts, s);
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            __m512 w = _mm512_loadu_ps((const float *)(const void *)p->scales + part * ENG_NR + 16 * h);
#pragma GCC unroll 6
            for (int i = 0; i < mr; i++) {
                __m512 v = _mm512_cvtepi32_ps(s[i][h]);
                u[i][h] = part ? _mm512_fmadd_ps(w, v, u[i][h]) : _mm512_mul_ps(w, v);
            }
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        __m512 d = _mm512_set1_ps(block_of(p, i)->d);
        acc[i][0] = _mm512_fmadd_ps(u[i][0], d, acc[i][0]);
        acc[i][1] = _mm512_fmadd_ps(u[i][1], d, acc[i][1]);
    }
    if (!min)
        return;
    const float *m = (const void *)p->scales;
    __m512 m0 = _mm512_loadu_ps(m + ENG_NR), m1 = _mm512_loadu_ps(m + ENG_NR + 16);
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        __m512 s = _mm512_set1_ps(block_of(p, i)->s);
        acc[i][0] = _mm512_fmadd_ps(m0, s, acc[i][0]);
        acc[i][1] = _mm512_fmadd_ps(m1, s, acc[i][1]);
    }
}

/* mr tokens by n outputs. */
INLINE void tile(const bool min, const bool halves, const int mr, float *c, size_t ldc, operands p, size_t n, size_t blocks, bool accumulate)
{
    __m512 acc[TILE][2];
    const __mmask16 m0 = tail16(n), m1 = n > 16 ? tail16(n - 16) : 0;
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        acc[i][0] = _mm512_maskz_loadu_ps(accumulate ? m0 : 0, c + (size_t)i * ldc);
        acc[i][1] = _mm512_maskz_loadu_ps(accumulate ? m1 : 0, c + (size_t)i * ldc + 16);
    }
    for (size_t b = 0; b < blocks; b++) {
        tile_block(min, halves, mr, &p, acc);
        p.a[0] += sizeof(eng_q8_block);
        p.a[1] += sizeof(eng_q8_block);
        p.codes += 32 * ENG_NR;
        p.scales += (min || halves ? 2 : 1) * ENG_NR * sizeof(float);
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        _mm512_mask_storeu_ps(c + (size_t)i * ldc, m0, acc[i][0]);
        _mm512_mask_storeu_ps(c + (size_t)i * ldc + 16, m1, acc[i][1]);
    }
}

INLINE void gemm(const bool min, const bool halves, float *c, size_t ldc, const eng_q8_block *a, size_t lda, operands p, size_t m, size_t n,
                 size_t blocks, bool accumulate)
{
    size_t i = 0;
#define RUN(MR)                                                                                                                            \
    for (; i + MR <= m; i += MR) {                                                                                                         \
        p.a[0] = (const char *)(a + i * lda);                                                                                              \
        p.a[1] = p.a[0] + (MR > 3 ? 3 * p.lda : 0);                                                                                        \
        tile(min, halves, MR, c + i * ldc, ldc, p, n, blocks, accumulate);                                                                 \
    }
    if (!halves)
        RUN(6)
    RUN(4)
    RUN(2)
    RUN(1)
#undef RUN
}

static void gemm_q8(float *c, size_t ldc, const eng_q8_block *a, size_t lda, const void *panel, eng_type type, size_t m, size_t n, size_t k,
                    bool accumulate)
{
    operands p = {.lda = lda * sizeof *a, .codes = panel, .scales = (const char *)panel + k * ENG_NR};
    p.raised = _mm512_set1_epi16((short)raised_by(type));
    if (has_min(type))
        gemm(true, false, c, ldc, a, lda, p, m, n, k / 32, accumulate);
    else if (has_halves(type))
        gemm(false, true, c, ldc, a, lda, p, m, n, k / 32, accumulate);
    else
        gemm(false, false, c, ldc, a, lda, p, m, n, k / 32, accumulate);
}

void eng_avx512_gemm_q8(eng_kernels *k)
{
    k->quantize_blocks = quantize_blocks;
    k->pack_q8 = pack_q8;
    k->gemm_q8 = gemm_q8;
#define ENTRY(T) k->prefill_q8[ENG_##T] = true;
    EACH_TYPE(ENTRY)
#undef ENTRY
}
#endif
