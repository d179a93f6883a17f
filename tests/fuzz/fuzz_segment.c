/* libFuzzer's entry: a damaged segment file. The bytes are what was done to a good one, as in fuzz_index:
 *
 *   byte 0: 1: checksums are made anew over the damage, as somebody would who wants to be believed; 2: the file ends early, where bytes 1 to 3 say;
 *   then 8 bytes an edit: u24 place (in words of 4 bytes, modulo the file's), u8 unused, u32 the word to put there.
 *
 * The good one has every kind of index, and kept queries. It is opened, verified and loaded, and refused for a reason that has a name, or else read to its last
 * byte, and its indexes are searched. Reads outside are the sanitizer's to see. Built and run as fuzz_model is.
 */
#include "index_work.h"
#include "segment_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { N = 1100, M = 120, TABLE = 256, BLOCK = 1 << 20 };

static const eng_kv_shape shape = {1, 2, 2, 8, ENG_KV_F16, ENG_KV_F16, 16, 16, NULL};
static const eng_segment_owner owner = {.fingerprint = 77, .shape = &shape};
static eng_pool *pool;
static int32_t ids[N];
static uint8_t *good, *bad;
static size_t n_good;
static int dir = -1;
static volatile uint64_t read_sum; /* what is read must be there to read */

static void need(bool good_so_far, const char *what)
{
    if (good_so_far)
        return;
    fprintf(stderr, "fuzz_segment: %s\n", what);
    abort();
}

static eng_segment *make_segment(void)
{
    eng_segment *s;
    eng_index_work *w;
    need(eng_segment_new(&shape, NULL, 0, N, true, &s) == 0, "memory");
    s->n = N;
    for (uint32_t i = 0; i < N; i++)
        s->ids[i] = ids[i] = (int32_t)(i * 7919 % 50000);
    for (size_t i = 0; i < s->kv_bytes / 2; i++)
        ((uint16_t *)(void *)s->kv)[i] = (uint16_t)(0x3400 | (i * 2654435761u >> 20 & 0x83ff)); /* f16 of magnitude 1/4 to 1/2 */
    s->wants = ENG_WANT_CLUSTER | ENG_WANT_IVF | ENG_WANT_GRAPH;
    need(eng_segment_alloc_queries(s, M) == 0, "memory");
    for (size_t i = 0; i < (size_t)shape.n_head_kv * M * shape.group * shape.head_dim; i++)
        s->queries[i] = (uint16_t)(0x3400 | (i * 2246822519u >> 20 & 0x83ff));
    for (; s->m < M; s->m++)
        s->query_row[s->m] = (s->m + 1) * N / M;
    need(eng_index_work_new(pool, &w) == 0 && eng_index_work_add(w, s) == 0, "memory");
    while (eng_index_work_run(w, UINT64_MAX, NULL))
        ;
    need(eng_segment_coded(s) && eng_segment_has(s, s->ivf) && eng_segment_estimates_graphs(s) && s->kept, "no indexes");
    eng_index_work_free(w);
    return s;
}

static void put(const uint8_t *bytes, size_t n)
{
    int fd = openat(dir, "x.seg", O_WRONLY | O_CREAT | O_TRUNC, 0600);
    need(fd >= 0 && write(fd, bytes, n) == (ssize_t)n, "the file cannot be written");
    close(fd);
}

static void setup(void)
{
    char path[] = "/dev/shm/fuzz-segment.XXXXXX";
    need(eng_pool_new(1, &pool) == 0 && mkdtemp(path) && (dir = open(path, O_RDONLY | O_DIRECTORY)) >= 0, "no folder");
    eng_segment *s = make_segment();
    unsigned parts = eng_segment_storable(s);
    eng_segment_head head = eng_segment_head_of(&owner, s, parts);
    head.id = eng_segment_id_of(&head, ids);
    int fd = openat(dir, "x.seg", O_RDWR | O_CREAT, 0600);
    need(fd >= 0 && eng_segment_write(fd, &head, s, parts) == 0, "no good file");
    n_good = head.bytes;
    good = malloc(n_good);
    bad = malloc(n_good);
    need(good && bad && pread(fd, good, n_good, 0) == (ssize_t)n_good, "memory");
    close(fd);
    eng_segment_unref(s);
}

