/* The last answers, in case one is to become a named context. Threads: the loop adds, work items look up. */
#include "api.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { KEPT = 64, KEPT_BYTES = 64 << 20 };

typedef struct {
    char id[40];
    uint64_t tenant;
    srv_answer answer;
} entry;

struct srv_recent {
    pthread_mutex_t lock;
    entry all[KEPT]; /* a ring; guarded by lock */
    uint32_t next;
    size_t bytes;
};

srv_recent *srv_recent_new(void)
{
    srv_recent *r = calloc(1, sizeof(*r));
    if (r)
        pthread_mutex_init(&r->lock, NULL);
    return r;
}

void srv_answer_done(srv_answer *a)
{
    free(a->messages);
    free(a->said);
    free(a->ids);
    memset(a, 0, sizeof(*a));
}

static size_t bytes_of(const srv_answer *a)
{
    return a->messages_len + a->said_len + a->n_ids * sizeof(*a->ids);
}

static void drop(srv_recent *r, entry *e)
{
    r->bytes -= bytes_of(&e->answer);
    srv_answer_done(&e->answer);
    memset(e, 0, sizeof(*e));
}

void srv_recent_free(srv_recent *r)
{
    if (!r)
        return;
    for (size_t i = 0; i < KEPT; i++)
        drop(r, &r->all[i]);
    pthread_mutex_destroy(&r->lock);
    free(r);
}

void srv_recent_add(srv_recent *r, srv_job *j)
{
    bool chat = j->shape == &srv_shape_chat;
    if (!r || j->makes || !j->request.cache_prompt || j->said.failed || (chat && !j->messages))
        return;
    entry e = {.tenant = j->request.tenant, .answer = {.said = j->said.p, .said_len = j->said.n}};
    memcpy(e.id, j->id, sizeof(e.id));
    j->said = (srv_buf){0};
    if (chat) {
        e.answer.messages = j->messages;
        e.answer.messages_len = j->messages_len;
        j->messages = NULL;
    } else {
        e.answer.ids = j->ids;
        e.answer.n_ids = j->request.n_ids;
        j->ids = NULL;
    }
    pthread_mutex_lock(&r->lock);
    drop(r, &r->all[r->next]);
    r->all[r->next] = e;
    r->bytes += bytes_of(&e.answer);
    for (uint32_t i = 1; i < KEPT && r->bytes > KEPT_BYTES; i++) /* the oldest first */
        drop(r, &r->all[(r->next + i) % KEPT]);
    if (r->bytes > KEPT_BYTES)
        drop(r, &r->all[r->next]);
    r->next = (r->next + 1) % KEPT;
    pthread_mutex_unlock(&r->lock);
}

static char *copy(const void *p, size_t n)
{
    char *c = p ? malloc(n + 1) : NULL;
    if (c) {
        memcpy(c, p, n);
        c[n] = 0;
    }
    return c;
}

int srv_recent_find(srv_recent *r, uint64_t tenant, const char *id, srv_answer *ret)
{
    int rc = -ENOENT;
    pthread_mutex_lock(&r->lock);
    for (size_t i = 0; i < KEPT && rc == -ENOENT; i++) {
        const entry *e = &r->all[i];
        const srv_answer *a = &e->answer;
        if (!e->id[0] || e->tenant != tenant || strcmp(e->id, id) != 0)
            continue;
        srv_answer c = *a;
        c.messages = copy(a->messages, a->messages_len);
        c.said = copy(a->said ? a->said : "", a->said_len);
        c.ids = (int32_t *)(void *)copy(a->ids, a->n_ids * sizeof(*a->ids));
        rc = (a->messages && !c.messages) || !c.said || (a->ids && !c.ids) ? -ENOMEM : 0;
        if (rc < 0)
            srv_answer_done(&c);
        else
            *ret = c;
    }
    pthread_mutex_unlock(&r->lock);
    return rc;
}
