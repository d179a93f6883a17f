#include "segment_file_private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum {
    MAX_HEADS = 65536,
    MAX_DIM = 65536,
    MAX_TOKENS = 1 << 26,
};

/* ---- opening ----------------------------------------------------------------------------------------------------- */

eng_miss seg_miss(char *err, size_t errlen, eng_miss why, const char *format, ...)
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
        return seg_miss(err, errlen, ENG_MISS_SIZE, "the file ends early");
    return seg_miss(err, errlen, ENG_MISS_IO, "cannot be read: %s", strerror(-r));
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
        return seg_miss(err, errlen, ENG_MISS_HEADER, "not a segment file");
    uint32_t known = seg_version_of(h->type_k, h->type_v, SEG_CODES);
    if (h->version != known && h->version != SEG_VERSION_INDEX)
        return seg_miss(err, errlen, ENG_MISS_VERSION, "version %u of the format; this program knows %u and %u for such keys and values", h->version, known,
                    SEG_VERSION_INDEX);
    if (h->file_bytes != file_bytes)
        return seg_miss(err, errlen, ENG_MISS_SIZE, "%llu bytes, its header says %llu", (unsigned long long)file_bytes,
                    (unsigned long long)h->file_bytes);
    bool ok = h->n && h->n <= MAX_TOKENS && h->start <= MAX_TOKENS && h->n_layer && h->n_head_kv && h->n_layer <= MAX_HEADS &&
              h->n_head_kv <= MAX_HEADS / h->n_layer && h->head_dim && h->head_dim <= MAX_DIM && h->type_k <= ENG_KV_Q8_0 &&
              h->type_v <= ENG_KV_Q8_0 && h->exact <= 1 && !memcmp(h->reserved, zero, sizeof zero);
    if (!ok || h->n_sections < 2 || h->n_sections > seg_max_sections(h->n_layer, h->n_head_kv) ||
        h->head_bytes != sizeof *h + h->n_sections * sizeof(seg_section) + (uint64_t)h->n_blocks * sizeof(uint64_t) || h->head_bytes > file_bytes)
        return seg_miss(err, errlen, ENG_MISS_HEADER, "the header is damaged");
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
        return seg_miss(err, errlen, ENG_MISS_SIZE, "%llu bytes are less than a header", (unsigned long long)file_bytes);
    int r = read_at(f->fd, &h, sizeof h, 0);
    if (r <= 0)
        return read_failed(r, err, errlen);
    eng_miss why = check_fields(&h, file_bytes, err, errlen);
    if (why)
        return why;
    if (!(f->bytes = malloc(h.head_bytes)))
        return seg_miss(err, errlen, ENG_MISS_MEMORY, "out of memory");
    r = read_at(f->fd, f->bytes, h.head_bytes, 0);
    if (r <= 0)
        return read_failed(r, err, errlen);
    memset(f->bytes + offsetof(seg_disk_head, checksum), 0, sizeof h.checksum);
    if (XXH3_64bits(f->bytes, h.head_bytes) != h.checksum)
        return seg_miss(err, errlen, ENG_MISS_HEADER, "the header's checksum is wrong");
    f->n_sections = h.n_sections;
    f->sections = (const seg_section *)(const void *)(f->bytes + sizeof h);
    f->sums = (const uint64_t *)(const void *)(f->sections + h.n_sections);
    if (!sections_fit(&h, f->sections))
        return seg_miss(err, errlen, ENG_MISS_HEADER, "the table of sections is damaged");
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
        return seg_miss(err, errlen, ENG_MISS_MEMORY, "out of memory");
    eng_miss why;
    f->fd = openat(dir_fd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY); /* a FIFO must not keep us waiting */
    if (f->fd < 0)
        why = seg_miss(err, errlen, why_not_opened(errno), "cannot be opened: %s", strerror(errno));
    else if (fstat(f->fd, &st) < 0)
        why = seg_miss(err, errlen, ENG_MISS_IO, "cannot be read: %s", strerror(errno));
    else if (!S_ISREG(st.st_mode))
        why = seg_miss(err, errlen, ENG_MISS_KIND, "not a regular file");
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

const uint64_t *seg_sums_of(const eng_segment_file *f, uint32_t sec)
{
    const uint64_t *sums = f->sums;
    for (uint32_t i = 0; i < sec; i++)
        sums += seg_block_count(&f->sections[i]);
    return sums;
}

eng_miss seg_check_sum(const uint8_t *p, size_t bytes, uint64_t sum, uint32_t sec, uint32_t block, char *err, size_t errlen)
{
    if (XXH3_64bits(p, bytes) == sum)
        return ENG_MISS_NONE;
    return seg_miss(err, errlen, ENG_MISS_CHECKSUM, "the checksum of block %u of section %u is wrong", block, sec);
}

