/* cuda/matvec.cu, dequantize.cu and matmul.cu: every type of weight against float64 sums over what engine/quant.c makes of it (which test_quant compares with
 * another library), and the activations' codes bit for bit with the scalar twin's. Bounds: a sum of n rounded terms is off by at most about n EPS times
 * the sum of the terms' magnitudes, in any order of summation.
 */
#include "gpu_support.h"

#ifdef T_EMULATED
#include "emu.h"
#endif

#define COUNT(a) (sizeof(a) / sizeof *(a))

enum { MAX_COLS = 4864, MAX_TOKENS = 520 };

static eng_kernels scalar;

/* ---- decode -------------------------------------------------------------------------------------------------------------- */

static float adversarial(t_rng *rng, size_t block)
{
    float v = t_normal(rng);
    switch (block % 8) {
    case 1:
        return 0;
    case 2:
        return v * 1e-40f;
    case 3:
        return v * 1e20f;
    case 4:
        return v > 0 ? 1 : -1;
    case 5: /* above and below the smallest block that counts */
        return v * 1e-30f;
    case 7:
        return v * 3e-31f;
    case 6:                /* ties between two codes: the largest is 127 */
        return t_u64(rng) % 4 ? (float)(t_u64(rng) % 127) + 0.5f : 127;
    default:
        return v;
    }
}

/* Rows of Q8_0 with a single code of 1 and a scale of 1 give the codes times their scales; rows of Q4_1 with a minimum of 1 alone, the scaled sums. */
START_TEST(codes)
{
    enum { N = 288 };
    static const float special[] = {NAN, INFINITY, -INFINITY, FLT_MAX, -FLT_MAX};
    t_rng rng = t_seed(1);
    size_t q8_bytes = t_row_bytes(ENG_Q8_0, N), q4_bytes = t_row_bytes(ENG_Q4_1, N);
    char *q8 = t_alloc(N * q8_bytes), *q4 = t_alloc(N / 32 * q4_bytes);
    memset(q8, 0, N * q8_bytes);
    memset(q4, 0, N / 32 * q4_bytes);
    for (size_t i = 0; i < N; i++) {
        eng_q8_0 *b = (eng_q8_0 *)(void *)(q8 + i * q8_bytes) + i / 32;
        b->d = eng_f32_to_f16(1);
        b->q[i % 32] = 1;
        ((eng_q4_1 *)(void *)(q4 + i / 32 * q4_bytes))[i / 32].m = eng_f32_to_f16(1);
    }
    gpu_weight w8 = {t_in(q8, N * q8_bytes), q8_bytes, N, N, GPU_Q8_0}, w4 = {t_in(q4, N / 32 * q4_bytes), q4_bytes, N / 32, N, GPU_Q4_1};
    for (int round = 0; round < 8; round++) {
        float *x = t_floats(N), *want = t_floats(N), *y[2] = {t_out(NULL, N * sizeof(float)), t_out(NULL, N / 32 * sizeof(float))};
        eng_q8_act act = {t_alloc(N), t_floats(N / 32), t_floats(N / 32)};
        for (size_t i = 0; i < N; i++)
            x[i] = adversarial(&rng, i / 32);
        for (size_t i = 0; i < 32; i++) /* one that is no number; nothing but such */
            if (round == 2 || (round == 1 && i == 5))
                x[i] = NAN;
        scalar.quantize_q8(x, &act, N);
        t_ok(gpu_matvec(t_gpu, (const gpu_weight *[]){&w8, &w4}, y, 2, t_in(x, N * sizeof(float)), false));
        for (size_t i = 0; i < N; i++)
            want[i] = act.d[i / 32] * act.q[i];
        t_same_floats("codes", t_got(y[0], N * sizeof(float)), want, N);
        t_same_floats("sums", t_got(y[1], N / 32 * sizeof(float)), act.s, N / 32);
    }
    for (size_t k = 0; k < COUNT(special); k++) { /* one block alone, so that nothing else meets its infinity */
        float x[32], y_want = 0, *y = t_out(NULL, sizeof *y);
        for (int i = 0; i < 32; i++)
            x[i] = t_normal(&rng);
        x[k] = special[k];
        eng_q8_0 b = {.d = eng_f32_to_f16(0.5f)};
        for (int i = 0; i < 32; i++)
            b.q[i] = (int8_t)(i - 16);
        eng_q8_act act = {t_alloc(32), t_floats(1), t_floats(1)};
        scalar.quantize_q8(x, &act, 32);
        scalar.gemv_q8[ENG_Q8_0](&y_want, &b, sizeof b, 1, &act, 32);
        gpu_weight w = {t_in(&b, sizeof b), sizeof b, 1, 32, GPU_Q8_0};
        t_ok(gpu_matvec(t_gpu, (const gpu_weight *[]){&w}, &y, 1, t_in(x, sizeof x), false));
        t_same_floats("a block", t_got(y, sizeof *y), &y_want, 1);
    }
    t_device_reset();
}
END_TEST

