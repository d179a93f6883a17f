/* Merging partial softmaxes, and attention itself, against float64 over all keys. */
#include "attention_private.h"
#include "support.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, HEADS = 2, GROUP = 3, DIM = 32, N = 4000 };

static eng_kv_shape shape_of(eng_kv_type t)
{
    eng_kv_shape s = {LAYERS, HEADS, GROUP, DIM, t, t, eng_kv_row_bytes(t, DIM), eng_kv_row_bytes(t, DIM)};
    return s;
}

static const eng_kernels *kernels(void)
{
    const eng_kernels *k;
    char err[200];
    ck_assert_int_eq(eng_kernels_get(ENG_CPU_AUTO, &k, err, sizeof err), 0);
    return k;
}

/* softmax(scale q . k) v over the keys for which use[i] is set, in float64 */
static void reference(const float *q, const float *k, const float *v, const bool *use, uint32_t n, double *out)
{
    double max = -INFINITY, sum = 0;
    double *s = malloc(n * sizeof *s);
    for (uint32_t i = 0; i < n; i++) {
        s[i] = 0;
        for (int j = 0; j < DIM; j++)
            s[i] += (double)q[j] * k[i * DIM + j];
        s[i] /= sqrt(DIM);
        if (use[i] && s[i] > max)
            max = s[i];
    }
    memset(out, 0, DIM * sizeof *out);
    for (uint32_t i = 0; i < n; i++) {
        double p = use[i] ? exp(s[i] - max) : 0;
        sum += p;
        for (int j = 0; j < DIM; j++)
            out[j] += p * v[i * DIM + j];
    }
    for (int j = 0; j < DIM; j++)
        out[j] /= sum;
    free(s);
}

/* Any split of keys into parts, some of them empty, merges to the one softmax; also with scores of +-10^4. */
START_TEST(merge_any_split)
{
    t_rng r = t_seed(7);
    for (int round = 0; round < 300; round++) {
        uint32_t n = 1 + (uint32_t)(t_u64(&r) % 200), n_parts = 1 + (uint32_t)(t_u64(&r) % 12);
        double size = round % 3 == 0 ? 1e4 : round % 3 == 1 ? 10 : 0.1, want[4] = {0}, max = -INFINITY, sum = 0;
        float score[200], value[200][4], o[12][4] = {{0}}, out[4];
        eng_partial parts[12];
        uint32_t part_of[200];
        for (uint32_t i = 0; i < n; i++) {
            score[i] = (float)((2 * t_uniform(&r) - 1) * size);
            part_of[i] = (uint32_t)(t_u64(&r) % n_parts);
            for (int j = 0; j < 4; j++)
                value[i][j] = t_normal(&r);
            max = fmax(max, score[i]);
        }
        for (uint32_t p = 0; p < n_parts; p++) {
            parts[p] = (eng_partial){-INFINITY, 0, o[p]};
            for (uint32_t i = 0; i < n; i++)
                if (part_of[i] == p && score[i] > parts[p].m)
                    parts[p].m = score[i];
            for (uint32_t i = 0; i < n; i++)
                if (part_of[i] == p) {
                    float w = expf(score[i] - parts[p].m);
                    parts[p].l += w;
                    for (int j = 0; j < 4; j++)
                        o[p][j] += w * value[i][j];
                }
        }
        for (uint32_t i = 0; i < n; i++) {
            double w = exp(score[i] - max);
            sum += w;
            for (int j = 0; j < 4; j++)
                want[j] += w * value[i][j];
        }
        eng_partial_merge(out, parts, n_parts, 4);
        for (int j = 0; j < 4; j++)
            ck_assert_double_eq_tol(out[j], want[j] / sum, 2e-5);
    }
    float zero[3] = {1, 2, 3};
    eng_partial none[2] = {{NAN, 0, NULL}, {-INFINITY, 0, NULL}};
    eng_partial_merge(zero, none, 2, 3);
    ck_assert(zero[0] == 0 && zero[1] == 0 && zero[2] == 0);
}
END_TEST

typedef struct {
    eng_pool *pool;
    eng_kv_shape shape;
    eng_attn *attn;
    eng_view view;
    float *q, *k[HEADS], *v[HEADS]; /* q [N][HEADS * GROUP][DIM]; k, v as rounded to the cache type */
} fixture;

