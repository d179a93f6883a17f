/* The kernels over KV rows and the element-wise ones: every level against float64 (or against the rounding of quant.h), and the
 * determinism rules of kernels.h.
 */
#include "kernel_support.h"
#include "segment.h"

#define COUNT(a) (sizeof(a) / sizeof *(a))
static const eng_type kv_types[ENG_KV_TYPES] = {[ENG_KV_F32] = ENG_F32, [ENG_KV_F16] = ENG_F16, [ENG_KV_BF16] = ENG_BF16, [ENG_KV_Q8_0] = ENG_Q8_0};
static const size_t dims[] = {1, 2, 7, 8, 15, 16, 17, 24, 64, 80, 96, 100, 128, 256};

/* ---- KV rows ---------------------------------------------------------------------------------------------------- */

/* A block's scale and codes, from the definition in kernels.h. */
static float q8_want(const float *x, size_t n, size_t at)
{
    size_t lo = at / 32 * 32, hi = lo + 32 < n ? lo + 32 : n;
    float max = 0;
    for (size_t i = lo; i < hi; i++) {
        if (isnan(x[i]))
            return NAN;
        max = fmaxf(max, fabsf(x[i]));
    }
    float d = eng_f16_to_f32(eng_f32_to_f16(fminf(max / 127, 65504)));
    float code = d == 0 ? 0 : nearbyintf(fmaxf(-127, fminf(127, x[at] * (1 / d))));
    return code * d + 0.0f; /* no code is -0 */
}

START_TEST(kv_load_store)
{
    static const float special[] = {0,           -0.0f,       INFINITY, -INFINITY, NAN,    FLT_MAX,     -FLT_MAX,   FLT_MIN,
                                    1e-40f,      65504,       65519,    65520,     -65520, 6e-8f,       3e-8f,      2.9e-8f,
                                    1.00048828f, 1.00146484f, 6.1e-5f,  -1e-6f,    1e30f,  1.00390625f, 1.01171875f};
    t_rng rng = t_seed(11);
    FOR_LEVELS(k)
    for (int type = 0; type < ENG_KV_TYPES; type++)
        for (size_t n = 0; n < 70; n++) {
            float *x = t_floats(n), *back = t_floats(n);
            char *row = t_alloc(eng_kv_row_bytes((eng_kv_type)type, (uint32_t)n));
            for (size_t i = 0; i < n; i++)
                x[i] = t_u64(&rng) % 2 ? special[t_u64(&rng) % COUNT(special)] : t_normal(&rng);
            k->kv_store[type](x, row, n);
            k->kv_load[type](row, back, n);
            for (size_t i = 0; i < n; i++) {
                float want = x[i];
                if (type == ENG_KV_F16)
                    want = eng_f16_to_f32(eng_f32_to_f16(fabsf(x[i]) > 65504 ? copysignf(65504, x[i]) : x[i]));
                if (type == ENG_KV_BF16)
                    want = eng_bf16_to_f32(eng_f32_to_bf16(x[i]));
                if (type == ENG_KV_Q8_0)
                    want = q8_want(x, n, i);
                if (isnan(want) ? !isnan(back[i]) : memcmp(&want, &back[i], 4) != 0)
                    ck_abort_msg("%s, type %d: %.9g came back as %.9g, not %.9g", k->name, type, (double)x[i], (double)back[i],
                                 (double)want);
            }
            t_arena_reset();
        }
}
END_TEST

/* By the plain C of quant.h; a row has whole blocks. */
static void load_row(int type, const char *row, float *out, size_t d)
{
    float whole[512];
    size_t block = eng_types[kv_types[type]].block;
    eng_dequantize(kv_types[type], row, whole, (d + block - 1) / block * block);
    memcpy(out, whole, d * sizeof *out);
}

/* rows x d in a KV type, `stride` bytes apart; the same values as float32 in *ret_f. */
static char *kv_rows(t_rng *rng, int type, size_t rows, size_t d, size_t stride, float **ret_f)
{
    char *kv = t_alloc(rows ? (rows - 1) * stride + eng_kv_row_bytes((eng_kv_type)type, (uint32_t)d) : 0);
    *ret_f = t_randoms(rng, rows * d);
    for (size_t r = 0; r < rows; r++) {
        t_level(ENG_CPU_SCALAR)->kv_store[type](*ret_f + r * d, kv + r * stride, d);
        load_row(type, kv + r * stride, *ret_f + r * d, d);
    }
    return kv;
}

