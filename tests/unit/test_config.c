#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "config.h"
#include "support.h"

enum { N_COMMANDS = 12 };

static cfg_settings s;
static char err[512];

/* Parses words separated by '|' (a value may hold spaces) as the arguments of a command. */
static int load(unsigned command, const char *words)
{
    static char copy[1024];
    char *argv[32] = {(char *)"command"};
    int argc = 1;
    snprintf(copy, sizeof copy, "%s", words);
    for (char *save, *p = strtok_r(copy, "|", &save); p; p = strtok_r(NULL, "|", &save))
        argv[argc++] = p;
    cfg_free(&s);
    err[0] = 0;
    return cfg_load(&s, command, argc, argv, err, sizeof err);
}

/* A config file with this text; its path lives until the next call. */
static const char *file_with(const void *text, size_t n)
{
    static char path[] = "/tmp/retrievald-config-XXXXXX";
    static int made;
    if (!made) {
        int fd = mkstemp(path);
        ck_assert_int_ge(fd, 0);
        close(fd);
        made = 1;
    }
    FILE *f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(text, 1, n, f), n);
    fclose(f);
    return path;
}

static int load_text(unsigned command, const char *text)
{
    char words[256];
    snprintf(words, sizeof words, "--config|%s", file_with(text, strlen(text)));
    return load(command, words);
}

#define REFUSED(call, part)                                                                                                                \
    do {                                                                                                                                   \
        ck_assert_int_eq(call, -EINVAL);                                                                                                   \
        ck_assert_msg(strstr(err, part) != NULL, "message '%s' does not hold '%s'", err, part);                                            \
    } while (0)

START_TEST(defaults)
{
    ck_assert_int_eq(load(CFG_SERVE, ""), 0);
    ck_assert_ptr_null(s.model);
    ck_assert_str_eq(s.host, "127.0.0.1");
    ck_assert_uint_eq(s.port, 8080);
    ck_assert_str_eq(s.attention, "auto");
    ck_assert_uint_eq(s.n_sink, 128);
    ck_assert_uint_eq(s.n_local, 512);
    ck_assert_double_eq(s.attn_beta, 0);
    ck_assert_int_eq(s.seed, -1);
    ck_assert(!s.help && !s.version);

    /* the same flag means other things elsewhere */
    ck_assert_int_eq(load(CFG_RUN, ""), 0);
    ck_assert_ptr_null(s.prompt);
    ck_assert_int_eq(s.n_predict, -1);
    ck_assert_int_eq(load(CFG_BENCH_DECODE, ""), 0);
    ck_assert_int_eq(s.n_predict, 32);
    ck_assert_int_eq(load(CFG_EVAL, ""), 0);
    ck_assert_int_eq(s.n_predict, 1024);
    ck_assert_int_eq(load(CFG_BENCH_PREFILL, ""), 0);
    ck_assert_str_eq(s.prompt, "512");
}
END_TEST

START_TEST(flags)
{
    ck_assert_int_eq(load(CFG_SERVE, "-m|a b.gguf|-c|4096|--port=81|--temp|1.5|-n|-1|-ctk|bf16|--seed=4294967295|-s|7"), 0);
    ck_assert_str_eq(s.model, "a b.gguf");
    ck_assert_uint_eq(s.ctx_size, 4096);
    ck_assert_uint_eq(s.port, 81);
    ck_assert_double_eq(s.temp, 1.5);
    ck_assert_int_eq(s.n_predict, -1);
    ck_assert_str_eq(s.cache_type_k, "bf16");
    ck_assert_int_eq(s.seed, 7); /* the last one counts */

    ck_assert_int_eq(load(CFG_SERVE, "--rope-scaling|yarn|--rope-scale|4|--yarn-orig-ctx|32768|--yarn-beta-fast=16"), 0);
    ck_assert_str_eq(s.rope_scaling, "yarn");
    ck_assert(s.rope_scale == 4 && s.yarn_orig_ctx == 32768 && s.yarn_beta_fast == 16);
    ck_assert(s.yarn_beta_slow == -1 && s.yarn_ext_factor == -1 && s.rope_freq_base == 0);

    ck_assert_int_eq(load(CFG_BENCH_DECODE, "-d|0,8192,32768|--attention|full,graph|-r|5|-o|jsonl"), 0);
    ck_assert_str_eq(s.depth, "0,8192,32768");
    ck_assert_str_eq(s.attention, "full,graph");
    ck_assert_uint_eq(s.repeat, 5);
    ck_assert_str_eq(s.output, "jsonl");

    ck_assert_str_eq(s.gpu_layers, "auto");
    ck_assert_int_eq(load(CFG_RUN, "-ngl|all"), 0);
    ck_assert_str_eq(s.gpu_layers, "all");
    ck_assert_int_eq(load(CFG_EVAL, "--n-gpu-layers=65535"), 0);
    ck_assert_str_eq(s.gpu_layers, "65535");

    ck_assert_int_eq(load(CFG_RUN, "-m|x|-p|-what is this?|-f|doc.txt"), 0);
    ck_assert_str_eq(s.prompt, "-what is this?");
    ck_assert_int_eq(load(CFG_EVAL, "-f|a.txt|--file=b.txt|-f|c"), 0);
    ck_assert_str_eq(s.file, "a.txt\nb.txt\nc");
    ck_assert_int_eq(load(CFG_INSPECT, "x.gguf"), 0);
    ck_assert_str_eq(s.model, "x.gguf");

    ck_assert_int_eq(load(CFG_SERVE, "--config|/does/not/exist|-h"), 0); /* help needs no file */
    ck_assert(s.help);
}
END_TEST