/* A row's product in float64, and the sum of its terms' magnitudes, where codes and minima are apart. x: the codes of types with blocks, else the numbers. */
static double row_dot(eng_type t, const char *row, const eng_q8_act *act, const float *x, size_t n, double *ret_size)
{
    double sum = 0, size = 0;
    for (size_t i = 0; eng_types[t].block == 1 && i < n; i++) {
        float w;
        eng_dequantize(t, row + i * eng_types[t].bytes, &w, 1);
        sum += (double)w * x[i];
        size += fabs((double)w * x[i]);
    }
    for (size_t at = 0; eng_types[t].block > 1 && at < n; at += eng_types[t].block) {
        eng_codes c;
        eng_unpack(t, row + at / eng_types[t].block * eng_types[t].bytes, &c);
        for (size_t i = 0; i < eng_types[t].block; i++) {
            double v = (double)act->d[(at + i) / 32] * act->q[at + i], product = v * c.d[i / 16] * c.q[i], least = eng_type_has_min(t) ? v * c.m[i / 16] : 0;
            sum += product + least;
            size += fabs(product) + fabs(least);
        }
    }
    *ret_size = size;
    return sum;
}

/* One weight of a product: its bytes here and there, and what is there before. */
typedef struct {
    eng_type type;
    uint32_t rows;
    size_t row_bytes;
    char *data;
    gpu_weight device;
    float *y, *before;
} operand;

static operand operand_new(t_rng *rng, eng_type type, uint32_t rows, uint32_t cols)
{
    operand o = {.type = type, .rows = rows, .row_bytes = t_row_bytes(type, cols)};
    o.data = t_weights(rng, type, rows, cols, o.row_bytes);
    o.device = (gpu_weight){t_in(o.data, rows * o.row_bytes), o.row_bytes, rows, cols, (gpu_type)type};
    o.before = t_randoms(rng, rows);
    o.y = t_out(o.before, rows * sizeof(float));
    return o;
}

static void check_operand(const operand *o, const eng_q8_act *act, const float *x, uint32_t cols, bool add)
{
    const float *got = t_got(o->y, o->rows * sizeof(float));
    for (uint32_t r = 0; r < o->rows; r++) {
        double size, want = row_dot(o->type, o->data + r * o->row_bytes, act, x, cols, &size);
        if (add) {
            want += o->before[r];
            size += fabs((double)o->before[r]);
        }
        if (size > (double)FLT_MAX) /* the sum may overflow, or be infinity less infinity */
            continue;
        if (!isfinite(size))
            ck_assert_msg(!isfinite(got[r]), "%s: %g of a row that is no number", eng_types[o->type].name, (double)got[r]);
        else
            t_near(eng_types[o->type].name, "gpu", got[r], want, ((double)cols / 8 + 16) * EPS * size + (cols / 16 + 1) * (double)FLT_MIN);
    }
}

