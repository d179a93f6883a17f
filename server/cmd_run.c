#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <syslog.h>
#include <unistd.h>

#include "cmd_common.h"
#include "template.h"
#include "textout.h"

enum { MAX_LINE = 16 << 20, IDLE_MS = 20, EXIT_INTERRUPTED = 130 };

typedef struct {
    const cfg_settings *s;
    eng_engine *engine;
    eng_trace *trace;   /* NULL: none */
    char *given;        /* a chat template instead of the model's; NULL: none */
    srv_template *tmpl; /* NULL: the model has none, the bare text is its prompt */
    eng_attention attention;
    char *document;
    size_t document_len;
    srv_buf messages; /* so far: JSON objects separated by commas, or the bare text */
    bool interactive; /* a person types: show a prompt sign */
    char *line;       /* what was read and not yet used */
    size_t line_len, line_cap;
} chat;

static atomic_bool interrupted;

static void on_interrupt(int signal)
{
    (void)signal;
    atomic_store(&interrupted, true);
}

/* ---- prompt ----------------------------------------------------------------------------------------------------- */

static void add_message(chat *c, const char *role, const char *text, size_t n)
{
    srv_buf *m = &c->messages;
    if (!c->tmpl) {
        srv_buf_add(m, text, n);
        if (!strcmp(role, "user"))
            srv_buf_puts(m, "\n");
        return;
    }
    srv_buf_printf(m, "%s{\"role\":\"%s\",\"content\":", m->n ? "," : "", role);
    srv_buf_string(m, text, n);
    srv_buf_puts(m, "}");
}

/* The question, after the document when it is the first. */
static int add_question(chat *c, const char *text, size_t n)
{
    if (!c->document || c->messages.n) {
        add_message(c, "user", text, n);
        return c->messages.failed ? srv_fail("out of memory") : 0;
    }
    srv_buf all = {0};
    srv_buf_add(&all, c->document, c->document_len);
    srv_buf_puts(&all, "\n\n");
    srv_buf_add(&all, text, n);
    if (!all.failed)
        add_message(c, "user", all.p, all.n);
    bool failed = all.failed || c->messages.failed;
    srv_buf_done(&all);
    return failed ? srv_fail("out of memory") : 0;
}

/* The messages as token ids. */
static int tokenize_chat(chat *c, int32_t **ret, size_t *ret_n)
{
    char err[512] = "", *text = NULL;
    size_t n = 0;
    int rc, status = 0;
    if (!c->tmpl) {
        rc = eng_tokenize(c->engine, c->messages.p, c->messages.n, ENG_TOK_ADD_SPECIAL, NULL, ret, ret_n);
        return rc < 0 ? srv_fail("the text cannot be tokenized: %s", strerror(-rc)) : 0;
    }
    srv_buf json = {0};
    srv_buf_puts(&json, "{\"messages\":[");
    srv_buf_add(&json, c->messages.p, c->messages.n);
    srv_buf_puts(&json, "],\"add_generation_prompt\":true}");
    rc = json.failed ? -ENOMEM : srv_template_render(c->tmpl, json.p, json.n, &text, &n, err, sizeof err);
    if (rc < 0)
        status = srv_fail("chat template: %s", *err ? err : strerror(-rc));
    if (!status) {
        rc = eng_tokenize(c->engine, text, n, ENG_TOK_PARSE_SPECIAL, srv_template_guard(), ret, ret_n);
        if (rc < 0)
            status = srv_fail("the prompt cannot be tokenized: %s", strerror(-rc));
    }
    srv_buf_done(&json);
    free(text);
    return status;
}

/* ---- answer ----------------------------------------------------------------------------------------------------- */

static void print_stats(const eng_session *session, double first_token_s)
{
    eng_timings t;
    eng_session_timings(session, &t);
    fprintf(stderr, "[%u prompt tokens, %u cached; first token %.2f s", t.cache_n + t.prompt_n, t.cache_n, first_token_s);
    if (t.predicted_n)
        fprintf(stderr, "; %u tokens, %.1f ms a token", t.predicted_n, t.predicted_ms / t.predicted_n);
    if (t.keys_held > 0)
        fprintf(stderr, "; keys attended %.0f of %.0f, %s", t.keys_attended, t.keys_held, eng_attn_mode_name(t.mode));
    fputs("]\n", stderr);
}

/* Writes text for a person and keeps it for the next prompt. */
static void emit(srv_buf *answer, const char *text, size_t n)
{
    srv_buf_add(answer, text, n);
    fwrite(text, 1, n, stdout);
    fflush(stdout);
}

