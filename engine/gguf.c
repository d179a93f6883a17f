#include "gguf_private.h"
#include "text.h"

#include <assert.h>
#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are used as they lie in the file");

enum { V_U8, V_I8, V_U16, V_I16, V_U32, V_I32, V_F32, V_BOOL, V_STR, V_ARR, V_U64, V_I64, V_F64, V_COUNT };
static const uint8_t value_size[V_COUNT] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

enum {
    MAX_KEYS = 65536, /* real files have some tens */
    MAX_NAME = 64,    /* the format's limit for a tensor's name */
    MAX_ALIGNMENT = 65536,
    SMALLEST_KEY = 8 + 1 + 4 + 1, /* bytes of an entry: a name of one character, a type, a value of one byte */
    SMALLEST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8,
};

typedef eng_gguf_entry entry;

/* What is being read, and where errors go. */
typedef struct {
    eng_gguf *g;
    const uint8_t *p, *end;
    char *err;
    size_t errlen;
} reader;

#define FAIL(r, rc, ...) eng_fail((r)->err, (r)->errlen, rc, __VA_ARGS__)

/* A name as it may be shown: SHOW(x) is valid within the full expression's block. */
#define SHOW(str) eng_printable((str).s, (str).n, (char[96]){0}, 96)

static const uint8_t *take(reader *r, uint64_t n)
{
    if (n > (size_t)(r->end - r->p))
        return NULL;
    const uint8_t *p = r->p;
    r->p += n;
    return p;
}

static bool take_u32(reader *r, uint32_t *ret)
{
    const uint8_t *p = take(r, sizeof *ret);
    if (p)
        memcpy(ret, p, sizeof *ret);
    return p;
}

static bool take_u64(reader *r, uint64_t *ret)
{
    const uint8_t *p = take(r, sizeof *ret);
    if (p)
        memcpy(ret, p, sizeof *ret);
    return p;
}

static bool take_str(reader *r, eng_str *ret)
{
    uint64_t n;
    const uint8_t *p;
    if (!take_u64(r, &n) || !(p = take(r, n)))
        return false;
    *ret = (eng_str){(const char *)p, (size_t)n};
    return true;
}

/* How many of n entries, of `smallest` bytes at least, have to be allocated: one more than the file can hold, so that reading names the
 * first that is missing. */
static size_t room_for(const reader *r, size_t n, size_t smallest)
{
    size_t most = (size_t)(r->end - r->p) / smallest + 1;
    return n < most ? n + 1 : most;
}

static int str_cmp(eng_str a, eng_str b)
{
    int c = memcmp(a.s, b.s, a.n < b.n ? a.n : b.n);
    return c ? c : (a.n > b.n) - (a.n < b.n);
}

/* ---- header and metadata ---------------------------------------------------------------------------------------- */

static int read_header(reader *r, uint64_t *ret_tensors, uint64_t *ret_keys)
{
    const uint8_t *magic = take(r, 4);
    uint32_t version;
    if (!magic)
        return FAIL(r, -EINVAL, "the file is too short for a GGUF file (%zu bytes): empty or truncated", r->g->size);
    if (memcmp(magic, "GGUF", 4))
        return FAIL(r, -EINVAL, "this is not a GGUF file: the magic at its start is not \"GGUF\"");
    if (!take_u32(r, &version))
        return FAIL(r, -EINVAL, "the file ends inside its header: truncated");
    if (__builtin_bswap32(version) == 2 || __builtin_bswap32(version) == 3)
        return FAIL(r, -ENOTSUP, "the file is big-endian; only little-endian GGUF files can be read");
    if (version != 2 && version != 3)
        return FAIL(r, -ENOTSUP, "the file has GGUF version %" PRIu32 "; versions 2 and 3 can be read", version);
    if (!take_u64(r, ret_tensors) || !take_u64(r, ret_keys))
        return FAIL(r, -EINVAL, "the file ends inside the counts of its header: truncated");
    if (*ret_tensors > ENG_GGUF_MAX_TENSORS)
        return FAIL(r, -EINVAL, "the header counts %" PRIu64 " tensors; %d are possible", *ret_tensors, ENG_GGUF_MAX_TENSORS);
    if (*ret_keys > MAX_KEYS)
        return FAIL(r, -EINVAL, "the header counts %" PRIu64 " keys; %d are possible", *ret_keys, MAX_KEYS);
    return 0;
}