static void check_matvec(t_rng *rng, const eng_type *types, const uint32_t *rows, uint32_t n, uint32_t cols, bool add, bool hard)
{
    operand o[3];
    const gpu_weight *w[3];
    float *y[3], *x = t_floats(cols);
    eng_q8_act act = {t_alloc(cols), t_floats(cols / 32), t_floats(cols / 32)};
    for (uint32_t i = 0; i < cols; i++)
        x[i] = hard ? adversarial(rng, i / 32 + t_u64(rng) % 2 * 8) : t_normal(rng);
    scalar.quantize_q8(x, &act, cols / 32 * 32);
    for (uint32_t i = 0; i < n; i++) {
        o[i] = operand_new(rng, types[i], rows[i], cols);
        w[i] = &o[i].device;
        y[i] = o[i].y;
    }
    t_ok(gpu_matvec(t_gpu, w, y, n, t_in(x, cols * sizeof(float)), add));
    for (uint32_t i = 0; i < n; i++)
        check_operand(&o[i], &act, x, cols, add);
    t_device_reset();
}

static uint32_t whole_blocks(uint32_t cols, eng_type t)
{
    uint32_t block = eng_types[t].block;
    return (cols + block - 1) / block * block;
}

START_TEST(matvec)
{
    static const uint32_t all_cols[] = {1, 32, 96, 256, 576, 900, MAX_COLS}, row_counts[] = {0, 1, 2, 3, 7, 128};
    t_rng rng = t_seed(2);
    for (eng_type t = 0; t < ENG_TYPE_COUNT; t++)
        for (size_t c = 0; c < COUNT(all_cols); c++)
            for (size_t r = 0; r < COUNT(row_counts); r++)
                check_matvec(&rng, &t, &row_counts[r], 1, whole_blocks(all_cols[c], t), (r + c) % 2, r % 2);
}
END_TEST

/* The more rows, the fewer warps a row has: on the emulated device of 8 multiprocessors, and on one of 132. */
START_TEST(matvec_many_rows)
{
    static const uint32_t row_counts[] = {200, 300, 520, 3000, 20001};
    t_rng rng = t_seed(3);
    for (eng_type t = 0; t < ENG_TYPE_COUNT; t++)
        for (size_t r = 0; r < (t == ENG_Q8_0 ? COUNT(row_counts) : 3); r++)
            check_matvec(&rng, &t, &row_counts[r], 1, whole_blocks(r < 3 ? 4128 : 1056, t), false, false);
}
END_TEST

/* Query, key and value of one input: types and rows differ. */
START_TEST(matvec_of_three)
{
    t_rng rng = t_seed(4);
    for (int round = 0; round < 60; round++) {
        eng_type types[3];
        uint32_t rows[3];
        for (int i = 0; i < 3; i++) {
            types[i] = (eng_type)(t_u64(&rng) % ENG_TYPE_COUNT);
            rows[i] = t_u64(&rng) % 4 ? (uint32_t)(t_u64(&rng) % 40) : 0;
        }
        if (round < 2)
            rows[0] = rows[1] = rows[2] = round;
        check_matvec(&rng, types, rows, 1 + round % 3, 256 * (1 + round % 5), round % 2, round / 2 % 2);
    }
    t_ok(gpu_matvec(t_gpu, NULL, NULL, 0, NULL, false));
}
END_TEST

/* Scales that are infinite or no number make their own rows so, and no other's. */
START_TEST(matvec_not_finite)
{
    static const uint16_t odd[] = {0x7c00, 0xfc00, 0x7e01, 0xfe00};
    enum { ROWS = 5, COLS = 512 };
    t_rng rng = t_seed(5);
    for (eng_type t = 0; t < ENG_TYPE_COUNT; t++)
        for (size_t k = 0; k < COUNT(odd) && eng_types[t].block > 1; k++)
            for (int where = 0; where <= (t_min_at(t) >= 0); where++) {
                float *x = t_randoms(&rng, COLS);
                eng_q8_act act = {t_alloc(COLS), t_floats(COLS / 32), t_floats(COLS / 32)};
                scalar.quantize_q8(x, &act, COLS);
                operand o = operand_new(&rng, t, ROWS, COLS);
                char *block = o.data + 2 * o.row_bytes + (COLS / eng_types[t].block - 1) * eng_types[t].bytes;
                memcpy(block + (where ? t_min_at(t) : t_scale_at(t)), &odd[k], 2);
                t_ok(gpu_upload(t_gpu, (void *)(uintptr_t)o.device.data, o.data, ROWS * o.row_bytes));
                t_ok(gpu_matvec(t_gpu, (const gpu_weight *[]){&o.device}, &o.y, 1, t_in(x, COLS * sizeof *x), false));
                check_operand(&o, &act, x, COLS, false);
                ck_assert(!isfinite(((float *)t_got(o.y, ROWS * sizeof(float)))[2]));
                t_device_reset();
            }
}
END_TEST

