#include "quant.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

static_assert(sizeof(eng_q8_0) == 34 && sizeof(eng_q4_0) == 18 && sizeof(eng_q4_1) == 20, "blocks have no padding in the file");

const eng_type_info eng_types[ENG_TYPE_COUNT] = {
    [ENG_F32] = {"F32", 0, 1, 4},     [ENG_F16] = {"F16", 1, 1, 2},     [ENG_BF16] = {"BF16", 30, 1, 2},
    [ENG_Q8_0] = {"Q8_0", 8, 32, 34}, [ENG_Q4_0] = {"Q4_0", 2, 32, 18}, [ENG_Q4_1] = {"Q4_1", 3, 32, 20},
};

/* ggml's numbers; the holes are types that were removed. */
static const char *const file_names[] = {
    [0] = "F32",      [1] = "F16",     [2] = "Q4_0",     [3] = "Q4_1",   [6] = "Q5_0",    [7] = "Q5_1",   [8] = "Q8_0",
    [9] = "Q8_1",     [10] = "Q2_K",   [11] = "Q3_K",    [12] = "Q4_K",  [13] = "Q5_K",   [14] = "Q6_K",  [15] = "Q8_K",
    [16] = "IQ2_XXS", [17] = "IQ2_XS", [18] = "IQ3_XXS", [19] = "IQ1_S", [20] = "IQ4_NL", [21] = "IQ3_S", [22] = "IQ2_S",
    [23] = "IQ4_XS",  [24] = "I8",     [25] = "I16",     [26] = "I32",   [27] = "I64",    [28] = "F64",   [29] = "IQ1_M",
    [30] = "BF16",    [34] = "TQ1_0",  [35] = "TQ2_0",   [39] = "MXFP4", [40] = "NVFP4",  [41] = "Q1_0",
};

int eng_type_from_file(uint32_t file_id, eng_type *ret)
{
    for (int t = 0; t < ENG_TYPE_COUNT; t++)
        if (eng_types[t].file_id == file_id) {
            *ret = (eng_type)t;
            return 0;
        }
    return -ENOTSUP;
}

const char *eng_type_file_name(uint32_t file_id)
{
    return file_id < sizeof file_names / sizeof *file_names ? file_names[file_id] : NULL;
}

static float bits_to_f32(uint32_t b)
{
    float f;
    memcpy(&f, &b, sizeof f);
    return f;
}

static uint32_t f32_to_bits(float f)
{
    uint32_t b;
    memcpy(&b, &f, sizeof b);
    return b;
}

float eng_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
    if (exponent == 31)
        return bits_to_f32(sign | 0x7f800000 | mantissa << 13 | (mantissa ? 0x400000 : 0)); /* signalling NaN made quiet, as F16C does */
    if (exponent)
        return bits_to_f32(sign | (exponent + 112) << 23 | mantissa << 13);
    float f = (float)mantissa * 0x1p-24f; /* subnormal or zero: exact */
    return sign ? -f : f;
}

uint16_t eng_f32_to_f16(float f)
{
    uint32_t b = f32_to_bits(f), a = b & 0x7fffffff;
    uint16_t sign = (uint16_t)(b >> 16 & 0x8000);
    if (a > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (a >> 13 & 0x1ff));
    if (a >= 0x477ff000) /* 65520: half way from the largest half to 2^16 */
        return sign | 0x7c00;
    if (a < 0x38800000) { /* below 2^-14: adding 0.5 leaves units of 2^-24 in the low bits, rounded to even by the addition itself */
        uint32_t u = f32_to_bits(bits_to_f32(a) + 0.5f) - f32_to_bits(0.5f);
        return (uint16_t)(sign | u);
    }
    a += 0xfff + (a >> 13 & 1);
    return (uint16_t)(sign | (a - 0x38000000) >> 13);
}

float eng_bf16_to_f32(uint16_t h)
{
    return bits_to_f32((uint32_t)h << 16);
}

uint16_t eng_f32_to_bf16(float f)
{
    uint32_t b = f32_to_bits(f);
    if ((b & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(b >> 16 | 0x40);
    return (uint16_t)((b + 0x7fff + (b >> 16 & 1)) >> 16);
}

static void dequantize_f32(const void *row, float *out, size_t n)
{
    memcpy(out, row, n * sizeof *out);
}

static void dequantize_f16(const void *row, float *out, size_t n)
{
    const uint16_t *h = row;
    for (size_t i = 0; i < n; i++)
        out[i] = eng_f16_to_f32(h[i]);
}

static void dequantize_bf16(const void *row, float *out, size_t n)
{
    const uint16_t *h = row;
    for (size_t i = 0; i < n; i++)
        out[i] = eng_bf16_to_f32(h[i]);
}

static void dequantize_q8_0(const void *row, float *out, size_t n)
{
    for (const eng_q8_0 *b = row; n; b++, n -= 32, out += 32) {
        float d = eng_f16_to_f32(b->d);
        for (int i = 0; i < 32; i++)
            out[i] = d * b->q[i];
    }
}

static void dequantize_q4_0(const void *row, float *out, size_t n)
{
    for (const eng_q4_0 *b = row; n; b++, n -= 32, out += 32) {
        float d = eng_f16_to_f32(b->d);
        for (int i = 0; i < 16; i++) {
            out[i] = d * (float)((b->q[i] & 15) - 8);
            out[i + 16] = d * (float)((b->q[i] >> 4) - 8);
        }
    }
}

static void dequantize_q4_1(const void *row, float *out, size_t n)
{
    for (const eng_q4_1 *b = row; n; b++, n -= 32, out += 32) {
        float d = eng_f16_to_f32(b->d), m = eng_f16_to_f32(b->m);
        for (int i = 0; i < 16; i++) {
            out[i] = d * (float)(b->q[i] & 15) + m;
            out[i + 16] = d * (float)(b->q[i] >> 4) + m;
        }
    }
}

typedef void dequantize_fn(const void *row, float *out, size_t n);

static dequantize_fn *const dequantizers[ENG_TYPE_COUNT] = {
    [ENG_F32] = dequantize_f32,   [ENG_F16] = dequantize_f16,   [ENG_BF16] = dequantize_bf16,
    [ENG_Q8_0] = dequantize_q8_0, [ENG_Q4_0] = dequantize_q4_0, [ENG_Q4_1] = dequantize_q4_1,
};

void eng_dequantize(eng_type type, const void *row, float *out, size_t n)
{
    assert(n % eng_types[type].block == 0);
    dequantizers[type](row, out, n);
}
