/* Choosing the kernel table. __builtin_cpu_supports also looks at what the operating system saves (XCR0). */
#include "kernels.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

static eng_kernels tables[3]; /* scalar, avx2, avx512 */
static bool present[3];
static pthread_once_t once = PTHREAD_ONCE_INIT;

#if defined(__x86_64__)
/* Not every compiler's __builtin_cpu_supports knows this name. It needs no more of the system than AVX does. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static void fill(void)
{
    eng_kernels_scalar(&tables[0]);
    present[0] = true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    present[1] = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (present[1]) {
        tables[1] = tables[0];
        eng_kernels_avx2(&tables[1]);
    }
    present[2] = present[1] && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    if (present[2]) {
        tables[2] = tables[1];
        eng_kernels_avx512(&tables[2], __builtin_cpu_supports("avx512bf16"));
    }
#endif
}

int eng_kernels_get(eng_cpu want, const eng_kernels **ret, char *err, size_t errlen)
{
    static const char *const needs[] = {"", "avx2 needs a CPU and system with AVX2, FMA and F16C",
                                        "avx512 needs a CPU and system with AVX-512 F, BW, DQ, VL and VNNI"};
    pthread_once(&once, fill);
    if (want == ENG_CPU_AUTO) {
        int level = present[2] ? 2 : present[1] ? 1 : 0;
        *ret = &tables[level];
        return 0;
    }
    unsigned level = (unsigned)want - ENG_CPU_SCALAR;
    if (level > 2 || !present[level]) {
        snprintf(err, errlen, "%s", level > 2 ? "no such kernel level" : needs[level]);
        return -ENOTSUP;
    }
    *ret = &tables[level];
    return 0;
}
