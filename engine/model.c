#include "model.h"
#include "arch.h"
#include "text.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const eng_arch *const archs[] = {&eng_arch_llama,    &eng_arch_smollm3, &eng_arch_qwen2, &eng_arch_qwen3,
                                        &eng_arch_qwen3moe, &eng_arch_gemma3,  &eng_arch_phi3};
enum { N_ARCHS = sizeof archs / sizeof *archs };

/* Beyond any model there is, and small enough that products of two of them fit in 32 bits where callers multiply. */
enum {
    MAX_LAYERS = 1024,
    MAX_EMBD = 1 << 17,
    MAX_FF = 1 << 20,
    MAX_HEADS = 1024,
    MAX_HEAD_DIM = 512,
    MAX_CONTEXT = 1 << 28,
    MAX_EXPERTS = 1024,
    MAX_TENSOR_NAME = 65,
};

typedef struct {
    eng_model *m;
    const eng_gguf *g;
    const eng_arch *arch;
    bool *used; /* [n_tensors] */
    char *err;
    size_t errlen;
} loader;

#define FAIL(l, rc, ...) eng_fail((l)->err, (l)->errlen, rc, __VA_ARGS__)
#define SHOW(str)        eng_printable((str).s, (str).n, (char[96]){0}, 96)

/* ---- hyper-parameters ------------------------------------------------------------------------------------------- */

typedef struct {
    char s[96];
} key_name;

static key_name arch_key(const loader *l, const char *suffix)
{
    key_name k;
    snprintf(k.s, sizeof k.s, "%s.%s", l->arch->name, suffix);
    return k;
}

/* Reads ARCH.suffix, which must be in [1, max]. fallback: the value of a key that may be missing, 0 when it may not. */
static int count(loader *l, const char *suffix, uint32_t max, uint32_t fallback, uint32_t *ret)
{
    key_name key = arch_key(l, suffix);
    uint32_t v = fallback;
    int rc = eng_gguf_u32(l->g, key.s, &v);
    if (rc == -ENOENT && fallback) {
        *ret = fallback;
        return 0;
    }
    if (rc == -ENOENT)
        return FAIL(l, -EINVAL, "key %s is missing", key.s);
    if (rc)
        return FAIL(l, -EINVAL, "key %s is not a whole number from 1 to %" PRIu32, key.s, max);
    if (v < 1 || v > max)
        return FAIL(l, -EINVAL, "key %s is %" PRIu32 "; 1 to %" PRIu32 " is possible", key.s, v, max);
    *ret = v;
    return 0;
}

/* Reads ARCH.suffix, which must be finite and above 0. */
static int positive(loader *l, const char *suffix, float fallback, float *ret)
{
    key_name key = arch_key(l, suffix);
    float v = fallback;
    int rc = eng_gguf_f32(l->g, key.s, &v);
    if (rc == -ENOENT && fallback == 0)
        return FAIL(l, -EINVAL, "key %s is missing", key.s);
    if ((rc && rc != -ENOENT) || !(v > 0))
        return FAIL(l, -EINVAL, "key %s is not a finite number above 0", key.s);
    *ret = v;
    return 0;
}

