/* AVX2 kernels over KV rows: float32, float16, bfloat16. */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_avx2.h"

static void kv_store_f16(const float *x, void *row, size_t n)
{
    for (size_t i = 0; i < n; i += 8) {
        __m256 v = load8f(x + i, n - i); /* the order of the operands below lets NaN through */
        v = _mm256_min_ps(_mm256_set1_ps(65504), _mm256_max_ps(_mm256_set1_ps(-65504), v));
        store8h((uint16_t *)row + i, n - i, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
}

static void kv_store_bf16(const float *x, void *row, size_t n)
{
    for (size_t i = 0; i < n; i += 8) {
        __m256 f = load8f(x + i, n - i);
        __m256i v = _mm256_castps_si256(f), top = _mm256_srli_epi32(v, 16);
        __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
        __m256i r = _mm256_srli_epi32(_mm256_add_epi32(v, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
        __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(f, f, _CMP_UNORD_Q));
        r = _mm256_blendv_epi8(r, _mm256_or_si256(top, _mm256_set1_epi32(0x40)), nan);
        store8h((uint16_t *)row + i, n - i, _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1)));
    }
}

/* nr (1 or 4) rows by ng (1 or 2) queries: one 8-lane accumulator each, d in rising order. */
INLINE void qk_tile(const eng_type t, const int ng, const int nr, float *s, size_t lds, const float *q, const char *k, size_t stride,
                    size_t d)
{
    __m256 acc[2][4];
    for (int g = 0; g < ng; g++)
        for (int r = 0; r < nr; r++)
            acc[g][r] = _mm256_setzero_ps();
    for (size_t i = 0; i < d; i += 8) {
        __m256 v[4];
        for (int r = 0; r < nr; r++)
            v[r] = load8(t, k + (size_t)r * stride, i, d);
        for (int g = 0; g < ng; g++) {
            __m256 u = load8f(q + (size_t)g * d + i, d - i);
            for (int r = 0; r < nr; r++)
                acc[g][r] = _mm256_fmadd_ps(u, v[r], acc[g][r]);
        }
    }
    for (int g = 0; g < ng; g++)
        store_sums(s + (size_t)g * lds, acc[g], nr);
}

INLINE void qk_rows(const eng_type t, const int ng, float *s, size_t lds, const float *q, const char *k, size_t stride, size_t rows,
                    size_t d)
{
    size_t r = 0;
    for (; r + 4 <= rows; r += 4)
        qk_tile(t, ng, 4, s + r, lds, q, k + r * stride, stride, d);
    for (; r < rows; r++)
        qk_tile(t, ng, 1, s + r, lds, q, k + r * stride, stride, d);
}

INLINE void qk_any(const eng_type t, float *s, size_t lds, const float *q, size_t group, const void *k, size_t stride, size_t rows,
                   size_t d)
{
    size_t g = 0;
    for (; g + 2 <= group; g += 2)
        qk_rows(t, 2, s + g * lds, lds, q + g * d, k, stride, rows, d);
    if (g < group)
        qk_rows(t, 1, s + g * lds, lds, q + g * d, k, stride, rows, d);
}

/* ng (1 or 2) outputs of up to 32 dims (part: fewer), held in registers over all rows. ids == NULL: rows 0, 1, 2 ... */
INLINE void pv_tile(const eng_type t, const int ng, const bool part, float *o, const float *p, size_t ldp, const uint32_t *ids,
                    const char *v, size_t stride, size_t rows, size_t i, size_t d)
{
    enum { AHEAD = 8 }; /* gathered rows are prefetched this many iterations early */
    __m256 acc[2][4];
    for (int g = 0; g < ng; g++)
        for (size_t j = 0; j < 4; j++)
            acc[g][j] = part && i + 8 * j >= d ? _mm256_setzero_ps() : load8f(o + (size_t)g * d + i + 8 * j, part ? d - i - 8 * j : 8);
    for (size_t r = 0; r < rows; r++) {
        const char *row = v + (ids ? ids[r] : r) * stride;
        if (ids && r + AHEAD < rows)
            _mm_prefetch(v + ids[r + AHEAD] * stride + i * (t == ENG_F32 ? 4 : 2), _MM_HINT_T0);
        for (size_t j = 0; j < 4; j++) {
            if (part && i + 8 * j >= d)
                break;
            __m256 u = load8(t, row, i + 8 * j, part ? d : i + 8 * j + 8);
            for (int g = 0; g < ng; g++)
                acc[g][j] = _mm256_fmadd_ps(_mm256_broadcast_ss(p + (size_t)g * ldp + r), u, acc[g][j]);
        }
    }
    for (int g = 0; g < ng; g++)
        for (size_t j = 0; j < 4; j++)
            if (!part || i + 8 * j < d)
                store8f(o + (size_t)g * d + i + 8 * j, part ? d - i - 8 * j : 8, acc[g][j]);
}

INLINE void pv_heads(const eng_type t, const int ng, float *o, const float *p, size_t ldp, const uint32_t *ids, const void *v,
                     size_t stride, size_t rows, size_t d)
{
    size_t i = 0;
    for (; i + 32 <= d; i += 32)
        pv_tile(t, ng, false, o, p, ldp, ids, v, stride, rows, i, d);
    if (i < d)
        pv_tile(t, ng, true, o, p, ldp, ids, v, stride, rows, i, d);
}

INLINE void pv_any(const eng_type t, float *o, const float *p, size_t ldp, size_t group, const void *v, size_t stride, size_t rows,
                   size_t d)
{
    size_t g = 0;
    for (; g + 2 <= group; g += 2)
        pv_heads(t, 2, o + g * d, p + g * ldp, ldp, NULL, v, stride, rows, d);
    if (g < group)
        pv_heads(t, 1, o + g * d, p + g * ldp, ldp, NULL, v, stride, rows, d);
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
        pv_heads(T, 1, o, p, 0, ids, v, stride, n, d);                                                                                     \
    }
PER_TYPE(f32, ENG_F32)
PER_TYPE(f16, ENG_F16)
PER_TYPE(bf16, ENG_BF16)
#undef PER_TYPE

void eng_avx2_attention(eng_kernels *k)
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
