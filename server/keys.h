/* API keys: read from a file only its owner can read, kept and compared as SHA-256 digests, in time that does not depend on which matches.
 * Each is a tenant of the context cache: a hash of the key that the files of contexts hold, so the same after a restart, whatever the other keys are.
 */
#ifndef RETRIEVALD_SERVER_KEYS_H
#define RETRIEVALD_SERVER_KEYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct srv_keys srv_keys;

/* One key a line; empty lines and lines that begin with # do not count. -EACCES: others may read the file; -EINVAL: no key in it, or one
 * too long. */
int srv_keys_load(const char *path, srv_keys **ret, char *err, size_t errlen);
void srv_keys_free(srv_keys *k);
/* *ret_tenant: whose contexts are this key's; never 0. *ret_first: whether it is the file's first one, the operator's. */
bool srv_keys_match(const srv_keys *k, const char *key, size_t len, uint64_t *ret_tenant, bool *ret_first);

/* The first key of such a file, for a client. As srv_keys_load. */
int srv_keys_first(const char *path, char *ret, size_t size, char *err, size_t errlen);

#endif
