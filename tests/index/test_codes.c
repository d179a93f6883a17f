/* Codes and lists: retrieval by int8 codes and the estimate of what is not retrieved, against float64 brute force, on every instruction set of
 * the machine. What is true of lists alone is in test_lists.c, what is true of an arena's bytes in test_codes_arena.c.
 *
 * usage: test_codes [SET...]     with folders: prints errors and costs for them (data/qk/README.md gives the layout; values.npy is needed)
 */
#include "code_heads.h"

enum { SINKS = 128, WINDOW = 512 };

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Relative L2 error, against attention over all of [lo, hi) and the rows `also`, of what was retrieved with or without the estimate. */
static double error_of(const head *x, const float *q, double scale, uint32_t lo, uint32_t hi, uint32_t also, const result *r, uint32_t h,
                       bool estimate)
{
    double *full = need(calloc(2 * (size_t)x->dim, sizeof *full)), *got = full + x->dim, m = r->m[h], lf = 0, lg = 0, diff = 0, size = 0;
    for (uint32_t i = 0; i < x->n; i++) {
        bool in = i >= lo && i < hi;
        if (!in && !(i < also))
            continue;
        double p = exp(score_of(x, q, i, scale) - m);
        lf += p;
        lg += !in || r->retrieved[h][i] ? p : 0;
        for (uint32_t j = 0; j < x->dim; j++) {
            double v = p * x->v[(size_t)i * x->dim + j];
            full[j] += v;
            got[j] += !in || r->retrieved[h][i] ? v : 0;
        }
    }
    lg += estimate ? r->l[h] : 0;
    for (uint32_t j = 0; j < x->dim; j++) {
        double g = got[j] + (estimate ? r->o[h][j] : 0), d = g / lg - full[j] / lf;
        diff += d * d;
        size += full[j] / lf * (full[j] / lf);
    }
    free(full);
    return sqrt(diff / size);
}

/* A query of zeros gives each row weight 1, and then the estimate is exact whatever the clusters: the sum of the values of all rows that
 * are neither retrieved nor out of the range. So a row that is counted twice, forgotten or seen from outside of the range shows, for any
 * range, parts and budget. */
START_TEST(each_row_counts_once)
{
    idx_kind kind = code_kinds[_i % N_KINDS];
    idx_cpu_set((idx_cpu)(_i / N_KINDS));
    static const uint32_t sizes[] = {1, 15, 37, 1024, 12287, 12288, 20011};
    for (size_t t = 0; t < sizeof sizes / sizeof *sizes; t++) {
        uint32_t n = sizes[t], dim = 24;
        _Float16 *k = random_rows((size_t)n * dim, 1), *v = random_rows((size_t)n * dim, 1);
        head x = head_new(kind, k, v, n, dim);
        float q[MAX_GROUP * 24] = {0};
        for (int round = 0; round < 10; round++) {
            uint32_t lo = round ? (uint32_t)(t_u64(&rng) % n) : 0, hi = round ? lo + 1 + (uint32_t)(t_u64(&rng) % (n - lo)) : n;
            if (round > 7) { /* the first row alone, the last one alone */
                lo = round == 8 ? 0 : n - 1;
                hi = lo + 1;
            }
            float floor[MAX_GROUP] = {0};
            idx_query query = {.q = q,
                               .floor = round % 2 ? floor : NULL,
                               .group = MAX_GROUP,
                               .lo = lo,
                               .hi = hi,
                               .scale = 1,
                               .budget = {(uint32_t)(t_u64(&rng) % 300), 0}};
            result r = search(&x, &query, 1 + (uint32_t)round);
            for (uint32_t h = 0; h < MAX_GROUP; h++) {
                double rest[24] = {0}, total = 0;
                for (uint32_t i = lo; i < hi; i++)
                    if (!r.retrieved[h][i]) {
                        total++;
                        for (uint32_t j = 0; j < dim; j++)
                            rest[j] += x.v[(size_t)i * dim + j];
                    }
                double left = r.m[h] > -INFINITY ? r.l[h] * exp(r.m[h]) : 0;
                ck_assert_double_eq_tol(left, total, 1e-5 * total + 1e-9);
                for (uint32_t j = 0; j < dim; j++)
                    ck_assert_double_eq_tol(r.o[h][j], rest[j], 0.02);
            }
            result_free(&r);
        }
        head_free(&x);
        free(k);
        free(v);
    }
}
END_TEST

