/* From token bytes to text for a client: holds back bytes that are an unfinished UTF-8 character or may be the beginning of a stop string. */
#ifndef RETRIEVALD_TEXTOUT_H
#define RETRIEVALD_TEXTOUT_H

#include <stdbool.h>
#include <stddef.h>

typedef struct srv_textout srv_textout;

/* stops are copied; n_stops may be 0. -ENOMEM */
int srv_textout_new(const char *const *stops, size_t n_stops, srv_textout **ret);
void srv_textout_free(srv_textout *t);

/* Adds a token's bytes. *ret_text [*ret_len] is what may be sent now, always whole and valid UTF-8 (invalid bytes become U+FFFD), valid until the
 * next call; may be empty. Returns 1 when a stop string came: the text ends right before it and nothing follows. 0 otherwise, -ENOMEM. */
int srv_textout_add(srv_textout *t, const char *bytes, size_t n, const char **ret_text, size_t *ret_len);

/* The rest, when generation ended without a stop string. */
int srv_textout_finish(srv_textout *t, const char **ret_text, size_t *ret_len);

#endif
