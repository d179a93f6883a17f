/* Requests and answers, without HTTP: a POST body becomes a job, a job becomes JSON.
 *
 * Threads: `prepare` runs as a libuv work item and owns the job then; the engine thread fills the outbox (through queue.h, under its lock);
 * everything else about a job belongs to the loop thread, which makes it and frees it.
 */
#ifndef RETRIEVALD_SERVER_API_H
#define RETRIEVALD_SERVER_API_H

#include "contexts.h"
#include "json.h"
#include "server.h"
#include "template.h"
#include "trace.h"
#include <stdatomic.h>
#include <time.h>

typedef struct srv_recent srv_recent;

enum { SRV_MAX_STOPS = 16, SRV_MAX_STOP_LEN = 1024, SRV_MAX_LOGPROBS = 20, SRV_MAX_NAME = 128 };

typedef enum { SRV_LOADING, SRV_READY, SRV_FAILED } srv_state;

/* What all requests share. Written before the loop starts, or by the engine thread before it sets `state`. */
typedef struct {
    const cfg_settings *settings;
    eng_attention attention; /* defaults of a request */
    eng_sampling sampling;
    _Atomic(srv_state) state;
    char failure[512]; /* why, when SRV_FAILED */
    eng_engine *engine;
    const eng_info *info;
    srv_template *chat_template;
    char *given_template;   /* instead of the model's; NULL: none */
    char chat_failure[512]; /* why there is no chat; empty when there is */
    char model_name[SRV_MAX_NAME];
    char fingerprint[48];
    char bos_text[64], eos_text[64];
    srv_recent *recent; /* finished answers, by id */
    time_t started;
    eng_trace *trace;   /* NULL: none */
    atomic_bool trace_wanted; /* the engine thread is to write it */
    atomic_bool sealing; /* the engine thread is storing a finished session */
} srv_app;

/* A stretch of text with the tokens it came from. */
typedef struct {
    size_t text_len, n_tokens;
} srv_piece;

/* What the engine thread has for a job since the loop last looked. */
typedef struct {
    srv_buf text;
    srv_piece *pieces;
    eng_token *tokens; /* when log probabilities were asked for */
    size_t n_pieces, cap_pieces, n_tokens, cap_tokens;
    bool has_progress, finished;
    uint32_t done, cached, total;
    double progress_ms;
} srv_outbox;

typedef enum { SRV_END_STOP, SRV_END_LENGTH, SRV_END_CANCELLED, SRV_END_FAULT } srv_end;

typedef struct srv_job srv_job;

/* How one generating route writes its answers. `text` is valid UTF-8. */
typedef struct {
    void (*begin)(srv_job *j, srv_buf *out);
    void (*progress)(srv_job *j, const srv_outbox *o, srv_buf *out);
    void (*delta)(srv_job *j, const char *text, size_t len, const eng_token *tokens, size_t n_tokens, srv_buf *out);
    void (*finish)(srv_job *j, srv_buf *out);
    void (*whole)(srv_job *j, const srv_outbox *o, srv_buf *out);
} srv_shape;

/* 1: answered, JSON in j->reply. 0, of a job that is detached, as well; it goes on without its client. 0: a generation is set up in j->request. < 0: fault filled. */
typedef int srv_prepare(srv_job *j, srv_fault *f);

struct srv_job {
    const srv_app *app;
    srv_prepare *prepare;
    char target[SRV_MAX_NAME]; /* what its path ends with, where that is a name */
    char *body; /* freed once prepared */
    size_t body_len;
    int rc; /* of prepare */
    srv_fault fault;
    int status; /* of the reply; 0: 200 */
    srv_buf reply;

    /* a named context that the prompt goes on from, or that is made of it */
    eng_context *context;
    bool makes, detached, ran; /* ran: the engine thread has taken it */
    char *messages; /* of a conversation, as JSON: what may be named later. NULL: nothing may */
    size_t messages_len;
    srv_buf said; /* the answer's text so far */

    /* a generation */
    const srv_shape *shape;
    int32_t *ids; /* request.ids */
    eng_request request;
    uint32_t max_tokens; /* 0: only prefill */
    char *stops[SRV_MAX_STOPS];
    size_t n_stops;
    bool stream, include_usage, return_progress, logprobs;
    char id[40], model[SRV_MAX_NAME];
    time_t created;
    bool begun;         /* the first chunk is out */
    size_t text_offset; /* characters written so far: legacy log probabilities */

    /* guarded by the queue's lock until finished */
    srv_outbox outbox;
    srv_job *next, *next_dirty;
    bool dirty;

    /* written by the engine thread before it finishes the job */
    srv_end end;
    eng_timings timings;
    eng_prefix_stop miss;

    /* the loop's */
    void *owner; /* the connection; NULL when the client went away */
    size_t body_charged;
    bool generates;
};

srv_job *srv_job_new(const srv_app *app, srv_prepare *prepare, char *body, size_t body_len);
void srv_job_free(srv_job *j);
void srv_outbox_done(srv_outbox *o);

double srv_now_ms(void); /* monotonic */

/* ---- api.c: what the routes share ------------------------------------------------------------------------------- */