/* Random tokens, layer 1 filled, cut into segments at `cuts` (rising, last one is where the delta begins). */
static void setup(fixture *f, eng_kv_type type, uint32_t threads, const uint32_t *cuts, uint32_t n_cuts, double key_size)
{
    const eng_kernels *kn = kernels();
    t_rng r = t_seed(11);
    memset(f, 0, sizeof *f);
    f->shape = shape_of(type);
    ck_assert_int_eq(eng_pool_new(threads, &f->pool), 0);
    ck_assert_int_eq(eng_attn_new(f->pool, kn, &f->shape, 256, true, &f->attn), 0);
    f->q = malloc(sizeof(float) * N * HEADS * GROUP * DIM);
    for (int i = 0; i < N * HEADS * GROUP * DIM; i++)
        f->q[i] = t_normal(&r);
    eng_segment *parent = NULL;
    for (uint32_t c = 0, lo = 0; c <= n_cuts; c++) {
        uint32_t hi = c < n_cuts ? cuts[c] : N;
        eng_segment *seg;
        ck_assert_int_eq(eng_segment_new(&f->shape, parent, lo, hi - lo + (c & 1) * 7, true, &seg), 0);
        seg->n = hi - lo;
        ck_assert_int_eq(eng_view_add(&f->view, seg, lo, hi), 0);
        eng_segment_unref(seg);
        parent = seg;
        lo = hi;
    }
    for (int h = 0; h < HEADS; h++) {
        f->k[h] = malloc(sizeof(float) * N * DIM);
        f->v[h] = malloc(sizeof(float) * N * DIM);
        for (uint32_t pos = 0; pos < N; pos++) {
            float k[DIM], v[DIM];
            for (int j = 0; j < DIM; j++) {
                k[j] = (float)(t_normal(&r) * key_size);
                v[j] = t_normal(&r);
            }
            eng_segment *seg = f->view.spans[eng_view_find(&f->view, pos)].seg;
            uint8_t *kr = eng_segment_k(seg, 1, (uint32_t)h, pos - seg->start), *vr = eng_segment_v(seg, 1, (uint32_t)h, pos - seg->start);
            kn->kv_store[type](k, kr, DIM);
            kn->kv_store[type](v, vr, DIM);
            kn->kv_load[type](kr, f->k[h] + pos * DIM, DIM);
            kn->kv_load[type](vr, f->v[h] + pos * DIM, DIM);
        }
    }
}

static void teardown(fixture *f)
{
    eng_view_done(&f->view);
    eng_attn_free(f->attn);
    eng_pool_free(f->pool);
    free(f->q);
    for (int h = 0; h < HEADS; h++) {
        free(f->k[h]);
        free(f->v[h]);
    }
}

static const uint32_t no_cuts[] = {700}, many_cuts[] = {3, 100, 513, 600, 1100};

/* Float32 sums of N terms around the float64 value. */
static const double tolerance = 3e-5;

static void decode(fixture *f, eng_attention policy, uint32_t n_keys, uint32_t delta_cap, float *out)
{
    ck_assert_int_eq(eng_attn_setup(f->attn, &policy, &f->view, N, delta_cap), 0);
    eng_attn_step(f->attn, &f->view, n_keys);
    eng_attn_decode(f->attn, &f->view, 1, f->q + (size_t)(n_keys - 1) * HEADS * GROUP * DIM, out);
}

static eng_attention policy_of(eng_attn_mode mode, uint32_t sink, uint32_t local, uint32_t top_k)
{
    eng_attention p = eng_attention_default();
    p.mode = mode;
    p.n_sink = sink;
    p.n_local = local;
    p.top_k = top_k;
    p.estimate = false;
    return p;
}

START_TEST(full_same_bits_over_segments)
{
    fixture a, b;
    float x[HEADS * GROUP * DIM], y[HEADS * GROUP * DIM];
    setup(&a, ENG_KV_F16, 1, no_cuts, 1, 3);
    setup(&b, ENG_KV_F16, 3, many_cuts, 5, 3);
    for (uint32_t n = 1; n <= N; n += 137) {
        decode(&a, policy_of(ENG_ATTN_FULL, 128, 512, 0), n, N, x);
        decode(&b, policy_of(ENG_ATTN_FULL, 4, 40, 0), n, N, y);
        ck_assert_int_eq(memcmp(x, y, sizeof x), 0);
    }
    teardown(&a);
    teardown(&b);
}
END_TEST

/* full, and flat with a budget of every key, against float64; scores up to about 10^4 in the second round. */
START_TEST(flat_with_every_key_is_full)
{
    fixture f;
    float full[HEADS * GROUP * DIM], flat[HEADS * GROUP * DIM];
    for (int round = 0; round < 2; round++) {
        setup(&f, ENG_KV_F16, 2, many_cuts, 5, round ? 3000 : 2);
        for (uint32_t n = 300; n <= N; n += 400) {
            decode(&f, policy_of(ENG_ATTN_FULL, 0, 0, 0), n, N, full);
            decode(&f, policy_of(ENG_ATTN_FLAT, 16, 64, N), n, N, flat);
            for (int h = 0; h < HEADS * GROUP; h++) {
                bool use[N] = {0};
                double want[DIM];
                for (uint32_t i = 0; i < n; i++)
                    use[i] = true;
                reference(f.q + ((size_t)(n - 1) * HEADS * GROUP + h) * DIM, f.k[h / GROUP], f.v[h / GROUP], use, N, want);
                /* scores near 10^4 carry float32 rounding of about 10^-3 into the exponent */
                for (int j = 0; j < DIM; j++) {
                    ck_assert_double_eq_tol(full[h * DIM + j], want[j], round ? 1e-2 : tolerance);
                    ck_assert_double_eq_tol(flat[h * DIM + j], full[h * DIM + j], round ? 1e-2 : tolerance);
                }
            }
        }
        teardown(&f);
    }
}
END_TEST

