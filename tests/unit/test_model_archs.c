/* What model.c makes of the architectures other than llama: roles, shapes, windows, RoPE keys; and that broken headers of such files are
 * refused or give weights that lie in the file. The models are those of tests/golden/archs. */
#include "gguf_writer.h"
#include "model.h"
#include "support.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char err[512];

static const char *const files[] = {"archs/tiny-llama3",   "archs/tiny-yarn", "archs/tiny-smollm3",       "archs/tiny-qwen3",
                                    "archs/tiny-qwen3moe", "archs/tiny-phi3", "archs/tiny-gemma3-linear", "gguf/tiny-qwen2-q8_0"};
enum { N_FILES = sizeof files / sizeof *files };

static const char *path_of(const char *name)
{
    static char path[128];
    snprintf(path, sizeof path, "golden/%s.gguf", name);
    return t_path(path);
}

static eng_model *opened(const char *name)
{
    eng_model *m = NULL;
    ck_assert_msg(eng_model_open(path_of(name), &m, err, sizeof err) == 0, "%s: %s", name, err);
    return m;
}

static const void *data(const eng_model *m, const char *name)
{
    const eng_tensor *t = eng_gguf_tensor(m->file, name);
    ck_assert_msg(t != NULL, "%s", name);
    return t->data;
}

START_TEST(test_qwen2)
{
    eng_model *m = opened("gguf/tiny-qwen2-q8_0");
    ck_assert_int_eq(m->rope_pairs, ENG_ROPE_HALVES);
    ck_assert_ptr_eq(m->layers[1].bq, data(m, "blk.1.attn_q.bias"));
    ck_assert_ptr_eq(m->layers[1].bk, data(m, "blk.1.attn_k.bias"));
    ck_assert_ptr_eq(m->layers[1].bv, data(m, "blk.1.attn_v.bias"));
    ck_assert(!m->layers[1].q_norm && !m->window && m->embd_scale == 1 && m->act == ENG_SILU);
    eng_model_close(m);
}
END_TEST

START_TEST(test_qwen3)
{
    eng_model *m = opened("archs/tiny-qwen3");
    ck_assert_int_eq(m->rope_pairs, ENG_ROPE_HALVES);
    ck_assert_ptr_eq(m->layers[2].q_norm, data(m, "blk.2.attn_q_norm.weight"));
    ck_assert_ptr_eq(m->layers[2].k_norm, data(m, "blk.2.attn_k_norm.weight"));
    ck_assert(!m->layers[2].bq && !m->layers[2].attn_post_norm && m->head_dim == 32 && m->n_embd == 32);
    eng_model_close(m);

    m = opened("archs/tiny-qwen3moe");
    const eng_layer *l = &m->layers[1];
    ck_assert(m->n_expert == 8 && m->n_expert_used == 3 && m->n_ff_expert == 32);
    ck_assert_ptr_eq(l->w_router.data, data(m, "blk.1.ffn_gate_inp.weight"));
    ck_assert(l->w_router.rows == 8 && l->w_router.cols == 32);
    ck_assert_ptr_eq(l->w_gate.data, data(m, "blk.1.ffn_gate_exps.weight"));
    ck_assert_ptr_eq(l->w_up.data, data(m, "blk.1.ffn_up_exps.weight"));
    ck_assert_ptr_eq(l->w_down.data, data(m, "blk.1.ffn_down_exps.weight"));
    ck_assert(l->w_gate.rows == 32 && l->w_down.rows == 32 && l->w_gate.row_bytes == 64);
    eng_model_close(m);
}
END_TEST

START_TEST(test_phi3)
{
    eng_model *m = opened("archs/tiny-phi3");
    const eng_layer *l = &m->layers[2];
    const char *qkv = data(m, "blk.2.attn_qkv.weight"), *up = data(m, "blk.2.ffn_up.weight");
    ck_assert_ptr_eq(l->wq.data, qkv);
    ck_assert_ptr_eq(l->wk.data, qkv + (size_t)64 * 128); /* rows of 64 halves */
    ck_assert_ptr_eq(l->wv.data, qkv + (size_t)96 * 128);
    ck_assert(l->wq.rows == 64 && l->wk.rows == 32 && l->wv.rows == 32 && l->wv.cols == 64 && l->wv.row_bytes == 128);
    ck_assert_ptr_eq(l->w_gate.data, up);
    ck_assert_ptr_eq(l->w_up.data, up + (size_t)48 * 128);
    ck_assert(l->w_gate.rows == 48 && l->w_up.rows == 48);
    for (uint32_t i = 0; i < m->n_layer; i++)
        ck_assert(m->layers[i].window == 24 && m->layers[i].rope == ENG_LAYER_ROPE);
    ck_assert(m->rope_dim == 24 && m->head_dim == 32 && m->rope.orig_ctx == 256 && m->rope.attn_factor == 1.19f);
    ck_assert_ptr_eq(m->rope.factors_long, data(m, "rope_factors_long.weight"));
    ck_assert_ptr_eq(m->rope.factors_short, data(m, "rope_factors_short.weight"));
    eng_model_close(m);
}
END_TEST

