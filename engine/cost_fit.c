/* Measures the cost model's constants: the engine's own attention over made-up keys, many layers in turn so that they come from memory as in decoding, at some head shapes and
 * lengths; then least squares over the relative errors, no constant below 0. */
#include "attention_private.h"
#include "clock.h"
#include "cost.h"
#include "text.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEADS = 2,
    DELTA = 64,
    SINK = 128, LOCAL = 511, /* of the context; the window with the one key behind it: 640 */
    SPREAD = 64 << 20,   /* bytes of keys and values that are read in turn */
    MAX_LAYERS = 128,
    ROUNDS = 16,
    UNKNOWN = 5,         /* at most, of one fit */
    GRAPH_KEYS = 8192, GRAPH_HITS = 100, GRAPH_TRAIN = 1024,
};

static const struct {
    uint32_t dim, group;
} heads[] = {{96, 1}, {64, 3}, {64, 7}, {128, 4}};
static const uint32_t lengths[] = {2048, 4096, 16384};
static const float betas[] = {5, 8};
static const float deviation = 4.2f; /* of scores: then beta 8 finds about as many hits as in real heads, and beta 5 few */
enum {
    N_SHAPES = sizeof heads / sizeof *heads * sizeof lengths / sizeof *lengths,
    N_BETAS = sizeof betas / sizeof *betas,
    MAX_POLICIES = 2 * N_BETAS,
};

/* One equation: the sum of a[j] x[j] is `ns`. */
typedef struct {
    double a[UNKNOWN], ns;
} equation;

typedef struct {
    eng_pool *pool;
    const eng_kernels *k;
    eng_kv_shape shape;
    eng_segment *seg, *delta;
    eng_view view;
    eng_attn *attn[MAX_POLICIES]; /* one for each policy that is timed */
    float *q, *out;
    uint64_t random;
} fit;

/* ---- made-up contexts --------------------------------------------------------------------------------------------- */

/* About normal. */
static float draw(fit *f)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        f->random = f->random * 6364136223846793005u + 1442695040888963407u;
        sum += (float)(f->random >> 40) * 0x1p-24f - 0.5f;
    }
    return sum * 1.7f;
}

static void fill_head(fit *f, uint32_t head)
{
    float row[256];
    for (uint32_t i = 0; i < f->seg->n; i++)
        for (int values = 0; values < 2; values++) {
            for (uint32_t j = 0; j < f->shape.head_dim; j++)
                row[j] = draw(f);
            f->k->kv_store[ENG_KV_F16](row, values ? eng_segment_v(f->seg, 0, head, i) : eng_segment_k(f->seg, 0, head, i), f->shape.head_dim);
        }
}

static int build_index(fit *f, uint32_t head, bool graph, idx_index **ret)
{
    const eng_kv_shape *s = &f->shape;
    idx_rows keys = {eng_segment_k(f->seg, 0, head, 0), s->row_k, f->seg->n, s->head_dim, IDX_F16}, values = keys;
    values.data = eng_segment_v(f->seg, 0, head, 0);
    idx_builder *b = NULL;
    idx_graph_params p = idx_graph_params_default();
    size_t n = graph ? (size_t)GRAPH_TRAIN * s->group * s->head_dim : 0;
    uint16_t *q = malloc(n * sizeof *q + 1);
    uint32_t pos[GRAPH_TRAIN];
    if (!q)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++)
        q[i] = eng_f32_to_f16(draw(f));
    for (uint32_t i = 0; i < GRAPH_TRAIN; i++)
        pos[i] = (uint32_t)((uint64_t)(i + 1) * f->seg->n / GRAPH_TRAIN) - 1;
    idx_queries train = {q, pos, GRAPH_TRAIN, s->group};
    int r = graph ? idx_builder_new(&keys, &train, &p, &b) : idx_builder_new_codes(&keys, &values, NULL, 8, NULL, &b);
    if (r == 0)
        r = idx_builder_step(b, 0);
    if (r == 0)
        r = idx_builder_finish(b, ret);
    idx_builder_free(b);
    free(q);
    return r;
}

static int copy_index(const fit *f, idx_index **all, uint32_t from, uint32_t to)
{
    size_t bytes;
    char err[128];
    const void *arena = idx_arena(all[from], &bytes);
    return idx_load(arena, bytes, f->seg->n, f->shape.head_dim, NULL, &all[to], err, sizeof err);
}

