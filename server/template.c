/* Threads: any thread may render. A render first asks the helper for a child, by sending it one end of a socket pair (t->lock), and then
 * talks to that child alone, without a lock. template_helper.py describes the messages.
 */
#include "template.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <seccomp.h>
#include <signal.h>
#include <spawn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define HELPER "template_helper.py"
#define PYTHON "/usr/bin/python3"
#ifndef RETRIEVALD_DATADIR
#define RETRIEVALD_DATADIR "/usr/share/retrievald"
#endif

/* U+FDD0 U+FDD1, as in the helper. */
#define GUARD     "\xEF\xB7\x90\xEF\xB7\x91"
#define GUARD_LEN (sizeof GUARD - 1)

enum { CONTROL_FD = 3, OP_COMPILE = 1, OP_RENDER = 2, MAX_FILTER = 16384 };

/* Limits. A child's CPU time and memory grow with the request: 50 MB of messages are normal, and a single character beyond U+FFFF makes
 * Python keep four bytes for each. The wall clock only matters when the machine is too busy to give the child its CPU time. */
enum {
    READY_MS = 30000, /* python's start and imports */
    ACK_MS = 10000,   /* a fork */
    CPU_S = 3,
    CPU_BYTES_PER_S = 4 << 20,
    MEMORY = 256 << 20,
    MEMORY_PER_BYTE = 48,
    REPLY_MAX = 64 << 20,
    REPLY_PER_BYTE = 4,
    ERROR_MAX = 4096,
    SPAWNS = 5,        /* at most so many starts of the helper ... */
    SPAWNS_MS = 30000, /* ... in this time */
};

struct srv_template {
    pthread_mutex_t lock;
    int control;              /* guarded by lock; -1: no helper */
    pid_t pid;                /* guarded by lock */
    unsigned generation;      /* guarded by lock: which helper this is */
    uint64_t spawned[SPAWNS]; /* guarded by lock: when the last helpers were started, a ring */
    unsigned n_spawned;       /* guarded by lock */
    char script[PATH_MAX];
    char filter[MAX_FILTER]; /* the children's seccomp program */
    size_t filter_len;
    /* From srv_template_set, constant afterwards. */
    char *strings;
    size_t strings_len;
    uint32_t n_strings;
    int broken; /* 0, or what every render returns, with why */
    char why[512];
};

typedef struct {
    uint32_t operation, n_strings, cpu_seconds, wall_seconds;
    uint64_t memory, strings_len, json_len, most;
} header;

typedef struct {
    int32_t status;
    uint32_t zero;
    uint64_t len;
} reply_header;

static uint64_t now_ms(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000 + (uint64_t)ts.tv_nsec / 1000000;
}

static int fail(int rc, const char *text, char *err, size_t errlen)
{
    snprintf(err, errlen, "%s", text);
    return rc;
}

/* ---- the children's seccomp program ---- */

static int allow(scmp_filter_ctx ctx)
{
    static const int calls[] = {
        SCMP_SYS(read),
        SCMP_SYS(readv),
        SCMP_SYS(write),
        SCMP_SYS(writev),
        SCMP_SYS(exit),
        SCMP_SYS(exit_group),
        SCMP_SYS(brk),
        SCMP_SYS(munmap),
        SCMP_SYS(madvise),
        SCMP_SYS(futex),
        SCMP_SYS(rt_sigreturn),
        SCMP_SYS(rt_sigprocmask),
        SCMP_SYS(restart_syscall),
        SCMP_SYS(clock_gettime),
        SCMP_SYS(gettimeofday),
        SCMP_SYS(time),
        SCMP_SYS(getrandom),
        SCMP_SYS(sched_yield),
    };
    int r = 0;
    for (size_t i = 0; i < sizeof calls / sizeof *calls && !r; i++)
        r = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, calls[i], 0);
    /* Memory, but none that can be executed, and no mapping of anything. */
    if (!r)
        r = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(mmap), 2, SCMP_A2(SCMP_CMP_MASKED_EQ, PROT_EXEC, 0),
                             SCMP_A3(SCMP_CMP_MASKED_EQ, MAP_ANONYMOUS, MAP_ANONYMOUS));
    if (!r)
        r = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(mprotect), 1, SCMP_A2(SCMP_CMP_MASKED_EQ, PROT_EXEC, 0));
    if (!r)
        r = seccomp_rule_add(ctx, SCMP_ACT_ALLOW, SCMP_SYS(mremap), 0);
    return r;
}

