/* The products: every level against a float64 reference on random and adversarial rows, and the determinism rule of kernels.h (an output's
 * bits depend on its own inputs alone). Bounds: a sum of n rounded terms is off by at most about n EPS times the sum of the terms'
 * magnitudes, in any order of summation.
 */
#include "kernel_support.h"

#include <errno.h>

static const size_t block_lengths[] = {0, 32, 64, 96, 128, 160, 224, 576, 1536};
static const size_t super_lengths[] = {0, 256, 512, 768, 1536};
static const size_t any_lengths[] = {0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 63, 64, 100, 576};
static const size_t row_counts[] = {0, 1, 2, 3, 4, 5, 7, 9};
#define COUNT(a) (sizeof(a) / sizeof *(a))

/* The lengths of rows to try with a type. */
static size_t lengths_of(eng_type t, const size_t **ret)
{
    *ret = eng_types[t].block == 1 ? any_lengths : eng_types[t].block == 32 ? block_lengths : super_lengths;
    return eng_types[t].block == 1 ? COUNT(any_lengths) : eng_types[t].block == 32 ? COUNT(block_lengths) : COUNT(super_lengths);
}

START_TEST(levels)
{
    const eng_kernels *best, *k;
    char err[200] = "";
    ck_assert_int_eq(eng_kernels_get(ENG_CPU_AUTO, &best, err, sizeof err), 0);
    ck_assert_int_eq(eng_kernels_get(ENG_CPU_SCALAR, &k, err, sizeof err), 0);
    ck_assert_str_eq(k->name, "scalar");
    ck_assert_ptr_null(k->gemm_bf16);
    const eng_kernels *highest = NULL;
    for (int l = ENG_CPU_SCALAR; l <= ENG_CPU_AMX; l++)
        highest = t_level(l) ? t_level(l) : highest;
    ck_assert_ptr_eq(best, highest);
    for (int l = ENG_CPU_AVX2; l <= ENG_CPU_AMX; l++)
        if (!t_level(l)) {
            k = NULL;
            ck_assert_int_eq(eng_kernels_get((eng_cpu)l, &k, err, sizeof err), -ENOTSUP);
            ck_assert_ptr_null(k);
            ck_assert_str_ne(err, "");
        }
    if (t_level(T_AVX512_NO_BF16))
        ck_assert_ptr_null(t_level(T_AVX512_NO_BF16)->gemm_bf16);
    ck_assert_int_eq(eng_kernels_get((eng_cpu)99, &k, err, sizeof err), -ENOTSUP);
}
END_TEST

/* ---- decode ----------------------------------------------------------------------------------------------------- */

static eng_q8_act act_alloc(size_t n)
{
    return (eng_q8_act){.q = t_alloc(n), .d = t_floats(n / 32), .s = t_floats(n / 32)};
}

static float adversarial(t_rng *rng, size_t block)
{
    float v = t_normal(rng);
    switch (block % 8) {
    case 1:
        return 0;
    case 2:
        return v * 1e-40f; /* denormal */
    case 3:
        return v * 1e28f;
    case 4:
        return v > 0 ? 1 : -1;
    case 5:
        return v * 1e-31f; /* around the smallest block that counts */
    case 6:                /* ties between two codes: the largest is 127 */
        return t_u64(rng) % 4 ? (float)(t_u64(rng) % 127) + 0.5f : 127;
    default:
        return v;
    }
}

START_TEST(quantize)
{
    t_rng rng = t_seed(1);
    for (size_t c = 0; c < COUNT(block_lengths); c++) {
        size_t n = block_lengths[c];
        float *x = t_floats(n);
        for (size_t i = 0; i < n; i++)
            x[i] = adversarial(&rng, i / 32);
        eng_q8_act ref = act_alloc(n);
        t_level(ENG_CPU_SCALAR)->quantize_q8(x, &ref, n);
        FOR_LEVELS(k)
        {
            eng_q8_act a = act_alloc(n);
            k->quantize_q8(x, &a, n);
            t_same("codes", k->name, a.q, ref.q, n);
            t_same("scales", k->name, a.d, ref.d, n / 32 * 4);
            t_same("sums", k->name, a.s, ref.s, n / 32 * 4);
            for (size_t b = 0; b < n / 32; b++) {
                double amax = 0, sum = 0;
                for (size_t i = 32 * b; i < 32 * b + 32; i++) {
                    amax = fmax(amax, fabs((double)x[i]));
                    sum += a.q[i];
                    ck_assert_int_ge(a.q[i], -127);
                    t_near("code", k->name, (double)a.d[b] * a.q[i], x[i], a.d[b] * (0.5 + 1e-4) + 1e-30);
                }
                if (amax >= 1e-30)
                    t_near("d", k->name, a.d[b], amax / 127, amax * EPS);
                t_near("s", k->name, a.s[b], a.d[b] * sum, fabs(a.d[b] * sum) * EPS);
            }
        }
        t_arena_reset();
    }
}
END_TEST

