/* AVX2 kernels over KV rows: float32, float16, bfloat16, q8_0. */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_avx2.h"

#include <math.h>

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

static void kv_store_q8_0(const float *x, void *row, size_t n)
{
    eng_q8_0 *b = row;
    for (size_t i = 0; i < n; i += 32, b++) {
        __m256 v[4];
        __m256i most = _mm256_setzero_si256();
        for (size_t j = 0; j < 4; j++) { /* of these bits NaN has the largest */
            v[j] = i + 8 * j < n ? load8f(x + i + 8 * j, n - i - 8 * j) : _mm256_setzero_ps();
            most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_castps_si256(v[j]), _mm256_set1_epi32(0x7fffffff)));
        }
        __m128i m = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
        m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
        m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
        float max = _mm_cvtss_f32(_mm_castsi128_ps(m)) / 127.0f;
        b->d = eng_f32_to_f16(max > 65504 ? 65504 : max);
        float d = eng_f16_to_f32(b->d), inv = d == 0 ? 0 : 1 / d;
        for (int j = 0; j < 4; j++) {
            __m256 y = _mm256_min_ps(_mm256_mul_ps(v[j], _mm256_set1_ps(inv)), _mm256_set1_ps(127)); /* NaN: 127 */
            __m256i q = _mm256_cvtps_epi32(_mm256_max_ps(y, _mm256_set1_ps(-127)));
            __m128i h = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
            _mm_storel_epi64((void *)(b->q + 8 * j), _mm_packs_epi16(h, h));
        }
    }
}

static void kv_load_q8_0(const void *row, float *out, size_t n)
{
    for (size_t i = 0; i < n; i += 8)
        store8f(out + i, n - i, load8(ENG_Q8_0, row, i, n));
}

enum { PV_CHUNK = 32 }; /* rows that all heads and dims pass over before the next ones: they stay in the first cache */

/* One tile of up to 3 heads fills the registers; 4 are two and two. */
INLINE int heads_of(size_t left)
{
    return left == 4 ? 2 : left > 3 ? 3 : (int)left;
}

#define EACH_HEADS(TILE, N, ...)                                                                                                           \
    switch (N) {                                                                                                                           \
    case 1: TILE(1, __VA_ARGS__); break;                                                                                                   \
    case 2: TILE(2, __VA_ARGS__); break;                                                                                                   \
    default: TILE(3, __VA_ARGS__); break;                                                                                                  \
    }

/* Rows k[0 .. 3] by ng queries: one 8-lane accumulator each, d in rising order. Stores the scores of the first `left` rows. */
INLINE void qk_tile(const int ng, const eng_type t, float *s, size_t lds, const float *q, const char *const k[4], size_t left, size_t d)
{
    __m256 acc[3][4];
    for (int g = 0; g < ng; g++)
        for (int r = 0; r < 4; r++)
            acc[g][r] = _mm256_setzero_ps();
    for (size_t i = 0; i < d; i += 8) {
        __m256 u[3];
        for (int g = 0; g < ng; g++)
            u[g] = load8f(q + (size_t)g * d + i, d - i);
        for (int r = 0; r < 4; r++) {
            __m256 v = load8(t, k[r], i, d);
            for (int g = 0; g < ng; g++)
                acc[g][r] = _mm256_fmadd_ps(u[g], v, acc[g][r]);
        }
    }
    for (int g = 0; g < ng; g++) {
        float sums[4];
        store_sums(left == 4 ? s + (size_t)g * lds : sums, acc[g], 4);
        if (left < 4)
            memcpy(s + (size_t)g * lds, sums, left * sizeof *sums);
    }
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
            EACH_HEADS(qk_tile, n, t, s + g * lds + r, lds, q + g * d, k, left, d)
        }
    }
}

/* ng outputs of up to 32 dims (part: fewer), held in registers over all rows. ids == NULL: rows 0, 1, 2 ...; fetch: asks for later rows. */
INLINE void pv_tile(const int ng, const bool part, const eng_type t, float *o, const float *p, size_t ldp, const uint32_t *ids, bool fetch,
                    const char *v, size_t stride, size_t rows, size_t i, size_t d)
{
    enum { ROWS_AHEAD = 8 }; /* of gathered rows */
    const size_t at = t == ENG_Q8_0 ? i / 32 * sizeof(eng_q8_0) : i * (t == ENG_F32 ? 4 : 2);
    __m256 acc[3][4];
    for (int g = 0; g < ng; g++)
        for (size_t j = 0; j < 4; j++)
            acc[g][j] = part && i + 8 * j >= d ? _mm256_setzero_ps() : load8f(o + (size_t)g * d + i + 8 * j, part ? d - i - 8 * j : 8);
    for (size_t r = 0; r < rows; r++) {
        const char *row = v + (ids ? ids[r] : r) * stride;
        if (ids && r + ROWS_AHEAD < rows)
            _mm_prefetch(v + ids[r + ROWS_AHEAD] * stride + at, _MM_HINT_T0);
        if (fetch)
            for (size_t byte = 0; byte < (t == ENG_F32 ? 128 : 64); byte += 64)
                prefetch_rows(row + at + byte);
        __m256 f[3];
        for (int g = 0; g < ng; g++)
            f[g] = _mm256_broadcast_ss(p + (size_t)g * ldp + r);
        for (size_t j = 0; j < 4; j++) {
            if (part && i + 8 * j >= d)
                break;
            __m256 u = load8(t, row, i + 8 * j, part ? d : i + 8 * j + 8);
            for (int g = 0; g < ng; g++)
                acc[g][j] = _mm256_fmadd_ps(f[g], u, acc[g][j]);
        }
    }
    for (int g = 0; g < ng; g++)
        for (size_t j = 0; j < 4; j++)
            if (!part || i + 8 * j < d)
                store8f(o + (size_t)g * d + i + 8 * j, part ? d - i - 8 * j : 8, acc[g][j]);
}

