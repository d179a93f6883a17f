/* The attention kernels, through gpu.h alone: against float64 over all keys and against the engine's scalar twins. The same program is built for the emulated
 * device and for a real one.
 *
 * Tolerances are worst cases of the arithmetic that cuda/ promises, computed for each number from its own case: see bound_of. */
#include "attention_private.h"
#include "gpu_support.h"
#ifdef T_EMULATED
#include "emu.h"
#endif

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DIM = 256 };

static eng_kernels scalar;
static t_rng rng;

typedef struct {
    float *device;
    size_t n;
} floats;

static floats floats_new(size_t n)
{
    return (floats){t_out(NULL, n * sizeof(float)), n};
}

static float *floats_get(floats f)
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

static void problem_upload(problem *p)
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
static problem problem_new(uint32_t heads, uint32_t group, uint32_t d, uint32_t cap, uint32_t n, eng_kv_type type_k, eng_kv_type type_v, float size, float offset)
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

/* And all that was on the device beside it. */
static void problem_free(problem *p)
{
    t_device_reset();
    free(p->q);
    free(p->k);
    free(p->v);
    free(p->fk);
    free(p->fv);
}

static gpu_parts parts_new(uint32_t n_part, uint32_t heads, uint32_t d, floats *m, floats *l, floats *o)
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
static precision float32_precision(uint32_t d, uint32_t n)
{
    return (precision){d + 3, 8 * 0x1p-24, n + 40, 0x1p-24};
}

/* Tensor cores may cut where float32 rounds: units of 2^-23. Two or three products a dim; queries are exact to 2^-22. Weights are f16 or bf16, rounded to nearest. */
static precision tensor_precision(uint32_t d, uint32_t n, bool bf16)
{
    return (precision){3 * d + 20, (bf16 ? 0x1p-9 : 0x1p-11) + 8 * 0x1p-24, n + 40, 0x1p-23};
}

/* Attention of one query in float64 over the rows for which sees() holds, and what each number of the answer may be wrong by. */
static void reference(const problem *p, const float *q, uint32_t head, const uint32_t *rows, uint32_t n, precision e, double *out, double *bound)
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

static void compare(const float *got, const double *want, const double *bound, uint32_t d, const char *what)
{
    for (uint32_t j = 0; j < d; j++)
        ck_assert_msg(fabs(got[j] - want[j]) <= bound[j], "%s, dim %u: %.9g, not %.9g (+- %.2g)", what, j, got[j], want[j], bound[j]);
}

/* ---- decode ------------------------------------------------------------------------------------------------------------------ */

/* The twins: qk, softmax and pv over all rows at once, then eng_partial_merge of that one part. */
static void twin(const problem *p, uint32_t head, const uint32_t *rows, uint32_t n, float *out)
{
    size_t bytes = p->d * sizeof(uint16_t);
    float *s = malloc((n + 1) * sizeof *s), *q = malloc(p->d * sizeof *q), *o = calloc(p->d, sizeof *o);
    const char *k = (const char *)p->k + (size_t)(head / p->group) * p->cap * bytes, *v = (const char *)p->v + (size_t)(head / p->group) * p->cap * bytes;
    memcpy(q, p->q + (size_t)head * p->d, p->d * sizeof *q);
    scalar.scale(q, p->d, p->scale);
    for (uint32_t i = 0; i < n; i++)
        scalar.qk[p->type_k](s + i, 1, q, 1, k + rows[i] * bytes, bytes, 1, p->d);
    float m = scalar.max(s, n), l = n ? scalar.softmax(s, n, m) : 0;
    for (uint32_t i = 0; i < n; i++)
        scalar.pv[p->type_v](o, s + i, 1, 1, v + rows[i] * bytes, bytes, 1, p->d);
    eng_partial_merge(out, &(eng_partial){m, l, o}, 1, p->d);
    free(s);
    free(q);
    free(o);
}

static uint32_t list_rows(const gpu_rows *runs, uint32_t n_runs, uint32_t *rows)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < n_runs; i++)
        for (uint32_t row = runs[i].lo; row < runs[i].hi; row++)
            rows[n++] = row;
    return n;
}

