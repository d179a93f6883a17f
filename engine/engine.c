#include "engine_private.h"

#include "clock.h"
#include "cost.h"
#include "key_mean.h"
#include "memory.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <syslog.h>

static const char *const mode_names[] = {"full", "streaming", "flat", "cluster", "ivf", "graph", "auto"};

eng_attention eng_attention_default(void)
{
    return (eng_attention){.mode = ENG_ATTN_AUTO, .n_sink = 128, .n_local = 512, .top_k = 0, .beta = 8, .k_max = 1024, .estimate = true};
}

const char *eng_attn_mode_name(eng_attn_mode m)
{
    return mode_names[m];
}

int eng_attn_mode_parse(const char *s, eng_attn_mode *ret)
{
    for (size_t i = 0; i < sizeof mode_names / sizeof *mode_names; i++)
        if (!strcmp(s, mode_names[i])) {
            *ret = (eng_attn_mode)i;
            return 0;
        }
    return -EINVAL;
}

int eng_attn_budget_parse(const char *s, eng_attention *a)
{
    static const struct {
        const char *name;
        float beta;
        uint32_t k_max;
    } budgets[] = {{"fast", 7, 512}, {"default", 8, 1024}, {"precise", 9, 2048}};
    for (size_t i = 0; i < sizeof budgets / sizeof *budgets; i++)
        if (!strcmp(s, budgets[i].name)) {
            a->top_k = 0;
            a->beta = budgets[i].beta;
            a->k_max = budgets[i].k_max;
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
    return (eng_params){.n_chunk = 512, .type_k = ENG_KV_F16, .type_v = ENG_KV_F16, .cache_ram = (size_t)8 << 30, .index_share = 0.2f,
                        .rope = {.yarn_ext_factor = -1, .yarn_attn_factor = -1, .yarn_beta_slow = -1, .yarn_beta_fast = -1}};
}

void eng_log(const eng_engine *e, int level, const char *format, ...)
{
    if (!e->params.log)
        return;
    char text[512];
    va_list ap;
    va_start(ap, format);
    vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    e->params.log(e->params.log_ctx, level, text);
}

/* ---- open -------------------------------------------------------------------------------------------------------- */

/* A window as long as the context hides nothing: such a layer is an ordinary one, which retrieves. */
static int fill_shape(eng_engine *e)
{
    const eng_model *m = e->model;
    e->window = calloc(m->n_layer, sizeof *e->window);
    if (!e->window)
        return -ENOMEM;
    for (uint32_t i = 0; i < m->n_layer; i++)
        e->window[i] = m->layers[i].window < e->params.n_ctx ? m->layers[i].window : 0;
    e->shape = eng_kv_shape_of(m, e->params.type_k, e->params.type_v);
    e->shape.window = e->window;
    return 0;
}

static int copy_template(eng_engine *e)
{
    eng_str s;
    if (eng_gguf_str(e->model->file, "tokenizer.chat_template", &s) < 0)
        return 0;
    e->chat_template = malloc(s.n + 1);
    if (!e->chat_template)
        return -ENOMEM;
    memcpy(e->chat_template, s.s, s.n);
    e->chat_template[s.n] = 0;
    e->info.chat_template = e->chat_template;
    e->info.chat_template_len = s.n;
    return 0;
}

static void fill_info(eng_engine *e)
{
    const eng_model *m = e->model;
    eng_info *i = &e->info;
    i->architecture = m->architecture;
    i->name = m->name;
    i->type = m->type;
    i->n_params = m->n_params;
    i->model_bytes = m->bytes;
    i->n_vocab = m->n_vocab;
    i->n_embd = m->n_embd;
    i->n_layer = m->n_layer;
    i->n_head = m->n_head;
    i->n_head_kv = m->n_head_kv;
    i->head_dim = m->head_dim;
    i->n_ff = m->n_ff;
    i->n_ctx_train = m->n_ctx_train;
    i->n_ctx = e->params.n_ctx;
    i->n_threads = eng_pool_threads(e->pool);
    i->cpu = e->kernels->name;
    i->bos = eng_tokenizer_bos(e->tokenizer);
    i->eos = eng_tokenizer_eos(e->tokenizer);
    i->add_bos = eng_tokenizer_add_bos(e->tokenizer);
    i->fingerprint = eng_rope_hash(&e->rope, eng_gguf_fingerprint(m->file));
    i->rope_scaling = e->rope.scaling;
    i->rope_freq_base = e->rope.base;
    i->rope_factor = e->rope.factor;
    i->n_ctx_scaled = e->rope.n_ctx_trained;
    i->sliding_window = m->window;
    for (uint32_t k = 0; k < m->n_layer; k++)
        i->n_sliding_layers += m->layers[k].window > 0;
    i->n_expert = m->n_expert;
    i->n_expert_used = m->n_expert_used;
    i->kv_bytes_per_token = eng_kv_bytes_per_token(&e->shape);
    i->scratch_bytes = eng_forward_bytes(e->forward);
    i->step_bytes = eng_model_step_bytes(m);
}

/* Of the modes that every session's keys are made ready for, in a context of any length, the most. auto is one of them where no estimate is wanted. */
static unsigned most_wanted(const eng_engine *e)
{
    unsigned wants = 0;
    for (uint32_t mode = 0; e->params.index_modes >> mode; mode++) {
        eng_attention a = eng_attention_default();
        a.mode = (eng_attn_mode)mode;
        a.estimate = mode != ENG_ATTN_AUTO;
        if (e->params.index_modes >> mode & 1)
            wants |= eng_attn_wants(eng_forward_attention(e->forward), &a, e->params.n_ctx);
    }
    return wants;
}

/* A context that cannot fit is refused now, not killed later. */
static int check_memory(const eng_engine *e, char *err, size_t errlen)
{
    const double mib = 1048576;
    eng_memory m = {
        .weights = e->info.model_bytes,
        .scratch = e->info.scratch_bytes,
        .kv_per_token = e->info.kv_bytes_per_token,
    };
    eng_memory_of_index(&m, &e->shape, e->wants, e->info.n_threads);
    uint64_t limit = eng_memory_limit("");
    int r = eng_memory_check(&m, e->params.n_ctx, limit, err, errlen);
    if (r < 0)
        return r;
    eng_log(e, LOG_INFO,
            "memory: %.1f MiB of weights (mapped), %.1f MiB of scratch, %.1f MiB of keys and values for %u tokens, up to %.1f MiB of their index "
            "(codes%s%s%s) and %.1f MiB more until it is built; kept contexts up to %.0f MiB in all; there are %.0f MiB",
            (double)m.weights / mib, (double)m.scratch / mib, (double)m.kv_per_token * e->params.n_ctx / mib, e->params.n_ctx,
            (double)m.index_per_token * e->params.n_ctx / mib, e->wants & ENG_WANT_CLUSTER ? ", clusters" : "", e->wants & ENG_WANT_IVF ? ", ivf" : "",
            e->wants & ENG_WANT_GRAPH ? ", graphs" : "", ((double)m.build + (double)m.build_per_token * e->params.n_ctx) / mib, (double)e->params.cache_ram / mib,
            (double)limit / mib);
    uint64_t fixed = m.weights + m.scratch + m.build;
    if (fixed > limit || e->params.cache_ram > limit - fixed)
        eng_log(e, LOG_WARNING, "kept contexts may grow to %.0f MiB (--cache-ram), which with the model is more than the %.0f MiB there are",
                (double)e->params.cache_ram / mib, (double)limit / mib);
    return 0;
}

static void index_part(void *ctx, eng_segment *s)
{
    const eng_engine *e = ctx;
    eng_index_work_add(e->index_work, s); /* if that fails: its keys are read all the same */
}

static int open_parts(eng_engine *e, const char *path, char *err, size_t errlen)
{
    int r = eng_kernels_get(e->params.cpu, &e->kernels, err, errlen);
    if (r < 0)
        return r;
    idx_cpu_set(e->params.cpu == ENG_CPU_AUTO ? IDX_CPU_AMX : (idx_cpu)(e->params.cpu - ENG_CPU_SCALAR));
    if ((r = eng_model_open(path, &e->model, err, errlen)) < 0)
        return r;
    if ((r = eng_tokenizer_new(e->model->file, e->model->n_vocab, &e->tokenizer, err, errlen)) < 0)
        return r;
    if (!e->params.n_ctx)
        e->params.n_ctx = e->model->n_ctx_train;
    if ((r = eng_rope_init(&e->rope, e->model, &e->params.rope, e->params.n_ctx, err, errlen)) < 0)
        return r;
    if (e->params.n_ctx > e->rope.n_ctx_trained)
        eng_log(e, LOG_WARNING, "a context of %u tokens is longer than the %u the model was trained for", e->params.n_ctx, e->rope.n_ctx_trained);
    eng_gguf_prefetch(e->model->file);
    eng_forward_params fp = {
        .model = e->model,
        .kernels = e->kernels,
        .shape = &e->shape,
        .rope = &e->rope,
        .n_chunk = e->params.n_chunk,
        .f32_activations = e->params.f32_activations,
        .heartbeat = &e->counters.heartbeat,
    };
    snprintf(err, errlen, "out of memory");
    if ((r = fill_shape(e)) < 0)
        return r;
    if ((r = eng_pool_new(e->params.n_threads ? e->params.n_threads : eng_pool_cores(), &e->pool)) < 0)
        return r;
    fp.pool = e->pool;
    if ((r = eng_forward_new(&fp, &e->forward)) < 0 || (r = eng_cache_new(e->params.cache_ram, &e->cache)) < 0 ||
        (r = eng_index_work_new(e->pool, &e->index_work)) < 0 || (r = copy_template(e)) < 0)
        return r;
    eng_cache_keep_parts(e->cache, index_part, e); /* until there is a disk tier */
    fill_info(e);
    e->wants = most_wanted(e);
    if ((r = eng_named_open(e)) < 0)
        return r;
    if ((r = check_memory(e, err, errlen)) < 0)
        return r;
    if (e->params.type_k == ENG_KV_Q8_0) {
        snprintf(err, errlen, "the mean key cannot be measured");
        if ((r = eng_key_mean(e->forward, &fp, e->tokenizer, &e->shape, e->params.n_ctx, &e->key_shift)) < 0)
            return r;
        eng_forward_shift_keys(e->forward, e->key_shift);
    }
    if (eng_memory_huge_pages(""))
        e->n_pieces = (uint32_t)eng_gguf_n_pieces(e->model->file);
    return 0;
}

/* While the GPU is at a prompt, its index is built as far as its keys are there. A little at a time: the next block of keys is staged by the same threads. */
static bool gpu_spare(void *ctx, uint32_t layers, uint32_t end)
{
    enum { SLICE_NS = 100000 };
    eng_engine *e = ctx;
    eng_index_work_rows(e->index_work, layers, end);
    return eng_index_work_run(e->index_work, eng_now_ns() + SLICE_NS, NULL);
}

static void gpu_lost(void *ctx)
{
    eng_engine *e = ctx;
    eng_index_work_drop(e->index_work); /* the CPU gives keys and values other bits */
    eng_log(e, LOG_ERR, "%s: from now on the CPU computes all layers", gpu_reason(e->gpu));
    eng_gpu_free(e->gpu_layers);
    e->gpu_layers = NULL;
}

/* Puts the last layers on a GPU, if there is one and it can compute them. Fails only where more layers are asked for than it has room for. */
static int open_gpu(eng_engine *e, char *err, size_t errlen)
{
    const double mib = 1048576;
    int32_t wanted = e->params.n_gpu_layers;
    int level = wanted < 0 ? LOG_INFO : LOG_WARNING;
    eng_gpu_params p = {e->model, e->kernels, e->pool, &e->shape, e->params.n_chunk};
    eng_gpu_plan plan;
    char reason[256] = "";
    if (!wanted)
        return 0;
    int r = e->params.f32_activations ? -ENOTSUP : gpu_open(0, &e->gpu, reason, sizeof reason);
    if (r == 0)
        r = gpu_info_get(e->gpu, &e->gpu_info);
    if (r == 0)
        r = eng_gpu_plan_make(&p, &e->gpu_info, wanted, &plan, reason, sizeof reason);
    if (r == -ENOMEM && wanted > 0) {
        snprintf(err, errlen, "%s", reason);
        return r;
    }
    if (r == 0 && plan.n_layer)
        r = eng_gpu_new(e->gpu, &p, &plan, &e->gpu_layers);
    if (r == 0 && plan.n_layer && e->key_shift)
        r = eng_gpu_shift_keys(e->gpu_layers, e->key_shift);
    if (r < 0 || !plan.n_layer) {
        if (e->gpu && gpu_status(e->gpu) < 0)
            snprintf(reason, sizeof reason, "%s", gpu_reason(e->gpu));
        eng_log(e, level, "serving from the CPU: %s", *reason ? reason : r == -ENOTSUP ? "float32 activations were asked for" : "the GPU has no memory left");
        eng_gpu_free(e->gpu_layers);
        e->gpu_layers = NULL;
        return 0;
    }
    eng_log(e, LOG_INFO, "%s: %u of %u layers%s: %.1f MiB of weights, %.1f MiB of window, %.1f MiB of scratch; %.0f MiB were free", e->gpu_info.name, plan.n_layer,
            e->model->n_layer, plan.output ? " and the output" : "", (double)plan.weights / mib, (double)plan.window / mib, (double)plan.scratch / mib,
            (double)e->gpu_info.free / mib);
    eng_forward_use_gpu(e->forward, e->gpu_layers, &plan, gpu_lost, gpu_spare, e);
    e->info.gpu = e->gpu_info.name;
    e->info.n_gpu_layers = plan.n_layer;
    if (plan.output)
        e->n_pieces = 0; /* no weight is the CPU's to read */
    return 0;
}

int eng_open(const char *model_path, const eng_params *params, eng_engine **ret, char *err, size_t errlen)
{
    eng_engine *e = calloc(1, sizeof *e);
    if (!e) {
        snprintf(err, errlen, "out of memory");
        return -ENOMEM;
    }
    e->params = *params;
    if (!e->params.n_chunk)
        e->params.n_chunk = 512;
    int r = open_parts(e, model_path, err, errlen);
    if (r == 0)
        r = open_gpu(e, err, errlen);
    if (r < 0) {
        eng_close(e);
        return r;
    }
    eng_publish(e);
    *ret = e;
    return 0;
}

void eng_close(eng_engine *e)
{
    if (!e)
        return;
    eng_disk_close(e);
    eng_named_close(e);
    eng_index_work_free(e->index_work);
    eng_cache_free(e->cache);
    eng_forward_free(e->forward);
    eng_gpu_free(e->gpu_layers);
    eng_pool_free(e->pool);
    eng_tokenizer_free(e->tokenizer);
    eng_rope_done(&e->rope);
    free(e->window);
    free(e->key_shift);
    eng_model_close(e->model);
    gpu_close(e->gpu);
    free(e->chat_template);
    free(e);
}

void eng_cost_use(eng_engine *e, const eng_cost *c)
{
    eng_attn_use_cost(eng_forward_attention(e->forward), c);
}

const eng_info *eng_info_get(const eng_engine *e)
{
    return &e->info;
}

/* ---- numbers ----------------------------------------------------------------------------------------------------- */

void eng_publish(eng_engine *e)
{
    eng_cache_info info = eng_cache_info_get(e->cache);
    eng_counters *c = &e->counters;
    atomic_store(&c->cache_bytes, info.bytes);
    atomic_store(&c->index_bytes, info.index_bytes);
    atomic_store(&c->segments, info.segments);
    atomic_store(&c->evictions, info.evictions);
    atomic_store(&c->refusals, info.refusals);
    atomic_store(&c->index_pending, eng_index_work_pending(e->index_work));
    atomic_store(&c->index_ns, (unsigned long long)(eng_index_work_seconds(e->index_work) * 1e9));
}

void eng_stats_get(const eng_engine *e, eng_stats *ret)
{
    const eng_counters *c = &e->counters;
    *ret = (eng_stats){
        .cache_bytes = atomic_load(&c->cache_bytes),
        .cache_limit = e->params.cache_ram,
        .index_bytes = atomic_load(&c->index_bytes),
        .segments = (uint32_t)atomic_load(&c->segments),
        .index_pending = (uint32_t)atomic_load(&c->index_pending),
        .hits = atomic_load(&c->hits),
        .misses = atomic_load(&c->misses),
        .evictions = atomic_load(&c->evictions),
        .refusals = atomic_load(&c->refusals),
        .merges = atomic_load(&c->merges),
        .prompt_tokens = atomic_load(&c->prompt_tokens),
        .cached_tokens = atomic_load(&c->cached_tokens),
        .predicted_tokens = atomic_load(&c->predicted_tokens),
        .prompt_seconds = (double)atomic_load(&c->prompt_ns) * 1e-9,
        .predicted_seconds = (double)atomic_load(&c->predicted_ns) * 1e-9,
        .index_seconds = (double)atomic_load(&c->index_ns) * 1e-9,
        .keys_held = atomic_load(&c->keys_held),
        .keys_attended = atomic_load(&c->keys_attended),
        .heartbeat = atomic_load(&c->heartbeat),
    };
}

void eng_prefix_stops(const eng_engine *e, uint64_t ret[ENG_MISS_COUNT])
{
    for (int i = 0; i < ENG_MISS_COUNT; i++)
        ret[i] = atomic_load(&e->counters.stops[i]);
}

static void settle_task(void *ctx, uint32_t task, uint32_t worker)
{
    (void)worker;
    const eng_engine *e = ctx;
    eng_gguf_settle(e->model->file, e->n_settled + task);
}

static void settle_weights(eng_engine *e, uint64_t deadline_ns, const atomic_bool *stop)
{
    uint32_t threads = eng_pool_threads(e->pool);
    while (e->n_settled < e->n_pieces && eng_now_ns() < deadline_ns && !(stop && atomic_load(stop))) {
        uint32_t left = e->n_pieces - e->n_settled, n = left < threads ? left : threads;
        eng_pool_run(e->pool, "settle weights", settle_task, e, n);
        e->n_settled += n;
    }
}

bool eng_background_pending(const eng_engine *e)
{
    return e->n_settled < e->n_pieces || eng_index_work_pending(e->index_work);
}

int eng_background(eng_engine *e, uint64_t deadline_ns, const atomic_bool *stop)
{
    settle_weights(e, deadline_ns, stop);
    uint32_t pending = eng_index_work_pending(e->index_work);
    eng_index_work_run(e->index_work, deadline_ns, stop);
    if (eng_index_work_pending(e->index_work) != pending)
        eng_cache_recount(e->cache);
    eng_publish(e);
    return eng_background_pending(e);
}

int eng_idle(eng_engine *e, uint32_t max_ms, const atomic_bool *stop)
{
    int r = 0;
    if (eng_background_pending(e))
        r = eng_background(e, eng_now_ns() + (uint64_t)max_ms * 1000000, stop);
    if (!r && eng_merge_turn(e, stop)) { /* before the small ones are written */
        eng_publish(e);
        r = 1;
    } else {
        eng_disk_turn(e);
    }
    eng_named_turn(e, stop);
    return r;
}

/* ---- text -------------------------------------------------------------------------------------------------------- */

int eng_tokenize(const eng_engine *e, const char *text, size_t len, unsigned flags, const char *guard, int32_t **ret_ids, size_t *ret_n)
{
    return eng_tokenizer_encode(e->tokenizer, text, len, flags, guard, ret_ids, ret_n);
}

int eng_token_text(const eng_engine *e, int32_t id, bool special, const char **ret_text, size_t *ret_len)
{
    return eng_tokenizer_text(e->tokenizer, id, special, ret_text, ret_len);
}

bool eng_token_is_eog(const eng_engine *e, int32_t id)
{
    return eng_tokenizer_is_eog(e->tokenizer, id);
}

bool eng_token_is_control(const eng_engine *e, int32_t id)
{
    return eng_tokenizer_is_control(e->tokenizer, id);
}