INLINE void pv_dims(const int ng, const eng_type t, float *o, const float *p, size_t ldp, const uint32_t *ids, bool fetch, const void *v,
                    size_t stride, size_t rows, size_t d)
{
    size_t i = 0;
    for (; i + 32 <= d; i += 32)
        pv_tile(ng, false, t, o, p, ldp, ids, fetch, v, stride, rows, i, d);
    if (i < d)
        pv_tile(ng, true, t, o, p, ldp, ids, fetch, v, stride, rows, i, d);
}

INLINE void pv_any(const eng_type t, float *o, const float *p, size_t ldp, size_t group, const void *values, size_t stride, size_t rows,
                   size_t d)
{
    for (size_t r = 0; r < rows; r += PV_CHUNK) {
        const char *v = (const char *)values + r * stride;
        size_t n = rows - r < PV_CHUNK ? rows - r : PV_CHUNK;
        for (size_t g = 0, ng; g < group; g += ng) {
            ng = (size_t)heads_of(group - g);
            EACH_HEADS(pv_dims, ng, t, o + g * d, p + g * ldp + r, ldp, NULL, g == 0, v, stride, n, d)
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
        pv_dims(1, T, o, p, 0, ids, false, v, stride, n, d);                                                                                     \
    }
PER_TYPE(f32, ENG_F32)
PER_TYPE(f16, ENG_F16)
PER_TYPE(bf16, ENG_BF16)
PER_TYPE(q8_0, ENG_Q8_0)
#undef PER_TYPE

/* ---- prefill ----------------------------------------------------------------------------------------------------- */

/* 2^x for x <= ENG_ATTN_SLACK, within 2^-23; 0 below FLT_MIN. */
INLINE __m256 exp2_8(__m256 x)
{
    __m256 n = _mm256_floor_ps(x), r = _mm256_sub_ps(x, n), p = _mm256_set1_ps(0.001877576673f);
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.008989340095f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.05582631805f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.240153617f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.6931530732f));
    p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1));
    __m256i scaled = _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23));
    return _mm256_and_ps(_mm256_castsi256_ps(scaled), _mm256_cmp_ps(x, _mm256_set1_ps(-126), _CMP_NLT_UQ));
}

/* Eight columns in the lanes; keys by twos, each into a sum of its own. */
static void softmax_columns(float *x, size_t n, size_t cols, float *m, float *l, float *o, size_t d)
{
    for (size_t c = 0; c < cols; c += 8, x += 8, o += 8) {
        __m256 top[2], sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        top[0] = top[1] = _mm256_set1_ps(-INFINITY);
        for (size_t i = 0; i < n; i++)
            top[i % 2] = _mm256_max_ps(top[i % 2], _mm256_loadu_ps(x + i * ENG_NR));
        top[0] = _mm256_max_ps(top[0], top[1]);
        __m256 vm = _mm256_loadu_ps(m + c), vl = _mm256_loadu_ps(l + c);
        __m256 up = _mm256_cmp_ps(top[0], _mm256_add_ps(vm, _mm256_set1_ps(ENG_ATTN_SLACK)), _CMP_GT_OQ);
        if (_mm256_movemask_ps(up)) {
            __m256 f = _mm256_blendv_ps(_mm256_set1_ps(1), exp2_8(_mm256_sub_ps(vm, top[0])), up);
            vm = _mm256_blendv_ps(vm, top[0], up);
            vl = _mm256_mul_ps(vl, f);
            for (size_t r = 0; r < d; r++)
                _mm256_storeu_ps(o + r * ENG_NR, _mm256_mul_ps(f, _mm256_loadu_ps(o + r * ENG_NR)));
            _mm256_storeu_ps(m + c, vm);
        }
        for (size_t i = 0; i < n; i++) {
            __m256 e = exp2_8(_mm256_sub_ps(_mm256_loadu_ps(x + i * ENG_NR), vm));
            _mm256_storeu_ps(x + i * ENG_NR, e);
            sum[i % 2] = _mm256_add_ps(sum[i % 2], e);
        }
        _mm256_storeu_ps(l + c, _mm256_add_ps(vl, _mm256_add_ps(sum[0], sum[1])));
    }
}

void eng_avx2_attention(eng_kernels *k)
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
