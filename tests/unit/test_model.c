#include "gguf_writer.h"
#include "model.h"
#include "support.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char err[512];

/* ---- a small llama whose parts can be changed ------------------------------------------------------------------- */

enum { EMBD = 32, HEADS = 4, KV_HEADS = 2, HEAD = 8, FF = 64, VOCAB = 10, LAYERS = 2 };

typedef struct {
    const char *without;             /* key or tensor that is left out */
    uint32_t matrix_type, norm_type; /* file ids */
    uint32_t head;                   /* 0: HEAD */
    uint32_t wide;                   /* every dimension but the vocabulary's times this; 0: 1 */
    bool bad_norm;
} plan;

/* Elements and bytes of a block by file id, as ggml.h has them. */
static size_t row_bytes(uint32_t type, uint64_t cols)
{
    static const struct {
        uint32_t block, bytes;
    } of[] = {[0] = {1, 4},      [1] = {1, 2},      [2] = {32, 18},   [3] = {32, 20},    [6] = {32, 22},
              [7] = {32, 24},    [8] = {32, 34},    [10] = {256, 84}, [11] = {256, 110}, [12] = {256, 144},
              [13] = {256, 176}, [14] = {256, 210}, [20] = {32, 18},  [23] = {256, 136}, [30] = {1, 2}};
    return cols / of[type].block * of[type].bytes;
}

static void tensor(w_gguf *w, const plan *p, const char *name, uint64_t cols, uint64_t rows)
{
    static const float one = 1, nan_value = NAN;
    uint32_t type = rows ? p->matrix_type : p->norm_type;
    if (p->without && !strcmp(p->without, name))
        return;
    size_t bytes = row_bytes(type, cols) * (rows ? rows : 1);
    uint8_t *b = calloc(bytes, 1);
    if (!rows && type == 0)
        for (uint64_t i = 0; i < cols; i++)
            memcpy(b + 4 * i, p->bad_norm && i == cols - 1 ? &nan_value : &one, 4);
    if (!rows && type == 1)
        for (uint64_t i = 0; i < cols; i++)
            memcpy(b + 2 * i, &(uint16_t){(uint16_t)(p->bad_norm ? 0x7c00 : 0x3800)}, 2); /* inf, 0.5 */
    if (!rows && type == 30)
        for (uint64_t i = 0; i < cols; i++)
            memcpy(b + 2 * i, &(uint16_t){0x3fc0}, 2); /* 1.5 */
    w_tensor(w, name, type, rows ? 2 : 1, (uint64_t[]){cols, rows}, b, bytes);
    free(b);
}

static void put_u32(w_gguf *w, const plan *p, const char *key, uint32_t v)
{
    if (!p->without || strcmp(p->without, key))
        w_key_u32(w, key, v);
}

