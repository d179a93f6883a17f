/* libmicrohttpd lets through what proxies in front of it may read differently: a length and chunks, two lengths, two hosts, blanks before a
 * colon. Such requests are refused and their connection closed. */
#include "http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <strings.h>

typedef struct {
    unsigned n_host, n_length, n_encoding;
    const char *length, *encoding;
    bool bad_name, bad_value, expects;
} heads;

/* RFC 9110, 5.6.2: token. */
static bool is_token(const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        bool alnum = (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z');
        if (!alnum && (c == 0 || !strchr("!#$%&'*+-.^_`|~", c)))
            return false;
    }
    return n > 0;
}

static bool named(const char *key, size_t n, const char *name)
{
    return n == strlen(name) && strncasecmp(key, name, n) == 0;
}

static enum MHD_Result on_header(void *cls, enum MHD_ValueKind kind, const char *key, size_t key_n, const char *value, size_t value_n)
{
    heads *h = cls;
    (void)kind;
    value = value ? value : "";
    if (!is_token(key, key_n))
        h->bad_name = true;
    for (size_t i = 0; i < value_n; i++)
        if (((unsigned char)value[i] < 0x20 && value[i] != '\t') || value[i] == 0x7F)
            h->bad_value = true;
    if (named(key, key_n, "Host"))
        h->n_host++;
    if (named(key, key_n, "Content-Length")) {
        h->n_length++;
        h->length = value;
    }
    if (named(key, key_n, "Transfer-Encoding")) {
        h->n_encoding++;
        h->encoding = value;
    }
    if (named(key, key_n, "Expect"))
        h->expects = strcasecmp(value, "100-continue") == 0;
    return MHD_YES;
}

static int read_length(const char *s, uint64_t *ret)
{
    uint64_t n = 0;
    if (!*s)
        return -EINVAL;
    for (; *s; s++) {
        if (*s < '0' || *s > '9' || n > (UINT64_MAX - 9) / 10)
            return -EINVAL;
        n = n * 10 + (uint64_t)(*s - '0');
    }
    *ret = n;
    return 0;
}

int srv_guard_framing(srv_conn *c, const char *url, const char *version, srv_fault *f)
{
    heads h = {0};
    MHD_get_connection_values_n(c->mhd, MHD_HEADER_KIND, on_header, &h);
    bool old = strcmp(version, "HTTP/1.0") == 0;
    const char *what = NULL;
    if (!old && strcmp(version, "HTTP/1.1") != 0)
        what = "this HTTP version is not served";
    else if (h.bad_name)
        what = "a header's name holds a character that it may not";
    else if (h.bad_value)
        what = "a header's value holds a control character";
    else if (h.n_host > 1 || (h.n_host == 0 && !old))
        what = "there must be one Host header";
    else if (h.n_length > 1)
        what = "more than one Content-Length header";
    else if (h.n_encoding > 1 || (h.n_encoding == 1 && (old || strcasecmp(h.encoding, "chunked") != 0)))
        what = "the only Transfer-Encoding is chunked, in HTTP/1.1";
    else if (h.n_length && h.n_encoding)
        what = "Content-Length and Transfer-Encoding exclude each other";
    else if (h.n_length && read_length(h.length, &c->body_announced) < 0)
        what = "the Content-Length is not a number";
    else if (url[0] != '/' || strstr(url, "%00"))
        what = "the path is malformed";
    c->chunked = h.n_encoding > 0;
    c->expects = h.expects;
    if (!what)
        return 0;
    c->must_close = true;
    return srv_fault_bad(f, NULL, "%s", what);
}

/* ---- Host ------------------------------------------------------------------------------------------------------- */