START_TEST(bad_flags)
{
    REFUSED(load(CFG_SERVE, "--prot|1"), "did you mean --port?");
    REFUSED(load(CFG_SERVE, "--ctx_size=1"), "did you mean --ctx-size?");
    REFUSED(load(CFG_SERVE, "--ctxs-ize=1"), "did you mean --ctx-size?");
    REFUSED(load(CFG_SERVE, "--zzzzzzzz"), "unknown flag '--zzzzzzzz'; see --help");
    REFUSED(load(CFG_SERVE, "-zz"), "unknown flag '-zz'");
    REFUSED(load(CFG_SERVE, "--depth|1"), "not a flag of this command");
    REFUSED(load(CFG_SERVE, "model.gguf"), "unexpected argument 'model.gguf'");
    REFUSED(load(CFG_SERVE, "-m"), "--model needs a value");
    REFUSED(load(CFG_SERVE, "-m|-c|8"), "--model needs a value");
    REFUSED(load(CFG_SERVE, "-m|--port=8"), "--model needs a value");
    REFUSED(load(CFG_EVAL, "-f|a\nb"), "--file: must not hold a line break");
    REFUSED(load(CFG_SERVE, "--config"), "--config needs a value");
    REFUSED(load(CFG_SERVE, "--model="), "must not be empty");
    REFUSED(load(CFG_SERVE, "--help=1"), "takes no value");
    REFUSED(load(CFG_SERVE, "-"), "unknown flag '-'");
    REFUSED(load(CFG_SERVE, "--"), "unknown flag '--'");
}
END_TEST

START_TEST(bad_values)
{
    static const char *const numbers[] = {"-1", "65536", "99999999999999999999", "8o", "0x10", " 8", "8 ", "+8", "1e3", "1.0", "",
                                          "-",  "--"};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        char words[64];
        snprintf(words, sizeof words, "--port=%s", numbers[i]);
        REFUSED(load(CFG_SERVE, words), "from 0 to 65535");
    }
    static const char *const reals[] = {"nan", "inf", "-0.1", "1.0001", "1e400", "0x1p-3", "one", ".", "", " 1"};
    for (size_t i = 0; i < sizeof reals / sizeof *reals; i++) {
        char words[64];
        snprintf(words, sizeof words, "--top-p=%s", reals[i]);
        REFUSED(load(CFG_SERVE, words), "--top-p");
    }
    REFUSED(load(CFG_SERVE, "--attention|grph"), "did you mean 'graph'?");
    REFUSED(load(CFG_SERVE, "--attention|full,graph"), "is not one of");
    REFUSED(load(CFG_SERVE, "--attention="), "must not be empty");
    REFUSED(load(CFG_BENCH_DECODE, "--attention|full,"), "is not one of");
    REFUSED(load(CFG_BENCH_DECODE, "--attention|fullgraph"), "is not one of");
    static const char *const counts[] = {"-1", "65536", "99999999999999999999", "8o", "al", "ALL", "auto,all", "1,2", " 1", "1.0"};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        char words[64];
        snprintf(words, sizeof words, "-ngl|%s", counts[i]);
        REFUSED(load(CFG_SERVE, words), "--n-gpu-layers: '");
        REFUSED(load(CFG_SERVE, words), "is not one of auto, all or a whole number from 0 to 65535");
    }
    REFUSED(load(CFG_SERVE, "-ngl|auot"), "did you mean 'auto'?");
    REFUSED(load(CFG_SERVE, "--n-gpu-layers="), "must not be empty");
    static const char *const lists[] = {",", "1,", ",1", "1,,2", "1, 2", "1;2", "-1", "16777217", "a"};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        char words[64];
        snprintf(words, sizeof words, "-d|%s", lists[i]);
        REFUSED(load(CFG_BENCH_DECODE, words), "--depth");
    }
}
END_TEST

