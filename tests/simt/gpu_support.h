/* What tests of cuda/ share: they go through gpu.h alone, so that the same program is made for the emulated device and for a real one. */
#ifndef RETRIEVALD_GPU_SUPPORT_H
#define RETRIEVALD_GPU_SUPPORT_H

#include "gpu.h"
#include "kernel/kernel_support.h"

static gpu_context *t_gpu;

static inline void t_ok(int r)
{
    ck_assert_msg(r == 0, "%d: %s", r, gpu_reason(t_gpu));
}

/* Device memory until t_device_reset. What kernels read has its own size, so that the emulation sees reads past its end; what they write lies between guards. */
enum { T_GUARD = 256, T_GUARD_BYTE = 0xa5, T_DEVICE_MAX = 256 };
static void *t_device[T_DEVICE_MAX];
static int t_n_device;

static inline char *t_device_new(size_t bytes)
{
    void *p;
    ck_assert_int_lt(t_n_device, T_DEVICE_MAX);
    t_ok(gpu_alloc(t_gpu, bytes, &p));
    t_device[t_n_device++] = p;
    return p;
}

static inline void t_device_reset(void)
{
    t_ok(gpu_drain(t_gpu));
    while (t_n_device)
        gpu_free(t_gpu, t_device[--t_n_device]);
    t_arena_reset();
}

static inline void *t_in(const void *data, size_t bytes)
{
    char *p = t_device_new(bytes);
    t_ok(gpu_upload(t_gpu, p, data, bytes));
    return p;
}

/* Holds `bytes` of data, NULL: of garbage that is NaN. */
static inline void *t_out(const void *data, size_t bytes)
{
    char *p = t_device_new(bytes + 2 * T_GUARD), *all = malloc(bytes + 2 * T_GUARD);
    memset(all, T_GUARD_BYTE, bytes + 2 * T_GUARD);
    if (data)
        memcpy(all + T_GUARD, data, bytes);
    else
        memset(all + T_GUARD, 0xff, bytes);
    t_ok(gpu_upload(t_gpu, p, all, bytes + 2 * T_GUARD));
    free(all);
    return p + T_GUARD;
}

/* What is there when all is done; kept until t_device_reset. Nothing was written beside it. */
static inline void *t_got(const void *out, size_t bytes)
{
    size_t all = bytes + 2 * T_GUARD;
    void *pinned, *r = t_alloc(bytes);
    t_ok(gpu_pin(t_gpu, all, &pinned));
    t_ok(gpu_copy(t_gpu, GPU_COMPUTE, pinned, (const char *)out - T_GUARD, all));
    t_ok(gpu_drain(t_gpu));
    for (size_t i = 0; i < T_GUARD; i++) {
        ck_assert_uint_eq(((uint8_t *)pinned)[i], T_GUARD_BYTE);
        ck_assert_uint_eq(((uint8_t *)pinned)[T_GUARD + bytes + i], T_GUARD_BYTE);
    }
    memcpy(r, (char *)pinned + T_GUARD, bytes);
    gpu_unpin(t_gpu, pinned);
    return r;
}

/* Bit for bit, but one NaN is as good as another. */
static inline void t_same_floats(const char *what, const float *got, const float *want, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (isnan(want[i]) ? !isnan(got[i]) : memcmp(got + i, want + i, 4))
            ck_abort_msg("%s, element %zu of %zu: got %a, want %a", what, i, n, (double)got[i], (double)want[i]);
}

/* Opens the device and runs the suite; main's exit status. 77 where there is no device, having said why. */
static inline int t_gpu_run(Suite *s)
{
    char err[300];
    if (gpu_open(0, &t_gpu, err, sizeof err) < 0) {
        printf("SKIP: %s\n", err);
        return 77;
    }
    gpu_info info = {0};
    gpu_info_get(t_gpu, &info);
    printf("on %s\n", info.name);
    int r = t_run(s);
    gpu_close(t_gpu);
    return r;
}

#endif
