/* The emulated runtime itself: when work is done, what copies do, what calls with mistakes give. */
#include "cublas_v2.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "emu.h"

extern "C" {
#include "support.h"
}

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 64 };
static cudaStream_t a, b;
static cudaEvent_t event, second;
static int *device, *other, *pinned; /* N each */

static void set_up_as(emu_order order, uint64_t seed)
{
    emu_options o = emu_defaults();
    o.catch_faults = true;
    o.order = order;
    o.seed = seed;
    emu_reset(&o);
    cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaEventCreateWithFlags(&second, cudaEventDisableTiming);
    cudaMalloc(&device, N * sizeof *device);
    cudaMalloc(&other, N * sizeof *other);
    cudaHostAlloc((void **)&pinned, N * sizeof *pinned, 0);
    ck_assert_int_eq(cudaGetLastError(), cudaSuccess);
    memset(pinned, 0, N * sizeof *pinned);
}

static void set_up()
{
    set_up_as(EMU_LATE, 0);
}

static __global__ void fill(int *p, int v)
{
    p[threadIdx.x] = v;
}

static __global__ void add(int *to, const int *p, int v)
{
    to[threadIdx.x] = p[threadIdx.x] + v;
}

#define ON(stream, kernel, ...) simt_launch(#kernel, kernel, 1, N, 0, stream, __VA_ARGS__)

static int read_back(const int *p)
{
    int v[N];
    cudaMemcpyAsync(v, p, sizeof v, cudaMemcpyDefault, a); /* pageable: done when it returns */
    return v[N - 1];
}

/* ---- when ---------------------------------------------------------------------------------------------------------------------- */

START_TEST(nothing_is_done_before_it_is_waited_for)
{
    ON(a, fill, device, 1);
    cudaMemcpyAsync(pinned, device, N * sizeof *pinned, cudaMemcpyDefault, a);
    ck_assert_int_eq(pinned[0], 0);
    cudaStreamSynchronize(b);
    ck_assert_int_eq(pinned[0], 0);
    ck_assert_uint_eq(emu_counted().pending, 2);
    cudaStreamSynchronize(a);
    ck_assert_int_eq(pinned[0], 1);
    ck_assert_uint_eq(emu_counted().pending, 0);
}
END_TEST

START_TEST(an_event_is_waited_for_with_what_comes_before)
{
    ON(a, fill, device, 1);
    cudaEventRecord(event, a);
    ON(a, fill, other, 2); /* behind the event */
    cudaStreamWaitEvent(b, event);
    cudaMemcpyAsync(pinned, device, N * sizeof *pinned, cudaMemcpyDefault, b);
    cudaEventRecord(second, b);
    ON(b, fill, device, 3);
    cudaEventSynchronize(second);
    ck_assert_int_eq(pinned[0], 1);
    ck_assert_uint_eq(emu_counted().pending, 2);
}
END_TEST

/* Recording again is another event for those that wait later; who waited before waits for the first. */
START_TEST(a_wait_is_for_what_the_event_was_then)
{
    ON(a, fill, device, 1);
    cudaEventRecord(event, a);
    cudaStreamWaitEvent(b, event);
    ON(a, fill, device, 2);
    cudaEventRecord(event, a);
    cudaMemcpyAsync(pinned, device, N * sizeof *pinned, cudaMemcpyDefault, b);
    cudaStreamSynchronize(b);
    ck_assert_int_eq(pinned[0], 1);
    cudaStreamWaitEvent(b, second); /* never recorded: nothing */
    ck_assert_int_eq(cudaEventQuery(second), cudaSuccess);
    ck_assert_int_eq(cudaEventQuery(event), cudaErrorNotReady);
    ck_assert_int_eq(cudaGetLastError(), cudaErrorNotReady);
    ck_assert_int_eq(cudaEventQuery(event), cudaSuccess);
    ck_assert_int_eq(cudaGetLastError(), cudaSuccess);
    ck_assert_int_eq(read_back(device), 2);
}
END_TEST

