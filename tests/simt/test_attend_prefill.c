/* Prefill attention, through gpu.h alone: against float64 over all keys and against the engine's scalar twin; and bit for bit however it is cut. */
#include "attend_support.h"

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

/* With one f16, or two bf16, the best key would be off by tens of percent. */
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

int main(int argc, char **argv)
{
    Suite *s = suite_create("attend_prefill");
    TCase *t = tcase_create("attend_prefill");
    tcase_add_test(t, prefill_shapes);
    tcase_add_test(t, prefill_long);
    tcase_add_test(t, prefill_large_scores);
    tcase_add_test(t, queries_are_float32);
    tcase_add_test(t, small_weights_count);
    tcase_add_test(t, prefill_any_cut);
    tcase_add_test(t, prefill_sees_nothing);
    tcase_add_test(t, prefill_is_the_twins);
    suite_add_tcase(s, t);
    return attend_main(argc, argv, s);
}
