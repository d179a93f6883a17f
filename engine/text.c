#include "text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <utf8proc.h>

int eng_fail(char *err, size_t errlen, int rc, const char *format, ...)
{
    if (err && errlen) {
        va_list ap;
        va_start(ap, format);
        vsnprintf(err, errlen, format, ap);
        va_end(ap);
    }
    return rc;
}

/* Bytes of the character at s (n > 0 left), 0 when it is not UTF-8. */
static size_t utf8_step(const char *s, size_t n, utf8proc_int32_t *ret)
{
    /* utf8proc takes a negative length for "NUL-terminated", and never needs more than 4 bytes. */
    utf8proc_ssize_t k = utf8proc_iterate((const utf8proc_uint8_t *)s, n < 4 ? (utf8proc_ssize_t)n : 4, ret);
    return k > 0 ? (size_t)k : 0;
}

bool eng_utf8_valid(const char *s, size_t n)
{
    utf8proc_int32_t c;
    for (size_t i = 0, k; i < n; i += k)
        if (!(k = utf8_step(s + i, n - i, &c)))
            return false;
    return true;
}

/* C0, C1 and DEL would act on a terminal; U+2028 and the bidirectional controls would rearrange a log line. */
static bool printable(utf8proc_int32_t c)
{
    return c >= 0x20 && (c < 0x7f || c >= 0xa0) && (c < 0x2028 || c > 0x202e) && (c < 0x2066 || c > 0x2069);
}

const char *eng_printable(const char *s, size_t n, char *buf, size_t size)
{
    size_t o = 0, cut = 0; /* cut: where "..." still fits */
    for (size_t i = 0, k; i < n; i += k) {
        utf8proc_int32_t c = 0;
        k = utf8_step(s + i, n - i, &c);
        bool keep = k && printable(c);
        size_t add = keep ? k : 1;
        k = k ? k : 1;
        if (o + add + 1 > size) {
            memcpy(buf + cut, "...", 4);
            return buf;
        }
        if (keep)
            memcpy(buf + o, s + i, k);
        else
            buf[o] = '?';
        o += add;
        if (o + 4 <= size)
            cut = o;
    }
    buf[o] = 0;
    return buf;
}
