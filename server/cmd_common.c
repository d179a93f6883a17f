#include "cmd_common.h"
#include "cost.h"

#include <errno.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <syslog.h>
#include <time.h>
#include <unistd.h>

enum { MAX_TEXT_BYTES = 1 << 30, MAX_TEMPLATE_BYTES = 1 << 20, BAR_WIDTH = 30 };

int srv_fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("retrievald: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    return EXIT_FAILURE;
}

double srv_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- settings --------------------------------------------------------------------------------------------------- */

static int parse_kv_type(const char *name, eng_kv_type *ret)
{
    static const char *const names[] = {[ENG_KV_F32] = "f32", [ENG_KV_F16] = "f16", [ENG_KV_BF16] = "bf16", [ENG_KV_Q8_0] = "q8_0"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(name, names[i])) {
            *ret = (eng_kv_type)i;
            return 0;
        }
    return -EINVAL;
}

static int parse_cpu(const char *name, eng_cpu *ret)
{
    static const char *const names[] = {
        [ENG_CPU_AUTO] = "auto", [ENG_CPU_SCALAR] = "scalar", [ENG_CPU_AVX2] = "avx2", [ENG_CPU_AVX512] = "avx512", [ENG_CPU_AMX] = "amx"};
    for (int i = 0; i <= ENG_CPU_AMX; i++)
        if (!strcmp(name, names[i])) {
            *ret = (eng_cpu)i;
            return 0;
        }
    return -EINVAL;
}

/* What replaces the file's RoPE settings. Negative YaRN numbers mean the file's in both structs. */
static int rope_params(const cfg_settings *s, eng_rope_params *ret, char *err, size_t errlen)
{
    static const char *const names[] = {
        [ENG_ROPE_SCALING_FILE] = "auto", [ENG_ROPE_SCALING_NONE] = "none", [ENG_ROPE_SCALING_LINEAR] = "linear", [ENG_ROPE_SCALING_YARN] = "yarn"};
    int type = 0;
    while (type < 4 && strcmp(s->rope_scaling, names[type]))
        type++;
    if (type == 4) {
        snprintf(err, errlen, "unknown RoPE scaling '%s'", s->rope_scaling);
        return -EINVAL;
    }
    if (s->rope_scale > 0 && s->rope_freq_scale > 0) {
        snprintf(err, errlen, "--rope-scale and --rope-freq-scale say the same thing; give one of them");
        return -EINVAL;
    }
    *ret = (eng_rope_params){
        .scaling = (eng_rope_scaling)type,
        .freq_base = (float)s->rope_freq_base,
        .freq_scale = (float)(s->rope_scale > 0 ? 1 / s->rope_scale : s->rope_freq_scale),
        .yarn_orig_ctx = s->yarn_orig_ctx,
        .yarn_ext_factor = (float)s->yarn_ext_factor,
        .yarn_attn_factor = (float)s->yarn_attn_factor,
        .yarn_beta_slow = (float)s->yarn_beta_slow,
        .yarn_beta_fast = (float)s->yarn_beta_fast,
    };
    return 0;
}

/* Word i of a list that config/ has checked; *more: whether others follow. */
static void list_word(const char *list, size_t i, char word[32], bool *more)
{
    for (; i; i--)
        list += strcspn(list, ",") + 1;
    size_t n = strcspn(list, ",");
    snprintf(word, 32, "%.*s", (int)n, list);
    *more = list[n] == ',';
}

/* A list of modes as bits, of those that may search more than codes: auto does without an estimate alone, and by the session's length. */
static uint32_t index_modes(const char *list, bool estimate)
{
    uint32_t modes = 0;
    char word[32];
    bool more = true;
    for (size_t i = 0; more; i++) {
        eng_attn_mode mode;
        list_word(list, i, word, &more);
        if (eng_attn_mode_parse(word, &mode) == 0 && (mode != ENG_ATTN_AUTO || !estimate))
            modes |= 1u << mode;
    }
    return modes;
}

