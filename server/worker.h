/* The engine thread: opens the model, then takes one job at a time; builds indexes when there is none. */
#ifndef RETRIEVALD_SERVER_WORKER_H
#define RETRIEVALD_SERVER_WORKER_H

#include "queue.h"

typedef struct {
    srv_app *app;
    srv_queue *queue;
    eng_params params;
    pthread_t thread;
    bool started;
    atomic_bool waiting; /* nothing to do */
    atomic_bool ended;
    _Atomic(uint64_t) beats; /* rises with every turn, for the watchdog */
} srv_worker;

/* app->settings is set; sets the rest of *app and wakes the loop when `state` changes. -errno */
int srv_worker_start(srv_worker *w, srv_app *app, srv_queue *queue, const eng_params *params);

/* After srv_queue_stop: waits for the thread, which closes the engine. */
void srv_worker_join(srv_worker *w);

#endif