static void check_qk(const eng_kernels *k, int type, t_rng *rng, size_t group, size_t rows, size_t d)
{
    size_t stride = eng_kv_row_bytes((eng_kv_type)type, (uint32_t)d) + (rows % 3) * 4, lds = rows + 2;
    float *f, *q = t_randoms(rng, group * d), *s = t_floats(group * lds), one;
    char *kv = kv_rows(rng, type, rows, d, stride, &f);
    for (size_t i = 0; i < group * lds; i++)
        s[i] = 77;
    k->qk[type](s, lds, q, group, kv, stride, rows, d);
    for (size_t g = 0; g < group; g++) {
        for (size_t r = 0; r < rows; r++) {
            double want = 0, size = 0;
            for (size_t i = 0; i < d; i++) {
                want += (double)q[g * d + i] * f[r * d + i];
                size += fabs((double)q[g * d + i] * f[r * d + i]);
            }
            t_near("qk", k->name, s[g * lds + r], want, ((double)d + 2) * EPS * size);
            k->qk[type](&one, 1, q + g * d, 1, kv + r * stride, stride, 1, d);
            t_same("a score alone", k->name, &one, &s[g * lds + r], 4);
        }
        for (size_t r = rows; r < lds; r++)
            ck_assert_msg(s[g * lds + r] == 77, "%s: qk wrote beyond its rows", k->name);
    }
    t_arena_reset();
}

START_TEST(qk)
{
    static const size_t groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, counts[] = {0, 1, 3, 4, 5, 11};
    t_rng rng = t_seed(12);
    FOR_LEVELS(k)
    for (int type = 0; type < ENG_KV_TYPES; type++)
        for (size_t g = 0; g < COUNT(groups); g++)
            for (size_t r = 0; r < COUNT(counts); r++)
                for (size_t i = 0; i < COUNT(dims); i++)
                    check_qk(k, type, &rng, groups[g], counts[r], dims[i]);
}
END_TEST

static void check_pv(const eng_kernels *k, int type, t_rng *rng, size_t group, size_t rows, size_t d)
{
    size_t stride = eng_kv_row_bytes((eng_kv_type)type, (uint32_t)d) + (rows % 3) * 4, ldp = rows + 1;
    float *f, *p = t_randoms(rng, group * ldp), *start = t_randoms(rng, group * d), *o = t_floats(group * d), *o2 = t_floats(group * d);
    char *v = kv_rows(rng, type, rows, d, stride, &f);
    uint32_t *ids = t_alloc(rows * sizeof *ids);
    for (size_t r = 0; r < rows; r++)
        ids[r] = (uint32_t)(t_u64(rng) % rows);
    memcpy(o, start, group * d * 4);
    k->pv[type](o, p, ldp, group, v, stride, rows, d);
    for (size_t g = 0; g < group; g++)
        for (size_t i = 0; i < d; i++) {
            double want = start[g * d + i], size = fabs(want);
            for (size_t r = 0; r < rows; r++) {
                want += (double)p[g * ldp + r] * f[r * d + i];
                size += fabs((double)p[g * ldp + r] * f[r * d + i]);
            }
            t_near("pv", k->name, o[g * d + i], want, ((double)rows + 2) * EPS * size);
        }
    /* one head alone, in two calls: the same bits */
    for (size_t g = 0; g < group; g++) {
        size_t cut = rows / 2;
        memcpy(o2, start + g * d, d * 4);
        k->pv[type](o2, p + g * ldp, ldp, 1, v, stride, cut, d);
        k->pv[type](o2, p + g * ldp + cut, ldp, 1, v + cut * stride, stride, rows - cut, d);
        t_same("a head alone, in two calls", k->name, o2, o + g * d, d * 4);
    }
    memcpy(o, start, d * 4);
    k->pv_gather[type](o, p, ids, rows, v, stride, d);
    for (size_t i = 0; i < d; i++) {
        double want = start[i], size = fabs(want);
        for (size_t r = 0; r < rows; r++) {
            want += (double)p[r] * f[ids[r] * d + i];
            size += fabs((double)p[r] * f[ids[r] * d + i]);
        }
        t_near("pv_gather", k->name, o[i], want, ((double)rows + 2) * EPS * size);
    }
    memcpy(o2, start, d * 4);
    k->pv_gather[type](o2, p, ids, rows / 3, v, stride, d);
    k->pv_gather[type](o2, p + rows / 3, ids + rows / 3, rows - rows / 3, v, stride, d);
    t_same("gathered in two calls", k->name, o2, o, d * 4);
    t_arena_reset();
}