/* The largest d s |code| of a type for a block's scale of 1, and the largest m t for a minimum of 1. */
static const struct {
    double code, min;
} most[ENG_TYPE_COUNT] = {
    [ENG_Q8_0] = {128, 0},      [ENG_Q4_0] = {8, 0},        [ENG_Q4_1] = {15, 1},       [ENG_Q5_0] = {16, 0},
    [ENG_Q5_1] = {31, 1},       [ENG_IQ4_NL] = {127, 0},    [ENG_Q2_K] = {15 * 3, 15},  [ENG_Q3_K] = {32 * 4, 0},
    [ENG_Q4_K] = {63 * 15, 63}, [ENG_Q5_K] = {63 * 31, 63}, [ENG_Q6_K] = {128 * 32, 0}, [ENG_IQ4_XS] = {32 * 127, 0},
};

/* The largest magnitude that a weight of element i's block may have. */
static double largest_of(eng_type t, const char *row, size_t i)
{
    const char *block = row + i / eng_types[t].block * eng_types[t].bytes;
    uint16_t d, m = 0;
    memcpy(&d, block + t_scale_at(t), 2);
    if (t_min_at(t) >= 0)
        memcpy(&m, block + t_min_at(t), 2);
    return fabs((double)eng_f16_to_f32(d)) * most[t].code + fabs((double)eng_f16_to_f32(m)) * most[t].min;
}

/* One row's product in float64 with the weights' values (test_quant compares them with another library's), and a bound on the sum of its
 * terms' magnitudes, d q and m taken apart. */
static double dot_q8(eng_type t, const char *row, const eng_q8_act *x, size_t n, double *ret_size)
{
    double sum = 0, size = 0;
    float *w = t_floats(n);
    eng_dequantize(t, row, w, n);
    for (size_t i = 0; i < n; i++) {
        double v = (double)x->d[i / 32] * x->q[i];
        sum += v * w[i];
        size += fabs(v) * largest_of(t, row, i);
    }
    *ret_size = size;
    return sum;
}

static void check_gemv_q8(const eng_kernels *k, eng_type t, t_rng *rng, size_t rows, size_t n)
{
    size_t row_bytes = t_row_bytes(t, n) + 2 * (rows % 3); /* rows need not be dense */
    char *w = t_weights(rng, t, rows, n, row_bytes);
    float *xf = t_floats(n), *y = t_floats(rows), one;
    for (size_t i = 0; i < n; i++)
        xf[i] = rows % 2 ? t_normal(rng) : adversarial(rng, i / 32);
    eng_q8_act x = act_alloc(n);
    k->quantize_q8(xf, &x, n);
    if (rows == 9) {
        int q = t_u64(rng) % 2 ? 127 : -127;
        memset(x.q, q, n);
        for (size_t b = 0; b < n / 32; b++)
            x.s[b] = x.d[b] * (float)(32 * q);
    }
    k->gemv_q8[t](y, w, row_bytes, rows, &x, n);
    for (size_t r = 0; r < rows; r++) {
        double size, want = dot_q8(t, w + r * row_bytes, &x, n, &size);
        t_near(eng_types[t].name, k->name, y[r], want, ((double)n / 8 + 12) * EPS * size + FLT_MIN);
        k->gemv_q8[t](&one, w + r * row_bytes, row_bytes, 1, &x, n);
        t_same("a row alone", k->name, &one, &y[r], 4);
    }
    t_arena_reset();
}