static int read_heads(loader *l)
{
    eng_model *m = l->m;
    uint32_t value_dim;
    int rc = count(l, "attention.head_count", MAX_HEADS, 0, &m->n_head);
    if (!rc)
        rc = count(l, "attention.head_count_kv", MAX_HEADS, m->n_head, &m->n_head_kv);
    if (rc)
        return rc;
    if (m->n_head % m->n_head_kv)
        return FAIL(l, -EINVAL, "key %s, %" PRIu32 ", does not divide the head_count %" PRIu32, arch_key(l, "attention.head_count_kv").s,
                    m->n_head_kv, m->n_head);
    uint32_t even_split = m->n_embd % m->n_head ? 0 : m->n_embd / m->n_head; /* 0: then key_length must be there */
    if (!even_split && eng_gguf_u32(l->g, arch_key(l, "attention.key_length").s, &m->head_dim) == -ENOENT)
        return FAIL(l, -EINVAL, "key %s, %" PRIu32 ", is no multiple of the head_count %" PRIu32, arch_key(l, "embedding_length").s,
                    m->n_embd, m->n_head);
    if ((rc = count(l, "attention.key_length", MAX_HEAD_DIM, even_split, &m->head_dim)) ||
        (rc = count(l, "attention.value_length", MAX_HEAD_DIM, m->head_dim, &value_dim)))
        return rc;
    if (m->head_dim > MAX_HEAD_DIM || m->head_dim % 2)
        return FAIL(l, -ENOTSUP,
                    "attention heads of %" PRIu32 " dimensions (embedding_length / head_count or key_length) are not supported",
                    m->head_dim);
    if (value_dim != m->head_dim)
        return FAIL(l, -ENOTSUP, "key %s, %" PRIu32 ", differs from the key_length %" PRIu32 ", which is not supported",
                    arch_key(l, "attention.value_length").s, value_dim, m->head_dim);
    return 0;
}

/* A finite number at least `least`; absent: *ret stays. */
static int number(loader *l, const char *suffix, float least, float *ret)
{
    key_name key = arch_key(l, suffix);
    float v = 0;
    int rc = eng_gguf_f32(l->g, key.s, &v);
    if (rc == -ENOENT)
        return 0;
    if (rc || !(v >= least))
        return FAIL(l, -EINVAL, "key %s is not a finite number from %g", key.s, (double)least);
    *ret = v;
    return 0;
}

static int read_scaling_type(loader *l)
{
    static const char *const names[] = {"none", "linear", "yarn", "longrope"};
    key_name key = arch_key(l, "rope.scaling.type");
    eng_str type = {"linear", 6};
    int rc = eng_gguf_str(l->g, key.s, &type);
    if (rc && rc != -ENOENT)
        return FAIL(l, -EINVAL, "key %s is not a string", key.s);
    for (int i = 0; i < 4; i++)
        if (strlen(names[i]) == type.n && !memcmp(names[i], type.s, type.n)) {
            l->m->rope.scaling = (eng_scaling)i;
            return 0;
        }
    return FAIL(l, -ENOTSUP, "key %s is %s, a RoPE scaling that is not supported", key.s, SHOW(type));
}

/* Factor 0 is the converter's "not set"; rope.scale_linear is the key's old name. */
static int read_scaling(loader *l)
{
    eng_rope_keys *r = &l->m->rope;
    float factor = 0, attn = -1;
    *r = (eng_rope_keys){.attn_factor = 1, .ext_factor = 1, .beta_fast = 32, .beta_slow = 1, .base_local = 10000};
    int rc = read_scaling_type(l);
    if (rc || (rc = number(l, "rope.scale_linear", 0, &factor)) || (rc = number(l, "rope.scaling.factor", 0, &factor)) ||
        (rc = positive(l, "rope.scaling.attn_factor", 1, &r->attn_factor)) ||
        (rc = number(l, "rope.scaling.yarn_ext_factor", 0, &r->ext_factor)) ||
        (rc = positive(l, "rope.scaling.yarn_beta_fast", 32, &r->beta_fast)) ||
        (rc = positive(l, "rope.scaling.yarn_beta_slow", 1, &r->beta_slow)) ||
        (rc = number(l, "rope.scaling.yarn_attn_factor", 0, &attn)) || (rc = positive(l, "rope.freq_base_swa", 10000, &r->base_local)) ||
        (rc = count(l, "rope.scaling.original_context_length", MAX_CONTEXT, l->m->n_ctx_train, &r->orig_ctx)))
        return rc;
    r->factor = factor > 0 && r->scaling != ENG_SCALING_NONE ? factor : 1;
    if (r->scaling == ENG_SCALING_LONGROPE && r->factor != 1)
        return FAIL(l, -ENOTSUP, "key %s is set beside longrope's factors, which is not supported", arch_key(l, "rope.scaling.factor").s);
    /* Programs disagree whether it replaces YaRN's own factor or multiplies it; where they agree it can be ignored. */
    float own = r->factor > 1 ? 0.1f * logf(r->factor) + 1 : 1;
    if (attn >= 0 && r->scaling == ENG_SCALING_YARN && fabsf(attn - own) > 1e-4f)
        return FAIL(l, -ENOTSUP, "key %s is %g; only YaRN's own attention factor, %g, is supported",
                    arch_key(l, "rope.scaling.yarn_attn_factor").s, (double)attn, (double)own);
    return 0;
}

