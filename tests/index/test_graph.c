/* The graph: how it is built and cut, what a search may return, and what idx_load() must refuse. Recall is test_recall.c's. */
#include "index.h"
#include "support.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIM = 24, GROUP = 3 };

static t_rng rng;

/* Keys in a few clumps with a common offset, queries drawn towards the clumps. */
typedef struct {
    idx_rows rows;
    idx_queries train;
    _Float16 *keys, *queries;
    uint32_t *pos;
} problem;

static problem problem_new(uint32_t n, uint32_t m)
{
    problem p = {
        .keys = malloc((size_t)n * DIM * 2 + 1), .queries = malloc((size_t)m * GROUP * DIM * 2 + 1), .pos = malloc((size_t)m * 4 + 1)};
    float centre[12][DIM];
    for (int c = 0; c < 12; c++)
        for (int j = 0; j < DIM; j++)
            centre[c][j] = t_normal(&rng);
    for (uint32_t i = 0; i < n; i++) {
        const float *c = centre[t_u64(&rng) % 12];
        for (int j = 0; j < DIM; j++)
            p.keys[i * DIM + j] = (_Float16)(3 + c[j] + 0.7f * t_normal(&rng));
    }
    for (uint32_t i = 0; i < m * GROUP; i++) {
        const float *c = centre[t_u64(&rng) % 12];
        for (int j = 0; j < DIM; j++)
            p.queries[i * DIM + j] = (_Float16)(2 * c[j] + t_normal(&rng));
    }
    for (uint32_t i = 0; i < m; i++)
        p.pos[i] = (uint32_t)((uint64_t)(i + 1) * n / m);
    p.rows = (idx_rows){p.keys, DIM * 2, n, DIM, IDX_F16};
    p.train = (idx_queries){(const uint16_t *)(const void *)p.queries, p.pos, m, GROUP};
    return p;
}

static void problem_free(problem *p)
{
    free(p->keys);
    free(p->queries);
    free(p->pos);
}

enum { HEADER = 64 }; /* README.md, "Arenas" */

static void put32(uint8_t *p, uint32_t v)
{
    memcpy(p, &v, 4);
}

static uint32_t get32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* Where the parts of an arena of n keys begin, as README.md has them. */
typedef struct {
    uint32_t nodes, padded;
    size_t margins, first, means, scales, links;
} arena_parts;

