/* `bench index`: kinds of index on one head's keys, values and queries from .npy files; with --fit, the constants of auto's cost model on this machine. */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "cmd_common.h"
#include "cost.h"
#include "index_bench.h"
#include "npy.h"

enum { MAX_KINDS = 16, MAX_WORD = 32 };

typedef struct {
    srv_npy keys, values, queries, train, key_pos, train_pos;
    uint32_t *rows; /* of train_pos */
    eng_bench_head head;
} input;

/* ---- input ------------------------------------------------------------------------------------------------------ */

/* Reads an array of n_dims dimensions, of floats or of int32. 0, else an exit status. */
static int read_array(const char *path, uint32_t n_dims, bool whole, srv_npy *ret)
{
    char err[512];
    if (srv_npy_read(path, ret, err, sizeof err) < 0)
        return srv_fail("%s", err);
    if (ret->n_dims != n_dims)
        return srv_fail("%s: %u dimensions, it takes %u", path, ret->n_dims, n_dims);
    if (whole != (ret->type == SRV_NPY_I32))
        return srv_fail("%s: the numbers must be %s", path, whole ? "int32" : "float16 or float32");
    return 0;
}

static int same_shape(const char *path, const srv_npy *a, uint32_t from, const srv_npy *like, const char *what)
{
    for (uint32_t i = from; i < a->n_dims; i++)
        if (a->dims[i] != like->dims[i])
            return srv_fail("%s: its shape doesn't fit that of the %s", path, what);
    return 0;
}

/* The row of the newest key at or before each training position. */
static int rows_of(const cfg_settings *s, input *in)
{
    const int32_t *query_pos = in->train_pos.data, *key_pos = in->key_pos.data;
    uint32_t m = in->train_pos.dims[0], n = in->keys.dims[0], row = 0;
    in->rows = malloc(m * sizeof *in->rows);
    if (!in->rows)
        return srv_fail("out of memory");
    for (uint32_t i = 0; i < m; i++) {
        if (query_pos[i] < 0 || (i && query_pos[i] < query_pos[i - 1]))
            return srv_fail("%s: positions must rise from 0", s->train_positions);
        while (row + 1 < n && (key_pos ? key_pos[row + 1] : (int64_t)row + 1) <= query_pos[i])
            row++;
        in->rows[i] = row;
    }
    in->head.train_pos = in->rows;
    return 0;
}

static eng_bench_rows rows_in(const srv_npy *a)
{
    return (eng_bench_rows){a->data, a->type == SRV_NPY_F32};
}

static int read_train(const cfg_settings *s, input *in)
{
    int status = read_array(s->train_queries, 3, false, &in->train);
    if (!status)
        status = same_shape(s->train_queries, &in->train, 1, &in->queries, "queries");
    if (!status && s->key_positions)
        status = read_array(s->key_positions, 1, true, &in->key_pos);
    if (!status && s->key_positions && in->key_pos.dims[0] != in->keys.dims[0])
        status = srv_fail("%s: %u positions for %u keys", s->key_positions, in->key_pos.dims[0], in->keys.dims[0]);
    if (status || !s->train_positions)
        return status;
    status = read_array(s->train_positions, 1, true, &in->train_pos);
    if (!status && in->train_pos.dims[0] != in->train.dims[0])
        status = srv_fail("%s: %u positions for %u training queries", s->train_positions, in->train_pos.dims[0], in->train.dims[0]);
    return status ? status : rows_of(s, in);
}

static int input_open(const cfg_settings *s, input *in)
{
    if (!s->keys || !s->values || !s->queries)
        return srv_fail("give --keys, --values and --queries");
    int status = read_array(s->keys, 2, false, &in->keys);
    if (!status)
        status = read_array(s->values, 2, false, &in->values);
    if (!status)
        status = same_shape(s->values, &in->values, 0, &in->keys, "keys");
    if (!status)
        status = read_array(s->queries, 3, false, &in->queries);
    if (!status && in->queries.dims[2] != in->keys.dims[1])
        status = srv_fail("%s: queries of %u dimensions, keys of %u", s->queries, in->queries.dims[2], in->keys.dims[1]);
    if (status)
        return status;
    if (s->train_queries)
        status = read_train(s, in);
    eng_bench_head *h = &in->head;
    h->keys = rows_in(&in->keys);
    h->values = rows_in(&in->values);
    h->queries = rows_in(&in->queries);
    h->train = rows_in(&in->train);
    h->n = in->keys.dims[0];
    h->dim = in->keys.dims[1];
    h->group = in->queries.dims[1];
    h->n_steps = in->queries.dims[0] < (uint32_t)s->n_predict ? in->queries.dims[0] : (uint32_t)s->n_predict;
    h->n_train = in->train.data ? in->train.dims[0] : 0;
    return status;
}

