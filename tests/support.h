/* What the tests share: paths, files, .npy arrays, JSON lines, random numbers. Failures end the test program with a message. */
#ifndef RETRIEVALD_TESTS_SUPPORT_H
#define RETRIEVALD_TESTS_SUPPORT_H

#include <cjson/cJSON.h>
#include <check.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* Path below tests/ (static buffer, 4 at a time). */
const char *t_path(const char *relative);

/* The SmolLM2 GGUF, from $RETRIEVALD_SMOLLM2; NULL when it is not set (the test then prints that it is skipped, and why). */
const char *t_smollm2(void);
/* The GGUF of "qwen05", "gemma3" or "smollm2", from $RETRIEVALD_QWEN05 and so on; NULL when it is not set, having printed SKIP and why. */
const char *t_model(const char *name);

char *t_read(const char *path, size_t *ret_n);          /* NUL-terminated; free it */
/* All lines of a .jsonl file as one cJSON array; cJSON_Delete it. */
cJSON *t_jsonl(const char *path);

typedef struct {
    char descr[8];      /* "<f4", "<f2", "<i4" */
    size_t dims[4];
    int n_dims;
    void *data;
    size_t bytes;
} t_npy;
t_npy t_npy_load(const char *path);
void t_npy_free(t_npy *a);

/* Deterministic random numbers (xoshiro or like). */
typedef struct { uint64_t s[4]; } t_rng;
t_rng t_seed(uint64_t seed);
uint64_t t_u64(t_rng *r);
double t_uniform(t_rng *r);      /* [0, 1) */
float t_normal(t_rng *r);

/* Runs a Check suite and returns main's exit status; prints one line with the counts. No forking (sanitizers, gdb). */
int t_run(Suite *s);

/* Milliseconds of CPU time that a thread or the process has had. */
static inline double t_cpu_ms(clockid_t of)
{
    struct timespec t;
    clock_gettime(of, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

#endif
