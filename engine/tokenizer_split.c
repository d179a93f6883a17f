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
 * - White space at the end is looked for where it begins: \s+$ alone would walk through each run of it from each of its characters.
 * Which names share an expression is llama.cpp's table. tekken and gpt-4o are its originals, where llama.cpp approximates them.
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
/* cl100k and its heirs; letters and digits as given. */
#define TIKTOKEN(letters, digits)                                                                                                          \
    CONTRACTION "|[^\\r\\n\\p{L}\\p{N}]?[" letters "]++|" digits "| ?[^" WS letters "\\p{N}]++[\\r\\n]*+|[" WS "]*[\\r\\n]++" SPACES

/* Words with their accents, capitals before small letters: o200k, from which tekken took it. */
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define O200K(ending, digits)                                                                                                              \
    "[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" ending "|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER "*" ending "|" digits "| ?[^" WS         \
    "\\p{L}\\p{N}]++[\\r\\n/]*+|[" WS "]*[\\r\\n]++" SPACES
/* DeepSeek: the letters with case of the Unicode of its time, and what it takes for Chinese, Japanese and Korean. */
#define CASED                                                                                                                              \
    "\\x{41}-\\x{5a}\\x{61}-\\x{7a}\\x{b5}\\x{c0}-\\x{d6}\\x{d8}-\\x{f6}\\x{f8}-\\x{1ba}\\x{1bc}-\\x{1bf}\\x{1c4}-\\x{293}"                \
    "\\x{295}-\\x{2af}\\x{370}-\\x{373}\\x{376}\\x{377}\\x{37b}-\\x{37d}\\x{37f}\\x{386}\\x{388}-\\x{38a}\\x{38c}"                         \
    "\\x{38e}-\\x{3a1}\\x{3a3}-\\x{3f5}\\x{3f7}-\\x{481}\\x{48a}-\\x{52f}\\x{531}-\\x{556}\\x{10a0}-\\x{10c5}"                             \
    "\\x{13a0}-\\x{13f5}\\x{13f8}-\\x{13fd}\\x{1c90}-\\x{1cba}\\x{1cbd}-\\x{1cbf}\\x{1d00}-\\x{1d2b}\\x{1d6b}-\\x{1d77}"                   \
    "\\x{1d79}-\\x{1d9a}\\x{1e00}-\\x{1f15}\\x{1f18}-\\x{1f1d}\\x{1f20}-\\x{1f45}\\x{1f48}-\\x{1f4d}\\x{1f50}-\\x{1f57}"                   \
    "\\x{1f59}\\x{1f5b}\\x{1f5d}\\x{1f5f}-\\x{1f7d}\\x{1f80}-\\x{1fb4}\\x{1fb6}-\\x{1fbc}\\x{1fbe}\\x{1fc2}-\\x{1fc4}"                     \
    "\\x{1fc6}-\\x{1fcc}\\x{1fd0}-\\x{1fd3}\\x{1fd6}-\\x{1fdb}\\x{1fe0}-\\x{1fec}\\x{1ff2}-\\x{1ff4}\\x{1ff6}-\\x{1ffc}"                   \
    "\\x{2102}\\x{2107}\\x{210a}-\\x{2113}\\x{2115}\\x{2119}-\\x{211d}\\x{2124}\\x{2126}\\x{2128}\\x{212a}-\\x{212d}"                      \
    "\\x{212f}-\\x{2134}\\x{2139}\\x{213c}-\\x{213f}\\x{2145}-\\x{2149}\\x{214e}\\x{2183}\\x{2184}\\x{2c00}-\\x{2c7b}"                     \
    "\\x{2c7e}-\\x{2ce4}\\x{2ceb}-\\x{2cee}\\x{2cf2}\\x{2cf3}\\x{a640}-\\x{a66d}\\x{a680}-\\x{a69b}\\x{a722}-\\x{a76f}"                    \
    "\\x{a771}-\\x{a787}\\x{a78b}-\\x{a78e}\\x{ab70}-\\x{abbf}\\x{fb00}-\\x{fb06}\\x{fb13}-\\x{fb17}\\x{ff21}-\\x{ff3a}"                   \
    "\\x{ff41}-\\x{ff5a}\\x{10400}-\\x{1044f}\\x{104b0}-\\x{104d3}\\x{104d8}-\\x{104fb}\\x{10c80}-\\x{10cb2}"                              \
    "\\x{10cc0}-\\x{10cf2}\\x{118a0}-\\x{118df}\\x{1e900}-\\x{1e943}"
