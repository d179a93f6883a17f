/* The whole engine with layers on the emulated GPU: golden logits, the same tokens as the CPU's where contexts are long, and what happens when the GPU is too small, or fails.
 *
 * Work on the emulated GPU is done as late as events allow, or at once, or at random times (emu.h): a wait that is missing anywhere gives other logits in one of them.
 */
#include "emu.h"
#include "sessions.h"
#include "trace.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { ALL = INT32_MAX };

/* Emulation takes minutes under the sanitizers: what only repeats the same code with other numbers is left to the other build, and main says so. */
#ifdef __SANITIZE_ADDRESS__
enum { QUICK = 1 };
#else
enum { QUICK = 0 };
#endif

static char logged[4096];

static void keep_log(void *ctx, int level, const char *text)
{
    (void)ctx;
    (void)level;
    snprintf(logged + strlen(logged), sizeof logged - strlen(logged), "%s\n", text);
}

static eng_params params(int32_t layers)
{
    eng_params p = eng_params_default();
    p.n_threads = 1;
    p.n_gpu_layers = layers;
    p.n_chunk = 96;
    p.log = keep_log;
    *logged = 0;
    return p;
}

/* guard: as emu.h; the price is too high for all of it. */
static void device(emu_order order, bool guard)
{
    emu_options o = emu_defaults();
    o.order = order;
    o.guard = guard;
    emu_reset(&o);
}

static double max_diff(const float *a, const float *b, size_t n)
{
    double d = 0;
    for (size_t i = 0; i < n; i++)
        d = fmax(d, isfinite(a[i]) ? fabs((double)a[i] - b[i]) : INFINITY);
    return d;
}

/* Every architecture, with all layers there and with the last one: the oracle's logits at every position, with the tolerance that the CPU has with 8-bit
 * activations (test_archs.c), and the CPU's own much nearer; whatever the chunk, to the bit; in every order. */
static const char *const archs[] = {"tiny-llama3", "tiny-yarn", "tiny-smollm3", "tiny-qwen3", "tiny-phi3", "tiny-gemma3-linear"};
enum { N_ARCHS = sizeof archs / sizeof *archs };

typedef struct {
    size_t n, n_vocab;
    int32_t *ids;
    t_npy want;
    float *prefill, *decode; /* the CPU's */
} tiny;

static void decode_logits(eng_engine *e, const tiny *t, eng_attn_mode mode, float *out)
{
    eng_attention a = eng_attention_default();
    a.mode = mode;
    memcpy(out, t->want.data, t->want.bytes); /* the first rows are not computed */
    t_decode_logits(e, t->ids, t->n, 3, &a, out);
}

static tiny load_tiny(const char *model)
{
    char path[128];
    tiny t = {0};
    snprintf(path, sizeof path, "golden/archs/%s.json", model);
    char *text = t_read(t_path(path), NULL);
    cJSON *j = cJSON_Parse(text), *a = cJSON_GetObjectItem(j, "ids");
    t.n = (size_t)cJSON_GetArraySize(a);
    t.ids = malloc(t.n * sizeof *t.ids);
    for (size_t i = 0; i < t.n; i++)
        t.ids[i] = cJSON_GetArrayItem(a, (int)i)->valueint;
    cJSON_Delete(j);
    free(text);
    snprintf(path, sizeof path, "golden/archs/%s%s.npy", model, strcmp(model, "tiny-phi3") ? "" : ".long");
    t.want = t_npy_load(t_path(path));
    t.n_vocab = t.want.dims[1];
    return t;
}

static eng_engine *open_arch(const char *model, int32_t layers)
{
    char path[128];
    eng_params p = params(layers);
    p.n_ctx = strcmp(model, "tiny-phi3") ? 0 : 512; /* as test_archs.c */
    snprintf(path, sizeof path, "golden/archs/%s.gguf", model);
    return t_open(t_path(path), &p);
}