static size_t lines(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static arena_parts parts_of(uint32_t n, uint32_t n_margins)
{
    arena_parts p = {.nodes = (n + 15) / 16};
    p.padded = (p.nodes + 15) / 16 * 16;
    p.margins = HEADER + lines(2 * (size_t)((DIM + 15) / 16 * 16) * 4);
    p.first = p.margins + lines((size_t)n_margins * 4);
    p.means = p.first + lines((p.nodes + 1) * 4);
    p.scales = p.means + 2 * p.padded * 4;
    p.links = p.scales + p.nodes * 64 + p.padded * DIM + (size_t)p.nodes * 16 * DIM;
    return p;
}

/* No node links to itself, twice to another, to none, or to more than asked for, and every link has a weight. */
static void check_links(const idx_index *ix, uint32_t n, uint32_t degree)
{
    size_t bytes;
    const uint8_t *arena = idx_arena(ix, &bytes);
    arena_parts at = parts_of(n, get32(arena + 28));
    uint32_t *from = calloc(at.nodes, sizeof *from);
    ck_assert_uint_eq(bytes, at.links + lines((size_t)get32(arena + at.first + 4 * (size_t)at.nodes) * 4));
    for (uint32_t node = 0; node < at.nodes; node++) {
        uint32_t lo = get32(arena + at.first + 4 * (size_t)node), hi = get32(arena + at.first + 4 * (size_t)node + 4);
        if (hi - lo > degree)
            ck_abort_msg("node %u has %u links", node, hi - lo);
        for (uint32_t i = lo; i < hi; i++) {
            uint32_t link = get32(arena + at.links + 4 * (size_t)i), to = link >> 8;
            if (to >= at.nodes || to == node || from[to] == node + 1 || !(link & 255))
                ck_abort_msg("node %u links to node %u of %u with weight %u", node, to, at.nodes, link & 255);
            from[to] = node + 1;
        }
    }
    free(from);
}

static idx_index *build(const problem *p, uint64_t deadline, int *ret_steps)
{
    idx_graph_params params = idx_graph_params_default();
    idx_builder *b;
    idx_index *ix = NULL;
    int r, steps = 0;
    float progress = 0;
    ck_assert_int_eq(idx_builder_new(&p->rows, &p->train, &params, &b), 0);
    ck_assert_int_eq(idx_builder_finish(b, &ix), -EINVAL);
    ck_assert_ptr_null(ix);
    do {
        r = idx_builder_step(b, deadline);
        float now = idx_builder_progress(b);
        if (now < progress || now > 1)
            ck_abort_msg("progress went from %g to %g", (double)progress, (double)now);
        progress = now;
        steps++;
    } while (r == 1);
    ck_assert_int_eq(r, 0);
    ck_assert(progress > 0.98f);
    ck_assert_int_eq(idx_builder_finish(b, &ix), 0);
    idx_builder_free(b);
    char err[200] = "";
    ck_assert_msg(idx_check(ix, err, sizeof err) == 0, "%s", err);
    check_links(ix, p->rows.n, params.degree);
    ck_assert_int_eq((int)idx_kind_of(ix), IDX_GRAPH);
    if (ret_steps)
        *ret_steps = steps;
    return ix;
}

static void random_query(float *q)
{
    for (int j = 0; j < GROUP * DIM; j++)
        q[j] = 2 * t_normal(&rng);
}

/* Every id once, inside the range, with the score the scan gives it, bit for bit; returns the share of the scan's hits that were found. */
static double check_search(const idx_index *ix, const idx_rows *rows, const idx_query *q, idx_scratch *s, idx_scratch *s_flat)
{
    idx_hits *hits, *exact, *scan;
    idx_query everything = *q;
    uint32_t visited = 0, n_exact = 0, n_found = 0;
    ck_assert_int_eq(idx_search(ix, rows, q, s, &hits, &visited), 0);
    ck_assert_uint_le(visited, rows->n + (q->hi - q->lo) + 512);
    float *score_of = malloc(rows->n * sizeof *score_of + 1);
    uint8_t *seen = calloc(rows->n + 1, 1);
    for (uint32_t h = 0; h < q->group; h++) {
        everything.budget = (idx_budget){UINT32_MAX, 0};
        ck_assert_int_eq(idx_search(NULL, rows, &everything, s_flat, &scan, NULL), 0);
        for (uint32_t i = 0; i < rows->n; i++)
            score_of[i] = NAN;
        for (uint32_t i = 0; i < scan[h].n; i++)
            score_of[scan[h].ids[i]] = scan[h].scores[i];
        memset(seen, 0, rows->n);
        ck_assert_uint_le(hits[h].n, q->budget.top_k);
        for (uint32_t i = 0; i < hits[h].n; i++) {
            uint32_t id = hits[h].ids[i];
            if (id < q->lo || id >= q->hi || seen[id])
                ck_abort_msg("id %u twice or outside [%u, %u)", id, q->lo, q->hi);
            if (memcmp(&hits[h].scores[i], &score_of[id], 4) != 0)
                ck_abort_msg("score of %u is %g, the scan has %g", id, (double)hits[h].scores[i], (double)score_of[id]);
            seen[id] = 1;
        }
        ck_assert_int_eq(idx_search(NULL, rows, q, s_flat, &exact, NULL), 0);
        for (uint32_t i = 0; i < exact[h].n; i++)
            n_found += seen[exact[h].ids[i]];
        n_exact += exact[h].n;
        if (!(q->budget.beta > 0))
            ck_assert_uint_eq(hits[h].n, exact[h].n);
    }
    free(score_of);
    free(seen);
    return n_exact ? (double)n_found / n_exact : 1;
}

/* Searches of all kinds; returns the mean recall. */
static double check_searches(const idx_index *ix, const idx_rows *rows, int rounds)
{
    idx_scratch *s, *s_flat;
    float q[GROUP * DIM], floor[GROUP];
    uint32_t seeds[40];
    double recall = 0;
    ck_assert_int_eq(idx_scratch_new(rows->n, DIM, GROUP, rows->n, &s), 0);
    ck_assert_int_eq(idx_scratch_new(rows->n, DIM, GROUP, rows->n, &s_flat), 0);
    for (int i = 0; i < rounds; i++) {
        random_query(q);
        uint32_t a = (uint32_t)(t_u64(&rng) % (rows->n + 1)), b = (uint32_t)(t_u64(&rng) % (rows->n + 1));
        for (int j = 0; j < 40; j++)
            seeds[j] = j % 5 == 0 ? (uint32_t)t_u64(&rng) : (uint32_t)(t_u64(&rng) % rows->n);
        for (int h = 0; h < GROUP; h++)
            floor[h] = h ? 20 * t_normal(&rng) : -INFINITY;
        idx_query query = {.q = q, .group = GROUP, .hi = rows->n, .scale = 0.2f, .seeds = seeds, .n_seeds = i % 2 ? 40 : 0};
        if (i % 3) {
            query.lo = a < b ? a : b;
            query.hi = a < b ? b : a;
        }
        query.budget = (idx_budget){1 + (uint32_t)(t_u64(&rng) % 150), i % 4 == 3 ? 3.0f : 0};
        query.floor = i % 8 == 7 ? floor : NULL;
        recall += check_search(ix, rows, &query, s, s_flat) / rounds;
    }
    idx_scratch_free(s);
    idx_scratch_free(s_flat);
    return recall;
}

/* Whatever is asked for, no node is out of reach: with a budget of all keys but one, all but the worst are found, in a range, too. */
static void check_reach(const idx_index *ix, const idx_rows *rows)
{
    idx_scratch *s, *s_flat;
    float q[GROUP * DIM];
    ck_assert_int_eq(idx_scratch_new(rows->n, DIM, GROUP, rows->n, &s), 0);
    ck_assert_int_eq(idx_scratch_new(rows->n, DIM, GROUP, rows->n, &s_flat), 0);
    for (int i = 0; i < 4; i++) {
        random_query(q);
        idx_query query = {.q = q, .group = GROUP, .lo = i % 2 ? 37 : 0, .hi = i % 2 ? rows->n - 21 : rows->n, .scale = 0.2f};
        query.budget.top_k = query.hi - query.lo - 1;
        ck_assert_double_eq(check_search(ix, rows, &query, s, s_flat), 1);
    }
    idx_scratch_free(s);
    idx_scratch_free(s_flat);
}

START_TEST(test_search)
{
    rng = t_seed(10);
    for (idx_cpu c = IDX_CPU_SCALAR; c <= idx_cpu_detect(); c++) {
        idx_cpu_set(c);
        problem p = problem_new(3000, 400);
        idx_index *ix = build(&p, 0, NULL);
        double recall = check_searches(ix, &p.rows, 60);
        ck_assert_msg(recall > 0.9, "recall %.3f", recall);
        check_reach(ix, &p.rows);
        idx_free(ix);
        problem_free(&p);
    }
}
END_TEST

/* The same walk, to the last node, on every level: bounds, votes and scores by code are the same bits. */
START_TEST(test_levels)
{
    enum { STEPS = 12 };
    rng = t_seed(21);
    problem p = problem_new(2500, 520);
    idx_index *ix = build(&p, 0, NULL);
    float q[STEPS][GROUP * DIM];
    uint32_t visited[STEPS], n[STEPS][GROUP];
    uint64_t sum[STEPS][GROUP];
    for (int i = 0; i < STEPS; i++)
        random_query(q[i]);
    for (idx_cpu c = IDX_CPU_SCALAR; c <= idx_cpu_detect(); c++) {
        idx_scratch *s;
        idx_cpu_set(c);
        ck_assert_int_eq(idx_scratch_new(2500, DIM, GROUP, 200, &s), 0);
        for (int i = 0; i < STEPS; i++) {
            idx_query query = {.q = q[i], .group = GROUP, .lo = 21, .hi = 2477, .scale = 0.2f, .budget = {i % 2 ? 200 : 30, i % 3 ? 0 : 2.5f}};
            idx_hits *hits;
            uint32_t met;
            ck_assert_int_eq(idx_search(ix, &p.rows, &query, s, &hits, &met), 0);
            if (c == IDX_CPU_SCALAR)
                visited[i] = met;
            ck_assert_uint_eq(met, visited[i]);
            for (int h = 0; h < GROUP; h++) {
                uint64_t ids = 0;
                for (uint32_t j = 0; j < hits[h].n; j++)
                    ids += (uint64_t)hits[h].ids[j] * hits[h].ids[j];
                if (c == IDX_CPU_SCALAR) {
                    n[i][h] = hits[h].n;
                    sum[i][h] = ids;
                }
                ck_assert_uint_eq(hits[h].n, n[i][h]);
                ck_assert_uint_eq(ids, sum[i][h]);
            }
        }
        idx_scratch_free(s);
    }
    idx_free(ix);
    problem_free(&p);
}
END_TEST

/* Keys that are alike where they lie together, as in a text: a search reads a small part of them. */
START_TEST(test_visits)
{
    enum { N = 12000, CLUMP = 100, STEPS = 20 };
    rng = t_seed(20);
    problem p = problem_new(N, 520);
    float centre[N / CLUMP][DIM];
    for (int c = 0; c < N / CLUMP; c++)
        for (int j = 0; j < DIM; j++)
            centre[c][j] = t_normal(&rng);
    for (uint32_t i = 0; i < N; i++)
        for (int j = 0; j < DIM; j++)
            p.keys[i * DIM + j] = (_Float16)(3 + centre[i / CLUMP][j] + 0.3f * t_normal(&rng));
    for (uint32_t i = 0; i < 520 * GROUP; i++) {
        const float *c = centre[t_u64(&rng) % (N / CLUMP)];
        for (int j = 0; j < DIM; j++)
            p.queries[i * DIM + j] = (_Float16)(2 * c[j] + 0.5f * t_normal(&rng));
    }
    idx_index *ix = build(&p, 0, NULL);
    idx_scratch *s, *s_flat;
    double recall = 0, visits = 0;
    ck_assert_int_eq(idx_scratch_new(N, DIM, GROUP, 50, &s), 0);
    ck_assert_int_eq(idx_scratch_new(N, DIM, GROUP, N, &s_flat), 0);
    for (int i = 0; i < STEPS; i++) {
        float q[GROUP * DIM];
        for (int h = 0; h < GROUP; h++) {
            const float *c = centre[t_u64(&rng) % (N / CLUMP)];
            for (int j = 0; j < DIM; j++)
                q[h * DIM + j] = 2 * c[j] + 0.5f * t_normal(&rng);
        }
        idx_query query = {.q = q, .group = GROUP, .lo = 100, .hi = N - 100, .scale = 0.2f, .budget = {50, 0}};
        recall += check_search(ix, &p.rows, &query, s, s_flat) / STEPS;
        visits += (double)idx_visited(s) / (query.hi - query.lo) / STEPS;
    }
    ck_assert_msg(recall > 0.995, "recall %.4f", recall);
    ck_assert_msg(visits < 0.3, "%.0f %% of the keys visited", 100 * visits);
    idx_scratch_free(s);
    idx_scratch_free(s_flat);
    idx_free(ix);
    problem_free(&p);
}
END_TEST

START_TEST(test_slices)
{
    rng = t_seed(11);
    problem p = problem_new(5000, 1500);
    int steps;
    idx_index *whole = build(&p, 0, &steps), *cut;
    ck_assert_int_eq(steps, 1);
    cut = build(&p, 1, &steps); /* a deadline long past: the least possible work a call */
    ck_assert_int_gt(steps, 1000);
    size_t n, n_cut;
    const void *a = idx_arena(whole, &n), *b = idx_arena(cut, &n_cut);
    ck_assert_uint_eq(n, n_cut);
    ck_assert_int_eq(memcmp(a, b, n), 0);
    idx_free(whole);
    idx_free(cut);
    problem_free(&p);
}
END_TEST

/* Few keys, few queries, and none. */
START_TEST(test_small)
{
    static const uint32_t sizes[] = {1, 2, 3, 17, 33, 150};
    rng = t_seed(12);
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (uint32_t m = 0; m < 5; m = m * 2 + 1) {
            problem p = problem_new(sizes[i], m);
            idx_index *ix = build(&p, 0, NULL);
            ck_assert_msg(check_searches(ix, &p.rows, 16) > 0.9, "n %u, m %u", sizes[i], m);
            idx_free(ix);
            problem_free(&p);
        }
    }
}
END_TEST

