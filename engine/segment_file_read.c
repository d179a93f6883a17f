#include "segment_file_private.h"

#include "direct_read.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum {
    MAX_HEADS = 65536,
    MAX_DIM = 65536,
    MAX_TOKENS = 1 << 26,
    PART = 8,    /* blocks of keys and values that are read at once */
    READERS = 4, /* at least, where there is so much to read: who waits for the disk takes no core, and a disk wants more than one request */
};

struct eng_segment_file {
    int fd;
    eng_segment_head head;
    eng_file_stamp stamp;
    uint8_t *bytes; /* the whole head */
    const seg_section *sections;
    const uint64_t *sums;
    uint32_t n_sections;
};

/* ---- opening ----------------------------------------------------------------------------------------------------- */

__attribute__((format(printf, 4, 5))) static eng_miss miss(char *err, size_t errlen, eng_miss why, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(err, errlen, format, args);
    va_end(args);
    return why;
}

static eng_miss read_failed(int r, char *err, size_t errlen)
{
    if (!r)
        return miss(err, errlen, ENG_MISS_SIZE, "the file ends early");
    return miss(err, errlen, ENG_MISS_IO, "cannot be read: %s", strerror(-r));
}

/* 1, or 0: the file ends before that, or -errno. */
static int read_at(int fd, void *p, size_t n, uint64_t offset)
{
    while (n) {
        ssize_t done = pread(fd, p, n, (off_t)offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return done ? -errno : 0;
        p = (uint8_t *)p + done;
        n -= (size_t)done;
        offset += (uint64_t)done;
    }
    return 1;
}

/* The head's own fields, before its size is believed. */
static eng_miss check_fields(const seg_disk_head *h, uint64_t file_bytes, char *err, size_t errlen)
{
    static const uint8_t zero[sizeof h->reserved];
    if (memcmp(h->magic, SEG_MAGIC, sizeof h->magic) != 0)
        return miss(err, errlen, ENG_MISS_HEADER, "not a segment file");
    uint32_t known = seg_version_of(h->type_k, h->type_v, SEG_CODES);
    if (h->version != known && h->version != SEG_VERSION_INDEX)
        return miss(err, errlen, ENG_MISS_VERSION, "version %u of the format; this program knows %u and %u for such keys and values", h->version, known,
                    SEG_VERSION_INDEX);
    if (h->file_bytes != file_bytes)
        return miss(err, errlen, ENG_MISS_SIZE, "%llu bytes, its header says %llu", (unsigned long long)file_bytes,
                    (unsigned long long)h->file_bytes);
    bool ok = h->n && h->n <= MAX_TOKENS && h->start <= MAX_TOKENS && h->n_layer && h->n_head_kv && h->n_layer <= MAX_HEADS &&
              h->n_head_kv <= MAX_HEADS / h->n_layer && h->head_dim && h->head_dim <= MAX_DIM && h->type_k <= ENG_KV_Q8_0 &&
              h->type_v <= ENG_KV_Q8_0 && h->exact <= 1 && !memcmp(h->reserved, zero, sizeof zero);
    if (!ok || h->n_sections < 2 || h->n_sections > seg_max_sections(h->n_layer, h->n_head_kv) ||
        h->head_bytes != sizeof *h + h->n_sections * sizeof(seg_section) + (uint64_t)h->n_blocks * sizeof(uint64_t) || h->head_bytes > file_bytes)
        return miss(err, errlen, ENG_MISS_HEADER, "the header is damaged");
    return ENG_MISS_NONE;
}

static uint64_t kv_bytes(const seg_disk_head *h)
{
    eng_kv_shape s = {.n_layer = h->n_layer, .n_head_kv = h->n_head_kv, .head_dim = h->head_dim,
                      .row_k = eng_kv_row_bytes((eng_kv_type)h->type_k, h->head_dim), .row_v = eng_kv_row_bytes((eng_kv_type)h->type_v, h->head_dim)};
    return eng_segment_kv_bytes(&s, h->n);
}

/* Whether s can follow the section before it. Queries: whatever their group, as many of each head as there are rows, which come first. */
static bool follows(const seg_disk_head *h, const seg_section *s, uint64_t *io_rows, uint64_t *io_bytes)
{
    bool next = s->kind > s[-1].kind || (s->kind == s[-1].kind && s->item > s[-1].item);
    if (s->kind == SEG_QUERY_ROWS)
        *io_rows = s->bytes / sizeof(uint32_t);
    if (s->kind == SEG_QUERIES && !*io_bytes)
        *io_bytes = s->bytes;
    bool fits = s->kind != SEG_QUERY_ROWS || (!s->item && s->bytes % sizeof(uint32_t) == 0 && *io_rows && *io_rows <= h->n);
    if (s->kind == SEG_QUERIES)
        fits = *io_rows && s->bytes == *io_bytes && s->bytes % (*io_rows * (h->head_dim + sizeof(uint16_t))) == 0;
    return next && fits && s->kind >= SEG_CODES && s->kind < SEG_KINDS && s->item < seg_head_count(h->n_layer, h->n_head_kv);
}

/* The section table must be the one that its sizes give. */
static bool sections_fit(const seg_disk_head *h, const seg_section *s)
{
    seg_section *want = calloc(h->n_sections, sizeof *want);
    uint32_t n_blocks, head_bytes;
    uint64_t rows = 0, query_bytes = 0;
    bool ok = want && s[0].kind == SEG_IDS && s[0].item == 0 && s[0].bytes == (uint64_t)h->n * sizeof(int32_t) && s[1].kind == SEG_KV && s[1].item == 0 &&
              s[1].bytes == kv_bytes(h);
    for (uint32_t i = 0; ok && i < h->n_sections; i++) {
        ok = s[i].bytes && s[i].bytes <= h->file_bytes;
        if (i >= 2)
            ok = ok && follows(h, &s[i], &rows, &query_bytes);
        want[i] = s[i];
        want[i].reserved = 0;
    }
    ok = ok && h->version == seg_version_of(h->type_k, h->type_v, s[h->n_sections - 1].kind);
    ok = ok && eng_segment_lay_out(want, h->n_sections, &n_blocks, &head_bytes) == h->file_bytes && n_blocks == h->n_blocks &&
         !memcmp(want, s, h->n_sections * sizeof *s);
    free(want);
    return ok;
}

static eng_miss read_head(eng_segment_file *f, uint64_t file_bytes, char *err, size_t errlen)
{
    seg_disk_head h;
    if (file_bytes < sizeof h)
        return miss(err, errlen, ENG_MISS_SIZE, "%llu bytes are less than a header", (unsigned long long)file_bytes);
    int r = read_at(f->fd, &h, sizeof h, 0);
    if (r <= 0)
        return read_failed(r, err, errlen);
    eng_miss why = check_fields(&h, file_bytes, err, errlen);
    if (why)
        return why;
    if (!(f->bytes = malloc(h.head_bytes)))
        return miss(err, errlen, ENG_MISS_MEMORY, "out of memory");
    r = read_at(f->fd, f->bytes, h.head_bytes, 0);
    if (r <= 0)
        return read_failed(r, err, errlen);
    memset(f->bytes + offsetof(seg_disk_head, checksum), 0, sizeof h.checksum);
    if (XXH3_64bits(f->bytes, h.head_bytes) != h.checksum)
        return miss(err, errlen, ENG_MISS_HEADER, "the header's checksum is wrong");
    f->n_sections = h.n_sections;
    f->sections = (const seg_section *)(const void *)(f->bytes + sizeof h);
    f->sums = (const uint64_t *)(const void *)(f->sections + h.n_sections);
    if (!sections_fit(&h, f->sections))
        return miss(err, errlen, ENG_MISS_HEADER, "the table of sections is damaged");
    f->head = (eng_segment_head){
        .id = h.id, .parent = h.parent, .tenant = h.tenant, .fingerprint = h.fingerprint, .start = h.start, .n = h.n, .n_layer = h.n_layer,
        .n_head_kv = h.n_head_kv, .head_dim = h.head_dim, .type_k = h.type_k, .type_v = h.type_v, .exact = h.exact, .bytes = h.file_bytes,
        .created = h.created,
    };
    return ENG_MISS_NONE;
}

static eng_miss why_not_opened(int error)
{
    if (error == EMFILE || error == ENFILE || error == ENOMEM) /* the program's trouble, not the file's */
        return ENG_MISS_MEMORY;
    return error == ENOENT ? ENG_MISS_GONE : error == ELOOP ? ENG_MISS_KIND : ENG_MISS_IO;
}

static eng_file_stamp stamp_of(const struct stat *st)
{
    return (eng_file_stamp){.device = st->st_dev, .inode = st->st_ino, .bytes = (uint64_t)st->st_size,
                            .written_ns = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec,
                            .changed_ns = (int64_t)st->st_ctim.tv_sec * 1000000000 + st->st_ctim.tv_nsec};
}

eng_miss eng_segment_file_open(int dir_fd, const char *name, eng_segment_file **ret, char *err, size_t errlen)
{
    struct stat st;
    eng_segment_file *f = calloc(1, sizeof *f);
    if (!f)
        return miss(err, errlen, ENG_MISS_MEMORY, "out of memory");
    eng_miss why;
    f->fd = openat(dir_fd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY); /* a FIFO must not keep us waiting */
    if (f->fd < 0)
        why = miss(err, errlen, why_not_opened(errno), "cannot be opened: %s", strerror(errno));
    else if (fstat(f->fd, &st) < 0)
        why = miss(err, errlen, ENG_MISS_IO, "cannot be read: %s", strerror(errno));
    else if (!S_ISREG(st.st_mode))
        why = miss(err, errlen, ENG_MISS_KIND, "not a regular file");
    else {
        f->stamp = stamp_of(&st);
        why = read_head(f, f->stamp.bytes, err, errlen);
    }
    if (why)
        eng_segment_file_close(f);
    else
        *ret = f;
    return why;
}

void eng_segment_file_close(eng_segment_file *f)
{
    if (!f)
        return;
    if (f->fd >= 0)
        close(f->fd);
    free(f->bytes);
    free(f);
}

const eng_segment_head *eng_segment_file_head(const eng_segment_file *f)
{
    return &f->head;
}

const eng_file_stamp *eng_segment_file_stamp(const eng_segment_file *f)
{
    return &f->stamp;
}

/* ---- reading ----------------------------------------------------------------------------------------------------- */

static const uint64_t *sums_of(const eng_segment_file *f, uint32_t sec)
{
    const uint64_t *sums = f->sums;
    for (uint32_t i = 0; i < sec; i++)
        sums += seg_block_count(&f->sections[i]);
    return sums;
}

static eng_miss check_sum(const uint8_t *p, size_t bytes, uint64_t sum, uint32_t sec, uint32_t block, char *err, size_t errlen)
{
    if (XXH3_64bits(p, bytes) == sum)
        return ENG_MISS_NONE;
    return miss(err, errlen, ENG_MISS_CHECKSUM, "the checksum of block %u of section %u is wrong", block, sec);
}

/* Reads blocks [lo, hi) of a section to where its block lo belongs. direct: may be NULL; else `to` is as eng_direct_read() wants it. */
static eng_miss read_blocks(const eng_segment_file *f, const eng_direct *direct, uint32_t sec, uint32_t lo, uint32_t hi, uint8_t *to, char *err, size_t errlen)
{
    const seg_section *s = &f->sections[sec];
    const uint64_t *sums = sums_of(f, sec);
    uint64_t from = (uint64_t)lo * SEG_BLOCK, end = (uint64_t)hi * SEG_BLOCK < s->bytes ? (uint64_t)hi * SEG_BLOCK : s->bytes;
    bool there = direct && eng_direct_read(direct, to, end - from, s->offset + from);
    for (uint32_t b = lo; b < hi; b++, to += SEG_BLOCK) {
        size_t bytes = seg_block_bytes(s, b);
        int r = there ? 1 : read_at(f->fd, to, bytes, s->offset + (uint64_t)b * SEG_BLOCK);
        if (r <= 0)
            return read_failed(r, err, errlen);
        eng_miss why = check_sum(to, bytes, sums[b], sec, b, err, errlen);
        if (why)
            return why;
    }
    return ENG_MISS_NONE;
}

eng_miss eng_segment_file_ids(const eng_segment_file *f, int32_t **ret, char *err, size_t errlen)
{
    int32_t *ids = malloc((size_t)f->head.n * sizeof *ids);
    if (!ids)
        return miss(err, errlen, ENG_MISS_MEMORY, "out of memory");
    eng_miss why = read_blocks(f, NULL, 0, 0, seg_block_count(&f->sections[0]), (uint8_t *)ids, err, errlen);
    if (why)
        free(ids);
    else
        *ret = ids;
    return why;
}

/* An index of one head, to `memory`; where `stays`, it is the index's from then on. */
static eng_miss read_index(const eng_segment_file *f, const eng_direct *direct, uint32_t sec, uint8_t *memory, bool stays, idx_index **ret, char *err, size_t errlen)
{
    static const struct {
        idx_kind kind;
        const char *name;
    } kinds[SEG_KINDS] = {[SEG_CODES] = {IDX_FLAT, "codes"}, [SEG_CLUSTER] = {IDX_CLUSTER, "clusters"}, [SEG_IVF] = {IDX_IVF, "lists"}, [SEG_GRAPH] = {IDX_GRAPH, "graph"}};
    const seg_section *s = &f->sections[sec];
    char reason[128] = "another kind of index";
    eng_miss why = read_blocks(f, direct, sec, 0, seg_block_count(s), memory, err, errlen);
    if (why)
        return why;
    idx_index *ix = NULL;
    int r = idx_load(memory, s->bytes, f->head.n, f->head.head_dim, stays ? memory : NULL, &ix, reason, sizeof reason);
    if (r == 0 && idx_kind_of(ix) != kinds[s->kind].kind)
        r = -EBADMSG;
    if (r < 0) {
        idx_free(ix);
        return r == -ENOMEM ? miss(err, errlen, ENG_MISS_MEMORY, "out of memory")
                            : miss(err, errlen, ENG_MISS_INDEX, "%s of head %u: %s", kinds[s->kind].name, s->item, reason);
    }
    *ret = ix;
    return ENG_MISS_NONE;
}

/* The newest rows that kept queries see, rising; some lie behind the segment's. */
static eng_miss read_rows(const eng_segment_file *f, uint32_t sec, uint32_t *to, char *err, size_t errlen)
{
    uint32_t m = (uint32_t)(f->sections[sec].bytes / sizeof *to);
    eng_miss why = read_blocks(f, NULL, sec, 0, seg_block_count(&f->sections[sec]), (uint8_t *)to, err, errlen);
    for (uint32_t i = 0; i < m && !why; i++)
        if (to[i] > MAX_TOKENS || (i && to[i] < to[i - 1]))
            why = miss(err, errlen, ENG_MISS_INDEX, "query %u sees row %u", i, to[i]);
    return why;
}

static size_t whole_pages(size_t n)
{
    return (n + SEG_PAGE - 1) / SEG_PAGE * SEG_PAGE;
}

/* Bytes of the largest section of a kind; 0: of any beside ids, keys and values. */
static size_t largest_index(const eng_segment_file *f, uint32_t kind)
{
    size_t most = 0;
    for (uint32_t i = 2; i < f->n_sections; i++)
        if ((!kind || f->sections[i].kind == kind) && f->sections[i].bytes > most)
            most = f->sections[i].bytes;
    return most;
}

/* Task: a part of keys and values, or, after these, a section beside them. */
typedef struct {
    const eng_segment_file *f;
    const eng_segment_reader *reader;
    eng_direct direct;
    eng_segment *seg;
    uint32_t kv_parts;
    uint32_t tasks;
    atomic_uint next; /* task; parts that were checked before, and are where they were, are left out */
    atomic_int why; /* of the first failure */
    char err[256];
} loading;

static eng_miss check_mapped(const loading *l, uint32_t lo, uint32_t hi, const uint8_t *kv, char *err, size_t errlen)
{
    eng_miss why = ENG_MISS_NONE;
    for (uint32_t b = lo; !why && b < hi; b++, kv += SEG_BLOCK)
        why = check_sum(kv, seg_block_bytes(&l->f->sections[1], b), sums_of(l->f, 1)[b], 1, b, err, errlen);
    return eng_mapping_failed(l->seg->map) ? miss(err, errlen, ENG_MISS_IO, "cannot be read") : why;
}

static eng_miss load_kv(const loading *l, uint32_t part, char *err, size_t errlen)
{
    uint32_t blocks = seg_block_count(&l->f->sections[1]), lo = part * PART, hi = lo + PART < blocks ? lo + PART : blocks;
    uint8_t *kv = l->seg->kv + (size_t)lo * SEG_BLOCK;
    return l->seg->map ? check_mapped(l, lo, hi, kv, err, errlen) : read_blocks(l->f, &l->direct, 1, lo, hi, kv, err, errlen);
}

static eng_miss load_index(const loading *l, uint32_t sec, char *err, size_t errlen)
{
    const seg_section *s = &l->f->sections[sec];
    idx_index **to = &seg_indexes(l->seg, s->kind)[s->item];
    size_t at = s->offset % SEG_PAGE;
    if (s->kind == SEG_CODES)
        return read_index(l->f, &l->direct, sec, l->seg->code_memory + s->item * l->seg->code_stride + at, true, to, err, errlen);
    uint8_t *buffer = aligned_alloc(SEG_PAGE, whole_pages(at + s->bytes));
    eng_miss why = buffer ? read_index(l->f, &l->direct, sec, buffer + at, false, to, err, errlen) : miss(err, errlen, ENG_MISS_MEMORY, "out of memory");
    free(buffer);
    return why;
}

static eng_miss load_section(const loading *l, uint32_t sec, char *err, size_t errlen)
{
    const seg_section *s = &l->f->sections[sec];
    uint32_t heads = l->seg->shape->n_head_kv;
    if (s->kind >= SEG_QUERY_ROWS && !l->seg->kept)
        return ENG_MISS_NONE;
    if (s->kind == SEG_QUERY_ROWS)
        return read_rows(l->f, sec, l->seg->query_row, err, errlen);
    if (eng_kv_window(l->seg->shape, s->item / heads)) /* with another context length this layer slides */
        return ENG_MISS_NONE;
    if (s->kind == SEG_QUERIES)
        return read_blocks(l->f, NULL, sec, 0, seg_block_count(s), eng_segment_kept(l->seg, s->item / heads, s->item % heads), err, errlen);
    return l->reader->skip & ENG_STORE_CODES << (s->kind - SEG_CODES) ? ENG_MISS_NONE : load_index(l, sec, err, errlen);
}

static eng_miss load_task(const loading *l, uint32_t task, char *err, size_t errlen)
{
    if (l->reader->cancel && atomic_load(l->reader->cancel))
        return miss(err, errlen, ENG_MISS_CANCELED, "canceled");
    if (l->reader->heartbeat)
        atomic_fetch_add(l->reader->heartbeat, 1);
    return task < l->kv_parts ? load_kv(l, task, err, errlen) : load_section(l, 2 + task - l->kv_parts, err, errlen);
}

/* One reader: takes tasks in their order until none is left. */
static void load_tasks(loading *l)
{
    char err[sizeof l->err];
    uint32_t task;
    while (!atomic_load(&l->why) && (task = atomic_fetch_add(&l->next, 1)) < l->tasks) {
        int none = ENG_MISS_NONE;
        eng_miss why = load_task(l, task, err, sizeof err);
        if (why && atomic_compare_exchange_strong(&l->why, &none, (int)why))
            memcpy(l->err, err, sizeof err); /* read when all readers are done */
    }
}

static void pool_reader(void *ctx, uint32_t task, uint32_t worker)
{
    (void)task;
    (void)worker;
    load_tasks(ctx);
}

static void *more_reader(void *ctx)
{
    loading *l = ctx;
    eng_pool_unbind(l->reader->pool);
    load_tasks(l);
    return NULL;
}

static void run_readers(loading *l)
{
    pthread_t more[READERS];
    uint32_t threads = eng_pool_threads(l->reader->pool), n = 0;
    while (threads + n < READERS && threads + n < l->tasks && !pthread_create(&more[n], NULL, more_reader, l))
        n++;
    eng_pool_run(l->reader->pool, "read", pool_reader, l, threads);
    while (n)
        pthread_join(more[--n], NULL);
}

/* Room for the queries, if they are wanted and there for every head of a layer that retrieves now. */
static void expect_queries(const eng_segment_file *f, const eng_segment_reader *reader, eng_segment *s)
{
    uint64_t bytes = 0;
    uint32_t wanted = 0, there = 0, m = 0;
    for (uint32_t i = 0; i < s->shape->n_layer; i++)
        wanted += eng_kv_window(s->shape, i) ? 0 : s->shape->n_head_kv;
    for (uint32_t i = 2; i < f->n_sections; i++) {
        const seg_section *sec = &f->sections[i];
        if (sec->kind == SEG_QUERY_ROWS)
            m = (uint32_t)(sec->bytes / sizeof *s->query_row);
        if (sec->kind == SEG_QUERIES && !eng_kv_window(s->shape, sec->item / s->shape->n_head_kv)) {
            bytes = sec->bytes;
            there++;
        }
    }
    s->m = m;
    if ((reader->skip & ENG_STORE_QUERIES) || there != wanted || !m || eng_segment_kept_bytes(s) != bytes || eng_segment_alloc_kept(s, m) < 0)
        s->m = 0;
}

/* Counts the indexes of a kind; if some are missing, there are none. */
static void count_indexes(eng_segment *s, uint32_t kind)
{
    idx_index **all = seg_indexes(s, kind);
    bool whole = eng_segment_has(s, all);
    for (uint32_t i = 0; i < seg_head_count(s->shape->n_layer, s->shape->n_head_kv); i++) {
        size_t bytes;
        if (all[i] && whole) {
            idx_arena(all[i], &bytes);
            s->index_bytes += bytes;
            s->n_codes += kind == SEG_CODES;
        } else {
            idx_free(all[i]);
            all[i] = NULL;
        }
    }
    if (kind == SEG_CODES && !whole)
        eng_segment_free_codes(s);
    static const unsigned wants[SEG_KINDS] = {[SEG_CLUSTER] = ENG_WANT_CLUSTER, [SEG_IVF] = ENG_WANT_IVF, [SEG_GRAPH] = ENG_WANT_GRAPH};
    s->wants |= whole ? wants[kind] : 0; /* what a segment is to have that this one becomes part of */
}

static void count_all(eng_segment *s)
{
    for (uint32_t kind = SEG_CODES; kind <= SEG_GRAPH; kind++)
        count_indexes(s, kind);
    for (uint32_t i = 0; i < seg_head_count(s->shape->n_layer, s->shape->n_head_kv); i++)
        if (s->index[i] && s->cluster[i] && eng_segment_note_members(s, i))
            s->index_bytes += s->n * sizeof **s->members;
}

static eng_miss check_owner(const eng_segment_file *f, const eng_segment_owner *owner, char *err, size_t errlen)
{
    const eng_segment_head *h = &f->head;
    const eng_kv_shape *s = owner->shape;
    if (h->fingerprint != owner->fingerprint || h->n_layer != s->n_layer || h->n_head_kv != s->n_head_kv || h->head_dim != s->head_dim)
        return miss(err, errlen, ENG_MISS_MODEL, "of another model or other RoPE settings");
    if (h->type_k != s->type_k || h->type_v != s->type_v)
        return miss(err, errlen, ENG_MISS_KV_TYPE, "keys or values of another type");
    return ENG_MISS_NONE;
}

static eng_miss read_body(const eng_segment_file *f, const eng_segment_reader *reader, eng_segment *s, char *err, size_t errlen)
{
    loading l = {.f = f, .reader = reader, .seg = s, .kv_parts = (seg_block_count(&f->sections[1]) + PART - 1) / PART};
    l.tasks = l.kv_parts + f->n_sections - 2;
    size_t codes = reader->skip & ENG_STORE_CODES ? 0 : largest_index(f, SEG_CODES);
    if (codes)
        eng_segment_alloc_codes(s, whole_pages(codes + SEG_PAGE - 1)); /* wherever they begin in a page */
    if (codes && !s->code_memory)
        return miss(err, errlen, ENG_MISS_MEMORY, "out of memory");
    expect_queries(f, reader, s);
    /* Where they are not read past the page cache: blocks are taken in their order, so one stream with a long read-ahead. To ask for all of the file at once (WILLNEED) took twice
     * the time. */
    posix_fadvise(f->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    eng_direct_open(f->fd, f->head.bytes, &l.direct);
    if (s->map && reader->checked && !memcmp(reader->checked, &f->stamp, sizeof f->stamp))
        l.next = l.kv_parts;
    run_readers(&l);
    eng_direct_close(&l.direct);
    eng_miss why = (eng_miss)atomic_load(&l.why);
    return why ? miss(err, errlen, why, "%s", l.err) : ENG_MISS_NONE;
}

/* Its memory, or the file's. */
static int new_segment(const eng_segment_file *f, const eng_segment_owner *owner, bool mapped, eng_segment *parent, eng_segment **ret)
{
    const eng_segment_head *h = &f->head;
    eng_mapping *map;
    if (mapped && eng_mapping_new(f->fd, f->sections[1].offset, f->sections[1].bytes, &map) == 0)
        return eng_segment_new_mapped(owner->shape, parent, h->start, h->n, h->exact, map, ret);
    return eng_segment_new(owner->shape, parent, h->start, h->n, h->exact, ret);
}

eng_miss eng_segment_file_load(const eng_segment_file *f, const eng_segment_owner *owner, const int32_t *ids, const eng_segment_reader *reader,
                               eng_segment *parent, eng_segment **ret, char *err, size_t errlen)
{
    eng_segment *s;
    int32_t *own = NULL;
    eng_miss why = check_owner(f, owner, err, errlen);
    if (!why)
        why = eng_segment_file_ids(f, &own, err, errlen);
    if (why)
        return why;
    if (memcmp(own, ids, (size_t)f->head.n * sizeof *ids) != 0)
        why = miss(err, errlen, ENG_MISS_TOKENS, "its tokens are others than were listed");
    else if (new_segment(f, owner, reader->map, parent, &s) < 0)
        why = miss(err, errlen, ENG_MISS_MEMORY, "out of memory");
    if (!why) {
        memcpy(s->ids, own, (size_t)f->head.n * sizeof *own);
        s->n = f->head.n;
        s->tenant = f->head.tenant;
        s->id = f->head.id;
        s->has_id = true;
        why = read_body(f, reader, s, err, errlen);
        count_all(s);
        if (why)
            eng_segment_unref(s);
        else
            *ret = s;
    }
    free(own);
    return why;
}

eng_miss eng_segment_file_verify(const eng_segment_file *f, char *err, size_t errlen)
{
    size_t most = largest_index(f, 0);
    uint8_t *buffer = aligned_alloc(SEG_PAGE, whole_pages(most > SEG_BLOCK ? most : SEG_BLOCK));
    if (!buffer)
        return miss(err, errlen, ENG_MISS_MEMORY, "out of memory");
    eng_miss why = ENG_MISS_NONE;
    for (uint32_t sec = 0; !why && sec < 2; sec++)
        for (uint32_t b = 0; !why && b < seg_block_count(&f->sections[sec]); b++)
            why = read_blocks(f, NULL, sec, b, b + 1, buffer, err, errlen);
    for (uint32_t sec = 2; !why && sec < f->n_sections; sec++) {
        idx_index *ix = NULL;
        if (seg_is_index(f->sections[sec].kind))
            why = read_index(f, NULL, sec, buffer, true, &ix, err, errlen);
        else if (f->sections[sec].kind == SEG_QUERY_ROWS)
            why = read_rows(f, sec, (uint32_t *)(void *)buffer, err, errlen);
        else
            why = read_blocks(f, NULL, sec, 0, seg_block_count(&f->sections[sec]), buffer, err, errlen);
        idx_free(ix);
    }
    free(buffer);
    return why;
}