/* Made here, by libseccomp, and loaded by the child itself, which is Python. */
static int make_filter(srv_template *t)
{
    int fd = -1, r = -ENOMEM;
    scmp_filter_ctx ctx = seccomp_init(SCMP_ACT_ERRNO(EPERM));
    if (!ctx)
        return -ENOMEM;
    r = allow(ctx);
    if (r)
        goto cleanup;
    fd = memfd_create("filter", MFD_CLOEXEC);
    if (fd < 0) {
        r = -errno;
        goto cleanup;
    }
    r = seccomp_export_bpf(ctx, fd);
    if (r)
        goto cleanup;
    ssize_t n = pread(fd, t->filter, sizeof t->filter, 0);
    if (n <= 0 || n == sizeof t->filter)
        r = -EIO;
    else
        t->filter_len = (size_t)n;
cleanup:
    if (fd >= 0)
        close(fd);
    seccomp_release(ctx);
    return r;
}

/* ---- the helper ---- */

/* Next to the program (or, in a build tree, next to the program's neighbour), else where it is installed. */
static int find_script(srv_template *t, char *err, size_t errlen)
{
    char exe[PATH_MAX] = "";
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    char *slash = n > 0 ? strrchr(exe, '/') : NULL;
    if (slash)
        *slash = 0;
    static const char *const below[] = {"", "/../server"};
    for (size_t i = 0; slash && i < sizeof below / sizeof *below; i++) {
        int len = snprintf(t->script, sizeof t->script, "%s%s/" HELPER, exe, below[i]);
        if (len < (int)sizeof t->script && !access(t->script, R_OK))
            return 0;
    }
    snprintf(t->script, sizeof t->script, "%s", RETRIEVALD_DATADIR "/" HELPER);
    if (!access(t->script, R_OK))
        return 0;
    snprintf(err, errlen, "the chat template helper " HELPER " is neither in %s nor in " RETRIEVALD_DATADIR, exe);
    return -ENOENT;
}

/* 0, -ETIMEDOUT or -errno */
static int wait_for(int fd, short events, uint64_t deadline)
{
    for (;;) {
        uint64_t now = now_ms();
        if (now >= deadline)
            return -ETIMEDOUT;
        struct pollfd p = {.fd = fd, .events = events};
        int r = poll(&p, 1, deadline - now > INT_MAX ? INT_MAX : (int)(deadline - now));
        if (r > 0)
            return 0;
        if (r < 0 && errno != EINTR)
            return -errno;
    }
}

static int spawn_python(srv_template *t, int control, pid_t *ret_pid)
{
    /* A TZ in the environment keeps glibc from looking at /etc/localtime again, which a child cannot. */
    const char *zone = getenv("TZ");
    char tz[256];
    if (snprintf(tz, sizeof tz, "TZ=%s", zone && *zone ? zone : ":/etc/localtime") >= (int)sizeof tz)
        return -EINVAL;
    char lang[] = "LC_ALL=C.UTF-8", python[] = PYTHON, isolated[] = "-IB";
    char *env[] = {tz, lang, NULL}, *argv[] = {python, isolated, t->script, NULL};

    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    int r = posix_spawn_file_actions_init(&files);
    if (r)
        return -r;
    r = posix_spawnattr_init(&attr);
    if (r) {
        posix_spawn_file_actions_destroy(&files);
        return -r;
    }
    /* A process group of its own: a ^C is for the daemon, which may still have requests to finish. */
    if ((r = posix_spawn_file_actions_adddup2(&files, control, CONTROL_FD)) ||
        (r = posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0)) ||
        (r = posix_spawn_file_actions_addopen(&files, 1, "/dev/null", O_WRONLY, 0)) ||
        (r = posix_spawn_file_actions_addclosefrom_np(&files, CONTROL_FD + 1)) ||
        (r = posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF)) ||
        (r = posix_spawnattr_setsigmask(&attr, &none)) || (r = posix_spawnattr_setsigdefault(&attr, &all)))
        goto cleanup;
    r = posix_spawn(ret_pid, PYTHON, &files, &attr, argv, env);
cleanup:
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&files);
    return -r;
}

/* Under t->lock. */
static void drop_helper(srv_template *t)
{
    if (t->control < 0)
        return;
    close(t->control);
    t->control = -1;
    kill(t->pid, SIGKILL);
    while (waitpid(t->pid, NULL, 0) < 0 && errno == EINTR)
        ;
}