START_TEST(test_untrained)
{
    rng = t_seed(13);
    problem p = problem_new(2000, 0);
    idx_index *ix = build(&p, 0, NULL);
    double recall = check_searches(ix, &p.rows, 40);
    ck_assert_msg(recall > 0.6, "recall %.3f", recall);
    idx_free(ix);
    problem_free(&p);
}
END_TEST

static void check_odd_keys(problem *p)
{
    idx_index *ix = build(p, 0, NULL);
    idx_scratch *s;
    idx_hits *hits;
    float q[GROUP * DIM];
    ck_assert_int_eq(idx_scratch_new(p->rows.n, DIM, GROUP, 100, &s), 0);
    for (int i = 0; i < 10; i++) {
        random_query(q);
        idx_query query = {.q = q, .group = GROUP, .lo = 3, .hi = p->rows.n, .scale = 1, .budget = {50, i % 2 ? 5.0f : 0}};
        ck_assert_int_eq(idx_search(ix, &p->rows, &query, s, &hits, NULL), 0);
        for (uint32_t h = 0; h < GROUP; h++) {
            uint8_t seen[1000] = {0};
            for (uint32_t j = 0; j < hits[h].n; j++) {
                if (hits[h].ids[j] < 3 || hits[h].ids[j] >= p->rows.n || seen[hits[h].ids[j]] || hits[h].scores[j] != hits[h].scores[j])
                    ck_abort_msg("bad hit %u", hits[h].ids[j]);
                seen[hits[h].ids[j]] = 1;
            }
        }
    }
    idx_scratch_free(s);
    idx_free(ix);
}