START_TEST(architectures)
{
    if (QUICK && _i % 5)
        return;
    tiny t = load_tiny(archs[_i]);
    float *got = malloc(t.want.bytes), *whole = malloc(t.want.bytes), *cpu = malloc(t.want.bytes), *cpu_step = malloc(t.want.bytes);
    eng_engine *e = open_arch(archs[_i], 0);
    t_prefill_logits(e, t.ids, t.n, 0, cpu);
    decode_logits(e, &t, ENG_ATTN_FULL, cpu_step);
    eng_close(e);
    bool exact = max_diff(cpu, t.want.data, t.n * t.n_vocab) < 0.02; /* at levels without bf16 */
    static const int32_t layers[] = {ALL, 1};
    for (int l = 0; l < (QUICK ? 1 : 2); l++) {
        double far = 0, near = 0;
        for (int order = EMU_LATE; order <= (QUICK ? EMU_LATE : EMU_RANDOM); order++) {
            if ((l || _i) && order == EMU_EAGER) /* which differs by what is queued, and that is the same for all */
                continue;
            device((emu_order)order, order == EMU_LATE && _i == 0);
            e = open_arch(archs[_i], layers[l]);
            const eng_info *info = eng_info_get(e);
            ck_assert_ptr_nonnull(info->gpu);
            ck_assert_uint_eq(info->n_gpu_layers, l ? 1 : info->n_layer);
            static const uint32_t chunks[] = {0, 7, 1};
            for (int c = 0; c < (order == EMU_LATE && !l ? 3 : 2); c++) {
                t_prefill_logits(e, t.ids, t.n, chunks[c], got);
                far = fmax(far, max_diff(got, t.want.data, t.n * t.n_vocab));
                near = fmax(near, max_diff(got, cpu, t.n * t.n_vocab));
                if (order == EMU_LATE && c == 0)
                    memcpy(whole, got, t.want.bytes);
                else
                    ck_assert_msg(!memcmp(got, whole, t.want.bytes), "%s: other bits by chunks of %u, order %d", archs[_i], chunks[c], order);
            }
            static const eng_attn_mode modes[] = {ENG_ATTN_FULL, ENG_ATTN_FLAT};
            for (int m = 0; m < (order == EMU_LATE ? 2 : 1); m++) {
                decode_logits(e, &t, modes[m], got);
                far = fmax(far, max_diff(got, t.want.data, t.n * t.n_vocab));
                near = fmax(near, max_diff(got + 3 * t.n_vocab, cpu_step + 3 * t.n_vocab, (t.n - 3) * t.n_vocab));
            }
            ck_assert_str_eq(emu_fault(), "");
            eng_close(e);
            ck_assert_uint_eq(emu_counted().device_bytes + emu_counted().pinned_bytes, 0);
        }
        printf("%s, %s: from the oracle %.2g, from the CPU %.2g\n", archs[_i], l ? "its last layer" : "all layers", far, near);
        ck_assert_double_le(far, 0.5);
        ck_assert_double_le(near, exact ? fmax(0.25, 1.1 * far) : 0.25); /* an exact CPU is as far from the GPU as the oracle is */
    }
    free(cpu_step);
    free(cpu);
    free(whole);
    free(got);
    free(t.ids);
    t_npy_free(&t.want);
}
END_TEST

static eng_engine *open_long(int32_t layers, eng_kv_type type, bool exact)
{
    eng_params p = params(layers);
    p.n_ctx = CTX;
    p.cache_ram = (size_t)1 << 30;
    p.type_k = p.type_v = type;
    p.f32_activations = exact;
    return t_open(t_path("golden/gguf/tiny-llama-q8_0.gguf"), &p);
}

/* Logits at every so many of n_forced steps, and the last, behind a prompt; t: what the session read. */
static void forced(eng_engine *e, eng_request r, const int32_t *next, size_t n_forced, size_t every, float *out, eng_timings *t)
{
    char err[256];
    eng_session *s;
    r.max_tokens = (uint32_t)n_forced + 1;
    ck_assert_msg(eng_session_open(e, &r, &s, err, sizeof err) == 0, "%s", err);
    ck_assert_int_eq(eng_session_prefill(s, NULL, NULL), 0);
    while (eng_idle(e, 100, NULL))
        ;
    for (size_t i = 0; i < n_forced; i++) {
        const float *l;
        ck_assert_int_eq(eng_session_force(s, next[i]), 0);
        if (i % every && i + 1 < n_forced)
            continue;
        ck_assert_int_eq(eng_session_logits(s, &l), 0);
        memcpy(out, l, VOCAB * sizeof *l);
        out += VOCAB;
    }
    eng_session_timings(s, t);
    eng_session_close(s);
}

