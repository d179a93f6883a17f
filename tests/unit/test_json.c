/* The scanner in front of cJSON, the getters, the writer, and SHA-256. Cases: RFC 8259, Unicode 15 table 3-7, FIPS 180-4's examples. */
#include "json.h"

#include "keys.h"
#include "support.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The text is put at the end of a block of its own, so that a sanitizer sees a read past it. */
static int parse_n(const char *text, size_t n, srv_fault *f)
{
    char *copy = malloc(n ? n : 1);
    cJSON *v = NULL;
    memcpy(copy, text, n);
    int rc = srv_json_parse(copy, n, &v, f);
    ck_assert((rc == 0) == (v != NULL));
    cJSON_Delete(v);
    free(copy);
    return rc;
}

START_TEST(accepts_json)
{
    static const char *const good[] = {
        "{}",
        "[]",
        "0",
        "-0",
        "\"\"",
        "null",
        " \t\r\n true \n",
        "[1,2.5,-3e10,4E+2,5e-3,0.0]",
        "{\"a\":{\"b\":[{}]},\"\":1}",
        "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\u00e9\\ud83d\\ude00\"",
        "\"\xC2\x80 \xDF\xBF \xE0\xA0\x80 \xED\x9F\xBF \xEE\x80\x80 \xEF\xBF\xBF \xF0\x90\x80\x80 \xF4\x8F\xBF\xBF \x7F\"",
        "123456789012345678901234567890",
        "1e308",
    };
    srv_fault f;
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++)
        ck_assert_msg(parse_n(good[i], strlen(good[i]), &f) == 0, "%s: %s", good[i], f.message);
}
END_TEST

START_TEST(refuses_what_is_not_json)
{
    static const char *const bad[] = {
        "",
        " ",
        "{",
        "}",
        "[",
        "]",
        "[1",
        "[1,",
        "[1,]",
        "[,1]",
        "[1 2]",
        "{\"a\"}",
        "{\"a\":}",
        "{\"a\":1,}",
        "{\"a\" 1}",
        "{a:1}",
        "{'a':1}",
        "{1:1}",
        "tru",
        "True",
        "nul",
        "NaN",
        "Infinity",
        "-Infinity",
        "-",
        "+1",
        "01",
        "-01",
        "1.",
        ".1",
        "1e",
        "1e+",
        "1e999",
        "-1e999",
        "0x1",
        "1 2",
        "{}{}",
        "{}x",
        "[]\v",
        "\"",
        "\"a",
        "\"\\",
        "\"\\\"",
        "\"\\x\"",
        "\"\\u\"",
        "\"\\u12\"",
        "\"\\u123g\"",
        "\"\\u0000\"",
        "\"a\\u0000b\"",
        "\"\\ud800\"",
        "\"\\ud800\\u0041\"",
        "\"\\ud800\\ud800\"",
        "\"\\udc00\"",
        "\"\\ud800\\",
        "\"\\ud800\\u",
        "\"\\ud800\\udc0",
        "\"\n\"",
        "\"\t\"",
        "\"\x01\"",
        "\xEF\xBB\xBF{}",
        /* invalid UTF-8 */
        "\"\x80\"",
        "\"\xBF\"",
        "\"\xC0\xAF\"",
        "\"\xC1\xBF\"",
        "\"\xC2\"",
        "\"\xC2\x41\"",
        "\"\xE0\x9F\xBF\"",
        "\"\xE1\x80\"",
        "\"\xED\xA0\x80\"",
        "\"\xED\xBF\xBF\"",
        "\"\xF0\x8F\xBF\xBF\"",
        "\"\xF4\x90\x80\x80\"",
        "\"\xF5\x80\x80\x80\"",
        "\"\xF8\x88\x80\x80\x80\"",
        "\"\xFF\"",
        "\"\xF0\x90\x80\"",
        "1111111111111111111111111111111111111111111111111111111111111",
    };
    srv_fault f;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        ck_assert_msg(parse_n(bad[i], strlen(bad[i]), &f) == -EINVAL, "%s was taken", bad[i]);
        ck_assert_int_eq(f.status, 400);
        ck_assert(strlen(f.message) > 0);
    }
    ck_assert_int_eq(parse_n("\"a\0b\"", 5, &f), -EINVAL);
    ck_assert_int_eq(parse_n("{}\0", 3, &f), -EINVAL);
}
END_TEST

