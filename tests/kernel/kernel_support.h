/* What the kernel tests share: the levels of this machine, memory that faults one byte after its end, random rows of every type. */
#ifndef RETRIEVALD_KERNEL_SUPPORT_H
#define RETRIEVALD_KERNEL_SUPPORT_H

#include "kernels.h"
#include "support.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define EPS 0x1p-24 /* half an ulp of float32: the relative error of one rounding */

/* Tables of the tests: what AVX-512 machines without BF16, with it, and with VBMI may get. */
enum { T_AVX512_NO_BF16 = ENG_CPU_AMX + 1, T_AVX512_BF16, T_AVX512_VBMI };

/* Loops over the kernel levels this machine has. */
#define FOR_LEVELS(k)                                                                                                                      \
    for (int level_ = ENG_CPU_SCALAR; level_ <= T_AVX512_VBMI; level_++)                                                                   \
        for (const eng_kernels *k = t_level(level_); k; k = NULL)

static inline const eng_kernels *t_level(int level)
{
    const eng_kernels *k;
    char err[200];
    if (eng_kernels_get(level > ENG_CPU_AMX ? ENG_CPU_AVX512 : (eng_cpu)level, &k, err, sizeof err))
        return NULL;
#if defined(__x86_64__)
    static eng_kernels tables[3];
    if ((level == T_AVX512_BF16 && !__builtin_cpu_supports("avx512bf16")) || (level == T_AVX512_VBMI && !__builtin_cpu_supports("avx512vbmi")))
        return NULL;
    if (level > ENG_CPU_AMX) {
        eng_kernels *table = &tables[level - T_AVX512_NO_BF16];
        eng_kernels_scalar(table);
        eng_kernels_avx2(table);
        eng_kernels_avx512(table, level == T_AVX512_BF16);
        if (level == T_AVX512_VBMI)
            eng_kernels_vbmi(table);
        return table;
    }
#endif
    return k;
}

static inline void t_skip_lines(void)
{
    static const char *const names[] = {[ENG_CPU_SCALAR] = "scalar", [ENG_CPU_AVX2] = "avx2", [ENG_CPU_AVX512] = "avx512", [ENG_CPU_AMX] = "amx"};
    const eng_kernels *k;
    char err[200];
    for (int l = ENG_CPU_SCALAR; l <= ENG_CPU_AMX; l++)
        if (eng_kernels_get((eng_cpu)l, &k, err, sizeof err))
            printf("SKIP level %s: %s\n", names[l], err);
    if (!t_level(T_AVX512_BF16))
        printf("SKIP AVX-512's gemm_bf16: this machine has no AVX-512 BF16\n");
    if (!t_level(T_AVX512_VBMI))
        printf("SKIP AVX-512's products with VBMI: this machine has none\n");
}

/* `bytes` that end where an unreadable page begins: a kernel that reads or writes past a buffer dies. Never aligned better than its size
 * makes it. Freed with all others by t_arena_reset. */
enum { T_MAPS = 4096 };
static struct {
    void *base;
    size_t bytes;
} t_maps[T_MAPS];
static int t_n_maps;

static inline void *t_alloc(size_t bytes)
{
    size_t page = 4096, body = (bytes + page - 1) / page * page;
    char *p = mmap(NULL, body + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || t_n_maps == T_MAPS || mprotect(p + body, page, PROT_NONE)) {
        fprintf(stderr, "t_alloc: no memory\n");
        exit(99);
    }
    t_maps[t_n_maps].base = p;
    t_maps[t_n_maps++].bytes = body + page;
    return p + body - bytes;
}

static inline void t_arena_reset(void)
{
    while (t_n_maps) {
        t_n_maps--;
        munmap(t_maps[t_n_maps].base, t_maps[t_n_maps].bytes);
    }
}

static inline float *t_floats(size_t n)
{
    return t_alloc(n * sizeof(float));
}

static inline float *t_randoms(t_rng *rng, size_t n)
{
    float *x = t_floats(n);
    for (size_t i = 0; i < n; i++)
        x[i] = t_normal(rng);
    return x;
}

static inline size_t t_row_bytes(eng_type t, size_t n)
{
    return n / eng_types[t].block * eng_types[t].bytes;
}

/* An f16 of ordinary size, now and then 0, a denormal or the largest. */
static inline uint16_t t_f16(t_rng *rng)
{
    switch (t_u64(rng) % 16) {
    case 0:
        return 0;
    case 1:
        return (uint16_t)(t_u64(rng) & 0x3ff);
    case 2:
        return 0x7bff;
    case 3:
        return 0xfbff;
    default:
        return eng_f32_to_f16(t_normal(rng));
    }
}

/* Where a block keeps its f16 scale and minimum; -1: it has none. */
static inline int t_scale_at(eng_type t)
{
    return t == ENG_Q2_K ? 80 : t == ENG_Q3_K ? 108 : t == ENG_Q6_K ? 208 : 0;
}

static inline int t_min_at(eng_type t)
{
    return t == ENG_Q2_K ? 82 : t == ENG_Q4_1 || t == ENG_Q5_1 || t == ENG_Q4_K || t == ENG_Q5_K ? 2 : -1;
}

/* rows x n random weights, `row_bytes` apart. Codes and inner scales are uniform bytes: -128 and both ends of a nibble occur. */
static inline void *t_weights(t_rng *rng, eng_type t, size_t rows, size_t n, size_t row_bytes)
{
    char *w = t_alloc(rows * row_bytes);
    for (size_t i = 0; i < rows * row_bytes; i++)
        w[i] = (char)t_u64(rng);
    for (size_t r = 0; r < rows; r++)
        for (size_t b = 0; b < n / eng_types[t].block; b++) {
            char *p = w + r * row_bytes + b * eng_types[t].bytes;
            float f = t_normal(rng);
            uint16_t h = t == ENG_BF16 ? eng_f32_to_bf16(f) : t_f16(rng), m = t_f16(rng);
            if (t == ENG_F32)
                memcpy(p, &f, 4);
            else
                memcpy(p + t_scale_at(t), &h, 2);
            if (t_min_at(t) >= 0)
                memcpy(p + t_min_at(t), &m, 2);
        }
    return w;
}

static inline void t_near(const char *what, const char *level, double got, double want, double bound)
{
    if (!(fabs(got - want) <= bound)) /* NaN fails */
        ck_abort_msg("%s, %s: got %.9g, want %.9g, off by %.3g, allowed %.3g", what, level, got, want, fabs(got - want), bound);
}

static inline void t_same(const char *what, const char *level, const void *a, const void *b, size_t bytes)
{
    if (bytes && memcmp(a, b, bytes))
        ck_abort_msg("%s, %s: bits differ", what, level);
}

#endif
