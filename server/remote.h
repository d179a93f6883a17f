/* A running daemon, for the commands that talk to one: one request at a time, by libcurl. Failures are told on stderr; functions return an exit status. */
#ifndef RETRIEVALD_SERVER_REMOTE_H
#define RETRIEVALD_SERVER_REMOTE_H

#include "json.h"
#include "server.h"

typedef struct srv_remote srv_remote;

/* The daemon that --host, --port and --api-key-file name. */
int srv_remote_open(const cfg_settings *s, srv_remote **ret);
void srv_remote_close(srv_remote *r);

/* Sends a request (body NULL: none) and gives the answer, parsed and as it came (either may be NULL; cJSON_Delete, srv_buf_done). An error that the
 * daemon answers is told. */
int srv_remote_call(srv_remote *r, const char *method, const char *path, const srv_buf *body, cJSON **ret, srv_buf *ret_text);

/* Sends a body and hands out each event of the answer. An error among them is told and ends it. */
int srv_remote_stream(srv_remote *r, const char *path, const srv_buf *body, void (*event)(void *ctx, const cJSON *event), void *ctx);

#endif
