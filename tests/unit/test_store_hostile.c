/* Segment files that are not what they should be: each costs a counted miss with the right reason, is removed, and can be written again. */
#include "stores.h"

#include "index_work.h"
#include "quant.h"

#include <fcntl.h>
#include <signal.h>
#include <xxhash.h>

enum { N = 1100, TABLE = 256, MISS_ANY = -1 };

static int32_t ids[N];
static eng_segment *root;
static char file[200];
static char *good; /* the file as it should be */
static size_t n_good;

/* A store with one coded segment. */
static void setup(t_store *t)
{
    *t = t_store_new((uint64_t)1 << 30);
    t_store_open(t, (uint64_t)1 << 30);
    for (int32_t i = 0; i < N; i++)
        ids[i] = i * 37 % 1000;
    root = segment(NULL, 0, ids, N, true);
    eng_index_work *w;
    ck_assert_int_eq(eng_index_work_new(t->pool, &w), 0);
    ck_assert_int_eq(eng_index_work_add(w, root), 0);
    while (eng_index_work_run(w, UINT64_MAX, NULL))
        ;
    eng_index_work_free(w);
    ck_assert_int_eq(eng_store_save(t->store, root), 0);
    eng_store_flush(t->store);
    t_store_path(t, &root->id, file, sizeof file);
    good = t_read(file, &n_good);
}

static void teardown(t_store *t)
{
    eng_segment_unref(root);
    free(good);
    t_store_done(t);
}

static void put(const char *bytes, size_t n)
{
    int fd = open(file, O_WRONLY | O_TRUNC | O_CREAT, 0600);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(write(fd, bytes, n), (ssize_t)n);
    close(fd);
}

/* What is in the place of the file now is a miss for this reason; then it is gone, the segment is written again, and found. */
static void check_miss(t_store *t, int why, const char *what)
{
    eng_disk_stats before = t_store_stats(t), after;
    t->log[0] = 0;
    ck_assert_msg(t_store_read(t, ids, N, true) == 0, "%s: read all the same", what);
    eng_store_flush(t->store);
    after = t_store_stats(t);
    uint64_t counted = 0;
    for (int i = ENG_MISS_GONE; i < ENG_MISS_COUNT; i++)
        counted += after.misses[i] - before.misses[i];
    ck_assert_msg(counted == 1, "%s: %llu misses counted", what, (unsigned long long)counted);
    ck_assert_msg(why == MISS_ANY || after.misses[why] == before.misses[why] + 1, "%s: not for the reason '%s' but: %s", what,
                  eng_miss_name((eng_miss)why), t->log);
    ck_assert_ptr_nonnull(strstr(t->log, why == MISS_ANY ? "cannot be used" : eng_miss_name((eng_miss)why)));
    struct stat st;
    ck_assert_msg(lstat(file, &st) < 0 && errno == ENOENT, "%s: still there", what);
    ck_assert_int_eq(eng_store_save(t->store, root), 0);
    eng_store_flush(t->store);
    ck_assert_msg(t_store_read(t, ids, N, true) == N, "%s: not written again", what);
}

/* Checksums over a changed head or body, as somebody would make them who wants to be believed. */
static void sign(char *bytes)
{
    uint32_t head_bytes, n_sections;
    uint64_t zero = 0;
    memcpy(&head_bytes, bytes + 12, 4);
    memcpy(&n_sections, bytes + 104, 4);
    if (head_bytes > n_good || n_sections > 100)
        return;
    char *sum = bytes + TABLE + 32 * n_sections;
    for (uint32_t i = 0; i < n_sections; i++) {
        uint64_t at, n;
        memcpy(&at, bytes + TABLE + 32 * i + 8, 8);
        memcpy(&n, bytes + TABLE + 32 * i + 16, 8);
        for (uint64_t b = 0; at < n_good && n <= n_good - at && b < n && sum + 8 <= bytes + head_bytes; b += 1 << 20, sum += 8) {
            uint64_t h = XXH3_64bits(bytes + at + b, n - b < 1 << 20 ? n - b : 1 << 20);
            memcpy(sum, &h, 8);
        }
    }
    memcpy(bytes + 248, &zero, 8);
    uint64_t h = XXH3_64bits(bytes, head_bytes);
    memcpy(bytes + 248, &h, 8);
}

