#include "context_names_private.h"

#include "text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { OWN_BYTES = 256 << 20 }; /* of all names' ids and sources */

static const int64_t max_ttl = (int64_t)100 * 31556952; /* a century: a sum with any time fits */

static int64_t now(const eng_names *n)
{
    return n->now ? n->now(n->now_ctx) : (int64_t)time(NULL);
}

/* ---- one context ------------------------------------------------------------------------------------------------- */

void eng_names_unref(eng_context *c)
{
    if (!c || atomic_fetch_sub(&c->refs, 1) != 1)
        return;
    free(c->ids);
    free(c->source);
    free(c);
}

eng_context *eng_names_ref(eng_context *c)
{
    atomic_fetch_add(&c->refs, 1);
    return c;
}

const eng_context_content *eng_context_get(const eng_context *c)
{
    return &c->content;
}

void eng_context_release(eng_context *c)
{
    if (!c)
        return;
    atomic_fetch_sub(&c->users, 1);
    eng_names_unref(c);
}

void eng_context_report(eng_context *c, eng_context_state state, uint32_t read, const char *error)
{
    if (state == ENG_CONTEXT_FAILED)
        snprintf(c->error, sizeof c->error, "%s", error ? error : "");
    atomic_store(&c->read, read);
    atomic_store(&c->state, state);
}

void eng_names_publish(eng_context *c, const eng_names_ram *ram)
{
    atomic_store(&c->ram_tokens, ram->tokens);
    atomic_store(&c->ram_bytes, ram->bytes);
    atomic_store(&c->indexes, ram->indexes);
    atomic_store(&c->indexes_ready, ram->indexes_ready);
}

static size_t own_bytes(const eng_context *c)
{
    return c->content.n_ids * sizeof(int32_t) + c->content.source_len;
}

/* The content is copied; the caller holds the one reference. */
eng_context *eng_names_context(const eng_context_content *content)
{
    eng_context *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    atomic_init(&c->refs, 1);
    c->content = *content;
    c->content.ids = c->ids = malloc((content->n_ids ? content->n_ids : 1) * sizeof *c->ids);
    c->content.source = c->source = malloc(content->source_len + 1);
    if (!c->ids || !c->source) {
        eng_names_unref(c);
        return NULL;
    }
    if (content->n_ids)
        memcpy(c->ids, content->ids, content->n_ids * sizeof *c->ids);
    if (content->source_len)
        memcpy(c->source, content->source, content->source_len);
    c->source[content->source_len] = 0;
    return c;
}

/* ---- the table, with the lock held -------------------------------------------------------------------------------- */

bool eng_names_is_name(const char *s)
{
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    size_t len = strnlen(s, ENG_NAME_MAX + 1);
    return len && len <= ENG_NAME_MAX && strspn(s, letters) == len && !strchr("._-", s[0]);
}

bool eng_names_expired(const eng_names *n, const eng_context *c)
{
    return c->expires && c->expires <= now(n);
}

static eng_context *find(const eng_names *n, uint64_t tenant, const char *name)
{
    for (uint32_t i = 0; i < n->n; i++) {
        eng_context *c = n->all[i];
        if (!c->gone && c->model == n->model && c->tenant == tenant && !strcmp(c->name, name))
            return c;
    }
    return NULL;
}

/* 0 and a context that lives. */
int eng_names_find(const eng_names *n, uint64_t tenant, const char *name, eng_context **ret)
{
    eng_context *c = find(n, tenant, name);
    if (c && !eng_names_expired(n, c)) {
        *ret = c;
        return 0;
    }
    bool past = c != NULL;
    for (uint32_t i = 0; i < n->n_past && i < ENG_NAMES_PAST && !past; i++)
        past = n->past[i].tenant == tenant && !strcmp(n->past[i].name, name);
    return past ? -ESTALE : -ENOENT;
}

static void remember_past(eng_names *n, const eng_context *c)
{
    past_name *p = &n->past[n->n_past++ % ENG_NAMES_PAST];
    p->tenant = c->tenant;
    memcpy(p->name, c->name, sizeof p->name);
}

static void forget_past(eng_names *n, uint64_t tenant, const char *name)
{
    for (uint32_t i = 0; i < ENG_NAMES_PAST; i++)
        if (n->past[i].tenant == tenant && !strcmp(n->past[i].name, name))
            n->past[i] = (past_name){0};
}

/* Tokens that a and b begin with alike. */
static size_t common_prefix(const eng_context_content *a, const eng_context_content *b)
{
    enum { BLOCK = 256 };
    size_t most = a->n_ids < b->n_ids ? a->n_ids : b->n_ids, i = 0;
    while (most - i >= BLOCK && !memcmp(a->ids + i, b->ids + i, BLOCK * sizeof *a->ids))
        i += BLOCK;
    while (i < most && a->ids[i] == b->ids[i])
        i++;
    return i;
}

