/* AVX-512 kernels over KV rows: float32, float16, bfloat16, q8_0. */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_avx512.h"

#include <math.h>

static void kv_store_f16(const float *x, void *row, size_t n)
{
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 k = tail16(n - i);
        __m512 v = _mm512_maskz_loadu_ps(k, x + i); /* the order of the operands below lets NaN through */
        v = _mm512_min_ps(_mm512_set1_ps(65504), _mm512_max_ps(_mm512_set1_ps(-65504), v));
        _mm256_mask_storeu_epi16((uint16_t *)row + i, k, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
}

/* In integers, because VCVTNEPS2BF16 turns denormals into zero and not every CPU here has it. */
static void kv_store_bf16(const float *x, void *row, size_t n)
{
    for (size_t i = 0; i < n; i += 16) {
        __mmask16 k = tail16(n - i);
        __m512 f = _mm512_maskz_loadu_ps(k, x + i);
        __m512i v = _mm512_castps_si512(f), top = _mm512_srli_epi32(v, 16);
        __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
        __m512i r = _mm512_srli_epi32(_mm512_add_epi32(v, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
        r = _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q), top, _mm512_set1_epi32(0x40));
        _mm256_mask_storeu_epi16((uint16_t *)row + i, k, _mm512_cvtepi32_epi16(r));
    }
}

static void kv_store_q8_0(const float *x, void *row, size_t n)
{
    eng_q8_0 *b = row;
    for (size_t i = 0; i < n; i += 32, b++) {
        __m512 v[2] = {_mm512_maskz_loadu_ps(tail16(n - i), x + i), _mm512_maskz_loadu_ps(n - i > 16 ? tail16(n - i - 16) : 0, x + i + 16)};
        const __m512i size = _mm512_set1_epi32(0x7fffffff); /* of these bits NaN has the largest */
        uint32_t bits = _mm512_reduce_max_epu32(_mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(v[0]), size), _mm512_and_si512(_mm512_castps_si512(v[1]), size)));
        float max;
        memcpy(&max, &bits, 4);
        max /= 127.0f;
        b->d = eng_f32_to_f16(max > 65504 ? 65504 : max);
        float d = eng_f16_to_f32(b->d), inv = d == 0 ? 0 : 1 / d;
        for (int j = 0; j < 2; j++) {
            __m512 y = _mm512_min_ps(_mm512_mul_ps(v[j], _mm512_set1_ps(inv)), _mm512_set1_ps(127)); /* NaN: 127 */
            y = _mm512_max_ps(y, _mm512_set1_ps(-127));
            _mm_storeu_si128((void *)(b->q + 16 * j), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(y)));
        }
    }
}

static void kv_load_q8_0(const void *row, float *out, size_t n)
{
    for (size_t i = 0; i < n; i += 16)
        _mm512_mask_storeu_ps(out + i, tail16(n - i), load16(ENG_Q8_0, row, i, tail16(n - i)));
}

/* Bytes of a row before element i. */
INLINE size_t bytes_before(const eng_type t, size_t i)
{
    return t == ENG_Q8_0 ? i / 32 * sizeof(eng_q8_0) : i * (t == ENG_F32 ? 4 : 2);
}

enum { PV_CHUNK = 32 }; /* rows that all heads and dims pass over before the next ones: they stay in the first cache */

/* One tile of up to 7 heads by 4 rows fills the registers; more heads: in halves. */
INLINE int heads_of(size_t left)
{
    return left > 7 ? 4 : (int)left;
}

#define EACH_HEADS(TILE, N, ...)                                                                                                           \
    switch (N) {                                                                                                                           \
    case 1: TILE(1, __VA_ARGS__); break;                                                                                                   \
    case 2: TILE(2, __VA_ARGS__); break;                                                                                                   \
    case 3: TILE(3, __VA_ARGS__); break;                                                                                                   \
    case 4: TILE(4, __VA_ARGS__); break;                                                                                                   \
    case 5: TILE(5, __VA_ARGS__); break;                                                                                                   \
    case 6: TILE(6, __VA_ARGS__); break;                                                                                                   \
    default: TILE(7, __VA_ARGS__); break;                                                                                                  \
    }

/* Rows k[0 .. 3] by ng queries: one 16-lane accumulator each, d in rising order. Stores the scores of the rows in `stored`. */
INLINE void qk_tile(const int ng, const eng_type t, float *s, size_t lds, const float *q, const char *const k[4], __mmask8 stored, size_t d)
{
    __m512 acc[7][4];
    for (int g = 0; g < ng; g++)
        for (int r = 0; r < 4; r++)
            acc[g][r] = _mm512_setzero_ps();
    for (size_t i = 0; i < d; i += 16) {
        __mmask16 m = tail16(d - i);
        __m512 v[4];
        for (int r = 0; r < 4; r++)
            v[r] = m == 0xffff ? load16(t, k[r], i, 0xffff) : load16(t, k[r], i, m);
        for (int g = 0; g < ng; g++) {
            __m512 u = m == 0xffff ? _mm512_loadu_ps(q + (size_t)g * d + i) : _mm512_maskz_loadu_ps(m, q + (size_t)g * d + i);
            for (int r = 0; r < 4; r++)
                acc[g][r] = _mm512_fmadd_ps(u, v[r], acc[g][r]);
        }
    }
    for (int g = 0; g < ng; g++)
        _mm_mask_storeu_ps(s + (size_t)g * lds, stored, sum4(acc[g][0], acc[g][1], acc[g][2], acc[g][3]));
}

