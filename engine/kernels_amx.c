/* AMX level: bf16 products by tiles. Everything else is the AVX-512 level's. */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_amx.h"

/* Tiles: 0 1 2 3 the sums of two row blocks by two halves of a panel, 4 5 the row blocks of A, 6 7 the panel's halves, whose layout
 * [k/2][ENG_NR][2] is what TDPBF16PS reads. A step takes 32 of k: first all even elements of a pair in rising order, then all odd ones, are summed
 * in float32, and their sum is added to C. So an output's bits do not depend on the other rows, and a product cut along k at a multiple
 * of 32 has the same bits as the whole. */
enum { STEP = 32, ROWS = 16 };

INLINE void multiply_step(const bool two, const uint16_t *a, size_t lda, const uint16_t *b)
{
    amx_load(4, a, lda * 2);
    amx_load(6, b, ENG_NR * 4);
    amx_load(7, b + ENG_NR, ENG_NR * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
        amx_load(5, a + ROWS * lda, lda * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

/* `rows` (up to 32; two: more than 16) rows of C, all ENG_NR outputs; the tiles have their shape. */
INLINE void block(const bool two, float *c, size_t ldc, const uint16_t *a, size_t lda, const uint16_t *panel, size_t rows, size_t k,
                  bool accumulate)
{
    if (accumulate) {
        amx_load(0, c, ldc * 4);
        amx_load(1, c + 16, ldc * 4);
        if (two) {
            amx_load(2, c + ROWS * ldc, ldc * 4);
            amx_load(3, c + ROWS * ldc + 16, ldc * 4);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    size_t l = 0;
    for (; l + STEP <= k; l += STEP)
        multiply_step(two, a + l, lda, panel + l * ENG_NR);
    if (l < k) { /* the last step, filled up with zeros */
        uint16_t last_a[2 * ROWS][STEP] = {{0}}, last_b[STEP / 2][ENG_NR * 2] = {{0}};
        for (size_t i = 0; i < rows; i++)
            memcpy(last_a[i], a + i * lda + l, (k - l) * 2);
        memcpy(last_b, panel + l * ENG_NR, (k - l) * ENG_NR * 2);
        multiply_step(two, last_a[0], STEP, last_b[0]);
    }
    _tile_stored(0, c, ldc * 4);
    _tile_stored(1, c + 16, ldc * 4);
    if (two) {
        _tile_stored(2, c + ROWS * ldc, ldc * 4);
        _tile_stored(3, c + ROWS * ldc + 16, ldc * 4);
    }
}

/* The shape for fewer than 32 rows: blocks of `first` and `second` rows. */
static amx_shape shape_of(size_t first, size_t second)
{
    amx_shape s = amx_full;
    s.rows[0] = s.rows[1] = s.rows[4] = (uint8_t)first;
    s.rows[2] = s.rows[3] = s.rows[5] = second ? (uint8_t)second : 1; /* 0 rows are no shape; not used then */
    return s;
}

/* n == ENG_NR. */
static void full_panel(float *c, size_t ldc, const uint16_t *a, size_t lda, const uint16_t *panel, size_t m, size_t k, bool accumulate)
{
    amx_begin(&amx_full);
    size_t i = 0;
    for (; i + 2 * ROWS <= m; i += 2 * ROWS)
        block(true, c + i * ldc, ldc, a + i * lda, lda, panel, 2 * ROWS, k, accumulate);
    size_t left = m - i;
    if (left > ROWS) {
        amx_shape s = shape_of(ROWS, left - ROWS);
        amx_begin(&s);
        block(true, c + i * ldc, ldc, a + i * lda, lda, panel, left, k, accumulate);
    } else if (left) {
        amx_shape s = shape_of(left, 0);
        amx_begin(&s);
        block(false, c + i * ldc, ldc, a + i * lda, lda, panel, left, k, accumulate);
    }
    amx_end();
}

static void gemm_bf16(float *c, size_t ldc, const uint16_t *a, size_t lda, const uint16_t *panel, size_t m, size_t n, size_t k,
                      bool accumulate)
{
    if (n == ENG_NR) {
        full_panel(c, ldc, a, lda, panel, m, k, accumulate);
        return;
    }
    for (size_t i = 0; i < m; i += 2 * ROWS) { /* tiles reach over C's columns: a copy */
        float copy[2 * ROWS][ENG_NR] = {{0}};
        size_t rows = m - i < 2 * ROWS ? m - i : 2 * ROWS;
        for (size_t r = 0; accumulate && r < rows; r++)
            memcpy(copy[r], c + (i + r) * ldc, n * sizeof(float));
        full_panel(copy[0], ENG_NR, a + i * lda, lda, panel, rows, k, accumulate);
        for (size_t r = 0; r < rows; r++)
            memcpy(c + (i + r) * ldc, copy[r], n * sizeof(float));
    }
}

void eng_amx_gemm(eng_kernels *k)
{
    k->gemm_bf16 = gemm_bf16;
}

void eng_kernels_amx(eng_kernels *k)
{
    k->name = "amx (AMX BF16, AVX-512 VNNI)";
    memset(k->prefill_q8, 0, sizeof k->prefill_q8); /* tiles are faster */
    eng_amx_gemm(k);
    eng_amx_attention(k);
}
#endif
