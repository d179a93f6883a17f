/* AVX2 products of prefill in 16-bit integers (VPMADDWD, at twice the rate of float32's products): panels of weight rows as integers, two of k in
 * a lane, and a register tile of up to 6 tokens by 16 outputs. Integer sums are exact and each output's float operations are those of the scalar
 * level in the same order, so its bits are the scalar level's.
 *
 * A panel: for each 16 of its rows integers [k/2][16][2], then scales [ENG_NR] for each ENG_I16_SPAN of k.
 */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_avx2.h"

enum { TILE = 6, WIDTH = 16 }; /* tokens, outputs */

/* 16 floats as integers. */
INLINE __m256i to_integers(const float *x, __m256 inv)
{
    __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), inv)), b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), inv));
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
}

/* The larger magnitudes; in this order NaN counts as nothing, as in the scalar level. */
INLINE __m256 larger(__m256 x, __m256 most)
{
    return _mm256_max_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), x), most);
}

static void quantize_i16(const float *x, eng_i16_block *out, size_t n)
{
    for (size_t b = 0; b < n / 32; b++, out++, x += 32) {
        __m256 most = _mm256_setzero_ps();
        for (size_t i = 0; i < 32; i += 8)
            most = larger(_mm256_loadu_ps(x + i), most);
        float inv;
        out->d = eng_i16_scale(max8(most), &inv);
        for (size_t i = 0; i < 32; i += 16)
            _mm256_storeu_si256((void *)(out->q + i), to_integers(x + i, _mm256_set1_ps(inv)));
    }
}

/* ---- packing ----------------------------------------------------------------------------------------------------- */

/* n elements of a row from element i on, at most a span, as floats; returns the largest magnitude. */
INLINE float load_span(const eng_type t, const char *row, size_t i, size_t n, float *out)
{
    stored_scales s;
    __m256 most = _mm256_setzero_ps(), v[4];
    for (size_t end = i + n; i < end; i += 32, out += 32) {
        if (is_super(t) && i % 256 == 0)
            store_scales(t, block_at(t, row, i), &s);
        load32(t, row, i, end, &s, v);
        for (size_t j = 0; j < 4; j++) {
            most = larger(v[j], most);
            _mm256_store_ps(out + 8 * j, v[j]);
        }
    }
    return max8(most);
}

/* 8 columns of a panel, a span of k at a time; what lies in between stays in L1. */
INLINE void pack_columns(const eng_type t, uint32_t *pairs, float *scales, const char *w, size_t row_bytes, size_t rows, size_t k)
{
    _Alignas(32) float x[8][ENG_I16_SPAN];
    _Alignas(32) uint32_t buf[8][8] = {{0}};
    float inv[8];
    for (size_t i = 0; i < k; i += ENG_I16_SPAN, scales += ENG_NR) {
        size_t n = k - i < ENG_I16_SPAN ? k - i : ENG_I16_SPAN;
        for (size_t r = 0; r < rows; r++)
            scales[r] = eng_i16_scale(load_span(t, w + r * row_bytes, i, n, x[r]), &inv[r]);
        for (size_t j = 0; j < n; j += 16, pairs += 8 * WIDTH) {
            for (size_t r = 0; r < rows; r++)
                _mm256_store_si256((void *)buf[r], to_integers(x[r] + j, _mm256_set1_ps(inv[r])));
            store_transposed((void *)pairs, WIDTH, (const void *)buf, 8, 8);
        }
    }
}

INLINE void pack_any(const eng_type t, uint32_t *pairs, float *scales, const char *w, size_t row_bytes, size_t rows, size_t k)
{
    if (rows < ENG_NR)
        memset(scales, 0, (k + ENG_I16_SPAN - 1) / ENG_I16_SPAN * ENG_NR * sizeof *scales);
    for (size_t c = 0; c < ENG_NR; c += 8) {
        size_t have = rows > c ? rows - c : 0;
        pack_columns(t, pairs + c / WIDTH * WIDTH * k / 2 + c % WIDTH, scales + c, w + c * row_bytes, row_bytes, have > 8 ? 8 : have, k);
    }
}