INLINE void qk_any(const eng_type t, float *s, size_t lds, const float *q, size_t group, const void *keys, size_t stride, size_t rows,
                   size_t d)
{
    for (size_t r = 0; r < rows; r += 4) {
        size_t left = rows - r < 4 ? rows - r : 4;
        const char *first = (const char *)keys + r * stride, *k[4];
        for (size_t i = 0; i < 4; i++) /* beyond the last row: that one again */
            k[i] = first + (i < left ? i : left - 1) * stride;
        for (size_t i = 0; i < 4 * stride; i += 64)
            prefetch_rows(first + i);
        for (size_t g = 0, n; g < group; g += n) {
            n = (size_t)heads_of(group - g);
            EACH_HEADS(qk_tile, n, t, s + g * lds + r, lds, q + g * d, k, (__mmask8)((1u << left) - 1), d)
        }
    }
}

/* ng outputs of up to 16 * nj dims, held in registers over all rows. ids == NULL: rows 0, 1, 2 ...; fetch: asks for later rows. */
INLINE void pv_tile(const int ng, const int nj, const eng_type t, float *o, const float *p, size_t ldp, const uint32_t *ids, bool fetch,
                    const char *v, size_t stride, size_t rows, size_t i, size_t d)
{
    enum { ROWS_AHEAD = 8 }; /* of gathered rows */
    const size_t at = bytes_before(t, i), end = bytes_before(t, i + 16 * (size_t)nj);
    __m512 acc[7][4];
    __mmask16 m[4];
    for (int j = 0; j < nj; j++)
        m[j] = d - i > 16 * (size_t)j ? tail16(d - i - 16 * (size_t)j) : 0;
    for (int g = 0; g < ng; g++)
        for (int j = 0; j < nj; j++)
            acc[g][j] = _mm512_maskz_loadu_ps(m[j], o + (size_t)g * d + i + 16 * j);
    for (size_t r = 0; r < rows; r++) {
        const char *row = v + (ids ? ids[r] : r) * stride;
        if (ids && r + ROWS_AHEAD < rows)
            for (size_t byte = at; byte < end; byte += 64)
                _mm_prefetch(v + ids[r + ROWS_AHEAD] * stride + byte, _MM_HINT_T0);
        if (fetch)
            for (size_t byte = at; byte < end; byte += 64)
                prefetch_rows(row + byte);
        __m512 u[4];
        for (int j = 0; j < nj; j++)
            u[j] = load16(t, row, i + 16 * (size_t)j, m[j]);
        for (int g = 0; g < ng; g++) {
            __m512 f = _mm512_set1_ps(p[(size_t)g * ldp + r]);
            for (int j = 0; j < nj; j++)
                acc[g][j] = _mm512_fmadd_ps(f, u[j], acc[g][j]);
        }
    }
    for (int g = 0; g < ng; g++)
        for (int j = 0; j < nj; j++)
            _mm512_mask_storeu_ps(o + (size_t)g * d + i + 16 * j, m[j], acc[g][j]);
}

/* Heads by 64 dims, or by 32 where that would not fit into the registers. */
#define PV_DIMS(NG, T, O, P, LDP, FETCH, V, STRIDE, ROWS, D)                                                                            \
    for (size_t i = 0; i < (D); i += (NG) > 4 ? 32 : 64)                                                                                   \
    pv_tile(NG, (NG) > 4 ? 2 : 4, T, O, P, LDP, NULL, FETCH, V, STRIDE, ROWS, i, D)

INLINE void pv_any(const eng_type t, float *o, const float *p, size_t ldp, size_t group, const void *values, size_t stride, size_t rows,
                   size_t d)
{
    for (size_t r = 0; r < rows; r += PV_CHUNK) {
        const char *v = (const char *)values + r * stride;
        size_t n = rows - r < PV_CHUNK ? rows - r : PV_CHUNK;
        for (size_t g = 0, ng; g < group; g += ng) {
            ng = (size_t)heads_of(group - g);
            EACH_HEADS(PV_DIMS, ng, t, o + g * d, p + g * ldp + r, ldp, g == 0, v, stride, n, d)
        }
    }
}

