/* AVX-512 level: the table, and the element-wise kernels. */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_avx512.h"
#include "kernels_logits.h"

#include <float.h>
#include <math.h>

static void quantize_q8(const float *x, eng_q8_act *out, size_t n)
{
    for (size_t b = 0; b < n / 32; b++) {
        __m512i i, j;
        out->d[b] = quantize32(x + 32 * b, out->q + 32 * b, &i, &j);
        out->s[b] = out->d[b] * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(i, j));
    }
}

static float max(const float *x, size_t n)
{
    __m512 low = _mm512_set1_ps(-INFINITY), a = low, b = low;
    for (size_t i = 0; i < n; i += 32) {
        a = _mm512_max_ps(a, _mm512_mask_loadu_ps(low, tail16(n - i), x + i));
        if (n - i > 16)
            b = _mm512_max_ps(b, _mm512_mask_loadu_ps(low, tail16(n - i - 16), x + i + 16));
    }
    return _mm512_reduce_max_ps(_mm512_max_ps(a, b));
}

/* Lane j sums the elements j, j + 16, ...: trailing zeros change no lane. */
static float softmax(float *x, size_t n, float m)
{
    __m512 sum = _mm512_setzero_ps(), vm = _mm512_set1_ps(m);
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 k = tail16(n - i);
        __m512 v = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), k, x + i);
        __m512 e = exp16(_mm512_sub_ps(v, vm));
        __mmask16 some = _mm512_cmp_ps_mask(v, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);
        e = _mm512_maskz_mov_ps(_mm512_mask_cmp_ps_mask(some, e, _mm512_set1_ps(FLT_MIN), _CMP_NLT_UQ), e);
        _mm512_mask_storeu_ps(x + i, k, e);
        sum = _mm512_add_ps(sum, e);
    }
    float total;
    store_sums(&total, &sum, 1);
    return total;
}

static void scale(float *x, size_t n, float f)
{
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 k = tail16(n - i);
        _mm512_mask_storeu_ps(x + i, k, _mm512_mul_ps(_mm512_maskz_loadu_ps(k, x + i), _mm512_set1_ps(f)));
    }
}

/* The sum of squares is kept in float64. */
static void rms_norm(float *out, const float *x, const float *w, size_t n, float eps)
{
    __m512d a = _mm512_setzero_pd(), b = a;
    for (size_t i = 0; i < n; i += 16) {
        __m512 v = _mm512_maskz_loadu_ps(tail16(n - i), x + i);
        __m512d lo = _mm512_cvtps_pd(_mm512_castps512_ps256(v)), hi = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
        a = _mm512_fmadd_pd(lo, lo, a);
        b = _mm512_fmadd_pd(hi, hi, b);
    }
    double mean = _mm512_reduce_add_pd(_mm512_add_pd(a, b)) / (double)n;
    __m512 f = _mm512_set1_ps((float)(1.0 / sqrt(mean + (double)eps)));
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 k = tail16(n - i);
        __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(k, x + i), f);
        _mm512_mask_storeu_ps(out + i, k, _mm512_mul_ps(v, _mm512_maskz_loadu_ps(k, w + i)));
    }
}

static void silu_mul(float *out, const float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 k = tail16(n - i);
        __m512 g = _mm512_maskz_loadu_ps(k, gate + i), u = _mm512_maskz_loadu_ps(k, up + i), one = _mm512_set1_ps(1);
        __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), g));
        _mm512_mask_storeu_ps(out + i, k, _mm512_mul_ps(_mm512_div_ps(g, _mm512_add_ps(one, e)), u));
    }
}

/* As the scalar one. */
static void gelu_mul(float *out, const float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 k = tail16(n - i);
        __m512 g = _mm512_maskz_loadu_ps(k, gate + i), cube = _mm512_mul_ps(_mm512_mul_ps(g, g), g), one = _mm512_set1_ps(1);
        __m512 u = _mm512_mul_ps(_mm512_set1_ps(-1.5957691216f), _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cube, g));
        __m512 s = _mm512_div_ps(g, _mm512_add_ps(one, exp16(u)));
        _mm512_mask_storeu_ps(out + i, k, _mm512_mul_ps(s, _mm512_maskz_loadu_ps(k, up + i)));
    }
}

static void add(float *x, const float *y, size_t n)
{
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 k = tail16(n - i);
        _mm512_mask_storeu_ps(x + i, k, _mm512_add_ps(_mm512_maskz_loadu_ps(k, x + i), _mm512_maskz_loadu_ps(k, y + i)));
    }
}

/* Products and sums unfused, as in the scalar level: the same bits. */
static void rope(float *x, const float *cs, size_t rot, bool halves)
{
    size_t h = rot / 2;
    const float *sn = cs + h;
    if (halves) {
        for (size_t i = 0; i < h; i += 16) {
            __mmask16 k = tail16(h - i);
            __m512 u = _mm512_maskz_loadu_ps(k, x + i), v = _mm512_maskz_loadu_ps(k, x + h + i);
            __m512 c = _mm512_maskz_loadu_ps(k, cs + i), s = _mm512_maskz_loadu_ps(k, sn + i);
            _mm512_mask_storeu_ps(x + i, k, _mm512_sub_ps(_mm512_mul_ps(u, c), _mm512_mul_ps(v, s)));
            _mm512_mask_storeu_ps(x + h + i, k, _mm512_add_ps(_mm512_mul_ps(u, s), _mm512_mul_ps(v, c)));
        }
        return;
    }
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    for (size_t i = 0; i < h; i += 8) { /* pairs */
        __mmask16 k = tail16(2 * (h - i)), half = (__mmask16)(tail16(h - i) & 0xff);
        __m512 v = _mm512_maskz_loadu_ps(k, x + 2 * i), swapped = _mm512_permute_ps(v, 0xb1);
        __m512 c = _mm512_permutexvar_ps(twice, _mm512_maskz_loadu_ps(half, cs + i));
        __m512 s = _mm512_permutexvar_ps(twice, _mm512_maskz_loadu_ps(half, sn + i));
        __m512 p = _mm512_mul_ps(v, c), q = _mm512_mul_ps(swapped, s);
        _mm512_mask_storeu_ps(x + 2 * i, k, _mm512_mask_sub_ps(_mm512_add_ps(p, q), 0x5555, p, q));
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

void eng_kernels_avx512(eng_kernels *k, bool bf16)
{
    k->name = bf16 ? "avx512 (VNNI, BF16)" : "avx512 (VNNI)";
    k->quantize_q8 = quantize_q8;
    k->max = max;
    k->softmax = softmax;
    k->scale = scale;
    k->rms_norm = rms_norm;
    k->silu_mul = silu_mul;
    k->logits_max = logits_max;
    k->logits_sum = logits_sum;
    k->gelu_mul = gelu_mul;
    k->add = add;
    k->rope = rope;
    eng_avx512_gemv(k);
    eng_avx512_gemv_super(k);
    eng_avx512_gemm(k);
    eng_avx512_gemm_q8(k);
    k->prefill_i16 = false; /* float32's products here are as fast, bf16's twice */
    eng_avx512_attention(k);
    if (!bf16)
        return;
    eng_avx512_gemm_bf16(k);
    eng_avx512_attention_bf16(k);
}
#endif
