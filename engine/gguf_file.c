/* Files of a model: mapping them, and joining the parts of a split one.
 *
 * llama.cpp's gguf-split cuts a model into NAME-00001-of-00003.gguf and so on. Each part is a GGUF file with split.no (from 0), split.count
 * and split.tensors.count (of all parts together); the first has the metadata.
 */
#include "gguf_private.h"
#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#define XXH_STATIC_LINKING_ONLY /* the size of XXH3_state_t: one on the stack cannot fail */
#include <xxhash.h>

enum {
    MAX_PARTS = 99999, /* what the names have room for */
    SUFFIX = sizeof "-00001-of-00003.gguf" - 1,
    MAX_WHY = 400,
    HUGE_PAGE = 2 << 20,
    PIECE = 4 * HUGE_PAGE, /* what is settled at a time */
};

/* ---- one file --------------------------------------------------------------------------------------------------- */

static int open_bytes(const void *bytes, size_t n, eng_gguf **ret, char *err, size_t errlen)
{
    eng_gguf *g = calloc(1, sizeof *g);
    if (!g)
        return eng_fail(err, errlen, -ENOMEM, "no memory to open the model file");
    g->base = bytes;
    g->size = n;
    int rc = eng_gguf_parse(g, err, errlen);
    if (rc)
        eng_gguf_close(g);
    else
        *ret = g;
    return rc;
}

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* Anonymous memory from the beginning of a huge page on. MAP_FAILED: errno. */
static void *map_aligned(size_t bytes, int prot)
{
    char *all = mmap(NULL, bytes + HUGE_PAGE, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED)
        return MAP_FAILED;
    size_t before = round_up((uintptr_t)all, HUGE_PAGE) - (uintptr_t)all, after = HUGE_PAGE - before;
    if (before)
        munmap(all, before);
    if (after)
        munmap(all + before + bytes, after);
    return all + before;
}

/* The addresses up to the end of the last huge page are kept for eng_gguf_settle. MAP_FAILED: errno. */
static void *map_file(int fd, size_t size, size_t *ret_span)
{
    size_t span = round_up(size, HUGE_PAGE);
    char *base = map_aligned(span, PROT_NONE);
    if (base == MAP_FAILED)
        return MAP_FAILED;
    if (mmap(base, size, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0) == MAP_FAILED) {
        int err = errno;
        munmap(base, span);
        errno = err;
        return MAP_FAILED;
    }
    *ret_span = span;
    return base;
}

static int open_file(const char *path, eng_gguf **ret, char *err, size_t errlen)
{
    struct stat st;
    void *map = MAP_FAILED;
    size_t size = 0, span = 0;
    /* O_NONBLOCK: do not wait for the other end of a FIFO. */
    int rc, fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0 || fstat(fd, &st)) {
        rc = eng_fail(err, errlen, -errno, "the model file cannot be opened: %s", strerror(errno));
        goto cleanup;
    }
    if (!S_ISREG(st.st_mode)) {
        rc = eng_fail(err, errlen, -EINVAL, "the model path is not a file%s", S_ISDIR(st.st_mode) ? " but a directory" : "");
        goto cleanup;
    }
    size = (size_t)st.st_size;
    if (!size) {
        rc = eng_fail(err, errlen, -EINVAL, "the model file is empty: not a GGUF file");
        goto cleanup;
    }
    map = map_file(fd, size, &span);
    if (map == MAP_FAILED) {
        rc = eng_fail(err, errlen, -errno, "the model file cannot be mapped: %s", strerror(errno));
        goto cleanup;
    }
    rc = open_bytes(map, size, ret, err, errlen);
    if (!rc) {
        (*ret)->span = span;
        map = MAP_FAILED;
    }
cleanup:
    if (map != MAP_FAILED)
        munmap(map, span);
    if (fd >= 0)
        close(fd);
    return rc;
}

/* ---- the parts of a split model ----------------------------------------------------------------------------------- */

