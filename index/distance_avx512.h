/* Shared by distance_avx512.c and distance_amx.c. */
#ifndef IDX_DISTANCE_AVX512_H
#define IDX_DISTANCE_AVX512_H

#include "distance.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

/* acc += u . x, by fours. (GCC 12 copies each accumulator before and after the intrinsic in a loop, which is half of the loop's work.) */
INLINE void idx_dot4(__m512i *acc, __m512i u, __m512i x)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*acc) : "v"(u), "v"(x));
}

/* Scores of 16 slots from their sums, the lower one with the bias. The last steps are the same on every level. */
INLINE __m512 idx_code_scores(__m512i dot, __m512 slot_scale, const idx_code_query *q)
{
    return _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(slot_scale, _mm512_set1_ps(q->scale))), _mm512_set1_ps(q->offset));
}

/* Takes over what is larger among the scores of a block of centroids, the first of which is c. */
INLINE void idx_take_larger(__m512i score, uint32_t c, __m512i *best, __m512i *at)
{
    __mmask16 m = _mm512_cmpgt_epi32_mask(score, *best);
    *best = _mm512_mask_mov_epi32(*best, m, score);
    *at = _mm512_mask_mov_epi32(*at, m, _mm512_set1_epi32((int)c));
}

/* The first of the largest: at[l] + l of a lane. */
INLINE uint32_t idx_first_of(__m512i best, __m512i at)
{
    at = _mm512_add_epi32(at, _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    __mmask16 m = _mm512_cmpeq_epi32_mask(best, _mm512_set1_epi32(_mm512_reduce_max_epi32(best)));
    return _mm512_mask_reduce_min_epu32(m, at);
}

/* Of the AMX level, in distance_amx.c. */
void idx_nearest_amx(const int8_t *rows, uint32_t quads, const uint8_t *panel, const int32_t *half, uint32_t n_blocks, uint32_t *ret);
void idx_codes_amx(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t quads, const idx_code_query *q, uint32_t nq,
                   float *out, size_t ld, float *ret_best);

#endif
