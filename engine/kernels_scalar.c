/* The plain C level: complete, for any machine, and the oracle the SIMD levels are tested against. No fused multiply-add but by fmaf,
 * which is exact (-ffp-contract=off), so its bits are the same on every machine.
 */
#include "kernels_logits.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { CHUNK = 256 }; /* elements converted at a time on the stack; a multiple of every type's block */

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static size_t type_bytes(eng_type t, size_t n)
{
    return n / eng_types[t].block * eng_types[t].bytes;
}

/* ---- decode ----------------------------------------------------------------------------------------------------- */

static void quantize_q8(const float *x, eng_q8_act *out, size_t n)
{
    for (size_t b = 0; b < n / 32; b++) {
        float amax = 0;
        for (size_t i = 0; i < 32; i++)
            amax = fmaxf(amax, fabsf(x[32 * b + i]));
        /* Below this 127 / amax could overflow; such a block counts as zero. */
        float d = amax < 1e-30f ? 0.0f : amax / 127.0f, inv = amax < 1e-30f ? 0.0f : 127.0f / amax;
        int32_t sum = 0;
        for (size_t i = 0; i < 32; i++) {
            /* Adding 1.5 * 2^23 rounds to nearest even and leaves the integer in the low bits; NaN gives a code, not undefined behaviour.
             */
            float v = x[32 * b + i] * inv + 12582912.0f;
            int32_t bits;
            memcpy(&bits, &v, 4);
            int8_t q = (int8_t)(uint8_t)(bits & 0xff);
            out->q[32 * b + i] = q;
            sum += q;
        }
        out->d[b] = d;
        out->s[b] = d * (float)sum;
    }
}

static inline int32_t dot(const int8_t *w, const int8_t *x, size_t n)
{
    int32_t sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += w[i] * x[i];
    return sum;
}

static int32_t sum16(const int8_t *x)
{
    int32_t sum = 0;
    for (size_t i = 0; i < 16; i++)
        sum += x[i];
    return sum;
}

/* What every level computes, up to the order of the float sums: with w a row's block taken apart and its parts the 16 or 32 elements that
 * share a scale (quant.h),
 *   y = sum over parts of  w.d x.d (sum over the part of w.q x.q, an integer)  +  w.m x.d (sum over the part of x.q, an integer). */
static void gemv_q8_any(eng_type t, float *y, const void *w, size_t row_bytes, size_t rows, const eng_q8_act *x, size_t n)
{
    const size_t block = eng_types[t].block, part = eng_type_part(t);
    const bool has_min = eng_type_has_min(t);
    for (size_t r = 0; r < rows; r++) {
        const char *row = (const char *)w + r * row_bytes;
        float acc = 0;
        for (size_t at = 0; at < n; at += block) {
            eng_codes c;
            eng_unpack(t, row + type_bytes(t, at), &c);
            for (size_t i = 0; i < block; i += part) {
                const int8_t *q = x->q + at + i;
                size_t b = (at + i) / 32;
                int32_t products = part == 32 ? dot(c.q + i, q, 32) : dot(c.q + i, q, 16);
                acc += c.d[i / 16] * x->d[b] * (float)products;
                if (has_min)
                    acc += c.m[i / 16] * (part == 32 ? x->s[b] : x->d[b] * (float)sum16(q));
            }
        }
        y[r] = acc;
    }
}

static void gemv_f32_any(eng_type t, float *y, const void *w, size_t row_bytes, size_t rows, const float *x, size_t n)
{
    float buf[CHUNK];
    for (size_t r = 0; r < rows; r++) {
        const char *row = (const char *)w + r * row_bytes;
        float acc = 0;
        for (size_t i = 0; i < n; i += CHUNK) {
            size_t c = min_size(CHUNK, n - i);
            eng_dequantize(t, row + type_bytes(t, i), buf, c);
            for (size_t j = 0; j < c; j++)
                acc += buf[j] * x[i + j];
        }
        y[r] = acc;
    }
}

/* ---- prefill ---------------------------------------------------------------------------------------------------- */

