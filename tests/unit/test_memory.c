/* What there is, from made-up control groups; what is asked for against it, at its exact borders. */
#include "memory.h"
#include "support.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char root[64];

/* Writes root/path, with its folders. */
static void put(const char *path, const char *text)
{
    char command[512];
    snprintf(command, sizeof command, "mkdir -p $(dirname %s/%s) && printf '%s' > %s/%s", root, path, text, root, path);
    ck_assert_int_eq(system(command), 0);
}

static void clear(void)
{
    char command[256];
    snprintf(command, sizeof command, "rm -rf %s/proc %s/sys", root, root);
    ck_assert_int_eq(system(command), 0);
}

static uint64_t machine(void)
{
    return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
}

START_TEST(limits)
{
    static const char group[] = "sys/fs/cgroup/a.slice/b.service/memory.max", above[] = "sys/fs/cgroup/a.slice/memory.max";
    clear();
    ck_assert_uint_eq(eng_memory_limit(root), machine()); /* no control groups at all */
    put("proc/self/cgroup", "0::/a.slice/b.service\n");
    ck_assert_uint_eq(eng_memory_limit(root), machine());
    put(group, "300000000\n");
    ck_assert_uint_eq(eng_memory_limit(root), 300000000);
    put(above, "200000000\n"); /* the least one counts, whose ever it is */
    ck_assert_uint_eq(eng_memory_limit(root), 200000000);
    put(group, "100000000\n");
    ck_assert_uint_eq(eng_memory_limit(root), 100000000);
    put(group, "max\n");
    put(above, "max\n");
    ck_assert_uint_eq(eng_memory_limit(root), machine());
    put(group, "18446744073709551615\n");
    ck_assert_uint_eq(eng_memory_limit(root), machine());
    /* In a container the group is the root. */
    clear();
    put("proc/self/cgroup", "0::/\n");
    put("sys/fs/cgroup/memory.max", "150000000\n");
    ck_assert_uint_eq(eng_memory_limit(root), 150000000);
    /* Version 1 beside version 2. */
    clear();
    put("proc/self/cgroup", "5:devices:/x\n4:memory:/m/n\nrubbish\n::\n0::/\n");
    put("sys/fs/cgroup/memory/m/n/memory.limit_in_bytes", "9223372036854771712\n");
    ck_assert_uint_eq(eng_memory_limit(root), machine());
    put("sys/fs/cgroup/memory/m/memory.limit_in_bytes", "170000000\n");
    ck_assert_uint_eq(eng_memory_limit(root), 170000000);
    put("sys/fs/cgroup/devices/x/memory.limit_in_bytes", "1\n");
    ck_assert_uint_eq(eng_memory_limit(root), 170000000);
    clear();
}
END_TEST