/* Checks that the value lies in the file; its elements are looked at when someone asks for them. */
static int read_value(reader *r, entry *e)
{
    e->item = e->type;
    e->n = 1;
    if (e->type == V_ARR && (!take_u32(r, &e->item) || !take_u64(r, &e->n)))
        goto truncated;
    if (e->type >= V_COUNT || e->item >= V_COUNT)
        return FAIL(r, -EINVAL, "key %s has a value of type %" PRIu32 ", which GGUF does not have", SHOW(e->key), e->item);
    if (e->item == V_ARR)
        return FAIL(r, -ENOTSUP, "key %s is a nested array, which is not supported", SHOW(e->key));
    if (e->type == V_STR) {
        eng_str s;
        if (!take_str(r, &s))
            goto truncated;
        e->value = (const uint8_t *)s.s;
        e->n = s.n;
        return 0;
    }
    e->value = r->p;
    if (e->item == V_STR) {
        for (uint64_t i = 0; i < e->n; i++) {
            eng_str s;
            if (!take_str(r, &s))
                goto truncated;
        }
        return 0;
    }
    if (e->n > (size_t)(r->end - r->p) / value_size[e->item] || !take(r, e->n * value_size[e->item]))
        goto truncated;
    return 0;
truncated:
    return FAIL(r, -EINVAL, "the value of key %s runs past the end of the file: truncated, or its length is wrong", SHOW(e->key));
}

static int read_key(reader *r, entry *e, size_t i, size_t n)
{
    if (!take_str(r, &e->key))
        return FAIL(r, -EINVAL, "the name of key %zu of %zu runs past the end of the file: truncated, or its length is wrong", i + 1, n);
    if (!e->key.n)
        return FAIL(r, -EINVAL, "key %zu of %zu has an empty name", i + 1, n);
    if (e->key.n > UINT16_MAX)
        return FAIL(r, -EINVAL, "the name of key %zu of %zu is %zu bytes long", i + 1, n, e->key.n);
    if (!eng_utf8_valid(e->key.s, e->key.n))
        return FAIL(r, -EINVAL, "the name of key %zu of %zu is not UTF-8", i + 1, n);
    if (memchr(e->key.s, 0, e->key.n))
        return FAIL(r, -EINVAL, "the name of key %zu of %zu has a NUL in it", i + 1, n);
    if (!take_u32(r, &e->type))
        return FAIL(r, -EINVAL, "the value of key %s runs past the end of the file: truncated", SHOW(e->key));
    return read_value(r, e);
}

static int entry_cmp(const void *a, const void *b)
{
    return str_cmp(((const entry *)a)->key, ((const entry *)b)->key);
}

static int read_keys(reader *r, size_t n)
{
    eng_gguf *g = r->g;
    g->keys = calloc(room_for(r, n, SMALLEST_KEY), sizeof *g->keys);
    if (!g->keys)
        return FAIL(r, -ENOMEM, "no memory for the model file's %zu keys", n);
    for (size_t i = 0; i < n; i++) {
        int rc = read_key(r, &g->keys[i], i, n);
        if (rc)
            return rc;
    }
    g->n_keys = n;
    qsort(g->keys, n, sizeof *g->keys, entry_cmp);
    for (size_t i = 1; i < n; i++)
        if (!entry_cmp(&g->keys[i - 1], &g->keys[i]))
            return FAIL(r, -EINVAL, "key %s is there twice", SHOW(g->keys[i].key));
    return 0;
}

/* ---- tensors ---------------------------------------------------------------------------------------------------- */

static int read_dims(reader *r, eng_tensor *t)
{
    uint64_t elements = 1;
    if (!take_u32(r, &t->n_dims))
        goto truncated;
    if (t->n_dims < 1 || t->n_dims > 4)
        return FAIL(r, -EINVAL, "tensor %s has %" PRIu32 " dimensions; 1 to 4 are possible", SHOW(t->name), t->n_dims);
    for (uint32_t d = 0; d < 4; d++) {
        t->dims[d] = 1;
        if (d < t->n_dims && !take_u64(r, &t->dims[d]))
            goto truncated;
        if (!t->dims[d])
            return FAIL(r, -EINVAL, "tensor %s has a dimension of 0", SHOW(t->name));
        /* 2^58: block sizes are multiplied in later, and no file is as large. */
        if (__builtin_mul_overflow(elements, t->dims[d], &elements) || elements >> 58)
            return FAIL(r, -EINVAL, "the dimensions of tensor %s are too large", SHOW(t->name));
    }
    return 0;
truncated:
    return FAIL(r, -EINVAL, "the entry of tensor %s runs past the end of the file: truncated", SHOW(t->name));
}

