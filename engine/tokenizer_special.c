#include "tokenizer_parts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int by_bytes(const void *pa, const void *pb)
{
    const eng_special *a = pa, *b = pb;
    size_t n = a->text.n < b->text.n ? a->text.n : b->text.n;
    int c = memcmp(a->text.s, b->text.s, n);
    return c ? c : (a->text.n > b->text.n) - (a->text.n < b->text.n);
}

int eng_specials_init(eng_specials *s, const eng_special *entries, size_t n)
{
    *s = (eng_specials){.n = n};
    if (!n)
        return 0;
    s->sorted = calloc(n, sizeof *s->sorted);
    if (!s->sorted)
        return -ENOMEM;
    memcpy(s->sorted, entries, n * sizeof *entries);
    qsort(s->sorted, n, sizeof *s->sorted, by_bytes);
    size_t i = 0;
    for (int b = 0; b < 256; b++) {
        s->first[b] = i;
        while (i < n && (unsigned char)s->sorted[i].text.s[0] == b)
            i++;
    }
    s->first[256] = n;
    return 0;
}

void eng_specials_done(eng_specials *s)
{
    free(s->sorted);
    *s = (eng_specials){0};
}

/* First entry of sorted[lo, hi) whose byte at `depth` is at least b (past: greater than b). All of them are longer than depth. */
static size_t bound(const eng_special *sorted, size_t lo, size_t hi, size_t depth, unsigned char b, bool past)
{
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        unsigned char c = (unsigned char)sorted[mid].text.s[depth];
        if (c < b || (past && c == b))
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* The entries that agree with the text so far are a range; each byte of the text narrows it. */
static const eng_special *longest(const eng_specials *s, const char *text, size_t len, uint64_t *work)
{
    const eng_special *best = NULL;
    unsigned char b = (unsigned char)text[0];
    size_t lo = s->first[b], hi = s->first[b + 1];
    for (size_t depth = 1; lo < hi; depth++, ++*work) {
        if (s->sorted[lo].text.n == depth)
            best = &s->sorted[lo++]; /* a prefix sorts before what it begins */
        if (depth == len)
            break;
        b = (unsigned char)text[depth];
        lo = bound(s->sorted, lo, hi, depth, b, false);
        hi = bound(s->sorted, lo, hi, depth, b, true);
    }
    return best;
}

const eng_special *eng_specials_find(const eng_specials *s, const char *text, size_t len, size_t from, size_t *ret_at, uint64_t *work)
{
    if (!s->n)
        return NULL;
    for (size_t i = from; i < len; i++, ++*work) {
        unsigned char b = (unsigned char)text[i];
        if (s->first[b] == s->first[b + 1])
            continue;
        const eng_special *found = longest(s, text + i, len - i, work);
        if (found) {
            *ret_at = i;
            return found;
        }
    }
    return NULL;
}
