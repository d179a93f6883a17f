/* retrievald contexts ...: named contexts of a running daemon; and a check of the files. */
#include "cmd_common.h"
#include "contexts.h"
#include "remote.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { EXIT_USAGE = 2 };

/* Fields of an answer, whatever it is. */
static double number(const cJSON *v, const char *key)
{
    const cJSON *n = srv_json_get(v, key);
    return cJSON_IsNumber(n) ? n->valuedouble : 0;
}

static const char *text(const cJSON *v, const char *key)
{
    const cJSON *s = srv_json_get(v, key);
    return cJSON_IsString(s) ? s->valuestring : "-";
}

static const cJSON *tier(const cJSON *v, const char *name)
{
    return srv_json_get(srv_json_get(v, "tiers"), name);
}

static const char *when(const cJSON *v, const char *key, const char *never, char buf[32])
{
    const cJSON *n = srv_json_get(v, key);
    time_t t = cJSON_IsNumber(n) ? (time_t)n->valuedouble : 0;
    struct tm tm;
    if (!t || !localtime_r(&t, &tm) || !strftime(buf, 32, "%Y-%m-%d %H:%M:%S", &tm))
        return never;
    return buf;
}

/* ---- list, show ------------------------------------------------------------------------------------------------- */

static void print_row(const cJSON *c)
{
    char buf[32];
    printf("%-24s %9.0f %9.1f %9.1f %6.0f  %-19s  %-6s %s\n", text(c, "name"), number(c, "tokens"), number(tier(c, "ram"), "bytes") / 1048576,
           number(tier(c, "disk"), "bytes") / 1048576, number(c, "hits"), when(c, "expires", "never", buf), cJSON_IsTrue(srv_json_get(c, "pinned")) ? "yes" : "no",
           text(c, "state"));
}

static void print_list(const cJSON *answer)
{
    const cJSON *all = srv_json_get(answer, "data");
    printf("%-24s %9s %9s %9s %6s  %-19s  %-6s %s\n", "name", "tokens", "RAM MiB", "disk MiB", "hits", "expires", "pinned", "state");
    for (const cJSON *c = cJSON_IsArray(all) ? all->child : NULL; c; c = c->next)
        print_row(c);
}

static void print_one(const cJSON *c)
{
    char buf[32];
    const cJSON *ram = tier(c, "ram"), *disk = tier(c, "disk");
    printf("name          %s\n", text(c, "name"));
    printf("state         %s\n", text(c, "state"));
    if (cJSON_IsString(srv_json_get(c, "error")))
        printf("error         %s\n", text(c, "error"));
    printf("made from     %s\n", text(c, "source"));
    printf("tokens        %.0f\n", number(c, "tokens"));
    printf("in memory     %.0f tokens, %.1f MiB\n", number(ram, "tokens"), number(ram, "bytes") / 1048576);
    printf("on disk       %.0f tokens, %.1f MiB\n", number(disk, "tokens"), number(disk, "bytes") / 1048576);
    printf("index         %s\n", text(srv_json_get(c, "index"), "state"));
    printf("pinned        %s\n", cJSON_IsTrue(srv_json_get(c, "pinned")) ? "yes" : "no");
    printf("created       %s\n", when(c, "created", "-", buf));
    printf("expires       %s\n", when(c, "expires", "never", buf));
    printf("last used     %s\n", when(c, "used", "never", buf));
    printf("hits          %.0f\n", number(c, "hits"));
}

/* Asks and prints the answer: as it came, or by `print`. */
static int ask(const cfg_settings *s, const char *method, const char *path, const srv_buf *body, void (*print)(const cJSON *answer))
{
    srv_remote *r;
    cJSON *answer = NULL;
    srv_buf json = {0};
    int status = srv_remote_open(s, &r);
    if (status)
        return status;
    status = srv_remote_call(r, method, path, body, &answer, &json);
    if (!status && print && !strcmp(s->output, "json")) {
        srv_buf_puts(&json, "\n");
        status = srv_print_json(&json);
    } else if (!status && print) {
        print(answer);
    }
    srv_buf_done(&json);
    cJSON_Delete(answer);
    srv_remote_close(r);
    return status ? status : srv_finish_output();
}

int srv_cmd_contexts_list(const cfg_settings *s)
{
    return ask(s, "GET", "/v1/contexts", NULL, print_list);
}

/* What the daemon would not take for a name is no part of a path. */
static int path_of(const cfg_settings *s, char path[128])
{
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    if (!s->name)
        srv_fail("which context? Give its name");
    else if (strspn(s->name, letters) != strlen(s->name) || strlen(s->name) > ENG_NAME_MAX || s->name[0] == '.')
        srv_fail("'%.80s' is no context's name: these have up to %d letters, digits, dots, dashes and underscores", s->name, ENG_NAME_MAX);
    else {
        snprintf(path, 128, "/v1/contexts/%s", s->name);
        return 0;
    }
    return EXIT_USAGE;
}

