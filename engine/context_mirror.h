/* What is on disk, in memory: a prefix tree of segments with their token ids, for look-ups and for choosing what to evict. It takes no lock: its
 * owner has one (context_store.c). */
#ifndef RETRIEVALD_CONTEXT_MIRROR_H
#define RETRIEVALD_CONTEXT_MIRROR_H

#include "context_catalog.h"
#include "prefix.h"
#include "worth.h"

typedef struct eng_mirror_entry eng_mirror_entry;
struct eng_mirror_entry {
    eng_segment_head head;
    int32_t *ids;
    eng_mirror_entry *parent;
    uint32_t children;
    uint32_t pins;  /* stays as long as there are any */
    eng_file_stamp checked; /* of the file when it was last read, all of it right; the reading thread's */
    bool ours;      /* of this model and these types: prompts may find it */
    bool unusable;  /* prompts do not find it any more */
    bool touched;   /* used and hits are newer than the catalog's */
    bool named;     /* scratch of evicting: a named context needs it */
    uint64_t used, hits;
    uint64_t worth; /* worth.h */
    bool guest;
    uint32_t number; /* while room is made */
    int64_t match;  /* scratch of a look-up, as in eng_segment */
    bool path;      /* scratch of eng_mirror_trace */
};

typedef struct {
    eng_mirror_entry **entries; /* a parent stands before its children */
    uint32_t n, cap;
    uint64_t bytes; /* of files */
    uint64_t clock, offered;
    eng_evicted evicted;
} eng_mirror;

void eng_mirror_done(eng_mirror *m);
eng_mirror_entry *eng_mirror_get(const eng_mirror *m, const eng_segment_id *id);

/* Adds a segment; ids are copied. Its parent may have been merged since it was written: then what holds the same tokens stands for it. -ENOENT: there is none; -EBADMSG: it cannot be that one's child, or its id is not that of its
 * tokens; -EEXIST; -ENOMEM. */
int eng_mirror_add(eng_mirror *m, const eng_catalog_row *row, const eng_segment_owner *owner, eng_mirror_entry **ret);
/* What continues `old` continues `e` from now on, which holds the same tokens up to old's end. */
void eng_mirror_adopt(eng_mirror *m, eng_mirror_entry *e, eng_mirror_entry *old);
void eng_mirror_remove(eng_mirror *m, eng_mirror_entry *e); /* without children */

/* The entry that agrees with most of the prefix, at least ENG_CACHE_MIN_PREFIX tokens of it; how many is its `match`. NULL: none. It and those before
 * it become the last used. */
eng_mirror_entry *eng_mirror_find(eng_mirror *m, const eng_prefix *p, eng_prefix_stop *ret);

/* Sets `match` of each of the tenant's entries, of whatever model, exact or not: how many of ids[0, n) there are up to where it goes on with others, or ends; -1:
 * none of its own. And `path` of those that go on with no others, and of what they continue, wherever they leave that. */
void eng_mirror_trace(eng_mirror *m, const eng_prefix *p);

/* After that: whether it goes on with no others. */
bool eng_mirror_ends(const eng_mirror_entry *e, const eng_prefix *p);

/* Counts what is to come to a tier of r->limit bytes, and chooses what goes for it (worth.h), never what has pins or is named: (*ret)[0, result), children first; free
 * *ret. -ENOSPC: there is no room; -ENOMEM. */
int64_t eng_mirror_choose(eng_mirror *m, eng_room *r, eng_mirror_entry ***ret);

/* Some entry below e, or e, that has no child. */
eng_mirror_entry *eng_mirror_leaf(const eng_mirror *m, eng_mirror_entry *e);

/* Makes e and all below it unusable, unless any of them is named or pinned. */
bool eng_mirror_condemn(eng_mirror *m, eng_mirror_entry *e);

#endif