static void sign(uint8_t *bytes, size_t size)
{
    uint32_t head_bytes, n_sections;
    uint64_t zero = 0, h;
    memcpy(&head_bytes, bytes + 12, 4);
    memcpy(&n_sections, bytes + 104, 4);
    if (head_bytes > size || n_sections > 100)
        return;
    uint8_t *sum = bytes + TABLE + 32 * n_sections;
    for (uint32_t i = 0; i < n_sections; i++) {
        uint64_t at, n;
        memcpy(&at, bytes + TABLE + 32 * i + 8, 8);
        memcpy(&n, bytes + TABLE + 32 * i + 16, 8);
        for (uint64_t b = 0; at < size && n <= size - at && b < n && sum + 8 <= bytes + head_bytes; b += BLOCK, sum += 8) {
            h = XXH3_64bits(bytes + at + b, n - b < BLOCK ? n - b : BLOCK);
            memcpy(sum, &h, 8);
        }
    }
    memcpy(bytes + 248, &zero, 8);
    h = XXH3_64bits(bytes, head_bytes);
    memcpy(bytes + 248, &h, 8);
}

/* Reads all of an index's arena, and searches it. */
static uint64_t search(const eng_segment *s, uint32_t head, const idx_index *ix)
{
    static idx_scratch *scratch;
    static const float q[2 * 8] = {1, -1, 2, 0.5f, 3, -2, 1, 1, 0, 1, 0, -1, 0, 4, 0, 1};
    need(scratch || idx_scratch_new(N, shape.head_dim, shape.group, 100, &scratch) == 0, "memory");
    idx_rows keys = {eng_segment_k(s, 0, head, 0), shape.row_k, N, shape.head_dim, IDX_F16};
    idx_query query = {.q = q, .group = shape.group, .hi = N, .scale = 1, .budget = {.top_k = 100}};
    idx_hits *hits;
    need(idx_search(ix, &keys, &query, scratch, &hits, NULL) == 0 && hits[0].n <= 100, "no search of a checked index");
    size_t n;
    const uint8_t *p = idx_arena(ix, &n);
    uint64_t sum = hits[0].n ? hits[0].ids[0] : 0;
    for (size_t k = 0; k < n; k++)
        sum += p[k];
    return sum;
}

static void read_all(const eng_segment *s)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < s->kv_bytes; i++)
        sum += s->kv[i];
    idx_index **const all[] = {s->codes, s->cluster, s->ivf, s->index};
    for (uint32_t i = 0; i < 4 * shape.n_head_kv; i++)
        if (all[i / shape.n_head_kv][i % shape.n_head_kv])
            sum += search(s, i % shape.n_head_kv, all[i / shape.n_head_kv][i % shape.n_head_kv]);
    for (uint32_t i = 0; i < s->m * shape.n_head_kv; i++) {
        uint16_t q[2 * 8];
        eng_segment_load_query(s, 0, i / s->m, i % s->m, q);
        sum += q[0] + s->query_row[i % s->m];
    }
    for (uint32_t i = 0; i < shape.n_head_kv * N; i++)
        sum += s->members[i / N] ? s->members[i / N][i % N] : 0;
    read_sum = sum;
}

static void try_file(void)
{
    char err[256] = "";
    eng_segment_file *f;
    eng_segment *s;
    eng_segment_load *l;
    uint64_t end_ns;
    int32_t *own;
    eng_segment_reader reader = {.pool = pool};
    eng_miss why = eng_segment_file_open(dir, "x.seg", &f, err, sizeof err);
    if (why) {
        need(why < ENG_MISS_COUNT && err[0], "refused without a reason");
        return;
    }
    eng_segment_file_verify(f, err, sizeof err);
    if (eng_segment_file_ids(f, &own, err, sizeof err) == ENG_MISS_NONE) {
        if (eng_segment_load_begin(f, &owner, own, &reader, NULL, &l, &s, err, sizeof err) == ENG_MISS_NONE) {
            bool await = eng_segment_load_await(l, owner.shape->n_layer), rows;
            why = eng_segment_load_end(l, &rows, &end_ns, err, sizeof err);
            need(rows == await && (rows || why), "rows that are damaged were there");
            if (rows)
                read_all(s);
            eng_segment_unref(s);
        }
        free(own);
    }
    eng_segment_file_close(f);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!good)
        setup();
    if (size < 4)
        return 0;
    size_t n = data[0] & 2 ? (data[1] | (size_t)data[2] << 8 | (size_t)data[3] << 16) % n_good : n_good;
    memcpy(bad, good, n_good);
    for (const uint8_t *p = data + 4; p + 8 <= data + size; p += 8)
        memcpy(bad + 4 * ((p[0] | (size_t)p[1] << 8 | (size_t)p[2] << 16) % (n_good / 4)), p + 4, 4);
    if (data[0] & 1)
        sign(bad, n);
    put(bad, n);
    try_file();
    return 0;
}