/* ---- prefill ---------------------------------------------------------------------------------------------------------------- */

static bool rounds_to_bf16(void)
{
    gpu_info info;
    t_ok(gpu_info_get(t_gpu, &info));
    return info.major >= 8;
}

static float rounded(float v, bool bf16)
{
    return bf16 ? eng_bf16_to_f32(eng_f32_to_bf16(v)) : v;
}

/* y of the first `n` tokens, before: what it is added to, or NULL. */
static float *multiply(const gpu_weight *w, const float *x, uint32_t n, const float *before)
{
    size_t bytes = (size_t)n * w->rows * sizeof(float);
    float *y = t_out(before, bytes);
    t_ok(gpu_matmul(t_gpu, w, y, t_in(x, (size_t)n * w->cols * sizeof(float)), n, before != NULL));
    return t_got(y, bytes);
}

/* Weights of ordinary size, for in t_weights' a few decide everything. */
static char *tame_weights(t_rng *rng, eng_type t, uint32_t rows, uint32_t cols)
{
    char *w = t_weights(rng, t, rows, cols, t_row_bytes(t, cols));
    for (size_t b = 0; eng_types[t].block > 1 && b < (size_t)rows * (cols / eng_types[t].block); b++) {
        uint16_t d = eng_f32_to_f16(0.01f * t_normal(rng)), m = eng_f32_to_f16(0.1f * t_normal(rng));
        memcpy(w + b * eng_types[t].bytes + t_scale_at(t), &d, 2);
        if (t_min_at(t) >= 0)
            memcpy(w + b * eng_types[t].bytes + t_min_at(t), &m, 2);
    }
    return w;
}

static void check_matmul(t_rng *rng, eng_type t, uint32_t rows, uint32_t cols, const uint32_t *counts, size_t n_counts)
{
    const bool bf16 = rounds_to_bf16();
    const uint32_t most = counts[n_counts - 1];
    size_t row_bytes = t_row_bytes(t, cols), all = (size_t)most * rows;
    char *data = t % 2 ? tame_weights(rng, t, rows, cols) : t_weights(rng, t, rows, cols, row_bytes);
    float *wf = t_floats((size_t)rows * cols), *x = t_randoms(rng, (size_t)most * cols), *before = t_randoms(rng, all);
    for (uint32_t r = 0; r < rows; r++)
        eng_dequantize(t, data + r * row_bytes, wf + (size_t)r * cols, cols);
    gpu_weight w = {t_in(data, rows * row_bytes), row_bytes, rows, cols, (gpu_type)t};
    const float *y = multiply(&w, x, most, NULL), *added = multiply(&w, x, most, before);
    for (size_t i = 0; i < all; i += i < 3000 ? 1 : 97) {
        double sum = 0, size = 0;
        for (uint32_t c = 0; c < cols; c++) {
            double v = (double)rounded(wf[i % rows * cols + c], bf16) * rounded(x[i / rows * cols + c], bf16);
            sum += v;
            size += fabs(v);
        }
        double bound = 2 * (cols + 4.0) * EPS * size + FLT_MIN; /* tensor cores may cut where others round */
        t_near(eng_types[t].name, "gpu", y[i], sum, bound);
        t_near("added", "gpu", added[i], sum + before[i], bound + EPS * (fabs((double)before[i]) + size));
    }
    for (size_t k = 0; k + 1 < n_counts; k++) { /* a token's bits do not depend on how many there are, nor on the others */
        float *other = t_floats((size_t)counts[k] * cols);
        memcpy(other, x, (size_t)counts[k] * cols * sizeof(float));
        for (size_t i = cols; i < (size_t)counts[k] * cols; i++)
            other[i] *= -3;
        t_same("fewer tokens", "gpu", multiply(&w, x, counts[k], NULL), y, (size_t)counts[k] * rows * sizeof(float));
        t_same("fewer tokens, added", "gpu", multiply(&w, x, counts[k], before), added, (size_t)counts[k] * rows * sizeof(float));
        if (counts[k])
            t_same("other tokens", "gpu", multiply(&w, other, counts[k], NULL), y, rows * sizeof(float));
    }
    t_device_reset();
}