/* Tokens of c that no other one in the table has, or no other pinned one. */
static uint64_t own_tokens(const eng_names *n, const eng_context *c, bool pinned_only)
{
    size_t shared = 0;
    for (uint32_t i = 0; i < n->n; i++) {
        const eng_context *a = n->all[i];
        if (a == c || a->gone || a->model != c->model || a->tenant != c->tenant || (pinned_only && !a->pinned))
            continue;
        size_t same = common_prefix(&a->content, &c->content);
        shared = same > shared ? same : shared;
    }
    return c->content.n_ids - shared;
}

/* c, which is in the table, begins or stops to count. */
static void count(eng_names *n, const eng_context *c, bool in)
{
    if (c->gone || c->model != n->model)
        return;
    uint64_t own = own_tokens(n, c, false), pinned = c->pinned ? own_tokens(n, c, true) : 0;
    n->tokens = in ? n->tokens + own : n->tokens - own;
    n->pinned_tokens = in ? n->pinned_tokens + pinned : n->pinned_tokens - pinned;
}

int eng_names_add(eng_names *n, eng_context *c)
{
    if (n->n == n->cap) {
        uint32_t cap = n->cap ? 2 * n->cap : 16;
        eng_context **p = realloc(n->all, cap * sizeof *p);
        if (!p)
            return -ENOMEM;
        n->all = p;
        n->cap = cap;
    }
    n->all[n->n++] = eng_names_ref(c);
    n->bytes += own_bytes(c);
    n->version++;
    count(n, c, true);
    return 0;
}

void eng_names_take_out(eng_names *n, eng_context *c)
{
    uint32_t i = 0;
    while (n->all[i] != c)
        i++;
    memmove(n->all + i, n->all + i + 1, (n->n - i - 1) * sizeof *n->all);
    n->n--;
    n->bytes -= own_bytes(c);
    eng_names_unref(c);
}

/* The name is free; its row, if there is one, goes with the next write. */
static void set_gone(eng_names *n, eng_context *c)
{
    if (c->gone)
        return;
    count(n, c, false);
    c->gone = true;
    n->version++;
    if (!n->sync)
        eng_names_take_out(n, c);
}

/* The same, and memory is told. */
static void let_go(eng_names *n, eng_context *c)
{
    if (c->gone)
        return;
    if (c->model == n->model) {
        c->next_left = n->left;
        n->left = eng_names_ref(c);
    }
    set_gone(n, c);
}

/* What has expired leaves, once nobody uses it. */
static void sweep(eng_names *n)
{
    for (uint32_t i = n->n; i-- > 0;) {
        eng_context *c = n->all[i];
        if (c->gone || !eng_names_expired(n, c) || atomic_load(&c->users))
            continue;
        remember_past(n, c);
        let_go(n, c);
    }
}

static int check_budget(const eng_names *n, const eng_context *c, bool pinned_only, char *err, size_t errlen)
{
    uint64_t limit = pinned_only ? n->budget.ram_limit : n->budget.disk_limit, others = (pinned_only ? n->pinned_tokens : n->tokens) * n->budget.token_bytes;
    uint64_t own = own_tokens(n, c, pinned_only) * n->budget.token_bytes;
    if (others + own <= limit || (!pinned_only && !limit))
        return 0;
    return eng_fail(err, errlen, -ENOSPC, "%s its %zu tokens takes %.1f MiB of %s, more than other %s contexts leave of the %.1f MiB of %s: %s",
                    pinned_only ? "pinning" : "keeping", c->content.n_ids, (double)own / 1048576, pinned_only ? "memory" : "disk space",
                    pinned_only ? "pinned" : "named", (double)limit / 1048576, pinned_only ? "--cache-ram" : "--cache-disk",
                    pinned_only ? "unpin one, or raise it" : "remove one, or raise it"); /* how much they are is nobody's who may not list them */
}

static int check_room(const eng_names *n, const eng_context *c, char *err, size_t errlen)
{
    uint32_t living = 0;
    for (uint32_t i = 0; i < n->n; i++)
        living += !n->all[i]->gone;
    if (living >= ENG_NAMES_MAX)
        return eng_fail(err, errlen, -ENOSPC, "there are %u named contexts, and no more than %d are allowed: remove one", living, ENG_NAMES_MAX);
    if (n->bytes + own_bytes(c) > OWN_BYTES)
        return eng_fail(err, errlen, -ENOSPC, "the tokens and texts of named contexts would take more than the %d MiB that are allowed: remove one", OWN_BYTES >> 20);
    int r = check_budget(n, c, false, err, errlen);
    return r == 0 && c->pinned ? check_budget(n, c, true, err, errlen) : r;
}