/* Every prefix and every one-byte change of a text with everything in it: no crash, and cJSON agrees with what the scanner takes. */
START_TEST(survives_mutations)
{
    static const char text[] = "{\"a\":[1,-2.5e3,\"x\\u00e9\\ud83d\\ude00\xE6\xBC\xA2\",true,false,null,{\"b\":[]}],\"c\":\"\\n\"}";
    srv_fault f;
    for (size_t n = 0; n < sizeof(text) - 1; n++)
        ck_assert_int_lt(parse_n(text, n, &f), 0);
    char copy[sizeof(text)];
    for (size_t i = 0; i < sizeof(text) - 1; i++)
        for (int c = 0; c < 256; c++) {
            memcpy(copy, text, sizeof(text));
            copy[i] = (char)c;
            int rc = parse_n(copy, sizeof(text) - 1, &f);
            ck_assert_msg(rc == 0 || rc == -EINVAL, "cJSON refused what the scanner took: byte %zu = %d", i, c);
        }
}
END_TEST

START_TEST(bounds_depth_and_count)
{
    char deep[200];
    srv_fault f;
    for (int depth = 60; depth <= 70; depth++) {
        memset(deep, '[', (size_t)depth);
        memset(deep + depth, ']', (size_t)depth);
        ck_assert_int_eq(parse_n(deep, 2 * (size_t)depth, &f), depth <= SRV_JSON_DEPTH ? 0 : -EINVAL);
    }
    size_t n = 2 * ((size_t)SRV_JSON_VALUES + 1) + 1;
    char *many = malloc(n);
    memset(many, '1', n);
    many[0] = '[';
    for (size_t i = 2; i < n; i += 2)
        many[i] = ',';
    many[n - 1] = ']';
    ck_assert_int_eq(parse_n(many, n, &f), -EINVAL);
    ck_assert_ptr_nonnull(strstr(f.message, "too many values"));
    free(many);
}
END_TEST

START_TEST(says_where)
{
    srv_fault f;
    ck_assert_int_eq(parse_n("{\n \"a\": 1,\n \"b\" 2}", 19, &f), -EINVAL);
    ck_assert_ptr_nonnull(strstr(f.message, "line 3, column 6 (byte 16)"));
}
END_TEST

START_TEST(finds_raw_spans)
{
    static const struct {
        const char *text, *span;
    } cases[] = {
        {"{\"m\":[2.0, 1]}", "[2.0, 1]"},
        {" { \"x\" : {\"m\":1} , \"m\" : \"a\\\"b\" , \"y\":2 } ", "\"a\\\"b\""},
        {"{\"m\":1,\"m\":2.0}", "2.0"},
        {"{\"\\u006d\":1}", "1"},
        {"{\"m\":null}", "null"},
        {"{\"M\":1,\"mm\":2,\"x\":{\"m\":3}}", NULL},
        {"{}", NULL},
        {"[\"m\"]", NULL},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *p = NULL;
        size_t n = 0;
        ck_assert_int_eq(srv_json_span(cases[i].text, strlen(cases[i].text), "m", &p, &n), cases[i].span != NULL);
        if (cases[i].span) {
            ck_assert_uint_eq(n, strlen(cases[i].span));
            ck_assert_int_eq(memcmp(p, cases[i].span, n), 0);
        }
    }
}
END_TEST

START_TEST(getters_check)
{
    static const char text[] = "{\"i\":5,\"n\":0.5,\"s\":\"x\",\"b\":true,\"z\":null,\"I\":9,\"big\":1e300,\"half\":5.5,\"dup\":1,\"dup\":"
                               "2,\"over\":1,\"over\":null}";
    cJSON *v;
    srv_fault f;
    ck_assert_int_eq(srv_json_parse(text, strlen(text), &v, &f), 0);
    srv_json_obj o = {v, "at.", &f};
    int64_t i = -7;
    double d = -7;
    bool b = false;
    const char *s = NULL;
    ck_assert_int_eq(srv_json_int(&o, "i", 0, 10, &i), 1);
    ck_assert_int_eq(i, 5);
    ck_assert_int_eq(srv_json_int(&o, "dup", 0, 10, &i), 1);
    ck_assert_int_eq(i, 2); /* the last one */
    ck_assert_int_eq(srv_json_int(&o, "over", 0, 10, &i), 0);
    ck_assert_int_eq(srv_json_num(&o, "n", 0, 1, &d), 1);
    ck_assert(d == 0.5);
    ck_assert_int_eq(srv_json_str(&o, "s", &s), 1);
    ck_assert_str_eq(s, "x");
    ck_assert_int_eq(srv_json_bool(&o, "b", &b), 1);
    ck_assert(b);
    i = -7;
    ck_assert_int_eq(srv_json_int(&o, "z", 0, 10, &i), 0);
    ck_assert_int_eq(srv_json_int(&o, "none", 0, 10, &i), 0);
    ck_assert_int_eq(srv_json_int(&o, "i", 6, 10, &i), -EINVAL);
    ck_assert_str_eq(f.param, "at.i");
    ck_assert_str_eq(f.message, "\"at.i\" must be a whole number from 6 to 10, not 5");
    ck_assert_int_eq(srv_json_int(&o, "half", 0, 10, &i), -EINVAL);
    ck_assert_int_eq(srv_json_int(&o, "big", INT64_MIN, INT64_MAX / 2, &i), -EINVAL);
    ck_assert_int_eq(srv_json_int(&o, "s", 0, 10, &i), -EINVAL);
    ck_assert_int_eq(srv_json_num(&o, "s", 0, 10, &d), -EINVAL);
    ck_assert_str_eq(f.message, "\"at.s\" must be a number from 0 to 10, not a string");
    ck_assert_int_eq(srv_json_bool(&o, "i", &b), -EINVAL);
    ck_assert_int_eq(srv_json_str(&o, "b", &s), -EINVAL);
    ck_assert_int_eq(i, -7);
    cJSON_Delete(v);
}
END_TEST

