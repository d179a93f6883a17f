#include "context_folder.h"

#include "fault.h"
#include "text.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum { FOLDER_FLAGS = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC };

/* "xx/<id><suffix>" */
typedef struct {
    char s[3 + ENG_SEGMENT_NAME + 4];
} file_name;

static file_name name_of(const eng_segment_id *id, const char *suffix)
{
    char text[ENG_SEGMENT_NAME];
    file_name n;
    eng_segment_id_text(id, text);
    snprintf(n.s, sizeof n.s, "%.2s/%s%s", text, text, suffix);
    return n;
}

/* ---- opening ----------------------------------------------------------------------------------------------------- */

static int make_path(const char *dir)
{
    char path[PATH_MAX];
    if ((size_t)snprintf(path, sizeof path, "%s", dir) >= sizeof path)
        return -ENAMETOOLONG;
    for (char *p = path + 1; *p; p++)
        if (*p == '/') {
            *p = 0;
            if (mkdir(path, 0700) < 0 && errno != EEXIST)
                return -errno;
            *p = '/';
        }
    return mkdir(path, 0700) < 0 && errno != EEXIST ? -errno : 0;
}

static int open_parts(const char *dir, eng_folder *f, char *err, size_t errlen)
{
    struct stat st;
    int r = make_path(dir);
    if (r < 0 || !realpath(dir, f->path) || (f->dir = open(f->path, FOLDER_FLAGS)) < 0 || fstat(f->dir, &st) < 0) {
        r = r < 0 ? r : -errno;
        return eng_fail(err, errlen, r, "%s: %s", dir, strerror(-r));
    }
    if (st.st_mode & (S_IWGRP | S_IWOTH))
        return eng_fail(err, errlen, -EPERM, "%s: others may write there", dir);
    f->lock = openat(f->dir, "lock", O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (f->lock < 0)
        return eng_fail(err, errlen, -errno, "%s/lock: %s", dir, strerror(errno));
    if (flock(f->lock, LOCK_EX | LOCK_NB) < 0)
        return eng_fail(err, errlen, errno == EWOULDBLOCK ? -EBUSY : -errno, "%s: %s", dir,
                        errno == EWOULDBLOCK ? "another process keeps its contexts there" : strerror(errno));
    if ((mkdirat(f->dir, "segments", 0700) < 0 && errno != EEXIST) || (f->segments = openat(f->dir, "segments", FOLDER_FLAGS)) < 0)
        return eng_fail(err, errlen, -errno, "%s/segments: %s", dir, strerror(errno));
    if (fchmod(f->segments, 0700) < 0 || fsync(f->dir) < 0)
        return eng_fail(err, errlen, -errno, "%s: %s", dir, strerror(errno));
    return 0;
}

int eng_folder_open(const char *dir, eng_folder *ret, char *err, size_t errlen)
{
    *ret = (eng_folder){.dir = -1, .segments = -1, .lock = -1};
    return open_parts(dir, ret, err, errlen);
}

void eng_folder_done(eng_folder *f)
{
    int *const fds[] = {&f->segments, &f->lock, &f->dir};
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++) {
        if (*fds[i] >= 0)
            close(*fds[i]);
        *fds[i] = -1;
    }
}

/* ---- files ------------------------------------------------------------------------------------------------------- */

/* The folder xx of a file, made where it is not there. */
static int open_folder_of(const eng_folder *f, const file_name *name)
{
    char xx[3] = {name->s[0], name->s[1], 0};
    int fd = openat(f->segments, xx, FOLDER_FLAGS);
    if (fd >= 0 || errno != ENOENT)
        return fd < 0 ? -errno : fd;
    if (mkdirat(f->segments, xx, 0700) < 0 || fsync(f->segments) < 0)
        return -errno;
    fd = openat(f->segments, xx, FOLDER_FLAGS);
    return fd < 0 ? -errno : fd;
}

