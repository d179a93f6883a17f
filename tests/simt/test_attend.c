/* Decode attention and the merge of parts, through gpu.h alone: against float64 over all keys and against the engine's scalar twins. */
#include "attend_support.h"

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

START_TEST(decode_single_products)
{
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t d = i & 2 ? 128 : 64;
        problem p = one_hot_problem(d, i & 1 ? ENG_KV_BF16 : ENG_KV_F16);
        decode_case(&p, &(gpu_rows){0, d}, 1, 0);
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

int main(int argc, char **argv)
{
    Suite *s = suite_create("attend");
    TCase *t = tcase_create("attend");
    tcase_add_test(t, decode_shapes);
    tcase_add_test(t, decode_nothing);
    tcase_add_test(t, decode_long);
    tcase_add_test(t, decode_large_scores);
    tcase_add_test(t, decode_single_products);
    tcase_add_test(t, decode_any_grouping);
    tcase_add_test(t, merge_is_the_twins);
    suite_add_tcase(s, t);
    return attend_main(argc, argv, s);
}
