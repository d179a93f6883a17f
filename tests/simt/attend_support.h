/* What the tests of attention share: keys, values and queries on the device, the right answer in float64, and by how much an answer may miss it: worst cases of
 * the arithmetic that cuda/ promises, computed for each number from its own case. */
#ifndef RETRIEVALD_ATTEND_SUPPORT_H
#define RETRIEVALD_ATTEND_SUPPORT_H

#include "attention_private.h"
#include "gpu_support.h"
#ifdef T_EMULATED
#include "emu.h"
#endif

enum { MAX_DIM = 256 };

static eng_kernels scalar;
static t_rng rng;

typedef struct {
    float *device;
    size_t n;
} floats;

static inline floats floats_new(size_t n)
{
    return (floats){t_out(NULL, n * sizeof(float)), n};
}

static inline float *floats_get(floats f)
{
    return t_got(f.device, f.n * sizeof(float));
}

/* ---- a case: keys, values, queries ----------------------------------------------------------------------------------------- */

typedef struct {
    uint32_t heads, group, d, cap;  /* KV heads */
    eng_kv_type type_k, type_v;
    uint32_t n;                     /* tokens that have queries */
    float scale;
    float *q;                       /* [n][heads * group][d] */
    uint16_t *k, *v;                /* [heads][cap][d] as stored, and the same in float32 */
    float *fk, *fv;
    gpu_kv kv;
    float *device_q;
} problem;

static inline void problem_upload(problem *p)
{
    size_t rows = (size_t)p->heads * p->cap;
    for (size_t i = 0; i < rows; i++) {
        scalar.kv_store[p->type_k](p->fk + i * p->d, p->k + i * p->d, p->d);
        scalar.kv_load[p->type_k](p->k + i * p->d, p->fk + i * p->d, p->d);
        scalar.kv_store[p->type_v](p->fv + i * p->d, p->v + i * p->d, p->d);
        scalar.kv_load[p->type_v](p->v + i * p->d, p->fv + i * p->d, p->d);
    }
    p->kv = (gpu_kv){.k = t_in(p->k, rows * p->d * 2), .v = t_in(p->v, rows * p->d * 2), .n_head_kv = p->heads, .group = p->group, .d = p->d,
                     .cap = p->cap, .type_k = p->type_k == ENG_KV_F16 ? GPU_KV_F16 : GPU_KV_BF16,
                     .type_v = p->type_v == ENG_KV_F16 ? GPU_KV_F16 : GPU_KV_BF16};
    p->device_q = t_in(p->q, (size_t)p->n * p->heads * p->group * p->d * sizeof(float));
}

/* offset: what all keys, and the queries, share; scores are then near size * offset^2 sqrt(d). */
static inline problem problem_new(uint32_t heads, uint32_t group, uint32_t d, uint32_t cap, uint32_t n, eng_kv_type type_k, eng_kv_type type_v, float size, float offset)
{
    problem p = {.heads = heads, .group = group, .d = d, .cap = cap, .n = n, .type_k = type_k, .type_v = type_v, .scale = (float)(1 / sqrt(d))};
    size_t rows = (size_t)heads * cap, queries = (size_t)n * heads * group;
    p.q = malloc(queries * d * sizeof *p.q);
    p.k = malloc(rows * d * 2);
    p.v = malloc(rows * d * 2);
    p.fk = malloc(rows * d * sizeof(float));
    p.fv = malloc(rows * d * sizeof(float));
    for (size_t i = 0; i < queries * d; i++)
        p.q[i] = size * (t_normal(&rng) + offset);
    for (size_t i = 0; i < rows * d; i++) {
        p.fk[i] = t_normal(&rng) + offset;
        p.fv[i] = t_normal(&rng) + 1;
    }
    return p;
}

/* Keys of one dim each, so that a score is a single product, and values of one dim each, so that an answer is a weight: what scores of 30,000 lose is what the
 * query's parts lose. */
static inline problem one_hot_problem(uint32_t d, eng_kv_type type)
{
    problem p = problem_new(1, 1, d, d, 1, type, type, 0, 0);
    memset(p.fk, 0, (size_t)d * d * sizeof(float));
    memset(p.fv, 0, (size_t)d * d * sizeof(float));
    for (uint32_t i = 0; i < d; i++) {
        float k = (float)(4096 + 32 * (t_u64(&rng) % 128)); /* exact in either type */
        p.fk[(size_t)i * d + i] = k;
        p.fv[(size_t)i * d + i] = (float)d;
        p.q[i] = (float)((30000 + 2 * t_uniform(&rng)) / ((double)k * p.scale));
    }
    problem_upload(&p);
    return p;
}

