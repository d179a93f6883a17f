/* A look at all files of kept contexts. It goes through the folders by itself: context_folder.c tidies up, which only their owner may. */
#include "contexts.h"

#include "segment_file.h"
#include "text.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    const char *dir;
    void (*bad)(void *ctx, const char *path, eng_miss why, const char *err);
    void *ctx;
    eng_disk_check *sum;
} verification;

/* Whether it is called as a segment is, whose id is *ret; `suffix` is the rest of its name. */
static bool is_called(const char *xx, const char *name, const char *suffix, eng_segment_id *ret)
{
    char text[ENG_SEGMENT_NAME];
    size_t digits = ENG_SEGMENT_NAME - 1;
    if (strlen(name) < digits || strcmp(name + digits, suffix) != 0 || strncmp(name, xx, 2) != 0)
        return false;
    memcpy(text, name, digits);
    text[digits] = 0;
    return eng_segment_id_parse(text, ret);
}

static void verify_file(const verification *v, int fd, const char *xx, const char *name)
{
    eng_segment_id id;
    eng_segment_file *f = NULL;
    char path[PATH_MAX], err[256] = "its name is no segment's";
    if (is_called(xx, name, ".new", &id)) {
        v->sum->unfinished++;
        return;
    }
    eng_miss why = is_called(xx, name, ".seg", &id) ? eng_segment_file_open(fd, name, &f, err, sizeof err) : ENG_MISS_KIND;
    if (why == ENG_MISS_GONE) /* evicted a moment ago */
        return;
    if (!why && !eng_segment_id_equal(&eng_segment_file_head(f)->id, &id)) {
        snprintf(err, sizeof err, "its name is another segment's");
        why = ENG_MISS_TOKENS;
    }
    if (!why)
        why = eng_segment_file_verify(f, err, sizeof err);
    v->sum->files++;
    v->sum->bytes += f ? eng_segment_file_head(f)->bytes : 0;
    v->sum->bad += why != ENG_MISS_NONE;
    if (why && v->bad) {
        snprintf(path, sizeof path, "%s/segments/%s/%s", v->dir, xx, name);
        v->bad(v->ctx, path, why, err);
    }
    eng_segment_file_close(f);
}

static int open_folder(int at, const char *name)
{
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

static int verify_folder(const verification *v, int segments, const char *xx)
{
    int fd = open_folder(segments, xx);
    DIR *d = fd < 0 ? NULL : fdopendir(fd);
    if (!d) {
        if (fd >= 0)
            close(fd);
        return fd == -ENOENT ? 0 : fd < 0 ? fd : -ENOMEM;
    }
    for (struct dirent *e; (e = readdir(d));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            verify_file(v, fd, xx, e->d_name);
    closedir(d);
    return 0;
}

int eng_disk_verify(const char *dir, void (*bad)(void *ctx, const char *path, eng_miss why, const char *err), void *ctx, eng_disk_check *ret, char *err,
                    size_t errlen)
{
    char path[PATH_MAX];
    eng_disk_check sum = {0};
    verification v = {.dir = dir, .bad = bad, .ctx = ctx, .sum = &sum};
    if ((size_t)snprintf(path, sizeof path, "%s/segments", dir) >= sizeof path)
        return eng_fail(err, errlen, -ENAMETOOLONG, "%.200s...: the path is too long", dir);
    int segments = open_folder(AT_FDCWD, path), r = segments;
    if (r < 0)
        return eng_fail(err, errlen, r, "%s: %s", path, r == -ENOENT ? "no contexts are kept there" : strerror(-r));
    r = 0;
    for (int i = 0; i < 256 && r == 0; i++) {
        char xx[3];
        snprintf(xx, sizeof xx, "%02x", i);
        r = verify_folder(&v, segments, xx);
        if (r < 0)
            eng_fail(err, errlen, r, "%s/%s: %s", path, xx, strerror(-r));
    }
    close(segments);
    if (r == 0)
        *ret = sum;
    return r;
}
