/* Prefill attention by tiles, in bf16. A unit is 32 keys by 32 queries, and everything is transposed: keys and values are the products'
 * rows, queries their columns, so that the sixteen lanes of a vector are sixteen queries: a maximum or a sum over keys needs no shuffles, and the
 * weights, two keys' in a dword, are as TDPBF16PS wants them.
 *
 * Precision. Scores reach hundreds where keys share a large offset, so K and the queries are the sum of two bf16 each (an f16 or bf16 K exactly);
 * three products leave an error of 2^-17 of what a score's terms sum to. Weights and values are one bf16; l is the sum of the
 * rounded weights.
 *
 * Speed. Tiles and vectors work at the same time, if instructions of both are close to each other: exp of one unit stands between
 * the tile products of the next unit's scores, its maximum between those of the values. A tile's store right before the product that
 * reuses its register costs nothing, four in a row stop the products; so the sums of a step are stored at the beginning of the next.
 */
#include "kernels.h"

#if defined(__x86_64__)
#include "kernels_amx.h"

#include <math.h>

enum { TILE = 1024, HALF = 16, UNIT = ENG_NR, PAIRS = UNIT / 2 };

#define multiply(C, A, B) __asm__ volatile("tdpbf16ps %tmm" #B ", %tmm" #A ", %tmm" #C)
#define amx_store(T, P, STRIDE)                                                                                                            \
    __asm__ volatile("tilestored %%tmm" #T ", (%0,%1,1)" ::"r"((void *)(P)), "r"((size_t)(STRIDE)) : "memory")

/* The four sums, tiles 0 to 3: 32 rows of ENG_NR floats. */
#define SUM(T, C) ((C) + (T) / 2 * HALF * ENG_NR + (T) % 2 * HALF)
#define load_sum(T, C) amx_load(T, SUM(T, C), ENG_NR * 4)
#define store_sum(T, C) amx_store(T, SUM(T, C), ENG_NR * 4)

INLINE void load_sums(const float *c)
{
    load_sum(0, c);
    load_sum(1, c);
    load_sum(2, c);
    load_sum(3, c);
}

INLINE void store_sums32(float *c)
{
    store_sum(0, c);
    store_sum(1, c);
    store_sum(2, c);
    store_sum(3, c);
}

/* ---- packing: tiles of 1 KiB, 16 rows of 64 bytes; values as the AVX-512 level does --------------------------------- */

/* 32 floats as the sum of two bf16. */
INLINE void split(const float *x, __m512i *high, __m512i *low)
{
    __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    *high = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    __m512 ha = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(*high)), 16));
    __m512 hb = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(*high, 1)), 16));
    *low = (__m512i)_mm512_cvtne2ps_pbh(_mm512_sub_ps(b, hb), _mm512_sub_ps(a, ha));
}

/* [d/32][high, low][query half][16 pairs of d][16 queries] */
static void attn_pack_q(void *out, const float *q, size_t d)
{
    uint32_t *to = out;
    for (size_t i = 0; i < d; i += 32, to += 4 * TILE / 4)
        for (size_t half = 0; half < 2; half++) {
            _Alignas(64) uint32_t part[2][HALF][16];
            for (size_t r = 0; r < HALF; r++) {
                __m512i high, low;
                split(q + (half * HALF + r) * d + i, &high, &low);
                _mm512_store_si512(part[0][r], high);
                _mm512_store_si512(part[1][r], low);
            }
            store_transposed(to + half * (TILE / 4), 16, part[0][0], 16, 16);
            store_transposed(to + (2 + half) * (TILE / 4), 16, part[1][0], 16, 16);
        }
}

/* [key half][d/32][high, low][16 keys][32 of d] */
static void attn_pack_k(void *out, const float *k, size_t d)
{
    char *to = out;
    for (size_t half = 0; half < 2; half++)
        for (size_t i = 0; i < d; i += 32, to += 2 * TILE)
            for (size_t r = 0; r < HALF; r++) {
                __m512i high, low;
                split(k + (half * HALF + r) * d + i, &high, &low);
                _mm512_storeu_si512(to + r * 64, high);
                _mm512_storeu_si512(to + TILE + r * 64, low);
            }
}

/* ---- vectors ------------------------------------------------------------------------------------------------------- */

/* Turns a unit's scores into weights, two keys at a time. */
typedef struct {
    const float *s;         /* [UNIT][ENG_NR] */
    char *p;                /* [query half][pair of keys][16 queries], bf16 */
    size_t done;            /* pairs of keys */
    __m512 m[2], l[2];      /* by query half */
    __m512 sum[2][2];       /* of this unit, even and odd keys */
} weigher;