/* What each mode may look at: exactly the window, and the window plus the best of the sealed rest by brute force. */
START_TEST(window_and_retrieved_keys)
{
    fixture f;
    float out[HEADS * GROUP * DIM];
    const uint32_t sink = 20, local = 50, n = 1400, top_k = 33, sealed = 1100;
    setup(&f, ENG_KV_F32, 2, many_cuts, 5, 1);
    for (int mode = 0; mode < 3; mode++) { /* streaming, top-k, dynamic */
        eng_attention p = policy_of(mode ? ENG_ATTN_FLAT : ENG_ATTN_STREAMING, sink, local, mode == 1 ? top_k : 0);
        p.beta = 1.5f;
        p.k_max = 200;
        eng_attn_counts before = *eng_attn_counted(f.attn);
        uint64_t attended = 0, retrieved = 0;
        decode(&f, p, n, N, out);
        for (int h = 0; h < HEADS * GROUP; h++) {
            const float *q = f.q + ((size_t)(n - 1) * HEADS * GROUP + h) * DIM, *k = f.k[h / GROUP];
            bool use[N] = {0};
            double score[N], best = -INFINITY, want[DIM];
            for (uint32_t i = 0; i < n; i++) {
                score[i] = 0;
                for (int j = 0; j < DIM; j++)
                    score[i] += (double)q[j] * k[i * DIM + j];
                score[i] /= sqrt(DIM);
                best = fmax(best, score[i]);
                use[i] = i < sink || i >= n - local || (mode && i >= sealed);
            }
            for (uint32_t i = sink; mode && i < sealed; i++) {
                uint32_t better = 0;
                for (uint32_t j = sink; j < sealed; j++)
                    better += score[j] > score[i];
                use[i] = mode == 1 ? better < top_k : score[i] >= best - p.beta && better < p.k_max;
            }
            for (uint32_t i = 0; i < n; i++) {
                attended += use[i];
                retrieved += use[i] && i >= sink && i < sealed;
            }
            reference(q, k, f.v[h / GROUP], use, N, want);
            for (int j = 0; j < DIM; j++)
                ck_assert_double_eq_tol(out[h * DIM + j], want[j], tolerance);
        }
        const eng_attn_counts *c = eng_attn_counted(f.attn);
        ck_assert_uint_eq(c->attended - before.attended, attended);
        ck_assert_uint_eq(c->retrieved - before.retrieved, retrieved);
        ck_assert_uint_eq(c->probed - before.probed, mode ? (sealed - sink) * HEADS : 0); /* the scan scores each key once for the group */
        ck_assert_uint_eq(c->estimated, 0);
    }
    teardown(&f);
}
END_TEST

/* Keys that are all alike, over many segments: the budget still holds to the key. */
START_TEST(ties_keep_the_budget)
{
    fixture f;
    float out[HEADS * GROUP * DIM];
    setup(&f, ENG_KV_F16, 2, many_cuts, 5, 0);
    decode(&f, policy_of(ENG_ATTN_FLAT, 20, 50, 33), 1400, N, out);
    ck_assert_uint_eq(eng_attn_counted(f.attn)->attended, (20 + 300 + 33) * HEADS * GROUP); /* sinks, what is not sealed, top-k */
    teardown(&f);
}
END_TEST