static char *copy(void)
{
    char *c = malloc(n_good);
    memcpy(c, good, n_good);
    return c;
}

START_TEST(flipped_bits)
{
    t_rng r = t_seed(41);
    t_store t;
    setup(&t);
    uint32_t head_bytes;
    memcpy(&head_bytes, good + 12, 4);
    for (uint32_t at = 0; at < head_bytes; at += at < 128 ? 1 : 1 + (uint32_t)(t_u64(&r) % 16)) {
        char *bad = copy(), what[40];
        bad[at] ^= (char)(1 << t_u64(&r) % 8);
        snprintf(what, sizeof what, "byte %u of the head", at);
        put(bad, n_good);
        check_miss(&t, MISS_ANY, what);
        free(bad);
    }
    uint32_t n_sections;
    memcpy(&n_sections, good + 104, 4);
    ck_assert_uint_eq(n_sections, 6);
    for (uint32_t i = 0; i < n_sections; i++) {
        uint64_t at, n;
        memcpy(&at, good + TABLE + 32 * i + 8, 8);
        memcpy(&n, good + TABLE + 32 * i + 16, 8);
        for (int round = 0; round < 3; round++) {
            char *bad = copy();
            bad[at + t_u64(&r) % n] ^= (char)(1 << t_u64(&r) % 8);
            put(bad, n_good);
            check_miss(&t, ENG_MISS_CHECKSUM, "a section");
            free(bad);
        }
    }
    teardown(&t);
}
END_TEST

/* Values that somebody chose, under right checksums. */
START_TEST(chosen_values)
{
    static const struct {
        const char *name;
        uint32_t at, bytes;
        int why;
        uint64_t values[3];
    } fields[] = {
        {"version", 8, 4, ENG_MISS_VERSION, {0, 2, UINT32_MAX}},
        {"version", 8, 4, ENG_MISS_HEADER, {3, 3, 3}}, /* which has more than codes */
        {"head bytes", 12, 4, ENG_MISS_HEADER, {0, 255, 1 << 20}},
        {"id", 16, 8, ENG_MISS_TOKENS, {0, 1, UINT64_MAX}},
        {"parent", 32, 8, ENG_MISS_TOKENS, {1, 2, UINT64_MAX}},
        {"tenant", 48, 8, ENG_MISS_TOKENS, {1, 2, UINT64_MAX}},
        {"fingerprint", 56, 8, ENG_MISS_MODEL, {0, 78, UINT64_MAX}},
        {"start", 64, 4, MISS_ANY, {1, 1 << 20, UINT32_MAX}},
        {"n", 68, 4, ENG_MISS_HEADER, {0, 1, UINT32_MAX}},
        {"layers", 72, 4, ENG_MISS_HEADER, {0, 1, UINT32_MAX}},
        {"heads", 76, 4, ENG_MISS_HEADER, {0, 4, UINT32_MAX}},
        {"dimensions", 80, 4, ENG_MISS_HEADER, {0, 32, UINT32_MAX}},
        {"type of keys", 84, 4, MISS_ANY, {0, 2, UINT32_MAX}}, /* bf16: as large as f16 */
        {"type of values", 88, 4, MISS_ANY, {0, 2, UINT32_MAX}},
        {"exact", 92, 4, MISS_ANY, {0, 2, UINT32_MAX}},
        {"file bytes", 96, 8, ENG_MISS_SIZE, {0, 1, UINT64_MAX}},
        {"sections", 104, 4, ENG_MISS_HEADER, {0, 1, UINT32_MAX}},
        {"checksums", 108, 4, ENG_MISS_HEADER, {0, 1, UINT32_MAX}},
        {"reserved", 120, 8, ENG_MISS_HEADER, {1, 2, UINT64_MAX}},
        {"kind of the ids", TABLE, 4, ENG_MISS_HEADER, {0, 2, UINT32_MAX}},
        {"bytes of the ids", TABLE + 16, 8, ENG_MISS_HEADER, {0, 4, UINT64_MAX}},
        {"offset of the keys", TABLE + 32 + 8, 8, ENG_MISS_HEADER, {0, 8192 * 100, UINT64_MAX}},
        {"bytes of the keys", TABLE + 32 + 16, 8, ENG_MISS_HEADER, {0, 64, UINT64_MAX}},
        {"kind of codes", TABLE + 64, 4, ENG_MISS_HEADER, {0, 4, UINT32_MAX}},
        {"head of codes", TABLE + 64 + 4, 4, ENG_MISS_HEADER, {4, 3, UINT32_MAX}},
        {"offset of codes", TABLE + 64 + 8, 8, ENG_MISS_HEADER, {0, 64, UINT64_MAX}},
        {"bytes of codes", TABLE + 64 + 16, 8, ENG_MISS_HEADER, {0, 64, UINT64_MAX}},
    };
    t_store t;
    setup(&t);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        for (int k = 0; k < 3; k++) {
            char *bad = copy();
            memcpy(bad + fields[i].at, &fields[i].values[k], fields[i].bytes);
            sign(bad);
            put(bad, n_good);
            check_miss(&t, fields[i].why, fields[i].name);
            free(bad);
        }
    char *bad = copy();
    uint32_t bf16 = ENG_KV_BF16, q8_0 = ENG_KV_Q8_0;
    memcpy(bad + 84, &bf16, 4);
    sign(bad);
    put(bad, n_good);
    check_miss(&t, ENG_MISS_KV_TYPE, "bf16");
    memcpy(bad + 84, &q8_0, 4); /* which version 1 does not have */
    sign(bad);
    put(bad, n_good);
    check_miss(&t, ENG_MISS_VERSION, "q8_0 in version 1");
    free(bad);
    /* ids, and codes that do not hold together */
    for (int i = 0; i < 2; i++) {
        uint64_t at;
        bad = copy();
        memcpy(&at, bad + TABLE + 64 * (size_t)i + 8, 8); /* sections 0 and 2 */
        memset(bad + at + (i ? 64 + 64 : 0), 0xff, 64);   /* of codes: where clusters begin */
        sign(bad);
        put(bad, n_good);
        check_miss(&t, i ? ENG_MISS_INDEX : ENG_MISS_TOKENS, i ? "codes" : "ids");
        free(bad);
    }
    teardown(&t);
}
END_TEST

