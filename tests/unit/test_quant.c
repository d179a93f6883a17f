#include "quant.h"
#include "support.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint32_t bits(float f)
{
    uint32_t b;
    memcpy(&b, &f, sizeof b);
    return b;
}

/* Bit for bit what the `gguf` package makes of random blocks (tests/golden/make/gen_quant.py). */
START_TEST(test_golden)
{
    int seen = 0;
    for (int t = 0; t < ENG_TYPE_COUNT; t++) {
        char name[64];
        if (eng_types[t].block == 1)
            continue;
        snprintf(name, sizeof name, "golden/quant/%s.blocks.npy", eng_types[t].name);
        t_npy blocks = t_npy_load(t_path(name));
        snprintf(name, sizeof name, "golden/quant/%s.values.npy", eng_types[t].name);
        t_npy values = t_npy_load(t_path(name));
        size_t n = values.dims[1], row_bytes = n / eng_types[t].block * eng_types[t].bytes;
        ck_assert_str_eq(values.descr, "<f4");
        ck_assert_uint_eq(blocks.dims[1], row_bytes);
        float *out = malloc(n * sizeof *out);
        for (size_t r = 0; r < values.dims[0]; r++) {
            const float *want = (const float *)values.data + r * n;
            eng_dequantize((eng_type)t, (const uint8_t *)blocks.data + r * row_bytes, out, n);
            for (size_t i = 0; i < n; i++)
                ck_assert_msg(bits(out[i]) == bits(want[i]), "%s row %zu element %zu: %a, want %a", eng_types[t].name, r, i, out[i],
                              want[i]);
        }
        free(out);
        t_npy_free(&blocks);
        t_npy_free(&values);
        seen++;
    }
    ck_assert_int_eq(seen, 12);
}
END_TEST

START_TEST(test_plain_rows)
{
    const float f[3] = {1.5f, -0.0f, 0x1p-149f};
    const uint16_t h[3] = {0x3e00, 0x8000, 0x0001}, b[3] = {0x3fc0, 0x8000, 0x0001};
    const float want[3][3] = {{1.5f, -0.0f, 0x1p-149f}, {1.5f, -0.0f, 0x1p-24f}, {1.5f, -0.0f, 0x1p-133f}};
    float out[3][3];
    eng_dequantize(ENG_F32, f, out[0], 3);
    eng_dequantize(ENG_F16, h, out[1], 3);
    eng_dequantize(ENG_BF16, b, out[2], 3);
    ck_assert_mem_eq(out, want, sizeof want);
}
END_TEST

/* The value of a half by its definition. */
static double half_value(uint16_t h)
{
    int e = h >> 10 & 31, m = h & 0x3ff;
    double v = e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return h & 0x8000 ? -v : v;
}

START_TEST(test_f16_all)
{
    for (uint32_t h = 0; h < 65536; h++) {
        float f = eng_f16_to_f32((uint16_t)h);
        if ((h & 0x7fff) > 0x7c00) {
            ck_assert(isnan(f) && (bits(f) >> 31) == h >> 15);
            ck_assert_uint_gt(eng_f32_to_f16(f) & 0x7fff, 0x7c00); /* stays NaN */
            continue;
        }
        if ((h & 0x7fff) == 0x7c00)
            ck_assert(isinf(f));
        else
            ck_assert(f == half_value((uint16_t)h));
        ck_assert_uint_eq(bits(f) >> 31, h >> 15);
        ck_assert_uint_eq(eng_f32_to_f16(f), h);
    }
}
END_TEST

/* Half way between any two halves goes to the even one, a hair less or more to the nearer one; 65520 is half way to what would come
 * after the largest. */
START_TEST(test_f16_rounding)
{
    for (uint32_t h = 0; h < 0x7c00; h++)
        for (uint32_t sign = 0; sign <= 0x8000; sign += 0x8000) {
            double next = h == 0x7bff ? 65536 : half_value((uint16_t)(h + 1));
            float s = sign ? -1 : 1, mid = (float)((half_value((uint16_t)h) + next) / 2);
            uint32_t even = h & 1 ? h + 1 : h;
            ck_assert_uint_eq(eng_f32_to_f16(s * mid), sign | even);
            ck_assert_uint_eq(eng_f32_to_f16(s * nextafterf(mid, 0)), sign | h);
            ck_assert_uint_eq(eng_f32_to_f16(s * nextafterf(mid, INFINITY)), sign | (h + 1));
        }
    ck_assert_uint_eq(eng_f32_to_f16(0x1p-149f), 0);
    ck_assert_uint_eq(eng_f32_to_f16(-INFINITY), 0xfc00);
    ck_assert_uint_eq(eng_f32_to_f16(3e38f), 0x7c00);
}
END_TEST