START_TEST(file)
{
    ck_assert_int_eq(load_text(CFG_SERVE, "# a comment\r\n\r\n  port = 81 ; why\n\tctx-size=4096\nmodel = /a b/c=d.gguf\nport=82"), 0);
    ck_assert_uint_eq(s.port, 82);
    ck_assert_uint_eq(s.ctx_size, 4096);
    ck_assert_str_eq(s.model, "/a b/c=d.gguf");
    ck_assert_int_eq(load_text(CFG_SERVE, ""), 0);

    /* a server's file serves the other commands too, and changes no measurement */
    ck_assert_int_eq(load_text(CFG_BENCH_DECODE, "port = 81\nn-predict = 5\nctx-size = 99\nattention = flat\nthreads = 3"), 0);
    ck_assert_int_eq(s.n_predict, 32);
    ck_assert_uint_eq(s.ctx_size, 0);
    ck_assert_str_eq(s.attention, "full,auto");
    ck_assert_uint_eq(s.threads, 3);
    REFUSED(load_text(CFG_BENCH_DECODE, "port = 99999"), "from 0 to 65535");

    char line[64];
    REFUSED(load_text(CFG_SERVE, "port = 81\n\nctx-sizes = 1\nprot = 2"), ":3: unknown name 'ctx-sizes'; did you mean 'ctx-size'?");
    REFUSED(load_text(CFG_SERVE, "port = 81\nport = x"), ":2: port: 'x' must be a whole number");
    REFUSED(load_text(CFG_SERVE, "port = 81\nport"), ":2: expected 'name = value'");
    REFUSED(load_text(CFG_SERVE, "[server]\nport = 81"), "no sections");
    REFUSED(load_text(CFG_SERVE, "model ="), "must not be empty");
    REFUSED(load_text(CFG_SERVE, "help = 1"), "unknown name 'help'");
    REFUSED(load_text(CFG_SERVE, "depth = 1"), "unknown name 'depth'");
    snprintf(line, sizeof line, "--config|%s", file_with("port = 1\0", 9));
    REFUSED(load(CFG_SERVE, line), "NUL");
    REFUSED(load(CFG_SERVE, "--config|/does/not/exist"), "/does/not/exist: No such file");
    REFUSED(load(CFG_SERVE, "--config|/tmp"), "/tmp: Is a directory");

    /* 197 bytes pass, 198 would be cut in two by inih */
    char text[256] = "model = ";
    memset(text + 8, 'x', 189);
    ck_assert_int_eq(load_text(CFG_SERVE, text), 0);
    ck_assert_uint_eq(strlen(s.model), 189);
    text[197] = 'x';
    REFUSED(load_text(CFG_SERVE, text), ":1: longer than 197 bytes");

    char *large = calloc(1, (1 << 20) + 2);
    ck_assert_ptr_nonnull(large);
    memset(large, '\n', (1 << 20) + 1);
    REFUSED(load_text(CFG_SERVE, large), "larger than 1 MiB");
    free(large);
}
END_TEST

START_TEST(precedence)
{
    char words[256];
    snprintf(words, sizeof words, "--config|%s", file_with("ctx-size = 1\nport = 1\ntemp = 1", 30));
    setenv("RETRIEVALD_CTX_SIZE", "2", 1);
    setenv("RETRIEVALD_PORT", "2", 1);
    ck_assert_int_eq(load(CFG_SERVE, ""), 0);
    ck_assert_uint_eq(s.port, 2);
    strcat(words, "|--port|3");
    ck_assert_int_eq(load(CFG_SERVE, words), 0);
    ck_assert_double_eq(s.temp, 1);
    ck_assert_uint_eq(s.ctx_size, 2);
    ck_assert_uint_eq(s.port, 3);
    setenv("RETRIEVALD_PORT", "x", 1);
    REFUSED(load(CFG_SERVE, ""), "RETRIEVALD_PORT: 'x' must be a whole number");
    ck_assert_int_eq(load(CFG_RUN, ""), 0); /* not its setting */
    unsetenv("RETRIEVALD_PORT");
    unsetenv("RETRIEVALD_CTX_SIZE");
}
END_TEST

