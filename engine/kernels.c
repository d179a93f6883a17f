/* Choosing the kernel table. __builtin_cpu_supports also looks at what the operating system saves (XCR0). */
#include "kernels.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { SCALAR, AVX2, AVX512, AMX, LEVELS };

static eng_kernels tables[LEVELS];
static bool present[LEVELS];
static char amx_reason[160] = "amx needs a CPU with AMX (TILE, BF16) and AVX-512 BF16";
static pthread_once_t once = PTHREAD_ONCE_INIT;

#if defined(__x86_64__)
/* Not every compiler's __builtin_cpu_supports knows this name. It needs no more of the system than AVX does. */
static bool has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

/* AMX, and Linux's leave to use it: tiles make a thread's saved state 8 KiB larger, so a process asks once, for all of its threads. Linux
 * before 5.16 knows no such question. */
static bool has_amx(void)
{
    enum { TILE = 1 << 24, BF16 = 1 << 22, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (TILE | BF16)) != (TILE | BF16))
        return false;
    if (!syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA))
        return true;
    snprintf(amx_reason, sizeof amx_reason, "amx: this CPU has it, but the system does not let a process use it (arch_prctl: %s); "
             "it takes Linux 5.16", strerror(errno));
    return false;
}
#endif

static void fill(void)
{
    eng_kernels_scalar(&tables[SCALAR]);
    present[SCALAR] = true;
#if defined(__x86_64__)
    __builtin_cpu_init();
    present[AVX2] = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (present[AVX2]) {
        tables[AVX2] = tables[SCALAR];
        eng_kernels_avx2(&tables[AVX2]);
    }
    present[AVX512] = present[AVX2] && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
    bool bf16 = present[AVX512] && __builtin_cpu_supports("avx512bf16");
    if (present[AVX512]) {
        /* Intel's cores (measured on one with AMX) run one VDPBF16PS, 64 operations, in the time of four float32 products of 32 each. */
        tables[AVX512] = tables[AVX2];
        eng_kernels_avx512(&tables[AVX512], bf16 && !__builtin_cpu_is("intel"));
        if (__builtin_cpu_supports("avx512vbmi") && !__builtin_cpu_is("intel")) /* three operations a permutation there, one on AMD's */
            eng_kernels_vbmi(&tables[AVX512]);
    }
    present[AMX] = bf16 && has_amx();
    if (present[AMX]) {
        tables[AMX] = tables[AVX2];
        eng_kernels_avx512(&tables[AMX], true);
        eng_kernels_amx(&tables[AMX]);
    }
#endif
}

int eng_kernels_get(eng_cpu want, const eng_kernels **ret, char *err, size_t errlen)
{
    static const char *const needs[] = {"", "avx2 needs a CPU and system with AVX2, FMA and F16C",
                                        "avx512 needs a CPU and system with AVX-512 F, BW, DQ, VL and VNNI", amx_reason};
    pthread_once(&once, fill);
    unsigned level = (unsigned)want - ENG_CPU_SCALAR;
    if (want == ENG_CPU_AUTO)
        for (level = LEVELS - 1; !present[level];)
            level--;
    if (level >= LEVELS || !present[level]) {
        snprintf(err, errlen, "%s", level >= LEVELS ? "no such kernel level" : needs[level]);
        return -ENOTSUP;
    }
    *ret = &tables[level];
    return 0;
}
