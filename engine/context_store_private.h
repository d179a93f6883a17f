/* What the files of the disk tier's store share (context_store.h says who runs what): context_store.c has the thread and its queue, context_store_save.c what is
 * written, context_store_load.c what is found and read, context_store_remove.c what goes. */
#ifndef RETRIEVALD_CONTEXT_STORE_PRIVATE_H
#define RETRIEVALD_CONTEXT_STORE_PRIVATE_H

#include "context_folder.h"
#include "context_mirror.h"
#include "context_store.h"
#include "trace.h"

#include <errno.h>
#include <pthread.h>

enum { ENG_STORE_REFUSED = -EXFULL }; /* not kept, since what would have to go is worth more; nothing that files do fails so */

typedef struct eng_store_job eng_store_job;
struct eng_store_job {
    eng_store_job *next;
    eng_segment *seg; /* to be written; NULL: the segment `head.id` and all below it are to be removed */
    eng_segment_head head;
    unsigned parts; /* of it, ENG_STORE_... */
    bool unwanted;  /* guarded by lock; its tokens' name went meanwhile */
    int result;
};

typedef struct {
    eng_store_job *first, *last;
} eng_store_jobs;

struct eng_store {
    eng_store_params p;
    eng_folder folder;
    eng_catalog *catalog; /* the store thread's, once that runs */
    pthread_t thread;
    eng_trace_track *track; /* of that thread */
    bool started;
    int last_failure; /* the store thread's: what was logged last */
    pthread_mutex_t lock;
    pthread_cond_t more, idle, synced;
    /* guarded by lock */
    eng_mirror mirror;
    eng_store_jobs queue, done;
    eng_store_job *running;
    uint32_t in_flight; /* jobs queued or running */
    uint64_t names_wanted, names_done; /* times that names were to be written, and were */
    bool stop;
    eng_disk_stats stats;
};

__attribute__((format(printf, 3, 4))) void eng_store_log(const eng_store *s, int level, const char *format, ...);

/* The engine thread: hands a job over; what is to go comes before what is to be written. _locked: with the lock held. */
void eng_store_enqueue(eng_store *s, eng_store_job *j);
void eng_store_enqueue_locked(eng_store *s, eng_store_job *j);

/* ---- the store thread ---------------------------------------------------------------------------------------------- */

/* Writes a job's segment. 0, ENG_STORE_REFUSED, -errno. */
int eng_store_write(eng_store *s, eng_store_job *j);

/* Evicts until `bytes` more fit; not what the segment `parent` needs. ENG_STORE_REFUSED: only what is worth more would make that room. -EFBIG, -ENOSPC: no room. */
int eng_store_make_room(eng_store *s, uint64_t bytes, const eng_segment_id *parent, uint64_t claim);

/* Row, file, entry. What cannot be removed now goes at the next start, or is used again. */
int eng_store_forget(eng_store *s, eng_mirror_entry *e);
int eng_store_forget_tree(eng_store *s, const eng_segment_id *id);

/* A name is gone: so are its last segments with all that goes on from there, and those before them that lead nowhere else, as far as no other name
 * needs them. */
void eng_store_drop_name(void *store, const eng_prefix *p);

#endif
