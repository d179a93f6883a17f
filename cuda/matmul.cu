/* Prefill: a weight times many tokens. Rows of the weight and the tokens become bf16 in scratch, and cuBLAS multiplies them with float32 sums.
 *
 * A token's bits should depend on that token alone, for what is kept of a prefix is used again by prompts of another length (design section 4). Within one
 * product that is so: each output is a sum over k in an order that its place does not change. But cuBLAS chooses kernels, and with them that order, by the
 * shape. It gives the same bits for the same call on the same device (one queue, one library version: what its documentation promises). So every product
 * here has the same shape for a weight: GPU_MATMUL_TOKENS tokens, the last ones filled up with zeros, whose outputs are made beside y; and rows that depend
 * on the weight and the scratch alone. A short prompt pays for the zeros about as much as for turning the weights into bf16.
 */
#include "private.cuh"

#include <assert.h>

enum { THREADS = 256, TOKENS = GPU_MATMUL_TOKENS };

template <typename In> static __device__ __forceinline__ In rounded(float v);

template <> __device__ __forceinline__ float rounded(float v)
{
    return v;
}

template <> __device__ __forceinline__ __nv_bfloat16 rounded(float v)
{
    return __float2bfloat16_rn(v);
}

/* out [total] = x [n], then zeros. */
template <typename In> static __global__ void put_tokens(In *out, const float *x, size_t n, size_t total)
{
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < total)
        out[i] = rounded<In>(i < n ? x[i] : 0);
}

/* y [n][stride] = or += part [n][rows] */
static __global__ void take_tokens(float *y, size_t stride, const float *part, uint32_t rows, uint32_t n, bool add)
{
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < (size_t)n * rows) {
        float *to = y + i / rows * stride + i % rows;
        *to = add ? part[i] + *to : part[i];
    }
}

/* c [TOKENS][ldc] = or += x [TOKENS][cols] times w [rows][cols] transposed. cuBLAS counts columns first: there it is c = w^T x. */
static int multiply(gpu_context *g, float *c, uint32_t ldc, const void *w, uint32_t rows, uint32_t cols, const void *x, bool add)
{
    if (g->status)
        return g->status;
    const float one = 1, beta = add;
    cudaDataType type = g->tensor_bf16 ? CUDA_R_16BF : CUDA_R_32F;
    cublasStatus_t r = g->cublas.gemm(g->blas, CUBLAS_OP_T, CUBLAS_OP_N, (int)rows, TOKENS, (int)cols, &one, w, type, (int)cols, x, type, (int)cols, &beta, c,
                                    CUDA_R_32F, (int)ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    return r == CUBLAS_STATUS_SUCCESS ? 0 : gpu_fail(g, "cublasGemmEx", cudaErrorUnknown);
}

/* Rows [from, from + rows) of the weight, which are in the scratch, times all tokens. */
static int multiply_rows(gpu_context *g, const gpu_weight *w, float *y, uint32_t from, uint32_t rows, uint32_t n_tokens, bool add)
{
    const size_t size = g->tensor_bf16 ? sizeof(__nv_bfloat16) : sizeof(float);
    for (uint32_t t = 0; t < n_tokens; t += TOKENS) {
        const char *x = (const char *)g->matmul_x + (size_t)t * w->cols * size;
        float *to = y + (size_t)t * w->rows + from;
        uint32_t n = n_tokens - t;
        if (n >= TOKENS) {
            multiply(g, to, w->rows, g->matmul_w, rows, w->cols, x, add);
            continue;
        }
        multiply(g, g->matmul_y, rows, g->matmul_w, rows, w->cols, x, false);
        GPU_LAUNCH(g, take_tokens, gpu_blocks((size_t)n * rows, THREADS), THREADS, 0, to, (size_t)w->rows, g->matmul_y, rows, n, add);
    }
    return g->status;
}

int gpu_matmul(gpu_context *g, const gpu_weight *w, float *y, const float *x, uint32_t n_tokens, bool add)
{
    assert(w->cols <= g->max_cols && w->cols <= g->max_elements && n_tokens <= g->max_tokens);
    if (!n_tokens || !w->rows)
        return g->status;
    if (!w->cols)
        return add ? g->status : gpu_zero(g, GPU_COMPUTE, y, (size_t)n_tokens * w->rows * sizeof *y);
    const size_t n = (size_t)n_tokens * w->cols, total = ((size_t)n_tokens + TOKENS - 1) / TOKENS * TOKENS * w->cols;
    if (g->tensor_bf16)
        GPU_LAUNCH(g, put_tokens<__nv_bfloat16>, gpu_blocks(total, THREADS), THREADS, 0, (__nv_bfloat16 *)g->matmul_x, x, n, total);
    else
        GPU_LAUNCH(g, put_tokens<float>, gpu_blocks(total, THREADS), THREADS, 0, (float *)g->matmul_x, x, n, total);
    size_t most = g->max_elements / w->cols;
    most = most < (size_t)GPU_MATMUL_ROWS ? most : (size_t)GPU_MATMUL_ROWS;
    for (size_t from = 0; from < w->rows; from += most) {
        gpu_weight part = *w;
        part.data = (const char *)w->data + from * w->row_bytes;
        part.rows = (uint32_t)(w->rows - from < most ? w->rows - from : most);
        gpu_dequantize(g, &part, NULL, part.rows, g->matmul_w, g->tensor_bf16, 1);
        multiply_rows(g, w, y, (uint32_t)from, part.rows, n_tokens, add);
    }
    return g->status;
}
