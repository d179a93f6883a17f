/* y = W x over the pool: against float64, with every level, thread count and weight type; and the rule the prefix cache stands on: a
 * token's output has the same bits alone as among others, whatever the number of threads.
 */
#include "kernel_support.h"
#include "linear.h"

#include <errno.h>

#define COUNT(a) (sizeof(a) / sizeof *(a))
enum { MAX_TOKENS = 130, MAX_COLS = 576, LONGEST = 2048 }; /* LONGEST: rows of a model that is multiplied in 8 bits in prefill */

static eng_weight weight_new(t_rng *rng, eng_type t, uint32_t rows, uint32_t cols)
{
    size_t row_bytes = t_row_bytes(t, cols);
    char *data = t_weights(rng, t, rows, cols, row_bytes);
    if (eng_types[t].block > 1) /* scales of weights as they are, small: errors are then those of the activations */
        for (size_t i = 0; i < rows * (size_t)cols / eng_types[t].block; i++) {
            char *block = data + i * eng_types[t].bytes;
            float inner = eng_types[t].block == 256 ? 1.0f / 32 : 1; /* scales inside are up to 63 or 128 */
            uint16_t d = eng_f32_to_f16(t_normal(rng) * 0.01f * inner), m = eng_f32_to_f16(t_normal(rng) * 0.1f * inner);
            memcpy(block + t_scale_at(t), &d, 2);
            if (t_min_at(t) >= 0)
                memcpy(block + t_min_at(t), &m, 2);
        }
    else if (t == ENG_F16)
        for (size_t i = 0; i < rows * (size_t)cols; i++) {
            uint16_t h = eng_f32_to_f16(t_normal(rng));
            memcpy(data + 2 * i, &h, 2);
        }
    return (eng_weight){.data = data, .row_bytes = row_bytes, .rows = rows, .cols = cols, .type = t};
}

/* What a product is computed in, if not in floats; the largest integers. */
enum integers { NONE = 0, Q8 = 127, I16 = ENG_I16_MAX };

/* Checks y = W x when every x is off by at most `rel` of itself plus half a unit of its 32, in I16 every w by half a unit of its row. */
static void check_output(const char *what, const char *level, const eng_weight *w, const float *x, const float *y, double rel, enum integers in)
{
    float *row = t_floats(w->cols);
    for (uint32_t r = 0; r < w->rows; r++) {
        double want = 0, bound = 0, wmax = 0;
        eng_dequantize(w->type, (const char *)w->data + r * w->row_bytes, row, w->cols);
        for (uint32_t i = 0; i < w->cols && in == I16; i++)
            wmax = fmax(wmax, fabs((double)row[i]));
        for (uint32_t b = 0; b < w->cols; b += 32) {
            double amax = 0;
            for (uint32_t i = b; i < w->cols && i < b + 32; i++)
                amax = fmax(amax, fabs((double)x[i]));
            for (uint32_t i = b; i < w->cols && i < b + 32; i++) {
                want += (double)row[i] * x[i];
                bound += fabs((double)row[i]) * (fabs((double)x[i]) * rel + (in ? amax / in * 0.51 : 0)) + fabs((double)x[i]) * wmax / ENG_I16_MAX * 0.51;
                /* With a minimum d q and m are added as two sums whose terms may be larger than the weight itself */
                bound += 1e-5 * amax;
            }
        }
        t_near(what, level, y[r], want, bound + 1e-6);
    }
}

typedef struct {
    eng_pool *pool;
    const eng_kernels *k;
    eng_linear *l;
    bool f32;
} rig;

static rig rig_new(const eng_kernels *k, uint32_t threads, bool f32)
{
    rig g = {.k = k, .f32 = f32};
    ck_assert_int_eq(eng_pool_new(threads, &g.pool), 0);
    ck_assert_int_eq(eng_linear_new(g.pool, k, LONGEST, MAX_TOKENS, f32, &g.l), 0);
    ck_assert_uint_gt(eng_linear_bytes(g.l), 0);
    return g;
}

static void rig_free(rig *g)
{
    eng_linear_free(g->l);
    eng_pool_free(g->pool);
}

/* n weights of the same width, and their outputs. */
typedef struct {
    eng_weight w[3];
    const eng_weight *p[3];
    float *y[3], *y1[3];
    uint32_t n, cols;
} group;

static group group_new(t_rng *rng, const eng_type *types, const uint32_t *rows, uint32_t n, uint32_t cols, uint32_t tokens)
{
    group g = {.n = n, .cols = cols};
    for (uint32_t i = 0; i < n; i++) {
        g.w[i] = weight_new(rng, types[i], rows[i], cols);
        g.y[i] = t_floats((size_t)tokens * rows[i]);
        g.y1[i] = t_floats((size_t)tokens * rows[i]);
    }
    return g;
}

