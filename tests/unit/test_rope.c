/* Rotary angles: what flags and file say together, by the formulas of the papers; logits with scaling are tests/golden/test_archs.c's
 * matter. */
#include "cmd_common.h"
#include "rope.h"
#include "support.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#define FROM_FILE                                                                                                                          \
    {                                                                                                                                      \
        .yarn_ext_factor = -1, .yarn_attn_factor = -1, .yarn_beta_slow = -1, .yarn_beta_fast = -1                                          \
    }

enum { DIM = 32, PAIRS = DIM / 2 };
static char err[256];

static eng_model model(void)
{
    return (eng_model){
        .n_ctx_train = 2048,
        .rope_base = 10000,
        .rope_dim = DIM,
        .rope = {.scaling = ENG_SCALING_LINEAR,
                 .factor = 1,
                 .attn_factor = 1,
                 .orig_ctx = 2048,
                 .ext_factor = 1,
                 .beta_fast = 32,
                 .beta_slow = 1,
                 .base_local = 500},
    };
}

static eng_rope made(const eng_model *m, eng_rope_params p, uint32_t n_ctx)
{
    eng_rope r;
    ck_assert_msg(eng_rope_init(&r, m, &p, n_ctx, err, sizeof err) == 0, "%s", err);
    return r;
}

static void same(double a, double b)
{
    ck_assert_msg(fabs(a - b) <= 1e-6 * fabs(b), "%.9g is not %.9g", a, b);
}

static double plain(uint32_t i)
{
    return pow(10000, -2.0 * i / DIM);
}

START_TEST(test_none)
{
    eng_model m = model();
    eng_rope r = made(&m, (eng_rope_params)FROM_FILE, 2048);
    ck_assert_str_eq(r.scaling, "none");
    for (uint32_t i = 0; i < PAIRS; i++) {
        same(r.freq[0][i], plain(i));
        same(r.freq[1][i], pow(500, -2.0 * i / DIM));
    }
    ck_assert(r.mscale[0] == 1 && r.mscale[1] == 1 && r.n_ctx_trained == 2048 && r.factor == 1);
    float cs[DIM];
    eng_rope_angles(&r, false, 1000000, cs); /* float32 would have lost the fraction */
    same(cs[3], cos(1e6 * plain(3)));
    same(cs[PAIRS + 3], sin(1e6 * plain(3)));
    eng_rope_angles(&r, true, 7, cs);
    same(cs[5], cos(7 * pow(500, -10.0 / DIM)));
    eng_rope_done(&r);
}
END_TEST

START_TEST(test_linear)
{
    eng_model m = model();
    eng_rope_params p = FROM_FILE;
    m.rope.factor = 8;
    eng_rope r = made(&m, p, 2048); /* the file's, counted in its context_length; local layers are not scaled */
    for (uint32_t i = 0; i < PAIRS; i++) {
        same(r.freq[0][i], plain(i) / 8);
        same(r.freq[1][i], pow(500, -2.0 * i / DIM));
    }
    ck_assert_uint_eq(r.n_ctx_trained, 2048);
    ck_assert(r.factor == 8 && r.mscale[0] == 1);
    eng_rope_done(&r);
    p.freq_scale = 1 / 16.0f;
    r = made(&m, p, 2048);
    same(r.freq[0][3], plain(3) / 16);
    ck_assert_uint_eq(r.n_ctx_trained, 4096);
    eng_rope_done(&r);
    p.scaling = ENG_ROPE_SCALING_NONE; /* comes before the file's, and before a factor */
    r = made(&m, p, 2048);
    same(r.freq[0][3], plain(3));
    ck_assert_str_eq(r.scaling, "none");
    eng_rope_done(&r);
    m = model();
    p = (eng_rope_params)FROM_FILE;
    p.freq_base = 50000;
    r = made(&m, p, 2048);
    same(r.freq[0][3], pow(50000, -6.0 / DIM));
    eng_rope_done(&r);
}
END_TEST

/* arXiv 2309.00071: pair i turns 2048 f(i) / (2 pi) times over the original context. Over 32 times: as it is; below once: divided by the
 * factor. By the published code the ramp runs over whole pair numbers, 4 to 11 here. */