/* What is written is read back by cJSON; what is not UTF-8 has become U+FFFD. */
START_TEST(writes_strings)
{
    static const struct {
        const char *in;
        size_t n;
        const char *out;
    } cases[] = {
        {"", 0, "\"\""},
        {"a\"\\/\n\t\x01\x7F", 8, "\"a\\\"\\\\/\\n\\u0009\\u0001\x7F\""},
        {"a\0b", 3, "\"a\\u0000b\""},
        {"\xE6\xBC\xA2", 3, "\"\xE6\xBC\xA2\""},
        {"\xE6\xBC", 2, "\"\xEF\xBF\xBD\xEF\xBF\xBD\""},
        {"x\xFFy", 3, "\"x\xEF\xBF\xBDy\""},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        srv_buf b = {0};
        srv_buf_string(&b, cases[i].in, cases[i].n);
        ck_assert(!b.failed);
        ck_assert_str_eq(b.p, cases[i].out);
        srv_buf_done(&b);
    }
    srv_buf b = {0};
    for (int i = 0; i < 3000; i++) /* across growth, with lengths around the room that printf is first given */
        srv_buf_printf(&b, "%0*d,", i % 300 + 1, i);
    size_t at = 0;
    for (int i = 0; i < 3000; i++) {
        char expected[310];
        int n = snprintf(expected, sizeof(expected), "%0*d,", i % 300 + 1, i);
        ck_assert_int_eq(memcmp(b.p + at, expected, (size_t)n), 0);
        at += (size_t)n;
    }
    srv_buf_done(&b);
    srv_buf_uint(&b, 0);
    srv_buf_uint(&b, UINT64_MAX);
    srv_buf_cstring(&b, NULL);
    ck_assert_str_eq(b.p, "018446744073709551615null");
    srv_buf_done(&b);
}
END_TEST

/* Whose a key's contexts are stands in files, so it never changes: here as Python's hashlib has it, the first 8 bytes, little-endian, of
 * sha256("retrievald tenant\0" + sha256(key)). */
START_TEST(tenants_of_keys)
{
    char path[] = "/tmp/retrievald-keys-XXXXXX", err[200] = "";
    int fd = mkstemp(path);
    ck_assert_int_ge(fd, 0);
    static const char text[] = "# two\nsecret-1\n\n  other \n";
    ck_assert_int_eq(write(fd, text, strlen(text)), (int)strlen(text));
    close(fd);
    srv_keys *k = NULL;
    ck_assert_msg(srv_keys_load(path, &k, err, sizeof err) == 0, "%s", err);
    unlink(path);
    uint64_t tenant = 0;
    bool first = false;
    ck_assert(srv_keys_match(k, "secret-1", 8, &tenant, &first));
    ck_assert_uint_eq(tenant, 0x4bfbdd784b745de1);
    ck_assert(first);
    ck_assert(srv_keys_match(k, "other", 5, &tenant, &first));
    ck_assert_uint_eq(tenant, 0x2246804504cc9ff4);
    ck_assert(!first);
    ck_assert(!srv_keys_match(k, "secret-", 7, &tenant, &first));
    ck_assert(!srv_keys_match(k, "secret-1 ", 9, &tenant, &first));
    ck_assert(!srv_keys_match(k, "", 0, &tenant, &first));
    srv_keys_free(k);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("json");
    TCase *t = tcase_create("json");
    tcase_add_test(t, accepts_json);
    tcase_add_test(t, refuses_what_is_not_json);
    tcase_add_test(t, survives_mutations);
    tcase_add_test(t, bounds_depth_and_count);
    tcase_add_test(t, says_where);
    tcase_add_test(t, finds_raw_spans);
    tcase_add_test(t, getters_check);
    tcase_add_test(t, writes_strings);
    tcase_add_test(t, tenants_of_keys);
    suite_add_tcase(s, t);
    return t_run(s);
}