static int read_type(reader *r, eng_tensor *t)
{
    uint32_t id;
    if (!take_u32(r, &id))
        return FAIL(r, -EINVAL, "the entry of tensor %s runs past the end of the file: truncated", SHOW(t->name));
    if (eng_type_from_file(id, &t->type)) {
        char have[16 * ENG_TYPE_COUNT] = "";
        for (int k = 0; k < ENG_TYPE_COUNT; k++)
            strcat(strcat(have, " "), eng_types[k].name);
        const char *name = eng_type_file_name(id);
        if (!name)
            return FAIL(r, -EINVAL, "tensor %s has type %" PRIu32 ", which is unknown; the types supported are%s", SHOW(t->name), id, have);
        return FAIL(r, -ENOTSUP, "tensor %s has type %s, which is not supported; the types supported are%s", SHOW(t->name), name, have);
    }
    const eng_type_info *info = &eng_types[t->type];
    if (t->dims[0] % info->block)
        return FAIL(r, -EINVAL, "tensor %s has rows of %" PRIu64 " elements, which is no multiple of %s's block of %" PRIu32, SHOW(t->name),
                    t->dims[0], info->name, info->block);
    t->row_bytes = (size_t)(t->dims[0] / info->block * info->bytes);
    t->bytes = (size_t)(t->dims[1] * t->dims[2] * t->dims[3]) * t->row_bytes; /* < 2^58 * 4 */
    return 0;
}

static int read_tensor(reader *r, eng_tensor *t, uint64_t *ret_offset, size_t i, size_t n)
{
    if (!take_str(r, &t->name))
        return FAIL(r, -EINVAL, "the name of tensor %zu of %zu runs past the end of the file: truncated, or the count of keys is wrong",
                    i + 1, n);
    if (!t->name.n || t->name.n > MAX_NAME)
        return FAIL(r, -EINVAL, "the name of tensor %zu of %zu has %zu bytes; 1 to %d are possible", i + 1, n, t->name.n, MAX_NAME);
    if (!eng_utf8_valid(t->name.s, t->name.n) || memchr(t->name.s, 0, t->name.n))
        return FAIL(r, -EINVAL, "the name of tensor %zu of %zu, \"%s\", is not UTF-8 without NUL", i + 1, n, SHOW(t->name));
    int rc = read_dims(r, t);
    if (!rc)
        rc = read_type(r, t);
    if (!rc && !take_u64(r, ret_offset))
        rc = FAIL(r, -EINVAL, "the entry of tensor %s runs past the end of the file: truncated", SHOW(t->name));
    return rc;
}

static int by_name_cmp(const void *a, const void *b)
{
    return str_cmp((*(const eng_tensor *const *)a)->name, (*(const eng_tensor *const *)b)->name);
}

static int by_data_cmp(const void *a, const void *b)
{
    uintptr_t x = (uintptr_t)(*(const eng_tensor *const *)a)->data, y = (uintptr_t)(*(const eng_tensor *const *)b)->data;
    return (x > y) - (x < y);
}

int eng_gguf_sort_tensors(eng_gguf *g, char *err, size_t errlen)
{
    const eng_tensor **t = g->by_name;
    for (size_t i = 0; i < g->n_tensors; i++)
        t[i] = &g->tensors[i];
    qsort(t, g->n_tensors, sizeof *t, by_data_cmp);
    for (size_t i = 1; i < g->n_tensors; i++)
        if ((size_t)((const uint8_t *)t[i]->data - (const uint8_t *)t[i - 1]->data) < t[i - 1]->bytes)
            return eng_fail(err, errlen, -EINVAL, "the data of tensors %s and %s overlap", SHOW(t[i - 1]->name), SHOW(t[i]->name));
    qsort(t, g->n_tensors, sizeof *t, by_name_cmp);
    for (size_t i = 1; i < g->n_tensors; i++)
        if (!by_name_cmp(&t[i - 1], &t[i]))
            return eng_fail(err, errlen, -EINVAL, "tensor %s is there twice", SHOW(t[i]->name));
    return 0;
}

