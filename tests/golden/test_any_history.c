/* The property that matters most of what is kept: whatever was asked before, it changes no answer and shows nobody else's tokens. */
#include "capture.h"
#include "disks.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>

/* Damages one file, the catalog, or nothing. */
static void damage(t_rng *r)
{
    char path[700], sub[300];
    uint32_t n_files = 0, at;
    if (t_u64(r) % 4 == 0) {
        snprintf(path, sizeof path, "%s/catalog.db", dir);
        unlink(path);
    }
    for (int pass = 0; pass < 2; pass++) {
        at = pass ? (uint32_t)(t_u64(r) % (n_files ? n_files : 1)) : UINT32_MAX;
        for (int i = 0; i < 256; i++) {
            snprintf(sub, sizeof sub, "%s/segments/%02x", dir, i);
            DIR *d = opendir(sub);
            for (struct dirent *f; d && (f = readdir(d));) {
                if (f->d_name[0] == '.')
                    continue;
                n_files += !pass;
                if (!pass || at--)
                    continue;
                struct stat st;
                snprintf(path, sizeof path, "%s/%s", sub, f->d_name);
                int fd = open(path, O_RDWR);
                ck_assert(fd >= 0 && fstat(fd, &st) == 0);
                uint8_t bytes[64];
                for (size_t k = 0; k < sizeof bytes; k++)
                    bytes[k] = (uint8_t)t_u64(r);
                if (t_u64(r) % 4 == 0)
                    ck_assert_int_eq(ftruncate(fd, (off_t)(t_u64(r) % (uint64_t)st.st_size)), 0);
                else
                    ck_assert_int_eq(pwrite(fd, bytes, sizeof bytes, (off_t)(t_u64(r) % (uint64_t)(st.st_size - 64))), (ssize_t)sizeof bytes);
                close(fd);
            }
            if (d)
                closedir(d);
        }
    }
}

typedef struct {
    atomic_bool cancel;
    uint32_t at;
} canceler;

static void cancel_at(void *ctx, uint32_t done, uint32_t cached, uint32_t total)
{
    canceler *c = ctx;
    (void)cached, (void)total;
    if (done >= c->at)
        atomic_store(&c->cancel, true);
}

enum { MAX_DIM = 128 };

/* The first layer's value of each token, which depends on nothing but the token: so rows tell whose they are. */
static float values_of[VOCAB][MAX_DIM];

static void learn_values(eng_engine *cold)
{
    const eng_info *info = eng_info_get(cold);
    int32_t ids[VOCAB];
    char err[256];
    eng_session *s;
    static float rows[VOCAB * MAX_DIM];
    for (int i = 0; i < VOCAB; i++)
        ids[i] = i;
    ck_assert_uint_le(info->head_dim, MAX_DIM);
    eng_request q = request(ids, VOCAB, ENG_ATTN_FULL);
    ck_assert_int_eq(eng_session_open(cold, &q, &s, err, sizeof err), 0);
    ck_assert_int_eq(eng_session_prefill(s, NULL, NULL), 0);
    ck_assert_int_eq(eng_session_rows(s, 0, 0, true, VOCAB, rows), 0);
    for (int i = 0; i < VOCAB; i++)
        memcpy(values_of[i], rows + i * info->head_dim, info->head_dim * sizeof(float));
    eng_session_close(s);
}

/* Every token that the session sees is one of this conversation's: no other token has a value nearer to its row. */
static void check_values(const eng_engine *e, const eng_session *s, const int32_t *ids, uint32_t n)
{
    const eng_info *info = eng_info_get(e);
    float *rows = malloc((size_t)n * info->head_dim * sizeof *rows);
    ck_assert_int_eq(eng_session_rows(s, 0, 0, true, n, rows), 0);
    for (uint32_t i = 0; i < n; i++) {
        float best = INFINITY;
        int32_t nearest = -1;
        for (int32_t t = 0; t < VOCAB; t++) {
            float sum = 0;
            for (uint32_t k = 0; k < info->head_dim; k++)
                sum += (rows[i * info->head_dim + k] - values_of[t][k]) * (rows[i * info->head_dim + k] - values_of[t][k]);
            nearest = sum < best ? t : nearest;
            best = sum < best ? sum : best;
        }
        ck_assert_msg(nearest == ids[i], "token %u is %d, and its row that of %d", i, ids[i], nearest);
    }
    free(rows);
}

