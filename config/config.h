/* config/: every setting of the program, in one table (config.c): flag, file key, environment name, default, range, help.
 *
 * Precedence: default < config file (--config, INI) < environment (RETRIEVALD_*) < command line. Errors name the setting, what was
 * wrong, the range, and for an unknown name the nearest known one.
 */
#ifndef RETRIEVALD_CONFIG_H
#define RETRIEVALD_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* Values after parsing. Strings are owned by the struct. Names of flags follow llama-server where it has the thing. */
typedef struct {
    /* model and engine */
    char *model;              /* -m, --model */
    uint32_t ctx_size;        /* -c, --ctx-size; 0: from the model */
    uint32_t threads;         /* -t, --threads; 0: physical cores */
    uint32_t ubatch_size;     /* -ub, --ubatch-size: prefill chunk */
    char *gpu_layers;         /* -ngl, --n-gpu-layers: auto, all or a whole number */
    char *cpu;                /* --cpu auto|scalar|avx2|avx512|amx */
    char *chat_template, *chat_template_file; /* instead of the model's; at most one */
    char *cache_type_k, *cache_type_v; /* -ctk, -ctv: f32|f16|bf16|q8_0 */
    int64_t cache_ram;        /* -cram, --cache-ram MiB; 0: keep no context */
    int64_t cache_disk;       /* --cache-disk MiB; 0: keep none on disk */
    char *cache_shared;       /* --cache-shared on|off: all API keys share contexts */
    char *state_dir;          /* --state-dir: where; NULL: the environment says */
    char *rope_scaling;       /* --rope-scaling auto|none|linear|yarn; auto: the model's */
    double rope_scale, rope_freq_base, rope_freq_scale; /* 0: the model's */
    uint32_t yarn_orig_ctx;   /* 0: the model's */
    double yarn_ext_factor, yarn_attn_factor, yarn_beta_slow, yarn_beta_fast; /* below 0: the model's */
    /* attention defaults and limits */
    char *attention;          /* --attention auto|full|streaming|flat|cluster|ivf|graph */
    char *attn_budget;        /* --attention-budget fast|default|precise */
    uint32_t attn_top_k;      /* --attn-top-k; 0: dynamic */
    double attn_beta;         /* --attn-beta; 0: the budget's */
    uint32_t attn_k_max;      /* --attn-k-max; 0: the budget's */
    char *estimate;           /* --estimate on|off */
    uint32_t n_sink, n_local; /* --n-sink, --n-local */
    /* sampling defaults */
    double temp, top_p, min_p, repeat_penalty, presence_penalty, frequency_penalty;
    int32_t top_k, repeat_last_n, n_predict;   /* -n: most tokens of an answer, -1: what fits */
    int64_t seed;             /* -s; -1: random */
    /* server */
    char *host;
    uint32_t port;
    char *alias;              /* -a, --alias: model name told to clients */
    char *api_key_file;
    char *allowed_hosts;      /* Host headers accepted besides the bound address and localhost; comma-separated */
    uint32_t max_queue;       /* --max-queue: requests waiting; more get a 429 */
    uint32_t max_body_mb;     /* --max-body-mb */
    uint32_t timeout;         /* -to: seconds a connection may be idle */
    uint32_t max_connections;
    char *trace;              /* --trace: a file of what happens when; NULL: none */
    char *log_level;          /* --log-level error|warning|info|debug */
    /* bench index */
    char *keys, *values, *queries, *train_queries, *key_positions, *train_positions; /* .npy files */
    char *kind, *codes;       /* lists */
    uint32_t replicas;
    bool fit;                 /* --fit: measure the machine instead */
    /* run, bench, eval */
    char *file;               /* -f: document; of eval a text a line */
    char *layers, *folder;    /* eval dump: which, NULL: all; where to */
    char *prompt;             /* -p */
    char *depth;              /* -d: list of depths */
    uint32_t repeat;          /* -r */
    char *name, *ttl;         /* contexts: --name, or the word behind the command; --ttl */
    bool pinned, replace;
    char *output;             /* -o: table|jsonl, for inspect table|json */
    bool help, version;
} cfg_settings;

/* The commands that a setting belongs to. */
enum { CFG_SERVE = 1, CFG_RUN = 2, CFG_BENCH_DECODE = 4, CFG_BENCH_PREFILL = 8, CFG_EVAL = 16, CFG_INSPECT = 32, CFG_BENCH_INDEX = 64, CFG_EVAL_DUMP = 128,
       CFG_CONTEXTS = 256, CFG_CONTEXTS_ONE = 512, CFG_CONTEXTS_ADD = 1024, CFG_CONTEXTS_VERIFY = 2048 }; /* list; of one name: show, pin, unpin, rm; ... */

/* Fills *s from defaults, file, environment and argv[1..argc) for `command`. 0; -EINVAL with a sentence in err. After both, free it. */
int cfg_load(cfg_settings *s, unsigned command, int argc, char **argv, char *err, size_t errlen);
void cfg_free(cfg_settings *s);

/* Help of a command's settings, from the table. */
void cfg_print_help(FILE *f, unsigned command);

/* A config file with every server setting, commented out, at its default (deploy/retrievald.conf is this). */
void cfg_print_example(FILE *f);

/* The known name nearest to `name` (edit distance), or NULL when none is near. */
const char *cfg_nearest(const char *name, const char *const *names, size_t n);

#endif
