/* AVX2 level (with FMA and F16C): the table, and the element-wise kernels. */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_avx2.h"
#include "kernels_logits.h"

#include <float.h>
#include <math.h>

INLINE int32_t sum8i(__m256i v)
{
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

/* The same codes, d and s as the scalar level, bit for bit. */
static void quantize_q8(const float *x, eng_q8_act *out, size_t n)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    for (size_t b = 0; b < n / 32; b++) {
        __m256 v[4], m = _mm256_setzero_ps();
        for (int j = 0; j < 4; j++) {
            v[j] = _mm256_loadu_ps(x + 32 * b + 8 * j);
            m = _mm256_max_ps(m, _mm256_andnot_ps(sign, v[j]));
        }
        float amax = max8(m), d = amax < 1e-30f ? 0.0f : amax / 127.0f, inv = amax < 1e-30f ? 0.0f : 127.0f / amax;
        __m256i q[4];
        for (int j = 0; j < 4; j++)
            q[j] = _mm256_cvtps_epi32(_mm256_mul_ps(v[j], _mm256_set1_ps(inv)));
        __m256i sum = _mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3]));
        /* the packs work within 128-bit halves; the permutation puts the dwords back in order */
        __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
        bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((void *)(out->q + 32 * b), bytes);
        out->d[b] = d;
        out->s[b] = d * (float)sum8i(sum);
    }
}

static float max(const float *x, size_t n)
{
    __m256 a = _mm256_set1_ps(-INFINITY), b = a;
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        a = _mm256_max_ps(a, _mm256_loadu_ps(x + i));
        b = _mm256_max_ps(b, _mm256_loadu_ps(x + i + 8));
    }
    float m = max8(_mm256_max_ps(a, b));
    for (; i < n; i++)
        m = x[i] > m ? x[i] : m;
    return m;
}

/* Lane j of two sums the elements j, j + 16, ...: trailing zeros change no lane. */
static float softmax(float *x, size_t n, float m)
{
    __m256 sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    const __m256 none = _mm256_set1_ps(-INFINITY);
    for (size_t i = 0; i < n; i += 8) {
        __m256 v = load8f(x + i, n - i);
        if (n - i < 8)
            v = _mm256_blendv_ps(none, v, _mm256_castsi256_ps(tail8(n - i)));
        __m256 t = _mm256_sub_ps(v, _mm256_set1_ps(m));
        /* below -87.336 the result is below FLT_MIN, or within 1 in 1000 of it; NaN is not "below" */
        __m256 keep = _mm256_and_ps(_mm256_cmp_ps(t, _mm256_set1_ps(-87.336f), _CMP_NLT_UQ), _mm256_cmp_ps(v, none, _CMP_NEQ_UQ));
        __m256 e = _mm256_and_ps(exp8(t), keep);
        store8f(x + i, n - i, e);
        sum[i / 8 % 2] = _mm256_add_ps(sum[i / 8 % 2], e);
    }
    float total;
    sum[0] = _mm256_add_ps(sum[0], sum[1]);
    store_sums(&total, sum, 1);
    return total;
}

static void scale(float *x, size_t n, float f)
{
    for (size_t i = 0; i < n; i += 8)
        store8f(x + i, n - i, _mm256_mul_ps(load8f(x + i, n - i), _mm256_set1_ps(f)));
}

/* The sum of squares is kept in float64. */
static void rms_norm(float *out, const float *x, const float *w, size_t n, float eps)
{
    __m256d a = _mm256_setzero_pd(), b = a;
    for (size_t i = 0; i < n; i += 8) {
        __m256 v = load8f(x + i, n - i);
        __m256d lo = _mm256_cvtps_pd(_mm256_castps256_ps128(v)), hi = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
        a = _mm256_fmadd_pd(lo, lo, a);
        b = _mm256_fmadd_pd(hi, hi, b);
    }
    double lanes[4];
    _mm256_storeu_pd(lanes, _mm256_add_pd(a, b));
    double mean = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) / (double)n;
    __m256 f = _mm256_set1_ps((float)(1.0 / sqrt(mean + (double)eps)));
    for (size_t i = 0; i < n; i += 8) {
        __m256 v = _mm256_mul_ps(load8f(x + i, n - i), f);
        store8f(out + i, n - i, _mm256_mul_ps(v, load8f(w + i, n - i)));
    }
}

static void silu_mul(float *out, const float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i += 8) {
        __m256 g = load8f(gate + i, n - i), e = exp8(_mm256_sub_ps(_mm256_setzero_ps(), g));
        __m256 s = _mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1), e));
        /* beyond the range of exp8 the true value is below 1e-33; clamped, a huge negative gate would give a huge result */
        s = _mm256_and_ps(s, _mm256_cmp_ps(g, _mm256_set1_ps(-88), _CMP_NLT_UQ));
        store8f(out + i, n - i, _mm256_mul_ps(s, load8f(up + i, n - i)));
    }
}

/* As the scalar one. */
static void gelu_mul(float *out, const float *gate, const float *up, size_t n)
{
    for (size_t i = 0; i < n; i += 8) {
        __m256 g = load8f(gate + i, n - i), cube = _mm256_mul_ps(_mm256_mul_ps(g, g), g);
        __m256 u = _mm256_mul_ps(_mm256_set1_ps(-1.5957691216f), _mm256_fmadd_ps(_mm256_set1_ps(0.044715f), cube, g));
        __m256 s = _mm256_div_ps(g, _mm256_add_ps(_mm256_set1_ps(1), exp8(u)));
        s = _mm256_and_ps(s, _mm256_cmp_ps(u, _mm256_set1_ps(88), _CMP_NGT_UQ)); /* as in silu_mul */
        store8f(out + i, n - i, _mm256_mul_ps(s, load8f(up + i, n - i)));
    }
}

static void add(float *x, const float *y, size_t n)
{
    for (size_t i = 0; i < n; i += 8)
        store8f(x + i, n - i, _mm256_add_ps(load8f(x + i, n - i), load8f(y + i, n - i)));
}

/* Products and sums unfused, as in the scalar level: the same bits. */
static void rope(float *x, const float *cs, size_t rot, bool halves)
{
    size_t h = rot / 2;
    const float *sn = cs + h;
    if (halves) {
        for (size_t i = 0; i < h; i += 8) {
            size_t left = h - i;
            __m256 u = load8f(x + i, left), v = load8f(x + h + i, left), c = load8f(cs + i, left), s = load8f(sn + i, left);
            store8f(x + i, left, _mm256_sub_ps(_mm256_mul_ps(u, c), _mm256_mul_ps(v, s)));
            store8f(x + h + i, left, _mm256_add_ps(_mm256_mul_ps(u, s), _mm256_mul_ps(v, c)));
        }
        return;
    }
    const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    for (size_t i = 0; i < h; i += 4) { /* pairs */
        size_t left = h - i < 4 ? h - i : 4;
        __m256 v = load8f(x + 2 * i, 2 * left), swapped = _mm256_permute_ps(v, 0xb1);
        __m256 c = _mm256_permutevar8x32_ps(load8f(cs + i, left), twice), s = _mm256_permutevar8x32_ps(load8f(sn + i, left), twice);
        store8f(x + 2 * i, 2 * left, _mm256_addsub_ps(_mm256_mul_ps(v, c), _mm256_mul_ps(swapped, s)));
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

void eng_kernels_avx2(eng_kernels *k)
{
    k->name = "avx2";
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
    eng_avx2_gemv(k);
    eng_avx2_gemm(k);
    eng_avx2_gemm_i16(k);
    eng_avx2_attention(k);
}
#endif
