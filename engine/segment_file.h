/* Segment files: one immutable file a segment (README.md, "Segment files", has the format byte by byte).
 *
 * Every byte may come from a damaged or hostile file: sizes are computed from the header and compared with the file's before anything is
 * allocated, each block of a mebibyte has a checksum that is verified as it is read, indexes pass idx_load(), and token ids are the caller's to
 * compare. What is wrong is an eng_miss and a sentence.
 */
#ifndef RETRIEVALD_SEGMENT_FILE_H
#define RETRIEVALD_SEGMENT_FILE_H

#include "contexts.h"
#include "pool.h"
#include "segment.h"

#include <string.h>

/* What keys and values depend on beside the tokens. */
typedef struct {
    uint64_t fingerprint; /* of the model and its RoPE settings */
    const eng_kv_shape *shape;
} eng_segment_owner;

typedef struct {
    eng_segment_id id, parent; /* parent: all zero for a segment that starts at 0 */
    uint64_t tenant, fingerprint;
    uint32_t start, n, n_layer, n_head_kv, head_dim, type_k, type_v;
    bool exact;
    uint64_t bytes;   /* of the file */
    int64_t created;  /* seconds since 1970 */
} eng_segment_head;

/* XXH3-128 over that of ids[0, start + n) (all tokens from the context's first to the segment's last) and start, tenant, fingerprint, types, exactness. */
eng_segment_id eng_segment_id_of(const eng_segment_head *h, const int32_t *ids);

static inline bool eng_segment_id_equal(const eng_segment_id *a, const eng_segment_id *b)
{
    return !memcmp(a, b, sizeof *a);
}

enum { ENG_SEGMENT_NAME = 2 * sizeof(eng_segment_id) + 1 };
void eng_segment_id_text(const eng_segment_id *id, char ret[ENG_SEGMENT_NAME]); /* hexadecimal */
bool eng_segment_id_parse(const char *s, eng_segment_id *ret);                 /* of so many digits and no more */

/* What a file may have beside keys and values: bits. */
enum { ENG_STORE_CODES = 1, ENG_STORE_CLUSTER = 2, ENG_STORE_IVF = 4, ENG_STORE_GRAPH = 8, ENG_STORE_QUERIES = 16 };

/* What of these a sealed segment has in whole, which changes no more. The engine thread's. */
unsigned eng_segment_storable(const eng_segment *s);

/* Head of the file that a sealed segment (n == cap) will be, but for ids and time, with these of what is storable. bytes 0: no memory. */
eng_segment_head eng_segment_head_of(const eng_segment_owner *owner, const eng_segment *s, unsigned parts);

/* Writes it to an empty file; the caller syncs. Reads nothing of s that can change. -errno. */
int eng_segment_write(int fd, const eng_segment_head *head, const eng_segment *s, unsigned parts);

typedef struct eng_segment_file eng_segment_file;

/* Which file it is, and that nobody wrote to it since: device, inode, bytes, times of the last write and of the last change of any kind, which no program can set.
 * All zero: none. */
typedef struct {
    uint64_t device, inode, bytes;
    int64_t written_ns, changed_ns;
} eng_file_stamp;

/* Opens a regular file (never a link or a FIFO) and checks its head. */
eng_miss eng_segment_file_open(int dir_fd, const char *name, eng_segment_file **ret, char *err, size_t errlen);
void eng_segment_file_close(eng_segment_file *f);
const eng_segment_head *eng_segment_file_head(const eng_segment_file *f);
const eng_file_stamp *eng_segment_file_stamp(const eng_segment_file *f); /* as it was opened */

/* The token ids [n], malloc'ed. */
eng_miss eng_segment_file_ids(const eng_segment_file *f, int32_t **ret, char *err, size_t errlen);

typedef struct {
    eng_pool *pool;            /* at least as many readers as it has threads */
    const atomic_bool *cancel; /* of keys and values; may be NULL */
    atomic_ullong *heartbeat;  /* rises with every part of some blocks. May be NULL */
    bool map;                  /* keys and values stay in the file */
    unsigned skip;             /* what is not wanted of ENG_STORE_... */
    const eng_file_stamp *checked; /* those of a file with this stamp are not checked again when it is mapped. May be NULL */
} eng_segment_reader;

/* Checks that it belongs to owner and has these token ids [n], makes a segment below `parent` (NULL at start 0), to which the caller holds the one reference, and lets threads of
 * its own fill it: keys and values, in the order of layers, then what stands beside them. The segment can be put into a view at once; of its rows those are there that were waited
 * for, of its indexes and queries none before the end. f is borrowed until then. */
typedef struct eng_segment_load eng_segment_load;
eng_miss eng_segment_load_begin(const eng_segment_file *f, const eng_segment_owner *owner, const int32_t *ids, const eng_segment_reader *reader, eng_segment *parent,
                                eng_segment_load **ret, eng_segment **ret_seg, char *err, size_t errlen);

/* Waits for keys and values of the first `layers` layers. False: some of its rows cannot be had. */
bool eng_segment_load_await(eng_segment_load *l, uint32_t layers);

/* Waits for all and frees l. What was wrong; *ret_rows: keys and values are right, whatever else is not. *ret_end_ns: when the last was read. Indexes and queries that are not all
 * there, or not for the layers that retrieve now, are left out. */
eng_miss eng_segment_load_end(eng_segment_load *l, bool *ret_rows, uint64_t *ret_end_ns, char *err, size_t errlen);

/* Reads all of it and checks every checksum, the indexes and the queries. */
eng_miss eng_segment_file_verify(const eng_segment_file *f, char *err, size_t errlen);

#endif