START_TEST(test_yarn)
{
    eng_model m = model();
    eng_rope_params p = FROM_FILE;
    p.scaling = ENG_ROPE_SCALING_YARN;
    p.freq_scale = 0.25f;
    eng_rope r = made(&m, p, 8192);
    ck_assert_str_eq(r.scaling, "yarn");
    for (uint32_t i = 0; i < PAIRS; i++) {
        double keep = i <= 4 ? 1 : i >= 11 ? 0 : 1 - (i - 4) / 7.0;
        same(r.freq[0][i], plain(i) * (keep + (1 - keep) / 4));
    }
    same(r.mscale[0], 0.1 * log(4) + 1);
    ck_assert(r.mscale[1] == 1 && r.n_ctx_trained == 8192 && r.factor == 4);
    same(r.freq[1][9], pow(500, -18.0 / DIM));
    eng_rope_done(&r);

    p.yarn_attn_factor = 1.5f;
    p.yarn_ext_factor = 0.5f;
    p.yarn_beta_fast = 16;
    p.yarn_beta_slow = 2;
    p.yarn_orig_ctx = 1024;
    r = made(&m, p, 8192);
    double low = floor(DIM * log(1024 / (16 * 2 * M_PI)) / (2 * log(10000))),
           high = ceil(DIM * log(1024 / (2 * 2 * M_PI)) / (2 * log(10000)));
    for (uint32_t i = 0; i < PAIRS; i++) {
        double keep = 0.5 * (1 - fmin(1, fmax(0, (i - low) / (high - low))));
        same(r.freq[0][i], plain(i) * (keep + (1 - keep) / 4));
    }
    same(r.mscale[0], 1.5 * (0.1 * log(4) + 1));
    ck_assert_uint_eq(r.n_ctx_trained, 4096);
    eng_rope_done(&r);

    p.yarn_ext_factor = 0; /* full interpolation, and the magnitude is left alone */
    r = made(&m, p, 8192);
    same(r.freq[0][0], 0.25);
    same(r.mscale[0], 1.5);
    eng_rope_done(&r);
}
END_TEST

START_TEST(test_factors)
{
    eng_model m = model();
    float a[PAIRS], b[PAIRS];
    for (int i = 0; i < PAIRS; i++)
        a[i] = 1 + (float)i, b[i] = 2 + (float)i;
    m.rope.factors = a;
    eng_rope r = made(&m, (eng_rope_params)FROM_FILE, 4096);
    ck_assert_str_eq(r.scaling, "llama3");
    same(r.freq[0][7], plain(7) / 8);
    eng_rope_done(&r);

    m = model();
    m.rope.factors_short = a;
    m.rope.factors_long = b;
    m.rope.attn_factor = 1.19f;
    m.rope.orig_ctx = 1024;
    r = made(&m, (eng_rope_params)FROM_FILE, 1024);
    same(r.freq[0][7], plain(7) / 8);
    same(r.mscale[0], 1.19);
    uint64_t hash = eng_rope_hash(&r, 1);
    eng_rope_done(&r);
    r = made(&m, (eng_rope_params)FROM_FILE, 1025);
    ck_assert_str_eq(r.scaling, "longrope");
    same(r.freq[0][7], plain(7) / 9);
    ck_assert(eng_rope_hash(&r, 1) != hash); /* another context cache */
    eng_rope_done(&r);
}
END_TEST

/* Whatever changes an angle or its magnitude changes the fingerprint. */
START_TEST(test_hash)
{
    eng_model m = model();
    eng_rope_params p[5] = {FROM_FILE, FROM_FILE, FROM_FILE, FROM_FILE, FROM_FILE};
    uint64_t h[5];
    p[1].freq_base = 10001;
    p[2].freq_scale = 0.5f;
    p[3].yarn_attn_factor = 1.01f;
    p[4] = p[2];
    p[4].scaling = ENG_ROPE_SCALING_YARN;
    for (int i = 0; i < 5; i++) {
        eng_rope r = made(&m, p[i], 2048);
        h[i] = eng_rope_hash(&r, 42);
        ck_assert(h[i] == eng_rope_hash(&r, 42) && h[i] != eng_rope_hash(&r, 43));
        for (int k = 0; k < i; k++)
            ck_assert(h[i] != h[k]);
        eng_rope_done(&r);
    }
}
END_TEST

