/* Shared by the kernels_amx*.c files: the shape of the tile registers.
 *
 * Rule: a kernel of the table that uses tiles calls amx_begin first and amx_end last, whatever the way out. Between two kernels a thread then
 * has no tile state: no kernel sees another's shape, and the system has no 8 KiB of tiles to save when it switches threads. The pair costs
 * some tens of cycles. No kernel that uses tiles calls another between the two.
 */
#ifndef RETRIEVALD_KERNELS_AMX_H
#define RETRIEVALD_KERNELS_AMX_H

#include "kernels_avx512.h"

void eng_amx_gemm(eng_kernels *k);
void eng_amx_attention(eng_kernels *k);

/* Operand of LDTILECFG. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row, by tile; the last 8 are 0 */
    uint8_t rows[16];
} amx_shape;

/* All eight tiles as large as they get: 16 rows of 16 floats or of 32 bf16. */
static const amx_shape amx_full = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* Sets all tiles to 0 and to this shape. */
INLINE void amx_begin(const amx_shape *shape)
{
    __asm__ volatile("ldtilecfg %0" ::"m"(*shape));
}

INLINE void amx_end(void)
{
    _tile_release();
}

/* The compiler's own _tile_loadd does not say that it reads memory: stores before it may be moved or dropped. STRIDE: bytes. */
#define amx_load(TILE, P, STRIDE)                                                                                                          \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #TILE ::"r"((const void *)(P)), "r"((size_t)(STRIDE)) : "memory")

#endif
