#!/usr/bin/env python3
"""gen_splits.py OUT.jsonl: how the published pre-tokenizers cut texts into words, by HF tokenizers (pip install tokenizers).

The first line names the pre-tokenizers. The others: {"text", "words": [lists of the words' lengths in UTF-8 bytes], "of": a digit for each
pre-tokenizer, which list is its}. The texts are those of tokenizer_cases.py but the long ones, and ones made to stress white space, digits, contractions and case. Left out on
purpose: characters that are younger than Unicode 14, about whose class libraries differ, and U+017F after an apostrophe (llama.cpp's
contractions are ASCII, HF's fold case). The expressions are those of the models' tokenizer.json, as far as they cut words:
gpt-2 and smollm (openai-community/gpt2, SmolLM2), llama-bpe (Llama 3), qwen2 (Qwen2), qwen35 (Qwen3.5), tekken (Mistral Nemo), gpt-4o (o200k,
GPT-OSS), deepseek-llm (deepseek-llm-7b-base), deepseek-coder (deepseek-coder-6.7b-instruct), deepseek-v3 (DeepSeek-V3).
"""
import itertools
import json
import random
import sys
import unicodedata
from tokenizers import Regex, pre_tokenizers
from tokenizer_cases import CODE, CONTRACTIONS, DIGITS, EMOJI, INVISIBLE, LATIN, ODD, PROSE, SCRIPTS, SPACE, SPECIAL, random_cases

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TIKTOKEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+ENDING|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*ENDING|DIGITS"
         r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CASED = ("A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a"
         "\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
         "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
         "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
         "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
         "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
         "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
         "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943")
DEEPSEEK_LLM = ["[\r\n]", rf"\s?[{CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"]
DEEPSEEK_CODER = ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"]
DEEPSEEK_V3 = [r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
               r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]


def split(expression):
    return pre_tokenizers.Split(Regex(expression), "isolated")


def stages(expressions, *more):
    return pre_tokenizers.Sequence([*map(split, expressions), *more])


PRE = {
    "gpt-2": split(GPT2),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split(GPT2)]),
    "llama-bpe": split(TIKTOKEN.replace("DIGITS", r"\p{N}{1,3}")),
    "qwen2": split(TIKTOKEN.replace("DIGITS", r"\p{N}")),
    "qwen35": split(QWEN35),
    "tekken": split(O200K.replace("ENDING", "").replace("DIGITS", r"\p{N}")),
    "gpt-4o": split(O200K.replace("ENDING", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace("DIGITS", r"\p{N}{1,3}")),
    "deepseek-llm": stages(DEEPSEEK_LLM, pre_tokenizers.Digits(individual_digits=True)),
    "deepseek-coder": stages(DEEPSEEK_CODER, pre_tokenizers.Digits(individual_digits=True)),
    "deepseek-v3": stages(DEEPSEEK_V3),
}


def texts():
    for group in (PROSE, CONTRACTIONS, DIGITS, SPACE, CODE, LATIN, SCRIPTS, EMOJI, INVISIBLE, ODD, SPECIAL):
        yield from group
    yield from random_cases(40, 3)
    # Every class beside every other, three deep: a letter, digits, punctuation, an apostrophe, and white space of each kind.
    for t in itertools.product(("a", "1", "!", "'", " ", "\n", "\t", "\u00a0"), repeat=3):
        yield "x" + "".join(t) + "s"
    rnd = random.Random(5)
    parts = ["a", "S", "é", "漢", "1", "½", "٣", "!", "'", "'s", "'LL", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u180e", "\u0085", "\u0301", "😀", "\x00", "\x1c"]
    for _ in range(150):
        yield "".join(rnd.choice(parts) for _ in range(rnd.randint(4, 24)))
    # Case, marks, symbols, line ends after a slash, and what DeepSeek calls a letter or Chinese.
    parts += ["B", "Ab", "aB", "BA's", "\u01c5", "\u02b0", "\u00aa", "\u0301", "\u093f", "\u0903", "\u30c4", "\u30fc", "\u3001", "\u3002", "\uff01", "\uff21",
              "\u2019", "\ud55c", "\u0915", "\u0e01", "\u10d0", "\u13a0", "\uab70", "\U00010400", "/", "/\n", "$", "+", "<", "_", "\u00a3", "\u20ac", "\u2026",
              "\u2160", "\u00b2", "12345", "[", "`", "'Re", "'D", "\u200b", "\u01bb", "\u2c7c", "\u0294"]
    for _ in range(450):
        yield "".join(rnd.choice(parts) for _ in range(rnd.randint(4, 24)))
    for a, b in itertools.product(parts, repeat=2):
        if len(a) + len(b) <= 3 and rnd.random() < 0.1:
            yield a + b


def lengths(pre, text):
    return [len(text[a:b].encode()) for _, (a, b) in pre.pre_tokenize_str(text)] if text else []


def young(text):
    """Has characters that Unicode 14 (which this Python must know) does not: they may be letters by now."""
    assert unicodedata.unidata_version == "14.0.0"
    return any(unicodedata.category(c) == "Cn" and not 0xFDD0 <= ord(c) <= 0xFDEF and ord(c) & 0xFFFE != 0xFFFE for c in text)


def record(text):
    words = [lengths(pre, text) for pre in PRE.values()]
    assert all(sum(w) == len(text.encode()) for w in words), text
    different = [w for i, w in enumerate(words) if w not in words[:i]]
    return {"text": text, "words": different, "of": "".join(str(different.index(w)) for w in words)}


with open(sys.argv[1], "w", encoding="utf-8", newline="\n") as f:
    for rec in ({"pre": list(PRE)}, *map(record, dict.fromkeys(t for t in texts() if not young(t)))):
        f.write(json.dumps(rec, separators=(",", ":")) + "\n")
