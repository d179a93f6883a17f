/* A string of a JSON line with its NULs: cJSON ends a string at \u0000, and tokenizers must not. */
#ifndef RETRIEVALD_TESTS_JSON_TEXT_H
#define RETRIEVALD_TESTS_JSON_TEXT_H

#include <stdlib.h>
#include <string.h>

static unsigned t_hex4(const char *p)
{
    char digits[5] = {p[0], p[1], p[2], p[3], 0};
    return (unsigned)strtoul(digits, NULL, 16);
}

/* The value of `"name": "..."` (or without the space) in an ASCII line, malloc'ed; NULL when it is not there. Quotes inside strings are
 * escaped, so the name with its plain quotes cannot be inside one. */
static char *t_json_text(const char *line, const char *name, size_t *ret_n)
{
    char key[64];
    size_t k = strlen(name);
    key[0] = '"';
    memcpy(key + 1, name, k);
    memcpy(key + 1 + k, "\":", 3);
    const char *p = strstr(line, key);
    if (!p)
        return NULL;
    p += k + 3;
    p += *p == ' ';
    if (*p++ != '"')
        return NULL;
    char *out = malloc(strlen(p) + 1);
    size_t n = 0;
    for (; *p != '"'; p++) {
        if (*p != '\\') {
            out[n++] = *p;
            continue;
        }
        static const char plain[] = "\"\\/bfnrt", meaning[] = "\"\\/\b\f\n\r\t";
        const char *e = strchr(plain, *++p);
        if (e) {
            out[n++] = meaning[e - plain];
            continue;
        }
        unsigned c = t_hex4(p + 1);
        p += 4;
        if (c >= 0xd800 && c < 0xdc00) {
            c = 0x10000 + ((c - 0xd800) << 10) + (t_hex4(p + 3) - 0xdc00);
            p += 6;
        }
        if (c < 0x80) {
            out[n++] = (char)c;
        } else if (c < 0x800) {
            out[n++] = (char)(0xc0 | c >> 6);
            out[n++] = (char)(0x80 | (c & 63));
        } else if (c < 0x10000) {
            out[n++] = (char)(0xe0 | c >> 12);
            out[n++] = (char)(0x80 | (c >> 6 & 63));
            out[n++] = (char)(0x80 | (c & 63));
        } else {
            out[n++] = (char)(0xf0 | c >> 18);
            out[n++] = (char)(0x80 | (c >> 12 & 63));
            out[n++] = (char)(0x80 | (c >> 6 & 63));
            out[n++] = (char)(0x80 | (c & 63));
        }
    }
    out[n] = 0;
    *ret_n = n;
    return out;
}

#endif