/* ---- real queries ------------------------------------------------------------------------------------------------ */

typedef struct {
    t_npy keys, values, decode;
} set;

static t_npy load(const char *dir, const char *name)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.npy", dir, name);
    return t_npy_load(path);
}

static void queries_at(const t_npy *decode, uint32_t step, float *q)
{
    size_t per = decode->dims[1] * decode->dims[2];
    const _Float16 *from = (const _Float16 *)decode->data + step * per;
    for (size_t i = 0; i < per; i++)
        q[i] = (float)from[i];
}

static int falling(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x < y) - (x > y);
}

/* Shares of the best 16 and best 100 rows of [lo, hi) that were retrieved. */
static void add_recall(const head *x, const float *q, double scale, uint32_t lo, uint32_t hi, const result *r, uint32_t h, double *ret16,
                       double *ret100)
{
    double *s = need(malloc((hi - lo) * sizeof *s)), *sorted = need(malloc((hi - lo) * sizeof *s));
    uint32_t best16 = 0, best100 = 0;
    for (uint32_t i = lo; i < hi; i++)
        s[i - lo] = score_of(x, q, i, scale);
    memcpy(sorted, s, (hi - lo) * sizeof *s);
    qsort(sorted, hi - lo, sizeof *s, falling);
    for (uint32_t i = lo; i < hi; i++) {
        best16 += r->retrieved[h][i] && s[i - lo] >= sorted[15];
        best100 += r->retrieved[h][i] && s[i - lo] >= sorted[99];
    }
    *ret16 += best16 / 16.;
    *ret100 += best100 / 100.;
    free(s);
    free(sorted);
}

/* Errors and recalls of top-k 100 over all steps and heads. */
typedef struct {
    double recall16, recall100, without, with, weight, n, hits;
} quality;

static quality measure(const head *x, const t_npy *decode, uint32_t lo, uint32_t hi, idx_budget budget, uint32_t steps, uint32_t parts)
{
    quality m = {0};
    uint32_t group = (uint32_t)decode->dims[1];
    for (uint32_t step = 0; step < steps; step++) {
        float q[MAX_GROUP * 256], floor[MAX_GROUP];
        queries_at(decode, step, q);
        for (uint32_t h = 0; h < group; h++) {
            double best = -INFINITY;
            for (uint32_t i = 0; i < lo; i++)
                best = fmax(best, score_of(x, q + (size_t)h * x->dim, i, 0.125));
            floor[h] = (float)best;
        }
        idx_query query = {.q = q, .floor = floor, .group = group, .lo = lo, .hi = hi, .scale = 0.125f, .budget = budget};
        result r = search(x, &query, parts);
        for (uint32_t h = 0; h < group; h++) {
            const float *qh = q + (size_t)h * x->dim;
            add_recall(x, qh, 0.125, lo, hi, &r, h, &m.recall16, &m.recall100);
            m.without += error_of(x, qh, 0.125, lo, hi, lo, &r, h, false);
            m.with += error_of(x, qh, 0.125, lo, hi, lo, &r, h, true);
            double l = 0;
            for (uint32_t i = lo; i < hi; i++)
                l += r.retrieved[h][i] ? 0 : exp(score_of(x, qh, i, 0.125) - r.m[h]);
            m.weight += fabs(r.l[h] / l - 1);
            m.hits += r.n_hits[h];
            m.n++;
        }
        result_free(&r);
    }
    m.recall16 /= m.n;
    m.recall100 /= m.n;
    m.without /= m.n;
    m.with /= m.n;
    m.weight /= m.n;
    m.hits /= m.n;
    return m;
}