/* Gives every tensor its data, once the end of the table, and so the start of the data, is known. */
static int place_tensors(reader *r, const uint64_t *offsets, uint32_t alignment)
{
    eng_gguf *g = r->g;
    size_t end = (size_t)(r->p - g->base), start = end + (alignment - end % alignment) % alignment;
    g->data_start = start < g->size ? start : g->size;
    for (size_t i = 0; i < g->n_tensors; i++) {
        eng_tensor *t = &g->tensors[i];
        if (offsets[i] % alignment)
            return FAIL(r, -EINVAL, "the offset of tensor %s, %" PRIu64 ", is not aligned to %" PRIu32 " bytes", SHOW(t->name), offsets[i],
                        alignment);
        size_t room = g->size - g->data_start;
        if (offsets[i] > room || t->bytes > room - offsets[i])
            return FAIL(r, -EINVAL, "the data of tensor %s (%zu bytes at offset %" PRIu64 ") runs past the end of the file: truncated",
                        SHOW(t->name), t->bytes, offsets[i]);
        t->data = g->base + g->data_start + offsets[i];
    }
    return eng_gguf_sort_tensors(g, r->err, r->errlen);
}

static int read_tensors(reader *r, size_t n)
{
    eng_gguf *g = r->g;
    uint32_t alignment = 32;
    int rc = eng_gguf_u32(g, "general.alignment", &alignment);
    /* GGUF asks for a multiple of 8, which also lets every type be read in place. */
    if ((rc && rc != -ENOENT) || alignment < 8 || alignment > MAX_ALIGNMENT || alignment & (alignment - 1))
        return FAIL(r, -EINVAL, "general.alignment must be a power of two from 8 to %d", MAX_ALIGNMENT);
    size_t room = room_for(r, n, SMALLEST_TENSOR);
    uint64_t *offsets = calloc(room, sizeof *offsets);
    g->tensors = calloc(room, sizeof *g->tensors);
    g->by_name = calloc(room, sizeof(eng_tensor *));
    rc = offsets && g->tensors && g->by_name ? 0 : FAIL(r, -ENOMEM, "no memory for the model file's %zu tensors", n);
    for (size_t i = 0; i < n && !rc; i++)
        rc = read_tensor(r, &g->tensors[i], &offsets[i], i, n);
    if (!rc) {
        g->n_tensors = n;
        rc = place_tensors(r, offsets, alignment);
    }
    free(offsets);
    return rc;
}

/* ---- all of it --------------------------------------------------------------------------------------------------- */

int eng_gguf_parse(eng_gguf *g, char *err, size_t errlen)
{
    reader r = {.g = g, .p = g->base, .end = g->base + g->size, .err = err, .errlen = errlen};
    uint64_t n_tensors = 0, n_keys = 0;
    int rc = read_header(&r, &n_tensors, &n_keys);
    if (!rc)
        rc = read_keys(&r, (size_t)n_keys);
    if (!rc)
        rc = read_tensors(&r, (size_t)n_tensors);
    return rc;
}

/* ---- asking ----------------------------------------------------------------------------------------------------- */

size_t eng_gguf_n_tensors(const eng_gguf *g)
{
    return g->n_tensors;
}

const eng_tensor *eng_gguf_tensor_at(const eng_gguf *g, size_t i)
{
    return i < g->n_tensors ? &g->tensors[i] : NULL;
}

const eng_tensor *eng_gguf_tensor(const eng_gguf *g, const char *name)
{
    const eng_tensor wanted = {.name = {name, strlen(name)}}, *key = &wanted;
    const eng_tensor **t = bsearch(&key, g->by_name, g->n_tensors, sizeof(eng_tensor *), by_name_cmp);
    return t ? *t : NULL;
}

static int find(const eng_gguf *g, const char *key, bool array, const entry **ret)
{
    const entry wanted = {.key = {key, strlen(key)}}, *e = bsearch(&wanted, g->keys, g->n_keys, sizeof *g->keys, entry_cmp);
    if (!e)
        return -ENOENT;
    if ((e->type == V_ARR) != array)
        return -EINVAL;
    *ret = e;
    return 0;
}

