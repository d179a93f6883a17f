/* engine.h without a model, for tests of the server: deterministic, steered by what stands in the prompt.
 *
 * Tokens are bytes (ids 0..255) and three control tokens. Without a directive an answer repeats "tick ".
 *   [[say:TEXT]]      the answer is TEXT, then the end token
 *   [[hang]]          prefill lasts until it is cancelled
 *   [[gate:PATH]]     the answer goes on after its first token when PATH exists
 *   [[pace]]          a token of the answer, a chunk of the prompt takes a millisecond
 *   [[fail:open|prefill|decode]]   -ENOMEM there
 * Named contexts are the real ones, in memory.
 * The environment: FAKE_LOAD_GATE (eng_open waits until that path exists), FAKE_CANCEL_LOG (a line is appended for every cancelled
 * session), FAKE_CLOCK (a file with the seconds since 1970 that names live by).
 */
#include "capture.h"
#include "context_names.h"
#include "contexts.h"
#include "cost.h"
#include "engine.h"
#include "index_bench.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BOS = 256, IM_START, IM_END, N_VOCAB, MIN_PREFIX = 64, PENDING = 3 };

static const char *const controls[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
static const char template[] = "{% for m in messages %}{% if '[[render-hang]]' in m.content %}{% for i in range(99999) %}{% for k in "
                               "range(99999) %}{% endfor %}{% endfor %}"
                               "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt "
                               "%}<|im_start|>assistant\n{% endif %}";

struct eng_engine {
    eng_params params;
    eng_info info;
    eng_names *names;
    int32_t *kept; /* the one context: ids of the last prompt and answer */
    size_t n_kept;
    _Atomic(uint64_t) heartbeat, hits, misses, prompt_tokens, cached_tokens, predicted_tokens;
    _Atomic(uint32_t) pending;
    char bytes[256];
};

struct eng_session {
    eng_engine *e;
    eng_request r;
    int32_t *ids; /* prompt, then answer */
    size_t n_ids, n_prompt, n_cached;
    char *text; /* the prompt's bytes */
    const char *say, *gate;
    size_t say_len, gate_len;
    uint32_t n_said;
    bool fail_prefill, fail_decode, pace;
    eng_timings timings;
    eng_prefix_stop stop;
};

static void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

static bool cancelled(const eng_session *s)
{
    return s->r.cancel && atomic_load(s->r.cancel);
}

/* ---- names and defaults ----------------------------------------------------------------------------------------- */

static const char *const modes[] = {"full", "streaming", "flat", "cluster", "ivf", "graph", "auto"};

eng_attention eng_attention_default(void)
{
    return (eng_attention){ENG_ATTN_AUTO, 128, 512, 0, 8.0f, 1024, true};
}

const char *eng_attn_mode_name(eng_attn_mode m)
{
    return modes[m];
}

int eng_attn_mode_parse(const char *s, eng_attn_mode *ret)
{
    for (int i = 0; i < 7; i++)
        if (strcmp(s, modes[i]) == 0) {
            *ret = (eng_attn_mode)i;
            return 0;
        }
    return -EINVAL;
}

int eng_attn_budget_parse(const char *s, eng_attention *a)
{
    static const char *const names[] = {"fast", "default", "precise"};
    for (uint32_t i = 0; i < 3; i++)
        if (strcmp(s, names[i]) == 0) {
            a->top_k = 0;
            a->beta = 7 + (float)i;
            a->k_max = 512U << i;
            return 0;
        }
    return -EINVAL;
}

eng_sampling eng_sampling_default(void)
{
    return (eng_sampling){.temperature = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f, .repeat_penalty = 1, .repeat_last_n = 64};
}

eng_params eng_params_default(void)
{
    return (eng_params){.n_chunk = 512, .cache_ram = 1 << 20};
}

/* ---- open, info ------------------------------------------------------------------------------------------------- */

static int64_t file_clock(void *ctx)
{
    (void)ctx;
    long long seconds = 0;
    FILE *f = fopen(getenv("FAKE_CLOCK"), "r");
    if (f) {
        if (fscanf(f, "%lld", &seconds) != 1)
            seconds = 0;
        fclose(f);
    }
    return seconds;
}

int eng_open(const char *model_path, const eng_params *params, eng_engine **ret, char *err, size_t errlen)
{
    const char *gate = getenv("FAKE_LOAD_GATE");
    while (gate && access(gate, F_OK) < 0)
        nap();
    if (access(model_path, R_OK) < 0) {
        int rc = -errno;
        snprintf(err, errlen, "%s: %s", model_path, strerror(-rc));
        return rc;
    }
    eng_engine *e = calloc(1, sizeof(*e));
    if (!e)
        return -ENOMEM;
    e->params = *params;
    for (int i = 0; i < 256; i++)
        e->bytes[i] = (char)i;
    e->info = (eng_info){.architecture = "fake",
                         .name = "Fake",
                         .type = "F32",
                         .chat_template = template,
                         .chat_template_len = strlen(template),
                         .n_params = 1,
                         .model_bytes = 1,
                         .n_vocab = N_VOCAB,
                         .n_ctx_train = 4096,
                         .n_ctx = params->n_ctx ? params->n_ctx : 4096,
                         .n_threads = 1,
                         .cpu = "fake",
                         .bos = BOS,
                         .eos = IM_END,
                         .add_bos = true,
                         .fingerprint = 0x1234};
    eng_names_budget budget = {.ram_limit = params->cache_ram, .token_bytes = 1024};
    if (eng_names_new(e->info.fingerprint, &e->names) < 0) {
        free(e);
        return -ENOMEM;
    }
    eng_names_setup(e->names, &budget, getenv("FAKE_CLOCK") ? file_clock : NULL, NULL, NULL, NULL);
    *ret = e;
    return 0;
}

void eng_close(eng_engine *e)
{
    if (!e)
        return;
    eng_names_free(e->names);
    free(e->kept);
    free(e);
}

const eng_info *eng_info_get(const eng_engine *e)
{
    return &e->info;
}

int eng_disk_open(eng_engine *e, const eng_disk_params *p, char *err, size_t errlen)
{
    (void)e, (void)p;
    snprintf(err, errlen, "the fake engine has no disk tier");
    return -ENOSYS;
}

void eng_disk_stats_get(const eng_engine *e, eng_disk_stats *ret)
{
    (void)e;
    *ret = (eng_disk_stats){0};
}

const char *eng_miss_name(eng_miss m)
{
    return m == ENG_MISS_ABSENT ? "absent" : m == ENG_MISS_DIFFERS ? "differs" : "other";
}

void eng_stats_get(const eng_engine *e, eng_stats *ret)
{
    *ret = (eng_stats){.cache_limit = 1 << 20,
                       .segments = e->hits + e->misses ? 1 : 0,
                       .index_pending = e->pending,
                       .hits = e->hits,
                       .misses = e->misses,
                       .prompt_tokens = e->prompt_tokens,
                       .cached_tokens = e->cached_tokens,
                       .predicted_tokens = e->predicted_tokens,
                       .prompt_seconds = 0.5,
                       .predicted_seconds = 0.25,
                       .heartbeat = e->heartbeat};
}

/* Nothing is kept for a name here. */
static void look_at_names(eng_engine *e)
{
    eng_names_item *items;
    eng_context *c;
    while ((c = eng_names_next_left(e->names)))
        eng_names_unref(c);
    int n = eng_names_items(e->names, &items);
    for (int i = 0; i < n; i++)
        eng_names_unref(items[i].context);
    if (n >= 0)
        free(items);
}

int eng_idle(eng_engine *e, uint32_t max_ms, const atomic_bool *stop)
{
    (void)max_ms;
    look_at_names(e);
    if (e->pending && !(stop && atomic_load(stop)))
        e->pending--;
    return e->pending > 0;
}

/* ---- text ------------------------------------------------------------------------------------------------------- */

int eng_tokenize(const eng_engine *e, const char *text, size_t len, unsigned flags, const char *guard, int32_t **ret_ids, size_t *ret_n)
{
    size_t n = 0, guard_len = guard ? strlen(guard) : 0;
    int32_t *ids = malloc((len + 1) * sizeof(*ids));
    (void)e;
    if (!ids)
        return -ENOMEM;
    if (flags & ENG_TOK_ADD_SPECIAL)
        ids[n++] = BOS;
    for (size_t i = 0; i < len;) {
        int special = -1;
        for (int k = 0; k < 3 && (flags & ENG_TOK_PARSE_SPECIAL); k++)
            if (strlen(controls[k]) <= len - i && memcmp(text + i, controls[k], strlen(controls[k])) == 0)
                special = k;
        if (special >= 0) {
            ids[n++] = BOS + special;
            i += strlen(controls[special]);
        } else if (guard_len && guard_len <= len - i && memcmp(text + i, guard, guard_len) == 0) {
            i += guard_len;
        } else {
            ids[n++] = (unsigned char)text[i++];
        }
    }
    *ret_ids = ids;
    *ret_n = n;
    return 0;
}

int eng_token_text(const eng_engine *e, int32_t id, bool special, const char **ret_text, size_t *ret_len)
{
    if (id < 0 || id >= N_VOCAB)
        return -EINVAL;
    *ret_text = id < BOS ? &e->bytes[id] : special ? controls[id - BOS] : "";
    *ret_len = id < BOS ? 1 : strlen(*ret_text);
    return 0;
}

bool eng_token_is_eog(const eng_engine *e, int32_t id)
{
    (void)e;
    return id == IM_END || id == BOS;
}

bool eng_token_is_control(const eng_engine *e, int32_t id)
{
    (void)e;
    return id >= BOS;
}

/* ---- sessions --------------------------------------------------------------------------------------------------- */

/* The argument of the last [[name:...]] in the prompt. */
static const char *directive(const eng_session *s, const char *name, size_t *ret_len)
{
    char head[32];
    const char *found = NULL;
    snprintf(head, sizeof(head), "[[%s", name);
    for (const char *p = s->text; (p = strstr(p, head)); p++)
        found = p;
    const char *end = found ? strstr(found, "]]") : NULL;
    if (!end)
        return NULL;
    found += strlen(head) + (found[strlen(head)] == ':');
    *ret_len = (size_t)(end - found);
    return found;
}

static bool fails(const eng_session *s, const char *where)
{
    size_t n;
    const char *p = directive(s, "fail", &n);
    return p && n == strlen(where) && memcmp(p, where, n) == 0;
}

static void free_session(eng_session *s)
{
    if (!s)
        return;
    free(s->ids);
    free(s->text);
    free(s);
}

int eng_session_open(eng_engine *e, const eng_request *r, eng_session **ret, char *err, size_t errlen)
{
    if (r->n_ids == 0)
        return -EINVAL;
    if (r->n_ids >= e->info.n_ctx)
        return -E2BIG;
    eng_session *s = calloc(1, sizeof(*s));
    if (!s)
        return -ENOMEM;
    s->e = e;
    s->r = *r;
    s->ids = malloc((r->n_ids + r->max_tokens + 1) * sizeof(*s->ids));
    s->text = calloc(1, r->n_ids + 1);
    if (!s->ids || !s->text)
        goto fail;
    memcpy(s->ids, r->ids, r->n_ids * sizeof(*s->ids));
    s->n_ids = s->n_prompt = r->n_ids;
    for (size_t i = 0; i < r->n_ids; i++)
        s->text[i] = r->ids[i] > 0 && r->ids[i] < BOS ? (char)r->ids[i] : ' ';
    s->say = directive(s, "say", &s->say_len);
    s->gate = directive(s, "gate", &s->gate_len);
    size_t n;
    s->pace = directive(s, "pace", &n) != NULL;
    s->fail_prefill = fails(s, "prefill");
    s->fail_decode = fails(s, "decode");
    s->timings.mode = r->attention.mode;
    if (fails(s, "open")) {
        snprintf(err, errlen, "no room for a session");
        goto fail;
    }
    while (r->cache_prompt && s->n_cached < e->n_kept && s->n_cached + 1 < s->n_prompt && e->kept[s->n_cached] == s->ids[s->n_cached])
        s->n_cached++;
    if (s->n_cached < MIN_PREFIX)
        s->n_cached = 0;
    if (r->cache_prompt && s->n_cached + 1 < s->n_prompt)
        s->stop = (eng_prefix_stop){(uint32_t)s->n_cached, s->n_cached ? ENG_MISS_DIFFERS : ENG_MISS_ABSENT};
    e->hits += s->n_cached > 0;
    e->misses += s->n_cached == 0;
    *ret = s;
    return 0;
fail:
    free_session(s);
    return -ENOMEM;
}

int eng_session_prefill(eng_session *s, eng_progress_fn *progress, void *ctx)
{
    size_t n;
    while (directive(s, "hang", &n) && !cancelled(s))
        nap();
    if (cancelled(s))
        return -ECANCELED;
    if (s->fail_prefill)
        return -ENOMEM;
    uint32_t done = (uint32_t)s->n_cached, total = (uint32_t)s->n_prompt;
    while (done < total) {
        if (s->pace)
            nap();
        done = total - done > s->e->params.n_chunk ? done + s->e->params.n_chunk : total;
        s->e->heartbeat++;
        if (progress)
            progress(ctx, done, (uint32_t)s->n_cached, total);
    }
    s->timings.cache_n = (uint32_t)s->n_cached;
    s->timings.prompt_n = total - s->timings.cache_n;
    s->timings.prompt_ms = 1;
    s->e->prompt_tokens += s->timings.prompt_n;
    s->e->cached_tokens += s->n_cached;
    return 0;
}

static bool gate_open(const eng_session *s)
{
    char path[300];
    snprintf(path, sizeof(path), "%.*s", (int)s->gate_len, s->gate);
    return access(path, F_OK) == 0;
}

int eng_session_next(eng_session *s, eng_token *ret)
{
    static const char tick[] = "tick ";
    uint32_t at = s->n_said;
    if (s->fail_decode && at == 2)
        return -ENOMEM;
    while (s->gate && at == 1 && !gate_open(s) && !cancelled(s))
        nap();
    if (s->pace)
        nap();
    if (cancelled(s))
        return -ECANCELED;
    if (s->n_ids >= s->e->info.n_ctx)
        return 1;
    int32_t id = (unsigned char)tick[at % 5];
    if (s->say)
        id = at < s->say_len ? (unsigned char)s->say[at] : IM_END;
    *ret = (eng_token){.id = id, .logprob = -0.5f, .n_top = s->r.sampling.n_logprobs};
    for (uint32_t k = 0; k < ret->n_top; k++) {
        ret->top[k].id = (id + (int32_t)k) % N_VOCAB;
        ret->top[k].logprob = -0.5f - (float)k;
    }
    s->ids[s->n_ids++] = id;
    s->n_said++;
    s->e->heartbeat++;
    s->e->predicted_tokens++;
    s->timings.predicted_n++;
    s->timings.predicted_ms += 0.5;
    return 0;
}

int eng_session_force(eng_session *s, int32_t id)
{
    (void)s;
    (void)id;
    return -ENOSYS;
}

int eng_session_logits(eng_session *s, const float **ret)
{
    (void)s;
    (void)ret;
    return -ENOSYS;
}

void eng_cost_use(eng_engine *e, const eng_cost *c)
{
    (void)e;
    (void)c;
}

int eng_cost_read(const char *path, const char *cpu, eng_cost *ret, char *err, size_t errlen)
{
    (void)path;
    (void)cpu;
    (void)ret;
    (void)err;
    (void)errlen;
    return -ENOENT;
}

int eng_cost_write(const char *path, const char *cpu, const eng_cost *c, char *err, size_t errlen)
{
    (void)path;
    (void)cpu;
    (void)c;
    (void)err;
    (void)errlen;
    return -ENOSYS;
}

int eng_cost_fit(eng_cpu cpu, void (*log)(const char *line), eng_cost *ret, const char **ret_cpu, char *err, size_t errlen)
{
    (void)cpu;
    (void)log;
    (void)ret;
    (void)ret_cpu;
    snprintf(err, errlen, "the fake engine cannot be measured");
    return -ENOSYS;
}

void eng_session_watch(eng_session *s, eng_queries_fn *fn, void *ctx)
{
    (void)s;
    (void)fn;
    (void)ctx;
}

int eng_session_rows(const eng_session *s, uint32_t layer, uint32_t head_kv, bool values, uint32_t n, float *ret)
{
    (void)s;
    (void)layer;
    (void)head_kv;
    (void)values;
    (void)n;
    (void)ret;
    return -ENOSYS;
}

void eng_session_timings(const eng_session *s, eng_timings *ret)
{
    *ret = s->timings;
    ret->keys_held = (double)s->n_ids;
    ret->keys_attended = (double)s->n_ids;
}

eng_prefix_stop eng_session_miss(const eng_session *s)
{
    return s->stop;
}

void eng_prefix_stops(const eng_engine *e, uint64_t ret[ENG_MISS_COUNT])
{
    (void)e;
    memset(ret, 0, ENG_MISS_COUNT * sizeof(*ret));
}

void eng_session_close(eng_session *s)
{
    eng_engine *e = s->e;
    const char *log = cancelled(s) ? getenv("FAKE_CANCEL_LOG") : NULL;
    FILE *f = log ? fopen(log, "a") : NULL;
    if (f) {
        fprintf(f, "cancelled after %u tokens\n", s->n_said);
        fclose(f);
    }
    if (s->r.cache_prompt) {
        free(e->kept);
        e->kept = s->ids;
        e->n_kept = s->n_ids;
        s->ids = NULL;
        e->pending = PENDING;
    }
    free_session(s);
}

/* ---- names ------------------------------------------------------------------------------------------------------- */

int eng_context_make(eng_engine *e, const eng_context_params *p, eng_context **ret, char *err, size_t errlen)
{
    return eng_names_make(e->names, p, ret, err, errlen);
}

int eng_context_use(eng_engine *e, uint64_t tenant, const char *name, eng_context **ret)
{
    return eng_names_use(e->names, tenant, name, ret);
}

void eng_context_abandon(eng_engine *e, eng_context *c)
{
    eng_names_abandon(e->names, c);
}

int eng_context_alter(eng_engine *e, uint64_t tenant, const char *name, const eng_context_change *change, char *err, size_t errlen)
{
    return eng_names_alter(e->names, tenant, name, change, err, errlen);
}

int eng_context_remove(eng_engine *e, uint64_t tenant, const char *name)
{
    return eng_names_remove(e->names, tenant, name);
}

int eng_context_list(eng_engine *e, uint64_t tenant, const char *name, eng_context_info **ret)
{
    return eng_names_list(e->names, tenant, name, NULL, NULL, ret);
}

bool eng_contexts_tick(eng_engine *e)
{
    return eng_names_tick(e->names);
}

int eng_disk_verify(const char *dir, void (*bad)(void *ctx, const char *path, eng_miss why, const char *err), void *ctx, eng_disk_check *ret, char *err,
                    size_t errlen)
{
    (void)dir, (void)bad, (void)ctx, (void)ret;
    snprintf(err, errlen, "not in this program");
    return -ENOSYS;
}

/* bench index needs no model, so the real program is tested with it. */
int eng_bench_index(const eng_bench_head *h, const eng_bench_params *p, const char *const *kinds, eng_bench_result *ret, uint32_t *ret_replicas, char *err,
                    size_t errlen)
{
    (void)h, (void)p, (void)kinds, (void)ret, (void)ret_replicas;
    snprintf(err, errlen, "not in this program");
    return -ENOSYS;
}