#define PER_TYPE(T)                                                                                                                        \
    static void gemv_f32_##T(float *y, const void *w, size_t row_bytes, size_t rows, const float *x, size_t n)                             \
    {                                                                                                                                      \
        gemv_f32_any(ENG_##T, y, w, row_bytes, rows, x, n);                                                                                \
    }                                                                                                                                      \
    static void dequantize_##T(const void *row, float *out, size_t n)                                                                      \
    {                                                                                                                                      \
        eng_dequantize(ENG_##T, row, out, n);                                                                                              \
    }
ENG_EACH_TYPE(PER_TYPE)
#undef PER_TYPE

#define PER_BLOCK_TYPE(T)                                                                                                                  \
    static void gemv_q8_##T(float *y, const void *w, size_t row_bytes, size_t rows, const eng_q8_act *x, size_t n)                         \
    {                                                                                                                                      \
        gemv_q8_any(ENG_##T, y, w, row_bytes, rows, x, n);                                                                                 \
    }
ENG_EACH_BLOCK_TYPE(PER_BLOCK_TYPE)
#undef PER_BLOCK_TYPE

static void dequantize_rows(eng_type type, const void *w, size_t row_bytes, size_t rows, size_t k, float *tmp)
{
    for (size_t r = 0; r < rows; r++)
        eng_dequantize(type, (const char *)w + r * row_bytes, tmp + r * k, k);
    memset(tmp + rows * k, 0, (ENG_NR - rows) * k * sizeof *tmp);
}

static void pack_f32(float *panel, eng_type type, const void *w, size_t row_bytes, size_t rows, size_t k, float *tmp)
{
    dequantize_rows(type, w, row_bytes, rows, k, tmp);
    for (size_t i = 0; i < k; i++)
        for (size_t j = 0; j < ENG_NR; j++)
            panel[i * ENG_NR + j] = tmp[j * k + i];
}

static void pack_bf16(uint16_t *panel, eng_type type, const void *w, size_t row_bytes, size_t rows, size_t k, float *tmp)
{
    dequantize_rows(type, w, row_bytes, rows, k, tmp);
    for (size_t i = 0; i < k / 2; i++)
        for (size_t j = 0; j < ENG_NR; j++)
            for (size_t h = 0; h < 2; h++)
                panel[(i * ENG_NR + j) * 2 + h] = eng_f32_to_bf16(tmp[j * k + 2 * i + h]);
}

static void gemm_f32(float *c, size_t ldc, const float *a, size_t lda, const float *b, size_t ldb, size_t m, size_t n, size_t k,
                     bool accumulate)
{
    for (size_t i = 0; i < m; i++) {
        float acc[ENG_NR] = {0};
        if (accumulate)
            memcpy(acc, c + i * ldc, n * sizeof *acc);
        for (size_t l = 0; l < k; l++) {
            float f = a[i * lda + l];
            const float *row = b + l * ldb;
            if (n == ENG_NR)
                for (size_t j = 0; j < ENG_NR; j++)
                    acc[j] += f * row[j];
            else
                for (size_t j = 0; j < n; j++)
                    acc[j] += f * row[j];
        }
        memcpy(c + i * ldc, acc, n * sizeof *acc);
    }
}

static void f32_to_bf16(const float *x, uint16_t *out, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = eng_f32_to_bf16(x[i]);
}

/* ---- prefill in 8-bit integers ------------------------------------------------------------------------------------- */

static void quantize_blocks(const float *x, eng_q8_block *out, size_t n)
{
    for (size_t b = 0; b < n / 32; b++, out++) {
        float s;
        quantize_q8(x + 32 * b, &(eng_q8_act){.q = out->q, .d = &out->d, .s = &s}, 32);
        out->minus = -128 * (sum16(out->q) + sum16(out->q + 16));
    }
}

/* The largest magnitude that codes can say with these parts' scales and minima, or `largest`; NaN counts as nothing. */
static float largest_value(eng_type type, const eng_codes *c, size_t parts, float largest)
{
    const int size = 1 << eng_type_bits(type), low = eng_type_has_min(type) ? 0 : -size / 2;
    for (size_t i = 0; i < parts; i++) {
        float a = fabsf(c->d[i] * (float)low + c->m[i]), b = fabsf(c->d[i] * (float)(low + size - 1) + c->m[i]);
        float x = b > a ? b : a;
        largest = x > largest ? x : largest;
    }
    return largest;
}

/* Round to nearest even and saturate; NaN, and what 32 bits cannot hold, is the smallest. */
static int to_int16(float x)
{
    if (!(x >= -0x1p31f && x < 0x1p31f))
        return INT16_MIN;
    long i = lrintf(x);
    return (int)(i < INT16_MIN ? INT16_MIN : i > INT16_MAX ? INT16_MAX : i);
}

/* Rounds n elements of a row, at most ENG_Q8_SPAN, to 8 bits; returns their scale. Code q of a part with scale d and minimum m becomes
 * (q round(f d) + round(f m) + 128) >> 8 with f = 127 * 256 / largest, which is at most 127 in size. What is infinite or NaN gives some code, the
 * same at every level. */
static float round_span(eng_type type, const char *w, size_t n, int8_t *q)
{
    const size_t block = eng_types[type].block;
    float largest = 0;
    eng_codes c;
    for (size_t at = 0; at < n; at += block) {
        eng_unpack(type, w + type_bytes(type, at), &c);
        largest = largest_value(type, &c, block / 16, largest);
    }
    const float f = largest < 1e-30f ? 0.0f : 32512.0f / largest;
    for (size_t at = 0; at < n; at += block) {
        eng_unpack(type, w + type_bytes(type, at), &c);
        for (size_t i = 0; i < block; i++)
            q[at + i] = (int8_t)((int16_t)(c.q[i] * to_int16(c.d[i / 16] * f) + to_int16(c.m[i / 16] * f) + 128) >> 8);
    }
    return largest < 1e-30f ? 0.0f : largest / 127.0f;
}

/* Of how many elements a panel has one scale for a row. */
static size_t scale_span(eng_type type)
{
    return eng_rounds_q8(type) ? ENG_Q8_SPAN : 32;
}

/* The panel: scales [k / 32][ENG_NR], of which a rounding type uses the first ones, codes [ENG_NR][k]. */
static void pack_q8(void *panel, eng_type type, const void *w, size_t row_bytes, size_t rows, size_t k)
{
    float *d = panel;
    int8_t *q = (int8_t *)(d + k / 32 * ENG_NR);
    const size_t block = eng_types[type].block, span = scale_span(type);
    memset(panel, 0, (size_t)(q - (int8_t *)panel) + k * ENG_NR);
    for (size_t r = 0; r < rows; r++) {
        const char *row = (const char *)w + r * row_bytes;
        for (size_t at = 0; at < k && eng_rounds_q8(type); at += span)
            d[at / span * ENG_NR + r] = round_span(type, row + type_bytes(type, at), k - at < span ? k - at : span, q + r * k + at);
        for (size_t at = 0; at < k && !eng_rounds_q8(type); at += block) {
            eng_codes c;
            eng_unpack(type, row + type_bytes(type, at), &c);
            memcpy(q + r * k + at, c.q, block);
            for (size_t i = at / 32; i < (at + block) / 32; i++)
                d[i * ENG_NR + r] = c.d[2 * (i - at / 32)];
        }
    }
}

static void gemm_q8(float *c, size_t ldc, const eng_q8_block *a, size_t lda, const void *panel, eng_type type, size_t m, size_t n, size_t k,
                    bool accumulate)
{
    const float *d = panel;
    const int8_t *q = (const int8_t *)(d + k / 32 * ENG_NR);
    const size_t span = scale_span(type);
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j++) {
            float acc = accumulate ? c[i * ldc + j] : 0;
            for (size_t at = 0; at < k; at += span) {
                float w = d[at / span * ENG_NR + j], u = 0;
                for (size_t b = at / 32; b < (at + span) / 32 && b < k / 32; b++) {
                    const eng_q8_block *x = a + i * lda + b;
                    float s = (float)dot(q + j * k + 32 * b, x->q, 32);
                    if (span == 32)
                        acc = fmaf(w * s, x->d, acc);
                    else
                        u = fmaf(s, x->d, u);
                }
                if (span > 32)
                    acc = fmaf(w, u, acc);
            }
            c[i * ldc + j] = acc;
        }
}

/* ---- prefill in 16-bit integers ------------------------------------------------------------------------------------ */

/* Of n floats; returns their scale. */
static float round_i16(const float *x, int16_t *q, size_t n)
{
    float largest = 0, inv;
    for (size_t i = 0; i < n; i++)
        largest = fmaxf(largest, fabsf(x[i]));
    float d = eng_i16_scale(largest, &inv);
    for (size_t i = 0; i < n; i++)
        q[i] = (int16_t)to_int16(x[i] * inv);
    return d;
}

static void quantize_i16(const float *x, eng_i16_block *out, size_t n)
{
    for (size_t b = 0; b < n / 32; b++)
        out[b].d = round_i16(x + 32 * b, out[b].q, 32);
}

/* The panel: integers [ENG_NR][k], then scales [spans][ENG_NR]. */
static void pack_i16(void *panel, eng_type type, const void *w, size_t row_bytes, size_t rows, size_t k)
{
    int16_t *q = panel;
    float *d = (float *)(void *)(q + k * ENG_NR), x[ENG_I16_SPAN];
    memset(panel, 0, k * ENG_NR * sizeof *q + (k + ENG_I16_SPAN - 1) / ENG_I16_SPAN * ENG_NR * sizeof *d);
    for (size_t r = 0; r < rows; r++)
        for (size_t at = 0; at < k; at += ENG_I16_SPAN) {
            size_t n = min_size(ENG_I16_SPAN, k - at);
            eng_dequantize(type, (const char *)w + r * row_bytes + type_bytes(type, at), x, n);
            d[at / ENG_I16_SPAN * ENG_NR + r] = round_i16(x, q + r * k + at, n);
        }
}

/* Sums wrap around where what is infinite or NaN has given codes larger than ENG_I16_MAX. */
static int32_t dot_i16(const int16_t *w, const int16_t *x)
{
    uint32_t sum = 0;
    for (size_t i = 0; i < 32; i++)
        sum += (uint32_t)(w[i] * x[i]);
    return (int32_t)sum;
}

static void gemm_i16(float *c, size_t ldc, const eng_i16_block *a, size_t lda, const void *panel, size_t m, size_t n, size_t k, bool accumulate)
{
    const int16_t *q = panel;
    const float *d = (const float *)(const void *)(q + k * ENG_NR);
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j++) {
            float acc = accumulate ? c[i * ldc + j] : 0;
            for (size_t at = 0; at < k; at += ENG_I16_SPAN) {
                float u = 0;
                for (size_t b = at / 32; b < (at + ENG_I16_SPAN) / 32 && b < k / 32; b++) {
                    const eng_i16_block *x = a + i * lda + b;
                    u = fmaf((float)dot_i16(q + j * k + 32 * b, x->q), x->d, u);
                }
                acc = fmaf(d[at / ENG_I16_SPAN * ENG_NR + j], u, acc);
            }
            c[i * ldc + j] = acc;
        }
}

/* ---- attention -------------------------------------------------------------------------------------------------- */

static const eng_type kv_types[ENG_KV_TYPES] = {[ENG_KV_F32] = ENG_F32, [ENG_KV_F16] = ENG_F16, [ENG_KV_BF16] = ENG_BF16, [ENG_KV_Q8_0] = ENG_Q8_0};

/* n elements of a KV row from element i, a multiple of the block, on; `buf` has room for whole blocks, as the row has. */
static void load_part(eng_kv_type t, const char *row, size_t i, float *buf, size_t n)
{
    size_t block = eng_types[kv_types[t]].block;
    eng_dequantize(kv_types[t], row + type_bytes(kv_types[t], i), buf, (n + block - 1) / block * block);
}

static void kv_load_q8_0(const void *row, float *out, size_t n)
{
    float buf[CHUNK];
    for (size_t i = 0; i < n; i += CHUNK) {
        size_t c = min_size(CHUNK, n - i);
        load_part(ENG_KV_Q8_0, row, i, buf, c);
        memcpy(out + i, buf, c * sizeof *out);
    }
}

static void kv_store_q8_0(const float *x, void *row, size_t n)
{
    eng_q8_0 *b = row;
    for (size_t i = 0; i < n; i += 32, b++) {
        uint32_t max = 0; /* of the bits without the sign, where NaN is the largest */
        size_t left = min_size(32, n - i);
        for (size_t j = 0; j < left; j++) {
            uint32_t u;
            memcpy(&u, x + i + j, 4);
            max = (u & 0x7fffffff) > max ? u & 0x7fffffff : max;
        }
        float size;
        memcpy(&size, &max, 4);
        size /= 127.0f;
        b->d = eng_f32_to_f16(size > 65504 ? 65504 : size);
        float d = eng_f16_to_f32(b->d), inv = d == 0 ? 0 : 1 / d;
        for (size_t j = 0; j < 32; j++) {
            float v = j < left ? x[i + j] * inv : 0;
            v = v < 127 ? v : 127; /* NaN: 127 */
            b->q[j] = (int8_t)lrintf(v > -127 ? v : -127);
        }
    }
}

static void kv_store_f32(const float *x, void *row, size_t n)
{
    memcpy(row, x, n * sizeof *x);
}

static void kv_store_f16(const float *x, void *row, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float v = x[i] > 65504.0f ? 65504.0f : x[i] < -65504.0f ? -65504.0f : x[i];
        uint16_t h = eng_f32_to_f16(v);
        memcpy((char *)row + 2 * i, &h, 2);
    }
}