/* A graph over a cut segment: no key twice, none of the window, none beyond the cutoff, which is where another context's tokens are. */
START_TEST(graph_stays_in_range)
{
    enum { WHOLE = 1400, CUT = 1200, SINK = 40, LOCAL = 50, TOP = 60 };
    fixture f;
    float out[HEADS * GROUP * DIM];
    const uint32_t cut[] = {WHOLE};
    setup(&f, ENG_KV_F16, 2, cut, 1, 1);
    eng_segment *seg = f.view.spans[0].seg, *delta;
    uint16_t *train = malloc(sizeof *train * WHOLE * GROUP * DIM);
    uint32_t pos[WHOLE];
    for (uint32_t h = 0; h < HEADS; h++) {
        for (uint32_t i = 0; i < WHOLE; i++) {
            pos[i] = i;
            for (uint32_t g = 0; g < GROUP; g++)
                kernels()->kv_store[ENG_KV_F16](f.q + ((size_t)i * HEADS * GROUP + h * GROUP + g) * DIM,
                                                train + ((size_t)i * GROUP + g) * DIM, DIM);
        }
        idx_rows keys = {eng_segment_k(seg, 1, h, 0), f.shape.row_k, WHOLE, DIM, IDX_F16};
        idx_queries queries = {train, pos, WHOLE, GROUP};
        idx_graph_params params = idx_graph_params_default();
        idx_builder *b;
        ck_assert_int_eq(idx_builder_new(&keys, &queries, &params, &b), 0);
        ck_assert_int_eq(idx_builder_step(b, 0), 0);
        ck_assert_int_eq(idx_builder_finish(b, &seg->index[HEADS + h]), 0);
        idx_builder_free(b);
    }
    free(train);
    /* another continuation from CUT on */
    eng_view view = {0};
    ck_assert_int_eq(eng_segment_new(&f.shape, seg, CUT, N - CUT, true, &delta), 0);
    ck_assert_int_eq(eng_view_add(&view, seg, 0, CUT), 0);
    ck_assert_int_eq(eng_view_add(&view, delta, CUT, N), 0);
    eng_attention p = policy_of(ENG_ATTN_GRAPH, SINK, LOCAL, TOP);
    ck_assert_int_eq(eng_attn_setup(f.attn, &p, &view, N, N), 0);
    double found = 0, wanted = 0;
    for (uint32_t n = CUT + 1; n <= CUT + 100; n += 9) { /* the window reaches into the segment, then no longer */
        uint32_t hi = n - LOCAL < CUT ? n - LOCAL : CUT;
        delta->n = n - CUT;
        const float *q = f.q + (size_t)(n - 1) * HEADS * GROUP * DIM;
        eng_attn_step(f.attn, &view, n);
        eng_attn_decode(f.attn, &view, 1, q, out);
        for (uint32_t h = 0; h < HEADS * GROUP; h++) {
            bool seen[N] = {0};
            float score[N];
            kernels()->qk[ENG_KV_F32](score, N, q + h * DIM, 1, f.k[h / GROUP], DIM * sizeof(float), CUT, DIM);
            for (uint32_t r = 0; r < f.attn->n_ranges; r++) {
                const attn_hits *hits = &f.attn->hits[((size_t)(h / GROUP) * f.attn->n_ranges + r) * GROUP + h % GROUP];
                for (uint32_t i = 0; i < hits->n; i++) {
                    uint32_t id = hits->ids[i];
                    ck_assert_msg(id >= SINK && id < hi && !seen[id], "key %u at %u", id, n);
                    seen[id] = true;
                }
            }
            for (uint32_t i = SINK; i < hi; i++) {
                uint32_t better = 0;
                for (uint32_t j = SINK; j < hi; j++)
                    better += score[j] > score[i];
                wanted += better < TOP;
                found += better < TOP && seen[i];
            }
        }
    }
    ck_assert_uint_gt(eng_attn_counted(f.attn)->n_graph, 0);
    ck_assert_uint_eq(eng_attn_counted(f.attn)->n_flat, 0);
    printf("graph over a cut segment of random keys: recall@%d %.3f\n", TOP, found / wanted);
    ck_assert_double_ge(found / wanted, 0.8);
    eng_view_done(&view);
    eng_segment_unref(delta);
    teardown(&f);
}
END_TEST

/* ---- sliding layers: layer 1 sees a window ----------------------------------------------------------------------- */

static const uint32_t windows[] = {1, 2, 63, 64, 65, 100, 700, 3500, N, 2 * N}, late_cuts[] = {3, 100, 513, 2600, 3900};
enum { N_WINDOWS = sizeof windows / sizeof *windows };

static void check_window(const fixture *f, uint32_t window, uint32_t pos, const float *out)
{
    for (int h = 0; h < HEADS * GROUP; h++) {
        bool use[N] = {0};
        double want[DIM];
        for (uint32_t i = 0; i <= pos; i++)
            use[i] = pos - i < window;
        reference(f->q + ((size_t)pos * HEADS * GROUP + h) * DIM, f->k[h / GROUP], f->v[h / GROUP], use, N, want);
        for (int j = 0; j < DIM; j++)
            ck_assert_double_eq_tol(out[h * DIM + j], want[j], tolerance);
    }
}

START_TEST(sliding_prefill)
{
    fixture a, b;
    size_t row = HEADS * GROUP * DIM;
    uint32_t of_layers[LAYERS] = {0, windows[_i]};
    setup(&a, ENG_KV_F16, 1, no_cuts, 1, 3);
    setup(&b, ENG_KV_F16, 3, late_cuts, 5, 3);
    a.shape.window = b.shape.window = of_layers;
    float *x = malloc(sizeof(float) * N * row), *y = malloc(sizeof(float) * N * row);
    for (uint32_t pos = 0; pos < N; pos += 256)
        eng_attn_prefill(a.attn, &a.view, 1, a.q + pos * row, pos, N - pos < 256 ? N - pos : 256, x + pos * row);
    for (uint32_t pos = 0; pos < N; pos += 137)
        check_window(&a, windows[_i], pos, x + pos * row);
    static const uint32_t sizes[] = {1, 7, 64, 33, 129, 2, 256};
    for (uint32_t pos = 0, i = 0; pos < N; i++) {
        uint32_t n = sizes[i % 7];
        n = N - pos < n ? N - pos : n;
        eng_attn_prefill(b.attn, &b.view, 1, b.q + pos * row, pos, n, y + pos * row);
        pos += n;
    }
    ck_assert_int_eq(memcmp(x, y, sizeof(float) * N * row), 0);
    free(x);
    free(y);
    teardown(&a);
    teardown(&b);
}
END_TEST