/* What a's work gives when b writes what a reads, and neither waits: 1 + 1 or 10 + 1, as it comes. */
static int unordered()
{
    ON(a, fill, device, 1);
    cudaStreamSynchronize(a);
    ON(b, fill, device, 10);
    ON(a, add, other, device, 1);
    cudaMemcpyAsync(pinned, other, N * sizeof *pinned, cudaMemcpyDefault, a);
    cudaStreamSynchronize(a);
    return pinned[0];
}

/* The same in order. */
static int ordered()
{
    ON(b, fill, device, 10);
    cudaEventRecord(event, b);
    cudaStreamWaitEvent(a, event);
    ON(a, add, other, device, 1);
    cudaMemcpyAsync(pinned, other, N * sizeof *pinned, cudaMemcpyDefault, a);
    cudaEventRecord(second, a);
    cudaStreamWaitEvent(b, second);
    ON(b, fill, other, 99);
    cudaEventSynchronize(second);
    return pinned[0];
}

START_TEST(a_missing_wait_shows)
{
    ck_assert_int_eq(unordered(), 2);
    set_up_as(EMU_EAGER, 0);
    ck_assert_int_eq(unordered(), 11);
    int early = 0;
    for (uint64_t seed = 0; seed < 32; seed++) {
        set_up_as(EMU_RANDOM, seed);
        early += unordered() == 11;
    }
    ck_assert_int_gt(early, 0);
    ck_assert_int_lt(early, 32);
    for (emu_order order : {EMU_LATE, EMU_EAGER, EMU_RANDOM})
        for (uint64_t seed = 0; seed < 32; seed++) {
            set_up_as(order, seed);
            ck_assert_int_eq(ordered(), 11);
        }
}
END_TEST

/* ---- copies -------------------------------------------------------------------------------------------------------------------- */

START_TEST(pageable_memory_is_staged_and_pinned_is_not)
{
    int pageable[N];
    for (int i = 0; i < N; i++)
        pageable[i] = pinned[i] = 5;
    cudaMemcpyAsync(device, pageable, sizeof pageable, cudaMemcpyHostToDevice, a);
    cudaMemcpyAsync(other, pinned, sizeof pageable, cudaMemcpyHostToDevice, a);
    for (int i = 0; i < N; i++)
        pageable[i] = pinned[i] = 6;
    ck_assert_int_eq(read_back(device), 5);
    ck_assert_int_eq(read_back(other), 6);
    emu_counts c = emu_counted();
    ck_assert_uint_eq(c.copies_in, 2);
    ck_assert_uint_eq(c.bytes_in, 2 * sizeof pageable);
    ck_assert_uint_eq(c.copies_out, 2);
    ck_assert_uint_eq(c.copies_waited, 3);
    ck_assert_uint_eq(c.syncs_device + c.syncs_stream + c.syncs_event, 0);
}
END_TEST

START_TEST(rows_of_a_copy)
{
    for (int i = 0; i < N; i++)
        pinned[i] = i;
    cudaMemsetAsync(device, 0, N * sizeof *device, a);
    cudaMemcpy2DAsync(device + 1, 8 * sizeof *device, pinned + 2, 16 * sizeof *pinned, 3 * sizeof *pinned, 4, cudaMemcpyDefault, a);
    cudaStreamSynchronize(a);
    int v[N];
    cudaMemcpyAsync(v, device, sizeof v, cudaMemcpyDeviceToHost, a);
    for (int i = 0; i < N; i++)
        ck_assert_int_eq(v[i], i < 32 && i % 8 >= 1 && i % 8 < 4 ? i / 8 * 16 + i % 8 + 1 : 0);
}
END_TEST

static void fails(const char *words)
{
    const char *fault = emu_fault();
    ck_assert_msg(strstr(fault, words) != nullptr, "'%s' does not tell of: %s", fault, words);
    set_up();
}

