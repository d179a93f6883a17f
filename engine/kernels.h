/* The kernel table: every inner loop of the engine, once per instruction set. Filled once from the CPU's flags (or --cpu), read-only after.
 * kernels_scalar.c is complete and is the oracle; kernels_avx2.c, kernels_avx512.c and kernels_amx.c overwrite what they do faster.
 * All shapes are row-major; counts are elements unless a name says bytes. Pointers need no alignment. Accumulators are float32
 * unless stated (int32 inside a block of an integer dot). Nothing here allocates.
 *
 * Determinism: an output element's bits depend only on its own inputs: never on the other rows, tokens, or columns of the call (the
 * exactness rule of design section 4 rests on it). gemm_* therefore accumulates over k in rising order, in one accumulator per output.
 */
#ifndef RETRIEVALD_KERNELS_H
#define RETRIEVALD_KERNELS_H

#include "engine.h"
#include "quant.h"

/* Activations quantised for decoding: blocks of 32, x ~ d q with |q| <= 127; s = d * sum(q) of the block. */
typedef struct {
    int8_t *q;    /* [n] */
    float *d, *s; /* [n / 32] */
} eng_q8_act;

/* A block of activations quantised for prefill: scale and codes as above. minus: -128 sum(q), what weights' codes that are raised by 128 count too much. */
typedef struct {
    float d;
    int32_t minus;
    int8_t q[32];
} eng_q8_block;

#define ENG_I16_MAX 8191 /* 32 products of two such fit in 32 bits */

/* A block of activations for prefill in 16-bit integers: x ~ d q with |q| <= ENG_I16_MAX. */
typedef struct {
    float d;
    int16_t q[32];
} eng_i16_block;

/* The scale of a block or span of weights whose largest magnitude is this, and what its elements are multiplied by. */
static inline float eng_i16_scale(float largest, float *ret_inv)
{
    /* below this the second could overflow; such a block counts as zero */
    *ret_inv = largest < 1e-30f ? 0.0f : ENG_I16_MAX / largest;
    return largest < 1e-30f ? 0.0f : largest / ENG_I16_MAX;
}

/* Raised by each change of the bits that prefill computes, at any level: contexts on disk from before it are not exact then, and not found. */
enum { ENG_ARITHMETIC = 1 };

enum { ENG_KV_TYPES = ENG_KV_Q8_0 + 1 };

#define ENG_LOGITS_BLOCK 64
#define ENG_NR 32 /* output columns of a packed panel */
#define ENG_Q8_SPAN 256 /* elements of a row that are rounded to 8 bits by one scale */
#define ENG_I16_SPAN 256 /* the same to 16-bit integers */

/* Whether a type's weights are rounded to 8 bits for prefill's products in integers. */
static inline bool eng_rounds_q8(eng_type type)
{
    return eng_type_has_min(type) || eng_type_part(type) == 16;
}

/* A score may be so much above the subtracted maximum (in units of log2) before that follows: most tiles need no rescaling then. */
#define ENG_ATTN_SLACK 8.0f
/* The subtracted maximum of a query that has seen no key: finite, so that -inf minus it is -inf. */
#define ENG_ATTN_NONE -1e30f

/* Prefill attention of ENG_NR queries over packed keys and values, in units of ENG_NR keys. */
typedef struct {
    size_t d;                       /* head size, a multiple of 32 */
    const void *q;                  /* scaled by log2(e) / sqrt(d), packed */
    const void *k, *v;              /* [n_units] */
    uint32_t first, n_units;        /* position of the first key */
    const uint32_t *lo, *hi;        /* [ENG_NR] the positions [lo, hi) that a query sees */
    float *m, *l, *o;               /* [ENG_NR], [ENG_NR], [d][ENG_NR], 64-byte aligned */
} eng_attn_run;

/* Scores s[n][ENG_NR] of the keys from `first` on that a query does not see become -inf. */
static inline void eng_attn_hide(const eng_attn_run *run, float *s, uint32_t n, uint32_t first)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t c = 0; c < ENG_NR; c++)
            s[i * ENG_NR + c] = first + i >= run->lo[c] && first + i < run->hi[c] ? s[i * ENG_NR + c] : -__builtin_inff();
}

/* Whether every query sees all n keys from `first` on. */
static inline bool eng_attn_whole(const eng_attn_run *run, uint32_t n, uint32_t first)
{
    for (uint32_t c = 0; c < ENG_NR; c++)
        if (first < run->lo[c] || first + n > run->hi[c])
            return false;
    return true;
}