START_TEST(nearest)
{
    static const char *const names[] = {"serve", "run", "bench", "eval", "inspect"};
    ck_assert_str_eq(cfg_nearest("sevre", names, 5), "serve");
    ck_assert_str_eq(cfg_nearest("rum", names, 5), "run");
    ck_assert_str_eq(cfg_nearest("inspekt", names, 5), "inspect");
    ck_assert_ptr_null(cfg_nearest("x", names, 5));
    ck_assert_ptr_null(cfg_nearest("", names, 5));
    ck_assert_ptr_null(cfg_nearest("convert", names, 5));
    ck_assert_ptr_null(cfg_nearest("run", names, 0));
    char huge[1000];
    memset(huge, 'r', sizeof huge - 1);
    huge[sizeof huge - 1] = 0;
    ck_assert_ptr_null(cfg_nearest(huge, names, 5));
}
END_TEST

static char *printed(void (*print)(FILE *, unsigned), unsigned command)
{
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    ck_assert_ptr_nonnull(f);
    print(f, command);
    fclose(f);
    return text;
}

static void print_example(FILE *f, unsigned command)
{
    (void)command;
    cfg_print_example(f);
}

/* Our own files in deploy/ say what the table says. */
START_TEST(example_file)
{
    char *have = t_read(t_path("../deploy/retrievald.conf"), NULL), *want = printed(print_example, 0);
    ck_assert_msg(!strcmp(have, want), "deploy/retrievald.conf is out of date");
    ck_assert_int_eq(load_text(CFG_SERVE, have), 0);

    /* with the '#' away every line that has a default is accepted */
    size_t n = 0, lines = 0;
    for (char *p = want; *p; p += strcspn(p, "\n"), p += *p == '\n') {
        size_t len = strcspn(p, "\n");
        if (p[0] == '#' && p[1] != ' ')
            p++, len--, lines++;
        else if (*p)
            continue;
        memcpy(have + n, p, len);
        n += len;
        have[n++] = '\n';
        p += len;
    }
    have[n] = 0;
    ck_assert_uint_gt(lines, 25);
    ck_assert_msg(load_text(CFG_SERVE, have) == 0, "%s", err);
    free(have);
    free(want);
}
END_TEST

START_TEST(man_page)
{
    char *man = t_read(t_path("../deploy/retrievald.1"), NULL);
    size_t n_flags = 0;
    for (unsigned i = 0; i < N_COMMANDS; i++) {
        char *help = printed(cfg_print_help, 1U << i);
        for (char *p = help; (p = strstr(p, "--")) != NULL;) {
            size_t len = strcspn(p, " \n"), n = 0;
            char word[128];
            for (size_t j = 0; j < len && n + 3 < sizeof word; j++) { /* groff wants a minus as \- */
                if (p[j] == '-')
                    word[n++] = '\\';
                word[n++] = p[j];
            }
            word[n] = 0;
            ck_assert_msg(strstr(man, word) != NULL, "%.*s is not in the man page", (int)len, p);
            p += len;
            n_flags++;
        }
        ck_assert_msg(strstr(help, "\t") == NULL, "tabs in the help");
        free(help);
    }
    ck_assert_uint_gt(n_flags, 80);
    free(man);
}
END_TEST

int main(void)
{
    Suite *suite = suite_create("config");
    TCase *c = tcase_create("config");
    tcase_add_test(c, defaults);
    tcase_add_test(c, flags);
    tcase_add_test(c, bad_flags);
    tcase_add_test(c, bad_values);
    tcase_add_test(c, file);
    tcase_add_test(c, precedence);
    tcase_add_test(c, nearest);
    tcase_add_test(c, example_file);
    tcase_add_test(c, man_page);
    suite_add_tcase(suite, c);
    int rc = t_run(suite);
    cfg_free(&s);
    return rc;
}
