/* Contexts that last: the disk tier of the context cache, and names. Public, beside engine.h; threads and errors as there.
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
    uint64_t evictions, refusals, saves, save_failures, loads; /* segments; refused: what would have to go for it is worth more */
    uint64_t saved_bytes, loaded_bytes;
    double save_seconds, load_seconds;
} eng_disk_stats;

/* [any] All zero without a disk tier. */
void eng_disk_stats_get(const eng_engine *e, eng_disk_stats *ret);

typedef struct {
    uint32_t files, bad, unfinished; /* of segments; of these, not as they should be; writes under way, or that a crash left */
    uint64_t bytes;
} eng_disk_check;

/* Reads all of a state folder's files and checks heads, sizes, checksums and codes; `bad` (may be NULL) hears of each that cannot be used. Needs no engine and changes
 * nothing; a daemon may be using the folder. -ENOENT: it keeps no contexts. */
int eng_disk_verify(const char *dir, void (*bad)(void *ctx, const char *path, eng_miss why, const char *err), void *ctx, eng_disk_check *ret, char *err,
                    size_t errlen);

/* ---- names ------------------------------------------------------------------------------------------------------ *
 * A name stands for tokens: a tenant's, of this model. While it lives, what is on disk of these tokens is not evicted; nor is, of a pinned one, what is
 * in memory. It lives until its time or its removal; what only it needed goes with it from memory and disk, once nobody uses it any more: no prompt finds it. Names outlast the program
 * where there is a disk tier, and have the catalog as their only place: one that is lost, and not only damaged, takes them along.
 * All of these may be called from any thread; those marked [waits] write to disk before they return. */

enum { ENG_NAME_MAX = 64, ENG_NAMES_MAX = 1024 }; /* bytes of a name; names */

typedef enum { ENG_SOURCE_TOKENS, ENG_SOURCE_TEXT, ENG_SOURCE_MESSAGES } eng_source;

typedef struct {
    eng_source kind;
    const char *source; /* what the caller made the tokens from, for the caller's own use */
    size_t source_len, rendered;
    const int32_t *ids;
    size_t n_ids;
} eng_context_content;

typedef struct {
    uint64_t tenant;
    const char *name;
    int64_t ttl; /* seconds; 0: for ever */
    bool pinned, replace;
    eng_context_content content; /* copied */
} eng_context_params;

typedef struct eng_context eng_context; /* a named context in use: it does not go before it is released */

/* [waits] Makes a name; its tokens are the caller's to compute (a session with cache_prompt). -EINVAL: no name; -EEXIST, unless it is to be replaced;
 * -ENOSPC: the budgets of memory (pinned) or disk, or the room for names, do not allow it; -EIO and so on: it could not be written. */
int eng_context_make(eng_engine *e, const eng_context_params *p, eng_context **ret, char *err, size_t errlen);

/* Counts as a hit. -ENOENT: there is none; -ESTALE: it has expired. */
int eng_context_use(eng_engine *e, uint64_t tenant, const char *name, eng_context **ret);
const eng_context_content *eng_context_get(const eng_context *c);
void eng_context_release(eng_context *c); /* NULL is fine; also after eng_close */

typedef enum { ENG_CONTEXT_QUEUED, ENG_CONTEXT_READING, ENG_CONTEXT_READY, ENG_CONTEXT_FAILED } eng_context_state;

/* What becomes of one that was made: `read` tokens are computed. error: of a failed one, may be NULL. */
void eng_context_report(eng_context *c, eng_context_state state, uint32_t read, const char *error);
void eng_context_abandon(eng_engine *e, eng_context *c); /* the name is given up again; c is released */

typedef struct {
    const char *name; /* NULL: as it is */
    bool set_ttl, set_pinned, pinned;
    int64_t ttl; /* from now on */
} eng_context_change;

/* [waits] -ENOENT, -ESTALE; else as eng_context_make. */
int eng_context_alter(eng_engine *e, uint64_t tenant, const char *name, const eng_context_change *change, char *err, size_t errlen);
int eng_context_remove(eng_engine *e, uint64_t tenant, const char *name);

typedef struct {
    char name[ENG_NAME_MAX + 1];
    eng_source kind;
    eng_context_state state;
    char error[160];
    bool pinned;
    int64_t created, expires, used; /* seconds since 1970; expires 0: never; used 0: not yet */
    uint64_t hits;
    uint32_t tokens, read, ram_tokens, disk_tokens; /* memory: as of the engine's last rest */
    uint64_t ram_bytes, disk_bytes;                 /* of segments, which others may share */
    uint32_t indexes, indexes_ready; /* segments in memory that get codes; that have them */
} eng_context_info;

/* The tenant's living contexts, oldest first, or the one of that name. The number of them, -ENOENT, -ESTALE, -ENOMEM. */
int eng_context_list(eng_engine *e, uint64_t tenant, const char *name, eng_context_info **ret);

/* Lets go of what has expired; once a second. Does not wait. Whether the engine thread has something to do about names: eng_idle(). */
bool eng_contexts_tick(eng_engine *e);

#endif
