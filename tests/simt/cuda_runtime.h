/* Stands in for CUDA's header of this name when the kernels are compiled as C++: the language's words, the built-in variables and functions, and the calls of
 * the runtime that the .cu files use, as CUDA 13 declares them. */
#ifndef RETRIEVALD_SIMT_CUDA_RUNTIME_H
#define RETRIEVALD_SIMT_CUDA_RUNTIME_H

#include "simt.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__
/* type name[]: the shared memory of this launch. */
#define GPU_SHARED(type, name) type *name = reinterpret_cast<type *>(simt_dynamic)

#define threadIdx (simt_self->index)
#define blockIdx simt_block
#define blockDim simt_block_dim
#define gridDim simt_grid_dim
enum { warpSize = SIMT_WARP };

/* ---- vectors ---------------------------------------------------------------------------------------------------------- */

#define SIMT_VECTORS(type, name, align2, align4)                                                                                           \
    struct name##1 { type x; };                                                                                                            \
    struct alignas(align2) name##2 { type x, y; };                                                                                         \
    struct name##3 { type x, y, z; };                                                                                                      \
    struct alignas(align4) name##4 { type x, y, z, w; };                                                                                   \
    static inline name##2 make_##name##2(type x, type y) { return {x, y}; }                                                                \
    static inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }                                                     \
    static inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
#define uint3 simt_uint3 /* that one is in simt.h */
SIMT_VECTORS(signed char, char, 2, 4)
SIMT_VECTORS(unsigned char, uchar, 2, 4)
SIMT_VECTORS(short, short, 4, 8)
SIMT_VECTORS(unsigned short, ushort, 4, 8)
SIMT_VECTORS(int, int, 8, 16)
SIMT_VECTORS(unsigned, uint, 8, 16)
SIMT_VECTORS(float, float, 8, 16)
SIMT_VECTORS(double, double, 16, 16)
#undef uint3

/* ---- threads together --------------------------------------------------------------------------------------------------- */

#define SIMT_LINE int line = __builtin_LINE()

static inline void __syncthreads(SIMT_LINE) { simt_barrier(false, line); }
static inline int __syncthreads_count(int p, SIMT_LINE) { return (int)simt_barrier(p != 0, line); }
static inline int __syncthreads_or(int p, SIMT_LINE) { return simt_barrier(p != 0, line) != 0; }
static inline int __syncthreads_and(int p, SIMT_LINE) { return simt_barrier(p == 0, line) == 0; }
static inline void __syncwarp(unsigned mask = ~0u, SIMT_LINE) { simt_warp_sync(mask, line); }
static inline unsigned __ballot_sync(unsigned mask, int p, SIMT_LINE) { return simt_ballot(mask, p != 0, line); }
static inline int __any_sync(unsigned mask, int p, SIMT_LINE) { return simt_ballot(mask, p != 0, line) != 0; }
static inline int __all_sync(unsigned mask, int p, SIMT_LINE) { return simt_ballot(mask, p == 0, line) == 0; }

/* The lanes of a shuffle are parts of `width`, a power of two. */
template <class T> static inline T simt_shuffle_as(unsigned mask, T v, unsigned source, int line)
{
    static_assert(sizeof v <= sizeof(uint64_t), "a shuffle moves up to 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &v, sizeof v);
    bits = simt_shuffle(mask, bits, source, line);
    memcpy(&v, &bits, sizeof v);
    return v;
}
template <class T> static inline T __shfl_sync(unsigned mask, T v, int source, int width = 32, SIMT_LINE)
{
    unsigned w = (unsigned)width;
    return simt_shuffle_as(mask, v, (simt_self->lane & ~(w - 1)) | ((unsigned)source & (w - 1)), line);
}
template <class T> static inline T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32, SIMT_LINE)
{
    unsigned lane = simt_self->lane, at = lane & ((unsigned)width - 1);
    return simt_shuffle_as(mask, v, by > at ? lane : lane - by, line);
}
template <class T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32, SIMT_LINE)
{
    unsigned lane = simt_self->lane, at = lane & ((unsigned)width - 1);
    return simt_shuffle_as(mask, v, at + by >= (unsigned)width ? lane : lane + by, line);
}
template <class T> static inline T __shfl_xor_sync(unsigned mask, T v, int with, int width = 32, SIMT_LINE)
{
    unsigned lane = simt_self->lane, from = lane ^ (unsigned)with;
    return simt_shuffle_as(mask, v, from > (lane | ((unsigned)width - 1)) ? lane : from, line);
}

