#include <stdlib.h>
#include <string.h>

#include "cmd_common.h"
#include "describe.h"

#define MIB(bytes) ((double)(bytes) / 1048576)

static const char *const kv_names[] = {[ENG_KV_F32] = "f32", [ENG_KV_F16] = "f16", [ENG_KV_BF16] = "bf16", [ENG_KV_Q8_0] = "q8_0"};
enum { N_KV_TYPES = sizeof kv_names / sizeof *kv_names, THOUSAND = 1024 };

/* ---- table ------------------------------------------------------------------------------------------------------ */

static const char *or_dash(const char *s)
{
    return s ? s : "-";
}

static void print_shape(const eng_description *d)
{
    const eng_info *i = &d->info;
    printf("layers        %u\n", i->n_layer);
    printf("embedding     %u\n", i->n_embd);
    printf("feed forward  %u\n", i->n_ff);
    if (d->n_expert)
        printf("experts       %u, %u used by a token\n", d->n_expert, d->n_expert_used);
    printf("heads         %u, %u of keys and values, %u wide\n", i->n_head, i->n_head_kv, i->head_dim);
    printf("context       %u tokens in training\n", i->n_ctx_train);
    printf("RoPE          ");
    if (d->rope_base > 0)
        printf("base %.9g", (double)d->rope_base);
    else
        printf("base not said");
    if (d->rope_dim)
        printf(", %u dimensions", d->rope_dim);
    printf(", scaling %s", d->rope_scaling ? d->rope_scaling : "none");
    if (d->rope_factor > 0)
        printf(" by %.9g", (double)d->rope_factor);
    if (d->rope_orig_ctx)
        printf(" from %u tokens", d->rope_orig_ctx);
    putchar('\n');
}

static void print_text_part(const eng_description *d)
{
    const eng_info *i = &d->info;
    printf("tokenizer     %s, %s, %u tokens\n", or_dash(d->tokenizer), or_dash(d->pre), i->n_vocab);
    printf("special       ");
    for (uint32_t k = 0; k < d->n_special; k++)
        printf("%s %u, ", d->special[k].name, d->special[k].id);
    printf("%s\n", i->add_bos ? "begins with bos" : "no bos added");
    if (i->chat_template_len)
        printf("template      %zu bytes, %zu lines: %s\n", i->chat_template_len, d->template_lines, or_dash(d->template_line));
    else
        puts("template      none");
}

static void print_memory(const eng_description *d)
{
    const eng_info *i = &d->info;
    printf("memory        %.1f MiB of weights\n", MIB(i->model_bytes));
    if (d->refusal)
        return;
    for (int k = 0; k < N_KV_TYPES; k++)
        printf("%s %.1f MiB for 1,024 tokens, %.1f MiB for %u (%s)\n", k ? "             " : "keys, values ",
               MIB(d->kv_bytes_per_token[k] * THOUSAND), MIB((double)d->kv_bytes_per_token[k] * i->n_ctx_train), i->n_ctx_train,
               kv_names[k]);
    printf("index         up to %.1f MiB for 1,024 tokens, %.1f MiB with --attention cluster, %.1f MiB with --attention graph\n",
           MIB(d->index_bytes_per_token * THOUSAND), MIB(d->index_bytes_cluster * THOUSAND), MIB(d->index_bytes_graph * THOUSAND));
}

static void print_table(const eng_description *d, const char *path)
{
    const eng_info *i = &d->info;
    printf("file          %s\n", path);
    printf("size          %.1f MiB", MIB(d->file_bytes));
    printf(d->n_files > 1 ? " in %u files\n" : "\n", d->n_files);
    printf("name          %s\n", or_dash(i->name));
    printf("architecture  %s\n", or_dash(i->architecture));
    printf("parameters    %.1f million\n", (double)i->n_params / 1e6);
    for (uint32_t k = 0; k < d->n_types; k++)
        printf("%s%s, %u tensor%s, %.1f MiB\n", k ? "              " : "weights       ", d->types[k].name, d->types[k].tensors,
               d->types[k].tensors > 1 ? "s" : "", MIB(d->types[k].bytes));
    print_shape(d);
    print_text_part(d);
    print_memory(d);
    printf("fingerprint   %016lx\n", (unsigned long)i->fingerprint);
    if (d->refusal)
        printf("refused       %s\n", d->refusal);
}

/* ---- JSON ------------------------------------------------------------------------------------------------------- */

static void put_string(srv_buf *b, const char *name, const char *s)
{
    srv_buf_printf(b, ",\"%s\":", name);
    srv_buf_cstring(b, s);
}