static w_gguf llama(plan p)
{
    w_gguf w = {0};
    uint32_t f = p.wide ? p.wide : 1, head = (p.head ? p.head : HEAD) * f, embd = EMBD * f, ff = FF * f;
    w_key_str(&w, "general.architecture", "llama");
    put_u32(&w, &p, "llama.block_count", LAYERS);
    put_u32(&w, &p, "llama.embedding_length", embd);
    put_u32(&w, &p, "llama.feed_forward_length", ff);
    put_u32(&w, &p, "llama.context_length", 128);
    put_u32(&w, &p, "llama.attention.head_count", HEADS);
    put_u32(&w, &p, "llama.attention.head_count_kv", KV_HEADS);
    if (!p.without || strcmp(p.without, "llama.attention.layer_norm_rms_epsilon"))
        w_key_f32(&w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    tensor(&w, &p, "token_embd.weight", embd, VOCAB);
    tensor(&w, &p, "output_norm.weight", embd, 0);
    for (int i = 0; i < LAYERS; i++) {
        const struct {
            const char *name;
            uint32_t cols, rows;
        } part[] = {{"attn_norm", embd, 0},
                    {"attn_q", embd, HEADS * head},
                    {"attn_k", embd, KV_HEADS * head},
                    {"attn_v", embd, KV_HEADS * head},
                    {"attn_output", HEADS * head, embd},
                    {"ffn_norm", embd, 0},
                    {"ffn_gate", embd, ff},
                    {"ffn_up", embd, ff},
                    {"ffn_down", ff, embd}};
        for (size_t k = 0; k < sizeof part / sizeof *part; k++) {
            char name[64];
            snprintf(name, sizeof name, "blk.%d.%s.weight", i, part[k].name);
            tensor(&w, &p, name, part[k].cols, part[k].rows);
        }
    }
    return w;
}

static int open_writer(w_gguf *w, eng_model **ret)
{
    size_t n;
    char path[64];
    uint8_t *b = w_finish(w, &n);
    int fd = w_file(b, n, path);
    err[0] = 0;
    int rc = eng_model_open(path, ret, err, sizeof err);
    close(fd);
    free(b);
    return rc;
}

static eng_model *accepted(w_gguf w)
{
    eng_model *m = NULL;
    int rc = open_writer(&w, &m);
    ck_assert_msg(rc == 0 && m, "%s", err);
    return m;
}

static void refused(w_gguf w, const char *word)
{
    eng_model *m = NULL;
    ck_assert_msg(open_writer(&w, &m) < 0 && !m, "accepted, though %s", word);
    ck_assert_msg(strstr(err, word), "\"%s\" has no \"%s\"", err, word);
}

/* ---- real files -------------------------------------------------------------------------------------------------- */

static eng_model *open_path(const char *path)
{
    eng_model *m = NULL;
    ck_assert_msg(eng_model_open(path, &m, err, sizeof err) == 0, "%s", err);
    return m;
}

static void same_data(const eng_model *m, const char *name, eng_weight w)
{
    const eng_tensor *t = eng_gguf_tensor(m->file, name);
    ck_assert_msg(t && t->data == w.data && t->type == w.type && t->row_bytes == w.row_bytes && t->dims[0] == w.cols &&
                      t->dims[1] == w.rows,
                  "%s", name);
}

/* Hyper-parameters as tests/golden/make/tiny.py makes the file. */
START_TEST(test_tiny_f32)
{
    eng_model *m = open_path(t_path("golden/gguf/tiny-llama-f32.gguf"));
    ck_assert_str_eq(m->architecture, "llama");
    ck_assert_str_eq(m->name, "tiny llama");
    ck_assert_str_eq(m->type, "F32");
    ck_assert(m->n_vocab == 276 && m->n_embd == 64 && m->n_layer == 3 && m->n_head == 8 && m->n_head_kv == 2 && m->head_dim == 8);
    ck_assert(m->n_ff == 160 && m->n_ctx_train == 256 && m->rms_eps == 1e-5f && m->rope_base == 10000 && m->rope_dim == 8);
    ck_assert_int_eq(m->rope_pairs, ENG_ROPE_ADJACENT);
    ck_assert_ptr_eq(m->output.data, m->tok_embd.data);
    same_data(m, "token_embd.weight", m->tok_embd);
    const eng_layer *l = &m->layers[1];
    same_data(m, "blk.1.attn_q.weight", l->wq);
    same_data(m, "blk.1.attn_k.weight", l->wk);
    same_data(m, "blk.1.attn_v.weight", l->wv);
    same_data(m, "blk.1.attn_output.weight", l->wo);
    same_data(m, "blk.1.ffn_gate.weight", l->w_gate);
    same_data(m, "blk.1.ffn_up.weight", l->w_up);
    same_data(m, "blk.1.ffn_down.weight", l->w_down);
    ck_assert_ptr_eq(l->attn_norm, eng_gguf_tensor(m->file, "blk.1.attn_norm.weight")->data);
    ck_assert_ptr_eq(l->ffn_norm, eng_gguf_tensor(m->file, "blk.1.ffn_norm.weight")->data);
    ck_assert_ptr_eq(m->output_norm, eng_gguf_tensor(m->file, "output_norm.weight")->data);
    eng_model_close(m);
}
END_TEST

START_TEST(test_tiny_q8_0)
{
    eng_model *m = open_path(t_path("golden/gguf/tiny-llama-q8_0.gguf"));
    ck_assert_str_eq(m->type, "Q8_0");
    ck_assert(m->n_head == 4 && m->n_head_kv == 4 && m->head_dim == 16 && m->n_ff == 192 && m->rope_base == 500000);
    ck_assert_ptr_ne(m->output.data, m->tok_embd.data);
    same_data(m, "output.weight", m->output);
    ck_assert(m->layers[2].w_down.cols == 192 && m->layers[2].w_down.rows == 64 && m->layers[2].w_down.row_bytes == 192 / 32 * 34);
    eng_model_close(m);
}
END_TEST

START_TEST(test_smollm2)
{
    if (!t_smollm2()) {
        puts("skipped: RETRIEVALD_SMOLLM2 is not set");
        return;
    }
    eng_model *m = open_path(t_smollm2());
    ck_assert_str_eq(m->name, "Smollm2 135M 8k Lc100K Mix1 Ep2");
    ck_assert_str_eq(m->type, "Q4_1");
    ck_assert_uint_eq(m->n_params, 134515008); /* as its model card says */
    ck_assert(m->n_vocab == 49152 && m->n_embd == 576 && m->n_layer == 30 && m->n_head == 9 && m->n_head_kv == 3 && m->head_dim == 64);
    ck_assert(m->n_ff == 1536 && m->n_ctx_train == 8192 && m->rope_base == 100000 && m->rms_eps == 9.999999747378752e-06f);
    ck_assert(m->tok_embd.type == ENG_Q8_0 && m->output.data == m->tok_embd.data && m->layers[29].wv.type == ENG_Q4_1);
    ck_assert_uint_eq(m->n_owned, 0);
    eng_model_close(m);
}
END_TEST

START_TEST(test_other_architecture)
{
    eng_model *m = NULL;
    w_gguf w = {0};
    w_key_str(&w, "general.architecture", "jamba");
    ck_assert_int_eq(open_writer(&w, &m), -ENOTSUP);
    ck_assert(!m && strstr(err, "jamba") && strstr(err, "llama") && strstr(err, "gemma3"));
}
END_TEST

/* ---- what is accepted, and how it is understood ------------------------------------------------------------------ */

START_TEST(test_types)
{
    static const struct {
        uint32_t file_id;
        eng_type type;
    } types[] = {{0, ENG_F32},   {1, ENG_F16},   {30, ENG_BF16}, {8, ENG_Q8_0},    {2, ENG_Q4_0},
                 {3, ENG_Q4_1},  {6, ENG_Q5_0},  {7, ENG_Q5_1},  {10, ENG_Q2_K},   {11, ENG_Q3_K},
                 {12, ENG_Q4_K}, {13, ENG_Q5_K}, {14, ENG_Q6_K}, {20, ENG_IQ4_NL}, {23, ENG_IQ4_XS}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        const uint32_t wide = 8; /* rows of 256 */
        eng_model *m = accepted(llama((plan){.matrix_type = types[i].file_id, .wide = wide}));
        const eng_weight *down = &m->layers[1].w_down;
        ck_assert_int_eq(down->type, types[i].type);
        ck_assert_uint_eq(down->row_bytes, row_bytes(types[i].file_id, FF * wide));
        const uint64_t embd = EMBD * wide, ff = FF * wide, head = HEAD * wide;
        ck_assert_uint_eq(m->n_params,
                          VOCAB * embd + embd + LAYERS * (2 * embd + 2 * HEADS * head * embd + 2 * KV_HEADS * head * embd + 3 * embd * ff));
        eng_model_close(m);
    }
    refused(llama((plan){.matrix_type = 12}), "multiple of Q4_K's block of 256");
}
END_TEST

START_TEST(test_norm_types)
{
    static const struct {
        uint32_t file_id;
        float value;
    } types[] = {{0, 1}, {1, 0.5f}, {30, 1.5f}};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        eng_model *m = accepted(llama((plan){.norm_type = types[i].file_id}));
        for (int k = 0; k < EMBD; k++)
            ck_assert(m->layers[0].attn_norm[k] == types[i].value && m->layers[1].ffn_norm[k] == types[i].value &&
                      m->output_norm[k] == types[i].value);
        ck_assert_uint_eq(m->n_owned, i ? 2 * LAYERS + 1 : 0);
        eng_model_close(m);
    }
    refused(llama((plan){.norm_type = 8}), "output_norm.weight is of type Q8_0");
    refused(llama((plan){.bad_norm = true}), "output_norm.weight holds a value that is not finite");
    refused(llama((plan){.bad_norm = true, .norm_type = 1}), "not finite");
}
END_TEST

