#include "config.h"

#include <ctype.h>
#include <errno.h>
#include <ini.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "table.h"

enum {
    MAX_FILE_BYTES = 1 << 20,
    MAX_LINE_BYTES = 197, /* inih cuts lines at a buffer of 200 and would take the rest for another line */
    MAX_NAME = 64,        /* bytes */
    MAX_ROWS = 128,
};

typedef struct {
    cfg_settings *s;
    unsigned command;
    char *err;
    size_t errlen;
    int failed; /* first failure inside inih's handler */
} loader;

/* Writes the sentence and returns `code`. */
__attribute__((format(printf, 3, 4))) static int fail(loader *l, int code, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (l->errlen)
        vsnprintf(l->err, l->errlen, format, args);
    va_end(args);
    return code;
}

/* ---- names ------------------------------------------------------------------------------------------------------ */

/* Levenshtein's, for names of at most MAX_NAME bytes. */
static size_t distance(const char *a, size_t na, const char *b, size_t nb)
{
    size_t row[MAX_NAME + 1];
    for (size_t j = 0; j <= nb; j++)
        row[j] = j;
    for (size_t i = 1; i <= na; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= nb; j++) {
            size_t d = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < d)
                d = row[j] + 1;
            if (row[j - 1] + 1 < d)
                d = row[j - 1] + 1;
            row[j] = d;
        }
    }
    return row[nb];
}

const char *cfg_nearest(const char *name, const char *const *names, size_t n)
{
    size_t len = strlen(name), best = len / 3 + 2; /* one more than what still counts as near */
    const char *nearest = NULL;
    if (len > MAX_NAME)
        return NULL;
    for (size_t i = 0; i < n; i++) {
        size_t m = strlen(names[i]);
        if (m > MAX_NAME)
            continue;
        size_t d = distance(name, len, names[i], m);
        if (d < best && d < len && d < m) {
            best = d;
            nearest = names[i];
        }
    }
    return nearest;
}

/* The row that a name means in this command; for files and the environment the name may also belong to another command only. */
static const cfg_row *find_row(const char *name, size_t len, unsigned command)
{
    for (size_t i = 0; i < cfg_table_rows; i++) {
        const cfg_row *r = &cfg_table[i];
        if ((r->commands & command) && strlen(r->name) == len && !memcmp(r->name, name, len))
            return r;
    }
    return NULL;
}

static const cfg_row *find_short(const char *name, unsigned command)
{
    for (size_t i = 0; i < cfg_table_rows; i++)
        if ((cfg_table[i].commands & command) && cfg_table[i].short_name && !strcmp(cfg_table[i].short_name, name))
            return &cfg_table[i];
    return NULL;
}

static const char *nearest_row(const char *name, unsigned command, bool in_file)
{
    const char *names[MAX_ROWS];
    size_t n = 0;
    for (size_t i = 0; i < cfg_table_rows && n < MAX_ROWS; i++)
        if ((cfg_table[i].commands & command) && (!in_file || cfg_table[i].everywhere))
            names[n++] = cfg_table[i].name;
    return cfg_nearest(name, names, n);
}

/* ---- values ----------------------------------------------------------------------------------------------------- */

static bool parse_whole(const char *text, size_t len, int64_t *ret)
{
    char buf[24], *end;
    if (!len || len >= sizeof buf || !(isdigit((unsigned char)text[0]) || (text[0] == '-' && len > 1 && isdigit((unsigned char)text[1]))))
        return false;
    memcpy(buf, text, len);
    buf[len] = 0;
    errno = 0;
    *ret = strtoll(buf, &end, 10);
    return !errno && !*end;
}

static bool parse_real(const char *text, double *ret)
{
    char *end;
    if (!*text || strspn(text, "0123456789+-.eE") != strlen(text)) /* neither spaces nor hexadecimal, nan, inf */
        return false;
    *ret = strtod(text, &end);
    return !*end && isfinite(*ret);
}

static bool is_choice(const cfg_row *r, const char *text, size_t len)
{
    for (size_t i = 0; r->choices[i]; i++)
        if (strlen(r->choices[i]) == len && !memcmp(r->choices[i], text, len))
            return true;
    return false;
}

