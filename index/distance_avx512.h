/* Shared by distance_avx512.c and distance_amx.c. */
#ifndef IDX_DISTANCE_AVX512_H
#define IDX_DISTANCE_AVX512_H

#include "distance.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

/* Scores of 16 slots from their sums. The last steps are the same on every level. */
INLINE __m512 idx_code_scores(__m512i hi, __m512i lo, __m512 slot_scale, const idx_code_query *q)
{
    __m512 dot = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(hi, 6), lo));
    return _mm512_add_ps(_mm512_mul_ps(dot, _mm512_mul_ps(slot_scale, _mm512_set1_ps(q->scale))), _mm512_set1_ps(q->offset));
}

/* codes() of the AMX level, in distance_amx.c. */
void idx_codes_amx(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t quads, const idx_code_query *q, uint32_t nq,
                   float *out, size_t ld, float *ret_best);

#endif
