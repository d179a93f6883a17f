#include "gguf.h"
#include "gguf_writer.h"
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <sys/stat.h>

static char err[512];

static eng_gguf *open_ok(const uint8_t *b, size_t n)
{
    eng_gguf *g = NULL;
    ck_assert_msg(eng_gguf_open_memory(b, n, &g, err, sizeof err) == 0, "%s", err);
    return g;
}

/* Refused with a sentence that has `word`; nothing is returned. */
static void refused(const uint8_t *b, size_t n, const char *word)
{
    eng_gguf *g = NULL;
    err[0] = 0;
    int rc = eng_gguf_open_memory(b, n, &g, err, sizeof err);
    ck_assert_int_lt(rc, 0);
    ck_assert_ptr_null(g);
    ck_assert_msg(strstr(err, word), "\"%s\" has no \"%s\"", err, word);
}

static void refuse_writer(w_gguf *w, const char *word)
{
    size_t n;
    uint8_t *b = w_finish(w, &n);
    refused(b, n, word);
    free(b);
}

/* One key of every type, two tensors. */
static uint8_t *sample(uint32_t version, size_t *ret_n)
{
    w_gguf w = {.version = version};
    w_key(&w, "u8", W_U8, &(uint8_t){200}, 1);
    w_key(&w, "i8", W_I8, &(int8_t){-3}, 1);
    w_key(&w, "u16", W_U16, &(uint16_t){60000}, 2);
    w_key(&w, "i16", W_I16, &(int16_t){-300}, 2);
    w_key_u32(&w, "u32", 4000000000u);
    w_key(&w, "i32", W_I32, &(int32_t){77}, 4);
    w_key(&w, "u64", W_U64, &(uint64_t){1ull << 32}, 8);
    w_key(&w, "u64small", W_U64, &(uint64_t){9}, 8);
    w_key(&w, "u64top", W_U64, &(uint64_t){UINT64_MAX}, 8);
    w_key(&w, "i64", W_I64, &(int64_t){-1}, 8);
    w_key(&w, "i64small", W_I64, &(int64_t){4294967295}, 8);
    w_key_f32(&w, "f32", 0.25f);
    w_key(&w, "f64", W_F64, &(double){1e-5}, 8);
    w_key(&w, "f64huge", W_F64, &(double){1e300}, 8);
    w_key_f32(&w, "nan", NAN);
    w_key(&w, "f64inf", W_F64, &(double){INFINITY}, 8);
    w_key(&w, "yes", W_BOOL, "\1", 1);
    w_key(&w, "no", W_BOOL, "\0", 1);
    w_key(&w, "maybe", W_BOOL, "\2", 1);
    w_key_str(&w, "string", "h\xc3\xa9llo");
    w_key_str(&w, "nothing", "");
    w_key_strings(&w, "strings", 3, (const char *const[]){"a", "", "ccc"});
    w_key_array(&w, "i32s", W_I32, 2, (int32_t[]){-5, 6}, 8);
    w_key_array(&w, "u16s", W_U16, 2, (uint16_t[]){65535, 1}, 4);
    w_key_array(&w, "u32s", W_U32, 2, (uint32_t[]){1, 3000000000u}, 8);
    w_key_array(&w, "u64s", W_U64, 1, (uint64_t[]){UINT64_MAX}, 8);
    w_key_array(&w, "f32s", W_F32, 2, (float[]){-1, 2}, 8);
    w_key_array(&w, "f64s", W_F64, 1, (double[]){0.5}, 8);
    w_key_array(&w, "nans", W_F32, 1, (float[]){NAN}, 4);
    w_key_array(&w, "empty", W_I32, 0, NULL, 0);
    uint8_t q[2 * 68];
    for (size_t i = 0; i < sizeof q; i++)
        q[i] = (uint8_t)i;
    w_tensor(&w, "first", 8, 2, (uint64_t[]){64, 2}, q, sizeof q);
    w_tensor(&w, "second", 0, 1, (uint64_t[]){3}, (float[]){1, 2, 3}, 12);
    return w_finish(&w, ret_n);
}