static const eng_weight *const *weights(group *g)
{
    for (uint32_t i = 0; i < g->n; i++)
        g->p[i] = &g->w[i];
    return g->p;
}

static void check_decode(const rig *a, const rig *b, t_rng *rng, eng_type t, uint32_t cols)
{
    const eng_type types[3] = {t, ENG_F32, t};
    static const uint32_t rows[3] = {577, 33, 1};
    for (uint32_t n = 1; n <= 3; n++) {
        group g = group_new(rng, types, rows, n, cols, 1);
        float *x = t_randoms(rng, cols);
        eng_linear_decode(a->l, weights(&g), g.y, n, x);
        eng_linear_decode(b->l, weights(&g), g.y1, n, x);
        for (uint32_t i = 0; i < n; i++) {
            check_output("decode", a->k->name, &g.w[i], x, g.y[i], 1e-4, !a->f32 && eng_types[g.w[i].type].block > 1 ? Q8 : NONE);
            t_same("decode with other threads", a->k->name, g.y[i], g.y1[i], rows[i] * sizeof(float));
        }
        t_arena_reset();
    }
}

static void check_prefill(const rig *a, const rig *b, t_rng *rng, eng_type t, uint32_t cols, uint32_t tokens)
{
    const eng_type types[3] = {t, t, ENG_F16};
    static const uint32_t rows[3] = {97, 32, 5};
    uint32_t n = 1 + tokens % 3;
    group g = group_new(rng, types, rows, n, cols, tokens);
    float *x = t_randoms(rng, (size_t)tokens * cols), *alone[3];
    eng_linear_prefill(a->l, weights(&g), g.y, n, x, tokens);
    eng_linear_prefill(b->l, weights(&g), g.y1, n, x, tokens);
    bool q8 = !a->f32 && a->k->prefill_q8[t] && n < 3; /* F16 has no product in integers, and all three read one input */
    enum integers in = q8 ? Q8 : a->k->prefill_i16 && !a->f32 && cols % 32 == 0 ? I16 : NONE;
    double rel = a->k->gemm_bf16 && !a->f32 && !in ? 0x1p-7 : in == I16 ? 1e-6 : 1e-4;
    for (uint32_t i = 0; i < n; i++) {
        t_same("prefill with other threads", a->k->name, g.y[i], g.y1[i], (size_t)tokens * rows[i] * sizeof(float));
        check_output("prefill, first", a->k->name, &g.w[i], x, g.y[i], rel, in);
        check_output("prefill, last", a->k->name, &g.w[i], x + (size_t)(tokens - 1) * cols, g.y[i] + (size_t)(tokens - 1) * rows[i],
                     rel, in);
        alone[i] = t_floats(rows[i]);
    }
    for (uint32_t at = 0; at < tokens; at += 1 + tokens / 8) {
        eng_linear_prefill(a->l, weights(&g), alone, n, x + (size_t)at * cols, 1);
        for (uint32_t i = 0; i < n; i++)
            t_same("a token alone", a->k->name, alone[i], g.y[i] + (size_t)at * rows[i], rows[i] * sizeof(float));
    }
    t_arena_reset();
}

/* The products that end otherwise, against the plain ones and the kernels they use: y += W x, and the gated input of the next product. A token's
 * bits are the same alone, and with other threads. */
