#include <string.h>

#include "config.h"
#include "table.h"

enum { HELP_INDENT = 32, HELP_WIDTH = 110 };

/* Prints words from column `at` on, wrapped and indented to `indent`. */
static void print_wrapped(FILE *f, const char *prefix, const char *text, size_t at, size_t indent, size_t width)
{
    while (*text) {
        size_t len = strcspn(text, " ");
        if (at > indent && at + 1 + len > width) {
            fprintf(f, "\n%s%*s", prefix, (int)(indent - strlen(prefix)), "");
            at = indent;
        } else if (at > indent) {
            fputc(' ', f);
            at++;
        }
        fwrite(text, 1, len, f);
        at += len;
        text += len + strspn(text + len, " ");
    }
    fputc('\n', f);
}

/* The range and the default of a row, or its choices, in brackets. */
static void describe(const cfg_row *r, char *out, size_t size)
{
    size_t n = (size_t)snprintf(out, size, "%s", r->help);
    if (r->choices) {
        for (size_t i = 0; r->choices[i] && n < size; i++)
            n += (size_t)snprintf(out + n, size - n, "%s%s", i ? "|" : " (", r->choices[i]);
        if (r->type == CFG_T_COUNT && n < size)
            n += (size_t)snprintf(out + n, size - n, "|%.10g to %.10g", r->lo, r->hi);
    } else if (r->lo < r->hi && n < size) {
        n += (size_t)snprintf(out + n, size - n, " (%.10g to %.10g", r->lo, r->hi);
    } else {
        if (r->initial && n < size)
            snprintf(out + n, size - n, " (default %s)", r->initial);
        return;
    }
    if (n < size)
        snprintf(out + n, size - n, "%s%s)", r->initial ? "; default " : "", r->initial ? r->initial : "");
}

void cfg_print_help(FILE *f, unsigned command)
{
    const char *group = "";
    for (size_t i = 0; i < cfg_table_rows; i++) {
        const cfg_row *r = &cfg_table[i];
        char flag[64], text[512];
        if (!(r->commands & command))
            continue;
        if (strcmp(group, r->group)) {
            fprintf(f, "%s%s:\n", *group ? "\n" : "", r->group);
            group = r->group;
        }
        snprintf(flag, sizeof flag, "  %s%s%-*s--%s%s%s", r->short_name ? "-" : "", r->short_name ? r->short_name : "",
                 r->short_name ? 6 - (int)strlen(r->short_name) - 1 : 6, r->short_name ? "," : "", r->name, r->arg ? " " : "",
                 r->arg ? r->arg : "");
        size_t at = strlen(flag);
        fputs(flag, f);
        if (at + 2 > HELP_INDENT) {
            fprintf(f, "\n%*s", HELP_INDENT, "");
        } else {
            fprintf(f, "%*s", (int)(HELP_INDENT - at), "");
        }
        describe(r, text, sizeof text);
        print_wrapped(f, "", text, HELP_INDENT, HELP_INDENT, HELP_WIDTH);
    }
}

void cfg_print_example(FILE *f)
{
    const char *group = "";
    fputs("# Settings of retrievald: retrievald --config FILE. Each stands at its default; take away the '#' before one to change it.\n"
          "# The environment (RETRIEVALD_CTX_SIZE for ctx-size) comes before this file, and the command line before both.\n"
          "# ' ;' begins a comment inside a line.\n",
          f);
    for (size_t i = 0; i < cfg_table_rows; i++) {
        const cfg_row *r = &cfg_table[i];
        char text[512];
        if (!(r->commands & CFG_SERVE) || !r->everywhere)
            continue;
        if (strcmp(group, r->group)) {
            fprintf(f, "\n# ---- %s ----\n", r->group);
            group = r->group;
        }
        describe(r, text, sizeof text);
        fputs("\n# ", f);
        print_wrapped(f, "# ", text, 2, 2, HELP_WIDTH);
        if (r->initial)
            fprintf(f, "#%s = %s\n", r->name, r->initial);
        else
            fprintf(f, "#%s = %s\n", r->name, r->arg);
    }
}