/* Whatever the mode says: the window, all of it, and nothing else. */
START_TEST(sliding_decode)
{
    fixture a, b;
    float x[HEADS * GROUP * DIM], y[HEADS * GROUP * DIM];
    uint32_t window = windows[_i], of_layers[LAYERS] = {0, window};
    setup(&a, ENG_KV_F16, 1, no_cuts, 1, 3);
    setup(&b, ENG_KV_F16, 3, late_cuts, 5, 3);
    a.shape.window = b.shape.window = of_layers;
    for (uint32_t n = 1; n <= N; n += 311) {
        static const eng_attn_mode modes[] = {ENG_ATTN_FULL, ENG_ATTN_STREAMING, ENG_ATTN_FLAT};
        decode(&a, policy_of(ENG_ATTN_FULL, 128, 512, 0), n, N, x);
        check_window(&a, window, n - 1, x);
        for (int m = 0; m < 3; m++) {
            eng_attn_counts before = *eng_attn_counted(b.attn);
            decode(&b, policy_of(modes[m], 4, 40, 5), n, N - 3900, y); /* room for little beside what the layer's window takes */
            ck_assert_int_eq(memcmp(x, y, sizeof x), 0);
            ck_assert_uint_eq(eng_attn_counted(b.attn)->attended - before.attended, (uint64_t)HEADS * GROUP * (n < window ? n : window));
            ck_assert_uint_eq(eng_attn_counted(b.attn)->n_flat, before.n_flat);
        }
    }
    teardown(&a);
    teardown(&b);
}
END_TEST

static void build_codes(eng_segment *seg)
{
    const eng_kv_shape *shape = seg->shape;
    for (uint32_t h = 0; h < HEADS; h++) {
        idx_rows keys = {eng_segment_k(seg, 1, h, 0), shape->row_k, seg->n, DIM, (idx_type)shape->type_k};
        idx_rows values = {eng_segment_v(seg, 1, h, 0), shape->row_v, seg->n, DIM, (idx_type)shape->type_v};
        idx_builder *b;
        ck_assert_int_eq(idx_builder_new_codes(&keys, &values, NULL, 8, NULL, &b), 0);
        ck_assert_int_eq(idx_builder_step(b, 0), 0);
        ck_assert_int_eq(idx_builder_finish(b, &seg->codes[HEADS + h]), 0);
        idx_builder_free(b);
    }
    seg->n_codes = HEADS;
}

/* What the modes that skip keys search: a graph and clusters, from every position's queries. */
static void build_lists(fixture *f, eng_segment *seg)
{
    const eng_kv_shape *shape = seg->shape;
    uint16_t *train = malloc(sizeof *train * seg->n * GROUP * DIM);
    uint32_t *pos = malloc(sizeof *pos * seg->n);
    for (uint32_t h = 0; h < HEADS; h++) {
        for (uint32_t i = 0; i < seg->n; i++) {
            pos[i] = i;
            kernels()->kv_store[ENG_KV_F16](f->q + ((size_t)(seg->start + i) * HEADS * GROUP + h * GROUP) * DIM, train + (size_t)i * GROUP * DIM, GROUP * DIM);
        }
        idx_rows keys = {eng_segment_k(seg, 1, h, 0), shape->row_k, seg->n, DIM, (idx_type)shape->type_k};
        idx_rows values = {eng_segment_v(seg, 1, h, 0), shape->row_v, seg->n, DIM, (idx_type)shape->type_v};
        idx_queries queries = {train, pos, seg->n, GROUP};
        idx_graph_params params = idx_graph_params_default();
        for (int kind = 0; kind < 3; kind++) {
            idx_index **to = kind == 0 ? &seg->index[HEADS + h] : kind == 1 ? &seg->cluster[HEADS + h] : &seg->ivf[HEADS + h];
            idx_builder *b;
            ck_assert_int_eq(kind ? idx_builder_new_lists(kind == 1 ? IDX_CLUSTER : IDX_IVF, &keys, &values, &queries, &b) : idx_builder_new(&keys, &queries, &params, &b), 0);
            ck_assert_int_eq(idx_builder_step(b, 0), 0);
            ck_assert_int_eq(idx_builder_finish(b, to), 0);
            idx_builder_free(b);
        }
        seg->members[HEADS + h] = malloc(seg->n * sizeof **seg->members);
        idx_codes_members(seg->cluster[HEADS + h], seg->members[HEADS + h]);
    }
    free(train);
    free(pos);
}

