/* What a segment's file looks like (README.md, "Segment files"), for segment_file.c, which lays it out and writes it, segment_file_read.c, which checks and
 * reads it, and segment_file_load.c, which makes a segment of it. */
#ifndef RETRIEVALD_SEGMENT_FILE_PRIVATE_H
#define RETRIEVALD_SEGMENT_FILE_PRIVATE_H

#include "direct_read.h"
#include "segment_file.h"

enum {
    SEG_VERSION = 1,      /* of files as the first programs wrote them */
    SEG_VERSION_Q8_0 = 2, /* with keys or values in q8_0, which version 1 does not know */
    SEG_VERSION_INDEX = 3, /* with more than codes beside keys and values, whatever their type */
    SEG_BLOCK = 1 << 20,  /* bytes that share a checksum */
    SEG_PAGE = 4096,      /* keys and values begin at a multiple of it, so that they could be mapped */
};

static inline size_t seg_whole_pages(size_t n)
{
    return (n + SEG_PAGE - 1) / SEG_PAGE * SEG_PAGE;
}

#define SEG_MAGIC "RVSEG\r\n\x1a" /* a transfer as text would change it */

/* Little-endian, as it stands in the file. Then section table, then a checksum (XXH3-64) for each block of each section. */
typedef struct {
    uint8_t magic[8];
    uint32_t version, head_bytes;
    eng_segment_id id, parent;
    uint64_t tenant, fingerprint;
    uint32_t start, n, n_layer, n_head_kv, head_dim, type_k, type_v, exact;
    uint64_t file_bytes;
    uint32_t n_sections, n_blocks;
    int64_t created;
    uint8_t reserved[128];
    uint64_t checksum; /* of the head, with this as 0 */
} seg_disk_head;
_Static_assert(sizeof(seg_disk_head) == 256, "the header is written as it stands");

/* Beside ids and keys and values, which every file has, sections stand in the order of kinds and, of each, of items. */
typedef enum { SEG_IDS = 1, SEG_KV, SEG_CODES, SEG_CLUSTER, SEG_IVF, SEG_GRAPH, SEG_QUERY_ROWS, SEG_QUERIES, SEG_KINDS } seg_section_kind;

typedef struct {
    uint32_t kind, item; /* item: layer * n_head_kv + head; 0 where a kind is not a head's */
    uint64_t offset, bytes, reserved;
} seg_section;
_Static_assert(sizeof(seg_section) == 32, "the table is written as it stands");

static inline uint32_t seg_block_count(const seg_section *s)
{
    return (uint32_t)((s->bytes + SEG_BLOCK - 1) / SEG_BLOCK);
}

static inline size_t seg_block_bytes(const seg_section *s, uint32_t block)
{
    uint64_t left = s->bytes - (uint64_t)block * SEG_BLOCK;
    return left < SEG_BLOCK ? (size_t)left : SEG_BLOCK;
}

static inline uint32_t seg_head_count(uint32_t n_layer, uint32_t n_head_kv)
{
    return n_layer * n_head_kv;
}

/* Of a file whose last section is of this kind. */
static inline uint32_t seg_version_of(uint32_t type_k, uint32_t type_v, uint32_t last_kind)
{
    if (last_kind > SEG_CODES)
        return SEG_VERSION_INDEX;
    return type_k == ENG_KV_Q8_0 || type_v == ENG_KV_Q8_0 ? SEG_VERSION_Q8_0 : SEG_VERSION;
}

static inline bool seg_is_index(uint32_t kind)
{
    return kind >= SEG_CODES && kind <= SEG_GRAPH;
}

/* Where a segment has its indexes of such a kind. */
static inline idx_index **seg_indexes(const eng_segment *s, uint32_t kind)
{
    return kind == SEG_CODES ? s->codes : kind == SEG_CLUSTER ? s->cluster : kind == SEG_IVF ? s->ivf : s->index;
}

/* Of a file with all that there can be. */
static inline uint32_t seg_max_sections(uint32_t n_layer, uint32_t n_head_kv)
{
    return 3 + (SEG_KINDS - SEG_CODES - 1) * seg_head_count(n_layer, n_head_kv);
}

/* ---- segment_file_read.c ---- */

struct eng_segment_file {
    int fd;
    eng_segment_head head;
    eng_file_stamp stamp;
    uint8_t *bytes; /* the whole head */
    const seg_section *sections;
    const uint64_t *sums;
    uint32_t n_sections;
};

/* Returns `why`, said in words. */
eng_miss seg_miss(char *err, size_t errlen, eng_miss why, const char *format, ...) __attribute__((format(printf, 4, 5)));

/* Of a section's blocks. */
const uint64_t *seg_sums_of(const eng_segment_file *f, uint32_t sec);
eng_miss seg_check_sum(const uint8_t *p, size_t bytes, uint64_t sum, uint32_t sec, uint32_t block, char *err, size_t errlen);

/* Reads blocks [lo, hi) of a section to where its block lo belongs. direct: may be NULL; else `to` is as eng_direct_read() wants it. */
eng_miss seg_read_blocks(const eng_segment_file *f, const eng_direct *direct, uint32_t sec, uint32_t lo, uint32_t hi, uint8_t *to, char *err, size_t errlen);
/* An index of one head, to `memory`; where `stays`, it is the index's from then on. */
eng_miss seg_read_index(const eng_segment_file *f, const eng_direct *direct, uint32_t sec, uint8_t *memory, bool stays, idx_index **ret, char *err, size_t errlen);
/* The newest rows that kept queries see, rising; some lie behind the segment's. */
eng_miss seg_read_rows(const eng_segment_file *f, uint32_t sec, uint32_t *to, char *err, size_t errlen);
/* Bytes of the largest section of a kind; 0: of any beside ids, keys and values. */
size_t seg_largest_index(const eng_segment_file *f, uint32_t kind);

/* ---- segment_file.c ---- */

/* Gives sections whose bytes are known their offsets, one after another behind the head. Returns the file's bytes. */
uint64_t eng_segment_lay_out(seg_section *s, uint32_t n, uint32_t *ret_blocks, uint32_t *ret_head);

#endif
