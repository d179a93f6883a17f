/* RoPE scaling as llama.cpp and Hugging Face compute it:
 *   linear    all frequencies divided by the factor
 *   yarn      (arXiv 2309.00071) fast pairs as they are, slow ones divided by the factor, a ramp between; cosines and sines scaled by 0.1
 * ln(factor) + 1 llama3    divisors in the file's rope_freqs, which hold its ramp already longrope  divisors in the file, one list for
 * contexts up to the original one and one for longer ones Angles are in float64: at position 10^6 a float32 product has lost its fraction.
 */
#include "rope.h"
#include "text.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <xxhash.h>

/* What is in effect, after file and overrides. */
typedef struct {
    eng_scaling scaling;
    double base, factor, ext, attn, beta_fast, beta_slow;
    uint32_t orig_ctx;
} settings;

static settings merge(const eng_model *m, const eng_rope_params *p)
{
    static const eng_scaling types[] = {[ENG_ROPE_SCALING_NONE] = ENG_SCALING_NONE,
                                        [ENG_ROPE_SCALING_LINEAR] = ENG_SCALING_LINEAR,
                                        [ENG_ROPE_SCALING_YARN] = ENG_SCALING_YARN};
    const eng_rope_keys *k = &m->rope;
    settings s = {
        .scaling = p->scaling == ENG_ROPE_SCALING_FILE ? k->scaling : types[p->scaling],
        .base = p->freq_base > 0 ? p->freq_base : m->rope_base,
        .factor = p->freq_scale > 0 ? 1 / (double)p->freq_scale : k->factor,
        .attn = k->attn_factor * (p->yarn_attn_factor >= 0 ? (double)p->yarn_attn_factor : 1),
        .beta_fast = p->yarn_beta_fast >= 0 ? p->yarn_beta_fast : k->beta_fast,
        .beta_slow = p->yarn_beta_slow >= 0 ? p->yarn_beta_slow : k->beta_slow,
        .orig_ctx = p->yarn_orig_ctx ? p->yarn_orig_ctx : k->orig_ctx,
    };
    if (s.scaling == ENG_SCALING_NONE)
        s.factor = 1;
    s.ext = p->yarn_ext_factor >= 0 ? p->yarn_ext_factor : s.scaling == ENG_SCALING_YARN ? k->ext_factor : 0;
    return s;
}

/* The pair that turns `turns` times over the original context. */
static double turning_pair(const settings *s, uint32_t dim, double turns)
{
    return dim * log(s->orig_ctx / (turns * 2 * M_PI)) / (2 * log(s->base));
}

/* factors: divisors, or NULL. */
static void frequencies(const settings *s, uint32_t dim, const float *factors, double *out)
{
    double low = fmax(0, floor(turning_pair(s, dim, s->beta_fast))), high = fmin(dim - 1, ceil(turning_pair(s, dim, s->beta_slow)));
    for (uint32_t i = 0; i < dim / 2; i++) {
        double f = pow(s->base, -2.0 * i / dim), mix = 0;
        if (factors)
            f /= factors[i];
        if (s->ext != 0)
            mix = (1 - fmin(1, fmax(0, (i - low) / fmax(0.001, high - low)))) * s->ext;
        out[i] = mix == 0 && s->factor == 1 ? f : f / s->factor * (1 - mix) + f * mix;
    }
}

static uint32_t trained(const eng_model *m, const settings *s)
{
    /* linear scaling in the file is counted in its context_length */
    double scaled = s->scaling == ENG_SCALING_YARN ? s->orig_ctx * s->factor : m->n_ctx_train * s->factor / m->rope.factor;
    return scaled > m->n_ctx_train ? (uint32_t)fmin(scaled, UINT32_MAX) : m->n_ctx_train;
}

int eng_rope_init(eng_rope *r, const eng_model *m, const eng_rope_params *p, uint32_t n_ctx, char *err, size_t errlen)
{
    settings s = merge(m, p), local = {.base = m->rope.base_local, .factor = 1, .beta_fast = 32, .beta_slow = 1, .orig_ctx = s.orig_ctx};
    const float *factors = m->rope.factors;
    if (m->rope.factors_long)
        factors = n_ctx > s.orig_ctx ? m->rope.factors_long : m->rope.factors_short;
    *r = (eng_rope){
        .pairs = m->rope_dim / 2,
        .mscale = {(float)(s.attn * (s.ext != 0 && s.factor > 1 ? 0.1 * log(s.factor) + 1 : 1)), m->rope.attn_factor},
        .scaling = m->rope.factors_long ? "longrope"
                   : s.ext != 0         ? "yarn"
                   : s.factor != 1      ? "linear"
                   : m->rope.factors    ? "llama3"
                                        : "none",
        .base = (float)s.base,
        .factor = (float)s.factor,
        .orig_ctx = s.orig_ctx,
        .n_ctx_trained = trained(m, &s),
    };
    for (int i = 0; i < 2; i++)
        if (!(r->freq[i] = calloc(r->pairs, sizeof *r->freq[i]))) {
            eng_rope_done(r);
            return eng_fail(err, errlen, -ENOMEM, "no memory for the model's rotary frequencies");
        }
    frequencies(&s, m->rope_dim, factors, r->freq[0]);
    frequencies(&local, m->rope_dim, NULL, r->freq[1]);
    bool usable =
        isfinite(r->mscale[0]) && (s.ext == 0 || (s.base > 1 && s.beta_fast > 0 && s.beta_slow > 0)); /* of which YaRN takes logarithms */
    for (uint32_t i = 0; i < r->pairs; i++)
        usable &= isfinite(r->freq[0][i]) && isfinite(r->freq[1][i]);
    if (usable)
        return 0;
    eng_rope_done(r);
    return eng_fail(err, errlen, -EINVAL, "these RoPE settings give no finite angles: base %g, factor %g, original context %u", s.base,
                    s.factor, s.orig_ctx);
}

void eng_rope_done(eng_rope *r)
{
    free(r->freq[0]);
    free(r->freq[1]);
    r->freq[0] = r->freq[1] = NULL;
}

void eng_rope_angles(const eng_rope *r, bool local, uint32_t pos, float *cs)
{
    for (uint32_t i = 0; i < r->pairs; i++) {
        double angle = pos * r->freq[local][i];
        cs[i] = (float)cos(angle) * r->mscale[local];
        cs[r->pairs + i] = (float)sin(angle) * r->mscale[local];
    }
}

uint64_t eng_rope_hash(const eng_rope *r, uint64_t seed)
{
    for (int i = 0; i < 2; i++)
        seed = XXH3_64bits_withSeed(r->freq[i], r->pairs * sizeof *r->freq[i], seed);
    return XXH3_64bits_withSeed(r->mscale, sizeof r->mscale, seed);
}