static void attend(const problem *p, const gpu_parts *parts, uint32_t n_part, const gpu_rows *runs, uint32_t n_runs)
{
    t_ok(gpu_attend(t_gpu, parts, n_part, p->device_q, p->scale, &p->kv, runs, n_runs));
}

/* One token's attention over `runs`, with spare parts; and the parts are what they are said to be. */
static void decode_case(const problem *p, const gpu_rows *runs, uint32_t n_runs, uint32_t spare)
{
    uint32_t heads = p->heads * p->group, *rows = malloc((p->cap + 1) * sizeof *rows), n = list_rows(runs, n_runs, rows), n_part = gpu_attend_parts(n) + spare;
    floats m, l, o, out = floats_new((size_t)heads * p->d);
    gpu_parts parts = parts_new(n_part, heads, p->d, &m, &l, &o);
    char what[200];
    attend(p, &parts, n_part, runs, n_runs);
    t_ok(gpu_merge(t_gpu, out.device, &parts, n_part, heads, p->d));
    float *got = floats_get(out), *got_m = floats_get(m), *got_l = floats_get(l), *got_o = floats_get(o);
    precision e = float32_precision(p->d, n);
    for (uint32_t h = 0; h < heads; h++) {
        double want[MAX_DIM], bound[MAX_DIM], most = -INFINITY;
        float other[MAX_DIM];
        snprintf(what, sizeof what, "d %u, group %u, %u rows, head %u", p->d, p->group, n, h);
        reference(p, p->q + (size_t)h * p->d, h / p->group, rows, n, e, want, bound);
        compare(got + (size_t)h * p->d, want, bound, p->d, what);
        twin(p, h, rows, n, other);
        for (uint32_t j = 0; j < p->d; j++)
            want[j] = other[j], bound[j] *= 2;
        compare(got + (size_t)h * p->d, want, bound, p->d, "the twin");
        uint32_t seen = 0;
        for (uint32_t i = 0; i < n_part; i++) {
            float part_l = got_l[(size_t)i * heads + h];
            ck_assert_msg(part_l >= 0 && part_l <= (float)n * 1.001f, "%s: l of part %u is %g", what, i, part_l);
            if (part_l > 0) {
                seen++;
                most = fmax(most, got_m[(size_t)i * heads + h]);
                ck_assert_msg(part_l > 0.999f, "%s: the best key of part %u weighs less than 1", what, i);
                for (uint32_t j = 0; j < p->d; j++)
                    ck_assert(isfinite(got_o[((size_t)i * heads + h) * p->d + j]));
            }
        }
        ck_assert_uint_le(seen, gpu_attend_parts(n));
        ck_assert(n == 0 || isfinite(most));
    }
    free(rows);
}

/* Rows that no run names are NaN: whoever reads one tells. */
static void hide_rows(problem *p, const gpu_rows *runs, uint32_t n_runs)
{
    uint8_t *used = calloc(1, p->cap);
    for (uint32_t i = 0; i < n_runs; i++)
        memset(used + runs[i].lo, 1, runs[i].hi - runs[i].lo);
    for (size_t i = 0; i < (size_t)p->heads * p->cap; i++)
        for (uint32_t j = 0; j < p->d && !used[i % p->cap]; j++)
            p->fk[i * p->d + j] = p->fv[i * p->d + j] = NAN;
    free(used);
}