START_TEST(not_such_a_file)
{
    t_store t;
    setup(&t);
    char other[220];
    static const size_t cuts[] = {0, 1, 255, 256, 400, 4096, 100000};
    for (size_t i = 0; i < sizeof cuts / sizeof *cuts; i++) {
        put(good, cuts[i]);
        check_miss(&t, ENG_MISS_SIZE, "cut");
    }
    put(good, n_good);
    FILE *f = fopen(file, "ab");
    fputc(0, f);
    fclose(f);
    check_miss(&t, ENG_MISS_SIZE, "longer");
    snprintf(other, sizeof other, "%s/elsewhere", t.dir);
    ck_assert_int_eq(rename(file, other), 0);
    ck_assert_int_eq(symlink(other, file), 0); /* to what would be right */
    check_miss(&t, ENG_MISS_KIND, "a link");
    unlink(file);
    ck_assert_int_eq(mkfifo(file, 0600), 0);
    check_miss(&t, ENG_MISS_KIND, "a FIFO");
    unlink(file);
    ck_assert_int_eq(mkdir(file, 0700), 0);
    check_miss(&t, ENG_MISS_KIND, "a folder");
    unlink(file);
    check_miss(&t, ENG_MISS_GONE, "nothing");
    /* the same at the start */
    for (int i = 0; i < 3; i++) {
        unlink(file);
        if (i == 0)
            ck_assert_int_eq(symlink(other, file), 0);
        else if (i == 1)
            ck_assert_int_eq(mkfifo(file, 0600), 0);
        else
            put(good, n_good - 1);
        t_store_reopen(&t, (uint64_t)1 << 30);
        struct stat st;
        ck_assert(lstat(file, &st) < 0);
        ck_assert_uint_eq(t_store_stats(&t).segments, 0);
        ck_assert_uint_eq(t_store_stats(&t).misses[i < 2 ? ENG_MISS_KIND : ENG_MISS_SIZE], 1);
        ck_assert_int_eq(eng_store_save(t.store, root), 0);
        eng_store_flush(t.store);
        ck_assert_uint_eq(t_store_read(&t, ids, N, true), N);
    }
    teardown(&t);
}
END_TEST

