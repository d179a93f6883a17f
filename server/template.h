/* Chat templates: the model's own Jinja2 template, rendered by the real Jinja2 in helper processes that can do nothing else.
 *
 * A template is code of a stranger. template_helper.py is started before the model is loaded, imports jinja2, and forks a child per render; the
 * child has no files or sockets but its reply pipe (seccomp), and limits on time, CPU and memory; a hung or killed child costs one request.
 */
#ifndef RETRIEVALD_TEMPLATE_H
#define RETRIEVALD_TEMPLATE_H

#include <stddef.h>
#include <stdint.h>

typedef struct srv_template srv_template;

/* Starts the helper. Path of the script: next to the binary or in the data directory. -errno with a sentence. */
int srv_template_start(srv_template **ret, char *err, size_t errlen);

/* Gives it the template and what rendering needs: bos/eos texts (NULL: the variable is undefined), and the texts of all control tokens: where
 * one of these stands inside a message it is broken by the guard string, so that it stays text (see eng_tokenize); one of a single character
 * cannot be. The helper refuses a template with a syntax error here, with Jinja2's message; renders then fail with the same. Once, before the
 * first render. */
int srv_template_set(srv_template *t, const char *source, size_t len, const char *bos, const char *eos, const char *const *controls,
                     size_t n_controls, char *err, size_t errlen);
void srv_template_free(srv_template *t); /* no render may be running */

/* The guard string: a sequence of noncharacters that the helper removes from incoming text, so that only it can put it there. */
const char *srv_template_guard(void);

/* Renders the raw JSON of a request's `{"messages": [...], "tools": [...], "add_generation_prompt": true, "documents": [...],
 * "chat_template_kwargs": {...}, ...}`; other fields are ignored, add_generation_prompt is true by default. OpenAI's shapes become what templates
 * expect (role developer → system, text parts joined by newlines, null content → "", arguments given as a string → object; anything else there is
 * -EINVAL); `"openai": false` passes messages and tools through as they are, as transformers does.
 * *ret is malloc'ed text with guards in it, with a NUL after it. -EINVAL: the template or the messages are at fault (the template's own message
 * in err); -ETIMEDOUT, -ENOMEM (limits); -EIO. Blocking, safe from several threads at once: each render has a child of its own. */
int srv_template_render(srv_template *t, const char *json, size_t len, char **ret, size_t *ret_len, char *err, size_t errlen);

/* Removes guards in place and returns the new length. */
size_t srv_template_unguard(char *text, size_t len);

#endif