START_TEST(gemv_q8)
{
    t_rng rng = t_seed(2);
    FOR_LEVELS(k)
    for (eng_type t = 0; t < ENG_TYPE_COUNT; t++) {
        const size_t *lengths, count = lengths_of(t, &lengths);
        ck_assert((k->gemv_q8[t] != NULL) == (eng_types[t].block > 1));
        for (size_t i = 0; k->gemv_q8[t] && i < COUNT(row_counts); i++)
            for (size_t j = 0; j < count; j++)
                check_gemv_q8(k, t, &rng, row_counts[i], lengths[j]);
    }
}
END_TEST

static void check_gemv_f32(const eng_kernels *k, eng_type t, t_rng *rng, size_t rows, size_t n)
{
    size_t row_bytes = t_row_bytes(t, n) + 4 * (rows % 3);
    char *w = t_weights(rng, t, rows, n, row_bytes);
    float *x = t_randoms(rng, n), *y = t_floats(rows), *row = t_floats(n), one;
    k->gemv_f32[t](y, w, row_bytes, rows, x, n);
    for (size_t r = 0; r < rows; r++) {
        double want = 0, size = 0;
        eng_dequantize(t, w + r * row_bytes, row, n);
        for (size_t i = 0; i < n; i++) {
            want += (double)row[i] * x[i];
            size += fabs((double)row[i] * x[i]);
        }
        t_near(eng_types[t].name, k->name, y[r], want, ((double)n + 2) * EPS * size + FLT_MIN);
        k->gemv_f32[t](&one, w + r * row_bytes, row_bytes, 1, x, n);
        t_same("a row alone", k->name, &one, &y[r], 4);
    }
    t_arena_reset();
}

START_TEST(gemv_f32)
{
    t_rng rng = t_seed(3);
    FOR_LEVELS(k)
    for (eng_type t = 0; t < ENG_TYPE_COUNT; t++) {
        const size_t *lengths, count = lengths_of(t, &lengths);
        for (size_t i = 0; i < COUNT(row_counts); i++)
            for (size_t j = 0; j < count; j++)
                check_gemv_f32(k, t, &rng, row_counts[i], lengths[j]);
    }
}
END_TEST

/* ---- prefill ---------------------------------------------------------------------------------------------------- */

/* bf16 of the nearest value; denormals may be flushed to zero. */
static void check_bf16(const char *what, const char *level, uint16_t got, float x)
{
    uint16_t want = eng_f32_to_bf16(x);
    if (fabsf(x) < FLT_MIN && (got & 0x7fff) == 0)
        return;
    if (isnan(x) ? !isnan(eng_bf16_to_f32(got)) : got != want)
        ck_abort_msg("%s, %s: %g became 0x%04x, not 0x%04x", what, level, (double)x, got, want);
}

static void check_pack(const eng_kernels *k, eng_type t, t_rng *rng, size_t rows, size_t n)
{
    size_t row_bytes = t_row_bytes(t, n) + 2 * (rows % 3) * (t != ENG_F32);
    char *w = t_weights(rng, t, rows, n, row_bytes);
    float *row = t_floats(n), *got = t_floats(n), *tmp = t_floats(ENG_NR * n), *f = t_floats(ENG_NR * n);
    uint16_t *h = t_alloc(ENG_NR * n * 2);
    memset(f, 0xff, ENG_NR * n * 4);
    memset(h, 0xff, ENG_NR * n * 2);
    k->pack_f32(f, t, w, row_bytes, rows, n, tmp);
    if (n % 2 == 0)
        k->pack_bf16(h, t, w, row_bytes, rows, n, tmp);
    for (size_t r = 0; r < ENG_NR; r++) {
        memset(row, 0, n * 4);
        if (r < rows) {
            eng_dequantize(t, w + r * row_bytes, row, n);
            k->dequantize[t](w + r * row_bytes, got, n);
            t_same(eng_types[t].name, k->name, got, row, n * 4);
        }
        for (size_t i = 0; i < n; i++) {
            t_same("pack_f32", k->name, &f[i * ENG_NR + r], &row[i], 4);
            if (n % 2 == 0)
                check_bf16("pack_bf16", k->name, h[(i / 2 * ENG_NR + r) * 2 + i % 2], row[i]);
        }
    }
    t_arena_reset();
}

