#include "npy.h"

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { MAX_HEADER = 4096, ALIGN = 64 };
static const uint64_t max_bytes = (uint64_t)1 << 36;

typedef struct {
    const char *path;
    char *err;
    size_t errlen;
} reader;

__attribute__((format(printf, 3, 4))) static int fail(const reader *r, int code, const char *format, ...)
{
    char what[256];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    snprintf(r->err, r->errlen, "%s: %s", r->path, what);
    return code;
}

/* The value of 'key' in the header, a Python dictionary as numpy writes it. NULL: not there. */
static const char *value_of(const char *header, const char *key)
{
    char quoted[32];
    snprintf(quoted, sizeof quoted, "'%s'", key);
    const char *p = strstr(header, quoted);
    if (!p)
        return NULL;
    p += strlen(quoted);
    p += strspn(p, " ");
    if (*p++ != ':')
        return NULL;
    return p + strspn(p, " ");
}

static const char *const type_names[] = {[SRV_NPY_F16] = "'<f2'", [SRV_NPY_F32] = "'<f4'", [SRV_NPY_I32] = "'<i4'"};

static int parse_type(const reader *r, const char *p, srv_npy_type *ret)
{
    for (int i = 0; i < 3; i++)
        if (p && !strncmp(p, type_names[i], strlen(type_names[i]))) {
            *ret = (srv_npy_type)i;
            return 0;
        }
    return fail(r, -EINVAL, "the numbers are neither float16, float32 nor int32, little-endian; convert them with numpy's astype()");
}

/* "(3, 4)", "(3,)"; no dimension is 0. */
static int parse_shape(const reader *r, const char *p, srv_npy *a)
{
    if (!p || *p++ != '(')
        return fail(r, -EINVAL, "no shape in the header");
    for (;;) {
        p += strspn(p, " ");
        if (*p == ')')
            break;
        size_t digits = strspn(p, "0123456789");
        unsigned long v = digits && digits <= 10 ? strtoul(p, NULL, 10) : 0;
        if (!v || v > INT32_MAX || a->n_dims == SRV_NPY_MAX_DIMS)
            return fail(r, -EINVAL, "there must be 1 to %d dimensions, none of them 0", SRV_NPY_MAX_DIMS);
        a->dims[a->n_dims++] = (uint32_t)v;
        p += digits;
        p += strspn(p, " ");
        if (*p == ',')
            p++;
        else if (*p != ')')
            return fail(r, -EINVAL, "damaged shape in the header");
    }
    return a->n_dims ? 0 : fail(r, -EINVAL, "a single number, not an array");
}

/* Leaves the file at the first number. */
static int read_header(const reader *r, FILE *f, srv_npy *a)
{
    unsigned char start[12];
    char header[MAX_HEADER + 1];
    if (fread(start, 1, 10, f) != 10 || memcmp(start, "\x93NUMPY", 6) != 0)
        return fail(r, -EINVAL, "not a .npy file");
    size_t len = start[8] | (size_t)start[9] << 8;
    if (start[6] < 1 || start[6] > 3)
        return fail(r, -EINVAL, "version %u of the format is not known", start[6]);
    if (start[6] > 1) {
        if (fread(start + 10, 1, 2, f) != 2)
            return fail(r, -EINVAL, "cut short in its header");
        len |= (size_t)start[10] << 16 | (size_t)start[11] << 24;
    }
    if (len > MAX_HEADER)
        return fail(r, -EINVAL, "a header of %zu bytes; at most %d are read", len, MAX_HEADER);
    if (fread(header, 1, len, f) != len)
        return fail(r, -EINVAL, "cut short in its header");
    header[len] = 0;
    const char *order = value_of(header, "fortran_order");
    if (!order || strncmp(order, "False", 5) != 0)
        return fail(r, -EINVAL, "not in C order; save it with numpy.ascontiguousarray()");
    int rc = parse_type(r, value_of(header, "descr"), &a->type);
    return rc < 0 ? rc : parse_shape(r, value_of(header, "shape"), a);
}

static int read_numbers(const reader *r, FILE *f, srv_npy *a)
{
    uint64_t bytes = a->type == SRV_NPY_F16 ? 2 : 4;
    for (uint32_t i = 0; i < a->n_dims; i++) {
        if (bytes > max_bytes / a->dims[i])
            return fail(r, -EFBIG, "more than %llu GiB of numbers", (unsigned long long)(max_bytes >> 30));
        bytes *= a->dims[i];
    }
    struct stat st;
    long at = ftell(f);
    if (at < 0 || fstat(fileno(f), &st) < 0)
        return fail(r, -errno, "%s", strerror(errno));
    if (!S_ISREG(st.st_mode) || (uint64_t)st.st_size - (uint64_t)at != bytes) /* before memory is taken for it */
        return fail(r, -EINVAL, "its shape needs %llu bytes after the header, there are %lld", (unsigned long long)bytes, (long long)st.st_size - at);
    a->data = aligned_alloc(ALIGN, (bytes + ALIGN - 1) / ALIGN * ALIGN);
    if (!a->data)
        return fail(r, -ENOMEM, "no memory for %llu bytes", (unsigned long long)bytes);
    return fread(a->data, 1, bytes, f) == bytes ? 0 : fail(r, -EIO, "cannot be read");
}

int srv_npy_read(const char *path, srv_npy *ret, char *err, size_t errlen)
{
    reader r = {path, err, errlen};
    srv_npy a = {0};
    FILE *f = fopen(path, "rb");
    if (!f)
        return fail(&r, -errno, "%s", strerror(errno));
    int rc = read_header(&r, f, &a);
    if (!rc)
        rc = read_numbers(&r, f, &a);
    fclose(f);
    if (rc < 0) {
        srv_npy_free(&a);
        return rc;
    }
    *ret = a;
    return 0;
}

void srv_npy_free(srv_npy *a)
{
    free(a->data);
    a->data = NULL;
}

int srv_npy_write(const char *path, const srv_npy *a, char *err, size_t errlen)
{
    reader r = {path, err, errlen};
    char shape[64] = "", header[128] = "\x93NUMPY\x01", *text = header + 10;
    size_t n = 1;
    for (uint32_t i = 0; i < a->n_dims; i++) {
        snprintf(shape + strlen(shape), sizeof shape - strlen(shape), i ? ", %u" : "%u", a->dims[i]);
        n *= a->dims[i];
    }
    snprintf(text, sizeof header - 10, "{'descr': %s, 'fortran_order': False, 'shape': (%s%s), }", type_names[a->type], shape, a->n_dims == 1 ? "," : "");
    size_t len = strlen(text);
    memset(text + len, ' ', sizeof header - 10 - len);
    header[sizeof header - 1] = '\n';
    header[8] = sizeof header - 10;
    header[9] = 0;
    FILE *f = fopen(path, "wbe");
    if (!f)
        return fail(&r, -errno, "%s", strerror(errno));
    size_t size = a->type == SRV_NPY_F16 ? 2 : 4;
    bool ok = fwrite(header, 1, sizeof header, f) == sizeof header && fwrite(a->data, size, n, f) == n;
    int error = ok ? 0 : errno;
    if (fclose(f) && ok) {
        ok = false;
        error = errno;
    }
    return ok ? 0 : fail(&r, error ? -error : -EIO, "%s", strerror(error ? error : EIO));
}
