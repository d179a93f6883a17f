/* Every allocation of the engine fails once: opening, a session with retrieval, sealing and index builds either work or say -ENOMEM, and
 * the engine goes on to answer right. The allocator is replaced for the whole program by one that can be told to fail. */
#include "describe.h"
#include "engine.h"
#include "support.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);
void *__libc_memalign(size_t align, size_t n);

static atomic_long countdown = -1; /* allocations until the one that fails; negative: none fails */
static atomic_long calls;

static bool fails(void)
{
    atomic_fetch_add(&calls, 1);
    if (atomic_load(&countdown) < 0 || atomic_fetch_sub(&countdown, 1) != 0)
        return false;
    errno = ENOMEM;
    return true;
}

void *malloc(size_t n)
{
    return fails() ? NULL : __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
    return fails() ? NULL : __libc_calloc(n, size);
}

void *realloc(void *p, size_t n)
{
    return fails() ? NULL : __libc_realloc(p, n);
}

void *aligned_alloc(size_t align, size_t n)
{
    return fails() ? NULL : __libc_memalign(align, n);
}

int posix_memalign(void **ret, size_t align, size_t n)
{
    if (fails() || !(*ret = __libc_memalign(align, n)))
        return ENOMEM;
    return 0;
}

void *mmap(void *addr, size_t n, int prot, int flags, int fd, off_t offset)
{
    static void *(*real)(void *, size_t, int, int, int, off_t);
    if (!real)
        real = (void *(*)(void *, size_t, int, int, int, off_t))dlsym(RTLD_NEXT, "mmap");
    return fails() ? MAP_FAILED : real(addr, n, prot, flags, fd, offset);
}

enum { PROMPT = 1100, ANSWER = 4 };

static int32_t prompt[PROMPT];
static bool silent; /* an error came without a sentence. Check allocates, so nothing is asserted while allocations are counted */

/* One request and, if wanted, the builds of its indexes; 0 or the error it ended with. */
static int ask(eng_engine *e, int32_t *out, bool build)
{
    char err[256] = "";
    eng_session *s;
    eng_request q = {.ids = prompt, .n_ids = PROMPT, .max_tokens = ANSWER, .attention = eng_attention_default(), .sampling = eng_sampling_default(), .cache_prompt = true};
    q.attention.mode = ENG_ATTN_GRAPH;
    q.attention.n_local = 64;
    q.sampling.temperature = 0;
    int r = eng_session_open(e, &q, &s, err, sizeof err);
    if (r < 0) {
        silent |= !*err;
        return r;
    }
    r = eng_session_prefill(s, NULL, NULL);
    for (int i = 0; r == 0 && i < ANSWER; i++) {
        eng_token t;
        r = eng_session_next(s, &t);
        out[i] = t.id;
    }
    eng_session_close(s);
    while (build && eng_idle(e, 1000, NULL))
        ;
    return r;
}

static eng_params params(void)
{
    eng_params p = eng_params_default();
    p.n_ctx = 4096;
    p.n_threads = 1;   /* so that the N-th allocation is the same one each time, */
    p.index_modes = 1u << ENG_ATTN_GRAPH | 1u << ENG_ATTN_IVF;
    p.index_share = 0; /* and the answer the same: graphs are not there before it ends */
    return p;
}

static const char *const models[] = {"gguf/tiny-llama-q8_0", "archs/tiny-qwen3moe", "archs/tiny-gemma3-linear"};

static int open_other(const char *model, eng_engine **e)
{
    char path[128];
    char err[512] = "";
    eng_params p = params();
    snprintf(path, sizeof path, "golden/%s.gguf", model);
    int r = eng_open(t_path(path), &p, e, err, sizeof err);
    silent |= r < 0 && !*err;
    return r;
}

static int open_model(eng_engine **e)
{
    return open_other(models[0], e);
}

START_TEST(opening)
{
    int failures = 0;
    for (long n = 0;; n++) {
        eng_engine *e = NULL;
        atomic_store(&countdown, n);
        int r = open_other(models[_i], &e);
        bool reached = atomic_load(&countdown) < 0;
        atomic_store(&countdown, -1);
        if (r < 0) {
            ck_assert_msg(r == -ENOMEM, "allocation %ld: %s", n, strerror(-r));
            ck_assert_ptr_null(e);
            failures++;
        } else
            eng_close(e);
        if (!reached)
            break;
    }
    ck_assert(!silent);
    ck_assert_int_gt(failures, 10);
}
END_TEST