static void input_close(input *in)
{
    srv_npy *all[] = {&in->keys, &in->values, &in->queries, &in->train, &in->key_pos, &in->train_pos};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        srv_npy_free(all[i]);
    free(in->rows);
}

/* ---- kinds ------------------------------------------------------------------------------------------------------ */

/* The kinds that --kind and --codes name; flat stands for one with each of the codes. */
static uint32_t kinds_wanted(const cfg_settings *s, char words[MAX_KINDS][MAX_WORD], const char **ret)
{
    uint32_t n = 0;
    for (const char *kind = s->kind; *kind; kind += strspn(kind, ",")) {
        size_t len = strcspn(kind, ",");
        bool flat = len == 4 && !memcmp(kind, "flat", 4);
        const char *word = flat ? s->codes : kind, *end = flat ? s->codes + strlen(s->codes) : kind + len;
        for (; word < end && n + 1 < MAX_KINDS; word += strspn(word, ",")) {
            size_t part = strcspn(word, ",");
            snprintf(words[n], MAX_WORD, "%.*s", (int)part, word);
            ret[n] = words[n];
            n++;
            word += part;
        }
        kind += len;
    }
    ret[n] = NULL;
    return n;
}

/* ---- output ----------------------------------------------------------------------------------------------------- */

static void json_spread(srv_buf *j, const char *name, const eng_bench_spread *s)
{
    srv_buf_printf(j, ",\"%s\":{\"mean\":%.6f,\"p10\":%.6f,\"p90\":%.6f,\"min\":%.6f,\"max\":%.6f}", name, s->mean, s->p10, s->p90, s->min, s->max);
}

static int print_json(const cfg_settings *s, const eng_attention *budget, const input *in, const eng_bench_result *r, uint32_t replicas)
{
    srv_buf j = {0};
    srv_buf_puts(&j, "{\"test\":\"index\",\"keys\":");
    srv_buf_cstring(&j, s->keys);
    srv_buf_printf(&j, ",\"n\":%u,\"dim\":%u,\"group\":%u,\"steps\":%u,\"kind\":\"%s\"", in->head.n, in->head.dim, in->head.group, in->head.n_steps, r->kind);
    if (budget->top_k)
        srv_buf_printf(&j, ",\"top_k\":%u", budget->top_k);
    else
        srv_buf_printf(&j, ",\"beta\":%g,\"k_max\":%u", budget->beta, budget->k_max);
    srv_buf_printf(&j, ",\"hits\":%.2f", r->hits);
    json_spread(&j, "recall16", &r->recall16);
    json_spread(&j, "recall100", &r->recall100);
    srv_buf_printf(&j, ",\"visited_head\":%.6f,\"visited_group\":%.6f", r->visited_head, r->visited_group);
    json_spread(&j, "mass", &r->mass);
    json_spread(&j, "error", &r->error);
    if (r->has_estimate)
        json_spread(&j, "error_estimate", &r->error_estimate);
    srv_buf_printf(&j, ",\"build_s\":%.4f,\"bytes_per_key\":%.2f,\"replicas\":%u,\"us\":{\"median\":%.2f,\"min\":%.2f,\"max\":%.2f},\"relative\":%.4f}\n", r->build_s,
                   r->bytes_per_key, replicas, r->us, r->us_min, r->us_max, r->relative);
    return srv_print_json(&j);
}