static int read_rope(loader *l)
{
    eng_model *m = l->m;
    int rc = count(l, "rope.dimension_count", UINT32_MAX, m->head_dim, &m->rope_dim);
    if (rc || (rc = positive(l, "rope.freq_base", 10000, &m->rope_base)))
        return rc;
    if (m->rope_dim > m->head_dim || m->rope_dim % 2)
        return FAIL(l, -EINVAL, "key %s is %" PRIu32 "; an even number up to the head size, %" PRIu32 ", is possible",
                    arch_key(l, "rope.dimension_count").s, m->rope_dim, m->head_dim);
    m->rope_pairs = l->arch->rope_pairs;
    return read_scaling(l);
}

static int refuse_unless_neutral(loader *l, const char *suffix, float neutral, const char *what)
{
    key_name key = arch_key(l, suffix);
    uint32_t u = 0;
    float f = neutral;
    bool b = false;
    int rc = eng_gguf_u32(l->g, key.s, &u);
    if (!rc)
        f = (float)u;
    else if (rc != -ENOENT && !eng_gguf_bool(l->g, key.s, &b))
        rc = 0, f = b;
    else if (rc != -ENOENT)
        rc = eng_gguf_f32(l->g, key.s, &f);
    if (rc != -ENOENT && (rc || f != neutral))
        return FAIL(l, -ENOTSUP, "key %s asks for something the forward pass lacks: %s not supported", key.s, what);
    return 0;
}

static int refuse_unknown_arithmetic(loader *l)
{
    static const eng_neutral_key common[] = {
        {"attention.clamp_kqv", 0, "clamped q, k and v are"},
        {"attention.causal", 1, "attention to later tokens is"},
        {"attention.temperature_length", 0, "scores scaled by position are"},
        {"attn_logit_softcapping", 0, "soft caps of attention scores are"},
        {"final_logit_softcapping", 0, "soft caps of logits are"},
        {"logit_scale", 1, "scaled logits are"},
        {"embedding_scale", 1, "scaled embeddings are"},
        {"residual_scale", 1, "scaled residuals are"},
        {"rope.scaling.alpha", 0, "RoPE scaling by alpha is"},
        {"rope.scaling.yarn_log_multiplier", 0, "another mscale of YaRN is"},
        {"rope.dimension_sections", 0, "rotation by sections is"},
        {NULL},
    };
    int rc = 0;
    for (const eng_neutral_key *k = common; k->key && !rc; k++)
        rc = refuse_unless_neutral(l, k->key, k->neutral, k->what);
    for (const eng_neutral_key *k = l->arch->neutral; k && k->key && !rc; k++)
        rc = refuse_unless_neutral(l, k->key, k->neutral, k->what);
    if (!rc && !l->arch->experts)
        rc = refuse_unless_neutral(l, "expert_count", 0, "mixtures of experts are");
    if (!rc && !l->arch->sliding_period)
        rc = refuse_unless_neutral(l, "attention.sliding_window", 0, "sliding windows are");
    return rc;
}

