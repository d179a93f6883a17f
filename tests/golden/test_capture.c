/* What a session shows of itself: in the first layer a text of period T has queries and keys whose products repeat with T (rotation sees distances alone) and values that
 * repeat to the bit; a step's query is the prefill's at that place; and rows are those of every segment of the view. */
#include "capture.h"

#include "sessions.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

enum { PERIOD = 90, N = 1800, STEPS = 30 };

typedef struct {
    uint32_t row, n_layer, seen[8];
    float *q; /* of layer 0: [N][row] */
} watch;

static void see(void *ctx, uint32_t layer, uint32_t pos, uint32_t n, const float *q)
{
    watch *w = ctx;
    ck_assert_uint_lt(layer, w->n_layer);
    ck_assert_uint_eq(w->seen[layer], pos);
    w->seen[layer] += n;
    if (!layer)
        memcpy(w->q + (size_t)pos * w->row, q, (size_t)n * w->row * sizeof *q);
}

static double dot(const float *a, const float *b, uint32_t d)
{
    double sum = 0;
    for (uint32_t i = 0; i < d; i++)
        sum += (double)a[i] * b[i];
    return sum;
}

/* Reads the first N - STEPS tokens as a prompt, of which some may be kept already, and forces the rest. */
static eng_session *run(eng_engine *e, const int32_t *ids, bool keep, watch *w)
{
    char err[256];
    eng_session *s;
    eng_request r = request(ids, N - STEPS, ENG_ATTN_FULL);
    const float *logits;
    r.cache_prompt = keep;
    ck_assert_msg(eng_session_open(e, &r, &s, err, sizeof err) == 0, "%s", err);
    if (w)
        eng_session_watch(s, see, w);
    ck_assert_int_eq(eng_session_prefill(s, NULL, NULL), 0);
    for (int i = N - STEPS; i < N && w; i++) {
        ck_assert_int_eq(eng_session_force(s, ids[i]), 0);
        ck_assert_int_eq(eng_session_logits(s, &logits), 0);
    }
    return s;
}

START_TEST(queries_keys_values)
{
    eng_engine *e = open_tiny((size_t)1 << 30, 2, true);
    const eng_info *info = eng_info_get(e);
    uint32_t d = info->head_dim, group = info->n_head / info->n_head_kv;
    watch w = {.row = info->n_head * d, .n_layer = info->n_layer, .q = calloc((size_t)N * info->n_head * d, sizeof(float))};
    float *k = malloc((size_t)N * d * sizeof *k), *v = malloc((size_t)N * d * sizeof *v);
    t_rng r = t_seed(1);
    int32_t ids[N];
    random_ids(e, &r, ids, PERIOD);
    for (int i = PERIOD; i < N; i++)
        ids[i] = ids[i - PERIOD];
    eng_session *s = run(e, ids, false, &w);
    for (uint32_t layer = 0; layer < info->n_layer; layer++)
        ck_assert_uint_eq(w.seen[layer], N);
    for (uint32_t head = 0; head < info->n_head; head++) {
        ck_assert_int_eq(eng_session_rows(s, 0, head / group, false, N, k), 0);
        ck_assert_int_eq(eng_session_rows(s, 0, head / group, true, N, v), 0);
        for (uint32_t pos = PERIOD; pos < N - STEPS; pos++) /* the steps come from other kernels */
            ck_assert_int_eq(memcmp(v + (size_t)pos * d, v + (size_t)(pos - PERIOD) * d, d * sizeof *v), 0);
        double size = sqrt(dot(w.q + (size_t)7 * w.row + head * d, w.q + (size_t)7 * w.row + head * d, d) * dot(k, k, d));
        for (uint32_t pos = PERIOD; pos < N; pos += 13)
            for (uint32_t j = PERIOD; j < N; j += 101) {
                double here = dot(w.q + (size_t)pos * w.row + head * d, k + (size_t)j * d, d);
                double there = dot(w.q + (size_t)(pos - PERIOD) * w.row + head * d, k + (size_t)(j - PERIOD) * d, d);
                ck_assert_double_eq_tol(here, there, 5e-3 * (size + 1));
            }
    }
    ck_assert_int_eq(eng_session_rows(s, 0, 0, false, N + 1, k), -EINVAL);
    ck_assert_int_eq(eng_session_rows(s, info->n_layer, 0, false, 1, k), -EINVAL);
    ck_assert_int_eq(eng_session_rows(s, 0, info->n_head_kv, false, 1, k), -EINVAL);
    eng_session_close(s);
    free(w.q);
    free(k);
    free(v);
    eng_close(e);
}
END_TEST

/* Nobody watches the next session; rows come from kept segments as they do from new ones. */
START_TEST(kept_rows)
{
    eng_engine *e = open_tiny((size_t)1 << 30, 2, true);
    uint32_t d = eng_info_get(e)->head_dim;
    float *cold = malloc((size_t)N * d * sizeof *cold), *warm = malloc((size_t)N * d * sizeof *warm);
    t_rng r = t_seed(2);
    int32_t ids[N], out[1];
    random_ids(e, &r, ids, N);
    watch w = {.row = eng_info_get(e)->n_head * d, .n_layer = eng_info_get(e)->n_layer, .q = calloc((size_t)N * eng_info_get(e)->n_head * d, sizeof(float))};
    eng_session_close(run(e, ids, false, &w));
    eng_session *s = run(e, ids, false, NULL);
    ck_assert_uint_eq(w.seen[0], N);
    ck_assert_int_eq(eng_session_rows(s, 1, 1, false, N - STEPS, cold), 0);
    eng_session_close(s);
    answer(e, request(ids, 1100, ENG_ATTN_FULL), out, 0, NULL);
    answer(e, request(ids, 1300, ENG_ATTN_FULL), out, 0, NULL);
    s = run(e, ids, true, NULL);
    ck_assert_int_eq(eng_session_rows(s, 1, 1, false, N - STEPS, warm), 0);
    ck_assert_int_eq(memcmp(cold, warm, (size_t)(N - STEPS) * d * sizeof *cold), 0);
    eng_session_close(s);
    free(w.q);
    free(cold);
    free(warm);
    eng_close(e);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("capture");
    TCase *c = tcase_create("capture");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, queries_keys_values);
    tcase_add_test(c, kept_rows);
    suite_add_tcase(s, c);
    return t_run(s);
}
