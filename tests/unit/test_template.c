/* server/template.c and its helper: errors, OpenAI's shapes, guards, and templates that mean harm. Golden prompts: golden/test_chat.c. */
#include "../../server/template.c" /* for its seccomp program */
#include "support.h"

#include <dirent.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define G          "\xEF\xB7\x90\xEF\xB7\x91"
#define USER(text) "{\"messages\": [{\"role\": \"user\", \"content\": \"" text "\"}]}"

static const char *const controls[] = {"<|im_start|>", "<|im_end|>", "</s>", "#", "<|im", "::"};
enum { N_CONTROLS = sizeof controls / sizeof *controls };

static srv_template *start(void)
{
    char err[512] = "";
    srv_template *t = NULL;
    ck_assert_msg(!srv_template_start(&t, err, sizeof err), "%s", err);
    return t;
}

static int set(srv_template *t, const char *source, size_t len, char *err, size_t errlen)
{
    return srv_template_set(t, source, len, "<s>", "</s>", controls, N_CONTROLS, err, errlen);
}

static srv_template *with_template(const char *source)
{
    char err[512] = "";
    srv_template *t = start();
    ck_assert_msg(!set(t, source, strlen(source), err, sizeof err), "%s", err);
    return t;
}

/* want NULL: any text. For failures, want must be part of the message. */
static void check(srv_template *t, const char *json, int want_rc, const char *want)
{
    char err[512] = "", *text = NULL;
    size_t n = 0;
    int r = srv_template_render(t, json, strlen(json), &text, &n, err, sizeof err);
    ck_assert_msg(r == want_rc, "%.200s: %d %s", json, r, err);
    if (r)
        ck_assert_msg(!want || strstr(err, want), "%.200s: %s", json, err);
    else
        ck_assert_msg(!want || (n == strlen(want) && !memcmp(text, want, n)), "%.200s: %s", json, text);
    free(text);
}

static void check_template(const char *source, const char *json, int want_rc, const char *want)
{
    srv_template *t = with_template(source);
    check(t, json, want_rc, want);
    srv_template_free(t);
}

/* ---- processes ---- */

/* A process whose parent is ppid; 0 when there is none. */
static pid_t child_of(pid_t ppid)
{
    pid_t found = 0;
    DIR *d = opendir("/proc");
    ck_assert_ptr_nonnull(d);
    for (struct dirent *e; !found && (e = readdir(d));) {
        char path[300], line[512];
        snprintf(path, sizeof path, "/proc/%s/stat", e->d_name);
        FILE *f = e->d_name[0] >= '1' && e->d_name[0] <= '9' ? fopen(path, "r") : NULL;
        if (!f)
            continue;
        int parent = 0;
        char *after = fgets(line, sizeof line, f) ? strrchr(line, ')') : NULL;
        if (after && sscanf(after, ") %*c %d", &parent) == 1 && parent == ppid)
            found = atoi(e->d_name);
        fclose(f);
    }
    closedir(d);
    return found;
}

/* A field of /proc/PID/status as a number. */
static long status_of(pid_t pid, const char *field)
{
    char path[64], line[256];
    long value = -1;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *f = fopen(path, "r");
    while (f && fgets(line, sizeof line, f))
        if (!strncmp(line, field, strlen(field)) && line[strlen(field)] == ':')
            value = atol(line + strlen(field) + 1);
    if (f)
        fclose(f);
    return value;
}