static void kv_store_bf16(const float *x, void *row, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint16_t h = eng_f32_to_bf16(x[i]);
        memcpy((char *)row + 2 * i, &h, 2);
    }
}

static void qk_any(eng_kv_type t, float *s, size_t lds, const float *q, size_t group, const void *k, size_t stride, size_t rows, size_t d)
{
    float buf[CHUNK];
    for (size_t r = 0; r < rows; r++) {
        const char *row = (const char *)k + r * stride;
        for (size_t g = 0; g < group; g++)
            s[g * lds + r] = 0;
        for (size_t i = 0; i < d; i += CHUNK) {
            size_t c = min_size(CHUNK, d - i);
            load_part(t, row, i, buf, c);
            for (size_t g = 0; g < group; g++) {
                float acc = s[g * lds + r];
                for (size_t j = 0; j < c; j++)
                    acc += q[g * d + i + j] * buf[j];
                s[g * lds + r] = acc;
            }
        }
    }
}

/* o[:] += p v for one row and the whole group. */
static void pv_row(eng_kv_type t, float *o, const float *p, size_t ldp, size_t group, const char *row, size_t d)
{
    float buf[CHUNK];
    for (size_t i = 0; i < d; i += CHUNK) {
        size_t c = min_size(CHUNK, d - i);
        load_part(t, row, i, buf, c);
        for (size_t g = 0; g < group; g++)
            for (size_t j = 0; j < c; j++)
                o[g * d + i + j] += p[g * ldp] * buf[j];
    }
}

