#include "quant.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

static_assert(sizeof(eng_q8_0) == 34 && sizeof(eng_q4_0) == 18 && sizeof(eng_q4_1) == 20 && sizeof(eng_q5_0) == 22 &&
                  sizeof(eng_q5_1) == 24 && sizeof(eng_iq4_nl) == 18 && sizeof(eng_q2_k) == 84 && sizeof(eng_q3_k) == 110 &&
                  sizeof(eng_q4_k) == 144 && sizeof(eng_q5_k) == 176 && sizeof(eng_q6_k) == 210 && sizeof(eng_iq4_xs) == 136,
              "blocks have no padding in the file");

const eng_type_info eng_types[ENG_TYPE_COUNT] = {
    [ENG_F32] = {"F32", 0, 1, 4},        [ENG_F16] = {"F16", 1, 1, 2},        [ENG_BF16] = {"BF16", 30, 1, 2},
    [ENG_Q8_0] = {"Q8_0", 8, 32, 34},    [ENG_Q4_0] = {"Q4_0", 2, 32, 18},    [ENG_Q4_1] = {"Q4_1", 3, 32, 20},
    [ENG_Q5_0] = {"Q5_0", 6, 32, 22},    [ENG_Q5_1] = {"Q5_1", 7, 32, 24},    [ENG_IQ4_NL] = {"IQ4_NL", 20, 32, 18},
    [ENG_Q2_K] = {"Q2_K", 10, 256, 84},  [ENG_Q3_K] = {"Q3_K", 11, 256, 110}, [ENG_Q4_K] = {"Q4_K", 12, 256, 144},
    [ENG_Q5_K] = {"Q5_K", 13, 256, 176}, [ENG_Q6_K] = {"Q6_K", 14, 256, 210}, [ENG_IQ4_XS] = {"IQ4_XS", 23, 256, 136},
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

/* ---- blocks ----------------------------------------------------------------------------------------------------- */

const int8_t eng_iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

/* The part of `n` elements from i on has scale d and minimum m. */
static void set_scale(eng_codes *c, size_t i, size_t n, float d, float m)
{
    for (size_t h = i / 16; h < (i + n) / 16; h++) {
        c->d[h] = d;
        c->m[h] = m;
    }
}

/* 32 codes from 16 bytes, less `offset`. */
static void set_nibbles(int8_t *out, const uint8_t *q, int offset)
{
    for (size_t i = 0; i < 16; i++) {
        out[i] = (int8_t)((q[i] & 15) - offset);
        out[i + 16] = (int8_t)((q[i] >> 4) - offset);
    }
}

static void add_fifth_bits(int8_t *q, const uint8_t *h)
{
    for (size_t i = 0; i < 32; i++)
        q[i] = (int8_t)(q[i] + (h[i / 8] >> i % 8 & 1) * 16);
}

static void map_values(int8_t *q, size_t n)
{
    for (size_t i = 0; i < n; i++)
        q[i] = eng_iq4_values[q[i]];
}

/* One of the types with blocks of 32. */
static void unpack_small(eng_type t, const void *block, eng_codes *c)
{
    const eng_q8_0 *q8_0 = block;
    const eng_q4_0 *q4_0 = block;
    const eng_q4_1 *q4_1 = block;
    const eng_q5_0 *q5_0 = block;
    const eng_q5_1 *q5_1 = block;
    set_scale(c, 0, 32, eng_f16_to_f32(q4_0->d), eng_type_has_min(t) ? eng_f16_to_f32(q4_1->m) : 0); /* all of them begin with d or d, m */
    switch (t) {
    case ENG_Q8_0:
        memcpy(c->q, q8_0->q, 32);
        break;
    case ENG_Q4_0:
        set_nibbles(c->q, q4_0->q, 8);
        break;
    case ENG_Q4_1:
        set_nibbles(c->q, q4_1->q, 0);
        break;
    case ENG_Q5_0:
        set_nibbles(c->q, q5_0->q, 16);
        add_fifth_bits(c->q, q5_0->h);
        break;
    case ENG_Q5_1:
        set_nibbles(c->q, q5_1->q, 0);
        add_fifth_bits(c->q, q5_1->h);
        break;
    default: /* IQ4_NL is laid out as Q4_0 */
        set_nibbles(c->q, q4_0->q, 0);
        map_values(c->q, 32);
    }
}

static void unpack_q2_k(const eng_q2_k *b, eng_codes *c)
{
    float d = eng_f16_to_f32(b->d), m = eng_f16_to_f32(b->m);
    for (size_t h = 0; h < 16; h++)
        set_scale(c, 16 * h, 16, d * (float)(b->s[h] & 15), -(m * (float)(b->s[h] >> 4)));
    for (size_t i = 0; i < 256; i++)
        c->q[i] = (int8_t)(b->q[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3);
}

/* Scale i of 16 has its low nibble in s[i % 8], low half first, and its two high bits in s[8 + i % 4], 2 (i / 4) up. */
static void unpack_q3_k(const eng_q3_k *b, eng_codes *c)
{
    float d = eng_f16_to_f32(b->d);
    for (size_t h = 0; h < 16; h++) {
        int s = (b->s[h % 8] >> h / 8 * 4 & 15) | (b->s[8 + h % 4] >> h / 4 * 2 & 3) << 4;
        set_scale(c, 16 * h, 16, d * (float)(s - 32), 0);
    }
    for (size_t i = 0; i < 256; i++) {
        int q = (b->q[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3) | (b->h[i % 32] >> i / 32 & 1) << 2;
        c->q[i] = (int8_t)(q - 4);
    }
}

/* Q4_K's and Q5_K's six-bit scales and minima of eight parts: those of parts 0..3 are the low bits of s[0..3] and s[4..7]; those of parts
 * 4..7 have their low nibbles in s[8..11] (minima in the high ones) and their two high bits on top of s[0..3] and s[4..7]. */
static void unpack_scales_k(const uint8_t *s, float d, float m, eng_codes *c)
{
    for (size_t j = 0; j < 8; j++) {
        int sc = j < 4 ? s[j] & 63 : (s[j + 4] & 15) | s[j - 4] >> 6 << 4;
        int mn = j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | s[j] >> 6 << 4;
        set_scale(c, 32 * j, 32, d * (float)sc, -(m * (float)mn));
    }
}

static void unpack_q4_k(const eng_q4_k *b, eng_codes *c)
{
    unpack_scales_k(b->s, eng_f16_to_f32(b->d), eng_f16_to_f32(b->m), c);
    for (size_t i = 0; i < 256; i++)
        c->q[i] = (int8_t)(b->q[i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15);
}

static void unpack_q5_k(const eng_q5_k *b, eng_codes *c)
{
    unpack_scales_k(b->s, eng_f16_to_f32(b->d), eng_f16_to_f32(b->m), c);
    for (size_t i = 0; i < 256; i++)
        c->q[i] = (int8_t)((b->q[i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15) | (b->h[i % 32] >> i / 32 & 1) << 4);
}

static void unpack_q6_k(const eng_q6_k *b, eng_codes *c)
{
    float d = eng_f16_to_f32(b->d);
    for (size_t h = 0; h < 16; h++)
        set_scale(c, 16 * h, 16, d * (float)b->s[h], 0);
    for (size_t i = 0; i < 256; i++) {
        int low = b->q[i / 128 * 64 + i % 64] >> i / 64 % 2 * 4 & 15, high = b->h[i / 128 * 32 + i % 32] >> i / 32 % 4 * 2 & 3;
        c->q[i] = (int8_t)((low | high << 4) - 32);
    }
}

/* The scale of part j: nibble j of s, and bits 2j of h on top. */
static void unpack_iq4_xs(const eng_iq4_xs *b, eng_codes *c)
{
    float d = eng_f16_to_f32(b->d);
    for (size_t j = 0; j < 8; j++) {
        int s = (b->s[j / 2] >> j % 2 * 4 & 15) | (b->h >> 2 * j & 3) << 4;
        set_scale(c, 32 * j, 32, d * (float)(s - 32), 0);
        set_nibbles(c->q + 32 * j, b->q + 16 * j, 0);
    }
    map_values(c->q, 256);
}

bool eng_type_has_min(eng_type t)
{
    return t == ENG_Q4_1 || t == ENG_Q5_1 || t == ENG_Q2_K || t == ENG_Q4_K || t == ENG_Q5_K;
}

int eng_type_bits(eng_type t)
{
    switch (t) {
    case ENG_Q2_K:
        return 2;
    case ENG_Q3_K:
        return 3;
    case ENG_Q4_0:
    case ENG_Q4_1:
    case ENG_Q4_K:
        return 4;
    case ENG_Q5_0:
    case ENG_Q5_1:
    case ENG_Q5_K:
        return 5;
    case ENG_Q6_K:
        return 6;
    default:
        return 8;
    }
}

size_t eng_type_part(eng_type t)
{
    return t == ENG_Q2_K || t == ENG_Q3_K || t == ENG_Q6_K ? 16 : 32;
}

void eng_unpack(eng_type t, const void *block, eng_codes *ret)
{
    switch (t) {
    case ENG_Q2_K:
        unpack_q2_k(block, ret);
        break;
    case ENG_Q3_K:
        unpack_q3_k(block, ret);
        break;
    case ENG_Q4_K:
        unpack_q4_k(block, ret);
        break;
    case ENG_Q5_K:
        unpack_q5_k(block, ret);
        break;
    case ENG_Q6_K:
        unpack_q6_k(block, ret);
        break;
    case ENG_IQ4_XS:
        unpack_iq4_xs(block, ret);
        break;
    default:
        unpack_small(t, block, ret);
    }
}

static void dequantize_blocks(eng_type t, const char *row, float *out, size_t n)
{
    const size_t block = eng_types[t].block;
    const bool has_min = eng_type_has_min(t);
    for (; n; row += eng_types[t].bytes, n -= block, out += block) {
        eng_codes c;
        eng_unpack(t, row, &c);
        for (size_t i = 0; i < block; i++) {
            float x = c.d[i / 16] * (float)c.q[i];
            out[i] = has_min ? x + c.m[i / 16] : x;
        }
    }
}

void eng_dequantize(eng_type type, const void *row, float *out, size_t n)
{
    assert(n % eng_types[type].block == 0);
    if (type == ENG_F32)
        memcpy(out, row, n * sizeof *out);
    else if (type == ENG_F16)
        dequantize_f16(row, out, n);
    else if (type == ENG_BF16)
        dequantize_bf16(row, out, n);
    else
        dequantize_blocks(type, row, out, n);
}
