/* Models in several files, and in files beyond 4 GiB: cut from a tiny model, they are the same model; each fault is refused by name. */
#include "gguf.h"
#include "gguf_writer.h"
#include "model.h"
#include "support.h"
#include "teacher.h"

#include <dirent.h>
#include <errno.h>
#include <stdbool.h>
#include <sys/stat.h>

enum { ID_COUNT = 6, MOST_PARTS = 8 };
static const int32_t ids[ID_COUNT] = {1, 200, 7, 33, 90, 12};

static char *bytes;
static size_t n_bytes;
static eng_gguf *whole;
static char dir[64], err[512];

/* ---- writing parts ------------------------------------------------------------------------------------------------ */

/* How the parts differ from good ones. A part number counts from 0; NONE: no part. */
enum { NONE = 99 };
typedef struct {
    uint32_t parts;
    uint32_t part;                /* the part at fault */
    uint32_t no, count;           /* its keys, where not 0 */
    int32_t tensors;              /* ... and split.tensors.count; -1: without */
    bool no_keys, repeat, absent; /* without split keys; again with the last tensor of the part before; not written */
    size_t cut;                   /* bytes missing at its end */
    bool empty_first;
} plan;

static char *part_path(uint32_t no, uint32_t count)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/model-%05u-of-%05u.gguf", dir, no + 1, count);
    return path;
}

static void write_file(const char *path, const void *data, size_t n)
{
    FILE *f = fopen(path, "wb");
    ck_assert_ptr_nonnull(f);
    ck_assert_uint_eq(fwrite(data, 1, n, f), n);
    ck_assert_int_eq(fclose(f), 0);
}

static void put_tensor(w_gguf *w, size_t i)
{
    const eng_tensor *t = eng_gguf_tensor_at(whole, i);
    char name[65] = "";
    memcpy(name, t->name.s, t->name.n);
    w_tensor(w, name, eng_types[t->type].file_id, t->n_dims, t->dims, t->data, t->bytes);
}

/* As gguf-split writes them: the metadata in the first part only. */
static void write_part(const plan *p, uint32_t no, size_t from, size_t to)
{
    w_gguf w = {0};
    bool fault = no == p->part;
    if (!no) {
        uint64_t n_keys;
        size_t end = (size_t)(eng_gguf_tensor_at(whole, 0)->name.s - bytes) - sizeof(uint64_t);
        memcpy(&n_keys, bytes + 16, sizeof n_keys);
        w_put(&w.keys, bytes + 24, end - 24);
        w.n_keys = n_keys;
    }
    if (!(fault && p->no_keys)) {
        uint16_t number = (uint16_t)(fault && p->no ? p->no : no), count = (uint16_t)(fault && p->count ? p->count : p->parts);
        int32_t tensors = fault && p->tensors ? p->tensors : (int32_t)eng_gguf_n_tensors(whole);
        w_key(&w, "split.no", W_U16, &number, 2);
        w_key(&w, "split.count", W_U16, &count, 2);
        if (tensors >= 0)
            w_key(&w, "split.tensors.count", W_I32, &tensors, 4);
    }
    for (size_t i = fault && p->repeat ? from - 1 : from; i < to; i++)
        put_tensor(&w, i);
    size_t n;
    uint8_t *b = w_finish(&w, &n);
    if (!(fault && p->absent))
        write_file(part_path(no, p->parts), b, n - (fault ? p->cut : 0));
    free(b);
}

static void clean(void)
{
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        char path[sizeof dir + sizeof e->d_name];
        snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        if (e->d_name[0] != '.' && unlink(path))
            rmdir(path);
    }
    if (d)
        closedir(d);
}

/* The path of the first part. */
static const char *write_parts(plan p)
{
    size_t n = eng_gguf_n_tensors(whole), from = 0;
    clean();
    for (uint32_t i = 0; i < p.parts; i++) {
        size_t to = p.empty_first ? n * i / (p.parts - 1) : n * (i + 1) / p.parts;
        write_part(&p, i, from, to);
        from = to;
    }
    static char path[128];
    return strcpy(path, part_path(0, p.parts));
}

/* ---- the same model ----------------------------------------------------------------------------------------------- */