static int read_experts(loader *l)
{
    eng_model *m = l->m;
    int rc;
    if (!l->arch->experts)
        return count(l, "feed_forward_length", MAX_FF, 0, &m->n_ff);
    /* of a dense layer, which these models have none of */
    if ((rc = count(l, "expert_feed_forward_length", MAX_FF, 0, &m->n_ff_expert)) ||
        (rc = count(l, "feed_forward_length", MAX_FF, m->n_ff_expert, &m->n_ff)) ||
        (rc = count(l, "expert_count", MAX_EXPERTS, 0, &m->n_expert)) ||
        (rc = count(l, "expert_used_count", m->n_expert, 0, &m->n_expert_used)))
        return rc;
    float scale = 0;
    if ((rc = number(l, "expert_weights_scale", 0, &scale)))
        return rc;
    return scale == 0 || scale == 1
               ? 0
               : FAIL(l, -ENOTSUP, "key %s: scaled expert weights are not supported", arch_key(l, "expert_weights_scale").s);
}

/* Which layers slide, and by what scores are scaled. */
static int read_attention(loader *l)
{
    eng_model *m = l->m;
    uint32_t period = l->arch->sliding_period;
    key_name key = arch_key(l, "attention.sliding_window");
    int rc = period ? eng_gguf_u32(l->g, key.s, &m->window) : 0;
    if (rc && rc != -ENOENT)
        return FAIL(l, -EINVAL, "key %s is not a whole number", key.s);
    if (m->window && (rc = count(l, "attention.sliding_window_pattern", MAX_LAYERS, period, &period)))
        return rc;
    for (uint32_t i = 0; i < m->n_layer; i++) {
        bool slides = m->window && (period == 1 ? l->arch->sliding_period == 1 : i % period != period - 1);
        uint32_t skip = l->arch->no_rope_period;
        m->layers[i].window = slides ? m->window : 0;
        m->layers[i].rope = skip && i % skip == skip - 1    ? ENG_LAYER_NO_ROPE
                            : slides && l->arch->local_rope ? ENG_LAYER_ROPE_LOCAL
                                                            : ENG_LAYER_ROPE;
    }
    bool by_embd = l->arch->embd_scale_layers && m->n_layer == l->arch->embd_scale_layers;
    m->attn_scale = 0;
    if ((rc = number(l, "attention.scale", 0, &m->attn_scale)))
        return rc;
    if (m->attn_scale == 0)
        m->attn_scale = 1 / sqrtf(by_embd ? (float)(m->n_embd / m->n_head) : (float)m->head_dim);
    return 0;
}

static int read_hyper_parameters(loader *l)
{
    eng_model *m = l->m;
    int rc;
    if ((rc = count(l, "block_count", MAX_LAYERS, 0, &m->n_layer)) || (rc = count(l, "embedding_length", MAX_EMBD, 0, &m->n_embd)) ||
        (rc = read_experts(l)) || (rc = count(l, "context_length", MAX_CONTEXT, 0, &m->n_ctx_train)) ||
        (rc = positive(l, "attention.layer_norm_rms_epsilon", 0, &m->rms_eps)) || (rc = read_heads(l)) || (rc = read_rope(l)))
        return rc;
    m->act = l->arch->act;
    m->embd_scale = l->arch->scales_embedding ? sqrtf((float)m->n_embd) : 1;
    m->layers = calloc(m->n_layer, sizeof *m->layers);
    if (!m->layers)
        return FAIL(l, -ENOMEM, "no memory for a model of %" PRIu32 " layers", m->n_layer);
    if ((rc = read_attention(l)))
        return rc;
    return refuse_unknown_arithmetic(l);
}

/* ---- weights ---------------------------------------------------------------------------------------------------- */

static uint64_t dim(const eng_model *m, eng_dim d)
{
    switch (d) {
    case DIM_EMBD:
        return m->n_embd;
    case DIM_Q:
        return (uint64_t)m->n_head * m->head_dim;
    case DIM_KV:
        return (uint64_t)m->n_head_kv * m->head_dim;
    case DIM_QKV:
        return ((uint64_t)m->n_head + 2 * m->n_head_kv) * m->head_dim;
    case DIM_FF:
        return m->n_ff;
    case DIM_FF2:
        return 2 * (uint64_t)m->n_ff;
    case DIM_HEAD:
        return m->head_dim;
    case DIM_PAIRS:
        return m->rope_dim / 2;
    case DIM_EXPERTS:
        return m->n_expert;
    case DIM_EXPERT_FF:
        return m->n_ff_expert;
    case DIM_VOCAB:
        return m->n_vocab;
    default:
        return 1;
    }
}

