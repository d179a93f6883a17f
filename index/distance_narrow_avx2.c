#include "distance_narrow.h"

#include <immintrin.h>
#include <string.h>

/* Half a block (8 slots) for a head. No pair of products saturates: 15 * 127 * 2. */
static void narrow_half(const uint8_t *codes, const float *scale, uint32_t pairs, const idx_code_query *q, float *out, __m256 *best)
{
    __m256i dot = _mm256_setzero_si256(), ones = _mm256_set1_epi16(1), half = _mm256_set1_epi8(15);
    for (uint32_t j = 0; j < pairs; j++) {
        int32_t a, b;
        memcpy(&a, q->x + 8 * j, 4);
        memcpy(&b, q->x + 8 * j + 4, 4);
        __m256i u = _mm256_load_si256((const __m256i *)(const void *)(codes + (size_t)j * 64));
        __m256i low = _mm256_maddubs_epi16(_mm256_and_si256(u, half), _mm256_set1_epi32(a));
        __m256i high = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(u, 4), half), _mm256_set1_epi32(b));
        dot = _mm256_add_epi32(dot, _mm256_madd_epi16(_mm256_add_epi16(low, high), ones));
    }
    __m256 x = _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_add_epi32(dot, dot), _mm256_set1_epi32(q->bias)));
    __m256 score = _mm256_add_ps(_mm256_mul_ps(x, _mm256_mul_ps(_mm256_load_ps(scale), _mm256_set1_ps(q->scale))), _mm256_set1_ps(q->offset));
    _mm256_storeu_ps(out, score);
    *best = _mm256_max_ps(score, *best); /* the second operand wins against NaN */
}

void idx_narrow_avx2(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t pairs, const idx_code_query *q, uint32_t nq, float *out, size_t ld, float *ret_best)
{
    for (uint32_t h = 0; h < nq; h++) {
        __m256 best = _mm256_set1_ps(-__builtin_inff());
        float lane[8];
        for (uint32_t b = 0; b < 2 * n_blocks; b++)
            narrow_half(codes + (size_t)(b / 2) * pairs * 64 + b % 2 * 32, scale + b * 8, pairs, &q[h], out + h * ld + b * 8, &best);
        _mm256_storeu_ps(lane, best);
        ret_best[h] = -__builtin_inff();
        for (int i = 0; i < 8; i++)
            ret_best[h] = lane[i] > ret_best[h] ? lane[i] : ret_best[h];
    }
}
