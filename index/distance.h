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
    IDX_ROUNDINGS = 4, /* of a query, which tiles of a scan take by turns */
};

/* Dimensions of a widened row: padded with zeros to whole vectors of 16. */
static inline uint32_t idx_dim_pad(uint32_t dim)
{
    return (dim + 15) & ~15u;
}

/* ---- codes (codes_build.c) ----
 * A key less the mean key, in its dimensions' units, is scale * (u - 128), u a byte a dimension. Slots lie in blocks of 16, interleaved by fours so that a vector
 * holds four dimensions of 16 slots: codes[block][quad][16][4]. A query is a byte x a dimension, |x| <= 127, in whole vectors of
 * 16, as in rows. The dots are exact integers. */
typedef struct {
    const int8_t *x; /* [idx_dim_pad(4 * quads)] */
    int32_t bias;    /* -128 times the sum of x */
    float scale, offset;      /* score = scale * scale of the slot * (dot + bias) + offset */
    float margin;             /* by which a score is hardly ever wrong */
} idx_code_query;

/* How far ahead codes are asked for, in bytes: into the second cache, which takes long and has to go on while scores are looked at, and into the first. */
enum { IDX_CODES_FAR = 16384, IDX_CODES_NEAR = 1024 };

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

    /* codes() of one block for the heads whose bits are set: out[h * 16 + i], best[h] = the larger of itself and its scores; the same bits. */
    void (*node)(const uint8_t *codes, const float *scale, uint32_t quads, const idx_code_query *q, uint32_t heads, float *out, float *best);

    /* What a graph search reads next (graph_search.c): want[i] |= bit where score[i] + spread[i] * size * (margin + IDX_VOTE * votes[i] / (votes[i] + 1)) >= least. */
    void (*reach)(const float *score, const float *spread, const float *votes, uint32_t n, float size, float margin, float least, uint32_t bit, uint32_t *want);

    /* out[h * ld + i] = score of slot i, for the slots of n_blocks blocks, and ret_best[h] the largest of them; NaN counts as nothing, -INFINITY: there is none.
     * scale: [16 * n_blocks], 64-byte aligned as codes are. The x of all heads lie at equal distances. */
    void (*codes)(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t quads, const idx_code_query *q, uint32_t nq,
                  float *out, size_t ld, float *ret_best);

    /* out[i] = scale[i] where offset + ids[i] < rows (modulo 2^32), else NaN. n is a multiple of 16. */
    void (*visible)(const float *scale, const uint16_t *ids, uint32_t n, uint32_t offset, uint32_t rows, float *out);

    /* out[i] = exp(x[i] - m), for x[i] <= m + 80; below e^-87, and for NaN, 0. Relative error 2^-17. out has room for n + 16. */
    void (*weigh)(const float *x, uint32_t n, float m, float *out);

    /* Clusters c = 0, 1, .. end at x[end[c] - x0] (rising), and the first one begins at x[from]. For each head h < nq: to[h][c] += the sum of x[h * IDX_TILE + i]
     * over the c's i in [from, n). n <= IDX_TILE */
    void (*sums)(const float *x, uint32_t nq, uint32_t from, uint32_t n, const uint32_t *end, uint32_t x0, float *const *to);

    /* ret[r] = the centroid c with the largest <rows[r], panel[c]> - half[c], r < 16; the first of equals. All exact in integers: rows [16][4 * quads], |x| <= 63, small
     * enough that no 16-bit sum of two products saturates; panel [n_blocks][quads][16][4], laid out as codes are; half [16 * n_blocks]. */
    void (*nearest)(const int8_t *rows, uint32_t quads, const uint8_t *panel, const int32_t *half, uint32_t n_blocks, uint32_t *ret);

    /* Rounds v[0..n) * inverse, |.| <= 126, to bytes x. Returns the sum of x. up: what is added before rounding down, for successive
     * elements by turns. n is a multiple of 16. */
    int32_t (*round)(const float *v, float inverse, const float up[IDX_ROUNDINGS], uint32_t n, int8_t *x);

    /* codes() for codes of four bits (distance_narrow.h). */
    void (*narrow)(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t pairs, const idx_code_query *q, uint32_t nq, float *out, size_t ld, float *ret_best);
} idx_kernels;

/* The most that votes add to a margin. */
#define IDX_VOTE 1.6f

/* The body of reach(), vectorised by the compiler in the file of each instruction set. */
static inline void idx_reach(const float *score, const float *spread, const float *votes, uint32_t n, float size, float margin, float least, uint32_t bit, uint32_t *want)
{
    for (uint32_t i = 0; i < n; i++) {
        float bound = score[i] + spread[i] * size * (margin + IDX_VOTE * votes[i] / (votes[i] + 1));
        want[i] |= bound >= least ? bit : 0;
    }
}

typedef void (*idx_codes_fn)(const uint8_t *codes, const float *scale, uint32_t n_blocks, uint32_t quads, const idx_code_query *q, uint32_t nq, float *out, size_t ld, float *ret_best);

/* The body of node(), by codes() of one head at a time. */
static inline void idx_node(idx_codes_fn kernel, const uint8_t *codes, const float *scale, uint32_t quads, const idx_code_query *q, uint32_t heads, float *out, float *best)
{
    for (; heads; heads &= heads - 1) {
        uint32_t h = (uint32_t)__builtin_ctz(heads);
        float b;
        kernel(codes, scale, 1, quads, q + h, 1, out + h * IDX_BLOCK, IDX_BLOCK, &b);
        best[h] = b > best[h] ? b : best[h];
    }
}

/* The body of visible(), likewise. */
static inline void idx_visible(const float *scale, const uint16_t *ids, uint32_t n, uint32_t offset, uint32_t rows, float *out)
{
    for (uint32_t i = 0; i < n; i += IDX_BLOCK)
        for (uint32_t j = i; j < i + IDX_BLOCK; j++)
            out[j] = offset + ids[j] < rows ? scale[j] : __builtin_nanf("");
}

extern const idx_kernels idx_kernels_scalar, idx_kernels_avx2, idx_kernels_avx512, idx_kernels_amx;

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

enum { IDX_Q8_BLOCK = 32, IDX_Q8_BYTES = 34 }; /* elements and bytes of a block of IDX_Q8_0 */

static inline size_t idx_row_bytes(const idx_rows *r)
{
    if (r->type == IDX_Q8_0)
        return ((size_t)r->dim + IDX_Q8_BLOCK - 1) / IDX_Q8_BLOCK * IDX_Q8_BYTES;
    return (size_t)r->dim * (r->type == IDX_F32 ? 4 : 2);
}

/* Of two widened rows, in plain C: the same bits on every level. */
float idx_dot(const float *a, const float *b, uint32_t dim_pad);

static inline const uint8_t *idx_row(const idx_rows *rows, uint32_t i)
{
    return (const uint8_t *)rows->data + (size_t)i * rows->stride;
}

#endif