START_TEST(decode_shapes)
{
    static const uint32_t dims[] = {64, 80, 96, 128, 256, 8, 72, 136}, groups[] = {1, 2, 3, 4, 5, 7, 8, 12, 16}, lengths[] = {1, 31, 63, 64, 65, 127, 200};
    for (uint32_t i = 0; i < 40; i++) {
        uint32_t d = dims[i % 8], group = groups[i % 9], n = lengths[i % 7], gap = (uint32_t)(t_u64(&rng) % 9);
        problem p = problem_new(1 + i % 2, group, d, n + 2 * gap + 3, 1, i & 1 ? ENG_KV_BF16 : ENG_KV_F16, i & 2 ? ENG_KV_BF16 : ENG_KV_F16, 1, 0);
        uint32_t cut = (uint32_t)(t_u64(&rng) % (n + 1));
        /* sinks, a local window that wraps around: the later rows first */
        gpu_rows runs[3] = {{0, 1}, {1 + cut + gap, 1 + n + gap}, {1, 1 + cut}};
        if (i % 5 == 0) { /* all in one */
            runs[0] = (gpu_rows){gap, gap + n};
            hide_rows(&p, runs, 1);
            problem_upload(&p);
            decode_case(&p, runs, 1, 0);
        } else {
            hide_rows(&p, runs, 3);
            problem_upload(&p);
            decode_case(&p, runs, 3, i % 3);
        }
        problem_free(&p);
    }
}
END_TEST

START_TEST(decode_nothing)
{
    problem p = problem_new(2, 7, 64, 8, 1, ENG_KV_F16, ENG_KV_F16, 1, 0);
    hide_rows(&p, NULL, 0);
    problem_upload(&p);
    gpu_rows none[3] = {{3, 3}, {0, 0}, {5, 5}};
    uint32_t heads = 14;
    floats m, l, o, out = floats_new((size_t)heads * 64);
    gpu_parts parts = parts_new(3, heads, 64, &m, &l, &o);
    for (uint32_t n_runs = 0; n_runs <= 3; n_runs += 3) {
        attend(&p, &parts, 3, none, n_runs);
        t_ok(gpu_merge(t_gpu, out.device, &parts, 3, heads, 64));
        float *got = floats_get(out), *got_l = floats_get(l);
        for (uint32_t i = 0; i < 3 * heads; i++)
            ck_assert(got_l[i] == 0);
        for (uint32_t i = 0; i < heads * 64; i++)
            ck_assert(got[i] == 0);
    }
    ck_assert_uint_eq(gpu_attend_parts(0), 0);
    problem_free(&p);
}
END_TEST

/* 10^4 keys, and so many that a part has several tiles. gpu_attend_parts rises with the rows. */
START_TEST(decode_long)
{
    static const struct { uint32_t d, group, n; } cases[] = {{64, 7, 10001}, {128, 3, 10000}, {8, 1, 40003}, {16, 16, 16385}};
    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        problem p = problem_new(1, cases[i].group, cases[i].d, cases[i].n, 1, ENG_KV_F16, i & 1 ? ENG_KV_BF16 : ENG_KV_F16, 2, 0);
        problem_upload(&p);
        gpu_rows runs[2] = {{cases[i].n / 3, cases[i].n}, {0, cases[i].n / 3}};
        decode_case(&p, runs, 2, 1);
        problem_free(&p);
    }
    for (uint32_t n = 0, last = 0; n < 100000; n += 61) {
        ck_assert_uint_ge(gpu_attend_parts(n), last);
        last = gpu_attend_parts(n);
    }
    ck_assert_uint_ge(gpu_attend_parts(UINT32_MAX), 1);
}
END_TEST

/* Keys and queries share an offset: scores of hundreds, whose differences count. With f16 queries weights would be wrong by tens of percent. */
START_TEST(decode_large_scores)
{
    for (uint32_t i = 0; i < 4; i++) {
        problem p = problem_new(1, 3, i & 1 ? 128 : 64, 400, 1, i & 2 ? ENG_KV_BF16 : ENG_KV_F16, ENG_KV_F16, 2, i & 1 ? 5 : 6);
        for (uint32_t row = 0; row < 40; row++) /* and some scores far below */
            for (uint32_t j = 0; j < p.d; j++)
                p.fk[(size_t)row * 10 * p.d + j] *= -30;
        problem_upload(&p);
        decode_case(&p, &(gpu_rows){0, 400}, 1, 0);
        problem_free(&p);
    }
}
END_TEST