/* Makes auto's choice: reading every key costs nothing, or a scan does. */
static void choose(fixture *f, bool scan)
{
    eng_cost c = {0};
    *(scan ? &c.dense_op : &c.scan_search) = 1;
    eng_attn_use_cost(f->attn, &c);
}

/* Where attention with the estimate is exact: with values of a few kinds, which are clusters of one value each, and with any values for a
 * query of zeros, where a cluster's mean is all that matters, whatever the clusters are of: so all kinds of index are tried with that. Over a short segment and a coded one, cut off where another continuation
 * begins, while the window moves into it; every key counts once, and none beyond the cut. Without codes everything is read. */
START_TEST(estimate_where_it_is_exact)
{
    enum { FIRST = 30, CUT = 1290, SINK = 50, LOCAL = 60, TOP = 25 };
    static const uint32_t cuts[] = {FIRST, 1400};
    for (int round = 0; round < 2 * ENG_KV_TYPES; round++) {
        int type = round / 2;
        bool few = round % 2;
        static const uint32_t first_slides[LAYERS] = {64, 0}; /* and needs no index */
        fixture f;
        float out[HEADS * GROUP * DIM];
        setup(&f, (eng_kv_type)type, 2, cuts, 2, 1);
        f.shape.window = first_slides;
        t_rng r = t_seed(3);
        float kinds[4][DIM];
        for (int i = 0; i < 4 * DIM; i++)
            kinds[i / DIM][i % DIM] = t_normal(&r);
        eng_segment *seg = f.view.spans[1].seg, *delta;
        if (!few)
            memset(f.q, 0, sizeof(float) * N * HEADS * GROUP * DIM);
        for (uint32_t h = 0; h < HEADS && few; h++)
            for (uint32_t pos = 0; pos < N; pos++) {
                eng_segment *s = f.view.spans[eng_view_find(&f.view, pos)].seg;
                uint8_t *v = eng_segment_v(s, 1, h, pos - s->start);
                kernels()->kv_store[type](kinds[t_u64(&r) % 4], v, DIM);
                kernels()->kv_load[type](v, f.v[h] + pos * DIM, DIM);
            }
        eng_view view = {0};
        ck_assert_int_eq(eng_segment_new(&f.shape, seg, CUT, N - CUT, true, &delta), 0);
        ck_assert_int_eq(eng_view_add(&view, f.view.spans[0].seg, 0, FIRST), 0);
        ck_assert_int_eq(eng_view_add(&view, seg, FIRST, CUT), 0);
        ck_assert_int_eq(eng_view_add(&view, delta, CUT, N), 0);
        for (uint32_t h = 0; h < HEADS; h++)
            for (uint32_t pos = CUT; pos < N; pos++) {
                kernels()->kv_store[type](f.k[h] + pos * DIM, eng_segment_k(delta, 1, h, pos - CUT), DIM);
                kernels()->kv_store[type](kinds[h], eng_segment_v(delta, 1, h, pos - CUT), DIM);
                kernels()->kv_load[type](eng_segment_v(delta, 1, h, pos - CUT), f.v[h] + pos * DIM, DIM);
            }
        static const eng_attn_mode modes[] = {ENG_ATTN_AUTO, ENG_ATTN_AUTO, ENG_ATTN_CLUSTER, ENG_ATTN_IVF, ENG_ATTN_GRAPH};
        for (int coded = 0; coded < (few ? 2 : 5); coded++) {
            eng_attention p = policy_of(modes[coded], SINK, LOCAL, TOP);
            p.estimate = true;
            choose(&f, true);
            ck_assert_int_eq(eng_attn_setup(f.attn, &p, &view, N, N), 0);
            if (coded == 1)
                build_codes(seg); /* becomes ready in the middle of a session */
            if (coded == 2)
                build_lists(&f, seg);
            for (uint32_t n = CUT + 1; n < CUT + 210; n += 23) {
                eng_attn_counts before = *eng_attn_counted(f.attn);
                const float *q = f.q + (size_t)(n - 1) * HEADS * GROUP * DIM;
                delta->n = n - CUT;
                eng_attn_step(f.attn, &view, n);
                eng_attn_decode(f.attn, &view, 1, q, out);
                bool use[N] = {0};
                memset(use, 1, n);
                double tol = coded ? few ? 5e-3 : 2e-4 : tolerance;
                for (uint32_t h = 0; h < HEADS * GROUP; h++) {
                    double want[DIM];
                    reference(q + h * DIM, f.k[h / GROUP], f.v[h / GROUP], use, N, want);
                    for (int j = 0; j < DIM; j++)
                        ck_assert_double_eq_tol(out[h * DIM + j], want[j], tol);
                }
                /* the window, what is retrieved and the estimate: each key once */
                const eng_attn_counts *c = eng_attn_counted(f.attn);
                uint32_t local = n - LOCAL < CUT ? (n - LOCAL) & ~63u : CUT, dense = n - local;
                ck_assert_uint_eq(c->attended - before.attended, (coded ? SINK + TOP + dense : n) * HEADS * GROUP);
                ck_assert_uint_eq(c->retrieved - before.retrieved, coded ? TOP * HEADS * GROUP : 0);
                ck_assert_uint_eq(c->estimated - before.estimated, coded ? (local - SINK - TOP) * HEADS * GROUP : 0);
                ck_assert_uint_ge(c->probed - before.probed, coded == 1 ? (local - SINK) * HEADS : coded ? TOP * HEADS : 0);
                ck_assert_uint_le(c->probed - before.probed, coded ? seg->n * HEADS : 0);
                uint32_t spans = coded ? HEADS : 0;
                ck_assert_uint_eq(c->n_flat - before.n_flat, coded == 1 ? spans : 0);
                ck_assert_uint_eq(c->n_cluster - before.n_cluster, coded == 2 || coded == 3 ? spans : 0);
                ck_assert_uint_eq(c->n_graph - before.n_graph, coded == 4 ? spans : 0);
            }
        }
        /* where it is cheaper, auto reads every key, as `full` does */
        float full[HEADS * GROUP * DIM];
        uint32_t n = CUT + 200;
        const float *q = f.q + (size_t)(n - 1) * HEADS * GROUP * DIM;
        for (int i = 0; i < 2; i++) {
            eng_attention p = policy_of(i ? ENG_ATTN_AUTO : ENG_ATTN_FULL, 0, 512, TOP);
            p.estimate = true;
            choose(&f, false);
            ck_assert_int_eq(eng_attn_setup(f.attn, &p, &view, N, N), 0);
            eng_attn_counts before = *eng_attn_counted(f.attn);
            delta->n = n - CUT;
            eng_attn_step(f.attn, &view, n);
            eng_attn_decode(f.attn, &view, 1, q, i ? out : full);
            ck_assert_uint_eq(eng_attn_counted(f.attn)->attended - before.attended, n * HEADS * GROUP);
            ck_assert_uint_eq(eng_attn_counted(f.attn)->n_flat, before.n_flat);
        }
        for (int i = 0; i < HEADS * GROUP * DIM; i++)
            ck_assert_double_eq_tol(out[i], full[i], tolerance);
        eng_view_done(&view);
        eng_segment_unref(delta);
        teardown(&f);
    }
}
END_TEST