/* The first layer's keys, values and indexes, in all the others as well. */
static int copy_layers(fit *f, bool graph)
{
    const eng_kv_shape *s = &f->shape;
    int r = 0;
    for (uint32_t i = 0; i < HEADS * s->n_layer && r == 0; i++) {
        uint32_t layer = i / HEADS, head = i % HEADS;
        if (!layer)
            fill_head(f, head);
        else
            memcpy(eng_segment_k(f->seg, layer, head, 0), eng_segment_k(f->seg, 0, head, 0), f->seg->head_bytes);
        r = layer ? copy_index(f, f->seg->codes, head, i) : build_index(f, head, false, &f->seg->codes[head]);
        if (r == 0 && graph)
            r = layer ? copy_index(f, f->seg->index, head, i) : build_index(f, head, true, &f->seg->index[head]);
    }
    f->seg->n_codes = HEADS * s->n_layer;
    return r;
}

static void close_context(fit *f)
{
    for (uint32_t i = 0; i < MAX_POLICIES; i++) {
        eng_attn_free(f->attn[i]);
        f->attn[i] = NULL;
    }
    eng_view_done(&f->view);
    eng_segment_unref(f->delta);
    eng_segment_unref(f->seg);
    free(f->q);
    free(f->out);
    f->seg = f->delta = NULL;
    f->q = f->out = NULL;
}

/* n keys of a head shape, and one more. */
static int open_context(fit *f, uint32_t dim, uint32_t group, uint32_t n, bool graph)
{
    size_t row = eng_kv_row_bytes(ENG_KV_F16, dim);
    uint32_t layers = (uint32_t)(SPREAD / (2 * row * HEADS * n)) + 1;
    f->shape = (eng_kv_shape){layers < MAX_LAYERS ? layers : MAX_LAYERS, HEADS, group, dim, ENG_KV_F16, ENG_KV_F16, row, row, NULL};
    f->q = malloc((size_t)HEADS * group * dim * sizeof *f->q);
    f->out = malloc((size_t)HEADS * group * dim * sizeof *f->out);
    int r = f->q && f->out ? eng_segment_new(&f->shape, NULL, 0, n, true, &f->seg) : -ENOMEM;
    if (r == 0)
        r = eng_segment_new(&f->shape, f->seg, n, DELTA, true, &f->delta);
    if (r == 0)
        r = eng_view_add(&f->view, f->seg, 0, n);
    if (r == 0)
        r = eng_view_add(&f->view, f->delta, n, n + DELTA);
    if (r < 0)
        return r;
    f->seg->n = n;
    f->delta->n = 1;
    for (uint32_t i = 0; i < HEADS * group * dim; i++)
        f->q[i] = deviation * draw(f);
    return copy_layers(f, graph);
}

/* What a layer and KV head cost under a policy; counts are of a query head, `probed` of a KV head. */
typedef struct {
    double ns, hits, probed;
} outcome;

/* The policies take turns, so that each finds the caches full of what another one read, as layers' weights fill them in decoding, and a slow moment is not one policy's alone. A
 * time is each layer's least over the rounds, since what else runs on the machine only adds to it, and is away for a layer sooner than for all. */
static int time_policies(fit *f, const eng_attention *policies, uint32_t n_policies, outcome *ret)
{
    double least[MAX_POLICIES][MAX_LAYERS], searches = (double)ROUNDS * f->shape.n_layer * HEADS;
    uint32_t n = f->seg->n + 1;
    int r = 0;
    for (uint32_t i = 0; i < n_policies && r == 0; i++) {
        eng_attention p = policies[i];
        p.n_sink = SINK; /* its best score is where a search begins, as in earnest */
        p.n_local = LOCAL;
        r = eng_attn_new(f->pool, f->k, &f->shape, 1, true, &f->attn[i]);
        if (r == 0)
            r = eng_attn_setup(f->attn[i], &p, &f->view, n + DELTA, DELTA);
    }
    for (uint32_t turn = 0; turn < ROUNDS * n_policies && r == 0; turn++) {
        uint32_t i = turn % n_policies;
        eng_attn_step(f->attn[i], &f->view, n);
        for (uint32_t layer = 0; layer < f->shape.n_layer; layer++) {
            uint64_t start = eng_now_ns();
            eng_attn_decode(f->attn[i], &f->view, layer, f->q, f->out);
            double took = (double)(eng_now_ns() - start);
            least[i][layer] = turn >= n_policies && least[i][layer] < took ? least[i][layer] : took;
        }
    }
    for (uint32_t i = 0; i < n_policies && r == 0; i++) {
        const eng_attn_counts *counted = eng_attn_counted(f->attn[i]);
        ret[i] = (outcome){0, (double)counted->retrieved / searches / f->shape.group, (double)counted->probed / searches};
        for (uint32_t layer = 0; layer < f->shape.n_layer; layer++)
            ret[i].ns += least[i][layer] / f->shape.n_layer / HEADS;
    }
    return r;
}