/* A row's parts may be computed and merged in any grouping: one call, several calls into neighbouring parts, in another order. */
START_TEST(decode_any_grouping)
{
    enum { N = 900, HEADS = 10, D = 64, PARTS = 40 };
    problem p = problem_new(2, 5, D, N, 1, ENG_KV_F16, ENG_KV_F16, 3, 1);
    problem_upload(&p);
    uint32_t rows[N];
    for (uint32_t i = 0; i < N; i++)
        rows[i] = i;
    for (uint32_t round = 0; round < 6; round++) {
        floats m, l, o, out = floats_new((size_t)HEADS * D);
        gpu_parts all = parts_new(PARTS, HEADS, D, &m, &l, &o);
        uint32_t used = 0, at = 0;
        while (at < N) {
            uint32_t n = round == 0 ? N : 1 + (uint32_t)(t_u64(&rng) % 300), n_part;
            n = n < N - at ? n : N - at;
            n_part = gpu_attend_parts(n) + round % 2;
            gpu_parts parts = {all.m + used * HEADS, all.l + used * HEADS, all.o + (size_t)used * HEADS * D};
            uint32_t from = round % 2 ? N - at - n : at;
            ck_assert_uint_le(used + n_part, PARTS);
            attend(&p, &parts, n_part, &(gpu_rows){from, from + n}, 1);
            used += n_part;
            at += n;
        }
        t_ok(gpu_merge(t_gpu, out.device, &all, used, HEADS, D));
        float *got = floats_get(out);
        for (uint32_t h = 0; h < HEADS; h++) {
            double want[D], bound[D];
            reference(&p, p.q + (size_t)h * D, h / 5, rows, N, float32_precision(D, N), want, bound);
            compare(got + (size_t)h * D, want, bound, D, "grouping");
        }
    }
    problem_free(&p);
}
END_TEST

/* ---- merge -------------------------------------------------------------------------------------------------------------------- */

/* Parts as a host makes them too, some empty with garbage in m and o, maxima far apart: as eng_partial_merge in the rounding of n_part sums. */
START_TEST(merge_is_the_twins)
{
    static const uint32_t dims[] = {8, 64, 80, 96, 128, 248, 256}, counts[] = {1, 2, 3, 11, 255, 256, 257, 600};
    for (uint32_t round = 0; round < 24; round++) {
        uint32_t d = dims[round % 7], n_part = counts[round % 8], heads = 1 + round % 3;
        size_t n = (size_t)n_part * heads;
        float *m = malloc(n * sizeof *m), *l = malloc(n * sizeof *l), *o = malloc(n * d * sizeof *o);
        for (size_t i = 0; i < n; i++) {
            bool empty = round % 4 == 3 || (round % 4 && t_u64(&rng) % 3 == 0);
            m[i] = empty ? (i & 1 ? NAN : INFINITY) : t_normal(&rng) * (round & 1 ? 5 : 200) + 300;
            l[i] = empty ? 0 : (float)(1 + 60 * t_uniform(&rng));
            for (uint32_t j = 0; j < d; j++)
                o[i * d + j] = empty ? NAN : l[i] * t_normal(&rng);
        }
        floats out = floats_new((size_t)heads * d);
        gpu_parts parts = {t_in(m, n * sizeof *m), t_in(l, n * sizeof *l), t_in(o, n * d * sizeof *o)};
        t_ok(gpu_merge(t_gpu, out.device, &parts, n_part, heads, d));
        float *got = floats_get(out);
        for (uint32_t h = 0; h < heads; h++) {
            eng_partial *twin = malloc(n_part * sizeof *twin);
            float want[MAX_DIM], most = -INFINITY;
            double sum = 0, absolute[MAX_DIM] = {0};
            for (uint32_t i = 0; i < n_part; i++) {
                twin[i] = (eng_partial){m[i * heads + h], l[i * heads + h], o + ((size_t)i * heads + h) * d};
                if (twin[i].l > 0)
                    most = fmaxf(most, twin[i].m);
            }
            for (uint32_t i = 0; i < n_part; i++)
                for (uint32_t j = 0; twin[i].l > 0 && j < d; j++) {
                    double f = exp((double)twin[i].m - most);
                    absolute[j] += f * fabs(twin[i].o[j]);
                    sum += j == 0 ? f * twin[i].l : 0;
                }
            eng_partial_merge(want, twin, n_part, d);
            for (uint32_t j = 0; j < d; j++) {
                /* both sum n_part terms, whose weights are exact to 8 units, or more where they are small (numbers.cuh) */
                double bound = sum > 0 ? 2 * (2.0 * n_part + 40) * 0x1p-24 * absolute[j] / sum : 0;
                ck_assert_msg(fabsf(got[h * d + j] - want[j]) <= bound, "round %u: %.9g, not %.9g (+- %.2g)", round, got[h * d + j], want[j], bound);
            }
            free(twin);
        }
        t_device_reset();
        free(m);
        free(l);
        free(o);
    }
}
END_TEST