/* Element i of a value of integers. */
static bool int_at(const entry *e, size_t i, int64_t *ret)
{
    uint64_t u = 0; /* little-endian: the low bytes */
    if (e->item > V_I64 || e->item == V_F32 || e->item == V_BOOL || !value_size[e->item])
        return false;
    size_t size = value_size[e->item];
    memcpy(&u, e->value + i * size, size);
    bool is_signed = e->item == V_I8 || e->item == V_I16 || e->item == V_I32 || e->item == V_I64;
    if (!is_signed && u > INT64_MAX)
        return false;
    unsigned shift = 64 - 8 * (unsigned)size;
    *ret = is_signed ? (int64_t)(u << shift) >> shift : (int64_t)u;
    return true;
}

static bool float_at(const entry *e, size_t i, float *ret)
{
    double d;
    float f;
    if (e->item == V_F32) {
        memcpy(&f, e->value + i * sizeof f, sizeof f);
    } else if (e->item == V_F64) {
        memcpy(&d, e->value + i * sizeof d, sizeof d);
        if (!(fabs(d) <= FLT_MAX))
            return false;
        f = (float)d;
    } else {
        return false;
    }
    if (!isfinite(f))
        return false;
    *ret = f;
    return true;
}

int eng_gguf_u32(const eng_gguf *g, const char *key, uint32_t *ret)
{
    const entry *e;
    int64_t v;
    int rc = find(g, key, false, &e);
    if (rc)
        return rc;
    if (!int_at(e, 0, &v) || v < 0 || v > UINT32_MAX)
        return -EINVAL;
    *ret = (uint32_t)v;
    return 0;
}

int eng_gguf_f32(const eng_gguf *g, const char *key, float *ret)
{
    const entry *e;
    int rc = find(g, key, false, &e);
    return rc ? rc : float_at(e, 0, ret) ? 0 : -EINVAL;
}

int eng_gguf_bool(const eng_gguf *g, const char *key, bool *ret)
{
    const entry *e;
    int rc = find(g, key, false, &e);
    if (rc)
        return rc;
    if (e->type != V_BOOL || *e->value > 1)
        return -EINVAL;
    *ret = *e->value;
    return 0;
}

int eng_gguf_str(const eng_gguf *g, const char *key, eng_str *ret)
{
    const entry *e;
    int rc = find(g, key, false, &e);
    if (rc)
        return rc;
    if (e->type != V_STR)
        return -EINVAL;
    *ret = (eng_str){(const char *)e->value, (size_t)e->n};
    return 0;
}

int eng_gguf_str_array(const eng_gguf *g, const char *key, eng_str **ret, size_t *ret_n)
{
    const entry *e;
    int rc = find(g, key, true, &e);
    if (rc)
        return rc;
    if (e->item != V_STR)
        return -EINVAL;
    eng_str *a = calloc(e->n ? e->n : 1, sizeof *a); /* at most twice the bytes the strings take in the file */
    if (!a)
        return -ENOMEM;
    reader r = {.p = e->value, .end = g->base + g->size};
    for (size_t i = 0; i < e->n; i++)
        take_str(&r, &a[i]); /* lies in the file: seen when it was opened */
    *ret = a;
    *ret_n = (size_t)e->n;
    return 0;
}

int eng_gguf_i32_array(const eng_gguf *g, const char *key, int32_t **ret, size_t *ret_n)
{
    const entry *e;
    int rc = find(g, key, true, &e);
    if (rc)
        return rc;
    int32_t *a = calloc(e->n ? e->n : 1, sizeof *a);
    if (!a)
        return -ENOMEM;
    for (size_t i = 0; i < e->n; i++) {
        int64_t v;
        if (!int_at(e, i, &v) || v < INT32_MIN || v > INT32_MAX) {
            free(a);
            return -EINVAL;
        }
        a[i] = (int32_t)v;
    }
    *ret = a;
    *ret_n = (size_t)e->n;
    return 0;
}

int eng_gguf_f32_array(const eng_gguf *g, const char *key, float **ret, size_t *ret_n)
{
    const entry *e;
    int rc = find(g, key, true, &e);
    if (rc)
        return rc;
    float *a = calloc(e->n ? e->n : 1, sizeof *a);
    if (!a)
        return -ENOMEM;
    for (size_t i = 0; i < e->n; i++)
        if (!float_at(e, i, &a[i])) {
            free(a);
            return -EINVAL;
        }
    *ret = a;
    *ret_n = (size_t)e->n;
    return 0;
}