/* Contexts of another model or of other types stay, and are not found; they are found again when their model is back. */
START_TEST(other_models)
{
    t_store t;
    setup(&t);
    eng_kv_shape wide = shape;
    wide.type_v = ENG_KV_F32;
    wide.row_v = 64;
    for (int i = 0; i < 2; i++) {
        eng_store_close(t.store);
        t.store = NULL;
        ck_assert_int_eq(t_store_try(&t, (uint64_t)1 << 30, i ? FINGERPRINT : FINGERPRINT + 1, i ? &wide : &shape), 0);
        ck_assert_uint_eq(t_store_read(&t, ids, N, true), 0);
        ck_assert_uint_eq(t_store_stats(&t).segments, 1);
    }
    t_store_reopen(&t, (uint64_t)1 << 30);
    ck_assert_uint_eq(t_store_read(&t, ids, N, true), N);
    teardown(&t);
}
END_TEST

/* The one segment that holds these tokens, read from its file. */
static eng_segment *load_one_with(t_store *t, const int32_t *tokens, uint32_t n, const eng_segment_reader *reader)
{
    eng_store_chain c = {0};
    eng_segment *s;
    ck_assert_int_eq(t_store_find(t, 0, tokens, n, true, 0, &c), ENG_MISS_NONE);
    ck_assert_uint_eq(c.n, 1);
    eng_miss why = t_store_load(t, &c.links[0].id, reader, NULL, &s);
    ck_assert_msg(!why, "%s", eng_miss_name(why));
    free(c.links);
    return s;
}

static eng_segment *load_one(t_store *t, const int32_t *tokens, uint32_t n)
{
    eng_segment_reader reader = {.pool = t->pool};
    return load_one_with(t, tokens, n, &reader);
}

/* What tests/golden/make/gen_segment.py put into version 3. */
static void check_parts(const eng_segment *s)
{
    static const uint32_t rows[] = {60, 130, 222};
    idx_index **const all[] = {s->codes, s->cluster, s->ivf, s->index};
    static const idx_kind kinds[] = {IDX_FLAT, IDX_CLUSTER, IDX_IVF, IDX_GRAPH};
    ck_assert(eng_segment_coded(s) && eng_segment_has(s, s->ivf) && eng_segment_estimates_graphs(s));
    size_t sum = 0, bytes;
    for (int k = 0; k < 4; k++)
        for (uint32_t i = 0; i < 4; i++) {
            ck_assert_int_eq(idx_kind_of(all[k][i]), kinds[k]);
            idx_arena(all[k][i], &bytes);
            sum += bytes;
        }
    ck_assert_uint_eq(s->index_bytes, sum + 4 * s->n * sizeof(uint32_t)); /* and each row's cluster */
    for (uint32_t i = 0; i < s->n; i++) /* the slot of row 7 slot % 200 is 143 row % 200 */
        for (uint32_t head = 0; head < 4; head++)
            ck_assert(s->members[head][i] * s->n / 7 <= i * 143 % s->n && (s->members[head][i] + 1) * s->n / 7 > i * 143 % s->n);
    ck_assert_uint_eq(s->wants, ENG_WANT_CLUSTER | ENG_WANT_IVF | ENG_WANT_GRAPH);
    ck_assert(s->m == 3 && !memcmp(s->query_row, rows, sizeof rows));
    for (uint32_t head = 0; head < 4; head++)
        for (uint32_t i = 0; i < 3; i++) {
            uint16_t q[2 * 16];
            eng_segment_load_query(s, head / 2, head % 2, i, q);
            for (uint32_t j = 0; j < 2 * 16; j++) {
                uint32_t number = 2 * i + j / 16;
                ck_assert(eng_f16_to_f32(q[j]) == (.5f + (float)number) * ((float)(number + head + j % 16) - 127));
            }
        }
}

