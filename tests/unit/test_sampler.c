/* The sampler against brute force: exact candidate sets by sorting, counts of draws against the distribution they should follow. */
#include "sampler.h"
#include "support.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static const eng_kernels *kernels; /* the machine's best */

static eng_sampling plain(void)
{
    return (eng_sampling){.temperature = 1, .top_p = 1, .repeat_penalty = 1, .repeat_last_n = 64, .seed = 1};
}

static eng_sampler *sampler(const eng_sampling *p, uint32_t n)
{
    eng_sampler *s = NULL;
    ck_assert_int_eq(eng_sampler_new(p, kernels, n, &s), 0);
    return s;
}

static void random_logits(t_rng *rng, float *x, size_t n, bool ties)
{
    for (size_t i = 0; i < n; i++) {
        x[i] = 3 * t_normal(rng);
        if (ties)
            x[i] = roundf(x[i]);
    }
}

/* ---- the truth, slowly -------------------------------------------------------------------------------------------- */

typedef struct {
    int id;
    double logit;
} ranked;

static int by_rank(const void *pa, const void *pb)
{
    const ranked *a = pa, *b = pb;
    return a->logit < b->logit ? 1 : a->logit > b->logit ? -1 : a->id - b->id;
}

/* Probability of each id under the settings, by the definition of each step. */
static void expected(const eng_sampling *p, const float *logits, size_t n, double *prob)
{
    ranked *r = malloc(n * sizeof *r);
    size_t m = 0;
    for (size_t i = 0; i < n; i++)
        if (isfinite(logits[i]))
            r[m++] = (ranked){(int)i, (double)logits[i]};
    qsort(r, m, sizeof *r, by_rank);
    if (p->top_k > 0 && (size_t)p->top_k < m)
        m = (size_t)p->top_k;
    double sum = 0, cumulated = 0, max = r[0].logit;
    for (size_t i = 0; i < m; i++)
        sum += exp(r[i].logit - max);
    if (p->top_p < 1) {
        size_t keep = 0;
        while (keep < m && cumulated < (double)p->top_p)
            cumulated += exp(r[keep++].logit - max) / sum;
        m = keep ? keep : 1;
    }
    while (m > 1 && exp(r[m - 1].logit - max) < (double)p->min_p)
        m--;
    memset(prob, 0, n * sizeof *prob);
    for (size_t i = sum = 0; i < m; i++)
        sum += exp((r[i].logit - max) / (double)p->temperature);
    for (size_t i = 0; i < m; i++)
        prob[r[i].id] = exp((r[i].logit - max) / (double)p->temperature) / sum;
    free(r);
}

/* Draws `times` and compares: nothing outside the set, everything likely inside, counts as a multinomial would have them. */
static void check_distribution(const eng_sampling *p, const float *logits, size_t n, const double *prob, int times)
{
    eng_sampler *s = sampler(p, (uint32_t)n);
    int *count = calloc(n, sizeof *count);
    for (int i = 0; i < times; i++) {
        eng_token t;
        eng_sampler_pick(s, logits, &t);
        ck_assert(t.id >= 0 && (size_t)t.id < n);
        count[t.id]++;
    }
    double chi2 = 0, rest = 0, rest_count = 0;
    int cells = 0;
    for (size_t i = 0; i < n; i++) {
        double want = prob[i] * times;
        ck_assert_msg(prob[i] > 0 || !count[i], "id %zu is outside the set, drawn %d times", i, count[i]);
        if (want >= 5) {
            chi2 += (count[i] - want) * (count[i] - want) / want;
            cells++;
        } else {
            rest += want;
            rest_count += count[i];
        }
    }
    if (rest >= 5) {
        chi2 += (rest_count - rest) * (rest_count - rest) / rest;
        cells++;
    }
    /* Mean cells - 1, variance twice that: five deviations, with a fixed seed. */
    ck_assert_msg(chi2 <= cells - 1 + 5 * sqrt(2.0 * cells), "chi squared %g with %d cells", chi2, cells);
    free(count);
    eng_sampler_free(s);
}

START_TEST(test_distributions)
{
    static const struct {
        float temperature;
        int top_k;
        float top_p, min_p;
    } cases[] = {
        {1, 0, 1, 0},     {1, 5, 1, 0},     {1, 0, .7f, 0},    {1, 0, 1, .1f}, {1, 20, .8f, .05f}, {.5f, 40, .95f, .05f},
        {2, 40, .95f, 0}, {1, 0, .999f, 0}, {1, 100000, 1, 0}, {1, 1, 1, 0},   {1, 0, 0, 0},       {1, 0, 1, 1},
        {100, 3, 1, 0},   {1e-6f, 0, 1, 0}, {1, 64, .5f, .9f}, {1, 0, -1, 0},  {1e-38f, 0, 1, 0},
    };
    enum { N = 300 };
    float x[N];
    double prob[N];
    t_rng rng = t_seed(21);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int ties = 0; ties < 2; ties++) {
            eng_sampling p = plain();
            p.temperature = cases[i].temperature;
            p.top_k = cases[i].top_k;
            p.top_p = cases[i].top_p;
            p.min_p = cases[i].min_p;
            random_logits(&rng, x, N, ties);
            expected(&p, x, N, prob);
            check_distribution(&p, x, N, prob, 8000);
        }
}
END_TEST