START_TEST(pack)
{
    static const size_t counts[] = {0, 1, 5, 15, 16, 17, 31, 32};
    t_rng rng = t_seed(4);
    FOR_LEVELS(k)
    for (eng_type t = 0; t < ENG_TYPE_COUNT; t++) {
        const size_t *lengths, count = lengths_of(t, &lengths);
        for (size_t i = 0; i < COUNT(counts); i++)
            for (size_t j = 0; j < count; j++)
                check_pack(k, t, &rng, counts[i], lengths[j]);
    }
}
END_TEST

START_TEST(to_bf16)
{
    static const float special[] = {0, -0.0f, INFINITY, -INFINITY, NAN, FLT_MAX, -FLT_MAX, FLT_MIN, 1e-40f, 1.00390625f, 1.01171875f};
    t_rng rng = t_seed(5);
    FOR_LEVELS(k)
    for (size_t n = 0; n < 70; n++) {
        float *x = t_floats(n);
        uint16_t *out = t_alloc(2 * n);
        for (size_t i = 0; i < n; i++)
            x[i] = t_u64(&rng) % 2 ? special[t_u64(&rng) % COUNT(special)] : t_normal(&rng);
        k->f32_to_bf16(x, out, n);
        for (size_t i = 0; i < n; i++)
            check_bf16("f32_to_bf16", k->name, out[i], x[i]);
        t_arena_reset();
    }
}
END_TEST

/* A product of either kind over the same small problem: A [m][lda], B panel or [k][ldb]. */
typedef struct {
    const eng_kernels *k;
    bool bf16;
    const float *a, *b;
    const uint16_t *a16, *b16;
    size_t lda, ldb;
} problem;

static void multiply(const problem *p, float *c, size_t ldc, size_t row, size_t m, size_t n, size_t from, size_t to, bool accumulate)
{
    if (p->bf16)
        p->k->gemm_bf16(c, ldc, p->a16 + row * p->lda + from, p->lda, p->b16 + from * ENG_NR, m, n, to - from, accumulate);
    else
        p->k->gemm_f32(c, ldc, p->a + row * p->lda + from, p->lda, p->b + from * p->ldb, p->ldb, m, n, to - from, accumulate);
}

static problem problem_new(const eng_kernels *k, bool bf16, t_rng *rng, size_t m, size_t n, size_t depth)
{
    problem p = {.k = k, .bf16 = bf16, .lda = depth + m % 3 * 2, .ldb = bf16 || m % 2 ? ENG_NR : n};
    size_t na = m ? (m - 1) * p.lda + depth : 0, nb = depth ? (depth - 1) * p.ldb + (bf16 ? ENG_NR : n) : 0;
    float *a = t_floats(na), *b = t_floats(nb);
    uint16_t *a16 = t_alloc(2 * na), *b16 = t_alloc(2 * nb);
    for (size_t i = 0; i < na; i++) {
        a16[i] = eng_f32_to_bf16(t_normal(rng) * (i % 7 == 0 ? 1e4f : 1));
        a[i] = bf16 ? eng_bf16_to_f32(a16[i]) : t_normal(rng) * (i % 7 == 0 ? 1e4f : 1);
    }
    for (size_t i = 0; i < nb; i++) {
        b[i] = t_normal(rng);
        if (bf16) { /* b [k][ENG_NR] holds what the panel [k/2][ENG_NR][2] does */
            size_t at = (i / ENG_NR / 2 * ENG_NR + i % ENG_NR) * 2 + i / ENG_NR % 2;
            b16[at] = eng_f32_to_bf16(b[i]);
            b[i] = eng_bf16_to_f32(b16[at]);
        }
    }
    p.a = a, p.b = b, p.a16 = a16, p.b16 = b16;
    return p;
}

