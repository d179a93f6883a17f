#include "cost.h"

#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_FILE = 4096, MAX_CPU = 64 };

static const struct {
    const char *name;
    size_t at;
} fields[] = {
    {"dense_byte", offsetof(eng_cost, dense_byte)}, {"dense_op", offsetof(eng_cost, dense_op)},       {"scan_search", offsetof(eng_cost, scan_search)},
    {"scan_head", offsetof(eng_cost, scan_head)},   {"scan_dim", offsetof(eng_cost, scan_dim)},       {"scan_key", offsetof(eng_cost, scan_key)},
    {"hit_dim", offsetof(eng_cost, hit_dim)},       {"visit_dim", offsetof(eng_cost, visit_dim)},
};
enum { N_FIELDS = sizeof fields / sizeof *fields };

eng_cost eng_cost_default(void)
{
    return (eng_cost){.dense_byte = 0.0155, .dense_op = 0.0038, .scan_search = 2840, .scan_head = 570, .scan_dim = 0.0281, .scan_key = 0.161, .hit_dim = 0.144, .visit_dim = 0.0525};
}

double eng_cost_dense(const eng_cost *c, const eng_cost_head *h, uint32_t n)
{
    return n * (c->dense_byte * h->key_bytes + c->dense_op * h->dim * h->group);
}

double eng_cost_scan(const eng_cost *c, const eng_cost_head *h, uint32_t n, uint32_t hits)
{
    return c->scan_search + c->scan_head * h->group + n * (c->scan_dim * h->dim + c->scan_key * h->group) + (double)hits * h->group * h->dim * c->hit_dim;
}

/* Keys that a graph search scores for some head of a group: on real keys 90 % of 16K, 74 of 32K, 70 of 64K and 59 of 128K (index/README.md), a power of n. */
static double visited(uint32_t n)
{
    double share = 0.9 * pow(n / 16384.0, -0.2);
    return n * (share < 1 ? share : 1);
}

double eng_cost_graph(const eng_cost *c, const eng_cost_head *h, uint32_t n, uint32_t hits)
{
    return c->scan_search + c->scan_head * h->group + visited(n) * h->dim * c->visit_dim + (double)hits * h->group * h->dim * c->hit_dim;
}

uint32_t eng_cost_hits(const eng_attention *a, uint32_t n)
{
    uint32_t most = a->top_k ? a->top_k : a->k_max / 2, few = a->top_k ? n : n / 16;
    return most < few ? most : few;
}

/* ---- the file ----------------------------------------------------------------------------------------------------- */

int eng_cost_write(const char *path, const char *cpu, const eng_cost *c, char *err, size_t errlen)
{
    char other[4096];
    if (snprintf(other, sizeof other, "%s.new", path) >= (int)sizeof other)
        return eng_fail(err, errlen, -ENAMETOOLONG, "%s: too long a name", path);
    int fd = open(other, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "w");
    if (!f) {
        int e = errno;
        if (fd >= 0)
            close(fd);
        return eng_fail(err, errlen, -e, "%s: %s", other, strerror(e));
    }
    fprintf(f, "# what attention costs on this machine, in nanoseconds: written by retrievald bench index --fit\ncpu = %s\n", cpu);
    for (size_t i = 0; i < N_FIELDS; i++)
        fprintf(f, "%s = %.6g\n", fields[i].name, *(const double *)(const void *)((const char *)c + fields[i].at));
    bool ok = !ferror(f);
    if (fclose(f) || !ok || rename(other, path) < 0) {
        int e = errno ? errno : EIO;
        unlink(other);
        return eng_fail(err, errlen, -e, "%s: %s", path, strerror(e));
    }
    return 0;
}

/* Takes one line; *have: bits of the fields that were there, one more for the level. */
static int take_line(const char *line, const char *cpu, eng_cost *c, unsigned *have)
{
    if (!*line || *line == '#')
        return 0;
    const char *value = strstr(line, " = ");
    if (!value)
        return -EINVAL;
    size_t len = (size_t)(value - line);
    value += 3;
    if (len == 3 && !memcmp(line, "cpu", 3)) {
        *have |= 1u << N_FIELDS;
        return strcmp(value, cpu) ? -ESTALE : 0;
    }
    for (size_t i = 0; i < N_FIELDS; i++)
        if (strlen(fields[i].name) == len && !memcmp(fields[i].name, line, len)) {
            char *end;
            double v = strtod(value, &end);
            if (end == value || *end || !isfinite(v) || v < 0 || v > 1e9)
                return -EINVAL;
            memcpy((char *)c + fields[i].at, &v, sizeof v);
            *have |= 1u << i;
            return 0;
        }
    return -EINVAL;
}

int eng_cost_read(const char *path, const char *cpu, eng_cost *ret, char *err, size_t errlen)
{
    char text[MAX_FILE + 1], *rest = text;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* nothing but a file may make us wait */
    if (fd < 0)
        return eng_fail(err, errlen, -errno, "%s: %s", path, strerror(errno));
    ssize_t n = read(fd, text, sizeof text);
    close(fd);
    if (n < 0 || n > MAX_FILE || memchr(text, 0, (size_t)n))
        return eng_fail(err, errlen, -EINVAL, "%s: not a file of costs", path);
    text[n] = 0;
    eng_cost c;
    unsigned have = 0, line = 0;
    for (char *at; (at = strsep(&rest, "\n"));) {
        int r = take_line(at, cpu, &c, &have);
        line++;
        if (r == -ESTALE)
            return eng_fail(err, errlen, r, "%s: measured with other kernels than %s; measure again with bench index --fit", path, cpu);
        char shown[40];
        if (r < 0)
            return eng_fail(err, errlen, r, "%s:%u: '%s' is none of its lines; measure again with bench index --fit", path, line,
                            eng_printable(at, strlen(at), shown, sizeof shown));
    }
    if (have != (2u << N_FIELDS) - 1)
        return eng_fail(err, errlen, -EINVAL, "%s: a line is missing; measure again with bench index --fit", path);
    *ret = c;
    return 0;
}
