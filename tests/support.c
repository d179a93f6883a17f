#include "support.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Noreturn void die(const char *what, const char *path)
{
    fprintf(stderr, "test support: %s: %s\n", path, what);
    exit(99);
}

const char *t_path(const char *relative)
{
    static char buf[4][4096];
    static int next;
    char *p = buf[next++ & 3];
    const char *root = getenv("RETRIEVALD_TESTS");
    snprintf(p, sizeof buf[0], "%s/%s", root ? root : "tests", relative);
    return p;
}

const char *t_smollm2(void)
{
    const char *p = getenv("RETRIEVALD_SMOLLM2");
    return p && *p ? p : NULL;
}

const char *t_model(const char *name)
{
    char key[64] = "RETRIEVALD_";
    size_t n = strlen(key);
    for (const char *c = name; *c && n + 1 < sizeof key; c++)
        key[n++] = (char)toupper((unsigned char)*c);
    key[n] = 0;
    const char *p = getenv(key);
    if (p && *p)
        return p;
    printf("SKIP: %s does not name the model file of %s\n", key, name);
    return NULL;
}

char *t_read(const char *path, size_t *ret_n)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        die("cannot open", path);
    fseek(f, 0, SEEK_END);
    long n = ftell(f);
    rewind(f);
    char *p = malloc((size_t)n + 1);
    if (!p || fread(p, 1, (size_t)n, f) != (size_t)n)
        die("cannot read", path);
    fclose(f);
    p[n] = 0;
    if (ret_n)
        *ret_n = (size_t)n;
    return p;
}

cJSON *t_jsonl(const char *path)
{
    size_t n;
    char *text = t_read(path, &n);
    cJSON *all = cJSON_CreateArray();
    for (char *line = text; line < text + n;) {
        char *end = memchr(line, '\n', (size_t)(text + n - line));
        if (!end)
            end = text + n;
        *end = 0;
        if (*line) {
            cJSON *item = cJSON_Parse(line);
            if (!item)
                die("line is not JSON", path);
            cJSON_AddItemToArray(all, item);
        }
        line = end + 1;
    }
    free(text);
    return all;
}

t_npy t_npy_load(const char *path)
{
    size_t n;
    char *file = t_read(path, &n);
    if (n < 10 || memcmp(file, "\x93NUMPY", 6) || file[6] != 1)
        die("not a version 1 .npy file", path);
    size_t head = 10 + (size_t)(unsigned char)file[8] + 256 * (size_t)(unsigned char)file[9];
    t_npy a = {.bytes = n - head};
    char *text = malloc(head);
    memcpy(text, file + 10, head - 10);
    text[head - 10] = 0;
    char *d = strstr(text, "'descr': '"), *s = strstr(text, "'shape': (");
    if (!d || !s || strstr(text, "'fortran_order': True"))
        die("unexpected .npy header", path);
    snprintf(a.descr, sizeof a.descr, "%.3s", d + 10);
    for (char *p = s + 10; *p && *p != ')' && a.n_dims < 4;) {
        a.dims[a.n_dims++] = strtoul(p, &p, 10);
        while (*p == ',' || *p == ' ')
            p++;
    }
    free(text);
    a.data = malloc(a.bytes ? a.bytes : 1);
    memcpy(a.data, file + head, a.bytes);
    free(file);
    return a;
}

void t_npy_free(t_npy *a)
{
    free(a->data);
    a->data = NULL;
}

t_rng t_seed(uint64_t seed)
{
    t_rng r;
    for (int i = 0; i < 4; i++) { /* splitmix64 */
        uint64_t z = (seed += 0x9e3779b97f4a7c15u);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        r.s[i] = z ^ (z >> 31);
    }
    return r;
}

uint64_t t_u64(t_rng *r) /* xoshiro256** */
{
    uint64_t *s = r->s, x = s[1] * 5, t = s[1] << 17;
    x = ((x << 7) | (x >> 57)) * 9;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = (s[3] << 45) | (s[3] >> 19);
    return x;
}

double t_uniform(t_rng *r)
{
    return (double)(t_u64(r) >> 11) * 0x1p-53;
}

float t_normal(t_rng *r)
{
    double u = 1 - t_uniform(r), v = t_uniform(r);
    return (float)(sqrt(-2 * log(u)) * cos(2 * M_PI * v));
}

int t_run(Suite *s)
{
    SRunner *r = srunner_create(s);
    srunner_set_fork_status(r, CK_NOFORK);
    srunner_run_all(r, CK_NORMAL);
    int failed = srunner_ntests_failed(r);
    srunner_free(r);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