/* Streams tokens until the answer ends. 0, 1: the context is full, or -errno. */
static int generate(chat *c, eng_session *session, double asked, srv_buf *answer, double *ret_first)
{
    srv_textout *out = NULL;
    int rc = srv_textout_new(NULL, 0, &out);
    const char *text;
    size_t n;
    for (int32_t i = 0; !rc && (c->s->n_predict < 0 || i < c->s->n_predict); i++) {
        eng_token token;
        rc = eng_session_next(session, &token);
        if (rc)
            break;
        if (i == 0)
            *ret_first = srv_seconds() - asked;
        if (eng_token_is_eog(c->engine, token.id))
            break;
        rc = eng_token_text(c->engine, token.id, false, &text, &n);
        if (!rc)
            rc = srv_textout_add(out, text, n, &text, &n);
        if (!rc)
            emit(answer, text, n);
    }
    if (out && srv_textout_finish(out, &text, &n) >= 0)
        emit(answer, text, n);
    srv_textout_free(out);
    return answer->failed ? -ENOMEM : rc;
}

static int open_session(chat *c, const int32_t *ids, size_t n, eng_session **ret)
{
    char err[512] = "";
    int32_t most = c->s->n_predict;
    eng_request r = {.ids = ids,
                     .n_ids = n,
                     .max_tokens = most < 0 ? eng_info_get(c->engine)->n_ctx : (uint32_t)most,
                     .attention = c->attention,
                     .sampling = srv_sampling(c->s),
                     .cache_prompt = true,
                     .cancel = &interrupted};
    int rc = eng_session_open(c->engine, &r, ret, err, sizeof err);
    return rc < 0 ? srv_fail("%s", *err ? err : strerror(-rc)) : 0;
}

/* Prefills the conversation and, with `speak`, answers. A turn that failed, or was stopped before its answer began, is taken back. */
static int take_turn(chat *c, bool speak, size_t messages_before)
{
    int32_t *ids = NULL;
    size_t n_ids = 0;
    eng_session *session = NULL;
    srv_buf answer = {0};
    double asked = srv_seconds(), first = 0;
    int rc = 0, status = tokenize_chat(c, &ids, &n_ids);
    if (!status)
        status = open_session(c, ids, n_ids, &session);
    if (!status) {
        srv_progress p = srv_progress_begin(speak ? "reading" : "reading the document");
        rc = eng_session_prefill(session, srv_progress_step, &p);
        srv_progress_end(&p);
        if (!rc && speak) {
            rc = generate(c, session, asked, &answer, &first);
            putchar('\n');
        }
        if (rc > 0)
            fputs("[the context is full]\n", stderr);
        else if (rc == -ECANCELED)
            fputs("[stopped]\n", stderr);
        else if (rc < 0)
            status = srv_fail("%s", rc == -EDOM ? "the model computes values that are not finite: its weights are damaged" : strerror(-rc));
        if (speak && !status && answer.n)
            print_stats(session, first);
        fflush(stdout);
    }
    eng_session_close(session);
    if (speak && answer.n && !status)
        add_message(c, "assistant", answer.p, answer.n);
    else
        c->messages.n = messages_before;
    srv_buf_done(&answer);
    free(ids);
    return rc == -ECANCELED ? EXIT_INTERRUPTED : status;
}

/* While a person thinks about a question, the document is read and indexed. */
static int read_ahead(chat *c)
{
    int status = add_question(c, "", 0);
    return status ? status : take_turn(c, false, 0);
}

static int ask(chat *c, const char *text, size_t n)
{
    size_t good, before = c->messages.n;
    if (!srv_utf8_valid(text, n, &good))
        return srv_fail("the question is not UTF-8 (byte %zu)", good + 1);
    int status = add_question(c, text, n);
    return status ? status : take_turn(c, true, before);
}

/* ---- terminal --------------------------------------------------------------------------------------------------- */

static bool make_room(chat *c)
{
    if (c->line_cap - c->line_len >= 4096)
        return true;
    size_t cap = c->line_cap ? 2 * c->line_cap : 8192;
    char *larger = cap <= MAX_LINE ? realloc(c->line, cap) : NULL;
    if (!larger) {
        srv_fail(cap > MAX_LINE ? "a line is longer than 16 MiB" : "out of memory");
        return false;
    }
    c->line = larger;
    c->line_cap = cap;
    return true;
}

/* Waits for input and builds indexes meanwhile. false: interrupted. */
static bool wait_for_input(chat *c)
{
    struct pollfd p = {.fd = STDIN_FILENO, .events = POLLIN};
    for (bool more = true;;) {
        int rc = poll(&p, 1, more ? 0 : -1);
        if (rc > 0)
            return true;
        if (rc < 0 || atomic_load(&interrupted))
            return false;
        more = eng_idle(c->engine, IDLE_MS, &interrupted) > 0;
    }
}