START_TEST(describing)
{
    int failures = 0;
    for (long n = 0;; n++) {
        char err[512] = "";
        eng_description *d = NULL;
        atomic_store(&countdown, n);
        int r = eng_describe(t_path("golden/gguf/tiny-llama-q8_0.gguf"), &d, err, sizeof err);
        bool reached = atomic_load(&countdown) < 0;
        atomic_store(&countdown, -1);
        ck_assert_msg(r == 0 || (r == -ENOMEM && !d && *err), "allocation %ld: %s", n, strerror(-r));
        ck_assert_msg(r || !d->refusal, "allocation %ld: %s", n, d->refusal); /* no memory is no fault of the model's */
        failures += r < 0;
        eng_description_free(d);
        if (!reached)
            break;
    }
    ck_assert_int_gt(failures, 10);
}
END_TEST

/* Once its session's first token is there, a step allocates nothing, whatever it searches. */
START_TEST(steps_allocate_nothing)
{
    static const eng_attn_mode modes[] = {ENG_ATTN_FULL, ENG_ATTN_STREAMING, ENG_ATTN_FLAT, ENG_ATTN_CLUSTER, ENG_ATTN_IVF, ENG_ATTN_GRAPH};
    eng_attn_mode mode = modes[_i / 2];
    char err[256] = "";
    t_rng rng = t_seed(2);
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = (int32_t)(t_u64(&rng) % 200);
    eng_engine *e;
    eng_session *s;
    eng_timings t;
    ck_assert_int_eq(open_model(&e), 0);
    eng_request q = {.ids = prompt, .n_ids = PROMPT, .max_tokens = ANSWER, .attention = eng_attention_default(), .sampling = eng_sampling_default(), .cache_prompt = true};
    q.attention.mode = mode;
    q.attention.n_sink = 0;
    q.attention.n_local = 64;
    q.attention.estimate = _i % 2;
    for (int round = 0; round < 2; round++) { /* the first one's index is searched in the second */
        eng_token token;
        ck_assert_msg(eng_session_open(e, &q, &s, err, sizeof err) == 0, "%s", err);
        ck_assert_int_eq(eng_session_prefill(s, NULL, NULL), 0);
        ck_assert_int_eq(eng_session_next(s, &token), 0);
        long before = atomic_load(&calls);
        int r = 0;
        for (int i = 1; i < ANSWER && round; i++)
            r |= eng_session_next(s, &token);
        long after = atomic_load(&calls);
        ck_assert_int_eq(r, 0);
        ck_assert_msg(before == after, "%s: %ld allocations in %d steps", eng_attn_mode_name(mode), after - before, ANSWER - 1);
        eng_session_timings(s, &t);
        eng_session_close(s);
        while (eng_idle(e, 1000, NULL))
            ;
    }
    ck_assert((t.n_graph > 0) == (mode == ENG_ATTN_GRAPH) && (t.n_cluster > 0) == (mode == ENG_ATTN_CLUSTER || mode == ENG_ATTN_IVF));
    ck_assert((t.n_flat > 0) >= (mode == ENG_ATTN_FLAT));
    eng_close(e);
}
END_TEST

START_TEST(answering)
{
    int32_t want[ANSWER], out[ANSWER];
    t_rng rng = t_seed(1);
    for (int i = 0; i < PROMPT; i++)
        prompt[i] = (int32_t)(t_u64(&rng) % 200);
    eng_engine *e;
    ck_assert_int_eq(open_model(&e), 0);
    ck_assert_int_eq(ask(e, want, true), 0);
    eng_close(e);
    int failures = 0;
    for (long n = 0;; n++) {
        ck_assert_int_eq(open_model(&e), 0);
        atomic_store(&countdown, n);
        int r = ask(e, out, true);
        bool reached = atomic_load(&countdown) < 0;
        atomic_store(&countdown, -1);
        ck_assert_msg(r == 0 || r == -ENOMEM, "allocation %ld: %s", n, strerror(-r));
        failures += r < 0;
        if (r == 0)
            ck_assert_msg(!memcmp(out, want, sizeof out), "allocation %ld: another answer", n);
        eng_stats st;
        eng_stats_get(e, &st);
        ck_assert_uint_eq(st.index_pending, 0);
        ck_assert_int_eq(ask(e, out, false), 0); /* and the engine goes on */
        eng_close(e);
        if (!reached)
            break;
        if (n > 60)
            n += 24; /* the many graph builds take the same allocations again and again */
    }
    ck_assert(!silent);
    ck_assert_int_gt(failures, 10);
    printf("%d allocations failed a request\n", failures);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("alloc");
    TCase *c = tcase_create("alloc");
    tcase_set_timeout(c, 0);
    tcase_add_loop_test(c, opening, 0, 3);
    tcase_add_loop_test(c, steps_allocate_nothing, 0, 12);
    tcase_add_test(c, answering);
    tcase_add_test(c, describing);
    suite_add_tcase(s, c);
    return t_run(s);
}