/* The exact set: at a high temperature every kept token comes up soon. */
START_TEST(test_exact_sets)
{
    enum { N = 200 };
    float x[N];
    double prob[N];
    t_rng rng = t_seed(22);
    for (int round = 0; round < 200; round++) {
        eng_sampling p = plain();
        p.temperature = 1e6f; /* all kept ones equally likely */
        p.top_k = round % 3 ? 1 + (int)(t_u64(&rng) % 30) : 0;
        p.top_p = round % 2 ? (float)t_uniform(&rng) : 1;
        p.min_p = round % 5 ? 0 : (float)t_uniform(&rng) * .3f;
        random_logits(&rng, x, N, round % 4 == 0);
        if (p.top_k == 0 && p.top_p == 1)
            p.top_k = 30;
        expected(&p, x, N, prob);
        eng_sampler *s = sampler(&p, N);
        bool seen[N] = {0};
        for (int i = 0; i < 2000; i++) {
            eng_token t;
            eng_sampler_pick(s, x, &t);
            seen[t.id] = true;
        }
        for (int i = 0; i < N; i++)
            ck_assert_msg(seen[i] == (prob[i] > 0), "round %d: id %d is %s", round, i, seen[i] ? "drawn" : "never drawn");
        eng_sampler_free(s);
    }
}
END_TEST

/* Of a real vocabulary's size, where few are near the best, all are, or the ties go on beyond k. */
START_TEST(test_large_vocabulary)
{
    enum { N = 30000 };
    float *x = malloc(N * sizeof *x);
    double *prob = malloc(N * sizeof *prob);
    t_rng rng = t_seed(23);
    for (int kind = 0; kind < 4; kind++) {
        for (size_t i = 0; i < N; i++)
            x[i] = kind == 0 ? 3 * t_normal(&rng) : kind == 1 ? -5 : kind == 2 ? -100 + t_normal(&rng) : (float)(i % 7);
        if (kind == 2)
            for (int i = 0; i < 10; i++)
                x[1000 * i] = (float)i; /* 10 near the best, 30 of the top 40 far below */
        eng_sampling p = plain();
        p.top_k = 40;
        expected(&p, x, N, prob);
        check_distribution(&p, x, N, prob, 400);
        p.temperature = 1e6f;
        expected(&p, x, N, prob);
        check_distribution(&p, x, N, prob, 400);
        p.top_k = 0;
        p.top_p = kind == 1 || kind == 3 ? .001f : .5f;
        p.temperature = 1;
        expected(&p, x, N, prob);
        if (kind != 1) /* whose sum of equal shares ends at a rounding error */
            check_distribution(&p, x, N, prob, 100);
    }
    free(x);
    free(prob);
}
END_TEST

/* ---- greedy, seeds, odd numbers ----------------------------------------------------------------------------------- */

START_TEST(test_greedy)
{
    eng_sampling p = plain();
    float x[100];
    t_rng rng = t_seed(24);
    for (int round = 0; round < 300; round++) {
        p.temperature = round % 2 ? 0 : -1;
        p.top_k = round % 3;
        eng_sampler *s = sampler(&p, 100);
        random_logits(&rng, x, 100, round & 1);
        int best = 0;
        for (int i = 1; i < 100; i++)
            if (x[i] > x[best])
                best = i;
        eng_token t;
        eng_sampler_pick(s, x, &t);
        ck_assert_int_eq(t.id, best);
        eng_sampler_free(s);
    }
}
END_TEST

START_TEST(test_seed)
{
    enum { N = 1000, STEPS = 64 };
    float x[N];
    t_rng rng = t_seed(25);
    random_logits(&rng, x, N, false);
    int32_t first[STEPS];
    for (int run = 0; run < 3; run++) {
        eng_sampling p = plain();
        p.seed = run < 2 ? 7 : 8;
        eng_sampler *s = sampler(&p, N);
        int same = 0;
        for (int i = 0; i < STEPS; i++) {
            eng_token t;
            eng_sampler_pick(s, x, &t);
            if (!run)
                first[i] = t.id;
            same += first[i] == t.id;
        }
        if (run < 2)
            ck_assert_int_eq(same, STEPS);
        else
            ck_assert_int_lt(same, STEPS / 2);
        eng_sampler_free(s);
    }
}
END_TEST

