#include "distance_avx512.h"
#include "distance_narrow.h"

#include <string.h>

/* One block for ng (1..8) heads. The upper halves are multiplied where they are, sixteen times too large, and their sums are shifted: a shift a vector less. */
INLINE void narrow_block(const int ng, const uint8_t *codes, const float *scale, uint32_t pairs, const idx_code_query *q, float *out, size_t ld, __m512 *best)
{
    __m512i upper[8], lower[8], half = _mm512_set1_epi8(15);
    const int8_t *query = q->x;
    const ptrdiff_t next = ng > 1 ? q[1].x - q[0].x : 0; /* from one head to the next */
#pragma GCC unroll 8
    for (int g = 0; g < ng; g++)
        upper[g] = lower[g] = _mm512_setzero_si512();
    for (uint32_t j = 0; j < pairs; j++, query += 8) {
        __m512i u = _mm512_load_si512(codes + (size_t)j * 64), low = _mm512_and_si512(u, half), high = _mm512_andnot_si512(half, u);
        _mm_prefetch(codes + (size_t)j * 64 + IDX_CODES_FAR, _MM_HINT_T1);
        _mm_prefetch(codes + (size_t)j * 64 + IDX_CODES_NEAR, _MM_HINT_T0);
        const int8_t *v = query;
#pragma GCC unroll 8
        for (int g = 0; g < ng; g++, v += next) {
            int32_t a, b;
            memcpy(&a, v, 4);
            memcpy(&b, v + 4, 4);
            idx_dot4(&lower[g], low, _mm512_set1_epi32(a));
            idx_dot4(&upper[g], high, _mm512_set1_epi32(b));
        }
    }
    __m512 s = _mm512_load_ps(scale);
#pragma GCC unroll 8
    for (int g = 0; g < ng; g++) {
        __m512i dot = _mm512_add_epi32(lower[g], _mm512_srai_epi32(upper[g], 4));
        __m512 x = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_add_epi32(dot, dot), _mm512_set1_epi32(q[g].bias)));
        __m512 score = _mm512_add_ps(_mm512_mul_ps(x, _mm512_mul_ps(s, _mm512_set1_ps(q[g].scale))), _mm512_set1_ps(q[g].offset));
        _mm512_storeu_ps(out + (size_t)g * ld, score);
        best[g] = _mm512_max_ps(score, best[g]); /* the second operand wins against NaN */
    }
}

INLINE void narrow_heads(const int ng, const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t pairs, const idx_code_query *q, float *out, size_t ld, float *ret_best)
{
    __m512 best[8];
#pragma GCC unroll 8
    for (int g = 0; g < ng; g++)
        best[g] = _mm512_set1_ps(-__builtin_inff());
    for (uint32_t b = 0; b < n_blocks; b++)
        narrow_block(ng, codes + (size_t)b * pairs * 64, scale + b * IDX_BLOCK, pairs, q, out + b * IDX_BLOCK, ld, best);
#pragma GCC unroll 8
    for (int g = 0; g < ng; g++)
        ret_best[g] = _mm512_reduce_max_ps(best[g]);
}

void idx_narrow_avx512(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t pairs, const idx_code_query *q, uint32_t nq, float *out, size_t ld, float *ret_best)
{
    for (uint32_t h = 0; h < nq; h += 8, q += 8, out += 8 * ld, ret_best += 8)
        switch (nq - h) {
#define CASE(N)                                                                                                                            \
    case N:                                                                                                                                \
        narrow_heads(N, codes, scale, n_blocks, pairs, q, out, ld, ret_best);                                                              \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
        default:
            narrow_heads(8, codes, scale, n_blocks, pairs, q, out, ld, ret_best);
#undef CASE
        }
}