/* And all that was on the device beside it. */
static inline void problem_free(problem *p)
{
    t_device_reset();
    free(p->q);
    free(p->k);
    free(p->v);
    free(p->fk);
    free(p->fv);
}

static inline gpu_parts parts_new(uint32_t n_part, uint32_t heads, uint32_t d, floats *m, floats *l, floats *o)
{
    *m = floats_new((size_t)n_part * heads);
    *l = floats_new((size_t)n_part * heads);
    *o = floats_new((size_t)n_part * heads * d);
    return (gpu_parts){m->device, l->device, o->device};
}

/* ---- the right answer ------------------------------------------------------------------------------------------------------ */

/* What an answer may be wrong by. A score's error moves its weight, hence the answer by up to twice that times how far values lie from the answer; a rounded
 * weight moves it likewise; sums of non-negative weights are wrong by their count in units of rounding, times the values' mean size. */
typedef struct {
    double score;   /* units of rounding in a score, relative to the sum of |q k| */
    double weight;  /* relative error of a weight */
    double sum;     /* units of rounding in a sum */
    double unit;
} precision;

/* Float32 all the way. A query is scaled (1 rounding), d products summed, the maximum subtracted, exp2f (CUDA: 2 units in the last place) of a rounded product. */
static inline precision float32_precision(uint32_t d, uint32_t n)
{
    return (precision){d + 3, 8 * 0x1p-24, n + 40, 0x1p-24};
}

/* Tensor cores may cut where float32 rounds: units of 2^-23. Two or three products a dim; queries are exact to 2^-22. Weights are f16 or bf16, rounded to nearest. */
static inline precision tensor_precision(uint32_t d, uint32_t n, bool bf16)
{
    return (precision){3 * d + 20, (bf16 ? 0x1p-9 : 0x1p-11) + 8 * 0x1p-24, n + 40, 0x1p-23};
}

/* Attention of one query in float64 over the rows for which sees() holds, and what each number of the answer may be wrong by. */
static inline void reference(const problem *p, const float *q, uint32_t head, const uint32_t *rows, uint32_t n, precision e, double *out, double *bound)
{
    double *s = malloc((n + 1) * sizeof *s), max = -INFINITY, sum = 0, size = 0;
    const float *k = p->fk + (size_t)head * p->cap * p->d, *v = p->fv + (size_t)head * p->cap * p->d;
    for (uint32_t i = 0; i < n; i++) {
        double x = 0, absolute = 0;
        for (uint32_t j = 0; j < p->d; j++) {
            x += (double)q[j] * k[(size_t)rows[i] * p->d + j];
            absolute += fabs((double)q[j] * k[(size_t)rows[i] * p->d + j]);
        }
        s[i] = x * p->scale;
        max = fmax(max, s[i]);
        size = fmax(size, absolute * p->scale);
    }
    for (uint32_t i = 0; i < n; i++)
        sum += s[i] = exp(s[i] - max);
    double wrong = expm1(2 * (e.score * e.unit * size)) + 2 * e.weight;
    for (uint32_t j = 0; j < p->d; j++) {
        double mean = 0, absolute = 0, away = 0;
        for (uint32_t i = 0; i < n; i++) {
            mean += s[i] / sum * v[(size_t)rows[i] * p->d + j];
            absolute += s[i] / sum * fabs(v[(size_t)rows[i] * p->d + j]);
        }
        for (uint32_t i = 0; i < n; i++)
            away += s[i] / sum * fabs(v[(size_t)rows[i] * p->d + j] - mean);
        out[j] = mean;
        bound[j] = wrong * away + 2 * e.sum * e.unit * absolute + 1e-30;
    }
    free(s);
}

static inline void compare(const float *got, const double *want, const double *bound, uint32_t d, const char *what)
{
    for (uint32_t j = 0; j < d; j++)
        ck_assert_msg(fabs(got[j] - want[j]) <= bound[j], "%s, dim %u: %.9g, not %.9g (+- %.2g)", what, j, got[j], want[j], bound[j]);
}

/* Of the emulated device: its compute capability, "7.5" and up. */
static inline int attend_main(int argc, char **argv, Suite *s)
{
#ifdef T_EMULATED
    emu_options o = emu_defaults();
    if (argc > 1 && sscanf(argv[1], "%d.%d", &o.major, &o.minor) != 2)
        return EXIT_FAILURE;
    emu_reset(&o);
#else
    (void)argc;
    (void)argv;
#endif
    eng_kernels_scalar(&scalar);
    rng = t_seed(17);
    return t_gpu_run(s);
}

#endif