static void check_gemm(const eng_kernels *k, bool bf16, t_rng *rng, size_t m, size_t n, size_t depth)
{
    problem p = problem_new(k, bf16, rng, m, n, depth);
    const size_t ldc = n + 3;
    float *c = t_floats(m ? (m - 1) * ldc + n : 0), alone[ENG_NR];
    for (size_t i = 0; m && i < (m - 1) * ldc + n; i++)
        c[i] = 77;
    multiply(&p, c, ldc, 0, m, n, 0, depth, false);
    for (size_t i = 0; i < m; i++) {
        for (size_t j = 0; j < n; j++) {
            double want = 0, size = 0;
            for (size_t l = 0; l < depth; l++) {
                double v = (double)p.a[i * p.lda + l] * p.b[l * p.ldb + j];
                want += v;
                size += fabs(v);
            }
            t_near(bf16 ? "gemm_bf16" : "gemm_f32", k->name, c[i * ldc + j], want, ((double)depth + 2) * EPS * size + FLT_MIN);
        }
        for (size_t j = n; i + 1 < m && j < ldc; j++)
            ck_assert_msg(c[i * ldc + j] == 77, "%s wrote between rows", k->name);
        multiply(&p, alone, ENG_NR, i, 1, n, 0, depth, false);
        t_same("a row alone", k->name, alone, c + i * ldc, n * 4);
        multiply(&p, alone, ENG_NR, i, 1, 1, 0, depth, false);
        t_same("an output alone", k->name, alone, c + i * ldc, 4);
    }
    if (depth >= 4 && m) { /* two halves of k, added up, are the whole */
        float *d = t_floats((m - 1) * ldc + n);
        size_t cut = bf16 ? depth / 64 * 32 : depth / 2; /* kernels.h: bf16 at multiples of 32 */
        multiply(&p, d, ldc, 0, m, n, 0, cut, false);
        multiply(&p, d, ldc, 0, m, n, cut, depth, true);
        for (size_t i = 0; i < m; i++)
            t_same("accumulate", k->name, d + i * ldc, c + i * ldc, n * 4);
    }
    t_arena_reset();
}

START_TEST(gemm)
{
    static const size_t heights[] = {0, 1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 16, 25, 31, 33, 63}, widths[] = {1, 7, 8, 9, 15, 16, 17, 31, 32};
    static const size_t depths[] = {0, 1, 2, 3, 31, 64, 130};
    t_rng rng = t_seed(6);
    FOR_LEVELS(k)
    for (size_t i = 0; i < COUNT(heights); i++)
        for (size_t j = 0; j < COUNT(widths); j++)
            for (size_t l = 0; l < COUNT(depths); l++) {
                check_gemm(k, false, &rng, heights[i], widths[j], depths[l]);
                if (k->gemm_bf16 && depths[l] % 2 == 0)
                    check_gemm(k, true, &rng, heights[i], widths[j], depths[l]);
            }
    /* Long inner dimensions: libraries cut these differently for few rows than for many. */
    FOR_LEVELS(k)
    for (size_t i = 0; i < COUNT(heights) && k->gemm_bf16; i++)
        check_gemm(k, true, &rng, heights[i], ENG_NR, i % 2 ? 4864 : 8930);
}
END_TEST

/* ---- prefill in 8-bit integers ------------------------------------------------------------------------------------ */

/* Rows of blocks, `stride` apart; both ends of the codes' range in the last row. */
static eng_q8_block *blocks_new(const eng_kernels *k, t_rng *rng, size_t m, size_t depth, size_t stride)
{
    eng_q8_block *a = t_alloc(m ? ((m - 1) * stride + depth / 32) * sizeof *a : 0), *want = t_alloc(depth / 32 * sizeof *a);
    float *x = t_floats(depth), *d = t_floats(depth / 32), *s = t_floats(depth / 32); /* s: of decode only */
    int8_t *q = t_alloc(depth);
    for (size_t i = 0; i < m; i++) {
        for (size_t j = 0; j < depth; j++)
            x[j] = i + 1 == m && m > 1 ? (j / 32 % 2 ? 3.0f : -3.0f) : i % 2 ? t_normal(rng) : adversarial(rng, j / 32);
        k->quantize_blocks(x, a + i * stride, depth);
        t_level(ENG_CPU_SCALAR)->quantize_blocks(x, want, depth);
        t_same("blocks", k->name, a + i * stride, want, depth / 32 * sizeof *a);
        k->quantize_q8(x, &(eng_q8_act){.q = q, .d = d, .s = s}, depth);
        for (size_t b = 0; b < depth / 32; b++) {
            int sum = 0;
            for (size_t j = 0; j < 32; j++)
                sum += q[32 * b + j];
            t_same("codes", k->name, want[b].q, q + 32 * b, 32);
            ck_assert(want[b].d == d[b] && want[b].minus == -128 * sum);
        }
    }
    return a;
}

