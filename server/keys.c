#include "keys.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_FILE = 1 << 20, MAX_KEY = 1024, DIGEST = 32 };

typedef struct {
    uint8_t digest[DIGEST];
    uint64_t tenant;
} api_key;

struct srv_keys {
    size_t n;
    api_key keys[];
};

/* ---- SHA-256 ---------------------------------------------------------------------------------------------------- */

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

static void sha256_block(uint32_t h[8], const uint8_t *p)
{
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] + (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3) +
               (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10);
    memcpy(v, h, sizeof(v));
    for (int i = 0; i < 64; i++) {
        uint32_t e = v[4], a = v[0];
        uint32_t t1 = v[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & v[5]) ^ (~e & v[6])) + round_constants[i] + w[i];
        uint32_t t2 = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & v[1]) ^ (a & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof(*v));
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++)
        h[i] += v[i];
}

void srv_sha256(const void *data, size_t len, uint8_t ret[DIGEST])
{
    uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    const uint8_t *p = data;
    size_t left = len;
    for (; left >= 64; left -= 64, p += 64)
        sha256_block(h, p);
    uint8_t last[128] = {0};
    if (left)
        memcpy(last, p, left);
    last[left] = 0x80;
    size_t n = left < 56 ? 64 : 128;
    for (int i = 0; i < 8; i++)
        last[n - 1 - (size_t)i] = (uint8_t)((uint64_t)len * 8 >> (8 * i));
    for (size_t i = 0; i < n; i += 64)
        sha256_block(h, last + i);
    for (int i = 0; i < DIGEST; i++)
        ret[i] = (uint8_t)(h[i / 4] >> (24 - 8 * (i % 4)));
}

/* ---- keys ------------------------------------------------------------------------------------------------------- */

/* Eight bytes of a digest of their own: they stand in files, and are no step towards the key or the digest that lets it in. */
static uint64_t tenant_of(const uint8_t digest[DIGEST])
{
    static const char label[] = "retrievald tenant";
    uint8_t text[sizeof(label) + DIGEST], hash[DIGEST];
    uint64_t tenant;
    memcpy(text, label, sizeof(label));
    memcpy(text + sizeof(label), digest, DIGEST);
    srv_sha256(text, sizeof(text), hash);
    memcpy(&tenant, hash, sizeof(tenant));
    return tenant ? tenant : 1;
}

static void add_key(srv_keys *k, const char *key, size_t len)
{
    api_key *new = &k->keys[k->n++];
    srv_sha256(key, len, new->digest);
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
    srv_sha256(key, len, digest);
    for (size_t i = 0; i < k->n; i++) {
        unsigned differs = 0;
        for (size_t b = 0; b < DIGEST; b++)
            differs |= digest[b] ^ k->keys[i].digest[b];
        tenant |= -(uint64_t)(differs == 0) & k->keys[i].tenant;
        first |= (differs == 0) & (i == 0);
    }
    if (tenant) {
        *ret_tenant = tenant;
        *ret_first = first;
    }
    return tenant != 0;
}