/* A cache of 8 bits: a chunk's own keys and values are what those before it are, so chunks give the same bits. */
START_TEST(chunks_of_q8_0)
{
    enum { N = 150 };
    t_rng r = t_seed(13);
    int32_t ids[N];
    float *whole = malloc(N * VOCAB * sizeof *whole), *got = malloc(N * VOCAB * sizeof *got);
    device(EMU_LATE, false);
    eng_engine *e = open_long(ALL, ENG_KV_Q8_0, false);
    random_ids(e, &r, ids, N);
    t_prefill_logits(e, ids, N, 0, whole);
    for (uint32_t chunk = 29; chunk <= 75; chunk += 46) {
        t_prefill_logits(e, ids, N, chunk, got);
        ck_assert_msg(!memcmp(got, whole, N * VOCAB * sizeof *got), "other bits by chunks of %u", chunk);
    }
    eng_close(e);
    free(whole);
    free(got);
}
END_TEST

/* A text from which is retrieved; a second question, on the kept part; a prompt that goes on with what was answered, which the GPU's steps have stored. The
 * keys read are as many as the CPU reads, what comes out is as near to float32 activations as the CPU's is, and it has the same bits in any order. */
START_TEST(long_contexts)
{
    enum { N = 1700, STEPS = 20, EVERY = 3, ROWS = (STEPS + EVERY - 1) / EVERY + 1, ASKED = 3 };
    static const struct {
        eng_attn_mode mode;
        bool estimate;
        eng_kv_type type;
        int32_t layers;
    } cases[] = {{ENG_ATTN_FLAT, true, ENG_KV_F16, ALL}, {ENG_ATTN_FULL, false, ENG_KV_BF16, 1}, {ENG_ATTN_FLAT, false, ENG_KV_Q8_0, ALL}, {ENG_ATTN_STREAMING, false, ENG_KV_F16, ALL}};
    if (QUICK && _i % 2)
        return;
    const int orders = QUICK || _i > 1 ? 1 : 2; /* of two cases, which between them do all there is to wait for */
    t_rng r = t_seed(5);
    int32_t ids[N + STEPS], next[STEPS];
    float exact[ROWS * VOCAB], want[ROWS * VOCAB], got[2][ROWS * VOCAB];
    eng_timings te, tw, tg;
    eng_engine *f32 = open_long(0, cases[_i].type, true), *cpu = open_long(0, cases[_i].type, false);
    random_ids(cpu, &r, ids, N);
    random_ids(cpu, &r, next, STEPS);
    memcpy(ids + N, next, sizeof next);
    eng_engine *gpu[2];
    for (int asked = 0; asked < orders * ASKED; asked++) {
        int order = asked / ASKED, question = asked % ASKED;
        if (!question) {
            if (order)
                eng_close(gpu[0]);
            device(order ? EMU_RANDOM : EMU_LATE, false);
            gpu[order] = open_long(cases[_i].layers, cases[_i].type, false);
        }
        ids[N - 1] = question ? 101 : 100;
        eng_request q = request(ids, question == 2 ? N + STEPS : N, cases[_i].mode);
        q.attention.estimate = cases[_i].estimate;
        q.attention.top_k = 60; /* scores of a random model are so flat that a budget by them takes nearly all */
        static float kept[ASKED][ROWS * VOCAB];
        forced(gpu[order], q, next, STEPS, EVERY, got[order], &tg);
        if (order) {
            ck_assert_msg(!memcmp(got[1], kept[question], sizeof got[1]), "%s: other bits in another order", eng_attn_mode_name(cases[_i].mode));
            continue;
        }
        memcpy(kept[question], got[0], sizeof got[0]);
        forced(f32, q, next, STEPS, EVERY, exact, &te);
        forced(cpu, q, next, STEPS, EVERY, want, &tw);
        ck_assert_uint_eq(tg.cache_n, tw.cache_n);
        ck_assert_uint_ge(tg.cache_n, question == 2 && cases[_i].mode != ENG_ATTN_FULL ? N + STEPS - 1 : question ? N - 1 : 0);
        ck_assert_double_eq_tol(tg.keys_attended, tw.keys_attended, 1e-9 + tw.keys_attended * 0.02); /* a budget by scores that differ in their last bits */
        ck_assert_double_eq_tol(tg.retrieved, tw.retrieved, 1e-9 + tw.retrieved * 0.02);
        ck_assert_double_eq_tol(tg.estimated, tw.estimated, 1e-9 + tw.estimated * 0.02);
        double of_cpu = max_diff(want, exact, (ROWS - 1) * VOCAB), of_gpu = max_diff(got[0], exact, (ROWS - 1) * VOCAB);
        printf("%s, %d: from float32 %.2g, the CPU %.2g; %.0f keys read, %.0f estimated\n", eng_attn_mode_name(cases[_i].mode), (int)cases[_i].type, of_gpu, of_cpu,
               tg.keys_attended, tg.estimated);
        ck_assert_double_le(of_gpu, 2 * of_cpu + 0.02);
    }
    ck_assert_str_eq(emu_fault(), "");
    ck_assert_uint_eq(emu_counted().syncs_device, 0);
    eng_close(f32);
    eng_close(cpu);
    eng_close(gpu[orders - 1]);
}
END_TEST