START_TEST(pv)
{
    static const size_t groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 9}, counts[] = {0, 1, 3, 4, 11, 40};
    t_rng rng = t_seed(13);
    FOR_LEVELS(k)
    for (int type = 0; type < ENG_KV_TYPES; type++)
        for (size_t g = 0; g < COUNT(groups); g++)
            for (size_t r = 0; r < COUNT(counts); r++)
                for (size_t i = 0; i < COUNT(dims); i++)
                    check_pv(k, type, &rng, groups[g], counts[r], dims[i]);
}
END_TEST

/* ---- softmax ---------------------------------------------------------------------------------------------------- */

START_TEST(maximum)
{
    t_rng rng = t_seed(14);
    FOR_LEVELS(k)
    {
        ck_assert(k->max(NULL, 0) == -INFINITY);
        for (size_t n = 1; n < 100; n++) {
            float *x = t_randoms(&rng, n);
            for (size_t at = 0; at < n; at++) {
                float was = x[at];
                x[at] = at % 2 ? INFINITY : 50;
                ck_assert_msg(k->max(x, n) == x[at], "%s: max of %zu at %zu", k->name, n, at);
                x[at] = was;
            }
            for (size_t i = 0; i < n; i++)
                x[i] = -INFINITY;
            ck_assert(k->max(x, n) == -INFINITY);
            t_arena_reset();
        }
    }
}
END_TEST

static void check_softmax(const eng_kernels *k, t_rng *rng, size_t n, float spread)
{
    const size_t pad = 37;
    float *x = t_floats(n), *e = t_floats(n), *padded = t_floats(n + pad), m = -INFINITY, one, sum, sum2;
    for (size_t i = 0; i < n; i++) {
        x[i] = t_u64(rng) % 9 == 0 ? -INFINITY : t_normal(rng) * spread;
        m = x[i] > m ? x[i] : m;
    }
    memcpy(e, x, n * 4);
    sum = k->softmax(e, n, m);
    double want_sum = 0;
    for (size_t i = 0; i < n; i++) {
        double want = m == -INFINITY ? 0 : exp((double)x[i] - m);
        /* x - m is rounded once, which moves the result by |x - m| EPS of itself */
        double move = m == -INFINITY || x[i] == -INFINITY ? 0 : fabs((double)x[i] - m) * EPS;
        t_near("exp", k->name, e[i], want, want * (0x1p-20 + move) + FLT_MIN);
        if (x[i] == -INFINITY)
            ck_assert(e[i] == 0);
        want_sum += e[i];
        one = x[i];
        k->softmax(&one, 1, m);
        t_same("exp elsewhere", k->name, &one, &e[i], 4);
    }
    t_near("sum", k->name, sum, want_sum, ((double)n / 8 + 8) * EPS * want_sum);
    memcpy(padded, x, n * 4);
    for (size_t p = 0; p <= pad; p++) {
        for (size_t i = 0; i < n + p; i++)
            padded[i] = i < n ? x[i] : -INFINITY;
        sum2 = k->softmax(padded, n + p, m);
        t_same("sum of a padded row", k->name, &sum2, &sum, 4);
        t_same("a padded row", k->name, padded, e, n * 4);
    }
    t_arena_reset();
}

START_TEST(softmax)
{
    t_rng rng = t_seed(15);
    FOR_LEVELS(k)
    {
        for (size_t n = 0; n < 70; n++)
            for (float spread = 0.1f; spread < 2e4f; spread *= 10)
                check_softmax(k, &rng, n, spread);
        check_softmax(k, &rng, 5000, 3);
        for (float x = -87.2f; x > -87.5f; x -= 0.001f) { /* where results begin to be 0 */
            float e = x;
            k->softmax(&e, 1, 0);
            t_near("exp", k->name, e, exp(x), exp(x) * 0x1p-20 + (x < -87.336f ? FLT_MIN : 0));
        }
        float x[3] = {-INFINITY, -INFINITY, -INFINITY}; /* nothing to attend to */
        ck_assert(k->softmax(x, 3, -INFINITY) == 0 && x[0] == 0 && x[1] == 0 && x[2] == 0);
        float y[2] = {0, NAN}; /* a NaN must not turn into a number */
        ck_assert(isnan(k->softmax(y, 2, 0)) && isnan(y[1]) && y[0] == 1);
    }
}
END_TEST

/* ---- the rest of a layer ---------------------------------------------------------------------------------------- */

