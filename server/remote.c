#include "remote.h"

#include "cmd_common.h"
#include "keys.h"

#include <curl/curl.h>
#include <stdlib.h>
#include <string.h>

enum { CONNECT_SECONDS = 10, MOST_ANSWER = 64 << 20 };

struct srv_remote {
    CURL *curl;
    struct curl_slist *headers;
    char base[320], error[CURL_ERROR_SIZE];
    /* of the request under way */
    srv_buf answer; /* all of it, or what is left of a stream: the beginning of an event */
    void (*event)(void *ctx, const cJSON *event);
    void *ctx;
    int failed; /* exit status of an event */
};

static int add_header(srv_remote *r, const char *line)
{
    struct curl_slist *longer = curl_slist_append(r->headers, line);
    if (!longer)
        return srv_fail("out of memory");
    r->headers = longer;
    return 0;
}

static int add_key(srv_remote *r, const char *path)
{
    char key[1025], line[1100], err[512] = "";
    if (srv_keys_first(path, key, sizeof(key), err, sizeof(err)) < 0)
        return srv_fail("%s", err);
    snprintf(line, sizeof(line), "Authorization: Bearer %s", key);
    int status = add_header(r, line);
    explicit_bzero(key, sizeof(key));
    explicit_bzero(line, sizeof(line));
    return status;
}

int srv_remote_open(const cfg_settings *s, srv_remote **ret)
{
    srv_remote *r = calloc(1, sizeof(*r));
    if (!r || curl_global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK || !(r->curl = curl_easy_init())) {
        free(r);
        return srv_fail("the HTTP client does not start");
    }
    bool v6 = strchr(s->host, ':') != NULL;
    snprintf(r->base, sizeof(r->base), "http://%s%.255s%s:%u", v6 ? "[" : "", s->host, v6 ? "]" : "", s->port);
    int status = add_header(r, "Content-Type: application/json");
    if (!status)
        status = add_header(r, "Expect:"); /* no question first: the daemon reads what comes */
    if (!status && s->api_key_file)
        status = add_key(r, s->api_key_file);
    if (status)
        srv_remote_close(r);
    else
        *ret = r;
    return status;
}

void srv_remote_close(srv_remote *r)
{
    if (!r)
        return;
    curl_easy_cleanup(r->curl);
    curl_slist_free_all(r->headers);
    srv_buf_done(&r->answer);
    free(r);
    curl_global_cleanup();
}

/* ---- answers ---------------------------------------------------------------------------------------------------- */

/* Tells what an {"error": ...} says; 0: it is none. */
static int tell_error(const cJSON *v)
{
    const cJSON *error = srv_json_get(v, "error"), *message = cJSON_IsObject(error) ? srv_json_get(error, "message") : NULL;
    if (!error || !cJSON_IsObject(error))
        return 0;
    return srv_fail("%s", cJSON_IsString(message) ? message->valuestring : "the daemon answered an error without a message");
}

static int parse(const char *text, size_t n, cJSON **ret)
{
    srv_fault f = {0};
    if (srv_json_parse(text, n, ret, &f) < 0)
        return srv_fail("the answer is not the daemon's: %s", f.message);
    return 0;
}

/* Events of a stream that are whole. */
static void take_events(srv_remote *r)
{
    static const char data[] = "data: ";
    char *end;
    while (!r->failed && (end = memmem(r->answer.p, r->answer.n, "\n\n", 2))) {
        size_t n = (size_t)(end - r->answer.p), head = sizeof(data) - 1;
        cJSON *event = NULL;
        if (n > head && memcmp(r->answer.p, data, head) == 0 && strncmp(r->answer.p + head, "[DONE]", 6) != 0) {
            r->failed = parse(r->answer.p + head, n - head, &event);
            if (!r->failed)
                r->failed = tell_error(event);
            if (!r->failed)
                r->event(r->ctx, event);
            cJSON_Delete(event);
        }
        r->answer.n -= n + 2;
        memmove(r->answer.p, end + 2, r->answer.n);
    }
}

