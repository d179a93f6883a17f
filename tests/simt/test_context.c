/* cuda/context.cu on the emulated device: opening, memory, order, and how errors stick. */
#include "emu.h"
#include "gpu.h"
#include "support.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

static emu_options options;
static char err[256];
static gpu_context *g;

static void set_up(void)
{
    options = emu_defaults();
    options.order = EMU_LATE;
    emu_reset(&options);
    err[0] = 0;
}

static void open_well(void)
{
    ck_assert_msg(gpu_open(0, &g, err, sizeof err) == 0, "%s", err);
}

static void no_device(int index, const char *reason)
{
    emu_reset(&options);
    gpu_context *untouched = (gpu_context *)&options, *ret = untouched;
    ck_assert_int_eq(gpu_open(index, &ret, err, sizeof err), -ENODEV);
    ck_assert_ptr_eq(ret, untouched);
    ck_assert_str_eq(err, reason);
    emu_counts c = emu_counted();
    ck_assert_uint_eq(c.streams + c.events + c.device_bytes, 0);
}

START_TEST(devices_that_cannot_be_opened)
{
    no_device(1, "device 1: there are 1");
    no_device(-1, "device -1: there are 1");
    options.major = 7, options.minor = 0;
    no_device(0, "device 0, emulated GPU: compute capability 7.0, and 7.5 is the least that is supported");
    options.n_devices = 0;
    no_device(0, "device 0: no CUDA-capable device is detected");
    options.driver = 12040;
    no_device(0, "device 0: the driver knows CUDA 12.4, and this program needs 13.0");
    options.driver = 0;
    no_device(0, "device 0: there is no NVIDIA driver");
}
END_TEST

START_TEST(a_device_is_told)
{
    options.major = 7, options.minor = 5, options.memory = 100 << 20;
    emu_reset(&options);
    open_well();
    gpu_info info;
    void *p;
    ck_assert_int_eq(gpu_alloc(g, 30 << 20, &p), 0);
    ck_assert_int_eq(gpu_info_get(g, &info), 0);
    ck_assert_str_eq(info.name, "emulated GPU");
    ck_assert_uint_eq(info.major * 10 + info.minor, 75);
    ck_assert_uint_eq(info.total, 100 << 20);
    ck_assert_uint_eq(info.free, 70 << 20);
    ck_assert_int_eq(gpu_status(g), 0);
    ck_assert_str_eq(gpu_reason(g), "");
    gpu_free(g, p);
    gpu_close(g);
}
END_TEST

START_TEST(no_memory_does_not_stick)
{
    options.memory = options.pinned = 1 << 20;
    emu_reset(&options);
    open_well();
    void *p = err, *q = err;
    ck_assert_int_eq(gpu_alloc(g, (1 << 20) + 1, &p), -ENOMEM);
    ck_assert_int_eq(gpu_pin(g, (1 << 20) + 1, &q), -ENOMEM);
    ck_assert_ptr_eq(p, err);
    ck_assert_ptr_eq(q, err);
    ck_assert_int_eq(gpu_status(g), 0);
    ck_assert_int_eq(gpu_alloc(g, 1 << 20, &p), 0);
    ck_assert_int_eq(gpu_pin(g, 1 << 20, &q), 0);
    ck_assert_int_eq(gpu_zero(g, GPU_COMPUTE, p, 1 << 20), 0);
    ck_assert_int_eq(gpu_drain(g), 0);
    ck_assert_int_eq(gpu_reserve(g, 4096, 1 << 20, 16), -ENOMEM);
    gpu_free(g, p);
    gpu_unpin(g, q);
    gpu_close(g);
    ck_assert_uint_eq(emu_counted().device_bytes, 0);
    ck_assert_uint_eq(emu_counted().pinned_bytes, 0);
    ck_assert_uint_eq(emu_counted().streams, 0);
}
END_TEST

