/* Writes GGUF files in memory, right or wrong as the test likes. */
#ifndef RETRIEVALD_TESTS_GGUF_WRITER_H
#define RETRIEVALD_TESTS_GGUF_WRITER_H

#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { W_U8, W_I8, W_U16, W_I16, W_U32, W_I32, W_F32, W_BOOL, W_STR, W_ARR, W_U64, W_I64, W_F64 };

typedef struct {
    uint8_t *b;
    size_t n;
} w_buf;

static inline void w_put(w_buf *w, const void *p, size_t n)
{
    w->b = realloc(w->b, w->n + n + 1);
    assert(w->b);
    if (n)
        memcpy(w->b + w->n, p, n);
    w->n += n;
}

static inline void w_u32(w_buf *w, uint32_t v)
{
    w_put(w, &v, 4);
}

static inline void w_u64(w_buf *w, uint64_t v)
{
    w_put(w, &v, 8);
}

static inline void w_str(w_buf *w, const char *s)
{
    w_u64(w, strlen(s));
    w_put(w, s, strlen(s));
}

typedef struct {
    w_buf keys, table, data;
    uint64_t n_keys, n_tensors;
    uint32_t version, alignment; /* 0: 3 and 32 */
} w_gguf;

static inline void w_key(w_gguf *w, const char *key, uint32_t type, const void *value, size_t n)
{
    w_str(&w->keys, key);
    w_u32(&w->keys, type);
    w_put(&w->keys, value, n);
    w->n_keys++;
}

static inline void w_key_u32(w_gguf *w, const char *key, uint32_t v)
{
    w_key(w, key, W_U32, &v, 4);
}

static inline void w_key_f32(w_gguf *w, const char *key, float v)
{
    w_key(w, key, W_F32, &v, 4);
}

static inline void w_key_str(w_gguf *w, const char *key, const char *s)
{
    w_key(w, key, W_STR, NULL, 0);
    w_str(&w->keys, s);
}

/* n elements of `bytes` bytes in all. */
static inline void w_key_array(w_gguf *w, const char *key, uint32_t item, uint64_t n, const void *p, size_t bytes)
{
    w_key(w, key, W_ARR, NULL, 0);
    w_u32(&w->keys, item);
    w_u64(&w->keys, n);
    w_put(&w->keys, p, bytes);
}

static inline void w_key_strings(w_gguf *w, const char *key, uint64_t n, const char *const *s)
{
    w_key_array(w, key, W_STR, n, NULL, 0);
    for (uint64_t i = 0; i < n; i++)
        w_str(&w->keys, s[i]);
}

/* bytes NULL: zeros. */
static inline void w_tensor(w_gguf *w, const char *name, uint32_t type, uint32_t n_dims, const uint64_t *dims, const void *bytes, size_t n)
{
    size_t a = w->alignment ? w->alignment : 32;
    while (w->data.n % a)
        w_put(&w->data, "", 1);
    w_str(&w->table, name);
    w_u32(&w->table, n_dims);
    w_put(&w->table, dims, n_dims * sizeof *dims);
    w_u32(&w->table, type);
    w_u64(&w->table, w->data.n);
    void *zeros = bytes ? NULL : calloc(n ? n : 1, 1);
    w_put(&w->data, bytes ? bytes : zeros, n);
    free(zeros);
    w->n_tensors++;
}

/* The whole file, malloc'ed; empties w. */
static inline uint8_t *w_finish(w_gguf *w, size_t *ret_n)
{
    w_buf f = {0};
    w_put(&f, "GGUF", 4);
    w_u32(&f, w->version ? w->version : 3);
    w_u64(&f, w->n_tensors);
    w_u64(&f, w->n_keys);
    w_put(&f, w->keys.b, w->keys.n);
    w_put(&f, w->table.b, w->table.n);
    while (f.n % (w->alignment ? w->alignment : 32))
        w_put(&f, "", 1);
    w_put(&f, w->data.b, w->data.n);
    free(w->keys.b);
    free(w->table.b);
    free(w->data.b);
    memset(w, 0, sizeof *w);
    *ret_n = f.n;
    return f.b;
}

/* A file without a name that holds the bytes; its path goes to path, close the descriptor that is returned. */
static inline int w_file(const void *bytes, size_t n, char path[static 64])
{
    int fd = memfd_create("test.gguf", MFD_CLOEXEC);
    assert(fd >= 0);
    for (size_t done = 0; done < n;) {
        ssize_t k = write(fd, (const char *)bytes + done, n - done);
        assert(k > 0);
        done += (size_t)k;
    }
    snprintf(path, 64, "/proc/self/fd/%d", fd);
    return fd;
}

#endif
