/* Kernels for codes of four bits (codes_narrow.c), in a file of its own for each instruction set. */
#ifndef IDX_DISTANCE_NARROW_H
#define IDX_DISTANCE_NARROW_H

#include "distance.h"

/* As codes() of idx_kernels. A key is scale * (2 u - 15), u four bits a dimension: codes[block][pair][16][4] hold dimensions 8 pair + k in the lower half of byte k, and 8 pair + 4 + k
 * in the upper. score = scale * scale of the slot * (2 dot + bias) + offset. Exact integers, the last steps the same everywhere. */
void idx_narrow_scalar(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t pairs, const idx_code_query *q, uint32_t nq, float *out, size_t ld, float *ret_best);
void idx_narrow_avx2(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t pairs, const idx_code_query *q, uint32_t nq, float *out, size_t ld, float *ret_best);
void idx_narrow_avx512(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t pairs, const idx_code_query *q, uint32_t nq, float *out, size_t ld, float *ret_best);

#endif