START_TEST(test_scalars)
{
    size_t n;
    uint8_t *b = sample(3, &n);
    eng_gguf *g = open_ok(b, n);
    uint32_t u = 123;
    float f = 5;
    bool yes = false;
    eng_str s = {0};
    static const struct {
        const char *key;
        int rc;
        uint32_t v;
    } ints[] = {{"u8", 0, 200},          {"i8", -EINVAL, 0},     {"u16", 0, 60000},           {"i16", -EINVAL, 0},
                {"u32", 0, 4000000000u}, {"i32", 0, 77},         {"u64", -EINVAL, 0},         {"u64small", 0, 9},
                {"u64top", -EINVAL, 0},  {"i64", -EINVAL, 0},    {"i64small", 0, UINT32_MAX}, {"f32", -EINVAL, 0},
                {"yes", -EINVAL, 0},     {"string", -EINVAL, 0}, {"i32s", -EINVAL, 0},        {"absent", -ENOENT, 0},
                {"", -ENOENT, 0},        {"u", -ENOENT, 0}};
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) {
        u = 123;
        ck_assert_msg(eng_gguf_u32(g, ints[i].key, &u) == ints[i].rc, "%s", ints[i].key);
        ck_assert_uint_eq(u, ints[i].rc ? 123 : ints[i].v);
    }
    ck_assert_int_eq(eng_gguf_f32(g, "f32", &f), 0);
    ck_assert(f == 0.25f);
    ck_assert_int_eq(eng_gguf_f32(g, "f64", &f), 0);
    ck_assert(f == 1e-5f);
    static const char *const no_float[] = {"f64huge", "nan", "f64inf", "u32", "string", "f32s"};
    for (size_t i = 0; i < sizeof no_float / sizeof *no_float; i++)
        ck_assert_msg(eng_gguf_f32(g, no_float[i], &f) == -EINVAL, "%s", no_float[i]);
    ck_assert(f == 1e-5f);
    ck_assert_int_eq(eng_gguf_bool(g, "yes", &yes), 0);
    ck_assert(yes);
    ck_assert_int_eq(eng_gguf_bool(g, "maybe", &yes), -EINVAL);
    ck_assert_int_eq(eng_gguf_bool(g, "u8", &yes), -EINVAL);
    ck_assert_int_eq(eng_gguf_bool(g, "no", &yes), 0);
    ck_assert(!yes);
    ck_assert_int_eq(eng_gguf_str(g, "string", &s), 0);
    ck_assert(s.n == 6 && !memcmp(s.s, "h\xc3\xa9llo", 6));
    ck_assert_int_eq(eng_gguf_str(g, "nothing", &s), 0);
    ck_assert_uint_eq(s.n, 0);
    ck_assert_int_eq(eng_gguf_str(g, "strings", &s), -EINVAL);
    ck_assert_int_eq(eng_gguf_str(g, "strin", &s), -ENOENT);
    ck_assert_uint_eq(eng_gguf_size(g), n);
    eng_gguf_close(g);
    free(b);
}
END_TEST