INLINE void weigh_pair(weigher *w)
{
    const float *s = w->s + w->done * 2 * ENG_NR;
    const __m512i half_ulp = _mm512_set1_epi32(0x8000), top = _mm512_set1_epi32((int)0xffff0000);
    for (int h = 0; h < 2; h++) {
        __m512 a = exp2_rough16(_mm512_sub_ps(_mm512_load_ps(s + h * HALF), w->m[h]));
        __m512 b = exp2_rough16(_mm512_sub_ps(_mm512_load_ps(s + ENG_NR + h * HALF), w->m[h]));
        __m512i even = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(a), half_ulp), top);
        __m512i odd = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(b), half_ulp), top);
        w->sum[h][0] = _mm512_add_ps(w->sum[h][0], _mm512_castsi512_ps(even));
        w->sum[h][1] = _mm512_add_ps(w->sum[h][1], _mm512_castsi512_ps(odd));
        _mm512_store_si512(w->p + h * TILE + w->done * 64, _mm512_or_si512(_mm512_srli_epi32(even, 16), odd));
    }
    w->done++;
}

typedef struct {
    const float *s;
    size_t done;        /* keys */
    __m512 top[2][2];   /* by query half, even and odd keys */
} maximum;

INLINE void maximum_begin(maximum *x, const float *s)
{
    x->s = s;
    x->done = 0;
    x->top[0][0] = x->top[0][1] = x->top[1][0] = x->top[1][1] = _mm512_set1_ps(-INFINITY);
}

INLINE void maximum_pair(maximum *x)
{
    const float *s = x->s + x->done * ENG_NR;
    for (int i = 0; i < 4; i++)
        x->top[i % 2][i / 2] = _mm512_max_ps(x->top[i % 2][i / 2], _mm512_load_ps(s + i * HALF));
    x->done += 2;
}

/* Brings m to the maximum where that is too far above, with l and o, whose last 32 rows are still in tiles 0 to 3. */
INLINE void raise(const eng_attn_run *run, weigher *w, const maximum *x)
{
    float *last = run->o + (run->d - 32) * ENG_NR;
    bool stored = false;
    for (int h = 0; h < 2; h++) {
        __m512 top = _mm512_max_ps(x->top[h][0], x->top[h][1]);
        __mmask16 up = _mm512_cmp_ps_mask(top, _mm512_add_ps(w->m[h], _mm512_set1_ps(ENG_ATTN_SLACK)), _CMP_GT_OQ);
        if (__builtin_expect(!up, 1))
            continue;
        if (!stored)
            store_sums32(last);
        stored = true;
        __m512 f = _mm512_mask_mov_ps(_mm512_set1_ps(1), up, exp2_rough16(_mm512_sub_ps(w->m[h], top)));
        w->m[h] = _mm512_mask_mov_ps(w->m[h], up, top);
        w->l[h] = _mm512_mul_ps(w->l[h], f);
        float *o = run->o + h * HALF;
        for (size_t i = 0; i < run->d; i++)
            _mm512_store_ps(o + i * ENG_NR, _mm512_mul_ps(f, _mm512_load_ps(o + i * ENG_NR)));
    }
    if (stored)
        load_sums(last);
}

/* ---- products ------------------------------------------------------------------------------------------------------ */

/* Scores of a unit, left in tiles 0 to 3, after what these held went to prev. `weigh`: meanwhile another unit's weights are made. */
INLINE void scores(const size_t steps, const char *q, const char *k, float *prev, const bool weigh, weigher *w)
{
    const char *k1 = k + steps * 2 * TILE;
    size_t points = steps * 6, point = 0;
#define WEIGH()                                                                                                                            \
    for (point++; weigh && w->done * points < point * PAIRS;)                                                                              \
    weigh_pair(w)
    for (size_t i = 0; i < steps; i++, q += 4 * TILE, k += 2 * TILE, k1 += 2 * TILE) {
        amx_load(4, k, 64);
        amx_load(6, q + 2 * TILE, 64);
        if (!i) {
            store_sum(0, prev);
            _tile_zero(0);
        }
        multiply(0, 4, 6);
        amx_load(7, q + 3 * TILE, 64);
        if (!i) {
            store_sum(1, prev);
            _tile_zero(1);
        }
        multiply(1, 4, 7);
        WEIGH();
        amx_load(5, k1, 64);
        if (!i) {
            store_sum(2, prev);
            _tile_zero(2);
        }
        multiply(2, 5, 6);
        if (!i) {
            store_sum(3, prev);
            _tile_zero(3);
        }
        multiply(3, 5, 7);
        WEIGH();
        amx_load(6, q, 64);
        amx_load(7, q + TILE, 64);
        multiply(0, 4, 6);
        multiply(1, 4, 7);
        WEIGH();
        multiply(2, 5, 6);
        multiply(3, 5, 7);
        WEIGH();
        amx_load(4, k + TILE, 64);
        amx_load(5, k1 + TILE, 64);
        multiply(0, 4, 6);
        multiply(1, 4, 7);
        WEIGH();
        multiply(2, 5, 6);
        multiply(3, 5, 7);
        WEIGH();
    }
#undef WEIGH
}

