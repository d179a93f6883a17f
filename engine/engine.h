/* engine/: a model, its tokenizer, the forward pass, and the contexts it keeps.
 *
 * Threads: eng_open, eng_session_* and eng_idle belong to one thread, the engine thread (they drive the pool). The functions
 * marked [any] may be called from any thread at any time between eng_open and eng_close.
 * Errors: -errno; where there is `err`, a sentence for humans is put there as well. Outputs stay untouched on failure.
 */
#ifndef RETRIEVALD_ENGINE_H
#define RETRIEVALD_ENGINE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct eng_engine eng_engine;
typedef struct eng_session eng_session;

typedef enum { ENG_CPU_AUTO, ENG_CPU_SCALAR, ENG_CPU_AVX2, ENG_CPU_AVX512, ENG_CPU_AMX } eng_cpu;
typedef enum { ENG_KV_F32, ENG_KV_F16, ENG_KV_BF16, ENG_KV_Q8_0 } eng_kv_type; /* q8_0: keys less the mean key (engine/README.md) */

/* ---- attention (design: window + retrieved, merged exactly; arXiv 2409.10516 section 3) ------------------------- */

typedef enum {
    ENG_ATTN_FULL,      /* every key */
    ENG_ATTN_STREAMING, /* the window alone: first n_sink and last n_local tokens */
    ENG_ATTN_FLAT,      /* window + the best of the rest, found by a scan */
    ENG_ATTN_CLUSTER, ENG_ATTN_IVF, /* ... in clusters of keys, as far as each head must look; in a fixed share of plain ones */
    ENG_ATTN_GRAPH,     /* ... through the graph. All three: a scan until they are there */
    ENG_ATTN_AUTO,      /* whichever is cheaper: flat; without an estimate, the graph where it is ready and pays */
} eng_attn_mode;

typedef struct {
    eng_attn_mode mode;
    uint32_t n_sink, n_local; /* window */
    uint32_t top_k;           /* > 0: this many keys a query head. 0: dynamic, by beta and k_max */
    float beta; uint32_t k_max; /* dynamic: keys with score >= maximum - beta, at most k_max */
    bool estimate;            /* add an estimate of what is neither in the window nor retrieved */
} eng_attention;

eng_attention eng_attention_default(void);
const char *eng_attn_mode_name(eng_attn_mode m);            /* "full", ... */
int eng_attn_mode_parse(const char *s, eng_attn_mode *ret); /* -EINVAL */
int eng_attn_budget_parse(const char *s, eng_attention *a); /* "fast", "default", "precise": a dynamic budget. -EINVAL */

/* ---- sampling --------------------------------------------------------------------------------------------------- */

typedef struct {
    float temperature;      /* <= 0: greedy */
    int32_t top_k;          /* <= 0: off */
    float top_p, min_p;     /* 1, 0: off */
    float repeat_penalty;   /* 1: off; over the last repeat_last_n tokens */
    float presence_penalty, frequency_penalty; /* 0: off */
    int32_t repeat_last_n;  /* -1: the whole context */
    uint64_t seed;
    uint32_t n_logprobs;    /* most likely tokens to report a step, 0..20 */
} eng_sampling;

eng_sampling eng_sampling_default(void);

/* ---- open / close ----------------------------------------------------------------------------------------------- */

/* RoPE: what the operator says instead of the model's file, as llama-server's flags. */
typedef enum { ENG_ROPE_SCALING_FILE, ENG_ROPE_SCALING_NONE, ENG_ROPE_SCALING_LINEAR, ENG_ROPE_SCALING_YARN } eng_rope_scaling;
typedef struct {
    eng_rope_scaling scaling;
    float freq_base, freq_scale;    /* 0: the file's. The scale is 1 / factor */
    uint32_t yarn_orig_ctx;         /* 0: the file's */
    float yarn_ext_factor, yarn_attn_factor, yarn_beta_slow, yarn_beta_fast; /* below 0: the file's */
} eng_rope_params;