int srv_engine_params(const cfg_settings *s, eng_params *ret, char *err, size_t errlen)
{
    eng_params p = eng_params_default();
    /* a command that has no such setting leaves it NULL or 0 */
    if (s->cpu && parse_cpu(s->cpu, &p.cpu) < 0) {
        snprintf(err, errlen, "unknown instruction set '%s'", s->cpu);
        return -EINVAL;
    }
    if (s->cache_type_k && parse_kv_type(s->cache_type_k, &p.type_k) < 0) {
        snprintf(err, errlen, "unknown type of keys '%s'", s->cache_type_k);
        return -EINVAL;
    }
    if (s->cache_type_v && parse_kv_type(s->cache_type_v, &p.type_v) < 0) {
        snprintf(err, errlen, "unknown type of values '%s'", s->cache_type_v);
        return -EINVAL;
    }
    if (s->cache_ram < 0 || (uint64_t)s->cache_ram > SIZE_MAX >> 20) {
        snprintf(err, errlen, "--cache-ram: too large");
        return -EINVAL;
    }
    if (s->rope_scaling && rope_params(s, &p.rope, err, errlen) < 0)
        return -EINVAL;
    if (s->gpu_layers)
        p.n_gpu_layers = !strcmp(s->gpu_layers, "auto") ? -1 : !strcmp(s->gpu_layers, "all") ? INT32_MAX : atoi(s->gpu_layers);
    p.n_ctx = s->ctx_size;
    p.n_threads = s->threads;
    if (s->ubatch_size)
        p.n_chunk = s->ubatch_size;
    p.cache_ram = (size_t)s->cache_ram << 20;
    p.index_modes = s->attention ? index_modes(s->attention, !s->estimate || !strcmp(s->estimate, "on")) : 0;
    *ret = p;
    return 0;
}

int srv_budget(const cfg_settings *s, eng_attention *a, char *err, size_t errlen)
{
    if (eng_attn_budget_parse(s->attn_budget, a) < 0) {
        snprintf(err, errlen, "unknown attention budget '%s'", s->attn_budget);
        return -EINVAL;
    }
    a->top_k = s->attn_top_k;
    if (s->attn_beta > 0)
        a->beta = (float)s->attn_beta;
    if (s->attn_k_max)
        a->k_max = s->attn_k_max;
    return 0;
}

int srv_state_dir(const cfg_settings *s, char *ret, size_t size)
{
    static const struct {
        const char *variable, *below;
    } places[] = {{"STATE_DIRECTORY", ""}, {"XDG_STATE_HOME", "/retrievald"}, {"HOME", "/.local/state/retrievald"}};
    const char *dir = s->state_dir, *below = "";
    for (size_t i = 0; !dir && i < sizeof places / sizeof *places; i++) {
        const char *value = getenv(places[i].variable);
        if (value && *value == '/') { /* the XDG specification: a relative path is ignored */
            dir = value;
            below = places[i].below;
        }
    }
    if (!dir)
        return -ENOENT;
    int len = !s->state_dir && !*below ? (int)strcspn(dir, ":") : (int)strlen(dir); /* systemd's may be several */
    return (size_t)snprintf(ret, size, "%.*s%s", len, dir, below) < size ? 0 : -ENAMETOOLONG;
}

int srv_cost_path(const cfg_settings *s, char *ret, size_t size)
{
    char dir[PATH_MAX];
    int rc = srv_state_dir(s, dir, sizeof dir);
    if (rc < 0)
        return rc;
    return (size_t)snprintf(ret, size, "%s/cost", dir) < size ? 0 : -ENAMETOOLONG;
}

int srv_use_cost(const cfg_settings *s, eng_engine *e, char *err, size_t errlen)
{
    char path[PATH_MAX];
    eng_cost cost;
    if (srv_cost_path(s, path, sizeof path) < 0)
        return 1;
    int rc = eng_cost_read(path, eng_info_get(e)->cpu, &cost, err, errlen);
    if (rc == 0)
        eng_cost_use(e, &cost);
    return rc == -ENOENT || rc == -ENOTDIR ? 1 : rc;
}

