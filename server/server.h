/* server/: the program. main.c dispatches to one function per sub-command; everything here may log and exit, the layers below may not. */
#ifndef RETRIEVALD_SERVER_H
#define RETRIEVALD_SERVER_H

#include "config.h"
#include "engine.h"

/* Exit status of the process. */
int srv_cmd_serve(const cfg_settings *s);
int srv_cmd_run(const cfg_settings *s);
int srv_cmd_bench_decode(const cfg_settings *s);
int srv_cmd_bench_prefill(const cfg_settings *s);
int srv_cmd_bench_index(const cfg_settings *s);
int srv_cmd_eval_logits(const cfg_settings *s);
int srv_cmd_eval_dump(const cfg_settings *s);
int srv_cmd_inspect(const cfg_settings *s);
int srv_cmd_contexts_list(const cfg_settings *s);
int srv_cmd_contexts_show(const cfg_settings *s);
int srv_cmd_contexts_add(const cfg_settings *s);
int srv_cmd_contexts_pin(const cfg_settings *s);
int srv_cmd_contexts_unpin(const cfg_settings *s);
int srv_cmd_contexts_rm(const cfg_settings *s);
int srv_cmd_contexts_verify(const cfg_settings *s);

/* Shared by the sub-commands (cmd_common.c): settings into engine terms. -EINVAL with a sentence. */
int srv_engine_params(const cfg_settings *s, eng_params *ret, char *err, size_t errlen);
int srv_budget(const cfg_settings *s, eng_attention *a, char *err, size_t errlen); /* top_k, beta, k_max alone */
int srv_attention(const cfg_settings *s, eng_attention *ret, char *err, size_t errlen);
eng_sampling srv_sampling(const cfg_settings *s);

#endif
