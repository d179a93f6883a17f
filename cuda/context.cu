/* A device: opening it, memory, the three queues, events, copies. */
#include "private.cuh"

#include <dlfcn.h>
#include <errno.h>
#include <new>
#include <stdio.h>
#include <string.h>

enum { MIN_MAJOR = 7, MIN_MINOR = 5 };

int gpu_fail(gpu_context *g, const char *what, cudaError_t error)
{
    if (error == cudaSuccess || g->status)
        return g->status;
    g->status = error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver ? -ENODEV : -EIO;
    snprintf(g->reason, sizeof g->reason, "device %d, %.*s: %s", g->device, (int)strcspn(what, "("), what, cudaGetErrorString(error));
    return g->status;
}

/* Why there is no device to open; 0 when there is. */
static int find_device(int index, char *err, size_t errlen)
{
    int n = 0;
    cudaError_t r = cudaGetDeviceCount(&n);
    if (r == cudaErrorInsufficientDriver) {
        int driver = 0;
        cudaDriverGetVersion(&driver);
        if (driver)
            snprintf(err, errlen, "device %d: the driver knows CUDA %d.%d, and this program needs %d.%d", index, driver / 1000, driver % 1000 / 10,
                     CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
        else
            snprintf(err, errlen, "device %d: there is no NVIDIA driver", index);
        return -ENODEV;
    }
    if (r != cudaSuccess) {
        snprintf(err, errlen, "device %d: %s", index, cudaGetErrorString(r));
        return -ENODEV;
    }
    if (index < 0 || index >= n) {
        snprintf(err, errlen, "device %d: there are %d", index, n);
        return -ENODEV;
    }
    return 0;
}

#ifdef GPU_SIMT
static int load_cublas(gpu_context *g)
{
    g->cublas = {nullptr, cublasCreate, cublasDestroy, cublasSetStream, cublasGemmEx};
    return 0;
}
#else
#define TEXT_OF(x) #x
#define SONAME(major) "libcublas.so." TEXT_OF(major)

template <class F> static bool find(void *library, const char *name, F *ret)
{
    *ret = reinterpret_cast<F>(dlsym(library, name));
    return *ret;
}

static int load_cublas(gpu_context *g)
{
    gpu_cublas *c = &g->cublas;
    c->library = dlopen(SONAME(CUBLAS_VER_MAJOR), RTLD_NOW | RTLD_LOCAL);
    if (c->library && find(c->library, "cublasCreate_v2", &c->create) && find(c->library, "cublasDestroy_v2", &c->destroy) &&
        find(c->library, "cublasSetStream_v2", &c->set_stream) && find(c->library, "cublasGemmEx", &c->gemm))
        return 0;
    g->status = -ENODEV;
    snprintf(g->reason, sizeof g->reason, "device %d: cuBLAS cannot be loaded: %.160s", g->device, dlerror());
    return g->status;
}
#endif

static int open_queues(gpu_context *g)
{
    for (int i = 0; i < GPU_QUEUES; i++)
        if (GPU_TRY(g, cudaStreamCreateWithFlags(&g->queue[i], cudaStreamNonBlocking)) < 0)
            return g->status;
    if (load_cublas(g) < 0)
        return g->status;
    if (g->cublas.create(&g->blas) != CUBLAS_STATUS_SUCCESS || g->cublas.set_stream(g->blas, g->queue[GPU_COMPUTE]) != CUBLAS_STATUS_SUCCESS)
        return gpu_fail(g, "cublasCreate", cudaErrorInitializationError);
    return 0;
}

int gpu_open(int index, gpu_context **ret, char *err, size_t errlen)
{
    int r = find_device(index, err, errlen);
    if (r < 0)
        return r;
    gpu_context *g = new (std::nothrow) gpu_context();
    if (!g) {
        snprintf(err, errlen, "out of memory");
        return -ENOMEM;
    }
    g->device = index;
    cudaDeviceProp prop;
    GPU_TRY(g, cudaSetDevice(index));
    if (GPU_TRY(g, cudaGetDeviceProperties(&prop, index)) == 0) {
        snprintf(g->info.name, sizeof g->info.name, "%.100s", prop.name);
        g->info.major = (uint32_t)prop.major;
        g->info.minor = (uint32_t)prop.minor;
        g->info.n_sm = (uint32_t)prop.multiProcessorCount;
        g->tensor_bf16 = prop.major >= 8;
        if (prop.major < MIN_MAJOR || (prop.major == MIN_MAJOR && prop.minor < MIN_MINOR)) {
            g->status = -ENODEV;
            snprintf(g->reason, sizeof g->reason, "device %d, %.100s: compute capability %d.%d, and %d.%d is the least that is supported", index, prop.name, prop.major,
                     prop.minor, MIN_MAJOR, MIN_MINOR);
        }
    }
    if (g->status == 0)
        open_queues(g);
    if (g->status < 0) {
        r = g->status;
        snprintf(err, errlen, "%s", g->reason);
        gpu_close(g);
        return r;
    }
    *ret = g;
    return 0;
}

void gpu_close(gpu_context *g)
{
    if (!g)
        return;
    for (int i = 0; i < GPU_QUEUES; i++)
        if (g->queue[i])
            cudaStreamSynchronize(g->queue[i]);
    void *scratch[] = {g->act_q, g->act, g->matmul_w, g->matmul_x, g->matmul_y};
    for (void *p : scratch)
        cudaFree(p);
    if (g->blas)
        g->cublas.destroy(g->blas);
    for (int i = 0; i < GPU_QUEUES; i++)
        if (g->queue[i])
            cudaStreamDestroy(g->queue[i]);
#ifndef GPU_SIMT
    if (g->cublas.library)
        dlclose(g->cublas.library);
#endif
    delete g;
}

int gpu_info_get(gpu_context *g, gpu_info *ret)
{
    size_t free, total;
    if (GPU_TRY(g, cudaMemGetInfo(&free, &total)) < 0)
        return g->status;
    *ret = g->info;
    ret->free = free;
    ret->total = total;
    return 0;
}

int gpu_status(const gpu_context *g)
{
    return g->status;
}

const char *gpu_reason(const gpu_context *g)
{
    return g->reason;
}

/* ---- memory -------------------------------------------------------------------------------------------------------- */

/* What an allocation gave: -ENOMEM does not stick, all else does. */
static int allocated(gpu_context *g, const char *what, cudaError_t r)
{
    if (r != cudaErrorMemoryAllocation)
        return gpu_fail(g, what, r);
    cudaGetLastError(); /* or the next launch would find it */
    return -ENOMEM;
}

int gpu_alloc(gpu_context *g, size_t bytes, void **ret_device)
{
    void *p;
    int r = g->status ? g->status : allocated(g, "cudaMalloc", cudaMalloc(&p, bytes ? bytes : 1));
    if (r == 0)
        *ret_device = p;
    return r;
}

void gpu_free(gpu_context *g, void *device)
{
    (void)g;
    cudaFree(device);
}

int gpu_pin(gpu_context *g, size_t bytes, void **ret_pinned)
{
    void *p;
    int r = g->status ? g->status : allocated(g, "cudaHostAlloc", cudaHostAlloc(&p, bytes ? bytes : 1, cudaHostAllocDefault));
    if (r == 0)
        *ret_pinned = p;
    return r;
}

void gpu_unpin(gpu_context *g, void *pinned)
{
    (void)g;
    cudaFreeHost(pinned);
}

enum { SCRATCH = 5 };

/* size: of an element that matmul.cu multiplies. */
static void scratch_bytes(uint32_t max_cols, size_t max_elements, uint32_t max_tokens, size_t size, size_t *ret)
{
    const size_t blocks = ((size_t)max_cols + 31) / 32;
    const size_t tokens = ((size_t)max_tokens + GPU_MATMUL_TOKENS - 1) / GPU_MATMUL_TOKENS * GPU_MATMUL_TOKENS;
    const size_t bytes[SCRATCH] = {blocks * 32, blocks * sizeof(gpu_act), max_elements * size, tokens * max_cols * size,
                                   (size_t)GPU_MATMUL_TOKENS * GPU_MATMUL_ROWS * sizeof(float)};
    memcpy(ret, bytes, sizeof bytes);
}

size_t gpu_reserve_bytes(uint32_t max_cols, size_t max_elements, uint32_t max_tokens)
{
    size_t bytes[SCRATCH], sum = 0;
    scratch_bytes(max_cols, max_elements, max_tokens, sizeof(float), bytes);
    for (size_t b : bytes)
        sum += b + 256; /* as gpu_alloc aligns */
    return sum;
}

int gpu_reserve(gpu_context *g, uint32_t max_cols, size_t max_elements, uint32_t max_tokens)
{
    void **const to[SCRATCH] = {(void **)&g->act_q, (void **)&g->act, &g->matmul_w, &g->matmul_x, (void **)&g->matmul_y};
    size_t bytes[SCRATCH];
    scratch_bytes(max_cols, max_elements, max_tokens, g->tensor_bf16 ? sizeof(__nv_bfloat16) : sizeof(float), bytes);
    for (int i = 0; i < SCRATCH; i++) {
        int r = gpu_alloc(g, bytes[i], to[i]);
        if (r < 0)
            return r;
    }
    g->max_cols = max_cols;
    g->max_elements = max_elements;
    g->max_tokens = max_tokens;
    return 0;
}

/* ---- order --------------------------------------------------------------------------------------------------------- */

int gpu_event_new(gpu_context *g, bool timed, gpu_event **ret)
{
    cudaEvent_t event;
    if (GPU_TRY(g, cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming)) < 0)
        return g->status;
    gpu_event *e = new (std::nothrow) gpu_event();
    if (!e) {
        cudaEventDestroy(event);
        return -ENOMEM;
    }
    e->event = event;
    *ret = e;
    return 0;
}