static size_t on_data(char *p, size_t size, size_t n, void *ctx)
{
    srv_remote *r = ctx;
    long code = 0;
    srv_buf_add(&r->answer, p, size * n);
    if (r->answer.failed || r->answer.n > MOST_ANSWER)
        return 0;
    curl_easy_getinfo(r->curl, CURLINFO_RESPONSE_CODE, &code);
    if (r->event && code == 200)
        take_events(r);
    return r->failed ? 0 : size * n;
}

/* *ret_code: of the answer, all of which is in r->answer unless it was a stream. */
static int perform(srv_remote *r, const char *method, const char *path, const srv_buf *body, long *ret_code)
{
    char url[640];
    CURL *c = r->curl;
    snprintf(url, sizeof(url), "%s%s", r->base, path);
    r->answer.n = 0;
    r->failed = 0;
    r->error[0] = 0;
    curl_easy_reset(c);
    curl_easy_setopt(c, CURLOPT_URL, url);
    curl_easy_setopt(c, CURLOPT_PROTOCOLS_STR, "http");
    curl_easy_setopt(c, CURLOPT_NOPROXY, "*");
    curl_easy_setopt(c, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(c, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_SECONDS);
    curl_easy_setopt(c, CURLOPT_HTTPHEADER, r->headers);
    curl_easy_setopt(c, CURLOPT_ERRORBUFFER, r->error);
    curl_easy_setopt(c, CURLOPT_WRITEFUNCTION, on_data);
    curl_easy_setopt(c, CURLOPT_WRITEDATA, r);
    if (body) {
        curl_easy_setopt(c, CURLOPT_POSTFIELDS, body->p);
        curl_easy_setopt(c, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)body->n);
    }
    curl_easy_setopt(c, CURLOPT_CUSTOMREQUEST, method);
    CURLcode rc = curl_easy_perform(c);
    if (r->failed)
        return r->failed;
    if (rc == CURLE_COULDNT_CONNECT || rc == CURLE_COULDNT_RESOLVE_HOST)
        return srv_fail("no daemon answers on %s (%s); --host and --port say where it is", r->base, r->error[0] ? r->error : curl_easy_strerror(rc));
    if (rc != CURLE_OK)
        return srv_fail("%s: %s", r->base, r->error[0] ? r->error : curl_easy_strerror(rc));
    curl_easy_getinfo(c, CURLINFO_RESPONSE_CODE, ret_code);
    return 0;
}

int srv_remote_call(srv_remote *r, const char *method, const char *path, const srv_buf *body, cJSON **ret, srv_buf *ret_text)
{
    cJSON *v = NULL;
    long code = 0;
    r->event = NULL;
    int status = perform(r, method, path, body, &code);
    if (!status)
        status = parse(r->answer.p ? r->answer.p : "", r->answer.n, &v);
    if (!status)
        status = tell_error(v);
    if (!status && code >= 300)
        status = srv_fail("%s: status %ld", r->base, code);
    if (!status && ret_text)
        srv_buf_add(ret_text, r->answer.p, r->answer.n);
    if (!status && ret)
        *ret = v;
    else
        cJSON_Delete(v);
    return status;
}

int srv_remote_stream(srv_remote *r, const char *path, const srv_buf *body, void (*event)(void *ctx, const cJSON *event), void *ctx)
{
    cJSON *v = NULL;
    long code = 0;
    r->event = event;
    r->ctx = ctx;
    int status = perform(r, "POST", path, body, &code);
    if (status || code == 200)
        return status;
    status = parse(r->answer.p ? r->answer.p : "", r->answer.n, &v);
    if (!status && !(status = tell_error(v)))
        status = srv_fail("%s: status %ld", r->base, code);
    cJSON_Delete(v);
    return status;
}