int srv_attention(const cfg_settings *s, eng_attention *ret, char *err, size_t errlen)
{
    eng_attention a = eng_attention_default();
    if (eng_attn_mode_parse(s->attention, &a.mode) < 0) {
        snprintf(err, errlen, "unknown attention mode '%s'", s->attention);
        return -EINVAL;
    }
    a.n_sink = s->n_sink;
    a.n_local = s->n_local;
    if (srv_budget(s, &a, err, errlen) < 0)
        return -EINVAL;
    a.estimate = !strcmp(s->estimate, "on");
    *ret = a;
    return 0;
}

eng_sampling srv_sampling(const cfg_settings *s)
{
    eng_sampling p = eng_sampling_default();
    p.temperature = (float)s->temp;
    p.top_k = s->top_k;
    p.top_p = (float)s->top_p;
    p.min_p = (float)s->min_p;
    p.repeat_penalty = (float)s->repeat_penalty;
    p.presence_penalty = (float)s->presence_penalty;
    p.frequency_penalty = (float)s->frequency_penalty;
    p.repeat_last_n = s->repeat_last_n;
    p.seed = (uint64_t)s->seed;
    if (s->seed < 0 && getrandom(&p.seed, sizeof p.seed, 0) != sizeof p.seed)
        p.seed = (uint64_t)time(NULL) ^ (uint64_t)getpid() << 32;
    return p;
}

/* ---- engine ----------------------------------------------------------------------------------------------------- */

static void log_warning(void *ctx, int level, const char *text)
{
    (void)ctx;
    if (level <= LOG_WARNING)
        fprintf(stderr, "retrievald: %s\n", text);
}

int srv_trace_begin(const cfg_settings *s, eng_trace **ret)
{
    char err[400];
    eng_trace *t = NULL;
    if (s->trace && eng_trace_open(s->trace, &t, err, sizeof err) < 0)
        return srv_fail("%s", err);
    if (eng_trace_attach(t, "engine") < 0) {
        eng_trace_free(t);
        return srv_fail("out of memory");
    }
    *ret = t;
    return 0;
}

int srv_trace_end(const cfg_settings *s, eng_trace *t)
{
    char err[400];
    uint64_t n = 0, forgotten = 0;
    int status = 0;
    if (!t)
        return 0;
    eng_trace_leave();
    if (eng_trace_write(t, &n, &forgotten, err, sizeof err) < 0)
        status = srv_fail("%s", err);
    else
        fprintf(stderr, "[trace: %llu events are in %s; %llu before them are forgotten]\n", (unsigned long long)n, s->trace,
                (unsigned long long)forgotten);
    eng_trace_free(t);
    return status;
}

int srv_open(const cfg_settings *s, eng_params *params, eng_engine **ret)
{
    char err[512] = "unknown reason";
    if (!params->log)
        params->log = log_warning;
    if (eng_open(s->model, params, ret, err, sizeof err) < 0)
        return srv_fail("%s: %s", s->model, err);
    if (srv_use_cost(s, *ret, err, sizeof err) < 0)
        log_warning(NULL, LOG_WARNING, err);
    return 0;
}

int srv_open_for(const cfg_settings *s, size_t n_ctx, bool f32_activations, eng_engine **ret)
{
    char err[256];
    eng_params p;
    if (srv_engine_params(s, &p, err, sizeof err) < 0)
        return srv_fail("%s", err);
    if (s->ctx_size && s->ctx_size < n_ctx)
        return srv_fail("--ctx-size %u is too small: %zu tokens are needed", s->ctx_size, n_ctx);
    if (n_ctx > UINT32_MAX)
        return srv_fail("%zu tokens are too many", n_ctx);
    if (!s->ctx_size)
        p.n_ctx = (uint32_t)n_ctx;
    p.f32_activations = f32_activations;
    return srv_open(s, &p, ret);
}

/* NULL when out of memory; an id below 0 gives an empty text. */
static char *token_string(const eng_engine *e, int32_t id)
{
    const char *text = "";
    size_t n = 0;
    if (id >= 0 && eng_token_text(e, id, true, &text, &n) < 0)
        n = 0;
    return strndup(text, n);
}