START_TEST(test_odd_keys)
{
    rng = t_seed(14);
    for (int kind = 0; kind < 6; kind++) {
        problem p = problem_new(1000, 260);
        size_t n = 1000 * DIM;
        if (kind == 0)
            memset(p.keys, 0, n * 2);
        for (size_t i = 0; kind == 1 && i < n; i++)
            p.keys[i] = p.keys[i % DIM]; /* all equal */
        for (size_t i = 0; kind == 2 && i < n; i += 37)
            p.keys[i] = (_Float16)NAN;
        for (size_t i = 0; kind == 3 && i < n; i++)
            p.keys[i] = (_Float16)(i % 2 ? INFINITY : NAN);
        for (size_t i = 0; kind == 4 && i < 260 * GROUP * DIM; i++)
            p.queries[i] = (_Float16)(i % 3 ? NAN : INFINITY);
        for (size_t i = 0; kind == 5 && i < n; i++)
            p.keys[i] *= (_Float16)5000; /* distances near the end of float32's range once squared and mapped */
        check_odd_keys(&p);
        problem_free(&p);
    }
}
END_TEST

START_TEST(test_load)
{
    rng = t_seed(15);
    problem p = problem_new(1200, 200);
    idx_index *ix = build(&p, 0, NULL), *copy;
    size_t bytes;
    char err[200];
    const void *arena = idx_arena(ix, &bytes);
    uint8_t *moved = malloc(bytes + 1);
    memcpy(moved + 1, arena, bytes); /* not aligned, as in a file's buffer */
    ck_assert_int_eq(idx_load(moved + 1, bytes, 1200, DIM, NULL, &copy, err, sizeof err), 0);
    memset(moved, 0xee, bytes + 1); /* it was copied */
    free(moved);
    idx_scratch *s, *s2;
    ck_assert_int_eq(idx_scratch_new(1200, DIM, GROUP, 64, &s), 0);
    ck_assert_int_eq(idx_scratch_new(1200, DIM, GROUP, 64, &s2), 0);
    for (int i = 0; i < 30; i++) {
        float q[GROUP * DIM];
        idx_hits *a, *b;
        uint32_t va, vb;
        random_query(q);
        idx_query query = {.q = q, .group = GROUP, .hi = 1200, .scale = 1, .budget = {64, 0}};
        ck_assert_int_eq(idx_search(ix, &p.rows, &query, s, &a, &va), 0);
        ck_assert_int_eq(idx_search(copy, &p.rows, &query, s2, &b, &vb), 0);
        ck_assert_uint_eq(va, vb);
        for (uint32_t h = 0; h < GROUP; h++) {
            ck_assert_uint_eq(a[h].n, b[h].n);
            ck_assert_int_eq(memcmp(a[h].ids, b[h].ids, a[h].n * 4), 0);
        }
    }
    idx_scratch_free(s);
    idx_scratch_free(s2);
    idx_free(copy);
    idx_free(ix);
    problem_free(&p);
}
END_TEST

