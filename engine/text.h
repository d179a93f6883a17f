/* Sentences for humans: error texts, and strings of strangers made fit to appear in them. */
#ifndef RETRIEVALD_TEXT_H
#define RETRIEVALD_TEXT_H

#include <stdbool.h>
#include <stddef.h>

/* Writes the sentence to err (may be NULL) and gives rc back, so that a failing function can `return eng_fail(...)`. */
int eng_fail(char *err, size_t errlen, int rc, const char *format, ...) __attribute__((format(printf, 4, 5)));

bool eng_utf8_valid(const char *s, size_t n);

/* Puts s into buf (size >= 4) with a final NUL: control characters and bytes that are not UTF-8 become '?', what does not fit becomes
 * "...". Returns buf. */
const char *eng_printable(const char *s, size_t n, char *buf, size_t size);

#endif