/* o += the weighted values of a unit; the last 32 rows stay in tiles 0 to 3, after what these held, the next unit's scores, went to s. x: whose
 * maximum is taken meanwhile; NULL: none. */
INLINE void values(const size_t steps, const char *p, const char *v, float *o, float *s, maximum *x)
{
    float *prev = s;
    amx_load(6, p, 64);
    amx_load(7, p + TILE, 64);
    for (size_t i = 0; i < steps; i++, prev = o, o += 32 * ENG_NR, v += 2 * TILE) {
        amx_load(4, v, 64);
        store_sum(0, prev);
        load_sum(0, o);
        multiply(0, 4, 6);
        store_sum(1, prev);
        load_sum(1, o);
        multiply(1, 4, 7);
        amx_load(5, v + TILE, 64);
        while (x && i && x->done * 2 * (steps - 1) < UNIT * (2 * i - 1))
            maximum_pair(x);
        store_sum(2, prev);
        load_sum(2, o);
        multiply(2, 5, 6);
        store_sum(3, prev);
        load_sum(3, o);
        multiply(3, 5, 7);
        while (x && i && x->done * (steps - 1) < UNIT * i)
            maximum_pair(x);
    }
}

INLINE void attend(const size_t steps, const eng_attn_run *run)
{
    _Alignas(64) float s[2][UNIT * ENG_NR];
    _Alignas(64) char p[2 * TILE];
    float *last = run->o + (steps - 1) * 32 * ENG_NR;
    const char *k = run->k, *v = run->v;
    weigher w = {.p = p};
    maximum x;
    for (int h = 0; h < 2; h++) {
        w.m[h] = _mm512_load_ps(run->m + h * HALF);
        w.l[h] = _mm512_load_ps(run->l + h * HALF);
    }
    amx_begin(&amx_full);
    scores(steps, run->q, k, s[0], false, &w);
    store_sums32(s[0]);
    load_sums(last);
    bool whole = false; /* the first unit's maximum is not taken yet */
    for (uint32_t i = 0; i < run->n_units; i++) {
        float *now = s[i % 2], *next = s[(i + 1) % 2];
        uint32_t first = run->first + i * UNIT;
        if (!whole) {
            if (!eng_attn_whole(run, UNIT, first))
                eng_attn_hide(run, now, UNIT, first);
            maximum_begin(&x, now);
        }
        while (x.done < UNIT)
            maximum_pair(&x);
        raise(run, &w, &x);
        w.s = now;
        w.done = 0;
        w.sum[0][0] = w.sum[0][1] = w.sum[1][0] = w.sum[1][1] = _mm512_setzero_ps();
        if (i + 1 < run->n_units) {
            k += steps * 4 * TILE;
            scores(steps, run->q, k, last, true, &w);
            whole = eng_attn_whole(run, UNIT, first + UNIT);
            maximum_begin(&x, next);
            values(steps, p, v, run->o, next, whole ? &x : NULL);
        } else {
            while (w.done < PAIRS)
                weigh_pair(&w);
            values(steps, p, v, run->o, last, NULL);
        }
        v += steps * 2 * TILE;
        for (int h = 0; h < 2; h++)
            w.l[h] = _mm512_add_ps(w.l[h], _mm512_add_ps(w.sum[h][0], w.sum[h][1]));
    }
    store_sums32(last);
    amx_end();
    for (int h = 0; h < 2; h++) {
        _mm512_store_ps(run->m + h * HALF, w.m[h]);
        _mm512_store_ps(run->l + h * HALF, w.l[h]);
    }
}

static void attn_bf16(const eng_attn_run *run)
{
    if (run->d == 64)
        attend(2, run);
    else
        attend(run->d / 32, run);
}

void eng_amx_attention(eng_kernels *k)
{
    k->attn_pack_q = attn_pack_q;
    k->attn_pack_k = attn_pack_k;
    k->attn_bf16 = attn_bf16;
}
#endif
