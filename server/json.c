#include "json.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* cJSON copies a number into 64 bytes and stops there. */
enum { NUMBER_LEN = 60 };

/* ---- faults ----------------------------------------------------------------------------------------------------- */

static int fault_fill(srv_fault *f, int status, const char *type, const char *param, const char *fmt, va_list ap)
{
    memset(f, 0, sizeof(*f));
    f->status = status;
    f->type = type;
    snprintf(f->param, sizeof(f->param), "%s", param ? param : "");
    vsnprintf(f->message, sizeof(f->message), fmt, ap);
    return -EINVAL;
}

int srv_fault_set(srv_fault *f, int status, const char *type, const char *param, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int rc = fault_fill(f, status, type, param, fmt, ap);
    va_end(ap);
    return rc;
}

int srv_fault_bad(srv_fault *f, const char *param, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int rc = fault_fill(f, 400, "invalid_request_error", param, fmt, ap);
    va_end(ap);
    return rc;
}

/* ---- scanner ---------------------------------------------------------------------------------------------------- */

typedef struct {
    const char *text;
    size_t len, at;
    size_t values;
    srv_fault *fault;
} scan;

static int scan_fail(scan *s, size_t at, const char *what)
{
    size_t line = 1, column = 1;
    for (size_t i = 0; i < at; i++) {
        column++;
        if (s->text[i] == '\n') {
            line++;
            column = 1;
        }
    }
    return srv_fault_bad(s->fault, NULL, "the body is not valid JSON: %s at line %zu, column %zu (byte %zu)", what, line, column, at);
}

static int peek(const scan *s)
{
    return s->at < s->len ? (unsigned char)s->text[s->at] : -1;
}

static void skip_space(scan *s)
{
    while (s->at < s->len && strchr(" \t\n\r", s->text[s->at]) && s->text[s->at])
        s->at++;
}

/* Length of the UTF-8 character at p, 0 when it is not one (Unicode 15, table 3-7). */
static size_t utf8_char(const unsigned char *p, size_t n)
{
    if (p[0] < 0x80)
        return 1;
    size_t len = p[0] >= 0xC2 && p[0] <= 0xDF ? 2 : (p[0] & 0xF0) == 0xE0 ? 3 : p[0] >= 0xF0 && p[0] <= 0xF4 ? 4 : 0;
    if (len == 0 || len > n)
        return 0;
    unsigned low = p[0] == 0xE0 ? 0xA0 : p[0] == 0xF0 ? 0x90 : 0x80, high = p[0] == 0xED ? 0x9F : p[0] == 0xF4 ? 0x8F : 0xBF;
    if (p[1] < low || p[1] > high)
        return 0;
    for (size_t i = 2; i < len; i++)
        if ((p[i] & 0xC0) != 0x80)
            return 0;
    return len;
}

bool srv_utf8_valid(const char *s, size_t n, size_t *ret_good)
{
    size_t i = 0, len = 1;
    for (; i < n; i += len) {
        len = utf8_char((const unsigned char *)s + i, n - i);
        if (len == 0)
            break;
    }
    if (ret_good)
        *ret_good = i;
    return i >= n;
}

static int hex4(const scan *s, size_t at)
{
    int v = 0;
    if (s->len - at < 4)
        return -1;
    for (size_t i = at; i < at + 4; i++) {
        char c = s->text[i];
        int d = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (d < 0)
            return -1;
        v = v * 16 + d;
    }
    return v;
}

/* s->at is on the 'u'. */
static int scan_unicode_escape(scan *s)
{
    size_t start = s->at - 1;
    int u = hex4(s, s->at + 1);
    if (u < 0)
        return scan_fail(s, start, "a bad \\u escape");
    if (u == 0)
        return scan_fail(s, start, "\\u0000, which no text may hold,");
    s->at += 5;
    if (u < 0xD800 || u > 0xDFFF)
        return 0;
    int low = -1;
    if (u <= 0xDBFF && s->len - s->at >= 6 && s->text[s->at] == '\\' && s->text[s->at + 1] == 'u')
        low = hex4(s, s->at + 2);
    if (low < 0xDC00 || low > 0xDFFF)
        return scan_fail(s, start, "half of a surrogate pair");
    s->at += 6;
    return 0;
}