/* Threads of the emulation do not run at the same time; what check.cc looks at is to leave these alone. */
#define SIMT_ATOMIC __attribute__((no_sanitize("thread"))) static inline
static inline void __threadfence() {}
static inline void __threadfence_block() {}
template <class T, class U> SIMT_ATOMIC T atomicAdd(T *p, U v) { T old = *p; *p = (T)(old + (T)v); return old; }
template <class T, class U> SIMT_ATOMIC T atomicMax(T *p, U v) { T old = *p; *p = old > (T)v ? old : (T)v; return old; }
template <class T, class U> SIMT_ATOMIC T atomicMin(T *p, U v) { T old = *p; *p = old < (T)v ? old : (T)v; return old; }
template <class T, class U> SIMT_ATOMIC T atomicOr(T *p, U v) { T old = *p; *p = old | (T)v; return old; }
template <class T, class U> SIMT_ATOMIC T atomicExch(T *p, U v) { T old = *p; *p = (T)v; return old; }
template <class T, class U, class V> SIMT_ATOMIC T atomicCAS(T *p, U expected, V v) { T old = *p; if (old == (T)expected) *p = (T)v; return old; }

/* ---- arithmetic --------------------------------------------------------------------------------------------------------- */

template <class T> static inline T __ldg(const T *p) { return *p; }
#define __expf expf /* the C library has functions of these names too */
#define __logf logf
#define __powf powf
#define __sinf sinf
#define __cosf cosf
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __frcp_rn(float x) { return 1.0f / x; }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __saturatef(float x) { return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f; }
static inline int __float2int_rn(float x) { return x != x ? 0 : x >= 0x1p31f ? INT32_MAX : x < -0x1p31f ? INT32_MIN : (int)rintf(x); }
static inline int __float2int_rz(float x) { return (int)x; }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }
static inline float __int_as_float(int x) { float r; memcpy(&r, &x, sizeof r); return r; }
static inline float __uint_as_float(unsigned x) { float r; memcpy(&r, &x, sizeof r); return r; }
static inline int __float_as_int(float x) { int r; memcpy(&r, &x, sizeof r); return r; }
static inline unsigned __float_as_uint(float x) { unsigned r; memcpy(&r, &x, sizeof r); return r; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }

static inline int __dp4a(int a, int b, int c)
{
    for (int i = 0; i < 32; i += 8)
        c += (int8_t)(a >> i) * (int8_t)(b >> i);
    return c;
}
static inline unsigned __dp4a(unsigned a, unsigned b, unsigned c)
{
    for (int i = 0; i < 32; i += 8)
        c += (uint8_t)(a >> i) * (uint8_t)(b >> i);
    return c;
}
/* The lower 32 bits of hi:lo shifted right, and the upper ones of it shifted left; by up to 31. */
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned by) { return (unsigned)(((uint64_t)hi << 32 | lo) >> (by & 31)); }
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned by) { return (unsigned)(((uint64_t)hi << 32 | lo) << (by & 31) >> 32); }
/* Byte i of the result is byte (s >> 4 i & 7) of y:x, or its sign eight times where bit 3 is set. */
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s)
{
    uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned pick = s >> (4 * i) & 15;
        uint8_t b = (uint8_t)(bytes >> (8 * (pick & 7)));
        r |= (unsigned)(uint8_t)(pick & 8 ? (int8_t)b >> 7 : b) << (8 * i);
    }
    return r;
}
/* Four bytes at a time, which wrap around. */
static inline unsigned __vsub4(unsigned a, unsigned b)
{
    unsigned r = 0;
    for (int i = 0; i < 32; i += 8)
        r |= (((a >> i) - (b >> i)) & 255u) << i;
    return r;
}
static inline unsigned __vadd4(unsigned a, unsigned b)
{
    unsigned r = 0;
    for (int i = 0; i < 32; i += 8)
        r |= (((a >> i) + (b >> i)) & 255u) << i;
    return r;
}