/* A budget holds over all segments: three of 1,200 keys have a third of 300 hits each, so a scan of one costs auto 100 of its hits, not 300. */
START_TEST(auto_shares_the_hits)
{
    enum { TOP = 300, PART = 1200, SINK = 0, LOCAL = N - 3 * PART };
    static const uint32_t cuts[] = {PART, 2 * PART, 3 * PART}, first_slides[LAYERS] = {64, 0}; /* and needs no index */
    fixture f;
    setup(&f, ENG_KV_F16, 2, cuts, 3, 1);
    f.shape.window = first_slides;
    for (uint32_t i = 0; i < 3; i++)
        build_codes(f.view.spans[i].seg);
    for (int below = 0; below < 2; below++) {
        double hits = below ? TOP / 3 + 1 : TOP / 3 - 1; /* of a span, that reading its keys costs as much as */
        eng_cost c = {.dense_op = hits / PART, .hit_dim = 1};
        float out[HEADS * GROUP * DIM];
        eng_attention p = policy_of(ENG_ATTN_AUTO, SINK, LOCAL, TOP);
        p.estimate = true;
        eng_attn_use_cost(f.attn, &c);
        uint64_t before = eng_attn_counted(f.attn)->n_flat;
        decode(&f, p, N, N, out);
        ck_assert_uint_eq(eng_attn_counted(f.attn)->n_flat - before, below ? 3 * HEADS : 0);
    }
    teardown(&f);
}
END_TEST

/* Without the estimate a scan for top_k scores 128 more keys again, which a graph does not. */
START_TEST(auto_counts_spare_candidates)
{
    static const uint32_t cuts[] = {1000};
    fixture f;
    setup(&f, ENG_KV_F16, 1, cuts, 1, 1);
    for (int i = 0; i < 4; i++) {
        bool top = i & 1, cheap = i & 2;
        /* 2,048 keys, all of which a graph would visit, and 128 hits of 3 heads: the same where a scanned key costs 1 - 384 / 2048 of a visited one */
        eng_cost c = {.visit_dim = 1, .hit_dim = 1, .scan_dim = 1 - 384 / 2048.0 + (cheap ? -0.01 : 0.01)};
        eng_attention p = policy_of(ENG_ATTN_AUTO, 0, 0, top ? 100 : 0);
        if (!top)
            p.beta = 8, p.k_max = 200;
        eng_attn_use_cost(f.attn, &c);
        ck_assert_uint_eq(eng_attn_wants(f.attn, &p, 2048), top && !cheap ? ENG_WANT_GRAPH : 0);
    }
    teardown(&f);
}
END_TEST