START_TEST(test_gemma3)
{
    eng_model *m = opened("archs/tiny-gemma3-linear");
    for (uint32_t i = 0; i < m->n_layer; i++) {
        bool global = i == 5;
        ck_assert_uint_eq(m->layers[i].window, global ? 0 : 8);
        ck_assert_int_eq(m->layers[i].rope, global ? ENG_LAYER_ROPE : ENG_LAYER_ROPE_LOCAL);
    }
    ck_assert(m->window == 8 && m->embd_scale == sqrtf(32) && m->act == ENG_GELU_TANH && m->attn_scale == 0.25f);
    ck_assert(m->rope.factor == 8 && m->rope.scaling == ENG_SCALING_LINEAR && m->rope.base_local == 10000 && m->rope_base == 1e6f);
    ck_assert_ptr_eq(m->layers[3].attn_post_norm, data(m, "blk.3.post_attention_norm.weight"));
    ck_assert_ptr_eq(m->layers[3].ffn_post_norm, data(m, "blk.3.post_ffw_norm.weight"));
    eng_model_close(m);
}
END_TEST

START_TEST(test_llama_rope)
{
    eng_model *m = opened("archs/tiny-llama3");
    ck_assert_ptr_eq(m->rope.factors, data(m, "rope_freqs.weight"));
    eng_model_close(m);
    m = opened("archs/tiny-yarn");
    ck_assert(m->rope.scaling == ENG_SCALING_YARN && m->rope.factor == 4 && m->rope.orig_ctx == 2048 && m->rope.ext_factor == 1);
    ck_assert(m->rope.beta_fast == 32 && m->rope.beta_slow == 1 && m->n_ctx_train == 8192);
    eng_model_close(m);
    m = opened("archs/tiny-smollm3");
    for (uint32_t i = 0; i < m->n_layer; i++)
        ck_assert_int_eq(m->layers[i].rope, i == 3 ? ENG_LAYER_NO_ROPE : ENG_LAYER_ROPE);
    eng_model_close(m);
}
END_TEST

/* ---- files with a changed key ------------------------------------------------------------------------------------ */

enum { PAD = 32 }; /* tensor data stay where they are, relative to their alignment */

typedef struct {
    uint8_t *b;
    size_t n;
} bytes;

static bytes read_file(const char *name)
{
    bytes f;
    f.b = (uint8_t *)t_read(path_of(name), &f.n);
    return f;
}

/* Puts another key (the writer's) in front of the file's, and one of nothing but length. */
static bytes with_key(const char *name, w_gguf *w)
{
    bytes f = read_file(name);
    size_t n = w->keys.n, fill = PAD - (n + 8 + 4 + 4 + 8) % PAD;
    uint64_t n_keys;
    char filler[PAD + 1];
    memset(filler, 'x', fill);
    filler[fill] = 0;
    w_key_str(w, "fill", filler);
    ck_assert_uint_eq(w->keys.n % PAD, 0);
    f.b = realloc(f.b, f.n + w->keys.n);
    ck_assert_ptr_nonnull(f.b);
    memmove(f.b + 24 + w->keys.n, f.b + 24, f.n - 24);
    memcpy(f.b + 24, w->keys.b, w->keys.n);
    memcpy(&n_keys, f.b + 16, 8);
    n_keys += w->n_keys;
    memcpy(f.b + 16, &n_keys, 8);
    f.n += w->keys.n;
    free(w->keys.b);
    *w = (w_gguf){0};
    return f;
}

/* Overwrites the 4-byte value of a key. */
static bytes with_value(const char *name, const char *key, uint32_t value)
{
    bytes f = read_file(name);
    uint8_t *at = memmem(f.b, f.n, key, strlen(key));
    ck_assert_msg(at != NULL, "%s", key);
    memcpy(at + strlen(key) + 4, &value, 4);
    return f;
}

static int open_bytes(bytes f, eng_model **ret)
{
    char path[64];
    int fd = w_file(f.b, f.n, path);
    err[0] = 0;
    int rc = eng_model_open(path, ret, err, sizeof err);
    close(fd);
    free(f.b);
    return rc;
}