/* Splits "name:port", "[::1]:port", "name". false: malformed. */
static bool split_host(const char *s, size_t n, char *name, size_t size)
{
    const char *end = s + n, *after;
    if (n > 0 && s[0] == '[') {
        const char *close = memchr(s, ']', n);
        if (!close)
            return false;
        s++;
        after = close + 1;
        n = (size_t)(close - s);
    } else {
        const char *colon = memchr(s, ':', n);
        after = colon ? colon : end;
        n = (size_t)(after - s);
    }
    if (n == 0 || n >= size)
        return false;
    memcpy(name, s, n);
    name[n] = 0;
    if (after == end)
        return true;
    if (*after++ != ':' || end - after > 5)
        return false;
    for (; after < end; after++)
        if (*after < '0' || *after > '9')
            return false;
    return true;
}

static bool is_address(const char *name)
{
    struct in6_addr a;
    return inet_pton(AF_INET, name, &a) == 1 || inet_pton(AF_INET6, name, &a) == 1;
}

/* An entry with a port counts for that port, one without for all. */
static bool in_list(const char *list, const char *header, const char *name)
{
    while (list && *list) {
        const char *end = strchrnul(list, ',');
        while (list < end && *list == ' ')
            list++;
        size_t n = (size_t)(end - list);
        while (n > 0 && list[n - 1] == ' ')
            n--;
        if (n > 0 && ((strlen(name) == n && strncasecmp(list, name, n) == 0) || (strlen(header) == n && strncasecmp(list, header, n) == 0)))
            return true;
        list = *end ? end + 1 : end;
    }
    return false;
}

/* Against DNS rebinding: a page of a stranger reaches this server under the stranger's name. Numeric addresses cannot be rebound. */
int srv_guard_host(const srv_server *s, srv_conn *c, srv_fault *f)
{
    const char *host = MHD_lookup_connection_value(c->mhd, MHD_HEADER_KIND, "Host");
    char name[256];
    if (!host)
        return 0; /* HTTP/1.0, which no browser speaks */
    if (split_host(host, strlen(host), name, sizeof(name)) &&
        (is_address(name) || strcasecmp(name, "localhost") == 0 || strcasecmp(name, s->host) == 0 ||
         in_list(s->app.settings->allowed_hosts, host, name)))
        return 0;
    return srv_fault_set(f, 403, "permission_error", NULL,
                         "the Host header names \"%.100s\", which is not allowed; the server's --allowed-hosts lists names", host);
}

/* ---- key, type -------------------------------------------------------------------------------------------------- */

int srv_guard_key(const srv_server *s, srv_conn *c, srv_fault *f)
{
    c->sees_all = true;
    if (!s->keys)
        return 0;
    const char *key = MHD_lookup_connection_value(c->mhd, MHD_HEADER_KIND, "Authorization");
    if (key && strncasecmp(key, "Bearer ", 7) == 0) {
        for (key += 7; *key == ' '; key++)
            ;
    } else {
        key = MHD_lookup_connection_value(c->mhd, MHD_HEADER_KIND, "X-Api-Key");
    }
    if (!key)
        return srv_fault_set(f, 401, "authentication_error", NULL, "an API key is needed: Authorization: Bearer KEY");
    if (!srv_keys_match(s->keys, key, strlen(key), &c->tenant, &c->sees_all))
        return srv_fault_set(f, 401, "authentication_error", NULL, "invalid API key");
    if (strcmp(s->app.settings->cache_shared, "on") == 0) {
        c->tenant = 0; /* as without keys */
        c->sees_all = true;
    }
    if (c->route && c->route->counts_all && !c->sees_all)
        return srv_fault_set(f, 403, "permission_error", NULL, "%s counts over all API keys, so it takes the first key of the server's api-key-file", c->route->path);
    return 0;
}

/* A page may send text/plain to any address without asking first; it may not send JSON. */
int srv_guard_type(srv_conn *c, srv_fault *f)
{
    static const char json[] = "application/json";
    const char *type = MHD_lookup_connection_value(c->mhd, MHD_HEADER_KIND, "Content-Type");
    size_t n = type ? strcspn(type, "; \t") : 0;
    if (type && n == strlen(json) && strncasecmp(type, json, n) == 0)
        return 0;
    return srv_fault_set(f, 415, "invalid_request_error", NULL, "the Content-Type must be application/json");
}