/* A store with the golden file of version 3, damaged by its caller. */
static t_store store_with(const char *bytes, size_t n)
{
    char folder_name[120];
    eng_segment_id id;
    t_store t = t_store_new((uint64_t)1 << 30);
    memcpy(&id, bytes + 16, sizeof id);
    t_store_path(&t, &id, file, sizeof file);
    snprintf(folder_name, sizeof folder_name, "%.*s", (int)(strrchr(file, '/') - file), file);
    ck_assert_int_eq(mkdir(folder_name, 0700), 0);
    put(bytes, n);
    ck_assert_int_eq(t_store_try(&t, (uint64_t)1 << 30, FINGERPRINT, &shape), 0);
    return t;
}

/* Damage to each section beside codes, under right checksums where somebody chose it: a miss with its reason, by a load and by a check of the file alone. */
START_TEST(hostile_parts)
{
    enum { GOLDEN = 200, CLUSTER = 6, IVF = 10, GRAPH = 14, ROWS = 18, QUERIES = 19, SECTIONS = 23 };
    static const struct {
        const char *name;
        uint32_t section, at, value;
        bool table; /* of the section's entry in the table, else of the section */
        int why;
    } cases[] = {
        {"kind of index", CLUSTER, 8, 0, false, ENG_MISS_INDEX},
        {"a graph for clusters", CLUSTER, 8, IDX_GRAPH, false, ENG_MISS_INDEX},
        {"lists for clusters", CLUSTER, 8, IDX_IVF, false, ENG_MISS_INDEX},
        {"keys of clusters", CLUSTER + 1, 12, 201, false, ENG_MISS_INDEX},
        {"first slot of a cluster", IVF, 64 + 128 + 4, 200, false, ENG_MISS_INDEX},
        {"a link beyond", GRAPH + 3, 4864 + 8, 13 << 8 | 1, false, ENG_MISS_INDEX},
        {"a node's mean", GRAPH, 320, 0x7fc00000, false, ENG_MISS_INDEX},
        {"a table of links", GRAPH + 2, 256 + 8, 27, false, ENG_MISS_INDEX},
        {"degree", GRAPH + 1, 20, 1, false, ENG_MISS_INDEX},
        {"rows that fall", ROWS, 4, 59, false, ENG_MISS_INDEX},
        {"a row beyond all", ROWS, 8, UINT32_MAX, false, ENG_MISS_INDEX},
        {"kind of a section", GRAPH, 0, 9, true, ENG_MISS_HEADER},
        {"kinds out of order", IVF, 0, 6, true, ENG_MISS_HEADER},
        {"head of a graph", GRAPH + 3, 4, 4, true, ENG_MISS_HEADER},
        {"head of rows", ROWS, 4, 1, true, ENG_MISS_HEADER},
        {"bytes of rows", ROWS, 16, 28, true, ENG_MISS_HEADER},
        {"bytes of queries", QUERIES + 2, 16, 90, true, ENG_MISS_HEADER},
        {"no bytes", QUERIES + 3, 16, 0, true, ENG_MISS_HEADER},
    };
    size_t n;
    char *bytes = t_read(t_path("golden/segments/v3.seg"), &n), reason[256];
    int32_t want[GOLDEN];
    for (int32_t i = 0; i < GOLDEN; i++)
        want[i] = i * 37 % 1000;
    n_good = n;
    for (size_t i = 0; i < sizeof cases / sizeof *cases + SECTIONS; i++) {
        bool chosen = i < sizeof cases / sizeof *cases;
        uint32_t section = chosen ? cases[i].section : (uint32_t)(i - sizeof cases / sizeof *cases);
        uint64_t at;
        char *bad = malloc(n);
        memcpy(bad, bytes, n);
        memcpy(&at, bad + TABLE + 32 * section + 8, 8);
        if (chosen)
            memcpy(bad + (cases[i].table ? TABLE + 32 * section : at) + cases[i].at, &cases[i].value, 4);
        else
            bad[at + 3] ^= 16; /* by accident: the checksum knows */
        if (chosen)
            sign(bad);
        const char *name = chosen ? cases[i].name : "a bit of a section";
        int why = chosen ? cases[i].why : ENG_MISS_CHECKSUM;
        t_store t = store_with(bytes, n); /* a good one while the store opens */
        put(bad, n);
        int fd = open(t.dir, O_RDONLY | O_DIRECTORY);
        eng_segment_file *f;
        int found = (int)eng_segment_file_open(fd, file + strlen(t.dir) + 1, &f, reason, sizeof reason);
        if (!found) {
            found = (int)eng_segment_file_verify(f, reason, sizeof reason);
            eng_segment_file_close(f);
        }
        close(fd);
        ck_assert_msg(found == why, "%s: not '%s' but: %s", name, eng_miss_name((eng_miss)why), found ? reason : "good");
        ck_assert_msg(t_store_read(&t, want, GOLDEN, true) == 0 && t_store_stats(&t).misses[why] == 1, "%s: %s", name, t.log);
        t_store_done(&t);
        free(bad);
    }
    free(bytes);
}
END_TEST