/* ---- prefill ------------------------------------------------------------------------------------------------------------------- */

/* Queries [from, from + n) of a problem whose token i stands at position pos0 + i, over rows [row0, ...) of kv, which stand at positions from key0 on, in blocks
 * that end where `ends` says. Returns the output, the caller's to free. */
typedef struct {
    uint32_t pos0, from, n, window, key0;
    const uint32_t *ends; /* positions, rising; multiples of GPU_TILE but the last one */
    uint32_t n_ends;
} plan;

static float *prefill(const problem *p, const plan *c)
{
    uint32_t heads = p->heads * p->group;
    size_t values = (size_t)c->n * heads * p->d;
    floats m, l, o, out = floats_new(values);
    gpu_parts state = parts_new(c->n, heads, p->d, &m, &l, &o);
    gpu_queries q = {p->device_q + (size_t)c->from * heads * p->d, p->scale, c->pos0 + c->from, c->n, c->window};
    t_ok(gpu_attend_begin(t_gpu, &state, &p->kv, c->n));
    uint32_t first = c->key0;
    for (uint32_t i = 0; i < c->n_ends; first = c->ends[i++]) {
        gpu_kv kv = p->kv;
        kv.k = (uint16_t *)p->kv.k + (size_t)(first - c->key0) * p->d;
        kv.v = (uint16_t *)p->kv.v + (size_t)(first - c->key0) * p->d;
        t_ok(gpu_attend_block(t_gpu, &state, &q, &kv, first, c->ends[i] - first));
    }
    t_ok(gpu_attend_end(t_gpu, out.device, &state, &p->kv, c->n));
    floats_get(m); /* looks at what is beside it */
    floats_get(l);
    floats_get(o);
    return floats_get(out);
}

static bool on_tensor_cores(const problem *p)
{
    gpu_info info;
    t_ok(gpu_info_get(t_gpu, &info));
    return p->type_k == p->type_v && (p->type_k == ENG_KV_F16 || info.major >= 8);
}

static void prefill_check(const problem *p, const plan *c, const float *got)
{
    uint32_t heads = p->heads * p->group, end = c->ends[c->n_ends - 1], *rows = malloc((p->cap + 1) * sizeof *rows);
    char what[200];
    for (uint32_t i = 0; i < c->n; i++) {
        uint32_t pos = c->pos0 + c->from + i, lo = c->window && pos >= c->window ? pos - c->window + 1 : 0, n = 0;
        for (uint32_t at = lo > c->key0 ? lo : c->key0; at <= pos && at < end; at++)
            rows[n++] = at - c->key0;
        precision e = on_tensor_cores(p) ? tensor_precision(p->d, n, p->type_v == ENG_KV_BF16) : float32_precision(p->d, n);
        for (uint32_t h = 0; h < heads; h++) {
            double want[MAX_DIM], bound[MAX_DIM];
            size_t at = ((size_t)i * heads + h) * p->d;
            snprintf(what, sizeof what, "d %u, group %u, window %u, position %u of %u, head %u", p->d, p->group, c->window, pos, end, h);
            reference(p, p->q + (size_t)c->from * heads * p->d + at, h / p->group, rows, n, e, want, bound);
            for (uint32_t j = 0; n == 0 && j < p->d; j++)
                want[j] = bound[j] = 0;
            compare(got + at, want, bound, p->d, what);
        }
    }
    free(rows);
}