static void table(const char *dir)
{
    set s = {load(dir, "keys"), load(dir, "values"), load(dir, "decode_q")};
    uint32_t n = (uint32_t)s.keys.dims[0], dim = (uint32_t)s.keys.dims[1], group = (uint32_t)s.decode.dims[1], hi = n - WINDOW;
    double start = seconds();
    head x = head_new(IDX_FLAT, s.keys.data, s.values.data, n, dim);
    double built = seconds() - start;
    size_t bytes;
    idx_arena(x.ix, &bytes);
    printf("%s: %u keys, build %.1f ms, %.1f bytes a key, %u clusters at most\n", strrchr(dir, '/') ? strrchr(dir, '/') + 1 : dir, n,
           built * 1e3, (double)bytes / n, idx_codes_max_clusters(n));
    static const idx_budget budgets[] = {{100, 0}, {512, 7}, {1024, 8}, {2048, 9}};
    for (int i = 0; i < 4; i++) {
        quality m = measure(&x, &s.decode, SINKS, hi, budgets[i], 24, 3);
        float q[MAX_GROUP * 256], *w = need(malloc((size_t)idx_codes_max_clusters(n) * MAX_GROUP * 4)), mm[MAX_GROUP];
        double scan[3] = {0};
        for (uint32_t step = 0; step < 24; step++) {
            queries_at(&s.decode, step, q);
            idx_query query = {.q = q, .group = group, .lo = SINKS, .hi = hi, .scale = 0.125f, .budget = budgets[i]};
            idx_hits *hits;
            uint32_t first, end;
            idx_codes_part(x.ix, SINKS, hi, 0, 1, &first, &end);
            start = seconds();
            idx_search(NULL, &x.keys, &query, x.scratch, &hits, NULL);
            scan[0] += seconds() - start;
            start = seconds();
            idx_codes_scan(x.ix, &x.keys, &query, first, end, x.scratch, NULL, 0, mm, &hits);
            scan[1] += seconds() - start;
            start = seconds();
            idx_codes_scan(x.ix, &x.keys, &query, first, end, x.scratch, w, idx_codes_max_clusters(n), mm, &hits);
            scan[2] += seconds() - start;
        }
        free(w);
        printf("  top %4u beta %.0f: hits %5.0f, recall@16 %.4f @100 %.4f, error %.4f -> %.4f, weight %.4f; ns a key: f16 scan %.2f, codes "
               "%.2f, + weights %.2f\n",
               budgets[i].top_k, (double)budgets[i].beta, m.hits, m.recall16, m.recall100, m.without, m.with, m.weight,
               scan[0] / 24 / n * 1e9, scan[1] / 24 / n * 1e9, scan[2] / 24 / n * 1e9);
    }
    head_free(&x);
    t_npy_free(&s.keys);
    t_npy_free(&s.values);
    t_npy_free(&s.decode);
}

/* Retrieval and estimate on real keys and values: what a budget must find (notes: int8 codes with spare candidates, recall >= .998; the
 * best 16 are never lost), and how much nearer to full attention the estimate comes. Measured once: .175 -> .0084 for top 100, .043 ->
 * .0014 for the default (of three parts each). */