static void pack_i16(void *panel, eng_type type, const void *w, size_t row_bytes, size_t rows, size_t k)
{
    float *scales = (void *)((char *)panel + k * ENG_NR * sizeof(int16_t));
#define CASE(T)                                                                                                                            \
    case ENG_##T:                                                                                                                          \
        pack_any(ENG_##T, panel, scales, w, row_bytes, rows, k);                                                                           \
        break;
    switch (type) {
        ENG_EACH_TYPE(CASE)
    default:
        break;
    }
#undef CASE
}

/* ---- products ---------------------------------------------------------------------------------------------------- */

INLINE __m256i broadcast(const void *p)
{
    return _mm256_set1_epi32((int)get32(p));
}

/* The operands of a product: token i's blocks are at a[i / 3] + i % 3 * lda (bytes), so that all pointers fit in registers. */
typedef struct {
    const char *a[2];
    size_t lda;
    const char *pairs;
    const float *scales;
} operands;

INLINE const eng_i16_block *block_of(const operands *p, const int i)
{
    return (const void *)(p->a[i / 3] + (size_t)(i % 3) * p->lda);
}

/* acc += a b, of pairs. Compilers would reassociate the sums of integers and keep the products until last, in more registers than there are. */
INLINE void multiply_add(__m256i *acc, __m256i a, __m256i b)
{
    *acc = _mm256_add_epi32(*acc, _mm256_madd_epi16(a, b));
    __asm__("" : "+x"(*acc));
}

/* One block of 32 for mr tokens by 16 outputs: u += d s. */
INLINE void tile_block(const int mr, operands *p, __m256 u[TILE][2])
{
    __m256i s[TILE][2];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
        s[i][0] = s[i][1] = _mm256_setzero_si256();
#pragma GCC unroll 16
    for (int k = 0; k < 16; k++) {
        __m256i b0 = load_bytes(p->pairs + k * 4 * WIDTH), b1 = load_bytes(p->pairs + k * 4 * WIDTH + 32);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            __m256i v = broadcast(block_of(p, i)->q + 2 * k);
            multiply_add(&s[i][0], v, b0);
            multiply_add(&s[i][1], v, b1);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        __m256 d = _mm256_set1_ps(block_of(p, i)->d);
        u[i][0] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(s[i][0]), d, u[i][0]);
        u[i][1] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(s[i][1]), d, u[i][1]);
    }
    p->a[0] += sizeof(eng_i16_block);
    p->a[1] += sizeof(eng_i16_block);
    p->pairs += 16 * 4 * WIDTH;
}

/* A span of k for mr tokens by n outputs. */
INLINE void tile(const int mr, float *c, size_t ldc, operands *p, const size_t n, size_t blocks, bool accumulate)
{
    __m256 u[TILE][2];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
        u[i][0] = u[i][1] = _mm256_setzero_ps();
    for (size_t b = 0; b < blocks; b++)
        tile_block(mr, p, u);
    const size_t n1 = n > 8 ? n - 8 : 0;
    const __m256 w0 = _mm256_loadu_ps(p->scales), w1 = _mm256_loadu_ps(p->scales + 8), zero = _mm256_setzero_ps();
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++, c += ldc) {
        store8f(c, n, _mm256_fmadd_ps(w0, u[i][0], accumulate ? load8f(c, n) : zero));
        store8f(c + 8, n1, _mm256_fmadd_ps(w1, u[i][1], accumulate ? load8f(c + 8, n1) : zero));
    }
    p->scales += ENG_NR;
}

/* As many tiles of mr tokens as there are from token i on; the first token after them. */
INLINE size_t tiles(const int mr, size_t i, float *c, size_t ldc, const eng_i16_block *a, size_t lda, const operands *panel, size_t m,
                    const size_t n, size_t blocks, bool accumulate)
{
    const size_t span = ENG_I16_SPAN / 32;
    for (; i + (size_t)mr <= m; i += (size_t)mr) {
        operands p = *panel;
        p.a[0] = (const char *)(a + i * lda);
        p.a[1] = p.a[0] + (mr > 3 ? 3 * p.lda : 0);
        size_t b = 0;
        do
            tile(mr, c + i * ldc, ldc, &p, n, blocks - b < span ? blocks - b : span, accumulate || b > 0);
        while ((b += span) < blocks);
    }
    return i;
}

INLINE void columns(float *c, size_t ldc, const eng_i16_block *a, size_t lda, const operands *panel, size_t m, const size_t n, size_t blocks,
                    bool accumulate)
{
    size_t i = tiles(6, 0, c, ldc, a, lda, panel, m, n, blocks, accumulate);
    i = tiles(4, i, c, ldc, a, lda, panel, m, n, blocks, accumulate);
    i = tiles(2, i, c, ldc, a, lda, panel, m, n, blocks, accumulate);
    tiles(1, i, c, ldc, a, lda, panel, m, n, blocks, accumulate);
}

static void gemm_i16(float *c, size_t ldc, const eng_i16_block *a, size_t lda, const void *panel, size_t m, size_t n, size_t k, bool accumulate)
{
    for (size_t j = 0; j < n; j += WIDTH) {
        const operands p = {.lda = lda * sizeof *a, .pairs = (const char *)panel + j * k * sizeof(int16_t),
                            .scales = (const float *)(const void *)((const char *)panel + k * ENG_NR * sizeof(int16_t)) + j};
        if (n - j >= WIDTH)
            columns(c + j, ldc, a, lda, &p, m, WIDTH, k / 32, accumulate);
        else
            columns(c + j, ldc, a, lda, &p, m, n - j, k / 32, accumulate);
    }
}

void eng_avx2_gemm_i16(eng_kernels *k)
{
    k->quantize_i16 = quantize_i16;
    k->pack_i16 = pack_i16;
    k->gemm_i16 = gemm_i16;
    k->prefill_i16 = true;
}
#endif