#define PER_KV(NAME, T)                                                                                                                    \
    static void qk_##NAME(float *s, size_t lds, const float *q, size_t group, const void *k, size_t stride, size_t rows, size_t d)         \
    {                                                                                                                                      \
        qk_any(T, s, lds, q, group, k, stride, rows, d);                                                                                   \
    }                                                                                                                                      \
    static void pv_##NAME(float *o, const float *p, size_t ldp, size_t group, const void *v, size_t stride, size_t rows, size_t d)         \
    {                                                                                                                                      \
        for (size_t r = 0; r < rows; r++)                                                                                                  \
            pv_row(T, o, p + r, ldp, group, (const char *)v + r * stride, d);                                                              \
    }                                                                                                                                      \
    static void pv_gather_##NAME(float *o, const float *p, const uint32_t *ids, size_t n, const void *v, size_t stride, size_t d)          \
    {                                                                                                                                      \
        for (size_t i = 0; i < n; i++)                                                                                                     \
            pv_row(T, o, p + i, 0, 1, (const char *)v + ids[i] * stride, d);                                                               \
    }
PER_KV(f32, ENG_KV_F32)
PER_KV(f16, ENG_KV_F16)
PER_KV(bf16, ENG_KV_BF16)
PER_KV(q8_0, ENG_KV_Q8_0)
#undef PER_KV