static int scan_string(scan *s)
{
    size_t start = s->at++;
    while (s->at < s->len) {
        unsigned char c = (unsigned char)s->text[s->at];
        if (c == '"') {
            s->at++;
            return 0;
        }
        if (c < 0x20)
            return scan_fail(s, s->at, "a raw control character in a string");
        if (c == '\\') {
            s->at++;
            int e = peek(s);
            if (e == 'u') {
                int rc = scan_unicode_escape(s);
                if (rc < 0)
                    return rc;
            } else if (e > 0 && strchr("\"\\/bfnrt", e)) {
                s->at++;
            } else {
                return scan_fail(s, s->at - 1, "an unknown escape");
            }
            continue;
        }
        size_t n = utf8_char((const unsigned char *)s->text + s->at, s->len - s->at);
        if (n == 0)
            return scan_fail(s, s->at, "invalid UTF-8");
        s->at += n;
    }
    return scan_fail(s, start, "a string without its end");
}

static size_t scan_digits(scan *s)
{
    size_t n = 0;
    while (s->at < s->len && s->text[s->at] >= '0' && s->text[s->at] <= '9') {
        s->at++;
        n++;
    }
    return n;
}

static int scan_number(scan *s)
{
    size_t start = s->at;
    if (peek(s) == '-')
        s->at++;
    bool zero = peek(s) == '0';
    size_t whole = scan_digits(s);
    bool good = whole > 0 && (!zero || whole == 1);
    if (good && peek(s) == '.') {
        s->at++;
        good = scan_digits(s) > 0;
    }
    if (good && (peek(s) == 'e' || peek(s) == 'E')) {
        s->at++;
        if (peek(s) == '+' || peek(s) == '-')
            s->at++;
        good = scan_digits(s) > 0;
    }
    if (!good)
        return scan_fail(s, start, "a malformed number");
    if (s->at - start > NUMBER_LEN)
        return scan_fail(s, start, "a number of more than 60 characters");
    char digits[NUMBER_LEN + 1];
    memcpy(digits, s->text + start, s->at - start);
    digits[s->at - start] = 0;
    if (!isfinite(strtod(digits, NULL)))
        return scan_fail(s, start, "a number that is too large");
    return 0;
}

static int scan_literal(scan *s)
{
    static const char *const names[] = {"true", "false", "null"};
    for (size_t i = 0; i < 3; i++) {
        size_t n = strlen(names[i]);
        if (s->len - s->at >= n && memcmp(s->text + s->at, names[i], n) == 0) {
            s->at += n;
            return 0;
        }
    }
    if (s->at >= s->len)
        return scan_fail(s, s->at, "an unexpected end");
    return scan_fail(s, s->at, "something that is no JSON value");
}

static int scan_value(scan *s, int depth);

/* The members of an object or array; s->at is on the opening bracket. */
static int scan_members(scan *s, int depth, bool object)
{
    int close = object ? '}' : ']', rc;
    s->at++;
    skip_space(s);
    if (peek(s) == close) {
        s->at++;
        return 0;
    }
    for (;;) {
        if (object) {
            skip_space(s);
            if (peek(s) != '"')
                return scan_fail(s, s->at, "no member name in double quotes");
            rc = scan_string(s);
            if (rc < 0)
                return rc;
            skip_space(s);
            if (peek(s) != ':')
                return scan_fail(s, s->at, "no ':' after a member name");
            s->at++;
        }
        rc = scan_value(s, depth + 1);
        if (rc < 0)
            return rc;
        skip_space(s);
        int c = peek(s);
        s->at++;
        if (c == close)
            return 0;
        if (c != ',')
            return scan_fail(s, s->at - 1, object ? "no ',' or '}' in an object" : "no ',' or ']' in an array");
    }
}

/* NOLINTNEXTLINE(misc-no-recursion): the depth is bounded */
static int scan_value(scan *s, int depth)
{
    if (++s->values > SRV_JSON_VALUES)
        return scan_fail(s, s->at, "too many values");
    skip_space(s);
    int c = peek(s);
    if (c == '{' || c == '[') {
        if (depth >= SRV_JSON_DEPTH)
            return scan_fail(s, s->at, "nesting of more than 64 levels");
        return scan_members(s, depth, c == '{');
    }
    if (c == '"')
        return scan_string(s);
    if (c == '-' || (c >= '0' && c <= '9'))
        return scan_number(s);
    return scan_literal(s);
}