START_TEST(test_no_angles)
{
    eng_model m = model();
    eng_rope r;
    eng_rope_params p = FROM_FILE;
    p.scaling = ENG_ROPE_SCALING_YARN;
    p.freq_scale = 0.25f;
    p.freq_base = 1;
    ck_assert_int_eq(eng_rope_init(&r, &m, &p, 2048, err, sizeof err), -EINVAL);
    ck_assert_ptr_nonnull(strstr(err, "RoPE"));
    p.freq_base = 0;
    p.yarn_beta_fast = 0;
    ck_assert_int_eq(eng_rope_init(&r, &m, &p, 2048, err, sizeof err), -EINVAL);
    p.yarn_beta_fast = 32;
    p.freq_scale = INFINITY;
    ck_assert_int_eq(eng_rope_init(&r, &m, &p, 2048, err, sizeof err), -EINVAL);
    p = (eng_rope_params)FROM_FILE;
    p.freq_scale = 1e-44f;
    p.freq_base = 1e-30f;
    ck_assert_int_eq(eng_rope_init(&r, &m, &p, 2048, err, sizeof err), 0); /* of no use, but finite */
    eng_rope_done(&r);
}
END_TEST

static int params_of(const char *flags[], int n, eng_params *ret)
{
    char *argv[16] = {(char *)"retrievald"};
    cfg_settings s;
    for (int i = 0; i < n; i++)
        argv[i + 1] = (char *)flags[i];
    ck_assert_msg(cfg_load(&s, CFG_SERVE, n + 1, argv, err, sizeof err) == 0, "%s", err);
    int rc = srv_engine_params(&s, ret, err, sizeof err);
    cfg_free(&s);
    return rc;
}

START_TEST(test_flags)
{
    eng_params p, d = eng_params_default();
    ck_assert_int_eq(params_of((const char *[]){"--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "32768"}, 6, &p), 0);
    ck_assert(p.rope.scaling == ENG_ROPE_SCALING_YARN && p.rope.freq_scale == 0.25f && p.rope.yarn_orig_ctx == 32768);
    ck_assert(p.rope.yarn_beta_fast == -1 && p.rope.yarn_ext_factor == -1 && p.rope.freq_base == 0);
    ck_assert_int_eq(
        params_of((const char *[]){"--rope-scaling=linear", "--rope-freq-scale=0.5", "--rope-freq-base=5e5", "--yarn-beta-slow=2",
                                   "--yarn-beta-fast=16", "--yarn-attn-factor=1.5", "--yarn-ext-factor=0"},
                  7, &p),
        0);
    ck_assert(p.rope.scaling == ENG_ROPE_SCALING_LINEAR && p.rope.freq_scale == 0.5f && p.rope.freq_base == 5e5f &&
              p.rope.yarn_beta_slow == 2);
    ck_assert(p.rope.yarn_beta_fast == 16 && p.rope.yarn_attn_factor == 1.5f && p.rope.yarn_ext_factor == 0);
    ck_assert_int_eq(params_of((const char *[]){"--rope-scaling=none"}, 1, &p), 0);
    ck_assert_int_eq(p.rope.scaling, ENG_ROPE_SCALING_NONE);
    ck_assert_int_eq(params_of(NULL, 0, &p), 0);
    ck_assert_int_eq(memcmp(&p.rope, &d.rope, sizeof p.rope), 0);
    ck_assert_int_eq(params_of((const char *[]){"--rope-scale=4", "--rope-freq-scale=0.25"}, 2, &p), -EINVAL);
    ck_assert_ptr_nonnull(strstr(err, "--rope-freq-scale"));
}
END_TEST

int main(void)
{
    Suite *s = suite_create("rope");
    TCase *c = tcase_create("rope");
    tcase_add_test(c, test_none);
    tcase_add_test(c, test_linear);
    tcase_add_test(c, test_yarn);
    tcase_add_test(c, test_factors);
    tcase_add_test(c, test_hash);
    tcase_add_test(c, test_no_angles);
    tcase_add_test(c, test_flags);
    suite_add_tcase(s, c);
    return t_run(s);
}
