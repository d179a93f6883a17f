/* Contexts that last: the disk tier of the context cache. Public, beside engine.h; threads and errors as there.
 *
 * What sessions leave is written behind their answers, a file a segment, by a thread of its own; a prompt that begins like a kept one is
 * looked for in memory, then here. A file that cannot be used, for whatever reason, costs its tokens' prefill and no more.
 */
#ifndef RETRIEVALD_CONTEXTS_H
#define RETRIEVALD_CONTEXTS_H

#include "engine.h"

/* Why a request's kept prefix ends where it does, or a file could not be used. */
typedef enum {
    ENG_MISS_NONE,
    ENG_MISS_ABSENT,   /* nothing kept begins like this prompt */
    ENG_MISS_END,      /* what is kept ends there */
    ENG_MISS_DIFFERS,  /* it goes on with another token */
    ENG_MISS_EVICTED,  /* it went on, and had to make room */
    ENG_MISS_INEXACT,  /* it goes on with what decode kernels computed, which mode `full` does not take */
    ENG_MISS_SHORT,    /* something does, but reading it would cost more than it saves */
    ENG_MISS_GONE,     /* the file is not there any more */
    ENG_MISS_IO,       /* it cannot be opened or read */
    ENG_MISS_KIND,     /* a link, a FIFO, a folder */
    ENG_MISS_SIZE,     /* shorter or longer than its header says */
    ENG_MISS_HEADER,   /* not a segment file, or its head is damaged */
    ENG_MISS_VERSION,  /* of the format */
    ENG_MISS_MODEL,    /* another model, or other RoPE settings */
    ENG_MISS_KV_TYPE,
    ENG_MISS_TOKENS,   /* other tokens, or another place, than the catalog has */
    ENG_MISS_CHECKSUM,
    ENG_MISS_INDEX,    /* codes that do not hold together */
    ENG_MISS_MEMORY,
    ENG_MISS_CANCELED, /* the request was, while the file was read */
    ENG_MISS_COUNT
} eng_miss;

const char *eng_miss_name(eng_miss m); /* "absent", ... */

typedef struct {
    uint32_t position; /* prompt tokens that agree with what is kept */
    eng_miss why;      /* ENG_MISS_NONE: all of them did, or nothing was looked for */
} eng_prefix_stop;

/* Where a session's kept prefix stopped; of its own tenant's contexts alone. */
eng_prefix_stop eng_session_miss(const eng_session *s);

/* [any] How many sessions stopped for each reason; those whose whole prompt was kept at ENG_MISS_NONE. */
void eng_prefix_stops(const eng_engine *e, uint64_t ret[ENG_MISS_COUNT]);

typedef struct {
    const char *dir;          /* the state folder; made if it is not there, 0700 */
    uint64_t limit;           /* bytes of segment files */
    uint64_t keep_free;       /* bytes that stay free in the file system */
    int64_t (*now)(void *ctx); /* seconds since 1970; NULL: the system's */
    void *now_ctx;
} eng_disk_params;

/* Adds the disk tier, once, before the first session; eng_close ends it when everything is written. -EBUSY: another process has the folder. An
 * engine goes on without it when this fails. */
int eng_disk_open(eng_engine *e, const eng_disk_params *p, char *err, size_t errlen);

typedef struct {
    uint64_t bytes, limit;                 /* of segment files */
    uint32_t segments, saving;             /* kept; on their way */
    uint64_t hits, misses[ENG_MISS_COUNT]; /* requests that read from disk; by reason, requests and files */
    uint64_t evictions, saves, save_failures, loads; /* segments */
    uint64_t saved_bytes, loaded_bytes;
    double save_seconds, load_seconds;
} eng_disk_stats;

/* [any] All zero without a disk tier. */
void eng_disk_stats_get(const eng_engine *e, eng_disk_stats *ret);

#endif
