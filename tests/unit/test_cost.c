/* The cost model: its file, every byte of which may be anything; what it predicts; and whether what a machine measures fits its own times. */
#include "cost.h"
#include "support.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char path[64];
static const eng_cost some = {.dense_byte = 0.25, .dense_op = 0, .scan_search = 1e4, .scan_head = 3, .scan_dim = 1e-3, .scan_key = 0.5, .hit_dim = 2, .visit_dim = 7};

static void put(const char *text, size_t n)
{
    FILE *f = fopen(path, "wb");
    ck_assert_uint_eq(fwrite(text, 1, n, f), n);
    fclose(f);
}

START_TEST(round_trip)
{
    char err[256] = "";
    eng_cost c = {0};
    ck_assert_msg(eng_cost_write(path, "avx512 (VNNI, BF16)", &some, err, sizeof err) == 0, "%s", err);
    ck_assert_int_eq(eng_cost_read(path, "avx512 (VNNI, BF16)", &c, err, sizeof err), 0);
    ck_assert_int_eq(memcmp(&c, &some, sizeof c), 0);
    ck_assert_int_eq(eng_cost_read(path, "avx2", &c, err, sizeof err), -ESTALE);
    ck_assert_ptr_nonnull(strstr(err, "other kernels than avx2"));
    unlink(path);
    ck_assert_int_eq(eng_cost_read(path, "avx2", &c, err, sizeof err), -ENOENT);
    ck_assert_int_eq(eng_cost_write("/nowhere/cost", "avx2", &some, err, sizeof err), -ENOENT);
    ck_assert_ptr_nonnull(strstr(err, "/nowhere/cost"));
}
END_TEST

/* What is missing, doubtful or too much is refused, with the line. */
START_TEST(hostile)
{
    static const struct {
        const char *from, *to, *say;
    } changes[] = {
        {"hit_dim = 2", "hit_dim = -2", ":9: 'hit_dim = -2'"}, {"hit_dim = 2", "hit_dim = nan", ":9: 'hit_dim = nan'"},
        {"hit_dim = 2", "hit_dim = 1e10", ":9:"},              {"hit_dim = 2", "hit_dim = 2 x", ":9:"},
        {"hit_dim = 2", "hit_dim =", ":9:"},                   {"hit_dim = 2", "hit_dim_ = 2", ":9:"},
        {"hit_dim = 2", "hit_dim = \033[2", ":9: 'hit_dim = ?[2'"}, {"hit_dim = 2", "# nothing", "a line is missing"},
        {"cpu = avx2", "# nothing", "a line is missing"},      {"cpu = avx2", "cpu = avx", "other kernels"},
    };
    char err[256] = "", good[2000], bad[6000];
    eng_cost c = some;
    ck_assert_int_eq(eng_cost_write(path, "avx2", &some, err, sizeof err), 0);
    size_t n;
    char *text = t_read(path, &n);
    snprintf(good, sizeof good, "%.*s", (int)n, text);
    free(text);
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        char *at = strstr(good, changes[i].from);
        ck_assert_ptr_nonnull(at);
        snprintf(bad, sizeof bad, "%.*s%s%s", (int)(at - good), good, changes[i].to, at + strlen(changes[i].from));
        put(bad, strlen(bad));
        ck_assert_int_lt(eng_cost_read(path, "avx2", &c, err, sizeof err), 0);
        ck_assert_msg(strstr(err, changes[i].say) != NULL, "%s: %s", changes[i].to, err);
    }
    memset(bad, '#', sizeof bad);
    put(bad, sizeof bad);
    ck_assert_int_eq(eng_cost_read(path, "avx2", &c, err, sizeof err), -EINVAL);
    snprintf(bad, sizeof bad, "%s", good);
    put(bad, strlen(good) + 1); /* its NUL */
    ck_assert_int_eq(eng_cost_read(path, "avx2", &c, err, sizeof err), -EINVAL);
    for (size_t i = 0; i < strlen(good); i++) { /* cut anywhere: never taken for whole, but where only the last line break is gone */
        put(good, i);
        ck_assert_int_eq(eng_cost_read(path, "avx2", &c, err, sizeof err) == 0, i + 1 == strlen(good));
    }
    unlink(path);
}
END_TEST

/* By hand, from the meaning of the constants. */
START_TEST(predictions)
{
    eng_cost_head h = {64, 7, 256};
    ck_assert_double_eq_tol(eng_cost_dense(&some, &h, 1000), 1000 * 256 * 0.25, 1e-6);
    ck_assert_double_eq_tol(eng_cost_scan(&some, &h, 1000, 10), 1e4 + 21 + 1000 * (64 * 1e-3 + 7 * 0.5) + 10 * 7 * 64 * 2, 1e-6);
    ck_assert_double_eq_tol(eng_cost_graph(&some, &h, 16384, 0), 1e4 + 21 + 0.9 * 16384 * 64 * 7, 1);
    ck_assert_double_eq_tol(eng_cost_graph(&some, &h, 100, 0), 1e4 + 21 + 100 * 64 * 7, 1e-6); /* not more than all */
    eng_attention a = {.top_k = 100};
    ck_assert_uint_eq(eng_cost_hits(&a, 1000), 100);
    ck_assert_uint_eq(eng_cost_hits(&a, 60), 60);
    a = (eng_attention){.beta = 8, .k_max = 1024};
    ck_assert_uint_eq(eng_cost_hits(&a, 1600), 100);
    ck_assert_uint_eq(eng_cost_hits(&a, 100000), 512);
}
END_TEST

static unsigned lines;
static void count(const char *line)
{
    lines += strstr(line, "auto takes") != NULL;
}

START_TEST(a_machine_measured)
{
    char err[256] = "";
    const char *cpu = NULL;
    eng_cost c = {0};
    ck_assert_msg(eng_cost_fit(ENG_CPU_AUTO, count, &c, &cpu, err, sizeof err) == 0, "%s", err);
    ck_assert_uint_eq(lines, 24);
    ck_assert(cpu && *cpu);
    ck_assert(c.dense_byte + c.dense_op > 0 && c.scan_dim + c.scan_key > 0 && c.visit_dim > 0);
    ck_assert_int_eq(eng_cost_write(path, cpu, &c, err, sizeof err), 0);
    ck_assert_msg(eng_cost_read(path, cpu, &c, err, sizeof err) == 0, "%s", err);
    eng_cost_head h = {64, 7, 256};
    ck_assert_double_lt(eng_cost_scan(&c, &h, 1 << 20, 500), eng_cost_dense(&c, &h, 1 << 20)); /* some day a scan pays */
    unlink(path);
}
END_TEST

int main(void)
{
    snprintf(path, sizeof path, "/tmp/retrievald-cost.%d", (int)getpid());
    Suite *s = suite_create("cost");
    TCase *c = tcase_create("cost");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, round_trip);
    tcase_add_test(c, hostile);
    tcase_add_test(c, predictions);
    tcase_add_test(c, a_machine_measured);
    suite_add_tcase(s, c);
    return t_run(s);
}
