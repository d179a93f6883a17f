/* Reads of large files past the page cache (O_DIRECT): what a file's reader keeps in memory of its own is not kept a second time by the system, whose memory for that, in
 * pages of 4 KiB, has to be found and filled first: with huge pages as their target such reads took two to four times as long as the disk (README.md, "Contexts on disk").
 *
 * What the page cache has is read from there, and so is everything where the file system knows no such reads: a direct read that did not bring all is no error, its caller
 * reads in the usual way and gets the reason there.
 */
#ifndef RETRIEVALD_DIRECT_READ_H
#define RETRIEVALD_DIRECT_READ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { ENG_DIRECT_PAGE = 4096 };

typedef struct {
    int fd;           /* negative: nothing is read so */
    uint8_t *file;    /* mapped, to ask what of it is in memory; never read */
    uint64_t bytes;
} eng_direct;

/* For a regular file of so many bytes that is open as fd, which may be closed first. Never fails: *ret may be unable to read. */
void eng_direct_open(int fd, uint64_t bytes, eng_direct *ret);
void eng_direct_close(eng_direct *d);

/* Reads [offset, offset + n) to p, whose address has the offset's place in its page; the rest of the first and of the last page there becomes anything. True: all of it.
 * Any thread, several at once. */
bool eng_direct_read(const eng_direct *d, uint8_t *p, size_t n, uint64_t offset);

#endif