/* A vector as float32: in place, or converted into memory of the model. */
static int load_vector(loader *l, const eng_tensor *t, const float **ret)
{
    const float *v = t->data;
    size_t n = (size_t)t->dims[0];
    if (eng_types[t->type].block != 1)
        return FAIL(l, -ENOTSUP, "tensor %s is of type %s; F32, F16 and BF16 are supported for it", SHOW(t->name), eng_types[t->type].name);
    if (t->type != ENG_F32) {
        float *copy = malloc(n * sizeof *copy);
        if (!copy)
            return FAIL(l, -ENOMEM, "no memory for the model's tensor %s", SHOW(t->name));
        l->m->owned[l->m->n_owned++] = copy;
        eng_dequantize(t->type, t->data, copy, n);
        v = copy;
    }
    for (size_t i = 0; i < n; i++)
        if (!isfinite(v[i]))
            return FAIL(l, -EINVAL, "tensor %s holds a value that is not finite (inf or NaN)", SHOW(t->name));
    *ret = v;
    return 0;
}

/* base: the eng_model or eng_layer that has the role's field. */
static int load_role(loader *l, const char *name, const eng_tensor_role *role, void *base)
{
    const eng_tensor *t = eng_gguf_tensor(l->g, name);
    if (!t)
        return role->optional ? 0 : FAIL(l, -EINVAL, "tensor %s is missing", name);
    uint64_t rows = dim(l->m, role->rows), cols = dim(l->m, role->cols), depth = dim(l->m, role->depth);
    if (t->dims[0] != cols || t->dims[1] != rows || t->dims[2] != depth || t->dims[3] != 1)
        return FAIL(l, -EINVAL,
                    "tensor %s has the shape %" PRIu64 " x %" PRIu64 " x %" PRIu64 " x %" PRIu64 "; by the model's keys it is %" PRIu64
                    " x %" PRIu64 " x %" PRIu64,
                    name, t->dims[0], t->dims[1], t->dims[2], t->dims[3], cols, rows, depth);
    l->used[t - eng_gguf_tensor_at(l->g, 0)] = true;
    void *field = (char *)base + role->field;
    if (role->rows == DIM_ONE)
        return load_vector(l, t, field);
    *(eng_weight *)field = (eng_weight){t->data, t->row_bytes, (uint32_t)rows, (uint32_t)cols, t->type};
    return 0;
}

/* Every tensor has a part in the computation; one without shows that the model is another one than we know. */
static int refuse_unused(loader *l)
{
    for (size_t i = 0; i < eng_gguf_n_tensors(l->g); i++) {
        eng_str name = eng_gguf_tensor_at(l->g, i)->name;
        if (l->used[i])
            continue;
        if (name.n > 5 && !memcmp(name.s + name.n - 5, ".bias", 5))
            return FAIL(l, -ENOTSUP, "tensor %s: biases are not supported in architecture %s", SHOW(name), l->arch->name);
        if (name.n >= 5 && !memcmp(name.s, "rope_", 5))
            return FAIL(l, -ENOTSUP, "tensor %s: RoPE scaling by frequency factors is not supported in architecture %s", SHOW(name),
                        l->arch->name);
        return FAIL(l, -ENOTSUP, "tensor %s is not part of architecture %s as supported", SHOW(name), l->arch->name);
    }
    return 0;
}

static eng_weight row_slice(const eng_weight *w, uint32_t from, uint32_t rows)
{
    return (eng_weight){(const char *)w->data + (size_t)from * w->row_bytes, w->row_bytes, rows, w->cols, w->type};
}