/* How far weights rounded to 8 bits, and their parts' factors to 1/256 of a code, may move a row's product: a code is off by at most (1 + (32 + 1) / 256) / 2. */
static double rounding_of(eng_type t, const char *row, const eng_q8_act *x, size_t n)
{
    double sum = 0;
    for (size_t at = 0; at < n; at += ENG_Q8_SPAN) {
        double largest = 0, size = 0;
        for (size_t i = at; i < n && i < at + ENG_Q8_SPAN; i++) {
            largest = fmax(largest, largest_of(t, row, i));
            size += fabs((double)x->d[i / 32] * x->q[i]);
        }
        sum += size * largest / 127 * (1 + 33 / 256.0) / 2;
    }
    return eng_rounds_q8(t) ? sum : 0;
}

/* Against float64, with the bound of check_gemv_q8 and what rounding weights may add, and against the scalar level, whose bits it must have. */
static void check_gemm_q8(const eng_kernels *k, eng_type t, t_rng *rng, size_t m, size_t n, size_t depth)
{
    const eng_kernels *scalar = t_level(ENG_CPU_SCALAR);
    const size_t row_bytes = t_row_bytes(t, depth) + 2 * (n % 3), ldc = n + 3, lda = depth / 32 + m % 3, cut = depth / 512 * 256;
    char *w = t_weights(rng, t, n, depth, row_bytes), *panel = t_alloc(depth * ENG_NR * 2), *own = t_alloc(depth * ENG_NR * 2);
    eng_q8_block *a = blocks_new(k, rng, m, depth, lda);
    float *c = t_floats(m * ldc), *want = t_floats(m * ldc), alone[ENG_NR];
    int8_t *q = t_alloc(depth);
    float *d = t_floats(depth / 32);
    for (size_t i = 0; i < m * ldc; i++)
        c[i] = want[i] = 77;
    memset(panel, 0xff, depth * ENG_NR * 2);
    k->pack_q8(panel, t, w, row_bytes, n, depth);
    scalar->pack_q8(own, t, w, row_bytes, n, depth);
    k->gemm_q8(c, ldc, a, lda, panel, t, m, n, depth, false);
    scalar->gemm_q8(want, ldc, a, lda, own, t, m, n, depth, false);
    t_same(eng_types[t].name, k->name, c, want, m * ldc * sizeof(float));
    for (size_t i = 0; i < m; i++) {
        for (size_t b = 0; b < depth / 32; b++) {
            memcpy(q + 32 * b, a[i * lda + b].q, 32);
            d[b] = a[i * lda + b].d;
        }
        for (size_t j = 0; j < n; j++) {
            const eng_q8_act x = {.q = q, .d = d};
            double size, sum = dot_q8(t, w + j * row_bytes, &x, depth, &size), rounding = rounding_of(t, w + j * row_bytes, &x, depth);
            t_near("gemm_q8", k->name, c[i * ldc + j], sum, ((double)depth / 8 + 12) * EPS * size + rounding + FLT_MIN);
        }
        k->gemm_q8(alone, ENG_NR, a + i * lda, lda, panel, t, 1, n, depth, false);
        t_same("a row alone", k->name, alone, c + i * ldc, n * 4);
        k->gemm_q8(alone, ENG_NR, a + i * lda, lda, panel, t, 1, 1, depth, false);
        t_same("an output alone", k->name, alone, c + i * ldc, 4);
    }
    if (cut) { /* two parts of k, added up, are the whole */
        k->pack_q8(panel, t, w, row_bytes, n, cut);
        k->gemm_q8(want, ldc, a, lda, panel, t, m, n, cut, false);
        k->pack_q8(panel, t, w + t_row_bytes(t, cut), row_bytes, n, depth - cut);
        k->gemm_q8(want, ldc, a + cut / 32, lda, panel, t, m, n, depth - cut, true);
        t_same("accumulate", k->name, want, c, m * ldc * sizeof(float));
    }
    t_arena_reset();
}