START_TEST(test_bf16)
{
    for (uint32_t h = 0; h < 65536; h++) {
        float f = eng_bf16_to_f32((uint16_t)h);
        ck_assert_uint_eq(bits(f), h << 16);
        if ((h & 0x7fff) > 0x7f80) {
            ck_assert(isnan(f));
            ck_assert_uint_gt(eng_f32_to_bf16(f) & 0x7fff, 0x7f80);
            continue;
        }
        ck_assert_uint_eq(eng_f32_to_bf16(f), h);
        if ((h & 0x7fff) == 0x7f80)
            continue;
        /* Bit patterns of one sign are in the order of the values, and 0x8000 of the low half is the middle. */
        uint32_t up = h + 1;
        float mid, below, above;
        memcpy(&mid, &(uint32_t){h << 16 | 0x8000}, 4);
        memcpy(&below, &(uint32_t){h << 16 | 0x7fff}, 4);
        memcpy(&above, &(uint32_t){h << 16 | 0x8001}, 4);
        ck_assert_uint_eq(eng_f32_to_bf16(mid), h & 1 ? up : h);
        ck_assert_uint_eq(eng_f32_to_bf16(below), h);
        ck_assert_uint_eq(eng_f32_to_bf16(above), up);
    }
    /* A NaN whose payload is all in the bits that are cut off. */
    float nan_low;
    memcpy(&nan_low, &(uint32_t){0x7f800001}, 4);
    ck_assert_uint_gt(eng_f32_to_bf16(nan_low) & 0x7fff, 0x7f80);
    memcpy(&nan_low, &(uint32_t){0xffffffff}, 4);
    ck_assert_uint_gt(eng_f32_to_bf16(nan_low) & 0x7fff, 0x7f80);
}
END_TEST

/* Numbers, names and block sizes as ggml.h and the gguf package (GGML_QUANT_SIZES) have them. */
START_TEST(test_types)
{
    static const struct {
        uint32_t id;
        const char *name;
        uint32_t block, bytes;
    } want[] = {{0, "F32", 1, 4},       {1, "F16", 1, 2},       {2, "Q4_0", 32, 18},    {3, "Q4_1", 32, 20},      {6, "Q5_0", 32, 22},
                {7, "Q5_1", 32, 24},    {8, "Q8_0", 32, 34},    {10, "Q2_K", 256, 84},  {11, "Q3_K", 256, 110},   {12, "Q4_K", 256, 144},
                {13, "Q5_K", 256, 176}, {14, "Q6_K", 256, 210}, {20, "IQ4_NL", 32, 18}, {23, "IQ4_XS", 256, 136}, {30, "BF16", 1, 2}};
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        eng_type t;
        ck_assert_int_eq(eng_type_from_file(want[i].id, &t), 0);
        ck_assert_str_eq(eng_types[t].name, want[i].name);
        ck_assert_uint_eq(eng_types[t].block, want[i].block);
        ck_assert_uint_eq(eng_types[t].bytes, want[i].bytes);
        ck_assert_uint_eq(eng_types[t].file_id, want[i].id);
    }
    ck_assert_uint_eq(sizeof want / sizeof *want, ENG_TYPE_COUNT);
    for (int t = 0; t < ENG_TYPE_COUNT; t++)
        ck_assert_str_eq(eng_type_file_name(eng_types[t].file_id), eng_types[t].name);
    eng_type t = ENG_F16;
    ck_assert_int_eq(eng_type_from_file(16, &t), -ENOTSUP);
    ck_assert_int_eq(eng_type_from_file(4, &t), -ENOTSUP);
    ck_assert_int_eq(eng_type_from_file(UINT32_MAX, &t), -ENOTSUP);
    ck_assert_int_eq(t, ENG_F16);
    ck_assert_str_eq(eng_type_file_name(13), "Q5_K");
    ck_assert_str_eq(eng_type_file_name(16), "IQ2_XXS");
    ck_assert_str_eq(eng_type_file_name(23), "IQ4_XS");
    ck_assert_str_eq(eng_type_file_name(39), "MXFP4");
    ck_assert_ptr_null(eng_type_file_name(4));
    ck_assert_ptr_null(eng_type_file_name(UINT32_MAX));
}
END_TEST

int main(void)
{
    Suite *s = suite_create("quant");
    TCase *c = tcase_create("quant");
    tcase_add_test(c, test_golden);
    tcase_add_test(c, test_plain_rows);
    tcase_add_test(c, test_f16_all);
    tcase_add_test(c, test_f16_rounding);
    tcase_add_test(c, test_bf16);
    tcase_add_test(c, test_types);
    suite_add_tcase(s, c);
    return t_run(s);
}