/* ---- making and changing ----------------------------------------------------------------------------------------- */

static int64_t end_of(const eng_names *n, int64_t ttl)
{
    return ttl ? now(n) + ttl : 0;
}

static int check_terms(const char *name, int64_t ttl, char *err, size_t errlen)
{
    if (name && !eng_names_is_name(name))
        return eng_fail(err, errlen, -EINVAL, "a name has 1 to %d letters, digits, dots, dashes and underscores, of which the first is a letter or digit", ENG_NAME_MAX);
    if (ttl < 0 || ttl > max_ttl)
        return eng_fail(err, errlen, -EINVAL, "a time to live is from 1 second to 100 years");
    return 0;
}

static int name_taken(char *err, size_t errlen, const char *name)
{
    return eng_fail(err, errlen, -EEXIST, "there is a context named %s already", name);
}

/* Writes what has changed, and says how it went for c. */
static int write_down(eng_names *n, eng_context *c, char *err, size_t errlen)
{
    if (!n->sync)
        return 0;
    n->sync(n->sync_ctx, true);
    pthread_mutex_lock(&n->lock);
    int r = c->result;
    pthread_mutex_unlock(&n->lock);
    return r < 0 ? eng_fail(err, errlen, r, "the name cannot be written to disk: %s", strerror(-r)) : 0;
}

static int insert(eng_names *n, eng_context *c, bool replace, char *err, size_t errlen)
{
    pthread_mutex_lock(&n->lock);
    sweep(n);
    eng_context *old = find(n, c->tenant, c->name);
    int r = 0;
    if (old && !eng_names_expired(n, old) && !replace)
        r = name_taken(err, errlen, c->name);
    if (r == 0 && old) { /* does not count beside the new one */
        count(n, old, false);
        old->gone = true;
    }
    if (r == 0)
        r = check_room(n, c, err, errlen);
    if (r == 0 && (r = eng_names_add(n, c)) < 0)
        eng_fail(err, errlen, r, "out of memory");
    if (old && old->gone) {
        old->gone = false;
        count(n, old, true);
        if (r == 0)
            let_go(n, old);
    }
    if (r == 0)
        forget_past(n, c->tenant, c->name);
    pthread_mutex_unlock(&n->lock);
    return r;
}

int eng_names_make(eng_names *n, const eng_context_params *p, eng_context **ret, char *err, size_t errlen)
{
    int r = check_terms(p->name, p->ttl, err, errlen);
    if (r < 0)
        return r;
    eng_context *c = eng_names_context(&p->content);
    if (!c)
        return eng_fail(err, errlen, -ENOMEM, "out of memory");
    c->tenant = p->tenant;
    c->model = n->model;
    c->created = now(n);
    c->expires = end_of(n, p->ttl);
    c->pinned = p->pinned;
    c->unsaved = true;
    snprintf(c->name, sizeof c->name, "%s", p->name);
    atomic_fetch_add(&c->users, 1);
    pthread_mutex_lock(&n->changing);
    r = insert(n, c, p->replace, err, errlen);
    if (r == 0 && (r = write_down(n, c, err, errlen)) < 0) {
        pthread_mutex_lock(&n->lock);
        set_gone(n, c);
        pthread_mutex_unlock(&n->lock);
    }
    pthread_mutex_unlock(&n->changing);
    if (r < 0)
        eng_context_release(c);
    else
        *ret = c;
    return r;
}

int eng_names_use(eng_names *n, uint64_t tenant, const char *name, eng_context **ret)
{
    eng_context *c;
    pthread_mutex_lock(&n->lock);
    int r = eng_names_find(n, tenant, name, &c);
    if (r == 0) {
        c->hits++;
        c->used = now(n);
        c->touched = true;
        atomic_fetch_add(&c->users, 1);
        *ret = eng_names_ref(c);
    }
    pthread_mutex_unlock(&n->lock);
    return r;
}

eng_names_terms eng_names_terms_of(const eng_context *c)
{
    eng_names_terms t = {.pinned = c->pinned, .expires = c->expires};
    memcpy(t.name, c->name, sizeof t.name);
    return t;
}

static void set_terms(eng_names *n, eng_context *c, const eng_names_terms *t)
{
    count(n, c, false);
    memcpy(c->name, t->name, sizeof c->name);
    c->pinned = t->pinned;
    count(n, c, true);
    c->expires = t->expires;
    n->version++;
}

