#include "direct_read.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = ENG_DIRECT_PAGE, ASK = 256 }; /* pages asked about at a time */

void eng_direct_open(int fd, uint64_t bytes, eng_direct *ret)
{
    char same[64];
    *ret = (eng_direct){.fd = -1, .bytes = bytes};
    if (sysconf(_SC_PAGESIZE) != PAGE)
        return;
    void *file = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (file == MAP_FAILED)
        return;
    ret->file = file;
    /* The very file, whatever its name means by now. The flag is a description's, so it has to be another one than that of the usual reads. */
    snprintf(same, sizeof same, "/proc/self/fd/%d", fd);
    ret->fd = open(same, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | O_DIRECT);
}

void eng_direct_close(eng_direct *d)
{
    if (d->fd >= 0)
        close(d->fd);
    if (d->file)
        munmap(d->file, d->bytes);
    *d = (eng_direct){.fd = -1};
}

/* Whether the page cache has most of some whole pages: less then comes from the disk than by a direct read. */
static bool mostly_cached(const eng_direct *d, uint64_t from, size_t n)
{
    unsigned char in[ASK];
    size_t there = 0, pages = (n + PAGE - 1) / PAGE;
    for (size_t i = 0; i < pages; i += ASK) {
        size_t few = pages - i < ASK ? pages - i : ASK;
        if (mincore(d->file + from + i * PAGE, few * PAGE, in) < 0)
            return true;
        for (size_t j = 0; j < few; j++)
            there += in[j] & 1;
    }
    return 2 * there > pages;
}

bool eng_direct_read(const eng_direct *d, uint8_t *p, size_t n, uint64_t offset)
{
    size_t before = offset % PAGE, whole = (before + n + PAGE - 1) / PAGE * PAGE;
    if (d->fd < 0 || ((uintptr_t)p - before) % PAGE || offset + n > d->bytes || mostly_cached(d, offset - before, before + n))
        return false;
    ssize_t got = pread(d->fd, p - before, whole, (off_t)(offset - before)); /* less at the file's end */
    return got >= 0 && (size_t)got >= before + n;
}