#define SIMT_MIN_MAX(type)                                                                                                                 \
    static inline type min(type a, type b) { return b < a ? b : a; }                                                                       \
    static inline type max(type a, type b) { return a < b ? b : a; }
SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned)
SIMT_MIN_MAX(long)
SIMT_MIN_MAX(unsigned long)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }

/* ---- the runtime (runtime.cc) --------------------------------------------------------------------------------------------- */

#define CUDART_VERSION 13000

typedef enum cudaError {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInitializationError = 3,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorInvalidResourceHandle = 400,
    cudaErrorNotReady = 600,
    cudaErrorIllegalAddress = 700,
    cudaErrorLaunchFailure = 719,
    cudaErrorUnknown = 999
} cudaError_t;

enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9 };
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum { cudaStreamDefault = 0, cudaStreamNonBlocking = 1 };
enum { cudaEventDefault = 0, cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
enum { cudaHostAllocDefault = 0, cudaHostAllocPortable = 1, cudaHostAllocMapped = 2, cudaHostAllocWriteCombined = 4 };

struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerBlockOptin;
    int major, minor, multiProcessorCount, maxThreadsPerBlock, warpSize, l2CacheSize, integrated;
};

typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;

cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *prop, int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr what, int device);
cudaError_t cudaMemGetInfo(size_t *free, size_t *total);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char *cudaGetErrorString(cudaError_t error);
const char *cudaGetErrorName(cudaError_t error);

cudaError_t cudaMalloc(void **p, size_t bytes);
cudaError_t cudaFree(void *p);
cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void *p);
template <class T> static inline cudaError_t cudaMalloc(T **p, size_t bytes) { return cudaMalloc((void **)p, bytes); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to);
cudaError_t cudaDeviceSynchronize();

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream = nullptr);
cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream = nullptr);
cudaError_t cudaMemsetAsync(void *p, int byte, size_t bytes, cudaStream_t stream = nullptr);

cudaError_t simt_func_set_attribute(const void *kernel, cudaFuncAttribute what, int value);
template <class F> static inline cudaError_t cudaFuncSetAttribute(F *kernel, cudaFuncAttribute what, int value)
{
    return simt_func_set_attribute((const void *)kernel, what, value);
}

/* ---- launches ------------------------------------------------------------------------------------------------------------- */

/* Queues a launch. Wrong sizes are a fault, and an error as CUDA gives it. */
cudaError_t simt_queue(const simt_grid &grid, cudaStream_t stream);
/* A pointer that a kernel gets is to be device or pinned memory, or null. */
void simt_check_argument(const char *kernel, int number, const void *p);

template <class T> static inline void simt_check_argument(const char *kernel, int number, const T &v)
{
    if constexpr (std::is_pointer_v<T>)
        simt_check_argument(kernel, number, (const void *)v);
}
template <class T> struct simt_same { typedef T type; };

template <class... P> static void simt_call(const void *kernel, const void *args)
{
    std::apply((void (*)(P...))kernel, *(const std::tuple<P...> *)args);
}

/* kernel<<<grid, block, shared_bytes, stream>>>(args): the arguments are converted and copied now. */
template <class... P>
static inline cudaError_t simt_launch(const char *name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
                                      typename simt_same<P>::type... args)
{
    int number = 0;
    (simt_check_argument(name, ++number, args), ...);
    auto copies = std::make_shared<std::tuple<P...>>(args...);
    return simt_queue({name, grid, block, shared_bytes, (const void *)kernel, copies, sizeof *copies, simt_call<P...>}, stream);
}

#endif