static int bad_choice(loader *l, const cfg_row *r, const char *where, const char *text, size_t len)
{
    char all[128] = "", word[MAX_NAME + 1];
    size_t n = 0;
    for (; r->choices[n]; n++)
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", n ? ", " : "", r->choices[n]);
    snprintf(word, sizeof word, "%.*s", (int)(len < MAX_NAME ? len : MAX_NAME), text);
    const char *near = cfg_nearest(word, r->choices, n);
    if (r->type == CFG_T_COUNT)
        snprintf(all + strlen(all), sizeof all - strlen(all), " or a whole number from %.10g to %.10g", r->lo, r->hi);
    return fail(l, -EINVAL, "%s: '%s' is not one of %s%s%s%s", where, word, all, near ? " (did you mean '" : "", near ? near : "",
                near ? "'?)" : "");
}

static int bad_number(loader *l, const cfg_row *r, const char *where, const char *text)
{
    const char *what = r->type == CFG_T_REAL      ? "a number"
                       : r->type == CFG_T_NUMBERS ? "whole numbers separated by commas, each"
                                                  : "a whole number";
    return fail(l, -EINVAL, "%s: '%.64s' must be %s from %.10g to %.10g", where, text, what, r->lo, r->hi);
}

/* Checks the parts of a comma-separated list, or the one part of any other text. */
static int check_text(loader *l, const cfg_row *r, const char *where, const char *text)
{
    if (!*text)
        return fail(l, -EINVAL, "%s: must not be empty", where);
    if (r->type == CFG_T_CHOICE)
        return is_choice(r, text, strlen(text)) ? 0 : bad_choice(l, r, where, text, strlen(text));
    if (r->type == CFG_T_COUNT && !is_choice(r, text, strlen(text))) {
        int64_t v;
        return parse_whole(text, strlen(text), &v) && (double)v >= r->lo && (double)v <= r->hi ? 0 : bad_choice(l, r, where, text, strlen(text));
    }
    if (r->type == CFG_T_COUNT)
        return 0;
    if (r->type == CFG_T_TEXTS && strchr(text, '\n'))
        return fail(l, -EINVAL, "%s: must not hold a line break", where);
    if (r->type == CFG_T_TEXT || r->type == CFG_T_TEXTS)
        return 0;
    for (const char *p = text;; p++) {
        size_t len = strcspn(p, ",");
        int64_t v;
        if (r->type == CFG_T_CHOICES && !is_choice(r, p, len))
            return bad_choice(l, r, where, p, len);
        if (r->type == CFG_T_NUMBERS && (!parse_whole(p, len, &v) || (double)v < r->lo || (double)v > r->hi))
            return bad_number(l, r, where, text);
        p += len;
        if (!*p)
            return 0;
    }
}

/* Stores a copy in place of what is there, or as another line of it. */
static int store_text(loader *l, const cfg_row *r, char **field, const char *text)
{
    char *copy;
    if (r->type == CFG_T_TEXTS && *field ? asprintf(&copy, "%s\n%s", *field, text) < 0 : !(copy = strdup(text)))
        return fail(l, -ENOMEM, "out of memory");
    free(*field);
    *field = copy;
    return 0;
}

/* Checks the value and, with `apply`, stores it. `where` names the setting as the user wrote it. */
static int set_value(loader *l, const cfg_row *r, const char *where, const char *text, bool apply)
{
    void *field = (char *)l->s + r->field;
    int64_t whole = 0;
    double real = 0;
    int rc;
    switch (r->type) {
    case CFG_T_U32:
    case CFG_T_I32:
    case CFG_T_I64:
        if (!parse_whole(text, strlen(text), &whole) || (double)whole < r->lo || (double)whole > r->hi)
            return bad_number(l, r, where, text);
        if (apply && r->type == CFG_T_U32)
            *(uint32_t *)field = (uint32_t)whole;
        else if (apply && r->type == CFG_T_I32)
            *(int32_t *)field = (int32_t)whole;
        else if (apply)
            *(int64_t *)field = whole;
        return 0;
    case CFG_T_REAL:
        if (!parse_real(text, &real) || real < r->lo || real > r->hi)
            return bad_number(l, r, where, text);
        if (apply)
            *(double *)field = real;
        return 0;
    default:
        rc = check_text(l, r, where, text);
        return rc < 0 || !apply ? rc : store_text(l, r, field, text);
    }
}

static int set_defaults(loader *l)
{
    for (size_t i = 0; i < cfg_table_rows; i++) {
        const cfg_row *r = &cfg_table[i];
        if (r->initial && (r->commands & l->command)) {
            int rc = set_value(l, r, r->name, r->initial, true);
            if (rc < 0)
                return rc;
        }
    }
    return 0;
}

