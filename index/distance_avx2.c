#include "distance.h"

#include <immintrin.h>
#include <string.h>

static void widen_row(float *dst, const uint8_t *src, idx_type type, uint32_t dim, uint32_t dim_pad)
{
    uint32_t j = 0;
    for (; j + 8 <= dim; j += 8) {
        __m256 v;
        if (type == IDX_F32) {
            v = _mm256_loadu_ps((const float *)(const void *)(src + 4 * (size_t)j));
        } else {
            __m128i h = _mm_loadu_si128((const __m128i *)(const void *)(src + 2 * (size_t)j));
            v = type == IDX_F16 ? _mm256_cvtph_ps(h) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
        }
        _mm256_store_ps(dst + j, v);
    }
    for (; j < dim; j++) {
        uint16_t h;
        if (type == IDX_F32) {
            memcpy(dst + j, src + 4 * (size_t)j, 4);
            continue;
        }
        memcpy(&h, src + 2 * (size_t)j, 2);
        uint32_t u = (uint32_t)h << 16;
        if (type == IDX_F16)
            dst[j] = _cvtsh_ss(h);
        else
            memcpy(dst + j, &u, 4);
    }
    for (; j < dim_pad; j++)
        dst[j] = 0;
}

static void widen(float *dst, const idx_rows *rows, const uint32_t *ids, uint32_t first, uint32_t n)
{
    uint32_t dim_pad = idx_dim_pad(rows->dim);
    for (uint32_t i = 0; i < n; i++)
        widen_row(dst + (size_t)i * dim_pad, idx_row(rows, ids ? ids[i] : first + i), rows->type, rows->dim, dim_pad);
}

/* Sums of 8 vectors, in lane order. */
static inline __m256 sum8(const __m256 *a)
{
    __m256 t0 = _mm256_hadd_ps(a[0], a[1]), t1 = _mm256_hadd_ps(a[2], a[3]);
    __m256 t2 = _mm256_hadd_ps(a[4], a[5]), t3 = _mm256_hadd_ps(a[6], a[7]);
    __m256 u0 = _mm256_hadd_ps(t0, t1), u1 = _mm256_hadd_ps(t2, t3);
    return _mm256_add_ps(_mm256_permute2f128_ps(u0, u1, 0x20), _mm256_permute2f128_ps(u0, u1, 0x31));
}

static void dots(const float *rows, const float *q, uint32_t nq, uint32_t dim_pad, float scale, float *out, size_t ld)
{
    for (uint32_t h = 0; h < nq; h++, q += dim_pad) {
        for (uint32_t half = 0; half < IDX_BLOCK; half += 8) {
            const float *r = rows + (size_t)half * dim_pad;
            __m256 acc[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++)
                acc[i] = _mm256_setzero_ps();
            for (uint32_t j = 0; j < dim_pad; j += 8) {
                __m256 v = _mm256_load_ps(q + j);
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++)
                    acc[i] = _mm256_fmadd_ps(_mm256_load_ps(r + (size_t)i * dim_pad + j), v, acc[i]);
            }
            _mm256_storeu_ps(out + h * ld + half, _mm256_mul_ps(sum8(acc), _mm256_set1_ps(scale)));
        }
    }
}

static float max_of(const float *x, uint32_t n, float init)
{
    __m256 m = _mm256_set1_ps(init);
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
        m = _mm256_max_ps(_mm256_loadu_ps(x + i), m); /* the second operand wins against NaN */
    float lane[8];
    _mm256_storeu_ps(lane, m);
    for (int l = 0; l < 8; l++)
        init = lane[l] > init ? lane[l] : init;
    for (; i < n; i++)
        init = x[i] > init ? x[i] : init;
    return init;
}

/* There is no compress instruction, and few scores pass: one store per passing lane. */
static uint32_t filter(const uint32_t *ids, uint32_t first, const float *scores, uint32_t n, float thr, uint32_t *ret_ids,
                       float *ret_scores)
{
    uint32_t kept = 0, i = 0;
    __m256 t = _mm256_set1_ps(thr);
    for (; i + 8 <= n; i += 8) {
        uint32_t mask = (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(scores + i), t, _CMP_GE_OQ));
        for (; mask; mask &= mask - 1) {
            uint32_t at = i + (uint32_t)__builtin_ctz(mask);
            ret_ids[kept] = ids ? ids[at] : first + at;
            ret_scores[kept++] = scores[at];
        }
    }
    for (; i < n; i++) {
        float s = scores[i];
        ret_ids[kept] = ids ? ids[i] : first + i;
        ret_scores[kept] = s;
        kept += s >= thr;
    }
    return kept;
}

static void split(const float *x, uint32_t n, float pivot, float *gt, uint32_t *ret_gt, float *lt, uint32_t *ret_lt)
{
    idx_kernels_scalar.split(x, n, pivot, gt, ret_gt, lt, ret_lt);
}

static void judge(const float *scores, const idx_aim *aim, uint32_t nq, float *ret_value, uint32_t *ret_head)
{
    idx_judge(scores, aim, nq, ret_value, ret_head);
}

const idx_kernels idx_kernels_avx2 = {widen, dots, max_of, filter, split, judge};
