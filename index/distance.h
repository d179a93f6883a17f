/* The numeric kernels of index/, one table per instruction set. Scalar is the oracle.
 *
 * All scores of the folder come from dots(): the sum over d is taken in 16 interleaved partial sums that are then added in a fixed
 * tree, whatever the slot of the row in its block, so the scan and the graph give the same bits for the same query and key.
 * Accumulators are float32.
 */
#ifndef IDX_DISTANCE_H
#define IDX_DISTANCE_H

#include "index.h"

enum {
    IDX_BLOCK = 16, /* rows a dots() call scores */
    IDX_TILE = 256, /* rows scored between two looks at the thresholds */
    IDX_ALIGN = 64,
};

/* Dimensions of a widened row: padded with zeros to whole vectors of 16. */
static inline uint32_t idx_dim_pad(uint32_t dim)
{
    return (dim + 15) & ~15u;
}

/* What a graph search wants of a query head (graph_search.c). */
typedef struct {
    float best, gain, least;
    float threshold; /* a node scored below it isn't expanded for this head; -INFINITY: not known yet */
    uint32_t next;   /* number of kept keys at which to look again */
} idx_aim;

typedef struct {
    /* dst[i] = row ids[i] (ids NULL: row first + i) as f32 [n][dim_pad]; rows are read unaligned. */
    void (*widen)(float *dst, const idx_rows *rows, const uint32_t *ids, uint32_t first, uint32_t n);

    /* out[h * ld + r] = scale * <q[h], rows[r]>, rows [16][dim_pad], q [nq][dim_pad], both 64-byte aligned. */
    void (*dots)(const float *rows, const float *q, uint32_t nq, uint32_t dim_pad, float scale, float *out, size_t ld);

    /* Largest of x[0..n) and init; NaN counts as nothing. */
    float (*max)(const float *x, uint32_t n, float init);

    /* Appends (id, score) of every score >= thr, in order, and returns their number. ids NULL: first + i. The outputs need room for
     * n + 16 entries, and may be the inputs (a compaction in place). */
    uint32_t (*filter)(const uint32_t *ids, uint32_t first, const float *scores, uint32_t n, float thr, uint32_t *ret_ids,
                       float *ret_scores);

    /* Splits x around a pivot: the larger ones to gt (may be x itself), the smaller ones to lt; both with room for n + 16. */
    void (*split)(const float *x, uint32_t n, float pivot, float *gt, uint32_t *ret_gt, float *lt, uint32_t *ret_lt);

    /* What a block of scores [nq][16] is worth to a graph search: ret_value[r] = the largest over heads h of
     * max((score - aim[h].best) * aim[h].gain + 1, aim[h].least), ret_head[r] = that h. NaN is worth less than anything. */
    void (*judge)(const float *scores, const idx_aim *aim, uint32_t nq, float *ret_value, uint32_t *ret_head);
} idx_kernels;

/* The body of judge(), vectorised by the compiler in the file of each instruction set. */
static inline void idx_judge(const float *scores, const idx_aim *aim, uint32_t nq, float *ret_value, uint32_t *ret_head)
{
    float value[IDX_BLOCK];
    uint32_t head[IDX_BLOCK];
    for (uint32_t r = 0; r < IDX_BLOCK; r++) {
        value[r] = -__builtin_inff();
        head[r] = 0;
    }
    for (uint32_t h = 0; h < nq; h++) {
        float best = aim[h].best, gain = aim[h].gain, least = aim[h].least;
        for (uint32_t r = 0; r < IDX_BLOCK; r++) {
            float v = (scores[h * IDX_BLOCK + r] - best) * gain + 1;
            v = v < least ? least : v;
            head[r] = v > value[r] ? h : head[r];
            value[r] = v > value[r] ? v : value[r];
        }
    }
    for (uint32_t r = 0; r < IDX_BLOCK; r++) {
        ret_value[r] = value[r];
        ret_head[r] = head[r];
    }
}

extern const idx_kernels idx_kernels_scalar, idx_kernels_avx2, idx_kernels_avx512;

/* The table in use: the one idx_cpu_set() chose, else the machine's best. */
const idx_kernels *idx_kernels_get(void);

static inline float idx_half_to_float(uint16_t h)
{
    /* The exponent is rebiased by a product, which also makes subnormals right; infinity and NaN overflow it and are patched. */
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)(h & 0x7fffu) << 13};
    v.f *= 0x1p112f;
    if ((h & 0x7c00u) == 0x7c00u)
        v.u |= 0x7f800000u;
    v.u |= (uint32_t)(h & 0x8000u) << 16;
    return v.f;
}

static inline size_t idx_type_size(idx_type t)
{
    return t == IDX_F32 ? 4 : 2;
}

static inline const uint8_t *idx_row(const idx_rows *rows, uint32_t i)
{
    return (const uint8_t *)rows->data + (size_t)i * rows->stride;
}

#endif