START_TEST(test_arrays)
{
    size_t n, k = 99;
    uint8_t *b = sample(3, &n);
    eng_gguf *g = open_ok(b, n);
    eng_str *s = NULL;
    int32_t *i = NULL;
    float *f = NULL;
    ck_assert_int_eq(eng_gguf_str_array(g, "strings", &s, &k), 0);
    ck_assert(k == 3 && s[0].n == 1 && s[0].s[0] == 'a' && s[1].n == 0 && s[2].n == 3 && !memcmp(s[2].s, "ccc", 3));
    free(s);
    ck_assert_int_eq(eng_gguf_i32_array(g, "i32s", &i, &k), 0);
    ck_assert(k == 2 && i[0] == -5 && i[1] == 6);
    free(i);
    ck_assert_int_eq(eng_gguf_i32_array(g, "u16s", &i, &k), 0);
    ck_assert(k == 2 && i[0] == 65535 && i[1] == 1);
    free(i);
    ck_assert_int_eq(eng_gguf_f32_array(g, "f32s", &f, &k), 0);
    ck_assert(k == 2 && f[0] == -1 && f[1] == 2);
    free(f);
    ck_assert_int_eq(eng_gguf_f32_array(g, "f64s", &f, &k), 0);
    ck_assert(k == 1 && f[0] == 0.5f);
    free(f);
    ck_assert_int_eq(eng_gguf_i32_array(g, "empty", &i, &k), 0);
    ck_assert_uint_eq(k, 0);
    free(i);
    k = 99;
    i = NULL;
    ck_assert_int_eq(eng_gguf_i32_array(g, "u32s", &i, &k), -EINVAL); /* 3e9 does not fit */
    ck_assert_int_eq(eng_gguf_i32_array(g, "u64s", &i, &k), -EINVAL); /* nor is it -1 */
    ck_assert_int_eq(eng_gguf_i32_array(g, "strings", &i, &k), -EINVAL);
    ck_assert_int_eq(eng_gguf_i32_array(g, "i32", &i, &k), -EINVAL);
    ck_assert_int_eq(eng_gguf_i32_array(g, "absent", &i, &k), -ENOENT);
    ck_assert_int_eq(eng_gguf_f32_array(g, "nans", &f, &k), -EINVAL);
    ck_assert_int_eq(eng_gguf_f32_array(g, "i32s", &f, &k), -EINVAL);
    ck_assert_int_eq(eng_gguf_str_array(g, "i32s", &s, &k), -EINVAL);
    ck_assert_int_eq(eng_gguf_str_array(g, "string", &s, &k), -EINVAL);
    ck_assert(k == 99 && !i);
    eng_gguf_close(g);
    free(b);
}
END_TEST

START_TEST(test_tensors)
{
    for (uint32_t version = 2; version <= 3; version++) {
        size_t n;
        uint8_t *b = sample(version, &n);
        eng_gguf *g = open_ok(b, n);
        ck_assert_uint_eq(eng_gguf_n_tensors(g), 2);
        ck_assert_ptr_null(eng_gguf_tensor_at(g, 2));
        ck_assert_ptr_null(eng_gguf_tensor(g, "third"));
        const eng_tensor *q = eng_gguf_tensor(g, "first"), *f = eng_gguf_tensor(g, "second");
        ck_assert_ptr_eq(q, eng_gguf_tensor_at(g, 0));
        ck_assert_ptr_eq(f, eng_gguf_tensor_at(g, 1));
        ck_assert(q->type == ENG_Q8_0 && q->n_dims == 2 && q->dims[0] == 64 && q->dims[1] == 2 && q->dims[2] == 1 && q->dims[3] == 1);
        ck_assert(q->row_bytes == 68 && q->bytes == 136 && ((const uint8_t *)q->data)[135] == 135);
        ck_assert(f->type == ENG_F32 && f->bytes == 12 && ((const float *)f->data)[2] == 3);
        eng_gguf_close(g);
        free(b);
    }
}
END_TEST

/* A file cut anywhere is refused, and so is the error's sentence there; a sanitizer sees a byte read past the cut. */
START_TEST(test_truncated_everywhere)
{
    size_t n;
    uint8_t *b = sample(3, &n);
    for (size_t k = 0; k < n; k++) {
        uint8_t *cut = malloc(k ? k : 1);
        memcpy(cut, b, k);
        refused(cut, k, "");
        ck_assert_uint_gt(strlen(err), 10);
        free(cut);
    }
    free(b);
}
END_TEST

