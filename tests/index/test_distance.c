/* The kernels of every level that this machine has, against the scalar ones: bit for bit where results are integers or picked numbers. */
#include "distance_narrow.h"
#include "support.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = 16, BLOCKS = 3, SLOTS = BLOCKS * IDX_BLOCK, MAX_QUADS = 64, LEVELS = 4 };
static const idx_kernels *const levels[LEVELS] = {&idx_kernels_scalar, &idx_kernels_avx2, &idx_kernels_avx512, &idx_kernels_amx};
static const uint32_t quads_tried[] = {1, 2, 4, 5, 8, 16, 20, 24, 31, 32, 64};

static uint32_t n_levels(void)
{
    return (uint32_t)idx_cpu_detect() + 1;
}

typedef struct {
    uint8_t codes[SLOTS * MAX_QUADS * 4] __attribute__((aligned(64)));
    float scale[SLOTS] __attribute__((aligned(64)));
    int8_t x[GROUP][MAX_QUADS * 4];
    idx_code_query q[GROUP];
} head;

/* What a byte may be at its worst: all sums at once as large as they get, of either sign, or with signs by turns, which pairs of 16 bits would show. */
enum { RANDOM, LARGEST, LEAST, BY_TURNS, EXTREMES, WAYS };

static uint8_t code_of(t_rng *r, int way, uint32_t i)
{
    switch (way) {
    case RANDOM:
        return (uint8_t)t_u64(r);
    case LARGEST:
        return 255;
    case LEAST:
        return 0;
    case BY_TURNS:
        return i & 1 ? 255 : 0;
    default:
        return t_u64(r) & 1 ? 255 : 0;
    }
}

static int8_t query_of(t_rng *r, int way, uint32_t i)
{
    switch (way) {
    case RANDOM:
        return (int8_t)(t_u64(r) % 255 - 127);
    case LARGEST:
        return 127;
    case LEAST:
        return -127;
    case BY_TURNS:
        return i & 1 ? 127 : -127;
    default:
        return t_u64(r) & 1 ? 127 : -127;
    }
}

/* zero: of a code that stands for 0, doubled where codes have four bits. */
static void fill(head *h, t_rng *r, uint32_t quads, int code_way, int query_way, int zero)
{
    uint32_t width = idx_dim_pad(4 * quads);
    for (uint32_t i = 0; i < sizeof h->codes; i++)
        h->codes[i] = code_of(r, code_way, i);
    for (uint32_t i = 0; i < SLOTS; i++)
        h->scale[i] = i % 7 == 6 ? NAN : 0.01f + (float)t_uniform(r);
    for (uint32_t g = 0; g < GROUP; g++) {
        int8_t *x = (int8_t *)h->x + g * width; /* at equal distances */
        int32_t sum = 0;
        for (uint32_t j = 0; j < width; j++) {
            x[j] = query_of(r, query_way, j);
            sum += j < 4 * quads ? x[j] : 0;
        }
        h->q[g] = (idx_code_query){.x = x, .bias = -zero * sum, .scale = t_normal(r), .offset = t_normal(r)};
    }
}

static void same(const float *a, const float *b, uint32_t n, const char *what, uint32_t level, uint32_t quads)
{
    for (uint32_t i = 0; i < n; i++)
        ck_assert_msg(a[i] == b[i] || (a[i] != a[i] && b[i] != b[i]), "%s, level %u, %u quads: %g and %g", what, level, quads, (double)a[i], (double)b[i]);
}

START_TEST(scores_by_code)
{
    static head h;
    t_rng r = t_seed(5);
    for (uint32_t i = 0; i < sizeof quads_tried / sizeof *quads_tried * WAYS * WAYS; i++) {
        uint32_t quads = quads_tried[i / (WAYS * WAYS)];
        for (uint32_t narrow = 0; narrow < 2; narrow++) {
            if (narrow && quads % 2)
                continue;
            fill(&h, &r, quads, (int)(i / WAYS % WAYS), (int)(i % WAYS), narrow ? 15 : 128);
            float want[GROUP][SLOTS], got[GROUP][SLOTS], want_best[GROUP], got_best[GROUP];
            uint32_t width = narrow ? quads / 2 : quads;
            (narrow ? levels[0]->narrow : levels[0]->codes)(h.codes, h.scale, BLOCKS, width, h.q, GROUP, *want, SLOTS, want_best);
            for (uint32_t level = 1; level < n_levels(); level++)
                for (uint32_t g = 1; g <= GROUP; g++) {
                    (narrow ? levels[level]->narrow : levels[level]->codes)(h.codes, h.scale, BLOCKS, width, h.q, g, *got, SLOTS, got_best);
                    same(*want, *got, g * SLOTS, narrow ? "narrow" : "codes", level, quads);
                    same(want_best, got_best, g, narrow ? "narrow's best" : "codes' best", level, quads);
                }
        }
    }
}
END_TEST