static void check_endings(const rig *a, const rig *b, t_rng *rng, eng_type t, uint32_t ff, uint32_t tokens)
{
    const uint32_t rows[3] = {ff, ff, 70}, cols = 64;
    group g = group_new(rng, (const eng_type[3]){t, t, ENG_F16}, rows, 2, eng_types[t].block == 256 ? 256 : cols, tokens);
    eng_weight down = weight_new(rng, ff % 32 == 0 && tokens % 2 ? ENG_Q5_0 : ENG_F16, rows[2], ff);
    size_t n = (size_t)tokens * ff, n_y = (size_t)tokens * rows[2];
    float *x = t_randoms(rng, (size_t)tokens * g.cols), *gated = t_floats(n), *y = t_floats(n_y), *begin = t_randoms(rng, n_y);
    float *sum = t_floats(n_y), *again = t_floats(n_y), alone[70];
    const eng_kernels *k = a->k;
    const eng_weight *const p_down = &down;

    eng_linear_prefill(a->l, weights(&g), g.y, 2, x, tokens);
    k->silu_mul(gated, g.y[0], g.y[1], n);
    eng_linear_prefill(a->l, &p_down, &y, 1, gated, tokens);
    eng_linear_prefill_gated(a->l, &g.w[0], &g.w[1], &down, k->silu_mul, x, tokens);
    memcpy(sum, begin, n_y * sizeof(float));
    eng_linear_prefill_add(a->l, &down, sum, NULL, tokens);
    for (size_t i = 0; i < n_y; i++)
        y[i] += begin[i];
    t_same("gated, added", k->name, sum, y, n_y * sizeof(float));

    memcpy(again, begin, n_y * sizeof(float));
    eng_linear_prefill_gated(b->l, &g.w[0], &g.w[1], &down, k->silu_mul, x, tokens);
    eng_linear_prefill_add(b->l, &down, again, NULL, tokens);
    t_same("gated, added, with other threads", k->name, again, sum, n_y * sizeof(float));
    for (uint32_t at = 0; at < tokens; at += 1 + tokens / 4) {
        memcpy(alone, begin + (size_t)at * rows[2], sizeof alone);
        eng_linear_input(a->l, weights(&g), 2, 0, x + (size_t)at * g.cols);
        eng_linear_prefill_gated(a->l, &g.w[0], &g.w[1], &down, k->silu_mul, NULL, 1);
        eng_linear_prefill_add(a->l, &down, alone, NULL, 1);
        t_same("gated, added, alone", k->name, alone, sum + (size_t)at * rows[2], sizeof alone);
    }
    t_arena_reset();
}

static void check_all(bool f32)
{
    static const uint32_t tokens[] = {1, 2, 5, 12, 13, 47, 97, MAX_TOKENS};
    t_rng rng = t_seed(f32);
    FOR_LEVELS(k)
    {
        rig a = rig_new(k, 1, f32), b = rig_new(k, 3, f32);
        for (eng_type t = 0; t < ENG_TYPE_COUNT; t++) {
            bool super = eng_types[t].block == 256;
            check_decode(&a, &b, &rng, t, super ? 512 : MAX_COLS);
            check_decode(&a, &b, &rng, t, super ? 256 : 32);
            for (size_t i = 0; i < COUNT(tokens); i++)
                check_prefill(&a, &b, &rng, t, super ? 256 : i % 2 ? MAX_COLS : 96, tokens[i]);
            if (t <= ENG_BF16) { /* any length; an odd one has no bf16 pairs */
                check_decode(&a, &b, &rng, t, 37);
                check_prefill(&a, &b, &rng, t, 37, 14);
                check_prefill(&a, &b, &rng, t, 38, 14);
                check_prefill(&a, &b, &rng, t, 1, 3);
            }
        }
        /* widths that end inside a panel, in whole slices, in a short one */
        static const uint32_t widths[] = {33, 38, 256, 320, 352, MAX_COLS};
        for (size_t i = 0; i < COUNT(widths); i++) {
            check_endings(&a, &b, &rng, ENG_Q4_1, widths[i], tokens[i + 1]);
            check_endings(&a, &b, &rng, ENG_Q6_K, widths[i], tokens[7 - i]);
        }
        eng_linear_prefill(a.l, NULL, NULL, 0, NULL, 0);
        rig_free(&a);
        rig_free(&b);
    }
}

START_TEST(quantised_activations)
{
    check_all(false);
}
END_TEST

START_TEST(float_activations)
{
    check_all(true);
}
END_TEST

START_TEST(sizes)
{
    eng_pool *pool;
    eng_linear *l = NULL;
    ck_assert_int_eq(eng_pool_new(1, &pool), 0);
    const eng_kernels *k = t_level(ENG_CPU_SCALAR);
    ck_assert_int_eq(eng_linear_new(pool, k, 0, 1, false, &l), -EINVAL);
    ck_assert_int_eq(eng_linear_new(pool, k, 1, 0, false, &l), -EINVAL);
    ck_assert_int_eq(eng_linear_new(pool, k, UINT32_MAX, UINT32_MAX, false, &l), -EINVAL);
    ck_assert_ptr_null(l);
    eng_linear_free(NULL);
    eng_pool_free(pool);
}
END_TEST

int main(void)
{
    t_skip_lines();
    Suite *s = suite_create("linear");
    TCase *t = tcase_create("linear");
    tcase_set_timeout(t, 0);
    tcase_add_test(t, quantised_activations);
    tcase_add_test(t, float_activations);
    tcase_add_test(t, sizes);
    suite_add_tcase(s, t);
    return t_run(s);
}