/* Any byte changed to anything: refused with a sentence, or a file whose every part can be looked at. */
START_TEST(test_mutations)
{
    size_t n, opened = 0;
    uint8_t *b = sample(3, &n), *m = malloc(n);
    t_rng r = t_seed(1);
    for (int round = 0; round < 30000; round++) {
        memcpy(m, b, n);
        for (uint64_t k = t_u64(&r) % 3 + 1; k; k--)
            m[t_u64(&r) % n] = t_u64(&r) & 1 ? (uint8_t)t_u64(&r) : (uint8_t)(255 * (t_u64(&r) & 1));
        eng_gguf *g = NULL;
        err[0] = 0;
        int rc = eng_gguf_open_memory(m, n, &g, err, sizeof err);
        ck_assert(rc ? !g && err[0] : g != NULL);
        if (rc)
            continue;
        opened++;
        uint32_t sum = 0;
        for (size_t i = 0; i < eng_gguf_n_tensors(g); i++) {
            const eng_tensor *t = eng_gguf_tensor_at(g, i);
            for (size_t j = 0; j < t->bytes; j++)
                sum += ((const uint8_t *)t->data)[j];
        }
        eng_str *s;
        size_t k;
        if (!eng_gguf_str_array(g, "strings", &s, &k)) {
            for (size_t i = 0; i < k; i++)
                for (size_t j = 0; j < s[i].n; j++)
                    sum += (uint8_t)s[i].s[j];
            free(s);
        }
        int32_t *ints;
        if (!eng_gguf_i32_array(g, "i32s", &ints, &k))
            free(ints);
        ck_assert(eng_gguf_fingerprint(g) + sum != 1);
        eng_gguf_close(g);
    }
    ck_assert_uint_gt(opened, 100);
    free(m);
    free(b);
}
END_TEST

START_TEST(test_refusals)
{
    static const struct {
        uint32_t type;
        const char *word;
    } types[] = {{16, "blk.0.attn_q.weight has type IQ2_XXS, which is not supported"},
                 {26, "type I32"},
                 {4, "type 4, which is unknown"},
                 {1000, "type 1000, which is unknown"}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        w_gguf w = {0};
        w_tensor(&w, "blk.0.attn_q.weight", types[i].type, 2, (uint64_t[]){256, 1}, NULL, 4096);
        refuse_writer(&w, types[i].word);
    }
    w_gguf w = {0};
    w_key_u32(&w, "twin", 1);
    w_key_str(&w, "other", "x");
    w_key_u32(&w, "twin", 1);
    refuse_writer(&w, "twin is there twice");
    for (int i = 0; i < 2; i++)
        w_tensor(&w, "twin", 0, 1, (uint64_t[]){8}, NULL, 32);
    refuse_writer(&w, "twin is there twice");
    w_tensor(&w, "wide", 0, 1, (uint64_t[]){9}, NULL, 32); /* its 36 bytes reach into the next one's */
    w_tensor(&w, "next", 0, 1, (uint64_t[]){8}, NULL, 32);
    refuse_writer(&w, "wide and next overlap");
    w_tensor(&w, "product", 0, 3, (uint64_t[]){1ull << 31, 1ull << 31, 4}, NULL, 32);
    refuse_writer(&w, "product");
    w_tensor(&w, "bytes", 0, 4, (uint64_t[]){1, 1, 1ull << 62, 1}, NULL, 32);
    refuse_writer(&w, "bytes");
    w_tensor(&w, "short", 0, 1, (uint64_t[]){9}, NULL, 35);
    refuse_writer(&w, "short");
    w_tensor(&w, "name\xff", 0, 1, (uint64_t[]){1}, NULL, 4);
    refuse_writer(&w, "name?");
    w_tensor(&w, "0123456789012345678901234567890123456789012345678901234567890123x", 0, 1, (uint64_t[]){1}, NULL, 4);
    refuse_writer(&w, "65 bytes");
    w_key_u32(&w, "general.alignment", 4);
    refuse_writer(&w, "general.alignment");
    w_key(&w, "general.alignment", W_I64, &(int64_t){-32}, 8);
    refuse_writer(&w, "general.alignment");
}
END_TEST