static void put_number(srv_buf *b, const char *name, uint64_t v)
{
    srv_buf_printf(b, ",\"%s\":%lu", name, (unsigned long)v);
}

static void put_shape(srv_buf *b, const eng_info *i)
{
    put_string(b, "name", i->name);
    put_string(b, "architecture", i->architecture);
    put_string(b, "type", i->type);
    put_number(b, "n_params", i->n_params);
    put_number(b, "model_bytes", i->model_bytes);
    put_number(b, "n_layer", i->n_layer);
    put_number(b, "n_embd", i->n_embd);
    put_number(b, "n_ff", i->n_ff);
    put_number(b, "n_head", i->n_head);
    put_number(b, "n_head_kv", i->n_head_kv);
    put_number(b, "head_dim", i->head_dim);
    put_number(b, "n_ctx_train", i->n_ctx_train);
    put_number(b, "n_vocab", i->n_vocab);
}

static void put_lists(srv_buf *b, const eng_description *d)
{
    srv_buf_puts(b, ",\"tensor_types\":{");
    for (uint32_t k = 0; k < d->n_types; k++)
        srv_buf_printf(b, "%s\"%s\":{\"tensors\":%u,\"bytes\":%lu}", k ? "," : "", d->types[k].name, d->types[k].tensors,
                       (unsigned long)d->types[k].bytes);
    srv_buf_puts(b, "},\"special_tokens\":{");
    for (uint32_t k = 0; k < d->n_special; k++)
        srv_buf_printf(b, "%s\"%s\":%u", k ? "," : "", d->special[k].name, d->special[k].id);
    srv_buf_puts(b, "}");
}

static void put_memory(srv_buf *b, const eng_description *d)
{
    put_number(b, "kv_bytes_per_token", d->info.kv_bytes_per_token);
    srv_buf_puts(b, ",\"kv_bytes_per_1k\":{");
    for (int k = 0; k < N_KV_TYPES; k++)
        srv_buf_printf(b, "%s\"%s\":%zu", k ? "," : "", kv_names[k], d->kv_bytes_per_token[k] * THOUSAND);
    srv_buf_puts(b, "}");
    put_number(b, "index_bytes_per_1k", d->index_bytes_per_token * THOUSAND);
    put_number(b, "index_bytes_per_1k_cluster", d->index_bytes_cluster * THOUSAND);
    put_number(b, "index_bytes_per_1k_graph", d->index_bytes_graph * THOUSAND);
}

static int print_json(const eng_description *d, const char *path)
{
    const eng_info *i = &d->info;
    srv_buf b = {0};
    srv_buf_puts(&b, "{\"file\":");
    srv_buf_cstring(&b, path);
    put_number(&b, "files", d->n_files);
    put_number(&b, "file_bytes", d->file_bytes);
    put_shape(&b, i);
    put_number(&b, "n_expert", d->n_expert);
    put_number(&b, "n_expert_used", d->n_expert_used);
    srv_buf_printf(&b, ",\"rope\":{\"base\":%.9g,\"dim\":%u,\"scaling\":", (double)d->rope_base, d->rope_dim);
    srv_buf_cstring(&b, d->rope_scaling);
    srv_buf_printf(&b, ",\"factor\":%.9g,\"original_context\":%u}", (double)d->rope_factor, d->rope_orig_ctx);
    put_string(&b, "tokenizer", d->tokenizer);
    put_string(&b, "pre", d->pre);
    srv_buf_printf(&b, ",\"bos\":%d,\"eos\":%d,\"add_bos\":%s", i->bos, i->eos, i->add_bos ? "true" : "false");
    put_lists(&b, d);
    put_number(&b, "chat_template_bytes", i->chat_template_len);
    put_number(&b, "chat_template_lines", d->template_lines);
    put_string(&b, "chat_template_line", d->template_line);
    put_memory(&b, d);
    srv_buf_printf(&b, ",\"fingerprint\":\"%016lx\"", (unsigned long)i->fingerprint);
    put_string(&b, "refused", d->refusal);
    srv_buf_puts(&b, "}\n");
    return srv_print_json(&b);
}

int srv_cmd_inspect(const cfg_settings *s)
{
    char err[512] = "unknown reason";
    eng_description *d = NULL;
    int status = 0;
    if (eng_describe(s->model, &d, err, sizeof err) < 0)
        return srv_fail("%s: %s", s->model, err);
    if (!strcmp(s->output, "json"))
        status = print_json(d, s->model);
    else
        print_table(d, s->model);
    int written = srv_finish_output();
    if (d->refusal && !status)
        status = srv_fail("%s: %s", s->model, d->refusal);
    eng_description_free(d);
    return status ? status : written;
}
