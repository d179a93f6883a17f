/* Nothing here sorts the vocabulary: the k most likely tokens, and the most likely ones that hold a share p of the probability, are the
 * same question with weights 1 and p_i, and are answered by a radix descent over the logits' bits (select_best). The kept candidates stay
 * in the order of their ids, in which the draw walks them.
 */
#include "sampler.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Longer than any context: a window of this many tokens or more is the whole text, and needs no ring. */
#define MAX_WINDOW ((size_t)1 << 24)

enum { BLOCK = ENG_LOGITS_BLOCK }; /* logits that are looked at, or skipped, together */

typedef struct {
    float logit;
    int32_t id;
} candidate;

struct eng_sampler {
    eng_sampling p;
    const eng_kernels *k;
    size_t n;
    uint64_t rng[4];
    bool penalize;
    float *block_max; /* [n / BLOCK, rounded up] of the logits in question */
    float *adjusted;  /* [n] logits after penalties */
    candidate *cand;  /* [n] */
    double *weight;   /* [n] of the candidates, relative to the best */
    /* The window of the penalties: how often each id is in it, the distinct ids, and where in that list each is. */
    uint32_t *count, *where;
    int32_t *distinct;
    size_t n_distinct;
    int32_t *ring; /* [window]; NULL: nothing ever leaves */
    size_t window, at, filled;
};

static bool finite_nonzero(float x)
{
    return x != 0 && isfinite(x);
}

static bool usable(float x)
{
    return fabsf(x) <= FLT_MAX; /* false for NaN too */
}

/* ---- creation ----------------------------------------------------------------------------------------------------- */

static void seed(uint64_t s[4], uint64_t value) /* splitmix64, as the authors of xoshiro advise */
{
    for (int i = 0; i < 4; i++) {
        uint64_t z = value += 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        s[i] = z ^ (z >> 31);
    }
}

static double uniform(uint64_t s[4]) /* xoshiro256**; [0, 1) */
{
    uint64_t x = s[1] * 5, t = s[1] << 17;
    x = ((x << 7) | (x >> 57)) * 9;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = (s[3] << 45) | (s[3] >> 19);
    return (double)(x >> 11) * 0x1p-53;
}

int eng_sampler_new(const eng_sampling *p, const eng_kernels *k, uint32_t n_vocab, eng_sampler **ret)
{
    if (!n_vocab || n_vocab > INT32_MAX)
        return -EINVAL;
    eng_sampler *s = calloc(1, sizeof *s);
    if (!s)
        return -ENOMEM;
    s->p = *p;
    s->k = k;
    s->n = n_vocab;
    seed(s->rng, p->seed);
    if (!(isfinite(p->repeat_penalty) && p->repeat_penalty > 0))
        s->p.repeat_penalty = 1;
    s->penalize =
        p->repeat_last_n != 0 && (s->p.repeat_penalty != 1 || finite_nonzero(p->presence_penalty) || finite_nonzero(p->frequency_penalty));
    s->cand = malloc(s->n * sizeof *s->cand);
    s->weight = malloc(s->n * sizeof *s->weight);
    s->block_max = malloc((s->n + BLOCK - 1) / BLOCK * sizeof *s->block_max);
    bool ok = s->cand && s->weight && s->block_max;
    if (s->penalize) {
        s->adjusted = malloc(s->n * sizeof *s->adjusted);
        s->count = calloc(s->n, sizeof *s->count);
        s->where = malloc(s->n * sizeof *s->where);
        s->distinct = malloc(s->n * sizeof *s->distinct);
        ok = ok && s->adjusted && s->count && s->where && s->distinct;
        if (p->repeat_last_n > 0 && (size_t)p->repeat_last_n < MAX_WINDOW) {
            s->window = (size_t)p->repeat_last_n;
            s->ring = malloc(s->window * sizeof *s->ring);
            ok = ok && s->ring;
        }
    }
    if (!ok) {
        eng_sampler_free(s);
        return -ENOMEM;
    }
    *ret = s;
    return 0;
}

void eng_sampler_free(eng_sampler *s)
{
    if (!s)
        return;
    free(s->block_max);
    free(s->adjusted);
    free(s->cand);
    free(s->weight);
    free(s->count);
    free(s->where);
    free(s->distinct);
    free(s->ring);
    free(s);
}

/* ---- penalties ---------------------------------------------------------------------------------------------------- */

