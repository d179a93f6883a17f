/* The server around the API: libmicrohttpd inside a libuv loop. All of it runs on the loop thread; see loop.c for how the two fit together.
 *
 * A connection's life: accepted -> requests, one after the other. A request's: receiving -> waiting (suspended: its job is prepared,
 * queued, computed) -> replying, or streaming, which suspends whenever there is nothing to send.
 */
#ifndef RETRIEVALD_SERVER_HTTP_H
#define RETRIEVALD_SERVER_HTTP_H

#include "keys.h"
#include "worker.h"
#include <microhttpd.h>
#include <sys/socket.h>
#include <uv.h>

typedef struct srv_server srv_server;
typedef struct srv_conn srv_conn;

/* A socket. */
typedef struct srv_client {
    struct srv_client *prev, *next;
    int fd;
    double deadline_ms; /* something must have happened by then; 0: none */
} srv_client;

typedef enum { SRV_RECEIVING, SRV_WAITING, SRV_REPLYING, SRV_STREAMING } srv_phase;

typedef struct {
    const char *method, *path; /* a path that ends with / goes on with a name */
    srv_prepare *prepare;                          /* a work item: POST, PATCH, and what may have to wait for the disk */
    void (*get)(const srv_app *app, srv_buf *out); /* GET */
    void (*special)(srv_server *s, srv_conn *c);   /* GET that needs more; fills c->status, c->reply */
    bool generates;                                /* takes a place in the queue */
    bool open;                                     /* no key, also while loading */
    bool counts_all;                               /* over all tenants */
} srv_route;

/* A request. */
struct srv_conn {
    srv_conn *prev, *next;
    srv_server *server;
    struct MHD_Connection *mhd;
    srv_client *client;
    const srv_route *route;
    char method[8], target[SRV_MAX_NAME]; /* target: the name that the path ends with */
    srv_phase phase;
    bool suspended, gone, logged;

    srv_buf body;
    uint64_t body_seen, body_announced;
    bool chunked, expects;
    double body_started_ms;
    uint64_t tenant; /* of the key it came with; 0: no keys are needed */
    bool sees_all;   /* what tells of all tenants */
    bool refused;    /* fault holds the answer; what still comes of the body is dropped */
    bool must_close; /* the request's framing cannot be trusted */
    srv_fault fault;

    int status;
    srv_buf reply;
    const char *content_type;

    srv_job *job;
    struct srv_watch *watch;
    srv_buf out; /* of a stream, from out_sent on still to be sent */
    size_t out_sent;
    bool out_end, out_abort;
    double out_last_ms, started_ms;
};

enum { SRV_N_CODES = 600 };

struct srv_server {
    srv_app app;
    srv_queue queue;
    srv_worker worker;
    srv_keys *keys; /* NULL: none needed */
    int listen_fd;
    char address[64], host[256]; /* "127.0.0.1:8080", the configured host */
    uint32_t port;

    uv_loop_t loop;
    uv_async_t async;
    uv_poll_t mhd_poll;
    uv_timer_t mhd_timer, tick;
    uv_signal_t on_term, on_int, on_usr1;
    struct MHD_Daemon *mhd;

    srv_client *clients;
    srv_conn *conns;
    uint32_t n_conns;
    uint32_t in_flight; /* generations that are prepared, queued or running */
    uint32_t n_work;    /* libuv work items under way */
    size_t body_bytes, body_limit;

    bool announced, draining, stopping;
    double drain_deadline_ms;
    int exit_status;
    uint64_t watchdog_us, last_beat;
    double last_fed_ms;

    uint64_t codes[SRV_N_CODES]; /* answers by status */
    uint64_t cancelled;
};

/* ---- guard.c: what a request must look like before anything of it is read --------------------------------------- */

/* First look at a request's head. 0, or a fault. Fills c->chunked, body_announced, expects, must_close. */
int srv_guard_framing(srv_conn *c, const char *url, const char *version, srv_fault *f);
int srv_guard_host(const srv_server *s, srv_conn *c, srv_fault *f);
int srv_guard_key(const srv_server *s, srv_conn *c, srv_fault *f); /* fills c->tenant */
int srv_guard_type(srv_conn *c, srv_fault *f);

/* ---- http.c ----------------------------------------------------------------------------------------------------- */

/* MHD's callbacks. */
enum MHD_Result srv_http_handle(void *cls, struct MHD_Connection *mhd, const char *url, const char *method, const char *version,
                                const char *data, size_t *size, void **ctx);
void srv_http_completed(void *cls, struct MHD_Connection *mhd, void **ctx, enum MHD_RequestTerminationCode why);
void srv_http_client(void *cls, struct MHD_Connection *mhd, void **ctx, enum MHD_ConnectionNotificationCode what);

void srv_http_prepared(srv_server *s, srv_job *j); /* a work item is done */
void srv_http_news(srv_server *s);                 /* the engine thread has something */
void srv_http_tick(srv_server *s, double now_ms);  /* pings, deadlines */
void srv_http_cancel_all(srv_server *s);           /* the end: jobs are cancelled, suspended connections resumed */

/* ---- loop.c ----------------------------------------------------------------------------------------------------- */

/* s->listen_fd is bound, s->app has settings and defaults. Serves until a signal or a failure; the exit status. */
int srv_loop_run(srv_server *s, const eng_params *params);

void srv_loop_prepare(srv_server *s, srv_job *j); /* runs j->prepare on a libuv thread, then srv_http_prepared */
void srv_loop_watch(srv_conn *c);                 /* the peer's closing cancels */
void srv_loop_unwatch(srv_conn *c);
void srv_loop_resume(srv_conn *c);
void srv_http_client_gone(srv_conn *c); /* called by the watch */

/* ---- metrics.c -------------------------------------------------------------------------------------------------- */

void srv_metrics(srv_server *s, srv_conn *c);

#endif
