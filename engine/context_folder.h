/* STATE/segments/xx/<id>.seg: how segment files come and go. A file has its name only when all of it is on the disk: written under another one,
 * synced, renamed, its folder synced. Everything is opened relative to folders that are open, and no link is followed. */
#ifndef RETRIEVALD_CONTEXT_FOLDER_H
#define RETRIEVALD_CONTEXT_FOLDER_H

#include "segment_file.h"

#include <limits.h>

typedef struct {
    char path[PATH_MAX]; /* of STATE, without links */
    int dir, segments, lock; /* descriptors; -1: none */
} eng_folder;

/* Makes what is not there, 0700. -EBUSY: another process has it; -EPERM: others could write there. */
int eng_folder_open(const char *dir, eng_folder *ret, char *err, size_t errlen);
void eng_folder_done(eng_folder *f); /* also of one that failed to open */

/* Instead of the file of this name that there may be. */
int eng_folder_save(const eng_folder *f, const eng_segment_head *head, const eng_segment *s, unsigned parts);
eng_miss eng_folder_file(const eng_folder *f, const eng_segment_id *id, eng_segment_file **ret, char *err, size_t errlen);
int eng_folder_remove(const eng_folder *f, const eng_segment_id *id);

/* Every file that has a segment's name, with its size, -1 where that is not a regular file; what has another name is removed. */
int eng_folder_each(const eng_folder *f, void (*each)(void *ctx, const eng_segment_id *id, int64_t bytes), void *ctx);

uint64_t eng_folder_free(const eng_folder *f); /* bytes that files may still take */

#endif