typedef struct {
    uint32_t n_ctx;           /* tokens a session may hold; 0: what the model was trained for */
    uint32_t n_threads;       /* 0: one per physical core */
    uint32_t n_chunk;         /* prefill tokens at a time (llama-server's ubatch); answers do not depend on it */
    eng_cpu cpu; int32_t n_gpu_layers; /* the last layers, on a GPU: -1: as many as fit; more than there are: all, and the output */
    eng_kv_type type_k, type_v;
    size_t cache_ram;         /* bytes for kept contexts and their indexes; 0 keeps none */
    eng_rope_params rope;
    bool f32_activations; uint32_t index_modes; /* every product in float32: slow, for evaluation; bits 1 << mode: what they search is built for every session's keys */
    float index_share;        /* share of CPU time that index builds may take between decode steps */
    void (*log)(void *ctx, int level, const char *text); /* syslog levels; NULL: silent */
    void *log_ctx;
} eng_params;

eng_params eng_params_default(void);

int eng_open(const char *model_path, const eng_params *params, eng_engine **ret, char *err, size_t errlen);
void eng_close(eng_engine *e);

typedef struct {
    const char *architecture, *name, *type;  /* "llama", general.name, "Q4_1" of most bytes */
    const char *chat_template; size_t chat_template_len; /* NULL when the file has none */
    uint64_t n_params, model_bytes;
    uint32_t n_vocab, n_embd, n_layer, n_head, n_head_kv, head_dim, n_ff, n_ctx_train;
    uint32_t n_ctx, n_threads;
    const char *cpu, *gpu; uint32_t n_gpu_layers; /* kernel level in use, e.g. "avx512 (VNNI, BF16)"; "NVIDIA H200" or NULL, and layers there */
    int32_t bos, eos; bool add_bos;          /* -1: none */
    uint64_t fingerprint;                    /* of the model file and the RoPE settings in effect */
    const char *rope_scaling;                /* in effect: "none", "linear", "yarn", "llama3", "longrope" */
    float rope_freq_base, rope_factor;
    uint32_t n_ctx_scaled;                   /* tokens the model is meant for with this scaling; n_ctx_train or more */
    uint32_t sliding_window, n_sliding_layers, n_expert, n_expert_used; /* 0: none */
    size_t kv_bytes_per_token, scratch_bytes;
    uint64_t step_bytes;                     /* of weights that a decode step reads */
} eng_info;

const eng_info *eng_info_get(const eng_engine *e); /* [any] valid until eng_close */

typedef struct {
    size_t cache_bytes, cache_limit;    /* RAM tier, indexes included */
    size_t index_bytes; uint32_t segments;
    uint32_t index_pending;             /* indexes wanted and not ready (layer x KV head x segment, of each kind) */
    uint64_t hits, misses, evictions, refusals, merges; /* of the context cache: requests; segments (refused: others are worth more) */
    uint64_t prompt_tokens, cached_tokens, predicted_tokens; /* totals */
    double prompt_seconds, predicted_seconds, index_seconds;
    uint64_t keys_held, keys_attended;  /* totals over steps, layers, query heads of decoding */
    uint64_t heartbeat;                 /* rises with every layer computed */
} eng_stats;

void eng_stats_get(const eng_engine *e, eng_stats *ret); /* [any] */

/* ---- text <-> tokens -------------------------------------------------------------------------------------------- */

enum {
    ENG_TOK_ADD_SPECIAL = 1,   /* BOS / EOS where the model's file asks for them */
    ENG_TOK_PARSE_SPECIAL = 2, /* control tokens written in the text become those tokens */
};

/* [any] text is UTF-8 (other bytes are tokenized as bytes where the vocabulary has them). `guard` (may be NULL) is a string that
 * is removed from the text after special tokens have been cut out: the server puts it inside user text that looks like
 * a control token. *ret_ids is malloc'ed. */
int eng_tokenize(const eng_engine *e, const char *text, size_t len, unsigned flags, const char *guard, int32_t **ret_ids, size_t *ret_n);