static void refused(bytes f, const char *word)
{
    eng_model *m = NULL;
    ck_assert_msg(open_bytes(f, &m) < 0 && !m, "accepted, though %s", word);
    ck_assert_msg(strstr(err, word), "\"%s\" has no \"%s\"", err, word);
}

static eng_model *accepted(bytes f)
{
    eng_model *m = NULL;
    int rc = open_bytes(f, &m);
    ck_assert_msg(rc == 0 && m, "%s", err);
    return m;
}

static bytes f32_key(const char *name, const char *key, float v)
{
    w_gguf w = {0};
    w_key_f32(&w, key, v);
    return with_key(name, &w);
}

static bytes u32_key(const char *name, const char *key, uint32_t v)
{
    w_gguf w = {0};
    w_key_u32(&w, key, v);
    return with_key(name, &w);
}

START_TEST(test_experts_refused)
{
    static const char file[] = "archs/tiny-qwen3moe";
    w_gguf w = {0};
    refused(with_value(file, "qwen3moe.expert_used_count", 9), "qwen3moe.expert_used_count is 9; 1 to 8");
    refused(with_value(file, "qwen3moe.expert_used_count", 0), "qwen3moe.expert_used_count");
    refused(with_value(file, "qwen3moe.expert_count", 16), "ffn_gate_inp.weight has the shape");
    refused(with_value(file, "qwen3moe.expert_count", 4000000000), "qwen3moe.expert_count");
    refused(with_value(file, "qwen3moe.expert_feed_forward_length", 64), "ffn_gate_exps.weight has the shape 32 x 32 x 8");
    refused(u32_key(file, "qwen3moe.expert_shared_count", 1), "shared experts");
    refused(u32_key(file, "qwen3moe.expert_gating_func", 2), "gating");
    refused(f32_key(file, "qwen3moe.expert_weights_scale", 2), "expert_weights_scale");
    w_key(&w, "qwen3moe.expert_weights_norm", W_BOOL, "", 1);
    refused(with_key(file, &w), "normalised");
    w_key(&w, "qwen3moe.expert_weights_norm", W_BOOL, "\1", 1);
    eng_model_close(accepted(with_key(file, &w)));
    eng_model_close(accepted(f32_key(file, "qwen3moe.expert_weights_scale", 1)));
    refused(u32_key("archs/tiny-qwen3", "qwen3.expert_count", 8), "mixtures of experts");
}
END_TEST

START_TEST(test_windows)
{
    eng_model *m = accepted(u32_key("archs/tiny-gemma3-linear", "gemma3.attention.sliding_window_pattern", 2));
    for (uint32_t i = 0; i < m->n_layer; i++)
        ck_assert_uint_eq(m->layers[i].window, i % 2 ? 0 : 8);
    eng_model_close(m);
    m = accepted(u32_key("archs/tiny-gemma3-linear", "gemma3.attention.sliding_window_pattern", 1)); /* every layer is a global one */
    ck_assert_uint_eq(m->layers[0].window, 0);
    eng_model_close(m);
    m = accepted(with_value("archs/tiny-phi3", "phi3.attention.sliding_window", 0));
    ck_assert(m->window == 0 && m->layers[0].window == 0);
    eng_model_close(m);
    refused(u32_key("gguf/tiny-qwen2-q8_0", "qwen2.attention.sliding_window", 64), "sliding windows");
    refused(u32_key("archs/tiny-gemma3-linear", "gemma3.attention.sliding_window_pattern", 0), "sliding_window_pattern");
    refused(f32_key("archs/tiny-gemma3-linear", "gemma3.final_logit_softcapping", 30), "soft caps of logits");
    refused(f32_key("archs/tiny-gemma3-linear", "gemma3.attn_logit_softcapping", 50), "soft caps of attention");
    m = accepted(f32_key("archs/tiny-gemma3-linear", "gemma3.attention.scale", 0.5f));
    ck_assert(m->attn_scale == 0.5f);
    eng_model_close(m);
    m = accepted(f32_key("archs/tiny-gemma3-linear", "gemma3.rope.freq_base_swa", 500));
    ck_assert(m->rope.base_local == 500 && m->rope_base == 1e6f);
    eng_model_close(m);
}
END_TEST

