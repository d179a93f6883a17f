/* libFuzzer's entry: the bytes are a model file. It is loaded as the engine loads it, straight from the fuzzer's memory, so that a read
 * past its end is seen; if it is accepted, text goes through its tokenizer, and the engine opens it as a file and computes some tokens.
 *
 *   CC=clang meson setup build-fuzz -Db_sanitize=address,undefined -Db_lundef=false -Dc_args=-fsanitize=fuzzer-no-link
 *   ninja -C build-fuzz tests/fuzz_model && build-fuzz/tests/fuzz_model FOLDER tests/fuzz/corpus tests/golden/gguf/hostile
 */
#include "engine.h"
#include "model.h"
#include "tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(bool good, const char *what)
{
    if (good)
        return;
    fprintf(stderr, "fuzz_model: %s\n", what);
    abort();
}

/* Ids are in range and have texts, whatever the file says of its vocabulary. */
static void use_tokenizer(const eng_tokenizer *t, const uint8_t *data, size_t size, uint32_t n_vocab)
{
    const char *text = (const char *)data + (size > 64 ? size - 64 : 0), *piece;
    int32_t *ids;
    size_t n, len, from_vocab = size < 64 ? size : 64;
    if (eng_tokenizer_encode(t, text, from_vocab, ENG_TOK_ADD_SPECIAL | ENG_TOK_PARSE_SPECIAL, NULL, &ids, &n))
        return;
    for (size_t i = 0; i < n; i++) {
        check(ids[i] >= 0 && (uint32_t)ids[i] < n_vocab, "an id out of range");
        check(!eng_tokenizer_text(t, ids[i], true, &piece, &len), "an id without text");
    }
    free(ids);
}

static void compute(eng_engine *e)
{
    char err[256];
    eng_session *s;
    eng_token token;
    uint32_t n_vocab = eng_info_get(e)->n_vocab;
    int32_t ids[] = {0, (int32_t)(n_vocab - 1), (int32_t)(n_vocab / 2)};
    eng_request r = {.ids = ids, .n_ids = 3, .max_tokens = 2, .attention = eng_attention_default(), .sampling = eng_sampling_default()};
    if (eng_session_open(e, &r, &s, err, sizeof err))
        return;
    if (!eng_session_prefill(s, NULL, NULL))
        while (!eng_session_next(s, &token))
            check(token.id >= 0 && (uint32_t)token.id < n_vocab, "a token out of range");
    eng_session_close(s);
}

static void use_engine(const uint8_t *data, size_t size)
{
    char path[64], err[512];
    eng_engine *e;
    eng_params p = eng_params_default();
    p.n_ctx = 8;
    p.n_chunk = 2;
    p.n_threads = 1;
    p.cache_ram = 0;
    int fd = memfd_create("fuzz.gguf", MFD_CLOEXEC);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        goto cleanup;
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (!eng_open(path, &p, &e, err, sizeof err)) {
        compute(e);
        eng_close(e);
    }
cleanup:
    if (fd >= 0)
        close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char err[512] = "";
    eng_gguf *g;
    eng_model *m = NULL;
    eng_tokenizer *t = NULL;
    int rc = eng_gguf_open_memory(data, size, &g, err, sizeof err);
    if (!rc)
        rc = eng_model_from(g, "fuzz.gguf", &m, err, sizeof err);
    if (!rc)
        rc = eng_tokenizer_new(m->file, m->n_vocab, &t, err, sizeof err);
    check(!rc || err[0], "refused without a word");
    if (!rc)
        use_tokenizer(t, data, size, m->n_vocab);
    eng_tokenizer_free(t);
    eng_model_close(m);
    if (!rc)
        use_engine(data, size);
    return 0;
}
