#include <stdlib.h>
#include <string.h>

#include "cmd_common.h"

static void print_text(const eng_info *i, const char *path)
{
    double mib = 1048576.0;
    printf("file          %s\n", path);
    printf("name          %s\n", i->name ? i->name : "-");
    printf("architecture  %s\n", i->architecture);
    printf("parameters    %.1f million\n", (double)i->n_params / 1e6);
    printf("weights       %s, %.1f MiB\n", i->type, (double)i->model_bytes / mib);
    printf("layers        %u\n", i->n_layer);
    printf("embedding     %u\n", i->n_embd);
    printf("feed forward  %u\n", i->n_ff);
    printf("heads         %u, %u of keys and values, %u wide\n", i->n_head, i->n_head_kv, i->head_dim);
    printf("context       %u tokens in training\n", i->n_ctx_train);
    printf("vocabulary    %u tokens, begin %d, end %d\n", i->n_vocab, i->bos, i->eos);
    printf("template      ");
    if (i->chat_template)
        printf("%zu bytes\n", i->chat_template_len);
    else
        puts("none");
    printf("keys, values  %.1f MiB for 1,024 tokens, %.1f MiB for %u (f16, without index)\n", (double)i->kv_bytes_per_token * 1024 / mib,
           (double)i->kv_bytes_per_token * i->n_ctx_train / mib, i->n_ctx_train);
    printf("fingerprint   %016lx\n", (unsigned long)i->fingerprint);
}

static int print_json(const eng_info *i, const char *path)
{
    srv_buf b = {0};
    srv_buf_puts(&b, "{\"file\":");
    srv_buf_cstring(&b, path);
    srv_buf_puts(&b, ",\"name\":");
    srv_buf_cstring(&b, i->name);
    srv_buf_puts(&b, ",\"architecture\":");
    srv_buf_cstring(&b, i->architecture);
    srv_buf_puts(&b, ",\"type\":");
    srv_buf_cstring(&b, i->type);
    srv_buf_printf(
        &b, ",\"n_params\":%lu,\"model_bytes\":%lu,\"n_layer\":%u,\"n_embd\":%u,\"n_ff\":%u,\"n_head\":%u,\"n_head_kv\":%u,\"head_dim\":%u",
        (unsigned long)i->n_params, (unsigned long)i->model_bytes, i->n_layer, i->n_embd, i->n_ff, i->n_head, i->n_head_kv, i->head_dim);
    srv_buf_printf(&b, ",\"n_ctx_train\":%u,\"n_vocab\":%u,\"bos\":%d,\"eos\":%d,\"add_bos\":%s,\"chat_template_bytes\":%zu",
                   i->n_ctx_train, i->n_vocab, i->bos, i->eos, i->add_bos ? "true" : "false", i->chat_template ? i->chat_template_len : 0);
    srv_buf_printf(&b, ",\"kv_bytes_per_token\":%zu,\"fingerprint\":\"%016lx\"}\n", i->kv_bytes_per_token, (unsigned long)i->fingerprint);
    return srv_print_json(&b);
}

int srv_cmd_inspect(const cfg_settings *s)
{
    eng_engine *e = NULL;
    eng_params p = eng_params_default();
    p.n_ctx = 64; /* nothing is computed: room for as little as there may be */
    p.n_threads = 1;
    p.cache_ram = 0;
    int status = srv_open(s, &p, &e);
    if (status)
        return status;
    if (!strcmp(s->output, "jsonl"))
        status = print_json(eng_info_get(e), s->model);
    else
        print_text(eng_info_get(e), s->model);
    eng_close(e);
    int written = srv_finish_output();
    return status ? status : written;
}
