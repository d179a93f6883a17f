/* JSON at the edge: cJSON behind a strict scanner, getters that name the field, and a writer.
 *
 * cJSON alone takes trailing garbage, 1e999, invalid UTF-8 and raw control characters, cuts strings at \u0000 and nests as deep as the
 * stack lets it. The scanner refuses all of that, with the place, before cJSON sees the text. Of duplicate keys the last one counts, as in
 * Python (which renders the chat template from the same bytes) and llama-server.
 */
#ifndef RETRIEVALD_SERVER_JSON_H
#define RETRIEVALD_SERVER_JSON_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SRV_JSON_DEPTH = 64, SRV_JSON_VALUES = 4 << 20 };

/* What is wrong with a request: becomes {"error": {...}}. */
typedef struct {
    int status;
    const char *type;
    char param[64]; /* field at fault; empty: none */
    char message[512];
    uint32_t n_prompt_tokens, n_ctx; /* of exceed_context_size_error; 0 otherwise */
    uint32_t retry_after;            /* seconds; 0: no such header */
} srv_fault;

/* Fills *f and returns -EINVAL. param may be NULL. */
int srv_fault_set(srv_fault *f, int status, const char *type, const char *param, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));
/* The common one: 400 invalid_request_error. */
int srv_fault_bad(srv_fault *f, const char *param, const char *fmt, ...) __attribute__((format(printf, 3, 4)));

/* Parses a whole text. *ret: cJSON_Delete it. -EINVAL with line and column in f; -ENOMEM. */
int srv_json_parse(const char *text, size_t len, cJSON **ret, srv_fault *f);

/* The bytes of top-level member `key` (the last one) of an object that srv_json_parse accepted. false: not there. */
bool srv_json_span(const char *text, size_t len, const char *key, const char **ret, size_t *ret_len);

/* The bytes of the first item of such an array. false: it is empty. */
bool srv_json_first(const char *text, size_t len, const char **ret, size_t *ret_len);

/* True when s is valid UTF-8 (no surrogates, nothing overlong). *ret_good, if not NULL: how many bytes are, up to the first bad one. */
bool srv_utf8_valid(const char *s, size_t n, size_t *ret_good);

/* An object being read; prefix ("attention.") goes before the names in errors. */
typedef struct {
    const cJSON *json;
    const char *prefix;
    srv_fault *fault;
} srv_json_obj;

/* Case-sensitive. NULL when absent or null. */
const cJSON *srv_json_get(const cJSON *obj, const char *key);

/* 1: there and in range, *io set; 0: absent or null, *io untouched; -EINVAL, fault filled. */
int srv_json_bool(const srv_json_obj *o, const char *key, bool *io);
int srv_json_int(const srv_json_obj *o, const char *key, int64_t min, int64_t max, int64_t *io);
int srv_json_num(const srv_json_obj *o, const char *key, double min, double max, double *io);
int srv_json_str(const srv_json_obj *o, const char *key, const char **io);

/* "a string", "an array", ... */
const char *srv_json_kind(const cJSON *v);

/* Growing text. After a failed allocation it stays as it is and `failed` is set: checked once, at the end. */
typedef struct {
    char *p;
    size_t n, cap;
    bool failed;
} srv_buf;

void srv_buf_done(srv_buf *b);
void srv_buf_add(srv_buf *b, const char *p, size_t n);
void srv_buf_puts(srv_buf *b, const char *s);
void srv_buf_printf(srv_buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* A JSON string; invalid UTF-8 becomes U+FFFD. */
void srv_buf_string(srv_buf *b, const char *s, size_t n);
void srv_buf_cstring(srv_buf *b, const char *s); /* NULL: null */
void srv_buf_uint(srv_buf *b, uint64_t v);

#endif