START_TEST(real_queries)
{
    idx_kind kind = code_kinds[_i % N_KINDS];
    idx_cpu_set((idx_cpu)(_i / N_KINDS));
    const char *dir = t_path("data/qk/text_l6_kv0");
    set s = {load(dir, "keys"), load(dir, "values"), load(dir, "decode_q")};
    t_npy train = load(dir, "prefill_q"), train_pos = load(dir, "prefill_q_pos"), key_pos = load(dir, "key_pos");
    uint32_t n = (uint32_t)s.keys.dims[0], m = (uint32_t)train.dims[0], row = 0, *pos = need(malloc(m * sizeof *pos));
    for (uint32_t i = 0; i < m; i++) {
        while (row + 1 < n && ((const int32_t *)key_pos.data)[row + 1] <= ((const int32_t *)train_pos.data)[i])
            row++;
        pos[i] = row;
    }
    idx_queries queries = {train.data, pos, m, (uint32_t)train.dims[1]};
    head x = head_trained(kind, s.keys.data, s.values.data, n, (uint32_t)s.keys.dims[1], &queries);
    /* the clusters' estimate has each part's own clamp: in one part, as a search without others */
    uint32_t parts = is_flat(kind) ? 3 : 1;
    quality top = measure(&x, &s.decode, SINKS, n - WINDOW, (idx_budget){100, 0}, 12, parts);
    quality dynamic = measure(&x, &s.decode, SINKS, n - WINDOW, (idx_budget){1024, 8}, 12, parts);
    printf("kind %d, top 100: recall@16 %.4f @100 %.4f, error %.4f -> %.4f, weights off by %.5f; beta 8: hits %.0f, error %.4f -> %.4f\n",
           (int)kind, top.recall16, top.recall100, top.without, top.with, top.weight, dynamic.hits, dynamic.without, dynamic.with);
    ck_assert_double_ge(top.recall16, kind == IDX_FLAT ? 1 : kind == IDX_IVF ? 0.99 : 0.999);
    ck_assert_double_ge(top.recall100, kind == IDX_FLAT ? 0.998 : is_flat(kind) ? 0.97 : 0.99); /* four bits: the candidates are enough for the best 16 */
    ck_assert_double_le(top.with * (is_flat(kind) ? 5 : 1.5), top.without);
    ck_assert_double_le(dynamic.with * (is_flat(kind) ? 5 : 1.5), dynamic.without);
    if (kind == IDX_FLAT)
        ck_assert_double_le(top.weight, 0.002);
    head_free(&x);
    t_npy *all[] = {&s.keys, &s.values, &s.decode, &train, &train_pos, &key_pos};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        t_npy_free(all[i]);
    free(pos);
}
END_TEST

/* Values of a few kinds are clusters of one value each: then the estimate is exact but for the rounding of codes, in any range. */
START_TEST(exact_for_few_values)
{
    idx_cpu_set((idx_cpu)_i);
    enum { N = 9000, DIM = 40 };
    _Float16 *k = random_rows((size_t)N * DIM, 1), *kinds = random_rows(4 * DIM, 1), *v = need(malloc((size_t)N * DIM * 2));
    for (uint32_t i = 0; i < N; i++)
        memcpy(v + (size_t)i * DIM, kinds + (t_u64(&rng) % 4) * DIM, DIM * 2);
    head x = head_new(IDX_FLAT, k, v, N, DIM);
    for (int round = 0; round < 6; round++) {
        float q[MAX_GROUP * DIM];
        for (int i = 0; i < MAX_GROUP * DIM; i++)
            q[i] = t_normal(&rng);
        uint32_t lo = (uint32_t)(t_u64(&rng) % 4000), hi = N - (uint32_t)(t_u64(&rng) % 4000);
        idx_query query = {.q = q, .group = MAX_GROUP, .lo = lo, .hi = hi, .scale = 0.2f, .budget = {(uint32_t)(round * 30), 0}};
        result r = search(&x, &query, 1 + (uint32_t)round % 3);
        for (uint32_t h = 0; h < MAX_GROUP; h++)
            ck_assert_double_le(error_of(&x, q + (size_t)h * DIM, (double)0.2f, lo, hi, 0, &r, h, true), 5e-3);
        result_free(&r);
    }
    head_free(&x);
    free(k);
    free(v);
    free(kinds);
}
END_TEST

static Suite *suite(void)
{
    Suite *s = suite_create("codes");
    TCase *t = tcase_create("codes");
    tcase_set_timeout(t, 0);
    tcase_add_loop_test(t, each_row_counts_once, 0, N_KINDS * ((int)idx_cpu_detect() + 1));
    tcase_add_loop_test(t, exact_for_few_values, 0, (int)idx_cpu_detect() + 1);
    tcase_add_loop_test(t, real_queries, 0, N_KINDS * ((int)idx_cpu_detect() + 1));
    suite_add_tcase(s, t);
    return s;
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        for (int i = 1; i < argc; i++)
            table(argv[i]);
        return 0;
    }
    rng = t_seed(7);
    return t_run(suite());
}