static void logits(const char *path, float **ret, size_t *ret_n)
{
    eng_params params = eng_params_default();
    params.n_ctx = 64;
    params.n_threads = 1;
    params.cache_ram = 0;
    eng_engine *e = t_open(path, &params);
    *ret_n = (size_t)ID_COUNT * eng_info_get(e)->n_vocab;
    *ret = malloc(*ret_n * sizeof(float));
    ck_assert_ptr_nonnull(*ret);
    t_prefill_logits(e, ids, ID_COUNT, 0, *ret);
    eng_close(e);
}

static void same_logits(const char *path)
{
    float *got, *want;
    size_t n, n_want;
    logits(path, &got, &n);
    logits(t_path("golden/gguf/tiny-llama-q8_0.gguf"), &want, &n_want);
    ck_assert_uint_eq(n, n_want);
    ck_assert(!memcmp(got, want, n * sizeof *got));
    free(got);
    free(want);
}

static void same_tensors(const char *path, uint32_t parts)
{
    eng_gguf *g = NULL;
    ck_assert_msg(!eng_gguf_open(path, &g, err, sizeof err), "%s", err);
    ck_assert_uint_eq(eng_gguf_n_parts(g), parts);
    ck_assert_uint_eq(eng_gguf_n_tensors(g), eng_gguf_n_tensors(whole));
    ck_assert_uint_eq(eng_gguf_n_pieces(g), parts); /* all are small */
    for (uint32_t i = 0; i <= parts; i++)
        ck_assert(!eng_gguf_settle(g, i) || i < parts);
    uint64_t size = 0;
    for (uint32_t i = 0; i < parts; i++) {
        struct stat st;
        ck_assert_int_eq(stat(part_path(i, parts), &st), 0);
        size += (uint64_t)st.st_size;
    }
    ck_assert_uint_eq(eng_gguf_size(g), size);
    for (size_t i = 0; i < eng_gguf_n_tensors(whole); i++) {
        const eng_tensor *a = eng_gguf_tensor_at(whole, i);
        char name[65] = "";
        memcpy(name, a->name.s, a->name.n);
        const eng_tensor *b = eng_gguf_tensor(g, name);
        ck_assert_ptr_nonnull(b);
        ck_assert(a->type == b->type && a->bytes == b->bytes && !memcmp(a->dims, b->dims, sizeof a->dims) &&
                  !memcmp(a->data, b->data, a->bytes));
    }
    eng_gguf_close(g);
}

START_TEST(split_is_the_same_model)
{
    for (uint32_t parts = 2; parts <= MOST_PARTS; parts++)
        same_tensors(write_parts((plan){.parts = parts, .part = NONE}), parts);
    same_logits(write_parts((plan){.parts = 3, .part = NONE}));
    same_tensors(write_parts((plan){.parts = 3, .part = NONE, .empty_first = true}), 3);
    same_logits(write_parts((plan){.parts = 2, .part = NONE, .empty_first = true}));
    /* Written without the count of all tensors. */
    plan p = {.parts = 1, .part = 0, .tensors = -1};
    same_tensors(write_parts(p), 1);
}
END_TEST

static uint64_t fingerprint(const char *path)
{
    eng_gguf *g = NULL;
    ck_assert_msg(!eng_gguf_open(path, &g, err, sizeof err), "%s", err);
    uint64_t f = eng_gguf_fingerprint(g);
    eng_gguf_close(g);
    return f;
}

/* All parts are in it. */
START_TEST(fingerprints)
{
    char first[128];
    strcpy(first, write_parts((plan){.parts = 3, .part = NONE}));
    uint64_t before = fingerprint(first);
    ck_assert_uint_eq(fingerprint(first), before);
    for (uint32_t i = 0; i < 3; i++) {
        FILE *f = fopen(part_path(i, 3), "ab");
        ck_assert(f && fputc(0, f) == 0 && !fclose(f));
        uint64_t after = fingerprint(first);
        ck_assert_uint_ne(after, before);
        before = after;
    }
    ck_assert_uint_ne(fingerprint(write_parts((plan){.parts = 2, .part = NONE})), before);
}
END_TEST

/* ---- faults ------------------------------------------------------------------------------------------------------- */

static void refused(const char *path, const char *word, const char *other)
{
    eng_model *m = NULL;
    err[0] = 0;
    int rc = eng_model_open(path, &m, err, sizeof err);
    ck_assert_msg(rc < 0 && !m, "accepted, though %s", word);
    ck_assert_msg(strstr(err, word) && strstr(err, other), "\"%s\" has no \"%s\" or no \"%s\"", err, word, other);
}