static void leave_window(eng_sampler *s, int32_t id)
{
    if (--s->count[id])
        return;
    int32_t last = s->distinct[--s->n_distinct];
    s->distinct[s->where[id]] = last;
    s->where[last] = s->where[id];
}

void eng_sampler_accept(eng_sampler *s, int32_t id)
{
    if (!s->penalize || id < 0 || (size_t)id >= s->n)
        return;
    if (s->ring) {
        if (s->filled == s->window)
            leave_window(s, s->ring[s->at]);
        else
            s->filled++;
        s->ring[s->at] = id;
        s->at = s->at + 1 == s->window ? 0 : s->at + 1;
    }
    if (s->count[id] == UINT32_MAX)
        return;
    if (!s->count[id]++) {
        s->where[id] = (uint32_t)s->n_distinct;
        s->distinct[s->n_distinct++] = id;
    }
}

/* The repeat penalty makes a token less likely whatever its logit's sign (Keskar et al. 2019, as llama.cpp has it); frequency and presence
 * as OpenAI defines them. */
static const float *penalized(eng_sampler *s, const float *logits)
{
    if (!s->n_distinct)
        return logits;
    memcpy(s->adjusted, logits, s->n * sizeof *logits);
    float frequency = isfinite(s->p.frequency_penalty) ? s->p.frequency_penalty : 0;
    float presence = isfinite(s->p.presence_penalty) ? s->p.presence_penalty : 0;
    for (size_t i = 0; i < s->n_distinct; i++) {
        int32_t id = s->distinct[i];
        float x = logits[id];
        if (!usable(x))
            continue;
        x = x <= 0 ? x * s->p.repeat_penalty : x / s->p.repeat_penalty;
        x -= (float)s->count[id] * frequency + presence;
        s->adjusted[id] = fmaxf(-FLT_MAX, fminf(FLT_MAX, x));
    }
    return s->adjusted;
}

/* ---- over the whole vocabulary ------------------------------------------------------------------------------------ */

/* The smallest id that has the largest logit. */
static int32_t first_best(const eng_sampler *s, const float *x, float best)
{
    size_t b = 0;
    while (s->block_max[b] != best)
        b++;
    for (size_t i = b * BLOCK;; i++)
        if (x[i] == best)
            return (int32_t)i;
}

/* The n_logprobs largest logits by insertion; among equals the smaller id is first, and few of the many reach the list at all. */
static void fill_top(const eng_sampler *s, const float *logits, double lse, eng_token *ret)
{
    size_t max = sizeof ret->top / sizeof *ret->top, want = s->p.n_logprobs < max ? s->p.n_logprobs : max, n = 0;
    for (size_t i = 0; i < s->n && want; i++) {
        float least = n == want ? ret->top[n - 1].logprob : -INFINITY;
        if (i % BLOCK == 0 && s->block_max[i / BLOCK] <= least) {
            i += BLOCK - 1;
            continue;
        }
        float x = logits[i];
        if (!usable(x) || x <= least)
            continue;
        size_t at = n < want ? n++ : n - 1;
        for (; at && ret->top[at - 1].logprob < x; at--)
            ret->top[at] = ret->top[at - 1];
        ret->top[at].id = (int32_t)i;
        ret->top[at].logprob = x;
    }
    for (size_t i = 0; i < n; i++)
        ret->top[i].logprob = (float)((double)ret->top[i].logprob - lse);
    ret->n_top = (uint32_t)n;
}

/* ---- truncation --------------------------------------------------------------------------------------------------- */