/* Something goes in by one queue, is copied by another, and comes out by the third: in each order of work. */
START_TEST(events_order_queues)
{
    enum { N = 1000 };
    for (int order = 0; order < 3 * 16; order++) {
        options.order = (emu_order)(order % 3);
        options.seed = (uint64_t)order;
        emu_reset(&options);
        open_well();
        void *a, *b, *in, *out;
        gpu_event *arrived, *moved, *left;
        ck_assert_int_eq(gpu_alloc(g, N, &a) | gpu_alloc(g, N, &b) | gpu_pin(g, N, &in) | gpu_pin(g, N, &out), 0);
        ck_assert_int_eq(gpu_event_new(g, false, &arrived) | gpu_event_new(g, false, &moved) | gpu_event_new(g, false, &left), 0);
        memset(in, 7, N);
        memset(out, 1, N);
        gpu_copy(g, GPU_TO_DEVICE, a, in, N);
        gpu_record(g, arrived, GPU_TO_DEVICE);
        gpu_wait(g, GPU_COMPUTE, arrived);
        gpu_copy(g, GPU_COMPUTE, b, a, N);
        gpu_record(g, moved, GPU_COMPUTE);
        gpu_wait(g, GPU_TO_HOST, moved);
        gpu_copy(g, GPU_TO_HOST, out, b, N);
        gpu_record(g, left, GPU_TO_HOST);
        if (options.order == EMU_LATE)
            ck_assert_int_eq(*(char *)out, 1);
        ck_assert_int_eq(gpu_finish(g, left), 0);
        ck_assert_mem_eq(out, in, N);

        memset(err, 9, 100); /* what is uploaded may go at once */
        ck_assert_int_eq(gpu_upload(g, a, err, 100), 0);
        memset(err, 8, 100);
        gpu_copy(g, GPU_TO_HOST, out, a, 100);
        gpu_zero(g, GPU_TO_HOST, a, 100);
        gpu_copy(g, GPU_TO_HOST, (char *)out + 100, a, 100);
        ck_assert_int_eq(gpu_drain(g), 0);
        for (int i = 0; i < 200; i++)
            ck_assert_int_eq(((char *)out)[i], i < 100 ? 9 : 0);
        ck_assert_uint_eq(emu_counted().pending, 0);
        ck_assert_uint_eq(emu_counted().syncs_device, 0);

        gpu_event_free(g, arrived), gpu_event_free(g, moved), gpu_event_free(g, left), gpu_event_free(g, NULL);
        gpu_free(g, a), gpu_free(g, b), gpu_free(g, NULL), gpu_unpin(g, in), gpu_unpin(g, out), gpu_unpin(g, NULL);
        gpu_close(g);
        ck_assert_uint_eq(emu_counted().streams + emu_counted().events + emu_counted().device_bytes + emu_counted().pinned_bytes, 0);
    }
}
END_TEST

static void check_sticks(int r, void *device)
{
    ck_assert_int_eq(r, -EIO);
    ck_assert_int_eq(gpu_status(g), -EIO);
    char reason[256];
    snprintf(reason, sizeof reason, "%s", gpu_reason(g));
    ck_assert_ptr_nonnull(strstr(reason, "device 0, cuda"));
    ck_assert_ptr_nonnull(strstr(reason, ": unspecified launch failure"));
    gpu_info info;
    void *p;
    uint64_t calls = emu_counted().calls;
    ck_assert_int_eq(gpu_alloc(g, 1, &p), -EIO);
    ck_assert_int_eq(gpu_info_get(g, &info), -EIO);
    ck_assert_int_eq(gpu_drain(g), -EIO);
    ck_assert_int_eq(gpu_zero(g, GPU_COMPUTE, device, 1), -EIO);
    ck_assert_uint_eq(emu_counted().calls, calls); /* nothing is called any more */
    ck_assert_str_eq(gpu_reason(g), reason);
}

/* Lost at each call in turn: opening tells, or what is called then and all later calls do, by one reason; and closing gives all back. */
START_TEST(a_lost_device_is_told_and_sticks)
{
    int lost_open = 0, lost_later = 0;
    bool done = false;
    for (long n = 0; !done; n++) {
        options.lose_after = n;
        emu_reset(&options);
        int r = gpu_open(0, &g, err, sizeof err);
        if (r < 0) {
            ck_assert_int_eq(r, n == 0 ? -ENODEV : -EIO);
            ck_assert_msg(strstr(err, ": unspecified launch failure") || strstr(err, "cublasCreate: initialization error"), "%s", err);
            lost_open++;
            continue;
        }
        void *a = NULL, *pinned = NULL;
        gpu_event *e = NULL;
        r = gpu_alloc(g, 100, &a);
        if (r == 0)
            r = gpu_pin(g, 100, &pinned);
        if (r == 0)
            r = gpu_event_new(g, false, &e);
        for (int i = 0; i < 5 && r == 0; i++) {
            memset(pinned, i, 100);
            gpu_copy(g, GPU_COMPUTE, a, pinned, 100);
            gpu_copy(g, GPU_COMPUTE, pinned, a, 100);
            gpu_record(g, e, GPU_COMPUTE);
            r = gpu_finish(g, e);
        }
        if (r == 0)
            done = true;
        else
            check_sticks(r, a);
        gpu_event_free(g, e);
        gpu_free(g, a);
        gpu_unpin(g, pinned);
        gpu_close(g);
        ck_assert_uint_eq(emu_counted().device_bytes + emu_counted().pinned_bytes, 0);
        lost_later += !done;
    }
    ck_assert_int_gt(lost_open, 3);
    ck_assert_int_gt(lost_later, 15);
}
END_TEST

int main(void)
{
    Suite *s = suite_create("context");
    TCase *t = tcase_create("context");
    tcase_add_checked_fixture(t, set_up, NULL);
    tcase_add_test(t, devices_that_cannot_be_opened);
    tcase_add_test(t, a_device_is_told);
    tcase_add_test(t, no_memory_does_not_stick);
    tcase_add_test(t, events_order_queues);
    tcase_add_test(t, a_lost_device_is_told_and_sticks);
    suite_add_tcase(s, t);
    return t_run(s);
}