/* The window wraps, and `full` reads what has left it beside the GPU, which has one layer: with more, the same would come three times. */
START_TEST(window_wraps)
{
    enum { N = 2900, STEPS = 420, EVERY = 30 };
    if (QUICK)
        return;
    t_rng r = t_seed(9);
    int32_t ids[N], *next = malloc(STEPS * sizeof *next);
    float *want = malloc((STEPS / EVERY + 2) * VOCAB * sizeof *want), *got = malloc((STEPS / EVERY + 2) * VOCAB * sizeof *got);
    eng_timings tw, tg;
    device(EMU_LATE, false);
    eng_engine *cpu = open_long(0, ENG_KV_F16, false), *gpu = open_long(1, ENG_KV_F16, false);
    random_ids(cpu, &r, ids, N);
    random_ids(cpu, &r, next, STEPS);
    forced(cpu, request(ids, N, ENG_ATTN_FULL), next, STEPS, EVERY, want, &tw);
    forced(gpu, request(ids, N, ENG_ATTN_FULL), next, STEPS, EVERY, got, &tg);
    ck_assert_double_eq_tol(tg.keys_attended, tw.keys_attended, 1e-6);
    double d = max_diff(got, want, STEPS / EVERY * VOCAB);
    printf("%d tokens: logits differ by %.2g from the CPU's\n", N + STEPS, d);
    ck_assert_double_le(d, 0.4); /* some millionths where the CPU rounds to bf16 as the GPU does, .15 where it does not */
    ck_assert_uint_eq(eng_info_get(gpu)->n_gpu_layers, 1);
    eng_close(cpu);
    eng_close(gpu);
    free(next);
    free(want);
    free(got);
}
END_TEST

/* The device fails at some call, whichever: what was asked for comes from the CPU, and it is said once. */
START_TEST(device_lost)
{
    enum { N = 300, STEPS = 4 };
    t_rng r = t_seed(3);
    int32_t ids[N], next[STEPS];
    float exact[STEPS * VOCAB], want[STEPS * VOCAB], got[STEPS * VOCAB];
    eng_timings t;
    eng_engine *e = open_long(0, ENG_KV_F16, true);
    random_ids(e, &r, ids, N);
    random_ids(e, &r, next, STEPS);
    eng_request q = request(ids, N, ENG_ATTN_AUTO);
    forced(e, q, next, STEPS, 1, exact, &t);
    eng_close(e);
    e = open_long(0, ENG_KV_F16, false);
    forced(e, q, next, STEPS, 1, want, &t);
    eng_close(e);
    device(EMU_LATE, false);
    e = open_long(ALL, ENG_KV_F16, false);
    uint64_t open = emu_counted().calls;
    forced(e, q, next, STEPS, 1, got, &t);
    uint64_t calls = emu_counted().calls;
    eng_close(e);
    double most = 2 * max_diff(want, exact, STEPS * VOCAB) + 0.02; /* as above */
    ck_assert_double_le(max_diff(got, exact, STEPS * VOCAB), most);
    emu_options o = emu_defaults();
    o.guard = false;
    for (uint64_t at = 0; at < calls; at += at < open ? open / 7 + 1 : (calls - open) / 23 + 1) {
        o.lose_after = (long)at;
        emu_reset(&o);
        e = open_long(ALL, ENG_KV_F16, false);
        forced(e, q, next, STEPS, 1, got, &t);
        ck_assert_double_le(max_diff(got, exact, STEPS * VOCAB), most);
        const char *words = at < open ? "serving from the CPU" : "from now on the CPU", *said = strstr(logged, words);
        ck_assert_msg(said && !strstr(said + strlen(words), "the CPU"), "lost after %lu of %lu calls: %s", (unsigned long)at, (unsigned long)calls, logged);
        eng_close(e);
    }
}
END_TEST