int srv_json_parse(const char *text, size_t len, cJSON **ret, srv_fault *f)
{
    scan s = {.text = text, .len = len, .fault = f};
    skip_space(&s);
    if (s.at == len)
        return srv_fault_bad(f, NULL, "the body is empty; a JSON object is expected");
    int rc = scan_value(&s, 0);
    if (rc < 0)
        return rc;
    skip_space(&s);
    if (s.at != len)
        return scan_fail(&s, s.at, "something after the end");
    cJSON *v = cJSON_ParseWithLength(text, len);
    if (!v) {
        srv_fault_set(f, 503, "unavailable_error", NULL, "no memory for a body of this size");
        return -ENOMEM;
    }
    *ret = v;
    return 0;
}

bool srv_json_span(const char *text, size_t len, const char *key, const char **ret, size_t *ret_len)
{
    srv_fault ignored;
    scan s = {.text = text, .len = len, .fault = &ignored};
    bool found = false;
    skip_space(&s);
    if (peek(&s) != '{')
        return false;
    s.at++;
    skip_space(&s);
    while (peek(&s) == '"') {
        size_t name = s.at;
        if (scan_string(&s) < 0)
            return found;
        size_t name_len = s.at - name;
        skip_space(&s);
        s.at++; /* ':' */
        skip_space(&s);
        size_t value = s.at;
        if (scan_value(&s, 1) < 0)
            return found;
        cJSON *decoded = cJSON_ParseWithLength(text + name, name_len); /* a name may be written with escapes */
        if (decoded && strcmp(decoded->valuestring, key) == 0) {
            *ret = text + value;
            *ret_len = s.at - value;
            found = true;
        }
        cJSON_Delete(decoded);
        skip_space(&s);
        if (peek(&s) != ',')
            break;
        s.at++;
        skip_space(&s);
    }
    return found;
}

bool srv_json_first(const char *text, size_t len, const char **ret, size_t *ret_len)
{
    srv_fault ignored;
    scan s = {.text = text, .len = len, .fault = &ignored};
    skip_space(&s);
    if (peek(&s) != '[')
        return false;
    s.at++;
    skip_space(&s);
    size_t item = s.at;
    if (peek(&s) == ']' || scan_value(&s, 1) < 0)
        return false;
    *ret = text + item;
    *ret_len = s.at - item;
    return true;
}

/* ---- getters ---------------------------------------------------------------------------------------------------- */

const cJSON *srv_json_get(const cJSON *obj, const char *key)
{
    const cJSON *found = NULL;
    for (const cJSON *c = cJSON_IsObject(obj) ? obj->child : NULL; c; c = c->next)
        if (strcmp(c->string, key) == 0)
            found = c;
    return cJSON_IsNull(found) ? NULL : found;
}

const char *srv_json_kind(const cJSON *v)
{
    if (cJSON_IsString(v))
        return "a string";
    if (cJSON_IsNumber(v))
        return "a number";
    if (cJSON_IsBool(v))
        return "a boolean";
    if (cJSON_IsArray(v))
        return "an array";
    if (cJSON_IsObject(v))
        return "an object";
    return "null";
}

static int wrong(const srv_json_obj *o, const char *key, const char *expected, const cJSON *v)
{
    char name[sizeof(o->fault->param)];
    snprintf(name, sizeof(name), "%s%s", o->prefix ? o->prefix : "", key);
    if (cJSON_IsNumber(v) && strstr(expected, "number"))
        return srv_fault_bad(o->fault, name, "\"%s\" must be %s, not %.17g", name, expected, v->valuedouble);
    return srv_fault_bad(o->fault, name, "\"%s\" must be %s, not %s", name, expected, srv_json_kind(v));
}

int srv_json_bool(const srv_json_obj *o, const char *key, bool *io)
{
    const cJSON *v = srv_json_get(o->json, key);
    if (!v)
        return 0;
    if (!cJSON_IsBool(v))
        return wrong(o, key, "true or false", v);
    *io = cJSON_IsTrue(v);
    return 1;
}