/* ---- least squares ------------------------------------------------------------------------------------------------ */

/* Gauss over the unknowns in `used`; the others are 0. */
static void solve_used(const equation *e, uint32_t n, uint32_t unknown, const bool *used, double *x)
{
    double m[UNKNOWN][UNKNOWN + 1] = {{0}};
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < unknown; j++)
            for (uint32_t k = 0; k <= unknown && used[j]; k++)
                m[j][k] += e[i].a[j] / e[i].ns * (k == unknown ? 1 : used[k] ? e[i].a[k] / e[i].ns : 0);
    for (uint32_t j = 0; j < unknown; j++) {
        double pivot = used[j] ? m[j][j] : 0;
        if (!(pivot > 0)) {
            memset(m[j], 0, sizeof m[j]);
            continue;
        }
        for (uint32_t k = 0; k <= unknown; k++)
            m[j][k] /= pivot;
        for (uint32_t i = 0; i < unknown; i++) {
            double factor = i == j ? 0 : m[i][j];
            for (uint32_t k = 0; k <= unknown; k++)
                m[i][k] -= factor * m[j][k];
        }
    }
    for (uint32_t j = 0; j < unknown; j++)
        x[j] = used[j] ? m[j][unknown] : 0;
}

/* Without those that would be below 0, the lowest first. */
static void solve(const equation *e, uint32_t n, uint32_t unknown, double *x)
{
    bool used[UNKNOWN];
    for (uint32_t j = 0; j < unknown; j++)
        used[j] = true;
    for (uint32_t lowest = 0; lowest < unknown;) {
        solve_used(e, n, unknown, used, x);
        lowest = unknown;
        for (uint32_t j = 0; j < unknown; j++)
            if (x[j] < 0 && (lowest == unknown || x[j] < x[lowest]))
                lowest = j;
        if (lowest < unknown)
            used[lowest] = false;
    }
}

/* Once more without the times that lie far above what was found: others had the machine. e: in another order afterwards. */
static void solve_again(equation *e, uint32_t n, uint32_t unknown, double *x)
{
    uint32_t kept = 0;
    solve(e, n, unknown, x);
    for (uint32_t i = 0; i < n; i++) {
        double want = 0;
        for (uint32_t j = 0; j < unknown; j++)
            want += e[i].a[j] * x[j];
        if (e[i].ns < 1.15 * want)
            e[kept++] = e[i];
    }
    if (kept >= 2 * unknown)
        solve(e, kept, unknown, x);
}

/* ---- the whole ---------------------------------------------------------------------------------------------------- */

/* Times of what lies outside the window, n of `all` keys: what a window costs is the same share of reading everything. */
typedef struct {
    eng_cost_head head;
    uint32_t all, n;
    double dense, scan[N_BETAS], hits[N_BETAS];
} sample;

static int measure_shape(fit *f, sample *s)
{
    eng_attention policies[MAX_POLICIES]; /* every key is read before each scan */
    outcome took[MAX_POLICIES];
    for (uint32_t i = 0; i < N_BETAS; i++) {
        policies[2 * i] = (eng_attention){.mode = ENG_ATTN_FULL};
        policies[2 * i + 1] = (eng_attention){.mode = ENG_ATTN_FLAT, .beta = betas[i], .k_max = 1024, .estimate = true};
    }
    int r = open_context(f, s->head.dim, s->head.group, s->all, false);
    if (r == 0)
        r = time_policies(f, policies, MAX_POLICIES, took);
    close_context(f);
    if (r < 0)
        return r;
    s->dense = took[0].ns;
    for (uint32_t i = 1; i < N_BETAS; i++)
        s->dense = fmin(s->dense, took[2 * i].ns);
    double window = s->dense * (s->all - s->n) / s->all;
    for (uint32_t i = 0; i < N_BETAS; i++) {
        s->scan[i] = fmax(took[2 * i + 1].ns - window, 1);
        s->hits[i] = took[2 * i + 1].hits;
    }
    s->dense -= window;
    return 0;
}

