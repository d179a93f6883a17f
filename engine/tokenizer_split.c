/* Splitting text into the words that byte pairs are merged in ("pre-tokenizing"), by the regular expression each model was trained with.
 *
 * The expressions are the published ones, with these changes that keep their meaning:
 * - \s is spelled out as the characters of the Unicode property White_Space, as the training libraries have it: PCRE2's \s also takes
 * U+180E.
 * - Case-insensitive contractions are ASCII classes: under Unicode case folding 's would also match a long s.
 * - Runs that nothing can follow in the expression are possessive. What is left to backtrack is a run of white space, which each
 *   alternative walks at most once before one of them takes the run but its last character: the whole is linear in the text.
 * - smollm isolates each digit before the GPT-2 expression sees what lies between. One expression does the same when a digit is
 *   a word of its own and ends the text for the white space before it.
 * Every character begins a match, so the expressions are anchored.
 */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "tokenizer_parts.h"

#include <errno.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#define WS          "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define CONTRACTION "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
/* What GPT-2 and its heirs agree on: white space keeps its last character for the word that follows. */
#define SPACES     "|[" WS "]+(?![^" WS "])|[" WS "]+"
#define GPT2_WORDS "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}++"
#define TIKTOKEN(digits)                                                                                                                   \
    CONTRACTION "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}++|" digits "| ?[^" WS "\\p{L}\\p{N}]++[\\r\\n]*+|[" WS "]*[\\r\\n]++" SPACES

static const eng_split_rule rules[] = {
    {.names = {"gpt-2"}, .expression = GPT2_WORDS "| ?\\p{N}++| ?[^" WS "\\p{L}\\p{N}]++" SPACES},
    {.names = {"smollm"}, .expression = GPT2_WORDS "|\\p{N}| ?[^" WS "\\p{L}\\p{N}]++|[" WS "]+(?![^" WS "\\p{N}])|[" WS "]+"},
    {.names = {"llama-bpe", "llama3", "llama-v3"}, .expression = TIKTOKEN("\\p{N}{1,3}+"), .whole_words = true, .add_bos = true},
    {.names = {"qwen2", "deepseek-r1-qwen"}, .expression = TIKTOKEN("\\p{N}")},
};

struct eng_split {
    pcre2_code *code;
};

struct eng_split_scratch {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

const eng_split_rule *eng_split_find(eng_str pre)
{
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        for (size_t k = 0; k < sizeof rules[i].names / sizeof *rules[i].names && rules[i].names[k]; k++)
            if (strlen(rules[i].names[k]) == pre.n && !memcmp(rules[i].names[k], pre.s, pre.n))
                return &rules[i];
    return NULL;
}

int eng_split_new(const eng_split_rule *rule, eng_split **ret)
{
    eng_split *s = calloc(1, sizeof *s);
    if (!s)
        return -ENOMEM;
    int code;
    PCRE2_SIZE at;
    s->code = pcre2_compile((PCRE2_SPTR)rule->expression, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &code, &at, NULL);
    if (!s->code) {
        free(s);
        return code == PCRE2_ERROR_HEAP_FAILED ? -ENOMEM : -EINVAL;
    }
    /* Where the system forbids writable code this fails, and matching interprets: slower, equal. */
    (void)pcre2_jit_compile(s->code, PCRE2_JIT_COMPLETE);
    *ret = s;
    return 0;
}

void eng_split_free(eng_split *s)
{
    if (!s)
        return;
    pcre2_code_free(s->code);
    free(s);
}

int eng_split_scratch_new(const eng_split *s, eng_split_scratch **ret)
{
    eng_split_scratch *w = calloc(1, sizeof *w);
    if (!w)
        return -ENOMEM;
    w->data = pcre2_match_data_create_from_pattern(s->code, NULL);
    w->context = pcre2_match_context_create(NULL);
    w->stack = pcre2_jit_stack_create((size_t)32 << 10, (size_t)1 << 20, NULL);
    if (!w->data || !w->context || !w->stack) {
        eng_split_scratch_free(w);
        return -ENOMEM;
    }
    pcre2_jit_stack_assign(w->context, NULL, w->stack);
    /* The limit counts steps back through a run of white space; the default would fail on ten million of them. */
    pcre2_set_match_limit(w->context, UINT32_MAX);
    *ret = w;
    return 0;
}

void eng_split_scratch_free(eng_split_scratch *w)
{
    if (!w)
        return;
    pcre2_jit_stack_free(w->stack);
    pcre2_match_context_free(w->context);
    pcre2_match_data_free(w->data);
    free(w);
}

/* Bytes at the start of the text that are valid UTF-8. */
static size_t valid_run(const char *text, size_t len)
{
    size_t i = 0;
    while (i < len) {
        uint64_t eight;
        if (len - i >= sizeof eight) {
            memcpy(&eight, text + i, sizeof eight);
            if (!(eight & 0x8080808080808080u)) {
                i += sizeof eight;
                continue;
            }
        }
        utf8proc_int32_t c;
        utf8proc_ssize_t n = utf8proc_iterate((const utf8proc_uint8_t *)text + i, (utf8proc_ssize_t)(len - i < 4 ? len - i : 4), &c);
        if (n <= 0)
            break;
        i += (size_t)n;
    }
    return i;
}

static int split_valid(const eng_split *s, eng_split_scratch *w, const char *text, size_t len, eng_word_fn *word, void *ctx)
{
    const PCRE2_SIZE *match = pcre2_get_ovector_pointer(w->data);
    for (size_t i = 0; i < len;) {
        int r = pcre2_match(s->code, (PCRE2_SPTR)text, len, i, PCRE2_NO_UTF_CHECK, w->data, w->context);
        if (r < 0)
            return r == PCRE2_ERROR_NOMEMORY || r == PCRE2_ERROR_HEAPLIMIT || r == PCRE2_ERROR_JIT_STACKLIMIT ? -ENOMEM : -EIO;
        r = word(ctx, text + i, match[1] - i);
        if (r < 0)
            return r;
        i = match[1];
    }
    return 0;
}

int eng_split_each(const eng_split *s, eng_split_scratch *w, const char *text, size_t len, eng_word_fn *word, void *ctx)
{
    for (size_t i = 0; i < len;) {
        size_t n = valid_run(text + i, len - i);
        int r = n ? split_valid(s, w, text + i, n, word, ctx) : word(ctx, text + i, n = 1);
        if (r < 0)
            return r;
        i += n;
    }
    return 0;
}