/* One query head over [0, sink) and [local, n), as somebody else would: unnormalised. */
static eng_partial elsewhere(const float *q, const float *k, const float *v, uint32_t sink, uint32_t local, uint32_t n, float *o)
{
    double max = -INFINITY, sum = 0, acc[DIM] = {0};
    double *s = malloc(n * sizeof *s);
    for (uint32_t i = 0; i < n; i++) {
        s[i] = -INFINITY;
        if (i >= sink && i < local)
            continue;
        s[i] = 0;
        for (int j = 0; j < DIM; j++)
            s[i] += (double)q[j] * k[i * DIM + j];
        s[i] /= sqrt(DIM);
        max = fmax(max, s[i]);
    }
    for (uint32_t i = 0; i < n && max > -INFINITY; i++) {
        sum += exp(s[i] - max);
        for (int j = 0; j < DIM; j++)
            acc[j] += exp(s[i] - max) * v[i * DIM + j];
    }
    for (int j = 0; j < DIM; j++)
        o[j] = (float)acc[j];
    free(s);
    return (eng_partial){(float)max, (float)sum, o};
}

/* What one layer's attention is made of when somebody else has keys of its window: their part and the rest are what there was, with the same budget, in
 * every mode, whatever they have. */
START_TEST(rest_and_elsewhere)
{
    static const uint32_t cuts[] = {30, 2600}, has[][2] = {{0, N}, {128, 3000}, {50, 2590}, {10, 3990}, {700, 900}, {0, 0}, {128, 2630}};
    enum { MODES = 6, HAS = sizeof has / sizeof *has };
    fixture f;
    setup(&f, ENG_KV_F16, 2, cuts, 2, 2);
    build_codes(f.view.spans[1].seg);
    uint32_t of_layers[LAYERS] = {0, 700};
    for (int round = 0; round < MODES * HAS; round++) {
        int mode = round % MODES;
        static const eng_attn_mode modes[MODES] = {ENG_ATTN_FULL, ENG_ATTN_STREAMING, ENG_ATTN_FLAT, ENG_ATTN_FLAT, ENG_ATTN_AUTO, ENG_ATTN_FULL};
        eng_attention policy = policy_of(modes[mode], 50, 100, mode == 2 ? 40 : 0);
        policy.beta = 3;
        policy.estimate = mode == 4;
        choose(&f, true);
        f.shape.window = mode == 5 ? of_layers : NULL;
        for (uint32_t n = 60; n <= N; n += 985) {
            float whole[HEADS * GROUP * DIM], o[HEADS * GROUP * DIM], m[HEADS * GROUP], l[HEADS * GROUP], other[DIM], merged[DIM];
            const float *q = f.q + (size_t)(n - 1) * HEADS * GROUP * DIM;
            uint32_t sink = has[round / MODES][0], local = has[round / MODES][1];
            sink = sink < n ? sink : n;
            local = local < n ? local : n;
            eng_attn_counts before = *eng_attn_counted(f.attn), mid;
            decode(&f, policy, n, N - 2600, whole);
            mid = *eng_attn_counted(f.attn);
            eng_attn_step(f.attn, &f.view, n);
            bool rest = eng_attn_share(f.attn, 1, &sink, &local);
            ck_assert_uint_le(sink, local);
            eng_attn_decode_rest(f.attn, &f.view, 1, q, m, l, o);
            const eng_attn_counts *after = eng_attn_counted(f.attn);
            ck_assert_uint_eq(after->attended - mid.attended, mid.attended - before.attended);
            ck_assert_uint_eq(after->estimated - mid.estimated, mid.estimated - before.estimated);
            for (uint32_t h = 0; h < HEADS * GROUP; h++) {
                eng_partial parts[2] = {elsewhere(q + h * DIM, f.k[h / GROUP], f.v[h / GROUP], sink, local, n, other), {m[h], l[h], o + h * DIM}};
                ck_assert(rest || l[h] == 0);
                eng_partial_merge(merged, parts, 2, DIM);
                for (int j = 0; j < DIM; j++)
                    ck_assert_double_eq_tol(merged[j], whole[h * DIM + j], tolerance);
            }
        }
    }
    teardown(&f);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("attention");
    TCase *c = tcase_create("attention");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, merge_any_split);
    tcase_add_test(c, full_same_bits_over_segments);
    tcase_add_test(c, flat_with_every_key_is_full);
    tcase_add_test(c, window_and_retrieved_keys);
    tcase_add_test(c, ties_keep_the_budget);
    tcase_add_test(c, graph_stays_in_range);
    tcase_add_loop_test(c, sliding_prefill, 0, N_WINDOWS);
    tcase_add_loop_test(c, sliding_decode, 0, N_WINDOWS);
    tcase_add_test(c, estimate_where_it_is_exact);
    tcase_add_test(c, auto_shares_the_hits);
    tcase_add_test(c, auto_counts_spare_candidates);
    tcase_add_test(c, rest_and_elsewhere);
    suite_add_tcase(s, c);
    return t_run(s);
}