START_TEST(mistakes_are_told)
{
    int pageable[N];
    cudaMemcpyAsync(device + 1, pinned, N * sizeof *device, cudaMemcpyDefault, a);
    fails("a copy's destination: 256 bytes at ");
    cudaMemcpyAsync(device, pinned - 1, 4, cudaMemcpyDefault, a);
    fails("a copy's source: ");
    cudaMemcpyAsync(device, device, 4, cudaMemcpyHostToDevice, a);
    fails("a copy's kind is 1, its destination device and its source device memory");
    cudaMemcpyAsync(pageable, pinned, 4, cudaMemcpyDeviceToHost, a);
    fails("source host memory");
    cudaMemsetAsync(pageable, 0, 4, a);
    fails("which is the host's memory");
    ON(a, fill, device, 1);
    cudaStreamDestroy(a);
    fails("before its last 1 pieces of work were waited for");
    cudaStreamSynchronize(nullptr);
    fails("a stream that there is not");
    cudaFree(pinned);
    fails("cudaFree of ");
    cudaFree(device);
    cudaFree(device);
    fails("which it did not give");
    ON(a, fill, device, 1); /* and what it needs goes before it is done */
    cudaFree(device);
    cudaStreamSynchronize(a);
    fails("not allocated, or no more");
}
END_TEST

/* ---- the device ----------------------------------------------------------------------------------------------------------------- */

START_TEST(memory_ends)
{
    emu_options o = emu_defaults();
    o.memory = 1 << 20;
    o.pinned = 1 << 12;
    emu_reset(&o);
    void *p, *q;
    ck_assert_int_eq(cudaMalloc(&p, (1 << 20) + 1), cudaErrorMemoryAllocation);
    ck_assert_int_eq(cudaGetLastError(), cudaErrorMemoryAllocation);
    ck_assert_int_eq(cudaGetLastError(), cudaSuccess);
    ck_assert_int_eq(cudaMalloc(&p, 1 << 19), cudaSuccess);
    ck_assert_int_eq(cudaMalloc(&q, (1 << 19) + 1), cudaErrorMemoryAllocation);
    size_t free_bytes, total;
    cudaMemGetInfo(&free_bytes, &total);
    ck_assert_uint_eq(free_bytes, 1 << 19);
    ck_assert_uint_eq(total, 1 << 20);
    cudaFree(p);
    ck_assert_int_eq(cudaMalloc(&q, 1 << 20), cudaSuccess);
    ck_assert_uint_eq((uintptr_t)q % 256, 0);
    ck_assert_int_eq(cudaHostAlloc(&p, (1 << 12) + 1, 0), cudaErrorMemoryAllocation);
}
END_TEST

START_TEST(a_lost_device_stays_lost)
{
    uint64_t calls = 0;
    for (long n = 0; n < 12; n++) {
        emu_options o = emu_defaults();
        o.lose_after = n;
        emu_reset(&o);
        cudaError_t r = cudaSuccess;
        cudaStream_t s;
        void *p, *q;
        for (calls = 0; r == cudaSuccess && calls < 20; calls++)
            r = calls == 0 ? cudaStreamCreateWithFlags(&s, 1) : calls == 1 ? cudaMalloc(&p, 256) : calls == 2 ? cudaHostAlloc(&q, 256, 0)
                : calls % 2 ? cudaMemcpyAsync(p, q, 256, cudaMemcpyDefault, s) : cudaStreamSynchronize(s);
        ck_assert_uint_eq(calls, (uint64_t)n + 1);
        ck_assert_int_eq(r, cudaErrorLaunchFailure);
        ck_assert_int_eq(cudaGetLastError(), cudaErrorLaunchFailure);
        ck_assert_int_eq(cudaGetLastError(), cudaErrorLaunchFailure);
        ck_assert_int_eq(cudaMalloc(&p, 1), cudaErrorLaunchFailure);
    }
}
END_TEST

/* ---- products ------------------------------------------------------------------------------------------------------------------- */