START_TEST(prefill_shapes)
{
    static const uint32_t dims[] = {64, 80, 96, 128, 256, 8, 72, 136}, groups[] = {1, 3, 7, 16, 2, 5}, windows[] = {0, 0, 10, 1, 70, 300};
    for (uint32_t i = 0; i < 24; i++) {
        uint32_t n = 1 + (uint32_t)(t_u64(&rng) % 24), pos0 = (uint32_t)(t_u64(&rng) % 200), window = windows[i % 6], end = pos0 + n;
        uint32_t key0 = window && pos0 >= window ? (pos0 - window + 1) / GPU_TILE * GPU_TILE : 0;
        problem p = problem_new(1 + i % 2, groups[i % 6], dims[i % 8], end - key0, n, i & 1 ? ENG_KV_BF16 : ENG_KV_F16, i % 4 == 1 || i % 4 == 2 ? ENG_KV_BF16 : ENG_KV_F16, 2, 0);
        problem_upload(&p);
        plan c = {pos0, 0, n, window, key0, &end, 1};
        float *got = prefill(&p, &c);
        prefill_check(&p, &c, got);
        problem_free(&p);
    }
}
END_TEST

/* 10^4 keys. */
START_TEST(prefill_long)
{
    uint32_t end = 10003;
    problem p = problem_new(1, 2, 64, end, 21, ENG_KV_F16, ENG_KV_F16, 2, 0);
    problem_upload(&p);
    plan c = {end - 21, 0, 21, 0, 0, &end, 1};
    float *got = prefill(&p, &c);
    prefill_check(&p, &c, got);
    problem_free(&p);
}
END_TEST

START_TEST(prefill_large_scores)
{
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t end = 150;
        problem p = problem_new(1, 3, i & 1 ? 128 : 64, end, 20, i & 2 ? ENG_KV_BF16 : ENG_KV_F16, i & 2 ? ENG_KV_BF16 : ENG_KV_F16, 2, i & 1 ? 5 : 6);
        if (i == 0) { /* as large as f16 keys get, with small queries; and a query of zeros */
            for (uint32_t j = 0; j < p.d; j++)
                p.fk[7 * p.d + j] = 1e6f;
            for (uint32_t j = 0; j < 3 * p.d; j++)
                p.q[j] *= 1e-6f;
            memset(p.q + 3 * p.d, 0, p.d * sizeof *p.q);
        }
        problem_upload(&p);
        plan c = {end - 20, 0, 20, 0, 0, &end, 1};
        float *got = prefill(&p, &c);
        prefill_check(&p, &c, got);
        problem_free(&p);
    }
}
END_TEST

/* Keys of one dim each, so that a score is a single product, and values of one dim each, so that an answer is a weight: what scores of 30,000 lose is what the
 * query's parts lose. */
static problem one_hot_problem(uint32_t d, eng_kv_type type)
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

START_TEST(queries_are_float32)
{
    for (uint32_t i = 0; i < 6; i++) {
        uint32_t d = i < 4 ? 64 : 128, rows[128];
        eng_kv_type type = i & 1 ? ENG_KV_BF16 : ENG_KV_F16;
        problem p = one_hot_problem(d, type);
        double want[MAX_DIM], bound[MAX_DIM];
        for (uint32_t j = 0; j < d; j++)
            rows[j] = j;
        /* one rounding of scale q, 2^-22 of parts, and three sums of them */
        reference(&p, p.q, 0, rows, d, (precision){8, (i & 1 ? 0x1p-9 : 0x1p-11), d + 40, 0x1p-23}, want, bound);
        float *got = prefill(&p, &(plan){d - 1, 0, 1, 0, 0, &d, 1});
        compare(got, want, bound, d, "one key a dim");
        decode_case(&p, &(gpu_rows){0, d}, 1, 0);
        problem_free(&p);
    }
}
END_TEST