/* With the lock held. */
static int apply(eng_names *n, eng_context *c, const eng_context_change *change, char *err, size_t errlen)
{
    eng_names_terms t = eng_names_terms_of(c);
    int r = 0;
    if (change->name && strcmp(change->name, c->name)) {
        eng_context *other = find(n, c->tenant, change->name);
        if (other && !eng_names_expired(n, other))
            return name_taken(err, errlen, change->name);
        if (other)
            let_go(n, other);
        snprintf(t.name, sizeof t.name, "%s", change->name);
        forget_past(n, c->tenant, change->name);
    }
    if (change->set_ttl)
        t.expires = end_of(n, change->ttl);
    if (change->set_pinned) {
        t.pinned = change->pinned;
        r = t.pinned && !c->pinned ? check_budget(n, c, true, err, errlen) : 0;
    }
    if (r == 0) {
        set_terms(n, c, &t);
        c->unsaved = true;
    }
    return r;
}

int eng_names_alter(eng_names *n, uint64_t tenant, const char *name, const eng_context_change *change, char *err, size_t errlen)
{
    eng_context *c = NULL;
    eng_names_terms before;
    int r = check_terms(change->name, change->set_ttl ? change->ttl : 0, err, errlen);
    if (r < 0)
        return r;
    pthread_mutex_lock(&n->changing);
    pthread_mutex_lock(&n->lock);
    sweep(n);
    r = eng_names_find(n, tenant, name, &c);
    if (r == 0) {
        eng_names_ref(c);
        before = eng_names_terms_of(c);
        r = apply(n, c, change, err, errlen);
    }
    pthread_mutex_unlock(&n->lock);
    if (r == 0 && (r = write_down(n, c, err, errlen)) < 0) {
        pthread_mutex_lock(&n->lock);
        set_terms(n, c, &before);
        c->unsaved = false;
        pthread_mutex_unlock(&n->lock);
    }
    pthread_mutex_unlock(&n->changing);
    eng_names_unref(c);
    return r;
}

int eng_names_remove(eng_names *n, uint64_t tenant, const char *name)
{
    eng_context *c = NULL;
    pthread_mutex_lock(&n->changing);
    pthread_mutex_lock(&n->lock);
    int r = eng_names_find(n, tenant, name, &c);
    if (r == 0) {
        eng_names_ref(c);
        let_go(n, c);
    }
    pthread_mutex_unlock(&n->lock);
    if (r == 0)
        r = write_down(n, c, NULL, 0);
    pthread_mutex_unlock(&n->changing);
    eng_names_unref(c);
    return r;
}

void eng_names_abandon(eng_names *n, eng_context *c)
{
    pthread_mutex_lock(&n->lock);
    set_gone(n, c);
    pthread_mutex_unlock(&n->lock);
    eng_context_release(c);
    if (n->sync)
        n->sync(n->sync_ctx, false);
}

/* With the lock held: where the first one that nobody uses is linked. NULL: there is none. */
static eng_context **next_left(eng_names *n)
{
    for (eng_context **p = &n->left; *p; p = &(*p)->next_left)
        if (!atomic_load(&(*p)->users))
            return p;
    return NULL;
}

eng_context *eng_names_next_left(eng_names *n)
{
    pthread_mutex_lock(&n->lock);
    eng_context **p = next_left(n), *c = p ? *p : NULL;
    if (c)
        *p = c->next_left;
    pthread_mutex_unlock(&n->lock);
    return c;
}

bool eng_names_tick(eng_names *n)
{
    bool gone = false;
    pthread_mutex_lock(&n->lock);
    sweep(n);
    for (uint32_t i = 0; i < n->n; i++)
        gone = gone || (n->all[i]->gone && !atomic_load(&n->all[i]->users));
    bool news = n->served != n->version || next_left(n);
    pthread_mutex_unlock(&n->lock);
    if (gone && n->sync)
        n->sync(n->sync_ctx, false);
    return news;
}

/* ---- the table --------------------------------------------------------------------------------------------------- */

int eng_names_new(uint64_t model, eng_names **ret)
{
    eng_names *n = calloc(1, sizeof *n);
    if (!n)
        return -ENOMEM;
    n->model = model;
    pthread_mutex_init(&n->changing, NULL);
    pthread_mutex_init(&n->lock, NULL);
    *ret = n;
    return 0;
}

void eng_names_setup(eng_names *n, const eng_names_budget *b, int64_t (*clock)(void *ctx), void *clock_ctx, eng_names_sync *sync, void *sync_ctx)
{
    n->budget = *b;
    n->now = clock;
    n->now_ctx = clock_ctx;
    n->sync = sync;
    n->sync_ctx = sync_ctx;
}

void eng_names_free(eng_names *n)
{
    if (!n)
        return;
    while (n->n)
        eng_names_take_out(n, n->all[n->n - 1]);
    for (eng_context *c = n->left, *next; c; c = next) {
        next = c->next_left;
        eng_names_unref(c);
    }
    free(n->all);
    pthread_mutex_destroy(&n->lock);
    pthread_mutex_destroy(&n->changing);
    free(n);
}