template <class T> static void check_product(cudaDataType type, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k)
{
    const int count = 2;
    int rows_a = op_a == CUBLAS_OP_N ? m : k, columns_a = op_a == CUBLAS_OP_N ? k : m, rows_b = op_b == CUBLAS_OP_N ? k : n, columns_b = op_b == CUBLAS_OP_N ? n : k;
    int lda = rows_a + 3, ldb = rows_b, ldc = m + 1;
    size_t size_a = (size_t)lda * columns_a, size_b = (size_t)ldb * columns_b, size_c = (size_t)ldc * n;
    T *ma, *mb;
    float *mc, *before = new float[size_c * count], alpha = 0.5f, beta = 2;
    cudaHostAlloc((void **)&ma, size_a * count * sizeof(T), 0);
    cudaHostAlloc((void **)&mb, size_b * count * sizeof(T), 0);
    cudaHostAlloc((void **)&mc, size_c * count * sizeof *mc, 0);
    t_rng rng = t_seed(3);
    for (size_t i = 0; i < size_a * count; i++)
        ma[i] = T(t_normal(&rng));
    for (size_t i = 0; i < size_b * count; i++)
        mb[i] = T(t_normal(&rng));
    for (size_t i = 0; i < size_c * count; i++)
        before[i] = mc[i] = t_normal(&rng);
    cublasHandle_t blas;
    cublasCreate(&blas);
    cublasSetStream(blas, a);
    ck_assert_int_eq(cublasGemmStridedBatchedEx(blas, op_a, op_b, m, n, k, &alpha, ma, type, lda, (long long)size_a, mb, type, ldb, (long long)size_b, &beta, mc, CUDA_R_32F, ldc,
                                                (long long)size_c, count, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                     CUBLAS_STATUS_SUCCESS);
    ck_assert(mc[0] == before[0]); /* in its stream, like all else */
    cudaStreamSynchronize(a);
    ck_assert_str_eq(emu_fault(), "");
    for (int z = 0; z < count; z++)
        for (int j = 0; j < n; j++)
            for (int i = 0; i < ldc; i++) {
                size_t at = size_c * z + (size_t)j * ldc + i;
                double sum = 0, magnitude = fabs(2.0 * before[at]);
                for (int l = 0; l < k && i < m; l++) {
                    double x = (float)ma[size_a * z + (op_a == CUBLAS_OP_N ? (size_t)l * lda + i : (size_t)i * lda + l)];
                    double y = (float)mb[size_b * z + (op_b == CUBLAS_OP_N ? (size_t)j * ldb + l : (size_t)l * ldb + j)];
                    sum += x * y;
                    magnitude += fabs(x * y);
                }
                if (i < m)
                    ck_assert(fabs(mc[at] - (0.5 * sum + 2.0 * before[at])) <= magnitude * (k + 3) * ldexp(1, -24)); /* float32: a rounding a step */
                else
                    ck_assert(mc[at] == before[at]);
            }
    cublasDestroy(blas);
    delete[] before;
}

START_TEST(products_of_each_kind)
{
    for (int i = 0; i < 4; i++) {
        cublasOperation_t op_a = i & 1 ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = i & 2 ? CUBLAS_OP_T : CUBLAS_OP_N;
        check_product<float>(CUDA_R_32F, op_a, op_b, 37, 9, 50);
        check_product<__half>(CUDA_R_16F, op_a, op_b, 16, 5, 33);
        check_product<__nv_bfloat16>(CUDA_R_16BF, op_a, op_b, 5, 1, 128);
    }
}
END_TEST

int main()
{
    Suite *s = suite_create("emu");
    TCase *t = tcase_create("runtime");
    tcase_add_checked_fixture(t, set_up, nullptr);
    tcase_add_test(t, nothing_is_done_before_it_is_waited_for);
    tcase_add_test(t, an_event_is_waited_for_with_what_comes_before);
    tcase_add_test(t, a_wait_is_for_what_the_event_was_then);
    tcase_add_test(t, a_missing_wait_shows);
    tcase_add_test(t, pageable_memory_is_staged_and_pinned_is_not);
    tcase_add_test(t, rows_of_a_copy);
    tcase_add_test(t, mistakes_are_told);
    tcase_add_test(t, memory_ends);
    tcase_add_test(t, a_lost_device_stays_lost);
    tcase_add_test(t, products_of_each_kind);
    suite_add_tcase(s, t);
    return t_run(s);
}