static void split_fused(const eng_model *m, eng_layer *w)
{
    uint32_t q = m->n_head * m->head_dim, kv = m->n_head_kv * m->head_dim;
    if (w->wqkv.data) {
        w->wq = row_slice(&w->wqkv, 0, q);
        w->wk = row_slice(&w->wqkv, q, kv);
        w->wv = row_slice(&w->wqkv, q + kv, kv);
    }
    if (w->w_gate_up.data) {
        w->w_gate = row_slice(&w->w_gate_up, 0, m->n_ff);
        w->w_up = row_slice(&w->w_gate_up, m->n_ff, m->n_ff);
    }
}

/* The divisors of frequencies: all of them positive, long and short ones both or none. */
static int check_rope_factors(loader *l)
{
    const eng_rope_keys *r = &l->m->rope;
    const float *all[] = {r->factors, r->factors_long, r->factors_short};
    for (int k = 0; k < 3; k++)
        for (uint32_t i = 0; all[k] && i < l->m->rope_dim / 2; i++)
            if (!(all[k][i] > 0))
                return FAIL(l, -EINVAL, "a factor of RoPE frequencies is not above 0 (rope_freqs or rope_factors)");
    if (!r->factors_long != !r->factors_short)
        return FAIL(l, -EINVAL, "tensor rope_factors_%s.weight is missing", r->factors_long ? "short" : "long");
    if (r->factors && r->factors_long)
        return FAIL(l, -ENOTSUP, "tensor rope_freqs.weight beside rope_factors_long.weight is not supported");
    if (r->scaling == ENG_SCALING_LONGROPE && !r->factors_long)
        return FAIL(l, -EINVAL, "tensor rope_factors_long.weight is missing, which longrope needs");
    return 0;
}

static int load_weights(loader *l)
{
    eng_model *m = l->m;
    const eng_tensor *embd = eng_gguf_tensor(l->g, "token_embd.weight");
    if (embd && embd->dims[1] > INT32_MAX)
        return FAIL(l, -EINVAL, "tensor token_embd.weight has %" PRIu64 " rows", embd->dims[1]);
    m->n_vocab = embd ? (uint32_t)embd->dims[1] : 0;
    m->owned = calloc(eng_gguf_n_tensors(l->g) + 1, sizeof *m->owned);
    l->used = calloc(eng_gguf_n_tensors(l->g) + 1, sizeof *l->used);
    if (!m->owned || !l->used)
        return FAIL(l, -ENOMEM, "no memory for a model of %" PRIu32 " layers", m->n_layer);
    int rc = 0;
    for (const eng_tensor_role *role = l->arch->top; role->name && !rc; role++)
        rc = load_role(l, role->name, role, m);
    if (!rc)
        rc = check_rope_factors(l);
    for (uint32_t i = 0; i < m->n_layer && !rc; i++) {
        for (const eng_tensor_role *role = l->arch->layer; role->name && !rc; role++) {
            char name[MAX_TENSOR_NAME];
            snprintf(name, sizeof name, "blk.%" PRIu32 ".%s", i, role->name);
            rc = load_role(l, name, role, &m->layers[i]);
        }
        split_fused(m, &m->layers[i]);
    }
    if (!m->output.data)
        m->output = m->tok_embd;
    return rc ? rc : refuse_unused(l);
}

static void count_weights(eng_model *m)
{
    uint64_t by_type[ENG_TYPE_COUNT] = {0};
    eng_type most = 0;
    for (size_t i = 0; i < eng_gguf_n_tensors(m->file); i++) {
        const eng_tensor *t = eng_gguf_tensor_at(m->file, i);
        m->n_params += t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3];
        m->bytes += t->bytes;
        by_type[t->type] += t->bytes;
    }
    for (int k = 1; k < ENG_TYPE_COUNT; k++)
        if (by_type[k] > by_type[most])
            most = (eng_type)k;
    m->type = eng_types[most].name;
}

/* ---- open, close ------------------------------------------------------------------------------------------------ */