/* -1: not ours to see */
static int open_files(pid_t pid)
{
    int n = -2; /* . and .. */
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *d = opendir(path);
    if (!d)
        return -1;
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

/* ---- a render in a thread ---- */

typedef struct {
    srv_template *t;
    const char *source; /* own helper and template when t is NULL */
    const char *json;
    int rc;
    char err[512];
    char *text;
    size_t len;
    atomic_bool done;
    pthread_t thread;
} job;

static void *run(void *arg)
{
    job *j = arg;
    srv_template *own = NULL;
    if (!j->t) {
        j->rc = srv_template_start(&own, j->err, sizeof j->err);
        if (!j->rc)
            j->rc = set(own, j->source, strlen(j->source), j->err, sizeof j->err);
    }
    if (!j->rc)
        j->rc = srv_template_render(own ? own : j->t, j->json, strlen(j->json), &j->text, &j->len, j->err, sizeof j->err);
    srv_template_free(own);
    atomic_store(&j->done, true);
    return NULL;
}

static void begin(job *j)
{
    ck_assert_int_eq(pthread_create(&j->thread, NULL, run, j), 0);
}

static void end(job *j)
{
    ck_assert_int_eq(pthread_join(j->thread, NULL), 0);
}

/* ---- tests ---- */

/* What a process under the filter gets for calls that an intruder would want; a bit for each that was not refused. */
static void intrude(const srv_template *t, int fd)
{
    struct sock_fprog program = {.len = (unsigned short)(t->filter_len / sizeof(struct sock_filter)),
                                 .filter = (void *)(uintptr_t)t->filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0))
        syscall(SYS_exit_group, 255);
    static char page[4096];
    int bad = 0;
    bad |= (syscall(SYS_openat, AT_FDCWD, "/etc/passwd", O_RDONLY) >= 0 || errno != EPERM) << 0;
    bad |= (syscall(SYS_socket, AF_INET, SOCK_STREAM, 0) >= 0 || errno != EPERM) << 1;
    bad |= (syscall(SYS_kill, getppid(), 0) >= 0 || errno != EPERM) << 2;
    bad |= (syscall(SYS_execve, "/bin/true", NULL, NULL) >= 0 || errno != EPERM) << 3;
    bad |= (syscall(SYS_mmap, NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) != -1 || errno != EPERM) << 4;
    bad |= (syscall(SYS_mmap, NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0) != -1 || errno != EPERM) << 5;
    bad |= (syscall(SYS_mprotect, (uintptr_t)page & ~4095ul, 4096, PROT_READ | PROT_EXEC) >= 0 || errno != EPERM) << 6;
    bad |= (syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) >= 0 || errno != EPERM || write(fd, "x", 1) != 1) << 7;
    syscall(SYS_exit_group, bad); /* not _exit, for which the address sanitizer makes calls of its own */
}

START_TEST(seccomp_program)
{
    srv_template *t = start();
    int fd = memfd_create("out", 0), status = 0;
    ck_assert_int_ge(fd, 0);
    pid_t pid = fork();
    if (!pid)
        intrude(t, fd);
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%x", (unsigned)status);
    ck_assert_int_eq(lseek(fd, 0, SEEK_END), 1);
    close(fd);
    srv_template_free(t);
}
END_TEST

START_TEST(template_errors)
{
    char err[512] = "";
    srv_template *t = start();
    check(t, USER("x"), -EINVAL, "no chat template");
    ck_assert_int_eq(set(t, "a\n{% for x in y %}", 18, err, sizeof err), -EINVAL);
    ck_assert_msg(strstr(err, "line 2") && strstr(err, "endfor"), "%s", err);
    check(t, USER("x"), -EINVAL, "endfor");
    srv_template_free(t);
    srv_template_free(NULL);

    check_template("{{ raise_exception('Only \\'one\\'\\nmessage') }}", USER("x"), -EINVAL, "Only 'one' message");
    check_template("a\nb\n{{ nothing.there }}", USER("x"), -EINVAL, "'nothing' is undefined (chat template, line 3)");
    check_template("{{ 'a' + 1 }}", USER("x"), -EINVAL, "TypeError");
    check_template("{{ 1 / 0 }}", USER("x"), -EINVAL, "division by zero");
    check_template("{{ range(1000000) | list }}", USER("x"), -EINVAL, "Range too big");
    check_template("{% include 'x' %}", USER("x"), -EINVAL, "no loader");
    check_template("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", USER("x"), -EINVAL, "nested too deep");
    check_template("{{ messages.append(1) }}", USER("x"), -EINVAL, "");
}
END_TEST