/* The next line, without its newline; *ret_used is what to drop afterwards. false: the end. */
static bool read_line(chat *c, size_t *ret_len, size_t *ret_used)
{
    if (c->interactive)
        fputs("> ", stderr);
    for (;;) {
        char *newline = c->line_len ? memchr(c->line, '\n', c->line_len) : NULL;
        if (newline) {
            *ret_len = (size_t)(newline - c->line);
            *ret_used = *ret_len + 1;
            return true;
        }
        if (!make_room(c))
            return false;
        if (!wait_for_input(c)) {
            if (!c->interactive)
                return false;
            atomic_store(&interrupted, false);
            c->line_len = 0;
            fputs("\n(Ctrl-D ends)\n> ", stderr);
            continue;
        }
        ssize_t n = read(STDIN_FILENO, c->line + c->line_len, c->line_cap - c->line_len);
        if (n > 0) {
            c->line_len += (size_t)n;
        } else if (n == 0 || errno != EINTR) {
            *ret_len = *ret_used = c->line_len;
            return c->line_len > 0;
        }
    }
}

static int converse(chat *c)
{
    int status = 0;
    size_t len, used;
    if (c->document && c->s->cache_ram > 0)
        status = read_ahead(c);
    if (status && status != EXIT_INTERRUPTED)
        return status;
    status = 0;
    while (read_line(c, &len, &used)) {
        atomic_store(&interrupted, false);
        if (len && c->line[len - 1] == '\r')
            len--;
        if (len)
            status = ask(c, c->line, len);
        memmove(c->line, c->line + used, c->line_len - used);
        c->line_len -= used;
        if (status == EXIT_INTERRUPTED)
            status = 0; /* the answer was stopped, not the conversation */
        if (status && !c->interactive)
            break;
    }
    if (c->interactive)
        fputc('\n', stderr);
    return status;
}

/* ---- command ---------------------------------------------------------------------------------------------------- */

/* The engine's words, as other remarks beside the conversation. */
static void log_line(void *ctx, int level, const char *text)
{
    (void)ctx;
    if (level <= LOG_INFO)
        fprintf(stderr, level <= LOG_WARNING ? "retrievald: %s\n" : "[%s]\n", text);
}

static int prepare(chat *c)
{
    char err[512] = "";
    eng_params p;
    size_t good;
    if (srv_engine_params(c->s, &p, err, sizeof err) < 0 || srv_attention(c->s, &c->attention, err, sizeof err) < 0)
        return srv_fail("%s", err);
    if (c->s->file) {
        int status = srv_read_text(c->s->file, &c->document, &c->document_len);
        if (status)
            return status;
        if (!srv_utf8_valid(c->document, c->document_len, &good))
            return srv_fail("%s: not UTF-8 text (byte %zu)", c->s->file, good + 1);
    }
    int rc = srv_template_given(c->s, &c->given, err, sizeof err);
    if (!rc)
        rc = srv_template_start(&c->tmpl, err, sizeof err);
    if (rc < 0)
        return srv_fail("%s", *err ? err : strerror(-rc));
    p.log = log_line;
    int status = srv_trace_begin(c->s, &c->trace);
    if (!status)
        status = srv_open(c->s, &p, &c->engine);
    if (status)
        return status;
    rc = srv_template_of(c->tmpl, c->engine, c->given, err, sizeof err);
    if (rc < 0 && c->given)
        return srv_fail("the chat template cannot be used: %s", err);
    if (rc < 0) {
        fprintf(stderr, "retrievald: %s; it continues the text as it stands\n", err);
        srv_template_free(c->tmpl);
        c->tmpl = NULL;
    }
    return 0;
}

int srv_cmd_run(const cfg_settings *s)
{
    chat c = {.s = s, .interactive = isatty(STDIN_FILENO)};
    struct sigaction stop = {.sa_handler = on_interrupt}; /* no SA_RESTART: a waiting poll ends */
    int status = prepare(&c);
    if (!status) {
        sigaction(SIGINT, &stop, NULL);
        status = s->prompt ? ask(&c, s->prompt, strlen(s->prompt)) : converse(&c);
    }
    eng_close(c.engine);
    srv_template_free(c.tmpl);
    srv_buf_done(&c.messages);
    free(c.given);
    free(c.document);
    free(c.line);
    int traced = srv_trace_end(s, c.trace), written = srv_finish_output();
    return status ? status : traced ? traced : written;
}