/* step: of the types. */
static void check_matmuls(uint64_t seed, int step)
{
    static const uint32_t few[] = {0, 1, 2, 65}, many[] = {0, 1, 63, 64, 65, 255, 256, 257, 512, MAX_TOKENS};
    t_rng rng = t_seed(seed);
    for (eng_type t = 0; t < ENG_TYPE_COUNT; t += step) {
        check_matmul(&rng, t, 1, whole_blocks(32, t), few, COUNT(few));
        check_matmul(&rng, t, 37, whole_blocks(576, t), few, COUNT(few));
    }
    check_matmul(&rng, ENG_F32, 5, 1, few, COUNT(few));
    check_matmul(&rng, ENG_F16, 5, 33, few, COUNT(few));
    check_matmul(&rng, ENG_Q4_K, 9, 4864, few, COUNT(few));
    check_matmul(&rng, ENG_Q4_1, 33, 96, many, COUNT(many));
    check_matmul(&rng, ENG_Q6_K, 128, 256, many, COUNT(many));
}

START_TEST(matmul)
{
    check_matmuls(6, 1);
}
END_TEST

/* Weights that do not fit in the scratch are multiplied in parts, with the same result. */
START_TEST(matmul_in_parts)
{
    char err[300];
    gpu_context *whole = t_gpu;
    ck_assert_int_eq(gpu_open(0, &t_gpu, err, sizeof err), 0);
    t_ok(gpu_reserve(t_gpu, MAX_COLS, 3 * MAX_COLS, MAX_TOKENS));
    check_matmuls(7, 5);
    gpu_close(t_gpu);
    t_gpu = whole;
}
END_TEST

#ifdef T_EMULATED
/* A device whose tensor cores have no bf16: everything in float32. The device is another one then, so this is the last test. */
START_TEST(matmul_float32)
{
    gpu_close(t_gpu);
    emu_options o = emu_defaults();
    o.major = 7;
    o.minor = 5;
    emu_reset(&o);
    char err[300];
    ck_assert_int_eq(gpu_open(0, &t_gpu, err, sizeof err), 0);
    t_ok(gpu_reserve(t_gpu, MAX_COLS, 20 * MAX_COLS, MAX_TOKENS));
    ck_assert(!rounds_to_bf16());
    check_matmuls(8, 4);
}
END_TEST
#endif

START_TEST(reserve)
{
    t_ok(gpu_reserve(t_gpu, MAX_COLS, (size_t)1 << 20, MAX_TOKENS));
}
END_TEST

int main(void)
{
    eng_kernels_scalar(&scalar);
    Suite *s = suite_create("products");
    TCase *t = tcase_create("products");
    tcase_add_test(t, reserve);
    tcase_add_test(t, codes);
    tcase_add_test(t, matvec);
    tcase_add_test(t, matvec_many_rows);
    tcase_add_test(t, matvec_of_three);
    tcase_add_test(t, matvec_not_finite);
    tcase_add_test(t, matmul);
    tcase_add_test(t, matmul_in_parts);
#ifdef T_EMULATED
    tcase_add_test(t, matmul_float32);
#endif
    suite_add_tcase(s, t);
    return t_gpu_run(s);
}