START_TEST(elementwise)
{
    t_rng rng = t_seed(16);
    FOR_LEVELS(k)
    for (size_t n = 0; n < 70; n++) {
        float *x = t_randoms(&rng, n), *y = t_randoms(&rng, n), *z = t_floats(n), f = t_normal(&rng);
        memcpy(z, x, n * 4);
        k->scale(z, n, f);
        for (size_t i = 0; i < n; i++)
            ck_assert(z[i] == x[i] * f);
        memcpy(z, x, n * 4);
        k->add(z, y, n);
        for (size_t i = 0; i < n; i++)
            ck_assert(z[i] == x[i] + y[i]);
        t_arena_reset();
    }
}
END_TEST

START_TEST(silu)
{
    static const float special[] = {0, -0.0f, 88, -88, 87.3f, -87.3f, 100, -100, 1e4f, -1e4f, 1e-30f, 1e30f};
    t_rng rng = t_seed(17);
    FOR_LEVELS(k)
    for (size_t n = 0; n < 70; n++) {
        float *g = t_floats(n), *u = t_randoms(&rng, n), *out = t_floats(n), one;
        for (size_t i = 0; i < n; i++)
            g[i] = t_u64(&rng) % 3 == 0 ? special[t_u64(&rng) % COUNT(special)] : t_normal(&rng) * 8;
        k->silu_mul(out, g, u, n);
        for (size_t i = 0; i < n; i++) {
            double want = g[i] / (1 + exp(-(double)g[i])) * u[i];
            t_near("silu", k->name, out[i], want, fabs(want) * 0x1p-20 + 1e-33);
            k->silu_mul(&one, g + i, u + i, 1);
            t_same("silu alone", k->name, &one, &out[i], 4);
        }
        float *copy = t_floats(n);
        memcpy(copy, g, n * 4);
        k->silu_mul(copy, copy, u, n);
        t_same("silu in place", k->name, copy, out, n * 4);
        t_arena_reset();
    }
}
END_TEST

/* GELU by tanh. */
START_TEST(gelu)
{
    static const float special[] = {0, -0.0f, 1e-30f, -1e-30f, 5, -5, 13, -13, 100, -100, 1e10f, -1e10f, 1e30f, -1e30f};
    t_rng rng = t_seed(19);
    FOR_LEVELS(k)
    for (size_t n = 0; n < 70; n++) {
        float *g = t_floats(n), *u = t_randoms(&rng, n), *out = t_floats(n), one;
        for (size_t i = 0; i < n; i++)
            g[i] = t_u64(&rng) % 3 == 0 ? special[t_u64(&rng) % COUNT(special)] : t_normal(&rng) * 4;
        k->gelu_mul(out, g, u, n);
        for (size_t i = 0; i < n; i++) {
            double x = g[i], t = sqrt(2 / M_PI) * (x + 0.044715 * x * x * x),
                   gate = t < 0 ? x * exp(2 * t) / (1 + exp(2 * t)) : 0.5 * x * (1 + tanh(t)); /* 1 + tanh cancels */
            double want = gate * u[i]; /* exp's argument, up to 88, carries the rounding of a float32 cube */
            t_near("gelu", k->name, out[i], want, fabs(want) * (t < -1 ? 0x1p-15 : 0x1p-19) + 1e-33);
            k->gelu_mul(&one, g + i, u + i, 1);
            t_same("gelu alone", k->name, &one, &out[i], 4);
        }
        float *copy = t_floats(n);
        memcpy(copy, g, n * 4);
        k->gelu_mul(copy, copy, u, n);
        t_same("gelu in place", k->name, copy, out, n * 4);
        t_arena_reset();
    }
}
END_TEST

START_TEST(rms)
{
    t_rng rng = t_seed(18);
    FOR_LEVELS(k)
    for (size_t n = 1; n < 700; n = n < 70 ? n + 1 : n * 3)
        for (float size = 1e-18f; size < 1e19f; size *= 1e6f) {
            float *x = t_randoms(&rng, n), *w = t_randoms(&rng, n), *out = t_floats(n), eps = 1e-5f;
            double sum = 0;
            for (size_t i = 0; i < n; i++) {
                x[i] *= size;
                sum += (double)x[i] * x[i];
            }
            k->rms_norm(out, x, w, n, eps);
            for (size_t i = 0; i < n; i++) {
                double want = x[i] / sqrt(sum / (double)n + eps) * w[i];
                t_near("rms_norm", k->name, out[i], want, 4 * EPS * fabs(want) + FLT_MIN);
            }
            k->rms_norm(x, x, w, n, eps);
            t_same("rms_norm in place", k->name, x, out, n * 4);
            t_arena_reset();
        }
}
END_TEST