static int ask_about(const cfg_settings *s, const char *method, const char *body, void (*print)(const cJSON *answer))
{
    char path[128];
    srv_buf b = {0};
    int status = path_of(s, path);
    if (status)
        return status;
    srv_buf_puts(&b, body ? body : "");
    status = b.failed ? srv_fail("out of memory") : ask(s, method, path, body ? &b : NULL, print);
    srv_buf_done(&b);
    return status;
}

int srv_cmd_contexts_show(const cfg_settings *s)
{
    return ask_about(s, "GET", NULL, print_one);
}

int srv_cmd_contexts_pin(const cfg_settings *s)
{
    return ask_about(s, "PATCH", "{\"pinned\":true}", NULL);
}

int srv_cmd_contexts_unpin(const cfg_settings *s)
{
    return ask_about(s, "PATCH", "{\"pinned\":false}", NULL);
}

int srv_cmd_contexts_rm(const cfg_settings *s)
{
    return ask_about(s, "DELETE", NULL, NULL);
}

/* ---- add -------------------------------------------------------------------------------------------------------- */

typedef struct {
    srv_progress progress;
    bool made;
    double tokens, bytes;
} addition;

static void on_event(void *ctx, const cJSON *event)
{
    addition *a = ctx;
    const cJSON *p = srv_json_get(event, "prompt_progress");
    if (p) {
        srv_progress_step(&a->progress, (uint32_t)number(p, "processed"), (uint32_t)number(p, "cache"), (uint32_t)number(p, "total"));
    } else if (!strcmp(text(event, "object"), "context")) {
        a->made = true;
        a->tokens = number(event, "tokens");
        a->bytes = number(event, "bytes");
    }
}

static int write_request(const cfg_settings *s, srv_buf *body)
{
    char *document = NULL;
    size_t n, good;
    int status = srv_read_text(s->file, &document, &n);
    if (!status && !srv_utf8_valid(document, n, &good))
        status = srv_fail("%s: not UTF-8 text (byte %zu)", s->file, good + 1);
    if (!status && memchr(document, 0, n))
        status = srv_fail("%s: not a text (it holds a NUL byte)", s->file);
    if (!status) {
        srv_buf_puts(body, "{\"stream\":true,\"name\":");
        srv_buf_cstring(body, s->name);
        if (s->ttl) {
            srv_buf_puts(body, ",\"ttl\":");
            srv_buf_cstring(body, s->ttl);
        }
        srv_buf_printf(body, ",\"pinned\":%s,\"replace\":%s,\"text\":", s->pinned ? "true" : "false", s->replace ? "true" : "false");
        srv_buf_string(body, document, n);
        srv_buf_puts(body, "}");
        status = body->failed ? srv_fail("out of memory") : 0;
    }
    free(document);
    return status;
}

int srv_cmd_contexts_add(const cfg_settings *s)
{
    char path[128];
    srv_buf body = {0};
    srv_remote *r = NULL;
    if (!s->file) {
        srv_fail("which text? Give a file with -f");
        return EXIT_USAGE;
    }
    int status = path_of(s, path);
    if (!status)
        status = write_request(s, &body);
    if (!status)
        status = srv_remote_open(s, &r);
    addition a = {.progress = srv_progress_begin(s->name ? s->name : "")};
    if (!status) {
        status = srv_remote_stream(r, "/v1/contexts", &body, on_event, &a);
        srv_progress_end(&a.progress);
    }
    if (!status && !a.made)
        status = srv_fail("the daemon ended before all was read");
    if (!status)
        printf("%s: %.0f tokens, %.1f MiB\n", s->name, a.tokens, a.bytes / 1048576);
    srv_buf_done(&body);
    srv_remote_close(r);
    return status ? status : srv_finish_output();
}

/* ---- verify ----------------------------------------------------------------------------------------------------- */

static void print_bad(void *ctx, const char *path, eng_miss why, const char *err)
{
    (void)ctx;
    printf("%s: %s: %s\n", path, eng_miss_name(why), err);
}

int srv_cmd_contexts_verify(const cfg_settings *s)
{
    char dir[4096], err[512] = "unknown reason";
    eng_disk_check sum;
    if (srv_state_dir(s, dir, sizeof(dir)) < 0)
        return srv_fail("there is no home folder; name the one that keeps contexts");
    if (eng_disk_verify(dir, print_bad, NULL, &sum, err, sizeof(err)) < 0)
        return srv_fail("%s", err);
    printf("%s: %u segments, %.1f MiB, %u that cannot be used", dir, sum.files, (double)sum.bytes / 1048576, sum.bad);
    printf(sum.unfinished ? ", %u not finished\n" : "\n", sum.unfinished);
    int status = srv_finish_output();
    return sum.bad ? EXIT_FAILURE : status;
}