/* {"error": {...}} */
void srv_api_error(const srv_fault *f, srv_buf *out);

/* Parses the body, which must be an object. */
int srv_api_body(srv_job *j, cJSON **ret, srv_fault *f);

/* Fields of every generation: model, sampling, stop, stream, attention, ...; refuses by name what is not there yet. */
int srv_api_common(srv_job *j, const cJSON *body, const char *id_prefix, srv_fault *f);

/* Takes the prompt's ids (ownership on success and failure): checks them against the context and sets j->request. */
int srv_api_prompt(srv_job *j, int32_t *ids, size_t n, const char *param, srv_fault *f);
int srv_api_too_long(srv_fault *f, const char *param, size_t n_prompt, uint32_t n_ctx);

/* Reads "logprobs" and "top_logprobs" in the chat shape, or in that of completions. */
int srv_api_logprobs(srv_job *j, const cJSON *body, bool chat, srv_fault *f);

/* ---- answer.c: what the answers share --------------------------------------------------------------------------- */

/* "data: {" and id, object, created, model, fingerprint of a chunk, or "{" and the same of a whole answer; the caller closes it. */
void srv_answer_head(const srv_job *j, const char *object, bool chunk, srv_buf *out);
void srv_answer_usage(const srv_job *j, srv_buf *out);       /* ,"usage":{...} */
void srv_answer_timings(const srv_job *j, srv_buf *out);     /* ,"timings":{...} */
void srv_answer_progress(const srv_outbox *o, srv_buf *out); /* ,"prompt_progress":{...} */
const char *srv_answer_reason(const srv_job *j);
/* Text of a token, control tokens included, and its bytes as a JSON array. */
void srv_answer_token(const srv_job *j, int32_t id, const char **ret, size_t *ret_len);
void srv_answer_bytes(const char *s, size_t n, srv_buf *out);
void srv_answer_logprob(float v, srv_buf *out);

/* All that `o` holds as chunks of a stream; ends it when the job is finished. */
void srv_answer_stream(srv_job *j, const srv_outbox *o, srv_buf *out);

extern const srv_shape srv_shape_chat, srv_shape_text, srv_shape_context;

/* ---- conversation.c: what named contexts stand for, and what follows them ---------------------------------------- */

/* The body's "context", if there is one: j->context. A name that is not there is a 404. */
int srv_context_take(srv_job *j, const cJSON *body, srv_fault *f);

/* Ids of the text that follows j->context, if there is one; *ids is replaced by all of them. */
int srv_context_prepend(const srv_job *j, int32_t **ids, size_t *n, srv_fault *f);

/* Renders messages (NULL: the body's) by the chat template, with the body's other members that it knows. generation NULL: as the body says. */
int srv_chat_render(const srv_job *j, const char *messages, size_t len, const char *generation, char **ret, size_t *ret_len, srv_fault *f);

/* The prompt of the body's messages, behind j->context if there is one. */
int srv_chat_ids(srv_job *j, const cJSON *body, int32_t **ret, size_t *ret_n, srv_fault *f);

/* Contents of contexts to be made; srv_context_done them. */
typedef struct {
    eng_context_content content;
    char *source;
    int32_t *ids;
} srv_context_content;

int srv_context_of_text(const srv_job *j, const char *text, srv_context_content *ret, srv_fault *f);
int srv_context_of_messages(const srv_job *j, const char *messages, size_t len, srv_context_content *ret, srv_fault *f);
int srv_context_of_answer(const srv_job *j, const char *id, srv_context_content *ret, srv_fault *f);
void srv_context_done(srv_context_content *c);

/* What the engine says about a name, as a fault. */
int srv_context_fault(int rc, const char *name, const char *param, const char *err, srv_fault *f);

/* ---- recent.c: finished answers that may get a name, the last of them ------------------------------------------- */

typedef struct {
    char *messages, *said; /* messages NULL: a raw prompt */
    size_t messages_len, said_len, n_ids;
    int32_t *ids; /* of a raw prompt */
} srv_answer;

srv_recent *srv_recent_new(void); /* NULL: no memory */
void srv_recent_free(srv_recent *r);
void srv_recent_add(srv_recent *r, srv_job *j); /* takes what it keeps out of the job */
/* A copy; srv_answer_done it. -ENOENT, -ENOMEM. */
int srv_recent_find(srv_recent *r, uint64_t tenant, const char *id, srv_answer *ret);
void srv_answer_done(srv_answer *a);

/* ---- routes ----------------------------------------------------------------------------------------------------- */

srv_prepare srv_chat_prepare, srv_template_prepare;       /* api_chat.c */
srv_prepare srv_text_prepare;                             /* api_text.c */
srv_prepare srv_tokenize_prepare, srv_detokenize_prepare; /* api_info.c */
srv_prepare srv_contexts_list, srv_context_make, srv_context_show, srv_context_alter, srv_context_remove; /* api_contexts.c */
/* The context of a job that makes one, as it is now: for a stream's last event. */
void srv_context_write(srv_job *j);
void srv_info_models(const srv_app *app, srv_buf *out);
void srv_info_props(const srv_app *app, bool sees_all, srv_buf *out); /* sees_all: with what counts over all tenants */

#endif
