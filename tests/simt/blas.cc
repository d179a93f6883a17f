/* Products of matrices in cuBLAS's place, in float32. */
#include "cublas_v2.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "queue.h"

#include <algorithm>
#include <vector>

struct simt_blas {
    cudaStream_t stream;
};

struct product {
    bool transposed_a, transposed_b;
    int m, n, k, lda, ldb, ldc, count;
    float alpha, beta;
    const void *a, *b;
    float *c;
    long long stride_a, stride_b, stride_c; /* elements */
    cudaDataType type;
};

static float element(const void *p, size_t i, cudaDataType type)
{
    return type == CUDA_R_32F ? ((const float *)p)[i] : type == CUDA_R_16F ? (float)((const __half *)p)[i] : (float)((const __nv_bfloat16 *)p)[i];
}

/* ROWS rows of op(A) and COLUMNS columns of op(B) at a time: a [k][ROWS], b [COLUMNS][k]. Vectors are of rows, so each sum stays in order. */
enum { ROWS = 16, COLUMNS = 4 };
typedef float half_rows __attribute__((vector_size(ROWS / 2 * sizeof(float)), aligned(4)));
__attribute__((always_inline)) static inline void tile(float (*sum)[ROWS], const float *a, const float *const *b, int k)
{
    half_rows s[COLUMNS][2] = {};
    for (int l = 0; l < k; l++) {
        const half_rows *x = (const half_rows *)(a + (size_t)l * ROWS);
#pragma GCC unroll 8
        for (int j = 0; j < COLUMNS; j++) {
            s[j][0] += x[0] * b[j][l];
            s[j][1] += x[1] * b[j][l];
        }
    }
    memcpy(sum, s, sizeof s);
}
#ifdef __x86_64__
__attribute__((target("avx2"))) static void tile_avx2(float (*sum)[ROWS], const float *a, const float *const *b, int k)
{
    tile(sum, a, b, k);
}
#endif
static void tile_any(float (*sum)[ROWS], const float *a, const float *const *b, int k)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2"))
        return tile_avx2(sum, a, b, k);
#endif
    tile(sum, a, b, k);
}

/* cuBLAS chooses by the shape how it cuts a sum, and here, too, another shape may give other bits: `cuts` parts of k one after the other. */
static void sum_tile(float (*sum)[ROWS], const float *a, const float *const *b, int k, int cuts)
{
    for (int i = 0; i < cuts; i++) {
        float part[COLUMNS][ROWS];
        const float *of[COLUMNS];
        int from = (int)((long long)k * i / cuts), to = (int)((long long)k * (i + 1) / cuts);
        for (int j = 0; j < COLUMNS; j++)
            of[j] = b[j] + from;
        tile_any(part, a + (size_t)from * ROWS, of, to - from);
        for (int j = 0; j < COLUMNS; j++)
            for (int r = 0; r < ROWS; r++)
                sum[j][r] += part[j][r];
    }
}

static void multiply_one(const product &p, const void *a, const void *b, float *c)
{
    std::vector<float> columns((size_t)p.n * p.k), rows((size_t)p.k * ROWS);
    const int cuts = 1 + (p.m + p.n) % 3;
    int n_used = 0; /* behind these there are zeros alone, which are not multiplied: products of few tokens are filled up with many */
    for (int j = 0; j < p.n; j++)
        for (int l = 0; l < p.k; l++) {
            float &to = columns[(size_t)j * p.k + l];
            to = element(b, p.transposed_b ? (size_t)l * p.ldb + j : (size_t)j * p.ldb + l, p.type);
            n_used = to == 0 ? n_used : j + 1;
        }
    for (int i0 = 0; i0 < p.m; i0 += ROWS) {
        int n_rows = std::min((int)ROWS, p.m - i0);
        for (int i = 0; i < n_rows; i++)
            for (int l = 0; l < p.k; l++)
                rows[(size_t)l * ROWS + i] = element(a, p.transposed_a ? (size_t)(i0 + i) * p.lda + l : (size_t)l * p.lda + i0 + i, p.type);
        for (int j0 = 0; j0 < p.n; j0 += COLUMNS) {
            int n_columns = std::min((int)COLUMNS, p.n - j0);
            float sum[COLUMNS][ROWS] = {};
            const float *of[COLUMNS];
            for (int j = 0; j < COLUMNS; j++)
                of[j] = &columns[(size_t)(j0 + std::min(j, n_columns - 1)) * p.k];
            if (j0 < n_used)
                sum_tile(sum, rows.data(), of, p.k, cuts);
            for (int j = 0; j < n_columns; j++)
                for (int i = 0; i < n_rows; i++) {
                    float &to = c[(size_t)(j0 + j) * p.ldc + i0 + i];
                    to = p.beta == 0.0f ? p.alpha * sum[j][i] : p.alpha * sum[j][i] + p.beta * to;
                }
        }
    }
}

