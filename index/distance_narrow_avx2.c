#include "distance_narrow.h"

#include <immintrin.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

enum {
    HEADS = 4,
    FEW = 4, /* pairs of quads whose sums of products fit 16 bits: 4 * 4 * 15 * 127 */
};

INLINE __m256i query_quad(const idx_code_query *q, uint32_t j)
{
    int32_t x;
    memcpy(&x, q->x + 4 * j, sizeof x);
    return _mm256_set1_epi32(x);
}

/* Half a block (8 slots) for ng (1..4) heads, whose codes are taken apart once for all. */
INLINE void narrow_half(const int ng, const uint8_t *codes, const float *scale, uint32_t pairs, const idx_code_query *q, float *out, size_t ld, __m256 *best)
{
    __m256i dot[HEADS], half = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    for (int g = 0; g < ng; g++)
        dot[g] = _mm256_setzero_si256();
    for (uint32_t j = 0; j < pairs;) {
        __m256i sum[HEADS];
        for (int g = 0; g < ng; g++)
            sum[g] = _mm256_setzero_si256();
        for (uint32_t end = pairs - j < FEW ? pairs : j + FEW; j < end; j++) {
            __m256i u = _mm256_load_si256((const __m256i *)(const void *)(codes + (size_t)j * 64));
            __m256i low = _mm256_and_si256(u, half), high = _mm256_and_si256(_mm256_srli_epi16(u, 4), half);
            for (int g = 0; g < ng; g++) {
                sum[g] = _mm256_add_epi16(sum[g], _mm256_maddubs_epi16(low, query_quad(&q[g], 2 * j)));
                sum[g] = _mm256_add_epi16(sum[g], _mm256_maddubs_epi16(high, query_quad(&q[g], 2 * j + 1)));
            }
        }
        for (int g = 0; g < ng; g++)
            dot[g] = _mm256_add_epi32(dot[g], _mm256_madd_epi16(sum[g], ones));
    }
    __m256 s = _mm256_load_ps(scale);
    for (int g = 0; g < ng; g++) {
        __m256 x = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_add_epi32(dot[g], dot[g]), _mm256_set1_epi32(q[g].bias)));
        __m256 score = _mm256_add_ps(_mm256_mul_ps(x, _mm256_mul_ps(s, _mm256_set1_ps(q[g].scale))), _mm256_set1_ps(q[g].offset));
        _mm256_storeu_ps(out + (size_t)g * ld, score);
        best[g] = _mm256_max_ps(score, best[g]); /* the second operand wins against NaN */
    }
}

INLINE void narrow_heads(const int ng, const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t pairs, const idx_code_query *q, float *out, size_t ld, float *ret_best)
{
    __m256 best[HEADS];
    for (int g = 0; g < ng; g++)
        best[g] = _mm256_set1_ps(-__builtin_inff());
    for (uint32_t b = 0; b < 2 * n_blocks; b++)
        narrow_half(ng, codes + (size_t)(b / 2) * pairs * 64 + b % 2 * 32, scale + b * 8, pairs, q, out + b * 8, ld, best);
    for (int g = 0; g < ng; g++) {
        float lane[8];
        _mm256_storeu_ps(lane, best[g]);
        ret_best[g] = lane[0];
        for (int i = 1; i < 8; i++)
            ret_best[g] = lane[i] > ret_best[g] ? lane[i] : ret_best[g];
    }
}

void idx_narrow_avx2(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t pairs, const idx_code_query *q, uint32_t nq, float *out, size_t ld, float *ret_best)
{
    for (uint32_t h = 0; h < nq; h += HEADS, q += HEADS, out += HEADS * ld, ret_best += HEADS) {
        if (nq - h >= 4)
            narrow_heads(4, codes, scale, n_blocks, pairs, q, out, ld, ret_best);
        else if (nq - h == 3)
            narrow_heads(3, codes, scale, n_blocks, pairs, q, out, ld, ret_best);
        else if (nq - h == 2)
            narrow_heads(2, codes, scale, n_blocks, pairs, q, out, ld, ret_best);
        else
            narrow_heads(1, codes, scale, n_blocks, pairs, q, out, ld, ret_best);
    }
}