/* [any] The bytes of one token, not NUL-terminated, owned by the engine; may end inside a UTF-8 character. Control tokens give
 * nothing unless special is set. -EINVAL for an id outside the vocabulary. */
int eng_token_text(const eng_engine *e, int32_t id, bool special, const char **ret_text, size_t *ret_len);

bool eng_token_is_eog(const eng_engine *e, int32_t id);     /* [any] ends a generation (EOS, EOT, ...) */
bool eng_token_is_control(const eng_engine *e, int32_t id); /* [any] */

/* ---- sessions --------------------------------------------------------------------------------------------------- */

typedef struct {
    const int32_t *ids;          /* the prompt; copied */
    size_t n_ids;
    uint32_t max_tokens;         /* room wanted for generated tokens; cut to what the context leaves */
    eng_attention attention;
    eng_sampling sampling;
    bool cache_prompt; uint64_t tenant; /* look for a prefix that this tenant (0: who has no key) keeps, and keep this one for it */
    const atomic_bool *cancel;   /* set by another thread: prefill and next return -ECANCELED within a layer. May be NULL */
} eng_request;

/* Finds and pins the longest kept prefix (64 tokens at least), reserves memory. -EINVAL: empty prompt or bad id; -E2BIG: prompt
 * does not fit the context; -ENOMEM. One session at a time. */
int eng_session_open(eng_engine *e, const eng_request *r, eng_session **ret, char *err, size_t errlen);

/* Called after each chunk, on the engine thread. */
typedef void eng_progress_fn(void *ctx, uint32_t n_done, uint32_t n_cached, uint32_t n_prompt);

/* Computes the prompt beyond the kept prefix. 0, -ECANCELED, -ENOMEM; -EIO: a kept context's file failed while it was in use. */
int eng_session_prefill(eng_session *s, eng_progress_fn *progress, void *ctx);

typedef struct {
    int32_t id;
    float logprob;                       /* of id, under the model's own distribution (temperature 1, no penalties) */
    uint32_t n_top; struct { int32_t id; float logprob; } top[20]; /* the n_logprobs most likely */
} eng_token;

/* Samples the next token (computing the step after the last one first). 0; 1: the context is full; -ECANCELED; -EIO; -EDOM: all logits are NaN. */
int eng_session_next(eng_session *s, eng_token *ret);

/* Forces `id` as the next token instead of sampling one (evaluation). As eng_session_next otherwise. */
int eng_session_force(eng_session *s, int32_t id);

/* Logits [n_vocab] after the newest token: of the prompt after prefill, else of the last token (computes its step when due). */
int eng_session_logits(eng_session *s, const float **ret);

typedef struct {
    uint32_t cache_n, disk_n;    /* prompt tokens taken from a kept context; of these, read from disk for it */
    uint32_t prompt_n;           /* prompt tokens computed */
    double prompt_ms;
    uint32_t predicted_n;
    double predicted_ms;
    double index_ms;             /* CPU time of index builds during this session */
    double keys_held, keys_attended;         /* means over decode steps, layers, query heads; window included */
    double retrieved, probed, estimated;     /* likewise: keys read beyond the window; keys or codes that searches scored; keys in the estimate */
    double read_bytes;           /* of K, V and codes, as attended: mean over decode steps */
    uint32_t n_graph, n_cluster, n_flat; /* searches answered by a graph, by clusters (cluster, ivf), by a scan */
    eng_attn_mode mode;
} eng_timings;

void eng_session_timings(const eng_session *s, eng_timings *ret);

/* Seals what was computed, gives it to the cache (also after a cancel) and frees the session. */
void eng_session_close(eng_session *s);

/* Does background work (weights to huge pages, index builds) for about max_ms. 1: there is more, 0: nothing to do. `stop` (may be NULL) ends it early. */
int eng_idle(eng_engine *e, uint32_t max_ms, const atomic_bool *stop);

#endif