START_TEST(rope)
{
    static const size_t rots[] = {0, 2, 4, 6, 14, 16, 18, 30, 32, 34, 64, 96, 128};
    t_rng rng = t_seed(19);
    FOR_LEVELS(k)
    for (size_t c = 0; c < COUNT(rots); c++)
        for (int halves = 0; halves < 2; halves++) {
            size_t rot = rots[c], h = rot / 2;
            float *x = t_randoms(&rng, rot), *cs = t_floats(rot), *y = t_floats(rot);
            for (size_t i = 0; i < h; i++) {
                double angle = t_uniform(&rng) * 100;
                cs[i] = (float)cos(angle);
                cs[h + i] = (float)sin(angle);
            }
            memcpy(y, x, rot * 4);
            k->rope(y, cs, rot, halves);
            for (size_t i = 0; i < h; i++) {
                size_t a = halves ? i : 2 * i, b = halves ? i + h : 2 * i + 1;
                double u = x[a], v = x[b], size = fabs(u) + fabs(v);
                t_near("rope", k->name, y[a], u * cs[i] - v * cs[h + i], 2 * EPS * size);
                t_near("rope", k->name, y[b], u * cs[h + i] + v * cs[i], 2 * EPS * size);
            }
            t_arena_reset();
        }
}
END_TEST

/* Of a vocabulary, with what is no number among it: against float64, and the scalar level's bits. */
START_TEST(logits)
{
    static const float special[] = {NAN, INFINITY, -INFINITY, FLT_MAX, -FLT_MAX, 0, -0.0f};
    static const size_t sizes[] = {1, 15, 16, 17, 63, 64, 65, 200, 5000};
    t_rng rng = t_seed(13);
    for (size_t t = 0; t < 3 * COUNT(sizes); t++) {
        size_t n = sizes[t / 3], blocks = (n + ENG_LOGITS_BLOCK - 1) / ENG_LOGITS_BLOCK;
        float *x = t_floats(n), *want = t_floats(blocks), *got = t_floats(blocks), best = -INFINITY;
        for (size_t i = 0; i < n; i++) /* without, with some, and with nothing but them */
            x[i] = t % 3 == 2 || (t % 3 && t_u64(&rng) % 3 == 0) ? special[t_u64(&rng) % (t % 3 == 2 ? 3 : COUNT(special))] : 10 * t_normal(&rng);
        double sum = 0;
        for (size_t b = 0; b < blocks; b++)
            want[b] = -INFINITY;
        for (size_t i = 0; i < n; i++)
            if (isfinite(x[i])) {
                want[i / ENG_LOGITS_BLOCK] = fmaxf(want[i / ENG_LOGITS_BLOCK], x[i]);
                best = fmaxf(best, x[i]);
            }
        for (size_t i = 0; i < n; i++)
            sum += isfinite(x[i]) ? exp((double)x[i] - (double)best) : 0;
        float max = best > -INFINITY ? best : 0;
        double scalar = t_level(ENG_CPU_SCALAR)->logits_sum(x, n, max);
        ck_assert_double_le(fabs(scalar - sum), 1e-5 * sum + 1e-30);
        FOR_LEVELS(k) {
            ck_assert_float_eq(k->logits_max(x, n, got), best);
            for (size_t b = 0; b < blocks; b++)
                ck_assert_float_eq(got[b], want[b]);
            double s = k->logits_sum(x, n, max);
            ck_assert_mem_eq(&s, &scalar, sizeof s);
        }
        t_arena_reset();
    }
}
END_TEST

int main(void)
{
    t_skip_lines();
    Suite *s = suite_create("kernel rows");
    TCase *t = tcase_create("rows");
    tcase_set_timeout(t, 0);
    tcase_add_test(t, kv_load_store);
    tcase_add_test(t, qk);
    tcase_add_test(t, pv);
    tcase_add_test(t, maximum);
    tcase_add_test(t, softmax);
    tcase_add_test(t, elementwise);
    tcase_add_test(t, silu);
    tcase_add_test(t, gelu);
    tcase_add_test(t, rms);
    tcase_add_test(t, rope);
    tcase_add_test(t, logits);
    suite_add_tcase(s, t);
    return t_run(s);
}