/* A damaged arena is refused with a reason, or is harmless: whatever loads is searched. */
static int try_load(const problem *p, const uint8_t *arena, size_t bytes)
{
    idx_index *ix = NULL;
    char err[200] = "";
    uint8_t *exact = malloc(bytes + !bytes); /* its own block, so that ASan sees the end */
    memcpy(exact, arena, bytes);
    int r = idx_load(exact, bytes, p->rows.n, DIM, NULL, &ix, err, sizeof err);
    free(exact);
    if (r < 0) {
        if (r != -EBADMSG || !err[0] || ix)
            ck_abort_msg("refused with %d, \"%s\"", r, err);
        return r;
    }
    idx_scratch *s;
    idx_hits *hits;
    float q[GROUP * DIM];
    random_query(q);
    idx_query query = {.q = q, .group = GROUP, .lo = 10, .hi = p->rows.n, .scale = 1, .budget = {20, 0}};
    if (idx_scratch_new(p->rows.n, DIM, GROUP, 20, &s) < 0 || idx_search(ix, &p->rows, &query, s, &hits, NULL) < 0)
        ck_abort();
    for (uint32_t h = 0; h < GROUP; h++)
        for (uint32_t i = 0; i < hits[h].n; i++)
            if (hits[h].ids[i] < 10 || hits[h].ids[i] >= p->rows.n)
                ck_abort_msg("id %u from a damaged index", hits[h].ids[i]);
    idx_scratch_free(s);
    idx_free(ix);
    return 0;
}

