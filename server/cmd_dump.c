/* eval dump: a text is prefilled but for its last n tokens, which are forced one by one with full attention; keys and values as the cache has them, and the queries that meet
 * them, go to .npy files that `bench index` reads. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "capture.h"
#include "cmd_common.h"
#include "npy.h"

enum { TRAIN_QUERIES = 8192 }; /* of a KV head's group together, as the engine keeps them for a graph */

/* What is collected of one layer. */
typedef struct {
    bool wanted;
    float *train, *steps; /* [m][n_head][d], [n][n_head][d] */
} layer_queries;

typedef struct {
    const cfg_settings *s;
    eng_engine *engine;
    const eng_info *info;
    eng_session *session;
    int32_t *ids;
    uint32_t n_prompt, n, m, stride; /* keys; steps; one training query from each `stride` positions */
    int32_t *train_pos;
    layer_queries *layers;
} dump;

static size_t row_floats(const dump *d)
{
    return (size_t)d->info->n_head * d->info->head_dim;
}

/* Which position of its stratum a training query is taken from: fixed, but without rhythm, as in the engine. */
static uint32_t train_position(const dump *d, uint32_t i)
{
    uint32_t lo = i * d->stride, n = d->n_prompt - lo < d->stride ? d->n_prompt - lo : d->stride;
    return lo + (uint32_t)((i + 1) * 0x9e3779b97f4a7c15u >> 32) % n;
}

static void collect(void *ctx, uint32_t layer, uint32_t pos, uint32_t n, const float *q)
{
    dump *d = ctx;
    layer_queries *l = &d->layers[layer];
    size_t row = row_floats(d);
    for (uint32_t t = 0; t < n && l->wanted; t++, q += row) {
        uint32_t at = pos + t, stratum = at / d->stride;
        if (at >= d->n_prompt)
            memcpy(l->steps + (at - d->n_prompt) * row, q, row * sizeof *q);
        else if (train_position(d, stratum) == at)
            memcpy(l->train + stratum * row, q, row * sizeof *q);
    }
}

/* Marks the layers of --layers, or all. */
static int choose_layers(dump *d)
{
    size_t n = 0;
    uint32_t *list = d->s->layers ? srv_numbers(d->s->layers, &n) : NULL;
    d->layers = calloc(d->info->n_layer, sizeof *d->layers);
    if (!d->layers || (d->s->layers && !list)) {
        free(list);
        return srv_fail("out of memory");
    }
    int status = 0;
    for (uint32_t i = 0; i < d->info->n_layer; i++)
        d->layers[i].wanted = !d->s->layers;
    for (size_t i = 0; i < n && !status; i++)
        if (list[i] < d->info->n_layer)
            d->layers[list[i]].wanted = true;
        else
            status = srv_fail("--layers: there is no layer %u; the model has %u, from 0 on", list[i], d->info->n_layer);
    free(list);
    return status;
}

static int read_text(dump *d)
{
    char *text = NULL;
    size_t len, have = 0;
    int status = srv_read_text(d->s->file, &text, &len);
    if (status)
        return status;
    int rc = eng_tokenize(d->engine, text, len, ENG_TOK_ADD_SPECIAL, NULL, &d->ids, &have);
    free(text);
    if (rc < 0)
        return srv_fail("%s: cannot be tokenized: %s", d->s->file, strerror(-rc));
    have = have < d->info->n_ctx ? have : d->info->n_ctx;
    d->n = (uint32_t)d->s->n_predict;
    if (have < (size_t)d->n + 2)
        return srv_fail("%s: %zu tokens of the text are too few for the queries of %u of them (-n)", d->s->file, have, d->n);
    d->n_prompt = (uint32_t)have - d->n - 1;
    return 0;
}

static int allocate(dump *d)
{
    uint32_t group = d->info->n_head / d->info->n_head_kv;
    d->stride = (uint32_t)(((uint64_t)d->n_prompt * group + TRAIN_QUERIES - 1) / TRAIN_QUERIES);
    d->m = (d->n_prompt + d->stride - 1) / d->stride;
    d->train_pos = malloc(d->m * sizeof *d->train_pos);
    bool ok = d->train_pos;
    for (uint32_t i = 0; i < d->m && ok; i++)
        d->train_pos[i] = (int32_t)train_position(d, i);
    for (uint32_t i = 0; i < d->info->n_layer && ok; i++) {
        layer_queries *l = &d->layers[i];
        if (!l->wanted)
            continue;
        l->train = calloc(d->m, row_floats(d) * sizeof(float));
        l->steps = calloc(d->n, row_floats(d) * sizeof(float));
        ok = l->train && l->steps;
    }
    return ok ? 0 : srv_fail("out of memory");
}