typedef struct {
    const char *name; /* "scalar", "avx2", "avx512 (VNNI, BF16)" ... */

    /* --- decode: y[r] = w[r] . x for `rows` rows of n elements --- */
    void (*quantize_q8)(const float *x, eng_q8_act *out, size_t n); /* n % 32 == 0; round to nearest even, d = max|x| / 127 */
    /* NULL for F32 F16 BF16 */
    void (*gemv_q8[ENG_TYPE_COUNT])(float *y, const void *w, size_t row_bytes, size_t rows, const eng_q8_act *x, size_t n);
    void (*gemv_f32[ENG_TYPE_COUNT])(float *y, const void *w, size_t row_bytes, size_t rows, const float *x, size_t n);

    /* --- prefill: C[m][n] = A[m][k] B with B packed as panels of ENG_NR output columns --- */
    void (*dequantize[ENG_TYPE_COUNT])(const void *row, float *out, size_t n);
    /* Panel of up to ENG_NR weight rows (columns of the product): f32 panel[k][ENG_NR]; bf16 panel[k/2][ENG_NR][2]. Missing rows are 0.
     * tmp: [ENG_NR][k] floats. bf16: k is even. */
    void (*pack_f32)(float *panel, eng_type type, const void *w, size_t row_bytes, size_t rows, size_t k, float *tmp);
    void (*pack_bf16)(uint16_t *panel, eng_type type, const void *w, size_t row_bytes, size_t rows, size_t k, float *tmp);
    /* C[m][n <= ENG_NR], row stride ldc; A row stride lda. accumulate: C += instead of C = (so that a product cut along k, for
     * bf16 at a multiple of 32, gives the same bits). ldb: stride of the f32 panel's rows (ENG_NR for packed ones). */
    void (*gemm_f32)(float *c, size_t ldc, const float *a, size_t lda, const float *b, size_t ldb, size_t m, size_t n, size_t k,
                     bool accumulate);
    /* NULL where the CPU has no bf16 dot product, or a slow one: the engine then uses gemm_f32. */
    void (*gemm_bf16)(float *c, size_t ldc, const uint16_t *a, size_t lda, const uint16_t *panel, size_t m, size_t n, size_t k,
                      bool accumulate);
    /* The same in 8-bit integers, of types with blocks: a and lda count blocks of 32. Each block's integer sum s = sum of w.q x.q, in rising order, is scaled by
     *   c = fma(w.d s, x.d, c).
     * Of types with minima or two scales for 32 elements (eng_rounds_q8) w.q are the weights rounded to 8 bits, with one scale for each row and each
     * ENG_Q8_SPAN of k (kernels_scalar.c, round_span), and of each span
     *   u = fma(s, x.d, u) from 0 on,  c = fma(w.d, u, c).
     * The same bits at every level; cut at a multiple of ENG_Q8_SPAN too. panel: k ENG_NR * 2 bytes; k % 32 == 0. */
    void (*quantize_blocks)(const float *x, eng_q8_block *out, size_t n); /* n % 32 == 0; codes and d as quantize_q8's */
    void (*pack_q8)(void *panel, eng_type type, const void *w, size_t row_bytes, size_t rows, size_t k);
    void (*gemm_q8)(float *c, size_t ldc, const eng_q8_block *a, size_t lda, const void *panel, eng_type type, size_t m, size_t n, size_t k,
                    bool accumulate);
    bool prefill_q8[ENG_TYPE_COUNT]; /* whether that is the fastest way at this level */
    /* The same in 16-bit integers, of all types: each ENG_I16_SPAN of a row is rounded to nearest even by one scale, and with s and u as above, of
     * each span again c = fma(w.d, u, c). The same bits at every level; cut at a multiple of ENG_I16_SPAN too. What is infinite or NaN gives some
     * code. panel: k ENG_NR * 2 bytes and ENG_NR floats for each span begun; k % 32 == 0, k > 0. */
    void (*quantize_i16)(const float *x, eng_i16_block *out, size_t n); /* n % 32 == 0; round to nearest even */
    void (*pack_i16)(void *panel, eng_type type, const void *w, size_t row_bytes, size_t rows, size_t k);
    void (*gemm_i16)(float *c, size_t ldc, const eng_i16_block *a, size_t lda, const void *panel, size_t m, size_t n, size_t k, bool accumulate);
    bool prefill_i16; /* whether that is the fastest way at this level, but for 8 bits */
    void (*f32_to_bf16)(const float *x, uint16_t *out, size_t n); /* round to nearest even; denormals may become 0 */

    /* --- attention. KV rows are `stride` bytes apart; index by eng_kv_type --- */
    void (*kv_load[ENG_KV_TYPES])(const void *row, float *out, size_t n);
    /* Round to nearest even; f16 saturates to +-65504. q8_0: the scale is max|x| / 127 as f16 (saturating), codes are x / scale, at most 127 in size; a NaN
     * makes all of its block NaN. The same bits on every level. */
    void (*kv_store[ENG_KV_TYPES])(const float *x, void *row, size_t n);
    /* s[g][r] = q[g] . k[r] for g < group, r < rows; s has row stride lds */
    void (*qk[ENG_KV_TYPES])(float *s, size_t lds, const float *q, size_t group, const void *k, size_t stride, size_t rows, size_t d);
    /* o[g][:] += sum over r of p[g][r] v[r]; p has row stride ldp. r in rising order */
    void (*pv[ENG_KV_TYPES])(float *o, const float *p, size_t ldp, size_t group, const void *v, size_t stride, size_t rows, size_t d);
    /* o[:] += sum over i < n of p[i] v[ids[i]] */
    void (*pv_gather[ENG_KV_TYPES])(float *o, const float *p, const uint32_t *ids, size_t n, const void *v, size_t stride, size_t d);
    /* Prefill: ENG_NR queries are the columns of a product, the keys its rows. Scores x[n][ENG_NR] (times log2 e) -> weights 2^(x - m), in
     * place. Before that a column whose maximum is more than ENG_ATTN_SLACK above its m gets it as m, and l and its column of o[d][ENG_NR] are
     * scaled to it. l += the weights' sums. -inf gives exactly 0, as does what would be below FLT_MIN. Relative error <= 2^-20. A column's
     * bits depend on that column alone, and do not change when rows of -inf are added at the end. x and o are 64-byte aligned. Of the first `cols`
     * columns; what becomes of those after them is left open. */
    void (*softmax_columns)(float *x, size_t n, size_t cols, float *m, float *l, float *o, size_t d);
    /* The same and both products around it (eng_attn_run), scores in 16-bit integers or several bf16, weights and values in bf16, and what packs
     * for it; NULL: there is none. Of ENG_NR rows of d floats each of attn_pack's functions makes at most ENG_NR * 4 d bytes, which is how far
     * units are apart, pack_v half of it; d is a multiple of 32. */
    void (*attn_pack_q)(void *out, const float *q, size_t d);
    void (*attn_pack_k)(void *out, const float *k, size_t d);
    void (*attn_pack_v)(void *out, const float *v, size_t d);
    void (*attn_bf16)(const eng_attn_run *run);
    float (*max)(const float *x, size_t n); /* -inf for n = 0 */
    /* x[i] = exp(x[i] - m), returns their sum. -inf gives exactly 0, as does what would be below FLT_MIN. Relative error <= 2^-20; the same
     * bits for an element at any place in x; the sum's bits do not change when elements that give 0 are added at the end (so padding with
     * -inf changes nothing). */
    float (*softmax)(float *x, size_t n, float m);
    void (*scale)(float *x, size_t n, float f); /* x *= f */

    /* --- the rest of a layer --- */
    /* sum of squares in float64 or in >= 8 float32 lanes */
    void (*rms_norm)(float *out, const float *x, const float *w, size_t n, float eps);
    void (*silu_mul)(float *out, const float *gate, const float *up, size_t n); /* silu(gate) * up; out may be gate */
    void (*gelu_mul)(float *out, const float *gate, const float *up, size_t n); /* the same with GELU by tanh */
    void (*add)(float *x, const float *y, size_t n);                            /* x += y */
    /* In-place rotation of the first `rot` dims of a head: cs = cos[rot/2], sin[rot/2]. halves: pairs (i, i + rot/2), else (2i, 2i+1) */
    void (*rope)(float *x, const float *cs, size_t rot, bool halves);

    /* --- choosing a token. NaN and infinities count as nothing; the same bits on every level --- */
    float (*logits_max)(const float *x, size_t n, float *block_max); /* largest of each ENG_LOGITS_BLOCK, -inf: none; returns the largest of all */
    double (*logits_sum)(const float *x, size_t n, float max);       /* of e^(x - max) */
} eng_kernels;

/* The best table for this machine up to `want` (ENG_CPU_AUTO: all it has). -ENOTSUP, with a reason, when `want` is above the machine. */
int eng_kernels_get(eng_cpu want, const eng_kernels **ret, char *err, size_t errlen);

/* The tables' fillers, in kernels_*.c: each overwrites the entries it implements. */
void eng_kernels_scalar(eng_kernels *k);
void eng_kernels_avx2(eng_kernels *k);
void eng_kernels_avx512(eng_kernels *k, bool bf16);
void eng_kernels_vbmi(eng_kernels *k); /* over a table with AVX-512 */
void eng_kernels_amx(eng_kernels *k); /* over a table with bf16 */

#endif