static int read_template(const char *path, char **ret, char *err, size_t errlen)
{
    int rc = 0;
    char *text = NULL;
    size_t n = 0;
    FILE *f = fopen(path, "rbe");
    if (f)
        text = malloc(MAX_TEMPLATE_BYTES + 1);
    if (text)
        n = fread(text, 1, MAX_TEMPLATE_BYTES + 1, f);
    if (!text || ferror(f)) {
        rc = -errno;
        snprintf(err, errlen, "--chat-template-file %s: %s", path, strerror(errno));
    } else if (n > MAX_TEMPLATE_BYTES || !n || memchr(text, 0, n)) {
        rc = -EINVAL;
        snprintf(err, errlen, "--chat-template-file %s: %s", path,
                 n > MAX_TEMPLATE_BYTES ? "larger than 1 MiB"
                 : n                    ? "holds a NUL byte"
                                        : "empty");
    } else {
        text[n] = 0;
        *ret = text;
        text = NULL;
    }
    free(text);
    if (f)
        fclose(f);
    return rc;
}

int srv_template_given(const cfg_settings *s, char **ret, char *err, size_t errlen)
{
    *ret = NULL;
    if (s->chat_template && s->chat_template_file) {
        snprintf(err, errlen, "--chat-template and --chat-template-file are both given; give one");
        return -EINVAL;
    }
    if (s->chat_template_file)
        return read_template(s->chat_template_file, ret, err, errlen);
    if (s->chat_template && !(*ret = strdup(s->chat_template))) {
        snprintf(err, errlen, "out of memory");
        return -ENOMEM;
    }
    return 0;
}

int srv_template_of(srv_template *t, const eng_engine *e, const char *given, char *err, size_t errlen)
{
    const eng_info *info = eng_info_get(e);
    const char *source = given ? given : info->chat_template;
    size_t source_len = given ? strlen(given) : info->chat_template_len;
    char **controls = NULL, *bos = token_string(e, info->bos), *eos = token_string(e, info->eos);
    size_t n = 0, n_controls = 0;
    int rc = -ENOMEM;
    if (!source || !source_len) {
        snprintf(err, errlen, "the model has no chat template");
        rc = -ENOENT;
        goto cleanup;
    }
    for (uint32_t id = 0; id < info->n_vocab; id++)
        n_controls += eng_token_is_control(e, (int32_t)id);
    controls = calloc(n_controls ? n_controls : 1, sizeof *controls);
    if (!controls || !bos || !eos)
        goto no_memory;
    for (uint32_t id = 0; id < info->n_vocab && n < n_controls; id++) {
        if (!eng_token_is_control(e, (int32_t)id))
            continue;
        char *text = token_string(e, (int32_t)id);
        if (!text)
            goto no_memory;
        if (*text)
            controls[n++] = text;
        else
            free(text);
    }
    rc = srv_template_set(t, source, source_len, bos, eos, (const char *const *)controls, n, err, errlen);
    goto cleanup;
no_memory:
    snprintf(err, errlen, "out of memory");
cleanup:
    for (size_t i = 0; i < n; i++)
        free(controls[i]);
    free(controls);
    free(bos);
    free(eos);
    return rc;
}

int srv_read_text(const char *path, char **ret, size_t *ret_n)
{
    size_t n = 0, cap = 0;
    char *text = NULL;
    int status = 0;
    FILE *f = fopen(path, "rbe");
    if (!f)
        return srv_fail("%s: %s", path, strerror(errno));
    do {
        if (cap - n < 4096) {
            cap = cap ? 2 * cap : 65536;
            char *larger = cap <= MAX_TEXT_BYTES ? realloc(text, cap) : NULL;
            if (!larger) {
                status = srv_fail("%s: %s", path, cap > MAX_TEXT_BYTES ? "too large" : "out of memory");
                goto cleanup;
            }
            text = larger;
        }
        n += fread(text + n, 1, cap - n - 1, f);
    } while (!feof(f) && !ferror(f));
    if (ferror(f)) {
        status = srv_fail("%s: %s", path, strerror(errno));
        goto cleanup;
    }
    text[n] = 0;
    *ret = text;
    *ret_n = n;
    text = NULL;
cleanup:
    free(text);
    fclose(f);
    return status;
}