/* Values are what transformers' own renderer prints. */
START_TEST(what_templates_can_do)
{
    check_template("", USER("x"), 0, "");
    check_template("{{ bos_token }}{{ eos_token }}{{ documents is none }}{{ tools is none }}{{ add_generation_prompt }}", USER("x"), 0,
                   "<s></s>TrueTrueTrue");
    check_template("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n", USER("x"), 0, "x\n");
    check_template("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", USER("x"), 0, "01");
    check_template("{% generation %}{{ messages[0].content }}{% endgeneration %}!", USER("x"), 0, "x!");
    check_template("{{ strftime_now('%Y') | int > 2000 }}", USER("x"), 0, "True");
    check_template("{{ lipsum(1) | length > 9 }}{{ 'a b' | wordwrap(1) }}{{ [1] | pprint }}", USER("x"), 0, "Truea\nb[1]");
    check_template("{{ d | tojson }} {{ d | tojson(indent=2) }}",
                   "{\"messages\": [{\"role\": \"user\", \"content\": \"\"}], \"chat_template_kwargs\": {\"d\": {\"b\": 2.0, \"a\": "
                   "\"<\\u2028'\\u00e9\"}}}",
                   0, "{\"b\": 2.0, \"a\": \"<\xE2\x80\xA8'\xC3\xA9\"} {\n  \"b\": 2.0,\n  \"a\": \"<\xE2\x80\xA8'\xC3\xA9\"\n}");
    check_template("{{ messages[0].content }}", USER("a\\ud800b\\ud83d\\ude00"), 0,
                   "a\xEF\xBF\xBD"
                   "b\xF0\x9F\x98\x80");
}
END_TEST

START_TEST(openai_shapes)
{
    srv_template *t = with_template("{{ messages | tojson }}{% if tools is not none %}{{ tools | tojson }}{% endif %}");
    check(t,
          "{\"messages\": [{\"role\": \"developer\", \"content\": \"x\"}], \"tools\": [], \"model\": \"any\", \"add_generation_prompt\": "
          "null}",
          0, "[{\"role\": \"system\", \"content\": \"x\"}]");
    check(t,
          "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"a\"}, {\"type\": \"text\", \"text\": "
          "\"b\"}]}, "
          "{\"role\": \"assistant\", \"content\": null, \"tool_calls\": [{\"id\": \"1\", \"type\": \"function\", \"function\": {\"name\": "
          "\"f\", "
          "\"arguments\": \"{\\\"x\\\": 2.0, \\\"s\\\": \\\"</s>\\\"}\"}}]}, {\"role\": \"user\", \"content\": [], \"tool_calls\": null}]}",
          0,
          "[{\"role\": \"user\", \"content\": \"a\\nb\"}, {\"role\": \"assistant\", \"content\": \"\", \"tool_calls\": [{\"id\": \"1\", "
          "\"type\": "
          "\"function\", \"function\": {\"name\": \"f\", \"arguments\": {\"x\": 2.0, \"s\": \"<" G
          "/s>\"}}}]}, {\"role\": \"user\", \"content\": "
          "\"\"}]");
    check(t,
          "{\"openai\": false, \"messages\": [{\"role\": \"developer\", \"content\": null, \"tool_calls\": [{\"function\": {\"arguments\": "
          "\"{}\"}}]}]}",
          0, "[{\"role\": \"developer\", \"content\": null, \"tool_calls\": [{\"function\": {\"arguments\": \"{}\"}}]}]");
    srv_template_free(t);

    /* DeepSeek's templates know a tool call by its null content; a template may know the developer role itself. */
    check_template("{% if messages[0]['content'] is none %}null{% endif %}",
                   "{\"messages\": [{\"role\": \"assistant\", \"content\": null, \"tool_calls\": [{}]}]}", 0, "null");
    check_template("{% if messages[0]['role'] == 'developer' %}yes{% endif %}",
                   "{\"messages\": [{\"role\": \"developer\", \"content\": \"\"}]}", 0, "yes");
}
END_TEST

