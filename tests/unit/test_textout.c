/* server/textout.c against a one-shot decoder written from Unicode's table 3-7 and a search that tries every place. */
#include "../../server/textout.h"
#include "support.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FFFD "\xEF\xBF\xBD"

typedef struct {
    char *p;
    size_t n;
} bytes;

static void append(bytes *b, const char *p, size_t n)
{
    b->p = realloc(b->p, b->n + n + 1);
    ck_assert_ptr_nonnull(b->p);
    if (n)
        memcpy(b->p + b->n, p, n);
    b->n += n;
    b->p[b->n] = 0;
}

/* Table 3-7, row by row: is p[0..n) a well-formed character, or the beginning of one (whole false)? */
static bool well_formed(const unsigned char *p, size_t n, bool whole)
{
    static const struct {
        unsigned char first[2], second[2];
        size_t len;
    } rows[] = {
        {{0x00, 0x7F}, {0, 0}, 1},       {{0xC2, 0xDF}, {0x80, 0xBF}, 2}, {{0xE0, 0xE0}, {0xA0, 0xBF}, 3},
        {{0xE1, 0xEC}, {0x80, 0xBF}, 3}, {{0xED, 0xED}, {0x80, 0x9F}, 3}, {{0xEE, 0xEF}, {0x80, 0xBF}, 3},
        {{0xF0, 0xF0}, {0x90, 0xBF}, 4}, {{0xF1, 0xF3}, {0x80, 0xBF}, 4}, {{0xF4, 0xF4}, {0x80, 0x8F}, 4},
    };
    for (size_t r = 0; r < sizeof rows / sizeof *rows; r++) {
        if (p[0] < rows[r].first[0] || p[0] > rows[r].first[1] || n > rows[r].len || (whole && n != rows[r].len))
            continue;
        bool good = n < 2 || (p[1] >= rows[r].second[0] && p[1] <= rows[r].second[1]);
        for (size_t i = 2; i < n; i++)
            good = good && p[i] >= 0x80 && p[i] <= 0xBF;
        return good;
    }
    return false;
}

static bytes decode(const char *text, size_t n)
{
    bytes out = {0};
    append(&out, "", 0);
    for (size_t i = 0; i < n;) {
        const unsigned char *p = (const unsigned char *)text + i;
        size_t len = 1;
        while (len < 4 && i + len < n && well_formed(p, len, false) && !well_formed(p, len, true) && well_formed(p, len + 1, false))
            len++;
        if (well_formed(p, len, true))
            append(&out, text + i, len);
        else
            append(&out, FFFD, 3);
        i += len;
    }
    return out;
}

/* Cuts where a stop string ends first; of those that end together, where the longest begins. */
static bool cut(bytes *text, const char *const *stops, size_t n_stops)
{
    for (size_t end = 1; end <= text->n; end++) {
        size_t longest = 0;
        for (size_t s = 0; s < n_stops; s++) {
            size_t len = strlen(stops[s]);
            if (len <= end && len > longest && !memcmp(text->p + end - len, stops[s], len))
                longest = len;
        }
        if (longest) {
            text->n = end - longest;
            return true;
        }
    }
    return false;
}

/* Feeds text in pieces of 0 to 4 bytes (1 without rng); what comes out must be whole characters each time. */
static bool feed(const char *text, size_t n, const char *const *stops, size_t n_stops, t_rng *rng, bytes *out)
{
    srv_textout *t = NULL;
    ck_assert_int_eq(srv_textout_new(stops, n_stops, &t), 0);
    bool stopped = false, good = true;
    append(out, "", 0);
    for (size_t i = 0; i < n;) {
        size_t len = rng ? t_u64(rng) % 5 : 1;
        if (len > n - i)
            len = n - i;
        const char *p = NULL;
        size_t got = 99;
        int r = srv_textout_add(t, text + i, len, &p, &got);
        bytes again = decode(p, got);
        good = good && r >= 0 && (!stopped || (r == 1 && !got)) && again.n == got && !memcmp(again.p, p, got);
        stopped = r;
        free(again.p);
        append(out, p, got);
        i += len;
    }
    const char *p = NULL;
    size_t got = 99;
    int r = srv_textout_finish(t, &p, &got);
    ck_assert(good && r >= 0 && (!stopped || (r == 1 && !got)));
    append(out, p, got);
    srv_textout_free(t);
    return r;
}

static void same(const char *text, size_t n, const char *want, const char *const *stops, size_t n_stops, bool want_stop)
{
    bytes out = {0};
    ck_assert_int_eq(feed(text, n, stops, n_stops, NULL, &out), want_stop);
    ck_assert_uint_eq(out.n, strlen(want));
    ck_assert_mem_eq(out.p, want, out.n);
    free(out.p);
}

/* The Unicode Standard 15.0, tables 3-8 to 3-11. */
START_TEST(unicode_examples)
{
    same("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41", 9, FFFD FFFD FFFD FFFD FFFD FFFD FFFD FFFD "A", NULL, 0, false);
    same("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41", 9, FFFD FFFD FFFD FFFD FFFD FFFD FFFD FFFD "A", NULL, 0, false);
    same("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42", 9, FFFD FFFD FFFD FFFD FFFD "A" FFFD FFFD "B", NULL, 0, false);
    same("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", 9, FFFD FFFD FFFD FFFD "A", NULL, 0, false);
    same("caf\xC3\xA9 \xF0\x9F\x98\x80", 10, "caf\xC3\xA9 \xF0\x9F\x98\x80", NULL, 0, false);
    same("end\xF0\x9F\x98", 6, "end" FFFD, NULL, 0, false);
    same("", 0, "", NULL, 0, false);
}
END_TEST