/* Answers, and looks at what it was answered from. */
static uint32_t checked_answer(eng_engine *e, eng_request q, int32_t *out, uint32_t n_out)
{
    char err[256];
    eng_session *s;
    eng_timings t;
    int32_t *all = malloc((q.n_ids + n_out) * sizeof *all);
    memcpy(all, q.ids, q.n_ids * sizeof *all);
    ck_assert_msg(eng_session_open(e, &q, &s, err, sizeof err) == 0, "%s", err);
    ck_assert_int_eq(eng_session_prefill(s, NULL, NULL), 0);
    for (uint32_t i = 0; i < n_out; i++) {
        eng_token tok;
        ck_assert_int_eq(eng_session_next(s, &tok), 0);
        all[q.n_ids + i] = out[i] = tok.id;
    }
    check_values(e, s, all, (uint32_t)q.n_ids + n_out - 1); /* the last one is not computed */
    eng_session_timings(s, &t);
    eng_session_close(s);
    free(all);
    return t.cache_n;
}

/* Whatever was asked before, cancelled, evicted, lost or damaged: an answer is computed from its own conversation's tokens, and in `full` mode it is that of an engine
 * that keeps nothing. */
START_TEST(any_history)
{
    enum { TEXTS = 4, N = 1600, STEPS = 120 };
    empty_dir();
    t_rng r = t_seed(34);
    eng_engine *cold = open_tiny(0, 2, false), *e = NULL;
    int32_t texts[TEXTS][N];
    uint64_t disk_hits = 0, files_missed = 0, cached = 0;
    learn_values(cold);
    for (int i = 0; i < TEXTS; i++) {
        random_ids(cold, &r, texts[i], N);
        if (i) /* shares a beginning with the one before */
            memcpy(texts[i], texts[i - 1], (300 * (size_t)i) * sizeof(int32_t));
    }
    for (int step = 0; step < STEPS; step++) {
        if (!e)
            e = open_disk((size_t[]){0, 300000, 900000}[t_u64(&r) % 3], (uint64_t[]){400000, 900000, 4000000}[t_u64(&r) % 3]);
        int32_t prompt[N], out[6], want[6];
        uint32_t n = 200 + (uint32_t)(t_u64(&r) % (N - 200));
        memcpy(prompt, texts[t_u64(&r) % TEXTS], sizeof prompt);
        if (t_u64(&r) % 3 == 0) /* an edit */
            random_ids(cold, &r, prompt + t_u64(&r) % n, 1);
        bool full = t_u64(&r) % 3 != 0;
        eng_request q = request(prompt, n, full ? ENG_ATTN_FULL : ENG_ATTN_AUTO);
        q.max_tokens = 6;
        if (t_u64(&r) % 5 == 0) {
            canceler c = {.at = (uint32_t)(t_u64(&r) % n)};
            char err[256];
            eng_session *s;
            q.cancel = &c.cancel;
            ck_assert_int_eq(eng_session_open(e, &q, &s, err, sizeof err), 0);
            eng_session_prefill(s, cancel_at, &c);
            eng_session_close(s);
        } else {
            cached += checked_answer(e, q, out, 6);
            if (full) {
                answer(cold, q, want, 6, NULL);
                ck_assert_msg(!memcmp(out, want, sizeof out), "step %d: another answer", step);
            } else {
                random_ids(cold, &r, texts[t_u64(&r) % TEXTS] + N - 100, 100);
            }
        }
        if (t_u64(&r) % 3 == 0) { /* names hold and let go of what they like */
            char name[2] = {(char)('a' + t_u64(&r) % 3), 0};
            int named = t_u64(&r) % 3 ? name_it(e, name, prompt, n, t_u64(&r) % 2, (int64_t)(t_u64(&r) % 3)) : eng_context_remove(e, 0, name);
            ck_assert(named == 0 || named == -ENOSPC || named == -ENOENT || named == -ESTALE);
            the_time += (int64_t)(t_u64(&r) % 2);
            eng_contexts_tick(e);
        }
        if (t_u64(&r) % 3 == 0)
            rest(e);
        if (t_u64(&r) % 3 == 0) {
            eng_disk_stats st = stats(e);
            ck_assert_uint_le(st.bytes, st.limit);
            disk_hits += st.hits;
            for (int i = ENG_MISS_GONE; i < ENG_MISS_COUNT; i++)
                files_missed += st.misses[i];
            eng_close(e);
            e = NULL;
            if (t_u64(&r) % 2)
                damage(&r);
        }
    }
    eng_close(e);
    eng_close(cold);
    printf("any_history: %llu hits on disk, %llu files missed, %llu tokens cached\n", (unsigned long long)disk_hits, (unsigned long long)files_missed,
           (unsigned long long)cached);
    ck_assert_uint_gt(disk_hits, 10);
    ck_assert_uint_gt(files_missed, 3);
    ck_assert_uint_gt(cached, 10000);
}
END_TEST

static void add_tests(TCase *c)
{
    tcase_add_test(c, any_history);
}

int main(void)
{
    return run_disk("any_history", add_tests);
}