START_TEST(bad_requests)
{
    static const struct {
        const char *json, *says;
    } cases[] = {
        {"", "not JSON"},
        {"{\"messages\": [", "not JSON"},
        {"{\"messages\": []} x", "not JSON"},
        {"[]", "not an object"},
        {"{}", "messages is missing"},
        {"{\"messages\": {}}", "messages is not a list"},
        {"{\"messages\": []}", "messages is empty"},
        {"{\"messages\": [\"x\"]}", "messages[0] is not an object"},
        {"{\"messages\": [{\"content\": \"x\"}]}", "messages[0].role is missing"},
        {"{\"messages\": [{\"role\": 1, \"content\": \"x\"}]}", "messages[0].role is not a string"},
        {"{\"messages\": [{\"role\": \"user\"}]}", "messages[0].content is missing"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": 5}]}", "messages[0].content is not"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": [5]}]}", "messages[0].content[0] is not an object"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image_url\"}]}]}", "'image_url' are not supported"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": 1}]}]}", "messages[0].content[0].text"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"\", \"tool_calls\": {}}]}", "messages[0].tool_calls is not a list"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"\", \"tool_calls\": [1]}]}", "messages[0].tool_calls[0]"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"\"}], \"tools\": {}}", "tools is not a list"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"\"}], \"chat_template_kwargs\": []}",
         "chat_template_kwargs is not an object"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"\"}], \"add_generation_prompt\": 1}", "add_generation_prompt"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"\", \"x\": NaN}]}", "NaN"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"\", \"x\": -Infinity}]}", "Infinity"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"\", \"x\": 1e999}]}", "1e999"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"\xFF\"}]}", "UTF-8"},
        {"\xEF\xBB\xBF{}", "not JSON"},
    };
    srv_template *t = with_template("{{ messages | tojson }}");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check(t, cases[i].json, -EINVAL, cases[i].says);

    enum { DEEP = 100000 };
    char *deep = malloc(2 * DEEP + 128);
    ck_assert_ptr_nonnull(deep);
    for (int depth = 62; depth <= DEEP; depth = depth < 70 ? depth + 1 : depth * 10) {
        char *p = deep + sprintf(deep, "{\"messages\": [{\"role\": \"user\", \"content\": \"\", \"x\": ");
        memset(p, '[', (size_t)depth);
        memset(p + depth, ']', (size_t)depth);
        strcpy(p + 2 * depth, "}]}");
        check(t, deep, depth <= 63 ? 0 : -EINVAL, depth <= 63 ? NULL : "nested");
    }
    free(deep);
    srv_template_free(t);
}
END_TEST

START_TEST(guards)
{
    char text[] = G "a" G G "b" G, *none = text;
    ck_assert_str_eq(srv_template_guard(), G);
    size_t n = srv_template_unguard(text, strlen(text));
    ck_assert(n == 2 && !memcmp(text, "ab", 2));
    ck_assert_uint_eq(srv_template_unguard(none, 0), 0);

    srv_template *t =
        with_template("<|im_start|>{{ messages[0].role }}:{{ messages[0].content }}<|im_end|>{{ k }}{{ tools | tojson if tools }}");
    check(t, USER("a<|im_end|></s>b#"), 0, "<|im_start|>user:a<" G "|im_end|><" G "/s>b#<|im_end|>");
    check(t, USER("<|im_st</s>art|>"), 0, "<|im_start|>user:<" G "|im_st<" G "/s>art|><|im_end|>");
    check(t, USER("a:::b"), 0, "<|im_start|>user:a:" G ":" G ":b<|im_end|>");
    check(t, USER("<|i </ s> im_end|>"), 0, "<|im_start|>user:<|i </ s> im_end|><|im_end|>");
    /* Guards of the client's own are taken out first, also where taking one out makes another. */
    check(t, USER("<" G "|x" G), 0, "<|im_start|>user:<\xEF\xB7\x91|x\xEF\xB7\x91<|im_end|>");
    check(t, USER("\\ufdd0" G "\\ufdd1"), 0, "<|im_start|>user:\xEF\xB7\x91\xEF\xB7\x91<|im_end|>");
    check(t,
          "{\"messages\": [{\"role\": \"<|im_end|>\", \"content\": \"\"}], \"tools\": [{\"a</s>\": \"</s>\"}], \"chat_template_kwargs\": "
          "{\"k\": \"</s>\"}}",
          0, "<|im_start|><" G "|im_end|>:<|im_end|><" G "/s>[{\"a<" G "/s>\": \"<" G "/s>\"}]");
    srv_template_free(t);
}
END_TEST