START_TEST(test_hostile_header)
{
    static const uint32_t values[] = {0, 1, 2, 0x7fffffff, 0x80000000u, 0xffffffffu, 0x3fffffff, 1025};
    rng = t_seed(16);
    problem p = problem_new(300, 40);
    idx_index *ix = build(&p, 0, NULL);
    size_t bytes;
    const uint8_t *good = idx_arena(ix, &bytes);
    uint8_t *bad = malloc(bytes);
    for (size_t at = 0; at < HEADER; at += 4) {
        for (size_t v = 0; v < 8 + 32; v++) {
            memcpy(bad, good, bytes);
            put32(bad + at, v < 8 ? values[v] : get32(good + at) ^ 1u << (v - 8));
            int r = try_load(&p, bad, bytes);
            bool may = at == 20 || at == 48 || at == 52; /* another bound on the degree, rounding error, margin: harmless */
            if (r == 0 && !may && memcmp(bad, good, bytes) != 0)
                ck_abort_msg("header field at %zu may be %u", at, get32(bad + at));
        }
    }
    for (size_t n = 0; n < bytes; n += n < 100 ? 1 : 97)
        if (try_load(&p, good, n) == 0)
            ck_abort_msg("cut at %zu of %zu", n, bytes);
    char err[200];
    idx_index *other = NULL;
    ck_assert_int_eq(idx_load(good, bytes, 301, DIM, NULL, &other, err, sizeof err), -EBADMSG);
    ck_assert_int_eq(idx_load(good, bytes, 300, DIM + 1, NULL, &other, err, sizeof err), -EBADMSG);
    ck_assert_ptr_null(other);
    ck_assert_int_eq(idx_load(good, bytes, 300, DIM + 1, NULL, &other, NULL, 0), -EBADMSG);
    free(bad);
    idx_free(ix);
    problem_free(&p);
}
END_TEST

