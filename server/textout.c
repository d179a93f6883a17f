/* Two stages, both linear in the bytes that pass: bytes → whole characters (invalid bytes become U+FFFD, one for each maximal subpart of a
 * character, as Unicode 15, section 3.9 recommends) → search for the stop strings (Knuth-Morris-Pratt, one state for each). What a state
 * has matched so far is held back.
 */
#include "textout.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char *text;
    size_t len;
    size_t *border; /* [len]: of text[0..i], the longest proper prefix that is also a suffix */
    size_t matched; /* bytes at the end of the output so far that are a prefix of text */
} stop_string;

/* An unfinished character. */
typedef struct {
    unsigned char bytes[4];
    unsigned n, missing;
    unsigned char low, high; /* range of the next byte */
} partial;

struct srv_textout {
    partial part;
    char *text; /* [sent, len) has not gone out yet */
    size_t sent, len, space;
    size_t n_stops;
    int stopped;
    stop_string stops[];
};

/* Takes one byte: true when it may stand where the character p goes on, or may begin a character. p->missing is 0 at a character's end. */
static bool partial_add(partial *p, unsigned char c)
{
    if (p->n) {
        if (c < p->low || c > p->high)
            return false;
        p->bytes[p->n++] = c;
        p->missing--;
        p->low = 0x80;
        p->high = 0xBF;
        return true;
    }
    if (c < 0x80)
        p->missing = 0;
    else if (c >= 0xC2 && c <= 0xDF)
        p->missing = 1;
    else if (c >= 0xE0 && c <= 0xEF)
        p->missing = 2;
    else if (c >= 0xF0 && c <= 0xF4)
        p->missing = 3;
    else
        return false;
    /* No overlong forms, no surrogates, nothing past U+10FFFF (Unicode, table 3-7). */
    p->low = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80;
    p->high = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
    p->bytes[p->n++] = c;
    return true;
}

static bool is_utf8(const char *s, size_t len)
{
    partial p = {0};
    for (size_t i = 0; i < len; i++) {
        if (!partial_add(&p, (unsigned char)s[i]))
            return false;
        if (!p.missing)
            p.n = 0;
    }
    return !p.n;
}

static int stop_init(stop_string *s, const char *text, size_t len)
{
    s->text = malloc(len);
    s->border = len <= SIZE_MAX / sizeof *s->border ? malloc(len * sizeof *s->border) : NULL;
    if (!s->text || !s->border)
        return -ENOMEM;
    memcpy(s->text, text, len);
    s->len = len;
    s->border[0] = 0;
    for (size_t i = 1, k = 0; i < len; i++) {
        while (k && text[i] != text[k])
            k = s->border[k - 1];
        k += text[i] == text[k];
        s->border[i] = k;
    }
    return 0;
}

int srv_textout_new(const char *const *stops, size_t n_stops, srv_textout **ret)
{
    if (n_stops > (SIZE_MAX - sizeof(srv_textout)) / sizeof(stop_string))
        return -ENOMEM;
    srv_textout *t = calloc(1, sizeof *t + n_stops * sizeof(stop_string));
    if (!t)
        return -ENOMEM;
    for (size_t i = 0; i < n_stops; i++) {
        size_t len = strlen(stops[i]);
        /* The text is valid UTF-8: anything else cannot stand in it. */
        if (!len || !is_utf8(stops[i], len))
            continue;
        if (stop_init(&t->stops[t->n_stops++], stops[i], len)) {
            srv_textout_free(t);
            return -ENOMEM;
        }
    }
    *ret = t;
    return 0;
}

void srv_textout_free(srv_textout *t)
{
    if (!t)
        return;
    for (size_t i = 0; i < t->n_stops; i++) {
        free(t->stops[i].text);
        free(t->stops[i].border);
    }
    free(t->text);
    free(t);
}

/* Space for n more bytes. Moves what is held back to the front only when at least as much went out since: linear altogether. */
static int reserve(srv_textout *t, size_t n)
{
    if (t->sent && t->sent >= t->len - t->sent) {
        memmove(t->text, t->text + t->sent, t->len - t->sent);
        t->len -= t->sent;
        t->sent = 0;
    }
    if (n <= t->space - t->len)
        return 0;
    if (n > SIZE_MAX / 4 || t->len > SIZE_MAX / 4)
        return -ENOMEM;
    size_t space = 2 * (t->len + n);
    char *p = realloc(t->text, space);
    if (!p)
        return -ENOMEM;
    t->text = p;
    t->space = space;
    return 0;
}

/* Adds a character's bytes and cuts the text where a stop string ends in them: of several that end at the same byte, before the longest. */
static void put(srv_textout *t, const char *bytes, size_t n)
{
    for (size_t i = 0; i < n && !t->stopped; i++) {
        size_t cut = 0;
        t->text[t->len++] = bytes[i];
        for (size_t s = 0; s < t->n_stops; s++) {
            stop_string *stop = &t->stops[s];
            while (stop->matched && bytes[i] != stop->text[stop->matched])
                stop->matched = stop->border[stop->matched - 1];
            stop->matched += bytes[i] == stop->text[stop->matched];
            if (stop->matched == stop->len && stop->len > cut)
                cut = stop->len;
        }
        if (cut) {
            t->len -= cut;
            t->stopped = 1;
        }
    }
}

static void put_byte(srv_textout *t, unsigned char c)
{
    static const char replacement[] = "\xEF\xBF\xBD";
    partial *p = &t->part;
    if (!partial_add(p, c)) {
        bool again = p->n; /* the byte broke a character off and may begin one */
        p->n = 0;
        put(t, replacement, 3);
        if (!again)
            return;
        if (!partial_add(p, c)) {
            put(t, replacement, 3);
            return;
        }
    }
    if (!p->missing) {
        put(t, (const char *)p->bytes, p->n);
        p->n = 0;
    }
}

/* What no stop string may still claim. */
static int release(srv_textout *t, bool all, const char **ret_text, size_t *ret_len)
{
    size_t held = 0;
    for (size_t s = 0; !all && !t->stopped && s < t->n_stops; s++)
        if (t->stops[s].matched > held)
            held = t->stops[s].matched;
    *ret_text = t->text ? t->text + t->sent : "";
    *ret_len = t->len - held - t->sent;
    t->sent = t->len - held;
    return t->stopped;
}

int srv_textout_add(srv_textout *t, const char *bytes, size_t n, const char **ret_text, size_t *ret_len)
{
    /* Every byte may become a U+FFFD, and the first one may leave another behind. */
    if (n > SIZE_MAX / 4 || reserve(t, 3 * n + 3))
        return -ENOMEM;
    for (size_t i = 0; i < n && !t->stopped; i++)
        put_byte(t, (unsigned char)bytes[i]);
    return release(t, false, ret_text, ret_len);
}

int srv_textout_finish(srv_textout *t, const char **ret_text, size_t *ret_len)
{
    if (reserve(t, 3))
        return -ENOMEM;
    if (t->part.n && !t->stopped) {
        t->part.n = 0;
        put(t, "\xEF\xBF\xBD", 3);
    }
    return release(t, true, ret_text, ret_len);
}