/* The templates of the hostile model files. */
START_TEST(hostile_files)
{
    static const struct {
        const char *file;
        int set_rc, render_rc;
        const char *says;
    } cases[] = {
        {"template-not-utf8", -EINVAL, -EINVAL, "chat_template is not UTF-8"},
        {"template-syntax", -EINVAL, -EINVAL, "chat_template, line 1"},
        {"template-nul", 0, 0, NULL},
        {"template-endless", 0, -EINVAL, "Range too big"},
        {"template-deep", -EINVAL, -EINVAL, "nested too deep"},
        {"template-bomb", 0, -ENOMEM, "memory"},
    };
    static const char key[] = "tokenizer.chat_template";
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char path[128], err[512] = "";
        size_t n;
        uint64_t len;
        snprintf(path, sizeof path, "golden/gguf/hostile/%s.gguf", cases[i].file);
        char *file = t_read(t_path(path), &n);
        char *at = memmem(file, n, key, sizeof key - 1);
        ck_assert_ptr_nonnull(at);
        at += sizeof key - 1 + sizeof(uint32_t);
        memcpy(&len, at, sizeof len);
        srv_template *t = start();
        int r = set(t, at + sizeof len, len, err, sizeof err);
        ck_assert_msg(r == cases[i].set_rc, "%s: %d %s", cases[i].file, r, err);
        check(t, USER("x"), cases[i].render_rc, cases[i].says);
        srv_template_free(t);
        free(file);
    }
}
END_TEST

/* All at once: some of them only end when their processor time is up. */
START_TEST(hostile_templates)
{
    static const struct {
        const char *source;
        int rc;
    } cases[] = {
        {"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", -ETIMEDOUT},
        {"{{ 7 ** 999999999 }}", -ETIMEDOUT}, /* while it is compiled */
        {"{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", -ENOMEM},
        {"{{ 'x' * 10 ** 10 }}", -ENOMEM},
        {"{{ 'x' * (10 ** 10 + messages | length) }}", -ENOMEM},
        {"{{ '%99999999999d' % 1 }}", -ENOMEM},
        {"{% set ns = namespace(l=[1]) %}{% for i in range(99) %}{% set ns.l = ns.l + ns.l %}{% endfor %}", -ENOMEM},
        {"{{ ''.__class__.__mro__[1].__subclasses__() }}", -EINVAL},
        {"{{ raise_exception.__globals__['os'].system('id') }}", -EINVAL},
        {"{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}", -EINVAL},
        {"{{ self.__init__.__globals__ }}", -EINVAL},
        {"{{ cycler.__init__.__globals__.os.popen('id').read() }}", -EINVAL},
    };
    enum { N = sizeof cases / sizeof *cases };
    job jobs[N] = {0};
    for (int i = 0; i < N; i++) {
        jobs[i].source = cases[i].source;
        jobs[i].json = USER("x");
        begin(&jobs[i]);
    }
    for (int i = 0; i < N; i++)
        end(&jobs[i]);
    for (int i = 0; i < N; i++) {
        ck_assert_msg(jobs[i].rc == cases[i].rc, "%s: %d %s %.100s", cases[i].source, jobs[i].rc, jobs[i].err,
                      jobs[i].text ? jobs[i].text : "");
        free(jobs[i].text);
    }
}
END_TEST

static const char hang[] =
    "{% if messages[0].content == 'hang' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ messages[0].content }}";

/* A child that hangs is locked in, holds up nobody, and takes nobody along; nor does the helper's death. */
START_TEST(hung_render)
{
    srv_template *t = with_template(hang);
    job j = {.t = t, .json = USER("hang")};
    pid_t helper = t->pid, child = 0;
    while (child_of(helper)) /* the one that compiled the template goes its way first */
        sched_yield();
    begin(&j);
    while ((!(child = child_of(helper)) || status_of(child, "Seccomp") != 2) && !atomic_load(&j.done))
        sched_yield();
    ck_assert_msg(!atomic_load(&j.done), "the child was never locked in: %d %s", j.rc, j.err);
    ck_assert_int_eq(status_of(child, "NoNewPrivs"), 1);
    if (!geteuid()) {
        ck_assert_int_ne(status_of(child, "Uid"), 0);
        ck_assert_int_eq(open_files(child), 1);
    }
    check(t, USER("quick"), 0, "quick");
    ck_assert(!atomic_load(&j.done));
    ck_assert_int_eq(kill(helper, SIGKILL), 0);
    siginfo_t info;
    ck_assert_int_eq(waitid(P_PID, (id_t)helper, &info, WEXITED | WNOWAIT), 0);
    check(t, USER("after"), 0, "after");
    ck_assert(!atomic_load(&j.done));
    ck_assert_int_eq(kill(child, SIGKILL), 0);
    end(&j);
    ck_assert_msg(j.rc == -EIO && strstr(j.err, "died"), "%d %s", j.rc, j.err);
    check(t, USER("again"), 0, "again");
    srv_template_free(t);
}
END_TEST