START_TEST(test_hostile_body)
{
    rng = t_seed(17);
    enum { N = 500 };
    problem p = problem_new(N, 520); /* enough to be tuned */
    idx_index *ix = build(&p, 0, NULL);
    size_t bytes;
    const uint8_t *good = idx_arena(ix, &bytes);
    uint8_t *bad = malloc(bytes);
    arena_parts at = parts_of(N, get32(good + 28));

    for (size_t i = at.first; i < at.first + (at.nodes + 1) * 4; i += 4) { /* a list that goes back or too far */
        memcpy(bad, good, bytes);
        put32(bad + i, 0xfffffff0u);
        if (try_load(&p, bad, bytes) != -EBADMSG)
            ck_abort_msg("word at %zu of %zu may be out of range", i, bytes);
    }
    uint32_t n_links = get32(good + at.first + (size_t)at.nodes * 4), two = 0;
    ck_assert_uint_gt(n_links, 0);
    for (uint32_t node = 0; node < at.nodes; node++)
        for (uint32_t l = get32(good + at.first + node * 4); l < get32(good + at.first + node * 4 + 4); l++) {
            uint8_t *link = bad + at.links + l * 4;
            memcpy(bad, good, bytes);
            uint32_t was = get32(link);
            bool last = l + 1 == get32(good + at.first + node * 4 + 4);
            put32(link, at.nodes << 8 | 1); /* to a node that isn't there */
            ck_assert_int_eq(try_load(&p, bad, bytes), -EBADMSG);
            put32(link, node << 8 | 1); /* to itself */
            ck_assert_int_eq(try_load(&p, bad, bytes), -EBADMSG);
            put32(link, was & ~255u); /* without weight */
            ck_assert_int_eq(try_load(&p, bad, bytes), -EBADMSG);
            put32(link, last ? was : get32(link + 4)); /* twice to the same */
            two += !last && try_load(&p, bad, bytes) == -EBADMSG;
        }
    ck_assert_uint_gt(two, 0);
    static const uint32_t numbers[] = {0x7fc00000, 0x7f800000, 0xbf800000}; /* NaN, infinity, -1 */
    ck_assert_uint_eq(get32(good + 28), GROUP);
    for (size_t i = at.margins; i < at.margins + GROUP * 4; i += 4)
        for (int k = 0; k < 3; k++) {
            memcpy(bad, good, bytes);
            put32(bad + i, numbers[k]);
            if (try_load(&p, bad, bytes) != -EBADMSG)
                ck_abort_msg("margin at %zu may be %x", i, numbers[k]);
        }
    for (size_t i = at.means; i < at.scales; i += 4) {
        size_t node = (i - at.means) / 4 % at.padded;
        for (int k = 0; k < 3 && node < at.nodes; k++) {
            memcpy(bad, good, bytes);
            put32(bad + i, numbers[k]);
            if (try_load(&p, bad, bytes) != -EBADMSG)
                ck_abort_msg("mean or spread at %zu may be %x", i, numbers[k]);
        }
    }
    for (size_t i = at.scales; i < at.scales + at.nodes * 64; i += 4)
        for (int k = 1; k < 3; k++) { /* NaN: there is no key */
            memcpy(bad, good, bytes);
            put32(bad + i, numbers[k]);
            if (try_load(&p, bad, bytes) != -EBADMSG)
                ck_abort_msg("scale at %zu may be %x", i, numbers[k]);
        }
    memcpy(bad, good, bytes); /* rows beyond the last have no score, whatever their scales say */
    for (size_t i = at.scales + N * 4; i < at.scales + at.nodes * 64; i += 4)
        put32(bad + i, 0x3f800000);
    ck_assert_int_eq(try_load(&p, bad, bytes), 0);

    int loaded = 0;
    for (int i = 0; i < 3000; i++) {
        memcpy(bad, good, bytes);
        if (i % 3 == 0)
            for (size_t j = HEADER; j < bytes; j++)
                bad[j] = (uint8_t)t_u64(&rng);
        for (int j = 0; j < 1 + i % 4; j++)
            bad[t_u64(&rng) % bytes] ^= (uint8_t)(1u << t_u64(&rng) % 8);
        loaded += try_load(&p, bad, bytes) == 0;
    }
    ck_assert_int_gt(loaded, 0); /* a flipped low bit of a link is another valid link */
    for (size_t j = 0; j < bytes; j++)
        bad[j] = (uint8_t)t_u64(&rng);
    ck_assert_int_eq(try_load(&p, bad, bytes), -EBADMSG);
    free(bad);
    idx_free(ix);
    problem_free(&p);
}
END_TEST

