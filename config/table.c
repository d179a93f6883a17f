#include "table.h"

#define SERVE_RUN  (CFG_SERVE | CFG_RUN)
#define BENCH      (CFG_BENCH_DECODE | CFG_BENCH_PREFILL)
#define LOADS      (SERVE_RUN | BENCH | CFG_EVAL | CFG_EVAL_DUMP)
#define RETRIEVES  (SERVE_RUN | CFG_BENCH_DECODE | CFG_EVAL)
#define SEARCHES   (RETRIEVES | CFG_BENCH_INDEX)
#define MODELS     (LOADS | CFG_INSPECT)
#define CLIENT     (CFG_CONTEXTS | CFG_CONTEXTS_ONE | CFG_CONTEXTS_ADD)
#define ALL        (MODELS | CFG_BENCH_INDEX | CLIENT | CFG_CONTEXTS_VERIFY)
#define FIELD(x)   offsetof(cfg_settings, x)
#define MAX_TOKENS 16777216.0
#define ANY_LENGTH 0, 0

static const char *const cpus[] = {"auto", "scalar", "avx2", "avx512", "amx", NULL};
static const char *const kv_types[] = {"f32", "f16", "bf16", "q8_0", NULL};
static const char *const switches[] = {"on", "off", NULL};
static const char *const modes[] = {"auto", "full", "streaming", "flat", "cluster", "ivf", "graph", NULL};
static const char *const budgets[] = {"fast", "default", "precise", NULL};
static const char *const scalings[] = {"auto", "none", "linear", "yarn", NULL};
static const char *const levels[] = {"error", "warning", "info", "debug", NULL};
static const char *const outputs[] = {"table", "jsonl", NULL};
static const char *const kinds[] = {"flat", "cluster", "ivf", "graph", NULL};
static const char *const codes[] = {"f16", "int8", "int4", NULL};
static const char *const amounts[] = {"auto", "all", NULL};
static const char *const facts[] = {"table", "json", NULL};

#define MODEL     "Model and engine"
#define ATTENTION "Attention"
#define SAMPLING  "Sampling (what a request does not say)"
#define SERVER    "Server"
#define COMMAND   "Command"
#define GENERAL   "General"

/* Defaults of sampling are llama-server's. Where a flag means something else in another command, it has a row for each; such rows are flags
 * only, so that a file written for the server does not change what a benchmark measures. */