START_TEST(gemm_q8)
{
    static const size_t heights[] = {0, 1, 2, 3, 4, 5, 6, 7, 13, 23}, widths[] = {1, 9, 16, 17, 31, 32};
    t_rng rng = t_seed(7);
    FOR_LEVELS(k)
    for (eng_type t = 0; t < ENG_TYPE_COUNT; t++) {
        const size_t *lengths, count = lengths_of(t, &lengths);
        ck_assert(!k->prefill_q8[t] || eng_types[t].block > 1);
        for (size_t i = 0; eng_types[t].block > 1 && i < COUNT(heights); i++)
            for (size_t j = 0; j < COUNT(widths); j++)
                check_gemm_q8(k, t, &rng, heights[i], widths[j], lengths[(i + j) % count]);
    }
}
END_TEST

/* ---- prefill in 16-bit integers ----------------------------------------------------------------------------------- */

/* Rows of blocks, `stride` apart; the last row has the largest integers. odd: and what is infinite or NaN. */
static eng_i16_block *blocks16_new(const eng_kernels *k, t_rng *rng, size_t m, size_t depth, size_t stride, bool odd)
{
    eng_i16_block *a = t_alloc(m ? ((m - 1) * stride + depth / 32) * sizeof *a : 0), *want = t_alloc(depth / 32 * sizeof *a);
    float *x = t_floats(depth);
    for (size_t i = 0; i < m; i++) {
        for (size_t j = 0; j < depth; j++)
            x[j] = i + 1 == m && m > 1 ? (j / 32 % 2 ? 3.0f : -3.0f) : i % 2 ? t_normal(rng) : adversarial(rng, j / 32);
        for (size_t j = i % 5; odd && j < depth; j += 1 + t_u64(rng) % 64)
            x[j] = j % 3 == 0 ? NAN : j % 3 == 1 ? INFINITY : -FLT_MAX;
        k->quantize_i16(x, a + i * stride, depth);
        t_level(ENG_CPU_SCALAR)->quantize_i16(x, want, depth);
        t_same("blocks", k->name, a + i * stride, want, depth / 32 * sizeof *a);
        for (size_t j = 0; !odd && j < depth; j++) {
            const eng_i16_block *b = &want[j / 32];
            ck_assert(abs(b->q[j % 32]) <= ENG_I16_MAX);
            t_near("quantize_i16", k->name, (double)b->d * b->q[j % 32], x[j], b->d * (0.5 + 1e-3) + 1e-30);
        }
    }
    return a;
}

/* Against float64, when every weight w is off by at most half a unit of its span. */
static void check_i16_output(const char *level, const float *w, const eng_i16_block *a, size_t depth, float got)
{
    double sum = 0, size = 0, rounding = 0;
    for (size_t at = 0; at < depth; at += ENG_I16_SPAN) {
        double largest = 0, inputs = 0;
        for (size_t i = at; i < depth && i < at + ENG_I16_SPAN; i++) {
            double x = (double)a[i / 32].d * a[i / 32].q[i % 32];
            sum += w[i] * x;
            size += fabs(w[i] * x);
            inputs += fabs(x);
            largest = fmax(largest, fabs((double)w[i]));
        }
        rounding += inputs * largest / ENG_I16_MAX * (0.5 + 1e-3);
    }
    t_near("gemm_i16", level, got, sum, ((double)depth / 32 + 12) * EPS * (size + rounding) + rounding + FLT_MIN);
}

/* Whose bits a level's must be: the scalar's, but that any NaN is as good as another. */
static void check_same_i16(const eng_kernels *k, eng_type t, const float *got, const float *want, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!isnan(got[i]) || !isnan(want[i]))
            t_same(eng_types[t].name, k->name, &got[i], &want[i], sizeof *got);
}

