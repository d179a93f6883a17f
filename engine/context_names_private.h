/* The table of named contexts and its entries, shared by context_names.c and context_names_rows.c. */
#ifndef RETRIEVALD_CONTEXT_NAMES_PRIVATE_H
#define RETRIEVALD_CONTEXT_NAMES_PRIVATE_H

#include "context_names.h"

#include <pthread.h>

enum { ENG_NAMES_PAST = 64 }; /* expired names that are remembered, to say so */

struct eng_context {
    atomic_uint refs, users;
    uint64_t tenant, model;
    int64_t created;
    eng_context_content content;
    int32_t *ids;
    char *source;
    /* guarded by the table's lock */
    char name[ENG_NAME_MAX + 1], row[ENG_NAME_MAX + 1]; /* row: what the catalog calls it; empty: it has no row */
    bool pinned, gone, unsaved, touched;                /* gone: the name is free; unsaved, touched: newer than its row */
    int64_t expires, used;
    uint64_t hits, tried; /* tried: the last eng_names_write that looked at it */
    int result;           /* of the last write of its row */
    eng_context *next_left;
    /* written by the engine thread */
    _Atomic(eng_context_state) state;
    char error[160]; /* before state becomes ENG_CONTEXT_FAILED */
    atomic_uint read, ram_tokens, indexes, indexes_ready;
    _Atomic(uint64_t) ram_bytes;
};

typedef struct {
    uint64_t tenant;
    char name[ENG_NAME_MAX + 1];
} past_name;

struct eng_names {
    uint64_t model;
    eng_names_budget budget;
    int64_t (*now)(void *ctx);
    void *now_ctx;
    eng_names_sync *sync;
    void *sync_ctx;
    pthread_mutex_t changing, lock;
    /* guarded by lock */
    eng_context **all; /* oldest first; those of other models too, and those gone that are in use or still have a row */
    uint32_t n, cap, n_past;
    size_t bytes;
    uint64_t tokens, pinned_tokens; /* different ones, of those in the table, of the pinned among them: what begins alike counts once */
    uint64_t version, served, pass; /* served: the version that the engine thread last saw */
    eng_context *left; /* whose names have gone, and whose tokens memory is to let go of; a reference each */
    past_name past[ENG_NAMES_PAST];
};

/* What can be changed of a context. */
typedef struct {
    char name[ENG_NAME_MAX + 1];
    bool pinned;
    int64_t expires;
} eng_names_terms;

eng_names_terms eng_names_terms_of(const eng_context *c);

/* A context with a copy of the content, on which the caller holds the one reference. NULL: no memory. */
eng_context *eng_names_context(const eng_context_content *content);
eng_context *eng_names_ref(eng_context *c);
bool eng_names_is_name(const char *s);

/* These with the lock held. */
bool eng_names_expired(const eng_names *n, const eng_context *c);
int eng_names_find(const eng_names *n, uint64_t tenant, const char *name, eng_context **ret); /* one that lives. -ENOENT, -ESTALE */
int eng_names_add(eng_names *n, eng_context *c);
void eng_names_take_out(eng_names *n, eng_context *c);

#endif