START_TEST(test_scaling_keys)
{
    static const char yarn[] = "archs/tiny-yarn", phi[] = "archs/tiny-phi3", llama[] = "archs/tiny-llama3";
    w_gguf w = {0};
    eng_model *m = accepted(f32_key(yarn, "llama.rope.scaling.yarn_beta_fast", 16));
    ck_assert(m->rope.beta_fast == 16 && m->rope.beta_slow == 1);
    eng_model_close(m);
    refused(f32_key(yarn, "llama.rope.scaling.yarn_attn_factor", 1), "yarn_attn_factor is 1; only YaRN's own attention factor, 1.138");
    eng_model_close(accepted(f32_key(yarn, "llama.rope.scaling.yarn_attn_factor", 0.1f * logf(4) + 1)));
    refused(f32_key(yarn, "llama.rope.scaling.yarn_beta_slow", 0), "yarn_beta_slow");
    w_key_str(&w, "phi3.rope.scaling.type", "longrope");
    eng_model_close(accepted(with_key(phi, &w)));
    w_key_str(&w, "phi3.rope.scaling.type", "longrope");
    w_key_f32(&w, "phi3.rope.scaling.factor", 4);
    refused(with_key(phi, &w), "phi3.rope.scaling.factor is set beside longrope");
    m = accepted(f32_key(llama, "llama.rope.scale_linear", 2));
    ck_assert(m->rope.scaling == ENG_SCALING_LINEAR && m->rope.factor == 2);
    eng_model_close(m);
    for (int i = 0; i < 2; i++) { /* its last tensor: rope_freqs */
        bytes f = read_file(llama);
        memcpy(f.b + f.n - 32, i ? &(float){NAN} : &(float){0}, 4);
        refused(f, i ? "not finite" : "not above 0");
    }
}
END_TEST

/* ---- broken headers ---------------------------------------------------------------------------------------------- */

static void inside(const eng_model *m, const eng_weight *w, uint32_t depth)
{
    if (!w->data)
        return;
    const uint8_t *first = eng_gguf_tensor_at(m->file, 0)->data, *p = w->data;
    size_t cells = (size_t)w->cols / eng_types[w->type].block * eng_types[w->type].bytes;
    ck_assert(w->cols % eng_types[w->type].block == 0 && w->row_bytes == cells);
    ck_assert(p >= first - eng_gguf_size(m->file) && (uint64_t)w->row_bytes * w->rows * depth <= eng_gguf_size(m->file));
}

START_TEST(test_mutations)
{
    size_t opened_ok = 0, base;
    bytes f = read_file(files[_i]);
    eng_gguf *g;
    ck_assert_int_eq(eng_gguf_open_memory(f.b, f.n, &g, err, sizeof err), 0);
    base = (size_t)((const uint8_t *)eng_gguf_tensor_at(g, 0)->data - f.b);
    eng_gguf_close(g);
    t_rng rng = t_seed(1);
    for (int k = 0; k < 400; k++) {
        eng_model *m = NULL;
        bytes c = {malloc(f.n), f.n};
        ck_assert_ptr_nonnull(c.b);
        memcpy(c.b, f.b, f.n);
        size_t at = t_u64(&rng) % base;
        c.b[at] = (uint8_t)(t_u64(&rng) & 1 ? t_u64(&rng) : c.b[at] ^ (1u << t_u64(&rng) % 8));
        if (open_bytes(c, &m)) {
            ck_assert(!m && err[0]);
            continue;
        }
        opened_ok++;
        uint32_t depth = m->n_expert ? m->n_expert : 1;
        for (uint32_t i = 0; i < m->n_layer; i++) {
            const eng_layer *l = &m->layers[i];
            const eng_weight *dense[] = {&l->wq, &l->wk, &l->wv, &l->wo, &l->w_router};
            const eng_weight *deep[] = {&l->w_gate, &l->w_up, &l->w_down};
            for (size_t j = 0; j < 5; j++)
                inside(m, dense[j], 1);
            for (size_t j = 0; j < 3; j++)
                inside(m, deep[j], depth);
            ck_assert(l->wq.rows == m->n_head * m->head_dim && l->wv.rows == m->n_head_kv * m->head_dim && l->wq.cols == m->n_embd);
        }
        eng_model_close(m);
    }
    ck_assert_uint_gt(opened_ok, 20);
    free(f.b);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("model archs");
    TCase *c = tcase_create("model archs");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, test_qwen2);
    tcase_add_test(c, test_qwen3);
    tcase_add_test(c, test_phi3);
    tcase_add_test(c, test_gemma3);
    tcase_add_test(c, test_llama_rope);
    tcase_add_test(c, test_experts_refused);
    tcase_add_test(c, test_windows);
    tcase_add_test(c, test_scaling_keys);
    tcase_add_loop_test(c, test_mutations, 0, N_FILES);
    suite_add_tcase(s, c);
    return t_run(s);
}