#define PER_TYPE(NAME, T)                                                                                                                  \
    static void qk_##NAME(float *s, size_t lds, const float *q, size_t group, const void *k, size_t stride, size_t rows, size_t d)         \
    {                                                                                                                                      \
        qk_any(T, s, lds, q, group, k, stride, rows, d);                                                                                   \
    }                                                                                                                                      \
    static void pv_##NAME(float *o, const float *p, size_t ldp, size_t group, const void *v, size_t stride, size_t rows, size_t d)         \
    {                                                                                                                                      \
        pv_any(T, o, p, ldp, group, v, stride, rows, d);                                                                                   \
    }                                                                                                                                      \
    static void pv_gather_##NAME(float *o, const float *p, const uint32_t *ids, size_t n, const void *v, size_t stride, size_t d)          \
    {                                                                                                                                      \
        for (size_t i = 0; i < d; i += 64)                                                                                                 \
            pv_tile(1, 4, T, o, p, 0, ids, false, v, stride, n, i, d);                                                                               \
    }
PER_TYPE(f32, ENG_F32)
PER_TYPE(f16, ENG_F16)
PER_TYPE(bf16, ENG_BF16)
PER_TYPE(q8_0, ENG_Q8_0)
#undef PER_TYPE

/* ---- prefill ----------------------------------------------------------------------------------------------------- */

/* 2^x for x <= ENG_ATTN_SLACK, within 2^-23; 0 below FLT_MIN: a denormal result would take some hundred cycles. */
INLINE __m512 exp2_16(__m512 x)
{
    __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), p = _mm512_set1_ps(0.001877576673f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.008989340095f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.05582631805f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.240153617f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.6931530732f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126), _CMP_NLT_UQ), p, x);
}

/* Sixteen columns in the lanes; keys by fours, each into a sum of its own. */
static void softmax_columns(float *x, size_t n, size_t cols, float *m, float *l, float *o, size_t d)
{
    for (size_t c = 0; c < cols; c += 16, x += 16, o += 16) {
        __m512 top[4], sum[4];
        for (int j = 0; j < 4; j++) {
            top[j] = _mm512_set1_ps(-INFINITY);
            sum[j] = _mm512_setzero_ps();
        }
        size_t i = 0;
        for (; i + 4 <= n; i += 4)
            for (int j = 0; j < 4; j++)
                top[j] = _mm512_max_ps(top[j], _mm512_loadu_ps(x + (i + (size_t)j) * ENG_NR));
        for (; i < n; i++)
            top[0] = _mm512_max_ps(top[0], _mm512_loadu_ps(x + i * ENG_NR));
        top[0] = _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
        __m512 vm = _mm512_loadu_ps(m + c), vl = _mm512_loadu_ps(l + c);
        __mmask16 up = _mm512_cmp_ps_mask(top[0], _mm512_add_ps(vm, _mm512_set1_ps(ENG_ATTN_SLACK)), _CMP_GT_OQ);
        if (up) {
            __m512 f = _mm512_mask_mov_ps(_mm512_set1_ps(1), up, exp2_16(_mm512_sub_ps(vm, top[0])));
            vm = _mm512_mask_mov_ps(vm, up, top[0]);
            vl = _mm512_mul_ps(vl, f);
            for (size_t r = 0; r < d; r++)
                _mm512_storeu_ps(o + r * ENG_NR, _mm512_mul_ps(f, _mm512_loadu_ps(o + r * ENG_NR)));
            _mm512_storeu_ps(m + c, vm);
        }
        for (i = 0; i + 4 <= n; i += 4)
            for (int j = 0; j < 4; j++) {
                float *row = x + (i + (size_t)j) * ENG_NR;
                __m512 e = exp2_16(_mm512_sub_ps(_mm512_loadu_ps(row), vm));
                _mm512_storeu_ps(row, e);
                sum[j] = _mm512_add_ps(sum[j], e);
            }
        for (; i < n; i++) {
            __m512 e = exp2_16(_mm512_sub_ps(_mm512_loadu_ps(x + i * ENG_NR), vm));
            _mm512_storeu_ps(x + i * ENG_NR, e);
            sum[i % 4] = _mm512_add_ps(sum[i % 4], e);
        }
        vl = _mm512_add_ps(vl, _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3])));
        _mm512_storeu_ps(l + c, vl);
    }
}

void eng_avx512_attention(eng_kernels *k)
{
    k->softmax_columns = softmax_columns;
    k->kv_store[ENG_KV_F16] = kv_store_f16;
    k->kv_store[ENG_KV_BF16] = kv_store_bf16;
    k->kv_load[ENG_KV_Q8_0] = kv_load_q8_0;
    k->kv_store[ENG_KV_Q8_0] = kv_store_q8_0;
    k->qk[ENG_KV_F32] = qk_f32;
    k->qk[ENG_KV_F16] = qk_f16;
    k->qk[ENG_KV_BF16] = qk_bf16;
    k->qk[ENG_KV_Q8_0] = qk_q8_0;
    k->pv[ENG_KV_F32] = pv_f32;
    k->pv[ENG_KV_F16] = pv_f16;
    k->pv[ENG_KV_BF16] = pv_bf16;
    k->pv[ENG_KV_Q8_0] = pv_q8_0;
    k->pv_gather[ENG_KV_F32] = pv_gather_f32;
    k->pv_gather[ENG_KV_F16] = pv_gather_f16;
    k->pv_gather[ENG_KV_BF16] = pv_gather_bf16;
    k->pv_gather[ENG_KV_Q8_0] = pv_gather_q8_0;
}
#endif