static void multiply(const product &p)
{
    size_t size = p.type == CUDA_R_32F ? 4 : 2;
    for (int i = 0; i < p.count; i++)
        multiply_one(p, (const char *)p.a + (size_t)(p.stride_a * i) * size, (const char *)p.b + (size_t)(p.stride_b * i) * size, p.c + p.stride_c * i);
}

cublasStatus_t cublasCreate(cublasHandle_t *handle)
{
    if (cudaPeekAtLastError() == cudaErrorLaunchFailure)
        return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = new simt_blas();
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle)
{
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream)
{
    handle->stream = stream;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t, void *workspace, size_t bytes)
{
    if (workspace && simt_memory_kind(workspace, bytes, "cublasSetWorkspace") != SIMT_DEVICE)
        return CUBLAS_STATUS_INVALID_VALUE;
    return CUBLAS_STATUS_SUCCESS;
}

const char *cublasGetStatusString(cublasStatus_t status)
{
    return status == CUBLAS_STATUS_SUCCESS ? "success" : status == CUBLAS_STATUS_EXECUTION_FAILED ? "the GPU program failed to execute" : "failure";
}

/* Bytes from the first element of a matrix of `columns` columns of `rows` to behind the last. */
static size_t extent(int rows, int columns, int ld, long long stride, int count, size_t size)
{
    return ((size_t)stride * (size_t)(count - 1) + (size_t)(columns - 1) * (size_t)ld + (size_t)rows) * size;
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const void *alpha,
                                          const void *a, cudaDataType type_a, int lda, long long stride_a, const void *b, cudaDataType type_b, int ldb,
                                          long long stride_b, const void *beta, void *c, cudaDataType type_c, int ldc, long long stride_c, int count,
                                          cublasComputeType_t, cublasGemmAlgo_t)
{
    bool ta = op_a == CUBLAS_OP_T, tb = op_b == CUBLAS_OP_T;
    if (type_a != type_b || type_c != CUDA_R_32F)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (m < 0 || n < 0 || k < 0 || count < 0 || lda < std::max(1, ta ? k : m) || ldb < std::max(1, tb ? n : k) || ldc < std::max(1, m))
        return CUBLAS_STATUS_INVALID_VALUE;
    if (!m || !n || !count)
        return CUBLAS_STATUS_SUCCESS;
    size_t size = type_a == CUDA_R_32F ? 4 : 2;
    simt_kind kinds[] = {simt_memory_kind(a, k ? extent(ta ? k : m, ta ? m : k, lda, stride_a, count, size) : 0, "cuBLAS: A"),
                         simt_memory_kind(b, k ? extent(tb ? n : k, tb ? k : n, ldb, stride_b, count, size) : 0, "cuBLAS: B"),
                         simt_memory_kind(c, extent(m, n, ldc, stride_c, count, sizeof(float)), "cuBLAS: C")};
    for (simt_kind kind : kinds)
        if (kind == SIMT_PAGEABLE) {
            simt_fault("cuBLAS: a matrix is in pageable memory of the host");
            return CUBLAS_STATUS_EXECUTION_FAILED;
        }
    product p = {ta, tb, m, n, k, lda, ldb, ldc, count, *(const float *)alpha, *(const float *)beta, a, b, (float *)c, stride_a, stride_b, stride_c, type_a};
    emu_queue(handle->stream, [p] { multiply(p); });
    return cudaPeekAtLastError() == cudaErrorLaunchFailure ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, const void *alpha, const void *a,
                            cudaDataType type_a, int lda, const void *b, cudaDataType type_b, int ldb, const void *beta, void *c, cudaDataType type_c, int ldc,
                            cublasComputeType_t compute, cublasGemmAlgo_t algo)
{
    return cublasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, alpha, a, type_a, lda, 0, b, type_b, ldb, 0, beta, c, type_c, ldc, 0, 1, compute, algo);
}