/* The helper's side of the first exchange. Under t->lock. */
static int greet(srv_template *t, char *err, size_t errlen)
{
    char text[ERROR_MAX];
    int r = 0;
    if (send(t->control, t->filter, t->filter_len, MSG_NOSIGNAL) < 0)
        r = -errno; /* it may have gone after it said why */
    int w = wait_for(t->control, POLLIN, now_ms() + READY_MS);
    if (w) {
        snprintf(err, errlen, "the chat template helper (" PYTHON " %s) does not start: %s", t->script, strerror(-w));
        return w;
    }
    ssize_t n = recv(t->control, text, sizeof text - 1, 0);
    if (!r && n == 2 && !memcmp(text, "ok", 2))
        return 0;
    text[n > 0 ? n : 0] = 0;
    snprintf(err, errlen, "the chat template helper (" PYTHON " %s) does not start: %s", t->script, n > 0 ? text : "it ended");
    return -EIO;
}

/* Under t->lock. */
static int start_helper(srv_template *t, char *err, size_t errlen)
{
    uint64_t now = now_ms(), *slot = &t->spawned[t->n_spawned % SPAWNS];
    if (t->n_spawned >= SPAWNS && now - *slot < SPAWNS_MS)
        return fail(-EIO, "the chat template helper keeps ending; it is not started again for some seconds", err, errlen);
    *slot = now;
    t->n_spawned++;

    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0) {
        int r = -errno;
        return fail(r, strerror(-r), err, errlen);
    }
    int r = spawn_python(t, ends[1], &t->pid);
    close(ends[1]);
    if (r) {
        close(ends[0]);
        snprintf(err, errlen, "the chat template helper cannot be started: " PYTHON ": %s", strerror(-r));
        return r;
    }
    t->control = ends[0];
    t->generation++;
    r = greet(t, err, errlen);
    if (r)
        drop_helper(t);
    return r;
}

static int send_fd(int control, int fd)
{
    char byte = 0;
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(sizeof(int))];
    } u;
    memset(&u, 0, sizeof u);
    struct iovec iov = {&byte, 1};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = u.space, .msg_controllen = sizeof u.space};
    struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    for (;;) {
        if (sendmsg(control, &msg, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0)
            return 0;
        if (errno != EINTR)
            return -errno;
    }
}

/* A socket to a child that is about to be forked; starts a helper where there is none, or only a dead one. */
static int ask_for_child(srv_template *t, int *ret_fd, unsigned *ret_generation, char *err, size_t errlen)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) < 0) {
        int r = -errno;
        return fail(r == -ENOMEM ? r : -EIO, strerror(-r), err, errlen);
    }
    pthread_mutex_lock(&t->lock);
    int r = -EPIPE;
    for (int attempt = 0; r && attempt < 2; attempt++) {
        if (t->control < 0 && (r = start_helper(t, err, errlen)))
            break;
        r = send_fd(t->control, ends[1]);
        if (r) {
            fail(r, "the chat template helper does not answer", err, errlen);
            drop_helper(t);
        }
    }
    *ret_generation = t->generation;
    pthread_mutex_unlock(&t->lock);
    close(ends[1]);
    if (r) {
        close(ends[0]);
        return -EIO;
    }
    *ret_fd = ends[0];
    return 0;
}

/* ---- talking to a child ---- */

/* 0, -EPIPE when the child is gone, -ETIMEDOUT, -errno */
static int send_all(int fd, const void *data, size_t len, uint64_t deadline)
{
    for (const char *p = data; len;) {
        ssize_t n = send(fd, p, len, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) {
            p += n;
            len -= (size_t)n;
            continue;
        }
        int r = errno == EAGAIN ? wait_for(fd, POLLOUT, deadline) : errno == EINTR ? 0 : errno == ECONNRESET ? -EPIPE : -errno;
        if (r)
            return r;
    }
    return 0;
}

static int recv_all(int fd, void *data, size_t len, uint64_t deadline)
{
    for (char *p = data; len;) {
        ssize_t n = recv(fd, p, len, MSG_DONTWAIT);
        if (n > 0) {
            p += n;
            len -= (size_t)n;
            continue;
        }
        int r = !n ? -EPIPE : errno == EAGAIN ? wait_for(fd, POLLIN, deadline) : errno == EINTR ? 0 : errno == ECONNRESET ? -EPIPE : -errno;
        if (r)
            return r;
    }
    return 0;
}