static int random_tokens(const eng_engine *e, size_t n, int32_t *ids)
{
    uint64_t x = 88172645463325252U; /* xorshift64 */
    uint32_t n_vocab = eng_info_get(e)->n_vocab, tries = 0;
    for (size_t i = 0; i < n;) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        ids[i] = (int32_t)((x >> 32) % n_vocab);
        if (!eng_token_is_control(e, ids[i]))
            i++, tries = 0;
        else if (++tries > 100000)
            return srv_fail("the vocabulary has no ordinary tokens");
    }
    return 0;
}

int srv_test_tokens(const eng_engine *e, const char *path, size_t n, int32_t **ret)
{
    char *text = NULL;
    int32_t *ids = NULL;
    size_t len = 0, have = 0;
    int status = 0;
    if (!path) {
        ids = malloc((n ? n : 1) * sizeof *ids);
        status = ids ? random_tokens(e, n, ids) : srv_fail("out of memory");
    } else {
        status = srv_read_text(path, &text, &len);
        if (!status && eng_tokenize(e, text, len, ENG_TOK_ADD_SPECIAL, NULL, &ids, &have) < 0)
            status = srv_fail("%s: cannot be tokenized", path);
        if (!status && have < n)
            status = srv_fail("%s: has %zu tokens; %zu are needed", path, have, n);
    }
    free(text);
    if (status)
        free(ids);
    else
        *ret = ids;
    return status;
}

uint32_t *srv_numbers(const char *list, size_t *ret_n)
{
    size_t n = 1;
    for (const char *p = list; *p; p++)
        n += *p == ',';
    uint32_t *all = malloc(n * sizeof *all);
    if (!all)
        return NULL;
    for (size_t i = 0; i < n; i++) {
        char *end;
        all[i] = (uint32_t)strtoul(list, &end, 10);
        list = end + (*end == ',');
    }
    *ret_n = n;
    return all;
}

int srv_policies(const cfg_settings *s, srv_policy **ret, size_t *ret_n)
{
    cfg_settings one = *s;
    srv_policy *all = NULL;
    size_t n = 0;
    char mode[32], budget[32], err[256];
    bool more_modes = true, more_budgets;
    for (size_t i = 0; more_modes; i++) {
        list_word(s->attention, i, mode, &more_modes);
        more_budgets = true;
        for (size_t j = 0; more_budgets; j++) {
            list_word(s->attn_budget, j, budget, &more_budgets);
            srv_policy p = {0}, *larger = realloc(all, (n + 1) * sizeof *all);
            one.attention = mode;
            one.attn_budget = budget;
            if (!larger || srv_attention(&one, &p.attention, err, sizeof err) < 0) {
                free(larger ? larger : all);
                return srv_fail("%s", larger ? err : "out of memory");
            }
            all = larger;
            bool retrieves = p.attention.mode != ENG_ATTN_FULL && p.attention.mode != ENG_ATTN_STREAMING;
            more_budgets = more_budgets && retrieves;
            bool own = s->attn_top_k || s->attn_beta > 0 || s->attn_k_max;
            snprintf(p.budget, sizeof p.budget, "%s", !retrieves ? "-" : own ? "custom" : budget);
            all[n++] = p;
        }
    }
    *ret = all;
    *ret_n = n;
    return 0;
}

int srv_open_session(eng_engine *e, const int32_t *ids, size_t n_ids, uint32_t max_tokens, const eng_attention *a, bool cache, eng_session **ret)
{
    char err[512] = "";
    eng_request r = {
        .ids = ids, .n_ids = n_ids, .max_tokens = max_tokens, .attention = *a, .sampling = eng_sampling_default(), .cache_prompt = cache};
    r.sampling.temperature = 0;
    int rc = eng_session_open(e, &r, ret, err, sizeof err);
    return rc < 0 ? srv_fail("%s", *err ? err : strerror(-rc)) : 0;
}

int srv_prefill(eng_session *session, const char *what)
{
    srv_progress p = srv_progress_begin(what);
    int rc = eng_session_prefill(session, srv_progress_step, &p);
    srv_progress_end(&p);
    return rc < 0 ? srv_fail("%s: %s", what, strerror(-rc)) : 0;
}