static float max(const float *x, size_t n)
{
    float m = -INFINITY;
    for (size_t i = 0; i < n; i++)
        m = x[i] > m ? x[i] : m;
    return m;
}

/* The sum is kept in float64. Results below FLT_MIN become 0 (in the SIMD levels too). */
static float softmax(float *x, size_t n, float m)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        float e = x[i] == -INFINITY ? 0 : expf(x[i] - m);
        x[i] = e < FLT_MIN ? 0 : e;
        sum += x[i];
    }
    return (float)sum;
}

static void softmax_columns(float *x, size_t n, size_t cols, float *m, float *l, float *o, size_t d)
{
    for (size_t c = 0; c < cols; c++) {
        float top = -INFINITY;
        for (size_t i = 0; i < n; i++)
            top = x[i * ENG_NR + c] > top ? x[i * ENG_NR + c] : top;
        if (top > m[c] + ENG_ATTN_SLACK) {
            float f = exp2f(m[c] - top);
            m[c] = top;
            l[c] *= f;
            for (size_t i = 0; i < d; i++)
                o[i * ENG_NR + c] *= f;
        }
        double sum = 0;
        for (size_t i = 0; i < n; i++) {
            float e = exp2f(x[i * ENG_NR + c] - m[c]);
            x[i * ENG_NR + c] = e < FLT_MIN ? 0 : e;
            sum += x[i * ENG_NR + c];
        }
        l[c] += (float)sum;
    }
}