/* What comes from the file cannot act on the terminal or log it is shown in. */
START_TEST(test_hostile_names_in_errors)
{
    w_gguf w = {0};
    char key[400] = "\x1b[31mred\nline\xc2\x9b\xe2\x80\xae";
    memset(key + strlen(key), 'x', sizeof key - 1 - strlen(key));
    w_key(&w, key, 99, "", 1);
    refuse_writer(&w, "?[31mred?line??xxx");
    ck_assert_ptr_nonnull(strstr(err, "xxx... has"));
    for (const char *p = err; *p; p++)
        ck_assert_int_ge((unsigned char)*p, 0x20);
    eng_gguf *g = NULL;
    char tiny[5] = "....";
    ck_assert_int_eq(eng_gguf_open_memory("GGML", 4, &g, tiny, sizeof tiny), -EINVAL);
    ck_assert_uint_eq(strlen(tiny), 4);
    ck_assert_int_eq(eng_gguf_open_memory("GGML", 4, &g, NULL, 0), -EINVAL);
}
END_TEST

/* Error sentences when nothing of the file can be read. */
START_TEST(test_paths)
{
    eng_gguf *g = NULL;
    ck_assert_int_eq(eng_gguf_open(t_path("no such file.gguf"), &g, err, sizeof err), -ENOENT);
    ck_assert_ptr_nonnull(strstr(err, "No such file"));
    ck_assert_int_eq(eng_gguf_open(t_path("golden"), &g, err, sizeof err), -EINVAL);
    ck_assert_ptr_nonnull(strstr(err, "directory"));
    ck_assert_int_lt(eng_gguf_open("/dev/zero", &g, err, sizeof err), 0);
    ck_assert_ptr_nonnull(strstr(err, "not a file"));
    char fifo[] = "/tmp/retrievald-fifo-XXXXXX";
    ck_assert_ptr_nonnull(mkdtemp(fifo));
    char path[64];
    snprintf(path, sizeof path, "%s/f", fifo);
    ck_assert_int_eq(mkfifo(path, 0600), 0);
    ck_assert_int_lt(eng_gguf_open(path, &g, err, sizeof err), 0); /* and does not wait for a writer */
    unlink(path);
    rmdir(fifo);
    ck_assert_ptr_null(g);
}
END_TEST

static uint64_t fingerprint(const uint8_t *b, size_t n)
{
    eng_gguf *g = open_ok(b, n);
    uint64_t f = eng_gguf_fingerprint(g);
    eng_gguf_close(g);
    return f;
}

START_TEST(test_fingerprint)
{
    size_t n;
    w_gguf w = {0};
    w_key_str(&w, "name", "abc");
    for (int i = 0; i < 100; i++) {
        char name[32];
        snprintf(name, sizeof name, "tensor.%d", i);
        w_tensor(&w, name, 0, 1, (uint64_t[]){5000}, NULL, 20000);
    }
    uint8_t *b = w_finish(&w, &n);
    eng_gguf *g = open_ok(b, n);
    uint64_t f = eng_gguf_fingerprint(g);
    const uint8_t *first = eng_gguf_tensor_at(g, 0)->data, *last = eng_gguf_tensor_at(g, 99)->data;
    size_t places[] = {24 + 8 + 4 + 4 + 8, /* the value "abc" */
                       (size_t)(first - b), (size_t)(first - b) + 19999, (size_t)(last - b), (size_t)(last - b) + 19999};
    eng_gguf_close(g);
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        b[places[i]] ^= 1;
        ck_assert_uint_ne(fingerprint(b, n), f);
        b[places[i]] ^= 1;
    }
    ck_assert_uint_eq(fingerprint(b, n), f);
    b = realloc(b, n + 1); /* bytes after the data count by their number */
    b[n] = 0;
    ck_assert_uint_ne(fingerprint(b, n + 1), f);
    free(b);
}
END_TEST

START_TEST(test_mapped)
{
    size_t n;
    char path[64];
    uint8_t *b = sample(3, &n);
    int fd = w_file(b, n, path);
    eng_gguf *g = NULL;
    ck_assert_int_eq(eng_gguf_open(path, &g, err, sizeof err), 0);
    ck_assert_uint_eq(eng_gguf_fingerprint(g), fingerprint(b, n));
    ck_assert_uint_eq((uintptr_t)eng_gguf_tensor(g, "second")->data % 32, 0);
    eng_gguf_close(g);
    eng_gguf_close(NULL);
    close(fd);
    free(b);
}
END_TEST