int eng_folder_save(const eng_folder *f, const eng_segment_head *head, const eng_segment *s, unsigned parts)
{
    file_name name = name_of(&head->id, ".seg"), temporary = name_of(&head->id, ".new");
    int folder = open_folder_of(f, &name), r, fd;
    if (folder < 0)
        return folder;
    eng_fault_point("save:begin");
    unlinkat(f->segments, temporary.s, 0); /* of a write that failed and could not be cleaned up */
    fd = openat(f->segments, temporary.s, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) {
        r = -errno;
        close(folder);
        return r;
    }
    eng_fault_point("save:created");
    r = eng_segment_write(fd, head, s, parts);
    eng_fault_point("save:written");
    if (r == 0 && fsync(fd) < 0)
        r = -errno;
    close(fd);
    eng_fault_point("save:synced");
    if (r == 0 && renameat(f->segments, temporary.s, f->segments, name.s) < 0)
        r = -errno;
    eng_fault_point("save:renamed");
    if (r == 0 && fsync(folder) < 0)
        r = -errno;
    if (r < 0)
        unlinkat(f->segments, temporary.s, 0);
    close(folder);
    return r;
}

eng_miss eng_folder_file(const eng_folder *f, const eng_segment_id *id, eng_segment_file **ret, char *err, size_t errlen)
{
    file_name name = name_of(id, ".seg");
    return eng_segment_file_open(f->segments, name.s, ret, err, errlen);
}

static int remove_name(int dir, const char *name)
{
    if (unlinkat(dir, name, 0) == 0 || errno == ENOENT || ((errno == EISDIR || errno == EPERM) && unlinkat(dir, name, AT_REMOVEDIR) == 0))
        return 0;
    return -errno;
}

int eng_folder_remove(const eng_folder *f, const eng_segment_id *id)
{
    file_name name = name_of(id, ".seg");
    return remove_name(f->segments, name.s);
}

/* ---- what is there ----------------------------------------------------------------------------------------------- */

static bool id_of_name(const char *xx, const char *name, eng_segment_id *ret)
{
    size_t n = strlen(name), digits = ENG_SEGMENT_NAME - 1;
    char text[ENG_SEGMENT_NAME];
    if (n != digits + 4 || strcmp(name + digits, ".seg") != 0 || strncmp(name, xx, 2) != 0)
        return false;
    memcpy(text, name, digits);
    text[digits] = 0;
    return eng_segment_id_parse(text, ret);
}

static int each_file(int parent, const char *xx, void (*each)(void *ctx, const eng_segment_id *id, int64_t bytes), void *ctx)
{
    int fd = openat(parent, xx, FOLDER_FLAGS);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir) {
        int r = -errno;
        if (fd >= 0)
            close(fd);
        return r;
    }
    for (struct dirent *d; (d = readdir(dir));) {
        eng_segment_id id;
        struct stat st;
        if (!strcmp(d->d_name, ".") || !strcmp(d->d_name, ".."))
            continue;
        if (!id_of_name(xx, d->d_name, &id))
            remove_name(fd, d->d_name);
        else if (fstatat(fd, d->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0)
            each(ctx, &id, S_ISREG(st.st_mode) ? (int64_t)st.st_size : -1);
    }
    closedir(dir);
    return 0;
}

int eng_folder_each(const eng_folder *f, void (*each)(void *ctx, const eng_segment_id *id, int64_t bytes), void *ctx)
{
    for (int i = 0; i < 256; i++) {
        char xx[3];
        snprintf(xx, sizeof xx, "%02x", i);
        int r = each_file(f->segments, xx, each, ctx);
        if (r == -ENOTDIR || r == -ELOOP) /* not ours */
            unlinkat(f->segments, xx, 0);
        else if (r < 0 && r != -ENOENT)
            return r;
    }
    return 0;
}

uint64_t eng_folder_free(const eng_folder *f)
{
    struct statvfs st;
    return fstatvfs(f->segments, &st) < 0 ? UINT64_MAX : (uint64_t)st.f_bavail * st.f_frsize;
}