#define CJK      "[\\x{4e00}-\\x{9fa5}\\x{800}-\\x{4e00}\\x{ac00}-\\x{d7ff}]++"
#define CJK_KANA "[\\x{4e00}-\\x{9fa5}\\x{3040}-\\x{30ff}]++"

static const eng_split_rule rules[] = {
    {.names = {"gpt-2", "phi-2", "olmo", "mpt", "jais", "exaone4", "gigachat", "trillion", "granite-docling", "mellum", "a.x-4.0"},
     .stages = {GPT2_WORDS "| ?\\p{N}++| ?[^" WS "\\p{L}\\p{N}]++" SPACES}},
    {.names = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"},
     .stages = {GPT2_WORDS "|\\p{N}| ?[^" WS "\\p{L}\\p{N}]++|[" WS "]+(?![^" WS "\\p{N}])|[" WS "]+"}},
    {.names = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"},
     .stages = {TIKTOKEN("\\p{L}", "\\p{N}{1,3}+")},
     .whole_words = true,
     .add_bos = true},
    {.names = {"dbrx", "smaug-bpe", "glm4", "chatglm-bpe"}, .stages = {TIKTOKEN("\\p{L}", "\\p{N}{1,3}+")}},
    {.names = {"qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "kormo", "solar-open", "grok-2"},
     .stages = {TIKTOKEN("\\p{L}", "\\p{N}")}},
    {.names = {"qwen35"}, .stages = {TIKTOKEN("\\p{L}\\p{M}", "\\p{N}")}},
    {.names = {"tekken"}, .stages = {O200K("", "\\p{N}")}, .whole_words = true, .add_bos = true},
    {.names = {"gpt-4o", "llama4", "kanana2", "minimax-m2"}, .stages = {O200K("(?:" CONTRACTION ")?+", "\\p{N}{1,3}+")}},
    {.names = {"deepseek-llm"},
     .stages = {"[\\r\\n]", "[" WS "]?[" CASED "]++",
                "[" WS "]?[!-/:-~\\x{ff01}-\\x{ff0f}\\x{ff1a}-\\x{ff5e}\\x{2018}-\\x{201f}\\x{3000}-\\x{3002}]++",
                "(?<![" WS "])[" WS "]++\\z", CJK, "\\p{N}"}},
    {.names = {"deepseek-coder"}, .stages = {"[\\r\\n]", "[" WS "]?\\p{L}++", "[" WS "]?\\p{P}++", CJK, "\\p{N}"}},
    {.names = {"deepseek-v3", "hunyuan-dense", "joyai-llm"},
     .stages = {"\\p{N}{1,3}+", CJK_KANA,
                "[!-/:-@\\[-`{-~][A-Za-z]++|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]++| ?[\\p{P}\\p{S}]++[\\r\\n]*+|[" WS
                "]*[\\r\\n]++" SPACES}},
};

struct eng_split {
    pcre2_code *stages[ENG_SPLIT_STAGES];
    size_t n;
    bool counted;
};

struct eng_split_scratch {
    pcre2_match_data *data;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
    uint64_t work;
    size_t at; /* where the step before was counted */
};

const eng_split_rule *eng_split_find(eng_str pre)
{
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++)
        for (size_t k = 0; k < sizeof rules[i].names / sizeof *rules[i].names && rules[i].names[k]; k++)
            if (strlen(rules[i].names[k]) == pre.n && !memcmp(rules[i].names[k], pre.s, pre.n))
                return &rules[i];
    return NULL;
}