/* What is read behind the caller's back: damaged rows are never waited for in vain, and damage beside them leaves them what they are. */
START_TEST(rows_before_indexes)
{
    enum { KV = 1, ROWS = 18, SECTIONS = 23, GOLDEN = 200 };
    size_t n;
    char *bytes = t_read(t_path("golden/segments/v3.seg"), &n);
    int32_t want[GOLDEN];
    for (int32_t i = 0; i < GOLDEN; i++)
        want[i] = i * 37 % 1000;
    for (uint32_t section = KV; section < SECTIONS; section++) {
        t_store t = store_with(bytes, n);
        eng_store_chain c = {0};
        eng_store_load *l;
        eng_segment *s;
        uint64_t at;
        bool rows;
        char *bad = malloc(n);
        memcpy(bad, bytes, n);
        memcpy(&at, bad + TABLE + 32 * section + 8, 8);
        bad[at + 3] ^= 16;
        put(bad, n);
        eng_segment_reader reader = {.pool = t.pool};
        ck_assert_int_eq(t_store_find(&t, 0, want, GOLDEN, true, 0, &c), ENG_MISS_NONE);
        ck_assert_int_eq(eng_store_load_begin(t.store, &c.links[0].id, &reader, NULL, &l, &s), ENG_MISS_NONE);
        ck_assert_int_eq(eng_segment_load_await(s->load, s->shape->n_layer), section != KV);
        ck_assert_int_eq(eng_store_load_end(t.store, l, &rows), ENG_MISS_CHECKSUM);
        ck_assert(rows == (section != KV) && !s->load);
        if (section > KV && section < ROWS)
            ck_assert(!eng_segment_has(s, (idx_index **[]){s->codes, s->cluster, s->ivf, s->index}[(section - KV - 1) / 4]));
        eng_segment_unref(s);
        free(c.links);
        free(bad);
        t_store_done(&t);
    }
    free(bytes);
}
END_TEST

/* What a reader does not want is not there; nor is what was built for a layer that slides by now, or, of a kind, is not there for all that retrieve. */
START_TEST(parts_of_a_file)
{
    enum { GOLDEN = 200 };
    static const uint32_t slides[] = {0, 64};
    size_t n;
    char *bytes = t_read(t_path("golden/segments/v3.seg"), &n);
    int32_t want[GOLDEN];
    for (int32_t i = 0; i < GOLDEN; i++)
        want[i] = i * 37 % 1000;
    t_store t = store_with(bytes, n);
    eng_segment_reader reader = {.pool = t.pool, .skip = ENG_STORE_CLUSTER | ENG_STORE_QUERIES};
    eng_segment *s = load_one_with(&t, want, GOLDEN, &reader);
    ck_assert(eng_segment_coded(s) && !s->cluster[0] && s->ivf[3] && s->index[1] && !s->members[1] && !s->kept && !s->m);
    eng_segment_unref(s);
    eng_store_close(t.store);
    t.store = NULL;
    eng_kv_shape sliding = shape;
    sliding.window = slides;
    ck_assert_int_eq(t_store_try(&t, (uint64_t)1 << 30, FINGERPRINT, &sliding), 0);
    s = load_one(&t, want, GOLDEN);
    for (uint32_t i = 0; i < 4; i++)
        ck_assert((s->codes[i] != NULL) == (i < 2) && (s->cluster[i] != NULL) == (i < 2) && (s->index[i] != NULL) == (i < 2) && (s->members[i] != NULL) == (i < 2));
    uint16_t q[32];
    ck_assert_uint_eq(s->m, 3);
    eng_segment_load_query(s, 0, 1, 2, q);
    ck_assert(eng_f16_to_f32(q[16]) == 5.5f * (6 - 127));
    eng_segment_unref(s);
    t_store_done(&t);
    free(bytes);
}
END_TEST