static void scale(float *x, size_t n, float f)
{
    for (size_t i = 0; i < n; i++)
        x[i] *= f;
}

/* ---- the rest of a layer ---------------------------------------------------------------------------------------- */

static void rms_norm(float *out, const float *x, const float *w, size_t n, float eps)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)x[i] * x[i];
    float f = (float)(1.0 / sqrt(sum / (double)n + eps));
    for (size_t i = 0; i < n; i++)
        out[i] = x[i] * f * w[i];
}

static void silu_mul(float *out, const float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i++)
        out[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
}

/* x (1 + tanh(u)) / 2 = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3) */
static void gelu_mul(float *out, const float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float g = gate[i];
        out[i] = g / (1 + expf(-1.5957691216f * (g + 0.044715f * g * g * g))) * up[i];
    }
}

static void add(float *x, const float *y, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] += y[i];
}

static void rope(float *x, const float *cs, size_t rot, bool halves)
{
    size_t h = rot / 2;
    for (size_t i = 0; i < h; i++) {
        float *a = halves ? x + i : x + 2 * i, *b = halves ? x + i + h : x + 2 * i + 1;
        float u = *a, v = *b;
        *a = u * cs[i] - v * cs[h + i];
        *b = u * cs[h + i] + v * cs[i];
    }
}

static float logits_max(const float *x, size_t n, float *block_max)
{
    return eng_logits_max(x, n, block_max);
}

static double logits_sum(const float *x, size_t n, float max)
{
    return eng_logits_sum(x, n, max);
}

void eng_kernels_scalar(eng_kernels *k)
{
    *k = (eng_kernels){
        .name = "scalar",
        .quantize_q8 = quantize_q8,
        .pack_f32 = pack_f32,
        .pack_bf16 = pack_bf16,
        .gemm_f32 = gemm_f32,
        .gemm_bf16 = NULL,
        .f32_to_bf16 = f32_to_bf16,
        .quantize_blocks = quantize_blocks,
        .pack_q8 = pack_q8,
        .gemm_q8 = gemm_q8,
        .quantize_i16 = quantize_i16,
        .pack_i16 = pack_i16,
        .gemm_i16 = gemm_i16,
        .kv_load = {dequantize_F32, dequantize_F16, dequantize_BF16, kv_load_q8_0},
        .kv_store = {kv_store_f32, kv_store_f16, kv_store_bf16, kv_store_q8_0},
        .qk = {qk_f32, qk_f16, qk_bf16, qk_q8_0},
        .pv = {pv_f32, pv_f16, pv_bf16, pv_q8_0},
        .pv_gather = {pv_gather_f32, pv_gather_f16, pv_gather_bf16, pv_gather_q8_0},
        .max = max,
        .softmax = softmax,
        .softmax_columns = softmax_columns,
        .scale = scale,
        .rms_norm = rms_norm,
        .silu_mul = silu_mul,
        .logits_max = logits_max,
        .logits_sum = logits_sum,
        .gelu_mul = gelu_mul,
        .add = add,
        .rope = rope,
    };
#define ENTRY(T)                                                                                                                           \
    k->gemv_f32[ENG_##T] = gemv_f32_##T;                                                                                                   \
    k->dequantize[ENG_##T] = dequantize_##T;
    ENG_EACH_TYPE(ENTRY)
#undef ENTRY
#define ENTRY(T) k->gemv_q8[ENG_##T] = gemv_q8_##T;
    ENG_EACH_BLOCK_TYPE(ENTRY)
#undef ENTRY
}
