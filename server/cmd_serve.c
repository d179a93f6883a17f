#include "server.h"

#include "cmd_common.h"
#include "http.h"
#include "log.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static bool is_loopback(const struct sockaddr *a)
{
    if (a->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)a)->sin_addr.s_addr) >> 24 == 127;
    return a->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)a)->sin6_addr);
}

static void describe_address(srv_server *s, int fd)
{
    struct sockaddr_storage a;
    socklen_t n = sizeof(a);
    char host[INET6_ADDRSTRLEN] = "?", port[8] = "0";
    if (getsockname(fd, (struct sockaddr *)&a, &n) == 0)
        getnameinfo((struct sockaddr *)&a, n, host, sizeof(host), port, sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV);
    s->port = (uint32_t)atoi(port);
    snprintf(s->address, sizeof(s->address), strchr(host, ':') ? "[%s]:%s" : "%s:%s", host, port);
}

static int bind_address(srv_server *s, const struct addrinfo *a, char *err, size_t errlen)
{
    const cfg_settings *c = s->app.settings;
    int on = 1, rc;
    if (!s->keys && !is_loopback(a->ai_addr)) {
        snprintf(err, errlen, "%s can be reached by others, and there is no API key: give an --api-key-file, or listen on 127.0.0.1",
                 c->host);
        return -EPERM;
    }
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        rc = -errno;
        snprintf(err, errlen, "no socket: %s", strerror(-rc));
        return rc;
    }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(fd, a->ai_addr, a->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0) {
        describe_address(s, fd);
        s->listen_fd = fd;
        return 0;
    }
    rc = -errno;
    close(fd);
    if (rc == -EADDRINUSE)
        snprintf(err, errlen, "port %u on %s is in use; stop what listens there, or choose another with --port", c->port, c->host);
    else if (rc == -EACCES)
        snprintf(err, errlen, "port %u on %s needs privileges; choose one from 1024 on with --port", c->port, c->host);
    else
        snprintf(err, errlen, "cannot listen on %s port %u: %s", c->host, c->port, strerror(-rc));
    return rc;
}

static int listen_on(srv_server *s, char *err, size_t errlen)
{
    const cfg_settings *c = s->app.settings;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV}, *found = NULL;
    char port[8];
    snprintf(port, sizeof(port), "%u", c->port);
    int rc = getaddrinfo(c->host, port, &hints, &found);
    if (rc != 0) {
        snprintf(err, errlen, "host %s: %s", c->host, gai_strerror(rc));
        return -EINVAL;
    }
    rc = bind_address(s, found, err, errlen);
    freeaddrinfo(found);
    return rc;
}

/* Each connection is a descriptor. */
static void raise_descriptors(uint32_t connections)
{
    struct rlimit l;
    rlim_t want = (rlim_t)connections + 128;
    if (getrlimit(RLIMIT_NOFILE, &l) < 0 || l.rlim_cur >= want)
        return;
    l.rlim_cur = l.rlim_max < want ? l.rlim_max : want;
    setrlimit(RLIMIT_NOFILE, &l);
    if (l.rlim_cur < want)
        srv_log(LOG_WARNING, "only %llu descriptors are allowed: fewer than max-connections needs", (unsigned long long)l.rlim_cur);
}

static int setup(srv_server *s, eng_params *params, char *err, size_t errlen)
{
    srv_app *app = &s->app;
    const cfg_settings *c = app->settings;
    int rc = srv_engine_params(c, params, err, errlen);
    if (rc == 0)
        rc = srv_attention(c, &app->attention, err, errlen);
    if (rc == 0)
        rc = srv_template_given(c, &app->given_template, err, errlen);
    if (rc == 0 && c->api_key_file && c->api_key_file[0])
        rc = srv_keys_load(c->api_key_file, &s->keys, err, errlen);
    if (rc == 0 && c->trace)
        rc = eng_trace_open(c->trace, &app->trace, err, errlen);
    if (rc < 0)
        return rc;
    app->sampling = srv_sampling(c);
    app->started = time(NULL);
    atomic_store(&app->state, SRV_LOADING);
    const char *slash = strrchr(c->model, '/');
    snprintf(app->model_name, sizeof(app->model_name), "%s", c->alias && c->alias[0] ? c->alias : slash ? slash + 1 : c->model);
    snprintf(s->host, sizeof(s->host), "%s", c->host);
    size_t twice = (size_t)c->max_body_mb << 21, least = (size_t)256 << 20;
    s->body_limit = twice > least ? twice : least;
    /* Before the model: the helper's memory is a copy of what this process is now. */
    char why[400] = "";
    if (srv_template_start(&app->chat_template, why, sizeof(why)) < 0)
        snprintf(app->chat_failure, sizeof(app->chat_failure), "the chat template helper did not start: %s", why);
    raise_descriptors(c->max_connections);
    return listen_on(s, err, errlen);
}

int srv_cmd_serve(const cfg_settings *settings)
{
    char err[600] = "";
    eng_params params;
    int status = EXIT_FAILURE;
    if (srv_log_init(settings->log_level) < 0 || !settings->model || !settings->model[0]) {
        srv_log(LOG_ERR, "no model: give one with -m FILE");
        return EXIT_FAILURE;
    }
    srv_server *s = calloc(1, sizeof(*s));
    if (!s) {
        srv_log(LOG_ERR, "out of memory");
        return EXIT_FAILURE;
    }
    s->app.settings = settings;
    s->app.recent = srv_recent_new(); /* without it, answers cannot be named */
    s->listen_fd = -1;
    signal(SIGPIPE, SIG_IGN);
    /* A render that hangs holds a thread of libuv's until its limit: the default of 4 is few. */
    setenv("UV_THREADPOOL_SIZE", "16", 0);
    if (setup(s, &params, err, sizeof(err)) < 0)
        srv_log(LOG_ERR, "%s", err);
    else
        status = srv_loop_run(s, &params);
    if (s->listen_fd >= 0)
        close(s->listen_fd);
    srv_template_free(s->app.chat_template);
    free(s->app.given_template);
    srv_keys_free(s->keys);
    srv_recent_free(s->app.recent);
    eng_trace_free(s->app.trace);
    free(s);
    return status;
}