static void check_gemm_i16(const eng_kernels *k, eng_type t, t_rng *rng, size_t m, size_t n, size_t depth, bool odd)
{
    const eng_kernels *scalar = t_level(ENG_CPU_SCALAR);
    const size_t row_bytes = t_row_bytes(t, depth) + 4 * (n % 3), ldc = n + 3, lda = depth / 32 + m % 3, cut = depth / 512 * 256;
    const size_t panel_bytes = depth * ENG_NR * 2 + (depth + ENG_I16_SPAN - 1) / ENG_I16_SPAN * ENG_NR * sizeof(float);
    char *w = t_weights(rng, t, n, depth, row_bytes), *panel = t_alloc(panel_bytes), *own = t_alloc(panel_bytes);
    for (size_t i = 0; odd && t == ENG_F32 && i < n * depth; i += 1 + t_u64(rng) % 512)
        memcpy(w + i / depth * row_bytes + i % depth * 4, &(float){i % 3 == 0 ? NAN : i % 3 == 1 ? INFINITY : -FLT_MAX}, 4);
    eng_i16_block *a = blocks16_new(k, rng, m, depth, lda, odd);
    float *c = t_floats(m * ldc), *want = t_floats(m * ldc), alone[ENG_NR];
    for (size_t i = 0; i < m * ldc; i++)
        c[i] = want[i] = 77;
    memset(panel, 0xff, panel_bytes);
    k->pack_i16(panel, t, w, row_bytes, n, depth);
    scalar->pack_i16(own, t, w, row_bytes, n, depth);
    k->gemm_i16(c, ldc, a, lda, panel, m, n, depth, false);
    scalar->gemm_i16(want, ldc, a, lda, own, m, n, depth, false);
    check_same_i16(k, t, c, want, m * ldc);
    float *weights = t_floats(depth);
    for (size_t j = 0; j < n && !odd; j++) {
        eng_dequantize(t, w + j * row_bytes, weights, depth);
        for (size_t i = 0; i < m; i++)
            check_i16_output(k->name, weights, a + i * lda, depth, c[i * ldc + j]);
    }
    for (size_t i = 0; i < m && !odd; i++) {
        k->gemm_i16(alone, ENG_NR, a + i * lda, lda, panel, 1, n, depth, false);
        t_same("a row alone", k->name, alone, c + i * ldc, n * 4);
        k->gemm_i16(alone, ENG_NR, a + i * lda, lda, panel, 1, 1, depth, false);
        t_same("an output alone", k->name, alone, c + i * ldc, 4);
    }
    if (cut && !odd) { /* two parts of k, added up, are the whole */
        k->pack_i16(panel, t, w, row_bytes, n, cut);
        k->gemm_i16(want, ldc, a, lda, panel, m, n, cut, false);
        k->pack_i16(panel, t, w + t_row_bytes(t, cut), row_bytes, n, depth - cut);
        k->gemm_i16(want, ldc, a + cut / 32, lda, panel, m, n, depth - cut, true);
        t_same("accumulate", k->name, want, c, m * ldc * sizeof(float));
    }
    t_arena_reset();
}

START_TEST(gemm_i16)
{
    static const size_t heights[] = {0, 1, 2, 3, 4, 5, 6, 7, 13, 23}, widths[] = {1, 9, 16, 17, 31, 32};
    t_rng rng = t_seed(8);
    FOR_LEVELS(k)
    for (eng_type t = 0; t < ENG_TYPE_COUNT; t++) {
        const size_t *lengths = eng_types[t].block == 256 ? super_lengths : block_lengths;
        const size_t count = eng_types[t].block == 256 ? COUNT(super_lengths) : COUNT(block_lengths);
        for (size_t i = 0; i < COUNT(heights); i++)
            for (size_t j = 0; j < COUNT(widths); j++) /* k > 0 */
                check_gemm_i16(k, t, &rng, heights[i], widths[j], lengths[1 + (i + j) % (count - 1)], false);
        check_gemm_i16(k, t, &rng, 13, ENG_NR, 768, true);
    }
}
END_TEST

int main(void)
{
    t_skip_lines();
    Suite *s = suite_create("kernels");
    TCase *t = tcase_create("products");
    tcase_set_timeout(t, 0);
    tcase_add_test(t, levels);
    tcase_add_test(t, quantize);
    tcase_add_test(t, gemv_q8);
    tcase_add_test(t, gemv_f32);
    tcase_add_test(t, pack);
    tcase_add_test(t, to_bf16);
    tcase_add_test(t, gemm);
    tcase_add_test(t, gemm_q8);
    tcase_add_test(t, gemm_i16);
    suite_add_tcase(s, t);
    return t_run(s);
}