/* Files that another program wrote after the documentation of the format: version 1, 2 with keys in q8_0, and 3 with every kind of index and kept queries. */
START_TEST(golden_file)
{
    enum { GOLDEN = 200 };
    static const eng_kv_shape q8_0 = {2, 2, 2, 16, ENG_KV_Q8_0, ENG_KV_F16, 34, 32, NULL};
    static const char *const names[] = {"golden/segments/v1.seg", "golden/segments/v2.seg", "golden/segments/v3.seg"};
    const eng_kv_shape *kv = _i == 1 ? &q8_0 : &shape;
    size_t n;
    char *bytes = t_read(t_path(names[_i]), &n), folder_name[120];
    t_store t = t_store_new((uint64_t)1 << 30);
    int32_t want[GOLDEN];
    for (int32_t i = 0; i < GOLDEN; i++)
        want[i] = i * 37 % 1000;
    eng_segment_id id;
    memcpy(&id, bytes + 16, sizeof id);
    t_store_path(&t, &id, file, sizeof file);
    snprintf(folder_name, sizeof folder_name, "%.*s", (int)(strrchr(file, '/') - file), file);
    ck_assert_int_eq(mkdir(folder_name, 0700), 0);
    put(bytes, n);
    ck_assert_int_eq(t_store_try(&t, (uint64_t)1 << 30, FINGERPRINT, kv), 0);
    ck_assert_str_eq(strstr(t.log, "catalog") ? "" : t.log, "");
    ck_assert_uint_eq(t_store_read(&t, want, GOLDEN, true), GOLDEN);
    /* and ours is the same, but for its time */
    eng_segment *s = _i == 2 ? load_one(&t, want, GOLDEN) : segment_of(kv, NULL, 0, want, GOLDEN, true);
    if (_i == 2)
        check_parts(s);
    t_store other = t_store_new((uint64_t)1 << 30);
    ck_assert_int_eq(t_store_try(&other, (uint64_t)1 << 30, FINGERPRINT, kv), 0);
    ck_assert_int_eq(eng_store_save(other.store, s), 0);
    eng_store_flush(other.store);
    t_store_path(&other, &s->id, file, sizeof file);
    size_t n_ours;
    char *ours = t_read(file, &n_ours);
    ck_assert_uint_eq(n_ours, n);
    memset(ours + 112, 0, 8);
    memset(ours + 248, 0, 8);
    memset(bytes + 112, 0, 8);
    memset(bytes + 248, 0, 8);
    ck_assert_int_eq(memcmp(ours, bytes, n), 0);
    free(ours);
    free(bytes);
    eng_segment_unref(s);
    t_store_done(&other);
    t_store_done(&t);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("store_hostile");
    TCase *c = tcase_create("store_hostile");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, flipped_bits);
    tcase_add_test(c, chosen_values);
    tcase_add_test(c, not_such_a_file);
    tcase_add_test(c, other_models);
    tcase_add_loop_test(c, golden_file, 0, 3);
    tcase_add_test(c, rows_before_indexes);
    tcase_add_test(c, hostile_parts);
    tcase_add_test(c, parts_of_a_file);
    suite_add_tcase(s, c);
    return t_run(s);
}