static void print_table(const cfg_settings *s, const eng_attention *budget, const input *in, const eng_bench_result *r, uint32_t n, uint32_t replicas)
{
    printf("%s: %u keys of %u, a group of %u, %u steps; ", s->keys, in->head.n, in->head.dim, in->head.group, in->head.n_steps);
    if (budget->top_k)
        printf("top %u; ", budget->top_k);
    else
        printf("beta %g, at most %u; ", budget->beta, budget->k_max);
    printf("%u replicas\n%-8s %6s  %-23s  %-23s  %-13s %6s  %-23s  %-23s %7s %6s %9s %9s\n", replicas, "", "hits", "recall@16 mean p10 min", "recall@100", "visited",
           "mass", "error mean p90 max", "with the estimate", "build s", "B/key", "us", "of int8");
    for (uint32_t i = 0; i < n; i++, r++) {
        printf("%-8s %6.0f  %7.5f %7.4f %7.4f  %7.5f %7.4f %7.4f  %5.1f%% %5.1f%% %6.4f  %7.5f %7.4f %7.4f  ", r->kind, r->hits, r->recall16.mean, r->recall16.p10,
               r->recall16.min, r->recall100.mean, r->recall100.p10, r->recall100.min, 100 * r->visited_head, 100 * r->visited_group, r->mass.mean, r->error.mean,
               r->error.p90, r->error.max);
        if (r->has_estimate)
            printf("%7.5f %7.4f %7.4f", r->error_estimate.mean, r->error_estimate.p90, r->error_estimate.max);
        else
            printf("%23s", "-");
        printf(" %7.3f %6.1f %9.1f %9.3f\n", r->build_s, r->bytes_per_key, r->us, r->relative);
    }
}

/* ---- --fit -------------------------------------------------------------------------------------------------------- */

static void print_line(const char *line)
{
    puts(line);
}

/* The folder that a file is to lie in, and those it lies in itself. */
static int make_folders(char *path)
{
    for (char *p = path + 1; (p = strchr(p, '/')); p++) {
        *p = 0;
        int rc = mkdir(path, 0700) < 0 && errno != EEXIST ? srv_fail("%s: %s", path, strerror(errno)) : 0;
        *p = '/';
        if (rc)
            return rc;
    }
    return 0;
}

static int fit(const cfg_settings *s)
{
    char path[PATH_MAX], err[PATH_MAX + 128];
    bool json = !strcmp(s->output, "jsonl");
    eng_params p;
    eng_cost c;
    const char *cpu;
    if (srv_cost_path(s, path, sizeof path) < 0)
        return srv_fail("nowhere to write it: there is no home folder; give one with --state-dir");
    if (srv_engine_params(s, &p, err, sizeof err) < 0 || eng_cost_fit(p.cpu, json ? NULL : print_line, &c, &cpu, err, sizeof err) < 0)
        return srv_fail("%s", err);
    int status = make_folders(path);
    if (!status && eng_cost_write(path, cpu, &c, err, sizeof err) < 0)
        status = srv_fail("%s", err);
    if (!status && json)
        printf("{\"test\":\"fit\",\"cpu\":\"%s\",\"dense_byte\":%.6g,\"dense_op\":%.6g,\"scan_search\":%.6g,\"scan_head\":%.6g,\"scan_dim\":%.6g,\"scan_key\":%.6g,"
               "\"hit_dim\":%.6g,\"visit_dim\":%.6g}\n",
               cpu, c.dense_byte, c.dense_op, c.scan_search, c.scan_head, c.scan_dim, c.scan_key, c.hit_dim, c.visit_dim);
    else if (!status)
        printf("written to %s\n", path);
    int written = srv_finish_output();
    return status ? status : written;
}

int srv_cmd_bench_index(const cfg_settings *s)
{
    if (s->fit)
        return fit(s);
    char words[MAX_KINDS][MAX_WORD], err[512] = "";
    const char *kinds[MAX_KINDS];
    eng_bench_result results[MAX_KINDS];
    uint32_t n = kinds_wanted(s, words, kinds), replicas;
    input in = {0};
    eng_attention budget;
    if (srv_budget(s, &budget, err, sizeof err) < 0)
        return srv_fail("%s", err);
    eng_bench_params p = {.cpu = s->cpu,
                          .top_k = budget.top_k,
                          .beta = budget.beta,
                          .k_max = budget.k_max,
                          .n_sink = s->n_sink,
                          .n_local = s->n_local,
                          .estimate = !strcmp(s->estimate, "on"),
                          .replicas = s->replicas,
                          .rounds = s->repeat};
    int status = input_open(s, &in);
    if (!status && eng_bench_index(&in.head, &p, kinds, results, &replicas, err, sizeof err) < 0)
        status = srv_fail("%s", err);
    bool json = !strcmp(s->output, "jsonl");
    for (uint32_t i = 0; i < n && json && !status; i++)
        status = print_json(s, &budget, &in, &results[i], replicas);
    if (!json && !status)
        print_table(s, &budget, &in, results, n, replicas);
    input_close(&in);
    int written = srv_finish_output();
    return status ? status : written;
}