int eng_split_new(const eng_split_rule *rule, bool counted, eng_split **ret)
{
    eng_split *s = calloc(1, sizeof *s);
    if (!s)
        return -ENOMEM;
    s->counted = counted;
    uint32_t options = PCRE2_UTF | PCRE2_UCP | (counted ? PCRE2_AUTO_CALLOUT : 0);
    for (; s->n < ENG_SPLIT_STAGES && rule->stages[s->n]; s->n++) {
        int code;
        PCRE2_SIZE at;
        pcre2_code *c = pcre2_compile((PCRE2_SPTR)rule->stages[s->n], PCRE2_ZERO_TERMINATED, options, &code, &at, NULL);
        if (!c) {
            eng_split_free(s);
            return code == PCRE2_ERROR_HEAP_FAILED ? -ENOMEM : -EINVAL;
        }
        /* Where the system forbids writable code this fails, and matching interprets: slower, equal. */
        (void)pcre2_jit_compile(c, PCRE2_JIT_COMPLETE);
        s->stages[s->n] = c;
    }
    *ret = s;
    return 0;
}

void eng_split_free(eng_split *s)
{
    if (!s)
        return;
    for (size_t i = 0; i < s->n; i++)
        pcre2_code_free(s->stages[i]);
    free(s);
}

/* Called before each item of the expression: how far matching went since, forwards or back, is the work. */
static int count_step(pcre2_callout_block *block, void *scratch)
{
    eng_split_scratch *w = scratch;
    size_t at = block->current_position;
    w->work += 1 + (at > w->at ? at - w->at : w->at - at);
    w->at = at;
    return 0;
}

uint64_t eng_split_work(const eng_split_scratch *w)
{
    return w->work;
}

int eng_split_scratch_new(const eng_split *s, eng_split_scratch **ret)
{
    eng_split_scratch *w = calloc(1, sizeof *w);
    if (!w)
        return -ENOMEM;
    w->data = pcre2_match_data_create(1, NULL); /* the expressions capture nothing */
    w->context = pcre2_match_context_create(NULL);
    w->stack = pcre2_jit_stack_create((size_t)32 << 10, (size_t)1 << 20, NULL);
    if (!w->data || !w->context || !w->stack) {
        eng_split_scratch_free(w);
        return -ENOMEM;
    }
    pcre2_jit_stack_assign(w->context, NULL, w->stack);
    /* The limit counts steps back through a run of white space; the default would fail on ten million of them. */
    pcre2_set_match_limit(w->context, UINT32_MAX);
    if (s->counted)
        pcre2_set_callout(w->context, count_step, w);
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

/* Cuts a piece by the stages from `stage` on. No deeper than there are stages. */
static int split_piece(const eng_split *s, eng_split_scratch *w, size_t stage, const char *text, size_t len, eng_word_fn *word, void *ctx)
{
    if (stage == s->n)
        return len ? word(ctx, text, len) : 0;
    const PCRE2_SIZE *match = pcre2_get_ovector_pointer(w->data);
    for (size_t i = 0; i < len;) {
        w->at = i;
        int r = pcre2_match(s->stages[stage], (PCRE2_SPTR)text, len, i, PCRE2_NO_UTF_CHECK, w->data, w->context);
        if (r < 0 && r != PCRE2_ERROR_NOMATCH)
            return r == PCRE2_ERROR_NOMEMORY || r == PCRE2_ERROR_HEAPLIMIT || r == PCRE2_ERROR_JIT_STACKLIMIT ? -ENOMEM : -EIO;
        size_t from = r < 0 ? len : match[0], to = r < 0 ? len : match[1];
        w->work += to - i;
        r = split_piece(s, w, stage + 1, text + i, from - i, word, ctx);
        if (!r)
            r = split_piece(s, w, stage + 1, text + from, to - from, word, ctx);
        if (r < 0)
            return r;
        i = to;
    }
    return 0;
}

int eng_split_each(const eng_split *s, eng_split_scratch *w, const char *text, size_t len, eng_word_fn *word, void *ctx)
{
    for (size_t i = 0; i < len;) {
        size_t n = valid_run(text + i, len - i);
        int r = n ? split_piece(s, w, 0, text + i, n, word, ctx) : word(ctx, text + i, n = 1);
        if (r < 0)
            return r;
        i += n;
    }
    return 0;
}