START_TEST(test_invalid)
{
    rng = t_seed(18);
    problem p = problem_new(50, 10), bad;
    idx_graph_params good = idx_graph_params_default(), params;
    idx_builder *b = NULL;
#define REFUSED(change)                                                                                                                    \
    do {                                                                                                                                   \
        bad = p;                                                                                                                           \
        params = good;                                                                                                                     \
        change;                                                                                                                            \
        ck_assert_int_eq(idx_builder_new(&bad.rows, &bad.train, &params, &b), -EINVAL);                                                    \
        ck_assert_ptr_null(b);                                                                                                             \
    } while (0)
    REFUSED(bad.rows.n = 0);
    REFUSED(bad.rows.n = UINT32_MAX);
    REFUSED(bad.rows.dim = 0);
    REFUSED(bad.rows.dim = 1 << 20);
    REFUSED(bad.rows.stride = DIM);
    REFUSED(bad.train.group = 0);
    REFUSED(bad.train.m = UINT32_MAX);
    REFUSED(params.knn = 0);
    REFUSED(params.degree = 0);
    REFUSED(params.degree = UINT32_MAX);
    REFUSED(params.knn = 100000);
    idx_builder_free(NULL);
    idx_free(NULL);

    ck_assert_int_eq(idx_builder_new(&p.rows, &p.train, &good, &b), 0);
    ck_assert_int_ge(idx_builder_step(b, 1), 0);
    idx_builder_free(b); /* half-built */

    /* An index belongs to its keys. */
    idx_index *ix = build(&p, 0, NULL);
    idx_scratch *s;
    idx_hits *hits = NULL;
    float q[GROUP * DIM] = {0};
    idx_query query = {.q = q, .group = GROUP, .hi = 49, .scale = 1, .budget = {5, 0}};
    bad = p;
    bad.rows.n = 49;
    ck_assert_int_eq(idx_scratch_new(50, DIM, GROUP, 5, &s), 0);
    ck_assert_int_eq(idx_search(ix, &bad.rows, &query, s, &hits, NULL), -EINVAL);
    idx_scratch_free(s);
    ck_assert_int_eq(idx_scratch_new(49, DIM, GROUP, 5, &s), 0);
    ck_assert_int_eq(idx_search(ix, &p.rows, &query, s, &hits, NULL), -EINVAL);
    ck_assert_ptr_null(hits);
    idx_scratch_free(s);
    idx_free(ix);
    problem_free(&p);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("graph");
    TCase *t = tcase_create("graph");
    tcase_set_timeout(t, 600);
    tcase_add_test(t, test_search);
    tcase_add_test(t, test_levels);
    tcase_add_test(t, test_visits);
    tcase_add_test(t, test_slices);
    tcase_add_test(t, test_small);
    tcase_add_test(t, test_untrained);
    tcase_add_test(t, test_odd_keys);
    tcase_add_test(t, test_load);
    tcase_add_test(t, test_hostile_header);
    tcase_add_test(t, test_hostile_body);
    tcase_add_test(t, test_invalid);
    suite_add_tcase(s, t);
    return t_run(s);
}