static int run_text(dump *d)
{
    eng_attention a = eng_attention_default();
    a.mode = ENG_ATTN_FULL;
    int status = srv_open_session(d->engine, d->ids, d->n_prompt, d->n + 1, &a, false, &d->session);
    if (status)
        return status;
    eng_session_watch(d->session, collect, d);
    status = srv_prefill(d->session, "prefill");
    const float *logits;
    int rc = 0;
    for (uint32_t i = 0; i < d->n && !status && rc == 0; i++) {
        rc = eng_session_force(d->session, d->ids[d->n_prompt + i]);
        if (rc == 0)
            rc = eng_session_logits(d->session, &logits);
    }
    return status || !rc ? status : srv_fail("the run ended early: %s", rc > 0 ? "the context is full" : strerror(-rc));
}

/* ---- files -------------------------------------------------------------------------------------------------------- */

static int write_array(const dump *d, const char *name, const srv_npy *a)
{
    char path[4096], err[4200];
    if (snprintf(path, sizeof path, "%s/%s.npy", d->s->folder, name) >= (int)sizeof path)
        return srv_fail("%s: too long a name", d->s->folder);
    return srv_npy_write(path, a, err, sizeof err) < 0 ? srv_fail("%s", err) : 0;
}

/* Keys or values of a head: in f16 where the cache has them in f16, which changes none of them. */
static int write_rows(const dump *d, uint32_t layer, uint32_t head, bool values)
{
    bool f16 = !strcmp(values ? d->s->cache_type_v : d->s->cache_type_k, "f16");
    size_t count = (size_t)d->n_prompt * d->info->head_dim;
    float *rows = malloc(count * sizeof *rows);
    _Float16 *narrow = malloc(count * sizeof *narrow);
    int status = rows && narrow ? 0 : srv_fail("out of memory");
    if (!status) {
        eng_session_rows(d->session, layer, head, values, d->n_prompt, rows);
        for (size_t i = 0; i < count; i++)
            narrow[i] = (_Float16)rows[i];
        char name[64];
        snprintf(name, sizeof name, "layer%u_head%u_%s", layer, head, values ? "values" : "keys");
        srv_npy a = {.type = f16 ? SRV_NPY_F16 : SRV_NPY_F32, .n_dims = 2, .dims = {d->n_prompt, d->info->head_dim}, .data = f16 ? (void *)narrow : rows};
        status = write_array(d, name, &a);
    }
    free(rows);
    free(narrow);
    return status;
}

/* The group's part of queries q [n][n_head][d]. */
static int write_queries(const dump *d, uint32_t layer, uint32_t head, const char *what, const float *q, uint32_t n)
{
    uint32_t group = d->info->n_head / d->info->n_head_kv, dim = d->info->head_dim;
    size_t part = (size_t)group * dim;
    float *own = malloc(n * part * sizeof *own);
    if (!own)
        return srv_fail("out of memory");
    for (uint32_t i = 0; i < n; i++)
        memcpy(own + i * part, q + i * row_floats(d) + head * part, part * sizeof *own);
    char name[64];
    snprintf(name, sizeof name, "layer%u_head%u_%s", layer, head, what);
    srv_npy a = {.type = SRV_NPY_F32, .n_dims = 3, .dims = {n, group, dim}, .data = own};
    int status = write_array(d, name, &a);
    free(own);
    return status;
}

static int write_all(const dump *d)
{
    srv_npy pos = {.type = SRV_NPY_I32, .n_dims = 1, .dims = {d->m}, .data = d->train_pos};
    int status = write_array(d, "train_positions", &pos);
    for (uint32_t i = 0; i < d->info->n_layer; i++)
        for (uint32_t head = 0; head < d->info->n_head_kv && d->layers[i].wanted && !status; head++) {
            status = write_rows(d, i, head, false);
            if (!status)
                status = write_rows(d, i, head, true);
            if (!status)
                status = write_queries(d, i, head, "queries", d->layers[i].steps, d->n);
            if (!status)
                status = write_queries(d, i, head, "train_queries", d->layers[i].train, d->m);
        }
    return status;
}

int srv_cmd_eval_dump(const cfg_settings *s)
{
    char err[256];
    dump d = {.s = s};
    eng_params p;
    if (!s->file || !s->folder)
        return srv_fail("give a text with -f FILE and a folder with --folder FOLDER");
    if (srv_engine_params(s, &p, err, sizeof err) < 0)
        return srv_fail("%s", err);
    int status = srv_open(s, &p, &d.engine);
    if (!status) {
        d.info = eng_info_get(d.engine);
        status = choose_layers(&d);
    }
    if (!status)
        status = read_text(&d);
    if (!status)
        status = allocate(&d);
    if (!status)
        status = run_text(&d);
    if (!status)
        status = write_all(&d);
    for (uint32_t i = 0; d.layers && i < d.info->n_layer; i++) {
        free(d.layers[i].train);
        free(d.layers[i].steps);
    }
    eng_session_close(d.session);
    eng_close(d.engine);
    free(d.layers);
    free(d.train_pos);
    free(d.ids);
    return status;
}