START_TEST(test_defaults_and_odd_types)
{
    eng_model *m = accepted(llama((plan){0}));
    ck_assert(m->rope_base == 10000 && m->rope_dim == HEAD && m->head_dim == HEAD);
    ck_assert_ptr_nonnull(m->name);
    eng_model_close(m);

    w_gguf w = llama((plan){.head = 16}); /* heads not of embedding / head_count */
    w_key(&w, "llama.attention.key_length", W_U64, &(uint64_t){16}, 8);
    w_key(&w, "llama.attention.value_length", W_I8, &(int8_t){16}, 1);
    w_key_u32(&w, "llama.rope.dimension_count", 4);
    w_key(&w, "llama.rope.freq_base", W_F64, &(double){5e5}, 8);
    w_key_str(&w, "llama.rope.scaling.type", "linear");
    w_key_f32(&w, "llama.rope.scaling.factor", 1);
    w_key_u32(&w, "llama.expert_count", 0);
    w_key_f32(&w, "llama.logit_scale", 1);
    w_key_str(&w, "general.name", "a\nb\xff");
    m = accepted(w);
    ck_assert(m->head_dim == 16 && m->rope_dim == 4 && m->rope_base == 5e5f && m->layers[0].wq.rows == 64 && m->layers[0].wo.cols == 64);
    ck_assert_str_eq(m->name, "a?b?");
    eng_model_close(m);

    w = llama((plan){0});
    w_key_str(&w, "llama.rope.scaling.type", "none");
    w_key_f32(&w, "llama.rope.scaling.factor", 8); /* of a scaling that is not on */
    eng_model_close(accepted(w));
    eng_model_close(NULL);
}
END_TEST

