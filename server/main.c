#include <stdlib.h>
#include <string.h>

#include "server.h"

typedef struct {
    const char *name, *sub; /* "bench", "decode" */
    unsigned settings;
    int (*run)(const cfg_settings *s);
    const char *usage, *what;
} command;

static const command commands[] = {
    {"serve", NULL, CFG_SERVE, srv_cmd_serve, "-m MODEL", "answer requests over HTTP (the default command)"},
    {"run", NULL, CFG_RUN, srv_cmd_run, "-m MODEL [-f DOCUMENT] [-p QUESTION]", "talk in the terminal, about a document"},
    {"bench", "decode", CFG_BENCH_DECODE, srv_cmd_bench_decode, "-m MODEL [-d DEPTHS] [--attention MODES]",
     "measure how fast answers are written"},
    {"bench", "prefill", CFG_BENCH_PREFILL, srv_cmd_bench_prefill, "-m MODEL [-p LENGTHS]", "measure how fast prompts are read"},
    {"bench", "index", CFG_BENCH_INDEX, srv_cmd_bench_index, "--keys FILE --values FILE --queries FILE [--train-queries FILE]",
     "measure how well and how fast keys are found"},
    {"eval", "logits", CFG_EVAL, srv_cmd_eval_logits, "-m MODEL -f TEXT [--attention MODE]",
     "compare an attention mode with full attention"},
    {"eval", "dump", CFG_EVAL_DUMP, srv_cmd_eval_dump, "-m MODEL -f TEXT --folder FOLDER [--layers N,N,...]",
     "write keys, values and queries of a real run as .npy files"},
    {"contexts", "list", CFG_CONTEXTS, srv_cmd_contexts_list, "", "list the named contexts of a running daemon"},
    {"contexts", "show", CFG_CONTEXTS_ONE, srv_cmd_contexts_show, "NAME", "say all about one"},
    {"contexts", "add", CFG_CONTEXTS_ADD, srv_cmd_contexts_add, "-f TEXT --name NAME [--ttl TIME] [--pinned]", "have a text read and kept by that name"},
    {"contexts", "pin", CFG_CONTEXTS_ONE, srv_cmd_contexts_pin, "NAME", "keep one in memory"},
    {"contexts", "unpin", CFG_CONTEXTS_ONE, srv_cmd_contexts_unpin, "NAME", "let one go from memory when others need the room"},
    {"contexts", "rm", CFG_CONTEXTS_ONE, srv_cmd_contexts_rm, "NAME", "remove one"},
    {"contexts", "verify", CFG_CONTEXTS_VERIFY, srv_cmd_contexts_verify, "[FOLDER]", "check every file of kept contexts, beside a daemon or without one"},
    {"inspect", NULL, CFG_INSPECT, srv_cmd_inspect, "MODEL", "say what a model file holds"},
};
enum { N_COMMANDS = sizeof commands / sizeof *commands, EXIT_USAGE = 2 };

static void print_name(FILE *f, const command *c)
{
    fprintf(f, "retrievald %s%s%s", c->name, c->sub ? " " : "", c->sub ? c->sub : "");
}

static void print_help(const command *c, bool overview)
{
    if (overview) {
        puts("retrievald " RETRIEVALD_VERSION ": a server for questions about long documents\n\nCommands (each has its own --help):");
        for (size_t i = 0; i < N_COMMANDS; i++) {
            fputs("  ", stdout);
            print_name(stdout, &commands[i]);
            printf("%s%s\n      %s\n", *commands[i].usage ? " " : "", commands[i].usage, commands[i].what);
        }
        puts("\nSettings of serve:\n");
    } else {
        fputs("Usage: ", stdout);
        print_name(stdout, c);
        printf("%s%s [flags]\n\n%c%s.\n\n", *c->usage ? " " : "", c->usage, c->what[0] - 'a' + 'A', c->what + 1);
    }
    cfg_print_help(stdout, c->settings);
    puts("\nSettings may also stand in a file (--config) or the environment (RETRIEVALD_CTX_SIZE); see retrievald(1).");
}

/* Finds the command; *ret_words is how many arguments name it. NULL: said why. */
static const command *find_command(int argc, char **argv, int *ret_words)
{
    const char *names[N_COMMANDS], *word = argc > 1 ? argv[1] : "-", *sub = argc > 2 ? argv[2] : "", *parent = NULL;
    size_t n = 0;
    *ret_words = 0;
    if (word[0] == '-')
        return &commands[0];
    for (size_t i = 0; i < N_COMMANDS; i++) {
        const command *c = &commands[i];
        if (!strcmp(word, c->name)) {
            if (!c->sub || !strcmp(sub, c->sub)) {
                *ret_words = c->sub ? 2 : 1;
                return c;
            }
            if (!parent)
                n = 0; /* suggest among its sub-commands */
            parent = c->name;
            names[n++] = c->sub;
        } else if (!parent) {
            names[n++] = c->name;
        }
    }
    if (parent && (!*sub || *sub == '-'))
        fprintf(stderr, "retrievald: %s what?", parent);
    else
        fprintf(stderr, "retrievald: unknown command '%s%s%.64s'", parent ? parent : "", parent ? " " : "", parent ? sub : word);
    const char *near = cfg_nearest(parent ? sub : word, names, n);
    if (near)
        fprintf(stderr, "; did you mean '%s%s%s'?", parent ? parent : "", parent ? " " : "", near);
    for (size_t i = 0; i < n && parent && !near; i++)
        fprintf(stderr, "%s'%s %s'", i ? ", " : " There is ", parent, names[i]);
    fputs(parent || near ? "\n" : "; see retrievald --help\n", stderr);
    return NULL;
}

static bool needs_model(const command *c)
{
    return c->settings != CFG_BENCH_INDEX && strcmp(c->name, "contexts") != 0;
}

int main(int argc, char **argv)
{
    char err[512];
    cfg_settings s;
    int words, status;
    const command *c = find_command(argc, argv, &words);
    if (!c)
        return EXIT_USAGE;
    /* cfg_load skips one word, the command's name */
    if (cfg_load(&s, c->settings, argc - words, argv + words, err, sizeof err) < 0) {
        fprintf(stderr, "retrievald: %s\n", err);
        status = EXIT_USAGE;
    } else if (s.help) {
        print_help(c, words == 0);
        status = EXIT_SUCCESS;
    } else if (s.version) {
        puts("retrievald " RETRIEVALD_VERSION);
        status = EXIT_SUCCESS;
    } else if (!s.model && needs_model(c)) {
        fprintf(stderr, "retrievald: no model: name a GGUF file with -m FILE (see --help)\n");
        status = EXIT_USAGE;
    } else {
        status = c->run(&s);
    }
    cfg_free(&s);
    return status;
}
