#include "keys.h"

#include <errno.h>
#include <fcntl.h>
#include <nettle/memops.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_FILE = 1 << 20, MAX_KEY = 1024, DIGEST = SHA256_DIGEST_SIZE };

typedef struct {
    uint8_t digest[DIGEST];
    uint64_t tenant;
} api_key;

struct srv_keys {
    size_t n;
    api_key keys[];
};

/* ---- keys ------------------------------------------------------------------------------------------------------- */

static void digest_of(const void *data, size_t len, uint8_t ret[DIGEST])
{
    struct sha256_ctx c;
    sha256_init(&c);
    sha256_update(&c, len, data);
    sha256_digest(&c, DIGEST, ret);
}

/* Eight bytes of a digest of their own: they stand in files, and are no step towards the key or the digest that lets it in. */
static uint64_t tenant_of(const uint8_t digest[DIGEST])
{
    static const char label[] = "retrievald tenant";
    uint8_t text[sizeof(label) + DIGEST], hash[DIGEST];
    uint64_t tenant;
    memcpy(text, label, sizeof(label));
    memcpy(text + sizeof(label), digest, DIGEST);
    digest_of(text, sizeof(text), hash);
    memcpy(&tenant, hash, sizeof(tenant));
    return tenant ? tenant : 1;
}

static void add_key(srv_keys *k, const char *key, size_t len)
{
    api_key *new = &k->keys[k->n++];
    digest_of(key, len, new->digest);
    new->tenant = tenant_of(new->digest);
}

/* ---- the file --------------------------------------------------------------------------------------------------- */

/* systemd hands credentials over with an access list that shows as a group permission. */
static bool is_credential(const char *path)
{
    const char *dir = getenv("CREDENTIALS_DIRECTORY");
    size_t n = dir ? strlen(dir) : 0;
    return n > 0 && strncmp(path, dir, n) == 0 && path[n] == '/' && !strstr(path + n, "..");
}

static int read_private(const char *path, char **ret, size_t *ret_n, char *err, size_t errlen)
{
    struct stat st;
    int rc = 0;
    char *text = NULL;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0 || fstat(fd, &st) < 0) {
        rc = -errno;
        snprintf(err, errlen, "api-key-file %s: %s", path, strerror(errno));
        goto cleanup;
    }
    if (!S_ISREG(st.st_mode) || st.st_size > MAX_FILE) {
        rc = -EINVAL;
        snprintf(err, errlen, "api-key-file %s is not a small regular file", path);
        goto cleanup;
    }
    if ((st.st_mode & 077) && !is_credential(path)) {
        rc = -EACCES;
        snprintf(err, errlen, "api-key-file %s can be read by others (mode %03o); make it private: chmod 600 %s", path, st.st_mode & 0777u,
                 path);
        goto cleanup;
    }
    text = malloc((size_t)st.st_size + 1);
    ssize_t n = text ? read(fd, text, (size_t)st.st_size) : -1;
    if (n < 0) {
        rc = text ? -errno : -ENOMEM;
        snprintf(err, errlen, "api-key-file %s: %s", path, strerror(-rc));
        goto cleanup;
    }
    text[n] = 0;
    *ret = text;
    *ret_n = (size_t)n;
    text = NULL;
cleanup:
    free(text);
    if (fd >= 0)
        close(fd);
    return rc;
}

/* The next key of the text from *io_at on, without the blanks around it. false: there is none. */
static bool next_key(const char *text, size_t n, size_t *io_at, const char **ret, size_t *ret_len)
{
    while (*io_at < n) {
        const char *end = memchr(text + *io_at, '\n', n - *io_at);
        size_t a = *io_at, b = end ? (size_t)(end - text) : n;
        *io_at = b + 1;
        while (a < b && strchr(" \t\r", text[a]))
            a++;
        while (b > a && strchr(" \t\r", text[b - 1]))
            b--;
        if (a == b || text[a] == '#')
            continue;
        *ret = text + a;
        *ret_len = b - a;
        return true;
    }
    return false;
}

static int no_key(const char *path, char *err, size_t errlen)
{
    snprintf(err, errlen, "api-key-file %s holds no key", path);
    return -EINVAL;
}

int srv_keys_first(const char *path, char *ret, size_t size, char *err, size_t errlen)
{
    char *text = NULL;
    const char *key;
    size_t n = 0, at = 0, len;
    int rc = read_private(path, &text, &n, err, errlen);
    if (rc < 0)
        return rc;
    if (!next_key(text, n, &at, &key, &len)) {
        rc = no_key(path, err, errlen);
    } else if (len >= size) {
        rc = -EINVAL;
        snprintf(err, errlen, "api-key-file %s holds a key of more than %zu characters", path, size - 1);
    } else {
        memcpy(ret, key, len);
        ret[len] = 0;
    }
    explicit_bzero(text, n);
    free(text);
    return rc;
}

int srv_keys_load(const char *path, srv_keys **ret, char *err, size_t errlen)
{
    char *text = NULL;
    size_t n = 0, lines = 1;
    int rc = read_private(path, &text, &n, err, errlen);
    if (rc < 0)
        return rc;
    for (size_t i = 0; i < n; i++)
        lines += text[i] == '\n';
    srv_keys *k = calloc(1, sizeof(*k) + lines * sizeof(k->keys[0]));
    if (!k) {
        rc = -ENOMEM;
        snprintf(err, errlen, "out of memory");
        goto cleanup;
    }
    const char *key;
    for (size_t at = 0, len; next_key(text, n, &at, &key, &len);) {
        if (len > MAX_KEY) {
            rc = -EINVAL;
            snprintf(err, errlen, "api-key-file %s holds a key of more than %d characters", path, MAX_KEY);
            goto cleanup;
        }
        add_key(k, key, len);
    }
    if (k->n == 0) {
        rc = no_key(path, err, errlen);
        goto cleanup;
    }
    *ret = k;
    k = NULL;
cleanup:
    explicit_bzero(text, n);
    free(text);
    srv_keys_free(k);
    return rc;
}

void srv_keys_free(srv_keys *k)
{
    free(k);
}

bool srv_keys_match(const srv_keys *k, const char *key, size_t len, uint64_t *ret_tenant, bool *ret_first)
{
    uint8_t digest[DIGEST];
    uint64_t tenant = 0;
    bool first = false;
    digest_of(key, len, digest);
    for (size_t i = 0; i < k->n; i++) {
        bool same = memeql_sec(digest, k->keys[i].digest, DIGEST);
        tenant |= -(uint64_t)same & k->keys[i].tenant;
        first |= same & (i == 0);
    }
    if (tenant) {
        *ret_tenant = tenant;
        *ret_first = first;
    }
    return tenant != 0;
}