START_TEST(helper_that_keeps_dying)
{
    srv_template *t = with_template("{{ messages[0].content }}");
    int good = 0;
    for (; good < 20; good++) {
        char err[512] = "", *text = NULL;
        size_t n;
        ck_assert_int_eq(kill(t->pid, SIGKILL), 0);
        int r = srv_template_render(t, USER("x"), strlen(USER("x")), &text, &n, err, sizeof err);
        free(text);
        if (r) {
            ck_assert_msg(r == -EIO && strstr(err, "keeps ending"), "%d %s", r, err);
            break;
        }
    }
    ck_assert_msg(good == 4, "%d", good);
    srv_template_free(t);
}
END_TEST

START_TEST(many_at_once)
{
    enum { N = 16, EACH = 8 };
    srv_template *t = with_template("{% for m in messages %}{{ m.content }}{% endfor %}");
    int before = open_files(getpid());
    for (int round = 0; round < EACH; round++) {
        job jobs[N] = {0};
        char json[N][640], want[N][32];
        for (int i = 0; i < N; i++) {
            snprintf(want[i], sizeof want[i], "%d-%d", round, i);
            snprintf(json[i], sizeof json[i], "{\"messages\": [{\"role\": \"user\", \"content\": \"%s\"}]}", want[i]);
            jobs[i].t = t;
            jobs[i].json = json[i];
            begin(&jobs[i]);
        }
        for (int i = 0; i < N; i++) {
            end(&jobs[i]);
            ck_assert_msg(!jobs[i].rc, "%s", jobs[i].err);
            ck_assert_str_eq(jobs[i].text, want[i]);
            free(jobs[i].text);
        }
    }
    ck_assert_int_eq(open_files(getpid()), before);
    srv_template_free(t);
    ck_assert_int_eq(open_files(getpid()), before - 1);
    ck_assert_int_eq(child_of(getpid()), 0);
}
END_TEST

/* 40 MB, in Python's widest characters, with a token to break at every 64 bytes. */
START_TEST(large_request)
{
    enum { UNIT = 64, UNITS = 40 << 20 >> 6 };
    static const char head[] = "{\"messages\": [{\"role\": \"user\", \"content\": \"", tail[] = "\"}]}";
    size_t len = sizeof head - 1 + (size_t)UNIT * UNITS + sizeof tail - 1, n = 0;
    char *json = malloc(len + 1), *p = json, *text = NULL, err[512] = "";
    ck_assert_ptr_nonnull(json);
    p = stpcpy(p, head);
    for (int i = 0; i < UNITS; i++)
        p += sprintf(p, "%08d </s> \xF0\x9F\x98\x80 %045d", i, i);
    ck_assert_ptr_eq(stpcpy(p, tail), json + len);
    srv_template *t = with_template("{{ '[' + messages[0]['role'] + ']' + messages[0]['content'] + eos_token }}");
    int r = srv_template_render(t, json, len, &text, &n, err, sizeof err);
    ck_assert_msg(!r, "%d %s", r, err);
    ck_assert_uint_eq(n, (size_t)(UNIT + strlen(G)) * UNITS + 6 + 4);
    n = srv_template_unguard(text, n);
    ck_assert_uint_eq(n, (size_t)UNIT * UNITS + 6 + 4);
    ck_assert(!memcmp(text, "[user]", 6) && !memcmp(text + 6, json + sizeof head - 1, (size_t)UNIT * UNITS) &&
              !memcmp(text + n - 4, "</s>", 4));
    free(text);
    free(json);
    srv_template_free(t);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("template");
    TCase *c = tcase_create("template");
    tcase_add_test(c, seccomp_program);
    tcase_add_test(c, template_errors);
    tcase_add_test(c, what_templates_can_do);
    tcase_add_test(c, openai_shapes);
    tcase_add_test(c, bad_requests);
    tcase_add_test(c, guards);
    tcase_add_test(c, hostile_files);
    tcase_add_test(c, hostile_templates);
    tcase_add_test(c, hung_render);
    tcase_add_test(c, helper_that_keeps_dying);
    tcase_add_test(c, many_at_once);
    tcase_add_test(c, large_request);
    suite_add_tcase(s, c);
    return t_run(s);
}
