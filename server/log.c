#include "log.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static int max_priority = LOG_INFO; /* set once, before threads start */
static bool to_journal;

/* systemd tells device and inode of the stream it reads: a redirected stderr does not match. */
static bool stderr_is_journal(void)
{
    const char *s = getenv("JOURNAL_STREAM");
    unsigned long long dev, ino;
    struct stat st;
    return s && sscanf(s, "%llu:%llu", &dev, &ino) == 2 && fstat(STDERR_FILENO, &st) == 0 && st.st_dev == dev && st.st_ino == ino;
}

int srv_log_init(const char *level)
{
    static const struct {
        const char *name;
        int priority;
    } levels[] = {{"error", LOG_ERR}, {"warning", LOG_WARNING}, {"info", LOG_INFO}, {"debug", LOG_DEBUG}};
    for (size_t i = 0; i < sizeof(levels) / sizeof(levels[0]); i++)
        if (strcmp(level, levels[i].name) == 0) {
            max_priority = levels[i].priority;
            to_journal = stderr_is_journal();
            return 0;
        }
    return -EINVAL;
}

void srv_log(int priority, const char *fmt, ...)
{
    if (priority > max_priority)
        return;
    static const char *const names[] = {"emergency", "alert", "critical", "error", "warning", "notice", "info", "debug"};
    char line[1200];
    int n;
    if (to_journal) {
        n = snprintf(line, sizeof(line), "<%d>", priority);
    } else {
        struct tm tm;
        time_t now = time(NULL);
        localtime_r(&now, &tm);
        char when[32];
        strftime(when, sizeof(when), "%F %T", &tm);
        n = snprintf(line, sizeof(line), "%s %s: ", when, names[priority & 7]);
    }
    va_list ap;
    va_start(ap, fmt);
    int m = vsnprintf(line + n, sizeof(line) - (size_t)n - 1, fmt, ap);
    va_end(ap);
    size_t len = strlen(line);
    if (m < 0)
        return;
    for (size_t i = (size_t)n; i < len; i++)
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7F)
            line[i] = ' ';
    line[len++] = '\n';
    /* One write: lines of several threads do not mix. */
    if (write(STDERR_FILENO, line, len) < 0)
        return;
}

void srv_log_engine(void *ctx, int priority, const char *text)
{
    (void)ctx;
    srv_log(priority, "%s", text);
}