START_TEST(stop_strings)
{
    static const char *const one[] = {"\n\n"}, *const nested[] = {"abcd", "bc"}, *const repeat[] = {"aabaaac"},
                             *const tied[] = {"cd", "bcd", "d"};
    static const char *const odd[] = {"", "\xFF", "\x80"}, *const accent[] = {"\xC3\xA9t"}, *const broken[] = {FFFD "!"};
    same("one\ntwo\n\nthree", 14, "one\ntwo", one, 1, true);
    same("one\n", 4, "one\n", one, 1, false);
    same("xabcd", 5, "xa", nested, 2, true); /* bc is complete first */
    same("aabaaabaaac", 11, "aaba", repeat, 1, true);
    same("abcd", 4, "a", tied, 3, true);
    same("a\xFFz\xE2\x82\xAC\xC3\x80", 8, "a" FFFD "z\xE2\x82\xAC\xC3\x80", odd, 3, false);
    same("\xC3\xA9\xC3\xA9tude", 8, "\xC3\xA9", accent, 1, true);
    same("a\xFF!b", 4, "a", broken, 1, true);
}
END_TEST

START_TEST(what_is_held_back)
{
    static const char *const stops[] = {"<end>"};
    srv_textout *t = NULL;
    const char *p;
    size_t n;
    ck_assert_int_eq(srv_textout_new(stops, 1, &t), 0);
    ck_assert_int_eq(srv_textout_add(t, "ab\xE2\x82", 4, &p, &n), 0);
    ck_assert(n == 2 && !memcmp(p, "ab", 2));
    ck_assert_int_eq(srv_textout_add(t, "\xAC<e", 3, &p, &n), 0);
    ck_assert(n == 3 && !memcmp(p, "\xE2\x82\xAC", 3));
    ck_assert_int_eq(srv_textout_add(t, "n<e", 3, &p, &n), 0);
    ck_assert(n == 3 && !memcmp(p, "<en", 3));
    ck_assert_int_eq(srv_textout_finish(t, &p, &n), 0);
    ck_assert(n == 2 && !memcmp(p, "<e", 2));
    srv_textout_free(t);
    srv_textout_free(NULL);
}
END_TEST

/* Few letters, so that stop strings come and nearly come often; and bytes around the borders of table 3-7. */
START_TEST(random_streams)
{
    static const unsigned char alphabet[] = {'a',  'a',  'b',  'b',  0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98,
                                             0x80, 0xED, 0xA0, 0xF4, 0x90, 0xE0, 0x9F, 0xFF, 0xC1, 0x00, 0x7F, 0xBF};
    static const char *const pool[] = {"ab",     "aab",     "abab", "b\xC3\xA9", "\xC3\xA9", "\xE2\x82\xAC", "bb" FFFD, FFFD FFFD "a",
                                       "aaaaaa", "babbabb", "\x7F", "aba",       FFFD};
    t_rng rng = t_seed(11);
    int stopped = 0;
    enum { ROUNDS = 5000 };
    for (int round = 0; round < ROUNDS; round++) {
        char text[96];
        size_t n = t_u64(&rng) % sizeof text, spread = 2 + t_u64(&rng) % (sizeof alphabet - 1);
        for (size_t i = 0; i < n; i++)
            text[i] = round % 4 ? (char)alphabet[t_u64(&rng) % spread] : (char)t_u64(&rng);
        const char *stops[3];
        size_t n_stops = t_u64(&rng) % 4;
        for (size_t s = 0; s < n_stops; s++)
            stops[s] = pool[t_u64(&rng) % (sizeof pool / sizeof *pool)];
        bytes want = decode(text, n), got = {0};
        bool want_stop = cut(&want, stops, n_stops);
        ck_assert_int_eq(feed(text, n, stops, n_stops, &rng, &got), want_stop);
        ck_assert_uint_eq(got.n, want.n);
        ck_assert_mem_eq(got.p, want.p, got.n);
        stopped += want_stop;
        free(want.p);
        free(got.p);
    }
    ck_assert(stopped > ROUNDS / 8 && stopped < ROUNDS - ROUNDS / 8);
}
END_TEST

/* 4 MB that a stop string of 1 MB nearly matches: quadratic work would show. */
START_TEST(long_near_miss)
{
    enum { STOP = 1 << 20, TEXT = 4 << 20 };
    char *stop = malloc(STOP + 1), *text = malloc(TEXT);
    ck_assert(stop && text);
    memset(stop, 'a', STOP);
    stop[STOP - 1] = 'b';
    stop[STOP] = 0;
    memset(text, 'a', TEXT);
    const char *stops[] = {stop};
    srv_textout *t = NULL;
    ck_assert_int_eq(srv_textout_new(stops, 1, &t), 0);
    size_t total = 0, n;
    const char *p;
    int r = 0;
    for (size_t i = 0; i < TEXT; i += 4) {
        r |= srv_textout_add(t, text + i, 4, &p, &n);
        total += n;
    }
    ck_assert_int_eq(r, 0);
    ck_assert_uint_eq(total, TEXT - (STOP - 1));
    ck_assert_int_eq(srv_textout_finish(t, &p, &n), 0);
    ck_assert_uint_eq(n, STOP - 1);
    srv_textout_free(t);
    free(stop);
    free(text);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("textout");
    TCase *c = tcase_create("textout");
    tcase_add_test(c, unicode_examples);
    tcase_add_test(c, stop_strings);
    tcase_add_test(c, what_is_held_back);
    tcase_add_test(c, random_streams);
    tcase_add_test(c, long_near_miss);
    suite_add_tcase(s, c);
    return t_run(s);
}