/* ---- what is refused, by name ------------------------------------------------------------------------------------ */

START_TEST(test_missing)
{
    static const char *const parts[] = {"llama.block_count",        "llama.embedding_length",     "llama.feed_forward_length",
                                        "llama.context_length",     "llama.attention.head_count", "llama.attention.layer_norm_rms_epsilon",
                                        "token_embd.weight",        "output_norm.weight",         "blk.0.attn_norm.weight",
                                        "blk.1.attn_q.weight",      "blk.0.attn_k.weight",        "blk.1.attn_v.weight",
                                        "blk.0.attn_output.weight", "blk.1.ffn_norm.weight",      "blk.0.ffn_gate.weight",
                                        "blk.1.ffn_up.weight",      "blk.1.ffn_down.weight"};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        char want[80];
        snprintf(want, sizeof want, "%s is missing", parts[i]);
        refused(llama((plan){.without = parts[i]}), want);
    }
}
END_TEST

START_TEST(test_keys_refused)
{
    static const struct {
        const char *without, *key;
        uint32_t u32;
        float f32; /* used when not 0 */
        const char *string, *word;
    } cases[] = {
        {"llama.block_count", "llama.block_count", 1025, 0, NULL, "llama.block_count"},
        {"llama.embedding_length", "llama.embedding_length", 1u << 31, 0, NULL, "llama.embedding_length"},
        {"llama.feed_forward_length", "llama.feed_forward_length", 96, 0, NULL, "blk.0.ffn_gate.weight has the shape 32 x 64"},
        {"llama.attention.head_count", "llama.attention.head_count", 32, 0, NULL, "heads of 1 dimensions"},
        {"llama.attention.head_count_kv", "llama.attention.head_count_kv", 3, 0, NULL, "llama.attention.head_count_kv"},
        {"llama.attention.layer_norm_rms_epsilon", "llama.attention.layer_norm_rms_epsilon", 0, -1e-5f, NULL, "layer_norm_rms_epsilon"},
        {NULL, "llama.attention.key_length", 513, 0, NULL, "llama.attention.key_length"},
        {NULL, "llama.attention.value_length", 4, 0, NULL, "llama.attention.value_length"},
        {NULL, "llama.rope.dimension_count", 6 + 1, 0, NULL, "llama.rope.dimension_count"},
        {NULL, "llama.rope.dimension_count", 10, 0, NULL, "llama.rope.dimension_count"},
        {NULL, "llama.rope.freq_base", 10000, 0, NULL, "llama.rope.freq_base"},
        {NULL, "llama.rope.freq_base", 0, INFINITY, NULL, "llama.rope.freq_base"},
        {NULL, "llama.rope.scaling.type", 0, 0, "dynamic", "dynamic"},
        {NULL, "llama.rope.scaling.type", 0, 0, "longrope", "rope_factors_long.weight is missing"},
        {NULL, "llama.rope.scaling.type", 3, 0, NULL, "llama.rope.scaling.type"},
        {NULL, "llama.rope.scaling.factor", 0, -4, NULL, "llama.rope.scaling.factor"},
        {NULL, "llama.rope.scaling.factor", 0, INFINITY, NULL, "llama.rope.scaling.factor"},
        {NULL, "llama.rope.scale_linear", 0, -2, NULL, "llama.rope.scale_linear"},
        {NULL, "llama.rope.scaling.attn_factor", 0, -1, NULL, "llama.rope.scaling.attn_factor"},
        {NULL, "llama.rope.scaling.yarn_log_multiplier", 0, 0.1f, NULL, "yarn_log_multiplier"},
        {NULL, "llama.attn_logit_softcapping", 0, 50, NULL, "attn_logit_softcapping"},
        {NULL, "llama.final_logit_softcapping", 0, 30, NULL, "final_logit_softcapping"},
        {NULL, "llama.expert_count", 8, 0, NULL, "llama.expert_count"},
        {NULL, "llama.attention.sliding_window", 64, 0, NULL, "llama.attention.sliding_window"},
        {NULL, "llama.attention.sliding_window", 0, 0, "wide", "llama.attention.sliding_window"},
        {NULL, "llama.logit_scale", 0, 0.5f, NULL, "llama.logit_scale"},
        {NULL, "split.count", 3, 0, NULL, "split.count"},
        {NULL, "tokenizer.chat_template", 3, 0, NULL, "tokenizer.chat_template"},
        {NULL, "tokenizer.chat_template", 0, 0, "\xff", "tokenizer.chat_template"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        w_gguf w = llama((plan){.without = cases[i].without});
        if (cases[i].string)
            w_key_str(&w, cases[i].key, cases[i].string);
        else if (cases[i].f32 != 0)
            w_key_f32(&w, cases[i].key, cases[i].f32);
        else
            w_key_u32(&w, cases[i].key, cases[i].u32);
        refused(w, cases[i].word);
    }
}
END_TEST

START_TEST(test_tensors_refused)
{
    static const struct {
        const char *name;
        uint64_t dims[2];
        const char *word;
    } extra[] = {{"blk.0.attn_q.bias", {32, 1}, "blk.0.attn_q.bias: biases"},
                 {"rope_freqs.weight", {4, 1}, "not above 0 (rope_freqs"},
                 {"rope_freqs.weight", {3, 1}, "rope_freqs.weight has the shape 3 x 1"},
                 {"blk.0.attn_q_norm.weight", {8, 1}, "blk.0.attn_q_norm.weight is not part of architecture llama"},
                 {"blk.2.attn_q.weight", {32, 32}, "blk.2.attn_q.weight is not part"},
                 {"output.weight", {32, 11}, "output.weight has the shape 32 x 11 x 1 x 1; by the model's keys it is 32 x 10"}};
    for (size_t i = 0; i < sizeof extra / sizeof *extra; i++) {
        w_gguf w = llama((plan){0});
        w_tensor(&w, extra[i].name, 0, 2, extra[i].dims, NULL, extra[i].dims[0] * extra[i].dims[1] * 4);
        refused(w, extra[i].word);
    }
    w_gguf w = llama((plan){.without = "blk.1.ffn_up.weight"});
    w_tensor(&w, "blk.1.ffn_up.weight", 0, 3, (uint64_t[]){EMBD, FF / 2, 2}, NULL, (size_t)EMBD * FF * 4);
    refused(w, "blk.1.ffn_up.weight has the shape");
    w = llama((plan){.without = "token_embd.weight"});
    w_tensor(&w, "token_embd.weight", 0, 2, (uint64_t[]){VOCAB, EMBD}, NULL, (size_t)EMBD * VOCAB * 4);
    refused(w, "token_embd.weight has the shape");
    w = (w_gguf){0};
    w_key_str(&w, "general.architecture", "mamba\x1b[2J");
    refused(w, "mamba?[2J");
    w = (w_gguf){0};
    w_key_str(&w, "general.architecture", "llama ");
    refused(w, "architecture");
}
END_TEST

static void whole(const eng_model *m, eng_weight w, uint64_t rows, uint64_t cols)
{
    ck_assert(w.rows == rows && w.cols == cols && w.row_bytes == row_bytes(eng_types[w.type].file_id, cols));
    ck_assert_uint_le((uint64_t)w.row_bytes * w.rows, eng_gguf_size(m->file));
}

/* Bytes of the header, metadata and tensor table changed at random: refused with a sentence, or every weight has the shape that the
 * hyper-parameters say and lies in the file. */
START_TEST(test_mutations)
{
    size_t n, opened = 0;
    w_gguf w = llama((plan){.matrix_type = 8});
    uint32_t table_end = (uint32_t)(24 + w.keys.n + w.table.n);
    uint8_t *b = w_finish(&w, &n), *changed = malloc(n);
    char path[64];
    t_rng r = t_seed(2);
    for (int round = 0; round < 5000; round++) {
        memcpy(changed, b, n);
        for (uint64_t k = t_u64(&r) % 2 + 1; k; k--) {
            uint8_t *at = &changed[t_u64(&r) % table_end];
            *at = t_u64(&r) & 1 ? (uint8_t)t_u64(&r) : (uint8_t)(*at ^ 1 << t_u64(&r) % 8);
        }
        int fd = w_file(changed, n, path);
        eng_model *m = NULL;
        err[0] = 0;
        int rc = eng_model_open(path, &m, err, sizeof err);
        close(fd);
        ck_assert(rc ? !m && err[0] : m != NULL);
        if (rc)
            continue;
        opened++;
        uint64_t q = (uint64_t)m->n_head * m->head_dim, kv = (uint64_t)m->n_head_kv * m->head_dim;
        ck_assert(m->n_layer == LAYERS && m->n_head % m->n_head_kv == 0 && m->rope_dim <= m->head_dim && m->rms_eps > 0);
        whole(m, m->tok_embd, m->n_vocab, m->n_embd);
        whole(m, m->output, m->n_vocab, m->n_embd);
        for (uint32_t i = 0; i < m->n_layer; i++) {
            const eng_layer *l = &m->layers[i];
            whole(m, l->wq, q, m->n_embd);
            whole(m, l->wk, kv, m->n_embd);
            whole(m, l->wv, kv, m->n_embd);
            whole(m, l->wo, m->n_embd, q);
            whole(m, l->w_gate, m->n_ff, m->n_embd);
            whole(m, l->w_up, m->n_ff, m->n_embd);
            whole(m, l->w_down, m->n_embd, m->n_ff);
            for (uint32_t k = 0; k < m->n_embd; k++)
                ck_assert(isfinite(l->attn_norm[k]) && isfinite(l->ffn_norm[k]) && isfinite(m->output_norm[k]));
        }
        eng_model_close(m);
    }
    ck_assert_uint_gt(opened, 20);
    free(changed);
    free(b);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("model");
    TCase *c = tcase_create("model");
    tcase_set_timeout(c, 0);
    tcase_add_test(c, test_tiny_f32);
    tcase_add_test(c, test_tiny_q8_0);
    tcase_add_test(c, test_smollm2);
    tcase_add_test(c, test_other_architecture);
    tcase_add_test(c, test_types);
    tcase_add_test(c, test_norm_types);
    tcase_add_test(c, test_defaults_and_odd_types);
    tcase_add_test(c, test_missing);
    tcase_add_test(c, test_keys_refused);
    tcase_add_test(c, test_tensors_refused);
    tcase_add_test(c, test_mutations);
    suite_add_tcase(s, c);
    return t_run(s);
}