START_TEST(faults_refused)
{
    static const struct {
        plan p;
        const char *word, *other;
    } cases[] = {
        {{.parts = 3, .part = 1, .absent = true}, "part 2 of 3 of the model, model-00002-of-00003.gguf", "No such file"},
        {{.parts = 3, .part = 2, .absent = true}, "part 3 of 3", "No such file"},
        {{.parts = 3, .part = 1, .count = 4}, "part 2 of 3", "split.count is 4, and 3"},
        {{.parts = 3, .part = 1, .no_keys = true}, "part 2 of 3", "split.count is 1, and 3"},
        {{.parts = 3, .part = 2, .no = 1}, "part 3 of 3", "split.no is 1; by its name the file is 2"},
        {{.parts = 3, .part = 1, .no = 3}, "part 2 of 3", "split.no"},
        {{.parts = 3, .part = 1, .tensors = 5}, "part 2 of 3", "split.tensors.count is 5, and"},
        {{.parts = 3, .part = 0, .tensors = 5}, "part 2 of 3", "and 5 in the first"},
        {{.parts = 3, .part = 1, .tensors = -1}, "part 2 of 3", "split.tensors.count"},
        {{.parts = 3, .part = 1, .repeat = true}, "3 parts of the model have", "split.tensors.count"},
        {{.parts = 3, .part = 2, .cut = 1}, "part 3 of 3", "truncated"},
        {{.parts = 3, .part = 1, .cut = 1000}, "part 2 of 3", "truncated"},
        {{.parts = 3, .part = 0, .cut = 1}, "truncated", ""},
        {{.parts = 3, .part = 0, .no = 1}, "this is part 2 of 3", "open the first part"},
        {{.parts = 3, .part = 0, .no = 3}, "split.no", "below split.count, 3"},
        {{.parts = 3, .part = 0, .count = 2}, "first of 2 parts", "-00001-of-00002.gguf"},
        {{.parts = 3, .part = 0, .count = 60000}, "first of 60000 parts", "-00001-of-60000.gguf"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        refused(write_parts(cases[i].p), cases[i].word, cases[i].other);
}
END_TEST

START_TEST(files_refused)
{
    char other[160];
    write_parts((plan){.parts = 3, .part = NONE});
    refused(part_path(1, 3), "this is part 2 of 3", "open the first part, model-00001-of-00003.gguf");
    refused(part_path(2, 3), "this is part 3 of 3", "open the first part, model-00001-of-00003.gguf");
    /* Named as no part is. */
    snprintf(other, sizeof other, "%s/other.gguf", dir);
    ck_assert_int_eq(link(part_path(1, 3), other), 0);
    refused(other, "this is part 2 of 3", "open the first part");
    unlink(other);
    ck_assert_int_eq(link(part_path(0, 3), other), 0);
    refused(other, "first of 3 parts", "must end in -00001-of-00003.gguf");
    /* Not files, or not of this model. */
    static const char rubbish[] = "rubbish, and a lot of it: longer than any header";
    write_file(part_path(1, 3), rubbish, sizeof rubbish);
    refused(part_path(0, 3), "part 2 of 3", "not a GGUF file");
    write_file(part_path(1, 3), "", 0);
    refused(part_path(0, 3), "part 2 of 3", "empty");
    unlink(part_path(1, 3));
    ck_assert_int_eq(mkdir(part_path(1, 3), 0700), 0);
    refused(part_path(0, 3), "part 2 of 3", "directory");
    rmdir(part_path(1, 3));
    write_file(part_path(1, 3), bytes, n_bytes); /* a whole model */
    refused(part_path(0, 3), "part 2 of 3", "split.count is 1, and 3");
}
END_TEST

/* Without the count of tensors, what two parts share is found all the same, and what they lack by the model. */
START_TEST(uncounted_tensors)
{
    char first[128];
    w_gguf w = {0};
    size_t n;
    plan p = {.parts = 2, .part = 0, .tensors = -1};
    strcpy(first, write_parts(p));
    for (int repeat = 0; repeat < 2; repeat++) {
        uint16_t no = 1, count = 2;
        w_key(&w, "split.no", W_U16, &no, 2);
        w_key(&w, "split.count", W_U16, &count, 2);
        if (repeat)
            put_tensor(&w, 0);
        uint8_t *b = w_finish(&w, &n);
        write_file(part_path(1, 2), b, n);
        free(b);
        refused(first, repeat ? "is there twice" : "is missing", "tensor ");
    }
}
END_TEST

START_TEST(part_in_memory_refused)
{
    size_t n;
    char *part = t_read(write_parts((plan){.parts = 2, .part = NONE}), &n);
    eng_gguf *g = NULL;
    ck_assert_int_eq(eng_gguf_open_memory(part, n, &g, err, sizeof err), -ENOTSUP);
    ck_assert_ptr_null(g);
    ck_assert_ptr_nonnull(strstr(err, "split.count"));
    free(part);
}
END_TEST

/* ---- beyond 4 GiB ------------------------------------------------------------------------------------------------- */

/* Where the offset of tensor i stands in the table. */
static size_t offset_at(size_t i)
{
    const eng_tensor *t = eng_gguf_tensor_at(whole, i);
    return (size_t)(t->name.s - bytes) + t->name.n + sizeof(uint32_t) + t->n_dims * sizeof(uint64_t) + sizeof(uint32_t);
}

/* Moves the last tensors of the model to places beyond 4 GiB of a file with a hole. -errno: the system has no such files. */
static int write_sparse(const uint64_t *gaps, size_t n_gaps, char path[static 64])
{
    int fd = w_file(bytes, n_bytes, path);
    for (size_t k = 0; k < n_gaps; k++) {
        size_t i = eng_gguf_n_tensors(whole) - 1 - k;
        const eng_tensor *t = eng_gguf_tensor_at(whole, i);
        uint64_t offset, to = gaps[k], data = (uint64_t)((const char *)t->data - bytes);
        memcpy(&offset, bytes + offset_at(i), sizeof offset);
        offset += to;
        if (pwrite(fd, t->data, t->bytes, (off_t)(data + to)) != (ssize_t)t->bytes) {
            int rc = -errno;
            close(fd);
            return rc;
        }
        ck_assert_int_eq(pwrite(fd, &offset, sizeof offset, (off_t)offset_at(i)), sizeof offset);
    }
    return fd;
}

START_TEST(beyond_4_gib)
{
    static const uint64_t gaps[] = {(uint64_t)6 << 30, (uint64_t)4 << 30, ((uint64_t)4 << 30) - 4096};
    char path[64];
    int fd = write_sparse(gaps, sizeof gaps / sizeof *gaps, path);
    if (fd < 0) {
        printf("skipped: no sparse file of 6 GiB here: %s\n", strerror(-fd));
        return;
    }
    same_logits(path);
    struct stat st;
    ck_assert_int_eq(fstat(fd, &st), 0);
    ck_assert_uint_gt((uint64_t)st.st_size, (uint64_t)6 << 30);
    /* A byte short, and the last tensor is refused. */
    ck_assert_int_eq(ftruncate(fd, st.st_size - 1), 0);
    refused(path, "truncated", "tensor ");
    close(fd);
}
END_TEST

/* ---- main --------------------------------------------------------------------------------------------------------- */

int main(void)
{
    const char *tmp = getenv("TMPDIR");
    snprintf(dir, sizeof dir, "%.40s/retrievald-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    bytes = t_read(t_path("golden/gguf/tiny-llama-q8_0.gguf"), &n_bytes);
    if (!mkdtemp(dir) || eng_gguf_open_memory(bytes, n_bytes, &whole, err, sizeof err)) {
        fprintf(stderr, "%s: %s\n", dir, err);
        return 99;
    }
    Suite *s = suite_create("split");
    TCase *c = tcase_create("split");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, split_is_the_same_model);
    tcase_add_test(c, fingerprints);
    tcase_add_test(c, faults_refused);
    tcase_add_test(c, files_refused);
    tcase_add_test(c, uncounted_tensors);
    tcase_add_test(c, part_in_memory_refused);
    tcase_add_test(c, beyond_4_gib);
    suite_add_tcase(s, c);
    int status = t_run(s);
    clean();
    rmdir(dir);
    eng_gguf_close(whole);
    free(bytes);
    return status;
}