typedef struct {
    uint32_t no, count, tensors; /* tensors: 0, the file does not say */
} split;

/* A file that is whole is the only part of one. */
static int read_split(const eng_gguf *g, split *ret, char *err, size_t errlen)
{
    split s = {.no = 0, .count = 1};
    int rc = eng_gguf_u32(g, "split.count", &s.count);
    if (rc == -EINVAL || s.count > MAX_PARTS)
        return eng_fail(err, errlen, -EINVAL, "key split.count is not a whole number up to %d", MAX_PARTS);
    if (s.count > 1) {
        if (eng_gguf_u32(g, "split.no", &s.no) || s.no >= s.count)
            return eng_fail(err, errlen, -EINVAL, "key split.no is not a whole number below split.count, %" PRIu32, s.count);
        rc = eng_gguf_u32(g, "split.tensors.count", &s.tensors);
        if (rc == -EINVAL || (!rc && (!s.tensors || s.tensors > ENG_GGUF_MAX_TENSORS)))
            return eng_fail(err, errlen, -EINVAL, "key split.tensors.count is not a whole number from 1 to %d", ENG_GGUF_MAX_TENSORS);
    }
    *ret = s;
    return 0;
}

static void write_suffix(char suffix[SUFFIX + 1], uint32_t no, uint32_t count)
{
    /* The remainders change nothing; they tell the compiler that five digits are enough. */
    snprintf(suffix, SUFFIX + 1, "-%05u-of-%05u.gguf", (no + 1) % (MAX_PARTS + 1), count % (MAX_PARTS + 1));
}