/* Many keys whose weight is 2^-20.5 beside one of weight 1 and value 0: the answer is theirs. */
START_TEST(small_weights_count)
{
    enum { N = 1000, D = 64 };
    uint32_t end = N, rows[N];
    for (uint32_t i = 0; i < 2; i++) {
        problem p = problem_new(1, 1, D, N, 1, i ? ENG_KV_BF16 : ENG_KV_F16, i ? ENG_KV_BF16 : ENG_KV_F16, 0, 0);
        double want[D], bound[D];
        memset(p.fk, 0, (size_t)N * D * sizeof(float));
        memset(p.fv + 100 * D, 0, D * sizeof(float));
        p.fk[100 * D] = 1;
        p.q[0] = (float)(20.5 * M_LN2 / p.scale);
        for (uint32_t j = 0; j < N; j++)
            rows[j] = j;
        problem_upload(&p);
        reference(&p, p.q, 0, rows, N, tensor_precision(1, N, i), want, bound);
        float *got = prefill(&p, &(plan){N - 1, 0, 1, 0, 0, &end, 1});
        compare(got, want, bound, D, "small weights");
        problem_free(&p);
    }
}
END_TEST

/* A token's bits depend neither on the blocks that keys come in, nor on the chunk that it is in: in one block, in blocks of one tile, in chunks. */
START_TEST(prefill_any_cut)
{
    static const uint32_t tiles[] = {64, 128, 192, 256, 300}, some[] = {128, 300}, whole[] = {300};
    for (uint32_t i = 0; i < 10; i++) {
        eng_kv_type type = i & 1 ? ENG_KV_BF16 : ENG_KV_F16;
        uint32_t group = i < 6 ? 3 : 7, d = i % 5 == 4 ? 256 : i % 5 == 3 ? 80 : 64, window = i % 3 == 2 ? 50 : 0, pos0 = 270, n = 30;
        problem p = problem_new(1, group, d, 300, n, type, i == 8 ? ENG_KV_BF16 : type, 2, 1);
        problem_upload(&p);
        size_t token = (size_t)group * d;
        float *one = prefill(&p, &(plan){pos0, 0, n, window, 0, whole, 1});
        float *blocks = prefill(&p, &(plan){pos0, 0, n, window, 0, tiles, 5});
        ck_assert_msg(memcmp(one, blocks, n * token * sizeof *one) == 0, "case %u: blocks of a tile give other bits", i);
        for (uint32_t from = 0, size = 1; from < n; from += size, size = 1 + (uint32_t)(t_u64(&rng) % 12)) {
            uint32_t end = pos0 + from + (size < n - from ? size : n - from);
            uint32_t ends[2] = {some[0], end};
            float *chunk = prefill(&p, &(plan){pos0, from, end - pos0 - from, window, 0, ends, 2});
            ck_assert_msg(memcmp(one + from * token, chunk, (end - pos0 - from) * token * sizeof *one) == 0, "case %u: tokens from %u on have other bits", i, from);
        }
        problem_free(&p);
    }
}
END_TEST

/* Blocks that some queries, or all, see nothing of: the answer is that of the others, or zeros. */
START_TEST(prefill_sees_nothing)
{
    static const uint32_t ends[] = {64, 128, 192}, first[] = {64};
    for (uint32_t i = 0; i < 2; i++) {
        problem p = problem_new(2, 2, 64, 192, 40, i ? ENG_KV_BF16 : ENG_KV_F16, ENG_KV_F16, 2, 0);
        problem_upload(&p);
        plan c = {152, 0, 40, 9, 0, ends, 3}; /* windows of 9 begin in the third block */
        float *got = prefill(&p, &c);
        prefill_check(&p, &c, got);
        c.ends = first; /* no window reaches so far back */
        c.n_ends = 1;
        got = prefill(&p, &c);
        prefill_check(&p, &c, got);
        c = (plan){50, 0, 40, 0, 0, (const uint32_t[]){40}, 1}; /* a block that ends in a tile, before the first token */
        got = prefill(&p, &c);
        prefill_check(&p, &c, got);
        c = (plan){50, 0, 40, 5, 0, first, 1}; /* the tokens from 64 + 4 on see nothing */
        got = prefill(&p, &c);
        prefill_check(&p, &c, got);
        problem_free(&p);
    }
}
END_TEST