eng_miss seg_read_blocks(const eng_segment_file *f, const eng_direct *direct, uint32_t sec, uint32_t lo, uint32_t hi, uint8_t *to, char *err, size_t errlen)
{
    const seg_section *s = &f->sections[sec];
    const uint64_t *sums = seg_sums_of(f, sec);
    uint64_t from = (uint64_t)lo * SEG_BLOCK, end = (uint64_t)hi * SEG_BLOCK < s->bytes ? (uint64_t)hi * SEG_BLOCK : s->bytes;
    bool there = direct && eng_direct_read(direct, to, end - from, s->offset + from);
    for (uint32_t b = lo; b < hi; b++, to += SEG_BLOCK) {
        size_t bytes = seg_block_bytes(s, b);
        int r = there ? 1 : read_at(f->fd, to, bytes, s->offset + (uint64_t)b * SEG_BLOCK);
        if (r <= 0)
            return read_failed(r, err, errlen);
        eng_miss why = seg_check_sum(to, bytes, sums[b], sec, b, err, errlen);
        if (why)
            return why;
    }
    return ENG_MISS_NONE;
}

eng_miss eng_segment_file_ids(const eng_segment_file *f, int32_t **ret, char *err, size_t errlen)
{
    int32_t *ids = malloc((size_t)f->head.n * sizeof *ids);
    if (!ids)
        return seg_miss(err, errlen, ENG_MISS_MEMORY, "out of memory");
    eng_miss why = seg_read_blocks(f, NULL, 0, 0, seg_block_count(&f->sections[0]), (uint8_t *)ids, err, errlen);
    if (why)
        free(ids);
    else
        *ret = ids;
    return why;
}

eng_miss seg_read_index(const eng_segment_file *f, const eng_direct *direct, uint32_t sec, uint8_t *memory, bool stays, idx_index **ret, char *err, size_t errlen)
{
    static const struct {
        idx_kind kind;
        const char *name;
    } kinds[SEG_KINDS] = {[SEG_CODES] = {IDX_FLAT, "codes"}, [SEG_CLUSTER] = {IDX_CLUSTER, "clusters"}, [SEG_IVF] = {IDX_IVF, "lists"}, [SEG_GRAPH] = {IDX_GRAPH, "graph"}};
    const seg_section *s = &f->sections[sec];
    char reason[128] = "another kind of index";
    eng_miss why = seg_read_blocks(f, direct, sec, 0, seg_block_count(s), memory, err, errlen);
    if (why)
        return why;
    idx_index *ix = NULL;
    int r = idx_load(memory, s->bytes, f->head.n, f->head.head_dim, stays ? memory : NULL, &ix, reason, sizeof reason);
    if (r == 0 && idx_kind_of(ix) != kinds[s->kind].kind)
        r = -EBADMSG;
    if (r < 0) {
        idx_free(ix);
        return r == -ENOMEM ? seg_miss(err, errlen, ENG_MISS_MEMORY, "out of memory")
                            : seg_miss(err, errlen, ENG_MISS_INDEX, "%s of head %u: %s", kinds[s->kind].name, s->item, reason);
    }
    *ret = ix;
    return ENG_MISS_NONE;
}

eng_miss seg_read_rows(const eng_segment_file *f, uint32_t sec, uint32_t *to, char *err, size_t errlen)
{
    uint32_t m = (uint32_t)(f->sections[sec].bytes / sizeof *to);
    eng_miss why = seg_read_blocks(f, NULL, sec, 0, seg_block_count(&f->sections[sec]), (uint8_t *)to, err, errlen);
    for (uint32_t i = 0; i < m && !why; i++)
        if (to[i] > MAX_TOKENS || (i && to[i] < to[i - 1]))
            why = seg_miss(err, errlen, ENG_MISS_INDEX, "query %u sees row %u", i, to[i]);
    return why;
}

size_t seg_largest_index(const eng_segment_file *f, uint32_t kind)
{
    size_t most = 0;
    for (uint32_t i = 2; i < f->n_sections; i++)
        if ((!kind || f->sections[i].kind == kind) && f->sections[i].bytes > most)
            most = f->sections[i].bytes;
    return most;
}

eng_miss eng_segment_file_verify(const eng_segment_file *f, char *err, size_t errlen)
{
    size_t most = seg_largest_index(f, 0);
    uint8_t *buffer = aligned_alloc(SEG_PAGE, seg_whole_pages(most > SEG_BLOCK ? most : SEG_BLOCK));
    if (!buffer)
        return seg_miss(err, errlen, ENG_MISS_MEMORY, "out of memory");
    eng_miss why = ENG_MISS_NONE;
    for (uint32_t sec = 0; !why && sec < 2; sec++)
        for (uint32_t b = 0; !why && b < seg_block_count(&f->sections[sec]); b++)
            why = seg_read_blocks(f, NULL, sec, b, b + 1, buffer, err, errlen);
    for (uint32_t sec = 2; !why && sec < f->n_sections; sec++) {
        idx_index *ix = NULL;
        if (seg_is_index(f->sections[sec].kind))
            why = seg_read_index(f, NULL, sec, buffer, true, &ix, err, errlen);
        else if (f->sections[sec].kind == SEG_QUERY_ROWS)
            why = seg_read_rows(f, sec, (uint32_t *)(void *)buffer, err, errlen);
        else
            why = seg_read_blocks(f, NULL, sec, 0, seg_block_count(&f->sections[sec]), buffer, err, errlen);
        idx_free(ix);
    }
    free(buffer);
    return why;
}
