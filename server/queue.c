#include "queue.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_BEHIND = 1024 }; /* pieces of a stream that the loop has not taken */

int srv_queue_init(srv_queue *q, void (*wake)(void *), void *ctx)
{
    memset(q, 0, sizeof(*q));
    int rc = pthread_mutex_init(&q->lock, NULL);
    if (rc)
        return -rc;
    pthread_cond_init(&q->more, NULL); /* these two cannot fail on Linux */
    pthread_cond_init(&q->drained, NULL);
    q->wake = wake;
    q->wake_ctx = ctx;
    return 0;
}

void srv_queue_done(srv_queue *q)
{
    pthread_cond_destroy(&q->more);
    pthread_cond_destroy(&q->drained);
    pthread_mutex_destroy(&q->lock);
}

void srv_queue_put(srv_queue *q, srv_job *j)
{
    pthread_mutex_lock(&q->lock);
    j->next = NULL;
    if (q->tail)
        q->tail->next = j;
    else
        q->head = j;
    q->tail = j;
    q->n_waiting++;
    atomic_store(&q->poke, true);
    pthread_cond_signal(&q->more);
    pthread_mutex_unlock(&q->lock);
}

bool srv_queue_cancel(srv_queue *q, srv_job *j)
{
    bool out = false;
    pthread_mutex_lock(&q->lock);
    if (q->running == j) {
        atomic_store(&q->cancel, true);
        pthread_cond_signal(&q->drained);
    }
    srv_job *before = NULL;
    for (srv_job *i = q->head; i; before = i, i = i->next) {
        if (i != j)
            continue;
        if (before)
            before->next = i->next;
        else
            q->head = i->next;
        if (q->tail == i)
            q->tail = before;
        q->n_waiting--;
        out = true;
        break;
    }
    pthread_mutex_unlock(&q->lock);
    return out;
}

srv_job *srv_queue_cancel_next(srv_queue *q)
{
    pthread_mutex_lock(&q->lock);
    srv_job *j = q->head;
    if (j) {
        q->head = j->next;
        q->tail = q->head ? q->tail : NULL;
        q->n_waiting--;
    } else if (q->running) {
        atomic_store(&q->cancel, true);
        pthread_cond_signal(&q->drained);
    }
    pthread_mutex_unlock(&q->lock);
    return j;
}

srv_job *srv_queue_news(srv_queue *q, srv_outbox *ret)
{
    pthread_mutex_lock(&q->lock);
    srv_job *j = q->dirty;
    if (j) {
        q->dirty = j->next_dirty;
        j->dirty = false;
        *ret = j->outbox;
        memset(&j->outbox, 0, sizeof(j->outbox));
        pthread_cond_signal(&q->drained);
    }
    pthread_mutex_unlock(&q->lock);
    return j;
}

void srv_queue_depth(srv_queue *q, uint32_t *ret_waiting, uint32_t *ret_running)
{
    pthread_mutex_lock(&q->lock);
    *ret_waiting = q->n_waiting;
    *ret_running = q->running ? 1 : 0;
    pthread_mutex_unlock(&q->lock);
}

void srv_queue_stop(srv_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->stop = true;
    atomic_store(&q->poke, true);
    pthread_cond_signal(&q->more);
    pthread_mutex_unlock(&q->lock);
}

void srv_queue_nudge(srv_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->nudged = true;
    pthread_cond_signal(&q->more);
    pthread_mutex_unlock(&q->lock);
}

srv_job *srv_queue_take(srv_queue *q, bool wait, bool *ret_stop)
{
    pthread_mutex_lock(&q->lock);
    while (wait && !q->head && !q->stop && !q->nudged)
        pthread_cond_wait(&q->more, &q->lock);
    q->nudged = false;
    srv_job *j = q->stop ? NULL : q->head;
    if (j) {
        q->head = j->next;
        if (!q->head)
            q->tail = NULL;
        q->n_waiting--;
        q->running = j;
        atomic_store(&q->cancel, false);
    }
    *ret_stop = q->stop;
    if (!q->head && !q->stop)
        atomic_store(&q->poke, false);
    pthread_mutex_unlock(&q->lock);
    return j;
}

/* With the lock held. True when the loop must be woken. */
static bool mark_dirty(srv_queue *q, srv_job *j)
{
    if (j->dirty)
        return false;
    j->dirty = true;
    j->next_dirty = q->dirty;
    q->dirty = j;
    return true;
}

static int grow(void **p, size_t *cap, size_t n, size_t size)
{
    if (n <= *cap)
        return 0;
    size_t want = *cap ? *cap * 2 : 16;
    while (want < n)
        want *= 2;
    void *grown = reallocarray(*p, want, size);
    if (!grown)
        return -ENOMEM;
    *p = grown;
    *cap = want;
    return 0;
}

int srv_queue_text(srv_queue *q, srv_job *j, const char *text, size_t len, const eng_token *tokens, size_t n_tokens)
{
    srv_outbox *o = &j->outbox;
    bool wake = false;
    pthread_mutex_lock(&q->lock);
    while (j->stream && o->n_pieces >= MAX_BEHIND && !atomic_load(&q->cancel))
        pthread_cond_wait(&q->drained, &q->lock);
    int rc = grow((void **)&o->pieces, &o->cap_pieces, o->n_pieces + 1, sizeof(*o->pieces));
    if (rc == 0)
        rc = grow((void **)&o->tokens, &o->cap_tokens, o->n_tokens + n_tokens, sizeof(*o->tokens));
    if (rc == 0) {
        srv_buf_add(&o->text, text, len);
        rc = o->text.failed ? -ENOMEM : 0;
    }
    if (rc == 0) {
        o->pieces[o->n_pieces++] = (srv_piece){len, n_tokens};
        if (n_tokens)
            memcpy(o->tokens + o->n_tokens, tokens, n_tokens * sizeof(*tokens));
        o->n_tokens += n_tokens;
        wake = j->stream && mark_dirty(q, j);
    }
    pthread_mutex_unlock(&q->lock);
    if (wake)
        q->wake(q->wake_ctx);
    return rc;
}

void srv_queue_progress(srv_queue *q, srv_job *j, uint32_t done, uint32_t cached, uint32_t total, double ms)
{
    pthread_mutex_lock(&q->lock);
    j->outbox.has_progress = true;
    j->outbox.done = done;
    j->outbox.cached = cached;
    j->outbox.total = total;
    j->outbox.progress_ms = ms;
    bool wake = mark_dirty(q, j);
    pthread_mutex_unlock(&q->lock);
    if (wake)
        q->wake(q->wake_ctx);
}

void srv_queue_finish(srv_queue *q, srv_job *j)
{
    pthread_mutex_lock(&q->lock);
    j->outbox.finished = true;
    q->running = NULL;
    mark_dirty(q, j);
    pthread_mutex_unlock(&q->lock);
    q->wake(q->wake_ctx);
}