/* The twin: eng_attn_prefill in float32, over the same rows. */
START_TEST(prefill_is_the_twins)
{
    enum { N = 130, FROM = 100, HEADS = 2, GROUP = 3, D = 96 };
    problem p = problem_new(HEADS, GROUP, D, N, N - FROM, ENG_KV_F16, ENG_KV_F16, 2, 0);
    problem_upload(&p);
    uint32_t window = 40, end = N, rows[N];
    eng_kv_shape shape = {1, HEADS, GROUP, D, ENG_KV_F16, ENG_KV_F16, eng_kv_row_bytes(ENG_KV_F16, D), eng_kv_row_bytes(ENG_KV_F16, D), &window};
    eng_pool *pool;
    eng_attn *attn;
    eng_segment *seg;
    eng_view view = {0};
    ck_assert_int_eq(eng_pool_new(1, &pool), 0);
    ck_assert_int_eq(eng_attn_new(pool, &scalar, &shape, N - FROM, true, &attn), 0);
    ck_assert_int_eq(eng_segment_new(&shape, NULL, 0, N, true, &seg), 0);
    seg->n = N;
    ck_assert_int_eq(eng_view_add(&view, seg, 0, N), 0);
    for (uint32_t h = 0; h < HEADS; h++) {
        memcpy(eng_segment_k(seg, 0, h, 0), p.k + (size_t)h * N * D, (size_t)N * D * 2);
        memcpy(eng_segment_v(seg, 0, h, 0), p.v + (size_t)h * N * D, (size_t)N * D * 2);
    }
    float *twin = malloc((size_t)(N - FROM) * HEADS * GROUP * D * sizeof *twin);
    eng_attn_prefill(attn, &view, 0, p.q, FROM, N - FROM, twin);
    float *got = prefill(&p, &(plan){FROM, 0, N - FROM, window, 0, &end, 1});
    for (uint32_t i = 0; i < N - FROM; i++)
        for (uint32_t h = 0; h < HEADS * GROUP; h++) {
            double want[D], bound[D];
            uint32_t n = 0;
            size_t at = ((size_t)i * HEADS * GROUP + h) * D;
            for (uint32_t row = FROM + i - window + 1; row <= FROM + i; row++)
                rows[n++] = row;
            reference(&p, p.q + at, h / GROUP, rows, n, tensor_precision(D, n, false), want, bound);
            for (uint32_t j = 0; j < D; j++)
                want[j] = twin[at + j], bound[j] *= 2;
            compare(got + at, want, bound, D, "the twin");
        }
    free(twin);
    eng_view_done(&view);
    eng_segment_unref(seg);
    eng_attn_free(attn);
    eng_pool_free(pool);
    problem_free(&p);
}
END_TEST

/* Of the emulated device: its compute capability, "7.5" and up. */
int main(int argc, char **argv)
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
    Suite *s = suite_create("attend");
    TCase *t = tcase_create("attend");
    tcase_add_test(t, decode_shapes);
    tcase_add_test(t, decode_nothing);
    tcase_add_test(t, decode_long);
    tcase_add_test(t, decode_large_scores);
    tcase_add_test(t, decode_any_grouping);
    tcase_add_test(t, merge_is_the_twins);
    tcase_add_test(t, prefill_shapes);
    tcase_add_test(t, prefill_long);
    tcase_add_test(t, prefill_large_scores);
    tcase_add_test(t, queries_are_float32);
    tcase_add_test(t, small_weights_count);
    tcase_add_test(t, prefill_any_cut);
    tcase_add_test(t, prefill_sees_nothing);
    tcase_add_test(t, prefill_is_the_twins);
    suite_add_tcase(s, t);
    return t_gpu_run(s);
}