/* ---- file ------------------------------------------------------------------------------------------------------- */

/* The same file serves all commands: a key that this one does not use is checked and left. */
static int file_entry(void *ctx, const char *section, const char *key, const char *value)
{
    loader *l = ctx;
    if (l->failed)
        return 1;
    if (*section) {
        l->failed = fail(l, -EINVAL, "section [%.64s]: the file has no sections", section);
        return 0;
    }
    const cfg_row *r = find_row(key, strlen(key), l->command);
    bool apply = r && r->everywhere;
    for (unsigned c = 1; !apply && c <= CFG_CONTEXTS_VERIFY; c <<= 1) {
        const cfg_row *other = find_row(key, strlen(key), c);
        if (other && other->everywhere) {
            r = other;
            break;
        }
    }
    if (!r || !r->everywhere) {
        const char *near = nearest_row(key, (unsigned)-1, true);
        l->failed = fail(l, -EINVAL, "unknown name '%.64s'%s%s%s", key, near ? "; did you mean '" : "", near ? near : "", near ? "'?" : "");
        return 0;
    }
    l->failed = set_value(l, r, key, value, apply);
    return !l->failed;
}

/* Reads all of it; *ret is NUL-terminated. */
static int read_file(loader *l, const char *path, char **ret)
{
    char *text = NULL;
    FILE *f = fopen(path, "rbe");
    if (!f)
        return fail(l, -EINVAL, "config file %s: %s", path, strerror(errno));
    int rc = 0;
    text = malloc(MAX_FILE_BYTES + 1);
    if (!text) {
        rc = fail(l, -ENOMEM, "out of memory");
        goto cleanup;
    }
    size_t n = fread(text, 1, MAX_FILE_BYTES + 1, f);
    if (ferror(f))
        rc = fail(l, -EINVAL, "config file %s: %s", path, strerror(errno));
    else if (n > MAX_FILE_BYTES)
        rc = fail(l, -EINVAL, "config file %s: larger than 1 MiB", path);
    else if (memchr(text, 0, n))
        rc = fail(l, -EINVAL, "config file %s: not a text file (it holds a NUL byte)", path);
    if (rc < 0)
        goto cleanup;
    text[n] = 0;
    *ret = text;
    text = NULL;
cleanup:
    free(text);
    fclose(f);
    return rc;
}

/* Refuses lines that inih would cut, and takes away the white space before a name, which would make inih read the line as a continuation of
 * the value above. */
static int tidy_lines(loader *l, const char *path, char *text)
{
    unsigned line = 1;
    char *out = text;
    for (const char *p = text; *p; line++) {
        size_t len = strcspn(p, "\n"), skip = strspn(p, " \t\r\f\v");
        if (skip > len)
            skip = len;
        if (len - skip > MAX_LINE_BYTES)
            return fail(l, -EINVAL, "%s:%u: longer than %d bytes", path, line, MAX_LINE_BYTES);
        memmove(out, p + skip, len - skip);
        out += len - skip;
        p += len;
        if (*p)
            *out++ = *p++;
    }
    *out = 0;
    return 0;
}

static int load_file(loader *l, const char *path)
{
    char *text = NULL, reason[512];
    int rc = read_file(l, path, &text);
    if (rc < 0)
        return rc;
    rc = tidy_lines(l, path, text);
    if (!rc) {
        int line = ini_parse_string(text, file_entry, l);
        if (l->failed == -ENOMEM) {
            rc = -ENOMEM;
        } else if (l->failed) {
            snprintf(reason, sizeof reason, "%s", l->err);
            rc = fail(l, -EINVAL, "%s:%d: %s", path, line, reason);
        } else if (line) {
            rc = fail(l, -EINVAL, "%s:%d: expected 'name = value'", path, line);
        }
    }
    free(text);
    return rc;
}

