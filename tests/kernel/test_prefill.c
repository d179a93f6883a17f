/* Prefill attention at every level, in float32 and in bf16: against float64, and its bits whatever the chunks, segments and threads. */
#include "attention_private.h"
#include "kernel_support.h"

typedef struct {
    uint32_t d, heads, group, n, from, window; /* of n tokens those from `from` on are computed */
    eng_kv_type type;
    double offset; /* of one of a key's and a query's dimensions: Qwen's keys share such a one, and raw scores reach hundreds */
} shape;

static const shape shapes[] = {
    {64, 2, 7, 500, 200, 0, ENG_KV_F16, 35}, {64, 3, 3, 300, 0, 0, ENG_KV_F16, 0},  {80, 2, 1, 200, 77, 0, ENG_KV_BF16, 20},
    {96, 1, 2, 300, 64, 0, ENG_KV_F16, 0},   {128, 2, 4, 200, 9, 0, ENG_KV_F16, 30}, {256, 1, 4, 300, 150, 90, ENG_KV_F16, 0},
    {32, 1, 16, 190, 0, 0, ENG_KV_BF16, 0},  {8, 3, 5, 150, 0, 0, ENG_KV_F16, 0},    {64, 2, 2, 400, 100, 64, ENG_KV_F16, 20},
    {64, 1, 8, 200, 20, 1, ENG_KV_F16, 0},   {128, 1, 3, 200, 0, 0, ENG_KV_F32, 10},
    {64, 2, 7, 300, 100, 0, ENG_KV_Q8_0, 0}, {80, 2, 3, 200, 0, 64, ENG_KV_Q8_0, 5},
    {256, 16, 1, 1500, 1410, 0, ENG_KV_F16, 0}, /* two slabs */
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

typedef struct {
    const shape *s;
    eng_kv_shape kv;
    uint32_t window[1];
    eng_pool *pool;
    eng_attn *attn;
    eng_view view;
    float *q, *k, *v; /* q [n][heads * group][d]; k, v [heads][n][d], as rounded to the cache type */
} fixture;

/* Random tokens, cut into segments at multiples of `cut`. */
static void setup(fixture *f, const shape *s, const eng_kernels *kn, bool f32, uint32_t threads, uint32_t cut, uint32_t n_chunk)
{
    t_rng r = t_seed(s->d + s->group);
    size_t row = eng_kv_row_bytes(s->type, s->d), n_q = (size_t)s->n * s->heads * s->group * s->d, n_kv = (size_t)s->heads * s->n * s->d;
    memset(f, 0, sizeof *f);
    f->s = s;
    f->window[0] = s->window;
    f->kv = (eng_kv_shape){1, s->heads, s->group, s->d, s->type, s->type, row, row, f->window};
    ck_assert_int_eq(eng_pool_new(threads, &f->pool), 0);
    ck_assert_int_eq(eng_attn_new(f->pool, kn, &f->kv, n_chunk, f32, &f->attn), 0);
    eng_segment *parent = NULL;
    for (uint32_t lo = 0; lo < s->n; lo += cut) {
        eng_segment *seg;
        uint32_t hi = s->n - lo < cut ? s->n : lo + cut;
        ck_assert_int_eq(eng_segment_new(&f->kv, parent, lo, hi - lo, true, &seg), 0);
        seg->n = hi - lo;
        ck_assert_int_eq(eng_view_add(&f->view, seg, lo, hi), 0);
        eng_segment_unref(seg);
        parent = seg;
    }
    f->q = malloc(n_q * sizeof(float));
    f->k = malloc(n_kv * sizeof(float));
    f->v = malloc(n_kv * sizeof(float));
    for (size_t i = 0; i < n_q; i++)
        f->q[i] = (float)(2 * t_normal(&r) + (i % s->d == 3 ? s->offset : 0));
    for (size_t i = 0; i < n_kv; i++) {
        f->k[i] = (float)(2 * t_normal(&r) + (i % s->d == 3 ? 2 * s->offset : 0));
        f->v[i] = t_normal(&r);
    }
    for (uint32_t h = 0; h < s->heads; h++)
        for (uint32_t pos = 0; pos < s->n; pos++) {
            size_t at = ((size_t)h * s->n + pos) * s->d;
            eng_segment *seg = f->view.spans[eng_view_find(&f->view, pos)].seg;
            uint8_t *k = eng_segment_k(seg, 0, h, pos - seg->start), *v = eng_segment_v(seg, 0, h, pos - seg->start);
            kn->kv_store[s->type](f->k + at, k, s->d);
            kn->kv_store[s->type](f->v + at, v, s->d);
            kn->kv_load[s->type](k, f->k + at, s->d);
            kn->kv_load[s->type](v, f->v + at, s->d);
        }
}

static void teardown(fixture *f)
{
    eng_view_done(&f->view);
    eng_attn_free(f->attn);
    eng_pool_free(f->pool);
    free(f->q);
    free(f->k);
    free(f->v);
}

/* Tokens [pos, pos + n) in chunks of the sizes given, in turn. */
static void prefill(fixture *f, uint32_t pos, uint32_t n, const uint32_t *sizes, uint32_t n_sizes, float *out)
{
    size_t row = (size_t)f->s->heads * f->s->group * f->s->d;
    for (uint32_t done = 0, i = 0; done < n; i++) {
        uint32_t now = n - done < sizes[i % n_sizes] ? n - done : sizes[i % n_sizes];
        eng_attn_prefill(f->attn, &f->view, 0, f->q + (pos + done) * row, pos + done, now, out + done * row);
        done += now;
    }
}

/* One query head at `pos` in float64. Errors are bounded by what a score's terms sum to, and by what the weighted values do. */
static void check_row(const fixture *f, const char *level, bool bf16, uint32_t pos, uint32_t head, const float *got)
{
    const shape *s = f->s;
    const float *q = f->q + ((size_t)pos * s->heads * s->group + head) * s->d, *k = f->k + (size_t)(head / s->group) * s->n * s->d,
                *v = f->v + (size_t)(head / s->group) * s->n * s->d;
    uint32_t from = s->window && pos >= s->window ? pos - s->window + 1 : 0;
    double *p = malloc((pos + 1) * sizeof *p), top = -INFINITY, terms = 0, sum = 0;
    for (uint32_t i = from; i <= pos; i++) {
        double t = 0;
        p[i] = 0;
        for (uint32_t j = 0; j < s->d; j++) {
            p[i] += (double)q[j] * k[(size_t)i * s->d + j];
            t += fabs((double)q[j] * k[(size_t)i * s->d + j]);
        }
        p[i] /= sqrt(s->d);
        top = fmax(top, p[i]);
        terms = fmax(terms, t / sqrt(s->d));
    }
    for (uint32_t i = from; i <= pos; i++)
        sum += p[i] = exp(p[i] - top);
    double error = bf16 ? 0x1p-8 + 2 * 0x1p-16 * terms : 0x1p-18 + 2 * 0x1p-21 * terms;
    for (uint32_t j = 0; j < s->d; j++) {
        double want = 0, size = 0;
        for (uint32_t i = from; i <= pos; i++) {
            want += p[i] / sum * v[(size_t)i * s->d + j];
            size += p[i] / sum * fabs((double)v[(size_t)i * s->d + j]);
        }
        t_near("prefill attention", level, got[j], want, error * size);
    }
    free(p);
}

START_TEST(against_float64)
{
    const shape *s = &shapes[_i];
    FOR_LEVELS(kn)
        for (int f32 = 0; f32 < (kn->attn_bf16 && s->type != ENG_KV_F32 ? 2 : 1); f32++) {
            fixture f;
            uint32_t pos = s->from, n = s->n - pos, heads = s->heads * s->group;
            setup(&f, s, kn, f32, 2, s->n / 3, n);
            float *out = malloc((size_t)n * heads * s->d * sizeof(float));
            prefill(&f, pos, n, &n, 1, out);
            for (uint32_t t = 0; t < n; t += t + 40 < n || t == n - 1 ? 39 : n - 1 - t)
                for (uint32_t h = 0; h < heads; h += heads > 4 ? 3 : 1)
                    check_row(&f, kn->name, kn->attn_bf16 && !f32 && s->type != ENG_KV_F32, pos + t, h, out + ((size_t)t * heads + h) * s->d);
            free(out);
            teardown(&f);
        }
}
END_TEST

/* Design section 4: neither chunks nor segments, threads or what came before change a bit. */
START_TEST(same_bits)
{
    static const uint32_t sizes[] = {1, 7, 64, 33, 129, 2, 256, 31};
    const shape *s = &shapes[_i];
    size_t row = (size_t)s->heads * s->group * s->d;
    uint32_t n = s->n - s->from;
    FOR_LEVELS(kn)
        for (int how = 0; how < (kn->attn_bf16 ? 4 : 2); how++) { /* by one thread: few tokens' tasks pack their keys themselves */
            fixture a, b;
            bool f32 = how / 2;
            setup(&a, s, kn, f32, 1, s->n, n);
            setup(&b, s, kn, f32, how % 2 ? 1 : 3, 61, 256);
            float *x = malloc(n * row * sizeof *x), *y = malloc(n * row * sizeof *y);
            prefill(&a, s->from, n, &n, 1, x);
            prefill(&b, s->from, n, sizes, 8, y);
            t_same("prefill attention", kn->name, x, y, n * row * sizeof *x);
            free(x);
            free(y);
            teardown(&a);
            teardown(&b);
        }
}
END_TEST

/* softmax_columns against float64: precision, exact zeros, the rule of the slack, nothing from a neighbour or from hidden keys. */
START_TEST(softmax_columns)
{
    enum { D = 48, MAX = 64 };
    t_rng r = t_seed(5);
    FOR_LEVELS(kn)
        for (size_t n = 1; n <= MAX; n += n < 8 ? 1 : 14) {
            _Alignas(64) float x[MAX * ENG_NR], y[MAX * ENG_NR], was[MAX * ENG_NR], z[MAX * ENG_NR], m[2][ENG_NR], l[2][ENG_NR], o[2][D * ENG_NR], o_few[D * ENG_NR];
            for (size_t i = 0; i < MAX * ENG_NR; i++)
                was[i] = i / ENG_NR >= n || t_u64(&r) % 8 == 0 ? -INFINITY : t_u64(&r) % 16 == 0 ? -200.0f : 20 * t_normal(&r);
            for (size_t i = 0; i < D * ENG_NR; i++)
                o[0][i] = o[1][i] = t_normal(&r);
            for (size_t c = 0; c < ENG_NR; c++) {
                m[0][c] = m[1][c] = c % 3 ? 20 * t_normal(&r) : ENG_ATTN_NONE;
                l[0][c] = l[1][c] = c % 3 ? 1 + (float)t_uniform(&r) : 0;
            }
            memcpy(x, was, sizeof x);
            memcpy(y, was, sizeof y);
            float m_was[ENG_NR], l_was[ENG_NR], o_was[D * ENG_NR];
            memcpy(m_was, m[0], sizeof m_was);
            memcpy(l_was, l[0], sizeof l_was);
            memcpy(o_was, o[0], sizeof o_was);
            kn->softmax_columns(x, n, ENG_NR, m[0], l[0], o[0], D);
            kn->softmax_columns(y, MAX, ENG_NR, m[1], l[1], o[1], D); /* the same and hidden keys */
            t_same("softmax_columns", kn->name, m[0], m[1], sizeof m[0]);
            t_same("softmax_columns", kn->name, l[0], l[1], sizeof l[0]);
            t_same("softmax_columns", kn->name, o[0], o[1], sizeof o[0]);
            t_same("softmax_columns", kn->name, x, y, n * ENG_NR * sizeof *x);
            for (size_t cols = 1; cols < ENG_NR; cols += 5) { /* the first ones alone */
                float m_few[ENG_NR], l_few[ENG_NR];
                memcpy(z, was, sizeof z);
                memcpy(m_few, m_was, sizeof m_was);
                memcpy(l_few, l_was, sizeof l_was);
                memcpy(o_few, o_was, sizeof o_was);
                kn->softmax_columns(z, n, cols, m_few, l_few, o_few, D);
                t_same("softmax_columns", kn->name, m_few, m[0], cols * sizeof *m_few);
                t_same("softmax_columns", kn->name, l_few, l[0], cols * sizeof *l_few);
                for (size_t i = 0; i < n; i++)
                    t_same("softmax_columns", kn->name, z + i * ENG_NR, x + i * ENG_NR, cols * sizeof *z);
                for (size_t i = 0; i < D; i++)
                    t_same("softmax_columns", kn->name, o_few + i * ENG_NR, o[0] + i * ENG_NR, cols * sizeof *z);
            }
            for (size_t c = 0; c < ENG_NR; c++) {
                float top = -INFINITY;
                for (size_t i = 0; i < n; i++)
                    top = fmaxf(top, was[i * ENG_NR + c]);
                float want = top > m_was[c] + ENG_ATTN_SLACK ? top : m_was[c];
                ck_assert_float_eq(m[0][c], want);
                double f = exp2((double)m_was[c] - want), sum = l_was[c] * f;
                for (size_t i = 0; i < MAX; i++) {
                    double p = exp2((double)was[i * ENG_NR + c] - want);
                    if (p < FLT_MIN)
                        ck_assert_float_eq(y[i * ENG_NR + c], 0);
                    else
                        t_near("weight", kn->name, y[i * ENG_NR + c], p, p * (0x1p-20 + fabs(was[i * ENG_NR + c] - want) * EPS));
                    sum += p;
                }
                t_near("sum", kn->name, l[0][c], sum, sum * 0x1p-17);
                for (size_t i = 0; i < D; i++)
                    t_near("rescaled", kn->name, o[0][i * ENG_NR + c], o_was[i * ENG_NR + c] * f, fabs(o_was[i * ENG_NR + c]) * f * 0x1p-17 + 1e-36);
            }
        }
}
END_TEST

int main(void)
{
    t_skip_lines();
    Suite *s = suite_create("prefill attention");
    TCase *c = tcase_create("prefill attention");
    tcase_set_timeout(c, 0);
    tcase_add_loop_test(c, against_float64, 0, N_SHAPES);
    tcase_add_loop_test(c, same_bits, 0, N_SHAPES);
    tcase_add_test(c, softmax_columns);
    suite_add_tcase(s, c);
    return t_run(s);
}