void gpu_event_free(gpu_context *g, gpu_event *e)
{
    (void)g;
    if (e)
        cudaEventDestroy(e->event);
    delete e;
}

int gpu_record(gpu_context *g, gpu_event *e, gpu_queue q)
{
    return GPU_TRY(g, cudaEventRecord(e->event, g->queue[q]));
}

int gpu_wait(gpu_context *g, gpu_queue q, gpu_event *e)
{
    return GPU_TRY(g, cudaStreamWaitEvent(g->queue[q], e->event, 0));
}

int gpu_finish(gpu_context *g, gpu_event *e)
{
    return GPU_TRY(g, cudaEventSynchronize(e->event));
}

int gpu_happened(gpu_context *g, gpu_event *e)
{
    cudaError_t r = g->status ? cudaSuccess : cudaEventQuery(e->event);
    if (r != cudaErrorNotReady)
        return g->status || gpu_fail(g, "cudaEventQuery", r) ? g->status : 1;
    cudaGetLastError(); /* or the next launch would find it */
    return 0;
}

int gpu_elapsed(gpu_context *g, const gpu_event *from, const gpu_event *to, double *ret_ms)
{
    float ms;
    if (GPU_TRY(g, cudaEventElapsedTime(&ms, from->event, to->event)) == 0)
        *ret_ms = ms;
    return g->status;
}

int gpu_drain(gpu_context *g)
{
    for (int i = 0; i < GPU_QUEUES; i++)
        GPU_TRY(g, cudaStreamSynchronize(g->queue[i]));
    return g->status;
}

int gpu_copy(gpu_context *g, gpu_queue q, void *dst, const void *src, size_t bytes)
{
    return bytes ? GPU_TRY(g, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, g->queue[q])) : g->status;
}

/* Not cudaMemcpy: that may return before its last part is in device memory, and the queues do not wait for it. */
int gpu_upload(gpu_context *g, void *device, const void *src, size_t bytes)
{
    if (bytes)
        GPU_TRY(g, cudaMemcpyAsync(device, src, bytes, cudaMemcpyHostToDevice, g->queue[GPU_TO_DEVICE]));
    return GPU_TRY(g, cudaStreamSynchronize(g->queue[GPU_TO_DEVICE]));
}

int gpu_zero(gpu_context *g, gpu_queue q, void *device, size_t bytes)
{
    return bytes ? GPU_TRY(g, cudaMemsetAsync(device, 0, bytes, g->queue[q])) : g->status;
}
