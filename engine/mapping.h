/* Parts of files in memory, without being the program's own memory: a file that shrinks, or a disk that fails, marks its mapping as failed and does no more.
 *
 * The kernel tells of such a page by SIGBUS, to the thread that reads it. The handler, which the first mapping installs, looks the address up in a
 * table of fixed size without a lock, sets the mapping's flag, puts zero pages in the place of all that is left of it, and lets the thread go on; whoever
 * uses the mapping looks at the flag before believing what was computed. All it does is atomic loads and stores, and mmap(), a plain system call on Linux: both are
 * safe in a signal handler. Other causes of SIGBUS end the program, as they would without it.
 *
 * Threads: one maps and unmaps; any may read, until then.
 */
#ifndef RETRIEVALD_MAPPING_H
#define RETRIEVALD_MAPPING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct eng_mapping eng_mapping;

/* Maps [offset, offset + bytes) of a file, to be read; offset: a multiple of a page. -EMFILE: too many; -errno. */
int eng_mapping_new(int fd, uint64_t offset, size_t bytes, eng_mapping **ret);
void eng_mapping_free(eng_mapping *m); /* NULL is fine */
uint8_t *eng_mapping_data(const eng_mapping *m);
bool eng_mapping_failed(const eng_mapping *m);

#endif
