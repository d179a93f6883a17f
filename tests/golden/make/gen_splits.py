#!/usr/bin/env python3
"""gen_splits.py OUT.jsonl: how the published pre-tokenizers cut texts into words, by HF tokenizers (pip install tokenizers).

A line: {"text", "gpt-2", "smollm", "llama-bpe", "qwen2"}: the words' lengths in UTF-8 bytes. The texts are those of tokenizer_cases.py but
the long ones, and ones made to stress white space, digits and contractions. Left out on purpose: characters that are younger than
Unicode 14, about whose class libraries differ, and U+017F after an apostrophe (llama.cpp's contractions are ASCII, HF's fold case).
"""
import itertools
import json
import random
import sys
from tokenizers import Regex, pre_tokenizers
from tokenizer_cases import CODE, CONTRACTIONS, DIGITS, EMOJI, INVISIBLE, LATIN, ODD, PROSE, SCRIPTS, SPACE, SPECIAL, random_cases

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TIKTOKEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def split(expression):
    return pre_tokenizers.Split(Regex(expression), "isolated")


PRE = {
    "gpt-2": split(GPT2),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split(GPT2)]),
    "llama-bpe": split(TIKTOKEN.replace("DIGITS", r"\p{N}{1,3}")),
    "qwen2": split(TIKTOKEN.replace("DIGITS", r"\p{N}")),
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


def lengths(pre, text):
    return [len(text[a:b].encode()) for _, (a, b) in pre.pre_tokenize_str(text)] if text else []


with open(sys.argv[1], "w", encoding="utf-8", newline="\n") as f:
    for text in dict.fromkeys(texts()):
        rec = {"text": text} | {name: lengths(pre, text) for name, pre in PRE.items()}
        assert all(sum(rec[n]) == len(text.encode()) for n in PRE), text
        f.write(json.dumps(rec, separators=(",", ":")) + "\n")