int srv_keep_prompt(eng_engine *e, const int32_t *ids, size_t n_ids, const srv_policy *policies, size_t n)
{
    const eng_attention *a = &policies[0].attention;
    for (size_t i = 0; i < n && a->mode != ENG_ATTN_AUTO; i++)
        if (policies[i].attention.mode == ENG_ATTN_AUTO)
            a = &policies[i].attention;
    eng_session *session = NULL;
    int status = srv_open_session(e, ids, n_ids, 1, a, true, &session);
    if (status)
        return status;
    status = srv_prefill(session, "prefill");
    eng_session_close(session);
    return status;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void srv_sort(double *x, size_t n)
{
    qsort(x, n, sizeof *x, by_value);
}

double srv_median(const double *sorted, size_t n)
{
    return (sorted[(n - 1) / 2] + sorted[n / 2]) / 2;
}

/* ---- progress --------------------------------------------------------------------------------------------------- */

srv_progress srv_progress_begin(const char *what)
{
    double now = srv_seconds();
    return (srv_progress){.what = what, .started = now, .last_shown = now, .terminal = isatty(STDERR_FILENO)};
}

static void draw_bar(srv_progress *p, uint32_t done, uint32_t all, double rate)
{
    char bar[BAR_WIDTH + 1];
    size_t filled = all ? (size_t)((uint64_t)BAR_WIDTH * done / all) : BAR_WIDTH;
    memset(bar, '.', BAR_WIDTH);
    memset(bar, '#', filled);
    bar[BAR_WIDTH] = 0;
    fprintf(stderr, "\r%s [%s] %u of %u, %.0f/s, %.0f s left\033[K", p->what, bar, done, all, rate, rate > 0 ? (all - done) / rate : 0);
    p->shown = true;
}

void srv_progress_step(void *progress, uint32_t n_done, uint32_t n_cached, uint32_t n_prompt)
{
    srv_progress *p = progress;
    double now = srv_seconds();
    if (!p->any) { /* without a call at the start, the cached part tells where the work began */
        p->any = true;
        p->first = n_cached;
        p->last_tenth = n_prompt ? (uint32_t)(10ULL * n_cached / n_prompt) : 0;
    }
    double elapsed = now - p->started, rate = elapsed > 0 && n_done > p->first ? (n_done - p->first) / elapsed : 0;
    uint32_t tenth = n_prompt ? (uint32_t)(10ULL * n_done / n_prompt) : 10;
    if (elapsed < 0.5 || n_done > n_prompt)
        return;
    if (p->terminal && now - p->last_shown > 0.1) {
        draw_bar(p, n_done, n_prompt, rate);
        p->last_shown = now;
    } else if (!p->terminal && tenth > p->last_tenth) {
        fprintf(stderr, "%s: %u of %u, %.0f/s\n", p->what, n_done, n_prompt, rate);
        p->last_tenth = tenth;
    }
}

void srv_progress_end(srv_progress *p)
{
    if (p->shown)
        fputs("\r\033[K", stderr);
    p->shown = false;
}

void srv_finish_indexes(eng_engine *e)
{
    srv_progress p = srv_progress_begin("building indexes");
    eng_stats st;
    eng_stats_get(e, &st);
    uint32_t all = st.index_pending;
    while (eng_idle(e, 200, NULL) > 0) {
        eng_stats_get(e, &st);
        if (st.index_pending > all)
            all = st.index_pending;
        srv_progress_step(&p, all - st.index_pending, 0, all);
    }
    srv_progress_end(&p);
}

int srv_print_json(srv_buf *line)
{
    bool failed = line->failed;
    if (!failed)
        fwrite(line->p, 1, line->n, stdout);
    srv_buf_done(line);
    return failed ? srv_fail("out of memory") : 0;
}

int srv_finish_output(void)
{
    if (fflush(stdout) == EOF || ferror(stdout))
        return srv_fail("cannot write the results: %s", strerror(errno));
    return EXIT_SUCCESS;
}