/* Unsigned numbers in the order of the floats. */
static uint32_t key_of(float x)
{
    uint32_t u;
    x += 0.f; /* -0 and 0 are equals */
    memcpy(&u, &x, sizeof u);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* Keeps the fewest best candidates whose weights add up to the target (all where they don't), at least one; among equals the smaller ids.
 * w: their weights, NULL: 1 each. Returns how many. */
static size_t select_best(candidate *c, double *w, size_t n, double target)
{
    enum { BUCKETS = 1 << 11 };
    uint32_t prefix = 0, mask = 0;
    double above = 0; /* weight of the candidates surely kept: their key is larger in the bits looked at */
    target = fmax(target, DBL_MIN);
    static const int shifts[] = {21, 10, 0};
    for (int level = 0; level < 3; level++) {
        double mass[BUCKETS] = {0};
        uint32_t buckets = level < 2 ? BUCKETS : BUCKETS / 2;
        for (size_t i = 0; i < n; i++) {
            uint32_t key = key_of(c[i].logit);
            if ((key & mask) == prefix)
                mass[key >> shifts[level] & (buckets - 1)] += w ? w[i] : 1;
        }
        uint32_t b = buckets - 1;
        while (b && above + mass[b] < target)
            above += mass[b--];
        prefix |= b << shifts[level];
        mask |= (buckets - 1) << shifts[level];
    }
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t key = key_of(c[i].logit);
        bool equal = key == prefix && above < target;
        if (key <= prefix && !equal)
            continue;
        if (equal)
            above += w ? w[i] : 1;
        if (w)
            w[kept] = w[i];
        c[kept++] = c[i];
    }
    return kept;
}

/* Candidates after top-k. k blocks with a maximum of at least some value hold k logits of at least that value: the k-th best maximum is a
 * bound below which nothing can be among the best k, and most blocks lie below it. */
static size_t keep_top_k(eng_sampler *s, const float *logits)
{
    size_t k = s->p.top_k > 0 ? (size_t)s->p.top_k : s->n, blocks = (s->n + BLOCK - 1) / BLOCK, n = 0;
    float least = -FLT_MAX;
    if (k < blocks) {
        for (size_t b = 0; b < blocks; b++)
            s->cand[b] = (candidate){s->block_max[b], (int32_t)b};
        size_t kept = select_best(s->cand, NULL, blocks, (double)k);
        float bound = INFINITY;
        for (size_t i = 0; i < kept; i++)
            bound = s->cand[i].logit < bound ? s->cand[i].logit : bound;
        least = bound > least ? bound : least;
    }
    for (size_t b = 0; b < blocks; b++) {
        if (s->block_max[b] < least)
            continue;
        size_t end = s->n - b * BLOCK < BLOCK ? s->n : (b + 1) * BLOCK;
        for (size_t i = b * BLOCK; i < end; i++)
            if (logits[i] >= least && logits[i] <= FLT_MAX)
                s->cand[n++] = (candidate){logits[i], (int32_t)i};
    }
    return n > k ? select_best(s->cand, NULL, n, (double)k) : n;
}

static size_t keep_top_p_min_p(eng_sampler *s, size_t n, float max)
{
    bool top_p = s->p.top_p<1, min_p = s->p.min_p> 0;
    if (!top_p && !min_p)
        return n;
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += s->weight[i] = exp((double)s->cand[i].logit - (double)max);
    if (top_p)
        n = select_best(s->cand, s->weight, n, (double)s->p.top_p * sum);
    size_t kept = 0;
    for (size_t i = 0; i < n; i++)
        if (!min_p || s->weight[i] >= (double)s->p.min_p || s->cand[i].logit == max)
            s->cand[kept++] = s->cand[i];
    return kept;
}

static int32_t draw(eng_sampler *s, size_t n, float max)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += s->weight[i] = exp(((double)s->cand[i].logit - (double)max) / (double)s->p.temperature);
    double left = uniform(s->rng) * sum;
    size_t chosen = 0;
    for (size_t i = 0; i < n; i++) {
        if (s->weight[i] > 0)
            chosen = i; /* rounding may leave a crumb after the last one */
        if ((left -= s->weight[i]) < 0)
            break;
    }
    return s->cand[chosen].id;
}

void eng_sampler_pick(eng_sampler *s, const float *logits, eng_token *ret)
{
    float max = s->k->logits_max(logits, s->n, s->block_max);
    if (max == -INFINITY) { /* not one number among them */
        ret->id = 0;
        ret->logprob = -9999; /* JSON has no infinity; OpenAI's "very unlikely" */
        ret->n_top = 0;
        return;
    }
    double lse = (double)max + log(s->k->logits_sum(logits, s->n, max));
    fill_top(s, logits, lse, ret);
    const float *x = penalized(s, logits);
    float best = x == logits ? max : s->k->logits_max(x, s->n, s->block_max);
    if (s->p.temperature > 0) {
        size_t n = keep_top_p_min_p(s, keep_top_k(s, x), best);
        ret->id = draw(s, n, best);
    } else {
        ret->id = first_best(s, x, best);
    }
    ret->logprob = (float)((double)logits[ret->id] - lse);
}