START_TEST(test_not_numbers)
{
    enum { N = 37 };
    float x[N];
    t_rng rng = t_seed(26);
    for (int round = 0; round < 1000; round++) {
        eng_sampling p = plain();
        p.temperature = round % 3 ? 1 : 0;
        p.top_k = round % 5 * 10;
        p.top_p = round % 2 ? .9f : 1;
        p.repeat_penalty = round % 7 ? 1 : 1.5f;
        p.n_logprobs = 20;
        random_logits(&rng, x, N, false);
        for (int i = 0; i < N; i++)
            if (t_u64(&rng) % 4)
                x[i] = (float[]){NAN, INFINITY, -INFINITY, -NAN}[t_u64(&rng) % 4];
        int good = (int)(t_u64(&rng) % N), n = 0;
        x[good] = round % 11 ? 1 : -FLT_MAX;
        double sum = 0;
        for (int i = 0; i < N; i++)
            if (isfinite(x[i])) {
                sum += exp((double)x[i]);
                n++;
            }
        eng_sampler *s = sampler(&p, N);
        for (int i = 0; i < N; i++)
            eng_sampler_accept(s, i);
        eng_token t;
        eng_sampler_pick(s, x, &t);
        ck_assert(t.id >= 0 && t.id < N && isfinite(x[t.id]) && isfinite(t.logprob));
        if (round % 11)
            ck_assert_double_eq_tol((double)t.logprob, (double)x[t.id] - log(sum), 1e-5);
        ck_assert_int_eq(t.n_top, n < 20 ? n : 20);
        for (uint32_t i = 0; i < t.n_top; i++)
            ck_assert(isfinite(x[t.top[i].id]));
        eng_sampler_free(s);
    }
    /* Not one number: something in range all the same. */
    eng_sampling p = plain();
    eng_sampler *s = sampler(&p, N);
    for (int i = 0; i < N; i++)
        x[i] = i & 1 ? NAN : -INFINITY;
    eng_token t;
    eng_sampler_pick(s, x, &t);
    ck_assert(t.id >= 0 && t.id < N && isfinite(t.logprob) && !t.n_top);
    eng_sampler_free(s);
}
END_TEST

/* Extreme but finite: one far above the rest takes all. */
START_TEST(test_extremes)
{
    float x[5] = {-FLT_MAX, 0, FLT_MAX, -1e30f, 1e30f};
    for (int k = 0; k < 3; k++) {
        eng_sampling p = plain();
        p.top_k = k;
        p.top_p = k ? .9f : 1;
        p.n_logprobs = 5;
        eng_sampler *s = sampler(&p, 5);
        eng_token t;
        eng_sampler_pick(s, x, &t);
        ck_assert_int_eq(t.id, 2);
        ck_assert_float_eq(t.logprob, 0);
        ck_assert_int_eq(t.top[4].id, 0);
        eng_sampler_free(s);
    }
}
END_TEST

START_TEST(test_bad_vocabulary)
{
    eng_sampling p = plain();
    eng_sampler *s = NULL;
    ck_assert_int_lt(eng_sampler_new(&p, kernels, 0, &s), 0);
    ck_assert_ptr_null(s);
    eng_sampler_free(NULL);
}
END_TEST

/* ---- log-probabilities -------------------------------------------------------------------------------------------- */

/* Of the unmodified logits whatever the settings: against double precision, sorted. */
START_TEST(test_logprobs)
{
    enum { N = 5000 };
    float x[N];
    ranked r[N];
    t_rng rng = t_seed(27);
    for (int round = 0; round < 60; round++) {
        eng_sampling p = plain();
        p.n_logprobs = (uint32_t)round % 22; /* above 20: 20 */
        p.temperature = (float)(round % 3);
        p.top_k = 3;
        p.repeat_penalty = 1.3f;
        random_logits(&rng, x, N, round & 1);
        for (int i = 0; i < N; i++) {
            x[i] += round % 4 == 3 ? 1e4f : round % 4 == 2 ? -1e4f : 0;
            r[i] = (ranked){i, (double)x[i]};
        }
        qsort(r, N, sizeof *r, by_rank);
        double sum = 0;
        for (int i = 0; i < N; i++)
            sum += exp(r[i].logit - r[0].logit);
        double lse = r[0].logit + log(sum);
        eng_sampler *s = sampler(&p, N);
        for (int i = 0; i < 30; i++)
            eng_sampler_accept(s, r[i].id);
        float before[N];
        memcpy(before, x, sizeof x);
        eng_token t;
        eng_sampler_pick(s, x, &t);
        ck_assert_mem_eq(before, x, sizeof x);
        ck_assert_double_eq_tol((double)t.logprob, (double)x[t.id] - lse, 1e-5);
        ck_assert_uint_eq(t.n_top, p.n_logprobs < 20 ? p.n_logprobs : 20);
        for (uint32_t i = 0; i < t.n_top; i++) {
            ck_assert_int_eq(t.top[i].id, r[i].id);
            ck_assert_double_eq_tol((double)t.top[i].logprob, r[i].logit - lse, 1e-5);
        }
        eng_sampler_free(s);
    }
}
END_TEST

