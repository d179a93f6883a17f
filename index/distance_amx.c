/* AMX level: scores by code, and nearest centroids, from tiles of bytes. Everything else is the AVX-512 level's. */
#include "distance_avx512.h"

/* A block of codes is a B operand as it lies, [quads][16 slots][4]; up to 16 heads' queries are the rows of A. Tiles: 0 1 the sums of
 * two blocks, [heads][16 slots]; 4 A and 6 7 blocks, 64 dimensions at a time; 5 A and 2 3 blocks for the dimensions that remain. */
enum { HEADS = 16, CHUNK = 16 /* quads */ };

/* Operand of LDTILECFG. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* of a row, by tile */
    uint8_t rows[16];
} shape;

/* a_rows: rows of A. */
INLINE void begin(uint32_t a_rows, uint32_t quads)
{
    uint16_t some = (uint16_t)(quads % CHUNK ? quads % CHUNK * 4 : 4);
    uint8_t rows = (uint8_t)a_rows, deep = (uint8_t)(some / 4);
    shape s = {.palette = 1, .bytes = {64, 64, 64, 64, 64, some, 64, 64}, .rows = {rows, rows, deep, deep, rows, rows, CHUNK, CHUNK}};
    __asm__ volatile("ldtilecfg %0" ::"m"(s));
}

/* The compiler's own intrinsics do not say that they read memory. */
#define tile_load(TILE, P, STRIDE)                                                                                                         \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #TILE ::"r"((const void *)(P)), "r"((size_t)(STRIDE)) : "memory")
#define tile_store(TILE, P, STRIDE)                                                                                                        \
    __asm__ volatile("tilestored %%tmm" #TILE ", (%0,%1,1)" ::"r"((void *)(P)), "r"((size_t)(STRIDE)) : "memory")

/* Sums of two blocks for the rows of A that begin at a, `stride` apart. */
INLINE void multiply(const uint8_t *b0, const uint8_t *b1, uint32_t quads, const int8_t *a, size_t stride, int32_t (*s0)[16],
                     int32_t (*s1)[16])
{
    uint32_t j = 0;
    _tile_zero(0);
    _tile_zero(1);
    for (; j + CHUNK <= quads; j += CHUNK) {
        tile_load(4, a + 4 * j, stride);
        tile_load(6, b0 + (size_t)j * 64, 64);
        tile_load(7, b1 + (size_t)j * 64, 64);
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
    }
    if (j < quads) {
        tile_load(5, a + 4 * j, stride);
        tile_load(2, b0 + (size_t)j * 64, 64);
        tile_load(3, b1 + (size_t)j * 64, 64);
        _tile_dpbsud(0, 5, 2);
        _tile_dpbsud(1, 5, 3);
    }
    tile_store(0, s0, 64);
    tile_store(1, s1, 64);
}

/* All products first: a sum can be read as vectors only some time after a tile was stored. */
static void codes_heads(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t quads, const idx_code_query *q, uint32_t ng,
                        float *out, size_t ld, float *ret_best)
{
    enum { BLOCKS = 16 };
    int32_t sums[BLOCKS][HEADS][16] __attribute__((aligned(64)));
    __m512 best[HEADS];
    size_t stride = ng > 1 ? (size_t)(q[1].x - q[0].x) : 64, block_bytes = (size_t)quads * 64;
    for (uint32_t g = 0; g < ng; g++)
        best[g] = _mm512_set1_ps(-__builtin_inff());
    for (uint32_t from = 0; from < n_blocks; from += BLOCKS) {
        uint32_t n = n_blocks - from < BLOCKS ? n_blocks - from : BLOCKS;
        const uint8_t *block = codes + from * block_bytes;
        for (uint32_t b = 0; b < n; b += 2) { /* an odd last one: twice */
            uint32_t next = b + 1 < n ? b + 1 : b;
            multiply(block + b * block_bytes, block + next * block_bytes, quads, q->x, stride, sums[b], sums[next]);
        }
        for (uint32_t g = 0; g < ng; g++) {
            float *to = out + g * ld + from * IDX_BLOCK;
            __m512i bias = _mm512_set1_epi32(q[g].bias);
            for (size_t i = (size_t)n * quads * g / ng; i < (size_t)n * quads * (g + 1) / ng; i++) {
                _mm_prefetch(block + i * 64 + IDX_CODES_FAR, _MM_HINT_T1);
                _mm_prefetch(block + i * 64 + BLOCKS * block_bytes, _MM_HINT_T0);
            }
            for (uint32_t b = 0; b < n; b++) {
                __m512i dot = _mm512_add_epi32(_mm512_load_si512(sums[b][g]), bias);
                __m512 score = idx_code_scores(dot, _mm512_load_ps(scale + (from + b) * IDX_BLOCK), &q[g]);
                _mm512_storeu_ps(to + b * IDX_BLOCK, score);
                best[g] = _mm512_max_ps(score, best[g]); /* the second operand wins against NaN */
            }
        }
    }
    for (uint32_t g = 0; g < ng; g++)
        ret_best[g] = _mm512_reduce_max_ps(best[g]);
}

void idx_codes_amx(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t quads, const idx_code_query *q, uint32_t nq,
                   float *out, size_t ld, float *ret_best)
{
    for (uint32_t h = 0; h < nq; h += HEADS) {
        uint32_t ng = nq - h < HEADS ? nq - h : HEADS;
        begin(ng, quads);
        codes_heads(codes, scale, n_blocks, quads, q + h, ng, out + h * ld, ld, ret_best + h);
        _tile_release();
    }
}

void idx_nearest_amx(const int8_t *rows, uint32_t quads, const uint8_t *panel, const int32_t *half, uint32_t n_blocks, uint32_t *ret)
{
    enum { BLOCKS = 16 };
    int32_t sums[BLOCKS][IDX_BLOCK][16] __attribute__((aligned(64)));
    __m512i best[IDX_BLOCK], at[IDX_BLOCK];
    size_t block_bytes = (size_t)quads * 64;
    for (int r = 0; r < IDX_BLOCK; r++) {
        best[r] = _mm512_set1_epi32(INT32_MIN);
        at[r] = _mm512_setzero_si512();
    }
    begin(IDX_BLOCK, quads);
    for (uint32_t from = 0; from < n_blocks; from += BLOCKS) {
        uint32_t n = n_blocks - from < BLOCKS ? n_blocks - from : BLOCKS;
        for (uint32_t b = 0; b < n; b += 2) { /* an odd last one: twice */
            uint32_t next = b + 1 < n ? b + 1 : b;
            multiply(panel + (from + b) * block_bytes, panel + (from + next) * block_bytes, quads, rows, 4 * quads, sums[b], sums[next]);
        }
        for (uint32_t r = 0; r < IDX_BLOCK; r++) {
            __m512i most = best[r], where = at[r];
            for (uint32_t b = 0; b < n; b++) {
                uint32_t c = (from + b) * 16;
                idx_take_larger(_mm512_sub_epi32(_mm512_load_si512(sums[b][r]), _mm512_loadu_si512(half + c)), c, &most, &where);
            }
            best[r] = most;
            at[r] = where;
        }
    }
    _tile_release();
    for (uint32_t r = 0; r < IDX_BLOCK; r++)
        ret[r] = idx_first_of(best[r], at[r]);
}