/* clang-format off */
const cfg_row cfg_table[] = {
    {MODEL, "model", "m", MODELS, true, CFG_T_TEXT, FIELD(model), NULL, ANY_LENGTH, NULL, "FILE", "the model, a GGUF file"},
    {MODEL, "chat-template", NULL, SERVE_RUN, true, CFG_T_TEXT, FIELD(chat_template), NULL, ANY_LENGTH, NULL, "TEXT",
     "a Jinja template for conversations, instead of the model's"},
    {MODEL, "chat-template-file", NULL, SERVE_RUN, true, CFG_T_TEXT, FIELD(chat_template_file), NULL, ANY_LENGTH, NULL, "FILE",
     "the same from a file"},
    {MODEL, "ctx-size", "c", SERVE_RUN, true, CFG_T_U32, FIELD(ctx_size), "0", 0, MAX_TOKENS, NULL, "N",
     "tokens of prompt and answer together; 0: as many as the model was trained for"},
    {MODEL, "ctx-size", "c", BENCH, false, CFG_T_U32, FIELD(ctx_size), "0", 0, MAX_TOKENS, NULL, "N",
     "tokens of context to reserve; 0: what the longest test needs"},
    {MODEL, "ctx-size", "c", CFG_EVAL | CFG_EVAL_DUMP, false, CFG_T_U32, FIELD(ctx_size), "0", 0, MAX_TOKENS, NULL, "N",
     "tokens of the text to use; 0: all of it, up to what the model was trained for"},
    {MODEL, "threads", "t", LOADS, true, CFG_T_U32, FIELD(threads), "0", 0, 1024, NULL, "N", "compute threads; 0: one for each physical core"},
    {MODEL, "ubatch-size", "ub", LOADS, true, CFG_T_U32, FIELD(ubatch_size), "512", 1, 16384, NULL, "N",
     "prompt tokens computed at a time; answers do not depend on it"},
    {MODEL, "n-gpu-layers", "ngl", LOADS, true, CFG_T_COUNT, FIELD(gpu_layers), "auto", 0, 65535, amounts, "N",
     "how many of the model's last layers the GPU computes; all: the output, too; auto: as many as fit its memory; without a GPU, none"},
    {MODEL, "cpu", NULL, LOADS | CFG_BENCH_INDEX, true, CFG_T_CHOICE, FIELD(cpu), "auto", ANY_LENGTH, cpus, "LEVEL", "instruction set of the kernels"},
    {MODEL, "cache-type-k", "ctk", LOADS, true, CFG_T_CHOICE, FIELD(cache_type_k), "f16", ANY_LENGTH, kv_types, "TYPE", "type of kept keys; q8_0: 8 bits, less the mean key"},
    {MODEL, "cache-type-v", "ctv", LOADS, true, CFG_T_CHOICE, FIELD(cache_type_v), "f16", ANY_LENGTH, kv_types, "TYPE", "type of kept values"},
    {MODEL, "cache-ram", "cram", RETRIEVES, true, CFG_T_I64, FIELD(cache_ram), "8192", 0, 1073741824, NULL, "MIB",
     "memory for kept contexts and their indexes; 0 keeps none"},
    {MODEL, "cache-disk", NULL, CFG_SERVE, true, CFG_T_I64, FIELD(cache_disk), "16384", 0, 1073741824, NULL, "MIB",
     "disk space for kept contexts, which outlast the program; 0 keeps none"},
    {MODEL, "cache-shared", NULL, CFG_SERVE, true, CFG_T_CHOICE, FIELD(cache_shared), "off", ANY_LENGTH, switches, "MODE",
     "on: all API keys share kept contexts and their names; off: each has its own"},
    {MODEL, "state-dir", NULL, SERVE_RUN | CFG_CONTEXTS_VERIFY | CFG_BENCH_DECODE | CFG_EVAL | CFG_BENCH_INDEX, true, CFG_T_TEXT, FIELD(state_dir), NULL, ANY_LENGTH, NULL, "FOLDER",
     "where contexts are kept on disk, and what bench index --fit measured; without it $STATE_DIRECTORY (systemd's), $XDG_STATE_HOME/retrievald or ~/.local/state/retrievald"},
    {MODEL, "rope-scaling", NULL, LOADS, true, CFG_T_CHOICE, FIELD(rope_scaling), "auto", ANY_LENGTH, scalings, "TYPE",
     "how RoPE is stretched to contexts longer than the model was trained on; auto: as the model's file says"},
    {MODEL, "rope-scale", NULL, LOADS, true, CFG_T_REAL, FIELD(rope_scale), "0", 0, 1000000, NULL, "N",
     "factor of the stretch: the context grows N-fold; 0: the model's"},
    {MODEL, "rope-freq-base", NULL, LOADS, true, CFG_T_REAL, FIELD(rope_freq_base), "0", 0, 1e15, NULL, "N",
     "base of the rotation's frequencies; 0: the model's"},
    {MODEL, "rope-freq-scale", NULL, LOADS, true, CFG_T_REAL, FIELD(rope_freq_scale), "0", 0, 1000000, NULL, "N",
     "the same as rope-scale, as its inverse 1/N; 0: the model's"},
    {MODEL, "yarn-orig-ctx", NULL, LOADS, true, CFG_T_U32, FIELD(yarn_orig_ctx), "0", 0, MAX_TOKENS, NULL, "N",
     "YaRN: the context before the stretch; 0: the model's"},
    {MODEL, "yarn-ext-factor", NULL, LOADS, true, CFG_T_REAL, FIELD(yarn_ext_factor), "-1", -1, 100, NULL, "X",
     "YaRN: how much fast frequencies keep, 0 (nothing) to 1; below 0: the model's"},
    {MODEL, "yarn-attn-factor", NULL, LOADS, true, CFG_T_REAL, FIELD(yarn_attn_factor), "-1", -1, 100, NULL, "X",
     "YaRN: multiplies its factor of attention scores' magnitude; below 0: the model's"},
    {MODEL, "yarn-beta-slow", NULL, LOADS, true, CFG_T_REAL, FIELD(yarn_beta_slow), "-1", -1, 1000000, NULL, "X",
     "YaRN: pairs that turn less than X times over the original context are stretched in full; below 0: the model's"},
    {MODEL, "yarn-beta-fast", NULL, LOADS, true, CFG_T_REAL, FIELD(yarn_beta_fast), "-1", -1, 1000000, NULL, "X",
     "YaRN: pairs that turn more than X times stay as they are; below 0: the model's"},
    {MODEL, "trace", NULL, SERVE_RUN | BENCH, true, CFG_T_TEXT, FIELD(trace), NULL, ANY_LENGTH, NULL, "FILE",
     "write to this file what the engine's threads and the GPU did and when, for Perfetto or chrome://tracing: at the end, and of a daemon also after each SIGUSR1"},

    {ATTENTION, "attention", NULL, SERVE_RUN, true, CFG_T_CHOICE, FIELD(attention), "auto", ANY_LENGTH, modes, "MODE",
     "which keys an answer's tokens read: all (full), the window (streaming), the window and the best of the rest, found by a scan (flat), in clusters of "
     "keys (cluster, or plain ones: ivf), through a graph (graph) or by whichever is cheaper (auto)"},
    {ATTENTION, "attention", NULL, CFG_BENCH_DECODE, false, CFG_T_CHOICES, FIELD(attention), "full,auto", ANY_LENGTH, modes, "MODES",
     "attention modes to measure"},
    {ATTENTION, "attention", NULL, CFG_EVAL, false, CFG_T_CHOICES, FIELD(attention), "auto", ANY_LENGTH, modes, "MODES",
     "attention modes to compare with full"},
    {ATTENTION, "attention-budget", NULL, SERVE_RUN | CFG_BENCH_INDEX, true, CFG_T_CHOICE, FIELD(attn_budget), "default", ANY_LENGTH, budgets, "BUDGET",
     "how many keys are retrieved: those within 7 of the best score, at most 512 (fast), within 8, at most 1024 (default), or within 9, at most 2048 (precise)"},
    {ATTENTION, "attention-budget", NULL, CFG_BENCH_DECODE | CFG_EVAL, false, CFG_T_CHOICES, FIELD(attn_budget), "default", ANY_LENGTH, budgets, "BUDGETS",
     "budgets to try with each mode that retrieves"},
    {ATTENTION, "attn-top-k", NULL, SEARCHES, true, CFG_T_U32, FIELD(attn_top_k), "0", 0, MAX_TOKENS, NULL, "N",
     "keys retrieved for each query head; 0: as the budget says"},
    {ATTENTION, "attn-beta", NULL, SEARCHES, true, CFG_T_REAL, FIELD(attn_beta), "0", 0, 1000, NULL, "X",
     "instead of the budget's: keys whose score is at least the best one less this are retrieved; 0: the budget's"},
    {ATTENTION, "attn-k-max", NULL, SEARCHES, true, CFG_T_U32, FIELD(attn_k_max), "0", 0, MAX_TOKENS, NULL, "N",
     "instead of the budget's: at most this many keys for each query head; 0: the budget's"},
    {ATTENTION, "estimate", NULL, SEARCHES, true, CFG_T_CHOICE, FIELD(estimate), "on", ANY_LENGTH, switches, "MODE",
     "where keys are retrieved: estimate what the keys that are not read would add"},
    {ATTENTION, "n-sink", NULL, SEARCHES, true, CFG_T_U32, FIELD(n_sink), "128", 0, MAX_TOKENS, NULL, "N", "first tokens that are always read"},
    {ATTENTION, "n-local", NULL, SEARCHES, true, CFG_T_U32, FIELD(n_local), "512", 1, MAX_TOKENS, NULL, "N", "last tokens that are always read"},

    {SAMPLING, "n-predict", "n", SERVE_RUN, true, CFG_T_I32, FIELD(n_predict), "-1", -1, MAX_TOKENS, NULL, "N",
     "most tokens of an answer; -1: what fits"},
    {SAMPLING, "temp", NULL, SERVE_RUN, true, CFG_T_REAL, FIELD(temp), "0.8", 0, 100, NULL, "X", "temperature; 0: always the likeliest token"},
    {SAMPLING, "top-k", NULL, SERVE_RUN, true, CFG_T_I32, FIELD(top_k), "40", 0, MAX_TOKENS, NULL, "N", "sample among the N likeliest; 0: off"},
    {SAMPLING, "top-p", NULL, SERVE_RUN, true, CFG_T_REAL, FIELD(top_p), "0.95", 0, 1, NULL, "X",
     "sample among the likeliest that together reach this probability; 1: off"},
    {SAMPLING, "min-p", NULL, SERVE_RUN, true, CFG_T_REAL, FIELD(min_p), "0.05", 0, 1, NULL, "X",
     "drop tokens below this share of the likeliest one's probability; 0: off"},
    {SAMPLING, "repeat-penalty", NULL, SERVE_RUN, true, CFG_T_REAL, FIELD(repeat_penalty), "1", 0.01, 100, NULL, "X",
     "divides the scores of recent tokens; 1: off"},
    {SAMPLING, "repeat-last-n", NULL, SERVE_RUN, true, CFG_T_I32, FIELD(repeat_last_n), "64", -1, MAX_TOKENS, NULL, "N",
     "how many recent tokens the penalties see; -1: all"},
    {SAMPLING, "presence-penalty", NULL, SERVE_RUN, true, CFG_T_REAL, FIELD(presence_penalty), "0", -2, 2, NULL, "X",
     "subtracted from the scores of recent tokens"},
    {SAMPLING, "frequency-penalty", NULL, SERVE_RUN, true, CFG_T_REAL, FIELD(frequency_penalty), "0", -2, 2, NULL, "X",
     "subtracted for each time that a token occurred"},
    {SAMPLING, "seed", "s", SERVE_RUN, true, CFG_T_I64, FIELD(seed), "-1", -1, 4294967295.0, NULL, "N", "seed of the random numbers; -1: another each time"},

    {SERVER, "host", NULL, CFG_SERVE, true, CFG_T_TEXT, FIELD(host), "127.0.0.1", ANY_LENGTH, NULL, "ADDRESS",
     "address to listen on; one that others can reach needs api-key-file"},
    {SERVER, "port", NULL, CFG_SERVE, true, CFG_T_U32, FIELD(port), "8080", 0, 65535, NULL, "N", "TCP port; 0: any free one"},
    {SERVER, "host", NULL, CLIENT, true, CFG_T_TEXT, FIELD(host), "127.0.0.1", ANY_LENGTH, NULL, "ADDRESS", "where the daemon listens"},
    {SERVER, "port", NULL, CLIENT, true, CFG_T_U32, FIELD(port), "8080", 1, 65535, NULL, "N", "its TCP port"},
    {SERVER, "alias", "a", CFG_SERVE, true, CFG_T_TEXT, FIELD(alias), NULL, ANY_LENGTH, NULL, "NAME",
     "the model's name as clients see it; without it, the file's name"},
    {SERVER, "api-key-file", NULL, CFG_SERVE, true, CFG_T_TEXT, FIELD(api_key_file), NULL, ANY_LENGTH, NULL, "FILE",
     "keys that clients must show, one a line, the first the operator's, who may see what counts over all of them; a file that only its owner can read"},
    {SERVER, "api-key-file", NULL, CLIENT, true, CFG_T_TEXT, FIELD(api_key_file), NULL, ANY_LENGTH, NULL, "FILE",
     "the first key in it is shown to the daemon; a file that only its owner can read"},
    {SERVER, "allowed-hosts", NULL, CFG_SERVE, true, CFG_T_TEXT, FIELD(allowed_hosts), NULL, ANY_LENGTH, NULL, "NAMES",
     "Host headers to accept besides localhost and the address, separated by commas"},
    {SERVER, "max-queue", NULL, CFG_SERVE, true, CFG_T_U32, FIELD(max_queue), "64", 1, 100000, NULL, "N", "requests that may wait; more are told to come back (429)"},
    {SERVER, "max-body-mb", NULL, CFG_SERVE, true, CFG_T_U32, FIELD(max_body_mb), "64", 1, 4096, NULL, "MIB", "largest request body"},
    {SERVER, "timeout", "to", CFG_SERVE, true, CFG_T_U32, FIELD(timeout), "600", 1, 86400, NULL, "SECONDS", "how long a connection may be idle"},
    {SERVER, "max-connections", NULL, CFG_SERVE, true, CFG_T_U32, FIELD(max_connections), "256", 1, 65536, NULL, "N", "open connections"},
    {SERVER, "log-level", NULL, CFG_SERVE, true, CFG_T_CHOICE, FIELD(log_level), "info", ANY_LENGTH, levels, "LEVEL", "how much is logged"},

    {COMMAND, "file", "f", CFG_RUN, false, CFG_T_TEXT, FIELD(file), NULL, ANY_LENGTH, NULL, "FILE", "a text that the first question is about"},
    {COMMAND, "file", "f", CFG_EVAL, false, CFG_T_TEXTS, FIELD(file), NULL, ANY_LENGTH, NULL, "FILE", "the text to evaluate on; may be given more than once"},
    {COMMAND, "file", "f", CFG_EVAL_DUMP, false, CFG_T_TEXT, FIELD(file), NULL, ANY_LENGTH, NULL, "FILE", "the text to read"},
    {COMMAND, "layers", NULL, CFG_EVAL_DUMP, false, CFG_T_NUMBERS, FIELD(layers), NULL, 0, 65535, NULL, "N,N,...", "layers to write, from 0 on; without it, all"},
    {COMMAND, "folder", NULL, CFG_EVAL_DUMP, false, CFG_T_TEXT, FIELD(folder), NULL, ANY_LENGTH, NULL, "FOLDER", "where the .npy files go; it must be there"},
    {COMMAND, "file", "f", BENCH, false, CFG_T_TEXT, FIELD(file), NULL, ANY_LENGTH, NULL, "FILE",
     "measure on this text; without it, on random tokens"},
    {COMMAND, "file", "f", CFG_CONTEXTS_ADD, false, CFG_T_TEXT, FIELD(file), NULL, ANY_LENGTH, NULL, "FILE", "the text"},
    {COMMAND, "name", NULL, CFG_CONTEXTS_ONE | CFG_CONTEXTS_ADD, false, CFG_T_TEXT, FIELD(name), NULL, ANY_LENGTH, NULL, "NAME",
     "the context's: up to 64 letters, digits, dots, dashes and underscores"},
    {COMMAND, "ttl", NULL, CFG_CONTEXTS_ADD, false, CFG_T_TEXT, FIELD(ttl), NULL, ANY_LENGTH, NULL, "TIME",
     "how long it lives: seconds, or 90m, 24h, 7d; without it, until it is removed"},
    {COMMAND, "pinned", NULL, CFG_CONTEXTS_ADD, false, CFG_T_SWITCH, FIELD(pinned), NULL, ANY_LENGTH, NULL, NULL, "keep it in memory"},
    {COMMAND, "replace", NULL, CFG_CONTEXTS_ADD, false, CFG_T_SWITCH, FIELD(replace), NULL, ANY_LENGTH, NULL, NULL, "take the place of an existing one of that name"},
    {COMMAND, "prompt", "p", CFG_RUN, false, CFG_T_TEXT, FIELD(prompt), NULL, ANY_LENGTH, NULL, "TEXT", "answer this one question and end"},
    {COMMAND, "n-prompt", "p", CFG_BENCH_PREFILL, false, CFG_T_NUMBERS, FIELD(prompt), "512", 1, MAX_TOKENS, NULL, "N,N,...", "prompt lengths to measure"},
    {COMMAND, "keys", NULL, CFG_BENCH_INDEX, false, CFG_T_TEXT, FIELD(keys), NULL, ANY_LENGTH, NULL, "FILE", "keys of one head, .npy [n][dim]"},
    {COMMAND, "values", NULL, CFG_BENCH_INDEX, false, CFG_T_TEXT, FIELD(values), NULL, ANY_LENGTH, NULL, "FILE", "their values, .npy [n][dim]"},
    {COMMAND, "queries", NULL, CFG_BENCH_INDEX, false, CFG_T_TEXT, FIELD(queries), NULL, ANY_LENGTH, NULL, "FILE",
     "queries of the group at successive steps, .npy [steps][group][dim]"},
    {COMMAND, "train-queries", NULL, CFG_BENCH_INDEX, false, CFG_T_TEXT, FIELD(train_queries), NULL, ANY_LENGTH, NULL, "FILE",
     "queries of the prompt to build from, .npy [m][group][dim]"},
    {COMMAND, "train-positions", NULL, CFG_BENCH_INDEX, false, CFG_T_TEXT, FIELD(train_positions), NULL, ANY_LENGTH, NULL, "FILE",
     "their positions, .npy [m]; without it, even distances"},
    {COMMAND, "key-positions", NULL, CFG_BENCH_INDEX, false, CFG_T_TEXT, FIELD(key_positions), NULL, ANY_LENGTH, NULL, "FILE",
     "positions of the keys, .npy [n]; without it, 0 to n - 1"},
    {COMMAND, "kind", NULL, CFG_BENCH_INDEX, false, CFG_T_CHOICES, FIELD(kind), "flat,cluster,ivf,graph", ANY_LENGTH, kinds, "KINDS", "kinds of index to measure"},
    {COMMAND, "codes", NULL, CFG_BENCH_INDEX, false, CFG_T_CHOICES, FIELD(codes), "f16,int8", ANY_LENGTH, codes, "CODES",
     "what flat reads of a key: all of it (f16), or a code that finds candidates"},
    {COMMAND, "replicas", NULL, CFG_BENCH_INDEX, false, CFG_T_U32, FIELD(replicas), "48", 1, 65536, NULL, "N",
     "copies that are searched in turn, as many as a model has layers and KV heads, as far as memory allows"},
    {COMMAND, "fit", NULL, CFG_BENCH_INDEX, false, CFG_T_SWITCH, FIELD(fit), NULL, ANY_LENGTH, NULL, NULL,
     "measure this machine instead of an index, in some seconds, and write what auto chooses by to the file \"cost\" in the state folder"},
    {COMMAND, "depth", "d", CFG_BENCH_DECODE, false, CFG_T_NUMBERS, FIELD(depth), "0", 0, MAX_TOKENS, NULL, "N,N,...",
     "tokens in the context before decoding begins"},
    {COMMAND, "n-predict", "n", CFG_BENCH_DECODE, false, CFG_T_I32, FIELD(n_predict), "32", 1, 1048576, NULL, "N", "tokens to decode"},
    {COMMAND, "n-predict", "n", CFG_BENCH_INDEX, false, CFG_T_I32, FIELD(n_predict), "90", 1, 1048576, NULL, "N", "first steps of the queries to use"},
    {COMMAND, "n-predict", "n", CFG_EVAL, false, CFG_T_I32, FIELD(n_predict), "1024", 1, 1048576, NULL, "N", "last tokens of a text to compare at"},
    {COMMAND, "n-predict", "n", CFG_EVAL_DUMP, false, CFG_T_I32, FIELD(n_predict), "90", 1, 1048576, NULL, "N", "last tokens of the text whose queries are written"},
    {COMMAND, "repeat", "r", BENCH, false, CFG_T_U32, FIELD(repeat), "3", 1, 1000, NULL, "N", "times that each test is run"},
    {COMMAND, "repeat", "r", CFG_BENCH_INDEX, false, CFG_T_U32, FIELD(repeat), "20", 1, 1000, NULL, "N", "rounds of timing"},
    {COMMAND, "output", "o", BENCH | CFG_BENCH_INDEX | CFG_EVAL, false, CFG_T_CHOICE, FIELD(output), "table", ANY_LENGTH, outputs, "FORMAT",
     "how results are printed"},
    {COMMAND, "output", "o", CFG_INSPECT | CFG_CONTEXTS | CFG_CONTEXTS_ONE, false, CFG_T_CHOICE, FIELD(output), "table", ANY_LENGTH, facts, "FORMAT", "how it is printed"},

    {GENERAL, "config", NULL, ALL, false, CFG_T_CONFIG, 0, NULL, ANY_LENGTH, NULL, "FILE", "read settings from this file (name = value; # begins a comment)"},
    {GENERAL, "help", "h", ALL, false, CFG_T_SWITCH, FIELD(help), NULL, ANY_LENGTH, NULL, NULL, "print this and end"},
    {GENERAL, "version", NULL, ALL, false, CFG_T_SWITCH, FIELD(version), NULL, ANY_LENGTH, NULL, NULL, "print the version and end"},
};
/* clang-format on */

const size_t cfg_table_rows = sizeof cfg_table / sizeof cfg_table[0];