/* ---- penalties ---------------------------------------------------------------------------------------------------- */

/* Greedy over a text of random tokens, against penalties worked out anew from the last tokens each time. */
START_TEST(test_penalties)
{
    enum { N = 40, STEPS = 400 };
    static const struct {
        float repeat, presence, frequency;
        int last_n;
    } cases[] = {{1.3f, 0, 0, 64},    {1.3f, 0, 0, 5},       {1, .7f, 0, 16}, {1, 0, .4f, 16},           {1.1f, .5f, .2f, -1},
                 {1.1f, .5f, .2f, 1}, {.8f, -.5f, -.2f, 32}, {1.5f, 1, 1, 0}, {1.2f, 0, .3f, INT32_MAX}, {1, 0, 0, 64}};
    t_rng rng = t_seed(28);
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        eng_sampling p = plain();
        p.temperature = 0;
        p.repeat_penalty = cases[c].repeat;
        p.presence_penalty = cases[c].presence;
        p.frequency_penalty = cases[c].frequency;
        p.repeat_last_n = cases[c].last_n;
        eng_sampler *s = sampler(&p, N);
        int text[STEPS];
        for (int n = 0; n < STEPS; n++) {
            float x[N], y[N];
            random_logits(&rng, x, N, false);
            int count[N] = {0};
            for (int i = n - 1; i >= 0 && (cases[c].last_n < 0 || n - i <= cases[c].last_n); i--)
                count[text[i]]++;
            for (int i = 0; i < N; i++) {
                y[i] = x[i];
                if (!count[i])
                    continue;
                y[i] = x[i] > 0 ? x[i] / cases[c].repeat : x[i] * cases[c].repeat;
                y[i] -= (float)count[i] * cases[c].frequency + cases[c].presence;
            }
            int best = 0;
            for (int i = 1; i < N; i++)
                if (y[i] > y[best])
                    best = i;
            eng_token t;
            eng_sampler_pick(s, x, &t);
            ck_assert_msg(t.id == best, "case %zu, step %d: %d, not %d", c, n, t.id, best);
            text[n] = (int)(t_u64(&rng) % N);
            eng_sampler_accept(s, text[n]);
            eng_sampler_accept(s, -1); /* no token: no harm */
            eng_sampler_accept(s, N);
        }
        eng_sampler_free(s);
    }
}
END_TEST

/* Penalties come before truncation: the top two after them, not before. */
START_TEST(test_penalties_come_first)
{
    float x[4] = {5, 4.9f, 4.8f, 4.7f}, y[4] = {4, 3.9f, 4.8f, 4.7f};
    eng_sampling p = plain();
    p.top_k = 2;
    double prob[4];
    expected(&p, y, 4, prob);
    p.presence_penalty = 1;
    eng_sampler *s = sampler(&p, 4);
    eng_sampler_accept(s, 0);
    eng_sampler_accept(s, 1);
    int count[4] = {0};
    for (int i = 0; i < 1000; i++) {
        eng_token t;
        eng_sampler_pick(s, x, &t);
        count[t.id]++;
    }
    for (int i = 0; i < 4; i++)
        ck_assert_double_eq_tol(count[i] / 1000., prob[i], .06);
    eng_sampler_free(s);
}
END_TEST

int main(void)
{
    char err[200];
    if (eng_kernels_get(ENG_CPU_AUTO, &kernels, err, sizeof err) < 0)
        return 1;
    Suite *s = suite_create("sampler");
    TCase *c = tcase_create("sampler");
    tcase_add_test(c, test_distributions);
    tcase_add_test(c, test_exact_sets);
    tcase_add_test(c, test_large_vocabulary);
    tcase_add_test(c, test_greedy);
    tcase_add_test(c, test_seed);
    tcase_add_test(c, test_not_numbers);
    tcase_add_test(c, test_extremes);
    tcase_add_test(c, test_bad_vocabulary);
    tcase_add_test(c, test_logprobs);
    tcase_add_test(c, test_penalties);
    tcase_add_test(c, test_penalties_come_first);
    suite_add_tcase(s, c);
    return t_run(s);
}