static void fit_all(const sample *s, eng_cost *c)
{
    equation dense[N_SHAPES], scan[N_SHAPES * N_BETAS];
    double x[UNKNOWN];
    for (uint32_t i = 0; i < N_SHAPES; i++) {
        double dim = s[i].head.dim, group = s[i].head.group, n = s[i].n;
        dense[i] = (equation){{n * s[i].head.key_bytes, n * dim * group}, s[i].dense};
        for (uint32_t j = 0; j < N_BETAS; j++)
            scan[i * N_BETAS + j] = (equation){{1, group, n * dim, n * group, s[i].hits[j] * group * dim}, s[i].scan[j]};
    }
    solve_again(dense, N_SHAPES, 2, x);
    c->dense_byte = x[0];
    c->dense_op = x[1];
    solve_again(scan, N_SHAPES * N_BETAS, 5, x);
    c->scan_search = x[0];
    c->scan_head = x[1];
    c->scan_dim = x[2];
    c->scan_key = x[3];
    c->hit_dim = x[4];
}

/* A graph's search against a scan of the same keys, in turn: what both have in common, the window, the hits, their values, is no matter then. */
static int measure_graph(fit *f, eng_cost *c)
{
    enum { DIM = 64, GROUP = 7 };
    const eng_attention policies[2] = {{.mode = ENG_ATTN_FLAT, .top_k = GRAPH_HITS}, {.mode = ENG_ATTN_GRAPH, .top_k = GRAPH_HITS}};
    outcome took[2];
    int r = open_context(f, DIM, GROUP, GRAPH_KEYS, true);
    if (r == 0)
        r = time_policies(f, policies, 2, took);
    if (r == 0) {
        double scan = took[0].probed * (c->scan_dim * DIM + c->scan_key * GROUP) + (double)ATTN_SPARE * GROUP * DIM * c->hit_dim, walk = took[1].ns - took[0].ns + scan;
        c->visit_dim = (walk > 0 ? walk : took[1].ns) / (took[1].probed * DIM);
    }
    close_context(f);
    return r;
}

static void report(const sample *s, const eng_cost *c, void (*log)(const char *line))
{
    char line[200];
    for (uint32_t i = 0; i < N_SHAPES; i++)
        for (uint32_t j = 0; j < N_BETAS; j++) {
            bool scans = eng_cost_scan(c, &s[i].head, s[i].n, (uint32_t)s[i].hits[j]) < eng_cost_dense(c, &s[i].head, s[i].n);
            double took = scans ? s[i].scan[j] : s[i].dense, best = fmin(s[i].scan[j], s[i].dense);
            snprintf(line, sizeof line, "%4u dimensions, %u heads, %6u keys, %4.0f hits: every key %8.1f us, scan %8.1f us; auto takes %s, %.0f %% over the better", s[i].head.dim,
                     s[i].head.group, s[i].n, s[i].hits[j], s[i].dense * 1e-3, s[i].scan[j] * 1e-3, scans ? "the scan " : "every key", 100 * (took / best - 1));
            log(line);
        }
}

int eng_cost_fit(eng_cpu cpu, void (*log)(const char *line), eng_cost *ret, const char **ret_cpu, char *err, size_t errlen)
{
    fit f = {.random = 1};
    sample s[N_SHAPES];
    eng_cost c = {0};
    int r = eng_kernels_get(cpu, &f.k, err, errlen);
    if (r < 0)
        return r;
    idx_cpu_set(cpu == ENG_CPU_AUTO ? IDX_CPU_AMX : (idx_cpu)(cpu - ENG_CPU_SCALAR));
    r = eng_pool_new(eng_pool_cores(), &f.pool);
    for (uint32_t i = 0; i < N_SHAPES && r == 0; i++) {
        uint32_t h = i / (N_SHAPES / (sizeof heads / sizeof *heads)), l = i % (sizeof lengths / sizeof *lengths);
        s[i] = (sample){.head = {heads[h].dim, heads[h].group, 4 * heads[h].dim}, .all = lengths[l], .n = lengths[l] - SINK - LOCAL};
        r = measure_shape(&f, &s[i]);
    }
    if (r == 0) {
        fit_all(s, &c);
        r = measure_graph(&f, &c);
    }
    eng_pool_free(f.pool);
    if (r < 0)
        return eng_fail(err, errlen, r, "the machine cannot be measured: %s", strerror(-r));
    if (log)
        report(s, &c, log);
    *ret = c;
    *ret_cpu = f.k->name;
    return 0;
}