/* No more layers than there is room for; asking for more is refused, with how many fit; no device, or none that is good enough, is said once. */
START_TEST(small_devices)
{
    char err[512] = "";
    eng_engine *e;
    emu_options o = emu_defaults();
    uint32_t last = 0;
    bool partly = false;
    for (size_t mib = 256; mib <= 300; mib++) {
        o.guard = false;
        o.memory = mib << 20;
        emu_reset(&o);
        e = open_arch("tiny-smollm3", -1);
        uint32_t n = eng_info_get(e)->n_gpu_layers, all = eng_info_get(e)->n_layer;
        ck_assert_uint_ge(n, last);
        partly |= n && n < all;
        ck_assert_msg(strstr(logged, n ? "MiB of window" : "serving from the CPU: the GPU has no memory left"), "%s", logged);
        eng_close(e);
        eng_params p = params((int32_t)n + 1);
        eng_engine *more;
        if (n < all) {
            int r = eng_open(t_path("golden/archs/tiny-smollm3.gguf"), &p, &more, err, sizeof err);
            ck_assert_int_eq(r, -ENOMEM);
            char fit[32];
            snprintf(fit, sizeof fit, "%u fit", n);
            ck_assert_msg(strstr(err, fit) && strstr(err, "MiB"), "%s", err);
        }
        last = n;
    }
    ck_assert_uint_gt(last, 0);
    ck_assert(partly);
    static const struct {
        int devices, driver, major;
        const char *reason;
    } bad[] = {{0, 13000, 8, "device 0"}, {1, 0, 8, "no NVIDIA driver"}, {1, 11020, 8, "11.2"}, {1, 13000, 6, "capability 6.0"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        o = emu_defaults();
        o.n_devices = bad[i].devices;
        o.driver = bad[i].driver;
        o.major = bad[i].major;
        emu_reset(&o);
        e = open_arch("tiny-smollm3", ALL);
        ck_assert_ptr_null(eng_info_get(e)->gpu);
        ck_assert_msg(strstr(logged, "serving from the CPU") && strstr(logged, bad[i].reason), "%s", logged);
        eng_close(e);
    }
    device(EMU_LATE, false);
    e = open_arch("tiny-qwen3moe", ALL);
    ck_assert_uint_eq(eng_info_get(e)->n_gpu_layers, 0);
    ck_assert(strstr(logged, "mixtures of experts"));
    eng_close(e);
}
END_TEST

typedef struct {
    eng_engine *e;
    eng_session *s;
    double index_ms; /* spent when the last chunk was there */
    uint32_t stop;   /* prompt tokens after which it is canceled; 0: no */
    atomic_bool cancel;
} watched;

static void watch_index(void *ctx, uint32_t n_done, uint32_t n_cached, uint32_t n_prompt)
{
    watched *w = ctx;
    eng_timings t;
    (void)n_cached;
    (void)n_prompt;
    eng_session_timings(w->s, &t);
    w->index_ms = t.index_ms;
    if (w->stop && n_done >= w->stop)
        atomic_store(&w->cancel, true);
}

/* Prefills, and forces steps; what prefill returned, and how many indexes were missing then. */
static int prefill_watched(watched *w, eng_request r, const int32_t *next, size_t n_forced, float *out, uint32_t *ret_pending)
{
    char err[256];
    eng_stats stats;
    atomic_store(&w->cancel, false);
    r.cancel = &w->cancel;
    ck_assert_msg(eng_session_open(w->e, &r, &w->s, err, sizeof err) == 0, "%s", err);
    int done = eng_session_prefill(w->s, watch_index, w);
    eng_stats_get(w->e, &stats);
    *ret_pending = stats.index_pending;
    while (eng_idle(w->e, 100, NULL))
        ;
    for (size_t i = 0; i < n_forced && done == 0; i++, out += VOCAB) {
        const float *l;
        ck_assert_int_eq(eng_session_force(w->s, next[i]), 0);
        ck_assert_int_eq(eng_session_logits(w->s, &l), 0);
        memcpy(out, l, VOCAB * sizeof *l);
    }
    eng_session_close(w->s);
    return done;
}

/* While the GPU is at a prompt the CPU builds its index: where the GPU is slow, all of it is there when the prompt is; where it is at once, none. Both search it alike, to the bit. The CPU by
 * itself builds nothing before the first token. A prompt that is canceled, or whose GPU fails, leaves no index of what it did not get to. */
START_TEST(index_while_prefilling)
{
    enum { N = 1100, STEPS = 2, LOCAL = 64 };
    t_rng r = t_seed(8);
    int32_t ids[N], next[STEPS];
    float want[STEPS * VOCAB], got[STEPS * VOCAB];
    uint32_t pending = 0;
    watched w = {0};
    eng_params p = params(0);
    p.n_ctx = CTX;
    p.cache_ram = (size_t)1 << 30;
    p.n_chunk = 400;
    p.n_threads = 3;
    w.e = t_open(t_path("golden/gguf/tiny-llama-q8_0.gguf"), &p);
    uint32_t all = eng_info_get(w.e)->n_layer * eng_info_get(w.e)->n_head_kv;
    random_ids(w.e, &r, ids, N);
    random_ids(w.e, &r, next, STEPS);
    eng_request q = request(ids, N, ENG_ATTN_FLAT);
    q.attention.n_local = LOCAL;
    q.attention.top_k = 60;
    ck_assert_int_eq(prefill_watched(&w, q, next, STEPS, got, &pending), 0);
    ck_assert_uint_eq(pending, all);
    ck_assert_double_eq(w.index_ms, 0);
    eng_close(w.e);
    p.n_gpu_layers = ALL;
    emu_options o = emu_defaults();
    o.guard = false;
    uint64_t calls = 0;
    for (int order = EMU_EAGER; order >= EMU_LATE; order--) {
        o.order = (emu_order)order;
        o.asks = 1 << 30; /* as long as there is something to do meanwhile */
        emu_reset(&o);
        w.e = t_open(t_path("golden/gguf/tiny-llama-q8_0.gguf"), &p);
        ck_assert_int_eq(prefill_watched(&w, q, next, STEPS, order == EMU_EAGER ? want : got, &pending), 0);
        ck_assert_uint_eq(pending, order == EMU_EAGER ? all : 0);
        ck_assert(order == EMU_EAGER ? w.index_ms == 0 : w.index_ms > 0);
        calls = emu_counted().calls;
        if (order == EMU_LATE) {
            w.stop = 800; /* the last chunk is never begun */
            ids[0] ^= 1;
            ck_assert_int_eq(prefill_watched(&w, q, next, STEPS, got, &pending), -ECANCELED);
            w.stop = 0;
            ids[0] ^= 1;
        }
        eng_close(w.e);
    }
    ck_assert(!memcmp(got, want, sizeof want));
    for (uint64_t at = calls / 3; at < (QUICK ? calls / 2 : calls); at += calls / 4) {
        o.lose_after = (long)at;
        emu_reset(&o);
        w.e = t_open(t_path("golden/gguf/tiny-llama-q8_0.gguf"), &p);
        ck_assert_int_eq(prefill_watched(&w, q, next, STEPS, got, &pending), 0);
        ck_assert_double_le(max_diff(got, want, STEPS * VOCAB), 1); /* each within .5 of float32 (test_archs.c) */
        eng_close(w.e);
    }
}
END_TEST

/* What the queues do is on tracks of their own, inside the chunk or step of the engine's thread that asked for it, and each queue does one thing at a time. */
START_TEST(traced)
{
    enum { N = 300, STEPS = 3, TRACKS = 3 };
    static const char *const tracks[TRACKS] = {"gpu compute", "gpu to device", "gpu to host"};
    char file[] = "/tmp/retrievald-trace-XXXXXX", err[256];
    int fd = mkstemp(file);
    ck_assert_int_ge(fd, 0);
    close(fd);
    t_rng r = t_seed(4);
    int32_t ids[N], next[STEPS];
    float got[STEPS * VOCAB];
    eng_timings t;
    eng_trace *trace;
    device(EMU_LATE, false);
    ck_assert_msg(eng_trace_open(file, &trace, err, sizeof err) == 0, "%s", err);
    ck_assert_int_eq(eng_trace_attach(trace, "engine"), 0);
    eng_engine *e = open_long(ALL, ENG_KV_F16, false);
    uint32_t n_layer = eng_info_get(e)->n_layer;
    random_ids(e, &r, ids, N);
    random_ids(e, &r, next, STEPS);
    forced(e, request(ids, N, ENG_ATTN_FULL), next, STEPS, 1, got, &t);
    eng_close(e);
    eng_trace_leave();
    ck_assert_int_eq(eng_trace_write(trace, NULL, NULL, err, sizeof err), 0);
    eng_trace_free(trace);
    char *text = t_read(file, NULL);
    unlink(file);
    cJSON *root = cJSON_Parse(text), *events = cJSON_IsArray(root) ? root : cJSON_GetObjectItem(root, "traceEvents"), *it, *other;
    ck_assert(cJSON_IsArray(events));
    int tid[TRACKS], steps = 0, windows = 0, counted[TRACKS] = {0};
    double last[TRACKS] = {0};
    for (int i = 0; i < TRACKS; i++) {
        tid[i] = -1;
        cJSON_ArrayForEach(it, events) {
            const char *name = cJSON_GetStringValue(cJSON_GetObjectItem(cJSON_GetObjectItem(it, "args"), "name"));
            if (name && !strcmp(name, tracks[i]))
                tid[i] = cJSON_GetObjectItem(it, "tid")->valueint;
        }
        ck_assert_int_ge(tid[i], 0);
    }
    cJSON_ArrayForEach(it, events) {
        if (strcmp(cJSON_GetObjectItem(it, "ph")->valuestring, "X"))
            continue;
        const char *name = cJSON_GetObjectItem(it, "name")->valuestring;
        double ts = cJSON_GetObjectItem(it, "ts")->valuedouble, end = ts + cJSON_GetObjectItem(it, "dur")->valuedouble;
        steps += !strcmp(name, "decode step");
        windows += !strcmp(name, "window");
        for (int i = 0; i < TRACKS; i++) {
            if (cJSON_GetObjectItem(it, "tid")->valueint != tid[i])
                continue;
            counted[i]++;
            bool inside = false;
            ck_assert_double_ge(ts, last[i] - 1);
            last[i] = end;
            cJSON_ArrayForEach(other, events) {
                const char *outer = cJSON_GetObjectItem(other, "name")->valuestring;
                if (strcmp(outer, "decode step") && strcmp(outer, "prefill chunk"))
                    continue;
                double from = cJSON_GetObjectItem(other, "ts")->valuedouble;
                inside |= ts >= from - 1 && end <= from + cJSON_GetObjectItem(other, "dur")->valuedouble + 1; /* us */
            }
            ck_assert_msg(inside, "%s at %f: in no chunk or step", name, ts);
        }
    }
    ck_assert_int_eq(steps, STEPS);
    ck_assert_int_eq(windows, STEPS * (int)n_layer);
    for (int i = 0; i < TRACKS; i++)
        ck_assert_int_gt(counted[i], 0);
    cJSON_Delete(root);
    free(text);
}
END_TEST

static void add(Suite *s, const char *name, const TTest *test, int n)
{
    TCase *c = tcase_create(name); /* each its own: CK_RUN_CASE runs one */
    tcase_set_timeout(c, 0);
    tcase_add_loop_test(c, test, 0, n);
    suite_add_tcase(s, c);
}

int main(void)
{
    Suite *s = suite_create("engine");
    if (QUICK)
        printf("SKIP: under the sanitizers, window_wraps and some cases of architectures and long_contexts: emulated, they take minutes\n");
    add(s, "architectures", architectures, N_ARCHS);
    add(s, "chunks_of_q8_0", chunks_of_q8_0, 1);
    add(s, "long_contexts", long_contexts, 4);
    add(s, "window_wraps", window_wraps, 1);
    add(s, "device_lost", device_lost, 1);
    add(s, "index_while_prefilling", index_while_prefilling, 1);
    add(s, "traced", traced, 1);
    add(s, "small_devices", small_devices, 1);
    return t_run(s);
}