START_TEST(huge_pages)
{
    clear();
    ck_assert(!eng_memory_huge_pages(root));
    put("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
    ck_assert(eng_memory_huge_pages(root));
    put("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n");
    ck_assert(eng_memory_huge_pages(root));
    put("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
    ck_assert(!eng_memory_huge_pages(root));
    clear();
}
END_TEST

START_TEST(what_fits)
{
    char err[512] = "untouched";
    const eng_memory m = {.weights = 1000 << 20, .scratch = 24 << 20, .kv_per_token = 3 << 10, .index_per_token = 1 << 10};
    const uint64_t fixed = (uint64_t)1024 << 20;
    /* 4 KiB a token: 256 of them are 1 MiB. */
    ck_assert_int_eq(eng_memory_check(&m, 256, fixed + (1 << 20), err, sizeof err), 0);
    ck_assert_str_eq(err, "untouched");
    ck_assert_int_eq(eng_memory_check(&m, 257, fixed + (1 << 20), err, sizeof err), -ENOMEM);
    ck_assert_msg(strstr(err, "the largest -c that fits is 256") != NULL, "%s", err);
    ck_assert_int_eq(eng_memory_check(&m, 256, fixed + (1 << 20) - 1, err, sizeof err), -ENOMEM);
    ck_assert_msg(strstr(err, "the largest -c that fits is 255") != NULL, "%s", err);
    ck_assert_int_eq(eng_memory_check(&m, 1 << 24, fixed + (1 << 20), err, sizeof err), -ENOMEM);
    ck_assert_msg(strstr(err,
                         "49152 MiB of keys and values and up to 16384 MiB of index, of which 0 MiB until it is built, beside 1000 MiB of weights and 24 MiB of scratch, and "
                         "there are 1025 MiB of memory; the largest -c that fits is 256") != NULL,
                  "%s", err);
    /* The same with an index of half its size that takes the rest until it is built. */
    eng_memory building = m;
    building.weights -= 8 << 20;
    building.build = 8 << 20;
    building.index_per_token = building.build_per_token = m.index_per_token / 2;
    ck_assert_int_eq(eng_memory_check(&building, 256, fixed + (1 << 20), err, sizeof err), 0);
    ck_assert_int_eq(eng_memory_check(&building, 257, fixed + (1 << 20), err, sizeof err), -ENOMEM);
    ck_assert_int_eq(eng_memory_check(&building, 1 << 24, fixed + (1 << 20), err, sizeof err), -ENOMEM);
    ck_assert_msg(strstr(err, "up to 16392 MiB of index, of which 8200 MiB until it is built, beside 992 MiB") != NULL, "%s", err);
    /* Not even the model. */
    ck_assert_int_eq(eng_memory_check(&m, 1, fixed, err, sizeof err), -ENOMEM);
    ck_assert_msg(strstr(err, "the model takes 1024 MiB (1000 of weights, 0 while an index is built), and there are 1024 MiB") != NULL, "%s", err);
    ck_assert_int_eq(eng_memory_check(&m, 1, 0, err, sizeof err), -ENOMEM);
    ck_assert_int_eq(eng_memory_check(&m, UINT32_MAX, UINT64_MAX, err, sizeof err), 0);
}
END_TEST

/* A context that no machine has room for, through the engine itself. */
static unsigned long most_for(uint32_t index_modes)
{
    char err[512] = "";
    eng_engine *e = NULL;
    eng_params p = eng_params_default();
    p.n_ctx = UINT32_MAX;
    p.type_k = p.type_v = ENG_KV_F32;
    p.index_modes = index_modes;
    ck_assert_int_eq(eng_open(t_path("golden/gguf/tiny-llama-f32.gguf"), &p, &e, err, sizeof err), -ENOMEM);
    ck_assert_msg(strstr(err, "the largest -c that fits is ") != NULL, "%s", err);
    unsigned long most = strtoul(strstr(err, " fits is ") + 9, NULL, 10);
    ck_assert(most > 0 && most < UINT32_MAX);
    p.n_ctx = (uint32_t)most;
    ck_assert_msg(!eng_open(t_path("golden/gguf/tiny-llama-f32.gguf"), &p, &e, err, sizeof err), "%s", err);
    eng_close(e);
    e = NULL;
    p.n_ctx++;
    ck_assert_int_eq(eng_open(t_path("golden/gguf/tiny-llama-f32.gguf"), &p, &e, err, sizeof err), -ENOMEM);
    return most;
}

/* Where the server's default searches more, less of it fits. */
START_TEST(refused_at_start)
{
    unsigned long codes = most_for(0), cluster = most_for(1u << ENG_ATTN_CLUSTER), graph = most_for(1u << ENG_ATTN_GRAPH);
    ck_assert(graph < cluster && cluster < codes && codes == most_for(1u << ENG_ATTN_FLAT));
}
END_TEST

int main(void)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(root, sizeof root, "%.40s/retrievald-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (!mkdtemp(root))
        return 99;
    Suite *s = suite_create("memory");
    TCase *c = tcase_create("memory");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, limits);
    tcase_add_test(c, huge_pages);
    tcase_add_test(c, what_fits);
    tcase_add_test(c, refused_at_start);
    suite_add_tcase(s, c);
    int status = t_run(s);
    rmdir(root);
    return status;
}