START_TEST(nodes)
{
    static head h;
    t_rng r = t_seed(6);
    for (uint32_t i = 0; i < sizeof quads_tried / sizeof *quads_tried * WAYS; i++) {
        fill(&h, &r, quads_tried[i / WAYS], (int)(i % WAYS), (int)(i % WAYS), 128);
        for (uint32_t level = 1; level < n_levels(); level++)
            for (int round = 0; round < 40; round++) {
                float want[GROUP * IDX_BLOCK], got[GROUP * IDX_BLOCK], want_best[GROUP], got_best[GROUP];
                uint32_t heads = round ? (uint32_t)t_u64(&r) & 0xffff : 0xffff;
                for (uint32_t j = 0; j < GROUP * IDX_BLOCK; j++)
                    want[j] = got[j] = -1;
                for (uint32_t g = 0; g < GROUP; g++)
                    want_best[g] = got_best[g] = round % 2 ? -INFINITY : t_normal(&r) * 1e4f;
                levels[0]->node(h.codes, h.scale, quads_tried[i / WAYS], h.q, heads, want, want_best);
                levels[level]->node(h.codes, h.scale, quads_tried[i / WAYS], h.q, heads, got, got_best);
                same(want, got, GROUP * IDX_BLOCK, "node", level, quads_tried[i / WAYS]);
                same(want_best, got_best, GROUP, "node's best", level, quads_tried[i / WAYS]);
            }
    }
}
END_TEST

/* Of few different numbers, so that many are equal to the threshold; also in place, as selections are made. */
START_TEST(picking)
{
    enum { MOST = 300 };
    t_rng r = t_seed(7);
    for (int round = 0; round < 3000; round++) {
        float x[MOST + 16], s[2][MOST + 16], lt[2][MOST + 16], thr = (float)(t_u64(&r) % 9);
        uint32_t n = (uint32_t)(t_u64(&r) % MOST), ids[MOST + 16], id[2][MOST + 16], kept[2], n_gt[2], n_lt[2], level = 1 + (uint32_t)round % LEVELS;
        bool in_place = round & 1, numbered = round & 2;
        if (level >= n_levels())
            continue;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t v = (uint32_t)(t_u64(&r) % 11);
            x[i] = v == 10 ? NAN : v == 9 ? -INFINITY : (float)v;
            ids[i] = (uint32_t)t_u64(&r);
        }
        for (int j = 0; j < 2; j++) {
            const idx_kernels *k = levels[j ? level : 0];
            memcpy(s[j], x, n * sizeof *x);
            memcpy(id[j], ids, n * sizeof *ids);
            kept[j] = k->filter(numbered ? NULL : in_place ? id[j] : ids, 77, in_place ? s[j] : x, n, thr, id[j], s[j]);
        }
        ck_assert_uint_eq(kept[0], kept[1]);
        same(s[0], s[1], kept[0], "filter", level, n);
        ck_assert(!memcmp(id[0], id[1], kept[0] * sizeof *ids));
        for (int j = 0; j < 2; j++) {
            memcpy(s[j], x, n * sizeof *x);
            levels[j ? level : 0]->split(in_place ? s[j] : x, n, thr, s[j], &n_gt[j], lt[j], &n_lt[j]);
        }
        ck_assert_uint_eq(n_gt[0], n_gt[1]);
        ck_assert_uint_eq(n_lt[0], n_lt[1]);
        same(s[0], s[1], n_gt[0], "split, larger", level, n);
        same(lt[0], lt[1], n_lt[0], "split, smaller", level, n);
    }
}
END_TEST

int main(void)
{
    Suite *s = suite_create("distance");
    TCase *c = tcase_create("distance");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, scores_by_code);
    tcase_add_test(c, nodes);
    tcase_add_test(c, picking);
    suite_add_tcase(s, c);
    return t_run(s);
}
