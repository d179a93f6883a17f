/* STATE/catalog.db: what segments there are, in SQLite (WAL, synchronous=FULL). Belongs to one thread at a time. A file is there before its row,
 * and a row goes before its file, so that the folder is always the truth: what the catalog lost comes back from the files' heads. */
#ifndef RETRIEVALD_CONTEXT_CATALOG_H
#define RETRIEVALD_CONTEXT_CATALOG_H

#include "segment_file.h"

typedef struct eng_catalog eng_catalog;

typedef struct {
    eng_segment_head head;
    const int32_t *ids; /* [head.n] */
    uint64_t used;      /* larger: used later */
    uint64_t hits;
} eng_catalog_row;

/* Opens it or makes it; one that is damaged, or of another version, is deleted and made anew (*ret_new), as is any when `anew`. -errno with a
 * sentence. */
int eng_catalog_open(const char *path, bool anew, eng_catalog **ret, bool *ret_new, char *err, size_t errlen);
void eng_catalog_close(eng_catalog *c);

/* All rows. -EBADMSG: one makes no sense. */
int eng_catalog_each(eng_catalog *c, int (*row)(void *ctx, const eng_catalog_row *r), void *ctx);

/* -EIO and so on; nothing is changed then. A begin and a commit may stand around several. */
int eng_catalog_put(eng_catalog *c, const eng_catalog_row *r);
int eng_catalog_remove(eng_catalog *c, const eng_segment_id *id);
int eng_catalog_touch(eng_catalog *c, const eng_segment_id *id, uint64_t used, uint64_t hits);
int eng_catalog_begin(eng_catalog *c);
int eng_catalog_commit(eng_catalog *c);

/* A named context (contexts.h). */
typedef struct {
    uint64_t tenant, model;
    const char *name;
    eng_context_content content;
    bool pinned;
    int64_t created, expires, used;
    uint64_t hits;
} eng_catalog_name;

/* All names that can be read and have their checksum: also of a catalog that was damaged or of another version, as they were before it was made anew. */
int eng_catalog_each_name(eng_catalog *c, int (*row)(void *ctx, const eng_catalog_name *r), void *ctx);

/* As those of segments; old: the row of this name, if it is not empty or the same, goes at once. */
int eng_catalog_put_name(eng_catalog *c, const eng_catalog_name *r, const char *old);
int eng_catalog_remove_name(eng_catalog *c, uint64_t tenant, uint64_t model, const char *name);
int eng_catalog_touch_name(eng_catalog *c, const eng_catalog_name *r); /* used and hits */

#endif
