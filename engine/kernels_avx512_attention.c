/* AVX-512 kernels over KV rows: float32, float16, bfloat16. */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_avx512.h"

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

/* nr (1 or 4) rows by ng (1..4) queries: one 16-lane accumulator each, d in rising order. whole: d is a multiple of 16. */
INLINE void qk_tile(const eng_type t, const bool whole, const int ng, const int nr, float *s, size_t lds, const float *q, const char *k,
                    size_t stride, size_t d)
{
    __m512 acc[4][4];
    for (int g = 0; g < ng; g++)
        for (int r = 0; r < nr; r++)
            acc[g][r] = _mm512_setzero_ps();
    for (size_t i = 0; i < d; i += 16) {
        __mmask16 m = whole ? 0xffff : tail16(d - i);
        __m512 v[4];
        for (int r = 0; r < nr; r++)
            v[r] = load16(t, k + (size_t)r * stride, i, m);
        for (int g = 0; g < ng; g++) {
            __m512 u = _mm512_maskz_loadu_ps(m, q + (size_t)g * d + i);
            for (int r = 0; r < nr; r++)
                acc[g][r] = _mm512_fmadd_ps(u, v[r], acc[g][r]);
        }
    }
    for (int g = 0; g < ng; g++)
        store_sums(s + (size_t)g * lds, acc[g], nr);
}

INLINE void qk_rows(const eng_type t, const int ng, float *s, size_t lds, const float *q, const char *k, size_t stride, size_t rows,
                    size_t d)
{
    size_t r = 0;
    if (d % 16 == 0)
        for (; r + 4 <= rows; r += 4)
            qk_tile(t, true, ng, 4, s + r, lds, q, k + r * stride, stride, d);
    for (; r + 4 <= rows; r += 4)
        qk_tile(t, false, ng, 4, s + r, lds, q, k + r * stride, stride, d);
    for (; r < rows; r++)
        qk_tile(t, false, ng, 1, s + r, lds, q, k + r * stride, stride, d);
}

INLINE void qk_any(const eng_type t, float *s, size_t lds, const float *q, size_t group, const void *k, size_t stride, size_t rows,
                   size_t d)
{
    for (size_t g = 0; g < group; g += 4, s += 4 * lds, q += 4 * d) {
        if (group - g >= 4)
            qk_rows(t, 4, s, lds, q, k, stride, rows, d);
        else if (group - g == 3)
            qk_rows(t, 3, s, lds, q, k, stride, rows, d);
        else if (group - g == 2)
            qk_rows(t, 2, s, lds, q, k, stride, rows, d);
        else
            qk_rows(t, 1, s, lds, q, k, stride, rows, d);
    }
}

/* ng (1..4) outputs of up to 64 dims, held in registers over all rows. ids == NULL: rows 0, 1, 2 ... */
INLINE void pv_tile(const eng_type t, const int ng, float *o, const float *p, size_t ldp, const uint32_t *ids, const char *v, size_t stride,
                    size_t rows, size_t i, size_t d)
{
    enum { AHEAD = 8 }; /* gathered rows are prefetched this many iterations early */
    __m512 acc[4][4];
    __mmask16 m[4];
    for (int j = 0; j < 4; j++)
        m[j] = d - i > 16 * (size_t)j ? tail16(d - i - 16 * (size_t)j) : 0;
    for (int g = 0; g < ng; g++)
        for (int j = 0; j < 4; j++)
            acc[g][j] = _mm512_maskz_loadu_ps(m[j], o + (size_t)g * d + i + 16 * j);
    for (size_t r = 0; r < rows; r++) {
        const char *row = v + (ids ? ids[r] : r) * stride;
        if (ids && r + AHEAD < rows) {
            const char *next = v + ids[r + AHEAD] * stride;
            for (size_t byte = i * 2; byte < (i + 64) * 2 && byte < d * 2; byte += 64)
                _mm_prefetch(next + byte, _MM_HINT_T0);
        }
        __m512 u[4];
        for (int j = 0; j < 4; j++)
            u[j] = load16(t, row, i + 16 * (size_t)j, m[j]);
        for (int g = 0; g < ng; g++) {
            __m512 f = _mm512_set1_ps(p[(size_t)g * ldp + r]);
            for (int j = 0; j < 4; j++)
                acc[g][j] = _mm512_fmadd_ps(f, u[j], acc[g][j]);
        }
    }
    for (int g = 0; g < ng; g++)
        for (int j = 0; j < 4; j++)
            _mm512_mask_storeu_ps(o + (size_t)g * d + i + 16 * j, m[j], acc[g][j]);
}

INLINE void pv_any(const eng_type t, float *o, const float *p, size_t ldp, size_t group, const void *v, size_t stride, size_t rows,
                   size_t d)
{
    for (size_t g = 0; g < group; g += 4, o += 4 * d, p += 4 * ldp)
        for (size_t i = 0; i < d; i += 64) {
            if (group - g >= 4)
                pv_tile(t, 4, o, p, ldp, NULL, v, stride, rows, i, d);
            else if (group - g == 3)
                pv_tile(t, 3, o, p, ldp, NULL, v, stride, rows, i, d);
            else if (group - g == 2)
                pv_tile(t, 2, o, p, ldp, NULL, v, stride, rows, i, d);
            else
                pv_tile(t, 1, o, p, ldp, NULL, v, stride, rows, i, d);
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
            pv_tile(T, 1, o, p, 0, ids, v, stride, n, i, d);                                                                               \
    }
PER_TYPE(f32, ENG_F32)
PER_TYPE(f16, ENG_F16)
PER_TYPE(bf16, ENG_BF16)
#undef PER_TYPE

void eng_avx512_attention(eng_kernels *k)
{
    k->kv_store[ENG_KV_F16] = kv_store_f16;
    k->kv_store[ENG_KV_BF16] = kv_store_bf16;
    k->qk[ENG_KV_F32] = qk_f32;
    k->qk[ENG_KV_F16] = qk_f16;
    k->qk[ENG_KV_BF16] = qk_bf16;
    k->pv[ENG_KV_F32] = pv_f32;
    k->pv[ENG_KV_F16] = pv_f16;
    k->pv[ENG_KV_BF16] = pv_bf16;
    k->pv_gather[ENG_KV_F32] = pv_gather_f32;
    k->pv_gather[ENG_KV_F16] = pv_gather_f16;
    k->pv_gather[ENG_KV_BF16] = pv_gather_bf16;
}
#endif