/* A copy takes the place of the mapping: what is done to the file afterwards is not seen. */
START_TEST(test_settled)
{
    enum { BIG = (21 << 20) + 12344 };
    size_t n;
    char path[64];
    w_gguf w = {0};
    uint8_t *data = malloc(BIG);
    ck_assert_ptr_nonnull(data);
    for (size_t i = 0; i < BIG; i++)
        data[i] = (uint8_t)(i * 2654435761u >> 13);
    w_tensor(&w, "big", 0, 1, (uint64_t[]){BIG / 4}, data, BIG);
    w_tensor(&w, "last", 0, 1, (uint64_t[]){1}, "abcd", 4);
    uint8_t *b = w_finish(&w, &n);
    eng_gguf *g = NULL;
    int fd = w_file(b, n, path);
    ck_assert_int_eq(eng_gguf_open(path, &g, err, sizeof err), 0);
    const uint8_t *big = eng_gguf_tensor(g, "big")->data, *last = eng_gguf_tensor(g, "last")->data;
    size_t pieces = eng_gguf_n_pieces(g), settled = 0;
    ck_assert_uint_ge(pieces, 2);
    for (size_t i = pieces; i-- > 0;) {
        settled += eng_gguf_settle(g, i);
        ck_assert(!memcmp(big, data, BIG) && !memcmp(last, "abcd", 4));
    }
    ck_assert(!eng_gguf_settle(g, pieces));
    if (settled == pieces) { /* not where the system has no huge pages at all */
        memset(b, 0, n);
        ck_assert_int_eq(pwrite(fd, b, n, 0), (ssize_t)n);
        ck_assert(!memcmp(big, data, BIG) && !memcmp(last, "abcd", 4));
    }
    eng_gguf_close(g);
    close(fd);
    free(data);
    free(b);
}
END_TEST

/* The real file, as the `gguf` Python package reads it. */
START_TEST(test_smollm2)
{
    if (!t_smollm2()) {
        puts("skipped: RETRIEVALD_SMOLLM2 is not set");
        return;
    }
    eng_gguf *g = NULL;
    ck_assert_msg(eng_gguf_open(t_smollm2(), &g, err, sizeof err) == 0, "%s", err);
    ck_assert_uint_eq(eng_gguf_n_tensors(g), 272);
    const eng_tensor *t = eng_gguf_tensor(g, "blk.0.attn_k.weight");
    ck_assert(t && t->type == ENG_Q4_1 && t->dims[0] == 576 && t->dims[1] == 192);
    const eng_tensor *embd = eng_gguf_tensor_at(g, 0);
    ck_assert(embd->type == ENG_Q8_0 && embd->dims[1] == 49152);
    ck_assert_int_eq((const char *)t->data - (const char *)embd->data, 33530176 - 1785664);
    eng_str *tokens;
    size_t n;
    ck_assert_int_eq(eng_gguf_str_array(g, "tokenizer.ggml.tokens", &tokens, &n), 0);
    ck_assert(n == 49152 && tokens[1].n == 12 && !memcmp(tokens[1].s, "<|im_start|>", 12));
    free(tokens);
    eng_gguf_close(g);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("gguf");
    TCase *c = tcase_create("gguf");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, test_scalars);
    tcase_add_test(c, test_arrays);
    tcase_add_test(c, test_tensors);
    tcase_add_test(c, test_truncated_everywhere);
    tcase_add_test(c, test_mutations);
    tcase_add_test(c, test_refusals);
    tcase_add_test(c, test_hostile_names_in_errors);
    tcase_add_test(c, test_paths);
    tcase_add_test(c, test_fingerprint);
    tcase_add_test(c, test_mapped);
    tcase_add_test(c, test_settled);
    tcase_add_test(c, test_smollm2);
    suite_add_tcase(s, c);
    return t_run(s);
}
