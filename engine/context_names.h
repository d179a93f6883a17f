/* Named contexts (design section 7): which names stand for which tokens, and until when. The table is in memory; the catalog has a row of each name, which
 * the store thread writes when it is told that there is something to write.
 *
 * Threads: any. `lock`, of the table, is held for short changes only; `changing` by whoever makes, alters or removes a name, until that is on disk.
 */
#ifndef RETRIEVALD_CONTEXT_NAMES_H
#define RETRIEVALD_CONTEXT_NAMES_H

#include "context_catalog.h"
#include "prefix.h"

typedef struct eng_names eng_names;

/* What names may take, beside ENG_NAMES_MAX and their own bytes. */
typedef struct {
    uint64_t ram_limit, disk_limit; /* bytes; disk 0: no disk tier */
    uint64_t token_bytes;           /* of a token's keys, values and codes */
} eng_names_budget;

/* Tells the store thread to call eng_names_write; wait: until it has. NULL: names are not written. */
typedef void eng_names_sync(void *ctx, bool wait);

/* What of these tokens is on disk; both 0 before the call. */
typedef void eng_names_disk(void *ctx, const eng_prefix *p, uint32_t *ret_tokens, uint64_t *ret_bytes);

int eng_names_new(uint64_t model, eng_names **ret);
void eng_names_free(eng_names *n);

/* Before other threads know the table. now: seconds since 1970; NULL: the system's. */
void eng_names_setup(eng_names *n, const eng_names_budget *b, int64_t (*now)(void *ctx), void *now_ctx, eng_names_sync *sync, void *sync_ctx);

/* As the functions of contexts.h. disk: NULL: nothing is. */
int eng_names_make(eng_names *n, const eng_context_params *p, eng_context **ret, char *err, size_t errlen);
int eng_names_use(eng_names *n, uint64_t tenant, const char *name, eng_context **ret);
int eng_names_alter(eng_names *n, uint64_t tenant, const char *name, const eng_context_change *change, char *err, size_t errlen);
int eng_names_remove(eng_names *n, uint64_t tenant, const char *name);
int eng_names_list(eng_names *n, uint64_t tenant, const char *name, eng_names_disk *disk, void *ctx, eng_context_info **ret);
void eng_names_abandon(eng_names *n, eng_context *c);
bool eng_names_tick(eng_names *n);

/* One row of the catalog, when it is opened. -ENOMEM. */
int eng_names_load(eng_names *n, const eng_catalog_name *row);

/* The store thread: brings the catalog up to date. drop: before the row of a name that is gone goes, what only it needed. */
void eng_names_write(eng_names *n, eng_catalog *c, void (*drop)(void *ctx, const eng_prefix *p), void *ctx);

/* Each context whose tokens must stay, also of another model: it lives, or has expired and is still in use. */
void eng_names_each(eng_names *n, void (*each)(void *ctx, const eng_prefix *p), void *ctx);

/* Whether one of these needs a part of a segment. */
bool eng_names_need(eng_names *n, const eng_segment *s);

/* One of this model's whose name has gone, by removal or expiry, once nobody uses it: memory lets go of its tokens. The caller's reference. NULL: none. */
eng_context *eng_names_next_left(eng_names *n);
eng_prefix eng_names_prefix(const eng_context *c);

/* What the engine thread knows about one of this model's. */
typedef struct {
    eng_context *context; /* a reference */
    eng_prefix tokens;
    bool pinned;
} eng_names_item;

typedef struct {
    uint32_t tokens, indexes, indexes_ready;
    uint64_t bytes;
} eng_names_ram;

int eng_names_items(eng_names *n, eng_names_item **ret); /* their number; eng_names_unref each, free the array. -ENOMEM */
void eng_names_unref(eng_context *c);
void eng_names_publish(eng_context *c, const eng_names_ram *ram);
uint64_t eng_names_version(eng_names *n); /* another one after every change */

#endif
