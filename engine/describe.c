#include "describe.h"

#include "memory.h"
#include "model.h"
#include "text.h"
#include "tokenizer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_STRINGS = 8, STRING = 160, MAX_REFUSAL = 512 };
_Static_assert((int)ENG_TYPE_COUNT <= ENG_MAX_FILE_TYPES, "a place for each type");

typedef struct {
    eng_description d; /* first: the caller has its address */
    eng_gguf *file;    /* until the model takes it */
    eng_model *model;  /* NULL: refused */
    char strings[MAX_STRINGS][STRING];
    int n_strings;
    char refusal[MAX_REFUSAL];
} description;

/* A copy fit to print; NULL for an empty string. */
static const char *keep(description *d, eng_str s)
{
    if (!s.n || d->n_strings == MAX_STRINGS)
        return NULL;
    return eng_printable(s.s, s.n, d->strings[d->n_strings++], STRING);
}

static const char *keep_key(description *d, const char *key)
{
    eng_str s = {0};
    return eng_gguf_str(d->file, key, &s) ? NULL : keep(d, s);
}

/* The key ARCH.suffix, cut where it is too long: then the file has none of that name. */
typedef struct {
    char s[STRING];
} key_name;

static key_name arch_key(eng_str arch, const char *suffix)
{
    key_name k;
    snprintf(k.s, sizeof k.s, "%.*s.%s", (int)(arch.n < 100 ? arch.n : 100), arch.s ? arch.s : "", suffix);
    return k;
}

/* 0 where there is no such number. */
static uint32_t number(const description *d, eng_str arch, const char *suffix)
{
    uint32_t v = 0;
    return eng_gguf_u32(d->file, arch_key(arch, suffix).s, &v) ? 0 : v;
}

static float real(const description *d, eng_str arch, const char *suffix)
{
    float v = 0;
    return eng_gguf_f32(d->file, arch_key(arch, suffix).s, &v) ? 0 : v;
}

static void read_keys(description *d)
{
    eng_info *i = &d->d.info;
    eng_str arch = {0};
    eng_gguf_str(d->file, "general.architecture", &arch);
    i->architecture = keep(d, arch);
    i->name = keep_key(d, "general.name");
    i->n_layer = number(d, arch, "block_count");
    i->n_embd = number(d, arch, "embedding_length");
    i->n_ff = number(d, arch, "feed_forward_length");
    i->n_head = number(d, arch, "attention.head_count");
    i->n_head_kv = number(d, arch, "attention.head_count_kv");
    i->head_dim = number(d, arch, "attention.key_length");
    i->n_ctx_train = number(d, arch, "context_length");
    if (!i->n_head_kv)
        i->n_head_kv = i->n_head;
    if (!i->head_dim && i->n_head)
        i->head_dim = i->n_embd / i->n_head;
    d->d.n_expert = number(d, arch, "expert_count");
    d->d.n_expert_used = number(d, arch, "expert_used_count");
    d->d.rope_base = real(d, arch, "rope.freq_base");
    d->d.rope_dim = number(d, arch, "rope.dimension_count");
    d->d.rope_scaling = keep_key(d, arch_key(arch, "rope.scaling.type").s);
    if (!d->d.rope_scaling && (eng_gguf_tensor(d->file, "rope_freqs.weight") || eng_gguf_tensor(d->file, "rope_factors_long.weight")))
        d->d.rope_scaling = "frequency factors";
    d->d.rope_factor = real(d, arch, "rope.scaling.factor");
    d->d.rope_orig_ctx = number(d, arch, "rope.scaling.original_context_length");
}

static void read_tokenizer(description *d)
{
    static const char *const names[] = {"bos", "eos", "eot", "eom", "unknown", "padding"};
    eng_info *i = &d->d.info;
    bool add_bos = false;
    d->d.tokenizer = keep_key(d, "tokenizer.ggml.model");
    d->d.pre = keep_key(d, "tokenizer.ggml.pre");
    i->bos = i->eos = -1;
    for (size_t k = 0; k < sizeof names / sizeof *names; k++) {
        char key[64];
        uint32_t id;
        snprintf(key, sizeof key, "tokenizer.ggml.%s_token_id", names[k]);
        if (eng_gguf_u32(d->file, key, &id))
            continue;
        d->d.special[d->d.n_special].name = names[k];
        d->d.special[d->d.n_special++].id = id;
        if (k < 2)
            *(k ? &i->eos : &i->bos) = (int32_t)id;
    }
    i->add_bos = !eng_gguf_bool(d->file, "tokenizer.ggml.add_bos_token", &add_bos) && add_bos;
}

static void read_template(description *d)
{
    eng_str s;
    if (eng_gguf_str(d->file, "tokenizer.chat_template", &s) || !s.n)
        return;
    d->d.info.chat_template_len = s.n;
    const char *end = memchr(s.s, '\n', s.n);
    d->d.template_line = keep(d, (eng_str){s.s, end ? (size_t)(end - s.s) : s.n});
    for (d->d.template_lines = 1; end; d->d.template_lines++)
        end = memchr(end + 1, '\n', s.n - (size_t)(end + 1 - s.s));
}

