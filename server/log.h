/* Log lines on stderr: "<6>text" for the journal when it reads them, else "2026-01-31 12:00:00 info: text". Never prompts or answers. */
#ifndef RETRIEVALD_SERVER_LOG_H
#define RETRIEVALD_SERVER_LOG_H

#include <stdarg.h>
#include <syslog.h>

/* level: error|warning|info|debug. Before any thread starts. -EINVAL: unknown level. */
int srv_log_init(const char *level);

/* priority: LOG_ERR ... LOG_DEBUG. One line whatever the text holds. Any thread. */
void srv_log(int priority, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* For eng_params.log. */
void srv_log_engine(void *ctx, int priority, const char *text);

#endif