static int find_arch(loader *l)
{
    eng_str name;
    char known[32 * N_ARCHS] = "";
    int rc = eng_gguf_str(l->g, "general.architecture", &name);
    if (rc)
        return FAIL(l, -EINVAL, "key general.architecture %s", rc == -ENOENT ? "is missing" : "is not a string");
    for (size_t i = 0; i < N_ARCHS; i++) {
        if (strlen(archs[i]->name) == name.n && !memcmp(archs[i]->name, name.s, name.n)) {
            l->arch = archs[i];
            return 0;
        }
        strcat(strcat(known, " "), archs[i]->name);
    }
    return FAIL(l, -ENOTSUP, "the model's architecture is %s, which is not supported (general.architecture; supported:%s)", SHOW(name),
                known);
}

/* The name for people: general.name, else the file's. Fit to print whatever is in there. */
static int read_names(loader *l, const char *path)
{
    char name[256];
    eng_str s;
    if (eng_gguf_str(l->g, "general.name", &s) || !s.n) {
        const char *slash = strrchr(path, '/');
        s.s = slash ? slash + 1 : path;
        s.n = strlen(s.s);
    }
    l->m->name = strdup(eng_printable(s.s, s.n, name, sizeof name));
    l->m->architecture = strdup(l->arch->name);
    return l->m->name && l->m->architecture ? 0 : FAIL(l, -ENOMEM, "no memory to open the model");
}

/* Others render it; a model whose template cannot be one is refused here, where its name can be said. */
static int check_chat_template(loader *l)
{
    eng_str s;
    int rc = eng_gguf_str(l->g, "tokenizer.chat_template", &s);
    if (rc == -EINVAL)
        return FAIL(l, -EINVAL, "key tokenizer.chat_template is not a string");
    if (!rc && (!eng_utf8_valid(s.s, s.n) || memchr(s.s, 0, s.n)))
        return FAIL(l, -EINVAL, "key tokenizer.chat_template is not UTF-8 without NUL");
    return 0;
}

int eng_model_open(const char *path, eng_model **ret, char *err, size_t errlen)
{
    eng_gguf *g;
    int rc = eng_gguf_open(path, &g, err, errlen);
    return rc ? rc : eng_model_from(g, path, ret, err, errlen);
}

int eng_model_from(eng_gguf *g, const char *path, eng_model **ret, char *err, size_t errlen)
{
    loader l = {.err = err, .errlen = errlen, .g = g};
    int rc;
    l.m = calloc(1, sizeof *l.m);
    if (!l.m) {
        eng_gguf_close(g);
        return FAIL(&l, -ENOMEM, "no memory to open the model");
    }
    l.m->file = g;
    if ((rc = find_arch(&l)) || (rc = read_hyper_parameters(&l)) || (rc = load_weights(&l)) || (rc = check_chat_template(&l)) ||
        (rc = read_names(&l, path)))
        goto cleanup;
    count_weights(l.m);
    *ret = l.m;
    l.m = NULL;
cleanup:
    free(l.used);
    eng_model_close(l.m);
    return rc;
}

void eng_model_close(eng_model *m)
{
    if (!m)
        return;
    for (size_t i = 0; i < m->n_owned; i++)
        free(m->owned[i]);
    free(m->owned);
    free(m->layers);
    free((char *)m->architecture);
    free((char *)m->name);
    eng_gguf_close(m->file);
    free(m);
}

static uint64_t weight_bytes(const eng_weight *w)
{
    return w->data ? (uint64_t)w->rows * w->row_bytes : 0;
}

uint64_t eng_model_step_bytes(const eng_model *m)
{
    uint64_t n = weight_bytes(&m->output);
    for (uint32_t i = 0; i < m->n_layer; i++) {
        const eng_layer *l = &m->layers[i];
        n += weight_bytes(&l->wq) + weight_bytes(&l->wk) + weight_bytes(&l->wv) + weight_bytes(&l->wo) + weight_bytes(&l->w_router);
        n += (weight_bytes(&l->w_gate) + weight_bytes(&l->w_up) + weight_bytes(&l->w_down)) * (l->w_router.data ? m->n_expert_used : 1);
    }
    return n;
}
