/* What the .cu files share: the context, how kernels are launched, how errors stick.
 *
 * The same files are compiled by nvcc, and as C++ against the SIMT emulation in tests/simt (which has its own cuda_runtime.h, cuda_fp16.h, cuda_bf16.h,
 * mma.h and cublas_v2.h). So a kernel is launched by GPU_LAUNCH, shared memory whose size the launch gives is declared by GPU_SHARED, and threads leave a
 * kernel that has barriers only together.
 */
#ifndef RETRIEVALD_CUDA_PRIVATE_CUH
#define RETRIEVALD_CUDA_PRIVATE_CUH

#include "gpu.h"

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

enum { GPU_WARP = 32 };
enum { GPU_MATMUL_TOKENS = 256, GPU_MATMUL_ROWS = 16384 }; /* of one product of matmul.cu */

/* What is known of 32 activations in 8 bits beside their codes: x ~ d code, and the sums of both halves' codes. */
struct gpu_act {
    float d;
    int16_t sum[2];
};

/* cuBLAS, loaded when a device is opened: linked, it would be 150 MB of a program that finds none, and a program that does not start without it. */
struct gpu_cublas {
    void *library;
    cublasStatus_t (*create)(cublasHandle_t *);
    cublasStatus_t (*destroy)(cublasHandle_t);
    cublasStatus_t (*set_stream)(cublasHandle_t, cudaStream_t);
    cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void *, const void *, cudaDataType, int, const void *,
                           cudaDataType, int, const void *, void *, cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t);
};

struct gpu_context {
    int device, status;
    char reason[256];
    gpu_info info;
    cudaStream_t queue[GPU_QUEUES];
    cublasHandle_t blas;
    gpu_cublas cublas;
    bool tensor_bf16;           /* the device multiplies bf16: compute capability 8.0 */

    /* gpu_reserve; each of these is used in GPU_COMPUTE alone */
    uint32_t max_cols, max_tokens;
    size_t max_elements;
    int8_t *act_q;              /* matvec.cu: x in 8 bits [max_cols] */
    gpu_act *act;               /* [max_cols / 32] */
    void *matmul_w, *matmul_x;  /* matmul.cu: rows of a weight [max_elements] and activations [max_tokens][max_cols], bf16 or float32 */
    float *matmul_y;            /* outputs [GPU_MATMUL_TOKENS][GPU_MATMUL_ROWS] */
};

struct gpu_event {
    cudaEvent_t event;
};

/* Makes a failure stick, unless there is one already. what: the call or kernel. Returns the context's status. */
int gpu_fail(gpu_context *g, const char *what, cudaError_t error);

/* Whether a call went well; once one did not, nothing is called any more. */
#define GPU_TRY(g, call) ((g)->status ? (g)->status : gpu_fail(g, #call, call))

#ifdef GPU_SIMT
#define GPU_LAUNCH(g, kernel, grid, block, shared_bytes, ...)                                                                              \
    ((g)->status ? (g)->status : gpu_fail(g, #kernel, simt_launch(#kernel, kernel, grid, block, shared_bytes, (g)->queue[GPU_COMPUTE], __VA_ARGS__)))
#else
#define GPU_LAUNCH(g, kernel, grid, block, shared_bytes, ...)                                                                              \
    ((g)->status ? (g)->status : (kernel<<<grid, block, shared_bytes, (g)->queue[GPU_COMPUTE]>>>(__VA_ARGS__), gpu_fail(g, #kernel, cudaGetLastError())))
/* type name[]: the shared memory of this launch, 128-byte aligned. */
#define GPU_SHARED(type, name)                                                                                                             \
    extern __shared__ __align__(128) unsigned char gpu_shared_bytes[];                                                                      \
    type *name = reinterpret_cast<type *>(gpu_shared_bytes)
#endif

/* out [n][cols] bf16 or float32 = rows ids[i] (device; NULL: i) of a weight, times scale (dequantize.cu). */
int gpu_dequantize(gpu_context *g, const gpu_weight *w, const int32_t *ids, uint32_t n, void *out, bool bf16, float scale);

static inline unsigned gpu_blocks(size_t n, unsigned per_block)
{
    return (unsigned)((n + per_block - 1) / per_block);
}

#endif