/* The child's words, on one line and cut at a whole character. */
static void copy_error(const char *text, size_t len, char *err, size_t errlen)
{
    if (!errlen)
        return;
    if (len > errlen - 1) {
        len = errlen - 1;
        while (len && ((unsigned char)text[len] & 0xC0) == 0x80)
            len--;
    }
    for (size_t i = 0; i < len; i++)
        err[i] = (unsigned char)text[i] < 0x20 ? ' ' : text[i];
    err[len] = 0;
}

/* What a child says is as hostile as the template. */
static int recv_reply(int fd, uint64_t most, uint64_t deadline, char **ret, size_t *ret_len, char *err, size_t errlen)
{
    reply_header h;
    char text[ERROR_MAX];
    int r = recv_all(fd, &h, sizeof h, deadline);
    if (r)
        return r;
    if (h.status) {
        if ((h.status != -EINVAL && h.status != -ENOMEM && h.status != -EIO) || h.len > sizeof text)
            return fail(-EIO, "the chat template's process does not keep to its protocol", err, errlen);
        r = recv_all(fd, text, (size_t)h.len, deadline);
        if (r)
            return r;
        copy_error(text, (size_t)h.len, err, errlen);
        return h.status;
    }
    if (h.len > most)
        return fail(-ENOMEM, "the chat template prints more than it may", err, errlen);
    char *p = malloc((size_t)h.len + 1);
    if (!p)
        return fail(-ENOMEM, "no memory for the rendered prompt", err, errlen);
    r = recv_all(fd, p, (size_t)h.len, deadline);
    if (r) {
        free(p);
        return r;
    }
    p[h.len] = 0;
    *ret = p;
    *ret_len = (size_t)h.len;
    return 0;
}

/* -EAGAIN: there was no child */
static int talk(int fd, const header *h, const char *strings, const char *json, char **ret, size_t *ret_len, char *err, size_t errlen)
{
    char ack;
    if (recv_all(fd, &ack, 1, now_ms() + ACK_MS))
        return -EAGAIN;
    uint64_t start = now_ms(), deadline = start + (uint64_t)h->wall_seconds * 1000 + 1000;
    int r = send_all(fd, h, sizeof *h, deadline);
    if (!r)
        r = send_all(fd, strings, (size_t)h->strings_len, deadline);
    if (!r)
        r = send_all(fd, json, (size_t)h->json_len, deadline);
    if (!r || r == -EPIPE) /* it may have said why it went */
        r = recv_reply(fd, h->most, deadline, ret, ret_len, err, errlen);
    /* The kernel ends a child whose time is up; the processor's clock is read a little coarser than ours. */
    if (r == -EPIPE)
        r = now_ms() - start >= (uint64_t)h->cpu_seconds * 900 ? -ETIMEDOUT : -ECHILD;
    if (r == -ETIMEDOUT)
        snprintf(err, errlen, "the chat template did not finish within %u seconds", h->cpu_seconds);
    else if (r == -ECHILD)
        return fail(-EIO, "the chat template's process died", err, errlen);
    else if (r && r != -EINVAL && r != -ENOMEM && r != -EIO)
        return fail(-EIO, strerror(-r), err, errlen);
    return r;
}

static int exchange(srv_template *t, uint32_t operation, const char *json, size_t len, char **ret, size_t *ret_len, char *err,
                    size_t errlen)
{
    header h = {.operation = operation, .n_strings = t->n_strings, .strings_len = t->strings_len, .json_len = len};
    if (len > SIZE_MAX / 2 / MEMORY_PER_BYTE || len / CPU_BYTES_PER_S > 10000)
        return fail(-EINVAL, "the request is too large", err, errlen);
    h.cpu_seconds = CPU_S + (uint32_t)(len / CPU_BYTES_PER_S);
    h.wall_seconds = 2 * h.cpu_seconds + 10;
    h.memory = MEMORY + (uint64_t)MEMORY_PER_BYTE * len;
    h.most = REPLY_MAX + (uint64_t)REPLY_PER_BYTE * len;

    for (int attempt = 0; attempt < 2; attempt++) {
        int fd;
        unsigned generation;
        int r = ask_for_child(t, &fd, &generation, err, errlen);
        if (r)
            return r;
        r = talk(fd, &h, t->strings, json, ret, ret_len, err, errlen);
        close(fd);
        if (r != -EAGAIN)
            return r;
        pthread_mutex_lock(&t->lock);
        if (t->generation == generation)
            drop_helper(t);
        pthread_mutex_unlock(&t->lock);
    }
    return fail(-EIO, "the chat template helper does not answer", err, errlen);
}

/* ---- the interface ---- */

