/* What the sub-commands that work in the foreground (run, bench, eval, inspect) share. They talk on stderr and give results on stdout. */
#ifndef RETRIEVALD_SERVER_CMD_COMMON_H
#define RETRIEVALD_SERVER_CMD_COMMON_H

#include "json.h"
#include "server.h"
#include "template.h"
#include "trace.h"

/* Prints "retrievald: ..." and returns EXIT_FAILURE. */
int srv_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

double srv_seconds(void); /* monotonic */

/* Opens the model with warnings on stderr, or prints why not. 0, else an exit status. */
int srv_open(const cfg_settings *s, eng_params *params, eng_engine **ret);

/* Opens it for tests that need room for n_ctx tokens; -c, if given, must hold them. */
int srv_open_for(const cfg_settings *s, size_t n_ctx, bool f32_activations, eng_engine **ret);

/* With --trace, the calling thread's work is traced from now on; *ret is NULL without. 0, else an exit status, having said why. */
int srv_trace_begin(const cfg_settings *s, eng_trace **ret);

/* After the engine is closed: writes the trace and frees it. 0, else an exit status. NULL is fine. */
int srv_trace_end(const cfg_settings *s, eng_trace *t);

/* The folder that keeps contexts on disk: --state-dir, or what the environment says. -ENOENT: it says nothing. */
int srv_state_dir(const cfg_settings *s, char *ret, size_t size);

/* The file of costs in it (cost.h). Errors as above. */
int srv_cost_path(const cfg_settings *s, char *ret, size_t size);

/* Gives the engine what that file says. 0; 1: there is none; < 0: it cannot be used, with a sentence. */
int srv_use_cost(const cfg_settings *s, eng_engine *e, char *err, size_t errlen);

/* The template that --chat-template or --chat-template-file gives, NUL-terminated; *ret is NULL when neither is there. free it. */
int srv_template_given(const cfg_settings *s, char **ret, char *err, size_t errlen);

/* Gives the template helper the template, `given` or else the model's own, and the texts of the model's special tokens. -ENOENT: there is
 * none; else as srv_template_set. */
int srv_template_of(srv_template *t, const eng_engine *e, const char *given, char *err, size_t errlen);

/* A whole text file, NUL-terminated, at most 1 GiB. 0, else an exit status. free it. */
int srv_read_text(const char *path, char **ret, size_t *ret_n);

/* Exactly n token ids: of the text in `path`, or, when that is NULL, random ones (the same each time) that are no control tokens. 0, else
 * an exit status. */
int srv_test_tokens(const eng_engine *e, const char *path, size_t n, int32_t **ret);

/* The numbers of a list that config/ has checked. free it; NULL when out of memory. */
uint32_t *srv_numbers(const char *list, size_t *ret_n);

/* The attention modes and budgets that --attention and --attention-budget list: each mode that retrieves with each budget. 0, else an exit
 * status. free it. */
typedef struct {
    eng_attention attention;
    char budget[32]; /* its name, "custom", or "-" where nothing is retrieved */
} srv_policy;

int srv_policies(const cfg_settings *s, srv_policy **ret, size_t *ret_n);

/* A greedy session; cache: goes on from a kept context, and is kept. 0, else an exit status. */
int srv_open_session(eng_engine *e, const int32_t *ids, size_t n_ids, uint32_t max_tokens, const eng_attention *a, bool cache, eng_session **ret);
int srv_prefill(eng_session *session, const char *what);

/* Reads a prompt that sessions of all these policies can go on from: where one of them may use a graph, what it is built from is kept. 0, else
 * an exit status. */
int srv_keep_prompt(eng_engine *e, const int32_t *ids, size_t n_ids, const srv_policy *policies, size_t n);

void srv_sort(double *x, size_t n);
double srv_median(const double *sorted, size_t n); /* n > 0 */

/* A progress bar on a terminal, a line now and then elsewhere; nothing for what is done within a moment. */
typedef struct {
    const char *what;
    double started, last_shown;
    bool terminal, shown;
    uint32_t first, last_tenth; /* of the first call; of the last line */
    bool any;
} srv_progress;

srv_progress srv_progress_begin(const char *what);
void srv_progress_step(void *progress, uint32_t n_done, uint32_t n_cached, uint32_t n_prompt); /* eng_progress_fn */
void srv_progress_end(srv_progress *p);

/* Builds all indexes that are wanted. */
void srv_finish_indexes(eng_engine *e);

/* Prints a line of JSON and frees it. 0, else an exit status. */
int srv_print_json(srv_buf *line);

/* Flushes stdout; EXIT_FAILURE when what was printed did not arrive. */
int srv_finish_output(void);

#endif
