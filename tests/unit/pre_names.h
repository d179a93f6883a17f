/* One pre-tokenizer name of each expression, as golden/tokenizer/splits.jsonl has them. */
#ifndef RETRIEVALD_TESTS_PRE_NAMES_H
#define RETRIEVALD_TESTS_PRE_NAMES_H

static const char *const pres[] = {"gpt-2",  "smollm", "llama-bpe",    "qwen2",          "qwen35",
                                   "tekken", "gpt-4o", "deepseek-llm", "deepseek-coder", "deepseek-v3"};
enum { N_PRES = sizeof pres / sizeof *pres };

#endif