int srv_template_start(srv_template **ret, char *err, size_t errlen)
{
    srv_template *t = calloc(1, sizeof *t);
    if (!t)
        return fail(-ENOMEM, "no memory for the chat template helper", err, errlen);
    t->control = -1;
    t->broken = fail(-EINVAL, "the model has no chat template", t->why, sizeof t->why);
    int r = -pthread_mutex_init(&t->lock, NULL);
    if (r) {
        free(t);
        return fail(r, strerror(-r), err, errlen);
    }
    r = make_filter(t);
    if (r)
        snprintf(err, errlen, "seccomp filter for chat templates: %s", strerror(-r));
    else
        r = find_script(t, err, errlen);
    if (!r) {
        pthread_mutex_lock(&t->lock);
        r = start_helper(t, err, errlen);
        pthread_mutex_unlock(&t->lock);
    }
    if (r) {
        srv_template_free(t);
        return r;
    }
    *ret = t;
    return 0;
}

typedef struct {
    const char *data; /* NULL: absent */
    size_t len;
} piece;

/* u32 length and bytes each, in t->strings. */
static int pack(srv_template *t, const piece *pieces, size_t n)
{
    size_t total = 0;
    for (size_t i = 0; i < n; i++) {
        if (pieces[i].len >= UINT32_MAX || total > SIZE_MAX / 2)
            return -EINVAL;
        total += sizeof(uint32_t) + pieces[i].len;
    }
    char *p = malloc(total);
    if (!p)
        return -ENOMEM;
    free(t->strings);
    t->strings = p;
    t->strings_len = total;
    t->n_strings = (uint32_t)n;
    for (size_t i = 0; i < n; i++) {
        uint32_t len = pieces[i].data ? (uint32_t)pieces[i].len : UINT32_MAX;
        memcpy(p, &len, sizeof len);
        p += sizeof len;
        if (pieces[i].len)
            memcpy(p, pieces[i].data, pieces[i].len);
        p += pieces[i].len;
    }
    return 0;
}

static piece text_piece(const char *s)
{
    return (piece){s, s ? strlen(s) : 0};
}

int srv_template_set(srv_template *t, const char *source, size_t len, const char *bos, const char *eos, const char *const *controls,
                     size_t n_controls, char *err, size_t errlen)
{
    char *code = NULL, why[sizeof t->why] = "no memory for the chat template";
    size_t code_len = 0;
    int r = -ENOMEM;
    piece *pieces = n_controls < UINT32_MAX / 2 ? calloc(n_controls + 4, sizeof *pieces) : NULL;
    if (!pieces)
        goto cleanup;
    pieces[0] = (piece){"", 0};
    pieces[1] = (piece){source, len};
    pieces[2] = text_piece(bos);
    pieces[3] = text_piece(eos);
    for (size_t i = 0; i < n_controls; i++)
        pieces[4 + i] = text_piece(controls[i]);
    r = pack(t, pieces, n_controls + 4);
    if (!r)
        r = exchange(t, OP_COMPILE, "", 0, &code, &code_len, why, sizeof why);
    if (!r) {
        pieces[0] = (piece){code, code_len};
        r = pack(t, pieces, n_controls + 4);
    }
cleanup:
    free(pieces);
    free(code);
    t->broken = r;
    if (r) {
        memcpy(t->why, why, sizeof why);
        copy_error(why, strlen(why), err, errlen);
    }
    return r;
}

void srv_template_free(srv_template *t)
{
    if (!t)
        return;
    drop_helper(t);
    pthread_mutex_destroy(&t->lock);
    free(t->strings);
    free(t);
}

const char *srv_template_guard(void)
{
    return GUARD;
}

int srv_template_render(srv_template *t, const char *json, size_t len, char **ret, size_t *ret_len, char *err, size_t errlen)
{
    if (t->broken) {
        copy_error(t->why, strlen(t->why), err, errlen);
        return t->broken;
    }
    return exchange(t, OP_RENDER, json, len, ret, ret_len, err, errlen);
}

size_t srv_template_unguard(char *text, size_t len)
{
    char *to = text;
    const char *from = text, *end = text + len;
    while (from < end) {
        size_t left = (size_t)(end - from);
        if (left >= GUARD_LEN && !memcmp(from, GUARD, GUARD_LEN)) {
            from += GUARD_LEN;
            continue;
        }
        const char *next = memchr(from + 1, GUARD[0], left - 1);
        size_t n = next ? (size_t)(next - from) : left;
        memmove(to, from, n);
        to += n;
        from += n;
    }
    return (size_t)(to - text);
}