static int by_bytes(const void *a, const void *b)
{
    uint64_t x = ((const eng_type_use *)a)->bytes, y = ((const eng_type_use *)b)->bytes;
    return (x < y) - (x > y);
}

static void count_tensors(description *d)
{
    eng_info *i = &d->d.info;
    d->d.n_tensors = (uint32_t)eng_gguf_n_tensors(d->file);
    for (size_t n = 0; n < d->d.n_tensors; n++) {
        const eng_tensor *t = eng_gguf_tensor_at(d->file, n);
        uint32_t k = 0;
        while (k < d->d.n_types && d->d.types[k].name != eng_types[t->type].name)
            k++;
        if (k == d->d.n_types)
            d->d.types[d->d.n_types++].name = eng_types[t->type].name;
        d->d.types[k].tensors++;
        d->d.types[k].bytes += t->bytes;
        i->n_params += t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3];
        i->model_bytes += t->bytes;
    }
    qsort(d->d.types, d->d.n_types, sizeof d->d.types[0], by_bytes);
    i->type = d->d.n_types ? d->d.types[0].name : NULL;
    const eng_tensor *embd = eng_gguf_tensor(d->file, "token_embd.weight");
    if (embd && embd->dims[1] <= INT32_MAX)
        i->n_vocab = (uint32_t)embd->dims[1];
    i->fingerprint = eng_gguf_fingerprint(d->file);
    d->d.n_files = (uint32_t)eng_gguf_n_parts(d->file);
    d->d.file_bytes = eng_gguf_size(d->file);
}

/* As the engine has it for a context as long as in training. */
static int count_index(description *d)
{
    eng_kv_shape s = eng_kv_shape_of(d->model, ENG_KV_F16, ENG_KV_F16);
    uint32_t *window = calloc(s.n_layer, sizeof *window);
    if (!window)
        return -ENOMEM;
    for (uint32_t i = 0; i < s.n_layer; i++)
        window[i] = d->model->layers[i].window < d->d.info.n_ctx_train ? d->model->layers[i].window : 0;
    s.window = window;
    d->d.index_bytes_per_token = eng_index_bytes_per_token(&s, 0);
    d->d.index_bytes_cluster = eng_index_bytes_per_token(&s, ENG_WANT_CLUSTER);
    d->d.index_bytes_graph = eng_index_bytes_per_token(&s, ENG_WANT_CLUSTER | ENG_WANT_GRAPH);
    free(window);
    return 0;
}

/* Opens model and tokenizer as the engine does. -ENOMEM; 0: `refusal` says how it went. */
static int try_to_open(description *d, const char *path)
{
    eng_tokenizer *t = NULL;
    eng_gguf *file = d->file;
    d->file = NULL;
    int rc = eng_model_from(file, path, &d->model, d->refusal, sizeof d->refusal);
    if (rc)
        goto refused;
    eng_info *i = &d->d.info;
    rc = eng_tokenizer_new(d->model->file, d->model->n_vocab, &t, d->refusal, sizeof d->refusal);
    if (rc)
        goto refused;
    i->bos = eng_tokenizer_bos(t);
    i->eos = eng_tokenizer_eos(t);
    i->add_bos = eng_tokenizer_add_bos(t);
    eng_tokenizer_free(t);
    i->head_dim = d->model->head_dim;
    d->d.rope_base = d->model->rope_base;
    d->d.rope_dim = d->model->rope_dim;
    for (int k = 0; k <= ENG_KV_Q8_0; k++) {
        eng_kv_shape s = eng_kv_shape_of(d->model, (eng_kv_type)k, (eng_kv_type)k);
        d->d.kv_bytes_per_token[k] = eng_kv_bytes_per_token(&s);
    }
    i->kv_bytes_per_token = d->d.kv_bytes_per_token[ENG_KV_F16];
    return count_index(d);
refused:
    d->d.refusal = d->refusal;
    return rc == -ENOMEM ? rc : 0;
}

int eng_describe(const char *path, eng_description **ret, char *err, size_t errlen)
{
    int rc = -ENOMEM;
    description *d = calloc(1, sizeof *d);
    if (!d)
        return eng_fail(err, errlen, rc, "no memory to open the model file");
    rc = eng_gguf_open(path, &d->file, err, errlen);
    if (rc)
        goto cleanup;
    read_keys(d);
    read_tokenizer(d);
    count_tensors(d);
    read_template(d);
    rc = try_to_open(d, path);
    if (rc) {
        eng_fail(err, errlen, rc, "no memory to open the model file");
        goto cleanup;
    }
    *ret = &d->d;
    d = NULL;
cleanup:
    eng_description_free(d ? &d->d : NULL);
    return rc;
}

void eng_description_free(eng_description *public)
{
    description *d = (description *)public;
    if (!d)
        return;
    eng_model_close(d->model);
    eng_gguf_close(d->file);
    free(d);
}
