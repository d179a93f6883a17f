/* Between the loop and the engine thread: jobs go in, text comes out.
 *
 * One lock guards the list of waiting jobs, the outboxes of all jobs that are not finished, and the list of jobs with something new
 * (dirty). Wake-ups of the loop coalesce: it drains the whole dirty list. `cancel` and `poke` are flags the engine polls without the lock.
 */
#ifndef RETRIEVALD_SERVER_QUEUE_H
#define RETRIEVALD_SERVER_QUEUE_H

#include "api.h"
#include <pthread.h>

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t more, drained;
    srv_job *head, *tail; /* waiting; guarded by lock */
    uint32_t n_waiting;   /* guarded by lock */
    srv_job *running;     /* guarded by lock */
    srv_job *dirty;       /* guarded by lock */
    bool stop, nudged;    /* guarded by lock */
    atomic_bool cancel;   /* of the running job */
    atomic_bool poke;     /* a job or the end is waiting: background work gives way */
    void (*wake)(void *); /* tells the loop; from the engine thread, without the lock */
    void *wake_ctx;
} srv_queue;

int srv_queue_init(srv_queue *q, void (*wake)(void *), void *ctx);
void srv_queue_done(srv_queue *q);

/* Loop: adds a job. */
void srv_queue_put(srv_queue *q, srv_job *j);
/* Loop: true when the job was still waiting and is out now; else it is told to stop if it runs, and will finish. */
bool srv_queue_cancel(srv_queue *q, srv_job *j);
/* Loop: a job that was still waiting and is out now; NULL when there is none, and the one that runs is told to stop. */
srv_job *srv_queue_cancel_next(srv_queue *q);
/* Loop: the next job with news, its outbox moved to *ret (srv_outbox_done it); NULL when there is none. */
srv_job *srv_queue_news(srv_queue *q, srv_outbox *ret);
void srv_queue_depth(srv_queue *q, uint32_t *ret_waiting, uint32_t *ret_running);
/* Loop: the engine thread ends after the job it has. */
void srv_queue_stop(srv_queue *q);
/* Loop: the engine thread is to look after what it does when there is no job. */
void srv_queue_nudge(srv_queue *q);

/* Engine: the next job, which is running from now on; NULL when none waits (wait false), after a nudge, or at the end (*ret_stop). */
srv_job *srv_queue_take(srv_queue *q, bool wait, bool *ret_stop);
/* Engine: appends text with its tokens; waits while the loop is far behind with this stream, so that what waits is bounded. -ENOMEM */
int srv_queue_text(srv_queue *q, srv_job *j, const char *text, size_t len, const eng_token *tokens, size_t n_tokens);
void srv_queue_progress(srv_queue *q, srv_job *j, uint32_t done, uint32_t cached, uint32_t total, double ms);
/* Engine: the job is the loop's again and must not be touched any more. */
void srv_queue_finish(srv_queue *q, srv_job *j);

#endif