/* Where the path of part `no` ends in its suffix; NULL: it does not. */
static char *find_suffix(char *path, uint32_t no, uint32_t count)
{
    char suffix[SUFFIX + 1];
    size_t n = strlen(path);
    write_suffix(suffix, no, count);
    return n > SUFFIX && !strcmp(path + n - SUFFIX, suffix) ? path + n - SUFFIX : NULL;
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Moves the tensors of `part` to the end of g's; by_name gets room only. */
static int take_tensors(eng_gguf *g, eng_gguf *part, char *err, size_t errlen)
{
    size_t n = g->n_tensors + part->n_tensors;
    if (n > ENG_GGUF_MAX_TENSORS)
        return eng_fail(err, errlen, -EINVAL, "the parts have more than %d tensors together", ENG_GGUF_MAX_TENSORS);
    eng_tensor *tensors = reallocarray(g->tensors, n + 1, sizeof *tensors);
    if (tensors)
        g->tensors = tensors;
    const eng_tensor **by_name = reallocarray(g->by_name, n + 1, sizeof(eng_tensor *));
    if (by_name)
        g->by_name = by_name;
    if (!tensors || !by_name)
        return eng_fail(err, errlen, -ENOMEM, "no memory for the model's %zu tensors", n);
    memcpy(g->tensors + g->n_tensors, part->tensors, part->n_tensors * sizeof *tensors);
    g->n_tensors = n;
    free(part->tensors);
    free(part->by_name);
    part->tensors = NULL;
    part->by_name = NULL;
    part->n_tensors = 0;
    return 0;
}

static int check_part(const eng_gguf *part, uint32_t no, const split *whole, char *err, size_t errlen)
{
    split s;
    int rc = read_split(part, &s, err, errlen);
    if (rc)
        return rc;
    if (s.count != whole->count)
        return eng_fail(err, errlen, -EINVAL, "key split.count is %" PRIu32 ", and %" PRIu32 " in the first part", s.count, whole->count);
    if (s.no != no)
        return eng_fail(err, errlen, -EINVAL, "key split.no is %" PRIu32 "; by its name the file is %" PRIu32, s.no, no);
    if (s.tensors != whole->tensors)
        return eng_fail(err, errlen, -EINVAL, "key split.tensors.count is %" PRIu32 ", and %" PRIu32 " in the first part", s.tensors,
                        whole->tensors);
    return 0;
}

static int add_part(eng_gguf *g, const char *path, uint32_t no, const split *whole, char *err, size_t errlen)
{
    char why[MAX_WHY] = "", name[96];
    eng_gguf *part = NULL;
    int rc = open_file(path, &part, why, sizeof why);
    if (!rc)
        rc = check_part(part, no, whole, why, sizeof why);
    if (!rc)
        rc = take_tensors(g, part, why, sizeof why);
    if (!rc) {
        eng_gguf **parts = reallocarray(g->parts, g->n_parts + 1, sizeof *parts);
        if (!parts) {
            rc = eng_fail(why, sizeof why, -ENOMEM, "no memory");
        } else {
            g->parts = parts;
            g->parts[g->n_parts++] = part;
            return 0;
        }
    }
    eng_gguf_close(part);
    return eng_fail(err, errlen, rc, "part %" PRIu32 " of %" PRIu32 " of the model, %s: %s", no + 1, whole->count,
                    eng_printable(base_name(path), strlen(base_name(path)), name, sizeof name), why);
}

/* Somebody gave a part that is not the first. */
static int refuse_other_part(char *path, const split *s, char *err, size_t errlen)
{
    char first[96] = "";
    char *suffix = find_suffix(path, s->no, s->count);
    if (suffix) {
        write_suffix(suffix, 0, s->count);
        eng_printable(base_name(path), strlen(base_name(path)), first, sizeof first);
    }
    return eng_fail(err, errlen, -EINVAL,
                    "this is part %" PRIu32 " of %" PRIu32 " of a split model (split.no, split.count); open the first part%s%s", s->no + 1,
                    s->count, suffix ? ", " : "", first);
}

static int join_parts(eng_gguf *g, const char *given, char *err, size_t errlen)
{
    split s;
    int rc = read_split(g, &s, err, errlen);
    if (rc || s.count <= 1)
        return rc;
    char *path = strdup(given), *suffix = path ? find_suffix(path, s.no, s.count) : NULL;
    if (!path)
        return eng_fail(err, errlen, -ENOMEM, "no memory to open the model file");
    if (s.no) {
        rc = refuse_other_part(path, &s, err, errlen);
    } else if (!suffix) {
        char wanted[SUFFIX + 1];
        write_suffix(wanted, 0, s.count);
        rc = eng_fail(err, errlen, -EINVAL,
                      "this is the first of %" PRIu32
                      " parts of a split model (split.count); the others are looked for by its name, which must end in %s",
                      s.count, wanted);
    }
    for (uint32_t i = 1; i < s.count && !rc; i++) {
        write_suffix(suffix, i, s.count);
        rc = add_part(g, path, i, &s, err, errlen);
    }
    if (!rc && s.tensors && g->n_tensors != s.tensors)
        rc = eng_fail(err, errlen, -EINVAL,
                      "the %" PRIu32 " parts of the model have %zu tensors; by key split.tensors.count they are %" PRIu32, s.count,
                      g->n_tensors, s.tensors);
    free(path);
    return rc ? rc : eng_gguf_sort_tensors(g, err, errlen);
}

/* ---- open, close ------------------------------------------------------------------------------------------------ */

int eng_gguf_open_memory(const void *bytes, size_t n, eng_gguf **ret, char *err, size_t errlen)
{
    split s;
    eng_gguf *g = NULL;
    int rc = open_bytes(bytes, n, &g, err, errlen);
    if (!rc)
        rc = read_split(g, &s, err, errlen);
    if (!rc && s.count > 1)
        rc = eng_fail(err, errlen, -ENOTSUP, "this is one of %" PRIu32 " parts of a split model (split.count)", s.count);
    if (rc)
        eng_gguf_close(g);
    else
        *ret = g;
    return rc;
}

int eng_gguf_open(const char *path, eng_gguf **ret, char *err, size_t errlen)
{
    eng_gguf *g = NULL;
    int rc = open_file(path, &g, err, errlen);
    if (!rc)
        rc = join_parts(g, path, err, errlen);
    if (rc)
        eng_gguf_close(g);
    else
        *ret = g;
    return rc;
}

void eng_gguf_close(eng_gguf *g)
{
    if (!g)
        return;
    for (size_t i = 0; i < g->n_parts; i++)
        eng_gguf_close(g->parts[i]);
    free(g->parts);
    free(g->keys);
    free(g->tensors);
    free(g->by_name);
    if (g->span)
        munmap((void *)(uintptr_t)g->base, g->span);
    free(g);
}

void eng_gguf_prefetch(const eng_gguf *g)
{
    if (g->span)
        madvise((void *)(uintptr_t)g->base, g->size, MADV_WILLNEED);
    for (size_t i = 0; i < g->n_parts; i++)
        eng_gguf_prefetch(g->parts[i]);
}

/* ---- huge pages -------------------------------------------------------------------------------------------------- */

size_t eng_gguf_n_pieces(const eng_gguf *g)
{
    size_t n = (g->span + PIECE - 1) / PIECE;
    for (size_t i = 0; i < g->n_parts; i++)
        n += eng_gguf_n_pieces(g->parts[i]);
    return n;
}

/* The copy takes the place of the mapping, so no pointer into it changes. */
static bool settle(const eng_gguf *g, size_t at)
{
    const size_t bytes = g->span - at < PIECE ? g->span - at : PIECE, filled = g->size - at < bytes ? g->size - at : bytes;
    void *to = (void *)((uintptr_t)g->base + at);
    void *copy = map_aligned(bytes, PROT_READ | PROT_WRITE);
    if (copy == MAP_FAILED)
        return false;
    if (!madvise(copy, bytes, MADV_HUGEPAGE)) {
        memcpy(copy, to, filled);
        if (!mprotect(copy, bytes, PROT_READ) && mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to)
            return true;
    }
    munmap(copy, bytes);
    return false;
}

bool eng_gguf_settle(const eng_gguf *g, size_t piece)
{
    size_t n = (g->span + PIECE - 1) / PIECE;
    if (piece < n)
        return settle(g, piece * PIECE);
    for (size_t i = 0; i < g->n_parts; i++) {
        piece -= n;
        n = eng_gguf_n_pieces(g->parts[i]);
        if (piece < n)
            return settle(g->parts[i], piece * PIECE);
    }
    return false;
}

/* ---- what they are ------------------------------------------------------------------------------------------------ */

size_t eng_gguf_n_parts(const eng_gguf *g)
{
    return g->n_parts + 1;
}

uint64_t eng_gguf_size(const eng_gguf *g)
{
    uint64_t size = g->size;
    for (size_t i = 0; i < g->n_parts; i++)
        size += g->parts[i]->size;
    return size;
}

static void hash_head(XXH3_state_t *state, const eng_gguf *g)
{
    uint64_t size = g->size;
    XXH3_64bits_update(state, g->base, g->data_start);
    XXH3_64bits_update(state, &size, sizeof size);
}

uint64_t eng_gguf_fingerprint(const eng_gguf *g)
{
    enum { SAMPLES = 32, SAMPLE_BYTES = 4096 };
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    hash_head(&state, g);
    for (size_t i = 0; i < g->n_parts; i++)
        hash_head(&state, g->parts[i]);
    size_t n = g->n_tensors < SAMPLES ? g->n_tensors : SAMPLES;
    for (size_t i = 0; i < n; i++) { /* spread from the first tensor to the last */
        const eng_tensor *t = &g->tensors[n > 1 ? i * (g->n_tensors - 1) / (n - 1) : 0];
        size_t k = t->bytes < SAMPLE_BYTES ? t->bytes : SAMPLE_BYTES;
        XXH3_64bits_update(&state, t->data, k);
        XXH3_64bits_update(&state, (const uint8_t *)t->data + t->bytes - k, k);
    }
    return XXH3_64bits_digest(&state);
}