int srv_json_num(const srv_json_obj *o, const char *key, double min, double max, double *io)
{
    const cJSON *v = srv_json_get(o->json, key);
    if (!v)
        return 0;
    if (!cJSON_IsNumber(v) || !isfinite(v->valuedouble) || v->valuedouble < min || v->valuedouble > max) {
        char expected[80];
        snprintf(expected, sizeof(expected), "a number from %g to %g", min, max);
        return wrong(o, key, expected, v);
    }
    *io = v->valuedouble;
    return 1;
}

int srv_json_int(const srv_json_obj *o, const char *key, int64_t min, int64_t max, int64_t *io)
{
    const cJSON *v = srv_json_get(o->json, key);
    if (!v)
        return 0;
    double d = v->valuedouble;
    if (!cJSON_IsNumber(v) || !isfinite(d) || d != floor(d) || d < (double)min || d > (double)max) {
        char expected[80];
        snprintf(expected, sizeof(expected), "a whole number from %lld to %lld", (long long)min, (long long)max);
        return wrong(o, key, expected, v);
    }
    *io = (int64_t)d;
    return 1;
}

int srv_json_str(const srv_json_obj *o, const char *key, const char **io)
{
    const cJSON *v = srv_json_get(o->json, key);
    if (!v)
        return 0;
    if (!cJSON_IsString(v))
        return wrong(o, key, "a string", v);
    *io = v->valuestring;
    return 1;
}

/* ---- writer ----------------------------------------------------------------------------------------------------- */

void srv_buf_done(srv_buf *b)
{
    free(b->p);
    *b = (srv_buf){0};
}

/* Room for n more bytes and a NUL. */
static bool buf_room(srv_buf *b, size_t n)
{
    if (b->failed)
        return false;
    if (b->cap - b->n > n)
        return true;
    size_t cap = b->cap < 256 ? 256 : b->cap;
    while (cap - b->n <= n) {
        if (cap > SIZE_MAX / 2)
            goto fail;
        cap *= 2;
    }
    char *p = realloc(b->p, cap);
    if (!p)
        goto fail;
    b->p = p;
    b->cap = cap;
    return true;
fail:
    b->failed = true;
    return false;
}

void srv_buf_add(srv_buf *b, const char *p, size_t n)
{
    if (!buf_room(b, n))
        return;
    if (n)
        memcpy(b->p + b->n, p, n);
    b->n += n;
    b->p[b->n] = 0;
}

void srv_buf_puts(srv_buf *b, const char *s)
{
    srv_buf_add(b, s, strlen(s));
}

void srv_buf_printf(srv_buf *b, const char *fmt, ...)
{
    va_list ap;
    if (!buf_room(b, 128))
        return;
    va_start(ap, fmt);
    int n = vsnprintf(b->p + b->n, b->cap - b->n, fmt, ap);
    va_end(ap);
    if (n < 0 || !buf_room(b, (size_t)n))
        return;
    if ((size_t)n > 128) { /* it may not have fitted */
        va_start(ap, fmt);
        vsnprintf(b->p + b->n, (size_t)n + 1, fmt, ap);
        va_end(ap);
    }
    b->n += (size_t)n;
}

void srv_buf_string(srv_buf *b, const char *s, size_t n)
{
    srv_buf_add(b, "\"", 1);
    size_t from = 0;
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)s[i];
        size_t len = utf8_char((const unsigned char *)s + i, n - i);
        if (len > 0 && c >= 0x20 && c != '"' && c != '\\') {
            i += len;
            continue;
        }
        srv_buf_add(b, s + from, i - from);
        if (len == 0)
            srv_buf_puts(b, "\xEF\xBF\xBD");
        else if (c == '"' || c == '\\')
            srv_buf_printf(b, "\\%c", c);
        else if (c == '\n')
            srv_buf_puts(b, "\\n");
        else
            srv_buf_printf(b, "\\u%04x", c);
        from = ++i;
    }
    srv_buf_add(b, s + from, n - from);
    srv_buf_add(b, "\"", 1);
}

void srv_buf_cstring(srv_buf *b, const char *s)
{
    if (s)
        srv_buf_string(b, s, strlen(s));
    else
        srv_buf_puts(b, "null");
}

void srv_buf_uint(srv_buf *b, uint64_t v)
{
    char digits[20];
    size_t at = sizeof(digits);
    do
        digits[--at] = (char)('0' + v % 10);
    while (v /= 10);
    srv_buf_add(b, digits + at, sizeof(digits) - at);
}