static int load_environment(loader *l)
{
    for (size_t i = 0; i < cfg_table_rows; i++) {
        const cfg_row *r = &cfg_table[i];
        if (!r->everywhere || !(r->commands & l->command))
            continue;
        char name[MAX_NAME + 16] = "RETRIEVALD_";
        size_t n = strlen(name);
        for (const char *p = r->name; *p; p++)
            name[n++] = *p == '-' ? '_' : (char)toupper((unsigned char)*p);
        name[n] = 0;
        const char *value = getenv(name);
        int rc = value ? set_value(l, r, name, value, true) : 0;
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* ---- command line ----------------------------------------------------------------------------------------------- */

static int unknown_flag(loader *l, const char *arg)
{
    const char *name = arg + strspn(arg, "-");
    char word[MAX_NAME + 1];
    snprintf(word, sizeof word, "%.*s", (int)strcspn(name, "="), name);
    const char *near = nearest_row(word, l->command, false);
    if (!near) /* perhaps a flag of another command */
        near = find_row(word, strlen(word), (unsigned)-1) ? "" : NULL;
    if (near && !*near)
        return fail(l, -EINVAL, "--%s is not a flag of this command; see --help", word);
    return fail(l, -EINVAL, "unknown flag '%.64s'%s%s%s", arg, near ? "; did you mean --" : "", near ? near : "",
                near ? "?" : "; see --help");
}

static bool is_flag(const char *arg, unsigned command)
{
    if (arg[0] != '-' || !arg[1])
        return false;
    return arg[1] == '-' ? find_row(arg + 2, strcspn(arg + 2, "="), command) != NULL : find_short(arg + 1, command) != NULL;
}

/* What a word without a flag means in a command that takes one. */
static const cfg_row *bare_row(unsigned command)
{
    const char *name = command == CFG_INSPECT ? "model" : command == CFG_CONTEXTS_ONE ? "name" : command == CFG_CONTEXTS_VERIFY ? "state-dir" : "";
    return find_row(name, strlen(name), command);
}

/* Walks through the arguments. In the first pass (apply false) all is checked, and --config, --help and --version are noticed. */
static int load_flags(loader *l, int argc, char **argv, bool apply, const char **ret_config)
{
    for (int i = 1; i < argc; i++) {
        char *arg = argv[i], *value = NULL;
        const cfg_row *r = NULL;
        if (arg[0] == '-' && arg[1] == '-') {
            size_t len = strcspn(arg + 2, "=");
            r = find_row(arg + 2, len, l->command);
            value = arg[2 + len] ? arg + 2 + len + 1 : NULL;
        } else if (arg[0] == '-') {
            r = find_short(arg + 1, l->command);
        } else if ((r = bare_row(l->command))) {
            value = arg;
        } else {
            return fail(l, -EINVAL, "unexpected argument '%.64s'; see --help", arg);
        }
        if (!r)
            return unknown_flag(l, arg);

        char where[MAX_NAME + 4];
        snprintf(where, sizeof where, "--%s", r->name);
        if (r->type == CFG_T_SWITCH) {
            if (value)
                return fail(l, -EINVAL, "%s takes no value", where);
            *(bool *)((char *)l->s + r->field) = true;
            continue;
        }
        if (!value) {
            if (i + 1 == argc || is_flag(argv[i + 1], l->command))
                return fail(l, -EINVAL, "%s needs a value (%s)", where, r->arg);
            value = argv[++i];
        }
        if (r->type == CFG_T_CONFIG) {
            *ret_config = value;
            continue;
        }
        int rc = set_value(l, r, where, value, apply);
        if (rc < 0)
            return rc;
    }
    return 0;
}

int cfg_load(cfg_settings *s, unsigned command, int argc, char **argv, char *err, size_t errlen)
{
    loader l = {.s = s, .command = command, .err = err, .errlen = errlen};
    const char *config = NULL;
    *s = (cfg_settings){0};
    int rc = set_defaults(&l);
    if (!rc)
        rc = load_flags(&l, argc, argv, false, &config);
    if (rc < 0 || s->help || s->version)
        return rc;
    if (config)
        rc = load_file(&l, config);
    if (!rc)
        rc = load_environment(&l);
    if (!rc)
        rc = load_flags(&l, argc, argv, true, &config);
    return rc;
}

void cfg_free(cfg_settings *s)
{
    if (!s)
        return;
    for (size_t i = 0; i < cfg_table_rows; i++)
        switch (cfg_table[i].type) {
        case CFG_T_TEXT:
        case CFG_T_CHOICE:
        case CFG_T_CHOICES:
        case CFG_T_COUNT:
        case CFG_T_NUMBERS: {
            char **field = (char **)((char *)s + cfg_table[i].field);
            free(*field);
            *field = NULL;
            break;
        }
        default:
            break;
        }
}
